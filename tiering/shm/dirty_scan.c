/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dirty_scan.c - finds unseen stores into images in shared memory: compares the images with the checksums of their
 * references.
 *
 * A commit or sync scans everything. The commit timer has a budget, and skips a file for a while after scans that found
 * nothing: a scan of memory costs about a tenth of a second a GiB.
 */
#include "tiering/api/object.h"
#include "tiering/object/space.h"
#include "tiering/data/chunk_io.h"
#include "tiering/shm/shm_priv.h"

enum {
    SLICE_CHUNKS = 16,
    VAIN_ROUNDS = 3, /* before pauses get longer */
    QUIET_MAX = 20,
};
#define PAUSE_NS_MAX UINT64_C(60000000000)
#define PAUSE_NS_MAX_PER_GIB UINT64_C(20000000000) /* if that is more: a two hundredth of a processor */

/* Has the image the bytes of ref (NULL: a hole)? Chunk held. */
static bool unchanged(const struct ht_store *s, const struct ht_ref *ref, const uint8_t *data, uint32_t len)
{
    if (!ref)
        return ht_is_zero(data, len);
    return ht_ref_has_checksum_of(ref, ref->visible) && ref->visible <= len && ht_ref_matches(s, ref, data) &&
        ht_is_zero(data + ref->visible, len - ref->visible);
}

/*
 * Compares the image; *out_generation: of the reference that it was compared with. Releases the lock in between.
 */
static bool is_changed(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t *out_generation)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    ht_chunk_lock_shared(s, c);
    bool external = ht_arena_is_external(s->arena, c->slot);
    const struct ht_image *im = external ? ht_arena_image(s->arena, c->slot) : NULL;
    bool compare = external && !im->dirty && im->valid_hi && !(c->flags & HT_CH_BAD);
    /* Bytes after data_hi would not be written. */
    bool changed = external && im->dirty && im->data_hi < ht_chunk_len(o, index);
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

/* The program that changed it may continue to do so. */
static void note_found(struct ht_shm *h) HT_REQUIRES(HT_LOCK_STORE)
{
    if (h->quiet)
        h->due_ns = 0;
    h->quiet = 0;
    h->changed = true;
}

/*
 * The image differs from the reference of that generation, so it becomes dirty. -EAGAIN: there is another reference,
 * maybe older than the change.
 */
static int note_change(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t generation)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    int rc = -EAGAIN;

    ht_chunk_lock_exclusive(o, c, index);
    uint32_t len = ht_chunk_len(o, index);
    if (!ht_arena_is_external(s->arena, c->slot) || !len)
        rc = 0;
    else if (c->generation == generation)
        rc = ht_chunk_reserve(o, c, ht_blocks(len));
    if (!rc && len && ht_arena_is_external(s->arena, c->slot)) {
        ht_arena_image(s->arena, c->slot)->data_hi = len;
        ht_chunk_set_dirty(o, c, index);
        note_found(o->extra->shm);
    }
    ht_chunk_unlock_exclusive(o, c, index);
    return rc;
}

static int scan_chunk(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t generation;
    struct ht_chunk *c;
    int rc = -EAGAIN;

    while (rc == -EAGAIN && (c = ht_chunk_find(o, index)))
        rc = is_changed(o, c, index, &generation) ? note_change(o, c, index, generation) : 0;
    return rc == -EAGAIN ? 0 : rc;
}

static void end_stores(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj_extra *x = ht_obj_extra(o);

    /* In one hold of the lock: a program that opens the object takes a reserve if it may not be dirty. */
    int none = x->shm_reserve ? ht_obj_set_rewrite_reserve(o, 0, NULL) : 0; /* giving back cannot fail */
    (void)none;
    x->may_be_dirty = x->shm_reserve = false;
    ht_obj_note_stores(o);
}

static bool is_more(const struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_obj_is_volatile(o) && index << o->chunk_shift < o->size;
}

/* A few chunks from *index on. Releases the lock in between. */
static int scan_slice(struct ht_obj *o, uint64_t *index) HT_REQUIRES(HT_LOCK_STORE)
{
    int first = 0;

    for (unsigned n = 0; n < SLICE_CHUNKS && is_more(o, *index); n++, ++*index) {
        int rc = scan_chunk(o, *index);
        if (rc && !first)
            first = rc;
    }
    return first;
}

static int fail(struct ht_obj *o, int error) HT_REQUIRES(HT_LOCK_STORE)
{
    if (error)
        ht_obj_set_error(o, error);
    return error;
}

/*
 * Releases the lock in between. The object has no stores any more if no program could make one all the time: otherwise
 * stores may have gone into chunks that were scanned already.
 */
static int scan_all(struct ht_obj *o, void (*between)(struct ht_store *s)) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t open_id = o->extra->shm->open_id, index = 0;
    bool took_stores = ht_shm_takes_stores(o->extra->shm);
    int first = ht_shm_complete(o);

    while (is_more(o, index)) {
        int rc = scan_slice(o, &index);
        if (rc && !first)
            first = rc;
        if (between)
            between(o->s);
    }
    if (!first && !took_stores && ht_obj_is_volatile(o) && o->extra->shm->open_id == open_id)
        end_stores(o);
    return fail(o, first);
}

int ht_shm_scan_obj(struct ht_obj *o)
{
    return ht_obj_is_volatile(o) ? scan_all(o, NULL) : 0;
}

int ht_obj_shm_scan(struct ht_obj *o)
{
    ht_store_lock(o->s);
    int rc = ht_shm_scan_obj(o);
    ht_store_unlock(o->s);
    return rc;
}

static bool may_be_stored_to(const struct ht_shm *h, const void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    return h->obj->extra->may_be_dirty;
}

static int scan_to(struct ht_obj *o, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_shm_scan_obj(o);
}

int ht_shm_scan_scope(struct ht_store *s, uint64_t scope)
{
    return ht_shm_visit(s, scope, may_be_stored_to, scan_to, NULL);
}

/* --------------------------------------------------------- the timer's scan */

static uint64_t pause_ns(const struct ht_store *s, const struct ht_shm *h, uint64_t period_ns)
    HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t most = ht_max_u64(PAUSE_NS_MAX, (s->shm->used_bytes >> 30) * PAUSE_NS_MAX_PER_GIB);
    unsigned doubled = h->quiet < VAIN_ROUNDS ? 0 : h->quiet - VAIN_ROUNDS + 1;

    return ht_min_u64(period_ns << doubled, ht_max_u64(most, period_ns));
}

/* Other objects are first next time. */
static void end_round(struct ht_obj *o, const struct ht_shm_scan *scan) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_shm *h = o->extra->shm;

    h->quiet = h->changed ? 0 : (unsigned)ht_min_u64(h->quiet + 1, QUIET_MAX);
    h->changed = false;
    h->due_ns = scan->now_ns + pause_ns(o->s, h, scan->period_ns);
    h->scanned = 0;
    if (!h->is_open)
        return;
    ht_list_del(&h->link);
    ht_list_add_tail(&o->s->shm->all, &h->link);
}

/* Releases the lock in between. */
static int scan_until(struct ht_obj *o, struct ht_shm_scan *scan) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t index = o->extra->shm->scanned;
    int first = index ? 0 : ht_shm_complete(o);

    do {
        int rc = scan_slice(o, &index);
        if (rc && !first)
            first = rc;
        scan->slices++;
        scan->between(o->s);
    } while (is_more(o, index) && ht_now_ns() < scan->until_ns);
    if (!ht_obj_is_volatile(o))
        return fail(o, first);
    o->extra->shm->changed |= first != 0;
    if (is_more(o, index))
        o->extra->shm->scanned = index;
    else
        end_round(o, scan);
    return fail(o, first);
}

static bool is_due(const struct ht_shm *h, const void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_shm_scan *scan = ctx;

    return h->obj->extra->may_be_dirty && (!ht_shm_takes_stores(h) || h->due_ns <= scan->now_ns);
}

static int scan_due(struct ht_obj *o, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_shm_scan *scan = ctx;

    if (!ht_obj_is_volatile(o))
        return 0;
    if (!ht_shm_takes_stores(o->extra->shm))
        return scan_all(o, scan->between);
    return scan->slices && ht_now_ns() >= scan->until_ns ? 0 : scan_until(o, scan);
}

int ht_shm_scan(struct ht_store *s, struct ht_shm_scan *scan)
{
    return ht_shm_visit(s, 0, is_due, scan_due, scan);
}
