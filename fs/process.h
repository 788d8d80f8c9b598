/* SPDX-License-Identifier: Apache-2.0 */
/* process.h - settings of this process and, when asked for, of the system. */
#ifndef HITRAIN_FS_PROCESS_H
#define HITRAIN_FS_PROCESS_H

#include <signal.h>

#include "tiering/base/base.h"

/* Be the last to be killed for memory, and do not wait for ourselves in writeback, as far as permitted. */
void ht_process_protect(void);
/* -o tune: huge pages for shared memory, large FUSE requests. Each change is told. */
void ht_process_tune(void);
/*
 * A thread that waits for SIGTERM, SIGINT and SIGHUP, which are blocked in this and all later threads. The first of
 * them ends the process with 128 + its number, or, once ht_signals_direct has named it, calls stop(ctx). More of them
 * are left to ending.h.
 */
int ht_signals_start(void) HT_CHECK;
/* Around the moment at which the mount appears: nothing is done from defer until direct. stop NULL: as before. */
void ht_signals_defer(void);
void ht_signals_direct(void (*stop)(void *ctx), void *ctx);
/* Returns when stop has, if it was called; from then on the signals are ignored. */
void ht_signals_end(void);
void ht_signals_set(sigset_t *set); /* those three */

#endif
