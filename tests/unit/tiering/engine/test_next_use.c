/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_next_use.c - objects whose next use a program names: they stay until then, and are read before. The tier has
 * 32 MiB, of which they have at most half.
 */

#include "tiering/object/chunk.h"

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/api/stats.h"

enum { DRAM = 32, PASSES = 6, TRIES = 50 };
#define SECOND UINT64_C(1000000000)

static uint8_t buf[MIB];

static void begin(bool threads)
{
    fixture_dram_bytes = DRAM * MIB;
    fresh(512, threads);
}

static void read_chunk(struct ht_obj *o, unsigned i)
{
    ck_assert_int_eq(ht_obj_read(o, i * (uint64_t)MIB, buf, MIB), MIB);
    ck_assert_uint_eq(buf[7], (uint8_t)i);
}

static void read_all(struct ht_obj *o)
{
    for (unsigned i = 0; i < ht_obj_size(o) / MIB; i++)
        read_chunk(o, i);
}

static unsigned resident(struct ht_obj *o)
{
    return (unsigned)(obj_stat(o).resident_bytes / MIB);
}

static void say(struct ht_obj *o, uint64_t after_ns)
{
    ck_assert_int_eq(ht_obj_set_next_use(o, after_ns), 0);
}

static void verify(void)
{
    ht_store_lock(s);
    ht_arena_verify(s->arena);
    ht_store_unlock(s);
}

/* Passes over other content, which come back and so join the working set. */
static void scan(struct ht_obj *o)
{
    for (unsigned i = 0; i < 3; i++)
        read_all(o);
    verify();
}

TEST(what_is_needed_stays_while_others_pass)
{
    begin(false);
    struct ht_obj *o = tensor_of(8), *other = tensor_of(12), *scanned = tensor_of(96);
    read_all(o);
    read_all(other);
    scan(scanned);
    ck_assert_uint_eq(resident(o), 0);
    read_all(o);
    say(o, 1000 * SECOND);
    scan(scanned);
    ck_assert_uint_eq(resident(o), 8);
    for (unsigned i = 0; i < 40 && resident(other) < 12; i++)
        scan(other);
    ck_assert_uint_eq(resident(other), 12); /* it has room beside */
    ck_assert_uint_eq(resident(o), 8);
}

TEST(of_those_the_last_one_goes_first)
{
    static const unsigned after_s[] = {120, 500, 250};
    struct ht_obj *o[3], *scanned;

    begin(false);
    scanned = tensor_of(64);
    for (unsigned i = 0; i < 3; i++) {
        o[i] = tensor_of(8);
        read_all(o[i]);
        say(o[i], after_s[i] * SECOND);
    }
    verify();
    scan(scanned); /* half of the tier is theirs */
    ck_assert_uint_eq(resident(o[0]), 8);
    ck_assert_uint_eq(resident(o[1]), 0);
    ck_assert_uint_ge(resident(o[2]), 7);
}

TEST(what_is_never_needed_goes_before_all)
{
    begin(false);
    struct ht_obj *o = tensor_of(8), *old = tensor_of(24), *other = tensor_of(8);
    read_all(old);
    read_all(o); /* the newest */
    say(o, HT_NEXT_USE_NEVER);
    read_all(other);
    ck_assert_uint_eq(resident(o), 0);
    ck_assert_uint_eq(resident(old), 24);
    uint64_t after_ns;
    ck_assert_int_eq(ht_obj_next_use(o, &after_ns), 0);
    ck_assert(after_ns == HT_NEXT_USE_NEVER);
}

/* The use ends what was said of a chunk; forgetting ends it for all. */
TEST(after_its_use_content_is_as_any_other)
{
    uint64_t after_ns;

    begin(false);
    struct ht_obj *o = tensor_of(8), *scanned = tensor_of(96);
    read_all(o);
    say(o, 1000 * SECOND);
    read_chunk(o, 2);
    read_chunk(o, 3);
    scan(scanned);
    ck_assert_uint_eq(resident(o), 6);
    ck_assert_int_eq(ht_obj_next_use(o, &after_ns), 0);
    ck_assert_uint_le(after_ns, 1000 * SECOND);
    ck_assert_int_eq(ht_obj_forget_next_use(o), 0);
    ck_assert_int_eq(ht_obj_forget_next_use(o), -ENODATA);
    ck_assert_int_eq(ht_obj_next_use(o, &after_ns), -ENODATA);
    scan(scanned);
    ck_assert_uint_eq(resident(o), 0);
}

/* Also without any request: the thread looks when the time has come. */
TEST_LOOP(what_is_needed_soon_is_read_before, 2)
{
    begin(_i);
    struct ht_obj *o = tensor_of(8), *later = tensor_of(4), *others = tensor_of(DRAM);
    read_all(others);
    say(later, 1000 * SECOND);
    for (unsigned i = 0; i < TRIES && resident(o) < 8; i++) { /* it is past in a second if the machine is busy */
        say(o, _i ? 5 * SECOND / 4 : SECOND);
        for (unsigned k = 0; k < 200 && resident(o) < 8; k++)
            if (_i)
                usleep(10000);
            else
                ht_store_readahead(s);
    }
    ck_assert_uint_eq(resident(o), 8);
    ck_assert_uint_eq(resident(later), 0);
    verify();
    read_all(o);
    ck_assert_uint_eq(obj_stat(o).device_read_bytes, 8 * MIB); /* each chunk once */
    ck_assert_uint_ge(stats().readahead_hits, 8);
}

/* Reads for hints take at most half of the tier, and nothing from what is needed earlier. */
TEST(reads_for_hints_leave_the_rest_alone)
{
    begin(false);
    struct ht_obj *first = tensor_of(6), *big = tensor_of(64), *others = tensor_of(DRAM);
    read_all(first);
    for (unsigned i = 0; i < TRIES && resident(big) < 8; i++) {
        read_all(others);
        say(first, SECOND / 2);
        say(big, SECOND);
        for (unsigned k = 0; k < 50 && resident(big) < 8; k++)
            ht_store_readahead(s);
    }
    ck_assert_uint_ge(resident(big), 8);
    ck_assert_uint_le(resident(big), DRAM / 2);
    ck_assert_uint_ge(resident(others), DRAM / 2 - 6);
    verify();
}

/* Half of the tier is taken by hints: a read takes the place of content that is needed later. */
TEST(a_read_takes_the_place_of_later_content)
{
    uint64_t after_ns;

    begin(false);
    struct ht_obj *o = tensor_of(8), *later = tensor_of(DRAM / 2 + 2), *others = tensor_of(DRAM);
    read_all(others);
    read_all(later);
    say(later, 1000 * SECOND);
    for (unsigned i = 0; i < TRIES && resident(o) < 8; i++) {
        say(o, SECOND);
        for (unsigned k = 0; k < 50; k++)
            ht_store_readahead(s);
        /* It is past if the machine is busy. */
        ck_assert(resident(o) == 8 || ht_obj_next_use(o, &after_ns) == -ENODATA);
    }
    ck_assert_uint_eq(resident(o), 8);
    ck_assert_uint_le(resident(later), DRAM / 2 - 6);
    verify();
}

enum { LAYERS = 64 };

/*
 * The plan keeps the layer that is read next. Once no program needs it any more, the next layer that is read takes its
 * place. If the machine is busy in between, the plan's time goes on, and images that are late go before it.
 */
static bool never_used_goes_first(struct ht_obj *o[])
{
    bool gone = false;

    for (unsigned try = 0; try < TRIES && !gone; try++) {
        unsigned next = 1, missing = LAYERS - 1;
        for (unsigned i = 0; i < 3 * LAYERS; i++)
            read_chunk(o[i % LAYERS], 0);
        while (!resident(o[next]))
            next++;
        while (resident(o[missing]))
            missing--;
        say(o[next], HT_NEXT_USE_NEVER);
        read_chunk(o[missing], 0);
        gone = !resident(o[next]);
        int rc = ht_obj_forget_next_use(o[next]);
        ck_assert(rc == 0 || rc == -ENODATA);
    }
    return gone;
}

/* A plan's order has hints; without it they have their own again. */
TEST(hints_count_more_than_a_plan)
{
    struct ht_plan_stats st;
    struct ht_obj *o[LAYERS];

    begin(false);
    struct ht_obj *hinted = tensor_of(4), *scanned = tensor_of(96);
    for (unsigned i = 0; i < LAYERS; i++)
        o[i] = tensor_of(1);
    read_all(hinted);
    say(hinted, 1000 * SECOND);
    for (unsigned i = 0; i < PASSES * LAYERS; i++)
        read_chunk(o[i % LAYERS], 0);
    ck_assert_uint_eq(resident(hinted), 4);
    ht_store_plan(s);
    ht_store_plan_stats(s, &st);
    ck_assert(st.active);
    verify();
    for (unsigned i = 0; i < 3 * LAYERS; i++)
        read_chunk(o[i % LAYERS], 0);
    ck_assert_uint_eq(resident(hinted), 0); /* of all it is needed last */
    ck_assert(never_used_goes_first(o));
    for (unsigned i = 0; i < 50 && st.active; i++) {
        read_all(scanned);
        ht_store_plan(s);
        ht_store_plan_stats(s, &st);
    }
    ck_assert(!st.active);
    verify();
    read_all(hinted);
    say(hinted, 1000 * SECOND);
    scan(scanned);
    ck_assert_uint_eq(resident(hinted), 4);
}

TEST(an_object_may_be_deleted_before_its_use)
{
    begin(false);
    struct ht_obj *o = tensor_of(8), *others = tensor_of(DRAM);
    read_all(others);
    say(o, SECOND);
    delete (o);
    ht_store_readahead(s);
    scan(others);
}

TEST_LOOP(deleted_objects_leave_room_for_other_hints, 2)
{
    begin(_i);
    for (unsigned i = 0; i <= HT_NEXT_USES; i++) {
        struct ht_obj *o = object(MIB, 0);
        say(o, HT_NEXT_USE_NEVER);
        delete (o);
    }
    ht_store_lock(s);
    ck_assert_uint_eq(ht_next_uses_count(&s->next_uses), 0);
    ht_store_unlock(s);
}

/* After a step of the engine that reads what is needed soon. */
static bool hints_lead(void)
{
    struct ht_budget budget = {0};

    (void)ht_readahead_engine.step(s, &budget);
    ht_store_lock(s);
    bool leads = s->next_uses.leads;
    ht_store_unlock(s);
    return leads;
}

/* The time of the last hint is past, or its object is deleted. Then its content is as any other. */
TEST(with_the_last_hint_its_order_ends)
{
    uint64_t after_ns;

    begin(false);
    struct ht_obj *o = tensor_of(8), *never = tensor_of(1), *scanned = tensor_of(96);
    read_all(o);
    say(never, HT_NEXT_USE_NEVER);
    ck_assert(hints_lead());
    delete (never);
    ck_assert(!hints_lead());
    say(o, SECOND / 5);
    while (!ht_obj_next_use(o, &after_ns))
        usleep(1000);
    ck_assert(!hints_lead());
    scan(scanned);
    ck_assert_uint_eq(resident(o), 0);
}

RUN_TESTS("next_use", .timeout_s = 120, .teardown = fixture_end)
