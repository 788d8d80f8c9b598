/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recompress.c - compresses content that nothing has changed for a while.
 *
 *   asleep --compress_after=--> a round: a pass over all content (pass.h) --each that is raw--> a batch of frames
 *      ^                             |                                                    (recompress_batch.c)
 *      |                             v                                                              '--> published
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
 */

#include "tiering/api/tx.h"
#include "tiering/object/context.h"
#include "tiering/data/data.h"
#include "tiering/engine/engine_priv.h"
#include "tiering/engine/recompress_batch.h"
#include "tiering/engine/pass.h"

#define AFTER_MS_DEFAULT 60000u

enum { FAILED_PAUSE_MS = 1000 };

/* An object in a round, with its version then. */
struct ht_recompress_seen {
    uint64_t oid, version;
};

struct ht_recompress_round {
    struct ht_store *s;
    struct ht_recompress *c;
    struct ht_pass pass;
    struct ht_recompress_batch batch;
    bool saw; /* frames of content that scrub has read wait: the pass should not come to this content again */
    size_t seen_count;
    struct ht_recompress_seen *seen; /* in this round, by ascending oid */
};

/* ----------------------------------------------------------------- a round */

static void round_free(struct ht_recompress_round *r)
{
    if (!r)
        return;
    ht_recompress_batch_destroy(&r->batch);
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
    int rc = ht_recompress_batch_init(&r->batch, s);
    if (!rc)
        rc = ht_pass_begin(&r->pass, s, &user, r, 0, 0, &r->c->bytes);
    r->seen = rc ? NULL : malloc((r->pass.walk.count + 1) * sizeof(*r->seen));
    if (!rc && !r->seen)
        rc = -ENOMEM;
    if (rc) {
        round_free(r);
        return rc;
    }
    r->c->bytes += sizeof(*r) + ht_recompress_batch_bytes(&r->batch) + (r->pass.walk.count + 1) * sizeof(*r->seen);
    *out = r;
    return 0;
}

/* Frames that wait are published. The versions are for the next round. */
static int round_end(struct ht_recompress_round *r)
{
    struct ht_recompress *c = r->c;
    int rc = ht_recompress_batch_publish(&r->batch);

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

static int compress(void *ctx, struct ht_budget *b)
{
    struct ht_recompress_round *r = ctx;
    bool may = ht_store_locked(r->s, may_compress(r, &r->pass.found));

    return may ? ht_recompress_batch_add(&r->batch, &r->pass.found, &b->bytes) : 0;
}

static const struct ht_pass_user user = {.wants = may_be, .object = look_at_object, .content = wants, .came = compress};

/* 1: there is more; 0: all was looked at; or the error that ends the round. */
static int go_on(struct ht_recompress_round *r, struct ht_budget *b)
{
    struct ht_pass *p = &r->pass;
    int rc = 0;

    while (!rc && !ht_pass_is_over(p) && !ht_recompress_batch_is_full(&r->batch) && ht_pass_may_go_on(p, b))
        rc = ht_pass_next(p, b);
    if (!rc && ht_recompress_batch_is_full(&r->batch))
        rc = ht_recompress_batch_publish(&r->batch);
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
    int rc = may ? ht_recompress_batch_encode(&r->batch, m, bytes, out_bytes) : 0;
    r->saw |= may;
    if (!rc && ht_recompress_batch_is_full(&r->batch))
        rc = ht_recompress_batch_publish(&r->batch);
    (void)rc; /* the round tries again */
}

/* 1, as go_on: there is more to do. */
static int publish_seen(struct ht_recompress_round *r)
{
    if (!r->saw)
        return 0;
    r->saw = false;
    int rc = ht_recompress_batch_publish(&r->batch);
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
        ht_recompress_batch_give_back(&c->round->batch);
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
