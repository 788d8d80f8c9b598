/* SPDX-License-Identifier: Apache-2.0 */
/*
 * placement.h - which device new blocks come from. Pure: a decision about a table.
 *
 * While no device has a share, devices fill up in proportion: the one with the largest free share is next, so that
 * equal devices take turns and unequal ones get as much as they can hold. A caller that wants to stay on a device (for
 * the state of an optimizer range beside its parameter) may, until that device has less than half of the best free
 * share.
 *
 * With shares (weights.h) devices get blocks in proportion to these. Each device has a credit: what its share of all
 * blocks comes to, less what it got. The one with the highest credit is next, so devices alternate as finely as their
 * shares allow. A caller that wants to stay may. Content that is rewritten may stay until the credit of its
 * device falls below -HT_PLACE_SLACK_BLOCKS; then it moves. So content that lies in proportion stays where it is. The
 * table has the credits of new content or those of rewritten content, as the hint says.
 *
 * A device of the class capacity takes content only if no fast device has room, unless the caller wants all paths: then
 * shares decide. A device that fails writes is worse, and one that has just failed this very write comes after it.
 */
#pragma once

#include "tiering/base/base.h"
#include <hitrain/limits.h>

struct ht_place_device {
    uint64_t blocks, free_blocks;
    bool offline;   /* absent: takes nothing */
    bool failing;   /* last resort */
    uint32_t share; /* of HT_PLACE_WHOLE; all shares together are that, or 0 */
    int64_t credit; /* in blocks / HT_PLACE_WHOLE */
    bool capacity;  /* of that class */
};
enum { HT_PLACE_WHOLE = 1 << 16, HT_PLACE_SLACK_BLOCKS = 1024 };

/* A caller's wish for the place of its blocks. Zeros: device 0; so begin with HT_ALLOC_HINT_NONE. */
struct ht_alloc_hint {
    int device;     /* stay on this device while that is fair; -1: none */
    uint32_t avoid; /* devices (bits) that are worse than every other */
    bool movable;   /* all of the content is rewritten: it leaves the device that has more than its share */
    bool compacts;  /* pieces are better than a closed group (alloc.h) */
    bool all_paths; /* the class of a device does not count */
};
#define HT_ALLOC_HINT_NONE ((struct ht_alloc_hint){.device = -1})
static_assert(HT_DEVICES_MAX <= 32, "a bit for each device");

/*
 * The device, or -1: nothing is free anywhere. Returns one with fewer free blocks than wanted only when none has as
 * many.
 */
int ht_place_choose(const struct ht_place_device devices[], unsigned count, uint32_t blocks, struct ht_alloc_hint hint);
/*
 * Counts blocks that went to a chosen device in the credits. Devices that cannot take them, or are worse than others,
 * neither gain nor lose: a device that was full for long does not get everything afterwards.
 */
void ht_place_charge(struct ht_place_device devices[], unsigned count, uint32_t blocks, struct ht_alloc_hint hint,
                     int chosen);
