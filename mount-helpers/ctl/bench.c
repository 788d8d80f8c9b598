/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.c - `hitrainctl bench`: what memory, devices and a mount reach, and how much of its ceiling the mount reaches.
 *
 * The ceiling of a read through the mount follows from the share of its bytes that came from devices, and from the
 * rates of devices and memory. Nothing is written, but with --write a scratch file on the
 * mount, which is removed again.
 */
#include "mount-helpers/ctl/bench.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mount-helpers/common/features.h"
#include "mount-helpers/common/text.h"
#include "mount-helpers/ctl/bench_scratch.h"
#include "mount-helpers/ctl/figures.h"
#include "tiering/base/json.h"
#include "tiering/sys/mounts.h"
#include <hitrain/limits.h>

enum { DEVICE_TESTS = 3, ROWS_MAX = 8 + DEVICE_TESTS * HT_DEVICES_MAX, WIDTH = 24, NOTE_MAX = 256 };
#define SECOND_NS UINT64_C(1000000000)
#define TEST_NS UINT64_C(500000000)
#define SCRATCH_NS (20 * TEST_NS) /* at most, for each pass over the scratch file */

struct row {
    const char *part; /* "memory", "device", "mount" */
    char name[PATH_MAX];
    const char *test;
    unsigned at_once; /* requests or threads */
    struct ht_bench_result result;
    double ceiling; /* bytes per second; 0: none is known */
    double from_devices;
    char note[NOTE_MAX]; /* why there is no result, or what it means; or "" */
};

struct bench {
    const struct ht_cmd_options *o;
    struct row *row;
    unsigned count, tests;  /* rows so far; and how many there will be */
    double memory, devices; /* bytes per second; 0: not measured */
    bool terminal;
};

/* ----------------------------------------------------------------- progress */

static struct row *begin(struct bench *b, const char *part, const char *name, const char *test, unsigned at_once)
{
    struct row *r = &b->row[b->count < ROWS_MAX ? b->count++ : ROWS_MAX - 1];

    *r = (struct row){.part = part, .test = test, .at_once = at_once};
    snprintf(r->name, sizeof(r->name), "%s", name);
    if (b->terminal) {
        unsigned full = (b->count - 1) * WIDTH / ht_max_u64(b->tests, b->count);
        fputs("\r[", stderr);
        for (unsigned i = 0; i < WIDTH; i++)
            fputc(i < full ? '#' : '.', stderr);
        fprintf(stderr, "] %s: %s\033[K", part, test);
        fflush(stderr);
    }
    return r;
}

static void clear_progress(const struct bench *b)
{
    if (b->terminal)
        fputs("\r\033[K", stderr);
}

static void announce(struct bench *b, const char *path, unsigned tests)
{
    unsigned least = (unsigned)ht_div_up(tests * TEST_NS, SECOND_NS);

    b->tests = tests;
    if (b->o->write)
        fprintf(stderr,
                "%s: %u measurements, %u to %u seconds, with a scratch file of " HT_BENCH_SCRATCH_TEXT " at most\n",
                path, tests, least, least + 2 * (unsigned)(SCRATCH_NS / SECOND_NS));
    else
        fprintf(stderr, "%s: %u measurements, some %u %s; nothing is written\n", path, tests, least,
                ht_plural(least, "second"));
}

/* ------------------------------------------------------------------ ceilings */

static void measure_memory(struct bench *b)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned threads[] = {1, processors > 1 ? (unsigned)processors : 1};

    for (unsigned i = 0; i < 2; i++) {
        struct row *r = begin(b, "memory", "", "copy", threads[i]);
        int rc = ht_bench_copy(threads[i], TEST_NS, &r->result);
        if (rc < 0)
            snprintf(r->note, sizeof(r->note), "%s", strerror(-rc));
        else if (ht_bench_rate(&r->result) > b->memory)
            b->memory = ht_bench_rate(&r->result);
    }
}

static void explain(struct row *r, int rc)
{
    if (rc == -ENODATA)
        snprintf(r->note, sizeof(r->note), "it is too small, or became shorter");
    else if (rc == -ETIMEDOUT)
        snprintf(r->note, sizeof(r->note), "no answer in 30 s: hitrainctl doctor and the kernel's log say more");
    else if (rc == -EACCES || rc == -EPERM)
        snprintf(r->note, sizeof(r->note), "%s: run this as root", strerror(-rc));
    else
        snprintf(r->note, sizeof(r->note), "%s", strerror(-rc));
}

static int measure_device(struct bench *b, const char *path)
{
    static const struct {
        const char *test;
        uint32_t block_bytes;
        unsigned depth;
        bool random;
    } tests[DEVICE_TESTS] = {
        {"read 1 MiB", 1 << 20, 32, false},
        {"read 4 KiB", 4096, 1, true},
        {"read 4 KiB", 4096, 64, true},
    };
    uint64_t bytes = 0;
    int fd = ht_device_open_uncached(path, &bytes), rc = fd < 0 ? fd : 0;
    bool cached = fd >= 0 && !(fcntl(fd, F_GETFL) & O_DIRECT);

    for (unsigned i = 0; i < (fd < 0 ? 1 : DEVICE_TESTS) && rc != -ETIMEDOUT; i++) {
        struct row *r = begin(b, "device", path, tests[i].test, tests[i].depth);
        if (fd >= 0)
            rc = ht_bench_run(&(struct ht_bench_load){.fd = fd,
                                                      .range_bytes = bytes,
                                                      .block_bytes = tests[i].block_bytes,
                                                      .depth = tests[i].depth,
                                                      .random = tests[i].random,
                                                      .ns = TEST_NS},
                              &r->result);
        if (rc < 0)
            explain(r, rc);
        else if (cached)
            snprintf(r->note, sizeof(r->note), "its file system has no direct I/O: this is the page cache");
        if (rc == 0 && i == 0)
            b->devices += ht_bench_rate(&r->result);
    }
    if (fd >= 0)
        close(fd);
    return rc;
}

/* Those of the mount whose path is known here; -errno: printed. A relative one is of the daemon's folder. */
static int list_devices(const struct ht_mount_entry *m, char (*out)[PATH_MAX])
{
    unsigned all = 0;
    int count = 0, rc;
    struct ht_cmd_line l;
    char *text, *save;

    rc = ht_cmd_attribute(m->point, "devices", false, &text);
    if (rc < 0)
        return rc == -ENODATA ? 0 : rc;
    for (char *one = strtok_r(text, "\n", &save); one && count < (int)HT_DEVICES_MAX;
         one = strtok_r(NULL, "\n", &save)) {
        ht_cmd_parse_line(one, &l);
        const char *path = ht_cmd_value(&l, "path");
        all++;
        if (path[0] == '/')
            snprintf(out[count++], PATH_MAX, "%s", path);
    }
    if (all == 1 && count == 0 && m->source[0] == '/')
        snprintf(out[count++], PATH_MAX, "%s", m->source);
    free(text);
    return count;
}

/* --------------------------------------------------------------------- mount */

/* The store's reads of devices so far; 0: not known. */
static uint64_t device_reads(const char *point)
{
    struct ht_figures *f = malloc(sizeof(*f));
    uint64_t bytes = 0;

    if (f && ht_figures_read(point, f) == 0) {
        bytes = ht_figure(f, "device_read_bytes");
        ht_figures_free(f);
    }
    free(f);
    return bytes;
}

static void set_ceiling(const struct bench *b, struct row *r, uint64_t read_bytes)
{
    double share = r->result.bytes ? (double)read_bytes / (double)r->result.bytes : 0, ns_a_byte;

    r->from_devices = share < 1 ? share : 1;
    if (b->memory <= 0 || (r->from_devices > 0.01 && b->devices <= 0))
        return;
    ns_a_byte = 1 / b->memory;
    if (r->from_devices > 0.01 && r->from_devices / b->devices > ns_a_byte)
        ns_a_byte = r->from_devices / b->devices;
    r->ceiling = 1 / ns_a_byte;
}

static void read_through(struct bench *b, const char *point, int fd, const char *name, const char *test, uint64_t bytes,
                         uint64_t ns, bool once)
{
    struct row *r = begin(b, "mount", name, test, 8);
    uint64_t before = device_reads(point);
    struct ht_bench_load l = {.fd = fd,
                              .range_bytes = bytes,
                              .block_bytes = (uint32_t)ht_min_u64(HT_MIB, bytes / 4096 * 4096),
                              .depth = 8,
                              .once = once,
                              .ns = ns};
    int rc = l.block_bytes ? ht_bench_run(&l, &r->result) : -ENODATA;

    if (rc < 0)
        explain(r, rc);
    else
        set_ceiling(b, r, device_reads(point) - before);
}

enum { LOOK_AT_MAX = 10000 };
static struct {
    char path[PATH_MAX];
    uint64_t bytes;
    unsigned seen;
} largest; /* nftw gives its function no argument */

static int look(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)at;
    if (type == FTW_F && S_ISREG(st->st_mode) && (uint64_t)st->st_size > largest.bytes && access(path, R_OK) == 0 &&
        strlen(path) < sizeof(largest.path)) {
        snprintf(largest.path, sizeof(largest.path), "%s", path);
        largest.bytes = (uint64_t)st->st_size;
    }
    return ++largest.seen == LOOK_AT_MAX;
}

/* Reads do not change the time of access where that is permitted. */
static int open_direct(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT | O_NOFOLLOW | O_NOATIME);

    if (fd < 0 && errno == EPERM)
        fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT | O_NOFOLLOW);
    return fd < 0 ? -errno : fd;
}

static void read_a_file(struct bench *b, const char *path, const char *point)
{
    memset(&largest, 0, sizeof(largest));
    (void)nftw(path, look, 16, FTW_PHYS | FTW_MOUNT);
    int fd = largest.bytes ? open_direct(largest.path) : -ENOENT;
    if (fd < 0) {
        struct row *r = begin(b, "mount", path, "read", 8);
        if (fd == -ENOENT)
            snprintf(r->note, sizeof(r->note), "there is no file to read: --write makes a scratch file");
        else
            explain(r, fd);
        return;
    }
    read_through(b, point, fd, largest.path, "read", largest.bytes, TEST_NS, true);
    uint64_t read = b->row[b->count - 1].result.bytes;
    if (read)
        read_through(b, point, fd, largest.path, "read again", read, TEST_NS, false);
    close(fd);
}

static void use_scratch(struct bench *b, const char *point, struct ht_bench_scratch *s)
{
    struct row *r = begin(b, "mount", s->path, "write and sync", 8);
    struct ht_bench_load l = {.fd = s->fd,
                              .range_bytes = s->bytes,
                              .block_bytes = 1 << 20,
                              .depth = 8,
                              .once = true,
                              .write = true,
                              .ns = SCRATCH_NS};
    uint64_t began = ht_now_ns();
    int rc = ht_bench_run(&l, &r->result);

    if (rc == 0 && fsync(s->fd) != 0)
        rc = -errno;
    r->result.ns = ht_now_ns() - began;
    if (rc < 0) {
        explain(r, rc);
        return;
    }
    uint64_t bytes = r->result.bytes;
    read_through(b, point, s->fd, s->path, "read again", bytes, TEST_NS, false);
    if (ht_cmd_evict(s->path, b->o) == HT_CMD_OK)
        read_through(b, point, s->fd, s->path, "read", bytes, SCRATCH_NS, true);
}

static int measure_mount(struct bench *b, const char *path, const struct ht_mount_entry *m)
{
    char(*devices)[PATH_MAX] = calloc(HT_DEVICES_MAX, PATH_MAX);
    int count = devices ? list_devices(m, devices) : -ENOMEM;
    struct ht_bench_scratch s;

    if (count < 0) {
        free(devices);
        return HT_CMD_FAILED;
    }
    if (b->o->write && ht_bench_scratch_begin(&s, path) < 0) {
        free(devices);
        return HT_CMD_FAILED;
    }
    announce(b, path, 2 + DEVICE_TESTS * (unsigned)count + (b->o->write ? 3 : 2));
    measure_memory(b);
    for (int i = 0; i < count; i++)
        (void)measure_device(b, devices[i]);
    free(devices);
    if (!b->o->write) {
        read_a_file(b, path, m->point);
        return HT_CMD_OK;
    }
    use_scratch(b, m->point, &s);
    return ht_bench_scratch_end(&s) == 0 ? HT_CMD_OK : HT_CMD_FAILED;
}

/* -------------------------------------------------------------------- output */

static void put_time(uint64_t ns)
{
    if (ns == 0)
        printf(" %10s", "");
    else if (ns < 10000000)
        printf(" %7llu us", (unsigned long long)(ns / 1000));
    else
        printf(" %7llu ms", (unsigned long long)(ns / 1000000));
}

static void put_row(const struct row *r)
{
    char at_once[32], share[96] = "";
    bool has = r->result.requests != 0;

    snprintf(at_once, sizeof(at_once), "%s, %u %s", r->test, r->at_once,
             strcmp(r->part, "memory") == 0 ? ht_plural(r->at_once, "thread") : "at once");
    printf("%-7s %-26s", r->part, at_once);
    if (has) {
        printf("%9s/s", ht_size_text((uint64_t)ht_bench_rate(&r->result)));
        put_time(r->result.mean_ns);
        put_time(r->result.p99_ns);
        if (r->ceiling > 0)
            snprintf(share, sizeof(share), "  %.0f %% of the ceiling, %.0f %% from devices",
                     ht_bench_rate(&r->result) * 100 / r->ceiling, r->from_devices * 100);
        printf("%s", share);
    }
    fputs("  ", stdout);
    ht_put_printable(r->name, stdout);
    if (r->note[0] != '\0')
        printf("%s%s", r->name[0] ? ": " : "", r->note);
    putchar('\n');
}

static void put_json(const struct bench *b, const char *path)
{
    struct ht_json j;

    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", path);
    ht_json_array(&j, "measurements");
    for (unsigned i = 0; i < b->count; i++) {
        const struct row *r = &b->row[i];
        ht_json_object(&j, NULL);
        ht_json_str(&j, "part", r->part);
        if (r->name[0] != '\0')
            ht_json_str(&j, "path", r->name);
        ht_json_str(&j, "test", r->test);
        ht_json_u64(&j, "at_once", r->at_once);
        if (r->result.requests) {
            ht_json_u64(&j, "bytes", r->result.bytes);
            ht_json_u64(&j, "requests", r->result.requests);
            ht_json_u64(&j, "ns", r->result.ns);
            ht_json_u64(&j, "bytes_per_s", (uint64_t)ht_bench_rate(&r->result));
            if (r->result.mean_ns) {
                ht_json_u64(&j, "mean_ns", r->result.mean_ns);
                ht_json_u64(&j, "p99_ns", r->result.p99_ns);
            }
            if (r->ceiling > 0) {
                ht_json_u64(&j, "ceiling_bytes_per_s", (uint64_t)r->ceiling);
                ht_json_u64(&j, "from_devices_per_mille", (uint64_t)(r->from_devices * 1000 + 0.5));
            }
        }
        if (r->note[0] != '\0')
            ht_json_str(&j, "note", r->note);
        ht_json_end(&j);
    }
    ht_json_end(&j);
    ht_json_end(&j);
}

static int put_all(const struct bench *b, const char *path)
{
    clear_progress(b);
    if (b->o->json) {
        put_json(b, path);
    } else {
        printf("%-7s %-26s%11s %10s %10s\n", "", "", "rate", "mean", "99 %");
        for (unsigned i = 0; i < b->count; i++)
            put_row(&b->row[i]);
    }
    if (fflush(stdout) == 0)
        return HT_CMD_OK;
    ht_error("cannot write: %s", strerror(errno));
    return HT_CMD_FAILED;
}

/* ------------------------------------------------------------------- command */

static int measure_device_alone(struct bench *b, const char *path)
{
    if (b->o->write) {
        ht_error("%s is no directory on a mount: --write writes no device", path);
        return HT_CMD_USAGE;
    }
    uint64_t bytes;
    int fd = ht_device_open_uncached(path, &bytes);
    if (fd < 0) {
        if (fd == -EINVAL)
            ht_error("%s is neither on a hitrain mount nor a device or a regular file", path);
        else
            ht_error("%s: %s%s", path, strerror(-fd), fd == -EACCES ? "; run this as root" : "");
        return HT_CMD_FAILED;
    }
    close(fd);
    announce(b, path, 2 + DEVICE_TESTS);
    measure_memory(b);
    return measure_device(b, path) < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}

static int measure(struct bench *b, const char *path, struct ht_mount_entry *m)
{
    struct stat st;
    int rc = stat(path, &st) == 0 ? ht_mount_of_path(path, m) : -errno;

    if (rc < 0) {
        (void)ht_cmd_explain(path, rc);
        return HT_CMD_FAILED;
    }
    if (ht_mount_is_hitrain(m) && (S_ISDIR(st.st_mode) || S_ISREG(st.st_mode)))
        return measure_mount(b, path, m);
    if (S_ISDIR(st.st_mode)) {
        ht_error("%s is not on a hitrain mount: name one, or a device or file of a store", path);
        return HT_CMD_FAILED;
    }
    return measure_device_alone(b, path);
}

int ht_cmd_bench(const char *path, const struct ht_cmd_options *o)
{
    struct bench b = {.o = o, .terminal = isatty(STDERR_FILENO)};
    struct ht_mount_entry *m = malloc(sizeof(*m));
    int status = HT_CMD_FAILED;

    b.row = calloc(ROWS_MAX, sizeof(*b.row));
    if (m && b.row) {
        status = measure(&b, path, m);
        if (b.count && put_all(&b, path) != HT_CMD_OK)
            status = HT_CMD_FAILED;
    } else {
        ht_error("%s: %s", path, strerror(ENOMEM));
    }
    free(b.row);
    free(m);
    return status;
}
