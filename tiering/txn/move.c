/* SPDX-License-Identifier: Apache-2.0 */
/*
 * move.c - gives stored bytes another place, with all of their owners at once; many in one transaction. Or a compressed
 * frame takes the place of raw bytes, for all owners, too.
 *
 *   read, write, flush -> transaction: a record with the new place for each owner -> the old place is a deferred free
 *
 * References do not know the other owners of their bytes. A caller that moved one of several would store the bytes
 * twice. So it names all owners, and the count of owners says whether one is missing: then the bytes stay.
 *
 * No chunk is held before the transaction. In it everything is looked at again: any change of any owner in between
 * wins, and the bytes stay where they are for all. As with a relocation (relocate.c) the content stays the same, so
 * this may come in the middle of a step.
 */
#include <stdlib.h>

#include "tiering/base/mutant.h"
#include "tiering/tier/placement.h"
#include "tiering/api/tx.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/deferred_free.h"
#include "tiering/object/object.h"
#include "tiering/object/record_bytes.h"
#include "tiering/object/ref.h"
#include "tiering/object/refcount.h"
#include "tiering/object/space.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/flush.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

int ht_move_write(struct ht_move *m, struct ht_ring *ring, void *bytes, uint32_t frame_bytes, bool compacts)
{
    struct ht_chunk_io io = {.obj = m->owner[0].obj};
    struct ht_store *s = io.obj->s;
    struct ht_permit permit;

    if (frame_bytes)
        ht_chunk_write_prepare_frame(&io, bytes, frame_bytes, m->was.visible);
    else
        ht_chunk_write_prepare_copy(&io, bytes, &m->was);
    uint32_t blocks = (uint32_t)ht_div_up(io.ref.stored, HT_BLOCK_BYTES);
    ht_store_lock(s);
    int device = ht_alloc_assign(s->alloc, blocks, HT_ALLOC_HINT_NONE);
    ht_store_unlock(s);
    if (device < 0)
        return -ENOSPC;
    const struct ht_permit_request request = {
        .dev = s->dev[device], .direction = HT_DIRECTION_WRITE, .bytes = blocks * HT_BLOCK_BYTES};
    ht_permit_get(&s->gate, &request, &permit);
    int rc = ht_txn_write_copy(&io, ring, ht_ref_extents(&m->was),
                               (struct ht_alloc_hint){.device = device, .compacts = compacts});
    ht_permit_put(&permit);
    if (!rc)
        m->now = io.ref;
    m->flush_error_passes = io.xfer.flush_error_passes;
    return rc;
}

/* ----------------------------------------------------------- transaction */

static struct ht_chunk *chunk_of(const struct ht_move_owner *w) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_chunk_find(w->obj, w->index);
}

static bool is_unchanged(const struct ht_move *m, const struct ht_move_owner *w) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_obj *o = w->obj;
    struct ht_chunk *c = chunk_of(w);

    return !o->dead && o->published && c && (c->flags & ~HT_CH_LOG_RESERVED) == HT_CH_PUB && !c->exclusive &&
        !c->shared && ht_ref_same_place(&c->pub, &m->was);
}

bool ht_move_may(struct ht_store *s, const struct ht_move *m)
{
    for (unsigned i = 0; i < m->owners; i++)
        if (!is_unchanged(m, &m->owner[i]))
            return false;
    const struct ht_refcount *e = ht_refcount_find(s, &chunk_of(&m->owner[0])->pub);
    return (e ? e->owners : 1) == m->owners || HT_MUTANT("owner-left-behind");
}

/* A frame has only the content that was visible when it was made: does it have what each owner shows? */
static bool has_content(const struct ht_move *m) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned i = 0; m->now.codec != m->was.codec && i < m->owners; i++)
        if (chunk_of(&m->owner[i])->pub.visible > m->now.visible)
            return HT_MUTANT("frame-too-short");
    return true;
}

/* A copy of the new reference for each owner, and owners for all but the first. Changes nothing if it fails. */
static struct ht_ref *make_refs(struct ht_store *s, struct ht_move *m) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_ref *ref = calloc(m->owners, sizeof(*ref));
    unsigned copies = 1, counted = 1;

    if (!ref)
        return NULL;
    m->now.shared = m->owners > 1;
    ref[0] = m->now;
    while (copies < m->owners && !ht_ref_copy(&ref[copies], &m->now))
        copies++;
    while (copies == m->owners && counted < m->owners && !ht_refcount_add(s, &m->now, true))
        counted++;
    if (copies == m->owners && counted == m->owners)
        return ref;
    for (; counted > 1; counted--)
        (void)ht_refcount_drop(s, &m->now, false);
    (void)ht_refcount_drop(s, &m->now, false); /* the first one: the table forgets the place */
    while (copies-- > 1)
        ht_ref_forget(&ref[copies]);
    free(ref);
    return NULL;
}

static void move_owner(const struct ht_move_owner *w, const struct ht_ref *ref, struct ht_tx *tx)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = w->obj;
    struct ht_chunk *c = chunk_of(w);
    struct ht_ref now = *ref;

    now.visible = c->pub.visible; /* fewer, if a truncation was published after the bytes had been read */
    now.kept_raw = c->pub.kept_raw;
    c->generation++;
    ht_record_chunk(&tx->records, o, w->index, c, &now);
    o->stored_blocks += ht_ref_blocks(&now);
    if (now.shared)
        ht_obj_extra(o)->shared_blocks += ht_ref_blocks(&now);
    ht_ref_log_reserve_pieces(o->s, &now);
    ht_tx_free_ref(o, &c->pub);
    c->pub = now;
    ht_note_published(o->s, &c->pub);
}

/* All owners or none. In a transaction, lock held. */
static void move(struct ht_store *s, struct ht_move *m, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!ht_ref_holds(&m->now) || !ht_move_may(s, m) || !has_content(m) || ht_ref_endangered(s, &m->now))
        return;
    struct ht_ref *ref = make_refs(s, m);
    if (!ref)
        return;
    for (unsigned i = 0; i < m->owners; i++)
        move_owner(&m->owner[i], &ref[i], tx);
    free(ref);
    memset(&m->now, 0, sizeof(m->now)); /* the first owner has its extents */
    m->moved = true;
}

static size_t record_bytes(const struct ht_move m[], unsigned count)
{
    size_t bytes = 0;

    for (unsigned i = 0; i < count; i++)
        bytes += m[i].owners * (HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES + ht_ref_extra_bytes(&m[i].now));
    return bytes;
}

/* Durable before any chunk has it: a later failed flush finds it covered. An earlier one may have voided it. */
static int flush_all(struct ht_store *s, const struct ht_move m[], unsigned count)
{
    uint32_t devices = 0;
    int rc = 0;

    ht_store_lock(s);
    for (unsigned i = 0; i < count; i++)
        if (ht_ref_holds(&m[i].now))
            devices |= ht_ref_unflushed(s, &m[i].now);
    ht_store_unlock(s);
    if (ht_flush_devices(s, devices))
        return -EIO;
    ht_store_lock(s);
    for (unsigned i = 0; i < count; i++)
        if (ht_ref_holds(&m[i].now) && ht_ref_is_void(s, &m[i].now, m[i].flush_error_passes))
            rc = -EIO;
    ht_store_unlock(s);
    return rc;
}

static void give_back(struct ht_store *s, struct ht_move m[], unsigned count)
{
    ht_store_lock(s);
    for (unsigned i = 0; i < count; i++)
        if (ht_ref_holds(&m[i].now))
            ht_free_ref_now(s, &m[i].now);
    ht_store_unlock(s);
}

int ht_move_publish(struct ht_store *s, struct ht_move m[], unsigned count, uint64_t *out_lsn)
{
    struct ht_tx *tx;
    int rc = flush_all(s, m, count);

    *out_lsn = 0;
    if (rc) {
        give_back(s, m, count);
        return rc;
    }
    rc = ht_tx_begin(s, record_bytes(m, count), &tx);
    if (rc) {
        give_back(s, m, count);
        return rc;
    }
    ht_store_lock(s);
    for (unsigned i = 0; i < count; i++)
        move(s, &m[i], tx);
    ht_store_unlock(s);
    rc = ht_tx_commit(tx, out_lsn);
    give_back(s, m, count);
    return rc;
}
