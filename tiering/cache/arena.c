/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.c - slots of the DRAM tier: memory for images. eviction.c chooses which image goes.
 *
 * A 1 MiB slot is FREE, WHOLE, SPLIT or LENT. A SPLIT one has pieces: runs of 1 to 15 of its sub-slots. SPLIT slots are
 * listed by the longest piece that they have room for, and a piece takes the tightest room: a slot in use is filled
 * before a fresh one is split.
 *
 *   FREE --get large--> WHOLE --put--> FREE
 *   FREE --get small--> SPLIT --last piece put--> FREE
 *   FREE --lend--> LENT --take back--> FREE (its memory is elsewhere meanwhile)
 *
 * Memory may come from several NUMA nodes, each of which has lists of its own. Slots are numbered round the nodes, so
 * that any row of numbers has all nodes in proportion. A few slots that came free on another node than the
 * requested one are kept for requests of that node (spare).
 */

#include "tiering/base/fault.h"
#include "tiering/cache/arena.h"
#include "tiering/cache/arena_priv.h"

enum { SUB_SHIFT = 16, SPARE_SHARE = 16, SPARE_MAX = 16 };
enum { AHEAD_TRIES = 4 };
enum { RESERVE_PART = 32, RESERVE_MAX = 4 }; /* slots that writers leave to readers */
enum { LEFT_BYTES_MIN = 8 << 20 };           /* of which nothing is lent */
enum { CHANCES = 16 }; /* images that one request passes because they were used; then it takes the next one */

/*
 * Numbers slots, each node's in proportion to its share; lists them in this order. The two of a huge page have numbers
 * side by side.
 */
static void number_slots(struct ht_arena *a)
{
    unsigned parts = ht_pinned_parts(&a->memory);
    struct ht_nodes shares = {.count = parts};
    int64_t credit[HT_NODES_MAX] = {0};
    uint32_t next[HT_NODES_MAX];

    for (unsigned p = 0; p < parts; p++) {
        uint64_t end = ht_min_u64(a->memory.end[p] >> HT_SLOT_SHIFT, a->slots);
        next[p] = (uint32_t)(ht_pinned_part_start(&a->memory, p) >> HT_SLOT_SHIFT);
        shares.weight[p] = end > next[p] ? (end - next[p]) / 2 : 0;
    }
    for (uint32_t i = 0, p = 0; i < a->slots; i++) {
        if (i % 2 == 0)
            p = i + 1 < a->slots ? (unsigned)ht_nodes_turn(&shares, credit) : parts - 1;
        a->slot[i] = (struct ht_slot){.numa_index = (uint8_t)p, .at = next[p]++};
        ht_slot_list_add(a->slot, &a->free[p], HT_LIST_ROOM, i);
    }
    ht_order_init(&a->order);
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
    a->slots = (uint32_t)(bytes >> HT_SLOT_SHIFT);
    a->protected_max = ht_arena_protected_max((uint64_t)a->slots << HT_SLOT_SHIFT);
    a->slot = calloc(a->slots, sizeof(*a->slot));
    a->image = calloc((size_t)a->slots * HT_SLOT_SUBS, sizeof(*a->image));
    rc = ht_workingset_init(&a->workingset, a->slots);
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
    ht_workingset_destroy(&a->workingset);
    free(a->slot);
    free(a->image);
    free(a->external);
    free(a->external_image);
    free(a);
}

/* ---------------------------------------------------------------- external images */

int ht_arena_expect_external(struct ht_arena *a, uint32_t count)
{
    a->external = calloc(count, sizeof(*a->external));
    a->external_image = calloc(count, sizeof(*a->external_image));
    if (!a->external || !a->external_image)
        return -ENOMEM;
    for (uint32_t i = 0; i < count; i++)
        a->external[i].next = i + 1 < count ? i + 1 : HT_SLOT_NONE;
    a->externals = count;
    return 0;
}

bool ht_arena_is_external(const struct ht_arena *a, uint32_t slot)
{
    return slot != HT_SLOT_NONE && slot >= a->slots * HT_SLOT_SUBS;
}

uint32_t ht_arena_attach_external(struct ht_arena *a, uint8_t *data)
{
    uint32_t i = a->externals ? a->external_head : HT_SLOT_NONE;

    if (i == HT_SLOT_NONE)
        return i;
    a->external_head = a->external[i].next;
    a->external[i].data = data;
    a->external_image[i] = (struct ht_image){.protected = true};
    return a->slots * HT_SLOT_SUBS + i;
}

static void put_external(struct ht_arena *a, uint32_t n)
{
    uint32_t i = n - a->slots * HT_SLOT_SUBS;

    a->external_image[i].owner = NULL;
    a->external[i].data = NULL;
    a->external[i].next = a->external_head;
    a->external_head = i;
}

/* ------------------------------------------------------------------- slots */

static void slot_to_free(struct ht_arena *a, uint32_t i)
{
    struct ht_slot *s = &a->slot[i];

    s->state = HT_SLOT_FREE;
    ht_slot_list_push(a->slot, &a->free[s->numa_index], HT_LIST_ROOM, i);
    a->free_slots++;
}

static void slot_not_free(struct ht_arena *a, uint32_t i, enum ht_slot_state state)
{
    ht_slot_list_del(a->slot, &a->free[a->slot[i].numa_index], HT_LIST_ROOM, i);
    a->free_slots--;
    a->slot[i].state = (uint8_t)state;
}

/* The node with most free slots; that of the image that may go next when none is free. */
static unsigned freest(const struct ht_arena *a)
{
    uint32_t next = ht_slot_list_head(&a->list[HT_IMAGE_CLEAN][0]);
    unsigned best = next == HT_SLOT_NONE ? 0 : a->slot[next].numa_index;

    for (unsigned p = 0; p < ht_pinned_parts(&a->memory); p++)
        if (a->free[p].count > a->free[best].count)
            best = p;
    return best;
}

static unsigned place_of(const struct ht_arena *a, int numa_index)
{
    return numa_index < 0 || (unsigned)numa_index >= ht_pinned_parts(&a->memory) ? freest(a) : (unsigned)numa_index;
}

/* Is there a free slot near, or so many that a far one is as good? */
static bool may_take(const struct ht_arena *a, unsigned numa_index)
{
    return a->free[numa_index].count || a->free_slots > a->spare;
}

/* A near one, else any. */
static uint32_t slot_from_free(struct ht_arena *a, enum ht_slot_state state, unsigned numa_index)
{
    uint32_t i = ht_slot_list_head(&a->free[a->free[numa_index].count ? numa_index : freest(a)]);

    if (i == HT_SLOT_NONE)
        return i;
    slot_not_free(a, i, state);
    a->slot[i].used = 0;
    a->slot[i].room = 0;
    return i;
}

static void note_used(struct ht_arena *a, uint32_t n, int sign) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t bytes = (uint64_t)(sign * (int64_t)ht_arena_slot_bytes(a, n));

    a->sums.used_bytes += bytes;
    a->sums.used_on[a->slot[n / HT_SLOT_SUBS].numa_index] += bytes;
}

static uint16_t mask_of(uint32_t first, uint32_t subs)
{
    return (uint16_t)(((1u << subs) - 1) << first);
}

/* So many sub-slots from k on are unused. */
static uint32_t unused_from(uint16_t used, uint32_t k)
{
    return (uint32_t)__builtin_ctz((uint32_t)used >> k | 1u << (HT_SLOT_SUBS - k));
}

bool ht_slot_has_room(const struct ht_arena *a, uint32_t i, uint32_t subs, uint32_t *out_first)
{
    uint32_t best = HT_SLOT_SUBS + 1;

    if (i >= a->slots || a->slot[i].state != HT_SLOT_SPLIT)
        return false;
    for (uint32_t k = 0, n; k < HT_SLOT_SUBS; k += n + 1) {
        n = unused_from(a->slot[i].used, k);
        if (n < subs || n >= best)
            continue;
        best = n;
        *out_first = k;
    }
    return best <= HT_SLOT_SUBS;
}

uint8_t ht_slot_room(uint16_t used)
{
    uint32_t most = 0;

    for (uint32_t k = 0, n; k < HT_SLOT_SUBS; k += n + 1) {
        n = unused_from(used, k);
        most = n > most ? n : most;
    }
    return (uint8_t)most;
}

/* The pieces of a split slot have changed. Without a piece it is on no list. */
static void list_room(struct ht_arena *a, uint32_t i)
{
    struct ht_slot *s = &a->slot[i];
    struct ht_slot_list *lists = a->room[s->numa_index];
    uint8_t room = s->used ? ht_slot_room(s->used) : 0;

    if (room == s->room)
        return;
    if (s->room)
        ht_slot_list_del(a->slot, &lists[s->room - 1], HT_LIST_ROOM, i);
    s->room = room;
    if (room)
        ht_slot_list_add(a->slot, &lists[room - 1], HT_LIST_ROOM, i);
}

/* True: it was the last piece of its slot. */
static bool put_piece(struct ht_arena *a, uint32_t n)
{
    struct ht_slot *s = &a->slot[n / HT_SLOT_SUBS];
    uint16_t mask = mask_of(n % HT_SLOT_SUBS, a->image[n].subs);

    assert((s->used & mask) == mask);
    s->used &= (uint16_t)~mask;
    list_room(a, n / HT_SLOT_SUBS);
    return !s->used;
}

uint32_t ht_slot_image(const struct ht_arena *a, uint32_t i, uint32_t k)
{
    const struct ht_slot *s = &a->slot[i];

    if (s->state == HT_SLOT_WHOLE)
        return k ? HT_SLOT_NONE : i * HT_SLOT_SUBS;
    /* From the first piece on: k may lie inside of one. */
    for (uint32_t at = 0, step; at < HT_SLOT_SUBS && s->state == HT_SLOT_SPLIT; at += step) {
        bool there = s->used & (1u << at);
        step = there ? a->image[i * HT_SLOT_SUBS + at].subs : 1;
        if (there && at >= k)
            return i * HT_SLOT_SUBS + at;
    }
    return HT_SLOT_NONE;
}

void ht_arena_put(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_external(a, n)) {
        put_external(a, n);
        return;
    }
    uint32_t i = n / HT_SLOT_SUBS;
    struct ht_slot *s = &a->slot[i];
    assert(s->state != HT_SLOT_FREE);
    ht_eviction_forget(a, n);
    a->image[n].owner = NULL;
    note_used(a, n, -1);
    if (s->state == HT_SLOT_WHOLE || put_piece(a, n))
        slot_to_free(a, i);
}

/* A whole slot. The clock runs until one may be taken; a split one becomes whole when all its images go. */
static uint32_t get_whole(struct ht_arena *a, uint64_t tries, unsigned numa_index) HT_REQUIRES(HT_LOCK_STORE)
{
    for (; tries && !may_take(a, numa_index); tries--)
        if (ht_eviction_pass(a, HT_SLOT_SUBS) == HT_SLOT_NONE)
            break;
    uint32_t i = slot_from_free(a, HT_SLOT_WHOLE, numa_index);
    return i == HT_SLOT_NONE ? i : i * HT_SLOT_SUBS;
}

static uint32_t take_piece(struct ht_arena *a, uint32_t i, uint32_t subs)
{
    uint32_t first;

    if (!ht_slot_has_room(a, i, subs, &first))
        return HT_SLOT_NONE;
    a->slot[i].used |= mask_of(first, subs);
    list_room(a, i);
    return i * HT_SLOT_SUBS + first;
}

/* Splits a fresh slot. */
static uint32_t split(struct ht_arena *a, uint32_t subs, unsigned numa_index)
{
    uint32_t i = slot_from_free(a, HT_SLOT_SPLIT, numa_index);

    return i == HT_SLOT_NONE ? i : take_piece(a, i, subs);
}

/* A piece from the tightest room on a node. */
static uint32_t find_piece(struct ht_arena *a, uint32_t subs, unsigned numa_index)
{
    for (unsigned k = subs - 1; k < HT_PIECE_LENGTHS; k++)
        if (a->room[numa_index][k].count)
            return take_piece(a, a->room[numa_index][k].head, subs);
    return HT_SLOT_NONE;
}

static uint32_t find_any_piece(struct ht_arena *a, uint32_t subs)
{
    uint32_t n = HT_SLOT_NONE;

    for (unsigned p = 0; n == HT_SLOT_NONE && p < ht_pinned_parts(&a->memory); p++)
        n = find_piece(a, subs, p);
    return n;
}

/* A piece: from room that is near, else from a fresh slot, else from room anywhere, else from what the clock frees. */
static uint32_t get_piece(struct ht_arena *a, uint32_t subs, uint64_t tries, unsigned numa_index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t n = find_piece(a, subs, numa_index);

    if (n == HT_SLOT_NONE)
        n = split(a, subs, numa_index);
    if (n == HT_SLOT_NONE)
        n = find_any_piece(a, subs);
    for (; n == HT_SLOT_NONE && tries; tries--) {
        uint32_t i = ht_eviction_pass(a, subs);
        if (i == HT_SLOT_NONE)
            break;
        n = take_piece(a, i, subs);
        if (n == HT_SLOT_NONE)
            n = split(a, subs, numa_index);
    }
    return n;
}

/* Sub-slots of a piece for so many bytes, or HT_SLOT_SUBS. */
static uint32_t subs_for(uint32_t bytes)
{
    return (uint32_t)ht_max_u64(ht_min_u64(ht_div_up(bytes, 1u << SUB_SHIFT), HT_SLOT_SUBS), 1);
}

static void begin_image(struct ht_arena *a, uint32_t n, uint32_t subs) HT_REQUIRES(HT_LOCK_STORE)
{
    a->image[n] = (struct ht_image){.referenced = true, .subs = (uint8_t)subs};
    ht_eviction_note_new(a, n);
    note_used(a, n, 1);
}

uint32_t ht_arena_get(struct ht_arena *a, uint32_t bytes, uint32_t most, int wanted)
{
    uint32_t subs = subs_for(bytes);
    unsigned numa_index = place_of(a, wanted);

    a->forced = most == HT_ARENA_FORCE;
    a->chances = CHANCES;
    a->passed = 0;
    uint64_t tries = ht_min_u64(most, ht_eviction_passes(a, most >= HT_ARENA_ASK_ALL));
    if (ht_fault(HT_FAULT_CACHE_SLOT) != 0)
        return HT_SLOT_NONE;
    uint32_t n = subs == HT_SLOT_SUBS ? get_whole(a, tries, numa_index) : get_piece(a, subs, tries, numa_index);
    if (n == HT_SLOT_NONE && most >= HT_ARENA_ASK_ALL)
        a->short_for = a->slots;
    if (n == HT_SLOT_NONE)
        return n;
    a->short_for -= a->short_for > 0;
    begin_image(a, n, subs);
    return n;
}

uint32_t ht_arena_get_piece(struct ht_arena *a, uint32_t bytes, int wanted)
{
    uint32_t subs = subs_for(bytes);

    if (subs == HT_SLOT_SUBS || ht_fault(HT_FAULT_CACHE_SLOT) != 0)
        return HT_SLOT_NONE;
    uint32_t n = find_piece(a, subs, place_of(a, wanted));
    if (n == HT_SLOT_NONE)
        n = find_any_piece(a, subs);
    if (n != HT_SLOT_NONE)
        begin_image(a, n, subs);
    return n;
}

bool ht_arena_keeps_reserve(struct ht_arena *a, uint64_t held)
{
    uint64_t reserve = ht_min_u64(a->slots / RESERVE_PART, RESERVE_MAX),
             left = a->free_slots + ht_eviction_passes(a, false);
    bool keeps = reserve && left <= reserve + held;

    if (keeps)
        a->short_for = a->slots;
    return keeps;
}

uint32_t ht_arena_get_ahead(struct ht_arena *a, uint32_t bytes, uint64_t place, int numa_index)
{
    a->is_ahead = true;
    a->ahead_place = place % HT_ORDER_PLACES;
    uint32_t n = ht_arena_get(a, bytes, AHEAD_TRIES, numa_index);
    a->is_ahead = false;
    return n;
}

void ht_arena_attach(struct ht_arena *a, uint32_t n, void *owner, uint64_t index, bool durable)
{
    struct ht_image *im = ht_arena_image(a, n);

    im->owner = owner;
    im->index = index;
    im->durable = durable;
    if (!ht_arena_is_external(a, n))
        ht_eviction_note_attached(a, n);
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
    im->target_device = was.target_device;
    if (was.workingset && !im->workingset)
        ht_eviction_join_workingset(a, to);
    bool pinned = was.pinned && ht_arena_pin(a, to);
    if (was.waiting)
        ht_arena_protect_waiting(a, to);
    else if (was.protected && !pinned && ht_arena_may_protect(a, to))
        ht_arena_protect(a, to);
    ht_arena_set_dirty(a, to, was.dirty);
}

struct ht_image *ht_arena_image(struct ht_arena *a, uint32_t slot)
{
    return ht_arena_is_external(a, slot) ? &a->external_image[slot - a->slots * HT_SLOT_SUBS] : &a->image[slot];
}

static uint8_t *memory_of(const struct ht_arena *a, uint32_t i)
{
    return (uint8_t *)a->memory.base + ((uint64_t)a->slot[i].at << HT_SLOT_SHIFT);
}

uint8_t *ht_arena_data(struct ht_arena *a, uint32_t slot)
{
    if (ht_arena_is_external(a, slot))
        return a->external[slot - a->slots * HT_SLOT_SUBS].data;
    assert(a->slot[slot / HT_SLOT_SUBS].state != HT_SLOT_LENT); /* its pages are gone */
    return memory_of(a, slot / HT_SLOT_SUBS) + ((uint64_t)(slot % HT_SLOT_SUBS) << SUB_SHIFT);
}

uint32_t ht_arena_slot_bytes(const struct ht_arena *a, uint32_t slot)
{
    if (ht_arena_is_external(a, slot))
        return 1u << HT_SLOT_SHIFT;
    return (uint32_t)a->image[slot].subs << SUB_SHIFT;
}

const struct ht_arena_sums *ht_arena_sums(const struct ht_arena *a)
{
    return &a->sums;
}

uint64_t ht_arena_bytes(const struct ht_arena *a)
{
    return ((uint64_t)a->slots << HT_SLOT_SHIFT) - ht_arena_lent_bytes(a);
}

uint32_t ht_arena_free_slots(const struct ht_arena *a)
{
    return a->free_slots - (uint32_t)ht_min_u64(a->free_slots, a->spare);
}

int ht_arena_numa_index(const struct ht_arena *a, uint32_t slot)
{
    return ht_arena_is_external(a, slot) ? HT_NUMA_INDEX_ANY : a->slot[slot / HT_SLOT_SUBS].numa_index;
}

uint64_t ht_arena_meta_bytes(const struct ht_arena *a)
{
    return (uint64_t)a->slots * (sizeof(*a->slot) + HT_SLOT_SUBS * sizeof(*a->image)) +
        (uint64_t)a->externals * (sizeof(*a->external) + sizeof(*a->external_image)) +
        ht_workingset_bytes(&a->workingset);
}

struct ht_pinned *ht_arena_memory(struct ht_arena *a)
{
    return &a->memory;
}

/* ----------------------------------------------------------------- lending */

/*
 * Half of a huge page would stay in memory, so slots are lent in pairs:
 *
 *   two FREE of one huge page --lend--> LENT --take back--> FREE
 *
 * A lent slot has no image and is on no list but `lent`, so no thread and no device has its address.
 */
uint64_t ht_arena_lent_bytes(const struct ht_arena *a)
{
    return (uint64_t)a->lent.count * HT_ARENA_LEND_BYTES;
}

/* Lists or unlists a pair; the protected set takes its part of the change. */
static void count_lent(struct ht_arena *a, uint32_t i, bool lent) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t before = ht_arena_protected_max(ht_arena_bytes(a));

    if (lent)
        ht_slot_list_push(a->slot, &a->lent, HT_LIST_ROOM, i);
    else
        ht_slot_list_del(a->slot, &a->lent, HT_LIST_ROOM, i);
    uint64_t after = ht_arena_protected_max(ht_arena_bytes(a));
    ht_arena_set_protected_max(a, ht_max_u64(a->protected_max + after, before) - before);
}

bool ht_arena_may_lend(const struct ht_arena *a, uint64_t bytes)
{
    uint64_t all = (uint64_t)a->slots << HT_SLOT_SHIFT;
    uint64_t left = all - ht_min_u64(all, ht_round_up(bytes, HT_ARENA_LEND_BYTES));

    return left >= LEFT_BYTES_MIN && a->sums.pinned_bytes <= ht_arena_pinned_max(left);
}

/* One pair more. Passing images keep their room: without any, no request for a slot would ever be met. */
static bool may_lend(const struct ht_arena *a, bool any) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_arena_may_lend(a, ht_arena_lent_bytes(a) + HT_ARENA_LEND_BYTES) &&
        (any || a->sums.protected_bytes <= ht_arena_protected_max(ht_arena_bytes(a) - HT_ARENA_LEND_BYTES));
}

/* Images of the slot go. True: it is free. */
static bool clear(struct ht_arena *a, uint32_t i, enum ht_lend whom, uint32_t *out_dirty) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t n;

    for (uint32_t k = 0, subs; (n = ht_slot_image(a, i, k)) != HT_SLOT_NONE; k = n % HT_SLOT_SUBS + subs) {
        const struct ht_image *im = &a->image[n];
        if (whom == HT_LEND_ANY && !im->waiting) {
            ht_arena_unprotect(a, n);
            ht_arena_cool(a, n);
        }
        *out_dirty = im->dirty ? n : *out_dirty;
        if (whom == HT_LEND_FREE || im->protected || im->dirty || !a->evict(a->ctx, n))
            return false;
        subs = im->subs;
        ht_arena_put(a, n);
    }
    return a->slot[i].state == HT_SLOT_FREE;
}

/* Of the node with most free slots first. Those whose other half is in use become the last of their list. */
static uint32_t free_pair(struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned parts = ht_pinned_parts(&a->memory), first = freest(a);

    for (unsigned p = 0; p < parts; p++) {
        struct ht_slot_list *list = &a->free[(first + p) % parts];
        for (uint32_t k = list->count, i; k; k--) {
            i = list->head;
            if ((i ^ 1) < a->slots && a->slot[i ^ 1].state == HT_SLOT_FREE)
                return i & ~1u;
            ht_slot_list_del(a->slot, list, HT_LIST_ROOM, i);
            ht_slot_list_add(a->slot, list, HT_LIST_ROOM, i);
        }
    }
    return HT_SLOT_NONE;
}

bool ht_arena_lend(struct ht_arena *a, enum ht_lend whom, uint32_t *out_dirty)
{
    *out_dirty = HT_SLOT_NONE;
    if (!may_lend(a, whom == HT_LEND_ANY))
        return false;
    a->lend_at = (a->lend_at ? a->lend_at : a->slots / 2) - 1;
    uint32_t i = whom == HT_LEND_FREE ? free_pair(a) : 2 * a->lend_at;
    if (i == HT_SLOT_NONE || !clear(a, i, whom, out_dirty) || !clear(a, i + 1, whom, out_dirty) || !may_lend(a, false))
        return false;
    assert(a->slot[i].at % 2 == 0 && a->slot[i + 1].at == a->slot[i].at + 1);
    if (!ht_mem_give_back((char *)memory_of(a, i), HT_ARENA_LEND_BYTES))
        return false;
    slot_not_free(a, i, HT_SLOT_LENT);
    slot_not_free(a, i + 1, HT_SLOT_LENT);
    count_lent(a, i, true);
    return true;
}

bool ht_arena_take_back(struct ht_arena *a)
{
    uint32_t i = ht_slot_list_head(&a->lent);

    if (i == HT_SLOT_NONE)
        return false;
    count_lent(a, i, false);
    slot_to_free(a, i + 1);
    slot_to_free(a, i);
    return true;
}
