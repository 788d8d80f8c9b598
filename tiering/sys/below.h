/* SPDX-License-Identifier: Apache-2.0 */
/*
 * below.h - which bytes a block device shows: those of a file below a loop device, or a part of another device.
 *
 * A loop device, a partition and a device-mapper or RAID device are names of bytes that have other names, too. At the
 * bottom of such a chain is a regular file or a device with nothing below it.
 */
#pragma once

#include <limits.h>
#include <sys/stat.h>
#include "tiering/base/base.h"

enum { HT_BELOW_MAX = 32 };

/* Bytes [begin, end) of a thing. */
struct ht_bytes {
    bool file;
    dev_t device; /* its number, or that of the file system with the file */
    ino_t inode;
    uint64_t begin, end; /* end UINT64_MAX: to its end, or not known */
};

/* All that lies below a device, from the top. Of a thing that shows its bytes through a loop device, its path. */
struct ht_below {
    unsigned count;
    struct ht_below_thing {
        struct ht_bytes bytes;
        bool bottom;         /* nothing is below it */
        bool by_loop;        /* the thing above it is a loop device: neither the kernel nor a claim on that holds it */
        char path[PATH_MAX]; /* by_loop: as the kernel names it, or "" where it has no name here */
    } thing[HT_BELOW_MAX];
};

/* st: a regular file or a block device, which is the first thing. -EMLINK: more than can be followed. */
int ht_below_find(const struct stat *st, struct ht_below *out) HT_MUST_CHECK;
/*
 * A loop device with some of the same bytes and is not part of the chain itself: 1 and its name, without /dev.
 * writing: also one that only reads counts. 0: there is none that can be seen.
 */
int ht_below_other_loop(const struct ht_below *b, bool writing, char out_name[NAME_MAX + 1]) HT_MUST_CHECK;
/* A number that sysfs has of a block device, below its folder; 0: none. */
uint64_t ht_block_number(dev_t number, const char *name);
/* The file lies on a file system of this machine alone, where its lock excludes all others. */
bool ht_below_is_local(int fd);
