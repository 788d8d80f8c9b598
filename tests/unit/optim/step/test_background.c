/* SPDX-License-Identifier: Apache-2.0 */
/* test_background.c - workers that do the store's background work, and updates that come meanwhile. */
#include "tests/unit/optim/step/fixture.h"

#include "optim/state/context.h"
#include "optim/state/root.h"
#include "tiering/api/background.h"

enum { WAIT_MS_MAX = 60000 };

/* A unit is one question of the engine that compresses: may it? */
static struct {
    _Atomic bool held;  /* the unit that asks waits */
    _Atomic bool again; /* and another one is due then */
    _Atomic unsigned inside, units;
    _Atomic unsigned beside_updates; /* units that began while ranges were queued */
    char thread[16];                 /* of the last unit */
} asked;

static bool may_compress(void *ctx, uint64_t oid)
{
    struct ht_optim *o = ctx;

    (void)oid;
    lock(o); /* before it shows itself: a test that sees it queues ranges */
    asked.beside_updates += !ht_list_empty(&o->ready);
    unlock(o);
    pthread_getname_np(pthread_self(), asked.thread, sizeof(asked.thread));
    ck_assert_uint_eq(asked.inside++, 0); /* one at a time */
    while (asked.held)
        usleep(1000);
    if (asked.again)
        ht_store_wake_compress(o->store);
    asked.inside--;
    asked.units++;
    return false;
}

static void open_with(unsigned threads)
{
    memset(&w, 0, sizeof(w));
    memset(&asked, 0, sizeof(asked));
    w.threads = threads;
    fixture_open(&w);
    ht_store_set_compress(w.s, may_compress, w.o);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 60000, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 60000, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

static void wait_for(const _Atomic unsigned *count, unsigned least)
{
    WAIT_FOR(*count >= least);
}

static void make_a_step(void)
{
    step_all(&w);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    for (unsigned i = 0; i < w.params; i++)
        check_param(&w, &w.param[i]);
}

/* A single worker could not go on with updates, so that the store's own thread does it. */
TEST_RANGE(idle_workers_do_background_work, 1, 4)
{
    open_with((unsigned)_i);
    for (unsigned n = 1; n <= 3; n++) {
        ht_store_wake_compress(w.s);
        wait_for(&asked.units, n);
        make_a_step();
    }
    ck_assert_str_eq(asked.thread, _i == 1 ? "ht-background" : "ht-update");
}

TEST(an_update_waits_for_no_unit)
{
    open_with(2);
    asked.held = true;
    ht_store_wake_compress(w.s);
    wait_for(&asked.inside, 1);
    for (unsigned n = 0; n < 3; n++)
        make_a_step();
    ck_assert_uint_eq(asked.units, 0); /* it runs all the time */
    asked.held = false;
    wait_for(&asked.units, 1);
    make_a_step();
}

static uint64_t pending(void)
{
    lock(w.o);
    uint64_t pending = ht_opt_root_find(w.o, ROOT)->pending;
    unlock(w.o);
    return pending;
}

static bool is_one_taken(void)
{
    lock(w.o);
    bool taken = ht_opt_root_find(w.o, ROOT)->running > 0;
    unlock(w.o);
    return taken;
}

/*
 * The other worker waits for a chunk. So the one that serves comes back after its unit, and updates all other ranges.
 * Units come between these only if the background has waited for long.
 */
TEST_LOOP(a_worker_that_serves_comes_back_for_updates, 2)
{
    bool waited_long = _i;

    open_with(2);
    struct ht_batch_pin pin = {
        .store = w.s, .count = 1, .chunk = {{.obj = w.param[0].obj, .index = 0, .mode = HT_BATCH_PIN_READ}}};
    lock(w.o);
    w.o->unit_period_ns = waited_long ? 0 : UINT64_MAX;
    unlock(w.o);
    asked.held = asked.again = true;
    ht_store_wake_compress(w.s);
    wait_for(&asked.inside, 1);
    ck_assert_int_eq(ht_batch_pin_begin(&pin), 0);
    ck_assert_int_eq(ht_batch_pin_wait(&pin), 0);
    step_param(&w, &w.param[0]);
    for (unsigned ms = 0; ms < WAIT_MS_MAX && !is_one_taken(); ms++)
        usleep(1000);
    ck_assert_uint_ge(pending(), 3);
    asked.held = false;
    for (unsigned ms = 0; ms < WAIT_MS_MAX && pending() > 1; ms++)
        usleep(1000);
    ck_assert_uint_eq(pending(), 1);
    ck_assert_int_eq(asked.beside_updates > 0, waited_long);
    ht_batch_pin_end(&pin, 0);
    ck_assert_int_eq(ht_batch_pin_finish(&pin), 0);
    step_param(&w, &w.param[1]);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    asked.again = false;
    for (unsigned i = 0; i < w.params; i++)
        check_param(&w, &w.param[i]);
}

static void *stop_main(void *arg)
{
    ht_optim_stop(w.o);
    *(_Atomic bool *)arg = true;
    return NULL;
}

/* Then the store has its own thread again. */
TEST(the_end_of_the_optimizer_waits_for_the_unit_that_runs)
{
    _Atomic bool stopped = false;
    pthread_t thread;

    open_with(2);
    asked.held = true;
    ht_store_wake_compress(w.s);
    wait_for(&asked.inside, 1);
    put_params(&w);
    ck_assert_int_eq(pthread_create(&thread, NULL, stop_main, &stopped), 0);
    usleep(20000);
    ck_assert(!stopped);
    asked.held = false;
    pthread_join(thread, NULL);
    ck_assert_str_eq(asked.thread, "ht-update");
    unsigned units = asked.units;
    ht_store_wake_compress(w.s);
    wait_for(&asked.units, units + 1);
    ck_assert_str_eq(asked.thread, "ht-background");
}

RUN_TESTS("pool of threads", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
