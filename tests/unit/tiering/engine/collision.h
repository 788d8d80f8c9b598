/* SPDX-License-Identifier: Apache-2.0 */
/* collision.h - two contents with one checksum, for tests of what compares bytes. */
#pragma once

#define XXH_STATIC_LINKING_ONLY
#include <stdint.h>
#include <string.h>
#include <xxhash.h>

/*
 * XXH3 adds 64 bits of data to one lane, and the product of the halves of data ^ secret to another. Where the lower
 * half is 0 in two stripes, the upper halves count only by their sum. Blocks of 1 KiB have the same secrets.
 */
enum { COLLISION_STRIPE = 64, COLLISION_LANE = 3, COLLISION_BLOCK = 1024, COLLISION_WORDS = 2 };

/* Where the words are, from the begin of any block. */
static inline size_t collision_at(unsigned k)
{
    return k * COLLISION_STRIPE + 8 * COLLISION_LANE;
}

/* With the words a, or b, in their places, and equal bytes elsewhere, long contents have the same checksum. */
static inline void collision_words(uint64_t seed, uint64_t a[COLLISION_WORDS], uint64_t b[COLLISION_WORDS])
{
    uint8_t secret[XXH3_SECRET_DEFAULT_SIZE];
    uint64_t key;

    XXH3_generateSecret_fromSeed(secret, seed);
    for (unsigned k = 0; k < COLLISION_WORDS; k++) {
        memcpy(&key, secret + 8 * (COLLISION_LANE + k), 8);
        a[k] = b[k] = (uint64_t)(k + 5) << 32 | (uint32_t)key;
    }
    b[0] += UINT64_C(1) << 32;
    b[1] -= UINT64_C(1) << 32;
}
