/* SPDX-License-Identifier: Apache-2.0 */
/*
 * processors.h - how much of the processors that a thread may run on is idle. Any thread. A quota of its control group
 * is not seen.
 */
#ifndef HITRAIN_TIERING_SYS_PROCESSORS_H
#define HITRAIN_TIERING_SYS_PROCESSORS_H

#include "tiering/base/base.h"

enum { HT_PROCESSORS_MAX = 1024 };
struct ht_processors {
    uint64_t may[HT_PROCESSORS_MAX / 64]; /* bits */
};

/* Those that the calling thread may run on, or all if the kernel does not say. */
void ht_processors_of_thread(struct ht_processors *out);
unsigned ht_processors_count(const struct ht_processors *p);
/* Milliseconds for which they were idle, all together, since the machine began. -EIO: the kernel does not say. */
int ht_processors_idle_ms(const struct ht_processors *p, uint64_t *out_ms) HT_MUST_CHECK;

#endif
