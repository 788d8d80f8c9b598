/* SPDX-License-Identifier: Apache-2.0 */
/* holder.h - a thread that holds a chunk, so that the worker that needs it waits, and readers that are parked. */
#pragma once

#include "tests/unit/optim/step/fixture.h"

static inline void wait_until(bool (*holds)(void))
{
    WAIT_FOR(holds());
}

struct holder {
    pthread_t thread;
    struct ht_obj *obj;
    uint64_t chunk;
    atomic_bool held, let_go;
};

static struct holder holder;

static inline void *hold(void *arg)
{
    struct ht_batch_pin l = {
        .store = w.s,
        .count = 1,
        .chunk = {{.obj = holder.obj, .index = holder.chunk, .mode = HT_BATCH_PIN_READ}},
    };

    ck_assert_int_eq(ht_batch_pin_begin(&l), 0);
    ck_assert_int_eq(ht_batch_pin_wait(&l), 0);
    holder.held = true;
    while (!holder.let_go)
        usleep(1000);
    ht_batch_pin_end(&l, 0);
    ck_assert_int_eq(ht_batch_pin_finish(&l), 0);
    return arg;
}

static inline bool is_held(void)
{
    return holder.held;
}

static inline void hold_begin(struct ht_obj *obj, uint64_t chunk)
{
    holder.obj = obj;
    holder.chunk = chunk;
    holder.held = holder.let_go = false;
    ck_assert_int_eq(pthread_create(&holder.thread, NULL, hold, NULL), 0);
    wait_until(is_held);
}

static inline void hold_end(void)
{
    holder.let_go = true;
    pthread_join(holder.thread, NULL);
}

struct parked {
    struct ht_waiter waiter;
    atomic_bool woken;
};

static struct parked parked;

static inline void wake(struct ht_waiter *waiter)
{
    ((struct parked *)waiter)->woken = true;
}

static inline bool is_woken(void)
{
    return parked.woken;
}
