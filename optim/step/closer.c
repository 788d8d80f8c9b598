/* SPDX-License-Identifier: Apache-2.0 */
/*
 * closer.c - asynchronous steps: the caller requests the boundary and goes on; a closer ends the step.
 *
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
#include "tiering/base/activity.h"
#include "tiering/base/verify.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/step/step_priv.h"

/* Failed updates and publications are named where they fail. */
static void report_boundary(struct ht_root *root, int rc)
{
    lock(root->o);
    bool named = root->failure;
    unlock(root->o);
    if (rc && rc != -ECANCELED && !named)
        ht_opt_refuse(root, HT_EVENT_STEP_REFUSED, 0, "the step could not end: %s; step and commit try it again",
                      strerror(-rc));
}

/* Releases the gate and the reference of the request. */
static void close_step(struct ht_root *root)
{
    uint64_t start = ht_now_ns();
    struct ht_optim *o = root->o;

    HT_VERIFY(ht_optim_verify(o)); /* sums of squares, before they are used */
    int rc = ht_opt_boundary_close(root);
    report_boundary(root, rc);
    lock(o);
    bool durable = root->close_durable;
    unlock(o);
    rc = ht_opt_step_end(root, rc, durable, NULL);
    lock(o);
    root->commit_ns += durable ? ht_now_ns() - start : 0;
    root->close_error = rc == -ECANCELED ? 0 : rc;
    root->async = false;
    ht_opt_gate_leave(root);
    ht_opt_root_put_locked(root);
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

/* Locked. A closer that was woken for another root still counts as idle: then one thread more is started. */
static void start_closer(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    unsigned waiting = 0;

    ht_list_for_each(pos, &o->closings)
        waiting++;
    if (o->closers_idle < waiting && o->closers < HT_CLOSERS_MAX &&
        pthread_create(&o->closer[o->closers], NULL, closer_main, o) == 0)
        o->closers++;
}

/* False: there is no closer. */
static bool hand_over(struct ht_root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    ht_list_add_tail(&o->closings, &root->closing);
    start_closer(o);
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
