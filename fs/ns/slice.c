/* SPDX-License-Identifier: Apache-2.0 */
/* slice.c - see slice.h. */
#include "fs/ns/slice.h"

#include "fs/ns/ns_priv.h"

/* Readers need no help: the lock goes to those that wait for it. */
static bool has_writer(const void *lock)
{
    return ht_rwlock_writer(lock);
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
        ht_slice_let_in(has_writer, ht_ns_lock(ns), took_ns);
    ht_rwlock_wrlock(ht_ns_lock(ns));
    ht_slice_begin_next(slice);
}
