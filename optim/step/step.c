/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - ends a step, a root, and the mount. All under the root's gate.
 *
 *   boundary  coverage is checked, the queue worked off, the step counted, coverage forgotten   (draining; boundary.c)
 *   publish   ht_scope_commit of all below the root, durable                                    (hold until appended)
 *   async     the request checks coverage and returns; a closer does the rest with the same gate      (asynchronous)
 *   abort     queue cancelled, gradients dropped, ht_scope_abort of all below the root          (draining; rollback.c)
 *
 * While hold is set gradients of the next step may already be queued; they run when the transaction is appended,
 * because from then on their changes are newer than the transaction.
 *
 * At an orderly end of the mount everything becomes durable that a client may take for stored. A root without an open
 * step is published as a commit publishes it: finished steps, names, attributes, content. A root with an open step is
 * not: its content may hold a part of that step. An event names the loss. No client is left, so the verdict on a root
 * does not change between here and ht_optim_stop.
 */

#include "tiering/base/activity.h"
#include "tiering/base/mutant.h"
#include "tiering/base/verify.h"
#include "tiering/api/keep.h"
#include "optim/state/records.h"
#include "optim/state/root.h"
#include "optim/redo/logged.h"
#include "optim/step/step_priv.h"

/* ----------------------------------------------------------------- publish */

/* Updates run again. */
static void release_root(struct ht_root *root)
{
    lock(root->o);
    root->hold = false;
    ht_opt_root_ready(root);
    notify_changed(root->o);
    unlock(root->o);
}

/* Does the commit keep its step? Those of a multiple of retain_every do, or the first ones after it. */
static bool keeps_step(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint32_t every = root->config.retain_every;

    return root->config.retain && root->step != root->pub_step && root->step / every != root->pub_step / every;
}

/* A client that wants the step kept learns from the error what it did not get; for others the commit is what counts. */
static void report_kept(struct ht_root *root, const struct ht_copy *k)
{
    struct ht_optim *o = root->o;

    if (k->error) {
        char why[HT_OPTIM_ERROR_MAX] = "that name is taken";
        if (k->error != -EEXIST)
            ht_copy_explain(k, why, sizeof(why));
        ht_opt_refuse(root, HT_EVENT_STEP_NOT_KEPT, 0, "step %llu is not kept: %s", (ull)k->step, why);
    }
    lock(o);
    struct ht_root *kept = k->error ? NULL : ht_opt_root_find(o, k->to);
    if (kept)
        kept->redo.lineage = root->redo.lineage;
    if (!k->error)
        ht_opt_succeeded(root, HT_EVENT_STEP_NOT_KEPT, 0);
    unlock(o);
}

/* A change that came while objects were published is in the transaction, too. */
static void check_lineage(struct ht_root *root)
{
    struct ht_redo *redo = &root->redo;

    lock(root->o);
    if (redo->continued && ht_scope_edits_published(root->o->store, root->id) != redo->edits) {
        redo->continued = false;
        ht_opt_redo_cut(root);
    }
    unlock(root->o);
}

/* Everything below the root into one transaction; k: with a kept step. */
static int commit_root(struct ht_root *root, struct ht_copy *k, uint64_t *out_lsn)
{
    struct ht_store *s = root->o->store;
    int rc = k ? ht_scope_commit_copying(s, root->id, k, out_lsn) : ht_scope_commit(s, root->id, out_lsn);

    if (!rc)
        check_lineage(root);
    if (k && (!rc || k->error))
        report_kept(root, k);
    return rc;
}

/* A mutant: the logged steps are gone before the full step that replaces them is durable. */
static void delete_logged_early(struct ht_root *root)
{
    struct ht_optim *o = root->o;
    struct ht_tx *tx;
    uint64_t lsn;

    if (ht_tx_begin(o->store, HT_OPT_REDO_DEL_RECORD_BYTES, &tx))
        return;
    lock(o);
    ht_opt_redo_delete(root, true, tx);
    unlock(o);
    if (!ht_tx_commit(tx, &lsn))
        (void)!ht_store_sync(o->store, lsn);
}

/* Updates run again, and then the commit becomes durable. rc: of the commit. */
static int end_commit(struct ht_root *root, int rc, uint64_t lsn)
{
    release_root(root);
    if (!rc)
        rc = ht_store_sync(root->o->store, lsn);
    if (rc)
        ht_opt_refuse(root, HT_EVENT_COMMIT_FAILED, 0, "commit failed: %s; the last durable step stands",
                      strerror(-rc));
    return rc;
}

/*
 * Publishes everything below the root, and releases the root in any case. wanted: a kept step that a client asked for,
 * or NULL.
 */
static int publish_all(struct ht_root *root, struct ht_copy *wanted)
{
    struct ht_optim *o = root->o;
    struct ht_copy retained = {0};
    uint64_t lsn = 0;

    lock(o);
    bool keep = wanted || (!root->ending && keeps_step(root)); /* a root with kept steps cannot end */
    struct ht_copy *k = wanted ? wanted : &retained;
    k->step = root->step;
    k->retain = root->config.retain;
    k->must = root->config.retain_must;
    unlock(o);
    struct ht_redo_held last = ht_opt_redo_take(root);
    int rc = ht_opt_redo_discard(root);
    if (HT_MUTANT("logged-early"))
        delete_logged_early(root);
    if (!rc)
        rc = commit_root(root, keep ? k : NULL, &lsn);
    rc = end_commit(root, rc, lsn);
    if (rc) {
        ht_obj_put(last.obj);
        return rc;
    }
    lock(o);
    root->durable_step = root->pub_step;
    if (last.obj)
        ht_opt_redo_hold(root, &last.step, last.obj);
    ht_opt_redo_set_aside(root);
    unlock(o);
    return 0;
}

/* The same; the step's gradients instead of parameters and state, if that is as good. */
static int publish_step(struct ht_root *root, struct ht_copy *wanted)
{
    struct ht_optim *o = root->o;
    uint64_t lsn;

    lock(o);
    bool log = !wanted && ht_opt_redo_may_log(root) && !keeps_step(root);
    unlock(o);
    if (!log || ht_opt_redo_commit(root, &lsn))
        return publish_all(root, wanted);
    int rc = end_commit(root, 0, lsn);
    lock(o);
    root->durable_step = rc ? root->durable_step : root->step;
    unlock(o);
    return rc;
}

int ht_opt_step_enter(struct ht_optim *o, uint64_t id, int (*gate)(struct ht_root *root), struct ht_root **out)
{
    struct ht_root *root = ht_opt_root_get(o, id);

    if (!root)
        return -ENOENT;
    lock(o);
    int rc = gate(root);
    if (rc)
        ht_opt_root_put(root);
    unlock(o);
    *out = root;
    return rc;
}

void ht_opt_step_leave(struct ht_root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    ht_opt_gate_leave(root);
    ht_opt_inval_wait(o, o->inval_issued);
    ht_opt_root_put(root);
    unlock(o);
}

/*
 * After a boundary: publishes if it is to be durable, and lets updates run again. rc: the boundary's result. k: a kept
 * step that a client asked for, or NULL.
 */
static int finish_step(struct ht_root *root, int rc, bool durable, struct ht_copy *k)
{
    if (!rc && durable)
        rc = publish_step(root, k);
    else if (!rc)
        release_root(root);
    if (rc)
        return rc;
    lock(root->o);
    root->close_error = 0;
    ht_opt_succeeded(root, HT_EVENT_STEP_REFUSED, 0);
    ht_opt_succeeded(root, HT_EVENT_COMMIT_FAILED, 0);
    unlock(root->o);
    return 0;
}

/* A boundary, published when commit is set or durable_every says so. k: with a kept step, or NULL. */
static int end_step(struct ht_optim *o, uint64_t id, bool commit, struct ht_copy *k, struct ht_optim_steer *by)
{
    uint64_t start = ht_now_ns();
    struct ht_root *root;
    int rc = ht_opt_step_enter(o, id, ht_opt_gate_enter, &root);

    if (rc)
        return rc;
    HT_VERIFY(ht_optim_verify(o)); /* sums of squares, before they are used */
    rc = ht_opt_boundary(root, commit, by);
    lock(o);
    bool durable = commit || ht_opt_step_durable(root, root->undurable);
    root->redo.full |= !rc && by->full;
    unlock(o);
    rc = finish_step(root, rc, durable, k);
    lock(o);
    root->commit_ns += durable ? ht_now_ns() - start : 0;
    unlock(o);
    ht_opt_step_leave(root);
    HT_VERIFY(ht_optim_verify(o));
    return rc;
}

int ht_optim_prepare_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    struct ht_root *root;
    int rc = ht_opt_step_enter(o, id, ht_opt_gate_enter, &root);

    if (rc)
        return rc;
    rc = ht_opt_prepare(root, by);
    ht_opt_step_leave(root);
    return rc;
}

int ht_optim_commit_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    return end_step(o, id, true, NULL, by);
}

int ht_optim_step_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    return end_step(o, id, false, NULL, by);
}

int ht_optim_snapshot_by(struct ht_optim *o, uint64_t id, const char *name, struct ht_optim_steer *by)
{
    struct ht_copy k = {.name = name};
    int rc = end_step(o, id, true, &k, by);

    return rc ? rc : k.error;
}

/* ------------------------------------------------------------ asynchronous */

/*
 *   caller   gate, verdict, coverage; draining; reads wait for what the step will change; returns
 *   closer   queue worked off, step counted, published if durable_every says so; gate left
 *
 * The gate passes from the caller to the closer with the root. So whatever needs the gate (a second step, commit,
 * abort, reset, drop, a claim) waits for the closer, and sees the state that it would see after a synchronous step.
 * Writers of the next step's gradients wait until the step is counted, as in a synchronous one. This costs no time in
 * training: a gradient depends on all parameters, so the updates of the step before have run when the first one comes.
 *
 * A failure is in the root's error, and in close_error: gradients are refused until an abort, or until a step or a
 * commit succeeds.
 *
 * Closers are threads that are started when they are first needed, one for each root that ends a step at the same time,
 * at most HT_CLOSERS_MAX. Further roots wait for one. Without any thread the caller closes the step itself.
 */

/* Releases the gate and the reference of the request. */
static void close_step(struct ht_root *root)
{
    uint64_t start = ht_now_ns();
    struct ht_optim *o = root->o;

    HT_VERIFY(ht_optim_verify(o)); /* sums of squares, before they are used */
    int rc = ht_opt_boundary_close(root);
    lock(o);
    bool durable = root->close_durable;
    bool named = root->failure; /* failed updates and publications are named where they fail */
    unlock(o);
    if (rc && rc != -ECANCELED && !named)
        ht_opt_refuse(root, HT_EVENT_STEP_REFUSED, 0, "the step could not end: %s; step and commit try it again",
                      strerror(-rc));
    rc = finish_step(root, rc, durable, NULL);
    lock(o);
    root->commit_ns += durable ? ht_now_ns() - start : 0;
    root->close_error = rc == -ECANCELED ? 0 : rc;
    root->async = false;
    ht_opt_gate_leave(root);
    ht_opt_root_put(root);
    unlock(o);
    HT_VERIFY(ht_optim_verify(o));
}

static void *closer_main(void *arg)
{
    struct ht_optim *o = arg;

    pthread_setname_np(pthread_self(), "ht-closer");
    lock(o);
    while (!o->stopping) {
        if (ht_list_empty(&o->closings)) {
            o->closers_idle++;
            ht_cond_wait(&o->close, ht_optim_lock(o));
            o->closers_idle--;
            continue;
        }
        struct ht_root *root = ht_list_entry(o->closings.next, struct ht_root, closing);
        ht_list_del(&root->closing);
        root->gate_thread = ht_activity_thread();
        unlock(o);
        close_step(root);
        lock(o);
    }
    unlock(o);
    return NULL;
}

/* False: there is no closer. One that was woken for another root still counts as idle: then one more is started. */
static bool hand_over(struct ht_root *root)
{
    struct ht_optim *o = root->o;
    unsigned waiting = 0;

    lock(o);
    ht_list_add_tail(&o->closings, &root->closing);
    ht_list_for_each(pos, &o->closings)
        waiting++;
    if (o->closers_idle < waiting && o->closers < HT_CLOSERS_MAX &&
        pthread_create(&o->closer[o->closers], NULL, closer_main, o) == 0)
        o->closers++;
    bool done = o->closers > 0;
    if (!done)
        ht_list_del(&root->closing);
    pthread_cond_signal(&o->close);
    unlock(o);
    return done;
}

int ht_optim_step_async_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    struct ht_root *root;
    uint64_t ticket = 0;
    int rc = ht_opt_step_enter(o, id, ht_opt_gate_enter, &root);

    if (rc)
        return rc;
    rc = ht_opt_boundary_request(root, by, &ticket);
    if (rc) {
        ht_opt_step_leave(root);
        return rc;
    }
    if (!hand_over(root))
        close_step(root);
    lock(o);
    ht_opt_inval_wait(o, ticket);
    unlock(o);
    return 0;
}

void ht_opt_closers_join(struct ht_optim *o)
{
    lock(o);
    unsigned count = o->closers;
    unlock(o);
    for (unsigned i = 0; i < count; i++)
        pthread_join(o->closer[i], NULL);
    lock(o);
    o->closers = 0;
    ht_list_for_each_safe(pos, next, &o->closings)
        ht_list_del(pos);
    unlock(o);
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
    struct ht_optim_steer anyone = {.claim = 0};
    uint64_t lsn;
    int rc = HT_MUTANT("publish-unasked") ? ht_scope_commit(root->o->store, root->id, &lsn) : 0;

    rc = rc ? rc : ht_opt_boundary(root, true, &anyone);
    if (!rc)
        rc = publish_all(root, NULL);
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
    int rc = ht_opt_step_enter(o, id, ht_opt_gate_enter, &root);

    if (rc)
        return rc;
    set_ending(root, true);
    rc = commit_and_unmake(root, unmake, ctx);
    set_ending(root, false);
    ht_opt_step_leave(root);
    return rc;
}

/* ----------------------------------------------------------------- unmount */

/* Makes changes below a root without an open step durable, whichever client has claimed it; the step is not counted. */
static int publish_closed(struct ht_root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    int rc = ht_opt_gate_enter(root);
    assert(rc || (!root->open && !root->failure && !root->pending));
    root->hold = !rc;
    unlock(o);
    if (rc)
        return rc;
    rc = publish_all(root, NULL);
    lock(o);
    ht_opt_gate_leave(root);
    unlock(o);
    return rc;
}

/* A kept step has nothing to write. */
static int finish_root(struct ht_root *root)
{
    struct ht_optim *o = root->o;
    bool half_made = o->hooks.half_made && o->hooks.half_made(o->hooks.ctx, root->id);

    lock(o);
    /* The last step may still be in its closer's hands. Changes are published with all logged steps computed. */
    while ((root->async || root->redo.recovering) && !o->stopping)
        wait_changed(o);
    bool failed = root->failure != 0, drop = root->open || failed || half_made, exists = root->exists && !root->frozen;
    bool unreplayed = root->redo.failed != 0;
    uint64_t step = root->step + 1, durable = unreplayed ? root->pub_step + root->redo.steps : root->durable_step;
    unlock(o);
    if (!exists)
        return 0;
    if (unreplayed) { /* names and other files: nobody may publish them without the steps */
        ht_opt_event(HT_EVENT_STEP_DROPPED, root->id,
                     "logged steps could not be computed again, so all that was changed below this model since the "
                     "mount is dropped; the next mount tries again, up to step %llu",
                     (ull)durable);
    } else if (drop) {
        ht_opt_event(HT_EVENT_STEP_DROPPED, root->id,
                     "the mount ends within step %llu, which %s: all that was written below this model since step %llu "
                     "is dropped; the next mount finds step %llu",
                     (ull)step,
                     failed          ? "has a failed update"
                         : half_made ? "its maker has not committed"
                                     : "has no commit",
                     (ull)durable, (ull)durable);
    }
    if (unreplayed || drop)
        return 0;
    /* A commit of nothing would cost flushes. The writeback has scanned mappings, too. */
    int rc = ht_scope_writeback(o->store, root->id);
    return rc || ht_scope_pending_bytes(o->store, root->id) ? publish_closed(root) : 0;
}

/* The root after that one (NULL: the first), with a reference in place of the one on root; NULL: there is none. */
static struct ht_root *next_root(struct ht_optim *o, struct ht_root *root)
{
    lock(o);
    const struct ht_list *pos = root ? root->all.next : o->roots.next;
    struct ht_root *next = pos == &o->roots ? NULL : ht_list_entry(pos, struct ht_root, all);
    if (next)
        next->refs++;
    if (root)
        ht_opt_root_put(root);
    unlock(o);
    return next;
}

int ht_optim_finish(struct ht_optim *o)
{
    int first = 0;

    /* A store whose log failed during the mount reports for each root that it is lost. */
    if (!o->started || (ht_store_read_only(o->store) && !ht_store_failed(o->store)))
        return 0;
    lock(o);
    o->finishing = true;
    notify_changed(o);
    unlock(o);
    for (struct ht_root *root = next_root(o, NULL); root; root = next_root(o, root)) {
        int rc = finish_root(root);
        first = first ? first : rc;
    }
    return first;
}
