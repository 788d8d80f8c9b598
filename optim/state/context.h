/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context.h - what all folders of the optimizer share, and the lock that guards it.
 *
 * root.h and param.h bring this header, and with it what every file here uses: optim.h, lists, locks, objects
 * and transactions. A file includes the headers of what it works on.
 *
 * One mutex (optim.lock) guards roots, parameters and ranges, unless a field names another guard. I/O, kernels and
 * callbacks run without it. One condition (optim.changed) wakes all threads that wait for a state.
 *
 * A range:
 *
 *   IDLE --frozen wholly (gradient/flush.c), or in part at a partial boundary (step/boundary.c)--> QUEUED
 *   QUEUED --taken by a worker (step/update.c)--> RUNNING --applied--> DONE --boundary--> IDLE
 *                                                    --error--> FAILED --abort--> IDLE
 *   QUEUED --abort, stop, deletion--> IDLE
 *
 * With accumulation it goes round once for each gradient but the last: frozen wholly, added to its sum, IDLE.
 *
 * If the update needs the norm of all gradients, it waits for the boundary. When the last gradient of the range is
 * frozen wholly, a worker sums its squares, and the range is IDLE and measured: QUEUED and RUNNING only for that.
 *
 * A root:
 *
 *   gate      one of boundary, commit, abort, reset, creation of state, write of state at a time; held over I/O
 *   draining  a boundary or abort waits for the queue: threads that write or freeze a gradient wait
 *   hold      between a boundary and its publication: ranges are queued, none is taken
 *   alone     the same while one of its files is published alone
 *   async     a closer ends the step: it has the gate from the request to the publication (step/step.c)
 *   deciding  such a boundary has not queued its updates yet: reads of what they will change wait already
 *
 * Invariants:
 *  1. While a range is QUEUED or RUNNING no thread changes its frozen intervals. No thread writes the bytes under them.
 *  2. written and frozen of a range never overlap; bytes that a write is changing right now are in neither.
 *  3. pub of a parameter or root changes only inside a transaction, together with the record that says so.
 *  4. State objects are created and published under the gate, so a commit names all of a parameter's state or none.
 *  5. The sums of squares of a measured range are those of the bytes under its frozen intervals, or of its sum.
 *
 * Threads: workers (step/update.c), which also do the store's background work, others for models whose content comes
 * from the vault, the callers, closers (step/step.c),
 * and one helper (state/notify.c) that invalidates caches and wakes waiters for threads that may not. Lock order:
 * transaction > names > optimizer > store.
 */
#pragma once

#include "optim/optim.h"
#include "tiering/base/idtable.h"
#include "tiering/base/lock.h"
#include "tiering/base/quota.h"

enum { HT_THREADS_MAX = 64, HT_CLOSERS_MAX = 16, HT_AWAY_WORKERS_MAX = 4 };

typedef unsigned long long ull; /* in messages */

struct ht_kernels;
struct ht_codecs;
struct ht_delta_writer;

/* Of a root over its parameters: those that have state, and whose file is there. */
struct ht_totals {
    uint64_t parameters, state_bytes, param_bytes, elements;
};

struct ht_worker {
    struct ht_optim *o;
    pthread_t thread;
    bool started, away;            /* away: for roots in ht_optim.away */
    bool is_spare;                 /* it helps roots that no other one works on (state/queue.c) */
    struct ht_delta_writer *delta; /* owned; NULL: has noted no changes yet (step/delta.c) */
    int numa_index; /* place of the NUMA node that it should run on, then that it runs on; HT_NUMA_INDEX_ANY */
};

/* One that is started when it is needed, and joined at the end. */
struct ht_opt_thread {
    pthread_t thread;
    bool started;
};

struct ht_optim {
    struct ht_store *store;
    struct ht_optim_hooks hooks;
    struct ht_mutex lock;
    pthread_cond_t changed;   /* the state changed that some thread waits for */
    pthread_cond_t work;      /* for workers: ready is not empty, stopping, or nobody serves */
    pthread_cond_t spare;     /* for the spare worker: the same, while no other one is idle */
    pthread_cond_t notify;    /* for the helper */
    pthread_cond_t away_work; /* for those of away */
    pthread_cond_t close;     /* for closers: closings is not empty, or stopping */
    bool started;
    bool stopping HT_GUARDED_BY(HT_LOCK_OPTIM);
    const struct ht_kernels *kernels;
    const struct ht_codecs *codecs;

    struct ht_list roots, params; /* by seq */
    struct ht_id_table roots_by_id, params_by_oid;
    struct ht_id_table states_by_oid; /* struct ht_state_link */
    HT_GUARDED_BY(HT_LOCK_OPTIM) struct {
        uint64_t next_seq;
        uint64_t meta_bytes; /* of roots, parameters and ranges */
        uint64_t delta_heap_bytes;
        unsigned deltas_lost;     /* that are kept no more, and open */
        struct ht_quota accounts; /* bytes of struct ht_range_own */
        uint64_t waiting_bytes;   /* of all roots */
        uint64_t last_step_number, last_claim;
        uint64_t words_changes; /* of roots and of the words that amend theirs */
        uint32_t form_changes;  /* those that may say in how many bits state is kept */
    };
    bool redo_checked;       /* param.redo_place says how many logged steps change the parameter (fsck) */
    struct ht_list problems; /* found when the log had been read (state/check.c) */
    struct ht_list ready;    /* roots with ranges to take, in turn */
    struct ht_list away;     /* those among them that wait for the vault, which holds none of the workers of others */
    HT_GUARDED_BY(HT_LOCK_OPTIM) struct {
        unsigned idle;           /* workers that wait for a range */
        unsigned aways;          /* workers of `away`, started at the first need */
        bool lends, serves;      /* workers do the store's background work; one is at it */
        uint64_t served_ns;      /* when one was at it last */
        uint64_t unit_period_ns; /* after so long a unit of background work comes before the next range */
    };
    uint64_t backlog_bytes_max; /* of one root: beyond it writers of its gradients wait */

    struct ht_list invals; /* parameters, by ticket */
    HT_GUARDED_BY(HT_LOCK_OPTIM) struct {
        uint64_t inval_issued, inval_done;
        struct ht_waiter *wakes; /* chain of waiters that the helper wakes */
    };
    struct ht_opt_thread helper HT_GUARDED_BY(HT_LOCK_OPTIM);

    struct ht_list closings; /* roots whose step waits for a closer */
    pthread_t closer[HT_CLOSERS_MAX];
    unsigned closers HT_GUARDED_BY(HT_LOCK_OPTIM), closers_idle HT_GUARDED_BY(HT_LOCK_OPTIM);

    struct ht_opt_thread redo_writer HT_GUARDED_BY(HT_LOCK_OPTIM); /* redo/redo_log.c */
    pthread_cond_t redo_work;
    struct ht_opt_thread recovery HT_GUARDED_BY(HT_LOCK_OPTIM); /* step/life.c */
    bool no_replay;                                             /* fixed at the start */
    bool finishing HT_GUARDED_BY(HT_LOCK_OPTIM);      /* the mount ends: a replay does not wait for space any more */
    unsigned recoveries HT_GUARDED_BY(HT_LOCK_OPTIM); /* roots that still recover */
    uint64_t replay_room_bytes HT_GUARDED_BY(HT_LOCK_OPTIM); /* set aside for their gradients (state/redo_space.c) */

    unsigned threads;
    struct ht_worker worker[HT_THREADS_MAX + 1]; /* the last one is the spare */
    struct ht_worker away_worker[HT_AWAY_WORKERS_MAX];
};

HT_MUTEX_OF(ht_optim_lock, struct ht_optim, lock, HT_LOCK_OPTIM)

static inline void lock(struct ht_optim *o) HT_ACQUIRE(HT_LOCK_OPTIM)
{
    ht_mutex_lock(ht_optim_lock(o));
}

static inline void unlock(struct ht_optim *o) HT_RELEASE(HT_LOCK_OPTIM)
{
    ht_mutex_unlock(ht_optim_lock(o));
}

static inline void wait_changed(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_cond_wait(&o->changed, ht_optim_lock(o));
}

static inline void notify_changed(struct ht_optim *o)
{
    pthread_cond_broadcast(&o->changed);
}

/* All of these bytes, or an error. */
static inline int ht_opt_read_all(struct ht_obj *obj, uint64_t off, void *buf, size_t len)
{
    ssize_t n = ht_obj_read(obj, off, buf, len);

    return n < 0 ? (int)n : (size_t)n == len ? 0 : -EIO;
}

static inline int ht_opt_write_all(struct ht_obj *obj, uint64_t off, const void *buf, size_t len)
{
    ssize_t n = ht_obj_write(obj, off, buf, len);

    return n < 0 ? (int)n : (size_t)n == len ? 0 : -EIO;
}
