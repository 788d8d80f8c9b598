/* SPDX-License-Identifier: Apache-2.0 */
/* Aborts after logged steps that compute nothing again: no update has run since. */
#include "tests/unit/optim/step/fixture.h"

#include "optim/state/context.h"
#include "optim/state/redo.h"
#include "optim/state/root.h"

static uint64_t replays(void)
{
    lock(w.o);
    uint64_t n = ht_opt_root_find(w.o, ROOT)->redo.replays;
    unlock(w.o);
    return n;
}

static void send(unsigned step)
{
    for (unsigned i = 0; i < w.params; i++)
        fixture_send(&w, i, step, 0);
}

static void train(unsigned first, unsigned last)
{
    for (unsigned step = first; step <= last; step++) {
        send(step);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        ck_assert_uint_eq(fixture_stat(&w).durable_step, step);
    }
}

/* The open step goes, and steps go on as if it had not been. */
static void abort_and_check(uint64_t step, uint64_t hash, uint64_t computed)
{
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_uint_eq(st.step, step);
    ck_assert_uint_eq(st.durable_step, step);
    ck_assert_uint_eq(st.logged_steps, step - 1);
    ck_assert_uint_eq(fixture_hash(&w), hash);
    ck_assert_uint_eq(replays(), computed);
}

static const char *deferred[] = {
    "adamw lr=1e-2 max_grad_norm=0.5 redo=on durable_every=100",
    "adamw lr=1e-2 skip_nonfinite=1 redo=on durable_every=100",
    "adamw lr=1e-2 accumulate=2 max_grad_norm=0.5 redo=on durable_every=100",
};

/*
 * Before each boundary, and where no step is open. The last steps are as in a run without aborts, also after a crash.
 */
TEST_LOOP(gradients_that_wait_are_dropped, HT_ARRAY_SIZE(deferred))
{
    const char *config = deferred[_i];
    unsigned passes = strstr(config, "accumulate") ? 2 : 1;
    uint64_t hash[6];

    fixture_begin_mixed(&w, config, 2);
    for (unsigned step = 1; step <= 5; step++) {
        for (unsigned pass = 0; pass < passes; pass++)
            send(step);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        hash[step] = fixture_hash(&w);
    }
    fixture_close(&w);
    fixture_begin_mixed(&w, config, 2);
    for (unsigned step = 1; step <= 5; step++) {
        if (step > 1) { /* the first one makes state */
            send(step + 10);
            abort_and_check(step - 1, hash[step - 1], 0);
            abort_and_check(step - 1, hash[step - 1], 0);
        }
        for (unsigned pass = 0; pass < passes; pass++)
            send(step);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        ck_assert_uint_eq(fixture_hash(&w), hash[step]);
    }
    crash_and_mount();
    ck_assert_uint_eq(fixture_hash(&w), hash[5]);
}

/* An update that has run, a write into a parameter, and one into its state: each takes the long way back. */
TEST(what_has_changed_is_computed_again)
{
    float value = 3;

    fixture_begin_mixed(&w, "adamw lr=1e-2 redo=on durable_every=100", 2);
    train(1, 3);
    uint64_t hash = fixture_hash(&w);
    abort_and_check(3, hash, 0);
    fixture_send(&w, 1, 4, 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0); /* without that the abort may come before the update */
    abort_and_check(3, hash, 1);
    abort_and_check(3, hash, 1);
    struct ht_obj *obj = ht_obj_get(w.s, w.param[0].oid);
    ck_assert_int_eq(ht_obj_write(obj, 8, &value, sizeof(value)), sizeof(value));
    ht_obj_put(obj);
    abort_and_check(3, hash, 2);
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, w.param[0].oid, NULL), 0);
    abort_and_check(3, hash, 3);
    train(4, 4);
}

/* Files that are no parameters go back all the same. */
TEST(other_files_go_back)
{
    struct ht_obj_attr attr = {.chunk_bytes = HT_CHUNK_BYTES, .scope = ROOT};
    struct ht_obj *file;
    char text[6];

    fixture_begin_mixed(&w, deferred[0], 2);
    train(1, 2);
    attr.oid = ht_store_new_id(w.s);
    ck_assert_int_eq(ht_obj_create(w.s, &attr, &file), 0);
    ck_assert_int_eq(ht_obj_write(file, 0, "before", 6), 6);
    train(3, 3);
    uint64_t hash = fixture_hash(&w);
    ck_assert_int_eq(ht_obj_write(file, 0, "after.", 6), 6);
    send(4);
    abort_and_check(3, hash, 0);
    ck_assert_int_eq(ht_obj_read(file, 0, text, 6), 6);
    ck_assert_mem_eq(text, "before", 6);
    ht_obj_put(file);
}

RUN_TESTS("redo_abort", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
