/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks marked lost: reads fail, everything else goes on, and writing heals. */
#include "tests/unit/tiering/store/fixture.h"

enum { CHUNKS = 3, INDEX = 1 };

static uint8_t *content;
static struct ht_obj *obj;
static uint64_t oid;

static void setup(void)
{
    fresh(64, false);
    content = pattern(CHUNKS * MIB, 3);
    obj = object(MIB, 0);
    oid = ht_obj_id(obj);
    put_all(obj, 0, content, CHUNKS * MIB);
    sync_and_evict(obj);
    ck_assert_int_eq(ht_store_lose_chunk(s, oid, INDEX), 0);
}

static void teardown(void)
{
    done();
    free(content);
}

static void sync_all(void)
{
    ck_assert_int_eq(ht_obj_sync(obj), 0);
}

static void expect_lost(void)
{
    uint8_t byte;

    ck_assert_int_eq(ht_obj_read(obj, INDEX * MIB, &byte, 1), -EIO);
    ck_assert_int_eq(ht_obj_read(obj, (INDEX + 1) * MIB - 1, &byte, 1), -EIO);
    expect(obj, 0, content, MIB);
    expect(obj, 2 * MIB, content + 2 * MIB, MIB);
    ck_assert_uint_eq(stats().lost_chunks, 1);
    ck_assert_uint_eq(stats().chunks, CHUNKS);
}

TEST(reads_of_it_fail_and_the_rest_is_there)
{
    expect_lost();
    obj = after(remount, obj);
    expect_lost();
    ck_assert_uint_eq(ht_store_super(s)->feat_refuse & HT_FEAT_REFUSE_LOST, HT_FEAT_REFUSE_LOST);
    ck_assert_int_eq(ht_store_lose_chunk(s, oid, INDEX), 0); /* is already */
    ck_assert_int_eq(ht_store_lose_chunk(s, oid, CHUNKS), -ENOENT);
    ck_assert_int_eq(ht_store_lose_chunk(s, oid + 1, 0), -ENOENT);
}

/* A short count would be taken for the end of the file, by the kernel's page cache first of all. */
TEST(a_read_that_reaches_it_is_an_error_as_a_whole)
{
    uint8_t *buf = test_alloc(CHUNKS * MIB);

    ck_assert_int_eq(ht_obj_read(obj, 0, buf, CHUNKS * MIB), -EIO);
    ck_assert_int_eq(ht_obj_read(obj, 0, buf, MIB + 1), -EIO);
    ck_assert_int_eq(ht_obj_read(obj, 0, buf, MIB), MIB);
    ck_assert_int_eq(ht_obj_read(obj, 2 * MIB, buf, CHUNKS * MIB), MIB);
}

TEST(the_mark_outlives_checkpoint)
{
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    obj = after(crash, obj);
    expect_lost();
}

TEST(what_it_had_stored_comes_free_at_the_next_mount)
{
    uint64_t before = stats().free_bytes;

    obj = after(remount, obj);
    ck_assert_uint_eq(stats().free_bytes, before + MIB);
}

TEST(writing_all_of_it_heals)
{
    put_all(obj, INDEX * MIB, content, MIB);
    expect(obj, INDEX * MIB, content, MIB);
    sync_all();
    ck_assert_uint_eq(stats().lost_chunks, 0);
    obj = after(crash, obj);
    expect(obj, INDEX * MIB, content, MIB);
    ck_assert_uint_eq(stats().lost_chunks, 0);
}

TEST(a_part_of_it_that_is_cut_off_leaves_the_rest_lost)
{
    uint8_t byte;

    ck_assert_int_eq(ht_obj_truncate(obj, INDEX * MIB + 100), 0);
    sync_all();
    obj = after(crash, obj);
    ck_assert_int_eq(ht_obj_read(obj, INDEX * MIB + 99, &byte, 1), -EIO);
    ck_assert_int_eq(ht_obj_truncate(obj, INDEX * MIB), 0);
    sync_all();
    ck_assert_uint_eq(stats().lost_chunks, 0);
    obj = after(crash, obj);
    expect(obj, 0, content, MIB);
}

TEST(it_can_neither_be_cloned_nor_updated)
{
    struct ht_obj *copy = object(MIB, 0);
    struct ht_batch_pin l = {
        .store = s, .count = 1, .chunk = {{.obj = obj, .index = INDEX, .mode = HT_BATCH_PIN_UPDATE}}};

    ck_assert_int_eq(ht_obj_clone(obj, INDEX * MIB, copy, 0, MIB), -EIO);
    ck_assert_int_eq(ht_obj_clone(obj, 0, copy, 0, MIB), MIB);
    ck_assert_int_eq(ht_batch_pin_begin(&l), 0);
    ck_assert_int_eq(ht_batch_pin_wait(&l), -EIO);
    unpin(&l, 0);
    l.chunk[0].mode = HT_BATCH_PIN_OVERWRITE;
    pin_now(&l);
    memcpy(l.chunk[0].data, content, MIB);
    unpin(&l, 1);
    expect(obj, INDEX * MIB, content, MIB);
}

TEST(it_goes_with_its_object)
{
    struct ht_obj *o = obj;

    obj = NULL;
    delete (o);
    ck_assert_uint_eq(stats().lost_chunks, 0);
    remount();
    ck_assert_uint_eq(stats().lost_chunks, 0);
    ck_assert_uint_eq(stats().chunks, 0);
}

RUN_TESTS("lost", .setup = setup, .teardown = teardown)
