/* SPDX-License-Identifier: Apache-2.0 */
/* delta_note.h - inside step/: what updates of a worker change (state/delta.h). */
#pragma once

#include "optim/state/context.h"

struct ht_param;
struct ht_root;

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
