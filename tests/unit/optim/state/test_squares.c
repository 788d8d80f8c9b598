/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums of squares are kept when a gradient is complete, and the boundary uses them: norm and parameters have the bits
 * of a computation over the gradients as they are at the boundary, whatever happened to gradients before.
 */
#include "tests/unit/optim/step/fixture.h"

#include <hitrain/topk.h>
#include <signal.h>

#include "optim/state/context.h"
#include "optim/state/param.h"

enum { WRITERS = 4, ROUNDS = 10 };

static uint8_t *gradient[PARAMS_MAX]; /* what the step has of each parameter; NULL: nothing */

/* --------------------------------------------------------------- the model */

/* The order that boundary.c fixes: blocks, spans, parameters by number. Sums of accumulated gradients are f32. */
static double expected_norm(uint8_t dtype, double divisor)
{
    double all = 0;
    uint64_t nonfinite = 0;

    for (unsigned i = 0; i < w.params; i++) {
        uint8_t of = dtype ? dtype : w.param[i].grad_dtype;
        double own = 0;
        for (uint64_t span = 0; gradient[i] && span < w.param[i].n; span += HT_SUM_SPAN) {
            double sum = 0;
            for (uint64_t e = span; e < ht_min_u64(span + HT_SUM_SPAN, w.param[i].n); e += HT_SUM_BLOCK) {
                uint64_t n = ht_min_u64(HT_SUM_BLOCK, w.param[i].n - e);
                sum += ht_kernels_scalar.sum_squares(gradient[i] + e * dtype_bytes(of), of, n, &nonfinite);
            }
            own += sum;
        }
        all += own;
    }
    return sqrt(all) / divisor;
}

static void model_step(struct test_param *p, const uint8_t *g, uint8_t g_dtype, double factor)
{
    struct ht_optim_config c = fixture_config(w.config);
    struct ht_scalars s;
    struct ht_update u = {
        .p = p->p,
        .master = dtype_bytes(p->dtype) == 2 ? p->master : NULL,
        .state = {p->m, p->v},
        .g = g,
        .p_dtype = p->dtype,
        .g_dtype = g_dtype,
    };

    ht_rule_scalars(&c, ++p->t, &s);
    s.grad_factor = (float)factor;
    MODEL_KERNELS->fn[s.kernel](&s, &u, p->n);
}

static void forget_gradients(void)
{
    for (unsigned i = 0; i < PARAMS_MAX; i++) {
        free(gradient[i]);
        gradient[i] = NULL;
    }
}

/* Ends the step, and compares it with the model bit for bit. dtype: of sums; 0: of each gradient. */
static void end_step(uint8_t dtype, double divisor)
{
    double most = fixture_config(w.config).max_grad_norm, norm = expected_norm(dtype, divisor);
    double coefficient = most / (norm + 1e-6);

    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert(fixture_stat(&w).norm_known);
    ck_assert_msg(fixture_stat(&w).grad_norm == norm, "%a is not %a", fixture_stat(&w).grad_norm, norm);
    for (unsigned i = 0; i < w.params; i++)
        if (gradient[i])
            model_step(&w.param[i], gradient[i], dtype ? dtype : w.param[i].grad_dtype,
                       (coefficient < 1 ? coefficient : 1) / divisor);
    forget_gradients();
    check_all(&w);
}

/* ------------------------------------------------------------- the gradients */

/* Another gradient for a parameter, in the model only. */
static void make_gradient(unsigned i)
{
    free(gradient[i]);
    gradient[i] = random_gradient(&w, &w.param[i]);
}

static void write_new(unsigned i)
{
    make_gradient(i);
    write_gradient(&w, &w.param[i], gradient[i]);
}

static void write_all_new(void)
{
    for (unsigned i = 0; i < w.params; i++)
        write_new(i);
}

static void drop_one(unsigned i)
{
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, w.param[i].oid, NULL), 0);
    free(gradient[i]);
    gradient[i] = NULL;
}

/* How many ranges of a parameter have their sums, when all work is done. */
static unsigned measured(unsigned i)
{
    unsigned count = 0;

    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    lock(w.o);
    const struct ht_param *p = ht_opt_param_find(w.o, w.param[i].oid);
    for (uint64_t k = 0; p && k < p->shape.range_count; k++) {
        const struct ht_range *r = ht_opt_range_find(p, k);
        count += r && r->measured;
    }
    unlock(w.o);
    return count;
}

static unsigned range_count(unsigned i)
{
    return (unsigned)ht_div_up(w.param[i].n * dtype_bytes(w.param[i].dtype), HT_SMALL_CHUNK_BYTES);
}

static void begin(const char *config, unsigned threads)
{
    open_mixed(config, threads, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

/* ------------------------------------------------------------------- tests */

TEST(a_closed_gradient_has_its_sums_before_the_boundary)
{
    begin("adamw lr=1e-2 max_grad_norm=0.5", 2);
    write_all_new();
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_uint_eq(measured(i), range_count(i));
    ht_optim_verify(w.o);
    end_step(0, 1);
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_uint_eq(measured(i), 0);
}

/* The boundary takes the sums as they are. Builds that verify would notice that these are wrong. */
#ifndef HT_VERIFY_STATE
TEST(the_boundary_uses_what_was_kept)
{
    begin("adamw lr=1e-2 max_grad_norm=1e6", 2);
    write_all_new();
    measured(0);
    lock(w.o);
    struct ht_param *p = ht_opt_param_find(w.o, w.param[0].oid);
    p->squares[0] = 1e8;
    unlock(w.o);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert(fabs(fixture_stat(&w).grad_norm - 1e4) < 1);
    forget_gradients();
}
#endif

/* Pieces in any order, closed in between, by several threads of the store. */
TEST_LOOP(any_order_of_pieces_and_closes_gives_the_same_bits, 8)
{
    struct ht_grad *g[PARAMS_MAX];
    unsigned left[PARAMS_MAX], all = 0;
    enum { PIECES = 7 };

    begin("adamw lr=1e-2 max_grad_norm=0.5", (unsigned)_i % 4 + 1);
    w.rnd += (uint64_t)_i * 77777;
    for (unsigned i = 0; i < w.params; i++) {
        make_gradient(i);
        g[i] = open_grad(&w, &w.param[i]);
        left[i] = (1 << PIECES) - 1;
        all += PIECES;
    }
    while (all) {
        unsigned i = fixture_random(&w) % w.params, k = fixture_random(&w) % PIECES;
        size_t size = dtype_bytes(w.param[i].grad_dtype), len = w.param[i].n * size;
        size_t from = len / PIECES / size * size * k, to = k + 1 == PIECES ? len : from + len / PIECES / size * size;
        if (!(left[i] & 1u << k))
            continue;
        left[i] &= ~(1u << k);
        all--;
        write_all(g[i], from, gradient[i], to - from);
        if (fixture_random(&w) % 2)
            ck_assert_int_eq(ht_grad_flush(g[i]), 0);
        if (fixture_random(&w) % 4 == 0)
            ht_optim_verify(w.o);
    }
    for (unsigned i = 0; i < w.params; i++) {
        ck_assert_int_eq(ht_grad_flush(g[i]), 0);
        ht_grad_release(g[i]);
    }
    end_step(0, 1);
}

TEST(bytes_that_are_summed_cannot_change)
{
    begin("adamw lr=1e-2 max_grad_norm=0.5", 2);
    write_all_new();
    measured(0);
    struct ht_grad *g = open_grad(&w, &w.param[0]);
    uint8_t zeros[64] = {0};
    for (uint64_t off = 0; off < w.param[0].n * 4; off += 10000)
        ck_assert_int_eq(ht_grad_write(g, off / 4 * 4, zeros, 4), -EBUSY);
    ck_assert_int_eq(ht_grad_set_size(g, w.param[0].n * 4), 0); /* a gradient of holes */
    ck_assert_int_eq(ht_grad_flush(g), -EBUSY);
    ht_grad_discard(g);
    ht_grad_release(g);
    ck_assert_uint_eq(measured(0), range_count(0));
    end_step(0, 1);
}

TEST(a_dropped_gradient_takes_its_sums_with_it)
{
    begin("adamw lr=1e-2 max_grad_norm=0.5", 2);
    for (unsigned round = 0; round < 3; round++) {
        write_all_new();
        if (round != 1)
            measured(0);
        drop_one(1);
        drop_one(2);
        ck_assert_uint_eq(measured(1), 0);
        if (round)
            write_new(2);
        end_step(0, 1);
    }
}

/* After the drop one range of three has a gradient: the others count nothing. */
TEST_LOOP(a_range_without_a_gradient_has_no_sums, 2)
{
    begin("adamw lr=1e-2 max_grad_norm=0.5 partial=1", 2);
    write_new(0);
    measured(0);
    if (_i)
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    else
        drop_one(0);
    make_gradient(0);
    struct ht_grad *g = open_grad(&w, &w.param[0]);
    uint64_t first = HT_SMALL_CHUNK_BYTES, bytes = HT_SMALL_CHUNK_BYTES;
    write_all(g, first, gradient[0], bytes);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_uint_eq(measured(0), 1);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    memset(gradient[0], 0, first);
    memset(gradient[0] + first + bytes, 0, w.param[0].n * 4 - first - bytes);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_msg(st.grad_norm == expected_norm(0, 1), "%a is not %a", st.grad_norm, expected_norm(0, 1));
    forget_gradients();
    ht_grad_release(g);
}

TEST(an_abort_takes_all_sums_with_it)
{
    begin("adamw lr=1e-2 max_grad_norm=0.5", 3);
    for (unsigned round = 0; round < 3; round++) {
        write_all_new();
        if (round)
            measured(0);
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
        for (unsigned i = 0; i < w.params; i++)
            ck_assert_uint_eq(measured(i), 0);
        write_all_new();
        end_step(0, 1);
    }
}

TEST_LOOP(only_gradients_that_are_left_can_skip_the_step, 2)
{
    begin("adamw lr=1e-2 skip_nonfinite=1 max_grad_norm=0.5", 2);
    write_all_new();
    drop_one(1);
    make_gradient(1);
    put_value(gradient[1], w.param[1].grad_dtype, 77, NAN);
    put_value(gradient[1], w.param[1].grad_dtype, 90000, INFINITY);
    write_gradient(&w, &w.param[1], gradient[1]);
    measured(1);
    if (_i) {
        drop_one(1);
        write_new(1);
        end_step(0, 1);
    } else {
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        forget_gradients();
        check_all(&w);
    }
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert(st.skipped == !_i && st.nonfinite == (_i ? 0 : 2));
    write_all_new();
    end_step(0, 1);
}

/* With the last pass the sum is complete: its squares are summed, and the gradient goes. */
TEST(sums_of_several_gradients_are_measured_with_the_last)
{
    begin("adamw lr=1e-2 max_grad_norm=0.5 accumulate=3 accumulate_mode=mean grad_scale=4", 3);
    for (unsigned step = 0; step < 2; step++) {
        for (unsigned i = 0; i < w.params; i++)
            gradient[i] = calloc(w.param[i].n, sizeof(float));
        for (unsigned pass = 0; pass < 3; pass++) {
            for (unsigned i = 0; i < w.params; i++) {
                uint8_t *g = random_gradient(&w, &w.param[i]);
                write_gradient(&w, &w.param[i], g);
                fixture_add((float *)(void *)gradient[i], &w.param[i], g, pass == 0);
                ck_assert_uint_eq(measured(i), pass == 2 ? range_count(i) : 0);
            }
            ht_optim_verify(w.o);
        }
        struct ht_grad *g = open_grad(&w, &w.param[0]);
        ck_assert_int_eq(ht_grad_write(g, 0, gradient[0], 4), -EBUSY);
        ht_grad_release(g);
        end_step(HT_DTYPE_F32, 12);
    }
}

/* Every 100th element of a gradient of zeros, as a sparse gradient. */
static void write_sparse(unsigned i)
{
    struct test_param *p = &w.param[i];
    struct ht_param_desc desc = fixture_desc(p);
    size_t size = dtype_bytes(p->grad_dtype);
    uint64_t count = ht_div_up(p->n, 100);
    struct ht_topk_header h = {.magic = HT_TOPK_MAGIC, .dtype = p->grad_dtype};
    struct ht_topk *t;

    make_gradient(i);
    ht_le32_store(&h.version, HT_TOPK_VERSION);
    ht_le64_store(&h.elements, p->n);
    ht_le64_store(&h.count, count);
    ck_assert_int_eq(ht_topk_open(w.o, &desc, &t), 0);
    ck_assert_int_eq(ht_topk_write(t, 0, &h, sizeof(h)), (ssize_t)sizeof(h));
    for (uint64_t k = 0; k < p->n; k++) {
        ht_le32 index;
        ht_le32_store(&index, (uint32_t)k);
        if (k % 100)
            memset(gradient[i] + k * size, 0, size);
        else
            ck_assert_int_eq(ht_topk_write(t, sizeof(h) + k / 100 * 4, &index, 4), 4);
    }
    for (uint64_t k = 0; k < p->n; k += 100)
        ck_assert_int_eq(ht_topk_write(t, sizeof(h) + count * 4 + k / 100 * size, gradient[i] + k * size, size),
                         (ssize_t)size);
    ck_assert_int_eq(ht_topk_flush(t), 0);
    ht_topk_release(t);
}

TEST(sparse_gradients_count_as_the_dense_ones_that_they_are)
{
    begin("adamw lr=1e-2 max_grad_norm=0.1", 2);
    for (unsigned i = 0; i < w.params; i++) {
        if (i % 2)
            write_new(i);
        else
            write_sparse(i);
        ck_assert_uint_eq(measured(i), range_count(i));
    }
    ht_optim_verify(w.o);
    drop_one(0);
    write_sparse(0);
    end_step(0, 1);
}

TEST_LOOP(a_mount_begins_without_sums, 2)
{
    begin("adamw lr=1e-2 max_grad_norm=0.5", 2);
    write_all_new();
    end_step(0, 1);
    write_all_new();
    measured(0);
    forget_gradients();
    if (_i)
        fixture_crash(&w);
    else
        fixture_unmount(&w);
    fixture_mount(&w);
    ck_assert_uint_eq(measured(0), 0);
    check_all(&w);
    write_all_new();
    end_step(0, 1);
}

/* The words of the step that opens decide; the sums of a former step are not taken for its own. */
TEST(clipping_comes_and_goes_between_steps)
{
    begin("adamw lr=1e-2 max_grad_norm=0.5", 2);
    for (unsigned step = 0; step < 4; step++) {
        w.config = step % 2 ? "adamw lr=1e-2" : "adamw lr=1e-2 max_grad_norm=0.5";
        struct ht_optim_config c = fixture_config(w.config);
        ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &c), 0);
        write_all_new();
        if (step % 2 == 0) {
            end_step(0, 1);
            continue;
        }
        ck_assert_uint_eq(measured(0), 0);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        for (unsigned i = 0; i < w.params; i++)
            model_step(&w.param[i], gradient[i], w.param[i].grad_dtype, 1);
        forget_gradients();
        check_all(&w);
    }
}

/* ------------------------------------------------------------------- races */

struct writer {
    unsigned at;
    uint64_t rnd;
};

/* Writes the gradient of one parameter in pieces; sometimes closes it early, drops it, and begins again. */
static void *write_and_drop(void *arg)
{
    struct writer *me = arg;
    const struct test_param *p = &w.param[me->at];
    size_t len = p->n * dtype_bytes(p->grad_dtype);

    for (bool again = true; again;) {
        struct ht_grad *g = open_grad(&w, p);
        me->rnd = me->rnd * 6364136223846793005ull + 1442695040888963407ull;
        again = me->rnd >> 62 != 0;
        for (size_t off = 0, n; off < len; off += n) {
            n = ht_min_u64(len - off, 32768);
            /* A gradient that is dropped has other bytes. */
            uint8_t other[32768];
            memset(other, (int)(me->rnd >> 40 & 0x3f), n);
            ck_assert_int_eq(ht_grad_write(g, off, again ? other : gradient[me->at] + off, n), (ssize_t)n);
            if (me->rnd >> 50 & 1)
                ck_assert_int_eq(ht_grad_flush(g), 0);
        }
        close_grad(g);
        if (again)
            ck_assert_int_eq(ht_optim_drop(w.o, ROOT, p->oid, NULL), 0);
    }
    return NULL;
}

static atomic_bool over;

static void *verify_often(void *arg)
{
    (void)arg;
    while (!over)
        ht_optim_verify(w.o);
    return NULL;
}

TEST_LOOP(beside_writers_that_drop_and_a_check_that_reads, 2)
{
    pthread_t thread[WRITERS], checker;
    struct writer writer[WRITERS];

    begin(_i ? "adamw lr=1e-2 max_grad_norm=0.5 skip_nonfinite=1" : "adamw lr=1e-2 max_grad_norm=0.5", 2);
    for (unsigned round = 0; round < ROUNDS; round++) {
        over = false;
        for (unsigned i = 0; i < WRITERS; i++)
            make_gradient(i);
        ck_assert_int_eq(pthread_create(&checker, NULL, verify_often, NULL), 0);
        for (unsigned i = 0; i < WRITERS; i++) {
            writer[i] = (struct writer){i, fixture_random(&w)};
            ck_assert_int_eq(pthread_create(&thread[i], NULL, write_and_drop, &writer[i]), 0);
        }
        for (unsigned i = 0; i < WRITERS; i++)
            pthread_join(thread[i], NULL);
        end_step(0, 1); /* beside the check */
        over = true;
        pthread_join(checker, NULL);
    }
}

/* ------------------------------------------------------------------ verify */

TEST_SIGNAL(a_kept_sum_that_is_not_its_gradients_ends_the_process, SIGABRT, 2)
{
    begin("adamw lr=1e-2 max_grad_norm=0.5", 2);
    write_all_new();
    measured(0);
    ht_optim_verify(w.o);
    lock(w.o);
    struct ht_param *p = ht_opt_param_find(w.o, w.param[1].oid);
    if (_i)
        ht_opt_range_find(p, 1)->nonfinite++;
    else
        p->squares[1] = nextafter(p->squares[1], 0);
    unlock(w.o);
    ht_optim_verify(w.o);
}

RUN_TESTS("squares", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
