/* SPDX-License-Identifier: Apache-2.0 */
/*
 * idhash.h - the hash of numbers that an image or a client chooses.
 *
 * Numbers of objects, inodes and places come from devices. With a fixed hash an image can choose numbers that all share
 * one bucket, so that mounting it takes quadratic time. So each process draws the parameters
 * of the hash at random before main.
 *
 * No order may follow from the hash that a user sees or that a repair depends on.
 */
#pragma once

#include <stdint.h>

/* Constant from before main on, except for ht_id_hash_fix. multiplier: odd. */
struct ht_id_hash_seed {
    uint64_t mask, multiplier[2];
};
extern struct ht_id_hash_seed ht_id_hash_seed;

/*
 * Two different numbers never have the same hash. Take its low bits.
 *
 * The drawn multipliers make the hash unknown to an image. Some pairs spread numbers in a row badly. So a constant
 * multiplier follows them: the second one of Stafford's "Mix13" (the finalizer of SplitMix64).
 */
static inline uint64_t ht_id_hash(uint64_t id)
{
    uint64_t h = (id ^ ht_id_hash_seed.mask) * ht_id_hash_seed.multiplier[0];

    h = (h ^ h >> 32) * ht_id_hash_seed.multiplier[1];
    h = (h ^ h >> 29) * 0x94d049bb133111ebull;
    return h ^ h >> 32;
}

/* For tests that are to run alike each time: the same parameters in each process. Before there is any table. */
void ht_id_hash_fix(void);
/* Other ones. Also before there is any table. */
void ht_id_hash_draw(void);
