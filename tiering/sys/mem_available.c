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

#include "tiering/sys/cgroup.h"

static uint64_t machine_bytes(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    char line[256];
    uint64_t kib = 0;

    if (!f)
        return 0;
    while (fgets(line, sizeof(line), f) && sscanf(line, "MemAvailable: %" SCNu64, &kib) != 1)
        continue;
    fclose(f);
    return kib * HT_KIB;
}

static uint64_t left_in_group(const struct ht_cgroup *g)
{
    uint64_t limit, used, droppable = 0;

    if (!ht_cgroup_numbers(g, g->v2 ? "memory.max" : "memory.limit_in_bytes", &limit, NULL) ||
        !ht_cgroup_numbers(g, g->v2 ? "memory.current" : "memory.usage_in_bytes", &used, NULL))
        return UINT64_MAX;
    (void)ht_cgroup_keyed(g, "memory.stat", g->v2 ? "inactive_file" : "total_inactive_file", &droppable);
    used -= ht_min_u64(used, droppable);
    return limit > used ? limit - used : 0;
}

static uint64_t left_in_hierarchy(bool v2)
{
    struct ht_cgroup g;
    uint64_t left = UINT64_MAX;

    for (bool more = ht_cgroup_find(v2, "memory", &g); more; more = ht_cgroup_up(&g))
        left = ht_min_u64(left, left_in_group(&g));
    return left;
}

uint64_t ht_mem_available(void)
{
    return ht_min_u64(machine_bytes(), ht_min_u64(left_in_hierarchy(false), left_in_hierarchy(true)));
}
