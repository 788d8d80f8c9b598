/* SPDX-License-Identifier: Apache-2.0 */
/* steps.h - ends of steps for a client without a claim and without a condition; and the end of a recovery. */
#pragma once

#include "optim/optim.h"

int ht_optim_step(struct ht_optim *o, uint64_t root) HT_MUST_CHECK;
int ht_optim_step_async(struct ht_optim *o, uint64_t root) HT_MUST_CHECK;
int ht_optim_commit(struct ht_optim *o, uint64_t root) HT_MUST_CHECK;
int ht_optim_abort(struct ht_optim *o, uint64_t root) HT_MUST_CHECK;
/* Waits until no logged steps are computed again. */
void ht_optim_recovered(struct ht_optim *o);
