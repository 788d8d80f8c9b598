/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor_device.c - checks of what lies below a store: a block device or a regular file. Nothing is opened for writing,
 * and no lock is taken: another program may use the device.
 */
#include "mount-helpers/look/doctor.h"

#include <linux/magic.h>
#include <mntent.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

#include "tiering/sys/mounts.h"
#include "tiering/sys/nvme_namespace.h"

enum { REQUESTS_FEW = 32 };
#define SMB1_MAGIC 0xff534d42u
#define SMB2_MAGIC 0xfe534d42u
#define DEVICE_FMT "sys/dev/block/%u:%u/"

/* ------------------------------------------------------------ block devices */

/* A line of the queue; a partition has that of its disk. */
static bool queue_line(const struct ht_doctor *d, dev_t n, const char *name, char *out, size_t cap)
{
    return ht_doctor_line(d, out, cap, DEVICE_FMT "queue/%s", major(n), minor(n), name) ||
        ht_doctor_line(d, out, cap, DEVICE_FMT "../queue/%s", major(n), minor(n), name);
}

static bool queue_number(const struct ht_doctor *d, dev_t n, const char *name, uint64_t *out)
{
    return ht_doctor_number(d, out, DEVICE_FMT "queue/%s", major(n), minor(n), name) ||
        ht_doctor_number(d, out, DEVICE_FMT "../queue/%s", major(n), minor(n), name);
}

static void check_scheduler(struct ht_doctor *d, const char *path, dev_t n)
{
    char line[256], *end, *begin;

    if (!queue_line(d, n, "scheduler", line, sizeof(line)) || !(begin = strchr(line, '[')))
        return;
    end = begin + strcspn(begin, "]");
    *end = '\0';
    if (strcmp(begin + 1, "bfq") == 0) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "scheduler", "%s: the scheduler bfq delays requests of fast devices", path);
        ht_doctor_remedy(d, "echo none >/sys/dev/block/%u:%u/queue/scheduler (or mq-deadline)", major(n), minor(n));
    }
}

/* A loop device without direct I/O has a second cache, and its flushes are slow. */
static void check_loop(struct ht_doctor *d, const char *path, dev_t n)
{
    char dio[16], file[PATH_MAX];

    if (!ht_doctor_line(d, dio, sizeof(dio), DEVICE_FMT "loop/dio", major(n), minor(n)))
        return;
    if (dio[0] != '1') {
        ht_doctor_add(d, HT_DOCTOR_WARN, "loop", "%s: a loop device without direct I/O keeps a second copy in memory",
                      path);
        ht_doctor_remedy(d, "losetup --direct-io=on %s, or mount the file itself", path);
    }
    if (ht_doctor_line(d, file, sizeof(file), DEVICE_FMT "loop/backing_file", major(n), minor(n)) &&
        strstr(file, " (deleted)")) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "loop", "%s: its file was deleted; the content ends with the loop device",
                      path);
        ht_doctor_remedy(d, "copy the content elsewhere now");
    }
}

static void check_block(struct ht_doctor *d, const char *path, const struct stat *st)
{
    unsigned before = d->count;
    uint64_t value;
    dev_t n = st->st_rdev;
    char ro[16];

    check_scheduler(d, path, n);
    check_loop(d, path, n);
    if (queue_number(d, n, "nr_requests", &value) && value < REQUESTS_FEW) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "queue-depth", "%s: the kernel sends only %u requests at once", path,
                      (unsigned)value);
        ht_doctor_remedy(d, "echo 128 >/sys/dev/block/%u:%u/queue/nr_requests", major(n), minor(n));
    }
    if (queue_number(d, n, "logical_block_size", &value) && value > 4096) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "block-size", "%s has blocks of %u bytes; hitrain writes 4096", path,
                      (unsigned)value);
        ht_doctor_remedy(d, "use a device with blocks of 512 or 4096 bytes");
    }
    if (queue_number(d, n, "rotational", &value) && value == 1)
        ht_doctor_add(d, HT_DOCTOR_NOTE, "rotational", "%s says that it is a rotating disk: steps will be slow", path);
    if (ht_doctor_line(d, ro, sizeof(ro), DEVICE_FMT "ro", major(n), minor(n)) && ro[0] == '1') {
        ht_doctor_add(d, HT_DOCTOR_WARN, "read-only", "%s is read-only", path);
        ht_doctor_remedy(d, "blockdev --setrw %s", path);
    }
    if (ht_doctor_worst(d, before) <= HT_DOCTOR_NOTE)
        ht_doctor_add(d, HT_DOCTOR_OK, "device", "%s is set up well", path);
}

/* ------------------------------------------------------------ regular files */

static bool is_network(uint32_t type)
{
    return type == NFS_SUPER_MAGIC || type == SMB1_MAGIC || type == SMB2_MAGIC || type == V9FS_MAGIC ||
        type == FUSE_SUPER_MAGIC || type == CEPH_SUPER_MAGIC || type == AFS_SUPER_MAGIC;
}

/* Locks that another machine does not see let two daemons write one store. */
static bool without_locks(const char *path)
{
    struct ht_mount_entry m;
    const struct mntent e = {.mnt_opts = m.super_options};

    return ht_mount_of_path(path, &m) == 0 &&
        (hasmntopt(&e, "nolock") || hasmntopt(&e, "local_lock=all") || hasmntopt(&e, "local_lock=flock") ||
         hasmntopt(&e, "nobrl"));
}

static void check_network(struct ht_doctor *d, const char *path)
{
    if (without_locks(path)) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "network-locks",
                      "%s is on a network without locks: two machines could mount it at once and destroy it", path);
        ht_doctor_remedy(d, "mount that file system with locks, or keep the store on a local device");
        return;
    }
    ht_doctor_add(d, HT_DOCTOR_WARN, "network", "%s is on a file system of another program or machine: it is slow",
                  path);
    ht_doctor_remedy(d, "keep the store on a local device, or see that only one machine mounts it");
}

static void check_room(struct ht_doctor *d, const char *path, const struct stat *st, const struct statfs *fs)
{
    uint64_t size = (uint64_t)st->st_size, held = (uint64_t)st->st_blocks * 512;
    uint64_t missing = size > held ? size - held : 0, room = (uint64_t)fs->f_bavail * (uint64_t)fs->f_bsize;

    if (missing <= room)
        return;
    ht_doctor_add(d, HT_DOCTOR_ERROR, "sparse-file",
                  "%s still needs %s of its file system, which has %s: writes to the store will fail", path,
                  ht_size_text(missing), ht_size_text(room));
    ht_doctor_remedy(d, "make room there, then run: fallocate -l %llu %s", (unsigned long long)size, path);
}

static void check_file(struct ht_doctor *d, const char *path, const struct stat *st)
{
    unsigned before = d->count;
    struct statfs fs;

    if (statfs(path, &fs) != 0)
        return;
    if (is_network((uint32_t)fs.f_type))
        check_network(d, path);
    if (fs.f_type == TMPFS_MAGIC) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "memory-file", "%s is in memory: its content ends with this boot", path);
        ht_doctor_remedy(d, "keep the store on a device");
    }
    if (fs.f_type == OVERLAYFS_SUPER_MAGIC)
        ht_doctor_add(d, HT_DOCTOR_NOTE, "overlay", "%s is on an overlay, which containers delete when they end", path);
    if ((uint32_t)fs.f_type == BTRFS_SUPER_MAGIC)
        ht_doctor_add(d, HT_DOCTOR_NOTE, "copy-on-write", "%s is on btrfs, which copies each write once more", path);
    check_room(d, path, st, &fs);
    if (st->st_mode & S_IWOTH) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "permissions", "%s: every user may write the store's bytes", path);
        ht_doctor_remedy(d, "chmod o-w %s", path);
    }
    if (ht_doctor_worst(d, before) <= HT_DOCTOR_NOTE)
        ht_doctor_add(d, HT_DOCTOR_OK, "device", "%s is set up well", path);
}

static void check(struct ht_doctor *d, const char *path)
{
    struct stat st;

    if (stat(path, &st) != 0) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "device", "%s: %s", path, strerror(errno));
        ht_doctor_remedy(d, errno == EACCES ? "run as root" : "connect the device, or name the place where it is now");
    } else if (S_ISBLK(st.st_mode)) {
        check_block(d, path, &st);
    } else if (S_ISREG(st.st_mode)) {
        check_file(d, path, &st);
    } else if (ht_nvme_namespace_is(&st)) {
        ht_doctor_add(d, HT_DOCTOR_OK, "device", "%s is an NVMe namespace: no scheduler stands before it", path);
    } else {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "device", "%s is neither a mount of hitrain, a device nor a file", path);
        ht_doctor_remedy(d, "name a mount point, or a device or file of a store");
    }
}

void ht_doctor_device(struct ht_doctor *d, const char *path)
{
    snprintf(d->device, sizeof(d->device), "%s", path);
    check(d, path);
    d->device[0] = '\0';
}
