/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - the end of a step: boundary, commit, abort. All under the root's gate.
 *
 *   boundary  coverage is judged, the queue worked off, the step counted, coverage forgotten       (draining)
 *   publish   dirty bytes written back, one transaction with names, objects and counts, durable    (hold until appended)
 *   abort     queue cancelled, gradients dropped, everything back to what is published             (draining)
 *
 * While hold is set gradients of the next step may already be queued; they run when the transaction is appended, because
 * from then on what they change is newer than what it names.
 */
#include "optim/optim_priv.h"

#include <assert.h>

#include "tiering/base/log.h"
#include "tiering/base/twin.h"

/* ---------------------------------------------------------------- boundary */

/* The first that is only partly covered, orphans apart. */
static struct param *find_partial(const struct root *root, bool orphans)
{
    ht_list_for_each(pos, &root->touched) {
        struct param *p = ht_list_entry(pos, struct param, touched);
        if (!p->gone && p->complete != p->shape.range_count && p->orphan == orphans)
            return p;
    }
    return NULL;
}

/* Locked, let go meanwhile. */
static enum ht_optim_file file_of(struct param *p)
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

/* What nobody finds by a name any more keeps no step from ending, however long it is held open. Locked, let go meanwhile. */
static struct param *find_in_the_way(struct root *root)
{
    struct param *p;

    while ((p = find_partial(root, false)) != NULL && file_of(p) != HT_OPTIM_FILE_NAMED)
        p->orphan = true;
    return p;
}

/* The step ends without them. Locked, let go meanwhile. */
static int forget_orphans(struct root *root)
{
    struct param *p;
    int ret = 0;

    while (!ret && (p = find_partial(root, true)) != NULL) {
        struct ht_waiter *chain = NULL;
        p->refs++;
        ht_opt_cancel(p);
        ht_opt_take_waiters(p, &chain); /* those of an update that runs come with its end */
        ht_opt_wake_later(p->o, chain);
        ret = ht_opt_drain(root);
        if (!ret)
            ht_opt_forget_gradient(p);
        p->refs--;
    }
    return ret;
}

/* Queue what is covered of ranges that are not queued: not covered wholly, too few times, or of a deferred step. */
static void queue_frozen(struct param *p, bool updates)
{
    uint64_t first = UINT64_MAX, last = 0;

    for (uint64_t i = 0; i < p->shape.range_count; i++) {
        struct range *r = ht_opt_range_find(p, i);
        if (!r || r->state != RANGE_IDLE || !(r->frozen.count || r->added))
            continue;
        bool add = r->frozen.count && !r->part_added && ht_opt_accumulate(p->root) > 1;
        ht_opt_range_queue(r, (updates ? WORK_UPDATE : WORK_MEASURE) | (add ? WORK_ADD : 0u));
        first = ht_min_u64(first, i);
        last = i;
    }
    if (updates && first <= last)
        (void)ht_opt_inval(p, first, last);
}

/*
 * Before updates new reads are parked from now on; those before may have filled caches. That these are empty is waited for at the
 * end (leave), not here: writers of gradients wait for this, and among them may be all who could answer such a read.
 */
void ht_opt_queue_frozen(struct root *root, bool updates)
{
    ht_list_for_each(pos, &root->touched) {
        struct param *p = ht_list_entry(pos, struct param, touched);
        if (!p->gone)
            queue_frozen(p, updates);
    }
}

int ht_opt_drain(struct root *root)
{
    while ((root->pending || root->running) && !root->o->stopping)
        wait_changed(root->o);
    return root->pending || root->running ? -ECANCELED : root->failure ? -EIO : 0;
}

/* Gradient chunks that could not be dropped when their range was done: shared, or covered in part; sums of a step that was skipped. */
static void drop_leftovers(struct param *p)
{
    for (uint64_t i = 0; i < p->shape.range_count && !p->gone; i++) {
        struct range *r = ht_opt_range_find(p, i);
        if (!r || !(r->frozen.count || r->added))
            continue;
        if (!r->consumed)
            ht_opt_range_drop(r);
        if (!(r->work & WORK_UPDATE))
            ht_opt_sum_drop(r);
    }
}

/* The step is over: count it, and make room for the next one's gradients. Locked, let go meanwhile. */
static void close_step(struct root *root, bool skipped)
{
    while (!ht_list_empty(&root->touched)) {
        struct param *p = ht_list_entry(root->touched.next, struct param, touched);
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

/* Locked, let go meanwhile. */
static int judge_coverage(struct root *root, uint64_t *out_partial)
{
    const struct param *p = find_in_the_way(root);

    if (!p)
        return forget_orphans(root);
    *out_partial = p->oid;
    return -EBUSY;
}

/* Locked, let go meanwhile. *out_partial: the parameter that is in the way. */
static int try_boundary(struct root *root, uint64_t *out_partial)
{
    bool skipped = false, allowed = root->latched.partial || root->config.partial;
    bool partial = root->open && allowed && (find_partial(root, false) || find_partial(root, true));
    int ret = root->failure ? -EIO : root->open && !allowed ? judge_coverage(root, out_partial) : 0;

    if (ret)
        return ret;
    /* What is being added comes to rest first: then it can be queued. */
    if (ht_opt_accumulate(root) > 1)
        ret = ht_opt_drain(root);
    if (!ret && root->open && ht_opt_deferred(root))
        ret = ht_opt_whole_step(root, &skipped);
    else if (!ret && partial)
        ht_opt_queue_frozen(root, true);
    root->norm_known = root->open && ht_opt_deferred(root) && !ret;
    if (!ret)
        ret = ht_opt_drain(root);
    if (!ret && root->open)
        close_step(root, skipped);
    return ret;
}

/* Abort may cost more than the caller thinks: also files that no commit has made durable yet. */
static void tell_partial(struct root *root, uint64_t oid, unsigned wanted)
{
    if (wanted > 1)
        ht_opt_refuse(
            root, HT_EVENT_STEP_REFUSED, oid,
            "has not got all of the %u gradients of this step; write the rest, or take back what came with drop, or set "
            "partial=1; abort takes back the whole step, with everything below the root that is newer than the last commit",
            wanted);
    else
        ht_opt_refuse(
            root, HT_EVENT_STEP_REFUSED, oid,
            "only a part of it has a gradient in this step; write the rest, or take that back with drop, or set partial=1; "
            "abort takes back the whole step, with everything below the root that is newer than the last commit");
}

/* On success the root is held: no update runs until let_go. */
static int boundary(struct root *root, struct ht_optim_steer *by)
{
    char why[HT_OPTIM_ERROR_MAX];
    struct ht_optim *o = root->o;
    uint64_t partial = 0;

    lock(o);
    root->draining = true;
    int refused = ht_opt_may_steer(root, by, why);
    int ret = refused ? refused : try_boundary(root, &partial);
    root->hold = !ret;
    root->draining = root->ending;
    ht_opt_root_ready(root);
    unsigned wanted = ht_opt_accumulate(root);
    tell_changed(o);
    unlock(o);
    if (refused)
        ht_opt_refuse_steering(root, by, why);
    else if (ret == -EBUSY)
        tell_partial(root, partial, wanted);
    return ret;
}

static void let_go(struct root *root)
{
    lock(root->o);
    root->hold = false;
    ht_opt_root_ready(root);
    tell_changed(root->o);
    unlock(root->o);
}

/* ----------------------------------------------------------------- publish */

static size_t pending_bytes(struct root *root)
{
    struct ht_optim *o = root->o;
    size_t bytes = o->hooks.pending_bytes ? o->hooks.pending_bytes(o->hooks.ctx, root->id) : 0;

    bytes += ht_scope_pending_bytes(o->store, root->id);
    lock(o);
    bytes += ht_opt_pending_bytes(root);
    unlock(o);
    return bytes;
}

/* Everything below the root into one transaction. -EAGAIN: nothing, the next round. */
static int append(struct root *root, struct ht_rounds *rounds, uint64_t *out_lsn, uint64_t *out_step)
{
    struct ht_optim *o = root->o;
    struct ht_tx *tx;
    int ret = ht_tx_begin_round(o->store, pending_bytes(root), rounds, &tx);

    if (ret)
        return ret;
    ret = ht_tx_expect(tx, pending_bytes(root));
    if (ret) {
        int closed = ht_tx_commit(tx, NULL); /* of nothing */
        return closed ? closed : ret;
    }
    if (o->hooks.publish)
        o->hooks.publish(o->hooks.ctx, root->id, tx);
    lock(o);
    ht_opt_publish(root, tx);
    *out_step = root->pub_step;
    unlock(o);
    if (HT_TWIN("torn-commit")) {
        ret = ht_tx_commit(tx, out_lsn);
        ret = ret ? ret : ht_store_sync(o->store, *out_lsn);
        ret = ret ? ret : ht_tx_begin(o->store, pending_bytes(root), &tx);
        if (ret)
            return ret;
    }
    ht_scope_publish(o->store, root->id, tx);
    return ht_tx_commit(tx, out_lsn);
}

/* Lets go of the root in any case. */
static int publish(struct root *root)
{
    struct ht_optim *o = root->o;
    struct ht_rounds rounds = HT_ROUNDS_INIT;
    uint64_t lsn = 0, step = 0;
    int ret;

    do {
        ht_rounds_next(o->store, &rounds);
        ret = ht_scope_writeback(o->store, root->id);
        if (!ret)
            ret = append(root, &rounds, &lsn, &step);
    } while (ret == -EAGAIN);
    let_go(root);
    if (!ret)
        ret = ht_store_sync(o->store, lsn);
    if (ret) {
        ht_opt_refuse(root, HT_EVENT_COMMIT_FAILED, 0, "commit failed: %s; the last durable step stands",
                      strerror(-ret));
        return ret;
    }
    lock(o);
    root->durable_step = step;
    unlock(o);
    return 0;
}

static int enter(struct ht_optim *o, uint64_t id, struct root **out)
{
    struct root *root = ht_opt_root_get(o, id);

    if (!root)
        return -ENOENT;
    lock(o);
    int ret = ht_opt_gate_enter(root);
    unlock(o);
    if (ret)
        ht_opt_root_put(root);
    *out = root;
    return ret;
}

/* Caches are as new as the step when the caller learns that it is over. */
static void leave(struct root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    ht_opt_gate_leave(root);
    ht_opt_inval_wait(o, o->inval_issued);
    unlock(o);
    ht_opt_root_put(root);
}

int ht_opt_publish_closed(struct root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    int ret = ht_opt_gate_enter(root);
    assert(ret || (!root->open && !root->failure && !root->pending));
    root->hold = !ret;
    unlock(o);
    if (ret)
        return ret;
    ret = publish(root);
    lock(o);
    ht_opt_gate_leave(root);
    unlock(o);
    return ret;
}

/* A boundary, published when commit is set or durable_every says so. */
static int end_step(struct ht_optim *o, uint64_t id, bool commit, struct ht_optim_steer *by)
{
    uint64_t start = ht_now_ns();
    struct root *root;
    int ret = enter(o, id, &root);

    if (ret)
        return ret;
    ret = boundary(root, by);
    lock(o);
    bool durable = commit || root->undurable >= root->config.durable_every;
    unlock(o);
    if (!ret && durable)
        ret = publish(root);
    else if (!ret)
        let_go(root);
    lock(o);
    root->commit_ns += durable ? ht_now_ns() - start : 0;
    if (!ret) {
        ht_opt_succeeded(root, HT_EVENT_STEP_REFUSED, 0);
        ht_opt_succeeded(root, HT_EVENT_COMMIT_FAILED, 0);
    }
    unlock(o);
    leave(root);
    return ret;
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

static void set_ending(struct root *root, bool ending)
{
    lock(root->o);
    root->ending = root->draining = ending;
    tell_changed(root->o);
    unlock(root->o);
}

/* The twin: everything of the root goes into the log before it is known whether the root may end. */
static int publish_unasked(struct root *root)
{
    uint64_t lsn, scope = root->id;
    struct ht_optim *o = root->o;
    struct ht_tx *tx;
    int ret = ht_scope_writeback(o->store, scope);

    ret = ret ? ret : ht_tx_begin(o->store, pending_bytes(root), &tx);
    if (ret)
        return ret;
    if (o->hooks.publish)
        o->hooks.publish(o->hooks.ctx, scope, tx);
    ht_scope_publish(o->store, scope, tx);
    return ht_tx_commit(tx, &lsn);
}

/* Under the gate, ending. */
static int commit_and_unmake(struct root *root, int (*unmake)(void *ctx), void *ctx)
{
    int ret = HT_TWIN("publish-unasked") ? publish_unasked(root) : 0;

    ret = ret ? ret : boundary(root, NULL);
    if (!ret)
        ret = publish(root);
    if (ret)
        return ret;
    lock(root->o);
    bool idle = ht_opt_root_idle(root);
    unlock(root->o);
    return idle ? unmake(ctx) : -EBUSY;
}

int ht_optim_root_end(struct ht_optim *o, uint64_t id, int (*unmake)(void *ctx), void *ctx)
{
    struct root *root;
    int ret = enter(o, id, &root);

    if (ret)
        return ret;
    set_ending(root, true);
    ret = commit_and_unmake(root, unmake, ctx);
    set_ending(root, false);
    leave(root);
    return ret;
}

/* ------------------------------------------------------------------- abort */

/* Locked. The next parameter after pos, so that the list may change while the lock is let go: p had a reference. */
static struct param *next_param(const struct root *root, const struct ht_list *pos)
{
    return pos->next == &root->params ? NULL : ht_list_entry(pos->next, struct param, of_root);
}

/* Call fn for every parameter of the root, with a reference held, locked. */
static void each_param(struct root *root, void (*fn)(struct param *p))
{
    struct param *next;

    for (struct param *p = next_param(root, &root->params); p; p = next) {
        p->refs++;
        fn(p);
        next = next_param(root, &p->of_root);
        p->refs--;
    }
}

/* Inside the transaction. */
static void restore_meta(struct param *p)
{
    if (memcmp(p->cur.oid, p->pub.oid, sizeof(p->cur.oid)) != 0)
        ht_opt_put_state(p);
    p->cur = p->pub;
    p->stepped = false;
    if (p->claimed && !p->cur.exists) {
        ht_store_unclaim(p->o->store, ht_opt_param_claim());
        p->claimed = false;
    }
}

/* The store is back: take hold of what exists again. */
static void reload(struct param *p)
{
    ht_obj_put(p->obj);
    p->obj = ht_obj_get(p->o->store, p->oid);
    p->rewrites++;
    p->orphan = false;
    p->gone = p->obj == NULL || !p->root->exists;
    /* Its name may be gone for good and the rest pending: then it stays deleted. Who deletes it meanwhile says so himself. */
    if (!p->gone && file_of(p) == HT_OPTIM_FILE_DELETED)
        p->gone = true;
    if (p->gone) {
        ht_opt_param_settle(p);
        return;
    }
    uint64_t bytes = p->cur.exists ? p->cur.elements * ht_kernel_dtype_bytes(p->cur.dtype) : 0;
    if (ht_opt_state_load(p) || ht_obj_guarantee(p->obj, bytes) || ht_opt_grad_reserve(p))
        ht_opt_not_reserved(p, "space for its next rewrite is not reserved after the abort");
}

static void invalidate_whole(struct param *p)
{
    if (p->shape.range_count)
        (void)ht_opt_inval(p, 0, p->shape.range_count - 1);
}

/* Names, counts and content back, in this order. */
static int restore(struct root *root)
{
    struct ht_optim *o = root->o;
    struct ht_tx *tx;
    int ret = ht_tx_begin(o->store, 0, &tx);

    if (ret)
        return ret;
    if (o->hooks.abort)
        o->hooks.abort(o->hooks.ctx, root->id);
    lock(o);
    each_param(root, restore_meta);
    root->step = root->pub_step;
    root->config = root->published_config;
    o->words_changes++;
    root->undurable = 0;
    unlock(o);
    /* Inside the transaction, so that nobody makes an object between the names and the content. It waits for chunks
     * only, and who holds one never waits for a transaction. */
    ret = ht_scope_abort(o->store, root->id);
    int err = ht_tx_commit(tx, NULL);
    return ret ? ret : err;
}

/* Nothing of the step is left to run or to be written. *out_refused: it may not be taken back, and nothing has happened. */
static int quiesce(struct root *root, struct ht_optim_steer *by, bool *out_refused)
{
    char why[HT_OPTIM_ERROR_MAX];
    struct ht_optim *o = root->o;

    lock(o);
    int ret = ht_opt_may_steer(root, by, why);
    *out_refused = ret != 0;
    root->draining = !ret;
    if (ret) {
        unlock(o);
        ht_opt_refuse_steering(root, by, why);
        return ret;
    }
    each_param(root, ht_opt_cancel);
    ret = ht_opt_drain(root);
    if (ret == -EIO)
        ret = 0;
    if (!ret)
        each_param(root, ht_opt_forget_gradient);
    unlock(o);
    return ret;
}

static void wake_all(struct root *root)
{
    struct ht_waiter *chain = NULL;
    struct ht_optim *o = root->o;

    lock(o);
    ht_list_for_each(pos, &root->params)
        ht_opt_take_waiters(ht_list_entry(pos, struct param, of_root), &chain);
    root->draining = false;
    tell_changed(o);
    unlock(o);
    ht_opt_wake(chain);
}

int ht_optim_abort_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    struct root *root;
    bool refused;
    int ret = enter(o, id, &root);

    if (ret)
        return ret;
    ret = quiesce(root, by, &refused);
    if (refused) {
        leave(root);
        return ret;
    }
    if (!ret)
        ret = restore(root);
    int shown = ret ? 0 : ht_scope_restore_handed(o->store, root->id);
    lock(o);
    if (!ret) {
        root->open = 0;
        root->failure = 0;
        root->error.text[0] = '\0'; /* whatever it was about is taken back */
        each_param(root, reload);
    }
    unlock(o);
    if (!ret) {
        const struct ht_event_about about = {.id = root->id};

        ht_event(HT_EVENT_STEP_ABORTED, &about, "the model is back at step %llu",
                 (unsigned long long)root->durable_step);
        ret = ht_opt_bury_orphans(root);
    }
    wake_all(root);
    lock(o);
    each_param(root, invalidate_whole);
    ht_opt_inval_wait(o, o->inval_issued);
    unlock(o);
    leave(root);
    return ret ? ret : shown;
}

int ht_optim_abort(struct ht_optim *o, uint64_t id)
{
    return ht_optim_abort_by(o, id, NULL);
}

/* -------------------------------------------------------------------- wait */

int ht_optim_wait(struct ht_optim *o, uint64_t id, uint64_t oid)
{
    struct root *root = ht_opt_root_get(o, id);
    struct param *p = oid && root ? ht_opt_param_get(o, oid) : NULL;
    int ret = !root ? -ENOENT : 0;

    if (root) {
        lock(o);
        while ((oid ? p && p->pending : root->pending) && !o->stopping)
            wait_changed(o);
        ht_opt_inval_wait(o, o->inval_issued); /* mappings are ordered by this call and no other */
        ret = o->stopping ? -ECANCELED : (oid ? p && p->failed : root->failure != 0) ? -EIO : 0;
        unlock(o);
        ht_opt_root_put(root);
    }
    if (p)
        ht_opt_param_put(p);
    return ret;
}
