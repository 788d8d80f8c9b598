/* SPDX-License-Identifier: Apache-2.0 */
/*
 * placement.h - which device new blocks come from. Pure: a decision about a table.
 *
 * Devices fill up in proportion: the one with the largest free share is next, so that equal devices take turns and
 * unequal ones get as much as they can hold. A caller that wants to stay on a device (for the state of an optimizer
 * range beside its parameter) may, until that device has less than half of the best free share. A device that fails
 * writes is the last resort, and one that has just failed this very write comes after it.
 */
#ifndef HITRAIN_TIERING_TIER_PLACEMENT_H
#define HITRAIN_TIERING_TIER_PLACEMENT_H

#include <assert.h>
#include "tiering/base/base.h"
#include <hitrain/limits.h>

struct ht_place_device {
    uint64_t blocks, free_blocks;
    bool offline; /* absent: takes nothing */
    bool failing; /* last resort */
};

/* A caller's wish for the place of its blocks. Zeros: device 0; so begin with HT_ALLOC_HINT_NONE. */
struct ht_alloc_hint {
    int device;     /* stay on this device while that is fair; -1: none */
    uint32_t avoid; /* devices (bits) that are worse than every other */
};
#define HT_ALLOC_HINT_NONE ((struct ht_alloc_hint){.device = -1})
static_assert(HT_DEVICES_MAX <= 32, "a bit for each device");

/*
 * The device, or -1: nothing is free anywhere. Returns one with fewer free blocks than wanted only when none has as
 * many.
 */
int ht_place_choose(const struct ht_place_device devices[], unsigned count, uint32_t blocks, struct ht_alloc_hint hint);

#endif
