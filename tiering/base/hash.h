/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hash.h - checksums: XXH3, 64 bits (https://xxhash.com, format of xxHash 0.8).
 * The only file pair that knows which hash it is.
 */
#ifndef HITRAIN_TIERING_BASE_HASH_H
#define HITRAIN_TIERING_BASE_HASH_H

#include "tiering/base/base.h"

uint64_t ht_hash64(const void *data, size_t len, uint64_t seed);

#endif
