/* SPDX-License-Identifier: Apache-2.0 */
/* Preallocated space: kept on a full store, given back whole, and refused without a trace. */
#include "tests/unit/tiering/store/fixture.h"

enum { SMALL = HT_SMALL_CHUNK_BYTES };

static struct ht_obj *fill_up(void)
{
    struct ht_obj *o = object(SMALL, 0);
    uint8_t *junk = pattern(SMALL, 99);
    uint64_t end = 0;

    while (ht_obj_write(o, end, junk, SMALL) == SMALL)
        end += SMALL;
    while (ht_obj_write(o, end, junk, 4096) == 4096)
        end += 4096;
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_eq(stats().available_bytes, 0);
    return o;
}

static void expect_no_prealloc(struct ht_obj *o)
{
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 0);
    ck_assert_uint_eq(stats().reserved_bytes, 0);
}

TEST(what_was_allocated_can_be_written_on_a_full_store)
{
    uint8_t *p = pattern(4 * MIB, 1);

    for (int variant = 0; variant < 4; variant++) {
        fresh(16, false);
        uint32_t chunk = variant & 1 ? HT_CHUNK_BYTES : SMALL;
        struct ht_obj *o = object(chunk, variant & 2 ? 9 : 0);
        ck_assert_int_eq(ht_obj_prealloc(o, 10, 4 * MIB - 10), 0);
        ck_assert_uint_eq(ht_obj_size(o), 0);
        ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 4 * MIB);
        ck_assert_uint_eq(obj_stat(o).stored_bytes, 0);
        ck_assert_int_eq(ht_obj_prealloc(o, 0, 4 * MIB), 0); /* it is there already */
        ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 4 * MIB);
        struct ht_obj *full = fill_up();
        ck_assert_int_eq(ht_obj_write(full, ht_obj_size(full), p, 1), -ENOSPC);
        for (uint64_t at = 0; at < 4 * MIB; at += 4096) /* in another order than it lies */
            put_all(o, at * 5 % (4 * MIB), p + at * 5 % (4 * MIB), 4096);
        expect(o, 0, p, 4 * MIB);
        ck_assert_int_eq(ht_obj_sync(o), 0);
        expect_no_prealloc(o);
        ht_obj_evict(o);
        expect(o, 0, p, 4 * MIB);
        done();
    }
}

TEST(punching_behind_the_end_gives_back_what_was_allocated)
{
    fresh(16, false);
    struct ht_obj *o = object(SMALL, 0);
    uint8_t *p = pattern(SMALL, 7);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 10000), 0);
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 12288);
    ck_assert_int_eq(ht_obj_punch(o, 0, 10000), 0);
    expect_no_prealloc(o);

    put_all(o, 0, p, 4096);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 4 * SMALL), 0);
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 4 * SMALL - 4096);
    ck_assert_int_eq(ht_obj_punch(o, SMALL, SMALL), 0);
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 3 * SMALL - 4096);
    ck_assert_int_eq(ht_obj_punch(o, 8192, SMALL - 12288), 0); /* not the end of the chunk: that stays */
    ck_assert_uint_ge(obj_stat(o).prealloc_bytes, 2 * SMALL + 4096);
    ck_assert_int_eq(ht_obj_punch(o, 3 * SMALL + 4096, UINT64_MAX), 0);
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 2 * SMALL - 4096 + 4096);
    ck_assert_int_eq(ht_obj_punch(o, 4096, UINT64_MAX), 0);
    ck_assert_uint_le(obj_stat(o).prealloc_bytes, 4096);
    expect(o, 0, p, 4096);
    ck_assert_int_eq(ht_obj_truncate(o, 4096), 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
}

TEST(staged_updates_use_what_was_allocated)
{
    fresh(32, false);
    uint8_t *p = pattern(7 * MIB, 2);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0), *hot = object(HT_CHUNK_BYTES, 0);
    put_all(hot, 0, p, 7 * MIB);
    ck_assert_int_eq(ht_store_commit(s), 0);
    struct ht_batch_pin l = {.store = s, .count = 1};
    for (uint64_t i = 0; i < 7; i++) { /* takes the protected part of the tier */
        l.chunk[0] = (struct ht_batch_pin_chunk){.obj = hot, .index = i, .mode = HT_BATCH_PIN_UPDATE};
        pin_now(&l);
        unpin(&l, 0);
    }
    ck_assert_int_eq(ht_obj_truncate(o, MIB), 0);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, MIB), 0);
    (void)fill_up();
    ck_assert_int_eq(ht_store_commit(s), 0);
    expect(hot, 0, p, 7 * MIB);
    l.chunk[0] = (struct ht_batch_pin_chunk){.obj = o, .mode = HT_BATCH_PIN_UPDATE};
    pin_now(&l);
    ck_assert(l.chunk[0].staged);
    memcpy(l.chunk[0].data, p, MIB);
    unpin(&l, 1);
    expect(o, 0, p, MIB);
    expect_no_prealloc(o);
}

TEST(a_refused_allocation_changes_nothing)
{
    fresh(16, false);
    uint8_t *p = pattern(MIB, 3);
    struct ht_obj *o = synced_object(SMALL, 0, p, 100000);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 200000), 0);
    struct ht_store_stats before = stats(), after;
    uint64_t prealloc = obj_stat(o).prealloc_bytes;
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 15 * MIB), -ENOSPC);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, HT_FILE_BYTES_MAX), -ENOSPC);
    ck_assert_int_eq(ht_obj_prealloc(o, 1, HT_FILE_BYTES_MAX), -EFBIG);
    ck_assert_int_eq(ht_obj_prealloc(o, UINT64_MAX, 1), -EFBIG);
    after = stats();
    ck_assert_uint_eq(after.available_bytes, before.available_bytes);
    ck_assert_uint_eq(after.log.reserved_bytes, before.log.reserved_bytes);
    ck_assert_uint_eq(after.meta_bytes, before.meta_bytes);
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, prealloc);
    ck_assert_uint_eq(ht_obj_size(o), 100000);
    expect(o, 0, p, 100000);
}

/* Many chunks of one block each need more log than there is, before they need more space. */
TEST(log_space_is_preallocated_too)
{
    fresh(512, false);
    struct ht_obj *o = object(SMALL, 0), *hog = object(SMALL, 0);
    struct ht_store_stats before = stats();
    uint64_t fits = (before.log.reserve_limit_bytes - before.log.reserved_bytes) / 68;
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 100 * SMALL), 0);
    uint64_t n = 0;
    while (ht_obj_prealloc(hog, n * SMALL, 1) == 0)
        n++;
    ck_assert_uint_gt(stats().available_bytes, 64 * MIB);
    ck_assert_uint_ge(n, fits / 2);
    uint8_t *p = pattern(SMALL, 4);
    ck_assert_int_eq(ht_obj_write(hog, n * SMALL, p, SMALL), -ENOSPC);
    for (unsigned i = 0; i < 100; i++)
        put_all(o, (uint64_t)i * SMALL, p, SMALL);
    ck_assert_int_eq(ht_obj_sync(o), 0);
}

TEST(preallocations_are_given_back)
{
    fresh(32, false);
    uint8_t *p = pattern(MIB, 5);
    struct ht_store_stats before = stats();
    for (int how = 0; how < 6; how++) {
        struct ht_obj *o = synced_object(SMALL, how == 4 ? 9 : 0, p, 10);
        ck_assert_int_eq(ht_obj_prealloc(o, 0, 4 * MIB), 0);
        ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 4 * MIB);
        switch (how) {
        case 0:
            ck_assert_int_eq(ht_obj_truncate(o, 10), 0); /* to the size it has */
            ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 4096);
            ck_assert_int_eq(ht_obj_truncate(o, 0), 0);
            break;
        case 1:
            ck_assert_int_eq(ht_obj_truncate(o, 4 * MIB), 0); /* up: nothing changes */
            ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 4 * MIB);
            ck_assert_int_eq(ht_obj_truncate(o, 3 * SMALL + 5000), 0);
            ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 3 * SMALL + 8192);
            ck_assert_int_eq(ht_obj_truncate(o, 0), 0);
            break;
        case 2:
            ck_assert_int_eq(ht_obj_truncate(o, 4 * MIB), 0);
            ck_assert_int_eq(ht_obj_punch(o, SMALL, 2 * SMALL), 0);
            ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 4 * MIB - 2 * SMALL);
            ck_assert_int_eq(ht_obj_punch(o, 0, 4 * MIB), 0);
            break;
        case 3: { /* into a chunk that is preallocated: the whole one needs no more */
            struct ht_obj *src = written_object(SMALL, 0, p, MIB);
            ck_assert_int_eq(ht_obj_clone(src, 0, o, 0, MIB), MIB);
            ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 3 * MIB);
            delete (src);
            ck_assert_int_eq(ht_obj_truncate(o, 0), 0);
            break;
        }
        case 4: {
            ck_assert_int_eq(ht_scope_abort(s, 9), 0);
            ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 4 * MIB); /* nothing changed in it: it is not looked at */
            put_all(o, 5, p, 10);
            ck_assert_int_eq(ht_scope_abort(s, 9), 0);
            break;
        }
        default:
            break;
        }
        if (how < 5)
            ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 0);
        delete (o);
        struct ht_tx *tx;
        ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
        ht_scope_publish(s, 9, false, tx);
        ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
        ck_assert_int_eq(ht_store_commit(s), 0);
        ck_assert_uint_eq(stats().reserved_bytes, 0);
        ck_assert_uint_eq(stats().free_bytes, before.free_bytes);
        ck_assert_uint_eq(stats().log.reserved_bytes, before.log.reserved_bytes);
    }
}

TEST(preallocations_end_with_the_mount_and_seeks_do_not_see_them)
{
    fresh(32, false);
    struct ht_obj *o = object(SMALL, 0);
    ck_assert_int_eq(ht_obj_truncate(o, 4 * MIB), 0);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 4 * MIB), 0);
    ck_assert_int_eq(ht_obj_seek(o, 0, false), -ENXIO);
    ck_assert_int_eq(ht_obj_seek(o, 0, true), 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 4 * MIB);
    o = after(remount, o);
    ck_assert_uint_eq(ht_obj_size(o), 4 * MIB);
    expect_no_prealloc(o);
}

TEST(only_what_is_not_there_is_preallocated)
{
    fresh(32, false);
    uint8_t *p = pattern(MIB, 6);
    struct ht_obj *o = written_object(SMALL, 0, p, 3 * SMALL + 100);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 3 * SMALL + 100), 0); /* dirty: has its reservation */
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 3 * SMALL + 100), 0); /* stored */
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 0);
    ck_assert_int_eq(ht_obj_prealloc(o, 3 * SMALL, 8192), 0); /* the part of the chunk up to there */
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 8192);
    ck_assert_int_eq(ht_obj_prealloc(o, 6 * SMALL + 1, 1), 0);
    ck_assert_uint_eq(obj_stat(o).prealloc_bytes, 8192 + 4096);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 0), 0);
}

RUN_TESTS("allocation", .teardown = fixture_end, .timeout_s = 60)
