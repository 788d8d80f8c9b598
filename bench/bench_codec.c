/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_codec.c - ratio and speed of the codec on one core, in GB of content for each second of processor time, beside
 * a copy; and how fast deduplication hashes and compares chunks. Chunks of 1 MiB of made content, or of files.
 *
 *     bench_codec [FILE...]
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "tests/unit/tiering/codec/content.h"
#include "tiering/base/hash.h"
#include "tiering/codec/frame.h"
#include <hitrain/limits.h>

enum { CHUNKS_MAX = 64, ROUNDS = 9 };

static struct ht_encoder *encoder;
static struct ht_decoder *decoder;
static uint8_t *raw, *frame, *back;
static volatile uint64_t sum; /* of checksums, so that they are computed */

struct chunk {
    uint32_t bytes, stored;
} chunks[CHUNKS_MAX];
static unsigned count;

static uint8_t *at(uint8_t *base, unsigned i)
{
    return base + (size_t)i * HT_CHUNK_BYTES;
}

static void encode_all(void)
{
    for (unsigned i = 0; i < count; i++) {
        int len = ht_codec_encode(encoder, at(raw, i), chunks[i].bytes, at(frame, i));
        if (len < 0)
            abort();
        chunks[i].stored = len ? (uint32_t)len : chunks[i].bytes;
    }
}

/* As a reader does: chunks that stay raw need no work. */
static void decode_all(void)
{
    for (unsigned i = 0; i < count; i++)
        if (chunks[i].stored < chunks[i].bytes &&
            ht_codec_decode(decoder, at(frame, i), chunks[i].stored, at(back, i), chunks[i].bytes))
            abort();
}

static void copy_all(void)
{
    for (unsigned i = 0; i < count; i++)
        memcpy(at(back, i), at(raw, i), chunks[i].bytes);
}

static void hash_all(void)
{
    for (unsigned i = 0; i < count; i++)
        sum += ht_hash64(at(raw, i), chunks[i].bytes, 0);
}

static void compare_all(void)
{
    for (unsigned i = 0; i < count; i++)
        if (memcmp(at(raw, i), at(back, i), chunks[i].bytes))
            abort();
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static uint64_t processor_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The median of some rounds, in GB/s. */
static double measure(void (*work)(void), uint64_t bytes)
{
    double rate[ROUNDS];

    for (unsigned r = 0; r < ROUNDS; r++) {
        uint64_t begin = processor_ns();
        work();
        rate[r] = (double)bytes / (double)(processor_ns() - begin);
    }
    qsort(rate, ROUNDS, sizeof(rate[0]), by_value);
    return rate[ROUNDS / 2];
}

static void check(const char *name)
{
    for (unsigned i = 0; i < count; i++)
        if (chunks[i].stored < chunks[i].bytes && memcmp(at(raw, i), at(back, i), chunks[i].bytes)) {
            fprintf(stderr, "bench_codec: %s: chunk %u differs\n", name, i);
            exit(1);
        }
}

static void run(const char *name)
{
    uint64_t bytes = 0, stored = 0;
    char text[32] = "stays raw";

    for (unsigned i = 0; i < count; i++)
        bytes += chunks[i].bytes;
    double copy = measure(copy_all, bytes);
    double encode = measure(encode_all, bytes);
    double decode = measure(decode_all, bytes);
    check(name);
    for (unsigned i = 0; i < count; i++)
        stored += chunks[i].stored;
    if (stored < bytes)
        snprintf(text, sizeof(text), "decode %5.2f GB/s", decode);
    printf("%-24s %4u MiB  ratio %6.3f  encode %6.2f GB/s  %s  copy %5.2f GB/s\n", name, (unsigned)(bytes >> 20),
           (double)bytes / (double)stored, encode, text, copy);
    fflush(stdout);
}

/* Of two copies, with content that matters to neither. */
static void run_sharing(void)
{
    uint64_t bytes = 0;

    copy_all();
    for (unsigned i = 0; i < count; i++)
        bytes += chunks[i].bytes;
    printf("deduplication: hashing %5.2f GB/s, comparing %5.2f GB/s\n", measure(hash_all, bytes),
           measure(compare_all, bytes));
    fflush(stdout);
}

static const struct made {
    const char *name;
    content_fn fill;
} made[] = {
    {"bf16 weights", content_bf16}, {"f16 weights", content_f16}, {"f32 moments", content_f32},
    {"text", content_text},         {"zeros", content_zeros},     {"random", content_random},
};

static void run_made(const struct made *m)
{
    count = CHUNKS_MAX;
    for (unsigned i = 0; i < count; i++) {
        chunks[i].bytes = HT_CHUNK_BYTES;
        m->fill(at(raw, i), HT_CHUNK_BYTES, i + 1);
    }
    run(m->name);
}

static int run_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    size_t n;

    if (!f) {
        perror(path);
        return 1;
    }
    for (count = 0; count < CHUNKS_MAX && (n = fread(at(raw, count), 1, HT_CHUNK_BYTES, f)) > 0; count++)
        chunks[count].bytes = (uint32_t)n;
    fclose(f);
    if (count)
        run(path);
    return 0;
}

int main(int argc, char **argv)
{
    size_t bytes = (size_t)CHUNKS_MAX * HT_CHUNK_BYTES;
    int rc = 0;

    raw = calloc(1, bytes);
    frame = calloc(1, bytes);
    back = calloc(1, bytes);
    if (!raw || !frame || !back || ht_encoder_new(&encoder) || ht_decoder_new(&decoder)) {
        fprintf(stderr, "bench_codec: no memory\n");
        return 1;
    }
    for (int i = 1; i < argc; i++)
        rc |= run_file(argv[i]);
    for (size_t i = 0; argc == 1 && i < HT_ARRAY_SIZE(made); i++)
        run_made(&made[i]);
    if (count)
        run_sharing();
    ht_encoder_free(encoder);
    ht_decoder_free(decoder);
    free(raw);
    free(frame);
    free(back);
    return rc;
}
