/* SPDX-License-Identifier: Apache-2.0 */
/* Which opens succeed while another process holds the device, and which files cannot be a device at all. */
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include "io_test.h"

#define DEV_BYTES (64 * HT_MIB)
#define BLOCK 4096u

enum { ON_FILE, ON_LOOP, ON_GIVEN, PLACES };

static char file[PATH_MAX], path[PATH_MAX];
static bool on_loop, shared_by_readers;

/* False: skipped. The path stays until the test ends. */
static bool begin_place(int place)
{
    const char *given = getenv("HITRAIN_TEST_DEVICE");

    scratch_path(file, DEV_BYTES);
    snprintf(path, sizeof(path), "%s", place == ON_GIVEN && given ? given : file);
    on_loop = place == ON_LOOP;
    shared_by_readers = place == ON_FILE;
    if (place == ON_GIVEN && given)
        return true;
    if (place == ON_GIVEN) {
        unlink(file);
        skipped(GIVEN, "HITRAIN_TEST_DEVICE names none");
        return false;
    }
    if (direct_io_works(file) && (!on_loop || attach_loop(file, 512, false, path)))
        return true;
    unlink(file);
    skipped(on_loop ? LOOP_512 : A_FILE, "needs O_DIRECT, and for loop devices root");
    return false;
}

static void end_place(void)
{
    if (on_loop)
        detach_loop(path);
    unlink(file);
}

/* Opens in a child and returns the result. */
static int open_elsewhere(int flags)
{
    pid_t child = fork();
    int status;

    if (child == 0) {
        struct ht_dev *dev;
        int rc = ht_dev_open(path, flags, &dev);
        _exit(-rc);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFEXITED(status));
    return -WEXITSTATUS(status);
}

static struct ht_dev *open_here(int flags)
{
    struct ht_dev *dev;

    ck_assert_int_eq(ht_dev_open(path, flags | HT_DEV_QUIET, &dev), 0);
    return dev;
}

TEST_LOOP(a_second_holder_is_refused, PLACES)
{
    struct ht_dev *dev, *again;

    if (!begin_place(_i))
        return;
    dev = open_here(0);
    ck_assert_int_eq(open_elsewhere(HT_DEV_NOWAIT), -EBUSY);
    ck_assert_int_eq(open_elsewhere(HT_DEV_NOWAIT | HT_DEV_RDONLY), -EBUSY);
    ck_assert_int_eq(ht_dev_open(path, HT_DEV_NOWAIT, &again), -EBUSY); /* in this process, too */
    ht_dev_close(dev);
    ck_assert_int_eq(open_elsewhere(HT_DEV_NOWAIT), 0);
}

TEST_LOOP(a_reader_keeps_writers_away_and_cannot_write, PLACES)
{
    if (!begin_place(_i))
        return;
    uint8_t *buf = aligned(BLOCK);
    struct ht_dev *dev = open_here(HT_DEV_RDONLY);
    ck_assert(ht_dev_facts(dev)->rdonly);
    ck_assert_int_eq(open_elsewhere(HT_DEV_NOWAIT), -EBUSY);
    ck_assert_int_eq(open_elsewhere(HT_DEV_NOWAIT | HT_DEV_RDONLY), shared_by_readers ? 0 : -EBUSY);
    ck_assert_int_eq(ht_dev_read(dev, 0, buf, BLOCK), 0);
    ck_assert_int_eq(ht_dev_write(dev, 0, buf, BLOCK), -EROFS);
    ht_dev_close(dev);
}

TEST_LOOP(closing_and_opening_again_works_at_once, PLACES)
{
    if (!begin_place(_i))
        return;
    uint8_t *buf = aligned(BLOCK);
    for (int i = 0; i < 200; i++) {
        struct ht_dev *dev;
        ck_assert_int_eq(ht_dev_open(path, HT_DEV_NOWAIT, &dev), 0);
        ck_assert_int_eq(ht_dev_write(dev, 0, buf, BLOCK), 0);
        ck_assert_int_eq(ht_dev_flush(dev), 0);
        ht_dev_close(dev);
    }
}

/*
 * Another process holds the device for hold_ms, or with 0 until something is printed. Returns the text that opening it
 * then prints to standard error, which is no terminal.
 */
static void open_beside_holder(unsigned hold_ms, char *text, size_t cap)
{
    int hold[2], said[2], status, saved;
    struct ht_dev *dev;

    ck_assert_int_eq(pipe(hold), 0);
    ck_assert_int_eq(pipe2(said, O_NONBLOCK), 0);
    uint64_t began_ns = ht_now_ns(); /* before the child holds it: this thread may come late */
    pid_t child = fork();
    if (child == 0) {
        char byte = 0;
        if (ht_dev_open(path, HT_DEV_QUIET, &dev) != 0 || write(hold[1], &byte, 1) != 1)
            _exit(1);
        if (hold_ms)
            usleep(hold_ms * 1000);
        else
            (void)poll(&(struct pollfd){.fd = said[0], .events = POLLIN}, 1, 25000);
        ht_dev_close(dev);
        _exit(0);
    }
    ck_assert_int_eq(read(hold[0], text, 1), 1);
    saved = dup(STDERR_FILENO);
    dup2(said[1], STDERR_FILENO);
    int rc = ht_dev_open(path, 0, &dev);
    dup2(saved, STDERR_FILENO);
    ck_assert_int_eq(rc, 0);
    ck_assert_uint_ge(ht_now_ns() - began_ns, hold_ms * 1000000ull);
    ht_dev_close(dev);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    ssize_t n = read(said[0], text, cap - 1);
    text[n > 0 ? n : 0] = 0;
    const int fds[] = {hold[0], hold[1], said[0], said[1], saved};
    for (size_t i = 0; i < HT_ARRAY_SIZE(fds); i++)
        close(fds[i]);
}

TEST_LOOP(waiting_for_a_holder_ends_when_it_leaves_and_says_so_after_some_seconds, PLACES)
{
    char text[512] = "";

    if (!begin_place(_i))
        return;
    open_beside_holder(0, text, sizeof(text));
    ck_assert_ptr_nonnull(strstr(text, path));
    ck_assert_ptr_nonnull(strstr(text, "waiting"));
    open_beside_holder(500, text, sizeof(text));
    ck_assert_str_eq(text, "");
}

/* Starts far more writes than the device can have taken when the parent kills us. */
static void write_until_killed(int report)
{
    enum { DEPTH = 64, LEN = 1 << 20 };
    static struct ht_io ios[DEPTH];
    uint8_t *buf = aligned(LEN);
    struct ht_ring *ring;
    struct ht_dev *dev;
    char byte = 0;

    memset(buf, 0xee, LEN);
    if (ht_dev_open(path, HT_DEV_QUIET, &dev) != 0 || ht_ring_new(HT_RING_DEFERRED, DEPTH, &ring) != 0)
        _exit(1);
    for (uint64_t n = 0;; n++) {
        struct ht_io *io = &ios[n % DEPTH];
        if (n >= DEPTH && ht_ring_wait(ring, io) != 0)
            _exit(1);
        *io = io_of(dev, HT_IO_WRITE, n % DEPTH * LEN, buf, LEN);
        ht_ring_submit(ring, io);
        ht_ring_kick(ring);
        if (n == DEPTH && write(report, &byte, 1) != 1)
            _exit(1);
    }
}

TEST_LOOP(the_hold_of_a_killed_process_lasts_until_its_last_write, PLACES)
{
    struct ht_dev *dev;
    int report[2], status;
    pid_t child;

    if (!begin_place(_i))
        return;
    uint8_t *ours = aligned(BLOCK);
    uint8_t *seen = aligned(BLOCK);
    for (unsigned round = 0; round < 5; round++) {
        ck_assert_int_eq(pipe(report), 0);
        child = fork();
        if (child == 0)
            write_until_killed(report[1]);
        close(report[1]);
        ck_assert_int_eq(read(report[0], seen, 1), 1);
        close(report[0]);
        ck_assert_int_eq(kill(child, SIGKILL), 0);
        /* Before the child is reaped: only the device's own lock keeps us out. */
        dev = open_here(0);
        fill(ours, 0, BLOCK, round);
        for (uint64_t at = 0; at < DEV_BYTES; at += HT_MIB)
            ck_assert_int_eq(ht_dev_write(dev, at, ours, BLOCK), 0);
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert(WIFSIGNALED(status));
        usleep(100000);
        for (uint64_t at = 0; at < DEV_BYTES; at += HT_MIB) {
            ck_assert_int_eq(ht_dev_read(dev, at, seen, BLOCK), 0);
            ck_assert_mem_eq(seen, ours, BLOCK);
        }
        ht_dev_close(dev);
    }
}

/* stderr goes here, so that the messages of refusals can be looked at. */
static int refused(const char *what, int flags, char *text, size_t cap)
{
    int said[2], saved = dup(STDERR_FILENO), rc;
    struct ht_dev *dev;

    ck_assert_int_eq(pipe2(said, O_NONBLOCK), 0);
    dup2(said[1], STDERR_FILENO);
    rc = ht_dev_open(what, flags, &dev);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(said[1]);
    ssize_t n = read(said[0], text, cap - 1);
    text[n > 0 ? n : 0] = '\0';
    close(said[0]);
    return rc;
}

TEST(what_is_no_device_is_named_and_refused)
{
    char text[1024], fifo[PATH_MAX + 8];

    ck_assert_int_eq(refused("/nonexistent/store", 0, text, sizeof(text)), -ENOENT);
    ck_assert_ptr_nonnull(strstr(text, "/nonexistent/store"));
    ck_assert_int_eq(refused("/tmp", 0, text, sizeof(text)), -EINVAL);
    ck_assert_ptr_nonnull(strstr(text, "/tmp is neither a block device nor a regular file"));
    ck_assert_int_eq(refused("/dev/null", 0, text, sizeof(text)), -EINVAL);
    ck_assert_ptr_nonnull(strstr(text, "/dev/null"));

    scratch_path(file, 0);
    snprintf(fifo, sizeof(fifo), "%s.fifo", file);
    ck_assert_int_eq(mkfifo(fifo, 0600), 0);
    ck_assert_int_eq(refused(fifo, 0, text, sizeof(text)), -EINVAL); /* and does not hang */
    ck_assert_ptr_nonnull(strstr(text, fifo));
    unlink(fifo);
    unlink(file);
}

TEST(a_file_system_without_direct_io_is_named_with_the_remedy)
{
    char text[1024];

    /* A regular file of a file system that never had O_DIRECT. */
    ck_assert_int_eq(refused("/proc/version", HT_DEV_RDONLY, text, sizeof(text)), -EINVAL);
    ck_assert_ptr_nonnull(strstr(text, "/proc/version"));
    ck_assert_ptr_nonnull(strstr(text, "O_DIRECT"));
    ck_assert_ptr_nonnull(strstr(text, "ext4 or xfs"));
}

TEST(a_write_protected_device_is_for_reading_only)
{
    char text[1024];

    if (!begin_place(ON_LOOP))
        return;
    detach_loop(path);
    ck_assert(attach_loop(file, 512, true, path));
    ck_assert_int_lt(refused(path, HT_DEV_QUIET, text, sizeof(text)), 0);
    ck_assert_ptr_nonnull(strstr(text, path));
    struct ht_dev *dev = open_here(HT_DEV_RDONLY);
    ht_dev_close(dev);
}

TEST(an_odd_size_is_rounded_down_to_whole_blocks)
{
    if (!begin_place(ON_FILE))
        return;
    ck_assert_int_eq(truncate(path, 10 * BLOCK + 100), 0);
    struct ht_dev *dev = open_here(0);
    ck_assert_uint_eq(ht_dev_size(dev), 10 * BLOCK);
    ck_assert_str_eq(ht_dev_name(dev), path);
    ck_assert_int_ge(ht_dev_facts(dev)->numa_node, -1);
    ht_dev_close(dev);
}

RUN_TESTS("hold", .teardown = end_place, .timeout_s = 180)
