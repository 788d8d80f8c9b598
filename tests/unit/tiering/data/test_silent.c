/* SPDX-License-Identifier: Apache-2.0 */
/* test_silent.c - a device that does not answer delays only the operations that need it. */

#include "tests/support/memory.h"
#include "tests/unit/tiering/store/cached_devices.h"
#include "tiering/sys/mem.h"
#include "tiering/space/super.h"

/* One chunk that does not lie on this device, written back. */
static struct ht_obj *written_beside(unsigned device)
{
    for (;;) {
        struct ht_obj *o = written_object(HT_CHUNK_BYTES, 0, two, MIB);
        if (write_back(o) != device)
            return o;
        put_object(o);
    }
}

TEST(a_device_that_does_not_answer_delays_only_what_lies_on_it)
{
    make(4);
    struct ht_obj *on_all = written_object(HT_CHUNK_BYTES, 0, one, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(on_all), 0);
    struct syncing y = {.o = written_beside(3)}, all = {.o = on_all};
    dev_stall(devs[3], true);
    pthread_t thread[2];
    ck_assert_int_eq(pthread_create(&thread[1], NULL, sync_main, &all), 0);
    usleep(20000);
    ck_assert_int_eq(pthread_create(&thread[0], NULL, sync_main, &y), 0);
    for (unsigned ms = 0; ms < WAIT_MS_MAX && !y.over; ms += 10)
        usleep(10000);
    bool over = y.over, all_over = all.over;
    dev_stall(devs[3], false);
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
}

struct checkpointing {
    _Atomic bool over;
    int rc;
};

static void *checkpoint_main(void *arg)
{
    struct checkpointing *k = arg;

    k->rc = ht_store_checkpoint(s);
    k->over = true;
    return NULL;
}

enum { NO_COMMIT_MS = 3600000 }; /* with threads, and no commit of the timer */

/*
 * The device has no log, and the checkpoint would write only a superblock there. Either a flush of the device is in
 * flight, or nothing.
 */
TEST_LOOP(a_device_that_does_not_answer_does_not_keep_a_checkpoint, 2)
{
    bool in_use = _i == 0;
    struct checkpointing k = {.over = false};
    pthread_t thread[2];

    answer_ms = 1500;
    commit_ms = in_use ? 0 : NO_COMMIT_MS;
    make(4);
    struct syncing y = {.o = object(HT_CHUNK_BYTES, 0)};
    put_all(y.o, 0, one, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(y.o), 0);
    struct ht_obj *beside = written_beside(3);
    dev_stall(devs[3], true);
    if (in_use)
        ck_assert_int_eq(pthread_create(&thread[0], NULL, sync_main, &y), 0);
    while (in_use && !ht_dev_oldest_ns(devs[3]))
        usleep(1000);
    ck_assert_int_eq(pthread_create(&thread[1], NULL, checkpoint_main, &k), 0);
    for (unsigned ms = 0; ms < WAIT_MS_MAX && !k.over; ms += 10)
        usleep(10000);
    bool over = k.over;
    int rc = over ? ht_obj_sync(beside) : 0;
    dev_stall(devs[3], false);
    if (in_use)
        pthread_join(thread[0], NULL);
    else
        (void)sync_main(&y);
    pthread_join(thread[1], NULL);
    ck_assert(over);
    ck_assert_int_eq(k.rc, 0);
    ck_assert_int_eq(rc, 0);
    ck_assert_int_eq(y.rc, 0);
    ck_assert(!ht_members_takes_part(ht_store_super(s), 3));
    uint64_t ids[] = {put(y.o), put(beside)};
    power_cut(13);
    ck_assert(ht_members_takes_part(ht_store_super(s), 3));
    expect_after_cut(ids[0], one, CHUNKS * MIB);
    expect_after_cut(ids[1], two, MIB);
    end();
    answer_ms = commit_ms = 0;
}

/* The device falls silent while nothing is in flight there. The scrub has come to its superblock. */
TEST(a_scrub_of_a_silent_device_does_not_keep_a_checkpoint)
{
    struct checkpointing k = {.over = false};
    pthread_t thread;

    answer_ms = 1500;
    commit_ms = NO_COMMIT_MS;
    make(4);
    dev_stall(devs[3], true);
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
    while (!ht_dev_oldest_ns(devs[3]))
        usleep(1000);
    ck_assert_int_eq(pthread_create(&thread, NULL, checkpoint_main, &k), 0);
    struct ht_scrub_stats st = {.state = HT_SCRUB_RUNNING};
    for (unsigned ms = 0; ms < WAIT_MS_MAX && (!k.over || st.state == HT_SCRUB_RUNNING); ms += 10) {
        usleep(10000);
        ht_store_scrub_stats(s, &st);
    }
    bool over = k.over;
    dev_stall(devs[3], false);
    pthread_join(thread, NULL);
    ck_assert(over);
    ck_assert_int_eq(k.rc, 0);
    ck_assert_uint_eq(st.state, HT_SCRUB_COMPLETE); /* only superblocks lie on the device */
    end();
    answer_ms = commit_ms = 0;
}

/* The request in flight when a device falls silent: all kinds that a commit waits for. */
enum silence { IN_FLUSH, IN_WRITE, IN_READ, IN_LOG, SILENCES };

static void *read_main(void *arg)
{
    uint8_t byte;

    ck_assert_int_eq(ht_obj_read(((struct syncing *)arg)->o, MIB - 1, &byte, 1), 1);
    return sync_main(arg);
}

/* One chunk that lies on this device alone, written back; everything else is published. */
static struct ht_obj *written_to_this(unsigned device)
{
    for (;;) {
        struct ht_obj *o = written_object(HT_CHUNK_BYTES, 0, two, MIB);
        if (write_back(o) == device)
            return o;
        ck_assert_int_eq(ht_obj_sync(o), 0);
        put_object(o);
    }
}

/* Makes the device fall silent, and starts a thread that waits for it. */
static unsigned fall_silent(enum silence in, struct syncing *y, pthread_t *out_thread)
{
    unsigned device = in == IN_LOG ? 0 : 3;

    if (in == IN_LOG) {
        y->o = published(0, one, MIB);
        ck_assert_int_eq(ht_obj_truncate(y->o, 2 * MIB), 0);
    } else if (in == IN_READ) { /* the image has newer first bytes */
        y->o = written_to_this(device);
        ck_assert_int_eq(ht_obj_sync(y->o), 0);
        ht_obj_evict(y->o);
        put_all(y->o, 0, one, MIB / 2);
    } else {
        y->o = object(HT_CHUNK_BYTES, 0);
        put_all(y->o, 0, one, CHUNKS * MIB);
    }
    if (in == IN_FLUSH)
        ck_assert_int_eq(ht_obj_writeback(y->o), 0);
    dev_stall(devs[device], true);
    ck_assert_int_eq(pthread_create(out_thread, NULL, in == IN_READ ? read_main : sync_main, y), 0);
    return device;
}

/*
 * Until the timer has committed the object. A commit that ended while it was unpublished came before. One that was not
 * seen to end has ended two periods later.
 */
static void wait_for_timer(struct ht_obj *o)
{
    uint64_t commits = 0, end_ns = 0;

    for (bool unpublished = true; unpublished || (stats().commits == commits && ht_now_ns() < end_ns); usleep(10000)) {
        unpublished = obj_stat(o).unpublished;
        if (unpublished || !end_ns) {
            commits = stats().commits;
            end_ns = ht_now_ns() + 2 * UINT64_C(1000000) * commit_ms;
        }
    }
}

/*
 * The timer's thread keeps images clean while a file that is to be committed needs it, and commits when it answers.
 */
TEST_LOOP(a_device_that_does_not_answer_does_not_keep_the_timer, SILENCES)
{
    enum { DIRTY = 30, ENOUGH = 24 };
    struct ht_device_stat st;
    struct syncing y = {.over = false};
    pthread_t thread;

    answer_ms = 1000;
    commit_ms = 1500;
    make(4);
    struct ht_obj *model = object(HT_CHUNK_BYTES, SCOPE);
    unsigned device = fall_silent((enum silence)_i, &y, &thread);
    do {
        usleep(10000);
        ht_store_device_stat(s, device, &st);
    } while (st.health != HT_HEALTH_NOT_ANSWERING);
    usleep(commit_ms * 1000); /* a commit was due */
    for (uint64_t i = 0; i < DIRTY; i++)
        put_all(model, i * MIB, two, MIB);
    for (unsigned ms = 0; ms < WAIT_MS_MAX / 2 && stats().dram_dirty_bytes > ENOUGH * MIB; ms += 10)
        usleep(10000);
    uint64_t dirty = stats().dram_dirty_bytes;
    bool over = y.over;
    dev_stall(devs[device], false);
    pthread_join(thread, NULL);
    ck_assert_uint_le(dirty, ENOUGH * MIB);
    ck_assert(!over);
    ck_assert_int_eq(y.rc, 0);
    put_all(y.o, 0, two, MIB);
    wait_for_timer(y.o);
    ck_assert_uint_eq(obj_stat(y.o).dirty_bytes, 0);
    answer_ms = commit_ms = 0;
    put_object(model);
    cut_and_expect(y.o, 16, two, MIB);
}

static void *read_device_main(void *arg)
{
    _Alignas(HT_BLOCK_BYTES) uint8_t block[HT_BLOCK_BYTES];

    ck_assert_int_eq(ht_dev_read(arg, 0, block, sizeof(block)), 0);
    return NULL;
}

/* A flush from outside the store has covered everything on the device. */
TEST(a_silent_device_that_needs_no_flush_does_not_keep_the_timer)
{
    struct ht_device_stat st;
    pthread_t thread;

    answer_ms = 1000;
    commit_ms = 1500;
    make(4);
    struct ht_obj *o = written_to_this(3);
    ck_assert_int_eq(ht_dev_flush(devs[3]), 0);
    dev_stall(devs[3], true);
    ck_assert_int_eq(pthread_create(&thread, NULL, read_device_main, devs[3]), 0);
    do {
        usleep(10000);
        ht_store_device_stat(s, 3, &st);
    } while (st.health != HT_HEALTH_NOT_ANSWERING);
    bool unpublished = true;
    for (unsigned ms = 0; ms < WAIT_MS_MAX / 2 && unpublished; ms += 10) {
        usleep(10000);
        unpublished = obj_stat(o).unpublished;
    }
    dev_stall(devs[3], false);
    pthread_join(thread, NULL);
    ck_assert(!unpublished);
    answer_ms = commit_ms = 0;
}

RUN_TESTS("silence", .teardown = end, .timeout_s = 300, .quiet = ERRORS_ONLY, .memory = memory_keep)
