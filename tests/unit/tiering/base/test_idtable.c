/* SPDX-License-Identifier: Apache-2.0 */
/* test_idtable.c - an entry is found by its number and by no other, while the table grows and after removals. */

#include "tests/support/suite.h"
#include "tiering/base/idtable.h"

enum { COUNT = 5000 };

static struct ht_id_link links[COUNT];

static uint64_t id_of(unsigned i)
{
    return i % 2 ? i : (uint64_t)i << 40; /* close together, and far apart */
}

TEST(each_is_found_by_its_number)
{
    struct ht_id_table t = {0};

    ck_assert_ptr_null(ht_id_find(&t, 0));
    for (unsigned i = 0; i < COUNT; i++) {
        links[i].id = id_of(i);
        ck_assert_ptr_null(ht_id_find(&t, links[i].id));
        ck_assert_int_eq(ht_id_insert(&t, &links[i]), 0);
    }
    ck_assert_uint_ge(t.buckets.count, COUNT);
    for (unsigned i = 0; i < COUNT; i += 3)
        ht_id_remove(&t, &links[i]);
    for (unsigned i = 0; i < COUNT; i++)
        ck_assert_ptr_eq(ht_id_find(&t, id_of(i)), i % 3 ? &links[i] : NULL);
    ck_assert_uint_eq(t.count, COUNT - (COUNT + 2) / 3);
    ht_id_table_free(&t);
    ck_assert_uint_eq(t.buckets.count, 0);
}

/*
 * Numbers that share one slot under known parameters are spread under others. The tables of two processes are never
 * alike.
 */
TEST(numbers_chosen_to_collide_are_spread_when_the_hash_is_drawn)
{
    enum { SLOTS = 1 << 12, CHOSEN = 2000, SHARE_MAX = 16 };
    static uint64_t chosen[CHOSEN];
    static unsigned in_slot[SLOTS];
    unsigned count = 0, most = 0;

    for (uint64_t id = 1; count < CHOSEN; id++)
        if (ht_id_hash(id) % SLOTS == 7)
            chosen[count++] = id;
    ht_id_hash_draw();
    for (unsigned i = 0; i < CHOSEN; i++) {
        unsigned n = ++in_slot[ht_id_hash(chosen[i]) % SLOTS];
        most = n > most ? n : most;
    }
    ck_assert_uint_le(most, SHARE_MAX);
    const struct ht_id_hash_seed was = ht_id_hash_seed;
    ht_id_hash_draw();
    ck_assert_int_ne(memcmp(&was, &ht_id_hash_seed, sizeof(was)), 0);
}

/*
 * As objects in a row, chunks in a row and multiples of large powers are.
 * By chance, 16 of 4096 numbers share one of 4096 slots once in 1e10 times.
 */
TEST(numbers_in_a_row_are_spread_at_every_distance)
{
    enum { SLOTS = 1 << 12, SHARE_MAX = 16, DRAWS = 200 };

    for (unsigned draw = 0; draw < DRAWS; draw++, ht_id_hash_draw())
        for (unsigned shift = 0; shift <= 52; shift += 4) {
            static unsigned in_slot[SLOTS];
            unsigned most = 0;
            memset(in_slot, 0, sizeof(in_slot));
            for (uint64_t i = 0; i < SLOTS; i++) {
                unsigned n = ++in_slot[ht_id_hash(i << shift) % SLOTS];
                most = n > most ? n : most;
            }
            ck_assert_msg(most <= SHARE_MAX, "shift %u: %u in one slot", shift, most);
        }
}

RUN_TESTS("idtable")
