/* SPDX-License-Identifier: Apache-2.0 */
/*
 * traffic.c - files that are made, changed and removed. Each block says which operation wrote it.
 *
 * The program announces every operation before it begins, and again when it is durable, each in one write(2):
 *
 *   write OP SLOT FIRST COUNT    blocks of the file, which is made if it is not there; then perhaps fsync
 *   replace OP SLOT              another file written, fsynced and renamed over it, the folder fsynced
 *   unlink OP SLOT               and the folder fsynced
 *   done OP
 *
 * A crash may leave anything between the last done operation of a slot and the last announced one. `look` prints the
 * present files: "file SLOT OP...", an operation for each block, 0 for one of zeros.
 */
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <sys/stat.h>

#include "tests/programs/program.h"

enum { BLOCK = 4096, WORDS = BLOCK / 8, THREADS = 2, SLOTS_EACH = 6, SLOTS = THREADS * SLOTS_EACH, BLOCKS_MAX = 80 };
enum { PATH_BYTES = 4096, LINE_BYTES = 2000 };

static const uint64_t blocks_of[SLOTS_EACH] = {1, 2, 5, 16, 17, BLOCKS_MAX};

static const char *folder;
static uint64_t first, ops = UINT64_MAX, seed;
static _Atomic uint64_t next_op;

struct worker {
    pthread_t thread;
    uint64_t index, random;
    uint64_t block[WORDS];
};

__attribute__((noreturn)) static void failed(const char *what)
{
    failed_below(folder, what);
}

static void path_of(uint64_t slot, const char *suffix, char *to)
{
    snprintf(to, PATH_BYTES, "%s/f%llu%s", folder, (unsigned long long)slot, suffix);
}

static uint64_t blocks_in(uint64_t slot)
{
    return blocks_of[slot % SLOTS_EACH];
}

/* ------------------------------------------------------------------ blocks */

/* The operation comes first; the rest follows from it and from where the block belongs. */
static void fill(uint64_t *block, uint64_t op, uint64_t slot, uint64_t index)
{
    uint64_t state = mix64(op) ^ slot << 32 ^ index;

    block[0] = op;
    for (size_t i = 1; i < WORDS; i++)
        block[i] = rnd_next(&state);
}

static void write_blocks(struct worker *w, int fd, uint64_t op, uint64_t slot, uint64_t from, uint64_t count)
{
    for (uint64_t i = from; i < from + count; i++) {
        fill(w->block, op, slot, i);
        if (pwrite(fd, w->block, BLOCK, (off_t)(i * BLOCK)) != BLOCK)
            failed("write");
    }
}

static void sync_close(int fd, bool sync)
{
    if ((sync && fsync(fd)) || close(fd))
        failed("fsync or close");
}

static void sync_folder(void)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0)
        failed(folder);
    sync_close(fd, true);
}

/* -------------------------------------------------------------- operations */

static bool write_in_place(struct worker *w, uint64_t op, uint64_t slot)
{
    uint64_t from = 0, count = blocks_in(slot);
    bool sync = !rnd_once_in(&w->random, 3);
    char path[PATH_BYTES];

    path_of(slot, "", path);
    if (access(path, F_OK) == 0) {
        from = rnd_below(&w->random, count);
        count = 1 + rnd_below(&w->random, count - from);
    }
    report_line("write %llu %llu %llu %llu\n", (unsigned long long)op, (unsigned long long)slot,
                (unsigned long long)from, (unsigned long long)count);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        failed(path);
    write_blocks(w, fd, op, slot, from, count);
    sync_close(fd, sync);
    return sync;
}

static bool replace(struct worker *w, uint64_t op, uint64_t slot)
{
    char path[PATH_BYTES], other[PATH_BYTES];

    path_of(slot, "", path);
    path_of(slot, ".new", other);
    report_line("replace %llu %llu\n", (unsigned long long)op, (unsigned long long)slot);
    int fd = open(other, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        failed(other);
    write_blocks(w, fd, op, slot, 0, blocks_in(slot));
    sync_close(fd, true);
    if (rename(other, path))
        failed(path);
    sync_folder();
    return true;
}

static bool take_away(struct worker *w, uint64_t op, uint64_t slot)
{
    char path[PATH_BYTES];

    path_of(slot, "", path);
    report_line("unlink %llu %llu\n", (unsigned long long)op, (unsigned long long)slot);
    if (unlink(path) && errno != ENOENT)
        failed(path);
    sync_folder();
    return true;
}

static void *work(void *arg)
{
    static bool (*const kinds[])(struct worker * w, uint64_t op, uint64_t slot) = {
        write_in_place, write_in_place, write_in_place, replace, replace, take_away,
    };
    struct worker *w = arg;
    uint64_t op;

    while ((op = next_op++) < ops) {
        uint64_t slot = w->index * SLOTS_EACH + rnd_below(&w->random, SLOTS_EACH);
        if (kinds[rnd_below(&w->random, COUNT_OF(kinds))](w, op, slot))
            report_line("done %llu\n", (unsigned long long)op);
    }
    return NULL;
}

static void run(void)
{
    static struct worker workers[THREADS];

    next_op = first;
    ops = ops == UINT64_MAX ? ops : first + ops;
    if (mkdir(folder, 0755) && errno != EEXIST)
        failed(folder);
    for (uint64_t i = 0; i < THREADS; i++) {
        workers[i].index = i;
        workers[i].random = mix64(seed + first) + i;
        errno = pthread_create(&workers[i].thread, NULL, work, &workers[i]);
        if (errno)
            die("pthread_create");
    }
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
}

/* -------------------------------------------------------------------- look */

static uint64_t op_of(const uint64_t *block, uint64_t slot, uint64_t index)
{
    uint64_t wanted[WORDS];

    fill(wanted, block[0], slot, index);
    if (block[0] == 0)
        memset(wanted, 0, sizeof(wanted));
    if (memcmp(wanted, block, BLOCK)) {
        fprintf(stderr, "traffic: block %llu of f%llu is none that was written there\n", (unsigned long long)index,
                (unsigned long long)slot);
        exit(1);
    }
    return block[0];
}

static void inspect(uint64_t slot)
{
    char path[PATH_BYTES], line[LINE_BYTES];
    uint64_t block[WORDS], index = 0;
    ssize_t n;

    path_of(slot, "", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return;
    if (fd < 0)
        failed(path);
    size_t len = (size_t)snprintf(line, sizeof(line), "file %llu", (unsigned long long)slot);
    while ((n = read(fd, block, BLOCK)) == BLOCK && index < blocks_in(slot))
        len +=
            (size_t)snprintf(line + len, sizeof(line) - len, " %llu", (unsigned long long)op_of(block, slot, index++));
    if (n != 0) {
        fprintf(stderr, "traffic: f%llu does not end after block %llu\n", (unsigned long long)slot,
                (unsigned long long)index);
        exit(1);
    }
    sync_close(fd, false);
    report_line("%s\n", line);
}

static void usage(void)
{
    fputs("usage: traffic run|look [OPTION]... FOLDER\n"
          "  run          operations until killed; exit status 3 when the mount is gone\n"
          "  look         says what is in FOLDER\n"
          "  --first=N    number of the first operation (1)\n"
          "  --ops=N      how many\n"
          "  --seed=N     which ones\n",
          stderr);
    exit(2);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"first", 1, NULL, 'f'}, {"ops", 1, NULL, 'o'}, {"seed", 1, NULL, 's'}, {0}};
    int c;

    first = 1;
    seed = random_seed();
    while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0) {
        if (c == 'f')
            first = strtoull(optarg, NULL, 0);
        else if (c == 'o')
            ops = strtoull(optarg, NULL, 0);
        else if (c == 's')
            seed = strtoull(optarg, NULL, 0);
        else
            usage();
    }
    if (optind != argc - 2)
        usage();
    folder = argv[optind + 1];
    if (!strcmp(argv[optind], "run"))
        run();
    else if (!strcmp(argv[optind], "look"))
        for (uint64_t slot = 0; slot < SLOTS; slot++)
            inspect(slot);
    else
        usage();
    return 0;
}
