/* SPDX-License-Identifier: Apache-2.0 */
/*
 * end.c - what becomes of model roots when the mount ends in order: what a client may take for stored is made durable.
 *
 * A root without an open step is published as a commit publishes it: finished steps, names, attributes, content. Of a root with an open
 * step nothing is: its content may hold a part of that step, and only a commit publishes one. An event names what goes.
 *
 * No client is left, so the verdict on a root does not change between here and ht_optim_stop.
 */
#include "optim/optim_priv.h"

#include "tiering/base/event.h"

/* Is there something that a publication would make durable? Mappings were looked at, and content written back. */
static bool is_unpublished(struct root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    bool counts = ht_opt_is_unpublished(root);
    unlock(o);
    return counts || ht_scope_pending_bytes(o->store, root->id) > 0 ||
        (o->hooks.pending_bytes && o->hooks.pending_bytes(o->hooks.ctx, root->id) > 0);
}

static int publish_rest(struct root *root)
{
    int ret = ht_scope_writeback(root->o->store, root->id);

    return ret || is_unpublished(root) ? ht_opt_publish_closed(root) : 0;
}

static void name_dropped(struct root *root, uint64_t step, uint64_t durable, bool failed)
{
    const struct ht_event_about about = {.id = root->id};

    ht_event(
        HT_EVENT_STEP_DROPPED, &about,
        "the mount ends within step %llu, which %s: all that was written below this model since step %llu is dropped; the "
        "next mount finds step %llu",
        (unsigned long long)step, failed ? "has a failed update" : "has no commit", (unsigned long long)durable,
        (unsigned long long)durable);
}

static int finish_root(struct root *root)
{
    struct ht_optim *o = root->o;

    lock(o);
    bool failed = root->failure != 0, drop = root->open || failed, exists = root->exists;
    uint64_t step = root->step + 1, durable = root->pub_step;
    unlock(o);
    if (!exists)
        return 0;
    if (!drop)
        return publish_rest(root);
    name_dropped(root, step, durable, failed);
    return 0;
}

/* The root behind that one (NULL: the first) with a reference, in place of the one on that; NULL: there is none. */
static struct root *next_root(struct ht_optim *o, struct root *root)
{
    lock(o);
    const struct ht_list *pos = root ? root->all.next : o->roots.next;
    struct root *next = pos == &o->roots ? NULL : ht_list_entry(pos, struct root, all);
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

    /* One whose log failed while it was mounted says of each root that it is not kept. */
    if (!o->started || (ht_store_read_only(o->store) && !ht_store_failed(o->store)))
        return 0;
    for (struct root *root = next_root(o, NULL); root; root = next_root(o, root)) {
        int ret = finish_root(root);
        first = first ? first : ret;
    }
    return first;
}
