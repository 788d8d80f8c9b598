/* SPDX-License-Identifier: Apache-2.0 */
/* endurance.h - what the store writes in a day, beside its budget. */
#pragma once

#include "tiering/base/base.h"

struct ht_store;
struct ht_store_stats;

/* Counts what the devices took, and warns by an event if it exceeds the budget. */
void ht_endurance_check(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* The same, and sets its figures in out. */
void ht_endurance_stats(struct ht_store *s, struct ht_store_stats *out) HT_REQUIRES(HT_LOCK_STORE);
