/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace.h - readers of .hitrain/trace: the entries of tiering/base/trace.h, with paths, as JSON Lines.
 *
 * A reader is a stream of lines, from the oldest entry or after the one whose number is the offset of the first read;
 * then offsets count no more. At the newest entry reads end, and later ones go on. hitrain(7) lists the keys.
 */
#ifndef HITRAIN_FS_CTL_TRACE_H
#define HITRAIN_FS_CTL_TRACE_H

#include "fs/ctl/ctl_priv.h"

struct ht_trace_feed;
int ht_trace_feed_open(struct ht_ctl *c, struct ht_trace_feed **out) HT_MUST_CHECK;
ssize_t ht_trace_feed_read(struct ht_trace_feed *f, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
void ht_trace_feed_close(struct ht_trace_feed *f);

#endif
