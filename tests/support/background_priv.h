/* SPDX-License-Identifier: Apache-2.0 */
/* background_priv.h - engines whose steps a test makes in its own thread. */
#pragma once

#include <string.h>

#include "tiering/engine/engine_priv.h"
#include "tiering/object/context.h"

/* Cleans some dirty images, as memory pressure does. How many, or the error if none could be. */
static inline int background_clean(struct ht_store *s)
{
    enum { BATCH = 16 };

    return ht_writeback_some(s, BATCH, HT_CLEAN_ANY, HT_NUMA_INDEX_ANY);
}

/* What engines wait for is due. */
static inline void background_let_time_pass(struct ht_store *s)
{
    struct ht_engine *e = s->engine;

    e->dedup.next_ns = 0;
    e->dedup.due_ns = ht_min_u64(e->dedup.due_ns, ht_now_ns());
    e->compaction.next_ns = e->compaction.vain_until_ns = 0;
    e->recompress.next_ns = 0;
    e->discard.due_ns = 1;
}

static inline enum ht_step background_step(struct ht_store *s, enum ht_engine_id id, uint64_t *out_at_ns)
{
    struct ht_budget b = {.most_bytes = HT_MIB, .until_ns = UINT64_MAX, .may_be_long = true};
    enum ht_step found = s->engine->row[id].type->step(s, &b);

    *out_at_ns = b.at_ns;
    return found;
}

/*
 * Steps of an engine in this thread, whatever the options say, until it has made a pass or has nothing to do. No other
 * thread makes any. -EAGAIN: it is blocked.
 */
static inline int background_pass(struct ht_store *s, enum ht_engine_id id, unsigned passes)
{
    struct ht_row *r = &s->engine->row[id];
    uint64_t was = r->figure[passes], at_ns;

    while (r->figure[passes] == was) {
        background_let_time_pass(s);
        enum ht_step found = background_step(s, id, &at_ns);
        if (found == HT_STEP_BLOCKED)
            return -EAGAIN;
        if (found == HT_STEP_IDLE && !at_ns)
            return 0;
    }
    return 0;
}

/* A pass over all content, also over what was compared in vain. */
static inline int background_dedup(struct ht_store *s)
{
    struct ht_dedup *d = &s->engine->dedup;

    ht_store_lock(s);
    memset(&d->vain, 0, sizeof(d->vain));
    ht_store_unlock(s);
    d->seen_lsn = 0;
    return background_pass(s, HT_ENGINE_DEDUP, HT_DEDUP_PASSES);
}

static inline int background_compact(struct ht_store *s)
{
    ht_store_lock(s);
    s->waits.compact_freed = true;
    ht_store_unlock(s);
    return background_pass(s, HT_ENGINE_COMPACT, HT_COMPACT_PASSES);
}

/* A round over all objects: it compresses what has not changed since the last one. -EAGAIN: it ended early. */
static inline int background_compress(struct ht_store *s)
{
    enum ht_step found;
    uint64_t at_ns;

    background_let_time_pass(s);
    do
        found = background_step(s, HT_ENGINE_RECOMPRESS, &at_ns);
    while (found == HT_STEP_WORKED);
    return found == HT_STEP_BLOCKED ? -EAGAIN : 0;
}

static inline void background_discard(struct ht_store *s)
{
    uint64_t at_ns;

    ht_store_lock(s);
    s->waits.discard_noted = true;
    ht_store_unlock(s);
    background_let_time_pass(s);
    while (background_step(s, HT_ENGINE_DISCARD, &at_ns) == HT_STEP_WORKED)
        ;
}
