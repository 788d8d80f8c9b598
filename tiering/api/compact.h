/* SPDX-License-Identifier: Apache-2.0 */
/* compact.h - content moves out of nearly empty groups of blocks, so that free space is in long runs. */
#ifndef HITRAIN_TIERING_API_COMPACT_H
#define HITRAIN_TIERING_API_COMPACT_H

#include "tiering/base/base.h"

struct ht_store;

struct ht_compact_stats {
    uint64_t passes;      /* over all groups */
    uint64_t moved_bytes; /* written elsewhere */
    uint64_t emptied;     /* groups that are free as a whole now, or will be */
    uint64_t skipped;     /* groups that could not be emptied then */
    uint64_t memory_bytes;
};
void ht_store_compact_stats(struct ht_store *s, struct ht_compact_stats *out);
/* One pass in this thread, at full speed and whatever the options say. WAITS. -EROFS, -ENOMEM */
int ht_store_compact(struct ht_store *s) HT_MUST_CHECK;

#endif
