/* SPDX-License-Identifier: Apache-2.0 */
/*
 * target.c - one device to format: may it be, and holding it.
 *
 * What protects data: a mounted device, or one that another program or the kernel uses, is refused always; one on which libblkid or
 * hitrain recognises something, and a regular file that holds any bytes at all at its beginning, unless forced.
 */
#include "mount-helpers/mkfs/mkfs.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiering/base/log.h"
#include "tiering/base/mounts.h"
#include "tiering/base/namespace.h"
#include "tiering/space/super.h"
#include "mount-helpers/common/text.h"

#define LOOKED_AT_BYTES HT_MIB /* of a regular file that nothing recognises */

/* ------------------------------------------------------------ regular files */

/* Allocate the space where the file system can; where it cannot, the file is sparse. */
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
    int fd = open(t->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600), ret;

    if (fd < 0) {
        ret = -errno;
        ht_error("%s: cannot create it: %s", t->path, strerror(-ret));
        return ret;
    }
    t->created = true;
    ret = allocate(fd, bytes, &t->sparse);
    if (ret < 0)
        ht_error("%s: cannot make it %s large: %s", t->path, ht_size_text(bytes), strerror(-ret));
    close(fd);
    return ret;
}

/* Nobody else holds it at this moment, and nobody can take it while its size changes. */
static int resize_file(struct ht_mkfs_target *t, uint64_t bytes)
{
    int fd = open(t->path, O_RDWR | O_CLOEXEC), ret = 0;

    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0 || ftruncate(fd, (off_t)bytes) != 0)
        ret = -errno;
    if (ret == 0)
        ret = allocate(fd, bytes, &t->sparse);
    if (ret < 0)
        ht_error("%s: cannot make it %s large: %s", t->path, ht_size_text(bytes), strerror(-ret));
    if (fd >= 0)
        close(fd);
    return ret;
}

/* -------------------------------------------------------------- may it be? */

static int check_kind(const struct ht_mkfs_target *t, const struct stat *st, const struct ht_mkfs_options *o)
{
    if (!S_ISBLK(st->st_mode) && !S_ISREG(st->st_mode) && !ht_namespace_is(st)) {
        ht_error("%s is neither a block device nor a regular file, nor an NVMe namespace", t->path);
        return -EINVAL;
    }
    if (o->size_bytes != 0 && !S_ISREG(st->st_mode)) {
        ht_error("%s is a device: --size is for regular files", t->path);
        return -EINVAL;
    }
    if (o->size_bytes != 0 && !o->force) {
        ht_error("%s exists already: --size creates a file; without it the file is formatted as it is, with --force it "
                 "is overwritten",
                 t->path);
        return -EEXIST;
    }
    return 0;
}

/* A mount of hitrain has the device held as long as it lives, and names its holder then; of a dead one nothing is left. */
static int check_mounted(const struct ht_mkfs_target *t)
{
    struct ht_mount_entry m;

    if (ht_mount_of_source(t->path, &m) != 0 || ht_mount_is_hitrain(&m))
        return 0;
    ht_error("%s is mounted on %s: unmount it first", t->path, m.point);
    return -EBUSY;
}

static int hold(struct ht_mkfs_target *t, const struct ht_mkfs_options *o)
{
    int ret = ht_dev_open(t->path, o->no_wait ? HT_DEV_NOWAIT : 0, &t->dev);

    if (ret == -EBUSY)
        ht_error("%s was not formatted; not even --force formats what is in use", t->path);
    return ret;
}

static void describe_store(struct ht_mkfs_target *t, int ret, const struct ht_super *sb)
{
    char uuid[HT_UUID_TEXT_MAX];

    if (ret == 0 || ret == -ENODATA)
        snprintf(t->found, sizeof(t->found), "a hitrain store%s%s%s (%s)", sb->label[0] != '\0' ? " labelled \"" : "",
                 sb->label, sb->label[0] != '\0' ? "\"" : "", ht_uuid_text(sb->uuid, uuid));
    else
        snprintf(t->found, sizeof(t->found), "a damaged hitrain store");
    t->held_something = true;
}

static bool is_zero(const uint8_t *p, size_t n)
{
    return n == 0 || (p[0] == 0 && memcmp(p, p + 1, n - 1) == 0);
}

static int look_for_bytes(struct ht_mkfs_target *t)
{
    size_t n = (size_t)ht_min_u64(ht_dev_size(t->dev), LOOKED_AT_BYTES) / HT_BLOCK_BYTES * HT_BLOCK_BYTES;
    void *buf;
    int ret = 0;

    if (n == 0)
        return 0;
    if (posix_memalign(&buf, HT_BLOCK_BYTES, n) != 0)
        return -ENOMEM;
    ret = ht_dev_read(t->dev, 0, buf, n);
    if (ret == 0 && !is_zero(buf, n)) {
        snprintf(t->found, sizeof(t->found), "data of a kind that is not known");
        t->held_something = true;
    }
    free(buf);
    return ret;
}

/* Fills found and held_something. */
static int look_inside(struct ht_mkfs_target *t, bool regular)
{
    struct ht_super sb;
    struct ht_super_report report;
    int ret = ht_super_read(t->dev, &sb, &report);

    if (ret == 0 || ret == -ENODATA || ret == -EUCLEAN || ret == -EPROTONOSUPPORT) {
        describe_store(t, ret, &sb);
        return 0;
    }
    ret = ht_probe(t->path, t->found);
    t->held_something = ret == 1;
    if (ret == 0 && regular)
        ret = look_for_bytes(t);
    if (ret < 0)
        ht_error("%s: cannot find out what it holds: %s", t->path, strerror(-ret));
    return ret < 0 ? ret : 0;
}

static int open_existing(struct ht_mkfs_target *t, const struct stat *st, const struct ht_mkfs_options *o)
{
    int ret = check_kind(t, st, o);

    t->device = !S_ISREG(st->st_mode);
    if (ret == 0)
        ret = check_mounted(t);
    if (ret == 0)
        ret = ht_mkfs_check_in_use(t->path, st);
    if (ret == 0)
        ret = hold(t, o);
    if (ret == 0)
        ret = look_inside(t, S_ISREG(st->st_mode));
    if (ret < 0)
        return ret;
    if (t->held_something && !o->force) {
        ht_error("%s contains %s; --force overwrites it", t->path, t->found);
        return -EEXIST;
    }
    if (o->size_bytes == 0)
        return 0;
    ht_dev_close(t->dev); /* its size is read when it is opened */
    t->dev = NULL;
    ret = resize_file(t, o->size_bytes);
    return ret < 0 ? ret : hold(t, o);
}

int ht_mkfs_open(struct ht_mkfs_target *t, const struct ht_mkfs_options *o)
{
    struct stat st;
    int ret = ht_namespace_stat(t->path, &st);

    if (ret == 0)
        return open_existing(t, &st, o);
    if (ret != -ENOENT) {
        ht_error("%s: %s", t->path, strerror(-ret));
        return ret;
    }
    if (o->size_bytes == 0) {
        ht_error("%s does not exist; --size=SIZE makes a regular file", t->path);
        return -ENOENT;
    }
    ret = create_file(t, o->size_bytes);
    return ret < 0 ? ret : hold(t, o);
}

void ht_mkfs_close(struct ht_mkfs_target *t, bool undo)
{
    if (t->dev != NULL)
        ht_dev_close(t->dev);
    t->dev = NULL;
    if (undo && t->created && unlink(t->path) != 0)
        ht_warn("%s: cannot remove it again: %s", t->path, strerror(errno));
}
