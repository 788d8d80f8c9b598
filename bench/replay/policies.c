/* SPDX-License-Identifier: Apache-2.0 */
/*
 * policies.c - policies to compare with: all in DRAM, the least recently used unit goes, and Belady's.
 *
 * Belady's policy knows the future: the unit that is needed last goes, or does not come in. With units of one size no
 * other policy has more hits, for a unit that was prefetched is none.
 */
#include <stdlib.h>

#include "bench/replay/sim.h"

/* ------------------------------------------------------------------- ideal */

static int start_ideal(struct sim *s)
{
    (void)s;
    return 0;
}

static void stop_ideal(struct sim *s)
{
    (void)s;
}

static bool access_ideal(struct sim *s, uint32_t unit, uint32_t pos, enum sim_kind kind)
{
    (void)s;
    (void)unit;
    (void)pos;
    (void)kind;
    return true;
}

const struct sim_policy sim_ideal = {
    .name = "ideal",
    .unlimited = true,
    .takes_hints = true,
    .start = start_ideal,
    .stop = stop_ideal,
    .access = access_ideal,
};

/* --------------------------------------------------------------------- LRU */

/* A circle of units, the head's next is the oldest. */
struct lru {
    uint64_t used_bytes;
    struct place {
        uint32_t next, before;
    } place[]; /* by unit, and the head */
};

static void link_newest(struct sim *s, uint32_t unit)
{
    struct lru *l = s->own;
    uint32_t head = s->string->units, newest = l->place[head].before;

    l->place[unit] = (struct place){head, newest};
    l->place[newest].next = unit;
    l->place[head].before = unit;
    l->used_bytes += sim_unit_bytes(s->string, unit);
}

static void unlink_unit(struct sim *s, uint32_t unit)
{
    struct lru *l = s->own;

    l->place[l->place[unit].before].next = l->place[unit].next;
    l->place[l->place[unit].next].before = l->place[unit].before;
    l->used_bytes -= sim_unit_bytes(s->string, unit);
}

static int start_lru(struct sim *s)
{
    uint32_t head = s->string->units;
    struct lru *l = calloc(1, sizeof(*l) + (head + 1) * sizeof(l->place[0]));

    if (!l)
        return -ENOMEM;
    l->place[head] = (struct place){head, head};
    s->own = l;
    return 0;
}

static void stop_own(struct sim *s)
{
    free(s->own);
}

static bool access_lru(struct sim *s, uint32_t unit, uint32_t pos, enum sim_kind kind)
{
    struct lru *l = s->own;
    uint64_t bytes = sim_unit_bytes(s->string, unit);

    (void)pos;
    (void)kind;
    if (s->unit[unit].resident)
        unlink_unit(s, unit);
    if (bytes > s->config->dram_bytes)
        return false;
    while (l->used_bytes + bytes > s->config->dram_bytes) {
        uint32_t oldest = l->place[s->string->units].next;
        unlink_unit(s, oldest);
        sim_evict(s, oldest);
    }
    link_newest(s, unit);
    return true;
}

const struct sim_policy sim_lru = {
    .name = "lru",
    .takes_hints = true,
    .start = start_lru,
    .stop = stop_own,
    .access = access_lru,
    .drop = unlink_unit,
};

/* ------------------------------------------------------------------ Belady */

struct need {
    uint32_t at, unit;
};

/* Resident units by their next access, the last one first. Entries of accesses that were stay until they come up. */
struct belady {
    uint64_t used_bytes;
    uint32_t *next; /* by unit: its next access */
    struct need *heap;
    uint32_t count, room;
};

static void sift_down(struct belady *b, uint32_t i)
{
    struct need n = b->heap[i];

    for (uint32_t child; (child = 2 * i + 1) < b->count; i = child) {
        child += child + 1 < b->count && b->heap[child + 1].at > b->heap[child].at;
        if (b->heap[child].at <= n.at)
            break;
        b->heap[i] = b->heap[child];
    }
    b->heap[i] = n;
}

static bool is_current(const struct sim *s, struct need n)
{
    const struct belady *b = s->own;

    return s->unit[n.unit].resident && b->next[n.unit] == n.at;
}

/* Drops entries that are not current. Half of the room is free then: there is room for two entries a unit. */
static void tidy(struct sim *s)
{
    struct belady *b = s->own;
    uint32_t kept = 0;

    for (uint32_t i = 0; i < b->count; i++)
        if (is_current(s, b->heap[i]))
            b->heap[kept++] = b->heap[i];
    b->count = kept;
    for (uint32_t i = kept / 2; i-- > 0;)
        sift_down(b, i);
}

static void push(struct sim *s, struct need n)
{
    struct belady *b = s->own;
    uint32_t i;

    if (b->count == b->room)
        tidy(s);
    for (i = b->count++; i > 0 && b->heap[(i - 1) / 2].at < n.at; i = (i - 1) / 2)
        b->heap[i] = b->heap[(i - 1) / 2];
    b->heap[i] = n;
}

/* The resident unit that is needed last; SIM_NEVER: there is none. It stays in the heap. */
static uint32_t needed_last(struct sim *s)
{
    struct belady *b = s->own;

    while (b->count && !is_current(s, b->heap[0])) {
        b->heap[0] = b->heap[--b->count];
        if (b->count)
            sift_down(b, 0);
    }
    return b->count ? b->heap[0].unit : SIM_NEVER;
}

static void stop_belady(struct sim *s)
{
    struct belady *b = s->own;

    free(b->next);
    free(b->heap);
    free(b);
}

static int start_belady(struct sim *s)
{
    struct belady *b = calloc(1, sizeof(*b));

    if (!b)
        return -ENOMEM;
    b->room = 4 * s->string->units + 4;
    b->next = calloc(s->string->units + 1, sizeof(*b->next));
    b->heap = calloc(b->room, sizeof(*b->heap));
    s->own = b;
    if (b->next && b->heap)
        return 0;
    stop_belady(s);
    return -ENOMEM;
}

/* Equal needs: the one that is there stays. */
static bool make_room(struct sim *s, uint64_t bytes, uint32_t next)
{
    struct belady *b = s->own;

    while (b->used_bytes + bytes > s->config->dram_bytes) {
        uint32_t last = needed_last(s);
        if (last == SIM_NEVER || b->next[last] <= next)
            return false;
        b->used_bytes -= sim_unit_bytes(s->string, last);
        sim_evict(s, last);
    }
    return true;
}

static bool access_belady(struct sim *s, uint32_t unit, uint32_t pos, enum sim_kind kind)
{
    struct belady *b = s->own;
    uint64_t bytes = sim_unit_bytes(s->string, unit);

    (void)kind;
    b->next[unit] = s->string->next[pos];
    if (!s->unit[unit].resident) {
        if (b->next[unit] == SIM_NEVER || !make_room(s, bytes, b->next[unit]))
            return false;
        b->used_bytes += bytes;
        s->unit[unit].resident = true;
    }
    push(s, (struct need){b->next[unit], unit});
    return true;
}

const struct sim_policy sim_belady = {
    .name = "belady",
    .start = start_belady,
    .stop = stop_belady,
    .access = access_belady,
};
