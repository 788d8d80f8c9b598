/* SPDX-License-Identifier: Apache-2.0 */
/*
 * processors.h - the processors that a thread may run on: how many this process can keep busy, and for how long they
 * were idle. Any thread.
 */
#pragma once

#include "tiering/base/base.h"

enum { HT_PROCESSORS_MAX = 1024 };
struct ht_processors {
    uint64_t may[HT_PROCESSORS_MAX / 64]; /* bits */
};

/* Those that the calling thread may run on, or all if the kernel does not say. */
void ht_processors_of_thread(struct ht_processors *out);
unsigned ht_processors_count(const struct ht_processors *p);
/*
 * So many processors can work for this process at once: those of the calling thread, and not more than the quotas of
 * its control groups allow (quota.h). At least 1.
 */
unsigned ht_processors_usable(void);
/* Milliseconds for which they were idle, all together, since the machine began. -EIO: the kernel does not say. */
int ht_processors_idle_ms(const struct ht_processors *p, uint64_t *out_ms) HT_MUST_CHECK;
