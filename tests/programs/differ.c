/* SPDX-License-Identifier: Apache-2.0 */
/*
 * differ.c - the same random system calls in two folders, of two file systems: a difference is a bug in one file
 * system.
 *
 * There is one process for each folder, with its root changed to it. It draws the same calls from the same seed, and
 * does them under several users. It writes a line for each: the call, its result, and the visible state of the named
 * files afterwards. Now and then it writes a line for everything in its tree. The parent compares the lines. Drawing
 * must not depend on results, or only on what the lines show.
 *
 * Lines leave out what file systems may choose:
 *   numbers of inodes and devices, st_blksize, st_blocks, what fallocate allocated, where holes begin and end;
 *   the largest position in a file: file systems know one, the kernel another for FUSE;
 *   st_size of anything but files and links; the order of a directory, of a list of extended attributes;
 *   chown with (-1, -1), which reaches a FUSE file system only as some other call;
 *   times of a fifo that is written to: a FUSE file system gets no such call;
 *   access times, unless --atime asks for them: pages that the kernel has are read without the file system's knowledge;
 *   times later than the present minus a day, which are shown as "now". With --times=N the lines of one call in N show
 *   which times it changed.
 */
#include <dirent.h>
#include <fcntl.h>
#include <getopt.h>
#include <grp.h>
#include <limits.h>
#include <linux/falloc.h>
#include <linux/posix_acl_xattr.h>
#include <linux/posix_acl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <sys/xattr.h>

#include "tests/programs/program.h"

enum {
    SIDES = 2,
    SLOTS = 10,
    HANDLES = 4,
    KNOWN = 24,
    LINE_BYTES = 1 << 16,
    SHOWN = 30,
    DATA_BYTES = 1 << 18,
    LOOKED_AT = 4 << 20, /* bytes of a file that a look at the tree reads */
    DEPTH_MAX = 40,
    NAMES_MAX = 4096,
    HANG_S = 120,
};

#define ACL_ACCESS "system.posix_acl_access"
#define ACL_DEFAULT "system.posix_acl_default"

static uint64_t ops = 10000, seed, look_every = 300, times_every = 0;
static int see_atime, verbose;

/* ---------------------------------------------------------------- a line */

static char line[LINE_BYTES];
static size_t line_len;

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    int n = vsnprintf(line + line_len, sizeof(line) - line_len, format, args);
    va_end(args);
    line_len += (size_t)n;
    if (line_len >= sizeof(line))
        die("a line is too long");
}

/* Other characters could do harm in a terminal. */
static void say_name(const char *name)
{
    size_t len = strlen(name);

    if (len > 80) {
        say("<%zu bytes, %.8s>", len, name);
        return;
    }
    say("\"");
    for (; *name; name++)
        say(*name >= ' ' && *name <= '~' ? "%c" : "\\x%02x", (unsigned char)*name);
    say("\"");
}

static void say_line(void)
{
    line[line_len++] = '\n';
    if (fwrite(line, 1, line_len, stdout) != line_len)
        exit(3);
    line_len = 0;
}

static const char *error_name(int error)
{
    const char *name = strerrorname_np(error);

    return name ? name : "?";
}

/* ----------------------------------------------------------------- choices */

static uint64_t rnd;

static uint64_t below(uint64_t n)
{
    return rnd_below(&rnd, n);
}

static bool once_in(uint64_t n)
{
    return rnd_once_in(&rnd, n);
}

/* One call: everything is drawn, though each call uses only some fields. */
struct call {
    char path[2][PATH_MAX + 300];
    int at[2];   /* a slot that the path is relative to, or -1 */
    int slot[2]; /* of open files */
    uint64_t off, len, pick;
    mode_t mode;
    int uid, gid;
};

static int slots[SLOTS];
static unsigned char data[DATA_BYTES];
static uint64_t number; /* of the call */

static const struct user {
    uid_t uid;
    gid_t gid, groups[2];
} users[] = {{0, 0, {0, 0}}, {1001, 2001, {2001, 2003}}, {1002, 2002, {2002, 2003}}, {1003, 2001, {2001, 2001}}};

/* Names of folders and of other things differ more often than not, so that paths lead somewhere. */
static void draw_name(char *to, bool folder)
{
    static const char *odd[] = {".", "..", "x y", "\xff\x01", "-", "a.", "\xc3\xa4"};

    if (!once_in(16)) {
        to[0] = (char)((once_in(4) != folder ? 'a' : 'd') + below(3));
        to[1] = 0;
    } else if (once_in(4)) {
        size_t len = 254 + below(3);
        memset(to, 'l', len);
        to[len] = 0;
    } else {
        strcpy(to, odd[below(COUNT_OF(odd))]);
    }
}

/* Names that calls have succeeded in making, so that others find something. */
static char known[KNOWN][PATH_MAX + 300];
static uint64_t known_count;

static void draw_path(char *to, bool folder)
{
    static const char *ends[] = {"/", "/.", "/..", "//", "/./"};
    uint64_t depth = 1 + below(3), which = below(KNOWN);

    if (!once_in(3) && which < known_count) {
        strcpy(to, known[which]);
        if (!once_in(3) || strlen(to) > 1000)
            return;
        strcat(to, "/");
        depth = 1;
    } else {
        *to = 0;
    }
    if (!*to && once_in(4))
        strcat(to, "/");
    for (uint64_t i = 0; i < depth; i++) {
        draw_name(to + strlen(to), i + 1 < depth || folder);
        if (i + 1 < depth)
            strcat(to, once_in(20) ? "//" : "/");
    }
    if (once_in(20))
        strcat(to, ends[below(COUNT_OF(ends))]);
    if (once_in(300))
        *to = 0;
    if (once_in(300)) { /* about PATH_MAX */
        size_t want = PATH_MAX - 2 + below(3);
        while (strlen(to) < want)
            strcat(to, "/.");
        to[want] = 0;
    }
}

static uint64_t draw_offset(void)
{
    static const uint64_t steps[] = {1, 512, 4096, 65536};
    uint64_t step = steps[below(COUNT_OF(steps))];

    if (once_in(60))
        return 1ull << (31 + below(12));
    return step * below(200000 / step);
}

static int draw_id(bool group)
{
    const struct user *u = &users[below(COUNT_OF(users))];

    if (once_in(4))
        return -1;
    return (int)(!group ? u->uid : once_in(2) ? u->gid : u->groups[1]);
}

static void draw(struct call *c, bool folder)
{
    for (int i = 0; i < 2; i++) {
        draw_path(c->path[i], folder);
        c->at[i] = once_in(20) ? (int)below(SLOTS) : -1;
        c->slot[i] = (int)below(SLOTS);
    }
    c->off = draw_offset();
    c->len = once_in(8) ? below(DATA_BYTES) : below(10000);
    c->pick = rnd_next(&rnd);
    static const mode_t usual[] = {0644, 0755, 0777, 0777, 0777, 0666, 0700, 02775, 01777, 0640, 0};
    c->mode = once_in(8) ? (mode_t)below(010000) : usual[below(COUNT_OF(usual))];
    c->uid = draw_id(false);
    do
        c->gid = draw_id(true);
    while (c->uid == -1 && c->gid == -1);
}

/* A part of the drawn number: 0 to n - 1, other for each call of this function within one system call. */
static uint64_t part(const struct call *c, unsigned which, uint64_t n)
{
    return mix64(c->pick + which) % n;
}

static int at_of(const struct call *c, int i)
{
    return c->at[i] < 0 ? AT_FDCWD : slots[c->at[i]];
}

static int fd_of(const struct call *c, int i)
{
    return slots[c->slot[i]];
}

/* ------------------------------------------------------------------- calls */

struct flag {
    int value;
    unsigned once_in;
    const char *name;
};

static int pick_flags(const struct call *c, const struct flag *flags, size_t count)
{
    int sum = 0;

    for (size_t i = 0; i < count; i++)
        if (part(c, (unsigned)(100 + i), flags[i].once_in) == 0) {
            sum |= flags[i].value;
            say(" %s", flags[i].name);
        }
    return sum;
}

static long keep(int fd, int slot)
{
    if (fd < 0)
        return -1;
    if (slots[slot] >= 0)
        close(slots[slot]);
    slots[slot] = fd;
    return 0;
}

static long call_open(const struct call *c)
{
    static const struct flag flags[] = {
        {O_CREAT, 2, "O_CREAT"},   {O_EXCL, 6, "O_EXCL"},           {O_TRUNC, 6, "O_TRUNC"},
        {O_APPEND, 6, "O_APPEND"}, {O_DIRECTORY, 9, "O_DIRECTORY"}, {O_NOFOLLOW, 8, "O_NOFOLLOW"},
        {O_PATH, 16, "O_PATH"},    {O_NOATIME, 16, "O_NOATIME"},    {O_SYNC, 30, "O_SYNC"},
    };
    int mode = (int)part(c, 0, 3);
    int f = mode | pick_flags(c, flags, COUNT_OF(flags));

    say(" access %d", mode);
    return keep(openat(at_of(c, 0), c->path[0], f | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, c->mode), c->slot[0]);
}

static long call_create(const struct call *c)
{
    int f = O_RDWR | O_CREAT | (part(c, 0, 3) ? 0 : O_EXCL);

    say("%s", f & O_EXCL ? " O_EXCL" : "");
    return keep(openat(at_of(c, 0), c->path[0], f | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, c->mode), c->slot[0]);
}

static long call_tmpfile(const struct call *c)
{
    int f = O_TMPFILE | O_CLOEXEC | (part(c, 0, 2) ? O_RDWR : O_WRONLY) | (part(c, 1, 4) ? 0 : O_EXCL);

    return keep(openat(at_of(c, 0), c->path[0], f, c->mode), c->slot[0]);
}

/* Calls of one expression. */
#define CALL(name, expression)             \
    static long name(const struct call *c) \
    {                                      \
        return expression;                 \
    }

CALL(call_mkdir, mkdirat(at_of(c, 0), c->path[0], c->mode))
CALL(call_rmdir, unlinkat(at_of(c, 0), c->path[0], AT_REMOVEDIR))
CALL(call_unlink, unlinkat(at_of(c, 0), c->path[0], 0))

static long call_rename(const struct call *c)
{
    static const unsigned flags[] = {0, 0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_EXCHANGE | RENAME_NOREPLACE};
    unsigned f = flags[part(c, 0, COUNT_OF(flags))];

    say(" flags %u", f);
    return renameat2(at_of(c, 0), c->path[0], at_of(c, 1), c->path[1], f);
}

static long call_link(const struct call *c)
{
    int f = part(c, 0, 3) ? 0 : AT_SYMLINK_FOLLOW;

    say("%s", f ? " AT_SYMLINK_FOLLOW" : "");
    return linkat(at_of(c, 0), c->path[0], at_of(c, 1), c->path[1], f);
}

CALL(call_link_open, linkat(fd_of(c, 0), "", at_of(c, 1), c->path[1], AT_EMPTY_PATH))

/* The second path is the text. */
CALL(call_symlink, symlinkat(c->path[1], at_of(c, 0), c->path[0]))

static long call_readlink(const struct call *c)
{
    static char target[PATH_MAX + 1];
    size_t room = part(c, 0, 8) ? PATH_MAX : part(c, 1, 4);
    ssize_t n = readlinkat(at_of(c, 0), c->path[0], target, room);

    if (n >= 0) {
        int error = errno;
        target[n] = 0;
        say(" of %zu: ", room);
        say_name(target);
        errno = error;
    }
    return n;
}

static long call_mknod(const struct call *c)
{
    static const mode_t types[] = {S_IFIFO, S_IFIFO, S_IFSOCK, S_IFREG, S_IFCHR, S_IFBLK, 0, S_IFDIR};
    mode_t type = types[part(c, 0, COUNT_OF(types))];

    say(" type %o", type);
    /* A device that no driver has, and the largest number there is. */
    return mknodat(at_of(c, 0), c->path[0], type | c->mode, part(c, 1, 2) ? makedev(4095, 7) : makedev(4095, 0xfffff));
}

CALL(call_chmod, fchmodat(at_of(c, 0), c->path[0], c->mode, 0))
CALL(call_fchmod, fchmod(fd_of(c, 0), c->mode))

static long call_chown(const struct call *c)
{
    int f = part(c, 0, 2) ? AT_SYMLINK_NOFOLLOW : 0;

    say(" %d:%d%s", c->uid, c->gid, f ? " AT_SYMLINK_NOFOLLOW" : "");
    return fchownat(at_of(c, 0), c->path[0], (uid_t)c->uid, (gid_t)c->gid, f);
}

static long call_fchown(const struct call *c)
{
    say(" %d:%d", c->uid, c->gid);
    return fchown(fd_of(c, 0), (uid_t)c->uid, (gid_t)c->gid);
}

static void pick_times(const struct call *c, struct timespec t[2])
{
    for (unsigned i = 0; i < 2; i++) {
        static const long special[] = {UTIME_NOW, UTIME_OMIT, 0, 999999999, 123456789};
        t[i].tv_sec = (time_t)part(c, 10 + i, 1400000000) - (part(c, 14 + i, 8) ? 0 : 1000000000);
        t[i].tv_nsec = special[part(c, 12 + i, COUNT_OF(special))];
        say(t[i].tv_nsec == UTIME_NOW        ? " now"
                : t[i].tv_nsec == UTIME_OMIT ? " omit"
                                             : " %lld.%09ld",
            (long long)t[i].tv_sec, t[i].tv_nsec);
    }
}

static long call_utimens(const struct call *c)
{
    struct timespec t[2];
    int f = part(c, 0, 3) ? 0 : AT_SYMLINK_NOFOLLOW;

    if (part(c, 1, 6) == 0)
        return utimensat(at_of(c, 0), c->path[0], NULL, f);
    pick_times(c, t);
    return utimensat(at_of(c, 0), c->path[0], t, f);
}

static long call_futimens(const struct call *c)
{
    struct timespec t[2];

    pick_times(c, t);
    return futimens(fd_of(c, 0), t);
}

static long call_truncate(const struct call *c)
{
    say(" %llu", (unsigned long long)c->off);
    return truncate(c->path[0], (off_t)c->off);
}

static long call_ftruncate(const struct call *c)
{
    say(" %llu", (unsigned long long)c->off);
    return ftruncate(fd_of(c, 0), (off_t)c->off);
}

static void fill(size_t len)
{
    for (size_t i = 0; i < len; i += 8) {
        uint64_t word = mix64(number << 20 | i);
        memcpy(data + i, &word, 8);
    }
}

static long call_write(const struct call *c)
{
    say(" %llu", (unsigned long long)c->len);
    fill(c->len);
    return write(fd_of(c, 0), data, c->len);
}

static long call_pwrite(const struct call *c)
{
    say(" %llu + %llu", (unsigned long long)c->off, (unsigned long long)c->len);
    fill(c->len);
    return pwrite(fd_of(c, 0), data, c->len, (off_t)c->off);
}

static long say_data(ssize_t n)
{
    int error = errno;

    if (n > 0)
        say(" hash %llx", (unsigned long long)hash_bytes(data, (size_t)n));
    errno = error;
    return n;
}

static long call_read(const struct call *c)
{
    say(" %llu", (unsigned long long)c->len);
    return say_data(read(fd_of(c, 0), data, c->len));
}

static long call_pread(const struct call *c)
{
    say(" %llu + %llu", (unsigned long long)c->off, (unsigned long long)c->len);
    return say_data(pread(fd_of(c, 0), data, c->len, (off_t)c->off));
}

static int type_of(int fd)
{
    struct stat st;

    return fstat(fd, &st) ? 0 : (int)(st.st_mode & S_IFMT);
}

/* Positions in directories, too, mean something to their file system only. */
static long call_seek(const struct call *c)
{
    static const int from[] = {SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA, SEEK_HOLE, 77};
    int whence = from[part(c, 0, COUNT_OF(from))];
    off_t at = 0;

    say(" %lld from %d", (long long)c->off, whence);
    if (type_of(fd_of(c, 0)) != S_IFDIR)
        at = lseek(fd_of(c, 0), (off_t)c->off - (part(c, 1, 3) ? 0 : 100000), whence);
    if ((whence == SEEK_DATA || whence == SEEK_HOLE) && (at >= 0 || errno == ENXIO))
        at = lseek(fd_of(c, 0), 0, SEEK_SET);
    return at;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Name and type of each entry, sorted; returns how many. Takes the descriptor's position to the start first. */
static long list_names(int fd, char **names)
{
    int own = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = own < 0 ? NULL : fdopendir(own);
    struct dirent *e;
    long count = 0;

    if (!d)
        return -1;
    while ((e = readdir(d)) && count < NAMES_MAX)
        if (asprintf(&names[count++], "%s/%d", e->d_name, e->d_type) < 0)
            die("memory");
    closedir(d);
    qsort(names, (size_t)count, sizeof(*names), compare_names);
    return count;
}

static long call_readdir(const struct call *c)
{
    char *names[NAMES_MAX];
    long count = list_names(fd_of(c, 0), names);
    int error = errno;

    for (long i = 0; i < count; i++) {
        say(" ");
        say_name(names[i]);
        free(names[i]);
    }
    errno = error;
    return count;
}

/* A name that is a directory, in the slots: without it most calls on directories would find none. */
CALL(call_open_dir, keep(openat(at_of(c, 0), c->path[0], O_RDONLY | O_DIRECTORY | O_CLOEXEC), c->slot[0]))

static long call_close(const struct call *c)
{
    int fd = fd_of(c, 0);

    slots[c->slot[0]] = -1;
    return close(fd);
}

static const char *attribute_name(const struct call *c)
{
    static char long_name[400];
    static const char *usual[] = {"user.a", "user.b", "user.a", "trusted.a", "security.a", ACL_ACCESS, ACL_DEFAULT};
    static const char *odd[] = {"user.", "a", "", "other.a", "system.a", "trusted.", "security."};

    if (part(c, 20, 10))
        return usual[part(c, 21, COUNT_OF(usual))];
    if (part(c, 21, 3))
        return odd[part(c, 22, COUNT_OF(odd))];
    memset(long_name, 'n', sizeof(long_name));
    memcpy(long_name, "user.", 5);
    long_name[254 + part(c, 23, 3)] = 0;
    return long_name;
}

/* An access list as the kernel takes it; one in eight is not in order. */
static size_t make_acl(const struct call *c, unsigned char *to)
{
    static const struct {
        uint16_t tag;
        uint32_t id;
        unsigned once_in;
    } rows[] = {{ACL_USER_OBJ, ACL_UNDEFINED_ID, 1},  {ACL_USER, 1001, 2},  {ACL_USER, 1002, 3},
                {ACL_GROUP_OBJ, ACL_UNDEFINED_ID, 1}, {ACL_GROUP, 2003, 3}, {ACL_MASK, ACL_UNDEFINED_ID, 1},
                {ACL_OTHER, ACL_UNDEFINED_ID, 1}};
    struct posix_acl_xattr_header h = {POSIX_ACL_XATTR_VERSION};
    size_t len = sizeof(h);
    bool named = part(c, 40, 2);

    memcpy(to, &h, len);
    for (unsigned i = 0; i < COUNT_OF(rows); i++) {
        struct posix_acl_xattr_entry e = {rows[i].tag, (uint16_t)part(c, 60 + i, 8), rows[i].id};
        if (part(c, 50 + i, rows[i].once_in) ||
            (!named && (e.e_tag == ACL_USER || e.e_tag == ACL_GROUP || e.e_tag == ACL_MASK)))
            continue;
        memcpy(to + len, &e, sizeof(e));
        len += sizeof(e);
    }
    return part(c, 41, 8) ? len : len - part(c, 42, len);
}

static size_t make_value(const struct call *c, const char *name, unsigned char *to)
{
    size_t len = part(c, 22, 4) ? part(c, 23, 40) : part(c, 23, 400);

    if (strncmp(name, "system.posix", 12) == 0 && part(c, 24, 20))
        return make_acl(c, to);
    fill(len);
    memcpy(to, data, len);
    return len;
}

static long call_setxattr(const struct call *c)
{
    static const int flags[] = {0, 0, 0, XATTR_CREATE, XATTR_REPLACE, XATTR_CREATE | XATTR_REPLACE};
    const char *name = attribute_name(c);
    unsigned char value[1024];
    size_t len = make_value(c, name, value);
    int f = flags[part(c, 25, COUNT_OF(flags))];

    say(" %.40s %zu bytes, flags %d", name, len, f);
    switch (part(c, 26, 3)) {
    case 0:
        return fsetxattr(fd_of(c, 0), name, value, len, f);
    case 1:
        return lsetxattr(c->path[0], name, value, len, f);
    default:
        return setxattr(c->path[0], name, value, len, f);
    }
}

static long call_getxattr(const struct call *c)
{
    const char *name = attribute_name(c);
    size_t room = part(c, 27, 8) ? 4096 : part(c, 28, 30);

    say(" %.40s into %zu", name, room);
    ssize_t n = part(c, 26, 3) == 0 ? fgetxattr(fd_of(c, 0), name, data, room)
        : part(c, 26, 3) == 1       ? lgetxattr(c->path[0], name, data, room)
                                    : getxattr(c->path[0], name, data, room);
    return room ? say_data(n) : n;
}

static long call_removexattr(const struct call *c)
{
    const char *name = attribute_name(c);

    say(" %.40s", name);
    return part(c, 26, 3) == 0 ? fremovexattr(fd_of(c, 0), name)
        : part(c, 26, 3) == 1  ? lremovexattr(c->path[0], name)
                               : removexattr(c->path[0], name);
}

static long say_attributes(ssize_t n, const char *list)
{
    int error = errno;
    char *names[256];
    int count = 0;

    for (ssize_t i = 0; i < n && count < 256; i += (ssize_t)strlen(list + i) + 1)
        names[count++] = (char *)list + i;
    qsort(names, (size_t)count, sizeof(*names), compare_names);
    for (int i = 0; i < count; i++)
        say(" %.30s/%zu", names[i], strlen(names[i]));
    errno = error;
    return n;
}

static long call_listxattr(const struct call *c)
{
    char list[8192];

    return say_attributes(
        part(c, 26, 2) ? listxattr(c->path[0], list, sizeof(list)) : flistxattr(fd_of(c, 0), list, sizeof(list)), list);
}

static long call_access(const struct call *c)
{
    int mode = (int)part(c, 0, 8);

    say(" %d", mode);
    return faccessat(at_of(c, 0), c->path[0], mode, AT_EACCESS | (part(c, 1, 4) ? 0 : AT_SYMLINK_NOFOLLOW));
}

/* This call changes nothing. The state that is shown after each call is the test. */
static long call_look(const struct call *c)
{
    struct stat st;

    return fstatat(at_of(c, 0), c->path[0], &st, part(c, 0, 2) ? 0 : AT_SYMLINK_NOFOLLOW);
}

static int space_modes[8], space_mode_count;

static long call_fallocate(const struct call *c)
{
    int mode = space_mode_count ? space_modes[part(c, 0, (uint64_t)space_mode_count)] : 0;
    uint64_t off = c->off % (1 << 20), len = part(c, 1, 12) ? c->len : 0;

    if (!space_mode_count)
        return 0;
    say(" mode %d, %llu + %llu", mode, (unsigned long long)off, (unsigned long long)len);
    return fallocate(fd_of(c, 0), mode, (off_t)off, (off_t)len);
}

static long call_copy(const struct call *c)
{
    loff_t in = (loff_t)c->off, out = (loff_t)part(c, 0, 200000);
    bool own = part(c, 1, 2);

    say(" %lld + %llu to %lld%s", (long long)in, (unsigned long long)c->len, (long long)out, own ? " own offsets" : "");
    return copy_file_range(fd_of(c, 0), own ? NULL : &in, fd_of(c, 1), own ? NULL : &out, c->len, 0);
}

static long call_sendfile(const struct call *c)
{
    off_t off = (off_t)c->off;

    say(" %lld + %llu", (long long)off, (unsigned long long)c->len);
    /* Into a fifo it would stop when that is full; how full differs by timing of nothing we care for. */
    if (type_of(fd_of(c, 1)) == S_IFIFO)
        return 0;
    return sendfile(fd_of(c, 1), fd_of(c, 0), &off, c->len);
}

CALL(call_sync, part(c, 0, 2) ? fsync(fd_of(c, 0)) : fdatasync(fd_of(c, 0)))

static long call_flock(const struct call *c)
{
    static const int how[] = {LOCK_SH, LOCK_EX, LOCK_UN};
    int op = how[part(c, 0, COUNT_OF(how))];

    say(" %d", op);
    return flock(fd_of(c, 0), op | LOCK_NB);
}

static long call_lock(const struct call *c)
{
    static const short how[] = {F_RDLCK, F_WRLCK, F_UNLCK};
    struct flock l = {.l_type = how[part(c, 0, COUNT_OF(how))], .l_whence = SEEK_SET};

    l.l_start = (off_t)part(c, 1, 10);
    l.l_len = (off_t)part(c, 2, 5);
    say(" type %d, %lld + %lld", l.l_type, (long long)l.l_start, (long long)l.l_len);
    if (part(c, 3, 3))
        return fcntl(fd_of(c, 0), F_OFD_SETLK, &l);
    int rc = fcntl(fd_of(c, 0), F_OFD_GETLK, &l);
    int error = errno;
    if (rc == 0)
        say(" found type %d, %lld + %lld", l.l_type, (long long)l.l_start, (long long)l.l_len);
    errno = error;
    return rc;
}

static long call_set_append(const struct call *c)
{
    int f = part(c, 0, 2) ? O_APPEND : 0;

    say(" %s", f ? "O_APPEND" : "none");
    return fcntl(fd_of(c, 0), F_SETFL, f | O_NONBLOCK);
}

static long call_umask(const struct call *c)
{
    static const mode_t masks[] = {022, 022, 0, 077, 027, 0777};

    say(" %o", masks[part(c, 0, COUNT_OF(masks))]);
    return umask(masks[part(c, 0, COUNT_OF(masks))]);
}

CALL(call_chdir, chdir(part(c, 0, 2) ? "/" : c->path[0]))

/* Handles of files, which must find the same file again, or report that it is gone. */
static struct kept_handle {
    struct file_handle h;
    unsigned char room[MAX_HANDLE_SZ];
} handles[HANDLES];

static long call_handle(const struct call *c)
{
    struct kept_handle *k = &handles[part(c, 0, HANDLES)], fresh = {.h.handle_bytes = MAX_HANDLE_SZ};
    int mount_id,
        rc = name_to_handle_at(at_of(c, 0), c->path[0], &fresh.h, &mount_id, part(c, 1, 2) ? 0 : AT_SYMLINK_FOLLOW);

    if (rc == 0)
        *k = fresh;
    return rc;
}

static long call_open_handle(const struct call *c)
{
    int root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC), fd, error;

    fd = open_by_handle_at(root, &handles[part(c, 0, HANDLES)].h,
                           (part(c, 1, 3) ? O_RDONLY : O_RDWR) | O_NONBLOCK | O_CLOEXEC);
    error = errno;
    close(root);
    errno = error;
    return keep(fd, c->slot[0]);
}

/* The inputs of a call, and its results if it succeeds. */
enum { PATH = 1, PATH2 = 2, SLOT = 4, SLOT2 = 8, MODE = 16, MAKES = 32, MAKES2 = 64, FOLDER = 128 };

static struct kind {
    const char *name;
    unsigned weight, uses;
    long (*run)(const struct call *c);
} kinds[] = {
    {"open", 60, PATH | SLOT | MODE, call_open},
    {"create", 40, PATH | SLOT | MODE | MAKES, call_create},
    {"open_dir", 30, FOLDER | PATH | SLOT, call_open_dir},
    {"tmpfile", 8, FOLDER | PATH | SLOT | MODE, call_tmpfile},
    {"mkdir", 50, FOLDER | PATH | MODE | MAKES, call_mkdir},
    {"rmdir", 20, FOLDER | PATH, call_rmdir},
    {"unlink", 24, PATH, call_unlink},
    {"rename", 50, PATH | PATH2 | MAKES2, call_rename},
    {"link", 30, PATH | PATH2 | MAKES2, call_link},
    {"link_open", 8, SLOT | PATH2 | MAKES2, call_link_open},
    {"symlink", 20, PATH | PATH2 | MAKES, call_symlink},
    {"readlink", 10, PATH, call_readlink},
    {"mknod", 15, PATH | MODE | MAKES, call_mknod},
    {"chmod", 25, PATH | MODE, call_chmod},
    {"fchmod", 10, SLOT | MODE, call_fchmod},
    {"chown", 25, PATH, call_chown},
    {"fchown", 10, SLOT, call_fchown},
    {"utimens", 20, PATH, call_utimens},
    {"futimens", 8, SLOT, call_futimens},
    {"truncate", 15, PATH, call_truncate},
    {"ftruncate", 15, SLOT, call_ftruncate},
    {"write", 40, SLOT, call_write},
    {"pwrite", 30, SLOT, call_pwrite},
    {"read", 30, SLOT, call_read},
    {"pread", 30, SLOT, call_pread},
    {"seek", 15, SLOT, call_seek},
    {"readdir", 20, SLOT, call_readdir},
    {"close", 6, SLOT, call_close},
    {"setxattr", 40, PATH | SLOT, call_setxattr},
    {"getxattr", 20, PATH | SLOT, call_getxattr},
    {"removexattr", 15, PATH | SLOT, call_removexattr},
    {"listxattr", 10, PATH | SLOT, call_listxattr},
    {"access", 25, PATH, call_access},
    {"look", 20, PATH, call_look},
    {"fallocate", 20, SLOT, call_fallocate},
    {"copy", 25, SLOT | SLOT2, call_copy},
    {"sendfile", 10, SLOT | SLOT2, call_sendfile},
    {"sync", 4, SLOT, call_sync},
    {"flock", 15, SLOT, call_flock},
    {"lock", 20, SLOT, call_lock},
    {"set_append", 6, SLOT, call_set_append},
    {"umask", 6, 0, call_umask},
    {"chdir", 6, FOLDER | PATH, call_chdir},
    {"handle", 10, PATH, call_handle},
    {"open_handle", 10, SLOT, call_open_handle},
};

/* -------------------------------------------------------------- visible state */

static void say_time(const char *name, struct timespec t)
{
    if (t.tv_sec > 1500000000)
        say(" %snow", name);
    else
        say(" %s%lld.%09ld", name, (long long)t.tv_sec, t.tv_nsec);
}

static void say_stat(const struct stat *st)
{
    say("%o n%lu u%u g%u", st->st_mode, (unsigned long)st->st_nlink, st->st_uid, st->st_gid);
    if (S_ISREG(st->st_mode) || S_ISLNK(st->st_mode))
        say(" s%lld", (long long)st->st_size);
    if (S_ISCHR(st->st_mode) || S_ISBLK(st->st_mode))
        say(" d%u:%u", major(st->st_rdev), minor(st->st_rdev));
    if (!S_ISFIFO(st->st_mode))
        say_time("m", st->st_mtim);
    if (see_atime)
        say_time("a", st->st_atim);
}

static void say_file(const char *what, int rc, const struct stat *st)
{
    say(" | %s ", what);
    if (rc)
        say("%s", error_name(errno));
    else
        say_stat(st);
}

static void say_aftermath(const struct kind *k, const struct call *c)
{
    struct stat st;
    int rc;

    for (int i = 0; i < 2; i++)
        if (k->uses & (i ? PATH2 : PATH)) {
            rc = fstatat(at_of(c, i), c->path[i], &st, AT_SYMLINK_NOFOLLOW);
            say_file(i ? "second" : "first", rc, &st);
        }
    for (int i = 0; i < 2; i++)
        if (k->uses & (i ? SLOT2 : SLOT)) {
            rc = fstat(fd_of(c, i), &st);
            say_file(i ? "to" : "open", rc, &st);
        }
}

/* Which times did the call change? Of what its paths name, of the folders they are in, and of its open files. */
struct watched {
    struct stat st;
    bool there;
};

enum { WATCHED = 8 };

static void watch(const struct call *c, struct watched w[WATCHED])
{
    char folder[sizeof(c->path[0])];

    for (int i = 0; i < 2; i++) {
        strcpy(folder, c->path[i]);
        char *slash = strrchr(folder, '/');
        if (slash)
            slash[1] = 0;
        else
            strcpy(folder, ".");
        w[4 * i].there = fstatat(at_of(c, i), c->path[i], &w[4 * i].st, AT_SYMLINK_NOFOLLOW) == 0;
        w[4 * i + 1].there = fstatat(at_of(c, i), c->path[i], &w[4 * i + 1].st, 0) == 0;
        w[4 * i + 2].there = fstatat(at_of(c, i), folder, &w[4 * i + 2].st, 0) == 0;
        w[4 * i + 3].there = fstat(fd_of(c, i), &w[4 * i + 3].st) == 0;
    }
}

static bool same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

static void say_changes(const struct watched before[WATCHED], const struct watched after[WATCHED])
{
    static const char *names[] = {"first",  "first's target",  "first's folder",  "open",
                                  "second", "second's target", "second's folder", "to"};

    for (int i = 0; i < WATCHED; i++) {
        const struct stat *a = &before[i].st, *b = &after[i].st;
        if (!before[i].there || !after[i].there || a->st_ino != b->st_ino)
            continue;
        say(" | %s:%s%s%s", names[i], see_atime && !same_time(a->st_atim, b->st_atim) ? " atime" : "",
            same_time(a->st_mtim, b->st_mtim) ? "" : " mtime", same_time(a->st_ctim, b->st_ctim) ? "" : " ctime");
    }
}

/* ------------------------------------------------------------- the whole tree */

/* A file with several names is the same file under each. */
static struct {
    ino_t ino[NAMES_MAX];
    int count;
} linked;

static int number_of(ino_t ino)
{
    for (int i = 0; i < linked.count; i++)
        if (linked.ino[i] == ino)
            return i;
    if (linked.count < NAMES_MAX)
        linked.ino[linked.count++] = ino;
    return linked.count - 1;
}

static void say_content(int folder, const char *name)
{
    static unsigned char all[LOOKED_AT];
    int fd = openat(folder, name, O_RDONLY | O_NOATIME | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : pread(fd, all, sizeof(all), 0);

    if (n < 0)
        say(" content %s", error_name(errno));
    else
        say(" content %zd %llx", n, (unsigned long long)hash_bytes(all, (size_t)n));
    if (fd >= 0)
        close(fd);
}

static void say_values(int folder, const char *name)
{
    char path[64 + NAME_MAX], list[8192];
    char *names[256];
    int count = 0;

    /* There is no ...at for attributes: go there. */
    if (fchdir(folder))
        die("fchdir");
    snprintf(path, sizeof(path), "./%s", name);
    ssize_t n = llistxattr(path, list, sizeof(list));
    if (n < 0)
        say(" attributes %s", error_name(errno));
    for (ssize_t i = 0; i < n && count < 256; i += (ssize_t)strlen(list + i) + 1)
        names[count++] = list + i;
    qsort(names, (size_t)count, sizeof(*names), compare_names);
    for (int i = 0; i < count; i++) {
        unsigned char value[4096];
        ssize_t len = lgetxattr(path, names[i], value, sizeof(value));
        say(" %.30s/%zu=%zd:%llx", names[i], strlen(names[i]), len,
            len < 0 ? 0 : (unsigned long long)hash_bytes(value, (size_t)len));
    }
}

static void say_entry(int folder, const char *name, const char *type, const struct stat *st)
{
    char target[PATH_MAX];
    ssize_t n;

    say("   ");
    say_name(name);
    say(" type %s ", type);
    say_stat(st);
    if (st->st_nlink > 1 && !S_ISDIR(st->st_mode))
        say(" file %d", number_of(st->st_ino));
    if (S_ISREG(st->st_mode))
        say_content(folder, name);
    if (S_ISLNK(st->st_mode) && (n = readlinkat(folder, name, target, sizeof(target))) >= 0)
        say(" to %llx", (unsigned long long)hash_bytes(target, (size_t)n));
    say_values(folder, name);
    say_line();
}

static void say_tree(int folder, int depth)
{
    char *names[NAMES_MAX];
    long count = list_names(folder, names);

    if (count < 0)
        say("   cannot be listed: %s", error_name(errno));
    if (count < 0 || depth == DEPTH_MAX)
        say_line();
    for (long i = 0; i < count; i++) {
        char *type = strrchr(names[i], '/');
        struct stat st;
        *type++ = 0;
        if (strcmp(names[i], ".") && strcmp(names[i], "..") && depth < DEPTH_MAX) {
            if (fstatat(folder, names[i], &st, AT_SYMLINK_NOFOLLOW)) {
                say("   %s is listed, but: %s", names[i], error_name(errno));
                say_line();
            } else {
                say_entry(folder, names[i], type, &st);
                if (S_ISDIR(st.st_mode)) {
                    int sub = openat(folder, names[i], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
                    say_tree(sub, depth + 1);
                    close(sub);
                }
            }
        }
        free(names[i]);
    }
}

static void inspect_everything(void)
{
    int here = open(".", O_PATH | O_CLOEXEC), root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    linked.count = 0;
    say("   everything");
    say_line();
    say_tree(root, 0);
    close(root);
    if (fchdir(here) && chdir("/"))
        die("fchdir");
    close(here);
}

/* ---------------------------------------------------------------- one side */

static void become(const struct user *u)
{
    if (seteuid(0) || setgroups(2, u->groups) || setegid(u->gid) || seteuid(u->uid))
        die("cannot become user %u", u->uid);
}

static const struct kind *draw_kind(void)
{
    unsigned sum = 0, at;
    size_t i;

    for (i = 0; i < COUNT_OF(kinds); i++)
        sum += kinds[i].weight;
    at = (unsigned)below(sum);
    for (i = 0; at >= kinds[i].weight; i++)
        at -= kinds[i].weight;
    return &kinds[i];
}

/* Paths that are relative to something else than the root would lead elsewhere later. */
static void learn(const struct kind *k, const struct call *c)
{
    int i = k->uses & MAKES2 ? 1 : 0;

    if (k->uses & (MAKES | MAKES2) && c->at[i] < 0 && strlen(c->path[i]) < 1000)
        strcpy(known[known_count++ % KNOWN], c->path[i]);
}

static void say_call(const struct kind *k, const struct call *c, const struct user *u)
{
    say("%llu u%u %s", (unsigned long long)number, u->uid, k->name);
    for (int i = 0; i < 2; i++)
        if (k->uses & (i ? PATH2 : PATH)) {
            if (c->at[i] >= 0)
                say(" at %d", c->at[i]);
            say(" ");
            say_name(c->path[i]);
        }
    for (int i = 0; i < 2; i++)
        if (k->uses & (i ? SLOT2 : SLOT))
            say(" #%d", c->slot[i]);
    if (k->uses & MODE)
        say(" mode %o", c->mode);
}

/* Until the clock that stamps files has gone on. On a busy machine it may stand still for longer than its period. */
static void tick(void)
{
    struct timespec began, now;

    clock_gettime(CLOCK_REALTIME_COARSE, &began);
    do {
        nanosleep(&(struct timespec){0, 1000 * 1000}, NULL);
        clock_gettime(CLOCK_REALTIME_COARSE, &now);
    } while (now.tv_sec == began.tv_sec && now.tv_nsec == began.tv_nsec);
}

static void step(void)
{
    static struct watched before[WATCHED], after[WATCHED];
    const struct user *u = &users[once_in(2) ? 0 : below(COUNT_OF(users))];
    const struct kind *k = draw_kind();
    bool timed = times_every && once_in(times_every);
    static struct call c;

    draw(&c, k->uses & FOLDER);
    say_call(k, &c, u);
    if (timed) {
        watch(&c, before);
        tick();
    }
    become(u);
    errno = 0;
    long rc = k->run(&c);
    int error = errno;
    become(&users[0]);
    if (rc < 0)
        say(" = %s", error_name(error));
    else
        say(" = %ld", rc);
    if (rc >= 0)
        learn(k, &c);
    if (timed) {
        watch(&c, after);
        say_changes(before, after);
    }
    say_aftermath(k, &c);
    say_line();
    if (number % look_every == 0)
        inspect_everything();
}

__attribute__((noreturn)) static void run_side(const char *folder)
{
    signal(SIGPIPE, SIG_IGN);
    if (chdir(folder) || chroot(".") || chdir("/") || chmod("/", 0777))
        die("%s", folder);
    umask(022);
    for (int i = 0; i < SLOTS; i++)
        slots[i] = -1;
    rnd = mix64(seed);
    for (number = 1; number <= ops; number++)
        step();
    inspect_everything();
    if (fflush(stdout))
        die("telling");
    exit(0);
}

/* ----------------------------------------------------------------- the parent */

struct side {
    const char *folder;
    pid_t pid;
    FILE *lines;
    char *line;
    size_t room;
};

static char *shown[SHOWN];
static uint64_t shown_count;

static void start_side(struct side *s)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) || (s->pid = fork()) < 0)
        die("start");
    if (s->pid == 0) {
        if (dup2(ends[1], STDOUT_FILENO) < 0)
            die("dup2");
        run_side(s->folder);
    }
    close(ends[1]);
    s->lines = fdopen(ends[0], "r");
}

static void on_alarm(int signal)
{
}

/*
 * Returns its next line; NULL at the end. A side that stays silent for long hangs: the alarm interrupts the reading
 * here.
 */
static char *next_line(struct side *s)
{
    alarm(HANG_S);
    errno = 0;
    ssize_t n = getline(&s->line, &s->room, s->lines);
    if (n < 0 && errno == EINTR)
        fprintf(stderr, "differ: in %s a call does not return\n", s->folder);
    return n < 0 ? NULL : s->line;
}

static void remember(const char *text)
{
    char **at = &shown[shown_count++ % SHOWN];

    free(*at);
    *at = strdup(text);
    if (verbose)
        fputs(text, stdout);
}

static int compare_sides(struct side *sides)
{
    char *said[SIDES];

    do {
        for (int i = 0; i < SIDES; i++)
            said[i] = next_line(&sides[i]);
        if (!said[0] != !said[1] || (said[0] && strcmp(said[0], said[1]))) {
            fflush(stdout);
            for (uint64_t i = shown_count > SHOWN ? shown_count - SHOWN : 0; i < shown_count; i++)
                fputs(shown[i % SHOWN], stderr);
            for (int i = 0; i < SIDES; i++)
                fprintf(stderr, "%s: %s\n", sides[i].folder, said[i] ? said[i] : "(nothing more)");
            fprintf(stderr, "differ: --seed=%llu\n", (unsigned long long)seed);
            return 1;
        }
        if (said[0])
            remember(said[0]);
    } while (said[0]);
    return 0;
}

/* Kernels offer O_TMPFILE to file systems, and these modes of fallocate: only calls that both sides offer are made. */
static bool offers(const char *folder, bool tmpfile, int mode)
{
    char path[PATH_MAX];

    snprintf(path, sizeof(path), "%s/offers", folder);
    int fd =
        tmpfile ? open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600) : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    bool yes = fd >= 0 && (tmpfile || fallocate(fd, mode, 0, 4096) == 0);
    if (fd >= 0)
        close(fd);
    if (!tmpfile)
        unlink(path);
    return yes;
}

static void find_offers(char **folders)
{
    static const int modes[] = {0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                FALLOC_FL_ZERO_RANGE, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE};

    for (size_t i = 0; i < COUNT_OF(modes); i++)
        if (offers(folders[0], false, modes[i]) && offers(folders[1], false, modes[i]))
            space_modes[space_mode_count++] = modes[i];
        else
            printf("differ: without fallocate mode %d\n", modes[i]);
    if (offers(folders[0], true, 0) && offers(folders[1], true, 0))
        return;
    printf("differ: without O_TMPFILE\n");
    for (size_t i = 0; i < COUNT_OF(kinds); i++)
        if (kinds[i].run == call_tmpfile)
            kinds[i].weight = 0;
}

static void usage(void)
{
    fputs("usage: differ [OPTION]... FOLDER FOLDER       (as root; both folders empty)\n"
          "  --ops=N      calls in each (10000)\n"
          "  --seed=N     else it is taken from the clock; it is printed\n"
          "  --look=N     compare everything after each N calls (300)\n"
          "  --times=N    of one call in N, also which times it changed (never)\n"
          "  --atime      access times, too\n"
          "  --only=NAME,... --without=NAME,...    of the calls\n"
          "  --verbose    print each call\n",
          stderr);
    exit(2);
}

static bool in_list(const char *list, const char *name)
{
    size_t len = strlen(name);

    for (const char *at = list; (at = strstr(at, name)); at += len)
        if ((at == list || at[-1] == ',') && (at[len] == ',' || at[len] == 0))
            return true;
    return false;
}

static void choose_kinds(const char *list, bool wanted)
{
    for (size_t i = 0; i < COUNT_OF(kinds); i++)
        if (in_list(list, kinds[i].name) != wanted)
            kinds[i].weight = 0;
}

int main(int argc, char **argv)
{
    enum { OPS = 256, SEED, LOOK, TIMES, ONLY, WITHOUT };
    static const struct option options[] = {
        {"ops", 1, NULL, OPS},       {"seed", 1, NULL, SEED},     {"look", 1, NULL, LOOK},
        {"times", 1, NULL, TIMES},   {"only", 1, NULL, ONLY},     {"without", 1, NULL, WITHOUT},
        {"atime", 0, &see_atime, 1}, {"verbose", 0, &verbose, 1}, {0},
    };
    uint64_t *numbers[] = {&ops, &seed, &look_every, &times_every};
    struct side sides[SIDES] = {0};
    int c, rc;

    seed = random_seed();
    while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0) {
        if (c >= OPS && c <= TIMES)
            *numbers[c - OPS] = strtoull(optarg, NULL, 0);
        else if (c == ONLY || c == WITHOUT)
            choose_kinds(optarg, c == ONLY);
        else if (c)
            usage();
    }
    if (optind != argc - SIDES || look_every == 0)
        usage();
    printf("differ: --seed=%llu\n", (unsigned long long)seed);
    find_offers(argv + optind);
    fflush(stdout);
    sigaction(SIGALRM, &(struct sigaction){.sa_handler = on_alarm}, NULL);
    for (int i = 0; i < SIDES; i++) {
        sides[i].folder = argv[optind + i];
        start_side(&sides[i]);
    }
    rc = compare_sides(sides);
    for (int i = 0; i < SIDES; i++) {
        int status;
        if (rc)
            kill(sides[i].pid, SIGKILL);
        fclose(sides[i].lines);
        free(sides[i].line);
        if (waitpid(sides[i].pid, &status, 0) == sides[i].pid && !rc && status)
            rc = 2;
    }
    return rc;
}
