/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradients of several backward passes make one step: their sum is autograd's, and an incomplete gradient leaves
 * nothing.
 */
#include "tests/unit/optim/step/fixture.h"

enum { GRADIENTS = 3 };

static void model_step(struct test_param *p, const float *sum, uint64_t first, uint64_t last, double factor)
{
    struct ht_optim_config c = fixture_config(w.config);
    struct ht_scalars s;
    struct ht_update u = {
        .p = p->p + first * dtype_bytes(p->dtype),
        .master = dtype_bytes(p->dtype) == 2 ? p->master + first : NULL,
        .state = {p->m + first, p->v + first},
        .g = sum + first,
        .p_dtype = p->dtype,
        .g_dtype = HT_DTYPE_F32,
    };

    ht_rule_scalars(&c, p->t, &s);
    s.grad_factor = (float)factor;
    ht_kernels_scalar.fn[s.kernel](&s, &u, last - first);
}

static float *sum[PARAMS_MAX]; /* of the gradients of each parameter in this step */

static void teardown(void)
{
    for (unsigned i = 0; i < PARAMS_MAX; i++)
        free(sum[i]);
    memset(sum, 0, sizeof(sum));
    fixture_end();
}

/* Gradients for all, passes times, in another order each. first: of a step. */
static void write_passes(unsigned passes, bool first)
{
    for (unsigned i = 0; first && i < w.params; i++)
        sum[i] = realloc(sum[i], w.param[i].n * sizeof(float));
    for (unsigned k = 0; k < passes; k++) {
        for (unsigned i = 0; i < w.params; i++) {
            unsigned at = (i + k) % w.params;
            uint8_t *g = random_gradient(&w, &w.param[at]);
            put_value(g, w.param[at].grad_dtype, 5, -0.0f);
            write_gradient(&w, &w.param[at], g);
            fixture_add(sum[at], &w.param[at], g, first && k == 0);
        }
    }
}

static void apply_sums(double factor)
{
    for (unsigned i = 0; i < w.params; i++) {
        w.param[i].t++;
        model_step(&w.param[i], sum[i], 0, w.param[i].n, factor);
    }
}

static void whole_step(double factor)
{
    write_passes(GRADIENTS, true);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_sums(factor);
    check_all(&w);
}

static const struct {
    const char *config;
    double factor;
} plain[] = {
    {"adamw lr=1e-2 weight_decay=0.1 accumulate=3", 1},
    {"adamw lr=1e-2 weight_decay=0.1 accumulate=3 accumulate_mode=mean", 1.0 / 3},
    {"sgd lr=1e-2 momentum=0.9 accumulate=3 accumulate_mode=mean grad_scale=1024", 1.0 / 3072},
    {"sgd lr=1e-2 accumulate=3 accumulate_mode=sum", 1},
    {"lion lr=1e-3 accumulate=3 max_grad_norm=1e9", 1}, /* deferred, clips nothing */
    {"adagrad lr=1e-2 accumulate=3 skip_nonfinite=1", 1},
};

TEST_LOOP(sums_are_those_of_autograd, HT_ARRAY_SIZE(plain))
{
    setenv("HITRAIN_KERNEL", _i & 1 ? "scalar" : "avx2", 1);
    open_mixed(plain[_i].config, (unsigned)_i % 3 + 1, _i & 2 ? HT_CHUNK_BYTES : HT_SMALL_CHUNK_BYTES);
    for (unsigned step = 0; step < 3; step++)
        whole_step(plain[_i].factor);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert(st.step == 3 && !st.open && st.sum_resident_bytes == 0 && st.sum_stored_bytes == 0);
    ck_assert_uint_eq(st.updated_elements, 3ull * (70001 + 100003 + 50000 + 17));
    /* The elements that are applied with the last gradient are added, too. */
    ck_assert_uint_eq(st.added_elements, GRADIENTS * st.updated_elements);
    remount_and_check();
}

TEST_LOOP(sums_are_clipped_as_one_gradient, 2)
{
    double squares = 0;

    fixture_open_as(&w,
                    _i ? "adamw lr=1e-2 max_grad_norm=2 accumulate=3 accumulate_mode=mean"
                       : "adamw lr=1e-2 max_grad_norm=2 accumulate=3",
                    2);
    fixture_mixed_params(&w, HT_SMALL_CHUNK_BYTES);
    write_passes(GRADIENTS, true);
    for (unsigned i = 0; i < w.params; i++)
        for (uint64_t k = 0; k < w.param[i].n; k++)
            squares += (double)sum[i][k] * (double)sum[i][k];
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    double norm = sqrt(squares) / (_i ? 3 : 1), got = fixture_stat(&w).grad_norm;
    ck_assert(fabs(got - norm) < 1e-9 * norm);
    ck_assert_uint_eq(fixture_stat(&w).clipped, 1);
    apply_sums(2 / (got + 1e-6) / (_i ? 3 : 1));
    check_all(&w);
}

TEST(a_step_skipped_for_one_of_its_gradients_leaves_no_sum)
{
    open_mixed("adamw lr=1e-2 skip_nonfinite=1 accumulate=3", 2, HT_SMALL_CHUNK_BYTES);
    write_passes(GRADIENTS - 1, true);
    for (unsigned i = 0; i < w.params; i++) {
        uint8_t *g = random_gradient(&w, &w.param[i]);
        put_value(g, w.param[i].grad_dtype, 3, i == 1 ? INFINITY : 1);
        write_gradient(&w, &w.param[i], g);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert(st.skipped == 1 && st.nonfinite == 1 && st.sum_resident_bytes == 0);
    check_all(&w);
    whole_step(1);
}

TEST(readers_get_the_last_boundary_until_the_last_gradient)
{
    open_mixed("adamw lr=1e-2 accumulate=3", 2, HT_SMALL_CHUNK_BYTES);
    write_passes(GRADIENTS - 1, true);
    for (unsigned i = 0; i < w.params; i++) /* whatever is being added */
        ck_assert_int_eq(ht_optim_readable(w.o, w.param[i].oid, 0, UINT64_MAX / 2, NULL), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    check_all(&w);
    ck_assert(fixture_stat(&w).open && fixture_stat(&w).sum_resident_bytes > 0);
    write_passes(1, false);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    apply_sums(1); /* before the boundary: no more can come */
    check_all(&w);
    commit_and_check();
}

TEST(too_few_gradients_are_refused_and_too_many)
{
    struct test_param *p = open_with_param("adamw lr=1e-2 accumulate=3", 2, 70001);

    write_passes(GRADIENTS - 1, true);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    check_error(&w, p, "all of the 3 gradients");
    write_passes(1, false);
    struct ht_grad *g = open_grad(&w, p);
    ck_assert_int_eq(ht_grad_write(g, 0, "1234", 4), -EBUSY);
    check_error(&w, p, "belong to this step");
    ht_grad_release(g);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_sums(1);
    check_all(&w);
}

TEST(too_many_gradients_of_a_deferred_step_are_refused)
{
    struct test_param *p = open_with_param("adamw lr=1e-2 accumulate=3 max_grad_norm=1e9", 2, 70001);

    write_passes(GRADIENTS, true);
    struct ht_grad *g = open_grad(&w, p);
    ck_assert_int_eq(ht_grad_write(g, 4000, "1234", 4), -EBUSY);
    ht_grad_release(g);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_sums(1);
    check_all(&w);
}

/* Two whole gradients, and some elements of the third: each element is updated by its own sum. */
TEST_LOOP(partial_applies_what_came, 4)
{
    const char *config[] = {"adamw lr=1e-2 accumulate=3 partial=1",
                            "adamw lr=1e-2 accumulate=3 partial=1 max_grad_norm=1e9"};

    uint64_t first = 1000, last = 40000;

    fixture_open_as(&w, config[_i % 2], 2);
    struct test_param *p =
        fixture_param(&w, HT_DTYPE_F32, _i < 2 ? HT_DTYPE_F32 : HT_DTYPE_BF16, 70001, HT_SMALL_CHUNK_BYTES);
    write_passes(GRADIENTS - 1, true);
    uint8_t *bytes = random_gradient(&w, p);
    struct ht_grad *g = open_grad(&w, p);
    size_t size = dtype_bytes(p->grad_dtype);
    write_all(g, first * size, bytes, (last - first) * size);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    for (uint64_t i = first; i < last; i++)
        sum[0][i] += ht_kernel_element(bytes, p->grad_dtype, i);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    apply_sums(1);
    check_all(&w);
    /* For the next step only these came. */
    write_all(g, first * size, bytes, (last - first) * size);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (uint64_t i = first; i < last; i++)
        sum[0][i] = ht_kernel_element(bytes, p->grad_dtype, i);
    p->t++;
    model_step(p, sum[0], first, last, 1);
    check_all(&w);
    ck_assert_uint_eq(fixture_stat(&w).sum_resident_bytes, 0);
    ht_grad_release(g);
}

TEST_LOOP(abort_and_crash_drop_the_sums, 2)
{
    open_mixed("adamw lr=1e-2 accumulate=3", 2, HT_SMALL_CHUNK_BYTES);
    whole_step(1);
    write_passes(2, true);
    if (_i) {
        crash_and_mount();
    } else {
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
        ck_assert_uint_eq(fixture_stat(&w).sum_resident_bytes, 0);
    }
    ck_assert(!fixture_stat(&w).open);
    check_all(&w);
    whole_step(1);
}

/* More sums than memory: they spill, and are counted. */
TEST(sums_that_do_not_fit_in_memory_spill)
{
    w.device_bytes = 384ull * MIB;
    fixture_open_as(&w, "adamw lr=1e-2 accumulate=3", 3);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, 3u << 19, HT_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 3u << 19, HT_CHUNK_BYTES);
    write_passes(2, true);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_uint_gt(fixture_stat(&w).sum_stored_bytes, 2 * MIB);
    write_passes(1, false);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_sums(1);
    check_all(&w);
    ck_assert_uint_eq(fixture_stat(&w).sum_stored_bytes, 0);
    ck_assert_uint_le(store_stats().dram_used_bytes, w.dram_bytes);
}

static void configure(const char *text)
{
    struct ht_optim_config c = fixture_config(text);

    w.config = text;
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
}

/* Until nothing more fits. */
static struct ht_obj *fill_store(void)
{
    struct ht_obj_attr attr = {.oid = ht_store_new_id(w.s), .chunk_bytes = HT_CHUNK_BYTES};
    uint8_t *bytes = calloc(1, MIB);
    struct ht_obj *filler;
    uint64_t off = 0;

    memset(bytes, 7, MIB);
    ck_assert_int_eq(ht_obj_create(w.s, &attr, &filler), 0);
    while (ht_obj_write(filler, off, bytes, MIB) == MIB)
        off += MIB;
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    free(bytes);
    return filler;
}

/* A full store refuses the first gradient, not a later one; without sums it goes on. */
TEST(space_for_sums_is_reserved_by_the_first_gradient)
{
    struct ht_tx *tx;

    w.device_bytes = 96ull * MIB;
    fixture_open_as(&w, "adamw lr=1e-2", 2);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1 << 20, HT_CHUNK_BYTES);
    step_param(&w, p);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_obj *filler = fill_store();
    configure("adamw lr=1e-2 accumulate=3");
    uint8_t *bytes = random_gradient(&w, p);
    struct ht_grad *g = open_grad(&w, p);
    write_all(g, 0, bytes, MIB);
    ck_assert_int_eq(ht_grad_flush(g), -ENOSPC);
    check_error(&w, p, "no space");
    ck_assert(!fixture_stat(&w).open);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    check_all(&w);
    configure("adamw lr=1e-2");
    step_param(&w, p);
    commit_and_check();
    ck_assert_int_eq(ht_tx_begin(w.s, 0, &tx), 0);
    ht_obj_delete(filler, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    ht_obj_put(filler);
    configure("adamw lr=1e-2 accumulate=3");
    write_passes(GRADIENTS - 1, true);
    filler = fill_store();
    write_passes(1, false);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_sums(1);
    check_all(&w);
    ht_obj_put(filler);
    ht_grad_release(g);
}

/* By a reset, or by the abort of its first step. */
TEST_LOOP(with_the_state_goes_the_space_for_sums, 2)
{
    fixture_open_as(&w, "sgd lr=1e-2 accumulate=3", 2);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1 << 20, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    uint64_t reserved = store_stats().reserved_bytes;
    write_passes(GRADIENTS, true);
    if (_i) {
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        ck_assert_int_eq(ht_optim_reset(w.o, ROOT, w.param[0].oid, NULL), 0);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    } else {
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    }
    ck_assert_uint_eq(store_stats().reserved_bytes, reserved);
}

TEST(another_size_has_another_sum)
{
    struct test_param *p = open_with_param("adamw lr=1e-2 accumulate=3", 2, 70001);

    whole_step(1);
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, p->oid, NULL), 0);
    forget_state(p);
    ck_assert_int_eq(ht_obj_truncate(p->obj, 4 * 1000), 0);
    p->n = 1000;
    check_all(&w);
    write_passes(GRADIENTS - 1, true);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert(st.parameters == 1 && st.state_bytes == 2 * 4000);
    ck_assert(st.sum_resident_bytes > 0 && st.sum_resident_bytes <= HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    check_all(&w);
}

TEST(a_failed_addition_can_only_be_aborted)
{
    struct test_param *p = open_with_param("adamw lr=1e-2 accumulate=3", 1, 70001);

    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    write_passes(1, true);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ht_fault_arm(HT_FAULT_OPTIM_UPDATE, 1, false);
    uint8_t *g = random_gradient(&w, p);
    write_gradient(&w, p, g);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), -EIO);
    ht_fault_disarm_all();
    struct ht_grad *more = open_grad(&w, p);
    ck_assert_int_eq(ht_grad_write(more, 0, g, p->n * 4), -EBUSY);
    ht_grad_release(more);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EIO);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    check_all(&w);
    whole_step(1);
}

RUN_TESTS("accumulate", .teardown = teardown, .timeout_s = 300, .memory = memory_keep)
