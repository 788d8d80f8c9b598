/* SPDX-License-Identifier: Apache-2.0 */
/* test_compact_owners.c - content of very many owners moves, with all of them or not at all. */

#include "tests/unit/tiering/engine/compact.h"
#include "tiering/data/chunk_io.h"
#include "tiering/engine/pass.h"

enum { OWNERS = 5000, OWNERS_LONG = 100000 };

/* With a log for so many owners. A tensor leaves little space, so that there is some to gain. */
static void fresh_for(unsigned owners)
{
    uint64_t log_mib = owners / 4096 + 1, mib = 32 + 2 * log_mib + log_mib * 4;

    fresh_with_log(mib, log_mib * MIB, false);
    (void)tensor_of((unsigned)(stats().free_bytes / MIB - 30));
}

static void expect_owners(struct ht_obj *o, unsigned n)
{
    uint64_t block = block_of(file[160], 0);

    for (uint64_t i = 0; i < n; i++)
        ck_assert_uint_eq(block_of(o, i), block);
    ht_obj_evict(o);
    for (uint64_t i = 0; i < n; i += 97)
        expect(o, i * SMALL, content[160], SMALL);
    expect(o, (n - 1) * (uint64_t)SMALL, content[160], SMALL);
    expect_all();
}

/* All in one transaction: a crash later they are still together. */
TEST(content_of_very_many_owners_moves)
{
    unsigned n = getenv("HITRAIN_LONG") ? OWNERS_LONG : OWNERS;

    fresh_for(n);
    sparse(16);
    struct ht_obj *o = with_owners_of(file[160], SMALL, n);
    uint64_t oid = ht_obj_id(o), block = block_of(o, 0), free_bytes = stats().free_bytes;
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_ge(figures().emptied, 12);
    ck_assert_uint_ne(block_of(o, 0), block);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    ht_store_verify(s, true);
    expect_owners(o, n);
    reopen();
    o = get_object(oid);
    expect_owners(o, n);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
}

/* No thread that updates may need makes that step. */
TEST(very_many_owners_need_a_step_that_may_be_long)
{
    bool is_long = false;
    unsigned waits = 0, n = HT_OWNERS_LONG + 1;

    fresh_for(n);
    sparse(16);
    struct ht_obj *o = with_owners_of(file[160], SMALL, n);
    uint64_t block = block_of(o, 0);
    while (!figures().passes) {
        struct ht_budget budget = {.most_bytes = MIB, .until_ns = UINT64_MAX, .may_be_long = is_long};
        bool stays = block_of(o, 0) == block;
        if (ht_compact_engine.step(s, &budget) == HT_STEP_IDLE)
            usleep(1000);
        if (stays && !is_long)
            ck_assert_uint_eq(block_of(o, 0), block);
        ck_assert(!is_long || !budget.next_is_long);
        is_long = budget.next_is_long;
        waits += is_long;
    }
    ck_assert_uint_eq(waits, 2); /* to put the notes in order, and to move the owners */
    ck_assert_uint_ne(block_of(o, 0), block);
    expect_owners(o, n);
}

/* A thread holds the first, a middle or the last owner: all stay, and the others are not held afterwards. */
TEST_LOOP(an_owner_that_is_held_keeps_all_where_they_are, 3)
{
    const unsigned n = OWNERS, held[] = {0, n / 2, n - 1};

    fresh_for(n);
    sparse(16);
    struct ht_obj *o = with_owners_of(file[160], SMALL, n);
    struct ht_move_owner *owner = test_alloc((n + 1) * sizeof(*owner));
    for (unsigned i = 0; i < n; i++)
        owner[i] = (struct ht_move_owner){o->oid, i};
    owner[n] = (struct ht_move_owner){file[160]->oid, 0};
    struct ht_move m = {.obj = o, .owner = owner, .owners = n + 1};
    uint64_t lsn, free_bytes = stats().free_bytes, block = block_of(o, 0);
    ht_store_lock(s);
    ck_assert_int_eq(ht_ref_copy(&m.was, &ht_chunk_find(o, 0)->pub), 0);
    ck_assert(ht_move_may(s, &m));
    struct ht_chunk *c = ht_chunk_find(o, held[_i]);
    ht_chunk_lock_shared(s, c);
    ck_assert(!ht_move_may(s, &m));
    ht_store_unlock(s);
    uint8_t *bytes = test_keep(aligned_alloc(HT_BLOCK_BYTES, SMALL));
    memcpy(bytes, content[160], SMALL);
    for (int i = 0, rc; i < 2; i++) {
        ck_assert_int_eq(ht_move_write_copies(s, &m, &bytes, 1, ht_store_ring(s), &rc), 0);
        ck_assert_int_eq(ht_move_publish(s, &m, 1, &lsn), 0);
        ck_assert_int_eq(m.moved, i);
        ht_store_lock(s);
        for (uint64_t k = 0; k < n; k++)
            ck_assert(!ht_chunk_find(o, k)->exclusive);
        if (!i)
            ht_chunk_unlock_shared(o, c, held[_i]);
        ht_store_unlock(s);
        ck_assert_int_eq(ht_store_commit(s), 0);
        ck_assert_uint_eq(stats().free_bytes, free_bytes);
        ck_assert_int_eq(block_of(o, 0) == block, !i);
        ht_store_verify(s, true);
        expect_owners(o, n);
    }
    ht_ref_forget(&m.was);
}

/* As many owners as bytes that move may have, and one more. */
TEST_LOOP(content_of_too_many_owners_stays, 2)
{
    fixture_owners_max = 64;
    fresh(32, false);
    sparse(16);
    struct ht_obj *o = with_owners_of(file[160], SMALL, 63 + (unsigned)_i);
    uint64_t block = block_of(o, 0);
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_ge(figures().emptied, 12);
    ck_assert_int_eq(block_of(o, 0) == block, _i);
    expect_owners(o, 63);
    done();
    fixture_owners_max = 0;
}

/* More owners in all than the notes of a batch may have: the other groups come next. */
TEST_LOOP(groups_with_many_owners_need_several_batches, 2)
{
    enum { EACH = 30 };
    struct ht_obj *twin[FILES] = {NULL};

    fixture_owners_max = 2 * EACH;
    fresh(32, false);
    sparse(16);
    for (unsigned i = 0; i < FILES; i++) {
        twin[i] = file[i] ? object(SMALL, 0) : NULL;
        for (uint64_t k = 0; twin[i] && k < EACH; k++)
            ck_assert_int_eq(ht_obj_clone(file[i], 0, twin[i], k * SMALL, SMALL), SMALL);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    uint64_t memory = engine_memory_bytes();
    if (_i)
        ck_assert_int_eq(background_compact(s), 0);
    for (unsigned ms = 0; !figures().passes; ms++) { /* the engine rests between two batches */
        struct ht_budget budget = {.most_bytes = UINT64_MAX, .until_ns = UINT64_MAX};
        ck_assert_uint_lt(ms, 60000);
        if (ht_compact_engine.step(s, &budget) == HT_STEP_IDLE)
            usleep(1000);
    }
    ck_assert_uint_ge(figures().emptied, 12);
    ck_assert_uint_eq(figures().memory_bytes, memory);
    ht_store_verify(s, true);
    for (unsigned i = 0; i < FILES; i++)
        for (uint64_t k = 0; twin[i] && k < EACH; k++)
            ck_assert_uint_eq(block_of(twin[i], k), block_of(file[i], 0));
    expect_all();
    done();
    fixture_owners_max = 0;
}

static uint64_t group_of(struct ht_obj *o)
{
    return block_of(o, 0) / HT_GROUP_BLOCKS;
}

/* A unit copies one content of a group of several, and the log has no room for its owners: it is not copied again. */
TEST(content_whose_owners_have_no_room_in_the_log_stays)
{
    enum { KEEP = 8, STEPS_MAX = 2000 };
    unsigned i = 8 * KEEP, n = HT_OWNERS_LONG + 50, steps = 0;

    fresh_with_log(64, HT_LOG_BYTES_MIN, true);
    (void)tensor_of((unsigned)(stats().free_bytes / MIB - 30));
    sparse(KEEP);
    while (group_of(file[i]) != group_of(file[i + KEEP]) || group_of(file[i - KEEP]) == group_of(file[i])) {
        i += KEEP; /* the first one of its group, in which nothing else lies */
        ck_assert_uint_lt(i + KEEP, FILES);
    }
    ck_assert_uint_gt(group_of(file[i]), 0);
    uint64_t block = block_of(file[i], 0);
    struct ht_obj *o = with_owners_of(file[i], SMALL, n);
    uint64_t aside = crowd_log(n * (size_t)ht_move_record_bytes(&(struct ht_ref){0}));
    for (; !figures().passes; steps++) {
        struct ht_budget budget = {.most_bytes = 1, .until_ns = UINT64_MAX, .may_be_long = true};
        ck_assert_uint_lt(steps, STEPS_MAX);
        if (ht_compact_engine.step(s, &budget) == HT_STEP_IDLE)
            usleep(1000);
    }
    ck_assert_uint_ge(figures().emptied, 4); /* threads have placed the files in any order */
    ck_assert_uint_le(figures().moved_bytes, 2 * FILES / KEEP * SMALL);
    ck_assert_uint_eq(block_of(file[i], 0), block);
    ht_store_log_unreserve(s, aside);
    ht_store_verify(s, true);
    for (uint64_t k = 0; k < n; k++)
        ck_assert_uint_eq(block_of(o, k), block);
    ht_obj_evict(o);
    expect(o, (n - 1) * (uint64_t)SMALL, content[i], SMALL);
    expect_all();
}

RUN_TESTS("owners", .timeout_s = 300, .teardown = fixture_end)
