/* SPDX-License-Identifier: Apache-2.0 */
/* A plan in use: next uses, steps that match or do not, other work, clocks that jump. */

#include "tests/support/suite.h"
#include "tiering/tier/forecast.h"

enum { OBJECTS = 64 };
#define MS UINT64_C(1000000)
#define BEGIN (100 * MS)
#define STEP (OBJECTS * MS)
#define MIB (UINT64_C(1) << 20)

static struct ht_run run[OBJECTS];
static struct ht_forecast_input in;
static struct ht_forecast *f;

/* Objects of one chunk, which are read one after the other; there is room for half. */
static void reset(void)
{
    for (uint32_t i = 0; i < OBJECTS; i++)
        run[i] = (struct ht_run){.object = i + 1,
                                 .begin_ns = BEGIN + i * MS,
                                 .end_ns = BEGIN + i * MS,
                                 .use = HT_PLAN_READ,
                                 .chunk_shift = 20};
    in = (struct ht_forecast_input){.run = run,
                                    .runs = OBJECTS,
                                    .begin_ns = BEGIN,
                                    .step_ns = STEP,
                                    .now_ns = BEGIN + STEP,
                                    .room_bytes = OBJECTS * MIB / 2};
    f = NULL;
}

static void make(void)
{
    ck_assert_int_eq(ht_forecast_make(&in, &f), 0);
    ck_assert_ptr_nonnull(f);
}

static void clear(void)
{
    ht_forecast_free(f);
}

static struct ht_forecast_use use(uint64_t object, uint64_t at_ns)
{
    const struct ht_run_access a = {.object = object, .now_ns = at_ns, .use = HT_PLAN_READ, .begins = true};

    return ht_forecast_note(f, &a);
}

/* A step from its begin on, n times as slow as planned. */
static uint64_t play(uint64_t from_ns, unsigned slow)
{
    for (uint32_t i = 0; i < OBJECTS; i++)
        ck_assert(use(i + 1, from_ns + i * MS * slow).known);
    return from_ns + STEP * slow;
}

TEST(an_access_tells_when_the_next_one_is)
{
    make();
    uint64_t now = ht_forecast_now(f, BEGIN + STEP);
    for (uint32_t i = 0; i < OBJECTS; i++) {
        struct ht_forecast_use u = use(i + 1, BEGIN + STEP + i * MS);
        ck_assert(u.known);
        ck_assert_uint_eq(u.next_ns, now + STEP + i * MS);
        ck_assert_uint_eq(ht_forecast_place(f, u.next_ns) - ht_forecast_place(f, now + i * MS), HT_FORECAST_PLACES);
    }
    ck_assert(!use(OBJECTS + 1, BEGIN + 2 * STEP).known);
}

TEST(steps_that_match_are_counted)
{
    struct ht_forecast_figures g;
    uint64_t at = BEGIN + STEP;

    make();
    for (unsigned i = 0; i < 5; i++)
        at = play(at, 1);
    ht_forecast_figures(f, at, &g);
    ck_assert_uint_eq(g.steps, 4);
    ck_assert_uint_eq(g.matched_steps, 4);
    ck_assert(!ht_forecast_is_wrong(f) && !ht_forecast_has_drifted(f));
    ck_assert_uint_eq(g.units, OBJECTS);
    ck_assert_uint_eq(g.bytes, OBJECTS * MIB);
    ck_assert_uint_eq(g.stay_bytes, OBJECTS * MIB / 2);
}

TEST(steps_that_take_longer_are_a_drift_and_no_error)
{
    uint64_t at = BEGIN + STEP;

    make();
    for (unsigned i = 0; i < 5; i++)
        at = play(at, 3);
    ck_assert(ht_forecast_has_drifted(f));
    ck_assert(!ht_forecast_is_wrong(f));
}

/* Other accesses between those that are planned. */
TEST(two_steps_with_strangers_are_wrong)
{
    uint64_t at = BEGIN + STEP;

    make();
    for (unsigned i = 0; i < 3; i++) {
        ck_assert(!ht_forecast_is_wrong(f));
        for (unsigned k = 0; k < OBJECTS / 2; k++)
            use(1000 + k, at);
        at = play(at, 1);
    }
    ck_assert(ht_forecast_is_wrong(f));
}

TEST(two_steps_without_a_part_of_the_accesses_are_wrong)
{
    uint64_t at = BEGIN + STEP;

    make();
    for (unsigned i = 0; i < 4; i++)
        for (uint32_t k = 0; k < OBJECTS; k++, at += MS)
            if (k % 2)
                use(k + 1, at);
    ck_assert(ht_forecast_is_wrong(f));
}

TEST(after_many_strangers_the_time_is_set_anew)
{
    make();
    use(1, BEGIN + STEP);
    for (unsigned i = 0; i < 200; i++) /* far ahead of the time */
        use(32, BEGIN + STEP);
    ck_assert(use(33, BEGIN + STEP).known);
}

/* Accesses of an object may be very many: finding the nearest one takes a moment. */
TEST(a_chunk_that_is_used_often_is_found)
{
    static struct ht_run many[HT_RUNS_MIN];

    for (uint32_t i = 0; i < HT_RUNS_MIN; i++)
        many[i] = (struct ht_run){
            .object = i % 2 ? 1 : i + 2, .begin_ns = BEGIN + i * MS, .end_ns = BEGIN + i * MS, .chunk_shift = 20};
    in.run = many;
    in.runs = HT_RUNS_MIN;
    in.step_ns = HT_RUNS_MIN * MS;
    in.now_ns = BEGIN + in.step_ns;
    in.room_bytes = MIB;
    make();
    uint64_t now = ht_forecast_now(f, in.now_ns);
    for (uint32_t i = 0; i + 2 < HT_RUNS_MIN; i++) {
        struct ht_forecast_use u = use(i % 2 ? 1 : i + 2, in.now_ns + i * MS);
        ck_assert(u.known);
        ck_assert_uint_eq(u.next_ns, now + i * MS + (i % 2 ? 2 * MS : in.step_ns));
        u = ht_forecast_next(f, 1, 0);
        ck_assert(u.known);
        ck_assert_uint_eq(u.next_ns, now + (i | 1) * MS);
    }
}

/* However many objects a step has, each is a unit at least; large ones have larger units then. */
TEST(a_step_of_very_many_objects_has_a_plan)
{
    enum { MANY = 150000, LARGE_CHUNKS = 1 << 20 };
    struct ht_run *many = test_alloc((MANY + 1) * sizeof(*many));

    ck_assert(many);
    for (uint32_t i = 0; i <= MANY; i++)
        many[i] =
            (struct ht_run){.object = i + 1, .begin_ns = BEGIN + i * MS, .end_ns = BEGIN + i * MS, .chunk_shift = 20};
    many[MANY].last = LARGE_CHUNKS - 1;
    in.run = many;
    in.runs = MANY + 1;
    in.step_ns = in.runs * MS;
    in.now_ns = BEGIN + in.step_ns;
    in.room_bytes = MANY / 2 * MIB;
    make();
    struct ht_forecast_figures g;
    ht_forecast_figures(f, in.now_ns, &g);
    ck_assert_uint_ge(g.units, MANY + 100);
    ck_assert_uint_le(g.units, 2 * (MANY + 1));
    ck_assert_uint_eq(g.bytes, (MANY + (uint64_t)LARGE_CHUNKS) * MIB);
    for (uint32_t i = 0; i < MANY; i += 1000)
        ck_assert(use(i + 1, in.now_ns + i * MS).known);
}

TEST(what_is_overwritten_is_not_followed)
{
    run[5].use = HT_PLAN_OVERWRITE;
    make();
    ck_assert(!ht_forecast_next(f, 6, 0).known);
    for (uint32_t i = 0; i < OBJECTS; i++)
        ck_assert(use(i + 1, BEGIN + STEP + i * MS).known == (i != 5));
}

/* A file that is read instead of those that are planned. */
TEST(other_work_ends_the_plan)
{
    make();
    for (unsigned i = 0; i < 3 * OBJECTS && !ht_forecast_is_wrong(f); i++)
        ck_assert(!use(1000 + i, BEGIN + STEP).known);
    ck_assert(ht_forecast_is_wrong(f));
}

TEST(other_work_that_is_slow_ends_the_plan_after_two_steps)
{
    make();
    use(1, BEGIN + STEP);
    use(1000, BEGIN + 3 * STEP - MS);
    ck_assert(!ht_forecast_is_wrong(f));
    use(1000, BEGIN + 3 * STEP + MS);
    ck_assert(ht_forecast_is_wrong(f));
}

TEST(the_clock_may_jump)
{
    static const uint64_t jumps[] = {0, 1, BEGIN, BEGIN + 1000 * STEP, INT64_MAX};

    make();
    use(1, BEGIN + STEP);
    uint64_t now = ht_forecast_now(f, BEGIN + STEP);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(jumps); i++) {
        uint64_t then = ht_forecast_now(f, jumps[i]);
        ck_assert_uint_ge(then, now);
        ck_assert_uint_le(then, now + STEP / 4);
    }
    for (unsigned i = 0; i < HT_ARRAY_SIZE(jumps); i++)
        ck_assert(use(2 + i, jumps[i]).known);
}

TEST(a_large_object_is_planned_by_chunks)
{
    struct ht_forecast_part part;
    uint64_t bytes = 0;

    run[0] = (struct ht_run){.object = 1,
                             .begin_ns = BEGIN,
                             .end_ns = BEGIN + STEP - MS,
                             .last = 999,
                             .use = HT_PLAN_READ,
                             .chunk_shift = 20};
    in.runs = 1;
    in.room_bytes = 500 * MIB;
    make();
    for (uint32_t i = 0; ht_forecast_part(f, i, &part); i++) {
        ck_assert_uint_eq(part.object, 1);
        ck_assert_uint_eq(part.offset, bytes);
        bytes += part.bytes;
    }
    ck_assert_uint_eq(bytes, 1000 * MIB);
    struct ht_forecast_figures g;
    ht_forecast_figures(f, in.now_ns, &g);
    ck_assert_uint_ge(g.stay_bytes, 480 * MIB);
    ck_assert_uint_le(g.stay_bytes, 500 * MIB);
    ck_assert(ht_forecast_next(f, 1, 999).known);
    ck_assert(!ht_forecast_next(f, 1, 1000).known && !ht_forecast_next(f, 2, 0).known);
}

TEST(very_large_objects_are_planned_in_larger_parts)
{
    struct ht_forecast_part part;

    for (uint32_t i = 0; i < OBJECTS; i++)
        run[i].last = (1u << 20) - 1;
    in.room_bytes = (uint64_t)OBJECTS << 39;
    make();
    ck_assert(ht_forecast_part(f, 0, &part));
    ck_assert_uint_ge(part.bytes, 512 * MIB);
    ck_assert_uint_le(ht_forecast_bytes(f), 64 * MIB);
}

TEST(what_has_room_needs_no_forecast)
{
    in.room_bytes = OBJECTS * MIB;
    ck_assert_int_eq(ht_forecast_make(&in, &f), 0);
    ck_assert_ptr_null(f);
    in.runs = 0;
    ck_assert_int_eq(ht_forecast_make(&in, &f), 0);
    ck_assert_ptr_null(f);
}

TEST(the_end_of_an_object_counts_what_it_takes)
{
    struct ht_forecast_part part;

    for (uint32_t i = 0; i < OBJECTS; i++)
        run[i].last_units = MIB / 2 / HT_RUN_UNIT;
    ck_assert_int_eq(ht_forecast_make(&in, &f), 0);
    ck_assert_ptr_null(f);
    for (uint32_t i = 0; i < OBJECTS; i++)
        run[i].last = 1;
    run[1].object = 1; /* a second pass over the first chunk alone */
    run[1].last = 0;
    make();
    for (uint32_t i = 0; ht_forecast_part(f, i, &part); i++)
        ck_assert_uint_eq(part.bytes, part.offset ? MIB / 2 : MIB);
}

#define MALFORMED(name, ...) \
    static void name(void)   \
    {                        \
        __VA_ARGS__;         \
    }

MALFORMED(set_no_object, run[3].object = 0)
MALFORMED(set_no_chunks, run[3].first = 2)
MALFORMED(set_before, run[3].begin_ns = BEGIN - 1)
MALFORMED(set_no_use, run[3].use = HT_PLAN_USES)
MALFORMED(set_no_step, in.step_ns = 0)
MALFORMED(set_long_step, in.step_ns = UINT64_MAX / 2)

static void (*const malformed[])(void) = {set_no_object, set_no_chunks, set_before,
                                          set_no_use,    set_no_step,   set_long_step};

TEST_LOOP(runs_without_meaning_are_refused, HT_ARRAY_SIZE(malformed))
{
    malformed[_i]();
    ck_assert_int_eq(ht_forecast_make(&in, &f), -EINVAL);
    ck_assert_ptr_null(f);
}

enum { UPDATES_AT = OBJECTS, PAUSED_STEP = 10 * OBJECTS };

static struct ht_forecast_use update(uint64_t object, uint64_t at_ns)
{
    const struct ht_run_access a = {.object = object, .now_ns = at_ns, .use = HT_PLAN_UPDATE, .begins = true};

    return ht_forecast_note(f, &a);
}

/* Objects are read one after the other, and updated in the other direction; then there is a long pause. */
static void make_paused(struct ht_run both[2 * OBJECTS])
{
    for (uint32_t i = 0; i < OBJECTS; i++) {
        both[i] = run[i];
        both[OBJECTS + i] = run[OBJECTS - 1 - i];
        both[OBJECTS + i].use = HT_PLAN_UPDATE;
        both[OBJECTS + i].begin_ns = both[OBJECTS + i].end_ns = BEGIN + (UPDATES_AT + i) * MS;
    }
    in.run = both;
    in.runs = 2 * OBJECTS;
    in.step_ns = PAUSED_STEP * MS;
    in.now_ns = BEGIN + in.step_ns;
    make();
}

/* In later steps there is no pause: an access is found by its place in the order, and by its kind. */
TEST(a_pause_that_ends_early_makes_no_strangers)
{
    static struct ht_run both[2 * OBJECTS];
    struct ht_forecast_figures g;

    make_paused(both);
    uint64_t at = BEGIN + in.step_ns, now = ht_forecast_now(f, at);
    for (unsigned step = 0; step < 4; step++, now += in.step_ns) {
        for (uint32_t i = 0; i < OBJECTS; i++, at += MS) {
            struct ht_forecast_use u = use(i + 1, at);
            ck_assert(u.known);
            ck_assert_uint_eq(u.next_ns, now + (UPDATES_AT + OBJECTS - 1 - i) * MS);
        }
        for (uint32_t i = OBJECTS; i > 0; i--, at += MS) {
            struct ht_forecast_use u = update(i, at);
            ck_assert(u.known);
            ck_assert_uint_eq(u.next_ns, now + in.step_ns + (i - 1) * MS);
        }
    }
    ht_forecast_figures(f, at, &g);
    ck_assert_uint_eq(g.strangers, 0);
    ck_assert_uint_eq(g.hits, 4 * 2 * OBJECTS);
    ck_assert(!ht_forecast_is_wrong(f));
}

/* Reads come in the order in which they are needed, and an eighth of a step before that. Past ones are left out. */
TEST(reads_come_in_order_and_soon_enough)
{
    struct ht_forecast_fetch r;
    unsigned all = 0;
    uint64_t at = BEGIN + STEP, last = 0;

    make();
    for (unsigned step = 0; step < 3; step++)
        for (uint32_t i = 0; i < OBJECTS; i++, at += MS) {
            use(i + 1, at);
            for (; ht_forecast_fetch(f, at, &r); ht_forecast_fetch_done(f), all++) {
                ck_assert_uint_gt(r.need_ns, ht_forecast_now(f, at));
                ck_assert_uint_le(r.need_ns, ht_forecast_now(f, at) + STEP / 8);
                ck_assert_uint_gt(r.need_ns, last);
                ck_assert_uint_eq(r.object, 1 + r.need_ns / MS % OBJECTS);
                ck_assert(r.first == 0 && r.last == 0);
                last = r.need_ns;
            }
        }
    ck_assert_uint_ge(all, 3 * OBJECTS);
    ck_assert_uint_le(all, 3 * OBJECTS + OBJECTS / 8);
    /* Nothing was read for a while. */
    use(1, at);
    use(9, at + 8 * MS);
    ck_assert(ht_forecast_fetch(f, at + 8 * MS, &r));
    ck_assert_uint_eq(r.object, 10);
    /* It is not read, and comes again. */
    ck_assert(ht_forecast_fetch(f, at + 8 * MS, &r));
    ck_assert_uint_eq(r.object, 10);
}

/* Updates read for themselves. After a step that did not match nothing is read. */
TEST(only_a_plan_that_matches_reads)
{
    struct ht_forecast_fetch r;
    uint64_t at = BEGIN + STEP;

    make();
    ck_assert(ht_forecast_fetch(f, at, &r));
    for (unsigned i = 0; i < 2; i++) {
        ck_assert(!ht_forecast_is_wrong(f));
        for (unsigned k = 0; k < OBJECTS / 2; k++)
            use(1000 + k, at);
        at = play(at, 1);
    }
    ck_assert(!ht_forecast_fetch(f, at, &r));
    clear();
    for (uint32_t i = 0; i < OBJECTS; i++)
        run[i].use = HT_PLAN_UPDATE;
    make();
    ck_assert(!ht_forecast_fetch(f, BEGIN + STEP, &r));
}

TEST(what_stays_is_known)
{
    unsigned stay = 0, leave = 0;

    make();
    for (uint32_t i = 0; i < OBJECTS; i++) {
        enum ht_forecast_stay is = ht_forecast_stays(f, i + 1, 0);
        struct ht_forecast_idle idle;
        struct ht_forecast_part part;
        for (uint32_t k = 0; ht_forecast_part(f, k, &part); k++)
            if (part.object == i + 1) {
                ht_forecast_idle(f, k, 0, &idle);
                ck_assert_int_eq(is, idle.leaves ? HT_FORECAST_LEAVES : HT_FORECAST_STAYS);
            }
        stay += is == HT_FORECAST_STAYS;
        leave += is == HT_FORECAST_LEAVES;
    }
    ck_assert_uint_eq(stay + leave, OBJECTS);
    ck_assert_uint_ge(stay, OBJECTS / 2 - 2);
    ck_assert_uint_le(stay, OBJECTS / 2);
    ck_assert_int_eq(ht_forecast_stays(f, OBJECTS + 1, 0), HT_FORECAST_UNKNOWN);
    ck_assert_int_eq(ht_forecast_stays(f, 1, 1), HT_FORECAST_UNKNOWN);
}

/* Of 32 objects the first 16 are read twice, and there is room for 20. */
TEST(many_uses_stay_and_then_late_ones)
{
    for (uint32_t i = 0; i < 16; i++)
        run[32 + i].object = i + 1;
    in.runs = 48;
    in.room_bytes = 20 * MIB;
    make();
    for (uint32_t i = 0; i < 32; i++)
        ck_assert_int_eq(ht_forecast_stays(f, i + 1, 0), i < 16 || i >= 28 ? HT_FORECAST_STAYS : HT_FORECAST_LEAVES);
}

/* Of gradients, which are written and consumed, all could stay; the plan is not followed for them. */
TEST(what_is_pinned_stays)
{
    for (uint32_t i = 0; i < OBJECTS; i += 2)
        run[i].pinned = true;
    ck_assert_int_eq(ht_forecast_make(&in, &f), 0);
    ck_assert_ptr_null(f); /* the others have room */
    in.room_bytes /= 2;
    make();
    for (uint32_t i = 0; i < OBJECTS; i += 2)
        ck_assert_int_eq(ht_forecast_stays(f, i + 1, 0), HT_FORECAST_STAYS);
    unsigned stay = 0;
    for (uint32_t i = 1; i < OBJECTS; i += 2)
        stay += ht_forecast_stays(f, i + 1, 0) == HT_FORECAST_STAYS;
    ck_assert_uint_le(stay, OBJECTS / 4);
}

TEST(what_is_overwritten_neither_stays_nor_leaves)
{
    for (uint32_t i = 0; i < OBJECTS; i += 2)
        run[i].use = HT_PLAN_OVERWRITE;
    make();
    for (uint32_t i = 0; i < OBJECTS; i++)
        ck_assert((ht_forecast_stays(f, i + 1, 0) == HT_FORECAST_UNKNOWN) == (i % 2 == 0));
}

RUN_TESTS("forecast", .setup = reset, .teardown = clear)
