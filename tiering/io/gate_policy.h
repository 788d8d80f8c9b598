/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gate_policy.h - may a request of a lower class go to its device now? Pure: clock and figures are the caller's.
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
#pragma once

#include "tiering/base/base.h"

enum ht_io_class {
    HT_IO_URGENT,     /* of a thread that says nothing else */
    HT_IO_PLANNED,    /* readahead, prefetch, writeback */
    HT_IO_BACKGROUND, /* scrub, log checkpoint */
    HT_IO_CLASSES
};

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
