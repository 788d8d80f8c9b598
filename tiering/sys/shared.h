/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shared.h - memory that is a file: the kernel may give it to other processes, which read and map the very pages.
 *
 * The file is as large as its content, to the byte: an access to memory after the end gets SIGBUS. The owner therefore
 * keeps threads that shrink it apart from threads that use the end. Growing moves nothing: addresses stay good until
 * the memory is closed.
 */
#pragma once

#include "tiering/sys/nodes.h"

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
