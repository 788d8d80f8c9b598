/* SPDX-License-Identifier: Apache-2.0 */
/* state_priv.h - inside state/. */
#ifndef HITRAIN_OPTIM_STATE_STATE_PRIV_H
#define HITRAIN_OPTIM_STATE_STATE_PRIV_H

#include "optim/state/param.h"

struct ht_optim;

/*
 * check.c. Takes out the problems that were found when the log had been read, and remembers them for fsck if the store
 * leaves out.
 */
int ht_opt_check_states(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* totals.c. Is the object state of a parameter? */
bool ht_opt_is_state(const struct ht_optim *o, uint64_t oid) HT_REQUIRES(HT_LOCK_OPTIM);

/* -------------------------------------------------------------- master.c */

/* A parameter with masters in two bytes; references of the caller. */
struct ht_opt_masters {
    const struct ht_kernels *kernels;
    struct ht_param_shape shape;
    struct ht_obj *p, *low, *blocks;
};
/* Bytes of the f32 that they stand for. Not locked. WAITS. */
ssize_t ht_opt_masters_read(const struct ht_opt_masters *m, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
/*
 * No other thread changes them during the call. -EINVAL: no whole elements; -EDOM: one does not round to the parameter,
 * *out_element. Then nothing was changed.
 */
ssize_t ht_opt_masters_write(const struct ht_opt_masters *m, uint64_t off, const void *buf, size_t len,
                             uint64_t *out_element) HT_MUST_CHECK;

#endif
