/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace.h - which tensor was accessed when, and how long the access waited: a ring of fixed size, always on.
 *
 * Each entry takes 32 bytes; a new one takes the place of the oldest. Any thread may write and read without a lock. A
 * reader that is overtaken skips to what is there. An entry that a writer is slow to finish, while others fill the
 * whole ring, may be mixed with another one: the trace is for people, and nothing depends on it.
 *
 *     struct ht_trace_mark m = ht_trace_begin();
 *     (the access)
 *     ht_trace_end(trace, &m, HT_TRACE_READ, id, offset, bytes);
 */
#pragma once

#include "tiering/base/base.h"

enum { HT_TRACE_ENTRIES = 1 << 16, HT_TRACE_UNIT = 4096 };

enum ht_trace_op {
    HT_TRACE_READ,
    HT_TRACE_WRITE,
    HT_TRACE_GRADIENT, /* of the parameter: bytes of its gradient */
    HT_TRACE_UPDATE,   /* by the optimizer */
    HT_TRACE_OPEN,     /* of a passthrough file: reads of its mapping make no entries */
    HT_TRACE_CLOSE,
    HT_TRACE_PREFETCH,
    HT_TRACE_EVICT,
    HT_TRACE_STEP, /* of a model root: a boundary that is not durable yet */
    HT_TRACE_COMMIT,
    HT_TRACE_ABORT,
    HT_TRACE_OPS
};
/* "read", "write", ... */
const char *ht_trace_op_word(enum ht_trace_op op);

struct ht_trace_entry {
    uint64_t seq;           /* from 1 */
    uint64_t time_ns;       /* when the access began: since the trace began, by the monotonic clock */
    uint64_t id;            /* object: inode number of the file, or of the model root */
    uint64_t offset, bytes; /* multiples of HT_TRACE_UNIT around the access */
    uint64_t waited_ns;     /* for devices, memory, locks and updates, in whole microseconds */
    enum ht_trace_op op;
};

struct ht_trace;
/* entries: a power of two. */
int ht_trace_new(uint32_t entries, struct ht_trace **out) HT_MUST_CHECK;
void ht_trace_free(struct ht_trace *t);

struct ht_trace_mark {
    uint64_t begin_ns, waited_ns;
};
/* The calling thread begins an access now; or it did at a time before (0: unknown), and has waited since. */
struct ht_trace_mark ht_trace_begin(void);
struct ht_trace_mark ht_trace_begin_at(uint64_t begin_ns);
void ht_trace_end(struct ht_trace *t, const struct ht_trace_mark *m, enum ht_trace_op op, uint64_t id, uint64_t offset,
                  uint64_t bytes);

/* The oldest entry after number `after`. False: there is none yet. */
bool ht_trace_next(struct ht_trace *t, uint64_t after, struct ht_trace_entry *out);
