/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/sys/quota.h"

#include <time.h>

#define NS_PER_US UINT64_C(1000)

void ht_quota_find(struct ht_quota *out)
{
    *out = (struct ht_quota){0};
    for (unsigned v = 1; v <= HT_QUOTA_HIERARCHIES; v++)
        out->groups += ht_cgroup_find(v == 2, "cpu", &out->group[out->groups]);
}

/* Of one group. */
static uint64_t percent_of(const struct ht_cgroup *g)
{
    uint64_t quota_us, period_us;
    bool there = g->v2 ? ht_cgroup_numbers(g, "cpu.max", &quota_us, &period_us)
                       : ht_cgroup_numbers(g, "cpu.cfs_quota_us", &quota_us, NULL) &&
            ht_cgroup_numbers(g, "cpu.cfs_period_us", &period_us, NULL);

    return there && period_us ? quota_us * 100 / period_us : HT_QUOTA_NONE;
}

static uint64_t used_ns_by(const struct ht_cgroup *g)
{
    struct timespec own;
    uint64_t used;

    if (g->v2 ? ht_cgroup_keyed(g, "cpu.stat", "usage_usec", &used)
              : ht_cgroup_numbers(g, "cpuacct.usage", &used, NULL))
        return g->v2 ? used * NS_PER_US : used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own);
    return (uint64_t)own.tv_sec * UINT64_C(1000000000) + (uint64_t)own.tv_nsec;
}

uint64_t ht_quota_percent(const struct ht_quota *q)
{
    uint64_t least = HT_QUOTA_NONE;

    for (unsigned i = 0; i < q->groups; i++) {
        struct ht_cgroup g = q->group[i];
        do
            least = ht_min_u64(least, percent_of(&g));
        while (ht_cgroup_up(&g));
    }
    return least;
}

/* Of one group since the last look. */
static uint64_t left_of(const struct ht_cgroup *g, uint64_t *used_ns, uint64_t ns)
{
    uint64_t percent = percent_of(g), before = *used_ns;

    if (percent == HT_QUOTA_NONE)
        return percent;
    *used_ns = used_ns_by(g);
    uint64_t used = *used_ns > before ? (*used_ns - before) * 100 / ht_max_u64(ns, 1) : 0;
    return percent > used ? percent - used : 0;
}

uint64_t ht_quota_left_percent(struct ht_quota *q, uint64_t ns)
{
    uint64_t least = HT_QUOTA_NONE;

    for (unsigned i = 0; i < q->groups; i++) {
        struct ht_cgroup g = q->group[i];
        unsigned level = 0;
        do
            least = ht_min_u64(least, left_of(&g, &q->used_ns[i][level], ns));
        while (++level < HT_QUOTA_LEVELS_MAX && ht_cgroup_up(&g));
    }
    return least;
}
