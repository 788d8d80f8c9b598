/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.c - images in shared memory (object/image.h): each at its chunk's place in the object's file. shm.c has the
 * invariants.
 */

#include "tiering/object/space.h"
#include "tiering/shm/shm_priv.h"

uint8_t *ht_shm_chunk_memory(const struct ht_obj *o, uint64_t index)
{
    return ht_shared_at(&o->extra->shm->memory, index << o->chunk_shift);
}

uint32_t ht_shm_chunk_bytes(const struct ht_obj *o, uint64_t index)
{
    uint64_t start = index << o->chunk_shift, bytes = o->extra->shm->memory.bytes;

    return start < bytes ? (uint32_t)ht_min_u64(bytes - start, ht_obj_bytes_per_chunk(o)) : 0;
}

int ht_shm_attach(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = o->s;

    assert(c->exclusive && c->slot == HT_SLOT_NONE);
    if (ht_shm_chunk_bytes(o, index) < ht_chunk_len(o, index))
        return -ENOMEM; /* the file could not grow with the object */
    if (!ht_shm_chunk_bytes(o, index))
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
    uint32_t bytes = ht_shm_chunk_bytes(o, index);

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
    uint32_t end = ht_shm_chunk_bytes(o, index);
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

const struct ht_image_ops ht_shm_images = {
    .mapped = true,
    .attach = attach,
    .reach = reach_of,
    .cut = cut,
    .revert = revert,
    .evict = evict,
};
