/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.h - the DRAM tier: one pinned memory of 1 MiB slots. A slot is used whole for an image, or split into pieces of
 * some 64 KiB each for small ones.
 *
 * External images are images in memory that is not the arena's (tensors in shared memory). They have slot numbers of
 * their own after those of the slots, are always protected, and are never evicted by the clock.
 *
 * Passive: knows no objects and starts no I/O. The clock (second chance) chooses the next image to evict, and the owner
 * decides whether it may go (ht_evict_fn). No call searches the arena (eviction.c). A slot number counts in sub-slots
 * of 64 KiB: a whole slot or a piece has the number of its first one.
 *
 * Not locked: the store's lock guards it; the bytes are guarded by the chunk locks.
 */
#pragma once

#include "tiering/sys/mem.h"

#define HT_SLOT_NONE UINT32_MAX

struct ht_arena;

/*
 * An image's descriptor. Bytes [valid_lo, valid_hi) of the slot are the chunk's; bytes beyond a short slot are zeros.
 */
struct ht_image {
    void *owner;    /* the owner's object; NULL: slot unused */
    uint64_t index; /* the owner's chunk */
    uint32_t valid_lo, valid_hi;
    uint32_t data_hi;         /* valid bytes from here on are zeros and need not be stored */
    uint32_t reserved_blocks; /* space reserved for writing it back */
    uint32_t used_at;         /* workingset.c */
    bool durable : 1;         /* its dirty bytes should reach a device soon, not only when memory is short */
    bool dirty : 1;           /* newer than the current reference */
    bool referenced : 1;      /* second chance */
    bool protected : 1;       /* never evicted by the clock */
    bool readahead : 1;       /* read ahead, and not used yet */
    bool workingset : 1;      /* evicted only when it was not used for long: workingset.c */
    bool waiting : 1;         /* protected, and it goes when it was used */
    bool planned : 1;         /* its next use is known: evicted in order */
    uint8_t target_device;    /* device it should be written to, and 1; 0: any */
    uint8_t subs : 5;         /* number of its sub-slots; the arena's */
    bool final : 1;           /* dirty, and no change is expected before it is published; the arena's */
    uint8_t protected_in : 2; /* protected: the period of its last update, modulo 4; the arena's */
    uint8_t next_use : 7;     /* planned: place in the order, modulo HT_ORDER_PLACES */
    bool pinned : 1;          /* protected until it is unpinned: an operator wants it in memory */
};

/* May this image go now? True: it has been detached by the owner. */
typedef bool (*ht_evict_fn)(void *ctx, uint32_t slot);

/* nodes live longer, or are NULL. */
int ht_arena_new(uint64_t bytes, const struct ht_nodes *nodes, ht_evict_fn evict, void *ctx,
                 struct ht_arena **out_arena) HT_MUST_CHECK;
void ht_arena_free(struct ht_arena *a);

/*
 * Returns a slot of at least so many bytes (up to 1 MiB). If none is free, tries to evict up to tries images.
 * HT_ARENA_ASK_ALL: tries all images twice; HT_ARENA_FORCE: also those of the working set, which leave it.
 * HT_SLOT_NONE: none could go. The image is zeroed. Prefers memory of the node numa_index, and falls back to another
 * node if none there is free or comes free soon.
 */
#define HT_ARENA_FORCE UINT32_MAX
#define HT_ARENA_ASK_ALL (HT_ARENA_FORCE - 1)
uint32_t ht_arena_get(struct ht_arena *a, uint32_t bytes, uint32_t tries, int numa_index) HT_REQUIRES(HT_LOCK_STORE);
/*
 * For an image that is smaller than a slot: room in a slot that is divided already, which no image of a whole slot can
 * have. Nothing goes for it. HT_SLOT_NONE: there is none, or the image needs a whole slot.
 */
uint32_t ht_arena_get_piece(struct ht_arena *a, uint32_t bytes, int numa_index) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Are only so few images free or clean as writers leave to readers? Then a writer has found no room. The working set
 * does not count, and so many clean images are held by requests in flight.
 */
bool ht_arena_keeps_reserve(struct ht_arena *a, uint64_t held) HT_REQUIRES(HT_LOCK_STORE);
/*
 * For an image that is read before it is needed, at this place in the order: takes room that is free, or evicts an
 * image of a whole slot that is needed later.
 */
uint32_t ht_arena_get_ahead(struct ht_arena *a, uint32_t bytes, uint64_t place, int numa_index)
    HT_REQUIRES(HT_LOCK_STORE);
/*
 * The slot becomes the image of this owner and index. A refault joins the working set, as long as
 * ht_arena_protected_max() allows.
 */
void ht_arena_attach(struct ht_arena *a, uint32_t slot, void *owner, uint64_t index, bool durable)
    HT_REQUIRES(HT_LOCK_STORE);
void ht_arena_set_dirty(struct ht_arena *a, uint32_t slot, bool dirty) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Dirty bytes that are published as they are now, as far as the owner knows: writing them before that costs nothing
 * more. Protected images may be final, too. Clean images are not. Nothing for external ones.
 */
void ht_arena_set_final(struct ht_arena *a, uint32_t slot, bool final) HT_REQUIRES(HT_LOCK_STORE);
bool ht_arena_has_final(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/* The image is loaded before a reader needs it. */
void ht_arena_mark_readahead(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
/* A caller used it. */
void ht_arena_use(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
/* It goes before other images: no second chance, and no place in the working set. */
void ht_arena_cool(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
/*
 * The order of eviction (order.c): clean images whose next use is known go before others, the one that is needed last
 * first. Places count on with the time. now: the present one. An image's next use is less than HT_ORDER_PLACES away.
 *
 * hints: the order of what programs say (tier/next_use.h), from place 0 on. These images stay while others can go and
 * they have at most half of the slots. Only images at the last place go before others. An owner that is asked for an
 * image may move it to another place instead.
 */
enum { HT_ORDER_PLACES = 64 };
void ht_arena_order_begin(struct ht_arena *a, uint64_t now, bool hints) HT_REQUIRES(HT_LOCK_STORE);
void ht_arena_order_move(struct ht_arena *a, uint64_t now) HT_REQUIRES(HT_LOCK_STORE);
/* Nothing is known any more: the clock takes these images, as others. */
void ht_arena_order_end(struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/* After its end: at most so many images leave it at once. False: none is left in it. */
bool ht_arena_order_leave(struct ht_arena *a, unsigned most) HT_REQUIRES(HT_LOCK_STORE);
/* Have images with hints at most half of the slots? */
bool ht_arena_has_hint_room(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/* The image's next use is not known any more. */
void ht_arena_forget_next_use(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
/* Of an image of a whole slot; nothing for others. It leaves the working set. used: just now. */
void ht_arena_set_next_use(struct ht_arena *a, uint32_t slot, uint64_t place, bool used) HT_REQUIRES(HT_LOCK_STORE);
/* Frees an image's slot. */
void ht_arena_put(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
/*
 * The image of to has the same owner, index and bytes as that of from. It takes the place of from, whose slot is given
 * back.
 */
void ht_arena_replace(struct ht_arena *a, uint32_t from, uint32_t to) HT_REQUIRES(HT_LOCK_STORE);

/* Room for so many external images; once. */
int ht_arena_expect_external(struct ht_arena *a, uint32_t count) HT_MUST_CHECK;
/* An image for one chunk of 1 MiB at data, zeroed. HT_SLOT_NONE: no room. Given back as others are. */
uint32_t ht_arena_attach_external(struct ht_arena *a, uint8_t *data) HT_REQUIRES(HT_LOCK_STORE);
bool ht_arena_is_external(const struct ht_arena *a, uint32_t slot);

/*
 * Lends memory: the pages of two slots go back to the system, until ht_arena_take_back, and the arena is smaller
 * meanwhile, with all bounds. Looks at one pair; other calls look at the others, in turn. False: its images stay, none
 * is free, or the rest would be too small, also for the protected set. *out_dirty: an image that has to be written
 * first, or HT_SLOT_NONE. The memory must not be registered with rings, and nothing populates it any more
 * (ht_pinned_stop_populating).
 */
enum ht_lend {
    HT_LEND_FREE,  /* slots without images */
    HT_LEND_CLEAN, /* also those whose images are clean, and not protected */
    HT_LEND_ANY,   /* also protected ones, but no pinned or waiting ones */
};
bool ht_arena_lend(struct ht_arena *a, enum ht_lend whom, uint32_t *out_dirty) HT_REQUIRES(HT_LOCK_STORE);
/* One pair is back. False: none is lent. */
bool ht_arena_take_back(struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
uint64_t ht_arena_lent_bytes(const struct ht_arena *a);
/* Would the rest be large enough, if it lent so much in all? Images that are held, or waiting, may still prevent it. */
bool ht_arena_may_lend(const struct ht_arena *a, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE);
enum { HT_ARENA_LEND_BYTES = 2 << 20 };

struct ht_image *ht_arena_image(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
uint8_t *ht_arena_data(struct ht_arena *a, uint32_t slot);
/*
 * The protected set: images that stay until they are given back. So work that passes over more than fits finds the same
 * part here every time, in any order. Passing images need room for readahead and for dirty data: 32 MiB. This room
 * grows with an arena of more than 256 MiB, and is at most a quarter of one of less than 128 MiB.
 */
static inline uint64_t ht_arena_protected_max(uint64_t arena_bytes)
{
    return arena_bytes - ht_max_u64(arena_bytes / 8, ht_min_u64(arena_bytes / 4, 32u << 20));
}
/* Of this arena: that at first, and less while what passes needs more room (tier/passing.h). Pins heed the first. */
void ht_arena_set_protected_max(struct ht_arena *a, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE);
uint64_t ht_arena_protected_max_now(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Is there room in the protected set for another image of any size? For this one, which may share its slot with
 * protected ones? Room for waiting images that are expected does not count.
 */
bool ht_arena_has_protected_room(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
bool ht_arena_may_protect(const struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
void ht_arena_protect(struct ht_arena *a, uint32_t slot)
    HT_REQUIRES(HT_LOCK_STORE); /* needs may_protect, unless it is protected already. At each update */
/*
 * The protected set has no room: it gives back some images that got no update in the last 17 to 48 steps, as of a model
 * that trains no more. Each call looks at a few slots, in turn.
 */
void ht_arena_give_back_old(struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
void ht_arena_end_step(struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Waiting images come in every step, stay protected until they were used, and go: so the other images of the protected
 * set leave room for so many bytes. Images that were protected before may be in the way.
 */
void ht_arena_expect_waiting(struct ht_arena *a, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE);
bool ht_arena_lacks_waiting_room(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Protects an image on request, until ht_arena_unpin; ht_arena_unprotect leaves it alone. False: pinned images may have
 * half of the arena, and less while others are protected. External images need no pin: true.
 */
static inline uint64_t ht_arena_pinned_max(uint64_t arena_bytes)
{
    return arena_bytes / 2;
}
bool ht_arena_pin(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
void ht_arena_unpin(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
/* So many bytes found no room: other images of the protected set leave it to them. The next pin, and 0, end that. */
void ht_arena_want_pinned(struct ht_arena *a, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE);
bool ht_arena_has_pinned_room(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/* Protects a waiting image, if there is any room in the protected set. */
void ht_arena_protect_waiting(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
void ht_arena_unprotect(struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
/* Bytes that the clock may evict, or that are unused. */
uint64_t ht_arena_moving_bytes(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/* Dirty, and evictable by the clock: it has to be written first. */
static inline bool ht_image_passes_dirty(const struct ht_image *im)
{
    return im->dirty && !im->protected && !im->workingset;
}
/* Did a request find no room of late? */
bool ht_arena_is_short(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/* Are so many passing bytes dirty that they should be written? Scratch counts when room was short already. */
bool ht_arena_under_pressure(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Should this image be written then? Not while a writer fills it, unless growing is set: the writer would have to wait
 * for the device.
 */
bool ht_arena_presses(struct ht_arena *a, uint32_t slot, bool growing) HT_REQUIRES(HT_LOCK_STORE);
/* Bytes a slot number stands for. */
uint32_t ht_arena_slot_bytes(const struct ht_arena *a, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
/*
 * A walk over dirty images that pass, those first that were dirty first: durable ones, then, with `scratch`, those of
 * scratch files. It takes turns with other walks, so that an image that cannot be written now keeps no other waiting.
 * The lock may be released between two steps.
 */
struct ht_dirty_walk {
    bool scratch;
    bool final;     /* of final images alone, which need not pass */
    int numa_index; /* HT_NUMA_INDEX_ANY: of all nodes */
    /* private */
    unsigned kind, place, nodes, passed;
    uint32_t left;
};
#define HT_DIRTY_WALK(scratch_, numa_index_) \
    ((struct ht_dirty_walk){.scratch = (scratch_), .numa_index = (numa_index_)})
#define HT_FINAL_WALK ((struct ht_dirty_walk){.final = true, .numa_index = HT_NUMA_INDEX_ANY})
/* HT_SLOT_NONE: the walk has seen all that were there when it came to their list. */
uint32_t ht_dirty_walk_next(struct ht_arena *a, struct ht_dirty_walk *w) HT_REQUIRES(HT_LOCK_STORE);
/* The images of this list cannot be written: the walk goes on with those of another node, or kind. */
void ht_dirty_walk_skip_list(struct ht_dirty_walk *w);
/* For checks: the next used slot from *hand on; HT_SLOT_NONE after a whole round of unused ones. */
uint32_t ht_arena_next_used(struct ht_arena *a, uint32_t *hand) HT_REQUIRES(HT_LOCK_STORE);

/*
 * Bytes of images, as they are while the lock is held; and how many images were read ahead,
 * used then, or evicted before.
 */
struct ht_arena_sums {
    uint64_t readahead_chunks, readahead_hits, readahead_wasted;
    uint64_t used_bytes, used_on[HT_NODES_MAX]; /* all; from the node at each place */
    /* Whole slots: with a protected image, and others with one of the working set. */
    uint64_t protected_bytes, workingset_bytes;
    uint64_t waiting_bytes, pinned_bytes;
    uint64_t readahead_bytes; /* read ahead, and not used yet */
    uint64_t passing_dirty_bytes,
        durable_dirty_bytes;         /* dirty, neither protected nor of the working set: all, durable */
    uint64_t dirty_on[HT_NODES_MAX]; /* all of these, from the node at each place */
};
const struct ht_arena_sums *ht_arena_sums(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/* Without what it has lent. */
uint64_t ht_arena_bytes(const struct ht_arena *a);
/* Unused whole slots, except a few that are kept for requests of their node. */
uint32_t ht_arena_free_slots(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
/* The place of an image's memory; HT_NUMA_INDEX_ANY: an external one's. */
int ht_arena_numa_index(const struct ht_arena *a, uint32_t slot);
/* Heap for descriptors: of slots, images and external ones, and of images that went. */
uint64_t ht_arena_meta_bytes(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
struct ht_pinned *ht_arena_memory(struct ht_arena *a);
/* Asserts that slots, pieces, lists and sums agree (tiering/base/verify.h). */
void ht_arena_verify(struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE);
