/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step_client.c - an optimizer outside the store, as `make bench-step` measures it beside hitrain.
 *
 *     step_client make    FOLDER BYTES ELEMENTS ARRAYS
 *     step_client step    FOLDER BYTES ELEMENTS ARRAYS STEPS KEPT DURABLE_EVERY
 *
 * FOLDER holds one file for each array (p, m, v and, with four, the gradient), all f32, in ranges of BYTES. A step
 * reads each range's arrays, updates them with hitrain's own AdamW kernel and writes them back; a gradient on the
 * device is written back, too, as the pattern of DeepSpeed's swapping is (the next backward pass would have written
 * it). Everything goes through Linux's asynchronous I/O with O_DIRECT, SLOTS ranges on their way at any time, so that
 * reads, arithmetic and writes overlap. The first KEPT ranges stay in memory, and are written
 * only in every DURABLE_EVERY-th step.
 *
 * Prints a line of JSON: seconds, and bytes read and written per step.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "optim/rules/rule.h"
#include "tiering/base/base.h"

enum { ARRAYS_MAX = 4, SLOTS = 8, P = 0, M, V, G };
static const char *const names[ARRAYS_MAX] = {"p", "m", "v", "g"};

struct slot {
    uint64_t range;
    uint8_t *array[ARRAYS_MAX];
    struct iocb iocb[ARRAYS_MAX];
    unsigned pending;
    bool busy, writing;
};

struct client {
    int fd[ARRAYS_MAX];
    unsigned arrays;
    uint64_t range_bytes, ranges, kept;
    aio_context_t aio;
    struct slot slot[SLOTS];
    uint8_t *cache; /* of the kept ranges */
    uint8_t *gradient;
    const struct ht_kernels *kernels;
    struct ht_scalars scalars;
    uint64_t read_bytes, written_bytes;
};

static void fail(const char *what)
{
    fprintf(stderr, "step_client: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint8_t *memory(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    if (p == MAP_FAILED)
        fail("memory");
    return p;
}

static uint64_t number(const char *text)
{
    return strtoull(text, NULL, 10);
}

static void open_arrays(struct client *c, const char *folder, int flags)
{
    char path[4096];

    for (unsigned a = 0; a < c->arrays; a++) {
        snprintf(path, sizeof(path), "%s/%s", folder, names[a]);
        c->fd[a] = open(path, flags | O_DIRECT, 0600);
        if (c->fd[a] < 0)
            fail(path);
    }
}

/* Writes every block once: the benchmark then overwrites, which is the least work for a file system. */
static void make_arrays(struct client *c)
{
    uint8_t *buf = memory(c->range_bytes);

    for (unsigned a = 0; a < c->arrays; a++) {
        for (uint64_t r = 0; r < c->ranges; r++)
            if (pwrite(c->fd[a], buf, c->range_bytes, (off_t)(r * c->range_bytes)) != (ssize_t)c->range_bytes)
                fail("writing an array");
        if (fsync(c->fd[a]))
            fail("fsync");
    }
}

/* ------------------------------------------------------------------ a step */

static void submit(struct client *c, struct slot *s, bool writing)
{
    struct iocb *list[ARRAYS_MAX];

    s->writing = writing;
    s->pending = c->arrays;
    for (unsigned a = 0; a < c->arrays; a++) {
        s->iocb[a] = (struct iocb){
            .aio_data = (uintptr_t)s,
            .aio_lio_opcode = writing ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
            .aio_fildes = (uint32_t)c->fd[a],
            .aio_buf = (uintptr_t)s->array[a],
            .aio_nbytes = c->range_bytes,
            .aio_offset = (int64_t)(s->range * c->range_bytes),
        };
        list[a] = &s->iocb[a];
    }
    if (syscall(SYS_io_submit, c->aio, (long)c->arrays, list) != (long)c->arrays)
        fail("io_submit");
    *(writing ? &c->written_bytes : &c->read_bytes) += c->arrays * c->range_bytes;
}

static void update(struct client *c, uint8_t *const array[ARRAYS_MAX])
{
    struct ht_update u = {
        .p = array[P],
        .state = {(float *)(void *)array[M], (float *)(void *)array[V]},
        .g = c->arrays > G ? array[G] : c->gradient,
        .p_dtype = HT_DTYPE_F32,
        .g_dtype = HT_DTYPE_F32,
    };

    c->kernels->fn[c->scalars.kernel](&c->scalars, &u, c->range_bytes / sizeof(float));
}

static void completed(struct client *c, const struct io_event *e)
{
    struct slot *s = (struct slot *)(uintptr_t)e->data;

    if (e->res != (int64_t)c->range_bytes) {
        errno = e->res < 0 ? (int)-e->res : EIO;
        fail("a transfer");
    }
    if (--s->pending)
        return;
    if (s->writing) {
        s->busy = false;
        return;
    }
    update(c, s->array);
    submit(c, s, true);
}

static void reap(struct client *c)
{
    struct io_event events[SLOTS * ARRAYS_MAX];
    long n = syscall(SYS_io_getevents, c->aio, 1L, (long)HT_ARRAY_SIZE(events), events, NULL);

    if (n < 0)
        fail("io_getevents");
    for (long i = 0; i < n; i++)
        completed(c, &events[i]);
}

static struct slot *free_slot(struct client *c)
{
    for (;;) {
        for (unsigned i = 0; i < SLOTS; i++)
            if (!c->slot[i].busy)
                return &c->slot[i];
        reap(c);
    }
}

static bool any_busy(const struct client *c)
{
    for (unsigned i = 0; i < SLOTS; i++)
        if (c->slot[i].busy)
            return true;
    return false;
}

/* A kept range: no read; written from a copy when the step is a durable one. */
static void kept_range(struct client *c, uint64_t range, bool durable)
{
    uint8_t *array[ARRAYS_MAX];

    for (unsigned a = 0; a < c->arrays; a++)
        array[a] = c->cache + (range * c->arrays + a) * c->range_bytes;
    update(c, array);
    if (!durable)
        return;
    struct slot *s = free_slot(c);
    for (unsigned a = 0; a < c->arrays; a++)
        memcpy(s->array[a], array[a], c->range_bytes);
    s->range = range;
    s->busy = true;
    submit(c, s, true);
}

static void one_step(struct client *c, bool durable)
{
    for (uint64_t r = 0; r < c->ranges; r++) {
        if (r < c->kept) {
            kept_range(c, r, durable);
            continue;
        }
        struct slot *s = free_slot(c);
        s->range = r;
        s->busy = true;
        submit(c, s, false);
    }
    while (any_busy(c))
        reap(c);
}

static void prepare(struct client *c)
{
    struct ht_optim_config config = ht_rule_of(HT_RULE_ADAMW)->defaults;

    if (syscall(SYS_io_setup, (long)(SLOTS * ARRAYS_MAX), &c->aio))
        fail("io_setup");
    for (unsigned i = 0; i < SLOTS; i++)
        for (unsigned a = 0; a < c->arrays; a++)
            c->slot[i].array[a] = memory(c->range_bytes);
    if (c->kept)
        c->cache = memory(c->kept * c->arrays * c->range_bytes);
    c->gradient = memory(c->range_bytes);
    c->kernels = ht_kernels_choose();
    ht_rule_scalars(&config, 10, &c->scalars);
}

static void run_steps(struct client *c, uint64_t steps, uint64_t durable_every)
{
    uint64_t began = ht_now_ns();

    for (uint64_t n = 1; n <= steps; n++)
        one_step(c, n % durable_every == 0);
    double seconds = (double)(ht_now_ns() - began) * 1e-9;
    printf("{\"seconds\": %.6f, \"steps\": %llu, \"read_bytes\": %llu, \"written_bytes\": %llu}\n", seconds,
           (unsigned long long)steps, (unsigned long long)c->read_bytes, (unsigned long long)c->written_bytes);
}

int main(int argc, char **argv)
{
    static struct client c;
    bool make = argc == 6 && strcmp(argv[1], "make") == 0;

    if (!make && (argc != 9 || strcmp(argv[1], "step") != 0)) {
        fprintf(stderr,
                "usage: step_client make FOLDER BYTES ELEMENTS ARRAYS\n"
                "       step_client step FOLDER BYTES ELEMENTS ARRAYS STEPS KEPT DURABLE_EVERY\n");
        return 2;
    }
    c.range_bytes = number(argv[3]);
    c.ranges = number(argv[4]) * sizeof(float) / c.range_bytes;
    c.arrays = (unsigned)number(argv[5]);
    if (c.arrays <= V || c.arrays > ARRAYS_MAX || c.ranges == 0) {
        fprintf(stderr, "step_client: three or four arrays, and at least one range\n");
        return 2;
    }
    open_arrays(&c, argv[2], make ? O_RDWR | O_CREAT | O_TRUNC : O_RDWR);
    if (make) {
        make_arrays(&c);
        return 0;
    }
    c.kept = ht_min_u64(number(argv[7]), c.ranges);
    prepare(&c);
    run_steps(&c, number(argv[6]), number(argv[8]));
    return 0;
}
