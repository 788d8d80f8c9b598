/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recompress.c - compresses content that nothing has changed for a while.
 *
 *   round: all objects --may be compressed, the same version as in the round before--> each published raw chunk:
 *
 *   copy of the reference -> read, verify -> encode --no gain--> marked, until it is written again
 *                                              | gain
 *                                              v
 *                           write the frame to new space, flush -> transaction: the chunk has the frame
 *
 * The engine holds no chunk, and no lock over I/O. So what it read may have changed when the frame is written: then the
 * transaction changes nothing, and the frame's space is free again (txn/relocate.c). What the checksum of the reference
 * does not cover was freed meanwhile, and is left alone. Damage is scrub's.
 *
 * Left alone are also chunks of several owners, content in the memory of passthrough files, and objects with anything
 * that is not published: an update or a writer is about to replace it.
 *
 * The round's memory is there while it lasts. It needs free space for one frame; without that it ends before it reads.
 * A chunk that cannot be read is not read again before the next mount.
 */
#include <stdlib.h>

#include "tiering/cache/arena.h"
#include "tiering/codec/frame.h"
#include "tiering/api/compress.h"
#include "tiering/api/object.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/data/admission.h"
#include "tiering/data/chunk_io.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/engine_priv.h"

#define AFTER_MS_DEFAULT 60000u
#define RATE_BYTES (256 * HT_MIB)

enum {
    FAILED_PAUSE_MS = 1000,
    SLICE_CHUNKS = 256, /* looked at under the lock */
    STEP_LOOKS = 256,   /* objects, or slices, in a step */
};

/* An object in a round, with its version then. */
struct ht_recompress_seen {
    uint64_t oid, version;
};

struct ht_recompress_round {
    struct ht_store *s;
    struct ht_recompress *c;
    struct ht_ring *ring;
    struct ht_encoder *encoder;
    void *raw, *frame; /* a chunk each */
    uint64_t *oids, index;
    size_t count, at, seen_count;
    struct ht_recompress_seen *seen; /* in this round, by ascending oid */
    uint64_t bytes;                  /* read and written in this step */
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
    ht_encoder_free(r->encoder);
    free(r->raw);
    free(r->frame);
    free(r->oids);
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
    int rc = ht_encoder_new(&r->encoder);
    if (!rc)
        rc = ht_store_oids(s, &r->oids, &r->count);
    r->raw = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    r->frame = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    r->seen = malloc((r->count + 1) * sizeof(*r->seen));
    if (!rc && (!r->raw || !r->frame || !r->seen))
        rc = -ENOMEM;
    if (rc) {
        round_free(r);
        return rc;
    }
    qsort(r->oids, r->count, sizeof(*r->oids), by_oid);
    r->c->bytes += sizeof(*r) + ht_encoder_bytes(r->encoder) + 2 * HT_CHUNK_BYTES +
        (r->count + 1) * (sizeof(*r->seen) + sizeof(*r->oids));
    *out = r;
    return 0;
}

/* What was seen is for the next round. */
static void round_end(struct ht_recompress_round *r)
{
    struct ht_recompress *c = r->c;

    free(c->seen);
    c->seen = realloc(r->seen, (r->seen_count + 1) * sizeof(*r->seen));
    if (!c->seen)
        c->seen = r->seen;
    c->seen_count = r->seen_count;
    c->bytes = (c->seen_count + 1) * sizeof(*c->seen);
    r->seen = NULL;
    c->round = NULL;
    round_free(r);
}

static bool was_seen(const struct ht_recompress *c, const struct ht_recompress_seen *now)
{
    const struct ht_recompress_seen *before =
        c->seen ? bsearch(&now->oid, c->seen, c->seen_count, sizeof(*c->seen), by_oid) : NULL;

    return before && before->version == now->version;
}

/* ------------------------------------------------------------------ a chunk */

static bool is_candidate(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = &c->pub;

    return (c->flags & (HT_CH_PUB | HT_CH_CUR | HT_CH_GONE | HT_CH_BAD)) == HT_CH_PUB && ref->codec == HT_CODEC_RAW &&
        !ref->kept_raw && !ref->shared && ref->visible > HT_BLOCK_BYTES &&
        (c->slot == HT_SLOT_NONE || !ht_arena_image(s->arena, c->slot)->dirty);
}

static bool is_cold(struct ht_recompress_round *r, const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_recompress_seen now = {o->oid, o->version};

    if (r->index == 0)
        r->seen[r->seen_count++] = now;
    return o->obj_class == HT_CLASS_DURABLE && o->published && !o->deleted && !o->dirty && !o->unpublished &&
        !o->extra->shm && was_seen(r->c, &now);
}

enum { NONE, FOUND, LATER };

/* FOUND: a copy of the next reference to try from r->index on. LATER: it goes on there. Or -ENOMEM. */
static int find(struct ht_recompress_round *r, struct ht_obj *o, struct ht_ref *out) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c;
    unsigned looked = 0;

    if (!is_cold(r, o))
        return NONE;
    ht_chunk_for_each_from(c, o, r->index)
    {
        if (looked++ == SLICE_CHUNKS)
            return LATER;
        if (is_candidate(r->s, c))
            return ht_ref_copy(out, &c->pub) ? -ENOMEM : FOUND;
    }
    return NONE;
}

static int read_content(struct ht_recompress_round *r, struct ht_obj *o, const struct ht_ref *ref)
{
    const struct ht_permit_request request = ht_admission_of_ref(r->s, ref);
    struct ht_chunk_io io = {.obj = o, .index = r->index, .ref = *ref};
    struct ht_permit permit;

    ht_permit_get(&r->s->gate, &request, &permit);
    ht_chunk_read_start(&io, r->ring, r->raw);
    int rc = ht_chunk_read_finish_quietly(&io, r->ring);
    ht_permit_put(&permit);
    r->bytes += request.bytes;
    return rc;
}

static int write_frame(struct ht_recompress_round *r, struct ht_obj *o, const struct ht_ref *was, uint32_t len,
                       struct ht_ref *out)
{
    struct ht_permit_request request = ht_admission_of_ref(r->s, was);
    struct ht_permit permit;

    request.direction = HT_DIRECTION_WRITE;
    ht_permit_get(&r->s->gate, &request, &permit);
    int rc = ht_relocate_begin_frame(o, r->ring, r->frame, len, was, out);
    ht_permit_put(&permit);
    r->bytes += ht_round_up(len, HT_BLOCK_BYTES);
    return rc;
}

/* The next round does not try it again. */
static void keep_raw(struct ht_recompress_round *r, struct ht_obj *o, const struct ht_ref *was)
{
    ht_store_lock(r->s);
    struct ht_chunk *c = ht_chunk_find(o, r->index);
    if (c && (c->flags & HT_CH_PUB) && ht_ref_same_place(&c->pub, was))
        c->pub.kept_raw = 1;
    ht_store_unlock(r->s);
}

/* For the longest frame, before anything is read for it. */
static bool has_space(struct ht_store *s, const struct ht_ref *was)
{
    ht_store_lock(s);
    bool has = ht_alloc_available(s->alloc) + 1 >= ht_ref_blocks(was);
    ht_store_unlock(s);
    return has;
}

static int swap(struct ht_recompress_round *r, struct ht_obj *o, const struct ht_ref *was, struct ht_ref *ref)
{
    uint32_t before = ht_ref_blocks(was), after = ht_ref_blocks(ref);

    int rc = ht_relocate_publish(o, r->index, was, ref);
    if (rc)
        return rc;
    r->c->chunks++;
    r->c->raw_bytes += (uint64_t)before * HT_BLOCK_BYTES;
    r->c->saved_bytes += (uint64_t)(before - after) * HT_BLOCK_BYTES;
    return 0;
}

/*
 * 1; or an error, and the round ends. A chunk that cannot be read, that changed or that is in use concerns this chunk
 * alone.
 */
static int try_chunk(struct ht_recompress_round *r, struct ht_obj *o, const struct ht_ref *was)
{
    struct ht_ref ref = {0};

    if (!has_space(r->s, was))
        return -ENOSPC;
    int rc = read_content(r, o, was);
    if (rc == -EIO)
        keep_raw(r, o, was); /* until the next mount */
    if (rc)
        return rc == -ENOMEM ? rc : 1;
    int len = ht_codec_encode(r->encoder, r->raw, was->visible, r->frame);
    if (len < 0)
        return len;
    if (!len || ht_div_up((uint32_t)len, HT_BLOCK_BYTES) >= ht_ref_blocks(was)) {
        keep_raw(r, o, was);
        r->c->kept_raw++;
        return 1;
    }
    rc = ht_store_need_feature(r->s, HT_FEAT_REFUSE_PLANES); /* durable before the first frame */
    if (!rc)
        rc = write_frame(r, o, was, (uint32_t)len, &ref);
    if (!rc)
        rc = swap(r, o, was, &ref);
    return rc == -ESTALE || rc == -EAGAIN || rc == 0 ? 1 : rc;
}

/* One chunk. 1: there may be more; 0: that was all; or as try_chunk. */
static int next(struct ht_recompress_round *r)
{
    struct ht_store *s = r->s;
    struct ht_ref ref;

    if (r->at == r->count)
        return 0;
    bool wanted = r->index > 0 || r->c->may(r->c->ctx, r->oids[r->at]);
    ht_store_lock(s);
    struct ht_obj *o = wanted ? ht_obj_find_locked(s, r->oids[r->at]) : NULL;
    o = o && !o->dead ? o : NULL;
    int found = o ? find(r, o, &ref) : NONE, rc = found < 0 ? found : 0;
    if (o)
        o->refs++; /* only while the engine reads: a deleted object keeps its space as long as it is held */
    ht_store_unlock(s);
    if (found == FOUND) {
        rc = try_chunk(r, o, &ref);
        ht_ref_forget(&ref);
    }
    if (o)
        ht_obj_put(o);
    r->index = found == NONE ? 0 : r->index + (found == FOUND);
    r->at += found == NONE;
    return rc < 0 ? rc : 1;
}

/* 1: there is more; 0: the round has ended; or the error that ended it. */
static int go_on(struct ht_recompress_round *r, uint64_t most_bytes)
{
    int rc = 1;

    r->bytes = 0;
    r->ring = ht_store_ring(r->s);
    if (!r->ring)
        rc = -ENOMEM;
    for (unsigned n = 0; rc > 0 && n < STEP_LOOKS && r->bytes < most_bytes && !r->s->waits.stopping; n++)
        rc = next(r);
    return rc;
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

    if (!c->may || ht_is_read_only(s) || !c->may(c->ctx, 0))
        return HT_STEP_IDLE;
    b->at_ns = c->next_ns;
    if (!c->round && now < c->next_ns)
        return HT_STEP_IDLE;
    if (!c->round && round_new(s, &c->round))
        return HT_STEP_BLOCKED;
    struct ht_recompress_round *r = c->round;
    int rc = go_on(r, b->most_bytes);
    b->bytes = r->bytes;
    if (rc > 0)
        return HT_STEP_WORKED;
    round_end(r);
    b->at_ns = c->next_ns = ht_now_ns() + after_ns(s);
    return HT_STEP_IDLE;
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
    .figure = figures,
    .figures = FIGURES,
    .values = values,
};

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
    while ((rc = go_on(c->round, UINT64_MAX)) > 0 && !s->waits.stopping)
        ;
    round_end(c->round);
    return rc;
}
