/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unmount.c - model roots at an orderly end of the mount: makes everything durable that a client may take for stored.
 *
 * A root without an open step is published as a commit publishes it: finished steps, names, attributes, content. A root
 * with an open step is not published: its content may hold a part of that step, and only a commit publishes one. An
 * event names the loss.
 *
 * No client is left, so the verdict on a root does not change between here and ht_optim_stop.
 */
#include "optim/state/root.h"
#include "optim/step/step_priv.h"

/* A commit of nothing would cost flushes. The writeback has scanned mappings, too. */
static int publish_rest(struct ht_root *root)
{
    struct ht_store *s = root->o->store;
    int rc = ht_scope_writeback(s, root->id);

    return rc || ht_scope_pending_bytes(s, root->id) ? ht_opt_publish_closed(root) : 0;
}

static void name_dropped(struct ht_root *root, uint64_t step, uint64_t durable, bool failed)
{
    ht_opt_event(
        HT_EVENT_STEP_DROPPED, root->id,
        "the mount ends within step %llu, which %s: all that was written below this model since step %llu is dropped; the "
        "next mount finds step %llu",
        (unsigned long long)step, failed ? "has a failed update" : "has no commit", (unsigned long long)durable,
        (unsigned long long)durable);
}

/* Names and other files that were changed since the mount: nobody may publish them without the steps. */
static void name_unpublished(struct ht_root *root, uint64_t durable)
{
    ht_opt_event(
        HT_EVENT_STEP_DROPPED, root->id,
        "logged steps could not be computed again, so all that was changed below this model since the mount is "
        "dropped; the next mount tries again, up to step %llu",
        (unsigned long long)durable);
}

/* A kept step has nothing to write. */
static int finish_root(struct ht_root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    /* The last step may still be in its closer's hands. Changes are published with all logged steps computed. */
    while ((root->async || root->redo.recovering) && !o->stopping)
        wait_changed(o);
    bool failed = root->failure != 0, drop = root->open || failed, exists = root->exists && !root->frozen;
    bool unreplayed = root->redo.failed != 0;
    uint64_t step = root->step + 1, durable = unreplayed ? root->pub_step + root->redo.steps : root->durable_step;
    unlock(o);
    if (!exists)
        return 0;
    if (unreplayed) {
        name_unpublished(root, durable);
        return 0;
    }
    if (!drop)
        return publish_rest(root);
    name_dropped(root, step, durable, failed);
    return 0;
}

/* The root after that one (NULL: the first), with a reference in place of the one on root; NULL: there is none. */
static struct ht_root *next_root(struct ht_optim *o, struct ht_root *root)
{
    lock(o);
    const struct ht_list *pos = root ? root->all.next : o->roots.next;
    struct ht_root *next = pos == &o->roots ? NULL : ht_list_entry(pos, struct ht_root, all);
    if (next)
        next->refs++;
    if (root)
        ht_opt_root_put_locked(root);
    unlock(o);
    return next;
}

int ht_optim_finish(struct ht_optim *o)
{
    int first = 0;

    /* A store whose log failed during the mount reports for each root that it is lost. */
    if (!o->started || (ht_store_read_only(o->store) && !ht_store_failed(o->store)))
        return 0;
    lock(o);
    o->finishing = true;
    notify_changed(o);
    unlock(o);
    for (struct ht_root *root = next_root(o, NULL); root; root = next_root(o, root)) {
        int rc = finish_root(root);
        first = first ? first : rc;
    }
    return first;
}
