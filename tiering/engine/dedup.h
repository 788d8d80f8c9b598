/* SPDX-License-Identifier: Apache-2.0 */
/* dedup.h - inside engine/: the pass of deduplication over all content, and one pair of chunks. */
#ifndef HITRAIN_TIERING_ENGINE_DEDUP_H
#define HITRAIN_TIERING_ENGINE_DEDUP_H

#include <stdatomic.h>

#include "tiering/base/base.h"
#include "tiering/api/dedup.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/dedup_index.h"
#include "tiering/engine/scheduler.h"

struct ht_store;
struct ht_obj;
struct ht_chunk;
struct ht_dedup_pass;

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
    unsigned part;              /* of the index, of the next pass */
    bool again;                 /* something was skipped */
};

/* A chunk, as it was when it was found. */
struct ht_dedup_chunk {
    uint64_t oid, version; /* of the object */
    uint64_t index;
};
/* A pair of chunks that are probably the same. */
struct ht_dedup_pair {
    struct ht_dedup_chunk owner; /* oid 0: none, the other one is probably all zeros */
    struct ht_dedup_chunk other; /* gives its own bytes up */
    uint64_t bytes;              /* that are stored of each */
};

/* Pairs that were compared and are the same, with references to their objects. */
struct ht_dedup_same {
    struct ht_sharer pair[64];
    unsigned count;
};

/*
 * Is the chunk's content published, on present devices, nothing newer in memory, and was it not looked at in vain? Raw
 * bytes and compressed frames may be.
 */
bool ht_dedup_may_share(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* Have both the same codec, stored length and checksum? */
bool ht_dedup_may_be_same(const struct ht_ref *a, const struct ht_ref *b);
/*
 * dedup_pair.c: compares a pair, and adds it to `same`, which has room. buf: two buffers of a chunk each. *out_bytes
 * grows by the bytes read. 0: it was added, or never will be; -EAGAIN: it was skipped; -ENOMEM.
 */
int ht_dedup_compare(struct ht_store *s, const struct ht_dedup_pair *pair, struct ht_dedup_same *same, uint8_t *buf[2],
                     uint64_t *out_bytes) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Shares these in one transaction, and empties `same`. How many have changed meanwhile; -ENOMEM, or the log's error. */
int ht_dedup_share(struct ht_store *s, struct ht_dedup_same *same) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

void ht_dedup_end(struct ht_dedup *d); /* its memory; no step runs */
extern const struct ht_engine_type ht_dedup_engine;

#endif
