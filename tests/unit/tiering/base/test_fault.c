/* SPDX-License-Identifier: Apache-2.0 */
/* Armed points fire on the passage they were armed for, and nowhere else. */
#include "tests/support/suite.h"
#include "tiering/base/fault.h"

static const enum ht_fault_point point = HT_FAULT_IO_READ, other = HT_FAULT_IO_WRITE;

#define THREADS 4
#define PASSAGES 1000

TEST(a_point_that_is_not_armed_never_fires)
{
    ck_assert_int_eq(ht_fault(other), 0);
    ht_fault_arm(point, 1, true);
    ck_assert_int_eq(ht_fault(other), 0);
    ck_assert_uint_eq(ht_fault_passed(other), 0);
    ht_fault_disarm_all();
    ck_assert_int_eq(ht_fault(point), 0);
    ck_assert_uint_eq(ht_fault_passed(point), 0);
}

TEST(the_nth_passage_fires_once)
{
    ht_fault_arm(point, 3, false);
    ck_assert_int_eq(ht_fault(point), 0);
    ck_assert_int_eq(ht_fault(point), 0);
    ck_assert_int_eq(ht_fault(point), -EIO);
    ck_assert_int_eq(ht_fault(point), 0);
    ck_assert_uint_eq(ht_fault_passed(point), 4);
}

TEST(a_repeating_point_fires_from_then_on)
{
    ht_fault_arm(point, 2, true);
    ck_assert_int_eq(ht_fault(point), 0);
    ck_assert_int_eq(ht_fault(point), -EIO);
    ck_assert_int_eq(ht_fault(point), -EIO);
}

TEST(arming_again_starts_over)
{
    ht_fault_arm(point, 1, true);
    ck_assert_int_eq(ht_fault(point), -EIO);
    ht_fault_arm(point, 2, false);
    ck_assert_uint_eq(ht_fault_passed(point), 0);
    ck_assert_int_eq(ht_fault(point), 0);
    ck_assert_int_eq(ht_fault(point), -EIO);
}

static void *pass_often(void *fired)
{
    for (int i = 0; i < PASSAGES; i++)
        if (ht_fault(point) != 0)
            ++*(unsigned *)fired;
    return NULL;
}

TEST(one_of_many_threads_is_hit)
{
    unsigned fired[THREADS] = {0}, sum = 0;
    pthread_t threads[THREADS];

    ht_fault_arm(point, THREADS * PASSAGES / 2, false);
    for (int i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, pass_often, &fired[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        sum += fired[i];
    }
    ck_assert_uint_eq(sum, 1);
    ck_assert_uint_eq(ht_fault_passed(point), THREADS * PASSAGES);
}

TEST(names_are_words_and_no_two_are_alike)
{
    for (int i = 0; i < HT_FAULT_COUNT; i++) {
        const char *name = ht_fault_name((enum ht_fault_point)i);
        ck_assert_ptr_nonnull(strchr(name, '.'));
        for (int k = 0; k < i; k++)
            ck_assert_str_ne(name, ht_fault_name((enum ht_fault_point)k));
    }
}

RUN_TESTS("fault", .setup = ht_fault_disarm_all, .teardown = ht_fault_disarm_all)
