/* SPDX-License-Identifier: Apache-2.0 */
/* mountinfo.c - see mountinfo.h. */
#include "fs/fuse/mountinfo.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

static bool is_octal(const char *p)
{
    return p[0] >= '0' && p[0] <= '3' && p[1] >= '0' && p[1] <= '7' && p[2] >= '0' && p[2] <= '7';
}

/* Spaces and the like stand as \040. */
static void unescape(char *text)
{
    char *to = text;

    for (const char *from = text; *from; to++) {
        if (*from == '\\' && is_octal(from + 1)) {
            *to = (char)((from[1] - '0') << 6 | (from[2] - '0') << 3 | (from[3] - '0'));
            from += 4;
        } else {
            *to = *from++;
        }
    }
    *to = 0;
}

static bool parse(const char *line, const char *path, struct ht_mountinfo *out)
{
    char point[PATH_MAX + 1], number[32], options[256];
    const char *rest = strstr(line, " - ");

    if (!rest || sscanf(line, "%*s %*s %31s %*s %4096s %255s", number, point, options) != 3)
        return false;
    unescape(point);
    if (strcmp(point, path) != 0)
        return false;
    memcpy(out->number, number, sizeof(number));
    memcpy(out->options, options, sizeof(options));
    return sscanf(rest, " - %63s", out->type) == 1;
}

int ht_mountinfo_at(const char *path, struct ht_mountinfo *out)
{
    FILE *file = fopen("/proc/self/mountinfo", "re");
    char *line = NULL;
    size_t cap = 0;
    int r = -ENOENT;

    if (!file)
        return -errno;
    while (getline(&line, &cap, file) > 0) {
        struct ht_mountinfo m;

        /* A later line of the same point is the one on top. */
        if (parse(line, path, &m)) {
            *out = m;
            r = 0;
        }
    }
    free(line);
    fclose(file);
    return r;
}
