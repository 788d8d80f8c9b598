/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - the plan of a step that the store follows (tiering/tier/forecast.h), for people and programs. */
#pragma once

#include "tiering/tier/forecast.h"

struct ht_store;

struct ht_plan_stats {
    bool active; /* a plan is followed; if not, figures are 0 */
    struct ht_forecast_figures figures;
    uint64_t made, dropped;   /* plans since the mount; dropped: did not match, or clipping changed */
    uint64_t hits, strangers; /* since the mount, as in figures */
};
void ht_store_plan_stats(struct ht_store *s, struct ht_plan_stats *out);

/* One use of a part of an object, and what the plan says of the time until the next one. */
struct ht_plan_line {
    uint64_t object, offset, bytes;
    struct ht_forecast_idle idle;
};
/*
 * The next uses from *place on, at most `most`, and moves *place behind them; begin with {0}. Returns how many;
 * 0: that was all, or the plan is not the one any more with which the caller began.
 */
struct ht_plan_place {
    uint64_t made; /* the plan's number; 0: the present one */
    uint32_t part;
    unsigned use;
};
unsigned ht_store_plan_lines(struct ht_store *s, struct ht_plan_place *place, struct ht_plan_line *to, unsigned most);
