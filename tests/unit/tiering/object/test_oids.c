/* SPDX-License-Identifier: Apache-2.0 */
/* The numbers of all objects, while objects come and go and their table grows. */
#include <limits.h>

#include "tiering/object/object.h"

#include "tests/unit/tiering/store/fixture.h"

enum { FIRST = 3000, MORE = 20000 };

static struct ht_obj *first[FIRST], *more[MORE];
static struct ht_oid_scan scan;

/* One that takes no room in the log. */
static struct ht_obj *make(void)
{
    struct ht_obj *o;
    const struct ht_obj_attr a = {
        .oid = ht_store_new_id(s), .chunk_bytes = HT_SMALL_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH};

    ck_assert_int_eq(ht_obj_create(s, &a, &o), 0);
    return o;
}

static void setup(void)
{
    fresh(64, false);
    scan = (struct ht_oid_scan){0};
    for (unsigned i = 0; i < FIRST; i++)
        first[i] = make();
}

static void teardown(void)
{
    free(scan.oid);
    done();
}

static int by_oid(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static bool is_listed(const struct ht_obj *o)
{
    uint64_t oid = ht_obj_id(o);

    return bsearch(&oid, scan.oid, scan.count, sizeof(oid), by_oid);
}

static void scan_on(unsigned slices)
{
    for (unsigned i = 0; i < slices && !scan.is_over; i++)
        ck_assert_int_eq(ht_oid_scan_slice(s, &scan), 0);
}

/* Each of the first objects is listed, and none twice. */
static void expect_first(void)
{
    scan_on(UINT_MAX);
    qsort(scan.oid, scan.count, sizeof(*scan.oid), by_oid);
    for (size_t i = 1; i < scan.count; i++)
        ck_assert_uint_lt(scan.oid[i - 1], scan.oid[i]);
    for (unsigned i = 0; i < FIRST; i++)
        ck_assert(is_listed(first[i]));
}

TEST(all_are_listed_once)
{
    uint64_t *oid;
    size_t count;

    expect_first();
    ck_assert_int_eq(ht_store_oids(s, &oid, &count), 0);
    ck_assert_uint_eq(count, scan.count);
    qsort(oid, count, sizeof(*oid), by_oid);
    ck_assert_int_eq(memcmp(oid, scan.oid, count * sizeof(*oid)), 0);
    free(oid);
    put_each(first, FIRST);
}

/* After _i slices the table has doubled several times. */
TEST_LOOP(none_is_missed_or_listed_twice_when_the_table_grows, 3)
{
    size_t before = s->objects.table.buckets.count;

    scan_on((unsigned)_i);
    ck_assert(!scan.is_over);
    for (unsigned i = 0; i < MORE; i++)
        more[i] = make();
    ck_assert_uint_ge(s->objects.table.buckets.count, 4 * before);
    expect_first();
    put_each(more, MORE);
    put_each(first, FIRST);
}

/* Other threads have the lock between slices, however many objects there are. */
TEST(a_slice_lists_a_part)
{
    enum { PART = 8192 };
    size_t before = 0;
    unsigned slices = 0;

    for (unsigned i = 0; i < MORE; i++)
        more[i] = make();
    for (; !scan.is_over; slices++) {
        scan_on(1);
        ck_assert_uint_le(scan.count - before, PART);
        before = scan.count;
    }
    ck_assert_uint_ge(slices, 4);
    ck_assert_uint_ge(scan.count, FIRST + MORE);
    put_each(more, MORE);
    put_each(first, FIRST);
}

/* There is room for the first objects when the others come. */
TEST(objects_that_come_during_a_scan_cost_few_slices)
{
    unsigned slices = 0;

    scan_on(1);
    ck_assert(!scan.is_over);
    ck_assert_uint_lt(scan.room, FIRST + MORE);
    for (unsigned i = 0; i < MORE; i++)
        more[i] = make();
    for (; !scan.is_over; slices++)
        scan_on(1);
    ck_assert_uint_gt(scan.count, FIRST);
    ck_assert_uint_le(slices, 100);
    put_each(more, MORE);
    put_each(first, FIRST);
}

RUN_TESTS("oids", .setup = setup, .teardown = teardown, .timeout_s = 120)
