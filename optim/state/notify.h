/* SPDX-License-Identifier: Apache-2.0 */
/* notify.h - parked readers, and caches of the kernel. */
#ifndef HITRAIN_OPTIM_STATE_NOTIFY_H
#define HITRAIN_OPTIM_STATE_NOTIFY_H

#include "optim/optim.h"

struct ht_param;
struct ht_root;

void *ht_opt_helper_main(void *o) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Requests invalidation of ranges; returns a ticket for ht_opt_inval_wait. */
uint64_t ht_opt_inval(struct ht_param *p, uint64_t first, uint64_t last) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_inval_wait(struct ht_optim *o, uint64_t ticket)
    HT_REQUIRES(HT_LOCK_OPTIM); /* releases the lock while it waits */
/* Move waiters that may go on to chain, to be woken with ht_opt_wake after unlocking. */
void ht_opt_take_waiters(struct ht_param *p, struct ht_waiter **chain) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_wake(struct ht_waiter *chain);
/* Let the helper wake them. */
void ht_opt_wake_later(struct ht_optim *o, struct ht_waiter *chain) HT_REQUIRES(HT_LOCK_OPTIM);
/* Readers that need not wait any more go on. */
void ht_opt_wake_readers(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);

#endif
