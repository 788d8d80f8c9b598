/* SPDX-License-Identifier: Apache-2.0 */
/* numa.h - which memory is near which device. */
#pragma once

#include "tiering/sys/nodes.h"
#include "tiering/object/ref.h"
#include <hitrain/limits.h>

struct ht_obj;
struct ht_chunk;

/* Fixed, except for the credit. */
struct ht_numa {
    struct ht_nodes nodes; /* that memory comes from */
    /* Devices, as if they were nodes: whose turn it is to get new content. */
    struct ht_nodes turns;
    int64_t credit[HT_NODES_MAX] HT_GUARDED_BY(HT_LOCK_STORE);
    int8_t index[HT_DEVICES_MAX]; /* place of each device's node, or HT_NUMA_INDEX_ANY */
};

/* Before memory is made. -EINVAL: there is no such node. */
int ht_store_find_nodes(struct ht_store *s) HT_MUST_CHECK;

/*
 * Where an image of the chunk should be: near the device that it lies on. A chunk that is not stored yet gets a device
 * first (*target_device, and 1, as in struct ht_image), if it matters.
 */
int ht_chunk_choose_numa_index(struct ht_obj *o, struct ht_chunk *c, uint8_t *target_device) HT_REQUIRES(HT_LOCK_STORE);
/*
 * The place for an image without a requested one: near the device of the chunk, or else near the device that the image
 * is meant for.
 */
int ht_chunk_numa_index(const struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* The device that its image is meant for, or -1. */
int ht_chunk_target_device(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
uint8_t ht_chunk_stored_target_device(const struct ht_store *s, struct ht_chunk *c);
int ht_ref_numa_index(const struct ht_store *s, const struct ht_ref *ref);
/* The place of all its stored bytes, or HT_NUMA_INDEX_ANY. Releases the lock in between. */
int ht_obj_common_numa_index(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
