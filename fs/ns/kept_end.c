/* SPDX-License-Identifier: Apache-2.0 */
/* kept_end.c - the end of a kept step. Its inodes go at once; those in use are stale until the last reference. */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"
#include "fs/ns/shadow.h"
#include "fs/ns/tree.h"
#include "tiering/base/event.h"

/* Beside its own, a file has the records of its object and its state. */
enum { END_BYTES = 4096, MEMBER_BYTES = 8 * (HT_RECORD_HEADER_BYTES + 8) };

int ht_ns_kept_end_bytes(struct ht_ns *ns, uint64_t ino, size_t *out_bytes)
{
    struct ht_ns_tree_walk w = {.top = ino, .dir = ino};
    const struct ht_ns_entry *e;
    size_t bytes = END_BYTES + MEMBER_BYTES;
    struct ht_slice slice = {0};

    if (!ht_ns_inode_live(ns, ino))
        return -ESTALE;
    while ((e = ht_ns_tree_next(ns, &w))) {
        bytes += MEMBER_BYTES + ht_ns_entry_log_bytes(e);
        ht_ns_slice_next(ns, &slice);
    }
    *out_bytes = bytes;
    return 0;
}

/* Its names, its content and itself. Files that are open stay readable until the last close. */
static void end_member(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_obj *obj = S_ISREG(i->cur.mode) ? ht_obj_get(ns->store, i->ino) : NULL;

    if (obj)
        ht_obj_delete(obj, tx);
    ht_obj_put(obj);
    ht_ns_put_inode_del(tx, i->ino);
    i->flags &= (uint8_t) ~(HT_NS_PUBLISHED | HT_NS_FROZEN | HT_NS_MODEL_ROOT);
    i->flags |= HT_NS_STALE;
    if (ht_ns_unused(i))
        ht_ns_inode_free(ns, i);
    else
        ht_ns_inode_set_root(ns, i, &ns->outside);
}

static void end_names(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    while (i->names) {
        struct ht_ns_entry *e = i->names;
        ht_ns_put_entry(tx, HT_REC_NS_ENTRY_DEL, e, 0);
        ht_ns_dir_remove(ns, e->dir->u.dir, e);
        ht_ns_entry_count(e, -1);
        ht_ns_entry_remove(ns, e);
        ht_ns_entry_free(ns, e);
    }
}

/*
 * Collecting the tree needs memory, which its end cannot wait for: takes an inode from the end of a directory each.
 * Releases the lock in between. The transaction keeps the directories, which have names until they are empty.
 */
static void end_below(struct ht_ns *ns, struct ht_ns_inode *top, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir = top;
    struct ht_slice slice = {0};

    for (; dir != top || dir->u.dir->live > 0; ht_ns_slice_next(ns, &slice)) {
        const struct ht_ns_dir *d = dir->u.dir;
        if (d->live == 0) {
            struct ht_ns_inode *above = d->self->dir;
            end_names(ns, dir, tx);
            end_member(ns, dir, tx);
            dir = above;
            continue;
        }
        uint32_t s = d->slot_count;
        while (!ht_ns_dir_entry(d, s - 1))
            s--;
        struct ht_ns_inode *i = ht_ns_dir_entry(d, s - 1)->inode;
        if (ht_ns_is_dir(i)) {
            dir = i;
            continue;
        }
        end_names(ns, i, tx);
        end_member(ns, i, tx);
    }
}

void ht_ns_ended(void *ctx, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx)
{
    struct ht_ns *ns = ctx;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_kept_step *x = ht_ns_kept_step(ns, scope);
    if (x) {
        struct ht_ns_inode *top = ht_ns_inode_find(ns, scope);
        struct ht_ns_root *root = ht_ns_root(top);
        struct ht_ns_record r = {.type = HT_REC_NS_KEPT_DEL, .ino = scope};
        ht_ns_record_encode(ht_tx_records(tx), &r);
        ht_store_log_unreserve(ns->store, ht_ns_kept_log_bytes(&x->about));
        ht_ns_kept_remove(ns, x); /* first: nobody finds half of a step */
        end_below(ns, top, tx);
        end_member(ns, top, tx);
        ht_ns_root_free_empty(ns, root);
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
}

int ht_ns_kept_forget(struct ht_ns *ns, uint64_t root, const char *name)
{
    struct ht_ns_kept about;
    uint64_t lsn;
    size_t bytes;
    int rc = ht_ns_kept_find(ns, root, name, &about);

    if (rc != 0)
        return rc;
    ht_rwlock_wrlock(ht_ns_lock(ns));
    rc = ht_ns_kept_end_bytes(ns, about.ino, &bytes);
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (rc == 0)
        rc = ht_kept_end(ns->store, about.ino, bytes, &lsn);
    return rc == 0 ? ht_store_sync(ns->store, lsn) : rc;
}

/* -------------------------------------------------------------- a full store */

/* The oldest step that a vault has and nobody holds, with a higher number than after, and its own bytes. */
static uint64_t next_archived(struct ht_ns *ns, uint64_t after, struct ht_ns_kept *out)
{
    char job[HT_KEPT_NAME_MAX + 1];
    uint64_t stored_bytes, own_bytes = 0;

    do {
        bool found = false;
        ht_rwlock_rdlock(ht_ns_lock(ns));
        ht_list_for_each_entry(x, &ns->kept, const struct ht_ns_kept_step, link) {
            found = x->about.ino > after && x->holds == 0;
            if (found) {
                *out = x->about;
                break;
            }
        }
        ht_rwlock_unlock(ht_ns_lock(ns));
        if (!found)
            return 0;
        after = out->ino;
        if (ht_ns_kept_archived(ns, out->ino, job) == 0 &&
            ht_store_scope_space(ns->store, out->ino, &stored_bytes, &own_bytes) != 0)
            own_bytes = 0;
    } while (own_bytes == 0);
    return own_bytes;
}

uint64_t ht_ns_kept_could_give(void *ctx)
{
    struct ht_ns_kept about = {0};
    uint64_t bytes = 0;

    for (uint64_t own; (own = next_archived(ctx, about.ino, &about)) > 0;)
        bytes += own;
    return bytes;
}

uint64_t ht_ns_kept_give_up(void *ctx, uint64_t bytes)
{
    struct ht_ns *ns = ctx;
    struct ht_ns_kept about = {0};
    uint64_t given = 0;

    for (uint64_t own; given < bytes && (own = next_archived(ns, about.ino, &about)) > 0;) {
        if (ht_ns_kept_forget(ns, about.root, about.name) != 0)
            continue;
        ht_event(HT_EVENT_KEPT_GIVEN_UP, NULL, "the store is full: kept step %s is in a vault, and goes from here",
                 about.name);
        given += own;
    }
    return given;
}
