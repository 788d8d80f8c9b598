/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wake.c - waking those who wait with the store's lock.
 *
 * They need that lock first: woken while it is held they would only wait for it. So who is to be woken is noted, and woken when the lock
 * has been let go.
 *
 * For images (slot_cond) as many are woken as may find a place: one for a whole slot. Who was woken and had no use for it passes it on
 * (fill.c), and none waits for ever.
 */
#include "tiering/store/store_priv.h"

static void wake_all(struct ht_store *s, const struct ht_wakes *w)
{
    for (uint64_t left = w->chunks; left; left &= left - 1)
        pthread_cond_broadcast(&s->chunk_cond[__builtin_ctzll(left)]);
    if (w->all_slots)
        pthread_cond_broadcast(&s->slot_cond);
    for (unsigned i = 0; !w->all_slots && i < w->slots; i++)
        pthread_cond_signal(&s->slot_cond);
    if (w->writeback)
        pthread_cond_broadcast(&s->wake);
    if (w->ahead)
        pthread_cond_signal(&s->ahead.wake);
}

static struct ht_wakes take(struct ht_store *s)
{
    struct ht_wakes w = s->wakes;
    s->wakes = (struct ht_wakes){0};
    return w;
}

void ht_store_unlock_and_wake(struct ht_store *s)
{
    struct ht_wakes w = take(s);
    ht_mutex_unlock(&s->lock);
    wake_all(s, &w);
}

int ht_store_wait(struct ht_store *s, pthread_cond_t *c, uint64_t at_ns)
{
    struct ht_wakes w = take(s);
    wake_all(s, &w);
    return ht_cond_wait_until(c, &s->lock, at_ns);
}

void ht_wake_one_for_slot(struct ht_store *s)
{
    s->wakes.slots += s->wakes.slots < s->slot_waiters;
    s->wakes.any |= s->wakes.slots > 0;
}

void ht_wake_for_slot(struct ht_store *s, uint32_t slot)
{
    if (!s->slot_waiters || ht_arena_is_guest(s->arena, slot))
        return;
    if (ht_arena_slot_bytes(s->arena, slot) < HT_CHUNK_BYTES) /* who waits for a whole one has no use for it */
        s->wakes.all_slots = s->wakes.any = true;
    else
        ht_wake_one_for_slot(s);
}
