/* SPDX-License-Identifier: Apache-2.0 */
/*
 * daemon.h - from a command to a daemon: the command returns when the mount is ready, or with the reason of the
 * failure.
 */
#pragma once

#include "tiering/base/base.h"

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
