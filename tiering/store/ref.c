/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref.c - references to stored chunks, and the space behind them.
 *
 * A reference that the log names keeps its space until the record that ends it is durable
 * (limbo, in order of log numbers); one that it never named gives it back at once.
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/base/twin.h"
#include "tiering/store/store_priv.h"

/* Of arrays of extents of all references in the process. */
static _Atomic uint64_t hung_bytes;

uint64_t ht_refs_hung_bytes(void)
{
    return hung_bytes;
}

#define PLACE_MASK ((1ull << 48) - 1)

int ht_ref_set(struct ht_ref *r, const struct ht_extent *e, unsigned n)
{
    assert(n >= 1 && n <= HT_FRAGS_MAX);
    if (n == 1) {
        r->place = e->block | (uint64_t)e->device << 48;
        return 0;
    }
    struct ht_extent *copy = malloc(n * sizeof(*copy));
    if (!copy)
        return -ENOMEM;
    hung_bytes += n * sizeof(*copy);
    memcpy(copy, e, n * sizeof(*copy));
    assert(((uint64_t)(uintptr_t)copy & ~PLACE_MASK) == 0);
    r->place = (uint64_t)(uintptr_t)copy | (uint64_t)(n - 1) << 56;
    return 0;
}

static const struct ht_extent *hung(const struct ht_ref *r)
{
    return (const struct ht_extent *)(uintptr_t)(r->place & PLACE_MASK);
}

struct ht_extent ht_ref_extent(const struct ht_ref *r, unsigned i)
{
    if (ht_ref_extents(r) > 1)
        return hung(r)[i];
    return (struct ht_extent){
        .block = r->place & PLACE_MASK,
        .blocks = (uint32_t)ht_div_up(r->stored, HT_BLOCK_BYTES),
        .device = (uint32_t)(r->place >> 48) & 0xff,
    };
}

void ht_ref_forget(struct ht_ref *r)
{
    if (ht_ref_extents(r) > 1) {
        hung_bytes -= ht_ref_extents(r) * sizeof(struct ht_extent);
        free((void *)(uintptr_t)(r->place & PLACE_MASK));
    }
    memset(r, 0, sizeof(*r));
}

int ht_ref_copy(struct ht_ref *out, const struct ht_ref *r)
{
    struct ht_ref copy = *r;
    unsigned n = ht_ref_extents(r);
    int rc = n > 1 ? ht_ref_set(&copy, hung(r), n) : 0;
    if (!rc)
        *out = copy;
    return rc;
}

bool ht_ref_same_place(const struct ht_ref *a, const struct ht_ref *b)
{
    unsigned n = ht_ref_extents(a);
    if (n != ht_ref_extents(b) || a->stored != b->stored || a->codec != b->codec || a->checksum != b->checksum)
        return false;
    for (unsigned i = 0; i < n; i++) {
        struct ht_extent x = ht_ref_extent(a, i), y = ht_ref_extent(b, i);
        if (x.block != y.block || x.blocks != y.blocks || x.device != y.device)
            return false;
    }
    return true;
}

uint32_t ht_ref_extra_bytes(const struct ht_ref *r)
{
    return (ht_ref_extents(r) - 1) * HT_FRAG_RECORD_BYTES;
}

uint32_t ht_ref_blocks(const struct ht_ref *r)
{
    return (uint32_t)ht_div_up(r->stored, HT_BLOCK_BYTES);
}

uint32_t ht_ref_countable(const struct ht_store *s, const struct ht_ref *r)
{
    uint32_t blocks = 0;
    for (unsigned i = 0; i < ht_ref_extents(r); i++) {
        struct ht_extent e = ht_ref_extent(r, i);
        blocks += ht_alloc_countable(s->alloc, &e);
    }
    return blocks;
}

/* ----------------------------------------------------------------- limbo */

int ht_limbo_push(struct ht_limbo_queue *q, uint64_t lsn, const struct ht_ref *ref)
{
    if (q->count == q->cap) {
        size_t cap = q->cap ? q->cap * 2 : 64;
        struct ht_limbo *items = malloc(cap * sizeof(*items));
        if (!items)
            return -ENOMEM;
        for (size_t i = 0; i < q->count; i++)
            items[i] = q->items[(q->head + i) % q->cap];
        free(q->items);
        q->items = items;
        q->cap = cap;
        q->head = 0;
    }
    q->items[(q->head + q->count++) % q->cap] = (struct ht_limbo){.lsn = lsn, .ref = *ref};
    return 0;
}

void ht_free_ref_now(struct ht_store *s, struct ht_ref *ref)
{
    for (unsigned i = 0; i < ht_ref_extents(ref) && !ht_ref_lost(ref); i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        ht_alloc_release(s->alloc, &e);
    }
    ht_ref_forget(ref);
}

/* Without memory for the list, or with a log that failed, the space is lost until the next mount, never reused too early. */
static void free_later(struct ht_store *s, struct ht_limbo_queue *q, uint64_t lsn, struct ht_ref *ref)
{
    uint32_t blocks = ht_ref_countable(s, ref);
    if (HT_TWIN("reuse-at-once"))
        ht_free_ref_now(s, ref);
    else if (s->failed || ht_limbo_push(q, lsn, ref))
        ht_ref_forget(ref);
    else
        ht_alloc_limbo_add(s->alloc, blocks);
    memset(ref, 0, sizeof(*ref));
}

/* An owner lets go of what the log may name until lsn is durable (0: it names none). True if it is or will be free. */
static bool drop_ref(struct ht_store *s, uint64_t lsn, struct ht_ref *ref)
{
    switch (ht_share_drop(s, ref, false)) {
    case HT_SHARE_OWNED:
        ht_ref_forget(ref);
        return false;
    case HT_SHARE_FREE:
        if (lsn > (s->journal ? ht_journal_durable(s->journal) : 0))
            free_later(s, &s->limbo, lsn, ref);
        else
            ht_free_ref_now(s, ref);
        break;
    case HT_SHARE_LATER:
        free_later(s, &s->limbo, s->last_lsn, ref);
        break;
    case HT_SHARE_WITH_TX:
        free_later(s, &s->tx.frees, 0, ref);
        break;
    }
    return true;
}

bool ht_ref_drop(struct ht_store *s, struct ht_ref *ref)
{
    return drop_ref(s, 0, ref);
}

void ht_limbo_durable(struct ht_store *s, uint64_t lsn)
{
    struct ht_limbo_queue *q = &s->limbo;
    while (q->count && q->items[q->head].lsn <= lsn) {
        struct ht_limbo *item = &q->items[q->head];
        ht_alloc_limbo_sub(s->alloc, ht_ref_countable(s, &item->ref));
        ht_free_ref_now(s, &item->ref);
        q->head = (q->head + 1) % q->cap;
        q->count--;
    }
}

/* Blocks of a guaranteed object go back into its guarantee as soon as they are (or will be) free. */
static void regain_guarantee(struct ht_obj *o, uint32_t blocks)
{
    if (!o->extra->guarantee_blocks)
        return;
    uint64_t n = ht_min_u64(ht_guarantee_room(o), blocks);
    if (n && ht_alloc_reserve(o->s->alloc, n) == 0)
        ht_obj_extra(o)->guarantee_left += n;
}

void ht_obj_forget_stored(struct ht_obj *o, const struct ht_ref *ref)
{
    uint32_t blocks = ht_ref_blocks(ref);
    o->stored_blocks -= blocks;
    o->s->lost_chunks -= ht_ref_lost(ref);
    if (ref->shared)
        ht_obj_extra(o)->shared_blocks -= blocks;
    if (o->obj_class != HT_CLASS_SCRATCH && ht_ref_extents(ref) > 1)
        ht_journal_unclaim(o->s->journal, ht_ref_extra_bytes(ref));
}

void ht_tx_free_ref(struct ht_tx *tx, struct ht_obj *o, struct ht_ref *ref)
{
    uint32_t blocks = ht_ref_blocks(ref);
    ht_obj_forget_stored(o, ref);
    if (ht_share_drop(o->s, ref, true) == HT_SHARE_OWNED) {
        ht_ref_forget(ref);
        return;
    }
    free_later(o->s, &tx->frees, 0, ref);
    regain_guarantee(o, blocks);
}

void ht_chunk_drop_cur(struct ht_obj *o, struct ht_chunk *c)
{
    if (c->flags & CH_CUR) {
        if (c->flags & CH_SHARE) {
            memset(&c->cur, 0, sizeof(c->cur));
        } else {
            uint32_t blocks = ht_ref_blocks(&c->cur);
            ht_obj_forget_stored(o, &c->cur);
            if (ht_ref_drop(o->s, &c->cur))
                regain_guarantee(o, blocks);
        }
    }
    c->flags &= (uint8_t) ~(CH_CUR | CH_SHARE | CH_GONE);
}

void ht_chunk_drop_pub(struct ht_obj *o, struct ht_chunk *c)
{
    if (!(c->flags & CH_PUB))
        return;
    ht_obj_forget_stored(o, &c->pub);
    drop_ref(o->s, o->delete_lsn, &c->pub);
    c->flags &= (uint8_t)~CH_PUB;
    o->s->chunks--;
}

/* ----------------------------------------------------------- reservation */

/*
 * Content that is accepted must be written later, maybe all of it in single blocks, and each piece is in the record of its chunk. Is there
 * room in the log for the pieces of what is dirty or being written, of need blocks more, and for so many bytes of known pieces?
 */
static bool pieces_fit(struct ht_store *s, uint32_t need, uint32_t bytes)
{
    uint64_t blocks = s->dirty_bytes / HT_BLOCK_BYTES + s->writing_blocks + need;
    uint64_t whole = ht_alloc_whole_blocks(s->alloc);
    uint64_t pieces = blocks > whole ? blocks - whole : 0;
    uint64_t room = pieces * HT_FRAG_RECORD_BYTES + bytes;
    return !room || ht_journal_has_room_for_pieces(s->journal, room, true);
}

bool ht_ref_pieces_fit(struct ht_store *s, const struct ht_ref *ref)
{
    return ht_ref_extents(ref) == 1 || pieces_fit(s, 0, ht_ref_extra_bytes(ref));
}

int ht_chunk_reserve(struct ht_obj *o, struct ht_chunk *c, uint32_t need)
{
    struct ht_store *s = o->s;
    if (!(c->flags & CH_CLAIM) && o->obj_class != HT_CLASS_SCRATCH) {
        int rc = ht_journal_claim(s->journal, HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES, false);
        if (rc)
            return rc;
        c->flags |= CH_CLAIM;
    }
    if (c->slot == HT_SLOT_NONE)
        return 0;
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    if (im->index << o->chunk_shift < ht_guarantee_bytes(o, o->extra->guarantee_blocks))
        return 0;
    /* All of it, though an unpublished reference may be reused: it may be published before the image is written back. */
    if (need <= im->reserved_blocks)
        return 0;
    uint32_t promised = ht_chunk_use_promise(o, c, need - im->reserved_blocks);
    bool refused = o->obj_class != HT_CLASS_SCRATCH && !pieces_fit(s, need, 0);
    int rc = refused ? -ENOSPC : ht_alloc_reserve(s->alloc, need - im->reserved_blocks - promised);
    if (!rc) {
        im->reserved_blocks = need;
    } else {
        ht_chunk_return_promise(o, c, promised);
        ht_chunk_settle_claim(o, c);
    }
    return rc;
}

void ht_chunk_unreserve(struct ht_obj *o, struct ht_chunk *c)
{
    struct ht_image *im = ht_arena_image(o->s->arena, c->slot);
    ht_alloc_unreserve(o->s->alloc, im->reserved_blocks);
    im->reserved_blocks = 0;
}

void ht_chunk_settle_claim(struct ht_obj *o, struct ht_chunk *c)
{
    bool live = c->writing || c->promised || c->flags & (CH_PUB | CH_CUR) ||
        (c->slot != HT_SLOT_NONE && ht_arena_image(o->s->arena, c->slot)->dirty);
    if (live || !(c->flags & CH_CLAIM))
        return;
    ht_journal_unclaim(o->s->journal, HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES);
    c->flags &= (uint8_t)~CH_CLAIM;
}

/* Reservation of one allocation, and where it came from: what remains of it is fresh. */
struct gathered {
    struct ht_image *im;
    uint32_t own, promised; /* of the image's, of the chunk's */
    uint64_t left;          /* of the object's guarantee */
};

/*
 * Make need blocks of reservation available for one allocation: the image's own, what the chunk was promised, the object's
 * guarantee, and only then fresh ones. -ENOSPC changes nothing.
 */
static int gather_reservation(struct ht_obj *o, struct ht_chunk *c, uint32_t need, struct gathered *out)
{
    struct ht_store *s = o->s;
    struct gathered g = {.im = c->slot != HT_SLOT_NONE ? ht_arena_image(s->arena, c->slot) : NULL};
    uint32_t has = g.im ? g.im->reserved_blocks : 0;
    g.own = has < need ? has : need;
    g.promised = ht_chunk_use_promise(o, c, need - g.own);
    g.left = ht_min_u64(need - g.own - g.promised, o->extra->guarantee_left);
    int rc = ht_alloc_reserve(s->alloc, need - g.own - g.promised - g.left);
    if (rc) {
        ht_chunk_return_promise(o, c, g.promised);
        return rc;
    }
    ht_alloc_unreserve(s->alloc, has - g.own);
    if (g.im)
        g.im->reserved_blocks = 0;
    if (g.left)
        ht_obj_extra(o)->guarantee_left -= g.left;
    *out = g;
    return 0;
}

/* Nothing was allocated: a later try finds what this one had. */
static void return_reservation(struct ht_obj *o, struct ht_chunk *c, uint32_t need, const struct gathered *g)
{
    if (g->im)
        g->im->reserved_blocks = g->own;
    if (g->left)
        ht_obj_extra(o)->guarantee_left += g->left;
    ht_chunk_return_promise(o, c, g->promised);
    ht_alloc_unreserve(o->s->alloc, need - g->own - g->promised - g->left);
}

/*
 * What is promised is not free yet: make it so. Space is in limbo until the log is durable, and in the transaction being collected until
 * that is appended: one that frees something waits for no chunk, so it ends. Lock held, let go meanwhile.
 */
static int wait_for_space(struct ht_store *s)
{
    uint64_t lsn = s->last_lsn;
    if (s->failed)
        return -EROFS;
    if (s->limbo.count && s->limbo.items[s->limbo.head].lsn <= lsn) {
        ht_store_unlock(s);
        int rc = ht_journal_sync(s->journal, lsn);
        ht_store_lock(s);
        if (!rc)
            ht_limbo_durable(s, lsn);
        return rc;
    }
    if (!s->tx.frees.count)
        return -ENOSPC; /* lost to a list that found no memory */
    ht_store_wait(s, &s->settled, 0);
    return 0;
}

/*
 * What was guaranteed its space was accepted without a look at its pieces, so it may have to wait here. All else was accepted because they
 * fit (pieces_fit), and is written whatever has become of the free space since.
 */
static bool may_have_pieces(struct ht_obj *o, unsigned n)
{
    struct ht_store *s = o->s;
    return n == 1 || o->obj_class == HT_CLASS_SCRATCH || !o->extra->guarantee_blocks ||
        ht_journal_has_room_for_pieces(s->journal, (n - 1 + s->writing_blocks) * HT_FRAG_RECORD_BYTES, false);
}

int ht_chunk_take_space(struct ht_obj *o, struct ht_chunk *c, uint32_t bytes, struct ht_place_wish wish,
                        struct ht_ref *out)
{
    struct ht_store *s = o->s;
    uint32_t need = (uint32_t)ht_div_up(bytes, HT_BLOCK_BYTES);
    struct gathered g;
    int rc = gather_reservation(o, c, need, &g), n = 0;
    if (rc)
        return rc;
    struct ht_extent e[HT_FRAGS_MAX];
    while (!rc && (n = ht_alloc_take(s->alloc, need, wish, e)) == -EAGAIN)
        rc = wait_for_space(s);
    if (!rc) {
        memset(out, 0, sizeof(*out));
        out->stored = bytes;
        out->visible = bytes & HT_VISIBLE_MASK;
        rc = may_have_pieces(o, (unsigned)n) ? ht_ref_set(out, e, (unsigned)n) : -ENOSPC;
        if (rc)
            ht_alloc_untake(s->alloc, e, n);
    }
    if (rc)
        return_reservation(o, c, need, &g);
    else
        o->stored_blocks += need;
    return rc;
}
