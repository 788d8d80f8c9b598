/* SPDX-License-Identifier: Apache-2.0 */
/* engine.c - the table of the engines, and their lanes. */

#include "tiering/engine/engine.h"
#include "tiering/object/context.h"
#include "tiering/data/cold.h"
#include "tiering/data/data.h"
#include "tiering/engine/engine_priv.h"

#define RATE_BYTES (64 * HT_MIB)
#define RECOMPRESS_RATE_BYTES (256 * HT_MIB)

enum { CHECKPOINT_PAUSE_MS = 100 };

/* ------------------------------------------------------------ small engines */

/* After a failure, of memory say, it tries again soon: others wait for the space that it makes. */
static enum ht_step checkpoint_step(void *ctx, struct ht_budget *b)
{
    struct ht_store *s = ctx;
    enum ht_journal_need need = ht_journal_need(s->journal, &b->at_ns);

    if (need == HT_JOURNAL_NEEDS_NOTHING)
        return HT_STEP_IDLE;
    if (need == HT_JOURNAL_NEEDS_RESYNC) {
        enum ht_io_class was = ht_io_class_set(HT_IO_URGENT); /* commits wait for its last part */
        int rc = ht_journal_resync(s->journal);
        (void)rc; /* was logged, and is tried again */
        (void)ht_io_class_set(was);
        return HT_STEP_WORKED;
    }
    if (!ht_store_checkpoint(s) || s->failed || s->waits.stopping)
        return HT_STEP_WORKED;
    ht_journal_checkpoint_poke(s->journal);
    return HT_STEP_BLOCKED;
}

static enum ht_step health_step(void *ctx, struct ht_budget *b)
{
    ht_store_watch_devices(ctx);
    return ht_idle_until(b, ht_now_ns() + ht_health_period_ns(ctx));
}

static const struct ht_engine_type checkpoint_engine = {
    .name = "checkpoint", .pause_ms = CHECKPOINT_PAUSE_MS, .step = checkpoint_step};
static const struct ht_engine_type health_engine = {.name = "health", .step = health_step};

/* ------------------------------------------------------------------- lanes */

static uint64_t device_bytes(void *ctx)
{
    const struct ht_store *s = ctx;
    const struct ht_dev_counters c = ht_devs_totals(s->dev, s->dev_count);

    return c.read_bytes + c.written_bytes;
}

/* Without threads of their own nothing is read ahead or planned. */
static void wake_engines(struct ht_store *s, const struct ht_wakes *w)
{
    struct ht_engine *e = s->engine;

    for (unsigned i = 0; w->writeback && i < e->reliefs; i++)
        (void)ht_row_wake(&e->relief[i].row);
    if (w->cleaning && e->started)
        (void)ht_row_wake(&e->row[HT_ENGINE_CLEANING]);
    if (w->readahead && !s->opts.no_threads)
        (void)ht_row_wake(&e->row[HT_ENGINE_READAHEAD]);
    if (w->cold && !s->opts.no_threads)
        (void)ht_row_wake(&e->row[HT_ENGINE_COLD]);
    if (w->planner && !s->opts.no_threads && !s->opts.no_plan)
        (void)ht_row_wake(&e->row[HT_ENGINE_PLANNER]);
    if (w->discard && e->started)
        (void)ht_row_wake(&e->row[HT_ENGINE_DISCARD]);
    if (w->recompress && e->started)
        (void)ht_row_wake(&e->row[HT_ENGINE_RECOMPRESS]);
    if (w->compact && e->started)
        (void)ht_row_wake(&e->row[HT_ENGINE_COMPACT]);
}

void ht_engine_wake_checkpoint(void *ctx)
{
    struct ht_store *s = ctx;

    (void)ht_row_wake(&s->engine->row[HT_ENGINE_CHECKPOINT]);
}

static const struct ht_lane_config lanes[HT_ENGINE_LANES] = {
    [HT_LANE_COMMIT] = {.name = "ht-commit", .io_class = HT_IO_PLANNED},
    [HT_LANE_CHECKPOINT] = {.name = "ht-checkpoint", .io_class = HT_IO_BACKGROUND},
    [HT_LANE_HEALTH] = {.name = "ht-health"},
    [HT_LANE_CLEANING] = {.name = "ht-cleaning", .on_demand = true, .io_class = HT_IO_PLANNED},
    [HT_LANE_READAHEAD] = {.name = "ht-readahead", .on_demand = true, .io_class = HT_IO_PLANNED},
    [HT_LANE_COLD] = {.name = "ht-cold", .on_demand = true, .io_class = HT_IO_PLANNED},
    [HT_LANE_PLANNER] = {.name = "ht-planner", .on_demand = true, .io_class = HT_IO_PLANNED},
    [HT_LANE_BACKGROUND] = {.name = "ht-background",
                            .on_demand = true,
                            .io_class = HT_IO_BACKGROUND,
                            .traffic = device_bytes,
                            .short_steps = true},
};

static uint64_t usual_rate(const struct ht_store_opts *o)
{
    return o->background_rate_bytes ? o->background_rate_bytes : RATE_BYTES;
}

static uint64_t scrub_rate(const struct ht_store_opts *o)
{
    return o->scrub_rate_bytes ? o->scrub_rate_bytes : RATE_BYTES;
}

static uint64_t recompress_rate(const struct ht_store_opts *o)
{
    return RECOMPRESS_RATE_BYTES;
}

static bool is_dedup_on(const struct ht_store *s)
{
    return s->opts.dedup && !s->opts.read_only;
}

static bool is_compact_on(const struct ht_store *s)
{
    return s->opts.compact && !s->opts.read_only;
}

/* All but writeback, of which each NUMA node has one. */
static const struct {
    const struct ht_engine_type *type;
    enum ht_lane_id lane;
    uint64_t (*rate_bytes)(const struct ht_store_opts *o); /* a second; NULL: not paced */
    bool (*is_on)(const struct ht_store *s); /* by the options; it begins at the mount. NULL: when it is woken */
} engines[HT_ENGINES] = {
    [HT_ENGINE_COMMIT] = {&ht_commit_engine, HT_LANE_COMMIT},
    [HT_ENGINE_CHECKPOINT] = {&checkpoint_engine, HT_LANE_CHECKPOINT},
    [HT_ENGINE_HEALTH] = {&health_engine, HT_LANE_HEALTH},
    [HT_ENGINE_CLEANING] = {&ht_cleaning_engine, HT_LANE_CLEANING},
    [HT_ENGINE_READAHEAD] = {&ht_readahead_engine, HT_LANE_READAHEAD},
    [HT_ENGINE_COLD] = {&ht_cold_engine, HT_LANE_COLD},
    [HT_ENGINE_PLANNER] = {&ht_planner_engine, HT_LANE_PLANNER},
    [HT_ENGINE_SCRUB] = {&ht_scrub_engine, HT_LANE_BACKGROUND, scrub_rate},
    [HT_ENGINE_DISCARD] = {&ht_discard_engine, HT_LANE_BACKGROUND, NULL, ht_discard_is_on},
    [HT_ENGINE_DEDUP] = {&ht_dedup_engine, HT_LANE_BACKGROUND, usual_rate, is_dedup_on},
    [HT_ENGINE_RECOMPRESS] = {&ht_recompress_engine, HT_LANE_BACKGROUND, recompress_rate},
    [HT_ENGINE_COMPACT] = {&ht_compact_engine, HT_LANE_BACKGROUND, usual_rate, is_compact_on},
    [HT_ENGINE_DIGEST] = {&ht_digest_engine, HT_LANE_BACKGROUND, usual_rate},
};

/* Scrub begins when an operator says so. */
static bool is_off(const struct ht_store *s, unsigned i)
{
    if (s->opts.no_background && engines[i].lane == HT_LANE_BACKGROUND && i != HT_ENGINE_SCRUB)
        return true;
    return engines[i].is_on && !engines[i].is_on(s);
}

int ht_engine_setup(struct ht_store *s)
{
    struct ht_engine *e = calloc(1, sizeof(*e));

    if (!e)
        return -ENOMEM;
    if (ht_planner_init(&e->planner)) {
        free(e);
        return -ENOMEM;
    }
    ht_scrub_init(&e->scrub);
    ht_list_init(&e->pending_readers);
    for (unsigned i = 0; i < HT_ENGINE_LANES; i++) {
        struct ht_lane_config config = lanes[i];
        config.ctx = s;
        if (i == HT_LANE_BACKGROUND) {
            config.rate_bytes = s->opts.background_rate_bytes;
            config.cpu_percent = s->opts.background_cpu_percent;
        }
        ht_lane_init(&e->lane[i], &config);
    }
    for (unsigned i = 0; i < HT_ENGINES; i++)
        ht_lane_add(&e->lane[engines[i].lane], &e->row[i], engines[i].type, s,
                    engines[i].rate_bytes ? engines[i].rate_bytes(&s->opts) : 0);
    s->engine = e;
    s->hooks.make_room = ht_writeback_make_room;
    s->hooks.wake_engines = wake_engines;
    return 0;
}

void ht_engine_teardown(struct ht_store *s)
{
    struct ht_engine *e = s->engine;

    if (!e)
        return;
    for (unsigned i = 0; i < HT_ENGINE_LANES; i++)
        ht_lane_destroy(&e->lane[i]);
    for (unsigned i = 0; i < e->node_lanes; i++)
        ht_lane_destroy(&e->relief[i].lane);
    ht_scrub_destroy(&e->scrub);
    ht_dedup_free(e->dedup.pass);
    ht_move_free(e->compaction.batch); /* the allocator is gone, and with it the closed groups */
    ht_planner_destroy(&e->planner);
    ht_next_uses_free(&s->next_uses);
    ht_recompress_destroy(&e->recompress);
    free(e);
}

uint64_t ht_engine_memory_bytes(const struct ht_store *s)
{
    return s->engine->scrub.bytes + s->engine->dedup.bytes + s->engine->compaction.bytes +
        ht_planner_bytes(&s->engine->planner) + ht_next_uses_bytes(&s->next_uses) + s->engine->recompress.bytes;
}

/* ----------------------------------------------------------- start and stop */

void ht_engine_stop(struct ht_store *s)
{
    struct ht_engine *e = s->engine;

    if (!e)
        return;
    (void)ht_store_scrub_stop(s);
    s->waits.stopping = true;
    if (e->started)
        ht_journal_checkpoint_stop(s->journal);
    for (unsigned i = 0; i < HT_ENGINE_LANES; i++)
        ht_lane_stop(&e->lane[i]);
    for (unsigned i = 0; i < e->node_lanes; i++)
        ht_lane_stop(&e->relief[i].lane);
    ht_cold_finish_ahead(s);
    ht_recompress_stop(&e->recompress);
}

static void run_on_node(void *relief)
{
    const struct ht_relief *r = relief;

    ht_nodes_run_on(&r->s->numa.nodes, r->numa_index);
}

/* With several nodes each has a lane. */
static void add_reliefs(struct ht_store *s)
{
    struct ht_engine *e = s->engine;
    unsigned nodes = s->numa.nodes.count;

    e->reliefs = nodes > 1 ? nodes : 1;
    e->node_lanes = nodes > 1 ? nodes : 0;
    for (unsigned i = 0; i < e->reliefs; i++) {
        struct ht_relief *r = &e->relief[i];
        const struct ht_lane_config config = {
            .name = "ht-writeback", .ctx = r, .enter = run_on_node, .io_class = HT_IO_PLANNED};
        r->s = s;
        r->numa_index = e->node_lanes ? (int)i : HT_NUMA_INDEX_ANY;
        if (e->node_lanes)
            ht_lane_init(&r->lane, &config);
        ht_lane_add(e->node_lanes ? &r->lane : &e->lane[HT_LANE_COMMIT], &r->row, &ht_relief_engine, r, 0);
    }
}

int ht_engine_start(struct ht_store *s)
{
    struct ht_engine *e = s->engine;
    int rc = 0;

    for (unsigned i = 0; i < HT_ENGINES; i++)
        if (is_off(s, i))
            ht_row_end(&e->row[i]);
    ht_store_lock(s);
    ht_alloc_note_freed(s->alloc, !is_off(s, HT_ENGINE_DISCARD));
    ht_store_unlock(s);
    if (s->opts.no_threads)
        return 0;
    add_reliefs(s);
    e->started = true;
    for (unsigned i = 0; !rc && i < e->node_lanes; i++)
        rc = ht_lane_start(&e->relief[i].lane);
    for (unsigned i = 0; !rc && i < HT_ENGINE_LANES; i++)
        rc = lanes[i].on_demand ? 0 : ht_lane_start(&e->lane[i]);
    for (unsigned i = 0; !rc && i < HT_ENGINES; i++)
        rc = engines[i].is_on && !is_off(s, i) ? ht_row_wake(&e->row[i]) : 0;
    if (rc)
        ht_engine_stop(s);
    return rc;
}
