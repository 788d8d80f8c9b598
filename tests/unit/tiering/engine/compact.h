/* SPDX-License-Identifier: Apache-2.0 */
/* compact.h - a store of nearly empty groups of blocks, and what tests of compaction look at. */
#pragma once

#include "tiering/object/chunk.h"
#include "tiering/object/ref.h"

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/engine/engine_priv.h"

enum { SMALL = HT_SMALL_CHUNK_BYTES, SCOPE = 9, FILES = 320 };

static struct ht_obj *file[FILES];
static uint8_t *content[FILES];

struct compact_figures {
    uint64_t passes, moved_bytes, emptied, skipped, memory_bytes;
};

static inline struct compact_figures figures(void)
{
    struct ht_background_stat st = engine("compact");

    return (struct compact_figures){
        .passes = st.value[HT_COMPACT_PASSES],
        .moved_bytes = st.value[HT_COMPACT_MOVED],
        .emptied = st.value[HT_COMPACT_EMPTIED],
        .skipped = st.value[HT_COMPACT_SKIPPED],
        .memory_bytes = engine_memory_bytes(),
    };
}

/* Many files of a chunk; then only each keep-th is left, so groups are nearly empty. */
static inline void sparse(unsigned keep)
{
    for (unsigned i = 0; i < FILES; i++) {
        content[i] = noise(SMALL, i);
        file[i] = object(SMALL, 0);
        put_all(file[i], 0, content[i], SMALL);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    for (unsigned i = 0; i < FILES; i++)
        if (i % keep) {
            delete (file[i]);
            file[i] = NULL;
        }
    ck_assert_int_eq(ht_store_commit(s), 0);
}

static inline void expect_all(void)
{
    for (unsigned i = 0; i < FILES; i++)
        if (file[i]) {
            ht_obj_evict(file[i]);
            expect(file[i], 0, content[i], SMALL);
        }
}

static inline void reopen(void)
{
    uint64_t oid[FILES] = {0};

    for (unsigned i = 0; i < FILES; i++)
        if (file[i])
            oid[i] = ht_obj_id(file[i]);
    remount();
    for (unsigned i = 0; i < FILES; i++)
        if (oid[i])
            file[i] = get_object(oid[i]);
}

static inline uint64_t block_of(struct ht_obj *o, uint64_t index)
{
    ht_store_lock(s);
    struct ht_chunk *c = ht_chunk_find(o, index);
    const struct ht_ref *ref = c ? ht_chunk_ref(c) : NULL;
    uint64_t block = ref && ht_ref_holds(ref) ? ht_ref_extent(ref, 0).block : 0;
    ht_store_unlock(s);
    return block;
}

/* One step: is it idle until it is woken? */
static inline bool sleeps(void)
{
    struct ht_budget budget = {.most_bytes = UINT64_MAX, .until_ns = UINT64_MAX};

    return ht_compact_engine.step(s, &budget) == HT_STEP_IDLE && budget.at_ns == 0;
}

static inline void finish_pass(void)
{
    uint64_t passes = figures().passes;

    for (unsigned i = 0; i < 1000 && figures().passes == passes; i++)
        ck_assert(!sleeps());
    ck_assert_uint_eq(figures().passes, passes + 1);
}
