/* SPDX-License-Identifier: Apache-2.0 */
/* recompress.h - inside engine/: lossless compression in the background. */
#pragma once

#include <stdatomic.h>

#include "tiering/api/background.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/scheduler.h"

struct ht_recompress_round;

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
struct ht_recompress_seen;

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

extern const struct ht_engine_type ht_recompress_engine;
/*
 * Scrub has read raw content with these owners, and it is sound. If it may be compressed, a round that waits for scrub
 * does so. *out_bytes grows by what was written.
 */
void ht_recompress_saw(struct ht_store *s, const struct ht_move *m, const void *bytes, uint64_t *out_bytes)
    HT_EXCLUDES(HT_LOCK_STORE);
uint64_t ht_recompress_bytes(const struct ht_recompress *c); /* heap */
/* Gives back the space of frames that wait. No step runs; also as a part of one. */
void ht_recompress_stop(struct ht_recompress *c) HT_EXCLUDES(HT_LOCK_STORE);
void ht_recompress_destroy(struct ht_recompress *c);
