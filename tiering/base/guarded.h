/* SPDX-License-Identifier: Apache-2.0 */
/*
 * guarded.h - which lock guards a field, and which one a function needs: clang checks it (tests/lint/threads.sh).
 *
 * Annotations name a lock by its rank in <hitrain/locks.h>, because in C clang finds no members of a struct. So clang
 * sees one lock of each rank, and does not notice the lock of another store. Each lock has a function that returns it
 * (HT_OF_RANK), and the calls of lock.h take what that returns. Calls through pointers are not checked.
 */
#pragma once

#include <hitrain/locks.h>

#ifdef HT_THREAD_SAFETY
#define HT_ATTRIBUTE(a) __attribute__((a))

struct HT_ATTRIBUTE(capability("lock")) ht_rank {
    char unused;
};
extern struct ht_rank ht_rank[HT_LOCK_RANKS];
static inline void ht_rank_unshared(const struct ht_rank *r) HT_ATTRIBUTE(assert_capability(*r))
{
}
/* A statement: until the function returns no other thread can use the data that this lock guards. */
#define HT_UNSHARED(rank) ht_rank_unshared(&ht_rank[rank])
#else
#define HT_ATTRIBUTE(a)
#define HT_UNSHARED(rank) ((void)0)
#endif

/* After a field; and after a field or variable of a file that has the mutex in a variable. */
#define HT_GUARDED_BY(rank) HT_ATTRIBUTE(guarded_by(ht_rank[rank]))
#define HT_GUARDED_BY_STATIC(mutex) HT_ATTRIBUTE(guarded_by(mutex))
#define HT_REQUIRES_STATIC(mutex) HT_ATTRIBUTE(requires_capability(mutex))
/* After the parameters of a function: the caller holds the lock, or holds it for reading, or does not hold it. */
#define HT_REQUIRES(rank) HT_ATTRIBUTE(requires_capability(ht_rank[rank]))
#define HT_REQUIRES_SHARED(rank) HT_ATTRIBUTE(requires_shared_capability(ht_rank[rank]))
#define HT_EXCLUDES(rank) HT_ATTRIBUTE(locks_excluded(ht_rank[rank]))
/* The function returns with the lock, or without; with the lock if it returns 0. */
#define HT_ACQUIRE(rank) HT_ATTRIBUTE(acquire_capability(ht_rank[rank]))
#define HT_ACQUIRE_SHARED(rank) HT_ATTRIBUTE(acquire_shared_capability(ht_rank[rank]))
#define HT_RELEASE(rank) HT_ATTRIBUTE(release_generic_capability(ht_rank[rank]))
#define HT_ACQUIRE_IF_0(rank) HT_ATTRIBUTE(try_acquire_capability(0, ht_rank[rank]))
/* The function returns the lock of this rank. */
#define HT_OF_RANK(rank) HT_ATTRIBUTE(lock_returned(ht_rank[rank]))
/* With a sentence that says why clang cannot follow. */
#define HT_NO_THREAD_SAFETY_ANALYSIS HT_ATTRIBUTE(no_thread_safety_analysis)
