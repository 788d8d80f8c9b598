/* SPDX-License-Identifier: Apache-2.0 */
/* ortho.h - steps in two phases, as those of muon (ortho.c). */
#pragma once

#include "optim/state/context.h"

struct ht_param;

struct ht_range;

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
/* Reads or writes bytes of the file [off, off + len) in one of the objects. Returns len, or an error. Not locked. */
ssize_t ht_opt_ortho_move(const struct ht_param *p, struct ht_obj *obj, uint64_t off, void *buf, size_t len, bool write)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* A worker's job: orthogonalises the update of the parameter that r, its first range, stands for. */
void ht_opt_ortho_compute(struct ht_range *r) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Queues the second phase of all ranges. Returns a ticket of the invalidation. */
uint64_t ht_opt_ortho_queue(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* Does the boundary wait for a client that orthogonalises? */
bool ht_opt_ortho_missing(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
