/* SPDX-License-Identifier: Apache-2.0 */
/* zstd.c - the only caller of libzstd. */
#include <zstd.h>

#include "tiering/base/buf.h"
#include "tiering/codec/zstd.h"

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

struct ZSTD_CCtx_s *ht_zstd_compressor_new(void)
{
    return ZSTD_createCCtx();
}

void ht_zstd_compressor_free(struct ZSTD_CCtx_s *z)
{
    ZSTD_freeCCtx(z);
}

struct ZSTD_DCtx_s *ht_zstd_decompressor_new(void)
{
    return ZSTD_createDCtx();
}

void ht_zstd_decompressor_free(struct ZSTD_DCtx_s *z)
{
    ZSTD_freeDCtx(z);
}

size_t ht_zstd_compressor_bytes(const struct ZSTD_CCtx_s *z)
{
    return ZSTD_sizeof_CCtx(z);
}

size_t ht_zstd_decompressor_bytes(const struct ZSTD_DCtx_s *z)
{
    return ZSTD_sizeof_DCtx(z);
}

size_t ht_zstd_room(size_t bytes)
{
    return ZSTD_compressBound(bytes);
}

/* The output may depend on the room for it. So the caller gives room enough, and always as much. */
int ht_zstd_compress(struct ZSTD_CCtx_s *z, bool plane, const void *raw, size_t bytes, void *out, size_t *out_bytes)
{
    size_t n = ZSTD_CCtx_reset(z, ZSTD_reset_session_and_parameters);

    for (unsigned i = 0; i < HT_ARRAY_SIZE(settings) && !ZSTD_isError(n); i++)
        n = ZSTD_CCtx_setParameter(z, settings[i].name, plane ? settings[i].of_plane : settings[i].of_bytes);
    if (!ZSTD_isError(n))
        n = ZSTD_compress2(z, out, ht_zstd_room(bytes), raw, bytes);
    if (ZSTD_isError(n))
        return -ENOMEM;
    *out_bytes = n;
    return 0;
}

/*
 * One frame of today's format that names its length and no dictionary: older formats, frames that are skipped, and
 * several frames one after the other are refused. The library gets no more room than the caller has, and needs no
 * window of its own for a frame that it decodes in one call.
 */
static bool well_formed(const void *in, size_t in_bytes, size_t bytes)
{
    return in_bytes >= 4 && ht_le32_load(in) == ZSTD_MAGICNUMBER && ZSTD_getFrameContentSize(in, in_bytes) == bytes &&
        ZSTD_getDictID_fromFrame(in, in_bytes) == 0 && ZSTD_findFrameCompressedSize(in, in_bytes) == in_bytes;
}

bool ht_zstd_decompress(struct ZSTD_DCtx_s *z, const void *in, size_t in_bytes, void *out, size_t bytes)
{
    return well_formed(in, in_bytes, bytes) && ZSTD_decompressDCtx(z, out, bytes, in, in_bytes) == bytes;
}
