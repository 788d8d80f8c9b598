/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of one kind: a burst, then one each period, and every line that is left out is counted. */
#include "fs/ctl/events.h"
#include "tests/support/suite.h"

static unsigned take_many(struct ht_line_quota *q, uint64_t now_ns, unsigned n, uint64_t *out_hidden)
{
    unsigned written = 0;
    uint64_t hidden = 0;

    *out_hidden = 0;
    for (unsigned i = 0; i < n; i++) {
        if (!ht_line_quota_take(q, now_ns, &hidden))
            continue;
        written++;
        *out_hidden += hidden;
    }
    return written;
}

TEST(a_burst_then_one_each_period)
{
    struct ht_line_quota q = {0};
    uint64_t now = 5 * HT_LINE_PERIOD_NS, hidden;

    ck_assert_uint_eq(take_many(&q, now, 1000, &hidden), HT_LINES_AT_ONCE);
    ck_assert_uint_eq(hidden, 0);
    for (unsigned i = 1; i < 50; i++) {
        ck_assert_uint_eq(take_many(&q, now + i * HT_LINE_PERIOD_NS, 10, &hidden), 1);
        ck_assert_uint_eq(hidden, i == 1 ? 1000 - HT_LINES_AT_ONCE : 9);
    }
    ck_assert_uint_eq(q.hidden, 9);
}

TEST(silence_pays_for_the_next_burst)
{
    struct ht_line_quota q = {0};
    uint64_t hidden;

    ck_assert_uint_eq(take_many(&q, 1, 30, &hidden), HT_LINES_AT_ONCE);
    ck_assert_uint_eq(take_many(&q, 1 + 100 * HT_LINE_PERIOD_NS, 30, &hidden), HT_LINES_AT_ONCE);
    ck_assert_uint_eq(hidden, 30 - HT_LINES_AT_ONCE);
}

RUN_TESTS("line_quota")
