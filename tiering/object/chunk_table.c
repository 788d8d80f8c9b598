/* SPDX-License-Identifier: Apache-2.0 */
/* chunk_table.c - the table of an object's chunks: a radix tree, whose leaves exist while they are in use. */

#include "tiering/base/event.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"

/* Chunks below this many are within a tree of that height. */
static unsigned shift_of(unsigned height)
{
    return HT_LEAF_SHIFT + HT_NODE_SHIFT * height;
}

/* Descends towards index: the leaf, or NULL; *out_shift: the missing subtree is 1 << *out_shift chunks wide. */
static struct ht_leaf *descend(const struct ht_obj *o, uint64_t index, unsigned *out_shift) HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned shift = shift_of(o->extra->height);
    void *p = o->extra->root;

    while (p && shift > HT_LEAF_SHIFT) {
        shift -= HT_NODE_SHIFT;
        p = ((struct ht_node *)p)->slot[index >> shift & (HT_NODE_SLOTS - 1)];
    }
    *out_shift = shift;
    return p;
}

static bool within(const struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    return index >> shift_of(o->extra->height) == 0;
}

struct ht_chunk *ht_chunk_find(struct ht_obj *o, uint64_t index)
{
    if (!index)
        return o->first.head.there ? &o->first.chunk : NULL;
    unsigned shift;
    struct ht_leaf *l = within(o, index) ? descend(o, index, &shift) : NULL;
    return l ? &l->chunk[index & (HT_LEAF_CHUNKS - 1)] : NULL;
}

struct ht_chunk *ht_chunk_next(struct ht_obj *o, uint64_t *index)
{
    ht_lock_step();
    if (!*index && o->first.head.there)
        return &o->first.chunk;
    *index += !*index;
    while (within(o, *index)) {
        unsigned shift;
        struct ht_leaf *l = descend(o, *index, &shift);
        if (l)
            return &l->chunk[*index & (HT_LEAF_CHUNKS - 1)];
        *index = ((*index >> shift) + 1) << shift;
    }
    return NULL;
}

/* ------------------------------------------------------------------ marks */

/* Of the leaf of index. The place of chunk 0 in the tree is unused: it is neither busy nor idle. */
static bool leaf_has(const struct ht_leaf *l, uint64_t index, enum ht_chunk_mark mark)
{
    unsigned all = (1u << HT_LEAF_CHUNKS) - 1, unused = index < HT_LEAF_CHUNKS;

    if (mark == HT_MARK_UNPUBLISHED)
        return l->head.unpublished;
    return mark == HT_MARK_BUSY ? l->busy : (l->busy | unused) != all;
}

/*
 * Descends towards *index, or the next index that may be so. False: none below the same node; *index is behind it.
 * *out_leaf: NULL if there is none, whose chunks would be idle.
 */
static bool descend_marked(const struct ht_obj *o, enum ht_chunk_mark mark, uint64_t *index, struct ht_leaf **out_leaf)
    HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned shift = shift_of(o->extra->height);
    void *p = o->extra->root;

    while (p && shift > HT_LEAF_SHIFT) {
        const struct ht_node *n = p;
        unsigned first = *index >> (shift - HT_NODE_SHIFT) & (HT_NODE_SLOTS - 1);
        uint64_t mask = n->mask[mark] & UINT64_MAX << first;
        if (!mask)
            break;
        shift -= HT_NODE_SHIFT;
        unsigned slot = (unsigned)__builtin_ctzll(mask);
        if (slot > first)
            *index = ((*index >> shift) + slot - first) << shift;
        p = n->slot[slot];
    }
    *out_leaf = p;
    if (p ? shift == HT_LEAF_SHIFT && leaf_has(p, *index, mark) : mark == HT_MARK_IDLE)
        return true;
    *index = ((*index >> shift) + 1) << shift;
    return false;
}

static bool is_first_marked(const struct ht_obj *o, enum ht_chunk_mark mark) HT_REQUIRES(HT_LOCK_STORE)
{
    return o->first.head.there && (mark == HT_MARK_BUSY || o->first.head.unpublished);
}

struct ht_chunk *ht_chunk_next_marked(struct ht_obj *o, enum ht_chunk_mark mark, uint64_t *index)
{
    struct ht_leaf *l;

    ht_lock_step();
    if (!*index && is_first_marked(o, mark))
        return &o->first.chunk;
    *index += !*index;
    if (mark == HT_MARK_UNPUBLISHED && !o->unpublished)
        return NULL;
    while (within(o, *index))
        if (descend_marked(o, mark, index, &l))
            return &l->chunk[*index & (HT_LEAF_CHUNKS - 1)];
    return NULL;
}

uint64_t ht_chunk_next_hole(struct ht_obj *o, uint64_t index)
{
    struct ht_leaf *l;

    if (!index && !(o->first.head.there && ht_chunk_has_content(&o->first.chunk)))
        return 0;
    index += !index;
    while (within(o, index)) {
        ht_lock_step();
        if (!descend_marked(o, HT_MARK_IDLE, &index, &l))
            continue;
        if (!l || !ht_chunk_has_content(&l->chunk[index & (HT_LEAF_CHUNKS - 1)]))
            return index;
        index++; /* the idle one is another of its leaf */
    }
    return index;
}

/* Five nodes, one below the other, reach the last chunk of the largest object. */
enum { HEIGHT_MAX = 5 };

static_assert(HT_FILE_BYTES_MAX / HT_SMALL_CHUNK_BYTES <= 1ull << (HT_LEAF_SHIFT + HT_NODE_SHIFT * HEIGHT_MAX),
              "a table's height");

void ht_chunk_note_leaf(struct ht_obj *o, uint64_t index, enum ht_chunk_mark mark, bool is)
{
    struct ht_node *way[HEIGHT_MAX];
    unsigned depth = 0, shift = shift_of(o->extra->height);

    for (void *p = o->extra->root; shift > HT_LEAF_SHIFT; depth++) {
        way[depth] = p;
        shift -= HT_NODE_SHIFT;
        p = way[depth]->slot[index >> shift & (HT_NODE_SLOTS - 1)];
    }
    for (bool any = is; depth && any == is; shift += HT_NODE_SHIFT) {
        uint64_t *mask = &way[--depth]->mask[mark], bit = UINT64_C(1) << (index >> shift & (HT_NODE_SLOTS - 1));
        *mask = is ? *mask | bit : *mask & ~bit;
        any = *mask != 0;
    }
}

void ht_chunk_note_busy(struct ht_obj *o, const struct ht_chunk *c, uint64_t index)
{
    struct ht_leaf *l = (struct ht_leaf *)ht_chunk_leaf((struct ht_chunk *)c);
    bool is = c->exclusive || ht_chunk_has_content(c);

    if (!index || (l->busy >> c->pos & 1) == is)
        return;
    bool busy = leaf_has(l, index, HT_MARK_BUSY), idle = leaf_has(l, index, HT_MARK_IDLE);
    l->busy ^= (uint8_t)(1u << c->pos);
    if (leaf_has(l, index, HT_MARK_BUSY) != busy)
        ht_chunk_note_leaf(o, index, HT_MARK_BUSY, !busy);
    if (leaf_has(l, index, HT_MARK_IDLE) != idle)
        ht_chunk_note_leaf(o, index, HT_MARK_IDLE, !idle);
}

static void count_table(struct ht_store *s, int64_t bytes) HT_REQUIRES(HT_LOCK_STORE)
{
    s->objects.tables_bytes += (uint64_t)bytes;
    s->objects.meta_bytes += (uint64_t)bytes;
}

static struct ht_node *new_node(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_node *n = calloc(1, sizeof(*n));

    if (!n)
        return NULL;
    n->mask[HT_MARK_IDLE] = UINT64_MAX;
    count_table(o->s, sizeof(*n));
    return n;
}

static struct ht_leaf *new_leaf(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_leaf *l = calloc(1, sizeof(*l));

    if (!l)
        return NULL;
    for (unsigned k = 0; k < HT_LEAF_CHUNKS; k++) {
        l->chunk[k].slot = HT_SLOT_NONE;
        l->chunk[k].pos = k & (HT_LEAF_CHUNKS - 1);
    }
    count_table(o->s, sizeof(*l));
    return l;
}

/* A new root above the tree knows what is below. */
static void note_below(struct ht_node *n, const void *p, unsigned height)
{
    for (enum ht_chunk_mark mark = 0; mark < HT_MARKS; mark++) {
        uint64_t any = height ? ((const struct ht_node *)p)->mask[mark] != 0 : leaf_has(p, 0, mark);
        n->mask[mark] = (n->mask[mark] & ~UINT64_C(1)) | any;
    }
}

/* Nodes above the root until index is within. */
static int raise(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj_extra *x = ht_obj_extra(o);

    while (!within(o, index)) {
        if (x->root) {
            struct ht_node *n = new_node(o);
            if (!n)
                return -ENOMEM;
            n->slot[0] = x->root;
            note_below(n, x->root, x->height);
            x->root = n;
        }
        x->height++;
    }
    assert(x->height <= HEIGHT_MAX);
    return 0;
}

/* ----------------------------------------------------------- giving back */

static bool is_leaf_in_use(const struct ht_leaf *l)
{
    for (unsigned k = 0; k < HT_LEAF_CHUNKS; k++)
        if (ht_chunk_in_use(&l->chunk[k]))
            return true;
    return l->head.users;
}

/* A node or, at height 0, a leaf. */
static void free_table(struct ht_obj *o, void *p, unsigned height) HT_REQUIRES(HT_LOCK_STORE)
{
    count_table(o->s, -(int64_t)(height ? sizeof(struct ht_node) : sizeof(struct ht_leaf)));
    ht_trash_put(o->s, p);
}

/* Slots from the first up that are empty. */
static unsigned empty_slots(const struct ht_node *n, unsigned first)
{
    unsigned k = first;

    while (k < HT_NODE_SLOTS && !n->slot[k])
        k++;
    return k - first;
}

/* Lowers the tree to the height that the remaining chunks need. */
static void lower(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj_extra *x = ht_obj_extra(o);

    while (x->height && x->root && empty_slots(x->root, 1) == HT_NODE_SLOTS - 1) {
        struct ht_node *n = x->root;
        x->root = n->slot[0];
        x->height--;
        free_table(o, n, 1);
    }
    if (!x->root)
        x->height = 0;
}

void ht_chunk_trim(struct ht_obj *o, uint64_t index)
{
    if (!index || (!o->extra->root && !o->extra->height) || !within(o, index))
        return;
    void **way[HEIGHT_MAX], **p = &ht_obj_extra(o)->root; /* way: the nodes above it */
    unsigned depth = 0, shift = shift_of(o->extra->height);
    while (*p && shift > HT_LEAF_SHIFT) {
        struct ht_node *n = *p;
        way[depth++] = p;
        shift -= HT_NODE_SHIFT;
        p = &n->slot[index >> shift & (HT_NODE_SLOTS - 1)];
    }
    if (*p) {
        struct ht_leaf *l = *p;
        ht_chunk_note_busy(o, &l->chunk[index & (HT_LEAF_CHUNKS - 1)], index);
        if (is_leaf_in_use(l))
            return;
        assert(!l->head.dirty && !l->head.unpublished && !l->head.writing && !l->busy);
        free_table(o, l, 0);
        *p = NULL;
    }
    while (depth && empty_slots(*way[depth - 1], 0) == HT_NODE_SLOTS) {
        free_table(o, *way[--depth], 1);
        *way[depth] = NULL;
    }
    lower(o);
}

/* ---------------------------------------------------------------- making */

static struct ht_leaf *make_leaf(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    if (raise(o, index))
        return NULL;
    void **p = &ht_obj_extra(o)->root;
    for (unsigned shift = shift_of(o->extra->height); shift > HT_LEAF_SHIFT;) {
        if (!*p && !(*p = new_node(o)))
            return NULL;
        shift -= HT_NODE_SHIFT;
        p = &((struct ht_node *)*p)->slot[index >> shift & (HT_NODE_SLOTS - 1)];
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
    return l ? &l->chunk[index & (HT_LEAF_CHUNKS - 1)] : NULL;
}

static int refuse_table(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    const struct ht_event_about about = {.id = o->oid, .error = -ENOSPC};
    char size[32];

    if (!s->objects.tables_full)
        ht_event(
            HT_EVENT_NO_SPACE, &about,
            "object %llu cannot have one more place apart from its others: sparse files have the %s of memory that they "
            "may; delete some, or make a store with a larger log (mkfs.hitrain --log-size=)",
            (unsigned long long)o->oid, ht_format_size(s->objects.tables_bytes_max, size, sizeof(size)));
    s->objects.tables_full = true;
    return ht_lack_space(0);
}

int ht_chunk_ask(struct ht_obj *o, uint64_t index, struct ht_chunk **out_c)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c = ht_chunk_find(o, index);

    if (!c && index && s->objects.tables_bytes >= s->objects.tables_bytes_max)
        return refuse_table(o);
    if (!c) {
        c = ht_chunk_make(o, index);
        s->objects.tables_full = false;
    }
    *out_c = c;
    return c ? 0 : -ENOMEM;
}

/* Recursion ends after height steps, five at most. */
static void free_below(struct ht_obj *o, void *p, unsigned height) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned k = 0; p && height && k < HT_NODE_SLOTS; k++)
        free_below(o, ((struct ht_node *)p)->slot[k], height - 1);
    if (p)
        free_table(o, p, height);
}

void ht_chunks_free(struct ht_obj *o)
{
    free_below(o, o->extra->root, o->extra->height);
}
