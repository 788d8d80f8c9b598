/* SPDX-License-Identifier: Apache-2.0 */
/* rule.c - the table of rules, and the words of state. */
#include "optim/rules/rule.h"

#include <limits.h>
#include <strings.h>

#include "optim/rules/all.h"

#define ROW(rule) &rule##_rule,
static const struct ht_rule *const rules[] = {HT_RULES(ROW)};
#undef ROW

const struct ht_rule *ht_rule_of(enum ht_rule_id id)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(rules); i++)
        if (rules[i]->defaults.rule == id)
            return rules[i];
    return NULL;
}

const struct ht_rule *ht_rule_named(const char *name)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(rules); i++)
        if (!strcasecmp(name, rules[i]->name))
            return rules[i];
    return NULL;
}

void ht_rule_names(char *buf, size_t cap)
{
    size_t used = 0;

    for (size_t i = 0; i < HT_ARRAY_SIZE(rules) && used < cap; i++)
        used += (size_t)snprintf(buf + used, cap - used, "%s%s", i ? " " : "", rules[i]->name);
}

void ht_rule_scalars(const struct ht_optim_config *c, uint64_t t, struct ht_scalars *out)
{
    memset(out, 0, sizeof(*out));
    out->grad_factor = (float)(1.0 / c->grad_scale);
    out->maximize = c->maximize;
    ht_rule_of(c->rule)->scalars(c, t, out);
}

/* Only momentum and beta1 choose among the kernels of a rule. */
unsigned ht_rule_kernel_states(enum ht_kernel kernel, uint8_t out_kind[HT_KERNEL_STATES_MAX])
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(rules); i++) {
        struct ht_optim_config c = rules[i]->defaults;
        struct ht_scalars s;
        for (unsigned momentum = 0; momentum < 3; momentum++) {
            c.momentum = momentum ? 0.5 : 0;
            c.nesterov = momentum == 2;
            c.beta1 = momentum ? 0.25 : 0.75;
            ht_rule_scalars(&c, 1, &s);
            if (s.kernel == kernel)
                return rules[i]->states(&c, out_kind);
        }
    }
    return UINT_MAX;
}

uint8_t ht_rule_form(const struct ht_optim_config *c, unsigned kind)
{
    uint8_t short_form = c->rule == HT_RULE_MUON ? HT_FORM_LINEAR : HT_FORM_DYNAMIC;
    uint8_t form = c->state_bits == 16 ? HT_FORM_BF16 : c->state_bits == 8 ? short_form : HT_FORM_F32;

    return ht_form_fits(form, (uint8_t)kind) ? form : HT_FORM_F32;
}

const char *ht_state_word(unsigned kind)
{
    static const char *const word[HT_STATE_KINDS] = {
        [HT_STATE_EXP_AVG] = "exp_avg",
        [HT_STATE_EXP_AVG_SQ] = "exp_avg_sq",
        [HT_STATE_MASTER] = "master",
        [HT_STATE_MOMENTUM_BUFFER] = "momentum_buffer",
        [HT_STATE_SUM] = "sum",
        [HT_STATE_MASTER_LOW] = "master",
        [HT_STATE_MASTER_BLOCKS] = "master",
    };

    return kind < HT_STATE_KINDS ? word[kind] : NULL;
}
