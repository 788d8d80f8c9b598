/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slice.h - when a loop over many things lets other threads have the lock that it holds.
 *
 * tiering/object/context.h and fs/ns/pending.h release the locks of the store and of names.
 */
#pragma once

#include "tiering/base/base.h"

/* No lock is held longer than a slice: this long, or this many steps of the loop. */
#define HT_SLICE_NS UINT64_C(400000)
enum { HT_SLICE_STEPS = 1024 };

/* All zeros at the beginning of a loop, or HT_SLICE_RESTING. */
struct ht_slice {
    uint64_t began_ns;
    unsigned steps;
    unsigned ended;  /* how often the lock was released */
    unsigned rested; /* so many slices long it was left to threads that wait for it, in all */
    bool rests;
    bool last; /* it is released no more; set by the caller */
};

/*
 * For loops over what may be a million chunks. After a slice that took t the lock is left alone, if threads wait for
 * it: for t if a thread waits for the end of the loop, else for nine times t. Both sides divide the time, so none gets
 * more without a loss of the other. Measured on two processors with 40,000 chunks, or files: commits, kept steps and
 * deletions in parts of their time if they never rest. And the part of its time in which a thread that reads hot bytes
 * all the time waits for no lock:
 *
 *   rest          0             1             2             3             9
 *   operation     1             1.2 to 1.9    1.4 to 2.5    1.6 to 3.2    2.7 to 9.3
 *   reader        0.33 to 0.80  0.62 to 0.81  0.69 to 0.83  0.73 to 0.85  0.85 to 0.91
 *
 * With 1 an awaited operation takes at most twice as long, and the reader keeps half of its time. Where no thread waits
 * for the lock, nothing rests.
 */
enum { HT_SLICE_REST = 1, HT_SLICE_LONG_REST = 9 };
#define HT_SLICE_RESTING \
    {                    \
        .rests = true,   \
    }

/*
 * The caller has released its lock, for which threads wait: until one has it, at most as long as the slice
 * took. A lock does not go to the next in line by itself.
 */
typedef bool ht_slice_is_taken_fn(const void *lock);
void ht_slice_let_in(ht_slice_is_taken_fn *is_taken, const void *lock, uint64_t took_ns);
/* After a step. True: the slice is over, and took so long. */
bool ht_slice_is_over(struct ht_slice *slice, uint64_t *out_ns);
/* The lock was released and taken again. */
void ht_slice_begin_next(struct ht_slice *slice);
