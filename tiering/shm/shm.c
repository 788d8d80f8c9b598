/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm.c - objects whose images lie in a file of memory of their own (a memfd), which other programs have, too.
 *
 * life.c says which objects have one, and for how long.
 *
 * Invariants, while an object has such memory:
 *  1. The file is at least as large as the object, and exactly as large when no thread is changing its size.
 *  2. A chunk's image is external, at the chunk's place in the file, always valid as a whole, except after an abort
 *     until it has been read again. A chunk after the end of the file has none: its place may move when the file grows.
 *     A chunk without one is a hole, and zeros in the file, as long as no stores are expected. If they are, a chunk
 *     from a growth of the object may hold anything (ht_chunk_is_volatile): every reader gives it its image first.
 *  3. No image leaves while it is open. No thread touches memory after the end of the file (SIGBUS). A thread that uses
 *     a chunk's image holds the chunk and stays inside the object's size as it was under the lock. A thread that makes
 *     the file smaller has waited for all of these (trim).
 *  4. If stores are expected, a device gets a copy of the image, so that the checksum is that of the written bytes.
 *
 * A comparison of an image with the checksum of its reference finds unseen stores (dirty_scan.c): then the image is
 * dirty like any other. Commits, syncs and copies scan first; the commit timer scans objects that take no more stores,
 * and others as often as is cheap (ht_shm_scan).
 *
 * Lock: store.lock; chunks as in batch_pin.c, one at a time.
 */

#include "tiering/shm/shm.h"
#include "tiering/base/event.h"
#include "tiering/api/object.h"
#include "tiering/object/space.h"
#include "tiering/data/chunk_io.h"
#include "tiering/shm/shm_priv.h"

/* --------------------------- images, each at its chunk's place in the file (object/image.h) */

uint8_t *ht_shm_chunk_memory(const struct ht_obj *o, uint64_t index)
{
    return ht_shared_at(&o->extra->shm->memory, index << o->chunk_shift);
}

/* Bytes of the chunk that are in the file. */
static uint32_t chunk_bytes(const struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t start = index << o->chunk_shift, bytes = o->extra->shm->memory.bytes;

    return start < bytes ? (uint32_t)ht_min_u64(bytes - start, ht_obj_bytes_per_chunk(o)) : 0;
}

int ht_shm_attach(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = o->s;

    assert(c->exclusive && c->slot == HT_SLOT_NONE);
    if (chunk_bytes(o, index) < ht_chunk_len(o, index))
        return -ENOMEM; /* the file could not grow with the object */
    if (!chunk_bytes(o, index))
        return -EINVAL; /* a truncation removed the chunk: it has no address */
    uint32_t slot = ht_arena_attach_external(s->arena, ht_shm_chunk_memory(o, index));
    if (slot == HT_SLOT_NONE)
        return -ENOMEM;
    ht_chunk_attach_image(o, c, index, slot);
    if (!ht_chunk_ref(c) && !(c->flags & HT_CH_BAD))
        ht_arena_image(s->arena, slot)->valid_hi = ht_obj_bytes_per_chunk(o);
    return 0;
}

/*
 * Takes the memory now: if it is missing later, a store ends the process. A scratch object gets none here: its file is
 * to show which pages were touched.
 */
int ht_shm_populate(struct ht_obj *o, const struct ht_chunk *c, uint64_t index)
{
    char *memory = (char *)ht_shm_chunk_memory(o, index);
    uint32_t bytes = chunk_bytes(o, index);

    assert(c->exclusive);
    if (!bytes || o->obj_class == HT_CLASS_SCRATCH)
        return 0;
    ht_store_unlock(o->s);
    int rc = ht_mem_populate(memory, bytes);
    ht_store_lock(o->s);
    return rc;
}

static int attach(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t reach, bool grows)
    HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = grows ? ht_shm_grow(o, (index << o->chunk_shift) + reach) : 0;

    return rc || c->slot != HT_SLOT_NONE ? rc : ht_shm_attach(o, c, index);
}

static uint32_t reach_of(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_chunk_len(o, index);
}

static void cut(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t keep) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    uint32_t end = chunk_bytes(o, index);
    uint8_t *data = ht_arena_data(s->arena, c->slot);

    if (end > keep) {
        ht_store_unlock(s);
        memset(data + keep, 0, end - keep);
        ht_store_lock(s);
    }
    im->data_hi = (uint32_t)ht_min_u64(im->data_hi, keep);
    if (keep)
        return;
    ht_chunk_set_clean(o, c, index);
    ht_chunk_unreserve(o, c);
    im->valid_lo = 0;
    im->valid_hi = ht_obj_bytes_per_chunk(o);
}

static void revert(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_image *im = ht_arena_image(o->s->arena, c->slot);

    ht_chunk_set_clean(o, c, index);
    ht_chunk_unreserve(o, c);
    im->valid_lo = im->valid_hi = im->data_hi = 0;
}

static void evict(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!o->extra->shm->is_open)
        (void)ht_shm_reclaim(o);
}

static const struct ht_image_ops images = {
    .mapped = true,
    .attach = attach,
    .reach = reach_of,
    .cut = cut,
    .revert = revert,
    .evict = evict,
};

/* ----------------------------------------------------------------- state */

int ht_shm_setup(struct ht_store *s)
{
    s->shm = calloc(1, sizeof(*s->shm));
    if (!s->shm)
        return -ENOMEM;
    ht_list_init(&s->shm->all);
    s->hooks.shm_images = &images;
    s->hooks.free_shm = ht_shm_free;
    return 0;
}

void ht_shm_teardown(struct ht_store *s)
{
    free(s->shm);
}

int ht_shm_init(struct ht_store *s)
{
    uint64_t share = s->opts.shm_lent ? s->opts.dram_bytes / 100 * HT_SHM_PERCENT_MAX : s->opts.shm_bytes;

    s->shm->share_bytes = share;
    return share ? ht_arena_expect_external(s->arena, (uint32_t)(share / HT_CHUNK_BYTES) + HT_SHM_IMAGES_MAX) : 0;
}

void ht_shm_stats(const struct ht_store *s, struct ht_store_stats *out)
{
    out->shm_bytes = s->opts.shm_bytes;
    out->shm_bytes_max = s->shm->share_bytes;
    out->shm_used_bytes = s->shm->used_bytes;
    out->shm_count = s->shm->count;
    out->dram_bytes += s->opts.shm_bytes + ht_arena_lent_bytes(s->arena);
    out->dram_used_bytes += s->shm->used_bytes;
    out->working_bytes += s->shm->count * sizeof(struct ht_shm);
    ht_list_for_each(p, &s->shm->all)
        out->locked_bytes += ht_list_entry(p, struct ht_shm, link)->memory.locked_bytes;
}

/* -------------------------------------------------------------- complete */

/* An ordinary image moves into the file, dirty or not. Lock and chunk held. */
static int move_in(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    int rc = ht_chunk_fill(o, c, index, NULL);

    if (rc)
        return rc;
    uint32_t from = c->slot, len = ht_chunk_len(o, index);
    uint32_t there = (uint32_t)ht_min_u64(len, ht_arena_slot_bytes(s->arena, from));
    struct ht_image was = *ht_arena_image(s->arena, from);
    const uint8_t *data = ht_arena_data(s->arena, from);
    uint8_t *to = ht_shm_chunk_memory(o, index);
    if (chunk_bytes(o, index) < len)
        return -ENOMEM;
    ht_store_unlock(s);
    memcpy(to, data, there);
    memset(to + there, 0, len - there);
    ht_store_lock(s);
    uint32_t slot = ht_arena_attach_external(s->arena, to);
    if (slot == HT_SLOT_NONE)
        return -ENOMEM;
    ht_chunk_set_clean(o, c, index);
    ht_wake_for_slot(s, from);
    ht_arena_put(s->arena, from);
    o->resident--;
    ht_chunk_attach_image(o, c, index, slot);
    struct ht_image *im = ht_arena_image(s->arena, slot);
    im->valid_hi = ht_obj_bytes_per_chunk(o);
    im->data_hi = was.data_hi;
    im->target_device = was.target_device;
    im->reserved_blocks = was.reserved_blocks;
    if (was.dirty)
        ht_chunk_set_dirty(o, c, index);
    return 0;
}

/* Invariant 2 for one chunk. clear: bytes of the file without an image are to be forgotten. */
static int complete_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index, bool clear) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = ht_chunk_ref(c);
    bool external = ht_arena_is_external(o->s->arena, c->slot);
    int rc = 0;

    if (!ht_chunk_len(o, index))
        return 0;
    if ((c->flags & HT_CH_BAD) || (!external && ref && ht_ref_lost(ref)))
        return -EIO;
    if (!external)
        rc = ht_shm_populate(o, c, index);
    if (rc || (c->slot != HT_SLOT_NONE && !external))
        return rc ? rc : move_in(o, c, index);
    if (!external) {
        rc = ht_shm_attach(o, c, index);
        if (!rc && clear)
            memset(ht_shm_chunk_memory(o, index), 0, chunk_bytes(o, index));
    }
    return rc ? rc : ht_chunk_fill(o, c, index, NULL);
}

/* Has the chunk all that complete_chunk would give it, and does no thread hold it? */
static bool is_complete(const struct ht_obj *o, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_arena *arena = o->s->arena;

    if (c->exclusive || c->shared || (c->flags & HT_CH_BAD) || !ht_arena_is_external(arena, c->slot))
        return false;
    const struct ht_image *im = ht_arena_image(arena, c->slot);
    return !im->valid_lo && im->valid_hi == ht_arena_slot_bytes(arena, c->slot);
}

/*
 * Invariant 2. Lock held; releases it in between: a closed object may have lost its memory to another one then, and
 * nothing is to be done. An object that is opened again has all already, so that costs some nanoseconds a chunk.
 */
static int complete(struct ht_obj *o, bool clear) HT_REQUIRES(HT_LOCK_STORE)
{
    int first = 0;

    for (uint64_t index = 0; o->extra->shm && index << o->chunk_shift < o->size; index++) {
        struct ht_chunk *c = ht_chunk_find(o, index);
        if (c && is_complete(o, c))
            continue;
        c = ht_chunk_make(o, index);
        if (!c)
            return -ENOMEM;
        ht_chunk_lock_exclusive(o, c, index);
        int rc = o->extra->shm ? complete_chunk(o, c, index, clear) : 0;
        ht_chunk_unlock_exclusive(o, c, index);
        if (rc && !first)
            first = rc;
    }
    return first;
}

/* ------------------------------------------------------------------ size */

/* owes: without memory from the tier it counts all the same, and the next that takes some makes up for it. */
static int grow_file(struct ht_obj *o, uint64_t bytes, bool owes) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_shm_state *shm = o->s->shm;
    uint64_t more = ht_shm_footprint(bytes) - ht_shm_footprint(o->extra->shm->memory.bytes);
    int rc = ht_shm_take(o->s, more, HT_LEND_ANY, 0);

    if (rc && !owes)
        return rc;
    shm->used_bytes += rc ? more : 0;
    shm->owes |= rc || shm->used_bytes > shm->share_bytes;
    rc = ht_shared_resize(&o->extra->shm->memory, bytes);
    if (rc)
        ht_shm_give(o->s, more);
    return rc;
}

int ht_shm_grow(struct ht_obj *o, uint64_t bytes)
{
    const struct ht_store *s = o->s;

    if (!o->extra->shm || bytes <= o->extra->shm->memory.bytes)
        return 0;
    uint64_t more = ht_shm_footprint(bytes) - ht_shm_footprint(o->extra->shm->memory.bytes);
    if (!ht_shm_may_use(s, s->shm->used_bytes + more))
        return -ENOSPC;
    if (o->extra->shm->is_open && more && !ht_shm_user_may(s, o->extra->shm->user, 0, more))
        return -ENOSPC;
    return grow_file(o, bytes, false);
}

static void drop_images_behind(struct ht_obj *o, uint64_t first) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t index = first;

    /* bounded: shared memory has chunks of 1 MiB, and all at once lose their images */
    ht_chunk_for_each_busy_from(c, o, index) {
        ht_chunk_drop_image(o, c, index);
        ht_chunk_trim(o, index);
    }
}

/* If it cannot grow, chunks after its end have no image and get none (attach): reading them fails. */
void ht_shm_regrow(struct ht_obj *o, uint64_t bytes)
{
    if (o->extra->shm && bytes > o->extra->shm->memory.bytes && grow_file(o, bytes, true))
        drop_images_behind(o, o->extra->shm->memory.bytes >> o->chunk_shift);
}

/* A held chunk from *index on, or NULL; moves *index there. */
static struct ht_chunk *held_behind(struct ht_obj *o, uint64_t *index) HT_REQUIRES(HT_LOCK_STORE)
{
    /* bounded: the same, and no thread may take one */
    ht_chunk_for_each_from(c, o, *index)
        if (c->exclusive || c->shared)
            return c;
    return NULL;
}

/*
 * With the chunk of the end held: makes the file as small as the object, if no thread works after the end.
 */
static bool try_trim(struct ht_obj *o, uint64_t size) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_shared *m = &o->extra->shm->memory;
    uint64_t behind = ht_div_up(size, ht_obj_bytes_per_chunk(o)), before = m->bytes;
    uint64_t at = behind;

    if (o->size != size || held_behind(o, &at))
        return false;
    drop_images_behind(o, behind);
    if (ht_shared_resize(m, size) == 0)
        ht_shm_give(s, ht_shm_footprint(before) - ht_shm_footprint(size));
    return true;
}

void ht_shm_trim(struct ht_obj *o)
{
    bool done = false;

    while (!done && o->extra->shm && o->extra->shm->memory.bytes > o->size) {
        uint64_t size = o->size, behind = ht_div_up(size, ht_obj_bytes_per_chunk(o)), at = behind;
        struct ht_chunk *end = behind ? ht_chunk_find(o, behind - 1) : NULL, *held = held_behind(o, &at);
        if (held) { /* it began with a larger object, or makes it larger */
            ht_chunk_lock_exclusive(o, held, at);
            ht_chunk_unlock_exclusive(o, held, at);
            continue;
        }
        if (end)
            ht_chunk_lock_exclusive(o, end, behind - 1);
        done = !o->extra->shm || try_trim(o, size); /* another object may have taken its memory in between */
        if (end)
            ht_chunk_unlock_exclusive(o, end, behind - 1);
    }
}

int ht_shm_complete(struct ht_obj *o)
{
    return o->extra->shm ? complete(o, false) : 0;
}

int ht_shm_visit(struct ht_store *s, uint64_t scope, ht_shm_wanted_fn wanted, ht_shm_visit_fn visit, void *ctx)
{
    size_t n = 0;
    int first = 0;

    ht_store_lock(s);
    struct ht_obj **objs = s->shm->count ? malloc(s->shm->count * sizeof(struct ht_obj *)) : NULL;
    if (s->shm->count && !objs)
        first = -ENOMEM;
    if (objs)
        ht_list_for_each_entry(h, &s->shm->all, const struct ht_shm, link) {
            if ((wanted && !wanted(h, ctx)) || h->obj->scope->id != scope || h->obj->dead)
                continue;
            objs[n++] = h->obj;
            h->obj->refs++;
        }
    for (size_t i = 0; i < n; i++) {
        int rc = visit(objs[i], ctx);
        if (rc && !first)
            first = rc;
        ht_obj_put_locked(objs[i]);
    }
    ht_store_unlock(s);
    free(objs);
    return first;
}

/* ------------------------------------------------------------------- end */

void ht_shm_free(struct ht_obj *o)
{
    struct ht_shm *h = o->extra->shm;
    struct ht_store *s = o->s;

    if (!h)
        return;
    ht_obj_extra(o)->shm = NULL;
    ht_obj_extra(o)->may_be_dirty = ht_obj_extra(o)->shm_stored = ht_obj_extra(o)->shm_reserve = false;
    ht_list_del(&h->link);
    s->shm->count--;
    ht_shared_close(&h->memory);
    ht_shm_give(s, ht_shm_footprint(h->memory.bytes));
    free(h);
}

bool ht_shm_try_free(struct ht_obj *o)
{
    uint64_t any = 0;

    if (!o->extra->shm || o->extra->shm->is_open || o->extra->may_be_dirty || o->dirty || o->writing ||
        held_behind(o, &any))
        return false;
    /* bounded: the same: shared memory has chunks of 1 MiB */
    ht_chunk_for_each_busy(c, o, index) {
        if (ht_arena_is_external(o->s->arena, c->slot))
            ht_chunk_drop_image(o, c, index);
        ht_chunk_trim(o, index);
    }
    ht_shm_free(o);
    return true;
}

/* ----------------------------------------------------------------- abort */

void ht_shm_for_each_stored(struct ht_store *s, uint64_t scope, void (*fn)(struct ht_obj *o))
{
    ht_list_for_each_entry(h, &s->shm->all, struct ht_shm, link)
        if (h->obj->extra->may_be_dirty && h->obj->scope->id == scope)
            fn(h->obj);
}

/* An object that is not in shared memory any more has nothing to restore. */
static int restore(struct ht_obj *o, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!o->extra->shm)
        return 0;
    int rc = complete(o, true);
    ht_shm_trim(o);
    if (!rc)
        return 0;
    const struct ht_event_about about = {.id = o->oid, .error = rc};
    ht_event(HT_EVENT_READ_ERROR, &about,
             "a mapping of object %llu does not show what abort went back to, and it cannot be read again: %s",
             (unsigned long long)o->oid, strerror(-rc));
    ht_obj_set_error(o, rc);
    return rc;
}

int ht_scope_shm_restore(struct ht_store *s, uint64_t scope)
{
    return ht_shm_visit(s, scope, NULL, restore, NULL);
}
