/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slice.h - when a loop over many things lets other threads have the lock that it holds.
 *
 * tiering/object/slice.h and fs/ns/slice.h release the locks of the store and of names.
 */
#ifndef HITRAIN_TIERING_BASE_SLICE_H
#define HITRAIN_TIERING_BASE_SLICE_H

#include "tiering/base/base.h"

/* No lock is held longer than a slice: this long, or this many steps of the loop. */
#define HT_SLICE_NS UINT64_C(400000)
enum { HT_SLICE_STEPS = 1024 };

/* All zeros at the beginning of a loop, or HT_SLICE_RESTING. */
struct ht_slice {
    uint64_t began_ns;
    unsigned steps;
    unsigned ended; /* how often the lock was released */
    unsigned rest;  /* so many times as long as a slice took the lock is left to threads that wait for it */
    bool last;      /* it is released no more; set by the caller */
};

/*
 * For loops over what may be a million chunks. Threads that use the lock all the time keep nine tenths of their speed.
 * The loop then takes up to ten times as long, and so do threads that wait for what it holds besides, as a transaction.
 * Where no thread waits for the lock, nothing rests.
 */
#define HT_SLICE_RESTING \
    {                    \
        .rest = 9,       \
    }

/* After a step. True: the slice is over, and took so long. */
bool ht_slice_is_over(struct ht_slice *slice, uint64_t *out_ns);
/* The lock was released and taken again. */
void ht_slice_begin_next(struct ht_slice *slice);

#endif
