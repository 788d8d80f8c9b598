/* SPDX-License-Identifier: Apache-2.0 */
/* Locks taken out of their order end the process, in builds that check it; in order they are plain locks. */
#include <signal.h>
#include "tests/support/suite.h"
#include "tiering/base/base.h"
#include "tiering/base/lock.h"

enum { LONG_AGO_NS = 1 };

static struct ht_mutex outer, inner;
static struct ht_rwlock names;
static pthread_cond_t changed;

static void setup(void)
{
    ht_mutex_init(&outer, HT_LOCK_TX);
    ht_mutex_init(&inner, HT_LOCK_STORE);
    ck_assert_int_eq(ht_rwlock_init(&names, HT_LOCK_NAMES), 0);
    ht_cond_init(&changed);
}

static void teardown(void)
{
    ht_mutex_destroy(&outer);
    ht_mutex_destroy(&inner);
    ht_rwlock_destroy(&names);
    pthread_cond_destroy(&changed);
}

TEST(locks_in_order_may_be_given_back_in_any)
{
    ht_mutex_lock(&outer);
    ht_rwlock_rdlock(&names);
    ht_mutex_lock(&inner);
    ht_mutex_unlock(&outer);
    ht_mutex_unlock(&inner);
    ht_rwlock_unlock(&names);
    ht_rwlock_wrlock(&names);
    ht_mutex_lock(&inner);
    ht_mutex_unlock(&inner);
    ht_rwlock_unlock(&names);
}

TEST(a_wait_may_hold_earlier_locks)
{
    ht_mutex_lock(&outer);
    ht_mutex_lock(&inner);
    ck_assert_int_eq(ht_cond_wait_until(&changed, &inner, LONG_AGO_NS), ETIMEDOUT);
    ht_mutex_unlock(&inner);
    ht_mutex_unlock(&outer);
}

TEST(a_wait_ends_at_its_time_and_not_before)
{
    uint64_t at_ns = ht_now_ns() + 1000000;
    int rc = 0;

    ht_mutex_lock(&inner);
    while (!rc)
        rc = ht_cond_wait_until(&changed, &inner, at_ns);
    ht_mutex_unlock(&inner);
    ck_assert_int_eq(rc, ETIMEDOUT);
    ck_assert_uint_ge(ht_now_ns(), at_ns);
}

static void *signal_changed(void *arg)
{
    ht_mutex_lock(&inner);
    pthread_cond_signal(&changed);
    ht_mutex_unlock(&inner);
    return arg;
}

TEST(a_wait_without_a_time_ends_by_a_signal)
{
    pthread_t thread;

    ht_mutex_lock(&inner);
    ck_assert_int_eq(pthread_create(&thread, NULL, signal_changed, NULL), 0);
    ck_assert_int_eq(ht_cond_wait_until(&changed, &inner, 0), 0);
    ht_mutex_unlock(&inner);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
}

static void *take_outer(void *arg)
{
    ht_mutex_lock(&outer);
    ht_mutex_unlock(&outer);
    return arg;
}

TEST(what_other_threads_hold_does_not_matter)
{
    pthread_t thread;

    ht_mutex_lock(&inner);
    ck_assert_int_eq(pthread_create(&thread, NULL, take_outer, NULL), 0);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ht_mutex_unlock(&inner);
}

#ifdef HT_LOCK_CHECK
TEST_SIGNAL(an_earlier_lock_under_a_later_one_ends_the_process, SIGABRT, 1)
{
    ht_mutex_lock(&inner);
    ht_mutex_lock(&outer);
}

TEST_SIGNAL(a_lock_taken_twice_ends_the_process, SIGABRT, 1)
{
    ht_rwlock_rdlock(&names);
    ht_rwlock_rdlock(&names);
}

TEST_SIGNAL(a_wait_with_a_later_lock_held_ends_the_process, SIGABRT, 1)
{
    ht_mutex_lock(&outer);
    ht_mutex_lock(&inner);
    (void)ht_cond_wait_until(&changed, &outer, LONG_AGO_NS);
}

TEST_SIGNAL(giving_back_what_is_not_held_ends_the_process, SIGABRT, 1)
{
    ht_mutex_unlock(&inner);
}

TEST_SIGNAL(a_lock_without_a_rank_ends_the_process, SIGABRT, 1)
{
    struct ht_mutex nameless = {.lock = PTHREAD_MUTEX_INITIALIZER};

    ht_mutex_lock(&nameless);
}
#endif

RUN_TESTS("lock", .setup = setup, .teardown = teardown)
