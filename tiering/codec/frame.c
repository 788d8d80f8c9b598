/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frame.c - splits elements into planes, joins them, finds the size of elements; encodes and decodes compressed frames,
 * and alone calls libzstd. All of its settings are fixed here, and
 * none depends on a level whose meaning the library may change. So a version of libzstd always gives the same bytes.
 */
#include <zstd.h>

#include "tiering/base/buf.h"
#include "tiering/codec/frame.h"
#include <hitrain/format.h>

enum { HEADER_BYTES = sizeof(struct ht_disk_planes), VECTOR_BYTES = 64 };
static_assert(HT_PLANES_MAX == HT_DISK_PLANES_MAX, "planes of the format");

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

/* Bits of the frame; a plane is coded if that saves 1/16. */
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

/* ---------------------------------------------------------------- encode */

struct ht_encoder {
    ZSTD_CCtx *zstd;
    uint8_t *planes; /* of a chunk */
    uint8_t *coded;  /* one plane */
};

struct ht_decoder {
    ZSTD_DCtx *zstd;
    uint8_t *planes; /* of a chunk, and the bytes after them */
};

/*
 * Blocks of 128 KiB with a Huffman table each. In a plane only long strings are looked for, in a table of 64 places: it
 * finds runs of zeros, and leaves the rest to Huffman's code alone, which decodes fast.
 */
static const struct setting {
    ZSTD_cParameter name;
    int of_plane, of_bytes;
} settings[] = {
    {ZSTD_c_compressionLevel, 1, 1}, {ZSTD_c_windowLog, 17, 20},
    {ZSTD_c_hashLog, 6, 14},         {ZSTD_c_chainLog, 6, 6},
    {ZSTD_c_searchLog, 1, 1},        {ZSTD_c_minMatch, 7, 6},
    {ZSTD_c_targetLength, 0, 0},     {ZSTD_c_strategy, ZSTD_fast, ZSTD_fast},
    {ZSTD_c_contentSizeFlag, 1, 1},  {ZSTD_c_checksumFlag, 0, 0},
    {ZSTD_c_dictIDFlag, 0, 0},
};

int ht_encoder_new(struct ht_encoder **out)
{
    struct ht_encoder *e = calloc(1, sizeof(*e));

    if (!e)
        return -ENOMEM;
    e->zstd = ZSTD_createCCtx();
    e->planes = aligned_alloc(VECTOR_BYTES, HT_CHUNK_BYTES);
    e->coded = malloc(ZSTD_compressBound(HT_CHUNK_BYTES));
    if (!e->zstd || !e->planes || !e->coded) {
        ht_encoder_free(e);
        return -ENOMEM;
    }
    *out = e;
    return 0;
}

void ht_encoder_free(struct ht_encoder *e)
{
    if (!e)
        return;
    ZSTD_freeCCtx(e->zstd);
    free(e->planes);
    free(e->coded);
    free(e);
}

uint64_t ht_encoder_bytes(const struct ht_encoder *e)
{
    return sizeof(*e) + HT_CHUNK_BYTES + ZSTD_compressBound(HT_CHUNK_BYTES) + ZSTD_sizeof_CCtx(e->zstd);
}

/* The most bytes that a frame may have; less than its header if there can be none. */
static uint32_t frame_bytes_max(uint32_t bytes)
{
    uint64_t less = bytes - bytes / 16 - (bytes % 16 != 0);
    uint64_t blocks = ht_div_up(bytes, HT_BLOCK_BYTES);

    return (uint32_t)ht_min_u64(less, (blocks - 1) * HT_BLOCK_BYTES);
}

struct frame {
    struct ht_disk_planes *header;
    uint8_t *out;
    uint32_t len, max;
};

static bool put(struct frame *f, const uint8_t *p, size_t n)
{
    if (n > f->max - f->len)
        return false;
    if (n)
        memcpy(f->out + f->len, p, n);
    f->len += (uint32_t)n;
    return true;
}

/*
 * The output may depend on the room for it. So the caller gives room enough, and always as much: ZSTD_compressBound.
 * plane: repeated strings are rare, and looking for them costs more than it gains. -ENOMEM.
 */
static int compress(ZSTD_CCtx *z, bool plane, const void *raw, size_t bytes, void *out, size_t *out_bytes)
{
    size_t n = ZSTD_CCtx_reset(z, ZSTD_reset_session_and_parameters);

    for (unsigned i = 0; i < HT_ARRAY_SIZE(settings) && !ZSTD_isError(n); i++)
        n = ZSTD_CCtx_setParameter(z, settings[i].name, plane ? settings[i].of_plane : settings[i].of_bytes);
    if (!ZSTD_isError(n))
        n = ZSTD_compress2(z, out, ZSTD_compressBound(bytes), raw, bytes);
    if (ZSTD_isError(n))
        return -ENOMEM;
    *out_bytes = n;
    return 0;
}

/* 1; 0: the frame would be too long; -ENOMEM. */
static int put_plane(struct ht_encoder *e, struct frame *f, const struct ht_planes *p, unsigned rank,
                     const uint8_t *plane, size_t n)
{
    size_t coded = n;
    int rc = p->coded[rank] ? compress(e->zstd, p->count > 1, plane, n, e->coded, &coded) : 0;

    if (rc)
        return rc;
    bool smaller = coded <= n - n / 16 - (n % 16 != 0);
    f->header->kind[rank] = smaller ? HT_PLANE_ZSTD : HT_PLANE_STORED;
    ht_le32_store(f->header->plane_bytes[rank].b, (uint32_t)(smaller ? coded : n));
    return put(f, smaller ? e->coded : plane, smaller ? coded : n);
}

int ht_codec_encode(struct ht_encoder *e, const void *raw, uint32_t bytes, void *out)
{
    struct ht_disk_planes header = {0};
    struct frame f = {&header, out, HEADER_BYTES, 0};
    struct ht_planes p;
    uint8_t *plane[HT_PLANES_MAX] = {NULL};

    assert(bytes && bytes <= HT_CHUNK_BYTES);
    f.max = frame_bytes_max(bytes);
    if (f.max <= HEADER_BYTES)
        return 0;
    ht_planes_sample(raw, bytes, &p);
    if (!p.worth)
        return 0;
    size_t n = bytes / p.count, whole = n * p.count;
    for (unsigned i = 0; i < p.count; i++)
        plane[i] = e->planes + i * n;
    ht_planes_split(plane, p.count, raw, n);
    header.element_bytes = (uint8_t)p.count;
    ht_le32_store(header.raw_bytes.b, bytes);
    for (unsigned i = 0; i < p.count; i++) {
        int rc = put_plane(e, &f, &p, i, plane[i], n);
        if (rc <= 0)
            return rc;
    }
    if (!put(&f, (const uint8_t *)raw + whole, bytes - whole))
        return 0;
    memcpy(out, &header, HEADER_BYTES);
    return (int)f.len;
}

/* ---------------------------------------------------------------- decode */

int ht_decoder_new(struct ht_decoder **out)
{
    struct ht_decoder *d = calloc(1, sizeof(*d));

    if (!d)
        return -ENOMEM;
    d->zstd = ZSTD_createDCtx();
    d->planes = aligned_alloc(VECTOR_BYTES, HT_CHUNK_BYTES);
    if (!d->zstd || !d->planes) {
        ht_decoder_free(d);
        return -ENOMEM;
    }
    *out = d;
    return 0;
}

void ht_decoder_free(struct ht_decoder *d)
{
    if (!d)
        return;
    ZSTD_freeDCtx(d->zstd);
    free(d->planes);
    free(d);
}

uint64_t ht_decoder_bytes(const struct ht_decoder *d)
{
    return sizeof(*d) + HT_CHUNK_BYTES + ZSTD_sizeof_DCtx(d->zstd);
}

struct layout {
    unsigned count;
    uint32_t raw_bytes, n; /* n: bytes of a plane */
    uint8_t kind[HT_PLANES_MAX];
    uint32_t plane_bytes[HT_PLANES_MAX]; /* in the frame */
};

static bool plane_valid(const struct layout *l, unsigned rank)
{
    if (rank >= l->count)
        return l->kind[rank] == HT_PLANE_NONE && !l->plane_bytes[rank];
    if (l->kind[rank] == HT_PLANE_STORED)
        return l->plane_bytes[rank] == l->n;
    return l->kind[rank] == HT_PLANE_ZSTD && l->plane_bytes[rank] < l->n;
}

static bool read_layout(const uint8_t *frame, uint32_t frame_bytes, struct layout *out)
{
    struct ht_disk_planes h;

    if (frame_bytes < HEADER_BYTES)
        return false;
    memcpy(&h, frame, HEADER_BYTES);
    out->count = h.element_bytes;
    out->raw_bytes = ht_le32_load(h.raw_bytes.b);
    if ((out->count != 1 && out->count != 2 && out->count != 4) || out->raw_bytes > HT_CHUNK_BYTES || h.pad[0] ||
        h.pad[1] || h.pad[2] || ht_le32_load(h.pad2.b))
        return false;
    out->n = out->raw_bytes / out->count;
    uint64_t sum = HEADER_BYTES + out->raw_bytes % out->count;
    for (unsigned i = 0; i < HT_PLANES_MAX; i++) {
        out->kind[i] = h.kind[i];
        out->plane_bytes[i] = ht_le32_load(h.plane_bytes[i].b);
        if (!plane_valid(out, i))
            return false;
        sum += out->plane_bytes[i];
    }
    return sum == frame_bytes;
}

/*
 * Do the bytes decode to exactly so many? Takes any bytes. Writes to out only. They are to be one frame of today's
 * format that names its length and no dictionary: older formats, frames that are skipped, and several frames one after
 * the other are refused. The library gets no more room than the caller has, and needs no window of its own for a frame
 * that it decodes in one call.
 */
static bool decompress(ZSTD_DCtx *z, const void *in, size_t in_bytes, void *out, size_t bytes)
{
    return in_bytes >= 4 && ht_le32_load(in) == ZSTD_MAGICNUMBER && ZSTD_getFrameContentSize(in, in_bytes) == bytes &&
        ZSTD_getDictID_fromFrame(in, in_bytes) == 0 && ZSTD_findFrameCompressedSize(in, in_bytes) == in_bytes &&
        ZSTD_decompressDCtx(z, out, bytes, in, in_bytes) == bytes;
}

/* After this nothing of the frame is needed. */
static bool read_planes(struct ht_decoder *d, const struct layout *l, const uint8_t *frame)
{
    const uint8_t *p = frame + HEADER_BYTES;
    uint8_t *plane = d->planes;

    for (unsigned i = 0; i < l->count; i++) {
        if (l->kind[i] == HT_PLANE_STORED)
            memcpy(plane, p, l->n);
        else if (!decompress(d->zstd, p, l->plane_bytes[i], plane, l->n))
            return false;
        p += l->plane_bytes[i];
        plane += l->n;
    }
    memcpy(plane, p, l->raw_bytes % l->count);
    return true;
}

int ht_codec_decode(struct ht_decoder *d, const void *frame, uint32_t frame_bytes, void *out, uint32_t bytes)
{
    const uint8_t *plane[HT_PLANES_MAX];
    struct layout l;

    if (!read_layout(frame, frame_bytes, &l) || l.raw_bytes < bytes || !read_planes(d, &l, frame))
        return -EUCLEAN;
    size_t n = bytes / l.count, whole = n * l.count;
    for (unsigned i = 0; i < l.count; i++)
        plane[i] = d->planes + i * (size_t)l.n;
    ht_planes_join(out, l.count, plane, n);
    if (n == l.n) {
        memcpy((uint8_t *)out + whole, d->planes + l.count * n, bytes - whole);
        return 0;
    }
    for (size_t i = whole; i < bytes; i++)
        ((uint8_t *)out)[i] = plane[i - whole][n];
    return 0;
}
