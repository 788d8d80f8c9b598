/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quota.h - the processor time that control groups allow this process (cpu.max, and cpu.cfs_quota_us of v1), and how
 * much is left. The groups are the process's own and those above, at the time of ht_quota_find. Quotas may change.
 *
 * One thread at a time has a struct ht_quota.
 */
#pragma once

#include "tiering/sys/cgroup.h"

#define HT_QUOTA_NONE UINT64_MAX

enum { HT_QUOTA_HIERARCHIES = 2, HT_QUOTA_LEVELS_MAX = 16 };
struct ht_quota {
    struct ht_cgroup group[HT_QUOTA_HIERARCHIES];
    unsigned groups;
    uint64_t used_ns[HT_QUOTA_HIERARCHIES][HT_QUOTA_LEVELS_MAX]; /* at the last look, from the process's own group on */
};

void ht_quota_find(struct ht_quota *out);
/* The smallest one, of one processor: 150 allow one and a half. HT_QUOTA_NONE */
uint64_t ht_quota_percent(const struct ht_quota *q);
/*
 * The part that the groups have not used since the last look, so many ns ago: the smallest one. HT_QUOTA_NONE. A group
 * of v1 that does not say what it used counts with what this process used.
 */
uint64_t ht_quota_left_percent(struct ht_quota *q, uint64_t ns);
