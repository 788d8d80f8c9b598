/* SPDX-License-Identifier: Apache-2.0 */
/* move.h - inside engine/: compaction. */
#pragma once

#include <stdatomic.h>

#include "tiering/engine/scheduler.h"

struct ht_move_batch;

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

void ht_compact_end(struct ht_compaction *c); /* its memory; no step runs */
extern const struct ht_engine_type ht_compact_engine;
