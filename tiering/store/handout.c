/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handout.c - objects whose images lie in a file of memory of their own, which others have, too: handed out.
 *
 * Who is handed out, and for how long, is handout_life.c's to say.
 *
 * Invariants, while an object has such memory:
 *  1. The file is at least as large as the object, and exactly as large when nobody is changing its size.
 *  2. A chunk's image is a guest of the arena at the chunk's place in the file, always valid as a whole, but after an abort until it has
 *     been read again. A chunk without one is a hole, and zeros in the file, as long as no stores are expected. Where they are, a chunk that
 *     came into being when the object grew may hold anything (ht_handed_hides): every reader gives it its image first.
 *  3. No image leaves while it is out. Nobody touches memory behind the end of the file (SIGBUS): who uses a chunk's image holds the chunk
 *     and stays inside the object's size as it was under the lock; who makes the file smaller has waited for all of these (trim).
 *  4. Where stores are expected, what a device gets is a copy of the image: its checksum is that of what is written.
 *
 * What was stored unseen is found by comparing an image with the checksum of the reference (handout_changes.c): then the image is dirty
 * like any other. Who commits, syncs or copies asks for it; the commit timer does so for what is back, and for the rest as often as is
 * cheap (ht_handed_look).
 *
 * Lock: store.lock; chunks as in lease.c, one at a time.
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/base/event.h"
#include "tiering/store/store_priv.h"

int ht_handed_init(struct ht_store *s)
{
    uint64_t share = s->opts.handout_bytes;
    return share ? ht_arena_expect_guests(s->arena, (uint32_t)(share / HT_CHUNK_BYTES) + HT_HANDED_MAX) : 0;
}

static uint8_t *chunk_memory(const struct ht_obj *o, uint64_t index)
{
    return ht_shared_at(&o->extra->handed->memory, index << o->chunk_shift);
}

/* Bytes of the chunk that are in the file. */
static uint32_t bytes_in_file(const struct ht_obj *o, uint64_t index)
{
    uint64_t start = index << o->chunk_shift, bytes = o->extra->handed->memory.bytes;
    return start < bytes ? (uint32_t)ht_min_u64(bytes - start, ht_obj_bytes_per_chunk(o)) : 0;
}

bool ht_handed_stores(const struct ht_obj *o)
{
    return o->extra->handed && o->extra->handed->stores;
}

bool ht_handed_hides(const struct ht_obj *o, uint64_t index)
{
    return ht_handed_stores(o) && ht_chunk_len(o, index) > 0;
}

/* ---------------------------------------------------------------- images */

int ht_handed_attach(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = o->s;
    assert(c->exclusive && c->slot == HT_SLOT_NONE);
    if (bytes_in_file(o, index) < ht_chunk_len(o, index))
        return -ENOMEM; /* the file could not grow with the object */
    uint32_t slot = ht_arena_adopt(s->arena, chunk_memory(o, index));
    if (slot == HT_SLOT_NONE)
        return -ENOMEM;
    ht_chunk_attach_image(o, c, index, slot);
    if (!ht_chunk_ref(c) && !(c->flags & CH_BAD))
        ht_arena_image(s->arena, slot)->valid_hi = ht_obj_bytes_per_chunk(o);
    return 0;
}

/* Without memory a store would end the process. Of a scratch object's the file is to tell whether anybody touched it. */
int ht_handed_populate(struct ht_obj *o, const struct ht_chunk *c, uint64_t index)
{
    char *memory = (char *)chunk_memory(o, index);
    uint32_t bytes = bytes_in_file(o, index);
    assert(c->exclusive);
    if (!bytes || o->obj_class == HT_CLASS_SCRATCH)
        return 0;
    ht_store_unlock(o->s);
    int rc = ht_mem_populate(memory, bytes);
    ht_store_lock(o->s);
    return rc;
}

/* An ordinary image moves into the file, dirty or not. Lock and chunk held. */
static int move_in(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = o->s;
    int rc = ht_chunk_fill(o, c, index);
    if (rc)
        return rc;
    uint32_t from = c->slot, len = ht_chunk_len(o, index);
    uint32_t there = (uint32_t)ht_min_u64(len, ht_arena_slot_bytes(s->arena, from));
    struct ht_image was = *ht_arena_image(s->arena, from);
    const uint8_t *data = ht_arena_data(s->arena, from);
    uint8_t *to = chunk_memory(o, index);
    if (bytes_in_file(o, index) < len)
        return -ENOMEM;
    ht_store_unlock(s);
    memcpy(to, data, there);
    memset(to + there, 0, len - there);
    ht_store_lock(s);
    uint32_t slot = ht_arena_adopt(s->arena, to);
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
    im->home = was.home;
    im->reserved_blocks = was.reserved_blocks;
    if (was.dirty)
        ht_chunk_set_dirty(o, c, index);
    return 0;
}

/* Invariant 2 for one chunk. clear: what lies in the file where there is no image is to be forgotten. */
static int complete_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index, bool clear)
{
    const struct ht_ref *ref = ht_chunk_ref(c);
    bool guest = ht_arena_is_guest(o->s->arena, c->slot);
    int rc = 0;
    if (!ht_chunk_len(o, index))
        return 0;
    if ((c->flags & CH_BAD) || (!guest && ref && ht_ref_lost(ref)))
        return -EIO;
    if (!guest)
        rc = ht_handed_populate(o, c, index);
    if (rc || (c->slot != HT_SLOT_NONE && !guest))
        return rc ? rc : move_in(o, c, index);
    if (!guest) {
        rc = ht_handed_attach(o, c, index);
        if (!rc && clear)
            memset(chunk_memory(o, index), 0, bytes_in_file(o, index));
    }
    return rc ? rc : ht_chunk_fill(o, c, index);
}

/* Invariant 2. Lock held, let go meanwhile: what is back may have lost its memory to another object then, and nothing is to be done. */
static int complete(struct ht_obj *o, bool clear)
{
    int first = 0;
    for (uint64_t index = 0; o->extra->handed && index << o->chunk_shift < o->size; index++) {
        struct ht_chunk *c = ht_chunk_make(o, index);
        if (!c)
            return -ENOMEM;
        ht_chunk_lock_exclusive(o->s, c);
        int rc = o->extra->handed ? complete_chunk(o, c, index, clear) : 0;
        ht_chunk_unlock_exclusive(o, c, index);
        if (rc && !first)
            first = rc;
    }
    return first;
}

/* ------------------------------------------------------------------ size */

static int grow_file(struct ht_obj *o, uint64_t bytes)
{
    uint64_t more = ht_handed_footprint(bytes) - ht_handed_footprint(o->extra->handed->memory.bytes);
    int rc = ht_shared_resize(&o->extra->handed->memory, bytes);
    if (!rc)
        o->s->handed_bytes += more;
    return rc;
}

int ht_handed_reach(struct ht_obj *o, uint64_t bytes)
{
    const struct ht_store *s = o->s;
    if (!o->extra->handed || bytes <= o->extra->handed->memory.bytes)
        return 0;
    uint64_t more = ht_handed_footprint(bytes) - ht_handed_footprint(o->extra->handed->memory.bytes);
    if (more > s->opts.handout_bytes || s->handed_bytes > s->opts.handout_bytes - more)
        return -ENOSPC;
    if (o->extra->handed->out && more && !ht_handed_user_may(s, o->extra->handed->user, 0, more))
        return -ENOSPC;
    return grow_file(o, bytes);
}

static void drop_images_behind(struct ht_obj *o, uint64_t first)
{
    struct ht_chunk *c;
    uint64_t index = first;
    ht_chunk_for_each_from(c, o, index)
    {
        ht_chunk_drop_image(o, c, index);
        ht_chunk_trim(o, index);
    }
}

/* Where it cannot, what would lie behind its end has no image and gets none (attach): reading it fails. */
void ht_handed_reach_again(struct ht_obj *o, uint64_t bytes)
{
    if (o->extra->handed && bytes > o->extra->handed->memory.bytes && grow_file(o, bytes))
        drop_images_behind(o, o->extra->handed->memory.bytes >> o->chunk_shift);
}

/* A chunk from *index on that somebody holds, or NULL; *index is moved there. */
static struct ht_chunk *held_behind(struct ht_obj *o, uint64_t *index)
{
    struct ht_chunk *c;
    ht_chunk_for_each_from(c, o, *index) if (c->exclusive || c->shared) return c;
    return NULL;
}

/* With the chunk that the end lies in held: as small as the object, if nobody works behind it. Lock held. */
static bool try_trim(struct ht_obj *o, uint64_t size)
{
    struct ht_store *s = o->s;
    struct ht_shared *m = &o->extra->handed->memory;
    uint64_t behind = ht_div_up(size, ht_obj_bytes_per_chunk(o)), before = m->bytes;
    uint64_t at = behind;
    if (o->size != size || held_behind(o, &at))
        return false;
    drop_images_behind(o, behind);
    if (ht_shared_resize(m, size) == 0)
        s->handed_bytes -= ht_handed_footprint(before) - ht_handed_footprint(size);
    return true;
}

void ht_handed_trim(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    bool done = false;
    while (!done && o->extra->handed && o->extra->handed->memory.bytes > o->size) {
        uint64_t size = o->size, behind = ht_div_up(size, ht_obj_bytes_per_chunk(o)), at = behind;
        struct ht_chunk *end = behind ? ht_chunk_find(o, behind - 1) : NULL, *held = held_behind(o, &at);
        if (held) { /* it began with a larger object, or makes it larger */
            ht_chunk_lock_exclusive(s, held);
            ht_chunk_unlock_exclusive(o, held, at);
            continue;
        }
        if (end)
            ht_chunk_lock_exclusive(s, end);
        done = !o->extra->handed || try_trim(o, size); /* another object may have taken its memory meanwhile */
        if (end)
            ht_chunk_unlock_exclusive(o, end, behind - 1);
    }
}

void ht_handed_cut(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t keep)
{
    struct ht_store *s = o->s;
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    uint32_t end = bytes_in_file(o, index);
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

int ht_handed_complete(struct ht_obj *o)
{
    return o->extra->handed ? complete(o, false) : 0;
}

int ht_handed_visit(struct ht_store *s, uint64_t scope, ht_handed_wanted_fn wanted, ht_handed_visit_fn visit, void *ctx)
{
    struct ht_obj **objs;
    size_t n = 0;
    int first = 0;
    ht_store_lock(s);
    objs = s->handed_count ? malloc(s->handed_count * sizeof(struct ht_obj *)) : NULL;
    if (s->handed_count && !objs)
        first = -ENOMEM;
    if (objs)
        ht_list_for_each(p, &s->handed) {
            const struct ht_handed *h = ht_list_entry(p, struct ht_handed, link);
            if (!wanted(h, ctx) || h->obj->scope->id != scope || h->obj->dead)
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

void ht_handed_free(struct ht_obj *o)
{
    struct ht_handed *h = o->extra->handed;
    struct ht_store *s = o->s;
    if (!h)
        return;
    ht_obj_extra(o)->handed = NULL;
    ht_list_del(&h->link);
    s->handed_count--;
    s->handed_bytes -= ht_handed_footprint(h->memory.bytes);
    ht_shared_close(&h->memory);
    free(h);
}

bool ht_handed_try_free(struct ht_obj *o)
{
    struct ht_chunk *c;
    uint64_t index = 0, any = 0;
    if (!o->extra->handed || o->extra->handed->out || o->extra->handed->stores || o->dirty || o->writing ||
        held_behind(o, &any))
        return false;
    ht_chunk_for_each_from(c, o, index)
    {
        if (ht_arena_is_guest(o->s->arena, c->slot))
            ht_chunk_drop_image(o, c, index);
        ht_chunk_trim(o, index);
    }
    ht_handed_free(o);
    return true;
}

/* ----------------------------------------------------------------- abort */

void ht_handed_touch(struct ht_store *s, uint64_t scope)
{
    ht_list_for_each(p, &s->handed) {
        struct ht_handed *h = ht_list_entry(p, struct ht_handed, link);
        if (h->stores && h->obj->scope->id == scope)
            ht_obj_touch(h->obj);
    }
}

void ht_handed_revert(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_image *im = ht_arena_image(o->s->arena, c->slot);
    ht_chunk_set_clean(o, c, index);
    ht_chunk_unreserve(o, c);
    im->valid_lo = im->valid_hi = im->data_hi = 0;
}

/* Of what is not handed out any more nothing is shown. */
static int restore(struct ht_obj *o, void *ctx)
{
    (void)ctx;
    if (!o->extra->handed)
        return 0;
    int rc = complete(o, true);
    ht_handed_trim(o);
    if (!rc)
        return 0;
    const struct ht_event_about about = {.id = o->oid, .error = rc};
    ht_event(HT_EVENT_READ_ERROR, &about,
             "a mapping of object %llu does not show what abort went back to, and it cannot be read again: %s",
             (unsigned long long)o->oid, strerror(-rc));
    ht_obj_set_error(o, rc);
    return rc;
}

static bool is_any(const struct ht_handed *h, const void *ctx)
{
    (void)h;
    (void)ctx;
    return true;
}

int ht_scope_restore_handed(struct ht_store *s, uint64_t scope)
{
    return ht_handed_visit(s, scope, is_any, restore, NULL);
}
