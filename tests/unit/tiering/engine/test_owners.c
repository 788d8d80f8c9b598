/* SPDX-License-Identifier: Apache-2.0 */
/* test_owners.c - walks that look at parts of the places find all owners of each place. */
#include "tiering/engine/pass.h"

#include "tests/support/suite.h"

enum { MOST = 64, PLACES = 500, OWNERS = 3 };

static unsigned found[PLACES]; /* rounds that had all owners of a place */

/* Notes all owners, and counts the places of which the round has any. Returns how many. */
static unsigned round_of(struct ht_owners_part *part, unsigned places)
{
    struct ht_owners x;
    const struct ht_owner_found *f;
    unsigned seen = 0;
    size_t n;

    ht_owners_begin(&x, MOST, *part);
    for (uint64_t k = 0; k < OWNERS; k++)
        for (uint64_t i = 0; i < places; i++) {
            const struct ht_owner_found note = {i, i * 31 % 7, k, ht_owners_group_of(&x, i)};
            if (ht_owners_lack_room(&x, note.group))
                ht_owners_make_room(&x);
            ck_assert_int_eq(ht_owners_note(&x, &note), 0);
        }
    ck_assert_uint_le(x.count, MOST);
    while ((f = ht_owners_next(&x, &n))) {
        ck_assert_uint_eq(n, OWNERS);
        for (size_t k = 0; k < n; k++)
            ck_assert_uint_eq(f[k].index, k);
        ck_assert_uint_lt(f->place, PLACES);
        found[f->place]++;
        seen++;
    }
    ck_assert(ht_owners_are_over(&x));
    *part = ht_owners_then(&x);
    ht_owners_end(&x);
    return seen;
}

TEST(rounds_come_to_all_places)
{
    struct ht_owners_part part = {0};
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

TEST(few_places_are_one_part_again)
{
    struct ht_owners_part part = {0};

    ht_id_hash_fix();
    (void)round_of(&part, PLACES);
    ck_assert_uint_le(part.hashes, (UINT64_C(1) << 32) * MOST / (PLACES * OWNERS) * 2);
    for (unsigned i = 0; i < 32; i++)
        (void)round_of(&part, 2);
    ck_assert_uint_eq(part.hashes, UINT64_C(1) << 32);
    ck_assert_uint_eq(round_of(&part, 2), 2);
}

/* Work that is longer than a step: notes without order, then a place with very many owners. */
TEST(very_many_owners_are_long_work)
{
    struct ht_owners x;
    size_t n;

    ht_owners_begin(&x, 4 * HT_OWNERS_LONG, (struct ht_owners_part){.hashes = 1});
    for (uint64_t i = 0; i < HT_OWNERS_LONG + 3; i++) {
        ck_assert(!ht_owners_are_long(&x) || i > HT_OWNERS_LONG);
        const struct ht_owner_found f = {.place = i < 2 ? i : 2, .oid = 1, .index = i};
        ck_assert_int_eq(ht_owners_note(&x, &f), 0);
    }
    for (uint64_t place = 0; place < 3; place++) {
        ck_assert_int_eq(ht_owners_are_long(&x), place != 1);
        ck_assert_uint_eq(ht_owners_next(&x, &n)->place, place);
        ck_assert_uint_eq(n, place == 2 ? HT_OWNERS_LONG + 1 : 1);
    }
    ck_assert(!ht_owners_are_long(&x));
    ht_owners_end(&x);
}

/* The upper half of the groups leaves with its notes, and only the last group has a bound that holds. */
TEST(groups_leave_until_there_is_room)
{
    struct ht_owners x;

    ht_owners_begin(&x, 8, (struct ht_owners_part){.hashes = 8});
    for (uint32_t i = 0; i < 100; i++) {
        const struct ht_owner_found f = {.place = i, .oid = 1, .group = i % 8};
        if (ht_owners_lack_room(&x, f.group))
            ht_owners_make_room(&x);
        ck_assert_int_eq(ht_owners_note(&x, &f), 0);
    }
    ck_assert_uint_eq(x.groups, 1);
    ck_assert_uint_eq(x.count, 8);
    for (uint32_t i = 0; i < 8; i++)
        ck_assert_uint_eq(x.found[i].place, 8 * i);
    ck_assert(!ht_owners_lack_room(&x, 0));
    ht_owners_end(&x);
}

TEST(nothing_was_found)
{
    struct ht_owners x;
    size_t n;

    ht_owners_begin(&x, MOST, (struct ht_owners_part){.hashes = 1});
    ck_assert_ptr_null(ht_owners_next(&x, &n));
    ck_assert(ht_owners_are_over(&x));
    ht_owners_end(&x);
}

RUN_TESTS("owners")
