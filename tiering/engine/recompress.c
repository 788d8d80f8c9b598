/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recompress.c - compresses content that nothing has changed for a while.
 *
 *   asleep --compress_after=--> a round: a pass over all content (pass.h) --each that is raw--> a batch of frames
 *      ^                             |                                                              '--> published
 *      |                             v
 *      '------- all was looked at, or an error
 *
 * The pass finds published raw chunks of objects that may be compressed and have the same version as in the round
 * before. Content with several owners is compressed for all owners at once, if the pass has found all. An owner that is
 * no candidate keeps the content raw for all, and so do more owners than HT_OWNERS_MAX (pass.h).
 *
 * Left alone are content in the memory of passthrough files, and objects with anything that is not published: an update
 * or a writer is about to replace it.
 *
 * The round's memory is there while it lasts. It needs free space for one frame; without that it ends before it reads.
 * A chunk that cannot be read is not read again before the next mount. Between steps a round keeps the numbers of
 * objects, and the space of at most 8 MiB of frames. A pause gives that space back, and the next round compresses
 * these chunks.
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
#include "tiering/data/data.h"
#include "tiering/engine/engine_priv.h"
#include "tiering/engine/pass.h"

#define AFTER_MS_DEFAULT 60000u

enum {
    FAILED_PAUSE_MS = 1000,
    FRAMES_MAX = 64,
    OWNERS_MAX = 1024, /* of frames that wait; those of the last one may exceed that */
    WAITING_BLOCKS_MAX = 8 * HT_GROUP_BLOCKS,
    WAITING_SHARE = 4, /* of the available space */
};

/* An object in a round, with its version then. */
struct ht_recompress_seen {
    uint64_t oid, version;
};

struct ht_recompress_round {
    struct ht_store *s;
    struct ht_recompress *c;
    struct ht_pass pass;
    struct ht_encoder *encoder;
    void *raw, *frame; /* a chunk each */
    /* Frames that were written and wait for their transaction, without objects. */
    struct ht_move move[FRAMES_MAX];
    struct ht_move_owner *owner; /* of all, in the order of the frames */
    unsigned count, owners, owners_cap;
    uint64_t blocks; /* of the frames */
    uint64_t lsn;    /* of the last transaction; 0: all are durable */
    bool saw;        /* frames of content that scrub has read wait: the pass should not come to this content again */
    size_t seen_count;
    struct ht_recompress_seen *seen; /* in this round, by ascending oid */
};

/* --------------------------------------------------------------- publishing */

static void forget_waiting(struct ht_recompress_round *r)
{
    for (unsigned i = 0; i < r->count; i++) {
        ht_ref_forget(&r->move[i].was);
        ht_ref_forget(&r->move[i].now);
    }
    r->count = 0;
    r->owners = 0;
    r->blocks = 0;
}

/*
 * Owners that may not be compressed any more are none, and a frame that lacks one is not published. Owners of one
 * object often follow each other.
 */
static void ask_again(struct ht_recompress_round *r)
{
    const struct ht_recompress *c = r->c;
    uint64_t last = 0;
    bool may = false;

    for (unsigned i = 0; i < r->owners; i++) {
        if (r->owner[i].oid != last) {
            last = r->owner[i].oid;
            may = c->may(c->ctx, last);
        }
        r->owner[i].oid = may ? last : 0;
    }
}

/* No later round tries it again. */
static void keep_raw(struct ht_store *s, const struct ht_move *m)
{
    struct ht_slice slice = {0};

    ht_store_lock(s);
    for (unsigned i = 0; i < m->owners; i++, ht_slice_next(s, &slice)) {
        struct ht_obj *o;
        struct ht_chunk *c = ht_chunk_find_in(s, m->owner[i].oid, m->owner[i].index, &o);
        if (c && (c->flags & HT_CH_PUB) && ht_ref_same_place(&c->pub, &m->was))
            c->pub.kept_raw = 1;
    }
    ht_store_unlock(s);
}

/* Some of the frames, in a transaction. */
static int publish_frames(struct ht_recompress_round *r, struct ht_move m[], unsigned n)
{
    _Atomic uint64_t *figure = r->s->engine->row[HT_ENGINE_RECOMPRESS].figure;
    uint32_t before[FRAMES_MAX], after[FRAMES_MAX];
    uint64_t lsn = 0;

    for (unsigned i = 0; i < n; i++) {
        before[i] = ht_ref_blocks(&m[i].was);
        after[i] = ht_ref_blocks(&m[i].now);
    }
    int rc = n ? ht_move_publish(r->s, m, n, &lsn) : 0;
    r->lsn = lsn ? lsn : r->lsn;
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
static int publish_last(struct ht_recompress_round *r, struct ht_move *m)
{
    int rc = publish_frames(r, m, 1);

    if (rc != -ENOSPC)
        return rc;
    keep_raw(r->s, m);
    return 0;
}

/* The space of frames that wait. */
static void give_back_waiting(struct ht_recompress_round *r)
{
    ht_store_lock(r->s);
    for (unsigned i = 0; i < r->count; i++)
        if (ht_ref_holds(&r->move[i].now))
            ht_free_ref_now(r->s, &r->move[i].now);
    ht_store_unlock(r->s);
    forget_waiting(r);
}

/*
 * A flush and a transaction for frames that wait; one more for content of very many owners. Chunks that have changed
 * meanwhile keep their content.
 */
static int publish_waiting(struct ht_recompress_round *r)
{
    unsigned n = r->count;

    ask_again(r);
    bool alone = n && r->move[n - 1].owners > OWNERS_MAX / 2; /* so many that it may fail for that */
    int rc = publish_frames(r, r->move, n - alone);

    if (alone && !rc)
        rc = publish_last(r, &r->move[n - 1]);
    give_back_waiting(r); /* what was not tried */
    return rc;
}

/* -------------------------------------------------------------------- space */

/* It is time to publish. */
static bool is_full(struct ht_recompress_round *r)
{
    return r->count == FRAMES_MAX || r->blocks >= WAITING_BLOCKS_MAX || r->owners >= OWNERS_MAX ||
        r->blocks * WAITING_SHARE > ht_store_locked(r->s, ht_alloc_available(r->s->alloc));
}

/* For the longest frame: in blocks that are free now, and that no promise counts on. */
static bool has_space(struct ht_store *s, const struct ht_ref *was)
{
    return ht_store_locked(s, ht_min_u64(ht_alloc_available(s->alloc), ht_alloc_free_blocks(s->alloc))) + 1 >=
        ht_ref_blocks(was);
}

/* The raw chunks of frames that wait, once their transaction is durable. 0 also when there are none. */
static int free_raw_chunks(struct ht_recompress_round *r)
{
    int rc = publish_waiting(r);

    if (!rc && r->lsn)
        rc = ht_store_sync(r->s, r->lsn);
    if (!rc)
        r->lsn = 0;
    return rc;
}

/* Before anything is read for it. */
static int need_space(struct ht_recompress_round *r, const struct ht_ref *was)
{
    if (has_space(r->s, was))
        return 0;
    int rc = free_raw_chunks(r);
    if (rc)
        return rc;
    return has_space(r->s, was) ? 0 : -ENOSPC;
}

/* ------------------------------------------------------------------ a chunk */

/* For so many owners more. -ENOMEM */
static int need_room(struct ht_recompress_round *r, unsigned more)
{
    unsigned had = r->owners_cap;
    int rc = ht_move_make_room(&r->owner, &r->owners_cap, r->owners + more, r->move, r->count);

    r->c->bytes += (r->owners_cap - had) * sizeof(*r->owner);
    return rc;
}

/* The frame waits then. */
static int write_frame(struct ht_recompress_round *r, struct ht_ring *ring, const struct ht_move *from, uint32_t len)
{
    struct ht_move *m = &r->move[r->count];

    int rc = need_room(r, from->owners);
    if (rc)
        return rc;
    *m = (struct ht_move){.obj = from->obj, .owners = from->owners};
    rc = ht_ref_copy(&m->was, &from->was);
    if (rc)
        return rc;
    rc = ht_move_write_frame(m, ring, r->frame, len);
    if (rc) {
        ht_ref_forget(&m->was);
        return rc;
    }
    m->obj = NULL;
    m->owner = &r->owner[r->owners];
    memcpy(m->owner, from->owner, m->owners * sizeof(*m->owner));
    r->owners += m->owners;
    r->blocks += ht_ref_blocks(&m->now);
    r->count++;
    return 0;
}

/* What is free may lie in too many pieces: then it needs the space of the raw chunks, too. */
static int write_frame_somewhere(struct ht_recompress_round *r, struct ht_ring *ring, const struct ht_move *m,
                                 uint32_t len)
{
    int rc = write_frame(r, ring, m, len);

    if (rc != -ENOSPC || !(r->count || r->lsn))
        return rc;
    rc = free_raw_chunks(r);
    return rc ? rc : write_frame(r, ring, m, len);
}

/*
 * Encodes content with its owners, and writes the frame. m->was is a copy of the owner's published reference that shows
 * most. The round is not full. *out_bytes: written. An error: nothing of that kind will succeed now. Content of which
 * the frame saves too little stays as it is.
 */
static int encode(struct ht_recompress_round *r, const struct ht_move *m, const void *content, uint64_t *out_bytes)
{
    const struct ht_ref *was = &m->was;
    struct ht_ring *ring = ht_store_ring(r->s);
    int len = ring ? ht_codec_encode(r->encoder, content, was->visible, r->frame) : -ENOMEM;

    if (len < 0)
        return len;
    if (!len || ht_div_up((uint32_t)len, HT_BLOCK_BYTES) >= ht_ref_blocks(was)) {
        keep_raw(r->s, m);
        r->s->engine->row[HT_ENGINE_RECOMPRESS].figure[HT_RECOMPRESS_KEPT_RAW]++;
        return 0;
    }
    *out_bytes += ht_round_up((uint32_t)len, HT_BLOCK_BYTES);
    int rc = ht_store_need_features(r->s, HT_FEAT_REFUSE_PLANES); /* durable before the first frame */
    return rc ? rc : write_frame_somewhere(r, ring, m, (uint32_t)len);
}

/* ----------------------------------------------------------------- a round */

/* Frames that wait were given back before, unless the store's allocator is gone, too. */
static void round_free(struct ht_recompress_round *r)
{
    if (!r)
        return;
    forget_waiting(r);
    ht_encoder_free(r->encoder);
    free(r->owner);
    free(r->raw);
    free(r->frame);
    ht_pass_end(&r->pass);
    free(r->seen);
    free(r);
}

static const struct ht_pass_user user;

static int round_new(struct ht_store *s, struct ht_recompress_round **out)
{
    struct ht_recompress_round *r = calloc(1, sizeof(*r));

    if (!r)
        return -ENOMEM;
    r->s = s;
    r->c = &s->engine->recompress;
    r->raw = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    r->frame = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    int rc = r->raw && r->frame ? ht_encoder_new(&r->encoder) : -ENOMEM;
    if (!rc)
        rc = ht_pass_begin(&r->pass, s, &user, r, 0, 0, &r->c->bytes);
    r->seen = rc ? NULL : malloc((r->pass.walk.count + 1) * sizeof(*r->seen));
    if (!rc && !r->seen)
        rc = -ENOMEM;
    if (rc) {
        round_free(r);
        return rc;
    }
    r->c->bytes += sizeof(*r) + ht_encoder_bytes(r->encoder) + 2 * HT_CHUNK_BYTES;
    r->c->bytes += (r->pass.walk.count + 1) * sizeof(*r->seen);
    *out = r;
    return 0;
}

/* Frames that wait are published. The versions are for the next round. */
static int round_end(struct ht_recompress_round *r)
{
    struct ht_recompress *c = r->c;
    int rc = publish_waiting(r);

    ht_pass_end(&r->pass);
    free(c->seen);
    c->seen = realloc(r->seen, (r->seen_count + 1) * sizeof(*r->seen));
    if (!c->seen)
        c->seen = r->seen;
    c->seen_count = r->seen_count;
    c->bytes = (c->seen_count + 1) * sizeof(*c->seen);
    r->seen = NULL;
    c->round = NULL;
    round_free(r);
    return rc;
}

/* ------------------------------------------------------------------ walking */

static bool was_seen(const struct ht_recompress *c, const struct ht_recompress_seen *now)
{
    const struct ht_recompress_seen *before =
        c->seen ? bsearch(&now->oid, c->seen, c->seen_count, sizeof(*c->seen), ht_compare_numbers) : NULL;

    return before && before->version == now->version;
}

static bool may_be(void *ctx, uint64_t oid)
{
    const struct ht_recompress_round *r = ctx;

    return r->c->may(r->c->ctx, oid);
}

static bool is_cold(const struct ht_recompress_round *r, const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_recompress_seen now = {o->oid, o->version};

    return o->obj_class == HT_CLASS_DURABLE && o->published && !o->deleted && !o->dirty && !o->unpublished &&
        !o->extra->shm && was_seen(r->c, &now);
}

/* Noted at its first slice. */
static bool look_at_object(void *ctx, const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_recompress_round *r = ctx;

    if (r->pass.walk.chunk == 0 && !r->pass.again) {
        assert(r->seen_count < r->pass.walk.count);
        r->seen[r->seen_count++] = (struct ht_recompress_seen){o->oid, o->version};
    }
    return is_cold(r, o);
}

static bool is_candidate(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = &c->pub;

    return (c->flags & (HT_CH_PUB | HT_CH_CUR | HT_CH_GONE | HT_CH_BAD)) == HT_CH_PUB && ref->codec == HT_CODEC_RAW &&
        !ref->kept_raw && (ref->shared ? ht_ref_holds(ref) : ref->visible > HT_BLOCK_BYTES) &&
        (c->slot == HT_SLOT_NONE || !ht_arena_image(s->arena, c->slot)->dirty);
}

static enum ht_pass_want wants(void *ctx, const struct ht_obj *o, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_recompress_round *r = ctx;

    return is_candidate(r->s, c) && !ht_owners_are_too_many(r->s, &c->pub) ? HT_PASS_ONCE : HT_PASS_NONE;
}

/* Are these all owners, and may each one's content be compressed? */
static bool may_compress(struct ht_recompress_round *r, const struct ht_move *m) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = {0};

    if (m->was.visible <= HT_BLOCK_BYTES)
        return false;
    for (unsigned i = 0; i < m->owners; i++, ht_slice_next(r->s, &slice)) {
        struct ht_obj *o;
        const struct ht_chunk *c = ht_chunk_find_in(r->s, m->owner[i].oid, m->owner[i].index, &o);
        if (!c || !is_cold(r, o) || !is_candidate(r->s, c) || !ht_ref_same_place(&c->pub, &m->was))
            return false;
    }
    return ht_move_may(r->s, m);
}

/* Content that cannot be read stays as it is. */
static int compress(void *ctx, struct ht_budget *b)
{
    struct ht_recompress_round *r = ctx;
    const struct ht_move *m = &r->pass.found;
    bool may = ht_store_locked(r->s, may_compress(r, m));
    int rc = may ? need_space(r, &m->was) : 0;

    if (!may || rc)
        return rc;
    struct ht_chunk_io io = {.obj = m->obj, .index = m->owner[0].index, .ref = m->was, .data = r->raw};
    rc = ht_chunks_read_permitted(&io, 1);
    b->bytes += m->was.stored;
    if (rc == -EIO)
        keep_raw(r->s, m); /* until the next mount */
    if (rc)
        return rc == -ENOMEM ? rc : 0;
    return encode(r, m, r->raw, &b->bytes);
}

static const struct ht_pass_user user = {.wants = may_be, .object = look_at_object, .content = wants, .came = compress};

/* 1: there is more; 0: all was looked at; or the error that ends the round. */
static int go_on(struct ht_recompress_round *r, struct ht_budget *b)
{
    struct ht_pass *p = &r->pass;
    int rc = 0;

    while (!rc && !ht_pass_is_over(p) && !is_full(r) && ht_pass_may_go_on(p, b))
        rc = ht_pass_next(p, b);
    if (!rc && is_full(r))
        rc = publish_waiting(r);
    return rc ? rc : !ht_pass_is_over(p);
}

/* ---------------------------------------------------------------- the engine */

static uint64_t after_ns(const struct ht_store *s)
{
    return (s->opts.compress_after_ms ? s->opts.compress_after_ms : AFTER_MS_DEFAULT) * UINT64_C(1000000);
}

void ht_recompress_saw(struct ht_store *s, const struct ht_move *m, const void *bytes, uint64_t *out_bytes)
{
    struct ht_recompress_round *r = s->engine->recompress.round;
    bool may = r && !ht_row_is_paused(&s->engine->row[HT_ENGINE_RECOMPRESS]);

    for (unsigned i = 0; may && i < m->owners; i++)
        may = may_be(r, m->owner[i].oid);
    if (!may)
        return;
    may = ht_store_locked(s, may_compress(r, m));
    int rc = may ? encode(r, m, bytes, out_bytes) : 0;
    r->saw |= may;
    if (!rc && is_full(r))
        rc = publish_waiting(r);
    (void)rc; /* the round tries again */
}

/* 1, as go_on: there is more to do. */
static int publish_seen(struct ht_recompress_round *r)
{
    if (!r->saw)
        return 0;
    r->saw = false;
    int rc = publish_waiting(r);
    return rc ? rc : 1;
}

static enum ht_step step(void *ctx, struct ht_budget *b)
{
    struct ht_store *s = ctx;
    struct ht_recompress *c = &s->engine->recompress;
    uint64_t now = ht_now_ns();

    if (!c->may || ht_is_read_only(s) || !c->may(c->ctx, 0)) {
        ht_recompress_stop(c);
        return HT_STEP_IDLE;
    }
    b->at_ns = c->next_ns;
    /* Writers have new content that they would have compressed, if the superblocks said that there may be frames. */
    if (ht_write_frames_asked(s) && ht_store_need_features(s, HT_FEAT_REFUSE_PLANES))
        return HT_STEP_BLOCKED;
    if (!c->round && now < c->next_ns)
        return HT_STEP_IDLE;
    if (!c->round && round_new(s, &c->round))
        return HT_STEP_BLOCKED;
    if (c->seen && ht_scrub_is_awaited(s->engine))
        return ht_idle_until(b, now + FAILED_PAUSE_MS * UINT64_C(1000000));
    int rc = publish_seen(c->round);
    if (!rc)
        rc = go_on(c->round, b);
    if (rc > 0)
        return HT_STEP_WORKED;
    b->at_ns = c->next_ns = ht_walk_next_ns(&c->round->pass.walk, after_ns(s));
    int ended = round_end(c->round);
    return rc || ended ? HT_STEP_BLOCKED : HT_STEP_IDLE; /* the next round tries again */
}

static void give_back(void *ctx)
{
    ht_recompress_stop(&((struct ht_store *)ctx)->engine->recompress);
}

static const struct ht_engine_figure figures[HT_RECOMPRESS_FIGURES] = {
    [HT_RECOMPRESS_CHUNKS] = {"chunks", "Chunks that were compressed."},
    [HT_RECOMPRESS_RAW] = {"raw_bytes", "Bytes that these took on devices before."},
    [HT_RECOMPRESS_SAVED] = {"saved_bytes", "Bytes that they take less now."},
    [HT_RECOMPRESS_KEPT_RAW] = {"kept_raw", "Chunks that stay as they are, because a frame saves too little."},
    [HT_RECOMPRESS_INLINE_CHUNKS] = {"inline_chunks", "Chunks that were compressed when they were written."},
    [HT_RECOMPRESS_INLINE_SAVED] = {"inline_saved_bytes", "Bytes that these take less."},
};

/* What writers compressed. */
static void values(void *ctx, uint64_t out[])
{
    ht_write_frame_figures(ctx, &out[HT_RECOMPRESS_INLINE_CHUNKS], &out[HT_RECOMPRESS_INLINE_SAVED]);
}

const struct ht_engine_type ht_recompress_engine = {
    .name = "recompress",
    .pause_ms = FAILED_PAUSE_MS,
    .step = step,
    .rest = give_back,
    .figure = figures,
    .figures = HT_RECOMPRESS_FIGURES,
    .values = values,
};

void ht_recompress_stop(struct ht_recompress *c)
{
    if (c->round)
        give_back_waiting(c->round);
}

void ht_recompress_destroy(struct ht_recompress *c)
{
    round_free(c->round);
    free(c->seen);
}

void ht_store_set_compress(struct ht_store *s, ht_compress_fn fn, void *ctx)
{
    s->engine->recompress.may = fn;
    s->engine->recompress.ctx = ctx;
}

void ht_store_wake_compress(struct ht_store *s)
{
    if (!s->opts.no_threads && s->engine->started)
        (void)ht_row_wake(&s->engine->row[HT_ENGINE_RECOMPRESS]);
}
