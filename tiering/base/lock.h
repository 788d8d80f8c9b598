/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lock.h - locks with a place in the order of <hitrain/locks.h>.
 *
 * A pthread lock and no more, unless HT_LOCK_CHECK is defined: then each thread keeps a list of its locks. Three
 * mistakes end the process with a message that names both locks: taking a lock whose rank is not above all locks in the
 * list, waiting with a later lock held, and releasing a lock that is not held. No lock is taken twice.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "tiering/base/guarded.h"

struct HT_ATTRIBUTE(capability("mutex")) ht_mutex {
    pthread_mutex_t lock;
#ifdef HT_LOCK_CHECK
    enum ht_lock_rank rank;
#endif
};

struct HT_ATTRIBUTE(capability("lock")) ht_rwlock {
    pthread_rwlock_t lock;
#ifdef HT_LOCK_CHECK
    enum ht_lock_rank rank;
#endif
};

#ifdef HT_LOCK_CHECK
#define HT_LOCK_RANK(r) .rank = (r)
#define HT_LOCK_TELL(call, l) call(l, (l)->rank)
#define HT_LOCK_SET_RANK(l, r) ((l)->rank = (r))
#define HT_LOCK_GIVEN() ht_lock_given()
#else
#define HT_LOCK_RANK(r)
#define HT_LOCK_TELL(call, l) ((void)0)
#define HT_LOCK_SET_RANK(l, r) ((void)(r))
#define HT_LOCK_GIVEN() ((void)0)
#endif
#define HT_MUTEX_INIT(r)                                   \
    {                                                      \
        .lock = PTHREAD_MUTEX_INITIALIZER, HT_LOCK_RANK(r) \
    }
#define HT_RWLOCK_INIT(r)                                   \
    {                                                       \
        .lock = PTHREAD_RWLOCK_INITIALIZER, HT_LOCK_RANK(r) \
    }

/* In builds that check (verify_locks.c). what: ends the sentence of the message. */
void ht_lock_none_held(const char *what);
#ifdef HT_LOCK_CHECK
#define ht_lock_expect_none(what) ht_lock_none_held(what)
#else
#define ht_lock_expect_none(what) ((void)0)
#endif
void ht_lock_taking(const void *lock, enum ht_lock_rank rank);
void ht_lock_waiting(const void *lock, enum ht_lock_rank rank);
void ht_lock_giving(const void *lock, enum ht_lock_rank rank);
/*
 * With HITRAIN_LOCK_DELAYS in the environment a thread sleeps now and then, for up to 3 ms, after it released a lock.
 * Other threads then see what it changes only later.
 */
void ht_lock_given(void);

/*
 * The longest holds of a lock, in builds that check. A wait for a condition ends a hold. Time is the processor time of
 * the thread, so other programs count only by what they do to caches; a hypervisor may count, too. Two numbers depend
 * on no machine: threads count their steps through long lists and tables with ht_lock_step, and in builds with LOCKS=1
 * the compiler counts the basic blocks that the project's code runs through.
 */
struct ht_lock_hold {
    uint64_t ns;     /* of the longest, in processor time; 0: none, or not measured */
    uint64_t steps;  /* the most in one hold */
    uint64_t blocks; /* the same; 0 in other builds */
};
/* Measures time from now on, or no more; steps are always counted. Any thread. */
void ht_lock_measure(bool on);
/* The longest of a rank since the last call, in any thread; in other builds all zeros. */
struct ht_lock_hold ht_lock_longest(enum ht_lock_rank rank);
#ifdef HT_LOCK_CHECK
void ht_lock_step(void);
#else
static inline void ht_lock_step(void)
{
}
#endif

/* Defines a function that returns a member as the mutex of this rank (guarded.h). */
#define HT_MUTEX_OF(name, type, member, rank)                            \
    static inline struct ht_mutex *name(const type *of) HT_OF_RANK(rank) \
    {                                                                    \
        return (struct ht_mutex *)&of->member;                           \
    }
#define HT_RWLOCK_OF(name, type, member, rank)                            \
    static inline struct ht_rwlock *name(const type *of) HT_OF_RANK(rank) \
    {                                                                     \
        return (struct ht_rwlock *)&of->member;                           \
    }

static inline void ht_mutex_init(struct ht_mutex *m, enum ht_lock_rank rank)
{
    pthread_mutex_init(&m->lock, NULL);
    HT_LOCK_SET_RANK(m, rank);
}

static inline void ht_mutex_destroy(struct ht_mutex *m)
{
    pthread_mutex_destroy(&m->lock);
}

/* From here clang goes by the annotations: it knows nothing of pthread's locks. */
static inline void ht_mutex_lock(struct ht_mutex *m) HT_ATTRIBUTE(acquire_capability(*m)) HT_NO_THREAD_SAFETY_ANALYSIS
{
    HT_LOCK_TELL(ht_lock_taking, m);
    pthread_mutex_lock(&m->lock);
}

static inline void ht_mutex_unlock(struct ht_mutex *m) HT_ATTRIBUTE(release_capability(*m)) HT_NO_THREAD_SAFETY_ANALYSIS
{
    HT_LOCK_TELL(ht_lock_giving, m);
    pthread_mutex_unlock(&m->lock);
    HT_LOCK_GIVEN();
}

/* False: another thread has it. */
static inline bool ht_mutex_try(struct ht_mutex *m)
    HT_ATTRIBUTE(try_acquire_capability(true, *m)) HT_NO_THREAD_SAFETY_ANALYSIS
{
    if (pthread_mutex_trylock(&m->lock))
        return false;
    HT_LOCK_TELL(ht_lock_taking, m);
    return true;
}

/* A value that the mutex guards. */
#define ht_locked(mutex, value)       \
    ({                                \
        ht_mutex_lock(mutex);         \
        __auto_type value_ = (value); \
        ht_mutex_unlock(mutex);       \
        value_;                       \
    })

/*
 * Does a thread wait for the mutex, which this one holds? May say yes for a thread that has just given up. glibc's
 * mutex is 2 while a thread may wait for it.
 */
static inline bool ht_mutex_is_wanted(const struct ht_mutex *m)
{
    return __atomic_load_n(&m->lock.__data.__lock, __ATOMIC_RELAXED) > 1;
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

static inline int ht_cond_wait(pthread_cond_t *c, struct ht_mutex *m) HT_ATTRIBUTE(requires_capability(*m))
{
    HT_LOCK_TELL(ht_lock_waiting, m);
    return pthread_cond_wait(c, &m->lock);
}

/* ETIMEDOUT from then on; at_ns 0: it never comes. */
static inline int ht_cond_wait_until(pthread_cond_t *c, struct ht_mutex *m, uint64_t at_ns)
    HT_ATTRIBUTE(requires_capability(*m))
{
    const struct timespec at = {(time_t)(at_ns / 1000000000), (long)(at_ns % 1000000000)};

    if (!at_ns)
        return ht_cond_wait(c, m);
    HT_LOCK_TELL(ht_lock_waiting, m);
    return pthread_cond_timedwait(c, &m->lock, &at);
}

/* Writers go first: an endless stream of readers must not keep them out. 0 or -errno. */
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
    HT_ATTRIBUTE(acquire_shared_capability(*l)) HT_NO_THREAD_SAFETY_ANALYSIS
{
    HT_LOCK_TELL(ht_lock_taking, l);
    pthread_rwlock_rdlock(&l->lock);
}

static inline bool ht_rwlock_tryrd(struct ht_rwlock *l)
    HT_ATTRIBUTE(try_acquire_shared_capability(true, *l)) HT_NO_THREAD_SAFETY_ANALYSIS
{
    if (pthread_rwlock_tryrdlock(&l->lock))
        return false;
    HT_LOCK_TELL(ht_lock_taking, l);
    return true;
}

static inline void ht_rwlock_wrlock(struct ht_rwlock *l)
    HT_ATTRIBUTE(acquire_capability(*l)) HT_NO_THREAD_SAFETY_ANALYSIS
{
    HT_LOCK_TELL(ht_lock_taking, l);
    pthread_rwlock_wrlock(&l->lock);
}

static inline void ht_rwlock_unlock(struct ht_rwlock *l)
    HT_ATTRIBUTE(release_generic_capability(*l)) HT_NO_THREAD_SAFETY_ANALYSIS
{
    HT_LOCK_TELL(ht_lock_giving, l);
    pthread_rwlock_unlock(&l->lock);
    HT_LOCK_GIVEN();
}

/* The kernel's number of the thread that holds the lock, or writes under it. 0: none, or the C library hides it. */
static inline int ht_mutex_holder(const struct ht_mutex *m)
{
    return __atomic_load_n(&m->lock.__data.__owner, __ATOMIC_RELAXED);
}

static inline int ht_rwlock_writer(const struct ht_rwlock *l)
{
    return __atomic_load_n(&l->lock.__data.__cur_writer, __ATOMIC_RELAXED);
}

/* Does a thread wait to write under the lock, with which this one writes? */
static inline bool ht_rwlock_is_wanted_by_writer(const struct ht_rwlock *l)
{
    return __atomic_load_n(&l->lock.__data.__writers, __ATOMIC_RELAXED) != 0;
}
