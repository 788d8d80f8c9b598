/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_crash.c - the machine dies at every write and every flush of a run, and again while it recovers. The run goes
 * round the region and writes checkpoints. Acknowledged groups are there, every group is whole or absent, and the log
 * can always continue.
 *
 * Both copies and the superblock lie on one RAM device. Its n-th write and all later ones fail. Its memory then holds
 * the bytes that the media hold after a crash at that write.
 */
#include "tests/unit/tiering/journal/kv.h"

#define GROUP_KEYS 3u
#define GROUPS 16u /* of keys */

/* Per group of keys: the stamp that was acknowledged, and the last that was tried. */
static uint64_t acked[GROUPS], tried[GROUPS];
static uint64_t stamp;

static int step(unsigned group, uint32_t len)
{
    uint32_t keys[GROUP_KEYS] = {group * GROUP_KEYS, group * GROUP_KEYS + 1, group * GROUP_KEYS + 2};
    uint64_t lsn;

    tried[group] = ++stamp;
    int rc = kv_set(&kv, keys, GROUP_KEYS, stamp, len, &lsn);
    if (rc == 0)
        rc = ht_journal_sync(kv.j, lsn);
    if (rc == 0)
        acked[group] = stamp;
    return rc;
}

/* len: the larger, the sooner the region is full and needs a checkpoint */
static int run_steps(unsigned count, uint32_t len)
{
    int rc = 0;

    for (unsigned i = 0; i < count && rc == 0; i++)
        rc = step(i * 7 % GROUPS, len + i % 50);
    return rc;
}

/* Each group of keys has one stamp: at least the acknowledged one, and none that was never tried. */
static void check_state(void)
{
    for (unsigned g = 0; g < GROUPS; g++) {
        uint64_t have = kv.map.e[g * GROUP_KEYS].stamp;
        for (unsigned i = 1; i < GROUP_KEYS; i++)
            ck_assert_uint_eq(kv.map.e[g * GROUP_KEYS + i].stamp, have);
        ck_assert_uint_ge(have, acked[g]);
        ck_assert_uint_le(have, tried[g]);
        acked[g] = have; /* from now on it is there */
    }
}

/* The surviving bytes become the device; nothing fails on it. */
static void power_cycle(void)
{
    struct ht_dev *was = kv.dev[0];

    if (kv.j)
        kv_crash(&kv);
    kv.dev[0] = kv.dev[1] = kv.super = kv_clone_dev(was);
    ht_dev_close(was);
}

static void fresh_store(void)
{
    struct ht_dev *dev = kv_new_dev();

    memset(acked, 0, sizeof(acked));
    memset(tried, 0, sizeof(tried));
    stamp = 0;
    kv_format(&kv, dev, dev);
    ck_assert_int_eq(kv_mount(&kv), 0);
    kv.inline_checkpoint = true;
}

static void recover_and_check(void)
{
    power_cycle();
    ck_assert_int_eq(kv_mount(&kv), 0);
    check_state();
}

TEST_LOOP(a_crash_at_any_operation_keeps_what_was_acknowledged, 2)
{
    enum ht_io_op op = _i ? HT_IO_FLUSH : HT_IO_WRITE;

    for (unsigned nth = 1;; nth++) {
        fresh_store();
        ck_assert_int_eq(run_steps(5, 2000), 0);
        dev_fail(kv.dev[0], op, nth, true);
        bool done = run_steps(60, 2500) == 0;
        recover_and_check();
        ck_assert_int_eq(run_steps(4, 100), 0);
        recover_and_check();
        kv_unmount(&kv);
        kv_free_devs(&kv);
        if (done)
            break;
    }
}

TEST(a_crash_in_recovery_is_one_more_crash)
{
    for (unsigned nth = 1; nth < 14; nth++) {
        fresh_store();
        ck_assert_int_eq(run_steps(20, 2500), 0);
        /* one copy is torn, so that recovery has something to do */
        memset(kv_bytes(&kv, nth % 2, kv.start.pos + 8192), 0, 5000);
        power_cycle();
        dev_fail(kv.dev[0], HT_IO_WRITE, nth, true);
        int rc = kv_mount(&kv);
        if (rc == 0) {
            kv_crash(&kv);
            check_state();
        }
        recover_and_check();
        ck_assert_int_eq(run_steps(3, 100), 0);
        recover_and_check();
        kv_unmount(&kv);
        kv_free_devs(&kv);
    }
}

/* Live metadata near its limit, and a crash in every checkpoint: old log and half of each emission pile up. */
TEST(crashes_in_every_checkpoint_never_fill_the_log_for_good)
{
    struct ht_journal_stats st;
    struct ht_dev_counters before, after;
    unsigned blocked = 0;

    fresh_store();
    for (unsigned g = 0; g < GROUPS; g++)
        ck_assert_int_eq(step(g, 2400), 0);
    ht_journal_stats(kv.j, &st);
    ck_assert_uint_gt(st.reserved_bytes, st.reserve_limit_bytes * 4 / 5);
    ht_dev_counters(kv.dev[0], &before);
    ck_assert_int_eq(kv_checkpoint(&kv), 0);
    ht_dev_counters(kv.dev[0], &after);
    unsigned writes = (unsigned)(after.writes - before.writes);
    for (unsigned i = 0; i < 60; i++) {
        /* the superblock that would end it, or something shortly before, does not get through */
        dev_fail(kv.dev[0], HT_IO_WRITE, writes - i % 3, true);
        int rc = kv_checkpoint(&kv);
        (void)rc; /* in split mode there are fewer writes */
        recover_and_check();
        ht_journal_stats(kv.j, &st);
        blocked += st.used_bytes + st.reserved_bytes > st.log_bytes;
        if (i % 20 == 19) {
            ck_assert_int_eq(kv_checkpoint(&kv), 0);
            ck_assert_int_eq(run_steps(5, 2000), 0);
            ht_journal_stats(kv.j, &st);
            ck_assert_uint_lt(st.used_bytes, st.log_bytes / 2 + st.log_bytes / 8);
        }
    }
    ck_assert_uint_gt(blocked, 0); /* it did get that far */
    kv_unmount(&kv);
    ck_assert_int_eq(kv_mount(&kv), 0);
    check_state();
}

/* Appends a frame that repeats a known value. */
static int add_frame(void)
{
    struct ht_buf b = HT_BUF_INIT;
    uint64_t lsn;

    kv_put_set(&b, 0, kv.map.e[0].stamp, kv.map.e[0].len);
    int rc = ht_journal_append(kv.j, &b, &lsn);
    if (rc == 0)
        ck_assert_int_eq(ht_journal_sync(kv.j, lsn), 0);
    ht_buf_free(&b);
    return rc;
}

/* Begun checkpoints that were never completed, until another one does not fit. */
static void fill_to_the_brim(void)
{
    struct ht_journal_stats st;

    fresh_store();
    for (unsigned g = 0; g < GROUPS; g++)
        ck_assert_int_eq(step(g, 2400), 0);
    ht_journal_stats(kv.j, &st);
    while (st.used_bytes + st.reserved_bytes + 40960 < st.log_bytes) {
        ck_assert_int_eq(ht_journal_checkpoint_begin(kv.j), 0);
        for (uint32_t key = 0; key < KV_KEYS;)
            ck_assert_int_eq(kv_emit_slice(&kv, &key), 0);
        ck_assert_int_eq(ht_journal_sync(kv.j, kv.last_lsn), 0);
        recover_and_check();
        ht_journal_stats(kv.j, &st);
    }
    for (; st.used_bytes + st.reserved_bytes < st.log_bytes; ht_journal_stats(kv.j, &st))
        ck_assert_int_eq(add_frame(), 0);
    ck_assert(!ht_journal_try_space(kv.j, 100));
}

TEST(a_crash_anywhere_in_the_rescue_can_be_rescued)
{
    for (unsigned nth = 1;; nth++) {
        fill_to_the_brim();
        dev_fail(kv.dev[0], HT_IO_WRITE, nth, true);
        bool done = kv_checkpoint(&kv) == 0;
        for (unsigned again = 0; again < 3; again++) {
            recover_and_check();
            dev_fail(kv.dev[0], HT_IO_WRITE, 1 + (nth + again) % 9, true);
            int rc = kv_checkpoint(&kv);
            (void)rc;
        }
        recover_and_check();
        ck_assert_int_eq(run_steps(20, 2000), 0);
        recover_and_check();
        kv_unmount(&kv);
        kv_free_devs(&kv);
        if (done)
            break;
    }
}

/* In split mode nothing is acknowledged before it is on both copies: the caller of sync waits for release. */
struct syncer {
    uint64_t lsn;
    atomic_int rc;
};

static void *sync_main(void *arg)
{
    struct syncer *s = arg;

    atomic_store(&s->rc, ht_journal_sync(kv.j, s->lsn));
    return NULL;
}

TEST(sync_waits_for_the_end_of_split_mode)
{
    struct ht_journal_start start;
    struct ht_journal_stats st;
    pthread_t thread;
    struct syncer s = {.rc = 1};
    struct ht_buf b = HT_BUF_INIT;

    fill_to_the_brim();
    uint64_t durable = ht_journal_durable(kv.j);
    ck_assert_int_eq(ht_journal_checkpoint_begin(kv.j), 0);
    for (uint32_t key = 0; key < KV_KEYS;)
        ck_assert_int_eq(kv_emit_slice(&kv, &key), 0);
    kv_put_set(&b, 0, kv.map.e[0].stamp, kv.map.e[0].len);
    ck_assert_int_eq(ht_journal_append(kv.j, &b, &s.lsn), 0);
    ht_buf_free(&b);
    pthread_create(&thread, NULL, sync_main, &s);
    ck_assert_int_eq(ht_journal_checkpoint_end(kv.j, &start), 0);
    ht_journal_stats(kv.j, &st);
    ck_assert_uint_gt(st.used_bytes, st.log_bytes);
    ck_assert_uint_lt(ht_journal_durable(kv.j), start.durable_seq);
    ck_assert_uint_ge(ht_journal_durable(kv.j), durable);
    ck_assert_int_eq(atomic_load(&s.rc), 1);
    kv.start = start;
    ck_assert_int_eq(kv_super_write(&kv), 0);
    ht_journal_checkpoint_release(kv.j, &start);
    pthread_join(thread, NULL);
    ck_assert_int_eq(atomic_load(&s.rc), 0);
    ck_assert_uint_ge(ht_journal_durable(kv.j), start.durable_seq);
    for (unsigned missing = 1; missing <= 2; missing++) { /* each copy alone is enough again */
        kv_crash(&kv);
        ck_assert_int_eq(kv_open(&kv, false, missing), 0);
        check_state();
    }
    kv_crash(&kv);
}

TEST(ending_in_split_mode_promises_nothing)
{
    fill_to_the_brim();
    ck_assert_int_eq(ht_journal_checkpoint_begin(kv.j), 0);
    for (uint32_t key = 0; key < KV_KEYS;)
        ck_assert_int_eq(kv_emit_slice(&kv, &key), 0);
    kv_crash(&kv);
    recover_and_check();
}

/*
 * The superblock that ends split mode reaches the medium, but its writer gets an error: it writes checkpoints again and
 * again.
 */
TEST(a_start_that_may_have_been_named_is_not_overwritten)
{
    struct ht_journal_start start, again;
    int rc = 0;

    fill_to_the_brim();
    ck_assert_int_eq(ht_journal_checkpoint_begin(kv.j), 0);
    for (uint32_t key = 0; key < KV_KEYS;)
        ck_assert_int_eq(kv_emit_slice(&kv, &key), 0);
    ck_assert_int_eq(ht_journal_checkpoint_end(kv.j, &start), 0);
    kv.start = start;
    kv.super_durable = start.durable_seq;
    ck_assert_int_eq(kv_super_write(&kv), 0);
    ht_journal_checkpoint_give_up(kv.j, -EIO);
    for (unsigned i = 0; rc == 0 && i < 8; i++) {
        rc = ht_journal_checkpoint_begin(kv.j);
        for (uint32_t key = 0; rc == 0 && key < KV_KEYS;)
            rc = kv_emit_slice(&kv, &key);
        if (rc == 0)
            rc = ht_journal_checkpoint_end(kv.j, &again);
    }
    ck_assert_int_eq(rc, -EIO);
    recover_and_check();
}

/* Not even the epoch record has room: the mount begins in split mode, as often as it takes. */
TEST(a_region_full_to_the_last_block_is_mounted_and_rescued)
{
    fill_to_the_brim();
    while (add_frame() == 0)
        ;
    for (unsigned i = 0; i < 12; i++) {
        recover_and_check();
        ck_assert(kv_wait(&kv)); /* wanted at once */
        if (i > 8) {
            dev_fail(kv.dev[0], HT_IO_WRITE, i - 8, true);
            ck_assert_int_eq(kv_checkpoint(&kv), -EIO);
        }
    }
    power_cycle();
    ck_assert_int_eq(kv_open(&kv, false, 2), 0);
    ck_assert_int_eq(kv_start(&kv), -ENOSPC); /* with one copy only */
    recover_and_check();
    ck_assert_int_eq(kv_checkpoint(&kv), 0);
    ck_assert_int_eq(run_steps(20, 2000), 0);
    recover_and_check();
}

/* With one copy there is no rescue, but nothing is lost and the other copy's return ends it. */
TEST(one_copy_alone_waits_for_the_other)
{
    fill_to_the_brim();
    kv_crash(&kv);
    ck_assert_int_eq(kv_open(&kv, false, 2), 0);
    ck_assert_int_eq(kv_start(&kv), 0);
    ck_assert_int_eq(ht_journal_checkpoint_begin(kv.j), 0);
    int rc = 0;
    for (uint32_t key = 0; key < KV_KEYS && rc == 0;)
        rc = kv_emit_slice(&kv, &key);
    ck_assert_int_eq(rc, -ENOSPC);
    recover_and_check();
    ck_assert_int_eq(kv_checkpoint(&kv), 0);
    ck_assert_int_eq(run_steps(10, 100), 0);
    recover_and_check();
}

TEST(endless_churn_stays_within_the_region)
{
    struct ht_journal_stats st;

    fresh_store();
    for (unsigned lap = 0; lap < 40; lap++) {
        ck_assert_int_eq(run_steps(40, 1500), 0);
        ht_journal_stats(kv.j, &st);
        ck_assert_uint_le(st.used_bytes, st.log_bytes);
        recover_and_check();
    }
    ck_assert_uint_gt(ht_journal_durable(kv.j), 1000);
}

RUN_TESTS("crash", .teardown = kv_end, .timeout_s = 300)
