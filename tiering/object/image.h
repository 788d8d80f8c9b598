/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.h - images of chunks in either place: in the arena (image.c), or in shared memory that programs map
 * (shm/shm.c). The caller holds the store's lock. It holds the chunk exclusively if a call changes its image.
 *
 * All images of an object are of one kind, with one exception: while its shared memory opens, some are still in the
 * arena, and ht_shm_complete moves them.
 */
#pragma once

#include "tiering/object/object.h"

struct ht_image_ops {
    /* Programs see the memory: it shows verified bytes only, and its content stays where it is. */
    bool mapped;
    /*
     * Attaches an image that reaches so far. grows: for bytes that the object gets now; its memory grows, too.
     * -EALREADY: the call has waited, and the chunk has an image, or needs another. -EINVAL: mapped memory ends before
     * the chunk.
     */
    int (*attach)(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t reach, bool grows);
    /* Bytes of the chunk for which its image has memory. */
    uint32_t (*reach)(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index);
    /*
     * The image has zeros after keep bytes. If keep is 0 it becomes clean, or is dropped. The call may release the
     * lock.
     */
    void (*cut)(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t keep);
    /* Voids the content of the image. */
    void (*revert)(struct ht_obj *o, struct ht_chunk *c, uint64_t index);
    /* Drops all clean images of the object, unless programs have them. The call may release the lock. */
    void (*evict)(struct ht_obj *o);
};
extern const struct ht_image_ops ht_arena_images;

/* The kind of the object's next image. */
const struct ht_image_ops *ht_obj_images(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/* The kind of the chunk's image; if it has none, of its next one. */
const struct ht_image_ops *ht_chunk_images(const struct ht_obj *o, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);

/*
 * The bytes of an image that reaches that far. An object's first chunk takes the bytes it has, so that small objects
 * take little. The others, which are full except the last one, take a whole chunk, unless only a part of each chunk is
 * used. Never less than a reference shows or has stored.
 */
uint32_t ht_chunk_image_bytes(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index, uint32_t reach)
    HT_REQUIRES(HT_LOCK_STORE);
/* Of the image that an update makes: tensors and states keep their size, so it takes no more than the chunk has. */
uint32_t ht_chunk_update_bytes(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index, uint32_t reach)
    HT_REQUIRES(HT_LOCK_STORE);
/*
 * Attaches an image that reaches so far, and moves a shorter one. The call may release the chunk and take it again:
 * then everything else about the chunk may have changed. grows: for bytes that the object gets now.
 */
int ht_image_attach(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t reach, bool grows)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
static inline uint32_t ht_image_reach(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_chunk_images(o, c)->reach(o, c, index);
}
/* The chunk may be without an image. */
static inline void ht_image_cut(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t keep)
    HT_REQUIRES(HT_LOCK_STORE)
{
    if (c->slot != HT_SLOT_NONE)
        ht_chunk_images(o, c)->cut(o, c, index, keep);
}
static inline void ht_image_revert(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    if (c->slot != HT_SLOT_NONE)
        ht_chunk_images(o, c)->revert(o, c, index);
}

/* May programs change images of the object without a call? */
static inline bool ht_obj_is_volatile(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    return o->extra->may_be_dirty;
}
/* Are the pages of its images to be copied before a checksum and a device read them? */
static inline bool ht_obj_is_copied(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    return o->extra->shm_stored; /* which is set with may_be_dirty, and stays */
}
/* Volatile: a chunk inside the object may hold bytes although it has neither an image nor a reference. */
static inline bool ht_chunk_is_volatile(const struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_obj_is_volatile(o) && ht_chunk_len(o, index) > 0;
}
