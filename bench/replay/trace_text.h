/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace_text.h - a trace in memory, and its text (README.md). A trace has one caller: each entry begins when
 * the entry before it has ended.
 *
 * The reader takes any bytes. It refuses what the format does not allow, with the line and the reason. Its memory is
 * bounded: 24 bytes an entry and some 300 bytes a tensor, and so many entries and tensors.
 */
#pragma once

#include <stdio.h>

#include "tiering/base/base.h"

#define REPLAY_HEADER "hitrain trace 1"
#define REPLAY_ENTRIES_MAX (UINT64_C(1) << 24)
#define REPLAY_TENSORS_MAX (1u << 20)
#define REPLAY_TENSOR_BYTES_MAX (UINT64_C(1) << 44)
#define REPLAY_BYTES_MAX (UINT64_C(1) << 60)        /* of all tensors with their states */
#define REPLAY_COMPUTE_US_MAX UINT64_C(86400000000) /* a day */
enum { REPLAY_NAME_BYTES_MAX = 255, REPLAY_LINE_BYTES_MAX = 1023, REPLAY_ERROR_MAX = 256 };

enum replay_op {
    REPLAY_COMPUTE,
    REPLAY_READ,
    REPLAY_WRITE,
    REPLAY_GRADIENT,
    REPLAY_PREFETCH,
    REPLAY_EVICT,
    REPLAY_STEP,
    REPLAY_COMMIT,
    REPLAY_OPS
};

struct replay_tensor {
    char *name;
    uint64_t bytes;
    uint64_t state_bytes; /* of the optimizer, beside a parameter; 0: the tensor is no parameter */
};

struct replay_entry {
    uint64_t offset; /* REPLAY_COMPUTE: microseconds */
    uint64_t bytes;  /* of the tensor, from there on; 0 for REPLAY_COMPUTE, REPLAY_STEP and REPLAY_COMMIT */
    uint32_t tensor;
    uint32_t op;
};

struct replay_trace {
    struct replay_tensor *tensor;
    struct replay_entry *entry;
    uint64_t bytes; /* of all tensors with their states */
    uint64_t entries, entries_room;
    uint32_t tensors, tensors_room;
    uint32_t *names; /* table of tensors by name: number + 1, 0: none */
    uint32_t names_mask;
};

void replay_trace_init(struct replay_trace *t);
void replay_trace_free(struct replay_trace *t);

/* -EINVAL: err has the line and the reason. On failure the trace is empty. */
int replay_trace_read(FILE *from, struct replay_trace *out, char err[REPLAY_ERROR_MAX]) HT_MUST_CHECK;
/* -EIO: the file takes no more. */
int replay_trace_write(const struct replay_trace *t, FILE *to) HT_MUST_CHECK;

/* For generators. -EINVAL: not a name, or a second one; -E2BIG: too many, or too large. */
int replay_trace_add_tensor(struct replay_trace *t, const char *name, uint64_t bytes, uint64_t state_bytes,
                            uint32_t *out_tensor) HT_MUST_CHECK;
int replay_trace_add(struct replay_trace *t, enum replay_op op, uint32_t tensor, uint64_t offset,
                     uint64_t bytes) HT_MUST_CHECK;

/* Does a training step end at this entry: a step or a commit that does not follow another one at once? */
bool replay_ends_step(const struct replay_trace *t, uint64_t entry);
uint64_t replay_trace_steps(const struct replay_trace *t);
