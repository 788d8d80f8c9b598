/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events.c - see events.h.
 *
 * name_lock keeps names and optimizer from going away while the thread asks them for a path; above their locks.
 */
#include "fs/ctl/events.h"

#include <stdio.h>
#include <stdlib.h>

struct ht_event_feed {
    struct ht_event_log *log;
    struct ht_mutex lock; /* guards what follows: threads may share a descriptor */
    bool begun;
    uint64_t after; /* last entry that was turned into text */
    struct ht_buf line;
    size_t read; /* of line */
};

/* ------------------------------------------------------------------ naming */

/* Optimizer state is named by its parameter. */
static void find_path(struct ht_ctl *c, uint64_t id, char path[HT_EVENT_PATH_BYTES])
{
    const char *state;
    uint64_t param;

    path[0] = 0;
    ht_mutex_lock(&c->name_lock);
    if (id && c->attached && ht_optim_state_owner(c->optim, id, &param, &state) == 0) {
        size_t len;

        ht_ns_path(c->ns, param, path, HT_EVENT_PATH_BYTES);
        len = strlen(path);
        snprintf(path + len, HT_EVENT_PATH_BYTES - len, " (%s)", state);
    } else if (id && c->attached) {
        ht_ns_path(c->ns, id, path, HT_EVENT_PATH_BYTES);
    }
    ht_mutex_unlock(&c->name_lock);
}

static void write_line(const struct ht_event_entry *entry)
{
    const struct ht_event_kind *kind = &ht_event_kinds[entry->event.code];
    const char *slash = entry->path[0] ? "/" : "", *colon = entry->path[0] ? ": " : "";

    if (entry->count == 1)
        ht_log(kind->level, "[%s] %s%s%s%s", kind->word, slash, entry->path, colon, entry->event.text);
    else
        ht_log(kind->level, "[%s] %llu more, %sthe last: %s%s%s%s", kind->word, (unsigned long long)entry->count,
               entry->various ? "of various files or devices, " : "", slash, entry->path, colon, entry->event.text);
}

/* Every event is in the log of events. A line for each of a thousand files would bury the rest of the system's. */
static void tell(struct ht_ctl *c, const struct ht_event_entry *entry)
{
    const struct ht_event_kind *kind = &ht_event_kinds[entry->event.code];
    struct ht_line_quota *q = &c->lines[entry->event.code];
    uint64_t hidden = 0;

    if (kind->by_file && !ht_line_quota_take(q, ht_now_ns(), &hidden)) {
        if (q->hidden == 1)
            ht_log(kind->level, "[%s] there are more: lines are left out now; hitrainctl events has all", kind->word);
        return;
    }
    if (hidden)
        ht_log(kind->level, "[%s] %llu lines were left out", kind->word, (unsigned long long)hidden);
    write_line(entry);
}

static void tell_hidden(const struct ht_ctl *c)
{
    for (unsigned i = 0; i < HT_EVENT_CODES; i++)
        if (c->lines[i].hidden)
            ht_log(ht_event_kinds[i].level, "[%s] %llu lines were left out", ht_event_kinds[i].word,
                   (unsigned long long)c->lines[i].hidden);
}

static void *name_and_tell(void *arg)
{
    struct ht_ctl *c = arg;
    struct ht_event_entry entry;

    while (ht_event_log_wait(c->events)) {
        ht_event_log_tick(c->events, ht_now_ns());
        while (ht_event_log_unnamed(c->events, &entry)) {
            find_path(c, entry.event.id, entry.path);
            tell(c, &entry);
            ht_event_log_name(c->events, entry.seq, entry.path);
        }
    }
    tell_hidden(c);
    return NULL;
}

/* -------------------------------------------------------------------- life */

static void take(void *ctx, const struct ht_event *e)
{
    struct ht_ctl *c = ctx;

    ht_event_log_put(c->events, e, ht_now_ns());
}

int ht_events_start(struct ht_ctl *c)
{
    int r = ht_event_log_new(HT_EVENT_ENTRIES, &c->events);

    if (r)
        return r;
    r = pthread_create(&c->event_thread, NULL, name_and_tell, c);
    if (r) {
        ht_event_log_free(c->events);
        c->events = NULL;
        return -r;
    }
    pthread_setname_np(c->event_thread, "ht-events");
    ht_event_set_sink(take, c);
    return 0;
}

void ht_events_stop(struct ht_ctl *c)
{
    if (!c->events)
        return;
    ht_event_set_sink(NULL, NULL);
    ht_event_log_stop(c->events);
    pthread_join(c->event_thread, NULL);
    ht_event_log_free(c->events);
    c->events = NULL;
}

/* -------------------------------------------------------------------- text */

static void put_escaped(struct ht_buf *out, const char *text)
{
    for (; *text; text++) {
        unsigned char ch = (unsigned char)*text;

        if (ch < 0x20 || ch == 0x7f || ch == '\\')
            ht_buf_printf(out, "\\%03o", ch);
        else
            ht_buf_put(out, text, 1);
    }
}

static void put_text(struct ht_buf *out, const char *key, const char *text)
{
    if (!text[0])
        return;
    ht_buf_printf(out, "%s=", key);
    put_escaped(out, text);
    ht_buf_put(out, "\t", 1);
}

static void put_number(struct ht_buf *out, const char *key, uint64_t value)
{
    ht_buf_printf(out, "%s=%llu\t", key, (unsigned long long)value);
}

void ht_event_line(const struct ht_event_entry *entry, struct ht_buf *out)
{
    const struct ht_event *e = &entry->event;
    const char *error = e->error ? strerrorname_np(-e->error) : NULL;

    put_number(out, "seq", entry->seq);
    put_number(out, "time_ns", e->time_ns);
    put_text(out, "level", ht_log_level_word(ht_event_kinds[e->code].level));
    put_text(out, "code", ht_event_kinds[e->code].word);
    put_number(out, "count", entry->count);
    if (entry->various)
        put_number(out, "various", 1);
    put_text(out, "path", entry->path);
    if (e->id)
        put_number(out, "id", e->id);
    put_text(out, "device", e->device);
    if (e->device[0])
        put_number(out, "offset", e->offset);
    put_text(out, "error", error ? error : "");
    ht_buf_printf(out, "text=");
    put_escaped(out, e->text);
    ht_buf_put(out, "\n", 1);
}

/* -------------------------------------------------------------------- feed */

int ht_event_feed_open(struct ht_ctl *c, struct ht_event_feed **out)
{
    struct ht_event_feed *f = calloc(1, sizeof(*f));

    if (!f)
        return -ENOMEM;
    f->log = c->events;
    ht_mutex_init(&f->lock, HT_LOCK_FEED);
    *out = f;
    return 0;
}

void ht_event_feed_close(struct ht_event_feed *f)
{
    ht_mutex_destroy(&f->lock);
    ht_buf_free(&f->line);
    free(f);
}

/* Make the next line when all of the last one was read. False: there is none. */
static bool next_line(struct ht_event_feed *f)
{
    struct ht_event_entry entry;

    if (f->read < f->line.len)
        return true;
    ht_buf_reset(&f->line);
    f->read = 0;
    if (!ht_event_log_next(f->log, f->after, &entry))
        return false;
    ht_event_line(&entry, &f->line);
    f->after = entry.seq;
    return f->line.err == 0;
}

ssize_t ht_event_feed_read(struct ht_event_feed *f, uint64_t off, void *buf, size_t len)
{
    size_t done = 0;

    ht_mutex_lock(&f->lock);
    if (!f->begun)
        f->after = off;
    f->begun = true;
    while (done < len && next_line(f)) {
        size_t n = ht_min_u64(len - done, f->line.len - f->read);

        memcpy((char *)buf + done, f->line.data + f->read, n);
        f->read += n;
        done += n;
    }
    ht_mutex_unlock(&f->lock);
    return (ssize_t)done;
}
