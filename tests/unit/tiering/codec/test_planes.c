/* SPDX-License-Identifier: Apache-2.0 */
/* test_planes.c - planes of elements of all sizes, and what a sample shows, on a table. */

#include "tests/support/suite.h"
#include "tests/unit/tiering/codec/content.h"
#include "tiering/codec/frame.h"

enum { BYTES = 1 << 18, ELEMENTS_MAX = 70 };

static uint8_t raw[BYTES];

static const struct case_ {
    const char *what;
    content_fn fill;
    struct ht_planes expected;
} cases[] = {
    {"bf16 weights", content_bf16, {2, {false, true}, true}},
    {"f16 weights", content_f16, {2, {false, true}, true}},
    {"f32 moments", content_f32, {4, {false, false, false, true}, true}},
    {"numbers below 1000 in 4 bytes", content_small_int, {4, {false, true, true, true}, true}},
    {"text", content_text, {1, {true}, true}},
    {"zeros", content_zeros, {1, {true}, true}},
    {"random", content_random, {1, {false}, false}},
};

TEST_LOOP(a_sample_shows_size_of_elements_and_planes_to_code, HT_ARRAY_SIZE(cases))
{
    const struct case_ *c = &cases[_i];
    struct ht_planes got;

    c->fill(raw, BYTES, 7);
    ht_planes_sample(raw, BYTES, &got);
    ck_assert_msg(got.count == c->expected.count, "%s: %u", c->what, got.count);
    ck_assert_msg(got.worth == c->expected.worth, "%s", c->what);
    for (unsigned i = 0; i < HT_PLANES_MAX; i++)
        ck_assert_msg(got.coded[i] == c->expected.coded[i], "%s: plane %u", c->what, i);
}

/* Whole vectors, and what is left of one. */
TEST_LOOP(planes_hold_bytes_of_equal_rank_and_join_again, 3)
{
    unsigned count = 1u << _i;
    uint8_t plane_of[HT_PLANES_MAX][ELEMENTS_MAX], back[HT_PLANES_MAX * ELEMENTS_MAX + 1];
    uint8_t *plane[HT_PLANES_MAX] = {plane_of[0], plane_of[1], plane_of[2], plane_of[3]};
    const uint8_t *read[HT_PLANES_MAX] = {plane_of[0], plane_of[1], plane_of[2], plane_of[3]};

    content_random(raw, BYTES, 3);
    for (unsigned n = 0; n <= ELEMENTS_MAX; n++) {
        memset(plane_of, 0, sizeof(plane_of));
        ht_planes_split(plane, count, raw, n);
        for (unsigned i = 0; i < n * count; i++)
            ck_assert_uint_eq(plane_of[i % count][i / count], raw[i]);
        back[n * count] = 0xa5;
        ht_planes_join(back, count, read, n);
        ck_assert_int_eq(memcmp(back, raw, n * count), 0);
        ck_assert_uint_eq(back[n * count], 0xa5);
    }
}

RUN_TESTS("planes")
