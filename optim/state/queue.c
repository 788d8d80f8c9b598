/* SPDX-License-Identifier: Apache-2.0 */
/*
 * queue.c - which range a worker takes next, and what it does while there is none.
 *
 *   early   ranges to be logged, additions to sums and measurements, in order of arrival. The next backward pass
 *           waits for additions, and comes to its parameters in the same order.
 *   queue   parameters with updates: the one with the newest gradient first, its ranges in ascending order. Backward
 *           passes end with the first layer, which the next forward pass needs first.
 *
 * Early work goes first. Results do not depend on the order.
 *
 * Workers without a range do the store's background work, one at a time (api/background.h). Another one is always free,
 * so no update ever waits for the background. If none had a moment for that in a second, a worker does a unit between
 * two ranges.
 *
 * All workers may wait for one device, or for the vault. So one more, the spare, takes ranges of roots that no other
 * one works on, while none is idle: a device that does not answer holds up no model that has no content there. Hung
 * reads keep their buffers, so some are kept for the spare.
 */
#include <pthread.h>

#include "tiering/base/activity.h"
#include "tiering/api/background.h"
#include "optim/state/param.h"
#include "optim/state/root.h"

/* A look at more would take long; what lies behind keeps an order that only costs time. */
enum { NUMA_LOOK_MAX = 16, ORDER_LOOK_MAX = 64 };

static bool queue_empty(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return ht_list_empty(&root->early) && ht_list_empty(&root->queue);
}

/* A root is ready: an idle worker takes a range, or else the one that does background work, after its unit. */
static void wake_worker(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (o->idle) {
        pthread_cond_signal(&o->work);
        return;
    }
    pthread_cond_signal(&o->spare);
    if (o->serves)
        ht_store_background_recall(o->store);
}

void ht_opt_root_ready(struct ht_root *root)
{
    struct ht_optim *o = root->o;

    root->away &= !queue_empty(root);
    if (root->hold || root->alone || queue_empty(root)) {
        ht_list_del(&root->ready);
        return;
    }
    if (ht_list_empty(&root->ready))
        ht_list_add_tail(root->away ? &o->away : &o->ready, &root->ready);
    if (root->away)
        pthread_cond_signal(&o->away_work);
    else
        wake_worker(o);
}

void ht_opt_range_ran(struct ht_root *root)
{
    if (!--root->running)
        ht_opt_root_ready(root);
}

/*
 * Memory for the gradient of a range. Only the first chunk of an object has a short image, so the last range of several
 * takes as much as the others.
 */
static uint32_t image_bytes(const struct ht_param *p, uint64_t index)
{
    const struct ht_param_shape *s = &p->shape;
    uint32_t least = ht_opt_range_grad_bytes(p, index);

    if (s->range_count > 1)
        return s->range_elements * s->g_bytes;
    if (least > s->chunk_bytes)
        return (uint32_t)ht_round_up(least, s->chunk_bytes);
    return ht_obj_first_image_bytes(least);
}

uint32_t ht_opt_range_backlog_bytes(const struct ht_range *r, unsigned work)
{
    return (work & ~(unsigned)HT_WORK_LOG) == HT_WORK_MEASURE ? 0 : image_bytes(r->param, r->index);
}

/* Gradients come in ascending or in descending order nearly always. */
static void place_range(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_list *queue = &r->param->queue, *pos = queue;
    bool first = !ht_list_empty(queue) && r->index < ht_list_entry(queue->next, struct ht_range, queue)->index;

    if (first)
        pos = queue->next;
    for (unsigned i = 0; !first && i < ORDER_LOOK_MAX && pos->prev != queue; i++, pos = pos->prev)
        if (ht_list_entry(pos->prev, struct ht_range, queue)->index < r->index)
            break;
    ht_list_add_tail(pos, &r->queue);
}

static void place_in_queue(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = r->param;

    if ((r->work & (HT_WORK_UPDATE | HT_WORK_LOG)) == HT_WORK_UPDATE) {
        place_range(r);
        ht_list_del(&p->queued);
        ht_list_add_tail(p->root->queue.next, &p->queued);
    } else {
        ht_list_add_tail(&p->root->early, &r->queue);
    }
    ht_opt_root_ready(p->root);
}

/* Does the gradient that its update will use not change any more, or only by an addition that comes before? */
static bool ends_gradient(const struct ht_range *r, unsigned work) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint32_t added = r->added + ((work & HT_WORK_ADD) != 0), wanted = r->param->root->latched.accumulate;

    if (work & HT_WORK_ORTHO) /* the orthogonalised update is logged when it is there */
        return false;
    return wanted == 1 || (work & HT_WORK_UPDATE) || ((work & HT_WORK_ADD) && added == wanted);
}

void ht_opt_range_queue(struct ht_range *r, unsigned work)
{
    struct ht_param *p = r->param;
    uint64_t offset = (uint64_t)r->index * p->shape.chunk_bytes;

    if (p->root->redo.wanted && !p->root->redo.broken && !r->logged && ends_gradient(r, work))
        work |= HT_WORK_LOG;
    r->numa_index = (int8_t)(p->obj ? ht_obj_numa_index(p->obj, offset) : HT_NUMA_INDEX_ANY);
    r->state = HT_RANGE_QUEUED;
    r->work = (uint8_t)work;
    r->consumed = false;
    p->pending++;
    p->root->pending++;
    p->root->backlog_bytes += ht_opt_range_backlog_bytes(r, work);
    p->refs++;
    place_in_queue(r);
}

void ht_opt_range_requeue(struct ht_range *r)
{
    r->state = HT_RANGE_QUEUED;
    place_in_queue(r);
}

static void leave_queue(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = r->param;

    ht_list_del(&r->queue);
    if (ht_list_empty(&p->queue))
        ht_list_del(&p->queued);
}

/* Takes it off again. */
static void unqueue(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = r->param;

    p->root->backlog_bytes -= ht_opt_range_backlog_bytes(r, r->work);
    r->state = HT_RANGE_IDLE;
    r->work = 0;
    leave_queue(r);
    p->pending--;
    p->root->pending--;
    p->refs--;
    ht_opt_root_ready(p->root);
}

void ht_opt_cancel(struct ht_param *p)
{
    ht_opt_for_each_range(r, p) {
        if (!p->pending)
            break;
        if (r->state == HT_RANGE_QUEUED)
            unqueue(r);
    }
}

/* ---------------------------------------------------------------- the next */

/* The first of a list that fits. *looked counts, and ends the search at NUMA_LOOK_MAX. */
static struct ht_range *first_fit(const struct ht_list *list, int numa_index, unsigned *looked)
{
    ht_list_for_each_entry(r, list, struct ht_range, queue) {
        if (*looked == NUMA_LOOK_MAX)
            break;
        ++*looked;
        if (numa_index == HT_NUMA_INDEX_ANY || r->numa_index == HT_NUMA_INDEX_ANY || r->numa_index == numa_index)
            return r;
    }
    return NULL;
}

/*
 * The first of the queue, or one for this NUMA node that follows soon. Every node that has ranges has a worker, so none
 * waits for ever.
 */
static struct ht_range *next_range(const struct ht_root *root, int numa_index) HT_REQUIRES(HT_LOCK_OPTIM)
{
    unsigned looked = 0;
    struct ht_range *r = first_fit(&root->early, numa_index, &looked);

    ht_list_for_each(pos, &root->queue) {
        if (r || looked == NUMA_LOOK_MAX)
            break;
        r = first_fit(&ht_list_entry(pos, struct ht_param, queued)->queue, numa_index, &looked);
    }
    looked = 0;
    if (!r)
        r = first_fit(&root->early, HT_NUMA_INDEX_ANY, &looked);
    if (!r)
        r = first_fit(&ht_list_entry(root->queue.next, struct ht_param, queued)->queue, HT_NUMA_INDEX_ANY, &looked);
    return r;
}

struct ht_range *ht_opt_range_take(struct ht_root *root, int numa_index)
{
    struct ht_range *r = next_range(root, numa_index);
    struct ht_optim *o = root->o;

    leave_queue(r);
    r->state = HT_RANGE_RUNNING;
    root->running++;
    ht_list_del(&root->ready);
    ht_opt_root_ready(root);
    if (!ht_list_empty(&o->ready))
        wake_worker(o);
    return r;
}

void ht_opt_cancel_root(struct ht_root *root)
{
    while (!queue_empty(root))
        unqueue(next_range(root, HT_NUMA_INDEX_ANY));
}

int ht_opt_drain(struct ht_root *root)
{
    ht_activity_wait("queued updates of model root", root->id);
    while ((root->pending || root->running) && !root->o->stopping)
        wait_changed(root->o);
    ht_activity_go_on();
    return root->pending || root->running ? -ECANCELED : root->failure ? -EIO : 0;
}

/* ----------------------------------------------------------------- workers */

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

/* For the spare worker. */
static struct ht_range *take_neglected(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (o->idle)
        return NULL;
    ht_list_for_each_entry(root, &o->ready, struct ht_root, ready)
        if (!root->running)
            return ht_opt_range_take(root, HT_NUMA_INDEX_ANY);
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
        const struct ht_range *next = next_range(root, w->numa_index);
        const struct ht_param_shape *shape = &next->param->shape;
        /* Logging waits for memory, and these ranges share chunks of the gradient with their neighbours. */
        if ((next->work & (HT_WORK_LOG | HT_WORK_ORTHO)) || shape->g_bytes < shape->p_bytes)
            return NULL;
    }
    return ht_opt_range_take(root, w->numa_index);
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
