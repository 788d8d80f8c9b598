/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commit.c - `hitrainctl commit`: end the step of a model root and make it durable, or, at the mount's root, make
 * everything outside model roots durable.
 */
#include "mount-helpers/ctl/ctl.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiering/base/log.h"
#include "tiering/base/json.h"

static bool is_model_root(const char *path)
{
    char *text;
    bool is = ht_cmd_attribute(path, "optimizer", true, &text) == 0;

    if (is)
        free(text);
    return is;
}

/* The directory above lies on another file system, or is the same one. */
static bool is_mount_root(int fd)
{
    struct stat here, above;

    return fstat(fd, &here) == 0 && fstatat(fd, "..", &above, 0) == 0 &&
        (here.st_dev != above.st_dev || here.st_ino == above.st_ino);
}

/* Prints the daemon's text about its last refusal. */
static void explain(const char *path, int err)
{
    char *reason;

    if (ht_cmd_attribute(path, "error", true, &reason) == 0 && reason[0] != '\0') {
        ht_error("%s: commit failed: %s: %s", path, strerror(-err), reason);
        free(reason);
        return;
    }
    ht_error("%s: commit failed: %s", path, strerror(-err));
}

/* The page cache first, then the daemon's content. */
static int commit(int fd, bool whole_mount)
{
    if (whole_mount && syncfs(fd) != 0)
        return -errno;
    return fsync(fd) == 0 ? 0 : -errno;
}

static int command(const char *path, const struct ht_cmd_options *o)
{
    char line[64];

    ht_cmd_line("commit", o, line, sizeof(line));
    return ht_cmd_command(path, path, line);
}

static void report(const char *path, const struct ht_cmd_options *o, double seconds, bool root)
{
    struct ht_json j;
    char text[32];

    snprintf(text, sizeof(text), "%.6f", seconds);
    if (!o->json) {
        printf("%s: durable", path);
        if (root) {
            ht_cmd_put_number(NULL, path, "step");
            ht_cmd_put_number(NULL, path, "durable_step");
        }
        printf(", %.3f s\n", seconds);
        return;
    }
    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", path);
    ht_json_bool(&j, "model_root", root);
    if (root) {
        ht_cmd_put_number(&j, path, "step");
        ht_cmd_put_number(&j, path, "durable_step");
    }
    ht_json_word(&j, "seconds", text);
    ht_json_end(&j);
}

int ht_cmd_commit(const char *path, const struct ht_cmd_options *o)
{
    uint64_t began_ns;
    bool root, whole_mount;
    int fd, rc;

    if (ht_cmd_check_mount(path) < 0)
        return HT_CMD_FAILED;
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        ht_error("%s: %s", path,
                 errno == ENOTDIR ? "commit works on a model root or on the mount's root" : strerror(errno));
        return HT_CMD_FAILED;
    }
    root = is_model_root(path);
    whole_mount = is_mount_root(fd);
    if (!root && !whole_mount) {
        ht_error("%s is neither a model root (it has no user.hitrain.optimizer) nor the mount's root", path);
        close(fd);
        return HT_CMD_FAILED;
    }
    bool steered = o->conditional || o->full;
    if (!root && steered) {
        ht_error("%s is no model root: --if and --full are for the steps of one", path);
        close(fd);
        return HT_CMD_FAILED;
    }
    began_ns = ht_now_ns();
    rc = steered ? command(path, o) : commit(fd, whole_mount);
    close(fd);
    if (rc < 0 && steered)
        return HT_CMD_FAILED; /* reported already */
    if (rc < 0)
        explain(path, rc);
    else
        report(path, o, (double)(ht_now_ns() - began_ns) / 1e9, root);
    return rc < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}
