/* SPDX-License-Identifier: Apache-2.0 */
/* gradient.h - gradients: steps in two phases as those of muon, and the end of a step. */
#pragma once

#include "tiering/base/base.h"

struct ht_param;
struct ht_range;
struct ht_root;

/* --------------------------------------------------------------- ortho.c */

/* Has the parameter no objects for a step in two phases, or those of another shape? */
bool ht_opt_ortho_lacks(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* Under the gate: makes them, with space for both. -ENOSPC: there are none. */
int ht_opt_ortho_make(struct ht_param *p) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Where range i begins in both objects: at its chunk. */
uint32_t ht_opt_ortho_chunk_bytes(const struct ht_param *p);
/*
 * Ends the first phase of a running range: its momentum has the gradient. After the last one of its parameter the store
 * orthogonalises, if the words say so. Releases the lock in between.
 */
void ht_opt_ortho_stirred(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* A worker's job: orthogonalises the update of the parameter that r, its first range, stands for. */
void ht_opt_ortho_compute(struct ht_range *r) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Does the boundary wait for a client that orthogonalises? */
bool ht_opt_ortho_missing(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);

/* ----------------------------------------------------------------- end.c */

/* Queues all frozen bytes that are not queued yet; drops their caches if updates follow. */
void ht_opt_queue_frozen(struct ht_root *root, bool updates) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * A step of a replay while parts follow, which is not counted; one that changes nothing; from APPLIED on, one that
 * changes parameters; LOGGED: or computed again.
 */
enum ht_step_end { HT_STEP_OF_PART, HT_STEP_SKIPPED, HT_STEP_APPLIED, HT_STEP_LOGGED };
/* The step is over: counts it, and makes room for the next one's gradients. Releases the lock in between. */
void ht_opt_close_step(struct ht_root *root, enum ht_step_end how) HT_REQUIRES(HT_LOCK_OPTIM);

/*
 * Releases the lock in between: no update runs. Waits for writes that copy, then forgets written, frozen and
 * summed bytes.
 */
void ht_opt_forget_gradient(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Draining, and an abort follows: no part of the step is left to run or to write, and its gradients are forgotten.
 * *out_spare: steps are logged, and no update has run since the last one.
 */
int ht_opt_stop_step(struct ht_root *root, bool *out_spare) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/*
 * Then the store goes back to the last commit, and the open step ends. spare: parameters and state stay as they are;
 * -EBUSY: they cannot. *out_shown: an error of passthrough files, which do not show it. Readers of several objects wait
 * until their content is back.
 */
int ht_opt_revert(struct ht_root *root, bool spare, int *out_shown) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/*
 * Under the gate, draining: logged steps cannot be computed again, and parameters and state are as of the last full
 * step.
 */
void ht_opt_show_full(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);
