/* SPDX-License-Identifier: Apache-2.0 */
/* test_gate.c - threads at the gate of a device: who waits, what lets them go, and the counts. */
#include "io_test.h"
#include "tiering/io/gate.h"

#define DEV_BYTES (8 * HT_MIB)
#define PIECE (64u << 10)

static struct ht_dev *dev;
static struct ht_gate gate;

static void set_up(void)
{
    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 4096, &dev), 0);
    gate = (struct ht_gate){.dev[0] = dev};
}

static void nap(void)
{
    const struct timespec ts = {.tv_nsec = 1000000};

    nanosleep(&ts, NULL);
}

static struct ht_gate_stats figures(void)
{
    struct ht_gate_stats st;

    ht_gate_stats(dev, &st);
    return st;
}

/* Writes, whose rate stays unknown: reads that a device does not answer for a second have a rate of nothing. */
static struct ht_permit_request request(enum ht_gate_good good)
{
    return (struct ht_permit_request){.dev = dev, .direction = HT_DIRECTION_WRITE, .good = good, .bytes = HT_MIB};
}

/* As many permits as are given at once, at most 16; all go back. */
static unsigned permits(enum ht_io_class io_class, enum ht_gate_good good)
{
    const struct ht_permit_request r = request(good);
    struct ht_permit p[16];
    unsigned n = 0;

    (void)ht_io_class_set(io_class);
    while (n < HT_ARRAY_SIZE(p) && ht_permit_try(&gate, &r, &p[n]))
        n++;
    for (unsigned i = 0; i < n; i++)
        ht_permit_put(&p[i]);
    (void)ht_io_class_set(HT_IO_URGENT);
    return n;
}

/* ------------------------------------------------------------------ a reader */

struct reader {
    pthread_t thread;
    enum ht_io_class io_class;
};

static void *read_main(void *arg)
{
    const struct reader *r = arg;
    uint8_t *buf = aligned(PIECE);

    (void)ht_io_class_set(r->io_class);
    int rc = ht_dev_read(dev, 0, buf, PIECE);
    return (void *)(intptr_t)rc;
}

static struct reader reader;
static bool stalled;

/* Its request is in flight, and the device does not answer. */
static void begin_stalled(enum ht_io_class io_class)
{
    uint64_t before = figures().in_flight_bytes[io_class];

    reader.io_class = io_class;
    dev_stall(dev, true);
    ck_assert_int_eq(pthread_create(&reader.thread, NULL, read_main, &reader), 0);
    stalled = true;
    while (figures().in_flight_bytes[io_class] == before)
        nap();
}

static void end_stalled(void)
{
    void *rc;

    if (!stalled)
        return;
    stalled = false;
    dev_stall(dev, false);
    pthread_join(reader.thread, &rc);
    ck_assert_ptr_null(rc);
}

static void tear_down(void)
{
    end_stalled();
    ht_dev_close(dev);
}

TEST(requests_in_flight_are_counted_for_the_class_of_their_thread)
{
    for (enum ht_io_class c = HT_IO_URGENT; c < HT_IO_CLASSES; c++) {
        struct ht_gate_stats before = figures();
        begin_stalled(c);
        for (enum ht_io_class k = HT_IO_URGENT; k < HT_IO_CLASSES; k++)
            ck_assert_uint_eq(figures().in_flight_bytes[k], k == c ? PIECE : 0);
        ck_assert_uint_eq(figures().moved_bytes[c], before.moved_bytes[c]);
        end_stalled();
        for (enum ht_io_class k = HT_IO_URGENT; k < HT_IO_CLASSES; k++)
            ck_assert_uint_eq(figures().moved_bytes[k], before.moved_bytes[k] + (k == c ? PIECE : 0));
        ck_assert_uint_eq(figures().in_flight_bytes[c], 0);
    }
}

TEST(urgent_threads_need_no_permit)
{
    begin_stalled(HT_IO_URGENT);
    ck_assert_uint_eq(permits(HT_IO_URGENT, HT_GATE_NOTHING), 16);
    ck_assert(!ht_dev_has_permits(dev));
}

TEST(an_urgent_request_bounds_the_others)
{
    ck_assert_uint_eq(permits(HT_IO_PLANNED, HT_GATE_NOTHING), 16);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_NOTHING), 2);
    begin_stalled(HT_IO_URGENT);
    ck_assert_uint_eq(permits(HT_IO_PLANNED, HT_GATE_NOTHING), HT_GATE_UNKNOWN_BYTES / HT_MIB);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_NOTHING), 0);
}

TEST(the_gate_is_open_for_what_a_caller_wants)
{
    begin_stalled(HT_IO_URGENT);
    ht_gate_want(&gate, HT_GATE_MEMORY);
    ht_gate_want(&gate, HT_GATE_MEMORY);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_MEMORY), 16);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_LOG_ROOM), 0);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_NOTHING), 0);
    ht_gate_want_end(&gate, HT_GATE_MEMORY);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_MEMORY), 16);
    ht_gate_want_end(&gate, HT_GATE_MEMORY);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_MEMORY), 0);
}

TEST(what_a_lower_class_wants_promotes_nobody)
{
    begin_stalled(HT_IO_URGENT);
    (void)ht_io_class_set(HT_IO_PLANNED);
    ht_gate_want(&gate, HT_GATE_MEMORY);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_MEMORY), 0);
    (void)ht_io_class_set(HT_IO_PLANNED);
    ht_gate_want_end(&gate, HT_GATE_MEMORY);
    (void)ht_io_class_set(HT_IO_URGENT);
}

/* The commit timer waits for room that the checkpoint makes. */
TEST(a_planned_thread_that_waits_for_log_room_opens_the_gate)
{
    begin_stalled(HT_IO_URGENT);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_LOG_ROOM), 0);
    (void)ht_io_class_set(HT_IO_PLANNED);
    ht_gate_want(&gate, HT_GATE_LOG_ROOM);
    ck_assert_uint_gt(permits(HT_IO_BACKGROUND, HT_GATE_LOG_ROOM), 0);
    (void)ht_io_class_set(HT_IO_PLANNED);
    ht_gate_want_end(&gate, HT_GATE_LOG_ROOM);
    (void)ht_io_class_set(HT_IO_URGENT);
}

TEST(a_caller_that_waits_for_a_permitted_request_keeps_the_background_out)
{
    const struct ht_permit_request r = request(HT_GATE_NOTHING);
    struct ht_permit p;

    (void)ht_io_class_set(HT_IO_PLANNED);
    ck_assert(ht_permit_try(&gate, &r, &p));
    ck_assert(ht_dev_has_permits(dev));
    ht_gate_wait_begin(dev);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_NOTHING), 0);
    ht_gate_wait_end(dev);
    ht_permit_put(&p);
    ck_assert(!ht_dev_has_permits(dev));
    ht_permit_put(&p);
    ck_assert_ptr_null(p.dev);
}

TEST(a_permit_moves_with_its_request)
{
    const struct ht_permit_request r = request(HT_GATE_NOTHING);
    struct ht_dev *other;
    struct ht_permit p;

    ck_assert_int_eq(dev_open_ram(DEV_BYTES, 4096, &other), 0);
    (void)ht_io_class_set(HT_IO_PLANNED);
    ck_assert(ht_permit_try(&gate, &r, &p));
    ht_permit_settle(&p, other, PIECE);
    ck_assert_uint_eq(p.bytes, PIECE);
    ck_assert(!ht_dev_has_permits(dev) && ht_dev_has_permits(other));
    ht_permit_settle(&p, NULL, PIECE);
    ck_assert(!ht_dev_has_permits(other));
    (void)ht_io_class_set(HT_IO_URGENT);
    ck_assert(ht_permit_try(&gate, &r, &p));
    ht_permit_settle(&p, other, PIECE);
    ck_assert(!ht_dev_has_permits(other));
    ht_dev_close(other);
}

/* ----------------------------------------------------------- a thread that waits */

struct waiter {
    pthread_t thread;
    enum ht_io_class io_class;
    enum ht_gate_good good;
    _Atomic bool passed;
};

static void *wait_main(void *arg)
{
    struct waiter *w = arg;
    const struct ht_permit_request r = request(w->good);
    struct ht_permit p;

    (void)ht_io_class_set(w->io_class);
    ht_permit_get(&gate, &r, &p);
    w->passed = true;
    ht_permit_put(&p);
    return NULL;
}

static void begin_wait(struct waiter *w, enum ht_io_class io_class, enum ht_gate_good good)
{
    *w = (struct waiter){.io_class = io_class, .good = good};
    ck_assert_int_eq(pthread_create(&w->thread, NULL, wait_main, w), 0);
}

TEST(a_device_that_completes_nothing_holds_nobody_for_ever)
{
    struct waiter w;

    begin_stalled(HT_IO_URGENT);
    uint64_t began_ns = ht_now_ns();
    begin_wait(&w, HT_IO_BACKGROUND, HT_GATE_NOTHING);
    pthread_join(w.thread, NULL);
    ck_assert(w.passed);
    ck_assert_uint_ge(ht_now_ns() - began_ns, HT_GATE_BACKGROUND_WAIT_NS_MAX);
    ck_assert_uint_eq(figures().waits[HT_IO_BACKGROUND], 1);
    ck_assert_uint_ge(figures().wait_ns[HT_IO_BACKGROUND], HT_GATE_BACKGROUND_WAIT_NS_MAX);
}

static _Atomic bool recalled;

static void *heed_main(void *arg)
{
    ht_gate_heed(&recalled);
    return wait_main(arg);
}

/* Did it wait for less than the gate is ever shut? recall_first: the recall comes before the thread. */
static bool is_recall_heeded(bool recall_first)
{
    uint64_t before_ns = figures().wait_ns[HT_IO_BACKGROUND];
    struct waiter w = {.io_class = HT_IO_BACKGROUND};

    recalled = recall_first;
    ck_assert_int_eq(pthread_create(&w.thread, NULL, heed_main, &w), 0);
    recalled = true;
    ht_gate_recall(&gate);
    pthread_join(w.thread, NULL);
    ck_assert(w.passed);
    return figures().wait_ns[HT_IO_BACKGROUND] - before_ns < HT_GATE_BACKGROUND_WAIT_NS_MAX;
}

/* It has better things to do, and is free only behind its request. On a busy machine one of many may run late. */
TEST_LOOP(a_thread_that_is_recalled_waits_no_longer, 2)
{
    unsigned tries = 0;

    begin_stalled(HT_IO_URGENT);
    while (!is_recall_heeded(_i))
        ck_assert_uint_lt(++tries, 10);
    ck_assert_uint_eq(permits(HT_IO_BACKGROUND, HT_GATE_NOTHING), 0);
}

static _Atomic bool stop;

/* Urgent requests without a pause. */
static void *busy_main(void *arg)
{
    uint8_t *buf = aligned(PIECE);

    while (!stop)
        ck_assert_int_eq(ht_dev_read(dev, 0, buf, PIECE), 0);
    return NULL;
}

static void *lower_main(void *arg)
{
    const struct reader *r = arg;
    uint8_t *buf = aligned(PIECE);
    struct ht_permit_request q = {.dev = dev, .direction = HT_DIRECTION_READ, .good = HT_GATE_MEMORY, .bytes = PIECE};
    struct ht_permit p;

    (void)ht_io_class_set(r->io_class);
    for (unsigned i = 0; i < 200; i++) {
        ht_permit_get(&gate, &q, &p);
        ck_assert_int_eq(ht_dev_read(dev, 0, buf, PIECE), 0);
        ht_permit_put(&p);
    }
    return NULL;
}

/* Only while nobody wants memory they have to wait; then all 800 requests would take minutes. */
TEST(threads_at_the_gate_hear_that_their_work_is_wanted)
{
    struct reader lower[4];
    pthread_t busy;

    stop = false;
    ck_assert_int_eq(pthread_create(&busy, NULL, busy_main, NULL), 0);
    for (unsigned i = 0; i < 4; i++) {
        lower[i].io_class = i % 2 ? HT_IO_PLANNED : HT_IO_BACKGROUND;
        ck_assert_int_eq(pthread_create(&lower[i].thread, NULL, lower_main, &lower[i]), 0);
    }
    /* On one processor the lower threads may be done before the urgent one begins. */
    for (unsigned i = 0; i < 1000 && figures().waits[HT_IO_BACKGROUND] == 0; i++)
        nap();
    for (unsigned i = 0; i < 100; i++) {
        ht_gate_want(&gate, HT_GATE_MEMORY);
        nap();
        ht_gate_want_end(&gate, HT_GATE_MEMORY);
    }
    ht_gate_want(&gate, HT_GATE_MEMORY);
    for (unsigned i = 0; i < 4; i++)
        pthread_join(lower[i].thread, NULL);
    ht_gate_want_end(&gate, HT_GATE_MEMORY);
    stop = true;
    pthread_join(busy, NULL);
    ck_assert(!ht_dev_has_permits(dev));
    for (enum ht_io_class c = HT_IO_URGENT; c < HT_IO_CLASSES; c++)
        ck_assert_uint_eq(figures().in_flight_bytes[c], 0);
    ck_assert_uint_eq(figures().waits[HT_IO_URGENT], 0);
}

RUN_TESTS("gate", .setup = set_up, .teardown = tear_down, .timeout_s = 120)
