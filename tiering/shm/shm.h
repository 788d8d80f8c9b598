/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm.h - objects whose images lie in shared memory. The caller holds the store's lock, unless a comment says
 * otherwise. Functions for an object in shared memory must not be called for others.
 */
#pragma once

#include "tiering/api/stats.h"
#include "tiering/object/chunk.h"

/* Makes, and ends, the state of shm/, before and after everything else. -ENOMEM */
int ht_shm_setup(struct ht_store *s) HT_MUST_CHECK;
void ht_shm_teardown(struct ht_store *s);
/* Adds its part to the figures. */
void ht_shm_stats(const struct ht_store *s, struct ht_store_stats *out) HT_REQUIRES(HT_LOCK_STORE);
/* Asserts the invariants of shm.c (tiering/base/verify.h). idle: no other thread works on the store. */
void ht_shm_verify(struct ht_store *s, bool idle) HT_REQUIRES(HT_LOCK_STORE);
int ht_shm_init(struct ht_store *s) HT_MUST_CHECK; /* no lock */
/* Every chunk gets its image there. Of any object; may release the lock. */
int ht_shm_complete(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * Makes the file at least so large: before a write there, or before the object grows. Of any object. -ENOSPC: its share
 * is used up.
 */
int ht_shm_grow(struct ht_obj *o, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Makes the file at least as large as it was before an abort. Of any object. */
void ht_shm_regrow(struct ht_obj *o, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE);
/* As large as the object, which was made smaller. Of any object; may release the lock. */
void ht_shm_trim(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/* All objects of the scope that may have been changed unseen; fn does not release the lock. */
void ht_shm_for_each_stored(struct ht_store *s, uint64_t scope, void (*fn)(struct ht_obj *o))
    HT_REQUIRES(HT_LOCK_STORE);
/* Of any object: frees the memory, which holds no images. */
void ht_shm_free(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);

/*
 * The DRAM tier, without an unused slot, gets memory that it has lent to closed objects: of all that were closed so
 * long ago, and of others until it has a slot.
 */
#define HT_SHM_GIVE_NS UINT64_C(5000000000)
void ht_shm_give_closed(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE);

/* ------------------------------------------------------------ dirty scan */

/* As ht_obj_shm_scan, for all of a scope. */
int ht_shm_scan_scope(struct ht_store *s, uint64_t scope) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The commit timer's scan of objects outside scopes. */
struct ht_shm_scan {
    uint64_t period_ns; /* it comes so often */
    uint64_t now_ns, until_ns;
    void (*between)(struct ht_store *s); /* after each slice; lock held, may release it */
    unsigned slices;                     /* out: so many */
};

/*
 * Scans all closed objects; and open ones that are due, until the time is up, but at least one slice, from where the
 * last scan ended. After several scans that found nothing it is due less and less often.
 */
int ht_shm_scan(struct ht_store *s, struct ht_shm_scan *scan) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
