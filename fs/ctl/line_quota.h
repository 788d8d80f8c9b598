/* SPDX-License-Identifier: Apache-2.0 */
/*
 * line_quota.h - limits the lines of one kind in the system's log: so many at once, then one each period. Counts
 * omitted lines, and the next line may contain that count.
 */
#pragma once

#include "tiering/base/base.h"

enum { HT_LINES_AT_ONCE = 20 };
#define HT_LINE_PERIOD_NS UINT64_C(10000000000)

/* Zeros: nothing was written yet. One thread. */
struct ht_line_quota {
    uint64_t paid_ns; /* written lines have used up the time until then */
    uint64_t hidden;  /* omitted since the last line */
};

/*
 * May one more line be written now? True: *out_hidden is the number of lines that were omitted before it. False: this
 * one is omitted, too.
 */
bool ht_line_quota_take(struct ht_line_quota *q, uint64_t now_ns, uint64_t *out_hidden);
