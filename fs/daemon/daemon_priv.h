/* SPDX-License-Identifier: Apache-2.0 */
/* daemon_priv.h - the daemon, and what main.c takes from the other files of this folder. */
#pragma once

#include <limits.h>
#include <signal.h>

#include "fs/daemon/options.h"
#include "fs/fuse/session.h"
#include "fs/participants/participants.h"
#include "tiering/sys/ticker.h"

struct ht_daemon {
    struct ht_options options;
    char mountpoint[PATH_MAX], source[PATH_MAX];
    struct ht_dev *dev[HT_DEVICES_MAX];
    unsigned dev_count;
    struct ht_store *store;
    struct ht_ctl *ctl;
    struct ht_participants participants;
    struct ht_optim *optim; /* one of them */
    struct ht_fuse *fuse;
    struct ht_ticker claims;
    bool store_mounted, optim_started;
};

/*
 * process.c: from a command to a daemon. The command returns when the mount is ready, or with the reason of the
 * failure. Settings of this process and, on request, of the system. Signals.
 */

/*
 * Fork; the parent waits for ht_daemon_ready, or for the child's end, and exits with its status: only the
 * child returns. No threads may exist yet. Negative errno: nothing was forked. A signal that ends the parent ends the
 * child, until it is ready.
 */
int ht_daemon_fork(void) HT_MUST_CHECK;
/*
 * From now on messages go to syslog; the working directory is /, and standard descriptors are /dev/null. No-op when
 * nothing was forked. Any thread, once, before ht_daemon_ready.
 */
void ht_daemon_detach(void);
/* The command returns now. No-op when nothing was forked. Any thread, once. */
void ht_daemon_ready(void);

/* Be the last to be killed for memory, and do not wait for ourselves in writeback, as far as permitted. */
void ht_process_protect(void);
/* -o tune: huge pages for shared memory, large FUSE requests. Logs each change. */
void ht_process_tune(void);
/*
 * A thread that waits for SIGTERM, SIGINT and SIGHUP, which are blocked in this and all later threads. The first such
 * signal ends the process with 128 + its number, or, once ht_signals_direct has named it, calls stop(ctx). Later ones
 * are left to ending.c.
 */
int ht_signals_start(void) HT_MUST_CHECK;
/*
 * Around the moment at which the mount appears: signals have no effect from defer until direct. stop NULL: as before.
 */
void ht_signals_defer(void);
void ht_signals_direct(void (*stop)(void *ctx), void *ctx);
/* Returns when stop has, if it was called; from then on the signals are ignored. */
void ht_signals_end(void);
void ht_signals_set(sigset_t *set); /* those three */

/* mountpoint.c: the place of a mount, before it and at a remount. */

/* The absolute path of a directory. Detaches a dead hitrain mount there. Negative errno: logs the reason. */
int ht_mountpoint_prepare(const char *path, char out[PATH_MAX]) HT_MUST_CHECK;
/* Can FUSE be used at all? Reports the reason if not. */
int ht_mountpoint_check_fuse(void) HT_MUST_CHECK;

/*
 * mount -o remount: changes the flags of a mount that is there already.
 *
 * The kernel keeps the flags. The daemon's own options cannot change. Naming one again, as mount(8) does with
 * everything in fstab, is allowed if it has its present value. The attribute "options" of the mount's root has the
 * values, so a remount needs a daemon that answers.
 */

/* Logs errors. Before a mount becomes read-only every write to it is made durable. */
int ht_remount(const struct ht_options *o) HT_MUST_CHECK;
/* For a mount that has just been made: sets flags that it could not be given at once. */
int ht_remount_later_flags(const char *mountpoint, const struct ht_options *o) HT_MUST_CHECK;

/* dump.c: a thread that answers `hitrainctl dump`, whatever hangs. */

/*
 * From now on root may connect to the abstract socket HT_DUMP_SOCKET of this mount and gets a text, of which the last
 * line is HT_DUMP_END. Without the socket or the thread a mount works as ever; a warning says why.
 */
void ht_dump_server_begin(const struct ht_daemon *d);
/* Does not wait for a client. */
void ht_dump_server_end(void);

/* ending.c: a daemon that does not end says why. First one whose mount is gone only in some namespaces. */

/*
 * From now on a thread waits until the mount has left this mount namespace. If the daemon is still needed some seconds
 * later, an event names the process that keeps it, and again some minutes later.
 */
void ht_lingering_begin(const struct ht_daemon *d);
void ht_lingering_end(void);

/* While a mount ends: a user who waits for a silent device gets a message and a way out. */

/*
 * From now on a thread logs every few seconds which device the end waits for. While a device does not answer, another
 * SIGTERM, SIGINT or SIGHUP (blocked in this thread) ends the process. A second call does nothing.
 */
void ht_shutdown_begin(const struct ht_daemon *d);
void ht_shutdown_end(void);
