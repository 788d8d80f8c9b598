/* SPDX-License-Identifier: Apache-2.0 */
/*
 * feeder.h - standard input through memory: a thread reads on while the program does something else with what came.
 *
 *   pipe --thread--> ring of HT_FEEDER_BYTES --caller--> buffer of the caller
 *
 * The thread writes to the free part of the ring and the caller reads the other one, so neither holds the lock while
 * it copies. One caller.
 */
#ifndef HITRAIN_MOUNT_HELPERS_COPY_FEEDER_H
#define HITRAIN_MOUNT_HELPERS_COPY_FEEDER_H

#include <sys/types.h>

#include "tiering/base/base.h"

/* What comes while a step is committed: 64 MiB are 0.1 s of 600 MB/s. */
enum { HT_FEEDER_BYTES = 64 << 20 };

struct ht_feeder;
/* stopped: ends calls that wait, with -EINTR, 0.1 s after it became true. -ENOMEM, or that of making a thread. */
int ht_feeder_begin(bool (*stopped)(void), struct ht_feeder **out) HT_MUST_CHECK;
/* Up to len bytes that came, at least one. 0: the end. -errno of the read that failed, after all that came before. */
ssize_t ht_feeder_get(void *feeder, void *data, size_t len) HT_MUST_CHECK;
/* Bytes that came and are not taken may be lost. NULL is allowed. */
void ht_feeder_end(struct ht_feeder *f);

#endif
