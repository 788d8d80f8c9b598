/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradients that wait for the norm: memory that they keep, sums that fail, and openers beside each other. And gradients
 * that wait for a file of their root.
 */
#include "tests/unit/optim/step/fixture.h"

#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/step/step_priv.h"
#include "tests/support/fault_scenario.h"
#include "tiering/cache/staging.h"
#include "tiering/object/context.h"

enum { MIB_ELEMENTS = 1 << 18, OPENS = 20000, BUSY = 2, OTHER_ROOT = ROOT + 1, BUFS_MAX = 64 };

static uint64_t resident_state(const struct test_param *p)
{
    uint64_t bytes = 0;

    lock(w.o);
    for (int k = 0; k < 2; k++) {
        struct ht_obj_stat st;
        ht_obj_stat(ht_opt_param_find(w.o, p->oid)->state[k], &st);
        bytes += st.resident_bytes;
    }
    unlock(w.o);
    return bytes;
}

/* A few rows of an embedding wait for a boundary: not the whole embedding. */
TEST(a_sparse_gradient_leaves_state_in_memory)
{
    w.dram_bytes = 32 << 20;
    w.device_bytes = 512ull << 20;
    fixture_open_as(&w, "adamw lr=1e-2 max_grad_norm=1 partial=1", 1);
    for (unsigned i = 0; i < 2; i++)
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 2 * MIB_ELEMENTS, HT_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 48 * MIB_ELEMENTS, HT_CHUNK_BYTES);
    for (unsigned step = 0; step < 4; step++) {
        for (unsigned i = 0; i < 2; i++)
            send_random(&w.param[i]);
        struct ht_grad *g = open_grad(&w, &w.param[2]);
        ck_assert_int_eq(ht_grad_write(g, 0, w.param[2].p, 4096), 4096);
        close_grad(g);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    }
    for (unsigned i = 0; i < 2; i++)
        ck_assert_uint_eq(resident_state(&w.param[i]), 2 * 2 * HT_CHUNK_BYTES);
}

/* Bytes that were written after a flush, and are never closed: their chunks are no longer protected after the step. */
TEST(what_is_left_of_a_gradient_is_not_protected)
{
    enum { COUNT = 6 };
    struct ht_grad *g[COUNT];

    w.dram_bytes = 16 << 20;
    fixture_open_as(&w, "adamw lr=1e-2 max_grad_norm=1 partial=1", 1);
    for (unsigned i = 0; i < COUNT; i++) {
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 2 * MIB_ELEMENTS, HT_CHUNK_BYTES);
        g[i] = open_grad(&w, &w.param[i]);
        for (uint64_t at = 0; at < 2 * HT_CHUNK_BYTES; at += HT_CHUNK_BYTES)
            ck_assert_int_eq(ht_grad_write(g[i], at, w.param[i].p, 4), 4);
        ck_assert_int_eq(ht_grad_flush(g[i]), 0);
        for (uint64_t at = 8; at < 2 * HT_CHUNK_BYTES; at += HT_CHUNK_BYTES)
            ck_assert_int_eq(ht_grad_write(g[i], at, w.param[i].p, 4), 4);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (unsigned i = 0; i < COUNT; i++) {
        uint64_t oid = w.param[i].oid;
        struct ht_obj_stat st;
        lock(w.o);
        ht_obj_stat(ht_opt_param_find(w.o, oid)->grad, &st);
        unlock(w.o);
        ck_assert_uint_gt(st.resident_bytes, 0);
        ht_grad_discard(g[i]);
        ht_grad_release(g[i]);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    uint64_t bytes = store_stats().dram_protected_bytes;
    lock(w.o);
    for (unsigned i = 0; i < COUNT; i++)
        ht_obj_unprotect(ht_opt_param_find(w.o, w.param[i].oid)->grad);
    unlock(w.o);
    ck_assert_uint_eq(store_stats().dram_protected_bytes, bytes);
}

/* The sum ahead of the boundary only saves time. */
TEST(a_sum_that_fails_is_tried_again_at_the_boundary)
{
    fixture_open_as(&w, "adamw lr=1e-2 max_grad_norm=1", 1);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, MIB_ELEMENTS, HT_CHUNK_BYTES);
    for (unsigned drops = 0; drops < 2; drops++) {
        uint8_t *g = random_gradient(&w, &w.param[0]);
        ht_fault_arm(HT_FAULT_OPTIM_UPDATE, 1, false);
        write_gradient(&w, &w.param[0], g);
        ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
        if (drops == 0)
            ck_assert_int_eq(ht_optim_drop(w.o, ROOT, w.param[0].oid, NULL), 0);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 1);
}

static void *open_often(void *arg)
{
    struct ht_param_desc desc = {ROOT, w.param[0].obj, HT_DTYPE_F32, (uint8_t)(uintptr_t)arg};
    uint64_t bytes = w.param[0].n * dtype_bytes(desc.grad_dtype);
    uint8_t *zeros = calloc(w.param[0].n, 4);

    for (unsigned k = 0; k < OPENS; k++) {
        struct ht_grad *g;
        if (ht_grad_open(w.o, &desc, &g))
            continue;
        ck_assert_uint_eq(ht_grad_size(g), bytes);
        if (ht_grad_write(g, 0, zeros, bytes) == (ssize_t)bytes)
            (void)!ht_grad_flush(g);
        ht_grad_release(g);
        (void)!ht_optim_drop(w.o, ROOT, w.param[0].oid, NULL);
    }
    free(zeros);
    return NULL;
}

/* One of them makes the ranges anew while the other may have its own on the queue. */
TEST(openers_of_two_dtypes_beside_each_other)
{
    static const uint8_t dtypes[] = {HT_DTYPE_F32, HT_DTYPE_BF16};
    pthread_t thread[2];

    fixture_open_as(&w, "adamw lr=1e-2 max_grad_norm=1", 2);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1 << 16, HT_SMALL_CHUNK_BYTES);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, open_often, (void *)(uintptr_t)dtypes[i]), 0);
    for (unsigned i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
}

/* The content of the file is published in parts: an update between them would tear it. */
TEST(no_update_begins_while_a_file_is_published_alone)
{
    fixture_open_as(&w, "adamw lr=1e-2", 2);
    for (unsigned i = 0; i < 2; i++)
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1000, HT_SMALL_CHUNK_BYTES);
    step_param(&w, &w.param[1]);
    ck_assert_int_eq(ht_optim_publish_alone(w.o, ROOT, &w.param[1].oid, 1), -EBUSY);
    commit_and_check();
    ck_assert_int_eq(ht_optim_publish_alone(w.o, ROOT, &w.param[0].oid, 1), 0);
    step_param(&w, &w.param[0]);
    lock(w.o);
    const struct ht_root *root = ht_opt_root_find(w.o, ROOT);
    bool waits = root->pending == 1 && !root->running && ht_list_empty(&root->ready);
    unlock(w.o);
    ck_assert(waits);
    ht_optim_published_alone(w.o, ROOT);
    commit_and_check();
}

static uint64_t left_of(uint64_t id, bool running)
{
    lock(w.o);
    const struct ht_root *root = ht_opt_root_find(w.o, id);
    uint64_t left = running ? root->running : root->pending;
    unlock(w.o);
    return left;
}

/* Another model of one parameter, which passes through staging buffers. */
static struct ht_param_desc other_model(void)
{
    struct ht_optim_config config = fixture_config(w.config);
    struct ht_obj_attr attr = {.oid = ht_store_new_id(w.s), .chunk_bytes = HT_CHUNK_BYTES, .scope = OTHER_ROOT};
    struct ht_param_desc desc = {OTHER_ROOT, NULL, HT_DTYPE_F32, HT_DTYPE_F32};
    struct ht_tx *tx;

    ck_assert_int_eq(ht_tx_begin(w.s, 100, &tx), 0);
    ck_assert_int_eq(ht_optim_root_add(w.o, OTHER_ROOT, &config, tx), 0);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    ck_assert_int_eq(ht_obj_create(w.s, &attr, &desc.obj), 0);
    ck_assert_int_eq(ht_obj_truncate(desc.obj, HT_CHUNK_BYTES), 0); /* without an image */
    ht_obj_set_residency(desc.obj, HT_RESIDENCY_COLD);
    return desc;
}

/* As when a device does not answer: its reads keep all workers and all buffers that they get. */
TEST(the_spare_worker_has_buffers)
{
    fixture_open_as(&w, "adamw lr=1e-2", BUSY);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, BUSY * MIB_ELEMENTS, HT_CHUNK_BYTES);
    struct ht_param_desc other = other_model();
    struct ht_batch_pin pin = {.store = w.s, .count = BUSY};
    struct ht_grad *g;
    void *buf[BUFS_MAX];
    unsigned bufs = 0;

    for (unsigned i = 0; i < BUSY; i++)
        pin.chunk[i] = (struct ht_batch_pin_chunk){.obj = p->obj, .index = i, .mode = HT_BATCH_PIN_READ};
    ck_assert_int_eq(ht_batch_pin_begin(&pin), 0);
    ck_assert_int_eq(ht_batch_pin_wait(&pin), 0);
    step_param(&w, p);
    WAIT_FOR(left_of(ROOT, true) == BUSY);
    while (!ht_staging_get(w.s->staging, HT_STAGING_UPDATE, 1, true, HT_NUMA_INDEX_ANY, &buf[bufs]))
        bufs++;
    ck_assert_uint_gt(bufs, 0);
    ck_assert_int_eq(ht_grad_open(w.o, &other, &g), 0);
    ck_assert_int_eq(ht_grad_write(g, 0, w.param[0].p, HT_CHUNK_BYTES), HT_CHUNK_BYTES);
    close_grad(g);
    ck_assert_int_eq(ht_optim_step(w.o, OTHER_ROOT), 0);
    ck_assert_uint_eq(left_of(ROOT, true), BUSY);
    while (bufs)
        ht_staging_put(w.s->staging, HT_STAGING_UPDATE, buf[--bufs]);
    ht_batch_pin_end(&pin, 0);
    ck_assert_int_eq(ht_batch_pin_finish(&pin), 0);
    commit_and_check();
    ht_obj_put(other.obj);
}

/* Its file was deleted while a worker had the range, so nothing is fetched for it. */
TEST(a_range_of_a_deleted_file_is_not_left_to_others)
{
    fixture_open_as(&w, "adamw lr=1e-2", 2);
    for (unsigned i = 0; i < 2; i++)
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1000, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    lock(w.o);
    struct ht_root *root = ht_opt_root_find(w.o, ROOT);
    root->hold = true;
    unlock(w.o);
    step_param(&w, &w.param[1]);
    ck_assert_uint_eq(left_of(ROOT, false), 1);
    lock(w.o);
    struct ht_range *r = ht_opt_range_take(root, HT_NUMA_INDEX_ANY);
    unlock(w.o);
    fixture_delete(&w, 1);
    ck_assert(ht_opt_leave_range(r, ht_opt_worker_main));
    ck_assert_uint_eq(left_of(ROOT, false) + left_of(ROOT, true), 0);
    lock(w.o);
    root->hold = false;
    ht_opt_root_ready(root);
    unlock(w.o);
    ht_obj_put(w.param[1].obj);
    forget_model(&w.param[1]);
    w.params = 1;
    step_param(&w, &w.param[0]);
    commit_and_check();
}

RUN_TESTS("waiting gradients", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
