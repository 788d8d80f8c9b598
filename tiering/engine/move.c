/* SPDX-License-Identifier: Apache-2.0 */
/*
 * move.c - the engine that empties groups of blocks in which little is taken (compaction).
 *
 *   asleep --the log has grown--> choosing: a batch of nearly empty groups ---none is left--> asleep
 *                                   ^          |
 *                                   |          v
 *                                   |       walking all references: who owns what is in these groups
 *                                   |          |
 *                                   '----- emptying one group after the other
 *
 * A group is emptied if all that is taken there belongs to published content of which all owners were found, and if the
 * other broken groups have room for that. Otherwise it stays as it is: a group that is half empty is no gain. While it
 * is emptied its free blocks are taken, so that nothing else comes there. Owners move together (txn/move.c), the chunks
 * of an object in their order. One transaction moves all content of a group.
 *
 * A walk costs the same for one group as for many, so a batch has many. It goes in slices, and keeps numbers of objects
 * only.
 */
#include "tiering/engine/move.h"

#include <assert.h>
#include <stdlib.h>

#include "tiering/base/mutant.h"
#include "tiering/space/alloc.h"
#include "tiering/api/object.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/data/admission.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/flush.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/engine_priv.h"

#define RATE_BYTES_DEFAULT (64 * HT_MIB)
#define MS UINT64_C(1000000)

enum {
    GROUPS_MAX = 64,        /* of a batch */
    OWNERS_MAX = 1 << 17,   /* of all content of a batch; groups with more stay */
    TAKEN_MAX = 64,         /* blocks of a group that is nearly empty: a quarter */
    SLICE_GROUPS = 1 << 14, /* looked at in one step */
    SLICE_CHUNKS = 1024,
    PAUSE_MS = 1000,
    BROKEN_SHARE = 8,  /* of free space */
    PERIOD_MS = 30000, /* between passes; doubled after each one that gained little */
    PERIOD_MS_MAX = 3600000,
};

/* A nearly empty group, and what lies in it. */
struct victim {
    uint64_t key; /* device << 48 | group */
    bool skip;    /* something in it cannot be moved */
};

/* A chunk of which some blocks lie in a victim. */
struct found {
    uint64_t place; /* its first block, with the device: owners of the same bytes have the same */
    uint64_t oid, index;
    unsigned victim;
};

struct ht_move_batch {
    struct ht_store *s;
    struct ht_move_figures *figures;
    struct victim victim[GROUPS_MAX];
    unsigned count, at; /* at: the group that is emptied next */
    uint64_t *oids, chunk;
    size_t oid_count, oid_at;
    struct found *found;
    size_t found_count, found_cap;
    uint8_t *buf;
    bool walked;
};

bool ht_compact_is_on(const struct ht_store *s)
{
    return s->opts.compact && !s->opts.read_only;
}

uint64_t ht_compact_rate_bytes(const struct ht_store *s)
{
    return s->opts.background_rate_bytes ? s->opts.background_rate_bytes : RATE_BYTES_DEFAULT;
}

static uint64_t key_of(unsigned device, uint64_t group)
{
    return (uint64_t)device << 48 | group;
}

/* ----------------------------------------------------------------- choosing */

/* Is a good part of the free space in broken groups? */
static bool is_worth_it(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t free_blocks = ht_alloc_free_blocks(s->alloc), broken = free_blocks - ht_alloc_whole_blocks(s->alloc);

    return broken >= HT_ALLOC_GROUP_BLOCKS && broken >= free_blocks / BROKEN_SHARE;
}

/* Some groups from *device, *group on; true: the end was reached. Lock held. */
static bool choose(struct ht_move_batch *b, unsigned *device, uint64_t *group) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = b->s;

    for (unsigned n = 0; n < SLICE_GROUPS && b->count < GROUPS_MAX; n++) {
        if (*device == s->dev_count)
            return true;
        if (*group >= ht_alloc_groups(s->alloc, *device) || ht_device_is_closed(s, *device)) {
            ++*device;
            *group = 0;
            continue;
        }
        unsigned taken = ht_alloc_group_taken(s->alloc, *device, *group);
        if (taken && taken <= TAKEN_MAX)
            b->victim[b->count++] = (struct victim){.key = key_of(*device, *group)};
        ++*group;
    }
    return *device == s->dev_count;
}

/* ------------------------------------------------------------------ walking */

/* The victim, or NULL. They are in order. */
static struct victim *find_victim(struct ht_move_batch *b, uint64_t key)
{
    unsigned from = 0, end = b->count;

    while (from < end) {
        unsigned middle = (from + end) / 2;
        if (b->victim[middle].key < key)
            from = middle + 1;
        else
            end = middle;
    }
    return from < b->count && b->victim[from].key == key ? &b->victim[from] : NULL;
}

static int note(struct ht_move_batch *b, const struct found *f)
{
    if (b->found_count == b->found_cap) {
        size_t cap = b->found_cap ? 2 * b->found_cap : 1024;
        struct found *more = realloc(b->found, cap * sizeof(*more));
        if (!more)
            return -ENOMEM;
        b->figures->memory_bytes += (cap - b->found_cap) * sizeof(*more);
        b->found = more;
        b->found_cap = cap;
    }
    b->found[b->found_count++] = *f;
    return 0;
}

/* The chunk is noted once for each victim that its extents reach into. */
static int look_at(struct ht_move_batch *b, const struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct victim *last = NULL;

    if (!(c->flags & HT_CH_PUB) || !ht_ref_holds(&c->pub))
        return 0;
    struct ht_extent first = ht_ref_extent(&c->pub, 0);
    for (unsigned i = 0; i < ht_ref_extents(&c->pub); i++) {
        struct ht_extent e = ht_ref_extent(&c->pub, i);
        uint64_t end = (e.block + e.blocks - 1) / HT_ALLOC_GROUP_BLOCKS;
        for (uint64_t group = e.block / HT_ALLOC_GROUP_BLOCKS; group <= end; group++) {
            struct victim *v = find_victim(b, key_of(e.device, group));
            if (!v || v == last)
                continue;
            last = v;
            v->skip |= b->found_count >= OWNERS_MAX;
            const struct found f = {key_of(first.device, first.block), o->oid, index, (unsigned)(v - b->victim)};
            int rc = v->skip ? 0 : note(b, &f);
            if (rc)
                return rc;
        }
    }
    return 0;
}

/* Chunks of one object, as many as *left. 1: the last one, too. */
static int walk_object(struct ht_move_batch *b, struct ht_obj *o, unsigned *left) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c;

    ht_chunk_for_each_from(c, o, b->chunk)
    {
        if (!*left)
            return 0;
        int rc = look_at(b, o, c, b->chunk);
        if (rc)
            return rc;
        --*left;
    }
    return 1;
}

static int by_place(const void *a, const void *b)
{
    const struct found *x = a, *y = b;

    if (x->victim != y->victim)
        return x->victim < y->victim ? -1 : 1;
    if (x->place != y->place)
        return x->place < y->place ? -1 : 1;
    if (x->oid != y->oid)
        return x->oid < y->oid ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static int walk(struct ht_move_batch *b)
{
    struct ht_store *s = b->s;
    int rc = 1;

    ht_store_lock(s);
    for (unsigned left = SLICE_CHUNKS; left && b->oid_at<b->oid_count; left -= left> 0) {
        struct ht_obj *o = ht_obj_find_locked(s, b->oids[b->oid_at]);
        rc = o && !o->dead ? walk_object(b, o, &left) : 1;
        if (rc != 1)
            break;
        b->chunk = 0;
        b->oid_at++;
    }
    b->walked = b->oid_at == b->oid_count;
    ht_store_unlock(s);
    if (b->walked && b->found_count)
        qsort(b->found, b->found_count, sizeof(*b->found), by_place);
    return rc < 0 ? rc : 0;
}

/* ----------------------------------------------------------------- emptying */

/* One group while it is emptied. */
struct emptying {
    struct ht_store *s;
    unsigned device;
    uint64_t group;
    struct ht_move move[HT_ALLOC_GROUP_BLOCKS]; /* each has a block there at least */
    struct ht_move_owner *owner;
    unsigned count, owners;
    struct ht_extent closed[HT_ALLOC_GROUP_BLOCKS / 2];
    unsigned runs;
};

static unsigned blocks_inside(const struct emptying *e, const struct ht_ref *ref)
{
    uint64_t from = e->group * HT_ALLOC_GROUP_BLOCKS, end = from + HT_ALLOC_GROUP_BLOCKS;
    unsigned blocks = 0;

    for (unsigned i = 0; i < ht_ref_extents(ref); i++) {
        struct ht_extent x = ht_ref_extent(ref, i);
        uint64_t a = ht_max_u64(x.block, from), z = ht_min_u64(x.block + x.blocks, end);
        if (x.device == e->device && a < z)
            blocks += (unsigned)(z - a);
    }
    return blocks;
}

/* The content of one place with its owners, from f on. -ESTALE: it is not as it was found. Lock held. */
static int gather_one(struct emptying *e, const struct found *f, unsigned n) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_move *m = &e->move[e->count];

    if (e->count == HT_ARRAY_SIZE(e->move))
        return -ESTALE;
    *m = (struct ht_move){.owner = &e->owner[e->owners]};
    for (unsigned i = 0; i < n; i++) {
        struct ht_obj *o = ht_obj_find_locked(e->s, f[i].oid);
        struct ht_chunk *c = o && !o->dead ? ht_chunk_find(o, f[i].index) : NULL;
        if (!c || (c->flags & ~HT_CH_LOG_RESERVED) != HT_CH_PUB || c->pub.codec != HT_CODEC_RAW)
            return -ESTALE;
        if (i == 0) {
            int rc = ht_ref_copy(&m->was, &c->pub);
            if (rc)
                return rc;
            e->count++;
        } else if (!ht_ref_same_place(&c->pub, &m->was)) {
            return -ESTALE;
        }
        o->refs++;
        e->owner[e->owners++] = (struct ht_move_owner){o, f[i].index};
        m->owners++;
    }
    return 0;
}

/* All that lies there, and the free rest is taken. -ESTALE: something cannot be moved. */
static int gather(struct emptying *e, const struct found *f, size_t n)
{
    struct ht_store *s = e->s;
    unsigned inside = 0, blocks = 0;
    int rc = 0;

    ht_store_lock(s);
    for (size_t i = 0, same; !rc && i < n; i += same) {
        for (same = 1; i + same < n && f[i + same].place == f[i].place; same++)
            continue;
        rc = gather_one(e, &f[i], HT_MUTANT("owner-left-behind") ? 1 : (unsigned)same);
    }
    for (unsigned i = 0; !rc && i < e->count; i++) {
        rc = ht_move_may(s, &e->move[i]) ? 0 : -ESTALE;
        inside += blocks_inside(e, &e->move[i].was);
        blocks += ht_ref_blocks(&e->move[i].was);
    }
    unsigned taken = ht_alloc_group_taken(s->alloc, e->device, e->group), left = HT_ALLOC_GROUP_BLOCKS - taken;
    uint64_t broken = ht_alloc_free_blocks(s->alloc) - ht_alloc_whole_blocks(s->alloc);
    if (!rc &&
        (!inside || inside != taken || taken > TAKEN_MAX || broken < left + (uint64_t)blocks ||
         ht_alloc_available(s->alloc) < left + (uint64_t)blocks))
        rc = -ESTALE;
    if (!rc)
        rc = ht_alloc_reserve(s->alloc, left);
    if (!rc)
        e->runs = ht_alloc_close_group(s->alloc, e->device, e->group, e->closed);
    ht_store_unlock(s);
    return rc;
}

static int read_bytes(struct emptying *e, struct ht_move *m, struct ht_ring *ring, uint8_t *buf)
{
    struct ht_chunk_io io = {.obj = m->owner[0].obj, .index = m->owner[0].index, .ref = m->was};
    const struct ht_permit_request request = ht_admission_of_ref(e->s, &m->was);
    struct ht_permit permit;

    ht_permit_get(&e->s->gate, &request, &permit);
    ht_chunk_read_start(&io, ring, buf);
    int rc = ht_chunk_read_finish_quietly(&io, ring); /* scrub reports it */
    ht_permit_put(&permit);
    return rc;
}

static int write_bytes(struct emptying *e, struct ht_move *m, struct ht_ring *ring, uint8_t *buf)
{
    const struct ht_permit_request request = {
        .dev = e->s->dev[e->device], .direction = HT_DIRECTION_WRITE, .bytes = ht_ref_blocks(&m->was) * HT_BLOCK_BYTES};
    struct ht_permit permit;

    ht_permit_get(&e->s->gate, &request, &permit);
    int rc = ht_move_write(m, ring, buf);
    ht_permit_put(&permit);
    return rc;
}

static int copy_all(struct emptying *e, uint8_t *buf, uint64_t *out_bytes)
{
    struct ht_ring *ring = ht_store_ring(e->s);
    int rc = ring ? 0 : -ENOMEM;

    for (unsigned i = 0; !rc && i < e->count; i++) {
        rc = read_bytes(e, &e->move[i], ring, buf);
        if (!rc)
            rc = write_bytes(e, &e->move[i], ring, buf);
        *out_bytes += 2 * (uint64_t)e->move[i].was.stored;
    }
    return rc;
}

static void release(struct emptying *e)
{
    struct ht_store *s = e->s;

    ht_store_lock(s);
    for (unsigned i = 0; i < e->runs; i++)
        ht_alloc_release(s->alloc, &e->closed[i]);
    for (unsigned i = 0; i < e->count; i++) {
        if (ht_ref_holds(&e->move[i].now))
            ht_free_ref_now(s, &e->move[i].now);
        ht_ref_forget(&e->move[i].was);
    }
    for (unsigned i = 0; i < e->owners; i++)
        ht_obj_put_locked(e->owner[i].obj);
    ht_store_unlock(s);
    free(e->owner);
    free(e);
}

/* 0: it is empty as soon as the log is durable; -EAGAIN: not now; or another error. */
static int empty(struct emptying *e, const struct found *f, size_t n, uint8_t *buf, uint64_t *out_bytes)
{
    struct ht_move_figures *figures = &e->s->engine->compaction.figures;
    uint64_t lsn;
    int rc = gather(e, f, n);

    e->s->engine->compaction.pass_copied |= !rc;
    if (!rc)
        rc = copy_all(e, buf, out_bytes);
    if (!rc)
        rc = ht_move_publish(e->s, e->move, e->count, &lsn);
    bool all = !rc;
    for (unsigned i = 0; !rc && i < e->count; i++) {
        all &= e->move[i].moved;
        if (e->move[i].moved)
            figures->moved_bytes += e->move[i].was.stored;
    }
    if (!rc)
        rc = ht_store_sync(e->s, lsn);
    if (!rc && all)
        figures->emptied++;
    if (rc == -ESTALE || rc == -EIO || rc == -ENOSPC)
        rc = -EAGAIN;
    return rc ? rc : all ? 0 : -EAGAIN;
}

/* The next group of the batch. 0, or an error that is not the group's. */
static int empty_next(struct ht_move_batch *b, uint64_t *out_bytes)
{
    unsigned victim = b->at++;
    size_t from = 0, end;

    while (from < b->found_count && b->found[from].victim < victim)
        from++;
    for (end = from; end < b->found_count && b->found[end].victim == victim; end++)
        continue;
    struct emptying *e = b->victim[victim].skip || from == end ? NULL : calloc(1, sizeof(*e));
    if (e)
        e->owner = calloc(end - from, sizeof(*e->owner));
    if (!e || !e->owner) {
        free(e);
        b->figures->skipped++;
        return 0;
    }
    e->s = b->s;
    e->device = (unsigned)(b->victim[victim].key >> 48);
    e->group = b->victim[victim].key & ((1ull << 48) - 1);
    int rc = empty(e, &b->found[from], end - from, b->buf, out_bytes);
    release(e);
    b->figures->skipped += rc == -EAGAIN;
    return rc == -EAGAIN ? 0 : rc;
}

/* -------------------------------------------------------------------- batch */

static void free_batch(struct ht_move_batch *b)
{
    if (!b)
        return;
    b->figures->memory_bytes -=
        sizeof(*b) + HT_CHUNK_BYTES + b->oid_count * sizeof(*b->oids) + b->found_cap * sizeof(*b->found);
    free(b->found);
    free(b->oids);
    free(b->buf);
    free(b);
}

static int new_batch(struct ht_store *s, struct ht_move_batch **out)
{
    struct ht_move_batch *b = calloc(1, sizeof(*b));
    uint8_t *buf = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);

    if (!b || !buf) {
        free(b);
        free(buf);
        return -ENOMEM;
    }
    b->s = s;
    b->buf = buf;
    b->figures = &s->engine->compaction.figures;
    b->figures->memory_bytes += sizeof(*b) + HT_CHUNK_BYTES;
    *out = b;
    return 0;
}

/* The batch has its groups: the walk begins. */
static int begin_walk(struct ht_move_batch *b)
{
    int rc = ht_store_oids(b->s, &b->oids, &b->oid_count);

    if (!rc)
        b->figures->memory_bytes += b->oid_count * sizeof(*b->oids);
    return rc;
}

/* ------------------------------------------------------------------- engine */

/* True: the batch is full, or the store has no more such groups. */
static bool choose_more(struct ht_move_batch *b, unsigned *device, uint64_t *group, bool *out_end)
{
    struct ht_store *s = b->s;

    ht_store_lock(s);
    *out_end = !is_worth_it(s) || choose(b, device, group);
    ht_store_unlock(s);
    return *out_end || b->count == GROUPS_MAX;
}

/* 1: the batch has more to do; 0: it is done. */
static int go_on(struct ht_move_batch *b, uint64_t *out_bytes)
{
    int rc = 0;

    if (!b->walked)
        rc = walk(b);
    else if (b->at < b->count)
        rc = empty_next(b, out_bytes);
    return rc ? rc : !b->walked || b->at < b->count;
}

static uint64_t whole_groups(struct ht_store *s)
{
    ht_store_lock(s);
    uint64_t groups = ht_alloc_whole_blocks(s->alloc) / HT_ALLOC_GROUP_BLOCKS;
    ht_store_unlock(s);
    return groups;
}

/* What was moved may have broken other groups, or none could be emptied: then passes come later and later. */
static void end_pass(struct ht_store *s, struct ht_compaction *c)
{
    uint64_t emptied = c->figures.emptied - c->pass_emptied, whole = whole_groups(s);
    bool in_vain = emptied ? whole < c->pass_whole + (emptied + 1) / 2 : c->pass_copied;

    c->period_ms = in_vain ? ht_min_u64(2 * c->period_ms, PERIOD_MS_MAX) : PERIOD_MS;
    c->device = 0;
    c->group = 0;
    c->next_ns = ht_now_ns() + c->period_ms * MS;
    c->figures.passes++;
}

static void begin_pass(struct ht_store *s, struct ht_compaction *c)
{
    c->seen_lsn = s->frees.last_lsn + 1; /* never 0, as it is before the first pass */
    c->period_ms = c->period_ms ? c->period_ms : PERIOD_MS;
    c->pass_emptied = c->figures.emptied;
    c->pass_copied = false;
    c->pass_whole = whole_groups(s);
    c->in_pass = true;
}

static void end_batch(struct ht_store *s, struct ht_compaction *c)
{
    free_batch(c->batch);
    c->batch = NULL;
    if (!c->in_pass)
        end_pass(s, c);
}

static enum ht_step choose_step(struct ht_store *s, struct ht_compaction *c)
{
    struct ht_move_batch *b = c->batch;
    bool end;

    if (!choose_more(b, &c->device, &c->group, &end))
        return HT_STEP_WORKED;
    c->in_pass = !end;
    if (b->count)
        return begin_walk(b) ? HT_STEP_BLOCKED : HT_STEP_WORKED;
    end_batch(s, c);
    return HT_STEP_WORKED;
}

static enum ht_step step(void *ctx, struct ht_budget *budget)
{
    struct ht_store *s = ctx;
    struct ht_compaction *c = &s->engine->compaction;
    uint64_t now = ht_now_ns();

    if (ht_is_read_only(s))
        return HT_STEP_IDLE;
    if (!c->in_pass && !c->batch) {
        if (c->next_ns > now || c->seen_lsn == s->frees.last_lsn + 1) {
            budget->at_ns = c->next_ns > now ? c->next_ns : now + PERIOD_MS * MS;
            return HT_STEP_IDLE;
        }
        begin_pass(s, c);
    }
    if (!c->batch)
        return new_batch(s, &c->batch) ? HT_STEP_BLOCKED : HT_STEP_WORKED;
    if (!c->batch->oids)
        return choose_step(s, c);
    int rc = go_on(c->batch, &budget->bytes);
    if (rc > 0)
        return HT_STEP_WORKED;
    end_batch(s, c);
    return rc ? HT_STEP_BLOCKED : HT_STEP_WORKED;
}

enum { PASSES, MOVED, EMPTIED, SKIPPED, FIGURES };
static_assert((int)FIGURES <= (int)HT_ENGINE_FIGURES_MAX, "figures of an engine");

static const struct ht_engine_figure figures[FIGURES] = {
    [PASSES] = {"passes", "Passes over all groups of blocks."},
    [MOVED] = {"moved_bytes", "Content written elsewhere."},
    [EMPTIED] = {"emptied", "Groups that became free as a whole."},
    [SKIPPED] = {"skipped", "Groups that could not be emptied then."},
};

static void values(void *ctx, uint64_t out[])
{
    struct ht_compact_stats st;

    ht_store_compact_stats(ctx, &st);
    out[PASSES] = st.passes;
    out[MOVED] = st.moved_bytes;
    out[EMPTIED] = st.emptied;
    out[SKIPPED] = st.skipped;
}

const struct ht_engine_type ht_compact_engine = {
    .name = "compact",
    .pause_ms = PAUSE_MS,
    .step = step,
    .figure = figures,
    .figures = FIGURES,
    .values = values,
};

void ht_compact_end(struct ht_compaction *c)
{
    free_batch(c->batch);
    c->batch = NULL;
}

/* ---------------------------------------------------------------- interface */

void ht_store_compact_stats(struct ht_store *s, struct ht_compact_stats *out)
{
    const struct ht_move_figures *f = &s->engine->compaction.figures;

    *out = (struct ht_compact_stats){
        .passes = f->passes,
        .moved_bytes = f->moved_bytes,
        .emptied = f->emptied,
        .skipped = f->skipped,
        .memory_bytes = f->memory_bytes,
    };
}

int ht_store_compact(struct ht_store *s)
{
    unsigned device = 0;
    uint64_t group = 0, bytes = 0;
    bool end = false;
    int rc = ht_is_read_only(s) ? -EROFS : 0;

    while (!rc && !end) {
        struct ht_move_batch *b;
        rc = new_batch(s, &b);
        if (rc)
            break;
        while (!choose_more(b, &device, &group, &end))
            continue;
        rc = b->count ? begin_walk(b) : 0;
        while (!rc && b->count && (rc = go_on(b, &bytes)) > 0)
            rc = 0;
        free_batch(b);
    }
    if (!rc)
        s->engine->compaction.figures.passes++;
    return rc;
}
