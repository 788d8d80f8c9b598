/* SPDX-License-Identifier: Apache-2.0 */
/* life.c - the life of the optimizer: registration, threads, recovery of logged steps after a mount, end. */
#include <limits.h>

#include "tiering/base/activity.h"
#include "tiering/base/verify.h"
#include "tiering/api/background.h"
#include "tiering/api/stats.h"
#include "tiering/sys/processors.h"
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

static void each_cond(struct ht_optim *o, int (*fn)(pthread_cond_t *cond))
{
    pthread_cond_t *cond[] = {&o->changed, &o->work, &o->spare, &o->notify, &o->away_work, &o->close, &o->redo_work};

    for (size_t i = 0; i < HT_ARRAY_SIZE(cond); i++)
        (void)fn(cond[i]);
}

static int init_cond(pthread_cond_t *cond)
{
    return pthread_cond_init(cond, NULL);
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

/* ---------------------------------------------------------------- recovery */

/*
 * After a mount one thread computes logged steps again, root after root, while clients use other files. It holds the
 * gate until the root is ready, as an abort does: readers of parameters and state wait. Gradients, commands and writers
 * of parameters wait, too. The replay leaves out a parameter that a client deletes. It publishes nothing: a crash
 * begins again with the same steps, and no change of a client becomes durable unasked.
 */

static void set_all_aside(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each(pos, &o->roots)
        ht_opt_redo_set_aside(ht_list_entry(pos, struct ht_root, all));
}

/* A root that was deleted meanwhile counts from the beginning, should it be made again. */
static void let_go(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (!root->exists)
        root->step = root->pub_step = root->durable_step = root->undurable = root->open = 0;
    root->draining = root->redo.recovering = false;
    if (!--root->o->recoveries) {
        ht_opt_redo_end_room(root->o);
        set_all_aside(root->o);
    }
    ht_opt_gate_leave(root);
}

static void recover_root(struct ht_root *root)
{
    const struct ht_optim_hooks *hooks = &root->o->hooks;
    struct ht_optim *o = root->o;
    uint64_t start = ht_now_ns();

    lock(o);
    root->gate_thread = ht_activity_thread();
    uint64_t from = root->step, to = from + root->redo.steps;
    unlock(o);
    int rc = ht_opt_redo_replay(root);
    lock(o);
    bool exists = root->exists;
    unlock(o);
    if (!rc && exists)
        ht_opt_event(
            HT_EVENT_STEPS_REPLAYED, root->id,
            "the steps after %llu were computed again from their gradients; the model is at step %llu, as it was "
            "(%.1f s)",
            (ull)from, (ull)to, (double)(ht_now_ns() - start) / 1e9);
    lock(o);
    let_go(root);
    unlock(o);
    ht_opt_wake_readers(root);
    if (rc && rc != -ECANCELED && hooks->taken_back)
        hooks->taken_back(hooks->ctx);
}

/* The next root to recover, with the reference that it got for that; NULL: there is none. */
static struct ht_root *next_root(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(root, &o->roots, struct ht_root, all)
        if (root->redo.recovering)
            return root;
    return NULL;
}

static void *recover_all(void *arg)
{
    struct ht_optim *o = arg;
    struct ht_root *root;

    lock(o);
    while ((root = next_root(o))) {
        unlock(o);
        recover_root(root);
        lock(o);
        ht_opt_root_put(root);
    }
    unlock(o);
    return NULL;
}

/* Nobody shall take an older step for the last one without having asked for it. */
static int refuse_read_only(struct ht_optim *o)
{
    char name[PATH_MAX] = "";
    uint64_t id = 0;
    size_t steps = 0;

    lock(o);
    ht_list_for_each_entry(root, &o->roots, const struct ht_root, all)
        if (!steps && root->exists && !root->frozen && root->redo.steps) {
            id = root->id;
            steps = root->redo.steps;
        }
    unlock(o);
    if (!steps)
        return 0;
    if (o->hooks.name)
        o->hooks.name(o->hooks.ctx, id, name, sizeof(name));
    if (!name[0])
        snprintf(name, sizeof(name), "model root %llu", (ull)id);
    ht_error("%s has %zu logged steps, which a read-only mount cannot compute again: mount without ro once, or with "
             "ro,noreplay for its last full step",
             name, steps);
    return -EROFS;
}

/* No client is there yet, so nobody has the gate. */
static void begin_recovery(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_redo *redo = &root->redo;

    root->refs++;
    root->gate = root->draining = true;
    redo->recovering = redo->replaying = true;
    root->o->recoveries++;
    ht_opt_event(
        HT_EVENT_REPLAY_PROGRESS, root->id,
        "the %zu steps after %llu are computed again from their gradients; readers of parameters wait for step "
        "%llu",
        redo->steps, (ull)root->step, (ull)(root->step + redo->steps));
}

/* With workers, before a client can see a model. */
static int begin_recoveries(struct ht_optim *o)
{
    bool read_only = ht_store_read_only(o->store), any = false;
    int rc = read_only && !o->no_replay ? refuse_read_only(o) : 0;

    if (rc)
        return rc;
    lock(o);
    ht_list_for_each_entry(root, &o->roots, struct ht_root, all) {
        if (!root->redo.steps || !root->exists)
            continue;
        /* A mount that changes nothing shows the full step. And no program writes records of a frozen root. */
        if (read_only || root->frozen) {
            root->durable_step = root->step;
            ht_opt_event(HT_EVENT_STEPS_REPLAYED, root->id,
                         "read-only: the model is shown as of step %llu; %zu later steps are computed again by a mount "
                         "that may write",
                         (ull)root->step, root->redo.steps);
            continue;
        }
        begin_recovery(root);
        any = true;
    }
    if (any)
        ht_opt_redo_set_room(o);
    set_all_aside(o);
    /* The thread waits for the lock. */
    rc = any ? -pthread_create(&o->recovery.thread, NULL, recover_all, o) : 0;
    o->recovery.started = any && !rc;
    unlock(o);
    return rc;
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
        return begin_recoveries(o);
    settle_all(o);
    rc = bury_all_orphans(o);
    if (!rc)
        rc = start_threads(o);
    if (!rc)
        rc = begin_recoveries(o);
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
    each_cond(o, pthread_cond_broadcast);
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
    each_cond(o, pthread_cond_destroy);
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
    ht_mutex_init(&o->lock, HT_LOCK_OPTIM);
    each_cond(o, init_cond);
    init_lists(o);
    o->last_step_number = ht_opt_random() >> 2; /* 62 bits, so that the numbers of a mount stay below 2^63 */
    struct ht_participant client = {
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
