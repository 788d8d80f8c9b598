/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trainer.c - a training loop in a model root, whose every bit follows from the number of the step.
 *
 * A step reads the parameters and writes gradients that depend on them and on the number of the step. It writes a
 * cursor and a note beside them, removes an old note, and commits. After each commit it prints "step N" in one
 * write(2). It continues from the step of the root, so it can be cut off anywhere and started again. The folder's
 * content after step N never depends on that: the digest of all files, and of the optimizer's state, shows it.
 */
#include <dirent.h>
#include <fcntl.h>
#include <getopt.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "tests/programs/program.h"

enum { PATH_BYTES = 4096, NAMES_MAX = 64, NOTES = 3, PIECE = 1 << 18 };

struct parameter {
    const char *name, *dtype;
    size_t count, width;
};

/* Three chunks, two of which are whole; less than one; the tail of a page; and half as wide as its state. */
static const struct parameter parameters[] = {
    {"embed", "f32", 550000, 4},
    {"dense", "f32", 70001, 4},
    {"bias", "f32", 300, 4},
    {"half", "bf16", 30000, 2},
};

static const char *folder;
static uint64_t until = UINT64_MAX;
static int digests;
static const char *words = "";
static uint8_t *buffer;

__attribute__((noreturn)) static void failed(const char *what)
{
    failed_below(folder, what);
}

static int open_at(const char *name, int flags)
{
    char path[PATH_BYTES];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    int fd = open(path, flags | O_CLOEXEC, 0644);
    if (fd < 0)
        failed(path);
    return fd;
}

static void close_of(int fd, const char *name)
{
    if (close(fd))
        failed(name);
}

static size_t get_file(const char *name, size_t max)
{
    int fd = open_at(name, O_RDONLY);
    size_t done = 0;
    ssize_t n;

    while ((n = read(fd, buffer + done, max - done)) > 0)
        done += (size_t)n;
    if (n < 0)
        failed(name);
    close_of(fd, name);
    return done;
}

static void put_file(const char *name, int flags, size_t len)
{
    int fd = open_at(name, O_WRONLY | flags);
    ssize_t n;

    for (size_t done = 0; done < len; done += (size_t)n) {
        n = write(fd, buffer + done, len - done < PIECE ? len - done : PIECE);
        if (n < 0)
            failed(name);
    }
    close_of(fd, name);
}

static uint64_t word_of(const char *name)
{
    char value[32] = "";

    if (getxattr(folder, name, value, sizeof(value) - 1) < 0)
        failed(name);
    return strtoull(value, NULL, 10);
}

/* ----------------------------------------------------------------- a step */

/* -1 to 1 */
static float noise(uint64_t step, size_t parameter, size_t i)
{
    uint64_t h = mix64(step << 40 | (uint64_t)parameter << 32 | i);

    return (float)(int32_t)(h >> 32) * 0x1p-31f;
}

static float get_element(size_t width, size_t i)
{
    uint32_t bits = 0;
    float f;

    memcpy((uint8_t *)&bits + (4 - width), buffer + i * width, width);
    memcpy(&f, &bits, 4);
    return f;
}

static void put_element(size_t width, size_t i, float f)
{
    uint32_t bits;

    memcpy(&bits, &f, 4);
    memcpy(buffer + i * width, (uint8_t *)&bits + (4 - width), width);
}

static void put_gradient(const struct parameter *p, uint64_t step)
{
    size_t bytes = p->count * p->width;
    char name[100];

    if (get_file(p->name, bytes) != bytes) {
        errno = EIO;
        failed(p->name);
    }
    for (size_t i = 0; i < p->count; i++)
        put_element(p->width, i, 0.25f * get_element(p->width, i) + noise(step, (size_t)(p - parameters), i));
    snprintf(name, sizeof(name), ".hitrain/grad/%s", p->name);
    put_file(name, 0, bytes);
}

/* The files of a step that are no parameters: one changed in place, one new, one removed. */
static void put_files(uint64_t step)
{
    char name[100], path[PATH_BYTES];
    size_t len = (size_t)snprintf((char *)buffer, 100, "data cursor %020llu\n", (unsigned long long)mix64(step));

    put_file("cursor", O_CREAT, len);
    snprintf(name, sizeof(name), "note-%llu", (unsigned long long)step);
    put_file(name, O_CREAT | O_EXCL, len);
    if (step <= NOTES)
        return;
    snprintf(path, sizeof(path), "%s/note-%llu", folder, (unsigned long long)(step - NOTES));
    if (unlink(path))
        failed(path);
}

static void commit(uint64_t step)
{
    int fd;

    if (step % 2) {
        fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0 || fsync(fd))
            failed(folder);
        close_of(fd, folder);
    } else {
        strcpy((char *)buffer, "commit\n");
        put_file(".hitrain/ctl", 0, strlen("commit\n"));
    }
}

/* -------------------------------------------------------------- the digest */

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

static size_t list(const char *below, char names[NAMES_MAX][256])
{
    char path[PATH_BYTES];
    struct dirent *e;
    size_t n = 0;

    snprintf(path, sizeof(path), "%s/%s", folder, below);
    DIR *d = opendir(path);
    if (!d)
        failed(path);
    while (errno = 0, (e = readdir(d)))
        if (e->d_name[0] != '.' && n < NAMES_MAX)
            strcpy(names[n++], e->d_name);
    if (errno || n == NAMES_MAX)
        failed(path);
    closedir(d);
    qsort(names, n, sizeof(names[0]), by_name);
    return n;
}

static uint64_t digest_files(const char *below, uint64_t h)
{
    char names[NAMES_MAX][256], name[400];
    size_t n = list(below, names);

    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "%.99s/%.255s", below, names[i]);
        h = mix64(h ^ hash_bytes(names[i], strlen(names[i])));
        h = mix64(h ^ hash_bytes(buffer, get_file(name, parameters[0].count * 4 + 1)));
    }
    return h;
}

static uint64_t digest(uint64_t step)
{
    uint64_t h = digest_files(".", 0);
    char name[100];

    for (size_t p = 0; step > 0 && p < COUNT_OF(parameters); p++) {
        snprintf(name, sizeof(name), ".hitrain/state/%s", parameters[p].name);
        h = digest_files(name, h);
    }
    return h;
}

static void report(uint64_t step, bool with_digest)
{
    if (with_digest)
        report_line("step %llu digest %016llx\n", (unsigned long long)step, (unsigned long long)digest(step));
    else
        report_line("step %llu\n", (unsigned long long)step);
}

/* --------------------------------------------------------------- the words */

static void make(void)
{
    char path[PATH_BYTES], optimizer[PATH_BYTES];

    snprintf(optimizer, sizeof(optimizer), "adamw lr=0.01 beta1=0.9 beta2=0.95 weight_decay=0.1 %s", words);
    if (mkdir(folder, 0755))
        failed(folder);
    for (size_t k = 0; k < COUNT_OF(parameters); k++) {
        const struct parameter *p = &parameters[k];
        for (size_t i = 0; i < p->count; i++)
            put_element(p->width, i, noise(0, k, i));
        put_file(p->name, O_CREAT | O_EXCL, 0);
        snprintf(path, sizeof(path), "%s/%s", folder, p->name);
        if (setxattr(path, "user.hitrain.dtype", p->dtype, strlen(p->dtype), 0))
            failed(path);
        put_file(p->name, 0, p->count * p->width);
    }
    if (setxattr(folder, "user.hitrain.optimizer", optimizer, strlen(optimizer), 0))
        failed(folder);
    commit(1);
    report(0, digests);
}

static void run(void)
{
    for (uint64_t step = word_of("user.hitrain.step") + 1; step <= until; step++) {
        for (size_t p = 0; p < COUNT_OF(parameters); p++)
            put_gradient(&parameters[p], step);
        put_files(step);
        commit(step);
        report(step, digests);
    }
}

static void inspect(void)
{
    uint64_t step = word_of("user.hitrain.step"), durable = word_of("user.hitrain.durable_step");

    if (step != durable) {
        fprintf(stderr, "trainer: step %llu, durable_step %llu\n", (unsigned long long)step,
                (unsigned long long)durable);
        exit(1);
    }
    report(step, true);
}

static void usage(void)
{
    fputs("usage: trainer make|run|look [OPTION]... FOLDER\n"
          "  make         makes FOLDER a model root with parameters; step 0\n"
          "  run          trains on from the step where it is; exit status 3 when the mount is gone\n"
          "  look         says the step and the digest of all that is there\n"
          "  --until=N    with run: the last step\n"
          "  --words=TEXT with make: more words of the optimizer\n"
          "  --digest     with make and run: say the digest of each step\n",
          stderr);
    exit(2);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"until", 1, NULL, 'u'}, {"words", 1, NULL, 'w'}, {"digest", 0, &digests, 1}, {0}};
    const char *word;
    int c;

    while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0) {
        if (c == 'u')
            until = strtoull(optarg, NULL, 0);
        else if (c == 'w')
            words = optarg;
        else if (c)
            usage();
    }
    if (optind != argc - 2)
        usage();
    word = argv[optind];
    folder = argv[optind + 1];
    buffer = malloc(parameters[0].count * 4 + PIECE);
    if (!buffer)
        die("memory");
    if (!strcmp(word, "make"))
        make();
    else if (!strcmp(word, "run"))
        run();
    else if (!strcmp(word, "look"))
        inspect();
    else
        usage();
    free(buffer);
    return 0;
}
