/* SPDX-License-Identifier: Apache-2.0 */
/* test_ticker.c - it ticks in time, until its end and no longer. */

#include "tests/support/suite.h"
#include "tiering/sys/ticker.h"

enum { TICKS = 3 };

struct heard {
    struct ht_ticker ticker;
    pthread_cond_t enough;
    unsigned ticks;
    uint64_t last_ns;
    bool in_time;
};

static void hear(void *ctx, uint64_t since_begin_ns)
{
    struct heard *h = ctx;

    h->ticks++;
    h->in_time &= since_begin_ns > h->last_ns && since_begin_ns >= h->ticks * h->ticker.period_ns;
    h->last_ns = since_begin_ns;
    if (h->ticks == TICKS)
        pthread_cond_signal(&h->enough);
}

TEST(it_ticks_until_its_end)
{
    struct heard h = {.in_time = true};

    ht_cond_init(&h.enough);
    ht_ticker_begin(&h.ticker, 1000000, hear, &h);
    ht_mutex_lock(&h.ticker.lock);
    while (h.ticks < TICKS)
        ht_cond_wait(&h.enough, &h.ticker.lock);
    ht_mutex_unlock(&h.ticker.lock);
    ht_ticker_end(&h.ticker);
    ck_assert(h.in_time);
    pthread_cond_destroy(&h.enough);
}

TEST(its_end_does_not_wait_for_the_next_tick)
{
    struct heard h = {.in_time = true};

    ht_ticker_begin(&h.ticker, UINT64_C(1000000000) * 3600, hear, &h);
    ht_ticker_end(&h.ticker);
    ck_assert_uint_eq(h.ticks, 0);
}

RUN_TESTS("ticker")
