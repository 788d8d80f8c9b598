/* SPDX-License-Identifier: Apache-2.0 */
/* test_used.c - objects of which only the first bytes of each chunk are used. */
#include "tests/support/memory.h"
#include "tiering/object/object.h"
#include "tests/unit/tiering/store/fixture.h"

enum { CHUNKS = 12, LAST = 3000, USED_BLOCKS = 65, USED = USED_BLOCKS * HT_BLOCK_BYTES };
/* The last chunk ends inside its used bytes. */
static const uint64_t size = (CHUNKS - 1) * MIB + LAST;
static const uint64_t blocks = (CHUNKS - 1) * USED_BLOCKS + 1;

static struct ht_obj *o;
static uint8_t *p;

static void begin(enum ht_residency residency)
{
    fresh(40, false);
    o = object(HT_CHUNK_BYTES, 9);
    p = pattern(USED + CHUNKS + 4, 8);
    ck_assert_int_eq(ht_obj_set_used(o, USED), 0);
    ck_assert_int_eq(ht_obj_truncate(o, size), 0);
    ht_obj_set_residency(o, residency);
}

static void end(void)
{
    ht_store_verify(s, false);
    done();
}

static uint32_t len_of(uint64_t index)
{
    return index == CHUNKS - 1 ? LAST : USED;
}

static void update(uint64_t index, unsigned version)
{
    struct ht_batch_pin l = {
        .store = s, .count = 1, .chunk[0] = {.obj = o, .index = index, .mode = HT_BATCH_PIN_UPDATE}};

    pin_now(&l);
    ck_assert_uint_eq(l.chunk[0].len, len_of(index));
    if (version)
        ck_assert_int_eq(memcmp(l.chunk[0].data, p + index + version - 1, l.chunk[0].len), 0);
    memcpy(l.chunk[0].data, p + index + version, l.chunk[0].len);
    unpin(&l, 1);
}

static void check(unsigned version)
{
    uint8_t *got = malloc(MIB);

    for (uint64_t i = 0; i < CHUNKS; i++) {
        uint64_t n = i == CHUNKS - 1 ? LAST : MIB;
        ck_assert_int_eq(ht_obj_read(o, i * MIB, got, MIB), (ssize_t)n);
        ck_assert_int_eq(memcmp(got, p + i + version, len_of(i)), 0);
        for (uint64_t at = len_of(i); at < n; at++)
            ck_assert_uint_eq(got[at], 0);
    }
    free(got);
}

TEST_LOOP(only_what_is_used_is_stored_and_read, 2)
{
    begin(_i ? HT_RESIDENCY_COLD : HT_RESIDENCY_AUTO);
    for (uint64_t i = 0; i < CHUNKS; i++)
        update(i, 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_eq(obj_stat(o).stored_bytes, blocks * HT_BLOCK_BYTES);
    check(0);
    o = after(remount, o);
    check(0);
    ck_assert_int_eq(ht_obj_set_used(o, USED), 0); /* as after each mount */
    ht_obj_set_residency(o, _i ? HT_RESIDENCY_COLD : HT_RESIDENCY_AUTO);
    for (uint64_t i = 0; i < CHUNKS; i++)
        update(i, 1);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_eq(obj_stat(o).stored_bytes, blocks * HT_BLOCK_BYTES);
    check(1);
    end();
}

/* No other space is left, and the object is written over and over. */
TEST_LOOP(a_rewrite_reserve_is_for_what_is_used, 2)
{
    begin(_i ? HT_RESIDENCY_COLD : HT_RESIDENCY_AUTO);
    ck_assert_uint_eq(ht_obj_rewrite_bytes(o, size), 2 * blocks * HT_BLOCK_BYTES);
    uint64_t before = stats().reserved_bytes;
    ck_assert_int_eq(ht_obj_rewrite_reserve(o, size), 0);
    ck_assert_uint_eq(stats().reserved_bytes - before, 2 * blocks * HT_BLOCK_BYTES);
    struct ht_obj *filler = object(HT_CHUNK_BYTES, 0);
    while (ht_obj_write(filler, ht_obj_size(filler), p, USED) > 0)
        ;
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    ck_assert_uint_lt(stats().available_bytes, MIB);
    for (unsigned version = 0; version < 4; version++) {
        for (uint64_t i = 0; i < CHUNKS; i++)
            update(i, version);
        ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
        ck_assert_int_eq(ht_obj_sync(o), 0);
        check(version);
        ht_store_verify(s, false);
    }
    put_object(filler);
    end();
}

/* Content of an older program fills its chunks: the space for its next rewrite is that of before. */
TEST(more_than_is_used_stays_as_it_is)
{
    fresh(40, false);
    o = object(HT_CHUNK_BYTES, 9);
    p = pattern(2 * MIB, 8);
    put_synced(o, 0, p, 2 * MIB);
    ck_assert_int_eq(ht_obj_set_used(o, USED), 0);
    ck_assert_uint_eq(ht_obj_rewrite_bytes(o, 2 * MIB), 2 * MIB);
    expect(o, 0, p, 2 * MIB);
    end();
}

RUN_TESTS("used", .memory = memory_keep)
