/* SPDX-License-Identifier: Apache-2.0 */
/*
 * event_log.h - the last events in a ring of fixed memory. Knows nothing of files: who reads them gives them names.
 *
 * An event that repeats (same code, object, device and error) within a second is counted, and appended with its count when the
 * second has passed; as long as it goes on, the next time is twice as long, up to a minute. Only so many kinds of
 * repetition are told apart at a time: what is beyond is counted by its code alone. So a failing device adds few entries,
 * and each event is in an entry's count. The ring's oldest entries make room; sequence numbers tell how many have.
 *
 *   put --> ring --name--> visible to readers, in order
 *
 * Entries never change once they are visible. Any thread; one lock, a leaf. Times are monotonic nanoseconds.
 */
#ifndef HITRAIN_FS_CTL_EVENT_LOG_H
#define HITRAIN_FS_CTL_EVENT_LOG_H

#include "tiering/base/event.h"

enum {
    HT_EVENT_ENTRIES = 4096,
    HT_EVENT_PATH_BYTES = 512,
    HT_EVENT_KINDS_MAX = 64, /* of repetition, told apart */
};

struct ht_event_entry {
    uint64_t seq; /* from 1 */
    uint64_t
        count; /* events it stands for; more than one: repetitions of an entry before, the last of which is described */
    bool various; /* they have only the code in common */
    struct ht_event event;
    char path[HT_EVENT_PATH_BYTES]; /* empty: not known */
};

struct ht_event_figures {
    uint64_t count[HT_EVENT_CODES]; /* events since the mount, repetitions included */
    uint64_t entries;               /* ever appended: the last sequence number */
    uint64_t overwritten;           /* of them not in the ring any more */
};

struct ht_event_log;

int ht_event_log_new(unsigned entries, struct ht_event_log **out) HT_CHECK;
void ht_event_log_free(struct ht_event_log *l);
void ht_event_log_put(struct ht_event_log *l, const struct ht_event *e, uint64_t now_ns);
/* Append what has been counted for long enough; UINT64_MAX: everything. */
void ht_event_log_tick(struct ht_event_log *l, uint64_t now_ns);

/* The oldest entry without a name. False: there is none. */
bool ht_event_log_unnamed(struct ht_event_log *l, struct ht_event_entry *out);
/* Name that entry and show it to readers. */
void ht_event_log_name(struct ht_event_log *l, uint64_t seq, const char *path);
/* Wait until there is an entry without a name, or something to tick. False: stopped, and nothing is left to name. */
bool ht_event_log_wait(struct ht_event_log *l);
/* Append everything that is counted, and wait until all entries have names. */
void ht_event_log_settle(struct ht_event_log *l);
void ht_event_log_stop(struct ht_event_log *l);

/* The first visible entry after a sequence number. False: none. */
bool ht_event_log_next(struct ht_event_log *l, uint64_t after, struct ht_event_entry *out);
void ht_event_log_figures(struct ht_event_log *l, struct ht_event_figures *out);

#endif
