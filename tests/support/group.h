/* SPDX-License-Identifier: Apache-2.0 */
/* group.h - a control group with a limit, for the test that enters it. */
#pragma once

#include <check.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct group {
    char parent[64], dir[128];
    bool v2;
};

static inline bool group_write(const char *dir, const char *name, const char *text)
{
    char path[256];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "we");
    if (!f)
        return false;
    bool ok = fputs(text, f) >= 0;
    return fclose(f) == 0 && ok;
}

static inline bool group_move(const char *dir)
{
    char pid[32];

    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    return group_write(dir, "cgroup.procs", pid);
}

static inline bool group_try(const char *parent, bool v2, const char *file, const char *limit, struct group *out)
{
    char path[256];

    out->v2 = v2;
    snprintf(out->parent, sizeof(out->parent), "%s", parent);
    snprintf(out->dir, sizeof(out->dir), "%s/hitrain-test-%d", parent, (int)getpid());
    if (mkdir(out->dir, 0755) != 0)
        return false;
    snprintf(path, sizeof(path), "%s/%s", out->dir, file);
    if (access(path, W_OK) == 0 && group_write(out->dir, file, limit) && group_move(out->dir))
        return true;
    rmdir(out->dir);
    return false;
}

/* Below one of the two usual places. False, and a line, where none can be made. */
static inline bool group_enter(const char *controller, const char *v1_file, const char *v1_limit, const char *v2_file,
                               const char *v2_limit, struct group *out)
{
    char v1[64];

    snprintf(v1, sizeof(v1), "/sys/fs/cgroup/%s", controller);
    if (group_try(v1, false, v1_file, v1_limit, out) || group_try("/sys/fs/cgroup", true, v2_file, v2_limit, out))
        return true;
    printf("skipped: no cgroup with %s or %s can be made here\n", v1_file, v2_file);
    return false;
}

static inline void group_leave(const struct group *g)
{
    ck_assert(group_move(g->parent));
    ck_assert_int_eq(rmdir(g->dir), 0);
}
