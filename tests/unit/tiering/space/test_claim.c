/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_claim.c - claims that come at the same moment: at each request of one, others do all that they do. At most one
 * has the store afterwards, and what it wrote is the newest.
 */
#include "tiering/space/claim.h"

#include "tests/support/dev.h"
#include "tests/support/suite.h"

enum { DEVICE_BYTES = 16 << 20, DEVICES_MAX = 2 };

static struct ht_dev *devs[DEVICES_MAX];
static unsigned count;
static struct ht_super store; /* as each mount reads it */

/* What the others do in between, and when: in place of the `due`th request that is begun by this thread. */
static void (*between)(void);
static unsigned due, begun;
static pthread_t claimant;

static struct {
    struct ht_super sb;
    struct ht_claim *claim;
    int rc;
} other;

static void *run_between(void *arg)
{
    between();
    return arg;
}

static void come_between(enum ht_io_op op)
{
    pthread_t thread;

    /* the others' flush would wait for this one */
    if (!between || op == HT_IO_FLUSH || !pthread_equal(pthread_self(), claimant) || ++begun != due)
        return;
    ck_assert_int_eq(pthread_create(&thread, NULL, run_between, NULL), 0);
    pthread_join(thread, NULL);
}

static void make(unsigned devices)
{
    count = devices;
    for (unsigned i = 0; i < count; i++) {
        ck_assert_int_eq(dev_open_ram(DEVICE_BYTES, 512, &devs[i]), 0);
        dev_call_before(devs[i], come_between);
    }
    between = NULL;
    begun = 0;
    claimant = pthread_self();
    ck_assert_int_eq(ht_super_format(devs, count, &(struct ht_format_opts){.label = "claims"}, &store), 0);
}

static void drop(void)
{
    for (unsigned i = 0; i < count; i++)
        ht_dev_close(devs[i]);
}

/* A mount, until it has its epoch. */
static void mount_other(void)
{
    struct ht_super_report report;

    ck_assert_int_eq(ht_super_read(devs[0], &other.sb, &report), 0);
    other.rc = ht_claim_take(&other.sb, devs, count, &other.claim);
    if (other.rc)
        return;
    ht_claim_free(other.claim);
    other.sb.flags = HT_SUPER_IN_USE;
    other.sb.epoch++;
    other.rc = ht_super_write(&other.sb, devs, count, NULL);
}

static void mount_and_unmount_other(void)
{
    mount_other();
    if (other.rc)
        return;
    other.sb.flags = HT_SUPER_CLEAN;
    other.sb.writer = 0;
    ck_assert_uint_eq(ht_super_write(&other.sb, devs, count, NULL), 0);
}

static void expect_newest(const struct ht_super *sb)
{
    struct ht_super_report report;
    struct ht_super have;

    for (unsigned i = 0; i < count; i++) {
        ck_assert_int_eq(ht_super_read(devs[i], &have, &report), 0);
        ck_assert_uint_eq(have.generation, sb->generation);
        ck_assert_uint_eq(have.epoch, sb->epoch);
        ck_assert_uint_eq(have.flags, sb->flags);
    }
}

/* Returns whether the other came in between. */
static bool claim_with(void (*what)(void), unsigned at, unsigned devices)
{
    struct ht_claim *claim;

    make(devices);
    struct ht_super sb = store;
    other.rc = 1;
    due = at;
    between = what;
    int rc = ht_claim_take(&sb, devs, count, &claim);
    bool came = other.rc != 1;
    between = NULL;
    ck_assert_msg(!came || rc != 0 || other.rc != 0, "request %u: both have it", at);
    ck_assert_msg(came || rc == 0, "request %u: alone it has the store", at);
    if (rc == 0) {
        ht_claim_free(claim);
        sb.flags = HT_SUPER_IN_USE;
        ck_assert_uint_eq(ht_super_write(&sb, devs, count, NULL), 0);
        expect_newest(&sb);
    } else {
        ck_assert_int_eq(rc, -EBUSY);
    }
    if (came && other.rc == 0 && what == mount_other)
        for (unsigned i = 0; i < count; i++) {
            enum ht_claim_state state = ht_claim_look(&other.sb, devs[i], i);
            ck_assert_int_ne(state, HT_CLAIM_LOST);
            if (state != HT_CLAIM_OWN)
                ht_claim_answer(&other.sb, devs[i], i, state);
            ck_assert_int_eq(ht_claim_look(&other.sb, devs[i], i), HT_CLAIM_OWN);
        }
    if (came && other.rc == 0)
        expect_newest(&other.sb);
    drop();
    return came;
}

TEST_LOOP(of_two_claims_at_most_one_succeeds, 4)
{
    static void (*const what[])(void) = {mount_other, mount_and_unmount_other};
    unsigned at = 1;

    while (claim_with(what[_i % 2], at, 1 + (unsigned)_i / 2))
        at++;
    ck_assert_uint_gt(at, 9);
}

TEST(a_claim_that_is_undone_leaves_each_byte)
{
    struct ht_claim *claim;

    make(2);
    struct ht_super sb = store;
    uint8_t *before = test_alloc(DEVICE_BYTES);
    memcpy(before, ht_dev_ram_data(devs[1]), DEVICE_BYTES);
    ck_assert_int_eq(ht_claim_take(&sb, devs, count, &claim), 0);
    ck_assert_int_ne(memcmp(before, ht_dev_ram_data(devs[1]), DEVICE_BYTES), 0);
    ht_claim_undo(claim, &sb);
    ck_assert_int_eq(memcmp(before, ht_dev_ram_data(devs[1]), DEVICE_BYTES), 0);
    ck_assert_uint_eq(sb.writer, 0);
    drop();
}

TEST(who_was_taken_over_writes_no_superblock)
{
    make(1);
    mount_other();
    struct ht_super mine = other.sb;
    mount_other(); /* the same place: it need not wait */
    ck_assert_int_eq(other.rc, 0);
    ck_assert_int_eq(ht_claim_look(&mine, devs[0], 0), HT_CLAIM_LOST);
    mine.start_pos = 4096;
    ck_assert_uint_ne(ht_super_write(&mine, devs, count, NULL), 0);
    ck_assert(mine.taken);
    expect_newest(&other.sb);
    drop();
}

RUN_TESTS("claims of a store", .timeout_s = 20)
