/* SPDX-License-Identifier: Apache-2.0 */
/* content.h - made content of several kinds, for tests and measurements of the codec. The same seed gives the same. */
#pragma once

#include "tests/support/random.h"
#include "tiering/base/base.h"

typedef void (*content_fn)(uint8_t *out, size_t bytes, uint64_t seed);

/* Near to normal, with deviation 0.02: a sum of uniform numbers. */
static inline float content_weight(uint64_t *x)
{
    double sum = 0;

    for (unsigned i = 0; i < 12; i++)
        sum += (double)(random_next(x) >> 11) / (double)(1ull << 53);
    return (float)((sum - 6) * 0.02);
}

static inline void content_random(uint8_t *out, size_t bytes, uint64_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

    for (size_t i = 0; i < bytes; i++)
        out[i] = (uint8_t)(random_next(&x) >> 32);
}

static inline void content_f32(uint8_t *out, size_t bytes, uint64_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        float w = content_weight(&x);
        memcpy(out + i, &w, sizeof(w));
    }
    memset(out + bytes / 4 * 4, 0x5a, bytes % 4);
}

static inline void content_bf16(uint8_t *out, size_t bytes, uint64_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

    for (size_t i = 0; i + 2 <= bytes; i += 2) {
        float w = content_weight(&x);
        memcpy(out + i, (uint8_t *)&w + 2, 2);
    }
    memset(out + bytes / 2 * 2, 0x5a, bytes % 2);
}

/* Sign, exponent and mantissa of a normal f16; no weight is small enough for another. */
static inline void content_f16(uint8_t *out, size_t bytes, uint64_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

    for (size_t i = 0; i + 2 <= bytes; i += 2) {
        float w = content_weight(&x);
        uint32_t bits;
        memcpy(&bits, &w, sizeof(bits));
        uint32_t exponent = bits >> 23 & 0xff, low = exponent > 112 ? exponent - 112 : 1;
        uint16_t half = (uint16_t)(bits >> 16 & 0x8000) | (uint16_t)(low << 10) | (bits >> 13 & 0x3ff);
        memcpy(out + i, &half, sizeof(half));
    }
    memset(out + bytes / 2 * 2, 0x5a, bytes % 2);
}

static inline void content_small_int(uint8_t *out, size_t bytes, uint64_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

    memset(out, 0, bytes);
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        uint32_t n = (uint32_t)(random_next(&x) >> 32) % 1000;
        out[i] = (uint8_t)n;
        out[i + 1] = (uint8_t)(n >> 8);
    }
}

static inline void content_text(uint8_t *out, size_t bytes, uint64_t seed)
{
    static const char words[] = "loss step token weight layer batch model norm rate seed ";
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

    for (size_t i = 0, at = 0; i < bytes; i++) {
        out[i] = (uint8_t)words[at++ % (sizeof(words) - 1)];
        if (out[i] == ' ')
            at = random_next(&x) % sizeof(words);
    }
}

static inline void content_zeros(uint8_t *out, size_t bytes, uint64_t seed)
{
    (void)seed;
    memset(out, 0, bytes);
}
