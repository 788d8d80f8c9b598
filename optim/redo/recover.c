/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recover.c - after a mount: one thread computes logged steps again, root after root, while clients use other files.
 *
 * The thread holds the gate until the root is ready, as an abort does: readers of parameters and state wait. Gradients,
 * commands and writers of parameters wait, too. The replay leaves out a parameter that a client deletes. It publishes
 * nothing: a crash begins again with the same steps, and no change of a client becomes durable unasked.
 */
#include <limits.h>

#include "tiering/base/activity.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/redo/redo_priv.h"

typedef unsigned long long ull;

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
        ht_opt_root_put_locked(root);
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

int ht_opt_redo_recover(struct ht_optim *o)
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
