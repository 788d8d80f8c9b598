/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/slice.h"

#include <sched.h>

enum { STEPS_PER_LOOK = 16 }; /* at the clock */

void ht_slice_let_in(ht_slice_is_taken_fn *is_taken, const void *lock, uint64_t took_ns)
{
    uint64_t until_ns = ht_now_ns() + ht_min_u64(took_ns, HT_SLICE_NS);

    while (!is_taken(lock) && ht_now_ns() < until_ns)
        sched_yield();
}

bool ht_slice_is_over(struct ht_slice *slice, uint64_t *out_ns)
{
    if (slice->last || ++slice->steps % STEPS_PER_LOOK)
        return false;
    uint64_t now_ns = ht_now_ns();
    if (!slice->began_ns)
        slice->began_ns = now_ns;
    *out_ns = now_ns - slice->began_ns;
    return *out_ns >= HT_SLICE_NS || slice->steps >= HT_SLICE_STEPS;
}

void ht_slice_begin_next(struct ht_slice *slice)
{
    slice->began_ns = ht_now_ns();
    slice->steps = 0;
    slice->ended++;
    slice->last = false;
}
