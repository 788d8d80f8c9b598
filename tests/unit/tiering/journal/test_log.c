/* SPDX-License-Identifier: Apache-2.0 */
/* test_log.c - appending, waiting, room and errors, with the journal in use. */
#include "tests/unit/tiering/journal/kv.h"

#include "tiering/base/fault.h"
#include "tiering/base/lock.h"

static void new_store(bool two_devices)
{
    struct ht_dev *dev = kv_new_dev();

    kv_format(&kv, dev, two_devices ? kv_new_dev() : dev);
    ck_assert_int_eq(kv_mount(&kv), 0);
}

/* A mount finds exactly the map that is in memory. */
static void remount_same(void)
{
    struct kv_map before = kv.map;

    ck_assert_int_eq(kv_mount(&kv), 0);
    ck_assert_mem_eq(&before, &kv.map, sizeof(before));
}

TEST_LOOP(what_was_synced_is_there_after_a_crash, 2)
{
    new_store(_i);
    for (uint32_t k = 0; k < 100; k++)
        ck_assert_int_eq(kv_set_one(&kv, k, k + 1, k), 0);
    ck_assert_uint_eq(kv.last_durable, ht_journal_durable(kv.j));
    ck_assert_uint_eq(kv.report.frames, 0);
    kv_crash(&kv);
    remount_same();
    ck_assert_uint_eq(kv.report.frames, 101);
    ck_assert_uint_eq(kv.report.records, 101);
    kv_unmount(&kv);
    remount_same();
}

TEST(what_was_appended_only_is_not_written)
{
    uint64_t lsn;
    uint32_t key = 3;

    new_store(true);
    ck_assert_int_eq(kv_set_one(&kv, 1, 1, 10), 0);
    ck_assert_int_eq(kv_set(&kv, &key, 1, 7, 10, &lsn), 0);
    kv_crash(&kv);
    ck_assert_int_eq(kv_mount(&kv), 0);
    ck_assert_uint_eq(kv.map.e[1].stamp, 1);
    ck_assert_uint_eq(kv.map.e[3].stamp, 0);
}

TEST(groups_appended_together_share_a_frame)
{
    struct ht_journal_stats before, after;
    uint64_t lsn = 0;

    new_store(true);
    ht_journal_stats(kv.j, &before);
    for (uint32_t k = 0; k < 50; k++)
        ck_assert_int_eq(kv_set(&kv, &k, 1, 5, 10, &lsn), 0);
    ck_assert_int_eq(ht_journal_sync(kv.j, lsn), 0);
    ht_journal_stats(kv.j, &after);
    ck_assert_uint_eq(after.frames_written, before.frames_written + 1);
    ck_assert_uint_eq(after.groups, before.groups + 50);
    ck_assert_int_eq(ht_journal_sync(kv.j, 1), 0);
    ck_assert_int_eq(ht_journal_sync(kv.j, lsn + 1), -EINVAL);
}

/* More than one frame may hold is queued and gets the numbers of the frames it will be in. */
TEST(many_frames_may_be_queued)
{
    uint64_t lsn[8], last = 0;

    new_store(true);
    for (uint32_t k = 0; k < 8; k++) {
        ck_assert_int_eq(kv_set(&kv, &k, 1, 9, 15000, &lsn[k]), 0);
        ck_assert_uint_ge(lsn[k], last);
        last = lsn[k];
    }
    ck_assert_uint_gt(lsn[7], lsn[0]);
    ck_assert_uint_eq(kv.last_lsn, lsn[7]);
    ck_assert_int_eq(ht_journal_sync(kv.j, lsn[0]), 0);
    ck_assert_uint_eq(ht_journal_durable(kv.j), lsn[0]);
    ck_assert_int_eq(ht_journal_sync(kv.j, lsn[7]), 0);
    kv_crash(&kv);
    remount_same();
}

TEST(a_journal_only_opened_writes_nothing)
{
    struct ht_buf b = HT_BUF_INIT;
    uint64_t lsn;
    struct ht_dev_counters c;

    new_store(true);
    kv_unmount(&kv);
    ht_dev_counters(kv.dev[1], &c);
    uint64_t writes = c.writes;
    ck_assert_int_eq(kv_open(&kv, false, 0), 0);
    kv_put_set(&b, 1, 1, 1);
    ck_assert_int_eq(ht_journal_append(kv.j, &b, &lsn), -EROFS);
    ck_assert_int_eq(ht_journal_wait_space(kv.j, 10), -EROFS);
    kv_crash(&kv);
    ht_dev_counters(kv.dev[1], &c);
    ck_assert_uint_eq(c.writes, writes);
    ht_buf_free(&b);
}

/* ------------------------------------------------------------------ laps */

#define LAP_THREADS 6
#define LAP_STEPS 1500

struct lap_worker {
    pthread_t thread;
    uint32_t first_key;
    int rc;
};

static void *lap_main(void *arg)
{
    struct lap_worker *w = arg;
    unsigned seed = w->first_key;

    for (unsigned i = 1; i <= LAP_STEPS && !w->rc; i++) {
        uint32_t base = w->first_key + (uint32_t)rand_r(&seed) % 60;
        uint32_t keys[4] = {base, base + 1, base + 2, base + 3};
        uint64_t lsn;
        w->rc = kv_set(&kv, keys, 4, i, (uint32_t)rand_r(&seed) % 100, &lsn);
        if (w->rc == 0 && i % 3 == 0)
            w->rc = ht_journal_sync(kv.j, lsn);
        if (w->rc == 0 && i % 3 == 0 && ht_journal_durable(kv.j) < lsn)
            w->rc = -EPROTO;
    }
    return NULL;
}

TEST_LOOP(many_threads_go_round_the_region_while_it_is_checkpointed, 2)
{
    struct lap_worker w[LAP_THREADS];
    pthread_t checkpointer;
    struct ht_journal_stats st;

    new_store(_i);
    pthread_create(&checkpointer, NULL, kv_checkpoint_main, &kv);
    for (unsigned i = 0; i < LAP_THREADS; i++) {
        w[i] = (struct lap_worker){.first_key = i * 64};
        pthread_create(&w[i].thread, NULL, lap_main, &w[i]);
    }
    for (unsigned i = 0; i < LAP_THREADS; i++) {
        pthread_join(w[i].thread, NULL);
        ck_assert_int_eq(w[i].rc, 0);
    }
    kv_stop(&kv);
    pthread_join(checkpointer, NULL);
    ht_journal_stats(kv.j, &st);
    ck_assert_uint_ge(st.checkpoints, 3);
    kv_unmount(&kv);
    remount_same();
}

/* Live metadata is at its limit: every group up to the size of all live metadata is admitted, again and again. */
TEST(a_rewrite_of_everything_fits_a_full_log)
{
    static uint32_t keys[KV_KEYS];
    struct ht_journal_stats st;
    unsigned count = 0;
    uint64_t lsn;
    pthread_t checkpointer;

    new_store(true);
    pthread_create(&checkpointer, NULL, kv_checkpoint_main, &kv);
    ht_journal_stats(kv.j, &st);
    ck_assert_uint_ge(st.reserve_limit_bytes, st.log_bytes / 4);
    while (count < KV_KEYS && kv_set_one(&kv, count, 1, 1000) == 0) {
        keys[count] = count;
        count++;
    }
    ck_assert_uint_gt(count, 100);
    ck_assert_uint_lt(count, KV_KEYS);
    for (uint64_t stamp = 2; stamp < 12; stamp++) {
        /*
         * the old reserves stay while the new ones are made: give them back first, as a store
         * does that reserves once per key
         */
        ht_journal_unreserve(kv.j, count * kv_set_bytes(1000));
        ck_assert_int_eq(ht_journal_reserve(kv.j, count * kv_set_bytes(1000), false), 0);
        struct ht_buf b = HT_BUF_INIT;
        for (unsigned i = 0; i < count; i++)
            kv_put_set(&b, keys[i], stamp, 1000);
        ck_assert_int_eq(kv_begin(&kv, b.len), 0);
        ck_assert_int_eq(ht_journal_append(kv.j, &b, &lsn), 0);
        for (unsigned i = 0; i < count; i++)
            kv.map.e[keys[i]].stamp = stamp;
        pthread_mutex_unlock(&kv.tx_lock);
        ht_buf_free(&b);
        ck_assert_int_eq(ht_journal_sync(kv.j, lsn), 0);
    }
    ht_journal_stats(kv.j, &st);
    ck_assert_uint_ge(st.checkpoints, 3);
    kv_stop(&kv);
    pthread_join(checkpointer, NULL);
    kv_crash(&kv);
    remount_same();
}

TEST(groups_that_can_never_fit_are_refused)
{
    pthread_t checkpointer;

    new_store(true);
    ck_assert_int_eq(ht_journal_wait_space(kv.j, SIZE_MAX), -ENOSPC);
    ck_assert_int_eq(ht_journal_wait_space(kv.j, KV_LOG_BYTES), -ENOSPC);
    pthread_create(&checkpointer, NULL, kv_checkpoint_main, &kv);
    struct ht_journal_stats st;
    ht_journal_stats(kv.j, &st);
    ck_assert_int_eq(ht_journal_reserve(kv.j, st.reserve_limit_bytes, false), 0);
    ck_assert_int_eq(ht_journal_reserve(kv.j, 1, false), -ENOSPC);
    ck_assert_int_eq(ht_journal_reserve(kv.j, 1, true), 0);
    ck_assert_int_eq(ht_journal_wait_space(kv.j, KV_LOG_BYTES / 4), 0);
    ck_assert_int_eq(ht_journal_wait_space(kv.j, KV_LOG_BYTES * 3 / 4), -ENOSPC);
    /* and no waiter after the refused one keeps waiting */
    ck_assert_int_eq(ht_journal_wait_space(kv.j, KV_LOG_BYTES / 8), 0);
    kv_stop(&kv);
    pthread_join(checkpointer, NULL);
    kv_crash(&kv);
}

TEST(appending_past_the_region_is_refused)
{
    struct ht_buf b = HT_BUF_INIT;
    uint64_t lsn = 0;
    unsigned n = 0;

    new_store(true);
    kv_put_set(&b, 1, 1, 30000);
    while (ht_journal_append(kv.j, &b, &lsn) == 0)
        n++;
    ck_assert_uint_ge(n, 12);
    ck_assert_int_eq(ht_journal_append(kv.j, &b, &lsn), -ENOSPC);
    ck_assert_int_eq(ht_journal_sync(kv.j, lsn), 0);
    ck_assert(!ht_journal_try_space(kv.j, 30));
    ht_buf_free(&b);
    kv_crash(&kv);
    ck_assert_int_eq(kv_mount(&kv), 0);
    ck_assert_uint_eq(kv.map.e[1].stamp, 1);
    kv_crash(&kv);
}

/* ----------------------------------------------------------------- errors */

static int fill_some(uint64_t stamp)
{
    int rc = 0;

    for (uint32_t k = 0; k < 10 && !rc; k++)
        rc = kv_set_one(&kv, k, stamp + k, 3000);
    return rc;
}

TEST_LOOP(a_failing_device_drops_its_copy, 4)
{
    enum ht_io_op op = _i % 2 ? HT_IO_WRITE : HT_IO_FLUSH;
    unsigned bad = (unsigned)_i / 2;

    new_store(true);
    ck_assert_int_eq(fill_some(10), 0);
    dev_fail(kv.dev[bad], op, 3, true);
    /* the superblock of these tests is on device 0, the log goes on */
    ck_assert_int_eq(fill_some(20), 0);
    ck_assert_int_eq(fill_some(30), 0);
    struct kv_map want = kv.map;
    ck_assert(!ht_journal_copy_live(kv.j, bad) && ht_journal_copy_live(kv.j, !bad));
    kv_crash(&kv);

    struct ht_dev *was[2] = {kv.dev[0], kv.dev[1]};
    kv.dev[bad] = kv_clone_dev(was[bad]);
    kv.super = kv.dev[0];
    ht_dev_close(was[bad]);
    ck_assert_int_eq(kv_mount(&kv), 0);
    ck_assert_mem_eq(&want, &kv.map, sizeof(want));
    ck_assert_uint_eq(kv.report.chosen, !bad);
    kv_unmount(&kv);
    /* refilled: now the other one alone is enough */
    ck_assert_int_eq(kv_open(&kv, false, 1u << !bad), 0);
    ck_assert_mem_eq(&want, &kv.map, sizeof(want));
    kv_crash(&kv);
}

TEST_LOOP(a_store_without_a_copy_left_fails_and_stays_failed, 4)
{
    struct ht_buf b = HT_BUF_INIT;
    uint64_t lsn;

    new_store(_i % 2);
    ck_assert_int_eq(fill_some(10), 0);
    struct kv_map want = kv.map;
    dev_fail(kv.dev[0], _i / 2 ? HT_IO_FLUSH : HT_IO_WRITE, 1, true);
    dev_fail(kv.dev[1], _i / 2 ? HT_IO_FLUSH : HT_IO_WRITE, 1, true);
    ck_assert_int_eq(kv_set_one(&kv, 50, 50, 10), -EIO);
    kv_put_set(&b, 1, 1, 1);
    ck_assert_int_eq(ht_journal_append(kv.j, &b, &lsn), -EIO);
    ck_assert_int_eq(ht_journal_sync(kv.j, kv.last_lsn), -EIO);
    ck_assert_int_eq(ht_journal_wait_space(kv.j, 10), -EIO);
    ck_assert_int_eq(ht_journal_checkpoint_begin(kv.j), -EIO);
    kv_crash(&kv);
    ht_buf_free(&b);
    ck_assert_int_eq(kv_open(&kv, false, 0), 0);
    kv.map.e[50] = want.e[50]; /* either way */
    ck_assert_mem_eq(&want, &kv.map, sizeof(want));
    kv_crash(&kv);
}

TEST(data_that_cannot_be_made_durable_closes_the_log)
{
    new_store(true);
    ck_assert_int_eq(fill_some(10), 0);
    ck_assert_uint_ge(kv.before_writes, 10);
    struct kv_map want = kv.map;
    kv.before_write_error = -EIO;
    ck_assert_int_eq(kv_set_one(&kv, 50, 50, 10), -EIO);
    ck_assert(ht_journal_failed(kv.j));
    kv_crash(&kv);
    kv.before_write_error = 0;
    ck_assert_int_eq(kv_mount(&kv), 0);
    ck_assert_mem_eq(&want, &kv.map, sizeof(want));
}

TEST(no_memory_for_a_large_group_changes_nothing)
{
    static uint32_t keys[40];
    uint64_t lsn;

    new_store(true);
    for (unsigned i = 0; i < 40; i++)
        keys[i] = i;
    ht_fault_arm(HT_FAULT_JOURNAL_FRAME, 1, false);
    ck_assert_int_eq(kv_set(&kv, keys, 40, 9, 2000, &lsn), -ENOMEM);
    ht_fault_disarm_all();
    ck_assert_int_eq(kv_set(&kv, keys, 40, 9, 2000, &lsn), 0);
    ck_assert_int_eq(ht_journal_sync(kv.j, lsn), 0);
    kv_crash(&kv);
    remount_same();
}

/*
 * Between small ones, which come before and after it. Builds that check locks count the blocks
 * that are copied under the lock.
 */
TEST(a_large_group_is_copied_without_the_lock)
{
    static uint32_t keys[40];
    uint64_t lsn, last = 0;

    new_store(true);
    for (unsigned i = 0; i < 40; i++)
        keys[i] = i;
    for (unsigned n = 1; n <= 5; n++) {
        ht_lock_longest(HT_LOCK_JOURNAL);
        ck_assert_int_eq(kv_set(&kv, keys, n % 3 ? 1 : 40, n, n % 3 ? 100 : 2000, &lsn), 0);
        ck_assert_uint_le(ht_lock_longest(HT_LOCK_JOURNAL).steps, 1);
        ck_assert_uint_ge(lsn, last);
        last = lsn;
    }
    ck_assert_int_eq(ht_journal_sync(kv.j, lsn), 0);
    kv_crash(&kv);
    remount_same();
}

/* Waiters are woken by a log that fails while they wait. */
static void *wait_main(void *arg)
{
    *(int *)arg = ht_journal_wait_space(kv.j, KV_LOG_BYTES / 3);
    return NULL;
}

/* A nearly full log, and a thread that waits for room in it. Returns where the log ends. */
static uint64_t start_waiter(pthread_t *out_thread, int *rc)
{
    struct ht_buf b = HT_BUF_INIT;
    uint64_t lsn = 0;

    new_store(true);
    kv_put_set(&b, 1, 1, 30000);
    for (unsigned i = 0; i < 11; i++)
        ck_assert_int_eq(ht_journal_append(kv.j, &b, &lsn), 0);
    ht_buf_free(&b);
    pthread_create(out_thread, NULL, wait_main, rc);
    ck_assert(kv_wait(&kv)); /* the waiter requested it */
    return lsn;
}

TEST(a_failing_log_wakes_those_who_wait_for_room)
{
    pthread_t thread;
    int rc = 1;
    uint64_t lsn = start_waiter(&thread, &rc);

    dev_fail(kv.dev[0], HT_IO_WRITE, 1, true);
    dev_fail(kv.dev[1], HT_IO_WRITE, 1, true);
    ck_assert_int_eq(ht_journal_sync(kv.j, lsn), -EIO);
    pthread_join(thread, NULL);
    ck_assert_int_eq(rc, -EIO);
    kv_crash(&kv);
}

/* As when memory lacks for it: there is no driver any more that begins it again. */
TEST_LOOP(nothing_waits_for_a_checkpoint_that_was_given_up_before_the_end, 2)
{
    bool stops_first = _i;
    pthread_t thread;
    int rc = 1;

    start_waiter(&thread, &rc);
    ck_assert_int_eq(ht_journal_checkpoint_begin(kv.j), 0);
    if (stops_first)
        kv_stop(&kv);
    ht_journal_checkpoint_give_up(kv.j, 0);
    if (!stops_first)
        kv_stop(&kv);
    pthread_join(thread, NULL);
    ck_assert_int_eq(rc, -ENOSPC);
    kv_crash(&kv);
}

TEST(poke_asks_for_a_checkpoint_and_stop_ends_the_waiting)
{
    new_store(true);
    ht_journal_checkpoint_poke(kv.j);
    ck_assert(kv_wait(&kv));
    ck_assert_int_eq(kv_checkpoint(&kv), 0);
    kv_stop(&kv);
    ck_assert(!kv_wait(&kv));
}

RUN_TESTS("log", .teardown = kv_end, .timeout_s = 300)
