/* SPDX-License-Identifier: Apache-2.0 */
/* The ring of events: order, wrap, repetition, many writers. Time is the test's own. */
#include "fs/ctl/events.h"
#include "tests/support/suite.h"

#define SECOND 1000000000ull

static struct ht_event_log *log_;

static void setup(void)
{
    ck_assert_int_eq(ht_event_log_new(16, &log_), 0);
}

static void teardown(void)
{
    ht_event_log_free(log_);
}

static void put(enum ht_event_code code, uint64_t id, uint64_t now)
{
    struct ht_event e = {.code = code, .id = id};

    snprintf(e.text, sizeof(e.text), "at %llu", (unsigned long long)now);
    ht_event_log_put(log_, &e, now);
}

static unsigned name_all(void)
{
    struct ht_event_entry entry;
    unsigned n = 0;

    for (; ht_event_log_unnamed(log_, &entry); n++)
        ht_event_log_name(log_, entry.seq, "some/path");
    return n;
}

static uint64_t count_of(enum ht_event_code code)
{
    uint64_t count[HT_EVENT_CODES];

    ht_event_log_counts(log_, count);
    return count[code];
}

TEST(entries_are_shown_in_order_once_they_have_a_name)
{
    struct ht_event_entry e;

    put(HT_EVENT_MOUNTED, 0, 1);
    put(HT_EVENT_CHECKSUM, 7, 2);
    ck_assert(!ht_event_log_next(log_, 0, &e));
    ck_assert_uint_eq(name_all(), 2);
    ck_assert(ht_event_log_next(log_, 0, &e));
    ck_assert_uint_eq(e.seq, 1);
    ck_assert_int_eq(e.event.code, HT_EVENT_MOUNTED);
    ck_assert(ht_event_log_next(log_, 1, &e));
    ck_assert_uint_eq(e.event.id, 7);
    ck_assert_uint_eq(e.count, 1);
    ck_assert_str_eq(e.path, "some/path");
    ck_assert(!ht_event_log_next(log_, 2, &e));
    ck_assert(!ht_event_log_next(log_, UINT64_MAX, &e));
}

TEST(the_oldest_make_room_and_their_number_is_known)
{
    struct ht_event_entry e;

    for (uint64_t i = 1; i <= 40; i++) {
        put(HT_EVENT_REFUSED, i, i);
        name_all();
    }
    ck_assert(ht_event_log_next(log_, 0, &e));
    ck_assert_uint_eq(e.seq, 25);
    ck_assert_uint_eq(e.event.id, 25);
    for (uint64_t seq = 25; seq < 40; seq++) {
        ck_assert(ht_event_log_next(log_, seq, &e));
        ck_assert_uint_eq(e.event.id, seq + 1);
    }
    ck_assert(!ht_event_log_next(log_, 40, &e));
}

TEST(what_is_overwritten_before_it_has_a_name_holds_up_nothing)
{
    struct ht_event_entry e;

    for (uint64_t i = 1; i <= 40; i++)
        put(HT_EVENT_REFUSED, i, i);
    ck_assert_uint_eq(name_all(), 16);
    ck_assert(ht_event_log_next(log_, 0, &e));
    ck_assert_uint_eq(e.seq, 25);
}

TEST(repetition_is_counted_and_appended_with_its_count)
{
    struct ht_event_entry e;

    for (uint64_t i = 0; i < 100; i++)
        put(HT_EVENT_WRITE_ERROR, 3, i);
    ck_assert_uint_eq(name_all(), 1);
    ht_event_log_tick(log_, SECOND + 1);
    ck_assert_uint_eq(name_all(), 1);
    ck_assert(ht_event_log_next(log_, 1, &e));
    ck_assert_uint_eq(e.count, 99);
    ck_assert(!e.various);
    ck_assert_str_eq(e.event.text, "at 99"); /* the last one */
    ck_assert_uint_eq(count_of(HT_EVENT_WRITE_ERROR), 100);
}

TEST(other_objects_devices_codes_and_errors_are_no_repetition)
{
    struct ht_event e = {.code = HT_EVENT_WRITE_ERROR, .id = 3, .error = -EIO, .device = "a"};

    ht_event_log_put(log_, &e, 1);
    e.id = 4;
    ht_event_log_put(log_, &e, 1);
    e.error = -ENOSPC;
    ht_event_log_put(log_, &e, 1);
    e.device[0] = 'b';
    ht_event_log_put(log_, &e, 1);
    e.code = HT_EVENT_READ_ERROR;
    ht_event_log_put(log_, &e, 1);
    e.offset = 4096; /* a failing device fails everywhere */
    ht_event_log_put(log_, &e, 1);
    ck_assert_uint_eq(name_all(), 5);
}

TEST(what_goes_on_for_long_is_told_ever_more_rarely)
{
    unsigned reported = 0;

    for (uint64_t ms = 0; ms < 1000 * 1000; ms += 10) {
        put(HT_EVENT_READ_ERROR, 3, 1 + ms * 1000000);
        reported += name_all();
    }
    ck_assert_uint_ge(reported, 10); /* 1, 2, 4 ... 64 s, then each 64 s */
    ck_assert_uint_le(reported, 24);
    ck_assert_uint_eq(count_of(HT_EVENT_READ_ERROR), 100000);
}

TEST(after_silence_the_next_one_is_told_at_once)
{
    put(HT_EVENT_READ_ERROR, 3, 1);
    put(HT_EVENT_READ_ERROR, 3, 2);
    ht_event_log_tick(log_, 2 * SECOND);
    ht_event_log_tick(log_, 5 * SECOND);
    ck_assert_uint_eq(name_all(), 2);
    put(HT_EVENT_READ_ERROR, 3, 5 * SECOND);
    ck_assert_uint_eq(name_all(), 1);
}

TEST(a_flood_of_different_ones_is_counted_by_its_code_and_none_is_lost)
{
    struct ht_event_entry e;
    uint64_t counted = 0, after = 0;
    bool various = false;

    ht_event_log_free(log_);
    ck_assert_int_eq(ht_event_log_new(4096, &log_), 0);
    for (uint64_t i = 0; i < 10000; i++)
        put(HT_EVENT_CHECKSUM, i + 1, i);
    put(HT_EVENT_READ_ONLY, 0, 10000); /* is not drowned */
    ck_assert_uint_le(name_all(), HT_EVENT_KINDS_MAX + 2);
    ht_event_log_tick(log_, UINT64_MAX);
    name_all();
    while (ht_event_log_next(log_, after, &e)) {
        counted += e.count;
        various |= e.various;
        after = e.seq;
    }
    ck_assert(various);
    ck_assert_uint_eq(counted, 10001);
    ck_assert_int_eq(count_of(HT_EVENT_READ_ONLY), 1);
}

/* ----------------------------------------------------------------- threads */

enum { WRITERS = 4, PUTS = 5000 };
static _Atomic unsigned writing;
static _Atomic bool settled;

static void *settle(void *arg)
{
    ht_event_log_drain(log_);
    settled = true;
    return NULL;
}

TEST(settling_appends_what_is_counted_and_waits_for_names)
{
    pthread_t t;
    uint64_t later = ht_now_ns() + 60 * SECOND;

    put(HT_EVENT_READ_ERROR, 3, later);
    put(HT_EVENT_READ_ERROR, 3, later);
    ck_assert_uint_eq(name_all(), 1);
    ck_assert_int_eq(pthread_create(&t, NULL, settle, NULL), 0);
    ck_assert(ht_event_log_wait(log_)); /* the repetition, long before its time */
    ck_assert_uint_lt(ht_now_ns(), later);
    ck_assert(!settled);
    ck_assert_uint_eq(name_all(), 1);
    pthread_join(t, NULL);
    ck_assert(settled);
}

static void *write_many(void *arg)
{
    uint64_t id = (uintptr_t)arg;

    for (uint64_t i = 0; i < PUTS; i++)
        put(i % 7 ? HT_EVENT_NO_SPACE : HT_EVENT_REFUSED, i % 3 ? id : i, ht_now_ns());
    writing--;
    return NULL;
}

static void *name_until_stopped(void *arg)
{
    while (ht_event_log_wait(log_)) {
        ht_event_log_tick(log_, ht_now_ns());
        name_all();
    }
    return NULL;
}

static void *read_along(void *arg)
{
    struct ht_event_entry e;
    uint64_t after = 0;

    while (writing)
        while (ht_event_log_next(log_, after, &e)) {
            ck_assert_uint_gt(e.seq, after);
            ck_assert_str_eq(e.path, "some/path");
            after = e.seq;
        }
    return NULL;
}

TEST(many_threads_write_while_others_read)
{
    pthread_t writer[WRITERS], namer, reader;
    struct ht_event_entry e;

    writing = WRITERS;
    for (uintptr_t i = 0; i < WRITERS; i++)
        ck_assert_int_eq(pthread_create(&writer[i], NULL, write_many, (void *)(i + 1)), 0);
    ck_assert_int_eq(pthread_create(&namer, NULL, name_until_stopped, NULL), 0);
    ck_assert_int_eq(pthread_create(&reader, NULL, read_along, NULL), 0);
    for (unsigned i = 0; i < WRITERS; i++)
        pthread_join(writer[i], NULL);
    pthread_join(reader, NULL);
    ht_event_log_stop(log_);
    pthread_join(namer, NULL);
    ck_assert_uint_eq(count_of(HT_EVENT_NO_SPACE) + count_of(HT_EVENT_REFUSED), (uint64_t)WRITERS * PUTS);
    ck_assert(ht_event_log_next(log_, 0, &e));
    ck_assert(!ht_event_log_unnamed(log_, &e)); /* the event that was counted last was named, too */
}

TEST(whoever_waits_learns_of_entries_and_of_the_end_of_a_repetition)
{
    uint64_t now = ht_now_ns();

    put(HT_EVENT_READ_ERROR, 3, now - SECOND + 50000000);
    ck_assert(ht_event_log_wait(log_));
    name_all();
    put(HT_EVENT_READ_ERROR, 3, now);
    ck_assert(ht_event_log_wait(log_)); /* 50 ms later */
    ht_event_log_tick(log_, ht_now_ns());
    ck_assert_uint_eq(name_all(), 1);
    ht_event_log_stop(log_);
    ck_assert(!ht_event_log_wait(log_));
}

/* -------------------------------------------------------------------- text */

TEST(a_line_holds_what_is_known_and_no_name_can_forge_another)
{
    struct ht_event_entry e = {
        .seq = 5,
        .count = 1,
        .path = "dir/a\n{\"seq\": 6}\tb\\\xff",
        .event = {.code = HT_EVENT_CHECKSUM,
                  .time_ns = 99,
                  .id = 7,
                  .offset = 4096,
                  .device = "/dev/x",
                  .error = -EIO,
                  .text = "bad\x1b"},
    };
    char *line = NULL;
    size_t len = 0;
    FILE *to = open_memstream(&line, &len);

    ck_assert_ptr_nonnull(to);
    ht_event_put(&e, to);
    ck_assert_int_eq(fclose(to), 0);
    ck_assert_str_eq(
        line,
        "{\"seq\": 5, \"time_ns\": 99, \"level\": \"error\", \"code\": \"checksum\", \"count\": 1, "
        "\"path\": \"dir/a\\u000a{\\\"seq\\\": 6}\\u0009b\\\\\\udcff\", \"id\": 7, \"device\": \"/dev/x\", "
        "\"offset\": 4096, \"error\": \"EIO\", \"text\": \"bad\\u001b\"}\n");
    free(line);
}

TEST(a_line_of_a_flood_says_so_and_leaves_out_what_is_not_known)
{
    struct ht_event_entry e = {.seq = 6, .count = 40, .various = true, .event = {.code = HT_EVENT_REFUSED}};
    char *line = NULL;
    size_t len = 0;
    FILE *to = open_memstream(&line, &len);

    ck_assert_ptr_nonnull(to);
    ht_event_put(&e, to);
    ck_assert_int_eq(fclose(to), 0);
    ck_assert_str_eq(line,
                     "{\"seq\": 6, \"time_ns\": 0, \"level\": \"warn\", \"code\": \"refused\", \"count\": 40, "
                     "\"various\": true, \"text\": \"\"}\n");
    free(line);
}

TEST(codes_have_words_of_their_own)
{
    for (unsigned i = 0; i < HT_EVENT_CODES; i++) {
        ck_assert_ptr_nonnull(ht_event_kinds[i].word);
        ck_assert_ptr_nonnull(ht_event_kinds[i].meaning);
        for (unsigned k = 0; k < i; k++)
            ck_assert_str_ne(ht_event_kinds[i].word, ht_event_kinds[k].word);
    }
}

RUN_TESTS("event_log", .setup = setup, .teardown = teardown)
