/* SPDX-License-Identifier: Apache-2.0 */
/* verify.c - asserts the invariants of a store (tiering/base/verify.h). */
#include "tiering/object/context.h"
#include "tiering/data/flush.h"
#include "tiering/shm/shm.h"

/* Space on a closed device counts no more, from one moment to the next: sums are bounds from then on. */
static bool any_closed(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    bool closed = false;

    for (unsigned i = 0; i < s->dev_count; i++)
        closed |= ht_device_is_closed(s, i);
    return closed;
}

void ht_store_verify(struct ht_store *s, bool idle)
{
    ht_store_lock(s);
    if (!s->opts.leave_out) { /* a store that leaves out damage keeps what contradicts itself */
        ht_objects_verify(s, idle && !any_closed(s));
        ht_shm_verify(s, idle);
    }
    ht_store_unlock(s);
}
