/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compressed frames: the input is the number of bytes that a reader wants, in three bytes, and a frame. The decoder
 * says the same whether it has other memory for the content or that of the frame. Then the input is content, repeated
 * to some blocks: its frame gives it back.
 */
#include "tests/fuzz/fuzz.h"
#include "tiering/codec/frame.h"
#include <hitrain/limits.h>

enum { RAW_BYTES = 5 * HT_BLOCK_BYTES + 1 };

static struct ht_encoder *encoder;
static struct ht_decoder *decoder;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    MUST(ht_encoder_new(&encoder) == 0 && ht_decoder_new(&decoder) == 0);
    return 0;
}

static void *allocate(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);

    MUST(p);
    return p;
}

static void decode(const uint8_t *frame, uint32_t len, uint32_t want)
{
    uint8_t *out = allocate(want), *both = allocate(want > len ? want : len);

    memcpy(both, frame, len);
    int rc = ht_codec_decode(decoder, frame, len, out, want);
    MUST(rc == 0 || rc == -EUCLEAN);
    MUST(ht_codec_decode(decoder, both, len, both, want) == rc);
    MUST(rc || memcmp(both, out, want) == 0);
    free(out);
    free(both);
}

static void encode(const uint8_t *data, size_t size)
{
    uint8_t *raw = allocate(RAW_BYTES), *frame = allocate(RAW_BYTES), *back = allocate(RAW_BYTES);

    for (size_t i = 0; i < RAW_BYTES; i++)
        raw[i] = data[i % size];
    int len = ht_codec_encode(encoder, raw, RAW_BYTES, frame);
    MUST(len >= 0 && len <= RAW_BYTES - RAW_BYTES / 16);
    MUST(!len || ht_codec_decode(decoder, frame, (uint32_t)len, back, RAW_BYTES) == 0);
    MUST(!len || memcmp(raw, back, RAW_BYTES) == 0);
    free(raw);
    free(frame);
    free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 4 || size > HT_CHUNK_BYTES)
        return -1;
    uint32_t want = (data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16) % (HT_CHUNK_BYTES + 1);
    decode(data + 3, (uint32_t)size - 3, want);
    encode(data, size);
    return 0;
}
