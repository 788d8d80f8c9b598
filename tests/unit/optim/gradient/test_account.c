/* SPDX-License-Identifier: Apache-2.0 */
/* An opener that keeps an account discards its own bytes, and never those that another opener wrote later. */
#include "optim/gradient/gradient.h"
#include "optim/state/context.h"
#include "optim/state/param.h"
#include "tests/unit/optim/step/fixture.h"
#include <hitrain/limits.h>

enum { ELEMENTS = 57344, BYTES = ELEMENTS * 4 };

static struct test_param *p;
static struct ht_grad *g, *own; /* own keeps an account */
static struct ht_quota_user user = {.kind = HT_QUOTA_ROOT};
static uint8_t *bytes;

static void begin(const char *config)
{
    w.config = config;
    w.threads = 2;
    fixture_open(&w);
    p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, ELEMENTS, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    g = open_grad(&w, p);
    own = open_grad(&w, p);
    ht_grad_keep_account(own, &user);
    bytes = random_gradient(&w, p);
}

/* Its close after the bytes of the next gradient have been written, but not flushed. */
static void close_own(void)
{
    ht_grad_discard(own);
    ht_grad_release(own);
}

static void done(void)
{
    ht_grad_release(g);
    free(bytes);
    fixture_close(&w);
}

/* Writes all but the ends through own, and the ends through g, whose flush takes both. */
static void write_around_and_flush(void)
{
    write_all(own, 4, bytes, BYTES - 8);
    write_all(g, 0, bytes, 4);
    write_all(g, BYTES - 4, bytes, 4);
    ck_assert_int_eq(ht_grad_flush(g), 0);
}

static void applied_all(unsigned steps)
{
    struct ht_optim_config c = fixture_config(w.config);

    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, (uint64_t)steps * ELEMENTS);
    for (unsigned i = 0; i < steps; i++)
        model_update(p, &c, bytes, 0, p->n, true);
    check_all(&w);
}

TEST(ends_with_the_step_that_took_its_bytes)
{
    begin("adamw lr=1e-2");
    write_around_and_flush();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    write_all(g, 0, bytes, BYTES);
    close_own();
    applied_all(2);
}

/* Every range comes free for the second gradient of the same step. */
TEST(ends_with_the_pass_that_took_its_bytes)
{
    begin("sgd lr=1e-2 accumulate=2");
    write_around_and_flush();
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    write_all(g, 0, bytes, BYTES);
    close_own();
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, ELEMENTS);
}

/* A partial boundary: of one range some bytes are applied, and others stay the opener's own. */
TEST(keeps_what_no_flush_took)
{
    begin("adamw lr=1e-2 partial=1");
    write_all(own, 4, bytes + 4, 4);
    write_all(own, 100, bytes + 100, 4);
    write_all(g, 0, bytes, 4);
    write_all(g, 8, bytes + 8, 4);
    ck_assert_int_eq(ht_grad_flush(g), 0); /* [0, 12) */
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, 3);
    write_all(g, 0, bytes, 100);
    close_own(); /* its own are [100, 104) alone */
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, 3 + 25);
    /* They are gone, too: the window of this flush spans them. */
    write_all(g, 96, bytes, 4);
    write_all(g, 104, bytes, 4);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, 3 + 25 + 2);
}

/* Two accounts of one range, closed in either order, also after a drop has ended both. */
TEST_LOOP(of_several_openers, 4)
{
    begin("adamw lr=1e-2");
    struct ht_grad *other = open_grad(&w, p);
    ht_grad_keep_account(other, &user);
    write_all(own, 0, bytes, 8);
    write_all(other, 8, bytes, 8);
    if (_i & 1)
        ck_assert_int_eq(ht_optim_drop(w.o, ROOT, p->oid, NULL), 0);
    write_all(other, 16, bytes, 8);
    if (_i & 2)
        close_own();
    ht_grad_discard(other);
    ht_grad_release(other);
    if (!(_i & 2))
        close_own();
    write_all(g, 0, bytes, 4);
    write_all(g, BYTES - 4, bytes, 4);
    ck_assert_int_eq(ht_grad_flush(g), 0); /* nothing lies between */
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, p->oid, NULL), 0);
    write_all(g, 0, bytes, BYTES);
    applied_all(1);
}

static uint64_t taken_by_others;

static uint64_t account_bytes(void)
{
    lock(w.o);
    uint64_t n = user.taken;
    ck_assert_uint_eq(ht_quota_taken(&w.o->accounts), n + taken_by_others);
    unlock(w.o);
    return n;
}

/* As if others took all memory that accounts may have. */
static void take_memory(bool take)
{
    lock(w.o);
    taken_by_others = take ? HT_ACCOUNTS_BYTES_MAX : 0;
    w.o->accounts.taken[HT_QUOTA_OTHERS] = taken_by_others;
    unlock(w.o);
}

TEST(of_all_openers_have_bounded_memory)
{
    begin("adamw lr=1e-2");
    ck_assert_uint_eq(account_bytes(), 0);
    write_all(own, 0, bytes, 8);
    uint64_t one = account_bytes();
    ck_assert_uint_gt(one, 0);
    take_memory(true);
    write_all(own, 8, bytes + 8, 8); /* still one piece */
    ck_assert_int_eq(ht_grad_write(own, 100, bytes + 100, 4), -EDQUOT);
    ck_assert_ptr_nonnull(strstr(fixture_stat(&w).error, "lies in too many pieces; apply some of it"));
    ck_assert_int_eq(ht_grad_write(own, BYTES - 4, bytes, 4), -EDQUOT); /* in a range of its own */
    write_all(g, 100, bytes + 100, 4);                                  /* without an account */
    take_memory(false);
    ck_assert_uint_eq(account_bytes(), one);
    for (unsigned i = 0; i < 9; i++)
        write_all(own, 200 + 8 * i, bytes, 4);
    ck_assert_uint_gt(account_bytes(), one);
    ck_assert_int_eq(ht_grad_flush(own), 0);
    ck_assert_uint_eq(account_bytes(), 0);
    write_all(own, BYTES - 4, bytes, 4);
    ck_assert_uint_eq(account_bytes(), one);
    close_own();
    ck_assert_uint_eq(account_bytes(), 0);
}

TEST(has_no_bytes_of_a_write_that_failed)
{
    begin("adamw lr=1e-2 partial=1");
    write_all(own, 0, bytes, 8);
    take_memory(true);
    ck_assert_int_eq(ht_grad_write(own, 4, bytes + 4, BYTES - 4), -EDQUOT); /* in its second range */
    take_memory(false);
    write_all(g, 8, bytes + 8, 92);
    close_own(); /* its own are [0, 4) alone */
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, 23);
}

RUN_TESTS("account", .teardown = done, .timeout_s = 300, .memory = memory_keep)
