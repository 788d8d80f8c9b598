/* SPDX-License-Identifier: Apache-2.0 */
/* residency.c - `hitrainctl prefetch` and `evict`: what the DRAM tier holds, through .hitrain/ctl of the mount's root. */
#include "mount-helpers/ctl/ctl.h"

#include <stdio.h>
#include <stdlib.h>

/* The path below the mount, inside path; NULL and told: it cannot be named in a command. */
static const char *below(const char *path, const char *point)
{
    size_t len = strcmp(point, "/") == 0 ? 0 : strlen(point);

    if (strncmp(path, point, len) != 0 || path[len] != '/' || path[len + 1] == '\0') {
        ht_error("%s is not a file below %s", path, point);
        return NULL;
    }
    if (strchr(path, '\n') != NULL) {
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
    int ret;

    if (ht_ctl_mount_point(path, point) < 0)
        return HT_CTL_FAILED;
    whole = realpath(path, NULL);
    rest = whole != NULL ? below(whole, point) : NULL;
    if (rest == NULL) {
        free(whole);
        return HT_CTL_FAILED;
    }
    snprintf(line, sizeof(line), "%s %s", verb, rest);
    free(whole);
    ret = ht_ctl_command(path, point, line);
    return ret < 0 ? HT_CTL_FAILED : HT_CTL_OK;
}

int ht_ctl_prefetch(const char *path, const struct ht_ctl_options *o)
{
    return run("prefetch", path);
}

int ht_ctl_evict(const char *path, const struct ht_ctl_options *o)
{
    return run("evict", path);
}
