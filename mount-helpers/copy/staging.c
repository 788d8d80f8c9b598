/* SPDX-License-Identifier: Apache-2.0 */
/* staging.c - see staging.h. */
#include "mount-helpers/copy/staging.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "mount-helpers/ctl/ctl.h"
#include "mount-helpers/stream/tree.h"
#include "tiering/base/files.h"
#include "tiering/base/log.h"
#include <hitrain/words.h>

#define PREFIX ".hitrain-receive-"
#define MODEL HT_STAGING_MODEL

/* ----------------------------------------------------------------- removal */

static int empty(int dir, unsigned depth);

/* A directory that its owner may not read: its mode changes first. A descriptor or a negative errno. */
static int open_unreadable(int parent, const char *name)
{
    char path[64];
    int handle, fd;

    handle = openat(parent, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (handle < 0)
        return -errno;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", handle); /* the directory itself, whatever has its name now */
    fd = chmod(path, 0700) < 0 ? -1 : openat(handle, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    fd = fd < 0 ? -errno : fd;
    close(handle);
    return fd;
}

/* A directory to remove what is in it, whatever its mode. A descriptor or a negative errno. */
static int open_to_empty(int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), rc;

    if (fd < 0)
        return errno == EACCES ? open_unreadable(parent, name) : -errno;
    if (fchmod(fd, 0700) == 0)
        return fd;
    rc = -errno;
    close(fd);
    return rc;
}

/* Whatever stands there, without following a symlink. */
static int remove_all(int parent, const char *name, unsigned depth)
{
    int fd, rc;

    if (unlinkat(parent, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return -errno;
    fd = open_to_empty(parent, name);
    if (fd < 0)
        return fd;
    rc = depth < 1024 ? empty(fd, depth + 1) : -ELOOP;
    close(fd);
    if (rc == 0 && unlinkat(parent, name, AT_REMOVEDIR) < 0)
        rc = -errno;
    return rc;
}

static int empty(int dir, unsigned depth)
{
    struct dirent *e;
    DIR *d;
    int rc = ht_list_directory(dir, &d);

    if (rc < 0)
        return rc;
    while (rc == 0 && (errno = 0, (e = readdir(d))))
        if (!ht_is_dot(e->d_name))
            rc = remove_all(dirfd(d), e->d_name, depth);
    if (rc == 0)
        rc = -errno;
    closedir(d);
    return rc;
}

/*
 * A model whose commits kept steps can be removed without these alone. Only a model root has the directory of kept
 * steps. Any other directory that lies in a model has ctl, too, but its commands go to the root above.
 */
static void forget_steps(int dir)
{
    static const char line[] = "forget *\n";
    int fd;

    if (faccessat(dir, HT_CTL_DIR "/snap", F_OK, AT_EACCESS) < 0)
        return;
    fd = openat(dir, HT_CTL_DIR "/ctl", O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return;
    if (write(fd, line, sizeof(line) - 1) < 0)
        ht_debug("%s: %s", HT_CTL_DIR "/ctl", strerror(errno));
    close(fd);
}

/* Has the directory still its name? */
static bool is_there(int parent, const char *name, int dir)
{
    struct stat mine, named;

    return fstat(dir, &mine) == 0 && fstatat(parent, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
        mine.st_ino == named.st_ino && mine.st_dev == named.st_dev;
}

/* The model that is inside; earlier versions received into the directory itself. */
static void forget_all_steps(int dir)
{
    int model = open_to_empty(dir, MODEL);

    forget_steps(dir);
    if (model < 0)
        return;
    forget_steps(model);
    close(model);
}

/* Somebody may have moved the directory away meanwhile. Then it is left, empty, and so is the one that has its name. */
static int remove_with_model(int parent, const char *name, int dir)
{
    int rc;

    forget_all_steps(dir);
    rc = fchmod(dir, 0700) < 0 ? -errno : empty(dir, 0);
    if (rc == 0 && !is_there(parent, name, dir))
        return -ENOENT;
    return rc == 0 && unlinkat(parent, name, AT_REMOVEDIR) < 0 ? -errno : rc;
}

/* A directory of the same user, as staging makes it, that no program locks. Takes the lock. */
static bool is_left(int dir)
{
    struct stat st;

    return fstat(dir, &st) == 0 && st.st_uid == geteuid() && (st.st_mode & 0777) == 0700 &&
        flock(dir, LOCK_EX | LOCK_NB) == 0;
}

/*
 * The directory of a program of the same user that was killed. Another user may have renamed it, or given another
 * directory such a name, but cannot have set its attribute.
 */
static bool is_old(int dir, const char *name)
{
    char made_as[NAME_MAX + 1];
    ssize_t n = fgetxattr(dir, HT_STAGING_ATTRIBUTE, made_as, sizeof(made_as));

    return n == (ssize_t)strlen(name) && memcmp(made_as, name, (size_t)n) == 0 && is_left(dir);
}

/*
 * A directory that a program made, and had not marked when it was killed. Another program may mark it at this moment:
 * it notices that it is gone, and makes another one. Anything else of this name is left.
 */
static bool is_unmarked(int dir)
{
    return fgetxattr(dir, HT_STAGING_ATTRIBUTE, NULL, 0) < 0 && errno == ENODATA && is_left(dir);
}

/* -ENOTEMPTY: it is in use. */
static int remove_empty(int parent, const char *name, int dir)
{
    if (!is_there(parent, name, dir))
        return -ENOENT;
    return unlinkat(parent, name, AT_REMOVEDIR) < 0 ? -errno : 0;
}

static void tell_removed(const char *name, int rc)
{
    if (rc < 0)
        ht_info("%s, which an interrupted receive left, cannot be removed: %s", name, strerror(-rc));
    else
        ht_info("removed %s, which an interrupted receive had left", name);
}

static void remove_old(const struct ht_staging *s, const char *name)
{
    const char *number = name + sizeof(PREFIX) - 1;
    int fd;

    if (strlen(number) != 8 || strspn(number, "0123456789abcdef") != 8)
        return;
    fd = openat(s->parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return;
    if (is_old(fd, name))
        tell_removed(name, remove_with_model(s->parent, name, fd));
    else if (is_unmarked(fd) && remove_empty(s->parent, name, fd) == 0)
        tell_removed(name, 0);
    close(fd);
}

static void remove_all_old(const struct ht_staging *s)
{
    struct dirent *e;
    DIR *d;

    if (ht_list_directory(s->parent, &d) < 0)
        return;
    while ((e = readdir(d)))
        if (strncmp(e->d_name, PREFIX, sizeof(PREFIX) - 1) == 0)
            remove_old(s, e->d_name);
    closedir(d);
}

/* ------------------------------------------------------------------ staging */

/* The directory of path and the last name in it, without slashes at the end. */
static int split(struct ht_staging *s, const char *path, char folder[PATH_MAX])
{
    size_t len = strlen(path), begin;

    while (len > 1 && path[len - 1] == '/')
        len--;
    for (begin = len; begin > 0 && path[begin - 1] != '/';)
        begin--;
    if (len == 0 || len >= PATH_MAX || len - begin > NAME_MAX || len == begin)
        return -EINVAL;
    memcpy(s->name, path + begin, len - begin);
    s->name[len - begin] = '\0';
    snprintf(folder, PATH_MAX, "%.*s", (int)begin, begin ? path : "");
    if (begin == 0)
        memcpy(folder, ".", 2);
    return ht_is_dot(s->name) ? -EINVAL : 0;
}

enum { TRIES = 16 };

/* Another user of the directory above may have put another one in its place, with something in it or open to others. */
static bool is_new(int dir)
{
    struct stat st;
    struct dirent *e;
    DIR *d;

    if (ht_list_directory(dir, &d) < 0)
        return false;
    bool is = fstat(dir, &st) == 0 && st.st_uid == geteuid() && (st.st_mode & 077) == 0;
    while (is && (e = readdir(d)))
        is = ht_is_dot(e->d_name);
    closedir(d);
    return is;
}

/* -ESTALE: another directory stands in its place. */
static int make_one(struct ht_staging *s)
{
    uint32_t number;
    int rc = ht_random(&number, sizeof(number));

    if (rc < 0)
        return rc;
    snprintf(s->temporary, sizeof(s->temporary), PREFIX "%08x", number);
    if (mkdirat(s->parent, s->temporary, 0700) < 0)
        return errno == EEXIST ? -EAGAIN : -errno;
    s->dir = openat(s->parent, s->temporary, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (s->dir < 0)
        return errno == ENOENT ? -EAGAIN : -errno;
    if (flock(s->dir, LOCK_EX | LOCK_NB) < 0)
        rc = errno == EWOULDBLOCK ? -EAGAIN : -errno;
    else if (!is_there(s->parent, s->temporary, s->dir))
        rc = -EAGAIN;
    else if (!is_new(s->dir))
        rc = -ESTALE;
    else if (fsetxattr(s->dir, HT_STAGING_ATTRIBUTE, s->temporary, strlen(s->temporary), 0) < 0 || fsync(s->dir) < 0)
        rc = -errno;
    if (rc < 0) {
        close(s->dir);
        s->dir = -1;
        (void)unlinkat(s->parent, s->temporary, AT_REMOVEDIR);
    }
    return rc;
}

static int make(struct ht_staging *s)
{
    int rc = -EAGAIN;

    for (unsigned i = 0; rc == -EAGAIN && i < TRIES; i++)
        rc = make_one(s);
    return rc;
}

int ht_staging_make_model(struct ht_staging *s, const char *path)
{
    int rc = mkdirat(s->dir, MODEL, 0700) < 0 ? -errno : 0;

    if (rc == 0)
        return ht_staging_open_model(s, path);
    ht_error("%s: %s", path, strerror(-rc));
    return rc;
}

int ht_staging_open_model(struct ht_staging *s, const char *path)
{
    s->model = openat(s->dir, MODEL, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (s->model >= 0)
        return 0;
    int rc = -errno;
    if (rc == -ENOENT)
        ht_error("%s: somebody moved %s away", path, s->temporary);
    else
        ht_error("%s: %s", path, strerror(-rc));
    return rc;
}

/* Is the directory a model root, or below one? Gradients are there alone. */
static bool is_in_model(int dir)
{
    return faccessat(dir, HT_CTL_DIR "/grad", F_OK, AT_EACCESS) == 0;
}

int ht_staging_begin(struct ht_staging *s, const char *path)
{
    char folder[PATH_MAX];
    struct stat st;
    int rc;

    *s = (struct ht_staging){.parent = -1, .dir = -1, .model = -1};
    rc = split(s, path, folder);
    if (rc == 0) {
        s->parent = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        rc = s->parent < 0 ? -errno : 0;
    }
    if (rc == 0 && ht_cmd_check_mount(folder) < 0) { /* has printed why */
        ht_staging_end(s);
        return -ENOTSUP;
    }
    if (rc == 0 && is_in_model(s->parent)) {
        ht_error("%s lies in a model; a step is received into a directory outside of model roots", path);
        ht_staging_end(s);
        return -EINVAL;
    }
    if (rc == 0 && fstatat(s->parent, s->name, &st, AT_SYMLINK_NOFOLLOW) == 0)
        rc = -EEXIST;
    if (rc == 0) {
        remove_all_old(s);
        rc = make(s);
    }
    if (rc == -EEXIST)
        ht_error("%s is there already; a step is received into a new directory", path);
    else if (rc == -ESTALE)
        ht_error("%s: another directory stands in the place of the hidden one", path);
    else if (rc < 0)
        ht_error("%s: %s", path, strerror(-rc));
    if (rc < 0)
        ht_staging_end(s);
    return rc;
}

/* No other user can have changed what is in the directory: it is private. But the directory itself may have gone. */
static int rename_to_name(const struct ht_staging *s)
{
    if (!is_there(s->parent, s->temporary, s->dir) || !is_there(s->dir, MODEL, s->model))
        return -ESTALE;
    return renameat2(s->dir, MODEL, s->parent, s->name, RENAME_NOREPLACE) < 0 ? -errno : 0;
}

int ht_staging_publish(struct ht_staging *s, const char *path)
{
    int rc = rename_to_name(s);

    if (rc == 0 && fsync(s->parent) < 0) {
        rc = -errno;
        (void)renameat2(s->parent, s->name, s->dir, MODEL, RENAME_NOREPLACE);
    } else if (rc == 0) {
        (void)unlinkat(s->parent, s->temporary, AT_REMOVEDIR); /* empty: if this fails, the next program does it */
    }
    s->published = rc == 0;
    if (rc == -ESTALE)
        ht_error("%s: the step cannot get its name: somebody moved %s away", path, s->temporary);
    else if (rc < 0)
        ht_error("%s: the step cannot get its name: %s", path, strerror(-rc));
    return rc;
}

void ht_staging_drop(struct ht_staging *s)
{
    int rc = remove_with_model(s->parent, s->temporary, s->dir);

    if (rc < 0)
        ht_error("%s is left, and can be removed: %s", s->temporary, strerror(-rc));
}

void ht_staging_end(struct ht_staging *s)
{
    if (s->model >= 0)
        close(s->model);
    if (s->dir >= 0)
        close(s->dir);
    if (s->parent >= 0)
        close(s->parent);
    s->parent = s->dir = s->model = -1;
}
