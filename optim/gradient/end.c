/* SPDX-License-Identifier: Apache-2.0 */
/*
 * end.c - the end of a step for its gradients. When all updates have run they are given back, and the step is
 * counted. Or they are taken back: that of one parameter (drop); and those of all with everything since the last
 * commit, for abort, rollback and a replay that fails.
 *
 * Then written, frozen and queued bytes are forgotten, and so are sums of earlier passes. An applied update is new
 * content of the parameter. No drop brings the old content back, so it refuses before it changes anything.
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
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"

/* ------------------------------------------------------------------ closed */

/*
 * Queues the covered part of ranges that are not queued: covered in part, too few times, or of a deferred step. Ranges
 * whose squares are known are not measured again.
 */
static void queue_frozen(struct ht_param *p, bool updates) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_for_each_range(r, p) {
        if (r->state != HT_RANGE_IDLE || !(r->frozen.count || r->added) || (r->measured && !updates))
            continue;
        bool add = r->frozen.count && !r->part_added && ht_opt_accumulate(p->root) > 1;
        if (r->stirred) /* the second phase is a client's to begin */
            continue;
        unsigned work = !updates ? HT_WORK_MEASURE : ht_opt_in_phases(p) ? HT_WORK_MOMENTUM : HT_WORK_UPDATE;
        ht_opt_range_queue(r, work | (add ? HT_WORK_ADD : 0u));
        if (updates && !p->root->deciding) /* else the request did it */
            (void)ht_opt_inval_range(r);
    }
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

    ht_opt_for_each_range(r, p) {
        if (p->gone || !(r->frozen.count || r->added))
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

void ht_opt_close_step(struct ht_root *root, enum ht_step_end how)
{
    while (!ht_list_empty(&root->touched)) {
        struct ht_param *p = ht_list_entry(root->touched.next, struct ht_param, touched);
        p->refs++;
        drop_leftovers(p);
        p->redo_place += how == HT_STEP_OF_PART;
        if (!p->gone && how >= HT_STEP_APPLIED) {
            p->cur.t++;
            p->redo_steps += how == HT_STEP_LOGGED;
            p->stepped = true;
        }
        ht_opt_coverage_clear(p, true);
        p->refs--;
    }
    root->open = 0;
    if (how == HT_STEP_OF_PART)
        return;
    root->prepared = root->skipping = false;
    root->step++;
    root->undurable++;
    /* Since the boundary before: the writeback of that boundary's commit is among them. */
    uint64_t bytes = ht_scope_written_bytes(root->o->store, root->id);
    root->step_written_bytes = bytes - root->written_bytes;
    root->written_bytes = bytes;
}

/* -------------------------------------------------------------- taken back */

/* Sums and measurements are forgotten with the rest. */
void ht_opt_forget_gradient(struct ht_param *p)
{
    while (!ht_list_empty(&p->inflight) || (p->ortho && p->ortho->writers))
        wait_changed(p->o);
    ht_opt_coverage_clear(p, false);
    ht_opt_redo_forget(p);
    p->forgotten++;
    struct ht_obj *scratch[] = {p->grad, p->sum, p->ortho ? p->ortho->update : NULL, p->ortho ? p->ortho->given : NULL};
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

    return r->state == HT_RANGE_FAILED || r->stirred ||
        (taken && (r->work & (HT_WORK_UPDATE | HT_WORK_MOMENTUM)) && !(r->work & HT_WORK_LOG));
}

/* *out_running: a worker adds a gradient to a sum right now, or sums its squares. */
static bool param_applied(const struct ht_param *p, bool *out_running) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t taken = p->pending;

    ht_opt_for_each_range(r, p) {
        if (range_applied(r))
            return true;
        taken -= r->state == HT_RANGE_QUEUED;
    }
    *out_running = taken > 0;
    return false;
}

/* No update is queued or running: has one changed a parameter in this step, or failed? */
static bool root_applied(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool running;

    ht_list_for_each_entry(p, &root->params, const struct ht_param, of_root)
        if (param_applied(p, &running))
            return true;
    return false;
}

/* Under the gate, locked; releases the lock while it waits. The root is held and draining. */
static int drop_held(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (bool busy = true; busy;) {
        if (p->o->stopping)
            return -ECANCELED;
        if (p->root->prepared || param_applied(p, &busy))
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
static int drop_gradient(struct ht_param *p, struct ht_waiter **chain) HT_REQUIRES(HT_LOCK_OPTIM)
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
        rc = drop_gradient(p, &chain);
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

/* ------------------------------------------------------- to the last commit */

/* The store is back: takes references to the objects that exist again. */
static void reload_param(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_obj_put(p->obj);
    p->obj = ht_obj_get(p->o->store, p->oid);
    p->rewrites++;
    p->orphan = false;
    p->gone = !p->obj || !p->root->exists;
    ht_opt_totals_update(p); /* other threads see the totals while the lock is released */
    /*
     * Its name may be gone for good and the rest pending: then it stays deleted. A thread that deletes it at the same
     * time marks it itself. Releases the lock in between.
     */
    if (!p->gone && ht_opt_param_file(p) == HT_OPTIM_FILE_DELETED) {
        p->gone = true;
        ht_opt_totals_update(p);
    }
    if (p->gone) {
        ht_opt_param_reclaim(p);
        return;
    }
    /* The state that an abort has made go has taken its reservation with it. */
    if ((!p->cur.exists && ht_obj_rewrite_reserve(p->obj, 0)) || ht_opt_state_settle(p))
        ht_opt_not_reserved(p, "space for its next rewrite is not reserved after the abort");
}

int ht_opt_stop_step(struct ht_root *root, bool *out_spare)
{
    ht_opt_each_param(root, ht_opt_cancel);
    int rc = ht_opt_drain(root);
    if (rc && rc != -EIO)
        return rc;
    *out_spare = ht_opt_redo_is_current(root) && !root_applied(root);
    ht_opt_redo_reset(root); /* the abort takes its object back */
    ht_opt_each_param(root, ht_opt_forget_gradient);
    return 0;
}

int ht_opt_revert(struct ht_root *root, bool spare, int *out_shown)
{
    struct ht_optim *o = root->o;

    lock(o);
    root->reverting = true;
    root->redo.sparing = spare;
    unlock(o);
    int rc = spare ? ht_scope_abort_rest(o->store, root->id) : ht_scope_abort(o->store, root->id);
    *out_shown = rc ? 0 : ht_scope_shm_restore(o->store, root->id);
    lock(o);
    root->redo.sparing = false;
    if (!rc) { /* takes references to the objects that exist again, and ends the open step */
        ht_opt_each_param(root, reload_param);
        root->open = root->decided = 0;
        root->prepared = root->skipping = false;
        root->failure = root->close_error = 0;
    }
    root->reverting = false;
    notify_changed(o);
    unlock(o);
    return rc;
}

/* Content and counts of some logged steps would be a mixture: readers get those of the full step. */
void ht_opt_show_full(struct ht_root *root)
{
    int shown; /* an event has told which file cannot be read */
    bool spare;

    lock(root->o);
    (void)!ht_opt_stop_step(root, &spare);
    unlock(root->o);
    (void)!ht_opt_revert(root, false, &shown);
}
