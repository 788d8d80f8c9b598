/* SPDX-License-Identifier: Apache-2.0 */
/* The rate of a device and direction, with a clock of the test; and what counts for it on real devices. */
#include <math.h>

#include "io_test.h"
#include "tiering/io/rate.h"

#define SECOND UINT64_C(1000000000)
#define MS UINT64_C(1000000)
enum { DEPTH_MAX = 32 };

/* A device that serves one request after the other, at so many bytes per second, and has `depth` in flight. */
struct served {
    struct ht_rate rate;
    uint64_t now_ns, began_ns[DEPTH_MAX];
    uint32_t bytes;
    unsigned depth, next;
    double fraction_ns; /* of a nanosecond that no request had yet */
};

static void begin_one(struct served *d, unsigned i)
{
    d->began_ns[i] = d->now_ns;
    ht_rate_begin(&d->rate, d->now_ns, d->bytes);
}

static struct served begin_all(uint32_t bytes, unsigned depth)
{
    struct served d = {.now_ns = 7 * SECOND, .bytes = bytes, .depth = depth};

    for (unsigned i = 0; i < depth; i++)
        begin_one(&d, i);
    return d;
}

static void end_one(struct served *d, bool succeeded)
{
    ht_rate_end(&d->rate, d->now_ns, d->began_ns[d->next], d->bytes, succeeded);
}

static void serve(struct served *d, uint64_t bytes_per_s, unsigned requests)
{
    for (unsigned n = 0; n < requests; n++) {
        double ns = (double)d->bytes * 1e9 / (double)bytes_per_s + d->fraction_ns;
        d->now_ns += (uint64_t)ns;
        d->fraction_ns = ns - (double)(uint64_t)ns;
        end_one(d, true);
        begin_one(d, d->next);
        d->next = (d->next + 1) % d->depth;
    }
}

static struct ht_dev_rate rate_of(const struct served *d)
{
    struct ht_dev_rate out;

    ht_rate_get(&d->rate, d->now_ns, &out);
    return out;
}

static void check_near(uint64_t found, uint64_t wanted, double part)
{
    ck_assert_msg(fabs((double)found - (double)wanted) <= part * (double)wanted, "%llu, not %llu",
                  (unsigned long long)found, (unsigned long long)wanted);
}

static const struct {
    uint32_t bytes;
    unsigned depth;
    uint64_t bytes_per_s;
} steady[] = {
    {HT_MIB, 1, 300 * HT_MIB}, {HT_MIB, 8, 300 * HT_MIB}, {4096, 1, 40000000},    {4096, 32, 2000000000},
    {HT_MIB, 32, 7000000000},  {HT_MIB, 1, HT_MIB},       {HT_MIB, 1, 100 << 10}, {HT_MIB, 4, 100 << 10},
};

TEST_LOOP(a_steady_device_has_its_rate_and_its_latency, HT_ARRAY_SIZE(steady))
{
    struct served d = begin_all(steady[_i].bytes, steady[_i].depth);
    uint64_t each_ns = steady[_i].depth * steady[_i].bytes * SECOND / steady[_i].bytes_per_s;

    serve(&d, steady[_i].bytes_per_s, 20000);
    struct ht_dev_rate found = rate_of(&d);
    ck_assert(found.known);
    check_near(found.bytes_per_s, steady[_i].bytes_per_s, 0.01);
    check_near(found.latency_ns, each_ns, 0.01);
    ck_assert_uint_gt(found.latency_p99_ns, each_ns);
    ck_assert_uint_le(found.latency_p99_ns, ht_max_u64(2 * each_ns, 1000) + 1);
}

TEST(idle_time_lowers_no_rate)
{
    struct served d = {.now_ns = SECOND, .bytes = HT_MIB, .depth = 1};

    for (unsigned i = 0; i < 300; i++) {
        d.now_ns += i % 10 == 0 ? 3600 * SECOND : 17 * MS;
        begin_one(&d, 0);
        d.now_ns += 4 * MS;
        end_one(&d, true);
    }
    uint64_t busy_rate = rate_of(&d).bytes_per_s;
    check_near(busy_rate, 250 * HT_MIB, 0.001);
    d.now_ns += 86400 * SECOND;
    ck_assert_uint_eq(rate_of(&d).bytes_per_s, busy_rate);
}

TEST(a_rate_is_unknown_until_enough_was_seen)
{
    struct served many = begin_all(HT_MIB, 1), few = begin_all(4096, 1);
    const struct ht_dev_rate unknown = {.known = false};
    struct ht_dev_rate found = rate_of(&many);

    ck_assert_mem_eq(&found, &unknown, sizeof(found));
    serve(&many, 300 * HT_MIB, 15);
    found = rate_of(&many);
    ck_assert_mem_eq(&found, &unknown, sizeof(found));
    serve(&many, 300 * HT_MIB, 1);
    ck_assert(rate_of(&many).known);
    serve(&few, 40960, 9);
    ck_assert(!rate_of(&few).known);
    serve(&few, 40960, 1); /* a second of busy time */
    ck_assert(rate_of(&few).known);
    check_near(rate_of(&few).bytes_per_s, 40960, 0.01);
}

static const struct {
    uint64_t from, to;
    unsigned requests;
} drifts[] = {
    {500 * HT_MIB, 250 * HT_MIB, 300}, {250 * HT_MIB, 500 * HT_MIB, 400}, {1000 * HT_MIB, 250 * HT_MIB, 400},
    {300 * HT_MIB, 30 * HT_MIB, 100},  {300 * HT_MIB, 330 * HT_MIB, 300},
};

TEST_LOOP(a_drift_is_followed_within_a_few_hundred_requests, HT_ARRAY_SIZE(drifts))
{
    struct served d = begin_all(HT_MIB, 4);

    serve(&d, drifts[_i].from, 5000);
    check_near(rate_of(&d).bytes_per_s, drifts[_i].from, 0.01);
    serve(&d, drifts[_i].to, drifts[_i].requests);
    check_near(rate_of(&d).bytes_per_s, drifts[_i].to, 0.2);
}

TEST(a_stall_lowers_the_rate_while_it_lasts)
{
    struct served d = begin_all(HT_MIB, 4);

    serve(&d, 200 * HT_MIB, 2000);
    uint64_t before = rate_of(&d).bytes_per_s;
    d.now_ns += 19 * MS; /* four requests take 20 */
    ck_assert_uint_eq(rate_of(&d).bytes_per_s, before);
    for (unsigned i = 0; i < 10; i++) {
        d.now_ns += SECOND;
        ck_assert_uint_lt(rate_of(&d).bytes_per_s, before);
        before = rate_of(&d).bytes_per_s;
    }
    ck_assert_uint_lt(before, HT_MIB);
    d.now_ns += 3600 * SECOND;
    ck_assert_uint_lt(rate_of(&d).bytes_per_s, 2000);
    serve(&d, 200 * HT_MIB, 500); /* the stall does not weigh by its length */
    check_near(rate_of(&d).bytes_per_s, 200 * HT_MIB, 0.2);
}

TEST(a_device_that_completes_nothing_has_the_rate_zero)
{
    struct served silent = begin_all(HT_MIB, 2), failing = begin_all(HT_MIB, 1);

    silent.now_ns += 999 * MS;
    ck_assert(!rate_of(&silent).known);
    silent.now_ns += MS;
    ck_assert(rate_of(&silent).known);
    ck_assert_uint_eq(rate_of(&silent).bytes_per_s, 0);
    ck_assert_uint_eq(rate_of(&silent).latency_ns, 0);
    ck_assert_uint_eq(rate_of(&silent).latency_p99_ns, 0);

    for (unsigned i = 0; i < 100; i++) {
        failing.now_ns += 10 * MS;
        end_one(&failing, false);
        begin_one(&failing, 0);
    }
    ck_assert(rate_of(&failing).known);
    ck_assert_uint_eq(rate_of(&failing).bytes_per_s, 0);
    ck_assert_uint_eq(rate_of(&failing).latency_p99_ns, 0);
    serve(&failing, 100 * HT_MIB, 500); /* and comes back */
    check_near(rate_of(&failing).bytes_per_s, 100 * HT_MIB, 0.01);
}

TEST(a_clock_that_goes_back_is_no_time)
{
    struct served d = begin_all(HT_MIB, 2);

    serve(&d, 100 * HT_MIB, 400);
    uint64_t before = rate_of(&d).bytes_per_s, then_ns = d.now_ns;
    d.now_ns -= SECOND;
    ck_assert_uint_eq(rate_of(&d).bytes_per_s, before);
    end_one(&d, true);
    begin_one(&d, d.next);
    d.now_ns = then_ns;
    ck_assert_uint_lt(rate_of(&d).latency_ns, 21 * MS);
    serve(&d, 100 * HT_MIB, 400);
    check_near(rate_of(&d).bytes_per_s, 100 * HT_MIB, 0.01);
}

TEST(no_time_at_all_is_a_high_rate)
{
    struct served d = begin_all(UINT32_MAX, 1);

    for (unsigned i = 0; i < 1000; i++) {
        end_one(&d, true);
        begin_one(&d, 0);
    }
    ck_assert(rate_of(&d).known);
    ck_assert_uint_gt(rate_of(&d).bytes_per_s, UINT64_C(1) << 50);
    ck_assert_uint_eq(rate_of(&d).latency_p99_ns, 1000);
}

/* slow of 1000 requests take 5 ms, the others 100 us. */
static struct ht_dev_rate mixed(unsigned slow)
{
    struct served d = {.now_ns = SECOND, .bytes = 65536, .depth = 1};

    for (unsigned i = 0; i < 20000; i++) {
        begin_one(&d, 0);
        d.now_ns += (i * slow) % 1000 < slow ? 5 * MS : MS / 10;
        end_one(&d, true);
    }
    return rate_of(&d);
}

TEST(the_99th_percentile_is_about_the_slow_ones)
{
    ck_assert_uint_eq(mixed(0).latency_p99_ns, 128000);
    ck_assert_uint_eq(mixed(4).latency_p99_ns, 128000);
    ck_assert_uint_eq(mixed(40).latency_p99_ns, 8192000);
    ck_assert_uint_eq(mixed(1000).latency_p99_ns, 8192000);
    check_near(mixed(0).latency_ns, MS / 10, 0.001);
    check_near(mixed(100).latency_ns, MS / 10 + 49 * MS / 100, 0.1);
    check_near(mixed(1000).latency_ns, 5 * MS, 0.001);
}

TEST(latencies_follow_a_drift)
{
    struct served d = begin_all(HT_MIB, 1);

    serve(&d, 1000 * HT_MIB, 3000); /* 1 ms */
    ck_assert_uint_eq(rate_of(&d).latency_p99_ns, 1024000);
    serve(&d, 100 * HT_MIB, 20);
    ck_assert_uint_eq(rate_of(&d).latency_p99_ns, 16384000);
    serve(&d, 100 * HT_MIB, 980);
    check_near(rate_of(&d).latency_ns, 10 * MS, 0.05);
    serve(&d, 1000 * HT_MIB, 1000);
    ck_assert_uint_eq(rate_of(&d).latency_p99_ns, 1024000);
    check_near(rate_of(&d).latency_ns, MS, 0.05);
}

TEST(the_longest_requests_have_a_bucket)
{
    struct served d = begin_all(HT_MIB, 1);

    d.now_ns += UINT64_C(100000) * SECOND;
    for (unsigned i = 0; i < d.depth; i++, d.next = (d.next + 1) % d.depth)
        end_one(&d, true);
    ck_assert_uint_eq(rate_of(&d).latency_p99_ns, UINT64_C(1000) << (HT_RATE_BUCKETS - 1));
    ck_assert_uint_eq(rate_of(&d).latency_ns, UINT64_C(100000) * SECOND);
    ck_assert_uint_eq(rate_of(&d).bytes_per_s, HT_MIB / 100000);
}

/* ------------------------------------------------------------------ devices */

enum { DEV_BYTES = 8 * HT_MIB };

static struct ht_dev_rate rate_on(struct ht_dev *dev, enum ht_direction direction)
{
    struct ht_dev_rate out;

    ht_dev_rate(dev, direction, &out);
    return out;
}

static uint64_t ended_bytes(const struct ht_dev *dev, enum ht_direction direction)
{
    return dev->rate[direction].ended_bytes + dev->rate[direction].sample_bytes;
}

/* The time of its slowest request: no rate of these bytes is lower than that of this one. */
static uint64_t transfer(struct ht_dev *dev, enum ht_io_op op, uint64_t bytes)
{
    uint8_t *buf = aligned(HT_MIB);
    uint64_t slowest_ns = 1;

    for (uint64_t at = 0; at < bytes; at += HT_MIB) {
        uint64_t off = at % DEV_BYTES, began_ns = ht_now_ns();
        ck_assert_int_eq(op == HT_IO_READ ? ht_dev_read(dev, off, buf, HT_MIB) : ht_dev_write(dev, off, buf, HT_MIB),
                         0);
        slowest_ns = ht_max_u64(slowest_ns, ht_now_ns() - began_ns);
    }
    return slowest_ns;
}

TEST_RANGE(devices_and_directions_have_rates_of_their_own, RAM_4096, LOOP_512)
{
    struct ht_dev *a = open_kind(_i, DEV_BYTES), *b = open_kind(_i, DEV_BYTES);

    if (a && b) {
        uint64_t began = ht_now_ns();
        uint64_t slowest_ns = transfer(a, HT_IO_WRITE, 32 * HT_MIB);
        uint64_t wall_ns = ht_now_ns() - began;
        struct ht_dev_rate written = rate_on(a, HT_DIRECTION_WRITE);
        ck_assert(written.known);
        ck_assert_uint_ge(written.bytes_per_s, HT_MIB * SECOND / slowest_ns * 99 / 100);
        ck_assert_uint_gt(written.latency_ns, 0);
        ck_assert_uint_le(written.latency_ns, wall_ns / 32);
        ck_assert(!rate_on(a, HT_DIRECTION_READ).known);
        ck_assert(!rate_on(b, HT_DIRECTION_WRITE).known);
        transfer(b, HT_IO_READ, 32 * HT_MIB);
        ck_assert(rate_on(b, HT_DIRECTION_READ).known);
        ck_assert(!rate_on(b, HT_DIRECTION_WRITE).known);
        ck_assert_uint_eq(rate_on(a, HT_DIRECTION_WRITE).bytes_per_s, written.bytes_per_s);
    }
    ht_dev_close(a);
    ht_dev_close(b);
}

TEST_RANGE(only_large_requests_count_for_bandwidth, RAM_4096, LOOP_512)
{
    struct ht_dev *dev = open_kind(_i, DEV_BYTES);
    uint8_t *buf = aligned(HT_MIB);
    struct ht_rate_totals read, written;

    if (dev) {
        for (unsigned i = 0; i < 64; i++)
            ck_assert_int_eq(ht_dev_write(dev, 0, buf, HT_RATE_LARGE_BYTES - 4096), 0);
        ht_dev_large_totals(dev, HT_DIRECTION_WRITE, &written);
        ck_assert_uint_eq(written.bytes, 0);
        ck_assert_uint_eq(written.busy_ns, 0);
        uint64_t began_ns = ht_now_ns(), wall_ns = 0, all = 0;
        while (written.bytes == 0 &&
               wall_ns < 10 * SECOND) { /* periods count when they end: a fast device needs more */
            for (unsigned i = 0; i < 256; i++)
                ck_assert_int_eq(ht_dev_write(dev, 0, buf, HT_RATE_LARGE_BYTES), 0);
            all += 256 * (uint64_t)HT_RATE_LARGE_BYTES;
            wall_ns = ht_now_ns() - began_ns;
            ht_dev_large_totals(dev, HT_DIRECTION_WRITE, &written);
        }
        ht_dev_large_totals(dev, HT_DIRECTION_READ, &read);
        ck_assert_uint_gt(written.bytes, 0);
        ck_assert_uint_le(written.bytes, all);
        ck_assert_uint_gt(written.busy_ns, 0);
        ck_assert_uint_le(written.busy_ns, wall_ns);
        ck_assert_uint_eq(written.waiting_ns, 0);
        ck_assert_uint_eq(read.bytes, 0);
    }
    ht_dev_close(dev);
}

TEST(a_request_in_flight_waits)
{
    struct ht_rate r = {0};
    struct ht_rate_totals totals;

    ht_rate_begin(&r, SECOND, HT_MIB);
    ht_rate_begin(&r, SECOND, HT_MIB);
    ht_rate_totals(&r, 3 * SECOND, &totals);
    ck_assert(totals.waiting_ns == 2 * SECOND && totals.bytes == 0 && totals.busy_ns == 0);
    ht_rate_end(&r, 4 * SECOND, SECOND, HT_MIB, true);
    ht_rate_totals(&r, 5 * SECOND, &totals);
    ck_assert(totals.waiting_ns == SECOND && totals.bytes == HT_MIB && totals.busy_ns == 3 * SECOND);
    ht_rate_end(&r, 6 * SECOND, SECOND, HT_MIB, false);
    ht_rate_totals(&r, 9 * SECOND, &totals);
    ck_assert(totals.waiting_ns == 0 && totals.bytes == HT_MIB && totals.busy_ns == 5 * SECOND);
}

static void *write_main(void *dev)
{
    transfer(dev, HT_IO_WRITE, HT_MIB);
    return NULL;
}

TEST(a_stalled_device_is_known_to_be_slow_and_the_other_one_is_not)
{
    struct ht_dev *a, *b;
    pthread_t thread;

    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 4096, &a), 0);
    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 4096, &b), 0);
    transfer(b, HT_IO_WRITE, 32 * HT_MIB);
    uint64_t of_b = rate_on(b, HT_DIRECTION_WRITE).bytes_per_s;
    uint64_t began_ns = ht_now_ns();
    dev_stall(a, true);
    ck_assert_int_eq(pthread_create(&thread, NULL, write_main, a), 0);
    while (ht_dev_oldest_ns(a) < SECOND / 2) {
        bool known = rate_on(a, HT_DIRECTION_WRITE).known;
        ck_assert(!known || ht_dev_oldest_ns(a) >= SECOND); /* the age is of later */
        usleep(10000);
    }
    while (ht_dev_oldest_ns(a) < SECOND + SECOND / 10)
        usleep(10000);
    ck_assert(rate_on(a, HT_DIRECTION_WRITE).known);
    ck_assert_uint_eq(rate_on(a, HT_DIRECTION_WRITE).bytes_per_s, 0);
    ck_assert(!rate_on(a, HT_DIRECTION_READ).known);
    ck_assert(ht_dev_is_loaded(a) && !ht_dev_is_loaded(b));
    dev_stall(a, false);
    pthread_join(thread, NULL);
    ck_assert(!ht_dev_is_loaded(a));
    uint64_t wall_ns = ht_now_ns() - began_ns;
    ck_assert_uint_ge(rate_on(a, HT_DIRECTION_WRITE).bytes_per_s, HT_MIB * SECOND / wall_ns * 99 / 100);
    ck_assert_uint_lt(rate_on(a, HT_DIRECTION_WRITE).bytes_per_s, HT_MIB);
    ck_assert_uint_gt(rate_on(a, HT_DIRECTION_WRITE).latency_ns, SECOND);
    ck_assert_uint_eq(rate_on(b, HT_DIRECTION_WRITE).bytes_per_s, of_b);
    ht_dev_close(a);
    ht_dev_close(b);
}

/* What a device never sees, or answers with no bytes, is no sample; what it fails is one without bytes. */
TEST(flushes_discards_and_refused_requests_count_for_nothing)
{
    struct ht_dev *dev;
    uint8_t *buf = aligned(HT_MIB);

    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 4096, &dev), 0);
    ck_assert_int_eq(dev_set_cache(dev, 600000), 0);
    for (unsigned i = 0; i < 2; i++) {
        transfer(dev, HT_IO_WRITE, HT_MIB);
        ck_assert_int_eq(ht_dev_flush(dev), 0); /* 0.6 s each */
    }
    ck_assert(!rate_on(dev, HT_DIRECTION_WRITE).known);
    for (unsigned i = 0; i < 32; i++)
        ck_assert_int_eq(ht_dev_read(dev, DEV_BYTES, buf, HT_MIB), -EINVAL);
    const struct ht_rate none = {.in_flight = 0};
    ht_mutex_lock(&dev->flight_lock);
    ck_assert_mem_eq(&dev->rate[HT_DIRECTION_READ], &none, sizeof(none));
    ht_mutex_unlock(&dev->flight_lock);
    dev_fail(dev, HT_IO_READ, 1, true);
    ck_assert_int_eq(ht_dev_read(dev, 0, buf, HT_MIB), -EIO);
    ht_mutex_lock(&dev->flight_lock);
    ck_assert_uint_gt(dev->rate[HT_DIRECTION_READ].ended_ns + dev->rate[HT_DIRECTION_READ].sample_ns, 0);
    ck_assert_uint_eq(ended_bytes(dev, HT_DIRECTION_READ), 0);
    ck_assert_uint_eq(dev->rate[HT_DIRECTION_READ].in_flight, 0);
    ck_assert_uint_eq(ended_bytes(dev, HT_DIRECTION_WRITE), 2 * HT_MIB);
    ht_mutex_unlock(&dev->flight_lock);
    ht_dev_close(dev);
}

static void *load_main(void *dev)
{
    for (unsigned i = 0; i < 20; i++) {
        transfer(dev, i % 2 ? HT_IO_READ : HT_IO_WRITE, 4 * HT_MIB);
        (void)rate_on(dev, i % 2);
    }
    return NULL;
}

TEST(threads_share_the_figures)
{
    struct ht_dev *dev;
    pthread_t thread[4];

    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 4096, &dev), 0);
    for (unsigned i = 0; i < 4; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, load_main, dev), 0);
    for (unsigned i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    ht_mutex_lock(&dev->flight_lock);
    for (unsigned d = 0; d < HT_DIRECTIONS; d++) {
        ck_assert_uint_eq(ended_bytes(dev, d), 4 * 10 * 4 * HT_MIB);
        ck_assert_uint_eq(dev->rate[d].in_flight_bytes, 0);
    }
    ht_mutex_unlock(&dev->flight_lock);
    ht_dev_close(dev);
}

RUN_TESTS("rate", .timeout_s = 60)
