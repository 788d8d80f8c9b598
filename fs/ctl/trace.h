/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace.h - readers of .hitrain/trace: the entries of tiering/base/trace.h, with paths, as JSON Lines (feed.h).
 * hitrain(7) lists the keys.
 */
#ifndef HITRAIN_FS_CTL_TRACE_H
#define HITRAIN_FS_CTL_TRACE_H

#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/feed.h"

int ht_trace_feed_open(struct ht_ctl *c, struct ht_feed **out) HT_MUST_CHECK;

#endif
