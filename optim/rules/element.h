/* SPDX-License-Identifier: Apache-2.0 */
/* element.h - the input of a rule's step: one or more elements, in lanes. */
#pragma once

#include <float.h>
#include "optim/rules/lanes.h"
#include "optim/rules/rule.h"

struct ht_element {
    ht_lanes p; /* the parameter in f32, to be updated */
    ht_lanes g; /* the gradient, its sign turned if maximize says so */
    ht_lanes state[HT_KERNEL_STATES_MAX];
};

/* The rule of a file, which files of kernels do not use; and the words with the same default in all rules. */
#define HT_COMMON_DEFAULTS                                                                                             \
    .durable_every = 1, .retain_every = 1, .grad_scale = 1, .accumulate = 1, .state_bits = 32, .state_bits_min = 4096, \
    .delta_keep = 8, .delta_max = 0.0625
#define HT_RULE static const struct ht_rule __attribute__((unused))

/* For rules whose weight decay is apart from the gradient: both are finite, their product may not be. */
static inline const char *refuse_decay(const struct ht_optim_config *c)
{
    return c->lr * c->weight_decay > FLT_MAX ? "weight_decay: lr * weight_decay is too large" : NULL;
}
