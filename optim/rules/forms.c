/* SPDX-License-Identifier: Apache-2.0 */
/* forms.c - see forms.h: which state may have which form, and the keys of the hashes. */
#include "optim/rules/forms.h"

#include "optim/rules/rule.h"

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

/* Every bit of x changes every bit of the result. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

uint64_t ht_form_key(const struct ht_coded *c, uint64_t element)
{
    return mix(mix(mix((uint64_t)c->salt << 8 | c->kind) + c->t) + (element >> 32));
}
