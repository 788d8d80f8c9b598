/* SPDX-License-Identifier: Apache-2.0 */
/* planes.c - splits elements into planes, joins them, and finds the size of elements. */
#include "tiering/codec/planes.h"

/* ---------------------------------------------------------------- sample */

enum {
    PIECES = 32,
    PIECE_BYTES = 512,
    SYMBOLS = 256,
    FRACTION_BITS = 8, /* of logarithms */
    MARGIN = 64,       /* another element size has to save one part in so many */
};

struct counts {
    uint32_t of[HT_PLANES_MAX][SYMBOLS]; /* by the place of the byte, modulo 4 */
};

static void count_piece(struct counts *c, const uint8_t *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        c->of[i % HT_PLANES_MAX][p[i]]++;
}

/* The whole if that is short, else pieces at equal distances. */
static void count_sample(struct counts *c, const uint8_t *raw, size_t bytes)
{
    memset(c, 0, sizeof(*c));
    if (bytes <= (size_t)PIECES * PIECE_BYTES) {
        count_piece(c, raw, bytes);
        return;
    }
    size_t step = bytes / PIECES / HT_PLANES_MAX * HT_PLANES_MAX;
    for (unsigned i = 0; i < PIECES; i++)
        count_piece(c, raw + i * step, PIECE_BYTES);
}

/* Binary logarithm in integers, so that every machine finds the same; x is not 0. */
static uint32_t log2_fixed(uint32_t x)
{
    unsigned whole = 31 - (unsigned)__builtin_clz(x);
    uint64_t y = (uint64_t)x << (31 - whole);
    uint32_t log = whole;

    for (unsigned i = 0; i < FRACTION_BITS; i++) {
        y = y * y >> 31;
        log = log << 1 | (uint32_t)(y >> 32);
        y >>= y >> 32;
    }
    return log;
}

struct cost {
    uint64_t total; /* bytes counted */
    uint64_t bits;  /* that they take in the best code of whole planes, times 1 << FRACTION_BITS */
};

/* The plane of this rank, of elements of count bytes. */
static struct cost plane_cost(const struct counts *c, unsigned count, unsigned rank)
{
    struct cost cost = {0};
    uint32_t sum[SYMBOLS] = {0};

    for (unsigned place = rank; place < HT_PLANES_MAX; place += count)
        for (unsigned i = 0; i < SYMBOLS; i++)
            sum[i] += c->of[place][i];
    for (unsigned i = 0; i < SYMBOLS; i++)
        cost.total += sum[i];
    for (unsigned i = 0; i < SYMBOLS; i++)
        if (sum[i])
            cost.bits += sum[i] * (uint64_t)(log2_fixed((uint32_t)cost.total) - log2_fixed(sum[i]));
    return cost;
}

/* Bits of the frame; a plane is coded if that saves 1/16 of it. */
static uint64_t choose(const struct counts *c, unsigned count, struct ht_planes *out)
{
    uint64_t bits = 0, raw = 0;

    *out = (struct ht_planes){.count = count};
    for (unsigned rank = 0; rank < count; rank++) {
        struct cost cost = plane_cost(c, count, rank);
        uint64_t stored = cost.total * 8 << FRACTION_BITS;
        out->coded[rank] = cost.bits <= stored - stored / 16;
        bits += out->coded[rank] ? cost.bits : stored;
        raw += stored;
    }
    out->worth = bits <= raw - raw / 16;
    return bits;
}

void ht_planes_sample(const uint8_t *raw, size_t bytes, struct ht_planes *out)
{
    struct counts c;
    struct ht_planes other;

    count_sample(&c, raw, bytes);
    uint64_t best = choose(&c, 1, out);
    for (unsigned count = 2; count <= HT_PLANES_MAX; count *= 2) {
        uint64_t bits = choose(&c, count, &other);
        if (bits >= best - best / MARGIN)
            continue;
        best = bits;
        *out = other;
    }
}

/* ---------------------------------------------------------------- planes */

typedef uint8_t bytes16 __attribute__((vector_size(16)));

static inline bytes16 load(const uint8_t *p)
{
    bytes16 v;

    memcpy(&v, p, sizeof(v));
    return v;
}

static inline void store(uint8_t *p, bytes16 v)
{
    memcpy(p, &v, sizeof(v));
}

#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

/* The first elements in whole vectors; the callers do the rest one by one. */
static size_t split2(uint8_t *const *plane, const uint8_t *raw, size_t n)
{
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        bytes16 a = load(raw + 2 * i), b = load(raw + 2 * i + 16);
        store(plane[0] + i, EVEN(a, b));
        store(plane[1] + i, ODD(a, b));
    }
    return i;
}

static size_t split4(uint8_t *const *plane, const uint8_t *raw, size_t n)
{
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        bytes16 a = load(raw + 4 * i), b = load(raw + 4 * i + 16);
        bytes16 c = load(raw + 4 * i + 32), d = load(raw + 4 * i + 48);
        bytes16 even_ab = EVEN(a, b), even_cd = EVEN(c, d), odd_ab = ODD(a, b), odd_cd = ODD(c, d);
        store(plane[0] + i, EVEN(even_ab, even_cd));
        store(plane[1] + i, EVEN(odd_ab, odd_cd));
        store(plane[2] + i, ODD(even_ab, even_cd));
        store(plane[3] + i, ODD(odd_ab, odd_cd));
    }
    return i;
}

static size_t join2(uint8_t *raw, const uint8_t *const *plane, size_t n)
{
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        bytes16 a = load(plane[0] + i), b = load(plane[1] + i);
        store(raw + 2 * i, LOW(a, b));
        store(raw + 2 * i + 16, HIGH(a, b));
    }
    return i;
}

static size_t join4(uint8_t *raw, const uint8_t *const *plane, size_t n)
{
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        bytes16 a = load(plane[0] + i), b = load(plane[1] + i), c = load(plane[2] + i), d = load(plane[3] + i);
        bytes16 even_low = LOW(a, c), odd_low = LOW(b, d), even_high = HIGH(a, c), odd_high = HIGH(b, d);
        store(raw + 4 * i, LOW(even_low, odd_low));
        store(raw + 4 * i + 16, HIGH(even_low, odd_low));
        store(raw + 4 * i + 32, LOW(even_high, odd_high));
        store(raw + 4 * i + 48, HIGH(even_high, odd_high));
    }
    return i;
}

void ht_planes_split(uint8_t *const *plane, unsigned count, const uint8_t *raw, size_t n)
{
    size_t i = count == 2 ? split2(plane, raw, n) : count == 4 ? split4(plane, raw, n) : 0;

    for (; i < n; i++)
        for (unsigned rank = 0; rank < count; rank++)
            plane[rank][i] = raw[i * count + rank];
}

void ht_planes_join(uint8_t *raw, unsigned count, const uint8_t *const *plane, size_t n)
{
    size_t i = count == 2 ? join2(raw, plane, n) : count == 4 ? join4(raw, plane, n) : 0;

    for (; i < n; i++)
        for (unsigned rank = 0; rank < count; rank++)
            raw[i * count + rank] = plane[rank][i];
}
