/* SPDX-License-Identifier: Apache-2.0 */
/*
 * writer.c - one frame onto all copies; copies that drop out; refill.
 *
 * The holder of the writing token works in this order: before_write (the data that the frame names becomes durable);
 * the frame to all copies in use, in pieces of up to 1 MiB, in parallel; flush of their devices; durable_seq; the
 * durable callback; then the token is given back. The callback runs under the token so that callbacks come in order.
 *
 * A flush that fails voids earlier writes, for whichever caller it ran: a frame counts only if no flush of its device
 * has failed since it was written. When another thread's flush has failed, or when no sound copy would be left, the
 * frame is written again at the same place.
 *
 * A copy whose device fails a write or a flush drops out: it is stale from then on, until it has been brought up
 * (resync.c); the loss is recorded (copy_lost) before a frame that it lacks counts as durable. When before_write fails,
 * or no copy is left, the log has failed: nothing is appended or becomes durable any more.
 *
 * Split mode (log_space.c): the kept copy is left as it is, all frames go to the other.
 */
#include "tiering/journal/journal_priv.h"
#include "tiering/io/gate.h"

#include "tiering/base/event.h"
#include "tiering/base/fault.h"
#include "tiering/base/mutant.h"
#include "tiering/base/probe.h"

enum { FLUSHES_AGAIN_MAX = 3 }; /* of one frame */

static bool in_use(const struct ht_journal *j, unsigned i)
{
    return j->copy[i].dev && !(j->split && i == j->kept);
}

unsigned ht_journal_copies_locked(const struct ht_journal *j)
{
    unsigned n = 0;

    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        n += j->copy[i].dev != NULL;
    return n;
}

void ht_journal_token_take_locked(struct ht_journal *j)
{
    while (j->writing)
        ht_cond_wait(&j->progress, ht_journal_lock(j));
    j->writing = true;
}

void ht_journal_token_release_locked(struct ht_journal *j)
{
    j->writing = false;
    pthread_cond_broadcast(&j->progress);
}

static void drop_copy(struct ht_journal *j, unsigned i, const char *what, int error)
{
    ht_mutex_lock(ht_journal_lock(j));
    struct ht_dev *dev = j->copy[i].dev;
    j->copy[i].dev = NULL;
    j->lost[i] = dev != NULL;
    unsigned left = ht_journal_copies_locked(j);
    ht_journal_plan_resync_locked(j);
    ht_mutex_unlock(ht_journal_lock(j));
    if (dev) {
        struct ht_event_about about = {.device = ht_dev_name(dev), .offset = j->copy[i].offset, .error = error};
        ht_event(HT_EVENT_LOG_COPY_LOST, &about, "log: %s failed on %s (copy %u): %s; %s", what, about.device, i,
                 strerror(-error), left ? "going on with the other copy" : "no copy is left");
    }
}

/* ---------------------------------------------------------------- pieces */

/* Requests of the writing thread, which has made sure that it has a ring. */
struct batch {
    struct ht_ring *ring;
    unsigned copy[HT_JOURNAL_IOS];
    unsigned count;
};

/* Waits for the requests of the batch, and drops copies with failed requests. */
static void batch_finish(struct ht_journal *j, struct batch *b, const char *what)
{
    for (unsigned i = 0; i < b->count; i++)
        (void)ht_ring_wait(b->ring, &j->io[i]);
    for (unsigned i = 0; i < b->count; i++) {
        int rc = j->io[i].result ? j->io[i].result : ht_fault(HT_FAULT_JOURNAL_WRITE);
        if (rc)
            drop_copy(j, b->copy[i], what, rc);
    }
    b->count = 0;
}

static void batch_add(struct ht_journal *j, struct batch *b, unsigned copy, struct ht_io io)
{
    assert(b->count < HT_JOURNAL_IOS);
    b->copy[b->count] = copy;
    j->io[b->count] = io;
    ht_ring_submit(b->ring, &j->io[b->count++]);
}

/* Writes to these copies (bits), if they are in use. */
static void write_copies(struct ht_journal *j, unsigned copies, uint64_t pos, uint8_t *mem, uint64_t bytes)
{
    struct batch b = {.ring = ht_ring_mine(j->config.rings)};

    for (uint64_t at = 0; at < bytes;) {
        uint32_t len = 0;
        for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
            uint64_t offset;
            if (!(copies >> i & 1) || !in_use(j, i))
                continue;
            len = ht_log_piece(&j->copy[i], pos + at, bytes - at, &offset);
            batch_add(j, &b, i,
                      (struct ht_io){
                          .op = HT_IO_WRITE, .dev = j->copy[i].dev, .offset = offset, .buf = mem + at, .len = len});
        }
        if (len == 0)
            break; /* no copy is left */
        at += len;
        if (b.count + HT_LOG_COPIES > HT_JOURNAL_IOS)
            batch_finish(j, &b, "a write");
    }
    batch_finish(j, &b, "a write");
}

/* One flush per device, for all copies on it. Returns those (bits) for which it failed. */
static unsigned flush_copies(struct ht_journal *j, int out_results[HT_LOG_COPIES])
{
    struct ht_dev *dev[HT_LOG_COPIES];
    unsigned first[HT_LOG_COPIES], count = 0, failed = 0;
    int result[HT_LOG_COPIES];

    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        unsigned k = 0;
        while (in_use(j, i) && k < count && dev[k] != j->copy[i].dev)
            k++;
        first[i] = k;
        if (in_use(j, i) && k == count)
            dev[count++] = j->copy[i].dev;
    }
    ht_ring_flush(ht_ring_mine(j->config.rings), dev, count, result);
    for (unsigned k = 0; k < count; k++)
        result[k] = result[k] ? result[k] : ht_fault(HT_FAULT_JOURNAL_FLUSH);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        out_results[i] = in_use(j, i) ? result[first[i]] : 0;
        failed |= (unsigned)(out_results[i] != 0) << i;
    }
    return failed;
}

static unsigned copies_in_use(const struct ht_journal *j)
{
    unsigned copies = 0;

    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        copies |= (unsigned)in_use(j, i) << i;
    return copies;
}

/* Copies (bits) on devices of which a flush has failed since. */
static unsigned copies_voided(const struct ht_journal *j, const uint64_t since[HT_LOG_COPIES])
{
    unsigned copies = 0;

    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        copies |= (unsigned)(in_use(j, i) && ht_dev_flush_failures(j->copy[i].dev) != since[i]) << i;
    return HT_MUTANT("frame-voided") ? 0 : copies;
}

/* Writes to all copies in use, and makes it durable; copies that fail drop out. */
static void write_durably(struct ht_journal *j, uint64_t pos, uint8_t *mem, uint64_t bytes)
{
    unsigned copies = copies_in_use(j);

    for (unsigned again = 0; copies; again++) {
        uint64_t since[HT_LOG_COPIES];
        int result[HT_LOG_COPIES];
        for (unsigned i = 0; i < HT_LOG_COPIES; i++)
            since[i] = in_use(j, i) ? ht_dev_flush_failures(j->copy[i].dev) : 0;
        write_copies(j, copies, pos, mem, bytes);
        if (HT_MUTANT("frame-flush") || (HT_MUTANT("start-early") && j->checkpointing))
            return;
        unsigned failed = flush_copies(j, result);
        copies = failed | copies_voided(j, since);
        if (again < FLUSHES_AGAIN_MAX && copies == copies_in_use(j))
            continue;
        for (unsigned i = 0; i < HT_LOG_COPIES; i++)
            if ((again < FLUSHES_AGAIN_MAX ? failed : copies) >> i & 1)
                drop_copy(j, i, "a flush", result[i] ? result[i] : -EIO);
        copies &= copies_in_use(j);
    }
}

/* ----------------------------------------------------------------- frames */

static struct ht_frame_buf *take_oldest_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    if (!j->queue)
        ht_journal_seal_locked(j);
    struct ht_frame_buf *f = j->queue;
    assert(f);
    j->queue = f->next;
    if (!j->queue)
        j->queue_end = &j->queue;
    f->next = NULL;
    return f;
}

/* A frame that would run over the start of the log goes to one copy only, during a checkpoint. */
static int split_if_needed_locked(struct ht_journal *j, uint64_t bytes) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    if (j->split || j->end_pos + bytes <= j->start.pos + j->log_bytes)
        return 0;
    if (!j->checkpointing || ht_journal_copies_locked(j) < HT_LOG_COPIES) {
        ht_event(HT_EVENT_LOG_FULL, NULL, "log: full, and only one copy is there: add the missing device");
        return -ENOSPC;
    }
    j->kept = 0;
    j->split = true;
    ht_event(HT_EVENT_LOG_FULL, NULL, "log: full; a checkpoint goes into copy 1 while copy 0 is kept");
    return 0;
}

int ht_journal_record_lost(struct ht_journal *j)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < HT_LOG_COPIES; i++) {
        if (j->lost[i] && j->config.copy_lost)
            rc = j->config.copy_lost(j->config.ctx, i);
        j->lost[i] = false;
    }
    return rc;
}

/* Others wait for the frame, too, whoever writes it: its requests have no class that a device may leave for long. */
static void write_promoted(struct ht_journal *j, uint64_t pos, uint8_t *mem, uint64_t bytes)
{
    enum ht_io_class was = ht_io_class();

    if (was == HT_IO_BACKGROUND)
        (void)ht_io_class_set(HT_IO_PLANNED);
    write_durably(j, pos, mem, bytes);
    (void)ht_io_class_set(was);
}

static int write_frame(struct ht_journal *j, struct ht_frame_buf *f, struct ht_frame *header)
{
    int rc = j->config.before_write ? j->config.before_write(j->config.ctx) : 0;

    if (rc) {
        struct ht_event_about about = {.error = rc};
        ht_event(HT_EVENT_READ_ONLY, &about, "log: what it names cannot be made durable: %s; the log is closed",
                 strerror(-rc));
        return rc;
    }
    ht_frame_encode(f->mem, header);
    write_promoted(j, header->pos, f->mem, ht_frame_bytes(header->payload_len));
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        if (in_use(j, i))
            return ht_journal_record_lost(j);
    return -EIO;
}

static void frame_written_locked(struct ht_journal *j, const struct ht_frame *h) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    uint64_t bytes = ht_frame_bytes(h->payload_len);

    j->end_pos += bytes;
    j->written_seq = h->seq;
    j->written_checksum = h->checksum;
    j->frames_written++;
    j->bytes_written += bytes;
    HT_PROBE2(frame_written, h->seq, bytes);
    if (j->checkpointing && h->seq == j->begin.seq)
        j->begin.chain = h->prev;
    if (!j->split)
        j->durable_seq = h->seq;
}

void ht_journal_notify_durable_locked(struct ht_journal *j)
{
    uint64_t seq = j->durable_seq;

    if (j->config.durable) {
        ht_mutex_unlock(ht_journal_lock(j));
        j->config.durable(j->config.ctx, seq);
        ht_mutex_lock(ht_journal_lock(j));
    }
    j->notified_seq = seq;
}

void ht_journal_write_next_locked(struct ht_journal *j)
{
    struct ht_frame_buf *f = take_oldest_locked(j);
    struct ht_frame header = {
        .salt = j->config.salt,
        .epoch = j->epoch,
        .seq = f->seq,
        .pos = j->end_pos,
        .prev = j->written_checksum,
        .durable_seq = j->durable_seq,
        .payload_len = f->payload_len,
    };

    assert(f->seq == j->written_seq + 1);
    j->writing = true;
    int rc = split_if_needed_locked(j, ht_frame_bytes(f->payload_len));
    ht_mutex_unlock(ht_journal_lock(j));
    if (rc == 0)
        rc = write_frame(j, f, &header);
    f = ht_journal_free_large(j, f);
    ht_mutex_lock(ht_journal_lock(j));
    if (rc)
        ht_journal_fail_locked(j, rc);
    else
        frame_written_locked(j, &header);
    if (f)
        ht_journal_spare_put_locked(j, f);
    if (rc == 0 && !j->split)
        ht_journal_notify_durable_locked(j);
    ht_journal_token_release_locked(j);
}

/* ---------------------------------------------------------------- refill */

static int copy_range(struct ht_journal *j, unsigned from, unsigned to, uint64_t pos, uint64_t end_pos)
{
    int rc = 0;

    for (uint64_t len; rc == 0 && pos < end_pos; pos += len) {
        len = ht_min_u64(end_pos - pos, HT_LOG_PIECE_BYTES);
        rc = ht_log_read_at(&j->copy[from], pos, j->piece, len);
        if (rc == 0)
            rc = ht_log_write_at(&j->copy[to], pos, j->piece, len);
    }
    return rc;
}

int ht_journal_cut_behind(struct ht_journal *j, const struct ht_log_copy *to, uint64_t start_pos, uint64_t end_pos)
{
    if (end_pos - start_pos >= j->log_bytes)
        return 0;
    memset(j->piece, 0, HT_BLOCK_BYTES);
    return ht_log_write_at(to, end_pos, j->piece, HT_BLOCK_BYTES);
}

void ht_journal_refill(struct ht_journal *j, unsigned from, unsigned to, uint64_t start_pos, uint64_t end_pos)
{
    if (!j->copy[from].dev || !j->copy[to].dev)
        return;
    uint64_t failures = ht_dev_flush_failures(j->copy[to].dev);
    int rc = ht_fault(HT_FAULT_JOURNAL_REFILL);
    if (rc == 0)
        rc = copy_range(j, from, to, start_pos, end_pos);
    if (rc == 0)
        rc = ht_journal_cut_behind(j, &j->copy[to], start_pos, end_pos);
    if (rc == 0)
        rc = ht_dev_flush_since(j->copy[to].dev, failures);
    if (rc)
        drop_copy(j, to, "bringing it up to the other copy", rc);
}
