/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gate.h - the gate before the devices: requests of lower classes wait for their permission there, so that urgent ones
 * find short queues.
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

/* ------------------------------------------------------------------ policy */

/*
 * May a request of a lower class go to its device now? Pure: clock and figures are the caller's.
 *
 *   urgent      always. A caller waits for it.
 *   planned     beside urgent requests, as many bytes as the device moves in HT_GATE_BOUND_NS; alone, any number.
 *   background  one request at a time, in the pauses between urgent ones; alone, two. A thread with a share also beside
 *               urgent ones: one request in so much time as the device takes for HT_GATE_SHARE times its bytes.
 *
 * The bound is what an urgent request finds before it. So the measured rate of the device decides how many bytes of a
 * lower class are in flight, and one request always may be.
 *
 * After an urgent request a background one waits for a twentieth of the usual pause, and 10 ms at most. So long pauses
 * are nearly all used. Pauses that are shorter than two background requests count as none: then the wait is 10 ms.
 *
 * Work of a lower class never stops. A planned request waits 0.2 s at most, a background one 0.5 s. This also holds for
 * devices that complete nothing. A clock that goes back ends the wait.
 */
#define HT_GATE_BOUND_NS UINT64_C(8000000)
#define HT_GATE_ALONE_NS UINT64_C(100000000) /* without an urgent request for so long, the others are alone */
#define HT_GATE_HOLD_NS_MAX UINT64_C(10000000)
#define HT_GATE_PLANNED_WAIT_NS_MAX UINT64_C(200000000)
#define HT_GATE_BACKGROUND_WAIT_NS_MAX UINT64_C(500000000)
#define HT_GATE_PAUSE_NS_MAX UINT64_C(1000000000)
#define HT_GATE_SHARE UINT64_C(32) /* so an archive costs a trainer that leaves no pauses 3 % of the reads at most */
#define HT_GATE_UNKNOWN_BYTES (UINT64_C(4) << 20) /* in place of the bound while the rate is not known */

/* Urgent requests of a device. Zeros: there were none. */
struct ht_gate_urgent {
    unsigned now;
    bool any;
    uint64_t end_ns;   /* of the last one */
    uint64_t pause_ns; /* mean time from an end to the next begin; of the last eight or so */
};
void ht_gate_urgent_begin(struct ht_gate_urgent *u, uint64_t now_ns);
void ht_gate_urgent_end(struct ht_gate_urgent *u, uint64_t now_ns);

struct ht_gate_state {
    struct ht_gate_urgent requests; /* urgent ones */
    struct ht_gate_urgent waits;    /* and callers that wait for what a lower class holds */
    uint64_t permitted_bytes;       /* to lower classes, in the direction of the request */
    unsigned background;            /* permits */
    bool has_share;                 /* the thread that asks; then when one last got a permit, and for how many bytes */
    uint64_t share_ns, share_bytes;
    bool rate_known;
    uint64_t bytes_per_s; /* of that direction */
};
/* Returns 0 if a request of so many bytes, which has waited since then, may go. Else when to look again, after now. */
uint64_t ht_gate_next_ns(const struct ht_gate_state *st, enum ht_io_class io_class, uint32_t bytes, uint64_t since_ns,
                         uint64_t now_ns);

/* ----------------------------------------------------------------- figures */

/* Of a device. */
struct ht_gate_stats {
    uint64_t in_flight_bytes[HT_IO_CLASSES];
    uint64_t moved_bytes[HT_IO_CLASSES];                   /* of reads and writes that succeeded */
    uint64_t waits[HT_IO_CLASSES], wait_ns[HT_IO_CLASSES]; /* at the gate, which have ended */
};
void ht_gate_stats(struct ht_dev *dev, struct ht_gate_stats *out);
