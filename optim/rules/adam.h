/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adam.h - Adam with L2 regularisation (Kingma and Ba, arXiv:1412.6980), as torch.optim.Adam; and with decoupled weight
 * decay (Loshchilov and Hutter, arXiv:1711.05101), as torch.optim.AdamW, where the first line is p *= 1 - lr
 * weight_decay:
 *
 *   g += weight_decay p
 *   m += (1 - beta1) (g - m)
 *   v  = beta2 v + (1 - beta2) g^2
 *   p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
 *
 * Operations and roundings stand in the order of PyTorch 2, with its fused multiply-adds (1.13 computes m in two
 * steps, which is less exact), so that a run can move between the two:
 *
 *   m = fma(1 - beta1, g - m, m)                                        where 1 - beta1 < 0.5 (torch.lerp)
 *   m = fma(-beta1, g - m, g)                                           else; -beta1 as (1 - beta1) - 1 in float
 *   v = fma((1 - beta2) * g, g, v * beta2)
 *   p = p + (-step_size * m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)      the quotient is rounded first
 *
 * The second form of m has kernels of its own, because logged steps of older programs have the first one for all beta1.
 */
#pragma once

#include "optim/rules/element.h"

/* Both moments; returns the change of the parameter. near_g: m is computed from the side of g. */
HT_LANES_FN ht_lanes adam_change(struct ht_element *x, const struct ht_scalars *s, bool near_g)
{
    ht_lanes m = x->state[0], v = x->state[1];

    m = lanes_lerp(m, x->g, s->adam.one_minus_beta1, near_g);
    v = lanes_fma(lanes_set(s->adam.one_minus_beta2) * x->g, x->g, v * lanes_set(s->adam.beta2));
    x->state[0] = m;
    x->state[1] = v;
    return lanes_set(s->adam.minus_step_size) * m /
        (lanes_sqrt(v) / lanes_set(s->adam.sqrt_bc2) + lanes_set(s->adam.eps));
}

HT_LANES_FN void adam_step(struct ht_element *x, const struct ht_scalars *s)
{
    x->g = lanes_fma(lanes_set(s->adam.weight_decay), x->p, x->g);
    x->p = x->p + adam_change(x, s, false);
}

HT_LANES_FN void adam_near_g_step(struct ht_element *x, const struct ht_scalars *s)
{
    x->g = lanes_fma(lanes_set(s->adam.weight_decay), x->p, x->g);
    x->p = x->p + adam_change(x, s, true);
}

HT_LANES_FN void adamw_step(struct ht_element *x, const struct ht_scalars *s)
{
    x->p = x->p * lanes_set(s->adam.decay) + adam_change(x, s, false);
}

HT_LANES_FN void adamw_near_g_step(struct ht_element *x, const struct ht_scalars *s)
{
    x->p = x->p * lanes_set(s->adam.decay) + adam_change(x, s, true);
}

/* Everything is computed in double and rounded once, as PyTorch does with the Python floats it is given. */
static inline void adam_scalars(const struct ht_optim_config *c, uint64_t t, struct ht_scalars *out)
{
    double bc1 = 1.0 - pow(c->beta1, (double)t), bc2 = 1.0 - pow(c->beta2, (double)t);

    out->adam.decay = (float)(1.0 - c->lr * c->weight_decay);
    out->adam.weight_decay = (float)c->weight_decay;
    out->adam.one_minus_beta1 = (float)(1.0 - c->beta1);
    out->adam.beta2 = (float)c->beta2;
    out->adam.one_minus_beta2 = (float)(1.0 - c->beta2);
    out->adam.minus_step_size = (float)-(c->lr / bc1);
    out->adam.sqrt_bc2 = (float)sqrt(bc2);
    out->adam.eps = (float)c->eps;
    out->kernel = ht_lerp_near_end(out->adam.one_minus_beta1) ? HT_KERNEL_ADAM_NEAR_G : HT_KERNEL_ADAM;
}

HT_RULE adam_rule = {
    .name = "adam",
    .words = "lr beta1 beta2 eps weight_decay",
    .defaults = {.rule = HT_RULE_ADAM, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, HT_COMMON_DEFAULTS},
    .scalars = adam_scalars,
};

static inline void adamw_scalars(const struct ht_optim_config *c, uint64_t t, struct ht_scalars *out)
{
    adam_scalars(c, t, out);
    out->kernel = out->kernel == HT_KERNEL_ADAM ? HT_KERNEL_ADAMW : HT_KERNEL_ADAMW_NEAR_G;
}

HT_RULE adamw_rule = {
    .name = "adamw",
    .words = "lr beta1 beta2 eps weight_decay",
    .defaults = {.rule = HT_RULE_ADAMW,
                 .lr = 1e-3,
                 .beta1 = 0.9,
                 .beta2 = 0.999,
                 .eps = 1e-8,
                 .weight_decay = 1e-2,
                 HT_COMMON_DEFAULTS},
    .refuse = refuse_decay,
    .scalars = adamw_scalars,
};
