/* SPDX-License-Identifier: Apache-2.0 */
/*
 * alloc.c - the space of all devices: a map of each (space_map.h), and the accounting of reservations.
 *
 * Does not know why a block is taken, nor when a superseded one may be given back: the store does.
 *
 * placement.h chooses the device of a request, and its map the blocks. A request that a device has no run for comes in
 * pieces, the longest first.
 *
 * Invariant: reserved never exceeds free + pending_free, unless blocks were marked after they were reserved.
 *
 * Not locked: the store's lock guards it. Nothing here allocates memory after ht_alloc_new.
 */
#include "tiering/base/fault.h"
#include "tiering/space/space_map.h"

#define DISCARD_PART 4u                      /* of the free blocks: the most that one discard takes */
#define DISCARD_BLOCKS 64u                   /* but so many, if no whole group is among them */
#define DISCARD_BLOCKS_MAX (64u << 20 >> 12) /* 64 MiB */
#define BAD_PART 32u   /* part of a device that may be bad places; beyond that the device is bad */
#define BROKEN_PART 8u /* of the free space: compaction is worth it if so much is in broken groups */

/* The runs that ht_alloc_take has found so far. */
struct taking {
    struct ht_alloc *alloc;
    struct ht_extent *out;
    unsigned count;
    uint32_t left;
    bool compacts; /* as of struct ht_alloc_hint */
};

/* ---------------------------------------------------------- devices */

static bool extent_inside(const struct ht_alloc *a, const struct ht_extent *e)
{
    if (e->device >= a->device_count || e->blocks == 0)
        return false;
    uint64_t blocks = a->device[e->device].map.blocks;
    return e->block < blocks && e->blocks <= blocks - e->block;
}

/* Flip a run of blocks from !taken to taken. */
static void device_set(struct ht_alloc *a, const struct ht_extent *e, bool taken)
{
    struct ht_alloc_map *d = &a->device[e->device];

    ht_space_map_set(&d->map, e->block, e->blocks, taken);
    if (!d->offline)
        a->free_blocks = taken ? a->free_blocks - e->blocks : a->free_blocks + e->blocks;
}

int ht_alloc_new(unsigned device_count, const uint64_t device_blocks[], struct ht_alloc **out_alloc)
{
    assert(device_count >= 1 && device_count <= HT_DEVICES_MAX);
    struct ht_alloc *a = calloc(1, sizeof(*a));
    if (!a)
        return -ENOMEM;

    a->device_count = device_count;
    for (unsigned i = 0; i < device_count; i++) {
        if (ht_space_map_init(&a->device[i].map, device_blocks[i])) {
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
        groups += a->device[i].offline ? 0 : a->device[i].map.index.count[HT_FREE_WHOLE];
    return groups * HT_GROUP_BLOCKS;
}

uint64_t ht_alloc_meta_bytes(const struct ht_alloc *a)
{
    uint64_t bytes = sizeof(*a);

    for (unsigned i = 0; i < a->device_count; i++)
        bytes += ht_space_map_bytes(&a->device[i].map);
    return bytes;
}

void ht_alloc_free(struct ht_alloc *a)
{
    if (!a)
        return;
    for (unsigned i = 0; i < a->device_count; i++)
        ht_space_map_destroy(&a->device[i].map);
    free(a);
}

void ht_alloc_set_offline(struct ht_alloc *a, unsigned device)
{
    struct ht_alloc_map *d = &a->device[device];

    assert(!d->offline);
    d->offline = true;
    a->total -= d->map.blocks;
    a->free_blocks -= d->map.free_blocks;
    a->pending_free -= d->deferred + (d->failing ? 0 : d->discarding);
}

void ht_alloc_set_capacity(struct ht_alloc *a, unsigned device)
{
    a->device[device].capacity = true;
}

void ht_alloc_set_failing(struct ht_alloc *a, unsigned device, bool failing)
{
    struct ht_alloc_map *d = &a->device[device];
    bool ends = failing && !d->failing, begins = !failing && d->failing;

    if (!d->offline)
        a->pending_free += begins ? d->discarding : ends ? -d->discarding : 0;
    d->failing = failing;
}

bool ht_alloc_is_free(const struct ht_alloc *a, const struct ht_extent *e)
{
    if (!extent_inside(a, e))
        return false;
    uint64_t end = e->block + e->blocks;
    return ht_space_map_find(&a->device[e->device].map, e->block, end, true) == end;
}

bool ht_alloc_begins_taken(const struct ht_alloc *a, const struct ht_extent *e)
{
    const struct ht_extent first = {e->block, 1, e->device};

    return extent_inside(a, e) && !ht_alloc_is_free(a, &first);
}

void ht_alloc_prefetch(const struct ht_alloc *a, const struct ht_extent *e)
{
    if (extent_inside(a, e))
        ht_space_map_prefetch(&a->device[e->device].map, e->block);
}

int ht_alloc_mark(struct ht_alloc *a, const struct ht_extent *e)
{
    if (!extent_inside(a, e))
        return -ERANGE;
    if (!ht_alloc_is_free(a, e))
        return -EEXIST;
    device_set(a, e, true);
    return 0;
}

void ht_alloc_set_marking(struct ht_alloc *a, bool on)
{
    for (unsigned i = 0; i < a->device_count; i++)
        ht_space_map_defer_index(&a->device[i].map, on);
}

void ht_alloc_release(struct ht_alloc *a, const struct ht_extent *e)
{
    assert(extent_inside(a, e));
    uint64_t end = e->block + e->blocks;
    /* a double release would hand out live data */
    assert(ht_space_map_find(&a->device[e->device].map, e->block, end, false) == end);
    device_set(a, e, false);
    if (a->notes_freed)
        ht_space_map_note_freed(&a->device[e->device].map, e->block, e->blocks);
}

bool ht_alloc_keep_bad(struct ht_alloc *a, const struct ht_extent *e)
{
    assert(extent_inside(a, e));
    struct ht_alloc_map *d = &a->device[e->device];
    if (d->bad_blocks + e->blocks > d->map.blocks / BAD_PART)
        return false;
    d->bad_blocks += e->blocks;
    ht_alloc_fix(a, e);
    return true;
}

void ht_alloc_fix(struct ht_alloc *a, const struct ht_extent *e)
{
    ht_space_map_fix(&a->device[e->device].map, e->block, e->blocks);
}

/* ----------------------------------------------------------- groups */

uint64_t ht_alloc_sparse_groups(const struct ht_alloc *a)
{
    uint64_t groups = 0;

    for (unsigned i = 0; i < a->device_count; i++)
        groups += a->device[i].offline ? 0 : a->device[i].map.index.count[HT_FREE_SPARSE];
    return groups;
}

bool ht_alloc_wants_compaction(const struct ht_alloc *a)
{
    uint64_t broken = a->free_blocks - ht_alloc_whole_blocks(a);

    return ht_alloc_sparse_groups(a) && broken >= HT_GROUP_BLOCKS && broken >= a->free_blocks / BROKEN_PART;
}

uint64_t ht_alloc_next_sparse(const struct ht_alloc *a, unsigned device, uint64_t from)
{
    const struct ht_alloc_map *d = &a->device[device];

    return d->offline ? HT_NO_GROUP : ht_free_index_next(&d->map.index, HT_FREE_SPARSE, from);
}

unsigned ht_alloc_group_taken(const struct ht_alloc *a, unsigned device, uint64_t group)
{
    const struct ht_space_map *m = &a->device[device].map;

    return ht_free_index_has(&m->index, HT_FREE_WHOLE, group)
        ? 0
        : ht_space_map_taken(m, group); /* it may have no memory */
}

void ht_alloc_close_group(struct ht_alloc *a, unsigned device, uint64_t group)
{
    ht_space_map_set_closed(&a->device[device].map, group, true);
}

bool ht_alloc_is_closed_group(const struct ht_alloc *a, unsigned device, uint64_t group)
{
    return ht_free_index_has(&a->device[device].map.index, HT_FREE_CLOSED, group);
}

void ht_alloc_open_group(struct ht_alloc *a, unsigned device, uint64_t group)
{
    if (ht_alloc_is_closed_group(a, device, group))
        ht_space_map_set_closed(&a->device[device].map, group, false);
}

/* ------------------------------------------------------- accounting */

uint32_t ht_alloc_countable(const struct ht_alloc *a, const struct ht_extent *e)
{
    if (e->device >= a->device_count)
        return e->device == HT_DEVICE_VAULT ? 0 : e->blocks;
    return a->device[e->device].offline ? 0 : e->blocks;
}

void ht_alloc_device(const struct ht_alloc *a, unsigned device, struct ht_alloc_device *out)
{
    const struct ht_alloc_map *d = &a->device[device];

    *out = (struct ht_alloc_device){d->map.blocks, d->map.free_blocks, d->bad_blocks, d->deferred + d->discarding};
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
    uint64_t available = ht_alloc_available(a);

    if (blocks > available)
        return ht_lack_space((blocks - available) * HT_BLOCK_BYTES);
    if (blocks > 0 && ht_fault(HT_FAULT_SPACE_RESERVE) != 0)
        return ht_lack_space(blocks * HT_BLOCK_BYTES);
    a->reserved += blocks;
    return 0;
}

void ht_alloc_unreserve(struct ht_alloc *a, uint64_t blocks)
{
    assert(a->reserved >= blocks);
    a->reserved -= blocks;
}

void ht_alloc_pending_free_add(struct ht_alloc *a, const struct ht_extent *e)
{
    struct ht_alloc_map *d = &a->device[e->device];

    assert(extent_inside(a, e));
    d->deferred += e->blocks;
    a->pending_free += d->offline ? 0 : e->blocks;
}

void ht_alloc_pending_free_sub(struct ht_alloc *a, const struct ht_extent *e)
{
    struct ht_alloc_map *d = &a->device[e->device];
    uint32_t countable = d->offline ? 0 : e->blocks;

    assert(extent_inside(a, e) && d->deferred >= e->blocks && a->pending_free >= countable);
    d->deferred -= e->blocks;
    a->pending_free -= countable;
}

/* ------------------------------------------------------- allocation */

static void add_run(struct taking *t, const struct ht_alloc_map *d, struct ht_run run)
{
    uint32_t device = (uint32_t)(d - t->alloc->device);
    struct ht_extent *last = t->count ? &t->out[t->count - 1] : NULL;

    t->left -= run.blocks;
    t->alloc->free_blocks -= run.blocks;
    if (last && last->device == device && last->block + last->blocks == run.block) {
        last->blocks += run.blocks;
        return;
    }
    assert(t->count < HT_FRAGS_MAX);
    t->out[t->count++] = (struct ht_extent){run.block, run.blocks, device};
}

/* Closed groups come before pieces, and after them for compaction, which empties these groups. */
static unsigned take_runs(const struct taking *t, struct ht_alloc_map *d, struct ht_run run[HT_GROUP_BLOCKS])
{
    unsigned n = ht_space_map_take(&d->map, t->left, run);

    if (!n && t->compacts)
        n = ht_space_map_take_pieces(&d->map, t->left, run);
    if (!n && ht_space_map_open_all(&d->map))
        n = ht_space_map_take(&d->map, t->left, run);
    return n ? n : ht_space_map_take_pieces(&d->map, t->left, run);
}

/* In one run if there is one; else in pieces, until the request is served or the device is full. */
static void take_from(struct taking *t, struct ht_alloc_map *d)
{
    struct ht_run run[HT_GROUP_BLOCKS];

    while (t->left > 0 && d->map.free_blocks > 0) {
        unsigned n = take_runs(t, d, run);
        for (unsigned i = 0; i < n; i++)
            add_run(t, d, run[i]);
    }
}

static void fill_table(const struct ht_alloc *a, bool movable, struct ht_place_device table[])
{
    for (unsigned i = 0; i < a->device_count; i++) {
        const struct ht_alloc_map *d = &a->device[i];
        table[i] = (struct ht_place_device){d->map.blocks, d->map.free_blocks, d->offline, d->failing,
                                            d->share,      d->credit[movable], d->capacity};
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
    assert(blocks >= 1 && blocks <= HT_GROUP_BLOCKS);
    assert(a->reserved >= blocks);
    if (a->free_blocks < blocks)
        return -EAGAIN;

    struct taking t = {.alloc = a, .out = out, .left = blocks, .compacts = hint.compacts};
    int chosen = hint.device < 0 ? ht_alloc_assign(a, blocks, hint) : ht_alloc_choose(a, blocks, hint);
    take_from(&t, &a->device[chosen]);
    while (t.left > 0)
        take_from(&t, &a->device[ht_alloc_choose(a, t.left, hint)]);
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

/* ---------------------------------------------------------- discard */

void ht_alloc_note_freed(struct ht_alloc *a, bool on)
{
    a->notes_freed = on;
}

bool ht_alloc_notes_freed(const struct ht_alloc *a)
{
    return a->notes_freed;
}

bool ht_alloc_has_freed(const struct ht_alloc *a, unsigned device)
{
    return a->device[device].map.index.count[HT_FREE_FREED] > 0;
}

unsigned ht_alloc_take_freed(struct ht_alloc *a, struct ht_alloc_freed_walk *walk, struct ht_extent out[],
                             unsigned n_max)
{
    enum { RUNS_MAX = 64 };
    struct ht_alloc_map *d = &a->device[walk->device];
    uint64_t most = ht_max_u64(d->map.free_blocks / DISCARD_PART, DISCARD_BLOCKS), blocks = 0;
    struct ht_run run[RUNS_MAX];

    walk->ended = d->offline || !d->map.groups;
    if (walk->ended)
        return 0;
    unsigned n =
        ht_space_map_take_freed(&d->map, walk->all, &walk->from, (uint32_t)ht_min_u64(most, DISCARD_BLOCKS_MAX), run,
                                (unsigned)ht_min_u64(n_max, RUNS_MAX));
    for (unsigned i = 0; i < n; i++) {
        out[i] = (struct ht_extent){run[i].block, run[i].blocks, walk->device};
        blocks += run[i].blocks;
    }
    d->discarding += blocks;
    a->free_blocks -= blocks;
    a->pending_free += d->failing ? 0 : blocks;
    walk->ended = walk->from == HT_NO_GROUP;
    return n;
}

void ht_alloc_put_freed(struct ht_alloc *a, const struct ht_extent e[], unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        struct ht_alloc_map *d = &a->device[e[i].device];
        assert(d->discarding >= e[i].blocks);
        d->discarding -= e[i].blocks;
        a->pending_free -= d->offline || d->failing ? 0 : e[i].blocks;
        device_set(a, &e[i], false);
    }
}

uint64_t ht_alloc_discarding(const struct ht_alloc *a, bool awaited)
{
    uint64_t blocks = 0;

    for (unsigned i = 0; i < a->device_count; i++)
        blocks += a->device[i].offline || (awaited && a->device[i].failing) ? 0 : a->device[i].discarding;
    return blocks;
}

static_assert((unsigned)HT_GROUP_BLOCKS <= HT_FRAGS_MAX,
              "a request in single blocks still fits the extents of one chunk");
