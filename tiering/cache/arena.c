/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.c - slots of the DRAM tier, and the clock that chooses which image is asked to go.
 *
 * A 1 MiB slot is FREE, WHOLE or SPLIT. FREE slots are chained. A SPLIT one has pieces: runs of 1, 2, 4 or 8 of its sub-slots, each
 * at a multiple of its length, so that what a piece leaves is room for one of its length. Slots with room for a piece are found by a
 * hint for each length, which moves round: pieces of a length gather, and a slot in use is filled before a fresh one is split.
 *
 *   FREE --get large--> WHOLE --put--> FREE
 *   FREE --get small--> SPLIT --last piece put--> FREE
 *
 * A slot is kept, or stays, while one of its pieces does: nobody gets it whole meanwhile, so all of it counts.
 *
 * Memory may come from several NUMA nodes, each of which has a chain of its FREE slots. Slots are numbered round the nodes, so that
 * whatever sweeps over them asks all nodes in proportion. One clock for all: an image goes because it is old, not because of where it
 * is. A few slots that came free on another node than was asked for wait for who asks for that one (spare).
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/base/fault.h"
#include "tiering/cache/arena.h"
#include "tiering/cache/stay.h"

enum { GROWING_MAX = 16 }; /* images */
enum { SUBS = 16, SUB_SHIFT = 16, SLOT_SHIFT = 20, SPARE_SHARE = 16, SPARE_MAX = 16 };
enum { LENGTHS = 4 };                      /* of pieces: 1, 2, 4, 8 sub-slots */
enum { LOOK_MAX = 1024, LOOK_SHORT = 64 }; /* slots looked at for room in one go */
enum slot_state { SLOT_FREE, SLOT_WHOLE, SLOT_SPLIT };

struct slot {
    uint8_t state;
    uint8_t near;       /* place of its node */
    uint16_t used;      /* SPLIT: mask of sub-slots */
    uint8_t kept, stay; /* images in it that are kept, that stay */
    uint32_t next;      /* FREE: chain */
    uint32_t at;        /* in memory, in slots */
};

struct guest {
    uint8_t *data;
    uint32_t next; /* free: chain */
};

struct ht_arena {
    struct ht_pinned memory;
    uint32_t slots, free_slots, hand;
    uint32_t spare; /* free slots that are no reason to take one far away */
    uint32_t free_head[HT_NODES_MAX], free_on[HT_NODES_MAX];
    uint32_t hint[HT_NODES_MAX][LENGTHS]; /* a SPLIT slot that may have room for a piece of that length */
    uint32_t look;                        /* where one with room was looked for last */
    uint32_t split_free;                  /* sub-slots of SPLIT slots that nobody uses */
    uint64_t used_on[HT_NODES_MAX], dirty_on[HT_NODES_MAX]; /* dirty: what passes */
    uint64_t used_bytes, kept_bytes, staying_bytes;         /* the last two: whole slots */
    uint64_t passing_dirty_bytes, durable_dirty_bytes;      /* dirty, neither kept nor staying: all; durable ones */
    bool forced;                                            /* the sweep that is running heeds nobody's stay */
    uint32_t short_for; /* images to come until it is forgotten that one found no room */
    uint64_t ahead_chunks, ahead_hits, ahead_wasted, ahead_bytes;
    struct ht_stay stay;
    struct slot *slot;
    struct ht_image *image; /* SUBS per slot */
    uint32_t guests, guest_head;
    struct guest *guest;
    struct ht_image *guest_image;
    ht_evict_fn evict;
    void *ctx;
};

/* Numbers for slots, each node's in proportion to what it has; chains in this order. */
static void number_slots(struct ht_arena *a)
{
    unsigned parts = ht_pinned_parts(&a->memory);
    struct ht_nodes shares = {.count = parts};
    int64_t credit[HT_NODES_MAX] = {0};
    uint32_t next[HT_NODES_MAX], last[HT_NODES_MAX];
    for (unsigned p = 0; p < parts; p++) {
        uint64_t end = ht_min_u64(a->memory.end[p] >> SLOT_SHIFT, a->slots);
        next[p] = (uint32_t)(ht_pinned_part_start(&a->memory, p) >> SLOT_SHIFT);
        shares.weight[p] = end > next[p] ? end - next[p] : 0;
        last[p] = a->free_head[p] = HT_SLOT_NONE;
        for (unsigned k = 0; k < LENGTHS; k++)
            a->hint[p][k] = HT_SLOT_NONE;
    }
    for (uint32_t i = 0; i < a->slots; i++) {
        unsigned p = (unsigned)ht_nodes_turn(&shares, credit);
        a->slot[i] = (struct slot){.near = (uint8_t)p, .at = next[p]++, .next = HT_SLOT_NONE};
        *(last[p] == HT_SLOT_NONE ? &a->free_head[p] : &a->slot[last[p]].next) = i;
        last[p] = i;
        a->free_on[p]++;
    }
    a->free_slots = a->slots;
    a->spare = parts > 1 ? (uint32_t)ht_min_u64(a->slots / SPARE_SHARE, SPARE_MAX) : 0;
}

int ht_arena_new(uint64_t bytes, const struct ht_nodes *nodes, ht_evict_fn evict, void *ctx,
                 struct ht_arena **out_arena)
{
    struct ht_arena *a = calloc(1, sizeof(*a));
    if (!a)
        return -ENOMEM;
    int rc = ht_pinned_alloc(&a->memory, "hitrain-arena", bytes, nodes);
    if (rc) {
        free(a);
        return rc;
    }
    a->slots = (uint32_t)(bytes >> SLOT_SHIFT);
    a->slot = calloc(a->slots, sizeof(*a->slot));
    a->image = calloc((size_t)a->slots * SUBS, sizeof(*a->image));
    rc = ht_stay_init(&a->stay, a->slots, SUBS);
    if (rc || !a->slot || !a->image) {
        ht_arena_free(a);
        return -ENOMEM;
    }
    number_slots(a);
    a->evict = evict;
    a->ctx = ctx;
    *out_arena = a;
    return 0;
}

void ht_arena_free(struct ht_arena *a)
{
    if (!a)
        return;
    ht_pinned_free(&a->memory);
    ht_stay_destroy(&a->stay);
    free(a->slot);
    free(a->image);
    free(a->guest);
    free(a->guest_image);
    free(a);
}

void ht_arena_when_populated(struct ht_arena *a, void (*fn)(void *ctx), void *ctx)
{
    ht_pinned_when_populated(&a->memory, fn, ctx);
}

void ht_arena_settle(struct ht_arena *a)
{
    ht_pinned_settle(&a->memory);
}

/* ------------------------------------------------------------------ guests */

int ht_arena_expect_guests(struct ht_arena *a, uint32_t count)
{
    a->guest = calloc(count, sizeof(*a->guest));
    a->guest_image = calloc(count, sizeof(*a->guest_image));
    if (!a->guest || !a->guest_image)
        return -ENOMEM;
    for (uint32_t i = 0; i < count; i++)
        a->guest[i].next = i + 1 < count ? i + 1 : HT_SLOT_NONE;
    a->guests = count;
    return 0;
}

bool ht_arena_is_guest(const struct ht_arena *a, uint32_t slot)
{
    return slot != HT_SLOT_NONE && slot >= a->slots * SUBS;
}

uint32_t ht_arena_adopt(struct ht_arena *a, uint8_t *data)
{
    uint32_t i = a->guests ? a->guest_head : HT_SLOT_NONE;
    if (i == HT_SLOT_NONE)
        return i;
    a->guest_head = a->guest[i].next;
    a->guest[i].data = data;
    a->guest_image[i] = (struct ht_image){.kept = true};
    return a->slots * SUBS + i;
}

static void put_guest(struct ht_arena *a, uint32_t n)
{
    uint32_t i = n - a->slots * SUBS;
    a->guest_image[i].owner = NULL;
    a->guest[i].data = NULL;
    a->guest[i].next = a->guest_head;
    a->guest_head = i;
}

/* ------------------------------------------------------------------- slots */

static void slot_to_free(struct ht_arena *a, uint32_t i)
{
    struct slot *s = &a->slot[i];
    s->state = SLOT_FREE;
    s->next = a->free_head[s->near];
    a->free_head[s->near] = i;
    a->free_on[s->near]++;
    a->free_slots++;
}

/* Where most slots are free; where the clock is when none is. */
static unsigned freest(const struct ht_arena *a)
{
    unsigned best = a->slot[a->hand].near;
    for (unsigned p = 0; p < ht_pinned_parts(&a->memory); p++)
        if (a->free_on[p] > a->free_on[best])
            best = p;
    return best;
}

static unsigned place_of(const struct ht_arena *a, int near)
{
    return near < 0 || (unsigned)near >= ht_pinned_parts(&a->memory) ? freest(a) : (unsigned)near;
}

/* Is there a free one near, or so many that one far away is as good? */
static bool may_take(const struct ht_arena *a, unsigned near)
{
    return a->free_on[near] || a->free_slots > a->spare;
}

/* One that is near, else any. */
static uint32_t slot_from_free(struct ht_arena *a, enum slot_state state, unsigned near)
{
    unsigned p = a->free_on[near] ? near : freest(a);
    uint32_t i = a->free_head[p];
    if (i == HT_SLOT_NONE)
        return i;
    a->free_head[p] = a->slot[i].next;
    a->free_on[p]--;
    a->free_slots--;
    a->slot[i].state = (uint8_t)state;
    a->slot[i].used = 0;
    return i;
}

static void note_used(struct ht_arena *a, uint32_t n, int sign)
{
    uint64_t bytes = (uint64_t)(sign * (int64_t)ht_arena_slot_bytes(a, n));
    a->used_bytes += bytes;
    a->used_on[a->slot[n / SUBS].near] += bytes;
}

/* Add (1) or take away (-1) a slot from those that are kept or stay. */
static void charge(struct ht_arena *a, const struct slot *s, int sign)
{
    uint64_t bytes = (uint64_t)(sign * (int64_t)(1u << SLOT_SHIFT));
    if (s->kept)
        a->kept_bytes += bytes;
    else if (s->stay)
        a->staying_bytes += bytes;
}

/* One image of its slot more (1) or less (-1) that is kept, or stays. */
static void note_held(struct ht_arena *a, uint32_t n, int kept, int stay)
{
    struct slot *s = &a->slot[n / SUBS];
    charge(a, s, -1);
    s->kept = (uint8_t)(s->kept + kept);
    s->stay = (uint8_t)(s->stay + stay);
    charge(a, s, 1);
}

/* Add (1) or take away (-1) what this image is of the dirty bytes that pass through. */
static void note_dirty(struct ht_arena *a, uint32_t n, int sign)
{
    const struct ht_image *im = ht_arena_image(a, n);
    uint64_t bytes = (uint64_t)(sign * (int64_t)ht_arena_slot_bytes(a, n));
    if (!ht_image_passes_dirty(im))
        return;
    a->passing_dirty_bytes += bytes;
    a->dirty_on[a->slot[n / SUBS].near] += bytes;
    if (im->durable)
        a->durable_dirty_bytes += bytes;
}

static void stay_no_more(struct ht_arena *a, uint32_t n)
{
    if (!a->image[n].stays)
        return;
    note_dirty(a, n, -1);
    a->image[n].stays = false;
    note_dirty(a, n, 1);
    note_held(a, n, 0, -1);
}

static void ahead_no_more(struct ht_arena *a, uint32_t n)
{
    struct ht_image *im = ht_arena_image(a, n);
    a->ahead_bytes -= im->ahead ? ht_arena_slot_bytes(a, n) : 0;
    im->ahead = false;
}

static unsigned length_of(uint32_t subs)
{
    return (unsigned)__builtin_ctz(subs);
}

static uint16_t mask_of(uint32_t first, uint32_t subs)
{
    return (uint16_t)(((1u << subs) - 1) << first);
}

static bool has_room(const struct ht_arena *a, uint32_t i, uint32_t subs, uint32_t *out_first)
{
    if (i >= a->slots || a->slot[i].state != SLOT_SPLIT)
        return false;
    for (uint32_t k = 0; k < SUBS; k += subs)
        if (!(a->slot[i].used & mask_of(k, subs))) {
            *out_first = k;
            return true;
        }
    return false;
}

/* True: it was the last one of its slot. */
static bool put_piece(struct ht_arena *a, uint32_t n)
{
    struct slot *s = &a->slot[n / SUBS];
    uint32_t subs = a->image[n].subs;
    uint16_t mask = mask_of(n % SUBS, subs);
    assert((s->used & mask) == mask);
    s->used &= (uint16_t)~mask;
    a->split_free += subs;
    uint32_t *hint = &a->hint[s->near][length_of(subs)], first;
    if (!has_room(a, *hint, subs, &first)) /* one is filled before the next is begun */
        *hint = n / SUBS;
    if (!s->used)
        a->split_free -= SUBS;
    return !s->used;
}

void ht_arena_put(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_guest(a, n)) {
        put_guest(a, n);
        return;
    }
    uint32_t i = n / SUBS;
    struct slot *s = &a->slot[i];
    assert(s->state != SLOT_FREE);
    ht_arena_let_go(a, n);
    stay_no_more(a, n);
    a->ahead_wasted += a->image[n].ahead;
    ahead_no_more(a, n);
    a->image[n].owner = NULL;
    note_used(a, n, -1);
    if (s->state == SLOT_WHOLE || put_piece(a, n))
        slot_to_free(a, i);
}

static uint64_t stay_bytes_max(const struct ht_arena *a)
{
    return ht_arena_keep_max(ht_arena_bytes(a));
}

/* Those that are kept take the room from those that stay. */
static bool may_stay(const struct ht_arena *a, const struct ht_image *im)
{
    return !a->forced && a->kept_bytes + a->staying_bytes <= stay_bytes_max(a) &&
        !ht_stay_is_over(&a->stay, im->used_at);
}

/* Of an object that has many images, those in pieces are a stream of small ones: what is remembered of them would crowd out the others. */
static bool may_come_back(const struct ht_arena *a, uint32_t n, uint64_t index)
{
    return a->image[n].subs == SUBS || index == 0;
}

/* Ask one image to go: the second time the hand passes. */
static bool try_evict(struct ht_arena *a, uint32_t n)
{
    struct ht_image *im = &a->image[n];
    if (im->kept || (im->stays && may_stay(a, im)))
        return false;
    stay_no_more(a, n);
    if (im->referenced) {
        im->referenced = false;
        return false;
    }
    if (!a->evict(a->ctx, n))
        return false;
    if (may_come_back(a, n, im->index))
        ht_stay_note_gone(&a->stay, im->owner, im->index, im->used_at);
    ht_arena_put(a, n);
    return true;
}

/* Ask the images of a slot to go, until there is room for a piece; all of them for SUBS. */
static void ask_slot(struct ht_arena *a, uint32_t i, uint32_t subs)
{
    struct slot *s = &a->slot[i];
    uint32_t first;
    if (s->state == SLOT_WHOLE)
        try_evict(a, i * SUBS);
    for (uint32_t k = 0, step; k < SUBS && s->state == SLOT_SPLIT && !has_room(a, i, subs, &first); k += step) {
        bool there = s->used & (1u << k);
        step = there ? a->image[i * SUBS + k].subs : 1;
        if (there)
            try_evict(a, i * SUBS + k);
    }
}

static uint32_t pass_hand(struct ht_arena *a)
{
    uint32_t i = a->hand;
    a->hand = (a->hand + 1) % a->slots;
    return i;
}

/* A whole slot. Sweeps until one may be taken; a split one becomes so when all of its images go. */
static uint32_t get_whole(struct ht_arena *a, uint64_t tries, unsigned near)
{
    for (; tries && !may_take(a, near); tries--)
        ask_slot(a, pass_hand(a), SUBS);
    uint32_t i = slot_from_free(a, SLOT_WHOLE, near);
    return i == HT_SLOT_NONE ? i : i * SUBS;
}

static uint32_t take_piece(struct ht_arena *a, uint32_t i, uint32_t subs)
{
    struct slot *s = &a->slot[i];
    uint32_t first;
    if (!has_room(a, i, subs, &first))
        return HT_SLOT_NONE;
    s->used |= mask_of(first, subs);
    a->split_free -= subs;
    a->hint[s->near][length_of(subs)] = i;
    return i * SUBS + first;
}

/* Of a fresh slot. */
static uint32_t split(struct ht_arena *a, uint32_t subs, unsigned near)
{
    uint32_t i = slot_from_free(a, SLOT_SPLIT, near);
    if (i == HT_SLOT_NONE)
        return i;
    a->split_free += SUBS;
    return take_piece(a, i, subs);
}

/* Of a slot that has room, if one is found among the next so many; of one that is near, or of any. */
static uint32_t look_for_piece(struct ht_arena *a, uint32_t subs, int near, uint32_t most)
{
    uint32_t n = HT_SLOT_NONE;
    for (uint32_t k = 0; n == HT_SLOT_NONE && a->split_free >= subs && k < a->slots && k < most; k++) {
        if (near == HT_NEAR_ANY || a->slot[a->look].near == near)
            n = take_piece(a, a->look, subs);
        if (n == HT_SLOT_NONE)
            a->look = (a->look + 1) % a->slots;
    }
    return n;
}

/* A piece: of the hinted slot or one that is found soon, else of a fresh one, else of any, else of what the clock frees. */
static uint32_t get_piece(struct ht_arena *a, uint32_t subs, uint64_t tries, unsigned near)
{
    uint32_t n = take_piece(a, a->hint[near][length_of(subs)], subs);
    if (n == HT_SLOT_NONE)
        n = look_for_piece(a, subs, (int)near, LOOK_SHORT);
    if (n == HT_SLOT_NONE)
        n = split(a, subs, near);
    if (n == HT_SLOT_NONE)
        n = look_for_piece(a, subs, HT_NEAR_ANY, LOOK_MAX);
    for (; n == HT_SLOT_NONE && tries; tries--) {
        uint32_t i = pass_hand(a);
        ask_slot(a, i, subs);
        n = take_piece(a, i, subs);
        if (n == HT_SLOT_NONE)
            n = split(a, subs, near);
    }
    return n;
}

/* Sub-slots of a piece for so many bytes, or SUBS. */
static uint32_t subs_for(uint32_t bytes)
{
    uint32_t subs = 1;
    while (subs < SUBS && subs << SUB_SHIFT < bytes)
        subs *= 2;
    return subs;
}

uint32_t ht_arena_get(struct ht_arena *a, uint32_t bytes, uint32_t most, int wish)
{
    uint32_t subs = subs_for(bytes);
    unsigned near = place_of(a, wish);
    uint64_t tries = ht_min_u64(most, 2ull * a->slots);
    a->forced = most == HT_ARENA_FORCE;
    if (ht_fault(HT_FAULT_CACHE_SLOT) != 0)
        return HT_SLOT_NONE;
    uint32_t n = subs == SUBS ? get_whole(a, tries, near) : get_piece(a, subs, tries, near);
    if (n == HT_SLOT_NONE && most >= HT_ARENA_ASK_ALL)
        a->short_for = a->slots;
    if (n == HT_SLOT_NONE)
        return n;
    a->short_for -= a->short_for > 0;
    a->image[n] = (struct ht_image){.referenced = true, .subs = (uint8_t)subs};
    note_used(a, n, 1);
    return n;
}

void ht_arena_use(struct ht_arena *a, uint32_t n)
{
    struct ht_image *im = ht_arena_image(a, n);
    im->referenced = true;
    im->used_at = a->stay.came;
    a->ahead_hits += im->ahead;
    ahead_no_more(a, n);
}

void ht_arena_mark_ahead(struct ht_arena *a, uint32_t n)
{
    a->image[n].ahead = true;
    a->ahead_chunks++;
    a->ahead_bytes += ht_arena_slot_bytes(a, n);
}

uint64_t ht_arena_ahead_bytes(const struct ht_arena *a)
{
    return a->ahead_bytes;
}

void ht_arena_ahead_stats(const struct ht_arena *a, uint64_t *out_chunks, uint64_t *out_hits, uint64_t *out_wasted)
{
    *out_chunks = a->ahead_chunks;
    *out_hits = a->ahead_hits;
    *out_wasted = a->ahead_wasted;
}

/* Is there room in the keep-set for what a slot has? */
static bool has_share(const struct ht_arena *a, const struct slot *s, uint64_t others)
{
    return s->kept || a->kept_bytes + others + (1u << SLOT_SHIFT) <= stay_bytes_max(a);
}

static void stay_if_room(struct ht_arena *a, uint32_t n)
{
    const struct slot *s = &a->slot[n / SUBS];
    if (!s->stay && !has_share(a, s, a->staying_bytes))
        return;
    a->image[n].stays = true;
    note_held(a, n, 0, 1);
}

void ht_arena_attach(struct ht_arena *a, uint32_t n, void *owner, uint64_t index, bool durable)
{
    struct ht_image *im = ht_arena_image(a, n);
    im->owner = owner;
    im->index = index;
    im->durable = durable;
    if (ht_arena_is_guest(a, n) || !may_come_back(a, n, index))
        return;
    if (ht_stay_comes_back(&a->stay, owner, index, im->subs))
        stay_if_room(a, n);
    im->used_at = a->stay.came;
}

void ht_arena_set_dirty(struct ht_arena *a, uint32_t n, bool dirty)
{
    note_dirty(a, n, -1);
    ht_arena_image(a, n)->dirty = dirty;
    note_dirty(a, n, 1);
}

bool ht_arena_under_pressure(const struct ht_arena *a)
{
    uint64_t moving = ht_arena_bytes(a) - a->kept_bytes;
    if (a->durable_dirty_bytes > moving / 2)
        return true;
    return a->short_for && a->passing_dirty_bytes > (moving - a->staying_bytes) / 2;
}

/* It was made just now, and not all of it has been written: somebody goes on to do so. */
static bool is_growing(const struct ht_arena *a, uint32_t n)
{
    const struct ht_image *im = &a->image[n];
    return a->slot[n / SUBS].state == SLOT_WHOLE && im->valid_hi - im->valid_lo < 1u << SLOT_SHIFT &&
        a->stay.came - im->used_at < SUBS * ht_max_u64(ht_min_u64(a->slots / 8, GROWING_MAX), 1);
}

bool ht_arena_presses(struct ht_arena *a, uint32_t n, bool growing)
{
    const struct ht_image *im = ht_arena_image(a, n);
    return ht_image_passes_dirty(im) && (im->durable || a->short_for) && (growing || !is_growing(a, n));
}

bool ht_arena_can_keep(const struct ht_arena *a)
{
    return a->kept_bytes + (1u << SLOT_SHIFT) <= stay_bytes_max(a);
}

bool ht_arena_may_keep(const struct ht_arena *a, uint32_t n)
{
    return !ht_arena_is_guest(a, n) && has_share(a, &a->slot[n / SUBS], 0);
}

void ht_arena_keep(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_guest(a, n) || a->image[n].kept)
        return;
    stay_no_more(a, n);
    note_dirty(a, n, -1);
    a->image[n].kept = true;
    note_dirty(a, n, 1);
    note_held(a, n, 1, 0);
}

void ht_arena_replace(struct ht_arena *a, uint32_t from, uint32_t to)
{
    struct ht_image was = a->image[from], *im = &a->image[to];
    ht_arena_use(a, from);
    ht_arena_set_dirty(a, from, false);
    ht_arena_put(a, from);
    im->valid_lo = was.valid_lo;
    im->valid_hi = was.valid_hi;
    im->data_hi = was.data_hi;
    im->reserved_blocks = was.reserved_blocks;
    im->home = was.home;
    if (was.stays && !im->stays)
        stay_if_room(a, to);
    if (was.kept && ht_arena_may_keep(a, to))
        ht_arena_keep(a, to);
    ht_arena_set_dirty(a, to, was.dirty);
}

void ht_arena_let_go(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_guest(a, n) || !a->image[n].kept)
        return;
    note_dirty(a, n, -1);
    a->image[n].kept = false;
    note_dirty(a, n, 1);
    note_held(a, n, -1, 0);
}

uint64_t ht_arena_kept_bytes(const struct ht_arena *a)
{
    return a->kept_bytes;
}

uint64_t ht_arena_staying_bytes(const struct ht_arena *a)
{
    return a->staying_bytes;
}

uint64_t ht_arena_moving_bytes(const struct ht_arena *a)
{
    uint64_t held =
        a->kept_bytes + a->staying_bytes + a->passing_dirty_bytes; /* a dirty piece may be in a slot that is kept */
    return ht_arena_bytes(a) - ht_min_u64(held, ht_arena_bytes(a));
}

struct ht_image *ht_arena_image(struct ht_arena *a, uint32_t slot)
{
    return ht_arena_is_guest(a, slot) ? &a->guest_image[slot - a->slots * SUBS] : &a->image[slot];
}

uint8_t *ht_arena_data(struct ht_arena *a, uint32_t slot)
{
    if (ht_arena_is_guest(a, slot))
        return a->guest[slot - a->slots * SUBS].data;
    return (uint8_t *)a->memory.base + ((uint64_t)a->slot[slot / SUBS].at << SLOT_SHIFT) +
        ((uint64_t)(slot % SUBS) << SUB_SHIFT);
}

uint32_t ht_arena_slot_bytes(const struct ht_arena *a, uint32_t slot)
{
    if (ht_arena_is_guest(a, slot))
        return 1u << SLOT_SHIFT;
    return (uint32_t)a->image[slot].subs << SUB_SHIFT;
}

uint32_t ht_arena_next_used(struct ht_arena *a, uint32_t *hand)
{
    uint32_t total = a->slots * SUBS;
    for (uint32_t k = 0; k < total; k++) {
        uint32_t n = *hand % total;
        const struct slot *s = &a->slot[n / SUBS];
        *hand = s->state == SLOT_SPLIT ? (n + 1) % total : (n / SUBS + 1) * SUBS % total;
        if (a->image[n].owner && s->state != SLOT_FREE)
            return n;
    }
    return HT_SLOT_NONE;
}

uint64_t ht_arena_bytes(const struct ht_arena *a)
{
    return (uint64_t)a->slots << SLOT_SHIFT;
}

uint64_t ht_arena_used_bytes(const struct ht_arena *a)
{
    return a->used_bytes;
}

uint32_t ht_arena_free_slots(const struct ht_arena *a)
{
    return a->free_slots - (uint32_t)ht_min_u64(a->free_slots, a->spare);
}

uint64_t ht_arena_used_on(const struct ht_arena *a, unsigned place)
{
    return a->used_on[place];
}

uint64_t ht_arena_dirty_on(const struct ht_arena *a, unsigned place)
{
    return a->dirty_on[place];
}

int ht_arena_near(const struct ht_arena *a, uint32_t slot)
{
    return ht_arena_is_guest(a, slot) ? HT_NEAR_ANY : a->slot[slot / SUBS].near;
}

uint64_t ht_arena_meta_bytes(const struct ht_arena *a)
{
    return (uint64_t)a->slots * (sizeof(*a->slot) + SUBS * sizeof(*a->image)) +
        (uint64_t)a->guests * (sizeof(*a->guest) + sizeof(*a->guest_image)) + ht_stay_bytes(&a->stay);
}

const struct ht_pinned *ht_arena_memory(const struct ht_arena *a)
{
    return &a->memory;
}
