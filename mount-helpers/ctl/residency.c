/* SPDX-License-Identifier: Apache-2.0 */
/* residency.c - `hitrainctl prefetch` and `evict`: what the DRAM tier holds, through .hitrain/ctl of the mount's root. */
#include "mount-helpers/ctl/ctl.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <hitrain/words.h>

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

/* 0, or -errno with the daemon's reason, if it gave one, in answer. */
static int command(const char *control, const char *line, char *answer, size_t cap)
{
    int fd = open(control, O_RDWR | O_CLOEXEC), ret = 0;
    ssize_t n;

    answer[0] = '\0';
    if (fd < 0)
        return -errno;
    if (write(fd, line, strlen(line)) < 0)
        ret = -errno;
    n = ret < 0 ? read(fd, answer, cap - 1) : 0;
    answer[n > 0 ? n : 0] = '\0';
    answer[strcspn(answer, "\n")] = '\0';
    close(fd);
    return ret;
}

static int run(const char *verb, const char *path)
{
    char point[PATH_MAX], control[PATH_MAX + 32], line[PATH_MAX + 32], answer[512];
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
    snprintf(control, sizeof(control), "%s/" HT_CTL_DIR "/ctl", point);
    snprintf(line, sizeof(line), "%s %s\n", verb, rest);
    free(whole);
    ret = command(control, line, answer, sizeof(answer));
    if (ret < 0 && answer[0] != '\0')
        ht_error("%s: %s", path, answer);
    else if (ret < 0)
        ht_error("%s: %s", control, strerror(-ret));
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
