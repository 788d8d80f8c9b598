/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sgd.h - stochastic gradient descent with momentum (Sutskever et al., ICML 2013), as torch.optim.SGD:
 *
 *   g += weight_decay p
 *   b  = momentum b + (1 - dampening) g        in the first step b = g
 *   g  = b, or with nesterov g + momentum b
 *   p -= lr g
 *
 * Without momentum there is no b, and no state. PyTorch adds a multiple with one rounding (fma) each time.
 */
#pragma once

#include "optim/rules/element.h"

HT_LANES_FN void sgd_step(struct ht_element *x, const struct ht_scalars *s)
{
    ht_lanes g = lanes_fma(lanes_set(s->sgd.weight_decay), x->p, x->g);

    x->p = lanes_fma(lanes_set(s->sgd.minus_lr), g, x->p);
}

HT_LANES_FN ht_lanes sgd_buffer(struct ht_element *x, const struct ht_scalars *s)
{
    x->g = lanes_fma(lanes_set(s->sgd.weight_decay), x->p, x->g);
    x->state[0] = lanes_fma(lanes_set(s->sgd.one_minus_dampening), x->g, x->state[0] * lanes_set(s->sgd.momentum));
    return x->state[0];
}

HT_LANES_FN void sgd_momentum_step(struct ht_element *x, const struct ht_scalars *s)
{
    x->p = lanes_fma(lanes_set(s->sgd.minus_lr), sgd_buffer(x, s), x->p);
}

HT_LANES_FN void sgd_nesterov_step(struct ht_element *x, const struct ht_scalars *s)
{
    ht_lanes b = sgd_buffer(x, s);
    ht_lanes g = lanes_fma(lanes_set(s->sgd.nesterov_momentum), b, x->g);

    x->p = lanes_fma(lanes_set(s->sgd.minus_lr), g, x->p);
}

static inline void sgd_scalars(const struct ht_optim_config *c, uint64_t t, struct ht_scalars *out)
{
    out->kernel = c->momentum == 0 ? HT_KERNEL_SGD : c->nesterov ? HT_KERNEL_SGD_NESTEROV : HT_KERNEL_SGD_MOMENTUM;
    out->sgd.weight_decay = (float)c->weight_decay;
    out->sgd.momentum = t == 1 ? 0.0f : (float)c->momentum;
    out->sgd.nesterov_momentum = (float)c->momentum;
    out->sgd.one_minus_dampening = t == 1 ? 1.0f : (float)(1.0 - c->dampening);
    out->sgd.minus_lr = (float)-c->lr;
}

static inline const char *sgd_refuse(const struct ht_optim_config *c)
{
    if (c->nesterov && (c->momentum == 0 || c->dampening != 0))
        return "nesterov=1 needs momentum > 0 and dampening=0";
    return NULL;
}

HT_RULE sgd_rule = {
    .name = "sgd",
    .words = "lr momentum dampening weight_decay nesterov",
    .defaults = {.rule = HT_RULE_SGD, .lr = 1e-3, HT_COMMON_DEFAULTS},
    .refuse = sgd_refuse,
    .scalars = sgd_scalars,
};
