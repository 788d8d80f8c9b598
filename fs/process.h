/* SPDX-License-Identifier: Apache-2.0 */
/* process.h - settings of this process and, when asked for, of the system. */
#ifndef HITRAIN_FS_PROCESS_H
#define HITRAIN_FS_PROCESS_H

#include "tiering/base/base.h"

/* Be the last to be killed for memory, and do not wait for ourselves in writeback, as far as permitted. */
void ht_process_protect(void);
/* -o tune: huge pages for shared memory, large FUSE requests. Each change is told. */
void ht_process_tune(void);
/* Block the signals that end a mount, in this and all later threads, so that ht_signals_start can wait for them. */
void ht_signals_block(void);
/* A thread that calls stop(ctx) at SIGTERM, SIGINT or SIGHUP. */
int ht_signals_start(void (*stop)(void *ctx), void *ctx) HT_CHECK;
void ht_signals_end(void);

#endif
