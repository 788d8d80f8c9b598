/* SPDX-License-Identifier: Apache-2.0 */
/* slice.c - see slice.h. */
#include "tiering/object/slice.h"

#include <sched.h>
#include <time.h>

#include "tiering/object/context.h"
#include "tiering/object/trash.h"

/* Until another thread has the lock, at most as long as the slice took: a mutex does not go to the next in line. */
static void let_others_in(const struct ht_mutex *lock, uint64_t ns)
{
    uint64_t until_ns = ht_now_ns() + ht_min_u64(ns, HT_SLICE_NS);

    while (!ht_mutex_holder(lock) && ht_now_ns() < until_ns)
        sched_yield();
}

/* A slice during which the thread did not run counts as one of usual length. */
static void leave_lock(unsigned times, uint64_t ns)
{
    const struct timespec rest = {.tv_nsec = (long)(times * ht_min_u64(ns, HT_SLICE_NS))};

    nanosleep(&rest, NULL);
}

void ht_slice_next(struct ht_store *s, struct ht_slice *slice)
{
    uint64_t took_ns;

    if (!ht_slice_is_over(slice, &took_ns))
        return;
    bool wanted = ht_mutex_is_wanted(ht_store_mutex(s));
    struct ht_trash trash = ht_trash_take(s);
    ht_store_unlock(s);
    ht_trash_empty(&trash);
    if (wanted && slice->rest)
        leave_lock(slice->rest, took_ns);
    else if (wanted)
        let_others_in(ht_store_mutex(s), took_ns);
    ht_store_lock(s);
    ht_slice_begin_next(slice);
}
