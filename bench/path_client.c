/* SPDX-License-Identifier: Apache-2.0 */
/*
 * path_client.c - a reader and writer of whole tensors, as `make bench-path` uses it on every file system alike.
 *
 *     path_client WAY FOLDER [WORD=VALUE]...
 *
 * WAY: make (create and write), write (over the present content), read, step (read and write back each tensor, one
 * after the other, as DeepSpeed's swapping does when it is not pipelined), random (4 KiB reads at random places of one
 * tensor, the next when the last has come), prefetch (name each tensor to FOLDER/.hitrain/ctl), copy (memcpy of as
 * much; FOLDER is not used).
 *
 *     bytes=N files=N    tensors t0, t1, ... of so many bytes
 *     direct=0           through the page cache, 1 MiB at a time; else O_DIRECT by Linux's asynchronous I/O, blocks of
 *                        1 MiB, DEPTH in flight, a tensor opened and closed for each transfer
 *     hold=1             tensors are opened, and mapped, before the time begins
 *     map=1              read from a mapping, which is shared
 *     clients=N one=1    threads; with one, pieces of 8 MiB of the tensor t0 are shared among them, else tensors are
 *     memory=N           buffers of all threads together with O_DIRECT, used in turn; 8 MiB each if that is more
 *     shuffle=SEED       another order than by number; 0: none
 *     skew=N             buffers begin N bytes after a page
 *     rate=N             of all clients, in bytes per second; 0: as fast as it goes
 *     laps=N             how often all tensors
 *     ops=N              of random
 *     sync=PATH          at the end make all writes durable, by fsync and syncfs of PATH; counted
 *
 * Prints a line of JSON: seconds, bytes, processor seconds of this process; of random the
 * median and the 99th percentile, too.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 1 << 20, DEPTH = 8, PIECE = 8 << 20, SMALL = 4096, CLIENTS_MAX = 64 };

static const char *way, *folder, *sync_path = "";
static uint64_t bytes = 8 << 20, files = 1, direct = 1, clients = 1, one, hold, map, shuffle, skew, rate, laps = 1,
                ops = 1000, memory_bytes;
static uint64_t *order; /* of units: tensors, or pieces of one */
static uint64_t units;
static uint64_t *latency_ns;

struct tensor {
    int fd;
    uint8_t *mapped;
};
static struct tensor *held; /* by unit */

struct client {
    pthread_t thread;
    unsigned number;
    int ctl;
    uint8_t *buf;         /* turns of DEPTH blocks */
    uint64_t turn[DEPTH]; /* of each block */
    aio_context_t aio;
    uint64_t moved;
};

static void fail(const char *what)
{
    fprintf(stderr, "path_client: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static bool is(const char *name)
{
    return strcmp(way, name) == 0;
}

/* -------------------------------------------------------------- transfers */

static uint64_t turns(void)
{
    uint64_t each = memory_bytes / clients / BLOCK / DEPTH;

    return each ? each : 1;
}

/* One transfer of each block, DEPTH in flight. */
static void transfer_direct(struct client *c, int fd, bool writing, uint64_t at, uint64_t end)
{
    struct iocb iocb[DEPTH], *p;
    struct io_event event[DEPTH];
    unsigned free_list[DEPTH], free_count = DEPTH;

    for (unsigned i = 0; i < DEPTH; i++)
        free_list[i] = i;
    while (at < end || free_count < DEPTH) {
        while (at < end && free_count > 0) {
            unsigned i = free_list[--free_count];
            uint64_t n = end - at < BLOCK ? end - at : BLOCK;
            iocb[i] = (struct iocb){
                .aio_data = i,
                .aio_lio_opcode = writing ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
                .aio_fildes = (uint32_t)fd,
                .aio_buf = (uintptr_t)c->buf + (c->turn[i]++ % turns() * DEPTH + i) * BLOCK,
                .aio_nbytes = n,
                .aio_offset = (int64_t)at,
            };
            p = &iocb[i];
            if (syscall(SYS_io_submit, c->aio, 1L, &p) != 1)
                fail("io_submit");
            at += n;
        }
        long got = syscall(SYS_io_getevents, c->aio, 1L, (long)DEPTH, event, NULL);

        for (long k = 0; k < got; k++) {
            if (event[k].res != (int64_t)iocb[event[k].data].aio_nbytes) {
                errno = event[k].res < 0 ? (int)-event[k].res : EIO;
                fail("a transfer");
            }
            free_list[free_count++] = (unsigned)event[k].data;
        }
    }
}

static void transfer_buffered(struct client *c, int fd, bool writing, uint64_t at, uint64_t end)
{
    while (at < end) {
        uint64_t n = end - at < BLOCK ? end - at : BLOCK;
        ssize_t rc = writing ? pwrite(fd, c->buf, n, (off_t)at) : pread(fd, c->buf, n, (off_t)at);
        if (rc <= 0)
            fail(writing ? "write" : "read");
        at += (uint64_t)rc;
    }
}

static void transfer_mapped(struct client *c, const uint8_t *mapped, uint64_t at, uint64_t end)
{
    for (; at < end; at += BLOCK) {
        memcpy(c->buf, mapped + at, end - at < BLOCK ? end - at : BLOCK);
        __asm__ volatile("" ::: "memory");
    }
}

static struct tensor open_tensor(uint64_t unit, bool writing)
{
    int flags = (writing ? O_WRONLY : O_RDONLY) | (direct ? O_DIRECT : 0) | (is("make") ? O_CREAT : 0);
    struct tensor t = {0};
    char path[4096];

    snprintf(path, sizeof(path), "%s/t%llu", folder, (unsigned long long)(one ? 0 : unit));
    t.fd = open(path, flags, 0600);
    if (t.fd < 0)
        fail(path);
    if (map)
        t.mapped = mmap(NULL, bytes, PROT_READ, MAP_SHARED, t.fd, 0);
    if (t.mapped == MAP_FAILED)
        fail(path);
    return t;
}

static void close_tensor(struct tensor t)
{
    if (t.mapped)
        munmap(t.mapped, bytes);
    if (close(t.fd))
        fail("close");
}

/* One open and close for each transfer, if they are not held. */
static void transfer(struct client *c, uint64_t unit, bool writing)
{
    uint64_t begin = one ? unit * PIECE : 0, end = one && begin + PIECE < bytes ? begin + PIECE : bytes;
    struct tensor t = held ? held[unit] : open_tensor(unit, writing);

    if (t.mapped)
        transfer_mapped(c, t.mapped, begin, end);
    else
        (direct ? transfer_direct : transfer_buffered)(c, t.fd, writing, begin, end);
    if (!held)
        close_tensor(t);
    c->moved += end - begin;
}

static void prefetch(struct client *c, uint64_t unit)
{
    char line[64];
    int n = snprintf(line, sizeof(line), "prefetch t%llu\n", (unsigned long long)unit);

    if (write(c->ctl, line, (size_t)n) != n)
        fail(line);
    c->moved += bytes;
}

static void copy_memory(struct client *c)
{
    uint8_t *to = c->buf + DEPTH / 2 * BLOCK;

    for (uint64_t at = 0; at < bytes * files; at += BLOCK) {
        memcpy(to + at / BLOCK % (DEPTH / 2) * BLOCK, c->buf + at / BLOCK % (DEPTH / 2) * BLOCK, BLOCK);
        __asm__ volatile("" ::: "memory");
    }
    c->moved = bytes * files;
}

static void read_at_random(struct client *c)
{
    uint64_t state = shuffle ? shuffle : 1;
    char path[4096];

    snprintf(path, sizeof(path), "%s/t0", folder);
    int fd = open(path, O_RDONLY | (direct ? O_DIRECT : 0));
    if (fd < 0)
        fail(path);
    for (uint64_t i = 0; i < ops; i++) {
        uint64_t began = now_ns();
        if (pread(fd, c->buf, SMALL, (off_t)(next_random(&state) % (bytes / SMALL) * SMALL)) != SMALL)
            fail("read");
        latency_ns[i] = now_ns() - began;
    }
    close(fd);
    c->moved = ops * SMALL;
}

static void hold_to_rate(const struct client *c, uint64_t began)
{
    uint64_t due = began + (rate ? c->moved * clients * 1000000000u / rate : 0), now = now_ns();

    if (now < due)
        usleep((useconds_t)((due - now) / 1000));
}

static void *work(void *arg)
{
    struct client *c = arg;
    uint64_t began = now_ns();

    if (is("copy"))
        copy_memory(c);
    else if (is("random"))
        read_at_random(c);
    else
        for (uint64_t i = c->number; i < units * laps; i += clients) {
            if (is("prefetch"))
                prefetch(c, order[i % units]);
            if (is("read") || is("step"))
                transfer(c, order[i % units], false);
            if (is("make") || is("write") || is("step"))
                transfer(c, order[i % units], true);
            hold_to_rate(c, began);
        }
    return NULL;
}

/* ------------------------------------------------------------------- frame */

static void *memory(uint64_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    if (p == MAP_FAILED)
        fail("memory");
    return p;
}

static void take_word(const char *word)
{
    static const struct {
        const char *name;
        uint64_t *value;
    } known[] = {
        {"bytes=", &bytes}, {"files=", &files}, {"direct=", &direct},       {"clients=", &clients}, {"one=", &one},
        {"hold=", &hold},   {"map=", &map},     {"shuffle=", &shuffle},     {"skew=", &skew},       {"rate=", &rate},
        {"laps=", &laps},   {"ops=", &ops},     {"memory=", &memory_bytes},
    };

    for (unsigned i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strncmp(word, known[i].name, strlen(known[i].name)) == 0) {
            *known[i].value = strtoull(word + strlen(known[i].name), NULL, 10);
            return;
        }
    if (strncmp(word, "sync=", 5)) {
        errno = EINVAL;
        fail(word);
    }
    sync_path = word + 5;
}

static void make_order(void)
{
    uint64_t state = shuffle;

    units = one ? (bytes + PIECE - 1) / PIECE : files;
    order = memory(units * sizeof(*order));
    for (uint64_t i = 0; i < units; i++)
        order[i] = i;
    for (uint64_t i = units; shuffle && i > 1; i--) {
        uint64_t k = next_random(&state) % i, was = order[i - 1];
        order[i - 1] = order[k];
        order[k] = was;
    }
}

static void hold_all(void)
{
    held = memory(units * sizeof(*held));
    for (uint64_t i = 0; i < units; i++)
        held[i] = open_tensor(i, is("write"));
}

static void make_client(struct client *c, unsigned number)
{
    char path[4096];

    c->number = number;
    c->buf = (uint8_t *)memory(turns() * DEPTH * BLOCK + SMALL) + skew;
    if (syscall(SYS_io_setup, (long)DEPTH, &c->aio))
        fail("io_setup");
    snprintf(path, sizeof(path), "%s/.hitrain/ctl", folder);
    c->ctl = is("prefetch") ? open(path, O_WRONLY) : 0;
    if (c->ctl < 0)
        fail(path);
}

static void make_durable(void)
{
    int fd = sync_path[0] ? open(sync_path, O_RDONLY) : -1;

    if (!sync_path[0])
        return;
    if (fd < 0 || fsync(fd) || syncfs(fd))
        fail(sync_path);
    close(fd);
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void report(uint64_t ns, uint64_t moved)
{
    struct rusage use;

    getrusage(RUSAGE_SELF, &use);
    printf("{\"seconds\": %.6f, \"bytes\": %llu, \"client_cpu_s\": %.6f", (double)ns / 1e9, (unsigned long long)moved,
           (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
               (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6);
    if (is("random")) {
        qsort(latency_ns, ops, sizeof(*latency_ns), by_value);
        printf(", \"p50_us\": %.1f, \"p99_us\": %.1f", (double)latency_ns[ops / 2] / 1e3,
               (double)latency_ns[ops * 99 / 100] / 1e3);
    }
    printf("}\n");
}

int main(int argc, char **argv)
{
    static struct client client[CLIENTS_MAX];
    uint64_t began, moved = 0;

    if (argc < 3) {
        fprintf(stderr, "usage: path_client make|write|read|step|random|prefetch|copy FOLDER [WORD=VALUE]...\n");
        return 2;
    }
    way = argv[1];
    folder = argv[2];
    for (int i = 3; i < argc; i++)
        take_word(argv[i]);
    if (clients < 1 || clients > CLIENTS_MAX || ops < 1 || bytes < SMALL)
        return 2;
    make_order();
    latency_ns = memory(ops * sizeof(*latency_ns));
    for (unsigned i = 0; i < clients; i++)
        make_client(&client[i], i);
    if (hold)
        hold_all();
    began = now_ns();
    for (unsigned i = 0; i < clients; i++)
        if (pthread_create(&client[i].thread, NULL, work, &client[i]))
            fail("pthread_create");
    for (unsigned i = 0; i < clients; i++) {
        pthread_join(client[i].thread, NULL);
        moved += client[i].moved;
    }
    make_durable();
    report(now_ns() - began, moved);
    return 0;
}
