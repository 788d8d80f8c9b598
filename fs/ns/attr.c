/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attr.c - attributes: stat, setattr, times of reading and writing, references to the content.
 *
 * The size of a file is its object's. Times are stamped with the coarse clock of the kernel. So in a burst of writes
 * within one tick only the first changes something; the others need the lock for reading only.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

#include <unistd.h>

enum { STAT_BLOCK_BYTES = 512, SETATTR_BYTES = 256 };
#define NS_PER_S 1000000000ll
#define DAY_NS (24 * 3600 * NS_PER_S)

/* ------------------------------------------------------------------ stat */

static struct timespec to_timespec(int64_t ns)
{
    struct timespec ts = {ns / NS_PER_S, ns % NS_PER_S};

    if (ts.tv_nsec < 0) {
        ts.tv_nsec += NS_PER_S;
        ts.tv_sec--;
    }
    return ts;
}

/* Clamped to the range of 64 bits of nanoseconds (years 1678 to 2262). */
static int64_t from_timespec(struct timespec ts)
{
    if (ts.tv_sec >= INT64_MAX / NS_PER_S)
        return INT64_MAX;
    if (ts.tv_sec <= INT64_MIN / NS_PER_S)
        return INT64_MIN;
    return ts.tv_sec * NS_PER_S + ts.tv_nsec;
}

/*
 * Dirty bytes within the size count as stored: programs take no blocks for no data (tar --sparse). So does preallocated
 * space. Holes are whole chunks, and programs that look for them take them to be multiples of st_blksize.
 */
static void fill_content(struct ht_ns *ns, const struct ht_ns_inode *i, struct stat *st)
{
    struct ht_obj *obj = ht_obj_get(ns->store, i->ino);
    struct ht_obj_stat os;

    if (!obj)
        return;
    ht_obj_stat(obj, &os);
    ht_obj_put(obj);
    st->st_blksize = os.chunk_bytes;
    uint64_t bytes = os.prealloc_bytes +
        ht_min_u64(os.stored_bytes + os.dirty_bytes, ht_max_u64(os.stored_bytes, ht_round_up(os.size, HT_BLOCK_BYTES)));
    st->st_size = (off_t)os.size;
    st->st_blocks = (blkcnt_t)(bytes / STAT_BLOCK_BYTES);
}

void ht_ns_fill_stat(struct ht_ns *ns, const struct ht_ns_inode *i, struct stat *out_st)
{
    bool dir = ht_ns_is_dir(i);
    struct stat st = {
        .st_ino = i->ino,
        .st_mode = i->cur.mode,
        .st_uid = i->cur.uid,
        .st_gid = i->cur.gid,
        .st_nlink = i->links,
        .st_blksize = HT_BLOCK_BYTES,
        .st_atim = to_timespec(i->cur.atime_ns),
        .st_mtim = to_timespec(i->cur.mtime_ns),
        .st_ctim = to_timespec(i->cur.ctime_ns),
    };

    if (dir && (i->links > 0 || i->ino == HT_NS_ROOT_INO || (i->flags & HT_NS_FROZEN) != 0))
        st.st_nlink = 2 + (nlink_t)i->u.dir->subdirs;
    if (dir)
        st.st_size = HT_BLOCK_BYTES;
    else if (S_ISLNK(i->cur.mode))
        st.st_size = (off_t)strlen(i->u.target);
    else if (S_ISCHR(i->cur.mode) || S_ISBLK(i->cur.mode))
        st.st_rdev = i->u.rdev;
    else if (S_ISREG(i->cur.mode))
        fill_content(ns, i, &st);
    *out_st = st;
}

int ht_ns_getattr(struct ht_ns *ns, uint64_t ino, struct stat *out_st)
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);

    if (i)
        ht_ns_fill_stat(ns, i, out_st);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return i ? 0 : -ESTALE;
}

int ht_ns_getattr_locked(struct ht_ns *ns, uint64_t ino, bool ref, struct stat *out_st)
{
    struct ht_ns_inode *i = ht_ns_inode_live(ns, ino);

    if (!i)
        return -ESTALE;
    if (ref)
        atomic_fetch_add_explicit(&i->lookups, 1, memory_order_relaxed);
    ht_ns_fill_stat(ns, i, out_st);
    return 0;
}

/* --------------------------------------------------------------- content */

/* A reference to references to the content, for operations that wait. */
static int pin_content(struct ht_ns *ns, uint64_t ino, struct ht_obj **out_obj)
{
    int rc;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_inode *i = ht_ns_inode_live(ns, ino);
    if (!i)
        rc = -ESTALE;
    else if (!S_ISREG(i->cur.mode))
        rc = ht_ns_is_dir(i) ? -EISDIR : -EINVAL;
    else
        rc = ht_ns_content(ns, i, out_obj);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return rc;
}

static int set_size(struct ht_ns *ns, uint64_t ino, off_t size)
{
    struct ht_obj *obj;

    if (size < 0)
        return -EINVAL;
    if ((uint64_t)size > HT_FILE_BYTES_MAX)
        return -EFBIG;
    if (ht_store_read_only(ns->store))
        return -EROFS;
    int rc = pin_content(ns, ino, &obj);
    if (rc != 0)
        return rc;
    rc = ht_obj_truncate(obj, (uint64_t)size);
    ht_obj_put(obj);
    return rc;
}

/* --------------------------------------------------------------- setattr */

static uint16_t without_suid(uint16_t mode, unsigned what)
{
    if (S_ISDIR(mode))
        return mode;
    mode &= (uint16_t)~S_ISUID;
    return (mode & S_IXGRP) != 0 || (what & HT_KILL_SGID) != 0 ? mode & (uint16_t)~S_ISGID : mode;
}

static void apply(struct ht_ns_attr *a, unsigned what, const struct stat *v, int64_t now)
{
    if ((what & HT_SET_MODE) != 0)
        a->mode = (uint16_t)((a->mode & S_IFMT) | (v->st_mode & 07777));
    if ((what & HT_SET_UID) != 0)
        a->uid = v->st_uid;
    if ((what & HT_SET_GID) != 0)
        a->gid = v->st_gid;
    if ((what & HT_KILL_SUID) != 0)
        a->mode = without_suid(a->mode, what);
    if ((what & HT_SET_ATIME) != 0)
        a->atime_ns = from_timespec(v->st_atim);
    if ((what & (HT_SET_MTIME_NOW | HT_SET_SIZE)) != 0)
        a->mtime_ns = now;
    if ((what & HT_SET_MTIME) != 0)
        a->mtime_ns = from_timespec(v->st_mtim);
    if ((what & HT_SET_ATIME_NOW) != 0)
        a->atime_ns = now;
    a->ctime_ns = (what & HT_SET_CTIME) != 0 ? from_timespec(v->st_ctim) : now;
}

/* The mode as the access list says. NULL in *out when there is none. */
static int changed_acl(struct ht_ns *ns, const struct ht_ns_inode *i, uint32_t mode, struct ht_ns_xattr **out)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_xattr *x = ht_ns_xattr_find(i, HT_NS_ACL_ACCESS, strlen(HT_NS_ACL_ACCESS));

    *out = NULL;
    if (!x)
        return 0;
    int rc = ht_ns_xattr_new(ns, x->data, x->name_len, ht_ns_xattr_value(x), x->value_len, out);
    if (rc == 0)
        ht_ns_acl_chmod((*out)->data + (*out)->name_len + 1, (*out)->value_len, mode);
    return rc;
}

/* out_st NULL: only checks whether it can be done. */
static int setattr_locked(struct ht_ns_op *op, uint64_t ino, unsigned what, const struct stat *v, struct stat *out_st)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_xattr *acl = NULL;
    struct ht_ns_inode *i;
    int rc = ht_ns_find_to_change(op->ns, ino, &i);

    if (rc == 0 && (what & HT_SET_MODE) != 0)
        rc = changed_acl(op->ns, i, v->st_mode, &acl);
    if (acl && !out_st)
        ht_ns_xattr_free(op->ns, acl);
    if (rc != 0 || !out_st)
        return rc;
    ht_ns_attr_edit(op, i);
    apply(&i->cur, what, v, op->now_ns);
    if (acl)
        ht_ns_xattr_install(op, i, acl, 0);
    ht_ns_attr_put(op, i);
    ht_ns_fill_stat(op->ns, i, out_st);
    return 0;
}

static int set_attributes(struct ht_ns *ns, uint64_t ino, unsigned what, const struct stat *v, struct stat *out_st)
{
    struct ht_ns_op op;
    int rc = ht_ns_op_begin(ns, SETATTR_BYTES, &op);

    if (rc != 0)
        return rc;
    return ht_ns_op_end(&op, setattr_locked(&op, ino, what, v, out_st));
}

/* Every write may request that suid is cleared: no transaction if there is none. */
static bool nothing_to_set(struct ht_ns *ns, uint64_t ino, unsigned what)
{
    if (what == 0 || (what & ~(unsigned)(HT_KILL_SUID | HT_KILL_SGID)) != 0)
        return what == 0;
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);
    bool nothing = !i || without_suid(i->cur.mode, what) == i->cur.mode;
    ht_rwlock_unlock(ht_ns_lock(ns));
    return nothing;
}

/* The other attributes are checked before the size changes: there is no way back from that. */
int ht_ns_setattr(struct ht_ns *ns, uint64_t ino, unsigned what, const struct stat *values, struct stat *out_st)
{
    bool size = (what & HT_SET_SIZE) != 0;
    bool alone = size && nothing_to_set(ns, ino, what & ~(unsigned)(HT_SET_SIZE | HT_SET_MTIME_NOW));
    int rc = size && !alone ? set_attributes(ns, ino, what, values, NULL) : 0;

    if (rc == 0 && size)
        rc = set_size(ns, ino, values->st_size);
    if (rc != 0)
        return rc;
    if (alone) {
        ht_ns_touch(ns, ino, true); /* as a write does: a log without room is no reason not to truncate */
        what = 0;
    }
    if (nothing_to_set(ns, ino, what))
        return ht_ns_getattr(ns, ino, out_st);
    return set_attributes(ns, ino, what, values, out_st);
}

/* ----------------------------------------------------------------- times */

/* relatime: once after each change, and once a day. */
static bool atime_due(const struct ht_ns_attr *a, int64_t now)
{
    return a->atime_ns <= a->mtime_ns || a->atime_ns <= a->ctime_ns || now - a->atime_ns >= DAY_NS;
}

bool ht_ns_atime_due(struct ht_ns *ns, uint64_t ino, bool strict)
{
    int64_t now = ht_ns_now();

    if (ht_store_read_only(ns->store))
        return false;
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);
    bool due = i && !ht_ns_frozen(i) && i->cur.atime_ns != now && (strict || atime_due(&i->cur, now));
    ht_rwlock_unlock(ht_ns_lock(ns));
    return due;
}

static bool touch_due(const struct ht_ns_inode *i, bool written, int64_t now) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if (!i || ht_ns_frozen(i))
        return false;
    if (written)
        return i->cur.mtime_ns != now || i->cur.ctime_ns != now;
    return i->cur.atime_ns != now;
}

static void touch_locked(struct ht_ns *ns, struct ht_ns_inode *i, bool written, int64_t now) HT_REQUIRES(HT_LOCK_NAMES)
{
    if (!i || ht_ns_frozen(i) || ht_ns_reserve(ns, ht_ns_root(i), 1, 0) != 0)
        return; /* without memory the times stay as they are */
    ht_ns_shadow_take(ns, i);
    if (written)
        i->cur.mtime_ns = i->cur.ctime_ns = now;
    else
        i->cur.atime_ns = now;
}

void ht_ns_touch(struct ht_ns *ns, uint64_t ino, bool written)
{
    int64_t now = ht_ns_now();

    if (ht_store_read_only(ns->store))
        return;
    bool due = touch_due(ht_ns_read_begin(ns, ino), written, now);
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (!due)
        return;
    ht_rwlock_wrlock(ht_ns_lock(ns));
    touch_locked(ns, ht_ns_inode_live(ns, ino), written, now);
    ht_rwlock_unlock(ht_ns_lock(ns));
}

/* ---------------------------------------------------------------- access */

static int mode_permits(const struct ht_ns_attr *a, unsigned mask, struct ht_cred cred, const uint32_t *gids,
                        size_t gid_count)
{
    unsigned bits = a->mode & 7u;

    if (cred.uid == a->uid)
        bits = a->mode >> 6 & 7u;
    else if (ht_ns_is_member(a->gid, cred, gids, gid_count))
        bits = a->mode >> 3 & 7u;
    return (bits & mask) == mask ? 0 : -EACCES;
}

static int access_locked(const struct ht_ns_inode *i, int mask, struct ht_cred cred, const uint32_t *gids,
                         size_t gid_count) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_xattr *acl = ht_ns_xattr_find(i, HT_NS_ACL_ACCESS, strlen(HT_NS_ACL_ACCESS));

    /* root may do all, but execute only files with an execute bit */
    if (cred.uid == 0)
        return (mask & X_OK) == 0 || ht_ns_is_dir(i) || (i->cur.mode & 0111) != 0 ? 0 : -EACCES;
    if (acl)
        return ht_ns_acl_permits(ht_ns_xattr_value(acl), acl->value_len, i->cur.uid, i->cur.gid, mask, cred, gids,
                                 gid_count);
    return mode_permits(&i->cur, (unsigned)mask, cred, gids, gid_count);
}

int ht_ns_access(struct ht_ns *ns, uint64_t ino, int mask, struct ht_cred cred, const uint32_t *gids, size_t gid_count)
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);
    int rc = !i ? -ESTALE : access_locked(i, mask & (R_OK | W_OK | X_OK), cred, gids, gid_count);

    ht_rwlock_unlock(ht_ns_lock(ns));
    return rc;
}
