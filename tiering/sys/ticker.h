/* SPDX-License-Identifier: Apache-2.0 */
/* ticker.h - a thread that prints the progress of another thread's long work every few seconds. */
#pragma once

#include "tiering/base/base.h"
#include "tiering/base/lock.h"

struct ht_ticker {
    void (*tick)(void *ctx, uint64_t since_begin_ns); /* lock held */
    void *ctx;
    uint64_t period_ns;
    pthread_t thread;
    struct ht_mutex lock;
    pthread_cond_t ended;
    bool running; /* the thread */
    bool done HT_GUARDED_BY(HT_LOCK_PROGRESS);
};

/* The first call comes after one period. Without memory for a thread there are no calls. */
void ht_ticker_begin(struct ht_ticker *t, uint64_t period_ns, void (*tick)(void *ctx, uint64_t since_begin_ns),
                     void *ctx);
/* At once; tick is not called any more. */
void ht_ticker_end(struct ht_ticker *t);
