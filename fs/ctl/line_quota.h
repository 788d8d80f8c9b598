/* SPDX-License-Identifier: Apache-2.0 */
/*
 * line_quota.h - how many lines of one kind go into the system's log: so many at once, then one each period. What is left out is counted,
 * and the next line that is written may say how many were.
 */
#ifndef HITRAIN_FS_CTL_LINE_QUOTA_H
#define HITRAIN_FS_CTL_LINE_QUOTA_H

#include "tiering/base/base.h"

enum { HT_LINES_AT_ONCE = 20 };
#define HT_LINE_PERIOD_NS UINT64_C(10000000000)

/* Zeros: nothing was written yet. One thread. */
struct ht_line_quota {
    uint64_t paid_ns; /* until then the lines that were written are paid for */
    uint64_t hidden;  /* left out since the last line */
};

/* May one more line be written now? Then *out_hidden is how many were left out before it; else it is counted among them. */
bool ht_line_quota_take(struct ht_line_quota *q, uint64_t now_ns, uint64_t *out_hidden);

#endif
