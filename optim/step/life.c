/* SPDX-License-Identifier: Apache-2.0 */
/* life.c - the life of the optimizer: registration, threads, end. */

#include "tiering/base/verify.h"
#include "tiering/api/background.h"
#include "tiering/api/stats.h"
#include "tiering/sys/processors.h"
#include "optim/state/range.h"
#include "optim/state/records.h"
#include "optim/state/root.h"
#include "optim/redo/logged.h"
#include "optim/step/step_priv.h"

enum { WORKERS_PER_DEVICE = 2 }; /* of several, at least */
enum { WORKERS_LEND_MIN = 2 };   /* one may do background work, another one is free */
#define UNIT_PERIOD_NS UINT64_C(1000000000)
enum { BACKLOG_EIGHTHS = 3 }; /* of the part of the DRAM tier through which content passes */

/*
 * A worker waits for the device that its range lies on, so that several devices need several to be busy. With one
 * processor there are two, so that they can do background work.
 */
static unsigned thread_count(const struct ht_store *s)
{
    unsigned devices = ht_store_device_count(s);

    return (unsigned)ht_max_u64(ht_processors_usable(),
                                devices > 1 ? (uint64_t)devices * WORKERS_PER_DEVICE : WORKERS_LEND_MIN);
}

static void init_locks(struct ht_optim *o)
{
    ht_mutex_init(&o->lock, HT_LOCK_OPTIM);
    pthread_cond_init(&o->changed, NULL);
    pthread_cond_init(&o->work, NULL);
    pthread_cond_init(&o->away_work, NULL);
    pthread_cond_init(&o->spare, NULL);
    pthread_cond_init(&o->notify, NULL);
    pthread_cond_init(&o->close, NULL);
    pthread_cond_init(&o->redo_work, NULL);
}

static void init_lists(struct ht_optim *o)
{
    ht_list_init(&o->roots);
    ht_list_init(&o->params);
    ht_list_init(&o->ready);
    ht_list_init(&o->away);
    ht_list_init(&o->invals);
    ht_list_init(&o->closings);
    ht_list_init(&o->problems);
}

uint64_t ht_optim_meta_bytes(struct ht_optim *o)
{
    lock(o);
    uint64_t bytes = o->meta_bytes + o->delta_heap_bytes + ht_quota_taken(&o->accounts) +
        ht_id_table_bytes(&o->roots_by_id) + ht_id_table_bytes(&o->params_by_oid) +
        ht_id_table_bytes(&o->states_by_oid);
    unlock(o);
    return bytes;
}

static uint64_t meta_bytes(void *ctx)
{
    return ht_optim_meta_bytes(ctx);
}

/* ------------------------------------------------------------------- start */

/* Takes a reference to a parameter that replay found, and reserves its next rewrite again. */
static int settle_param(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (!p->obj)
        p->obj = ht_obj_get(p->o->store, p->oid);
    p->gone = !p->obj;
    ht_opt_totals_update(p);
    if (p->gone)
        return 0;
    int rc = ht_opt_state_load_as(p, false); /* all is as it was published */
    return rc ? rc : ht_opt_rewrites_reserve(p);
}

/* A store that has become too full is still readable: reports it, and lets steps fail. */
static void settle_all(struct ht_optim *o)
{
    int first = 0;

    lock(o);
    ht_list_for_each_entry(p, &o->params, struct ht_param, all) {
        int rc = p->cur.exists && !p->root->frozen ? settle_param(p) : 0;
        first = first ? first : rc;
    }
    unlock(o);
    if (first) {
        ht_event(HT_EVENT_NOT_RESERVED, &(struct ht_event_about){.error = first},
                 "space for the next step is not wholly reserved: %s", strerror(-first));
    }
}

/* The directory entry of a parameter may have been made durable alone; its state goes with the next commit. */
static int bury_all_orphans(struct ht_optim *o)
{
    int rc = 0;

    ht_list_for_each(pos, &o->roots) {
        int err = ht_opt_bury_orphans(ht_list_entry(pos, struct ht_root, all));
        rc = rc ? rc : err;
    }
    return rc;
}

static int start_worker(struct ht_optim *o, struct ht_worker *w)
{
    w->o = o;
    int rc = -pthread_create(&w->thread, NULL, ht_opt_worker_main, w);
    w->started = !rc;
    return rc;
}

/*
 * Divides workers among the NUMA nodes in proportion to their devices. The first ones go to the nodes in turn, so that
 * each node has one. If there are too few workers, all serve every node.
 */
static void place_workers(struct ht_optim *o)
{
    const struct ht_nodes *nodes = ht_store_nodes(o->store);
    int64_t credit[HT_NODES_MAX] = {0};

    for (unsigned i = 0; i < o->threads; i++) {
        int index = i < nodes->count ? (int)i : ht_nodes_turn(nodes, credit);
        o->worker[i].numa_index = o->threads >= nodes->count ? index : HT_NUMA_INDEX_ANY;
    }
}

/* From now on the workers do the store's background work. One that waits for a range begins with it. */
static void lend_workers(struct ht_optim *o)
{
    bool lends = ht_store_background_lend(o->store);

    lock(o);
    o->lends = lends;
    o->served_ns = ht_now_ns();
    pthread_cond_broadcast(&o->work);
    unlock(o);
}

static int start_threads(struct ht_optim *o)
{
    lock(o);
    int rc = -pthread_create(&o->helper.thread, NULL, ht_opt_helper_main, o);
    o->helper.started = !rc;
    unlock(o);
    place_workers(o);
    for (unsigned i = 0; !rc && i < o->threads; i++)
        rc = start_worker(o, &o->worker[i]);
    o->worker[o->threads] = (struct ht_worker){.numa_index = HT_NUMA_INDEX_ANY, .is_spare = true};
    if (!rc && o->threads >= WORKERS_LEND_MIN)
        rc = start_worker(o, &o->worker[o->threads]);
    if (!rc && o->threads >= WORKERS_LEND_MIN)
        lend_workers(o);
    return rc;
}

/*
 * Queued gradients pass through the DRAM tier. When half of the passing part is dirty the store begins to write ahead:
 * the backlog stays below that, so that gradients are not written to devices.
 */
static void size_backlog(struct ht_optim *o)
{
    struct ht_store_stats stats;

    ht_store_stats(o->store, &stats);
    o->backlog_bytes_max = ht_max_u64(stats.dram_passing_bytes / 8 * BACKLOG_EIGHTHS, HT_MIB);
}

static int start_optim(void *p)
{
    struct ht_optim *o = p;
    int rc = 0;

    size_backlog(o);
    o->kernels = ht_kernels_choose();
    o->codecs = ht_codecs_choose();
    o->started = true;
    if (ht_store_read_only(o->store))
        return ht_opt_redo_recover(o);
    settle_all(o);
    rc = bury_all_orphans(o);
    if (!rc)
        rc = start_threads(o);
    if (!rc)
        rc = ht_opt_redo_recover(o);
    if (rc)
        ht_optim_stop(o);
    return rc;
}

/* -------------------------------------------------------------------- stop */

static void cancel_all(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_waiter *chain = NULL;

    ht_list_for_each(pos, &o->roots)
        ht_opt_cancel_root(ht_list_entry(pos, struct ht_root, all));
    ht_list_for_each(pos, &o->params)
        ht_opt_take_waiters(ht_list_entry(pos, struct ht_param, all), &chain);
    unlock(o);
    ht_opt_wake(chain);
    lock(o);
}

static void join_thread(struct ht_optim *o, struct ht_opt_thread *t)
{
    lock(o);
    bool started = t->started;
    t->started = false;
    unlock(o);
    if (started)
        pthread_join(t->thread, NULL);
}

static void join_workers(struct ht_optim *o)
{
    for (unsigned i = 0; i <= o->threads; i++) {
        struct ht_worker *w = &o->worker[i];
        if (w->started)
            pthread_join(w->thread, NULL);
        w->started = false;
    }
    lock(o);
    unsigned aways = o->aways; /* none is started any more */
    o->aways = 0;
    unlock(o);
    for (unsigned i = 0; i < aways; i++)
        pthread_join(o->away_worker[i].thread, NULL);
}

void ht_optim_stop(struct ht_optim *o)
{
    if (!o->started)
        return;
    HT_VERIFY(ht_optim_verify(o));
    lock(o);
    o->stopping = true;
    pthread_cond_broadcast(&o->work);
    pthread_cond_broadcast(&o->away_work);
    pthread_cond_signal(&o->spare);
    pthread_cond_broadcast(&o->notify);
    pthread_cond_broadcast(&o->close);
    pthread_cond_broadcast(&o->redo_work);
    notify_changed(o);
    bool lends = o->lends;
    if (o->serves)
        ht_store_background_recall(o->store);
    unlock(o);
    join_workers(o);
    if (lends)
        ht_store_background_take_back(o->store);
    ht_opt_closers_join(o);
    join_thread(o, &o->redo_writer);
    join_thread(o, &o->recovery);
    lock(o);
    cancel_all(o);
    pthread_cond_broadcast(&o->notify);
    unlock(o);
    join_thread(o, &o->helper);
    lock(o);
    /* The store may be closed before the optimizer is freed. */
    ht_list_for_each(pos, &o->roots) {
        ht_opt_redo_reset(ht_list_entry(pos, struct ht_root, all));
        ht_opt_redo_cut(ht_list_entry(pos, struct ht_root, all));
        ht_opt_delta_cut(ht_list_entry(pos, struct ht_root, all));
        ht_opt_redo_end_aside(ht_list_entry(pos, struct ht_root, all));
    }
    ht_opt_redo_end_room(o);
    ht_list_for_each(pos, &o->params)
        ht_opt_param_put_objects(ht_list_entry(pos, struct ht_param, all));
    o->started = false;
    unlock(o);
}

static void free_optim(void *p)
{
    struct ht_optim *o = p;

    ht_optim_stop(o);
    HT_UNSHARED(HT_LOCK_OPTIM);
    while (!ht_list_empty(&o->params))
        ht_opt_param_free(ht_list_entry(o->params.next, struct ht_param, all));
    while (!ht_list_empty(&o->roots)) {
        struct ht_root *r = ht_list_entry(o->roots.next, struct ht_root, all);
        ht_list_del(&r->all);
        ht_opt_redo_free(r);
        ht_opt_reopened(r);
        free(r);
    }
    ht_id_table_free(&o->roots_by_id);
    ht_id_table_free(&o->params_by_oid);
    ht_id_table_free(&o->states_by_oid);
    ht_opt_problems_free(o);
    ht_mutex_destroy(&o->lock);
    pthread_cond_destroy(&o->changed);
    pthread_cond_destroy(&o->work);
    pthread_cond_destroy(&o->away_work);
    pthread_cond_destroy(&o->spare);
    pthread_cond_destroy(&o->notify);
    pthread_cond_destroy(&o->close);
    pthread_cond_destroy(&o->redo_work);
    free(o);
}

/* -------------------------------------------------------------------- make */

static int make_optim(struct ht_store *s, const void *setup, void **out)
{
    const struct ht_optim_setup *u = setup;
    struct ht_optim *o = calloc(1, sizeof(*o));

    if (!o)
        return -ENOMEM;
    HT_UNSHARED(HT_LOCK_OPTIM);
    o->store = s;
    o->hooks = *u->hooks;
    o->no_replay = u->no_replay;
    o->unit_period_ns = UNIT_PERIOD_NS;
    o->accounts.max = HT_ACCOUNTS_BYTES_MAX;
    o->threads = (unsigned)ht_min_u64(u->threads ? u->threads : thread_count(s), HT_THREADS_MAX);
    init_locks(o);
    init_lists(o);
    o->last_step_number = ht_opt_random() >> 2; /* 62 bits, so that the numbers of a mount stay below 2^63 */
    struct ht_meta_client client = {
        .type_first = HT_REC_OPT_FIRST,
        .type_last = HT_REC_OPT_REDO_DEL,
        .ctx = o,
        .replay = ht_opt_replay,
        .replayed = ht_opt_replayed,
        .emit = ht_opt_emit,
        .pending_bytes = ht_opt_pending_bytes,
        .publish = ht_opt_publish,
        .abort = ht_opt_abort,
        .ended = ht_opt_ended,
        .copy = ht_opt_copy,
        .copied = ht_opt_copied,
        .copy_dropped = ht_opt_copy_dropped,
        .could_give = ht_opt_redo_could_give,
        .give_up = ht_opt_redo_give_up,
        .meta_bytes = meta_bytes,
    };
    int rc = ht_store_register(s, &client);
    if (rc)
        free_optim(o);
    else
        *out = o;
    return rc;
}

const struct ht_participant_type ht_participant_optim = {.make = make_optim, .start = start_optim, .free = free_optim};
