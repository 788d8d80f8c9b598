/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slice.h - loops over many chunks or objects that let other threads have the store's lock now and then.
 *
 * Between two slices anything may change but what the caller keeps from changing. It holds a reference to its object,
 * and looks chunks up again.
 */
#ifndef HITRAIN_TIERING_OBJECT_SLICE_H
#define HITRAIN_TIERING_OBJECT_SLICE_H

#include "tiering/base/base.h"
#include "tiering/base/guarded.h"

struct ht_store;

/* No lock is held longer than a slice: this long, or this many steps of the loop. */
#define HT_SLICE_NS UINT64_C(400000)
enum { HT_SLICE_STEPS = 1024 };

/* All zeros at the beginning of a loop. */
struct ht_slice {
    uint64_t began_ns;
    unsigned steps;
    unsigned ended; /* how often the lock was released */
    bool last;      /* it is released no more; set by the caller */
};

/*
 * After each step of the loop. At the end of a slice it releases the lock and takes it again. If threads wait for the
 * lock, one gets it first.
 */
void ht_slice_next(struct ht_store *s, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE);

#endif
