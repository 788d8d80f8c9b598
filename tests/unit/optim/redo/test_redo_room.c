/* SPDX-License-Identifier: Apache-2.0 */
/* What a logged step needs at the next mount is nobody else's until the full step. */

#include "tests/unit/optim/step/fixture.h"

#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/redo.h"
#include "optim/state/root.h"
#include "tiering/base/event.h"

static uint64_t hash;
static atomic_uint told;
static const char logs[] = "adamw lr=1e-2 redo=on durable_every=100";
static const char sums[] = "adamw lr=1e-2 redo=on durable_every=100 accumulate=2";

static void note_event(void *ctx, const struct ht_event *e)
{
    (void)ctx;
    told += e->code == HT_EVENT_NOT_RESERVED && strstr(e->text, "delete other files");
}

static void send_all(unsigned step, unsigned pass)
{
    for (unsigned i = 0; i < w.params; i++)
        fixture_send(&w, i, step, pass);
}

static void begin(const char *config)
{
    memset(&w, 0, sizeof(w));
    told = 0;
    ht_event_set_sink(note_event, NULL);
    fixture_begin_mixed(&w, config, 2);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

/* Two steps, of which the second is logged. */
static void two_steps(unsigned passes)
{
    for (unsigned step = 10; step < 12; step++) {
        for (unsigned pass = 0; pass < passes; pass++)
            send_all(step, pass);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    }
    ck_assert_uint_ge(fixture_stat(&w).logged_steps, 1);
    hash = fixture_hash(&w);
}

/* To the last block, with what the store gives up for that. The number of its content. */
static uint64_t fill(void)
{
    struct ht_obj *obj = fixture_fill(&w, 0);
    uint8_t bytes[4096] = {1};

    for (uint64_t off = UINT64_C(1) << 32; !ht_store_make_space(w.s, true);)
        while (ht_obj_write(obj, off, bytes, sizeof(bytes)) == (ssize_t)sizeof(bytes))
            off += sizeof(bytes);
    uint64_t oid = ht_obj_id(obj);
    ck_assert_int_eq(ht_obj_sync(obj), 0);
    ht_obj_put(obj);
    ck_assert_uint_eq(ht_store_available(w.s), 0);
    return oid;
}

static void forget(uint64_t oid)
{
    struct ht_obj *obj = ht_obj_get(w.s, oid);
    struct ht_tx *tx;
    uint64_t lsn;

    ck_assert_int_eq(ht_tx_begin(w.s, 0, &tx), 0);
    ht_obj_delete(obj, tx);
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    ht_obj_put(obj);
    ck_assert_int_eq(ht_store_sync(w.s, lsn), 0);
}

static void check(uint64_t step)
{
    ht_store_verify(w.s, false);
    ck_assert_str_eq(fixture_stat(&w).error, "");
    ck_assert_uint_eq(fixture_stat(&w).step, step);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, step);
    ck_assert(fixture_hash(&w) == hash);
}

/* The test does not wait for the replay. */
static void crash_and_go_on(void)
{
    fixture_crash(&w);
    fixture_mount_and_go_on(&w);
}

static void wait_for_replay(void)
{
    while (fixture_stat(&w).replay_steps_left && !told)
        usleep(1000);
    ck_assert_uint_eq(told, 0);
    ht_optim_recovered(w.o);
}

TEST(a_full_store_computes_logged_steps_again)
{
    begin(logs);
    two_steps(1);
    uint64_t step = fixture_stat(&w).step;
    fill();
    for (unsigned again = 0; again < 3; again++) {
        crash_and_go_on();
        wait_for_replay();
        check(step);
        fill();
    }
}

/* Sums are logged in f32. Later steps need less, but the sum is still to be computed again. */
TEST(the_largest_gradient_has_its_room)
{
    struct ht_optim_config config = fixture_config(logs);

    begin(sums);
    two_steps(2);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &config), 0);
    w.config = logs;
    send_all(20, 0);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    uint64_t step = fixture_stat(&w).step;
    ck_assert_uint_ge(fixture_stat(&w).logged_steps, 2);
    hash = fixture_hash(&w);
    /* Nothing of what is set aside for steps to come is there for a replay. */
    lock(w.o);
    ck_assert(ht_opt_redo_yield_aside(w.o));
    unlock(w.o);
    fill();
    crash_and_go_on();
    wait_for_replay();
    check(step);
}

/* The full step ends what logged steps needed. */
TEST(a_full_step_gives_the_room_back)
{
    struct ht_optim_config config = fixture_config(logs);
    struct ht_optim_steer full = {.full = true};

    begin(sums);
    two_steps(2);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &config), 0);
    send_all(20, 0);
    ck_assert_int_eq(ht_optim_commit_by(w.o, ROOT, &full), 0);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 0);
    lock(w.o);
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_uint_eq(ht_opt_param_find(w.o, w.param[i].oid)->redo_g_bytes, 0);
    unlock(w.o);
}

/* As a program does that does not know this rule. */
static void lose_reservations(void)
{
    lock(w.o);
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_int_eq(ht_obj_rewrite_reserve(ht_opt_param_find(w.o, w.param[i].oid)->grad, 0), 0);
    ck_assert(ht_opt_redo_yield_aside(w.o));
    unlock(w.o);
}

static void wait_until_told(void)
{
    WAIT_FOR(told == 1);
    ck_assert_uint_gt(fixture_stat(&w).replay_steps_left, 0);
    ck_assert_ptr_nonnull(strstr(fixture_stat(&w).error, "delete other files"));
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[0].oid, 0, 4, NULL), -EAGAIN);
}

TEST(a_replay_without_room_goes_on_when_files_are_deleted)
{
    begin(logs);
    two_steps(1);
    uint64_t step = fixture_stat(&w).step;
    lose_reservations();
    uint64_t oid = fill();
    crash_and_go_on();
    wait_until_told();
    /* A client that claims the model does not wait for space, and learns why. */
    struct ht_optim_claim want = {.name = "trainer"};
    char why[HT_OPTIM_ERROR_MAX];
    uint64_t refusals = fixture_stat(&w).refusals;
    ck_assert_int_eq(ht_optim_claim(w.o, ROOT, &want, why), -ENOSPC);
    ck_assert_uint_gt(fixture_stat(&w).refusals, refusals);
    forget(oid);
    ht_optim_recovered(w.o);
    check(step);
}

/* An unmount does not wait for room, and drops nothing that is durable. */
TEST(a_mount_ends_while_a_replay_waits_for_room)
{
    begin(logs);
    two_steps(1);
    uint64_t step = fixture_stat(&w).step;
    lose_reservations();
    uint64_t oid = fill();
    crash_and_go_on();
    wait_until_told();
    ck_assert_int_eq(ht_optim_finish(w.o), 0);
    fixture_unmount(&w);
    fixture_mount_and_go_on(&w);
    forget(oid);
    ht_optim_recovered(w.o);
    check(step);
}

RUN_TESTS("room for logged steps", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
