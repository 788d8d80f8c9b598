/* SPDX-License-Identifier: Apache-2.0 */
/* step_priv.h - inside step/. */
#ifndef HITRAIN_OPTIM_STEP_STEP_PRIV_H
#define HITRAIN_OPTIM_STEP_STEP_PRIV_H

#include "optim/optim.h"
#include "tiering/base/base.h"

struct ht_obj;
struct ht_optim;
struct ht_param;
struct ht_range;
struct ht_root;

/* ---------------------------------------------------------------- norm.c */

/*
 * At the boundary of a deferred step, draining; releases the lock in between: computes the norm, then queues
 * all updates. *out_skip: none was queued, the step is to change nothing.
 */
int ht_opt_whole_step(struct ht_root *root, bool *out_skip) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* --------------------------------------------------------------- drain.c */

/* Queues all frozen bytes that are not queued yet; drops their caches if updates follow. */
void ht_opt_queue_frozen(struct ht_root *root, bool updates) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Releases the lock while it waits, until nothing of the root is queued or running. -EIO: an update failed;
 * -ECANCELED: stopping.
 */
int ht_opt_drain(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* ------------------------------------------------------------ boundary.c */

/* Under the gate. On success the root is held: no update runs until ht_opt_release. by may be NULL. */
int ht_opt_boundary(struct ht_root *root, struct ht_optim_steer *by) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_release(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * The same in two parts. The request refuses what cannot end, else the step has no more gradients, writers of the next
 * one wait, and reads wait for the updates. *out_ticket: of caches that are to be dropped first. close does the rest.
 */
int ht_opt_boundary_request(struct ht_root *root, struct ht_optim_steer *by, uint64_t *out_ticket)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
int ht_opt_boundary_close(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* The step is over: counts it, and makes room for the next one's gradients. Releases the lock in between. */
void ht_opt_close_step(struct ht_root *root, bool skipped) HT_REQUIRES(HT_LOCK_OPTIM);
/* The same in a replay, while parts follow: the step is not counted. */
void ht_opt_close_part(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Releases the lock in between: what has become of the parameter's file. */
enum ht_optim_file ht_opt_param_file(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);

/* ---------------------------------------------------------------- step.c */

/* Takes a reference to the root and enters its gate. */
int ht_opt_step_enter(struct ht_optim *o, uint64_t id, struct ht_root **out) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/*
 * After a boundary: publishes if it is to be durable, and lets updates run again. rc: the boundary's result. k: a kept
 * step that a client asked for, or NULL.
 */
struct ht_copy;
int ht_opt_step_end(struct ht_root *root, int rc, bool durable, struct ht_copy *k)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Is a step durable when it ends, with so many that no commit has published? */
bool ht_opt_step_durable(const struct ht_root *root, uint64_t undurable) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Will the open step be published when it ends, as far as the optimizer knows? Or is it the last one of a part that a
 * replay computes? Then what its updates leave is final.
 */
bool ht_opt_step_final(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* When the caller learns of the step's end, caches are as new as the step. */
void ht_opt_step_leave(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * Makes changes below a root without an open step durable, whichever client has claimed it; the step is not counted.
 * WAITS.
 */
int ht_opt_publish_closed(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* --------------------------------------------------------------- abort.c */

/* Calls fn for every parameter of the root, with a reference held. */
void ht_opt_each_param(struct ht_root *root, void (*fn)(struct ht_param *p)) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Draining, and an abort follows: no part of the step is left to run or to write, and its gradients are forgotten.
 * *out_spare: steps are logged, and no update has run since the last one.
 */
int ht_opt_stop_step(struct ht_root *root, bool *out_spare) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* The store has gone back: takes references to the objects that exist again, and ends the open step. */
void ht_opt_forget_step(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Under the gate, draining: logged steps cannot be computed again, and parameters and state are as of the last full
 * step.
 */
void ht_opt_show_full(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * Under the gate, draining, with no update queued: everything below the root is as its last commit has published it.
 * *out_shown: an error of passthrough files, which do not show it; the rest is taken back then, too.
 */
int ht_opt_take_back(struct ht_root *root, int *out_shown) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Readers that need not wait any more go on. */
void ht_opt_wake_readers(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Ends the draining: waiting readers and writers go on, and caches are dropped. */
void ht_opt_show_all(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);

/* -------------------------------------------------------------- closer.c */

/* Ends the threads that close steps. The optimizer is stopping. */
void ht_opt_closers_join(struct ht_optim *o) HT_EXCLUDES(HT_LOCK_OPTIM);

/* ------------------------------------------------------------ redo_log.c */

/* The first work of a running range: its gradient into the object of the step. It is queued for the rest then. */
void ht_opt_redo_log(struct ht_range *r) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * The step is over, with its coverage still there: makes its summary, or the next commit publishes everything. Is it
 * logged, or computed again?
 */
bool ht_opt_redo_count(struct ht_root *root, bool skipped) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Publishes the logged step, and all below the root but parameters and state. An error: nothing, and everything is to
 * be published.
 */
int ht_opt_redo_commit(struct ht_root *root, uint64_t *out_lsn) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Before a commit of everything: the object of its step with a summary, for readers; obj NULL: none. */
struct ht_redo_held ht_opt_redo_take(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Ends the writer. The optimizer is stopping. */
void ht_opt_redo_join(struct ht_optim *o) HT_EXCLUDES(HT_LOCK_OPTIM);

/* --------------------------------------------------------- redo_sparse.c */

/*
 * Elements [off, off + len) of an object, of so many bytes each: do they take at most half of their bytes as entries?
 * Their bytes then. WAITS.
 */
int ht_opt_sparse_measure(struct ht_obj *obj, uint64_t off, uint32_t len, unsigned size, bool *out_sparse,
                          uint32_t *out_bytes) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Writes these entries into another object, and nothing else. -EIO: they have not these bytes any more. WAITS. */
int ht_opt_sparse_copy(struct ht_obj *obj, uint64_t off, uint32_t len, unsigned size, struct ht_obj *to, uint64_t at,
                       uint32_t bytes) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* --------------------------------------------------------- redo_replay.c */

/*
 * Under the gate, with published content: computes the root's logged steps again. An error: the root refuses all
 * changes from now on, and its error names the step. WAITS.
 */
int ht_opt_redo_replay(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* ---------------------------------------------------------- redo_parts.c */

struct ht_redo_parts;
struct ht_redo_place;
/* A replay begins, with published content: cuts the content into parts. */
struct ht_redo_parts ht_opt_parts_cut(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);
struct ht_redo_place ht_opt_part_place(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
size_t ht_opt_part_of(const struct ht_redo_parts *parts, struct ht_redo_place place, uint32_t range);
/* Does the present part have ranges of the parameter? The last part counts the steps, and has all parameters. */
bool ht_opt_part_takes(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* All steps of a part have run: its content may leave memory, and the next part is the present one. */
void ht_opt_part_next(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);

/* ------------------------------------------------------------- recover.c */

/* After a mount, with workers, before a client can see a model: begins to recover all roots. */
int ht_opt_redo_recover(struct ht_optim *o) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Ends the thread that does it. The optimizer is stopping. */
void ht_opt_recovery_join(struct ht_optim *o) HT_EXCLUDES(HT_LOCK_OPTIM);

/* -------------------------------------------------------------- update.c */

void *ht_opt_worker_main(void *worker);

#endif
