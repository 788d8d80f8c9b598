/* SPDX-License-Identifier: Apache-2.0 */
/*
 * placement.h - which device new blocks come from, and which share of new content each device gets. Pure: counts and
 * clock are the caller's.
 *
 * While no device has a share, devices fill up in proportion: the one with the largest free share is next, so that
 * equal devices take turns and unequal ones get as much as they can hold. A caller that wants to stay on a device (for
 * the state of an optimizer range beside its parameter) may, until that device has less than half of the best free
 * share.
 *
 * With shares devices get blocks in proportion to these. Each device has a credit: what its share of all
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

/* ------------------------------------------------------------------ shares */

/*
 * The share of new content that a device gets: in proportion to its measured bandwidth, less where little space is
 * free. The clock is never the wall clock.
 *
 * A device that is not busy all the time may look faster than it is: the buffer of a drive or a limiter of its speed
 * lets short bursts pass. So an estimate is bytes over busy time, and falls with that. It begins with at most three
 * times what the device moves in all the time in which the store is in use that way, or with the estimate of the other
 * direction if that is more: a device that got little of the first writes has shown by its reads what it can do. It
 * grows only to a tenth more than what the device moves: with the larger share it has to prove more. If it does so
 * several times in a row, the estimate grows faster. Reads come from where content was written before, so they prove it
 * late. An estimate is forgotten when the store has been in use for HT_WEIGHTS_FORGET_NS without a sample of it.
 *
 * One sample of less than half of an estimate may be a stall: the estimate goes half of the way. A second one in a row
 * of less than half of that estimate is no stall: the estimate is what was measured. So what a step has written when
 * its end comes lies as the speeds are.
 *
 *   not measured    counts as the mean of the others; while none is measured there are no shares
 *   any speed       gets 1/HT_WEIGHTS_LEAST of all at least, also at rate 0, so that it is measured again
 *   unusable        (missing, failing, not answering) or stalled: gets nothing
 *   almost full     the share falls with the last quarter of free space
 *
 * Shares stay until one differs from what was measured by more than a twenty-fourth. Not locked: the owner does.
 */
#define HT_WEIGHTS_PERIOD_NS UINT64_C(50000000)       /* between looks */
#define HT_WEIGHTS_SAMPLE_BYTES (UINT64_C(256) << 20) /* a sample has so many bytes */
#define HT_WEIGHTS_SAMPLE_NS UINT64_C(400000000)      /* or so much busy time */
#define HT_WEIGHTS_FEW_BYTES (UINT64_C(8) << 20)      /* or so many */
#define HT_WEIGHTS_FEW_NS UINT64_C(1000000000)        /* in so much time */
#define HT_WEIGHTS_FORGET_NS UINT64_C(20000000000)    /* of the store in use, without a sample */
#define HT_WEIGHTS_STALL_NS UINT64_C(2000000000)      /* without a completion */
enum { HT_WEIGHTS_LEAST = 64, HT_WEIGHTS_WAYS = 2, HT_WEIGHTS_WHOLE = 1 << 16 };

/* A device, at one look. */
struct ht_weights_device {
    bool usable; /* there, and neither failing nor silent */
    uint64_t blocks, free_blocks;
    uint64_t waiting_ns; /* no request ended for so long though some are in flight */
    struct {
        uint64_t bytes, busy_ns; /* so far, of requests that say something about bandwidth */
    } way[HT_WEIGHTS_WAYS];      /* read, write */
};

struct ht_weights { /* all zero: no look yet */
    bool begun;
    uint64_t looked_ns;
    uint64_t use_ns[HT_WEIGHTS_WAYS]; /* how long the busiest device, look by look, had requests of a direction */
    struct ht_weights_estimate {
        struct ht_weights_way {
            uint64_t seen_ns, seen_bytes, seen_busy_ns, seen_use_ns, seen_store_ns; /* at the last sample */
            uint64_t last_busy_ns;                                                  /* at the last look */
            double bytes_per_s;
            double proven, reach; /* what it moved when this part of that became the growth */
            double dropped_from;  /* the estimate before the last sample was far below it; 0: that was not */
            bool known;
        } way[HT_WEIGHTS_WAYS];
        uint32_t share; /* of HT_WEIGHTS_WHOLE */
    } device[HT_DEVICES_MAX];
};

/* Is the next look due? A clock that went back makes it due. */
bool ht_weights_due(const struct ht_weights *w, uint64_t now_ns);
/* Returns whether a share has changed. Shares together are HT_WEIGHTS_WHOLE, or 0: nothing is known. */
bool ht_weights_look(struct ht_weights *w, uint64_t now_ns, const struct ht_weights_device devices[], unsigned count);
