/* SPDX-License-Identifier: Apache-2.0 */
/* alloc_priv.h - the space of all devices, for alloc.c and for tests that verify it. */
#pragma once

#include "tiering/space/alloc.h"
#include "tiering/space/space_map.h"

struct ht_alloc_map {
    struct ht_space_map map;
    uint64_t bad_blocks;
    uint64_t discarding; /* blocks that are taken while the device forgets them */
    uint64_t deferred;   /* blocks that are pending_free otherwise */
    bool offline, failing, capacity;
    uint32_t share;    /* as in struct ht_place_device */
    int64_t credit[2]; /* of new content, of rewritten content: a lot of one would hide what the other owes */
};

struct ht_alloc {
    unsigned device_count;
    uint64_t total, free_blocks, pending_free, reserved;
    bool notes_freed;
    struct ht_alloc_map device[HT_DEVICES_MAX];
};
