/* SPDX-License-Identifier: Apache-2.0 */
/*
 * feed.h - one reader of a hidden file of JSON Lines: a stream of lines, from the first entry or after the one whose
 * number is the offset of the first read; then offsets count no more. At the last entry reads
 * end, and later ones go on.
 */
#pragma once

#include "tiering/base/base.h"

/*
 * Writes lines for one or more entries after number *after, and sets *after to the last one's. 1, or 0: there are none;
 * or -errno. One call for a feed at a time.
 */
typedef int ht_feed_next(void *ctx, uint64_t *after, FILE *to);

struct ht_feed;
/* free_ctx: with ctx when the feed closes, or if it cannot open; NULL: ctx is not the feed's. */
int ht_feed_open(ht_feed_next *next, void (*free_ctx)(void *ctx), void *ctx, struct ht_feed **out) HT_MUST_CHECK;
/* Lines that were made together at most. */
ssize_t ht_feed_read(struct ht_feed *f, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
void ht_feed_close(struct ht_feed *f);

/*
 * One for each hidden file of JSON Lines; hitrain(7) lists the keys. base: the inode that the file belongs to. Only the
 * lines of roots depend on the caller: they name those that it may know of.
 */
struct ht_ctl;
struct ht_caller;
typedef int ht_feed_opener(struct ht_ctl *c, uint64_t base, const struct ht_caller *caller, struct ht_feed **out);
ht_feed_opener ht_event_feed_open, ht_kept_feed_open, ht_plan_feed_open, ht_root_feed_open, ht_trace_feed_open;
/* ctx: the struct ht_ctl, and nothing else. */
ht_feed_next ht_background_lines, ht_device_lines;
