/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/sys/processors.h"

#include <inttypes.h>
#include <sched.h>
#include <unistd.h>

#include "tiering/sys/quota.h"

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
    struct ht_quota quota;

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
