/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/sys/processors.h"

#include <inttypes.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_US UINT64_C(1000)

static bool is_in(const struct ht_processors *p, unsigned cpu)
{
    return cpu < HT_PROCESSORS_MAX && (p->may[cpu / 64] >> cpu % 64 & 1);
}

void ht_processors_of_thread(struct ht_processors *out)
{
    cpu_set_t set;
    bool known = !sched_getaffinity(0, sizeof(set), &set);
    long online = known ? 0 : sysconf(_SC_NPROCESSORS_ONLN);

    *out = (struct ht_processors){0};
    for (unsigned cpu = 0; cpu < HT_PROCESSORS_MAX; cpu++)
        if (known ? CPU_ISSET(cpu, &set) : cpu < (unsigned)online)
            out->may[cpu / 64] |= UINT64_C(1) << cpu % 64;
}

unsigned ht_processors_count(const struct ht_processors *p)
{
    unsigned n = 0;

    for (unsigned i = 0; i < HT_ARRAY_SIZE(p->may); i++)
        n += (unsigned)__builtin_popcountll(p->may[i]);
    return n;
}

unsigned ht_processors_usable(void)
{
    struct ht_processors p;
    struct ht_cpu_quota quota;

    ht_processors_of_thread(&p);
    ht_quota_find(&quota);
    uint64_t percent = ht_quota_percent(&quota), count = ht_processors_count(&p);
    if (percent != HT_QUOTA_NONE)
        count = ht_min_u64(count, ht_div_up(percent, 100));
    return (unsigned)ht_max_u64(count, 1);
}

/* Lines of processors come first. */
int ht_processors_idle_ms(const struct ht_processors *p, uint64_t *out_ms)
{
    char line[256];
    uint64_t idle, waiting, sum = 0;
    unsigned cpu, seen = 0;
    long per_s = sysconf(_SC_CLK_TCK);
    FILE *f = fopen("/proc/stat", "re");

    if (!f)
        return -EIO;
    while (fgets(line, sizeof(line), f) && strncmp(line, "cpu", 3) == 0) {
        if (sscanf(line, "cpu%u %*u %*u %*u %" SCNu64 " %" SCNu64, &cpu, &idle, &waiting) != 3 || !is_in(p, cpu))
            continue;
        sum += idle + waiting;
        seen++;
    }
    fclose(f);
    if (!seen || per_s <= 0)
        return -EIO;
    *out_ms = sum * 1000 / (uint64_t)per_s;
    return 0;
}

/* ------------------------------------------------------------------ quotas */

void ht_quota_find(struct ht_cpu_quota *out)
{
    *out = (struct ht_cpu_quota){0};
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

uint64_t ht_quota_percent(const struct ht_cpu_quota *q)
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

uint64_t ht_quota_left_percent(struct ht_cpu_quota *q, uint64_t ns)
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
