/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring.c - requests in flight.
 *
 * A ring belongs to the thread that made it, for good; rings.c gives each thread one.
 *
 * Life of a request, which is one segment, or several where its device takes no transfer of that size:
 *
 *   submit --check fails, hook fires, RAM device--> local list --kick, wait, drain--> done
 *      `--------> segments --kick, wait--> kernel --CQEs, all moved or error--> done
 *                  ^                      |
 *                  `--short, EINTR, EAGAIN
 *
 * Invariants:
 *   1. in_flight = local_count + segments that own an SQE or are in the kernel <= depth.
 *   2. The submission queue has at least depth entries, so that there is always an SQE to be had;
 *      the completion queue is larger, so that it cannot overflow.
 *   3. Write and flush are never ordered by the kernel (IOSQE_IO_DRAIN): callers wait in between.
 *   4. A request ends with its last segment; its uncut rest counts as one segment.
 *
 * The local list is served in an order that callers cannot rely on, because a device owes none
 * to requests that are in flight together; it is the same in every run.
 */
#include "tiering/base/activity.h"
#include "tiering/base/fault.h"
#include "tiering/base/log.h"
#include "tiering/io/io_priv.h"
#include "tiering/io/uring.h"

#include <fcntl.h>
#include <hitrain/limits.h>
#include <linux/fs.h>
#include <sys/ioctl.h>

#define DEPTH_MAX 4096u
#define ERROR_NAP_NS 200000
#define CQE_BATCH 32u
#define OFFER_BYTES (256u << 10)
#define ORDER_SEED 0x9e3779b97f4a7c15u

/* A part of a request, as much as its device does at once: the bytes that are still to be moved. */
struct segment {
    struct ht_io *io;
    uint32_t at, len;
    struct ht_raw_segment raw;
    struct segment *next_free;
};

struct ht_ring {
    struct io_uring uring;
    pthread_t owner;
    unsigned depth, in_flight;
    uint64_t unsent_bytes; /* lower bound, since the last submission to the kernel */
    struct ht_io *local;   /* through next_; a result that is not 0 is the error it ends with */
    unsigned local_count;
    uint64_t order;                                /* state of the generator that mixes the local list */
    struct ht_uring_memory memory;                 /* registered */
    const struct ht_dev *file[2 * HT_DEVICES_MAX]; /* the same; a place is the kernel's number */
    unsigned file_count;
    struct segment *free;
    struct segment segment[]; /* depth */
};

int ht_ring_new(enum ht_ring_mode best, unsigned depth, struct ht_ring **out_ring)
{
    struct ht_ring *ring;

    if (depth == 0 || depth > DEPTH_MAX)
        return -EINVAL;
    ring = calloc(1, sizeof(*ring) + depth * sizeof(ring->segment[0]));
    if (!ring)
        return -ENOMEM;
    ring->owner = pthread_self();
    ring->depth = depth;
    for (unsigned i = depth; i-- > 0;) {
        ring->segment[i].next_free = ring->free;
        ring->free = &ring->segment[i];
    }
    int rc = ht_uring_open(&ring->uring, depth, best);
    if (rc != 0) {
        free(ring);
        return rc;
    }
    *out_ring = ring;
    return 0;
}

static void close_ring(struct ht_ring *ring, bool settle)
{
    ht_uring_close(&ring->uring, settle);
    free(ring);
}

void ht_ring_free(struct ht_ring *ring)
{
    if (!ring)
        return;
    if (ring->in_flight > 0)
        ht_ring_drain(ring);
    close_ring(ring, pthread_equal(ring->owner, pthread_self()));
}

void ht_ring_discard(struct ht_ring *ring)
{
    close_ring(ring, false);
}

void ht_ring_register(struct ht_ring *ring, const struct ht_pinned_area *areas, unsigned count)
{
    if (ring->memory.count == 0)
        (void)ht_uring_register(&ring->uring, areas, count, &ring->memory);
}

bool ht_ring_clone_memory(struct ht_ring *ring, const struct io_uring *from, const struct ht_uring_memory *memory)
{
    ring->memory.count = 0;
    if (!ht_uring_clone(&ring->uring, from))
        return false;
    ring->memory = *memory;
    return true;
}

void ht_ring_register_devices(struct ht_ring *ring, struct ht_dev *const devs[], unsigned count)
{
    int fds[HT_ARRAY_SIZE(ring->file)];
    unsigned n = 0;

    for (unsigned i = 0; i < count; i++) {
        if (!devs[i] || devs[i]->fd < 0 || n + 2 > HT_ARRAY_SIZE(fds))
            continue;
        ring->file[n] = devs[i];
        fds[n++] = devs[i]->fd;
        /* no request names it: it holds the device while requests of a killed process last */
        if (devs[i]->hold_fd >= 0)
            fds[n++] = devs[i]->hold_fd;
    }
    if (n > 0 && ht_fault(HT_FAULT_IO_FILES) == 0 && io_uring_register_files(&ring->uring, fds, n) == 0)
        ring->file_count = n;
}

static void fatal(const char *what, int err)
{
    ht_error("io_uring: %s: %s; requests in flight cannot be accounted for, giving up", what, strerror(-err));
    abort();
}

/* ------------------------------------------------------------------ segments */

/* For schedulers of the kernel that have classes; others take no notice. 0: that of the thread. */
static uint16_t priority_of(enum ht_io_class io_class)
{
    enum { BEST_EFFORT = 2, IDLE = 3, SHIFT = 13, LOWEST = 7 };
    static const uint16_t of[HT_IO_CLASSES] = {
        [HT_IO_PLANNED] = BEST_EFFORT << SHIFT | LOWEST, [HT_IO_BACKGROUND] = IDLE << SHIFT};

    return of[io_class];
}

/* fixed: which segment of registered memory it is in, or -1. */
static void prepare_transfer(struct io_uring_sqe *sqe, const struct segment *p, int fixed)
{
    const struct ht_io *io = p->io;
    char *buf = (char *)io->buf + p->at;
    uint64_t offset = io->offset + p->at;

    if (io->op == HT_IO_READ && fixed >= 0)
        io_uring_prep_read_fixed(sqe, io->dev->fd, buf, p->len, offset, fixed);
    else if (io->op == HT_IO_READ)
        io_uring_prep_read(sqe, io->dev->fd, buf, p->len, offset);
    else if (fixed >= 0)
        io_uring_prep_write_fixed(sqe, io->dev->fd, buf, p->len, offset, fixed);
    else
        io_uring_prep_write(sqe, io->dev->fd, buf, p->len, offset);
    sqe->ioprio = priority_of(io->io_class_);
}

/* Names a registered device by its place: the kernel need not look up, hold and release the file. */
static void name_device(const struct ht_ring *ring, struct io_uring_sqe *sqe, const struct ht_dev *dev)
{
    for (unsigned i = 0; i < ring->file_count; i++) {
        if (ring->file[i] != dev)
            continue;
        sqe->fd = (int)i;
        sqe->flags |= IOSQE_FIXED_FILE;
        return;
    }
}

/* Asks the kernel for the whole rest, by the kind of the device. */
static void prepare_segment(const struct ht_ring *ring, struct io_uring_sqe *sqe, struct segment *p)
{
    const struct ht_io *io = p->io;
    bool moves = io->op == HT_IO_READ || io->op == HT_IO_WRITE;
    int fixed = moves ? ht_uring_lookup(&ring->memory, (uintptr_t)io->buf + p->at, p->len) : -1;

    if (io->dev->raw)
        ht_raw_prepare(sqe, io, p->at, p->len, fixed, &p->raw);
    else if (io->op == HT_IO_DISCARD)
        io_uring_prep_fallocate(sqe, io->dev->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                (off_t)(io->offset + p->at), p->len);
    else if (io->op == HT_IO_FLUSH)
        io_uring_prep_fsync(sqe, io->dev->fd, IORING_FSYNC_DATASYNC);
    else
        prepare_transfer(sqe, p, fixed);
    name_device(ring, sqe, io->dev);
}

/* Hands the rest of a segment to the kernel, at the next submission. */
static void push_segment(struct ht_ring *ring, struct segment *p)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);

    if (!sqe)
        fatal("no free submission entry", -ENOSPC);
    prepare_segment(ring, sqe, p);
    io_uring_sqe_set_data(sqe, p);
    ring->unsent_bytes += p->len;
}

static void begin_segment(struct ht_ring *ring, struct ht_io *io, uint32_t at, uint32_t len)
{
    struct segment *p = ring->free;

    ring->free = p->next_free;
    ring->in_flight++;
    *p = (struct segment){.io = io, .at = at, .len = len};
    io->pieces_++;
    push_segment(ring, p);
}

static void push_local(struct ht_ring *ring, struct ht_io *io)
{
    struct ht_io **at = &ring->local;

    if (!*at) /* the order does not depend on earlier calls of the thread */
        ring->order = ORDER_SEED;
    /* xorshift: first or second place */
    ring->order ^= ring->order << 13;
    ring->order ^= ring->order >> 7;
    ring->order ^= ring->order << 17;
    if (*at && (ring->order & 1) != 0)
        at = &(*at)->next_;
    io->next_ = *at;
    *at = io;
    ring->local_count++;
}

/* The device's result of a request that it has performed. */
static int reported(const struct ht_io *io)
{
    static const enum ht_fault_point points[] = {HT_FAULT_IO_READ, HT_FAULT_IO_WRITE, HT_FAULT_IO_FLUSH};
    int rc = io->op == HT_IO_DISCARD ? 0 : ht_fault(points[io->op]);

    return rc == 0 && io->op == HT_IO_WRITE ? ht_fault(HT_FAULT_IO_FULL) : rc;
}

static void end(struct ht_io *io, int result, bool performed)
{
    if (performed && result == 0)
        result = reported(io);
    ht_io_end(io, result, performed);
}

/* If a request has an error, only the part before the first failure is known to be moved. */
static void piece_gone(struct ht_io *io, int result, uint32_t moved)
{
    if (result != 0) {
        io->moved_ = moved < io->moved_ ? moved : io->moved_;
        io->error_ = io->error_ != 0 ? io->error_ : result;
    }
    if (--io->pieces_ == 0)
        end(io, io->error_, true);
}

static void end_segment(struct ht_ring *ring, struct segment *p, int result)
{
    struct ht_io *io = p->io;
    uint32_t moved = p->at;

    ring->in_flight--;
    p->next_free = ring->free;
    ring->free = p;
    piece_gone(io, result, moved);
}

/* Memory, and requests that io_uring has no operation for, or that need none. */
static bool served_here(const struct ht_io *io)
{
    return io->dev->ram || ht_raw_ends_at_once(io) || (io->op == HT_IO_DISCARD && io->dev->block);
}

static int perform_here(struct ht_io *io)
{
    uint64_t range[2] = {io->offset, io->len};

    if (io->dev->ram)
        return ht_ram_perform(io);
    if (io->op == HT_IO_DISCARD)
        return ioctl(io->dev->fd, BLKDISCARD, range) == 0 ? 0 : -errno;
    return 0;
}

static bool is_held(const struct ht_io *io)
{
    struct ht_observer *o = io->dev->observer;

    return (o && o->holds(o, io)) || ht_fault(HT_FAULT_IO_SILENT) != 0;
}

/* Requests that are held stay in the list. True: something was served. */
static bool serve_local(struct ht_ring *ring)
{
    struct ht_io **at = &ring->local;
    bool served = false;

    while (*at) {
        struct ht_io *io = *at;
        int rc = io->result;
        if (rc == 0 && is_held(io)) {
            at = &io->next_;
            continue;
        }
        *at = io->next_;
        ring->local_count--;
        if (rc == 0)
            rc = perform_here(io);
        ring->in_flight--;
        end(io, rc, rc == 0);
        served = true;
    }
    return served;
}

static uint32_t half_of(const struct ht_dev *dev, uint32_t bytes)
{
    uint32_t half = bytes / 2 / dev->facts.lba * dev->facts.lba;

    return half > 0 ? half : bytes;
}

/* The kernel reports a block device that went away, or shrank, as full; a thin volume may really be full. */
static int true_error(const struct ht_dev *dev, int err)
{
    uint64_t bytes;

    if (err != -ENOSPC || !dev->block || (ioctl(dev->fd, BLKGETSIZE64, &bytes) == 0 && bytes >= dev->size))
        return err;
    return -EIO;
}

/* How much of a transfer was moved, as far as tests allow it. */
static uint32_t moved_of(const struct ht_io *io, int res)
{
    uint32_t moved = (uint32_t)res;

    if (ht_fault(HT_FAULT_IO_SHORT) != 0)
        moved = half_of(io->dev, moved);
    if (ht_fault(HT_FAULT_IO_TORN) != 0 && moved > 0)
        moved--;
    return moved;
}

/*
 * A flush of a file is not repeated: fsync returns the error of a write once, whichever it is (EAGAIN, too), and the
 * next one would return 0. An NVMe command is: its status says that it may be.
 *
 * 0: it is done; 1: submit the rest; -EAGAIN: submit it later; else the error it ends with.
 */
static int complete_segment(struct segment *p, int res)
{
    const struct ht_dev *dev = p->io->dev;

    res = ht_raw_result(p->io, res, p->len, &p->raw);
    if (p->io->op == HT_IO_DISCARD && res == 0)
        res = (int)p->len;
    if (ht_fault(HT_FAULT_IO_AGAIN) != 0)
        res = -EAGAIN;
    if (p->io->op == HT_IO_FLUSH && !dev->raw && (res == -EINTR || res == -EAGAIN))
        res = -EIO;
    if (res == -EINTR)
        return 1;
    if (res == -EAGAIN)
        return res;
    if (p->io->op == HT_IO_FLUSH || res < 0)
        return res < 0 ? true_error(dev, res) : 0;
    uint32_t moved = moved_of(p->io, res);
    p->at += moved;
    p->len -= moved;
    if (p->len == 0)
        return 0;
    return moved == 0 || moved % dev->facts.lba != 0 ? -EIO : 1; /* -EIO: the device became shorter than it was */
}

static void handle_cqe(struct ht_ring *ring, struct segment *p, int res)
{
    int rc = complete_segment(p, res);

    if (rc == -EAGAIN)
        ht_sleep_ns(ERROR_NAP_NS);
    if (rc == -EAGAIN || rc > 0)
        push_segment(ring, p);
    else
        end_segment(ring, p, rc);
}

static unsigned take_completions(struct ht_ring *ring)
{
    struct io_uring_cqe *cqes[CQE_BATCH];
    unsigned n, taken = 0;

    while ((n = io_uring_peek_batch_cqe(&ring->uring, cqes, CQE_BATCH)) > 0) {
        for (unsigned i = 0; i < n; i++)
            handle_cqe(ring, io_uring_cqe_get_data(cqes[i]), cqes[i]->res);
        io_uring_cq_advance(&ring->uring, n);
        taken += n;
    }
    return taken;
}

/* ------------------------------------------------------------------ submit */

/* Short of memory or interrupted: the next wait submits again. */
static bool passes(int err)
{
    return err == -EAGAIN || err == -EBUSY || err == -ENOMEM || err == -EINTR;
}

/*
 * The kernel refuses a submission. The part that it has not taken is known: that fails, and the queue is empty again.
 * Requests that it took earlier go on.
 */
static void give_up_unsent(struct ht_ring *ring, const char *what, int err)
{
    struct io_uring_sq *sq = &ring->uring.sq;
    unsigned head = *sq->khead, count = sq->sqe_tail - head;
    unsigned shift = (ring->uring.flags & IORING_SETUP_SQE128) != 0 ? 1 : 0;

    if (count == 0)
        fatal(what, err);
    ht_error("io_uring: %s: %s; %u requests fail", what, strerror(-err), count);
    sq->sqe_head = sq->sqe_tail = head;
    io_uring_smp_store_release(sq->ktail, head);
    for (unsigned i = 0; i < count; i++) {
        const struct io_uring_sqe *sqe = &sq->sqes[((head + i) & sq->ring_mask) << shift];
        end_segment(ring, (struct segment *)(uintptr_t)sqe->user_data, -EIO);
    }
}

static void submit_uring(struct ht_ring *ring)
{
    ring->unsent_bytes = 0;
    if (io_uring_sq_ready(&ring->uring) == 0)
        return;
    int rc = ht_fault(HT_FAULT_IO_SUBMIT);
    if (rc == 0)
        rc = ht_fault(HT_FAULT_IO_REFUSED);
    if (rc == 0)
        rc = io_uring_submit(&ring->uring);
    if (rc < 0 && !passes(rc))
        give_up_unsent(ring, "submit", rc);
}

/* One call submits, and waits for so many completions. */
static void enter(struct ht_ring *ring, unsigned wait)
{
    int rc = ht_fault(HT_FAULT_IO_WAIT);

    ring->unsent_bytes = 0;
    if (rc == 0 && io_uring_sq_ready(&ring->uring) > 0)
        rc = ht_fault(HT_FAULT_IO_REFUSED);
    if (rc == 0)
        rc = io_uring_submit_and_wait(&ring->uring, wait);
    if (rc >= 0 || rc == -EINTR)
        return;
    if (!passes(rc))
        give_up_unsent(ring, "submit and wait", rc);
    else if (io_uring_cq_ready(&ring->uring) == 0)
        ht_sleep_ns(ERROR_NAP_NS); /* the kernel is short of memory: requests in flight will end */
}

/*
 * Makes progress: takes at least one completion when anything was in flight, and several if there is nothing else to
 * wait for.
 */
static void reap(struct ht_ring *ring, unsigned wait)
{
    if (ring->local) {
        submit_uring(ring);
        if (!serve_local(ring))
            ht_sleep_ns(ERROR_NAP_NS);
        return;
    }
    if (io_uring_sq_ready(&ring->uring) == 0 && take_completions(ring) > 0)
        return;
    while (ring->in_flight > 0) {
        enter(ring, ht_min_u64(wait, ring->in_flight));
        if (take_completions(ring) > 0)
            return;
    }
}

/* How much of so many bytes, or of none, the next one has. They are of one size, so that none is a small rest. */
static uint32_t segment_bytes(const struct ht_io *io, uint32_t left, bool huge)
{
    const struct ht_dev *dev = io->dev;
    uint32_t moves_max = huge ? dev->facts.transfer_max : dev->facts.scattered_max;
    uint32_t max = io->op == HT_IO_DISCARD ? dev->discard_max : moves_max;

    if (max == 0 || left <= max)
        return left;
    return (uint32_t)ht_round_up(ht_div_up(left, ht_div_up(left, max)), dev->facts.lba);
}

static void cut_segments(struct ht_ring *ring, struct ht_io *io)
{
    bool huge = ht_uring_is_huge(&ring->memory, (uintptr_t)io->buf);
    uint32_t at = 0;

    io->moved_ = io->len;
    io->pieces_ = 1;
    do {
        uint32_t len = segment_bytes(io, io->len - at, huge);
        while (ring->in_flight >= ring->depth)
            reap(ring, 1);
        begin_segment(ring, io, at, len);
        at += len;
    } while (at < io->len);
    piece_gone(io, 0, 0);
}

void ht_ring_submit(struct ht_ring *ring, struct ht_io *io)
{
    assert(pthread_equal(ring->owner, pthread_self()));
    while (ring->in_flight >= ring->depth)
        reap(ring, 1);
    int rc = ht_io_begin(io);
    if (rc == 0 && io->dev->raw && (ring->uring.flags & IORING_SETUP_SQE128) == 0)
        rc = -EOPNOTSUPP;
    if (rc == 0 && !served_here(io)) {
        cut_segments(ring, io);
        return;
    }
    ring->in_flight++;
    io->result = rc;
    push_local(ring, io);
}

void ht_ring_kick(struct ht_ring *ring)
{
    submit_uring(ring);
    (void)serve_local(ring);
}

void ht_ring_offer(struct ht_ring *ring)
{
    if (ring->unsent_bytes >= OFFER_BYTES || ring->local)
        ht_ring_kick(ring);
}

int ht_ring_wait(struct ht_ring *ring, struct ht_io *io)
{
    assert(pthread_equal(ring->owner, pthread_self()));
    if (io->done)
        return io->result;
    ht_activity_wait("a device", 0);
    while (!io->done)
        reap(ring, io->pieces_);
    ht_activity_go_on();
    return io->result;
}

unsigned ht_io_pieces_left(const struct ht_io *io)
{
    return io->done ? 0 : io->pieces_ > 0 ? io->pieces_ : 1;
}

void ht_ring_wait_some(struct ht_ring *ring, unsigned pieces)
{
    assert(pthread_equal(ring->owner, pthread_self()));
    ht_activity_wait("a device", 0);
    reap(ring, pieces);
    ht_activity_go_on();
}

void ht_ring_drain(struct ht_ring *ring)
{
    while (ring->in_flight > 0)
        reap(ring, ring->in_flight);
}

unsigned ht_ring_in_flight(const struct ht_ring *ring)
{
    return ring->in_flight;
}
