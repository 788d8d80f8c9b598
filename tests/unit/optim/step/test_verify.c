/* SPDX-License-Identifier: Apache-2.0 */
/* An optimizer whose memory contradicts itself ends the process when it is verified; a sound one passes. */
#include <signal.h>

#include "optim/state/context.h"
#include "optim/state/interval_set.h"
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/state/sections.h"
#include "tests/unit/optim/step/fixture.h"

enum { ELEMENTS = 100000 };

static struct ht_param *param;
static struct ht_range *done_range, *written_range;

/* A worker counts down after it has answered the waiting threads. */
static void wait_for_workers(void)
{
    bool busy = true;

    while (busy) {
        lock(w.o);
        busy = param->root->running > 0;
        unlock(w.o);
    }
}

/* The first range of the parameter is updated in an open step, the second one has a written gradient. */
static void make(void)
{
    struct test_param *p = open_with_param("sgd lr=0.1", 2, ELEMENTS);
    uint8_t *bytes = random_gradient(&w, p);
    struct ht_grad *g = open_grad(&w, p);

    write_all(g, 0, bytes, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, p->oid), 0);
    ck_assert_int_eq(ht_grad_write(g, HT_SMALL_CHUNK_BYTES, bytes, 4096), 4096);
    lock(w.o);
    param = ht_opt_param_find(w.o, p->oid);
    unlock(w.o);
    done_range = ht_opt_range_find(param, 0);
    written_range = ht_opt_range_find(param, 1);
    ck_assert(done_range->state == HT_RANGE_DONE && written_range->written.count == 1);
    wait_for_workers();
}

/* ------------------------------------------------------------------- errors */

static void a_state_that_is_none(void)
{
    done_range->state = HT_RANGE_FAILED + 1;
}

static void queued_on_no_queue(void)
{
    written_range->state = HT_RANGE_QUEUED;
    written_range->work = HT_WORK_UPDATE;
}

static void work_of_an_idle_range(void)
{
    written_range->work = HT_WORK_ADD;
}

static void running_without_work(void)
{
    done_range->state = HT_RANGE_RUNNING;
    done_range->work = 0;
    param->pending = param->refs = param->root->pending = 1;
}

static void a_failure_that_is_not_counted(void)
{
    done_range->state = HT_RANGE_FAILED;
}

static void written_bytes_on_no_list(void)
{
    ht_list_del(&written_range->dirty);
}

static void bytes_both_written_and_frozen(void)
{
    ck_assert_int_eq(ht_interval_set_add(&written_range->frozen, 0, 64), 0);
}

static void written_bytes_that_a_write_copies(void)
{
    static struct ht_inflight write = {.begin = HT_SMALL_CHUNK_BYTES + 8, .end = HT_SMALL_CHUNK_BYTES + 16};

    ht_list_add_tail(&param->inflight, &write.link);
}

static void intervals_beyond_the_range(void)
{
    written_range->written.one.end = HT_SMALL_CHUNK_BYTES + 4;
}

static void an_empty_interval(void)
{
    written_range->written.one.begin = written_range->written.one.end;
}

static void a_pending_range_that_is_none(void)
{
    param->pending++;
    param->refs++;
    param->root->pending++;
}

static void a_root_with_another_count(void)
{
    param->root->pending++;
}

static void a_backlog_of_nothing(void)
{
    param->root->backlog_bytes += 4096;
}

static void a_gradient_that_is_not_listed(void)
{
    ht_list_del(&param->touched);
}

static void gradients_without_a_step(void)
{
    param->root->open = 0;
}

static void more_ranges_than_there_are(void)
{
    param->complete = param->shape.range_count + 1;
}

static void fewer_references_than_openers(void)
{
    param->refs = 0;
}

static void state_of_another_number(void)
{
    param->cur.exists = true;
    param->cur.layout.count = 1;
    param->cur.oid[0] = param->oid;
    param->state[0] = param->grad;
}

static void held_without_the_gate(void)
{
    param->root->hold = true;
}

static void draining_without_the_gate(void)
{
    param->root->draining = true;
}

static void closing_without_the_gate(void)
{
    param->root->async = true;
}

static void deciding_without_a_closer(void)
{
    param->root->deciding = true;
}

static void shown_without_an_update(void)
{
    done_range->shown = true;
}

static void a_queue_of_nothing(void)
{
    ht_list_add_tail(&param->root->queue, &param->queued);
}

static void ready_without_work(void)
{
    ht_list_add_tail(&w.o->ready, &param->root->ready);
}

static void state_that_no_parameter_has(void)
{
    param->root->totals.state_bytes += 4;
}

static void a_deleted_parameter_that_counts(void)
{
    param->gone = true;
}

static void a_sum_on_no_list(void)
{
    param->sum = param->grad;
}

static void a_state_found_by_another_number(void)
{
    struct ht_id_link *l = &param->state_link[0].by_oid;

    l->id = param->oid;
    param->state_link[0].param = param;
    ck_assert_int_eq(ht_id_insert(&w.o->states_by_oid, l), 0);
}

static void sections_that_overlap(void)
{
    const struct ht_param_section s = {.begin = 4, .end = 9};

    lock(w.o);
    ck_assert_int_eq(ht_opt_sections_add(param, &s, false), 0);
    ck_assert_int_eq(ht_opt_sections_add(param, &s, false), 0);
    unlock(w.o);
}

static void memory_of_nothing(void)
{
    w.o->meta_bytes++;
}

static void a_range_of_another_place(void)
{
    done_range->index = 7;
}

static void (*const wrong[])(void) = {
    a_state_that_is_none,
    queued_on_no_queue,
    work_of_an_idle_range,
    running_without_work,
    a_failure_that_is_not_counted,
    written_bytes_on_no_list,
    bytes_both_written_and_frozen,
    written_bytes_that_a_write_copies,
    intervals_beyond_the_range,
    an_empty_interval,
    a_pending_range_that_is_none,
    a_root_with_another_count,
    a_backlog_of_nothing,
    a_gradient_that_is_not_listed,
    gradients_without_a_step,
    more_ranges_than_there_are,
    fewer_references_than_openers,
    state_of_another_number,
    held_without_the_gate,
    draining_without_the_gate,
    closing_without_the_gate,
    deciding_without_a_closer,
    shown_without_an_update,
    a_queue_of_nothing,
    ready_without_work,
    state_that_no_parameter_has,
    a_deleted_parameter_that_counts,
    a_sum_on_no_list,
    a_state_found_by_another_number,
    sections_that_overlap,
    memory_of_nothing,
    a_range_of_another_place,
};

/* ------------------------------------------------------------------- tests */

TEST_SIGNAL(a_broken_optimizer_ends_the_process, SIGABRT, HT_ARRAY_SIZE(wrong))
{
    make();
    ht_optim_verify(w.o);
    wrong[_i]();
    ht_optim_verify(w.o);
}

RUN_TESTS("optimizer", .timeout_s = 300, .memory = memory_keep)
