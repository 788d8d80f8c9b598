/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_priv.h - what the files of this folder share: the inside of a device, and the three
 * steps of a request that do not depend on where it goes (begin, end, record).
 *
 * Durability is counted in writes: `writes_ended` grows with each completed write before its
 * owner learns of it; a flush samples it before it is submitted and, once completed, raises
 * `writes_covered` to the sample. A write that ends while a flush runs is therefore never
 * taken as covered.
 *
 * Locks: ram_lock, flush_lock, flight_lock, fail_lock and record_lock are leaves: nothing is taken under them.
 */
#ifndef HITRAIN_TIERING_IO_IO_PRIV_H
#define HITRAIN_TIERING_IO_IO_PRIV_H

#include "tiering/io/dev.h"
#include "tiering/base/lock.h"
#include "tiering/base/mem.h"

#define HT_IO_OPS 4u
#define HT_FLUSHES 4u /* shared flushes of a device in flight at a time */

struct ht_recorder;

struct ht_fail_hook {
    unsigned left; /* passages until it fires; 0: disarmed */
    bool repeat;
    bool stalls; /* the device stops answering; the request does not fail */
};

struct ht_dev {
    char *name;
    int fd; /* -1: memory */
    bool rdonly, block;
    bool raw;    /* an NVMe namespace by its character device: takes commands */
    int hold_fd; /* of a raw one: its block device, open so that nobody else has it; or -1 */
    uint64_t size;
    uint32_t lba;
    uint32_t transfer_max,
        scattered_max;         /* bytes, whole blocks; requests above are cut; of memory in small pages; 0: no bound */
    uint32_t discard_max;      /* the same of discards, of a raw one; 0: it has none */
    uint32_t nsid;             /* raw */
    unsigned block_shift;      /* raw: log2 of lba */
    bool volatile_cache;       /* raw: has to be flushed */
    _Atomic bool unregistered; /* raw: the kernel refused a command, perhaps for its registered memory */
    int numa_node;

    uint8_t *ram, *ram_touched;
    struct ht_mutex ram_lock;   /* the bytes of both, unless there is a cache */
    struct ht_ram_cache *cache; /* or NULL */

    _Atomic bool stalled;

    _Atomic uint64_t reads, writes, flushes, discards, read_bytes, written_bytes, discarded_bytes;
    _Atomic uint64_t read_errors, write_errors, flush_errors, discard_errors;
    _Atomic unsigned writes_failed_in_row;
    _Atomic bool flush_failed; /* the last one did */
    _Atomic uint64_t writes_ended, writes_covered;
    struct ht_mutex flush_lock; /* what follows, up to flush_failures_then */
    pthread_cond_t flush_ended;
    uint64_t flush_begun;            /* shared flushes that began so far: their numbers */
    uint64_t flush_ends[HT_FLUSHES]; /* numbers of those in flight, or 0 */
    uint64_t flush_covers;           /* writes_ended when the last one began */
    uint64_t flush_failures_then;    /* flushes that had failed when it began */
    _Atomic unsigned in_flight;
    struct ht_mutex flight_lock;
    struct ht_io *oldest, *newest; /* in flight, through newer_ and older_; flight_lock */

    _Atomic bool fail_armed;
    struct ht_mutex fail_lock;
    struct ht_fail_hook fail[HT_IO_OPS]; /* fail_lock */

    _Atomic bool recording; /* changes under record_lock */
    struct ht_mutex record_lock;
    struct ht_recorder *recorder; /* record_lock */
};

/* A device with its locks and no content; name is copied. NULL: no memory. */
struct ht_dev *ht_dev_alloc(const char *name);

/*
 * Account for a request and check it. 0: perform it; else the error that it ends with, without
 * reaching the device. ht_io_end follows in either case.
 */
int ht_io_begin(struct ht_io *io);
/* performed: whether the request reached the device. Sets io->done last. */
void ht_io_end(struct ht_io *io, int result, bool performed);

/* raw.c: learn what a raw device is like; block: the number of its block device. 0, or -errno, which was told. */
int ht_raw_geometry(struct ht_dev *dev, dev_t block) HT_CHECK;
/* A flush of what has no volatile cache. */
bool ht_raw_ends_at_once(const struct ht_io *io);
/* A piece of a request to a raw device: as much as one command does. */
struct ht_raw_piece {
    uint32_t at, len;
    int registered; /* which piece of registered memory it is in, or -1 */
    uint8_t *range; /* HT_NVME_RANGE_BYTES that stay until it has ended */
};
struct io_uring_sqe;
/* sqe: twice as long as others. */
void ht_raw_prepare(struct io_uring_sqe *sqe, const struct ht_io *io, const struct ht_raw_piece *p);
/* What a completion means: len, or -errno; -EAGAIN: the same command again, a bounded number of times. */
int ht_raw_result(int res, uint32_t len, unsigned *tries);

/* health.c: a request is in flight, and not any more. */
void ht_flight_begin(struct ht_io *io);
void ht_flight_end(struct ht_io *io, int result);

/* How much of so many bytes, or of none, the next transfer moves. */
uint32_t ht_dev_piece(const struct ht_io *io, uint32_t left, bool huge);

/* node.c: the NUMA node of a block device, or HT_NUMA_OFF; and that of a folder of sysfs (below one called devices), for tests. */
int ht_node_of_block(dev_t number);
int ht_node_of_folder(const char *dir);

/* limits.c: learn transfer_max and scattered_max of a block device. */
void ht_dev_learn_limits(struct ht_dev *dev, dev_t number);
/* A number of the queue of a block device; 0: not told. */
uint64_t ht_queue_limit(dev_t number, const char *name);

/* ring.c: ht_ring_new in a mode that is no better than this. */
int ht_ring_new_in(enum ht_ring_mode best, unsigned depth, struct ht_ring **out_ring) HT_CHECK;
/* Take over the memory that is registered with another ring; its own is given up, so nothing may be in flight. False: none. */
struct ht_uring_memory;
struct io_uring;
bool ht_ring_clone_memory(struct ht_ring *ring, const struct io_uring *from, const struct ht_uring_memory *memory);
/* End a ring of another process, without waiting for anything. */
void ht_ring_discard(struct ht_ring *ring);

/* Move the bytes of a request on a RAM device. 0, or -EIO when it has no power. */
int ht_ram_perform(struct ht_io *io);

/* ram_cache.c: the volatile cache of a RAM device. The first five need ht_ram_cache_lock, which guards all of them. */
extern struct ht_mutex ht_ram_cache_lock;
/* The bytes of these sectors are about to change. */
void ht_ram_cache_note_write(struct ht_dev *dev, uint64_t offset, uint64_t bytes);
void ht_ram_cache_end_write(struct ht_dev *dev);
bool ht_ram_cache_is_off(const struct ht_dev *dev);
void ht_ram_cache_end_flush(struct ht_dev *dev);
void ht_ram_cache_free(struct ht_dev *dev);
/* A flush was submitted; error: the one that it will end with. Takes the lock. */
void ht_ram_cache_begin_flush(struct ht_dev *dev, int error);
/* Is a flush that was submitted not due to end yet? */
bool ht_ram_cache_delays(const struct ht_io *io);

/* flush.c: a shared flush ended. */
void ht_flush_end(const struct ht_io *io);

/* Log the first `bytes` of a write that ended, and count it: one step, so that flushes see both or neither. */
void ht_record_write(struct ht_io *io, uint32_t bytes);
void ht_record_flush(struct ht_io *io);
/* Stop a recorder that the test left running; what went wrong was logged when it did. */
void ht_recorder_end(struct ht_dev *dev);

#endif
