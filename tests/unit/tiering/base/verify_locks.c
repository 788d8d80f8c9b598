/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify_locks.c - the order of all locks, and how long each is held, in builds that check it (tiering/base/lock.h).
 * Each thread has a list of the locks that it holds, outermost first.
 */
#include "tiering/base/lock.h"

#include <stdatomic.h>

#include "tiering/base/base.h"

#ifdef HT_LOCK_CHECK

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define NAME_OF(rank, name) [rank] = name,
static const char *const names[HT_LOCK_RANKS] = {HT_LOCKS(NAME_OF)};
#undef NAME_OF

/* No more than one of each rank. */
static _Thread_local struct {
    const void *lock;
    enum ht_lock_rank rank;
    uint64_t since_ns, steps, since_block; /* of this hold */
} held[HT_LOCK_RANKS];
static _Thread_local unsigned held_count;

static _Atomic bool measuring;
static struct {
    _Atomic uint64_t ns, steps, blocks;
} longest[HT_LOCK_RANKS];

static const char *name_of(enum ht_lock_rank rank)
{
    return rank > 0 && rank < HT_LOCK_RANKS && names[rank] ? names[rank] : "without a rank";
}

/* Calls neither ht_error nor anything else that might take a lock. */
static _Noreturn void violation(const char *what, enum ht_lock_rank rank, const char *beside)
{
    fprintf(stderr, "lock order: %s '%s'%s%s%s\n", what, name_of(rank), beside ? " while holding '" : "",
            beside ? beside : "", beside ? "'" : "");
    abort();
}

/* ------------------------------------------------------------------- holds */

static uint64_t processor_ns(void)
{
    struct timespec ts;

    if (!measuring)
        return 0;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (uint64_t)ts.tv_sec * 1000000000 + (uint64_t)ts.tv_nsec;
}

static void raise_to(_Atomic uint64_t *most, uint64_t value)
{
    uint64_t was = *most;

    while (value > was && !atomic_compare_exchange_weak(most, &was, value))
        ;
}

static _Thread_local uint64_t blocks; /* that this thread ran through */

#ifdef HT_LOCK_BLOCKS
/* The compiler calls this function in each basic block. */
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void)
{
    blocks++;
}
#endif

static void begin_hold(unsigned i)
{
    held[i].since_block = blocks;
    held[i].since_ns = processor_ns();
    held[i].steps = 0;
}

static void end_hold(unsigned i)
{
    uint64_t now_ns = held[i].since_ns ? processor_ns() : 0;

    if (now_ns)
        raise_to(&longest[held[i].rank].ns, now_ns - held[i].since_ns);
    raise_to(&longest[held[i].rank].steps, held[i].steps);
    raise_to(&longest[held[i].rank].blocks, blocks - held[i].since_block);
}

void ht_lock_measure(bool on)
{
    measuring = on;
}

struct ht_lock_hold ht_lock_longest(enum ht_lock_rank rank)
{
    return (struct ht_lock_hold){.ns = atomic_exchange(&longest[rank].ns, 0),
                                 .steps = atomic_exchange(&longest[rank].steps, 0),
                                 .blocks = atomic_exchange(&longest[rank].blocks, 0)};
}

void ht_lock_step(void)
{
    for (unsigned i = 0; i < held_count;
         i++) /* who waits for an outer lock waits for the steps under an inner one, too */
        held[i].steps++;
}

/* ------------------------------------------------------------------- order */

void ht_lock_taking(const void *lock, enum ht_lock_rank rank)
{
    if (rank <= 0 || rank >= HT_LOCK_RANKS)
        violation("taking a lock", rank, NULL);
    if (held_count && held[held_count - 1].rank >= rank)
        violation("taking", rank, name_of(held[held_count - 1].rank));
    held[held_count].lock = lock;
    held[held_count].rank = rank;
    begin_hold(held_count++);
}

/* The wait releases and takes the lock again: with later ones held, that would be out of order. */
void ht_lock_waiting(const void *lock, enum ht_lock_rank rank)
{
    if (!held_count || held[held_count - 1].lock != lock)
        violation("waiting with", rank, held_count ? name_of(held[held_count - 1].rank) : "nothing");
    end_hold(held_count - 1);
    begin_hold(held_count - 1);
}

void ht_lock_none_held(const char *what)
{
    for (unsigned i = 0; i < held_count; i++) {
        if (held[i].rank == HT_LOCK_CTL_SESSION) /* it keeps out nobody but its own client */
            continue;
        fprintf(stderr, "lock order: %s while holding '%s'\n", what, name_of(held[i].rank));
        abort();
    }
}

void ht_lock_giving(const void *lock, enum ht_lock_rank rank)
{
    unsigned i = held_count;

    while (i > 0 && held[i - 1].lock != lock)
        i--;
    if (i == 0)
        violation("giving back what this thread does not hold:", rank, NULL);
    end_hold(i - 1);
    for (; i < held_count; i++)
        held[i - 1] = held[i];
    held_count--;
}

/* ------------------------------------------------------------------ delays */

enum { DELAY_NS_MAX = 3000000, BETWEEN_NS_MAX = 30000000 };

static bool delays(void)
{
    static _Atomic int known = -1; /* threads that find it at once find the same */

    if (known < 0)
        known = getenv("HITRAIN_LOCK_DELAYS") != NULL;
    return known;
}

static uint64_t random_up_to(uint64_t max)
{
    static _Atomic uint64_t threads;
    static _Thread_local uint64_t rnd;

    if (!rnd)
        rnd = 88172645463325252ull * (2 * threads++ + 1);
    rnd ^= rnd << 13;
    rnd ^= rnd >> 7;
    rnd ^= rnd << 17;
    return (rnd >> 20) % max;
}

void ht_lock_given(void)
{
    static _Thread_local uint64_t next_ns;
    uint64_t now_ns = delays() ? ht_now_ns() : 0;

    if (now_ns < next_ns || !now_ns)
        return;
    int saved = errno;
    ht_sleep_ns(random_up_to(DELAY_NS_MAX));
    errno = saved;
    next_ns = now_ns + random_up_to(BETWEEN_NS_MAX);
}

#else

void ht_lock_measure(bool on)
{
}

struct ht_lock_hold ht_lock_longest(enum ht_lock_rank rank)
{
    return (struct ht_lock_hold){0};
}

#endif
