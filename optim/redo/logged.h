/* SPDX-License-Identifier: Apache-2.0 */
/* logged.h - steps that are logged, committed and computed again (state/redo.h). */
#ifndef HITRAIN_OPTIM_REDO_LOGGED_H
#define HITRAIN_OPTIM_REDO_LOGGED_H

#include "optim/state/redo.h"

struct ht_optim;
struct ht_range;
struct ht_root;

/* ---------------------------------------------------------------- redo.c */

/* May the commit leave parameters and state out, as far as the optimizer knows? */
bool ht_opt_redo_may_log(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Deletes the unpublished object of the step, if there is one. Not locked. */
int ht_opt_redo_discard(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Is the present step of a replay the last one of a part that others follow? */
bool ht_opt_redo_ends_part(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);

/* ----------------------------------------------------------- redo_read.c */

/* Keeps a step for readers, if the words say so and it follows. Takes the reference in any case. */
void ht_opt_redo_hold(struct ht_root *root, const struct ht_redo_step *step, struct ht_obj *obj)
    HT_REQUIRES(HT_LOCK_OPTIM);

/* ---------------------------------------------------------- redo_space.c */

/*
 * The store is full (tiering/api/participant.h): roots give back space that is set aside, and then the oldest steps
 * that are kept for readers. ctx: struct ht_optim.
 */
uint64_t ht_opt_redo_could_give(void *ctx) HT_EXCLUDES(HT_LOCK_OPTIM);
uint64_t ht_opt_redo_give_up(void *ctx, uint64_t bytes) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Gives back the space that is set aside while roots recover. */
void ht_opt_redo_end_room(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM);

/* ------------------------------------------------------------ redo_log.c */

/* The first work of a running range: its gradient into the object of the step. It is queued for the rest then. */
void ht_opt_redo_log(struct ht_range *r) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * Publishes the logged step, and all below the root but parameters and state. An error: nothing, and everything is to
 * be published.
 */
int ht_opt_redo_commit(struct ht_root *root, uint64_t *out_lsn) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Before a commit of everything: the object of its step with a summary, for readers; obj NULL: none. */
struct ht_redo_held ht_opt_redo_take(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* --------------------------------------------------------- redo_replay.c */

/*
 * Under the gate, with published content: computes the root's logged steps again. An error: the root refuses all
 * changes from now on, and its error names the step. WAITS.
 */
int ht_opt_redo_replay(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* ------------------------------------------------------------- recover.c */

/* After a mount, with workers, before a client can see a model: begins to recover all roots. */
int ht_opt_redo_recover(struct ht_optim *o) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

#endif
