/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel ends the connection when the last mount of the file system and the last open file have gone. A mount
 * namespace that was made while the store was mounted may hold another mount, and umount -l leaves open files. The
 * device stays held for as long.
 *
 * The kernel wakes a thread that polls the table of mounts when the table changes, so waiting costs nothing. After the
 * mount has gone the thread looks three times and no more.
 */
#include "fs/daemon/daemon_priv.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "tiering/base/event.h"
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"

enum { CALM_MS = 500 }; /* between two checks of a table that changes all the time */

static const int look_after_ms[] = {3000, 60000, 600000};

static struct {
    pthread_t thread;
    const char *source, *point;
    unsigned major, minor;
    int table, stop; /* descriptors */
    bool running;
} the;

/* Returns true at the end. ms -1: until the table changes. */
static bool pause_for(int ms, bool changes)
{
    struct pollfd fds[] = {{.fd = the.stop, .events = POLLIN}, {.fd = changes ? the.table : -1, .events = POLLPRI}};

    while (poll(fds, HT_ARRAY_SIZE(fds), ms) < 0 && errno == EINTR)
        ;
    return fds[0].revents != 0;
}

static void report_user(void)
{
    const struct ht_event_about about = {.device = the.source};
    struct ht_mount_user user;

    /* A part that may be long comes last: a text has a limit. */
    if (ht_mount_user_find(the.major, the.minor, NULL, &user) != 0)
        ht_event(
            HT_EVENT_MOUNT_KEPT, &about,
            "a mapping, or a process that cannot be seen from here, keeps the mount: daemon and device stay; it is not on %s any "
            "more",
            the.point);
    else if (user.has_mount)
        ht_event(
            HT_EVENT_MOUNT_KEPT, &about,
            "process %d (%.60s) has the mount in its mount namespace: daemon and device stay until it is unmounted there or "
            "that ends; it is not on %s any more",
            (int)user.pid, user.command, the.point);
    else
        ht_event(
            HT_EVENT_MOUNT_KEPT, &about,
            "process %d (%.60s) uses files of the mount: daemon and device stay until that ends; it is not on %s any more",
            (int)user.pid, user.command, the.point);
}

static void *wait_and_report(void *arg)
{
    while (ht_mount_is_here(the.major, the.minor, NULL))
        if (pause_for(-1, true) || pause_for(CALM_MS, false))
            return NULL;
    for (unsigned i = 0; i < HT_ARRAY_SIZE(look_after_ms); i++) {
        if (pause_for(look_after_ms[i], false))
            return NULL;
        report_user();
    }
    return NULL;
}

void ht_lingering_begin(const char *source, const char *mountpoint)
{
    struct ht_mount_entry m;

    if (ht_mount_at(mountpoint, &m) != 0)
        return;
    the.source = source;
    the.point = mountpoint;
    the.major = m.major;
    the.minor = m.minor;
    the.table = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
    the.stop = eventfd(0, EFD_CLOEXEC);
    the.running = the.table >= 0 && the.stop >= 0 && pthread_create(&the.thread, NULL, wait_and_report, NULL) == 0;
}

void ht_lingering_end(void)
{
    if (!the.running)
        return;
    if (eventfd_write(the.stop, 1) == 0)
        pthread_join(the.thread, NULL);
    close(the.table);
    close(the.stop);
    the.running = false;
}
