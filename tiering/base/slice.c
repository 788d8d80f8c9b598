/* SPDX-License-Identifier: Apache-2.0 */
/* slice.c - see slice.h. */
#include "tiering/base/slice.h"

enum { STEPS_PER_LOOK = 16 }; /* at the clock */

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
    *slice = (struct ht_slice){.began_ns = ht_now_ns(), .ended = slice->ended + 1, .rest = slice->rest};
}
