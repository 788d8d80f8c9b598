/* SPDX-License-Identifier: Apache-2.0 */
/*
 * generate.h - traces of training steps, by arithmetic: transformers like GPT and Llama whose optimizer is in the store
 * ("gpt", "llama"), the same whose tensors are swapped to files as ZeRO-Infinity does ("gpt-swap", "llama-swap"), and a
 * cyclic scan ("scan").
 */
#pragma once

#include "bench/replay/trace_text.h"

struct generate_config {
    const char *kind, *shape;
    double scale;               /* of all sizes */
    uint64_t steps, compute_us; /* of one step */
    uint64_t activation_bytes;  /* of a layer, written in forward and read in backward; 0: not in the store */
    uint64_t tensors, bytes;    /* of a scan: so many, so large */
    uint64_t durable_every;     /* so many steps have a commit; 0: none has */
    double optimizer_share;     /* of compute_us, while states are swapped */
};

/* -EINVAL: unknown kind or shape, or a number that makes no trace; -E2BIG: too many entries. */
int generate_trace(const struct generate_config *c, struct replay_trace *out) HT_MUST_CHECK;
/* Names of the shapes, with spaces between. */
void generate_put_shapes(FILE *to);
