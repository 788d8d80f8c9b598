/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.h - the DRAM tier: one pinned memory of 1 MiB slots, each used whole for an image or split into pieces of 64, 128, 256 and
 * 512 KiB for small ones.
 *
 * Guests are images in memory that is not the arena's (handed-out tensors). They have slot numbers of their own behind those of the
 * slots, are always kept, and are never asked to go.
 *
 * Passive: knows no objects and starts no I/O. Which image may go is the owner's word (ht_evict_fn), which
 * one is asked first is the clock's (second chance). A slot number counts in
 * sub-slots of 64 KiB: a whole slot or a piece has the number of its first one.
 *
 * Not locked: the store's lock guards it; the bytes are guarded by the chunk locks.
 */
#ifndef HITRAIN_TIERING_CACHE_ARENA_H
#define HITRAIN_TIERING_CACHE_ARENA_H

#include "tiering/base/base.h"
#include "tiering/base/mem.h"

#define HT_SLOT_NONE UINT32_MAX

struct ht_arena;

/* An image's descriptor. Bytes [valid_lo, valid_hi) of the slot are the chunk's; what the slot is too short for are zeros. */
struct ht_image {
    void *owner;    /* the owner's object; NULL: slot unused */
    uint64_t index; /* chunk of it */
    uint32_t valid_lo, valid_hi;
    uint32_t data_hi;         /* valid bytes from here on are zeros and need not be stored */
    uint32_t reserved_blocks; /* space promised for writing it back */
    uint32_t used_at;         /* stay.h */
    bool durable : 1;         /* dirty bytes of it should reach a device soon, not only when memory is short */
    bool dirty : 1;           /* newer than the current reference */
    bool referenced : 1;      /* second chance */
    bool kept : 1;            /* not asked to go */
    bool ahead : 1;           /* read ahead, and not used yet */
    bool stays : 1;           /* asked only when it was not used for long: stay.h */
    uint8_t home;             /* device it should be written to, and 1; 0: any */
    uint8_t subs;             /* sub-slots of it; the arena's */
};

/* May this image go now? True: it has been detached by the owner. */
typedef bool (*ht_evict_fn)(void *ctx, uint32_t slot);

/* nodes live longer, or are NULL. */
int ht_arena_new(uint64_t bytes, const struct ht_nodes *nodes, ht_evict_fn evict, void *ctx,
                 struct ht_arena **out_arena) HT_CHECK;
void ht_arena_free(struct ht_arena *a);
/* As of its memory (mem.h). */
void ht_arena_when_populated(struct ht_arena *a, void (*fn)(void *ctx), void *ctx);
void ht_arena_settle(struct ht_arena *a);

/*
 * A slot of at least so many bytes (up to 1 MiB). Where none is free, up to tries images are asked to go; HT_ARENA_ASK_ALL: all of them, twice;
 * HT_ARENA_FORCE: those that stay, too, which do so no more. HT_SLOT_NONE: none did. The image is zeroed.
 * It lies on the node at the place near if one there is free or comes free soon, else on another.
 */
#define HT_ARENA_FORCE UINT32_MAX
#define HT_ARENA_ASK_ALL (HT_ARENA_FORCE - 1)
uint32_t ht_arena_get(struct ht_arena *a, uint32_t bytes, uint32_t tries, int near);
/* It becomes the image of this. What comes back after it had to go stays, as long as ht_arena_keep_max() allows. */
void ht_arena_attach(struct ht_arena *a, uint32_t slot, void *owner, uint64_t index, bool durable);
void ht_arena_set_dirty(struct ht_arena *a, uint32_t slot, bool dirty);
/* It comes before anybody has asked for it. */
void ht_arena_mark_ahead(struct ht_arena *a, uint32_t slot);
/* How many did, how many of them were used, and how many had to go before. */
void ht_arena_ahead_stats(const struct ht_arena *a, uint64_t *out_chunks, uint64_t *out_hits, uint64_t *out_wasted);
/* Of these, not used yet. */
uint64_t ht_arena_ahead_bytes(const struct ht_arena *a);
/* Somebody used it. */
void ht_arena_use(struct ht_arena *a, uint32_t slot);
/* Give an image's slot back. */
void ht_arena_put(struct ht_arena *a, uint32_t slot);
/* The image that to has, attached to the same and with the same bytes, is from now on what from was, which is given back. */
void ht_arena_replace(struct ht_arena *a, uint32_t from, uint32_t to);

/* Room for so many guests; once. */
int ht_arena_expect_guests(struct ht_arena *a, uint32_t count) HT_CHECK;
/* An image for one chunk of 1 MiB at data, zeroed. HT_SLOT_NONE: no room. Given back as others are. */
uint32_t ht_arena_adopt(struct ht_arena *a, uint8_t *data);
bool ht_arena_is_guest(const struct ht_arena *a, uint32_t slot);

struct ht_image *ht_arena_image(struct ht_arena *a, uint32_t slot);
uint8_t *ht_arena_data(struct ht_arena *a, uint32_t slot);
/*
 * The keep-set: images that stay until they are given back, so that work that passes over more than fits finds the same part of it
 * here every time, in any order. What passes needs room for what is read ahead and what waits to be written: 32 MiB, which grow with
 * an arena of more than 256 MiB, and are no more than a quarter of one of less than 128 MiB.
 */
static inline uint64_t ht_arena_keep_max(uint64_t arena_bytes)
{
    return arena_bytes - ht_max_u64(arena_bytes / 8, ht_min_u64(arena_bytes / 4, 32u << 20));
}
/* Is there room in it for another image of any size? For this one, which may share its slot with others that are in it? */
bool ht_arena_can_keep(const struct ht_arena *a);
bool ht_arena_may_keep(const struct ht_arena *a, uint32_t slot);
void ht_arena_keep(struct ht_arena *a, uint32_t slot); /* needs may_keep, unless it is kept already */
void ht_arena_let_go(struct ht_arena *a, uint32_t slot);
/* Of slots with one that is kept; of others with one that stays. */
uint64_t ht_arena_kept_bytes(const struct ht_arena *a);
uint64_t ht_arena_staying_bytes(const struct ht_arena *a);
/* What the clock may let go, or has nobody in it. */
uint64_t ht_arena_moving_bytes(const struct ht_arena *a);
/* Dirty, and the clock would have it go: it has to be written first. */
static inline bool ht_image_passes_dirty(const struct ht_image *im)
{
    return im->dirty && !im->kept && !im->stays;
}
/* Is so much dirty of what passes through that it should be written? Scratch counts when room was short already. */
bool ht_arena_under_pressure(const struct ht_arena *a);
/* Should this one be written then? Not, unless growing is set, while somebody fills it: he would have to wait for the device. */
bool ht_arena_presses(struct ht_arena *a, uint32_t slot, bool growing);
/* Bytes a slot number stands for. */
uint32_t ht_arena_slot_bytes(const struct ht_arena *a, uint32_t slot);
/* Next used slot in clock order, advancing the writeback hand; HT_SLOT_NONE after a whole round of unused ones. */
uint32_t ht_arena_next_used(struct ht_arena *a, uint32_t *hand);

uint64_t ht_arena_bytes(const struct ht_arena *a);
uint64_t ht_arena_used_bytes(const struct ht_arena *a);
/* Whole slots that nobody uses, but for a few that wait for somebody near them. */
uint32_t ht_arena_free_slots(const struct ht_arena *a);
/* Bytes of used slots that come from the node at a place. */
uint64_t ht_arena_used_on(const struct ht_arena *a, unsigned place);
/* And of dirty ones of them that pass through. */
uint64_t ht_arena_dirty_on(const struct ht_arena *a, unsigned place);
/* The place of an image's memory; HT_NEAR_ANY: a guest's. */
int ht_arena_near(const struct ht_arena *a, uint32_t slot);
/* Heap for descriptors: of slots, images and guests, and of images that went. */
uint64_t ht_arena_meta_bytes(const struct ht_arena *a);
const struct ht_pinned *ht_arena_memory(const struct ht_arena *a);

#endif
