/* SPDX-License-Identifier: Apache-2.0 */
/*
 * residency.c - `hitrainctl prefetch` and `evict`: the content of the DRAM tier, through .hitrain/ctl of the mount's
 * root.
 */
#include "mount-helpers/ctl/ctl.h"

#include <stdio.h>
#include <stdlib.h>

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

static int run(const char *verb, const char *path)
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
    return run("prefetch", path);
}

int ht_cmd_evict(const char *path, const struct ht_cmd_options *o)
{
    return run("evict", path);
}
