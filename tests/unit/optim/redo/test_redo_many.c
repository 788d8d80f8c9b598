/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Very many parameters with gradients of one element each are logged together: a step makes few transactions and few
 * writes, and a crash loses none. HITRAIN_LONG=1 has a hundred thousand. Their images count as they wait for updates.
 */
#include "tests/unit/optim/redo/held.h"

enum { FEW = 1000, MANY = 100000, STEPS = 3, WRITES_MAX = 16 };

static uint64_t *oid;
static unsigned count;

static float gradient(unsigned i, unsigned step)
{
    return (float)((i * 7919 + step * 104729) % 1000) / 1000 - 0.5f;
}

/* By the rule sgd with lr=1, in its order of operations. */
static float wanted(unsigned i, unsigned steps)
{
    float p = (float)i;

    for (unsigned step = 1; step <= steps; step++)
        p += -1.0f * gradient(i, step);
    return p;
}

static void make_params(void)
{
    for (unsigned i = 0; i < count; i++) {
        struct ht_obj_attr attr = {.oid = ht_store_new_id(w.s), .chunk_bytes = HT_SMALL_CHUNK_BYTES, .scope = ROOT};
        struct ht_obj *obj;
        float x = (float)i;
        ck_assert_int_eq(ht_obj_create(w.s, &attr, &obj), 0);
        ck_assert_int_eq(ht_obj_write(obj, 0, &x, 4), 4);
        ht_obj_put(obj);
        oid[i] = attr.oid;
    }
}

static void send(unsigned i, unsigned step)
{
    struct ht_obj *obj = ht_obj_get(w.s, oid[i]);
    struct ht_param_desc desc = {ROOT, obj, HT_DTYPE_F32, HT_DTYPE_F32};
    float x = gradient(i, step);
    struct ht_grad *g;

    ck_assert_ptr_nonnull(obj);
    ck_assert_int_eq(ht_grad_open(w.o, &desc, &g), 0);
    ck_assert_int_eq(ht_grad_write(g, 0, &x, 4), 4);
    close_grad(g);
    ht_obj_put(obj);
}

static void check_params(unsigned steps)
{
    for (unsigned i = 0; i < count; i++) {
        struct ht_obj *obj = ht_obj_get(w.s, oid[i]);
        float x, want = wanted(i, steps);
        ck_assert_ptr_nonnull(obj);
        ck_assert_int_eq(ht_obj_read(obj, 0, &x, 4), 4);
        ck_assert_msg(!memcmp(&x, &want, 4), "parameter %u is %a, not %a", i, (double)x, (double)want);
        ht_obj_put(obj);
    }
}

TEST(tiny_gradients_are_logged_together)
{
    struct ht_dev_counters before, after;

    count = getenv("HITRAIN_LONG") ? MANY : FEW;
    oid = test_alloc(count * sizeof(*oid));
    w.device_bytes = 64ull * MIB + 32768ull * count;
    w.dram_bytes = 16 * MIB + (uint64_t)FEW * HT_SMALL_CHUNK_BYTES;
    fixture_open_as(&w, "sgd lr=1 redo=on durable_every=100", 2);
    make_params();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (unsigned step = 1; step <= STEPS; step++) {
        ht_dev_counters(w.dev, &before);
        for (unsigned i = 0; i < count; i++)
            send(i, step);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        ht_dev_counters(w.dev, &after);
        ck_assert_uint_eq(fixture_stat(&w).logged_steps, step - 1);
        printf("step %u of %u parameters: %llu writes, %llu bytes, %llu flushes\n", step, count,
               (unsigned long long)(after.writes - before.writes),
               (unsigned long long)(after.written_bytes - before.written_bytes),
               (unsigned long long)(after.flushes - before.flushes));
        if (step > 1 && count == FEW) /* all are in memory, and stay there */
            ck_assert_uint_le(after.writes - before.writes, WRITES_MAX);
    }
    crash_and_mount();
    ck_assert_uint_eq(fixture_stat(&w).step, STEPS);
    check_params(STEPS);
    fixture_close(&w);
}

static atomic_bool sent;

static void *send_all(void *arg)
{
    for (unsigned i = 0; i < count; i++)
        send(i, 1);
    sent = true;
    return arg;
}

/* Ranges that wait for their update. *out_full: no more gradients are taken. */
static uint64_t waiting(bool *out_full)
{
    lock(w.o);
    const struct ht_root *root = ht_opt_root_find(w.o, ROOT);
    uint64_t n = root->pending;
    *out_full = ht_opt_backlog_full(root);
    unlock(w.o);
    return n;
}

/* However slow the workers are: a gradient of one element takes an image, and counts as much. */
TEST(tiny_gradients_wait_in_memory)
{
    struct ht_dev_counters before, after;
    bool full = false;
    pthread_t sender;
    uint64_t n = 0;

    count = 200;
    oid = test_alloc(count * sizeof(*oid));
    w.dram_bytes = 16 * MIB;
    fixture_open_as(&w, "sgd lr=1", 2);
    make_params();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    set_hold(&w, true);
    ht_dev_counters(w.dev, &before);
    ck_assert_int_eq(pthread_create(&sender, NULL, send_all, NULL), 0);
    while (!full && !sent) {
        n = waiting(&full);
        usleep(1000);
    }
    ht_dev_counters(w.dev, &after);
    ck_assert_msg(full && !sent, "%llu gradients wait", (unsigned long long)n);
    ck_assert_uint_le(n * HT_SMALL_CHUNK_BYTES, store_stats().dram_passing_bytes / 2);
    ck_assert_uint_eq(after.writes, before.writes);
    set_hold(&w, false);
    pthread_join(sender, NULL);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    check_params(1);
    fixture_close(&w);
}

RUN_TESTS("logged steps of many parameters", .timeout_s = 300, .quiet = ERRORS_ONLY, .memory = memory_keep)
