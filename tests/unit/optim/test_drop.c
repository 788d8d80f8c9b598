/* SPDX-License-Identifier: Apache-2.0 */
/* Taking back the gradient of one parameter: as if it had not been written, or not at all; beside writers, steps and a crash. */
#include "tests/unit/optim/world.h"

#include <unistd.h>

enum { ELEMENTS = 57344, BYTES = ELEMENTS * 4, WRITERS = 3, ROUNDS = 12 };

static struct world w;
static struct test_param *p, *q;
static struct ht_grad *g;
static uint8_t *bytes;

/* Two f32 parameters of 3.5 chunks. */
static void begin(const char *config)
{
    world_open_as(&w, config, 2);
    p = world_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, ELEMENTS, HT_SMALL_CHUNK_BYTES);
    q = world_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, ELEMENTS, HT_SMALL_CHUNK_BYTES);
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
    world_close(&w);
}

static void model_step(struct test_param *of)
{
    struct ht_optim_config c = world_config(w.config);

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

START_TEST(what_is_written_and_not_closed_is_not_handed_over)
{
    begin("adamw lr=1e-2");
    write_all(g, 0, bytes, 100001); /* inside an element */
    drop_ok();
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert(!world_stat(&w).open);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_uint_eq(world_stat(&w).updated_elements, 0);
    check_all(&w);
    uint8_t *zeros = calloc(1, 100001), *got = malloc(100001);
    ck_assert_int_eq(ht_grad_read(g, 0, got, 100001), 100001);
    ck_assert_mem_eq(got, zeros, 100001);
    free(zeros);
    free(got);
    whole_step();
    drop_ok(); /* there is nothing */
    drop_ok();
    whole_step();
    done();
}
END_TEST

/* What one opener wrote is no window for what another writes after the drop. */
START_TEST(an_opener_from_before_takes_nothing_of_others_with_it)
{
    begin("adamw lr=1e-2");
    struct ht_grad *other = open_grad(&w, p);
    write_all(g, 0, bytes, BYTES);
    drop_ok();
    write_all(other, 0, bytes, 70001); /* still at it */
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_all(other, 70001, bytes, BYTES - 70001);
    ck_assert_int_eq(ht_grad_flush(other), 0);
    ht_grad_release(other);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(p);
    check_all(&w);
    /* Nor is it refused for what was too long. */
    ck_assert_int_eq(ht_grad_write(g, BYTES, bytes, 4), -EINVAL);
    drop_ok();
    ck_assert_int_eq(ht_grad_flush(g), 0);
    whole_step();
    done();
}
END_TEST

/* Half a gradient that was closed no longer stands in the way of the step, nor of a gradient that is written anew. */
START_TEST(frozen_elements_are_taken_back)
{
    begin("adamw lr=1e-2");
    write_all(g, 4000, bytes, 4000); /* part of a range: frozen, not queued */
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_gradient(&w, q, bytes);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    drop_ok();
    ck_assert(world_stat(&w).open);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(q);
    check_all(&w);
    write_all(g, 4000, bytes, 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    drop_ok();
    whole_step();
    done();
}
END_TEST

START_TEST(a_deferred_step_loses_it_wholly)
{
    begin("adamw lr=1e-2 max_grad_norm=1e30");
    write_gradient(&w, p, bytes);
    write_gradient(&w, q, bytes);
    drop_ok();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(q);
    check_all(&w);
    whole_step();
    done();
}
END_TEST

/* All of the sums of this step: what is left of a part of them would be no gradient of anything. */
START_TEST(sums_of_earlier_passes_go_with_it)
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
    done();
}
END_TEST

START_TEST(what_was_applied_is_refused_and_stays)
{
    begin("adamw lr=1e-2");
    write_all(g, 0, bytes, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    write_all(g, HT_SMALL_CHUNK_BYTES, bytes, 4000);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, p->oid, NULL), -EBUSY);
    check_error(&w, p, "abort takes back the whole step");
    /* Nothing of it is gone. */
    write_all(g, HT_SMALL_CHUNK_BYTES + 4000, bytes, BYTES - HT_SMALL_CHUNK_BYTES - 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(p);
    done();
}
END_TEST

START_TEST(only_of_a_parameter_of_this_root)
{
    begin("adamw lr=1e-2");
    write_all(g, 0, bytes, 4000);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT + 1, p->oid, NULL), -ENOENT);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, 1ull << 40, NULL), 0); /* none there */
    write_all(g, 4000, bytes, BYTES - 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_step(p);
    done();
}
END_TEST

START_TEST(a_crash_after_a_drop_leaves_the_last_step)
{
    begin("adamw lr=1e-2");
    whole_step();
    write_all(g, 4000, bytes, 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    drop_ok();
    if (_i) { /* an empty step is one */
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        ck_assert_uint_eq(world_stat(&w).step, 2);
    }
    ht_grad_release(g);
    g = NULL;
    world_crash(&w);
    world_mount(&w);
    ck_assert_uint_eq(world_stat(&w).durable_step, 1 + (unsigned)_i);
    check_all(&w);
    step_param(&w, p);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    done();
}
END_TEST

/* ------------------------------------------------------------------- races */

static atomic_bool over;

/* Writes the gradient again and again, or parts of it; what is refused is another one's. */
static void *write_often(void *arg)
{
    struct ht_grad *mine = open_grad(&w, p);
    uint64_t rnd = 1 + (uint64_t)(uintptr_t)arg;

    while (!over) {
        uint64_t off = (rnd = rnd * 6364136223846793005ull + 1442695040888963407ull) >> 33;
        off = rnd & 64 ? 0 : off % ELEMENTS * 4;
        (void)!ht_grad_write(mine, off, bytes + off, BYTES - off);
        int ret = rnd & 128 ? ht_grad_flush(mine) : 0;
        ck_assert_msg(!ret, "flush: %d", ret);
    }
    ht_grad_release(mine);
    return NULL;
}

static void *drop_often(void *arg)
{
    atomic_uint *refused = arg;

    for (unsigned i = 0; i < 200; i++) {
        int ret = ht_optim_drop(w.o, ROOT, p->oid, NULL);
        ck_assert(ret == 0 || ret == -EBUSY);
        *refused += ret == -EBUSY;
    }
    return NULL;
}

/* What is left when all have ended is taken back, or the step aborted: then the model is as it was. */
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
        int ret = ht_optim_drop(w.o, ROOT, p->oid, NULL);
        ck_assert(ret == 0 || (!deferred && ret == -EBUSY));
        if (ret)
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
    done();
}

START_TEST(beside_writers_of_the_same_parameter)
{
    static const struct {
        const char *config;
        unsigned passes;
    } worlds[] = {{"adamw lr=1e-3", 1},
                  {"adamw lr=1e-3 max_grad_norm=1e30", 1},
                  {"sgd lr=1e-3 accumulate=2", 2},
                  {"sgd lr=1e-3 accumulate=2 max_grad_norm=1e30", 2}};

    race(worlds[_i].config, worlds[_i].passes);
}
END_TEST

int main(void)
{
    TCase *t = tcase_create("drop");

    tcase_add_test(t, what_is_written_and_not_closed_is_not_handed_over);
    tcase_add_test(t, an_opener_from_before_takes_nothing_of_others_with_it);
    tcase_add_test(t, frozen_elements_are_taken_back);
    tcase_add_test(t, a_deferred_step_loses_it_wholly);
    tcase_add_test(t, sums_of_earlier_passes_go_with_it);
    tcase_add_test(t, what_was_applied_is_refused_and_stays);
    tcase_add_test(t, only_of_a_parameter_of_this_root);
    tcase_add_loop_test(t, a_crash_after_a_drop_leaves_the_last_step, 0, 2);
    tcase_add_loop_test(t, beside_writers_of_the_same_parameter, 0, 4);
    return run_suite("drop", t);
}
