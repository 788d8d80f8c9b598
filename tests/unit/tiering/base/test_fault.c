/* SPDX-License-Identifier: Apache-2.0 */
/* Armed points fire on the passage they were armed for, and nowhere else. */
#include <check.h>
#include <pthread.h>
#include <stdlib.h>
#include "tiering/base/fault.h"

#define THREADS 4
#define PASSAGES 1000

START_TEST(a_point_that_is_not_armed_never_fires)
{
    ck_assert_int_eq(ht_fault("a"), 0);
    ht_fault_arm("b", 1, -EIO, true);
    ck_assert_int_eq(ht_fault("a"), 0);
    ck_assert_uint_eq(ht_fault_passed("a"), 0);
    ht_fault_disarm_all();
    ck_assert_int_eq(ht_fault("b"), 0);
    ck_assert_uint_eq(ht_fault_passed("b"), 0);
}
END_TEST

START_TEST(the_nth_passage_fires_once)
{
    ht_fault_arm("p", 3, -ENOSPC, false);
    ck_assert_int_eq(ht_fault("p"), 0);
    ck_assert_int_eq(ht_fault("p"), 0);
    ck_assert_int_eq(ht_fault("p"), -ENOSPC);
    ck_assert_int_eq(ht_fault("p"), 0);
    ck_assert_uint_eq(ht_fault_passed("p"), 4);
}
END_TEST

START_TEST(a_repeating_point_fires_from_then_on)
{
    ht_fault_arm("p", 2, -EIO, true);
    ck_assert_int_eq(ht_fault("p"), 0);
    ck_assert_int_eq(ht_fault("p"), -EIO);
    ck_assert_int_eq(ht_fault("p"), -EIO);
}
END_TEST

START_TEST(arming_again_starts_over)
{
    ht_fault_arm("p", 1, -EIO, true);
    ck_assert_int_eq(ht_fault("p"), -EIO);
    ht_fault_arm("p", 2, -EINTR, false);
    ck_assert_uint_eq(ht_fault_passed("p"), 0);
    ck_assert_int_eq(ht_fault("p"), 0);
    ck_assert_int_eq(ht_fault("p"), -EINTR);
}
END_TEST

static void *pass_often(void *fired)
{
    for (int i = 0; i < PASSAGES; i++)
        if (ht_fault("p") != 0)
            ++*(unsigned *)fired;
    return NULL;
}

START_TEST(one_of_many_threads_is_hit)
{
    unsigned fired[THREADS] = {0}, sum = 0;
    pthread_t threads[THREADS];

    ht_fault_arm("p", THREADS * PASSAGES / 2, -EIO, false);
    for (int i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, pass_often, &fired[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        sum += fired[i];
    }
    ck_assert_uint_eq(sum, 1);
    ck_assert_uint_eq(ht_fault_passed("p"), THREADS * PASSAGES);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("fault");
    TCase *t = tcase_create("fault");
    SRunner *r = srunner_create(s);
    int failed;

    tcase_add_checked_fixture(t, ht_fault_disarm_all, ht_fault_disarm_all);
    tcase_add_test(t, a_point_that_is_not_armed_never_fires);
    tcase_add_test(t, the_nth_passage_fires_once);
    tcase_add_test(t, a_repeating_point_fires_from_then_on);
    tcase_add_test(t, arming_again_starts_over);
    tcase_add_test(t, one_of_many_threads_is_hit);
    suite_add_tcase(s, t);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
