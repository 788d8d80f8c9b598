/* SPDX-License-Identifier: Apache-2.0 */
/* refcount.h - stored bytes with several owners. The store's lock guards the table. */
#pragma once

#include "tiering/object/ref.h"

struct ht_obj;
struct ht_chunk;

struct ht_refcount { /* extents with several owners */
    uint64_t key;    /* first block and device */
    uint64_t ended;  /* value of tx_count at the last transaction that ended an owner */
    uint32_t owners;
    bool named; /* by a record in the log */
};
static_assert(sizeof(struct ht_refcount) == 24, "memory per shared extent is bounded");

struct ht_refcount_table {
    struct ht_refcount *entry; /* owners is 0 where there is none */
    size_t size, count;
};

/* A table that is full moves into another one, some entries with each new one. */
struct ht_refcounts {
    struct ht_refcount_table now;
    struct ht_refcount_table was; /* size 0: nothing moves */
    size_t at, left;              /* places of was: the next one, and how many have still to be looked at */
    size_t single;                /* entries with one owner */
    /*
     * A large table that has moved. To give its memory back takes milliseconds, so the next thread that releases the
     * lock between two slices, or ends a transaction, does that.
     */
    struct ht_refcount_table former;
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
void ht_refcounts_free(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* The large table that has moved, if there is one. The caller frees it without the lock. */
struct ht_refcount_table ht_refcounts_take_former(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
void ht_refcount_table_free(const struct ht_refcount_table *t);
/* Of places for entries in both tables; the entry of a place has no owner if none is there. */
size_t ht_refcount_places(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
const struct ht_refcount *ht_refcount_at(const struct ht_store *s, size_t place) HT_REQUIRES(HT_LOCK_STORE);
size_t ht_refcount_place(const struct ht_store *s, const struct ht_refcount *e) HT_REQUIRES(HT_LOCK_STORE);
/* The entry of a reference; NULL: it has one owner. */
const struct ht_refcount *ht_refcount_find(const struct ht_store *s, const struct ht_ref *ref)
    HT_REQUIRES(HT_LOCK_STORE);
/*
 * *out: a new owner of the chunk's stored bytes, to be installed or dropped. The chunk is held, has no newer image.
 * -ENOMEM, -ENOSPC.
 */
int ht_chunk_share(struct ht_obj *o, struct ht_chunk *c, struct ht_ref *out) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
