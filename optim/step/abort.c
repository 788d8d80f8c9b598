/* SPDX-License-Identifier: Apache-2.0 */
/* abort.c - returns a model to its last commit: parameters, state, gradients and the readers that wait for updates. */
#include "tiering/base/verify.h"
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

/* Returns when no part of the step is left to run or to write. *out_spare: none has run since the last logged step. */
static int quiesce_root(struct ht_root *root, struct ht_optim_steer *by, bool *out_spare)
{
    lock(root->o);
    int rc = ht_opt_may_steer(root, by);
    root->draining = !rc;
    if (!rc)
        rc = ht_opt_stop_step(root, out_spare);
    unlock(root->o);
    if (by->refused)
        ht_opt_refuse(root, HT_EVENT_STEP_REFUSED, 0, "%s", by->why);
    return rc;
}

/* All readers wait until the logged steps are computed again, for they have seen those. */
int ht_opt_take_back(struct ht_root *root, int *out_shown)
{
    const struct ht_optim_hooks *hooks = &root->o->hooks;

    lock(root->o);
    bool replaying = root->redo.replaying = root->redo.steps > 0;
    unlock(root->o);
    if (replaying && hooks->replay_begins)
        hooks->replay_begins(hooks->ctx, root->id);
    int rc = ht_opt_revert(root, false, out_shown);
    if (!rc)
        return ht_opt_redo_replay(root);
    lock(root->o);
    root->redo.replaying = false;
    notify_changed(root->o);
    unlock(root->o);
    return rc;
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
    ht_opt_delta_cut(root); /* whoever sees the new lineage reads the new content */
    unlock(root->o);
}

int ht_optim_abort_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    struct ht_root *root;
    bool spare = false;
    int shown = 0, rc = ht_opt_step_enter(o, id, ht_opt_gate_enter, &root);

    if (rc)
        return rc;
    rc = quiesce_root(root, by, &spare);
    if (by->refused) {
        ht_opt_step_leave(root);
        return rc;
    }
    /*
     * spare: parameters and state are as the last logged step has left them, so only what is newer than the last commit
     * goes. A change that turns up meanwhile takes the long way.
     */
    if (!rc && spare)
        rc = ht_opt_revert(root, true, &shown);
    if (rc == -EBUSY || (!rc && !spare))
        rc = ht_opt_take_back(root, &shown);
    lock(o);
    if (!rc)
        root->error.text[0] = '\0'; /* whatever it was about is taken back */
    uint64_t step = root->durable_step;
    unlock(o);
    if (!rc) {
        ht_opt_event(HT_EVENT_STEP_ABORTED, root->id, "the model is back at step %llu", (unsigned long long)step);
        rc = ht_opt_bury_orphans(root);
    }
    ht_opt_show_all(root);
    ht_opt_step_leave(root);
    HT_VERIFY(ht_optim_verify(o));
    return rc ? rc : shown;
}
