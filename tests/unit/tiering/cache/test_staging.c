/* SPDX-License-Identifier: Apache-2.0 */
/* Staging buffers go to threads in the order of their requests. */
#include <sched.h>

#include "tests/support/suite.h"
#include "tiering/base/base.h"
#include "tiering/sys/mem.h"
#include "tiering/cache/staging.h"

enum { BUFS = 16, ALL = 12, CROWD = 8, CROWD_TAKES = 4, MANY_MAX = ALL, PATIENCE_S = 60 };

static struct ht_staging *pool;

static void begin(void)
{
    ck_assert_int_eq(ht_staging_new((uint64_t)BUFS << 20, NULL, &pool), 0);
    ck_assert_uint_eq(ht_staging_count(pool, HT_STAGING_UPDATE), ALL);
}

static int get(unsigned count, bool nowait, void *bufs[MANY_MAX])
{
    return ht_staging_get(pool, HT_STAGING_UPDATE, count, nowait, HT_NUMA_INDEX_ANY, bufs);
}

static void put(unsigned count, void *bufs[MANY_MAX])
{
    for (unsigned i = 0; i < count; i++)
        ht_staging_put(pool, HT_STAGING_UPDATE, bufs[i]);
}

struct asker {
    pthread_t thread;
    unsigned count;
    atomic_bool *go_back; /* it keeps its buffers until then */
    atomic_int *turns;
    int turn; /* when it was served */
};

static void *ask(void *arg)
{
    struct asker *a = arg;
    void *bufs[MANY_MAX];

    ck_assert_int_eq(get(a->count, false, bufs), 0);
    a->turn = atomic_fetch_add(a->turns, 1);
    while (!atomic_load(a->go_back))
        sched_yield();
    put(a->count, bufs);
    return NULL;
}

TEST(a_request_is_not_overtaken_by_smaller_ones)
{
    void *mine[MANY_MAX];
    atomic_bool go_back = false;
    atomic_int turns = 0;
    struct asker large = {.count = 8, .go_back = &go_back, .turns = &turns};

    begin();
    ck_assert_int_eq(get(8, false, mine), 0);
    pthread_create(&large.thread, NULL, ask, &large);
    /* Until a thread waits: then a caller that does not wait gets nothing, though enough is free. */
    void *buf[MANY_MAX];
    uint64_t until = ht_now_ns() + PATIENCE_S * 1000000000ull;
    int rc;
    while ((rc = get(1, true, buf)) == 0 && ht_now_ns() < until) {
        put(1, buf);
        sched_yield();
    }
    ck_assert_int_eq(rc, -EAGAIN);
    ck_assert_int_eq(atomic_load(&turns), 0);
    put(8, mine);
    atomic_store(&go_back, true);
    pthread_join(large.thread, NULL);
    ck_assert_int_eq(atomic_load(&turns), 1);
    ck_assert_int_eq(get(ALL, true, mine), 0); /* no ticket remains */
    put(ALL, mine);
    ht_staging_free(pool);
}

struct crowd {
    atomic_bool stop;
    atomic_uint rounds;
};

static void *crowd_main(void *arg)
{
    struct crowd *c = arg;
    void *bufs[MANY_MAX];

    while (!atomic_load(&c->stop)) {
        ck_assert_int_eq(get(CROWD_TAKES, false, bufs), 0);
        sched_yield();
        put(CROWD_TAKES, bufs);
        atomic_fetch_add(&c->rounds, 1);
    }
    return NULL;
}

/* Each of the crowd is served at most once before a request that came while it waited. */
TEST(a_large_request_beside_a_crowd_is_served_in_turn)
{
    struct crowd c = {0};
    pthread_t thread[CROWD];

    begin();
    for (unsigned i = 0; i < CROWD; i++)
        pthread_create(&thread[i], NULL, crowd_main, &c);
    while (atomic_load(&c.rounds) < 100)
        sched_yield();
    for (unsigned count = 6; count <= ALL; count += 2)
        for (unsigned i = 0; i < 50; i++) {
            void *bufs[MANY_MAX];
            ck_assert_int_eq(get(count, false, bufs), 0);
            put(count, bufs);
        }
    atomic_store(&c.stop, true);
    for (unsigned i = 0; i < CROWD; i++)
        pthread_join(thread[i], NULL);
    ht_staging_free(pool);
}

/* What a device that does not answer keeps leaves room for one batch pin elsewhere, also beside those who wait. */
TEST_LOOP(some_buffers_are_kept, 2)
{
    unsigned all = _i ? 48 : 18, kept = _i ? 12 : 6;
    atomic_bool go_back = true;
    atomic_int turns = 0;
    struct asker waits = {.count = 12, .go_back = &go_back, .turns = &turns};
    void *mine[48], *bufs[MANY_MAX];

    ck_assert_int_eq(ht_staging_new((uint64_t)all * 4 / 3 << 20, NULL, &pool), 0);
    ck_assert_uint_eq(ht_staging_count(pool, HT_STAGING_UPDATE), all);
    ck_assert_int_eq(get(all - kept + 1, false, mine), -E2BIG);
    ck_assert_int_eq(get(all - kept, false, mine), 0);
    ck_assert_int_eq(get(1, true, bufs), -EAGAIN);
    pthread_create(&waits.thread, NULL, ask, &waits);
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(ht_staging_get_kept(pool, kept, HT_NUMA_INDEX_ANY, bufs), 0);
        put(kept, bufs);
    }
    ck_assert_int_eq(atomic_load(&turns), 0);
    put(all - kept, mine);
    pthread_join(waits.thread, NULL);
    ck_assert_int_eq(ht_staging_get_kept(pool, kept < 12 ? kept + 1 : kept, HT_NUMA_INDEX_ANY, bufs), 0);
    put(kept < 12 ? kept + 1 : kept, bufs);
    ht_staging_free(pool);
}

RUN_TESTS("staging", .timeout_s = 2 * PATIENCE_S)
