/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - which content leaves memory when, and when it is read again: a plan of one step that repeats. Pure: the
 * accesses of a step, the memory and the rates of the devices go in, and a decision about each idle period comes out.
 *
 * Between two accesses content is idle. It is idle over the end of the step, too: the first access of the next step
 * follows the last one of this step. With everything in memory, some bytes are above the room there is, for some time.
 * A period in which content is away saves bytes x time of that area, and costs the time that devices need to write it,
 * if it is dirty, and to read it again. The plan takes periods with the best ratio first, as TERAIO does. Each takes
 * bandwidth on a time line: the read ends when the content is needed, and begins as late as the bandwidth that is left
 * allows. So a period in which devices are busy is worth less, and reads spread over the step.
 *
 *   bytes   |      ______                 over the room: the area that periods save
 *           |.____/......\__.... room
 *           |/             \_____
 *           +----------------------> time, around the step
 *   content A  use    (leaves)    [reads] use
 *
 * When no period is left whose read would end in time, others are taken: their users wait. Without a rate in a
 * direction nothing leaves that would have to move that way.
 */
#ifndef HITRAIN_TIERING_TIER_PLAN_H
#define HITRAIN_TIERING_TIER_PLAN_H

#include "tiering/base/base.h"

enum { HT_PLAN_TENSORS_MAX = 1 << 20, HT_PLAN_ACCESSES_MAX = 1 << 22 };

enum ht_plan_use {
    HT_PLAN_READ,
    HT_PLAN_CONSUME,   /* reads it for the last time: the content goes and is never written */
    HT_PLAN_UPDATE,    /* reads it and changes it */
    HT_PLAN_OVERWRITE, /* of the whole: content from before is not needed */
    HT_PLAN_USES
};

/* A tensor, or a range of one, that comes and goes as a whole. */
struct ht_plan_tensor {
    uint64_t bytes;
    bool stored; /* a commit of each step writes its changes anyway */
    bool pinned; /* it never leaves, and room_bytes does not count it */
};

struct ht_plan_access {
    uint64_t time_ns; /* since the step began; below step_ns */
    uint32_t tensor;
    enum ht_plan_use use;
};

struct ht_plan_input {
    const struct ht_plan_tensor *tensor;
    const struct ht_plan_access *access; /* in order of time */
    uint32_t tensors, accesses;
    uint64_t step_ns;
    uint64_t room_bytes;                          /* memory for all tensors */
    uint64_t read_bytes_per_s, write_bytes_per_s; /* of all devices; 0: they complete nothing */
    uint64_t write_bytes_max;                     /* that leaving may write in a step; UINT64_MAX: any */
};

/*
 * What happens between an access and the next one of its tensor. Times are of this step, or, from step_ns on, the next.
 */
struct ht_plan_idle {
    uint64_t next_ns; /* the next access */
    /* It leaves: the read should begin, and has room from then on. next_ns: no read, because it is overwritten. */
    uint64_t fetch_ns;
    bool leaves;
    bool late; /* its read cannot end in time */
};

struct ht_plan {
    struct ht_plan_idle *idle;        /* of each access */
    uint64_t read_bytes, write_bytes; /* in a step, because something leaves */
    uint64_t late_bytes;              /* of the reads, those that cannot end in time */
    uint64_t peak_bytes;              /* in memory; more than the room: it is too small for this plan */
};

/*
 * -EINVAL: the input has no meaning: a tensor of no bytes, an access of no tensor, times that are not in order, a step
 * without length. -E2BIG: more tensors or accesses than the maxima. -ENOMEM. The plan is the caller's.
 */
int ht_plan_make(const struct ht_plan_input *in, struct ht_plan *out_plan) HT_MUST_CHECK;
void ht_plan_free(struct ht_plan *p);

#endif
