/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/dump.h"

#include <dirent.h>

#include "tiering/base/activity.h"

void ht_dump_name(struct ht_dump *d, const char *name)
{
    for (const unsigned char *p = (const unsigned char *)name; *p; p++)
        ht_buf_put_u8(&d->text, *p < 0x20 || *p == 0x7f ? '?' : *p);
}

void ht_dump_age(struct ht_dump *d, uint64_t since_ns)
{
    uint64_t now = ht_now_ns();

    ht_dump_put(d, "%.1f s", now > since_ns ? (double)(now - since_ns) / 1e9 : 0.0);
}

void ht_dump_id(struct ht_dump *d, uint64_t id)
{
    for (unsigned i = 0; i < d->ids; i++)
        if (d->id[i] == id)
            return;
    if (id && d->ids < HT_DUMP_IDS_MAX)
        d->id[d->ids++] = id;
}

/* --------------------------------------------------------------- threads */

/* The first line of a file of a thread of this process; "?" if the kernel shows none. */
static void read_line(int thread, const char *name, char out[64])
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/task/%d/%s", thread, name);
    if (!ht_read_line(path, out, 64))
        strcpy(out, "?");
}

void ht_dump_thread(struct ht_dump *d, int thread)
{
    char name[64];

    if (!thread) {
        ht_dump_put(d, "an unknown thread");
        return;
    }
    read_line(thread, "comm", name);
    ht_dump_put(d, "thread %d (%s)", thread, name);
}

static void put_activity(struct ht_dump *d, const struct ht_activity *a)
{
    const char *request = a->request, *wait = a->wait;
    unsigned held = 0;

    for (unsigned i = 0; i < HT_ACTIVITY_HELD_MAX; i++)
        held += a->held[i] != NULL;
    if (request) {
        ht_dump_put(d, "; %s of inode %llu for ", request, (unsigned long long)a->ino);
        ht_dump_age(d, a->began_ns);
        ht_dump_id(d, a->ino);
    }
    if (wait) {
        ht_dump_put(d, "; waits for %s ", wait);
        if (a->wait_id)
            ht_dump_put(d, "%llu ", (unsigned long long)a->wait_id);
        ht_dump_put(d, "since ");
        ht_dump_age(d, a->wait_ns);
    }
    if (held)
        ht_dump_put(d, "; holds %u chunk%s", held, held > 1 ? "s" : "");
}

static const struct ht_activity *find_activity(int thread)
{
    for (unsigned i = 0; i < HT_ACTIVITIES_MAX; i++) {
        const struct ht_activity *a = ht_activity_at(i);
        if (a && a->thread == thread)
            return a;
    }
    return NULL;
}

static void put_thread(struct ht_dump *d, int thread)
{
    const struct ht_activity *a = find_activity(thread);
    char stat[64], where[64];

    read_line(thread, "stat", stat);
    read_line(thread, "wchan", where);
    const char *state = strrchr(stat, ')');
    ht_dump_put(d, "  ");
    ht_dump_thread(d, thread);
    ht_dump_put(d, ": %c in %s", state && state[1] ? state[2] : '?', where[0] == '0' ? "user code" : where);
    if (a)
        put_activity(d, a);
    ht_dump_put(d, "\n");
}

void ht_dump_threads(struct ht_dump *d)
{
    DIR *dir = opendir("/proc/self/task");
    struct dirent *e;

    ht_dump_put(d, "threads: number (name): state and place in the kernel; request; wait; chunks\n");
    while (dir && (e = readdir(dir)))
        if (atoi(e->d_name) > 0)
            put_thread(d, atoi(e->d_name));
    if (dir)
        closedir(dir);
}

/* ----------------------------------------------------------------- locks */

enum { NAP_NS = 1000000 };

static bool refuse(struct ht_dump *d, const char *what, int holder)
{
    ht_dump_put(d, "  could not take the lock of %s: it is held by ", what);
    ht_dump_thread(d, holder);
    ht_dump_put(d, "\n");
    return false;
}

/* False: the time is over. A dump may come late, so it naps between two tries. */
static bool nap(uint64_t until_ns)
{
    ht_sleep_ns(NAP_NS);
    return ht_now_ns() < until_ns;
}

bool ht_dump_lock(struct ht_dump *d, struct ht_mutex *m, const char *what) HT_NO_THREAD_SAFETY_ANALYSIS
{
    uint64_t until_ns = ht_now_ns() + HT_DUMP_PATIENCE_NS;

    while (!ht_mutex_try(m))
        if (!nap(until_ns))
            return refuse(d, what, ht_mutex_holder(m));
    return true;
}

bool ht_dump_rdlock(struct ht_dump *d, struct ht_rwlock *l, const char *what) HT_NO_THREAD_SAFETY_ANALYSIS
{
    uint64_t until_ns = ht_now_ns() + HT_DUMP_PATIENCE_NS;

    while (!ht_rwlock_tryrd(l))
        if (!nap(until_ns))
            return refuse(d, what, ht_rwlock_writer(l));
    return true;
}
