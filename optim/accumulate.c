/* SPDX-License-Identifier: Apache-2.0 */
/*
 * accumulate.c - gradients of several backward passes that make one step (accumulate=S).
 *
 * Each range counts for itself. When a gradient covers it wholly a worker adds it to a sum in f32 and the range is open for the
 * next; who writes one before that is done waits. The S-th is added and applied in one go, at the boundary if the step is
 * deferred. Elements are added in the order of arrival and the first replaces what was there, so that sums are
 * those of autograd in f32, bit for bit.
 *
 *   IDLE, added = k --covered--> QUEUED(ADD) --worker--> IDLE, added = k + 1
 *   IDLE, added = S - 1 --covered--> QUEUED(ADD|UPDATE) --worker--> DONE        not deferred
 *   IDLE, anything in frozen or sum --boundary--> QUEUED([ADD|]MEASURE), QUEUED([ADD|]UPDATE)
 *
 * Sums lie in a scratch object per parameter: in the DRAM tier while there is room, else outside it, with space reserved by
 * the first gradient of a step. They belong to the step: nothing of them is published, abort and a crash drop them.
 */
#include "optim/optim_priv.h"

uint32_t ht_opt_accumulate(const struct root *root)
{
    return root->open ? root->latched.accumulate : root->config.accumulate;
}

/* ------------------------------------------------------------------ object */

int ht_opt_sum_create(struct param *p)
{
    struct ht_obj *sum;
    int ret = ht_opt_scratch_create(p, p->shape.chunk_bytes, &sum);

    if (ret)
        return ret;
    ret = ht_obj_truncate(sum, p->shape.elements * 4);
    if (ret) {
        int err = ht_opt_scratch_delete(p, &sum);
        return err ? err : ret;
    }
    lock(p->o);
    p->sum = sum;
    unlock(p->o);
    return 0;
}

/* Never published, as a gradient: half of what is asked for is two copies of it. */
int ht_opt_sum_reserve(struct param *p)
{
    uint64_t bytes = ht_opt_accumulate(p->root) > 1 ? p->shape.elements * 4 : 0;

    return p->sum ? ht_obj_guarantee(p->sum, ht_div_up(bytes, 2)) : 0;
}

/* ------------------------------------------------------------------- range */

bool ht_opt_range_adding(const struct range *r)
{
    return r->work == WORK_ADD && r->state != RANGE_IDLE && r->state != RANGE_FAILED;
}

bool ht_opt_range_full(const struct range *r)
{
    return r->added && r->added >= r->param->root->latched.accumulate;
}

bool ht_opt_range_summed(const struct range *r)
{
    return r->added || r->part_added || (r->work & WORK_ADD);
}

const struct ht_span *ht_opt_range_cover(const struct range *r, struct ht_span *whole, uint32_t *out_count)
{
    if (!r->added) {
        *out_count = r->frozen.count;
        return ht_spans_all(&r->frozen);
    }
    *whole = (struct ht_span){0, ht_opt_range_grad_bytes(r->param, r->index)};
    *out_count = 1;
    return whole;
}

void ht_opt_range_added(struct range *r)
{
    r->added++;
    r->state = RANGE_IDLE;
    r->work = 0;
    r->consumed = false;
    ht_spans_clear(&r->frozen);
}

void ht_opt_sum_drop(struct range *r)
{
    struct param *p = r->param;
    uint64_t per_range = 4 / p->shape.p_bytes;
    struct ht_obj *sum = p->sum;

    if (!sum || !ht_opt_range_summed(r))
        return;
    unlock(p->o);
    ht_obj_scratch_drop(sum, r->index * per_range, per_range);
    lock(p->o);
}
