/* SPDX-License-Identifier: Apache-2.0 */
/* chunk.c - an object's chunks: table, locks, state changes. store.lock is held throughout. */
#include <assert.h>
#include <stdlib.h>

#include "tiering/store/store_priv.h"

/* ----------------------------------------------------------------- table */

/* Chunks below this many are within a tree of that height. */
static unsigned shift_of(unsigned height)
{
    return LEAF_SHIFT + NODE_SHIFT * height;
}

/* Down towards index: the leaf, or NULL; *out_shift: what is missing is 1 << *out_shift chunks wide. */
static struct ht_leaf *descend(const struct ht_obj *o, uint64_t index, unsigned *out_shift)
{
    unsigned shift = shift_of(o->extra->height);
    void *p = o->extra->root;
    while (p && shift > LEAF_SHIFT) {
        shift -= NODE_SHIFT;
        p = ((struct ht_node *)p)->slot[index >> shift & (NODE_SLOTS - 1)];
    }
    *out_shift = shift;
    return p;
}

static bool within(const struct ht_obj *o, uint64_t index)
{
    return index >> shift_of(o->extra->height) == 0;
}

struct ht_chunk *ht_chunk_find(struct ht_obj *o, uint64_t index)
{
    if (!index)
        return o->first.head.there ? &o->first.chunk : NULL;
    unsigned shift;
    struct ht_leaf *l = within(o, index) ? descend(o, index, &shift) : NULL;
    return l ? &l->chunk[index & (LEAF_CHUNKS - 1)] : NULL;
}

struct ht_chunk *ht_chunk_next(struct ht_obj *o, uint64_t *index)
{
    if (!*index && o->first.head.there)
        return &o->first.chunk;
    *index += !*index;
    while (within(o, *index)) {
        unsigned shift;
        struct ht_leaf *l = descend(o, *index, &shift);
        if (l)
            return &l->chunk[*index & (LEAF_CHUNKS - 1)];
        *index = ((*index >> shift) + 1) << shift;
    }
    return NULL;
}

static struct ht_node *new_node(struct ht_obj *o)
{
    struct ht_node *n = calloc(1, sizeof(*n));
    if (n)
        o->s->meta_bytes += sizeof(*n);
    return n;
}

static struct ht_leaf *new_leaf(struct ht_obj *o)
{
    struct ht_leaf *l = calloc(1, sizeof(*l));
    if (!l)
        return NULL;
    for (unsigned k = 0; k < LEAF_CHUNKS; k++) {
        l->chunk[k].slot = HT_SLOT_NONE;
        l->chunk[k].pos = k & (LEAF_CHUNKS - 1);
    }
    o->s->meta_bytes += sizeof(*l);
    return l;
}

/* Nodes above the root until index is within. */
static int raise(struct ht_obj *o, uint64_t index)
{
    struct ht_obj_extra *x = ht_obj_extra(o);
    while (!within(o, index)) {
        if (x->root) {
            struct ht_node *n = new_node(o);
            if (!n)
                return -ENOMEM;
            n->slot[0] = x->root;
            x->root = n;
        }
        x->height++;
    }
    return 0;
}

struct ht_chunk *ht_chunk_make(struct ht_obj *o, uint64_t index)
{
    struct ht_chunk *c = ht_chunk_find(o, index);
    if (c)
        return c;
    if (!index) {
        o->first.chunk.slot = HT_SLOT_NONE;
        o->first.head.there = true;
        return &o->first.chunk;
    }
    if (ht_obj_need_extra(o) || raise(o, index))
        return NULL;
    void **p = &ht_obj_extra(o)->root;
    for (unsigned shift = shift_of(o->extra->height); shift > LEAF_SHIFT;) {
        if (!*p && !(*p = new_node(o)))
            return NULL;
        shift -= NODE_SHIFT;
        p = &((struct ht_node *)*p)->slot[index >> shift & (NODE_SLOTS - 1)];
    }
    struct ht_leaf *l = *p = new_leaf(o);
    return l ? &l->chunk[index & (LEAF_CHUNKS - 1)] : NULL;
}

/* Recursion ends after height steps, five at most. */
static void free_below(struct ht_obj *o, void *p, unsigned height)
{
    for (unsigned k = 0; p && height && k < NODE_SLOTS; k++)
        free_below(o, ((struct ht_node *)p)->slot[k], height - 1);
    if (p)
        o->s->meta_bytes -= height ? sizeof(struct ht_node) : sizeof(struct ht_leaf);
    free(p);
}

void ht_chunks_free(struct ht_obj *o)
{
    free_below(o, o->extra->root, o->extra->height);
}

/* ----------------------------------------------------------------- locks */

static_assert(COND_COUNT == 64, "bits of a word");
static unsigned cond_of(const struct ht_chunk *c)
{
    return (unsigned)(((uintptr_t)c >> 6) * 0x9e3779b97f4a7c15ull >> 58);
}

static void wait_chunk(struct ht_store *s, struct ht_chunk *c)
{
    ht_store_wait(s, &s->chunk_cond[cond_of(c)], 0);
}

/* Its image may go. A dirty one has to be written first: those who wait do that when nobody else does. */
static bool frees_slot(const struct ht_store *s, const struct ht_chunk *c)
{
    if (!s->slot_waiters || c->slot == HT_SLOT_NONE || c->exclusive || c->shared)
        return false;
    return !s->writing || !ht_arena_image(s->arena, c->slot)->dirty;
}

static void wake_chunk(struct ht_store *s, struct ht_chunk *c)
{
    s->wakes.chunks |= UINT64_C(1) << cond_of(c);
    s->wakes.any = true;
    if (frees_slot(s, c))
        ht_wake_for_slot(s, c->slot);
}

void ht_chunk_lock_shared(struct ht_store *s, struct ht_chunk *c)
{
    while (c->exclusive || c->waiting || c->shared == HT_CHUNK_HOLDERS_MAX)
        wait_chunk(s, c);
    c->shared++;
}

bool ht_chunk_trylock_exclusive(struct ht_chunk *c)
{
    if (c->exclusive || c->shared)
        return false;
    c->exclusive = 1;
    return true;
}

void ht_chunk_lock_exclusive(struct ht_store *s, struct ht_chunk *c)
{
    while (c->exclusive || c->shared) {
        c->waiting = 1; /* whoever gets it clears the wish; others set it again */
        wait_chunk(s, c);
    }
    c->waiting = 0;
    c->exclusive = 1;
}

void ht_chunk_unlock_shared(struct ht_store *s, struct ht_chunk *c)
{
    assert(c->shared);
    bool was_full = c->shared-- == HT_CHUNK_HOLDERS_MAX;
    if (was_full || !c->shared)
        wake_chunk(s, c);
}

void ht_chunk_unlock_exclusive(struct ht_store *s, struct ht_chunk *c)
{
    assert(c->exclusive);
    c->exclusive = 0;
    wake_chunk(s, c);
}

void ht_chunk_downgrade(struct ht_store *s, struct ht_chunk *c)
{
    assert(c->exclusive);
    c->exclusive = 0;
    c->shared = 1;
    wake_chunk(s, c);
}

/* ----------------------------------------------------------------- state */

uint32_t ht_chunk_len(const struct ht_obj *o, uint64_t index)
{
    uint64_t start = index << o->chunk_shift;
    if (start >= o->size)
        return 0;
    return (uint32_t)ht_min_u64(o->size - start, ht_obj_bytes_per_chunk(o));
}

struct ht_ref *ht_chunk_ref(struct ht_chunk *c)
{
    if (c->flags & CH_GONE)
        return NULL;
    if (c->flags & CH_CUR)
        return &c->cur;
    return c->flags & CH_PUB ? &c->pub : NULL;
}

/* An image that was made for something that failed. */
void ht_chunk_drop_empty(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    if (c->slot == HT_SLOT_NONE)
        return;
    const struct ht_image *im = ht_arena_image(o->s->arena, c->slot);
    if (!im->dirty && im->valid_lo == im->valid_hi)
        ht_chunk_drop_image(o, c, index);
}

void ht_chunk_set_dirty(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_image *im = ht_arena_image(o->s->arena, c->slot);
    o->version++;
    if (im->dirty)
        return;
    ht_arena_set_dirty(o->s->arena, c->slot, true);
    o->dirty++;
    ht_chunk_leaf(c)->dirty++;
    o->s->dirty_bytes += ht_arena_slot_bytes(o->s->arena, c->slot);
    if (ht_arena_under_pressure(o->s->arena))
        o->s->wakes.writeback = o->s->wakes.any = true;
    ht_obj_touch(o);
}

void ht_chunk_set_clean(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_image *im = ht_arena_image(o->s->arena, c->slot);
    if (!im->dirty)
        return;
    ht_arena_set_dirty(o->s->arena, c->slot, false);
    o->dirty--;
    ht_chunk_leaf(c)->dirty--;
    o->s->dirty_bytes -= ht_arena_slot_bytes(o->s->arena, c->slot);
}

void ht_chunk_attach_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t slot)
{
    ht_arena_attach(o->s->arena, slot, o, index, o->obj_class != HT_CLASS_SCRATCH);
    ht_arena_image(o->s->arena, slot)->home = ht_chunk_home_stored(o->s, c);
    c->slot = slot;
    o->resident++;
}

void ht_chunk_keep(struct ht_obj *o, struct ht_chunk *c)
{
    if (ht_arena_may_keep(o->s->arena, c->slot))
        ht_arena_keep(o->s->arena, c->slot);
}

void ht_chunk_let_go(struct ht_obj *o, struct ht_chunk *c)
{
    ht_arena_let_go(o->s->arena, c->slot);
}

void ht_chunk_note_unpublished(struct ht_obj *o, struct ht_chunk *c, uint64_t index, bool was)
{
    bool is = ht_chunk_unpublished(c);
    if (is == was)
        return;
    int d = is ? 1 : -1;
    o->unpublished = (uint32_t)((int64_t)o->unpublished + d);
    struct ht_leaf_head *l = ht_chunk_leaf(c);
    l->unpublished = (uint8_t)(l->unpublished + d);
    if (is)
        ht_obj_touch(o);
}

void ht_chunk_install(struct ht_obj *o, struct ht_chunk *c, uint64_t index, const struct ht_ref *ref)
{
    bool was = ht_chunk_unpublished(c);
    ht_chunk_drop_cur(o, c);
    c->cur = *ref;
    c->flags |= CH_CUR;
    /* By force: the bytes are stored already. New writes are refused instead while this exceeds the limit. */
    if (o->obj_class != HT_CLASS_SCRATCH && ht_ref_extents(ref) > 1)
        ht_store_claim_force(o->s, ht_ref_extra_bytes(ref));
    if (ref->visible == ht_obj_bytes_per_chunk(o))
        ht_chunk_unpromise(o, c, 0);
    c->flags &= (uint8_t)~CH_BAD;
    c->generation++;
    ht_chunk_note_unpublished(o, c, index, was);
}

void ht_chunk_install_hole(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    bool was = ht_chunk_unpublished(c);
    ht_chunk_drop_cur(o, c);
    if (c->flags & CH_PUB)
        c->flags |= CH_GONE;
    c->flags &= (uint8_t)~CH_BAD;
    c->generation++;
    ht_chunk_note_unpublished(o, c, index, was);
    ht_chunk_settle_claim(o, c);
}

void ht_chunk_drop_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    if (c->slot == HT_SLOT_NONE)
        return;
    ht_chunk_set_clean(o, c, index);
    ht_chunk_unreserve(o, c);
    ht_wake_for_slot(o->s, c->slot);
    ht_arena_put(o->s->arena, c->slot);
    c->slot = HT_SLOT_NONE;
    o->resident--;
}
