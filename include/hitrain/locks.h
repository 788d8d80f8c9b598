/* SPDX-License-Identifier: Apache-2.0 */
/*
 * locks.h - every lock of the daemon, in the one order in which they may be taken.
 *
 * While a thread holds a lock it may take those further down, and no other: so threads never wait in a circle. Builds
 * with HT_LOCK_CHECK (those with sanitizers, and LOCKS=1) end the process at the first lock taken out of order, whether
 * or not a thread waits. A new lock is one row here; tiering/base/lock.h has the types.
 *
 * Chunks are locked by their state under the store's lock (tiering/object/chunk_lock.c): in (object, index) order,
 * before the store's lock and never together with a wait for staging buffers.
 */
#ifndef HITRAIN_LOCKS_H
#define HITRAIN_LOCKS_H

enum ht_lock_rank {
    HT_LOCK_SIGNALS = 1, /* fs/daemon/signals: the receiver of a signal, while the mount appears */
    HT_LOCK_PROGRESS,    /* base: messages while something long goes on */
    HT_LOCK_CTL_SESSION, /* fs/ctl: session of one open .hitrain/ctl, over a command */
    HT_LOCK_ROOTS,       /* fs/ctl: one change of the set of model roots at a time */
    HT_LOCK_FEED,        /* fs/ctl: one open .hitrain/events */
    HT_LOCK_TOPK,        /* optim: one open sparse gradient, over its flush */
    HT_LOCK_EVENT_NAMES, /* fs/ctl: whether names and optimizer may be used to find a path */
    HT_LOCK_WORDS,       /* fs/ctl: words that amend a model root's, over a change of one; readers and writers */
    HT_LOCK_TX,          /* store: the transaction */
    HT_LOCK_NAMES,       /* fs/ns: names and inodes; readers and writers */
    HT_LOCK_PARKED,      /* fs/fuse: requests that wait for an update */
    HT_LOCK_OPTIM,       /* optim: roots, parameters, ranges */
    HT_LOCK_SUPER,       /* store: the superblock, over its writing */
    HT_LOCK_STORE,       /* store: objects, chunks, space */
    HT_LOCK_JOURNAL,     /* journal */
    /* Leaves: under them a thread takes only locks further down. */
    HT_LOCK_STAGING,     /* cache: free staging buffers */
    HT_LOCK_SCRUB,       /* engine: figures of the scrub, and its end */
    HT_LOCK_ENGINE,      /* engine: when the rows of a lane are due */
    HT_LOCK_CTL,         /* fs/ctl: open hidden files, the last error of each file */
    HT_LOCK_JOBS,        /* fs/fuse: requests for threads that may wait */
    HT_LOCK_WORKERS,     /* fs/fuse: threads that take requests */
    HT_LOCK_PASSTHROUGH, /* fs/fuse: files whose pages the kernel has */
    HT_LOCK_OPENS,       /* fs/fuse: open files and directories */
    HT_LOCK_ATIME,       /* fs/fuse: the mount's options for access times */
    HT_LOCK_RINGS,       /* io: which ring is whose */
    HT_LOCK_IO_PROBE,    /* io: the kernel's abilities, while they are probed */
    HT_LOCK_DEV_FLUSH,   /* io: the flush of a device that is in flight */
    HT_LOCK_DEV_FLIGHT,  /* io: requests in flight on a device */
    HT_LOCK_DEV_RAM,     /* io: bytes of a device in memory */
    HT_LOCK_EVENT_SINK,  /* base: the receiver of events, over its call */
    HT_LOCK_EVENT_LOG,   /* fs/ctl: the last events */
    HT_LOCK_FAULTS,      /* base: armed fault points */
    HT_LOCK_RANKS
};

#endif
