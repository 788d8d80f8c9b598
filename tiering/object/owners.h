/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owners.h - who owns stored bytes, and when their space is free again. The store's lock guards all of this.
 */
#pragma once

#include <stdatomic.h>

#include "tiering/base/idtable.h"
#include "tiering/base/pool.h"
#include "tiering/object/ref.h"

struct ht_obj;
struct ht_chunk;
struct ht_slice;

struct ht_refcount {            /* extents with several owners */
    struct ht_id_link by_place; /* its id: ht_ref_place */
    uint64_t ended;             /* value of tx_count at the last transaction that ended an owner */
    uint32_t owners;
    bool named; /* by a record in the log */
};
static_assert(sizeof(struct ht_refcount) == 32, "memory per shared extent is bounded");

struct ht_refcounts {
    struct ht_pool pool;
    struct ht_id_table table;
    size_t single; /* entries with one owner */
    size_t hand;   /* the bucket where the search for idle ones goes on */
};

/* Adds an owner to the extents of ref; ref is one of the present owners. named: by a record in the log. -ENOMEM. */
int ht_refcount_add(struct ht_store *s, const struct ht_ref *ref, bool named) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* From now on a record names it. */
void ht_refcount_named(struct ht_store *s, const struct ht_ref *ref);
enum ht_refcount_left {
    HT_REFCOUNT_OWNED,   /* others own the space: nothing becomes free */
    HT_REFCOUNT_FREE,    /* only ref ever named it, or the ends of all others are durable */
    HT_REFCOUNT_LATER,   /* free when the last transaction that was appended is durable */
    HT_REFCOUNT_WITH_TX, /* when the transaction that is being collected is durable */
};
/* Drops an owner; logged: by a record in the open transaction. */
enum ht_refcount_left ht_refcount_drop(struct ht_store *s, const struct ht_ref *ref, bool logged)
    HT_REQUIRES(HT_LOCK_STORE);
/* The entry of a reference; NULL: it has one owner. */
const struct ht_refcount *ht_refcount_find(const struct ht_store *s, const struct ht_ref *ref)
    HT_REQUIRES(HT_LOCK_STORE);
/*
 * *out: a new owner of the chunk's stored bytes, to be installed or dropped. The chunk is held, has no newer image.
 * -ENOMEM, -ENOSPC.
 */
int ht_chunk_share(struct ht_obj *o, struct ht_chunk *c, struct ht_ref *out) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;

/* --------------------------------------------------------------- deferred frees */

struct ht_deferred_free {
    struct ht_deferred_free *next;
    uint64_t lsn;
    struct ht_ref ref;
};
static_assert(sizeof(struct ht_deferred_free) == 40, "memory per deferred free is bounded");

/* FIFO by lsn. */
struct ht_deferred_frees {
    struct ht_deferred_free *first, *last; /* first NULL: none */
};

/* Space that is free later, and owners of the same space. */
struct ht_frees {
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        struct ht_deferred_frees logged; /* each waits for its lsn */
        struct ht_deferred_frees open;   /* of the open transaction, whose lsn is not known yet */
        struct ht_pool pool;             /* their memory */
        size_t deferred;                 /* how many there are in both */
        struct ht_refcounts refcounts;
        uint64_t tx_count;    /* transactions that have ended */
        uint64_t lost_blocks; /* of lost chunks, or without a place in these lists: free at the next mount */
    };
    _Atomic uint64_t last_lsn; /* of the last transaction appended; also read without the lock */
};

/*
 * The transaction has ended: what waits for it waits for lsn from now on. 0: the log has failed, and the space is lost
 * until the next mount. Releases the lock in between.
 */
void ht_deferred_frees_logged(struct ht_store *s, uint64_t lsn, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE);
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
/* Frees at once the blocks of a reference that nothing names any more. */
void ht_free_ref_now(struct ht_store *s, struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* Before and after everything else. */
void ht_owners_init(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
void ht_owners_free(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
