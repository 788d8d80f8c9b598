/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/ctl/event_log.h"

#include "tiering/base/lock.h"

#define FIRST_PERIOD_NS 1000000000ull
#define LAST_PERIOD_NS (64 * FIRST_PERIOD_NS)

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
        struct repeat kind[HT_EVENT_KINDS_MAX];
        struct repeat rest[HT_EVENT_CODES]; /* repetitions that found no place among the kinds */
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
    for (unsigned i = 0; i < HT_EVENT_KINDS_MAX; i++)
        end_period_locked(l, &l->kind[i], now_ns, false);
    for (unsigned i = 0; i < HT_EVENT_CODES; i++)
        end_period_locked(l, &l->rest[i], now_ns, true);
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
        struct repeat *r = &l->kind[i];
        if (r->ends_ns && same(&r->last, e))
            return r;
        if (!r->ends_ns && !unused)
            unused = r;
    }
    return unused ? unused : &l->rest[e->code];
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

    for (unsigned i = 0; i < HT_EVENT_KINDS_MAX + HT_EVENT_CODES; i++) {
        const struct repeat *r = i < HT_EVENT_KINDS_MAX ? &l->kind[i] : &l->rest[i - HT_EVENT_KINDS_MAX];
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

void ht_event_log_settle(struct ht_event_log *l, uint64_t until_ns)
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
    ht_event_log_settle(l, 0);
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

void ht_event_log_metrics(struct ht_event_log *l, struct ht_event_metrics *out)
{
    ht_mutex_lock(log_lock(l));
    memcpy(out->count, l->count, sizeof(out->count));
    out->entries = l->last;
    out->overwritten = oldest_locked(l) - 1;
    ht_mutex_unlock(log_lock(l));
}
