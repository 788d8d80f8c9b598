/* SPDX-License-Identifier: Apache-2.0 */
/* suite.h - what a test program's main adds and runs. */
#ifndef HITRAIN_TESTS_SUPPORT_SUITE_H
#define HITRAIN_TESTS_SUPPORT_SUITE_H

#include <check.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "tiering/base/idhash.h"

/* HITRAIN_TEST=name runs that test alone: a mutant is looked at by the one that notices it. */
static inline bool suite_wants(const char *name)
{
    const char *only = getenv("HITRAIN_TEST");

    return !only || strcmp(only, name) == 0;
}

#undef tcase_add_test
#undef tcase_add_loop_test
#define tcase_add_loop_test(tc, test, begin, end) \
    (suite_wants(#test) ? _tcase_add_test((tc), (test), 0, 0, (begin), (end)) : (void)0)
#define tcase_add_test(tc, test) tcase_add_loop_test(tc, test, 0, 1)

/* Runs the whole suite and frees it, with the same order in all hash tables each time. For main to return. */
static inline int run_all(Suite *s)
{
    ht_id_hash_fix();
    SRunner *r = srunner_create(s);
    srunner_run_all(r, CK_ENV);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif
