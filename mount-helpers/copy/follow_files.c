/* SPDX-License-Identifier: Apache-2.0 */
/*
 * follow_files.c - files of a model that are no parameters, as the sender of `hitrainctl follow` reads them.
 *
 * They belong to a step if nothing was published, and nothing changed, from before the walk until after the last read.
 * So they go into a file of their own first, and into the stream when that is known.
 */
#include "mount-helpers/copy/follow.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiering/base/base.h"
#include "tiering/base/files.h"
#include <hitrain/words.h>

enum { SPOOL_BYTES = 1 << 16 };

static int64_t time_of(const struct timespec *t)
{
    return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
}

static int compare(const void *a, const void *b)
{
    const struct ht_follow_entry *x = a, *y = b;

    return x->ino < y->ino ? -1 : x->ino > y->ino ? 1 : strcmp(x->path, y->path);
}

/* The entry of this inode with the lowest path. */
static struct ht_follow_entry *find(const struct ht_follow_files *f, uint64_t ino)
{
    size_t low = 0, high = f->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (f->entry[middle].ino < ino)
            low = middle + 1;
        else
            high = middle;
    }
    return low < f->count && f->entry[low].ino == ino ? &f->entry[low] : NULL;
}

/* The entry with this path, or first. */
static const struct ht_follow_entry *find_name(const struct ht_follow_files *f, const struct ht_follow_entry *first,
                                               const char *path)
{
    for (const struct ht_follow_entry *e = first; e && e < f->entry + f->count && e->ino == first->ino; e++)
        if (strcmp(e->path, path) == 0)
            return e;
    return first;
}

/* -------------------------------------------------------------------- walk */

static int add(struct ht_follow_files *f, const char *name, const struct stat *st)
{
    if (ht_array_grow((void **)&f->entry, &f->max, f->count + 1, sizeof(*f->entry)) != 0)
        return -ENOMEM;
    char *path = strdup(name);
    if (!path)
        return -ENOMEM;
    f->entry[f->count++] = (struct ht_follow_entry){
        path, st->st_ino, (uint64_t)st->st_size, time_of(&st->st_mtim), time_of(&st->st_ctim), st->st_mode, false};
    return 0;
}

/*
 * A walk is no access: a time of access that changes would be a change of the model. Only
 * owner and root may ask for that.
 */
static int open_quietly(int dir, const char *name, int flags)
{
    int fd = openat(dir, name, flags | O_RDONLY | O_NOFOLLOW | O_NOATIME | O_CLOEXEC);

    return fd < 0 && errno == EPERM ? openat(dir, name, flags | O_RDONLY | O_NOFOLLOW | O_CLOEXEC) : fd;
}

static int walk_below(struct ht_follow_files *f, int dir, char path[PATH_MAX], size_t len, unsigned depth);

/* The path is that of an entry, of this kind. */
static int walk_entry(struct ht_follow_files *f, int dir, const char *name, char path[PATH_MAX], size_t len,
                      unsigned depth)
{
    struct stat st;
    int fd, rc;

    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : -errno;
    if (S_ISREG(st.st_mode))
        return add(f, path, &st);
    if (!S_ISDIR(st.st_mode))
        return 0;
    fd = open_quietly(dir, name, O_DIRECTORY);
    if (fd < 0)
        return errno == ENOENT ? 0 : -errno;
    rc = walk_below(f, fd, path, len, depth + 1);
    close(fd);
    return rc;
}

static int walk_below(struct ht_follow_files *f, int dir, char path[PATH_MAX], size_t len, unsigned depth)
{
    int fd = fcntl(dir, F_DUPFD_CLOEXEC, 0);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *e;
    int rc = !list ? -errno : depth > HT_STREAM_DEPTH_MAX ? -ELOOP : 0;

    while (rc == 0 && (errno = 0, e = readdir(list))) {
        int n = snprintf(path + len, PATH_MAX - len, "%s%s", len ? "/" : "", e->d_name);
        if (n < 0 || (size_t)n >= PATH_MAX - len)
            rc = -ENAMETOOLONG;
        else if (!ht_is_dot(e->d_name) && (len || strcmp(e->d_name, HT_CTL_DIR) != 0))
            rc = walk_entry(f, dir, e->d_name, path, len + (size_t)n, depth);
        path[len] = '\0';
        errno = 0;
    }
    if (rc == 0)
        rc = -errno;
    if (list)
        closedir(list);
    else if (fd >= 0)
        close(fd);
    return rc;
}

/* All regular files below the root, by number of inode. */
static int walk(struct ht_follow_files *f)
{
    char path[PATH_MAX] = "";
    int dir = open_quietly(AT_FDCWD, f->root, O_DIRECTORY), rc;

    if (dir < 0)
        return ht_cmd_explain(f->root, -errno);
    rc = walk_below(f, dir, path, 0, 0);
    close(dir);
    if (rc < 0)
        return ht_cmd_explain(f->root, rc);
    if (f->count)
        qsort(f->entry, f->count, sizeof(*f->entry), compare);
    return 0;
}

static void free_entries(struct ht_follow_files *f)
{
    for (size_t i = 0; i < f->count; i++)
        free(f->entry[i].path);
    free(f->entry);
    f->entry = NULL;
    f->count = f->max = 0;
}

/* Files of the receiver's step are not sent again. */
static void compare_with(struct ht_follow_files *f, int base)
{
    for (size_t i = 0; i < f->count; i++) {
        struct ht_follow_entry *e = &f->entry[i];
        struct stat st;
        if (base < 0 || fstatat(base, e->path, &st, AT_SYMLINK_NOFOLLOW) < 0 || (uint64_t)st.st_size != e->size ||
            time_of(&st.st_mtim) != e->mtime_ns || st.st_mode != e->mode)
            e->mtime_ns = INT64_MIN; /* unlike any */
    }
}

int ht_follow_files_begin(struct ht_follow_files *f, const char *root, int base)
{
    int rc;

    *f = (struct ht_follow_files){.root = root};
    rc = walk(f);
    compare_with(f, base);
    return rc;
}

const char *ht_follow_param_path(struct ht_follow_files *f, uint64_t ino)
{
    struct ht_follow_entry *e = find(f, ino);

    if (e)
        e->is_param = true;
    return e ? e->path : NULL;
}

void ht_follow_files_free(struct ht_follow_files *f)
{
    free_entries(f);
    free(f->words);
    f->words = NULL;
}

/* -------------------------------------------------------------------- send */

/* The path alone may be as long as a call takes, so it begins at an open directory. name: below the root. */
static int open_from(const struct ht_follow_files *f, const char *name, const char *path, int flags)
{
    int root = open(f->root, O_PATH | O_DIRECTORY | O_CLOEXEC), dir, fd, err;

    dir = root < 0 ? -1 : openat(root, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
    fd = dir < 0 ? -1 : open_quietly(dir, path, flags);
    err = errno;
    if (dir >= 0)
        close(dir);
    if (root >= 0)
        close(root);
    errno = err;
    return fd;
}

/* Does the optimizer keep state for it? Gradients change it then. Absent state has no bytes. */
static bool has_state(const struct ht_follow_files *f, const char *path)
{
    struct dirent *d;
    struct stat st;
    bool any = false;
    int fd = open_from(f, HT_CTL_DIR "/state", path, O_DIRECTORY);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);

    if (fd >= 0 && !list)
        close(fd);
    while (list && !any && (d = readdir(list)))
        any = !ht_is_dot(d->d_name) && fstatat(dirfd(list), d->d_name, &st, 0) == 0 && st.st_size > 0;
    if (list)
        closedir(list);
    return any;
}

static int send_content(int fd, struct ht_follow_writer *w, uint64_t size)
{
    uint8_t *part = malloc(HT_FOLLOW_BLOCK_BYTES_MAX);
    uint64_t at = 0;
    int rc = part ? 0 : -ENOMEM;

    while (rc == 0 && at < size) {
        ssize_t n = pread(fd, part, ht_min_u64(HT_FOLLOW_BLOCK_BYTES_MAX, size - at), (off_t)at);
        if (n <= 0) {
            rc = n < 0 ? -errno : 0;
            break;
        }
        if (!ht_is_zero(part, (size_t)n))
            rc = ht_follow_put_part(w, at, part, (size_t)n);
        at += (uint64_t)n;
    }
    free(part);
    return rc;
}

/* -EAGAIN: it is gone meanwhile. */
static int send_file(struct ht_follow_files *f, struct ht_follow_writer *w, const char *path)
{
    int fd = open_from(f, ".", path, 0);
    struct stat st;
    int rc;

    if (fd < 0 && errno == ENOENT)
        return -EAGAIN;
    if (fd < 0 || fstat(fd, &st) < 0) {
        rc = ht_cmd_explain(path, -errno);
    } else {
        struct ht_follow_file file = {st.st_mode & 0777, time_of(&st.st_mtim), (uint64_t)st.st_size, path};
        rc = ht_follow_put_file(w, &file);
        if (rc == 0)
            rc = send_content(fd, w, file.size);
    }
    if (fd >= 0)
        close(fd);
    return rc;
}

static int send_words(struct ht_follow_files *f, struct ht_follow_writer *w)
{
    char *text;
    int rc = ht_cmd_attribute(f->root, "optimizer", false, &text);

    if (rc < 0)
        return rc;
    text[strcspn(text, "\n")] = '\0';
    if (f->words && strcmp(text, f->words) == 0) {
        free(text);
        return 0;
    }
    free(f->words);
    f->words = text;
    return ht_follow_put_words(w, text);
}

static bool same_file(const struct ht_follow_entry *a, const struct ht_follow_entry *b)
{
    return a->size == b->size && a->mtime_ns == b->mtime_ns && a->ctime_ns == b->ctime_ns && a->mode == b->mode;
}

/* Files that differ from the last walk. A parameter that was renamed, or a path that no stream takes, ends it. */
static int send_changed(struct ht_follow_files *now, const struct ht_follow_files *before, struct ht_follow_writer *w)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < now->count; i++) {
        struct ht_follow_entry *e = &now->entry[i];
        const struct ht_follow_entry *first = find(before, e->ino), *was = find_name(before, first, e->path);
        const char *why = ht_stream_path_refused(e->path);
        bool renamed = was && strcmp(was->path, e->path) != 0;
        e->is_param = first && first->is_param;
        if (e->is_param && renamed) {
            ht_error("%s/%s was %s: a stream does not carry that; send a newer step and follow it", now->root, e->path,
                     was->path);
            return -ESTALE;
        }
        if (e->is_param || (was && !renamed && same_file(was, e)))
            continue;
        e->is_param = has_state(now, e->path);
        if (!e->is_param && why) {
            ht_error("%s/%s: %s", now->root, e->path, why);
            return -EINVAL;
        }
        if (!e->is_param)
            rc = send_file(now, w, e->path);
    }
    return rc;
}

static const char temporary[] = "a temporary file below TMPDIR or /var/tmp";

/* It has no name. NULL, with a message printed. */
static FILE *open_spool(void)
{
    const char *dir = getenv("TMPDIR");
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/hitrain-follow-XXXXXX", dir && dir[0] != '\0' ? dir : "/var/tmp");
    int fd = n > 0 && (size_t)n < sizeof(path) ? mkostemp(path, O_CLOEXEC) : (errno = ENAMETOOLONG, -1);
    FILE *spool = fd < 0 ? NULL : fdopen(fd, "w+");
    int err = errno;

    if (fd >= 0)
        (void)unlink(path);
    if (fd >= 0 && !spool)
        close(fd);
    if (!spool)
        (void)ht_cmd_explain(temporary, -err);
    return spool;
}

static int put_spool(void *ctx, const void *data, size_t len)
{
    errno = 0;
    if (fwrite(data, 1, len, ctx) == len)
        return 0;
    return ht_cmd_explain(temporary, errno ? -errno : -EIO);
}

static int copy_spool(FILE *spool, struct ht_follow_writer *w)
{
    uint8_t buf[SPOOL_BYTES];
    size_t n;
    int rc = 0;

    rewind(spool);
    while (rc == 0 && (n = fread(buf, 1, sizeof(buf), spool)) > 0)
        rc = ht_records_put_bytes(&w->out, buf, n);
    return rc == 0 && ferror(spool) ? ht_cmd_explain(temporary, -EIO) : rc;
}

/* Is the model as it was when this step became durable? */
static int at_rest(const char *root, uint64_t step, const struct ht_follow_state *then, bool *out)
{
    struct ht_follow_state s;
    int rc = ht_follow_state(root, &s);

    *out = rc == 0 && s.last == step && !s.changed &&
        (!then || (s.publications == then->publications && s.lineage == then->lineage));
    return rc;
}

/* Into the spool, with the numbers of records that follow in the stream. */
static int spool_files(struct ht_follow_files *now, const struct ht_follow_files *before, struct ht_follow_writer *w,
                       FILE *spool)
{
    const struct ht_follow_writer real = *w;
    int rc;

    w->out.put = put_spool;
    w->out.ctx = spool;
    rc = send_words(now, w);
    if (rc == 0)
        rc = send_changed(now, before, w);
    w->out.put = real.out.put;
    w->out.ctx = real.out.ctx;
    return rc;
}

static int send_if_at_rest(struct ht_follow_files *f, struct ht_follow_files *now, uint64_t step,
                           const struct ht_follow_state *then, struct ht_follow_writer *w, bool *out_sent)
{
    FILE *spool = open_spool();
    uint64_t number = w->out.number;
    int rc = spool ? spool_files(now, f, w, spool) : -EIO;

    if (rc == 0 && fflush(spool) != 0)
        rc = ht_cmd_explain(temporary, -errno);
    if (rc == 0)
        rc = at_rest(f->root, step, then, out_sent);
    if (rc == 0 && *out_sent)
        rc = copy_spool(spool, w);
    if (!*out_sent)
        w->out.number = number;
    if (spool)
        fclose(spool);
    return rc == -EAGAIN ? 0 : rc;
}

int ht_follow_files_send(struct ht_follow_files *f, uint64_t step, struct ht_follow_writer *w, bool *out_sent)
{
    struct ht_follow_files now = {.root = f->root};
    struct ht_follow_state then;
    bool rests = false;
    int rc;

    *out_sent = false;
    rc = ht_follow_state(f->root, &then);
    if (rc == 0)
        rc = at_rest(f->root, step, &then, &rests);
    if (rc < 0 || !rests)
        return rc;
    now.words = f->words ? strdup(f->words) : NULL;
    rc = walk(&now);
    if (rc == 0)
        rc = send_if_at_rest(f, &now, step, &then, w, out_sent);
    if (rc < 0 || !*out_sent) {
        ht_follow_files_free(&now);
        return rc;
    }
    ht_follow_files_free(f);
    *f = now;
    return 0;
}
