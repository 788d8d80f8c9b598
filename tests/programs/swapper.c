/* SPDX-License-Identifier: Apache-2.0 */
/*
 * swapper.c - moves tensors to files and back as DeepSpeed does with its nvme_path.
 *
 * That is: libaio with O_DIRECT, one open and close for each transfer of a tensor, blocks of 1 MiB, 8 of them in
 * flight. The rest of a tensor that is no whole block is a request of its own. Buffers lie on multiples of 1 KiB times
 * the number of threads and not of pages. Files have mode 0600 and lie below zero_stage_3/optimizer. There never is an
 * fsync, truncate, fallocate or unlink. The order of transfers is the same in each step. Unlike DeepSpeed this program
 * checks the result of each request.
 *
 * Each thread is one rank. In a step it reads each tensor, checks that it holds what the step before wrote, and writes
 * it anew.
 */
#include <fcntl.h>
#include <getopt.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "tests/programs/program.h"

enum { BLOCK = 1 << 20, DEPTH = 8, ALIGNMENT = 1024, PAGE = 4096, RANKS_MAX = 64, PATH_BYTES = 4096 };

static const char *const kinds[] = {"", "exp_avg-", "exp_avg_sq-"};

static const char *folder;
static uint64_t ranks = 2, tensors = 3, size = 3u << 20, steps = 3, first;
static int check_only;

struct rank {
    pthread_t thread;
    unsigned index;
    aio_context_t context;
    uint8_t *buffer;
};

/* Sizes differ, and end anywhere that O_DIRECT allows: whole elements of 512 bytes and more. */
static uint64_t bytes_of(uint64_t tensor)
{
    return size + tensor * 37 * 512 + 512;
}

static void path_of(const struct rank *r, size_t kind, uint64_t tensor, char *to)
{
    snprintf(to, PATH_BYTES, "%s/zero_stage_3/optimizer/rank%u/%s%llu_%llu.tensor.swp", folder, r->index, kinds[kind],
             (unsigned long long)(tensor * 1000), (unsigned long long)(tensor * 1000 + 999));
}

static uint64_t word_of(const struct rank *r, size_t kind, uint64_t tensor, uint64_t step, uint64_t at)
{
    return mix64(((r->index * COUNT_OF(kinds) + kind) * 1000 + tensor) << 44 | step << 32 | at);
}

/* ------------------------------------------------------------- transfers */

/* Waits for one request. A short or failed request ends the program. */
static void reap(struct rank *r, const char *path)
{
    struct io_event event;
    long n;

    do
        n = syscall(SYS_io_getevents, r->context, 1, 1, &event, NULL);
    while (n < 0 && errno == EINTR);
    if (n != 1)
        die("io_getevents");
    if ((uint64_t)event.res != event.data) {
        errno = event.res < 0 ? (int)-event.res : 0;
        die("%s: a request of %llu bytes returned %lld", path, (unsigned long long)event.data, (long long)event.res);
    }
}

static void transfer(struct rank *r, const char *path, bool writes, uint64_t bytes)
{
    struct iocb requests[DEPTH];
    uint64_t begun = 0, ended = 0, off;
    int fd = open(path, (writes ? O_WRONLY | O_CREAT : O_RDONLY) | O_DIRECT | O_CLOEXEC, 0600);

    if (fd < 0)
        die("%s", path);
    for (off = 0; off < bytes; off += BLOCK, begun++) {
        struct iocb *cb = &requests[begun % DEPTH];
        uint64_t len = bytes - off < BLOCK ? bytes - off : BLOCK;
        /*
         * The oldest of the full slots may not be the first to end: the kernel has copied the request, so reuse is
         * safe.
         */
        if (begun - ended == DEPTH) {
            reap(r, path);
            ended++;
        }
        *cb = (struct iocb){
            .aio_data = len,
            .aio_lio_opcode = writes ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
            .aio_fildes = (uint32_t)fd,
            .aio_buf = (uint64_t)(uintptr_t)(r->buffer + off),
            .aio_nbytes = len,
            .aio_offset = (int64_t)off,
        };
        if (syscall(SYS_io_submit, r->context, 1, &cb) != 1)
            die("io_submit");
    }
    for (; ended < begun; ended++)
        reap(r, path);
    if (close(fd))
        die("close %s", path);
}

/* ---------------------------------------------------------------- a step */

static void check(const struct rank *r, size_t kind, uint64_t tensor, uint64_t step, const char *path)
{
    for (uint64_t i = 0; i < bytes_of(tensor); i += 8) {
        uint64_t word = word_of(r, kind, tensor, step, i);
        if (memcmp(r->buffer + i, &word, 8)) {
            fprintf(stderr, "swapper: %s differs at byte %llu from what step %llu wrote\n", path, (unsigned long long)i,
                    (unsigned long long)step);
            exit(1);
        }
    }
}

static void swap_in(struct rank *r, size_t kind, uint64_t tensor, uint64_t step)
{
    char path[PATH_BYTES];

    path_of(r, kind, tensor, path);
    memset(r->buffer, 0xee, bytes_of(tensor));
    transfer(r, path, false, bytes_of(tensor));
    check(r, kind, tensor, step, path);
}

static void each_tensor(struct rank *r, void (*work)(struct rank *r, size_t kind, uint64_t tensor, uint64_t step),
                        uint64_t step)
{
    for (uint64_t t = 0; t < tensors; t++)
        for (size_t k = 0; k < COUNT_OF(kinds); k++)
            work(r, k, t, step);
}

static void swap_both(struct rank *r, size_t kind, uint64_t tensor, uint64_t step)
{
    if (step > 0)
        swap_in(r, kind, tensor, step - 1);
    char path[PATH_BYTES];
    path_of(r, kind, tensor, path);
    for (uint64_t i = 0; i < bytes_of(tensor); i += 8) {
        uint64_t word = word_of(r, kind, tensor, step, i);
        memcpy(r->buffer + i, &word, 8);
    }
    transfer(r, path, true, bytes_of(tensor));
}

static void *run_rank(void *arg)
{
    struct rank *r = arg;

    if (syscall(SYS_io_setup, DEPTH, &r->context))
        die("io_setup");
    if (check_only) {
        each_tensor(r, swap_in, first);
    } else {
        for (uint64_t step = first; step < first + steps; step++)
            each_tensor(r, swap_both, step);
    }
    syscall(SYS_io_destroy, r->context);
    return NULL;
}

/* ------------------------------------------------------------------ start */

static void make_folder(const char *format, unsigned rank)
{
    char path[PATH_BYTES], part[100];

    snprintf(part, sizeof(part), format, rank);
    snprintf(path, sizeof(path), "%s/%s", folder, part);
    if (mkdir(path, 0755) && errno != EEXIST)
        die("%s", path);
}

static void start(struct rank *r, unsigned index)
{
    uint64_t bytes = bytes_of(tensors) + (ranks + 1) * ALIGNMENT + PAGE;
    uint8_t *memory = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);

    if (!memory)
        die("memory");
    r->index = index;
    /* Never on a page: the first block spans one page more than it has. */
    r->buffer = memory + ALIGNMENT * (ranks % 4 ? ranks : 1);
    make_folder("zero_stage_3/optimizer/rank%u", index);
    if (pthread_create(&r->thread, NULL, run_rank, r))
        die("pthread_create");
}

static void usage(void)
{
    fputs("usage: swapper [OPTION]... FOLDER\n"
          "  --ranks=N --tensors=N --size=BYTES    how much (2, 3, 3 MiB); three files for each tensor of each rank\n"
          "  --steps=N    how often (3)\n"
          "  --first=N    number of the first step (0): with another one, what the step before it wrote must be there\n"
          "  --check      only look whether step --first is there\n",
          stderr);
    exit(2);
}

int main(int argc, char **argv)
{
    enum { RANKS = 256, TENSORS, SIZE, STEPS, FIRST };
    static const struct option options[] = {
        {"ranks", 1, NULL, RANKS},
        {"tensors", 1, NULL, TENSORS},
        {"size", 1, NULL, SIZE},
        {"steps", 1, NULL, STEPS},
        {"first", 1, NULL, FIRST},
        {"check", 0, &check_only, 1},
        {0},
    };
    uint64_t *numbers[] = {&ranks, &tensors, &size, &steps, &first};
    static struct rank all[RANKS_MAX];
    int c;

    while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0) {
        if (c >= RANKS && c <= FIRST)
            *numbers[c - RANKS] = strtoull(optarg, NULL, 0);
        else if (c)
            usage();
    }
    if (optind != argc - 1 || ranks == 0 || ranks > RANKS_MAX || size % 512)
        usage();
    folder = argv[optind];
    make_folder("zero_stage_3", 0);
    make_folder("zero_stage_3/optimizer", 0);
    for (unsigned i = 0; i < ranks; i++)
        start(&all[i], i);
    for (unsigned i = 0; i < ranks; i++)
        pthread_join(all[i].thread, NULL);
    return 0;
}
