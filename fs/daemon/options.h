/* SPDX-License-Identifier: Apache-2.0 */
/* options.h - the command line of hitrain. Pure: nothing is opened or looked up. */
#pragma once

#include "tiering/base/buf.h"
#include "tiering/api/store.h"
#include "tiering/sys/mem.h"
#include <hitrain/limits.h>

/* For store.shm_bytes: the tier lends memory to openers that ask, if the kernel and the daemon's rights allow it. */
#define HT_PASSTHROUGH_AUTO UINT64_MAX

/* How a list of words of mount(8) changes flags of mount(2): those of clear first, then those of set. */
struct ht_mount_flags {
    unsigned long set, clear;
};

struct ht_options {
    const char *device[HT_DEVICES_MAX]; /* the first ones from the arguments, then those of device= (owned) */
    unsigned device_count, named_count; /* named_count: how many at the end of device are owned */
    const char *mountpoint;
    bool foreground, single_thread, debug, help, version;
    bool tune, allow_other, remount, no_replay;
    bool labelled;  /* security contexts were named */
    bool reported;  /* an option was named that the kernel reports of a mount: for a remount only */
    uint32_t given; /* bit i: row i of the table of options was named */
    struct ht_mount_flags flags;
    struct ht_store_opts store;
    bool compress;          /* files without the attribute, too */
    unsigned optim_threads; /* 0: as many as CPUs, at least two, and two for each of several devices */
    unsigned fuse_threads;  /* 0: by the number of CPUs */
    struct ht_buf passed;   /* for libfuse and the kernel: text with NUL */
    struct ht_buf fixed;    /* those that a remount cannot change, as they were named: text with NUL */
};

/* allow_other: the default. -EINVAL: logs the reason. Release with ht_options_free in any case. */
int ht_options_parse(int argc, char **argv, bool allow_other, struct ht_options *out) HT_MUST_CHECK;
/* Parses fixed of a running daemon. -EINVAL: it names options that this program does not know. */
int ht_options_parse_fixed(const char *fixed, struct ht_options *out) HT_MUST_CHECK;
/* For a remount: the first named option in `asked` that differs from in_force. NULL: none. */
const char *ht_options_changed(const struct ht_options *in_force, const struct ht_options *asked);
void ht_options_free(struct ht_options *o);
void ht_options_usage(void);

/* The flags of a mount whose options the kernel lists so ("rw,nosuid,relatime"); may be called for several lists. */
unsigned long ht_mount_flags_of(const char *options);
/* Flags that a new mount cannot have from the beginning: set them by mount(2) once it is there. */
unsigned long ht_mount_flags_later(const struct ht_mount_flags *f);
