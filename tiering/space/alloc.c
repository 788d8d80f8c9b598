/* SPDX-License-Identifier: Apache-2.0 */
/*
 * alloc.c - which blocks are free: a bitmap per device, counted in groups of 256 blocks (1 MiB).
 *
 * Owns the bitmaps and the accounting of reservations. Does not know why a block is taken, nor when a superseded one
 * may be given back: the store does.
 *
 * Three views of the same fact, kept together by group_changed():
 *
 *   taken    one bit per block; bits beyond the end of the device are set
 *   used     set bits of each group
 *   broken   one bit per group: not all 256 are free
 *   partial  one bit per group: some are free, some are not
 *
 * All are zeros where everything is free. So a region without marks takes no memory, however large a superblock says
 * that its device is, and whether or not the device is there.
 *
 * The two group bitmaps make a search cheap on a full device: 8 TiB are 8 million groups,
 * one megabyte of bits. A run never crosses a group while it is searched for; neighbouring runs
 * that are taken one after the other are returned as one.
 *
 * Order of preference: large requests (256 blocks) take a whole group; small ones fill partial groups, looking at
 * a bounded number of them before they break a whole one; when nothing contiguous is left,
 * pieces, the longest first.
 *
 * Invariants:
 *  1. used[g] is the number of set bits of group g; free_blocks of a device the number of clear ones.
 *  2. reserved never exceeds free + pending_free, unless blocks were marked after they were reserved.
 *
 * Not locked: the store's lock guards it. Nothing here allocates memory after ht_alloc_new.
 */
#include "tiering/space/alloc.h"

#include <assert.h>
#include <stdlib.h>

#include "tiering/base/fault.h"

#define GROUP_BLOCKS 256u
#define GROUP_WORDS (GROUP_BLOCKS / 64)
#define PAGE_GROUPS (4096u / (GROUP_WORDS * 8)) /* that a page of the map of blocks has */
#define SMALL_TRIES_MAX 64u                     /* partial groups that a search checks before it breaks a whole one */
#define NO_GROUP UINT64_MAX
#define BAD_PART 32u /* part of a device that may be bad places; beyond that the device is bad */

struct device {
    uint64_t blocks, groups, free_blocks, bad_blocks;
    bool offline, failing;
    uint32_t share;             /* as in struct ht_place_device */
    int64_t credit[2];          /* of new content, of rewritten content: a lot of one would hide what the other owes */
    uint64_t *taken;            /* GROUP_WORDS words per group */
    uint64_t *broken, *partial; /* a bit per group */
    uint16_t *used;             /* per group */
    uint64_t *touched;          /* a bit per page of taken: anything was ever in use there, so it has memory */
    uint64_t pages_touched;
    uint64_t whole;                  /* groups of which all blocks are free */
    uint64_t whole_next, small_next; /* next fit: groups in which the searches continue */
};

struct ht_alloc {
    unsigned device_count;
    uint64_t total, free_blocks, pending_free, reserved;
    struct device device[HT_DEVICES_MAX];
};

struct run {
    unsigned first, blocks;
};

/* The runs that ht_alloc_take has found so far. */
struct taking {
    struct ht_alloc *alloc;
    struct ht_extent *out;
    unsigned count;
    uint32_t left;
};

/* ------------------------------------------------------------- bits */

static void bit_set(uint64_t *words, uint64_t bit, bool value)
{
    uint64_t mask = 1ull << (bit % 64);

    if (value)
        words[bit / 64] |= mask;
    else
        words[bit / 64] &= ~mask;
}

static void bits_set(uint64_t *words, uint64_t from, uint64_t end, bool value)
{
    while (from < end) {
        uint64_t stop = ht_min_u64((from / 64 + 1) * 64, end);
        uint64_t mask = (~0ull >> (64 - (stop - from))) << (from % 64);
        if (value)
            words[from / 64] |= mask;
        else
            words[from / 64] &= ~mask;
        from = stop;
    }
}

/* The first bit with this value in [from, end), or end. */
static uint64_t bit_find(const uint64_t *words, uint64_t from, uint64_t end, bool value)
{
    uint64_t flip = value ? 0 : ~0ull;

    while (from < end) {
        uint64_t word = (words[from / 64] ^ flip) >> (from % 64);
        if (word)
            return ht_min_u64(from + (unsigned)__builtin_ctzll(word), end);
        from = (from / 64 + 1) * 64;
    }
    return end;
}

/* ----------------------------------------------------------- groups */

static uint64_t *group_bits(const struct device *d, uint64_t group)
{
    return d->taken + group * GROUP_WORDS;
}

static void note_touched(struct device *d, uint64_t group)
{
    uint64_t page = group / PAGE_GROUPS, mask = 1ull << page % 64;

    d->pages_touched += !(d->touched[page / 64] & mask);
    d->touched[page / 64] |= mask;
}

static void group_changed(struct device *d, uint64_t group, int delta)
{
    unsigned used = (unsigned)(d->used[group] + delta);

    note_touched(d, group);
    assert(used <= GROUP_BLOCKS);
    d->whole += (used == 0) - (uint64_t)(d->used[group] == 0);
    d->used[group] = (uint16_t)used;
    bit_set(d->broken, group, used > 0);
    bit_set(d->partial, group, used > 0 && used < GROUP_BLOCKS);
}

static unsigned group_free(const struct device *d, uint64_t group)
{
    return GROUP_BLOCKS - d->used[group];
}

/* The shortest free run of at least want blocks; when there is none, the longest. */
static struct run group_best_run(const struct device *d, uint64_t group, unsigned want)
{
    const uint64_t *bits = group_bits(d, group);
    struct run best = {0, 0};

    for (unsigned at = 0; at < GROUP_BLOCKS;) {
        unsigned first = (unsigned)bit_find(bits, at, GROUP_BLOCKS, false);
        unsigned end = (unsigned)bit_find(bits, first, GROUP_BLOCKS, true);
        unsigned len = end - first;
        bool closer = best.blocks < want ? len > best.blocks : len >= want && len < best.blocks;
        if (closer)
            best = (struct run){first, len};
        at = end;
    }
    return best;
}

/* The next bit of a group bitmap with this value at or after from, around the end once; NO_GROUP when there is none. */
static uint64_t group_next(const struct device *d, const uint64_t *bits, bool value, uint64_t from)
{
    uint64_t group = bit_find(bits, from, d->groups, value);

    if (group < d->groups)
        return group;
    group = bit_find(bits, 0, from, value);
    return group < from ? group : NO_GROUP;
}

/* ---------------------------------------------------------- devices */

static bool extent_inside(const struct ht_alloc *a, const struct ht_extent *e)
{
    if (e->device >= a->device_count || e->blocks == 0)
        return false;
    uint64_t blocks = a->device[e->device].blocks;
    return e->block < blocks && e->blocks <= blocks - e->block;
}

/* Flip a run of blocks from !taken to taken. */
static void device_set(struct ht_alloc *a, struct device *d, uint64_t block, uint64_t count, bool taken)
{
    uint64_t end = block + count;

    while (block < end) {
        uint64_t group = block / GROUP_BLOCKS;
        uint64_t stop = ht_min_u64((group + 1) * GROUP_BLOCKS, end);
        int changed = (int)(stop - block);
        bits_set(d->taken, block, stop, taken);
        group_changed(d, group, taken ? changed : -changed);
        block = stop;
    }
    d->free_blocks = taken ? d->free_blocks - count : d->free_blocks + count;
    if (!d->offline)
        a->free_blocks = taken ? a->free_blocks - count : a->free_blocks + count;
}

static void device_free(struct device *d)
{
    free(d->taken);
    free(d->broken);
    free(d->partial);
    free(d->used);
    free(d->touched);
}

static int device_init(struct device *d, uint64_t blocks)
{
    d->blocks = blocks;
    d->groups = ht_div_up(blocks, GROUP_BLOCKS);
    if (blocks == 0)
        return 0;

    size_t group_words = (size_t)ht_div_up(d->groups, 64);
    d->taken = calloc(d->groups, GROUP_WORDS * sizeof(*d->taken));
    d->broken = calloc(group_words, sizeof(*d->broken));
    d->partial = calloc(group_words, sizeof(*d->partial));
    d->used = calloc(d->groups, sizeof(*d->used));
    d->touched = calloc(ht_div_up(d->groups, 64 * PAGE_GROUPS), sizeof(*d->touched));
    if (!d->taken || !d->broken || !d->partial || !d->used || !d->touched)
        return -ENOMEM;

    d->whole = d->groups;
    bits_set(d->taken, blocks, d->groups * GROUP_BLOCKS, true);
    group_changed(d, d->groups - 1, (int)(d->groups * GROUP_BLOCKS - blocks));
    d->free_blocks = blocks;
    return 0;
}

int ht_alloc_new(unsigned device_count, const uint64_t device_blocks[], struct ht_alloc **out_alloc)
{
    assert(device_count >= 1 && device_count <= HT_DEVICES_MAX);
    struct ht_alloc *a = calloc(1, sizeof(*a));
    if (!a)
        return -ENOMEM;

    a->device_count = device_count;
    for (unsigned i = 0; i < device_count; i++) {
        if (device_init(&a->device[i], device_blocks[i])) {
            ht_alloc_free(a);
            return -ENOMEM;
        }
        a->total += device_blocks[i];
    }
    a->free_blocks = a->total;
    *out_alloc = a;
    return 0;
}

uint64_t ht_alloc_whole_blocks(const struct ht_alloc *a)
{
    uint64_t groups = 0;

    for (unsigned i = 0; i < a->device_count; i++)
        groups += a->device[i].offline ? 0 : a->device[i].whole;
    return groups * GROUP_BLOCKS;
}

uint64_t ht_alloc_meta_bytes(const struct ht_alloc *a)
{
    uint64_t bytes = sizeof(*a);

    for (unsigned i = 0; i < a->device_count; i++) {
        const struct device *d = &a->device[i];
        bytes += d->pages_touched * PAGE_GROUPS * (GROUP_WORDS * sizeof(*d->taken) + sizeof(*d->used));
        if (d->blocks)
            bytes += ht_div_up(d->groups, 64) * (sizeof(*d->broken) + sizeof(*d->partial));
    }
    return bytes;
}

void ht_alloc_free(struct ht_alloc *a)
{
    if (!a)
        return;
    for (unsigned i = 0; i < a->device_count; i++)
        device_free(&a->device[i]);
    free(a);
}

void ht_alloc_set_offline(struct ht_alloc *a, unsigned device)
{
    struct device *d = &a->device[device];

    assert(!d->offline);
    d->offline = true;
    a->total -= d->blocks;
    a->free_blocks -= d->free_blocks;
}

void ht_alloc_set_failing(struct ht_alloc *a, unsigned device, bool failing)
{
    a->device[device].failing = failing;
}

bool ht_alloc_is_free(const struct ht_alloc *a, const struct ht_extent *e)
{
    if (!extent_inside(a, e))
        return false;
    uint64_t end = e->block + e->blocks;
    return bit_find(a->device[e->device].taken, e->block, end, true) == end;
}

bool ht_alloc_begins_taken(const struct ht_alloc *a, const struct ht_extent *e)
{
    const struct ht_extent first = {e->block, 1, e->device};

    return extent_inside(a, e) && !ht_alloc_is_free(a, &first);
}

void ht_alloc_prefetch(const struct ht_alloc *a, const struct ht_extent *e)
{
    if (!extent_inside(a, e))
        return;
    const struct device *d = &a->device[e->device];
    __builtin_prefetch(&d->taken[e->block / 64], 1);
    __builtin_prefetch(&d->used[e->block / GROUP_BLOCKS], 1);
}

int ht_alloc_mark(struct ht_alloc *a, const struct ht_extent *e)
{
    if (!extent_inside(a, e))
        return -ERANGE;
    if (!ht_alloc_is_free(a, e))
        return -EEXIST;
    device_set(a, &a->device[e->device], e->block, e->blocks, true);
    return 0;
}

void ht_alloc_release(struct ht_alloc *a, const struct ht_extent *e)
{
    assert(extent_inside(a, e));
    struct device *d = &a->device[e->device];
    uint64_t end = e->block + e->blocks;
    assert(bit_find(d->taken, e->block, end, false) == end); /* a double release would hand out live data */
    device_set(a, d, e->block, e->blocks, false);
}

bool ht_alloc_keep_bad(struct ht_alloc *a, const struct ht_extent *e)
{
    assert(extent_inside(a, e));
    struct device *d = &a->device[e->device];
    if (d->bad_blocks + e->blocks > d->blocks / BAD_PART)
        return false;
    d->bad_blocks += e->blocks;
    return true;
}

/* ------------------------------------------------------- accounting */

uint32_t ht_alloc_countable(const struct ht_alloc *a, const struct ht_extent *e)
{
    return e->device < a->device_count && a->device[e->device].offline ? 0 : e->blocks;
}

void ht_alloc_device(const struct ht_alloc *a, unsigned device, struct ht_alloc_device *out)
{
    const struct device *d = &a->device[device];

    *out = (struct ht_alloc_device){d->blocks, d->free_blocks, d->bad_blocks};
}

uint64_t ht_alloc_total(const struct ht_alloc *a)
{
    return a->total;
}

uint64_t ht_alloc_free_blocks(const struct ht_alloc *a)
{
    return a->free_blocks;
}

uint64_t ht_alloc_reserved(const struct ht_alloc *a)
{
    return a->reserved;
}

uint64_t ht_alloc_available(const struct ht_alloc *a)
{
    uint64_t space = a->free_blocks + a->pending_free;

    return space > a->reserved ? space - a->reserved : 0;
}

int ht_alloc_reserve(struct ht_alloc *a, uint64_t blocks)
{
    if (blocks > ht_alloc_available(a) || (blocks > 0 && ht_fault(HT_FAULT_SPACE_RESERVE) != 0))
        return -ENOSPC;
    a->reserved += blocks;
    return 0;
}

void ht_alloc_unreserve(struct ht_alloc *a, uint64_t blocks)
{
    assert(a->reserved >= blocks);
    a->reserved -= blocks;
}

void ht_alloc_pending_free_add(struct ht_alloc *a, uint64_t blocks)
{
    a->pending_free += blocks;
}

void ht_alloc_pending_free_sub(struct ht_alloc *a, uint64_t blocks)
{
    assert(a->pending_free >= blocks);
    a->pending_free -= blocks;
}

/* ------------------------------------------------------- allocation */

static void take_run(struct taking *t, struct device *d, uint64_t group, struct run run)
{
    uint32_t device = (uint32_t)(d - t->alloc->device);
    uint64_t block = group * GROUP_BLOCKS + run.first;
    uint32_t blocks = (uint32_t)ht_min_u64(run.blocks, t->left);
    struct ht_extent *last = t->count ? &t->out[t->count - 1] : NULL;

    device_set(t->alloc, d, block, blocks, true);
    t->left -= blocks;
    if (last && last->device == device && last->block + last->blocks == block) {
        last->blocks += blocks;
        return;
    }
    assert(t->count < HT_FRAGS_MAX);
    t->out[t->count++] = (struct ht_extent){block, blocks, device};
}

static bool take_whole_group(struct taking *t, struct device *d)
{
    uint64_t group = group_next(d, d->broken, false, d->whole_next);

    if (group == NO_GROUP)
        return false;
    take_run(t, d, group, (struct run){0, GROUP_BLOCKS});
    d->whole_next = (group + 1) % d->groups;
    return true;
}

/* One contiguous run out of partial groups; tries: the number of groups with enough blocks that it checks. */
static bool take_from_partial(struct taking *t, struct device *d, uint64_t tries)
{
    uint64_t from = d->small_next;

    for (uint64_t seen = 0; seen < d->groups && tries > 0;) {
        uint64_t group = group_next(d, d->partial, true, from);
        if (group == NO_GROUP)
            return false;
        seen += (group + d->groups - from) % d->groups + 1;
        from = (group + 1) % d->groups;
        if (group_free(d, group) < t->left)
            continue;
        tries--;
        struct run run = group_best_run(d, group, t->left);
        if (run.blocks < t->left)
            continue;
        take_run(t, d, group, run);
        d->small_next = group; /* fill it up */
        return true;
    }
    return false;
}

static bool take_contiguous(struct taking *t, struct device *d)
{
    if (t->left == GROUP_BLOCKS)
        return take_whole_group(t, d);
    if (take_from_partial(t, d, SMALL_TRIES_MAX))
        return true;
    if (take_whole_group(t, d)) {
        d->small_next = (d->whole_next + d->groups - 1) % d->groups;
        return true;
    }
    return take_from_partial(t, d, UINT64_MAX);
}

/* Takes every run of at least min_blocks in this pass over the device, until the request is served. */
static void take_pieces_of(struct taking *t, struct device *d, unsigned min_blocks)
{
    for (uint64_t g = 0; g < d->groups && t->left > 0; g++) {
        while (t->left > 0 && group_free(d, g) >= min_blocks) {
            struct run run = group_best_run(d, g, t->left);
            if (run.blocks < min_blocks)
                break;
            take_run(t, d, g, run);
        }
    }
}

static void take_pieces(struct taking *t, struct device *d)
{
    for (unsigned min = GROUP_BLOCKS / 2; min > 0 && t->left > 0 && d->free_blocks > 0; min /= 4)
        take_pieces_of(t, d, min);
    if (t->left > 0 && d->free_blocks > 0)
        take_pieces_of(t, d, 1);
}

static void fill_table(const struct ht_alloc *a, bool movable, struct ht_place_device table[])
{
    for (unsigned i = 0; i < a->device_count; i++) {
        const struct device *d = &a->device[i];
        table[i] =
            (struct ht_place_device){d->blocks, d->free_blocks, d->offline, d->failing, d->share, d->credit[movable]};
    }
}

int ht_alloc_choose(const struct ht_alloc *a, uint32_t blocks, struct ht_alloc_hint hint)
{
    struct ht_place_device table[HT_DEVICES_MAX];

    fill_table(a, hint.movable, table);
    return ht_place_choose(table, a->device_count, blocks, hint);
}

int ht_alloc_assign(struct ht_alloc *a, uint32_t blocks, struct ht_alloc_hint hint)
{
    struct ht_place_device table[HT_DEVICES_MAX];

    fill_table(a, hint.movable, table);
    int chosen = ht_place_choose(table, a->device_count, blocks, hint);
    ht_place_charge(table, a->device_count, blocks, hint, chosen);
    for (unsigned i = 0; i < a->device_count; i++)
        a->device[i].credit[hint.movable] = table[i].credit;
    return chosen;
}

void ht_alloc_set_shares(struct ht_alloc *a, const uint32_t share[])
{
    for (unsigned i = 0; i < a->device_count; i++)
        a->device[i].share = share[i];
}

bool ht_alloc_has_shares(const struct ht_alloc *a)
{
    for (unsigned i = 0; i < a->device_count; i++)
        if (a->device[i].share)
            return true;
    return false;
}

uint32_t ht_alloc_share(const struct ht_alloc *a, unsigned device)
{
    return a->device[device].share;
}

int ht_alloc_take(struct ht_alloc *a, uint32_t blocks, struct ht_alloc_hint hint, struct ht_extent out[HT_FRAGS_MAX])
{
    assert(blocks >= 1 && blocks <= GROUP_BLOCKS);
    assert(a->reserved >= blocks);
    if (a->free_blocks < blocks)
        return -EAGAIN;

    struct taking t = {.alloc = a, .out = out, .left = blocks};
    int chosen = hint.device < 0 ? ht_alloc_assign(a, blocks, hint) : ht_alloc_choose(a, blocks, hint);
    struct device *d = &a->device[chosen];
    if (d->free_blocks < blocks || !take_contiguous(&t, d)) {
        take_pieces(&t, d);
        while (t.left > 0)
            take_pieces(&t, &a->device[ht_alloc_choose(a, t.left, hint)]);
    }
    a->reserved -= blocks;
    return (int)t.count;
}

void ht_alloc_untake(struct ht_alloc *a, const struct ht_extent e[], int n)
{
    for (int i = 0; i < n; i++) {
        ht_alloc_release(a, &e[i]);
        a->reserved += e[i].blocks;
    }
}

/* ----------------------------------------------------------- verify */

static bool bit_get(const uint64_t *words, uint64_t bit)
{
    return words[bit / 64] >> (bit % 64) & 1;
}

/* Returns the free blocks of the group. */
static uint64_t check_group(const struct device *d, uint64_t group)
{
    unsigned used = 0;

    for (unsigned w = 0; w < GROUP_WORDS; w++)
        used += (unsigned)__builtin_popcountll(group_bits(d, group)[w]);
    assert(d->used[group] == used);
    assert(bit_get(d->broken, group) == (used > 0));
    assert(bit_get(d->partial, group) == (used > 0 && used < GROUP_BLOCKS));
    return GROUP_BLOCKS - used;
}

/* Everything is free in pages that were never touched. */
static void check_device(const struct device *d)
{
    uint64_t free_blocks = 0, whole = 0;

    for (uint64_t page = 0; page * PAGE_GROUPS < d->groups; page++) {
        uint64_t first = page * PAGE_GROUPS, end = ht_min_u64(first + PAGE_GROUPS, d->groups);
        bool touched = bit_get(d->touched, page);
        for (uint64_t g = first; touched && g < end; g++) {
            uint64_t blocks = check_group(d, g);
            free_blocks += blocks;
            whole += blocks == GROUP_BLOCKS;
        }
        free_blocks += touched ? 0 : (end - first) * GROUP_BLOCKS;
        whole += touched ? 0 : end - first;
    }
    assert(d->free_blocks == free_blocks && d->whole == whole);
    assert(d->bad_blocks <= d->blocks - free_blocks);
}

void ht_alloc_verify(const struct ht_alloc *a, uint64_t pending_free)
{
    uint64_t total = 0, free_blocks = 0;

    for (unsigned i = 0; i < a->device_count; i++) {
        check_device(&a->device[i]);
        total += a->device[i].offline ? 0 : a->device[i].blocks;
        free_blocks += a->device[i].offline ? 0 : a->device[i].free_blocks;
    }
    assert(a->total == total && a->free_blocks == free_blocks);
    assert(a->pending_free == pending_free);
}

static_assert(GROUP_BLOCKS <= HT_FRAGS_MAX, "a request in single blocks still fits the extents of one chunk");
