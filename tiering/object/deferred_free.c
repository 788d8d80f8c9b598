/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deferred_free.c - when the space of a reference is free again.
 *
 * A reference that the log names keeps its space until the record that ends it is durable (a deferred free, in order
 * of log numbers). One that the log never named gives it back at once.
 */

#include "tiering/object/deferred_free.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"

static struct ht_deferred_block *append_block(struct ht_deferred_frees *q)
{
    struct ht_deferred_block *b = q->spare ? q->spare : malloc(sizeof(*b));

    if (!b)
        return NULL;
    q->blocks += !q->spare;
    q->spare = NULL;
    b->next = NULL;
    if (q->last)
        q->last->next = b;
    else
        q->first = b;
    q->last = b;
    return b;
}

int ht_deferred_frees_push(struct ht_deferred_frees *q, uint64_t lsn, const struct ht_ref *ref)
{
    size_t at = (q->head + q->count) % HT_DEFERRED_BLOCK_ITEMS;
    struct ht_deferred_block *b = at && q->last ? q->last : append_block(q);

    if (!b)
        return -ENOMEM;
    b->item[at] = (struct ht_deferred_free){.lsn = lsn, .ref = *ref};
    q->count++;
    return 0;
}

struct ht_deferred_free *ht_deferred_frees_first(const struct ht_deferred_frees *q)
{
    return q->count ? &q->first->item[q->head] : NULL;
}

static struct ht_deferred_block *drop_block(struct ht_deferred_frees *q)
{
    struct ht_deferred_block *b = q->first;

    q->first = b->next;
    if (!q->first)
        q->last = NULL;
    q->head = 0;
    if (q->spare) {
        q->blocks--;
        return b;
    }
    q->spare = b;
    return NULL;
}

struct ht_deferred_block *ht_deferred_frees_pop(struct ht_deferred_frees *q)
{
    assert(q->count);
    q->count--;
    return ++q->head == HT_DEFERRED_BLOCK_ITEMS || !q->count ? drop_block(q) : NULL;
}

uint64_t ht_deferred_frees_bytes(const struct ht_deferred_frees *q)
{
    return q->blocks * sizeof(struct ht_deferred_block);
}

void ht_deferred_frees_end(struct ht_deferred_frees *q)
{
    while (q->count) {
        ht_ref_forget(&ht_deferred_frees_first(q)->ref);
        free(ht_deferred_frees_pop(q));
    }
    free(q->spare);
    *q = (struct ht_deferred_frees){0};
}

void ht_free_ref_now(struct ht_store *s, struct ht_ref *ref)
{
    for (unsigned i = 0; ht_ref_holds(ref) && i < ht_ref_extents(ref); i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        ht_alloc_release(s->alloc, &e);
    }
    ht_ref_forget(ref);
    ht_wake_for_discard(s);
    ht_wake_for_compact_freed(s);
}

static void count_pending(struct ht_store *s, const struct ht_ref *ref, bool add) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned i = 0; ht_ref_holds(ref) && i < ht_ref_extents(ref); i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        if (add)
            ht_alloc_pending_free_add(s->alloc, &e);
        else
            ht_alloc_pending_free_sub(s->alloc, &e);
    }
}

void ht_ref_free_never(struct ht_store *s, struct ht_ref *ref)
{
    count_pending(s, ref, false);
    s->frees.lost_blocks += ht_ref_countable(s, ref);
    ht_ref_forget(ref);
}

/*
 * Without memory for the list, or with a log that failed, the space is lost until the next
 * mount, never reused too early.
 */
void ht_ref_free_later(struct ht_store *s, struct ht_deferred_frees *q, uint64_t lsn, struct ht_ref *ref)
{
    uint32_t blocks = ht_ref_countable(s, ref);

    if (HT_MUTANT("reuse-at-once")) {
        ht_free_ref_now(s, ref);
    } else if (s->failed || ht_deferred_frees_push(q, lsn, ref)) {
        s->frees.lost_blocks += blocks;
        ht_ref_forget(ref);
    } else {
        count_pending(s, ref, true);
    }
    memset(ref, 0, sizeof(*ref));
}

/*
 * Drops an owner of a reference that the log may name until lsn is durable (0: no record does). True if the space is or
 * will be free.
 */
bool ht_ref_drop_at(struct ht_store *s, uint64_t lsn, struct ht_ref *ref)
{
    switch (ht_refcount_drop(s, ref, false)) {
    case HT_REFCOUNT_OWNED:
        ht_ref_forget(ref);
        return false;
    case HT_REFCOUNT_FREE:
        if (lsn > (s->journal ? ht_journal_durable(s->journal) : 0))
            ht_ref_free_later(s, &s->frees.logged, lsn, ref);
        else
            ht_free_ref_now(s, ref);
        break;
    case HT_REFCOUNT_LATER:
        ht_ref_free_later(s, &s->frees.logged, s->frees.last_lsn, ref);
        break;
    case HT_REFCOUNT_WITH_TX:
        ht_ref_free_later(s, &s->frees.open, 0, ref);
        break;
    }
    return true;
}

bool ht_ref_drop(struct ht_store *s, struct ht_ref *ref)
{
    return ht_ref_drop_at(s, 0, ref);
}

void ht_deferred_frees_durable(struct ht_store *s, uint64_t lsn)
{
    struct ht_deferred_frees *q = &s->frees.logged;
    struct ht_deferred_free *first;
    struct ht_slice slice = {0};

    while ((first = ht_deferred_frees_first(q)) && first->lsn <= lsn) {
        struct ht_ref ref = first->ref;
        ht_trash_put(s, ht_deferred_frees_pop(q));
        count_pending(s, &ref, false);
        ht_free_ref_now(s, &ref);
        ht_slice_next(s, &slice);
    }
}
