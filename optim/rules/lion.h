/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lion.h - Lion (Chen et al., arXiv:2302.06675, algorithm 2). PyTorch has none; roundings are those of its operations
 * mul_, add_(alpha=) and sign_ applied in the paper's order:
 *
 *   p *= 1 - lr weight_decay
 *   p -= lr sign(beta1 m + (1 - beta1) g)
 *   m  = beta2 m + (1 - beta2) g
 */
#pragma once

#include "optim/rules/element.h"

HT_LANES_FN void lion_step(struct ht_element *x, const struct ht_scalars *s)
{
    ht_lanes m = x->state[0];
    ht_lanes c = lanes_fma(lanes_set(s->lion.one_minus_beta1), x->g, m * lanes_set(s->lion.beta1));

    x->p = lanes_fma(lanes_set(s->lion.minus_lr), lanes_sign(c), x->p * lanes_set(s->lion.decay));
    x->state[0] = lanes_fma(lanes_set(s->lion.one_minus_beta2), x->g, m * lanes_set(s->lion.beta2));
}

static inline void lion_scalars(const struct ht_optim_config *c, uint64_t t, struct ht_scalars *out)
{
    out->kernel = HT_KERNEL_LION;
    out->lion.decay = (float)(1.0 - c->lr * c->weight_decay);
    out->lion.beta1 = (float)c->beta1;
    out->lion.one_minus_beta1 = (float)(1.0 - c->beta1);
    out->lion.beta2 = (float)c->beta2;
    out->lion.one_minus_beta2 = (float)(1.0 - c->beta2);
    out->lion.minus_lr = (float)-c->lr;
}

HT_RULE lion_rule = {
    .name = "lion",
    .words = "lr beta1 beta2 weight_decay",
    .defaults = {.rule = HT_RULE_LION, .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.99, HT_COMMON_DEFAULTS},
    .refuse = refuse_decay,
    .scalars = lion_scalars,
};
