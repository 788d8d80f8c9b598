/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dedup.c - the engine that finds content which is stored twice, and content of zeros.
 *
 *   asleep --the log has grown, a period later--> noting versions --two commit periods--> walking <------------+
 *      ^                                                                                    | a queue is full,  |
 *      |                                                                                    v or all was walked |
 *      '------- no pair is left, and all was walked: the pass ends ------------------- comparing ---------------'
 *
 * A pass walks all references in slices, without I/O. Each has a checksum of its bytes; an index of the checksums finds
 * those that were seen before (dedup_index.h). A pass begins with the versions of all objects, and passes objects that
 * have another one two commit periods later: content that is being written is not worth it. The first pass waits only
 * until the optimizer has reserved the rewrites of its models. Then dedup_pair.c compares
 * pairs and shares the bytes, many in one transaction. The pass keeps numbers of objects only, so it delays no work on
 * other objects.
 *
 * Objects with a rewrite reserve take no part: shared space does not come back when it is rewritten, so the reserve
 * would grow by what is freed. So a model in training is never touched.
 *
 * Compressed frames take part as they are stored. So a copy that comes after its origin was compressed is found once it
 * is compressed, too.
 *
 * Zeros: whole chunks only. Their checksum is known, and that of their frame.
 */
#include "tiering/engine/dedup.h"

#include <assert.h>
#include <stdlib.h>

#include "tiering/cache/arena.h"
#include "tiering/codec/frame.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/api/check.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/engine_priv.h"
#include "tiering/engine/walk.h"

#define MS UINT64_C(1000000)
#define STEP_BYTES HT_MIB /* compared */

enum {
    QUEUE_MAX = 256,
    SLICE_CHUNKS = 256,
    SLICE_OBJECTS = 1024, /* of which the versions are noted */
    PAUSE_MS = 1000,
    COMMIT_MS_DEFAULT = 5000,
    SETTLE_COMMITS = 2, /* periods of the commit timer that content stays unchanged before it is compared */
    PASS_COMMITS = 2,   /* that lie between two passes at least */
    ZEROS = 8,          /* sizes of chunks */
    INDEX_SHARE = 64,   /* of dram */
};
static_assert(HT_SMALL_CHUNK_BYTES << (ZEROS - 1) >= HT_CHUNK_BYTES, "each size of a chunk has its checksum of zeros");

/* As they are stored: raw, and as a compressed frame. */
struct zeros {
    uint64_t checksum, frame_checksum;
    uint32_t frame_bytes; /* 0: no frame is smaller */
};

struct ht_dedup_pass {
    struct ht_store *s;
    _Atomic uint64_t *figure, *bytes; /* of the row; heap of the engine */
    struct ht_dedup_index index;
    struct ht_walk walk;
    uint64_t *version;           /* of the walk's objects when the pass began */
    size_t noted;                /* so many of these are known */
    struct ht_dedup_pair *queue; /* a ring */
    size_t head, waiting;
    struct ht_dedup_same same;
    uint8_t *buf[2];
    struct zeros zeros[ZEROS]; /* HT_SMALL_CHUNK_BYTES << i */
    uint64_t memory_bytes;
    bool skipped;
};

static uint64_t commit_ns(const struct ht_store *s)
{
    return (s->opts.commit_ms ? s->opts.commit_ms : COMMIT_MS_DEFAULT) * MS;
}

/* ------------------------------------------------------------------ a pass */

static uint64_t index_bytes_max(struct ht_store *s)
{
    return s->opts.dedup_index_bytes ? s->opts.dedup_index_bytes : ht_arena_bytes(s->arena) / INDEX_SHARE;
}

static void free_pass(struct ht_dedup_pass *p)
{
    if (!p)
        return;
    *p->bytes -= p->memory_bytes;
    p->figure[HT_DEDUP_LEFT] = 0;
    ht_dedup_index_free(&p->index);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(p->buf); i++)
        free(p->buf[i]);
    free(p->queue);
    free(p->version);
    ht_walk_end(&p->walk);
    free(p);
}

static int know_zeros(struct ht_dedup_pass *p)
{
    struct ht_encoder *encoder;
    int rc = ht_encoder_new(&encoder);

    if (rc)
        return rc;
    memset(p->buf[0], 0, HT_CHUNK_BYTES);
    for (unsigned i = 0; i < ZEROS && rc >= 0 && (uint64_t)HT_SMALL_CHUNK_BYTES << i <= HT_CHUNK_BYTES; i++) {
        struct zeros *z = &p->zeros[i];
        uint32_t bytes = (uint32_t)HT_SMALL_CHUNK_BYTES << i;
        z->checksum = ht_store_checksum(p->s, p->buf[0], bytes);
        rc = ht_codec_encode(encoder, p->buf[0], bytes, p->buf[1]);
        z->frame_bytes = rc > 0 ? (uint32_t)rc : 0;
        z->frame_checksum = ht_store_checksum(p->s, p->buf[1], z->frame_bytes);
    }
    ht_encoder_free(encoder);
    return rc < 0 ? rc : 0;
}

static int allocate(struct ht_dedup_pass *p, unsigned part)
{
    struct ht_store *s = p->s;

    ht_store_lock(s);
    uint64_t chunks = s->objects.chunks;
    ht_store_unlock(s);
    int rc = ht_dedup_index_init(&p->index, chunks, index_bytes_max(s), part);
    if (!rc)
        rc = ht_walk_begin(&p->walk, s);
    p->walk.count = ht_min_u64(p->walk.count, UINT32_MAX - 1);
    p->version = calloc(p->walk.count + 1, sizeof(*p->version));
    p->queue = calloc(QUEUE_MAX, sizeof(*p->queue));
    for (unsigned i = 0; i < HT_ARRAY_SIZE(p->buf); i++)
        p->buf[i] = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    if (!rc && (!p->version || !p->queue || !p->buf[0] || !p->buf[1]))
        rc = -ENOMEM;
    p->memory_bytes = sizeof(*p) + ht_dedup_index_bytes(&p->index) + ht_walk_bytes(&p->walk) +
        p->walk.count * sizeof(*p->version) + QUEUE_MAX * sizeof(*p->queue) + HT_ARRAY_SIZE(p->buf) * HT_CHUNK_BYTES;
    *p->bytes += p->memory_bytes;
    return rc;
}

static int begin_pass(struct ht_store *s, struct ht_dedup *d)
{
    struct ht_dedup_pass *p = calloc(1, sizeof(*p));

    if (!p)
        return -ENOMEM;
    p->s = s;
    p->figure = s->engine->row[HT_ENGINE_DEDUP].figure;
    p->bytes = &d->bytes;
    int rc = allocate(p, d->part);
    if (!rc)
        rc = know_zeros(p);
    if (rc) {
        free_pass(p);
        return rc;
    }
    d->pass = p;
    d->due_ns = 0;
    return 0;
}

/* ------------------------------------------------------------------ walking */

/* Of some objects more. */
static void note_versions(struct ht_dedup_pass *p)
{
    size_t end = ht_min_u64(p->noted + SLICE_OBJECTS, p->walk.count);

    ht_store_lock(p->s);
    for (; p->noted < end; p->noted++) {
        struct ht_obj *o = ht_obj_find_locked(p->s, p->walk.oids[p->noted]);
        p->version[p->noted] = o ? o->version : 0;
    }
    ht_store_unlock(p->s);
    if (p->noted == p->walk.count)
        p->s->engine->dedup.due_ns = ht_now_ns() + SETTLE_COMMITS * commit_ns(p->s);
}

static struct ht_dedup_chunk name_chunk(const struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    return (struct ht_dedup_chunk){.oid = o->oid, .version = o->version, .index = index};
}

static void put_in_queue(struct ht_dedup_pass *p, const struct ht_dedup_pair *pair)
{
    p->queue[(p->head + p->waiting++) % QUEUE_MAX] = *pair;
    p->figure[HT_DEDUP_LEFT] += pair->bytes;
}

static bool is_probably_zero(const struct ht_dedup_pass *p, const struct ht_obj *o, const struct ht_ref *ref)
{
    const struct zeros *z = &p->zeros[o->chunk_shift - (unsigned)__builtin_ctz(HT_SMALL_CHUNK_BYTES)];

    if (ref->codec == HT_CODEC_RAW)
        return ref->stored == ht_obj_bytes_per_chunk(o) && ref->checksum == z->checksum;
    return ref->stored == z->frame_bytes && ref->checksum == z->frame_checksum;
}

/* The chunk that the index names, if it still has that content. */
static struct ht_chunk *find_entry(const struct ht_dedup_pass *p, const struct ht_dedup_entry *e, struct ht_obj **out_o)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = e->object ? ht_obj_find_locked(p->s, p->walk.oids[e->object - 1]) : NULL;
    bool settled = o && ht_obj_may_share(o) && o->version == p->version[e->object - 1];
    struct ht_chunk *c = settled ? ht_chunk_find(o, e->chunk) : NULL;

    *out_o = o;
    return c && ht_dedup_may_share(p->s, c) && c->pub.checksum == e->checksum ? c : NULL;
}

/*
 * Content that was seen before makes a pair with the chunk that the index names. Of a pair the one with several owners
 * stays: they need no change then.
 */
static void look_up(struct ht_dedup_pass *p, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_dedup_entry own = {c->pub.checksum, (uint32_t)(p->walk.at + 1), (uint32_t)index};
    struct ht_dedup_entry *e = ht_dedup_index_find(&p->index, c->pub.checksum);
    struct ht_obj *first_o;

    if (!e)
        return;
    struct ht_chunk *first = find_entry(p, e, &first_o);
    uint64_t first_index = e->chunk;
    bool comparable = first && ht_dedup_may_be_same(&first->pub, &c->pub) && first_o->chunk_shift == o->chunk_shift;
    if (!comparable || (c->pub.shared && !first->pub.shared))
        ht_dedup_index_add(&p->index, e, &own);
    if (!comparable || ht_ref_same_place(&first->pub, &c->pub))
        return;
    struct ht_dedup_pair pair = {name_chunk(first_o, first_index), name_chunk(o, index), c->pub.stored};
    if (c->pub.shared && !first->pub.shared) {
        struct ht_dedup_chunk was = pair.owner;
        pair.owner = pair.other;
        pair.other = was;
    }
    put_in_queue(p, &pair);
}

static bool is_settled(void *ctx, const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_dedup_pass *p = ctx;

    return ht_obj_may_share(o) && o->version == p->version[p->walk.at];
}

static int look_at(void *ctx, struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_dedup_pass *p = ctx;

    if (p->waiting == QUEUE_MAX)
        return HT_WALK_PAUSE;
    if (!ht_dedup_may_share(p->s, c))
        return HT_WALK_ON;
    if (is_probably_zero(p, o, &c->pub)) {
        const struct ht_dedup_pair pair = {.other = name_chunk(o, index), .bytes = c->pub.stored};
        put_in_queue(p, &pair);
    } else {
        look_up(p, o, c, index);
    }
    return HT_WALK_ON;
}

static const struct ht_walk_visitor visitor = {.object = is_settled, .chunk = look_at};

/* ---------------------------------------------------------------- comparing */

/*
 * Some pairs of the queue, as many as the budget allows, and one transaction. The next pass finds those that were
 * skipped.
 */
static int compare_some(struct ht_dedup_pass *p, struct ht_budget *b)
{
    uint64_t most = ht_min_u64(b->most_bytes, STEP_BYTES), skipped = 0;
    int rc = 0;

    do {
        const struct ht_dedup_pair pair = p->queue[p->head];
        p->head = (p->head + 1) % QUEUE_MAX;
        p->waiting--;
        p->figure[HT_DEDUP_LEFT] -= pair.bytes;
        rc = ht_dedup_compare(p->s, &pair, &p->same, p->buf, &b->bytes);
        skipped += rc == -EAGAIN;
        rc = rc == -EAGAIN ? 0 : rc;
    } while (!rc && p->waiting && p->same.count < HT_ARRAY_SIZE(p->same.pair) && b->bytes < most &&
             ht_now_ns() < b->until_ns);
    int changed = ht_dedup_share(p->s, &p->same);
    skipped += changed > 0 ? (unsigned)changed : 0;
    p->skipped |= skipped > 0 || rc || changed < 0;
    p->figure[HT_DEDUP_SKIPPED] += skipped;
    return rc ? rc : changed < 0 ? changed : 0;
}

enum { PASS_WORKS, PASS_WAITS, PASS_ENDS };

/* A step of the pass; or an error, after which it goes on. */
static int go_on(struct ht_dedup *d, struct ht_budget *b)
{
    struct ht_dedup_pass *p = d->pass;
    int rc = PASS_WORKS;

    if (!d->due_ns)
        note_versions(p);
    else if (d->due_ns > ht_now_ns())
        rc = PASS_WAITS;
    else if (p->waiting && (p->waiting == QUEUE_MAX || ht_walk_is_over(&p->walk)))
        rc = compare_some(p, b);
    else if (!ht_walk_is_over(&p->walk))
        rc = ht_walk_slice(&p->walk, &visitor, p, SLICE_CHUNKS);
    else
        rc = PASS_ENDS;
    return rc;
}

/* ------------------------------------------------------------------- engine */

/* When a pass may begin, or to look again whether one is worth it; 0: at once. */
static uint64_t begins_ns(struct ht_store *s, const struct ht_dedup *d)
{
    uint64_t now = ht_now_ns();

    if (d->next_ns > now)
        return d->next_ns;
    return d->part || d->again || d->seen_lsn != s->frees.last_lsn + 1 ? 0 : now + PASS_COMMITS * commit_ns(s);
}

static int begin_next(struct ht_store *s, struct ht_dedup *d)
{
    if (!d->part) {
        d->seen_lsn = s->frees.last_lsn + 1; /* never 0, as it is before the first pass */
        d->again = false;
    }
    return begin_pass(s, d);
}

static void end_pass(struct ht_store *s, struct ht_dedup *d)
{
    struct ht_dedup_pass *p = d->pass;

    d->again |= p->skipped;
    d->part = p->index.part + 1 < p->index.parts ? p->index.part + 1 : 0;
    d->next_ns = ht_walk_next_ns(&p->walk, d->part ? 0 : PASS_COMMITS * commit_ns(s));
    if (!d->part)
        p->figure[HT_DEDUP_PASSES]++;
    d->pass = NULL;
    free_pass(p);
}

/* What the mount has found has not changed since, and no model waits for its reserves: the first pass need not wait. */
static void hurry(struct ht_dedup *d)
{
    if (d->reserved && d->pass->figure[HT_DEDUP_PASSES] == 0 && d->due_ns)
        d->due_ns = ht_min_u64(d->due_ns, ht_now_ns());
}

static enum ht_step step(void *ctx, struct ht_budget *b)
{
    struct ht_store *s = ctx;
    struct ht_dedup *d = &s->engine->dedup;

    if (ht_is_read_only(s))
        return HT_STEP_IDLE;
    if (!d->pass) {
        b->at_ns = begins_ns(s, d);
        if (b->at_ns)
            return HT_STEP_IDLE;
        return begin_next(s, d) ? HT_STEP_BLOCKED : HT_STEP_WORKED;
    }
    hurry(d);
    int rc = go_on(d, b);
    if (rc == PASS_WAITS)
        b->at_ns = d->due_ns;
    else if (rc == PASS_ENDS)
        end_pass(s, d);
    return rc < 0 ? HT_STEP_BLOCKED : rc == PASS_WAITS ? HT_STEP_IDLE : HT_STEP_WORKED;
}

static_assert((int)HT_DEDUP_FIGURES <= (int)HT_ENGINE_FIGURES_MAX, "figures of an engine");

static const struct ht_engine_figure figures[HT_DEDUP_FIGURES] = {
    [HT_DEDUP_PASSES] = {"passes", "Passes over all content."},
    [HT_DEDUP_COMPARED] = {"compared_bytes", "Bytes compared, or looked at for zeros."},
    [HT_DEDUP_SHARED] = {"shared_bytes", "Space that duplicates had."},
    [HT_DEDUP_HOLES] = {"hole_bytes", "Space that zeros had."},
    [HT_DEDUP_DIFFERENT] = {"different", "Chunks with the checksum of another one, but not its content."},
    [HT_DEDUP_SKIPPED] = {"skipped", "Chunks that had changed or were in use: the next pass looks at them again."},
    [HT_DEDUP_LEFT] = {"left_bytes", "Probable duplicates that wait to be compared.", .gauge = true},
};

const struct ht_engine_type ht_dedup_engine = {
    .name = "dedup",
    .pause_ms = PAUSE_MS,
    .step = step,
    .figure = figures,
    .figures = HT_DEDUP_FIGURES,
};

void ht_dedup_end(struct ht_dedup *d)
{
    free_pass(d->pass);
    d->pass = NULL;
}

/* ---------------------------------------------------------------- interface */

void ht_store_reserves_complete(struct ht_store *s)
{
    s->engine->dedup.reserved = true;
    if (s->engine->started)
        (void)ht_row_wake(&s->engine->row[HT_ENGINE_DEDUP]);
}
