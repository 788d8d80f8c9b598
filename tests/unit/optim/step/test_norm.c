/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clipping, loss scales and skipped steps: results that depend on all gradients of a step are exact, however ranges are
 * cut.
 */
#include "tests/unit/optim/step/fixture.h"

#include "optim/state/context.h"
#include "optim/state/param.h"

static double norm_of(uint8_t *const g[])
{
    double sum = 0;

    for (unsigned i = 0; i < w.params; i++) {
        for (uint64_t k = 0; k < w.param[i].n; k++) {
            double x = (double)ht_kernel_element(g[i], w.param[i].grad_dtype, k);
            sum += x * x;
        }
    }
    return sqrt(sum);
}

static void model_step(struct test_param *p, const struct ht_optim_config *c, const uint8_t *g, double factor)
{
    struct ht_scalars s;
    struct ht_update u = {
        .p = p->p,
        .master = dtype_bytes(p->dtype) == 2 ? p->master : NULL,
        .state = {p->m, p->v},
        .g = g,
        .p_dtype = p->dtype,
        .g_dtype = p->grad_dtype,
    };

    ht_rule_scalars(c, ++p->t, &s);
    s.grad_factor = (float)factor;
    ht_kernels_scalar.fn[s.kernel](&s, &u, p->n);
}

/* Gradients for all, in the store; to be freed. */
static void write_all_gradients(uint8_t *g[])
{
    for (unsigned i = 0; i < w.params; i++) {
        g[i] = random_gradient(&w, &w.param[i]);
        write_gradient(&w, &w.param[i], g[i]);
    }
}

static void free_gradients(uint8_t *g[])
{
    for (unsigned i = 0; i < w.params; i++)
        free(g[i]);
}

/* Makes one step whose norm the store computes. Returns the factor that must follow from it. */
static double step_and_factor(double most, double scale)
{
    struct ht_optim_config c = fixture_config(w.config);
    uint8_t *g[PARAMS_MAX];

    write_all_gradients(g);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_root_stat st = fixture_stat(&w);
    double norm = norm_of(g) / scale;
    ck_assert(st.norm_known && fabs(st.grad_norm - norm) < 1e-9 * norm);
    double coefficient = most / (st.grad_norm + 1e-6);
    double factor = most > 0 && coefficient < 1 ? coefficient / scale : 1 / scale;
    for (unsigned i = 0; i < w.params; i++)
        model_step(&w.param[i], &c, g[i], factor);
    free_gradients(g);
    check_all(&w);
    return factor;
}

TEST(a_long_gradient_is_clipped)
{
    open_mixed("adamw lr=1e-2 max_grad_norm=2.5", 2, HT_SMALL_CHUNK_BYTES);
    ck_assert(step_and_factor(2.5, 1) < 0.5);
    ck_assert(step_and_factor(2.5, 1) < 0.5);
    ck_assert_uint_eq(fixture_stat(&w).clipped, 2);
}

TEST(a_short_gradient_is_not)
{
    open_mixed("adamw lr=1e-2 max_grad_norm=1000", 2, HT_SMALL_CHUNK_BYTES);
    ck_assert(step_and_factor(1000, 1) == 1);
    ck_assert_uint_eq(fixture_stat(&w).clipped, 0);
}

TEST(scaled_gradients_are_unscaled_before_they_are_clipped)
{
    open_mixed("sgd lr=1e-2 momentum=0.9 max_grad_norm=0.001 grad_scale=1024", 2, HT_SMALL_CHUNK_BYTES);
    ck_assert(step_and_factor(0.001, 1024) < 1.0 / 1024);
}

TEST(a_scale_alone_defers_nothing)
{
    uint8_t *g[PARAMS_MAX];

    open_mixed("adamw lr=1e-2 grad_scale=512", 2, HT_SMALL_CHUNK_BYTES);
    struct ht_optim_config c = fixture_config(w.config);
    write_all_gradients(g);
    for (unsigned i = 0; i < w.params; i++)
        model_step(&w.param[i], &c, g[i], 1.0 / 512);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    check_all(&w); /* before the boundary */
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert(!fixture_stat(&w).norm_known);
    free_gradients(g);
    check_all(&w);
}

TEST(readers_see_the_last_boundary_until_the_next)
{
    uint8_t *g[PARAMS_MAX];

    open_mixed("adamw lr=1e-2 max_grad_norm=1", 1, HT_SMALL_CHUNK_BYTES);
    write_all_gradients(g);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_int_eq(ht_optim_readable(w.o, w.param[i].oid, 0, UINT64_MAX / 2, NULL), 0);
    check_all(&w); /* nothing has been applied */
    ck_assert(fixture_stat(&w).open);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert(!fixture_stat(&w).open);
    free_gradients(g);
}

/* The bits of the norm, and of its effect, for one way of cutting the same gradients. */
static double norm_by(unsigned threads, uint32_t chunk_bytes, const char *kernel, bool backwards)
{
    uint8_t *g[PARAMS_MAX];

    setenv("HITRAIN_KERNEL", kernel, 1);
    open_mixed("adamw lr=1e-2 max_grad_norm=2.5", threads, chunk_bytes);
    struct ht_optim_config c = fixture_config(w.config);
    for (unsigned i = 0; i < w.params; i++)
        g[i] = random_gradient(&w, &w.param[i]);
    for (unsigned i = 0; i < w.params; i++)
        write_gradient(&w, &w.param[backwards ? w.params - 1 - i : i], g[backwards ? w.params - 1 - i : i]);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    double norm = fixture_stat(&w).grad_norm;
    for (unsigned i = 0; i < w.params; i++)
        model_step(&w.param[i], &c, g[i], 2.5 / (norm + 1e-6));
    check_all(&w);
    free_gradients(g);
    fixture_close(&w);
    return norm;
}

TEST(threads_chunks_order_and_kernel_change_no_bit_of_the_norm)
{
    double norm = norm_by(1, HT_SMALL_CHUNK_BYTES, "scalar", false);

    ck_assert(norm_by(3, HT_SMALL_CHUNK_BYTES, "avx2", true) == norm);
    ck_assert(norm_by(2, HT_CHUNK_BYTES, "avx2", false) == norm);
    ck_assert(norm_by(4, HT_CHUNK_BYTES, "scalar", true) == norm);
}

TEST_LOOP(a_step_that_is_not_finite_changes_nothing, 2)
{
    uint8_t *g[PARAMS_MAX];
    float bad = _i ? INFINITY : NAN;

    open_mixed("adamw lr=1e-2 skip_nonfinite=1", 2, HT_SMALL_CHUNK_BYTES);
    step_and_factor(0, 1);
    for (unsigned i = 0; i < w.params; i++) {
        g[i] = random_gradient(&w, &w.param[i]);
        put_value(g[i], w.param[i].grad_dtype, w.param[i].n / 2, i == 1 ? bad : 1);
        write_gradient(&w, &w.param[i], g[i]);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    free_gradients(g);
    check_all(&w); /* counts of steps, too */
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert(st.step == 2 && st.durable_step == 2 && st.skipped == 1 && st.nonfinite == 1 && !st.open);
    step_and_factor(0, 1);
    remount_and_check();
}

TEST(without_the_word_it_goes_into_every_parameter)
{
    open_mixed("adamw lr=1e-2 max_grad_norm=1", 2, HT_SMALL_CHUNK_BYTES);
    for (unsigned i = 0; i < w.params; i++) {
        uint8_t *g = random_gradient(&w, &w.param[i]);
        put_value(g, w.param[i].grad_dtype, 3, i == 0 ? NAN : 1);
        write_gradient(&w, &w.param[i], g);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert(isnan(fixture_stat(&w).grad_norm));
    float p[8];
    ck_assert_int_eq(ht_obj_read(w.param[1].obj, 0, p, sizeof(p)), (ssize_t)sizeof(p));
    ck_assert(isnan(p[0]) && isnan(p[7]));
}

TEST(what_is_covered_in_part_counts_in_part)
{
    struct test_param *p = open_with_param("adamw lr=1e-2 max_grad_norm=0.5 partial=1", 2, 70001);
    struct ht_optim_config c = fixture_config(w.config);
    uint8_t *bytes = random_gradient(&w, p);
    struct ht_grad *g = open_grad(&w, p);
    uint64_t first = 1000, last = 40000;
    double sum = 0;

    write_all(g, first * 4, bytes, (last - first) * 4);
    close_grad(g);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (uint64_t i = first; i < last; i++) {
        double x = (double)ht_kernel_element(bytes, HT_DTYPE_F32, i);
        sum += x * x;
    }
    double norm = fixture_stat(&w).grad_norm;
    ck_assert(fabs(norm - sqrt(sum)) < 1e-9 * norm);
    struct test_param part = *p;
    part.p += first * 4;
    part.m += first;
    part.v += first;
    part.n = last - first;
    model_step(&part, &c, bytes + first * 4, 0.5 / (norm + 1e-6));
    p->t = part.t;
    check_all(&w);
}

TEST(a_parameter_that_goes_before_the_boundary_does_not_count)
{
    uint8_t *g[PARAMS_MAX];

    open_mixed("adamw lr=1e-2 max_grad_norm=1e6", 2, HT_SMALL_CHUNK_BYTES);
    write_all_gradients(g);
    fixture_delete(&w, 0);
    double all = norm_of(g);
    memset(g[0], 0, w.param[0].n * 4);
    double rest = norm_of(g);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    double norm = fixture_stat(&w).grad_norm;
    ck_assert(fabs(norm - rest) < 1e-9 * rest && norm < all);
    free_gradients(g);
    ht_obj_put(w.param[0].obj);
    w.param[0].obj = NULL;
}

/* ------------------------------------------------------------------ memory */

enum { LARGE = 8, LARGE_ELEMENTS = 1 << 19 };

/* What all gradients have cost in writes to devices, and how many bytes of the state are in memory. */
static uint64_t gradients_written(void)
{
    uint64_t bytes = 0;

    lock(w.o);
    for (unsigned i = 0; i < w.params; i++) {
        struct ht_obj_stat st;
        ht_obj_stat(ht_opt_param_find(w.o, w.param[i].oid)->grad, &st);
        bytes += st.device_written_bytes;
    }
    unlock(w.o);
    return bytes;
}

static uint64_t state_resident(void)
{
    uint64_t bytes = 0;

    lock(w.o);
    for (unsigned i = 0; i < w.params; i++) {
        struct ht_obj_stat st;
        ht_obj_stat(ht_opt_param_find(w.o, w.param[i].oid)->state[0], &st);
        bytes += st.resident_bytes;
        ht_obj_stat(ht_opt_param_find(w.o, w.param[i].oid)->state[1], &st);
        bytes += st.resident_bytes;
    }
    unlock(w.o);
    return bytes;
}

/* Every gradient is there before the boundary; the next is written when the squares of the last are summed. */
static void large_step(void)
{
    for (unsigned i = 0; i < w.params; i++) {
        send_random(&w.param[i]);
        ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

static void configure(const char *config)
{
    struct ht_optim_config c = fixture_config(config);

    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
}

/*
 * 16 MiB of gradients wait, 3 MiB where content passes, and the tier protects 24 MiB. Parameters and state get the
 * rest, and all when no gradient waits.
 */
TEST_LOOP(waiting_gradients_stay_in_memory, 2)
{
    w.dram_bytes = 32 * MIB;
    w.device_bytes = 256ull * MIB;
    fixture_open_as(&w, _i ? "adamw lr=1e-2" : "adamw lr=1e-2 max_grad_norm=1", 1);
    for (unsigned i = 0; i < LARGE; i++)
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, LARGE_ELEMENTS, HT_CHUNK_BYTES);
    large_step();
    if (_i) { /* the protected set is full: its images leave it as they are updated, and the tier in the next step */
        configure("adamw lr=1e-2 max_grad_norm=1");
        large_step();
        large_step();
    }
    uint64_t before = gradients_written();
    for (unsigned step = 0; step < 3; step++) {
        large_step();
        ck_assert_uint_le(store_stats().dram_protected_bytes, 12 * MIB);
    }
    ck_assert_uint_eq(gradients_written(), before);
    ht_store_verify(w.s, false);
    configure("adamw lr=1e-2");
    for (unsigned step = 0; step < 2 || (step < 20 && state_resident() < 14 * MIB); step++)
        large_step();
    ck_assert_uint_ge(state_resident(), 14 * MIB);
}

/* At half of the passing part the store writes ahead, and a gradient is being written besides. */
TEST_LOOP(the_backlog_ends_before_the_store_writes_ahead, 4)
{
    static const uint64_t tiers[] = {8, 16, 64, 256};

    w.dram_bytes = tiers[_i] * MIB;
    fixture_open_as(&w, "adamw lr=1e-2", 1);
    struct ht_store_stats st = store_stats();
    ck_assert_uint_eq(st.dram_passing_bytes, tiers[_i] < 128 ? w.dram_bytes / 4 : 32 * MIB);
    ck_assert_uint_ge(w.o->backlog_bytes_max, MIB);
    ck_assert(w.o->backlog_bytes_max == MIB || w.o->backlog_bytes_max < st.dram_passing_bytes / 2);
}

/*
 * A gradient has 16 MiB. The protected set is full of its parameter and state, and leaves 8. A part is written and read
 * back, so the set gives way at the end of the step.
 */
TEST(a_gradient_gets_room_from_the_protected_set)
{
    uint64_t least = UINT64_MAX;

    w.dram_bytes = 32 * MIB;
    w.device_bytes = 384ull * MIB;
    w.no_plan = true;
    fixture_open_as(&w, "adamw lr=1e-2", 1);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 16 * MIB / 4, HT_CHUNK_BYTES);
    for (unsigned step = 0; step < 3; step++) {
        large_step();
        least = ht_min_u64(least, store_stats().dram_protectable_bytes);
    }
    ck_assert_uint_le(least, 22 * MIB);
    configure("adamw lr=1e-2 max_grad_norm=1");
    large_step();
    ck_assert_uint_eq(store_stats().dram_protectable_bytes, 24 * MIB);
    ht_store_verify(w.s, false);
}

/* Half of the gradients have closed, then their root goes: nothing is kept for them any more. */
TEST(nothing_waits_for_a_root_that_is_gone)
{
    struct ht_tx *tx;

    w.dram_bytes = 16 * MIB;
    fixture_open_as(&w, "adamw lr=1e-2 max_grad_norm=1", 1);
    for (unsigned i = 0; i < LARGE; i++)
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, LARGE_ELEMENTS, HT_CHUNK_BYTES);
    large_step();
    lock(w.o);
    ck_assert_uint_eq(w.o->waiting_bytes, LARGE * LARGE_ELEMENTS * 4);
    unlock(w.o);
    write_gradient(&w, &w.param[0], w.param[0].p);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_int_eq(ht_tx_begin(w.s, 4096, &tx), 0);
    ht_scope_end(w.s, ROOT, HT_SCOPE_DELETED, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    lock(w.o);
    ck_assert_uint_eq(w.o->waiting_bytes, 0);
    unlock(w.o);
    ht_store_verify(w.s, false);
}

RUN_TESTS("norm", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
