/* SPDX-License-Identifier: Apache-2.0 */
/* test_holders.c - a chunk with as many readers as it can count lets the next ones wait, and forgets none. */

#include "tests/unit/tiering/store/fixture.h"

enum { HOLDERS_MAX = 1023, WAITERS = 4, BYTES = 4096 };

struct reader {
    struct ht_obj *o;
    const uint8_t *want;
    uint8_t buf[BYTES];
    pthread_t waiter[WAITERS];
    atomic_uint begun;
    unsigned depth;
};

static void compare(void *ctx, const void *bytes, size_t len)
{
    const struct reader *r = ctx;

    ck_assert_uint_eq(len, BYTES);
    ck_assert_int_eq(memcmp(bytes, r->want, BYTES), 0);
}

static void *wait_and_read(void *arg)
{
    struct reader *r = arg;
    uint8_t buf[BYTES];

    r->begun++;
    ck_assert_int_eq(ht_obj_read_in_place(r->o, NULL, 0, buf, BYTES, compare, r), BYTES);
    return NULL;
}

static void start_waiters(struct reader *r)
{
    for (unsigned i = 0; i < WAITERS; i++)
        ck_assert_int_eq(pthread_create(&r->waiter[i], NULL, wait_and_read, r), 0);
    while (r->begun < WAITERS)
        sched_yield();
}

/*
 * Each reader holds the chunk until the nested readers have ended. One thread may do so, because no other caller wants
 * the chunk exclusively.
 */
static void nested(void *ctx, const void *bytes, size_t len)
{
    struct reader *r = ctx;

    compare(ctx, bytes, len);
    if (++r->depth == HOLDERS_MAX)
        start_waiters(r);
    else
        ck_assert_int_eq(ht_obj_read_in_place(r->o, NULL, 0, r->buf, BYTES, nested, r), BYTES);
}

TEST(readers_beyond_the_count_wait)
{
    static struct reader r;
    uint8_t *p = pattern(BYTES, 1);

    fresh(32, false);
    r.want = p;
    r.o = object(1 << 16, 0);
    put_all(r.o, 0, p, BYTES);
    ck_assert_int_eq(ht_obj_read_in_place(r.o, NULL, 0, r.buf, BYTES, nested, &r), BYTES);
    for (unsigned i = 0; i < WAITERS; i++)
        pthread_join(r.waiter[i], NULL);
    put_all(r.o, 0, p, BYTES); /* exclusively: no reader is left */
}

RUN_TESTS("holders", .teardown = fixture_end)
