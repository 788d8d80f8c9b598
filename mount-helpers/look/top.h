/* SPDX-License-Identifier: Apache-2.0 */
/*
 * top.h - the parts of `hitrainctl top`: a sample of the figures, and frames that show the differences of two samples.
 *
 * A sample is the attribute stats of the mount's root and its .hitrain/devices, roots and background, read one after
 * the other, so its figures have about the same time.
 */
#ifndef HITRAIN_MOUNT_HELPERS_LOOK_TOP_H
#define HITRAIN_MOUNT_HELPERS_LOOK_TOP_H

#include "mount-helpers/ctl/ctl.h"
#include "tiering/base/buf.h"
#include <hitrain/limits.h>

enum { HT_TOP_ROOTS_MAX = 256, HT_TOP_ENGINES_MAX = 16, HT_TOP_NAME_MAX = 256 };

/* The figures of each kind: a row of top_sample.c names the metric. */
enum ht_top_store {
    HT_TOP_TOTAL,
    HT_TOP_AVAILABLE,
    HT_TOP_DRAM,
    HT_TOP_RESIDENT,
    HT_TOP_DIRTY,
    HT_TOP_PROTECTED,
    HT_TOP_PASSTHROUGH,
    HT_TOP_STAGING,
    HT_TOP_STAGING_USED,
    HT_TOP_HITS,
    HT_TOP_MISSES,
    HT_TOP_EVICTIONS,
    HT_TOP_WRITEBACKS,
    HT_TOP_PARKED,
    HT_TOP_ROOM_WAITS,
    HT_TOP_JOBS,
    HT_TOP_REQUESTS,
    HT_TOP_LOG,
    HT_TOP_LOG_USED,
    HT_TOP_ERRORS, /* events since the mount, as the next */
    HT_TOP_WARNINGS,
    HT_TOP_STORE_FIGURES
};
enum ht_top_device {
    HT_TOP_READ,
    HT_TOP_WRITTEN,
    HT_TOP_URGENT,
    HT_TOP_PLANNED,
    HT_TOP_BACKGROUND,
    HT_TOP_URGENT_MOVED,
    HT_TOP_PLANNED_MOVED,
    HT_TOP_BACKGROUND_MOVED,
    HT_TOP_PLANNED_WAITS,
    HT_TOP_BACKGROUND_WAITS,
    HT_TOP_OLDEST,
    HT_TOP_DEVICE_FIGURES
};
enum ht_top_root {
    HT_TOP_STEP,
    HT_TOP_DURABLE,
    HT_TOP_OPEN,
    HT_TOP_GRAD,
    HT_TOP_ELEMENTS,
    HT_TOP_UPDATE_NS,
    HT_TOP_COMMIT_NS,
    HT_TOP_STATE,
    HT_TOP_ROOT_FIGURES
};

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
/* Reads and parses those of the mount at point. */
int ht_top_read(const char *point, struct ht_top_sample *out) HT_MUST_CHECK;
/* Change per second of a counter; 0 if it fell, because the store was mounted again. */
double ht_top_rate(uint64_t now, uint64_t before, uint64_t ns);
/* The same part of an earlier sample; NULL: it is new. hint: the place of part. */
const struct ht_top_part *ht_top_same(const struct ht_top_part *part, const struct ht_top_part *list, unsigned count,
                                      unsigned hint);

enum ht_top_order { HT_TOP_BY_TRAFFIC, HT_TOP_BY_STEPS, HT_TOP_BY_STATE, HT_TOP_BY_NAME, HT_TOP_ORDERS };
extern const char *const ht_top_order_words[HT_TOP_ORDERS];

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

#endif
