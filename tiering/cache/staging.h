/* SPDX-License-Identifier: Apache-2.0 */
/*
 * staging.h - the staging pool: a fixed number of pinned 1 MiB buffers for data that streams through memory without an
 * image.
 *
 * Two parts, so that foreground traffic can never starve updates: FILL serves one buffer at a time, UPDATE serves all
 * buffers of a batch pin at once, and keeps those of one more (HT_STAGING_REQUEST_MAX, fewer in a small pool) for the
 * spare worker (optim/state/queue.c): reads of a device that does not answer keep theirs. A thread that holds a buffer
 * waits only for devices, and threads get buffers in the order of their requests, so waiting for one always ends.
 *
 * Threads: any; has its own lock, innermost.
 */
#pragma once

#include "tiering/sys/mem.h"

enum { HT_STAGING_REQUEST_MAX = 12 };
enum ht_staging_part { HT_STAGING_FILL, HT_STAGING_UPDATE, HT_STAGING_PARTS };

struct ht_staging;

/* bytes: rounded down to whole buffers; a quarter is FILL's. At least 16 MiB. nodes live longer, or are NULL. */
int ht_staging_new(uint64_t bytes, const struct ht_nodes *nodes, struct ht_staging **out_staging) HT_MUST_CHECK;
void ht_staging_free(struct ht_staging *p);
/*
 * Takes count buffers of a part, all or none, those from the node of numa_index first. Waits unless nowait. -EAGAIN: it
 * would have to wait, for buffers or for earlier requests. -E2BIG: more than the part has for that.
 */
int ht_staging_get(struct ht_staging *p, enum ht_staging_part part, unsigned count, bool nowait, int numa_index,
                   void *out_bufs[]) HT_MUST_CHECK;
/* Buffers of UPDATE, those that it keeps too, for a thread that has none. So it waits only for more than these. */
int ht_staging_get_kept(struct ht_staging *p, unsigned count, int numa_index, void *out_bufs[]) HT_MUST_CHECK;
void ht_staging_put(struct ht_staging *p, enum ht_staging_part part, void *buf);
/* Buffers of a part, used or not. */
unsigned ht_staging_count(const struct ht_staging *p, enum ht_staging_part part);
uint64_t ht_staging_bytes(const struct ht_staging *p);
uint64_t ht_staging_used_bytes(struct ht_staging *p);
/* How many are in use, and how many threads wait. */
struct ht_dump;
void ht_staging_dump(struct ht_staging *p, struct ht_dump *d);
/* Heap for its stacks. */
uint64_t ht_staging_meta_bytes(const struct ht_staging *p);
const struct ht_pinned *ht_staging_memory(const struct ht_staging *p);
