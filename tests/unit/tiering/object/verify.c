/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.c - asserts the invariants of objects and their chunks that the headers state (tiering/base/verify.h).
 *
 * Some sums are exact only while no thread works on the store: a thread that holds a chunk may have space that no
 * reference names yet. Until then they are bounds.
 */

#include "tiering/object/object.h"
#include "tiering/base/idtable.h"
#include "tiering/codec/codec.h"
#include "tiering/space/alloc.h"
#include "tiering/cache/arena.h"
#include "tiering/object/context.h"

/* What chunks add up to: those of a leaf, an object or the store. */
struct tally {
    uint32_t dirty, unpublished, resident, writing, held;
    uint64_t published, lost;
    uint64_t stored_blocks, shared_blocks, prealloc_blocks, reserved_blocks, superseded_blocks, dirty_bytes;
    uint64_t cold_blocks;
    uint64_t log_chunks;
};

static void add(struct tally *to, const struct tally *t)
{
    to->dirty += t->dirty;
    to->unpublished += t->unpublished;
    to->resident += t->resident;
    to->writing += t->writing;
    to->held += t->held;
    to->published += t->published;
    to->lost += t->lost;
    to->stored_blocks += t->stored_blocks;
    to->shared_blocks += t->shared_blocks;
    to->cold_blocks += t->cold_blocks;
    to->prealloc_blocks += t->prealloc_blocks;
    to->reserved_blocks += t->reserved_blocks;
    to->superseded_blocks += t->superseded_blocks;
    to->dirty_bytes += t->dirty_bytes;
    to->log_chunks += t->log_chunks;
}

/* ---------------------------------------------------------------- chunks */

/* The reference has space of its own: it is the published one, or a current one that does not narrow it. */
static bool owns_cur(const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_chunk_has_place(c);
}

static void check_flags(const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned current = c->flags & (HT_CH_CUR | HT_CH_GONE);

    assert(current != (HT_CH_CUR | HT_CH_GONE));
    assert(!(c->flags & HT_CH_GONE) || (c->flags & HT_CH_PUB));
    assert(!(c->flags & HT_CH_BAD) || !(c->flags & HT_CH_CUR));
    assert(!c->exclusive || !c->shared);
    assert(!c->writing || c->shared);
    if (!(c->flags & HT_CH_SHARE))
        return;
    assert((c->flags & HT_CH_PUB) && (c->flags & HT_CH_CUR));
    assert(ht_ref_same_place(&c->cur, &c->pub) && c->cur.shared == c->pub.shared);
    assert(c->cur.visible < c->pub.visible);
}

static void check_ref(const struct ht_obj *o, const struct ht_ref *ref, struct tally *t) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t blocks = ht_ref_blocks(ref), listed = 0;

    struct ht_codec_sizes z = {ref->codec, ht_ref_holds(ref) ? ht_ref_extents(ref) : 0, ref->stored, ref->visible,
                               ref->checksum};
    assert(ht_codec_sizes_valid(&z) && ht_ref_image_bytes(ref) <= ht_obj_bytes_per_chunk(o));
    for (unsigned i = 0; i < ht_ref_extents(ref); i++)
        listed += ht_ref_extent(ref, i).blocks;
    assert(listed == blocks);
    t->lost += ht_ref_lost(ref);
    t->stored_blocks += blocks;
    t->shared_blocks += ref->shared ? blocks : 0;
    t->cold_blocks += ht_ref_is_cold(ref) ? blocks : 0;
    assert(!ht_ref_is_cold(ref) || (ref->shared && o->obj_class != HT_CLASS_SCRATCH));
}

/* An image is as long as each reference, its bytes are valid in one interval, and it knows its chunk. */
static void check_image(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index, struct tally *t)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_arena *a = o->s->arena;
    const struct ht_image *im = ht_arena_image(a, c->slot);
    uint32_t bytes = ht_arena_slot_bytes(a, c->slot);

    assert(im->owner == o && im->index == index);
    assert(!im->dirty || !c->writing);
    assert(!ht_arena_is_external(a, c->slot) || o->extra->shm);
    assert(!(c->flags & HT_CH_PUB) || ht_ref_image_bytes(&c->pub) <= bytes);
    assert(!owns_cur(c) || ht_ref_image_bytes(&c->cur) <= bytes);
    t->resident++;
    t->dirty += im->dirty;
    t->dirty_bytes += im->dirty ? bytes : 0;
    t->reserved_blocks += im->reserved_blocks;
}

/* Log bytes are reserved for the record of each chunk that has content to publish, and for no idle one without. */
static void check_log_reserve(const struct ht_obj *o, const struct ht_chunk *c, bool dirty) HT_REQUIRES(HT_LOCK_STORE)
{
    bool live = c->writing || c->prealloc || dirty || c->flags & (HT_CH_PUB | HT_CH_CUR);
    bool held = c->exclusive || c->shared;

    if (o->obj_class == HT_CLASS_SCRATCH)
        assert(!(c->flags & HT_CH_LOG_RESERVED));
    else if (live)
        assert(c->flags & HT_CH_LOG_RESERVED);
    else if (!held)
        assert(c->flags != HT_CH_LOG_RESERVED);
}

static void check_chunk(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index, struct tally *t)
    HT_REQUIRES(HT_LOCK_STORE)
{
    check_flags(c);
    if (c->flags & HT_CH_PUB)
        check_ref(o, &c->pub, t);
    if (owns_cur(c))
        check_ref(o, &c->cur, t);
    uint32_t dirty = t->dirty;
    if (c->slot != HT_SLOT_NONE)
        check_image(o, c, index, t);
    check_log_reserve(o, c, t->dirty > dirty);
    t->published += (c->flags & HT_CH_PUB) != 0;
    t->unpublished += ht_chunk_unpublished(c);
    t->superseded_blocks += o->scope == o->s->objects.scope0 ? ht_chunk_superseded_blocks(c) : 0;
    t->log_chunks += (c->flags & HT_CH_LOG_RESERVED) != 0;
    t->writing += c->writing;
    t->held += c->exclusive || c->shared;
    t->prealloc_blocks += c->prealloc;
}

/* ---------------------------------------------------------------- tables */

/* The bits of a leaf's busy chunks. One that is shared, or waited for, may have a bit from before. */
static void check_busy(const struct ht_leaf *l, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned k = index & (HT_LEAF_CHUNKS - 1); k < HT_LEAF_CHUNKS; k++) {
        const struct ht_chunk *c = &l->chunk[k];
        bool is = c->exclusive || ht_chunk_has_content(c), noted = l->busy >> k & 1;
        assert(noted == is || (noted && (c->shared || l->head.users)));
    }
}

static bool has_idle(const struct ht_leaf *l, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned idle = 0;

    for (unsigned k = index < HT_LEAF_CHUNKS; k < HT_LEAF_CHUNKS; k++)
        idle += !(l->busy >> k & 1);
    return idle;
}

/* Chunks of one leaf, and whether it may be there: the object's first leaf has one chunk. */
static void check_leaf(const struct ht_obj *o, struct ht_chunk *first, uint64_t index, unsigned count,
                       struct tally *all) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_leaf_head *head = ht_chunk_leaf(first);
    bool in_use = !index || head->users;
    struct tally t = {0};

    for (unsigned k = 0; k < count; k++) {
        check_chunk(o, &first[k], index + k, &t);
        in_use |= ht_chunk_in_use(&first[k]);
    }
    if (index)
        check_busy((const struct ht_leaf *)head, index);
    assert(head->dirty == t.dirty && head->unpublished == t.unpublished && head->writing == t.writing);
    assert(in_use);
    add(all, &t);
}

static void check_marks(const struct ht_node *n, unsigned height, uint64_t k, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    const void *p = n->slot[k];
    bool busy = n->mask[HT_MARK_BUSY] >> k & 1, idle = n->mask[HT_MARK_IDLE] >> k & 1;

    if (!p) {
        assert(!busy && idle);
    } else if (height == 1) {
        const struct ht_leaf *l = p;
        assert(busy == (l->busy != 0) && idle == has_idle(l, index));
    } else {
        const struct ht_node *below = p;
        assert(busy == (below->mask[HT_MARK_BUSY] != 0) && idle == (below->mask[HT_MARK_IDLE] != 0));
    }
}

static uint64_t check_table(const struct ht_obj *o, void *p, unsigned height, uint64_t index, struct tally *all)
    HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned shift = HT_LEAF_SHIFT + HT_NODE_SHIFT * height;
    uint64_t bytes = sizeof(struct ht_node);

    if (!p)
        return 0;
    if (!height) {
        struct ht_leaf *l = p;
        assert(index || !ht_chunk_in_use(&l->chunk[0]));
        check_leaf(o, &l->chunk[!index], index + !index, HT_LEAF_CHUNKS - !index, all);
        return sizeof(*l);
    }
    const struct ht_node *n = p;
    for (uint64_t k = 0; k < HT_NODE_SLOTS; k++) {
        uint32_t unpublished = all->unpublished;
        uint64_t below = index | k << (shift - HT_NODE_SHIFT);
        bytes += check_table(o, n->slot[k], height - 1, below, all);
        assert((n->mask[HT_MARK_UNPUBLISHED] >> k & 1) == (all->unpublished > unpublished));
        check_marks(n, height, k, below);
    }
    assert(bytes > sizeof(struct ht_node));
    return bytes;
}

/* --------------------------------------------------------------- objects */

static void check_life(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    bool listed = !ht_list_empty(&o->touched);
    bool changed = o->dirty || o->writing || o->unpublished || o->meta_dirty;

    assert(!listed || o->refs);
    assert(!o->leaving || (o->deleted && (listed || o->dead)));
    assert(!o->dead || (o->deleted && o->refs && !o->published));
    assert(o->published || !o->deleted || o->dead);
    assert(!o->vanished || o->dead || o->scope->aborting);
    assert(o->obj_class != HT_CLASS_SCRATCH || (!o->published && (!listed || o->ending)));
    assert(listed || !changed || o->dead || o->obj_class == HT_CLASS_SCRATCH);
}

static void check_object(struct ht_obj *o, struct tally *all, uint64_t *tables_bytes) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_obj_extra *x = o->extra;
    struct tally t = {0};

    if (o->first.head.there)
        check_leaf(o, &o->first.chunk, 0, 1, &t);
    *tables_bytes += check_table(o, x->root, x->height, 0, &t);
    assert(x->root || !x->height);
    assert(o->dirty == t.dirty && o->unpublished == t.unpublished);
    assert(o->resident == t.resident && o->writing == t.writing);
    assert(o->stored_blocks >= t.stored_blocks && (t.held || o->stored_blocks == t.stored_blocks));
    assert(ht_obj_shared_blocks(o) == t.shared_blocks && x->prealloc_blocks == t.prealloc_blocks);
    assert(ht_obj_cold_blocks(o) == t.cold_blocks);
    assert(!ht_obj_has_extra(o) || x->log_chunks == t.log_chunks);
    assert(x->rewrite_reserve_left <= 2 * x->rewrite_reserve_blocks);
    assert(!x->may_be_dirty || x->shm);
    check_life(o);
    t.reserved_blocks += x->rewrite_reserve_left + t.prealloc_blocks;
    add(all, &t);
}

void ht_obj_verify(struct ht_obj *o)
{
    struct tally t = {0};
    uint64_t bytes = 0;

    if (!o->s->opts.leave_out) /* with leave_out errors of the log stay as they are */
        check_object(o, &t, &bytes);
}

/* ----------------------------------------------------------------- space */

/* Counts references to each entry of the table of owners, and the blocks, with shared ones once. */
struct owners {
    const struct ht_store *s;
    const struct ht_refcount **entry; /* all, by their places */
    uint32_t *count;                  /* of each */
    size_t entries;
    uint64_t blocks;
};

static int compare_entries(const void *a, const void *b)
{
    uint64_t x = (*(const struct ht_refcount *const *)a)->by_place.id,
             y = (*(const struct ht_refcount *const *)b)->by_place.id;

    return x < y ? -1 : x > y;
}

/* False: no memory. */
static bool list_entries(struct owners *w) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_id_table *t = &w->s->frees.refcounts.table;

    w->entry = malloc((t->count + 1) * sizeof(struct ht_refcount *));
    w->count = calloc(t->count + 1, sizeof(*w->count));
    for (size_t b = 0; w->entry && w->count && b < t->buckets.count; b++)
        for (const struct ht_id_link *l = *ht_bucket_at(&t->buckets, b); l; l = l->next)
            w->entry[w->entries++] = ht_container_of(l, const struct ht_refcount, by_place);
    if (!w->entry || !w->count)
        return false;
    qsort(w->entry, w->entries, sizeof(struct ht_refcount *), compare_entries);
    return true;
}

static void count_owner(struct owners *w, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_refcount *e = ht_refcount_find(w->s, ref);
    const struct ht_refcount *const *found =
        e ? bsearch(&e, w->entry, w->entries, sizeof(struct ht_refcount *), compare_entries) : NULL;
    uint32_t *count = found ? &w->count[found - w->entry] : NULL;

    assert(!e || (found && *found == e));

    if (!count || !*count)
        w->blocks += ht_ref_holds(ref) ? ht_ref_countable(w->s, ref) : 0;
    if (count)
        ++*count;
}

static void count_owners(struct owners *w, struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_chunk_for_each(c, o, index) {
        if (c->flags & HT_CH_PUB)
            count_owner(w, &c->pub);
        if (owns_cur(c))
            count_owner(w, &c->cur);
    }
}

static uint64_t fixed_blocks(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t blocks = 0;

    for (unsigned i = 0; i < s->dev_count; i++) {
        const struct ht_extent super = {0, HT_SUPER_COPIES, i};
        struct ht_alloc_device d;
        ht_alloc_device(s->alloc, i, &d);
        blocks += ht_alloc_countable(s->alloc, &super);
        blocks += ht_alloc_countable(s->alloc, &super) ? d.bad_blocks : 0;
    }
    for (unsigned k = 0; k < HT_LOG_COPIES; k++) {
        const struct ht_extent log = {0, (uint32_t)(s->layout.log_bytes / HT_BLOCK_BYTES), s->layout.log_device[k]};
        blocks += ht_alloc_countable(s->alloc, &log);
    }
    return blocks;
}

static uint64_t pending_free(const struct ht_store *s, const struct ht_deferred_frees *q) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t blocks = 0;

    for (const struct ht_deferred_free *f = q->first; f; f = f->next)
        blocks += ht_ref_countable(s, &f->ref);
    return blocks;
}

/* Each block that is not free has a reason. A check without memory for its counts looks at the bitmaps only. */
static void check_space(struct ht_store *s, bool idle) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_refcounts *r = &s->frees.refcounts;
    struct owners w = {.s = s};
    uint64_t deferred = pending_free(s, &s->frees.logged) + pending_free(s, &s->frees.open);
    bool listed = list_entries(&w);
    size_t single = 0;

    ht_alloc_verify(s->alloc, deferred);
    for (size_t b = 0; listed && b < s->objects.table.buckets.count; b++)
        ht_obj_for_each_in_bucket(o, s, b)
            count_owners(&w, o);
    for (size_t i = 0; i < w.entries; i++) {
        uint32_t owners = w.entry[i]->owners;
        single += owners == 1;
        assert(owners > 0 && owners >= w.count[i] && (!idle || owners == w.count[i]));
    }
    assert(!listed || (w.entries == r->table.count && single == r->single));
    uint64_t used = ht_alloc_total(s->alloc) - ht_alloc_free_blocks(s->alloc) - ht_alloc_discarding(s->alloc, false);
    uint64_t named = fixed_blocks(s) + w.blocks + deferred + s->frees.lost_blocks;
    assert(!listed || (used >= named - s->frees.lost_blocks && (!idle || used == named)));
    free(w.entry);
    free(w.count);
}

/* ----------------------------------------------------------------- store */

static size_t count_listed(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    size_t listed = 0;

    for (const struct ht_scope *sc = s->objects.scopes; sc; sc = sc->next)
        ht_list_for_each_entry(o, &sc->touched, const struct ht_obj, touched) {
            assert(o->scope == sc && !o->leaving);
            listed++;
        }
    return listed;
}

/* Each image of the arena belongs to a chunk that knows it, or that a thread is moving. */
static void check_images(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t hand = 0, slot, last = 0;

    while ((slot = ht_arena_next_used(s->arena, &hand)) != HT_SLOT_NONE && slot >= last) {
        const struct ht_image *im = ht_arena_image(s->arena, slot);
        const struct ht_chunk *c = ht_chunk_find(im->owner, im->index);
        assert(c && (c->slot == slot || c->exclusive));
        last = slot + 1;
    }
}

void ht_objects_verify(struct ht_store *s, bool idle)
{
    struct tally t = {0};
    uint64_t tables_bytes = 0;
    size_t count = 0, listed = 0;

    for (size_t b = 0; b < s->objects.table.buckets.count; b++)
        ht_obj_for_each_in_bucket(o, s, b) {
            assert(ht_bucket_of(&s->objects.table.buckets, ht_id_hash(o->oid)) == b);
            check_object(o, &t, &tables_bytes);
            listed += !ht_list_empty(&o->touched) && !o->leaving && !o->ending;
            count++;
        }
    assert(s->objects.table.count == count && count_listed(s) == listed);
    assert(s->objects.chunks == t.published && s->objects.lost_chunks == t.lost);
    assert(s->objects.superseded_blocks == t.superseded_blocks && s->objects.cold_blocks == t.cold_blocks);
    assert(s->objects.tables_bytes == tables_bytes && s->objects.meta_bytes >= tables_bytes);
    assert(s->flow.dirty_bytes == t.dirty_bytes && s->flow.writing == t.writing);
    assert(!idle || (!t.held && !s->flow.writing_blocks));
    uint64_t reserved = ht_alloc_reserved(s->alloc);
    t.reserved_blocks += s->objects.aside_blocks;
    assert(reserved >= t.reserved_blocks && (!idle || reserved == t.reserved_blocks));
    check_images(s);
    check_space(s, idle);
    ht_arena_verify(s->arena);
}
