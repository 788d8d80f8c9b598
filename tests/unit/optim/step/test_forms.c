/* SPDX-License-Identifier: Apache-2.0 */
/* test_forms.c - state in 16 and 8 bits: as files of f32, in records, and converted while the model lives. */

#include "optim/rules/forms.h"
#include "optim/state/param.h"
#include "tests/unit/optim/redo/logged.h"

enum { PARAMS = 4, ADAMW_STATES = 2 };

static const char *const words[ADAMW_STATES] = {"exp_avg", "exp_avg_sq"};
static float *value[PARAMS][ADAMW_STATES]; /* what clients have written */

static const char *config_as(const char *rule, unsigned bits)
{
    static char text[3][120];
    char *t = text[bits / 16];

    snprintf(t, sizeof(text[0]), "%s state_bits=%u state_bits_min=0", rule, bits);
    return t;
}

static const char *config_of(unsigned bits)
{
    return config_as("adamw lr=1e-2 weight_decay=0.1", bits);
}

static uint8_t form_of(unsigned bits)
{
    return bits == 8 ? HT_FORM_DYNAMIC : bits == 16 ? HT_FORM_BF16 : HT_FORM_F32;
}

/* Several ranges, the last of which ends inside a block; bf16 with ranges of twice as many elements; few elements. */
static void begin_as(const char *config)
{
    fixture_open_as(&w, config, 2);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 70001, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, 100003, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F16, HT_DTYPE_F16, 17, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, 300000, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

static void begin(unsigned bits)
{
    begin_as(config_of(bits));
}

static ssize_t write_state(unsigned i, unsigned k, uint64_t first, uint64_t n, const float *x)
{
    struct ht_param_desc desc = fixture_desc(&w.param[i]);

    return ht_optim_state_write(w.o, &desc, words[k], first * 4, x, n * 4);
}

static void read_state(unsigned i, unsigned k, uint64_t first, uint64_t n, float *out)
{
    struct ht_param_desc desc = fixture_desc(&w.param[i]);

    ck_assert_int_eq(ht_optim_state_read(w.o, &desc, words[k], first * 4, out, n * 4), (ssize_t)(n * 4));
}

static float random_state(unsigned k)
{
    float x = ldexpf(random_value(&w), (int)(fixture_random(&w) % 24));

    return k ? fabsf(x) : x;
}

static void write_all_states(void)
{
    for (unsigned i = 0; i < PARAMS; i++) {
        for (unsigned k = 0; k < ADAMW_STATES; k++) {
            uint64_t n = w.param[i].n;
            float *x = value[i][k] = test_alloc(n * 4);
            for (uint64_t e = 0; e < n; e++)
                x[e] = random_state(k);
            ck_assert_int_eq(write_state(i, k, 0, n, x), (ssize_t)(n * 4));
        }
    }
}

/* What a form makes of x, range by range, blocks counted from the first element of the range. */
static void round_trip(const struct test_param *p, unsigned k, unsigned form, float *x)
{
    uint32_t chunk = ht_obj_chunk_bytes(p->obj), range = chunk / (uint32_t)dtype_bytes(p->dtype);
    uint8_t *codes = calloc(1, range * 4 + 64 + range / 32);

    for (uint64_t at = 0; at < p->n; at += range) {
        uint64_t n = ht_min_u64(range, p->n - at);
        struct ht_coded c = ht_coded_at(form, codes, n, 0, n);
        c.kind = k ? HT_STATE_EXP_AVG_SQ : HT_STATE_EXP_AVG;
        c.nearest = true;
        ht_codecs_scalar.encode[form](&c, x + at);
        ht_codecs_scalar.decode[form](&c, x + at);
    }
    free(codes);
}

/* bits: the forms through which all values went, one after the other; 0 ends it. */
static void check_states(const unsigned *bits)
{
    ht_optim_verify(w.o);
    ht_store_verify(w.s, false);
    for (unsigned i = 0; i < PARAMS; i++) {
        const struct test_param *p = &w.param[i];
        float *want = test_alloc(p->n * 4), *got = test_alloc(p->n * 4);
        for (unsigned k = 0; k < ADAMW_STATES; k++) {
            memcpy(want, value[i][k], p->n * 4);
            for (const unsigned *b = bits; *b; b++)
                round_trip(p, k, form_of(*b), want);
            read_state(i, k, 0, p->n, got);
            ck_assert_msg(!memcmp(got, want, p->n * 4), "%s of parameter %u differs", words[k], i);
        }
    }
}

/* Of the rule's state, and of masters: one f32, or two bytes and facts on blocks. */
static uint64_t kept_bytes(unsigned bits)
{
    uint64_t bytes = 2 * 100003 + ht_div_up(100003, 2048) * 16 + 17 * 4;

    for (unsigned i = 0; i < PARAMS; i++) {
        const struct test_param *p = &w.param[i];
        uint32_t range = ht_obj_chunk_bytes(p->obj) / (uint32_t)dtype_bytes(p->dtype);
        for (uint64_t at = 0; at < p->n; at += range)
            bytes += ADAMW_STATES * ht_form_bytes(form_of(bits), ht_min_u64(range, p->n - at));
    }
    return bytes;
}

static void reconfigure(unsigned bits)
{
    struct ht_optim_config c = fixture_config(config_of(bits));

    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
}

static void mount_again(unsigned bits)
{
    fixture_crash(&w);
    w.config = config_of(bits);
    fixture_mount(&w);
}

/* -------------------------------------------------------------------- files */

TEST_LOOP(state_is_written_and_read_as_f32, 2)
{
    unsigned bits[] = {_i ? 16 : 8, 0};

    begin(bits[0]);
    write_all_states();
    check_states(bits);
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, kept_bytes(bits[0]));
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    mount_again(bits[0]);
    check_states(bits);
    struct ht_param_desc desc = fixture_desc(&w.param[0]);
    ck_assert_int_eq(ht_optim_state_size(w.o, &desc, "exp_avg"), 70001 * 4);
}

/* New state is zeros without a sign. */
TEST_LOOP(new_state_reads_as_zeros, 2)
{
    float x[300], one = 1;

    begin(_i ? 16 : 8);
    ck_assert_int_eq(write_state(0, 1, 20000, 1, &one), 4);
    for (unsigned k = 0; k < ADAMW_STATES; k++) {
        read_state(0, k, 40000, 300, x);
        for (unsigned e = 0; e < 300; e++)
            ck_assert(x[e] == 0 && !signbit(x[e]));
    }
}

/* Elements of other blocks keep their bits, whatever part of a block is written. */
TEST_LOOP(a_part_of_a_block_is_written, 2)
{
    static const struct {
        uint64_t first, n;
    } parts[] = {{0, 1}, {255, 2}, {300, 100}, {16383, 2}, {16384 - 256, 512}, {70000, 1}, {5, 65530}};
    float *x = test_alloc(70001 * 4), *got = test_alloc(70001 * 4);
    unsigned form = form_of(_i ? 16 : 8);

    begin(_i ? 16 : 8);
    write_all_states();
    read_state(0, 0, 0, 70001, x);
    for (size_t i = 0; i < HT_ARRAY_SIZE(parts); i++) {
        uint64_t first = parts[i].first, n = parts[i].n;
        for (uint64_t e = first; e < first + n; e++)
            x[e] = random_state(0);
        ck_assert_int_eq(write_state(0, 0, first, n, x + first), (ssize_t)(n * 4));
        round_trip(&w.param[0], 0, form, x);
        read_state(0, 0, 0, 70001, got);
        ck_assert_int_eq(memcmp(got, x, 70001 * 4), 0);
        float part[3];
        uint64_t at = ht_min_u64(first, 69998);
        read_state(0, 0, at, 3, part);
        ck_assert_int_eq(memcmp(part, x + at, 12), 0);
    }
}

TEST_LOOP(values_that_have_no_such_form_are_refused, 2)
{
    float bad[] = {NAN, INFINITY, -INFINITY, 3.4e38f}, x[600], got[600];
    unsigned bits = _i ? 16 : 8, count = _i ? 4 : 3;

    begin(bits);
    for (unsigned e = 0; e < 600; e++)
        x[e] = 1 + (float)e / 1024;
    ck_assert_int_eq(write_state(0, 0, 1000, 600, x), 2400);
    read_state(0, 0, 1000, 600, got);
    for (unsigned i = 0; i < count; i++) {
        float y[600];
        memset(y, 0, sizeof(y));
        y[321] = bad[i];
        ck_assert_int_eq(write_state(0, 0, 1000, 600, y), -EINVAL);
        ck_assert_ptr_nonnull(strstr(fixture_stat(&w).error, "exp_avg: element 1321 is not finite"));
        read_state(0, 0, 1000, 600, y);
        ck_assert_int_eq(memcmp(y, got, sizeof(y)), 0);
    }
    float minus = -1, none = -0.0f;
    ck_assert_int_eq(write_state(0, 1, 7, 1, &minus), -EINVAL);
    ck_assert_ptr_nonnull(strstr(fixture_stat(&w).error, "exp_avg_sq: element 7 is negative"));
    ck_assert_int_eq(write_state(0, 1, 7, 1, &none), 4);
    ck_assert_int_eq(write_state(0, 0, 7, 1, &minus), 4);
}

/* -------------------------------------------------------------- conversion */

static const unsigned pairs[][2] = {{32, 16}, {32, 8}, {16, 32}, {16, 8}, {8, 32}, {8, 16}};

TEST_LOOP(live_state_is_converted_by_the_next_commit, HT_ARRAY_SIZE(pairs))
{
    unsigned from = pairs[_i][0], to = pairs[_i][1];

    begin(from);
    write_all_states();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    reconfigure(to);
    check_states((unsigned[]){from, 0});
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    check_states((unsigned[]){from, to, 0});
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, kept_bytes(to));
    check_owners(&w);
    mount_again(to);
    check_states((unsigned[]){from, to, 0});
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, kept_bytes(to));
}

/* The decoded value of a code is nearest to that code. */
TEST(eight_bits_come_back_from_f32)
{
    begin(8);
    write_all_states();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (unsigned i = 0; i < 3; i++) {
        reconfigure(32);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        check_states((unsigned[]){8, 0});
        reconfigure(8);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        check_states((unsigned[]){8, 0});
    }
}

TEST(a_conversion_that_fails_changes_nothing)
{
    begin(32);
    write_all_states();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    reconfigure(8);
    ht_fault_arm(HT_FAULT_OPTIM_CONVERT, 1, false);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -ENOSPC);
    ck_assert_ptr_nonnull(strstr(fixture_stat(&w).error, "no space for both forms"));
    check_states((unsigned[]){32, 0});
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, kept_bytes(32));
    reconfigure(32);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    check_states((unsigned[]){32, 0});
    reconfigure(16);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    check_states((unsigned[]){32, 16, 0});
}

/* Its content cannot be written, so the commit fails after it. */
TEST(an_abort_takes_a_conversion_back)
{
    begin(32);
    write_all_states();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    reconfigure(8);
    ht_fault_arm(HT_FAULT_STORE_WRITE, 1, true);
    ck_assert_int_lt(ht_optim_commit(w.o, ROOT), 0);
    ht_fault_disarm_all();
    check_states((unsigned[]){32, 8, 0});
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0); /* the words go back, too */
    check_states((unsigned[]){32, 0});
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, kept_bytes(32));
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    check_states((unsigned[]){32, 0});
    mount_again(32);
    check_states((unsigned[]){32, 0});
}

/* Two forms of all state do not fit beside each other, and then they do. */
TEST(a_full_store_keeps_the_form)
{
    begin(8);
    write_all_states();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_obj_attr attr = {.oid = ht_store_new_id(w.s), .chunk_bytes = HT_CHUNK_BYTES};
    struct ht_obj *filler;
    ck_assert_int_eq(ht_obj_create(w.s, &attr, &filler), 0);
    void *bytes = test_alloc(MIB);
    memset(bytes, 7, MIB);
    while (ht_obj_write(filler, ht_obj_size(filler), bytes, MIB) > 0)
        ;
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    reconfigure(32);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -ENOSPC);
    check_states((unsigned[]){8, 0});
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, kept_bytes(8));
    ck_assert_int_eq(ht_obj_truncate(filler, 0), 0);
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    check_states((unsigned[]){8, 32, 0});
    ht_obj_put(filler);
}

TEST(words_do_not_change_forms_while_a_step_is_open)
{
    struct ht_optim_config c = fixture_config(config_of(8));

    begin(32);
    step_param(&w, &w.param[0]);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), -EAGAIN);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
}

/* -------------------------------------------------------------------- steps */

static uint32_t salt_of(unsigned i)
{
    struct ht_param *p = ht_opt_param_get(w.o, w.param[i].oid);
    uint32_t salt = p->cur.layout.salt;

    ht_opt_param_put(p);
    return salt;
}

/* The model's state as an update leaves it. */
static void code_model(unsigned i, unsigned bits, uint32_t salt)
{
    const struct test_param *p = &w.param[i];
    struct ht_optim_config config = fixture_config(w.config);
    uint32_t range = ht_obj_chunk_bytes(p->obj) / (uint32_t)dtype_bytes(p->dtype);
    uint8_t *codes = calloc(1, range * 4 + 64 + range / 32);
    const uint8_t *kind = ht_kernel_kinds(ht_rule_kernel(&config));
    unsigned states = ht_kernel_states(ht_rule_kernel(&config)), form = form_of(bits);
    float *state[] = {p->m, p->v};

    for (uint64_t at = 0; at < p->n; at += range) {
        uint64_t n = ht_min_u64(range, p->n - at);
        for (unsigned k = 0; k < states; k++) {
            struct ht_coded c = ht_coded_at(form, codes, n, 0, n);
            c.kind = kind[k];
            c.salt = salt;
            c.t = p->t;
            c.element = at;
            ht_codecs_scalar.encode[form](&c, state[k] + at);
            ht_codecs_scalar.decode[form](&c, state[k] + at);
        }
    }
    free(codes);
}

static void step_in(unsigned bits)
{
    step_once();
    for (unsigned i = 0; i < w.params; i++)
        code_model(i, bits, salt_of(i));
}

static const char *const rules[] = {
    "adamw lr=1e-2 weight_decay=0.1", "adam lr=1e-2 weight_decay=0.1", "sgd lr=1e-2 momentum=0.9", "sgd lr=1e-2",
    "lion lr=1e-3 weight_decay=0.1",  "adagrad lr=1e-2 lr_decay=0.1",
};

TEST_LOOP(a_step_is_that_of_the_coded_state, 2 * HT_ARRAY_SIZE(rules))
{
    unsigned bits = _i % 2 ? 16 : 8;

    begin_as(config_as(rules[_i / 2], bits));
    for (unsigned i = 0; i < 4; i++) {
        step_in(bits);
        check_all(&w);
    }
    crash_and_check();
    step_in(bits);
    check_all(&w);
}

/* Updates of the step have run in the form of before. */
TEST_LOOP(a_step_converts_at_its_end, HT_ARRAY_SIZE(pairs))
{
    unsigned from = pairs[_i][0], to = pairs[_i][1];

    begin(from);
    step_in(from);
    check_all(&w);
    reconfigure(to);
    w.config = config_of(to);
    step_all(&w);
    uint32_t salt[PARAMS];
    for (unsigned i = 0; i < PARAMS; i++)
        salt[i] = salt_of(i);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (unsigned i = 0; i < PARAMS; i++) {
        code_model(i, from, salt[i]);
        round_trip(&w.param[i], 0, form_of(to), w.param[i].m);
        round_trip(&w.param[i], 1, form_of(to), w.param[i].v);
    }
    check_all(&w);
    crash_and_check();
    step_in(to);
    check_all(&w);
}

/* Logged steps are computed again with the same hashes. */
TEST_LOOP(a_replay_has_the_same_bits, 2)
{
    unsigned bits = _i ? 16 : 8;

    begin_as(config_as("adamw lr=1e-2 redo=on durable_every=10", bits));
    for (unsigned i = 0; i < 4; i++)
        step_in(bits);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 3);
    check_all(&w);
    crash_and_check();
}

/* A step that is logged says in which form its state was. */
TEST(a_conversion_ends_the_row_of_logged_steps)
{
    begin_as(config_as("adamw lr=1e-2 redo=on durable_every=10", 32));
    step_in(32);
    step_in(32);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 1);
    w.config = config_as("adamw lr=1e-2 redo=on durable_every=10", 16);
    struct ht_optim_config c = fixture_config(w.config);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
    step_once();
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 0);
    for (unsigned i = 0; i < PARAMS; i++) {
        round_trip(&w.param[i], 0, HT_FORM_BF16, w.param[i].m);
        round_trip(&w.param[i], 1, HT_FORM_BF16, w.param[i].v);
    }
    check_all(&w);
    step_in(16);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 1);
    crash_and_check();
}

/* Older programs would take the record for damaged. Before the first one they may open the store. */
TEST_LOOP(the_superblock_says_that_there_are_forms, 2)
{
    begin(32);
    write_all_states();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert(!is_marked(&w, HT_FEAT_REFUSE_FORMS));
    if (_i) { /* new state, not converted */
        fixture_close(&w);
        begin(16);
        write_all_states();
        ck_assert(is_marked(&w, HT_FEAT_REFUSE_FORMS));
    } else {
        reconfigure(8);
        ck_assert(!is_marked(&w, HT_FEAT_REFUSE_FORMS));
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    }
    ck_assert(is_marked(&w, HT_FEAT_REFUSE_FORMS));
}

/* Small parameters, and those of which the words say so, keep f32. */
TEST(small_parameters_keep_f32)
{
    begin_as("adamw lr=1e-2 state_bits=8");
    write_all_states();
    float x[17];
    read_state(2, 0, 0, 17, x);
    ck_assert_int_eq(memcmp(x, value[2][0], sizeof(x)), 0);
    read_state(0, 0, 0, 17, x);
    ck_assert_int_ne(memcmp(x, value[0][0], sizeof(x)), 0);
}

/* A closer converts, too, while the next step's gradients wait. */
TEST(an_asynchronous_step_converts)
{
    begin(32);
    step_in(32);
    reconfigure(16);
    w.config = config_of(16);
    step_all(&w);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    for (unsigned i = 0; i < PARAMS; i++) {
        round_trip(&w.param[i], 0, HT_FORM_BF16, w.param[i].m);
        round_trip(&w.param[i], 1, HT_FORM_BF16, w.param[i].v);
    }
    step_in(16);
    check_all(&w);
}

RUN_TESTS("forms", .teardown = fixture_end, .timeout_s = 300)
