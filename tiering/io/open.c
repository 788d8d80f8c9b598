/* SPDX-License-Identifier: Apache-2.0 */
/*
 * open.c - finds out the kind of a path, holds it, and learns its geometry.
 *
 * The hold is O_EXCL for block devices (the kernel's own claim: mounted file systems, RAID and device mapper take part
 * in it) and flock for files. Both belong to the open file, and requests in flight keep that open, so a hold outlives
 * its process until the last request has ended. An fcntl lock would not: it goes when the process does, while its
 * writes still run. The character device of an NVMe namespace has both: flock on itself, which requests in flight keep,
 * and O_EXCL on the block device beside it, which keeps away programs that know only that one.
 *
 * Readers of a file share it. A block device knows no shared claim, and a reader without one
 * would not keep a writer away; so there a reader excludes others, too.
 *
 * A loop device is another name of bytes that its file or device has already, and the kernel lets both be held. So who
 * opens one holds what lies below it, too (below.h): O_EXCL for devices, and a lock of the open file for the part of a
 * file that the loop device shows. Who opens a file locks it all so, beside the flock, which has an owner that can
 * be named. And no other loop device may show the same bytes, whether somebody uses it or not. Both checks come after
 * the own hold, so of two programs that begin together at least one sees the other.
 */
#include "tiering/io/io_priv.h"
#include "tiering/sys/below.h"
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"
#include "tiering/base/hash.h"
#include "tiering/base/log.h"
#include "tiering/sys/nvme_namespace.h"
#include "tiering/base/mutant.h"
#include <hitrain/limits.h>

#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define LBA_BYTES_MIN 512u
#define RETRY_MS 20u
/*
 * After a close the kernel may give up the file a moment later than the last completion was seen. A caller that wants
 * an answer at once still waits this long, or closing and opening again would fail at random.
 */
#define GRACE_MS 60u
/* A short wait is printed on a terminal only: scripts compare the output of programs. */
#define PATIENCE_MS 3000u

static int lock_file(int fd, bool rdonly)
{
    struct flock weaker = {.l_type = rdonly ? F_RDLCK : F_WRLCK};

    if (HT_MUTANT("fcntl"))
        return fcntl(fd, F_SETLK, &weaker);
    return flock(fd, (rdonly ? LOCK_SH : LOCK_EX) | LOCK_NB);
}

/* The source to open. A namespace has a block device beside the character device, which is its path. */
struct source {
    const char *path;
    enum { A_FILE, A_BLOCK_DEVICE, A_NAMESPACE } kind;
    char beside[PATH_MAX];
    const char *busy; /* which name of its bytes another holds: path, or one below it; NULL: it was reported */
    bool lockless;    /* its file system has no flock */
    struct ht_below below;
};

/*
 * Locks a part of a file on a local file system. Elsewhere such locks may be another form of flock, or lock out the
 * holder itself.
 */
static int lock_part(int fd, bool rdonly, const struct ht_bytes *part)
{
    struct flock l = {.l_type = rdonly ? F_RDLCK : F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)part->begin};

    l.l_len = part->end > INT64_MAX ? 0 : (off_t)(part->end - part->begin); /* 0: to the end, wherever that is */
    if (!ht_below_is_local(fd) || fcntl(fd, F_OFD_SETLK, &l) == 0)
        return 0;
    return errno == EAGAIN || errno == EACCES ? -EBUSY : -errno;
}

/* Of a file that cannot be seen it is supposed. */
static bool is_reserved(int fd)
{
    struct stat st;

    return fd < 0 || fstat(fd, &st) != 0 || (uint64_t)st.st_blocks * 512 >= (uint64_t)st.st_size;
}

static int hold_thing(const struct ht_below_thing *t, struct ht_dev *dev)
{
    if (t->path[0] == '\0' || dev->below_count == HT_ARRAY_SIZE(dev->below_fd)) {
        dev->facts.local = false; /* a nonce on the device has to do (claim.h) */
        dev->facts.reserved |= t->bytes.file;
        return 0;
    }
    int fd = open(t->path, (dev->facts.rdonly ? O_RDONLY : O_RDWR) | O_CLOEXEC | (t->bytes.file ? 0 : O_EXCL));
    int rc = fd < 0 ? -errno : t->bytes.file ? lock_part(fd, dev->facts.rdonly, &t->bytes) : 0;
    dev->facts.reserved |= t->bytes.file && is_reserved(fd);
    if (rc == 0 || rc == -EBUSY)
        dev->facts.local &= fd >= 0 && t->bytes.file && ht_below_is_local(fd);
    if (rc != 0 && fd >= 0)
        close(fd);
    if (rc != 0) {
        dev->facts.local = false;
        return rc == -EBUSY ? rc : 0;
    }
    dev->below_fd[dev->below_count++] = fd;
    return 0;
}

static int hold_below(struct source *s, struct ht_dev *dev)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < s->below.count; i++) {
        const struct ht_below_thing *t = &s->below.thing[i];
        if (t->by_loop)
            rc = hold_thing(t, dev);
        else if (t->bottom && !t->bytes.file)
            dev->facts.local = false;
        if (rc != 0)
            s->busy = t->path;
    }
    return rc;
}

/* One attempt; -EBUSY when another process holds it. */
static int try_open(struct source *s, struct ht_dev *dev)
{
    int flags = (dev->facts.rdonly ? O_RDONLY : O_RDWR) | O_CLOEXEC, rc = 0;

    s->busy = s->path;
    dev->fd = open(s->path, flags | (s->kind != A_NAMESPACE ? O_DIRECT : 0) | (s->kind == A_BLOCK_DEVICE ? O_EXCL : 0));
    if (dev->fd < 0)
        return -errno;
    if (s->kind != A_BLOCK_DEVICE && lock_file(dev->fd, dev->facts.rdonly) != 0)
        rc = errno == EWOULDBLOCK ? -EBUSY : -errno;
    s->lockless = s->kind == A_FILE && rc != 0 && rc != -EBUSY && rc != -EINTR;
    if (rc == 0 && s->kind == A_NAMESPACE) {
        dev->hold_fd = open(s->beside, flags | O_EXCL);
        rc = dev->hold_fd < 0 ? -errno : 0;
    }
    dev->facts.local = s->kind != A_FILE || ht_below_is_local(dev->fd);
    dev->facts.reserved = s->kind == A_FILE && is_reserved(dev->fd);
    if (rc == 0 && s->kind == A_FILE)
        rc = lock_part(dev->fd, dev->facts.rdonly, &s->below.thing[0].bytes);
    if (rc == 0)
        rc = hold_below(s, dev);
    if (rc != 0)
        ht_dev_let_go(dev);
    return rc;
}

/*
 * Is waiting useful? A live mount keeps the device; a daemon that ends, or the last writes of a dead one, release it
 * soon.
 */
static bool worth_waiting(const char *path, int flags)
{
    struct ht_holder h;

    if (flags & HT_DEV_NOWAIT)
        return false;
    if (ht_holder_find(path, &h) != 0)
        return true;
    return h.pid != getpid() && !h.mount_lives;
}

static void report_waiting(const char *path, int flags)
{
    char text[HT_HOLDER_TEXT_MAX];
    struct ht_holder h;

    if (!(flags & HT_DEV_QUIET) && ht_holder_find(path, &h) == 0)
        ht_warn("%s is %s; waiting up to %d s for it", path, ht_holder_text(&h, text), HT_DEVICE_WAIT_S);
}

/* A loop device that shows some of the same bytes would let others write them, or keep old ones in memory. */
static int check_loops(struct source *s, const struct ht_dev *dev)
{
    char name[NAME_MAX + 1];
    int rc = ht_below_other_loop(&s->below, !dev->facts.rdonly, name);

    if (rc <= 0)
        return rc;
    ht_error("%s is in use as the loop device /dev/%s: use that, or end it with losetup -d /dev/%s", s->path, name,
             name);
    s->busy = NULL;
    return -EBUSY;
}

static int open_held(struct source *s, int flags, struct ht_dev *dev)
{
    uint64_t began_ns = ht_now_ns(), waited_ms;
    unsigned patience_ms = ht_log_on_terminal() ? 0 : PATIENCE_MS;
    bool waits = false, reported = false;
    int rc;

    for (;;) {
        rc = try_open(s, dev);
        if (rc == 0 || rc == -EBUSY) {
            int other = check_loops(s, dev); /* it stays */
            rc = other != 0 ? other : rc;
        }
        if ((rc != -EBUSY && rc != -EINTR) || !s->busy)
            return rc;
        waited_ms = (ht_now_ns() - began_ns) / 1000000;
        if (waited_ms >= HT_DEVICE_WAIT_S * 1000u)
            return rc;
        if (waited_ms >= GRACE_MS && !waits) {
            waits = worth_waiting(s->busy, flags);
            if (!waits)
                return rc;
        }
        if (waits && !reported && waited_ms >= patience_ms) {
            report_waiting(s->busy, flags);
            reported = true;
        }
        ht_sleep_ns(RETRY_MS * UINT64_C(1000000));
    }
}

static void explain_busy(const struct source *s)
{
    const char *path = s->busy;
    char text[HT_HOLDER_TEXT_MAX];
    struct ht_holder h = {0};

    if (path != s->path)
        ht_error("%s shows the same bytes as %s", s->path, path);
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

static void explain_file_system(const char *path, const char *lack)
{
    struct ht_mount_entry m;

    ht_error("%s: its file system, %s, %s: put it on a local ext4 or xfs, or use a vault, or a block device (rbd-nbd, "
             "NVMe-oF with ctrl_loss_tmo=-1)",
             path, ht_mount_of_path(path, &m) == 0 ? m.type : "of unknown type", lack);
}

static void explain_failure(const struct source *s, int flags, int err)
{
    const char *path = s->path;

    if (s->lockless) {
        explain_file_system(path, "refuses flock");
        return;
    }
    switch (-err) {
    case EBUSY:
        if (s->busy)
            explain_busy(s);
        break;
    case EINVAL:
        if (s->kind != A_FILE)
            ht_error("%s cannot be opened for direct I/O", path);
        else
            explain_file_system(path, "refuses O_DIRECT");
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
        int rc = -errno;
        ht_error("%s: the kernel does not report its size and block size: %s", dev->name, strerror(-rc));
        return rc;
    }
    if (read_only && !dev->facts.rdonly) {
        ht_error("%s is write-protected: only reading is possible", dev->name);
        return -EROFS;
    }
    dev->size = bytes;
    dev->facts.lba = (uint32_t)lba;
    return 0;
}

/*
 * The smallest block that direct I/O on this file takes. Asked by trying, because the answer
 * of statx (Linux 6.1) is missing on many file systems that have one.
 */
static int probe_file_lba(int fd, uint32_t *out_lba)
{
    int rc = -EINVAL;
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
            rc = 0;
            break;
        }
        rc = -errno;
        if (errno != EINVAL)
            break;
    }
    free(buf);
    return rc;
}

static int file_geometry(struct ht_dev *dev, const struct stat *st)
{
    int rc = probe_file_lba(dev->fd, &dev->facts.lba);

    if (rc == -EINVAL)
        explain_file_system(dev->name, "refuses direct I/O in blocks of 4096 bytes");
    else if (rc != 0)
        ht_error("%s cannot be read: %s", dev->name, strerror(-rc));
    if (rc != 0)
        return rc;
    dev->size = (uint64_t)st->st_size / dev->facts.lba * dev->facts.lba;
    return 0;
}

/* The device takes no command: the kernel has no way for them, or the caller may not use it. */
static int try_command(struct ht_dev *dev, const char *beside)
{
    void *block;

    if (posix_memalign(&block, HT_BLOCK_BYTES, HT_BLOCK_BYTES) != 0)
        return -ENOMEM;
    int rc = ht_dev_read(dev, 0, block, dev->facts.lba);
    free(block);
    if (rc == -EINVAL || rc == -EOPNOTSUPP || rc == -ENOTTY) {
        ht_error("%s: this kernel takes no NVMe commands through io_uring (Linux 5.19 does): use %s", dev->name,
                 beside);
        return -EOPNOTSUPP;
    }
    if (rc == -EACCES || rc == -EPERM)
        ht_error(
            "%s: commands to it need root, or a kernel that asks for no more than its file mode (Linux 6.2): use %s",
            dev->name, beside);
    else if (rc != 0)
        ht_error("%s cannot be read: %s", dev->name, strerror(-rc));
    return rc;
}

static int namespace_geometry(struct ht_dev *dev, const struct source *s, dev_t *out_number)
{
    struct stat block;

    if (fstat(dev->hold_fd, &block) != 0)
        return -errno;
    dev->raw = true;
    *out_number = block.st_rdev;
    int rc = ht_raw_geometry(dev, block.st_rdev);
    if (rc == 0)
        rc = try_command(dev, s->beside);
    dev->done[HT_IO_READ] = dev->bytes[HT_IO_READ] = 0; /* these reads were not from a caller */
    return rc;
}

static bool is_still(const struct source *s, const struct stat *st)
{
    return s->kind == A_FILE     ? S_ISREG(st->st_mode)
        : s->kind == A_NAMESPACE ? ht_nvme_namespace_is(st)
                                 : S_ISBLK(st->st_mode);
}

static int learn_geometry(struct ht_dev *dev, const struct source *s)
{
    struct stat st;

    if (fstat(dev->fd, &st) != 0)
        return -errno;
    if (!is_still(s, &st)) {
        ht_error("%s changed while it was being opened", dev->name);
        return -EINVAL;
    }
    dev_t number = s->kind == A_FILE ? st.st_dev : st.st_rdev;
    int rc = s->kind == A_FILE      ? file_geometry(dev, &st)
        : s->kind == A_BLOCK_DEVICE ? block_geometry(dev)
                                    : namespace_geometry(dev, s, &number);
    if (rc != 0)
        return rc;
    if (dev->facts.lba < LBA_BYTES_MIN || dev->facts.lba > HT_BLOCK_BYTES ||
        (dev->facts.lba & (dev->facts.lba - 1)) != 0) {
        ht_error("%s has logical blocks of %u bytes: %u to %u are possible", dev->name, dev->facts.lba, LBA_BYTES_MIN,
                 HT_BLOCK_BYTES);
        return -EINVAL;
    }
    dev->facts.numa_node = ht_node_of_block(number);
    if (s->kind == A_BLOCK_DEVICE)
        ht_dev_learn_limits(dev, number);
    return 0;
}

static int find_beside(const struct stat *st, struct source *out)
{
    int rc = ht_nvme_namespace_block(st, out->beside);

    if (rc == -ENODEV)
        ht_error("%s cannot be held: its block device %s, which keeps others away from it, is missing in /dev",
                 out->path, out->beside);
    else if (rc != 0)
        ht_error("%s cannot be held: the kernel has no block device for this namespace (is it of a format, or of a "
                 "command set, that it does not know?)",
                 out->path);
    return rc;
}

static int inspect(struct source *s)
{
    struct stat st;
    int rc;

    if (stat(s->path, &st) != 0) {
        rc = -errno;
        ht_error("%s: %s", s->path, strerror(-rc));
        return rc;
    }
    s->kind = S_ISBLK(st.st_mode) ? A_BLOCK_DEVICE : S_ISREG(st.st_mode) ? A_FILE : A_NAMESPACE;
    if (s->kind == A_NAMESPACE && !ht_nvme_namespace_is(&st)) {
        ht_error("%s is neither a block device nor a regular file, nor an NVMe namespace", s->path);
        return -EINVAL;
    }
    rc = s->kind == A_NAMESPACE ? find_beside(&st, s) : 0;
    if (rc == 0 && s->kind == A_NAMESPACE && stat(s->beside, &st) != 0)
        rc = -errno;
    if (rc != 0)
        return rc;
    rc = ht_below_find(&st, &s->below);
    if (rc != 0)
        ht_error("%s: what lies below it cannot be found out: %s", s->path, strerror(-rc));
    return rc;
}

/* The same number for all names of the bytes that this kernel knows, until it ends. */
static uint64_t place_of(const struct ht_below *b)
{
    const struct ht_bytes *last = &b->thing[0].bytes;

    for (unsigned i = 0; i < b->count; i++)
        if (b->thing[i].bottom)
            last = &b->thing[i].bytes;
    const uint64_t words[] = {last->file, last->device, last->inode, last->begin};
    return ht_hash64(words, sizeof(words), 0);
}

static int open_source(struct source *s, int flags, struct ht_dev **out_dev)
{
    int rc = inspect(s);

    if (rc != 0)
        return rc;
    struct ht_dev *dev = ht_dev_alloc(s->path);
    if (!dev)
        return -ENOMEM;
    dev->facts.rdonly = flags & HT_DEV_RDONLY;
    dev->block = s->kind == A_BLOCK_DEVICE;
    dev->facts.place = place_of(&s->below);
    rc = open_held(s, flags, dev);
    if (rc != 0)
        explain_failure(s, flags, rc);
    else
        rc = learn_geometry(dev, s);
    if (rc != 0) {
        ht_dev_close(dev);
        return rc;
    }
    *out_dev = dev;
    return 0;
}

int ht_dev_open(const char *path, int flags, struct ht_dev **out_dev)
{
    struct source *s = calloc(1, sizeof(*s));
    int rc = -ENOMEM;

    if (s) {
        s->path = path;
        rc = open_source(s, flags, out_dev);
    }
    free(s);
    return rc;
}
