/* SPDX-License-Identifier: Apache-2.0 */
/* slice.c - see slice.h. */
#include "fs/ns/slice.h"

#include <sched.h>

#include "fs/ns/ns_priv.h"

/*
 * Until another thread writes under the lock, at most as long as the slice took. Readers need no help: the lock goes to
 * those that wait for it.
 */
static void let_writers_in(const struct ht_rwlock *lock, uint64_t ns)
{
    uint64_t until_ns = ht_now_ns() + ht_min_u64(ns, HT_SLICE_NS);

    while (!ht_rwlock_writer(lock) && ht_now_ns() < until_ns)
        sched_yield();
}

void ht_ns_slice_next(struct ht_ns *ns, struct ht_slice *slice)
{
    uint64_t took_ns;

    ht_lock_step();
    if (!ht_slice_is_over(slice, &took_ns))
        return;
    bool wanted = ht_rwlock_is_wanted_by_writer(ht_ns_lock(ns));
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (wanted)
        let_writers_in(ht_ns_lock(ns), took_ns);
    ht_rwlock_wrlock(ht_ns_lock(ns));
    ht_slice_begin_next(slice);
}
