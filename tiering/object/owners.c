/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owners.c - stored bytes with several owners, and when the space of a reference is free again.
 *
 * A reference that the log names keeps its space until the record that ends it is durable (a deferred free, in order
 * of log numbers). One that the log never named gives it back at once.
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
 * transaction that may have ended an owner is durable. Entries with one owner are thrown out when there are many and
 * all is durable.
 */

#include "tiering/object/owners.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"

enum { BUCKETS_PER_ADD = 4, IDLE_SHARE = 4 };

/* NULL: there is none. */
static struct ht_refcount *lookup(const struct ht_store *s, const struct ht_ref *ref)
{
    struct ht_id_link *link = ref->shared ? ht_id_find(&s->frees.refcounts.table, ht_ref_place(ref)) : NULL;

    return link ? ht_container_of(link, struct ht_refcount, by_place) : NULL;
}

const struct ht_refcount *ht_refcount_find(const struct ht_store *s, const struct ht_ref *ref)
{
    return lookup(s, ref);
}

/* NULL: no memory. */
static struct ht_refcount *put_in(struct ht_store *s, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_refcounts *r = &s->frees.refcounts;
    struct ht_refcount *e = ht_pool_get(&r->pool);
    uint64_t before = ht_id_table_bytes(&r->table);

    if (!e)
        return NULL;
    *e = (struct ht_refcount){.by_place = {.id = ht_ref_place(ref)}, .ended = UINT64_MAX, .owners = 1};
    if (ht_id_insert(&r->table, &e->by_place)) {
        free(ht_pool_put(&r->pool, e));
        return NULL;
    }
    r->single++;
    s->objects.meta_bytes += sizeof(*e) + ht_id_table_bytes(&r->table) - before;
    return e;
}

/* It has one owner. */
static void take_out(struct ht_store *s, struct ht_refcount *e) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_refcounts *r = &s->frees.refcounts;

    r->single--;
    s->objects.meta_bytes -= sizeof(*e);
    ht_id_remove(&r->table, &e->by_place);
    ht_trash_put(s, ht_pool_put(&r->pool, e));
}

/* Is the end of each owner that a transaction has ended durable? The open one comes on top. */
static bool is_settled(const struct ht_store *s)
{
    return s->journal && s->frees.last_lsn <= ht_journal_durable(s->journal);
}

/*
 * If many entries have one owner, throws out those of some buckets that have nothing to wait for: the log is durable,
 * and the open transaction ended no other owner.
 */
static void sweep(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_refcounts *r = &s->frees.refcounts;

    if (r->single <= r->table.count / IDLE_SHARE || !is_settled(s))
        return;
    for (unsigned i = 0; i < BUCKETS_PER_ADD; i++) {
        struct ht_id_link *link = *ht_bucket_at(&r->table.buckets, r->hand), *next;
        for (; link; link = next) {
            struct ht_refcount *e = ht_container_of(link, struct ht_refcount, by_place);
            next = link->next;
            if (e->owners == 1 && e->ended != s->frees.tx_count)
                take_out(s, e);
        }
        r->hand = ht_buckets_next(&r->table.buckets, r->hand);
    }
}

/* ---------------------------------------------------------------- owners */

int ht_refcount_add(struct ht_store *s, const struct ht_ref *ref, bool named)
{
    if (ht_ref_is_cold(ref))
        return 0;
    sweep(s);
    struct ht_refcount *e = lookup(s, ref);
    if (!e)
        e = put_in(s, ref);
    if (!e)
        return -ENOMEM;
    s->frees.refcounts.single -= e->owners == 1;
    e->owners++;
    e->named |= named;
    return 0;
}

void ht_refcount_named(struct ht_store *s, const struct ht_ref *ref)
{
    struct ht_refcount *e = lookup(s, ref);

    if (e)
        e->named = true;
}

enum ht_refcount_left ht_refcount_drop(struct ht_store *s, const struct ht_ref *ref, bool logged)
{
    struct ht_refcount *e = lookup(s, ref);

    if (ht_ref_is_cold(ref))
        return HT_REFCOUNT_OWNED;
    if (!e)
        return HT_REFCOUNT_FREE;
    if (e->owners > 1 && !HT_MUTANT("owner-forgotten")) {
        e->owners--;
        s->frees.refcounts.single += e->owners == 1;
        if (logged)
            e->ended = s->frees.tx_count;
        return HT_REFCOUNT_OWNED;
    }
    enum ht_refcount_left left = !e->named ? HT_REFCOUNT_FREE
        : e->ended == s->frees.tx_count    ? HT_REFCOUNT_WITH_TX
                                           : HT_REFCOUNT_LATER;
    s->frees.refcounts.single += e->owners > 1;
    take_out(s, e);
    return left;
}

/* ---------------------------------------------------------------- chunks */

/* Shared space does not come back when it is dropped: a rewrite reserve may not count it as stored. */
static int rewrite_reserve_shared(struct ht_obj *o, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_obj_count_shared(o, ref, 1);
    uint64_t n = ht_min_u64(ht_rewrite_reserve_missing(o), ht_ref_blocks(ref));
    int rc = n ? ht_alloc_reserve(o->s->alloc, n) : 0;
    if (rc)
        ht_obj_count_shared(o, ref, -1);
    else if (n)
        ht_obj_extra(o)->rewrite_reserve_left += n;
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
    rc = own->shared ? 0 : rewrite_reserve_shared(o, own);
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

/* --------------------------------------------------------------- deferred frees */

static void append(struct ht_deferred_frees *q, struct ht_deferred_free *f)
{
    f->next = NULL;
    if (q->first)
        q->last->next = f;
    else
        q->first = f;
    q->last = f;
}

static struct ht_deferred_free *take_first(struct ht_deferred_frees *q)
{
    struct ht_deferred_free *f = q->first;

    q->first = f->next;
    return f;
}

/* Its reference is the caller's. */
static struct ht_ref pop(struct ht_store *s, struct ht_deferred_frees *q) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_deferred_free *f = take_first(q);
    struct ht_ref ref = f->ref;

    s->frees.deferred--;
    ht_trash_put(s, ht_pool_put(&s->frees.pool, f));
    return ref;
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

/*
 * Without memory for the list, or with a log that failed, the space is lost until the next
 * mount, never reused too early.
 */
void ht_ref_free_later(struct ht_store *s, struct ht_deferred_frees *q, uint64_t lsn, struct ht_ref *ref)
{
    struct ht_deferred_free *f;

    if (HT_MUTANT("reuse-at-once")) {
        ht_free_ref_now(s, ref);
    } else if (s->failed || !(f = ht_pool_get(&s->frees.pool))) {
        s->frees.lost_blocks += ht_ref_countable(s, ref);
        ht_ref_forget(ref);
    } else {
        count_pending(s, ref, true);
        *f = (struct ht_deferred_free){.lsn = lsn, .ref = *ref};
        append(q, f);
        s->frees.deferred++;
    }
    memset(ref, 0, sizeof(*ref));
}

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

void ht_deferred_frees_logged(struct ht_store *s, uint64_t lsn, struct ht_slice *slice)
{
    for (struct ht_deferred_free *f; (f = s->frees.open.first); ht_slice_next(s, slice)) {
        if (lsn) {
            f->lsn = lsn;
            append(&s->frees.logged, take_first(&s->frees.open));
            continue;
        }
        struct ht_ref ref = pop(s, &s->frees.open);
        count_pending(s, &ref, false);
        s->frees.lost_blocks += ht_ref_countable(s, &ref);
        ht_ref_forget(&ref);
    }
}

void ht_deferred_frees_durable(struct ht_store *s, uint64_t lsn)
{
    struct ht_deferred_frees *q = &s->frees.logged;
    struct ht_slice slice = {0};

    while (q->first && q->first->lsn <= lsn) {
        struct ht_ref ref = pop(s, q);
        count_pending(s, &ref, false);
        ht_free_ref_now(s, &ref);
        ht_slice_next(s, &slice);
    }
}

/* -------------------------------------------------------------- life */

void ht_owners_init(struct ht_store *s)
{
    ht_pool_init(&s->frees.refcounts.pool, sizeof(struct ht_refcount));
    ht_pool_init(&s->frees.pool, sizeof(struct ht_deferred_free));
}

static void forget_all(struct ht_store *s, struct ht_deferred_frees *q) HT_REQUIRES(HT_LOCK_STORE)
{
    while (q->first) {
        struct ht_ref ref = pop(s, q);
        ht_ref_forget(&ref);
    }
}

void ht_owners_free(struct ht_store *s)
{
    struct ht_refcounts *r = &s->frees.refcounts;

    forget_all(s, &s->frees.logged);
    forget_all(s, &s->frees.open);
    ht_pool_destroy(&s->frees.pool);
    /* bounded: the store ends, and has no other thread */
    for (size_t b = 0; b < r->table.buckets.count; b++)
        for (struct ht_id_link *link = *ht_bucket_at(&r->table.buckets, b), *next; link; link = next) {
            next = link->next;
            free(ht_pool_put(&r->pool, ht_container_of(link, struct ht_refcount, by_place)));
        }
    ht_id_table_free(&r->table);
    ht_pool_destroy(&r->pool);
}
