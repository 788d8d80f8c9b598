/* SPDX-License-Identifier: Apache-2.0 */
/*
 * open.c - find out what a path is, hold it, and learn its geometry.
 *
 * The hold is O_EXCL for block devices (the kernel's own claim: mounted file systems, RAID and
 * device mapper take part in it) and flock for files. Both belong to the open file, and
 * requests in flight keep that open, so a hold outlives its process until the last of them has
 * ended. An fcntl lock would not: it goes when the process does, while its writes still run.
 *
 * Readers of a file share it. A block device knows no shared claim, and a reader without one
 * would not keep a writer away; so there a reader excludes others, too.
 */
#include "tiering/io/io_priv.h"
#include "tiering/base/holder.h"
#include "tiering/base/log.h"
#include "tiering/base/twin.h"
#include <hitrain/limits.h>

#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define LBA_BYTES_MIN 512u
#define RETRY_MS 20u
/*
 * After a close the kernel may give up the file a moment later than the last completion was
 * seen. Whoever asks for an answer at once still waits this long, or closing and opening again
 * would fail at random.
 */
#define GRACE_MS 60u

static void sleep_ms(unsigned ms)
{
    struct timespec ts = {ms / 1000, (long)(ms % 1000) * 1000000};

    nanosleep(&ts, NULL);
}

static int lock_file(int fd, bool rdonly)
{
    struct flock weaker = {.l_type = rdonly ? F_RDLCK : F_WRLCK};

    if (HT_TWIN("fcntl"))
        return fcntl(fd, F_SETLK, &weaker);
    return flock(fd, (rdonly ? LOCK_SH : LOCK_EX) | LOCK_NB);
}

/* One attempt; -EBUSY when somebody else holds it. */
static int try_open(const char *path, bool block, bool rdonly, int *out_fd)
{
    int fd = open(path, (rdonly ? O_RDONLY : O_RDWR) | O_DIRECT | O_CLOEXEC | (block ? O_EXCL : 0));
    int err;

    if (fd < 0)
        return -errno;
    if (!block && lock_file(fd, rdonly) != 0) {
        err = errno == EWOULDBLOCK ? -EBUSY : -errno;
        close(fd);
        return err;
    }
    *out_fd = fd;
    return 0;
}

/* Waiting for a mount that lives would be in vain; for a daemon that ends, or the last writes of a dead one, it is not. */
static bool worth_waiting(const char *path, int flags)
{
    char text[HT_HOLDER_TEXT_MAX];
    struct ht_holder h;

    if (flags & HT_DEV_NOWAIT)
        return false;
    if (ht_holder_find(path, &h) != 0)
        return true;
    if (h.pid == getpid() || h.mount_lives)
        return false;
    if (!(flags & HT_DEV_QUIET))
        ht_warn("%s is %s; waiting up to %d s for it", path, ht_holder_text(&h, text), HT_DEVICE_WAIT_S);
    return true;
}

static int open_held(const char *path, bool block, int flags, int *out_fd)
{
    uint64_t began_ns = ht_now_ns(), waited_ms;
    bool waits = false;
    int err;

    for (;;) {
        err = try_open(path, block, flags & HT_DEV_RDONLY, out_fd);
        if (err != -EBUSY && err != -EINTR)
            return err;
        waited_ms = (ht_now_ns() - began_ns) / 1000000;
        if (waited_ms >= HT_DEVICE_WAIT_S * 1000u)
            return err;
        if (waited_ms >= GRACE_MS && !waits) {
            waits = worth_waiting(path, flags);
            if (!waits)
                return err;
        }
        sleep_ms(RETRY_MS);
    }
}

static void explain_busy(const char *path)
{
    char text[HT_HOLDER_TEXT_MAX];
    struct ht_holder h = {0};

    if (ht_holder_find(path, &h) != 0)
        h = (struct ht_holder){0};
    ht_holder_text(&h, text);
    if (h.pid == getpid())
        ht_error("%s is held by this program already: it was named twice", path);
    else if (h.point[0] != '\0')
        ht_error("%s is %s; unmount it first: umount %s", path, text, h.point);
    else
        ht_error("%s is %s; it is free when that has ended", path, text);
}

static void explain_failure(const char *path, bool block, int flags, int err)
{
    switch (-err) {
    case EBUSY:
        explain_busy(path);
        break;
    case EINVAL:
        if (block)
            ht_error("%s cannot be opened for direct I/O", path);
        else
            ht_error("%s cannot be opened for direct I/O: its file system does not support O_DIRECT; put the file on "
                     "ext4 or xfs, or use a block device",
                     path);
        break;
    default:
        ht_error("%s cannot be opened for %s: %s", path, flags & HT_DEV_RDONLY ? "reading" : "reading and writing",
                 strerror(-err));
    }
}

static int block_geometry(struct ht_dev *dev)
{
    uint64_t bytes;
    int lba, read_only;

    if (ioctl(dev->fd, BLKGETSIZE64, &bytes) != 0 || ioctl(dev->fd, BLKSSZGET, &lba) != 0 ||
        ioctl(dev->fd, BLKROGET, &read_only) != 0) {
        int err = -errno;

        ht_error("%s: the kernel does not tell its size and block size: %s", dev->name, strerror(-err));
        return err;
    }
    if (read_only && !dev->rdonly) {
        ht_error("%s is write-protected: only reading is possible", dev->name);
        return -EROFS;
    }
    dev->size = bytes;
    dev->lba = (uint32_t)lba;
    return 0;
}

/*
 * The smallest block that direct I/O on this file takes. Asked by trying, because the answer
 * of statx (Linux 6.1) is missing on many file systems that have one.
 */
static int probe_file_lba(int fd, uint32_t *out_lba)
{
    int err = -EINVAL;
    void *buf;

    if (posix_memalign(&buf, HT_BLOCK_BYTES, HT_BLOCK_BYTES) != 0)
        return -ENOMEM;
    for (uint32_t lba = LBA_BYTES_MIN; lba <= HT_BLOCK_BYTES; lba *= HT_BLOCK_BYTES / LBA_BYTES_MIN) {
        ssize_t n;

        /* address, offset and length all aligned to lba and to no more */
        do
            n = pread(fd, (char *)buf + lba % HT_BLOCK_BYTES, lba, lba);
        while (n < 0 && errno == EINTR);
        if (n >= 0) {
            *out_lba = lba;
            err = 0;
            break;
        }
        err = -errno;
        if (errno != EINVAL)
            break;
    }
    free(buf);
    return err;
}

static int file_geometry(struct ht_dev *dev, const struct stat *st)
{
    int err = probe_file_lba(dev->fd, &dev->lba);

    if (err == -EINVAL)
        ht_error("%s: direct I/O in blocks of %u bytes does not work on its file system; put the file on ext4 or xfs, "
                 "or use a block device",
                 dev->name, HT_BLOCK_BYTES);
    else if (err != 0)
        ht_error("%s cannot be read: %s", dev->name, strerror(-err));
    if (err != 0)
        return err;
    dev->size = (uint64_t)st->st_size / dev->lba * dev->lba;
    return 0;
}

static int learn_geometry(struct ht_dev *dev, bool block)
{
    struct stat st;
    int err;

    if (fstat(dev->fd, &st) != 0)
        return -errno;
    if (block ? !S_ISBLK(st.st_mode) : !S_ISREG(st.st_mode)) {
        ht_error("%s changed while it was being opened", dev->name);
        return -EINVAL;
    }
    err = block ? block_geometry(dev) : file_geometry(dev, &st);
    if (err != 0)
        return err;
    if (dev->lba < LBA_BYTES_MIN || dev->lba > HT_BLOCK_BYTES || (dev->lba & (dev->lba - 1)) != 0) {
        ht_error("%s has logical blocks of %u bytes: %u to %u are possible", dev->name, dev->lba, LBA_BYTES_MIN,
                 HT_BLOCK_BYTES);
        return -EINVAL;
    }
    dev->numa_node = ht_node_of_block(block ? st.st_rdev : st.st_dev);
    if (block)
        ht_dev_learn_limits(dev, st.st_rdev);
    return 0;
}

static int is_block(const char *path, bool *out_block)
{
    struct stat st;
    int err;

    if (stat(path, &st) != 0) {
        err = -errno;
        ht_error("%s: %s", path, strerror(-err));
        return err;
    }
    if (!S_ISBLK(st.st_mode) && !S_ISREG(st.st_mode)) {
        ht_error("%s is neither a block device nor a regular file", path);
        return -EINVAL;
    }
    *out_block = S_ISBLK(st.st_mode);
    return 0;
}

int ht_dev_open(const char *path, int flags, struct ht_dev **out_dev)
{
    struct ht_dev *dev;
    bool block = false;
    int err = is_block(path, &block);

    if (err != 0)
        return err;
    dev = ht_dev_alloc(path);
    if (dev == NULL)
        return -ENOMEM;
    dev->rdonly = flags & HT_DEV_RDONLY;
    dev->block = block;
    err = open_held(path, block, flags, &dev->fd);
    if (err != 0)
        explain_failure(path, block, flags, err);
    else
        err = learn_geometry(dev, block);
    if (err != 0) {
        ht_dev_close(dev);
        return err;
    }
    *out_dev = dev;
    return 0;
}
