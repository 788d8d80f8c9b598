/* SPDX-License-Identifier: Apache-2.0 */
/* test_scheduler.c - lanes with rows that do nothing but count: turns, budgets, pace, pauses, wakes and ends. */
#include <sched.h>

#include "tests/support/suite.h"
#include "tests/support/wrap.h"
#include "tiering/engine/scheduler.h"

enum { MIB = 1 << 20, WAIT_MS_MAX = 60000 };
#define MS UINT64_C(1000000)

struct fake {
    struct ht_row row;
    _Atomic enum ht_step says;
    _Atomic uint64_t bytes;    /* moved by each step; 0: its budget */
    _Atomic uint64_t after_ns; /* idle: due again after so long */
    _Atomic uint64_t steps, rests, budget, entered_ns;
    _Atomic uint64_t time_ns;   /* that the budget leaves, or UINT64_MAX */
    _Atomic bool held, inside;  /* a step waits while it is held, as on a device that is silent */
    _Atomic bool is_long;       /* what comes next takes long */
    _Atomic uint64_t longs;     /* steps that could be long */
    _Atomic uint64_t at_ns[64]; /* of the first steps */
};

static struct ht_lane lane;
static bool made;
static struct fake a, b;
static _Atomic uint64_t foreground; /* bytes that others moved */
static _Atomic bool busy;           /* others move some between any two looks */

static enum ht_step fake_step(void *ctx, struct ht_budget *budget)
{
    struct fake *f = ctx;
    uint64_t n = f->steps, begin_ns = ht_now_ns();

    if (n < HT_ARRAY_SIZE(f->at_ns))
        f->at_ns[n] = begin_ns;
    f->budget = budget->most_bytes;
    f->time_ns = budget->until_ns == UINT64_MAX ? UINT64_MAX : budget->until_ns - begin_ns;
    budget->next_is_long = f->is_long && !budget->may_be_long;
    f->longs += budget->may_be_long;
    f->steps++; /* whoever sees the count sees the figures of that step */
    f->inside = true;
    while (f->held && !budget->next_is_long)
        usleep(1000);
    budget->bytes = f->bytes ? f->bytes : budget->most_bytes;
    budget->at_ns = f->after_ns ? ht_now_ns() + f->after_ns : 0;
    f->inside = false;
    return f->says;
}

/* Its pause has begun. */
static void fake_rest(void *ctx)
{
    struct fake *f = ctx;

    ck_assert(!f->inside);
    f->rests++;
}

static const struct ht_engine_type careful = {
    .name = "careful", .pause_ms = 3600000, .step = fake_step, .rest = fake_rest};
static const struct ht_engine_type quick = {.name = "quick", .pause_ms = 1, .step = fake_step};
static const struct ht_engine_type slow = {.name = "slow", .pause_ms = 200, .step = fake_step};
static const struct ht_engine_type patient = {.name = "patient", .pause_ms = 3600000, .step = fake_step};

static uint64_t traffic(void *ctx)
{
    struct ht_background_stat x, y;

    ht_row_figures(&a.row, &x);
    ht_row_figures(&b.row, &y);
    foreground += busy ? MIB : 0;
    return foreground + x.bytes + y.bytes;
}

/* Two rows on one lane. */
static void make(const struct ht_lane_config *config, const struct ht_engine_type *type, uint64_t rate_bytes)
{
    memset(&lane, 0, sizeof(lane));
    memset(&a, 0, sizeof(a));
    memset(&b, 0, sizeof(b));
    foreground = 0;
    busy = false;
    a.says = b.says = HT_STEP_IDLE;
    ht_lane_init(&lane, config);
    made = true;
    ht_lane_add(&lane, &a.row, type, &a, rate_bytes);
    ht_lane_add(&lane, &b.row, type, &b, rate_bytes);
}

static void end(void)
{
    if (!made)
        return;
    ht_lane_stop(&lane);
    ht_lane_destroy(&lane);
    made = false;
}

static void wait_for_steps(struct fake *f, uint64_t steps)
{
    WAIT_FOR(f->steps >= steps);
}

/* A lane whose rows have made their first step. */
static void start(const struct ht_engine_type *type)
{
    make(&(struct ht_lane_config){.name = "test"}, type, 0);
    ck_assert_int_eq(ht_lane_start(&lane), 0);
    wait_for_steps(&a, 1);
    wait_for_steps(&b, 1);
}

/* There is always more to do. */
static void work(struct fake *f)
{
    f->says = HT_STEP_WORKED;
    ck_assert_int_eq(ht_row_wake(&f->row), 0);
}

/* A step is held. */
static void hold(struct fake *f)
{
    f->held = true;
    ck_assert_int_eq(ht_row_wake(&f->row), 0);
    WAIT_FOR(f->inside);
}

static void expect_no_step(struct fake *f, uint64_t steps)
{
    usleep(50000);
    ck_assert_uint_eq(f->steps, steps);
}

static struct ht_background_stat figures(struct fake *f)
{
    struct ht_background_stat x;

    ht_row_figures(&f->row, &x);
    return x;
}

static enum ht_background_state state(struct fake *f)
{
    return figures(f).state;
}

static void wait_until_idle(struct fake *f)
{
    WAIT_FOR(state(f) == HT_BACKGROUND_IDLE);
}

/* ---------------------------------------------------------------- turns */

TEST(a_row_that_is_idle_sleeps_until_it_is_woken)
{
    start(&quick);
    expect_no_step(&a, 1);
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    wait_for_steps(&a, 2);
    expect_no_step(&a, 2);
    ck_assert_uint_eq(b.steps, 1);
}

TEST(a_row_steps_at_the_time_that_it_asks_for)
{
    start(&quick);
    wait_until_idle(&a); /* only steps from the next one on ask for a time */
    a.after_ns = 50 * MS;
    (void)ht_row_wake(&a.row);
    wait_for_steps(&a, 6);
    for (unsigned i = 2; i < 6; i++)
        ck_assert_uint_ge(a.at_ns[i] - a.at_ns[i - 1], 50 * MS);
}

/* The commit timer's turn comes also while the tier is under pressure that does not end. */
TEST(a_row_that_always_works_keeps_no_other_from_its_turn)
{
    start(&quick);
    work(&a);
    wait_for_steps(&a, 1000);
    b.after_ns = 1 * MS;
    (void)ht_row_wake(&b.row);
    wait_for_steps(&b, 20);
    b.after_ns = 0;
    work(&b);
    uint64_t of_a = a.steps, of_b = b.steps;
    wait_for_steps(&b, of_b + 1000);
    ck_assert_uint_ge(a.steps - of_a, 500);
}

/* Woken inside its step, after it has looked: it looks again. */
TEST(no_wake_is_lost)
{
    start(&quick);
    hold(&a);
    uint64_t before = a.steps;
    (void)ht_row_wake(&a.row);
    a.held = false;
    wait_for_steps(&a, before + 1);
}

/* -------------------------------------------------------- budgets and pace */

TEST_LOOP(a_row_keeps_to_its_rate_and_yields_to_others, 2)
{
    enum { RATE = 64 * MIB };

    make(&(struct ht_lane_config){.name = "test", .traffic = traffic}, &quick, RATE);
    busy = _i;
    ck_assert_int_eq(ht_lane_start(&lane), 0);
    wait_for_steps(&a, 1);
    ck_assert_uint_eq(a.budget, RATE / 100);
    work(&a);
    uint64_t begin_ns = ht_now_ns(), before = figures(&a).bytes;
    while (ht_now_ns() - begin_ns < 1000 * MS ||
           (figures(&a).bytes - before < RATE / 10 && ht_now_ns() - begin_ns < WAIT_MS_MAX * MS))
        usleep(5000);
    uint64_t moved = figures(&a).bytes - before, took_ns = ht_now_ns() - begin_ns;
    ck_assert_uint_le(moved, (uint64_t)(RATE * 1.2 * (double)took_ns / 1e9) / (busy ? 2 : 1));
    ck_assert_uint_ge(moved, RATE / 10);
}

/* As the command that stops a scrub does. */
TEST(a_wake_ends_the_wait_for_the_pace)
{
    make(&(struct ht_lane_config){.name = "test"}, &quick, 1000);
    a.bytes = MIB; /* the next step is due in 17 minutes */
    ck_assert_int_eq(ht_lane_start(&lane), 0);
    wait_for_steps(&a, 1);
    work(&a);
    wait_for_steps(&a, 2);
    usleep(50000);
    uint64_t steps = a.steps;
    ck_assert_uint_le(steps, 3);
    (void)ht_row_wake(&a.row);
    wait_for_steps(&a, steps + 1);
    ck_assert_uint_eq(a.budget, 10);
}

/* Whatever the rate. */
TEST_LOOP(short_steps_have_1_mib_and_10_ms, 2)
{
    bool is_short = _i;

    make(&(struct ht_lane_config){.name = "test", .short_steps = is_short}, &quick, UINT64_C(1) << 40);
    ck_assert_int_eq(ht_lane_start(&lane), 0);
    wait_for_steps(&a, 1);
    end();
    ck_assert_uint_eq(a.budget, is_short ? MIB : 16 * MIB);
    if (is_short)
        ck_assert_int_le((int64_t)a.time_ns, 10 * MS); /* less than nothing on a slow machine */
    else
        ck_assert_uint_eq(a.time_ns, UINT64_MAX);
}

/* --------------------------------------------------------- pause and budget */

TEST(a_row_that_is_paused_begins_no_step_until_it_resumes)
{
    start(&quick);
    work(&a);
    wait_for_steps(&a, 10);
    ck_assert_uint_eq(state(&a), HT_BACKGROUND_WORKING);
    ht_row_pause(&a.row);
    ck_assert_uint_eq(state(&a), HT_BACKGROUND_PAUSED);
    uint64_t steps = a.steps + 1; /* one may have begun, and not counted itself yet */
    usleep(50000);
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    ck_assert_int_eq(ht_row_wake(&b.row), 0);
    wait_for_steps(&b, 2); /* the other row goes on */
    usleep(50000);
    ck_assert_uint_le(a.steps, steps);
    ck_assert_int_eq(ht_row_resume(&a.row), 0);
    wait_for_steps(&a, steps + 10);
    a.says = HT_STEP_IDLE;
    wait_until_idle(&a);
}

static void wait_for_rests(struct fake *f, uint64_t rests)
{
    WAIT_FOR(f->rests >= rests);
    usleep(20000);
    ck_assert_uint_eq(f->rests, rests);
}

/* Behind the step that runs, and also if that one was blocked. */
TEST(a_row_rests_once_in_each_pause)
{
    start(&careful);
    for (unsigned i = 1; i <= 2; i++) {
        wait_until_idle(&a);
        a.says = i == 1 ? HT_STEP_WORKED : HT_STEP_BLOCKED;
        hold(&a);
        ht_row_pause(&a.row);
        ht_row_pause(&a.row);
        usleep(20000);
        ck_assert_uint_eq(a.rests, i - 1);
        a.held = false;
        wait_for_rests(&a, i);
        a.says = HT_STEP_IDLE;
        ck_assert_int_eq(ht_row_resume(&a.row), 0);
    }
    ck_assert_uint_eq(b.rests, 0);
}

/* One whose thread waits for work that comes later. */
TEST(a_row_that_sleeps_rests_when_it_is_paused)
{
    start(&careful);
    wait_until_idle(&a);
    a.after_ns = 3600000 * MS;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    wait_for_steps(&a, 2);
    wait_until_idle(&a);
    uint64_t steps = a.steps;
    ht_row_pause(&a.row);
    wait_for_rests(&a, 1);
    ck_assert_uint_eq(a.steps, steps);
}

static bool has_thread(void)
{
    ht_mutex_lock(ht_lane_lock(&lane));
    bool running = lane.running;
    ht_mutex_unlock(ht_lane_lock(&lane));
    return running;
}

/* During the pause the thread of a lane on demand ends. Another one begins. */
TEST_LOOP(a_wake_during_a_pause_is_kept, 2)
{
    make(&(struct ht_lane_config){.name = "test", .on_demand = true}, &quick, 0);
    if (_i) {
        ck_assert_int_eq(ht_row_wake(&a.row), 0);
        wait_for_steps(&a, 1);
    }
    uint64_t steps = a.steps;
    ht_row_pause(&a.row);
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    WAIT_FOR(!has_thread());
    ck_assert_uint_eq(a.steps, steps);
    ck_assert_int_eq(ht_row_resume(&a.row), 0);
    wait_for_steps(&a, steps + 1);
    ht_row_pause(&b.row); /* one that has nothing to do resumes without a step */
    ck_assert_int_eq(ht_row_resume(&b.row), 0);
    end();
    ck_assert_uint_eq(b.steps, 0);
}

/* The time of a run, and so its rate and the time left, leaves pauses out. */
TEST(a_pause_does_not_count_as_time_of_the_run)
{
    enum { PAUSE_NS = 300 * MS };

    start(&quick);
    work(&a);
    wait_for_steps(&a, 3);
    ht_row_pause(&a.row);
    uint64_t began_ns = ht_now_ns(), run_ns = figures(&a).run_ns;
    ck_assert_uint_gt(run_ns, 0);
    while (ht_now_ns() - began_ns < PAUSE_NS)
        usleep(1000);
    ck_assert_uint_eq(figures(&a).run_ns, run_ns);
    ht_row_pause(&a.row); /* again: that is no new pause */
    uint64_t resumed_ns = ht_now_ns();
    ck_assert_int_eq(ht_row_resume(&a.row), 0);
    ck_assert_uint_le(figures(&a).run_ns, run_ns + (ht_now_ns() - resumed_ns) + PAUSE_NS / 2);
}

/* As the end of a scrub does, which would wait for ever else. */
TEST_LOOP(the_wake_that_ends_work_passes_pause_and_budget, 2)
{
    bool budget = _i;
    const struct ht_lane_config config = {.name = "test", .on_demand = true, .rate_bytes = budget ? 1000 : 0};

    make(&config, &quick, 0);
    a.bytes = MIB; /* 17 minutes of the budget */
    if (budget) {
        ck_assert_int_eq(ht_row_wake(&a.row), 0);
        wait_for_steps(&a, 1);
        ck_assert_int_eq(ht_row_wake(&a.row), 0);
    } else {
        ht_row_pause(&a.row);
    }
    uint64_t steps = a.steps;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    expect_no_step(&a, steps);
    ck_assert_int_eq(ht_row_wake_to_end(&a.row), 0);
    wait_for_steps(&a, steps + 1);
    expect_no_step(&a, steps + 1);
}

static enum ht_step burn_step(void *ctx, struct ht_budget *budget)
{
    struct fake *f = ctx;
    uint64_t until_ns = ht_now_ns() + 5 * MS;

    while (ht_now_ns() < until_ns)
        f->entered_ns = until_ns;
    f->steps++;
    budget->bytes = f->bytes;
    return HT_STEP_WORKED;
}
static const struct ht_engine_type burner = {.name = "burner", .step = burn_step};

/* Both rows together, each in its turn. */
TEST_LOOP(rows_of_a_lane_share_its_budget, 2)
{
    enum { PERCENT = 10, RATE = 8 * MIB };
    bool cpu = _i;
    const struct ht_lane_config config = {
        .name = "test", .rate_bytes = cpu ? 0 : RATE, .cpu_percent = cpu ? PERCENT : 0};

    make(&config, &burner, 0);
    a.bytes = b.bytes = MIB / 4;
    uint64_t begin_ns = ht_now_ns();
    ck_assert_int_eq(ht_lane_start(&lane), 0);
    wait_for_steps(&b, 12);
    struct ht_background_stat x = figures(&a), y = figures(&b);
    double took_s = (double)(ht_now_ns() - begin_ns) / 1e9;
    ck_assert_uint_ge(x.steps, 11); /* neither keeps the other from its turn */
    if (cpu)
        ck_assert_double_le((double)(x.cpu_ns + y.cpu_ns) / 1e9, took_s * PERCENT / 100 + 0.03);
    else
        ck_assert_double_le((double)(x.bytes + y.bytes), took_s * RATE + MIB);
    ck_assert_uint_gt(x.cpu_ns, 0);
    ck_assert_uint_eq(x.run_bytes, x.bytes); /* never idle */
    ck_assert_uint_gt(x.run_ns, 0);
}

/* ----------------------------------------------------------------- blocked */

TEST(a_row_that_is_blocked_pauses_whoever_wakes_it)
{
    start(&slow);
    a.says = HT_STEP_BLOCKED;
    (void)ht_row_wake(&a.row);
    wait_for_steps(&a, 2);
    uint64_t begin_ns = ht_now_ns();
    while (ht_now_ns() - begin_ns < 700 * MS || (figures(&a).blocked < 2 && ht_now_ns() - begin_ns < WAIT_MS_MAX * MS))
        (void)ht_row_wake(&a.row);
    uint64_t steps = a.steps;
    ck_assert_uint_le(steps, 2 + (ht_now_ns() - a.at_ns[1]) / (200 * MS));
    for (unsigned i = 2; i < a.steps; i++)
        ck_assert_uint_ge(a.at_ns[i] - a.at_ns[i - 1], 200 * MS);
    ck_assert_uint_ge(figures(&a).blocked, 2);
    a.says = HT_STEP_IDLE;
    wait_for_steps(&a, a.steps + 1); /* and goes on by itself */
}

TEST(a_lane_stops_while_a_row_is_blocked)
{
    start(&patient);
    a.says = HT_STEP_BLOCKED;
    (void)ht_row_wake(&a.row);
    wait_for_steps(&a, 2);
    uint64_t begin_ns = ht_now_ns();
    end();
    ck_assert_uint_lt(ht_now_ns() - begin_ns, WAIT_MS_MAX * MS);
}

/* Another thread calls this function, which waits for the step that runs. */
struct waiting_call {
    void (*call)(struct ht_lane *l);
    pthread_t thread;
    _Atomic bool returned;
};

static void *call_main(void *arg)
{
    struct waiting_call *x = arg;

    x->call(&lane);
    x->returned = true;
    return NULL;
}

static void begin_call(struct waiting_call *x)
{
    ck_assert_int_eq(pthread_create(&x->thread, NULL, call_main, x), 0);
}

/* The step of the first row was held, and ends. */
static void end_call(struct waiting_call *x)
{
    a.held = false;
    pthread_join(x->thread, NULL);
}

static bool stops(void)
{
    ht_mutex_lock(&lane.lock);
    bool stopping = lane.stopping;
    ht_mutex_unlock(&lane.lock);
    return stopping;
}

TEST(a_lane_that_stops_waits_for_the_step_that_runs)
{
    struct waiting_call stop = {.call = ht_lane_stop};

    start(&quick);
    a.says = HT_STEP_WORKED;
    hold(&a);
    uint64_t steps = a.steps;
    begin_call(&stop);
    while (!stops())
        usleep(1000);
    usleep(50000);
    ck_assert(!stop.returned);
    end_call(&stop);
    ck_assert_uint_eq(a.steps, steps);
    (void)ht_row_wake(&a.row);
    usleep(20000);
    ck_assert_uint_eq(a.steps, steps);
    ht_lane_destroy(&lane);
}

/* --------------------------------------------------------------- on demand */

static void *end_row(void *arg)
{
    (void)arg;
    ht_row_end(&a.row);
    a.says = HT_STEP_BLOCKED; /* seen only after the end */
    return NULL;
}

TEST(a_row_ends_after_the_step_that_runs_and_steps_no_more)
{
    pthread_t thread;

    start(&quick);
    a.says = HT_STEP_WORKED;
    a.held = true;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    while (!a.inside)
        usleep(1000);
    ck_assert_int_eq(pthread_create(&thread, NULL, end_row, NULL), 0);
    usleep(50000);
    ck_assert_int_eq(a.says, HT_STEP_WORKED);
    a.held = false;
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert(!a.inside);
    uint64_t steps = a.steps, others = b.steps;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    ck_assert_int_eq(ht_row_wake(&b.row), 0);
    while (b.steps == others)
        usleep(1000);
    ck_assert_uint_eq(a.steps, steps);
}

TEST(a_lane_on_demand_has_a_thread_while_there_is_work)
{
    make(&(struct ht_lane_config){.name = "test", .on_demand = true}, &quick, 0);
    ck_assert(!has_thread());
    for (unsigned i = 0; i < 3; i++) {
        hold(&a);
        ck_assert(has_thread());
        a.held = false;
        WAIT_FOR(!has_thread());
    }
    ck_assert_uint_eq(a.steps, 3);
    ck_assert_uint_eq(b.steps, 0);
    ht_lane_stop(&lane);
    ck_assert_int_eq(ht_row_wake(&a.row), -ECANCELED);
    ht_lane_destroy(&lane);
}

/* No step follows, so a caller that relied on one would wait for ever. */
TEST(a_wake_fails_while_its_lane_on_demand_stops)
{
    struct waiting_call stop = {.call = ht_lane_stop};

    make(&(struct ht_lane_config){.name = "test", .on_demand = true}, &quick, 0);
    hold(&a);
    begin_call(&stop);
    while (!stops())
        usleep(1000);
    ck_assert(has_thread());
    ck_assert_int_eq(ht_row_wake(&a.row), -ECANCELED);
    end_call(&stop);
    ck_assert_uint_eq(a.steps, 1);
    ht_lane_destroy(&lane);
}

/* ----------------------------------------------------------------- lending */

/* A thread of somebody else that serves the lane. */
struct server {
    pthread_t thread;
    bool once;
    _Atomic bool returned, more;
};

static void *serve_main(void *arg)
{
    struct server *x = arg;

    x->more = ht_lane_serve(&lane, x->once);
    ck_assert_int_eq(ht_io_class(), HT_IO_URGENT); /* as it was */
    x->returned = true;
    return NULL;
}

static void begin_serving(struct server *x, bool once)
{
    *x = (struct server){.once = once};
    ck_assert_int_eq(pthread_create(&x->thread, NULL, serve_main, x), 0);
}

static void make_lent(const struct ht_engine_type *type)
{
    make(&(struct ht_lane_config){.name = "test", .on_demand = true, .io_class = HT_IO_BACKGROUND}, type, 0);
    ht_lane_lend(&lane);
}

TEST(a_lane_that_is_lent_steps_only_while_a_thread_serves)
{
    struct server x;

    make_lent(&quick);
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    usleep(50000);
    ck_assert(!has_thread());
    ck_assert_uint_eq(a.steps, 0);
    begin_serving(&x, false);
    wait_for_steps(&a, 1); /* the wake was kept */
    ck_assert_int_eq(ht_row_wake(&b.row), 0);
    wait_for_steps(&b, 1); /* and one reaches the thread that waits */
    ck_assert(!x.returned && !has_thread());
    ht_lane_recall(&lane);
    pthread_join(x.thread, NULL);
    ck_assert(x.more);
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    expect_no_step(&a, 1);
}

/* At most one step more, whatever there is to do. */
TEST(a_thread_that_is_recalled_leaves_after_its_step)
{
    struct server x;

    make_lent(&quick);
    a.says = HT_STEP_WORKED;
    a.held = true;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    begin_serving(&x, false);
    WAIT_FOR(a.inside);
    ck_assert(ht_lane_serve(&lane, false)); /* another one is not needed */
    ht_lane_recall(&lane);
    usleep(20000);
    ck_assert(!x.returned);
    a.held = false;
    pthread_join(x.thread, NULL);
    ck_assert_uint_eq(a.steps, 1);
    ht_lane_recall(&lane); /* before a thread comes: that one leaves at once, and the next one stays */
    ck_assert(ht_lane_serve(&lane, false));
    ck_assert_uint_eq(a.steps, 1);
    begin_serving(&x, false);
    wait_for_steps(&a, 10);
    ht_lane_recall(&lane);
    pthread_join(x.thread, NULL);
}

TEST(a_thread_that_serves_once_makes_one_step_or_none)
{
    make_lent(&quick);
    a.says = HT_STEP_WORKED;
    ck_assert(ht_lane_serve(&lane, true));
    ck_assert_uint_eq(a.steps, 0);
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    ck_assert(ht_lane_serve(&lane, true));
    ck_assert_uint_eq(a.steps, 1);
    ht_lane_recall(&lane); /* its one step is due all the same */
    ck_assert(ht_lane_serve(&lane, true));
    ck_assert_uint_eq(a.steps, 2);
}

TEST(a_lane_is_taken_back_after_the_step_that_runs)
{
    struct waiting_call take_back = {.call = ht_lane_take_back};
    struct server x;

    make_lent(&quick);
    a.says = HT_STEP_WORKED;
    a.held = true;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    begin_serving(&x, false);
    WAIT_FOR(a.inside);
    begin_call(&take_back);
    usleep(50000);
    ck_assert(!take_back.returned);
    ck_assert(!has_thread());
    end_call(&take_back);
    pthread_join(x.thread, NULL);
    ck_assert(!x.more);
    wait_for_steps(&a, 10); /* by its own thread, without a wake */
    ck_assert(has_thread());
    ck_assert(!ht_lane_serve(&lane, false));
}

/* Its own thread has work when it is lent: the other one goes on with that. */
TEST(the_own_thread_of_a_lane_ends_when_it_is_lent)
{
    struct server x;

    make(&(struct ht_lane_config){.name = "test", .on_demand = true}, &quick, 0);
    work(&a);
    wait_for_steps(&a, 1);
    ht_lane_lend(&lane);
    WAIT_FOR(!has_thread());
    uint64_t steps = a.steps;
    begin_serving(&x, false);
    wait_for_steps(&a, steps + 10);
    ck_assert(!has_thread());
    ht_lane_recall(&lane);
    pthread_join(x.thread, NULL);
}

/* The caller waits for that step, and the threads that could serve may be busy for long. */
TEST(the_wake_that_ends_work_needs_no_thread_that_serves)
{
    make_lent(&quick);
    a.says = HT_STEP_WORKED;
    for (unsigned i = 1; i <= 2; i++) {
        ck_assert_int_eq(ht_row_wake_to_end(&a.row), 0);
        wait_for_steps(&a, i);
        WAIT_FOR(!has_thread());
        ck_assert_uint_eq(a.steps, i);
    }
}

/* It waits for the step that a serving thread makes: a row makes one at a time. */
TEST(the_wake_that_ends_work_waits_for_the_step_that_runs)
{
    struct server x;

    make_lent(&quick);
    a.held = true;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    begin_serving(&x, false);
    WAIT_FOR(a.inside);
    ck_assert_int_eq(ht_row_wake_to_end(&a.row), 0);
    ht_lane_recall(&lane);
    usleep(20000);
    ck_assert_uint_eq(a.steps, 1);
    a.held = false;
    pthread_join(x.thread, NULL);
    wait_for_steps(&a, 2);
}

TEST_LOOP(a_lane_stops_while_a_thread_serves, 2)
{
    struct server x;

    make_lent(&quick);
    if (_i) {
        ck_assert_int_eq(ht_row_wake(&a.row), 0);
        a.says = HT_STEP_WORKED;
    }
    begin_serving(&x, false);
    for (bool served = false; !served; sched_yield()) {
        ht_mutex_lock(ht_lane_lock(&lane));
        served = lane.served;
        ht_mutex_unlock(ht_lane_lock(&lane));
    }
    wait_for_steps(&a, (uint64_t)_i);
    ht_lane_stop(&lane);
    ht_lane_destroy(&lane);
    pthread_join(x.thread, NULL);
    ck_assert(!x.more);
}

TEST(a_row_of_a_lane_that_is_lent_rests_in_a_pause)
{
    struct server x;

    make_lent(&careful);
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    ck_assert(ht_lane_serve(&lane, true));
    ht_row_pause(&a.row);
    usleep(20000);
    ck_assert_uint_eq(a.rests, 0);
    begin_serving(&x, false);
    wait_for_rests(&a, 1);
    ht_lane_recall(&lane);
    pthread_join(x.thread, NULL);
    ck_assert_uint_eq(a.steps, 1);
}

/* The thread that serves is free meanwhile: it is recalled, and does not wait. */
TEST(a_long_step_of_a_lane_that_is_lent_is_for_its_own_thread)
{
    struct server x;

    make_lent(&quick);
    a.says = HT_STEP_WORKED;
    a.is_long = a.held = true;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    begin_serving(&x, false);
    wait_for_steps(&a, 2);
    WAIT_FOR(a.inside);
    ck_assert_uint_eq(a.longs, 1);
    ht_lane_recall(&lane);
    pthread_join(x.thread, NULL);
    ck_assert(x.more && a.inside && has_thread());
    a.is_long = a.held = false;
    WAIT_FOR(!has_thread());
    ck_assert(ht_lane_serve(&lane, true)); /* what follows is the other's again */
    ck_assert_uint_eq(a.longs, 1);
}

TEST(a_row_with_long_steps_is_paused_as_others_are)
{
    make_lent(&careful);
    a.says = HT_STEP_WORKED;
    a.is_long = a.held = true;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    ck_assert(ht_lane_serve(&lane, true));
    for (unsigned pause = 1; pause <= 2; pause++) {
        wait_for_steps(&a, 2 * pause);
        WAIT_FOR(a.inside);
        ht_row_pause(&a.row);
        a.held = false;
        WAIT_FOR(!has_thread());
        ck_assert(ht_lane_serve(&lane, true)); /* its rest */
        ck_assert_uint_eq(a.rests, pause);
        ck_assert_uint_eq(a.steps, 2 * pause);
        a.held = true;
        ck_assert_int_eq(ht_row_resume(&a.row), 0);
        ck_assert(ht_lane_serve(&lane, true));
    }
    a.held = false;
    end();
    ck_assert_uint_ge(a.longs, 2);
}

/* There is no memory for a thread, say. */
TEST(without_its_own_thread_another_one_makes_a_long_step)
{
    make_lent(&quick);
    a.says = HT_STEP_WORKED;
    a.is_long = true;
    ck_assert_int_eq(ht_row_wake(&a.row), 0);
    wrap_fail(WRAP_THREAD, 1, true);
    for (unsigned i = 1; i <= 4; i++) {
        ck_assert(ht_lane_serve(&lane, true));
        ck_assert_uint_eq(a.steps, i);
        ck_assert_uint_eq(a.longs, i / 2);
    }
    wrap_fail(WRAP_THREAD, 0, false);
    ck_assert(!has_thread());
}

RUN_TESTS("scheduler", .teardown = end, .timeout_s = 120)
