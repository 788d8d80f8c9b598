/* SPDX-License-Identifier: Apache-2.0 */
/* How names that any user could have chosen reach a terminal. */

#include "mount-helpers/common/text.h"
#include "tests/support/suite.h"

static void expect(const char *text, const char *shown)
{
    char *got;
    size_t len;
    FILE *f = open_memstream(&got, &len);

    ht_put_printable(text, f);
    fclose(f);
    ck_assert_str_eq(got, shown);
    free(got);
}

TEST(what_can_be_read_is_shown)
{
    expect("", "");
    expect("/a b/c~", "/a b/c~");
    expect("gr\303\274\303\237e", "gr\303\274\303\237e");
    expect("\302\240\340\244\205\360\237\220\230", "\302\240\340\244\205\360\237\220\230");
}

TEST(what_a_terminal_would_obey_is_not)
{
    expect("a\033[2Jb\n\177", "a?[2Jb??");
    expect("\233"
           "31m",
           "?31m"); /* CSI as one byte */
    expect("\302\233"
           "31m",
           "??31m"); /* and as UTF-8 */
    expect("\302\200\302\237", "????");
}

TEST(what_is_no_utf8_is_not)
{
    expect("\377\200\301\201", "????");
    expect("\303", "?");
    expect("\343\201", "??");
    expect("\342\202x", "??x");
    expect("\340\200\257", "???"); /* a slash in a longer form */
    expect("\355\240\200", "???"); /* half a pair of UTF-16 */
}

RUN_TESTS("text")
