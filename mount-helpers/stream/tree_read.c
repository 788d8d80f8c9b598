/* SPDX-License-Identifier: Apache-2.0 */
/* tree_read.c - see tree.h: a walk in the order that a stream has. */
#include "mount-helpers/stream/tree.h"

#include <fcntl.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "mount-helpers/stream/base.h"
#include "tiering/base/files.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

#define OPTIMIZER HT_XATTR_PREFIX "optimizer"
#define DTYPE HT_XATTR_PREFIX "dtype"

struct walk {
    struct ht_stream_writer *w; /* NULL: sizes only */
    const struct ht_tree_progress *progress;
    uint64_t bytes, shape;
    uint8_t *block;
    struct ht_buf attributes;
    char path[HT_STREAM_PATH_BYTES_MAX + 1]; /* of the present entry */
    unsigned depth;
    void *links; /* tree of struct link, by inode */
    struct ht_base base;
    struct ht_twin twin, state_twin; /* of the present file and state */
    char *why;
};

static int fail(struct walk *k, int rc, const char *what)
{
    if (k->why[0] == '\0')
        snprintf(k->why, HT_TREE_WHY_MAX, "%.160s%s%s", k->path[0] != '\0' ? k->path : "the model",
                 what[0] == ':' ? "" : " ", what);
    return rc;
}

static int fail_errno(struct walk *k, int err)
{
    char text[128];

    snprintf(text, sizeof(text), ": %s", strerror(err));
    return fail(k, -err, text);
}

static int done(struct walk *k, int rc, uint64_t bytes)
{
    if (rc == 0 && k->progress && k->progress->add)
        k->progress->add(k->progress->ctx, bytes);
    return rc;
}

/* ------------------------------------------------------------------- names */

/* The names of a directory, sorted; they and the array are one piece of memory each. */
struct names {
    struct ht_buf text;
    char **name;
    size_t count;
};

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void names_free(struct names *n)
{
    free(n->name);
    ht_buf_free(&n->text);
}

static int sort_names(struct names *n)
{
    char *p = (char *)n->text.data;

    if (n->text.err)
        return n->text.err;
    n->name = malloc((n->count + 1) * sizeof(*n->name));
    if (!n->name)
        return -ENOMEM;
    for (size_t i = 0; i < n->count; i++, p += strlen(p) + 1)
        n->name[i] = p;
    qsort(n->name, n->count, sizeof(*n->name), by_bytes);
    return 0;
}

/* All but dot, dotdot and the hidden directory. Takes a descriptor of its own. */
static int read_names(int dir, struct names *n)
{
    struct dirent *e;
    DIR *d;
    int rc = ht_list_directory(dir, &d);

    *n = (struct names){.text = HT_BUF_INIT};
    if (rc < 0)
        return rc;
    while (errno = 0, (e = readdir(d))) {
        if (ht_is_dot(e->d_name) || !strcmp(e->d_name, HT_CTL_DIR))
            continue;
        ht_buf_put(&n->text, e->d_name, strlen(e->d_name) + 1);
        n->count++;
    }
    rc = -errno;
    closedir(d);
    if (rc == 0)
        rc = sort_names(n);
    if (rc < 0)
        names_free(n);
    return rc;
}

/* -------------------------------------------------------------- attributes */

/* Appends one attribute; none where the file has none. */
static int take_attribute(int fd, const char *name, struct ht_buf *out)
{
    static uint8_t value[HT_XATTR_VALUE_BYTES_MAX];
    ssize_t n = fgetxattr(fd, name, value, sizeof(value));

    if (n < 0)
        return errno == ENODATA ? 0 : -errno;
    ht_stream_attribute_put(out, name, value, (size_t)n);
    return out->err;
}

static int list_attributes(int fd, struct names *n)
{
    static char list[HT_XATTR_VALUE_BYTES_MAX];
    ssize_t len = flistxattr(fd, list, sizeof(list));

    *n = (struct names){.text = HT_BUF_INIT};
    if (len < 0)
        return errno == ENOTSUP ? 0 : -errno;
    for (char *p = list; p < list + len; p += strlen(p) + 1) {
        if (!ht_stream_attribute_known(p, strlen(p)) || !strcmp(p, OPTIMIZER))
            continue;
        ht_buf_put(&n->text, p, strlen(p) + 1);
        n->count++;
    }
    ht_buf_put(&n->text, OPTIMIZER, sizeof(OPTIMIZER)); /* not listed */
    n->count++;
    return sort_names(n);
}

static int take_attributes(struct walk *k, int fd)
{
    struct names n;
    int rc = list_attributes(fd, &n);

    ht_buf_reset(&k->attributes);
    for (size_t i = 0; rc == 0 && i < n.count; i++)
        rc = take_attribute(fd, n.name[i], &k->attributes);
    names_free(&n);
    return rc < 0 ? fail_errno(k, -rc) : 0;
}

/* ------------------------------------------------------------------ content */

/* A block's bytes in full: a shorter file has changed. */
static int read_block(struct walk *k, int fd, uint64_t at, size_t len)
{
    size_t got = 0;

    while (got < len) {
        ssize_t n = pread(fd, k->block + got, len - got, (off_t)(at + got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail_errno(k, errno);
        if (n == 0)
            return fail(k, -ESTALE, "became shorter");
        got += (size_t)n;
    }
    return 0;
}

/* Where content begins at or after a place, as the start of its block; the size where there is none. */
static uint64_t next_content(int fd, uint64_t at, uint64_t size)
{
    off_t data = lseek(fd, (off_t)at, SEEK_DATA);

    if (data < 0)
        return errno == ENXIO ? size : at; /* a file that knows no holes is content */
    return ht_min_u64((uint64_t)data / HT_STREAM_BLOCK_BYTES * HT_STREAM_BLOCK_BYTES, size);
}

/* The block at from, or the run of blocks there that the base has. *out_len: their bytes. */
static int put_blocks(struct walk *k, int fd, struct ht_twin *twin, uint64_t from, uint64_t size, uint64_t *out_len)
{
    const char *path = strcmp(twin->path, k->path) == 0 ? "" : twin->path;
    struct ht_stream_same same = {from / HT_STREAM_BLOCK_BYTES, ht_twin_blocks(twin, fd, from, size), path};
    size_t len = (size_t)ht_min_u64(HT_STREAM_BLOCK_BYTES, size - from);
    int rc;

    if (same.count) {
        *out_len = ht_min_u64(same.count * HT_STREAM_BLOCK_BYTES, size - from);
        return ht_stream_put_same(k->w, &same);
    }
    *out_len = len;
    rc = read_block(k, fd, from, len);
    return rc == 0 ? ht_stream_put_block(k->w, same.index, k->block, len) : rc;
}

/* The next byte of a block that the stream has. */
static uint64_t next_wanted(const struct walk *k, uint64_t at, uint64_t size)
{
    uint64_t blocks = ht_div_up(size, HT_STREAM_BLOCK_BYTES), index = at / HT_STREAM_BLOCK_BYTES;

    if (!k->w->for_rank)
        return at;
    return ht_min_u64(ht_moves_next(&k->w->moves, index, blocks) * HT_STREAM_BLOCK_BYTES, size);
}

static int put_content(struct walk *k, int fd, uint64_t size, struct ht_twin *twin)
{
    bool whole = twin->fd < 0 && !k->w->for_rank;
    int rc = 0;

    /* Reading ahead would read what is left out. */
    (void)posix_fadvise(fd, 0, 0, whole ? POSIX_FADV_SEQUENTIAL : POSIX_FADV_RANDOM);
    for (uint64_t at = 0; rc == 0 && at < size;) {
        uint64_t wanted = next_wanted(k, at, size), from = ht_max_u64(wanted, next_content(fd, wanted, size));
        uint64_t len = 0;
        if (from < size && from == next_wanted(k, from, size))
            rc = put_blocks(k, fd, twin, from, size, &len);
        rc = done(k, rc, from + len - at);
        at = from + len;
    }
    return rc;
}

static int put_one_state(struct walk *k, int dir, const char *name)
{
    struct ht_stream_state s = {.name = name};
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC), rc = 0;
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0) {
        rc = fail_errno(k, errno);
    } else if (st.st_size > 0) { /* else it has no state yet */
        s.size = (uint64_t)st.st_size;
        k->bytes += s.size;
        k->shape += ht_stream_state_shape(k->path, name, s.size);
        if (k->w)
            rc = ht_stream_put_state(k->w, &s);
        if (rc == 0 && k->w) {
            ht_twin_find_state(&k->state_twin, &k->base, &k->twin, name);
            rc = put_content(k, fd, s.size, &k->state_twin);
            ht_twin_close(&k->state_twin);
        }
    }
    if (fd >= 0)
        close(fd);
    return rc;
}

/* The state of a file that may be a parameter. */
static int put_states(struct walk *k, int parent, const char *name)
{
    char path[sizeof(HT_CTL_DIR "/state/") + HT_NAME_BYTES_MAX];
    struct names n;
    int dir, rc;

    snprintf(path, sizeof(path), HT_CTL_DIR "/state/%s", name);
    dir = openat(parent, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0)
        return errno == ENOENT || errno == ENOTDIR ? 0 : fail_errno(k, errno);
    rc = read_names(dir, &n);
    if (rc < 0) {
        close(dir);
        return fail_errno(k, -rc);
    }
    for (size_t i = 0; rc == 0 && i < n.count; i++)
        rc = put_one_state(k, dir, n.name[i]);
    names_free(&n);
    close(dir);
    return rc;
}

/* ------------------------------------------------------------------ entries */

struct link {
    ino_t ino;
    char path[];
};

static int by_inode(const void *a, const void *b)
{
    const struct link *x = a, *y = b;

    return x->ino < y->ino ? -1 : x->ino > y->ino;
}

/* The first path of a file with several names; "" for the first time. NULL: no memory. */
static const char *first_path(struct walk *k, ino_t ino)
{
    struct link *l = malloc(sizeof(*l) + strlen(k->path) + 1);
    void *node;

    if (!l)
        return NULL;
    l->ino = ino;
    memcpy(l->path, k->path, strlen(k->path) + 1);
    node = tsearch(l, &k->links, by_inode);
    if (!node) {
        free(l);
        return NULL;
    }
    if (*(struct link **)node == l)
        return "";
    free(l);
    return (*(struct link **)node)->path;
}

static int put_entry(struct walk *k, const struct stat *st, enum ht_stream_kind kind, const char *target, bool plain)
{
    struct ht_stream_entry e = {.kind = kind, .path = k->path, .target = target};
    const char *why;

    if (kind != HT_STREAM_LINK) {
        e.uid = st->st_uid;
        e.gid = st->st_gid;
        e.mtime_ns = (int64_t)((uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec);
    }
    if (plain) {
        e.mode = st->st_mode & 07777;
        e.attributes = (struct ht_stream_attributes){k->attributes.data, k->attributes.len};
    }
    e.size = kind == HT_STREAM_FILE ? (uint64_t)st->st_size : 0;
    why = ht_stream_entry_refused(&e);
    if (why) {
        char text[160];
        snprintf(text, sizeof(text), "cannot be sent: %s", why);
        return fail(k, -EINVAL, text);
    }
    return ht_stream_put_entry(k->w, &e);
}

/* Of a file that can be trained, or NULL. */
static const char *dtype_of(int fd)
{
    char dtype[16];
    ssize_t n = fgetxattr(fd, DTYPE, dtype, sizeof(dtype));

    return n > 0 ? ht_stream_float(dtype, (size_t)n) : NULL;
}

/* Under its first name. */
static int put_plain_file(struct walk *k, int parent, int fd, const char *name, const struct stat *st)
{
    const char *dtype = dtype_of(fd);
    int rc = 0;

    k->bytes += (uint64_t)st->st_size;
    k->shape += dtype ? ht_stream_shape(k->path, dtype, (uint64_t)st->st_size) : 0;
    k->twin.fd = -1;
    if (k->w) {
        rc = take_attributes(k, fd);
        if (rc == 0)
            rc = put_entry(k, st, HT_STREAM_FILE, "", true);
        if (rc == 0 && (rc = ht_twin_find(&k->twin, &k->base, k->path, fd, (uint64_t)st->st_size)) < 0)
            rc = fail_errno(k, -rc);
        if (rc == 0)
            rc = put_content(k, fd, (uint64_t)st->st_size, &k->twin);
    }
    if (rc == 0 && fgetxattr(fd, DTYPE, NULL, 0) > 0)
        rc = put_states(k, parent, name);
    ht_twin_close(&k->twin);
    return rc;
}

static int put_file_at(struct walk *k, int parent, int fd, const char *name, const struct stat *st)
{
    const char *first = st->st_nlink > 1 ? first_path(k, st->st_ino) : "";

    if (!first)
        return fail_errno(k, ENOMEM);
    if (first[0] == '\0')
        return put_plain_file(k, parent, fd, name, st);
    return k->w ? put_entry(k, st, HT_STREAM_LINK, first, false) : 0;
}

static int put_file(struct walk *k, int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC), rc;
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        rc = fail_errno(k, errno);
    else
        rc = put_file_at(k, parent, fd, name, &st);
    if (fd >= 0)
        close(fd);
    return rc;
}

static int put_symlink(struct walk *k, int parent, const char *name, const struct stat *st)
{
    char target[HT_SYMLINK_BYTES_MAX + 1];
    ssize_t n = readlinkat(parent, name, target, sizeof(target));

    if (n < 0)
        return fail_errno(k, errno);
    if (n == sizeof(target))
        return fail(k, -ENAMETOOLONG, "is a symlink with too long a target");
    target[n] = '\0';
    return k->w ? put_entry(k, st, HT_STREAM_SYMLINK, target, false) : 0;
}

/* -------------------------------------------------------------- directories */

static int put_directory(struct walk *k, int dir);

static int put_subdirectory(struct walk *k, int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), rc;

    if (fd < 0)
        return fail_errno(k, errno);
    rc = ++k->depth <= HT_STREAM_DEPTH_MAX ? put_directory(k, fd)
                                           : fail(k, -ENAMETOOLONG, "lies in too many directories");
    k->depth--;
    close(fd);
    return rc;
}

static int put_name(struct walk *k, int parent, const char *name)
{
    struct stat st;

    if (fstatat(parent, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return fail_errno(k, errno);
    switch (st.st_mode & S_IFMT) {
    case S_IFDIR:
        return put_subdirectory(k, parent, name);
    case S_IFREG:
        return put_file(k, parent, name);
    case S_IFLNK:
        return put_symlink(k, parent, name, &st);
    default:
        return fail(k, -EOPNOTSUPP, "is a device, a socket or a FIFO: streams have files, directories and links");
    }
}

/* The directory at k->path, and everything below. */
static int put_directory(struct walk *k, int dir)
{
    size_t len = strlen(k->path);
    struct names n = {.text = HT_BUF_INIT};
    struct stat st;
    int rc = fstat(dir, &st) < 0 ? fail_errno(k, errno) : 0;

    if (rc == 0 && k->w)
        rc = take_attributes(k, dir);
    if (rc == 0 && k->w)
        rc = put_entry(k, &st, HT_STREAM_DIRECTORY, "", true);
    if (rc == 0) {
        rc = read_names(dir, &n);
        if (rc < 0)
            return fail_errno(k, -rc);
    }
    for (size_t i = 0; rc == 0 && i < n.count; i++) {
        if (len + 1 + strlen(n.name[i]) >= sizeof(k->path)) {
            rc = fail(k, -ENAMETOOLONG, "has a path that is too long below it");
            break;
        }
        snprintf(k->path + len, sizeof(k->path) - len, "%s%s", len ? "/" : "", n.name[i]);
        rc = put_name(k, dir, n.name[i]);
        k->path[len] = '\0';
    }
    names_free(&n);
    return rc;
}

static int walk(struct walk *k, int dir)
{
    int rc;

    k->why[0] = '\0';
    k->block = malloc(HT_STREAM_BLOCK_BYTES);
    rc = k->block ? put_directory(k, dir) : fail_errno(k, ENOMEM);
    tdestroy(k->links, free);
    ht_base_free(&k->base);
    ht_buf_free(&k->attributes);
    free(k->block);
    return rc;
}

int ht_tree_measure(int dir, uint64_t *out_bytes, char why[HT_TREE_WHY_MAX])
{
    struct walk k = {.base = {.dir = -1}, .why = why};
    int rc = walk(&k, dir);

    if (rc == 0)
        *out_bytes = k.bytes;
    return rc;
}

int ht_tree_shape(int dir, uint64_t *out_shape, char why[HT_TREE_WHY_MAX])
{
    struct walk k = {.base = {.dir = -1}, .why = why};
    int rc = walk(&k, dir);

    if (rc == 0)
        *out_shape = k.shape;
    return rc;
}

int ht_tree_read(int dir, int base, struct ht_stream_writer *w, const struct ht_tree_progress *p,
                 char why[HT_TREE_WHY_MAX])
{
    struct walk k = {.w = w, .base = {.dir = base}, .progress = p, .why = why};

    return walk(&k, dir);
}
