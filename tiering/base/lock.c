/* SPDX-License-Identifier: Apache-2.0 */
/* lock.c - the order of locks, checked: what each thread holds, outermost first. Empty in other builds. */
#include "tiering/base/lock.h"

#ifdef HT_LOCK_CHECK

#include <stdio.h>
#include <stdlib.h>

static const char *const names[HT_LOCK_RANKS] = {
    [HT_LOCK_SIGNALS] = "signals",
    [HT_LOCK_PROGRESS] = "progress",
    [HT_LOCK_TALK] = "talk",
    [HT_LOCK_ROOTS] = "roots",
    [HT_LOCK_FEED] = "feed",
    [HT_LOCK_EVENT_NAMES] = "event names",
    [HT_LOCK_WORDS] = "optimizer words",
    [HT_LOCK_TX] = "transaction",
    [HT_LOCK_NAMES] = "names",
    [HT_LOCK_PARKED] = "parked",
    [HT_LOCK_OPTIM] = "optimizer",
    [HT_LOCK_SUPER] = "superblock",
    [HT_LOCK_STORE] = "store",
    [HT_LOCK_JOURNAL] = "journal",
    [HT_LOCK_STAGING] = "staging",
    [HT_LOCK_RINGS] = "rings",
    [HT_LOCK_CTL] = "hidden files",
    [HT_LOCK_JOBS] = "jobs",
    [HT_LOCK_OPENS] = "opens",
    [HT_LOCK_ATIME] = "access times",
    [HT_LOCK_IO_PROBE] = "ring probe",
    [HT_LOCK_DEV_RECORD] = "recorder",
    [HT_LOCK_RECORDER] = "recording",
    [HT_LOCK_DEV_FAIL] = "device faults",
    [HT_LOCK_DEV_RAM] = "memory device",
    [HT_LOCK_EVENT_SINK] = "event sink",
    [HT_LOCK_EVENT_LOG] = "event log",
    [HT_LOCK_KEPT] = "kept memory",
    [HT_LOCK_FAULTS] = "fault points",
};

/* No more than one of each rank. */
static _Thread_local struct {
    const void *lock;
    enum ht_lock_rank rank;
} held[HT_LOCK_RANKS];
static _Thread_local unsigned held_count;

static const char *name_of(enum ht_lock_rank rank)
{
    return rank > 0 && rank < HT_LOCK_RANKS && names[rank] ? names[rank] : "without a rank";
}

/* Neither ht_error nor anything else that might take a lock. */
static _Noreturn void violation(const char *what, enum ht_lock_rank rank, const char *beside)
{
    fprintf(stderr, "lock order: %s '%s'%s%s%s\n", what, name_of(rank), beside ? " while holding '" : "",
            beside ? beside : "", beside ? "'" : "");
    abort();
}

void ht_lock_taking(const void *lock, enum ht_lock_rank rank)
{
    if (rank <= 0 || rank >= HT_LOCK_RANKS)
        violation("taking a lock", rank, NULL);
    if (held_count && held[held_count - 1].rank >= rank)
        violation("taking", rank, name_of(held[held_count - 1].rank));
    held[held_count].lock = lock;
    held[held_count++].rank = rank;
}

/* It is given back and taken again: with later ones held, that would be out of order. */
void ht_lock_waiting(const void *lock, enum ht_lock_rank rank)
{
    if (!held_count || held[held_count - 1].lock != lock)
        violation("waiting with", rank, held_count ? name_of(held[held_count - 1].rank) : "nothing");
}

void ht_lock_giving(const void *lock, enum ht_lock_rank rank)
{
    unsigned i = held_count;

    while (i > 0 && held[i - 1].lock != lock)
        i--;
    if (i == 0)
        violation("giving back what this thread does not hold:", rank, NULL);
    for (; i < held_count; i++)
        held[i - 1] = held[i];
    held_count--;
}

#endif
