/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena_priv.h - what the files of the arena share. An image's number n counts sub-slots; i counts slots.
 *
 * No call searches: a slot is on a list for each kind of image in it, and on one for the room in it. So a request costs
 * the same whatever the arena's size, and however much is dirty.
 */
#pragma once

#include "tiering/cache/arena.h"

enum { HT_SLOT_SUBS = 16, HT_SLOT_SHIFT = 20 };
enum { HT_PIECE_LENGTHS = HT_SLOT_SUBS - 1 }; /* of pieces: 1 to 15 sub-slots */
enum ht_slot_state { HT_SLOT_FREE, HT_SLOT_WHOLE, HT_SLOT_SPLIT, HT_SLOT_LENT };

/* What an image is to the clock and to writeback. */
enum ht_image_kind {
    HT_IMAGE_CLEAN,      /* passes: the clock may evict it */
    HT_IMAGE_DIRTY,      /* passes, and is written soon */
    HT_IMAGE_SCRATCH,    /* passes, is dirty, and is written when memory is short */
    HT_IMAGE_WORKINGSET, /* clean or dirty */
    HT_IMAGE_PLANNED,    /* passes, and its next use is known: order.c */
    HT_IMAGE_PROTECTED,  /* clean or dirty; on no list */
    HT_IMAGE_KINDS,
    HT_IMAGE_LISTS = HT_IMAGE_PROTECTED
};
/* Lists of slots: those of the first kinds, that of free slots or of room in split ones, and that of final images. */
enum { HT_LIST_ROOM = HT_IMAGE_LISTS, HT_LIST_FINAL, HT_SLOT_LISTS };

/* A ring of slots. Its head is the oldest, and the one before it the newest. */
struct ht_slot_list {
    uint32_t head, count; /* count 0: empty, and without a head */
    uint32_t sub;         /* of the head: walks have passed the sub-slots before it */
};
struct ht_slot_link {
    uint32_t prev, next;
};
/* HT_SLOT_NONE: it is empty. */
static inline uint32_t ht_slot_list_head(const struct ht_slot_list *l)
{
    return l->count ? l->head : HT_SLOT_NONE;
}

struct ht_slot {
    uint8_t state;
    uint8_t numa_index;             /* place of its node */
    uint16_t used;                  /* SPLIT: mask of sub-slots */
    uint8_t images[HT_IMAGE_KINDS]; /* in it, by kind */
    uint8_t finals;                 /* final images in it, of any kind */
    uint8_t room;                   /* SPLIT: sub-slots of the longest piece that fits */
    uint32_t at;                    /* in memory, in slots */
    struct ht_slot_link link[HT_SLOT_LISTS];
};

struct ht_external {
    uint8_t *data;
    uint32_t next; /* free: chain */
};

enum { HT_ORDER_MOMENT = 8 };

/* Slots with an image whose next use is known, by its place. */
struct ht_order {
    bool active;
    bool hints;  /* programs gave the places, and no plan */
    uint8_t now; /* modulo HT_ORDER_PLACES */
    uint8_t used_at;
    uint32_t used[HT_ORDER_MOMENT]; /* images that were used last: a ring */
    uint32_t slots;
    uint64_t places; /* with slots, as bits */
    struct ht_slot_list list[HT_ORDER_PLACES];
};
static_assert(HT_ORDER_PLACES == 64, "places are bits");

/* Of images that were evicted (workingset.c). */
struct ht_workingset {
    struct ht_workingset_shadow *shadows;
    uint32_t mask;
    uint32_t all;            /* the size of everything */
    uint32_t came;           /* so far: the time here */
    uint64_t usual_distance; /* distance between uses of a refaulted image: running mean, times its weight */
};

struct ht_arena {
    struct ht_pinned memory;
    uint32_t slots, free_slots;
    uint32_t spare;           /* free slots that are no reason to take one far away */
    struct ht_slot_list lent; /* the first ones of pairs */
    uint32_t lend_at;         /* the pair that was looked at last */
    /* By node: free slots; split ones by the longest piece that fits. */
    struct ht_slot_list free[HT_NODES_MAX], room[HT_NODES_MAX][HT_PIECE_LENGTHS];
    /* Slots with an image of that kind; dirty ones by node, the others at 0. */
    struct ht_slot_list list[HT_IMAGE_LISTS][HT_NODES_MAX];
    struct ht_slot_list final[HT_NODES_MAX]; /* slots with a final image, by node */
    struct ht_arena_sums sums;
    uint64_t protected_max;                   /* for the protected set and the working set */
    uint64_t waiting_expected, pinned_wanted; /* waiting images of a whole step; pinned ones without room */
    uint32_t steps;                           /* of all models */
    uint32_t old_at;                          /* the slot at which the next search for old images begins */
    bool forced;                              /* the request that is running heeds no working set */
    bool is_ahead;                            /* it evicts only images that are needed later than ... */
    uint8_t ahead_place;                      /* ... this, modulo HT_ORDER_PLACES */
    uint32_t chances;                         /* images that it may still pass because they were used */
    uint64_t passed;                          /* slots that the clock has passed for it */
    unsigned turn;                            /* the node where the next walk over dirty images begins */
    uint32_t short_for;                       /* images to come until it is forgotten that one found no room */
    struct ht_workingset workingset;
    struct ht_order order;
    struct ht_slot *slot;
    struct ht_image *image; /* HT_SLOT_SUBS per slot */
    uint32_t externals, external_head;
    struct ht_external *external;
    struct ht_image *external_image;
    ht_evict_fn evict;
    void *ctx;
};

/* -------------------------------------------------------------- arena.c */

/* Has slot i, if it is SPLIT, room for a piece of so many sub-slots? *out_first: the first one of the tightest room. */
bool ht_slot_has_room(const struct ht_arena *a, uint32_t i, uint32_t subs, uint32_t *out_first);
/* Sub-slots of the longest piece that fits beside these; 0: none. */
uint8_t ht_slot_room(uint16_t used);
/* The first image of a used slot at sub-slot k or later; HT_SLOT_NONE. */
uint32_t ht_slot_image(const struct ht_arena *a, uint32_t i, uint32_t k);

/* -------------------------------------------------------------- order.c */

/* Of one list; link: which of the slots' links it uses. A slot is added as the newest, or (push) as the oldest. */
void ht_slot_list_add(struct ht_slot *slots, struct ht_slot_list *l, unsigned link, uint32_t i);
void ht_slot_list_push(struct ht_slot *slots, struct ht_slot_list *l, unsigned link, uint32_t i);
void ht_slot_list_del(struct ht_slot *slots, struct ht_slot_list *l, unsigned link, uint32_t i);
/* Returns the oldest, which is the newest now; HT_SLOT_NONE: the list is empty. */
uint32_t ht_slot_list_rotate(const struct ht_slot *slots, struct ht_slot_list *l, unsigned link);
/* The list of slot i for images of a kind. */
struct ht_slot_list *ht_slot_image_list(struct ht_arena *a, uint32_t i, unsigned kind);

void ht_order_init(struct ht_order *o);
/* The slot's image is planned, or is so no more. */
void ht_order_add(struct ht_arena *a, uint32_t i);
void ht_order_del(struct ht_arena *a, uint32_t i);
/* The image was used just now. The last few stay. */
void ht_order_note_use(struct ht_arena *a, uint32_t n);
bool ht_order_was_used_now(const struct ht_arena *a, uint32_t n);
/* Where slots are, as bits that count from now. */
uint64_t ht_order_ahead(const struct ht_arena *a);
/* Of these places, those after one. */
uint64_t ht_order_after(const struct ht_arena *a, uint64_t ahead, unsigned place);
/* A slot of the farthest of these places, which is not among them from then on. HT_SLOT_NONE: there is none. */
uint32_t ht_order_next(struct ht_arena *a, uint64_t *ahead);
/* Any slot in the order; HT_SLOT_NONE. */
uint32_t ht_order_first(const struct ht_arena *a);
/* The last of all places, as a bit. */
#define HT_ORDER_LAST (UINT64_C(1) << (HT_ORDER_PLACES - 1))
/* Bytes of slots in the order that others leave alone. */
uint64_t ht_order_hint_bytes(const struct ht_arena *a);

/* ----------------------------------------------------------- eviction.c */

enum ht_image_kind ht_image_kind(const struct ht_image *im);
/* How many slots a request may pass before it gives up: each once, or (all) twice and a few that come meanwhile. */
uint64_t ht_eviction_passes(const struct ht_arena *a, bool all);
/*
 * The clock passes one slot and evicts its images, until it has room for so many sub-slots. Returns the slot, or
 * HT_SLOT_NONE: there is none with an image that may go.
 */
uint32_t ht_eviction_pass(struct ht_arena *a, uint32_t subs) HT_REQUIRES(HT_LOCK_STORE);
/* An image is new, clean, and of no owner yet. */
void ht_eviction_note_new(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE);
/* An image was attached to its owner: a refault joins the working set if there is room. */
void ht_eviction_note_attached(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE);
/* It joins the working set if there is room. */
void ht_eviction_join_workingset(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE);
/* An image in the arena is given back: it leaves all lists, and readahead was wasted on it if it was never used. */
void ht_eviction_forget(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE);

/* --------------------------------------------------------- workingset.c */

/* For so many slots. */
int ht_workingset_init(struct ht_workingset *p, uint32_t slots) HT_MUST_CHECK;
void ht_workingset_destroy(struct ht_workingset *p);
/* Heap that the table takes. */
uint64_t ht_workingset_bytes(const struct ht_workingset *p);
/* An image of (owner, index) that was last used when came was used_at has been evicted. */
void ht_workingset_note_evicted(struct ht_workingset *p, const void *owner, uint64_t index, uint32_t used_at);
/* An image of that size is loaded. True: it is a refault; its shadow is gone. */
bool ht_workingset_is_refault(struct ht_workingset *p, const void *owner, uint64_t index, uint32_t size);
/* Was it unused for much longer than refaults usually take? */
bool ht_workingset_is_over(const struct ht_workingset *p, uint32_t used_at);
