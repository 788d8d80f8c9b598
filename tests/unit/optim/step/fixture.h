/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fixture.h - a store on a device of memory with one model root, its optimizer, and a plain model of the result of
 * every step: a kernel over whole arrays.
 */
#pragma once

#include <math.h>

#include "optim/rules/rule.h"
#include "optim/optim.h"
#include "tests/support/dev.h"
#include "tests/support/memory.h"
#include "tests/support/steps.h"
#include "tests/support/suite.h"
#include "tiering/base/fault.h"
#include "tiering/base/hash.h"
#include "tiering/api/batch_pin.h"
#include "tiering/api/object.h"
#include "tiering/api/stats.h"
#include "tiering/api/store.h"
#include "tiering/api/tx.h"

/*
 * test_kernel and test_pipeline compare kernels with the scalar one. Sanitizers make that slow, so other tests take the
 * fastest.
 */
#ifndef MODEL_KERNELS
#define MODEL_KERNELS ht_kernels_choose()
#endif

enum { MIB = 1 << 20, ROOT = 1000, PARAMS_MAX = 9 };

struct test_param {
    uint64_t oid;
    struct ht_obj *obj;
    uint8_t dtype, grad_dtype;
    uint64_t n;
    /* the model */
    uint8_t *p;
    float *master, *m, *v;
    uint64_t t;
};

struct fixture {
    uint64_t device_bytes, dram_bytes, shm_bytes;
    unsigned threads;
    bool no_plan;
    const char *config;
    struct ht_dev *dev;
    struct ht_store *s;
    struct ht_optim *o;
    struct test_param param[PARAMS_MAX];
    unsigned params;
    uint64_t rnd;
    struct ht_optim_hooks hooks;
    atomic_uint invalidations, aborts;
    int (*emitting)(void); /* in a checkpoint, inside a transaction, before the optimizer emits; 1: again */
    void (*publish)(struct fixture *w); /* in a commit of the root, between the optimizer and objects */
    void (*before_start)(
        struct fixture *w); /* after a mount, before the optimizer starts; nobody waits for its replay then */
};

static inline uint64_t fixture_random(struct fixture *w)
{
    return random_next(&w->rnd);
}

/* ------------------------------------------------------------------- mount */

static inline void fixture_invalidate(void *ctx, uint64_t oid, uint64_t off, uint64_t len)
{
    (void)oid, (void)off;
    ck_assert(len > 0);
    ((struct fixture *)ctx)->invalidations++;
}

/* In place of the names, which take part in commits and aborts. */
static inline void fixture_abort(void *ctx, uint64_t scope)
{
    ck_assert_uint_eq(scope, ROOT);
    ((struct fixture *)ctx)->aborts++;
}

static inline int fixture_emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes)
{
    const struct fixture *w = ctx;

    (void)tx, (void)cursor, (void)max_bytes;
    return w->emitting ? w->emitting() : 0;
}

static inline void fixture_name(void *ctx, uint64_t oid, char *buf, size_t cap)
{
    (void)ctx;
    snprintf(buf, cap, "param-%llu", (unsigned long long)oid);
}

static inline struct ht_optim_config fixture_config(const char *text)
{
    struct ht_optim_config c;
    char err[HT_OPTIM_ERROR_MAX];

    ck_assert_int_eq(ht_optim_config_parse(text, strlen(text), &c, err), 0);
    return c;
}

/* A participant of commits after the optimizer, before objects are published: other threads may change them then. */
static inline void fixture_publish(void *ctx, uint64_t scope, size_t expected_bytes, struct ht_tx *tx)
{
    struct fixture *w = ctx;

    (void)expected_bytes, (void)tx;
    if (w->publish && scope == ROOT)
        w->publish(w);
}

static inline void fixture_mount(struct fixture *w)
{
    struct ht_store_opts opts = {.dram_bytes = w->dram_bytes,
                                 .shm_bytes = w->shm_bytes,
                                 .staging_bytes = 24 * MIB,
                                 .numa_node = HT_NUMA_OFF,
                                 .no_plan = w->no_plan};
    struct ht_participant names = {HT_REC_NS_FIRST, HT_REC_NS_LAST, .ctx = w, .abort = fixture_abort,
                                   .emit = fixture_emit};
    struct ht_participant last = {
        .type_first = HT_REC_OPT_LAST + 1, .type_last = HT_REC_OPT_LAST + 1, .ctx = w, .publish = fixture_publish};
    struct ht_optim_config config = fixture_config(w->config);
    const struct ht_optim_setup setup = {.threads = w->threads, .hooks = &w->hooks};
    struct ht_tx *tx;
    uint64_t lsn;
    void *o;

    w->hooks.ctx = w;
    w->hooks.invalidate = fixture_invalidate;
    w->hooks.name = fixture_name;
    ck_assert_int_eq(ht_store_new(&w->dev, 1, &opts, &w->s), 0);
    ck_assert_int_eq(ht_store_register(w->s, &names), 0);
    ck_assert_int_eq(ht_participant_optim.make(w->s, &setup, &o), 0);
    w->o = o;
    ck_assert_int_eq(ht_store_register(w->s, &last), 0);
    ck_assert_int_eq(ht_store_mount(w->s), 0);
    if (w->before_start)
        w->before_start(w);
    ck_assert_int_eq(ht_participant_optim.start(w->o), 0);
    if (!w->before_start)
        ht_optim_recovered(w->o);
    ck_assert_int_eq(ht_tx_begin(w->s, 100, &tx), 0);
    ck_assert_int_eq(ht_optim_root_add(w->o, ROOT, &config, tx), 0);
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(w->s, lsn), 0);
    for (unsigned i = 0; i < w->params; i++)
        w->param[i].obj = ht_obj_get(w->s, w->param[i].oid);
}

static inline void fixture_do_nothing(struct fixture *w)
{
    (void)w;
}

/* Nobody waits for the replay of this mount. */
static inline void fixture_mount_and_go_on(struct fixture *w)
{
    w->before_start = fixture_do_nothing;
    fixture_mount(w);
    w->before_start = NULL;
}

static inline void fixture_open(struct fixture *w)
{
    struct ht_format_opts opts = {0};
    struct ht_super sb;

    if (!w->device_bytes)
        w->device_bytes = 192ull * MIB;
    if (!w->dram_bytes)
        w->dram_bytes = 8 * MIB;
    if (!w->config)
        w->config = "adamw lr=1e-2 weight_decay=0.1";
    w->rnd = 88172645463325252ull;
    ck_assert_int_eq(dev_open_ram(w->device_bytes, 512, &w->dev), 0);
    ck_assert_int_eq(ht_super_format(&w->dev, 1, &opts, &sb), 0);
    fixture_mount(w);
}

static inline void put_params(struct fixture *w)
{
    for (unsigned i = 0; i < w->params; i++) {
        ht_obj_put(w->param[i].obj);
        w->param[i].obj = NULL;
    }
}

static inline void fixture_unmount(struct fixture *w)
{
    put_params(w);
    ht_optim_stop(w->o);
    ck_assert_int_eq(ht_store_unmount(w->s), 0);
    ht_participant_optim.free(w->o);
    ht_store_close(w->s);
}

/* Nothing more is written, as when the daemon dies. */
static inline void fixture_crash(struct fixture *w)
{
    put_params(w);
    ht_optim_stop(w->o);
    ht_store_close(w->s);
    ht_participant_optim.free(w->o);
}

static inline void forget_model(struct test_param *p)
{
    free(p->p);
    free(p->master);
    free(p->m);
    free(p->v);
}

static inline void fixture_close(struct fixture *w)
{
    fixture_unmount(w);
    ht_dev_close(w->dev);
    for (unsigned i = 0; i < w->params; i++)
        forget_model(&w->param[i]);
    memset(w, 0, sizeof(*w));
}

/* -------------------------------------------------------------- parameters */

static inline size_t dtype_bytes(uint8_t dtype)
{
    return ht_dtype_trained_bytes(dtype);
}

static inline float random_value(struct fixture *w)
{
    return ((float)(fixture_random(w) >> 40) / (1 << 24) - 0.5f) * 0.2f;
}

static inline void put_value(void *array, uint8_t dtype, uint64_t i, float x)
{
    uint16_t half;

    if (dtype_bytes(dtype) != 2) {
        memcpy((uint8_t *)array + 4 * i, &x, 4);
        return;
    }
    half = dtype == HT_DTYPE_BF16 ? ht_f32_to_bf16(x) : ht_f32_to_f16(x);
    memcpy((uint8_t *)array + 2 * i, &half, 2);
}

static inline struct ht_param_desc fixture_desc(const struct test_param *p)
{
    return (struct ht_param_desc){ROOT, p->obj, p->dtype, p->grad_dtype};
}

/* As if it had never had any state: masters of bf16 equal the parameter, others are nothing until they are written. */
static inline void forget_state(struct test_param *p)
{
    memset(p->m, 0, p->n * 4);
    memset(p->v, 0, p->n * 4);
    memset(p->master, 0, p->n * 4);
    for (uint64_t i = 0; p->dtype == HT_DTYPE_BF16 && i < p->n; i++)
        p->master[i] = ht_kernel_element(p->p, p->dtype, i);
    p->t = 0;
}

/* A parameter of n elements with random values, in the root's scope, not yet committed. */
static inline struct test_param *fixture_param(struct fixture *w, uint8_t dtype, uint8_t grad_dtype, uint64_t n,
                                               uint32_t chunk_bytes)
{
    struct test_param *p = &w->param[w->params++];
    struct ht_obj_attr attr = {.oid = ht_store_new_id(w->s), .chunk_bytes = chunk_bytes, .scope = ROOT};
    size_t bytes = n * dtype_bytes(dtype);

    *p = (struct test_param){.oid = attr.oid, .dtype = dtype, .grad_dtype = grad_dtype, .n = n};
    p->p = calloc(n, 4);
    p->master = calloc(n, 4);
    p->m = calloc(n, 4);
    p->v = calloc(n, 4);
    for (uint64_t i = 0; i < n; i++)
        put_value(p->p, dtype, i, random_value(w));
    forget_state(p);
    ck_assert_int_eq(ht_obj_create(w->s, &attr, &p->obj), 0);
    ck_assert_int_eq(ht_obj_write(p->obj, 0, p->p, bytes), (ssize_t)bytes);
    return p;
}

static inline void fixture_open_as(struct fixture *w, const char *config, unsigned threads)
{
    w->config = config;
    w->threads = threads;
    fixture_open(w);
}

/* Parameters of all dtypes; none is a whole number of chunks. */
static inline void fixture_mixed_params(struct fixture *w, uint32_t chunk_bytes)
{
    fixture_param(w, HT_DTYPE_F32, HT_DTYPE_F32, 70001, chunk_bytes);
    fixture_param(w, HT_DTYPE_F32, HT_DTYPE_BF16, 100003, chunk_bytes);
    fixture_param(w, HT_DTYPE_BF16, HT_DTYPE_F32, 50000, chunk_bytes);
    fixture_param(w, HT_DTYPE_F16, HT_DTYPE_F16, 17, chunk_bytes);
}

/* A model with a parameter of each kind, committed. */
static inline void fixture_begin_mixed(struct fixture *w, const char *config, unsigned threads)
{
    memset(w, 0, sizeof(*w));
    fixture_open_as(w, config, threads);
    fixture_mixed_params(w, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w->o, ROOT), 0);
}

/* Of the content of parameters as the store has it, also where no reader may see it. */
static inline uint64_t fixture_stored_hash(struct fixture *w)
{
    uint64_t hash = 0;

    for (unsigned i = 0; i < w->params; i++) {
        const struct test_param *p = &w->param[i];
        size_t len = p->n * dtype_bytes(p->dtype);
        uint8_t *bytes = malloc(len);
        ck_assert_int_eq(ht_obj_read(p->obj, 0, bytes, len), (ssize_t)len);
        hash = ht_hash64(bytes, len, hash);
        free(bytes);
    }
    return hash;
}

/* Of parameters and all their state. */
static inline uint64_t fixture_hash(struct fixture *w)
{
    uint64_t hash = 0;
    const char *name;

    for (unsigned i = 0; i < w->params; i++) {
        const struct test_param *p = &w->param[i];
        struct ht_param_desc desc = fixture_desc(p);
        uint8_t *bytes = calloc(p->n, 4);
        ssize_t n = ht_obj_read(p->obj, 0, bytes, p->n * dtype_bytes(p->dtype));
        ck_assert_int_eq(n, (ssize_t)(p->n * dtype_bytes(p->dtype)));
        hash = ht_hash64(bytes, (size_t)n, hash);
        for (unsigned k = 0; ht_optim_state_name(w->o, &desc, k, &name) == 0; k++) {
            n = ht_optim_state_read(w->o, &desc, name, 0, bytes, p->n * 4);
            ck_assert_int_ge(n, 0);
            hash = ht_hash64(bytes, (size_t)n, hash);
        }
        free(bytes);
    }
    return hash;
}

/* ------------------------------------------------------------------- steps */

static inline uint8_t *random_gradient(struct fixture *w, const struct test_param *p)
{
    uint8_t *g = test_alloc(p->n * 4 + 1);

    for (uint64_t i = 0; i < p->n; i++)
        put_value(g, p->grad_dtype, i, random_value(w) * 3);
    return g;
}

/* Elements [first, last) of the model by one step; count: whether it is the first call of this step. */
static inline void model_update(struct test_param *p, const struct ht_optim_config *c, const uint8_t *g, uint64_t first,
                                uint64_t last, bool count)
{
    struct ht_scalars s;
    struct ht_update a = {
        .p = p->p + first * dtype_bytes(p->dtype),
        .master = dtype_bytes(p->dtype) == 2 ? p->master + first : NULL,
        .state = {p->m + first, p->v + first},
        .g = g + first * dtype_bytes(p->grad_dtype),
        .p_dtype = p->dtype,
        .g_dtype = p->grad_dtype,
    };

    p->t += count;
    ht_rule_scalars(c, p->t, &s);
    MODEL_KERNELS->fn[s.kernel](&s, &a, last - first);
}

static inline struct ht_grad *open_grad(struct fixture *w, const struct test_param *p)
{
    struct ht_param_desc desc = fixture_desc(p);
    struct ht_grad *g = NULL;

    ck_assert_int_eq(ht_grad_open(w->o, &desc, &g), 0);
    return g;
}

static inline void write_all(struct ht_grad *g, uint64_t off, const uint8_t *bytes, size_t len)
{
    ck_assert_int_eq(ht_grad_write(g, off, bytes + off, len), (ssize_t)len);
}

/* Opens, writes all in one order, closes. */
static inline void write_gradient(struct fixture *w, const struct test_param *p, const uint8_t *bytes)
{
    struct ht_grad *g = open_grad(w, p);
    size_t len = p->n * dtype_bytes(p->grad_dtype);

    for (size_t off = 0; off < len; off += 128 * 1024)
        write_all(g, off, bytes, ht_min_u64(128 * 1024, len - off));
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ht_grad_release(g);
}

/* A gradient that depends on parameter, step and pass alone; one value is not finite in step 4. */
static inline void fixture_send(struct fixture *w, unsigned i, unsigned step, unsigned pass)
{
    struct test_param *p = &w->param[i];

    w->rnd = 88172645463325252ull + i * 1000003ull + step * 10007ull + pass;
    uint8_t *g = random_gradient(w, p);
    if (step == 4 && i == 1)
        put_value(g, p->grad_dtype, 77, INFINITY);
    write_gradient(w, p, g);
    free(g);
}

/* Not every parameter has a gradient in each step. */
static inline void fixture_send_pass(struct fixture *w, unsigned step, unsigned pass)
{
    for (unsigned i = 0; i < w->params; i++)
        if ((step + i) % 5 != 4)
            fixture_send(w, i, step, pass);
}

/* All passes of a step. */
static inline void fixture_send_most(struct fixture *w, unsigned step)
{
    unsigned passes = fixture_config(w->config).accumulate;

    for (unsigned pass = 0; pass < passes; pass++)
        fixture_send_pass(w, step, pass);
}

/* Content that leaves so many bytes free, about. */
static inline struct ht_obj *fixture_fill(struct fixture *w, uint64_t leave)
{
    struct ht_obj_attr attr = {.oid = ht_store_new_id(w->s), .chunk_bytes = HT_CHUNK_BYTES};
    uint8_t *bytes = calloc(1, MIB);
    struct ht_obj *filler;
    uint64_t off = 0;

    ck_assert_int_eq(ht_obj_create(w->s, &attr, &filler), 0);
    for (size_t len = MIB; len >= 4096; len /= 2) {
        memset(bytes, (int)(off >> 12) + 1, MIB);
        while (ht_store_available(w->s) >= leave + len && ht_obj_write(filler, off, bytes, len) == (ssize_t)len)
            off += len;
    }
    free(bytes);
    return filler;
}

static inline void fixture_train(struct fixture *w, unsigned first, unsigned last)
{
    for (unsigned step = first; step <= last; step++) {
        fixture_send_most(w, step);
        ck_assert_int_eq(ht_optim_step(w->o, ROOT), 0);
    }
}

/* A whole gradient for p, in the store and in the model. */
static inline void step_param(struct fixture *w, struct test_param *p)
{
    struct ht_optim_config c = fixture_config(w->config);
    uint8_t *g = random_gradient(w, p);

    write_gradient(w, p, g);
    model_update(p, &c, g, 0, p->n, true);
    free(g);
}

static inline void step_all(struct fixture *w)
{
    for (unsigned i = 0; i < w->params; i++)
        step_param(w, &w->param[i]);
}

/* ------------------------------------------------------------------- check */

static inline bool same_state(struct fixture *w, const struct test_param *p, const char *name, const void *want)
{
    struct ht_param_desc desc = fixture_desc(p);
    uint8_t *got = malloc(p->n * 4 + 1);
    ssize_t n = ht_optim_state_read(w->o, &desc, name, 0, got, p->n * 4);
    bool same = n == (ssize_t)(p->n * 4) && !memcmp(got, want, p->n * 4);

    free(got);
    return same;
}

static inline void check_param(struct fixture *w, const struct test_param *p)
{
    size_t bytes = p->n * dtype_bytes(p->dtype);
    uint8_t *got = malloc(bytes + 1);
    struct ht_param_desc desc = fixture_desc(p);
    float t = -1;

    ck_assert_int_eq(ht_obj_read(p->obj, 0, got, bytes), (ssize_t)bytes);
    ck_assert_msg(!memcmp(got, p->p, bytes), "parameter %llu differs", (unsigned long long)p->oid);
    free(got);
    if (!p->t)
        return;
    struct ht_optim_config c = fixture_config(w->config);
    const float *state[] = {p->m, p->v};
    const uint8_t *kind = ht_kernel_kinds(ht_rule_kernel(&c));
    for (unsigned i = 0; i < ht_kernel_states(ht_rule_kernel(&c)); i++)
        ck_assert_msg(same_state(w, p, ht_state_word(kind[i]), state[i]), "%s of %llu differs", ht_state_word(kind[i]),
                      (unsigned long long)p->oid);
    ck_assert(dtype_bytes(p->dtype) != 2 || same_state(w, p, "master", p->master));
    ck_assert_int_eq(ht_optim_state_read(w->o, &desc, "step", 0, &t, 4), 4);
    ck_assert(t == (float)p->t);
}

struct owned {
    unsigned count;
    uint64_t param[64], oid[64];
};

static inline int note_states(void *ctx, const struct ht_optim_entry *e)
{
    struct owned *all = ctx;

    for (unsigned i = 0; i < e->state_count && all->count < HT_ARRAY_SIZE(all->oid); i++) {
        all->param[all->count] = e->parameter;
        all->oid[all->count++] = e->states[i];
    }
    return 0;
}

/* Each state object is found as its parameter's. */
static inline void check_owners(struct fixture *w)
{
    struct owned all = {0};

    ck_assert_int_eq(ht_optim_walk(w->o, note_states, &all), 0);
    for (unsigned i = 0; i < all.count; i++) {
        const char *name;
        uint64_t param = 0;
        ck_assert_int_eq(ht_optim_state_owner(w->o, all.oid[i], &param, &name), 0);
        ck_assert_uint_eq(param, all.param[i]);
    }
}

static inline void check_all(struct fixture *w)
{
    ht_optim_verify(w->o);
    check_owners(w);
    ht_store_verify(w->s, false);
    for (unsigned i = 0; i < w->params; i++)
        check_param(w, &w->param[i]);
}

/* The file of a parameter is deleted; w->param[i] stays. */
static inline void fixture_delete(struct fixture *w, unsigned i)
{
    const struct test_param *p = &w->param[i];
    struct ht_tx *tx;

    ck_assert_int_eq(ht_tx_begin(w->s, 0, &tx), 0);
    ht_optim_param_deleted(w->o, p->oid, true, tx);
    ht_obj_delete(p->obj, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
}

static inline struct ht_root_stat fixture_stat(struct fixture *w)
{
    struct ht_root_stat st;

    ck_assert_int_eq(ht_optim_root_stat(w->o, ROOT, &st), 0);
    ht_optim_root_sums(w->o, ROOT, &st);
    return st;
}

/* The root's error names the parameter and the words. */
static inline void check_error(struct fixture *w, const struct test_param *p, const char *words)
{
    struct ht_root_stat st = fixture_stat(w);
    char name[64];

    snprintf(name, sizeof(name), "param-%llu: ", (unsigned long long)p->oid);
    ck_assert_msg(!strncmp(st.error, name, strlen(name)) && strstr(st.error, words), "error is \"%s\"", st.error);
    ht_optim_root_clear_error(w->o, ROOT);
}

/* --------------------------------------------------------- of the program */

static struct fixture w;

/* With one parameter of f32. */
static inline struct test_param *open_with_param(const char *config, unsigned threads, uint64_t elements)
{
    fixture_open_as(&w, config, threads);
    return fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, elements, HT_SMALL_CHUNK_BYTES);
}

static inline void open_mixed(const char *config, unsigned threads, uint32_t chunk_bytes)
{
    fixture_open_as(&w, config, threads);
    fixture_mixed_params(&w, chunk_bytes);
}

static inline void close_grad(struct ht_grad *g)
{
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ht_grad_release(g);
}

/* A whole gradient, not into the model. */
static inline void send_random(const struct test_param *p)
{
    uint8_t *g = random_gradient(&w, p);

    write_gradient(&w, p, g);
    free(g);
}

static inline void commit_and_check(void)
{
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    check_all(&w);
}

/* A step with a whole gradient of each parameter. */
static inline void step_once(void)
{
    step_all(&w);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

static inline void check_all_at(uint64_t step)
{
    ck_assert_uint_eq(fixture_stat(&w).step, step);
    check_all(&w);
}

static inline void remount(void)
{
    fixture_unmount(&w);
    fixture_mount(&w);
}

static inline void remount_and_check(void)
{
    remount();
    check_all(&w);
}

static inline void crash_and_mount(void)
{
    fixture_crash(&w);
    fixture_mount(&w);
}

static inline void crash_and_check(void)
{
    crash_and_mount();
    check_all(&w);
}

/* For run_tests(): after a test, unless it closed w itself. */
static inline void fixture_end(void)
{
    if (w.s)
        fixture_close(&w);
}

/* As for a directory that is no model any more: its parameters leave the scope of the root. */
static inline int fixture_unmake(void *ctx)
{
    struct ht_tx *tx;

    ck_assert_int_eq(ht_tx_begin(w.s, 4096, &tx), 0);
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_int_eq(ht_obj_set_scope(w.param[i].obj, 0, tx), 0);
    ht_scope_end(w.s, ROOT, HT_SCOPE_DISSOLVED, tx);
    return ht_tx_commit(tx, NULL);
}

/* As autograd does: the first is the sum, each other is added to it in f32. */
static inline void fixture_add(float *sum, const struct test_param *p, const uint8_t *g, bool first)
{
    for (uint64_t i = 0; i < p->n; i++) {
        float x = ht_kernel_element(g, p->grad_dtype, i);
        sum[i] = first ? x : sum[i] + x;
    }
}

static inline struct ht_store_stats store_stats(void)
{
    struct ht_store_stats st;

    ht_store_stats(w.s, &st);
    return st;
}
