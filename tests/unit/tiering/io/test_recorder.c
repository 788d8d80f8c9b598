/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An independent reader of the dm-log-writes format reads the recorder's output. Replaying everything gives the
 * device's bytes. The durable part is exactly what a flush had covered.
 */
#include <sys/stat.h>
#include "io_test.h"
#include "tests/support/recorder.h"
#include "tiering/base/buf.h"

#define DEV_BYTES (4 * HT_MIB)
#define BLOCK 4096u
#define SECTOR 512u

enum { FLUSH = 1, FUA = 2, MARK = 8 };

struct entry {
    uint64_t offset, len, flags;
    const uint8_t *data;
    char text[SECTOR];
};

struct log {
    uint8_t *bytes;
    struct entry *entries;
    size_t count;
};

static struct ht_dev *dev;
static struct ht_ring *ring;
static char log_path[PATH_MAX];
static uint8_t *base; /* the device when recording began */

static bool begin(int kind)
{
    dev = open_kind((enum kind)kind, DEV_BYTES);
    if (!dev)
        return false;
    base = aligned(DEV_BYTES);
    fill(base, 0, DEV_BYTES, 77);
    ck_assert_int_eq(ht_dev_write(dev, 0, base, DEV_BYTES), 0);
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    ck_assert_int_eq(ht_ring_new(HT_RING_DEFERRED, 16, &ring), 0);
    scratch_path(log_path, 0);
    ck_assert_int_eq(recorder_start(dev, log_path), 0);
    return true;
}

static void close_device(void)
{
    ht_ring_free(ring);
    ht_dev_close(dev);
    dev = NULL;
}

static void finish(void)
{
    if (dev)
        close_device();
    unlink(log_path);
}

static struct log read_log(void)
{
    struct log log = {0};
    struct stat st;
    size_t at = SECTOR;
    int fd = open(log_path, O_RDONLY | O_CLOEXEC);

    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(fstat(fd, &st), 0);
    log.bytes = test_alloc((size_t)st.st_size);
    ck_assert_int_eq(read(fd, log.bytes, (size_t)st.st_size), st.st_size);
    close(fd);
    ck_assert_uint_eq(ht_le64_load(log.bytes), 0x6a736677736872u);
    ck_assert_uint_eq(ht_le64_load(log.bytes + 8), 1);
    log.count = ht_le64_load(log.bytes + 16);
    ck_assert_uint_eq(ht_le32_load(log.bytes + 24), SECTOR);
    log.entries = test_alloc((log.count + 1) * sizeof(*log.entries));
    for (size_t i = 0; i < log.count; i++) {
        struct entry *e = &log.entries[i];
        const uint8_t *head = log.bytes + at;
        uint64_t text_len = ht_le64_load(head + 24);
        ck_assert_uint_le(at + SECTOR, (size_t)st.st_size);
        e->offset = ht_le64_load(head) * SECTOR;
        e->len = ht_le64_load(head + 8) * SECTOR;
        e->flags = ht_le64_load(head + 16);
        e->data = head + SECTOR;
        ck_assert_uint_le(text_len, SECTOR - 32);
        memcpy(e->text, head + 32, text_len);
        at += SECTOR + e->len;
    }
    ck_assert_uint_eq(at, (size_t)st.st_size); /* the count is the content */
    return log;
}

static struct log stop(void)
{
    ck_assert_int_eq(recorder_stop(dev), 0);
    return read_log();
}

static void apply(uint8_t *image, const struct entry *e)
{
    ck_assert_uint_le(e->offset + e->len, DEV_BYTES);
    memcpy(image + e->offset, e->data, e->len);
}

/* Brings the image to the content that is durable after entry `upto` (exclusive); from: the entry it stands at. */
struct durable {
    uint8_t *image;
    size_t next, first_volatile;
};

static void advance(struct durable *d, const struct log *log, size_t upto)
{
    for (; d->next < upto; d->next++) {
        const struct entry *e = &log->entries[d->next];
        if (e->flags & FLUSH) {
            for (size_t i = d->first_volatile; i < d->next; i++)
                apply(d->image, &log->entries[i]);
            d->first_volatile = d->next + 1;
        }
        if (e->flags & FUA)
            apply(d->image, e);
    }
}

static void check_replay_is_the_device(const struct log *log)
{
    uint8_t *image = aligned(DEV_BYTES), *now = aligned(DEV_BYTES);

    memcpy(image, base, DEV_BYTES);
    for (size_t i = 0; i < log->count; i++)
        apply(image, &log->entries[i]);
    ck_assert_int_eq(ht_dev_read(dev, 0, now, DEV_BYTES), 0);
    ck_assert(memcmp(image, now, DEV_BYTES) == 0);
}

static void write_block(struct ht_ring *with, uint64_t block, uint64_t version)
{
    uint8_t *buf = aligned(BLOCK);
    struct ht_io io = io_of(dev, HT_IO_WRITE, block * BLOCK, buf, BLOCK);

    fill(buf, block * BLOCK, BLOCK, version);
    ck_assert_int_eq(ht_ring_run(with, &io, 1), 0);
}

static bool is_write(const struct entry *e, uint64_t block, uint64_t version, uint64_t flags)
{
    return e->flags == flags && e->offset == block * BLOCK && e->len == BLOCK &&
        is_filled(e->data, block * BLOCK, BLOCK, version);
}

TEST_LOOP(writes_flushes_and_marks_are_logged_in_order, KINDS)
{
    uint8_t buf[8];

    if (!begin(_i))
        return;
    write_block(ring, 1, 1);
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    ck_assert_int_eq(recorder_mark(dev, "first step"), 0);
    write_block(ring, 2, 2);
    dev_fail(dev, HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_dev_flush(dev), -EIO); /* not logged: it covered nothing */
    ck_assert_int_eq(ht_dev_read(dev, 0, base, BLOCK), 0);
    ck_assert_int_eq(ht_dev_write(dev, 8, buf, 8), -EINVAL);
    ck_assert_int_eq(recorder_mark(dev, ""), 0);
    struct log log = stop();
    ck_assert_uint_eq(log.count, 5);
    ck_assert(is_write(&log.entries[0], 1, 1, 0));
    ck_assert_uint_eq(log.entries[1].flags, FLUSH);
    ck_assert_uint_eq(log.entries[1].len, 0);
    ck_assert_uint_eq(log.entries[2].flags, MARK);
    ck_assert_str_eq(log.entries[2].text, "first step");
    ck_assert(is_write(&log.entries[3], 2, 2, 0));
    ck_assert_uint_eq(log.entries[4].flags, MARK);
    check_replay_is_the_device(&log);
}

TEST_LOOP(a_write_beside_a_flush_is_not_made_durable_by_it, KINDS)
{
    struct ht_ring *other;
    struct durable d = {0};

    if (!begin(_i))
        return;
    ck_assert_int_eq(ht_ring_new(HT_RING_DEFERRED, 4, &other), 0);
    write_block(ring, 1, 1);
    write_block(ring, 2, 1);
    struct ht_io flush = io_of(dev, HT_IO_FLUSH, 0, NULL, 0);
    ht_ring_submit(ring, &flush);
    write_block(other, 2, 2); /* over one that the flush covers */
    write_block(other, 3, 2);
    ck_assert_int_eq(ht_ring_wait(ring, &flush), 0);
    ck_assert_int_eq(recorder_mark(dev, "flushed"), 0);
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    struct log log = stop();

    ck_assert_uint_eq(log.count, 9);
    ck_assert(is_write(&log.entries[0], 1, 1, 0));
    ck_assert(is_write(&log.entries[1], 2, 1, 0));
    ck_assert(is_write(&log.entries[2], 2, 2, 0));
    ck_assert(is_write(&log.entries[3], 3, 2, 0));
    ck_assert(is_write(&log.entries[4], 1, 1, FUA));
    ck_assert(is_write(&log.entries[5], 2, 1, FUA));
    ck_assert(is_write(&log.entries[6], 2, 2, 0));
    ck_assert_uint_eq(log.entries[7].flags, MARK);
    ck_assert_uint_eq(log.entries[8].flags, FLUSH);

    d.image = aligned(DEV_BYTES);
    memcpy(d.image, base, DEV_BYTES);
    advance(&d, &log, 7);
    ck_assert(is_filled(d.image + 1 * BLOCK, 1 * BLOCK, BLOCK, 1));
    ck_assert(is_filled(d.image + 2 * BLOCK, 2 * BLOCK, BLOCK, 1));
    ck_assert(is_filled(d.image + 3 * BLOCK, 3 * BLOCK, BLOCK, 77));
    advance(&d, &log, 9);
    ck_assert(is_filled(d.image + 2 * BLOCK, 2 * BLOCK, BLOCK, 2));
    ck_assert(is_filled(d.image + 3 * BLOCK, 3 * BLOCK, BLOCK, 2));
    check_replay_is_the_device(&log);
    ht_ring_free(other);
}

#define THREADS 4u
#define BLOCKS_EACH 16u
#define ROUNDS 120u

/* Writes versions of its own blocks, flushes now and then, and marks the promise of each flush. */
static void *work(void *arg)
{
    uint64_t first = (uintptr_t)arg * BLOCKS_EACH;
    unsigned seed = (unsigned)(uintptr_t)arg + 1;
    struct ht_ring *own;
    char text[64];

    ck_assert_int_eq(ht_ring_new(HT_RING_DEFERRED, 4, &own), 0);
    for (uint64_t version = 1; version <= ROUNDS; version++) {
        for (unsigned i = 0; i < BLOCKS_EACH; i++)
            if (i == 0 || rand_r(&seed) % 4 == 0)
                write_block(own, first + i, version);
        if (rand_r(&seed) % 3 == 0) {
            struct ht_io flush = io_of(dev, HT_IO_FLUSH, 0, NULL, 0);
            ck_assert_int_eq(ht_ring_run(own, &flush, 1), 0);
            snprintf(text, sizeof(text), "%u %u", (unsigned)first, (unsigned)version);
            ck_assert_int_eq(recorder_mark(dev, text), 0);
        }
    }
    ht_ring_free(own);
    return NULL;
}

/* The first block of each region carries every version. */
static unsigned version_of(const uint8_t *image, uint64_t block)
{
    for (unsigned v = ROUNDS; v > 0; v--)
        if (is_filled(image + block * BLOCK, block * BLOCK, BLOCK, v))
            return v;
    return 0;
}

TEST_LOOP(what_flushes_of_many_threads_promised_is_durable_in_the_log, KINDS)
{
    unsigned promised, first, marks = 0;
    struct durable d = {0};
    pthread_t threads[THREADS];

    if (!begin(_i))
        return;
    for (uintptr_t i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, work, (void *)i), 0);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    struct log log = stop();
    check_replay_is_the_device(&log);
    d.image = aligned(DEV_BYTES);
    memcpy(d.image, base, DEV_BYTES);
    for (size_t i = 0; i < log.count; i++) {
        if (log.entries[i].flags != MARK)
            continue;
        advance(&d, &log, i);
        ck_assert_int_eq(sscanf(log.entries[i].text, "%u %u", &first, &promised), 2);
        ck_assert_uint_eq(version_of(d.image, first), promised);
        marks++;
    }
    ck_assert_uint_gt(marks, THREADS * 10);
}

TEST(a_recorder_is_one_per_device_and_refuses_what_it_cannot_do)
{
    char text[SECTOR];

    ck_assert(begin(RAM_512));
    ck_assert_int_eq(recorder_start(dev, "/tmp"), -EISDIR);
    memset(text, 'x', sizeof(text));
    text[481] = '\0';
    ck_assert_int_eq(recorder_mark(dev, text), -EINVAL);
    text[480] = '\0';
    ck_assert_int_eq(recorder_mark(dev, text), 0);
    struct log log = stop();
    ck_assert_uint_eq(log.count, 1);
    ck_assert_str_eq(log.entries[0].text, text);
    ck_assert_int_eq(recorder_stop(dev), -ENOENT);
    ck_assert_int_eq(recorder_mark(dev, "x"), -ENOENT);
}

TEST(a_second_recorder_leaves_the_first_alone)
{
    char other[PATH_MAX];

    ck_assert(begin(RAM_512));
    scratch_path(other, 0);
    ck_assert_int_eq(recorder_start(dev, other), -EBUSY);
    unlink(other);
    write_block(ring, 1, 1);
    struct log log = stop();
    ck_assert_uint_eq(log.count, 1);
}

TEST(a_log_that_cannot_be_written_is_reported_and_writes_go_on)
{
    ck_assert(begin(RAM_512));
    ck_assert_int_eq(recorder_stop(dev), 0);
    ck_assert_int_eq(recorder_start(dev, "/dev/full"), -ENOSPC);
    write_block(ring, 1, 1);
}

/* All writes have one order, addresses follow each other, and a flush of one device does not cover the other. */
TEST(devices_recorded_together_share_one_order)
{
    struct ht_dev *second;
    uint8_t *buf = aligned(BLOCK);

    ck_assert(begin(RAM_512));
    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 512, &second), 0);
    ck_assert_int_eq(recorder_join(dev, second), -ENOENT);
    ck_assert_int_eq(recorder_join(second, dev), 0);
    ck_assert_int_eq(recorder_join(second, dev), -EBUSY);
    fill(buf, BLOCK, BLOCK, 5);
    ck_assert_int_eq(ht_dev_write(dev, BLOCK, buf, BLOCK), 0);
    ck_assert_int_eq(ht_dev_write(second, 2 * BLOCK, buf, BLOCK), 0);
    ck_assert_int_eq(ht_dev_flush(second), 0);
    ck_assert_int_eq(recorder_mark(second, "second is durable"), 0);
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    struct log log = stop();
    ck_assert_uint_eq(log.count, 5);
    ck_assert_uint_eq(log.entries[0].offset, BLOCK);
    ck_assert_uint_eq(log.entries[1].offset, DEV_BYTES + 2 * BLOCK);
    ck_assert_uint_eq(log.entries[2].flags, FUA);
    ck_assert_uint_eq(log.entries[2].offset, DEV_BYTES + 2 * BLOCK);
    ck_assert_mem_eq(log.entries[2].data, buf, BLOCK);
    ck_assert_uint_eq(log.entries[3].flags, MARK);
    ck_assert_uint_eq(log.entries[4].flags, FLUSH);
    ck_assert_int_eq(recorder_stop(second), -ENOENT);
    ht_dev_close(second);
}

TEST(closing_ends_a_recording)
{
    ck_assert(begin(RAM_512));
    write_block(ring, 1, 1);
    close_device();
    struct log log = read_log();
    ck_assert_uint_eq(log.count, 1);
}

RUN_TESTS("recorder", .teardown = finish, .timeout_s = 120)
