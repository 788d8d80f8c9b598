/* SPDX-License-Identifier: Apache-2.0 */
/* Events reach the sink with all they carry; without a sink they are messages. */
#include "tests/support/suite.h"
#include "tiering/base/event.h"

static struct ht_event got;
static unsigned got_count;

static void take(void *ctx, const struct ht_event *e)
{
    ck_assert_ptr_eq(ctx, &got_count);
    got = *e;
    got_count++;
}

TEST(the_sink_gets_code_object_place_error_and_text)
{
    const struct ht_event_about about = {12, "/dev/sda", 4096, -EIO};
    uint64_t before = ht_wall_ns();

    ht_event_set_sink(take, &got_count);
    errno = EACCES;
    ht_event(HT_EVENT_CHECKSUM, &about, "chunk %d: %m", 3);
    ck_assert_int_eq(errno, EACCES);
    ht_event_set_sink(NULL, NULL);
    ck_assert_uint_eq(got_count, 1);
    ck_assert_int_eq(got.code, HT_EVENT_CHECKSUM);
    ck_assert_uint_eq(got.id, 12);
    ck_assert_uint_eq(got.offset, 4096);
    ck_assert_int_eq(got.error, -EIO);
    ck_assert_str_eq(got.device, "/dev/sda");
    ck_assert_str_eq(got.text, "chunk 3: Permission denied");
    ck_assert_uint_ge(got.time_ns, before);
}

TEST(without_a_sink_it_is_a_message_of_its_level)
{
    int saved = dup(STDERR_FILENO), ends[2];
    char text[256];

    ck_assert_int_eq(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    ht_event(HT_EVENT_REFUSED, NULL, "no such %s", "word");
    dup2(saved, STDERR_FILENO);
    ssize_t n = read(ends[0], text, sizeof(text) - 1);
    ck_assert_int_gt(n, 0);
    text[n] = '\0';
    ck_assert_str_eq(text, "test_event: warning: no such word\n");
}

TEST(long_names_and_texts_are_cut)
{
    char name[1000];
    struct ht_event_about about = {.device = name};

    memset(name, 'n', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    ht_event_set_sink(take, &got_count);
    ht_event(HT_EVENT_CHECKSUM, &about, "%s", name);
    ht_event_set_sink(NULL, NULL);
    ck_assert_uint_eq(strlen(got.device), HT_EVENT_DEVICE_BYTES - 1);
    ck_assert_uint_eq(strlen(got.text), HT_EVENT_TEXT_BYTES - 1);
}

RUN_TESTS("event")
