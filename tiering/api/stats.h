/* SPDX-License-Identifier: Apache-2.0 */
/* stats.h - figures of the store, its NUMA nodes, its devices, and of the plan of a step that it follows. */
#pragma once

#include "tiering/io/gate.h"
#include "tiering/io/rings.h"
#include "tiering/journal/journal.h"
#include "tiering/tier/forecast.h"

struct ht_store;

struct ht_store_stats {
    uint64_t total_bytes, free_bytes, available_bytes, reserved_bytes, pending_free_bytes; /* space for data */
    uint64_t objects, chunks, lost_chunks; /* published; published and marked lost */
    uint64_t dram_bytes, dram_used_bytes, dram_dirty_bytes, dram_protected_bytes, dram_workingset_bytes;
    uint64_t dram_pinned_bytes;      /* of the protected ones */
    uint64_t dram_passing_bytes;     /* that the protected set never takes */
    uint64_t dram_protectable_bytes; /* what it may take now */
    uint64_t shm_bytes, shm_used_bytes,
        shm_count;          /* share; memory of open objects, and of closed ones that still have it; objects */
    uint64_t shm_bytes_max; /* the share, or what of the tier it may have */
    uint64_t staging_bytes, staging_used_bytes;
    uint64_t heap_spare_bytes; /* ht_heap_spare_bytes */
    uint64_t locked_bytes;     /* of all that memory; of mappings, which may be larger than their visible part */
    uint64_t huge_bytes;       /* of tier and pool in huge pages, as they were populated */
    struct ht_rings_stats io;
    uint64_t hits, misses, evictions, writebacks;
    uint64_t room_waits;                                         /* requests that waited for room in the DRAM tier */
    uint64_t readahead_chunks, readahead_hits, readahead_wasted; /* read ahead; later used; evicted unused */
    uint64_t moved_bytes; /* of ranges that an update wrote to another device than before */
    uint64_t scratch_written_bytes, scratch_dropped_bytes; /* of scratch objects: to devices; ended in memory */
    uint64_t device_read_bytes, device_written_bytes, device_discarded_bytes, device_flushes;
    uint64_t day_written_bytes, endurance_bytes; /* in the last 24 hours since the mount; the budget, 0: none */
    uint64_t checksum_errors, read_errors, write_errors;
    uint64_t cold_bytes, cold_read_bytes; /* in the vault, and those that came from there */
    uint64_t cold_waits, cold_wait_ns;    /* calls that waited for it */
    uint64_t commits;                     /* transactions whose durability a caller waited for */
    uint64_t meta_bytes;                  /* heap held for objects and chunks */
    /*
     * Heap held for descriptors of the DRAM tier (800 bytes for each MiB, and shadows of evicted images) and maps of
     * the devices (38 MiB for each TiB). Also for buffers of the log, and extents of chunks that lie in several pieces.
     */
    uint64_t working_bytes;
    uint64_t next_id;
    struct ht_journal_stats log;
};
void ht_store_stats(struct ht_store *s, struct ht_store_stats *out);
/*
 * What a writer gets at once: available_bytes, and what a commit makes free that a writer without space waits for.
 * WAITS for the space of deleted files.
 */
uint64_t ht_store_free(struct ht_store *s);
/* Are so many bytes available? If not, this thread lacks the rest (tiering/base/base.h). */
bool ht_store_has_space(struct ht_store *s, uint64_t bytes) HT_MUST_CHECK;
/* Its available_bytes alone: cheap. */
uint64_t ht_store_available(struct ht_store *s);

/* One of ht_store_nodes. */
struct ht_node_stat {
    uint64_t dram_bytes, dram_used_bytes, staging_bytes; /* its share; not of shared memory */
    /* the part of it that the system took from another node, about */
    uint64_t away_bytes;
};
void ht_store_node_stat(struct ht_store *s, unsigned place, struct ht_node_stat *out);

/* One device of the store. */
enum ht_log_copy_state { HT_LOG_COPY_NONE, HT_LOG_COPY_WRITTEN, HT_LOG_COPY_LOST };
struct ht_device_stat {
    const char *name;                /* path; NULL: missing. Lives as long as the store */
    uint64_t bytes;                  /* as it was formatted */
    uint64_t data_bytes, free_bytes; /* for data, and its unused part */
    uint64_t bad_bytes;              /* did not hold their writes; not used in this mount */
    enum ht_health health;
    const char *device_class; /* ht_device_class_word */
    uint64_t oldest_request_ns;
    enum ht_log_copy_state log; /* HT_LOG_COPY_LOST: missing, or not written any more */
    struct ht_dev_counters io;
    struct ht_dev_rate rate[HT_DIRECTIONS];
    bool has_share;           /* else speeds are not known yet, or it is the only device */
    uint64_t share_per_mille; /* of new content */
    struct ht_gate_stats gate;
};
unsigned ht_store_device_count(const struct ht_store *s);
void ht_store_device_stat(struct ht_store *s, unsigned index, struct ht_device_stat *out);

/*
 * Space of the published content of a scope, and of the chunks that share their bytes with no other one. Looks at all
 * objects, in slices. -ENOMEM.
 */
int ht_store_scope_space(struct ht_store *s, uint64_t scope, uint64_t *out_stored_bytes,
                         uint64_t *out_own_bytes) HT_MUST_CHECK;

/* -------------------------------------------------------------------- plan */

struct ht_plan_stats {
    bool active; /* a plan is followed; if not, figures are 0 */
    struct ht_forecast_figures figures;
    uint64_t made, dropped;   /* plans since the mount; dropped: did not match, or clipping changed */
    uint64_t hits, strangers; /* since the mount, as in figures */
};
void ht_store_plan_stats(struct ht_store *s, struct ht_plan_stats *out);

/* One use of a part of an object, and what the plan says of the time until the next one. */
struct ht_plan_line {
    uint64_t object, offset, bytes;
    struct ht_forecast_idle idle;
};
/*
 * The next uses from *place on, at most `most`, and moves *place behind them; begin with {0}. Returns how many;
 * 0: that was all, or the plan is not the one any more with which the caller began.
 */
struct ht_plan_place {
    uint64_t made; /* the plan's number; 0: the present one */
    uint32_t part;
    unsigned use;
};
unsigned ht_store_plan_lines(struct ht_store *s, struct ht_plan_place *place, struct ht_plan_line *to, unsigned most);
