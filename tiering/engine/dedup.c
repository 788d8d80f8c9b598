/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dedup.c - the engine that finds content which is stored twice, and content of zeros.
 *
 *   asleep --the log has grown, a period later--> noting versions --two commit periods--> a pass: twins one after the
 *      ^                                                                       |          other, and zeros (pass.h)
 *      '------------------------------------------------------- it is over ----'
 *
 *   a content --read--> its twin was read just before? --no--> kept, for the next one
 *      |                     | yes
 *      cannot be read:    compared byte by byte --the same--> its owners get the bytes of that one (txn/share.c), many
 *      remembered            |                                in one transaction
 *                         different: remembered
 *
 * A pass begins with the versions of all objects, and passes objects that have another one two commit periods later:
 * content that is being written is not worth it. The first pass waits only until the optimizer has reserved the
 * rewrites of its models. The pass keeps numbers of objects only, so it delays no work on other objects. Each content
 * is read once. These bytes are a chunk's as long as its object has that version, and the chunk that place. So pairs
 * with the same bytes are numbers until their transaction, which leaves those alone that have changed.
 *
 * Objects with a rewrite reserve take no part: shared space does not come back when it is rewritten, so the reserve
 * would grow by what is freed. So a model in training is never touched.
 *
 * Raw bytes are compared with raw bytes, and compressed frames with frames, as they are stored. The same bytes always
 * give the same frame, so two files that were compressed alike meet here. Only for zeros a frame is decoded.
 *
 * Zeros: whole chunks only. Their checksum is known, and that of their frame.
 */
#include "tiering/codec/frame.h"
#include "tiering/object/context.h"
#include "tiering/api/check.h"
#include "tiering/base/mutant.h"
#include "tiering/data/chunk_io.h"
#include "tiering/engine/engine_priv.h"
#include "tiering/engine/pass.h"

#define MS UINT64_C(1000000)

enum {
    SLICE_OBJECTS = 1024, /* of which the versions are noted */
    PAUSE_MS = 1000,
    COMMIT_MS_DEFAULT = 5000,
    SETTLE_COMMITS = 2, /* periods of the commit timer that content stays unchanged before it is compared */
    PASS_COMMITS = 2,   /* that lie between two passes at least */
    ZEROS = 8,          /* sizes of chunks */
    INDEX_SHARE = 64,   /* of dram */
    NOTES_MIN = 64,
    NOTES_MAX = 1 << 20, /* to put them in order takes some 0.4 s, which an unmount waits for */
    NOTE_BYTES = 3 * sizeof(struct ht_owner_found) / 2, /* the array grows by a half */
};
static_assert(HT_SMALL_CHUNK_BYTES << (ZEROS - 1) >= HT_CHUNK_BYTES, "each size of a chunk has its checksum of zeros");

/* As they are stored: raw, and as a compressed frame. */
struct zeros {
    uint64_t checksum, frame_checksum;
    uint32_t frame_bytes; /* 0: no frame is smaller */
};

/* The last content that was read, and differs from the one before. */
struct kept {
    struct ht_sharer_side chunk; /* of an owner */
    unsigned owners;
    uint32_t stored;
    uint64_t content; /* as of struct ht_pass; 0: there is none */
    uint8_t *bytes;
};

struct ht_dedup_pass {
    struct ht_store *s;
    _Atomic uint64_t *figure, *bytes; /* of the row; heap of the engine */
    struct ht_pass pass;
    uint64_t *version; /* of the objects when the pass began */
    size_t noted;      /* so many of these are known */
    struct kept kept;
    uint8_t *buf;
    struct ht_sharer same[64]; /* pairs with the same bytes */
    unsigned same_count;
    struct zeros zeros[ZEROS]; /* HT_SMALL_CHUNK_BYTES << i */
    uint64_t memory_bytes;
    bool skipped;
};

static uint64_t commit_ns(const struct ht_store *s)
{
    return (s->opts.commit_ms ? s->opts.commit_ms : COMMIT_MS_DEFAULT) * MS;
}

/* ------------------------------------------------------------------ a pass */

static size_t notes_max(const struct ht_store *s)
{
    uint64_t bytes = s->opts.dedup_index_bytes ? s->opts.dedup_index_bytes : ht_arena_bytes(s->arena) / INDEX_SHARE;
    uint64_t least = s->opts.dedup_index_bytes ? NOTES_MIN : 2 * ht_owners_max(s);

    return ht_min_u64(ht_max_u64(bytes / NOTE_BYTES, least), NOTES_MAX);
}

void ht_dedup_free(struct ht_dedup_pass *p)
{
    if (!p)
        return;
    *p->bytes -= p->memory_bytes;
    p->figure[HT_DEDUP_LEFT] = 0;
    free(p->buf);
    free(p->kept.bytes);
    free(p->version);
    ht_pass_end(&p->pass);
    free(p);
}

static int know_zeros(struct ht_dedup_pass *p)
{
    struct ht_encoder *encoder;
    int rc = ht_encoder_new(&encoder);

    if (rc)
        return rc;
    memset(p->buf, 0, HT_CHUNK_BYTES);
    for (unsigned i = 0; i < ZEROS && rc >= 0 && (uint64_t)HT_SMALL_CHUNK_BYTES << i <= HT_CHUNK_BYTES; i++) {
        struct zeros *z = &p->zeros[i];
        uint32_t bytes = (uint32_t)HT_SMALL_CHUNK_BYTES << i;
        z->checksum = ht_store_checksum(p->s, p->buf, bytes);
        rc = ht_codec_encode(encoder, p->buf, bytes, p->kept.bytes);
        z->frame_bytes = rc > 0 ? (uint32_t)rc : 0;
        z->frame_checksum = ht_store_checksum(p->s, p->kept.bytes, z->frame_bytes);
    }
    ht_encoder_free(encoder);
    return rc < 0 ? rc : 0;
}

static const struct ht_pass_user user;

static int allocate(struct ht_dedup_pass *p)
{
    int rc = ht_pass_begin(&p->pass, p->s, &user, p, notes_max(p->s), 0, p->bytes);
    size_t objects = p->pass.walk.count;

    p->version = calloc(objects + 1, sizeof(*p->version));
    p->buf = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    p->kept.bytes = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    if (!rc && (!p->version || !p->buf || !p->kept.bytes))
        rc = -ENOMEM;
    p->memory_bytes = sizeof(*p) + objects * sizeof(*p->version) + 2 * HT_CHUNK_BYTES;
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
    int rc = allocate(p);
    if (!rc)
        rc = know_zeros(p);
    if (rc) {
        ht_dedup_free(p);
        return rc;
    }
    d->pass = p;
    d->due_ns = 0;
    return 0;
}

/* ------------------------------------------------------------------ in vain */

static uint64_t name_of(const struct ht_ref *ref)
{
    return ht_id_hash(ref->checksum ^ ht_id_hash(ht_ref_place(ref))) | 1;
}

static uint64_t *slot_of(struct ht_dedup *d, const struct ht_ref *ref)
{
    return &d->vain[name_of(ref) / 2 % HT_ARRAY_SIZE(d->vain)];
}

/* ------------------------------------------------------------------ walking */

/* Of some objects more. */
static void note_versions(struct ht_dedup_pass *p)
{
    const struct ht_walk *w = &p->pass.walk;
    size_t end = ht_min_u64(p->noted + SLICE_OBJECTS, w->count);

    ht_store_lock(p->s);
    for (; p->noted < end; p->noted++) {
        struct ht_obj *o = ht_obj_find_locked(p->s, w->oids[p->noted]);
        p->version[p->noted] = o ? o->version : 0;
    }
    ht_store_unlock(p->s);
    if (p->noted == w->count)
        p->s->engine->dedup.due_ns = ht_now_ns() + SETTLE_COMMITS * commit_ns(p->s);
}

static bool is_probably_zero(const struct ht_dedup_pass *p, const struct ht_obj *o, const struct ht_ref *ref)
{
    const struct zeros *z = &p->zeros[o->chunk_shift - (unsigned)__builtin_ctz(HT_SMALL_CHUNK_BYTES)];

    if (ref->codec == HT_CODEC_RAW)
        return ref->stored == ht_obj_bytes_per_chunk(o) && ref->checksum == z->checksum;
    return ref->stored == z->frame_bytes && ref->checksum == z->frame_checksum;
}

static bool is_settled(void *ctx, const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_dedup_pass *p = ctx;

    return ht_obj_may_share(o) && o->version == p->version[p->pass.walk.at];
}

static enum ht_pass_want wants(void *ctx, const struct ht_obj *o, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_dedup_pass *p = ctx;

    if (!ht_chunk_may_share(p->s, c) || *slot_of(&p->s->engine->dedup, &c->pub) == name_of(&c->pub))
        return HT_PASS_NONE;
    return is_probably_zero(p, o, &c->pub) ? HT_PASS_ALONE : HT_PASS_TWINS;
}

/* ---------------------------------------------------------------- comparing */

/*
 * An owner of content that has come, as it was when the pass began. from: the pass to which it has come, this one or
 * that of scrub.
 */
static struct ht_sharer_side name_owner(const struct ht_dedup_pass *p, const struct ht_pass *from, unsigned owner)
{
    const struct ht_move_owner *w = &from->found.owner[owner];
    size_t at = ht_walk_find(&p->pass.walk, w->oid);

    return (struct ht_sharer_side){
        .oid = w->oid,
        .version = p->version[at],
        .index = w->index,
        .place = ht_ref_place(&from->found.was),
        .extra_bytes = ht_ref_extra_bytes(&from->found.was),
    };
}

static void skip(struct ht_dedup_pass *p, uint64_t chunks)
{
    p->figure[HT_DEDUP_SKIPPED] += chunks;
    p->skipped |= chunks > 0;
}

/* All pairs, in one transaction. The next pass finds those that were skipped. */
static int share(struct ht_dedup_pass *p)
{
    int rc = p->same_count ? ht_chunks_share(p->s, p->same, p->same_count) : 0;

    p->skipped |= rc != 0;
    for (unsigned i = 0; !rc && i < p->same_count; i++) {
        const struct ht_sharer *x = &p->same[i];
        skip(p, x->rc != 0);
        if (!x->rc)
            p->figure[x->first.oid ? HT_DEDUP_SHARED : HT_DEDUP_HOLES] += (uint64_t)x->freed_blocks * HT_BLOCK_BYTES;
    }
    p->same_count = 0;
    return rc;
}

/* Unless both have the same place already. */
static int add(struct ht_dedup_pass *p, struct ht_sharer_side first, struct ht_sharer_side other)
{
    if (first.oid && first.place == other.place)
        return 0;
    int rc = p->same_count == HT_ARRAY_SIZE(p->same) ? share(p) : 0;
    if (!rc)
        p->same[p->same_count++] = (struct ht_sharer){.first = first, .other = other};
    return rc;
}

/* No later pass looks at the chunk again, unless its content has changed. */
static void in_vain(struct ht_dedup_pass *p, const struct ht_pass *from, enum ht_dedup_figure figure)
{
    const struct ht_sharer_side want = name_owner(p, from, 0);
    struct ht_store *s = p->s;
    struct ht_obj *o;

    ht_store_lock(s);
    const struct ht_chunk *c = ht_sharer_find(s, &want, &o);
    if (c)
        *slot_of(&s->engine->dedup, &c->pub) = name_of(&c->pub);
    ht_store_unlock(s);
    skip(p, !c);
    p->figure[figure] += c != NULL;
}

static void keep(struct ht_dedup_pass *p, const struct ht_pass *from, const uint8_t *content)
{
    const struct ht_move *m = &from->found;
    uint8_t *bytes = p->kept.bytes;

    memcpy(bytes, content, m->was.stored);
    p->kept = (struct kept){name_owner(p, from, 0), m->owners, m->was.stored, from->content, bytes};
}

/* The content has the kept bytes. The one with several owners stays: they need no change then. */
static int share_owners(struct ht_dedup_pass *p, const struct ht_pass *from)
{
    int rc = 0;

    if (p->kept.owners == 1 && from->found.owners > 1) {
        const struct ht_sharer_side other = p->kept.chunk;
        p->kept.chunk = name_owner(p, from, 0);
        p->kept.owners = from->found.owners;
        return add(p, p->kept.chunk, other);
    }
    for (unsigned i = 0; !rc && i < from->found.owners; i++)
        rc = add(p, p->kept.chunk, name_owner(p, from, i));
    return rc;
}

/* The decoder writes the visible bytes only. */
static int share_zeros(struct ht_dedup_pass *p, const struct ht_pass *from, const uint8_t *content)
{
    const struct ht_ref *ref = &from->found.was;
    size_t n = ref->codec == HT_CODEC_RAW ? ref->stored : ref->visible;
    bool zero = !n || (!content[0] && memcmp(content, content + 1, n - 1) == 0);
    int rc = 0;

    for (unsigned i = 0; zero && !rc && i < from->found.owners; i++)
        rc = add(p, (struct ht_sharer_side){.oid = 0}, name_owner(p, from, i));
    if (!zero)
        in_vain(p, from, HT_DEDUP_DIFFERENT);
    return rc;
}

/* It is the twin of the kept content, or zeros, or the next one's twin. */
static int look_at(struct ht_dedup_pass *p, const struct ht_pass *from, const uint8_t *content)
{
    const struct ht_move *m = &from->found;

    p->figure[HT_DEDUP_COMPARED] += m->was.stored;
    if (is_probably_zero(p, m->obj, &m->was))
        return share_zeros(p, from, content);
    if (from->content != p->kept.content || m->was.stored != p->kept.stored)
        keep(p, from, content);
    else if (HT_MUTANT("dedup-uncompared") || memcmp(content, p->kept.bytes, p->kept.stored) == 0)
        return share_owners(p, from);
    else
        in_vain(p, from, HT_DEDUP_DIFFERENT);
    return 0;
}

static int read_content(void *ctx, struct ht_budget *b)
{
    struct ht_dedup_pass *p = ctx;
    const struct ht_move *m = &p->pass.found;
    struct ht_chunk_io io = {
        .obj = m->obj, .index = m->owner[0].index, .ref = m->was, .data = p->buf, .as_stored = p->pass.content != 0};
    int rc = ht_chunks_read_permitted(&io, 1);

    b->bytes += m->was.stored;
    if (!rc)
        return look_at(p, &p->pass, p->buf);
    if (rc == -ENOMEM)
        return rc;
    p->figure[HT_DEDUP_COMPARED] += m->was.stored;
    in_vain(p, &p->pass, HT_DEDUP_SKIPPED); /* scrub reports what cannot be read */
    return 0;
}

static const struct ht_pass_user user = {.object = is_settled, .content = wants, .came = read_content};

/* Some content, as much as the budget allows, and one transaction. */
static int compare_some(struct ht_dedup_pass *p, struct ht_budget *b)
{
    int rc = 0;

    while (!rc && !ht_pass_is_over(&p->pass) && ht_pass_may_go_on(&p->pass, b))
        rc = ht_pass_next(&p->pass, b);
    p->figure[HT_DEDUP_LEFT] = p->pass.shared.twin_bytes;
    int shared = share(p);
    return rc ? rc : shared;
}

/* ------------------------------------------------------------------- engine */

/* When a pass may begin, or to look again whether one is worth it; 0: at once. */
static uint64_t begins_ns(struct ht_store *s, const struct ht_dedup *d)
{
    uint64_t now = ht_now_ns();

    if (d->next_ns > now)
        return d->next_ns;
    return d->again || d->seen_lsn != s->frees.last_lsn + 1 ? 0 : now + PASS_COMMITS * commit_ns(s);
}

static void end_pass(struct ht_store *s, struct ht_dedup *d)
{
    struct ht_dedup_pass *p = d->pass;

    d->again |= p->skipped;
    d->next_ns = ht_walk_next_ns(&p->pass.walk, PASS_COMMITS * commit_ns(s));
    p->figure[HT_DEDUP_PASSES]++;
    d->pass = NULL;
    ht_dedup_free(p);
}

bool ht_dedup_waits(struct ht_store *s)
{
    const struct ht_dedup *d = &s->engine->dedup;

    return d->pass && d->due_ns && d->due_ns <= ht_now_ns() && !ht_row_is_paused(&s->engine->row[HT_ENGINE_DEDUP]);
}

void ht_dedup_saw(struct ht_store *s, const struct ht_pass *from, const uint8_t *content)
{
    struct ht_dedup_pass *p = s->engine->dedup.pass;
    const struct ht_move *m = &from->found;

    if (ht_dedup_waits(s) && (from->content || is_probably_zero(p, m->obj, &m->was)))
        p->skipped |= look_at(p, from, content) != 0;
}

void ht_dedup_share_seen(struct ht_store *s)
{
    struct ht_dedup_pass *p = s->engine->dedup.pass;
    int rc = p ? share(p) : 0;

    (void)rc; /* the next pass tries again */
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
        d->seen_lsn = s->frees.last_lsn + 1; /* never 0, as it is before the first pass */
        d->again = false;
        return begin_pass(s, d) ? HT_STEP_BLOCKED : HT_STEP_WORKED;
    }
    /* What the mount has found has not changed since. If no model waits for its reserves, the first pass need not. */
    if (d->reserved && d->pass->figure[HT_DEDUP_PASSES] == 0 && d->due_ns)
        d->due_ns = ht_min_u64(d->due_ns, ht_now_ns());
    if (ht_dedup_waits(s) && ht_scrub_is_awaited(s->engine))
        return ht_idle_until(b, ht_now_ns() + PAUSE_MS * MS);
    if (d->due_ns > ht_now_ns())
        return ht_idle_until(b, d->due_ns);
    if (!d->due_ns)
        note_versions(d->pass);
    else if (ht_pass_is_over(&d->pass->pass))
        end_pass(s, d);
    else if (compare_some(d->pass, b)) /* after an error it goes on */
        return HT_STEP_BLOCKED;
    return HT_STEP_WORKED;
}

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

/* ---------------------------------------------------------------- interface */

void ht_store_reserves_complete(struct ht_store *s)
{
    s->engine->dedup.reserved = true;
    if (s->engine->started)
        (void)ht_row_wake(&s->engine->row[HT_ENGINE_DEDUP]);
}
