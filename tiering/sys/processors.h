/* SPDX-License-Identifier: Apache-2.0 */
/*
 * processors.h - the processors that a thread may run on: how many this process can keep busy, and for how long they
 * were idle; and the processor time that control groups allow this process (cpu.max, and cpu.cfs_quota_us of v1).
 *
 * Any thread; one at a time has a struct ht_cpu_quota.
 */
#pragma once

#include "tiering/sys/cgroup.h"

enum { HT_PROCESSORS_MAX = 1024 };
struct ht_processors {
    uint64_t may[HT_PROCESSORS_MAX / 64]; /* bits */
};

/* Those that the calling thread may run on, or all if the kernel does not say. */
void ht_processors_of_thread(struct ht_processors *out);
unsigned ht_processors_count(const struct ht_processors *p);
/*
 * So many processors can work for this process at once: those of the calling thread, and not more than the quotas of
 * its control groups allow. At least 1.
 */
unsigned ht_processors_usable(void);
/* Milliseconds for which they were idle, all together, since the machine began. -EIO: the kernel does not say. */
int ht_processors_idle_ms(const struct ht_processors *p, uint64_t *out_ms) HT_MUST_CHECK;

#define HT_QUOTA_NONE UINT64_MAX

/* The groups are the process's own and those above, at the time of ht_quota_find. Quotas may change. */
enum { HT_QUOTA_HIERARCHIES = 2, HT_QUOTA_LEVELS_MAX = 16 };
struct ht_cpu_quota {
    struct ht_cgroup group[HT_QUOTA_HIERARCHIES];
    unsigned groups;
    uint64_t used_ns[HT_QUOTA_HIERARCHIES][HT_QUOTA_LEVELS_MAX]; /* at the last look, from the process's own group on */
};

void ht_quota_find(struct ht_cpu_quota *out);
/* The smallest one, of one processor: 150 allow one and a half. HT_QUOTA_NONE */
uint64_t ht_quota_percent(const struct ht_cpu_quota *q);
/*
 * The part that the groups have not used since the last look, so many ns ago: the smallest one. HT_QUOTA_NONE. A group
 * of v1 that does not say what it used counts with what this process used.
 */
uint64_t ht_quota_left_percent(struct ht_cpu_quota *q, uint64_t ns);
