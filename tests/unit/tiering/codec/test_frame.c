/* SPDX-License-Identifier: Apache-2.0 */
/* test_frame.c - compressed frames: which chunks are compressed, what comes back, and what the decoder refuses. */

#include "tests/support/suite.h"
#include "tests/unit/tiering/codec/content.h"
#include "tiering/base/buf.h"
#include "tiering/codec/frame.h"
#include <hitrain/format.h>
#include <hitrain/limits.h>

enum { HEADER = sizeof(struct ht_disk_planes), GUARD = 0xa5, N = 200 };

static struct ht_encoder *encoder;
static struct ht_decoder *decoder;
static uint8_t raw[HT_CHUNK_BYTES], frame[HT_CHUNK_BYTES], again[HT_CHUNK_BYTES], back[HT_CHUNK_BYTES + 1];

static void setup(void)
{
    ck_assert_int_eq(ht_encoder_new(&encoder), 0);
    ck_assert_int_eq(ht_decoder_new(&decoder), 0);
}

static void teardown(void)
{
    ht_encoder_free(encoder);
    ht_decoder_free(decoder);
}

/* ---------------------------------------------------------------- encode */

/* Hundredths of raw bytes over those of the frame; 0: there is no frame. */
static const struct case_ {
    const char *what;
    content_fn fill;
    uint32_t bytes;
    unsigned ratio_min, ratio_max;
} cases[] = {
    {"bf16 weights", content_bf16, HT_CHUNK_BYTES, 140, 160},
    {"f16 weights", content_f16, HT_CHUNK_BYTES, 108, 140},
    {"f32 moments", content_f32, HT_CHUNK_BYTES, 112, 130},
    {"text", content_text, HT_CHUNK_BYTES, 200, 10000},
    {"zeros", content_zeros, HT_CHUNK_BYTES, 1000, UINT32_MAX},
    {"random", content_random, HT_CHUNK_BYTES, 0, 0},
    {"a small chunk", content_bf16, HT_SMALL_CHUNK_BYTES, 135, 160},
    {"bf16 and a byte", content_bf16, HT_SMALL_CHUNK_BYTES - 1, 135, 160},
    {"f32 and three bytes", content_f32, HT_CHUNK_BYTES - 1, 112, 130},
    {"four blocks: one is saved", content_bf16, 4 * HT_BLOCK_BYTES, 135, 160},
    {"three blocks: none is", content_bf16, 3 * HT_BLOCK_BYTES, 0, 0},
    {"a block: none can be saved", content_zeros, HT_BLOCK_BYTES, 0, 0},
    {"a block and a byte: one is saved", content_zeros, HT_BLOCK_BYTES + 1, 1000, UINT32_MAX},
    {"a byte", content_zeros, 1, 0, 0},
};

static uint32_t encode(const struct case_ *c, uint8_t *out)
{
    c->fill(raw, c->bytes, 11);
    int len = ht_codec_encode(encoder, raw, c->bytes, out);

    ck_assert_msg(len >= 0, "%s", c->what);
    return (uint32_t)len;
}

TEST_LOOP(a_frame_is_smaller_by_a_sixteenth_and_a_block_or_there_is_none, HT_ARRAY_SIZE(cases))
{
    const struct case_ *c = &cases[_i];
    uint32_t len = encode(c, frame);

    ck_assert_msg((len != 0) == (c->ratio_min != 0), "%s: %u", c->what, len);
    if (!len)
        return;
    uint32_t ratio = (uint32_t)(c->bytes * 100ull / len);
    ck_assert_msg(ratio >= c->ratio_min && ratio <= c->ratio_max, "%s: %u", c->what, ratio);
    ck_assert_uint_le(len, c->bytes - c->bytes / 16);
    ck_assert_uint_lt(ht_div_up(len, HT_BLOCK_BYTES), ht_div_up(c->bytes, HT_BLOCK_BYTES));
}

TEST_LOOP(a_frame_gives_back_all_bytes_or_the_first_ones, HT_ARRAY_SIZE(cases))
{
    const struct case_ *c = &cases[_i];
    const uint32_t part[] = {c->bytes, c->bytes - 1, c->bytes - 4, c->bytes / 2, 4097, 3, 1, 0};
    uint32_t len = encode(c, frame);

    for (size_t i = 0; len && i < HT_ARRAY_SIZE(part); i++) {
        memset(back, GUARD, sizeof(back));
        ck_assert_int_eq(ht_codec_decode(decoder, frame, len, back, part[i]), 0);
        ck_assert_msg(memcmp(back, raw, part[i]) == 0, "%s: first %u bytes", c->what, part[i]);
        ck_assert_uint_eq(back[part[i]], GUARD);
    }
}

TEST_LOOP(a_frame_decodes_into_its_own_memory, HT_ARRAY_SIZE(cases))
{
    const struct case_ *c = &cases[_i];
    uint32_t len = encode(c, frame);

    for (unsigned at_end = 0; len && at_end < 2; at_end++) {
        uint8_t *place = back + (at_end ? c->bytes - len : 0);
        memcpy(place, frame, len);
        ck_assert_int_eq(ht_codec_decode(decoder, place, len, back, c->bytes), 0);
        ck_assert_msg(memcmp(back, raw, c->bytes) == 0, "%s", c->what);
    }
}

TEST(the_same_bytes_give_the_same_frame_whatever_came_before)
{
    struct ht_encoder *fresh;

    for (size_t i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        uint32_t len = encode(&cases[i], frame);
        ck_assert_int_eq(ht_encoder_new(&fresh), 0);
        memset(again, GUARD, sizeof(again));
        ck_assert_int_eq(ht_codec_encode(fresh, raw, cases[i].bytes, again), (int)len);
        ck_assert_msg(memcmp(frame, again, len) == 0, "%s", cases[i].what);
        ht_encoder_free(fresh);
    }
}

/* ---------------------------------------------------------------- decode */

/* One plane of 200 bytes, all 'A', as one block of zstd that repeats a byte: fixed bytes of the format. */
#define MAGIC 0x28, 0xb5, 0x2f, 0xfd
#define RUN(n) ((n) << 3 | 3) & 0xff, (n) >> 5 & 0xff, (n) >> 13 & 0xff, 'A'
#define GOOD MAGIC, 0x20, N, RUN(N)

static uint32_t put_frame(uint8_t *out, const uint8_t *plane, uint32_t len)
{
    struct ht_disk_planes h = {.element_bytes = 1, .kind = {HT_PLANE_ZSTD}};

    ht_le32_store(h.raw_bytes.b, N);
    ht_le32_store(h.plane_bytes[0].b, len);
    memcpy(out, &h, HEADER);
    memcpy(out + HEADER, plane, len);
    return HEADER + len;
}

static const struct stream {
    const char *what;
    bool valid;
    uint8_t len, bytes[64];
} streams[] = {
#define STREAM(what, valid, ...)                             \
    {                                                        \
        what, valid, sizeof((const uint8_t[]){__VA_ARGS__}), \
        {                                                    \
            __VA_ARGS__                                      \
        }                                                    \
    }
    STREAM("a run of 200", true, GOOD),
    STREAM("one of 201", false, MAGIC, 0x20, N, RUN(201)),
    STREAM("one of 199", false, MAGIC, 0x20, N, RUN(199)),
    STREAM("a run of a MiB", false, MAGIC, 0x20, N, RUN(1 << 20)),
    STREAM("201 promised, and there", false, MAGIC, 0x20, 201, RUN(201)),
    STREAM("4 GiB promised", false, MAGIC, 0xa0, 0xff, 0xff, 0xff, 0xff, RUN(N)),
    STREAM("no length, and the largest window", false, MAGIC, 0x00, 0xff, RUN(N)),
    STREAM("length, and the largest window", false, MAGIC, 0x80, 0xff, N, 0, 0, 0, RUN(1 << 20)),
    STREAM("a dictionary", false, MAGIC, 0x21, 5, N, RUN(N)),
    STREAM("a dictionary of 4 bytes", false, MAGIC, 0x23, 1, 2, 3, 4, N, RUN(N)),
    STREAM("reserved bits", false, MAGIC, 0x28, N, RUN(N)),
    STREAM("a block of a reserved type", false, MAGIC, 0x20, N, 0x47, 0x06, 0x00, 'A'),
    STREAM("a checksum that is wrong", false, MAGIC, 0x24, N, RUN(N), 1, 2, 3, 4),
    STREAM("an older format", false, 0x27, 0xb5, 0x2f, 0xfd, 0x20, N, RUN(N)),
    STREAM("a frame that is skipped", false, 0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0),
    STREAM("a frame that is skipped first", false, 0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0, GOOD),
    STREAM("two frames", false, GOOD, GOOD),
    STREAM("a frame, and an empty one", false, GOOD, MAGIC, 0x20, 0, 1, 0, 0),
    STREAM("a byte too many", false, GOOD, 0),
    STREAM("no byte of the run", false, MAGIC, 0x20, N, 0x43, 0x06, 0x00),
    STREAM("no block", false, MAGIC, 0x20, N),
    STREAM("only the magic number", false, MAGIC),
    STREAM("less", false, 0x28, 0xb5),
};

TEST_LOOP(only_a_plain_stream_of_the_right_length_decodes, HT_ARRAY_SIZE(streams))
{
    const struct stream *s = &streams[_i];
    uint32_t len = put_frame(frame, s->bytes, s->len);

    memset(back, GUARD, sizeof(back));
    ck_assert_msg(ht_codec_decode(decoder, frame, len, back, N) == (s->valid ? 0 : -EUCLEAN), "%s", s->what);
    for (unsigned i = 0; s->valid && i < N; i++)
        ck_assert_uint_eq(back[i], 'A');
    ck_assert_uint_eq(back[N], GUARD);
}

/* A byte of the header has another value. */
static const struct header_case {
    const char *what;
    unsigned at;
    uint8_t value;
} header_cases[] = {
    {"elements of no byte", 0, 0},
    {"of three", 0, 3},
    {"of five", 0, 5},
    {"of eight", 0, 8},
    {"two planes, of which one is not there", 0, 2},
    {"no plane", 1, HT_PLANE_NONE},
    {"stored, and shorter than the content", 1, HT_PLANE_STORED},
    {"a kind that does not exist", 1, 3},
    {"a second plane", 2, HT_PLANE_STORED},
    {"a last plane", 4, HT_PLANE_ZSTD},
    {"padding", 5, 1},
    {"padding, its end", 7, 1},
    {"less content", 8, N - 1},
    {"more content", 8, N + 1},
    {"more than a chunk", 10, 0x11},
    {"2 GiB of content", 11, 0x80},
    {"later padding", 12, 1},
    {"its end", 15, 1},
    {"a shorter plane", 16, 9},
    {"a longer plane", 16, 11},
    {"a plane beyond the frame", 17, 1},
    {"a plane of 4 GiB", 19, 0xff},
    {"bytes of a plane that is not there", 20, 1},
    {"of the last", 31, 0xff},
};

TEST_LOOP(a_wrong_byte_in_the_header_is_refused, HT_ARRAY_SIZE(header_cases))
{
    static const uint8_t good[] = {GOOD};
    const struct header_case *c = &header_cases[_i];
    uint32_t len = put_frame(frame, good, sizeof(good));

    ck_assert_int_eq(ht_codec_decode(decoder, frame, len, back, N), 0);
    frame[c->at] = c->value;
    memset(back, GUARD, sizeof(back));
    ck_assert_msg(ht_codec_decode(decoder, frame, len, back, N) == -EUCLEAN, "%s", c->what);
    ck_assert_uint_eq(back[0], GUARD);
}

TEST(a_frame_of_another_length_is_refused)
{
    uint32_t len = encode(&cases[0], frame);

    ck_assert_int_eq(ht_codec_decode(decoder, frame, len, back, HT_CHUNK_BYTES), 0);
    ck_assert_int_eq(ht_codec_decode(decoder, frame, len + 1, back, HT_CHUNK_BYTES), -EUCLEAN);
    for (uint32_t cut = 1; cut < len; cut = cut * 3 + 1)
        ck_assert_int_eq(ht_codec_decode(decoder, frame, len - cut, back, HT_CHUNK_BYTES), -EUCLEAN);
    ck_assert_int_eq(ht_codec_decode(decoder, frame, 0, back, 1), -EUCLEAN);
}

TEST(more_bytes_than_there_are_are_refused)
{
    struct case_ c = cases[0];

    c.bytes = HT_SMALL_CHUNK_BYTES;
    uint32_t len = encode(&c, frame);
    memset(back, GUARD, sizeof(back));
    ck_assert_int_eq(ht_codec_decode(decoder, frame, len, back, c.bytes + 1), -EUCLEAN);
    ck_assert_uint_eq(back[0], GUARD);
}

RUN_TESTS("frame", .setup = setup, .teardown = teardown)
