/* SPDX-License-Identifier: Apache-2.0 */
/* suite.h - the end of a test program's main. */
#ifndef HITRAIN_TESTS_SUPPORT_SUITE_H
#define HITRAIN_TESTS_SUPPORT_SUITE_H

#include <check.h>
#include <stdlib.h>

#include "tiering/base/idhash.h"

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
