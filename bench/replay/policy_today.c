/* SPDX-License-Identifier: Apache-2.0 */
/*
 * policy_today.c - the store's own policy without a plan: its arena, clock, working set and protected set
 * (tiering/cache). What asks them is written here after the store's callers, and is simpler: images of updates are of
 * one size, gradients that wait take no slots, and nothing reads ahead.
 *
 * A unit takes a slot of 1 MiB, however large units are: the arena is that much smaller.
 */
#include <stdlib.h>

#include "bench/replay/sim.h"
#include "tiering/base/lock.h"
#include "tiering/cache/arena.h"

enum { ADMIT_TRIES = 64, SLOT_SHIFT = 20, COMMIT_S = 5 };

struct today {
    struct sim *s;
    struct ht_arena *arena;
    uint32_t *slot;       /* by unit */
    uint64_t next_commit; /* ns: files outside models are committed every few seconds */
    struct owner {
        uint64_t place[8]; /* owners are far apart, as objects are */
    } * owner;             /* by tensor */
};

static uint32_t unit_of(const struct today *d, uint32_t slot)
{
    const struct ht_image *im = ht_arena_image(d->arena, slot);
    uint32_t tensor = (uint32_t)((struct owner *)im->owner - d->owner);

    return d->s->string->first[tensor] + (uint32_t)im->index;
}

static bool evict(void *ctx, uint32_t slot)
{
    struct today *d = ctx;
    const struct ht_image *im = ht_arena_image(d->arena, slot);

    if (im->dirty || im->protected)
        return false;
    uint32_t unit = unit_of(d, slot);
    sim_evict(d->s, unit);
    d->slot[unit] = HT_SLOT_NONE;
    return true;
}

static void stop_today(struct sim *s)
{
    struct today *d = s->own;

    if (d->arena)
        ht_arena_free(d->arena);
    free(d->slot);
    free(d->owner);
    free(d);
}

static int start_today(struct sim *s)
{
    struct today *d = calloc(1, sizeof(*d));
    /* With protected shares of at most 7/8, no more than these would ever be used. */
    uint64_t slots = ht_min_u64(s->config->dram_bytes / s->string->unit_bytes, 2 * (uint64_t)s->string->units + 64);

    if (!d)
        return -ENOMEM;
    s->own = d;
    d->s = s;
    d->next_commit = COMMIT_S * UINT64_C(1000000000);
    d->slot = calloc(s->string->units + 1, sizeof(*d->slot));
    d->owner = calloc(s->trace->tensors + 1, sizeof(*d->owner));
    for (uint32_t u = 0; d->slot && u < s->string->units; u++)
        d->slot[u] = HT_SLOT_NONE;
    int rc = d->slot && d->owner ? 0 : -ENOMEM;
    if (!rc)
        rc = ht_arena_new(ht_max_u64(slots, 1) << SLOT_SHIFT, NULL, evict, d, &d->arena);
    if (rc)
        stop_today(s);
    return rc;
}

/* ---------------------------------------------------------------- images */

static uint32_t image_bytes(const struct sim *s, uint32_t unit)
{
    double part = (double)sim_unit_bytes(s->string, unit) / (double)s->string->unit_bytes;

    return (uint32_t)ht_max_u64(1, (uint64_t)(part * (1u << SLOT_SHIFT)));
}

/* Writes the oldest dirty image. False: there is none. */
static bool clean_one(struct sim *s)
{
    struct today *d = s->own;
    struct ht_dirty_walk walk = HT_DIRTY_WALK(true, HT_NUMA_INDEX_ANY);
    uint32_t slot = ht_dirty_walk_next(d->arena, &walk);

    if (slot == HT_SLOT_NONE)
        return false;
    sim_clean(s, unit_of(d, slot));
    return true;
}

/* A request waits until there is room. */
static uint32_t get_slot(struct sim *s, uint32_t bytes)
{
    struct today *d = s->own;
    uint32_t slot = ht_arena_get(d->arena, bytes, HT_ARENA_ASK_ALL, HT_NUMA_INDEX_ANY);

    while (slot == HT_SLOT_NONE && clean_one(s))
        slot = ht_arena_get(d->arena, bytes, HT_ARENA_ASK_ALL, HT_NUMA_INDEX_ANY);
    return slot == HT_SLOT_NONE ? ht_arena_get(d->arena, bytes, HT_ARENA_FORCE, HT_NUMA_INDEX_ANY) : slot;
}

static void attach(struct sim *s, uint32_t unit, uint32_t slot)
{
    struct today *d = s->own;
    uint32_t tensor = s->string->tensor[unit];

    ht_arena_attach(d->arena, slot, &d->owner[tensor], unit - s->string->first[tensor], true);
    ht_arena_image(d->arena, slot)->valid_hi = ht_arena_slot_bytes(d->arena, slot);
    d->slot[unit] = slot;
}

/* Updates make images while the protected set has room; the rest passes through. */
static uint32_t admit_update(struct sim *s, uint32_t unit)
{
    struct today *d = s->own;
    uint32_t slot = HT_SLOT_NONE;

    if (ht_arena_has_protected_room(d->arena))
        slot = ht_arena_get(d->arena, image_bytes(s, unit), ADMIT_TRIES, HT_NUMA_INDEX_ANY);
    if (slot != HT_SLOT_NONE)
        attach(s, unit, slot);
    return slot;
}

/* A prefetch takes free memory only. */
static bool prefetch_today(struct sim *s, uint32_t unit)
{
    struct today *d = s->own;
    uint32_t slot = HT_SLOT_NONE;

    if (ht_arena_free_slots(d->arena))
        slot = ht_arena_get(d->arena, image_bytes(s, unit), 0, HT_NUMA_INDEX_ANY);
    if (slot == HT_SLOT_NONE)
        return false;
    attach(s, unit, slot);
    return true;
}

static bool access_today(struct sim *s, uint32_t unit, uint32_t pos, enum sim_kind kind)
{
    struct today *d = s->own;

    (void)pos;
    if (kind == SIM_PREFETCH)
        return prefetch_today(s, unit);
    if (d->slot[unit] == HT_SLOT_NONE && kind == SIM_UPDATE)
        (void)admit_update(s, unit);
    else if (d->slot[unit] == HT_SLOT_NONE) {
        uint32_t slot = get_slot(s, image_bytes(s, unit));
        if (slot != HT_SLOT_NONE)
            attach(s, unit, slot);
    }
    if (d->slot[unit] == HT_SLOT_NONE)
        return false;
    ht_arena_use(d->arena, d->slot[unit]);
    if (kind == SIM_UPDATE && ht_arena_may_protect(d->arena, d->slot[unit]))
        ht_arena_protect(d->arena, d->slot[unit]);
    return true;
}

/* ------------------------------------------------------------- writeback */

/* Writes ahead while memory was short, as fast as the device takes it. */
static void relieve(struct sim *s)
{
    struct today *d = s->own;
    struct ht_dirty_walk walk = HT_DIRTY_WALK(ht_arena_is_short(d->arena), HT_NUMA_INDEX_ANY);
    uint32_t slot;

    while (ht_arena_under_pressure(d->arena) && sim_has_buffer(s, s->now) &&
           (slot = ht_dirty_walk_next(d->arena, &walk)) != HT_SLOT_NONE) {
        if (!ht_arena_presses(d->arena, slot, false))
            continue;
        uint64_t was = s->room_at; /* the writeback thread waits, not this one */
        sim_clean(s, unit_of(d, slot));
        s->room_at = was;
    }
}

static void changed_today(struct sim *s, uint32_t unit, bool dirty)
{
    struct today *d = s->own;

    if (d->slot[unit] == HT_SLOT_NONE)
        return;
    ht_arena_set_dirty(d->arena, d->slot[unit], dirty);
    if (dirty)
        relieve(s);
}

static void drop_today(struct sim *s, uint32_t unit)
{
    struct today *d = s->own;

    if (d->slot[unit] == HT_SLOT_NONE)
        return;
    sim_clean(s, unit);
    ht_arena_put(d->arena, d->slot[unit]);
    d->slot[unit] = HT_SLOT_NONE;
}

/* The commit timer. Models have commits of their own. */
static void tick_today(struct sim *s, uint64_t at)
{
    struct today *d = s->own;

    if (at < d->next_commit)
        return;
    d->next_commit = at + COMMIT_S * UINT64_C(1000000000);
    for (uint32_t i = 0; i < s->dirty_count; i++) {
        uint32_t unit = s->dirty[i];
        s->room_at = at;
        if (!s->trace->tensor[s->string->tensor[unit]].state_bytes)
            sim_clean(s, unit);
    }
}

const struct sim_policy sim_today = {
    .name = "today",
    .takes_hints = true,
    .start = start_today,
    .stop = stop_today,
    .access = access_today,
    .changed = changed_today,
    .drop = drop_today,
    .tick = tick_today,
};
