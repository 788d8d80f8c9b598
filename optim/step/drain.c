/* SPDX-License-Identifier: Apache-2.0 */
/* drain.c - queues what a step has left, and waits until a queue is empty. */
#include "tiering/base/activity.h"
#include "tiering/base/base.h"
#include "tiering/base/list.h"
#include "optim/optim.h"
#include "optim/state/context.h"
#include "optim/state/notify.h"
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/step/step_priv.h"

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
    if (updates && first <= last && !p->root->deciding) /* else the request did it */
        (void)ht_opt_inval(p, first, last);
}

/*
 * Before updates, new reads are parked from now on; earlier ones may have filled caches. The thread waits for empty
 * caches at the end (ht_opt_step_leave), not here: writers of gradients wait for this function, and they may be the
 * only threads that could answer such a read.
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

/* p: the parameter with this number, or NULL. */
static bool is_waited_for(const struct ht_root *root, uint64_t oid, const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return oid ? p && ht_opt_param_hidden(p) : root->pending || root->async || root->redo.replaying;
}

void ht_optim_interrupt(struct ht_optim *o)
{
    lock(o);
    notify_changed(o);
    unlock(o);
}

bool ht_optim_root_replaying(struct ht_optim *o, uint64_t id)
{
    lock(o);
    const struct ht_root *root = ht_opt_root_find(o, id);
    bool yes = root && root->redo.replaying;
    unlock(o);
    return yes;
}

int ht_optim_wait(struct ht_optim *o, uint64_t id, uint64_t oid)
{
    struct ht_root *root = ht_opt_root_get(o, id);
    struct ht_param *p = oid && root ? ht_opt_param_get(o, oid) : NULL;
    int rc = !root ? -ENOENT : 0;

    if (root) {
        lock(o);
        ht_activity_wait("queued updates of model root", id);
        while (is_waited_for(root, oid, p) && !o->stopping && !ht_opt_interrupted(root))
            wait_changed(o);
        ht_activity_go_on();
        bool interrupted = is_waited_for(root, oid, p);
        ht_opt_inval_wait(o, o->inval_issued); /* only this call orders mappings */
        bool failed = oid ? p && p->failed : root->failure || root->close_error;
        rc = o->stopping ? -ECANCELED : interrupted ? -EINTR : ht_opt_refuses(root);
        rc = !rc && failed ? -EIO : rc;
        unlock(o);
        ht_opt_root_put(root);
    }
    if (p)
        ht_opt_param_put(p);
    return rc;
}
