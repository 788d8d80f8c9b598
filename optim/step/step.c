/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - the end of a step: boundary, commit, abort. All under the root's gate.
 *
 *   boundary  coverage is checked, the queue worked off, the step counted, coverage forgotten   (draining)
 *   publish   ht_scope_commit of all below the root, durable                                    (hold until appended)
 *   abort     queue cancelled, gradients dropped, ht_scope_abort of all below the root          (draining)
 *
 * While hold is set gradients of the next step may already be queued; they run when the transaction is appended,
 * because from then on their changes are newer than the transaction.
 */
#include <assert.h>

#include "tiering/base/activity.h"
#include "tiering/base/base.h"
#include "tiering/base/event.h"
#include "tiering/base/list.h"
#include "tiering/base/log.h"
#include "tiering/base/mutant.h"
#include "tiering/base/verify.h"
#include "tiering/api/object.h"
#include "tiering/api/shm.h"
#include "tiering/api/tx.h"
#include "optim/rules/config.h"
#include "optim/rules/kernel.h"
#include "optim/optim.h"
#include "optim/state/context.h"
#include "optim/state/interval_set.h"
#include "optim/state/notify.h"
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/step/step_priv.h"

/* ---------------------------------------------------------------- boundary */

/* The first that is only partly covered, orphans apart. */
static struct ht_param *find_partial(const struct ht_root *root, bool orphans) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each(pos, &root->touched) {
        struct ht_param *p = ht_list_entry(pos, struct ht_param, touched);
        if (!p->gone && p->complete != p->shape.range_count && p->orphan == orphans)
            return p;
    }
    return NULL;
}

/* Releases the lock in between. */
static enum ht_optim_file file_of(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_optim_hooks *hooks = &p->o->hooks;
    enum ht_optim_file file = HT_OPTIM_FILE_NAMED;

    p->refs++;
    unlock(p->o);
    if (hooks->file)
        file = hooks->file(hooks->ctx, p->oid);
    lock(p->o);
    p->refs--;
    return file;
}

/*
 * A parameter without a name keeps no step from ending, however long it is held open. Releases the lock in
 * between.
 */
static struct ht_param *find_in_the_way(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p;

    while ((p = find_partial(root, false)) && file_of(p) != HT_OPTIM_FILE_NAMED)
        p->orphan = true;
    return p;
}

/* The step ends without them. Releases the lock in between. */
static int forget_orphans(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p;
    int rc = 0;

    while (!rc && (p = find_partial(root, true))) {
        struct ht_waiter *chain = NULL;
        p->refs++;
        ht_opt_cancel(p);
        ht_opt_take_waiters(p, &chain); /* waiters of a running update come with its end */
        ht_opt_wake_later(p->o, chain);
        rc = ht_opt_drain(root);
        if (!rc)
            ht_opt_forget_gradient(p);
        p->refs--;
    }
    return rc;
}

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
        ht_opt_range_queue(r, (updates ? HT_WORK_UPDATE : HT_WORK_MEASURE) | (add ? HT_WORK_ADD : 0u));
        first = ht_min_u64(first, i);
        last = i;
    }
    if (updates && first <= last)
        (void)ht_opt_inval(p, first, last);
}

/*
 * Before updates, new reads are parked from now on; earlier ones may have filled caches. The thread waits for empty
 * caches at the end (leave), not here: writers of gradients wait for this function, and they may be the only threads
 * that could answer such a read.
 */
void ht_opt_queue_frozen(struct ht_root *root, bool updates)
{
    ht_list_for_each(pos, &root->touched) {
        struct ht_param *p = ht_list_entry(pos, struct ht_param, touched);
        if (!p->gone)
            queue_frozen(p, updates);
    }
}

int ht_opt_drain(struct ht_root *root)
{
    ht_activity_wait("queued updates of model root", root->id);
    while ((root->pending || root->running) && !root->o->stopping)
        wait_changed(root->o);
    ht_activity_go_on();
    return root->pending || root->running ? -ECANCELED : root->failure ? -EIO : 0;
}

/*
 * Gradient chunks that could not be dropped when their range was done: shared, or covered in
 * part; sums of a step that was skipped.
 */
static void drop_leftovers(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (uint64_t i = 0; i < p->shape.range_count && !p->gone; i++) {
        struct ht_range *r = ht_opt_range_find(p, i);
        if (!r || !(r->frozen.count || r->added))
            continue;
        if (!r->consumed)
            ht_opt_range_drop(r);
        if (!(r->work & HT_WORK_UPDATE))
            ht_opt_sum_drop(r);
    }
}

/* The step is over: counts it, and makes room for the next one's gradients. Releases the lock in between. */
static void close_step(struct ht_root *root, bool skipped) HT_REQUIRES(HT_LOCK_OPTIM)
{
    while (!ht_list_empty(&root->touched)) {
        struct ht_param *p = ht_list_entry(root->touched.next, struct ht_param, touched);
        p->refs++;
        drop_leftovers(p);
        if (!p->gone && !skipped) {
            p->cur.t++;
            p->stepped = true;
        }
        ht_opt_coverage_clear(p, true);
        p->refs--;
    }
    root->open = 0;
    root->step++;
    root->undurable++;
}

/* A parameter that prevents the boundary, and the first byte of its gradient that no client has handed over. */
struct partial {
    uint64_t oid, hole;
};

/* Without sums of several gradients. */
static uint64_t first_hole(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (uint64_t i = 0; i < p->shape.range_count; i++) {
        const struct ht_range *r = ht_opt_range_find(p, i);
        const struct ht_interval *v = r && r->frozen.count ? ht_interval_set_all(&r->frozen) : NULL;
        uint64_t covered = v && v->begin == 0 ? v->end : 0;
        if ((!r || r->state == HT_RANGE_IDLE) && covered < ht_opt_range_grad_bytes(p, i))
            return i * p->shape.range_elements * p->shape.g_bytes + covered;
    }
    return 0;
}

/* Releases the lock in between. */
static int validate_coverage(struct ht_root *root, struct partial *out) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param *p = find_in_the_way(root);

    if (!p)
        return forget_orphans(root);
    *out = (struct partial){p->oid, first_hole(p)};
    return -EBUSY;
}

/* Releases the lock in between. */
static int try_boundary(struct ht_root *root, struct partial *out_partial) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool skipped = false, allowed = root->latched.partial || root->config.partial;
    bool partial = root->open && allowed && (find_partial(root, false) || find_partial(root, true));
    int rc = root->failure ? -EIO : root->open && !allowed ? validate_coverage(root, out_partial) : 0;

    if (rc)
        return rc;
    /* Additions end first: then the ranges can be queued. */
    if (ht_opt_accumulate(root) > 1)
        rc = ht_opt_drain(root);
    if (!rc && root->open && ht_opt_deferred(root))
        rc = ht_opt_whole_step(root, &skipped);
    else if (!rc && partial)
        ht_opt_queue_frozen(root, true);
    root->norm_known = root->open && ht_opt_deferred(root) && !rc;
    if (!rc)
        rc = ht_opt_drain(root);
    if (!rc && root->open)
        close_step(root, skipped);
    return rc;
}

/* An abort may lose more than the caller thinks: also files that no commit has made durable yet. */
static void report_partial(struct ht_root *root, const struct partial *partial, unsigned wanted)
{
    if (wanted > 1)
        ht_opt_refuse(
            root, HT_EVENT_STEP_REFUSED, partial->oid,
            "has not got all of the %u gradients of this step; write the rest, or take back what came with drop, or set "
            "partial=1; abort takes back the whole step, with everything below the root that is newer than the last commit",
            wanted);
    else
        ht_opt_refuse(
            root, HT_EVENT_STEP_REFUSED, partial->oid,
            "only a part of it has a gradient in this step: byte %llu is the first hole; write the rest, or take that "
            "back with drop, or set partial=1; abort takes back the whole step, and all below the root that is newer than the "
            "last commit",
            (unsigned long long)partial->hole);
}

/* On success the root is held: no update runs until release(). */
static int boundary(struct ht_root *root, struct ht_optim_steer *by)
{
    char why[HT_OPTIM_ERROR_MAX];
    struct ht_optim *o = root->o;
    struct partial partial = {0};

    lock(o);
    root->draining = true;
    int refused = ht_opt_may_steer(root, by, why);
    int rc = refused ? refused : try_boundary(root, &partial);
    root->hold = !rc;
    root->draining = root->ending;
    ht_opt_root_ready(root);
    unsigned wanted = ht_opt_accumulate(root);
    notify_changed(o);
    unlock(o);
    if (refused)
        ht_opt_refuse_steering(root, by, why);
    else if (rc == -EBUSY)
        report_partial(root, &partial, wanted);
    return rc;
}

static void release(struct ht_root *root)
{
    lock(root->o);
    root->hold = false;
    ht_opt_root_ready(root);
    notify_changed(root->o);
    unlock(root->o);
}

/* ----------------------------------------------------------------- publish */

/* Publishes everything below the root, and releases the root in any case. */
static int publish(struct ht_root *root)
{
    struct ht_optim *o = root->o;
    uint64_t lsn;
    int rc = ht_scope_commit(o->store, root->id, &lsn);

    release(root);
    if (!rc)
        rc = ht_store_sync(o->store, lsn);
    if (rc) {
        ht_opt_refuse(root, HT_EVENT_COMMIT_FAILED, 0, "commit failed: %s; the last durable step stands",
                      strerror(-rc));
        return rc;
    }
    lock(o);
    root->durable_step = root->pub_step;
    unlock(o);
    return 0;
}

static int enter(struct ht_optim *o, uint64_t id, struct ht_root **out)
{
    struct ht_root *root = ht_opt_root_get(o, id);

    if (!root)
        return -ENOENT;
    lock(o);
    int rc = ht_opt_gate_enter(root);
    unlock(o);
    if (rc)
        ht_opt_root_put(root);
    *out = root;
    return rc;
}

/* When the caller learns of the step's end, caches are as new as the step. */
static void leave(struct ht_root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    ht_opt_gate_leave(root);
    ht_opt_inval_wait(o, o->inval_issued);
    unlock(o);
    ht_opt_root_put(root);
}

int ht_opt_publish_closed(struct ht_root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    int rc = ht_opt_gate_enter(root);
    assert(rc || (!root->open && !root->failure && !root->pending));
    root->hold = !rc;
    unlock(o);
    if (rc)
        return rc;
    rc = publish(root);
    lock(o);
    ht_opt_gate_leave(root);
    unlock(o);
    return rc;
}

/* A boundary, published when commit is set or durable_every says so. */
static int end_step(struct ht_optim *o, uint64_t id, bool commit, struct ht_optim_steer *by)
{
    uint64_t start = ht_now_ns();
    struct ht_root *root;
    int rc = enter(o, id, &root);

    if (rc)
        return rc;
    HT_VERIFY(ht_optim_verify(o)); /* sums of squares, before they are used */
    rc = boundary(root, by);
    lock(o);
    bool durable = commit || root->undurable >= root->config.durable_every;
    unlock(o);
    if (!rc && durable)
        rc = publish(root);
    else if (!rc)
        release(root);
    lock(o);
    root->commit_ns += durable ? ht_now_ns() - start : 0;
    if (!rc) {
        ht_opt_succeeded(root, HT_EVENT_STEP_REFUSED, 0);
        ht_opt_succeeded(root, HT_EVENT_COMMIT_FAILED, 0);
    }
    unlock(o);
    leave(root);
    HT_VERIFY(ht_optim_verify(o));
    return rc;
}

int ht_optim_commit_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    return end_step(o, id, true, by);
}

int ht_optim_step_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    return end_step(o, id, false, by);
}

int ht_optim_commit(struct ht_optim *o, uint64_t id)
{
    return end_step(o, id, true, NULL);
}

int ht_optim_step(struct ht_optim *o, uint64_t id)
{
    return end_step(o, id, false, NULL);
}

/* --------------------------------------------------------------------- end */

static void set_ending(struct ht_root *root, bool ending)
{
    lock(root->o);
    root->ending = root->draining = ending;
    notify_changed(root->o);
    unlock(root->o);
}

/* Under the gate, ending. */
static int commit_and_unmake(struct ht_root *root, int (*unmake)(void *ctx), void *ctx)
{
    uint64_t lsn;
    int rc = HT_MUTANT("publish-unasked") ? ht_scope_commit(root->o->store, root->id, &lsn) : 0;

    rc = rc ? rc : boundary(root, NULL);
    if (!rc)
        rc = publish(root);
    if (rc)
        return rc;
    lock(root->o);
    bool idle = ht_opt_root_idle(root);
    unlock(root->o);
    return idle ? unmake(ctx) : -EBUSY;
}

int ht_optim_root_end(struct ht_optim *o, uint64_t id, int (*unmake)(void *ctx), void *ctx)
{
    struct ht_root *root;
    int rc = enter(o, id, &root);

    if (rc)
        return rc;
    set_ending(root, true);
    rc = commit_and_unmake(root, unmake, ctx);
    set_ending(root, false);
    leave(root);
    return rc;
}

/* ------------------------------------------------------------------- abort */

/* Locked. The next parameter after pos. The list may change while the lock is released: p had a reference. */
static struct ht_param *next_param(const struct ht_root *root, const struct ht_list *pos)
{
    return pos->next == &root->params ? NULL : ht_list_entry(pos->next, struct ht_param, of_root);
}

/* Calls fn for every parameter of the root, with a reference held, locked. */
static void each_param(struct ht_root *root, void (*fn)(struct ht_param *p)) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *next;

    for (struct ht_param *p = next_param(root, &root->params); p; p = next) {
        p->refs++;
        fn(p);
        next = next_param(root, &p->of_root);
        p->refs--;
    }
}

/* The store is back: takes references to the objects that exist again. */
static void reload(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_obj_put(p->obj);
    p->obj = ht_obj_get(p->o->store, p->oid);
    p->rewrites++;
    p->orphan = false;
    p->gone = !p->obj || !p->root->exists;
    /*
     * Its name may be gone for good and the rest pending: then it stays deleted. A thread that deletes it at the same
     * time marks it itself.
     */
    if (!p->gone && file_of(p) == HT_OPTIM_FILE_DELETED)
        p->gone = true;
    if (p->gone) {
        ht_opt_param_settle(p);
        return;
    }
    uint64_t bytes = p->cur.exists ? p->cur.elements * ht_kernel_dtype_bytes(p->cur.dtype) : 0;
    if (ht_opt_state_load(p) || ht_obj_rewrite_reserve(p->obj, bytes) || ht_opt_grad_reserve(p))
        ht_opt_not_reserved(p, "space for its next rewrite is not reserved after the abort");
}

static void invalidate_whole(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->shape.range_count)
        (void)ht_opt_inval(p, 0, p->shape.range_count - 1);
}

/*
 * Returns when no part of the step is left to run or to write. *out_refused: it may not be taken back, and nothing has
 * happened.
 */
static int quiesce(struct ht_root *root, struct ht_optim_steer *by, bool *out_refused)
{
    char why[HT_OPTIM_ERROR_MAX];
    struct ht_optim *o = root->o;

    lock(o);
    int rc = ht_opt_may_steer(root, by, why);
    *out_refused = rc != 0;
    root->draining = !rc;
    if (rc) {
        unlock(o);
        ht_opt_refuse_steering(root, by, why);
        return rc;
    }
    each_param(root, ht_opt_cancel);
    rc = ht_opt_drain(root);
    if (rc == -EIO)
        rc = 0;
    if (!rc)
        each_param(root, ht_opt_forget_gradient);
    unlock(o);
    return rc;
}

static void wake_all(struct ht_root *root)
{
    struct ht_waiter *chain = NULL;
    struct ht_optim *o = root->o;

    lock(o);
    ht_list_for_each(pos, &root->params)
        ht_opt_take_waiters(ht_list_entry(pos, struct ht_param, of_root), &chain);
    root->draining = false;
    notify_changed(o);
    unlock(o);
    ht_opt_wake(chain);
}

int ht_optim_abort_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    struct ht_root *root;
    bool refused;
    int rc = enter(o, id, &root);

    if (rc)
        return rc;
    rc = quiesce(root, by, &refused);
    if (refused) {
        leave(root);
        return rc;
    }
    if (!rc)
        rc = ht_scope_abort(o->store, root->id);
    int shown = rc ? 0 : ht_scope_shm_restore(o->store, root->id);
    lock(o);
    if (!rc) {
        root->open = 0;
        root->failure = 0;
        root->error.text[0] = '\0'; /* whatever it was about is taken back */
        each_param(root, reload);
    }
    uint64_t step = root->durable_step;
    unlock(o);
    if (!rc) {
        const struct ht_event_about about = {.id = root->id};
        ht_event(HT_EVENT_STEP_ABORTED, &about, "the model is back at step %llu", (unsigned long long)step);
        rc = ht_opt_bury_orphans(root);
    }
    wake_all(root);
    lock(o);
    each_param(root, invalidate_whole);
    ht_opt_inval_wait(o, o->inval_issued);
    unlock(o);
    leave(root);
    HT_VERIFY(ht_optim_verify(o));
    return rc ? rc : shown;
}

int ht_optim_abort(struct ht_optim *o, uint64_t id)
{
    return ht_optim_abort_by(o, id, NULL);
}

/* -------------------------------------------------------------------- wait */

int ht_optim_wait(struct ht_optim *o, uint64_t id, uint64_t oid)
{
    struct ht_root *root = ht_opt_root_get(o, id);
    struct ht_param *p = oid && root ? ht_opt_param_get(o, oid) : NULL;
    int rc = !root ? -ENOENT : 0;

    if (root) {
        lock(o);
        ht_activity_wait("queued updates of model root", id);
        while ((oid ? p && p->pending : root->pending) && !o->stopping)
            wait_changed(o);
        ht_activity_go_on();
        ht_opt_inval_wait(o, o->inval_issued); /* only this call orders mappings */
        rc = o->stopping ? -ECANCELED : (oid ? p && p->failed : root->failure != 0) ? -EIO : 0;
        unlock(o);
        ht_opt_root_put(root);
    }
    if (p)
        ht_opt_param_put(p);
    return rc;
}
