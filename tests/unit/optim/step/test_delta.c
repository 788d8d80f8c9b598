/* SPDX-License-Identifier: Apache-2.0 */
/* Deltas of steps: a model and its deltas are the parameters, bit for bit; and where a chain of deltas is cut. */
#include "tests/unit/optim/step/fixture.h"

#include <unistd.h>

#include "optim/state/context.h"
#include "optim/state/delta.h"
#include "optim/state/param.h"
#include "optim/state/root.h"

static const char all_keep[] = "adamw lr=1e-2 delta=on delta_max=1 delta_keep=128 durable_every=2";

static struct ht_delta_steps steps(void)
{
    struct ht_delta_steps s;

    ck_assert_int_eq(ht_optim_delta_steps(w.o, ROOT, &s), 0);
    return s;
}

static struct ht_delta *open_delta(uint64_t step)
{
    struct ht_delta *d = NULL;

    ck_assert_int_eq(ht_optim_delta_open(w.o, ROOT, step, &d), 0);
    return d;
}

static struct ht_delta_stat stat_of(uint64_t step)
{
    struct ht_delta *d = open_delta(step);
    struct ht_delta_stat st;

    ht_optim_delta_stat(d, &st);
    ck_assert_uint_eq(st.step, step);
    ht_optim_delta_close(d);
    return st;
}

static uint64_t base_of(uint64_t step)
{
    return stat_of(step).base_step;
}

/* ----------------------------------------------------------------- a reader */

/* A program that has the model, and keeps it up to date. */
static struct reader {
    uint8_t *param[PARAMS_MAX];
    uint64_t step, lineage, wholes, changed;
    bool bf16;
} reader;

static size_t kept_bytes(const struct test_param *p)
{
    return reader.bf16 ? 2 : dtype_bytes(p->dtype);
}

/* The bytes of the parameter as the reader has them. */
static uint8_t *read_param(const struct test_param *p)
{
    size_t bytes = p->n * dtype_bytes(p->dtype);
    uint8_t *now = test_alloc(bytes);

    ck_assert_int_eq(ht_obj_read(p->obj, 0, now, bytes), (ssize_t)bytes);
    for (uint64_t i = 0; i < p->n && kept_bytes(p) != dtype_bytes(p->dtype); i++) {
        uint16_t half = ht_f32_to_bf16(ht_kernel_element(now, HT_DTYPE_F32, i));
        memcpy(now + 2 * i, &half, 2);
    }
    return now;
}

static void take_model(void)
{
    for (unsigned i = 0; i < w.params; i++)
        reader.param[i] = read_param(&w.param[i]);
}

static struct test_param *param_of(uint64_t oid)
{
    for (unsigned i = 0; i < w.params; i++)
        if (w.param[i].oid == oid)
            return &w.param[i];
    ck_abort_msg("no parameter %llu", (unsigned long long)oid);
    return NULL;
}

static uint64_t index_at(const uint8_t *indices, size_t bytes, uint64_t k)
{
    uint64_t index = 0;

    memcpy(&index, indices + k * bytes, bytes);
    return index;
}

/* Reads in pieces of any size. */
static uint8_t *read_in_pieces(struct ht_delta *d, size_t i, bool values, uint64_t bytes)
{
    uint8_t *all = test_alloc(bytes + 8);
    uint64_t at = 0;

    while (at < bytes) {
        size_t len = ht_min_u64(fixture_random(&w) % 30000 + 1, bytes + 8 - at);
        ssize_t n = ht_optim_delta_read(d, i, values, at, all + at, len);
        ck_assert_int_eq(n, (ssize_t)ht_min_u64(len, bytes - at));
        at += (uint64_t)n;
    }
    ck_assert_int_eq(ht_optim_delta_read(d, i, true, bytes, all, 8), 0);
    return all;
}

static void apply_change(struct ht_delta *d, size_t i)
{
    struct ht_delta_change c = *ht_optim_delta_change(d, i);

    struct test_param *p = param_of(c.oid);
    size_t size = kept_bytes(p);
    ck_assert_uint_eq(c.elements, p->n);
    ck_assert_uint_eq(c.dtype, reader.bf16 && p->dtype == HT_DTYPE_F32 ? HT_DTYPE_BF16 : p->dtype);
    ck_assert_uint_gt(c.changed, 0);
    ck_assert_uint_eq(c.index_bytes, 4);
    uint8_t *index = read_in_pieces(d, i, false, c.changed * 4);
    uint8_t *value = read_in_pieces(d, i, true, c.changed * size);
    uint8_t *mine = reader.param[p - w.param];
    for (uint64_t k = 0; k < c.changed; k++) {
        uint64_t e = index_at(index, 4, k);
        ck_assert_uint_lt(e, p->n);
        ck_assert(!k || e > index_at(index, 4, k - 1));
        ck_assert_msg(memcmp(mine + e * size, value + k * size, size) != 0, "element %llu did not change",
                      (unsigned long long)e);
        memcpy(mine + e * size, value + k * size, size);
    }
    reader.changed += c.changed;
}

/* Goes on to the last step, and then has the parameters. */
static void follow(void)
{
    struct ht_delta_steps s = steps();
    uint64_t next = reader.step + 1 > s.first ? reader.step + 1 : s.first;

    for (uint64_t step = next; step <= s.last; step++) {
        struct ht_delta *d = open_delta(step);
        struct ht_delta_stat st;
        ht_optim_delta_stat(d, &st);
        bool whole = !st.base_step || st.base_step != reader.step || st.lineage != reader.lineage;
        if (whole) {
            ck_assert(st.base_step || !st.params);
            take_model(); /* of the last step, and deltas up to there change nothing */
            step = s.last;
            reader.wholes++;
        }
        for (size_t i = 0; i < st.params && !whole; i++)
            apply_change(d, i);
        reader.step = step;
        reader.lineage = st.lineage;
        ht_optim_delta_close(d);
    }
    for (unsigned i = 0; i < w.params; i++) {
        uint8_t *now = read_param(&w.param[i]);
        ck_assert_msg(!memcmp(now, reader.param[i], w.param[i].n * kept_bytes(&w.param[i])),
                      "parameter %u at step %llu", i, (unsigned long long)s.last);
    }
}

static void begin(const char *config, unsigned threads)
{
    fixture_begin_mixed(&w, config, threads);
    reader.bf16 = fixture_config(config).delta_bf16;
}

static void end(void)
{
    reader = (struct reader){0};
    fixture_end();
}

/* Steps from `first` to `last`; the model is followed after each. */
static void train(unsigned first, unsigned last)
{
    for (unsigned step = first; step <= last; step++) {
        fixture_train(&w, step, step);
        follow();
    }
}

/* ------------------------------------------------------------------ content */

static const char *const rules[] = {
    "adamw lr=1e-2 delta=on delta_max=1",
    "adamw lr=1e-3 delta=on delta_max=1 state_bits=8 state_bits_min=0 durable_every=4",
    "adam lr=1e-2 delta=on delta_max=1 durable_every=5 delta_keep=1",
    "sgd lr=1e-2 delta=on delta_max=1 durable_every=100",
    "sgd lr=1e-3 momentum=0.9 nesterov=1 delta=on delta_max=1 max_grad_norm=0.5 skip_nonfinite=1",
    "lion lr=1e-4 delta=on delta_max=1 delta_dtype=bf16",
    "adagrad lr=1e-5 delta=on delta_max=1 redo=on durable_every=3 delta_dtype=bf16",
};

TEST_LOOP(a_model_and_its_deltas_are_the_parameters, HT_ARRAY_SIZE(rules))
{
    begin(rules[_i], 1 + _i % 3);
    /* Each parameter gets its state with its first gradient, and the step after it has a base. */
    fixture_train(&w, 1, 2);
    train(3, 30);
    ck_assert_uint_le(reader.wholes, 1);
    ck_assert_uint_gt(reader.changed, 0);
    ck_assert_uint_eq(fixture_stat(&w).step, 30);
}

/* The same bits as without deltas, whatever the kernels. */
TEST(deltas_change_no_bit_of_an_update)
{
    uint64_t hash[2];

    for (unsigned i = 0; i < 2; i++) {
        fixture_begin_mixed(&w, i ? all_keep : "adamw lr=1e-2 durable_every=2", 2);
        fixture_train(&w, 1, 12);
        hash[i] = fixture_hash(&w);
        fixture_close(&w);
    }
    ck_assert_uint_eq(hash[0], hash[1]);
}

TEST(sums_of_gradients_and_partial_ones_have_deltas)
{
    begin("adamw lr=1e-2 delta=on delta_max=1 accumulate=2 partial=1", 2);
    for (unsigned step = 1; step <= 9; step++) {
        for (unsigned pass = 0; pass < 2; pass++)
            for (unsigned i = 0; i < w.params; i++)
                fixture_send(&w, i, step == 4 ? 5 : step, pass);
        struct ht_grad *g = open_grad(&w, &w.param[1]);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        ht_grad_release(g);
        follow();
        /* A step of a part of one parameter: nothing else has changed. */
        uint8_t *bytes = random_gradient(&w, &w.param[0]);
        g = open_grad(&w, &w.param[0]);
        write_all(g, 4 * 5000, bytes, 4 * 40000);
        close_grad(g);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        struct ht_delta *d = open_delta(2 * step);
        struct ht_delta_stat st;
        ht_optim_delta_stat(d, &st);
        ck_assert_uint_eq(st.params, 1);
        struct ht_delta_change c = *ht_optim_delta_change(d, 0);
        ck_assert_uint_eq(c.oid, w.param[0].oid);
        ck_assert_uint_le(c.changed, 40000);
        ht_optim_delta_close(d);
        follow();
    }
    ck_assert_uint_eq(reader.wholes, 1);
}

/* Bits count, and not values: -0 is not 0, and one NaN is another one. */
TEST(nan_and_negative_zero_are_compared_by_their_bits)
{
    static const uint32_t odd[] = {0x7fc01234, 0xffc00000, 0x7fc00000, 0x80000000, 0, 0x7f800000, 1};
    uint64_t named = 0;

    begin("sgd lr=0.5 delta=on delta_max=1", 1);
    fixture_train(&w, 1, 2);
    ck_assert_int_eq(ht_obj_write(w.param[0].obj, 4000, odd, sizeof(odd)), sizeof(odd));
    uint8_t *zeros = test_alloc(w.param[0].n * 4);
    write_gradient(&w, &w.param[0], zeros);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    ck_assert_uint_eq(base_of(3), 0);
    follow();
    /* Every NaN became a quiet one in step 3. So nothing changes in step 4. */
    write_gradient(&w, &w.param[0], zeros);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    ck_assert_uint_eq(base_of(4), 3);
    ck_assert_uint_eq(stat_of(4).params, 0);
    /* Zero and -0 get other signs, and nothing else does: 0 - 0.5 * (+-0). */
    float minus[3] = {1e-30f, -0.0f, 0.0f};
    memcpy(zeros + 4000 + 12, minus, 8);
    write_gradient(&w, &w.param[0], zeros);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    follow();
    struct ht_delta *d = open_delta(5);
    struct ht_delta_change c = *ht_optim_delta_change(d, 0);
    uint8_t *index = read_in_pieces(d, 0, false, c.changed * 4);
    for (uint64_t k = 0; k < c.changed; k++)
        named |= UINT64_C(1) << (index_at(index, 4, k) - 1000);
    ck_assert_uint_eq(named, UINT64_C(1) << 3);
    ht_optim_delta_close(d);
}

/* Few elements of a large parameter, in the first and in the last of its ranges, and across pieces. */
TEST(a_delta_takes_at_most_seven_bytes_for_an_element)
{
    enum { N = 700001 };
    struct test_param *p = open_with_param("sgd lr=0.5 delta=on delta_keep=4", 2, N);
    uint8_t *g = test_alloc(N * 4);
    const float one = 1;

    for (unsigned step = 1; step <= 6; step++) {
        for (uint64_t e = step; e < N; e += 97)
            memcpy(g + 4 * e, &one, 4);
        memcpy(g + 4 * (N - 1), &one, 4);
        write_gradient(&w, p, g);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        follow();
        memset(g, 0, 4 * N);
    }
    ck_assert_uint_eq(steps().first, 3);
    uint64_t content = 0;
    lock(w.o);
    ht_list_for_each_entry(d, &ht_opt_root_find(w.o, ROOT)->deltas.kept, const struct ht_delta, of_root) {
        ck_assert_uint_le(d->bytes, 7 * d->changed);
        content += d->bytes;
    }
    unlock(w.o);
    ck_assert_uint_gt(content, 0);
    ck_assert_uint_ge(fixture_stat(&w).delta_bytes, content);
    ck_assert_uint_le(fixture_stat(&w).delta_bytes, content + 32768);
}

/* ------------------------------------------------------------------- bounds */

TEST(a_step_that_changes_too_much_is_whole_and_the_next_one_is_not)
{
    struct test_param *p = open_with_param("sgd lr=0.5 delta=on delta_max=0.01", 2, 300000);
    uint8_t *g = test_alloc(p->n * 4);
    const float one = 1;

    for (unsigned step = 1; step <= 8; step++) {
        uint64_t changes = step % 4 == 0 ? 3001 : 3000;
        memset(g, 0, 4 * p->n);
        for (uint64_t k = 0; k < changes; k++)
            memcpy(g + 4 * (k * 90 + step), &one, 4);
        write_gradient(&w, p, g);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        ck_assert_uint_eq(base_of(step), step % 4 == 0 || step == 1 ? 0 : step - 1);
        ck_assert_uint_eq(stat_of(step).lineage, stat_of(1).lineage);
        follow();
    }
    ck_assert_uint_eq(reader.wholes, 3);
}

/* A model of which each step changes all is noted in one of 16 steps, until one changes less. */
TEST(steps_that_change_too_much_are_noted_seldom)
{
    open_with_param("sgd lr=0.5 delta=on delta_max=0.01", 2, 3000);
    struct ht_optim_config c = fixture_config("sgd lr=0.5 delta=on delta_max=1");
    unsigned noted = 0;

    for (unsigned step = 1; step <= 100; step++) {
        lock(w.o);
        noted += !ht_opt_root_find(w.o, ROOT)->deltas.skips;
        unlock(w.o);
        fixture_send(&w, 0, step, 0);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        ck_assert_uint_eq(base_of(step), 0);
    }
    ck_assert_uint_eq(noted, 11); /* the first, which has no base; 2, 3, 5, 9, 17; and each 16th */
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
    for (unsigned step = 101; step <= 110; step++) {
        fixture_send(&w, 0, step, 0);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        ck_assert_uint_eq(base_of(step), step - 1);
    }
}

TEST(the_words_bound_what_is_kept)
{
    struct ht_delta *d;
    struct ht_optim_config c = fixture_config("adamw lr=1e-2 delta=on delta_max=1 delta_keep=3");

    fixture_begin_mixed(&w, "adamw lr=1e-2", 2);
    fixture_train(&w, 1, 3);
    ck_assert_uint_eq(steps().last, 0);
    uint64_t before = ht_optim_meta_bytes(w.o);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
    fixture_train(&w, 4, 9);
    ck_assert_uint_eq(steps().first, 7);
    ck_assert_uint_eq(steps().last, 9);
    ck_assert_int_eq(ht_optim_delta_open(w.o, ROOT, 6, &d), -ENOENT);
    ck_assert_int_eq(ht_optim_delta_open(w.o, ROOT, 10, &d), -ENOENT);
    ck_assert_int_eq(ht_optim_delta_open(w.o, ROOT + 1, 9, &d), -ENOENT);
    ck_assert_uint_gt(ht_optim_meta_bytes(w.o), before);
    /* One that is open stays as it was. */
    d = open_delta(7);
    c.delta_keep = 1;
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
    ck_assert_uint_eq(steps().first, 9);
    struct ht_delta_change change;
    change = *ht_optim_delta_change(d, 0);
    (void)read_in_pieces(d, 0, true, change.changed * dtype_bytes(change.dtype));
    ht_optim_delta_close(d);
    c.delta = false;
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
    ck_assert_uint_eq(steps().last, 0);
    ck_assert_uint_eq(fixture_stat(&w).delta_bytes, 0);
    fixture_train(&w, 10, 11);
    ck_assert_uint_eq(steps().last, 0);
}

TEST(without_room_the_step_is_whole_and_does_not_fail)
{
    begin(all_keep, 2);
    train(1, 6);
    struct ht_obj *filler = fixture_fill(&w, 0);
    train(7, 7);
    ck_assert_uint_eq(base_of(7), 0);
    ck_assert_uint_eq(stat_of(7).lineage, stat_of(6).lineage);
    ck_assert_int_eq(ht_obj_truncate(filler, 0), 0);
    ck_assert_int_eq(ht_store_commit(w.s), 0);
    ht_obj_put(filler);
    train(8, 9);
    ck_assert_uint_eq(base_of(8), 7);
    ck_assert(!fixture_stat(&w).error[0]);
}

TEST(a_full_store_gives_deltas_up_first)
{
    begin(all_keep, 2);
    fixture_train(&w, 1, 10);
    ck_assert_uint_le(steps().first, 2);
    uint64_t first = steps().first, bytes = fixture_stat(&w).delta_bytes;
    ck_assert_uint_gt(ht_store_could_give(w.s), bytes / 2);
    struct ht_delta *d = open_delta(first + 1);
    ck_assert(!ht_store_has_space(w.s, ht_store_available(w.s) + HT_BLOCK_BYTES));
    ck_assert_int_eq(ht_store_make_space(w.s, true), 0);
    ck_assert_uint_ge(steps().first, first + 2); /* the one that is open gives nothing */
    ck_assert_uint_lt(fixture_stat(&w).delta_bytes, bytes);
    ck_assert_uint_eq(steps().last, 10);
    /* A reader has it still. */
    struct ht_delta_change c;
    c = *ht_optim_delta_change(d, 0);
    (void)read_in_pieces(d, 0, false, c.changed * 4);
    ht_optim_delta_close(d);
    follow();
}

/* -------------------------------------------------------------- a cut chain */

static void write_param(struct test_param *p)
{
    static const uint8_t bytes[8] = {1, 2, 3, 4, 5, 6, 7, 8};

    ck_assert_int_eq(ht_obj_write(p->obj, 16, bytes, sizeof(bytes)), sizeof(bytes));
}

static void cut_by_abort(void)
{
    fixture_send(&w, 0, 50, 0);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
}

#define CUT(name, ...)     \
    static void name(void) \
    {                      \
        __VA_ARGS__;       \
    }

CUT(cut_by_a_write, write_param(&w.param[2]))
CUT(cut_by_a_number, ck_assert_int_eq(ht_optim_root_set_step(w.o, ROOT, 100), 0))

static void cut_by_a_reset(void)
{
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, w.param[1].oid, &(struct ht_optim_steer){.claim = 0}), 0);
}

CUT(cut_by_a_name, ck_assert(ht_optim_renamed(w.o, w.param[0].oid)))
CUT(cut_by_a_mount, remount())
CUT(cut_by_a_crash, crash_and_mount())

static void cut_by_a_deletion(void)
{
    fixture_delete(&w, 3);
    ht_obj_put(w.param[3].obj);
    forget_model(&w.param[3]);
    w.params = 3;
}

static void cut_by_a_new_parameter(void)
{
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1000, HT_SMALL_CHUNK_BYTES);
    fixture_send(&w, w.params - 1, 1, 0);
}

static void cut_by_other_words(void)
{
    struct ht_optim_config c = fixture_config(all_keep);

    c.delta_bf16 = reader.bf16 = true;
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
}

static void (*const cuts[])(void) = {
    cut_by_abort,   cut_by_a_write, cut_by_a_number,   cut_by_a_reset,         cut_by_a_name,
    cut_by_a_mount, cut_by_a_crash, cut_by_a_deletion, cut_by_a_new_parameter, cut_by_other_words,
};

/* In the step after it, readers take the model; and then they go on. */
TEST_LOOP(the_chain_is_cut, HT_ARRAY_SIZE(cuts))
{
    begin(all_keep, 2);
    train(1, 7);
    uint64_t lineage = stat_of(7).lineage, wholes = reader.wholes;
    ck_assert_uint_eq(base_of(7), 6);
    cuts[_i]();
    for (unsigned i = 0; i < 2; i++)
        fixture_send(&w, i, 60, 0);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    uint64_t step = fixture_stat(&w).step;
    ck_assert_uint_eq(steps().first, step);
    ck_assert_uint_eq(base_of(step), 0);
    ck_assert_uint_ne(stat_of(step).lineage, lineage);
    reader.step = step - 1; /* also with that number */
    follow();
    ck_assert_uint_eq(reader.wholes, wholes + 1);
    train(71, 73);
    ck_assert_uint_eq(base_of(step + 1), step);
    ck_assert_uint_eq(reader.wholes, wholes + 1);
}

/* While a step is open, and between an update and the end of its step. */
TEST(a_write_during_a_step_cuts_the_chain)
{
    begin(all_keep, 2);
    train(1, 6);
    fixture_send(&w, 0, 7, 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    write_param(&w.param[0]);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    ck_assert_uint_eq(base_of(7), 0);
    follow();
    fixture_send(&w, 0, 8, 0);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    ck_assert_uint_eq(base_of(8), 7);
    follow();
}

/* Steps that an abort or a mount computes again leave nothing. */
TEST(steps_that_are_computed_again_have_no_deltas)
{
    begin("adamw lr=1e-2 delta=on delta_max=1 redo=on durable_every=10", 2);
    train(1, 7);
    ck_assert_uint_gt(fixture_stat(&w).logged_steps, 1);
    crash_and_mount();
    ck_assert_uint_eq(fixture_stat(&w).step, 7);
    ck_assert_uint_eq(steps().last, 0);
    train(8, 9);
    ck_assert_uint_eq(base_of(8), 0);
    ck_assert_uint_eq(base_of(9), 8);
    fixture_send(&w, 0, 50, 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert_uint_eq(steps().last, 0);
    train(10, 11);
    ck_assert_uint_eq(base_of(10), 0);
}

TEST(a_skipped_step_changes_nothing)
{
    begin("adamw lr=1e-2 skip_nonfinite=1 delta=on delta_max=1", 2);
    train(1, 3);
    fixture_train(&w, 4, 4); /* with an infinity */
    ck_assert_uint_eq(fixture_stat(&w).skipped, 1);
    ck_assert_uint_eq(base_of(4), 3);
    ck_assert_uint_eq(stat_of(4).params, 0);
    follow();
    train(5, 6);
}

TEST(asynchronous_steps_have_deltas)
{
    begin(all_keep, 3);
    fixture_train(&w, 1, 2);
    for (unsigned step = 3; step <= 20; step++) {
        fixture_send_most(&w, step);
        ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    }
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_uint_eq(steps().last, 20);
    follow();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    follow();
}

/* ------------------------------------------------------------------ readers */

static atomic_bool stop;

/* What a delta says does not change while steps run, and a delta that is open stays. */
static void *read_again(void *arg)
{
    struct ht_delta *d = arg;
    struct ht_delta_change c;
    struct ht_delta_stat st;
    uint64_t first = 0;

    ht_optim_delta_stat(d, &st);
    for (unsigned round = 0; round < 3 || !stop; round++) {
        uint64_t hash = 0;
        for (size_t i = 0; i < st.params; i++) {
            c = *ht_optim_delta_change(d, i);
            uint64_t bytes = c.changed * dtype_bytes(c.dtype);
            uint8_t *all = malloc(bytes);
            ck_assert_int_eq(ht_optim_delta_read(d, i, true, 0, all, bytes), (ssize_t)bytes);
            hash = ht_hash64(all, bytes, hash);
            ck_assert_int_eq(ht_optim_delta_read(d, i, false, 0, all, bytes), (ssize_t)bytes);
            hash = ht_hash64(all, bytes, hash);
            free(all);
        }
        ck_assert(!round || hash == first);
        first = hash;
    }
    return NULL;
}

TEST(two_readers_read_while_steps_run)
{
    pthread_t thread[2];
    struct ht_delta *d[2];

    begin("adamw lr=1e-2 delta=on delta_max=1 delta_keep=2", 2);
    fixture_train(&w, 1, 7);
    for (unsigned i = 0; i < 2; i++) {
        d[i] = open_delta(6 + i);
        ck_assert_int_eq(pthread_create(&thread[i], NULL, read_again, d[i]), 0);
    }
    fixture_train(&w, 8, 20);
    stop = true;
    for (unsigned i = 0; i < 2; i++) {
        pthread_join(thread[i], NULL);
        ht_optim_delta_close(d[i]);
    }
}

RUN_TESTS("delta", .teardown = end, .timeout_s = 300, .memory = memory_keep)
