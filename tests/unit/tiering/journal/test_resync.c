/* SPDX-License-Identifier: Apache-2.0 */
/* test_resync.c - copies that drop out and come back while the log is in use. */
#include "tests/unit/tiering/journal/kv.h"

#include <sched.h>

enum { FRAMES = 40, NOTE = 3000 };

static void new_store(bool two_devices)
{
    struct ht_dev *dev = kv_new_dev();

    kv_format(&kv, dev, two_devices ? kv_new_dev() : dev);
    kv.super = kv_new_dev(); /* errors are for the log */
    kv.inline_checkpoint = true;
    ck_assert_int_eq(kv_super_write(&kv), 0);
    ck_assert_int_eq(kv_mount(&kv), 0);
}

static void end_store(void)
{
    if (!kv.dev[0]) /* a test has done so */
        return;
    if (kv.j)
        kv_unmount(&kv);
    ht_dev_close(kv.super);
    kv_free_devs(&kv);
}

static void set_some(uint64_t stamp)
{
    for (uint32_t k = 0; k < FRAMES; k++)
        ck_assert_int_eq(kv_set_one(&kv, k, stamp + k, NOTE), 0);
}

/* One error only, as a device has that recovers. */
static void lose(unsigned copy, enum ht_io_op op)
{
    dev_fail(kv.dev[copy], op, 1, false);
    ck_assert_int_eq(kv_set_one(&kv, 100, kv.last_lsn + 1, NOTE), 0);
    ck_assert(!ht_journal_copy_live(kv.j, copy));
}

/* A mount with this copy alone finds exactly the map that is in memory. */
static void expect_in(unsigned copy)
{
    struct kv alone = kv;

    ck_assert_int_eq(kv_open(&alone, false, 1u << !copy), 0);
    ck_assert_mem_eq(&kv.map, &alone.map, sizeof(kv.map));
    kv_crash(&alone);
}

TEST_LOOP(one_error_after_the_other_on_both_copies_costs_nothing, 4)
{
    unsigned first = (unsigned)_i % 2;
    enum ht_io_op op = _i / 2 ? HT_IO_FLUSH : HT_IO_WRITE;

    new_store(true);
    for (unsigned round = 0; round < 3; round++) {
        lose(first, op);
        set_some(1000 * round + 1);
        ck_assert_int_eq(ht_journal_resync(kv.j), 0);
        ck_assert(ht_journal_copy_live(kv.j, first));
        ck_assert_int_eq(ht_journal_resync(kv.j), -ENOENT);
        lose(!first, op);
        set_some(1000 * round + 500);
        expect_in(first);
        ck_assert_int_eq(ht_journal_resync(kv.j), 0);
        expect_in(!first);
    }
    kv_unmount(&kv); /* nothing is lacking: no error */
}

TEST(a_copy_comes_back_on_one_device_and_over_the_end_of_the_region)
{
    new_store(false);
    for (unsigned round = 0; round < 12; round++) {
        dev_fail(kv.dev[0], HT_IO_WRITE, 1 + round % 2, false);
        set_some(100 * round + 1); /* once around the region in some rounds */
        ck_assert_int_eq(ht_journal_resync(kv.j), 0);
        set_some(100 * round + 50);
        expect_in(round % 2);
    }
}

/*
 * If any part of the attempt fails, the copy stays out and the other one is still complete. A later attempt makes it
 * whole.
 */
TEST(an_attempt_that_fails_is_made_again)
{
    static const enum ht_io_op ops[] = {HT_IO_WRITE, HT_IO_FLUSH, HT_IO_READ};
    unsigned failed = 0;

    for (unsigned o = 0; o < HT_ARRAY_SIZE(ops); o++)
        for (unsigned nth = 1;; nth++) {
            new_store(true);
            set_some(1);
            lose(1, HT_IO_WRITE);
            set_some(200);
            dev_fail(kv.dev[ops[o] != HT_IO_READ], ops[o], nth, true);
            int rc = ht_journal_resync(kv.j);
            ck_assert(rc == 0 || !ht_journal_copy_live(kv.j, 1));
            dev_fail(kv.dev[ops[o] != HT_IO_READ], ops[o], 0, false);
            set_some(300);
            expect_in(0);
            ck_assert_int_eq(ht_journal_resync(kv.j), rc ? 0 : -ENOENT);
            expect_in(1);
            kv_crash(&kv);
            end_store();
            failed += rc != 0;
            if (rc == 0)
                break;
        }
    ck_assert_uint_ge(failed, 4);
}

/* It may be the last place where the bytes are whole. */
TEST(a_copy_that_rotted_is_not_copied_over_the_one_that_is_out)
{
    new_store(true);
    set_some(1);
    lose(1, HT_IO_WRITE);
    set_some(200);
    size_t bytes = KV_LOG_BYTES;
    uint8_t *before = test_alloc(bytes);
    memcpy(before, kv_bytes(&kv, 1, 0), bytes);
    *kv_bytes(&kv, 0, kv.start.pos + 3 * HT_BLOCK_BYTES) ^= 1;
    ck_assert_int_eq(ht_journal_resync(kv.j), -EUCLEAN);
    ck_assert_mem_eq(before, kv_bytes(&kv, 1, 0), bytes);
    ck_assert(!ht_journal_copy_live(kv.j, 1));
    ck_assert_int_eq(kv_set_one(&kv, 5, 5, NOTE), 0);
    kv_crash(&kv);
}

static int back_error;
static unsigned backs;

static int copy_back(void *ctx, unsigned copy)
{
    backs += copy == 1;
    return back_error;
}

TEST(a_copy_whose_return_cannot_be_recorded_stays_out)
{
    new_store(true);
    kv_crash(&kv);
    kv.copy_back = copy_back;
    ck_assert_int_eq(kv_mount(&kv), 0);
    lose(1, HT_IO_FLUSH);
    back_error = -EIO;
    ck_assert_int_eq(ht_journal_resync(kv.j), -EIO);
    ck_assert(!ht_journal_copy_live(kv.j, 1));
    back_error = 0;
    ck_assert_int_eq(ht_journal_resync(kv.j), 0);
    ck_assert_uint_eq(backs, 2);
}

static void *resync(void *out_rc)
{
    *(int *)out_rc = ht_journal_resync(kv.j);
    return NULL;
}

TEST(who_stops_waits_for_one_request)
{
    pthread_t thread;
    int rc = 0;

    new_store(true);
    lose(1, HT_IO_WRITE);
    set_some(1);
    dev_stall(kv.dev[1], true);
    pthread_create(&thread, NULL, resync, &rc);
    while (ht_dev_health(kv.dev[1], 1) != HT_HEALTH_NOT_ANSWERING)
        sched_yield();
    kv_stop(&kv);
    dev_fail(kv.dev[1], HT_IO_WRITE, 1, true); /* the next one */
    dev_stall(kv.dev[1], false);
    pthread_join(thread, NULL);
    ck_assert_int_eq(rc, -ECANCELED);
    ck_assert(!ht_journal_copy_live(kv.j, 1));
    expect_in(0);
    kv_crash(&kv);
}

/* A time in the past would be due at once, again and again. */
TEST(a_journal_that_stops_asks_for_no_time)
{
    uint64_t at_ns = 0;

    new_store(true);
    lose(1, HT_IO_WRITE);
    ck_assert_int_eq(ht_journal_need(kv.j, &at_ns), HT_JOURNAL_NEEDS_NOTHING);
    ck_assert_uint_gt(at_ns, 0);
    kv_stop(&kv);
    ck_assert_int_eq(ht_journal_need(kv.j, &at_ns), HT_JOURNAL_NEEDS_NOTHING);
    ck_assert_uint_eq(at_ns, 0);
    kv_crash(&kv);
}

TEST_LOOP(the_checkpoint_thread_brings_copies_back_beside_those_who_append, 2)
{
    pthread_t thread;

    new_store(_i);
    kv.inline_checkpoint = false;
    pthread_create(&thread, NULL, kv_checkpoint_main, &kv);
    for (unsigned lost = 0, copy = 0; lost < 2; lost++, copy = !copy) {
        dev_fail(kv.dev[copy], HT_IO_WRITE, 1, false);
        ck_assert_int_eq(kv_set_one(&kv, 100, 7, NOTE), 0);
        for (uint32_t i = 0; !ht_journal_copy_live(kv.j, 0) || !ht_journal_copy_live(kv.j, 1); i++)
            ck_assert_int_eq(kv_set_one(&kv, i % FRAMES, 1000 + i, NOTE), 0);
    }
    kv_stop(&kv);
    pthread_join(thread, NULL);
    kv.inline_checkpoint = true;
    set_some(1);
    expect_in(0);
    expect_in(1);
}

RUN_TESTS("resync", .teardown = end_store, .timeout_s = 300)
