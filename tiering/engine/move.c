/* SPDX-License-Identifier: Apache-2.0 */
/*
 * move.c - the engine that empties groups of blocks in which little is taken (compaction).
 *
 *   asleep --woken: there is space to gain--> choosing: a batch of sparse groups ---none is left--> asleep
 *                                               ^          |
 *                                               |          v
 *                                               |       walking all references: who owns what is in these groups
 *                                               |          |
 *                              50 times the walk's time    v
 *                                               '----- emptying the groups, a unit in each step (move_unit.c)
 *
 * Free space, the end of a discard and transactions wake it (object/context.c): a pass begins a second after the last
 * one, or later if the walk takes long. After a pass in vain it pauses, longer each time. A store that has many more
 * nearly empty groups than that pass left ends the pause.
 *
 * A group is emptied if all that is taken there belongs to published content of which all owners were found, and if the
 * other broken groups have room for that. Otherwise it stays as it is: a group that is half empty is no gain. Owners
 * move together (txn/move.c), the chunks of an object in their order. Compressed content moves as it is.
 *
 * A walk costs the same for one group as for many, so a batch has many. The notes of owners have a bound. If groups
 * have more owners, half of the groups leave the batch, as often as it needs, and the next batch begins with them. A
 * group that has too many owners alone stays, and so does content of more than HT_OWNERS_MAX.
 */
#include "tiering/engine/move.h"

#include <assert.h>
#include <stdlib.h>

#include "tiering/space/alloc.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/data/flush.h"
#include "tiering/engine/engine_priv.h"
#include "tiering/engine/move_batch.h"

#define MS UINT64_C(1000000)

enum {
    SLICE_CHUNKS = 256,
    PAUSE_MS = 1000,
    PERIOD_MS = 1000, /* between passes */
    VAIN_MS = 30000,  /* after one that gained little; twice as long after the next one */
    VAIN_MS_MAX = 3600000,
    VAIN_GROUPS = 16, /* with so many more sparse groups than twice those that it left it is worth another one */
};

/* ----------------------------------------------------------------- choosing */

/* Sparse groups from *device, *group on; true: the end was reached. Lock held. */
static bool choose(struct ht_move_batch *b, unsigned *device, uint64_t *group) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = b->s;

    while (*device < s->dev_count && b->count < HT_MOVE_GROUPS_MAX) {
        bool closed = ht_device_is_closed(s, *device);
        uint64_t next = closed ? HT_ALLOC_NO_GROUP : ht_alloc_next_sparse(s->alloc, *device, *group);
        if (next == HT_ALLOC_NO_GROUP) {
            ++*device;
            *group = 0;
            continue;
        }
        b->victim[b->count++] = (struct ht_move_victim){.key = ht_place(*device, next)};
        *group = next + 1;
    }
    return *device == s->dev_count;
}

/* ------------------------------------------------------------------ walking */

/* The victim, or NULL. They are in order. */
static struct ht_move_victim *find_victim(struct ht_move_batch *b, uint64_t key)
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

static int note(struct ht_move_batch *b, const struct ht_owner_found *f)
{
    uint64_t before = ht_owners_bytes(&b->owners);
    int rc = ht_owners_note(&b->owners, f);

    *b->bytes += ht_owners_bytes(&b->owners) - before;
    return rc;
}

/* One group alone has more owners than the notes may have. */
static bool is_full(const struct ht_move_batch *b)
{
    return b->count == 1 && b->owners.count >= b->owners.most;
}

/* Has the walk noted this chunk for the victim? Its notes are the last ones, from `first` on. */
static bool is_noted(const struct ht_move_batch *b, size_t first, unsigned victim)
{
    for (size_t i = first; i < b->owners.count; i++)
        if (b->owners.found[i].group == victim)
            return true;
    return false;
}

/* The chunk is noted once for each victim that its extents reach into. */
static int look_at(void *ctx, struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_move_batch *b = ctx;

    if (!(c->flags & HT_CH_PUB) || !ht_ref_holds(&c->pub))
        return HT_WALK_ON;
    if (ht_owners_lack_room(&b->owners, 0))
        return HT_WALK_PAUSE;
    size_t noted = b->owners.count;
    uint64_t place = ht_ref_place(&c->pub);
    for (unsigned i = 0; i < ht_ref_extents(&c->pub); i++) {
        struct ht_extent e = ht_ref_extent(&c->pub, i);
        uint64_t end = (e.block + e.blocks - 1) / HT_ALLOC_GROUP_BLOCKS;
        for (uint64_t group = e.block / HT_ALLOC_GROUP_BLOCKS; group <= end; group++) {
            struct ht_move_victim *v = find_victim(b, ht_place(e.device, group));
            if (!v || is_noted(b, noted, (unsigned)(v - b->victim)))
                continue;
            const struct ht_owner_found f = {place, o->oid, index, (unsigned)(v - b->victim)};
            v->skip |= ht_owners_are_too_many(b->s, &c->pub) || is_full(b);
            int rc = v->skip ? 0 : note(b, &f);
            if (rc)
                return rc;
        }
    }
    return HT_WALK_ON;
}

static const struct ht_walk_visitor visitor = {.chunk = look_at};

/* Groups that leave the owners leave the batch. */
static int walk(struct ht_move_batch *b)
{
    ht_owners_make_room(&b->owners);
    if (b->owners.groups < b->count) {
        b->count = (unsigned)b->owners.groups;
        b->next_key = b->victim[b->count].key;
    }
    return ht_walk_slice(&b->walk, &visitor, b, SLICE_CHUNKS);
}

/* -------------------------------------------------------------------- batch */

static void free_batch(struct ht_move_batch *b)
{
    if (!b)
        return;
    *b->bytes -= sizeof(*b) + HT_CHUNK_BYTES + ht_walk_bytes(&b->walk) + ht_owners_bytes(&b->owners);
    ht_walk_end(&b->walk);
    ht_owners_end(&b->owners);
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
    b->flight = 1;
    b->figure = s->engine->row[HT_ENGINE_COMPACT].figure;
    b->bytes = &s->engine->compaction.bytes;
    *b->bytes += sizeof(*b) + HT_CHUNK_BYTES;
    *out = b;
    return 0;
}

/* The batch has its groups: the walk begins. */
static int begin_walk(struct ht_move_batch *b)
{
    int rc = ht_walk_begin(&b->walk, b->s);

    ht_owners_begin(&b->owners, 2 * (size_t)ht_owners_max(b->s), b->count);
    if (!rc)
        *b->bytes += ht_walk_bytes(&b->walk);
    return rc;
}

/* ------------------------------------------------------------------- engine */

/* True: the store has no more such groups. */
static bool choose_groups(struct ht_move_batch *b, unsigned *device, uint64_t *group)
{
    struct ht_store *s = b->s;

    ht_store_lock(s);
    bool end = !ht_alloc_wants_compaction(s->alloc) || choose(b, device, group);
    ht_store_unlock(s);
    return end;
}

/* What comes next cannot be divided, and takes longer than a step. */
static bool is_long(const struct ht_move_batch *b)
{
    return ht_walk_is_over(&b->walk) && (b->sorted ? ht_move_is_long(b) : b->owners.count > HT_OWNERS_SORT_MAX);
}

/* 1: the batch has more to do; 0: it is done. */
static int go_on(struct ht_move_batch *b, struct ht_budget *budget)
{
    int rc = 0;

    budget->next_is_long = !budget->may_be_long && is_long(b);
    if (budget->next_is_long)
        return 1;
    if (!ht_walk_is_over(&b->walk)) {
        rc = walk(b);
    } else if (b->sorted) {
        rc = ht_move_unit(b, budget);
    } else {
        ht_owners_sort(&b->owners);
        b->sorted = true;
    }
    return rc ? rc : !b->sorted || !ht_move_is_over(b);
}

/* Groups that had to leave the batch come next. */
static bool is_cut(const struct ht_move_batch *b, unsigned *out_device, uint64_t *out_group)
{
    if (!b->next_key)
        return false;
    *out_device = ht_move_device(b->next_key);
    *out_group = ht_move_group(b->next_key);
    return true;
}

static uint64_t whole_groups(struct ht_store *s)
{
    ht_store_lock(s);
    uint64_t groups = ht_alloc_whole_blocks(s->alloc) / HT_ALLOC_GROUP_BLOCKS;
    ht_store_unlock(s);
    return groups;
}

static uint64_t sparse_groups(struct ht_store *s)
{
    ht_store_lock(s);
    uint64_t groups = ht_alloc_sparse_groups(s->alloc);
    ht_store_unlock(s);
    return groups;
}

/* What was moved may have broken other groups, or none could be emptied: then passes come later and later. */
static void end_pass(struct ht_store *s, struct ht_compaction *c)
{
    _Atomic uint64_t *figure = s->engine->row[HT_ENGINE_COMPACT].figure;
    uint64_t emptied = figure[HT_COMPACT_EMPTIED] - c->pass_emptied, whole = whole_groups(s);
    bool in_vain = !emptied || whole < c->pass_whole + (emptied + 1) / 2;
    uint64_t now = ht_now_ns();

    c->vain_ms = in_vain ? ht_min_u64(ht_max_u64(2 * c->vain_ms, VAIN_MS), VAIN_MS_MAX) : 0;
    c->vain_until_ns = in_vain ? now + c->vain_ms * MS : 0;
    c->pass_left = sparse_groups(s);
    c->device = 0;
    c->group = 0;
    c->next_ns = ht_max_u64(c->next_ns, now + PERIOD_MS * MS);
    figure[HT_COMPACT_PASSES]++;
}

/* False: there is nothing to do until it is woken, or until then. */
static bool begin_pass(struct ht_store *s, struct ht_compaction *c, uint64_t *out_at_ns)
{
    bool pauses = c->vain_until_ns > ht_now_ns();

    *out_at_ns = pauses ? c->vain_until_ns : 0;
    ht_store_lock(s);
    s->waits.compact_groups_min = pauses ? 2 * c->pass_left + VAIN_GROUPS : 0;
    bool begins = ht_compact_may_begin(s);
    s->waits.compact_sleeps = !begins;
    if (begins) {
        s->waits.compact_seen_lsn = s->frees.last_lsn + 1;
        s->waits.compact_freed = false;
    }
    ht_store_unlock(s);
    if (!begins)
        return false;
    c->pass_emptied = s->engine->row[HT_ENGINE_COMPACT].figure[HT_COMPACT_EMPTIED];
    c->pass_whole = whole_groups(s);
    c->in_pass = true;
    return true;
}

static void end_batch(struct ht_store *s, struct ht_compaction *c)
{
    c->next_ns = ht_walk_next_ns(&c->batch->walk, 0);
    c->in_pass |= is_cut(c->batch, &c->device, &c->group);
    ht_move_open_all(c->batch);
    free_batch(c->batch);
    c->batch = NULL;
    if (!c->in_pass)
        end_pass(s, c);
}

static enum ht_step choose_step(struct ht_store *s, struct ht_compaction *c)
{
    struct ht_move_batch *b = c->batch;

    c->in_pass = !choose_groups(b, &c->device, &c->group);
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
    if (!c->batch) {
        if (c->next_ns > now) {
            budget->at_ns = c->next_ns;
            return HT_STEP_IDLE;
        }
        if (!c->in_pass && !begin_pass(s, c, &budget->at_ns))
            return HT_STEP_IDLE;
        return new_batch(s, &c->batch) ? HT_STEP_BLOCKED : HT_STEP_WORKED;
    }
    if (!c->batch->walk.oids)
        return choose_step(s, c);
    int rc = go_on(c->batch, budget);
    if (rc > 0)
        return HT_STEP_WORKED;
    end_batch(s, c);
    return rc ? HT_STEP_BLOCKED : HT_STEP_WORKED;
}

static_assert((int)HT_COMPACT_FIGURES <= (int)HT_ENGINE_FIGURES_MAX, "figures of an engine");

static const struct ht_engine_figure figures[HT_COMPACT_FIGURES] = {
    [HT_COMPACT_PASSES] = {"passes", "Passes over all groups of blocks."},
    [HT_COMPACT_MOVED] = {"moved_bytes", "Content written elsewhere."},
    [HT_COMPACT_EMPTIED] = {"emptied", "Groups that became free as a whole."},
    [HT_COMPACT_SKIPPED] = {"skipped", "Groups that could not be emptied then."},
};

const struct ht_engine_type ht_compact_engine = {
    .name = "compact",
    .pause_ms = PAUSE_MS,
    .step = step,
    .figure = figures,
    .figures = HT_COMPACT_FIGURES,
};

/* The allocator is gone, and with it the closed groups. */
void ht_compact_end(struct ht_compaction *c)
{
    free_batch(c->batch);
    c->batch = NULL;
}
