/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/sys/cgroup.h"

#include <inttypes.h>

struct hierarchy {
    char mount[PATH_MAX]; /* where it is mounted */
    char root[PATH_MAX];  /* which of its groups the mount shows as its top */
};

/* A word of a comma-separated list. */
static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);

    for (const char *at = list; (at = strstr(at, word)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == ',' || at[n] == '\0' || at[n] == '\n'))
            return true;
    return false;
}

/* Where the v2 hierarchy, or the v1 one of the controller, is mounted. */
static bool find_hierarchy(bool v2, const char *controller, struct hierarchy *out)
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
        if (v2 ? strcmp(type, "cgroup2") != 0 : strcmp(type, "cgroup") != 0 || !has_word(options, controller))
            continue;
        /* 4095: PATH_MAX - 1 */
        found = sscanf(line, "%*d %*d %*s %4095s %4095s", out->root, out->mount) == 2;
    }
    free(line);
    fclose(f);
    return found;
}

/* The group of this process: "0::PATH" for v2, "N:...,CONTROLLER,...:PATH" for v1. */
static bool find_group(bool v2, const char *controller, char *path, size_t cap)
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
        if (v2 ? *names == '\0' : has_word(names, controller))
            found = snprintf(path, cap, "%s", at) < (int)cap;
    }
    free(line);
    fclose(f);
    return found;
}

bool ht_cgroup_find(bool v2, const char *controller, struct ht_cgroup *out)
{
    struct hierarchy h;
    char group[PATH_MAX], *path = group;

    if (!find_hierarchy(v2, controller, &h) || !find_group(v2, controller, group, sizeof(group)))
        return false;
    size_t root_len = strcmp(h.root, "/") == 0 ? 0 : strlen(h.root);
    /* A group outside the mounted tree (a container without a namespace): only the top is visible. */
    if (strncmp(path, h.root, root_len) == 0 && (path[root_len] == '/' || path[root_len] == '\0'))
        path += root_len;
    else
        *path = '\0';
    out->v2 = v2;
    out->top = strlen(h.mount);
    return snprintf(out->dir, sizeof(out->dir), "%s%s", h.mount, path) < (int)sizeof(out->dir);
}

bool ht_cgroup_up(struct ht_cgroup *g)
{
    char *slash = strrchr(g->dir, '/');

    if (!slash || (size_t)(slash - g->dir) < g->top)
        return false;
    *slash = '\0';
    return true;
}

static FILE *open_in(const struct ht_cgroup *g, const char *file)
{
    char path[PATH_MAX + 64];

    if (snprintf(path, sizeof(path), "%s/%s", g->dir, file) >= (int)sizeof(path))
        return NULL;
    return fopen(path, "re");
}

bool ht_cgroup_numbers(const struct ht_cgroup *g, const char *file, uint64_t *out, uint64_t *out_second)
{
    int64_t first = -1, second = -1;
    FILE *f = open_in(g, file);

    if (!f)
        return false;
    int n = fscanf(f, "%" SCNd64 " %" SCNd64, &first, &second);
    fclose(f);
    if (n < (out_second ? 2 : 1) || first < 0 || (out_second && second < 0))
        return false;
    *out = (uint64_t)first;
    if (out_second)
        *out_second = (uint64_t)second;
    return true;
}

bool ht_cgroup_keyed(const struct ht_cgroup *g, const char *file, const char *key, uint64_t *out)
{
    FILE *f = open_in(g, file);
    char line[256];
    size_t n = strlen(key);
    bool found = false;

    if (!f)
        return false;
    while (!found && fgets(line, sizeof(line), f)) {
        found = strncmp(line, key, n) == 0 && line[n] == ' ';
        if (found)
            *out = strtoull(line + n + 1, NULL, 10);
    }
    fclose(f);
    return found;
}
