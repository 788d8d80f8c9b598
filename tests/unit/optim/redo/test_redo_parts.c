/* SPDX-License-Identifier: Apache-2.0 */
/* Logged steps of content that the DRAM tier does not hold are computed again part by part. */
#include <sched.h>

#include "tests/unit/optim/redo/held.h"
#include "tests/unit/optim/redo/logged.h"

#include <hitrain/format.h>

#include "optim/rules/config.h"

enum { STEPS = 6, FULL = 2 }; /* all parameters have had a gradient in the full step */

/*
 * size: of all parameters, in so many times the usual one. sections: numbers for ranges of elements of the first two
 * parameters.
 */
static const struct {
    const char *config;
    unsigned size;
    const char *sections;
} ways[] = {
    {"adamw lr=1e-2 weight_decay=0.1 redo=on durable_every=100", 1},
    {"adamw lr=1e-2 skip_nonfinite=1 max_grad_norm=2 redo=on durable_every=100", 1},
    {"sgd lr=1e-2 momentum=0.9 nesterov=1 redo=on durable_every=100", 1},
    {"sgd lr=1e-2 redo=on durable_every=100", 2},
    {"lion lr=1e-3 redo=on durable_every=100", 1},
    {"adagrad lr=1e-2 redo=on durable_every=100", 1},
    {"adamw lr=1e-2 redo=on durable_every=100", 1, "5:9 lr=1e-3 16000:40000 frozen=1 40000:90000 beta1=0.5 lr=0"},
    {"adamw lr=1e-2 accumulate=2 accumulate_mode=mean max_grad_norm=0.5 redo=on durable_every=100", 1},
};

static const char *sections;

static int override(void *ctx, uint64_t oid, uint64_t as_of, const struct ht_optim_config *base,
                    struct ht_optim_config *out, struct ht_optim_sections *list, char err[HT_OPTIM_ERROR_MAX])
{
    (void)ctx, (void)as_of;
    *out = *base;
    if (!sections || !list || (oid != w.param[0].oid && oid != w.param[1].oid))
        return 0;
    return ht_optim_sections_parse(sections, strlen(sections), base, list, err);
}

/* Ranges of a part lie in several parameters, and those of a parameter in several parts. */
static void begin_as(unsigned way, unsigned threads)
{
    unsigned n = ways[way].size;

    memset(&w, 0, sizeof(w));
    w.hooks.override = override;
    sections = ways[way].sections;
    fixture_open_as(&w, ways[way].config, threads);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, n * 100003, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, n * 300001, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, n * 250000, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F16, HT_DTYPE_F16, 17, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, n * 150001, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

/* The replay goes on for a while that no test chooses. */
static void crash_and_begin(unsigned yields)
{
    fixture_crash(&w);
    w.before_start = hold_updates;
    fixture_mount(&w);
    w.before_start = NULL;
    set_hold(&w, false);
    while (yields--)
        sched_yield();
}

/* Of the last replay. */
static size_t parts(void)
{
    lock(w.o);
    size_t n = ht_opt_root_find(w.o, ROOT)->redo.parts.count;
    unlock(w.o);
    return n;
}

static uint64_t read_of(uint64_t oid)
{
    struct ht_obj *obj = ht_obj_get(w.s, oid);
    struct ht_obj_stat st = {0};

    if (obj)
        ht_obj_stat(obj, &st);
    ht_obj_put(obj);
    return st.device_read_bytes;
}

/* Bytes of parameters and their state, and how many the mount has read. */
static uint64_t content_bytes(uint64_t *out_read)
{
    uint64_t bytes = 0, read = 0;

    lock(w.o);
    for (unsigned i = 0; i < w.params; i++) {
        const struct ht_param *p = ht_opt_param_find(w.o, w.param[i].oid);
        bytes += p->cur.elements * (dtype_bytes(p->cur.dtype) + 8);
        read += read_of(p->oid);
        for (unsigned k = 0; k < p->cur.layout.count; k++)
            read += read_of(p->cur.oid[k]);
    }
    unlock(w.o);
    *out_read = read;
    return bytes;
}

static void check(unsigned step, uint64_t hash)
{
    ht_optim_recovered(w.o);
    ck_assert_str_eq(fixture_stat(&w).error, "");
    ck_assert_uint_eq(fixture_stat(&w).step, step);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, step);
    ck_assert_uint_eq(fixture_stat(&w).replay_steps, 0);
    ck_assert(fixture_hash(&w) == hash);
    ht_optim_verify(w.o);
    ht_store_verify(w.s, false);
}

/* In the order of the steps alone each step would read it. */
TEST(content_is_read_once)
{
    uint64_t read;

    begin_as(0, 2);
    fixture_train(&w, 1, STEPS);
    uint64_t hash = fixture_hash(&w);
    crash_and_mount();
    ck_assert_uint_gt(parts(), 3);
    uint64_t content = content_bytes(&read);
    ck_assert_msg(read < 2 * content, "%llu bytes were read of %llu", (unsigned long long)read,
                  (unsigned long long)content);
    check(STEPS, hash);
}

/* Its bytes lie near each other, and stay in memory from one part to the next. */
TEST(one_step_is_read_once_for_all_parts)
{
    begin_as(0, 2);
    fixture_train(&w, 1, FULL);
    /* Nearly all elements are zero, so the step is logged in few bytes. */
    enum { EVERY = 1000 };
    for (unsigned i = 0; i < w.params; i++) {
        const struct test_param *p = &w.param[i];
        uint8_t *g = calloc(p->n, 4);
        for (uint64_t e = i; e < p->n; e += EVERY)
            put_value(g, p->grad_dtype, e, 0.5f);
        write_gradient(&w, p, g);
        free(g);
    }
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 1);
    uint64_t hash = fixture_hash(&w);
    crash_and_mount();
    ck_assert_uint_gt(parts(), 3);
    struct ht_redo_step step = last_step(&w);
    uint64_t bytes = ht_round_up(step.at + step.bytes, HT_BLOCK_BYTES), read = read_of(step.oid);
    ck_assert_msg(read <= 2 * bytes, "%llu bytes were read of %llu", (unsigned long long)read,
                  (unsigned long long)bytes);
    check(FULL + 1, hash);
}

/* What fits is computed step by step. */
TEST(content_with_room_is_one_part)
{
    fixture_begin_mixed(&w, ways[0].config, 2);
    fixture_train(&w, 1, STEPS);
    uint64_t hash = fixture_hash(&w);
    crash_and_mount();
    ck_assert_uint_eq(parts(), 1);
    check(STEPS, hash);
}

TEST_LOOP(parts_have_the_same_bits, HT_ARRAY_SIZE(ways))
{
    begin_as((unsigned)_i, 1 + _i % 2);
    fixture_train(&w, 1, STEPS);
    uint64_t hash = fixture_hash(&w);
    sections = NULL; /* a replay asks nobody for words */
    crash_and_mount();
    ck_assert_uint_gt(parts(), 1);
    check(STEPS, hash);
    fixture_train(&w, STEPS + 1, STEPS + 1); /* it goes on as if nothing had happened */
    hash = fixture_hash(&w);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    crash_and_mount();
    check(STEPS + 1, hash);
}

TEST(a_crash_in_any_part_begins_again)
{
    begin_as(0, 2);
    fixture_train(&w, 1, STEPS);
    uint64_t hash = fixture_hash(&w);
    for (unsigned yields = 16; yields < 1 << 14; yields *= 4)
        crash_and_begin(yields);
    crash_and_mount();
    check(STEPS, hash);
}

TEST(an_abort_computes_parts)
{
    begin_as(0, 2);
    fixture_train(&w, 1, STEPS);
    uint64_t hash = fixture_hash(&w);
    fixture_send_most(&w, STEPS + 1);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0); /* its updates have run */
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert_uint_gt(parts(), 1);
    check(STEPS, hash);
}

/* _i: sooner or later. */
TEST_LOOP(a_parameter_is_deleted_beside_parts, 4)
{
    begin_as(0, 2);
    fixture_train(&w, 1, STEPS);
    uint64_t hash = fixture_hash(&w);
    crash_and_begin(16u << 2 * _i);
    fixture_delete(&w, 2);
    ht_optim_recovered(w.o);
    ck_assert_str_eq(fixture_stat(&w).error, "");
    ck_assert_uint_eq(fixture_stat(&w).step, STEPS);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0); /* it comes back */
    check(STEPS, hash);
}

/* Nothing of the parts before it stays. */
TEST(a_failure_in_a_later_part_leaves_the_full_step)
{
    begin_as(0, 2);
    fixture_train(&w, 1, FULL);
    uint64_t full = fixture_stored_hash(&w);
    fixture_train(&w, FULL + 1, STEPS);
    uint64_t hash = fixture_hash(&w);
    fixture_crash(&w);
    w.before_start = hold_updates;
    fixture_mount(&w);
    w.before_start = NULL;
    ht_fault_arm(HT_FAULT_OPTIM_UPDATE, 75, false); /* of some 115 updates */
    set_hold(&w, false);
    ht_optim_recovered(w.o);
    ck_assert_uint_ge(ht_fault_passed(HT_FAULT_OPTIM_UPDATE), 75);
    ht_fault_disarm_all();
    ck_assert(strstr(fixture_stat(&w).error, "cannot be computed again"));
    ck_assert_uint_eq(fixture_stat(&w).step, FULL);
    ck_assert(fixture_stored_hash(&w) == full);
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[0].oid, 0, 4, NULL), -EIO);
    crash_and_mount();
    check(STEPS, hash);
}

/* Where the last step says to which range of the first parameter a piece belongs. */
static uint64_t find_range(const struct ht_redo_step *s, struct ht_obj *obj)
{
    struct ht_redo_summary read;
    struct ht_redo_param param;
    struct ht_redo_piece piece;
    uint32_t place;
    uint64_t i = 0;
    uint8_t *bytes;

    ck_assert_int_eq(ht_opt_redo_read(obj, s, &bytes, &read), 0);
    ck_assert_uint_eq(read.version, HT_REDO_VERSION);
    do {
        ck_assert_uint_lt(i, read.pieces);
        ck_assert_int_eq(ht_opt_redo_piece_at(&read, i++, &place, &piece), 0);
        ck_assert_int_eq(ht_opt_redo_param_at(&read, place, &param), 0);
    } while (param.oid != w.param[0].oid);
    uint64_t at = (uint64_t)(read.piece - bytes) + (i - 1) * sizeof(struct ht_disk_redo_piece);
    free(bytes);
    return s->at + at + offsetof(struct ht_disk_redo_piece, range);
}

/* In the row such a range would lie among those of other parameters, in a part that the parameter has no part in. */
TEST(a_range_that_the_parameter_lacks_is_refused)
{
    static const uint64_t ranges[] = {7, 20, 40, UINT32_MAX};

    begin_as(0, 2);
    fixture_train(&w, 1, STEPS);
    uint64_t hash = fixture_hash(&w);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(ranges); i++) {
        const struct ht_redo_step s = last_step(&w);
        struct ht_obj *obj = ht_obj_get(w.s, s.oid);
        uint64_t value = ranges[i], at = find_range(&s, obj);
        exchange(obj, at, 4, &value);
        ht_obj_put(obj);
        crash_and_mount();
        ck_assert_uint_gt(parts(), 3);
        ck_assert_msg(strstr(fixture_stat(&w).error, "step 6 cannot be computed again"), "range %llu is taken",
                      (unsigned long long)ranges[i]);
        obj = ht_obj_get(w.s, s.oid);
        exchange(obj, at, 4, &value);
        ht_obj_put(obj);
        crash_and_mount();
        check(STEPS, hash);
    }
}

RUN_TESTS("redo parts", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
