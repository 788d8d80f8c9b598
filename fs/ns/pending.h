/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pending.h - changes of names and attributes: the transaction of each, its records, and what waits for the publication
 * of the root.
 */
#pragma once

#include "fs/ns/ns_priv.h"
#include "tiering/base/slice.h"

/* ------------------------------------------------------ operations (op.c) */

/* One change of names: a transaction, and within it the lock of names held for writing. */
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
 * Releases the lock, publishes content and calls the hooks, with the transaction still open: for calls into layers that
 * call back.
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

/* ns.c: the root directory of a new store is in memory already, for replay found none: now in the log, too. */
void ht_ns_publish_root_dir(struct ht_ns_op *op) HT_REQUIRES(HT_LOCK_NAMES);
/* Puts the current, or published, state into tx. */
void ht_ns_put_inode(struct ht_tx *tx, const struct ht_ns_inode *i, const struct ht_ns_attr *attr)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
void ht_ns_put_inode_del(struct ht_tx *tx, uint64_t ino);
void ht_ns_put_target(struct ht_tx *tx, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* type: HT_REC_NS_ENTRY or _ENTRY_DEL; HT_REC_NS_XATTR or _XATTR_DEL. */
void ht_ns_put_entry(struct ht_tx *tx, enum ht_ns_record_type type, const struct ht_ns_entry *e, int64_t time_ns)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
void ht_ns_put_xattr(struct ht_tx *tx, enum ht_ns_record_type type, uint64_t ino, const struct ht_ns_xattr *x,
                     int64_t time_ns);

/* All of an inode as it is published: attributes, target, attributes by name, and the names that lead to it. */
void ht_ns_put_published(struct ht_tx *tx, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES);

/* ------------------------------------------- changes that wait (pending.c) */

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

/* ------------------------------- of a model root (publish.c, pending.c, roots.c) */

struct ht_ns_root *ht_ns_root_find(struct ht_ns *ns, uint64_t ino) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
struct ht_ns_root *ht_ns_root_new(struct ht_ns *ns, uint64_t ino) HT_REQUIRES(HT_LOCK_NAMES);
/*
 * Remaining members belong to the outside from now on (empty: there are none). Everything but times was published.
 * Releases the lock in between.
 */
void ht_ns_root_free(struct ht_ns *ns, struct ht_ns_root *root) HT_REQUIRES(HT_LOCK_NAMES);
void ht_ns_root_free_empty(struct ht_ns *ns, struct ht_ns_root *root) HT_REQUIRES(HT_LOCK_NAMES);
/* All its pending changes. Releases the lock in between; reserved shadows may be gone afterwards. */
void ht_ns_root_publish(struct ht_ns *ns, struct ht_ns_root *root, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES);
/* The part of names in a commit and an abort: see struct ht_participant. */
size_t ht_ns_pending_bytes(void *ctx, uint64_t scope);
void ht_ns_publish(void *ctx, uint64_t scope, size_t expected_bytes, struct ht_tx *tx);
void ht_ns_abort(void *ctx, uint64_t scope);

/* --------------- sets of inodes, and the scopes of their content (scope.c) */

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

/* ------------------------------------------------------ names.c, rename.c */

/* It has another path below its root, or one more name: calls the hook for the files at or below it. */
void ht_ns_report_renamed(struct ht_ns *ns, const struct ht_ns_inode *top) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/*
 * The directory for a change of that name (NULL: of none); -ESTALE, -ENOTDIR, -ENOENT
 * (removed), -ENAMETOOLONG, -EINVAL.
 */
int ht_ns_find_dir(struct ht_ns *ns, uint64_t ino, const char *name, struct ht_ns_inode **out)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES) HT_MUST_CHECK;
int ht_ns_check_removable(struct ht_ns *ns, const struct ht_ns_inode *i, bool want_dir)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES) HT_MUST_CHECK;
/* An inode for a name in dir, announced. Reserved: 1 shadow. */
int ht_ns_make_whiteout(struct ht_ns_op *op, const struct ht_ns_inode *dir, struct ht_cred cred,
                        struct ht_ns_inode **out) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/*
 * Before a directory loses its name for good: publishes the pending changes below it if it is a model root. As
 * ht_ns_root_publish. A caller that keeps the name after all resets op->ended_scope.
 */
void ht_ns_settle_root(struct ht_ns_op *op, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
/* Bytes that ht_ns_settle_root would put for that name. */
size_t ht_ns_settle_bytes(struct ht_ns *ns, uint64_t parent, const char *name);

/* ------------------------------------------------------------- xattr.c */

/* x becomes current in place of the attribute with its name. time_ns: 0, or of the change. Reserved: 1 shadow. */
void ht_ns_xattr_install(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_ns_xattr *x, int64_t time_ns)
    HT_REQUIRES(HT_LOCK_NAMES);
void ht_ns_xattr_drop(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_ns_xattr *x, int64_t time_ns)
    HT_REQUIRES(HT_LOCK_NAMES);
