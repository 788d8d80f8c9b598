/* SPDX-License-Identifier: Apache-2.0 */
/* bench_scratch.h - the scratch file of `hitrainctl bench --write`, which goes also when a signal ends the program. */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_BENCH_SCRATCH_H
#define HITRAIN_MOUNT_HELPERS_CTL_BENCH_SCRATCH_H

#include "mount-helpers/ctl/ctl.h"

#define HT_BENCH_SCRATCH_TEXT "256 MiB"
#define HT_BENCH_SCRATCH_BYTES (256 * HT_MIB)

struct ht_bench_scratch {
    char path[PATH_MAX];
    int fd;
    uint64_t bytes; /* that it may take: a quarter of the available space at most */
};

/* A new file in a directory of a mount, outside models. -errno: printed. One at a time. */
int ht_bench_scratch_begin(struct ht_bench_scratch *s, const char *path) HT_MUST_CHECK;
/* Removes it. -errno: printed. */
int ht_bench_scratch_end(struct ht_bench_scratch *s) HT_MUST_CHECK;

#endif
