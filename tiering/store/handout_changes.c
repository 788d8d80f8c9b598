/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handout_changes.c - what was stored into handed-out images unseen is found by comparing them with the checksums of their references.
 *
 * Who commits or syncs searches all of it. The commit timer has a budget, and leaves files alone for a while in which it found
 * nothing: looking at memory costs about a tenth of a second a GiB.
 */
#include "tiering/store/store_priv.h"

enum {
    SLICE_CHUNKS = 16,
    VAIN_ROUNDS = 3, /* before pauses get longer */
    QUIET_MAX = 20,
};
#define PAUSE_NS_MAX UINT64_C(60000000000)
#define PAUSE_NS_MAX_PER_GIB UINT64_C(20000000000) /* where that is more: a two hundredth of a processor */

static bool all_zero(const uint8_t *p, size_t n)
{
    return n == 0 || (p[0] == 0 && memcmp(p, p + 1, n - 1) == 0);
}

/* Has the image the bytes of ref (NULL: a hole)? Chunk held. */
static bool unchanged(const struct ht_store *s, const struct ht_ref *ref, const uint8_t *data, uint32_t len)
{
    if (!ref)
        return all_zero(data, len);
    return !ht_ref_lost(ref) && ref->stored == ref->visible && ref->stored <= len &&
        ht_store_checksum(s, data, ref->stored) == ref->checksum && all_zero(data + ref->stored, len - ref->stored);
}

/* Compare; *out_generation: of the reference that it was compared with. Lock held, let go meanwhile. */
static bool is_changed(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t *out_generation)
{
    struct ht_store *s = o->s;
    ht_chunk_lock_shared(s, c);
    bool guest = ht_arena_is_guest(s->arena, c->slot);
    const struct ht_image *im = guest ? ht_arena_image(s->arena, c->slot) : NULL;
    bool compare = guest && !im->dirty && im->valid_hi && !(c->flags & CH_BAD);
    /* What lies behind would not be written. */
    bool changed = guest && im->dirty && im->data_hi < ht_chunk_len(o, index);
    *out_generation = c->generation;
    if (compare) {
        const struct ht_ref *now = ht_chunk_ref(c);
        struct ht_ref ref = now ? *now : (struct ht_ref){0};
        const uint8_t *data = ht_arena_data(s->arena, c->slot);
        uint32_t len = ht_chunk_len(o, index);
        ht_store_unlock(s);
        changed = !unchanged(s, now ? &ref : NULL, data, len);
        ht_store_lock(s);
    }
    ht_chunk_unlock_shared(o, c, index);
    return changed;
}

/* Whoever changes it may go on with that. */
static void note_found(struct ht_handed *h)
{
    if (h->quiet)
        h->due_ns = 0;
    h->quiet = 0;
    h->changed = true;
}

/* It differs from the reference of that generation: it is dirty. -EAGAIN: there is another reference, maybe older than the change. */
static int note_change(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t generation)
{
    struct ht_store *s = o->s;
    int rc = -EAGAIN;
    ht_chunk_lock_exclusive(s, c);
    uint32_t len = ht_chunk_len(o, index);
    if (!ht_arena_is_guest(s->arena, c->slot) || !len)
        rc = 0;
    else if (c->generation == generation)
        rc = ht_chunk_reserve(o, c, (uint32_t)ht_div_up(len, HT_BLOCK_BYTES));
    if (!rc && len && ht_arena_is_guest(s->arena, c->slot)) {
        ht_arena_image(s->arena, c->slot)->data_hi = len;
        ht_chunk_set_dirty(o, c, index);
        note_found(o->extra->handed);
    }
    ht_chunk_unlock_exclusive(o, c, index);
    return rc;
}

static int look_at_chunk(struct ht_obj *o, uint64_t index)
{
    uint32_t generation;
    struct ht_chunk *c;
    int rc = -EAGAIN;
    while (rc == -EAGAIN && (c = ht_chunk_find(o, index)) != NULL)
        rc = is_changed(o, c, index, &generation) ? note_change(o, c, index, generation) : 0;
    return rc == -EAGAIN ? 0 : rc;
}

static void end_stores(struct ht_obj *o)
{
    struct ht_handed *h = o->extra->handed;
    bool end = h->guaranteed;
    h->stores = h->guaranteed = false;
    if (!end)
        return;
    ht_store_unlock(o->s);
    int none = ht_obj_guarantee(o, 0); /* giving back cannot fail */
    (void)none;
    ht_store_lock(o->s);
}

static bool is_more(const struct ht_obj *o, uint64_t index)
{
    return ht_handed_stores(o) && index << o->chunk_shift < o->size;
}

/* A few chunks from *index on. Lock held, let go meanwhile. */
static int look_at_slice(struct ht_obj *o, uint64_t *index)
{
    int first = 0;
    for (unsigned n = 0; n < SLICE_CHUNKS && is_more(o, *index); n++, ++*index) {
        int rc = look_at_chunk(o, *index);
        if (rc && !first)
            first = rc;
    }
    return first;
}

static int fail(struct ht_obj *o, int error)
{
    if (error)
        ht_obj_set_error(o, error);
    return error;
}

/* Lock held, let go meanwhile. Stores end when it was back all the time: others may go into chunks that were looked at already. */
static int find_changes(struct ht_obj *o, void (*between)(struct ht_store *s))
{
    uint64_t hand = o->extra->handed->hand, index = 0;
    bool was_out = o->extra->handed->out;
    int first = ht_handed_complete(o);
    while (is_more(o, index)) {
        int rc = look_at_slice(o, &index);
        if (rc && !first)
            first = rc;
        if (between)
            between(o->s);
    }
    if (!first && !was_out && ht_handed_stores(o) && o->extra->handed->hand == hand)
        end_stores(o);
    return fail(o, first);
}

int ht_handed_search(struct ht_obj *o)
{
    return ht_handed_stores(o) ? find_changes(o, NULL) : 0;
}

int ht_obj_find_changes(struct ht_obj *o)
{
    ht_store_lock(o->s);
    int rc = ht_handed_search(o);
    ht_store_unlock(o->s);
    return rc;
}

static bool may_be_stored_to(const struct ht_handed *h, const void *ctx)
{
    (void)ctx;
    return h->stores;
}

static int search(struct ht_obj *o, void *ctx)
{
    (void)ctx;
    return ht_handed_search(o);
}

int ht_handed_find_changes(struct ht_store *s, uint64_t scope)
{
    return ht_handed_visit(s, scope, may_be_stored_to, search, NULL);
}

/* --------------------------------------------------------- the timer's look */

static uint64_t pause_ns(const struct ht_store *s, const struct ht_handed *h, uint64_t period_ns)
{
    uint64_t most = ht_max_u64(PAUSE_NS_MAX, (s->handed_bytes >> 30) * PAUSE_NS_MAX_PER_GIB);
    unsigned doubled = h->quiet < VAIN_ROUNDS ? 0 : h->quiet - VAIN_ROUNDS + 1;
    return ht_min_u64(period_ns << doubled, ht_max_u64(most, period_ns));
}

/* Others are first next time. */
static void end_round(struct ht_obj *o, const struct ht_handed_look *look)
{
    struct ht_handed *h = o->extra->handed;
    h->quiet = h->changed ? 0 : (unsigned)ht_min_u64(h->quiet + 1, QUIET_MAX);
    h->changed = false;
    h->due_ns = look->now_ns + pause_ns(o->s, h, look->period_ns);
    h->looked = 0;
    if (!h->out)
        return;
    ht_list_del(&h->link);
    ht_list_add_tail(&o->s->handed, &h->link);
}

/* Lock held, let go meanwhile. */
static int look_until(struct ht_obj *o, struct ht_handed_look *look)
{
    uint64_t index = o->extra->handed->looked;
    int first = index ? 0 : ht_handed_complete(o);
    do {
        int rc = look_at_slice(o, &index);
        if (rc && !first)
            first = rc;
        look->slices++;
        look->between(o->s);
    } while (is_more(o, index) && ht_now_ns() < look->until_ns);
    if (!ht_handed_stores(o))
        return fail(o, first);
    o->extra->handed->changed |= first != 0;
    if (is_more(o, index))
        o->extra->handed->looked = index;
    else
        end_round(o, look);
    return fail(o, first);
}

static bool is_due(const struct ht_handed *h, const void *ctx)
{
    const struct ht_handed_look *look = ctx;
    return h->stores && (!h->out || h->due_ns <= look->now_ns);
}

static int look_at(struct ht_obj *o, void *ctx)
{
    struct ht_handed_look *look = ctx;
    if (!ht_handed_stores(o))
        return 0;
    if (!o->extra->handed->out)
        return find_changes(o, look->between);
    return look->slices && ht_now_ns() >= look->until_ns ? 0 : look_until(o, look);
}

int ht_handed_look(struct ht_store *s, struct ht_handed_look *look)
{
    return ht_handed_visit(s, 0, is_due, look_at, look);
}
