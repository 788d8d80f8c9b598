/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events.h - events of all layers: kept (event_log.h), named, logged, and read as JSON Lines.
 *
 * The events thread finds the path of each entry's object, logs the entry (stderr or syslog) and shows it to readers.
 * The thread that raises an event cannot do that: it may hold locks that finding a path needs.
 */
#pragma once

#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/event_log.h"
#include "fs/ctl/feed.h"

/* Becomes the sink of this process's events. */
int ht_events_start(struct ht_ctl *c) HT_MUST_CHECK;
/* Logs the remaining events; from then on events are messages only. */
void ht_events_stop(struct ht_ctl *c);

/*
 * The path of an object below the mount's root; optimizer state is named by its parameter. "": the object has no name
 * any more.
 */
void ht_ctl_find_path(struct ht_ctl *c, uint64_t id, char path[HT_EVENT_PATH_BYTES]);

/* Writes the entry as one line of JSON. Keys without a value are left out; hitrain(7) lists the keys. */
void ht_event_put(const struct ht_event_entry *entry, FILE *to);
