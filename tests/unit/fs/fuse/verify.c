/* SPDX-License-Identifier: Apache-2.0 */
/* verify.c - asserts the invariants of job.c (tiering/base/verify.h). */

#include "fs/fuse/fuse_priv.h"

/* What the lanes of one kind add up to. */
struct tally {
    uint64_t queued;
    unsigned running, ready;
};

/* Returns how many jobs wait in it. */
static uint64_t check_queue(const struct ht_job_lane *l)
{
    uint64_t queued = 0, bytes = 0;

    ht_list_for_each_entry(job, &l->queue, const struct ht_job, link) {
        assert(job->fn && !job->lane && !job->left);
        bytes += job->data ? job->size : 0;
        queued++;
    }
    assert(l->bytes >= bytes);
    return queued;
}

static bool is_alone(const struct ht_list *bucket, const struct ht_job_lane *l)
{
    unsigned same = 0;

    ht_list_for_each_entry(other, bucket, const struct ht_job_lane, link)
        same += other->kind == l->kind && other->key == l->key;
    return same == 1;
}

static void check_lane(const struct ht_job_lane *l, struct tally *t)
{
    uint64_t queued = check_queue(l);
    bool ready = queued && l->running < ht_job_lane_limit(l);

    assert(queued || l->running);
    assert(l->running <= ht_job_lane_limit(l));
    assert(ht_list_empty(&l->ready) == !ready);
    t->queued += queued;
    t->running += l->running;
    t->ready += ready;
}

static void check_kind(struct ht_fuse *f, enum ht_lane_kind kind, const struct tally *t) HT_REQUIRES(HT_LOCK_JOBS)
{
    unsigned ready = 0;

    ht_list_for_each_entry(l, &f->jobs.ready[kind], const struct ht_job_lane, ready) {
        assert(l->kind == kind);
        ready++;
    }
    assert(ready == t->ready);
    assert(f->jobs.running[kind] == t->running && t->running <= HT_LANE_THREADS);
}

void ht_job_verify(struct ht_fuse *f)
{
    struct tally t[HT_LANES] = {{0}};
    uint64_t queued = 0, running = 0;

    for (unsigned i = 0; i < HT_LANE_BUCKETS; i++) {
        ht_list_for_each_entry(l, &f->jobs.lane[i], const struct ht_job_lane, link) {
            assert(l->kind < HT_LANES && ht_job_bucket(l->kind, l->key) == i);
            assert(is_alone(&f->jobs.lane[i], l));
            check_lane(l, &t[l->kind]);
        }
    }
    for (unsigned i = 0; i < HT_LANES; i++) {
        check_kind(f, (enum ht_lane_kind)i, &t[i]);
        queued += t[i].queued;
        running += t[i].running;
    }
    ht_list_for_each_entry(l, &f->jobs.lane_free, const struct ht_job_lane, link)
        assert(!l->running && !l->bytes && ht_list_empty(&l->queue) && ht_list_empty(&l->ready));
    ht_list_for_each_entry(job, &f->job_free, const struct ht_job, link)
        assert(!job->data && !job->lane && !job->left);
    assert(f->jobs.left <= HT_LANE_LEFT_MAX);
    assert(f->jobs.count == queued + running + f->jobs.left);
    assert(f->jobs.threads <= HT_ARRAY_SIZE(f->jobs.thread));
    assert(f->jobs.idle + running + f->jobs.left <= f->jobs.threads);
    assert(f->traffic->job_threads == f->jobs.threads && f->traffic->jobs_left == f->jobs.left);
}
