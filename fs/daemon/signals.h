/* SPDX-License-Identifier: Apache-2.0 */
/* signals.h - signals, and settings of this process and, on request, of the system. */
#pragma once

#include <signal.h>

#include "tiering/base/base.h"

/* Be the last to be killed for memory, and do not wait for ourselves in writeback, as far as permitted. */
void ht_process_protect(void);
/* -o tune: huge pages for shared memory, large FUSE requests. Logs each change. */
void ht_process_tune(void);
/*
 * A thread that waits for SIGTERM, SIGINT and SIGHUP, which are blocked in this and all later threads. The first such
 * signal ends the process with 128 + its number, or, once ht_signals_direct has named it, calls stop(ctx). Later ones
 * are left to shutdown.h.
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
