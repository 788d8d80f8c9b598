/* SPDX-License-Identifier: Apache-2.0 */
/* need.h - how large a store a model needs. The one formula in C; _need.py of the client has it again. Pure. */
#pragma once

#include "optim/rules/config.h"

struct ht_need {
    uint64_t elements, tensors; /* tensors: each rounds its content up */
    uint8_t dtype;              /* enum ht_dtype, of the parameters and of their gradients */
};
/*
 * Bytes of a store that has only this model, and in which every step has its space: parameters and state, their
 * rewrite, a gradient that waits, kept steps, logged steps, the log and the store's own. UINT64_MAX: no number does.
 */
uint64_t ht_need_bytes(const struct ht_need *n, const struct ht_optim_config *c);
/* How many tensors a model of so many elements has, where nobody says it. */
uint64_t ht_need_tensors(uint64_t elements);
/* The most elements for which ht_need_bytes is at most so many bytes. */
uint64_t ht_need_elements(uint64_t bytes, uint8_t dtype, const struct ht_optim_config *c);
