/* SPDX-License-Identifier: Apache-2.0 */
/* deferred_free.h - space of references that is free once the log is durable. */
#pragma once

#include <stdatomic.h>

#include "tiering/object/slice.h"

struct ht_deferred_free { /* a deferred free */
    uint64_t lsn;
    struct ht_ref ref;
};

/* FIFO by lsn. Blocks are never moved, so that a push costs the same however many there are. */
enum { HT_DEFERRED_BLOCK_ITEMS = 512 };
struct ht_deferred_block {
    struct ht_deferred_block *next;
    struct ht_deferred_free item[HT_DEFERRED_BLOCK_ITEMS];
};
struct ht_deferred_frees {
    struct ht_deferred_block *first, *last; /* NULL: no item */
    struct ht_deferred_block *spare;        /* of one block, for the next push */
    size_t head;                            /* of the first item, in the first block */
    size_t count, blocks;                   /* blocks: with the spare one */
};

/* Space that is free later, and owners of the same space. */
struct ht_frees {
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        struct ht_deferred_frees logged; /* each waits for its lsn */
        struct ht_deferred_frees open;   /* of the open transaction, which fills in the lsn at its commit */
        struct ht_refcounts refcounts;
        struct ht_trash trash;
        uint64_t tx_count;    /* transactions that have ended */
        uint64_t lost_blocks; /* of lost chunks, or without a place in these lists: free at the next mount */
    };
    _Atomic uint64_t last_lsn; /* of the last transaction appended; also read without the lock */
};

/* -ENOMEM */
int ht_deferred_frees_push(struct ht_deferred_frees *q, uint64_t lsn, const struct ht_ref *ref) HT_MUST_CHECK;
struct ht_deferred_free *ht_deferred_frees_first(const struct ht_deferred_frees *q); /* NULL: none */
/* There is one. Returns a block that is empty now, of malloc, or NULL. */
struct ht_deferred_block *ht_deferred_frees_pop(struct ht_deferred_frees *q) HT_MUST_CHECK;
uint64_t ht_deferred_frees_bytes(const struct ht_deferred_frees *q);
/* Frees all memory of the queue and its references. */
void ht_deferred_frees_end(struct ht_deferred_frees *q);
/* Frees the space whose records are durable now. Releases the lock in between. */
void ht_deferred_frees_durable(struct ht_store *s, uint64_t lsn) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Drops an owner that the log does not know: the space is free at once, or when it may be. True if it is or will be
 * free.
 */
bool ht_ref_drop(struct ht_store *s, struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* The same for one that the log may name until lsn is durable; 0: it names none. */
bool ht_ref_drop_at(struct ht_store *s, uint64_t lsn, struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* The space is free with the entries of q; lsn as there. */
void ht_ref_free_later(struct ht_store *s, struct ht_deferred_frees *q, uint64_t lsn, struct ht_ref *ref)
    HT_REQUIRES(HT_LOCK_STORE);
/* One that waits in a queue, which has no place for it any more: its space is lost until the next mount. */
void ht_ref_free_never(struct ht_store *s, struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* Frees at once the blocks of a reference that nothing names any more. */
void ht_free_ref_now(struct ht_store *s, struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
