/* SPDX-License-Identifier: Apache-2.0 */
/* Messages are one whole line each, whatever is in them. */
#include "tests/support/suite.h"

static int saved_stderr, ends[2];

static void capture(void)
{
    ck_assert_int_eq(pipe(ends), 0);
    saved_stderr = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
}

/* Returns the text written to stderr since, and restores the old stderr. */
static const char *captured(void)
{
    static char text[8192];
    size_t len = 0;
    ssize_t n;

    dup2(saved_stderr, STDERR_FILENO);
    close(saved_stderr);
    while ((n = read(ends[0], text + len, sizeof(text) - 1 - len)) > 0)
        len += (size_t)n;
    close(ends[0]);
    text[len] = '\0';
    return text;
}

TEST(a_message_names_the_program_and_the_level)
{
    capture();
    ht_error("bad %s %d", "thing", 7);
    ht_info("note");
    const char *text = captured();
    ck_assert_str_eq(text, "test_log: error: bad thing 7\ntest_log: note\n");
}

TEST(less_important_messages_are_hidden)
{
    capture();
    ht_log_set_level(HT_LOG_WARN);
    ht_info("hidden");
    ht_log_set_level(HT_LOG_ERROR);
    ht_warn("hidden too");
    ht_error("shown");
    ht_log_set_level(HT_LOG_INFO);
    ht_info("shown too");
    const char *text = captured();
    ck_assert_str_eq(text, "test_log: error: shown\ntest_log: shown too\n");
}

TEST(control_characters_do_not_reach_the_terminal)
{
    capture();
    ht_info("%s", "name\nforged: line\x1b[2J\x7f");
    ht_info("%s",
            "\302\233"
            "2J\302\237\302\240\303\274\302");
    const char *text = captured();
    ck_assert_str_eq(text, "test_log: name?forged: line?[2J?\ntest_log: ??2J??\302\240\303\274\302\n");
}

TEST(a_long_message_is_cut_and_still_one_line)
{
    char name[5000];

    memset(name, 'n', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    capture();
    ht_warn("%s", name);
    const char *text = captured();
    ck_assert_uint_lt(strlen(text), 2100);
    ck_assert_uint_gt(strlen(text), 1000);
    ck_assert_ptr_eq(strchr(text, '\n'), text + strlen(text) - 1);
}

TEST(errno_survives_a_message)
{
    capture();
    errno = ENOSPC;
    ht_error("%m");
    ck_assert_int_eq(errno, ENOSPC);
    const char *text = captured();
    ck_assert_str_eq(text, "test_log: error: No space left on device\n");
}

RUN_TESTS("log")
