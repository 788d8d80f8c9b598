/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job.c - a few threads for requests that may wait for updates and invalidations.
 *
 * Closing a gradient waits until the kernel has dropped its copies, and the kernel waits for
 * every read of those pages that it has already queued; were all workers closing gradients, nobody would
 * take these reads. Jobs never wait for other jobs, nor for requests in the kernel's queue except through such
 * reads, which workers and the optimizer's threads answer; so a fixed number of threads is enough.
 *
 * Locks: job_lock, a leaf. Threads: submit from workers; fn on job threads.
 */
#include "fs/fuse/fuse_priv.h"

#include <stdlib.h>

static struct ht_job *next_job(struct ht_fuse *f)
{
    struct ht_job *job = NULL;

    ht_mutex_lock(&f->job_lock);
    while (ht_list_empty(&f->job_queue) && !f->job_stop)
        ht_cond_wait(&f->job_wanted, &f->job_lock);
    if (!ht_list_empty(&f->job_queue)) {
        job = ht_list_entry(f->job_queue.next, struct ht_job, link);
        ht_list_del(&job->link);
    }
    ht_mutex_unlock(&f->job_lock);
    return job;
}

static void put_free(struct ht_job *job)
{
    struct ht_fuse *f = job->fuse;

    free(job->data);
    job->data = NULL;
    ht_mutex_lock(&f->job_lock);
    ht_list_add_tail(&f->job_free, &job->link);
    ht_mutex_unlock(&f->job_lock);
}

static void *run(void *arg)
{
    struct ht_fuse *f = arg;
    struct ht_job *job;

    while ((job = next_job(f)) != NULL) {
        job->fn(job);
        put_free(job);
    }
    return NULL;
}

int ht_job_start(struct ht_fuse *f)
{
    ht_list_init(&f->job_queue);
    ht_list_init(&f->job_free);
    pthread_cond_init(&f->job_wanted, NULL);
    while (f->job_threads < HT_JOB_THREADS) {
        int r = pthread_create(&f->job_thread[f->job_threads], NULL, run, f);

        if (r)
            return -r;
        pthread_setname_np(f->job_thread[f->job_threads++], "ht-job");
    }
    return 0;
}

static struct ht_job *take_free(struct ht_fuse *f)
{
    struct ht_job *job = NULL;

    ht_mutex_lock(&f->job_lock);
    if (!ht_list_empty(&f->job_free)) {
        job = ht_list_entry(f->job_free.next, struct ht_job, link);
        ht_list_del(&job->link);
    }
    ht_mutex_unlock(&f->job_lock);
    return job ? job : malloc(sizeof(*job));
}

struct ht_job *ht_job_new(struct ht_fuse *f, fuse_req_t req, void (*fn)(struct ht_job *job))
{
    struct ht_job *job = take_free(f);

    if (!job) {
        if (req)
            ht_reply(req, -ENOMEM);
        return NULL;
    }
    *job = (struct ht_job){.fn = fn, .fuse = f, .req = req};
    ht_list_init(&job->link);
    return job;
}

bool ht_job_data(struct ht_job *job, const void *data, size_t len)
{
    job->data = malloc(len + 1);
    if (!job->data) {
        ht_reply(job->req, -ENOMEM);
        put_free(job);
        return false;
    }
    memcpy(job->data, data, len);
    job->data[len] = 0;
    job->size = len;
    return true;
}

void ht_job_submit(struct ht_job *job)
{
    struct ht_fuse *f = job->fuse;

    ht_mutex_lock(&f->job_lock);
    ht_list_add_tail(&f->job_queue, &job->link);
    pthread_cond_signal(&f->job_wanted);
    ht_mutex_unlock(&f->job_lock);
}

void ht_job_stop(struct ht_fuse *f)
{
    ht_mutex_lock(&f->job_lock);
    f->job_stop = true;
    pthread_cond_broadcast(&f->job_wanted);
    ht_mutex_unlock(&f->job_lock);
    while (f->job_threads)
        pthread_join(f->job_thread[--f->job_threads], NULL);
    while (!ht_list_empty(&f->job_free)) {
        struct ht_job *job = ht_list_entry(f->job_free.next, struct ht_job, link);

        ht_list_del(&job->link);
        free(job);
    }
}
