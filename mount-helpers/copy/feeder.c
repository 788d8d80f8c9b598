/* SPDX-License-Identifier: Apache-2.0 */
/* feeder.c - see feeder.h. */
#include "mount-helpers/copy/feeder.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "tiering/base/lock.h"

enum { READ_BYTES_MAX = 1 << 20, LOOK_NS = 100000000 };

struct ht_feeder {
    bool (*stopped)(void);
    pthread_t thread;
    struct ht_mutex lock;
    pthread_cond_t changed;
    /* The thread alone adds to used, and the caller alone moves begin. */
    HT_GUARDED_BY(HT_LOCK_FEEDER) struct {
        size_t begin, used;
        bool ended, ending;
        int error;
    };
    uint8_t *ring;
};
HT_MUTEX_OF(feeder_lock, struct ht_feeder, lock, HT_LOCK_FEEDER)

/* ------------------------------------------------------------------ thread */

/* Waits for room. The free part that is contiguous; 0: the thread is to end. */
static size_t wait_for_room(struct ht_feeder *f, size_t *out_at)
{
    ht_mutex_lock(feeder_lock(f));
    while (f->used == HT_FEEDER_BYTES && !f->ending)
        ht_cond_wait(&f->changed, feeder_lock(f));
    size_t at = (f->begin + f->used) % HT_FEEDER_BYTES;
    size_t room = ht_min_u64(HT_FEEDER_BYTES - f->used, HT_FEEDER_BYTES - at);
    bool ending = f->ending;
    ht_mutex_unlock(feeder_lock(f));
    *out_at = at;
    return ending ? 0 : ht_min_u64(room, READ_BYTES_MAX);
}

/*
 * A count, 0 at the end, or -errno. The thread ends here if the caller wants that: also in the middle of a read, which
 * waits for however long if another process takes the bytes that have come.
 */
static ssize_t read_some(void *to, size_t len)
{
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
    ssize_t n;
    int before;

    (void)pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &before);
    do {
        n = read(STDIN_FILENO, to, len);
        if (n < 0 && errno == EAGAIN)
            (void)poll(&in, 1, -1);
    } while (n < 0 && (errno == EINTR || errno == EAGAIN));
    int rc = n < 0 ? -errno : 0;
    (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return rc ? rc : n;
}

static void *feed(void *arg)
{
    struct ht_feeder *f = arg;
    size_t at, room;
    ssize_t n = 1;
    int before;

    (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    while (n > 0 && (room = wait_for_room(f, &at)) > 0) {
        n = read_some(f->ring + at, room);
        ht_mutex_lock(feeder_lock(f));
        if (n > 0)
            f->used += (size_t)n;
        f->ended = n <= 0;
        f->error = n < 0 ? (int)n : 0;
        pthread_cond_broadcast(&f->changed);
        ht_mutex_unlock(feeder_lock(f));
    }
    return NULL;
}

/* ------------------------------------------------------------------ caller */

/* Signals are the caller's, which asks what they mean. */
static int start_thread(struct ht_feeder *f)
{
    sigset_t all, before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = -pthread_create(&f->thread, NULL, feed, f);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

static void free_all(struct ht_feeder *f)
{
    ht_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->changed);
    free(f->ring);
    free(f);
}

int ht_feeder_begin(bool (*stopped)(void), struct ht_feeder **out)
{
    struct ht_feeder *f = calloc(1, sizeof(*f));

    if (!f)
        return -ENOMEM;
    f->stopped = stopped;
    ht_mutex_init(&f->lock, HT_LOCK_FEEDER);
    ht_cond_init(&f->changed);
    f->ring = malloc(HT_FEEDER_BYTES);
    int rc = f->ring ? start_thread(f) : -ENOMEM;
    if (rc < 0) {
        free_all(f);
        return rc;
    }
    *out = f;
    return 0;
}

ssize_t ht_feeder_get(void *feeder, void *data, size_t len)
{
    struct ht_feeder *f = feeder;

    ht_mutex_lock(feeder_lock(f));
    while (!f->used && !f->ended && !f->stopped())
        (void)ht_cond_wait_until(&f->changed, feeder_lock(f), ht_now_ns() + LOOK_NS); /* a signal wakes nobody here */
    size_t at = f->begin, n = ht_min_u64(ht_min_u64(len, f->used), HT_FEEDER_BYTES - at);
    int rc = f->stopped() ? -EINTR : n ? 0 : f->error;
    ht_mutex_unlock(feeder_lock(f));
    if (rc < 0 || !n)
        return rc;
    memcpy(data, f->ring + at, n);
    ht_mutex_lock(feeder_lock(f));
    f->begin = (f->begin + n) % HT_FEEDER_BYTES;
    f->used -= n;
    pthread_cond_broadcast(&f->changed);
    ht_mutex_unlock(feeder_lock(f));
    return (ssize_t)n;
}

void ht_feeder_end(struct ht_feeder *f)
{
    if (!f)
        return;
    ht_mutex_lock(feeder_lock(f));
    f->ending = true;
    pthread_cond_broadcast(&f->changed);
    ht_mutex_unlock(feeder_lock(f));
    (void)pthread_cancel(f->thread);
    pthread_join(f->thread, NULL);
    free_all(f);
}
