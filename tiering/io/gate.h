/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gate.h - the gate before the devices: requests of lower classes wait for their permission there, so that urgent ones
 * find short queues. gate_policy.h decides.
 *
 *   thread of a lower class:  permit --> chunk, buffer --> request --> device --> permit back
 *                               ^ waits only here, and holds nothing
 *   urgent thread:            ------------------------> request --> device
 *
 * A thread has a class, urgent unless it says otherwise, and its requests have that class. Only a thread that holds no
 * chunk, no staging buffer and no lock that others need waits for a permit. So no other thread waits for one that waits
 * at the gate. A thread with requests in flight asks with ht_permit_try, and completes one request if it gets none.
 *
 * Callers may wait for what a waiting thread would bring: memory (writeback) or room in the log (its checkpoint). They
 * say so (ht_gate_want), and then the gate is open for threads that bring it.
 *
 * Threads: any. State: in struct ht_dev, with its flight_lock.
 */
#pragma once

#include <stdatomic.h>

#include <hitrain/limits.h>
#include "tiering/io/dev.h"

/* Sets the calling thread's class. Returns the one that it had. */
enum ht_io_class ht_io_class_set(enum ht_io_class io_class);
enum ht_io_class ht_io_class(void);
/* The calling thread's background requests get a share of each device, also where that has no pauses. */
void ht_io_share_set(bool on);

/* What requests of lower classes bring. */
enum ht_gate_good { HT_GATE_NOTHING, HT_GATE_MEMORY, HT_GATE_LOG_ROOM, HT_GATE_GOODS };

/* The gate of a set of devices. Zeros: without devices. */
struct ht_gate {
    struct ht_dev *dev[HT_DEVICES_MAX]; /* constant; NULL: none */
    _Atomic unsigned wanted[HT_GATE_GOODS];
};
/*
 * A caller begins to wait for this, and ends. Urgent ones count; for room in the log also planned ones, because the
 * background brings it. For others neither call does anything.
 */
void ht_gate_want(struct ht_gate *g, enum ht_gate_good good);
void ht_gate_want_end(struct ht_gate *g, enum ht_gate_good good);

/*
 * A thread of a lower class has better things to do once *recalled is set: then it gets its permits at once, since it
 * is free only behind its request. NULL: it never is. ht_gate_recall follows the setting, without a lock below that of
 * devices.
 */
void ht_gate_heed(const _Atomic bool *recalled);
void ht_gate_recall(struct ht_gate *g);

/* The permission for one request. dev NULL: there is none, and an urgent thread needs none. */
struct ht_permit {
    struct ht_dev *dev;
    enum ht_direction direction;
    enum ht_io_class io_class;
    uint32_t bytes;
};
struct ht_permit_request {
    struct ht_dev *dev; /* NULL: no permission is needed */
    enum ht_direction direction;
    enum ht_gate_good good; /* that the request brings */
    uint32_t bytes;
};
/*
 * Waits until the thread's class may start this request. The caller holds no chunk, no staging buffer and no lock but
 * that of a control session.
 */
void ht_permit_get(struct ht_gate *g, const struct ht_permit_request *r, struct ht_permit *out);
/* False: not now. */
bool ht_permit_try(struct ht_gate *g, const struct ht_permit_request *r, struct ht_permit *out);
/* The request goes to this device, and has so many bytes, which may be fewer. dev NULL: puts the permit. */
void ht_permit_settle(struct ht_permit *p, struct ht_dev *dev, uint32_t bytes);
/* The request has ended, or will not be. *p is empty then. */
void ht_permit_put(struct ht_permit *p);

/* Has any thread a permit for the device? A hint. */
bool ht_dev_has_permits(const struct ht_dev *dev);
/* An urgent thread waits for something that a request of this device holds, perhaps one of a lower class. */
void ht_gate_wait_begin(struct ht_dev *dev);
void ht_gate_wait_end(struct ht_dev *dev);

/* Of a device. */
struct ht_gate_stats {
    uint64_t in_flight_bytes[HT_IO_CLASSES];
    uint64_t moved_bytes[HT_IO_CLASSES];                   /* of reads and writes that succeeded */
    uint64_t waits[HT_IO_CLASSES], wait_ns[HT_IO_CLASSES]; /* at the gate, which have ended */
};
void ht_gate_stats(struct ht_dev *dev, struct ht_gate_stats *out);
