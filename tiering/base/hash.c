/* SPDX-License-Identifier: Apache-2.0 */
/* hash.c - checksums by XXH3. No state; any thread. */
#include "tiering/base/hash.h"

#include <xxhash.h>

uint64_t ht_hash64(const void *data, size_t len, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, len, seed);
}
