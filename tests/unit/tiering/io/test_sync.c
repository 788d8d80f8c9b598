/* SPDX-License-Identifier: Apache-2.0 */
/* Reads, writes and flushes without a ring: any buffer, any length, any thread, any process. */
#include <sys/wait.h>
#include "io_test.h"

#define DEV_BYTES (32 * HT_MIB)
#define BLOCK 4096u
#define THREADS 40u

static struct ht_dev *dev;

TEST_LOOP(a_buffer_at_any_address_and_long_transfers_work, KINDS)
{
    const size_t len = 11 * HT_MIB + BLOCK;

    dev = open_kind((enum kind)_i, DEV_BYTES);
    if (!dev)
        return;
    uint8_t *buf = aligned(len + BLOCK);
    for (unsigned shift = 0; shift < 2; shift++) {
        uint8_t *at = buf + shift;
        fill(at, 2 * BLOCK, len, shift);
        ck_assert_int_eq(ht_dev_write(dev, 2 * BLOCK, at, len), 0);
        ck_assert(is_filled(at, 2 * BLOCK, len, shift)); /* a write only reads its buffer */
        memset(buf, 0, len + BLOCK);
        ck_assert_int_eq(ht_dev_read(dev, 2 * BLOCK, at, len), 0);
        ck_assert(is_filled(at, 2 * BLOCK, len, shift));
        ck_assert_int_eq(ht_dev_flush(dev), 0);
        ck_assert(!ht_dev_needs_flush(dev));
    }
    ht_dev_close(dev);
}

TEST_LOOP(a_refused_request_moves_nothing, KINDS)
{
    struct ht_dev_counters c;

    dev = open_kind((enum kind)_i, DEV_BYTES);
    if (!dev)
        return;
    uint8_t *buf = aligned(3 * HT_MIB);
    ck_assert_int_eq(ht_dev_write(dev, 0, buf, 2 * HT_MIB + 8), -EINVAL);
    ck_assert_int_eq(ht_dev_write(dev, 8, buf, BLOCK), -EINVAL);
    ck_assert_int_eq(ht_dev_write(dev, DEV_BYTES - 2 * HT_MIB, buf, 3 * HT_MIB), -EINVAL);
    ck_assert_int_eq(ht_dev_read(dev, 0, buf, 0), -EINVAL);
    ht_dev_counters(dev, &c);
    ck_assert_uint_eq(c.writes + c.reads, 0);
    dev_fail(dev, HT_IO_WRITE, 2, false);
    ck_assert_int_eq(ht_dev_write(dev, 0, buf, 3 * HT_MIB), -EIO);
    dev_fail(dev, HT_IO_READ, 1, false);
    ck_assert_int_eq(ht_dev_read(dev, 0, buf + 1, BLOCK), -EIO);
    dev_fail(dev, HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_dev_flush(dev), -EIO);
    ht_dev_close(dev);
}

static void *write_and_read(void *arg)
{
    uint64_t offset = (uintptr_t)arg * 64 * BLOCK;
    uint8_t buf[2 * BLOCK];
    uintptr_t bad = 0;

    for (uint64_t round = 0; round < 30; round++) {
        fill(buf, offset, sizeof(buf), round);
        bad += ht_dev_write(dev, offset, buf, sizeof(buf)) != 0;
        memset(buf, 0, sizeof(buf));
        bad += ht_dev_read(dev, offset, buf, sizeof(buf)) != 0;
        bad += !is_filled(buf, offset, sizeof(buf), round);
    }
    return (void *)bad;
}

TEST_LOOP(many_threads_at_once_share_a_device, KINDS)
{
    pthread_t threads[THREADS];

    dev = open_kind((enum kind)_i, DEV_BYTES);
    if (!dev)
        return;
    for (uintptr_t i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, write_and_read, (void *)i), 0);
    for (unsigned i = 0; i < THREADS; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        ck_assert_ptr_null(bad);
    }
    ht_dev_close(dev);
}

/* A child that used its parent's rings would take the parent's completions. */
TEST_LOOP(a_forked_child_has_a_ring_of_its_own, KINDS)
{
    int status;

    dev = open_kind((enum kind)_i, DEV_BYTES);
    if (!dev)
        return;
    uint8_t *buf = aligned(BLOCK);
    fill(buf, 0, BLOCK, 1);
    ck_assert_int_eq(ht_dev_write(dev, 0, buf, BLOCK), 0);
    pid_t child = fork();
    if (child == 0) {
        bool ok = !write_and_read((void *)1);
        _exit(ok ? 0 : 1);
    }
    ck_assert_ptr_null(write_and_read((void *)2));
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    ht_dev_close(dev);
}

/* A test that releases a device before the request that would stop it must not hang at a later one. */
TEST(a_device_that_was_released_stops_at_no_later_request)
{
    uint8_t buf[BLOCK] = {0};

    dev = open_kind(RAM_4096, DEV_BYTES);
    dev_stall_at(dev, HT_IO_WRITE, 1);
    dev_fail(dev, HT_IO_READ, 1, false);
    dev_stall(dev, false);
    ck_assert_int_eq(ht_dev_write(dev, 0, buf, BLOCK), 0);
    ck_assert(!dev_is_stalled(dev));
    ck_assert_int_eq(ht_dev_read(dev, 0, buf, BLOCK), -EIO);
    ht_dev_close(dev);
}

RUN_TESTS("sync", .timeout_s = 120)
