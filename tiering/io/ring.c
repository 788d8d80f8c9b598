/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring.c - requests in flight.
 *
 * A ring belongs to one thread at a time and may be handed on while nothing is in flight; so no
 * IORING_SETUP_SINGLE_ISSUER, and no DEFER_TASKRUN, which needs it.
 *
 * Life of a request:
 *
 *   submit --check fails, hook fires, RAM device--> local list --kick, wait, drain--> done
 *      `--------> SQE --kick, wait--> kernel --CQE, all moved or error--> done
 *                  ^                      |
 *                  `--short, EINTR, EAGAIN
 *
 * Invariants:
 *   1. in_flight = local_count + requests that own an SQE or are in the kernel <= depth.
 *   2. The submission queue has at least depth entries, so that there is always an SQE to be had;
 *      the completion queue is larger, so that it cannot overflow.
 *   3. Write and flush are never ordered by the kernel (IOSQE_IO_DRAIN): callers wait in between.
 *
 * The local list is served in an order that callers cannot rely on, because a device owes none
 * to requests that are in flight together; it is the same in every run.
 */
#include "tiering/io/io_priv.h"
#include "tiering/base/fault.h"
#include "tiering/base/log.h"

#include <liburing.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <time.h>

#define DEPTH_MAX 4096u
#define AREAS_MAX 8u
#define PIECE_BYTES HT_GIB /* the kernel registers at most this much as one buffer */
#define PIECES_MAX 1024u
#define ERROR_NAP_NS 200000
#define CQE_BATCH 32u

struct area {
    uintptr_t base;
    uint64_t bytes;
    unsigned first_piece;
};

struct ht_ring {
    struct io_uring uring;
    unsigned depth, in_flight;
    struct ht_io *local; /* through next_; a result that is not 0 is the error it ends with */
    unsigned local_count;
    uint64_t order; /* state of the generator that mixes the local list */
    struct area areas[AREAS_MAX];
    unsigned area_count;
};

static int init_uring(struct io_uring *uring, unsigned depth)
{
    /* COOP_TASKRUN (Linux 5.19) spares interrupts; without it all works the same. */
    static const unsigned flags[] = {IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN, IORING_SETUP_CLAMP, 0};
    int err = ht_fault(HT_FAULT_IO_RING);

    if (err != 0)
        return err;
    err = -EINVAL;
    for (unsigned i = 0; i < HT_ARRAY_SIZE(flags) && err == -EINVAL; i++)
        err = io_uring_queue_init(depth, uring, flags[i]);
    return err;
}

int ht_ring_new(unsigned depth, struct ht_ring **out_ring)
{
    struct ht_ring *ring;
    int err;

    if (depth == 0 || depth > DEPTH_MAX)
        return -EINVAL;
    ring = calloc(1, sizeof(*ring));
    if (ring == NULL)
        return -ENOMEM;
    ring->depth = depth;
    ring->order = 0x9e3779b97f4a7c15u;
    err = init_uring(&ring->uring, depth);
    if (err != 0) {
        ht_error("io_uring cannot be used: %s (Linux 5.6 or newer is needed; see the sysctl kernel.io_uring_disabled, "
                 "the limit on locked memory, and what a container forbids)",
                 strerror(-err));
        free(ring);
        return err;
    }
    *out_ring = ring;
    return 0;
}

void ht_ring_free(struct ht_ring *ring)
{
    if (ring == NULL)
        return;
    ht_ring_drain(ring);
    io_uring_queue_exit(&ring->uring);
    free(ring);
}

void ht_ring_register(struct ht_ring *ring, const struct ht_pinned_area *areas, unsigned count)
{
    struct iovec *pieces;
    unsigned piece_count = 0;

    if (count > AREAS_MAX || ring->area_count > 0)
        return;
    pieces = calloc(PIECES_MAX, sizeof(*pieces));
    if (pieces == NULL)
        return;
    for (unsigned i = 0; i < count; i++) {
        ring->areas[i] = (struct area){(uintptr_t)areas[i].base, areas[i].bytes, piece_count};
        for (uint64_t at = 0; at < areas[i].bytes; at += PIECE_BYTES) {
            if (piece_count == PIECES_MAX)
                goto out;
            pieces[piece_count++] =
                (struct iovec){(char *)areas[i].base + at, ht_min_u64(PIECE_BYTES, areas[i].bytes - at)};
        }
    }
    if (ht_fault(HT_FAULT_IO_REGISTER) == 0 && io_uring_register_buffers(&ring->uring, pieces, piece_count) == 0)
        ring->area_count = count;
out:
    free(pieces);
}

/* The registered piece that holds all of these bytes, or -1. */
static int lookup_piece(const struct ht_ring *ring, uintptr_t base, uint32_t len)
{
    for (unsigned i = 0; i < ring->area_count; i++) {
        const struct area *a = &ring->areas[i];
        uint64_t at = base - a->base;

        if (base < a->base || at >= a->bytes || len > a->bytes - at)
            continue;
        return at / PIECE_BYTES == (at + len - 1) / PIECE_BYTES ? (int)(a->first_piece + at / PIECE_BYTES) : -1;
    }
    return -1;
}

static void fatal(const char *what, int err)
{
    ht_error("io_uring: %s: %s; requests in flight cannot be accounted for, giving up", what, strerror(-err));
    abort();
}

/* Hand what is left of a request to the kernel, at the next submission. */
static void push_sqe(struct ht_ring *ring, struct ht_io *io)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    char *buf = (char *)io->buf + io->moved_;
    uint32_t len = io->len - io->moved_;
    uint64_t offset = io->offset + io->moved_;
    int piece;

    if (sqe == NULL)
        fatal("no free submission entry", -ENOSPC);
    if (io->op == HT_IO_FLUSH) {
        io_uring_prep_fsync(sqe, io->dev->fd, IORING_FSYNC_DATASYNC);
        io_uring_sqe_set_data(sqe, io);
        return;
    }
    piece = lookup_piece(ring, (uintptr_t)buf, len);
    if (io->op == HT_IO_READ && piece >= 0)
        io_uring_prep_read_fixed(sqe, io->dev->fd, buf, len, offset, piece);
    else if (io->op == HT_IO_READ)
        io_uring_prep_read(sqe, io->dev->fd, buf, len, offset);
    else if (piece >= 0)
        io_uring_prep_write_fixed(sqe, io->dev->fd, buf, len, offset, piece);
    else
        io_uring_prep_write(sqe, io->dev->fd, buf, len, offset);
    io_uring_sqe_set_data(sqe, io);
}

static void push_local(struct ht_ring *ring, struct ht_io *io)
{
    struct ht_io **at = &ring->local;

    /* xorshift: first or second place */
    ring->order ^= ring->order << 13;
    ring->order ^= ring->order >> 7;
    ring->order ^= ring->order << 17;
    if (*at != NULL && (ring->order & 1) != 0)
        at = &(*at)->next_;
    io->next_ = *at;
    *at = io;
    ring->local_count++;
}

/* What a device says of a request that it has performed. */
static int told(const struct ht_io *io)
{
    static const enum ht_fault_point points[HT_IO_OPS] = {HT_FAULT_IO_READ, HT_FAULT_IO_WRITE, HT_FAULT_IO_FLUSH};
    int err = ht_fault(points[io->op]);

    return err == 0 && io->op == HT_IO_WRITE ? ht_fault(HT_FAULT_IO_FULL) : err;
}

static void end(struct ht_ring *ring, struct ht_io *io, int result, bool performed)
{
    ring->in_flight--;
    if (performed && result == 0)
        result = told(io);
    ht_io_end(io, result, performed);
}

/* What a stalled device has to perform stays in the list. True: something was served. */
static bool serve_local(struct ht_ring *ring)
{
    struct ht_io **at = &ring->local;
    bool served = false;

    while (*at != NULL) {
        struct ht_io *io = *at;
        int err = io->result;

        if (err == 0 && (io->dev->stalled || ht_fault(HT_FAULT_IO_SILENT) != 0)) {
            at = &io->next_;
            continue;
        }
        *at = io->next_;
        ring->local_count--;
        if (err == 0)
            ht_ram_perform(io);
        end(ring, io, err, err == 0);
        served = true;
    }
    return served;
}

static void nap(void)
{
    struct timespec ts = {0, ERROR_NAP_NS};

    nanosleep(&ts, NULL);
}

static uint32_t half_of(const struct ht_io *io, uint32_t bytes)
{
    uint32_t half = bytes / 2 / io->dev->lba * io->dev->lba;

    return half > 0 ? half : bytes;
}

/* To the kernel a block device that went away, or shrank, is full; a thin volume may be so in truth. */
static int true_error(const struct ht_dev *dev, int err)
{
    uint64_t bytes;

    if (err != -ENOSPC || !dev->block || (ioctl(dev->fd, BLKGETSIZE64, &bytes) == 0 && bytes >= dev->size))
        return err;
    return -EIO;
}

static void handle_cqe(struct ht_ring *ring, struct ht_io *io, int res)
{
    if (ht_fault(HT_FAULT_IO_AGAIN) != 0)
        res = -EAGAIN;
    if (res == -EINTR || res == -EAGAIN) {
        if (res == -EAGAIN)
            nap();
        push_sqe(ring, io);
        return;
    }
    if (io->op == HT_IO_FLUSH || res < 0) {
        end(ring, io, res < 0 ? true_error(io->dev, res) : 0, true);
        return;
    }
    if (ht_fault(HT_FAULT_IO_SHORT) != 0)
        res = (int)half_of(io, (uint32_t)res);
    if (ht_fault(HT_FAULT_IO_TORN) != 0 && res > 0)
        res--;
    io->moved_ += (uint32_t)res;
    if (io->moved_ == io->len)
        end(ring, io, 0, true);
    else if (res == 0 || (uint32_t)res % io->dev->lba != 0)
        end(ring, io, -EIO, true); /* the device became shorter than it was */
    else
        push_sqe(ring, io);
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

static void submit_uring(struct ht_ring *ring)
{
    int err;

    if (ring->in_flight > ring->local_count) {
        err = ht_fault(HT_FAULT_IO_SUBMIT);
        if (err == 0)
            err = io_uring_submit(&ring->uring);
        /* Short of memory or interrupted: the next wait submits again. */
        if (err < 0 && err != -EAGAIN && err != -EBUSY && err != -ENOMEM && err != -EINTR)
            fatal("submit", err);
    }
}

/* Make progress: at least one completion is taken when anything was in flight. */
static void reap(struct ht_ring *ring)
{
    int err;

    if (ring->local != NULL) {
        submit_uring(ring);
        if (!serve_local(ring))
            nap();
        return;
    }
    while (ring->in_flight > 0) {
        err = ht_fault(HT_FAULT_IO_WAIT);
        if (err == 0)
            err = io_uring_submit_and_wait(&ring->uring, 1);
        if (take_completions(ring) > 0)
            return;
        if (err == -EAGAIN || err == -EBUSY || err == -ENOMEM)
            nap(); /* the kernel is short of memory: what is on its way will end */
        else if (err < 0 && err != -EINTR)
            fatal("submit and wait", err);
    }
}

void ht_ring_submit(struct ht_ring *ring, struct ht_io *io)
{
    int err;

    while (ring->in_flight >= ring->depth)
        reap(ring);
    ring->in_flight++;
    err = ht_io_begin(io);
    if (err == 0 && io->dev->ram == NULL) {
        push_sqe(ring, io);
        return;
    }
    io->result = err;
    push_local(ring, io);
}

void ht_ring_kick(struct ht_ring *ring)
{
    submit_uring(ring);
    (void)serve_local(ring);
}

int ht_ring_wait(struct ht_ring *ring, struct ht_io *io)
{
    while (!io->done)
        reap(ring);
    return io->result;
}

void ht_ring_drain(struct ht_ring *ring)
{
    while (ring->in_flight > 0)
        reap(ring);
}

unsigned ht_ring_in_flight(const struct ht_ring *ring)
{
    return ring->in_flight;
}

int ht_ring_run(struct ht_ring *ring, struct ht_io *ios, unsigned count)
{
    int result = 0;

    for (unsigned i = 0; i < count; i++)
        ht_ring_submit(ring, &ios[i]);
    for (unsigned i = 0; i < count; i++) {
        int err = ht_ring_wait(ring, &ios[i]);

        if (result == 0)
            result = err;
    }
    return result;
}
