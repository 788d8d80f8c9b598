/* SPDX-License-Identifier: Apache-2.0 */
/* test_gate_policy.c - which request of a lower class may go now: tables, and a simulated device. */
#include "tests/support/suite.h"
#include "tiering/io/gate.h"

#define MS UINT64_C(1000000)
#define SECOND UINT64_C(1000000000)
#define MIB (1u << 20)
#define NOW (100 * SECOND)
#define RATE (UINT64_C(256) << 20) /* bytes a second: 1 MiB takes 3.9 ms, and the bound is 2 MiB */

/* The last urgent request ended so long ago. */
static struct ht_gate_urgent ended(uint64_t ago_ns, uint64_t pause_ns)
{
    return (struct ht_gate_urgent){.any = true, .end_ns = NOW - ago_ns, .pause_ns = pause_ns};
}

static struct ht_gate_urgent in_flight(uint64_t pause_ns)
{
    return (struct ht_gate_urgent){.any = true, .now = 1, .end_ns = NOW - MS, .pause_ns = pause_ns};
}

static struct ht_gate_state beside(struct ht_gate_urgent u, uint64_t permitted_bytes, unsigned background)
{
    return (struct ht_gate_state){.requests = u,
                                  .waits = u,
                                  .permitted_bytes = permitted_bytes,
                                  .background = background,
                                  .rate_known = true,
                                  .bytes_per_s = RATE};
}

static uint64_t next(const struct ht_gate_state *st, enum ht_io_class io_class)
{
    return ht_gate_next_ns(st, io_class, MIB, NOW, NOW);
}

TEST(urgent_requests_always_go)
{
    struct ht_gate_state st = beside(in_flight(0), UINT64_C(1) << 40, 100);

    ck_assert_uint_eq(next(&st, HT_IO_URGENT), 0);
    st.bytes_per_s = 0;
    ck_assert_uint_eq(next(&st, HT_IO_URGENT), 0);
}

static const struct {
    const char *what;
    bool urgent;
    uint64_t ago_ns; /* the last urgent one ended */
    uint64_t permitted_bytes, bytes_per_s;
    bool known, goes;
} planned[] = {
    {"one request always goes", true, 0, 0, RATE, true, true},
    {"and one to a device that completes nothing", true, 0, 0, 0, true, true},
    {"but no second one there", true, 0, MIB, 0, true, false},
    {"as many as the device moves in the bound", true, 0, MIB, RATE, true, true},
    {"and no more", true, 0, MIB + (64u << 10), RATE, true, false},
    {"more on a faster device", true, 0, 7 * MIB, 4 * RATE, true, true},
    {"the bound also holds shortly after an urgent one", false, 99 * MS, 2 * MIB, RATE, true, false},
    {"any number without urgent ones", false, 100 * MS, 1000u * MIB, RATE, true, true},
    {"some while the rate is not known", true, 0, 3 * MIB, 0, false, true},
    {"and no more than these", true, 0, 4 * MIB, 0, false, false},
};

TEST_LOOP(planned_requests_keep_the_bound, HT_ARRAY_SIZE(planned))
{
    struct ht_gate_urgent u = planned[_i].urgent ? in_flight(SECOND) : ended(planned[_i].ago_ns, SECOND);
    struct ht_gate_state st = beside(u, planned[_i].permitted_bytes, 0);

    st.bytes_per_s = planned[_i].bytes_per_s;
    st.rate_known = planned[_i].known;
    uint64_t at_ns = next(&st, HT_IO_PLANNED);
    ck_assert_msg((at_ns == 0) == planned[_i].goes, "%s", planned[_i].what);
    ck_assert_msg(planned[_i].goes || at_ns > NOW, "%s", planned[_i].what);
}

static const struct {
    const char *what;
    bool urgent;
    uint64_t ago_ns, pause_ns;
    unsigned background;
    uint64_t permitted_bytes;
    bool goes;
} background[] = {
    {"none beside an urgent one", true, 0, SECOND, 0, 0, false},
    {"none for 10 ms after one, if pauses are short", false, 9 * MS, MS, 0, 0, false},
    {"one after 10 ms", false, 10 * MS, MS, 0, 0, true},
    {"one after a twentieth of a long pause", false, 5 * MS, 100 * MS, 0, 0, true},
    {"and not before", false, 5 * MS - 1, 100 * MS, 0, 0, false},
    {"10 ms are enough after any pause", false, 10 * MS, SECOND, 0, 0, true},
    {"one at a time", false, 20 * MS, 100 * MS, 1, MIB, false},
    {"two alone", false, 100 * MS, 100 * MS, 1, MIB, true},
    {"no third one", false, 100 * MS, 100 * MS, 2, 2 * MIB, false},
    {"with the planned ones it keeps the bound", false, 20 * MS, 100 * MS, 0, 2 * MIB, false},
};

TEST_LOOP(background_requests_take_the_pauses, HT_ARRAY_SIZE(background))
{
    struct ht_gate_urgent u = background[_i].urgent ? in_flight(background[_i].pause_ns)
                                                    : ended(background[_i].ago_ns, background[_i].pause_ns);
    struct ht_gate_state st = beside(u, background[_i].permitted_bytes, background[_i].background);
    uint64_t at_ns = next(&st, HT_IO_BACKGROUND);

    ck_assert_msg((at_ns == 0) == background[_i].goes, "%s", background[_i].what);
    ck_assert_msg(background[_i].goes || at_ns > NOW, "%s", background[_i].what);
}

TEST(a_caller_that_waits_keeps_the_background_out)
{
    struct ht_gate_state st = beside(ended(SECOND, SECOND), 0, 0);

    ck_assert_uint_eq(next(&st, HT_IO_BACKGROUND), 0);
    st.waits = in_flight(SECOND);
    ck_assert_uint_gt(next(&st, HT_IO_BACKGROUND), NOW);
    ck_assert_uint_eq(next(&st, HT_IO_PLANNED), 0);
}

TEST(a_share_is_kept_beside_urgent_requests)
{
    struct ht_gate_state st = beside(in_flight(0), 0, 0);
    uint64_t until = NOW - SECOND + HT_GATE_SHARE * MIB * SECOND / RATE;

    st.share_ns = NOW - SECOND; /* the last permit, of 1 MiB */
    st.share_bytes = MIB;
    ck_assert_uint_gt(next(&st, HT_IO_BACKGROUND), NOW); /* of a thread without a share */
    st.has_share = true;
    ck_assert_uint_eq(next(&st, HT_IO_BACKGROUND), 0);
    st.background = 1; /* one at a time */
    ck_assert_uint_gt(next(&st, HT_IO_BACKGROUND), NOW);
    st.background = 0;
    st.share_ns += NOW + 1 - until; /* it may go in a nanosecond */
    ck_assert_uint_eq(next(&st, HT_IO_BACKGROUND), NOW + 1);
    st.bytes_per_s = 0; /* a device that completes nothing has no shares */
    ck_assert_uint_gt(next(&st, HT_IO_BACKGROUND), NOW + 1);
    st.bytes_per_s = RATE;
    st.rate_known = false;
    ck_assert_uint_gt(next(&st, HT_IO_BACKGROUND), NOW + 1);
    st = beside(ended(SECOND, SECOND), 0, 0); /* pauses are not counted against it */
    st.has_share = true;
    st.share_ns = NOW;
    st.share_bytes = 1000u * MIB;
    ck_assert_uint_eq(next(&st, HT_IO_BACKGROUND), 0);
}

TEST(no_class_waits_for_ever)
{
    struct ht_gate_state st = beside(in_flight(0), UINT64_C(1) << 40, 100);
    const struct {
        enum ht_io_class io_class;
        uint64_t most_ns;
    } of[] = {{HT_IO_PLANNED, HT_GATE_PLANNED_WAIT_NS_MAX}, {HT_IO_BACKGROUND, HT_GATE_BACKGROUND_WAIT_NS_MAX}};

    st.bytes_per_s = 0;
    for (unsigned i = 0; i < 2; i++) {
        uint64_t now = NOW, looks = 0;
        for (uint64_t at; (at = ht_gate_next_ns(&st, of[i].io_class, MIB, NOW, now)); now = at) {
            ck_assert_uint_gt(at, now);
            ck_assert_uint_lt(looks++, 5000);
        }
        ck_assert_uint_eq(now, NOW + of[i].most_ns);
    }
}

TEST(a_clock_that_jumps_costs_a_permission_at_most)
{
    struct ht_gate_state st = beside(in_flight(0), UINT64_C(1) << 40, 100);

    /* Back: the wait ends. */
    ck_assert_uint_eq(ht_gate_next_ns(&st, HT_IO_PLANNED, MIB, NOW, NOW - SECOND), 0);
    ck_assert_uint_eq(ht_gate_next_ns(&st, HT_IO_BACKGROUND, MIB, NOW, 1), 0);
    /* Back before a wait begins: the last urgent request is in the future, and says nothing. */
    st = beside(ended(0, SECOND), 0, 0);
    ck_assert_uint_eq(ht_gate_next_ns(&st, HT_IO_BACKGROUND, MIB, 1, 1), 0);
    /* Forward: the wait is over. */
    ck_assert_uint_eq(ht_gate_next_ns(&st, HT_IO_BACKGROUND, MIB, NOW, UINT64_MAX), 0);
    struct ht_gate_urgent u = {0};
    ht_gate_urgent_begin(&u, NOW);
    ht_gate_urgent_end(&u, NOW - SECOND);
    ht_gate_urgent_begin(&u, 1);
    ht_gate_urgent_end(&u, 2);
    ht_gate_urgent_begin(&u, UINT64_MAX);
    ck_assert_uint_le(u.pause_ns, HT_GATE_PAUSE_NS_MAX);
    ck_assert_uint_eq(u.now, 1);
}

/* ------------------------------------------------------------------ a device */

/* It serves one request after the other. A thread of the background has always one more to ask for. */
struct simulated {
    uint64_t now, free_ns; /* the device has nothing to do from then on */
    struct ht_gate_state st;
    uint64_t background_end_ns; /* of the one in flight, or 0 */
    uint64_t since_ns;          /* since when the next one waits */
    uint64_t background_bytes, urgent_busy_ns, late, urgent;
};

static uint64_t served_ns(uint64_t bytes)
{
    return bytes * SECOND / RATE;
}

/* Up to then the background has its way. */
static void advance(struct simulated *d, uint64_t to)
{
    while (d->now < to) {
        uint64_t at = to;
        if (d->background_end_ns) {
            at = ht_min_u64(at, d->background_end_ns);
        } else {
            uint64_t next_ns = ht_gate_next_ns(&d->st, HT_IO_BACKGROUND, MIB, d->since_ns, d->now);
            if (next_ns == 0) {
                d->free_ns = ht_max_u64(d->free_ns, d->now) + served_ns(MIB);
                d->background_end_ns = d->free_ns;
                d->st.background = 1;
                d->st.permitted_bytes = d->st.share_bytes = MIB;
                d->st.share_ns = d->now;
                continue;
            }
            at = ht_min_u64(at, next_ns);
        }
        d->now = at;
        if (d->background_end_ns && d->now >= d->background_end_ns) {
            d->background_bytes += MIB;
            d->background_end_ns = d->st.background = d->st.permitted_bytes = 0;
            d->since_ns = d->now;
        }
    }
}

/* An urgent request of so many bytes, from its begin to its end. */
static void urgent(struct simulated *d, uint64_t bytes)
{
    uint64_t began = d->now, alone = served_ns(bytes);

    d->free_ns = ht_max_u64(d->free_ns, d->now) + alone;
    ht_gate_urgent_begin(&d->st.waits, d->now);
    ht_gate_urgent_begin(&d->st.requests, d->now);
    advance(d, d->free_ns);
    ht_gate_urgent_end(&d->st.waits, d->now);
    ht_gate_urgent_end(&d->st.requests, d->now);
    d->urgent_busy_ns += alone;
    d->late += d->now - began > 2 * alone;
    d->urgent++;
}

static const struct {
    uint64_t pause_ns;
    double least, most; /* of what the urgent requests leave */
    bool has_share;
} loads[] = {{SECOND, 0.98, 1, false},   {100 * MS, 0.92, 1.05, false}, {50 * MS, 0.9, 1.08, false},
             {20 * MS, 0.9, 1.2, false}, {MS / 10, 0, 1, false},        {SECOND, 0.98, 1, true},
             {MS / 10, 0, 2, true}};

/* Urgent requests of 1 MiB come after pauses that vary around a mean. */
TEST_LOOP(pauses_are_used_and_an_urgent_request_waits_for_one_at_most, HT_ARRAY_SIZE(loads))
{
    struct simulated d = {.now = NOW, .free_ns = NOW, .since_ns = NOW};
    uint64_t random = 1;

    d.st.rate_known = true;
    d.st.bytes_per_s = RATE;
    d.st.has_share = loads[_i].has_share;
    while (d.now < NOW + 60 * SECOND) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        advance(&d, d.now + loads[_i].pause_ns / 2 + (random >> 33) % loads[_i].pause_ns);
        urgent(&d, MIB);
    }
    double left = (double)(d.now - NOW - d.urgent_busy_ns), used = (double)served_ns(d.background_bytes);
    ck_assert_msg(used >= loads[_i].least * left, "used %.3f of what is left", used / left);
    ck_assert_uint_eq(d.late, 0);
    /* Without pauses it gets its trickle, so fewer than one urgent request in a hundred waits for it. Or its share. */
    ck_assert_uint_ge(d.background_bytes, 60 * SECOND / HT_GATE_BACKGROUND_WAIT_NS_MAX * MIB * 9 / 10);
    if (loads[_i].pause_ns < MS && !loads[_i].has_share)
        ck_assert_uint_lt(d.background_bytes / MIB * 100, d.urgent);
    if (loads[_i].pause_ns < MS && loads[_i].has_share)
        ck_assert_double_eq_tol((double)d.background_bytes, 60.0 * RATE / HT_GATE_SHARE,
                                0.05 * 60 * RATE / HT_GATE_SHARE);
}

RUN_TESTS("gate policy")
