/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steps.c - steps of a model root: `hitrainctl snapshot`, `rollback`, `clone` and `forget` of those that it keeps, and
 * `delta`, which prints what a step has changed.
 */
#include "mount-helpers/ctl/ctl.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "tiering/sys/mounts.h"
#include <hitrain/words.h>

/* A word of a line for the daemon: a blank or the end of the line would begin another one. */
static bool is_name(const char *root, const char *name)
{
    size_t len = strcspn(name, "/ \t\r\n");

    if (len && name[len] == '\0' && strcmp(name, ".") != 0 && strcmp(name, "..") != 0)
        return true;
    return ht_fail(false, "%s: this is no name of a kept step: %s", root, name);
}

/* The job of the newest kept step that a vault has, too, or "JOB". */
static void find_job(const char *root, char out[NAME_MAX + 1])
{
    struct ht_cmd_line l;
    char *text, *save;

    snprintf(out, NAME_MAX + 1, "JOB");
    if (ht_hidden_text(root, "kept", &text))
        return;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        if (ht_cmd_parse_json(line, &l) == 0 && ht_cmd_value(&l, "archived")[0])
            snprintf(out, NAME_MAX + 1, "%s", ht_cmd_value(&l, "archived"));
    free(text);
}

/* A full store gives up steps that a vault has: it is there, if it ever was here. */
static int lacks(const char *root, const char *name)
{
    char job[NAME_MAX + 1];

    if (strspn(name, "0123456789") != strlen(name))
        return ht_fail(-ENOENT, "%s: there is no kept step %s; `hitrainctl steps` lists them", root, name);
    find_job(root, job);
    return ht_fail(-ENOENT,
                   "%s: there is no kept step %s; `hitrainctl steps` lists them, with --vault=URL/%s those of a vault, "
                   "and `hitrainctl restore URL/%s@%s DIR` brings one back",
                   root, name, job, job, name);
}

/* The number of the step that a kept step holds. -errno: a message is printed. */
static int kept_step(const char *root, const char *name, uint64_t *out_step)
{
    char path[PATH_MAX], *text, *end;
    int n = snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/snap/%s", root, name);

    if (!is_name(root, name))
        return -EINVAL;
    int rc = n < 0 || (size_t)n >= sizeof(path) ? -ENAMETOOLONG : ht_cmd_attribute(path, "step", true, &text);
    if (rc < 0)
        return rc == -ENOENT ? lacks(root, name) : ht_cmd_explain(path, rc);
    errno = 0;
    *out_step = strtoull(text, &end, 10);
    rc = errno || end == text || *end != '\0' ? ht_cmd_explain(root, -EPROTO) : 0;
    free(text);
    return rc;
}

/* ----------------------------------------------------------------- commands */

/* Sends VERB NAME. */
static int command(const char *root, const char *verb, const char *name)
{
    char line[PATH_MAX];

    if (!is_name(root, name))
        return -EINVAL;
    snprintf(line, sizeof(line), "%s %s", verb, name);
    return ht_cmd_command(root, root, line);
}

/* The newest kept step that has no name but its number. */
static int newest(const char *root, char out[NAME_MAX + 1])
{
    char folder[PATH_MAX];
    int n = snprintf(folder, sizeof(folder), "%s/" HT_CTL_DIR "/snap", root);
    DIR *d = n > 0 && (size_t)n < sizeof(folder) ? opendir(folder) : NULL;
    struct dirent *e;

    out[0] = '\0';
    if (!d)
        return -errno;
    while ((e = readdir(d))) /* the oldest first */
        if (strspn(e->d_name, "0123456789") == strlen(e->d_name))
            snprintf(out, NAME_MAX + 1, "%s", e->d_name);
    closedir(d);
    return out[0] != '\0' ? 0 : -ENOENT;
}

/* The model may have taken another step by now: the number is that of the kept one. */
static int report_kept(const char *root, const struct ht_cmd_options *o, const char *did, const char *name)
{
    char number[NAME_MAX + 1];
    struct ht_json j;
    uint64_t step = 0;
    int rc = name ? 0 : newest(root, number);

    if (rc < 0)
        return ht_cmd_explain(root, rc), HT_CMD_FAILED;
    if (kept_step(root, name ? name : number, &step) < 0)
        return HT_CMD_FAILED;
    if (o->json) {
        ht_cmd_json_begin(&j, "path", root);
        ht_json_u64(&j, "step", step);
        ht_json_str(&j, "name", name ? name : number);
        ht_json_end(&j);
    } else {
        bool named = name && strspn(name, "0123456789") != strlen(name);
        printf("%s: %s step %llu%s%s\n", root, did, (unsigned long long)step, named ? " as " : "", named ? name : "");
    }
    return HT_CMD_OK;
}

int ht_cmd_snapshot(const char *path, const struct ht_cmd_options *o)
{
    const char *name = o->words[0];
    int rc = name ? command(path, "snapshot", name) : ht_cmd_command(path, path, "snapshot");

    return rc < 0 ? HT_CMD_FAILED : report_kept(path, o, "kept", name);
}

int ht_cmd_rollback(const char *path, const struct ht_cmd_options *o)
{
    int rc = command(path, "rollback", o->words[0]);

    if (rc == -ENOENT)
        (void)lacks(path, o->words[0]);
    return rc < 0 ? HT_CMD_FAILED : report_kept(path, o, "back at", o->words[0]);
}

int ht_cmd_forget(const char *path, const struct ht_cmd_options *o)
{
    int status = HT_CMD_OK;

    if (o->all)
        return command(path, "forget", "*") < 0 ? HT_CMD_FAILED : HT_CMD_OK;
    for (char *const *w = o->words; *w; w++)
        if (command(path, "forget", *w) < 0)
            status = HT_CMD_FAILED;
    return status;
}

/* -------------------------------------------------------------------- clone */

/* The path of a directory from the root of its file system, without a slash before it: "" for the root. */
static int place_in_store(const char *handle, const char *real, char *out, size_t cap)
{
    struct ht_mount_entry m;
    int rc = ht_mount_of_path(handle, &m);

    if (rc)
        return rc;
    size_t len = strcmp(m.point, "/") == 0 ? 0 : strlen(m.point);
    if (strncmp(real, m.point, len) != 0 || (real[len] != '\0' && real[len] != '/'))
        return -EXDEV;
    const char *root = m.root + (m.root[0] == '/'), *rest = real + len + (real[len] == '/');
    rc = snprintf(out, cap, "%s%s%s", root, root[0] && rest[0] ? "/" : "", rest);
    return (size_t)rc < cap ? 0 : -ENAMETOOLONG;
}

/*
 * The store knows nothing of mounts: it takes the place of the new name from the root of the file system, and follows
 * no symlink. Nor does this: the kernel says where the open directory is.
 */
static int place_at(int dir, const char *name, char *out, size_t cap)
{
    char handle[64], real[PATH_MAX], place[PATH_MAX];

    snprintf(handle, sizeof(handle), "/proc/self/fd/%d", dir);
    ssize_t n = readlink(handle, real, sizeof(real));
    if (n < 0 || n == sizeof(real))
        return n < 0 ? -errno : -ENAMETOOLONG;
    real[n] = '\0';
    int rc = place_in_store(handle, real, place, sizeof(place));
    if (rc == 0 && (size_t)snprintf(out, cap, "%s%s%s", place, place[0] ? "/" : "", name) >= cap)
        rc = -ENAMETOOLONG;
    return rc;
}

/*
 * A model of its own from a kept step: a new entry of an open directory of the same store. Messages name path. 0 or
 * -errno, with a message printed.
 */
static int kept_clone_at(const char *root, const char *name, int dir, const char *as, const char *path)
{
    char place[PATH_MAX], line[2 * PATH_MAX];
    struct stat st;
    int rc = fstat(dir, &st) < 0 ? -errno : place_at(dir, as, place, sizeof(place));

    if (rc < 0)
        return ht_cmd_explain(path, rc);
    if (strchr(" \t", place[0]) || strchr(" \t", place[strlen(place) - 1]))
        return ht_fail(-EINVAL, "%s: a name that begins or ends with a blank cannot be given to the store", path);
    if (strpbrk(place, "\r\n")) /* what follows would be another command */
        return ht_fail(-EINVAL, "%s: a path with a line break cannot be given to the store", path);
    /* Whoever may move the directory may do so now: the number says which one is meant. */
    snprintf(line, sizeof(line), "clone_in %llu %s %s", (unsigned long long)st.st_ino, name, place);
    return ht_cmd_command(root, root, line);
}

/* The directory of path, open; as: the name in it. A descriptor, or -errno with a message printed. */
static int open_folder(const char *root, const char *path, char as[NAME_MAX + 1])
{
    char folder[PATH_MAX], point[PATH_MAX];
    struct stat own, other;
    size_t len = strlen(path), begin;

    while (len > 1 && path[len - 1] == '/')
        len--;
    for (begin = len; begin > 0 && path[begin - 1] != '/';)
        begin--;
    if (len == begin || len >= sizeof(folder) || len - begin > NAME_MAX || strpbrk(path, "\r\n"))
        return ht_fail(-EINVAL, "%s: this cannot be the name of a new directory", path);
    snprintf(as, NAME_MAX + 1, "%.*s", (int)(len - begin), path + begin);
    snprintf(folder, sizeof(folder), "%.*s", begin ? (int)begin : 1, begin ? path : ".");
    int dir = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int rc = dir < 0 || fstat(dir, &other) != 0 || stat(root, &own) != 0 ? -errno : 0;
    if (!rc && own.st_dev == other.st_dev)
        return dir;
    if (rc)
        ht_error("%s: %s", folder, strerror(-rc));
    else if (ht_cmd_mount_point(folder, point) == 0)
        ht_error("%s is in another store than %s: a step goes there with archive and restore", folder, root);
    if (dir >= 0)
        close(dir);
    return rc ? rc : -EXDEV;
}

/* The step of a new model: its directory may be one that this user cannot open. */
static int report_clone(const char *root, const struct ht_cmd_options *o, const char *dir)
{
    char step[32];
    ssize_t n = getxattr(dir, HT_XATTR_PREFIX "step", step, sizeof(step) - 1);
    struct ht_json j;

    step[n < 0 ? 0 : n] = '\0';
    if (o->json) {
        ht_cmd_json_begin(&j, "path", dir);
        ht_json_str(&j, "of", root);
        if (n > 0)
            ht_json_u64(&j, "step", strtoull(step, NULL, 10));
        ht_json_end(&j);
    } else if (n > 0) {
        printf("%s: a model of its own, at step %.*s of %s\n", dir, (int)strcspn(step, "\n"), step, root);
    } else {
        printf("%s: a model of its own, of %s\n", dir, root);
    }
    return HT_CMD_OK;
}

int ht_cmd_clone(const char *path, const struct ht_cmd_options *o)
{
    const char *name = o->words[0], *dir = o->words[1];
    char as[NAME_MAX + 1];
    int folder = is_name(path, name) ? open_folder(path, dir, as) : -EINVAL;

    if (folder < 0)
        return HT_CMD_FAILED;
    int rc = kept_clone_at(path, name, folder, as, dir);
    close(folder);
    return rc < 0 ? HT_CMD_FAILED : report_clone(path, o, dir);
}

/* -------------------------------------------------------------------- delta */

enum { PIECE_BYTES = 64 << 10 };

/* The number of a step, which is the name of its file. */
static bool is_number(const char *text)
{
    size_t digits = strspn(text, "0123456789");

    return digits && digits < 20 && text[digits] == '\0' && text[0] != '0';
}

/* Why there is no such step; there are others, or none. */
static void explain_missing(const char *root, const char *step)
{
    unsigned long long first = 0, last = 0;
    char folder[PATH_MAX];
    int n = snprintf(folder, sizeof(folder), "%s/" HT_CTL_DIR "/delta", root);
    DIR *d = n > 0 && (size_t)n < sizeof(folder) ? opendir(folder) : NULL;

    for (const struct dirent *e; d && (e = readdir(d));) {
        unsigned long long number = is_number(e->d_name) ? strtoull(e->d_name, NULL, 10) : 0;
        first = number && (!first || number < first) ? number : first;
        last = number > last ? number : last;
    }
    if (d)
        closedir(d);
    if (last)
        ht_error("%s: step %s has no delta; those of %llu to %llu are there", root, step, first, last);
    else
        ht_error("%s: no step has a delta: " HT_XATTR_PREFIX "optimizer needs delta=on, and a step after that", root);
}

static int copy_out(int fd, const char *path)
{
    char buf[PIECE_BYTES];
    ssize_t n;

    do
        n = read(fd, buf, sizeof(buf));
    while (n > 0 && fwrite(buf, 1, (size_t)n, stdout) == (size_t)n);
    if (n < 0)
        return ht_cmd_explain(path, -errno);
    if (n > 0 || fflush(stdout))
        return ht_fail(-EIO, "standard output: %s", strerror(errno));
    return 0;
}

int ht_cmd_delta(const char *root, const struct ht_cmd_options *o)
{
    const char *step = o->words[0];
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/delta/%s", root, step);

    if (!is_number(step) || n < 0 || (size_t)n >= sizeof(path))
        return ht_fail(HT_CMD_FAILED, "%s: this is no number of a step: %s", root, step);
    if (isatty(STDOUT_FILENO))
        return ht_fail(HT_CMD_FAILED, "standard output is a terminal: give a file, as in > delta.safetensors");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        explain_missing(root, step);
    else if (fd < 0)
        ht_cmd_explain(path, -errno);
    int rc = fd < 0 ? -ENOENT : copy_out(fd, path);
    if (fd >= 0)
        close(fd);
    return rc ? HT_CMD_FAILED : HT_CMD_OK;
}
