/* SPDX-License-Identifier: Apache-2.0 */
/* A reader that opens .hitrain/events finds the events that were raised before. */

#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/events.h"
#include "tests/support/harness.h"
#include "tests/support/suite.h"

enum { DEVICE_BYTES = 64 << 20, WORDS_BYTES = 1 << 16 };
#define HOUR_NS (3600 * UINT64_C(1000000000))

static struct harness k;
static char words[WORDS_BYTES];
static atomic_bool opens;

static void setup(void)
{
    harness_format(&k, 1, DEVICE_BYTES, 512);
    ck_assert_int_eq(harness_open(&k, 1), 0);
}

static void teardown(void)
{
    ck_assert_int_eq(harness_close(&k, true), 0);
    harness_free(&k);
}

/* From the oldest event to the newest that is shown. */
static void *read_all(void *arg)
{
    size_t at = 0;
    struct ht_feed *f;
    ssize_t n;

    opens = true;
    ck_assert_int_eq(ht_event_feed_open(k.ctl, HT_NS_ROOT_INO, NULL, &f), 0);
    while (at + 1 < sizeof(words) && (n = ht_feed_read(f, 0, words + at, sizeof(words) - 1 - at)) > 0)
        at += (size_t)n;
    words[at] = 0;
    ht_feed_close(f);
    return arg;
}

static void raise_event(const char *text)
{
    const struct ht_event_about about = {.id = 1};

    ht_event(HT_EVENT_REFUSED, &about, "%s", text);
}

/* The events thread is late: it cannot look for the name yet. */
TEST(what_happened_before_is_there)
{
    pthread_t reader;

    k.ctl->event_patience_ns = HOUR_NS;
    ht_mutex_lock(ht_ctl_name_lock(k.ctl));
    raise_event("the newest");
    ck_assert_int_eq(pthread_create(&reader, NULL, read_all, NULL), 0);
    while (!opens)
        usleep(1000);
    usleep(20000); /* a reader that does not wait has ended by then, nearly always */
    ht_mutex_unlock(ht_ctl_name_lock(k.ctl));
    pthread_join(reader, NULL);
    ck_assert_msg(strstr(words, "the newest"), "%s", words);
}

/* A mount that hangs still shows the events with names. */
TEST(a_reader_does_not_wait_for_ever)
{
    pthread_t reader;

    k.ctl->event_patience_ns = HOUR_NS;
    raise_event("an older one");
    (void)read_all(NULL);
    k.ctl->event_patience_ns = 20000000;
    ht_mutex_lock(ht_ctl_name_lock(k.ctl));
    raise_event("the newest");
    ck_assert_int_eq(pthread_create(&reader, NULL, read_all, NULL), 0);
    pthread_join(reader, NULL);
    ht_mutex_unlock(ht_ctl_name_lock(k.ctl));
    ck_assert(strstr(words, "an older one") && !strstr(words, "the newest"));
}

RUN_TESTS("events", .setup = setup, .teardown = teardown)
