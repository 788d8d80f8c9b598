/* SPDX-License-Identifier: Apache-2.0 */
/* state_priv.h - inside state/. */
#pragma once

#include "optim/state/param.h"

/*
 * check.c. Takes out the problems that were found when the log had been read, and remembers them for fsck if the store
 * leaves out.
 */
int ht_opt_check_states(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* totals.c. Is the object state of a parameter? */
bool ht_opt_is_state(const struct ht_optim *o, uint64_t oid) HT_REQUIRES(HT_LOCK_OPTIM);
