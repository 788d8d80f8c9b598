/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem.h - large memory, in huge pages where the system allows, locked where the limits allow: pinned, divided among
 * NUMA nodes if requested; and shared, which is a file. And how much memory there is.
 */
#pragma once

#include "tiering/sys/nodes.h"

/*
 * Heap of the process that nothing uses, as malloc kept it for its next caller at most a second ago: some of it is in
 * memory.
 */
uint64_t ht_heap_spare_bytes(void);

struct ht_pinned {
    void *base; /* aligned to 2 MiB */
    size_t bytes;
    bool locked;
    const struct ht_nodes *nodes; /* the caller's, or NULL */
    size_t end[HT_NODES_MAX];     /* end of the node's part at a place, and begin of the next part; whole 2 MiB */
    uint64_t huge_bytes;          /* of the memory that was populated at once */
    struct ht_filler *filler;     /* populates the rest, or NULL */
};

/*
 * Maps and locks bytes (rounded up to 2 MiB). When the lock limit forbids locking the memory is used unlocked and
 * m->locked says so. nodes: divided among them, one part after the other; NULL: not. The first 64 MiB are populated at
 * once, the rest by a thread while the memory is in use already: a machine may need many seconds for a large tier. Up
 * to 32 MiB come when they are touched: programs that end soon, as hitrain-fsck, need few of them. 0 or -errno; release
 * with ht_pinned_free.
 */
int ht_pinned_alloc(struct ht_pinned *m, const char *name, size_t bytes, const struct ht_nodes *nodes) HT_MUST_CHECK;
void ht_pinned_free(struct ht_pinned *m);
/*
 * Calls fn when all is populated: now if it is, else from the thread that does it; never if that cannot be known, or
 * for so little that comes when it is touched. Once.
 */
void ht_pinned_when_populated(struct ht_pinned *m, void (*fn)(void *ctx), void *ctx);
/* Populates nothing more ahead, and calls no fn after this. Any thread, while others use the memory. */
void ht_pinned_stop_populating(struct ht_pinned *m);
/* Parts that it has: one for each node, or one. */
unsigned ht_pinned_parts(const struct ht_pinned *m);
size_t ht_pinned_part_start(const struct ht_pinned *m, unsigned part);
size_t ht_pinned_part_bytes(const struct ht_pinned *m, unsigned part);
/* The part that this address lies in. */
unsigned ht_pinned_part_of(const struct ht_pinned *m, const void *address);
/* Bytes in huge pages, as far as it was populated; bytes of a part that lie on another node than they should. */
uint64_t ht_pinned_huge_bytes(const struct ht_pinned *m);
uint64_t ht_pinned_away_bytes(const struct ht_pinned *m, unsigned part);
/* Bytes that this process may lock (RLIMIT_MEMLOCK); UINT64_MAX: as many as it likes. */
uint64_t ht_mem_lock_limit(void);
#define HT_HUGE_PAGE_BYTES (2 * HT_MIB)
/* For memory mapped elsewhere: its pages come now, all of them. */
int ht_mem_populate(char *base, size_t bytes) HT_MUST_CHECK;
/* Its pages go; the next touch brings fresh ones, of zeros. Not for memory that rings have registered. */
bool ht_mem_give_back(char *base, size_t bytes) HT_MUST_CHECK;
/* Bytes of memory that are available on this machine (MemAvailable, capped by the cgroup's limit). */
uint64_t ht_mem_available(void);

/*
 * Memory that is a file: the kernel may give it to other processes, which read and map the very pages.
 *
 * The file is as large as its content, to the byte: an access to memory after the end gets SIGBUS. The owner therefore
 * keeps threads that shrink it apart from threads that use the end. Growing moves nothing: addresses stay good until
 * the memory is closed.
 */
enum { HT_SHARED_MAPS_MAX = 32 }; /* each at least twice as large as the one before: more than there are addresses */

struct ht_shared {
    int fd;
    uint64_t bytes;               /* of the file */
    uint64_t huge_bytes;          /* the first ones, whole huge pages of the file */
    const struct ht_nodes *nodes; /* the owner's, or NULL; where its pages come from */
    int numa_index;
    uint64_t locked_bytes; /* of mappings; may be more than the file has */
    unsigned maps;
    struct {
        uint8_t *base; /* aligned to 2 MiB */
        uint64_t bytes;
    } map[HT_SHARED_MAPS_MAX];
};

/*
 * Zeros, which get memory when they are touched (ht_mem_populate: at once), locked where the limits allow. -ENOMEM
 * m->nodes and m->numa_index, a place in them, are the caller's to set before.
 */
int ht_shared_open(struct ht_shared *m, const char *name, uint64_t bytes) HT_MUST_CHECK;
void ht_shared_close(struct ht_shared *m);
/* Growing: the new part is zeros that get memory when they are touched. Shrinking cannot fail. */
int ht_shared_resize(struct ht_shared *m, uint64_t bytes) HT_MUST_CHECK;
static inline uint8_t *ht_shared_at(const struct ht_shared *m, uint64_t off)
{
    return m->map[m->maps - 1].base + off;
}
