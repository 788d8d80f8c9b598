/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes of jobs without a mount: which job waits for which, how many threads are held, how many bytes are copied. */
#include <fcntl.h>
#include <semaphore.h>

#include "fs/fuse/fuse_priv.h"
#include "tests/support/suite.h"

enum { KEY = 7, OTHER_KEY = 8, PIECE = 4096, MIB = 1 << 20, SHORT_MIB = 32, REFUSE_MIB = 128 };

static struct ht_fuse fuse;
static struct ht_traffic traffic;
static sem_t go, began;
static _Atomic unsigned refused_to_leave;

/* For jobs of a request; nothing here replies. */
static fuse_req_t a_request(void)
{
    static char request;

    return (fuse_req_t)(void *)&request;
}

static void setup(void)
{
    memset(&fuse, 0, sizeof(fuse));
    memset(&traffic, 0, sizeof(traffic));
    fuse.traffic = &traffic;
    refused_to_leave = 0;
    sem_init(&go, 0, 0);
    sem_init(&began, 0, 0);
    ht_mutex_init(&fuse.job_lock, HT_LOCK_JOBS);
    ck_assert_int_eq(ht_job_start(&fuse), 0);
}

/* All that hold go on. */
static void teardown(void)
{
    for (unsigned i = 0; i < 1000; i++)
        sem_post(&go);
    ht_job_stop(&fuse);
    ht_mutex_destroy(&fuse.job_lock);
    sem_destroy(&go);
    sem_destroy(&began);
}

static void hold(struct ht_job *job)
{
    sem_post(&began);
    sem_wait(&go);
}

static void leave_and_hold(struct ht_job *job)
{
    refused_to_leave += !ht_job_leave_lane(job->fuse);
    hold(job);
}

static void submit(void (*fn)(struct ht_job *job), enum ht_lane_kind kind, uint64_t key)
{
    struct ht_job *job = ht_job_new(&fuse, a_request(), fn);

    ck_assert_ptr_nonnull(job);
    ht_job_submit(job, kind, key);
}

/* As many jobs have begun as can. */
static unsigned begun(unsigned least)
{
    struct timespec at;
    unsigned n = 0;

    for (;;) {
        clock_gettime(CLOCK_REALTIME, &at);
        at.tv_sec += n < least ? 60 : 0;
        at.tv_nsec += n < least ? 0 : 50000000;
        at.tv_sec += at.tv_nsec / 1000000000;
        at.tv_nsec %= 1000000000;
        if (sem_timedwait(&began, &at))
            return n;
        n++;
    }
}

TEST(who_waits_for_an_update_holds_up_no_other_lane)
{
    for (unsigned i = 0; i < 20; i++)
        submit(hold, HT_LANE_UPDATE, KEY);
    ck_assert_uint_eq(begun(4), 4);
    for (enum ht_lane_kind kind = 0; kind < HT_LANES; kind++) {
        if (kind == HT_LANE_UPDATE)
            continue;
        submit(hold, kind, KEY);
        ck_assert_uint_eq(begun(1), 1);
    }
    submit(hold, HT_LANE_UPDATE, OTHER_KEY);
    ck_assert_uint_eq(begun(1), 1);
}

/* Closing a gradient waits for an invalidation, and that for the pages of a write which waits for an update. */
TEST(no_other_lane_holds_up_who_waits_for_an_update)
{
    for (enum ht_lane_kind kind = 0; kind < HT_LANES; kind++)
        for (unsigned i = 0; kind != HT_LANE_UPDATE && i < 20; i++)
            submit(hold, kind, KEY);
    ck_assert_uint_ge(begun(4 + 4 + 8 + 1 + 1 + 4), 4 + 4 + 8 + 1 + 1 + 4);
    submit(hold, HT_LANE_UPDATE, KEY);
    ck_assert_uint_eq(begun(1), 1);
}

TEST(all_lanes_of_one_kind_leave_threads_to_the_others)
{
    for (unsigned key = 1; key <= 40; key++)
        for (unsigned i = 0; i < 2; i++)
            submit(hold, HT_LANE_UPDATE, key);
    ck_assert_uint_eq(begun(HT_LANE_THREADS), HT_LANE_THREADS);
    submit(hold, HT_LANE_CTL_SESSION, KEY);
    ck_assert_uint_eq(begun(1), 1);
}

/* More aborts than there are threads: each has ended and waits for its directory. */
TEST(jobs_that_have_left_their_lane_are_counted)
{
    for (unsigned key = 1; key <= 250; key++)
        submit(leave_and_hold, HT_LANE_TURN, key);
    ck_assert_uint_eq(begun(HT_LANE_LEFT_MAX + HT_LANE_THREADS), HT_LANE_LEFT_MAX + HT_LANE_THREADS);
    ck_assert_uint_eq(refused_to_leave, HT_LANE_THREADS);
    ck_assert_uint_eq(traffic.jobs_left, HT_LANE_LEFT_MAX);
    for (enum ht_lane_kind kind = 0; kind < HT_LANES; kind++)
        for (unsigned key = 1; kind != HT_LANE_TURN && key <= HT_LANE_THREADS; key++)
            submit(hold, kind, key);
    ck_assert_uint_eq(begun((HT_LANES - 1) * HT_LANE_THREADS), (HT_LANES - 1) * HT_LANE_THREADS);
    ck_assert_uint_eq(traffic.job_threads, HT_LANES * HT_LANE_THREADS + HT_LANE_LEFT_MAX);
    for (unsigned i = 0; i < 1000; i++)
        sem_post(&go);
    while (traffic.jobs_left)
        usleep(1000);
}

static _Atomic unsigned drops;

static void drop(struct ht_job *job)
{
    drops++;
    hold(job);
}

static void submit_drop(uint64_t key)
{
    struct ht_job *job = ht_job_new(&fuse, NULL, drop);

    ck_assert_ptr_nonnull(job);
    ck_assert(ht_job_submit_once(job, HT_LANE_PAGES, key));
}

/* One that runs may have begun before the reason for this one. */
TEST(a_job_that_is_queued_already_is_not_queued_again)
{
    drops = 0;
    submit_drop(KEY);
    ck_assert_uint_eq(begun(1), 1);
    for (unsigned i = 0; i < 10; i++)
        submit_drop(KEY);
    submit_drop(OTHER_KEY);
    ck_assert_uint_eq(begun(1), 1);
    ck_assert_uint_eq(drops, 2);
    sem_post(&go);
    sem_post(&go);
    ck_assert_uint_eq(begun(1), 1);
    ck_assert_uint_eq(drops, 3);
}

/* ------------------------------------------------------------------- bytes */

static const char bytes[MIB];

/* How many bytes of len are kept for a write with these flags; -1: it was refused. */
static ssize_t take(uint64_t key, size_t len, const struct fuse_file_info *fi, bool wait)
{
    struct ht_job job = {.fn = hold, .key = key, .data = (char *)bytes, .size = len};

    return ht_job_write(&fuse, NULL, wait ? HT_LANE_UPDATE : HT_LANE_CTL_SESSION, &job, fi) ? (ssize_t)job.size : -1;
}

TEST(writes_that_wait_are_cut_and_then_refused)
{
    const struct fuse_file_info buffered = {.flags = O_WRONLY}, direct = {.flags = O_WRONLY | O_DIRECT},
                                page = {.flags = O_RDWR, .writepage = 1};

    for (unsigned i = 0; i < SHORT_MIB; i++)
        ck_assert_int_eq(take(KEY, MIB, &buffered, true), MIB);
    ck_assert_int_eq(take(KEY, MIB, &buffered, true), PIECE);
    ck_assert_int_eq(take(KEY, PIECE / 2, &buffered, true), PIECE / 2);
    ck_assert_int_eq(take(OTHER_KEY, MIB, &buffered, false), MIB);
    for (unsigned i = SHORT_MIB; i < REFUSE_MIB - 1; i++)
        ck_assert_int_eq(take(KEY, MIB, &direct, true), MIB);
    ck_assert_int_eq(take(KEY, MIB, &direct, true), -1);
    ck_assert_int_eq(take(KEY, MIB, &page, true), MIB);
    ck_assert_int_eq(take(OTHER_KEY, MIB, &direct, false), MIB);
}

TEST(what_has_been_written_counts_no_longer)
{
    const struct fuse_file_info buffered = {.flags = O_WRONLY};

    for (unsigned i = 0; i < SHORT_MIB; i++)
        (void)take(KEY, MIB, &buffered, true);
    ck_assert_int_eq(take(KEY, MIB, &buffered, true), PIECE);
    ck_assert_uint_eq(begun(4), 4);
    for (unsigned i = 0; i < SHORT_MIB - 4; i++)
        sem_post(&go);
    ck_assert_uint_eq(begun(SHORT_MIB - 4), SHORT_MIB - 4);
    ck_assert_int_eq(take(KEY, MIB, &buffered, true), MIB);
}

RUN_TESTS("job", .timeout_s = 120, .setup = setup, .teardown = teardown)
