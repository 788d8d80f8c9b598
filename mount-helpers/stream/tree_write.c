/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tree_write.c - see tree.h. The directories from the root to the present entry are open, and every call is relative to
 * the last one, by a single name: so no path of the stream is ever resolved. The present file is open until the next
 * entry. Modes and times come last, because a directory may be one that its owner cannot write to.
 */
#include "mount-helpers/stream/tree.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "mount-helpers/stream/base.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

struct meta {
    mode_t mode;
    uid_t uid;
    gid_t gid;
    int64_t mtime_ns;
};

struct level {
    int fd;
    size_t path_len; /* of the directory's path */
    struct meta meta;
};

struct build {
    struct ht_stream_reader *r;
    const struct ht_tree_progress *progress;
    int base; /* the step that the stream builds on, or -1 */
    bool owners;
    struct level level[HT_STREAM_DEPTH_MAX + 2];
    unsigned depth; /* open levels */
    int file;       /* the present file, or -1 */
    struct meta meta;
    int to; /* where blocks go: the present file, or one of its states; -1: nowhere */
    uint64_t size, next;
    struct ht_tree_root *root;
    char *why;
};

static int fail(struct build *b, int err, const char *what)
{
    if (b->why[0] == '\0')
        snprintf(b->why, HT_TREE_WHY_MAX, "%.160s: cannot %s: %s", b->r->path[0] != '\0' ? b->r->path : "the model",
                 what, strerror(err));
    return -err;
}

static void progress(struct build *b, uint64_t bytes)
{
    if (bytes && b->progress && b->progress->add)
        b->progress->add(b->progress->ctx, bytes);
}

static const char *last_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

/* ------------------------------------------------------------ modes and times */

/* What an entry has at last. Ids first: changing them clears bits of the mode. */
static int set_meta(struct build *b, int fd, const struct meta *m, mode_t keep)
{
    struct timespec t[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = m->mtime_ns / 1000000000}};

    t[1].tv_nsec = m->mtime_ns % 1000000000;
    if (t[1].tv_nsec < 0) {
        t[1].tv_nsec += 1000000000;
        t[1].tv_sec--;
    }
    if (b->owners && fchown(fd, m->uid, m->gid) < 0)
        return fail(b, errno, "set the owner");
    if (fchmod(fd, m->mode & keep) < 0)
        return fail(b, errno, "set the mode");
    return futimens(fd, t) < 0 ? fail(b, errno, "set the time") : 0;
}

static void close_content(struct build *b)
{
    if (b->to >= 0 && b->to != b->file)
        close(b->to);
    b->to = -1;
    b->size = b->next = 0;
}

/* Nothing more comes for the file or state. State of zeros came without blocks: writing an element makes it. */
static int end_content(struct build *b)
{
    bool unmade = b->to >= 0 && b->to != b->file && b->next == 0;
    int rc = 0;

    if (unmade && pwrite(b->to, "\0\0\0", (size_t)ht_min_u64(b->size, 4), 0) < 0)
        rc = fail(b, errno, "make its state");
    progress(b, b->size - b->next);
    close_content(b);
    return rc;
}

/* Nothing more comes for the present file. */
static int end_file(struct build *b)
{
    int rc = end_content(b);

    if (b->file < 0)
        return rc;
    if (rc == 0)
        rc = set_meta(b, b->file, &b->meta, 0777);
    if (close(b->file) < 0 && rc == 0)
        rc = fail(b, errno, "write");
    b->file = -1;
    return rc;
}

static int end_directory(struct build *b)
{
    struct level *l = &b->level[--b->depth];
    int rc = set_meta(b, l->fd, &l->meta, 0777 | S_ISVTX | S_ISGID);

    close(l->fd);
    return rc;
}

/* Leaves the directories that path is not in. */
static int end_directories(struct build *b, const char *path)
{
    size_t len = (size_t)(last_name(path) - path);
    int rc = 0;

    len -= len > 0; /* the slash */
    while (rc == 0 && b->level[b->depth - 1].path_len > len)
        rc = end_directory(b);
    return rc;
}

/* -------------------------------------------------------------- attributes */

/* Does the stream have this attribute? */
static bool has(struct ht_stream_attributes list, const char *name)
{
    struct ht_stream_attribute a;

    while (ht_stream_attribute_next(&list, &a))
        if (strlen(name) == a.name_len && memcmp(name, a.name, a.name_len) == 0)
            return true;
    return false;
}

/* A new file inherits words of its directory: those that it has not in the stream go. */
static int remove_others(struct build *b, int fd, const struct ht_stream_attributes *list)
{
    static char names[HT_XATTR_VALUE_BYTES_MAX];
    ssize_t len = flistxattr(fd, names, sizeof(names));

    if (len < 0)
        return errno == ENOTSUP ? 0 : fail(b, errno, "read attributes");
    for (char *p = names; p < names + len; p += strlen(p) + 1)
        if (ht_stream_attribute_known(p, strlen(p)) && !has(*list, p) && fremovexattr(fd, p) < 0 && errno != ENODATA)
            return fail(b, errno, "remove an attribute");
    return 0;
}

static int set_attribute(struct build *b, int fd, const struct ht_stream_attribute *a)
{
    char name[HT_XATTR_NAME_BYTES_MAX + 1], text[HT_XATTR_NAME_BYTES_MAX + 32];

    memcpy(name, a->name, a->name_len);
    name[a->name_len] = '\0';
    snprintf(text, sizeof(text), "set %s", name);
    if (fsetxattr(fd, name, a->value, a->value_len, 0) == 0)
        return 0;
    /* A word that earlier versions took, and that did nothing. */
    return errno == EINVAL && strcmp(name, HT_XATTR_PREFIX "tier") == 0 ? 0 : fail(b, errno, text);
}

static int set_attributes(struct build *b, int fd, struct ht_stream_attributes list)
{
    int rc = remove_others(b, fd, &list);
    struct ht_stream_attribute a;

    while (rc == 0 && ht_stream_attribute_next(&list, &a))
        rc = set_attribute(b, fd, &a);
    return rc;
}

/* Access lists of the root come last: they would open the directory to others. */
static int begin_root(struct build *b, const struct ht_stream_entry *e)
{
    int fd = b->level[0].fd, rc = remove_others(b, fd, &e->attributes);
    struct ht_stream_attributes list = e->attributes;
    struct ht_stream_attribute a;
    char name[HT_XATTR_NAME_BYTES_MAX + 1];

    b->root->mode = e->mode;
    b->root->uid = e->uid;
    b->root->gid = e->gid;
    b->root->mtime_ns = e->mtime_ns;
    while (rc == 0 && ht_stream_attribute_next(&list, &a)) {
        if (memcmp(a.name, "user.", 5) == 0) {
            rc = set_attribute(b, fd, &a);
            continue;
        }
        memcpy(name, a.name, a.name_len);
        name[a.name_len] = '\0';
        ht_stream_attribute_put(&b->root->lists, name, a.value, a.value_len);
        rc = b->root->lists.err;
    }
    return rc;
}

/* ------------------------------------------------------------------ entries */

static struct meta meta_of(const struct ht_stream_entry *e)
{
    return (struct meta){e->mode, e->uid, e->gid, e->mtime_ns};
}

static int begin_directory(struct build *b, const struct ht_stream_entry *e)
{
    int parent = b->level[b->depth - 1].fd, fd;
    const char *name = last_name(e->path);

    if (mkdirat(parent, name, 0700) < 0)
        return fail(b, errno, "make the directory");
    fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return fail(b, errno, "open the directory");
    b->level[b->depth++] = (struct level){fd, strlen(e->path), meta_of(e)};
    return set_attributes(b, fd, e->attributes);
}

static int begin_file(struct build *b, const struct ht_stream_entry *e)
{
    int parent = b->level[b->depth - 1].fd, rc;

    b->file = openat(parent, last_name(e->path), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (b->file < 0)
        return fail(b, errno, "make the file");
    b->meta = meta_of(e);
    rc = set_attributes(b, b->file, e->attributes);
    if (rc == 0 && ftruncate(b->file, (off_t)e->size) < 0)
        rc = fail(b, errno, "set the size");
    b->to = b->file;
    b->size = e->size;
    return rc;
}

static int make_symlink(struct build *b, const struct ht_stream_entry *e)
{
    int parent = b->level[b->depth - 1].fd;
    const char *name = last_name(e->path);
    struct timespec t[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = e->mtime_ns / 1000000000}};

    t[1].tv_nsec = e->mtime_ns % 1000000000;
    if (t[1].tv_nsec < 0) {
        t[1].tv_nsec += 1000000000;
        t[1].tv_sec--;
    }
    if (symlinkat(e->target, parent, name) < 0)
        return fail(b, errno, "make the symlink");
    if (b->owners && fchownat(parent, name, e->uid, e->gid, AT_SYMLINK_NOFOLLOW) < 0)
        return fail(b, errno, "set the owner");
    return utimensat(parent, name, t, AT_SYMLINK_NOFOLLOW) < 0 ? fail(b, errno, "set the time") : 0;
}

/* The directory of a path below the root, without following a symlink. A new descriptor, or a negative errno. */
static int open_parent(int root, char *path)
{
    int fd = openat(root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), next;
    char *save, *name = strchr(path, '/') ? strtok_r(path, "/", &save) : NULL;

    while (fd >= 0 && name) {
        char *after = strtok_r(NULL, "/", &save);
        if (!after)
            break; /* the file itself */
        next = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        close(fd);
        fd = next;
        name = after;
    }
    return fd < 0 ? -errno : fd;
}

static int make_link(struct build *b, const struct ht_stream_entry *e)
{
    char target[HT_STREAM_PATH_BYTES_MAX + 1];
    const char *name = last_name(e->target);
    struct stat st;
    int from, rc = 0;

    memcpy(target, e->target, strlen(e->target) + 1);
    from = open_parent(b->level[0].fd, target);
    if (from < 0)
        return fail(b, -from, "find the file that it links to");
    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        rc = fail(b, errno, "find the file that it links to");
    else if (!S_ISREG(st.st_mode))
        rc = fail(b, EINVAL, "link to what is no file");
    else if (linkat(from, name, b->level[b->depth - 1].fd, last_name(e->path), 0) < 0)
        rc = fail(b, errno, "make the link");
    close(from);
    return rc;
}

static int take_entry(struct build *b, const struct ht_stream_entry *e)
{
    int rc = end_file(b);

    if (e->path[0] == '\0')
        return rc == 0 ? begin_root(b, e) : rc;
    if (rc == 0)
        rc = end_directories(b, e->path);
    if (rc < 0)
        return rc;
    switch (e->kind) {
    case HT_STREAM_DIRECTORY:
        return begin_directory(b, e);
    case HT_STREAM_FILE:
        return begin_file(b, e);
    case HT_STREAM_SYMLINK:
        return make_symlink(b, e);
    default:
        return make_link(b, e);
    }
}

/* ------------------------------------------------------------------ content */

static int take_state(struct build *b, const struct ht_stream_state *s)
{
    char path[sizeof(HT_CTL_DIR "/state//") + HT_NAME_BYTES_MAX + HT_STREAM_STATE_NAME_BYTES_MAX];
    int parent = b->level[b->depth - 1].fd, rc = end_content(b);

    if (rc < 0)
        return rc;
    snprintf(path, sizeof(path), HT_CTL_DIR "/state/%.255s/%.64s", last_name(b->r->path), s->name);
    b->to = openat(parent, path, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    b->size = s->size;
    return b->to < 0 ? fail(b, errno, "open its state") : 0;
}

static int write_at(struct build *b, const uint8_t *data, size_t len, uint64_t at)
{
    size_t done = 0;

    while (done < len) {
        ssize_t n = pwrite(b->to, data + done, len - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return fail(b, n < 0 ? errno : EIO, "write");
        done += (size_t)n;
    }
    return 0;
}

/* The content up to end is there. */
static void passed(struct build *b, uint64_t end)
{
    progress(b, end - b->next);
    b->next = end;
}

static int take_block(struct build *b, const struct ht_stream_block *block)
{
    uint64_t at = block->index * HT_STREAM_BLOCK_BYTES;
    int rc = write_at(b, block->data, block->len, at);

    if (rc == 0)
        passed(b, at + block->len);
    return rc;
}

/* Whole chunks of files share their stored bytes. */
static int share(struct build *b, int from, uint64_t at, uint64_t end)
{
    off_t in = (off_t)at, out = (off_t)at;

    while ((uint64_t)in < end) {
        ssize_t n = copy_file_range(from, &in, b->to, &out, (size_t)(end - (uint64_t)in), 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return fail(b, n < 0 ? errno : EIO, "share blocks of the base");
    }
    return 0;
}

/* Files of state share nothing: they may be views of several objects. */
static int copy(struct build *b, int from, uint64_t at, uint64_t end)
{
    uint8_t *block = malloc(HT_STREAM_BLOCK_BYTES);
    int rc = block ? 0 : fail(b, ENOMEM, "copy blocks of the base");

    while (rc == 0 && at < end) {
        ssize_t n = pread(from, block, (size_t)ht_min_u64(HT_STREAM_BLOCK_BYTES, end - at), (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        rc = n > 0 ? write_at(b, block, (size_t)n, at) : fail(b, n < 0 ? errno : EIO, "copy blocks of the base");
        at += n > 0 ? (uint64_t)n : 0;
    }
    free(block);
    return rc;
}

/* Blocks that the base has. */
static int take_same(struct build *b, const struct ht_stream_same *s)
{
    const char *path = s->path[0] != '\0' ? s->path : b->r->path, *state = b->r->state;
    uint64_t at = s->index * HT_STREAM_BLOCK_BYTES, end = ht_min_u64(at + s->count * HT_STREAM_BLOCK_BYTES, b->size);
    int from = state[0] != '\0' ? ht_base_open_state(b->base, path, state) : ht_base_open(b->base, path), rc;
    struct stat st;

    if (from < 0)
        return fail(b, -from, "open the file of the base that has its blocks");
    if (fstat(from, &st) < 0 || (uint64_t)st.st_size < end)
        rc = fail(b, ESTALE, "find its blocks in the base");
    else
        rc = state[0] != '\0' ? copy(b, from, at, end) : share(b, from, at, end);
    close(from);
    if (rc == 0)
        passed(b, end);
    return rc;
}

static int take(struct build *b, const struct ht_stream_record *x)
{
    switch (x->type) {
    case HT_STREAM_ENTRY:
        return take_entry(b, &x->entry);
    case HT_STREAM_STATE:
        return take_state(b, &x->state);
    case HT_STREAM_BLOCK:
        return take_block(b, &x->block);
    case HT_STREAM_SAME:
        return take_same(b, &x->same);
    default:
        return end_file(b);
    }
}

static void close_all(struct build *b)
{
    close_content(b);
    if (b->file >= 0)
        close(b->file);
    while (b->depth > 0)
        close(b->level[--b->depth].fd);
}

int ht_tree_write(int dir, int base, struct ht_stream_reader *r, bool owners, const struct ht_tree_progress *p,
                  struct ht_tree_root *out_root, struct ht_hash128 *out_digest, char why[HT_TREE_WHY_MAX])
{
    struct build b = {
        .r = r, .progress = p, .base = base, .owners = owners, .file = -1, .to = -1, .root = out_root, .why = why};
    struct ht_stream_record x = {.type = HT_STREAM_ENTRY};
    int rc = 0;

    *out_root = (struct ht_tree_root){.lists = HT_BUF_INIT};
    why[0] = '\0';
    b.level[0].fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (b.level[0].fd < 0)
        return fail(&b, errno, "open the directory");
    b.depth = 1;
    while (rc == 0 && x.type != HT_STREAM_END) {
        rc = ht_stream_next(r, &x);
        if (rc == 0)
            rc = take(&b, &x);
        else
            snprintf(why, HT_TREE_WHY_MAX, "%s", r->in.why);
    }
    while (rc == 0 && b.depth > 1)
        rc = end_directory(&b);
    close_all(&b);
    if (rc == 0)
        *out_digest = x.digest;
    return rc;
}

int ht_tree_write_root(int dir, const struct ht_tree_root *root, bool owners, char why[HT_TREE_WHY_MAX])
{
    struct ht_stream_reader none = {.path = ""};
    struct build b = {.r = &none, .owners = owners, .why = why};
    struct ht_stream_attributes list = {root->lists.data, root->lists.len};
    struct meta m = {root->mode, root->uid, root->gid, root->mtime_ns};
    struct ht_stream_attribute a;
    int rc = 0;

    why[0] = '\0';
    while (rc == 0 && ht_stream_attribute_next(&list, &a))
        rc = set_attribute(&b, dir, &a);
    return rc == 0 ? set_meta(&b, dir, &m, 0777 | S_ISVTX | S_ISGID) : rc;
}
