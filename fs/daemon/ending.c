/* SPDX-License-Identifier: Apache-2.0 */
/* ending.c - a daemon that does not end says why: its mount is gone only in some places, or a device is silent. */
#include "fs/daemon/daemon_priv.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "tiering/base/event.h"
#include "tiering/base/log.h"
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"

/* ------------------------------------------------------- gone in some places */

/*
 * The kernel ends the connection when the last mount of the file system and the last open file have gone. A mount
 * namespace that was made while the store was mounted may hold another mount, and umount -l leaves open files. The
 * device stays held for as long.
 *
 * The kernel wakes a thread that polls the table of mounts when the table changes, so waiting costs nothing. After the
 * mount has gone the thread looks three times and no more.
 */
enum { CALM_MS = 500 }; /* between two checks of a table that changes all the time */

static const int look_after_ms[] = {3000, 60000, 600000};

static struct {
    pthread_t thread;
    const struct ht_daemon *daemon;
    unsigned major, minor;
    int table, stop; /* descriptors */
    bool running;
} lingering;

/* Returns true at the end. ms -1: until the table changes. */
static bool pause_for(int ms, bool changes)
{
    struct pollfd fds[] = {{.fd = lingering.stop, .events = POLLIN},
                           {.fd = changes ? lingering.table : -1, .events = POLLPRI}};

    while (poll(fds, HT_ARRAY_SIZE(fds), ms) < 0 && errno == EINTR)
        ;
    return fds[0].revents != 0;
}

static void report_user(void)
{
    const struct ht_event_about about = {.device = lingering.daemon->source};
    struct ht_mount_user user;

    /* A part that may be long comes last: a text has a limit. */
    if (ht_mount_user_find(lingering.major, lingering.minor, NULL, &user) != 0)
        ht_event(
            HT_EVENT_MOUNT_KEPT, &about,
            "a mapping, or a process that cannot be seen from here, keeps the mount: daemon and device stay; it is not on %s any "
            "more",
            lingering.daemon->mountpoint);
    else if (user.has_mount)
        ht_event(
            HT_EVENT_MOUNT_KEPT, &about,
            "process %d (%.60s) has the mount in its mount namespace: daemon and device stay until it is unmounted there or "
            "that ends; it is not on %s any more",
            (int)user.pid, user.command, lingering.daemon->mountpoint);
    else
        ht_event(
            HT_EVENT_MOUNT_KEPT, &about,
            "process %d (%.60s) uses files of the mount: daemon and device stay until that ends; it is not on %s any more",
            (int)user.pid, user.command, lingering.daemon->mountpoint);
}

static void *wait_and_report(void *arg)
{
    while (ht_mount_is_here(lingering.major, lingering.minor, NULL))
        if (pause_for(-1, true) || pause_for(CALM_MS, false))
            return NULL;
    for (unsigned i = 0; i < HT_ARRAY_SIZE(look_after_ms); i++) {
        if (pause_for(look_after_ms[i], false))
            return NULL;
        report_user();
    }
    return NULL;
}

void ht_lingering_begin(const struct ht_daemon *d)
{
    struct ht_mount_entry m;

    if (ht_mount_at(d->mountpoint, &m) != 0)
        return;
    lingering.daemon = d;
    lingering.major = m.major;
    lingering.minor = m.minor;
    lingering.table = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
    lingering.stop = eventfd(0, EFD_CLOEXEC);
    lingering.running = lingering.table >= 0 && lingering.stop >= 0 &&
        pthread_create(&lingering.thread, NULL, wait_and_report, NULL) == 0;
}

void ht_lingering_end(void)
{
    if (!lingering.running)
        return;
    if (eventfd_write(lingering.stop, 1) == 0)
        pthread_join(lingering.thread, NULL);
    close(lingering.table);
    close(lingering.stop);
    lingering.running = false;
}

/* --------------------------------------------------------- a silent device */

/*
 * An end that waits for a device goes on when the device answers, as with any file system: a request cannot be taken
 * back, and until it is done its bytes may change on the device. A user who does not want to wait ends the process,
 * which is as good as a crash: synced content is there, and the device stays held until its last request has ended.
 */
enum { LOOK_S = 1, REPORT_S = 5 };
#define NS_PER_S 1000000000ull

static struct {
    const struct ht_daemon *daemon;
    unsigned answer_s; /* a device does not answer when a request is older */
    pthread_t thread;
    bool running;
    _Atomic bool over;
} ending;

/* Seconds since the start of the oldest request; 0 and no device: no request is in flight. */
static uint64_t slowest(const struct ht_dev **out_dev)
{
    uint64_t age_ns = 0;

    *out_dev = NULL;
    for (unsigned i = 0; i < ending.daemon->dev_count; i++) {
        uint64_t ns = ht_dev_oldest_ns(ending.daemon->dev[i]);
        if (ns <= age_ns)
            continue;
        age_ns = ns;
        *out_dev = ending.daemon->dev[i];
    }
    return age_ns / NS_PER_S;
}

static void report_wait(uint64_t waited_s, const struct ht_dev *dev, uint64_t age_s)
{
    unsigned long long waited = waited_s, age = age_s;

    if (!dev)
        ht_info("unmounting for %llu s", waited);
    else if (age_s < ending.answer_s)
        ht_info("unmounting for %llu s: %s has been busy with a request for %llu s", waited, ht_dev_name(dev), age);
    else
        ht_warn(
            "unmounting for %llu s: %s has not answered a request for %llu s; this goes on when it answers; another SIGTERM "
            "to process %d ends it without, and loses everything that was not synced",
            waited, ht_dev_name(dev), age, getpid());
}

static void give_up(const struct ht_dev *dev, uint64_t age_s)
{
    ht_error(
        "ended by a signal while %s has not answered for %llu s: the next mount has everything that was synced; the rest "
        "is lost; %s is held until its last request has ended",
        ht_dev_name(dev), (unsigned long long)age_s, ht_dev_name(dev));
    if (ending.daemon->fuse)
        ht_fuse_detach(ending.daemon->fuse);
    _exit(EXIT_FAILURE);
}

static void *watch(void *arg)
{
    const struct timespec look = {LOOK_S, 0};
    uint64_t began_ns = ht_now_ns(), reported_ns = began_ns;
    sigset_t set;

    ht_signals_set(&set);
    while (!ending.over) {
        const struct ht_dev *dev;
        int sig = sigtimedwait(&set, NULL, &look);
        uint64_t now_ns = ht_now_ns(), age_s = slowest(&dev);
        if (ending.over)
            break;
        if (sig > 0 && dev && age_s >= ending.answer_s)
            give_up(dev, age_s);
        if (now_ns - reported_ns < REPORT_S * NS_PER_S)
            continue;
        report_wait((now_ns - began_ns) / NS_PER_S, dev, age_s);
        reported_ns = now_ns;
    }
    return NULL;
}

void ht_shutdown_begin(const struct ht_daemon *d)
{
    if (ending.running)
        return;
    ending.daemon = d;
    ending.answer_s = d->options.store.answer_ms ? d->options.store.answer_ms / 1000 : HT_DEVICE_ANSWER_S;
    ending.running = pthread_create(&ending.thread, NULL, watch, NULL) == 0;
}

void ht_shutdown_end(void)
{
    if (!ending.running)
        return;
    ending.over = true;
    pthread_kill(ending.thread, SIGTERM);
    pthread_join(ending.thread, NULL);
    ending.running = false;
}
