/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words for ranges of elements: each range has the bits that a parameter of its own would have, in ordinary steps and
 * in logged ones that are computed again. Words and logged numbers that cannot be right are refused.
 */
#include "tests/unit/optim/redo/logged.h"

#include <hitrain/format.h>
#include <hitrain/redo.h>

#include "optim/rules/config.h"

static const char *text[PARAMS_MAX]; /* of each parameter's sections, or NULL */

static int override(void *ctx, uint64_t oid, uint64_t as_of, const struct ht_optim_config *base,
                    struct ht_optim_config *out, struct ht_optim_sections *sections, char err[HT_OPTIM_ERROR_MAX])
{
    const struct fixture *me = ctx;

    (void)as_of;
    *out = *base;
    for (unsigned i = 0; i < me->params; i++)
        if (me->param[i].oid == oid && text[i] && sections)
            return ht_optim_sections_parse(text[i], strlen(text[i]), base, sections, err);
    return 0;
}

static void open_as(const char *config, unsigned threads)
{
    memset(&w, 0, sizeof(w));
    memset(text, 0, sizeof(text));
    w.hooks.override = override;
    fixture_open_as(&w, config, threads);
}

static void begin(const char *config, unsigned threads)
{
    open_as(config, threads);
    fixture_mixed_params(&w, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

/* ------------------------------------------------------------------- model */

/* Elements of one section, as a parameter of their own would be updated. */
static void model_section(struct test_param *p, const struct ht_optim_section *s, const uint8_t *g)
{
    uint64_t t = p->t;

    if (s->config.frozen)
        return;
    p->t = t - s->config.missed;
    model_update(p, &s->config, g, s->begin, s->end, false);
    p->t = t;
}

static void model_step(struct test_param *p, const char *words, const uint8_t *g)
{
    struct ht_optim_config base = fixture_config(w.config);
    struct ht_optim_sections s = {.count = 0};
    char err[HT_OPTIM_ERROR_MAX];
    uint64_t at = 0;

    if (words)
        ck_assert_int_eq(ht_optim_sections_parse(words, strlen(words), &base, &s, err), 0);
    p->t++;
    for (size_t i = 0; i < s.count; i++) {
        model_update(p, &base, g, at, s.section[i].begin, false);
        model_section(p, &s.section[i], g);
        at = s.section[i].end;
    }
    model_update(p, &base, g, at, p->n, false);
    ht_optim_sections_free(&s);
}

static void step(void)
{
    for (unsigned i = 0; i < w.params; i++) {
        uint8_t *g = random_gradient(&w, &w.param[i]);
        write_gradient(&w, &w.param[i], g);
        model_step(&w.param[i], text[i], g);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

/* The words of a step. Ranges of 64 KiB begin at multiples of 16384 f32, and of 32768 bf16 elements. */
static void choose(unsigned number)
{
    text[0] = number == 3 ? "0:70001 lr=1e-3"
                          : "0:1 lr=0.5 1:7 lr=0.25 16383:16386 lr=0 32768:49152 maximize=1 70000:70001 lr=1";
    text[1] = number % 2 ? "5:100000 frozen=1" : NULL;
    text[2] = "0:2047 lr=0.125 2047:2050 lr=0.5 2050:4096 frozen=1 32767:32768 lr=0 49999:50000 lr=1";
    text[3] = number > 1 ? "3:4 frozen=1 4:9 missed=1" : NULL;
}

/* -------------------------------------------------------------------- bits */

static const char *const rules[] = {
    "adamw lr=1e-2 weight_decay=0.1", "adam lr=1e-2 weight_decay=0.1", "sgd lr=1e-2 momentum=0.9", "sgd lr=1e-2",
    "lion lr=1e-3 weight_decay=0.1",  "adagrad lr=1e-2 lr_decay=0.1",
};

TEST_LOOP(a_range_has_the_bits_of_a_parameter_of_its_own, HT_ARRAY_SIZE(rules))
{
    begin(rules[_i], 1 + (unsigned)_i % 2);
    for (unsigned i = 1; i <= 4; i++) {
        choose(i);
        step();
        check_all(&w);
    }
    crash_and_check();
}

/* Words of a section that are those of the file change no bit, also where a norm clips all gradients. */
TEST(clipping_acts_on_all_ranges)
{
    uint64_t hash[2];

    for (unsigned with = 0; with < 2; with++) {
        begin("adamw lr=1e-2 max_grad_norm=0.5", 2);
        for (unsigned i = 0; with && i < w.params; i++)
            text[i] = "0:1 lr=1e-2 5:9 lr=1e-2 10:17 eps=1e-8";
        for (unsigned i = 1; i <= 3; i++) {
            for (unsigned k = 0; k < w.params; k++)
                fixture_send(&w, k, i, 0);
            ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        }
        ck_assert_uint_eq(fixture_stat(&w).clipped, 3);
        hash[with] = fixture_hash(&w);
        fixture_close(&w);
    }
    ck_assert(hash[0] == hash[1]);
}

static void refused(const char *words, const char *why)
{
    struct test_param *p = &w.param[3];
    uint8_t *bytes = random_gradient(&w, p);
    struct ht_grad *g = open_grad(&w, p);

    text[3] = words;
    write_all(g, 0, bytes, p->n * 2);
    ck_assert_int_eq(ht_grad_flush(g), -EINVAL);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_msg(strstr(st.error, why) != NULL, "\"%s\" lacks \"%s\"", st.error, why);
    ht_grad_release(g);
}

TEST(words_that_do_not_fit_refuse_the_gradient)
{
    begin(rules[0], 2);
    step();
    refused("0:18 lr=1", "0:18: the range ends after the last element of the parameter, which has 17");
    refused("16:17 missed=2", "16:17: missed= is more than the steps of the parameter, which are 1");
    refused("0:1 momentum=1", "0:1: \"momentum=1\" is no word=value of adamw");
    ck_assert_uint_eq(fixture_stat(&w).step_open, 0);
    text[3] = "16:17 missed=4294967295 frozen=1"; /* its numbers do not count */
    step();
    check_all(&w);
}

/* Its state is to stay as it is, and elements of a block share a scale. */
TEST(a_frozen_range_cuts_no_block_of_state_in_8_bits)
{
    static const char why[] = "with state_bits=8 a frozen range begins and ends at multiples of 256";

    begin("adamw lr=1e-2 state_bits=8 state_bits_min=0", 2);
    refused("16:17 frozen=1", why);
    refused("0:16 frozen=1", why);
    text[3] = "0:17 frozen=1"; /* the last block is a short one */
    uint8_t *bytes = random_gradient(&w, &w.param[3]);
    struct ht_grad *g = open_grad(&w, &w.param[3]);
    write_all(g, 0, bytes, w.param[3].n * 2);
    close_grad(g);
}

/* ------------------------------------------------------------- logged steps */

TEST_LOOP(steps_with_a_low_beta1_are_logged, 2)
{
    begin("adamw lr=1e-2 beta1=0.5 redo=on durable_every=100", 1 + (unsigned)_i);
    step();
    step();
    step();
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 2);
    ck_assert(is_marked(&w, HT_FEAT_REFUSE_NEAR_G));
    check_all(&w);
    crash_and_mount();
    ck_assert(is_marked(&w, HT_FEAT_REFUSE_NEAR_G)); /* older programs would not know the kernel */
    ck_assert_str_eq(fixture_stat(&w).error, "");
    check_all_at(3);
    step();
    check_all(&w);
}

TEST_LOOP(steps_with_sections_are_logged, 2)
{
    begin("adamw lr=1e-2 weight_decay=0.1 redo=on durable_every=100", 1 + (unsigned)_i);
    step();
    step();
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 1);
    ck_assert(is_marked(&w, HT_FEAT_REFUSE_REDO) && !is_marked(&w, HT_FEAT_REFUSE_SECTIONS));
    for (unsigned i = 3; i <= 6; i++) {
        choose(i);
        step();
        ck_assert_uint_eq(fixture_stat(&w).logged_steps, i - 1);
    }
    ck_assert(is_marked(&w, HT_FEAT_REFUSE_SECTIONS));
    check_all(&w);
    memset(text, 0, sizeof(text)); /* a replay asks nobody for words */
    crash_and_mount();
    ck_assert(is_marked(&w, HT_FEAT_REFUSE_SECTIONS)); /* on the device */
    ck_assert_str_eq(fixture_stat(&w).error, "");
    check_all_at(6);
    fixture_send(&w, 0, 7, 0);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    check_all(&w);
    step(); /* the numbers of a replay are none of this step */
    check_all(&w);
    crash_and_check();
}

#define PARAM(place, field)                                                      \
    (sizeof(struct ht_disk_redo) + (place) * sizeof(struct ht_disk_redo_param) + \
     offsetof(struct ht_disk_redo_section, field))
enum { PLACES = 5 }; /* of the step below: a parameter, three sections, a parameter */
#define PIECE(field)                                                            \
    (sizeof(struct ht_disk_redo) + PLACES * sizeof(struct ht_disk_redo_param) + \
     offsetof(struct ht_disk_redo_piece, field))

static const struct {
    const char *what;
    size_t at, bytes;
    uint64_t value;
} wrong[] = {
    {"a version without sections", 0, 4, HT_REDO_VERSION_CODED},
    {"a version that there is not", 0, 4, 5},
    {"a section first", PARAM(0, no_dtype), 1, 0},
    {"a section of another parameter", PARAM(1, object), 8, 77},
    {"no elements", PARAM(1, end), 8, 5},
    {"elements of the section before", PARAM(2, begin), 8, 8},
    {"elements before the section before", PARAM(3, begin), 8, 0},
    {"elements beyond the end", PARAM(3, end), 8, 20002},
    {"a flag that there is not", PARAM(1, frozen), 1, 2},
    {"a sign that there is not", PARAM(1, maximize), 1, 2},
    {"a rule that there is not", PARAM(1, kernel), 1, 200},
    {"a rule of other state", PARAM(1, kernel), 1, HT_KERNEL_LION},
    {"a number that is none", PARAM(2, scalar[1]), 4, 0x7fc00000},
    {"a parameter among sections", PARAM(2, no_dtype), 1, HT_DTYPE_F32},
    {"a piece of a section", PIECE(param), 4, 1},
};

/* Puts it in, sees that neither a mount nor fsck takes the step, and takes it back. */
static void check_refused(const struct ht_redo_step *s, unsigned i)
{
    size_t bytes = wrong[i].bytes;
    struct ht_obj *obj = ht_obj_get(w.s, s->oid);
    uint64_t value = wrong[i].value;

    exchange(obj, s->at + wrong[i].at, bytes, &value);
    ck_assert_msg(value != wrong[i].value, "%s: it is so", wrong[i].what);
    ht_obj_put(obj);
    crash_and_mount();
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_msg(strstr(st.error, "step 2 cannot be computed again") != NULL, "%s: error is \"%s\"", wrong[i].what,
                  st.error);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EIO);
    obj = ht_obj_get(w.s, s->oid);
    exchange(obj, s->at + wrong[i].at, bytes, &value);
    ht_obj_put(obj);
}

TEST(logged_sections_that_cannot_be_right_are_refused)
{
    open_as("adamw lr=1e-2 redo=on durable_every=100", 1);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 20001, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, 1003, HT_SMALL_CHUNK_BYTES);
    text[0] = "5:9 lr=1 9:10 frozen=1 20000:20001 weight_decay=0";
    step();
    step();
    const struct ht_redo_step s = last_step(&w);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(wrong); i++)
        check_refused(&s, i);
    crash_and_mount();
    check_all_at(2);
}

/* ------------------------------------------------------------------ decide */

/* The numbers of a logged step, each as its parameter or section has it. */
static int decide_all(unsigned leave_out)
{
    const struct ht_redo_step s = last_step(&w);
    struct ht_obj *obj = ht_obj_get(w.s, s.oid);
    struct ht_redo_summary read;
    uint8_t *summary;
    int rc = 0;

    ck_assert_int_eq(ht_opt_redo_read(obj, &s, &summary, &read), 0);
    ht_obj_put(obj);
    ck_assert_uint_eq(read.params, PLACES);
    for (uint64_t i = 0; i < read.params && !rc; i++) {
        struct ht_optim_steer by = {.claim = 0};
        struct ht_decision d = {.root = ROOT, .oid = w.param[i == PLACES - 1].oid, .grad_dtype = HT_DTYPE_F32};
        memcpy(d.bytes, read.param + i * sizeof(d.bytes), sizeof(d.bytes));
        if (!ht_opt_redo_is_section(&read, i))
            ht_le64_store(d.bytes + 8, ht_le64_load(d.bytes + 8) + 1); /* the step after it */
        if (i != leave_out)
            rc = ht_optim_decide(w.o, &d, &by);
    }
    free(summary);
    return rc;
}

TEST(numbers_of_a_client_have_sections)
{
    open_as("sgd lr=0.5 redo=on durable_every=100", 1);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 20001, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1003, HT_SMALL_CHUNK_BYTES);
    text[0] = "5:9 lr=1 9:10 frozen=1 20000:20001 lr=0.25";
    step();
    step();
    const char *words = text[0];
    text[0] = "0:1 lr=7";
    ck_assert_int_eq(decide_all(0), -EINVAL); /* no section without its parameter */
    ck_assert_int_eq(decide_all(PLACES), 0);
    text[0] = "0:1 nesterov=1"; /* words have no part in it, not even such that make no sense */
    for (unsigned i = 0; i < w.params; i++) {
        uint8_t *g = random_gradient(&w, &w.param[i]);
        write_gradient(&w, &w.param[i], g);
        model_step(&w.param[i], i ? NULL : words, g);
    }
    commit_and_check();
    text[0] = NULL;
    step(); /* it is over */
    check_all(&w);
    crash_and_check();
}

/* A parameter whose words have many ranges once does not keep memory for them. */
TEST(memory_for_ranges_goes_with_their_words)
{
    enum { RANGES = 2000 };
    char *many = test_alloc(RANGES * 24);
    uint64_t bytes[4];

    open_as("sgd lr=0.5", 1);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 20001, HT_SMALL_CHUNK_BYTES);
    for (unsigned i = 0, at = 0; i < RANGES; i++)
        at += (unsigned)snprintf(many + at, 24, "%u:%u lr=1 ", 2 * i, 2 * i + 1);
    const char *const words[] = {NULL, many, "0:7 lr=1", NULL};
    for (unsigned i = 0; i < 4; i++) {
        text[0] = words[i];
        step();
        check_all(&w);
        bytes[i] = ht_optim_meta_bytes(w.o);
    }
    ck_assert_uint_ge(bytes[1], bytes[0] + RANGES * sizeof(struct ht_scalars));
    ck_assert_uint_lt(bytes[2], bytes[0] + 1000);
    ck_assert_uint_eq(bytes[3], bytes[0]);
    fixture_close(&w);
}

RUN_TESTS("numbers for ranges of elements", .teardown = fixture_end, .timeout_s = 300, .quiet = SILENT,
          .memory = memory_keep)
