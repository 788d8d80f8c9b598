/* SPDX-License-Identifier: Apache-2.0 */
/* options.h - the command line of hitrain. Pure: nothing is opened or looked up. */
#ifndef HITRAIN_FS_OPTIONS_H
#define HITRAIN_FS_OPTIONS_H

#include "fs/mountflags.h"
#include "tiering/base/base.h"
#include "tiering/base/buf.h"
#include "tiering/base/mem.h"
#include <hitrain/limits.h>

struct ht_options {
    const char *device[HT_DEVICES_MAX]; /* the first ones from the arguments, then those of device= (owned) */
    unsigned device_count, named_count; /* named_count: how many at the end of device are owned */
    const char *mountpoint;
    bool foreground, single_thread, debug, help, version;
    bool read_only, tune, allow_other, remount, degraded;
    bool labelled;  /* security contexts were named */
    bool told;      /* so was something that the kernel tells of a mount: for a remount only */
    uint32_t given; /* bit i: row i of the table of options was named */
    struct ht_mount_flags flags;
    uint64_t dram_bytes, staging_bytes; /* 0: the store's default */
    uint64_t handout_bytes;             /* 0: off */
    uint64_t scrub_rate_bytes;          /* a second; 0: the store's default */
    unsigned commit_ms;
    unsigned answer_s;      /* 0: the store's default */
    unsigned optim_threads; /* 0: one for each CPU */
    unsigned fuse_threads;  /* 0: by the number of CPUs */
    int numa_node;          /* a node, HT_NUMA_OFF or HT_NUMA_AUTO */
    struct ht_buf passed;   /* for libfuse and the kernel: text with NUL */
};

/* allow_other: the default. -EINVAL: said what is wrong. Release with ht_options_free in any case. */
int ht_options_parse(int argc, char **argv, bool allow_other, struct ht_options *out) HT_CHECK;
/* For a remount: the first option of asked that was named and differs from what is in force. NULL: none. */
const char *ht_options_changed(const struct ht_options *in_force, const struct ht_options *asked);
void ht_options_free(struct ht_options *o);
void ht_options_usage(void);

#endif
