/* SPDX-License-Identifier: Apache-2.0 */
/* test_dedup_index.c - the table of checksums: what it finds, its bounds, and its parts. */
#include <check.h>
#include <stdlib.h>

#include "tests/support/suite.h"
#include "tiering/engine/dedup_index.h"

enum { ENTRY_BYTES = sizeof(struct ht_dedup_entry) };

static void add(struct ht_dedup_index *x, uint64_t checksum, uint32_t object, uint32_t chunk)
{
    struct ht_dedup_entry *e = ht_dedup_index_find(x, checksum);

    ck_assert_ptr_nonnull(e);
    ht_dedup_index_add(x, e, &(struct ht_dedup_entry){checksum, object, chunk});
}

START_TEST(what_was_added_is_found)
{
    enum { N = 5000 };
    struct ht_dedup_index x;

    ck_assert_int_eq(ht_dedup_index_init(&x, N, UINT64_MAX, 7), 0);
    ck_assert_uint_eq(x.parts, 1);
    for (uint32_t i = 0; i < N; i++)
        add(&x, i * 0x100000001ull, i + 1, 3 * i); /* also the checksum 0 */
    ck_assert_uint_eq(x.count, N);
    add(&x, 9 * 0x100000001ull, 77, 5); /* takes the place of the first one */
    ck_assert_uint_eq(x.count, N);
    for (uint32_t i = 0; i < N; i++) {
        const struct ht_dedup_entry *e = ht_dedup_index_find(&x, i * 0x100000001ull);
        ck_assert_ptr_nonnull(e);
        ck_assert_uint_eq(e->object, i == 9 ? 77 : i + 1);
        ck_assert_uint_eq(e->chunk, i == 9 ? 5 : 3 * i);
    }
    ck_assert_uint_eq(ht_dedup_index_find(&x, 12345)->object, 0);
    ht_dedup_index_free(&x);
    ck_assert_uint_eq(ht_dedup_index_bytes(&x), 0);
}
END_TEST

/* Without room nothing else is added, and the entries are still found. */
START_TEST(it_keeps_to_its_bound)
{
    struct ht_dedup_index x;
    unsigned found = 0, refused = 0;

    ck_assert_int_eq(ht_dedup_index_init(&x, 48, 64 * ENTRY_BYTES, 0), 0);
    ck_assert_uint_eq(ht_dedup_index_bytes(&x), 64 * ENTRY_BYTES);
    for (uint32_t i = 1; i <= 60; i++) { /* the store has grown since */
        struct ht_dedup_entry *e = ht_dedup_index_find(&x, i);
        refused += !e;
        if (e)
            ht_dedup_index_add(&x, e, &(struct ht_dedup_entry){i, i, i});
    }
    for (uint32_t i = 1; i <= 60; i++) {
        const struct ht_dedup_entry *e = ht_dedup_index_find(&x, i);
        found += e && e->object == i;
    }
    ck_assert_uint_eq(found, 48);
    ck_assert_uint_eq(refused, 12);
    ht_dedup_index_free(&x);
}
END_TEST

/* Each checksum is in one part, and a part has room for its share. */
START_TEST(parts_take_all_checksums_between_them)
{
    enum { N = 4000 };
    static unsigned taken[N];
    unsigned parts = 1;

    memset(taken, 0, sizeof(taken));
    for (unsigned part = 0; part < parts; part++) {
        struct ht_dedup_index x;
        ck_assert_int_eq(ht_dedup_index_init(&x, N, 512 * ENTRY_BYTES, part), 0);
        ck_assert_uint_le(ht_dedup_index_bytes(&x), 512 * ENTRY_BYTES);
        ck_assert_uint_gt(x.parts, 8);
        parts = x.parts;
        for (uint32_t i = 0; i < N; i++)
            taken[i] += ht_dedup_index_find(&x, i * 0x9e3779b97f4a7c15ull) != NULL;
        ht_dedup_index_free(&x);
    }
    for (unsigned i = 0; i < N; i++)
        ck_assert_uint_eq(taken[i], 1);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dedup_index");
    TCase *tc = tcase_create("index");

    tcase_add_test(tc, what_was_added_is_found);
    tcase_add_test(tc, it_keeps_to_its_bound);
    tcase_add_test(tc, parts_take_all_checksums_between_them);
    suite_add_tcase(suite, tc);
    return run_all(suite);
}
