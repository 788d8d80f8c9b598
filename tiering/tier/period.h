/* SPDX-License-Identifier: Apache-2.0 */
/*
 * period.h - how many accesses make a step: the period of the sequence of accesses. Pure.
 *
 * A sequence has a period if its last accesses are those before them again. Threads overtake each other, so the order
 * may differ a little, and one access in fifty may be another one.
 */
#pragma once

#include "tiering/base/base.h"

enum { HT_PERIOD_ACCESSES_MAX = 10000000, HT_PERIOD_KEYS_MAX = 1 << 20 };

/*
 * key: what each access is of, and how: any number, the same for the same access of another step. The sequence ends
 * now. *out_accesses: the shortest period that the end of the sequence has; 0: none. -E2BIG: more accesses, or more
 * different ones, than the maxima. -ENOMEM
 */
int ht_period_find(const uint64_t key[], uint32_t accesses, uint32_t *out_accesses) HT_MUST_CHECK;
