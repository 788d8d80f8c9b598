/* SPDX-License-Identifier: Apache-2.0 */
/*
 * passing.h - how much of the DRAM tier is left to content that passes through: the policy. Pure; not locked: the owner
 * does.
 *
 * The protected set saves one read of its bytes in each step. A gradient that found no room among what passes was
 * written, and its update read it back: two transfers. So after a step with such gradients more room is left to what
 * passes, and the protected set has the rest. One step lets protected images go. The step after that shows what it was
 * worth. Without such gradients the room shrinks again, by small parts.
 *
 *          gradients were read back                   saved more than the protected set lost
 *   stands ------------------------> is larger, a trial ------------------------------------> stands
 *      ^                                 '--did not: as before, for `patience` steps----------> stands
 *      '-- none for `patience` steps --> is smaller, a trial: the same question
 *
 * Patience doubles with each trial that is taken back.
 */
#pragma once

#include "tiering/base/base.h"

struct ht_passing {
    uint64_t least_bytes, most_bytes; /* room for what passes; fixed */
    uint64_t part_bytes;              /* a change is at least so large */
    uint64_t bytes;                   /* now */
    uint64_t read_back_bytes;         /* that updates read of gradients from devices, in this step: the owner counts */
    uint64_t trial_bytes;             /* the room before the trial */
    uint64_t trial_read_back_bytes;   /* in the step before it */
    bool trial, settling;
    unsigned calm;     /* steps without such gradients */
    unsigned wait;     /* steps until the next trial */
    unsigned patience; /* steps */
};
enum { HT_PASSING_PATIENCE = 8, HT_PASSING_PATIENCE_MAX = 512 };

/* For a tier in which what passes has least_bytes at first. */
void ht_passing_init(struct ht_passing *p, uint64_t tier_bytes, uint64_t least_bytes);
/*
 * A step has ended. waits: its gradients wait for the end of the step, in the protected set: then the room is as at
 * first. True: the room has changed.
 */
bool ht_passing_end_step(struct ht_passing *p, bool waits) HT_MUST_CHECK;
