/* SPDX-License-Identifier: Apache-2.0 */
/* Shares of devices by measured bandwidth and free space, on tables and with simulated devices. */
#include <math.h>

#include "tests/support/suite.h"
#include "tiering/tier/placement.h"

enum { WHOLE = HT_WEIGHTS_WHOLE, MS = 1000000, DEVICES = 3 };
#define SECOND UINT64_C(1000000000)
#define MB 1e6

struct sim {
    struct ht_weights w;
    struct ht_weights_device d[DEVICES];
    unsigned count;
    uint64_t now_ns;
    double read[2]; /* where content lies */
    double step_bytes;
    double gap;  /* part of all time in which the programs ask for nothing */
    bool phases; /* a step first reads all, then writes all */
};

static struct sim begin(unsigned count)
{
    struct sim s = {.count = count, .now_ns = 5 * SECOND, .read = {.5, .5}, .step_bytes = 1e9};

    for (unsigned i = 0; i < count; i++)
        s.d[i] = (struct ht_weights_device){.usable = true, .blocks = 1 << 20, .free_blocks = 1 << 19};
    ck_assert(!ht_weights_look(&s.w, s.now_ns, s.d, count));
    return s;
}

/* Device i moved so many bytes each way at these speeds. */
static void serve(struct sim *s, unsigned i, double bytes, double read_speed, double write_speed)
{
    s->d[i].way[0].bytes += (uint64_t)bytes;
    s->d[i].way[1].bytes += (uint64_t)bytes;
    s->d[i].way[0].busy_ns += (uint64_t)(bytes / read_speed * 1e9);
    s->d[i].way[1].busy_ns += (uint64_t)(bytes / write_speed * 1e9);
}

static bool look(struct sim *s)
{
    s->now_ns += HT_WEIGHTS_PERIOD_NS;
    return ht_weights_look(&s->w, s->now_ns, s->d, s->count);
}

static double share(const struct sim *s, unsigned i)
{
    return (double)s->w.device[i].share / WHOLE;
}

static void check_shares(const struct sim *s, const double wanted[], double by, const char *what)
{
    uint32_t all = 0;

    for (unsigned i = 0; i < s->count; i++) {
        ck_assert_msg(fabs(share(s, i) - wanted[i]) <= by, "%s: device %u has %.4f, not %.4f", what, i, share(s, i),
                      wanted[i]);
        all += s->w.device[i].share;
    }
    ck_assert_msg(all == 0 || all == WHOLE, "%s: together %u", what, all);
}

/* ---------------------------------------------------------------------- tables */

static const struct case_ {
    const char *what;
    struct {
        double read, write; /* bytes per second; 0: no request ended well; -1: nothing of that was measured */
        unsigned free_percent;
        bool unusable, stalled;
    } device[DEVICES];
    double wanted[DEVICES];
} cases[] = {
    {"nothing is measured", {{-1, -1, 50}, {-1, -1, 50}, {-1, -1, 50}}, {0, 0, 0}},
    {"equal ones", {{1e9, 1e9, 50}, {1e9, 1e9, 50}, {1e9, 1e9, 50}}, {1. / 3, 1. / 3, 1. / 3}},
    {"in proportion", {{6e8, 6e8, 50}, {2e8, 2e8, 50}, {2e8, 2e8, 50}}, {.6, .2, .2}},
    {"the slower direction counts", {{9e8, 3e8, 50}, {3e8, 9e8, 50}, {4e8, 5e8, 50}}, {.3, .3, .4}},
    {"one is not measured", {{6e8, 6e8, 50}, {2e8, 2e8, 50}, {-1, -1, 50}}, {.5, 1. / 6, 1. / 3}},
    {"only what all have measured compares them", {{1e9, 1e8, 50}, {-1, 1e8, 50}, {1e9, 2e8, 50}}, {.25, .25, .5}},
    {"each has another direction", {{3e8, -1, 50}, {-1, 1e8, 50}, {-1, -1, 50}}, {.5, 1. / 6, 1. / 3}},
    {"a slow one keeps a little", {{1e9, 1e9, 50}, {1e3, 1e3, 50}, {1e9, 1e9, 50}}, {.4923, .0154, .4923}},
    {"rate zero", {{1e9, 1e9, 50}, {0, 0, 50}, {1e9, 1e9, 50}}, {.4923, .0154, .4923}},
    {"rate zero one way", {{1e9, 1e9, 50}, {1e9, 0, 50}, {1e9, 1e9, 50}}, {.4923, .0154, .4923}},
    {"rate zero everywhere", {{0, 0, 50}, {0, 0, 50}, {0, 0, 50}}, {1. / 3, 1. / 3, 1. / 3}},
    {"an unusable one", {{1e9, 1e9, 50}, {9e9, 9e9, 50, .unusable = true}, {3e9, 3e9, 50}}, {.25, 0, .75}},
    {"a stalled one", {{1e9, 1e9, 50}, {9e9, 9e9, 50, .stalled = true}, {3e9, 3e9, 50}}, {.25, 0, .75}},
    {"an unusable one does not choose the directions",
     {{1e9, 1e8, 50}, {-1, 9e8, 50, .unusable = true}, {1e8, 1e8, 50}},
     {.5, 0, .5}},
    {"nor does a stalled one", {{1e8, 1e9, 50}, {9e8, -1, 50, .stalled = true}, {3e8, 1e9, 50}}, {.25, 0, .75}},
    {"the only usable one is not measured",
     {{1e9, 1e9, 50, .unusable = true}, {1e9, 1e9, 50, .unusable = true}, {-1, -1, 50}},
     {0, 0, 0}},
    {"all unusable",
     {{1e9, 1e9, 50, .unusable = true}, {1e9, 1e9, 50, .unusable = true}, {1e9, 1e9, 50, .stalled = true}},
     {0, 0, 0}},
    {"the last quarter fills slowly", {{1e9, 1e9, 5}, {1e9, 1e9, 25}, {1e9, 1e9, 90}}, {.2 / 2.2, 1 / 2.2, 1 / 2.2}},
    {"a full one", {{1e9, 1e9, 0}, {1e9, 1e9, 50}, {1e9, 1e9, 50}}, {0, .5, .5}},
    {"all full", {{1e9, 1e9, 0}, {1e9, 1e9, 0}, {1e9, 1e9, 0}}, {0, 0, 0}},
    {"beyond any speed", {{1e300, 1e300, 50}, {1e300, 1e300, 50}, {1e300, 1e300, 50}}, {1. / 3, 1. / 3, 1. / 3}},
};

static void measure_way(struct sim *s, unsigned i, unsigned k, double speed)
{
    if (speed < 0)
        return;
    s->d[i].way[k].bytes += speed > 0 ? 1ull << 30 : 0;
    s->d[i].way[k].busy_ns += speed > 0 ? (uint64_t)fmax((1 << 30) / speed * 1e9, 1) : SECOND;
}

TEST_LOOP(every_case, HT_ARRAY_SIZE(cases))
{
    const struct case_ *c = &cases[_i];
    struct sim s = begin(DEVICES);

    for (unsigned i = 0; i < DEVICES; i++) {
        measure_way(&s, i, 0, c->device[i].read);
        measure_way(&s, i, 1, c->device[i].write);
        s.d[i].free_blocks = s.d[i].blocks * c->device[i].free_percent / 100;
        s.d[i].usable = !c->device[i].unusable;
        s.d[i].waiting_ns = c->device[i].stalled ? HT_WEIGHTS_STALL_NS : 0;
    }
    (void)look(&s);
    check_shares(&s, c->wanted, .0003, c->what);
}

TEST(too_little_says_nothing)
{
    struct sim s = begin(2);

    serve(&s, 0, HT_WEIGHTS_SAMPLE_BYTES - 1, 31e9, 31e9);
    serve(&s, 1, 39, 100, 100);
    ck_assert(!look(&s));
    check_shares(&s, (double[]){0, 0}, 0, "0.39 s");
    serve(&s, 0, 1, 31e9, 31e9);
    ck_assert(look(&s));
    check_shares(&s, (double[]){.5, .5}, 0, "one is measured");
    serve(&s, 1, 1, 100, 100);
    ck_assert(look(&s));
    check_shares(&s, (double[]){1 - 1. / 65, 1. / 65}, .001, "both are");
}

TEST(a_look_is_due_after_its_period_and_when_the_clock_went_back)
{
    struct sim s = begin(2);

    ck_assert(ht_weights_due(&s.w, 0));
    (void)look(&s);
    ck_assert(!ht_weights_due(&s.w, s.now_ns));
    ck_assert(!ht_weights_due(&s.w, s.now_ns + HT_WEIGHTS_PERIOD_NS - 1));
    ck_assert(ht_weights_due(&s.w, s.now_ns + HT_WEIGHTS_PERIOD_NS));
    ck_assert(ht_weights_due(&s.w, s.now_ns + 86400 * SECOND));
    ck_assert(ht_weights_due(&s.w, s.now_ns - 1));
}

TEST(counts_that_went_back_are_a_new_begin)
{
    struct sim s = begin(2);

    serve(&s, 0, 3e9, 3e8, 3e8);
    serve(&s, 1, 1e9, 1e8, 1e8);
    (void)look(&s);
    check_shares(&s, (double[]){.75, .25}, .001, "measured");
    memset(s.d[0].way, 0, sizeof(s.d[0].way));
    ck_assert(!look(&s));
    serve(&s, 0, 3e8, 3e8, 3e8);
    ck_assert(!look(&s));
    check_shares(&s, (double[]){.75, .25}, .001, "measured again");
}

/* The first of two devices is three times as fast. */
static struct sim begin_measured(void)
{
    struct sim s = begin(2);

    serve(&s, 0, 3e8, 3e8, 3e8);
    serve(&s, 1, 1e8, 1e8, 1e8);
    ck_assert(look(&s));
    return s;
}

TEST(noise_changes_no_share)
{
    struct sim s = begin_measured();

    for (unsigned i = 0; i < 1000; i++) {
        double noise = 1 + (i % 7 - 3.) / 100;
        serve(&s, 0, 3e8, 3e8 * noise, 3e8 / noise);
        serve(&s, 1, 1e8, 1e8 / noise, 1e8);
        ck_assert_msg(!look(&s), "look %u", i);
    }
}

/* ------------------------------------------------------------- closed loops */

/*
 * All devices move one period's worth of these directions (bits). Writes go by shares, reads to where the step before
 * has written, so the slowest for its part decides. A device with less work than it could do shows a higher speed than
 * it has, burst times. Adds to out_written. Returns the bytes of a direction.
 */
static double run_period(struct sim *s, const double speed[], unsigned ways, double burst, double out_written[2])
{
    const double period = HT_WEIGHTS_PERIOD_NS / 1e9 * (1 - s->gap);
    bool shares = s->w.device[0].share + s->w.device[1].share > 0;
    double part[2][2], most = INFINITY;

    for (unsigned i = 0; i < 2; i++) {
        part[i][0] = ways & 1 ? s->read[i] : 0;
        part[i][1] = ways & 2 ? (shares ? share(s, i) : .5) : 0;
        most = fmin(most, speed[i] / fmax(fmax(part[i][0], part[i][1]), 1e-9));
    }
    for (unsigned i = 0; i < 2; i++) {
        for (unsigned k = 0; k < 2; k++) {
            double moved = part[i][k] * most;
            double shown = moved > .97 * speed[i] ? speed[i] : speed[i] * burst;
            s->d[i].way[k].bytes += (uint64_t)(moved * period);
            s->d[i].way[k].busy_ns += (uint64_t)(moved / shown * period * 1e9);
        }
        out_written[i] += part[i][1] * most * period;
    }
    (void)look(s);
    return most * period;
}

/* All devices work on so many steps. Returns the part of what is possible that the last steps got. */
static double run(struct sim *s, const double speed[], unsigned steps, unsigned last, double burst)
{
    unsigned phases = s->phases ? 2 : 1, periods = 0;

    for (unsigned n = 0; n < steps; n++) {
        double written[2] = {0};
        for (unsigned phase = 0; phase < phases; phase++) {
            unsigned ways = s->phases ? 1u << phase : 3;
            for (double bytes = 0; bytes < s->step_bytes; periods += n >= steps - last)
                bytes += run_period(s, speed, ways, burst, written);
        }
        for (unsigned i = 0; i < 2; i++)
            s->read[i] = written[i] / (written[0] + written[1]);
    }
    double seconds = periods * (HT_WEIGHTS_PERIOD_NS / 1e9) * (1 - s->gap);
    return last * phases * s->step_bytes / seconds / (speed[0] + speed[1]);
}

static const struct {
    double speed[2], burst;
} loops[] = {
    {{3e8, 1e8}, 1},  {{3e8, 1e8}, 20},  {{3e8, 1e8}, 3},  {{1e8, 1e8}, 1},
    {{1e8, 1e8}, 20}, {{7e9, 1e9}, 1.5}, {{5e7, 3e7}, 10}, {{3e8, 1e7}, 10},
};

TEST_LOOP(shares_find_the_speeds_also_when_idle_devices_seem_faster, HT_ARRAY_SIZE(loops))
{
    struct sim s = begin(2);

    s.step_bytes = 3 * (loops[_i].speed[0] + loops[_i].speed[1]);
    double used = run(&s, loops[_i].speed, 20, 12, loops[_i].burst);

    ck_assert_msg(used > .93, "%.3f of the sum", used);
}

TEST_LOOP(shares_follow_a_device_that_slows_down_and_recovers, 3)
{
    struct sim s = begin(2);
    const double before[] = {3e8, 1e8}, after[] = {3e7, 1e8};

    (void)run(&s, before, 10, 1, loops[_i].burst);
    double used = run(&s, after, 3, 1, loops[_i].burst);
    ck_assert_msg(used > .9, "slowed down: %.3f of the sum", used);
    (void)run(&s, after, 5, 1, loops[_i].burst);
    used = run(&s, before, 8, 1, loops[_i].burst);
    ck_assert_msg(used > .88, "recovered: %.3f of the sum", used);
}

/* The second step reads what the first slow one has written, so that one must have found the speeds early. */
TEST_LOOP(a_device_that_slows_down_tenfold_costs_one_step, 3)
{
    struct sim s = begin(2);
    const double before[] = {2.25e8, 7.5e7}, after[] = {2.25e7, 7.5e7};

    s.step_bytes = 6e8;
    (void)run(&s, before, 10, 1, loops[_i].burst);
    double used = run(&s, after, 2, 1, loops[_i].burst);
    ck_assert_msg(used > .9, "the second step: %.3f of the new sum", used);
}

TEST(a_stall_is_no_new_speed)
{
    struct sim s = begin_measured();

    serve(&s, 0, 1e6, 1e6, 1e6);
    (void)look(&s);
    check_shares(&s, (double[]){.6, .4}, .01, "after a stall");
    serve(&s, 0, 1e6, 1e6, 1e6);
    (void)look(&s);
    check_shares(&s, (double[]){1. / 65, 64. / 65}, .01, "after two");
}

/*
 * Both samples are below half of the estimate before the first one, and the second is above half of the one after it.
 */
TEST(two_samples_of_a_little_less_than_half_are_a_new_speed)
{
    struct sim s = begin_measured();

    for (unsigned i = 0; i < 2; i++) {
        serve(&s, 0, 1.4e8, 1.4e8, 1.4e8);
        (void)look(&s);
    }
    check_shares(&s, (double[]){1.4 / 2.4, 1 / 2.4}, .01, "after two");
}

/* What an estimate was before it was forgotten, or became nothing, makes no stall a new speed. */
TEST_LOOP(a_stall_after_a_new_begin_is_no_new_speed, 2)
{
    struct sim s = begin_measured();

    for (unsigned i = 0; i < (_i ? 1 : 2); i++) {
        measure_way(&s, 0, 0, 0);
        measure_way(&s, 0, 1, 0);
        (void)look(&s);
    }
    for (unsigned i = 0; _i && i < HT_WEIGHTS_FORGET_NS / SECOND + 1; i++) {
        serve(&s, 1, 1e8, 1e8, 1e8);
        (void)look(&s);
    }
    ck_assert(!_i || !s.w.device[0].way[1].known);
    serve(&s, 0, 3e8, 3e8, 3e8);
    (void)look(&s);
    check_shares(&s, (double[]){.75, .25}, .01, "a new begin");
    serve(&s, 0, 1e6, 1e6, 1e6);
    (void)look(&s);
    check_shares(&s, (double[]){.6, .4}, .01, "after a stall");
}

static const struct {
    double gap;
    bool phases;
    double burst;
} paces[] = {
    {0, false, 1}, {.05, false, 1}, {.15, false, 1}, {.4, false, 1}, {.15, false, 5},
    {0, true, 1},  {.2, true, 1},   {0, true, 5},    {.2, true, 5},
};

TEST_LOOP(gaps_and_phases_hide_no_speed, HT_ARRAY_SIZE(paces))
{
    struct sim s = begin(2);
    const double equal[] = {1e8, 1e8}, faster[] = {3e8, 1e8}, slower[] = {3e7, 1e8};

    s.gap = paces[_i].gap;
    s.phases = paces[_i].phases;
    double used = run(&s, equal, 10, 5, paces[_i].burst);
    ck_assert_msg(used > .93, "equal ones: %.3f of what is possible", used);
    used = run(&s, faster, 20, 5, paces[_i].burst);
    ck_assert_msg(used > .93, "one is faster: %.3f of what is possible", used);
    used = run(&s, slower, 6, 3, paces[_i].burst);
    ck_assert_msg(used > .9, "it is slower: %.3f of what is possible", used);
}

/* For so long, device i does nothing but move one direction at such a speed. */
static void move_one_way(struct sim *s, unsigned k, const double speed[2], double seconds)
{
    for (double t = 0; t < seconds; t += HT_WEIGHTS_PERIOD_NS / 1e9) {
        for (unsigned i = 0; i < 2; i++) {
            s->d[i].way[k].bytes += (uint64_t)(speed[i] * (HT_WEIGHTS_PERIOD_NS / 1e9));
            s->d[i].way[k].busy_ns += speed[i] > 0 ? HT_WEIGHTS_PERIOD_NS : 0;
        }
        (void)look(s);
    }
}

TEST(a_direction_that_is_not_used_is_forgotten)
{
    struct sim s = begin(2);
    const double load[] = {1e9, 1e8}, writes[] = {3e8, 3e8}, none[] = {0, 0};

    move_one_way(&s, 0, load, 10);
    check_shares(&s, (double[]){10. / 11, 1. / 11}, .03, "reads");
    move_one_way(&s, 1, writes, 5);
    ck_assert_msg(share(&s, 0) > .7, "what is read still counts: %.3f", share(&s, 0));
    move_one_way(&s, 1, none, 3600);
    ck_assert_msg(share(&s, 0) > .7, "nothing happened: %.3f", share(&s, 0));
    move_one_way(&s, 1, writes, 20);
    check_shares(&s, (double[]){.5, .5}, .01, "only writes count");
    move_one_way(&s, 0, load, 10);
    ck_assert_msg(share(&s, 0) > .7, "reads count again: %.3f", share(&s, 0));
}

/* A mount reads first where content lies, and for a moment all writes go elsewhere. */
TEST(reads_say_how_fast_a_device_is_that_gets_few_of_the_first_writes)
{
    struct sim s = begin(2);
    const double speed[] = {3e8, 1e8};

    move_one_way(&s, 0, speed, 5);
    for (unsigned i = 0; i < 2 * SECOND / HT_WEIGHTS_PERIOD_NS; i++) {
        s.d[0].way[1].bytes += (uint64_t)(3e8 * HT_WEIGHTS_PERIOD_NS / 1e9);
        s.d[0].way[1].busy_ns += HT_WEIGHTS_PERIOD_NS;
        s.d[1].way[1].bytes += (uint64_t)(1e7 * HT_WEIGHTS_PERIOD_NS / 1e9);
        s.d[1].way[1].busy_ns += HT_WEIGHTS_PERIOD_NS / 10;
        (void)look(&s);
    }
    check_shares(&s, (double[]){.75, .25}, .01, "few writes");
}

TEST(a_stalled_device_loses_its_share_and_gets_it_back)
{
    struct sim s = begin(2);
    const double speed[] = {3e8, 1e8};

    (void)run(&s, speed, 10, 1, 1);
    s.d[0].waiting_ns = HT_WEIGHTS_STALL_NS - 1;
    ck_assert(!look(&s));
    s.d[0].waiting_ns = HT_WEIGHTS_STALL_NS;
    ck_assert(look(&s));
    check_shares(&s, (double[]){0, 1}, 0, "stalled");
    s.d[0].waiting_ns = 0;
    s.d[0].way[0].busy_ns += 30 * SECOND; /* of the requests that hung */
    ck_assert(look(&s));
    ck_assert(share(&s, 0) > 0);
    double used = run(&s, speed, 20, 1, 1);
    ck_assert_msg(used > .92, "%.3f of the sum", used);
}

RUN_TESTS("weights")
