/* SPDX-License-Identifier: Apache-2.0 */
/* The simulator: small traces by hand, Belady's policy against an exhaustive search, bounds. */
#include "bench/replay/generate.h"
#include "bench/replay/sim.h"
#include "tests/support/suite.h"

#define MIB (UINT64_C(1) << 20)
#define S UINT64_C(1000000000)

/* The device moves 1 MiB a second each way, and its buffer holds 1 MiB. */
static const struct sim_config slow = {
    .dram_bytes = 2 * MIB,
    .read_rate = MIB,
    .write_rate = MIB,
    .buffer_bytes = MIB,
};

static void read_text(const char *text, struct replay_trace *out)
{
    char err[REPLAY_ERROR_MAX], all[1024];

    snprintf(all, sizeof(all), REPLAY_HEADER "\n%s", text);
    FILE *from = fmemopen(all, strlen(all), "r");
    ck_assert_msg(replay_trace_read(from, out, err) == 0, "%s", err);
    fclose(from);
}

static struct sim_result run_trace(const struct replay_trace *t, const struct sim_config *c,
                                   const struct sim_policy *policy)
{
    struct sim_string s;
    struct sim_result r;

    ck_assert_int_eq(sim_string_make(t, &s), 0);
    ck_assert_int_eq(sim_run(&s, c, policy, &r), 0);
    sim_string_free(&s);
    return r;
}

static struct replay_trace t;

static void free_trace(void)
{
    replay_trace_free(&t);
}

#define TENSORS \
    "tensor a 1048576\ntensor b 1048576\ntensor c 1048576\ntensor two 2097152\nparameter p 1048576 2097152\n"

static const struct {
    const char *text;
    const struct sim_policy *policy;
    uint64_t dram_mib, s, read_mib, written_mib, hits;
} cases[] = {
    /* Reads: cold, and from DRAM. */
    {"read two\nread two\n", &sim_lru, 2, 2, 2, 0, 2},
    {"read two 1048576 1048576\nread two\n", &sim_lru, 2, 2, 2, 0, 1},
    {"compute 3000000\nread a\n", &sim_lru, 2, 4, 1, 0, 0},
    /* A scan of three with room for two. */
    {"read a\nread b\nread c\nread a\nread b\nread c\n", &sim_lru, 2, 6, 6, 0, 0},
    {"read a\nread b\nread c\nread a\nread b\nread c\n", &sim_belady, 2, 4, 4, 0, 2},
    {"read a\nread b\nread c\nread a\nread b\nread c\n", &sim_ideal, 2, 3, 3, 0, 3},
    /* A whole write needs no old content, a part does. */
    {"write a\n", &sim_lru, 1, 0, 0, 0, 0},
    {"write a 0 4096\n", &sim_lru, 1, 1, 1, 0, 0},
    /* The first dirty unit goes into the buffer; the second one waits until it is empty again. */
    {"write a\nwrite b\n", &sim_lru, 1, 0, 0, 1, 0},
    {"write a\nwrite b\nwrite c\n", &sim_lru, 1, 1, 0, 2, 0},
    {"write a\nwrite b\nread c\n", &sim_lru, 1, 2, 1, 2, 0},
    /* Not needed any more: it passes through. */
    {"write a\n", &sim_belady, 1, 0, 0, 1, 0},
    /* An update reads and changes three units. It overlaps with computing, and readers and boundaries wait for it. */
    {"gradient p\nstep\n", &sim_ideal, 1, 3, 3, 0, 0},
    {"gradient p\ncompute 2000000\nstep\n", &sim_ideal, 1, 3, 3, 0, 0},
    {"gradient p\ncompute 9000000\nstep\n", &sim_ideal, 1, 9, 3, 0, 0},
    {"gradient p\nread p\n", &sim_ideal, 1, 3, 3, 0, 1},
    {"gradient p\ngradient p\nread p\n", &sim_ideal, 1, 3, 3, 0, 4},
    {"gradient p\nread a\n", &sim_ideal, 1, 4, 4, 0, 0},
    {"gradient p\nstep\ngradient p\nstep\n", &sim_ideal, 1, 3, 3, 0, 3},
    /* A commit writes what was changed, once. */
    {"write a\nwrite a\ncommit\ncommit\n", &sim_ideal, 1, 1, 0, 1, 1},
    {"gradient p\ncommit\n", &sim_ideal, 1, 6, 3, 3, 0},
    /* Hints: a prefetch overlaps with computing, and its unit is no hit at once; an evicted unit is read again. */
    {"prefetch a\ncompute 1000000\nread a\n", &sim_lru, 2, 1, 1, 0, 0},
    {"prefetch a\nprefetch a\nread a\nread a\n", &sim_lru, 2, 1, 1, 0, 1},
    {"read a\nprefetch a\nread a\n", &sim_lru, 2, 1, 1, 0, 1},
    {"prefetch a\nevict a\nread a\nread a\n", &sim_lru, 2, 2, 2, 0, 1},
    {"prefetch a\ncompute 1000000\nread a\nevict a\nread a\n", &sim_ideal, 1, 1, 1, 0, 1},
    {"prefetch a\nread a\n", &sim_belady, 2, 1, 1, 0, 0},
    /* The store's prefetch takes free memory only, and evicts nothing for it. Without a place it reads nothing. */
    {"prefetch a\ncompute 1000000\nread a\n", &sim_today, 2, 1, 1, 0, 0},
    {"read a\nprefetch b\ncompute 1000000\nread a\nread b\n", &sim_today, 1, 3, 2, 0, 1},
    {"prefetch two\ncompute 2000000\nread two\n", &sim_lru, 0, 4, 2, 0, 0},
    {"prefetch a\ncompute 500000\nread b\n", &sim_lru, 2, 2, 2, 0, 0},
    {"read a\nevict a\nread a\n", &sim_lru, 2, 2, 2, 0, 0},
    {"write a\nevict a\nevict a\nread a\n", &sim_lru, 2, 1, 1, 1, 0},
    /* Larger than DRAM. */
    {"read two\nread a\n", &sim_lru, 1, 3, 3, 0, 0},
    {"read a\nread a\nread b\nread a\n", &sim_today, 4, 2, 2, 0, 2},
};

TEST_LOOP(small_traces_take_the_time_that_arithmetic_says, HT_ARRAY_SIZE(cases))
{
    struct sim_config c = slow;
    char text[512];

    snprintf(text, sizeof(text), "%s%s", TENSORS, cases[_i].text);
    read_text(text, &t);
    c.dram_bytes = cases[_i].dram_mib * MIB;
    struct sim_result r = run_trace(&t, &c, cases[_i].policy);
    ck_assert_uint_eq(r.time_ns, cases[_i].s * S);
    ck_assert_uint_eq(r.read_bytes, cases[_i].read_mib * MIB);
    ck_assert_uint_eq(r.written_bytes, cases[_i].written_mib * MIB);
    ck_assert_uint_eq(r.hits, cases[_i].hits);
    ck_assert_uint_eq(r.time_ns, r.compute_ns + r.stall_ns);
}

/* ---------------------------------------------------- Belady's and all others */

enum { TENSORS_MAX = 4, READS = 9 };

/* The fewest misses of reads [i, READS) if `set` is in DRAM: after a miss any one goes, or the new one passes. */
static unsigned fewest_misses(const uint32_t *read, unsigned i, unsigned set, unsigned room)
{
    if (i == READS)
        return 0;
    unsigned new = 1u << read[i], best;
    if (set & new)
        return fewest_misses(read, i + 1, set, room);
    best = fewest_misses(read, i + 1, set, room);
    if ((unsigned)__builtin_popcount(set) < room)
        best = (unsigned)ht_min_u64(best, fewest_misses(read, i + 1, set | new, room));
    for (unsigned k = 0; k < TENSORS_MAX; k++)
        if (set >> k & 1)
            best = (unsigned)ht_min_u64(best, fewest_misses(read, i + 1, (set & ~(1u << k)) | new, room));
    return best + 1;
}

TEST(no_choice_has_more_hits_than_beladys)
{
    struct sim_config c = slow;
    uint32_t random = 1, n, read[READS];
    char name[2] = "a";

    for (unsigned round = 0; round < 300; round++) {
        replay_trace_init(&t);
        for (unsigned i = 0; i < TENSORS_MAX; i++) {
            name[0] = (char)('a' + i);
            ck_assert_int_eq(replay_trace_add_tensor(&t, name, MIB, 0, &n), 0);
        }
        for (unsigned i = 0; i < READS; i++) {
            random = random * 1664525 + 1013904223;
            read[i] = random >> 16 & (TENSORS_MAX - 1);
            ck_assert_int_eq(replay_trace_add(&t, REPLAY_READ, read[i], 0, MIB), 0);
        }
        for (unsigned room = 1; room < TENSORS_MAX; room++) {
            c.dram_bytes = room * MIB;
            uint64_t hits = run_trace(&t, &c, &sim_belady).hits;
            ck_assert_uint_eq(READS - hits, fewest_misses(read, 0, 0, room));
            ck_assert_uint_le(run_trace(&t, &c, &sim_lru).hits, hits);
        }
        replay_trace_free(&t);
    }
}

static const struct {
    const char *text;
    uint64_t copy_rate, latency_ns, stall_s;
} costs[] = {
    {"read a\nread two\n", 0, 0, 3},      {"read a\nread two\n", MIB, 0, 6}, /* the copies, too */
    {"write a\ngradient p\n", MIB, 0, 8}, {"read a\nread two\n", 0, S, 5},   {"read a\nread a\n", 0, 4 * S, 5},
};

TEST_LOOP(copies_and_latency_are_waits, HT_ARRAY_SIZE(costs))
{
    struct sim_config c = slow;
    char text[512];

    snprintf(text, sizeof(text), "%scompute 1000000\n%s", TENSORS, costs[_i].text);
    read_text(text, &t);
    c.copy_rate = costs[_i].copy_rate;
    c.latency_ns = costs[_i].latency_ns;
    struct sim_result r = run_trace(&t, &c, &sim_ideal);
    ck_assert_uint_eq(r.stall_ns, costs[_i].stall_s * S);
    ck_assert_uint_eq(r.time_ns, r.compute_ns + r.stall_ns);
}

TEST(more_time_than_the_clock_holds_is_refused)
{
    static const char *const texts[] = {"compute 86400000000\n", "read huge\n", "prefetch huge\n"};
    struct sim_config c = slow;
    struct sim_string s;
    struct sim_result r;
    char text[128];

    for (unsigned i = 0; i < HT_ARRAY_SIZE(texts); i++) {
        snprintf(text, sizeof(text), "tensor huge 17592186044416\n%s", texts[i]);
        read_text(text, &t);
        for (unsigned k = 0; i == 0 && k < 100000; k++)
            ck_assert_int_eq(replay_trace_add(&t, REPLAY_COMPUTE, 0, REPLAY_COMPUTE_US_MAX, 0), 0);
        c.read_rate = i ? 1 : MIB;
        ck_assert_int_eq(sim_string_make(&t, &s), 0);
        ck_assert_int_eq(sim_run(&s, &c, &sim_lru, &r), -ERANGE);
        sim_string_free(&s);
        replay_trace_free(&t);
    }
}

/* As in the store's engine: a quarter of 64 MiB is for passing images, and 6 MiB for gradients. */
TEST(gradients_wait_in_three_eighths_of_passing_memory)
{
    struct sim_config c = slow;
    char name[2] = "a";
    uint32_t tensor;

    c.dram_bytes = 64 * MIB;
    for (unsigned n = 1; n <= 8; n++) {
        replay_trace_init(&t);
        for (unsigned i = 0; i < n; i++) {
            name[0] = (char)('a' + i);
            ck_assert_int_eq(replay_trace_add_tensor(&t, name, MIB, MIB, &tensor), 0);
            ck_assert_int_eq(replay_trace_add(&t, REPLAY_GRADIENT, tensor, 0, MIB), 0);
        }
        ck_assert_int_eq(replay_trace_add(&t, REPLAY_COMPUTE, 0, 100000000, 0), 0);
        /* The first update begins at once and takes 2 s. The eighth gradient waits until the second one has ended. */
        ck_assert_uint_eq(run_trace(&t, &c, &sim_lru).stall_ns, n <= 7 ? 0 : 4 * S);
        ck_assert_uint_eq(run_trace(&t, &c, &sim_ideal).stall_ns, 0);
        replay_trace_free(&t);
    }
}

static struct sim_result scan(uint64_t tensors, uint64_t room, const struct sim_policy *policy)
{
    struct generate_config g = {.kind = "scan", .shape = "", .scale = 1, .steps = 12, .tensors = tensors, .bytes = MIB};
    struct sim_config c = slow;

    c.dram_bytes = room * MIB;
    c.warm_steps = 6;
    ck_assert_int_eq(generate_trace(&g, &t), 0);
    struct sim_result r = run_trace(&t, &c, policy);
    replay_trace_free(&t);
    return r;
}

TEST(a_cyclic_scan_reads_only_what_does_not_fit)
{
    struct sim_result belady = scan(24, 16, &sim_belady), lru = scan(24, 16, &sim_lru),
                      today = scan(24, 16, &sim_today);

    ck_assert_uint_eq(belady.steps, 6);
    ck_assert_uint_eq(belady.read_bytes, 6 * 8 * MIB);
    ck_assert_uint_eq(lru.hits, 0);
    /* Three quarters of a small arena are for the working set. */
    ck_assert_uint_ge(today.hits, 6 * 11);
    ck_assert_uint_le(today.hits, belady.hits);
}

static void run_shape(const char *kind, struct sim_config *c, struct sim_result r[4])
{
    static const struct sim_policy *const all[] = {&sim_ideal, &sim_belady, &sim_lru, &sim_today};
    struct generate_config g = {
        .kind = kind, .shape = "125M", .scale = 0.03, .steps = 5, .compute_us = 3000000, .activation_bytes = 40 << 20};

    ck_assert_int_eq(generate_trace(&g, &t), 0);
    c->dram_bytes = t.bytes / 2;
    for (unsigned i = 0; i < 4; i++)
        r[i] = run_trace(&t, c, all[i]);
    replay_trace_free(&t);
}

TEST(all_policies_account_for_their_time_and_bytes)
{
    static const char *const kinds[] = {"gpt", "llama", "gpt-swap", "llama-swap"};
    struct sim_config c = slow;
    struct sim_result r[4];

    c.read_rate = c.write_rate = 10 * MIB;
    c.warm_steps = 2;
    for (unsigned k = 0; k < HT_ARRAY_SIZE(kinds); k++) {
        run_shape(kinds[k], &c, r);
        for (unsigned i = 0; i < 4; i++) {
            ck_assert_uint_eq(r[i].steps, 3);
            ck_assert_uint_eq(r[i].time_ns, r[i].compute_ns + r[i].stall_ns);
            ck_assert_uint_eq(r[i].accesses, r[0].accesses);
            ck_assert_uint_ge(r[i].time_ns, r[0].time_ns);
            ck_assert_uint_le(r[i].hits, r[0].hits);
        }
        ck_assert_uint_eq(r[0].hits, r[0].accesses);
        ck_assert_uint_eq(r[0].read_bytes, 0);
        ck_assert_uint_gt(r[1].hits, r[2].hits);
        ck_assert_uint_gt(r[1].hits, r[3].hits);
    }
}

TEST(noise_changes_compute_times_as_its_seed_says)
{
    struct sim_config c = slow;
    struct sim_result plain[4], noisy[4], again[4], other[4];

    run_shape("gpt", &c, plain);
    c.noise = 0.25;
    run_shape("gpt", &c, noisy);
    run_shape("gpt", &c, again);
    c.seed = 9;
    run_shape("gpt", &c, other);
    ck_assert_uint_eq(noisy[1].time_ns, again[1].time_ns);
    ck_assert_uint_ne(noisy[1].time_ns, other[1].time_ns);
    ck_assert_uint_ne(noisy[1].compute_ns, plain[1].compute_ns);
    ck_assert_uint_gt(noisy[1].compute_ns, plain[1].compute_ns * 3 / 4);
    ck_assert_uint_lt(noisy[1].compute_ns, plain[1].compute_ns * 5 / 4);
}

TEST(units_are_larger_where_the_string_would_be_too_long)
{
    struct sim_string s;
    struct sim_result r;

    read_text("tensor a 17592186044416\nread a\nread a\nparameter p 17592186044416 17592186044416\ngradient p\n", &t);
    ck_assert_int_eq(sim_string_make(&t, &s), 0);
    ck_assert(s.units <= SIM_UNITS_MAX + 3 && s.accesses <= SIM_ACCESSES_MAX);
    ck_assert_uint_gt(s.unit_bytes, MIB);
    ck_assert_int_eq(sim_run(&s, &slow, &sim_belady, &r), 0);
    ck_assert_uint_eq(r.read_bytes, UINT64_C(4) << 44);
    sim_string_free(&s);
}

/* Each has a unit, and its state another one. */
TEST(a_trace_of_many_small_parameters_is_simulated)
{
    struct sim_config c = slow;
    struct sim_string s;
    struct sim_result r;
    uint32_t n, wrong = 0;
    char name[16];

    replay_trace_init(&t);
    for (unsigned i = 0; i < SIM_UNITS_MAX / 2 + 1000; i++) {
        snprintf(name, sizeof(name), "%u", i);
        wrong += replay_trace_add_tensor(&t, name, 4096, 8192, &n) != 0;
    }
    ck_assert_uint_eq(wrong, 0);
    ck_assert_int_eq(replay_trace_add(&t, REPLAY_GRADIENT, n, 0, 4096), 0);
    ck_assert_int_eq(sim_string_make(&t, &s), 0);
    ck_assert_uint_eq(s.units, 2 * t.tensors);
    ck_assert_uint_eq(s.unit_bytes, MIB);
    ck_assert_int_eq(sim_run(&s, &c, &sim_lru, &r), 0);
    ck_assert_uint_eq(r.accesses, 2);
    sim_string_free(&s);
}

TEST(a_hundred_thousand_tensors_take_seconds_at_most)
{
    struct generate_config g = {.kind = "scan", .shape = "", .scale = 1, .steps = 5, .tensors = 100000, .bytes = 4096};
    struct sim_config c = slow;

    c.dram_bytes = 64 * MIB;
    ck_assert_int_eq(generate_trace(&g, &t), 0);
    ck_assert_uint_eq(run_trace(&t, &c, &sim_belady).accesses, 5 * 100000);
    ck_assert_uint_eq(run_trace(&t, &c, &sim_today).accesses, 5 * 100000);
}

RUN_TESTS("sim", .teardown = free_trace)
