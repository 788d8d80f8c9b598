/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes that contradict themselves end the process when they are verified; sound ones pass. */
#include <semaphore.h>
#include <signal.h>

#include "fs/fuse/fuse_priv.h"
#include "tests/support/suite.h"
#include "tests/support/wrong.h"

enum { KEY = 7, OTHER_KEY = KEY + HT_LANE_BUCKETS, BYTES = 100 }; /* these two share a bucket */

static struct ht_fuse fuse;
static struct ht_traffic traffic;
static sem_t began;
/* One has a running and a queued job, the other runs one; a third job has left its lane; a fourth has ended. */
static struct ht_job_lane *busy, *other, *unused;
static struct ht_job *queued;

static void stay(struct ht_job *job)
{
    sem_post(&began);
    pause();
}

static void leave_and_stay(struct ht_job *job)
{
    ck_assert(ht_job_leave_lane(job->fuse));
    stay(job);
}

static void end(struct ht_job *job)
{
    sem_post(&began);
}

static struct ht_job *submit(void (*fn)(struct ht_job *job), enum ht_lane_kind kind, uint64_t key)
{
    static char request;
    struct ht_job *job = ht_job_new(&fuse, (fuse_req_t)(void *)&request, fn);

    ck_assert_ptr_nonnull(job);
    ck_assert(ht_job_data(job, "", 0));
    job->size = 0;
    ck_assert(ht_job_submit(job, kind, key));
    return job;
}

static struct ht_job_lane *lane_of(const struct ht_list *list, uint64_t key) HT_REQUIRES(HT_LOCK_JOBS)
{
    ht_list_for_each(pos, list) {
        struct ht_job_lane *l = ht_list_entry(pos, struct ht_job_lane, link);
        if (!key || l->key == key)
            return l;
    }
    return NULL;
}

static void make(void)
{
    fuse.traffic = &traffic;
    sem_init(&began, 0, 0);
    ht_mutex_init(&fuse.job_lock, HT_LOCK_JOBS);
    ck_assert_int_eq(ht_job_start(&fuse), 0);
    submit(stay, HT_LANE_TURN, KEY);
    submit(leave_and_stay, HT_LANE_TURN, 2000);
    submit(stay, HT_LANE_TURN, OTHER_KEY);
    for (unsigned i = 0; i < 3; i++)
        sem_wait(&began);
    queued = submit(stay, HT_LANE_TURN, KEY);
    submit(end, HT_LANE_TURN, 1000);
    sem_wait(&began);
    bool ended = false;
    while (!ended) {
        usleep(1000);
        ht_mutex_lock(ht_fuse_job_lock(&fuse));
        ended = fuse.jobs.count == 4;
        ht_mutex_unlock(ht_fuse_job_lock(&fuse));
    }
    ht_mutex_lock(ht_fuse_job_lock(&fuse));
    busy = lane_of(&fuse.jobs.lane[ht_job_bucket(HT_LANE_TURN, KEY)], KEY);
    other = lane_of(&fuse.jobs.lane[ht_job_bucket(HT_LANE_TURN, OTHER_KEY)], OTHER_KEY);
    unused = lane_of(&fuse.jobs.lane_free, 0);
    ck_assert(busy && other && unused && busy->running == 1 && !ht_list_empty(&busy->queue));
}

/* ------------------------------------------------------------------- errors */

WRONG(more_than_may_run)
{
    busy->running++;
    fuse.jobs.running[HT_LANE_TURN]++;
    fuse.jobs.count++;
}

WRONG_BY(a_full_lane_that_is_ready, ht_list_add_tail(&fuse.jobs.ready[HT_LANE_TURN], &busy->ready))

WRONG(a_lane_with_room_that_is_not)
{
    busy->running = 0;
    fuse.jobs.running[HT_LANE_TURN]--;
    fuse.jobs.count--;
}

WRONG(a_ready_lane_of_another_kind)
{
    busy->running = 0;
    fuse.jobs.running[HT_LANE_TURN]--;
    fuse.jobs.count--;
    ht_list_add_tail(&fuse.jobs.ready[HT_LANE_WRITE], &busy->ready);
}

WRONG(a_lane_without_jobs)
{
    other->running = 0;
    fuse.jobs.running[HT_LANE_TURN]--;
    fuse.jobs.count--;
}

WRONG_BY(two_lanes_of_one_key, other->key = KEY)
WRONG_BY(a_lane_in_another_bucket, busy->key++)
WRONG_BY(a_lane_of_no_kind, busy->kind = HT_LANES)
WRONG_BY(more_running_of_a_kind, fuse.jobs.running[HT_LANE_TURN]++)
WRONG_BY(a_queued_job_that_runs, queued->lane = busy)
WRONG_BY(bytes_that_do_not_count, queued->size = BYTES)
WRONG_BY(a_job_that_does_not_count, fuse.jobs.count--)

static void set_threads(unsigned count)
{
    fuse.jobs.threads = count;
    traffic.job_threads = count;
}

WRONG(one_that_left_too_much)
{
    fuse.jobs.idle = 0;
    fuse.jobs.left += HT_LANE_LEFT_MAX;
    fuse.jobs.count += HT_LANE_LEFT_MAX;
    traffic.jobs_left += HT_LANE_LEFT_MAX;
    set_threads(HT_ARRAY_SIZE(fuse.jobs.thread));
}

WRONG_BY(more_jobs_than_threads, set_threads(2))
WRONG_BY(more_threads_than_there_may_be, set_threads(HT_ARRAY_SIZE(fuse.jobs.thread) + 1))
WRONG_BY(another_number_of_threads, traffic.job_threads++)
WRONG_BY(bytes_of_a_free_lane, unused->bytes = BYTES)
WRONG_BY(a_free_job_with_a_lane, ht_list_entry(fuse.job_free.next, struct ht_job, link)->lane = unused)

/* ------------------------------------------------------------------- tests */

TEST_SIGNAL(lanes_that_are_broken_end_the_process, SIGABRT, wrongs)
{
    make();
    ht_job_verify(&fuse);
    wrong[_i].make();
    ht_job_verify(&fuse);
}

RUN_TESTS("verify")
