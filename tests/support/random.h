/* SPDX-License-Identifier: Apache-2.0 */
/*
 * random.h - numbers that look random and are the same each time (xorshift).
 */
#pragma once

#include <stdint.h>

/* The next one. *x: not 0, and the state from one to the next. */
static inline uint64_t random_next(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x;
}
