/* SPDX-License-Identifier: Apache-2.0 */
/*
 * share.c - a chunk's published content without space of its own: another chunk's bytes, a hole, or a mark that it is
 * lost.
 *
 *   own bytes --transaction: the record names the bytes of the other owner------> its own space becomes a deferred free
 *   own bytes, all zeros --transaction: a record ends the chunk-----------------> the same
 *   a reference that leads nowhere --transaction: a record marks it as lost-----> the space stays taken
 *
 * What the chunk shows stays the same, so this may come between an open step and its commit, as a move may. A
 * crash leaves the record or not, and the old space is not used again before the record is durable.
 *
 * The caller has read and compared the bytes before the transaction, and holds nothing meanwhile. So the transaction
 * looks at everything: both objects are the same version, and both chunks have the same place. Any change in
 * between wins. Bytes that a chunk still has then were never free, so what the caller has read were these.
 *
 * Many chunks share in one transaction: each alone, so one that has changed keeps no other from it.
 *
 * An object with a rewrite reserve keeps its own bytes: shared space does not come back with a rewrite, so the reserve
 * would have to grow by as much as is freed.
 */
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/data/flush.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

bool ht_obj_may_share(const struct ht_obj *o)
{
    return !o->dead && !o->deleted && !o->leaving && o->published && o->obj_class != HT_CLASS_SCRATCH && !o->dirty &&
        !o->writing && !o->unpublished && !o->extra->rewrite_reserve_blocks && !o->extra->shm && !ht_obj_is_volatile(o);
}

static bool is_present(const struct ht_store *s, const struct ht_ref *ref)
{
    uint32_t devices = ht_ref_devices(ref);

    for (unsigned i = 0; i < s->dev_count; i++)
        if ((devices >> i & 1) && (!s->dev[i] || ht_device_is_closed(s, i)))
            return false;
    return true;
}

bool ht_chunk_may_share(const struct ht_store *s, const struct ht_chunk *c)
{
    if ((c->flags & ~HT_CH_LOG_RESERVED) != HT_CH_PUB || !ht_ref_holds(&c->pub) || ht_ref_is_cold(&c->pub))
        return false;
    return (c->slot == HT_SLOT_NONE || !ht_arena_image(s->arena, c->slot)->dirty) && is_present(s, &c->pub);
}

struct ht_chunk *ht_sharer_find(struct ht_store *s, const struct ht_sharer_side *x, struct ht_obj **out_o)
{
    struct ht_chunk *c = ht_chunk_find_in(s, x->oid, x->index, out_o);

    if (!c || !ht_obj_may_share(*out_o) || !ht_chunk_may_share(s, c))
        return NULL;
    bool same = (*out_o)->version == x->version && ht_ref_place(&c->pub) == x->place;
    return same || HT_MUTANT("dedup-unowned") ? c : NULL;
}

/* 0: nothing has changed, and no thread holds the chunk. */
static int check(struct ht_store *s, const struct ht_sharer_side *x, struct ht_obj **out_o, struct ht_chunk **out_c)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c = *out_c = ht_sharer_find(s, x, out_o);

    if (!c)
        return -ESTALE;
    return c->exclusive || c->shared ? -EAGAIN : 0;
}

/* Blocks that come free when the chunk releases its bytes. */
static uint32_t freed_by(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_refcount *e = ht_refcount_find(s, &c->pub);

    return e && e->owners > 1 ? 0 : ht_ref_blocks(&c->pub);
}

/* The first chunk's bytes with one more owner, to be installed. Nothing fails afterwards. */
static int own_first(struct ht_store *s, const struct ht_sharer *x, const struct ht_obj *other,
                     const struct ht_ref *own, struct ht_ref *out) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *first;
    struct ht_obj *o;
    int rc = check(s, &x->first, &o, &first);

    if (rc)
        return rc;
    const struct ht_ref *ref = &first->pub;
    if (ref->stored != own->stored || ref->codec != own->codec || ref->checksum != own->checksum ||
        o->chunk_shift != other->chunk_shift)
        return -ESTALE;
    if (ht_ref_endangered(s, ref))
        return -EAGAIN;
    return ht_ref_pieces_fit(s, ref, 1) ? ht_chunk_share(o, first, out) : -ENOSPC;
}

static int take_over(struct ht_store *s, struct ht_sharer *x, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c;
    struct ht_obj *o;
    struct ht_ref ref;
    int rc = check(s, &x->other, &o, &c);

    if (!rc)
        rc = own_first(s, x, o, &c->pub, &ref);
    if (rc)
        return rc;
    x->freed_blocks = freed_by(s, c);
    ref.visible = c->pub.visible;
    c->generation++;
    ht_record_chunk(&tx->records, o, x->other.index, c, &ref);
    o->stored_blocks += ht_ref_blocks(&ref);
    ht_obj_count_shared(o, &ref, 1);
    ht_ref_log_reserve_pieces(s, &ref);
    ht_tx_free_ref(o, &c->pub);
    c->pub = ref;
    ht_refcount_named(s, &c->pub);
    ht_note_published(s, &c->pub);
    return 0;
}

/* A clean image has only zeros: it goes, too. */
static int make_hole(struct ht_store *s, struct ht_sharer *x, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c;
    struct ht_obj *o;
    int rc = check(s, &x->other, &o, &c);

    if (rc)
        return rc;
    x->freed_blocks = freed_by(s, c);
    ht_chunk_drop_image(o, c, x->other.index);
    ht_record_chunk_del(&tx->records, o->oid, x->other.index);
    ht_tx_free_ref(o, &c->pub);
    c->flags &= (uint8_t)~HT_CH_PUB;
    c->generation++;
    s->objects.chunks--;
    ht_chunk_drop_log_reserve(o, c);
    ht_chunk_trim(o, x->other.index);
    return 0;
}

/* May it share now? Asked again in the transaction. */
static int look_at(struct ht_store *s, const struct ht_sharer *x) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c;
    struct ht_obj *o;
    int rc = check(s, &x->other, &o, &c);

    return rc || !x->first.oid ? rc : check(s, &x->first, &o, &c);
}

int ht_chunks_share(struct ht_store *s, struct ht_sharer x[], unsigned n)
{
    struct ht_tx *tx;
    size_t bytes = 0;

    ht_store_lock(s);
    for (unsigned i = 0; i < n; i++) {
        x[i].rc = look_at(s, &x[i]);
        bytes += x[i].rc ? 0 : HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES + x[i].first.extra_bytes;
    }
    ht_store_unlock(s);
    if (!bytes)
        return 0;
    int rc = ht_tx_begin(s, bytes, &tx);
    if (rc)
        return rc;
    ht_store_lock(s);
    for (unsigned i = 0; i < n; i++)
        if (!x[i].rc)
            x[i].rc = x[i].first.oid ? take_over(s, &x[i], tx) : make_hole(s, &x[i], tx);
    ht_store_unlock(s);
    return ht_tx_commit(tx, NULL);
}

/* ------------------------------------------------------------------- loss */

/*
 * fsck's repair of references that lead nowhere, or to other bytes. Reading the chunk is -EIO from then on, until the
 * whole chunk is written anew, cut off or deleted. A feature bit, durable before the first mark, keeps away programs
 * that do not know such marks.
 */

/* The space stays taken in this mount: it may belong to another chunk, or to no device. */
static int lose(struct ht_store *s, struct ht_tx *tx, uint64_t oid, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o;
    struct ht_chunk *c = ht_chunk_find_in(s, oid, index, &o);

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
    rc = ht_store_locked(s, lose(s, tx, oid, index));
    int error = ht_tx_commit(tx, NULL);
    return rc ? rc : error;
}
