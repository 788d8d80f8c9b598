/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events.h - events of all layers: kept in a ring of fixed memory, named, logged, and read as JSON Lines.
 *
 * An event that repeats (same code, object, device and error) within a second is counted, and appended with its count
 * when the second has passed; as long as it goes on, the next time is twice as long, up to a minute. Only
 * HT_EVENT_KINDS_MAX kinds of repetition are counted separately at a time; further ones are counted by their code
 * alone. So a failing device adds few entries, and each event is in an entry's count. The ring's oldest entries make
 * room; sequence numbers show how many have gone.
 *
 *   put --> ring --name--> visible to readers, in order
 *
 * The events thread finds the path of each entry's object, logs the entry (stderr or syslog) and shows it to readers.
 * The thread that raises an event cannot do that: it may hold locks that finding a path needs.
 *
 * Entries never change once they are visible. Any thread; the ring has one lock, a leaf. Times are monotonic
 * nanoseconds.
 */
#pragma once

#include "fs/ctl/hidden_priv.h"

/* ---------------------------------------------------------------- the ring */

enum {
    HT_EVENT_ENTRIES = 4096,
    HT_EVENT_PATH_BYTES = 512,
    HT_EVENT_KINDS_MAX = 64, /* of repetition that are counted separately */
};

struct ht_event_entry {
    uint64_t seq; /* from 1 */
    /* events in this entry; more than one: repetitions of an earlier entry, and the last one is described */
    uint64_t count;
    bool various; /* they have only the code in common */
    struct ht_event event;
    char path[HT_EVENT_PATH_BYTES]; /* empty: not known */
};

struct ht_event_log;

int ht_event_log_new(unsigned entries, struct ht_event_log **out) HT_MUST_CHECK;
void ht_event_log_free(struct ht_event_log *l);
void ht_event_log_put(struct ht_event_log *l, const struct ht_event *e, uint64_t now_ns);
/* Appends repetitions that have been counted for long enough; UINT64_MAX: all. */
void ht_event_log_tick(struct ht_event_log *l, uint64_t now_ns);

/* The oldest entry without a name. False: there is none. */
bool ht_event_log_unnamed(struct ht_event_log *l, struct ht_event_entry *out);
/* Names that entry and shows it to readers. */
void ht_event_log_name(struct ht_event_log *l, uint64_t seq, const char *path);
/* Waits until there is an entry without a name, or something to tick. False: stopped, and nothing is left to name. */
bool ht_event_log_wait(struct ht_event_log *l);
/* Appends all counted repetitions, and waits until all entries have names. */
void ht_event_log_drain(struct ht_event_log *l);
void ht_event_log_stop(struct ht_event_log *l);

/* The first visible entry after a sequence number. False: none. */
bool ht_event_log_next(struct ht_event_log *l, uint64_t after, struct ht_event_entry *out);
/* Events since the mount by their codes, repetitions included. */
void ht_event_log_counts(struct ht_event_log *l, uint64_t out[HT_EVENT_CODES]);

/* ------------------------------------------------------ the system's log */

/*
 * Limits the lines of one kind: so many at once, then one each period. Counts omitted lines, and the next line may
 * contain that count.
 */
enum { HT_LINES_AT_ONCE = 20 };
#define HT_LINE_PERIOD_NS UINT64_C(10000000000)

/* Zeros: nothing was written yet. One thread. */
struct ht_line_quota {
    uint64_t paid_ns; /* written lines have used up the time until then */
    uint64_t hidden;  /* omitted since the last line */
};

/*
 * May one more line be written now? True: *out_hidden is the number of lines that were omitted before it. False: this
 * one is omitted, too.
 */
bool ht_line_quota_take(struct ht_line_quota *q, uint64_t now_ns, uint64_t *out_hidden);

/* -------------------------------------------------------------- the thread */

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
