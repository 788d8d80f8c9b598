/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adagrad.h - Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011), as torch.optim.Adagrad with an initial
 * accumulator of zero:
 *
 *   g += weight_decay p
 *   sum += g^2
 *   p -= lr / (1 + (t - 1) lr_decay) * g / (sqrt(sum) + eps)
 */
#pragma once

#include "optim/rules/element.h"

HT_LANES_FN void adagrad_step(struct ht_element *x, const struct ht_scalars *s)
{
    ht_lanes g = lanes_fma(lanes_set(s->adagrad.weight_decay), x->p, x->g);

    x->state[0] = lanes_fma(g, g, x->state[0]);
    x->p = x->p + lanes_set(s->adagrad.minus_lr) * g / (lanes_sqrt(x->state[0]) + lanes_set(s->adagrad.eps));
}

static inline void adagrad_scalars(const struct ht_optim_config *c, uint64_t t, struct ht_scalars *out)
{
    out->kernel = HT_KERNEL_ADAGRAD;
    out->adagrad.weight_decay = (float)c->weight_decay;
    out->adagrad.minus_lr = (float)-(c->lr / (1.0 + (double)(t - 1) * c->lr_decay));
    out->adagrad.eps = (float)c->eps;
}

HT_RULE adagrad_rule = {
    .name = "adagrad",
    .words = "lr lr_decay weight_decay eps",
    .defaults = {.rule = HT_RULE_ADAGRAD, .lr = 1e-2, .eps = 1e-10, HT_COMMON_DEFAULTS},
    .scalars = adagrad_scalars,
};
