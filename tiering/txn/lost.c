/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lost.c - gives up the stored bytes of a chunk: fsck's repair of references that lead nowhere, or to other bytes.
 *
 * The mark is in the log, in place of the reference. Reading the chunk is -EIO from then on, until the whole chunk is
 * written anew, cut off or deleted. A feature bit, durable before the first mark, keeps away programs that do not know
 * such marks.
 */
#include "tiering/object/context.h"
#include "tiering/object/space.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

/* The space stays taken in this mount: it may belong to another chunk, or to no device. */
static int lose(struct ht_store *s, struct ht_tx *tx, uint64_t oid, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = ht_obj_find_locked(s, oid);
    struct ht_chunk *c = o && !o->dead ? ht_chunk_find(o, index) : NULL;

    if (!c || !(c->flags & HT_CH_PUB))
        return -ENOENT;
    if (ht_chunk_unpublished(c) || c->slot != HT_SLOT_NONE)
        return -EBUSY;
    uint64_t visible = ht_min_u64(c->pub.visible ? c->pub.visible : 1, ht_obj_bytes_per_chunk(o));
    if (ht_ref_lost(&c->pub) && c->pub.visible == visible)
        return 0;
    s->frees.lost_blocks += c->pub.shared ? 0 : ht_ref_countable(s, &c->pub);
    ht_obj_forget_stored(o, &c->pub);
    ht_ref_forget(&c->pub);
    c->pub = (struct ht_ref){.visible = visible & HT_VISIBLE_MASK, .codec = HT_CODEC_LOST};
    c->generation++;
    s->objects.lost_chunks++;
    ht_record_chunk(&tx->records, o, index, c, &c->pub);
    return 0;
}

int ht_store_lose_chunk(struct ht_store *s, uint64_t oid, uint64_t index)
{
    struct ht_tx *tx;
    int rc = ht_store_need_features(s, HT_FEAT_REFUSE_LOST);

    if (rc)
        return rc;
    rc = ht_tx_begin(s, HT_CHUNK_RECORD_BYTES, &tx);
    if (rc)
        return rc;
    ht_store_lock(s);
    rc = lose(s, tx, oid, index);
    ht_store_unlock(s);
    int error = ht_tx_commit(tx, NULL);
    return rc ? rc : error;
}
