/* SPDX-License-Identifier: Apache-2.0 */
/* rule.c - the table of rules; the words and forms of state. */
#include "optim/rules/rule.h"

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

enum ht_kernel ht_rule_kernel(const struct ht_optim_config *c)
{
    struct ht_scalars s;

    ht_rule_scalars(c, 1, &s);
    return s.kernel;
}

#define ROW(number, rule, states, ...) [number] = {__VA_ARGS__},
static const uint8_t kinds[HT_KERNEL_COUNT][HT_KERNEL_STATES_MAX] = {HT_KERNELS(ROW)};

const uint8_t *ht_kernel_kinds(enum ht_kernel kernel)
{
    return kinds[kernel];
}

unsigned ht_kernel_states(enum ht_kernel kernel)
{
    return (unsigned)strnlen((const char *)kinds[kernel], HT_KERNEL_STATES_MAX);
}

bool ht_kernel_same_states(enum ht_kernel a, enum ht_kernel b)
{
    return !memcmp(kinds[a], kinds[b], HT_KERNEL_STATES_MAX);
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

bool ht_state_is_positive(uint8_t kind)
{
    return kind == HT_STATE_EXP_AVG_SQ || kind == HT_STATE_SUM;
}

bool ht_form_fits(unsigned form, uint8_t kind)
{
    switch (kind) {
    case HT_STATE_EXP_AVG:
    case HT_STATE_EXP_AVG_SQ:
    case HT_STATE_SUM:
        return form <= HT_FORM_DYNAMIC;
    case HT_STATE_MOMENTUM_BUFFER: /* of SGD dynamic, of Muon linear */
        return form < HT_FORMS;
    default:
        return form == HT_FORM_F32;
    }
}
