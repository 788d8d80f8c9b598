/* SPDX-License-Identifier: Apache-2.0 */
/*
 * take.c - which range a worker updates next, and what it does while there is none.
 *
 * Workers without a range do the store's background work, one at a time (api/background.h). Another one is
 * always free, so no update ever waits for the background. If none had a moment for that
 * in a second, a worker does a unit between two ranges.
 *
 * All workers may wait for one device, or for the vault. So one more, the spare, takes ranges of roots that no other
 * one works on, while none is idle: a device that does not answer holds up no model that has no content there. Hung
 * reads keep their buffers, so some are kept for the spare.
 */
#include <pthread.h>

#include "tiering/api/background.h"
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/step/step_priv.h"

/* Has the background waited for so long that a unit comes before the next range? */
static bool is_unit_due(const struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return o->lends && !o->serves && ht_now_ns() - o->served_ns >= o->unit_period_ns;
}

/* Background work: until a range needs this worker, or one unit. The lock is released meanwhile. */
static void serve_background(struct ht_optim *o, bool once) HT_REQUIRES(HT_LOCK_OPTIM)
{
    o->serves = true;
    unlock(o);
    bool more = ht_store_background_serve(o->store, once);
    lock(o);
    o->serves = false;
    o->lends = more;
    o->served_ns = ht_now_ns();
    if (o->idle) /* it may serve, while this worker updates a range */
        pthread_cond_signal(&o->work);
}

static struct ht_range *take_of(struct ht_root *root, int numa_index) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_optim *o = root->o;
    struct ht_range *r = ht_opt_range_take(root, numa_index);

    root->running++;
    ht_list_del(&root->ready);
    ht_opt_root_ready(root);
    if (!ht_list_empty(&o->ready))
        ht_opt_wake_worker(o);
    return r;
}

/* For the spare worker. */
static struct ht_range *take_neglected(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (o->idle)
        return NULL;
    ht_list_for_each_entry(root, &o->ready, struct ht_root, ready)
        if (!root->running)
            return take_of(root, HT_NUMA_INDEX_ANY);
    return NULL;
}

struct ht_range *ht_opt_take_range(const struct ht_worker *w, bool second)
{
    struct ht_optim *o = w->o;
    const struct ht_list *ready = w->away ? &o->away : &o->ready;

    if (ht_list_empty(ready) || o->stopping)
        return NULL;
    struct ht_root *root = ht_list_entry(ready->next, struct ht_root, ready);
    if (second && (w->away || w->is_spare || is_unit_due(o)))
        return NULL;
    if (second) {
        const struct ht_range *next = ht_opt_range_next(root, w->numa_index);
        const struct ht_param_shape *shape = &next->param->shape;
        /* Logging waits for memory, and these ranges share chunks of the gradient with their neighbours. */
        if ((next->work & (HT_WORK_LOG | HT_WORK_ORTHO)) || shape->g_bytes < shape->p_bytes)
            return NULL;
    }
    return take_of(root, w->numa_index);
}

static void wait_for_work(const struct ht_worker *w) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_optim *o = w->o;

    if (w->away || w->is_spare) {
        ht_cond_wait(w->away ? &o->away_work : &o->spare, ht_optim_lock(o));
        return;
    }
    if (o->lends && !o->serves) {
        serve_background(o, false);
        return;
    }
    o->idle++;
    ht_cond_wait(&o->work, ht_optim_lock(o));
    o->idle--;
}

struct ht_range *ht_opt_wait_for_range(const struct ht_worker *w)
{
    struct ht_optim *o = w->o;
    struct ht_range *r = NULL;

    lock(o);
    if (!w->away && !w->is_spare && is_unit_due(o) && !ht_list_empty(&o->ready))
        serve_background(o, true);
    while (!o->stopping && !(r = w->is_spare ? take_neglected(o) : ht_opt_take_range(w, false)))
        wait_for_work(w);
    unlock(o);
    return r;
}

bool ht_opt_leave_range(struct ht_range *r, void *(*worker_main)(void *))
{
    struct ht_param *p = r->param;
    struct ht_root *root = p->root;
    struct ht_optim *o = root->o;

    lock(o);
    for (struct ht_worker *w = o->away_worker; o->aways < HT_AWAY_WORKERS_MAX; o->aways++) {
        w[o->aways] = (struct ht_worker){.o = o, .away = true, .numa_index = HT_NUMA_INDEX_ANY};
        if (pthread_create(&w[o->aways].thread, NULL, worker_main, &w[o->aways]))
            break;
    }
    bool left = p->gone || o->aways > 0;
    if (left) {
        root->away |= !p->gone;
        root->running--;
        ht_list_del(&root->ready);
        ht_opt_range_requeue(r);
        if (p->gone) { /* its other ranges were cancelled when it was deleted */
            ht_opt_cancel(p);
            ht_opt_param_reclaim(p);
        }
        notify_changed(o);
    }
    unlock(o);
    return left;
}
