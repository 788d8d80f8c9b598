/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hash.h - checksums: XXH3, 64 and 128 bits (https://xxhash.com, format of xxHash 0.8).
 * The only file pair that knows which hash it is.
 */
#pragma once

#include "tiering/base/base.h"

uint64_t ht_hash64(const void *data, size_t len, uint64_t seed);

/* XXH3-128 without a seed, in its canonical form: the bytes that `xxhsum -H128` prints. */
struct ht_hash128 {
    uint8_t byte[16];
};
struct ht_hash128 ht_hash128(const void *data, size_t len);

/* The same over bytes that come in parts. */
struct ht_hash128_sum;
int ht_hash128_sum_new(struct ht_hash128_sum **out) HT_MUST_CHECK;
void ht_hash128_sum_free(struct ht_hash128_sum *s); /* NULL: nothing */
void ht_hash128_sum_add(struct ht_hash128_sum *s, const void *data, size_t len);
/* Of everything so far; more may follow. */
struct ht_hash128 ht_hash128_sum_get(const struct ht_hash128_sum *s);
