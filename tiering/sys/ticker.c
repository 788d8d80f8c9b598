/* SPDX-License-Identifier: Apache-2.0 */
/* ticker.c - a thread that calls a function every few seconds. */
#include "tiering/sys/ticker.h"

HT_MUTEX_OF(ticker_lock, struct ht_ticker, lock, HT_LOCK_PROGRESS)

static void *ticker_main(void *arg)
{
    struct ht_ticker *t = arg;
    uint64_t began_ns = ht_now_ns(), at_ns = began_ns;

    ht_mutex_lock(ticker_lock(t));
    while (!t->done) {
        at_ns += t->period_ns;
        while (!t->done && ht_cond_wait_until(&t->ended, ticker_lock(t), at_ns) == 0)
            ;
        if (!t->done)
            t->tick(t->ctx, ht_now_ns() - began_ns);
    }
    ht_mutex_unlock(ticker_lock(t));
    return NULL;
}

void ht_ticker_begin(struct ht_ticker *t, uint64_t period_ns, void (*tick)(void *ctx, uint64_t since_begin_ns),
                     void *ctx)
{
    *t = (struct ht_ticker){.tick = tick, .ctx = ctx, .period_ns = period_ns};
    ht_mutex_init(&t->lock, HT_LOCK_PROGRESS);
    ht_cond_init(&t->ended);
    t->running = pthread_create(&t->thread, NULL, ticker_main, t) == 0;
}

void ht_ticker_end(struct ht_ticker *t)
{
    ht_mutex_lock(ticker_lock(t));
    t->done = true;
    pthread_cond_signal(&t->ended);
    ht_mutex_unlock(ticker_lock(t));
    if (t->running)
        pthread_join(t->thread, NULL);
    pthread_cond_destroy(&t->ended);
    ht_mutex_destroy(&t->lock);
}
