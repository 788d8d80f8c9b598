/* SPDX-License-Identifier: Apache-2.0 */
/* arena_priv.h - what arena.c and eviction.c share. An image's number n counts sub-slots; i counts slots. */
#ifndef HITRAIN_TIERING_CACHE_ARENA_PRIV_H
#define HITRAIN_TIERING_CACHE_ARENA_PRIV_H

#include "tiering/cache/arena.h"
#include "tiering/tier/workingset.h"

enum { HT_SLOT_SUBS = 16, HT_SLOT_SHIFT = 20 };
enum { HT_PIECE_LENGTHS = 4 }; /* of pieces: 1, 2, 4, 8 sub-slots */
enum ht_slot_state { HT_SLOT_FREE, HT_SLOT_WHOLE, HT_SLOT_SPLIT };

struct ht_slot {
    uint8_t state;
    uint8_t numa_index;            /* place of its node */
    uint16_t used;                 /* SPLIT: mask of sub-slots */
    uint8_t protected, workingset; /* images in it that are protected, that are of the working set */
    uint32_t next;                 /* FREE: chain */
    uint32_t at;                   /* in memory, in slots */
};

struct ht_external {
    uint8_t *data;
    uint32_t next; /* free: chain */
};

struct ht_arena {
    struct ht_pinned memory;
    uint32_t slots, free_slots, hand;
    uint32_t spare; /* free slots that are no reason to take one far away */
    uint32_t free_head[HT_NODES_MAX], free_on[HT_NODES_MAX];
    uint32_t hint[HT_NODES_MAX][HT_PIECE_LENGTHS]; /* a SPLIT slot that may have room for a piece of that length */
    uint32_t look;                                 /* end of the last search for one with room */
    uint32_t split_free;                           /* unused sub-slots of SPLIT slots */
    uint64_t used_on[HT_NODES_MAX], dirty_on[HT_NODES_MAX]; /* dirty: in passing images */
    uint64_t used_bytes, protected_bytes, workingset_bytes; /* the last two: whole slots */
    uint64_t passing_dirty_bytes,
        durable_dirty_bytes; /* dirty, neither protected nor of the working set: all, durable */
    bool forced;             /* the sweep that is running heeds no working set */
    uint32_t short_for;      /* images to come until it is forgotten that one found no room */
    uint64_t readahead_chunks, readahead_hits, readahead_wasted, readahead_bytes;
    struct ht_workingset workingset;
    struct ht_slot *slot;
    struct ht_image *image; /* HT_SLOT_SUBS per slot */
    uint32_t externals, external_head;
    struct ht_external *external;
    struct ht_image *external_image;
    ht_evict_fn evict;
    void *ctx;
};

/* -------------------------------------------------------------- arena.c */

/* Has slot i, if it is SPLIT, room for a piece of so many sub-slots? *out_first: the first sub-slot of that room. */
bool ht_slot_has_room(const struct ht_arena *a, uint32_t i, uint32_t subs, uint32_t *out_first);

/* ----------------------------------------------------------- eviction.c */

/* Moves the hand over one slot and evicts its images, until it has room for so many sub-slots; returns the slot. */
uint32_t ht_eviction_pass(struct ht_arena *a, uint32_t subs) HT_REQUIRES(HT_LOCK_STORE);
/* An image was attached to its owner: a refault joins the working set if there is room. */
void ht_eviction_note_attached(struct ht_arena *a, uint32_t n);
/* It joins the working set if there is room. */
void ht_eviction_join_workingset(struct ht_arena *a, uint32_t n);
/* An image in the arena is given back: it leaves both sets, and readahead was wasted on it if it was never used. */
void ht_eviction_forget(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE);

#endif
