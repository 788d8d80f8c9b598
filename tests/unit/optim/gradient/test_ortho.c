/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps in two phases, against whole arrays: calls in random orders, each with the answer that a small model gives;
 * crashes and aborts between the phases; the store's own orthogonal matrices, the same bits whatever the threads.
 */
#include "tests/unit/optim/step/fixture.h"

#include "optim/rules/blocks.h"

enum { CALLS = 512, MATRICES = 3 };

/* Of more than one chunk and range, and narrow: scalar kernels under a sanitizer multiply slowly. */
static const uint64_t shape[MATRICES][3] = {{1, 8, 8750}, {1, 4153, 8}, {3, 20, 30}};

/* The model of a matrix beside that of the fixture, which has parameter, master and momentum. */
static struct matrix {
    struct test_param saved; /* as the last commit left it */
    bool has_grad, asked, written, applied;
    float *m; /* after the first phase of the open step */
    uint16_t *u, *o;
} model[MATRICES];
static bool prepared, deferred;

static int find_blocks(unsigned i, struct ht_optim_config *c, struct ht_optim_sections *sections)
{
    char err[HT_OPTIM_ERROR_MAX];
    bool stack = shape[i][0] > 1;

    return ht_muon_blocks(stack ? shape[i] : shape[i] + 1, stack ? 3 : 2, c, sections, err);
}

static int override(void *ctx, uint64_t oid, uint64_t as_of, const struct ht_optim_config *base,
                    struct ht_optim_config *out, struct ht_optim_sections *sections, char err[HT_OPTIM_ERROR_MAX])
{
    (void)ctx, (void)as_of, (void)err;
    *out = *base;
    for (unsigned i = 0; sections && i < w.params; i++)
        if (w.param[i].oid == oid)
            return find_blocks(i, out, sections);
    return 0;
}

static struct ht_scalars scalars_of(unsigned i)
{
    struct ht_optim_config c = fixture_config(w.config);
    struct ht_optim_sections none = {.section = NULL};
    struct ht_scalars s;

    ck_assert_int_eq(find_blocks(i, &c, &none), 0);
    ht_rule_scalars(&c, w.param[i].t + 1, &s);
    return s;
}

/* ------------------------------------------------------------------- model */

static void save(void)
{
    for (unsigned i = 0; i < MATRICES; i++) {
        const struct test_param *p = &w.param[i];
        struct test_param *to = &model[i].saved;
        void *const from[] = {p->p, p->master, p->m};
        void *into[] = {to->p, to->master, to->m};
        for (unsigned k = 0; k < HT_ARRAY_SIZE(from); k++) {
            into[k] = into[k] ? into[k] : malloc(p->n * 4);
            memcpy(into[k], from[k], p->n * 4);
        }
        *to = (struct test_param){.p = into[0], .master = into[1], .m = into[2], .t = p->t};
    }
}

static void end_step(bool back)
{
    prepared = false;
    for (unsigned i = 0; i < MATRICES; i++) {
        struct test_param *p = &w.param[i];
        const struct test_param *from = &model[i].saved;
        model[i].has_grad = model[i].asked = model[i].written = model[i].applied = false;
        if (!back)
            continue;
        memcpy(p->p, from->p, p->n * 4);
        memcpy(p->master, from->master, p->n * 4);
        memcpy(p->m, from->m, p->n * 4);
        p->t = from->t;
    }
}

static void open_matrices(const char *config, unsigned threads)
{
    static const uint8_t dtype[MATRICES] = {HT_DTYPE_F32, HT_DTYPE_BF16, HT_DTYPE_F32};
    static const uint8_t grad_dtype[MATRICES] = {HT_DTYPE_F32, HT_DTYPE_BF16, HT_DTYPE_BF16};

    w.hooks.override = override;
    fixture_open_as(&w, config, threads);
    deferred = strstr(config, "max_grad_norm");
    for (unsigned i = 0; i < MATRICES; i++) {
        uint64_t n = shape[i][0] * shape[i][1] * shape[i][2];
        fixture_param(&w, dtype[i], grad_dtype[i], n, i ? HT_SMALL_CHUNK_BYTES : HT_CHUNK_BYTES);
        model[i] = (struct matrix){.m = calloc(n, 4), .u = calloc(n, 2), .o = calloc(n, 2)};
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    save();
}

static void close_matrices(void)
{
    for (unsigned i = 0; i < MATRICES; i++) {
        forget_model(&model[i].saved);
        free(model[i].m);
        free(model[i].u);
        free(model[i].o);
    }
    fixture_close(&w);
}

static void model_gradient(unsigned i, const uint8_t *g)
{
    const struct test_param *p = &w.param[i];
    struct ht_scalars s = scalars_of(i);

    memcpy(model[i].m, p->m, p->n * 4);
    MODEL_KERNELS->stir(&s, model[i].m, g, p->grad_dtype, model[i].u, p->n);
    for (uint64_t k = 0; k < p->n; k++)
        model[i].o[k] = ht_f32_to_bf16(random_value(&w));
}

static void model_apply(unsigned i)
{
    struct test_param *p = &w.param[i];
    struct ht_scalars s = scalars_of(i);
    struct ht_update a = {.p = p->p,
                          .master = dtype_bytes(p->dtype) == 2 ? p->master : NULL,
                          .g = model[i].o,
                          .p_dtype = p->dtype,
                          .g_dtype = HT_DTYPE_BF16};

    s.grad_factor = 1;
    s.maximize = false;
    MODEL_KERNELS->fn[s.kernel](&s, &a, p->n);
    memcpy(p->m, model[i].m, p->n * 4);
    p->t++;
}

/* ------------------------------------------------------------------- calls */

static int call_gradient(unsigned i)
{
    const struct test_param *p = &w.param[i];
    uint8_t *g = random_gradient(&w, p);
    struct ht_grad *open = open_grad(&w, p);
    size_t len = p->n * dtype_bytes(p->grad_dtype);
    ssize_t n = ht_grad_write(open, 0, g, len);
    int rc = n < 0 ? (int)n : ht_grad_flush(open);

    ck_assert_int_eq(rc, prepared || model[i].has_grad ? -EBUSY : 0);
    ht_grad_release(open);
    if (!rc) {
        model_gradient(i, g);
        model[i].has_grad = true;
    }
    return rc;
}

static void call_update(unsigned i)
{
    const struct test_param *p = &w.param[i];
    struct ht_param_desc desc = fixture_desc(p);
    uint16_t *got = malloc(p->n * 2);
    bool may = model[i].has_grad && !model[i].applied && (!deferred || prepared);
    ssize_t n = ht_optim_update_read(w.o, &desc, 0, got, p->n * 2 + 10);

    ck_assert_int_eq(n, may ? (ssize_t)(p->n * 2) : -EBUSY);
    ck_assert(!may || !memcmp(got, model[i].u, p->n * 2));
    ck_assert(!may || ht_optim_update_read(w.o, &desc, p->n * 2 - 2, got, 100) == 2);
    model[i].asked |= may;
    free(got);
}

/* Elements [first, last). */
static int call_ortho(unsigned i, uint64_t first, uint64_t last)
{
    struct ht_param_desc desc = fixture_desc(&w.param[i]);
    bool may = model[i].has_grad && model[i].asked && !model[i].applied;
    ssize_t n = ht_optim_ortho_write(w.o, &desc, first * 2, model[i].o + first, (last - first) * 2);

    ck_assert_int_eq(n, may ? (ssize_t)((last - first) * 2) : -EBUSY);
    model[i].written |= may && first == 0 && last == w.param[i].n;
    return n < 0 ? (int)n : 0;
}

static void call_apply(unsigned i, bool right)
{
    uint64_t step = fixture_stat(&w).step_open + !right;
    int rc = ht_optim_ortho_apply(w.o, ROOT, w.param[i].oid, step);
    bool early = !model[i].has_grad || !model[i].asked || model[i].applied;
    int want = !right ? -ESTALE : early ? -EBUSY : !model[i].written ? -EINVAL : 0;

    ck_assert_msg(rc == want || rc == -ENOENT, "%d in place of %d", rc, want);
    ck_assert(rc != -ENOENT || !model[i].has_grad); /* since the mount it never had one */
    if (!rc)
        model[i].applied = true;
}

/* Bytes that no update takes, and then others in their place. */
static void call_not_finite(unsigned i)
{
    struct ht_param_desc desc = fixture_desc(&w.param[i]);
    uint16_t bad = fixture_random(&w) & 1 ? 0x7fc0 : 0xff80, good;
    uint64_t at = fixture_random(&w) % w.param[i].n;

    if (call_ortho(i, 0, w.param[i].n))
        return;
    good = model[i].o[at];
    ck_assert_int_eq(ht_optim_ortho_write(w.o, &desc, at * 2, &bad, 2), 2);
    ck_assert_int_eq(ht_optim_ortho_apply(w.o, ROOT, w.param[i].oid, fixture_stat(&w).step_open), -EINVAL);
    check_error(&w, &w.param[i], "not finite");
    ck_assert_int_eq(ht_optim_ortho_write(w.o, &desc, at * 2, &good, 2), 2);
}

static void call_prepare(void)
{
    ck_assert_int_eq(ht_optim_prepare_by(w.o, ROOT, &(struct ht_optim_steer){0}), 0);
    prepared |= fixture_stat(&w).open;
}

static void call_step(unsigned how)
{
    bool missing = false;
    int rc = how == 0 ? ht_optim_step(w.o, ROOT)
        : how == 1    ? ht_optim_commit(w.o, ROOT)
                      : ht_optim_step_async(w.o, ROOT);

    for (unsigned i = 0; i < MATRICES; i++)
        missing |= model[i].has_grad && !model[i].applied;
    ck_assert_int_eq(rc, missing ? -EBUSY : 0);
    if (missing)
        return;
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    for (unsigned i = 0; i < MATRICES; i++)
        if (model[i].has_grad)
            model_apply(i);
    end_step(false);
    save();
    check_all(&w);
}

static void call_drop(unsigned i)
{
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0); /* the first phase has run, or waits for prepare */
    bool late = prepared || (model[i].has_grad && !deferred);
    int rc = ht_optim_drop(w.o, ROOT, w.param[i].oid, NULL);

    ck_assert_int_eq(rc, late ? -EBUSY : 0);
    model[i].has_grad &= late;
}

static void call_back(bool crash)
{
    if (crash)
        crash_and_mount();
    else
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    end_step(true);
    check_all(&w);
}

/* What is missing until the step can end. */
static void call_rest(void)
{
    if (deferred)
        call_prepare();
    for (unsigned i = 0; i < MATRICES; i++) {
        if (!model[i].has_grad || model[i].applied)
            continue;
        call_update(i);
        call_ortho(i, 0, w.param[i].n);
        call_apply(i, true);
    }
    call_step((unsigned)(fixture_random(&w) % 3));
}

static void call_any(void)
{
    unsigned i = (unsigned)(fixture_random(&w) % MATRICES), which = (unsigned)(fixture_random(&w) % 64);
    uint64_t n = w.param[i].n, first = fixture_random(&w) % n;

    if (which < 14)
        call_gradient(i);
    else if (which < 24)
        call_update(i);
    else if (which < 36)
        call_ortho(i, which < 34 ? 0 : first, which < 34 ? n : first + (n - first) / 2);
    else if (which < 48)
        call_apply(i, which < 46);
    else if (which < 51)
        call_not_finite(i);
    else if (which < 54)
        call_prepare();
    else if (which < 57)
        call_step(which % 3);
    else if (which < 60)
        call_rest();
    else if (which < 62)
        call_drop(i);
    else
        call_back(which == 62 && fixture_random(&w) % 4 == 0);
}

static const char *const configs[] = {
    "muon lr=1e-2 weight_decay=0.1",
    "muon lr=1e-2 momentum=0.25 nesterov=0 maximize=1 max_grad_norm=1e30",
    "muon lr=1e-2 adjust_lr=match_rms_adamw redo=on durable_every=100",
    "muon lr=1e-2 grad_scale=4 max_grad_norm=1e30 redo=on durable_every=3",
};

TEST_LOOP(each_order_of_calls_does_what_it_says_or_is_refused, HT_ARRAY_SIZE(configs))
{
    unsigned steps = 0;

    open_matrices(configs[_i], 3);
    for (unsigned i = 0; i < CALLS; i++)
        call_any();
    call_back(false);
    for (unsigned i = 0; i < MATRICES; i++)
        steps += (unsigned)w.param[i].t;
    ck_assert_uint_gt(steps, 5);
    close_matrices();
}

/* -------------------------------------------------------------- by the store */

static bool never(void *ctx)
{
    (void)ctx;
    return false;
}

/* Blocks as the words say, each orthogonalised alone. */
static int compute(void *ctx, uint64_t first, uint32_t rows)
{
    const unsigned *i = ctx;
    struct ht_optim_config c = fixture_config(w.config);

    memcpy(model[*i].o + first, model[*i].u + first, rows * shape[*i][2] * 2);
    return ht_newton_schulz(&ht_kernels_scalar, &c, model[*i].o + first, rows, (uint32_t)shape[*i][2], never, NULL);
}

TEST_LOOP(the_store_orthogonalises_with_the_same_bits_whatever_the_threads, 3)
{
    static const char *const text[] = {"muon lr=1e-2 ns=store", "muon lr=1e-2 ns=store max_grad_norm=1e30",
                                       "muon lr=1e-2 ns=store redo=on durable_every=100"};

    open_matrices(text[_i], _i ? 4 : 1);
    for (unsigned step = 0; step < 3; step++) {
        for (unsigned i = 0; i < MATRICES; i++) {
            struct ht_optim_config c = fixture_config(w.config);
            struct ht_optim_sections none = {.section = NULL};
            ck_assert_int_eq(call_gradient(i), 0);
            ck_assert_int_eq(find_blocks(i, &c, &none), 0);
            ck_assert_int_eq(ht_muon_each_block(&c, compute, &i), 0);
        }
        ck_assert_int_eq(step & 1 ? ht_optim_step_async(w.o, ROOT) : ht_optim_step(w.o, ROOT), 0);
        for (unsigned i = 0; i < MATRICES; i++)
            ck_assert_int_eq(ht_optim_wait(w.o, ROOT, w.param[i].oid), 0);
        ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
        for (unsigned i = 0; i < MATRICES; i++)
            model_apply(i);
        end_step(false);
        save();
        check_all(&w);
    }
    crash_and_check();
    close_matrices();
}

RUN_TESTS("ortho", .timeout_s = 300)
