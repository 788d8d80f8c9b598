/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns.h - names: inodes, directories, attributes. Knows nothing about FUSE.
 *
 * Everything is in memory and, through transactions of the store, in the log. Each thing (inode attributes, directory
 * entry, extended attribute) has a current and a published value: outside model roots a change is put into the log in
 * its own transaction at once. Below a root it stays pending until the root is published (commit) or aborted. Times and
 * sizes that change by reading and writing are published by fsync, the commit timer, or the commit of the root.
 *
 * Inode number = id of the store = object id of a regular file's content. The root directory is 1.
 *
 * Locks: one lock (ns) below the transaction lock. Functions that change names open the transaction themselves (WAITS),
 * unless they take a tx. Forget and close do when they release the last reference to an inode without links. An inode
 * stays in memory while it has links, or lookups (kernel references), or opens. An inode without links and opens, be it
 * that it lost its names or never had one (ht_ns_tmpfile), is deleted with its last lookup's forget; after a crash, at
 * mount.
 *
 * -ESTALE: there is no such inode (any more).
 */
#pragma once

#include <sys/stat.h>
#include "tiering/api/object.h"
#include "tiering/api/store.h"
#include "tiering/api/tx.h"
#include <hitrain/words.h>

struct ht_ns;

enum { HT_NS_ROOT_INO = 1 };

/* The caller. The kernel checks permissions (default_permissions), and ht_ns_access does for hidden files. */
struct ht_cred {
    uint32_t uid, gid;
    /* Taken off a new file's mode unless its directory has a default access list; 0 where the kernel did so. */
    uint32_t umask;
};

/* ------------------------------------------------------------------- life */

/*
 * Called when an inode is deleted (below a root: pending, as its deletion is; an abort may bring it back), inside the
 * transaction of its deletion, no ns lock held. ns itself deletes the content object. Not pending: dependent objects go
 * with this transaction, or a crash would leave them alone.
 */
struct ht_ns_hooks {
    void *ctx;
    void (*deleted)(void *ctx, uint64_t ino, bool pending, struct ht_tx *tx);
    /*
     * The content of these files of a model root is to be published without the rest of the root. 0: no open step has
     * changed any, and no update begins until published_alone. Or -EBUSY. The ns lock is held.
     */
    int (*publish_alone)(void *ctx, uint64_t root, const uint64_t *inos, size_t count);
    void (*published_alone)(void *ctx, uint64_t root);
    /*
     * An abort took this inode back (name NULL), or this name in parent: its caches are stale. The ns lock is not
     * held, but the abort's transaction is open. So the hook must not wait for a thread that changes names, as
     * dropping a name from the kernel's cache does. May be NULL.
     */
    void (*stale)(void *ctx, uint64_t ino, uint64_t parent, const char *name);
    /*
     * A file below a model root has another path, or one more name. True: no other file of the same change need be
     * reported. The ns lock is held. May be NULL.
     */
    bool (*renamed)(void *ctx, uint64_t ino);
};
/*
 * For ht_participant_ns. Its start makes the root directory of a new store and deletes inodes without links, unless the
 * store is read-only.
 */
struct ht_ns_setup {
    const struct ht_ns_hooks *hooks; /* or NULL */
    uint32_t root_uid, root_gid;     /* the owner of a new store's root directory */
};

/* ----------------------------------------------------------------- inodes */

/*
 * A lookup count is the kernel's reference: functions with out_st of a found or made entry take one; forget drops n.
 * Holding a count keeps the inode valid; every ino passed in must be held so (or be the root).
 */
int ht_ns_lookup(struct ht_ns *ns, uint64_t parent, const char *name, struct stat *out_st) HT_MUST_CHECK;
/*
 * By number alone, for file handles: here no count need be held. up: the directory above the inode. -ESTALE also for an
 * inode that only waits for its deletion.
 */
int ht_ns_lookup_ino(struct ht_ns *ns, uint64_t ino, bool up, struct stat *out_st) HT_MUST_CHECK;
void ht_ns_forget(struct ht_ns *ns, uint64_t ino, uint64_t n);
/* Does it have a name (or can get its first one)? Is it only in use? Or neither: it is deleted, perhaps pending. */
enum ht_ns_life { HT_NS_NAMED, HT_NS_ORPHAN, HT_NS_DELETED };
enum ht_ns_life ht_ns_life(struct ht_ns *ns, uint64_t ino);
/* Does it have a lookup count? */
bool ht_ns_known(struct ht_ns *ns, uint64_t ino);
/* The i-th of its names, in no order: parent and name (HT_NAME_BYTES_MAX + 1). False: it has no more. */
bool ht_ns_link_at(struct ht_ns *ns, uint64_t ino, unsigned i, uint64_t *out_parent, char *name);
int ht_ns_getattr(struct ht_ns *ns, uint64_t ino, struct stat *out_st) HT_MUST_CHECK;

enum ht_setattr {
    HT_SET_MODE = 1,
    HT_SET_UID = 2,
    HT_SET_GID = 4,
    HT_SET_SIZE = 8,
    HT_SET_ATIME = 16,
    HT_SET_MTIME = 32,
    HT_SET_CTIME = 64,
    HT_SET_ATIME_NOW = 128,
    HT_SET_MTIME_NOW = 256,
    HT_KILL_SUID = 512,  /* clear setuid, and setgid if the group may execute */
    HT_KILL_SGID = 1024, /* with it: clear setgid in any case */
};
/* Size goes through ht_obj_truncate. WAITS. */
int ht_ns_setattr(struct ht_ns *ns, uint64_t ino, unsigned what, const struct stat *values,
                  struct stat *out_st) HT_MUST_CHECK;

/*
 * Open and close of a regular file: keeps the content; out_obj stays valid until close.
 */
int ht_ns_open(struct ht_ns *ns, uint64_t ino, struct ht_obj **out_obj) HT_MUST_CHECK;
void ht_ns_close(struct ht_ns *ns, uint64_t ino);
/* After a write or read: times (mtime and ctime, or atime). Cheap, no transaction. */
void ht_ns_touch(struct ht_ns *ns, uint64_t ino, bool written);
/* Should a read now change the access time? strict: whenever it differs; else by relatime's rules. */
bool ht_ns_atime_due(struct ht_ns *ns, uint64_t ino, bool strict);

/* ------------------------------------------------------------------ names */

/*
 * mode with type: regular, directory (use mkdir), fifo, socket, device. -ENOSPC: also for a regular file while the
 * store has no room for a chunk.
 */
int ht_ns_mknod(struct ht_ns *ns, uint64_t parent, const char *name, mode_t mode, dev_t rdev, struct ht_cred cred,
                struct stat *out_st) HT_MUST_CHECK;
int ht_ns_mkdir(struct ht_ns *ns, uint64_t parent, const char *name, mode_t mode, struct ht_cred cred,
                struct stat *out_st) HT_MUST_CHECK;
int ht_ns_symlink(struct ht_ns *ns, uint64_t parent, const char *name, const char *target, struct ht_cred cred,
                  struct stat *out_st) HT_MUST_CHECK;
/*
 * A regular file of the directory dir without a name: ht_ns_link may give it one; else its last user's forget deletes
 * it.
 */
int ht_ns_tmpfile(struct ht_ns *ns, uint64_t dir, mode_t mode, struct ht_cred cred, struct stat *out_st) HT_MUST_CHECK;
/* buf gets the target without NUL; returns its length. */
ssize_t ht_ns_readlink(struct ht_ns *ns, uint64_t ino, char *buf, size_t cap) HT_MUST_CHECK;
/* -EXDEV across a root's boundary (also rename), -EMLINK, -EPERM for directories. */
int ht_ns_link(struct ht_ns *ns, uint64_t ino, uint64_t parent, const char *name, struct stat *out_st) HT_MUST_CHECK;
int ht_ns_unlink(struct ht_ns *ns, uint64_t parent, const char *name) HT_MUST_CHECK;
int ht_ns_rmdir(struct ht_ns *ns, uint64_t parent, const char *name) HT_MUST_CHECK;
/*
 * flags: RENAME_NOREPLACE, RENAME_EXCHANGE. Replacing a file by one whose data was never synced writes that data back
 * first. whiteout (not with RENAME_EXCHANGE), or NULL: in one with it a whiteout (character device 0:0, no permissions,
 * of this owner) is left under the old name. WAITS.
 */
int ht_ns_rename(struct ht_ns *ns, uint64_t parent, const char *name, uint64_t new_parent, const char *new_name,
                 unsigned flags, const struct ht_cred *whiteout) HT_MUST_CHECK;

struct ht_ns_dirent {
    const char *name; /* valid during the call */
    uint64_t ino;
    uint32_t type;   /* S_IFMT bits */
    uint64_t cookie; /* pass to continue after this entry; stable, never 0 */
};
/*
 * Entries after cookie (0: start), without "." and "..", in a stable order: an entry that exists during the whole walk
 * is seen exactly once. Cookies 1 and 2 are never used. fn returns non-zero to stop (that entry counts as not
 * consumed). With the ns lock held: fn must not call ns, except through ht_ns_getattr_locked below.
 */
int ht_ns_readdir(struct ht_ns *ns, uint64_t dir, uint64_t cookie, int (*fn)(void *ctx, const struct ht_ns_dirent *e),
                  void *ctx) HT_MUST_CHECK;
/* The highest cookie given to an entry so far: later made or renamed entries get a higher one. 0: none. */
uint64_t ht_ns_dir_last(struct ht_ns *ns, uint64_t dir);
/* Inside readdir's fn: attributes of an entry, taking a lookup count when ref. */
int ht_ns_getattr_locked(struct ht_ns *ns, uint64_t ino, bool ref, struct stat *out_st)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* Do all of the directory's entries have a lookup count? Cheap: it samples a few. */
bool ht_ns_entries_known(struct ht_ns *ns, uint64_t dir);
/* Parent of a directory. 0: it has none: the top, a deleted one, a kept step, or no directory. */
uint64_t ht_ns_parent(struct ht_ns *ns, uint64_t dir);

/* ---------------------------------------------------- extended attributes */

/*
 * Any name the kernel lets through (user.*, trusted.*, security.*, system.*); fs/ctl has checked words of hitrain
 * before. flags: XATTR_CREATE, XATTR_REPLACE, and HT_XATTR_KILL_SGID if the caller that sets an access list is not in
 * the file's group. -ENODATA, -EEXIST, -ENOSPC, -E2BIG, -ERANGE. Never listed: user.hitrain.optimizer and pin;
 * trusted.* only where the caller may see it. dtype, grad_dtype and class are fields of the inode: reading one returns
 * the value in force, own or inherited; another class for a file that has content, or is open, is -EBUSY. Access lists
 * (system.posix_acl_*) and the mode are kept in step, and default lists inherited.
 */
#define HT_NS_ACL_ACCESS "system.posix_acl_access"
#define HT_NS_ACL_DEFAULT "system.posix_acl_default"
/* 0, or why no inode has an attribute of this name. The kernel lets names without a namespace pass. */
int ht_ns_xattr_check_name(const char *name) HT_MUST_CHECK;
/* Maps every entry's permissions through perm. value: a list as it is stored. */
void ht_ns_acl_map(void *value, size_t len, unsigned (*perm)(unsigned perm, void *ctx), void *ctx);
enum { HT_XATTR_KILL_SGID = 1 << 8 };
int ht_ns_setxattr(struct ht_ns *ns, uint64_t ino, const char *name, const void *value, size_t len,
                   int flags) HT_MUST_CHECK;
ssize_t ht_ns_getxattr(struct ht_ns *ns, uint64_t ino, const char *name, void *buf,
                       size_t cap) HT_MUST_CHECK; /* cap 0: the length */
/* How all of these answer with a value: cap 0: its length; -ERANGE. */
ssize_t ht_ns_xattr_give(const void *value, size_t len, void *buf, size_t cap) HT_MUST_CHECK;
ssize_t ht_ns_listxattr(struct ht_ns *ns, uint64_t ino, bool trusted, char *buf, size_t cap) HT_MUST_CHECK;
int ht_ns_removexattr(struct ht_ns *ns, uint64_t ino, const char *name) HT_MUST_CHECK;
/*
 * Calls fn for the directories below ino's model root that lead to it, topmost first, then for ino. fn gets the value
 * of this attribute there (NULL: none). Stops when fn returns other than 0, and returns that. fn is called under the
 * lock of the names and takes nothing but leaves. The root itself is left out, and so is all of a tree that has none.
 * -ESTALE, -ENOMEM.
 */
int ht_ns_xattr_path(struct ht_ns *ns, uint64_t ino, const char *name,
                     int (*fn)(void *ctx, uint64_t ino, const char *value, size_t len), void *ctx) HT_MUST_CHECK;
/* Is ino at or below dir? For a file with several names one name counts. */
bool ht_ns_is_below(struct ht_ns *ns, uint64_t ino, uint64_t dir);

/* ----------------------------------------------------------------- tensors */

/* The words of an inode, own or inherited from its directories at creation. */
struct ht_ns_tensor {
    uint64_t root; /* model root it is at or below, or 0 */
    bool is_root;
    uint8_t dtype, grad_dtype; /* enum ht_dtype; grad_dtype NONE: the parameter's */
    uint8_t obj_class;
};
int ht_ns_tensor(struct ht_ns *ns, uint64_t ino, struct ht_ns_tensor *out) HT_MUST_CHECK;
/*
 * Path below the mount, for messages ("a/b/c"), truncated to cap. For a file whose last name went below a root: "a/b/c
 * (deleted)" until that is published.
 */
void ht_ns_path(struct ht_ns *ns, uint64_t ino, char *buf, size_t cap);
/* Appends a line with the inode's path. False: another thread keeps the lock, which the text says. */
bool ht_ns_dump_path(struct ht_ns *ns, struct ht_dump *d, uint64_t ino);
/* POSIX permission check for hidden files: mask of R_OK W_OK X_OK; root passes. -EACCES. Supplementary groups: gids. */
int ht_ns_access(struct ht_ns *ns, uint64_t ino, int mask, struct ht_cred cred, const uint32_t *gids,
                 size_t gid_count) HT_MUST_CHECK;

/* ------------------------------------------------------------------- roots */

/*
 * Makes a directory a model root. First everything at and below it is made durable; then, in one durable transaction,
 * it becomes part of scope ino. also_in_tx (may be NULL) adds the optimizer's records, with no ns lock held. The
 * attribute user.hitrain.optimizer = config is set and published with it. -EINVAL: a root above or below; -EBUSY: a
 * hard link that leaves the tree, or a file that is being written all the time; -ENOTDIR; -EPERM: something below
 * belongs to another user than by's (NULL, or root: may take in files of any user). WAITS.
 */
struct ht_ns_claimant {
    uint32_t uid;
    uint64_t foreign; /* out, of -EPERM: one that is another's; all directories between it and ino are the claimant's */
};
int ht_ns_root_make(struct ht_ns *ns, uint64_t ino, const char *config, struct ht_ns_claimant *by,
                    int (*also_in_tx)(void *ctx, struct ht_tx *tx), void *ctx) HT_MUST_CHECK;
/*
 * The reverse; the caller has committed, and lets no step begin until this returns. Everything below ino is published
 * in one durable transaction, with which its scope ends. Refusals come before anything is put into it: -EINVAL: no
 * model root; -ESTALE. WAITS.
 */
int ht_ns_root_unmake(struct ht_ns *ns, uint64_t ino) HT_MUST_CHECK;
/* Every root, for attaching optimizers after a mount: fn(ctx, ino). No lock held. */
int ht_ns_roots(struct ht_ns *ns, int (*fn)(void *ctx, uint64_t ino), void *ctx) HT_MUST_CHECK;

/* ------------------------------------------------------------- kept steps */

/*
 * A kept step is a frozen copy of a model root (tiering/api/keep.h). Its directory has no name in another one. A kept
 * step without a name of its own has that of its step. In one model root names differ: keeping a step again under its
 * number ends the older one in the same commit. Every change in it is -EROFS; access times do not change either.
 */
struct ht_ns_kept {
    uint64_t ino; /* of its directory, and its scope: later ones have higher numbers */
    uint64_t root, step;
    int64_t time_ns; /* when it was kept, since 1970 */
    char name[HT_KEPT_NAME_MAX + 1];
};
/* Those of a model root (0: of all), oldest first, in a malloc'd array. -ENOMEM. */
int ht_ns_kept_list(struct ht_ns *ns, uint64_t root, struct ht_ns_kept **out, size_t *out_count) HT_MUST_CHECK;
/* -ENOENT. */
int ht_ns_kept_find(struct ht_ns *ns, uint64_t root, const char *name, struct ht_ns_kept *out) HT_MUST_CHECK;
/* The same for its directory, with a lookup count. */
int ht_ns_kept_lookup(struct ht_ns *ns, uint64_t root, const char *name, struct stat *out_st) HT_MUST_CHECK;
/* May a caller give this name to a kept step? -EINVAL: its characters, or digits alone. */
int ht_ns_kept_check_name(const char *name) HT_MUST_CHECK;
/* Has a model root changes of names, attributes or times that are not published? A write changes a time. */
bool ht_ns_is_changed(struct ht_ns *ns, uint64_t root);
/* Does it belong to a kept step? */
bool ht_ns_is_frozen(struct ht_ns *ns, uint64_t ino);
/*
 * The digest of the kept step with this directory: 32 hexadecimal digits with a NUL. -ENODATA: it is not known yet, or
 * this is another inode.
 */
enum { HT_NS_DIGEST_MAX = 33 };
int ht_ns_kept_digest(struct ht_ns *ns, uint64_t ino, char out[HT_NS_DIGEST_MAX]) HT_MUST_CHECK;
/* The job of a vault that has this kept step. -ENODATA: none is known. */
int ht_ns_kept_archived(struct ht_ns *ns, uint64_t ino, char out[HT_KEPT_NAME_MAX + 1]) HT_MUST_CHECK;
/*
 * Notes the digest in the log, once (job NULL); or the job, in place of an earlier one. Durable with the next frame
 * that is; after a crash before that it is not known. -ESTALE: the step has gone. -EEXIST: it has a digest already;
 * -EINVAL: the store computed another one than that of the job. -ENOSPC, -ENOMEM, -EROFS. WAITS.
 */
int ht_ns_kept_note(struct ht_ns *ns, uint64_t ino, const char *job, const char *digits) HT_MUST_CHECK;
/*
 * The kept step does not expire until it is released as often, or the mount ends; `forget` ends it all the same.
 * -ENOENT.
 * *out_ino: for the release, which is nothing for a step that has gone.
 */
int ht_ns_kept_hold(struct ht_ns *ns, uint64_t root, const char *name, uint64_t *out_ino) HT_MUST_CHECK;
void ht_ns_kept_release(struct ht_ns *ns, uint64_t ino);
/* The kept step goes, durable when this returns. Open files stay readable. -ENOENT. WAITS. */
int ht_ns_kept_forget(struct ht_ns *ns, uint64_t root, const char *name) HT_MUST_CHECK;

/*
 * Names and attributes of the model root become those of its kept step, all pending until the next publication or abort
 * of the root: until then an fsync below it is -EBUSY. *out: regular files of the kept step, and those that are to get
 * their content, in a malloc'd array by number in the kept step. After an error the caller aborts. -ENOMEM, -ENOSPC,
 * -ESTALE; -EPERM: something in the step or below the root does not belong to uid (0: any user). The caller lets no
 * step begin.
 */
struct ht_copy_id;
int ht_ns_rollback(struct ht_ns *ns, uint64_t root, uint64_t kept, uint32_t uid, struct ht_copy_id **out,
                   size_t *out_count) HT_MUST_CHECK;

/* ------------------------------------------------------------- durability */

/*
 * fsync: content, attributes and the names that lead to the inode, durable. Below a root it publishes this file alone.
 * Directories: their entries. -EBUSY: an open step has changed the inode, or an entry whose content must be published
 * with it; then nothing is published. WAITS.
 */
int ht_ns_fsync(struct ht_ns *ns, uint64_t ino) HT_MUST_CHECK;

/*
 * After the mount: the store may compress files whose attribute compress is auto; all: also files without one. changed:
 * the attribute of some inode was changed.
 */
void ht_ns_compress_begin(struct ht_ns *ns, bool all);
void ht_ns_compress_changed(struct ht_ns *ns);

struct ht_ns_stats {
    uint64_t inodes, entries, xattrs, meta_bytes;
    uint64_t file_log_bytes; /* log bytes of one more regular file, with a name of usual length */
};
void ht_ns_stats(struct ht_ns *ns, struct ht_ns_stats *out);

/*
 * For fsck, on a store that is being repaired: an inode that lost all its names when linking up gets one in lost+found.
 * WAITS.
 */
int ht_ns_reconnect(struct ht_ns *ns) HT_MUST_CHECK;
/* The inode will get a name. */
bool ht_ns_is_in_lost_found(struct ht_ns *ns, uint64_t ino);
/* The same for an object that no inode has: it becomes a file's content. -EEXIST: its number is an inode's. WAITS. */
int ht_ns_lost_found_add(struct ht_ns *ns, uint64_t oid) HT_MUST_CHECK;
/* For fsck: problems in published names, one call each (text names path and inode). Returns how many. */
size_t ht_ns_check(struct ht_ns *ns, void (*report)(void *ctx, const char *code, const char *text), void *ctx);
