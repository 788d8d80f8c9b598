/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recompress_batch.c - compressed frames of published chunks.
 *
 *   copy of the reference -> read, verify -> encode --no gain--> marked, until it is written again
 *                                              | gain
 *                                              v
 *                           write the frame to new space, and it waits
 *                                              | 64 frames, 8 MiB of them, very many owners, or the end of the round
 *                                              v
 *                           one flush -> one transaction: all owners of the content have its frame. Another one for
 *                           content of very many owners: without room for it in the log that stays raw, as without gain
 *
 * No chunk, no object and no lock is held while frames wait. So a chunk may change before its frame is published: then
 * the transaction leaves it as it is, and the frame's space is free again (txn/move.c). What the checksum of the
 * reference does not cover was freed meanwhile, and is left alone. Damage is scrub's.
 *
 * Frames that wait take space. So they are at most a quarter of the available space, and a store that has no space for
 * the next frame publishes first, and waits until the space of the raw chunks is free.
 */

#include "tiering/codec/frame.h"
#include "tiering/api/tx.h"
#include "tiering/object/context.h"
#include "tiering/data/chunk_io.h"
#include "tiering/engine/engine_priv.h"
#include "tiering/engine/recompress_batch.h"

enum {
    WAITING_BLOCKS_MAX = 8 * HT_GROUP_BLOCKS,
    WAITING_SHARE = 4, /* of the available space */
};

int ht_recompress_batch_init(struct ht_recompress_batch *b, struct ht_store *s)
{
    *b = (struct ht_recompress_batch){.s = s};
    b->raw = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    b->frame = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    if (!b->raw || !b->frame)
        return -ENOMEM;
    return ht_encoder_new(&b->encoder);
}

static void forget_waiting(struct ht_recompress_batch *b)
{
    for (unsigned i = 0; i < b->count; i++) {
        ht_ref_forget(&b->move[i].was);
        ht_ref_forget(&b->move[i].now);
    }
    b->count = 0;
    b->owners = 0;
    b->blocks = 0;
}

void ht_recompress_batch_destroy(struct ht_recompress_batch *b)
{
    forget_waiting(b);
    ht_encoder_free(b->encoder);
    free(b->owner);
    free(b->raw);
    free(b->frame);
}

uint64_t ht_recompress_batch_bytes(const struct ht_recompress_batch *b)
{
    return ht_encoder_bytes(b->encoder) + 2 * HT_CHUNK_BYTES;
}

/* --------------------------------------------------------------- publishing */

/*
 * Takes a reference to the object of each owner that is still there and may be compressed. A frame that lacks one
 * is not published. Owners of one object often follow each other.
 */
static void take_objects(struct ht_recompress_batch *b)
{
    const struct ht_recompress *c = &b->s->engine->recompress;
    struct ht_slice slice = {0};
    uint64_t last = 0;
    bool may = false;

    for (unsigned i = 0; i < b->owners; i++) {
        if (b->owner[i].oid != last) {
            last = b->owner[i].oid;
            may = c->may(c->ctx, last);
        }
        b->owner[i].oid = may ? last : 0;
    }
    ht_store_lock(b->s);
    for (unsigned i = 0; i < b->owners; i++, ht_slice_next(b->s, &slice)) {
        struct ht_obj *o = ht_obj_find_locked(b->s, b->owner[i].oid);
        b->owner[i].obj = o && !o->dead ? o : NULL;
        if (b->owner[i].obj)
            o->refs++;
    }
    ht_store_unlock(b->s);
}

static void put_objects(struct ht_recompress_batch *b)
{
    struct ht_slice slice = {0};

    ht_store_lock(b->s);
    for (unsigned i = 0; i < b->owners; i++, ht_slice_next(b->s, &slice)) {
        if (b->owner[i].obj)
            ht_obj_put_locked(b->owner[i].obj);
        b->owner[i].obj = NULL;
    }
    ht_store_unlock(b->s);
}

/* No later round tries it again. */
static void keep_raw(struct ht_store *s, const struct ht_move *m)
{
    struct ht_slice slice = {0};

    ht_store_lock(s);
    for (unsigned i = 0; i < m->owners; i++, ht_slice_next(s, &slice)) {
        const struct ht_move_owner *w = &m->owner[i];
        struct ht_chunk *c = w->obj ? ht_chunk_find(w->obj, w->index) : NULL;
        if (c && (c->flags & HT_CH_PUB) && ht_ref_same_place(&c->pub, &m->was))
            c->pub.kept_raw = 1;
    }
    ht_store_unlock(s);
}

/* Some of the frames, in a transaction. */
static int publish_frames(struct ht_recompress_batch *b, struct ht_move m[], unsigned n)
{
    _Atomic uint64_t *figure = b->s->engine->row[HT_ENGINE_RECOMPRESS].figure;
    uint32_t before[HT_RECOMPRESS_FRAMES_MAX], after[HT_RECOMPRESS_FRAMES_MAX];
    uint64_t lsn = 0;

    for (unsigned i = 0; i < n; i++) {
        before[i] = ht_ref_blocks(&m[i].was);
        after[i] = ht_ref_blocks(&m[i].now);
    }
    int rc = n ? ht_move_publish(b->s, m, n, &lsn) : 0;
    b->lsn = lsn ? lsn : b->lsn;
    for (unsigned i = 0; !rc && i < n; i++) {
        if (!m[i].moved)
            continue;
        figure[HT_RECOMPRESS_CHUNKS]++;
        figure[HT_RECOMPRESS_RAW] += (uint64_t)before[i] * HT_BLOCK_BYTES;
        figure[HT_RECOMPRESS_SAVED] += (uint64_t)(before[i] - after[i]) * HT_BLOCK_BYTES;
    }
    return rc;
}

/* A log without room for the records of very many owners keeps them as they are. Later content has its turn. */
static int publish_last(struct ht_recompress_batch *b, struct ht_move *m)
{
    int rc = publish_frames(b, m, 1);

    if (rc != -ENOSPC)
        return rc;
    keep_raw(b->s, m);
    return 0;
}

int ht_recompress_batch_publish(struct ht_recompress_batch *b)
{
    unsigned n = b->count;

    take_objects(b);
    bool alone = n && b->move[n - 1].owners > HT_RECOMPRESS_OWNERS / 2; /* so many that it may fail for that */
    int rc = publish_frames(b, b->move, n - alone);

    if (alone && !rc)
        rc = publish_last(b, &b->move[n - 1]);
    put_objects(b);
    ht_recompress_batch_give_back(b); /* what was not tried */
    return rc;
}

void ht_recompress_batch_give_back(struct ht_recompress_batch *b)
{
    ht_store_lock(b->s);
    for (unsigned i = 0; i < b->count; i++)
        if (ht_ref_holds(&b->move[i].now))
            ht_free_ref_now(b->s, &b->move[i].now);
    ht_store_unlock(b->s);
    forget_waiting(b);
}

/* -------------------------------------------------------------------- space */

static uint64_t available(struct ht_store *s)
{
    return ht_store_locked(s, ht_alloc_available(s->alloc));
}

bool ht_recompress_batch_is_full(struct ht_recompress_batch *b)
{
    return b->count == HT_RECOMPRESS_FRAMES_MAX || b->blocks >= WAITING_BLOCKS_MAX ||
        b->owners >= HT_RECOMPRESS_OWNERS || b->blocks * WAITING_SHARE > available(b->s);
}

/* For the longest frame: in blocks that are free now, and that no promise counts on. */
static bool has_space(struct ht_store *s, const struct ht_ref *was)
{
    return ht_store_locked(s, ht_min_u64(ht_alloc_available(s->alloc), ht_alloc_free_blocks(s->alloc))) + 1 >=
        ht_ref_blocks(was);
}

/* The raw chunks of frames that wait, once their transaction is durable. 0 also when there are none. */
static int free_raw_chunks(struct ht_recompress_batch *b)
{
    int rc = ht_recompress_batch_publish(b);

    if (!rc && b->lsn)
        rc = ht_store_sync(b->s, b->lsn);
    if (!rc)
        b->lsn = 0;
    return rc;
}

/* Before anything is read for it. */
static int need_space(struct ht_recompress_batch *b, const struct ht_ref *was)
{
    if (has_space(b->s, was))
        return 0;
    int rc = free_raw_chunks(b);
    if (rc)
        return rc;
    return has_space(b->s, was) ? 0 : -ENOSPC;
}

/* ------------------------------------------------------------------ a chunk */

static int read_content(struct ht_recompress_batch *b, const struct ht_move *m)
{
    struct ht_chunk_io io = {.obj = m->owner[0].obj, .index = m->owner[0].index, .ref = m->was, .data = b->raw};

    return ht_chunks_read_permitted(&io, 1);
}

/* For so many owners more. -ENOMEM */
static int need_room(struct ht_recompress_batch *b, unsigned more)
{
    unsigned had = b->owners_cap;
    int rc = ht_move_make_room(&b->owner, &b->owners_cap, b->owners + more, b->move, b->count);

    b->s->engine->recompress.bytes += (b->owners_cap - had) * sizeof(*b->owner);
    return rc;
}

/* The frame waits then. */
static int write_frame(struct ht_recompress_batch *b, struct ht_ring *ring, const struct ht_move *from, uint32_t len)
{
    struct ht_move *m = &b->move[b->count];

    int rc = need_room(b, from->owners);
    if (rc)
        return rc;
    *m = (struct ht_move){.owner = from->owner, .owners = from->owners};
    rc = ht_ref_copy(&m->was, &from->was);
    if (rc)
        return rc;
    rc = ht_move_write_frame(m, ring, b->frame, len);
    if (rc) {
        ht_ref_forget(&m->was);
        return rc;
    }
    m->owner = &b->owner[b->owners];
    for (unsigned i = 0; i < m->owners; i++)
        b->owner[b->owners++] = (struct ht_move_owner){.index = from->owner[i].index, .oid = from->owner[i].obj->oid};
    b->blocks += ht_ref_blocks(&m->now);
    b->count++;
    return 0;
}

/* What is free may lie in too many pieces: then it needs the space of the raw chunks, too. */
static int write_frame_somewhere(struct ht_recompress_batch *b, struct ht_ring *ring, const struct ht_move *m,
                                 uint32_t len)
{
    int rc = write_frame(b, ring, m, len);

    if (rc != -ENOSPC || !(b->count || b->lsn))
        return rc;
    rc = free_raw_chunks(b);
    return rc ? rc : write_frame(b, ring, m, len);
}

int ht_recompress_batch_encode(struct ht_recompress_batch *b, const struct ht_move *m, const void *content,
                               uint64_t *out_bytes)
{
    const struct ht_ref *was = &m->was;
    struct ht_ring *ring = ht_store_ring(b->s);
    int len = ring ? ht_codec_encode(b->encoder, content, was->visible, b->frame) : -ENOMEM;

    if (len < 0)
        return len;
    if (!len || ht_div_up((uint32_t)len, HT_BLOCK_BYTES) >= ht_ref_blocks(was)) {
        keep_raw(b->s, m);
        b->s->engine->row[HT_ENGINE_RECOMPRESS].figure[HT_RECOMPRESS_KEPT_RAW]++;
        return 0;
    }
    *out_bytes += ht_round_up((uint32_t)len, HT_BLOCK_BYTES);
    int rc = ht_store_need_features(b->s, HT_FEAT_REFUSE_PLANES); /* durable before the first frame */
    return rc ? rc : write_frame_somewhere(b, ring, m, (uint32_t)len);
}

int ht_recompress_batch_add(struct ht_recompress_batch *b, const struct ht_move *m, uint64_t *out_bytes)
{
    int rc = need_space(b, &m->was);

    if (rc)
        return rc;
    rc = read_content(b, m);
    *out_bytes += m->was.stored;
    if (rc == -EIO)
        keep_raw(b->s, m); /* until the next mount */
    if (rc)
        return rc == -ENOMEM ? rc : 0;
    return ht_recompress_batch_encode(b, m, b->raw, out_bytes);
}
