/* SPDX-License-Identifier: Apache-2.0 */
/* base.c - see base.h. */
#include "mount-helpers/stream/base.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiering/base/files.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

/* -------------------------------------------------------------------- open */

/* Another file system below the step would have other numbers of inodes. */
static int open_below(int dir, const char *path, unsigned access)
{
    const struct open_how how = {.flags = access | O_CLOEXEC | O_NONBLOCK,
                                 .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV};
    int fd = (int)syscall(SYS_openat2, dir, path, &how, sizeof(how));
    struct stat st;

    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
        return fd;
    close(fd);
    return -EINVAL;
}

int ht_base_open(int dir, const char *path)
{
    return open_below(dir, path, O_RDONLY);
}

static int open_state(int dir, const char *path, const char *state, unsigned access)
{
    char full[HT_STREAM_PATH_BYTES_MAX + sizeof(HT_CTL_DIR "/state//") + HT_STREAM_STATE_NAME_BYTES_MAX];
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;

    snprintf(full, sizeof(full), "%.*s" HT_CTL_DIR "/state/%s/%s", (int)(name - path), path, name, state);
    return open_below(dir, full, access);
}

int ht_base_open_state(int dir, const char *path, const char *state)
{
    return open_state(dir, path, state, O_RDONLY);
}

static int open_to_write(int dir, const char *path, const char *state)
{
    return state ? open_state(dir, path, state, O_WRONLY) : open_below(dir, path, O_WRONLY);
}

int ht_base_open_to_write(int dir, const char *path, const char *state)
{
    int fd = open_to_write(dir, path, state), file;
    struct stat st;

    if (fd != -EACCES)
        return fd;
    file = open_below(dir, path, O_RDONLY);
    if (file < 0)
        return fd;
    if (fstat(file, &st) == 0 && fchmod(file, (st.st_mode & 07777) | S_IWUSR) == 0) {
        fd = open_to_write(dir, path, state);
        if (fchmod(file, st.st_mode & 07777) < 0 && fd >= 0) {
            close(fd);
            fd = -EACCES;
        }
    }
    close(file);
    return fd;
}

/* -------------------------------------------------------------------- list */

struct ht_base_file {
    uint64_t size;
    char path[];
};

enum {
    TRIES_MAX = 64,          /* files of one size that are compared */
    RENAMED_MIN_BYTES = 4096 /* smaller ones are sent */
};

void ht_base_free(struct ht_base *b)
{
    for (size_t i = 0; i < b->count; i++)
        free(b->files[i]);
    free(b->files);
    b->files = NULL;
    b->count = b->cap = 0;
}

static int add(struct ht_base *b, const char *path, uint64_t size)
{
    struct ht_base_file *f;
    size_t len = strlen(path) + 1;

    if (ht_array_grow((void **)&b->files, &b->cap, b->count + 1, sizeof(struct ht_base_file *)) != 0)
        return -ENOMEM;
    f = malloc(sizeof(*f) + len);
    if (!f)
        return -ENOMEM;
    f->size = size;
    memcpy(f->path, path, len);
    b->files[b->count++] = f;
    return 0;
}

static int list(struct ht_base *b, int dir, char *path, unsigned depth);

static int list_name(struct ht_base *b, int dir, const char *name, char *path, unsigned depth)
{
    struct stat st;
    int fd, rc;

    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    if (S_ISREG(st.st_mode))
        return st.st_size >= RENAMED_MIN_BYTES ? add(b, path, (uint64_t)st.st_size) : 0;
    if (!S_ISDIR(st.st_mode) || depth >= HT_STREAM_DEPTH_MAX)
        return 0;
    fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    rc = list(b, fd, path, depth + 1);
    close(fd);
    return rc;
}

/* A directory that cannot be read has no twins. */
static int list(struct ht_base *b, int dir, char *path, unsigned depth)
{
    size_t len = strlen(path);
    struct dirent *e;
    DIR *d;
    int rc = 0;

    if (ht_list_directory(dir, &d) < 0)
        return 0;
    while (rc != -ENOMEM && (e = readdir(d))) {
        if (ht_is_dot(e->d_name) || !strcmp(e->d_name, HT_CTL_DIR) ||
            len + strlen(e->d_name) + 2 > HT_STREAM_PATH_BYTES_MAX)
            continue;
        snprintf(path + len, HT_STREAM_PATH_BYTES_MAX + 1 - len, "%s%s", len ? "/" : "", e->d_name);
        rc = list_name(b, dir, e->d_name, path, depth);
        path[len] = '\0';
    }
    closedir(d);
    return rc == -ENOMEM ? rc : 0;
}

static int by_size(const void *a, const void *b)
{
    const struct ht_base_file *x = *(struct ht_base_file *const *)a, *y = *(struct ht_base_file *const *)b;

    return x->size != y->size ? (x->size > y->size) - (x->size < y->size) : strcmp(x->path, y->path);
}

static int list_all(struct ht_base *b)
{
    char path[HT_STREAM_PATH_BYTES_MAX + 1] = "";
    int rc = b->listed ? 0 : list(b, b->dir, path, 0);

    if (rc == 0 && !b->listed && b->count)
        qsort(b->files, b->count, sizeof(b->files[0]), by_size);
    b->listed = rc == 0;
    return rc;
}

/* ------------------------------------------------------------------- twins */

/* Keeps the descriptor, or closes it. */
static void take(struct ht_twin *t, int fd, const char *path)
{
    struct stat st;

    *t = (struct ht_twin){.fd = -1};
    if (fd < 0)
        return;
    if (fstat(fd, &st) < 0) {
        close(fd);
        return;
    }
    t->fd = fd;
    t->ino = st.st_ino;
    t->size = (uint64_t)st.st_size;
    snprintf(t->path, sizeof(t->path), "%s", path);
}

/* Is the byte at this place the same? A store that does not answer has nothing in common. */
static bool ask(struct ht_twin *t, int fd, uint64_t at)
{
    struct ht_ioctl_same q = {.other = t->ino, .offset = at};

    if (at >= t->off && at < t->end)
        return t->is_same;
    if (ioctl(fd, HT_IOCTL_SAME, &q) < 0 || q.end <= at)
        q = (struct ht_ioctl_same){.end = UINT64_MAX};
    t->off = at;
    t->end = q.end;
    t->is_same = q.is_same;
    return t->is_same;
}

uint64_t ht_twin_blocks(struct ht_twin *t, int fd, uint64_t at, uint64_t size)
{
    uint64_t limit, to = at;

    if (t->fd < 0)
        return 0;
    limit = t->size >= size ? size : t->size / HT_STREAM_BLOCK_BYTES * HT_STREAM_BLOCK_BYTES;
    while (to < limit && ask(t, fd, to))
        to = ht_min_u64(t->end, limit);
    return to == size ? ht_div_up(size - at, HT_STREAM_BLOCK_BYTES) : (to - at) / HT_STREAM_BLOCK_BYTES;
}

static int find_renamed(struct ht_twin *t, struct ht_base *b, int fd, uint64_t size)
{
    uint64_t best = 0;
    size_t from = 0;
    struct ht_twin x;
    int rc = list_all(b);

    if (rc < 0)
        return rc;
    for (size_t to = b->count; from < to;) { /* the first of this size */
        size_t middle = from + (to - from) / 2;
        if (b->files[middle]->size < size)
            from = middle + 1;
        else
            to = middle;
    }
    for (size_t i = from; i < b->count && i - from < TRIES_MAX && b->files[i]->size == size && best < size; i++) {
        take(&x, ht_base_open(b->dir, b->files[i]->path), b->files[i]->path);
        if (x.fd < 0 || !ask(&x, fd, 0) || x.end <= best) {
            ht_twin_close(&x);
            continue;
        }
        best = x.end;
        ht_twin_close(t);
        *t = x;
    }
    return 0;
}

int ht_twin_find(struct ht_twin *t, struct ht_base *b, const char *path, int fd, uint64_t size)
{
    *t = (struct ht_twin){.fd = -1};
    if (b->dir < 0)
        return 0;
    take(t, ht_base_open(b->dir, path), path);
    return t->fd >= 0 || size < RENAMED_MIN_BYTES ? 0 : find_renamed(t, b, fd, size);
}

void ht_twin_find_state(struct ht_twin *t, const struct ht_base *b, const struct ht_twin *file, const char *state)
{
    *t = (struct ht_twin){.fd = -1};
    if (file->fd >= 0)
        take(t, ht_base_open_state(b->dir, file->path, state), file->path);
}

void ht_twin_close(struct ht_twin *t)
{
    if (t->fd >= 0)
        close(t->fd);
    t->fd = -1;
}
