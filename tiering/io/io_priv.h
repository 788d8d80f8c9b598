/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_priv.h - the common parts of this folder: the inside of a device, and the two steps of every request, for any
 * kind of device (begin, end).
 *
 * Durability is counted in writes: `writes_ended` grows with each completed write before its owner sees the completion;
 * the caller of a flush samples it first and, once the flush counts (flush.c), raises `writes_covered` to the sample. A
 * write that ends while a flush runs is therefore never taken as covered.
 *
 * Locks: ram_lock, flush_lock and flight_lock are leaves: a thread that holds one takes no other.
 */
#pragma once

#include "tiering/io/gate.h"
#include "tiering/io/nvme.h"
#include "tiering/base/lock.h"
#include "tiering/sys/mem.h"

#define HT_IO_OPS 4u
#define HT_FLUSHES 4u /* shared flushes of a device in flight at a time */

/*
 * An observer sees each request of its device. It may hold the request, fail it, or serve it. No program has one. Tests
 * record what reaches a device, inject failures, and give a device of memory a cache that loses power
 * (tests/support/dev.h). The rings' threads call the functions, without locks.
 */
struct ht_observer {
    /* A valid request begins. 0, or the error with which it ends without reaching the device. */
    int (*begin)(struct ht_observer *o, struct ht_io *io);
    /* Must a request that the ring serves itself wait? The ring asks again. */
    bool (*holds)(struct ht_observer *o, const struct ht_io *io);
    /* Moves the bytes in place of a device of memory. 0 or -errno. */
    int (*perform)(struct ht_observer *o, struct ht_io *io);
    /* A request that reached the device ended; its owner does not know yet. moved: bytes that were moved. */
    void (*end)(struct ht_observer *o, struct ht_io *io, int result, uint32_t moved);
    /* The device closes. */
    void (*close)(struct ht_observer *o);
};

struct ht_dev {
    char *name;
    int fd; /* -1: memory */
    bool block;
    bool raw;        /* an NVMe namespace by its character device: takes commands */
    int hold_fd;     /* of a raw device: its block device, open so that no other process has it; or -1 */
    int below_fd[4]; /* what loop devices show, held, too */
    unsigned below_count;
    struct ht_dev_facts facts;
    _Atomic bool stopped; /* takes no write any more */
    uint64_t size;
    uint32_t discard_max;      /* as transfer_max, of discards of a raw one; 0: it has none */
    uint32_t nsid;             /* raw */
    unsigned block_shift;      /* raw: log2 of lba */
    bool volatile_cache;       /* raw: has to be flushed */
    _Atomic bool unregistered; /* raw: the kernel refused a command, perhaps for its registered memory */

    uint8_t *ram;
    struct ht_mutex ram_lock; /* its bytes, unless there is an observer */

    struct ht_observer *_Atomic observer; /* or NULL */

    _Atomic uint64_t done[HT_IO_OPS], bytes[HT_IO_OPS], errors[HT_IO_OPS];
    _Atomic unsigned writes_failed_in_row;
    _Atomic bool flush_failed; /* the last one did */
    _Atomic uint64_t writes_ended, writes_covered;
    struct ht_mutex flush_lock;
    pthread_cond_t flush_ended;
    HT_GUARDED_BY(HT_LOCK_DEV_FLUSH) struct {
        uint64_t flush_begun;            /* shared flushes that began so far: their numbers */
        uint64_t flush_ends[HT_FLUSHES]; /* numbers of flushes in flight, or 0 */
        uint64_t flush_covers;           /* writes_ended when the last one began */
        uint64_t flush_failures_then;    /* flushes that had failed when it began */
    };
    _Atomic unsigned in_flight;
    struct ht_mutex flight_lock;
    HT_GUARDED_BY(HT_LOCK_DEV_FLIGHT) struct {
        struct ht_list flight; /* requests in flight, oldest first */
        struct ht_rate rate[HT_DIRECTIONS], large_rate[HT_DIRECTIONS];
        struct ht_gate_state gate_state; /* but for what depends on the request (gate.c) */
        uint64_t permitted_bytes[HT_DIRECTIONS];
        struct ht_gate_stats gate_stats;
    };
    _Atomic unsigned permits;      /* of lower classes */
    _Atomic unsigned gate_waiters; /* threads; changed with flight_lock held */
    pthread_cond_t gate_changed;   /* a permit came back, or what the threads bring is wanted */
};

HT_MUTEX_OF(ht_dev_flush_lock, struct ht_dev, flush_lock, HT_LOCK_DEV_FLUSH)
HT_MUTEX_OF(ht_dev_flight_lock, struct ht_dev, flight_lock, HT_LOCK_DEV_FLIGHT)

/* Ends all holds. Nothing is in flight. */
void ht_dev_let_go(struct ht_dev *dev);
/* A device with its locks and no content; name is copied. NULL: no memory. */
struct ht_dev *ht_dev_alloc(const char *name);

/*
 * Account for a request and check it. 0: perform it; else the error that it ends with, without
 * reaching the device. ht_io_end follows in either case.
 */
int ht_io_begin(struct ht_io *io);
/* performed: whether the request reached the device. Sets io->done last. */
void ht_io_end(struct ht_io *io, int result, bool performed);

/*
 * raw.c: learns the geometry of a raw device; block: the number of its block device. 0, or -errno, which was reported.
 */
int ht_raw_geometry(struct ht_dev *dev, dev_t block) HT_MUST_CHECK;
/* A flush of a device without a volatile cache. */
bool ht_raw_ends_at_once(const struct ht_io *io);
/* What a segment of a request to a raw device, which is one command, needs until it has ended. */
struct ht_raw_segment {
    unsigned tries;                     /* after these the controller wanted another one */
    bool unregistered;                  /* the kernel refused it once, perhaps for its registered memory */
    uint8_t range[HT_NVME_RANGE_BYTES]; /* of a discard */
};
struct io_uring_sqe;
/* sqe: twice as long as others. registered: which segment of registered memory it is in, or -1. */
void ht_raw_prepare(struct io_uring_sqe *sqe, const struct ht_io *io, uint32_t at, uint32_t len, int registered,
                    struct ht_raw_segment *r);
/*
 * The meaning of a completion in the terms of other devices, whose results it returns as they are: len, or -errno;
 * -EINTR, -EAGAIN: the same command again, a bounded number of times.
 */
int ht_raw_result(const struct ht_io *io, int res, uint32_t len, struct ht_raw_segment *r);

/*
 * sysfs.c: the NUMA node of a block device, or HT_NUMA_OFF; and that of a folder of sysfs (below one called devices),
 * so many devices below the one that was asked for.
 */
int ht_node_of_block(dev_t number);
int ht_node_of_folder(const char *dir, unsigned depth);

/* Learns transfer_max and scattered_max of a block device. */
void ht_dev_learn_limits(struct ht_dev *dev, dev_t number);
/* A number of the queue of a block device; 0: not known. */
uint64_t ht_queue_limit(dev_t number, const char *name);

/*
 * ring.c: takes over the memory that is registered with another ring; its own is given up, so nothing may be in flight.
 * False: it has none.
 */
struct ht_uring_memory;
struct io_uring;
bool ht_ring_clone_memory(struct ht_ring *ring, const struct io_uring *from, const struct ht_uring_memory *memory);
/* Ends a ring of another process, without waiting for anything. */
void ht_ring_discard(struct ht_ring *ring);

/* Moves the bytes of a request on a device of memory. 0, or the error of its observer. */
int ht_ram_perform(struct ht_io *io);

/* flush.c: a shared flush ended. */
void ht_flush_end(const struct ht_io *io);
