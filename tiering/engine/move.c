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
#include "tiering/object/context.h"
#include "tiering/data/flush.h"
#include "tiering/engine/move_batch.h"

#define MS UINT64_C(1000000)

enum {
    PAUSE_MS = 1000,
    PERIOD_MS = 1000, /* between passes */
    VAIN_MS = 30000,  /* after one that gained little; twice as long after the next one */
    VAIN_MS_MAX = 3600000,
    VAIN_GROUPS = 16, /* with so many more sparse groups than twice those that it left it is worth another one */
};

/* ----------------------------------------------------------------- choosing */

/* Sparse groups from *device, *group on; true: the store has no more. Lock held. */
static bool choose(struct ht_move_batch *b, unsigned *device, uint64_t *group) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = b->s;

    if (!ht_alloc_wants_compaction(s->alloc))
        return true;
    while (*device < s->dev_count && b->count < HT_MOVE_GROUPS_MAX) {
        bool closed = ht_device_is_closed(s, *device);
        uint64_t next = closed ? HT_NO_GROUP : ht_alloc_next_sparse(s->alloc, *device, *group);
        if (next == HT_NO_GROUP) {
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

static bool is_among(const uint32_t group[], unsigned n, uint32_t it)
{
    while (n && group[n - 1] != it)
        n--;
    return n;
}

/* The victims that the extents of a content reach into, but those that stay. */
static unsigned victims_of(void *ctx, const struct ht_ref *ref, uint32_t out[]) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_move_batch *b = ctx;
    unsigned n = 0;

    for (unsigned i = 0; i < ht_ref_extents(ref); i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        uint64_t end = (e.block + e.blocks - 1) / HT_GROUP_BLOCKS;
        for (uint64_t group = e.block / HT_GROUP_BLOCKS; group <= end; group++) {
            uint64_t key = ht_place(e.device, group);
            struct ht_move_victim *v = bsearch(&key, b->victim, b->count, sizeof(*v), ht_compare_numbers);
            uint32_t at = v ? (uint32_t)(v - b->victim) : 0;
            if (!v || is_among(out, n, at))
                continue;
            v->skip |= ht_owners_are_too_many(b->s, ref) || ht_owners_are_full(&b->pass.shared, at);
            if (!v->skip)
                out[n++] = at;
        }
    }
    return n;
}

static const struct ht_pass_user user = {.groups = victims_of};

/* -------------------------------------------------------------------- batch */

void ht_move_free(struct ht_move_batch *b)
{
    if (!b)
        return;
    *b->bytes -= sizeof(*b) + HT_CHUNK_BYTES;
    ht_pass_end(&b->pass);
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

/* ------------------------------------------------------------------- engine */

/* 1: the batch has more to do; 0: it is done. */
static int go_on(struct ht_move_batch *b, struct ht_budget *budget)
{
    int rc = 0;

    /* What comes next cannot be divided, and takes longer than a step. */
    budget->next_is_long = !budget->may_be_long && (b->sorted ? ht_move_is_long(b) : ht_pass_is_long(&b->pass));
    if (budget->next_is_long)
        return 1;
    if (!ht_walk_is_over(&b->pass.walk))
        rc = ht_pass_next(&b->pass, budget);
    else if (b->sorted)
        rc = ht_move_unit(b, budget);
    else {
        /* All was walked. Groups that left the notes leave the batch. */
        if (b->pass.shared.groups < b->count) {
            b->count = (unsigned)b->pass.shared.groups;
            b->next_key = b->victim[b->count].key;
        }
        ht_owners_sort(&b->pass.shared);
        b->sorted = true;
    }
    return rc ? rc : !b->sorted || !ht_move_is_over(b);
}

/* Moved content may have broken other groups, or none could be emptied: then passes come later and later. */
static void end_pass(struct ht_store *s, struct ht_compaction *c)
{
    _Atomic uint64_t *figure = s->engine->row[HT_ENGINE_COMPACT].figure;
    uint64_t emptied = figure[HT_COMPACT_EMPTIED] - c->pass_emptied;

    ht_store_lock(s);
    uint64_t whole = ht_alloc_whole_blocks(s->alloc) / HT_GROUP_BLOCKS;
    c->pass_left = ht_alloc_sparse_groups(s->alloc);
    ht_store_unlock(s);
    bool in_vain = !emptied || whole < c->pass_whole + (emptied + 1) / 2;
    uint64_t now = ht_now_ns();
    c->vain_ms = in_vain ? ht_min_u64(ht_max_u64(2 * c->vain_ms, VAIN_MS), VAIN_MS_MAX) : 0;
    c->vain_until_ns = in_vain ? now + c->vain_ms * MS : 0;
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
        c->pass_whole = ht_alloc_whole_blocks(s->alloc) / HT_GROUP_BLOCKS;
    }
    ht_store_unlock(s);
    if (!begins)
        return false;
    c->pass_emptied = s->engine->row[HT_ENGINE_COMPACT].figure[HT_COMPACT_EMPTIED];
    c->in_pass = true;
    return true;
}

static void end_batch(struct ht_store *s, struct ht_compaction *c)
{
    c->next_ns = ht_walk_next_ns(&c->batch->pass.walk, 0);
    if (c->batch->next_key) { /* groups that had to leave the batch come next */
        c->device = ht_move_device(c->batch->next_key);
        c->group = ht_move_group(c->batch->next_key);
        c->in_pass = true;
    }
    ht_move_open_all(c->batch);
    ht_move_free(c->batch);
    c->batch = NULL;
    if (!c->in_pass)
        end_pass(s, c);
}

static enum ht_step choose_step(struct ht_store *s, struct ht_compaction *c)
{
    struct ht_move_batch *b = c->batch;

    c->in_pass = !ht_store_locked(s, choose(b, &c->device, &c->group));
    if (b->count)
        return ht_pass_begin(&b->pass, s, &user, b, 0, b->count, b->bytes) ? HT_STEP_BLOCKED : HT_STEP_WORKED;
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
        if (c->next_ns > now)
            return ht_idle_until(budget, c->next_ns);
        if (!c->in_pass && !begin_pass(s, c, &budget->at_ns))
            return HT_STEP_IDLE;
        return new_batch(s, &c->batch) ? HT_STEP_BLOCKED : HT_STEP_WORKED;
    }
    if (!c->batch->pass.walk.oids)
        return choose_step(s, c);
    int rc = go_on(c->batch, budget);
    if (rc > 0)
        return HT_STEP_WORKED;
    end_batch(s, c);
    return rc ? HT_STEP_BLOCKED : HT_STEP_WORKED;
}

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
