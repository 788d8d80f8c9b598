/* SPDX-License-Identifier: Apache-2.0 */
/*
 * play.h - plays a trace in a folder: of a mounted store, or of any file system if the trace has no parameters. Tensors
 * are the files t0, t1, ... there, and parameters those of the model `model`, whose optimizer is AdamW. Transfers are
 * as DeepSpeed's: O_DIRECT, 1 MiB each, eight in flight. Computing is a wait.
 */
#pragma once

#include "bench/replay/trace_text.h"

struct play_config {
    const char *folder;
    double noise; /* compute times change by up to this part, either way */
    uint64_t seed;
    uint64_t warm_steps;      /* the figures begin after so many steps, if there are more */
    uint64_t names_next_uses; /* not 0: it sets user.hitrain.next_use, as a program that knows its step */
};

struct play_result {
    uint64_t steps; /* that the figures are of; at least 1 */
    uint64_t time_ns, compute_ns, stall_ns;
    uint64_t asked_bytes, given_bytes; /* that the caller read; that it wrote */
    bool counted;                      /* the store's figures are there */
    uint64_t device_read_bytes, device_written_bytes, hits, misses;
};

/* Makes the files. Content is not zero, so that it is stored. Says what fails. */
int play_make(const struct replay_trace *t, const struct play_config *c) HT_MUST_CHECK;
int play_trace(const struct replay_trace *t, const struct play_config *c, struct play_result *out) HT_MUST_CHECK;
