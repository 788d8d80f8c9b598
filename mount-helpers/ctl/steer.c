/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steer.c - commands that are lines of a .hitrain/ctl: `hitrainctl step`, `abort`, `wait`, `reset` and `drop` of a
 * model root or a parameter's directory; `prefetch` and `evict` of the mount's root.
 */
#include "mount-helpers/ctl/ctl.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiering/base/json.h"
#include <hitrain/words.h>

/* The directory of a file, and its name inside path. -EINVAL, and prints why: the name cannot stand in a command. */
static int split(char *path, char **out_name)
{
    char *slash = strrchr(path, '/');

    *out_name = slash + 1;
    *slash = '\0';
    if (strcmp(*out_name, "*") == 0 || strpbrk(*out_name, "\n\t\r ")) {
        ht_error("%s/%s: a name with blanks or line breaks, or *, cannot stand in a command", path, *out_name);
        return -EINVAL;
    }
    return 0;
}

/* Writes the line to .hitrain/ctl of dir; prints errors with path. */
static int command(const char *path, const char *dir, const char *line)
{
    char control[PATH_MAX + 32];

    snprintf(control, sizeof(control), "%s/" HT_CTL_DIR "/ctl", dir);
    if (access(control, F_OK) != 0 && errno == ENOENT) {
        ht_error("%s is no model root, and not below one (setfattr -n user.hitrain.optimizer makes one)", path);
        return -ENOENT;
    }
    return ht_cmd_command(path, dir, line);
}

/* verb for a directory: followed by for_dir; for a file: with its name, in its directory. */
static int on_file_or_root(const char *verb, const char *for_dir, const char *path)
{
    char point[PATH_MAX], line[PATH_MAX + 32], *whole, *name;
    struct stat st;
    int rc;

    if (ht_cmd_mount_point(path, point) < 0)
        return HT_CMD_FAILED;
    whole = realpath(path, NULL);
    if (!whole || stat(whole, &st) != 0) {
        free(whole);
        ht_cmd_explain(path, -errno);
        return HT_CMD_FAILED;
    }
    if (S_ISDIR(st.st_mode)) {
        snprintf(line, sizeof(line), "%s%s", verb, for_dir);
        rc = command(path, whole, line);
    } else {
        rc = split(whole, &name);
        snprintf(line, sizeof(line), "%s %s", verb, name);
        if (rc == 0)
            rc = command(path, whole, line);
    }
    free(whole);
    return rc < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}

int ht_cmd_wait(const char *path, const struct ht_cmd_options *o)
{
    return on_file_or_root("wait", "", path);
}

int ht_cmd_reset(const char *path, const struct ht_cmd_options *o)
{
    return on_file_or_root("reset", " *", path);
}

int ht_cmd_drop(const char *path, const struct ht_cmd_options *o)
{
    return on_file_or_root("drop", "", path);
}

/* ------------------------------------------------------------ step and abort */

static void report(const char *path, const struct ht_cmd_options *o, const char *done)
{
    struct ht_json j;

    if (!o->json) {
        printf("%s: %s", path, done);
        ht_cmd_put_number(NULL, path, "step");
        ht_cmd_put_number(NULL, path, "durable_step");
        putchar('\n');
        return;
    }
    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", path);
    ht_cmd_put_number(&j, path, "step");
    ht_cmd_put_number(&j, path, "durable_step");
    ht_json_end(&j);
}

int ht_cmd_line(const char *verb, const struct ht_cmd_options *o, char *buf, size_t cap)
{
    const char *full = o->full ? " full" : "";

    if (o->conditional)
        return snprintf(buf, cap, "%s%s if=%llu", verb, full, (unsigned long long)o->step_open);
    return snprintf(buf, cap, "%s%s", verb, full);
}

static int steer(const char *path, const struct ht_cmd_options *o, const char *verb, const char *done)
{
    char line[64];

    if (ht_cmd_check_mount(path) < 0)
        return HT_CMD_FAILED;
    ht_cmd_line(verb, o, line, sizeof(line));
    if (command(path, path, line) < 0)
        return HT_CMD_FAILED;
    report(path, o, done);
    return HT_CMD_OK;
}

int ht_cmd_step(const char *path, const struct ht_cmd_options *o)
{
    return o->async ? steer(path, o, "step async", "the step is being closed")
                    : steer(path, o, "step", "the step has ended");
}

int ht_cmd_abort(const char *path, const struct ht_cmd_options *o)
{
    return steer(path, o, "abort", "back at the last commit");
}

/* ------------------------------------------------------- prefetch and evict */

/* The path below the mount, inside path. NULL, and prints why: it cannot be named in a command. */
static const char *below(const char *path, const char *point)
{
    size_t len = strcmp(point, "/") == 0 ? 0 : strlen(point);

    if (strncmp(path, point, len) != 0 || path[len] != '/' || path[len + 1] == '\0') {
        ht_error("%s is not a file below %s", path, point);
        return NULL;
    }
    if (strchr(path, '\n')) {
        ht_error("%s: a name with a line break cannot stand in a command", path);
        return NULL;
    }
    return path + len + 1;
}

static int move_content(const char *verb, const char *path)
{
    char point[PATH_MAX], line[PATH_MAX + 32];
    char *whole;
    const char *rest;
    int rc;

    if (ht_cmd_mount_point(path, point) < 0)
        return HT_CMD_FAILED;
    whole = realpath(path, NULL);
    rest = whole ? below(whole, point) : NULL;
    if (!rest) {
        free(whole);
        return HT_CMD_FAILED;
    }
    snprintf(line, sizeof(line), "%s %s", verb, rest);
    free(whole);
    rc = ht_cmd_command(path, point, line);
    return rc < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}

int ht_cmd_prefetch(const char *path, const struct ht_cmd_options *o)
{
    return move_content("prefetch", path);
}

int ht_cmd_evict(const char *path, const struct ht_cmd_options *o)
{
    return move_content("evict", path);
}
