/* SPDX-License-Identifier: Apache-2.0 */
/* Flushes that fail beside other threads, on devices with volatile caches; and devices that nobody needs. The orders are fixed. */
#include <check.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "tests/unit/tiering/store/world.h"
#include "tiering/base/log.h"
#include "tiering/base/mem.h"

enum { DEVICES_MAX = 4, CHUNKS = 6, SCOPE = 7, FLUSH_US = 500, WAIT_MS_MAX = 60000 };

static struct ht_dev *devs[DEVICES_MAX];
static unsigned device_count;
static uint8_t *one, *two, *three;

static void mount_all(void)
{
    struct ht_store_opts opts = {
        .dram_bytes = 48 * MIB, .staging_bytes = 16 * MIB, .numa_node = HT_NUMA_OFF, .no_threads = true};
    struct ht_dev *given[DEVICES_MAX];

    memcpy(given, devs, sizeof(given));
    ck_assert_int_eq(ht_store_new(given, device_count, &opts, &s), 0);
    ck_assert_int_eq(ht_store_mount(s), 0);
}

static void make(unsigned count)
{
    struct ht_super sb;
    struct ht_format_opts opts = {.log_bytes = MIB};

    device_count = count;
    for (unsigned i = 0; i < count; i++)
        ck_assert_int_eq(ht_dev_open_ram(96 * MIB, 512, &devs[i]), 0);
    ck_assert_int_eq(ht_super_format(devs, count, &opts, &sb), 0);
    for (unsigned i = 0; i < count; i++)
        ck_assert_int_eq(ht_dev_ram_set_cache(devs[i], FLUSH_US), 0);
    mount_all();
    one = pattern(CHUNKS * MIB, 1);
    two = pattern(CHUNKS * MIB, 2);
    three = pattern(CHUNKS * MIB, 3);
}

/* All references were put. */
static void power_cut(uint64_t seed)
{
    ht_dev_ram_power_off(devs, device_count, seed);
    ht_store_close(s);
    for (unsigned i = 0; i < device_count; i++)
        ht_dev_ram_power_on(devs[i]);
    mount_all();
}

static void end(void)
{
    ck_assert_int_eq(ht_store_unmount(s), 0);
    ht_store_close(s);
    for (unsigned i = 0; i < device_count; i++)
        ht_dev_close(devs[i]);
    free(one);
    free(two);
    free(three);
}

static struct ht_obj *published(uint64_t scope, const uint8_t *content, size_t bytes)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, scope);

    put_all(o, 0, content, bytes);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    return o;
}

static uint64_t put(struct ht_obj *o)
{
    uint64_t oid = ht_obj_id(o);

    ht_obj_put(o);
    return oid;
}

static void expect_after_cut(uint64_t oid, const uint8_t *want, size_t bytes)
{
    struct ht_obj *o = ht_obj_get(s, oid);

    ck_assert_ptr_nonnull(o);
    expect(o, 0, want, bytes);
    ht_obj_put(o);
}

static uint64_t written_to(unsigned device)
{
    struct ht_dev_counters c;

    ht_dev_counters(devs[device], &c);
    return c.written_bytes;
}

/* Write it back without a flush: the device that took it. */
static unsigned write_back(struct ht_obj *o)
{
    uint64_t before[DEVICES_MAX];

    for (unsigned i = 0; i < device_count; i++)
        before[i] = written_to(i);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    for (unsigned i = 0; i < device_count; i++)
        if (written_to(i) != before[i])
            return i;
    ck_abort_msg("nothing was written");
}

/* Another thread's file, on all devices, is synced while one flush of this device fails. */
static void fail_beside(unsigned device)
{
    struct ht_obj *other = object(HT_CHUNK_BYTES, 0);

    put_all(other, 0, three, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(other), 0);
    ht_dev_fail(devs[device], HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_obj_sync(other), 0);
    ht_obj_put(other);
}

/* ---------------------------------------------------------- publications */

/* The second half of an fsync or a commit. rounds: of the first half. */
static int publish(struct ht_obj *o, uint64_t scope, struct ht_rounds *rounds)
{
    struct ht_tx *tx;
    uint64_t lsn;
    int rc = ht_tx_begin_round(s, 64 << 10, rounds, &tx);

    if (rc)
        return rc;
    if (o)
        ht_obj_publish(o, tx);
    else
        ht_scope_publish(s, scope, tx);
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    return ht_store_sync(s, lsn);
}

START_TEST(a_flush_that_fails_beside_a_commit_does_not_tear_it)
{
    struct ht_rounds of_m = HT_ROUNDS_INIT, of_f = HT_ROUNDS_INIT;

    make(3);
    struct ht_obj *m = published(SCOPE, one, CHUNKS * MIB), *f = published(0, one, CHUNKS * MIB);
    put_all(m, 0, two, CHUNKS * MIB);
    ht_rounds_next(s, &of_m);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    put_all(f, 0, two, CHUNKS * MIB);
    ht_rounds_next(s, &of_f);
    ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    fail_beside((unsigned)_i);
    int rc;
    while ((rc = publish(NULL, SCOPE, &of_m)) == -EAGAIN) {
        ht_rounds_next(s, &of_m);
        ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    }
    ck_assert_int_eq(rc, 0);
    while ((rc = publish(f, 0, &of_f)) == -EAGAIN) {
        ht_rounds_next(s, &of_f);
        ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    }
    ck_assert_int_eq(rc, 0);
    uint64_t ids[] = {put(m), put(f)};
    power_cut(1);
    expect_after_cut(ids[0], two, CHUNKS * MIB);
    expect_after_cut(ids[1], two, CHUNKS * MIB);
    end();
}
END_TEST

/* Written back once more by another thread after the flush, and given up: what was flushed is gone, and so is what replaced it. */
START_TEST(what_replaced_flushed_content_is_not_missed)
{
    struct ht_rounds rounds = HT_ROUNDS_INIT;

    make(2);
    struct ht_obj *f = published(0, one, CHUNKS * MIB);
    put_all(f, 0, two, CHUNKS * MIB);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    put_all(f, 0, three, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(f), 0);
    fail_beside((unsigned)_i);
    ck_assert_int_eq(publish(f, 0, &rounds), -EAGAIN);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    ck_assert_int_eq(publish(f, 0, &rounds), 0);
    uint64_t id = put(f);
    power_cut(2);
    expect_after_cut(id, three, CHUNKS * MIB);
    end();
}
END_TEST

/* Nothing of it was to be flushed any more, so that another's failure concerns it no more. */
START_TEST(a_failed_flush_of_what_others_wrote_leaves_the_store_writable)
{
    struct ht_rounds rounds = HT_ROUNDS_INIT;
    struct ht_tx *tx;
    uint64_t lsn;

    make(4);
    struct ht_obj *f = published(0, one, CHUNKS * MIB), *g = published(0, one, CHUNKS * MIB);
    put_all(f, 0, two, CHUNKS * MIB);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    put_all(g, 0, two, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(g), 0);
    ck_assert_int_eq(ht_tx_begin_round(s, 8192, &rounds, &tx), 0);
    ht_obj_publish(f, tx);
    ht_dev_fail(devs[3], HT_IO_FLUSH, 1, false); /* no log is on it */
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(s, lsn), 0);
    ck_assert_int_eq(ht_obj_sync(g), 0);
    ck_assert(!ht_store_read_only(s));
    uint64_t ids[] = {put(f), put(g)};
    power_cut(3);
    expect_after_cut(ids[0], two, CHUNKS * MIB);
    expect_after_cut(ids[1], two, CHUNKS * MIB);
    end();
}
END_TEST

/* ----------------------------------------------------------------- clones */

struct cloning {
    struct ht_obj *src, *dst;
    ssize_t done;
};

static void *clone_main(void *arg)
{
    struct cloning *k = arg;

    k->done = ht_obj_clone(k->src, 0, k->dst, 0, MIB);
    return NULL;
}

/* The clone has taken what the source holds, and waits for its target while that is given up. */
START_TEST(a_clone_under_way_does_not_keep_what_was_given_up)
{
    make(3);
    struct ht_obj *a = object(HT_CHUNK_BYTES, 0), *b = published(0, one, MIB);
    put_all(a, 0, two, MIB);
    unsigned device = write_back(a);
    struct ht_lease l = {
        .store = s, .count = 1, .chunk[0] = (struct ht_lease_chunk){.obj = b, .index = 0, .mode = HT_LEASE_UPDATE}};
    ck_assert_int_eq(ht_lease_begin(&l), 0);
    ck_assert_int_eq(ht_lease_wait(&l), 0);
    struct cloning k = {.src = a, .dst = b};
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, clone_main, &k), 0);
    usleep(100000);
    fail_beside(device);
    ht_lease_end(&l, 0);
    ck_assert_int_eq(ht_lease_finish(&l), 0);
    pthread_join(thread, NULL);
    ck_assert_int_eq(k.done, MIB);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    ht_obj_put(a);
    uint64_t id = put(b);
    for (uint64_t seed = 1; seed <= 3; seed++) {
        power_cut(seed);
        expect_after_cut(id, two, MIB);
    }
    end();
}
END_TEST

/* --------------------------------------------------------- silent devices */

struct syncing {
    struct ht_obj *o;
    _Atomic bool over;
    int rc;
};

static void *sync_main(void *arg)
{
    struct syncing *y = arg;

    y->rc = ht_obj_sync(y->o);
    y->over = true;
    return NULL;
}

/* One chunk that does not lie on this device, written back. */
static struct ht_obj *written_beside(unsigned device)
{
    for (;;) {
        struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
        put_all(o, 0, two, MIB);
        if (write_back(o) != device)
            return o;
        ht_obj_put(o);
    }
}

START_TEST(a_device_that_does_not_answer_delays_only_what_lies_on_it)
{
    make(4);
    struct ht_obj *on_all = object(HT_CHUNK_BYTES, 0);
    put_all(on_all, 0, one, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(on_all), 0);
    struct syncing y = {.o = written_beside(3)}, all = {.o = on_all};
    ht_dev_stall(devs[3], true);
    pthread_t thread[2];
    ck_assert_int_eq(pthread_create(&thread[1], NULL, sync_main, &all), 0);
    usleep(20000);
    ck_assert_int_eq(pthread_create(&thread[0], NULL, sync_main, &y), 0);
    for (unsigned ms = 0; ms < WAIT_MS_MAX && !y.over; ms += 10)
        usleep(10000);
    bool over = y.over, all_over = all.over;
    ht_dev_stall(devs[3], false);
    pthread_join(thread[0], NULL);
    pthread_join(thread[1], NULL);
    ck_assert(over);
    ck_assert(!all_over);
    ck_assert_int_eq(y.rc, 0);
    ck_assert_int_eq(all.rc, 0);
    uint64_t ids[] = {put(y.o), put(on_all)};
    power_cut(4);
    expect_after_cut(ids[0], two, MIB);
    expect_after_cut(ids[1], one, CHUNKS * MIB);
    end();
}
END_TEST

/* ------------------------------------------------------- what is given up */

/* The rescue has the bytes in memory, and waits for the open transaction. A truncation narrows the reference that it is to give up. */
START_TEST(what_is_truncated_while_it_is_given_up_is_given_up)
{
    enum { KEEP = 600000 };
    struct ht_rounds rounds = HT_ROUNDS_INIT;
    struct ht_tx *tx;
    pthread_t thread;

    make(1);
    struct ht_obj *f = published(0, one, MIB);
    put_all(f, 0, two, MIB);
    struct ht_obj *other = object(HT_CHUNK_BYTES, 0); /* changed later, so that the rescue comes to it last */
    put_all(other, 0, three, MIB);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_obj_writeback(f), 0);
    struct syncing y = {.o = other};
    ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
    ht_dev_fail(devs[0], HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(pthread_create(&thread, NULL, sync_main, &y), 0);
    for (unsigned ms = 0; ms < WAIT_MS_MAX && !obj_stat(f).dirty_bytes; ms += 10)
        usleep(10000);
    ck_assert_uint_gt(obj_stat(f).dirty_bytes, 0);
    ck_assert_int_eq(ht_obj_truncate(f, KEEP), 0);
    ck_assert_int_eq(ht_obj_truncate(other, 0), 0); /* of f alone something is given up */
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    pthread_join(thread, NULL);
    ck_assert_int_eq(y.rc, 0);
    ck_assert_int_eq(publish(f, 0, &rounds), -EAGAIN);
    ck_assert_int_eq(ht_obj_sync(f), 0);
    ht_obj_put(other);
    uint64_t id = put(f);
    power_cut(7);
    expect_after_cut(id, two, KEEP);
    end();
}
END_TEST

/* There is no space for another copy, and none is needed: the bytes are in memory, and the place that is given up is free. */
START_TEST(a_full_store_keeps_what_a_failed_flush_covered)
{
    make(1);
    struct ht_obj *filler = object(HT_CHUNK_BYTES, 0), *f = object(HT_CHUNK_BYTES, 0);
    uint64_t n = 0;
    while (ht_obj_write(filler, n * MIB, one, MIB) == MIB && ht_obj_sync(filler) == 0)
        n++;
    ck_assert_int_eq(ht_obj_truncate(filler, (n - 2) * MIB), 0);
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    put_all(f, 0, two, 2 * MIB);
    ck_assert_int_eq(ht_obj_writeback(f), 0);
    ck_assert_uint_lt(ht_store_available(s), MIB);
    ht_dev_fail(devs[0], HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_obj_sync(f), 0);
    ht_obj_put(filler);
    uint64_t id = put(f);
    power_cut(8);
    expect_after_cut(id, two, 2 * MIB);
    end();
}
END_TEST

/* --------------------------------------------------------------- the log */

/* Both copies of the log are on one device: after the frame was written to it another thread's flush fails. */
START_TEST(a_frame_that_a_flush_of_another_thread_voided_is_written_again)
{
    make(1);
    struct ht_obj *a = published(0, one, MIB), *b = published(0, one, MIB);
    put_all(a, 0, two, MIB);
    ck_assert_int_eq(ht_obj_writeback_flushed(a), 0);
    ht_dev_ram_void_after(devs[0], 2); /* the frame's two */
    ck_assert_int_eq(ht_obj_sync(a), 0);
    put_all(b, 0, two, MIB);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    uint64_t ids[] = {put(a), put(b)};
    power_cut(5);
    expect_after_cut(ids[0], two, MIB);
    expect_after_cut(ids[1], two, MIB);
    end();
}
END_TEST

START_TEST(one_failed_flush_of_the_only_device_leaves_the_store_writable)
{
    make(1);
    struct ht_obj *a = published(0, one, MIB);
    for (unsigned nth = 1; nth <= 3; nth++) { /* of content, of the log, and the one after */
        put_all(a, 0, nth % 2 ? two : three, MIB);
        ht_dev_fail(devs[0], HT_IO_FLUSH, nth, false);
        ck_assert_int_eq(ht_obj_sync(a), 0);
        ht_dev_fail(devs[0], HT_IO_FLUSH, 0, false);
        ck_assert(!ht_store_read_only(s));
    }
    uint64_t id = put(a);
    power_cut(6);
    expect_after_cut(id, two, MIB);
    end();
}
END_TEST

int main(void)
{
    TCase *tc = tcase_create("flushes");

    ht_log_set_level(HT_LOG_ERROR);
    ht_pinned_keep(true);
    tcase_set_timeout(tc, 300);
    tcase_add_loop_test(tc, a_flush_that_fails_beside_a_commit_does_not_tear_it, 0, 3);
    tcase_add_loop_test(tc, what_replaced_flushed_content_is_not_missed, 0, 2);
    tcase_add_test(tc, a_failed_flush_of_what_others_wrote_leaves_the_store_writable);
    tcase_add_test(tc, a_clone_under_way_does_not_keep_what_was_given_up);
    tcase_add_test(tc, a_device_that_does_not_answer_delays_only_what_lies_on_it);
    tcase_add_test(tc, what_is_truncated_while_it_is_given_up_is_given_up);
    tcase_add_test(tc, a_full_store_keeps_what_a_failed_flush_covered);
    tcase_add_test(tc, a_frame_that_a_flush_of_another_thread_voided_is_written_again);
    tcase_add_test(tc, one_failed_flush_of_the_only_device_leaves_the_store_writable);
    return run_suite(tc);
}
