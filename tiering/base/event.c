/* SPDX-License-Identifier: Apache-2.0 */
/* event.c - see event.h. One lock, shared by threads that raise events: events are rare, and the sink is brief. */
#include "tiering/base/event.h"

#include <stdarg.h>

#include "tiering/base/lock.h"

const struct ht_event_kind ht_event_kinds[HT_EVENT_CODES] = {
#define ROW(id, word, level, by_file, meaning) {word, HT_LOG_##level, meaning, by_file},
    HT_EVENTS(ROW)
#undef ROW
};

static struct ht_rwlock lock = HT_RWLOCK_INIT(HT_LOCK_EVENT_SINK);
static void (*sink)(void *ctx, const struct ht_event *e) HT_GUARDED_BY_STATIC(lock);
static void *sink_ctx HT_GUARDED_BY_STATIC(lock);

void ht_event_set_sink(void (*fn)(void *ctx, const struct ht_event *e), void *ctx)
{
    ht_rwlock_wrlock(&lock);
    sink = fn;
    sink_ctx = ctx;
    ht_rwlock_unlock(&lock);
}

void ht_event(enum ht_event_code code, const struct ht_event_about *about, const char *fmt, ...)
{
    int saved_errno = errno;
    struct ht_event e = {.code = code, .time_ns = ht_wall_ns()};
    va_list args;

    if (about) {
        e.id = about->id;
        e.offset = about->offset;
        e.error = about->error;
        snprintf(e.device, sizeof(e.device), "%s", about->device ? about->device : "");
    }
    errno = saved_errno; /* for %m */
    va_start(args, fmt);
    vsnprintf(e.text, sizeof(e.text), fmt, args);
    va_end(args);
    ht_rwlock_rdlock(&lock);
    if (sink)
        sink(sink_ctx, &e);
    else
        ht_log(ht_event_kinds[code].level, "%s", e.text);
    ht_rwlock_unlock(&lock);
    errno = saved_errno;
}
