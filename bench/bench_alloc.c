/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_alloc.c - nanoseconds of processor time of one allocation, by the size of the device, by how full it is and by
 * what is free, and the memory that the map takes.
 *
 *     bench_alloc [TIB...]     (default: 1 15, at most 16)
 */
#include <stdio.h>
#include <stdlib.h>

#include "tiering/base/base.h"
#include "tiering/space/alloc.h"

enum { GROUP = 256, REQUESTS = 500, ROUNDS = 9, SIZES_MAX = 16 };

/* In each group of `every` there are `runs` free runs of so many blocks, with as many taken blocks between them. */
static const struct state {
    const char *name;
    unsigned every, runs, blocks;
} states[] = {
    {"0 % full", 0, 0, 0},
    {"50 %: every second MiB is free", 2, 1, GROUP},
    {"50 %: runs of 32 KiB, one TiB of them", 1, 16, 8},
    {"90 %: 104 KiB in each MiB", 1, 1, 26},
    {"97 %: 32 KiB in each MiB", 1, 1, 8},
    {"99.9 %: 32 KiB in each 32 MiB", 32, 1, 8},
    {"99.9 %: single blocks, 4 in each 16 MiB", 16, 4, 1},
    {"99.9 %: 1 MiB in each GiB", 1024, 1, GROUP},
};
static const uint32_t sizes[] = {1, 16, 64, 180, 256};

static struct ht_alloc *alloc;

static void mark(uint64_t block, uint64_t blocks)
{
    const struct ht_extent e = {block, (uint32_t)blocks, 0};

    if (blocks && ht_alloc_mark(alloc, &e))
        abort();
}

static void fill_group(const struct state *st, uint64_t group)
{
    uint64_t at = group * GROUP;

    if (group % st->every) {
        mark(at, GROUP);
        return;
    }
    for (unsigned i = 0; i < st->runs && st->blocks < GROUP; i++) {
        uint64_t next = i + 1 < st->runs ? at + 2 * st->blocks : (group + 1) * GROUP;
        mark(at + st->blocks, next - at - st->blocks);
        at = next;
    }
}

/* Many runs in each group take long to make: beyond the first TiB the device is full then. */
static void fill(const struct state *st, uint64_t groups)
{
    uint64_t shaped = st->runs > 4 ? ht_min_u64(groups, 1 << 20) : groups;

    for (uint64_t g = 0; st->every && g < shaped; g++)
        fill_group(st, g);
    for (uint64_t g = shaped; g < groups; g++)
        mark(g * GROUP, GROUP);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The median of some rounds; the blocks come back after each of them. */
static double measure(uint32_t blocks, double *out_runs)
{
    static struct ht_extent e[REQUESTS][HT_FRAGS_MAX];
    double ns[ROUNDS];
    int n[REQUESTS];

    for (unsigned r = 0; r < ROUNDS; r++) {
        uint64_t runs = 0, begin = ht_thread_cpu_ns();
        for (unsigned i = 0; i < REQUESTS; i++) {
            if (ht_alloc_reserve(alloc, blocks) || (n[i] = ht_alloc_take(alloc, blocks, HT_ALLOC_HINT_NONE, e[i])) < 0)
                abort();
            runs += (unsigned)n[i];
        }
        ns[r] = (double)(ht_thread_cpu_ns() - begin) / REQUESTS;
        *out_runs = (double)runs / REQUESTS;
        for (unsigned i = 0; i < REQUESTS; i++) {
            ht_alloc_untake(alloc, e[i], n[i]);
            ht_alloc_unreserve(alloc, blocks);
        }
    }
    qsort(ns, ROUNDS, sizeof(ns[0]), by_value);
    return ns[ROUNDS / 2];
}

static int run(uint64_t tib, const struct state *st)
{
    uint64_t blocks = (tib << 40) / HT_BLOCK_BYTES;

    if (ht_alloc_new(1, &blocks, &alloc)) {
        fprintf(stderr, "bench_alloc: no memory for the map of %llu TiB\n", (unsigned long long)tib);
        return 1;
    }
    fill(st, blocks / GROUP);
    for (size_t i = 0; i < HT_ARRAY_SIZE(sizes); i++) {
        double runs, ns = measure(sizes[i], &runs);
        printf("%3llu TiB  %-42s %4u KiB  %7.0f ns  %6.1f runs  %5.1f bytes per MiB\n", (unsigned long long)tib,
               st->name, sizes[i] * 4, ns, runs, (double)ht_alloc_meta_bytes(alloc) / (double)(blocks / GROUP));
        fflush(stdout);
    }
    ht_alloc_free(alloc);
    return 0;
}

int main(int argc, char **argv)
{
    uint64_t tib[SIZES_MAX] = {1, 15};
    int n = argc > 1 ? argc - 1 : 2, rc = 0;

    for (int i = 1; i < argc && i <= SIZES_MAX; i++)
        tib[i - 1] = strtoull(argv[i], NULL, 10);
    for (int i = 0; i < n && i < SIZES_MAX; i++)
        for (size_t s = 0; s < HT_ARRAY_SIZE(states) && !rc; s++)
            rc = run(tib[i], &states[s]);
    return rc;
}
