/* SPDX-License-Identifier: Apache-2.0 */
/*
 * refcount.c - stored bytes with several owners.
 *
 * An owner is a reference of a chunk (one that is HT_CH_SHARE counts with the published one it narrows), or a clone in
 * progress. References that overlap name the very same extents, so their first block identifies them. The table holds
 * extents that have, or had in this mount, more than one owner. References to these carry the bit shared, so that all
 * others never look here.
 *
 * Why an entry stays when one owner is left: the record that ended another one may not be durable yet. Then the space
 * must not be used again at once, though only an unpublished reference names it in memory:
 *
 *   a file is deleted, its clone was never published and is dropped; now a crash shows the file again
 *
 * So the code that drops the last reference to extents that a record has named defers their free until every
 * transaction that may have ended an owner is durable. Entries with one owner are thrown out when the table is full and
 * all is durable.
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/object/refcount.h"
#include "tiering/base/idhash.h"
#include "tiering/base/mutant.h"
#include "tiering/journal/journal.h"
#include "tiering/space/alloc.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/object/rewrite_reserve.h"

enum { TABLE_START = 64 };

static uint64_t key_of(const struct ht_ref *ref)
{
    struct ht_extent e = ht_ref_extent(ref, 0);

    return e.block | (uint64_t)e.device << 48;
}

static size_t bucket(const struct ht_refcount_table *t, uint64_t key)
{
    return ht_id_hash(key) & (t->size - 1);
}

/* The entry, or the free place where it would be. The table is never full. */
static struct ht_refcount *find(const struct ht_refcount_table *t, uint64_t key)
{
    size_t i = bucket(t, key);

    while (t->entry[i].owners && t->entry[i].key != key)
        i = (i + 1) & (t->size - 1);
    return &t->entry[i];
}

static struct ht_refcount *lookup(const struct ht_refcount_table *t, const struct ht_ref *ref)
{
    struct ht_refcount *e = t->size ? find(t, key_of(ref)) : NULL;

    return e && e->owners ? e : NULL;
}

const struct ht_refcount *ht_refcount_find(const struct ht_store *s, const struct ht_ref *ref)
{
    return ref->shared ? lookup(&s->frees.refcounts, ref) : NULL;
}

/* Later entries of the chain move up, so that no search ends too early. */
static void take_out(struct ht_refcount_table *t, struct ht_refcount *e)
{
    size_t hole = (size_t)(e - t->entry), mask = t->size - 1;

    for (size_t i = (hole + 1) & mask; t->entry[i].owners; i = (i + 1) & mask) {
        size_t home = bucket(t, t->entry[i].key);
        if (((i - home) & mask) < ((i - hole) & mask))
            continue;
        t->entry[hole] = t->entry[i];
        hole = i;
    }
    t->entry[hole].owners = 0;
    t->count--;
}

/* One owner, and nothing to wait for once the log is durable: the open transaction ended no other. */
static bool is_idle(const struct ht_store *s, const struct ht_refcount *e) HT_REQUIRES(HT_LOCK_STORE)
{
    return e->owners == 1 && e->ended != s->frees.tx_count;
}

/* Copies the entries into a table of another size; without idle ones, if everything is durable. */
static int rebuild(struct ht_store *s, size_t size, bool settled) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_refcount_table *t = &s->frees.refcounts, was = *t;
    struct ht_refcount *entry = calloc(size, sizeof(*entry));

    if (!entry)
        return -ENOMEM;
    *t = (struct ht_refcount_table){.entry = entry, .size = size};
    for (size_t i = 0; i < was.size; i++) {
        const struct ht_refcount *e = &was.entry[i];
        if (!e->owners || (settled && is_idle(s, e)))
            continue;
        *find(t, e->key) = *e;
        t->count++;
    }
    free(was.entry);
    s->objects.meta_bytes += (size - was.size) * sizeof(*entry);
    return 0;
}

static int make_room(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_refcount_table *t = &s->frees.refcounts;

    if (!t->size)
        return rebuild(s, TABLE_START, false);
    if (t->count < t->size / 4 * 3)
        return 0;
    bool settled = s->journal && s->frees.last_lsn <= ht_journal_durable(s->journal);
    size_t idle = 0;
    for (size_t i = 0; i < t->size; i++)
        idle += settled && is_idle(s, &t->entry[i]);
    int rc = rebuild(s, idle > t->size / 4 ? t->size : t->size * 2, settled);
    assert(rc || t->count < t->size);
    return rc;
}

int ht_refcount_add(struct ht_store *s, const struct ht_ref *ref, bool named)
{
    int rc = make_room(s);

    if (rc)
        return rc;
    struct ht_refcount *e = find(&s->frees.refcounts, key_of(ref));
    if (!e->owners) {
        *e = (struct ht_refcount){.key = key_of(ref), .ended = UINT64_MAX, .owners = 1};
        s->frees.refcounts.count++;
    }
    e->owners++;
    e->named |= named;
    return 0;
}

void ht_refcount_named(struct ht_store *s, const struct ht_ref *ref)
{
    struct ht_refcount *e = ref->shared ? lookup(&s->frees.refcounts, ref) : NULL;

    if (e)
        e->named = true;
}

enum ht_refcount_left ht_refcount_drop(struct ht_store *s, const struct ht_ref *ref, bool logged)
{
    struct ht_refcount *e = ref->shared ? lookup(&s->frees.refcounts, ref) : NULL;

    if (!e)
        return HT_REFCOUNT_FREE;
    if (e->owners > 1 && !HT_MUTANT("owner-forgotten")) {
        e->owners--;
        if (logged)
            e->ended = s->frees.tx_count;
        return HT_REFCOUNT_OWNED;
    }
    enum ht_refcount_left left = !e->named ? HT_REFCOUNT_FREE
        : e->ended == s->frees.tx_count    ? HT_REFCOUNT_WITH_TX
                                           : HT_REFCOUNT_LATER;
    take_out(&s->frees.refcounts, e);
    return left;
}

void ht_refcounts_free(struct ht_store *s)
{
    free(s->frees.refcounts.entry);
}

/* ---------------------------------------------------------------- chunks */

/* Shared space does not come back when it is dropped: a rewrite reserve may not count it as stored. */
static int rewrite_reserve_shared(struct ht_obj *o, uint32_t blocks) HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = ht_obj_need_extra(o);

    if (rc)
        return rc;
    struct ht_obj_extra *x = ht_obj_extra(o);
    x->shared_blocks += blocks;
    uint64_t n = ht_min_u64(ht_rewrite_reserve_missing(o), blocks);
    rc = ht_alloc_reserve(o->s->alloc, n);
    if (rc)
        x->shared_blocks -= blocks;
    else
        x->rewrite_reserve_left += n;
    return rc;
}

int ht_chunk_share(struct ht_obj *o, struct ht_chunk *c, struct ht_ref *out)
{
    struct ht_store *s = o->s;
    bool current = (c->flags & HT_CH_CUR) && !(c->flags & HT_CH_SHARE);
    struct ht_ref *own = current ? &c->cur : &c->pub, copy;
    int rc = ht_ref_copy(&copy, ht_chunk_ref(c));

    if (rc)
        return rc;
    uint32_t blocks = ht_ref_blocks(own);
    rc = own->shared ? 0 : rewrite_reserve_shared(o, blocks);
    if (!rc) {
        own->shared = 1;
        c->cur.shared |= c->flags & HT_CH_SHARE ? 1 : 0;
        rc = ht_refcount_add(s, own, !current); /* without memory the bit stays: one owner without an entry, as ever */
    }
    if (rc) {
        ht_ref_forget(&copy);
        return rc;
    }
    copy.shared = 1;
    *out = copy;
    return 0;
}
