/* SPDX-License-Identifier: Apache-2.0 */
/*
 * drop.c - takes back gradients of the open step: that of one parameter (drop), and for abort those of all.
 *
 * Written, frozen and queued bytes are forgotten, and so are sums of earlier passes. An applied update is new content
 * of the parameter. Nothing here brings the old content back, so drop refuses before it changes anything.
 *
 *   drop   under the root's gate. hold: no further range is taken; draining: no further byte is written or frozen.
 *          Writes that copy, logging, additions to sums and sums of squares end first. Updates that run refuse it.
 *
 * A step without any gradient is none: the drop of its last one leaves no step open. The next gradient opens a step
 * with a number and hyper-parameters of its own.
 *
 * An opener's own account (struct ht_grad, struct ht_topk) is older than param.forgotten then, and counts no more. None
 * of this is in the log: a crash forgets gradients anyway.
 */
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"

/* Sums and measurements are forgotten with the rest. */
void ht_opt_forget_gradient(struct ht_param *p)
{
    while (!ht_list_empty(&p->inflight))
        wait_changed(p->o);
    ht_opt_coverage_clear(p, false);
    ht_opt_redo_forget(p);
    p->forgotten++;
    struct ht_obj *scratch[] = {p->grad, p->sum};
    unlock(p->o);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(scratch); i++)
        if (scratch[i])
            ht_obj_scratch_drop(scratch[i], 0, UINT64_MAX);
    lock(p->o);
}

/* Has an update changed this range in this step, or is one changing it, or has one failed? */
static bool range_applied(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool taken = r->state == HT_RANGE_RUNNING || r->state == HT_RANGE_DONE;

    return r->state == HT_RANGE_FAILED || (taken && (r->work & HT_WORK_UPDATE) && !(r->work & HT_WORK_LOG));
}

bool ht_opt_root_applied(const struct ht_root *root)
{
    ht_list_for_each_entry(p, &root->params, const struct ht_param, of_root) {
        for (uint64_t i = 0; i < p->shape.range_count; i++) {
            const struct ht_range *r = ht_opt_range_find(p, i);
            if (r && range_applied(r))
                return true;
        }
    }
    return false;
}

/* *out_running: a worker adds a gradient to a sum right now, or sums its squares. */
static bool applied(const struct ht_param *p, bool *out_running) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t taken = p->pending;

    for (uint64_t i = 0; i < p->shape.range_count; i++) {
        const struct ht_range *r = ht_opt_range_find(p, i);
        if (r && range_applied(r))
            return true;
        taken -= r && r->state == HT_RANGE_QUEUED;
    }
    *out_running = taken > 0;
    return false;
}

/* Under the gate, locked; releases the lock while it waits. The root is held and draining. */
static int drop_held(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
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

/* Under the gate, locked; releases the lock in between. */
static int drop(struct ht_param *p, struct ht_waiter **chain) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_root *root = p->root;

    root->hold = root->draining = true;
    ht_opt_root_ready(root);
    int rc = drop_held(p);
    if (!rc && ht_list_empty(&root->touched))
        root->open = 0;
    root->hold = root->draining = false;
    ht_opt_root_ready(root);
    ht_opt_take_waiters(p, chain);
    notify_changed(p->o);
    return rc;
}

int ht_optim_drop(struct ht_optim *o, uint64_t root, uint64_t oid, struct ht_optim_steer *by)
{
    struct ht_param *p = ht_opt_param_get(o, oid);
    struct ht_waiter *chain = NULL;
    bool too_late = false;

    if (!p)
        return 0; /* it never had a gradient */
    lock(o);
    int rc = p->root->id == root ? ht_opt_gate_enter_by(p->root, by) : -ENOENT;
    if (!rc) {
        rc = drop(p, &chain);
        too_late = rc == -EBUSY;
        if (!rc)
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
    return rc;
}
