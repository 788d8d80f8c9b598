/* SPDX-License-Identifier: Apache-2.0 */
/* test_recompress_shared.c - rounds that look at parts of the shared content find all owners of each place. */
#include "tiering/engine/recompress_shared.h"

#include <stdlib.h>

#include "tests/support/suite.h"
#include "tiering/base/idhash.h"

enum { MOST = 64, PLACES = 500, OWNERS = 3 };

static unsigned found[PLACES]; /* rounds that had all owners of a place */

/* Notes all owners, and counts the places of which the round has any. Returns how many. */
static unsigned round_of(struct ht_recompress_part *part, unsigned places)
{
    struct ht_recompress_shared x;
    const struct ht_owner_found *f;
    unsigned seen = 0;
    size_t n;

    ht_recompress_shared_begin(&x, *part, MOST);
    for (uint64_t k = 0; k < OWNERS; k++)
        for (uint64_t i = 0; i < places; i++) {
            if (ht_recompress_shared_is_full(&x, i))
                ht_recompress_shared_make_room(&x);
            ck_assert_int_eq(ht_recompress_shared_note(&x, i, i * 31 % 7, k), 0);
        }
    ck_assert_uint_le(x.owners.count, MOST);
    while ((f = ht_recompress_shared_next(&x, &n))) {
        ck_assert_uint_eq(n, OWNERS);
        for (size_t k = 0; k < n; k++)
            ck_assert_uint_eq(f[k].index, k);
        ck_assert_uint_lt(f->place, PLACES);
        found[f->place]++;
        seen++;
    }
    ck_assert(ht_recompress_shared_is_over(&x));
    *part = ht_recompress_shared_then(&x);
    ht_recompress_shared_end(&x);
    return seen;
}

START_TEST(rounds_come_to_all_places)
{
    struct ht_recompress_part part = {0};
    unsigned rounds = 0;

    ht_id_hash_fix();
    memset(found, 0, sizeof(found));
    for (unsigned seen = 0; seen < PLACES && rounds < 500; rounds++) {
        ck_assert_uint_gt(round_of(&part, PLACES), 0);
        seen = 0;
        for (unsigned i = 0; i < PLACES; i++)
            seen += found[i] > 0;
    }
    for (unsigned i = 0; i < PLACES; i++)
        ck_assert_uint_gt(found[i], 0);
    ck_assert_uint_le(rounds, 4 * PLACES * OWNERS / MOST);
}
END_TEST

START_TEST(few_places_are_one_part_again)
{
    struct ht_recompress_part part = {0};

    ht_id_hash_fix();
    (void)round_of(&part, PLACES);
    ck_assert_uint_le(part.hashes, (UINT64_C(1) << 32) * MOST / (PLACES * OWNERS) * 2);
    for (unsigned i = 0; i < 32; i++)
        (void)round_of(&part, 2);
    ck_assert_uint_eq(part.hashes, UINT64_C(1) << 32);
    ck_assert_uint_eq(round_of(&part, 2), 2);
}
END_TEST

/* Work that is longer than a step: notes without order, then a place with very many owners. */
START_TEST(very_many_owners_are_long_work)
{
    struct ht_recompress_shared x;
    size_t n;

    ht_recompress_shared_begin(&x, (struct ht_recompress_part){0}, 4 * HT_OWNERS_LONG);
    for (uint64_t i = 0; i < HT_OWNERS_LONG + 3; i++) {
        ck_assert(!ht_recompress_shared_is_long(&x) || i > HT_OWNERS_LONG);
        ck_assert_int_eq(ht_recompress_shared_note(&x, i < 2 ? i : 2, 1, i), 0);
    }
    for (uint64_t place = 0; place < 3; place++) {
        ck_assert_int_eq(ht_recompress_shared_is_long(&x), place != 1);
        ck_assert_uint_eq(ht_recompress_shared_next(&x, &n)->place, place);
        ck_assert_uint_eq(n, place == 2 ? HT_OWNERS_LONG + 1 : 1);
    }
    ck_assert(!ht_recompress_shared_is_long(&x));
    ht_recompress_shared_end(&x);
}
END_TEST

START_TEST(nothing_was_found)
{
    struct ht_recompress_shared x;
    size_t n;

    ht_recompress_shared_begin(&x, (struct ht_recompress_part){0}, MOST);
    ck_assert_ptr_null(ht_recompress_shared_next(&x, &n));
    ck_assert(ht_recompress_shared_is_over(&x));
    ht_recompress_shared_end(&x);
}
END_TEST

int main(void)
{
    TCase *tc = tcase_create("recompress_shared");
    Suite *suite = suite_create("engine");

    tcase_add_test(tc, rounds_come_to_all_places);
    tcase_add_test(tc, few_places_are_one_part_again);
    tcase_add_test(tc, very_many_owners_are_long_work);
    tcase_add_test(tc, nothing_was_found);
    suite_add_tcase(suite, tc);
    return run_all(suite);
}
