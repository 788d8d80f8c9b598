/* SPDX-License-Identifier: Apache-2.0 */
/*
 * zstd.h - planes through libzstd. Only zstd.c calls that library. All settings are fixed here, and none depends on a
 * level whose meaning the library may change. So a version of libzstd always gives the same bytes.
 */
#ifndef HITRAIN_TIERING_CODEC_ZSTD_H
#define HITRAIN_TIERING_CODEC_ZSTD_H

#include "tiering/base/base.h"

struct ZSTD_CCtx_s;
struct ZSTD_DCtx_s;

/* NULL: no memory. */
struct ZSTD_CCtx_s *ht_zstd_compressor_new(void);
void ht_zstd_compressor_free(struct ZSTD_CCtx_s *z);
struct ZSTD_DCtx_s *ht_zstd_decompressor_new(void);
void ht_zstd_decompressor_free(struct ZSTD_DCtx_s *z);
/* Their memory now. */
size_t ht_zstd_compressor_bytes(const struct ZSTD_CCtx_s *z);
size_t ht_zstd_decompressor_bytes(const struct ZSTD_DCtx_s *z);

/* Room for whatever becomes of so many bytes. */
size_t ht_zstd_room(size_t bytes) HT_MUST_CHECK;
/*
 * out has ht_zstd_room(bytes) bytes. plane: repeated strings are rare, and looking for them costs more than it gains.
 * -ENOMEM.
 */
int ht_zstd_compress(struct ZSTD_CCtx_s *z, bool plane, const void *raw, size_t bytes, void *out,
                     size_t *out_bytes) HT_MUST_CHECK;
/* Do the bytes decode to exactly so many? Takes any bytes. Writes to out only. */
bool ht_zstd_decompress(struct ZSTD_DCtx_s *z, const void *in, size_t in_bytes, void *out, size_t bytes) HT_MUST_CHECK;

#endif
