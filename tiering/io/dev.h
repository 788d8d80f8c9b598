/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dev.h - devices and the I/O on them.
 *
 * A device is a block device, a regular file (both through io_uring with
 * O_DIRECT), an NVMe namespace by its character device (through io_uring
 * with NVMe commands; exercised in emulation) or memory (for tests). All I/O goes through a ring: a ring belongs
 * to one thread (rings.h) and holds requests in flight. A request completes
 * when it was transferred in full or failed: short transfers are continued by
 * the ring, EINTR and EAGAIN are retried.
 *
 * A request may have any length. The ring cuts it into pieces of which the device takes each as a whole, and submits them
 * together: a larger one would be refused to the ring and given to a thread of the kernel that waits for it. Files need no
 * cutting: what is below them cuts as its extents lie, which nobody here knows.
 *
 * Order between requests in flight is undefined. A write is durable after a
 * flush of its device that was submitted after the write had completed.
 *
 * Threads: devices may be shared by rings of different threads; a ring may not.
 */
#ifndef HITRAIN_TIERING_IO_DEV_H
#define HITRAIN_TIERING_IO_DEV_H

#include <sys/uio.h>
#include "tiering/base/base.h"

struct ht_dev;
struct ht_ring;

/* A piece of memory, for registration. */
struct ht_pinned_area {
    void *base;
    size_t bytes;
    bool huge; /* mostly in huge pages: then a transfer is one piece for the device, however large */
};

enum ht_dev_flags {
    HT_DEV_RDONLY = 1, /* open for reading only; a file may have several readers, a block device has one */
    HT_DEV_NOWAIT = 2, /* -EBUSY at once when held by somebody else, instead of waiting up to 30 s */
    HT_DEV_QUIET = 4,  /* do not tell on stderr that it is waiting */
};

/*
 * Open a block device, regular file or NVMe namespace (/dev/ngXnY) and hold it exclusively: O_EXCL for block devices,
 * flock for files, both for namespaces, on the descriptor that every ring registers, so that the hold
 * lasts until the last I/O of a killed process has ended. Waits up to 30 s, saying so, when it is held, unless by a
 * process whose mount is in use: that is refused at once.
 * -EBUSY: still held. -EINVAL: none of these, or O_DIRECT impossible.
 * Every failure is logged with its remedy; -EBUSY with the name of the holder.
 */
int ht_dev_open(const char *path, int flags, struct ht_dev **out_dev) HT_CHECK;
/*
 * A device of memory, for tests. lba: logical block size in bytes (512 or 4096): requests
 * that are not aligned to it (offset, length, buffer) fail with -EINVAL as O_DIRECT does.
 */
int ht_dev_open_ram(uint64_t bytes, uint32_t lba, struct ht_dev **out_dev) HT_CHECK;
/* The content of a RAM device: dev_size bytes, for tests to inspect, replace and corrupt. */
void *ht_dev_ram_data(struct ht_dev *dev);
/*
 * The first offset from here on, at most end, where bytes may be that were ever written; what is before it reads as zeros. A file with holes
 * knows; of all others it is offset itself.
 */
uint64_t ht_dev_next_data(const struct ht_dev *dev, uint64_t offset, uint64_t end);
/* A RAM device's note of what was written: one byte for each HT_BLOCK_BYTES, set by writes; tests read and clear it. */
uint8_t *ht_dev_ram_touched(struct ht_dev *dev);
/* Let a RAM device be attached to this NUMA node. */
void ht_dev_ram_set_node(struct ht_dev *dev, int node);
/*
 * Give a RAM device a volatile cache: what is written can be read at once, and is on the medium when a flush that began afterwards has ended
 * well, which takes flush_us. A flush that fails (ht_dev_fail) loses from the medium all that was written and not flushed.
 */
int ht_dev_ram_set_cache(struct ht_dev *dev, uint32_t flush_us) HT_CHECK;
/*
 * Cut the power of devices with caches, at one moment: their media keep any 512-byte sectors of what was not flushed, as seed says, and all
 * later requests fail. On again, a device shows what its medium has.
 */
void ht_dev_ram_power_off(struct ht_dev *const devs[], unsigned count, uint64_t seed);
void ht_dev_ram_power_on(struct ht_dev *dev);
/* When the n-th write from now (1 = next) has ended, the flush of another caller fails at once. */
void ht_dev_ram_void_after(struct ht_dev *dev, unsigned nth);
void ht_dev_close(struct ht_dev *dev);

uint64_t ht_dev_size(const struct ht_dev *dev);
uint32_t ht_dev_lba(const struct ht_dev *dev); /* logical block size, bytes */
/* The most that one transfer moves from and to memory in huge pages, and other memory; 0: no bound. */
uint32_t ht_dev_transfer_max(const struct ht_dev *dev, bool huge);
bool ht_dev_rdonly(const struct ht_dev *dev);
const char *ht_dev_name(const struct ht_dev *dev); /* path, or "ram" */
int ht_dev_numa_node(const struct ht_dev *dev);    /* or HT_NUMA_OFF */

struct ht_dev_counters {
    uint64_t reads, writes, flushes, discards, read_bytes, written_bytes, discarded_bytes;
    uint64_t read_errors, write_errors, flush_errors, discard_errors;
};
void ht_dev_counters(const struct ht_dev *dev, struct ht_dev_counters *out);
/*
 * How a device does, by what it did since it was opened. FAILING: three writes in a row failed, or the last flush did. NOT_ANSWERING: a
 * request is older than the caller's bound. Words of the interface: ht_health_word.
 */
enum ht_health { HT_HEALTH_OK, HT_HEALTH_ERRORS, HT_HEALTH_FAILING, HT_HEALTH_NOT_ANSWERING, HT_HEALTH_MISSING };
enum ht_health ht_dev_health(struct ht_dev *dev, uint64_t answer_ns_max);
const char *ht_health_word(enum ht_health health);
/* Age of the oldest request in flight; 0 when there is none. */
uint64_t ht_dev_oldest_ns(struct ht_dev *dev);
/* True when a write has completed since the last flush that covered it was submitted. */
bool ht_dev_needs_flush(const struct ht_dev *dev);
/*
 * How many flushes of the device have failed. What was written before a failure, and not flushed before it, is unknown for good: a flush
 * that succeeds later says nothing about it. So a write is durable when a flush that began after it has succeeded, and the number
 * is what it was before the write.
 */
uint64_t ht_dev_flush_failures(const struct ht_dev *dev);

/*
 * Test hooks of any device. fail: the n-th operation of a kind from now (1 = next) fails with -EIO and does not
 * reach the device, repeat: all after it; 0 disarms. What may happen to those that do has fault points (tiering/base/fault.h).
 */
enum ht_io_op {
    HT_IO_READ,
    HT_IO_WRITE,
    HT_IO_FLUSH,
    HT_IO_DISCARD, /* nobody needs these bytes any more: until they are written again, reading gives anything. -EOPNOTSUPP: cannot */
};
void ht_dev_fail(struct ht_dev *dev, enum ht_io_op op, unsigned nth, bool repeat);

/* A device of memory stops answering, or answers again: requests wait meanwhile. */
void ht_dev_stall(struct ht_dev *dev, bool stalled);
/* It stops answering when the n-th operation of a kind from now begins, that one included; 0 disarms. Replaces ht_dev_fail of that kind. */
void ht_dev_stall_at(struct ht_dev *dev, enum ht_io_op op, unsigned nth);
bool ht_dev_is_stalled(const struct ht_dev *dev);

/*
 * Record every completed write, flush and mark of a device, in the dm-log-writes format
 * (Linux Documentation/admin-guide/device-mapper/log-writes.rst). One recorder per device; started while nothing
 * is in flight. Sectors are of 512 bytes; a mark has at most 480.
 *
 * Discards are not recorded. Writes are logged when they completed. A FLUSH entry makes every write before it durable, so it is logged only for
 * a flush during which no write completed. Otherwise the writes that this flush covered are logged again with
 * the FUA flag, and after them, again, the writes it did not cover that overlap these. A reader keeps the rule of
 * the format: a FUA write is durable itself, and no older write undoes it.
 */
int ht_recorder_start(struct ht_dev *dev, const char *path) HT_CHECK;
/*
 * Record dev together with one that is recorded already: in one order, at addresses behind those of the devices that are
 * recorded together so far. -ENOENT: that one is not recorded. Stopping one stops all.
 */
int ht_recorder_join(struct ht_dev *dev, struct ht_dev *recorded) HT_CHECK;
int ht_recorder_mark(struct ht_dev *dev, const char *text) HT_CHECK;
int ht_recorder_stop(struct ht_dev *dev) HT_CHECK;

struct ht_io {
    enum ht_io_op op;
    struct ht_dev *dev;
    uint64_t offset; /* bytes, aligned to the logical block */
    void *buf;       /* aligned to the logical block; NULL for a discard */
    uint32_t len;    /* bytes, a multiple of the logical block; 0 for a flush */
    int result;      /* out, once done: 0 or -errno */
    bool done;       /* out */
    void *user;      /* the caller's */
    /* the ring's own */
    uint32_t moved_;
    unsigned pieces_;
    int error_;
    uint64_t covers_;
    uint64_t shared_; /* number of a flush that others may wait for, or 0 */
    struct ht_io *next_;
    uint64_t began_ns_;
    struct ht_io *older_, *newer_;
};

/* What the kernel can do for rings, asked once. Without any of it all works the same, slower. */
enum ht_ring_mode {
    HT_RING_PLAIN,
    HT_RING_COOPERATIVE, /* completions do not interrupt anybody */
    HT_RING_DEFERRED,    /* and are worked off when their thread waits for them; needs that a ring has one thread */
};
struct ht_io_features {
    enum ht_ring_mode mode;
    bool files, memory; /* can be registered */
    bool shared_memory; /* once for all rings */
    bool commands;      /* of NVMe can be passed on */
};
int ht_io_features(struct ht_io_features *out) HT_CHECK;
const char *ht_ring_mode_word(enum ht_ring_mode mode);

/*
 * A ring of the calling thread, which alone may use it. depth: pieces of requests in flight at most (submission beyond it waits for
 * completions).
 */
int ht_ring_new(unsigned depth, struct ht_ring **out_ring) HT_CHECK;
void ht_ring_free(struct ht_ring *ring);
/*
 * Register memory for fixed-buffer I/O; optional, failure is silent (slower, correct). Up to 8 areas, before the
 * first request. The memory must stay mapped as it is until the ring is freed.
 */
void ht_ring_register(struct ht_ring *ring, const struct ht_pinned_area *areas, unsigned count);
/* The same for devices (NULL: none), once; they are closed after the ring was freed. */
void ht_ring_register_devices(struct ht_ring *ring, struct ht_dev *const devs[], unsigned count);
/* Start a request; the io must stay valid until done. Cannot fail: errors come as results. */
void ht_ring_submit(struct ht_ring *ring, struct ht_io *io);
/* Push what was submitted to the device without waiting. */
void ht_ring_kick(struct ht_ring *ring);
/* The same once it is worth a system call; what is left goes with the next push or wait. */
void ht_ring_offer(struct ht_ring *ring);
/* Wait until this request is done (others may complete meanwhile); returns io->result. */
int ht_ring_wait(struct ht_ring *ring, struct ht_io *io);
/* Wait until nothing is in flight. */
void ht_ring_drain(struct ht_ring *ring);
unsigned ht_ring_in_flight(const struct ht_ring *ring);

/*
 * Flush devices, all at once: what was written to them before the call is durable then. Callers share flushes (flush.c). count is at most
 * HT_DEVICES_MAX. out_results: 0 or -errno for each device; a flush that failed for another caller meanwhile counts.
 */
void ht_ring_flush(struct ht_ring *ring, struct ht_dev *const devs[], unsigned count, int out_results[]);

/* Submit all and wait for all; the first error, or 0. */
int ht_ring_run(struct ht_ring *ring, struct ht_io *ios, unsigned count) HT_CHECK;

/*
 * Begin and wait, on the thread's own ring (rings.h). offset and len are multiples of the logical block, buf may have any
 * address (an unaligned one costs a copy).
 */
int ht_dev_read(struct ht_dev *dev, uint64_t offset, void *buf, size_t len) HT_CHECK;
int ht_dev_write(struct ht_dev *dev, uint64_t offset, const void *buf, size_t len) HT_CHECK;
int ht_dev_flush(struct ht_dev *dev) HT_CHECK;
/* The same; -EIO also when a flush has failed since there were so many failures: for what was written after they were counted. */
int ht_dev_flush_since(struct ht_dev *dev, uint64_t failures) HT_CHECK;
int ht_dev_discard(struct ht_dev *dev, uint64_t offset, uint64_t len) HT_CHECK;

#endif
