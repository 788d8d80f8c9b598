/* SPDX-License-Identifier: Apache-2.0 */
/* slice.c - see slice.h. */
#include "tiering/object/slice.h"

#include <sched.h>

#include "tiering/object/context.h"
#include "tiering/object/trash.h"

enum { STEPS_PER_LOOK = 16 }; /* at the clock */

/* Looks at the clock once for many steps. */
static bool is_over(struct ht_slice *slice, uint64_t *out_ns)
{
    if (slice->steps % STEPS_PER_LOOK)
        return false;
    uint64_t now_ns = ht_now_ns();
    if (!slice->began_ns)
        slice->began_ns = now_ns;
    *out_ns = now_ns - slice->began_ns;
    return *out_ns >= HT_SLICE_NS || slice->steps >= HT_SLICE_STEPS;
}

/* Until another thread has the lock, at most as long as the slice took: a mutex does not go to the next in line. */
static void let_others_in(const struct ht_mutex *lock, uint64_t ns)
{
    uint64_t until_ns = ht_now_ns() + ht_min_u64(ns, HT_SLICE_NS);

    while (!ht_mutex_holder(lock) && ht_now_ns() < until_ns)
        sched_yield();
}

void ht_slice_next(struct ht_store *s, struct ht_slice *slice)
{
    uint64_t took_ns;

    slice->steps++;
    if (slice->last || !is_over(slice, &took_ns))
        return;
    bool wanted = ht_mutex_is_wanted(ht_store_mutex(s));
    struct ht_trash trash = ht_trash_take(s);
    ht_store_unlock(s);
    ht_trash_empty(&trash);
    if (wanted)
        let_others_in(ht_store_mutex(s), took_ns);
    ht_store_lock(s);
    *slice = (struct ht_slice){.began_ns = ht_now_ns(), .ended = slice->ended + 1};
}
