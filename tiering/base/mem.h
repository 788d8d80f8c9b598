/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem.h - large pinned memory: huge pages where the system allows,
 * locked where the limits allow, bound to a NUMA node where asked.
 */
#ifndef HITRAIN_TIERING_BASE_MEM_H
#define HITRAIN_TIERING_BASE_MEM_H

#include "tiering/base/base.h"

enum { HT_NUMA_OFF = -1 };

struct ht_pinned {
    void *base; /* aligned to 2 MiB */
    size_t bytes;
    bool locked, huge;
    struct ht_filler *filler; /* populates what was not populated at once, or NULL */
};

/*
 * Map and lock bytes (rounded up to 2 MiB). When the lock limit forbids locking
 * the memory is used unlocked and m->locked says so. node: NUMA node or HT_NUMA_OFF.
 * The first 64 MiB are populated at once, the rest by a thread while the memory is in use already: a machine
 * may need many seconds for a large tier. 0 or -errno; release with ht_pinned_free.
 */
int ht_pinned_alloc(struct ht_pinned *m, const char *name, size_t bytes, int node) HT_CHECK;
void ht_pinned_free(struct ht_pinned *m);
/*
 * For tests that open thousands of stores: what is freed from now on is kept, as it is, for the next allocation of
 * the same size on any node. false: as usual again, and what was kept is freed.
 */
void ht_pinned_keep(bool on);
/* For memory mapped elsewhere: before it is touched, its pages come from this node; now, all of them. */
int ht_mem_bind(void *base, size_t bytes, int node) HT_CHECK;
int ht_mem_populate(char *base, size_t bytes) HT_CHECK;
/* Bytes of memory that are available on this machine (MemAvailable, capped by the cgroup's limit). */
uint64_t ht_mem_available(void);

#endif
