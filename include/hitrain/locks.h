/* SPDX-License-Identifier: Apache-2.0 */
/*
 * locks.h - every lock of the daemon, in the one order in which they may be taken.
 *
 * While a thread holds a lock it may take those further down, and no other: so threads never wait in a circle. Builds
 * with HT_LOCK_CHECK (those with sanitizers, and LOCKS=1) end the process at the first lock taken out of order, whether
 * or not a thread waits. A new lock is one row here; tiering/base/lock.h has the types.
 *
 * Chunks are locked by their state under the store's lock (tiering/object/chunk.c): in (object, index) order,
 * before the store's lock and never together with a wait for staging buffers.
 */
#pragma once

/*
 * LOCK(rank, the name in messages). From STAGING on they are leaves: under them a thread takes only locks further down.
 */
#define HT_LOCKS(LOCK)                                                                                               \
    LOCK(HT_LOCK_SIGNALS, "signals")   /* fs/daemon/signals: the receiver of a signal, while the mount appears */    \
    LOCK(HT_LOCK_PROGRESS, "progress") /* base: messages while something long goes on */                             \
    LOCK(HT_LOCK_CTL_SESSION, "ctl session")  /* fs/ctl: session of one open .hitrain/ctl, over a command */         \
    LOCK(HT_LOCK_ROOTS, "roots")              /* fs/ctl: one change of the set of model roots at a time */           \
    LOCK(HT_LOCK_COLD, "cold")                /* fs/ctl: places of a cold model, or the end of its attribute */      \
    LOCK(HT_LOCK_FEED, "feed")                /* fs/ctl: one open .hitrain/events or .hitrain/trace */               \
    LOCK(HT_LOCK_TOPK, "sparse gradient")     /* optim: one open sparse gradient, over its flush */                  \
    LOCK(HT_LOCK_EVENT_NAMES, "event names")  /* fs/ctl: whether names and optimizer may be used to find a path */   \
    LOCK(HT_LOCK_WORDS, "optimizer words")    /* fs/ctl: words that amend a model root's; readers and writers */     \
    LOCK(HT_LOCK_TX, "transaction")           /* store: the transaction */                                           \
    LOCK(HT_LOCK_NAMES, "names")              /* fs/ns: names and inodes; readers and writers */                     \
    LOCK(HT_LOCK_PARKED, "parked")            /* fs/fuse: requests that wait for an update */                        \
    LOCK(HT_LOCK_OPTIM, "optimizer")          /* optim: roots, parameters, ranges */                                 \
    LOCK(HT_LOCK_SUPER, "superblock")         /* store: the superblock, over its writing */                          \
    LOCK(HT_LOCK_STORE, "store")              /* store: objects, chunks, space */                                    \
    LOCK(HT_LOCK_JOURNAL, "journal")          /* journal */                                                          \
    LOCK(HT_LOCK_STAGING, "staging")          /* cache: free staging buffers */                                      \
    LOCK(HT_LOCK_ENCODERS, "encoders")        /* data: encoders that no thread uses, and whether writers use them */ \
    LOCK(HT_LOCK_DECODERS, "decoders")        /* data: decoders that no thread uses */                               \
    LOCK(HT_LOCK_SCRUB, "scrub")              /* engine: figures of the scrub, and its end */                        \
    LOCK(HT_LOCK_ENGINE, "engine")            /* engine: when the rows of a lane are due */                          \
    LOCK(HT_LOCK_CTL, "hidden files")         /* fs/ctl: open hidden files, the last error of each file */           \
    LOCK(HT_LOCK_SLEEPER, "sleeper")          /* fs/ctl: one thread that waits for an update */                      \
    LOCK(HT_LOCK_JOBS, "jobs")                /* fs/fuse: requests for threads that may wait */                      \
    LOCK(HT_LOCK_WORKERS, "workers")          /* fs/fuse: threads that take requests */                              \
    LOCK(HT_LOCK_PASSTHROUGH, "passthrough")  /* fs/fuse: files whose pages the kernel has */                        \
    LOCK(HT_LOCK_OPENS, "opens")              /* fs/fuse: open files and directories */                              \
    LOCK(HT_LOCK_ATIME, "access times")       /* fs/fuse: the mount's options for access times */                    \
    LOCK(HT_LOCK_RINGS, "rings")              /* io: which ring is whose */                                          \
    LOCK(HT_LOCK_IO_PROBE, "ring probe")      /* io: the kernel's abilities, while they are probed */                \
    LOCK(HT_LOCK_DEV_FLUSH, "device flush")   /* io: the flush of a device that is in flight */                      \
    LOCK(HT_LOCK_DEV_FLIGHT, "device flight") /* io: requests in flight on a device */                               \
    LOCK(HT_LOCK_DEV_RAM, "memory device")    /* io: bytes of a device in memory */                                  \
    LOCK(HT_LOCK_REMOTE, "vault")             /* remote: gets from a vault, and whether it is silent */              \
    LOCK(HT_LOCK_EVENT_SINK, "event sink")    /* base: the receiver of events, over its call */                      \
    LOCK(HT_LOCK_EVENT_LOG, "event log")      /* fs/ctl: the last events */                                          \
    LOCK(HT_LOCK_NUMA, "nodes")               /* sys: libnuma, which remembers the processors of each node */        \
    LOCK(HT_LOCK_FAULTS, "fault points")      /* base: armed fault points */

#define HT_LOCK_RANK(rank, name) rank,
/* 0 is no rank. */
enum ht_lock_rank { HT_LOCK_UNRANKED, HT_LOCKS(HT_LOCK_RANK) HT_LOCK_RANKS };
#undef HT_LOCK_RANK
