/* SPDX-License-Identifier: Apache-2.0 */
/* dedup.h - a pass of deduplication over the fixture's store, and what tests of it expect of content and space. */
#pragma once

#include "tiering/object/chunk.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/engine/engine_priv.h"

#include "tests/unit/tiering/codec/content.h"
#include "tests/unit/tiering/store/fixture.h"

struct dedup_figures {
    uint64_t passes, compared_bytes, shared_bytes, hole_bytes, different, skipped, left_bytes, memory_bytes;
};

static inline struct dedup_figures figures(void)
{
    struct ht_background_stat st = engine("dedup");

    return (struct dedup_figures){
        .passes = st.value[HT_DEDUP_PASSES],
        .compared_bytes = st.value[HT_DEDUP_COMPARED],
        .shared_bytes = st.value[HT_DEDUP_SHARED],
        .hole_bytes = st.value[HT_DEDUP_HOLES],
        .different = st.value[HT_DEDUP_DIFFERENT],
        .skipped = st.value[HT_DEDUP_SKIPPED],
        .left_bytes = st.value[HT_DEDUP_LEFT],
        .memory_bytes = engine_memory_bytes(),
    };
}

/* One pass, durable; what it did. */
static inline struct dedup_figures dedup(void)
{
    struct dedup_figures was = figures(), now;

    ck_assert_int_eq(background_dedup(s), 0);
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

/* As if its bytes had been read now. */
static inline struct ht_sharer_side name(struct ht_obj *o)
{
    ht_store_lock(s);
    struct ht_sharer_side c = {.oid = o->oid, .version = o->version, .place = ht_ref_place(&ht_chunk_find(o, 0)->pub)};
    ht_store_unlock(s);
    return c;
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
