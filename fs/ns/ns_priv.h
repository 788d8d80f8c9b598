/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns_priv.h - inside names: inodes, entries, attributes, and pending changes of model roots.
 *
 * One rwlock (ns.lock) guards everything except ht_ns_inode.lookups, which is atomic. A thread that changes names or
 * published state holds the transaction and the lock for writing. A thread that reads or writes files, and so changes
 * only times, opens or pending attributes, holds the lock for writing. Lock order: transaction > ns.lock > store.
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
 * Outside roots everything is CLEAN at once. A name has at most one current and one GONE entry.
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
 *  4. Everything that an abort brings back has its memory already: slots of directories, shadows.
 *  5. Log reserves follow memory: taken when a thing is made, given back when it is freed.
 */
#pragma once

#include <stdatomic.h>

#include "fs/ns/ns.h"
#include "fs/ns/records.h"
#include "tiering/base/idtable.h"
#include "tiering/base/lock.h"
#include "tiering/base/pool.h"
#include "tiering/api/object.h"
#include "tiering/api/stats.h"
#include "tiering/api/store.h"
#include "tiering/api/tx.h"

#define HT_NS_COMPRESS_NAME HT_XATTR_PREFIX "compress"

enum ht_ns_state { HT_NS_CLEAN, HT_NS_NEW, HT_NS_GONE };

enum {
    HT_NS_PUBLISHED = 1,  /* the log holds it */
    HT_NS_MODEL_ROOT = 2, /* carries an optimizer */
    HT_NS_GHOST = 4,      /* deleted below a root, and still published */
    HT_NS_STALE = 8,      /* made and aborted: only references are left. Or in a copy that is not complete */
    HT_NS_MARKED = 16,    /* for one walk, under the lock */
    HT_NS_UNNAMED = 32,   /* made without a name, and may get its first one */
    HT_NS_VICTIM = 64,    /* lost its names when contradictory records were removed */
    HT_NS_FROZEN = 128,   /* with MODEL_ROOT: the directory of a kept step, which has no name in another one */
};

struct ht_ns_root {
    uint64_t ino;           /* 0: everything outside */
    uint64_t members;       /* inodes in memory of which it is the root */
    bool frozen, whole;     /* a kept step, or a copy in the making; in a rollback: published together, or aborted */
    struct ht_list link;    /* ns.roots */
    struct ht_list shadows; /* inodes that differ from their published state */
    struct ht_ns_entry **entries; /* NEW and GONE ones */
    uint32_t entry_count, entry_cap;
};

struct ht_ns_shadow {
    struct ht_list link;
    struct ht_ns_inode *inode;
    struct ht_ns_root *root;     /* of the inode */
    struct ht_ns_attr published; /* valid when the inode is published */
    bool xattrs;                 /* some are NEW or GONE */
};

struct ht_ns_xattr {
    struct ht_ns_xattr *next;
    uint32_t value_len;
    uint8_t state, name_len;
    char data[]; /* name, NUL, value */
};

struct ht_ns_dir {
    HT_GUARDED_BY(HT_LOCK_NAMES) struct {
        struct ht_ns_entry *self; /* current entry that names it */
        uint64_t *slots;          /* by ascending cookie: an entry's address, or of a removed one cookie << 1 | 1 */
        uint64_t next_cookie;
        uint32_t slot_count, slot_cap;
        uint32_t live, gone; /* entries current, and GONE (they have no slot but room for one) */
        uint32_t subdirs;
    };
};

struct ht_ns_inode {
    union {
        uint64_t ino;
        struct ht_id_link by_ino; /* in ns.inodes */
    };
    HT_GUARDED_BY(HT_LOCK_NAMES) struct {
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
    };
    _Atomic uint64_t lookups;
    HT_GUARDED_BY(HT_LOCK_NAMES) struct {
        uint32_t opens; /* in replay: entries that name it as their parent */
        uint16_t links;
        uint8_t flags;
    };
};
static_assert(HT_LINKS_MAX <= UINT16_MAX, "links fit");
static_assert(sizeof(struct ht_ns_inode) <= 104, "memory per file is bounded");

struct ht_ns_entry {
    HT_GUARDED_BY(HT_LOCK_NAMES) struct {
        struct ht_ns_inode *dir, *inode;
        struct ht_ns_entry *hash_next;
        struct ht_ns_entry *name_next, **name_pprev; /* of inode->names */
        uint64_t cookie;                             /* current: the slot with it in dir->slots is this one's */
        uint32_t dirty;                              /* index in root->entries plus 1, or 0 */
        uint8_t state, len;
    };
    char name[]; /* terminated */
};

/* Sizes of entries, with names of up to 255 bytes and their NUL. */
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
    bool compress_all;           /* files without the attribute compress, too; fixed at the mount */
    _Atomic bool compress_named; /* an inode has, or had, the attribute */
    struct ht_pool inode_pool;
    struct ht_pool entry_pool[HT_NS_ENTRY_SIZES]; /* by their size in 8 bytes */
    HT_GUARDED_BY(HT_LOCK_NAMES) struct {
        struct ht_id_table inodes;
        struct ht_buckets entries; /* hash by directory and name */
        uint64_t entry_count, xattr_count, meta_bytes;
        struct ht_list roots;
        struct ht_ns_root outside;
        struct ht_ns_copying *copying; /* a copy of a model root that the open transaction makes, or NULL */
        struct ht_list kept, free_shadows;
        struct ht_ns_shadow_walk *shadow_walks;
        uint32_t free_shadow_count;
        bool replaying;
        struct ht_ns_problem *problems; /* found when linking up */
        size_t problem_count, problems_kept;
    };
};

HT_RWLOCK_OF(ht_ns_lock, struct ht_ns, lock, HT_LOCK_NAMES)

static inline struct ht_ns_shadow *ht_ns_shadow(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return (i->home & 1) != 0 ? (struct ht_ns_shadow *)(i->home - 1) : NULL;
}
static inline struct ht_ns_root *ht_ns_root(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return (i->home & 1) != 0 ? ((struct ht_ns_shadow *)(i->home - 1))->root : (struct ht_ns_root *)i->home;
}
static inline bool ht_ns_is_dir(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return S_ISDIR(i->cur.mode);
}
/* Changes of the inode wait for the root's publication. */
static inline bool ht_ns_pending(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ht_ns_root(i)->ino != 0;
}
static inline bool ht_ns_current(const struct ht_ns_entry *e) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return e->state != HT_NS_GONE;
}
/* Has it no references left (the root directory and those of kept steps need no name)? */
static inline bool ht_ns_unused(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return i->links == 0 && i->opens == 0 && i->ino != HT_NS_ROOT_INO && !(i->flags & (HT_NS_GHOST | HT_NS_FROZEN)) &&
        atomic_load_explicit(&i->lookups, memory_order_acquire) == 0;
}
static inline const struct ht_ns_attr *ht_ns_published_attr(const struct ht_ns_inode *i)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ht_ns_shadow(i) ? &ht_ns_shadow(i)->published : &i->cur;
}
/* Coarse wall clock, like the kernel's stamps. */
static inline int64_t ht_ns_now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME_COARSE, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}
static inline const char *ht_ns_xattr_value(const struct ht_ns_xattr *x)
{
    return x->data + x->name_len + 1;
}

/* ------------------------------------------------------- memory (table.c) */

/* Log bytes of live records: the functions that make them reserve these (-ENOSPC), and replay at its end. */
uint64_t ht_ns_inode_log_bytes(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
uint64_t ht_ns_entry_log_bytes(const struct ht_ns_entry *e) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
uint64_t ht_ns_xattr_log_bytes(const struct ht_ns_xattr *x);

int ht_ns_tables_init(struct ht_ns *ns) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
void ht_ns_tables_free(struct ht_ns *ns) HT_REQUIRES(HT_LOCK_NAMES); /* and everything in them */
struct ht_ns_inode *ht_ns_inode_find(struct ht_ns *ns, uint64_t ino) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* The inode if it is found and not stale. */
struct ht_ns_inode *ht_ns_inode_live(struct ht_ns *ns, uint64_t ino) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* The same: takes the lock, for reading. The caller releases it, whether or not there is one. */
struct ht_ns_inode *ht_ns_read_begin(struct ht_ns *ns, uint64_t ino) HT_ACQUIRE_SHARED(HT_LOCK_NAMES);
/* In the table, outside roots, no names; directories get their dir. */
int ht_ns_inode_new(struct ht_ns *ns, uint64_t ino, uint32_t mode, struct ht_ns_inode **out)
    HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* Sets the mode of an inode that had no type yet, or another mode of the same type. */
int ht_ns_inode_set_mode(struct ht_ns *ns, struct ht_ns_inode *i, uint32_t mode)
    HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* Frees the parts that belong to its type: it has no type then. It is not open. */
void ht_ns_inode_drop_payload(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
int ht_ns_inode_set_target(struct ht_ns *ns, struct ht_ns_inode *i, const char *target, size_t len)
    HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* Out of the table, with its attributes, shadow and reserves. It has no names. */
void ht_ns_inode_free(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
/* For all inodes; fn may free the one it is given. Non-zero ends and is returned. */
int ht_ns_inode_each(struct ht_ns *ns, int (*fn)(void *ctx, struct ht_ns_inode *i), void *ctx)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/*
 * In the order of their numbers, without those that fn has freed: repairs must not depend on the hash. -ENOMEM.
 */
int ht_ns_inode_each_sorted(struct ht_ns *ns, int (*fn)(void *ctx, struct ht_ns_inode *i), void *ctx)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/*
 * The numbers of all that are wanted, in a malloc'd array, for loops that need the lock for
 * themselves. No lock held. -ENOMEM
 */
typedef bool (*ht_ns_wanted_fn)(struct ht_ns *ns, const struct ht_ns_inode *i);
int ht_ns_inode_collect(struct ht_ns *ns, ht_ns_wanted_fn wanted, uint64_t **out_inos, size_t *out_count) HT_MUST_CHECK;
/*
 * The chain of one bucket, and the next cursor (0: that was the last). A scan meets every inode that is there from the
 * first to the last call, though the table may grow in between.
 */
struct ht_ns_inode *ht_ns_inode_scan(struct ht_ns *ns, uint64_t *cursor) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* The next one of the chain, or NULL. */
static inline struct ht_ns_inode *ht_ns_inode_next(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return (struct ht_ns_inode *)(void *)i->by_ino.next;
}
static_assert(offsetof(struct ht_ns_inode, by_ino) == 0, "the link of an inode is at its address");

struct ht_ns_entry *ht_ns_entry_find(struct ht_ns *ns, const struct ht_ns_inode *dir, const char *name, size_t len)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
struct ht_ns_entry *ht_ns_entry_find_gone(struct ht_ns *ns, const struct ht_ns_inode *dir, const char *name, size_t len)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* In no table yet. */
int ht_ns_entry_new(struct ht_ns *ns, const char *name, size_t len, struct ht_ns_entry **out)
    HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
void ht_ns_entry_free(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES);
/* Into and out of the table of names and the inode's list; counts of neither side change. */
void ht_ns_entry_insert(struct ht_ns *ns, struct ht_ns_entry *e, struct ht_ns_inode *dir, struct ht_ns_inode *inode)
    HT_REQUIRES(HT_LOCK_NAMES);
void ht_ns_entry_remove(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES);

int ht_ns_xattr_new(struct ht_ns *ns, const char *name, size_t name_len, const void *value, size_t value_len,
                    struct ht_ns_xattr **out) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* Of no inode. */
void ht_ns_xattr_free(struct ht_ns *ns, struct ht_ns_xattr *x) HT_REQUIRES(HT_LOCK_NAMES);
struct ht_ns_xattr *ht_ns_xattr_find(const struct ht_ns_inode *i, const char *name, size_t len)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* Takes it out, and frees it. NULL: nothing. */
void ht_ns_xattr_remove(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_ns_xattr *x) HT_REQUIRES(HT_LOCK_NAMES);

/* Memory for so many shadows, which then cannot fail. -ENOMEM. */
int ht_ns_shadow_reserve(struct ht_ns *ns, uint32_t count) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* The inode gets a shadow, if it has none, with the present values. One was reserved. */
void ht_ns_shadow_take(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
void ht_ns_shadow_drop(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
/* Gives the inode this shadow, which is on no list of its root's yet, or (NULL) none. */
void ht_ns_shadow_set(struct ht_ns_inode *i, struct ht_ns_shadow *s) HT_REQUIRES(HT_LOCK_NAMES);
/* Moves it from its list to the free ones. */
void ht_ns_shadow_recycle(struct ht_ns *ns, struct ht_ns_shadow *s) HT_REQUIRES(HT_LOCK_NAMES);
/* Takes it from its list. */
void ht_ns_shadow_leave(struct ht_ns *ns, struct ht_ns_shadow *s) HT_REQUIRES(HT_LOCK_NAMES);

/* A walk over the shadows that are on a list when it begins. The lock may be released between two. */
struct ht_ns_shadow_walk {
    struct ht_ns_shadow_walk *next;
    struct ht_list *at, *last; /* at NULL: there is none */
};
void ht_ns_shadow_walk_begin(struct ht_ns *ns, struct ht_ns_shadow_walk *w, struct ht_list *list)
    HT_REQUIRES(HT_LOCK_NAMES);
struct ht_ns_shadow *ht_ns_shadow_walk_next(struct ht_ns_shadow_walk *w) HT_REQUIRES(HT_LOCK_NAMES);
void ht_ns_shadow_walk_end(struct ht_ns *ns, struct ht_ns_shadow_walk *w) HT_REQUIRES(HT_LOCK_NAMES);

/* Moves it to another scope's lists; the caller moves its object. */
void ht_ns_inode_set_root(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_ns_root *root) HT_REQUIRES(HT_LOCK_NAMES);

/* ----------------------------------------------------- directories (dir.c) */

/* Reserves room for so many (1 or 2) more entries, current or GONE. */
int ht_ns_dir_reserve(struct ht_ns *ns, struct ht_ns_dir *d, uint32_t count) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* A slot at the end, with the next cookie. Room was reserved. */
void ht_ns_dir_append(struct ht_ns_dir *d, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES);
void ht_ns_dir_remove(struct ht_ns *ns, struct ht_ns_dir *d, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES);
/* e takes the slot and the cookie of old. */
void ht_ns_dir_take_over(struct ht_ns_dir *d, struct ht_ns_entry *old, struct ht_ns_entry *e)
    HT_REQUIRES(HT_LOCK_NAMES);
/* Slot of the first entry with a cookie above that, or slot_count. */
uint32_t ht_ns_dir_seek(const struct ht_ns_dir *d, uint64_t cookie) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* Entry of a slot, or NULL. */
struct ht_ns_entry *ht_ns_dir_entry(const struct ht_ns_dir *d, uint32_t slot) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* There is one. */
struct ht_ns_entry *ht_ns_dir_last_entry(const struct ht_ns_dir *d) HT_REQUIRES_SHARED(HT_LOCK_NAMES);

/* --------------------------------------------------- attr.c, content.c */

void ht_ns_fill_stat(struct ht_ns *ns, const struct ht_ns_inode *i, struct stat *out_st)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);

/* Of a new object for the file's content. */
uint32_t ht_ns_chunk_bytes(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* The content of a regular file, made if there is none, with a reference. Lock held for writing. */
int ht_ns_content(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_obj **out_obj)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES) HT_MUST_CHECK;
/* Does this attribute say how long content stays in memory, or whether it is compressed? It has to know of a change. */
bool ht_ns_is_of_content(const char *attribute);
void ht_ns_content_changed(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* A directory is a model root now, or was one at the mount: the store hears which devices its content goes to. */
void ht_ns_root_paths(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES);

/* ----------------------------------------------------- access lists (acl.c) */

/* POSIX access control lists as bytes: pure functions. All except ht_ns_acl_valid take a valid list. */
bool ht_ns_acl_valid(const void *value, size_t len);
/* Permission bits of an access list: the new mode when the list is set. */
uint32_t ht_ns_acl_mode(const void *value, size_t len, uint32_t mode);
/* True when it has no more information than mode. */
bool ht_ns_acl_is_plain(const void *value, size_t len);
/* The list after chmod. */
void ht_ns_acl_chmod(void *value, size_t len, uint32_t mode);
/* The list of a new file from its directory's default; returns the rest of the requested mode. */
uint32_t ht_ns_acl_inherit(void *value, size_t len, uint32_t mode);
/* Is that the caller's group, or one of the supplementary ones? */
bool ht_ns_is_member(uint32_t id, struct ht_cred cred, const uint32_t *gids, size_t gid_count);
/* mask: R_OK W_OK X_OK. 0 or -EACCES. */
int ht_ns_acl_permits(const void *value, size_t len, uint32_t uid, uint32_t gid, int mask, struct ht_cred cred,
                      const uint32_t *gids, size_t gid_count) HT_MUST_CHECK;

/* ----------------------------------------------------- replay.c, link.c */

int ht_ns_replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len);
int ht_ns_replayed(void *ctx);
int ht_ns_emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes);
/* The current name of an inode, or else its former one. */
const struct ht_ns_entry *ht_ns_name_of(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
void ht_ns_path_locked(struct ht_ns *ns, const struct ht_ns_inode *i, char *buf, size_t cap)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
