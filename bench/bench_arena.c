/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_arena.c - nanoseconds of one request for an image, by the size of the tier and by what fills it. The tier's
 * memory is mapped and never touched, so a small machine can run it with a large tier.
 *
 *     bench_arena [GIB...]     (default: 1 8 64 512)
 */
#include <stdio.h>
#include <stdlib.h>

#include "bench/no_memory.h"
#include "tiering/base/lock.h"
#include "tiering/cache/arena.h"

enum { REQUESTS = 2000, ROUNDS = 9, SIZES_MAX = 16 };

static struct ht_arena *arena;
static uint64_t images;
static int owner;

static bool evict(void *ctx, uint32_t slot)
{
    (void)ctx;
    return !ht_arena_image(arena, slot)->dirty;
}

static uint32_t get(uint32_t bytes)
{
    uint32_t n = ht_arena_get(arena, bytes, HT_ARENA_ASK_ALL, HT_NUMA_INDEX_ANY);

    if (n != HT_SLOT_NONE) {
        ht_arena_attach(arena, n, &owner, images++, true);
        ht_arena_image(arena, n)->referenced = false;
    }
    return n;
}

/* One request; the previous state comes back. */
typedef void (*request_fn)(uint32_t bytes);

static void find_free(uint32_t bytes)
{
    ht_arena_put(arena, get(bytes));
}

static void evict_clean(uint32_t bytes)
{
    if (get(bytes) == HT_SLOT_NONE)
        abort();
}

static void find_none(uint32_t bytes)
{
    if (get(bytes) != HT_SLOT_NONE)
        abort();
}

/* Writeback takes the oldest dirty image and cleans it; the request evicts it; the new image becomes dirty. */
static void clean_and_evict(uint32_t bytes)
{
    struct ht_dirty_walk walk = HT_DIRTY_WALK(false, HT_NUMA_INDEX_ANY);
    uint32_t n = ht_dirty_walk_next(arena, &walk);

    ht_arena_set_dirty(arena, n, false);
    n = get(bytes);
    if (n == HT_SLOT_NONE)
        abort();
    ht_arena_set_dirty(arena, n, true);
}

/* Of 16 images so many are dirty. */
static const struct state {
    const char *name;
    bool full, used;
    unsigned dirty;
    request_fn request;
} states[] = {
    {"free", false, false, 0, find_free},
    {"all clean", true, false, 0, evict_clean},
    {"all clean and used of late", true, true, 0, evict_clean},
    {"all dirty: no room", true, false, 16, find_none},
    {"all dirty: the oldest is cleaned", true, false, 16, clean_and_evict},
    {"15 of 16 dirty", true, false, 15, evict_clean},
};

static void fill(const struct state *st, uint32_t bytes)
{
    uint32_t n;

    for (uint64_t i = 0; st->full && (n = ht_arena_get(arena, bytes, 0, HT_NUMA_INDEX_ANY)) != HT_SLOT_NONE; i++) {
        ht_arena_attach(arena, n, &owner, images++, true);
        ht_arena_image(arena, n)->referenced = st->used;
        ht_arena_set_dirty(arena, n, i % 16 < st->dirty);
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The median of some rounds. */
static double measure(const struct state *st, uint32_t bytes)
{
    double ns[ROUNDS];

    for (unsigned r = 0; r < ROUNDS; r++) {
        uint64_t begin = ht_now_ns();
        for (unsigned i = 0; i < REQUESTS; i++)
            st->request(bytes);
        ns[r] = (double)(ht_now_ns() - begin) / REQUESTS;
    }
    qsort(ns, ROUNDS, sizeof(ns[0]), by_value);
    return ns[ROUNDS / 2];
}

static int run(uint64_t gib, uint32_t bytes)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(states); i++) {
        if (ht_arena_new(gib << 30, NULL, evict, NULL, &arena)) {
            fprintf(stderr, "bench_arena: no memory for the descriptors of %llu GiB\n", (unsigned long long)gib);
            return 1;
        }
        fill(&states[i], bytes);
        printf("%6llu GiB  %5u KiB  %-34s %8.0f ns\n", (unsigned long long)gib, bytes >> 10, states[i].name,
               measure(&states[i], bytes));
        fflush(stdout);
        ht_arena_free(arena);
    }
    return 0;
}

int main(int argc, char **argv)
{
    uint64_t gib[SIZES_MAX] = {1, 8, 64, 512};
    int n = argc > 1 ? argc - 1 : 4, rc = 0;

    for (int i = 1; i < argc && i <= SIZES_MAX; i++)
        gib[i - 1] = strtoull(argv[i], NULL, 10);
    for (int i = 0; i < n && i < SIZES_MAX && !rc; i++) {
        rc = run(gib[i], 1 << 20);
        if (!rc)
            rc = run(gib[i], 1 << 16);
    }
    return rc;
}
