/* SPDX-License-Identifier: Apache-2.0 */
/*
 * notify.c - announces that bytes changed: to parked readers, and to caches of the kernel.
 *
 * A cache's owner may block until a parked reader of the same pages was answered. Therefore readers are answered first,
 * and invalidation is done by one helper thread that only its requesters wait for. Requests for the same
 * parameter are merged while they wait, so there are never more than parameters.
 */
#include "tiering/base/activity.h"
#include "optim/state/param.h"
#include "optim/state/root.h"

/* ------------------------------------------------------------ invalidation */

uint64_t ht_opt_inval(struct ht_param *p, uint64_t first, uint64_t last)
{
    struct ht_optim *o = p->o;

    /* At the end there are no readers any more, and the helper may have ended. */
    if (!o->hooks.invalidate || !o->helper.started || o->stopping)
        return 0;
    if (!ht_list_empty(&p->inval)) {
        p->inval_first = ht_min_u64(p->inval_first, first);
        p->inval_last = ht_max_u64(p->inval_last, last);
        return p->inval_ticket;
    }
    p->inval_first = first;
    p->inval_last = last;
    p->inval_ticket = ++o->inval_issued;
    p->refs++;
    ht_list_add_tail(&o->invals, &p->inval);
    pthread_cond_signal(&o->notify);
    return p->inval_ticket;
}

void ht_opt_inval_wait(struct ht_optim *o, uint64_t ticket)
{
    ht_activity_wait("the kernel to drop pages", 0);
    while (o->inval_done < ticket)
        wait_changed(o);
    ht_activity_go_on();
}

static void invalidate_first(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = ht_list_entry(o->invals.next, struct ht_param, inval);
    uint64_t chunk = p->shape.chunk_bytes, bytes = p->shape.elements * p->shape.p_bytes;
    uint64_t begin = p->inval_first * chunk, end = ht_min_u64((p->inval_last + 1) * chunk, bytes);
    uint64_t ticket = p->inval_ticket;

    ht_list_del(&p->inval);
    unlock(o);
    if (begin < end)
        o->hooks.invalidate(o->hooks.ctx, p->oid, begin, end - begin);
    lock(o);
    o->inval_done = ticket;
    p->refs--;
    notify_changed(o);
}

/* ----------------------------------------------------------------- waiters */

void ht_opt_wake(struct ht_waiter *chain)
{
    while (chain) {
        struct ht_waiter *w = chain;
        chain = w->link_.next ? ht_list_entry(w->link_.next, struct ht_waiter, link_) : NULL;
        w->wake(w);
    }
}

static bool ranges_pending(const struct ht_param *p, uint64_t first, uint64_t last) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (!ht_opt_param_hidden(p) || ht_opt_param_replayed(p)) /* then each range */
        return ht_opt_param_replayed(p);
    for (uint64_t i = first; i <= last && i < p->shape.range_count; i++) {
        const struct ht_range *r = ht_opt_range_find(p, i);
        if (r && ht_opt_range_hidden(r))
            return true;
    }
    return false;
}

void ht_opt_take_waiters(struct ht_param *p, struct ht_waiter **chain)
{
    ht_list_for_each_entry_safe(w, &p->waiters, struct ht_waiter, link_)
        if (p->gone || !ranges_pending(p, w->first_, w->last_)) {
            /*
             * Moves a waiter to the chain to be woken: next leads on, and prev is NULL, which
             * shows cancel that it comes too late.
             */
            ht_list_del(&w->link_);
            w->link_.prev = NULL;
            w->link_.next = *chain ? &(*chain)->link_ : NULL;
            *chain = w;
        }
}

int ht_optim_readable(struct ht_optim *o, uint64_t oid, uint64_t off, uint64_t len, struct ht_waiter *w)
{
    lock(o);
    struct ht_param *p = ht_opt_param_find(o, oid);
    int rc = p && !p->gone && len && p->root->redo.failed ? -EIO : 0;
    if (!rc && p && !p->gone && ht_opt_param_hidden(p) && len) { /* others may have no shape yet */
        uint64_t of_record = p->cur.exists ? p->cur.chunk_bytes : p->pub.chunk_bytes;
        uint64_t chunk = p->shape.chunk_bytes ? p->shape.chunk_bytes : of_record;
        uint64_t first = off / chunk;
        uint64_t last = (len > UINT64_MAX - off ? UINT64_MAX : off + len - 1) / chunk;
        rc = ranges_pending(p, first, last) ? -EAGAIN : 0;
        if (rc && w) {
            w->first_ = first;
            w->last_ = last;
            ht_list_add_tail(&p->waiters, &w->link_);
        }
    }
    unlock(o);
    return rc;
}

bool ht_optim_replaying(struct ht_optim *o, uint64_t oid)
{
    lock(o);
    const struct ht_param *p = ht_opt_param_find(o, oid);
    bool yes = p && !p->gone && ht_opt_param_replayed(p);
    unlock(o);
    return yes;
}

bool ht_optim_cancel(struct ht_optim *o, struct ht_waiter *w)
{
    lock(o);
    bool waiting = w->link_.prev != NULL;
    if (waiting)
        ht_list_del(&w->link_);
    unlock(o);
    return waiting;
}

void ht_opt_wake_readers(struct ht_root *root)
{
    struct ht_waiter *chain = NULL;
    struct ht_optim *o = root->o;

    lock(o);
    ht_list_for_each(pos, &root->params)
        ht_opt_take_waiters(ht_list_entry(pos, struct ht_param, of_root), &chain);
    unlock(o);
    ht_opt_wake(chain);
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

    if (!root)
        return -ENOENT;
    struct ht_param *p = oid ? ht_opt_param_get(o, oid) : NULL;
    lock(o);
    ht_activity_wait("queued updates of model root", id);
    while (is_waited_for(root, oid, p) && !o->stopping && !ht_opt_interrupted(root))
        wait_changed(o);
    ht_activity_go_on();
    bool interrupted = is_waited_for(root, oid, p);
    ht_opt_inval_wait(o, o->inval_issued); /* only this call orders mappings */
    bool failed = oid ? p && p->failed : root->failure || root->close_error;
    int rc = o->stopping ? -ECANCELED : interrupted ? -EINTR : ht_opt_refuses(root);
    rc = !rc && failed ? -EIO : rc;
    ht_opt_root_put(root);
    unlock(o);
    ht_opt_param_put(p);
    return rc;
}

/* ------------------------------------------------------------------ helper */

/* Ends when stopping and all is announced. */
void *ht_opt_helper_main(void *arg)
{
    struct ht_optim *o = arg;

    lock(o);
    for (;;) {
        if (o->wakes) {
            struct ht_waiter *chain = o->wakes;
            o->wakes = NULL;
            unlock(o);
            ht_opt_wake(chain);
            lock(o);
        } else if (!ht_list_empty(&o->invals)) {
            invalidate_first(o);
        } else if (o->stopping) {
            break;
        } else {
            ht_cond_wait(&o->notify, ht_optim_lock(o));
        }
    }
    unlock(o);
    return NULL;
}
