/* SPDX-License-Identifier: Apache-2.0 */
/* Asynchronous steps: their bits, what waits for them, and what happens when they fail after they were requested. */
#include "tests/unit/optim/step/holder.h"

#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "tiering/cache/arena.h"
#include "tiering/object/context.h"

static void two_params(const char *config)
{
    w.config = config;
    w.threads = 2;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 60000, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 60000, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

static bool cleaning_rests(void)
{
    ht_store_lock(w.s);
    bool rests = !ht_arena_has_final(w.s->arena) && !w.s->flow.writing;
    ht_store_unlock(w.s);
    return rests;
}

/* A step of which nothing is written before its publication: earlier writes fail, which is no failure of the step. */
static void step_all_in_memory(void)
{
    ht_fault_arm(HT_FAULT_STORE_WRITE, 1, true);
    step_all(&w);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    wait_until(cleaning_rests);
    ht_fault_disarm_all();
}

/* -------------------------------------------------------------------- bits */

struct way {
    bool async;
    unsigned threads, order; /* of gradients: forward, backward, from the middle on */
};

static uint64_t train(const char *config, unsigned steps, const struct way *way)
{
    unsigned passes = strstr(config, "accumulate=2") ? 2 : 1;

    fixture_begin_mixed(&w, config, way->threads);
    for (unsigned step = 1; step <= steps; step++) {
        for (unsigned k = 0; k < passes * w.params; k++) {
            unsigned at = k % w.params, middle = (at + w.params / 2) % w.params;
            const unsigned param[] = {at, w.params - 1 - at, middle};
            fixture_send(&w, param[way->order], step, k / w.params);
        }
        ck_assert_int_eq(way->async ? ht_optim_step_async(w.o, ROOT) : ht_optim_step(w.o, ROOT), 0);
    }
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_uint_eq(st.step, steps);
    ck_assert(!st.open && !st.error[0]);
    ht_optim_verify(w.o);
    uint64_t hash = fixture_hash(&w);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    remount();
    ck_assert(fixture_hash(&w) == hash);
    fixture_close(&w);
    return hash;
}

static const char *const configs[] = {
    "adamw lr=1e-2 weight_decay=0.1",
    "adamw lr=1e-2 durable_every=3",
    "adamw lr=1e-2 max_grad_norm=0.5",
    "adamw lr=1e-2 skip_nonfinite=1 max_grad_norm=2 durable_every=2",
    "sgd lr=1e-2 momentum=0.9 accumulate=2",
    "adamw lr=1e-2 accumulate=2 accumulate_mode=mean max_grad_norm=1",
    "adamw lr=1e-2 partial=1",
};

TEST_LOOP(bits_are_those_of_synchronous_steps_in_any_order, HT_ARRAY_SIZE(configs))
{
    static const struct way ways[] = {{true, 1, 0}, {true, 3, 1}, {true, 2, 2}, {false, 2, 2}};
    const struct way plain = {false, 1, 0};
    unsigned steps = getenv("HITRAIN_LONG") ? 1000 : 7;
    uint64_t want = train(configs[_i], steps, &plain);

    for (unsigned k = 0; k < HT_ARRAY_SIZE(ways); k++)
        ck_assert_msg(train(configs[_i], steps, &ways[k]) == want, "way %u differs", k);
}

/* ------------------------------------------------------------------- waits */

/* The worker that comes to the held chunk has it alone: it holds no other range back (update.c, take_second). */
static bool first_is_taken(void)
{
    lock(w.o);
    const struct ht_range *r = ht_opt_range_find(ht_opt_param_find(w.o, w.param[0].oid), 0);
    bool taken = r && r->state == HT_RANGE_RUNNING;
    unlock(w.o);
    return taken;
}

/* step_all, of which the first range of the first parameter is in a worker's hands before the rest is queued. */
static void step_all_behind_the_first(void)
{
    step_param(&w, &w.param[0]);
    wait_until(first_is_taken);
    for (unsigned i = 1; i < w.params; i++)
        step_param(&w, &w.param[i]);
}

static bool first_is_readable(void)
{
    return ht_optim_readable(w.o, w.param[0].oid, 0, UINT64_MAX, NULL) == 0;
}

static bool second_is_readable(void)
{
    return ht_optim_readable(w.o, w.param[1].oid, 0, UINT64_MAX, NULL) == 0;
}

static atomic_int ended;

static void *commit_in_thread(void *unused)
{
    (void)unused;
    ended = ht_optim_commit(w.o, ROOT);
    return NULL;
}

static bool is_closed(void)
{
    return fixture_stat(&w).step == 1;
}

/* The gradient of the next step, its first element, as a client would try. */
static ssize_t try_gradient(void)
{
    struct ht_grad *g = open_grad(&w, &w.param[1]);
    ssize_t n = ht_grad_try_write(g, 0, "\0\0\0\0", 4);

    ht_grad_discard(g);
    ht_grad_release(g);
    return n;
}

TEST(a_reader_waits_for_its_own_update_and_steering_for_the_end)
{
    pthread_t committer;

    two_params("adamw lr=1e-2");
    parked = (struct parked){.waiter = {.wake = wake}};
    hold_begin(w.param[0].obj, 0);
    step_all_behind_the_first();
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    wait_until(second_is_readable);
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[0].oid, 0, 4, &parked.waiter), -EAGAIN);
    ck_assert_int_eq(try_gradient(), -EAGAIN);
    ck_assert_uint_eq(fixture_stat(&w).step, 0);
    ck_assert_int_eq(ht_optim_root_set_step(w.o, ROOT, 9), -EBUSY);
    ended = 1;
    ck_assert_int_eq(pthread_create(&committer, NULL, commit_in_thread, NULL), 0);
    usleep(20000);
    ck_assert(!(ended != 1) && !parked.woken);
    ht_optim_verify(w.o);
    hold_end();
    pthread_join(committer, NULL);
    ck_assert_int_eq(ended, 0);
    wait_until(is_woken);
    ck_assert_int_eq(try_gradient(), 4);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 1);
    check_all(&w);
}

/*
 * Without the norm nothing is queued, and yet no reader gets the values of the step before. A part of a gradient is
 * measured at the boundary, and this one is held.
 */
TEST(with_clipping_readers_wait_for_the_decision)
{
    two_params("adamw lr=1e-2 max_grad_norm=1000 partial=1");
    step_once();
    struct ht_grad *g = open_grad(&w, &w.param[0]);
    uint8_t *bytes = random_gradient(&w, &w.param[0]);
    write_all(g, 0, bytes, 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    step_param(&w, &w.param[1]);
    lock(w.o);
    struct ht_obj *grad = ht_opt_param_find(w.o, w.param[0].oid)->grad;
    unlock(w.o);
    hold_begin(grad, 0);
    ck_assert(first_is_readable() && second_is_readable());
    parked = (struct parked){.waiter = {.wake = wake}};
    unsigned invalidations = w.invalidations;
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    ck_assert_uint_gt(w.invalidations, invalidations);
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[0].oid, 0, 4, NULL), -EAGAIN);
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[1].oid, 0, 4, &parked.waiter), -EAGAIN);
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[0].oid, 100000, 4, NULL), 0); /* has no gradient in this step */
    ht_optim_verify(w.o);
    ck_assert(!parked.woken);
    hold_end();
    wait_until(is_woken);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    struct ht_optim_config c = fixture_config(w.config);
    model_update(&w.param[0], &c, bytes, 0, 1000, true);
    ck_assert(first_is_readable() && second_is_readable());
    check_all(&w);
    ht_grad_release(g);
}

/* A skipped step updates nothing: who waited for the decision goes on. */
TEST(a_skipped_step_lets_readers_go_on)
{
    two_params("adamw lr=1e-2 skip_nonfinite=1");
    for (unsigned i = 0; i < 2; i++) {
        uint8_t *g = random_gradient(&w, &w.param[i]);
        put_value(g, HT_DTYPE_F32, 5, NAN);
        write_gradient(&w, &w.param[i], g);
    }
    parked = (struct parked){.waiter = {.wake = wake}};
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    if (ht_optim_readable(w.o, w.param[0].oid, 0, 4, &parked.waiter) == -EAGAIN)
        wait_until(is_woken);
    wait_until(is_closed);
    ck_assert_uint_eq(fixture_stat(&w).skipped, 1);
    check_all(&w);
}

TEST(a_refusal_that_needs_no_update_is_made_at_once)
{
    struct ht_optim_steer by = {.conditional = true, .step_open = 4711};

    two_params("adamw lr=1e-2");
    struct ht_grad *g = open_grad(&w, &w.param[0]);
    ck_assert_int_eq(ht_grad_write(g, 0, "\0\0\0\0", 4), 4);
    close_grad(g);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), -EBUSY);
    check_error(&w, &w.param[0], "first hole");
    ck_assert_int_eq(ht_optim_step_async_by(w.o, ROOT, &by), -ESTALE);
    ck_assert_int_eq(ht_optim_step_async(w.o, 4242), -ENOENT);
    ht_optim_verify(w.o);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0); /* no step is open */
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_uint_eq(fixture_stat(&w).step, 0);
}

/* ---------------------------------------------------------------- failures */

TEST(a_failed_update_refuses_gradients_until_an_abort)
{
    two_params("adamw lr=1e-2");
    step_once();
    uint64_t before = fixture_hash(&w);
    hold_begin(w.param[0].obj, 0);
    send_random(&w.param[0]);
    ht_fault_arm(HT_FAULT_OPTIM_UPDATE, 1, false);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    hold_end();
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), -EIO);
    ht_fault_disarm_all();
    ck_assert_ptr_nonnull(strstr(fixture_stat(&w).error, "update of bytes"));
    ck_assert_int_eq(try_gradient(), -EIO);
    ck_assert_ptr_nonnull(strstr(fixture_stat(&w).error, "update of bytes")); /* the cause, not its consequence */
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), -EIO);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), -EIO);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert(fixture_hash(&w) == before && !fixture_stat(&w).error[0]);
    step_all(&w);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    check_all(&w);
}

TEST(a_failed_publication_refuses_gradients_until_a_commit)
{
    two_params("adamw lr=1e-2");
    step_once();
    struct ht_grad *late = open_grad(&w, &w.param[0]);
    step_all_in_memory();
    ht_fault_arm(HT_FAULT_STORE_WRITE, 1, true);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), -EIO);
    ht_fault_disarm_all();
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert(st.step == 2 && st.durable_step == 1 && strstr(st.error, "commit failed"));
    ck_assert_int_eq(ht_grad_write(late, 0, "\0\0\0\0", 4), -EIO);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0); /* the publication is due, and succeeds */
    st = fixture_stat(&w);
    ck_assert(st.step == 2 && st.durable_step == 2 && !st.error[0]);
    ck_assert_int_eq(ht_grad_write(late, 0, "\0\0\0\0", 4), 4);
    ht_grad_discard(late);
    ht_grad_release(late);
    check_all(&w);
}

/* ---------------------------------------------------- aborts and the end */

TEST_LOOP(an_abort_comes_after_the_step, 2)
{
    two_params(_i ? "adamw lr=1e-2 durable_every=4" : "adamw lr=1e-2");
    step_once();
    uint64_t before = fixture_hash(&w);
    hold_begin(w.param[0].obj, 0);
    step_all(&w);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    hold_end();
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).step, _i ? 1 : 2);
    ck_assert((fixture_hash(&w) == before) == (_i == 1));
}

TEST(an_unmount_keeps_a_step_that_is_being_closed)
{
    two_params("adamw lr=1e-2 durable_every=100");
    step_all(&w);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    ck_assert_int_eq(ht_optim_finish(w.o), 0);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 1);
    remount_and_check();
}

/* The daemon ends at any moment after the request: the next mount finds the step before, or this one, whole. */
TEST_LOOP(a_stop_while_it_is_closed_leaves_one_step_or_the_other, 8)
{
    two_params(_i % 2 ? "adamw lr=1e-2" : "adamw lr=1e-2 max_grad_norm=0.1");
    step_once();
    uint64_t before = fixture_hash(&w);
    step_all(&w);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    usleep((unsigned)_i * 300);
    crash_and_mount();
    uint64_t step = fixture_stat(&w).step;
    ck_assert(step == 1 || step == 2);
    ck_assert((fixture_hash(&w) == before) == (step == 1));
}

/* ------------------------------------------------------------- other models */

/* A step that does not end keeps no other model waiting. */
TEST(roots_close_their_steps_side_by_side)
{
    enum { OTHERS = 3 };
    struct ht_optim_config config;
    struct ht_tx *tx;

    two_params("adamw lr=1e-2");
    config = fixture_config(w.config);
    ck_assert_int_eq(ht_tx_begin(w.s, 1000, &tx), 0);
    for (unsigned i = 1; i <= OTHERS; i++)
        ck_assert_int_eq(ht_optim_root_add(w.o, ROOT + i, &config, tx), 0);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    hold_begin(w.param[0].obj, 0);
    step_all(&w);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    for (unsigned i = 1; i <= OTHERS; i++) {
        ck_assert_int_eq(ht_optim_step_async(w.o, ROOT + i), 0);
        ck_assert_int_eq(ht_optim_wait(w.o, ROOT + i, 0), 0);
    }
    hold_end();
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    check_all(&w);
}

/* ------------------------------------------------------------------- the queue */

static void set_backlog(uint64_t bytes)
{
    lock(w.o);
    w.o->backlog_bytes_max = bytes;
    unlock(w.o);
}

TEST(writers_wait_while_many_gradients_are_queued)
{
    two_params("adamw lr=1e-2");
    step_once();
    hold_begin(w.param[0].obj, 0);
    step_param(&w, &w.param[0]);
    ck_assert_int_eq(try_gradient(), 4);
    set_backlog(1000);
    ck_assert_int_eq(try_gradient(), -EAGAIN);
    set_backlog(MIB);
    ck_assert_int_eq(try_gradient(), 4);
    hold_end();
    commit_and_check();
}

/* One thread; the parameter that it works on is held. Which of the others comes next? */
static unsigned first_of_the_others(void)
{
    unsigned first = 0;

    lock(w.o);
    const struct ht_root *root = ht_opt_root_find(w.o, ROOT);
    const struct ht_param *p = ht_list_entry(root->queue.next, struct ht_param, queued);
    while (first < w.params && w.param[first].oid != p->oid)
        first++;
    unlock(w.o);
    return first;
}

TEST(the_newest_gradient_is_updated_first)
{
    w.threads = 1;
    fixture_open(&w);
    for (unsigned i = 0; i < 4; i++)
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1000, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    step_all(&w); /* makes state: flushes wait for nothing below */
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    hold_begin(w.param[0].obj, 0);
    step_all_behind_the_first();
    ck_assert_uint_eq(first_of_the_others(), 3);
    ht_optim_verify(w.o);
    hold_end();
    commit_and_check();
}

/* ------------------------------------------------------- the parameter first */

/* Returns a parameter beside as many as the tier protects; one worker. */
static struct test_param *more_than_the_tier_protects(void)
{
    w.dram_bytes = 8 * MIB;
    w.threads = 1;
    fixture_open(&w);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, MIB / 4, HT_CHUNK_BYTES);
    for (unsigned i = 0; i < 8; i++)
        fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, MIB / 4, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    return p;
}

/*
 * The parameter is in shared memory, and nothing else has room: its moments pass through staging buffers, to a device
 * that does not answer.
 */
TEST(a_parameter_in_memory_is_readable_before_its_moments_are_written)
{
    struct test_param *p = more_than_the_tier_protects();

    for (unsigned i = w.params; i-- > 1;)
        step_param(&w, &w.param[i]);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    step_param(&w, p);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    uint8_t *bytes = test_alloc(p->n * 4), *g = random_gradient(&w, p);
    ck_assert_int_eq(ht_obj_read(p->obj, 0, bytes, p->n * 4), (ssize_t)(p->n * 4)); /* brings an image */
    dev_stall_at(w.dev, HT_IO_WRITE, 1);
    struct ht_optim_config c = fixture_config(w.config);
    write_gradient(&w, p, g);
    model_update(p, &c, g, 0, p->n, true);
    wait_until(first_is_readable);
    dev_wait_stalled(w.dev);
    ck_assert_int_eq(ht_obj_read(p->obj, 0, bytes, p->n * 4), (ssize_t)(p->n * 4));
    ck_assert_mem_eq(bytes, p->p, p->n * 4);
    lock(w.o);
    const struct ht_param *known = ht_opt_param_find(w.o, p->oid);
    bool shown = known->shown == 1 && known->pending == 1;
    unlock(w.o);
    dev_stall(w.dev, false);
    ck_assert(shown);
    commit_and_check();
}

/* The step fails as a whole, although its parameter was read in between. */
TEST(a_write_of_moments_that_fails_takes_the_parameter_back)
{
    struct test_param *p = more_than_the_tier_protects();

    for (unsigned i = w.params; i-- > 0;)
        step_param(&w, &w.param[i]);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    uint64_t before = fixture_hash(&w);
    uint8_t *g = random_gradient(&w, p);
    hold_begin(p->obj, 0);
    write_gradient(&w, p, g);
    ht_fault_arm(HT_FAULT_STORE_WRITE, 1, true);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    hold_end();
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), -EIO);
    ht_fault_disarm_all();
    ck_assert_int_eq(try_gradient(), -EIO);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert(fixture_hash(&w) == before);
}

static atomic_int invalidations;
static atomic_bool reader_was_left;

/* The kernel holds the page of a reader that came before: the call returns when the reader has its answer. */
static void invalidate_a_page_that_is_read(void *ctx, uint64_t oid, uint64_t off, uint64_t len)
{
    (void)ctx, (void)off, (void)len;
    if (oid != w.param[1].oid || invalidations++)
        return;
    bool ready = ht_optim_readable(w.o, oid, 0, 4, &parked.waiter) == 0;
    holder.let_go = true;
    for (unsigned ms = 0; !ready && !parked.woken && ms < 60000; ms++)
        usleep(1000);
    reader_was_left = !ready && !parked.woken;
}

TEST(a_skipped_step_answers_a_reader_that_the_kernel_waits_for)
{
    two_params("adamw lr=1e-2 skip_nonfinite=1 partial=1");
    step_once();
    struct ht_grad *g = open_grad(&w, &w.param[0]);
    uint8_t *bytes = random_gradient(&w, &w.param[0]), *second = random_gradient(&w, &w.param[1]);
    put_value(bytes, HT_DTYPE_F32, 5, NAN);
    write_all(g, 0, bytes, 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_gradient(&w, &w.param[1], second);
    lock(w.o);
    struct ht_obj *grad = ht_opt_param_find(w.o, w.param[0].oid)->grad;
    w.o->hooks.invalidate = invalidate_a_page_that_is_read;
    unlock(w.o);
    hold_begin(grad, 0);
    parked = (struct parked){.waiter = {.wake = wake}};
    invalidations = 0;
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    pthread_join(holder.thread, NULL);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_int_gt(invalidations, 0);
    ck_assert(!reader_was_left);
    ck_assert_uint_eq(fixture_stat(&w).skipped, 1);
    ht_grad_release(g);
}

/* Gradients of the next step came while a step was being published. That failed: their rest is welcome. */
TEST(a_failed_publication_leaves_the_next_step_open)
{
    two_params("adamw lr=1e-2 partial=1");
    step_once();
    step_all_in_memory();
    dev_stall_at(w.dev, HT_IO_WRITE, 1);
    ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    dev_wait_stalled(w.dev); /* the step has its number before */
    ck_assert_uint_eq(fixture_stat(&w).step, 2);
    struct ht_grad *g = open_grad(&w, &w.param[1]);
    uint8_t *bytes = random_gradient(&w, &w.param[1]);
    write_all(g, 0, bytes, 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ht_fault_arm(HT_FAULT_STORE_WRITE, 1, true);
    dev_stall(w.dev, false);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), -EIO);
    ht_fault_disarm_all();
    write_all(g, 4000, bytes, w.param[1].n * 4 - 4000);
    close_grad(g);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).step, 3);
}

RUN_TESTS("asynchronous steps", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
