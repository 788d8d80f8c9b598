/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns_priv.h - inside names: inodes, entries, attributes, and what is pending on model roots.
 *
 * One rwlock (ns.lock) guards all of it, but for ht_ns_inode.lookups, which is atomic. Who changes names or published
 * state holds the transaction and the lock for writing; who only changes times, opens or what is pending by reading
 * and writing files holds the lock for writing. Lock order: transaction > ns.lock > store.
 *
 * Entries and extended attributes are in one of three states:
 *
 *                 made below a root            publish
 *      (nothing) -------------------> NEW -------------------> CLEAN
 *          ^                           |  removed / abort        |  removed below a root
 *          |<--------------------------+                         v
 *          +<--------------------------------------------------GONE ----abort----> CLEAN
 *                                   publish
 *
 *   CLEAN  current and published     NEW  current only     GONE  published only
 *
 * Outside roots everything is CLEAN at once. Of one name there is at most one current and one GONE.
 *
 * Inodes: HT_NS_PUBLISHED says that the log holds one; its published attributes are shadow->published when there is a
 * shadow, else the current ones. An inode that has a shadow is on its root's list of shadows (or, outside, on that of
 * the pretended root 0, for times not published yet).
 *
 * Invariants:
 *  1. A published entry (CLEAN, GONE) names a published inode, in a published directory.
 *  2. links counts current entries; a directory has at most one, dir->self.
 *  3. An inode leaves memory when it has no current entry, lookup or open, and is not published. Published, it is a
 *     GHOST below a root until its deletion is published, or the abort brings it back.
 *  4. What an abort brings back has its memory already: slots of directories, shadows.
 *  5. Claims of log bytes follow memory: taken when a thing is made, given back when it is freed.
 */
#ifndef HITRAIN_FS_NS_NS_PRIV_H
#define HITRAIN_FS_NS_NS_PRIV_H

#include <stdatomic.h>

#include "fs/ns/ns.h"
#include "fs/ns/records.h"
#include "tiering/base/list.h"
#include "tiering/base/lock.h"
#include "tiering/base/pool.h"

enum ht_ns_state { HT_NS_CLEAN, HT_NS_NEW, HT_NS_GONE };

enum {
    HT_NS_PUBLISHED = 1,  /* the log holds it */
    HT_NS_MODEL_ROOT = 2, /* carries an optimizer */
    HT_NS_GHOST = 4,      /* deleted below a root, published still */
    HT_NS_STALE = 8,      /* made and aborted; only references are left */
    HT_NS_MARKED = 16,    /* for one walk, under the lock */
    HT_NS_UNNAMED = 32,   /* made without a name, and may get its first one */
    HT_NS_VICTIM = 64,    /* lost its names when what did not fit together was taken out */
};

struct ht_ns_root {
    uint64_t ino;                 /* 0: everything outside */
    struct ht_list link;          /* ns.roots */
    struct ht_list shadows;       /* inodes that differ from what is published */
    struct ht_ns_entry **entries; /* NEW and GONE ones */
    uint32_t entry_count, entry_cap;
};

struct ht_ns_shadow {
    struct ht_list link;
    struct ht_ns_inode *inode;
    struct ht_ns_root *root; /* of the inode */
    uint64_t ino;
    struct ht_ns_attr published; /* means something when the inode is published */
    bool xattrs;                 /* some are NEW or GONE */
};

struct ht_ns_xattr {
    struct ht_ns_xattr *next;
    uint32_t value_len;
    uint8_t state, name_len;
    char data[]; /* name, NUL, value */
};

struct ht_ns_dir {
    struct ht_ns_entry *self; /* current entry that names it */
    uint64_t *slots;          /* by ascending cookie: an entry's address, or of a removed one cookie << 1 | 1 */
    uint64_t next_cookie;
    uint32_t slot_count, slot_cap;
    uint32_t live, gone; /* entries current, and GONE (they have no slot but room for one) */
    uint32_t subdirs;
};

struct ht_ns_inode {
    uint64_t ino;
    struct ht_ns_inode *hash_next;
    uintptr_t home; /* its root, or, odd, its shadow, which knows the root */
    struct ht_ns_attr cur;
    struct ht_ns_entry *names; /* current and GONE */
    struct ht_ns_xattr *xattrs;
    union {
        struct ht_ns_dir *dir; /* directories; NULL in replay only */
        char *target;          /* symbolic links */
        struct ht_obj *obj;    /* regular files while opens > 0 */
        uint32_t rdev;         /* devices */
    } u;
    _Atomic uint64_t lookups;
    uint32_t opens; /* in replay: entries that name it as their parent */
    uint16_t links;
    uint8_t flags;
};
static_assert(HT_LINKS_MAX <= UINT16_MAX, "links fit");
static_assert(sizeof(struct ht_ns_inode) <= 104, "memory per file is bounded");

struct ht_ns_entry {
    struct ht_ns_inode *dir, *inode;
    struct ht_ns_entry *hash_next;
    struct ht_ns_entry *name_next, **name_pprev; /* of inode->names */
    uint64_t cookie;                             /* current: the slot with it in dir->slots is this one's */
    uint32_t dirty;                              /* index in root->entries plus 1, or 0 */
    uint8_t state, len;
    char name[]; /* terminated */
};

/* Of entries, with names of up to 255 bytes and their NUL. */
enum { HT_NS_ENTRY_SIZES = (offsetof(struct ht_ns_entry, name) + 256 + 7) / 8 + 1 };

struct ht_ns_problem {
    const char *code;
    char *text;
};
enum { HT_NS_PROBLEMS_KEPT_MAX = 1000 };

struct ht_ns {
    struct ht_store *store;
    struct ht_ns_hooks hooks;
    uint32_t root_uid, root_gid;
    uint64_t salt; /* of the hash of names */
    struct ht_rwlock lock;
    struct ht_pool inode_pool;
    struct ht_pool entry_pool[HT_NS_ENTRY_SIZES]; /* by their size in 8 bytes */
    struct ht_ns_inode **inodes;                  /* hash by number */
    struct ht_ns_entry **entries;                 /* hash by directory and name */
    uint64_t inode_mask, entry_mask;
    uint64_t inode_count, entry_count, xattr_count;
    uint64_t meta_bytes;
    struct ht_list roots;
    struct ht_ns_root outside;
    struct ht_list free_shadows;
    uint32_t free_shadow_count;
    bool replaying;
    struct ht_ns_problem *problems; /* found when linking up */
    size_t problem_count, problems_kept;
};

static inline struct ht_ns_shadow *ht_ns_shadow(const struct ht_ns_inode *i)
{
    return (i->home & 1) != 0 ? (struct ht_ns_shadow *)(i->home - 1) : NULL;
}
static inline struct ht_ns_root *ht_ns_root(const struct ht_ns_inode *i)
{
    return (i->home & 1) != 0 ? ((struct ht_ns_shadow *)(i->home - 1))->root : (struct ht_ns_root *)i->home;
}
static inline bool ht_ns_is_dir(const struct ht_ns_inode *i)
{
    return S_ISDIR(i->cur.mode);
}
/* Changes of it wait for the root's publication. */
static inline bool ht_ns_pending(const struct ht_ns_inode *i)
{
    return ht_ns_root(i)->ino != 0;
}
static inline bool ht_ns_current(const struct ht_ns_entry *e)
{
    return e->state != HT_NS_GONE;
}
/* Nothing keeps it any more (the root directory needs no name). */
static inline bool ht_ns_unused(const struct ht_ns_inode *i)
{
    return i->links == 0 && i->opens == 0 && i->ino != HT_NS_ROOT_INO && !(i->flags & HT_NS_GHOST) &&
        atomic_load_explicit(&i->lookups, memory_order_acquire) == 0;
}
static inline const struct ht_ns_attr *ht_ns_published_attr(const struct ht_ns_inode *i)
{
    return ht_ns_shadow(i) != NULL ? &ht_ns_shadow(i)->published : &i->cur;
}
static inline const char *ht_ns_xattr_value(const struct ht_ns_xattr *x)
{
    return x->data + x->name_len + 1;
}

/* ------------------------------------------------------ operations (op.c) */

/* One change of names: a transaction, and within it the lock held for writing. */
struct ht_ns_op {
    struct ht_ns *ns;
    struct ht_tx *tx;
    int64_t now_ns;
    uint64_t deleted[2]; /* inodes that went, for the hook */
    bool deleted_pending[2];
    unsigned deleted_count;
    uint64_t ended_scope; /* of a root that lost its name, or went: for the hook; what it did there is published, too */
    uint64_t lsn;         /* out of end */
};
int ht_ns_op_begin(struct ht_ns *ns, size_t bytes, struct ht_ns_op *op) HT_CHECK;
/* For content that was written back in a round (store.h); NULL: of none. -EAGAIN: nothing was begun, the next round. */
int ht_ns_op_begin_round(struct ht_ns *ns, size_t bytes, struct ht_rounds *rounds, struct ht_ns_op *op) HT_CHECK;
/* Returns rc, or if that is 0 the error of the commit. */
int ht_ns_op_end(struct ht_ns_op *op, int rc) HT_CHECK;
/* The lock let go and the hooks called, the transaction still open: for calls into layers that call back. */
void ht_ns_op_unlock(struct ht_ns_op *op);
void ht_ns_op_lock(struct ht_ns_op *op);
/* The root directory of a new store is in memory already, for replay found none: now in the log, too. */
void ht_ns_publish_root_dir(struct ht_ns_op *op);
/* Coarse wall clock, as the kernel stamps files with. */
int64_t ht_ns_now(void);

/* Put what is current, or published, into tx. */
void ht_ns_put_inode(struct ht_tx *tx, const struct ht_ns_inode *i, const struct ht_ns_attr *attr);
void ht_ns_put_inode_del(struct ht_tx *tx, uint64_t ino);
void ht_ns_put_target(struct ht_tx *tx, const struct ht_ns_inode *i);
void ht_ns_put_entry(struct ht_tx *tx, const struct ht_ns_entry *e, int64_t time_ns);
void ht_ns_put_entry_del(struct ht_tx *tx, const struct ht_ns_entry *e, int64_t time_ns);
void ht_ns_put_xattr(struct ht_tx *tx, uint64_t ino, const struct ht_ns_xattr *x, int64_t time_ns);
void ht_ns_put_xattr_del(struct ht_tx *tx, uint64_t ino, const struct ht_ns_xattr *x, int64_t time_ns);

/* ------------------------------------------------------- memory (table.c) */

/* Log bytes of things that live: claimed by the functions that make them (-ENOSPC), in replay at the end of it. */
uint64_t ht_ns_inode_claim(const struct ht_ns_inode *i);
uint64_t ht_ns_entry_claim(const struct ht_ns_entry *e);
uint64_t ht_ns_xattr_claim(const struct ht_ns_xattr *x);

int ht_ns_tables_init(struct ht_ns *ns) HT_CHECK;
void ht_ns_tables_free(struct ht_ns *ns); /* and all that is in them */
struct ht_ns_inode *ht_ns_inode_find(struct ht_ns *ns, uint64_t ino);
/* Found, and not stale. */
struct ht_ns_inode *ht_ns_inode_live(struct ht_ns *ns, uint64_t ino);
/* In the table, outside roots, no names; directories get their dir. */
int ht_ns_inode_new(struct ht_ns *ns, uint64_t ino, uint32_t mode, struct ht_ns_inode **out) HT_CHECK;
/* The mode of an inode that was none of a type yet, or another one of the same type. */
int ht_ns_inode_set_mode(struct ht_ns *ns, struct ht_ns_inode *i, uint32_t mode) HT_CHECK;
/* What belongs to its type: it is of none then. Nobody has it open. */
void ht_ns_inode_drop_payload(struct ht_ns *ns, struct ht_ns_inode *i);
int ht_ns_inode_set_target(struct ht_ns *ns, struct ht_ns_inode *i, const char *target, size_t len) HT_CHECK;
/* Out of the table, with its attributes, shadow and claims. It has no names. */
void ht_ns_inode_free(struct ht_ns *ns, struct ht_ns_inode *i);
/* For all inodes; fn may free the one it is given. Non-zero ends and is returned. */
int ht_ns_inode_each(struct ht_ns *ns, int (*fn)(void *ctx, struct ht_ns_inode *i), void *ctx);
/* In the order of their numbers, without those that fn has freed. For fsck: what it says and does must not depend on the hash. -ENOMEM. */
int ht_ns_inode_each_sorted(struct ht_ns *ns, int (*fn)(void *ctx, struct ht_ns_inode *i), void *ctx);
/* The numbers of all that are wanted, in a malloc'd array, for loops that need the lock for themselves. No lock held. -ENOMEM */
typedef bool (*ht_ns_wanted_fn)(struct ht_ns *ns, const struct ht_ns_inode *i);
int ht_ns_inode_collect(struct ht_ns *ns, ht_ns_wanted_fn wanted, uint64_t **out_inos, size_t *out_count) HT_CHECK;
/*
 * The chain of one bucket, and the next cursor (0: that was the last). Whatever is there from the first to the last
 * call is met, though the table grows meanwhile.
 */
struct ht_ns_inode *ht_ns_inode_scan(struct ht_ns *ns, uint64_t *cursor);

struct ht_ns_entry *ht_ns_entry_find(struct ht_ns *ns, const struct ht_ns_inode *dir, const char *name, size_t len);
struct ht_ns_entry *ht_ns_entry_find_gone(struct ht_ns *ns, const struct ht_ns_inode *dir, const char *name,
                                          size_t len);
/* In no table yet. */
int ht_ns_entry_new(struct ht_ns *ns, const char *name, size_t len, struct ht_ns_entry **out) HT_CHECK;
void ht_ns_entry_free(struct ht_ns *ns, struct ht_ns_entry *e);
/* Into and out of the table of names and the inode's list; counts of neither side change. */
void ht_ns_entry_insert(struct ht_ns *ns, struct ht_ns_entry *e, struct ht_ns_inode *dir, struct ht_ns_inode *inode);
void ht_ns_entry_remove(struct ht_ns *ns, struct ht_ns_entry *e);

int ht_ns_xattr_new(struct ht_ns *ns, const char *name, size_t name_len, const void *value, size_t value_len,
                    struct ht_ns_xattr **out) HT_CHECK;
void ht_ns_xattr_free(struct ht_ns *ns, struct ht_ns_xattr *x);
struct ht_ns_xattr *ht_ns_xattr_find(const struct ht_ns_inode *i, const char *name, size_t len);
void ht_ns_xattr_remove(struct ht_ns_inode *i, struct ht_ns_xattr *x);

/* ----------------------------------------------------- directories (dir.c) */

/* Room for so many (1 or 2) more entries, current or GONE. */
int ht_ns_dir_reserve(struct ht_ns *ns, struct ht_ns_dir *d, uint32_t count) HT_CHECK;
/* A slot at the end, with the next cookie. Room was reserved. */
void ht_ns_dir_append(struct ht_ns_dir *d, struct ht_ns_entry *e);
void ht_ns_dir_remove(struct ht_ns *ns, struct ht_ns_dir *d, struct ht_ns_entry *e);
/* e takes the slot and the cookie of old. */
void ht_ns_dir_take_over(struct ht_ns_dir *d, struct ht_ns_entry *old, struct ht_ns_entry *e);
/* Slot of the first entry with a cookie above that, or slot_count. */
uint32_t ht_ns_dir_seek(const struct ht_ns_dir *d, uint64_t cookie);
/* Entry of a slot, or NULL. */
struct ht_ns_entry *ht_ns_dir_entry(const struct ht_ns_dir *d, uint32_t slot);

/* --------------------------------------------------- pending (pending.c) */

/* So that up to so many shadows and pending entries can be made in this operation without fail. */
int ht_ns_reserve(struct ht_ns *ns, struct ht_ns_root *root, uint32_t shadows, uint32_t entries) HT_CHECK;
/* The inode gets a shadow, if it has none, with the present values. One was reserved. */
void ht_ns_shadow_take(struct ht_ns *ns, struct ht_ns_inode *i);
void ht_ns_shadow_drop(struct ht_ns *ns, struct ht_ns_inode *i);
/* The inode has this one, which is on no list of its root's yet, or (NULL) none. */
void ht_ns_shadow_set(struct ht_ns_inode *i, struct ht_ns_shadow *s);
/* Off its list, to the free ones. */
void ht_ns_shadow_recycle(struct ht_ns *ns, struct ht_ns_shadow *s);
/* Before and after a change of attributes: pending below a root, else into the log. */
void ht_ns_attr_edit(struct ht_ns_op *op, struct ht_ns_inode *i);
void ht_ns_attr_put(struct ht_ns_op *op, struct ht_ns_inode *i);
/*
 * inode becomes (again) known as e->name in dir. old: the current entry of that name, which ends, or NULL. Reserved
 * before: a slot, 2 pending entries, shadows of both inodes and of old's.
 */
void ht_ns_entry_add(struct ht_ns_op *op, struct ht_ns_entry *e, struct ht_ns_inode *dir, struct ht_ns_inode *inode,
                     struct ht_ns_entry *old);
/* The entry ends. Reserved: 1 pending entry, 2 shadows. */
void ht_ns_entry_drop(struct ht_ns_op *op, struct ht_ns_entry *e);
/* Off the pending list, and nothing more. */
void ht_ns_entry_undirty(struct ht_ns_root *root, struct ht_ns_entry *e);
void ht_ns_entry_dirty(struct ht_ns_root *root, struct ht_ns_entry *e);
/* Counts of directory and inode when an entry becomes, or ceases to be, current; its slot apart. */
void ht_ns_entry_count(struct ht_ns_entry *e, int by);
/* If nothing keeps the inode, it goes. Reserved: 1 shadow. */
void ht_ns_inode_release(struct ht_ns_op *op, struct ht_ns_inode *i);
/* Move to another scope's lists; its object is the caller's. */
void ht_ns_inode_set_root(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_ns_root *root);

/* ----------------------------------------- publish.c, abort.c, roots.c */

struct ht_ns_root *ht_ns_root_find(struct ht_ns *ns, uint64_t ino);
struct ht_ns_root *ht_ns_root_new(struct ht_ns *ns, uint64_t ino);
/* Its members, if any are left, belong to the outside from now on. Everything was published. */
void ht_ns_root_free(struct ht_ns *ns, struct ht_ns_root *root);
void ht_ns_root_publish_locked(struct ht_ns *ns, struct ht_ns_root *root, struct ht_tx *tx);
size_t ht_ns_root_pending_bytes_locked(struct ht_ns_root *root);
/*
 * Below a root: the inode, its content (obj, or NULL) and the names that lead to it; of a directory also its entries. -ENOMEM, or -EBUSY as
 * ht_ns_fsync: nothing was done.
 */
int ht_ns_publish_alone(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_obj *obj) HT_CHECK;

/* ------------------------------------------------------------- scope.c */

/* A set of inodes, each once and HT_NS_MARKED. The transaction keeps them in memory. */
struct ht_ns_members {
    struct ht_ns_inode **inodes;
    size_t count, cap;
};
int ht_ns_members_add(struct ht_ns_members *m, struct ht_ns_inode *i) HT_CHECK;
void ht_ns_members_free(struct ht_ns_members *m);
/*
 * The content of all members into another scope, or of none: -EBUSY and *out_busy, the one of which something is
 * unpublished.
 */
int ht_ns_scope_move(struct ht_ns_op *op, const struct ht_ns_members *m, uint64_t from, uint64_t to,
                     uint64_t *out_busy) HT_CHECK;
/*
 * After moves that failed (with rc, which is returned), and after a mount: every file's content into the scope that it
 * belongs to. No lock held. WAITS.
 */
int ht_ns_scope_settle(struct ht_ns *ns, int rc) HT_CHECK;

/* ------------------------------------------------------ names.c, rename.c */

/* The directory for a change of that name; -ESTALE, -ENOTDIR, -ENOENT (removed), -ENAMETOOLONG, -EINVAL. */
int ht_ns_find_dir(struct ht_ns *ns, uint64_t ino, const char *name, struct ht_ns_inode **out) HT_CHECK;
int ht_ns_check_removable(const struct ht_ns_inode *i, bool want_dir) HT_CHECK;
/* An inode for a name in dir, announced. Reserved: 1 shadow. */
int ht_ns_make_whiteout(struct ht_ns_op *op, const struct ht_ns_inode *dir, struct ht_cred cred,
                        struct ht_ns_inode **out) HT_CHECK;
/* Before a directory loses its name for good: publishes what is pending below it if it is a model root. */
void ht_ns_settle_root(struct ht_ns_op *op, struct ht_ns_inode *i);
/* Bytes that settling the root of that name would put. */
size_t ht_ns_settle_bytes(struct ht_ns *ns, uint64_t parent, const char *name);

/* -------------------------------------------------------------- attr.c */

void ht_ns_fill_stat(struct ht_ns *ns, const struct ht_ns_inode *i, struct stat *out_st);
/* The content of a regular file, made if there is none, with a reference. Lock held for writing. */
uint32_t ht_ns_chunk_bytes(struct ht_ns *ns, const struct ht_ns_inode *i);
int ht_ns_content(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_obj **out_obj) HT_CHECK;

/* ------------------------------------------------------------- xattr.c */

/* x becomes current in place of what has its name. time_ns: 0, or of the change. Reserved: 1 shadow. */
void ht_ns_xattr_install(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_ns_xattr *x, int64_t time_ns);
void ht_ns_xattr_drop(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_ns_xattr *x, int64_t time_ns);

/* --------------------------------------------------------------- acl.c */

bool ht_ns_acl_valid(const void *value, size_t len);
/* Permission bits of an access list: what mode becomes when it is set. */
uint32_t ht_ns_acl_mode(const void *value, size_t len, uint32_t mode);
/* True when it says no more than mode does. */
bool ht_ns_acl_is_plain(const void *value, size_t len);
/* The list after chmod. */
void ht_ns_acl_chmod(void *value, size_t len, uint32_t mode);
/* The list of a new file from its directory's default; returns the mode that is left of the one asked for. */
uint32_t ht_ns_acl_inherit(void *value, size_t len, uint32_t mode);
/* mask: R_OK W_OK X_OK. 0 or -EACCES. */
int ht_ns_acl_permits(const void *value, size_t len, uint32_t uid, uint32_t gid, int mask, struct ht_cred cred,
                      const uint32_t *gids, size_t gid_count) HT_CHECK;

/* ------------------------------------------- replay.c, link.c, emit.c */

int ht_ns_replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len);
int ht_ns_replayed(void *ctx);
int ht_ns_emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes);
void ht_ns_flush(void *ctx, struct ht_tx *tx);
/* Remember what is wrong; printf-like text. */
void ht_ns_problem(struct ht_ns *ns, const char *code, const char *fmt, ...) HT_PRINTF(3, 4);
void ht_ns_path_locked(struct ht_ns *ns, const struct ht_ns_inode *i, char *buf, size_t cap);

#endif
