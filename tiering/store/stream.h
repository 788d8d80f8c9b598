/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.h - does somebody read one byte after the other, and how far ahead of him should be read? Policy: it sees the reads of one
 * descriptor and nothing else.
 *
 * Several of a reader's requests are under way at once and come in any order, so a run is what has been read nearly without a gap. It
 * counts as a stream when it has no gap at all, and is long, or began at the beginning. Then the window opens, and grows while
 * the reader goes on. A read elsewhere ends it at once.
 *
 *   (nothing) --read--> run --long, no gap--> stream: window opens, doubles each time it has been read through
 *       ^                |                      |    --shrink: what was read ahead was gone, or found no room--> half the window
 *       +--------------- a read elsewhere, or too many gaps
 *
 * Pure, not locked: the caller's lock guards it.
 */
#ifndef HITRAIN_TIERING_STORE_STREAM_H
#define HITRAIN_TIERING_STORE_STREAM_H

#include "tiering/base/base.h"

struct ht_stream {   /* all zero: nothing was read yet */
    uint64_t lo, hi; /* the run */
    uint64_t seen;   /* bytes of it that were read */
    uint64_t window; /* bytes; 0: not a stream */
    uint64_t grow_at;
};

/*
 * [off, off + len) is read, len > 0. unit_bytes: what is read from a device at once, the smallest window. Returns where reading ahead
 * should have got to, 0: nowhere.
 */
uint64_t ht_stream_note(struct ht_stream *st, uint64_t off, uint64_t len, uint64_t unit_bytes,
                        uint64_t window_bytes_max);
/* Reading ahead did not do any good. */
void ht_stream_shrink(struct ht_stream *st, uint64_t unit_bytes);

#endif
