/* SPDX-License-Identifier: Apache-2.0 */
/* What the store writes for a model counts for its steps. */
#include "fixture.h"

#include "tiering/cache/arena.h"
#include "tiering/object/context.h"

/* The model is larger than memory, so most bytes stream. */
TEST(a_step_counts_what_was_written_since_the_one_before)
{
    const uint64_t state = 300000 * 12 + 700001 * 14;
    uint64_t sum = 0, all;

    w.threads = 2;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 300000, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, 700001, HT_CHUNK_BYTES);
    ck_assert_uint_eq(fixture_stat(&w).step_written_bytes, 0);
    for (int i = 0; i < 4; i++) {
        step_once();
        sum += fixture_stat(&w).step_written_bytes;
    }
    all = ht_scope_written_bytes(w.s, ROOT);
    ck_assert_uint_ge(fixture_stat(&w).step_written_bytes, state / 2);
    ck_assert_uint_le(fixture_stat(&w).step_written_bytes, state * 3 / 2);
    ck_assert_uint_le(sum, all); /* without the last commit's own */
    ck_assert_uint_ge(sum, all - state * 3 / 2);

    ck_assert_int_eq(ht_optim_root_end(w.o, ROOT, fixture_unmake, NULL), 0);
    struct ht_optim_config config = fixture_config(w.config);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(w.s, 4096, &tx), 0);
    ck_assert_int_eq(ht_optim_root_add(w.o, ROOT, &config, tx), 0);
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_int_eq(ht_obj_set_scope(w.param[i].obj, ROOT, tx), 0);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    ck_assert_uint_eq(fixture_stat(&w).step_written_bytes, 0);
    for (unsigned i = 0; i < w.params; i++)
        forget_state(&w.param[i]);
    step_once();
    ck_assert_uint_le(fixture_stat(&w).step_written_bytes, state * 3 / 2);
}

/* ------------------------------------------------------------- early writes */

enum { STATE = 12 * MIB, RECORDS = MIB };

/* Parameter and state of a model that memory holds: 12 MiB that each step changes. */
static uint64_t open_resident(const char *config)
{
    w.dram_bytes = 64ull * MIB;
    fixture_open_as(&w, config, 2);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, MIB, HT_CHUNK_BYTES);
    step_once();
    return ht_scope_written_bytes(w.s, ROOT);
}

static void wait_until_written(uint64_t bytes)
{
    WAIT_FOR(ht_scope_written_bytes(w.s, ROOT) >= bytes);
}

/* A trainer that computes for long ends no step: the devices need not wait for that. */
TEST(what_a_durable_step_leaves_is_written_before_it_ends_and_only_once)
{
    uint64_t before = open_resident("adamw lr=1e-2");

    for (uint64_t i = 1; i <= 3; i++, before = ht_scope_written_bytes(w.s, ROOT)) {
        step_all(&w);
        wait_until_written(before + STATE);
        ck_assert_uint_eq(fixture_stat(&w).step, i);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        ck_assert_uint_eq(fixture_stat(&w).durable_step, i + 1);
        ck_assert_uint_le(ht_scope_written_bytes(w.s, ROOT), before + STATE + RECORDS);
        check_all(&w);
    }
}

TEST(an_abort_takes_back_what_was_written_early)
{
    uint64_t before = open_resident("adamw lr=1e-2"), hash = fixture_hash(&w);
    uint8_t *g = random_gradient(&w, &w.param[0]);

    write_gradient(&w, &w.param[0], g);
    wait_until_written(before + STATE);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert(fixture_hash(&w) == hash);
    step_all(&w);
    commit_and_check();
}

/* Every third step is durable: what the two before it leave will change. */
TEST(what_the_next_step_changes_is_not_written)
{
    uint64_t before = open_resident("adamw lr=1e-2 durable_every=3");

    for (unsigned i = 0; i < 3; i++, before = ht_scope_written_bytes(w.s, ROOT)) {
        for (unsigned k = 0; k < 3; k++) {
            step_all(&w);
            ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
            usleep(20000); /* for writes that should not be */
        }
        ck_assert_uint_eq(fixture_stat(&w).durable_step, fixture_stat(&w).step);
        ck_assert_uint_ge(ht_scope_written_bytes(w.s, ROOT), before + STATE);
        ck_assert_uint_le(ht_scope_written_bytes(w.s, ROOT), before + STATE + RECORDS);
    }
    check_all(&w);
}

/* A program writes into a parameter between its update and the end of the step: both are there after the commit. */
TEST(a_change_after_an_early_write_is_not_lost)
{
    static const float mine[3] = {1, 2, 3};
    uint64_t before = open_resident("adamw lr=1e-2");

    step_all(&w);
    wait_until_written(before + STATE);
    memcpy(w.param[0].p + 8000, mine, sizeof(mine));
    ck_assert_int_eq(ht_obj_write(w.param[0].obj, 8000, mine, sizeof(mine)), sizeof(mine));
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    fixture_crash(&w);
    fixture_mount(&w);
    check_all(&w);
}

/* The publication writes what an early write could not, and only its own failure is one of the step. */
TEST(an_early_write_that_fails_is_no_failure_of_the_step)
{
    uint64_t before = open_resident("adamw lr=1e-2");

    ht_fault_arm(HT_FAULT_STORE_WRITE, 1, true);
    step_all(&w);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    bool rests = false;
    for (unsigned ms = 0; !rests && ms < 60000; ms++) {
        ht_store_lock(w.s);
        rests = !ht_arena_has_final(w.s->arena) && !w.s->flow.writing;
        ht_store_unlock(w.s);
        usleep(1000);
    }
    ck_assert(rests);
    ck_assert_uint_gt(ht_fault_passed(HT_FAULT_STORE_WRITE), 0);
    ht_fault_disarm_all();
    ck_assert_uint_lt(ht_scope_written_bytes(w.s, ROOT), before + STATE);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert(!fixture_stat(&w).error[0]);
    check_all(&w);
}

RUN_TESTS("written", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
