/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel's numbers count (LOOP_GET_STATUS64), because the path that sysfs shows may lead to another file in this
 * mount namespace. Where the device cannot be opened, that path is the only hint. Either way the kernel asks the file
 * system of that file, which may not answer. It is none that our files lie on, as these have answered: so a thread
 * asks, and nobody waits for it for long.
 */
#include "tiering/sys/below.h"

#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <linux/loop.h>
#include <linux/magic.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define SECTOR_BYTES 512u /* of sysfs */
enum { ANSWER_S = 3 };    /* of the file system of another loop device's file */

/* One line of /sys/dev/block/MAJOR:MINOR/name, without its end. */
static bool read_line(dev_t number, const char *name, char *buf, size_t cap)
{
    char path[128];

    snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/%s", major(number), minor(number), name);
    return ht_read_line(path, buf, cap);
}

uint64_t ht_block_number(dev_t number, const char *name)
{
    char line[64];

    return read_line(number, name, line, sizeof(line)) ? strtoull(line, NULL, 10) : 0;
}

static bool parse_number(const char *text, dev_t *out)
{
    unsigned major_no, minor_no;

    if (sscanf(text, "%u:%u", &major_no, &minor_no) != 2)
        return false;
    *out = makedev(major_no, minor_no);
    return true;
}

/* "loop7" of a number. */
static bool kernel_name(dev_t number, char out[NAME_MAX + 1])
{
    char link[64], path[PATH_MAX];

    snprintf(link, sizeof(link), "/sys/dev/block/%u:%u", major(number), minor(number));
    if (!realpath(link, path))
        return false;
    snprintf(out, NAME_MAX + 1, "%s", strrchr(path, '/') + 1);
    return true;
}

/* -------------------------------------------------------------------- loop */

struct loop {
    dev_t device, rdevice; /* rdevice: of a block device below it, or 0 */
    ino_t inode;
    uint64_t offset, limit; /* limit 0: none */
    bool reads_only;
    char path[PATH_MAX];
};

/* The kernel's encoding of a device number, in 32 bits. */
static dev_t decode(uint64_t n)
{
    return makedev((unsigned)(n >> 8 & 0xfff), (unsigned)((n & 0xff) | (n >> 12 & 0xfff00)));
}

static bool ask_device(dev_t number, struct loop *out)
{
    char name[NAME_MAX + 1], path[NAME_MAX + 8];
    struct loop_info64 info;
    struct stat st;

    if (!kernel_name(number, name))
        return false;
    snprintf(path, sizeof(path), "/dev/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool ok = fd >= 0 && fstat(fd, &st) == 0 && S_ISBLK(st.st_mode) && st.st_rdev == number &&
        ioctl(fd, LOOP_GET_STATUS64, &info) == 0;
    if (ok) {
        out->device = decode(info.lo_device);
        out->rdevice = decode(info.lo_rdevice);
        out->inode = info.lo_inode;
        out->reads_only = info.lo_flags & LO_FLAGS_READ_ONLY;
    }
    if (fd >= 0)
        close(fd);
    return ok;
}

static bool ask_path(dev_t number, struct loop *out)
{
    struct stat st;

    if (stat(out->path, &st) != 0)
        return false;
    out->device = st.st_dev;
    out->inode = st.st_ino;
    out->rdevice = S_ISBLK(st.st_mode) ? st.st_rdev : 0;
    out->reads_only = ht_block_number(number, "ro") != 0;
    return true;
}

struct question {
    dev_t number;
    bool known;
    struct loop loop;
};

static void *answer(void *arg)
{
    struct question *q = arg;

    q->known = ask_device(q->number, &q->loop) || ask_path(q->number, &q->loop);
    return NULL;
}

/* 1; 0: it has no file; -ETIMEDOUT: the file system of its file does not answer. The thread keeps the question then. */
static int ask(dev_t number, struct loop *out)
{
    struct question *q = malloc(sizeof(*q));
    struct timespec until;
    pthread_t thread;

    if (q)
        *q = (struct question){.number = number, .loop = *out};
    if (!q || pthread_create(&thread, NULL, answer, q)) {
        free(q);
        return ask_device(number, out) || ask_path(number, out);
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ANSWER_S;
    if (pthread_clockjoin_np(thread, NULL, CLOCK_MONOTONIC, &until)) {
        (void)pthread_detach(thread);
        return -ETIMEDOUT;
    }
    bool known = q->known;
    *out = q->loop;
    free(q);
    return known;
}

/* 1; 0: no loop device, or one without a file; -ETIMEDOUT. */
static int loop_of(dev_t number, struct loop *out)
{
    *out = (struct loop){.offset = 0};
    if (!read_line(number, "loop/backing_file", out->path, sizeof(out->path)))
        return 0;
    out->offset = ht_block_number(number, "loop/offset");
    out->limit = ht_block_number(number, "loop/sizelimit");
    return ask(number, out);
}

/* ------------------------------------------------------------------- chain */

static uint64_t add(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

static struct ht_below_thing *new_thing(struct ht_below *b, const struct ht_bytes *bytes)
{
    if (b->count == HT_BELOW_MAX)
        return NULL;
    struct ht_below_thing *t = &b->thing[b->count++];
    t->bytes = *bytes;
    t->bottom = true;
    t->by_loop = false;
    t->path[0] = '\0';
    return t;
}

/* Adds what lies directly below the thing at this place. */
static int add_loop(struct ht_below *b, const struct ht_bytes *up, const struct loop *l)
{
    struct ht_bytes down = {.file = l->rdevice == 0,
                            .device = l->rdevice ? l->rdevice : l->device,
                            .inode = l->rdevice ? 0 : l->inode,
                            .begin = add(up->begin, l->offset),
                            .end = add(up->end, l->offset)};
    struct ht_below_thing *t = new_thing(b, &down);
    struct stat st;

    if (!t)
        return -EMLINK;
    if (l->limit)
        t->bytes.end = ht_min_u64(down.end, add(l->offset, l->limit));
    t->by_loop = true;
    if (stat(l->path, &st) == 0 &&
        (down.file ? st.st_dev == down.device && st.st_ino == down.inode
                   : S_ISBLK(st.st_mode) && st.st_rdev == down.device))
        memcpy(t->path, l->path, sizeof(t->path));
    return 0;
}

static int add_whole(struct ht_below *b, const struct ht_bytes *up)
{
    uint64_t start = ht_block_number(up->device, "start") * SECTOR_BYTES;
    uint64_t size = ht_block_number(up->device, "size") * SECTOR_BYTES;
    struct ht_bytes down = {.begin = add(start, up->begin), .end = add(start, ht_min_u64(up->end, size))};
    char line[64];

    if (!read_line(up->device, "../dev", line, sizeof(line)) || !parse_number(line, &down.device))
        return 0;
    return new_thing(b, &down) ? 0 : -EMLINK;
}

/* Those of device mapper and RAID. Which part of each is used is not known. */
static int add_slaves(struct ht_below *b, const struct ht_bytes *up)
{
    char path[128], line[64];
    struct dirent *e;
    int rc = 0;

    snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/slaves", major(up->device), minor(up->device));
    DIR *dir = opendir(path);
    while (dir && rc == 0 && (e = readdir(dir))) {
        struct ht_bytes down = {.end = UINT64_MAX};
        char name[NAME_MAX + 16];
        snprintf(name, sizeof(name), "slaves/%s/dev", e->d_name);
        if (e->d_name[0] != '.' && read_line(up->device, name, line, sizeof(line)) && parse_number(line, &down.device))
            rc = new_thing(b, &down) ? 0 : -EMLINK;
    }
    if (dir)
        closedir(dir);
    return rc;
}

static int add_below(struct ht_below *b, unsigned at)
{
    struct ht_bytes up = b->thing[at].bytes;
    unsigned before = b->count;
    char line[64];
    struct loop *l;

    if (up.file)
        return 0;
    l = malloc(sizeof(*l));
    if (!l)
        return -ENOMEM;
    int rc = loop_of(up.device, l);
    if (rc > 0)
        rc = add_loop(b, &up, l);
    else if (rc == 0 && read_line(up.device, "partition", line, sizeof(line)))
        rc = add_whole(b, &up);
    else if (rc == 0)
        rc = add_slaves(b, &up);
    b->thing[at].bottom = b->count == before;
    free(l);
    return rc;
}

int ht_below_find(const struct stat *st, struct ht_below *out)
{
    bool file = S_ISREG(st->st_mode);
    struct ht_bytes top = {
        .file = file, .device = file ? st->st_dev : st->st_rdev, .inode = file ? st->st_ino : 0, .end = UINT64_MAX};
    int rc = 0;

    out->count = 0;
    (void)new_thing(out, &top);
    for (unsigned i = 0; rc == 0 && i < out->count; i++)
        rc = add_below(out, i);
    return rc;
}

/* ------------------------------------------------------------- other names */

static bool overlap(const struct ht_bytes *a, const struct ht_bytes *b)
{
    return a->file == b->file && a->device == b->device && a->inode == b->inode && a->begin < b->end &&
        b->begin < a->end;
}

static bool bottoms_overlap(const struct ht_below *a, const struct ht_below *b)
{
    for (unsigned i = 0; i < a->count; i++)
        for (unsigned k = 0; k < b->count; k++)
            if (a->thing[i].bottom && b->thing[k].bottom && overlap(&a->thing[i].bytes, &b->thing[k].bytes))
                return true;
    return false;
}

static bool is_in(const struct ht_below *b, dev_t number)
{
    for (unsigned i = 0; i < b->count; i++)
        if (!b->thing[i].bytes.file && b->thing[i].bytes.device == number)
            return true;
    return false;
}

/* Does the loop device of this number show some of the bytes? */
static bool shows(dev_t number, const struct ht_below *b, bool writing, struct ht_below *room)
{
    struct stat st = {.st_mode = S_IFBLK, .st_rdev = number};
    struct loop *l = malloc(sizeof(*l));
    bool counts = l && loop_of(number, l) > 0 && (writing || !l->reads_only);

    free(l);
    return counts && !is_in(b, number) && ht_below_find(&st, room) == 0 && bottoms_overlap(b, room);
}

int ht_below_other_loop(const struct ht_below *b, bool writing, char out_name[NAME_MAX + 1])
{
    struct ht_below *room = malloc(sizeof(*room));
    glob_t found;
    int rc = 0;

    if (!room)
        return -ENOMEM;
    if (glob("/sys/block/loop*/loop", 0, NULL, &found) != 0) {
        free(room);
        return 0;
    }
    for (size_t i = 0; rc == 0 && i < found.gl_pathc; i++) {
        const char *name = found.gl_pathv[i] + strlen("/sys/block/");
        char path[PATH_MAX], line[64];
        dev_t number;
        snprintf(path, sizeof(path), "/sys/block/%.*s/dev", (int)strcspn(name, "/"), name);
        if (ht_read_line(path, line, sizeof(line)) && parse_number(line, &number) && shows(number, b, writing, room)) {
            snprintf(out_name, NAME_MAX + 1, "%.*s", (int)strcspn(name, "/"), name);
            rc = 1;
        }
    }
    globfree(&found);
    free(room);
    return rc;
}

bool ht_below_is_local(int fd)
{
    static const uint32_t local[] = {EXT4_SUPER_MAGIC,     XFS_SUPER_MAGIC,   BTRFS_SUPER_MAGIC,    F2FS_SUPER_MAGIC,
                                     TMPFS_MAGIC,          MSDOS_SUPER_MAGIC, REISERFS_SUPER_MAGIC, EXFAT_SUPER_MAGIC,
                                     0x2fc12fc1 /* zfs */, 0xca451a4e /* bcachefs */};
    struct statfs fs;

    if (fstatfs(fd, &fs) != 0)
        return false;
    for (unsigned i = 0; i < HT_ARRAY_SIZE(local); i++)
        if ((uint32_t)fs.f_type == local[i])
            return true;
    return false;
}
