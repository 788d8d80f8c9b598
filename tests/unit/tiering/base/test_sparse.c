/* SPDX-License-Identifier: Apache-2.0 */
/* Entries of elements that are mostly zeros: each array comes back, bit for bit, and wrong entries are refused. */

#include "tests/support/suite.h"
#include "tiering/base/sparse.h"

enum { ELEMENTS = 300000 };

static uint8_t *array, *entries, *back;
static unsigned seed;

static unsigned next_random(void)
{
    seed = seed * 1103515245 + 12345;
    return seed >> 8;
}

static void setup(void)
{
    array = calloc(ELEMENTS, 4);
    entries = malloc(ELEMENTS * 6ul);
    back = malloc(ELEMENTS * 4ul);
    seed = 1;
}

static void teardown(void)
{
    free(array);
    free(entries);
    free(back);
}

/* In windows of any length, as counted before. */
static size_t encode(size_t bytes, unsigned size)
{
    struct ht_sparse_encoder e = {.size = size}, counts = {.size = size};
    size_t len = 0, counted = 0;

    for (size_t at = 0; at < bytes;) {
        size_t part = (1 + next_random() % 5000) * size;
        part = part < bytes - at ? part : bytes - at;
        size_t n = ht_sparse_encode(&e, array + at, part, entries + len);
        ck_assert_uint_le(n, part / size * ht_sparse_entry_bytes(size));
        len += n;
        counted += ht_sparse_encode(&counts, array + at, part, NULL);
        at += part;
    }
    ck_assert_uint_eq(len, counted);
    return len;
}

static void comes_back(size_t bytes, unsigned size, size_t len)
{
    memset(back, 0xaa, bytes);
    ck_assert_int_eq(ht_sparse_decode(entries, len, size, back, bytes), 0);
    ck_assert_int_eq(memcmp(back, array, bytes), 0);
    ck_assert_int_eq(ht_sparse_decode(entries, len, size, NULL, bytes), 0);
}

static const unsigned rarely[] = {1, 2, 10, 1000, 40000, 70000, 1000000};

TEST_LOOP(any_array_comes_back, HT_ARRAY_SIZE(rarely))
{
    for (unsigned size = 2; size <= 4; size += 2) {
        size_t nonzero = 0, bytes = (size_t)(ELEMENTS - 7 * _i) * size;
        memset(array, 0, ELEMENTS * 4);
        for (size_t i = 0; i < bytes / size; i++)
            if (next_random() % rarely[_i] == 0) {
                array[i * size + next_random() % size] = (uint8_t)(1 + next_random() % 255);
                nonzero++;
            }
        size_t len = encode(bytes, size);
        ck_assert_uint_ge(len, nonzero * ht_sparse_entry_bytes(size));
        ck_assert_uint_le(len, (nonzero + ELEMENTS / 65536) * ht_sparse_entry_bytes(size));
        comes_back(bytes, size, len);
    }
}

/* An element after so many zeros, and none; minus zero is an element. */
TEST(long_rows_of_zeros_come_back)
{
    static const size_t zeros[] = {0, 1, 15, 65534, 65535, 65536, 65537, 131071, 131072, 196607, ELEMENTS - 1};
    const uint32_t minus_zero = 0x80000000u;

    for (size_t i = 0; i < HT_ARRAY_SIZE(zeros); i++) {
        memset(array, 0, ELEMENTS * 4);
        memcpy(array + zeros[i] * 4, &minus_zero, 4);
        comes_back(ELEMENTS * 4, 4, encode(ELEMENTS * 4, 4));
    }
    memset(array, 0, ELEMENTS * 4);
    size_t len = encode(ELEMENTS * 4, 4);
    ck_assert_uint_le(len, ELEMENTS / 65536 * 6);
    comes_back(ELEMENTS * 4, 4, len);
    comes_back(0, 4, 0);
}

TEST(wrong_entries_are_refused)
{
    static const uint8_t two[] = {1, 0, 7, 7, 7, 7, 2, 0, 8, 8, 8, 8};

    ck_assert_int_eq(ht_sparse_decode(two, 12, 4, back, 20), 0);
    ck_assert_int_eq(ht_sparse_decode(two, 12, 4, back, 16), -EUCLEAN); /* the second one is the first beyond */
    ck_assert_int_eq(ht_sparse_decode(two, 12, 4, NULL, 16), -EUCLEAN);
    ck_assert_int_eq(ht_sparse_decode(two, 12, 4, back, 0), -EUCLEAN);
    ck_assert_int_eq(ht_sparse_decode(two, 11, 4, back, 20), -EUCLEAN); /* a part of an entry */
    ck_assert_int_eq(ht_sparse_decode(two, 12, 4, back, 22), -EUCLEAN); /* and of an element */
    ck_assert_int_eq(ht_sparse_decode(two, 12, 8, back, 64), -EUCLEAN);
    ck_assert_int_eq(ht_sparse_decode(two, 12, 1, back, 64), -EUCLEAN);
    memset(entries, 0xff, 600); /* many rows of zeros */
    ck_assert_int_eq(ht_sparse_decode(entries, 600, 4, back, ELEMENTS * 4), -EUCLEAN);
}

RUN_TESTS("sparse", .setup = setup, .teardown = teardown)
