/* SPDX-License-Identifier: Apache-2.0 */
/*
 * readahead_policy.h - does a reader read sequentially, upwards or downwards, and how far ahead should the store read?
 * Policy: it sees the reads of one descriptor and nothing else.
 *
 * Several of a reader's requests are in flight at once and come in any order, so a run may have a few gaps. It counts
 * as a stream when it has no gap at all, and is long, or began at the beginning. Then the window opens, and grows while
 * the reader goes on. A read elsewhere ends it at once.
 *
 * A reader has two runs, one upwards and one downwards. The latter sees offsets in a mirror. So a reader of blocks that
 * come in descending order reads upwards within each block, and downwards. The run that went on farther counts.
 *
 *   (nothing) --read--> run --long, no gap--> stream: window opens, doubles each time it has been read through
 *       ^                |                      |    --shrink: the chunks were gone, or found no room--> a half
 *       +--------------- a read elsewhere, or too many gaps
 *
 * Pure, not locked: the caller's lock guards it.
 */
#pragma once

#include "tiering/base/base.h"

struct ht_readahead_policy { /* all zero: nothing was read yet */
    uint64_t lo, hi;         /* the run */
    uint64_t from;           /* where it began */
    uint64_t seen;           /* bytes of the run that were read */
    uint64_t window;         /* bytes; 0: not a stream */
    uint64_t grow_at;
};

/*
 * [off, off + len) is read, len > 0. unit_bytes: the size of one read from a device, the smallest window. Returns the
 * offset that readahead should have reached, 0: nowhere.
 */
uint64_t ht_readahead_policy_note(struct ht_readahead_policy *st, uint64_t off, uint64_t len, uint64_t unit_bytes,
                                  uint64_t window_bytes_max);
/* The readahead was useless. */
void ht_readahead_policy_shrink(struct ht_readahead_policy *st, uint64_t unit_bytes);

struct ht_readahead_both { /* all zero: nothing was read yet */
    struct ht_readahead_policy up, down;
};

struct ht_readahead_target {
    bool any, downwards;
    uint64_t to; /* the offset that readahead should have reached; downwards: the lowest */
};

/* As ht_readahead_policy_note, in both directions. Offsets are below 2^62. */
struct ht_readahead_target ht_readahead_both_note(struct ht_readahead_both *st, uint64_t off, uint64_t len,
                                                  uint64_t unit_bytes, uint64_t window_bytes_max);
/* The lowest offset of the run downwards. */
uint64_t ht_readahead_both_low(const struct ht_readahead_both *st);
