/* SPDX-License-Identifier: Apache-2.0 */
/*
 * drop.c - taking back gradients of the open step: that of one parameter (drop), and for abort those of all.
 *
 * What is written, frozen or queued is forgotten, and so are sums of earlier passes. What an update has applied is new
 * content of the parameter: nothing here brings the old one back, so drop refuses before it changes anything.
 *
 *   drop   under the root's gate. hold: no further range is taken; draining: no further byte is written or frozen.
 *          Writes that copy and additions to sums end first. Updates that run refuse the drop.
 *
 * An opener's own account (struct ht_grad, struct ht_topk) is older than param.forgotten then, and counts no more. Nothing
 * of this is in the log: a crash forgets gradients anyway.
 */
#include "optim/optim_priv.h"

void ht_opt_cancel(struct param *p)
{
    for (uint64_t i = 0; p->pending && i < p->shape.range_count; i++) {
        struct range *r = ht_opt_range_find(p, i);
        if (r && r->state == RANGE_QUEUED)
            ht_opt_range_unqueue(r);
    }
}

/* What was summed and measured is forgotten with the rest. */
void ht_opt_forget_gradient(struct param *p)
{
    while (!ht_list_empty(&p->inflight))
        wait_changed(p->o);
    ht_opt_coverage_clear(p, false);
    p->forgotten++;
    struct ht_obj *scratch[] = {p->grad, p->sum};
    unlock(p->o);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(scratch); i++)
        if (scratch[i])
            ht_obj_scratch_drop(scratch[i], 0, UINT64_MAX);
    lock(p->o);
}

/* Has an update changed this range in this step, or is one changing it, or has one failed? */
static bool range_applied(const struct range *r)
{
    bool taken = r->state == RANGE_RUNNING || r->state == RANGE_DONE;

    return r->state == RANGE_FAILED || (taken && r->work != WORK_ADD);
}

/* *out_adding: a worker adds a gradient to a sum right now. Locked. */
static bool applied(const struct param *p, bool *out_adding)
{
    uint64_t taken = p->pending;

    for (uint64_t i = 0; i < p->shape.range_count; i++) {
        const struct range *r = ht_opt_range_find(p, i);
        if (r && range_applied(r))
            return true;
        taken -= r && r->state == RANGE_QUEUED;
    }
    *out_adding = taken > 0;
    return false;
}

/* Under the gate, locked, let go meanwhile. The root is held and draining. */
static int drop_held(struct param *p)
{
    for (bool busy = true; busy;) {
        if (p->o->stopping)
            return -ECANCELED;
        if (applied(p, &busy))
            return -EBUSY;
        busy = busy || !ht_list_empty(&p->inflight);
        if (busy)
            wait_changed(p->o);
    }
    ht_opt_cancel(p);
    ht_opt_forget_gradient(p);
    return 0;
}

/* Under the gate, locked, let go meanwhile. */
static int drop(struct param *p, struct ht_waiter **chain)
{
    struct root *root = p->root;

    root->hold = root->draining = true;
    ht_opt_root_ready(root);
    int ret = drop_held(p);
    root->hold = root->draining = false;
    ht_opt_root_ready(root);
    ht_opt_take_waiters(p, chain);
    tell_changed(p->o);
    return ret;
}

int ht_optim_drop(struct ht_optim *o, uint64_t root, uint64_t oid, struct ht_optim_steer *by)
{
    struct param *p = ht_opt_param_get(o, oid);
    struct ht_waiter *chain = NULL;
    bool too_late = false;

    if (!p)
        return 0; /* it never had a gradient */
    lock(o);
    int ret = p->root->id == root ? ht_opt_gate_enter_by(p->root, by) : -ENOENT;
    if (!ret) {
        ret = drop(p, &chain);
        too_late = ret == -EBUSY;
        if (!ret)
            ht_opt_succeeded(p->root, HT_EVENT_GRADIENT_REFUSED, oid);
        ht_opt_gate_leave(p->root);
    }
    unlock(o);
    ht_opt_wake(chain);
    if (too_late)
        ht_opt_refuse(
            p->root, HT_EVENT_REFUSED, oid,
            "drop: updates have applied a part of its gradient already; abort takes back the whole step, with "
            "everything below the root that is newer than the last commit");
    ht_opt_param_put(p);
    return ret;
}
