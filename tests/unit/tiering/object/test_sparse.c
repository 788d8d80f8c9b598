/* SPDX-License-Identifier: Apache-2.0 */
/* Sparse objects cost as much as their content, wherever it is. */
#include "tests/unit/tiering/store/fixture.h"

enum { MANY = 1000, FILE_META_BYTES_MAX = 4096, SMALL_META_BYTES_MAX = 224 };

/* The first byte of the last chunk: the bytes before an offset in its chunk are stored with it. */
static uint64_t last_of(struct ht_obj *o)
{
    return HT_FILE_BYTES_MAX - ht_obj_chunk_bytes(o);
}

TEST(a_byte_at_the_end_of_the_largest_object_costs_little)
{
    static struct ht_obj *o[MANY];
    static uint64_t oid[MANY];

    fresh(64, false);
    uint64_t before = stats().meta_bytes;
    for (unsigned i = 0; i < MANY; i++) {
        o[i] = object(i % 2 ? HT_CHUNK_BYTES : HT_SMALL_CHUNK_BYTES, 0);
        oid[i] = ht_obj_id(o[i]);
        put_all(o[i], last_of(o[i]), (const uint8_t *)&i, 1);
    }
    ck_assert_uint_le(stats().meta_bytes - before, MANY * FILE_META_BYTES_MAX);
    for (unsigned i = 0; i < MANY; i++) {
        uint64_t last = last_of(o[i]);
        ck_assert_int_eq(ht_obj_seek(o[i], 0, false), (int64_t)last);
        ck_assert_int_eq(ht_obj_seek(o[i], 12345, true), 12345);
        ck_assert_int_eq(ht_obj_seek(o[i], last, true), (int64_t)last + 1);
        put_object(o[i]);
    }
    remount();
    ck_assert_uint_le(stats().meta_bytes - before, MANY * FILE_META_BYTES_MAX);
    for (unsigned i = 0; i < MANY; i++) {
        ck_assert_ptr_nonnull(o[i] = get_object(oid[i]));
        uint8_t want = (uint8_t)i, zeros[100] = {0};
        uint64_t last = last_of(o[i]);
        expect(o[i], last, &want, 1);
        expect(o[i], last - 1000, zeros, 100);
        if (i % 3 == 0)
            ck_assert_int_eq(ht_obj_truncate(o[i], last), 0);
        else if (i % 3 == 1)
            ck_assert_int_eq(ht_obj_punch(o[i], 4096, HT_FILE_BYTES_MAX), 0);
        else
            ck_assert_int_eq(ht_obj_truncate(o[i], 0), 0);
        ck_assert_uint_eq(ht_obj_size(o[i]), i % 3 == 0 ? last : i % 3 == 1 ? last + 1 : 0);
        if (i % 3 == 1)
            ck_assert_int_eq(ht_obj_seek(o[i], 0, false), -ENXIO);
        put_object(o[i]);
    }
    remount();
    for (unsigned i = 0; i < MANY; i++) {
        o[i] = get_object(oid[i]);
        ck_assert_int_eq(ht_obj_seek(o[i], 0, false), -ENXIO);
        delete (o[i]);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_le(stats().meta_bytes, before + 65536);
    ck_assert_uint_eq(stats().chunks, 0);
}

TEST(the_very_last_byte_can_be_written)
{
    fresh(32, false);
    struct ht_obj *o = object(HT_SMALL_CHUNK_BYTES, 0);
    put_all(o, HT_FILE_BYTES_MAX - 1, (const uint8_t *)"z", 1);
    ck_assert_int_eq(ht_obj_write(o, HT_FILE_BYTES_MAX, "z", 1), -EFBIG);
    sync_and_evict(o);
    expect(o, HT_FILE_BYTES_MAX - 1, (const uint8_t *)"z", 1);
    ck_assert_uint_eq(ht_obj_size(o), HT_FILE_BYTES_MAX);
}

/* Chunks at every height of the table, made in an order that raises it step by step and in the opposite one. */
TEST(chunks_far_apart_are_found_in_order)
{
    fresh(32, false);
    for (int down = 0; down < 2; down++) {
        struct ht_obj *o = object(HT_SMALL_CHUNK_BYTES, 0);
        enum { STEPS = 28 };
        for (int k = 0; k < STEPS; k++) {
            uint64_t off = (1ull << (16 + (down ? STEPS - 1 - k : k))) + 7;
            put_all(o, off, (const uint8_t *)&off, 8);
        }
        for (int round = 0; round < 2; round++) {
            uint64_t at = 0;
            for (int k = 0; k < STEPS; k++) {
                uint64_t off = (1ull << (16 + k)) + 7;
                int64_t data = ht_obj_seek(o, at, false);
                ck_assert_int_eq(data, (int64_t)(off - 7));
                expect(o, off, (const uint8_t *)&off, 8);
                /* Chunks 1 and 2 are neighbours; a hole follows each of the others. */
                int64_t hole = ht_obj_seek(o, (uint64_t)data, true);
                ck_assert_int_eq(hole, k == 0 ? 3 << 16 : k == STEPS - 1 ? data + 15 : data + 65536);
                at = k == 0 ? 2 << 16 : (uint64_t)hole;
            }
            ck_assert_int_eq(ht_obj_seek(o, at, false), -ENXIO);
            sync_and_evict(o);
        }
        /* Each lies alone in its leaf, except the first few. */
        ck_assert_int_eq(ht_obj_punch(o, 1ull << 20, 1ull << 42), 0);
        ck_assert_int_eq(ht_obj_seek(o, 1ull << 20, false), (int64_t)(1ull << 43));
        put_object(o);
    }
}

/* With one chunk, and its share of the table of objects. */
TEST(a_small_object_costs_little)
{
    static struct ht_obj *o[4 * MANY];

    fresh(64, false);
    uint64_t before = stats().meta_bytes;
    for (unsigned i = 0; i < 4 * MANY; i++) {
        o[i] = object(i % 2 ? HT_CHUNK_BYTES : HT_SMALL_CHUNK_BYTES, 0);
        put_all(o[i], 0, (const uint8_t *)&i, 1);
        if (i % 100 == 0)
            ck_assert_int_eq(ht_store_commit(s), 0);
    }
    ck_assert_uint_le(stats().meta_bytes - before, 4 * MANY * SMALL_META_BYTES_MAX);
}

/* Each place in a leaf and a node of its own. Space is set aside in place of writing, which is quick. */
TEST(places_apart_are_refused_before_their_tables_take_too_much_memory)
{
    enum { TABLES_BYTES_MAX = 64 << 20, PLACE_BYTES = 1500 };
    const uint64_t stride = 32 << 20, used_min = TABLES_BYTES_MAX / PLACE_BYTES;

    fresh(1024, false);
    struct ht_obj *o = object(HT_SMALL_CHUNK_BYTES, 0);
    uint64_t before = stats().meta_bytes, places = 0;
    int rc;
    while ((rc = ht_obj_prealloc(o, (places + 1) * stride, 4096)) == 0)
        places++;
    ck_assert_int_eq(rc, -ENOSPC);
    ck_assert_uint_ge(places, used_min);
    ck_assert_uint_le(stats().meta_bytes - before, TABLES_BYTES_MAX + 4096);
    ck_assert_uint_gt(stats().available_bytes, 256 * MIB); /* it was not for want of space */
    /* A refused call creates nothing. Existing chunks and their neighbours can be written. */
    uint64_t full = stats().meta_bytes, far = (places + 1) * stride;
    ck_assert_int_eq(ht_obj_write(o, far, "x", 1), -ENOSPC);
    ck_assert_int_eq(ht_obj_prealloc(o, far, 64 * MIB), -ENOSPC);
    ck_assert_uint_eq(stats().meta_bytes, full);
    put_all(o, stride, (const uint8_t *)"x", 1);
    put_all(o, stride + HT_SMALL_CHUNK_BYTES, (const uint8_t *)"y", 1);
    expect(o, stride + HT_SMALL_CHUNK_BYTES, (const uint8_t *)"y", 1);
    /* A small file needs no table. */
    (void)written_object(HT_SMALL_CHUNK_BYTES, 0, (const uint8_t *)"z", 1);
    ck_assert_int_eq(ht_obj_punch(o, 2 * stride, 1000 * stride), 0);
    put_all(o, far, (const uint8_t *)"x", 1);
}

RUN_TESTS("sparse", .teardown = done, .timeout_s = 60)
