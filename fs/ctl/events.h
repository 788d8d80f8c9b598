/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events.h - events of all layers: kept (event_log.h), named, told to people, and read as text.
 *
 * A thread of its own gives each entry the path of what it is about, tells it (stderr or syslog) and shows it to readers:
 * whoever raises an event may hold locks that finding a path needs.
 */
#ifndef HITRAIN_FS_CTL_EVENTS_H
#define HITRAIN_FS_CTL_EVENTS_H

#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/event_log.h"

/* Become the sink of this process's events. */
int ht_events_start(struct ht_ctl *c) HT_CHECK;
/* Tell what is left; from then on events are messages only. */
void ht_events_stop(struct ht_ctl *c);

/*
 * One reader of .hitrain/events: a stream of lines, from the oldest entry or after the one whose number is the offset of the first
 * read; then offsets count no more. At the newest entry reads end, and later ones go on.
 */
struct ht_event_feed;
int ht_event_feed_open(struct ht_ctl *c, struct ht_event_feed **out) HT_CHECK;
ssize_t ht_event_feed_read(struct ht_event_feed *f, uint64_t off, void *buf, size_t len) HT_CHECK;
void ht_event_feed_close(struct ht_event_feed *f);

/*
 * One line: key=value, separated by tabs, text last; control characters and backslashes as \ooo. Keys without a value are
 * left out. Put behind what is in out.
 */
void ht_event_line(const struct ht_event_entry *entry, struct ht_buf *out);

#endif
