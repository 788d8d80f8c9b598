/* SPDX-License-Identifier: Apache-2.0 */
/*
 * space.c - space of chunks: reserved before their content is accepted, taken before it is written, and given back.
 *
 * Preallocation is a count of blocks at the chunk, reserved in the allocator, and the chunk's log reserve
 * (store/prealloc.c). Writing takes from it the blocks that the image needs (ht_chunk_reserve) and then those that a
 * staged write needs (ht_chunk_take_space). It ends when the chunk is stored whole, cut off, punched or dropped. It is
 * not in the log. store.lock guards it; chunk locks do not matter.
 *
 * A rewrite reserve is space for one rewrite of an object between two publications: two copies, one stored already.
 */

#include "tiering/object/space.h"
#include "tiering/base/activity.h"
#include "tiering/base/event.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"

/* ------------------------------------------------------------ references */

void ht_ref_log_reserve_pieces(struct ht_store *s, const struct ht_ref *ref)
{
    if (ht_ref_extents(ref) == 1)
        return;
    int rc = ht_journal_reserve(s->journal, ht_ref_extra_bytes(ref), true);
    (void)rc;
}

void ht_obj_forget_stored(struct ht_obj *o, const struct ht_ref *ref)
{
    uint32_t blocks = ht_ref_blocks(ref);

    o->stored_blocks -= blocks;
    o->s->objects.lost_chunks -= ht_ref_lost(ref);
    if (ref->shared)
        ht_obj_count_shared(o, ref, -1);
    ht_obj_count_cold(o, ref, -1);
    if (o->obj_class != HT_CLASS_SCRATCH && ht_ref_extents(ref) > 1)
        ht_journal_unreserve(o->s->journal, ht_ref_extra_bytes(ref));
}

void ht_tx_free_ref(struct ht_obj *o, struct ht_ref *ref)
{
    uint32_t blocks = ht_ref_blocks(ref);

    ht_obj_forget_stored(o, ref);
    if (ht_refcount_drop(o->s, ref, true) == HT_REFCOUNT_OWNED) {
        ht_ref_forget(ref);
        return;
    }
    ht_ref_free_later(o->s, &o->s->frees.open, 0, ref);
    ht_obj_refill_rewrite_reserve(o, blocks);
}

void ht_chunk_drop_cur(struct ht_obj *o, struct ht_chunk *c)
{
    if (c->flags & HT_CH_CUR) {
        if (c->flags & HT_CH_SHARE) {
            memset(&c->cur, 0, sizeof(c->cur));
        } else {
            uint32_t blocks = ht_ref_blocks(&c->cur);
            ht_obj_forget_stored(o, &c->cur);
            if (ht_ref_drop(o->s, &c->cur))
                ht_obj_refill_rewrite_reserve(o, blocks);
        }
    }
    c->flags &= (uint8_t) ~(HT_CH_CUR | HT_CH_SHARE | HT_CH_GONE);
}

void ht_chunk_drop_pub(struct ht_obj *o, struct ht_chunk *c)
{
    if (!(c->flags & HT_CH_PUB))
        return;
    ht_obj_forget_stored(o, &c->pub);
    (void)ht_ref_drop_at(o->s, o->delete_lsn, &c->pub);
    c->flags &= (uint8_t)~HT_CH_PUB;
    o->s->objects.chunks--;
}

/* ------------------------------------------------------ preallocation */

/* A chunk never has more than it can hold: a writer gives back only blocks that it took. */
static void change_prealloc(struct ht_obj *o, struct ht_chunk *c, int32_t by) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t blocks = c->prealloc + (uint32_t)by;

    assert(blocks <= HT_CHUNK_PREALLOC_MAX);
    c->prealloc = blocks & HT_CHUNK_PREALLOC_MAX;
    if (by)
        ht_obj_extra(o)->prealloc_blocks += (uint64_t)by;
}

/* Up to need preallocated blocks of the chunk become the caller's reservation. */
static uint32_t use_prealloc(struct ht_obj *o, struct ht_chunk *c, uint32_t need) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t n = c->prealloc < need ? c->prealloc : need;

    change_prealloc(o, c, -(int32_t)n);
    return n;
}

void ht_chunk_prealloc_return(struct ht_obj *o, struct ht_chunk *c, uint32_t blocks)
{
    change_prealloc(o, c, (int32_t)blocks);
}

void ht_chunk_prealloc_drop(struct ht_obj *o, struct ht_chunk *c, uint32_t keep_bytes)
{
    uint32_t keep = ht_blocks(keep_bytes);

    if (c->prealloc <= keep)
        return;
    ht_alloc_unreserve(o->s->alloc, use_prealloc(o, c, c->prealloc - keep));
    if (!keep)
        ht_chunk_drop_log_reserve(o, c);
}

void ht_chunk_drop_log_reserve(struct ht_obj *o, struct ht_chunk *c)
{
    bool live = c->writing || c->prealloc || c->flags & (HT_CH_PUB | HT_CH_CUR) || ht_chunk_is_dirty(o->s, c);
    bool held = c->exclusive || c->shared; /* its holder may have reserved it for content that comes now */

    if (live || held || !(c->flags & HT_CH_LOG_RESERVED))
        return;
    c->flags &= (uint8_t)~HT_CH_LOG_RESERVED;
    if (ht_obj_has_extra(o))
        ht_obj_extra(o)->log_chunks--;
    if (!ht_obj_log_promise_left(o))
        ht_journal_unreserve(o->s->journal, HT_CHUNK_LOG_BYTES);
}

/* ----------------------------------------------------------- reservation */

/*
 * Accepted content must be written later, maybe wholly in single blocks, and each piece is in the record of its chunk.
 * Is there space in the log for the pieces of dirty and in-flight images, of need blocks more, and for so many bytes of
 * known pieces?
 */
static bool pieces_fit(struct ht_store *s, uint32_t need, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t blocks = s->flow.dirty_bytes / HT_BLOCK_BYTES + s->flow.writing_blocks + need;
    uint64_t whole = ht_alloc_whole_blocks(s->alloc);
    uint64_t pieces = blocks > whole ? blocks - whole : 0;
    uint64_t room = pieces * HT_FRAG_RECORD_BYTES + bytes;

    return !room || ht_journal_has_space_for_pieces(s->journal, room, true);
}

bool ht_ref_pieces_fit(struct ht_store *s, const struct ht_ref *ref, unsigned owners)
{
    return ht_ref_extents(ref) == 1 || pieces_fit(s, 0, (uint64_t)owners * ht_ref_extra_bytes(ref));
}

int ht_chunk_reserve(struct ht_obj *o, struct ht_chunk *c, uint32_t need)
{
    struct ht_store *s = o->s;

    assert(c->exclusive || c->shared);
    if (!(c->flags & HT_CH_LOG_RESERVED) && o->obj_class != HT_CLASS_SCRATCH) {
        int rc = ht_obj_log_promise_left(o) ? 0 : ht_journal_reserve(s->journal, HT_CHUNK_LOG_BYTES, false);
        if (rc)
            return rc;
        ht_chunk_set_log_reserved(o, c);
    }
    if (c->slot == HT_SLOT_NONE)
        return 0;
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    if (im->index << o->chunk_shift < ht_rewrite_reserve_bytes(o, o->extra->rewrite_reserve_blocks))
        return 0;
    /*
     * The whole need, though an unpublished reference may be reused: it may be published before the image is written
     * back.
     */
    if (need <= im->reserved_blocks)
        return 0;
    uint32_t prealloc = use_prealloc(o, c, need - im->reserved_blocks);
    bool refused = o->obj_class != HT_CLASS_SCRATCH && !pieces_fit(s, need, 0);
    int rc = refused ? ht_lack_space(0) : ht_alloc_reserve(s->alloc, need - im->reserved_blocks - prealloc);
    if (!rc) {
        im->reserved_blocks = need;
    } else {
        ht_chunk_prealloc_return(o, c, prealloc);
    }
    return rc;
}

void ht_chunk_unreserve(struct ht_obj *o, struct ht_chunk *c)
{
    struct ht_image *im = ht_arena_image(o->s->arena, c->slot);

    ht_alloc_unreserve(o->s->alloc, im->reserved_blocks);
    im->reserved_blocks = 0;
}

/* ------------------------------------------------------------ allocation */

/* The reservation of one allocation, and its sources: the remainder is fresh. */
struct gathered {
    struct ht_image *im;
    uint32_t own, prealloc; /* of the image's, of the chunk's */
    uint32_t rest;          /* of the image's, too: more than the allocation needs */
    uint64_t left;          /* of the object's rewrite reserve */
};

/*
 * Makes need blocks of reservation available for one allocation: the image's own, the chunk's preallocation, the
 * object's rewrite reserve, and only then fresh ones. -ENOSPC changes nothing.
 */
static int gather_reservation(struct ht_obj *o, struct ht_chunk *c, uint32_t need, struct gathered *out)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct gathered g = {.im = ht_chunk_image(s, c)};
    uint32_t has = g.im ? g.im->reserved_blocks : 0;

    g.own = has < need ? has : need;
    g.prealloc = use_prealloc(o, c, need - g.own);
    g.left = ht_min_u64(need - g.own - g.prealloc, o->extra->rewrite_reserve_left);
    int rc = ht_alloc_reserve(s->alloc, need - g.own - g.prealloc - g.left);
    if (rc) {
        ht_chunk_prealloc_return(o, c, g.prealloc);
        return rc;
    }
    g.rest = has - g.own;
    if (g.im)
        g.im->reserved_blocks = 0;
    if (g.left)
        ht_obj_extra(o)->rewrite_reserve_left -= g.left;
    *out = g;
    return 0;
}

/* Nothing was allocated: a later try finds the same reservations. */
static void return_reservation(struct ht_obj *o, struct ht_chunk *c, uint32_t need, const struct gathered *g)
    HT_REQUIRES(HT_LOCK_STORE)
{
    if (g->im)
        g->im->reserved_blocks = g->own + g->rest;
    if (g->left)
        ht_obj_extra(o)->rewrite_reserve_left += g->left;
    ht_chunk_prealloc_return(o, c, g->prealloc);
    ht_alloc_unreserve(o->s->alloc, need - g->own - g->prealloc - g->left);
}

/*
 * Reserved space may not be free yet: waits for it. Space is a deferred free until the log is durable; in the
 * transaction that is being collected, until that is appended. A transaction that frees space waits for no chunk, so it
 * ends. Free space that a device is discarding is free when that request has ended, unless the device is silent by
 * then. Releases the lock while it waits.
 */
static int wait_for_space(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t lsn = s->frees.last_lsn;

    if (s->failed)
        return -EROFS;
    const struct ht_deferred_free *first = s->frees.logged.first;
    if (first && first->lsn <= lsn) {
        ht_store_unlock(s);
        int rc = ht_journal_sync(s->journal, lsn);
        ht_store_lock(s);
        if (!rc)
            ht_deferred_frees_durable(s, lsn);
        return rc;
    }
    bool discarding = ht_alloc_discarding(s->alloc, true) > 0;
    if (!s->frees.open.first && !discarding)
        return -ENOSPC; /* a silent device has it, or it is lost: a list of deferred frees found no memory */
    ht_activity_wait(discarding ? "space that is being discarded" : "space that the open transaction frees", 0);
    ht_store_wait(s, &s->waits.settled, 0);
    ht_activity_go_on();
    return 0;
}

/*
 * Content with a rewrite reserve was accepted without a check of its pieces, so it may have to wait here. All other
 * content was accepted because they fit (pieces_fit), and is written whatever has become of the free space since.
 * counted: blocks of its own in writing_blocks.
 */
static bool may_have_pieces(struct ht_obj *o, unsigned n, uint32_t counted) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    uint64_t others = s->flow.writing_blocks - counted;

    return n == 1 || o->obj_class == HT_CLASS_SCRATCH || !o->extra->rewrite_reserve_blocks ||
        ht_journal_has_space_for_pieces(s->journal, (n - 1 + others) * HT_FRAG_RECORD_BYTES, false);
}

struct ht_alloc_hint ht_obj_hint(const struct ht_obj *o, int device)
{
    const struct ht_store *s = o->s;
    struct ht_alloc_hint hint = {.device = device, .all_paths = o->scope && o->scope->all_paths};

    for (unsigned i = 0; hint.all_paths && i < s->dev_count; i++)
        if (s->layout.device_class[i] == HT_DEVICE_CAPACITY && s->dev[i] && ht_dev_is_loaded(s->dev[i]))
            hint.avoid |= 1u << i;
    return hint;
}

/* Tells once that content has gone to a device of the class capacity because no fast one had room. */
static void note_spilled(struct ht_store *s, struct ht_alloc_hint hint, const struct ht_extent e[], int n)
    HT_REQUIRES(HT_LOCK_STORE)
{
    for (int i = 0; i < n && !hint.all_paths && !s->flow.spilled; i++) {
        const struct ht_event_about about = {.device = s->dev[e[i].device] ? ht_dev_name(s->dev[e[i].device]) : ""};
        if (s->layout.device_class[e[i].device] != HT_DEVICE_CAPACITY)
            continue;
        s->flow.spilled = true;
        ht_event(
            HT_EVENT_SPILLED, &about,
            "no fast device takes new content: it goes to %s, which is slower, and comes back when it is rewritten and "
            "a fast one has room",
            about.device);
    }
}

int ht_chunk_take_space(struct ht_obj *o, struct ht_chunk *c, struct ht_alloc_hint hint, bool writing,
                        struct ht_ref *ref)
{
    struct ht_store *s = o->s;
    uint32_t need = ht_ref_blocks(ref);
    struct gathered g;
    int rc = gather_reservation(o, c, need, &g), n = 0;

    if (rc)
        return rc;
    struct ht_extent e[HT_FRAGS_MAX];
    while (!rc && (n = ht_alloc_take(s->alloc, need, hint, e)) == -EAGAIN)
        rc = wait_for_space(s);
    if (!rc) {
        rc = may_have_pieces(o, (unsigned)n, writing ? need : 0) ? ht_ref_set(ref, e, (unsigned)n) : -ENOSPC;
        if (rc)
            ht_alloc_untake(s->alloc, e, n);
    }
    if (rc) {
        return_reservation(o, c, need, &g);
        return rc;
    }
    note_spilled(s, hint, e, n);
    ht_alloc_unreserve(s->alloc, g.rest);
    o->stored_blocks += need;
    return 0;
}

int ht_ref_take_space(struct ht_store *s, struct ht_alloc_hint hint, struct ht_ref *ref)
{
    struct ht_extent e[HT_FRAGS_MAX];
    uint32_t need = ht_ref_blocks(ref);
    int rc = ht_alloc_reserve(s->alloc, need);

    if (rc)
        return rc;
    int n = ht_alloc_take(s->alloc, need, hint, e);
    if (n < 0) {
        ht_alloc_unreserve(s->alloc, need);
        return -ENOSPC;
    }
    rc = ht_ref_set(ref, e, (unsigned)n);
    for (int i = 0; rc && i < n; i++)
        ht_alloc_release(s->alloc, &e[i]);
    return rc;
}

/* ------------------------------------------------------ rewrite reserves */

/*
 * Gives dirty images that the reserve does not cover any more a reservation of their own, first from *left. Images that
 * become dirty now get their own. slice: releases the lock in between; NULL: does not.
 */
static int reserve_uncovered(struct ht_obj *o, uint64_t *left, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    ht_chunk_for_each_busy(c, o, index) {
        const struct ht_ref *ref = ht_chunk_ref(c);
        struct ht_image *im = ht_chunk_image(s, c);
        bool covered = index << o->chunk_shift < ht_rewrite_reserve_bytes(o, o->extra->rewrite_reserve_blocks);
        if (!ht_chunk_leaf(c)->dirty)
            index = ht_leaf_last(index);
        if (im && im->dirty && !covered) {
            uint32_t need = (uint32_t)ht_div_up(ht_max_u64(im->data_hi, ref ? ref->visible : 0), HT_BLOCK_BYTES);
            need = need > im->reserved_blocks ? need - im->reserved_blocks : 0;
            uint64_t taken = ht_min_u64(need, *left);
            int rc = ht_alloc_reserve(s->alloc, need - taken);
            if (rc)
                return rc;
            *left -= taken;
            im->reserved_blocks += need;
        }
        if (slice)
            ht_slice_next(s, slice);
    }
    return 0;
}

/* Shared space does not come back when it is rewritten. */
static uint64_t blocks_to_reserve(const struct ht_obj *o, uint64_t blocks) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t stored = ht_obj_stored_blocks(o) - ht_obj_shared_blocks(o);

    return 2 * blocks > stored && blocks ? 2 * blocks - stored : 0;
}

/* Makes the reserve smaller. Ending one cannot fail: content without space says so later. */
static int shrink(struct ht_obj *o, uint64_t blocks, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj_extra *x = ht_obj_extra(o);
    uint64_t keeps = ht_min_u64(x->rewrite_reserve_left, blocks_to_reserve(o, blocks));
    uint64_t left = x->rewrite_reserve_left - keeps;

    x->rewrite_reserve_blocks = blocks;
    x->rewrite_reserve_left = keeps;
    int rc = reserve_uncovered(o, &left, slice);
    x->rewrite_reserve_left += left;
    return blocks ? rc : 0;
}

/* Blocks that are set aside serve first; *aside is how many there are, and then how many are left. */
static int reserve_from(struct ht_store *s, uint64_t blocks, uint64_t *aside) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t taken = ht_min_u64(blocks, *aside);
    int rc = ht_alloc_reserve(s->alloc, blocks - taken);

    if (rc)
        return rc;
    s->objects.aside_blocks -= taken;
    *aside -= taken;
    return 0;
}

static int set_reserve(struct ht_obj *o, uint64_t size, struct ht_slice *slice, uint64_t *aside)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    uint64_t blocks = ht_rewrite_reserve_blocks(o, size);
    uint64_t was = o->extra->rewrite_reserve_blocks;
    int rc = size ? ht_obj_need_extra(o) : 0;

    if (!rc && blocks > was)
        rc = ht_obj_promise_log(o, size);
    if (!rc && blocks < was)
        rc = shrink(o, blocks, slice);
    uint64_t want = blocks_to_reserve(o, blocks);
    if (!rc && want > o->extra->rewrite_reserve_left)
        rc = reserve_from(s, want - o->extra->rewrite_reserve_left, aside);
    else if (!rc)
        ht_alloc_unreserve(s->alloc, o->extra->rewrite_reserve_left - want);
    if (!ht_obj_has_extra(o))
        return rc;
    struct ht_obj_extra *x = ht_obj_extra(o);
    x->rewrite_reserve_blocks = rc ? was : blocks;
    /* More than before only if the object got smaller chunks meanwhile. */
    int promised = ht_obj_promise_log(o, ht_rewrite_reserve_bytes(o, x->rewrite_reserve_blocks));
    if (rc)
        return rc;
    x->rewrite_reserve_left = want;
    x->shm_reserve = false; /* it is the caller's now */
    return promised;
}

int ht_obj_set_rewrite_reserve(struct ht_obj *o, uint64_t size, struct ht_slice *slice)
{
    uint64_t none = 0;

    return set_reserve(o, size, slice, &none);
}

int ht_obj_rewrite_reserve_aside(struct ht_obj *o, uint64_t size, uint64_t *bytes)
{
    uint64_t aside = *bytes / HT_BLOCK_BYTES;
    struct ht_slice slice = {0};

    ht_store_lock(o->s);
    int rc = set_reserve(o, size, &slice, &aside);
    ht_store_unlock(o->s);
    *bytes = aside * HT_BLOCK_BYTES;
    return rc;
}

int ht_obj_rewrite_reserve(struct ht_obj *o, uint64_t size)
{
    uint64_t none = 0;

    return ht_obj_rewrite_reserve_aside(o, size, &none);
}

uint64_t ht_obj_rewrite_bytes(struct ht_obj *o, uint64_t size)
{
    return ht_store_locked(o->s, blocks_to_reserve(o, ht_rewrite_reserve_blocks(o, size))) * HT_BLOCK_BYTES;
}

void ht_obj_end_rewrite_reserve(struct ht_obj *o)
{
    if (!ht_obj_has_extra(o))
        return;
    struct ht_obj_extra *x = ht_obj_extra(o);
    ht_alloc_unreserve(o->s->alloc, x->rewrite_reserve_left);
    x->rewrite_reserve_left = x->rewrite_reserve_blocks = 0;
    (void)!ht_obj_promise_log(o, 0); /* giving back cannot fail */
}

void ht_obj_refill_rewrite_reserve(struct ht_obj *o, uint32_t blocks)
{
    if (!o->extra->rewrite_reserve_blocks)
        return;
    uint64_t n = ht_min_u64(ht_rewrite_reserve_missing(o), blocks);
    if (n && ht_alloc_reserve(o->s->alloc, n) == 0)
        ht_obj_extra(o)->rewrite_reserve_left += n;
}

bool ht_obj_wait_for_reserve(struct ht_obj *o)
{
    struct ht_store *s = o->s;

    if (!o->extra->rewrite_reserve_blocks || !o->writing)
        return false;
    s->waits.reserve_waiters++;
    ht_activity_wait("space that a write in flight has borrowed; object", o->oid);
    ht_store_wait(s, &s->waits.settled, 0);
    ht_activity_go_on();
    s->waits.reserve_waiters--;
    return true;
}

void ht_obj_tell_reserve_waiters(struct ht_store *s)
{
    if (s->waits.reserve_waiters)
        pthread_cond_broadcast(&s->waits.settled);
}
