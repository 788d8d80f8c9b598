/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem_available.c - how much memory this process may still use.
 *
 * MemAvailable of the machine, and for each cgroup from the process's own to the root of the mounted tree, both
 * hierarchies (v1 "memory" and v2): limit minus use, where page cache that the kernel can drop counts as unused.
 * Returns the smallest. No state; any thread.
 */
#include "tiering/sys/mem.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

struct hierarchy {
    bool v2;
    char mount[PATH_MAX]; /* where it is mounted */
    char root[PATH_MAX];  /* which of its groups the mount shows as its top */
};

static FILE *open_in(const char *dir, const char *file)
{
    char path[PATH_MAX + 64];

    if (snprintf(path, sizeof(path), "%s/%s", dir, file) >= (int)sizeof(path))
        return NULL;
    return fopen(path, "re");
}

/* "max" and unreadable files are no number. */
static bool read_number(const char *dir, const char *file, uint64_t *out)
{
    FILE *f = open_in(dir, file);
    bool ok;

    if (!f)
        return false;
    ok = fscanf(f, "%" SCNu64, out) == 1;
    fclose(f);
    return ok;
}

/* The value after "key value" or "key: value", 0 when there is none. */
static uint64_t read_keyed(const char *dir, const char *file, const char *key)
{
    FILE *f = open_in(dir, file);
    char line[256];
    uint64_t value = 0;
    size_t n = strlen(key);

    if (!f)
        return 0;
    while (fgets(line, sizeof(line), f)) {
        if (strncmp(line, key, n) == 0 && (line[n] == ' ' || line[n] == ':')) {
            value = strtoull(line + n + 1, NULL, 10);
            break;
        }
    }
    fclose(f);
    return value;
}

static uint64_t left_in_group(const char *dir, bool v2)
{
    uint64_t limit, used, droppable;

    if (!read_number(dir, v2 ? "memory.max" : "memory.limit_in_bytes", &limit) ||
        !read_number(dir, v2 ? "memory.current" : "memory.usage_in_bytes", &used))
        return UINT64_MAX;
    droppable = read_keyed(dir, "memory.stat", v2 ? "inactive_file" : "total_inactive_file");
    used -= ht_min_u64(used, droppable);
    return limit > used ? limit - used : 0;
}

/* From the group at `path` (as /proc/self/cgroup names it) up to the top of the mount. */
static uint64_t left_up_from(const struct hierarchy *h, const char *path)
{
    char dir[2 * PATH_MAX];
    size_t mount_len = strlen(h->mount), root_len = strlen(h->root);
    uint64_t left;

    if (strcmp(h->root, "/") == 0)
        root_len = 0;
    /* A group outside the mounted tree (a container without a namespace): only the top is visible. */
    if (strncmp(path, h->root, root_len) == 0 && (path[root_len] == '/' || path[root_len] == '\0'))
        path += root_len;
    else
        path = "";
    snprintf(dir, sizeof(dir), "%s%s", h->mount, path);
    left = left_in_group(dir, h->v2);
    for (char *slash = strrchr(dir, '/'); slash && (size_t)(slash - dir) >= mount_len; slash = strrchr(dir, '/')) {
        *slash = '\0';
        left = ht_min_u64(left, left_in_group(dir, h->v2));
    }
    return left;
}

/* A word of a comma-separated list. */
static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);

    for (const char *at = list; (at = strstr(at, word)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == ',' || at[n] == '\0' || at[n] == '\n'))
            return true;
    return false;
}

/* Where the v2 hierarchy, or the v1 one of the memory controller, is mounted. */
static bool find_hierarchy(bool v2, struct hierarchy *out)
{
    FILE *f = fopen("/proc/self/mountinfo", "re");
    char *line = NULL, *rest, type[64], options[1024];
    size_t cap = 0;
    bool found = false;

    if (!f)
        return false;
    while (!found && getline(&line, &cap, f) > 0) {
        rest = strstr(line, " - ");
        if (!rest || sscanf(rest, " - %63s %*s %1023s", type, options) != 2)
            continue;
        if (v2 ? strcmp(type, "cgroup2") != 0 : strcmp(type, "cgroup") != 0 || !has_word(options, "memory"))
            continue;
        out->v2 = v2;
        /* 4095: PATH_MAX - 1 */
        found = sscanf(line, "%*d %*d %*s %4095s %4095s", out->root, out->mount) == 2;
    }
    free(line);
    fclose(f);
    return found;
}

/* The group of this process: "0::PATH" for v2, "N:...,memory,...:PATH" for v1. */
static bool find_group(bool v2, char *path, size_t cap)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    char *line = NULL, *names, *at;
    size_t line_cap = 0;
    bool found = false;

    if (!f)
        return false;
    while (!found && getline(&line, &line_cap, f) > 0) {
        names = strchr(line, ':');
        at = names ? strchr(names + 1, ':') : NULL;
        if (!at)
            continue;
        *at++ = '\0';
        names++;
        at[strcspn(at, "\n")] = '\0';
        if (v2 ? *names == '\0' : has_word(names, "memory"))
            found = snprintf(path, cap, "%s", at) < (int)cap;
    }
    free(line);
    fclose(f);
    return found;
}

static uint64_t left_in_hierarchy(bool v2)
{
    struct hierarchy h;
    char path[PATH_MAX];

    if (!find_hierarchy(v2, &h) || !find_group(v2, path, sizeof(path)))
        return UINT64_MAX;
    return left_up_from(&h, path);
}

uint64_t ht_mem_available(void)
{
    uint64_t machine = read_keyed("/proc", "meminfo", "MemAvailable") * HT_KIB;

    return ht_min_u64(machine, ht_min_u64(left_in_hierarchy(false), left_in_hierarchy(true)));
}
