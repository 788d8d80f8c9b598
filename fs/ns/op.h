/* SPDX-License-Identifier: Apache-2.0 */
/* op.h - one change of names: a transaction, and within it the lock of names held for writing. */
#pragma once

#include "tiering/base/slice.h"

struct ht_ns;
struct ht_obj;
struct ht_rounds;
struct ht_tx;

struct ht_ns_op {
    struct ht_ns *ns;
    struct ht_tx *tx;
    int64_t now_ns;
    uint64_t deleted[2]; /* deleted inodes, for the hook */
    bool deleted_pending[2];
    unsigned deleted_count;
    uint64_t ended_scope;      /* of a root that lost its name, or went; 0: none */
    struct ht_obj *content[2]; /* to be published; each with a reference */
    unsigned content_count;
    uint64_t lsn; /* out of end */
};
int ht_ns_op_begin(struct ht_ns *ns, size_t bytes, struct ht_ns_op *op) HT_ACQUIRE_IF_0(HT_LOCK_TX)
    HT_ACQUIRE_IF_0(HT_LOCK_NAMES) HT_MUST_CHECK;
/*
 * For content that was written back in a round (tx.h); NULL: without one. -EAGAIN: nothing was begun, use the next
 * round.
 */
int ht_ns_op_begin_round(struct ht_ns *ns, size_t bytes, struct ht_rounds *rounds, struct ht_ns_op *op)
    HT_ACQUIRE_IF_0(HT_LOCK_TX) HT_ACQUIRE_IF_0(HT_LOCK_NAMES) HT_MUST_CHECK;
/* Returns rc, or if that is 0 the error of the commit. */
int ht_ns_op_end(struct ht_ns_op *op, int rc) HT_RELEASE(HT_LOCK_TX) HT_RELEASE(HT_LOCK_NAMES) HT_MUST_CHECK;
/*
 * The content goes into the transaction when the lock is released: a large file has a record for each of a million
 * chunks, and all readers would wait. Two at most.
 */
void ht_ns_op_publish(struct ht_ns_op *op, struct ht_obj *obj);
/*
 * Releases the lock, publishes content and calls the hooks, with the transaction still open:
 * for calls into layers that call back.
 */
void ht_ns_op_unlock(struct ht_ns_op *op) HT_RELEASE(HT_LOCK_NAMES);
void ht_ns_op_lock(struct ht_ns_op *op) HT_ACQUIRE(HT_LOCK_NAMES);

/*
 * Loops over many files let other threads have the lock now and then: after each step of a loop; at the end of a slice
 * this releases the lock and takes it again. In a transaction no other thread changes names, attributes or what is
 * published between two slices, and no inode leaves memory. Files are opened and closed, and their times change. A
 * caller outside of a transaction looks everything up again.
 */
void ht_ns_slice_next(struct ht_ns *ns, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_NAMES);
