/* SPDX-License-Identifier: Apache-2.0 */
/* test_discard.c - devices forget free space, and nothing else. A device of memory then reads as no content does. */

#include "tests/unit/tiering/store/fixture.h"

enum { BYTES = 3 * MIB, DISCARDED = 0xd1 };

static uint8_t *ram(void)
{
    return ht_dev_ram_data(dev);
}

static struct ht_dev_counters counters(void)
{
    struct ht_dev_counters c;

    ht_dev_counters(dev, &c);
    return c;
}

/* An object that is stored and published, with the same byte everywhere. */
static struct ht_obj *stored(uint8_t byte, size_t n)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    uint8_t *p = malloc(n);

    memset(p, byte, n);
    put_synced(o, 0, p, n);
    free(p);
    return o;
}

/* So many bytes of the device's blocks hold this byte at their begin and end. */
static uint64_t on_device(uint8_t byte)
{
    uint64_t bytes = 0;

    for (uint64_t at = 0; at < ht_dev_size(dev); at += HT_BLOCK_BYTES)
        if (ram()[at] == byte && ram()[at + HT_BLOCK_BYTES - 1] == byte)
            bytes += HT_BLOCK_BYTES;
    return bytes;
}

static void setup(void)
{
    fixture_discard = true;
    fresh(32, false);
}

TEST(what_became_free_is_discarded_once_the_log_is_durable)
{
    struct ht_obj *kept = stored('k', BYTES), *gone = stored('g', BYTES);

    delete (gone);
    background_discard(s);
    ck_assert_uint_eq(on_device('g'), BYTES);
    ck_assert_int_eq(ht_store_commit(s), 0);
    background_discard(s);
    ck_assert_uint_eq(on_device('g'), 0);
    ck_assert_uint_eq(on_device('k'), BYTES);
    ck_assert_uint_eq(counters().discarded_bytes, BYTES);
    ck_assert_uint_eq(stats().device_discarded_bytes, BYTES);
    /* nothing is discarded twice */
    background_discard(s);
    ck_assert_uint_eq(counters().discarded_bytes, BYTES);
    kept = after(remount, kept);
    uint8_t *want = malloc(BYTES);
    memset(want, 'k', BYTES);
    expect(kept, 0, want, BYTES);
    free(want);
}

TEST(space_that_is_in_use_again_is_not_discarded)
{
    struct ht_obj *gone = stored('g', BYTES), *next;

    delete_durably(gone);
    while (stats().available_bytes >= BYTES) { /* takes its place, too */
        next = stored('n', BYTES);
        put_object(next);
    }
    background_discard(s);
    uint64_t n = on_device('n');
    ck_assert_uint_eq(n % BYTES, 0);
    ck_assert_uint_gt(n, 2 * BYTES);
    ht_store_verify(s, true);
}

TEST(a_trim_discards_all_free_space_and_keeps_the_rest)
{
    (void)stored('k', BYTES);
    uint64_t bytes, free_bytes = stats().free_bytes;

    ht_store_verify(s, true);
    ck_assert_int_eq(ht_store_trim(s, &bytes), 0);
    ht_store_verify(s, true);
    ck_assert_uint_le(bytes, free_bytes);
    ck_assert_uint_ge(bytes, free_bytes - 16 * HT_BLOCK_BYTES);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    ck_assert_uint_eq(on_device('k'), BYTES);
    remount();
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
}

TEST(a_device_that_refuses_is_not_asked_again)
{
    struct ht_obj *gone = stored('g', BYTES);
    uint64_t bytes, free_bytes;

    dev_fail_with(dev, HT_IO_DISCARD, 1, true, -EOPNOTSUPP);
    delete_durably(gone);
    free_bytes = stats().free_bytes;
    background_discard(s);
    ck_assert_uint_eq(on_device('g'), BYTES);
    uint64_t asked = counters().discard_errors;
    ck_assert_uint_ge(asked, 1);
    gone = stored('h', BYTES);
    delete_durably(gone);
    background_discard(s);
    ck_assert_int_eq(ht_store_trim(s, &bytes), -EOPNOTSUPP);
    ck_assert_uint_eq(counters().discard_errors, asked);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    ht_store_verify(s, true);
}

static struct ht_device_stat device_stat(void)
{
    struct ht_device_stat st;

    ht_store_device_stat(s, 0, &st);
    return st;
}

static void *write_all(void *arg)
{
    struct ht_obj *o = arg;
    uint8_t *p = pattern(BYTES, 5);
    ssize_t n = ht_obj_write(o, 0, p, BYTES);
    int rc = n == BYTES ? ht_obj_sync(o) : -1;

    free(p);
    return (void *)(intptr_t)rc;
}

/* A discard leaves some blocks to writers. Others have these. */
static unsigned take_the_rest(struct ht_extent out[]) HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned n = 0;

    while (ht_alloc_free_blocks(s->alloc) >= HT_GROUP_BLOCKS) {
        ck_assert_int_eq(ht_alloc_reserve(s->alloc, HT_GROUP_BLOCKS), 0);
        int took = ht_alloc_take(s->alloc, HT_GROUP_BLOCKS, HT_ALLOC_HINT_NONE, out + n);
        ck_assert_int_gt(took, 0);
        n += (unsigned)took;
    }
    return n;
}

/* All free space is being discarded. */
TEST(a_writer_waits_for_space_that_is_being_discarded)
{
    static struct ht_extent e[4096], rest[4096];
    struct ht_alloc_freed_walk walk = {.all = true};
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    pthread_t writer;
    unsigned n = 0;
    void *rc;

    ht_store_lock(s);
    uint64_t available = ht_alloc_available(s->alloc);
    for (unsigned got = 1; got; n += got) {
        got = ht_alloc_take_freed(s->alloc, &walk, e + n, 64);
        walk.from = walk.ended ? 0 : walk.from;
    }
    ck_assert_uint_eq(ht_alloc_available(s->alloc), available);
    unsigned rests = take_the_rest(rest);
    ck_assert_uint_gt(ht_alloc_discarding(s->alloc, true), 0);
    ht_store_unlock(s);
    ht_store_verify(s, false);
    ck_assert_int_eq(pthread_create(&writer, NULL, write_all, o), 0);
    usleep(50000); /* whether it waits by now or not */
    ht_store_lock(s);
    ht_alloc_put_freed(s->alloc, e, n);
    for (unsigned i = 0; i < rests; i++)
        ht_alloc_release(s->alloc, &rest[i]);
    ck_assert_uint_eq(ht_alloc_available(s->alloc) + ht_alloc_reserved(s->alloc), ht_alloc_free_blocks(s->alloc));
    pthread_cond_broadcast(&s->waits.settled);
    ht_store_unlock(s);
    pthread_join(writer, &rc);
    ck_assert_int_eq((int)(intptr_t)rc, 0);
    put_object(o);
    ht_store_verify(s, true);
}

static void *read_a_block(void *arg)
{
    static _Alignas(HT_BLOCK_BYTES) uint8_t block[HT_BLOCK_BYTES];

    if (ht_dev_read(dev, 0, block, sizeof(block)))
        abort();
    return arg;
}

/*
 * A discard may never end. What it has is no space any more when the device counts as silent: a writer who has waited
 * for it is told at once, and the space is back when the device answers.
 */
TEST(a_writer_does_not_wait_for_a_discard_of_a_silent_device)
{
    static struct ht_extent e[4096], rest[4096];
    struct ht_alloc_freed_walk walk = {.all = true};
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    pthread_t writer, reader;
    unsigned n = 0;
    void *rc;

    ht_store_lock(s);
    for (unsigned got = 1; got; n += got) {
        got = ht_alloc_take_freed(s->alloc, &walk, e + n, 64);
        walk.from = walk.ended ? 0 : walk.from;
    }
    unsigned rests = take_the_rest(rest);
    uint64_t discarding = ht_alloc_discarding(s->alloc, true), available = ht_alloc_available(s->alloc);
    s->opts.answer_ms = 1;
    ht_store_unlock(s);
    ck_assert_int_eq(pthread_create(&writer, NULL, write_all, o), 0);
    while (obj_stat(o).dirty_bytes < BYTES)
        usleep(1000);
    usleep(50000); /* whether it waits by now or not */
    dev_stall(dev, true);
    ck_assert_int_eq(pthread_create(&reader, NULL, read_a_block, NULL), 0);
    while (device_stat().health != HT_HEALTH_NOT_ANSWERING)
        usleep(1000);
    pthread_join(writer, &rc);
    ck_assert_int_eq((int)(intptr_t)rc, -ENOSPC);
    ht_store_lock(s);
    ck_assert_uint_lt(ht_alloc_available(s->alloc), available - discarding + BYTES / HT_BLOCK_BYTES);
    ht_store_unlock(s);
    ht_store_verify(s, false);
    dev_stall(dev, false);
    pthread_join(reader, &rc);
    while (device_stat().health == HT_HEALTH_NOT_ANSWERING)
        usleep(1000);
    ht_store_lock(s);
    ck_assert_uint_eq(ht_alloc_discarding(s->alloc, true), discarding);
    ht_alloc_put_freed(s->alloc, e, n);
    for (unsigned i = 0; i < rests; i++)
        ht_alloc_release(s->alloc, &rest[i]);
    ht_store_unlock(s);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    put_object(o);
    ht_store_verify(s, true);
}

/* Of a device that takes 6 ms for each discard (1), it takes one batch of 16 runs. */
TEST_LOOP(a_step_of_the_engine_ends_at_its_time, 2)
{
    enum { N = 128, SMALL = HT_SMALL_CHUNK_BYTES };
    struct ht_obj *o[N];
    uint8_t *p = pattern(SMALL, 1);
    uint64_t most = 0, last = 0;
    bool slow = _i;

    for (unsigned i = 0; i < N; i++) {
        o[i] = object(SMALL, 0);
        put_all(o[i], 0, p, SMALL);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    for (unsigned i = 0; i < N; i += 2)
        delete (o[i]);
    ck_assert_int_eq(ht_store_commit(s), 0);
    struct ht_budget first = {0}; /* it waits for more space that becomes free */
    ck_assert_int_eq(ht_discard_engine.step(s, &first), HT_STEP_IDLE);
    while (ht_now_ns() < first.at_ns)
        usleep(1000);
    dev_set_delay(dev, slow ? 6 : 0);
    for (enum ht_step found = HT_STEP_WORKED; found == HT_STEP_WORKED;) {
        struct ht_budget b = {.most_bytes = MIB, .until_ns = slow ? ht_now_ns() + 10000000 : UINT64_MAX};
        found = ht_discard_engine.step(s, &b);
        most = ht_max_u64(most, counters().discards - last);
        last = counters().discards;
    }
    dev_set_delay(dev, 0);
    ck_assert_uint_ge(counters().discarded_bytes, N / 2 * SMALL);
    ck_assert_uint_ge(last, N / 2);
    if (slow)
        ck_assert_uint_le(most, 16);
    else
        ck_assert_uint_eq(most, last);
    for (unsigned i = 1; i < N; i += 2) {
        expect(o[i], 0, p, SMALL);
        put_object(o[i]);
    }
    ht_store_verify(s, true);
}

TEST(without_the_option_nothing_is_discarded_unasked)
{
    done();
    fixture_discard = false;
    fresh(32, false);
    struct ht_obj *gone = stored('g', BYTES);

    delete_durably(gone);
    background_discard(s);
    ck_assert_uint_eq(counters().discards, 0);
    ck_assert_uint_eq(on_device('g'), BYTES);
}

TEST(a_read_only_store_discards_nothing)
{
    uint64_t bytes;

    unmount_store();
    mount_with(false, true);
    ck_assert_int_eq(ht_store_trim(s, &bytes), -EROFS);
    ck_assert_uint_eq(counters().discards, 0);
}

/* The engine's own thread, beside writers and deletions. */
TEST(the_engine_discards_beside_writers)
{
    enum { ROUNDS = 400 };

    done();
    fresh(32, true);
    (void)stored('k', BYTES);
    for (unsigned i = 0; i < ROUNDS && !counters().discards; i++) {
        struct ht_obj *o = stored('n', BYTES);
        delete_durably(o);
        usleep(50000);
    }
    ck_assert_uint_gt(counters().discards, 0);
    remount(); /* without threads */
    ck_assert_uint_eq(on_device('k'), BYTES);
}

RUN_TESTS("discard", .setup = setup, .teardown = done, .timeout_s = 120)
