/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_columns.h - sums over the lines of .hitrain/plan, in columns of the time of one step: the content that the plan
 * has in memory, and what devices read because it had no room.
 */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_PLAN_COLUMNS_H
#define HITRAIN_MOUNT_HELPERS_CTL_PLAN_COLUMNS_H

#include "mount-helpers/ctl/ctl.h"

enum { HT_PLAN_COLUMNS = 480 };

struct ht_plan_columns {
    uint64_t step_ns, now_ns;
    bool active;
    double in_memory[HT_PLAN_COLUMNS], read[HT_PLAN_COLUMNS]; /* bytes */
};

/* The first line, which has the length of a step. -EPROTO: it is none. */
int ht_plan_columns_begin(struct ht_plan_columns *c, const struct ht_cmd_line *head) HT_MUST_CHECK;
/* Each further line. -EPROTO: its times are not in a step. */
int ht_plan_columns_add(struct ht_plan_columns *c, const struct ht_cmd_line *l) HT_MUST_CHECK;
/* Whether the content of a line leaves memory until its next use. */
bool ht_plan_line_leaves(const struct ht_cmd_line *l);

#endif
