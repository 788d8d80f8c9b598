/* SPDX-License-Identifier: Apache-2.0 */
/* bench_copy.c - copies of memory, by several threads. See bench.h. */
#include "mount-helpers/ctl/bench.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { THREADS_MAX = 64, PIECE_BYTES = 1 << 20 };
/* Together larger than the caches of a processor, and small beside its memory. */
#define ALL_BYTES (256 * HT_MIB)
#define AREA_BYTES_MIN (4 * HT_MIB)
#define AREA_BYTES_MAX (64 * HT_MIB)

struct copier {
    pthread_t thread;
    uint8_t *from, *to; /* each has area bytes */
    uint64_t area, ns, bytes, took_ns;
};

static void *copy(void *arg)
{
    struct copier *c = arg;
    uint64_t at = 0, began = ht_now_ns(), now = began;

    for (; now - began < c->ns; now = ht_now_ns()) {
        memcpy(c->to + at, c->from + at, PIECE_BYTES);
        __asm__ volatile("" : : "r"(c->to) : "memory"); /* so that the compiler keeps the copy */
        c->bytes += PIECE_BYTES;
        at = (at + PIECE_BYTES) % c->area;
    }
    c->took_ns = now - began;
    return NULL;
}

static bool prepare(struct copier *c, uint64_t area, uint64_t ns)
{
    *c = (struct copier){.area = area, .ns = ns};
    c->from = mmap(NULL, 2 * area, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (c->from == MAP_FAILED)
        return false;
    memset(c->from, 1, 2 * area);
    c->to = c->from + area;
    return true;
}

int ht_bench_copy(unsigned threads, uint64_t ns, struct ht_bench_result *out)
{
    struct copier c[THREADS_MAX];
    unsigned ready = 0, made = 0;

    *out = (struct ht_bench_result){0};
    threads = threads > THREADS_MAX ? THREADS_MAX : threads;
    uint64_t area = ht_round_up(ht_min_u64(ht_max_u64(ALL_BYTES / threads, AREA_BYTES_MIN), AREA_BYTES_MAX), HT_MIB);
    while (ready < threads && prepare(&c[ready], area, ns))
        ready++;
    while (ready == threads && made < threads && pthread_create(&c[made].thread, NULL, copy, &c[made]) == 0)
        made++;
    for (unsigned i = 0; i < made; i++) {
        pthread_join(c[i].thread, NULL);
        out->bytes += c[i].bytes;
        out->requests += c[i].bytes / PIECE_BYTES;
        out->ns = ht_max_u64(out->ns, c[i].took_ns);
    }
    for (unsigned i = 0; i < ready; i++)
        munmap(c[i].from, 2 * area);
    return made == threads ? 0 : ready < threads ? -ENOMEM : -EAGAIN;
}
