/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.h - the parts of `hitrainctl bench`: loads of a fixed time on a descriptor or on memory.
 *
 * A load has one thread and its own ring. It only reads, unless it says `write`.
 */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_BENCH_H
#define HITRAIN_MOUNT_HELPERS_CTL_BENCH_H

#include "tiering/base/base.h"

enum { HT_BENCH_DEPTH_MAX = 64 };

struct ht_bench_load {
    int fd;
    uint64_t range_bytes; /* from the beginning of the file or device */
    uint32_t block_bytes; /* of each request; a multiple of 4096 */
    unsigned depth;       /* requests in flight */
    bool random;          /* else in ascending order, and again from the beginning */
    bool once;            /* the range once, whatever time is left */
    bool write;           /* random bytes */
    uint64_t ns;          /* no new request after that time */
};

struct ht_bench_result {
    uint64_t bytes, requests, ns;
    uint64_t mean_ns, p99_ns; /* of a request; 0 for memory */
};

/*
 * -ETIMEDOUT: a request has had no answer for half a minute. Its memory and its ring stay until the process ends.
 * -ENODATA: the range is smaller than a block, or the file has become shorter.
 */
int ht_bench_run(const struct ht_bench_load *l, struct ht_bench_result *out) HT_MUST_CHECK;
/* Copies memory with so many threads for ns. */
int ht_bench_copy(unsigned threads, uint64_t ns, struct ht_bench_result *out) HT_MUST_CHECK;
/* Bytes per second. */
double ht_bench_rate(const struct ht_bench_result *r);

#endif
