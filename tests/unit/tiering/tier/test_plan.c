/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of a step: tables, tiny cases against the best of all choices, the room and the bandwidth that they keep to. */
#include <check.h>
#include <stdlib.h>

#include "tests/support/suite.h"
#include "tiering/tier/plan.h"

enum { MOST = 1024, TINY = 10 };
#define MB UINT64_C(1000000)
#define MS UINT64_C(1000000)
#define FAST (UINT64_C(1) << 60)

static struct ht_plan_tensor tensor[MOST];
static struct ht_plan_access access_[MOST];
static struct ht_plan_input in;
static struct ht_plan plan;
static uint64_t seed;

static void reset(void)
{
    memset(tensor, 0, sizeof(tensor));
    in = (struct ht_plan_input){.tensor = tensor,
                                .access = access_,
                                .read_bytes_per_s = FAST,
                                .write_bytes_per_s = FAST,
                                .write_bytes_max = UINT64_MAX};
    plan = (struct ht_plan){0};
    seed = 1;
}

static void clear(void)
{
    ht_plan_free(&plan);
}

static uint32_t random_below(uint32_t most)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33) % most;
}

static uint32_t add_tensor(uint64_t bytes)
{
    tensor[in.tensors].bytes = bytes;
    return in.tensors++;
}

static void add(uint64_t time_ns, uint32_t t, enum ht_plan_use use)
{
    access_[in.accesses++] = (struct ht_plan_access){time_ns, t, use};
}

static void make(uint64_t step_ns, uint64_t room_bytes)
{
    ht_plan_free(&plan);
    in.step_ns = step_ns;
    in.room_bytes = room_bytes;
    ck_assert_int_eq(ht_plan_make(&in, &plan), 0);
}

/* Bytes in memory at the time of an access: of tensors that are idle, those that stay or were fetched before. */
static uint64_t resident_at(uint32_t at)
{
    uint64_t sum = 0, now = access_[at].time_ns;

    for (uint32_t t = 0; t < in.tensors; t++) {
        uint32_t last = UINT32_MAX;
        uint64_t since;
        for (uint32_t i = 0; i < in.accesses; i++)
            if (access_[i].tensor == t &&
                (access_[i].time_ns <= now || last == UINT32_MAX || access_[last].time_ns > now))
                last = i;
        if (last == UINT32_MAX)
            continue;
        since = now < access_[last].time_ns ? now + in.step_ns : now;
        const struct ht_plan_idle *idle = &plan.idle[last];
        bool away = idle->leaves && since > access_[last].time_ns && since < idle->fetch_ns;
        sum += away ? 0 : tensor[t].bytes;
    }
    return sum;
}

static void check_room(void)
{
    for (uint32_t i = 0; i < in.accesses; i++)
        ck_assert_uint_le(resident_at(i), in.room_bytes);
}

/* --------------------------------------------------------------- tables */

START_TEST(nothing_leaves_when_all_has_room)
{
    for (uint32_t i = 0; i < 10; i++)
        add(i * MS, add_tensor(MB), HT_PLAN_UPDATE);
    make(10 * MS, 10 * MB);
    for (uint32_t i = 0; i < 10; i++)
        ck_assert(!plan.idle[i].leaves);
    ck_assert_uint_eq(plan.read_bytes + plan.write_bytes + plan.late_bytes, 0);
    ck_assert_uint_eq(plan.peak_bytes, 10 * MB);
}
END_TEST

START_TEST(a_step_without_accesses_has_a_plan)
{
    add_tensor(MB);
    make(MS, 0);
    ck_assert_uint_eq(plan.peak_bytes, 0);
}
END_TEST

/* Of n equal tensors that are read one after the other, those stay that have room, beside the one that is read. */
START_TEST(of_a_cyclic_scan_all_stay_that_have_room)
{
    static const uint32_t rooms[] = {2, 3, 10, 32, 63};
    uint32_t room = rooms[_i], stay = 0;

    for (uint32_t i = 0; i < 64; i++)
        add(i * MS, add_tensor(MB), HT_PLAN_READ);
    make(64 * MS, room * MB);
    for (uint32_t i = 0; i < 64; i++)
        stay += !plan.idle[i].leaves;
    /* One place for the tensor that is read, and one for that which is fetched meanwhile. */
    ck_assert_uint_ge(stay + 2, room);
    ck_assert_uint_eq(plan.read_bytes, (64 - stay) * MB);
    ck_assert_uint_eq(plan.late_bytes, 0);
    ck_assert_uint_le(plan.peak_bytes, room * MB);
    check_room();
}
END_TEST

/* A pinned tensor never leaves, however long it is idle, and takes no room from others. */
START_TEST(what_is_pinned_stays_beside_the_room)
{
    uint32_t pinned = add_tensor(50 * MB);

    tensor[pinned].pinned = true;
    add(0, pinned, HT_PLAN_UPDATE);
    for (uint32_t i = 1; i < 20; i++)
        add(i * MS, add_tensor(MB), HT_PLAN_READ);
    make(20 * MS, 19 * MB);
    ck_assert_uint_eq(plan.read_bytes, 0);
    ck_assert_uint_eq(plan.peak_bytes, 19 * MB);
    make(20 * MS, 10 * MB);
    ck_assert(!plan.idle[0].leaves);
    ck_assert_uint_gt(plan.read_bytes, 0);
    ck_assert_uint_le(plan.peak_bytes, 10 * MB);
}
END_TEST

/* Two tensors of one size; one is idle for long, the other for a moment. */
START_TEST(what_is_idle_for_longest_leaves)
{
    uint32_t often = add_tensor(MB), seldom = add_tensor(MB), third = add_tensor(MB);

    add(0, seldom, HT_PLAN_READ);
    for (uint32_t i = 1; i < 20; i++)
        add(i * MS, i % 2 ? often : third, HT_PLAN_READ);
    make(20 * MS, 2 * MB);
    ck_assert(plan.idle[0].leaves);
    for (uint32_t i = 2; i < 18; i++)
        ck_assert(!plan.idle[i].leaves);
    ck_assert_uint_eq(plan.idle[0].next_ns, 20 * MS);
}
END_TEST

/* The read ends with the period, and takes bytes over rate. */
START_TEST(a_read_begins_as_late_as_the_bandwidth_allows)
{
    uint32_t a = add_tensor(10 * MB), b = add_tensor(MB);

    in.read_bytes_per_s = 1000 * MB; /* 1 MB in 1 ms */
    add(0, a, HT_PLAN_READ);
    for (uint32_t i = 1; i < 100; i++)
        add(i * MS, b, HT_PLAN_READ);
    make(100 * MS, 10 * MB);
    ck_assert(plan.idle[0].leaves && !plan.idle[0].late);
    ck_assert_uint_eq(plan.idle[0].next_ns, 100 * MS);
    ck_assert_uint_le(plan.idle[0].fetch_ns, 90 * MS + 1);
    ck_assert_uint_ge(plan.idle[0].fetch_ns, 90 * MS - 1);
}
END_TEST

START_TEST(reads_that_share_the_bandwidth_begin_earlier)
{
    uint32_t a = add_tensor(10 * MB), b = add_tensor(10 * MB), c = add_tensor(MB);

    in.read_bytes_per_s = 1000 * MB;
    add(0, a, HT_PLAN_READ);
    add(1 * MS, b, HT_PLAN_READ);
    for (uint32_t i = 2; i < 100; i++)
        add(i * MS, c, HT_PLAN_READ);
    make(100 * MS, MB);
    uint64_t first = ht_min_u64(plan.idle[0].fetch_ns, plan.idle[1].fetch_ns);
    uint64_t second = ht_max_u64(plan.idle[0].fetch_ns, plan.idle[1].fetch_ns);
    ck_assert(plan.idle[0].leaves && plan.idle[1].leaves);
    ck_assert_uint_le(first, 81 * MS + 1);
    ck_assert_uint_ge(first, 80 * MS - 1);
    ck_assert_uint_le(second, 91 * MS + 1);
}
END_TEST

START_TEST(too_little_bandwidth_makes_reads_late)
{
    in.read_bytes_per_s = 100 * MB; /* a tenth of what is used */
    for (uint32_t i = 0; i < 64; i++)
        add(i * MS, add_tensor(MB), HT_PLAN_READ);
    make(64 * MS, 16 * MB);
    ck_assert_uint_gt(plan.late_bytes, 0);
    ck_assert_uint_le(plan.peak_bytes, 16 * MB);
    ck_assert_uint_ge(plan.read_bytes, 48 * MB);
    ck_assert_uint_le(plan.read_bytes, 50 * MB);
}
END_TEST

START_TEST(what_is_overwritten_is_not_read)
{
    uint32_t a = add_tensor(MB), b = add_tensor(MB);

    add(0, a, HT_PLAN_OVERWRITE);
    add(1 * MS, a, HT_PLAN_READ);
    add(10 * MS, b, HT_PLAN_OVERWRITE);
    add(11 * MS, b, HT_PLAN_READ);
    tensor[a].stored = tensor[b].stored = true;
    make(20 * MS, MB);
    ck_assert(!plan.idle[0].leaves && !plan.idle[2].leaves);
    ck_assert(plan.idle[1].leaves && plan.idle[3].leaves);
    ck_assert_uint_eq(plan.idle[1].fetch_ns, 20 * MS);
    ck_assert_uint_eq(plan.idle[3].fetch_ns, 30 * MS);
    ck_assert_uint_eq(plan.read_bytes, 0);
    ck_assert_uint_eq(plan.write_bytes, 0);
    ck_assert_uint_eq(plan.peak_bytes, MB);
}
END_TEST

/* A gradient goes without a write after its last read; other scratch content is written when it goes. */
START_TEST(what_was_consumed_leaves_for_nothing)
{
    uint32_t a = add_tensor(MB), b = add_tensor(MB);

    for (unsigned round = 0; round < 2; round++) {
        in.accesses = 0;
        add(0, a, HT_PLAN_OVERWRITE);
        add(1 * MS, a, round ? HT_PLAN_READ : HT_PLAN_CONSUME);
        add(10 * MS, b, HT_PLAN_OVERWRITE);
        add(11 * MS, b, round ? HT_PLAN_READ : HT_PLAN_CONSUME);
        make(20 * MS, MB);
        ck_assert(plan.idle[1].leaves && plan.idle[3].leaves);
        ck_assert_uint_eq(plan.read_bytes, 0);
        ck_assert_uint_eq(plan.write_bytes, round ? 2 * MB : 0);
    }
}
END_TEST

/* Clean content goes before dirty, for it costs half. A commit that writes anyway makes them equal. */
START_TEST(clean_leaves_before_dirty)
{
    for (uint32_t i = 0; i < 8; i++)
        add(i * MS, add_tensor(MB), i < 4 ? HT_PLAN_UPDATE : HT_PLAN_READ);
    in.read_bytes_per_s = in.write_bytes_per_s = 10000 * MB;
    make(8 * MS, 6 * MB);
    for (uint32_t i = 0; i < 4; i++)
        ck_assert(!plan.idle[i].leaves);
    ck_assert_uint_eq(plan.write_bytes, 0);
    for (uint32_t i = 0; i < 4; i++)
        tensor[i].stored = true;
    make(8 * MS, 6 * MB);
    ck_assert(plan.idle[0].leaves || plan.idle[1].leaves || plan.idle[2].leaves || plan.idle[3].leaves);
    ck_assert_uint_eq(plan.write_bytes, 0);
}
END_TEST

START_TEST(a_rate_of_zero_moves_nothing_that_way)
{
    for (uint32_t i = 0; i < 8; i++)
        add(i * MS, add_tensor(MB), i < 4 ? HT_PLAN_UPDATE : HT_PLAN_READ);
    in.write_bytes_per_s = 0;
    make(8 * MS, 2 * MB);
    for (uint32_t i = 0; i < 8; i++)
        ck_assert(plan.idle[i].leaves == (i >= 4));
    ck_assert_uint_gt(plan.peak_bytes, 2 * MB);
    in.read_bytes_per_s = 0;
    make(8 * MS, 2 * MB);
    for (uint32_t i = 0; i < 8; i++)
        ck_assert(!plan.idle[i].leaves);
    ck_assert_uint_eq(plan.peak_bytes, 8 * MB);
}
END_TEST

START_TEST(writes_keep_to_their_budget)
{
    for (uint32_t i = 0; i < 8; i++)
        add(i * MS, add_tensor(MB), HT_PLAN_UPDATE);
    in.write_bytes_max = 3 * MB;
    make(8 * MS, 2 * MB);
    ck_assert_uint_eq(plan.write_bytes, 3 * MB);
    in.write_bytes_max = 0;
    make(8 * MS, 2 * MB);
    ck_assert_uint_eq(plan.write_bytes, 0);
    ck_assert_uint_eq(plan.peak_bytes, 8 * MB);
}
END_TEST

START_TEST(a_clock_that_stands_still_makes_a_plan)
{
    for (uint32_t i = 0; i < 8; i++)
        add(5, add_tensor(MB), HT_PLAN_READ);
    make(10, 2 * MB);
    for (uint32_t i = 0; i < 8; i++)
        ck_assert(!plan.idle[i].leaves); /* all are used at once */
    ck_assert_uint_eq(plan.peak_bytes, 8 * MB);
}
END_TEST

static void set_nothing(void)
{
}
static void set_no_bytes(void)
{
    tensor[1].bytes = 0;
}
static void set_no_tensor(void)
{
    access_[2].tensor = 4;
}
static void set_back(void)
{
    access_[2].time_ns = 0;
}
static void set_after_step(void)
{
    access_[3].time_ns = 4 * MS;
}
static void set_no_use(void)
{
    access_[3].use = HT_PLAN_USES;
}
static void set_no_step(void)
{
    in.accesses = 0;
    in.step_ns = 0;
}
static void set_long_step(void)
{
    in.step_ns = UINT64_MAX;
}
static void set_many_tensors(void)
{
    in.tensors = HT_PLAN_TENSORS_MAX + 1;
}
static void set_many_accesses(void)
{
    in.accesses = HT_PLAN_ACCESSES_MAX + 1;
}

static const struct {
    void (*set)(void);
    int rc;
} malformed[] = {
    {set_nothing, 0},           {set_no_bytes, -EINVAL},     {set_no_tensor, -EINVAL}, {set_back, -EINVAL},
    {set_after_step, -EINVAL},  {set_no_use, -EINVAL},       {set_no_step, -EINVAL},   {set_long_step, -EINVAL},
    {set_many_tensors, -E2BIG}, {set_many_accesses, -E2BIG},
};

START_TEST(an_input_without_meaning_is_refused)
{
    for (uint32_t i = 0; i < 4; i++)
        add(i * MS, add_tensor(MB), HT_PLAN_READ);
    in.step_ns = 4 * MS;
    malformed[_i].set();
    ck_assert_int_eq(ht_plan_make(&in, &plan), malformed[_i].rc);
    ck_assert(malformed[_i].rc == 0 || !plan.idle);
}
END_TEST

/* However often it is read: what no access changes is never written. */
START_TEST(what_is_only_read_is_clean)
{
    enum { TENSORS = 10, READS = 70 };

    for (uint32_t i = 0; i < TENSORS; i++)
        for (uint32_t k = 0, t = add_tensor(MB); k < READS; k++)
            add((i * READS + k) * MS, t, HT_PLAN_READ);
    in.write_bytes_per_s = 0;
    make(TENSORS * READS * MS, 3 * MB);
    ck_assert_uint_eq(plan.write_bytes, 0);
    ck_assert_uint_le(plan.peak_bytes, 3 * MB);
}
END_TEST

/* A read that is late does not take room before the plan counts it. */
START_TEST(late_reads_keep_to_the_peak)
{
    uint32_t t[8];

    for (uint32_t i = 0; i < 8; i++)
        t[i] = add_tensor(MB);
    for (uint32_t i = 0; i < 8; i++)
        add(i * MS, t[i], HT_PLAN_READ);
    in.read_bytes_per_s = 1;
    make(8 * MS, 2 * MB);
    ck_assert_uint_gt(plan.late_bytes, 0);
    for (uint32_t i = 0; i < in.accesses; i++)
        ck_assert_uint_le(resident_at(i), plan.peak_bytes);
}
END_TEST

START_TEST(sizes_without_end_do_not_wrap)
{
    for (uint32_t i = 0; i < 8; i++)
        add(i * MS, add_tensor(INT64_MAX), HT_PLAN_READ);
    make(8 * MS, MB);
    ck_assert_uint_eq(plan.read_bytes, UINT64_MAX);
    in.read_bytes_per_s = 0;
    make(8 * MS, MB);
    ck_assert_uint_eq(plan.peak_bytes, UINT64_MAX);
}
END_TEST

/* ----------------------------------------------- against the best of all */

/* Away between two accesses, but in the segment before the second: the read runs there. */
static bool is_away(uint32_t i, uint32_t next, uint32_t k)
{
    uint32_t n = in.accesses, gap = (next + n - i - 1) % n;

    if (next == i)
        gap = n - 1;
    uint32_t place = (k + n - i - 1) % n;
    return gap > 0 && place < gap - 1;
}

static uint32_t next_of(uint32_t i)
{
    uint32_t k = i;

    do
        k = (k + 1) % in.accesses;
    while (access_[k].tensor != access_[i].tensor);
    return k;
}

/* The least bytes that must be read; UINT64_MAX: no choice has room. */
static uint64_t least_read(void)
{
    uint64_t least = UINT64_MAX, all = 0;
    bool used[TINY] = {false};

    for (uint32_t i = 0; i < in.accesses; i++)
        used[access_[i].tensor] = true;
    for (uint32_t t = 0; t < in.tensors; t++)
        all += used[t] ? tensor[t].bytes : 0;
    for (uint32_t leave = 0; leave < 1u << in.accesses; leave++) {
        uint64_t bytes = 0, peak = 0;
        for (uint32_t k = 0; k < in.accesses; k++) {
            uint64_t there = all;
            for (uint32_t i = 0; i < in.accesses; i++)
                if (leave >> i & 1 && is_away(i, next_of(i), k))
                    there -= tensor[access_[i].tensor].bytes;
            peak = ht_max_u64(peak, there);
        }
        for (uint32_t i = 0; i < in.accesses; i++)
            bytes += leave >> i & 1 ? tensor[access_[i].tensor].bytes : 0;
        if (peak <= in.room_bytes)
            least = ht_min_u64(least, bytes);
    }
    return least;
}

/* A step of tensors at random. Rates are so high that each read fits before its access. */
static void make_tiny(uint64_t s, bool equal)
{
    clear();
    reset();
    seed = s;
    uint32_t tensors = 2 + random_below(4), accesses = tensors + random_below(TINY - tensors + 1);
    uint64_t sum = 0, bytes;
    for (uint32_t i = 0; i < tensors; i++) {
        bytes = equal ? MB : (1 + random_below(8)) * MB;
        add_tensor(bytes);
        sum += bytes;
    }
    for (uint32_t i = 0; i < accesses; i++)
        add(i * MS, i < tensors ? i : random_below(tensors), HT_PLAN_READ);
    in.read_bytes_per_s = in.write_bytes_per_s = FAST;
    in.step_ns = accesses * MS;
    in.room_bytes = sum * (30 + random_below(70)) / 100;
    ck_assert_int_eq(ht_plan_make(&in, &plan), 0);
}

static void compare_with_best(bool equal, double most)
{
    uint64_t ours = 0, best = 0;

    for (uint64_t i = 0; i < 1000; i++) {
        make_tiny(i, equal);
        uint64_t least = least_read();
        ck_assert_msg((least == UINT64_MAX) == (plan.peak_bytes > in.room_bytes), "case %u", (unsigned)i);
        if (least == UINT64_MAX)
            continue;
        check_room();
        ck_assert_msg(plan.read_bytes >= least, "case %u", (unsigned)i);
        ours += plan.read_bytes;
        best += least;
    }
    ck_assert_msg((double)ours <= most * (double)best, "%.3f", (double)ours / (double)best);
}

START_TEST(plans_of_equal_tensors_are_nearly_the_best)
{
    compare_with_best(true, 1.05);
}
END_TEST

START_TEST(plans_of_unequal_tensors_are_near_the_best)
{
    compare_with_best(false, 1.10);
}
END_TEST

/* ------------------------------------------------------------ large steps */

/* A GPT: parameters forward and backward, and for each an update of two moments. */
static void add_model(uint32_t layers, uint64_t layer_ns, uint64_t bytes)
{
    for (uint32_t i = 0; i < layers; i++)
        add(i * layer_ns, add_tensor(bytes), HT_PLAN_READ);
    for (uint32_t i = 0; i < 2 * layers; i++)
        add_tensor(bytes);
    for (uint32_t i = layers; i-- > 0;) {
        uint64_t at = (layers + 2 * (layers - 1 - i)) * layer_ns;
        add(at, i, HT_PLAN_UPDATE);
        add(at + layer_ns, layers + i, HT_PLAN_UPDATE);
        add(at + layer_ns, 2 * layers + i, HT_PLAN_UPDATE);
    }
    for (uint32_t i = 0; i < in.tensors; i++)
        tensor[i].stored = true;
}

START_TEST(half_of_the_memory_is_enough_when_the_devices_are_fast)
{
    add_model(100, 10 * MS, MB);
    in.read_bytes_per_s = 400 * MB; /* the state takes half of the step */
    make(3000 * MS, 150 * MB);
    ck_assert_uint_eq(plan.late_bytes, 0);
    ck_assert_uint_le(plan.peak_bytes, 150 * MB);
    ck_assert_uint_ge(plan.read_bytes, 150 * MB);
    ck_assert_uint_le(plan.read_bytes, 180 * MB);
    check_room();
}
END_TEST

/*
 * Reads that are in time fit between their begins and their accesses, the one that is needed first before the others.
 */
START_TEST(reads_that_are_in_time_fit_the_bandwidth)
{
    uint64_t ns_each = 1000 * MS / 120, done = 0;

    add_model(100, 10 * MS, MB);
    in.read_bytes_per_s = 120 * MB;
    make(3000 * MS, 150 * MB);
    bool left[MOST];
    uint32_t reads = 0;
    for (uint32_t i = 0; i < in.accesses; i++)
        reads += left[i] = plan.idle[i].leaves && !plan.idle[i].late;
    ck_assert_uint_ge(reads, 100);
    for (; reads > 0; reads--) {
        uint32_t first = UINT32_MAX;
        uint64_t earliest = UINT64_MAX;
        for (uint32_t i = 0; i < in.accesses; i++)
            if (left[i])
                earliest = ht_min_u64(earliest, plan.idle[i].fetch_ns);
        done = ht_max_u64(done, earliest);
        for (uint32_t i = 0; i < in.accesses; i++)
            if (left[i] && plan.idle[i].fetch_ns <= done &&
                (first == UINT32_MAX || plan.idle[i].next_ns < plan.idle[first].next_ns))
                first = i;
        done += ns_each;
        left[first] = false;
        ck_assert_uint_le(done, plan.idle[first].next_ns + 2 * ns_each);
    }
}
END_TEST

START_TEST(a_plan_of_many_tensors_keeps_to_the_room)
{
    enum { TENSORS = 100000 };
    struct ht_plan_tensor *t = malloc(TENSORS * sizeof(*t));
    struct ht_plan_access *a = malloc(3 * TENSORS * sizeof(*a));

    ck_assert(t && a);
    for (uint32_t i = 0; i < TENSORS; i++)
        t[i] = (struct ht_plan_tensor){(1 + random_below(8)) * MB, i % 2};
    for (uint32_t i = 0; i < 3 * TENSORS; i++)
        a[i] = (struct ht_plan_access){i * UINT64_C(10000), i < TENSORS ? i : random_below(TENSORS), i % 3};
    in.tensor = t;
    in.access = a;
    in.tensors = TENSORS;
    in.accesses = 3 * TENSORS;
    in.read_bytes_per_s = in.write_bytes_per_s = UINT64_C(3) << 37;
    make(3 * TENSORS * UINT64_C(10000), UINT64_C(225000) * MB);
    ck_assert_uint_le(plan.peak_bytes, in.room_bytes);
    ck_assert_uint_gt(plan.read_bytes, 0);
    free(t);
    free(a);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("plan");
    TCase *tc = tcase_create("plan");

    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, reset, clear);
    tcase_add_test(tc, nothing_leaves_when_all_has_room);
    tcase_add_test(tc, a_step_without_accesses_has_a_plan);
    tcase_add_loop_test(tc, of_a_cyclic_scan_all_stay_that_have_room, 0, 5);
    tcase_add_test(tc, what_is_pinned_stays_beside_the_room);
    tcase_add_test(tc, what_is_idle_for_longest_leaves);
    tcase_add_test(tc, a_read_begins_as_late_as_the_bandwidth_allows);
    tcase_add_test(tc, reads_that_share_the_bandwidth_begin_earlier);
    tcase_add_test(tc, too_little_bandwidth_makes_reads_late);
    tcase_add_test(tc, what_is_overwritten_is_not_read);
    tcase_add_test(tc, what_was_consumed_leaves_for_nothing);
    tcase_add_test(tc, clean_leaves_before_dirty);
    tcase_add_test(tc, a_rate_of_zero_moves_nothing_that_way);
    tcase_add_test(tc, writes_keep_to_their_budget);
    tcase_add_test(tc, a_clock_that_stands_still_makes_a_plan);
    tcase_add_test(tc, what_is_only_read_is_clean);
    tcase_add_test(tc, late_reads_keep_to_the_peak);
    tcase_add_test(tc, sizes_without_end_do_not_wrap);
    tcase_add_loop_test(tc, an_input_without_meaning_is_refused, 0, HT_ARRAY_SIZE(malformed));
    tcase_add_test(tc, plans_of_equal_tensors_are_nearly_the_best);
    tcase_add_test(tc, plans_of_unequal_tensors_are_near_the_best);
    tcase_add_test(tc, half_of_the_memory_is_enough_when_the_devices_are_fast);
    tcase_add_test(tc, reads_that_are_in_time_fit_the_bandwidth);
    tcase_add_test(tc, a_plan_of_many_tensors_keeps_to_the_room);
    suite_add_tcase(suite, tc);
    return run_all(suite);
}
