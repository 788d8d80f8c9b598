/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whatever the threads, chunks, write order, memory and kernel: parameters and state are those
 * of one plain pass, bit for bit.
 */
#define MODEL_KERNELS model_kernels()
static const struct ht_kernels *model_kernels(void);
#include "tests/unit/optim/step/fixture.h"

#include <sched.h>

#include "optim/state/context.h"
#include "optim/state/param.h"

enum { STEPS = 3 };

/*
 * The plain pass takes most of the time: where kernels are compared with small parameters alone, it is the scalar one.
 */
static bool fast_pass;

static const struct ht_kernels *model_kernels(void)
{
    return fast_pass ? ht_kernels_choose() : &ht_kernels_scalar;
}

static const uint8_t pairs[][2] = {{HT_DTYPE_F32, HT_DTYPE_F32},
                                   {HT_DTYPE_F32, HT_DTYPE_BF16},
                                   {HT_DTYPE_BF16, HT_DTYPE_F32},
                                   {HT_DTYPE_BF16, HT_DTYPE_BF16}};

/* Parameters of all dtypes with sizes that end inside a chunk, a block and a vector. */
static void make_params(uint32_t chunk_bytes)
{
    uint64_t base = chunk_bytes / 4;

    fixture_param(&w, pairs[0][0], pairs[0][1], 2 * base + 1237, chunk_bytes);
    fixture_param(&w, pairs[1][0], pairs[1][1], 3 * base + 3, chunk_bytes);
    fixture_param(&w, pairs[2][0], pairs[2][1], 3 * base + 1, chunk_bytes);
    fixture_param(&w, pairs[3][0], pairs[3][1], 4 * base, chunk_bytes);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 17, chunk_bytes);
}

static void run_steps(void)
{
    for (unsigned i = 0; i < STEPS; i++)
        step_once();
    check_all(&w);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert(st.step == STEPS && st.durable_step == STEPS && !st.open);
}

TEST_LOOP(threads_and_chunks_change_nothing, 8)
{
    w.threads = (unsigned)_i % 4 + 1;
    fast_pass = _i >= 4;
    setenv("HITRAIN_KERNEL", _i & 1 ? "scalar" : "avx2", 1);
    fixture_open(&w);
    make_params(_i < 4 ? HT_SMALL_CHUNK_BYTES : HT_CHUNK_BYTES);
    run_steps();
}

static const char *const rules[] = {
    "adamw lr=1e-2 weight_decay=0.1",
    "adam lr=1e-2 weight_decay=0.1",
    "sgd lr=1e-2",
    "sgd lr=1e-2 momentum=0.9 dampening=0.1 weight_decay=0.1",
    "sgd lr=1e-2 momentum=0.9 nesterov=1 maximize=1",
    "lion lr=1e-3 weight_decay=0.1",
    "adagrad lr=1e-2 lr_decay=0.1",
};

TEST_LOOP(every_rule_and_pair_of_dtypes_steps, HT_ARRAY_SIZE(rules))
{
    static const uint8_t dtype[] = {HT_DTYPE_F32, HT_DTYPE_BF16, HT_DTYPE_F16};

    w.config = rules[_i];
    w.threads = 2;
    setenv("HITRAIN_KERNEL", "avx2", 1);
    fixture_open(&w);
    for (unsigned i = 0; i < 9; i++)
        fixture_param(&w, dtype[i / 3], dtype[i % 3], 20001 + i, HT_SMALL_CHUNK_BYTES);
    run_steps();
    remount_and_check();
    step_once();
    check_all(&w);
}

TEST(what_does_not_fit_in_memory_streams)
{
    fast_pass = true;
    w.threads = 3;
    w.device_bytes = 384ull * MIB;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, 3u << 19, HT_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 3u << 19, HT_CHUNK_BYTES);
    run_steps();
    struct ht_store_stats st = store_stats();
    ck_assert_uint_le(st.dram_used_bytes, w.dram_bytes);
    ck_assert_uint_ge(st.device_read_bytes, 30ull * MIB);
    remount_and_check();
}

static uint64_t gradient_writes(const struct test_param *p)
{
    struct ht_obj_stat st;

    lock(w.o);
    ht_obj_stat(ht_opt_param_find(w.o, p->oid)->grad, &st);
    unlock(w.o);
    return st.device_written_bytes;
}

/*
 * A gradient that is written faster than it is used waits for its turn outside the store,
 * instead of going through a device.
 */
TEST(a_fast_writer_costs_no_device_traffic)
{
    enum { CHUNKS = 48 };
    struct ht_dev_counters before, after;

    fast_pass = true;
    w.threads = 1;
    w.device_bytes = 512ull * MIB;
    w.dram_bytes = 16ull * MIB;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, CHUNKS * MIB / 4, HT_CHUNK_BYTES);
    step_all(&w); /* makes the state */
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    uint8_t *bytes = test_alloc(CHUNKS * MIB);
    struct ht_grad *g = open_grad(&w, &w.param[0]);
    uint64_t earlier = gradient_writes(&w.param[0]);
    ht_dev_counters(w.dev, &before);
    for (size_t i = 0; i < CHUNKS; i++) {
        write_all(g, i * MIB, bytes, MIB);
        ck_assert_int_eq(ht_grad_flush(g), 0);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ht_dev_counters(w.dev, &after);
    /* That the step before found no room is remembered for as many images as there are. Until then some go through. */
    uint64_t through = gradient_writes(&w.param[0]) - earlier;
    ck_assert_uint_le(through, w.dram_bytes);
    ck_assert_uint_lt(after.written_bytes - before.written_bytes, 3ull * CHUNKS * MIB + MIB + through);
    ht_grad_release(g);
}

enum { KEEP_RANGES = 12, KEEP_ARRAYS = 3 }; /* parameter and two moments */

/* A step whose ranges come in one order or the other. */
static void step_in_order(struct test_param *p, const uint8_t *bytes, bool backwards)
{
    struct ht_optim_config c = fixture_config(w.config);
    struct ht_grad *g = open_grad(&w, p);

    for (size_t i = 0; i < KEEP_RANGES; i++) {
        write_all(g, (backwards ? KEEP_RANGES - 1 - i : i) * MIB, bytes, MIB);
        ck_assert_int_eq(ht_grad_flush(g), 0);
    }
    ht_grad_release(g);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    model_update(p, &c, bytes, 0, p->n, true);
}

/*
 * If K of N chunks fit, a step reads the other N - K, in any order of updates. It writes as many if it need not be
 * durable.
 */
TEST_LOOP(a_step_reads_what_does_not_fit_and_no_more, 2)
{
    static const char *const config[] = {"adamw lr=1e-2", "adamw lr=1e-2 durable_every=16"};
    struct ht_dev_counters before, after;

    fast_pass = true;
    w.config = config[_i];
    w.threads = 2;
    w.dram_bytes = 16ull * MIB;
    w.no_plan = true; /* a plan of one order does not fit the other */
    fixture_open(&w);
    struct test_param *p =
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, (uint64_t)KEEP_RANGES * MIB / 4, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    uint8_t *bytes = random_gradient(&w, p);
    step_in_order(p, bytes, false); /* makes the state */
    step_in_order(p, bytes, true);
    for (unsigned step = 0; step < 6; step++) {
        struct ht_store_stats st = store_stats();
        uint64_t rest = (uint64_t)KEEP_ARRAYS * KEEP_RANGES * MIB - st.dram_protected_bytes;
        ck_assert_uint_eq(st.dram_protected_bytes, 12ull * MIB);
        ht_dev_counters(w.dev, &before);
        step_in_order(p, bytes, step % 3 == 1);
        ht_dev_counters(w.dev, &after);
        /* Some chunks may still be in the memory that other traffic uses. */
        uint64_t luck = w.dram_bytes - st.dram_protected_bytes, read = after.read_bytes - before.read_bytes;
        ck_assert(read <= rest && read >= rest - luck);
        if (_i) /* a thread that found no room has written a part */
            ck_assert_uint_le(after.written_bytes - before.written_bytes, rest + luck);
    }
    commit_and_check();
}

/* Odd pieces in random order; flushes in between freeze whatever is whole. */
static void write_shuffled(const struct test_param *p, const uint8_t *bytes)
{
    size_t size = dtype_bytes(p->grad_dtype), len = p->n * size, pieces = 0;
    struct ht_grad *g = open_grad(&w, p);
    size_t *cut = malloc((len / 1000 + 2) * sizeof(*cut));

    for (size_t off = 0; off < len; off += (1 + fixture_random(&w) % 60000) * size)
        cut[pieces++] = off;
    cut[pieces] = len;
    size_t *order = malloc(pieces * sizeof(*order));
    for (size_t i = 0; i < pieces; i++)
        order[i] = i;
    for (size_t i = pieces; i > 1; i--) {
        size_t k = fixture_random(&w) % i, t = order[i - 1];
        order[i - 1] = order[k];
        order[k] = t;
    }
    for (size_t i = 0; i < pieces; i++) {
        write_all(g, cut[order[i]], bytes, cut[order[i] + 1] - cut[order[i]]);
        if (fixture_random(&w) % 4 == 0)
            ck_assert_int_eq(ht_grad_flush(g), 0);
    }
    close_grad(g);
    free(order);
    free(cut);
}

TEST_LOOP(the_order_of_writes_changes_nothing, 4)
{
    w.threads = 2;
    w.rnd = (uint64_t)_i + 1;
    fixture_open(&w);
    struct ht_optim_config c = fixture_config(w.config);
    make_params(_i & 1 ? HT_CHUNK_BYTES : HT_SMALL_CHUNK_BYTES);
    fast_pass = true;
    for (unsigned step = 0; step < STEPS; step++) {
        for (unsigned i = 0; i < w.params; i++) {
            uint8_t *g = random_gradient(&w, &w.param[i]);
            write_shuffled(&w.param[i], g);
            model_update(&w.param[i], &c, g, 0, w.param[i].n, true);
        }
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    }
    check_all(&w);
}

struct writer {
    pthread_t thread;
    struct test_param *p;
    const uint8_t *bytes;
    size_t begin, end;
};

static void *write_part(void *arg)
{
    struct writer *me = arg;
    struct ht_grad *g = open_grad(&w, me->p);

    for (size_t off = me->begin; off < me->end; off += 40000)
        write_all(g, off, me->bytes, ht_min_u64(40000, me->end - off));
    close_grad(g);
    return NULL;
}

TEST(several_writers_share_one_gradient)
{
    struct writer writer[4];

    w.threads = 2;
    fixture_open(&w);
    struct ht_optim_config c = fixture_config(w.config);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, 1000001, HT_CHUNK_BYTES);
    for (unsigned step = 0; step < STEPS; step++) {
        uint8_t *g = random_gradient(&w, p);
        for (size_t i = 0; i < 4; i++) {
            writer[i] =
                (struct writer){.p = p, .bytes = g, .begin = i * 500000, .end = i == 3 ? p->n * 2 : (i + 1) * 500000};
            ck_assert_int_eq(pthread_create(&writer[i].thread, NULL, write_part, &writer[i]), 0);
        }
        for (size_t i = 0; i < 4; i++)
            pthread_join(writer[i].thread, NULL);
        model_update(p, &c, g, 0, p->n, true);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    }
    check_all(&w);
}

/* The next step's gradients arrive while the commit is still writing. */
static void *commit_thread(void *arg)
{
    *(int *)arg = ht_optim_commit(w.o, ROOT);
    return NULL;
}

TEST(the_next_step_overlaps_the_commit)
{
    int rc[8];

    fast_pass = true;
    w.threads = 2;
    fixture_open(&w);
    make_params(HT_CHUNK_BYTES);
    for (unsigned step = 0; step < 8; step++) {
        pthread_t thread;
        step_all(&w);
        ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
        ck_assert_int_eq(pthread_create(&thread, NULL, commit_thread, &rc[step]), 0);
        /* Gradients of the next step are only those after the boundary. */
        while (fixture_stat(&w).step == step)
            sched_yield();
        if (step < 7)
            step_param(&w, &w.param[0]);
        pthread_join(thread, NULL);
        ck_assert_int_eq(rc[step], 0);
        ck_assert_uint_eq(fixture_stat(&w).durable_step, step + 1);
        if (step < 7) {
            for (unsigned i = 1; i < w.params; i++)
                step_param(&w, &w.param[i]);
            ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
            step++;
        }
    }
    check_all(&w);
}

/* ----------------------------------------------------------- all at once */

static atomic_bool ending;

struct reader {
    struct ht_waiter waiter;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool woken;
};

static void wake_reader(struct ht_waiter *waiter)
{
    struct reader *me = ht_container_of(waiter, struct reader, waiter);

    pthread_mutex_lock(&me->lock);
    me->woken = true;
    pthread_cond_signal(&me->cond);
    pthread_mutex_unlock(&me->lock);
}

static void wait_readable(struct reader *me, const struct test_param *p, uint64_t off)
{
    me->woken = false;
    if (ht_optim_readable(w.o, p->oid, off, 1000, &me->waiter) == 0)
        return;
    if (off % 3 == 0 && ht_optim_cancel(w.o, &me->waiter))
        return;
    pthread_mutex_lock(&me->lock);
    while (!me->woken)
        pthread_cond_wait(&me->cond, &me->lock);
    pthread_mutex_unlock(&me->lock);
}

static void *read_all_the_time(void *arg)
{
    struct reader me = {.waiter.wake = wake_reader};
    uint64_t at = (uint64_t)(uintptr_t)arg;
    uint8_t buf[1000];

    pthread_mutex_init(&me.lock, NULL);
    pthread_cond_init(&me.cond, NULL);
    while (!ending) {
        const struct test_param *p = &w.param[at % 3];
        struct ht_param_desc desc = fixture_desc(p);
        uint64_t off = (at = at * 6364136223846793005ull + 1) >> 20;
        off %= p->n * dtype_bytes(p->dtype) - sizeof(buf);
        wait_readable(&me, p, off);
        ck_assert_int_eq(ht_obj_read(p->obj, off, buf, sizeof(buf)), sizeof(buf));
        ck_assert_int_ge(ht_optim_state_read(w.o, &desc, at & 64 ? "exp_avg" : "step", off & ~3ull, buf, sizeof(buf)),
                         0);
        (void)fixture_stat(&w);
        (void)ht_optim_param_unpublished(w.o, p->oid);
    }
    pthread_mutex_destroy(&me.lock);
    pthread_cond_destroy(&me.cond);
    return NULL;
}

/* A step that is thrown away: the model does not see it. */
static void aborted_step(void)
{
    for (unsigned i = 0; i < w.params; i++)
        send_random(&w.param[i]);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
}

TEST(readers_steps_and_aborts_at_once)
{
    pthread_t reader[2];

    fast_pass = true;
    w.threads = 3;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, 100001, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, 150000, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 300000, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ending = false;
    for (uintptr_t i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_create(&reader[i], NULL, read_all_the_time, (void *)(i + 1)), 0);
    for (unsigned i = 0; i < 12; i++) {
        if (i % 3 == 1)
            aborted_step();
        step_once();
    }
    ending = true;
    for (unsigned i = 0; i < 2; i++)
        pthread_join(reader[i], NULL);
    check_all(&w);
}

TEST(unusual_numbers_pass_through)
{
    static const float odd[] = {INFINITY, NAN, 1e-42f, 3e38f, -0.0f, -INFINITY};

    fixture_open(&w);
    struct ht_optim_config c = fixture_config(w.config);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 100000, HT_SMALL_CHUNK_BYTES);
    for (unsigned step = 0; step < STEPS; step++) {
        uint8_t *g = random_gradient(&w, p);
        for (unsigned i = 0; i < 6; i++)
            put_value(g, HT_DTYPE_F32, fixture_random(&w) % p->n, odd[i]);
        write_gradient(&w, p, g);
        model_update(p, &c, g, 0, p->n, true);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    }
    check_all(&w);
    ck_assert_uint_ge(fixture_stat(&w).nonfinite, 3);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, STEPS * p->n);
}

RUN_TESTS("pipeline", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
