/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/object/slice.h"

#include <sched.h>

#include "tiering/object/context.h"

/* In builds with AddressSanitizer nothing is collected, so that a late use is found. */
void ht_trash_put(struct ht_store *s, void *piece)
{
    struct ht_trash *t = &s->frees.trash;

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
    struct ht_trash taken = s->frees.trash;

    s->frees.trash = (struct ht_trash){0};
    taken.former = ht_refcounts_take_former(s);
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
    ht_refcount_table_free(&t->former);
    t->former = (struct ht_refcount_table){0};
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
