/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lost.c - giving up what a chunk had stored: fsck's repair of references that lead nowhere, or to other bytes.
 *
 * The mark is in the log, in place of the reference. Reading the chunk is -EIO from then on, until all of it is written
 * anew, cut off or deleted. Programs that do not know such marks are kept away by a feature bit, durable before the first.
 */
#include "tiering/store/store_priv.h"

static int note_feature(struct ht_store *s)
{
    int rc = 0;
    ht_mutex_lock(&s->super_lock);
    if (!(s->sb.feat_refuse & HT_FEAT_REFUSE_LOST)) {
        s->sb.feat_refuse |= HT_FEAT_REFUSE_LOST;
        rc = ht_store_write_super(s);
    }
    ht_mutex_unlock(&s->super_lock);
    return rc;
}

/* The space stays taken in this mount: it may be another's, or on no device. Lock held. */
static int lose(struct ht_store *s, struct ht_tx *tx, uint64_t oid, uint64_t index)
{
    struct ht_obj *o = ht_obj_find_locked(s, oid);
    struct ht_chunk *c = o && !o->dead ? ht_chunk_find(o, index) : NULL;
    if (!c || !(c->flags & CH_PUB))
        return -ENOENT;
    if (ht_chunk_unpublished(c) || c->slot != HT_SLOT_NONE)
        return -EBUSY;
    uint64_t visible = ht_min_u64(c->pub.visible ? c->pub.visible : 1, ht_obj_bytes_per_chunk(o));
    if (ht_ref_lost(&c->pub) && c->pub.visible == visible)
        return 0;
    ht_obj_forget_stored(o, &c->pub);
    ht_ref_forget(&c->pub);
    c->pub = (struct ht_ref){.visible = visible & HT_VISIBLE_MASK, .codec = HT_CODEC_LOST};
    c->generation++;
    s->lost_chunks++;
    ht_record_chunk(&tx->records, o, index, c, &c->pub);
    return 0;
}

int ht_store_lose_chunk(struct ht_store *s, uint64_t oid, uint64_t index)
{
    struct ht_tx *tx;
    int rc = note_feature(s);
    if (!rc)
        rc = ht_tx_begin(s, HT_CHUNK_RECORD_BYTES, &tx);
    if (rc)
        return rc;
    ht_store_lock(s);
    rc = lose(s, tx, oid, index);
    ht_store_unlock(s);
    int error = ht_tx_commit(tx, NULL);
    return rc ? rc : error;
}
