/* SPDX-License-Identifier: Apache-2.0 */
/* test_buckets.c - entries are found while their table grows, and a walk meets each once. */

#include "tests/support/suite.h"
#include "tiering/base/idtable.h"

enum { FIRST = 3000, MORE = 20000 };

struct entry {
    uint64_t hash;
    struct entry *next;
    unsigned met;
};

static struct entry entries[FIRST + MORE];
static struct ht_buckets t;

static void put(struct entry *e)
{
    void **head = ht_bucket_of_hash(&t, e->hash);

    ht_chain_link(head, e, next);
}

/* One bucket more for one entry more: a chain has few. Returns how many entries moved. */
static unsigned add(unsigned i)
{
    void **from;
    unsigned moved = 0;

    entries[i] = (struct entry){.hash = i * UINT64_C(0x9e3779b97f4a7c15) >> 20};
    ck_assert(ht_buckets_grow(&t, &from));
    if (from) {
        struct entry *e = *from, *next;
        for (*from = NULL; e; e = next, moved++) {
            next = e->next;
            put(e);
        }
    }
    put(&entries[i]);
    return moved;
}

static bool is_found(const struct entry *e)
{
    const struct entry *x = *ht_bucket_of_hash(&t, e->hash);

    while (x && x != e)
        x = x->next;
    return x;
}

static void teardown(void)
{
    ht_buckets_free(&t);
    ck_assert_uint_eq(t.count, 0);
}

TEST(growth_moves_few_entries_and_loses_none)
{
    enum { MOVED_MAX = 64 };

    for (unsigned i = 0; i < FIRST; i++) {
        ck_assert_uint_le(add(i), MOVED_MAX);
        ck_assert(is_found(&entries[i]));
    }
    ck_assert_uint_eq(t.count, HT_BUCKETS_START + FIRST - 1);
    ck_assert_uint_ge(ht_buckets_bytes(&t), t.count * sizeof(void *));
    for (unsigned i = 0; i < FIRST; i++)
        ck_assert(is_found(&entries[i]));
}

/* The table becomes larger after each bucket, so all of its buckets are divided meanwhile, some several times. */
TEST_LOOP(a_walk_meets_each_entry_once_while_the_table_grows, 6)
{
    unsigned next = FIRST;
    size_t bucket = 0;

    for (unsigned i = 0; i < FIRST; i++)
        add(i);
    do {
        for (struct entry *e = *ht_bucket_at(&t, bucket); e; e = e->next)
            e->met++;
        bucket = ht_buckets_next(&t, bucket);
        for (unsigned k = 0; k < (unsigned)_i && next < FIRST + MORE; k++)
            add(next++);
    } while (bucket);
    for (unsigned i = 0; i < next; i++) {
        ck_assert_uint_le(entries[i].met, 1);
        ck_assert(i >= FIRST || entries[i].met == 1);
    }
}

/* First, last and inner entries of a chain, and its only one. */
TEST(what_leaves_a_chain_is_found_no_more_and_all_others_are)
{
    for (unsigned i = 0; i < FIRST; i++)
        add(i);
    for (unsigned i = 0; i < FIRST; i++) {
        unsigned k = i * 7 % FIRST; /* in another order than they came */
        void **head = ht_bucket_of_hash(&t, entries[k].hash);
        struct entry *e = &entries[k];
        ht_chain_remove(head, e, next);
        ck_assert(!is_found(e));
    }
    for (size_t b = 0; b < t.count; b++)
        ck_assert_ptr_null(*ht_bucket_at(&t, b));
}

RUN_TESTS("buckets", .teardown = teardown)
