/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frame.c - encodes and decodes compressed frames, and alone calls libzstd. All of its settings are fixed here, and
 * none depends on a level whose meaning the library may change. So a version of libzstd always gives the same bytes.
 */
#include <zstd.h>

#include "tiering/base/buf.h"
#include "tiering/codec/frame.h"
#include "tiering/codec/planes.h"
#include <hitrain/format.h>

enum { HEADER_BYTES = sizeof(struct ht_disk_planes), VECTOR_BYTES = 64 };
static_assert(HT_PLANES_MAX == HT_DISK_PLANES_MAX, "planes of the format");

struct ht_encoder {
    ZSTD_CCtx *zstd;
    uint8_t *planes; /* of a chunk */
    uint8_t *coded;  /* one plane */
};

struct ht_decoder {
    ZSTD_DCtx *zstd;
    uint8_t *planes; /* of a chunk, and the bytes after them */
};

/* ---------------------------------------------------------------- encode */

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
