/* SPDX-License-Identifier: Apache-2.0 */
/*
 * muon.h - momentum orthogonalised by Newton-Schulz (Jordan et al., 2024; arXiv:2502.16982), as torch.optim.Muon:
 *
 *   m  = lerp(m, g, 1 - momentum)
 *   u  = lerp(g, m, momentum) with nesterov, else m             in bf16, rounded to nearest even
 *   O  = the orthogonal matrix near u                           of a client, or blocks.h
 *   p  = fma(-(lr * ratio), O, p * (1 - lr * weight_decay))
 *
 * lerp is torch.lerp (lanes_lerp). The ratio depends on the rows and columns of a block: sqrt(max(1, rows / columns))
 * (original), 0.2 sqrt(max(rows, columns)) (match_rms_adamw), or sqrt(rows / columns) (spectral_unclamped). It is
 * computed in double, and rounded once with lr.
 *
 * A step has two phases, since O depends on a whole matrix. The first has a function of its own in struct ht_kernels;
 * in the second, which is this rule's kernel, O takes the place of the gradient.
 */
#pragma once

#include "optim/rules/element.h"

/* The first phase: returns u. */
HT_LANES_FN ht_lanes muon_stir(ht_lanes *m, ht_lanes g, const struct ht_scalars *s)
{
    float to_g = s->muon.one_minus_momentum, to_m = s->muon.momentum;

    *m = lanes_lerp(*m, g, to_g, ht_lerp_near_end(to_g));
    return s->muon.nesterov != 0 ? lanes_lerp(g, *m, to_m, ht_lerp_near_end(to_m)) : *m;
}

HT_LANES_FN void muon_step(struct ht_element *x, const struct ht_scalars *s)
{
    x->p = lanes_fma(lanes_set(s->muon.minus_step_size), x->g, x->p * lanes_set(s->muon.decay));
}

static inline double muon_ratio(const struct ht_optim_config *c)
{
    double rows = c->matrix.block_rows, columns = c->matrix.columns;

    if (!c->matrix.rows) /* nothing is updated by such a configuration */
        return 1;
    if (c->adjust_lr == HT_MUON_MATCH_RMS_ADAMW)
        return 0.2 * sqrt(fmax(rows, columns));
    double ratio = rows / columns;
    return sqrt(c->adjust_lr == HT_MUON_ORIGINAL ? fmax(1, ratio) : ratio);
}

static inline void muon_scalars(const struct ht_optim_config *c, uint64_t t, struct ht_scalars *out)
{
    out->kernel = HT_KERNEL_MUON;
    out->muon.decay = (float)(1.0 - c->lr * c->weight_decay);
    out->muon.minus_step_size = (float)-(c->lr * muon_ratio(c));
    out->muon.one_minus_momentum = (float)(1.0 - c->momentum);
    out->muon.momentum = (float)c->momentum;
    out->muon.nesterov = c->nesterov;
}

static inline const char *muon_refuse(const struct ht_optim_config *c)
{
    if (c->momentum >= 1)
        return "momentum: muon takes a number >= 0 and < 1";
    return refuse_decay(c);
}

HT_RULE muon_rule = {
    .name = "muon",
    .words = "lr momentum nesterov weight_decay adjust_lr muon_split ns ns_steps ns_a ns_b ns_c eps",
    .defaults = {.rule = HT_RULE_MUON,
                 .lr = 1e-3,
                 .momentum = 0.95,
                 .nesterov = true,
                 .weight_decay = 0.1,
                 .ns_steps = 5,
                 .ns_a = 3.4445,
                 .ns_b = -4.775,
                 .ns_c = 2.0315,
                 .eps = 1e-7,
                 HT_COMMON_DEFAULTS},
    .refuse = muon_refuse,
    .scalars = muon_scalars,
};
