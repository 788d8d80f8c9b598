/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model_steps.c - long random work on a model root that logs its steps, against whole arrays: gradients of all and of
 * some parameters and elements, dense and sparse ones, steps of every kind, writes of parameters and state, resets, new
 * parameters, aborts, checkpoints, clean remounts, and crashes, also while logged steps are computed again.
 *
 * Each step is durable, logged or not. So after a crash and after an abort the root equals the arrays as they were when
 * the last call that committed returned. HITRAIN_SEED=N runs other work, HITRAIN_LONG=1 does fifty times as much.
 */
#include "tests/unit/optim/step/fixture.h"

enum { OPS = 200, LARGE = 40000, CHUNK = HT_SMALL_CHUNK_BYTES };

static const char *const configs[] = {
    "adamw lr=1e-2 weight_decay=0.1 partial=1 redo=on durable_every=100",
    "adamw lr=1e-2 partial=1 redo=on durable_every=5 redo_keep=3",
    "sgd lr=1e-2 momentum=0.9 partial=1 redo=on durable_every=7",
    "sgd lr=1e-2 partial=1 redo=on durable_every=100",
    "lion lr=1e-3 partial=1 redo=on durable_every=3",
    "adam lr=1e-2 maximize=1 partial=1 redo=on durable_every=2",
};

static uint64_t rnd; /* of the work; w.rnd makes the values */

/* What the last commit has made durable. */
static struct durable {
    struct test_param param[PARAMS_MAX];
    unsigned params;
    uint64_t step;
} last;
static uint64_t step;
static struct {
    unsigned logged, full, crashes, interrupted, aborts, unmounts, replayed;
} seen;

static uint64_t below(uint64_t n)
{
    return random_next(&rnd) % n;
}

/* ------------------------------------------------------------- durable steps */

static void *copy_of(const void *from, uint64_t n)
{
    void *to = malloc(n * 4);

    memcpy(to, from, n * 4);
    return to;
}

static struct test_param copy_param(const struct test_param *p)
{
    struct test_param copy = *p;

    copy.p = copy_of(p->p, p->n);
    copy.master = copy_of(p->master, p->n);
    copy.m = copy_of(p->m, p->n);
    copy.v = copy_of(p->v, p->n);
    return copy;
}

static void forget_durable(void)
{
    for (unsigned i = 0; i < last.params; i++)
        forget_model(&last.param[i]);
    last.params = 0;
}

static void note_durable(void)
{
    forget_durable();
    for (unsigned i = 0; i < w.params; i++)
        last.param[i] = copy_param(&w.param[i]);
    last.params = w.params;
    last.step = step;
}

/* The arrays as the last commit left them; parameters that are newer are gone. */
static void take_back(void)
{
    for (unsigned i = 0; i < w.params; i++) {
        struct ht_obj *obj = w.param[i].obj;
        forget_model(&w.param[i]);
        if (i < last.params) {
            w.param[i] = copy_param(&last.param[i]);
            w.param[i].obj = obj;
        } else {
            ht_obj_put(obj);
        }
    }
    w.params = last.params;
    step = last.step;
}

static void check(void)
{
    struct ht_root_stat st = fixture_stat(&w);

    ck_assert_uint_eq(st.step, step);
    ck_assert_uint_eq(st.durable_step, last.step);
    ck_assert_str_eq(st.error, "");
    check_all(&w);
}

/* ---------------------------------------------------------------- the steps */

/* Leaves one element of many, as in the gradient of an embedding. */
static void thin(uint8_t *g, const struct test_param *p)
{
    size_t size = dtype_bytes(p->grad_dtype);
    uint64_t every = 2 + below(20) * below(500);

    for (uint64_t i = 0; i < p->n; i++)
        if (i % every)
            memset(g + i * size, 0, size);
}

static void send_part(struct test_param *p, uint64_t first, uint64_t end, bool count)
{
    struct ht_optim_config c = fixture_config(w.config);
    size_t g_bytes = dtype_bytes(p->grad_dtype);
    uint8_t *g = random_gradient(&w, p);

    if (!below(3))
        thin(g, p);
    struct ht_grad *grad = open_grad(&w, p);
    size_t len = (end - first) * g_bytes;

    ck_assert_int_eq(ht_grad_write(grad, first * g_bytes, g + first * g_bytes, len), (ssize_t)len);
    ck_assert_int_eq(ht_grad_flush(grad), 0);
    ht_grad_release(grad);
    model_update(p, &c, g, first, end, count);
    free(g);
}

/* A whole gradient, or two parts with a gap. False: none. */
static bool send_gradient(struct test_param *p)
{
    switch (below(6)) {
    case 0:
        return false;
    case 1: {
        uint64_t a = below(p->n), b = a + 1 + below(p->n - a);
        send_part(p, a, b, true);
        if (b + 1 < p->n)
            send_part(p, b + 1, p->n, false);
        return true;
    }
    default:
        send_part(p, 0, p->n, true);
        return true;
    }
}

static bool send_gradients(void)
{
    unsigned from = (unsigned)below(w.params);
    bool any = false;

    for (unsigned i = 0; i < w.params; i++)
        any |= send_gradient(&w.param[(from + i) % w.params]);
    return any;
}

static void end_step(void)
{
    struct ht_optim_steer full = {.full = true};
    unsigned how = (unsigned)below(8);
    int rc = how == 0 ? ht_optim_commit_by(w.o, ROOT, &full)
        : how < 3     ? ht_optim_step_async(w.o, ROOT)
        : how < 6     ? ht_optim_step(w.o, ROOT)
                      : ht_optim_commit(w.o, ROOT);

    ck_assert_int_eq(rc, 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0); /* of the asynchronous one, which a crash may lose before */
    step++;
    note_durable();
    bool logged = fixture_stat(&w).logged_steps > 0;
    ck_assert(!logged || how != 0);
    seen.logged += logged;
    seen.full += !logged;
}

/* --------------------------------------------------------- no steps: writes */

static void write_param(void)
{
    struct test_param *p = &w.param[below(w.params)];
    size_t b = dtype_bytes(p->dtype);
    uint64_t i = below(p->n);

    put_value(p->p, p->dtype, i, random_value(&w));
    ck_assert_int_eq(ht_obj_write(p->obj, i * b, p->p + i * b, b), (ssize_t)b);
    if (!p->t && p->dtype == HT_DTYPE_BF16)
        p->master[i] = ht_kernel_element(p->p, p->dtype, i); /* no step has changed it */
    /* The block's masters are those that its parameters allow: what the store says now is what must come back. */
    if (p->t && b == 2) {
        struct ht_param_desc desc = fixture_desc(p);
        ck_assert_int_eq(ht_optim_state_read(w.o, &desc, "master", 0, p->master, p->n * 4), (ssize_t)(p->n * 4));
    }
}

static void write_state(void)
{
    struct test_param *p = &w.param[below(w.params)];
    struct ht_param_desc desc = fixture_desc(p);
    const char *name;
    float x = random_value(&w);
    uint64_t i = below(p->n);

    if (!p->t || ht_optim_state_name(w.o, &desc, 0, &name) ||
        (strcmp(name, "exp_avg") && strcmp(name, "momentum_buffer")))
        return;
    p->m[i] = x;
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, name, i * 4, &x, 4), 4);
}

static void reset(void)
{
    struct test_param *p = &w.param[below(w.params)];

    if (!p->t)
        return;
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, p->oid, NULL), 0);
    forget_state(p);
}

static void new_param(void)
{
    static const uint8_t dtypes[] = {HT_DTYPE_F32, HT_DTYPE_BF16, HT_DTYPE_F16};

    if (w.params < PARAMS_MAX)
        fixture_param(&w, dtypes[below(3)], dtypes[below(3)], 1 + below(LARGE), CHUNK);
}

/* A change that no gradient has: a step follows, or a commit without one, or a crash. */
static void write_something(void)
{
    switch (below(8)) {
    case 0:
        reset();
        break;
    case 1:
        new_param();
        break;
    case 2:
    case 3:
        write_state();
        break;
    default:
        write_param();
        break;
    }
}

static void commit_writes(void)
{
    write_something();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    note_durable();
}

/* ------------------------------------------------------------------- losses */

static void leave_something_open(void)
{
    if (below(2))
        write_something();
    if (below(2))
        send_gradients();
}

static void crash(void)
{
    leave_something_open();
    bool logged = fixture_stat(&w).logged_steps > 0;
    fixture_crash(&w);
    take_back();
    for (uint64_t again = below(3); again; again--) {
        fixture_mount_and_go_on(&w);
        for (uint64_t i = below(1 << below(9)); i; i--)
            sched_yield();
        seen.interrupted += fixture_stat(&w).replay_steps_left > 0;
        fixture_crash(&w);
    }
    fixture_mount(&w);
    seen.replayed += logged;
    seen.crashes++;
}

/* An orderly end makes writes durable that are outside of a step. */
static void remount_in_order(void)
{
    if (below(2))
        write_something();
    ck_assert_int_eq(ht_optim_finish(w.o), 0);
    note_durable();
    remount();
    seen.unmounts++;
}

/* --------------------------------------------------------------------- test */

static void work(void)
{
    switch (below(16)) {
    case 0:
        leave_something_open();
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
        take_back();
        seen.aborts++;
        break;
    case 1:
        crash();
        break;
    case 2:
        below(4) ? (void)0 : remount_in_order();
        break;
    case 3:
        ck_assert_int_eq(ht_store_checkpoint(w.s), 0);
        break;
    case 4:
        below(2) ? commit_writes() : write_something();
        break;
    default:
        if (send_gradients())
            end_step();
        break;
    }
}

TEST_LOOP(logged_steps_equal_the_model, HT_ARRAY_SIZE(configs))
{
    const char *seed = getenv("HITRAIN_SEED");
    unsigned ops = getenv("HITRAIN_LONG") ? 50 * OPS : OPS;

    memset(&w, 0, sizeof(w));
    memset(&seen, 0, sizeof(seen));
    rnd = 88172645463325252ull + 7919 * (unsigned)_i + 1000003 * (seed ? strtoull(seed, NULL, 10) : 0);
    step = 0;
    fixture_open_as(&w, configs[_i], 2);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, LARGE, CHUNK);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_BF16, LARGE + 1, CHUNK);
    fixture_param(&w, HT_DTYPE_F16, HT_DTYPE_F32, 17, CHUNK);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, 1, CHUNK);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    note_durable();
    for (unsigned i = 0; i < ops; i++) {
        work();
        check();
    }
    crash();
    check();
    printf("%s: %u logged and %u full ends of steps, %u crashes (%u with logged steps, %u more during a replay), "
           "%u aborts, %u unmounts\n",
           configs[_i], seen.logged, seen.full, seen.crashes, seen.replayed, seen.interrupted, seen.aborts,
           seen.unmounts);
    ck_assert(seen.logged && seen.full && seen.crashes && seen.replayed && seen.aborts);
    forget_durable();
    fixture_close(&w);
}

RUN_TESTS("logged steps against a model", .timeout_s = getenv("HITRAIN_LONG") ? 3600 : 300, .quiet = ERRORS_ONLY)
