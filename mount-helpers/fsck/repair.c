/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repair.c - doing what the passes have noted.
 *
 * The store is opened once more, now to be written, and leaves out what makes no sense just as it did for the passes.
 * Names for what has none, and marks for what is lost, are transactions as any other. A compaction then writes down all
 * that is left, and the superblock that names its beginning ends the log of before, with everything in it that was left
 * out. Power may fail at any moment: until that superblock is there the next run finds the old log, and
 * behind it what was done already.
 */
#include "mount-helpers/fsck/fsck.h"

#include <stdlib.h>

#include "tiering/base/log.h"

/* ------------------------------------------------------------------ objects */

static int delete_in(struct ht_obj *obj, struct ht_tx *tx)
{
    struct ht_obj_stat st;
    int ret = 0;

    ht_obj_stat(obj, &st);
    if (st.scope != 0)
        ret = ht_obj_set_scope(obj, 0, tx);
    if (ret == 0)
        ht_obj_delete(obj, tx);
    return ret;
}

static int delete_object(struct ht_store *s, uint64_t oid)
{
    struct ht_obj *obj = ht_obj_get(s, oid);
    struct ht_tx *tx;
    int ret = obj != NULL ? ht_tx_begin(s, 256, &tx) : 0, error;

    if (obj == NULL || ret != 0) {
        ht_obj_put(obj);
        return ret;
    }
    ret = delete_in(obj, tx);
    error = ht_tx_commit(tx, NULL);
    ht_obj_put(obj);
    return ret != 0 ? ret : error;
}

static int rescue_orphans(struct ht_fsck *f)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < f->orphans.count; i++)
        ret = ht_ns_adopt(f->ns, f->orphans.list[i].id);
    for (size_t i = 0; ret == 0 && i < f->strangers.count; i++)
        ret = delete_object(f->store, f->strangers.list[i].id);
    return ret;
}

/* ------------------------------------------------------------------- chunks */

static int lose_chunks(struct ht_fsck *f)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < f->lose.count; i++)
        ret = ht_store_lose_chunk(f->store, f->lose.list[i].id, f->lose.list[i].part);
    return ret;
}

/*
 * Space that two references still share. Pass 6 has read all that share any, and what has a wrong checksum is gone: the bytes of these two
 * are the same, and the later one goes, too.
 */
static int lose_overlaps(struct ht_fsck *f)
{
    size_t count = ht_store_conflicts(f->store, NULL, 0);
    struct ht_ref_conflict *list = calloc(count + 1, sizeof(*list));
    int ret = list != NULL ? 0 : -ENOMEM;

    if (ret == 0)
        count = ht_min_u64(count, ht_store_conflicts(f->store, list, count));
    for (size_t i = 0; ret == 0 && i < count; i++)
        ret = ht_store_lose_chunk(f->store, list[i].oid, list[i].index);
    free(list);
    return ret;
}

/* ---------------------------------------------------------------- optimizer */

static void forget_parameters(struct ht_fsck *f)
{
    for (size_t i = 0; i < f->forget.count; i++)
        ht_optim_forget(f->optim, f->forget.list[i].id, f->forget.list[i].part);
}

static int configure_root(struct ht_fsck *f, uint64_t root)
{
    const char *text = ht_optim_root_config(f->optim, root);
    struct ht_tx *tx;
    int ret = ht_ns_setxattr(f->ns, root, HT_XATTR_PREFIX "optimizer", text, strlen(text), 0);

    if (ret == 0)
        ret = ht_tx_begin(f->store, ht_ns_root_pending_bytes(f->ns, root), &tx);
    if (ret != 0)
        return ret;
    ht_ns_root_publish(f->ns, root, tx);
    return ht_tx_commit(tx, NULL);
}

static int configure_roots(struct ht_fsck *f)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < f->unconfigured.count; i++)
        ret = configure_root(f, f->unconfigured.list[i].id);
    return ret;
}

/* --------------------------------------------------------------------- all */

static int first_round(struct ht_fsck *f)
{
    int ret;

    forget_parameters(f);
    ret = ht_ns_reconnect(f->ns);
    if (ret == 0)
        ret = lose_chunks(f); /* also of what is deleted next */
    if (ret == 0)
        ret = rescue_orphans(f);
    return ret == 0 ? configure_roots(f) : ret;
}

static int round_of(struct ht_fsck *f, bool first)
{
    int ret = ht_fsck_open_store(f, f->cut && first, true);

    if (ret == 0)
        ret = first ? first_round(f) : lose_overlaps(f);
    if (ret == 0)
        ret = ht_store_compact(f->store);
    if (ret == 0)
        ret = ht_store_unmount(f->store);
    ht_fsck_close_store(f);
    return ret;
}

int ht_fsck_repair(struct ht_fsck *f)
{
    int ret;

    ht_fsck_close_store(f);
    ret = round_of(f, true);
    if (ret == 0 && f->overlaps)
        ret = round_of(f, false);
    if (ret < 0)
        ht_error("%s: the repair was not carried through: %s; run hitrain-fsck again", ht_dev_name(f->devs[0]),
                 strerror(-ret));
    return ret;
}
