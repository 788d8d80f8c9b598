/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repair.c - makes the repairs that the passes have noted.
 *
 * The store is opened once more, now for writing, and leaves out senseless records just as it did for the passes. New
 * names and marks for lost chunks are ordinary transactions. A checkpoint then writes all remaining metadata, and the
 * superblock that names its beginning ends the old log with everything that was left out. Power may fail at any moment:
 * until that superblock is there the next run finds the old log, followed by the finished repairs.
 */
#include "mount-helpers/fsck/fsck.h"

#include "tiering/api/check.h"
#include "tiering/api/tx.h"

/* ------------------------------------------------------------------ objects */

static int delete_in(struct ht_obj *obj, struct ht_tx *tx)
{
    struct ht_obj_stat st;
    int rc = 0;

    ht_obj_stat(obj, &st);
    if (st.scope != 0)
        rc = ht_obj_set_scope(obj, 0, tx);
    if (rc == 0)
        ht_obj_delete(obj, tx);
    return rc;
}

static int delete_object(struct ht_store *s, uint64_t oid)
{
    struct ht_obj *obj = ht_obj_get(s, oid);
    struct ht_tx *tx;

    if (!obj)
        return 0;
    int rc = ht_tx_begin(s, 256, &tx);
    if (rc != 0) {
        ht_obj_put(obj);
        return rc;
    }
    rc = delete_in(obj, tx);
    int error = ht_tx_commit(tx, NULL);
    ht_obj_put(obj);
    return rc != 0 ? rc : error;
}

static int delete_stranger(struct ht_fsck *f, uint64_t oid, uint64_t part)
{
    return delete_object(f->store, oid);
}

static int add_orphan(struct ht_fsck *f, uint64_t oid, uint64_t part)
{
    return ht_ns_lost_found_add(f->ns, oid);
}

/* ------------------------------------------------------------------- chunks */

/* The model goes back to the step before this one. */
static int cut_steps(struct ht_fsck *f, uint64_t root, uint64_t step)
{
    uint64_t oid;
    int rc = 0;

    while (rc == 0 && (oid = ht_optim_redo_cut(f->optim, root, step)) != 0)
        rc = ht_fsck_is_gradients(f, oid) ? delete_object(f->store, oid) : 0;
    return rc;
}

/* A deleted object has none. */
static int lose_chunk(struct ht_fsck *f, uint64_t oid, uint64_t index)
{
    struct ht_obj *obj = ht_obj_get(f->store, oid);
    int rc = obj ? ht_store_lose_chunk(f->store, oid, index) : 0;

    ht_obj_put(obj);
    return rc;
}

/* With the logged steps that would read it. */
static int lose_sharer(struct ht_fsck *f, uint64_t oid, uint64_t index)
{
    uint64_t root, step;
    int rc = ht_store_lose_chunk(f->store, oid, index);

    if (rc == 0 &&
        (ht_optim_redo_owner(f->optim, oid, &root, &step) == 0 ||
         ht_optim_redo_needs(f->optim, oid, &root, &step) == 0))
        rc = cut_steps(f, root, step);
    return rc;
}

/*
 * Space that two references still share. Pass 6 has read all chunks that share space, and those with a wrong checksum
 * are gone. The bytes of these two are the same, and the later one is given up, too.
 */
static int lose_overlaps(struct ht_fsck *f)
{
    size_t count = ht_store_conflicts(f->store, NULL, 0);
    struct ht_ref_conflict *list = calloc(count + 1, sizeof(*list));
    int rc = list ? 0 : -ENOMEM;

    if (rc == 0)
        count = ht_min_u64(count, ht_store_conflicts(f->store, list, count));
    for (size_t i = 0; rc == 0 && i < count; i++)
        rc = lose_sharer(f, list[i].oid, list[i].index);
    free(list);
    return rc;
}

/* ---------------------------------------------------------------- optimizer */

static int set_word(struct ht_fsck *f, uint64_t root, const char *name, const char *text)
{
    uint64_t lsn;
    int rc = ht_ns_setxattr(f->ns, root, name, text, strlen(text), 0);

    return rc != 0 ? rc : ht_scope_commit(f->store, root, &lsn);
}

static int configure_root(struct ht_fsck *f, uint64_t root, uint64_t part)
{
    return set_word(f, root, HT_XATTR_PREFIX "optimizer", ht_optim_root_config(f->optim, root));
}

/* No program knows this word as that of a step, so pins in the vault stay until the content has come back. */
static int mark_cold(struct ht_fsck *f, uint64_t root, uint64_t part)
{
    return set_word(f, root, HT_XATTR_PREFIX "cold", "unknown");
}

/* --------------------------------------------------------------------- all */

static int repair_each(struct ht_fsck *f, const struct ht_fsck_notes *n,
                       int (*repair)(struct ht_fsck *f, uint64_t id, uint64_t part))
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < n->count; i++)
        rc = repair(f, n->list[i].id, n->list[i].part);
    return rc;
}

static int first_round(struct ht_fsck *f)
{
    int rc = repair_each(f, &f->cut_steps, cut_steps);

    for (size_t i = 0; i < f->forget.count; i++)
        ht_optim_forget(f->optim, f->forget.list[i].id, f->forget.list[i].part);
    if (rc == 0)
        rc = ht_ns_reconnect(f->ns);
    if (rc == 0)
        rc = repair_each(f, &f->lose, lose_chunk); /* also chunks of objects that are deleted next */
    if (rc == 0)
        rc = ht_store_need_features(f->store, f->unmarked);
    if (rc == 0)
        rc = repair_each(f, &f->orphans, add_orphan);
    if (rc == 0)
        rc = repair_each(f, &f->strangers, delete_stranger);
    if (rc == 0)
        rc = repair_each(f, &f->cold_roots, mark_cold);
    return rc == 0 ? repair_each(f, &f->unconfigured, configure_root) : rc;
}

static int round_of(struct ht_fsck *f, bool first)
{
    int rc = ht_fsck_open_store(f, f->cut && first, true);

    if (rc == 0)
        rc = first ? first_round(f) : lose_overlaps(f);
    if (rc == 0)
        rc = ht_store_checkpoint(f->store);
    if (rc == 0)
        rc = ht_store_unmount(f->store);
    ht_fsck_close_store(f);
    return rc;
}

int ht_fsck_repair(struct ht_fsck *f)
{
    ht_fsck_close_store(f);
    int rc = round_of(f, true);
    if (rc == 0 && f->overlaps)
        rc = round_of(f, false);
    if (rc < 0)
        ht_error("%s: the repair was not carried through: %s; run hitrain-fsck again", ht_dev_name(f->devs[0]),
                 strerror(-rc));
    return rc;
}
