/* SPDX-License-Identifier: Apache-2.0 */
/*
 * suite.h - tests that are added by their definition, what runs them, and the headers that nearly all of them need.
 *
 *     TEST(a_name_moves)
 *     {
 *         ck_assert(...);
 *     }
 *
 *     RUN_TESTS("rename", .timeout_s = 60)
 */
#pragma once

#include <check.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/random.h"
#include "tiering/base/idtable.h"
#include "tiering/base/log.h"

/* Memory that nobody need free: it stays until the process of the test ends. */
static inline void *test_keep(void *p)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void **all; /* so that it is no leak */
    static size_t count;

    pthread_mutex_lock(&lock);
    all = realloc(all, (count + 1) * sizeof(*all));
    ck_assert(p && all);
    all[count++] = p;
    pthread_mutex_unlock(&lock);
    return p;
}

/* Such memory, of zeros. */
static inline void *test_alloc(size_t bytes)
{
    return test_keep(calloc(1, bytes));
}

/* A test runs once for each _i from first up to end, which is not included. signal: ends each run; 0: none does. */
struct suite_test {
    TTest test;
    int signal, first, end;
    struct suite_test *next;
};

static struct suite_test *suite_tests;

/* In the order of the file: constructors run in any. */
static inline void suite_add(struct suite_test *added, int signal, int first, int end)
{
    struct suite_test **at = &suite_tests;

    while (*at && (*at)->test.line < added->test.line)
        at = &(*at)->next;
    added->signal = signal;
    added->first = first;
    added->end = end;
    added->next = *at;
    *at = added;
}

#define SUITE_TEST(name, signal, first, end)                                          \
    static void name(int _i CK_ATTRIBUTE_UNUSED);                                     \
    __attribute__((constructor)) static void name##_add(void)                         \
    {                                                                                 \
        static struct suite_test added = {.test = {#name, name, __FILE__, __LINE__}}; \
        suite_add(&added, signal, first, end);                                        \
    }                                                                                 \
    static void name(int _i CK_ATTRIBUTE_UNUSED)

#define TEST(name) SUITE_TEST(name, 0, 0, 1)
/* Once for each _i below count. */
#define TEST_LOOP(name, count) SUITE_TEST(name, 0, 0, count)
#define TEST_RANGE(name, first, end) SUITE_TEST(name, 0, first, end)
/* Each run must end the process by this signal. */
#define TEST_SIGNAL(name, signal, count) SUITE_TEST(name, signal, 0, count)

/* Until another thread has done its part; a minute is enough for any. */
#define WAIT_FOR(holds)                                     \
    do {                                                    \
        for (unsigned ms = 0; ms < 60000 && !(holds); ms++) \
            usleep(1000);                                   \
        ck_assert(holds);                                   \
    } while (0)

/* HITRAIN_TEST=name runs that test alone: a mutant is looked at by the one that notices it. */
static inline bool suite_wants(const char *name)
{
    const char *only = getenv("HITRAIN_TEST");

    return !only || strcmp(only, name) == 0;
}

/* What the tests do not log. */
enum suite_quiet { ALL_LOGGED, WARNINGS, ERRORS_ONLY, SILENT };

struct suite_options {
    const char *name;
    int timeout_s; /* of each test; 0: that of Check */
    enum suite_quiet quiet;
    void (*memory)(bool);                   /* memory_keep: its pages are kept for the next test */
    void (*once)(void);                     /* before all tests, in the process that forks theirs */
    void (*setup)(void), (*teardown)(void); /* around each test, in its process */
};

/* With the same order in all hash tables each time. Lines of a child that fails are not lost. For main to return. */
static inline int suite_run(const struct suite_options *options)
{
    Suite *suite = suite_create(options->name);
    TCase *all = tcase_create(options->name);

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (options->quiet)
        ht_log_set_level(HT_LOG_INFO - (int)options->quiet);
    if (options->memory)
        options->memory(true);
    if (options->timeout_s)
        tcase_set_timeout(all, options->timeout_s);
    tcase_add_unchecked_fixture(all, options->once, NULL);
    tcase_add_checked_fixture(all, options->setup, options->teardown);
    for (const struct suite_test *t = suite_tests; t; t = t->next)
        if (suite_wants(t->test.name))
            _tcase_add_test(all, &t->test, t->signal, 0, t->first, t->end);
    suite_add_tcase(suite, all);
    ht_id_hash_fix();
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner); /* and the suite */
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* All tests of the file, for a main that does more than these. */
#define run_tests(suite_name, ...) suite_run(&(const struct suite_options){.name = (suite_name), __VA_ARGS__})

/* The program: RUN_TESTS("name", .timeout_s = 60, .setup = f). */
#define RUN_TESTS(...)                 \
    int main(void)                     \
    {                                  \
        return run_tests(__VA_ARGS__); \
    }
