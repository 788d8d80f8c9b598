/* SPDX-License-Identifier: Apache-2.0 */
/* step_priv.h - inside step/. */
#pragma once

#include "optim/optim.h"

struct ht_param;
struct ht_root;
struct ht_worker;

/* ---------------------------------------------------------------- norm.c */

/*
 * At the boundary of a deferred step, draining; releases the lock in between: computes the norm, then queues
 * all updates. *out_skip: none was queued, the step is to change nothing.
 */
int ht_opt_whole_step(struct ht_root *root, bool *out_skip) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;

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
/*
 * After a boundary: publishes if it is to be durable, and lets updates run again. rc: the boundary's result. k: a kept
 * step that a client asked for, or NULL.
 */
int ht_opt_step_end(struct ht_root *root, int rc, bool durable, struct ht_copy *k)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Is a step durable when it ends, with so many that no commit has published? */
bool ht_opt_step_durable(const struct ht_root *root, uint64_t undurable) HT_REQUIRES(HT_LOCK_OPTIM);
/* When the caller learns of the step's end, caches are as new as the step. */
void ht_opt_step_leave(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);

/* --------------------------------------------------------------- abort.c */

/*
 * Under the gate, draining, with no update queued: everything below the root is as its last commit has published it.
 * *out_shown: an error of passthrough files, which do not show it; the rest is taken back then, too.
 */
int ht_opt_take_back(struct ht_root *root, int *out_shown) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Ends the draining: waiting readers and writers go on, and caches are dropped. */
void ht_opt_show_all(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);

/* -------------------------------------------------------------- closer.c */

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
/* The next range of the next root, in turn, or NULL. second: beside one that the worker has, if that may be. */
struct ht_range *ht_opt_take_range(const struct ht_worker *w, bool second) HT_REQUIRES(HT_LOCK_OPTIM);
/* Until a range is ready; serves the store's background meanwhile. NULL: the optimizer ends. */
struct ht_range *ht_opt_wait_for_range(const struct ht_worker *w);
/*
 * A worker cannot update this range: its content is in the vault. Workers of its own take the ranges of this root until
 * its queue is empty. False: there is no thread for that.
 */
bool ht_opt_leave_range(struct ht_range *r, void *(*worker_main)(void *)) HT_EXCLUDES(HT_LOCK_OPTIM);
