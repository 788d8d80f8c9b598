/* SPDX-License-Identifier: Apache-2.0 */
/*
 * target.c - one device to format: checks that it may be, and holds it.
 *
 * Protection of data: a mounted device, or one that another program or the kernel uses, is refused always. Unless
 * forced, mkfs also refuses a device on which libblkid or hitrain recognises something, and a regular file that holds
 * any bytes at its beginning.
 */
#include "mount-helpers/mkfs/mkfs.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiering/sys/mounts.h"
#include "tiering/sys/nvme_namespace.h"
#include "tiering/space/super.h"

#define LOOKED_AT_BYTES HT_MIB /* of a regular file that nothing recognises */

/* ------------------------------------------------------------ regular files */

/* Allocates the space if the file system can; otherwise the file is sparse. */
static int allocate(int fd, uint64_t bytes, bool *out_sparse)
{
    *out_sparse = false;
    if (fallocate(fd, 0, 0, (off_t)bytes) == 0)
        return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS)
        return -errno;
    *out_sparse = true;
    return ftruncate(fd, (off_t)bytes) == 0 ? 0 : -errno;
}

static int create_file(struct ht_mkfs_target *t, uint64_t bytes)
{
    int fd = open(t->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600), rc;

    if (fd < 0)
        return ht_fail(-errno, "%s: cannot create it: %s", t->path, strerror(errno));
    rc = allocate(fd, bytes, &t->sparse);
    close(fd);
    t->created = rc == 0 || unlink(t->path) != 0; /* first: the message may need the space */
    if (rc < 0)
        ht_error("%s: cannot make it %s large: %s", t->path, ht_size_text(bytes), strerror(-rc));
    return rc;
}

/* No other process holds it at this moment, and none can take it while its size changes. */
static int resize_file(struct ht_mkfs_target *t, uint64_t bytes)
{
    int fd = open(t->path, O_RDWR | O_CLOEXEC), rc = 0;

    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0 || ftruncate(fd, (off_t)bytes) != 0)
        rc = -errno;
    if (rc == 0)
        rc = allocate(fd, bytes, &t->sparse);
    if (rc < 0)
        ht_error("%s: cannot make it %s large: %s", t->path, ht_size_text(bytes), strerror(-rc));
    if (fd >= 0)
        close(fd);
    return rc;
}

/* -------------------------------------------------------------- may it be? */

static int check_kind(const struct ht_mkfs_target *t, const struct stat *st, const struct ht_mkfs_options *o)
{
    if (!S_ISBLK(st->st_mode) && !S_ISREG(st->st_mode) && !ht_nvme_namespace_is(st))
        return ht_fail(-EINVAL, "%s is neither a block device nor a regular file, nor an NVMe namespace", t->path);
    if (o->size_bytes != 0 && !S_ISREG(st->st_mode))
        return ht_fail(-EINVAL, "%s is a device: --size is for regular files", t->path);
    if (o->size_bytes != 0 && !o->force)
        return ht_fail(-EEXIST,
                       "%s exists already: --size creates a file; without it the file is formatted as it is, with "
                       "--force it is overwritten",
                       t->path);
    return 0;
}

/* A mount of hitrain holds the device as long as it lives, and its holder is named then; a dead mount holds nothing. */
static int check_mounted(const struct ht_mkfs_target *t)
{
    struct ht_mount_entry m;

    if (ht_mount_of_source(t->path, &m) != 0 || ht_mount_is_hitrain(&m))
        return 0;
    return ht_fail(-EBUSY, "%s is mounted on %s: unmount it first", t->path, m.point);
}

static bool is_same(const struct stat *a, const struct stat *b)
{
    if (S_ISBLK(a->st_mode))
        return S_ISBLK(b->st_mode) && a->st_rdev == b->st_rdev;
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/*
 * Opening does not show that a file is swap. The kernel holds block devices in use as swap, by device mapper or md, and
 * opening them fails. Opening finds loop devices, too (tiering/io/open.c).
 */
static int check_swap(const char *path, const struct stat *st)
{
    FILE *f = fopen("/proc/swaps", "re");
    struct stat other;
    char line[4200];
    int rc = 0;

    while (rc == 0 && f && fgets(line, sizeof(line), f)) {
        line[strcspn(line, " \t\n")] = '\0';
        ht_proc_unescape(line);
        if (stat(line, &other) != 0 || !is_same(st, &other))
            continue;
        ht_error("%s is in use as swap: end that with swapoff", path);
        rc = -EBUSY;
    }
    if (f)
        (void)fclose(f);
    return rc;
}

static int hold_target(struct ht_mkfs_target *t, const struct ht_mkfs_options *o)
{
    int rc = ht_dev_open(t->path, o->no_wait ? HT_DEV_NOWAIT : 0, &t->dev);

    if (rc == -EBUSY)
        ht_error("%s was not formatted; not even --force formats a device in use", t->path);
    return rc;
}

static void describe_store(struct ht_mkfs_target *t, int rc, const struct ht_super *sb)
{
    char uuid[HT_UUID_TEXT_MAX];

    if (rc == 0 || rc == -ENODATA)
        snprintf(t->found, sizeof(t->found), "a hitrain store%s%s%s (%s)", sb->label[0] != '\0' ? " labelled \"" : "",
                 sb->label, sb->label[0] != '\0' ? "\"" : "", ht_uuid_text(sb->uuid, uuid));
    else
        snprintf(t->found, sizeof(t->found), "a damaged hitrain store");
    t->held_something = true;
}

static int find_bytes(struct ht_mkfs_target *t)
{
    size_t n = (size_t)ht_min_u64(ht_dev_size(t->dev), LOOKED_AT_BYTES) / HT_BLOCK_BYTES * HT_BLOCK_BYTES;
    void *buf;
    int rc = 0;

    if (n == 0)
        return 0;
    if (posix_memalign(&buf, HT_BLOCK_BYTES, n) != 0)
        return -ENOMEM;
    rc = ht_dev_read(t->dev, 0, buf, n);
    if (rc == 0 && !ht_is_zero(buf, n)) {
        snprintf(t->found, sizeof(t->found), "data of a kind that is not known");
        t->held_something = true;
    }
    free(buf);
    return rc;
}

/* Fills found and held_something. */
static int inspect_content(struct ht_mkfs_target *t, bool regular, const struct ht_super *store)
{
    struct ht_super sb;
    struct ht_super_report report;
    int rc = ht_super_read(t->dev, &sb, &report);

    if (store && rc == 0 && memcmp(sb.uuid, store->uuid, sizeof(sb.uuid)) == 0) {
        if (ht_members_is_stranger(store, &sb)) {
            if (sb.member_epoch[sb.device_index] != 0) /* it was used: a copy of the store has taken it */
                describe_store(t, rc, &sb);
            return 0;
        }
        return ht_fail(-EEXIST, "%s is a member of the store already", t->path);
    }
    if (rc == 0 || rc == -ENODATA || rc == -EUCLEAN || rc == -EPROTONOSUPPORT) {
        describe_store(t, rc, &sb);
        return 0;
    }
    rc = ht_probe(t->path, t->found);
    t->held_something = rc == 1;
    if (rc == 0 && regular)
        rc = find_bytes(t);
    if (rc < 0)
        ht_error("%s: cannot find out what it holds: %s", t->path, strerror(-rc));
    return rc < 0 ? rc : 0;
}

static int open_existing(struct ht_mkfs_target *t, const struct stat *st, const struct ht_mkfs_options *o,
                         const struct ht_super *store)
{
    int rc = check_kind(t, st, o);

    t->device = !S_ISREG(st->st_mode);
    if (rc == 0)
        rc = check_mounted(t);
    if (rc == 0)
        rc = check_swap(t->path, st);
    if (rc == 0)
        rc = hold_target(t, o);
    if (rc == 0)
        rc = inspect_content(t, S_ISREG(st->st_mode), store);
    if (rc < 0)
        return rc;
    if (t->held_something && !o->force)
        return ht_fail(-EEXIST, "%s contains %s; --force overwrites it", t->path, t->found);
    if (o->size_bytes == 0)
        return 0;
    ht_dev_close(t->dev); /* its size is read when it is opened */
    t->dev = NULL;
    rc = resize_file(t, o->size_bytes);
    return rc < 0 ? rc : hold_target(t, o);
}

int ht_mkfs_open(struct ht_mkfs_target *t, const struct ht_mkfs_options *o, const struct ht_super *store)
{
    struct stat st;
    int rc = ht_nvme_namespace_stat(t->path, &st);

    if (rc == 0)
        return open_existing(t, &st, o, store);
    if (rc != -ENOENT)
        return ht_fail(rc, "%s: %s", t->path, strerror(-rc));
    if (o->size_bytes == 0)
        return ht_fail(-ENOENT, "%s does not exist; --size=SIZE makes a regular file", t->path);
    rc = create_file(t, o->size_bytes);
    return rc < 0 ? rc : hold_target(t, o);
}

void ht_mkfs_close(struct ht_mkfs_target *t, bool undo)
{
    if (t->dev)
        ht_dev_close(t->dev);
    t->dev = NULL;
    if (undo && t->created && unlink(t->path) != 0)
        ht_warn("%s: cannot remove it again: %s", t->path, strerror(errno));
}

/* --------------------------------------------------------- what it becomes */

int ht_mkfs_check_distinct(const struct ht_mkfs_target *targets, unsigned count)
{
    struct stat st[HT_DEVICES_MAX];

    for (unsigned i = 0; i < count; i++) {
        bool there = ht_nvme_namespace_stat(targets[i].path, &st[i]) == 0;
        if (!there)
            memset(&st[i], 0, sizeof(st[i]));
        for (unsigned k = 0; k < i; k++) {
            if (there ? is_same(&st[i], &st[k]) : strcmp(targets[i].path, targets[k].path) == 0)
                return ht_fail(-EINVAL, "%s and %s are the same device", targets[k].path, targets[i].path);
        }
    }
    return 0;
}

int ht_mkfs_wipe_old(const struct ht_mkfs_target *t)
{
    int rc = t->held_something ? ht_probe_wipe(t->path) : 0;

    if (rc < 0)
        ht_error("%s: cannot erase its old content: %s", t->path, strerror(-rc));
    return rc;
}

int ht_mkfs_verify(struct ht_dev *dev, const struct ht_super *sb)
{
    struct ht_super_report report;
    struct ht_super have;
    int rc = ht_super_read(dev, &have, &report);

    if (rc == 0 && (memcmp(have.uuid, sb->uuid, sizeof(have.uuid)) != 0 || have.generation != sb->generation))
        rc = -EIO;
    for (unsigned c = 0; rc == 0 && c < HT_SUPER_COPIES; c++)
        if (report.copy[c] != HT_SUPER_OK)
            rc = -EIO;
    if (rc < 0)
        ht_error("%s: the new content cannot be read back", ht_dev_name(dev));
    return rc;
}

/* Not for regular files: their space is theirs, and would have to be found again when the store is nearly full. */
void ht_mkfs_discard(const struct ht_mkfs_target *t, const struct ht_mkfs_options *o)
{
    uint64_t size = ht_dev_size(t->dev);
    struct ht_progress p;
    int rc = 0;

    if (!t->device || o->no_discard)
        return;
    ht_progress_begin(&p, true, "discarded", size);
    for (uint64_t at = 0; rc == 0 && at < size; at += HT_GIB) {
        uint64_t len = ht_min_u64(HT_GIB, size - at);
        rc = ht_dev_discard(t->dev, at, len);
        if (rc == 0)
            ht_progress_add(&p, len);
    }
    ht_progress_clear(&p);
    if (rc < 0 && rc != -EOPNOTSUPP)
        ht_warn("%s: what it held is not given back to it: %s", t->path, strerror(-rc));
}
