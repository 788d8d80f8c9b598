/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runs.h - the latest accesses to chunks, as runs: one for each pass over neighbouring chunks of an object. A new run
 * takes the place of the oldest. The owner may give the ring more room, and its history begins anew then. Pure; not
 * locked: the owner does.
 *
 * Threads that work on neighbouring chunks overtake each other, so a run may have chunks in any order within
 * HT_RUN_NEAR of each other. A chunk that is begun again begins a run.
 *
 * And how many accesses make a step: the period of a sequence of accesses. A sequence has a period if its last accesses
 * are those before them again. Threads overtake each other, so the order may differ a little, and one access in fifty
 * may be another one.
 */
#pragma once

#include "tiering/base/base.h"

enum ht_plan_use {
    HT_PLAN_READ,
    HT_PLAN_CONSUME,   /* reads it for the last time: the content goes and is never written */
    HT_PLAN_UPDATE,    /* reads it and changes it */
    HT_PLAN_OVERWRITE, /* of the whole: content from before is not needed */
    HT_PLAN_USES
};

enum { HT_RUNS_MIN = 1 << 15, HT_RUNS_MAX = 1 << 20, HT_RUNS_OPEN = 1 << 10, HT_RUN_NEAR = 8, HT_RUN_UNIT = 1 << 16 };

struct ht_run {
    uint64_t object;
    uint64_t begin_ns, end_ns; /* of its first and last access so far */
    uint32_t first, last;      /* chunks; last: the highest */
    uint8_t use;               /* enum ht_plan_use */
    uint8_t seen;              /* of the last chunks, HT_RUN_NEAR, as bits */
    uint8_t chunk_shift;
    uint8_t last_units; /* of HT_RUN_UNIT: memory of the last chunk */
    bool pinned;        /* it never leaves */
};

struct ht_runs {
    struct ht_run *run;          /* number n is at n % size */
    uint32_t size;               /* a power of two */
    uint64_t count;              /* runs so far */
    uint64_t from;               /* the history begins with this number */
    uint64_t open[HT_RUNS_OPEN]; /* by object and use: number of the run that may go on, and 1 */
};

/* One chunk is accessed. */
struct ht_run_access {
    uint64_t object, now_ns;
    uint32_t index;
    enum ht_plan_use use;
    uint8_t chunk_shift;
    uint32_t bytes; /* of memory that the chunk takes; 0: a whole chunk */
    bool pinned;
    bool begins; /* from the first byte of the chunk on */
};

int ht_runs_init(struct ht_runs *r) HT_MUST_CHECK;
void ht_runs_destroy(struct ht_runs *r);
static inline uint64_t ht_runs_bytes(const struct ht_runs *r)
{
    return r->size * sizeof(*r->run);
}
/* All its places are taken: older runs may be gone. */
static inline bool ht_runs_is_full(const struct ht_runs *r)
{
    return r->count - r->from >= r->size;
}
void ht_runs_note(struct ht_runs *r, const struct ht_run_access *a);
/* The number of the oldest that is there; the count, if there is none. */
uint64_t ht_runs_oldest(const struct ht_runs *r);
/* Copies up to `most` runs in order, from a number on that is there. Returns how many. */
uint32_t ht_runs_copy(const struct ht_runs *r, uint64_t from, uint32_t most, struct ht_run *to);
/* The runs are in an array of zeros from now on, and the older ones are gone. Returns the array of before. */
struct ht_run *ht_runs_replace(struct ht_runs *r, struct ht_run *run, uint32_t size) HT_MUST_CHECK;

enum { HT_PERIOD_ACCESSES_MAX = 10000000, HT_PERIOD_KEYS_MAX = 1 << 20 };

/*
 * key: what each access is of, and how: any number, the same for the same access of another step. The sequence ends
 * now. *out_accesses: the shortest period that the end of the sequence has; 0: none. -E2BIG: more accesses, or more
 * different ones, than the maxima. -ENOMEM
 */
int ht_period_find(const uint64_t key[], uint32_t accesses, uint32_t *out_accesses) HT_MUST_CHECK;
