/* SPDX-License-Identifier: Apache-2.0 */
/* job_priv.h - the lanes of jobs, for job.c and what verifies them. */
#pragma once

#include "fs/fuse/fuse_priv.h"

struct ht_job_lane {
    struct ht_list link;  /* in jobs.lane[], or jobs.lane_free */
    struct ht_list ready; /* in jobs.ready[kind] */
    struct ht_list queue; /* jobs */
    enum ht_lane_kind kind;
    uint64_t key;
    unsigned running;
    size_t bytes; /* copied for its jobs */
};

/* The place of a lane in jobs.lane[]. */
static inline unsigned ht_job_bucket(enum ht_lane_kind kind, uint64_t key)
{
    return (unsigned)((key * HT_LANES + kind) % HT_LANE_BUCKETS);
}

/* How many of its jobs may run. */
unsigned ht_job_lane_limit(const struct ht_job_lane *l);

/* Asserts the invariants of job.c (tiering/base/verify.h). */
void ht_job_verify(struct ht_fuse *f) HT_REQUIRES(HT_LOCK_JOBS);
