/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adamw.h - Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), as torch.optim.AdamW:
 *
 *   p *= 1 - lr weight_decay
 *   m, v, p as in adam.h, without its first line
 */
#pragma once

#include "optim/rules/adam.h"

HT_LANES_FN void adamw_step(struct ht_element *x, const struct ht_scalars *s)
{
    x->p = x->p * lanes_set(s->adam.decay) + adam_change(x, s, false);
}

HT_LANES_FN void adamw_near_g_step(struct ht_element *x, const struct ht_scalars *s)
{
    x->p = x->p * lanes_set(s->adam.decay) + adam_change(x, s, true);
}

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
