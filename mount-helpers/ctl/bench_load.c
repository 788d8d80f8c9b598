/* SPDX-License-Identifier: Apache-2.0 */
/* bench_load.c - one load on a file or device, by io_uring. See bench.h. */
#include "mount-helpers/ctl/bench.h"

#include <liburing.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { ANSWER_S = 30, TIMES_MAX = 1 << 18 };

struct slot {
    void *memory;
    uint64_t sent_ns;
};

struct load {
    const struct ht_bench_load *l;
    struct ht_bench_result *out;
    struct io_uring ring;
    struct slot slot[HT_BENCH_DEPTH_MAX];
    uint64_t blocks, next, end_ns, sum_ns;
    uint64_t seed;
    unsigned in_flight;
    uint32_t *time_us; /* of the first TIMES_MAX requests */
    int rc;            /* the first error */
};

/* xorshift64 */
static uint64_t next_random(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

static bool is_over(const struct load *r, uint64_t now_ns)
{
    return r->rc < 0 || now_ns >= r->end_ns || (r->l->once && r->next == r->blocks);
}

/* The ring has as many places as there are slots, so there is one. */
static void request(struct load *r, unsigned i)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring);
    uint64_t block = r->l->random ? next_random(&r->seed) % r->blocks : r->next % r->blocks;
    uint64_t offset = block * r->l->block_bytes;

    r->next++;
    if (r->l->write)
        io_uring_prep_write(sqe, r->l->fd, r->slot[i].memory, r->l->block_bytes, offset);
    else
        io_uring_prep_read(sqe, r->l->fd, r->slot[i].memory, r->l->block_bytes, offset);
    io_uring_sqe_set_data64(sqe, i);
    r->slot[i].sent_ns = ht_now_ns();
    r->in_flight++;
}

static void take(struct load *r, struct io_uring_cqe *cqe)
{
    unsigned i = (unsigned)io_uring_cqe_get_data64(cqe);
    int n = cqe->res;
    uint64_t now = ht_now_ns(), took = now - r->slot[i].sent_ns;

    io_uring_cqe_seen(&r->ring, cqe);
    r->in_flight--;
    if (n < (int)r->l->block_bytes) {
        r->rc = r->rc ? r->rc : n < 0 ? n : -ENODATA;
        return;
    }
    if (r->out->requests < TIMES_MAX)
        r->time_us[r->out->requests] = (uint32_t)ht_min_u64(took / 1000, UINT32_MAX);
    r->out->requests++;
    r->out->bytes += (uint64_t)n;
    r->sum_ns += took;
    if (!is_over(r, now))
        request(r, i);
}

static int go(struct load *r)
{
    struct __kernel_timespec patience = {.tv_sec = ANSWER_S};
    struct io_uring_cqe *cqe;
    uint64_t began = ht_now_ns();

    r->end_ns = began + r->l->ns;
    for (unsigned i = 0; i < r->l->depth && !is_over(r, began); i++)
        request(r, i);
    while (r->in_flight) {
        int rc = io_uring_submit(&r->ring);
        if (rc >= 0)
            rc = io_uring_wait_cqe_timeout(&r->ring, &cqe, &patience);
        if (rc == -EINTR || rc == -EAGAIN)
            continue;
        if (rc < 0)
            return rc == -ETIME ? -ETIMEDOUT : rc;
        take(r, cqe);
    }
    r->out->ns = ht_now_ns() - began;
    return r->rc;
}

static int compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

static void summarize(struct load *r)
{
    uint64_t n = ht_min_u64(r->out->requests, TIMES_MAX);

    if (n == 0)
        return;
    qsort(r->time_us, n, sizeof(*r->time_us), compare);
    r->out->mean_ns = r->sum_ns / r->out->requests;
    r->out->p99_ns = (uint64_t)r->time_us[n - 1 - n / 100] * 1000;
}

/* Content that no codec makes smaller. */
static void fill(struct load *r, uint64_t *memory, size_t bytes)
{
    for (size_t i = 0; i < bytes / sizeof(*memory); i++)
        memory[i] = next_random(&r->seed);
}

int ht_bench_run(const struct ht_bench_load *l, struct ht_bench_result *out)
{
    struct load r = {.l = l, .out = out, .seed = 88172645463325252u, .blocks = l->range_bytes / l->block_bytes};
    size_t bytes = (size_t)l->depth * l->block_bytes;
    uint8_t *memory;
    int rc;

    *out = (struct ht_bench_result){0};
    if (r.blocks == 0)
        return -ENODATA;
    r.time_us = malloc(TIMES_MAX * sizeof(*r.time_us));
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    rc = r.time_us && memory != MAP_FAILED ? io_uring_queue_init(l->depth, &r.ring, 0) : -ENOMEM;
    if (rc == 0) {
        for (unsigned i = 0; i < l->depth; i++)
            r.slot[i].memory = memory + (size_t)i * l->block_bytes;
        if (l->write)
            fill(&r, (uint64_t *)(void *)memory, bytes);
        rc = go(&r);
        if (rc == 0)
            summarize(&r);
        if (!r.in_flight)
            io_uring_queue_exit(&r.ring);
    }
    if (memory != MAP_FAILED && !r.in_flight) /* the kernel may still write into it */
        munmap(memory, bytes);
    free(r.time_us);
    return rc;
}

double ht_bench_rate(const struct ht_bench_result *r)
{
    return r->ns ? (double)r->bytes * 1e9 / (double)r->ns : 0;
}
