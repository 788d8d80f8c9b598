/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sim.h - predicts the time of a trace: one caller, DRAM of a fixed size, and a device that reads and writes at once,
 * each at its rate.
 *
 *   caller   computes, and waits for its accesses and at boundaries
 *   updates  of the optimizer, one after the other; a gradient queues them
 *   device   serves reads in order, and writes in order; a write that finds room in the buffer keeps no thread waiting
 *
 * A policy decides which units are in DRAM. The simulator counts, and keeps the time. A unit that is not in DRAM and
 * that the policy does not admit passes through: it is read, and written if it was changed.
 */
#pragma once

#include "bench/replay/access_string.h"

#define SIM_UNLIMITED UINT64_MAX

struct sim_config {
    uint64_t dram_bytes;
    uint64_t read_rate, write_rate; /* of the device, bytes per second */
    uint64_t copy_rate;             /* of memory: every access takes so long besides; 0: no time */
    uint64_t latency_ns;            /* of one read */
    uint64_t buffer_bytes;          /* of writes in flight, and of updates under way */
    double noise;                   /* compute times change by up to this part, either way */
    uint64_t seed;
    uint64_t warm_steps; /* the figures begin after so many steps, if there are more */
};

struct sim_result {
    uint64_t steps;                         /* that the figures are of; at least 1 */
    uint64_t time_ns, compute_ns, stall_ns; /* stall: waits, and copies between the caller and DRAM */
    uint64_t read_bytes, written_bytes;     /* by the device */
    uint64_t accesses, hits;                /* units; hits: of those that the policy kept */
    uint64_t prefetched;                    /* accesses of units that were read for them before */
};

/* SIM_OVERWRITE: of all of the unit, whose old content is not needed. */
enum sim_kind { SIM_READ, SIM_WRITE, SIM_OVERWRITE, SIM_UPDATE, SIM_PREFETCH };

struct sim {
    const struct sim_string *string;
    const struct replay_trace *trace;
    const struct sim_config *config;
    const struct sim_policy *policy;
    void *own;                           /* the policy's */
    uint64_t now, read_free, write_free; /* ns: the caller's time; the device begins the next read, write */
    uint64_t waited_ns;                  /* the caller, for the device and for updates, since the beginning */
    uint64_t room_at;                    /* during an access: when memory for it is there */
    struct sim_unit {
        uint64_t ready_at; /* its content is there */
        bool resident, dirty, listed;
        bool fetched; /* read before it was accessed */
    } * unit;
    uint32_t *dirty; /* units that were changed since the last commit; some may be clean again */
    uint32_t dirty_count;
    struct sim_updates *updates;
    struct sim_result result;
    uint64_t began, random, steps;
};

struct sim_policy {
    const char *name;
    bool unlimited; /* DRAM for all: the ideal */
    bool takes_hints;
    int (*start)(struct sim *s);
    void (*stop)(struct sim *s);
    /*
     * A unit is accessed; pos: number of the access. True: it is in DRAM afterwards. May call sim_evict, sim_clean.
     * SIM_PREFETCH has no number. False: nothing is read.
     */
    bool (*access)(struct sim *s, uint32_t unit, uint32_t pos, enum sim_kind kind);
    /* May be NULL, as all that follow. A resident unit has become dirty or clean. */
    void (*changed)(struct sim *s, uint32_t unit, bool dirty);
    /* A hint: the unit is evicted. Without it units stay. */
    void (*drop)(struct sim *s, uint32_t unit);
    /* It is this time: before each entry and each update. */
    void (*tick)(struct sim *s, uint64_t at);
};
extern const struct sim_policy sim_ideal, sim_lru, sim_belady, sim_today;

/* -ERANGE: the trace may take more than a hundred years. */
int sim_run(const struct sim_string *string, const struct sim_config *config, const struct sim_policy *policy,
            struct sim_result *out) HT_MUST_CHECK;

/* For policies. The unit leaves DRAM; its changes are written. */
void sim_evict(struct sim *s, uint32_t unit);
/* Its changes are written, and it stays. */
void sim_clean(struct sim *s, uint32_t unit);
/* Does the buffer take a write at this time? */
bool sim_has_buffer(const struct sim *s, uint64_t at);
