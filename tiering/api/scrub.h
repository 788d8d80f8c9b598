/* SPDX-License-Identifier: Apache-2.0 */
/* scrub.h - a run over everything on the devices, which finds and repairs decay. */
#ifndef HITRAIN_TIERING_API_SCRUB_H
#define HITRAIN_TIERING_API_SCRUB_H

#include "tiering/base/base.h"

struct ht_store;

/*
 * One run reads and verifies everything once: superblock copies, log copies, and every stored chunk that a reference
 * names, past the DRAM tier. Damage is written anew from a second copy: superblocks and log frames from another copy,
 * chunks from their image in DRAM, to a new place. Content with several owners is read once, unless it is bad. Damage
 * without a second copy is counted and reported (events scrub-*); reads of it still return -EIO. A run ends with the
 * mount, and the next one begins at the beginning.
 */
enum ht_scrub_state { HT_SCRUB_NEVER, HT_SCRUB_RUNNING, HT_SCRUB_COMPLETE, HT_SCRUB_STOPPED, HT_SCRUB_FAILED };
struct ht_scrub_stats {
    uint64_t state; /* enum ht_scrub_state */
    /* Of the present run, or the last one. total: the bytes to read when it began, less those that were read
     * for another owner. */
    uint64_t run_bytes, run_total_bytes, run_ns, run_found, run_repaired;
    uint64_t runs, bytes, found, repaired; /* since the mount; runs: complete ones */
};
/* Starts a run in the background. -EBUSY: there is one. The store is mounted. */
int ht_store_scrub_start(struct ht_store *s) HT_MUST_CHECK;
/* Ends it. WAITS. -ESRCH: there is none. */
int ht_store_scrub_stop(struct ht_store *s) HT_MUST_CHECK;
void ht_store_scrub_stats(struct ht_store *s, struct ht_scrub_stats *out);

#endif
