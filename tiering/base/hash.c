/* SPDX-License-Identifier: Apache-2.0 */
/* hash.c - checksums by XXH3. No state but that of the caller's sums; any thread. */
#include "tiering/base/hash.h"

#include <xxhash.h>
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h> /* the same sums, with the widest vectors of the processor */
#endif

uint64_t ht_hash64(const void *data, size_t len, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, len, seed);
}

static struct ht_hash128 canonical(XXH128_hash_t hash)
{
    XXH128_canonical_t c;
    struct ht_hash128 out;

    XXH128_canonicalFromHash(&c, hash);
    memcpy(out.byte, c.digest, sizeof(out.byte));
    return out;
}

struct ht_hash128 ht_hash128(const void *data, size_t len)
{
    return canonical(XXH3_128bits(data, len));
}

/* The state of the library is all there is; it has an alignment that malloc does not give. */
static XXH3_state_t *state_of(const struct ht_hash128_sum *s)
{
    return (XXH3_state_t *)(uintptr_t)s;
}

int ht_hash128_sum_new(struct ht_hash128_sum **out)
{
    XXH3_state_t *s = XXH3_createState();

    if (!s)
        return -ENOMEM;
    (void)XXH3_128bits_reset(s);
    *out = (struct ht_hash128_sum *)(void *)s;
    return 0;
}

void ht_hash128_sum_free(struct ht_hash128_sum *s)
{
    (void)XXH3_freeState(state_of(s));
}

void ht_hash128_sum_add(struct ht_hash128_sum *s, const void *data, size_t len)
{
    (void)XXH3_128bits_update(state_of(s), data, len);
}

struct ht_hash128 ht_hash128_sum_get(const struct ht_hash128_sum *s)
{
    return canonical(XXH3_128bits_digest(state_of(s)));
}
