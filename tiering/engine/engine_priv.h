/* SPDX-License-Identifier: Apache-2.0 */
/* engine_priv.h - inside engine/. */
#pragma once

#include <pthread.h>

#include "tiering/base/list.h"
#include "tiering/base/lock.h"
#include "tiering/sys/nodes.h"
#include "tiering/io/rings.h"
#include "tiering/space/alloc.h"
#include "tiering/api/background.h"
#include "tiering/tier/runs.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/engine.h"

struct ht_dedup_pass;
struct ht_move_batch;
struct ht_pass;
struct ht_recompress_round;
struct ht_recompress_seen;

/* ----------------------------------------------------------------- state */

/* Its thread alone touches what has no lock. */
struct ht_commit_timer {
    uint64_t next_ns; /* when a commit is due; 0: not planned yet */
    uint64_t due_ns;  /* since when it is due, or 0 */
    bool reported;    /* that it waits */
};

/* Writeback of the images of one NUMA node, or of all. */
struct ht_relief {
    struct ht_store *s;
    int numa_index;
    uint64_t in_vain_ns; /* since when nothing was cleaned, or 0; its thread's */
    struct ht_row row;
    struct ht_lane lane; /* of a node */
};

/* planner.c */
struct ht_planner {
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        struct ht_runs runs;
        struct ht_forecast *forecast;  /* the plan in use, or NULL */
        uint64_t tried_runs, tried_ns; /* when a plan was last made or refused: runs so far, and the time */
        uint64_t wait_ns;              /* until the next try */
        /* So many wait for the end of a step, and are pinned, since then: older steps differ. */
        uint64_t waiting_bytes, pinned_bytes, valid_ns;
        uint64_t fetch_ns;                       /* no read ahead before: the last one found no room */
        bool outdated;                           /* the plan in use is of an older step */
        bool hinted;                             /* the last read ahead was of a hint */
        uint64_t made, dropped, hits, strangers; /* the last two: of former plans */
    };
};

struct ht_scrub_run; /* scrub.c */

struct ht_scrub {
    struct ht_mutex lock; /* a leaf */
    pthread_cond_t changed;
    _Atomic bool stop;      /* the run should end. Set with the lock */
    _Atomic uint64_t bytes; /* heap of the run's pass */
    /* Until then a run reads for others, if its row is not paused: they wait for it. */
    _Atomic uint64_t awaited_until_ns;
    HT_GUARDED_BY(HT_LOCK_SCRUB) struct {
        uint64_t began_ns;
        struct ht_scrub_stats st;
        struct ht_scrub_run *run; /* the one that the row makes, or NULL */
    };
};
HT_MUTEX_OF(ht_scrub_lock, struct ht_scrub, lock, HT_LOCK_SCRUB)

/* ----------------------------------------------------------------- deduplication */

/* Of its row. */
enum ht_dedup_figure {
    HT_DEDUP_PASSES,
    HT_DEDUP_COMPARED,
    HT_DEDUP_SHARED,
    HT_DEDUP_HOLES,
    HT_DEDUP_DIFFERENT,
    HT_DEDUP_SKIPPED,
    HT_DEDUP_LEFT,
    HT_DEDUP_FIGURES
};

/* The engine's; its thread's alone. */
struct ht_dedup {
    _Atomic uint64_t bytes; /* heap; any thread reads it */
    /* ht_store_reserves_complete: any thread's, apart from fields that the compiler may read together. */
    _Atomic bool reserved;
    /*
     * Content that was compared or read in vain, by hashes of place and checksum: no later pass looks at it again. A
     * small table, of which new entries take the place of old ones; 0: none. The store's lock guards it.
     */
    uint64_t vain[1024];
    struct ht_dedup_pass *pass; /* NULL: none */
    uint64_t due_ns;            /* its walk begins not before; 0: not all versions are noted */
    uint64_t seen_lsn;          /* what the log had when the last whole round began */
    uint64_t next_ns;           /* the next pass begins not before */
    bool again;                 /* something was skipped */
};

/* A pass is due: it waits for content that scrub reads. */
bool ht_dedup_waits(struct ht_store *s);
/* Scrub has read the raw content that has come to its pass, and it is sound. */
void ht_dedup_saw(struct ht_store *s, const struct ht_pass *from, const uint8_t *content) HT_EXCLUDES(HT_LOCK_STORE);
void ht_dedup_share_seen(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE); /* at the end of its step */

void ht_dedup_free(struct ht_dedup_pass *p); /* or NULL. No step runs */

/* ------------------------------------------------------------------- compression */

/* Of its row. */
enum ht_recompress_figure {
    HT_RECOMPRESS_CHUNKS,
    HT_RECOMPRESS_RAW,
    HT_RECOMPRESS_SAVED,
    HT_RECOMPRESS_KEPT_RAW,
    HT_RECOMPRESS_INLINE_CHUNKS,
    HT_RECOMPRESS_INLINE_SAVED,
    HT_RECOMPRESS_FIGURES
};

/* The engine's thread alone touches what is not atomic. */
struct ht_recompress {
    ht_compress_fn may; /* with ctx fixed before the mount */
    void *ctx;
    struct ht_recompress_round *round; /* the one that goes on, or NULL */
    struct ht_recompress_seen *seen;   /* in the round before */
    size_t seen_count;
    uint64_t next_ns;       /* when the next round is due */
    _Atomic uint64_t bytes; /* heap */
};

/*
 * Scrub has read raw content with these owners, and it is sound. If it may be compressed, a round that waits for scrub
 * does so. *out_bytes grows by what was written.
 */
void ht_recompress_saw(struct ht_store *s, const struct ht_move *m, const void *bytes, uint64_t *out_bytes)
    HT_EXCLUDES(HT_LOCK_STORE);
/* Gives back the space of frames that wait. No step runs; also as a part of one. */
void ht_recompress_stop(struct ht_recompress *c) HT_EXCLUDES(HT_LOCK_STORE);
void ht_recompress_destroy(struct ht_recompress *c);

/* -------------------------------------------------------------------- compaction */

/* Of its row. */
enum ht_compact_figure {
    HT_COMPACT_PASSES,
    HT_COMPACT_MOVED,
    HT_COMPACT_EMPTIED,
    HT_COMPACT_SKIPPED,
    HT_COMPACT_FIGURES
};

/* The engine's; its thread's alone. */
struct ht_compaction {
    _Atomic uint64_t bytes;      /* heap; any thread reads it */
    struct ht_move_batch *batch; /* NULL: none */
    unsigned device;             /* where the next batch begins to look for groups */
    uint64_t group;
    bool in_pass;                      /* there are groups that it has not looked at */
    uint64_t next_ns;                  /* as of struct ht_dedup */
    uint64_t pass_emptied, pass_whole; /* emptied and whole groups when the pass began */
    uint64_t vain_ms, vain_until_ns;   /* after a pass in vain: the pause, and its end; 0: it gained */
    uint64_t pass_left;                /* sparse groups when it ended */
};

void ht_move_free(struct ht_move_batch *b); /* or NULL. No step runs */

/* -------------------------------------------------------------------- all engines */

enum ht_lane_id {
    HT_LANE_COMMIT,
    HT_LANE_CHECKPOINT,
    HT_LANE_HEALTH,
    HT_LANE_CLEANING,
    HT_LANE_READAHEAD,
    HT_LANE_COLD,
    HT_LANE_PLANNER,
    HT_LANE_BACKGROUND,
    HT_ENGINE_LANES
};
enum ht_engine_id {
    HT_ENGINE_COMMIT,
    HT_ENGINE_CHECKPOINT,
    HT_ENGINE_HEALTH,
    HT_ENGINE_CLEANING,
    HT_ENGINE_READAHEAD,
    HT_ENGINE_COLD,
    HT_ENGINE_PLANNER,
    HT_ENGINE_SCRUB,
    HT_ENGINE_DISCARD,
    HT_ENGINE_DEDUP,
    HT_ENGINE_RECOMPRESS,
    HT_ENGINE_COMPACT,
    HT_ENGINE_DIGEST,
    HT_ENGINES
};

/* Its thread alone touches what is not atomic. */
struct ht_discard {
    uint64_t due_ns; /* when it looks at what became free, or 0 */
    bool walking;
    struct ht_alloc_freed_walk walk;
    _Atomic uint32_t refused; /* devices (bits) that have refused a discard: they are not asked again */
};

/* The state of engine/. */
struct ht_engine {
    struct ht_list pending_readers HT_GUARDED_BY(HT_LOCK_STORE); /* in the order of their turns */
    struct ht_scrub scrub;                                       /* its own lock */
    struct ht_dedup dedup;
    struct ht_planner planner;
    struct ht_recompress recompress;
    struct ht_compaction compaction;
    /* One for each place; without places the first. */
    struct ht_commit_timer commit;
    struct ht_discard discard;
    const struct ht_digest_client *_Atomic digest; /* NULL: none */
    struct ht_row row[HT_ENGINES];
    struct ht_lane lane[HT_ENGINE_LANES];
    /* Fixed once the store is mounted. */
    struct ht_relief relief[HT_NODES_MAX];
    unsigned reliefs, node_lanes;
    bool started;
};

bool ht_discard_is_on(const struct ht_store *s); /* by the options, for a device at least */
extern const struct ht_engine_type ht_planner_engine, ht_cleaning_engine, ht_dedup_engine, ht_recompress_engine;
extern const struct ht_engine_type ht_commit_engine, ht_relief_engine, ht_digest_engine, ht_compact_engine;

/* -ENOMEM */
int ht_planner_init(struct ht_planner *p) HT_MUST_CHECK;
void ht_planner_destroy(struct ht_planner *p);
uint64_t ht_planner_bytes(const struct ht_planner *p) HT_REQUIRES(HT_LOCK_STORE); /* heap */

/* next_use.c. The place of an object's images in the order of eviction, as a program said. False: it said nothing. */
bool ht_next_use_order_place(const struct ht_store *s, uint64_t object, uint64_t *out_place) HT_REQUIRES(HT_LOCK_STORE);
/*
 * A plan began or ended, or hints did. True: hints should make an order of their own, which ht_next_use_settle begins.
 */
bool ht_next_use_update(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* All images with a hint get their places again. */
void ht_next_use_settle(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE);
/* The next read of content with a hint, as those of a plan. */
bool ht_next_use_fetch(struct ht_store *s, struct ht_forecast_fetch *out, uint64_t *out_place)
    HT_REQUIRES(HT_LOCK_STORE);
void ht_next_use_fetch_done(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* May that read take the place of content without a hint? */
bool ht_next_use_may_take(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* When readahead should look for such reads again; 0: when it is woken. */
uint64_t ht_next_use_look_ns(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);

void ht_scrub_init(struct ht_scrub *c);
void ht_scrub_destroy(struct ht_scrub *c);
static inline bool ht_scrub_is_awaited(struct ht_engine *e)
{
    return ht_now_ns() < e->scrub.awaited_until_ns && !ht_row_is_paused(&e->row[HT_ENGINE_SCRUB]);
}

/* ------------------------------------------------------------- writeback */

/* GROWING: pressing images, and also those that a writer fills. FINAL: images of any set that are final. */
enum ht_clean { HT_CLEAN_ANY, HT_CLEAN_PRESSING, HT_CLEAN_GROWING, HT_CLEAN_FINAL };

/*
 * Cleans some dirty images to make room: only pressing ones, as long as they press, or all except the protected set,
 * which makes no room. Returns how many were cleaned, or the error if none could be. Only those at a place, unless
 * numa_index is HT_NUMA_INDEX_ANY.
 */
int ht_writeback_some(struct ht_store *s, unsigned most, enum ht_clean whom, int numa_index)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
