/* SPDX-License-Identifier: Apache-2.0 */
/*
 * accumulate.c - gradients of several backward passes that make one step (accumulate=S).
 *
 * Each range counts for itself. When a gradient covers it wholly a worker adds the gradient to a sum in f32, and the
 * range is open for the next one; a client that writes the next one earlier waits. The S-th is added and applied in one
 * go, at the boundary if the step is deferred. Elements are added in the order of arrival, and the first one replaces
 * the old sum. So sums are those of autograd in f32, bit for bit.
 *
 *   IDLE, added = k --covered--> QUEUED(ADD) --worker--> IDLE, added = k + 1
 *   IDLE, added = S - 1 --covered--> QUEUED(ADD|UPDATE) --worker--> DONE                  not deferred
 *                                    QUEUED(ADD|MEASURE) --worker--> IDLE, added = S      deferred
 *   IDLE, anything in frozen or sum --boundary--> QUEUED([ADD|]MEASURE) unless it is measured, QUEUED([ADD|]UPDATE)
 *
 * Sums lie in a scratch object per parameter: in the DRAM tier while there is room, else outside it, with space
 * reserved by the first gradient of a step. They belong to the step: they are never published, and an abort or a crash
 * drops them.
 */
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"

uint32_t ht_opt_accumulate(const struct ht_root *root)
{
    return root->open ? root->latched.accumulate : root->decided ? 1 : root->config.accumulate;
}

double ht_opt_divisor(const struct ht_root *root)
{
    return root->latched.grad_scale * (root->latched.accumulate_mean ? root->latched.accumulate : 1);
}

/* ------------------------------------------------------------------ object */

int ht_opt_sum_create(struct ht_param *p)
{
    struct ht_obj *sum;
    int rc = ht_opt_object_create(p->o->store, 0, p->shape.chunk_bytes, &sum);

    if (rc)
        return rc;
    rc = ht_obj_truncate(sum, p->shape.elements * 4);
    if (rc) {
        int err = ht_opt_scratch_delete(p, &sum);
        return err ? err : rc;
    }
    lock(p->o);
    p->sum = sum;
    ht_list_add_tail(&p->root->sums, &p->of_sums);
    unlock(p->o);
    return 0;
}

/* Never published, like a gradient: a rewrite reserve is for two copies, so half the bytes reserve one. */
int ht_opt_sum_reserve(struct ht_param *p)
{
    uint64_t bytes = ht_opt_accumulate(p->root) > 1 ? p->shape.elements * 4 : 0;
    int rc = 0;

    if (!p->sum)
        return 0;
    do
        rc = ht_obj_rewrite_reserve(p->sum, ht_div_up(bytes, 2));
    while (rc == -ENOSPC && ht_opt_redo_yield_aside(p->o));
    return rc;
}

/* ------------------------------------------------------------------- range */

bool ht_opt_range_adding(const struct ht_range *r)
{
    return r->work == HT_WORK_ADD && r->state != HT_RANGE_IDLE && r->state != HT_RANGE_FAILED;
}

bool ht_opt_range_summed(const struct ht_range *r)
{
    return r->added || r->part_added || (r->work & HT_WORK_ADD);
}

const struct ht_interval *ht_opt_range_cover(const struct ht_range *r, struct ht_interval *whole, uint32_t *out_count)
{
    if (!r->added) {
        *out_count = r->frozen.count;
        return ht_interval_set_all(&r->frozen);
    }
    *whole = (struct ht_interval){0, ht_opt_range_grad_bytes(r->param, r->index)};
    *out_count = 1;
    return whole;
}

void ht_opt_range_added(struct ht_range *r)
{
    r->added++;
    r->state = HT_RANGE_IDLE;
    r->work = 0;
    r->consumed = false;
    ht_opt_range_thaw(r);
}

void ht_opt_sum_drop(struct ht_range *r)
{
    struct ht_param *p = r->param;
    uint64_t per_range = 4 / p->shape.p_bytes;
    struct ht_obj *sum = p->sum;

    if (!sum || !ht_opt_range_summed(r))
        return;
    unlock(p->o);
    ht_obj_scratch_drop(sum, r->index * per_range, per_range);
    lock(p->o);
}
