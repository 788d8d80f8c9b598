/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deferred_free.c - when the space of a reference is free again.
 *
 * A reference that the log names keeps its space until the record that ends it is durable (a deferred free, in order
 * of log numbers). One that the log never named gives it back at once.
 */
#include <stdlib.h>

#include "tiering/object/deferred_free.h"
#include "tiering/base/mutant.h"
#include "tiering/journal/journal.h"
#include "tiering/space/alloc.h"
#include "tiering/object/context.h"
#include "tiering/object/ref.h"
#include "tiering/object/refcount.h"

int ht_deferred_frees_push(struct ht_deferred_frees *q, uint64_t lsn, const struct ht_ref *ref)
{
    if (q->count == q->cap) {
        size_t cap = q->cap ? q->cap * 2 : 64;
        struct ht_deferred_free *items = malloc(cap * sizeof(*items));
        if (!items)
            return -ENOMEM;
        for (size_t i = 0; i < q->count; i++)
            items[i] = q->items[(q->head + i) % q->cap];
        free(q->items);
        q->items = items;
        q->cap = cap;
        q->head = 0;
    }
    q->items[(q->head + q->count++) % q->cap] = (struct ht_deferred_free){.lsn = lsn, .ref = *ref};
    return 0;
}

void ht_free_ref_now(struct ht_store *s, struct ht_ref *ref)
{
    for (unsigned i = 0; ht_ref_holds(ref) && i < ht_ref_extents(ref); i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        ht_alloc_release(s->alloc, &e);
    }
    ht_ref_forget(ref);
    ht_wake_for_discard(s);
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
        ht_alloc_pending_free_add(s->alloc, blocks);
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

    while (q->count && q->items[q->head].lsn <= lsn) {
        struct ht_deferred_free *item = &q->items[q->head];
        ht_alloc_pending_free_sub(s->alloc, ht_ref_countable(s, &item->ref));
        ht_free_ref_now(s, &item->ref);
        q->head = (q->head + 1) % q->cap;
        q->count--;
    }
}
