/* SPDX-License-Identifier: Apache-2.0 */
/* Steps that a plan knows: what stays of parameters and state follows it. */
#include "tests/unit/optim/step/fixture.h"

#include "tiering/api/stats.h"

enum { COUNT = 8, PARAM = 2 * MIB, DRAM = 24 * MIB, CONTENT = 3 * COUNT * PARAM, PIECE = 1 << 17, SECONDS_MAX = 90 };

static uint8_t *gradient;
static uint64_t began_ns;

/* Plans are made beside steps, so on a busy machine some steps have none. */
static bool in_time(void)
{
    return ht_now_ns() - began_ns < SECONDS_MAX * UINT64_C(1000000000);
}

static void begin(const char *config)
{
    w.device_bytes = 384ull * MIB;
    w.dram_bytes = DRAM;
    fixture_open_as(&w, config, 2);
    for (unsigned i = 0; i < COUNT; i++)
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, PARAM / 4, HT_CHUNK_BYTES);
    gradient = random_gradient(&w, &w.param[0]);
    began_ns = ht_now_ns();
}

static void done(void)
{
    free(gradient);
    ht_store_verify(w.s, false);
    fixture_close(&w);
}

/* A forward pass reads all parameters; a backward pass writes gradients, the last layer's first. Returns MiB read. */
static unsigned training_step(void)
{
    static uint8_t piece[PIECE];
    uint64_t before = store_stats().device_read_bytes;

    for (unsigned i = 0; i < COUNT; i++)
        for (unsigned at = 0; at < PARAM; at += PIECE)
            ck_assert_int_eq(ht_obj_read(w.param[i].obj, at, piece, PIECE), PIECE);
    for (unsigned i = COUNT; i-- > 0;)
        write_gradient(&w, &w.param[i], gradient);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    return (unsigned)((store_stats().device_read_bytes - before) / MIB);
}

static struct ht_plan_stats plan_stats(void)
{
    struct ht_plan_stats st;

    ht_store_plan_stats(w.s, &st);
    return st;
}

/* The fewest MiB that a step read after the plan was made. */
static unsigned steps_with_plan(unsigned enough)
{
    unsigned least = UINT32_MAX;

    while (in_time() && least > enough) {
        unsigned mib = training_step();
        if (plan_stats().active && plan_stats().figures.steps >= 1)
            least = mib < least ? mib : least;
    }
    return least;
}

static bool comes_plan(void)
{
    bool active;

    while (!(active = plan_stats().active) && in_time())
        training_step();
    return active;
}

/*
 * Each step moves all of the state once and reads the parameters twice. Without a plan the protected set keeps the
 * content that came first, and most parameters are read twice; with a plan parameters stay.
 */
TEST(a_step_reads_what_has_no_room_in_the_plan)
{
    enum { ENOUGH = (CONTENT - DRAM * 3 / 4) / MIB };

    begin("adamw lr=1e-2");
    training_step();
    ck_assert_uint_gt(training_step(), ENOUGH + 2);
    ck_assert_uint_le(steps_with_plan(ENOUGH), ENOUGH);
}

/*
 * The plan is of steps in which all gradients wait. It ends with the first in which they do not, and another follows.
 */
TEST(a_plan_of_steps_with_clipping_ends_with_them)
{
    struct ht_optim_config c = fixture_config("adamw lr=1e-2");

    begin("adamw lr=1e-2 max_grad_norm=1");
    ck_assert(comes_plan());
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
    training_step();
    ht_store_plan(w.s);
    ck_assert(!plan_stats().active);
    ck_assert(comes_plan());
}

RUN_TESTS("planned steps", .teardown = done, .timeout_s = 300, .memory = memory_keep)
