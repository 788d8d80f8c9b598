/* SPDX-License-Identifier: Apache-2.0 */
/*
 * endurance.h - bytes written in the last 24 hours, and whether they exceed a budget. Pure: time and counts are the
 * caller's.
 *
 * Time is that of a monotonic clock. So a jump of the wall clock neither loses nor invents bytes. The day is the
 * present hour and the 23 before it; hours count from the first look. Bytes belong to the hour
 * of the look that finds them.
 */
#pragma once

#include "tiering/base/base.h"

#define HT_ENDURANCE_HOUR_NS UINT64_C(3600000000000)
enum { HT_ENDURANCE_HOURS = 24 };

struct ht_endurance {
    uint64_t budget_bytes; /* a day; 0: none */
    bool begun;            /* there was a look */
    uint64_t begun_ns;
    uint64_t hour;                           /* the present one */
    uint64_t hour_bytes[HT_ENDURANCE_HOURS]; /* hour i is at i % HT_ENDURANCE_HOURS */
    uint64_t seen_bytes;                     /* at the last look */
    bool warned;                             /* about this budget */
    uint64_t warned_ns;
};

/* A budget that differs from the one before may be exceeded anew. 0: none. */
void ht_endurance_set(struct ht_endurance *e, uint64_t budget_bytes);
/* written_bytes: in all; the first look counts each. */
void ht_endurance_look(struct ht_endurance *e, uint64_t now_ns, uint64_t written_bytes);
uint64_t ht_endurance_day_bytes(const struct ht_endurance *e);
/* After a look: the budget is exceeded, and 24 hours have passed since this last was true. */
bool ht_endurance_must_warn(struct ht_endurance *e, uint64_t now_ns);
