/* SPDX-License-Identifier: Apache-2.0 */
/* Workers and jobs without a mount. */
#include <malloc.h>

#include "tests/support/suite.h"
#include "tests/support/wrap.h"
#include "tests/unit/fs/fuse/socket.h"

enum { PINGS = 100, ROUNDS = 50, HELD = 4, DIRECTORY = 5 };

/* -------------------------------------------------------------- operations */

static void op_access(fuse_req_t req, fuse_ino_t ino, int mask)
{
    fuse_reply_err(req, 0);
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    sem_post(&began);
    sem_wait(&go);
    fuse_reply_err(req, ENOENT);
}

/* The test's kernel offers nothing, so libfuse refuses to go on. */
static void op_init_wants_too_much(void *userdata, struct fuse_conn_info *conn)
{
    conn->want_ext |= FUSE_CAP_PASSTHROUGH;
}

static const struct fuse_lowlevel_ops ops = {.access = op_access, .getattr = op_getattr};
static const struct fuse_lowlevel_ops greedy_ops = {.init = op_init_wants_too_much};

/* --------------------------------------------------------------- the kernel */

/* A worker has each of them until the test lets it answer. */
static void hold(unsigned n)
{
    const struct fuse_getattr_in in = {0};

    for (unsigned i = 0; i < n; i++)
        request(FUSE_GETATTR, &in, sizeof(in));
    for (unsigned i = 0; i < n; i++)
        sem_wait(&began);
}

static void release(unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        sem_post(&go);
    for (unsigned i = 0; i < n; i++)
        ck_assert_int_eq(answer().error, -ENOENT);
}

/* ----------------------------------------------------------------- workers */

TEST(the_mount_is_ready_when_a_protocol_is_agreed)
{
    begin(4, &ops);
    ck_assert_int_eq(agree(), 0);
    while (!ready)
        usleep(1000);
    ping();
    end();
    ck_assert_int_eq(loop_rc, 0);
    ck_assert_uint_eq(ready, 1);
}

TEST(a_refused_protocol_ends_the_loop_with_an_error)
{
    begin(4, &greedy_ops);
    ck_assert_int_eq(agree(), -EPROTO);
    ck_assert_int_eq(pthread_join(loop, NULL), 0);
    ck_assert_int_eq(loop_rc, -EPROTO);
    ck_assert_uint_eq(ready, 0);
}

/* A few wake it. On a busy machine there are more, but not in all rounds. */
TEST(requests_of_a_single_worker_do_not_wake_the_loop)
{
    loop_waits = PINGS;
    for (unsigned round = 0; round < ROUNDS && loop_waits > PINGS / 2; round++) {
        if (round > 0) {
            teardown();
            setup();
        }
        begin(1, &ops);
        ck_assert_int_eq(agree(), 0);
        for (unsigned i = 0; i < PINGS; i++)
            ping();
        end();
    }
    ck_assert_int_le(loop_waits, PINGS / 2);
}

/* Three allocations: the table of workers, and two buffers. */
TEST(without_a_buffer_for_another_worker_the_mount_goes_on)
{
    wrap_fail(WRAP_MEMORY, 3, false);
    wrap_pause(true);
    begin(2, &ops);
    while (!wrap_reached(WRAP_MEMORY))
        usleep(1000);
    ck_assert_int_eq(agree(), 0);
    hold(2);
    release(2);
    end();
    ck_assert_int_eq(loop_rc, 0);
    wrap_pause(false);
}

static size_t bytes_in_use(void)
{
    struct mallinfo2 m = mallinfo2();

    return m.uordblks + m.hblkhd;
}

static void wait_until_in_use(size_t bytes_max)
{
    for (unsigned i = 0; i < SECONDS_MAX * 100 && bytes_in_use() > bytes_max; i++) {
        ping(); /* a worker that is not needed any more leaves with its next request */
        usleep(10000);
    }
    ck_assert_uint_le(bytes_in_use(), bytes_max);
}

TEST(a_worker_that_left_keeps_no_buffer)
{
    begin(1, &ops);
    ck_assert_int_eq(agree(), 0);
    size_t before = bytes_in_use();
    hold(HELD);
    release(HELD);
    wait_until_in_use(before + HT_FUSE_IO_BYTES / 2);
    end();
    ck_assert_int_eq(loop_rc, 0);
}

/* -------------------------------------------------------------------- names */

static void leave_and_hold(struct ht_job *job)
{
    bool left = ht_job_leave_lane(job->fuse);

    ck_assert(left);
    sem_post(&began);
    sem_wait(&go);
}

static void drop_name(struct ht_job *job)
{
    ht_fuse_drop_name(job->fuse, DIRECTORY, "name");
    sem_post(&began);
}

static void submit(void (*fn)(struct ht_job *job), uint64_t key)
{
    static char a_request;
    struct ht_job *job = ht_job_new(&fuse, (fuse_req_t)(void *)&a_request, fn);

    ck_assert_ptr_nonnull(job);
    ck_assert(ht_job_submit(job, HT_LANE_TURN, key));
}

/* It may neither leave its lane nor have another job. */
static void drop_a_name_without_memory(void)
{
    wrap_pause(true);
    begin(1, &ops);
    ck_assert_int_eq(agree(), 0);
    for (unsigned key = 1; key <= HT_LANE_LEFT_MAX; key++)
        submit(leave_and_hold, key);
    for (unsigned i = 0; i < HT_LANE_LEFT_MAX; i++)
        sem_wait(&began);
    wrap_fail(WRAP_MEMORY, 1, true);
    submit(drop_name, HT_LANE_LEFT_MAX + 1);
    while (!wrap_reached(WRAP_MEMORY))
        usleep(1000);
    ck_assert(is_silent());
}

static void end_names(void)
{
    for (unsigned i = 0; i < HT_LANE_LEFT_MAX; i++)
        sem_post(&go);
    end();
    wrap_pause(false);
}

TEST(a_name_is_dropped_when_there_is_memory_again)
{
    drop_a_name_without_memory();
    wrap_fail(WRAP_MEMORY, 0, false);
    ck_assert_int_eq(answer().error, FUSE_NOTIFY_INVAL_ENTRY);
    end_names();
}

TEST(a_mount_that_ends_drops_no_more_names)
{
    drop_a_name_without_memory();
    fuse.ended = true;
    sem_wait(&began);
    ck_assert(is_silent());
    wrap_fail(WRAP_MEMORY, 0, false);
    end_names();
}

RUN_TESTS("requests", .timeout_s = 120, .setup = setup, .teardown = teardown)
