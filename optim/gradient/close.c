/* SPDX-License-Identifier: Apache-2.0 */
/*
 * close.c - the end of a step, for its gradients: what is left of them is queued. When all updates have run they are
 * given back, and the step is counted.
 */
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"

/*
 * Queues the covered part of ranges that are not queued: covered in part, too few times, or of a deferred step. Ranges
 * whose squares are known are not measured again.
 */
static void queue_frozen(struct ht_param *p, bool updates) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t first = UINT64_MAX, last = 0;

    for (uint64_t i = 0; i < p->shape.range_count; i++) {
        struct ht_range *r = ht_opt_range_find(p, i);
        if (!r || r->state != HT_RANGE_IDLE || !(r->frozen.count || r->added) || (r->measured && !updates))
            continue;
        bool add = r->frozen.count && !r->part_added && ht_opt_accumulate(p->root) > 1;
        if (r->stirred) /* the second phase is a client's to begin */
            continue;
        unsigned work = !updates ? HT_WORK_MEASURE : ht_opt_in_phases(p) ? HT_WORK_MOMENTUM : HT_WORK_UPDATE;
        ht_opt_range_queue(r, work | (add ? HT_WORK_ADD : 0u));
        first = ht_min_u64(first, i);
        last = i;
    }
    if (updates && first <= last && !p->root->deciding) /* else the request did it */
        (void)ht_opt_inval(p, first, last);
}

/*
 * Before updates, new reads are parked from now on; earlier ones may have filled caches. The thread waits for empty
 * caches at the end (ht_opt_step_leave), not here: writers of gradients wait for this function, and they may be the
 * only threads that could answer such a read.
 */
void ht_opt_queue_frozen(struct ht_root *root, bool updates)
{
    ht_list_for_each_entry(p, &root->touched, struct ht_param, touched)
        if (!p->gone)
            queue_frozen(p, updates);
}

/*
 * Gradient chunks that could not be dropped when their range was done: shared, or covered in
 * part; sums of a step that was skipped.
 */
static void drop_leftovers(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool left = false;

    for (uint64_t i = 0; i < p->shape.range_count && !p->gone; i++) {
        struct ht_range *r = ht_opt_range_find(p, i);
        if (!r || !(r->frozen.count || r->added))
            continue;
        if (!r->consumed)
            ht_opt_range_drop(r);
        left |= !r->consumed;
        if (!(r->work & HT_WORK_UPDATE) && !r->stirred)
            ht_opt_sum_drop(r);
    }
    if (left && p->grad) /* bytes that no flush has closed are in these chunks: they do not wait for a boundary */
        ht_obj_unprotect(p->grad);
}

/* The next parameter with a gradient gives that back, and the caller its reference; NULL: there is none. */
static struct ht_param *drop_next(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (ht_list_empty(&root->touched))
        return NULL;
    struct ht_param *p = ht_list_entry(root->touched.next, struct ht_param, touched);
    p->refs++;
    drop_leftovers(p);
    return p;
}

static void end_param(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_coverage_clear(p, true);
    p->refs--;
}

void ht_opt_close_part(struct ht_root *root)
{
    struct ht_param *p;

    while ((p = drop_next(root))) {
        p->redo_place++;
        end_param(p);
    }
    root->open = 0;
}

void ht_opt_close_step(struct ht_root *root, bool skipped, bool logged)
{
    struct ht_param *p;

    while ((p = drop_next(root))) {
        if (!p->gone && !skipped) {
            p->cur.t++;
            p->redo_steps += logged;
            p->stepped = true;
        }
        end_param(p);
    }
    root->open = 0;
    root->prepared = root->skipping = false;
    root->step++;
    root->undurable++;
    /* Since the boundary before: the writeback of that boundary's commit is among them. */
    uint64_t bytes = ht_scope_written_bytes(root->o->store, root->id);
    root->step_written_bytes = bytes - root->written_bytes;
    root->written_bytes = bytes;
}
