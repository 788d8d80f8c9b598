/* SPDX-License-Identifier: Apache-2.0 */
/*
 * top.h - the parts of `hitrainctl top`: a sample of the figures, and frames that show the differences of two samples.
 *
 * A sample is the attribute stats of the mount's root and its .hitrain/devices, roots and background, read one after
 * the other, so its figures have about the same time.
 */
#pragma once

#include "mount-helpers/ctl/ctl.h"
#include "tiering/base/buf.h"
#include <hitrain/limits.h>

enum { HT_TOP_ROOTS_MAX = 256, HT_TOP_ENGINES_MAX = 16, HT_TOP_NAME_MAX = 256 };

/*
 * The figures of each kind: a name here, and the word by which the mount knows it. Of the store and its devices also
 * the key in JSON, and whether that has the change per second.
 */
#define HT_TOP_STORE(FIGURE)                                                           \
    FIGURE(TOTAL, "total_bytes", "total_bytes", false)                                 \
    FIGURE(AVAILABLE, "available_bytes", "available_bytes", false)                     \
    FIGURE(DRAM, "dram_bytes", "dram_bytes", false)                                    \
    FIGURE(RESIDENT, "resident_bytes", "resident_bytes", false)                        \
    FIGURE(DIRTY, "dirty_bytes", "dirty_bytes", false)                                 \
    FIGURE(PROTECTED, "protected_bytes", "protected_bytes", false)                     \
    FIGURE(PASSTHROUGH, "passthrough_used_bytes", "passthrough_used_bytes", false)     \
    FIGURE(STAGING, "staging_bytes", "staging_bytes", false)                           \
    FIGURE(STAGING_USED, "staging_used_bytes", "staging_used_bytes", false)            \
    FIGURE(LOG, "log_bytes", "log_bytes", false)                                       \
    FIGURE(LOG_USED, "log_used_bytes", "log_used_bytes", false)                        \
    FIGURE(REQUESTS, "mount_requests", "requests_per_s", true)                         \
    FIGURE(HITS, "hits", "hits_per_s", true)                                           \
    FIGURE(MISSES, "misses", "misses_per_s", true)                                     \
    FIGURE(EVICTIONS, "evictions", "evictions_per_s", true)                            \
    FIGURE(WRITEBACKS, "writebacks", "writebacks_per_s", true)                         \
    FIGURE(PARKED, "mount_parked_reads", "update_waits_per_s", true)                   \
    FIGURE(ROOM_WAITS, "room_waits", "room_waits_per_s", true)                         \
    FIGURE(ERRORS, "error_events", "errors", false) /* since the mount, as the next */ \
    FIGURE(WARNINGS, "warn_events", "warnings", false)
#define HT_TOP_DEVICE(FIGURE)                                                          \
    FIGURE(READ, "read_bytes", "read_bytes_per_s", true) /* of an engine: its bytes */ \
    FIGURE(WRITTEN, "written_bytes", "written_bytes_per_s", true)                      \
    FIGURE(URGENT_MOVED, "urgent_moved_bytes", "urgent_bytes_per_s", true)             \
    FIGURE(PLANNED_MOVED, "planned_moved_bytes", "planned_bytes_per_s", true)          \
    FIGURE(BACKGROUND_MOVED, "background_moved_bytes", "background_bytes_per_s", true) \
    FIGURE(URGENT, "urgent_bytes", "urgent_bytes", false)                              \
    FIGURE(PLANNED, "planned_bytes", "planned_bytes", false)                           \
    FIGURE(BACKGROUND, "background_bytes", "background_bytes", false)                  \
    FIGURE(PLANNED_WAITS, "planned_waits", "planned_waits_per_s", true)                \
    FIGURE(BACKGROUND_WAITS, "background_waits", "background_waits_per_s", true)       \
    FIGURE(OLDEST, "oldest_request_ns", "oldest_request_ns", false)
#define HT_TOP_ROOT(FIGURE)         \
    FIGURE(STEP, "step")            \
    FIGURE(DURABLE, "durable_step") \
    FIGURE(OPEN, "step_open")       \
    FIGURE(GRAD, "grad_bytes")      \
    FIGURE(UPDATE_NS, "update_ns")  \
    FIGURE(COMMIT_NS, "commit_ns")  \
    FIGURE(STATE, "state_bytes")
#define HT_TOP_INDEX(name, ...) HT_TOP_##name,
enum ht_top_store { HT_TOP_STORE(HT_TOP_INDEX) HT_TOP_STORE_FIGURES };
enum ht_top_device { HT_TOP_DEVICE(HT_TOP_INDEX) HT_TOP_DEVICE_FIGURES };
enum ht_top_root { HT_TOP_ROOT(HT_TOP_INDEX) HT_TOP_ROOT_FIGURES };
#undef HT_TOP_INDEX

struct ht_top_part {
    char name[HT_TOP_NAME_MAX]; /* path of a model, path of a device, name of an engine */
    char state[32];             /* health of a device, state of an engine */
    uint64_t value[HT_TOP_DEVICE_FIGURES];
};

struct ht_top_sample {
    uint64_t at_ns;
    uint64_t store[HT_TOP_STORE_FIGURES];
    unsigned devices, roots, engines;
    struct ht_top_part device[HT_DEVICES_MAX], root[HT_TOP_ROOTS_MAX], engine[HT_TOP_ENGINES_MAX];
};

/* They are changed. Lines that mean nothing are passed over. */
struct ht_top_texts {
    char *stats, *devices, *roots, *background;
};
void ht_top_parse(const struct ht_top_texts *t, uint64_t at_ns, struct ht_top_sample *out);

enum ht_top_order { HT_TOP_BY_TRAFFIC, HT_TOP_BY_STEPS, HT_TOP_BY_STATE, HT_TOP_BY_NAME, HT_TOP_ORDERS };

struct ht_top_view {
    const char *point;
    unsigned width, height; /* of a terminal; height 0: as many lines as needed */
    bool terminal;          /* lines end as a terminal needs it, and headings are inverse */
    bool paused;
    uint64_t silent_s; /* the mount has not answered for so long */
    enum ht_top_order order;
    double interval_s;
};

/*
 * Appends a frame, which fits into the width and the height. before: the sample before now; base: an older one,
 * for the rates of steps. Both may be now itself.
 */
void ht_top_frame(const struct ht_top_view *v, const struct ht_top_sample *now, const struct ht_top_sample *before,
                  const struct ht_top_sample *base, struct ht_buf *out);
/* The same as one object of JSON, on stdout. */
void ht_top_json(const struct ht_top_view *v, const struct ht_top_sample *now, const struct ht_top_sample *before,
                 const struct ht_top_sample *base, bool in_lines);
