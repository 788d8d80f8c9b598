/* SPDX-License-Identifier: Apache-2.0 */
/* take_back.c - what abort, rollback and a replay that fails have in common: parameters are as the store has them. */
#include "tiering/api/shm.h"
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"

/* The store is back: takes references to the objects that exist again. */
static void reload(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
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
    *out_spare = ht_opt_redo_is_current(root) && !ht_opt_root_applied(root);
    ht_opt_redo_reset(root); /* the abort takes its object back */
    ht_opt_each_param(root, ht_opt_forget_gradient);
    return 0;
}

/* The store has gone back: takes references to the objects that exist again, and ends the open step. */
static void forget_step(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_each_param(root, reload);
    root->open = root->decided = 0;
    root->failure = root->close_error = 0;
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
    if (!rc)
        forget_step(root);
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
