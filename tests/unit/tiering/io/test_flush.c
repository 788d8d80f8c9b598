/* SPDX-License-Identifier: Apache-2.0 */
/* Flushes that callers share, and the volatile cache of a memory device. */
#include "io_test.h"
#include "tiering/base/activity.h"
#include "tiering/io/rings.h"

#define DEV_BYTES (2 * HT_MIB)
#define BLOCK 4096u
#define THREADS 8u

static struct ht_dev *dev;
static _Atomic unsigned ended; /* threads that began flushes */

static uint64_t flushes(void)
{
    struct ht_dev_counters c;

    ht_dev_counters(dev, &c);
    return c.flushes;
}

static void write_block(uint64_t n, uint8_t with)
{
    uint8_t *buf = aligned(BLOCK);

    memset(buf, with, BLOCK);
    ck_assert_int_eq(ht_dev_write(dev, n * BLOCK, buf, BLOCK), 0);
}

static void *flush_main(void *arg)
{
    int rc = ht_dev_flush(dev);

    ended++;
    return (void *)(intptr_t)rc;
}

static unsigned begin_flushes(pthread_t thread[], unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, flush_main, NULL), 0);
    return count;
}

static unsigned count_failed(pthread_t thread[], unsigned count)
{
    unsigned failed = 0;
    void *result;

    for (unsigned i = 0; i < count; i++) {
        pthread_join(thread[i], &result);
        failed += result != NULL;
    }
    return failed;
}

static unsigned count_waiting(const char *what)
{
    unsigned waiting = 0;

    for (unsigned i = 0; i < HT_ACTIVITIES_MAX; i++) {
        const struct ht_activity *a = ht_activity_at(i);
        const char *wait = a ? a->wait : NULL;
        waiting += wait && !strcmp(wait, what);
    }
    return waiting;
}

/* Threads that wait for a flush that another one began. */
static unsigned count_sharers(void)
{
    return count_waiting("a flush that another thread began");
}

static void wait_for_sharers(unsigned count)
{
    while (count_sharers() < count)
        usleep(1000);
}

/* Until a thread waits for the flush that it began. */
static void wait_for_flush(void)
{
    while (count_waiting("a device") == 0)
        usleep(1000);
}

/*
 * written: something since the flush in flight began. Threads that come late need one of their
 * own, and these may share it.
 */
TEST_LOOP(callers_that_come_during_a_flush_share_one, 2)
{
    bool written = _i;
    pthread_t first, others[THREADS];

    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 512, &dev), 0);
    ck_assert_int_eq(dev_set_cache(dev, UINT32_MAX), 0); /* no flush ends by itself */
    write_block(0, 1);
    begin_flushes(&first, 1);
    wait_for_flush();
    if (written)
        write_block(1, 2);
    begin_flushes(others, THREADS);
    wait_for_sharers(written ? THREADS - 1 : THREADS);
    dev_set_flush_us(dev, 0);
    ck_assert_uint_eq(count_failed(&first, 1), 0);
    ck_assert_uint_eq(count_failed(others, THREADS), 0);
    ck_assert_uint_eq(flushes(), written ? 2 : 1);
    ck_assert(!ht_dev_needs_flush(dev));
    ht_dev_close(dev);
}

TEST(a_write_that_ends_during_a_flush_is_not_covered)
{
    pthread_t first;

    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 512, &dev), 0);
    ck_assert_int_eq(dev_set_cache(dev, UINT32_MAX), 0);
    ck_assert(!ht_dev_needs_flush(dev));
    write_block(0, 1);
    ck_assert(ht_dev_needs_flush(dev));
    begin_flushes(&first, 1);
    wait_for_flush();
    write_block(1, 2);
    dev_set_flush_us(dev, 0);
    ck_assert_uint_eq(count_failed(&first, 1), 0);
    ck_assert(ht_dev_needs_flush(dev));
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    ck_assert(!ht_dev_needs_flush(dev));
    ht_dev_close(dev);
}

static void *flush_both_main(void *arg)
{
    struct ht_dev *const *both = arg;
    int results[2];

    ht_ring_flush(ht_ring_mine(NULL), both, 2, results);
    return (void *)(intptr_t)(results[0] || results[1]);
}

TEST(a_silent_device_does_not_keep_the_flush_of_another)
{
    struct ht_dev *both[2];
    pthread_t thread;

    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(dev_open_ram(DEV_BYTES, 512, &both[i]), 0);
    dev = both[1];
    dev_stall(both[0], true);
    ck_assert_int_eq(pthread_create(&thread, NULL, flush_both_main, both), 0);
    for (unsigned i = 0; i < 10; i++)
        ck_assert_int_eq(ht_dev_flush(dev), 0);
    dev_stall(both[0], false);
    ck_assert_uint_eq(count_failed(&thread, 1), 0);
    for (unsigned i = 0; i < 2; i++)
        ht_dev_close(both[i]);
}

TEST(a_failure_since_the_write_is_told)
{
    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 512, &dev), 0);
    uint64_t failures = ht_dev_flush_failures(dev);
    write_block(0, 1);
    ck_assert_int_eq(ht_dev_flush_since(dev, failures), 0);
    dev_fail(dev, HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_dev_flush(dev), -EIO);
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    ck_assert_int_eq(ht_dev_flush_since(dev, failures), -EIO);
    ht_dev_close(dev);
}

/* A flush that no other caller shares fails, also on a device that does not answer. */
static void fail_a_flush(void)
{
    struct ht_io io = {.op = HT_IO_FLUSH, .dev = dev};

    dev_fail(dev, HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_ring_run(ht_ring_mine(NULL), &io, 1), -EIO);
}

/*
 * joined: the failure comes after the others joined the flush in flight. It voids the writes that the flush covers, so
 * all fail, and it counts once.
 */
TEST_LOOP(callers_that_join_a_flush_see_a_failure, 2)
{
    bool joined = _i;
    pthread_t first, others[THREADS];
    struct ht_dev_counters c;

    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 512, &dev), 0);
    write_block(0, 1);
    dev_stall(dev, true);
    begin_flushes(&first, 1);
    wait_for_flush();
    if (!joined)
        fail_a_flush();
    begin_flushes(others, THREADS);
    if (joined) {
        wait_for_sharers(THREADS);
        fail_a_flush();
    } else {
        ck_assert_uint_eq(count_failed(others, THREADS), THREADS);
    }
    dev_stall(dev, false);
    ck_assert_uint_eq(count_failed(&first, 1), 1);
    if (joined)
        ck_assert_uint_eq(count_failed(others, THREADS), THREADS);
    ht_dev_counters(dev, &c);
    ck_assert_uint_eq(c.flush_errors, 1);
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    ht_dev_close(dev);
}

/* The device fails a flush and loses what an older one covers. That one succeeds before anyone knows of the failure. */
TEST(a_success_beside_a_failure_is_not_believed)
{
    pthread_t older, newer;

    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 512, &dev), 0);
    ck_assert_int_eq(dev_set_cache(dev, UINT32_MAX), 0); /* no flush ends by itself */
    write_block(0, 1);
    begin_flushes(&older, 1);
    wait_for_flush();
    write_block(1, 2);
    dev_fail(dev, HT_IO_FLUSH, 1, false);
    dev_set_error_us(dev, UINT32_MAX);
    begin_flushes(&newer, 1);
    while (dev_errors_pending(dev) == 0)
        usleep(1000);
    dev_set_flush_us(dev, 0);
    while (count_sharers() == 0 && ended == 0)
        usleep(1000);
    ck_assert_uint_eq(ended, 0);
    ck_assert(ht_dev_needs_flush(dev));
    dev_set_error_us(dev, 0);
    ck_assert_uint_eq(count_failed(&older, 1), 1);
    ck_assert_uint_eq(count_failed(&newer, 1), 1);
    ck_assert(ht_dev_needs_flush(dev));
    ht_dev_close(dev);
}

static unsigned sectors_of(uint64_t n, uint8_t with)
{
    const uint8_t *block = (const uint8_t *)ht_dev_ram_data(dev) + n * BLOCK;
    unsigned count = 0;

    for (unsigned i = 0; i < BLOCK; i += 512)
        count += block[i] == with && block[i + 511] == with;
    return count;
}

TEST(a_power_cut_keeps_what_was_flushed_and_any_sectors_of_the_rest)
{
    unsigned kept = 0;

    for (uint64_t seed = 1; seed <= 20; seed++) {
        ck_assert_int_eq(dev_open_ram(DEV_BYTES, 512, &dev), 0);
        ck_assert_int_eq(dev_set_cache(dev, 0), 0);
        write_block(0, 1);
        ck_assert_int_eq(ht_dev_flush(dev), 0);
        write_block(1, 2);
        dev_power_off(&dev, 1, seed);
        uint8_t *buf = aligned(BLOCK);
        ck_assert_int_eq(ht_dev_write(dev, 0, buf, BLOCK), -EIO);
        dev_power_on(dev);
        ck_assert_uint_eq(sectors_of(0, 1), BLOCK / 512);
        kept += sectors_of(1, 2);
        ht_dev_close(dev);
    }
    ck_assert_uint_gt(kept, 0);
    ck_assert_uint_lt(kept, 20 * BLOCK / 512);
}

TEST(no_later_flush_brings_what_a_failed_one_lost)
{
    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 512, &dev), 0);
    ck_assert_int_eq(dev_set_cache(dev, 0), 0);
    write_block(0, 1);
    dev_fail(dev, HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_dev_flush(dev), -EIO);
    ck_assert_uint_eq(sectors_of(0, 1), BLOCK / 512); /* can be read */
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    dev_power_off(&dev, 1, 1);
    dev_power_on(dev);
    ck_assert_uint_eq(sectors_of(0, 1), 0);
    ht_dev_close(dev);
}

RUN_TESTS("flush", .timeout_s = 120)
