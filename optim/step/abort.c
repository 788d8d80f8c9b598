/* SPDX-License-Identifier: Apache-2.0 */
/* abort.c - returns a model to its last commit: parameters, state, gradients and the readers that wait for updates. */
#include "tiering/base/verify.h"
#include "tiering/api/shm.h"
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/redo/logged.h"
#include "optim/step/step_priv.h"

static void invalidate_whole(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->shape.range_count)
        (void)ht_opt_inval(p, 0, p->shape.range_count - 1);
}

/*
 * Returns when no part of the step is left to run or to write. *out_refused: it may not be taken back, and nothing has
 * happened. *out_spare: no update has run since the last logged step.
 */
static int quiesce(struct ht_root *root, struct ht_optim_steer *by, bool *out_refused, bool *out_spare)
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
    rc = ht_opt_stop_step(root, out_spare);
    unlock(o);
    return rc;
}

/*
 * Readers of several objects wait until their content is back; all readers wait until the logged steps are computed
 * again, for they have seen those.
 */
static void begin_reverting(struct ht_root *root)
{
    const struct ht_optim_hooks *hooks = &root->o->hooks;

    lock(root->o);
    root->reverting = true;
    bool replaying = root->redo.replaying = root->redo.steps > 0;
    unlock(root->o);
    if (replaying && hooks->replay_begins)
        hooks->replay_begins(hooks->ctx, root->id);
}

int ht_opt_take_back(struct ht_root *root, int *out_shown)
{
    struct ht_optim *o = root->o;

    begin_reverting(root);
    int rc = ht_scope_abort(o->store, root->id);
    *out_shown = rc ? 0 : ht_scope_shm_restore(o->store, root->id);
    lock(o);
    if (!rc)
        ht_opt_forget_step(root);
    else
        root->redo.replaying = false;
    root->reverting = false;
    notify_changed(o);
    unlock(o);
    return rc ? rc : ht_opt_redo_replay(root);
}

/*
 * Parameters and state are as the last logged step has left them: only what is newer than the last commit goes. A
 * change that turns up meanwhile takes the long way.
 */
static int take_back_rest(struct ht_root *root, int *out_shown)
{
    struct ht_optim *o = root->o;

    lock(o);
    root->reverting = root->redo.sparing = true;
    unlock(o);
    int rc = ht_scope_abort_rest(o->store, root->id);
    *out_shown = rc ? 0 : ht_scope_shm_restore(o->store, root->id);
    lock(o);
    root->redo.sparing = false;
    if (!rc)
        ht_opt_forget_step(root);
    root->reverting = false;
    notify_changed(o);
    unlock(o);
    return rc == -EBUSY ? ht_opt_take_back(root, out_shown) : rc;
}

void ht_opt_show_all(struct ht_root *root)
{
    lock(root->o);
    root->draining = false;
    notify_changed(root->o);
    unlock(root->o);
    ht_opt_wake_readers(root);
    lock(root->o);
    ht_opt_each_param(root, invalidate_whole);
    ht_opt_inval_wait(root->o, root->o->inval_issued);
    unlock(root->o);
}

int ht_optim_abort_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    struct ht_root *root;
    bool refused, spare = false;
    int shown = 0, rc = ht_opt_step_enter(o, id, &root);

    if (rc)
        return rc;
    rc = quiesce(root, by, &refused, &spare);
    if (refused) {
        ht_opt_step_leave(root);
        return rc;
    }
    if (!rc)
        rc = spare ? take_back_rest(root, &shown) : ht_opt_take_back(root, &shown);
    lock(o);
    if (!rc)
        root->error.text[0] = '\0'; /* whatever it was about is taken back */
    uint64_t step = root->durable_step;
    unlock(o);
    if (!rc) {
        const struct ht_event_about about = {.id = root->id};
        ht_event(HT_EVENT_STEP_ABORTED, &about, "the model is back at step %llu", (unsigned long long)step);
        rc = ht_opt_bury_orphans(root);
    }
    ht_opt_show_all(root);
    ht_opt_step_leave(root);
    HT_VERIFY(ht_optim_verify(o));
    return rc ? rc : shown;
}

int ht_optim_abort(struct ht_optim *o, uint64_t id)
{
    return ht_optim_abort_by(o, id, NULL);
}
