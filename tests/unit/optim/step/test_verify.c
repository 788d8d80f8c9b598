/* SPDX-License-Identifier: Apache-2.0 */
/* An optimizer whose memory contradicts itself ends the process when it is verified; a sound one passes. */
#include <signal.h>

#include "optim/state/context.h"
#include "optim/state/interval_set.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "tests/support/wrong.h"
#include "tests/unit/optim/step/fixture.h"

enum { ELEMENTS = 100000 };

static struct ht_param *param;
static struct ht_range *done_range, *written_range;

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
    /* A worker counts down after it has answered the waiting threads. */
    bool busy = true;
    while (busy) {
        lock(w.o);
        busy = param->root->running > 0;
        unlock(w.o);
    }
}

/* ------------------------------------------------------------------- errors */

WRONG_BY(a_state_that_is_none, done_range->state = HT_RANGE_FAILED + 1)

WRONG(queued_on_no_queue)
{
    written_range->state = HT_RANGE_QUEUED;
    written_range->work = HT_WORK_UPDATE;
}

WRONG_BY(work_of_an_idle_range, written_range->work = HT_WORK_ADD)

WRONG(running_without_work)
{
    done_range->state = HT_RANGE_RUNNING;
    done_range->work = 0;
    param->pending = param->refs = param->root->pending = 1;
}

WRONG_BY(a_failure_that_is_not_counted, done_range->state = HT_RANGE_FAILED)
WRONG_BY(written_bytes_on_no_list, ht_list_del(&written_range->dirty))
WRONG_BY(bytes_both_written_and_frozen, ck_assert_int_eq(ht_interval_set_add(&written_range->frozen, 0, 64), 0))

WRONG(written_bytes_that_a_write_copies)
{
    static struct ht_inflight write = {.begin = HT_SMALL_CHUNK_BYTES + 8, .end = HT_SMALL_CHUNK_BYTES + 16};

    ht_list_add_tail(&param->inflight, &write.link);
}

WRONG_BY(intervals_beyond_the_range, written_range->written.one.end = HT_SMALL_CHUNK_BYTES + 4)
WRONG_BY(an_empty_interval, written_range->written.one.begin = written_range->written.one.end)

WRONG(a_pending_range_that_is_none)
{
    param->pending++;
    param->refs++;
    param->root->pending++;
}

WRONG_BY(a_root_with_another_count, param->root->pending++)
WRONG_BY(a_backlog_of_nothing, param->root->backlog_bytes += 4096)
WRONG_BY(a_gradient_that_is_not_listed, ht_list_del(&param->touched))
WRONG_BY(gradients_without_a_step, param->root->open = 0)
WRONG_BY(more_ranges_than_there_are, param->complete = param->shape.range_count + 1)
WRONG_BY(fewer_references_than_openers, param->refs = 0)

WRONG(state_of_another_number)
{
    param->cur.exists = true;
    param->cur.layout.count = 1;
    param->cur.oid[0] = param->oid;
    param->state[0] = param->grad;
}

WRONG_BY(held_without_the_gate, param->root->hold = true)
WRONG_BY(draining_without_the_gate, param->root->draining = true)
WRONG_BY(closing_without_the_gate, param->root->async = true)
WRONG_BY(deciding_without_a_closer, param->root->deciding = true)
WRONG_BY(shown_without_an_update, done_range->shown = true)
WRONG_BY(a_queue_of_nothing, ht_list_add_tail(&param->root->queue, &param->queued))
WRONG_BY(ready_without_work, ht_list_add_tail(&w.o->ready, &param->root->ready))
WRONG_BY(state_that_no_parameter_has, param->root->totals.state_bytes += 4)
WRONG_BY(a_deleted_parameter_that_counts, param->gone = true)
WRONG_BY(a_sum_on_no_list, param->sum = param->grad)

WRONG(a_state_found_by_another_number)
{
    struct ht_id_link *l = &param->state_link[0].by_oid;

    l->id = param->oid;
    param->state_link[0].param = param;
    ck_assert_int_eq(ht_id_insert(&w.o->states_by_oid, l), 0);
}

WRONG(sections_that_overlap)
{
    const struct ht_param_section s = {.begin = 4, .end = 9};

    lock(w.o);
    ck_assert_int_eq(ht_opt_sections_add(param, &s, false), 0);
    ck_assert_int_eq(ht_opt_sections_add(param, &s, false), 0);
    unlock(w.o);
}

WRONG_BY(memory_of_nothing, w.o->meta_bytes++)
WRONG_BY(a_range_of_another_place, done_range->index = 7)

/* ------------------------------------------------------------------- tests */

TEST_SIGNAL(a_broken_optimizer_ends_the_process, SIGABRT, wrongs)
{
    make();
    ht_optim_verify(w.o);
    wrong[_i].make();
    ht_optim_verify(w.o);
}

RUN_TESTS("optimizer", .timeout_s = 300, .memory = memory_keep)
