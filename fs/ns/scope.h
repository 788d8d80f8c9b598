/* SPDX-License-Identifier: Apache-2.0 */
/* scope.h - sets of inodes, and moving their content from one scope of the store into another. */
#pragma once

#include "fs/ns/pending.h"

/* A set of inodes, each once and HT_NS_MARKED. The transaction keeps them in memory. */
struct ht_ns_members {
    struct ht_ns_inode **inodes;
    size_t count, cap;
};
int ht_ns_members_add(struct ht_ns_members *m, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
void ht_ns_members_free(struct ht_ns_members *m) HT_REQUIRES(HT_LOCK_NAMES);
/*
 * The directory and everything below it, each once, in the order of their depth. In a transaction; releases the lock in
 * between. -ENOMEM.
 */
int ht_ns_collect_tree(struct ht_ns *ns, struct ht_ns_members *m, struct ht_ns_inode *top, struct ht_slice *slice)
    HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;

/*
 * A walk over the names below a directory, depth first. It needs no memory. The caller may release the lock between two
 * names, also outside of a transaction. Then names may come and go, and the walk ends early where its directory goes.
 */
struct ht_ns_tree_walk {
    uint64_t top, dir, cookie; /* at the beginning dir is top, and cookie 0 */
};
const struct ht_ns_entry *ht_ns_tree_next(struct ht_ns *ns, struct ht_ns_tree_walk *w)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);

/*
 * Moves the content of all members into another scope. -EBUSY moves none: *out_busy is a member with unpublished
 * content.
 */
int ht_ns_scope_move(struct ht_ns_op *op, const struct ht_ns_members *m, uint64_t from, uint64_t to, uint64_t *out_busy)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES) HT_MUST_CHECK;
/*
 * After moves that failed (with rc, which is returned), and after a mount: moves every file's content into the scope
 * that it belongs to. No lock held. WAITS.
 */
int ht_ns_scope_settle(struct ht_ns *ns, int rc) HT_MUST_CHECK;
