/* SPDX-License-Identifier: Apache-2.0 */
/* master.c - blocks of missing bits: hash, ties. The work per element is in the kernels. */
#include "optim/rules/master.h"

#include <math.h>

#include "tiering/base/buf.h"
#include "tiering/base/hash.h"

enum { TIE = 0x8000, HAS_UPPER = 1 << 16 };

static uint64_t hash_of(const uint16_t *p, size_t n)
{
    return ht_hash64(p, n * sizeof(*p), 0);
}

void ht_master_expand(const struct ht_kernels *k, const struct ht_disk_master *block, const uint16_t *p,
                      const uint16_t *low, size_t n, float *out_master)
{
    static const uint16_t nothing[HT_MASTER_BLOCK];
    uint32_t upper = ht_le32_load(&block->upper);
    bool known = ht_le64_load(&block->hash) == hash_of(p, n);

    k->join(out_master, p, known ? low : nothing, known && upper ? upper & 0xffff : UINT32_MAX, n);
}

static bool is_upper(float master, uint16_t p)
{
    return ht_float_bits(master) - ((uint32_t)p << 16) == TIE;
}

/* Twice as many codes as there are elements are enough to find one that none has. */
static uint16_t free_code(const uint16_t *low, size_t n)
{
    bool used[2 * HT_MASTER_BLOCK] = {false};
    uint16_t code = 0;

    for (size_t i = 0; i < n; i++)
        if (low[i] < HT_ARRAY_SIZE(used))
            used[low[i]] = true;
    while (used[code])
        code++;
    return code;
}

/* Until now all ties have the same code. Returns the block's code for upper ties. */
static uint32_t settle_ties(const float *master, const uint16_t *p, size_t n, uint16_t *low)
{
    size_t uppers = 0, lowers = 0;

    for (size_t i = 0; i < n; i++) {
        bool upper = low[i] == TIE && is_upper(master[i], p[i]);
        uppers += upper;
        lowers += low[i] == TIE && !upper;
    }
    if (!uppers)
        return 0;
    uint16_t code = lowers ? free_code(low, n) : TIE;
    for (size_t i = 0; i < n; i++)
        if (low[i] == TIE && is_upper(master[i], p[i]))
            low[i] = code;
    return HAS_UPPER | code;
}

void ht_master_compress(const struct ht_kernels *k, const float *master, const uint16_t *p, size_t n, uint16_t *low,
                        struct ht_disk_master *block)
{
    bool ties = k->part(low, master, p, n);

    ht_le32_store(&block->upper, ties ? settle_ties(master, p, n, low) : 0);
    ht_le32_store(&block->pad, 0);
    ht_le64_store(&block->hash, hash_of(p, n));
}

bool ht_master_rounds_to(float master, uint16_t p)
{
    return isnan(master) ? isnan(ht_bf16_to_f32(p)) : ht_f32_to_bf16(master) == p;
}
