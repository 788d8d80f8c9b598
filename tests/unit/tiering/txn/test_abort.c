/* SPDX-License-Identifier: Apache-2.0 */
/* Changes beside an abort: each is before it and taken back whole, or after it and stays whole. */
#include <sched.h>

#include "tests/unit/tiering/store/fixture.h"

enum { SCOPE = 77, ROUNDS = 25, OLD = 6 * MIB, NEW = 12 * MIB };

static uint8_t *old_bytes, *new_bytes;
static struct ht_obj *obj;
static atomic_bool begun;
static ssize_t result;

static void *overwrite(void *arg)
{
    begun = true;
    result = ht_obj_write(obj, 0, new_bytes, NEW);
    return NULL;
}

static void *shrink(void *arg)
{
    begun = true;
    result = ht_obj_truncate(obj, 10);
    return NULL;
}

static void take_back(void)
{
    ck_assert_int_eq(ht_scope_abort(s, SCOPE), 0);
}

/* Aborts at some moment during the change. */
static void abort_beside(void *(*change)(void *), unsigned round)
{
    pthread_t thread;

    begun = false;
    ck_assert_int_eq(pthread_create(&thread, NULL, change, NULL), 0);
    while (!begun)
        ;
    for (volatile unsigned spin = round * 500309 % 20000000; spin; spin--)
        ;
    take_back();
    pthread_join(thread, NULL);
}

static void begin(void)
{
    fresh(128, true);
    old_bytes = pattern(NEW, 1);
    new_bytes = pattern(NEW, 2);
    obj = object(HT_CHUNK_BYTES, SCOPE);
}

static void end(void)
{
    done();
    free(old_bytes);
    free(new_bytes);
}

static void expect_old(void)
{
    ck_assert_uint_eq(ht_obj_size(obj), OLD);
    expect(obj, 0, old_bytes, OLD);
    ck_assert_int_eq(ht_obj_truncate(obj, NEW), 0); /* no bytes remain after the end */
    memset(old_bytes + OLD, 0, NEW - OLD);
    expect(obj, 0, old_bytes, NEW);
}

TEST(a_write_is_before_an_abort_or_after_it)
{
    begin();
    put_all(obj, 0, old_bytes, OLD);
    publish_scope_at_once(SCOPE);
    for (unsigned round = 0; round < ROUNDS; round++) {
        abort_beside(overwrite, round);
        ck_assert_int_eq(result, NEW);
        if (ht_obj_size(obj) == NEW)
            expect(obj, 0, new_bytes, NEW);
        else
            expect_old();
        take_back();
        expect_old();
        take_back();
    }
    end();
}

TEST(a_truncation_is_before_an_abort_or_after_it)
{
    begin();
    put_all(obj, 0, old_bytes, OLD);
    publish_scope_at_once(SCOPE);
    for (unsigned round = 0; round < ROUNDS; round++) {
        abort_beside(shrink, round / 8);
        ck_assert_int_eq(result, 0);
        if (ht_obj_size(obj) == 10)
            expect(obj, 0, old_bytes, 10);
        else
            expect_old();
        take_back();
    }
    end();
}

/* No write reaches an object that is gone. */
TEST(a_write_to_what_an_abort_takes_away_is_before_it_or_fails)
{
    begin();
    for (unsigned round = 0; round < ROUNDS; round++) {
        abort_beside(overwrite, round);
        ck_assert(result == NEW || result == -ESTALE);
        if (ht_obj_write(obj, 0, new_bytes, 1) == -ESTALE)
            ck_assert_uint_eq(obj_stat(obj).dirty_bytes, 0);
        put_object(obj);
        obj = object(HT_CHUNK_BYTES, SCOPE);
    }
    end();
}

/* An abort brings the published size back, and with it the chunks that the log knows. */
TEST(an_abort_beside_a_change_of_the_chunk_size)
{
    fresh(128, false);
    new_bytes = pattern(NEW, 2);
    obj = object(HT_SMALL_CHUNK_BYTES, SCOPE);
    ck_assert_int_eq(ht_obj_truncate(obj, 4 * MIB), 0);
    publish_scope_at_once(SCOPE);
    ck_assert_int_eq(ht_obj_truncate(obj, 0), 0);
    ck_assert_int_eq(ht_obj_set_chunk_bytes(obj, HT_CHUNK_BYTES), -EBUSY);
    put_all(obj, 0, new_bytes, MIB);
    take_back();
    ck_assert_uint_eq(ht_obj_size(obj), 4 * MIB);
    put_all(obj, 2 * MIB, new_bytes, MIB);
    publish_scope_at_once(SCOPE);
    obj = after(remount, obj);
    expect(obj, 2 * MIB, new_bytes, MIB);
}

RUN_TESTS("abort", .timeout_s = 120, .teardown = fixture_end)
