/* SPDX-License-Identifier: Apache-2.0 */
/* totals.h - totals of a root over its parameters, kept up to date, so that reading them walks none. */
#ifndef HITRAIN_OPTIM_STATE_TOTALS_H
#define HITRAIN_OPTIM_STATE_TOTALS_H

#include "optim/state/context.h"

/* In struct ht_root. A parameter counts if it has state and its file is there. */
struct ht_root_totals {
    uint64_t parameters, state_bytes, param_bytes, elements;
};

/* What a parameter has added to its root's totals. */
struct ht_param_counted {
    bool counted;
    uint64_t state_bytes, param_bytes, elements;
};

/* To be called after every change of cur's layout or elements, of cur.exists, and of gone. */
void ht_opt_totals_update(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* The parameter leaves its root. */
void ht_opt_totals_remove(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* Asserts that the totals are those of a walk. */
void ht_opt_totals_verify(const struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM);

#endif
