/* SPDX-License-Identifier: Apache-2.0 */
/*
 * name_lock keeps names and optimizer from going away while the thread looks up a path; above their locks.
 */
#include "fs/ctl/events.h"

#include "tiering/base/json.h"

#define PATIENCE_NS UINT64_C(1000000000)

/* ------------------------------------------------------------------ naming */

void ht_ctl_find_path(struct ht_ctl *c, uint64_t id, char path[HT_EVENT_PATH_BYTES])
{
    const char *state;
    uint64_t param;

    path[0] = 0;
    ht_mutex_lock(ht_ctl_name_lock(c));
    if (id && c->attached && ht_optim_state_owner(c->optim, id, &param, &state) == 0) {
        ht_ns_path(c->ns, param, path, HT_EVENT_PATH_BYTES);
        size_t len = strlen(path);
        snprintf(path + len, HT_EVENT_PATH_BYTES - len, " (%s)", state);
    } else if (id && c->attached) {
        ht_ns_path(c->ns, id, path, HT_EVENT_PATH_BYTES);
    }
    ht_mutex_unlock(ht_ctl_name_lock(c));
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

/*
 * Every event is in the log of events. A line for each of a thousand files would bury the other lines of the system's
 * log.
 */
static void report_event(struct ht_ctl *c, const struct ht_event_entry *entry)
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

static void *name_and_report(void *arg)
{
    struct ht_ctl *c = arg;
    struct ht_event_entry entry;

    while (ht_event_log_wait(c->events)) {
        ht_event_log_tick(c->events, ht_now_ns());
        while (ht_event_log_unnamed(c->events, &entry)) {
            ht_ctl_find_path(c, entry.event.id, entry.path);
            report_event(c, &entry);
            ht_event_log_name(c->events, entry.seq, entry.path);
        }
    }
    for (unsigned i = 0; i < HT_EVENT_CODES; i++)
        if (c->lines[i].hidden)
            ht_log(ht_event_kinds[i].level, "[%s] %llu lines were left out", ht_event_kinds[i].word,
                   (unsigned long long)c->lines[i].hidden);
    return NULL;
}

/* -------------------------------------------------------------------- life */

static void take_event(void *ctx, const struct ht_event *e)
{
    struct ht_ctl *c = ctx;

    ht_event_log_put(c->events, e, ht_now_ns());
}

int ht_events_start(struct ht_ctl *c)
{
    int rc = ht_event_log_new(HT_EVENT_ENTRIES, &c->events);

    c->event_patience_ns = PATIENCE_NS;
    if (rc)
        return rc;
    rc = pthread_create(&c->event_thread, NULL, name_and_report, c);
    if (rc) {
        ht_event_log_free(c->events);
        c->events = NULL;
        return -rc;
    }
    pthread_setname_np(c->event_thread, "ht-events");
    ht_event_set_sink(take_event, c);
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

/* Writes nothing for an unknown text. */
static void put_known(struct ht_json *j, const char *key, const char *text)
{
    if (text && text[0])
        ht_json_str(j, key, text);
}

void ht_event_put(const struct ht_event_entry *entry, FILE *to)
{
    const struct ht_event *e = &entry->event;
    struct ht_json j;

    ht_json_init_lines(&j, to);
    ht_json_object(&j, NULL);
    ht_json_u64(&j, "seq", entry->seq);
    ht_json_u64(&j, "time_ns", e->time_ns);
    ht_json_str(&j, "level", ht_log_level_word(ht_event_kinds[e->code].level));
    ht_json_str(&j, "code", ht_event_kinds[e->code].word);
    ht_json_u64(&j, "count", entry->count);
    if (entry->various)
        ht_json_bool(&j, "various", true);
    put_known(&j, "path", entry->path);
    if (e->id)
        ht_json_u64(&j, "id", e->id);
    put_known(&j, "device", e->device);
    if (e->device[0])
        ht_json_u64(&j, "offset", e->offset);
    put_known(&j, "error", e->error ? strerrorname_np(-e->error) : NULL);
    ht_json_str(&j, "text", e->text);
    ht_json_end(&j);
}

/* -------------------------------------------------------------------- feed */

static int next_line(void *ctx, uint64_t *after, FILE *to)
{
    struct ht_event_entry entry;

    if (!ht_event_log_next(ctx, *after, &entry))
        return false;
    ht_event_put(&entry, to);
    *after = entry.seq;
    return true;
}

/*
 * The reader sees all events that were raised before: the events thread names these first. If that takes long, as in a
 * mount that hangs, they come later.
 */
int ht_event_feed_open(struct ht_ctl *c, uint64_t base, const struct ht_caller *caller, struct ht_feed **out)
{
    ht_event_log_settle(c->events, ht_now_ns() + c->event_patience_ns);
    return ht_feed_open(next_line, NULL, c->events, out);
}
