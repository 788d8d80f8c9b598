/* SPDX-License-Identifier: Apache-2.0 */
/* tree.h - everything below a directory. */
#pragma once

#include "tiering/base/base.h"

struct ht_ns;
struct ht_ns_entry;
struct ht_ns_inode;
struct ht_ns_members;
struct ht_slice;

/*
 * The directory and everything below it, each once, in the order of their depth. In a transaction; releases the lock in
 * between. -ENOMEM.
 */
int ht_ns_collect_tree(struct ht_ns *ns, struct ht_ns_members *m, struct ht_ns_inode *top, struct ht_slice *slice)
    HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* The first member that does not belong to uid; NULL: there is none, or uid is root's. */
const struct ht_ns_inode *ht_ns_first_foreign(const struct ht_ns_members *m, uint32_t uid)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);

/*
 * A walk over the names below a directory, depth first. It needs no memory. The caller may release the lock between two
 * names, also outside of a transaction. Then names may come and go, and the walk ends early where its directory goes.
 */
struct ht_ns_tree_walk {
    uint64_t top, dir, cookie; /* at the beginning dir is top, and cookie 0 */
};
const struct ht_ns_entry *ht_ns_tree_next(struct ht_ns *ns, struct ht_ns_tree_walk *w)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
