/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - readers of .hitrain/plan: the plan that the store follows (tiering/api/plan.h), with paths, as JSON Lines
 * (feed.h). hitrain(7) lists the keys.
 *
 * The first line is about the whole plan, each other one about one use of a part of a file. Lines have no numbers, so
 * offsets do not count. They end where the plan does, and also when another plan takes its place.
 */
#ifndef HITRAIN_FS_CTL_PLAN_H
#define HITRAIN_FS_CTL_PLAN_H

#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/feed.h"

int ht_plan_feed_open(struct ht_ctl *c, struct ht_feed **out) HT_MUST_CHECK;

#endif
