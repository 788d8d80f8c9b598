/* SPDX-License-Identifier: Apache-2.0 */
/* store_priv.h - inside store/. */
#pragma once

#include "tiering/tier/passing.h"
#include "tiering/journal/journal.h"

struct ht_store;
struct ht_obj;
struct ht_trace;
struct ht_chunk;

/* The state of store/. */
struct ht_own {
    bool mounted;
    struct ht_journal_report report;
    struct ht_trace *trace;
    struct ht_dev *log_aside[HT_LOG_COPIES]; /* the store's own, in memory, in place of those on the devices */
    struct ht_passing passing HT_GUARDED_BY(HT_LOCK_STORE);
};

/* Blocks the chunk will need when [.., b) of it has been written. */
uint32_t ht_chunk_blocks_after_write(struct ht_obj *o, struct ht_chunk *c, uint32_t b) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_set_size_locked(struct ht_obj *o, uint64_t size) HT_REQUIRES(HT_LOCK_STORE);
/* Gives back preallocations in [off, end), which lies beyond the size. Releases the lock in between. */
void ht_obj_prealloc_drop(struct ht_obj *o, uint64_t off, uint64_t end) HT_REQUIRES(HT_LOCK_STORE);
