/* SPDX-License-Identifier: Apache-2.0 */
/* chunk.c - an object's chunks: table, locks, state changes. store.lock is held throughout. */
#include <assert.h>
#include <stdlib.h>

#include "tiering/base/event.h"
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

/* Five nodes, one below the other, reach the last chunk of the largest object. */
enum { HEIGHT_MAX = 5 };
static_assert(HT_FILE_BYTES_MAX / HT_SMALL_CHUNK_BYTES <= 1ull << (LEAF_SHIFT + NODE_SHIFT * HEIGHT_MAX),
              "a table's height");

static void count_table(struct ht_store *s, int64_t bytes)
{
    s->tables_bytes += (uint64_t)bytes;
    s->meta_bytes += (uint64_t)bytes;
}

static struct ht_node *new_node(struct ht_obj *o)
{
    struct ht_node *n = calloc(1, sizeof(*n));
    if (n)
        count_table(o->s, sizeof(*n));
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
    count_table(o->s, sizeof(*l));
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
    assert(x->height <= HEIGHT_MAX);
    return 0;
}

/* --- and giving back what of it nobody needs */

static bool is_leaf_in_use(const struct ht_leaf *l)
{
    for (unsigned k = 0; k < LEAF_CHUNKS; k++)
        if (ht_chunk_in_use(&l->chunk[k]))
            return true;
    return l->head.users;
}

static void free_leaf(struct ht_obj *o, struct ht_leaf *l)
{
    count_table(o->s, -(int64_t)sizeof(*l));
    free(l);
}

static void free_node(struct ht_obj *o, struct ht_node *n)
{
    count_table(o->s, -(int64_t)sizeof(*n));
    free(n);
}

/* Slots from the first up that are empty. */
static unsigned empty_slots(const struct ht_node *n, unsigned first)
{
    unsigned k = first;
    while (k < NODE_SLOTS && !n->slot[k])
        k++;
    return k - first;
}

/* As high as the chunks ask for that are left. */
static void lower(struct ht_obj *o)
{
    struct ht_obj_extra *x = ht_obj_extra(o);
    while (x->height && x->root && empty_slots(x->root, 1) == NODE_SLOTS - 1) {
        struct ht_node *n = x->root;
        x->root = n->slot[0];
        x->height--;
        free_node(o, n);
    }
    if (!x->root)
        x->height = 0;
}

void ht_chunk_trim(struct ht_obj *o, uint64_t index)
{
    if (!index || (!o->extra->root && !o->extra->height) || !within(o, index))
        return;
    void **way[HEIGHT_MAX], **p = &ht_obj_extra(o)->root; /* way: to the nodes above */
    unsigned depth = 0, shift = shift_of(o->extra->height);
    while (*p && shift > LEAF_SHIFT) {
        struct ht_node *n = *p;
        way[depth++] = p;
        shift -= NODE_SHIFT;
        p = &n->slot[index >> shift & (NODE_SLOTS - 1)];
    }
    if (*p) {
        struct ht_leaf *l = *p;
        if (is_leaf_in_use(l))
            return;
        assert(!l->head.dirty && !l->head.unpublished && !l->head.writing);
        free_leaf(o, l);
        *p = NULL;
    }
    while (depth && empty_slots(*way[depth - 1], 0) == NODE_SLOTS) {
        free_node(o, *way[--depth]);
        *way[depth] = NULL;
    }
    lower(o);
}

static struct ht_leaf *make_leaf(struct ht_obj *o, uint64_t index)
{
    if (raise(o, index))
        return NULL;
    void **p = &ht_obj_extra(o)->root;
    for (unsigned shift = shift_of(o->extra->height); shift > LEAF_SHIFT;) {
        if (!*p && !(*p = new_node(o)))
            return NULL;
        shift -= NODE_SHIFT;
        p = &((struct ht_node *)*p)->slot[index >> shift & (NODE_SLOTS - 1)];
    }
    return *p = new_leaf(o);
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
    struct ht_leaf *l = ht_obj_need_extra(o) ? NULL : make_leaf(o, index);
    if (!l)
        ht_chunk_trim(o, index); /* the nodes that were made for it */
    return l ? &l->chunk[index & (LEAF_CHUNKS - 1)] : NULL;
}

static void tell_tables_full(const struct ht_obj *o)
{
    struct ht_store *s = o->s;
    const struct ht_event_about about = {.id = o->oid, .error = -ENOSPC};
    char size[32];
    if (!s->tables_full)
        ht_event(
            HT_EVENT_NO_SPACE, &about,
            "object %llu cannot have one more place apart from its others: sparse files have the %s of memory that they may; "
            "delete some, or make a store with a larger log (mkfs.hitrain --log-size=)",
            (unsigned long long)o->oid, ht_format_size(s->tables_bytes_max, size, sizeof(size)));
    s->tables_full = true;
}

int ht_chunk_ask(struct ht_obj *o, uint64_t index, struct ht_chunk **out_c)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c = ht_chunk_find(o, index);
    if (!c && index && s->tables_bytes >= s->tables_bytes_max) {
        tell_tables_full(o);
        return -ENOSPC;
    }
    if (!c) {
        c = ht_chunk_make(o, index);
        s->tables_full = false;
    }
    if (!c)
        return -ENOMEM;
    *out_c = c;
    return 0;
}

/* Recursion ends after height steps, five at most. */
static void free_below(struct ht_obj *o, void *p, unsigned height)
{
    for (unsigned k = 0; p && height && k < NODE_SLOTS; k++)
        free_below(o, ((struct ht_node *)p)->slot[k], height - 1);
    if (p && height)
        free_node(o, p);
    else if (p)
        free_leaf(o, p);
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
    struct ht_leaf_head *leaf = ht_chunk_leaf(c);
    leaf->users++;
    ht_store_wait(s, &s->chunk_cond[cond_of(c)], 0);
    leaf->users--;
}

/* A thread has let go of it, or changed it without its lock: maybe there is nothing left. */
static void end_use(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    if (c->flags == CH_CLAIM && !c->exclusive && !c->shared)
        ht_chunk_settle_claim(o, c);
    if (!ht_chunk_in_use(c))
        ht_chunk_trim(o, index);
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

static void let_go_shared(struct ht_store *s, struct ht_chunk *c)
{
    assert(c->shared);
    bool was_full = c->shared-- == HT_CHUNK_HOLDERS_MAX;
    if (was_full || !c->shared)
        wake_chunk(s, c);
}

static void let_go_exclusive(struct ht_store *s, struct ht_chunk *c)
{
    assert(c->exclusive);
    c->exclusive = 0;
    wake_chunk(s, c);
}

void ht_chunk_unlock_shared(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    assert(ht_chunk_find(o, index) == c);
    let_go_shared(o->s, c);
    end_use(o, c, index);
}

void ht_chunk_unlock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    assert(ht_chunk_find(o, index) == c);
    let_go_exclusive(o->s, c);
    end_use(o, c, index);
}

void ht_chunk_relock_exclusive(struct ht_store *s, struct ht_chunk *c)
{
    let_go_shared(s, c);
    ht_chunk_lock_exclusive(s, c);
}

int ht_chunk_wait(struct ht_store *s, struct ht_chunk *c, pthread_cond_t *cond, uint64_t at_ns)
{
    struct ht_leaf_head *leaf = ht_chunk_leaf(c);
    let_go_exclusive(s, c);
    leaf->users++;
    int rc = ht_store_wait(s, cond, at_ns);
    ht_chunk_lock_exclusive(s, c);
    leaf->users--;
    return rc;
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
    if (is) {
        o->unpublished++;
        ht_chunk_leaf(c)->unpublished++;
        ht_obj_touch(o);
    } else {
        o->unpublished--;
        ht_chunk_leaf(c)->unpublished--;
    }
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
