/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lock.h - locks with a place in the order of <hitrain/locks.h>.
 *
 * A pthread lock and no more, unless HT_LOCK_CHECK is defined: then each thread keeps a list of what it holds, and
 * taking a lock whose rank is not above all of these, a wait with a later lock held, and giving back what is not held
 * end the process with a message that names both. Nothing is taken twice.
 */
#ifndef HITRAIN_TIERING_BASE_LOCK_H
#define HITRAIN_TIERING_BASE_LOCK_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#include <hitrain/locks.h>

struct ht_mutex {
    pthread_mutex_t lock;
#ifdef HT_LOCK_CHECK
    enum ht_lock_rank rank;
#endif
};

struct ht_rwlock {
    pthread_rwlock_t lock;
#ifdef HT_LOCK_CHECK
    enum ht_lock_rank rank;
#endif
};

#ifdef HT_LOCK_CHECK
#define HT_MUTEX_INIT(rank)              \
    {                                    \
        PTHREAD_MUTEX_INITIALIZER, rank, \
    }
#define HT_RWLOCK_INIT(rank)              \
    {                                     \
        PTHREAD_RWLOCK_INITIALIZER, rank, \
    }
#define HT_LOCK_TELL(call, l) call(l, (l)->rank)
#define HT_LOCK_SET_RANK(l, r) ((l)->rank = (r))
#else
#define HT_MUTEX_INIT(rank)        \
    {                              \
        PTHREAD_MUTEX_INITIALIZER, \
    }
#define HT_RWLOCK_INIT(rank)        \
    {                               \
        PTHREAD_RWLOCK_INITIALIZER, \
    }
#define HT_LOCK_TELL(call, l) ((void)0)
#define HT_LOCK_SET_RANK(l, r) ((void)(r))
#endif

/* lock.c, in builds that check. */
void ht_lock_taking(const void *lock, enum ht_lock_rank rank);
void ht_lock_waiting(const void *lock, enum ht_lock_rank rank);
void ht_lock_giving(const void *lock, enum ht_lock_rank rank);

static inline void ht_mutex_init(struct ht_mutex *m, enum ht_lock_rank rank)
{
    pthread_mutex_init(&m->lock, NULL);
    HT_LOCK_SET_RANK(m, rank);
}

static inline void ht_mutex_destroy(struct ht_mutex *m)
{
    pthread_mutex_destroy(&m->lock);
}

static inline void ht_mutex_lock(struct ht_mutex *m)
{
    HT_LOCK_TELL(ht_lock_taking, m);
    pthread_mutex_lock(&m->lock);
}

static inline void ht_mutex_unlock(struct ht_mutex *m)
{
    HT_LOCK_TELL(ht_lock_giving, m);
    pthread_mutex_unlock(&m->lock);
}

/* For ht_cond_wait_until, which counts by the clock of ht_now_ns. */
static inline void ht_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
}

static inline int ht_cond_wait(pthread_cond_t *c, struct ht_mutex *m)
{
    HT_LOCK_TELL(ht_lock_waiting, m);
    return pthread_cond_wait(c, &m->lock);
}

/* ETIMEDOUT from then on; at_ns 0: it never comes. */
static inline int ht_cond_wait_until(pthread_cond_t *c, struct ht_mutex *m, uint64_t at_ns)
{
    const struct timespec at = {(time_t)(at_ns / 1000000000), (long)(at_ns % 1000000000)};

    if (!at_ns)
        return ht_cond_wait(c, m);
    HT_LOCK_TELL(ht_lock_waiting, m);
    return pthread_cond_timedwait(c, &m->lock, &at);
}

/* Writers go first: readers that come without end must not keep them out. 0 or -errno. */
static inline int ht_rwlock_init(struct ht_rwlock *l, enum ht_lock_rank rank)
{
    pthread_rwlockattr_t attr;

    pthread_rwlockattr_init(&attr);
    pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    int rc = pthread_rwlock_init(&l->lock, &attr);
    pthread_rwlockattr_destroy(&attr);
    HT_LOCK_SET_RANK(l, rank);
    return -rc;
}

static inline void ht_rwlock_destroy(struct ht_rwlock *l)
{
    pthread_rwlock_destroy(&l->lock);
}

static inline void ht_rwlock_rdlock(struct ht_rwlock *l)
{
    HT_LOCK_TELL(ht_lock_taking, l);
    pthread_rwlock_rdlock(&l->lock);
}

static inline void ht_rwlock_wrlock(struct ht_rwlock *l)
{
    HT_LOCK_TELL(ht_lock_taking, l);
    pthread_rwlock_wrlock(&l->lock);
}

static inline void ht_rwlock_unlock(struct ht_rwlock *l)
{
    HT_LOCK_TELL(ht_lock_giving, l);
    pthread_rwlock_unlock(&l->lock);
}

#endif
