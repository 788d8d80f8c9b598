/* SPDX-License-Identifier: Apache-2.0 */
/* scope.h - moving the content of files from one scope of the store into another. */
#pragma once

#include "tiering/base/base.h"

struct ht_ns;
struct ht_ns_inode;
struct ht_ns_op;

/* A set of inodes, each once and HT_NS_MARKED. The transaction keeps them in memory. */
struct ht_ns_members {
    struct ht_ns_inode **inodes;
    size_t count, cap;
};
int ht_ns_members_add(struct ht_ns_members *m, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
void ht_ns_members_free(struct ht_ns_members *m) HT_REQUIRES(HT_LOCK_NAMES);
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
