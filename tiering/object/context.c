/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context.c - the store's lock: waits with it, wakes of threads that do, and loops that let others have it in between.
 *
 * They need that lock first: woken while it is held they would only wait for it. So the wakes are noted, and made when
 * the lock has been released.
 *
 * For images (ht_waits.slot) as many threads are woken as may find a place: one for a whole slot, readers first. A
 * woken thread that has no use for it passes it on (image.c), and none waits for ever.
 */
#include "tiering/object/context.h"

#include <sched.h>

void ht_waits_init(struct ht_waits *w)
{
    HT_UNSHARED(HT_LOCK_STORE);
    for (unsigned i = 0; i < HT_COND_COUNT; i++)
        pthread_cond_init(&w->chunk[i], NULL);
    pthread_cond_init(&w->settled, NULL);
    ht_cond_init(&w->slot);
    ht_cond_init(&w->slot_read);
    w->patience_ns = HT_PATIENCE_NS;
}

void ht_waits_destroy(struct ht_waits *w)
{
    for (unsigned i = 0; i < HT_COND_COUNT; i++)
        pthread_cond_destroy(&w->chunk[i]);
    pthread_cond_destroy(&w->settled);
    pthread_cond_destroy(&w->slot);
    pthread_cond_destroy(&w->slot_read);
}

static void wake_all(struct ht_store *s, const struct ht_wakes *w)
{
    for (uint64_t left = w->chunks; left; left &= left - 1)
        pthread_cond_broadcast(&s->waits.chunk[__builtin_ctzll(left)]);
    if (w->all_slots) {
        pthread_cond_broadcast(&s->waits.slot_read);
        pthread_cond_broadcast(&s->waits.slot);
    }
    if (w->settled)
        pthread_cond_broadcast(&s->waits.settled);
    for (unsigned i = 0; !w->all_slots && i < w->slots; i++)
        pthread_cond_signal(i < w->slots_read ? &s->waits.slot_read : &s->waits.slot);
    if (w->writeback || w->cleaning || w->readahead || w->planner || w->discard || w->compact || w->recompress ||
        w->cold)
        s->hooks.wake_engines(s, w);
}

static struct ht_wakes take(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_wakes w = s->waits.wakes;

    s->waits.wakes = (struct ht_wakes){0};
    return w;
}

void ht_store_unlock_and_wake(struct ht_store *s)
{
    struct ht_wakes w = take(s);

    ht_mutex_unlock(ht_store_mutex(s));
    wake_all(s, &w);
}

int ht_store_wait(struct ht_store *s, pthread_cond_t *c, uint64_t at_ns)
{
    struct ht_wakes w = take(s);

    wake_all(s, &w);
    return ht_cond_wait_until(c, ht_store_mutex(s), at_ns);
}

void ht_wake_one_for_slot(struct ht_store *s)
{
    struct ht_wakes *w = &s->waits.wakes;

    if (w->slots == s->waits.slot_waiters)
        return;
    w->slots++;
    w->slots_read += w->slots_read < s->waits.slot_readers;
    w->any = true;
}

void ht_wake_for_slot(struct ht_store *s, uint32_t slot)
{
    if (!s->waits.slot_waiters || ht_arena_is_external(s->arena, slot))
        return;
    /* a thread that waits for a whole slot cannot use it */
    if (ht_arena_slot_bytes(s->arena, slot) < HT_CHUNK_BYTES)
        s->waits.wakes.all_slots = s->waits.wakes.any = true;
    else
        ht_wake_one_for_slot(s);
}

void ht_wake_for_discard(struct ht_store *s)
{
    if (s->waits.discard_noted || !ht_alloc_notes_freed(s->alloc))
        return;
    s->waits.discard_noted = true;
    s->waits.wakes.discard = s->waits.wakes.any = true;
}

bool ht_compact_may_begin(const struct ht_store *s)
{
    bool news = s->waits.compact_freed || s->waits.compact_seen_lsn != s->frees.last_lsn + 1;

    return news && ht_alloc_wants_compaction(s->alloc) &&
        ht_alloc_sparse_groups(s->alloc) >= s->waits.compact_groups_min;
}

void ht_wake_for_compact(struct ht_store *s)
{
    if (!s->waits.compact_sleeps || !ht_compact_may_begin(s))
        return;
    s->waits.compact_sleeps = false;
    s->waits.wakes.compact = s->waits.wakes.any = true;
}

/* It may have been logged before a pass began, and become free behind it. */
void ht_wake_for_compact_freed(struct ht_store *s)
{
    s->waits.compact_freed = true;
    ht_wake_for_compact(s);
}

/* ------------------------------------------------------------------ slices */

/* In builds with AddressSanitizer nothing is collected, so that a late use is found. */
void ht_trash_put(struct ht_store *s, void *piece)
{
    struct ht_trash *t = &s->trash;

    if (!piece || t->pieces == HT_TRASH_PIECES_MAX || ht_pool_is_apart()) {
        free(piece);
        return;
    }
    *(void **)piece = t->first;
    t->first = piece;
    t->pieces++;
}

struct ht_trash ht_trash_take(struct ht_store *s)
{
    struct ht_trash taken = s->trash;

    s->trash = (struct ht_trash){0};
    return taken;
}

void ht_trash_empty(struct ht_trash *t)
{
    while (t->first) {
        void *next = *(void **)t->first;
        free(t->first);
        t->first = next;
    }
    t->pieces = 0;
}

static bool has_holder(const void *lock)
{
    return ht_mutex_holder(lock);
}

/* Does a thread wait for the end of the loop? Its own caller, one for its transaction, or a writer for its progress. */
static bool is_awaited(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_io_class() == HT_IO_URGENT || ht_mutex_is_wanted(&s->tx_lock) ||
        (s->objects.changes && s->objects.changes->awaited);
}

/* A slice during which the thread did not run counts as one of usual length. */
static void rest(struct ht_slice *slice, bool awaited, uint64_t ns)
{
    for (int i = 0; i < (awaited ? HT_SLICE_REST : HT_SLICE_LONG_REST); i++, slice->rested++)
        ht_sleep_ns(ht_min_u64(ns, HT_SLICE_NS));
}

void ht_slice_next(struct ht_store *s, struct ht_slice *slice)
{
    uint64_t took_ns;

    if (!ht_slice_is_over(slice, &took_ns))
        return;
    bool wanted = ht_mutex_is_wanted(ht_store_mutex(s)), awaited = is_awaited(s);
    struct ht_trash trash = ht_trash_take(s);
    ht_store_unlock(s);
    ht_trash_empty(&trash);
    if (wanted && slice->rests)
        rest(slice, awaited, took_ns);
    else if (wanted)
        ht_slice_let_in(has_holder, ht_store_mutex(s), took_ns);
    else
        sched_yield(); /* to a thread that was woken on this processor, and cannot want the lock yet */
    ht_store_lock(s);
    ht_slice_begin_next(slice);
}
