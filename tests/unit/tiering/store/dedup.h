/* SPDX-License-Identifier: Apache-2.0 */
/* dedup.h - a pass of deduplication over the fixture's store, and what tests of it expect of content and space. */
#ifndef HITRAIN_TESTS_UNIT_TIERING_STORE_DEDUP_H
#define HITRAIN_TESTS_UNIT_TIERING_STORE_DEDUP_H

#include "tests/unit/tiering/codec/content.h"
#include "tests/unit/tiering/store/fixture.h"
#include "tiering/api/dedup.h"

static inline struct ht_dedup_stats figures(void)
{
    struct ht_dedup_stats st;

    ht_store_dedup_stats(s, &st);
    return st;
}

/* One pass, durable; what it did. */
static inline struct ht_dedup_stats dedup(void)
{
    struct ht_dedup_stats was = figures(), now;

    ck_assert_int_eq(ht_store_dedup(s), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    now = figures();
    ck_assert_uint_eq(now.left_bytes, 0);
    ck_assert_uint_eq(now.memory_bytes, was.memory_bytes);
    now.compared_bytes -= was.compared_bytes;
    now.shared_bytes -= was.shared_bytes;
    now.hole_bytes -= was.hole_bytes;
    now.different -= was.different;
    now.skipped -= was.skipped;
    ht_store_verify(s, true);
    return now;
}

static inline void expect_stored(struct ht_obj *o, const uint8_t *p, size_t n)
{
    ht_obj_evict(o);
    expect(o, 0, p, n);
}

static inline uint64_t free_bytes(void)
{
    return stats().free_bytes;
}

/* Puts other bytes wherever there is room, so that they overwrite space that is free by mistake. */
static inline struct ht_obj *use_all_space(void)
{
    struct ht_obj *o = object(HT_SMALL_CHUNK_BYTES, 0);
    uint8_t *junk = malloc(HT_SMALL_CHUNK_BYTES);
    uint64_t end = 0;

    content_random(junk, HT_SMALL_CHUNK_BYTES, 99);
    while (ht_obj_write(o, end, junk, HT_SMALL_CHUNK_BYTES) > 0) {
        end += HT_SMALL_CHUNK_BYTES;
        ++*(uint64_t *)junk;
        if (end % (32 * HT_SMALL_CHUNK_BYTES) == 0)
            ck_assert_int_eq(ht_obj_writeback(o), 0);
    }
    ck_assert_int_eq(ht_obj_sync(o), 0);
    free(junk);
    return o;
}

#endif
