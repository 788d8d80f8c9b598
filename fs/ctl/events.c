/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events.c - see events.h. name_lock keeps names and optimizer from going away while the events thread looks up a path;
 * above their locks.
 */
#include "fs/ctl/events.h"

#include "tiering/base/lock.h"

#define FIRST_PERIOD_NS 1000000000ull
#define LAST_PERIOD_NS (64 * FIRST_PERIOD_NS)
#define PATIENCE_NS UINT64_C(1000000000)

enum { REPEATS = HT_EVENT_KINDS_MAX + HT_EVENT_CODES };

/* One kind of repetition. Unused ones have ends_ns 0. */
struct repeat {
    uint64_t ends_ns, period_ns;
    uint64_t held; /* counted and not appended yet */
    struct ht_event last;
};

struct ht_event_log {
    struct ht_mutex lock;
    pthread_cond_t more;  /* something to name, or to wait for */
    pthread_cond_t named; /* visible grew */
    HT_GUARDED_BY(HT_LOCK_EVENT_LOG) struct {
        bool stopped;
        uint64_t last;    /* sequence number of the newest entry */
        uint64_t visible; /* of the newest one with a name */
        uint64_t count[HT_EVENT_CODES];
        struct repeat repeat[REPEATS]; /* kinds; then one for each code, with repetitions that found no place there */
    };
    unsigned entries; /* fixed */
    struct ht_event_entry ring[] HT_GUARDED_BY(HT_LOCK_EVENT_LOG);
};

HT_MUTEX_OF(log_lock, struct ht_event_log, lock, HT_LOCK_EVENT_LOG)

static size_t bytes_of(unsigned entries)
{
    return sizeof(struct ht_event_log) + entries * sizeof(struct ht_event_entry);
}

int ht_event_log_new(unsigned entries, struct ht_event_log **out)
{
    struct ht_event_log *l = ht_pages_new(bytes_of(entries));

    if (!l)
        return -ENOMEM;
    l->entries = entries;
    ht_mutex_init(&l->lock, HT_LOCK_EVENT_LOG);
    ht_cond_init(&l->more);
    ht_cond_init(&l->named);
    *out = l;
    return 0;
}

void ht_event_log_free(struct ht_event_log *l)
{
    if (!l)
        return;
    pthread_cond_destroy(&l->more);
    pthread_cond_destroy(&l->named);
    ht_mutex_destroy(&l->lock);
    ht_pages_free(l, bytes_of(l->entries));
}

/* ------------------------------------------------------------------ append */

static struct ht_event_entry *entry_of(struct ht_event_log *l, uint64_t seq)
{
    return &l->ring[seq % l->entries];
}

static uint64_t oldest_locked(const struct ht_event_log *l) HT_REQUIRES(HT_LOCK_EVENT_LOG)
{
    return l->last > l->entries ? l->last - l->entries + 1 : 1;
}

static void append_locked(struct ht_event_log *l, const struct ht_event *e, uint64_t count, bool various)
    HT_REQUIRES(HT_LOCK_EVENT_LOG)
{
    struct ht_event_entry *entry = entry_of(l, ++l->last);

    entry->seq = l->last;
    entry->count = count;
    entry->various = various;
    entry->event = *e;
    entry->path[0] = 0;
    if (l->visible + 1 < oldest_locked(l)) /* it got no name in time */
        l->visible = oldest_locked(l) - 1;
    pthread_cond_signal(&l->more);
}

/* ------------------------------------------------------------------ repeats */

static bool same(const struct ht_event *a, const struct ht_event *b)
{
    return a->code == b->code && a->id == b->id && a->error == b->error && strcmp(a->device, b->device) == 0;
}

static void end_period_locked(struct ht_event_log *l, struct repeat *r, uint64_t now_ns, bool various)
    HT_REQUIRES(HT_LOCK_EVENT_LOG)
{
    if (!r->ends_ns || r->ends_ns > now_ns)
        return;
    if (r->held == 0 || now_ns == UINT64_MAX) {
        r->ends_ns = 0;
    } else {
        r->period_ns = ht_min_u64(2 * r->period_ns, LAST_PERIOD_NS);
        r->ends_ns = now_ns + r->period_ns;
    }
    if (r->held)
        append_locked(l, &r->last, r->held, various);
    r->held = 0;
}

static void tick_locked(struct ht_event_log *l, uint64_t now_ns) HT_REQUIRES(HT_LOCK_EVENT_LOG)
{
    for (unsigned i = 0; i < REPEATS; i++)
        end_period_locked(l, &l->repeat[i], now_ns, i >= HT_EVENT_KINDS_MAX);
}

void ht_event_log_tick(struct ht_event_log *l, uint64_t now_ns)
{
    ht_mutex_lock(log_lock(l));
    tick_locked(l, now_ns);
    ht_mutex_unlock(log_lock(l));
}

/* The kind that the event repeats, a free one for it, or the count of its code alone. */
static struct repeat *find_repeat(struct ht_event_log *l, const struct ht_event *e)
{
    struct repeat *unused = NULL;

    for (unsigned i = 0; i < HT_EVENT_KINDS_MAX; i++) {
        struct repeat *r = &l->repeat[i];
        if (r->ends_ns && same(&r->last, e))
            return r;
        if (!r->ends_ns && !unused)
            unused = r;
    }
    return unused ? unused : &l->repeat[HT_EVENT_KINDS_MAX + e->code];
}

void ht_event_log_put(struct ht_event_log *l, const struct ht_event *e, uint64_t now_ns)
{
    ht_mutex_lock(log_lock(l));
    l->count[e->code]++;
    tick_locked(l, now_ns);
    struct repeat *r = find_repeat(l, e);
    if (r->ends_ns) {
        if (r->held++ == 0)
            pthread_cond_signal(&l->more); /* its end is to be waited for */
        r->last = *e;
    } else {
        r->period_ns = FIRST_PERIOD_NS;
        r->ends_ns = now_ns + FIRST_PERIOD_NS;
        r->held = 0;
        r->last = *e;
        append_locked(l, e, 1, false);
    }
    ht_mutex_unlock(log_lock(l));
}

/* ------------------------------------------------------------------- naming */

bool ht_event_log_unnamed(struct ht_event_log *l, struct ht_event_entry *out)
{
    ht_mutex_lock(log_lock(l));
    bool any = l->visible < l->last;
    if (any)
        *out = *entry_of(l, l->visible + 1);
    ht_mutex_unlock(log_lock(l));
    return any;
}

void ht_event_log_name(struct ht_event_log *l, uint64_t seq, const char *path)
{
    ht_mutex_lock(log_lock(l));
    if (seq == l->visible + 1) {
        struct ht_event_entry *entry = entry_of(l, seq);
        size_t len = strnlen(path, sizeof(entry->path) - 1);
        memcpy(entry->path, path, len);
        entry->path[len] = 0;
        l->visible = seq;
        pthread_cond_broadcast(&l->named);
    }
    ht_mutex_unlock(log_lock(l));
}

/* The end of the next period with a held event; 0: none. Periods without one end when the next event is put. */
static uint64_t due_locked(const struct ht_event_log *l) HT_REQUIRES(HT_LOCK_EVENT_LOG)
{
    uint64_t due = 0;

    for (unsigned i = 0; i < REPEATS; i++) {
        const struct repeat *r = &l->repeat[i];
        if (r->ends_ns && r->held && (!due || r->ends_ns < due))
            due = r->ends_ns;
    }
    return due;
}

bool ht_event_log_wait(struct ht_event_log *l)
{
    bool work;

    ht_mutex_lock(log_lock(l));
    for (;;) {
        uint64_t due = due_locked(l);
        work = l->visible < l->last || (due && due <= ht_now_ns());
        if (work || l->stopped)
            break;
        ht_cond_wait_until(&l->more, log_lock(l), due);
    }
    ht_mutex_unlock(log_lock(l));
    return work;
}

/* Waits until all entries that are there have names, but no longer than until then; 0: for as long as it takes. */
static void wait_for_names(struct ht_event_log *l, uint64_t until_ns)
{
    ht_mutex_lock(log_lock(l));
    for (uint64_t last = l->last; l->visible < last && !l->stopped;)
        if (ht_cond_wait_until(&l->named, log_lock(l), until_ns))
            break;
    ht_mutex_unlock(log_lock(l));
}

void ht_event_log_drain(struct ht_event_log *l)
{
    ht_event_log_tick(l, UINT64_MAX);
    wait_for_names(l, 0);
}

void ht_event_log_stop(struct ht_event_log *l)
{
    ht_mutex_lock(log_lock(l));
    l->stopped = true;
    tick_locked(l, UINT64_MAX);
    pthread_cond_broadcast(&l->more);
    ht_mutex_unlock(log_lock(l));
}

/* ------------------------------------------------------------------ reading */

bool ht_event_log_next(struct ht_event_log *l, uint64_t after, struct ht_event_entry *out)
{
    ht_mutex_lock(log_lock(l));
    uint64_t seq = after < UINT64_MAX ? ht_max_u64(after + 1, oldest_locked(l)) : after;
    bool any = seq <= l->visible;
    if (any)
        *out = *entry_of(l, seq);
    ht_mutex_unlock(log_lock(l));
    return any;
}

void ht_event_log_counts(struct ht_event_log *l, uint64_t out[HT_EVENT_CODES])
{
    ht_mutex_lock(log_lock(l));
    memcpy(out, l->count, sizeof(l->count));
    ht_mutex_unlock(log_lock(l));
}

/* ------------------------------------------------------------------ logging */

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

bool ht_line_quota_take(struct ht_line_quota *q, uint64_t now_ns, uint64_t *out_hidden)
{
    q->paid_ns = ht_max_u64(q->paid_ns, now_ns);
    if (q->paid_ns - now_ns > (HT_LINES_AT_ONCE - 1) * HT_LINE_PERIOD_NS) {
        q->hidden++;
        return false;
    }
    q->paid_ns += HT_LINE_PERIOD_NS;
    *out_hidden = q->hidden;
    q->hidden = 0;
    return true;
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
static void report_event(struct ht_line_quota *q, const struct ht_event_entry *entry)
{
    const struct ht_event_kind *kind = &ht_event_kinds[entry->event.code];
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
    struct ht_line_quota lines[HT_EVENT_CODES] = {{0}};
    struct ht_ctl *c = arg;
    struct ht_event_entry entry;

    while (ht_event_log_wait(c->events)) {
        ht_event_log_tick(c->events, ht_now_ns());
        while (ht_event_log_unnamed(c->events, &entry)) {
            ht_ctl_find_path(c, entry.event.id, entry.path);
            report_event(&lines[entry.event.code], &entry);
            ht_event_log_name(c->events, entry.seq, entry.path);
        }
    }
    for (unsigned i = 0; i < HT_EVENT_CODES; i++)
        if (lines[i].hidden)
            ht_log(ht_event_kinds[i].level, "[%s] %llu lines were left out", ht_event_kinds[i].word,
                   (unsigned long long)lines[i].hidden);
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
    struct ht_json j = ht_feed_line(to);

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
    wait_for_names(c->events, ht_now_ns() + c->event_patience_ns);
    return ht_feed_open(next_line, NULL, c->events, out);
}
