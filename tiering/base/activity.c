/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/activity.h"

#include <pthread.h>
#include <unistd.h>

#include "tiering/base/probe.h"

static struct ht_activity records[HT_ACTIVITIES_MAX];
static struct ht_activity nothing; /* of threads without a record; never written */
static _Atomic unsigned next_try;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key; /* calls give_back when a thread ends */

static __thread struct ht_activity *mine;
static __thread int own_number;
static __thread uint64_t waited_ns;
static __thread int buffers;
static __thread const _Atomic bool *interrupt;

static void give_back(void *record)
{
    struct ht_activity *a = record;

    mine = &nothing;
    a->request = a->wait = NULL;
    a->wanted = NULL;
    for (unsigned i = 0; i < HT_ACTIVITY_HELD_MAX; i++)
        a->held[i] = NULL;
    a->waits = 0;
    a->thread = 0;
}

static void make_key(void)
{
    (void)pthread_key_create(&key, give_back);
}

static struct ht_activity *take_record(void)
{
    int number = ht_activity_thread();

    pthread_once(&once, make_key);
    for (unsigned i = 0; i < HT_ACTIVITIES_MAX; i++) {
        struct ht_activity *a = &records[next_try++ % HT_ACTIVITIES_MAX];
        int free = 0;
        if (!atomic_compare_exchange_strong(&a->thread, &free, number))
            continue;
        if (pthread_setspecific(key, a) == 0)
            return a;
        a->thread = 0;
        break;
    }
    return &nothing;
}

static struct ht_activity *record(void)
{
    if (!mine)
        mine = take_record();
    return mine;
}

static bool is_kept(const struct ht_activity *a)
{
    return a != &nothing;
}

int ht_activity_thread(void)
{
    if (!own_number)
        own_number = gettid();
    return own_number;
}

void ht_activity_set_interrupt(const _Atomic bool *flag)
{
    interrupt = flag;
}

bool ht_activity_interrupted(void)
{
    return interrupt && atomic_load(interrupt);
}

bool ht_activity_interruptible(void)
{
    return interrupt != NULL;
}

#define SET(field, value) atomic_store_explicit(&(field), value, memory_order_relaxed)

void ht_activity_set_request(const struct ht_request *r)
{
    struct ht_activity *a = record();
    struct ht_request was = ht_activity_request();

    if (r->what)
        HT_PROBE2(request_begin, r->what, r->ino);
    else
        HT_PROBE2(request_end, was.what, was.ino);
    if (!is_kept(a))
        return;
    SET(a->ino, r->ino);
    SET(a->began_ns, r->began_ns);
    SET(a->request, r->what);
}

struct ht_request ht_activity_request(void)
{
    struct ht_activity *a = record();

    return (struct ht_request){a->request, a->ino, a->began_ns};
}

void ht_activity_wait(const char *what, uint64_t id)
{
    struct ht_activity *a = record();

    if (!is_kept(a) || a->waits++)
        return;
    SET(a->wait_id, id);
    SET(a->wait_ns, ht_now_ns());
    SET(a->wait, what);
}

void ht_activity_go_on(void)
{
    struct ht_activity *a = record();

    if (!is_kept(a) || --a->waits)
        return;
    waited_ns += ht_now_ns() - a->wait_ns;
    SET(a->wait, NULL);
}

uint64_t ht_activity_waited_ns(void)
{
    return waited_ns;
}

void ht_activity_want(const void *chunk)
{
    struct ht_activity *a = record();

    if (is_kept(a))
        SET(a->wanted, chunk);
}

static void replace(const void *from, const void *to)
{
    struct ht_activity *a = record();

    for (unsigned i = 0; is_kept(a) && i < HT_ACTIVITY_HELD_MAX; i++) {
        if (atomic_load_explicit(&a->held[i], memory_order_relaxed) != from)
            continue;
        SET(a->held[i], to);
        return;
    }
}

void ht_activity_hold(const void *chunk)
{
    replace(NULL, chunk);
}

void ht_activity_release(const void *chunk)
{
    replace(chunk, NULL);
}

void ht_activity_hold_buffers(int count)
{
    buffers += count;
}

/* Another thread may give a buffer back: then that one counts less than none. */
bool ht_activity_holds_nothing(void)
{
    const struct ht_activity *a = record();

    for (unsigned i = 0; i < HT_ACTIVITY_HELD_MAX; i++)
        if (a->held[i])
            return false;
    return buffers <= 0;
}

const struct ht_activity *ht_activity_at(unsigned i)
{
    return records[i].thread ? &records[i] : NULL;
}

bool ht_activity_holds(const struct ht_activity *a, const void *chunk)
{
    for (unsigned i = 0; i < HT_ACTIVITY_HELD_MAX; i++)
        if (a->held[i] == chunk)
            return true;
    return false;
}
