/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that wait for a replay of logged steps end when they are interrupted, whenever the interrupt comes. */
#include "tests/unit/optim/step/fixture.h"

#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "tests/unit/fs/fuse/socket.h"

#include <sys/syscall.h>

enum { RUNNING = 4, LOOKS_US = 150000 }; /* jobs of a lane; two looks whether a request is interrupted */

static struct ht_ctl *ctl;
static void (*fn)(struct ht_job *job);
static bool late; /* the request is interrupted before its job is queued */
static _Atomic time_t wall_ahead_s;

/* ------------------------------------------------------------------- jobs */

static void hold_lane(struct ht_job *job)
{
    sem_post(&began);
    sem_wait(&go);
}

static void reply_now(struct ht_job *job)
{
    fuse_reply_err(job->req, 0);
}

static void wait_for_updates(struct ht_job *job)
{
    sem_post(&began);
    fuse_reply_err(job->req, -ht_ctl_wait_updates(ctl, w.param[0].oid, 0, 4));
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_job *job = ht_job_new(&fuse, req, fn);

    ck_assert_ptr_nonnull(job);
    job->may_end = true;
    while (late && !fuse_req_interrupted(req))
        usleep(1000);
    ck_assert(ht_job_submit(job, HT_LANE_UPDATE, ROOT));
}

static void op_access(fuse_req_t req, fuse_ino_t ino, int mask)
{
    fuse_reply_err(req, 0);
}

static const struct fuse_lowlevel_ops ops = {.access = op_access, .getattr = op_getattr};

/* As many as may run at a time. */
static void fill_lane(void)
{
    for (unsigned i = 0; i < RUNNING; i++) {
        struct ht_job *job = ht_job_new(&fuse, NULL, hold_lane);
        ck_assert_ptr_nonnull(job);
        ck_assert(ht_job_submit(job, HT_LANE_UPDATE, ROOT));
    }
    for (unsigned i = 0; i < RUNNING; i++)
        sem_wait(&began);
}

static void empty_lane(void)
{
    for (unsigned i = 0; i < RUNNING; i++)
        sem_post(&go);
}

/* ---------------------------------------------------------------- requests */

static uint64_t ask(void (*with)(struct ht_job *job), bool interrupted_early)
{
    const struct fuse_getattr_in in = {0};

    fn = with;
    late = interrupted_early;
    return request(FUSE_GETATTR, &in, sizeof(in));
}

static void interrupt(uint64_t unique)
{
    const struct fuse_interrupt_in in = {.unique = unique};

    request(FUSE_INTERRUPT, &in, sizeof(in));
}

static void expect_answer(uint64_t unique, int error)
{
    struct fuse_out_header out = answer();

    ck_assert_uint_eq(out.unique, unique);
    ck_assert_int_eq(out.error, error);
}

/* ---------------------------------------------------------------- the root */

static void set_replaying(bool replaying)
{
    lock(w.o);
    ht_opt_root_find(w.o, ROOT)->redo.replaying = replaying;
    notify_changed(w.o);
    unlock(w.o);
}

static void note_replay(void *ctx, uint64_t root)
{
    (void)ctx;
    ht_job_replay_begins(&fuse, root);
}

static void set_hold(bool hold)
{
    lock(w.o);
    struct ht_root *root = ht_opt_root_find(w.o, ROOT);
    root->hold = hold;
    ht_opt_root_ready(root);
    notify_changed(w.o);
    unlock(w.o);
}

/* Instead of the C library's: the time of day may be one that the kernel's clock has not reached. */
int clock_gettime(clockid_t id, struct timespec *out)
{
    int rc = (int)syscall(SYS_clock_gettime, id, out);

    if (id == CLOCK_REALTIME)
        out->tv_sec += wall_ahead_s;
    return rc;
}

static void prepare(unsigned workers)
{
    memset(&w, 0, sizeof(w));
    w.hooks.replay_begins = note_replay;
    open_mixed("adamw lr=1e-2", 1, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_ctl_new(w.s, NULL, &ctl), 0);
    ht_ctl_attach(ctl, NULL, w.o);
    setup();
    fuse.optim = w.o;
    fuse.opts.single_thread = workers == 1; /* no other one takes its place, however long it takes */
    begin(workers, &ops);
    ck_assert_int_eq(agree(), 0);
}

static void finish(void)
{
    end();
    teardown();
    ht_ctl_free(ctl);
    fixture_close(&w);
}

/* ------------------------------------------------------------------- tests */

TEST(an_interrupt_before_the_job_is_queued_is_not_lost)
{
    prepare(4);
    fill_lane();
    set_replaying(true);
    uint64_t unique = ask(reply_now, true);
    interrupt(unique);
    expect_answer(unique, -EINTR);
    set_replaying(false);
    empty_lane();
}

/* A single worker has taken the interrupt when it takes the next request. */
TEST_LOOP(an_interrupt_of_a_queued_job_ends_it_only_during_a_replay, 2)
{
    prepare(1);
    fill_lane();
    set_replaying(_i);
    uint64_t unique = ask(reply_now, false);
    ping();
    interrupt(unique);
    if (_i) {
        expect_answer(unique, -EINTR);
    } else {
        ping();
        ck_assert(is_silent());
    }
    set_replaying(false);
    empty_lane();
    if (!_i)
        expect_answer(unique, 0);
}

/* The updates go on, or their step is taken back and the logged ones are computed again. */
TEST_LOOP(an_interrupt_before_a_replay_ends_a_wait_once_it_begins, 2)
{
    prepare(1);
    set_hold(true);
    step_all(&w);
    uint64_t unique = ask(wait_for_updates, false);
    sem_wait(&began);
    interrupt(unique);
    ping();
    usleep(LOOKS_US);
    ck_assert(is_silent());
    if (_i) {
        set_replaying(true);
        expect_answer(unique, -EINTR);
        set_replaying(false);
        set_hold(false);
    } else {
        set_hold(false);
        expect_answer(unique, 0);
    }
}

/* Somebody sets the time of day back by an hour while the request waits. */
TEST(a_clock_that_is_set_back_delays_no_interrupt)
{
    prepare(1);
    wall_ahead_s = 3600;
    set_hold(true);
    step_all(&w);
    uint64_t unique = ask(wait_for_updates, false);
    sem_wait(&began);
    usleep(LOOKS_US);
    set_replaying(true);
    interrupt(unique);
    expect_answer(unique, -EINTR);
    wall_ahead_s = 0;
    set_replaying(false);
    set_hold(false);
}

/* Its lane is full when an abort computes logged steps again, and until after that: one request was interrupted. */
TEST(an_interrupt_before_a_replay_ends_a_queued_job_once_it_begins)
{
    struct ht_optim_config logs = fixture_config("adamw lr=1e-2 redo=on durable_every=100");

    prepare(1);
    ht_ctl_detach(ctl); /* events need no names, of which there are none */
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &logs), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (unsigned step = 1; step <= 3; step++) {
        step_all(&w);
        ck_assert_int_eq(step < 3 ? ht_optim_commit(w.o, ROOT) : ht_optim_wait(w.o, ROOT, 0), 0);
    }
    fill_lane();
    uint64_t wanted = ask(reply_now, false), unique = ask(reply_now, false);
    ping();
    interrupt(unique);
    ping();
    ck_assert(is_silent());
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).replay_steps, 0);
    expect_answer(unique, -EINTR);
    ck_assert(is_silent());
    empty_lane();
    expect_answer(wanted, 0);
}

RUN_TESTS("interrupt", .teardown = finish, .timeout_s = 300, .memory = memory_keep)
