/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking back the gradient of one parameter: as if it had not been written, or not at all;
 * beside writers, steps and a crash.
 */
#include "tests/unit/optim/step/fixture.h"

enum { ELEMENTS = 57344, BYTES = ELEMENTS * 4, WRITERS = 3, ROUNDS = 12 };

static struct test_param *p, *q;
static struct ht_grad *g;
static uint8_t *bytes;

/* Two f32 parameters of 3.5 chunks. */
static void begin(const char *config)
{
    fixture_open_as(&w, config, 2);
    p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, ELEMENTS, HT_SMALL_CHUNK_BYTES);
    q = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, ELEMENTS, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    g = open_grad(&w, p);
    bytes = random_gradient(&w, p);
}

static void done(void)
{
    if (g)
        ht_grad_release(g);
    free(bytes);
    check_all(&w);
    fixture_close(&w);
}

static void model_step(struct test_param *of)
{
    struct ht_optim_config c = fixture_config(w.config);

    model_update(of, &c, bytes, 0, of->n, true);
}

/* The whole gradient through the descriptor that is open, and into the model. */
static void whole_step(void)
{
    write_all(g, 0, bytes, BYTES);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(p);
    check_all(&w);
}

static void drop_ok(void)
{
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, p->oid, NULL), 0);
}

TEST(what_is_written_and_not_closed_is_not_handed_over)
{
    begin("adamw lr=1e-2");
    write_all(g, 0, bytes, 100001); /* inside an element */
    drop_ok();
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert(!fixture_stat(&w).open);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, 0);
    check_all(&w);
    uint8_t *zeros = test_alloc(100001), *got = test_alloc(100001);
    ck_assert_int_eq(ht_grad_read(g, 0, got, 100001), 100001);
    ck_assert_mem_eq(got, zeros, 100001);
    whole_step();
    drop_ok(); /* there is nothing */
    drop_ok();
    whole_step();
}

/* The bytes of one opener extend no window of another's bytes that are written after the drop. */
TEST(an_opener_from_before_takes_nothing_of_others_with_it)
{
    begin("adamw lr=1e-2");
    struct ht_grad *other = open_grad(&w, p);
    write_all(g, 0, bytes, BYTES);
    drop_ok();
    write_all(other, 0, bytes, 70001); /* still at it */
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_all(other, 70001, bytes, BYTES - 70001);
    close_grad(other);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(p);
    check_all(&w);
    /* Nor is it refused because the dropped gradient was too long. */
    ck_assert_int_eq(ht_grad_write(g, BYTES, bytes, 4), -EINVAL);
    drop_ok();
    ck_assert_int_eq(ht_grad_flush(g), 0);
    whole_step();
}

/* Half a gradient that was closed no longer prevents the step, nor a gradient that is written anew. */
TEST(frozen_elements_are_taken_back)
{
    begin("adamw lr=1e-2");
    write_all(g, 4000, bytes, 4000); /* part of a range: frozen, not queued */
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_gradient(&w, q, bytes);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    drop_ok();
    ck_assert(fixture_stat(&w).open);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(q);
    check_all(&w);
    write_all(g, 4000, bytes, 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    drop_ok();
    whole_step();
}

/* The next gradient opens another step with its own options; a call that names the first step is refused. */
TEST(a_step_without_gradients_is_none)
{
    begin("adamw lr=1e-2 max_grad_norm=1e30");
    write_gradient(&w, p, bytes);
    write_gradient(&w, q, bytes);
    struct ht_optim_steer first = {.conditional = true, .step_open = fixture_stat(&w).step_open};
    drop_ok();
    ck_assert_uint_eq(fixture_stat(&w).step_open, first.step_open);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, q->oid, NULL), 0);
    ck_assert(!fixture_stat(&w).open);
    w.config = "adamw lr=1e-1";
    const struct ht_optim_config other = fixture_config(w.config);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &other), 0);
    write_gradient(&w, p, bytes);
    ck_assert_uint_gt(fixture_stat(&w).step_open, first.step_open);
    ck_assert_int_eq(ht_optim_commit_by(w.o, ROOT, &first), -ESTALE);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).step, 1);
    model_step(p);
}

TEST(a_deferred_step_loses_it_wholly)
{
    begin("adamw lr=1e-2 max_grad_norm=1e30");
    write_gradient(&w, p, bytes);
    write_gradient(&w, q, bytes);
    drop_ok();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(q);
    check_all(&w);
    whole_step();
}

/* The drop takes back all sums of this step: a part of the sums would be no gradient at all. */
TEST(sums_of_earlier_passes_go_with_it)
{
    begin("sgd lr=1e-2 accumulate=2");
    write_gradient(&w, p, bytes);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    write_all(g, 0, bytes, 70001);
    drop_ok();
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_gradient(&w, p, bytes);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    write_gradient(&w, p, bytes);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (uint64_t i = 0; i < p->n; i++)
        ((float *)(void *)bytes)[i] *= 2;
    model_step(p);
}

TEST(what_was_applied_is_refused_and_stays)
{
    begin("adamw lr=1e-2");
    write_all(g, 0, bytes, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    write_all(g, HT_SMALL_CHUNK_BYTES, bytes, 4000);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, p->oid, NULL), -EBUSY);
    check_error(&w, p, "abort takes back the whole step");
    /* The gradient is unchanged. */
    write_all(g, HT_SMALL_CHUNK_BYTES + 4000, bytes, BYTES - HT_SMALL_CHUNK_BYTES - 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(p);
}

TEST(only_of_a_parameter_of_this_root)
{
    begin("adamw lr=1e-2");
    write_all(g, 0, bytes, 4000);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT + 1, p->oid, NULL), -ENOENT);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, 1ull << 40, NULL), 0); /* none there */
    write_all(g, 4000, bytes, BYTES - 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(p);
}

TEST_LOOP(a_crash_after_a_drop_leaves_the_last_step, 2)
{
    begin("adamw lr=1e-2");
    whole_step();
    write_all(g, 4000, bytes, 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    drop_ok();
    if (_i) { /* of no step */
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        ck_assert_uint_eq(fixture_stat(&w).step, 1);
    }
    ht_grad_release(g);
    g = NULL;
    crash_and_mount();
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 1);
    check_all(&w);
    step_param(&w, p);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

/* ------------------------------------------------------------------- races */

static atomic_bool over;

/* Writes the gradient, or parts, again and again; refused calls are another thread's. */
static void *write_often(void *arg)
{
    struct ht_grad *mine = open_grad(&w, p);
    uint64_t rnd = 1 + (uint64_t)(uintptr_t)arg;

    while (!over) {
        uint64_t off = (rnd = rnd * 6364136223846793005ull + 1442695040888963407ull) >> 33;
        off = rnd & 64 ? 0 : off % ELEMENTS * 4;
        (void)!ht_grad_write(mine, off, bytes + off, BYTES - off);
        int rc = rnd & 128 ? ht_grad_flush(mine) : 0;
        ck_assert_msg(!rc, "flush: %d", rc);
    }
    ht_grad_release(mine);
    return NULL;
}

static void *drop_often(void *arg)
{
    atomic_uint *refused = arg;

    for (unsigned i = 0; i < 200; i++) {
        int rc = ht_optim_drop(w.o, ROOT, p->oid, NULL);
        ck_assert(rc == 0 || rc == -EBUSY);
        *refused += rc == -EBUSY;
    }
    return NULL;
}

/* At the end the remaining gradients are dropped, or the step is aborted: then the model is as it was. */
static void race(const char *config, unsigned passes)
{
    pthread_t thread[WRITERS], dropper;
    atomic_uint refused = 0;

    begin(config);
    bool deferred = strstr(config, "max_grad_norm") != NULL;
    for (unsigned round = 0; round < ROUNDS; round++) {
        over = false;
        for (uintptr_t i = 0; i < WRITERS; i++)
            ck_assert_int_eq(pthread_create(&thread[i], NULL, write_often, (void *)(i + round)), 0);
        ck_assert_int_eq(pthread_create(&dropper, NULL, drop_often, &refused), 0);
        pthread_join(dropper, NULL);
        over = true;
        for (unsigned i = 0; i < WRITERS; i++)
            pthread_join(thread[i], NULL);
        int rc = ht_optim_drop(w.o, ROOT, p->oid, NULL);
        ck_assert(rc == 0 || (!deferred && rc == -EBUSY));
        if (rc)
            ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
        check_all(&w);
        for (unsigned i = 0; i < passes; i++)
            write_gradient(&w, p, bytes);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        for (uint64_t i = 0; i < p->n; i++)
            ((float *)(void *)bytes)[i] *= (float)passes;
        model_step(p);
        for (uint64_t i = 0; i < p->n; i++)
            ((float *)(void *)bytes)[i] /= (float)passes;
        check_all(&w);
    }
    ck_assert(!deferred || refused == 0);
}

TEST_LOOP(beside_writers_of_the_same_parameter, 4)
{
    static const struct {
        const char *config;
        unsigned passes;
    } fixtures[] = {{"adamw lr=1e-3", 1},
                    {"adamw lr=1e-3 max_grad_norm=1e30", 1},
                    {"sgd lr=1e-3 accumulate=2", 2},
                    {"sgd lr=1e-3 accumulate=2 max_grad_norm=1e30", 2}};

    race(fixtures[_i].config, fixtures[_i].passes);
}

RUN_TESTS("drop", .teardown = done, .timeout_s = 300, .memory = memory_keep)
