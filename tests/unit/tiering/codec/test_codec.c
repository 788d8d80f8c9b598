/* SPDX-License-Identifier: Apache-2.0 */
/* test_codec.c - which sizes each codec may have, on a table. */

#include "tests/support/suite.h"
#include "tiering/codec/codec.h"
#include <hitrain/format.h>
#include <hitrain/limits.h>

enum {
    RAW = HT_CODEC_RAW,
    LOST = HT_CODEC_LOST,
    PLANES = HT_CODEC_PLANES,
    UNKNOWN = HT_CODEC_PLANES + 1,
    CHUNK = HT_CHUNK_BYTES,
};

static const struct case_ {
    const char *what;
    struct ht_codec_sizes sizes;
    bool valid;
} cases[] = {
    {"a whole chunk", {RAW, 1, CHUNK, CHUNK, 9}, true},
    {"one byte in one piece, with any checksum", {RAW, 1, 1, 1, 0}, true},
    {"a chunk in as many pieces as may be", {RAW, HT_FRAGS_MAX, CHUNK, CHUNK, 9}, true},
    {"in more pieces", {RAW, HT_FRAGS_MAX + 1, CHUNK, CHUNK, 9}, false},
    {"fewer bytes count than are stored", {RAW, 1, CHUNK, 1, 9}, true},
    {"none of them counts", {RAW, 1, CHUNK, 0, 9}, true},
    {"more bytes count than are stored", {RAW, 1, 4096, 4097, 9}, false},
    {"more than a chunk", {RAW, 1, CHUNK + 1, CHUNK, 9}, false},
    {"raw, and nothing is stored", {RAW, 1, 0, 0, 9}, false},
    {"raw, and no piece", {RAW, 0, 4096, 4096, 9}, false},
    {"a lost chunk", {LOST, 0, 0, CHUNK, 0}, true},
    {"of one byte", {LOST, 0, 0, 1, 0}, true},
    {"of none", {LOST, 0, 0, 0, 0}, false},
    {"of more than a chunk", {LOST, 0, 0, CHUNK + 1, 0}, false},
    {"lost, with a piece", {LOST, 1, 0, CHUNK, 0}, false},
    {"lost, with stored bytes", {LOST, 0, 4096, 4096, 0}, false},
    {"lost, with a checksum", {LOST, 0, 0, CHUNK, 9}, false},
    {"a compressed chunk", {PLANES, 1, CHUNK / 2, CHUNK, 9}, true},
    {"in as many pieces as may be", {PLANES, HT_FRAGS_MAX, CHUNK / 2, CHUNK, 9}, true},
    {"in more pieces", {PLANES, HT_FRAGS_MAX + 1, CHUNK / 2, CHUNK, 9}, false},
    {"in no piece", {PLANES, 0, CHUNK / 2, CHUNK, 9}, false},
    {"fewer bytes count than the frame has", {PLANES, 1, CHUNK / 2, 1, 9}, true},
    {"more than a chunk counts", {PLANES, 1, CHUNK / 2, CHUNK + 1, 9}, false},
    {"a frame as long as a chunk", {PLANES, 1, CHUNK, CHUNK, 9}, false},
    {"nothing but a header", {PLANES, 1, 32, CHUNK, 9}, false},
    {"no frame", {PLANES, 1, 0, CHUNK, 9}, false},
    {"a codec that does not exist", {UNKNOWN, 1, CHUNK, CHUNK, 9}, false},
    {"the last number of a codec", {UINT8_MAX, 1, CHUNK, CHUNK, 9}, false},
};

TEST_LOOP(every_case, HT_ARRAY_SIZE(cases))
{
    const struct case_ *c = &cases[_i];

    ck_assert_msg(ht_codec_sizes_valid(&c->sizes) == c->valid, "%s", c->what);
}

RUN_TESTS("codec")
