/* SPDX-License-Identifier: Apache-2.0 */
/* pending.h - changes of names and attributes that wait for the publication of their root. */
#pragma once

#include "fs/ns/ns_priv.h"

/* Reserves memory, so that up to so many shadows and pending entries of this operation cannot fail. */
int ht_ns_reserve(struct ht_ns *ns, struct ht_ns_root *root, uint32_t shadows, uint32_t entries)
    HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* The inode, for a change of attributes. Reserved: 1 shadow. -ESTALE, -EROFS, -ENOMEM. */
int ht_ns_find_to_change(struct ht_ns *ns, uint64_t ino, struct ht_ns_inode **out)
    HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* An entry for ht_ns_entry_add in dir, where no other has its name. Reserved: what that needs, and 2 shadows in all. */
int ht_ns_new_name(struct ht_ns *ns, const struct ht_ns_inode *dir, const char *name, size_t len,
                   struct ht_ns_entry **out) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* Before and after a change of attributes: it is pending below a root, else it goes into the log. */
void ht_ns_attr_edit(struct ht_ns_op *op, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
void ht_ns_attr_put(struct ht_ns_op *op, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
/*
 * inode becomes (again) known as e->name in dir. old: the current entry of that name, which ends, or NULL. Reserved
 * before: a slot, 2 pending entries, shadows of both inodes and of old's.
 */
void ht_ns_entry_add(struct ht_ns_op *op, struct ht_ns_entry *e, struct ht_ns_inode *dir, struct ht_ns_inode *inode,
                     struct ht_ns_entry *old) HT_REQUIRES(HT_LOCK_NAMES);
/* Ends the entry. Reserved: 1 pending entry, 2 shadows. */
void ht_ns_entry_drop(struct ht_ns_op *op, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES);
/* Takes it off the pending list, and does nothing more. */
void ht_ns_entry_undirty(struct ht_ns_root *root, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES);
/* Changes the counts of directory and inode when an entry becomes, or ceases to be, current; not those of its slot. */
void ht_ns_entry_count(struct ht_ns_entry *e, int by) HT_REQUIRES(HT_LOCK_NAMES);
/* The hook learns of all that is pending. The caller holds only the transaction, so names and inodes stay. */
void ht_ns_report_stale(const struct ht_ns_hooks *hooks, struct ht_ns_root *root, uint32_t entry_count,
                        struct ht_list *shadows);
/* Deletes the inode if it has no references left. Reserved: 1 shadow. */
void ht_ns_inode_release(struct ht_ns_op *op, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
/* It has another path below its root, or one more name: calls the hook for the files at or below it. */
void ht_ns_report_renamed(const struct ht_ns *ns, const struct ht_ns_inode *top) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
