/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients as clients write them: in odd pieces, twice, too long, torn; and which calls wait for them. */
#include "optim/state/context.h"
#include "optim/state/param.h"
#include "tests/unit/optim/step/holder.h"

static struct test_param *p;
static struct ht_grad *g;
static uint8_t *bytes;

static void begin_with(unsigned threads, uint8_t grad_dtype, uint64_t elements)
{
    w.threads = threads;
    fixture_open(&w);
    p = fixture_param(&w, HT_DTYPE_F32, grad_dtype, elements, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    g = open_grad(&w, p);
    bytes = random_gradient(&w, p);
}

/* One f32 parameter of 3.5 chunks with a bf16 or f32 gradient. */
static void begin(uint8_t grad_dtype)
{
    begin_with(2, grad_dtype, 57344);
}

static void apply_to_model(void)
{
    struct ht_optim_config c = fixture_config(w.config);

    model_update(p, &c, bytes, 0, p->n, true);
}

static void done(void)
{
    if (!w.s) /* a test has closed it */
        return;
    ht_grad_release(g);
    check_all(&w);
    fixture_close(&w);
}

static void write_ok(uint64_t begin_at, uint64_t end)
{
    write_all(g, begin_at, bytes, end - begin_at);
}

static void end_step(void)
{
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_to_model();
}

static void whole_step(void)
{
    write_ok(0, p->n * 4);
    end_step();
}

TEST(each_flush_queues_what_is_whole)
{
    begin(HT_DTYPE_F32);
    ck_assert_uint_eq(ht_grad_size(g), p->n * 4);
    write_ok(0, 65536);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, p->oid), 0);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, 16384);
    write_ok(65536, 70000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_ok(100000, p->n * 4);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_uint_eq(fixture_stat(&w).updated_elements, p->n - 16384);
    write_ok(70000, 100000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).grad_bytes, p->n * 4);
    apply_to_model();
}

TEST(rewriting_before_the_flush_counts_once)
{
    begin(HT_DTYPE_BF16);
    uint8_t *other = random_gradient(&w, p);
    ck_assert_int_eq(ht_grad_write(g, 0, other, 60000), 60000);
    ck_assert_int_eq(ht_grad_write(g, 30001, other, 9999), 9999);
    write_ok(0, p->n * 2);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_to_model();
}

TEST(a_second_gradient_before_the_boundary_is_refused)
{
    begin(HT_DTYPE_F32);
    write_ok(0, p->n * 4);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_grad_write(g, 4000, bytes, 8), -EBUSY);
    check_error(&w, p, "belong to this step");
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_int_eq(ht_grad_write(g, 0, bytes, 4), -EBUSY); /* applied is no excuse */
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    apply_to_model();
    whole_step();
}

TEST(a_torn_element_refuses_what_came_since_the_last_flush)
{
    begin(HT_DTYPE_F32);
    write_ok(0, 65536);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_ok(65536, 131074);
    ck_assert_int_eq(ht_grad_flush(g), -EINVAL);
    check_error(&w, p, "inside an element at byte 131074");
    /* That gradient is not applied; the one before it is, and later ones can be. */
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    write_ok(65538, p->n * 4);
    ck_assert_int_eq(ht_grad_flush(g), -EINVAL);
    check_error(&w, p, "byte 65538");
    write_ok(65536, p->n * 4);
    end_step();
}

/*
 * Each opener has half of the gradient, in odd pieces. One closes while the other is inside an element, and inside its
 * own.
 */
TEST(an_opener_answers_for_what_it_wrote_itself)
{
    begin(HT_DTYPE_F32);
    struct ht_grad *other = open_grad(&w, p);
    uint64_t half = 100000, end = p->n * 4;
    write_all(other, half, bytes, 70001);
    write_ok(0, half);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_grad_flush(other), -EINVAL);
    check_error(&w, p, "inside an element at byte 170001");
    write_all(other, half + 40002, bytes, end - half - 40002);
    ck_assert_int_eq(ht_grad_flush(g), 0); /* it has written nothing */
    write_all(other, half, bytes, 40002);
    ck_assert_int_eq(ht_grad_flush(other), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_to_model();
    /* A whole range whose writer has not closed belongs to no step: its writer may overwrite it. */
    ck_assert_int_eq(ht_grad_write(other, half, "rubbish, 16 byte", 16), 16);
    write_ok(0, half);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_all(other, half, bytes, end - half);
    close_grad(other);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_to_model();
}

/* apply takes the whole elements of all openers. A partly written element stays with its writer. */
TEST(apply_leaves_an_element_that_is_being_written)
{
    begin(HT_DTYPE_F32);
    write_ok(0, 100001);
    ck_assert_int_eq(ht_optim_apply(w.o, ROOT, p->oid), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    write_ok(100001, p->n * 4);
    end_step();
}

TEST(bytes_beyond_the_parameter_refuse_the_gradient)
{
    begin(HT_DTYPE_F32);
    uint64_t end = p->n * 4;
    write_ok(0, end);
    ck_assert_int_eq(ht_grad_write(g, end, bytes, 1), -EINVAL);
    check_error(&w, p, "beyond its end");
    ck_assert_int_eq(ht_grad_write(g, UINT64_MAX - 1, bytes, 8), -EINVAL);
    ck_assert_int_eq(ht_grad_write(g, end - 4, bytes, 8), -EINVAL);
    ck_assert_int_eq(ht_grad_flush(g), -EINVAL);
    check_error(&w, p, "not applied");
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert(!fixture_stat(&w).open);
    write_ok(0, end);
    end_step();
}

TEST(who_writes_too_much_is_refused_alone)
{
    begin(HT_DTYPE_F32);
    struct ht_grad *other = open_grad(&w, p);
    uint64_t half = 100000, end = p->n * 4;
    write_ok(0, half);
    write_all(other, half, bytes, end - half);
    ck_assert_int_eq(ht_grad_write(other, end, bytes, 4), -EINVAL);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    /* No other opener brings these bytes into the step. */
    ck_assert_int_eq(ht_optim_apply(w.o, ROOT, p->oid), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    write_all(other, half, bytes, end - half);
    ck_assert_int_eq(ht_grad_flush(other), -EINVAL);
    check_error(&w, p, "not applied");
    write_all(other, half, bytes, end - half);
    ck_assert_int_eq(ht_grad_flush(other), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_to_model();
    /* An abort forgets the error, too. */
    ck_assert_int_eq(ht_grad_write(other, end, bytes, 4), -EINVAL);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    write_all(other, 0, bytes, end);
    close_grad(other);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_to_model();
}

TEST(wrong_dtypes_and_sizes_do_not_open)
{
    struct ht_grad *other;

    begin(HT_DTYPE_F32);
    struct ht_param_desc desc = fixture_desc(p);
    desc.dtype = HT_DTYPE_F64;
    ck_assert_int_eq(ht_grad_open(w.o, &desc, &other), -EINVAL);
    check_error(&w, p, "f32, bf16 or f16");
    desc = fixture_desc(p);
    desc.grad_dtype = HT_DTYPE_I8;
    ck_assert_int_eq(ht_grad_open(w.o, &desc, &other), -EINVAL);
    desc = fixture_desc(p);
    desc.root = 999;
    ck_assert_int_eq(ht_grad_open(w.o, &desc, &other), -EINVAL);
    ck_assert_int_eq(ht_obj_truncate(p->obj, p->n * 4 - 1), 0);
    desc = fixture_desc(p);
    ck_assert_int_eq(ht_grad_open(w.o, &desc, &other), -EINVAL);
    check_error(&w, p, "whole number of elements");
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
}

TEST(an_empty_parameter_has_an_empty_gradient)
{
    begin(HT_DTYPE_F32);
    struct test_param *empty = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 0, HT_SMALL_CHUNK_BYTES);
    struct ht_grad *h = open_grad(&w, empty);
    ck_assert_uint_eq(ht_grad_size(h), 0);
    ck_assert_int_eq(ht_grad_write(h, 0, bytes, 0), 0);
    ck_assert_int_eq(ht_grad_flush(h), 0);
    ck_assert_int_eq(ht_grad_write(h, 0, bytes, 4), -EINVAL);
    ck_assert_int_eq(ht_grad_flush(h), -EINVAL);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ht_grad_release(h);
}

TEST(a_gradient_reads_as_written_until_it_is_applied)
{
    uint8_t got[9000];

    begin(HT_DTYPE_BF16);
    write_ok(1000, 3000);
    write_ok(5000, 6000);
    ck_assert_int_eq(ht_grad_read(g, 0, got, sizeof(got)), sizeof(got));
    for (unsigned i = 0; i < sizeof(got); i++)
        ck_assert_uint_eq(got[i], (i >= 1000 && i < 3000) || (i >= 5000 && i < 6000) ? bytes[i] : 0);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_grad_read(g, 2000, got, 2000), 2000);
    ck_assert_int_eq(memcmp(got, bytes + 2000, 1000), 0);
    ck_assert(got[1000] == 0 && got[1999] == 0);
    write_ok(0, 1000);
    write_ok(3000, 5000);
    write_ok(6000, p->n * 2);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_int_eq(ht_grad_read(g, 0, got, sizeof(got)), sizeof(got));
    for (unsigned i = 0; i < sizeof(got); i++)
        ck_assert_uint_eq(got[i], 0);
    ck_assert_int_eq(ht_grad_read(g, p->n * 2, got, 10), 0);
    apply_to_model();
}

TEST(more_pieces_than_allowed_are_refused)
{
    begin(HT_DTYPE_F32);
    ssize_t n = 4;
    unsigned i = 0;
    for (; n == 4 && i < 8000; i++)
        n = ht_grad_write(g, 8 * i, bytes + 8 * i, 4);
    ck_assert_int_eq(n, -E2BIG);
    check_error(&w, p, "pieces");
    whole_step();
}

TEST_LOOP(gradients_take_no_space_when_applied, 2)
{
    begin(_i ? HT_DTYPE_BF16 : HT_DTYPE_F32);
    write_ok(0, p->n * dtype_bytes(p->grad_dtype));
    end_step();
    /* The parameter and two states are resident; nothing else is. */
    ck_assert_uint_le(store_stats().dram_used_bytes, 3 * 4 * (uint64_t)HT_SMALL_CHUNK_BYTES);
}

/* ----------------------------------------------------------------- waiting */

TEST(readers_of_pending_ranges_are_parked_and_woken)
{
    struct parked gone = {.woken = false};

    begin(HT_DTYPE_F32);
    hold_begin(p->obj, 0);
    write_ok(0, 100000);
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 0, 100, NULL), 0);
    parked.waiter.wake = gone.waiter.wake = wake;
    unsigned invalidations = w.invalidations;
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_uint_gt(w.invalidations, invalidations);
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 0, 100, NULL), -EAGAIN);
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 0, UINT64_MAX, &parked.waiter), -EAGAIN);
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 1000, 1, &gone.waiter), -EAGAIN);
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 65536, 4000, NULL), 0); /* only partly covered: the old version */
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 200000, 4000, NULL), 0);
    ck_assert_int_eq(ht_optim_readable(w.o, 4242, 0, 4000, NULL), 0);
    ck_assert(ht_optim_cancel(w.o, &gone.waiter));
    ck_assert(!parked.woken);
    hold_end();
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    wait_until(is_woken);
    ck_assert(!gone.woken);
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 0, UINT64_MAX, NULL), 0);
    write_ok(100000, p->n * 4);
    end_step();
}

TEST(abort_answers_parked_readers)
{
    begin(HT_DTYPE_F32);
    hold_begin(p->obj, 0);
    write_ok(0, p->n * 4);
    parked.waiter.wake = wake;
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 0, 100, &parked.waiter), -EAGAIN);
    holder.let_go = true;
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert(parked.woken);
    hold_end();
}

static enum ht_optim_file first_is_unlinked(void *ctx, uint64_t oid)
{
    return p && oid == p->oid ? HT_OPTIM_FILE_UNLINKED : HT_OPTIM_FILE_NAMED;
}

static void *commit_in_thread(void *arg)
{
    *(int *)arg = ht_optim_commit(w.o, ROOT);
    return NULL;
}

/* The only thread works on another parameter, and no update of this one ever comes. */
TEST(the_end_of_a_step_answers_readers_of_a_deleted_parameter)
{
    pthread_t committer;
    int result = -1;

    w.hooks.file = first_is_unlinked;
    begin_with(1, HT_DTYPE_F32, 57344);
    struct test_param *other = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 57344, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    hold_begin(other->obj, 0);
    write_gradient(&w, other, bytes);
    /* Later gradients go before queued ranges; they wait for one that a worker has. */
    bool taken = false;
    while (!taken) {
        usleep(1000);
        lock(w.o);
        struct ht_param *param = ht_opt_param_find(w.o, other->oid);
        const struct ht_range *r = param ? ht_opt_range_find(param, 0) : NULL;
        taken = r && r->state == HT_RANGE_RUNNING;
        unlock(w.o);
    }
    write_ok(0, 150000);
    parked.waiter.wake = wake;
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 0, 4, &parked.waiter), -EAGAIN);
    ck_assert_int_eq(pthread_create(&committer, NULL, commit_in_thread, &result), 0);
    for (unsigned waited_ms = 0; !parked.woken && waited_ms < 60000; waited_ms++)
        usleep(1000);
    bool woken = parked.woken;
    hold_end();
    pthread_join(committer, NULL);
    ck_assert(woken);
    ck_assert_int_eq(result, 0);
    struct ht_optim_config c = fixture_config(w.config);
    model_update(other, &c, bytes, 0, other->n, true); /* of the deleted one nothing was updated */
}

/* ------------------------------------------------------------------- state */

TEST(state_files_are_named_and_sized)
{
    const char *name;

    begin(HT_DTYPE_F32);
    struct ht_param_desc desc = fixture_desc(p);
    static const char *const words[] = {"exp_avg", "exp_avg_sq", "step"};
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(ht_optim_state_name(w.o, &desc, i, &name), 0);
        ck_assert_str_eq(name, words[i]);
        ck_assert_int_eq(ht_optim_state_size(w.o, &desc, name), 0);
    }
    ck_assert_int_eq(ht_optim_state_name(w.o, &desc, 3, &name), -ENOENT);
    ck_assert_int_eq(ht_optim_state_size(w.o, &desc, "master"), -ENOENT);
    float x[2];
    ck_assert_int_eq(ht_optim_state_read(w.o, &desc, "exp_avg", 0, x, 8), 0);
    desc.dtype = HT_DTYPE_BF16;
    ck_assert_int_eq(ht_optim_state_name(w.o, &desc, 2, &name), 0);
    ck_assert_str_eq(name, "master");
}

TEST(a_reader_of_state_is_read_ahead)
{
    enum { BYTES = 6 * MIB, PARTS = 4 };
    struct ht_obj_reader r = {0};
    float *x = test_alloc(BYTES), *got = test_alloc(MIB);

    w.dram_bytes = 64 * MIB;
    fixture_open_as(&w, NULL, 1);
    p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, BYTES / 4, MIB);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_param_desc desc = fixture_desc(p);
    for (uint64_t i = 0; i < p->n; i++)
        x[i] = (float)i;
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "exp_avg", 0, x, BYTES), BYTES);
    for (uint64_t i = 0; i < PARTS; i++) {
        ck_assert_int_eq(ht_optim_state_read_for(w.o, &desc, "exp_avg", &r, i * MIB, got, MIB), MIB);
        ck_assert_int_eq(memcmp(got, x + i * MIB / 4, MIB), 0);
    }
    ck_assert_uint_ne(r.oid, 0);
    ck_assert_uint_gt(r.streams.up.window, 0);
    ht_obj_reader_end(&r);
    fixture_close(&w);
}

TEST(state_can_be_written_between_steps)
{
    begin(HT_DTYPE_F32);
    struct ht_param_desc desc = fixture_desc(p);
    float t = 41, half = 0.5f;
    for (uint64_t i = 0; i < p->n; i++) {
        p->m[i] = random_value(&w);
        p->v[i] = random_value(&w) + 0.2f;
    }
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "exp_avg", 0, p->m, p->n * 4), (ssize_t)(p->n * 4));
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "exp_avg_sq", 0, p->v, p->n * 4), (ssize_t)(p->n * 4));
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "step", 0, &t, 4), 4);
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "step", 0, &t, 2), -EINVAL);
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "step", 0, &half, 4), -EINVAL);
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "exp_avg", p->n * 4, &t, 4), -EINVAL);
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "momentum", 0, &t, 4), -ENOENT);
    p->t = 41;
    commit_and_check();
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, p->n * 8);
    ck_assert_uint_ge(ht_optim_state_stored(w.o, p->oid), p->n * 8);
    write_ok(0, p->n * 4);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "step", 0, &t, 4), -EBUSY);
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "exp_avg", 0, &t, 4), -EBUSY);
    apply_to_model();
    ck_assert(same_state(&w, p, "exp_avg", p->m)); /* reads wait for the updates */
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, p->oid), 0);
    check_all(&w);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

/* A gradient of zeros: the first moment becomes nine tenths of the old value. */
static void *step_beside(void *zeros)
{
    write_gradient(&w, p, zeros);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    return NULL;
}

/* The step ended before the write was complete, or began after it. */
static void check_moment(const struct ht_param_desc *desc, float *got, float written)
{
    ck_assert_int_eq(ht_optim_state_read(w.o, desc, "exp_avg", 0, got, p->n * 4), (ssize_t)(p->n * 4));
    uint64_t same = 0;
    while (same < p->n && got[same] == got[0])
        same++;
    ck_assert_msg(same == p->n, "the first %llu elements are %g and others not", (unsigned long long)same, got[0]);
    ck_assert_msg(got[0] == written || fabsf(got[0] - 0.9f * written) < 1e-3f, "%g was written, and %g is there",
                  written, got[0]);
}

TEST(state_that_is_written_beside_an_update_comes_before_or_after_it)
{
    w.config = "adamw lr=1e-2 weight_decay=0";
    w.dram_bytes = 64ull * MIB;
    begin_with(3, HT_DTYPE_F32, 1 << 20);
    struct ht_param_desc desc = fixture_desc(p);
    float *moment = test_alloc(p->n * 4), *got = test_alloc(p->n * 4);
    uint8_t *zeros = test_alloc(p->n * 4);
    for (unsigned round = 0; round < 30; round++) {
        float value = round % 2 ? -1000.0f - round : 1000.0f + round;
        pthread_t stepper;
        ssize_t n;
        for (uint64_t i = 0; i < p->n; i++)
            moment[i] = value;
        ck_assert_int_eq(pthread_create(&stepper, NULL, step_beside, zeros), 0);
        usleep((useconds_t)(fixture_random(&w) % 4000));
        while ((n = ht_optim_state_write(w.o, &desc, "exp_avg", 0, moment, p->n * 4)) == -EBUSY)
            usleep(300);
        ck_assert_int_eq(n, (ssize_t)(p->n * 4));
        pthread_join(stepper, NULL);
        check_moment(&desc, got, value);
    }
    ht_grad_release(g);
    fixture_close(&w);
}

static void *write_moment(void *arg)
{
    struct ht_param_desc desc = fixture_desc(p);

    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "exp_avg", 0, arg, p->n * 4), (ssize_t)(p->n * 4));
    return NULL;
}

static float *filled(float value)
{
    float *all = test_alloc(p->n * 4);

    for (uint64_t i = 0; i < p->n; i++)
        all[i] = value;
    return all;
}

/* The write stands still in the middle, at its third chunk. */
TEST(an_update_waits_for_state_that_is_being_written)
{
    pthread_t writer;
    float at = 0;

    w.config = "adamw lr=1e-2 weight_decay=0";
    begin_with(3, HT_DTYPE_F32, 57344);
    float *first = filled(1000), *second = filled(2000), *got = filled(0);
    uint8_t *zeros = test_alloc(p->n * 4);
    struct ht_param_desc desc = fixture_desc(p);
    write_moment(first);
    struct ht_param *param = ht_opt_param_get(w.o, p->oid);
    struct ht_obj *slow = ht_obj_get(w.s, param->cur.oid[0]);
    hold_begin(slow, 2);
    ck_assert_int_eq(pthread_create(&writer, NULL, write_moment, second), 0);
    while (ht_obj_read(slow, 0, &at, 4) != 4 || at != 2000)
        usleep(1000);
    write_gradient(&w, p, zeros);
    usleep(100000);
    hold_end();
    pthread_join(writer, NULL);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    check_moment(&desc, got, 2000);
    ck_assert(got[0] < 1900);
    ht_obj_put(slow);
    ht_opt_param_put(param);
    ht_grad_release(g);
    fixture_close(&w);
}

TEST(what_an_opener_discards_was_not_written)
{
    begin(HT_DTYPE_F32);
    struct ht_grad *other = open_grad(&w, p);
    write_ok(0, 150001); /* inside an element */
    write_all(other, 160000, bytes, 4000);
    ht_grad_discard(g);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert(!fixture_stat(&w).open);
    ck_assert_int_eq(ht_optim_apply(w.o, ROOT, p->oid), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    check_error(&w, p, "byte 0 is the first hole");
    write_ok(0, 160000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    check_error(&w, p, "byte 164000 is the first hole");
    write_ok(164000, p->n * 4);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ht_grad_release(other);
    apply_to_model();
}

/* ------------------------------------------------------------------- parts */

enum { RANKS = 2, PART_BYTES = HT_SMALL_CHUNK_BYTES, PART_ROUNDS = 6 };

static const unsigned ranks[RANKS] = {0, 1};

/* Chunk i belongs to rank i mod RANKS. */
static bool is_of_rank(const void *ctx, uint64_t off)
{
    return off / PART_BYTES % RANKS == *(const unsigned *)ctx;
}

/* g has chunks 0 and 2; the one that is returned has 1 and 3. */
static struct ht_grad *begin_parts(void)
{
    begin(HT_DTYPE_F32);
    struct ht_grad *other = open_grad(&w, p);
    ht_grad_set_part(g, is_of_rank, &ranks[0]);
    ht_grad_set_part(other, is_of_rank, &ranks[1]);
    return other;
}

static void write_chunk(struct ht_grad *of, uint64_t i)
{
    write_all(of, i * PART_BYTES, bytes, ht_min_u64(PART_BYTES, p->n * 4 - i * PART_BYTES));
}

static void finish_parts(struct ht_grad *other)
{
    ck_assert_int_eq(ht_grad_flush(other), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    apply_to_model();
    check_all(&w);
}

/* Both openers have written when the first one closes. */
static void interleaved_step(struct ht_grad *other)
{
    ck_assert_int_eq(ht_grad_write(other, PART_BYTES, "rubbish, 16 byte", 16), 16);
    write_chunk(other, 3);
    write_chunk(g, 2);
    write_chunk(g, 0);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_chunk(other, 3); /* it is no part of the step yet */
    write_chunk(other, 1);
    finish_parts(other);
}

/* The first one closes while the other one is inside elements, between and beyond its own bytes. */
static void torn_step(struct ht_grad *other)
{
    write_all(other, PART_BYTES, bytes, 1001);
    write_all(other, 3 * PART_BYTES, bytes, 4002);
    write_chunk(g, 0);
    write_chunk(g, 2);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    write_all(other, PART_BYTES + 1001, bytes, PART_BYTES - 1001);
    write_all(other, 3 * PART_BYTES + 4002, bytes, p->n * 4 - 3 * PART_BYTES - 4002);
    finish_parts(other);
}

TEST(a_flush_takes_nothing_of_other_parts)
{
    struct ht_grad *other = begin_parts();

    interleaved_step(other);
    torn_step(other);
    /* The parts outlive what makes openers begin anew. */
    write_chunk(g, 0);
    write_chunk(other, 3);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    interleaved_step(other);
    write_chunk(g, 2);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, p->oid, NULL), 0);
    torn_step(other);
    ht_grad_release(other);
}

TEST(what_is_dropped_of_one_part_stays_of_the_others)
{
    struct ht_grad *other = begin_parts();

    write_chunk(g, 2);
    write_all(other, PART_BYTES, bytes, 1001);
    write_chunk(other, 3);
    ck_assert_int_eq(ht_grad_flush(other), -EINVAL);
    check_error(&w, p, "inside an element at byte 66537");
    write_chunk(g, 0);
    ht_grad_discard(other);
    write_chunk(other, 1);
    write_chunk(other, 3);
    ht_grad_discard(other);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    check_error(&w, p, "byte 65536 is the first hole");
    write_chunk(other, 1);
    write_chunk(other, 3);
    finish_parts(other);
    ht_grad_release(other);
}

TEST(a_part_that_is_too_long_is_refused_alone)
{
    struct ht_grad *other = begin_parts();

    write_chunk(g, 0);
    write_chunk(other, 1);
    write_chunk(g, 2);
    write_chunk(other, 3);
    ht_grad_refuse(other);
    write_chunk(other, 3);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_grad_flush(other), -EINVAL);
    check_error(&w, p, "longer than its shard");
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    check_error(&w, p, "byte 65536 is the first hole");
    write_chunk(other, 1);
    write_chunk(other, 3);
    finish_parts(other);
    ht_grad_release(other);
}

/* In pieces that end inside elements. */
static void write_in_pieces(struct ht_grad *of, unsigned rank)
{
    for (uint64_t from = rank * (uint64_t)PART_BYTES; from < p->n * 4; from += RANKS * PART_BYTES) {
        uint64_t end = ht_min_u64(from + PART_BYTES, p->n * 4);
        for (uint64_t at = from, n; at < end; at += n) {
            n = ht_min_u64(777, end - at);
            write_all(of, at, bytes, n);
        }
    }
}

static pthread_barrier_t all_written;

/* All ranks have written when rank 0 closes. The others write everything again, and close. */
static void *write_part(void *arg)
{
    const unsigned *rank = arg;
    struct ht_grad *of = open_grad(&w, p);

    ht_grad_set_part(of, is_of_rank, rank);
    write_in_pieces(of, *rank);
    pthread_barrier_wait(&all_written);
    if (*rank)
        write_in_pieces(of, *rank);
    close_grad(of);
    return NULL;
}

TEST(parts_are_written_at_the_same_time)
{
    pthread_t writer[RANKS];

    begin(HT_DTYPE_F32);
    ck_assert_int_eq(pthread_barrier_init(&all_written, NULL, RANKS), 0);
    for (unsigned round = 0; round < PART_ROUNDS; round++) {
        for (unsigned i = 0; i < RANKS; i++)
            ck_assert_int_eq(pthread_create(&writer[i], NULL, write_part, (void *)(uintptr_t)&ranks[i]), 0);
        for (unsigned i = 0; i < RANKS; i++)
            pthread_join(writer[i], NULL);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        apply_to_model();
        check_all(&w);
    }
    pthread_barrier_destroy(&all_written);
}

RUN_TESTS("coverage", .teardown = done, .timeout_s = 300, .memory = memory_keep)
