/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recompress.c - compresses content that nothing has changed for a while.
 *
 *   asleep --compress_after=--> a round: a walk over all objects --each chunk that is found--> a batch of frames
 *      ^                                     |                            |                (recompress_batch.c)
 *      '------- all was walked, or an error -'                            '--full--> published
 *
 * The walk finds published raw chunks of objects that may be compressed and have the same version as in the round
 * before.
 *
 * Left alone are chunks of several owners, content in the memory of passthrough files, and objects with anything that
 * is not published: an update or a writer is about to replace it.
 *
 * The round's memory is there while it lasts. It needs free space for one frame; without that it ends before it reads.
 * A chunk that cannot be read is not read again before the next mount. Between steps a round keeps the numbers of
 * objects, and the space of at most 8 MiB of frames. A pause gives that space back, and the next round compresses
 * these chunks.
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/cache/arena.h"
#include "tiering/api/compress.h"
#include "tiering/api/object.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/engine/engine_priv.h"
#include "tiering/engine/recompress_batch.h"
#include "tiering/engine/walk.h"

#define AFTER_MS_DEFAULT 60000u
#define RATE_BYTES (256 * HT_MIB)

enum {
    FAILED_PAUSE_MS = 1000,
    SLICE_CHUNKS = 256, /* looked at under the lock */
};

/* An object in a round, with its version then. */
struct ht_recompress_seen {
    uint64_t oid, version;
};

struct ht_recompress_round {
    struct ht_store *s;
    struct ht_recompress *c;
    struct ht_walk walk;
    struct ht_recompress_batch batch;
    size_t seen_count;
    struct ht_recompress_seen *seen; /* in this round, by ascending oid */
    /* The chunk that the last slice of the walk found. obj: with a reference; NULL: none. */
    struct ht_obj *obj;
    uint64_t index;
    struct ht_ref was;
};

uint64_t ht_recompress_rate_bytes(const struct ht_store *s)
{
    (void)s;
    return RATE_BYTES;
}

/* ----------------------------------------------------------------- a round */

static void round_free(struct ht_recompress_round *r)
{
    if (!r)
        return;
    ht_recompress_batch_destroy(&r->batch);
    ht_walk_end(&r->walk);
    free(r->seen);
    free(r);
}

static int by_oid(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static int round_new(struct ht_store *s, struct ht_recompress_round **out)
{
    struct ht_recompress_round *r = calloc(1, sizeof(*r));

    if (!r)
        return -ENOMEM;
    r->s = s;
    r->c = &s->engine->recompress;
    int rc = ht_recompress_batch_init(&r->batch, s, r->c);
    if (!rc)
        rc = ht_walk_begin(&r->walk, s);
    r->seen = rc ? NULL : malloc((r->walk.count + 1) * sizeof(*r->seen));
    if (!rc && !r->seen)
        rc = -ENOMEM;
    if (rc) {
        round_free(r);
        return rc;
    }
    qsort(r->walk.oids, r->walk.count, sizeof(*r->walk.oids), by_oid);
    r->c->bytes += sizeof(*r) + ht_recompress_batch_bytes(&r->batch) + ht_walk_bytes(&r->walk) +
        (r->walk.count + 1) * sizeof(*r->seen);
    *out = r;
    return 0;
}

/* Frames that wait are published. What was seen is for the next round. */
static int round_end(struct ht_recompress_round *r)
{
    struct ht_recompress *c = r->c;
    int rc = ht_recompress_batch_publish(&r->batch);

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
        c->seen ? bsearch(&now->oid, c->seen, c->seen_count, sizeof(*c->seen), by_oid) : NULL;

    return before && before->version == now->version;
}

static bool may_be(void *ctx, uint64_t oid)
{
    const struct ht_recompress_round *r = ctx;

    return r->c->may(r->c->ctx, oid);
}

/* Noted at its first slice. */
static bool is_cold(void *ctx, const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_recompress_round *r = ctx;
    const struct ht_recompress_seen now = {o->oid, o->version};

    if (r->walk.chunk == 0) {
        assert(r->seen_count < r->walk.count);
        r->seen[r->seen_count++] = now;
    }
    return o->obj_class == HT_CLASS_DURABLE && o->published && !o->deleted && !o->dirty && !o->unpublished &&
        !o->extra->shm && was_seen(r->c, &now);
}

static bool is_candidate(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = &c->pub;

    return (c->flags & (HT_CH_PUB | HT_CH_CUR | HT_CH_GONE | HT_CH_BAD)) == HT_CH_PUB && ref->codec == HT_CODEC_RAW &&
        !ref->kept_raw && !ref->shared && ref->visible > HT_BLOCK_BYTES &&
        (c->slot == HT_SLOT_NONE || !ht_arena_image(s->arena, c->slot)->dirty);
}

static int look_at(void *ctx, struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_recompress_round *r = ctx;

    if (!is_candidate(r->s, c))
        return HT_WALK_ON;
    if (ht_ref_copy(&r->was, &c->pub))
        return -ENOMEM;
    o->refs++; /* only while the engine reads: a deleted object keeps its space as long as it is held */
    r->obj = o;
    r->index = index;
    return HT_WALK_TAKEN;
}

static const struct ht_walk_visitor visitor = {.wants = may_be, .object = is_cold, .chunk = look_at};

/* A slice, and the chunk that it found. */
static int next(struct ht_recompress_round *r, uint64_t *out_bytes)
{
    int rc = ht_walk_slice(&r->walk, &visitor, r, SLICE_CHUNKS);

    if (!r->obj)
        return rc;
    if (!rc)
        rc = ht_recompress_batch_add(&r->batch, r->obj, r->index, &r->was, out_bytes);
    ht_ref_forget(&r->was);
    ht_obj_put(r->obj);
    r->obj = NULL;
    return rc;
}

/* 1: there is more; 0: all was walked; or the error that ends the round. */
static int go_on(struct ht_recompress_round *r, struct ht_budget *b)
{
    int rc = 0;

    do {
        if (!ht_walk_is_over(&r->walk) && !ht_recompress_batch_is_full(&r->batch))
            rc = next(r, &b->bytes);
    } while (!rc && b->bytes < b->most_bytes && ht_now_ns() < b->until_ns && !ht_walk_is_over(&r->walk) &&
             !ht_recompress_batch_is_full(&r->batch));
    if (!rc && ht_recompress_batch_is_full(&r->batch))
        rc = ht_recompress_batch_publish(&r->batch);
    return rc ? rc : !ht_walk_is_over(&r->walk);
}

/* ---------------------------------------------------------------- the engine */

static uint64_t after_ns(const struct ht_store *s)
{
    return (s->opts.compress_after_ms ? s->opts.compress_after_ms : AFTER_MS_DEFAULT) * UINT64_C(1000000);
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
    if (!c->round && now < c->next_ns)
        return HT_STEP_IDLE;
    if (!c->round && round_new(s, &c->round))
        return HT_STEP_BLOCKED;
    if (go_on(c->round, b) > 0)
        return HT_STEP_WORKED;
    int rc = round_end(c->round);
    (void)rc; /* the next round tries again */
    b->at_ns = c->next_ns = ht_now_ns() + after_ns(s);
    return HT_STEP_IDLE;
}

static void give_back(void *ctx)
{
    ht_recompress_stop(&((struct ht_store *)ctx)->engine->recompress);
}

enum { CHUNKS, RAW_BYTES, SAVED_BYTES, KEPT_RAW, FIGURES };

static const struct ht_engine_figure figures[FIGURES] = {
    [CHUNKS] = {"chunks", "Chunks that were compressed."},
    [RAW_BYTES] = {"raw_bytes", "Bytes that these took on devices before."},
    [SAVED_BYTES] = {"saved_bytes", "Bytes that they take less now."},
    [KEPT_RAW] = {"kept_raw", "Chunks that stay as they are, because a frame saves too little."},
};

static void values(void *ctx, uint64_t out[])
{
    const struct ht_recompress *c = &((struct ht_store *)ctx)->engine->recompress;

    out[CHUNKS] = c->chunks;
    out[RAW_BYTES] = c->raw_bytes;
    out[SAVED_BYTES] = c->saved_bytes;
    out[KEPT_RAW] = c->kept_raw;
}

const struct ht_engine_type ht_recompress_engine = {
    .name = "recompress",
    .pause_ms = FAILED_PAUSE_MS,
    .step = step,
    .rest = give_back,
    .figure = figures,
    .figures = FIGURES,
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

uint64_t ht_recompress_bytes(const struct ht_recompress *c)
{
    return c->bytes;
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

int ht_store_compress(struct ht_store *s)
{
    struct ht_recompress *c = &s->engine->recompress;

    if (ht_is_read_only(s))
        return -EROFS;
    int rc = c->round ? 0 : round_new(s, &c->round);
    if (rc)
        return rc;
    do {
        struct ht_budget b = {.most_bytes = HT_MIB, .until_ns = UINT64_MAX};
        rc = go_on(c->round, &b);
    } while (rc > 0 && !s->waits.stopping);
    int ended = round_end(c->round);
    return rc ? rc : ended;
}
