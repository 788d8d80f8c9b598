/* SPDX-License-Identifier: Apache-2.0 */
/* The trace keeps the newest accesses, whole, however many threads write it. */
#include <time.h>

#include "tests/support/suite.h"
#include "tiering/base/activity.h"
#include "tiering/base/trace.h"

enum { ENTRIES = 64, WRITERS = 4, EACH = 20000 };

static struct ht_trace *trace;

static void begin(void)
{
    ck_assert_int_eq(ht_trace_new(ENTRIES, &trace), 0);
}

static void put(enum ht_trace_op op, uint64_t id, uint64_t offset, uint64_t bytes)
{
    struct ht_trace_mark m = ht_trace_begin();

    ht_trace_end(trace, &m, op, id, offset, bytes);
}

static void nap(void)
{
    const struct timespec ms = {0, 1000000};

    nanosleep(&ms, NULL);
}

TEST(entries_come_in_order)
{
    struct ht_trace_entry e;
    uint64_t before_ns = 0;

    begin();
    ck_assert(!ht_trace_next(trace, 0, &e));
    for (unsigned i = 0; i < HT_TRACE_OPS; i++)
        put((enum ht_trace_op)i, 100 + i, i * 8192, 4096);
    for (unsigned i = 0; i < HT_TRACE_OPS; i++) {
        ck_assert(ht_trace_next(trace, i, &e));
        ck_assert_uint_eq(e.seq, i + 1);
        ck_assert_uint_eq(e.op, i);
        ck_assert_uint_eq(e.id, 100 + i);
        ck_assert_uint_eq(e.offset, i * 8192);
        ck_assert_uint_eq(e.bytes, 4096);
        ck_assert_uint_eq(e.waited_ns, 0);
        ck_assert_uint_ge(e.time_ns, before_ns);
        before_ns = e.time_ns;
        for (unsigned k = 0; k < i; k++)
            ck_assert_str_ne(ht_trace_op_word((enum ht_trace_op)i), ht_trace_op_word((enum ht_trace_op)k));
    }
    ck_assert(!ht_trace_next(trace, HT_TRACE_OPS, &e));
    ht_trace_free(trace);
}

TEST(ranges_are_of_whole_units)
{
    static const struct {
        uint64_t offset, bytes, first, count;
    } cases[] = {{0, 0, 0, 0},
                 {1, 1, 0, 1},
                 {4095, 2, 0, 2},
                 {8192, 4096, 2, 1},
                 {5u << 20, 1u << 20, 1280, 256},
                 {UINT64_C(1) << 50, UINT64_C(1) << 50, UINT32_MAX, UINT32_MAX}};
    struct ht_trace_entry e;

    begin();
    for (unsigned i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        put(HT_TRACE_READ, 1, cases[i].offset, cases[i].bytes);
        ck_assert(ht_trace_next(trace, i, &e));
        ck_assert_uint_eq(e.offset, cases[i].first * HT_TRACE_UNIT);
        ck_assert_uint_eq(e.bytes, cases[i].count * HT_TRACE_UNIT);
    }
    ht_trace_free(trace);
}

TEST(the_newest_take_the_places_of_the_oldest)
{
    struct ht_trace_entry e;

    begin();
    for (unsigned i = 0; i < 3 * ENTRIES + 5; i++)
        put(HT_TRACE_WRITE, i, 0, 0);
    for (uint64_t after = 0, seen = 0; seen < ENTRIES; seen++, after = e.seq) {
        ck_assert(ht_trace_next(trace, after, &e));
        ck_assert_uint_eq(e.seq, 2 * ENTRIES + 5 + seen + 1);
        ck_assert_uint_eq(e.id, e.seq - 1);
    }
    ck_assert(!ht_trace_next(trace, 3 * ENTRIES + 5, &e));
    ck_assert(!ht_trace_next(trace, UINT64_MAX, &e));
    ht_trace_free(trace);
}

/* Waits inside of waits count once; an access that began earlier on another thread has waited since. */
TEST(waits_of_the_thread_count)
{
    struct ht_trace_entry e;

    begin();
    ht_activity_wait("something before", 0);
    nap();
    ht_activity_go_on();
    struct ht_trace_mark m = ht_trace_begin();
    ht_activity_wait("a device", 0);
    ht_activity_wait("a chunk", 0);
    nap();
    ht_activity_go_on();
    nap();
    ht_activity_go_on();
    uint64_t passed_ns = ht_now_ns() - m.begin_ns;
    ht_trace_end(trace, &m, HT_TRACE_READ, 1, 0, 0);
    ck_assert(ht_trace_next(trace, 0, &e));
    ck_assert_uint_ge(e.waited_ns, 2000000);
    ck_assert_uint_le(e.waited_ns, passed_ns);

    uint64_t ago = ht_now_ns() - 5000000;
    m = ht_trace_begin_at(ago);
    ht_trace_end(trace, &m, HT_TRACE_READ, 1, 0, 0);
    ck_assert(ht_trace_next(trace, 1, &e));
    ck_assert_uint_ge(e.waited_ns, 4999000);
    m = ht_trace_begin_at(0);
    ht_trace_end(trace, &m, HT_TRACE_READ, 1, 0, 0);
    ck_assert(ht_trace_next(trace, 2, &e));
    ck_assert_uint_eq(e.waited_ns, 0);
    ht_trace_free(trace);
}

/* Entry i of a writer has the offset i; its bytes follow from both. */
static void *write_many(void *arg)
{
    uint64_t id = (uintptr_t)arg;

    for (uint64_t i = 0; i < EACH; i++)
        put(HT_TRACE_UPDATE, id, i * HT_TRACE_UNIT, (i * WRITERS + id) * HT_TRACE_UNIT);
    return NULL;
}

TEST(many_write_and_one_reads)
{
    enum { LARGE = 1 << 17 }; /* there is room for all */
    pthread_t thread[WRITERS];
    struct ht_trace_entry e;
    uint64_t after = 0, seen = 0, last[WRITERS] = {0};

    ck_assert_int_eq(ht_trace_new(LARGE, &trace), 0);
    for (uintptr_t i = 0; i < WRITERS; i++)
        pthread_create(&thread[i], NULL, write_many, (void *)i);
    while (after < WRITERS * EACH) {
        if (!ht_trace_next(trace, after, &e))
            continue;
        ck_assert_uint_eq(e.seq, after + 1);
        ck_assert_uint_lt(e.id, WRITERS);
        ck_assert_uint_eq(e.bytes, (e.offset / HT_TRACE_UNIT * WRITERS + e.id) * HT_TRACE_UNIT);
        ck_assert(e.offset == 0 || e.offset > last[e.id]);
        last[e.id] = e.offset;
        after = e.seq;
        seen++;
    }
    for (unsigned i = 0; i < WRITERS; i++)
        pthread_join(thread[i], NULL);
    ck_assert_uint_eq(seen, WRITERS * EACH);
    ht_trace_free(trace);
}

RUN_TESTS("trace")
