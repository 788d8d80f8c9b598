/* SPDX-License-Identifier: Apache-2.0 */
/* test_idtable.c - what was put in is found by its number, and by no other, while the table grows and after removals. */
#include <check.h>
#include <stdlib.h>

#include "tests/support/suite.h"
#include "tiering/base/idtable.h"

enum { COUNT = 5000 };

static struct ht_id_link links[COUNT];

static uint64_t id_of(unsigned i)
{
    return i % 2 ? i : (uint64_t)i << 40; /* close together, and far apart */
}

START_TEST(each_is_found_by_its_number)
{
    struct ht_id_table t = {0};

    ck_assert_ptr_null(ht_id_find(&t, 0));
    for (unsigned i = 0; i < COUNT; i++) {
        links[i].id = id_of(i);
        ck_assert_ptr_null(ht_id_find(&t, links[i].id));
        ck_assert_int_eq(ht_id_insert(&t, &links[i]), 0);
    }
    ck_assert_uint_ge(t.size, COUNT);
    for (unsigned i = 0; i < COUNT; i += 3)
        ht_id_remove(&t, &links[i]);
    for (unsigned i = 0; i < COUNT; i++)
        ck_assert_ptr_eq(ht_id_find(&t, id_of(i)), i % 3 ? &links[i] : NULL);
    ck_assert_uint_eq(t.count, COUNT - (COUNT + 2) / 3);
    ht_id_table_free(&t);
    ck_assert_uint_eq(t.size, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("idtable");
    TCase *tc = tcase_create("idtable");

    tcase_add_test(tc, each_is_found_by_its_number);
    suite_add_tcase(suite, tc);
    return run_all(suite);
}
