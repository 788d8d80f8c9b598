/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frees.c - stored bytes with several owners, and when the space of a reference is free again.
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
 * transaction that may have ended an owner is durable. Entries with one owner are thrown out when the table is full and
 * all is durable.
 */

#include "tiering/object/frees.h"
#include "tiering/base/idhash.h"
#include "tiering/base/mutant.h"
#include "tiering/base/pages.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"

/* Places of the former table that each new entry looks at: the other table cannot be full before the last one. */
enum { TABLE_START = 64, PLACES_PER_ADD = 8 };

enum { LARGE = 1 << 14 }; /* places of a table with memory of its own: 384 KiB */

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

static struct ht_refcount *find_in_use(const struct ht_refcount_table *t, uint64_t key)
{
    struct ht_refcount *e = t->size ? find(t, key) : NULL;

    return e && e->owners ? e : NULL;
}

/* *out_table: the one that it is in. */
static struct ht_refcount *lookup(struct ht_refcounts *r, uint64_t key, struct ht_refcount_table **out_table)
{
    struct ht_refcount *e = find_in_use(&r->now, key);

    *out_table = e ? &r->now : &r->was;
    return e ? e : find_in_use(&r->was, key);
}

const struct ht_refcount *ht_refcount_find(const struct ht_store *s, const struct ht_ref *ref)
{
    const struct ht_refcounts *r = &s->frees.refcounts;
    const struct ht_refcount *e = ref->shared ? find_in_use(&r->now, ht_ref_place(ref)) : NULL;

    return e || !ref->shared ? e : find_in_use(&r->was, ht_ref_place(ref));
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

/* ---------------------------------------------------------------- growing */

/* Is the end of each owner that a transaction has ended durable? The open one comes on top. */
static bool is_settled(const struct ht_store *s)
{
    return s->journal && s->frees.last_lsn <= ht_journal_durable(s->journal);
}

static int new_table(struct ht_refcount_table *t, size_t size)
{
    void *entry = size < LARGE ? calloc(size, sizeof(*t->entry)) : ht_pages_new(size * sizeof(*t->entry));

    *t = (struct ht_refcount_table){.entry = entry, .size = entry ? size : 0};
    return entry ? 0 : -ENOMEM;
}

void ht_refcount_table_free(const struct ht_refcount_table *t)
{
    if (t->size < LARGE)
        free(t->entry);
    else
        ht_pages_free(t->entry, t->size * sizeof(*t->entry));
}

struct ht_refcount_table ht_refcounts_take_former(struct ht_store *s)
{
    struct ht_refcount_table *former = &s->frees.refcounts.former, taken = *former;

    s->objects.meta_bytes -= taken.size * sizeof(*taken.entry);
    *former = (struct ht_refcount_table){0};
    return taken;
}

static void end_move(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_refcounts *r = &s->frees.refcounts;
    const struct ht_refcount_table before = ht_refcounts_take_former(s);

    assert(!r->was.count);
    ht_refcount_table_free(&before); /* nobody came in between */
    r->former = r->was;
    r->was = (struct ht_refcount_table){0};
    if (r->former.size < LARGE) {
        const struct ht_refcount_table small = ht_refcounts_take_former(s);
        ht_refcount_table_free(&small);
    }
}

/*
 * Looks at some places of the former table, and then at more until one is empty. So searches there find what is left:
 * an entry lies behind its home without an empty place in between.
 */
static void move_some(struct ht_store *s, size_t places) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_refcounts *r = &s->frees.refcounts;
    bool settled = is_settled(s), in_chain = false;

    for (; r->left && (places || in_chain); r->left--) {
        struct ht_refcount *e = &r->was.entry[r->at];
        r->at = (r->at + 1) & (r->was.size - 1);
        places -= places ? 1 : 0;
        in_chain = e->owners;
        if (!e->owners)
            continue;
        /* One owner, and nothing to wait for once the log is durable: the open transaction ended no other. */
        if (settled && e->owners == 1 && e->ended != s->frees.tx_count) {
            r->single--;
        } else {
            *find(&r->now, e->key) = *e;
            r->now.count++;
        }
        e->owners = 0;
        r->was.count--;
    }
    if (r->was.size && !r->left)
        end_move(s);
}

static void move_all(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    while (s->frees.refcounts.was.size) {
        move_some(s, PLACES_PER_ADD);
        ht_lock_step();
    }
}

/* The table begins to move to one of that size. */
static int begin_move(struct ht_store *s, size_t size) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_refcounts *r = &s->frees.refcounts;
    struct ht_refcount_table table;
    int rc = new_table(&table, size);

    if (rc)
        return rc;
    assert(!r->was.size);
    r->was = r->now;
    r->now = table;
    r->left = r->was.size;
    r->at = 0;
    while (r->at < r->was.size && r->was.entry[r->at].owners) /* not within a chain */
        r->at++;
    s->objects.meta_bytes += size * sizeof(*table.entry);
    return 0;
}

/*
 * A table of the same size is enough if many entries are idle. It is fuller than that if the last one left out too few.
 */
static int make_room(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_refcounts *r = &s->frees.refcounts;
    size_t size = r->now.size, full = size / 4 * 3;

    if (!size)
        return begin_move(s, TABLE_START);
    if (r->now.count >= full) {
        bool idle = !r->was.size && r->now.count == full && is_settled(s) && r->single > size / 4;
        move_all(s);
        int rc = begin_move(s, idle ? size : size * 2);
        if (rc)
            return rc;
    }
    move_some(s, PLACES_PER_ADD);
    return 0;
}

/* ---------------------------------------------------------------- owners */

int ht_refcount_add(struct ht_store *s, const struct ht_ref *ref, bool named)
{
    struct ht_refcounts *r = &s->frees.refcounts;
    struct ht_refcount_table *t;
    int rc = ht_ref_is_cold(ref) ? 0 : make_room(s);

    if (rc || ht_ref_is_cold(ref))
        return rc;
    struct ht_refcount *e = lookup(r, ht_ref_place(ref), &t);
    if (!e) {
        e = find(&r->now, ht_ref_place(ref));
        *e = (struct ht_refcount){.key = ht_ref_place(ref), .ended = UINT64_MAX, .owners = 1};
        r->now.count++;
        r->single++;
    }
    r->single -= e->owners == 1;
    e->owners++;
    e->named |= named;
    return 0;
}

void ht_refcount_named(struct ht_store *s, const struct ht_ref *ref)
{
    struct ht_refcount_table *t;
    struct ht_refcount *e = ref->shared ? lookup(&s->frees.refcounts, ht_ref_place(ref), &t) : NULL;

    if (e)
        e->named = true;
}

enum ht_refcount_left ht_refcount_drop(struct ht_store *s, const struct ht_ref *ref, bool logged)
{
    struct ht_refcounts *r = &s->frees.refcounts;
    struct ht_refcount_table *t;
    struct ht_refcount *e = ref->shared ? lookup(r, ht_ref_place(ref), &t) : NULL;

    if (ht_ref_is_cold(ref))
        return HT_REFCOUNT_OWNED;
    if (!e)
        return HT_REFCOUNT_FREE;
    if (e->owners > 1 && !HT_MUTANT("owner-forgotten")) {
        e->owners--;
        r->single += e->owners == 1;
        if (logged)
            e->ended = s->frees.tx_count;
        return HT_REFCOUNT_OWNED;
    }
    enum ht_refcount_left left = !e->named ? HT_REFCOUNT_FREE
        : e->ended == s->frees.tx_count    ? HT_REFCOUNT_WITH_TX
                                           : HT_REFCOUNT_LATER;
    r->single -= e->owners == 1;
    take_out(t, e);
    return left;
}

void ht_refcounts_free(struct ht_store *s)
{
    ht_refcount_table_free(&s->frees.refcounts.now);
    ht_refcount_table_free(&s->frees.refcounts.was);
    ht_refcount_table_free(&s->frees.refcounts.former);
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
