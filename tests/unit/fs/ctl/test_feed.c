/* SPDX-License-Identifier: Apache-2.0 */
/* A feed of lines: where it begins, how much a read gets, and what an error leaves. */

#include "fs/ctl/hidden_priv.h"
#include "tests/support/suite.h"

enum { ENTRIES = 5 };
static struct ht_feed *feed;
static uint64_t fails_at; /* the entry whose line cannot be made, once */
static char text[64];

/* "N\n" for each number. */
static int next(void *ctx, uint64_t *after, FILE *to)
{
    (void)ctx;
    if (*after >= ENTRIES)
        return 0;
    fprintf(to, "%d\n", (int)++*after);
    if (*after != fails_at)
        return 1;
    fails_at = 0;
    return -EIO;
}

static void begin(void)
{
    fails_at = 0;
    ck_assert_int_eq(ht_feed_open(next, NULL, NULL, &feed), 0);
}

static void end(void)
{
    ht_feed_close(feed);
}

static const char *read_at(uint64_t off, size_t len)
{
    ssize_t n = ht_feed_read(feed, off, text, len);

    ck_assert_int_ge(n, 0);
    text[n] = '\0';
    return text;
}

TEST(the_first_read_says_where_it_begins)
{
    ck_assert_str_eq(read_at(3, 10), "4\n");
    ck_assert_str_eq(read_at(0, 10), "5\n");
    ck_assert_str_eq(read_at(0, 10), "");
}

TEST(a_line_is_read_in_pieces)
{
    ck_assert_str_eq(read_at(0, 1), "1");
    ck_assert_str_eq(read_at(1, 10), "\n");
    ck_assert_str_eq(read_at(2, 10), "2\n");
}

/* The reader sees the error, and no line is lost. */
TEST(an_error_is_no_end)
{
    fails_at = 2;
    ck_assert_str_eq(read_at(0, 10), "1\n");
    ck_assert_int_eq(ht_feed_read(feed, 2, text, 10), -EIO);
    ck_assert_str_eq(read_at(2, 10), "2\n");
}

RUN_TESTS("feed", .setup = begin, .teardown = end)
