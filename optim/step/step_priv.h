/* SPDX-License-Identifier: Apache-2.0 */
/* step_priv.h - inside step/. */
#pragma once

#include "optim/optim.h"

struct ht_param;
struct ht_root;
struct ht_worker;

/* ------------------------------------------------------------- convert.c */

/*
 * At a boundary that is published, when all updates have run, draining; releases the lock in between: state gets the
 * forms of its words. -ENOSPC and others: nothing has changed.
 */
int ht_opt_convert(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* ------------------------------------------------------------ boundary.c */

/*
 * Under the gate. commit: the step is published even if durable_every does not say so. On success the root is held: no
 * update runs until the step is published.
 */
int ht_opt_boundary(struct ht_root *root, bool commit, struct ht_optim_steer *by)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Its first half alone, while the step stays open and takes no more gradients. -EBUSY: it is not whole. */
int ht_opt_prepare(struct ht_root *root, struct ht_optim_steer *by) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/*
 * The same in two parts. The request refuses what cannot end, else the step has no more gradients, writers of the next
 * one wait, and reads wait for the updates. *out_ticket: of caches that are to be dropped first. close does the rest.
 */
int ht_opt_boundary_request(struct ht_root *root, struct ht_optim_steer *by, uint64_t *out_ticket)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
int ht_opt_boundary_close(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* ---------------------------------------------------------------- step.c */

/* Takes a reference to the root and enters its gate, by ht_opt_gate_enter or ht_opt_gate_take. */
int ht_opt_step_enter(struct ht_optim *o, uint64_t id, int (*gate)(struct ht_root *root), struct ht_root **out)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Is a step durable when it ends, with so many that no commit has published? */
bool ht_opt_step_durable(const struct ht_root *root, uint64_t undurable) HT_REQUIRES(HT_LOCK_OPTIM);
/* When the caller learns of the step's end, caches are as new as the step. */
void ht_opt_step_leave(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Ends the threads that close steps. The optimizer is stopping. */
void ht_opt_closers_join(struct ht_optim *o) HT_EXCLUDES(HT_LOCK_OPTIM);

/* --------------------------------------------------------------- delta.c */

/* The worker's buffer. False: no memory. */
bool ht_opt_delta_writer_make(struct ht_worker *w) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_delta_writer_free(struct ht_worker *w) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * The worker has a range of root now, not updated yet, of which it notes changes or not. May it hold chunks of a range
 * of root next beside them?
 */
bool ht_opt_delta_may_begin(const struct ht_worker *w, bool notes, const struct ht_root *now,
                            const struct ht_root *next);
/*
 * n elements of a parameter from first on, at most HT_FORM_WINDOW, before and after an update. In ascending order
 * within a range, which ht_opt_delta_end_piece ends.
 */
void ht_opt_delta_note(struct ht_worker *w, const struct ht_param *p, uint64_t first, const void *was, const void *is,
                       size_t n);
void ht_opt_delta_end_piece(struct ht_worker *w);
/* The worker holds no chunk, and its range has not ended: its buffer goes into the object of the step. WAITS. */
void ht_opt_delta_flush(struct ht_worker *w) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * Under the gate, draining, with no update left: the open step was counted, and gets its delta. Releases the lock in
 * between.
 */
void ht_opt_delta_end(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);

/* -------------------------------------------------------------- update.c */

void *ht_opt_worker_main(void *worker);
