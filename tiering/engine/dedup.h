/* SPDX-License-Identifier: Apache-2.0 */
/* dedup.h - inside engine/: deduplication of all content, and pairs of chunks. */
#pragma once

#include <stdatomic.h>

#include "tiering/api/background.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/scheduler.h"

struct ht_chunk;
struct ht_dedup_pass;
struct ht_pass;

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

/*
 * Content that was compared or read in vain, by hashes of place and checksum: no later pass looks at it again. A small
 * table, of which new entries take the place of old ones. The store's lock guards it.
 */
struct ht_dedup_vain {
    uint64_t name[1024]; /* 0: none */
};

/* The engine's; its thread's alone. */
struct ht_dedup {
    _Atomic uint64_t bytes; /* heap; any thread reads it */
    /* ht_store_reserves_complete: any thread's, apart from fields that the compiler may read together. */
    _Atomic bool reserved;
    struct ht_dedup_vain vain;
    struct ht_dedup_pass *pass; /* NULL: none */
    uint64_t due_ns;            /* its walk begins not before; 0: not all versions are noted */
    uint64_t seen_lsn;          /* what the log had when the last whole round began */
    uint64_t next_ns;           /* the next pass begins not before */
    bool again;                 /* something was skipped */
};

/* A chunk, as it was when its bytes were read. */
struct ht_dedup_chunk {
    uint64_t oid, version; /* of the object, before */
    uint64_t index, place;
};
/* A pair of chunks with the same bytes. */
struct ht_dedup_pair {
    struct ht_dedup_chunk owner; /* oid 0: none, the other one is all zeros */
    struct ht_dedup_chunk other; /* gives its own bytes up */
};

/* Pairs, with references to their objects. */
struct ht_dedup_same {
    struct ht_sharer pair[64];
    unsigned count;
};

/*
 * Is the chunk's content published, on present devices, nothing newer in memory, and was it not looked at in vain? Raw
 * bytes and compressed frames may be.
 */
bool ht_dedup_may_share(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* dedup_pair.c: no later pass looks at the chunk again, unless its content has changed: then -EAGAIN. */
int ht_dedup_in_vain(struct ht_store *s, const struct ht_dedup_chunk *c) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * Adds a pair to `same`, which has room. 0: it was added, or both share the bytes already; -EAGAIN: one of them has
 * changed; -ENOMEM.
 */
int ht_dedup_add(struct ht_store *s, const struct ht_dedup_pair *pair, struct ht_dedup_same *same)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Shares these in one transaction, and empties `same`. How many have changed meanwhile; -ENOMEM, or the log's error. */
int ht_dedup_share(struct ht_store *s, struct ht_dedup_same *same) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/* A pass is due: it waits for content that scrub reads. */
bool ht_dedup_waits(struct ht_store *s);
/* Scrub has read the raw content that has come to its pass, and it is sound. */
void ht_dedup_saw(struct ht_store *s, const struct ht_pass *from, const uint8_t *content) HT_EXCLUDES(HT_LOCK_STORE);
void ht_dedup_share_seen(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE); /* at the end of its step */

void ht_dedup_end(struct ht_dedup *d); /* its memory; no step runs */
extern const struct ht_engine_type ht_dedup_engine;
