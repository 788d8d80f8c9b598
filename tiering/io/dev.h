/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dev.h - devices and the I/O on them.
 *
 * A device is a block device, a regular file (both through io_uring with
 * O_DIRECT), an NVMe namespace by its character device (through io_uring
 * with NVMe commands; exercised in emulation) or memory. All I/O goes through a ring: a ring belongs
 * to one thread (rings.h) and holds requests in flight. A request completes
 * when it was transferred in full or failed: short transfers are continued by
 * the ring, EINTR and EAGAIN are retried.
 *
 * A request may have any length. The ring cuts it into pieces that the device takes as a whole, and submits them
 * together: the kernel would refuse to start a larger one at once, and give it to a thread that waits for it. Files
 * need no cutting: the file system cuts them along its extents, which the ring does not know.
 *
 * Order between requests in flight is undefined. A write is durable after a
 * flush of its device that was submitted after the write had completed.
 *
 * Threads: devices may be shared by rings of different threads; a ring may not.
 */
#pragma once

#include <sys/uio.h>
#include "tiering/base/list.h"
#include "tiering/io/rate.h"

struct ht_dev;
struct ht_ring;

enum ht_io_class {
    HT_IO_URGENT,     /* of a thread that says nothing else */
    HT_IO_PLANNED,    /* readahead, prefetch, writeback */
    HT_IO_BACKGROUND, /* scrub, log checkpoint */
    HT_IO_CLASSES
};

/* A piece of memory, for registration. */
struct ht_pinned_area {
    void *base;
    size_t bytes;
    bool huge; /* mostly in huge pages: then a transfer is one piece for the device, however large */
};

enum ht_dev_flags {
    HT_DEV_RDONLY = 1, /* open for reading only; a file may have several readers, a block device has one */
    HT_DEV_NOWAIT = 2, /* -EBUSY at once when another process holds it, instead of waiting up to 30 s */
    HT_DEV_QUIET = 4,  /* do not print on stderr that it is waiting */
};

/*
 * Opens a block device, regular file or NVMe namespace (/dev/ngXnY) and holds it exclusively: O_EXCL for block devices,
 * flock for files, both for namespaces. Other names of its bytes are held, too, as far as the kernel knows them
 * (below.h). The hold is on the descriptor that every ring registers, so it lasts until the
 * last I/O of a killed process has ended. If the device is held, waits up to 30 s and logs that. If its holder's mount
 * is in use, refuses at once.
 * -EBUSY: still held. -EINVAL: none of these, or O_DIRECT impossible.
 * Every failure is logged with its remedy; -EBUSY with the name of the holder.
 */
int ht_dev_open(const char *path, int flags, struct ht_dev **out_dev) HT_MUST_CHECK;
/*
 * A device of memory, for work on a copy of a log. lba: logical block size in bytes (512 or 4096). Requests that are
 * not aligned to it (offset, length, buffer) fail with -EINVAL as O_DIRECT does.
 */
int ht_dev_open_ram(uint64_t bytes, uint32_t lba, struct ht_dev **out_dev) HT_MUST_CHECK;
/* The content of a device of memory: as many bytes as its size. */
void *ht_dev_ram_data(struct ht_dev *dev);
/*
 * The first offset from here on, at most end, that may have written bytes; bytes before it read as zeros. A file with
 * holes knows; on all other devices it is offset itself.
 */
uint64_t ht_dev_next_data(const struct ht_dev *dev, uint64_t offset, uint64_t end);
void ht_dev_close(struct ht_dev *dev);

uint64_t ht_dev_size(const struct ht_dev *dev);
const char *ht_dev_name(const struct ht_dev *dev); /* path, or "ram" */
/* What of a device is constant from its opening on. */
struct ht_dev_facts {
    bool rdonly;
    uint32_t lba; /* logical block size, bytes */
    /*
     * The most that one transfer moves from and to memory in huge pages, and other memory: whole blocks; requests above
     * are cut. 0: no bound.
     */
    uint32_t transfer_max, scattered_max;
    int numa_node; /* or HT_NUMA_OFF */
    /*
     * Locks of this machine exclude all other writers: the device is memory, or all its bytes lie in files on local
     * file systems, which it holds.
     */
    bool local;
    /*
     * Its file system had room for all its bytes when the device was opened: it is a file without holes. A discard
     * gives room to other files there, and a later write may fail.
     */
    bool reserved;
    uint64_t place; /* the same for all names of the same bytes that this kernel knows, as long as it runs */
};
const struct ht_dev_facts *ht_dev_facts(const struct ht_dev *dev);
/* From now on each write and discard fails with -EROFS. Those in flight go on. Any thread. */
void ht_dev_stop_writes(struct ht_dev *dev);

struct ht_dev_counters {
    uint64_t reads, writes, flushes, discards, read_bytes, written_bytes, discarded_bytes;
    uint64_t read_errors, write_errors, flush_errors, discard_errors;
};
void ht_dev_counters(const struct ht_dev *dev, struct ht_dev_counters *out);
/* Bytes and flushes of these devices together. NULL: none. */
struct ht_dev_counters ht_devs_totals(struct ht_dev *const dev[], unsigned count);
/*
 * The health of a device since it was opened. FAILING: three writes in a row failed, or the last flush did.
 * NOT_ANSWERING: a request is older than the caller's bound. Words of the interface: ht_health_word.
 */
enum ht_health { HT_HEALTH_OK, HT_HEALTH_ERRORS, HT_HEALTH_FAILING, HT_HEALTH_NOT_ANSWERING, HT_HEALTH_MISSING };
enum ht_health ht_dev_health(struct ht_dev *dev, uint64_t answer_ns_max);
const char *ht_health_word(enum ht_health health);
/* Age of the oldest request in flight; 0 when there is none. */
uint64_t ht_dev_oldest_ns(struct ht_dev *dev);
/*
 * How fast it served one direction lately: bytes over the time with such requests in flight, and the time that one
 * takes. Any thread; it takes a leaf lock.
 */
enum ht_direction { HT_DIRECTION_READ, HT_DIRECTION_WRITE, HT_DIRECTIONS };
void ht_dev_rate(struct ht_dev *dev, enum ht_direction direction, struct ht_dev_rate *out);
/*
 * Of requests of at least HT_RATE_LARGE_BYTES alone: small ones, as the log has them one by one, take time and show no
 * bandwidth.
 */
void ht_dev_large_totals(struct ht_dev *dev, enum ht_direction direction, struct ht_rate_totals *out);
/* More is in flight than it writes in HT_DEV_LOADED_NS, or, while that is not known, than HT_GATE_UNKNOWN_BYTES. */
#define HT_DEV_LOADED_NS UINT64_C(100000000)
bool ht_dev_is_loaded(struct ht_dev *dev);
/* The requests in flight, oldest first: what, where, how old, and the thread that waits for it. */
struct ht_dump;
void ht_dev_dump(struct ht_dev *dev, struct ht_dump *d);
/* True when a write has completed after the caller of the last successful ht_ring_flush came. */
bool ht_dev_needs_flush(const struct ht_dev *dev);
/*
 * How many flushes of the device have failed. Unflushed writes from before a failure are in an unknown state for good:
 * a flush that succeeds later proves nothing. So a write is durable when a flush that began after it has succeeded, and
 * the number is still that from before the write.
 */
uint64_t ht_dev_flush_failures(const struct ht_dev *dev);

enum ht_io_op {
    HT_IO_READ,
    HT_IO_WRITE,
    HT_IO_FLUSH,
    /* these bytes are not needed any more: until they are written again, reads return anything. -EOPNOTSUPP: cannot */
    HT_IO_DISCARD,
};
struct ht_io {
    enum ht_io_op op;
    struct ht_dev *dev;
    uint64_t offset; /* bytes, aligned to the logical block */
    void *buf;       /* aligned to the logical block; NULL for a discard */
    uint32_t len;    /* bytes, a multiple of the logical block; 0 for a flush */
    int result;      /* out, once done: 0 or -errno */
    bool done;       /* out */
    /* the ring's own */
    uint32_t moved_;
    unsigned pieces_;
    int error_;
    uint64_t seen_;   /* an observer's */
    uint64_t shared_; /* number of a flush that others may wait for, or 0 */
    struct ht_io *next_;
    uint64_t began_ns_;
    bool rated_, large_;        /* counts for the rate of its direction; for that of large requests */
    enum ht_io_class io_class_; /* of the thread that began it */
    int thread_;                /* that submitted it */
    struct ht_list flight_;
};

/* The kernel's abilities for rings, determined once. Without them everything works the same, slower. */
enum ht_ring_mode {
    HT_RING_PLAIN,
    HT_RING_COOPERATIVE, /* completions do not interrupt a thread */
    HT_RING_DEFERRED,    /* and are worked off when their thread waits for them; needs that a ring has one thread */
};
struct ht_io_features {
    enum ht_ring_mode mode;
    bool files, memory; /* can be registered */
    bool shared_memory; /* once for all rings */
    bool commands;      /* of NVMe can be passed on */
};
int ht_io_features(struct ht_io_features *out) HT_MUST_CHECK;

/*
 * A ring of the calling thread, which alone may use it, in a mode that is at most this good. depth: pieces of requests
 * in flight at most (submission beyond it waits for completions).
 */
int ht_ring_new(enum ht_ring_mode best, unsigned depth, struct ht_ring **out_ring) HT_MUST_CHECK;
void ht_ring_free(struct ht_ring *ring);
/*
 * Registers memory for fixed-buffer I/O. Optional: failure is silent (slower, correct). Up to 8 areas, before the first
 * request. The memory must stay mapped as it is until the ring is freed.
 */
void ht_ring_register(struct ht_ring *ring, const struct ht_pinned_area *areas, unsigned count);
/* The same for devices (NULL: none), once; they are closed after the ring was freed. */
void ht_ring_register_devices(struct ht_ring *ring, struct ht_dev *const devs[], unsigned count);
/* Starts a request; the io must stay valid until done. Cannot fail: errors come as results. */
void ht_ring_submit(struct ht_ring *ring, struct ht_io *io);
/* Pushes submitted requests to the device without waiting. */
void ht_ring_kick(struct ht_ring *ring);
/* The same once it is worth a system call; the rest goes with the next push or wait. */
void ht_ring_offer(struct ht_ring *ring);
/* Waits until this request is done (others may complete before); returns io->result. */
int ht_ring_wait(struct ht_ring *ring, struct ht_io *io) HT_EXCLUDES(HT_LOCK_STORE);
/* Pieces that a request still waits for, at least 1; 0: it is done. */
unsigned ht_io_pieces_left(const struct ht_io *io);
/* Takes what has been completed, or waits until so many pieces are, of any requests in flight. */
void ht_ring_wait_some(struct ht_ring *ring, unsigned pieces) HT_EXCLUDES(HT_LOCK_STORE);
/* Waits until nothing is in flight. */
void ht_ring_drain(struct ht_ring *ring);
unsigned ht_ring_in_flight(const struct ht_ring *ring);

/*
 * Flushes devices, all at once: earlier writes are durable then. Callers share flushes (flush.c). count is at most
 * HT_DEVICES_MAX. out_results: 0 or -errno for each device; a flush that failed for another caller during the call
 * counts.
 */
void ht_ring_flush(struct ht_ring *ring, struct ht_dev *const devs[], unsigned count, int out_results[])
    HT_EXCLUDES(HT_LOCK_STORE);

/* Submits all and waits for all; returns the first error, or 0. */
int ht_ring_run(struct ht_ring *ring, struct ht_io *ios, unsigned count) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/*
 * Begins a request and waits for it, on the thread's own ring (rings.h). offset and len are multiples of the logical
 * block, buf may have any address (an unaligned one costs a copy).
 */
int ht_dev_read(struct ht_dev *dev, uint64_t offset, void *buf, size_t len) HT_MUST_CHECK;
int ht_dev_write(struct ht_dev *dev, uint64_t offset, const void *buf, size_t len) HT_MUST_CHECK;
int ht_dev_flush(struct ht_dev *dev) HT_MUST_CHECK;
/*
 * The same; -EIO also if the device has had more flush failures than `failures`: for writes that were made after the
 * caller read that count.
 */
int ht_dev_flush_since(struct ht_dev *dev, uint64_t failures) HT_MUST_CHECK;
int ht_dev_discard(struct ht_dev *dev, uint64_t offset, uint64_t len) HT_MUST_CHECK;
