/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.c - the life of a journal, appending, and waiting for appended groups.
 *
 * Life of a frame:
 *
 *   append --> open --seal: full, or a writer has nothing older--> queue --writer token--> on the media
 *                                                                             |
 *                                          durable: on all copies in use <----' (in split mode only after release)
 *
 * A group is copied once, into the frame it will be written with: header, payload and padding are contiguous in aligned
 * memory. A group that would make the open frame larger than frame_payload_max seals it and opens the next one; a
 * group may be larger than that alone. Number and place of a frame are known when it is opened, since
 * everything before it is sealed.
 *
 * Group commit: a thread that waits for a frame and finds no writer becomes the writer, for one frame at a time. During
 * the write other groups gather in the open frame and their owners wait; one of these is the next writer.
 *
 * Invariants:
 *  1. Frames are numbered, placed and written in the order of their first group;
 *     notified_seq <= durable_seq <= written_seq < next_seq.
 *  2. tail_pos = end_pos + bytes of the frames in the queue (and of the one being written).
 *  3. writing is true for at most one thread, which alone uses ring, io, piece and changes copies.
 *
 * Locks: j->lock, innermost except for the devices'. Never held during I/O or a callback.
 */
#include "tiering/journal/journal_priv.h"

#include "tiering/base/activity.h"
#include "tiering/base/dump.h"
#include "tiering/base/fault.h"
#include "tiering/base/event.h"
#include "tiering/base/mutant.h"

#define FRAME_PAYLOAD_MAX ((uint64_t)(4 * HT_MIB))
#define COPY_LOCKED_MAX ((uint64_t)HT_MIB)

/* ---------------------------------------------------------------- frames */

static void frame_free(struct ht_frame_buf *f)
{
    if (f)
        free(f->mem);
    free(f);
}

static struct ht_frame_buf *frame_new(size_t payload_bytes)
{
    struct ht_frame_buf *f = ht_fault(HT_FAULT_JOURNAL_FRAME) ? NULL : calloc(1, sizeof(*f));

    if (!f)
        return NULL;
    f->cap = ht_frame_bytes(payload_bytes);
    f->mem = aligned_alloc(HT_BLOCK_BYTES, f->cap);
    if (!f->mem) {
        free(f);
        return NULL;
    }
    return f;
}

/* In steady state frames come from the spares; only large groups and deep queues need memory. */
static struct ht_frame_buf *frame_get_locked(struct ht_journal *j, size_t payload_bytes) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    struct ht_frame_buf *f = j->spare;

    if (!f || ht_frame_bytes(payload_bytes) > f->cap)
        return frame_new(ht_max_u64(payload_bytes, j->frame_payload_max));
    j->spare = f->next;
    j->spare_count--;
    f->next = NULL;
    f->payload_len = 0;
    return f;
}

void ht_journal_spare_put_locked(struct ht_journal *j, struct ht_frame_buf *f)
{
    if (j->spare_count >= HT_JOURNAL_SPARE_FRAMES) {
        frame_free(f);
        return;
    }
    ht_chain_link(&j->spare, f, next);
    j->spare_count++;
}

/* To give many megabytes back takes milliseconds. */
struct ht_frame_buf *ht_journal_free_large(const struct ht_journal *j, struct ht_frame_buf *f)
{
    if (f->cap <= ht_frame_bytes(j->frame_payload_max))
        return f;
    frame_free(f);
    return NULL;
}

static void frame_list_free(struct ht_frame_buf *f)
{
    while (f) {
        struct ht_frame_buf *next = f->next;
        frame_free(f);
        f = next;
    }
}

/* --------------------------------------------------------------- new, free */

int ht_journal_new(const struct ht_journal_config *config, struct ht_journal **out_journal)
{
    struct ht_journal *j = calloc(1, sizeof(*j));

    if (!j)
        return -ENOMEM;
    HT_UNSHARED(HT_LOCK_JOURNAL);
    j->config = *config;
    j->log_bytes = config->log_bytes;
    j->frame_payload_max = ht_min_u64(j->log_bytes / 8, FRAME_PAYLOAD_MAX) - HT_FRAME_HEADER_BYTES;
    j->start = config->start;
    j->queue_end = &j->queue;
    ht_mutex_init(&j->lock, HT_LOCK_JOURNAL);
    pthread_cond_init(&j->progress, NULL);
    pthread_cond_init(&j->space, NULL);
    j->piece = aligned_alloc(HT_BLOCK_BYTES, HT_LOG_PIECE_BYTES);
    if (!j->piece) {
        ht_journal_abandon(j);
        return -ENOMEM;
    }
    *out_journal = j;
    return 0;
}

void ht_journal_abandon(struct ht_journal *j)
{
    if (!j)
        return;
    HT_UNSHARED(HT_LOCK_JOURNAL);
    assert(!j->writing);
    free(j->piece);
    frame_free(j->open);
    frame_list_free(j->queue);
    frame_list_free(j->spare);
    pthread_cond_destroy(&j->space);
    pthread_cond_destroy(&j->progress);
    ht_mutex_destroy(&j->lock);
    free(j);
}

static uint64_t last_appended_locked(const struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    return j->next_seq - 1;
}

/* ----------------------------------------------------------------- start */

static void refill_copies(struct ht_journal *j, uint64_t start_pos)
{
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        if (i == j->chosen || !j->refill[i])
            continue;
        struct ht_event_about about = {.device = ht_dev_name(j->copy[i].dev), .offset = j->copy[i].offset};
        ht_event(HT_EVENT_LOG_REPAIRED, &about, "log: copy %u on %s is brought up to copy %u", i, about.device,
                 j->chosen);
        ht_journal_refill(j, j->chosen, i, start_pos, j->end_pos);
    }
}

static int append_epoch_locked(struct ht_journal *j, uint64_t epoch, uint64_t *out_lsn) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    struct ht_buf group = HT_BUF_INIT;
    size_t mark = ht_record_begin(&group, HT_REC_EPOCH);

    ht_buf_put_u64(&group, epoch);
    ht_buf_put_u64(&group, ht_wall_ns());
    ht_buf_put(&group, j->config.host_id, sizeof(j->config.host_id));
    ht_buf_put(&group, j->config.boot_id, sizeof(j->config.boot_id));
    ht_record_end(&group, mark);
    int rc = group.err ? group.err : ht_journal_append_locked(j, group.data, group.len, out_lsn);
    ht_buf_free(&group);
    return rc;
}

/*
 * Crashes in the middle of checkpoints may have filled the region to the last block. Then the mount begins in split
 * mode (log_space.c) with the epoch record as its first frame; a checkpoint is wanted at once.
 */
static int begin_epoch_locked(struct ht_journal *j, uint64_t epoch, uint64_t *out_lsn) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    int rc = append_epoch_locked(j, epoch, out_lsn);

    if (rc != -ENOSPC || ht_journal_copies_locked(j) < HT_LOG_COPIES)
        return rc;
    j->checkpointing = true;
    j->begin = (struct ht_journal_start){.pos = j->tail_pos, .seq = j->next_seq};
    return append_epoch_locked(j, epoch, out_lsn);
}

static int prepare_spares_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    while (j->spare_count < 2) {
        struct ht_frame_buf *f = frame_new(j->frame_payload_max);
        if (!f)
            return -ENOMEM;
        ht_journal_spare_put_locked(j, f);
    }
    return 0;
}

int ht_journal_start(struct ht_journal *j, uint64_t new_epoch)
{
    uint64_t lsn;

    ht_mutex_lock(ht_journal_lock(j));
    uint64_t start_pos = j->start.pos;
    int rc = j->read_only ? -EROFS : j->started || new_epoch <= j->epoch ? -EINVAL : 0;
    if (!rc)
        ht_journal_token_take_locked(j);
    ht_mutex_unlock(ht_journal_lock(j));
    if (rc)
        return rc;
    if (!HT_MUTANT("no-refill"))
        refill_copies(j, start_pos);
    ht_mutex_lock(ht_journal_lock(j));
    ht_journal_token_release_locked(j);
    rc = prepare_spares_locked(j);
    if (rc == 0) {
        j->epoch = new_epoch;
        j->started = true;
        rc = begin_epoch_locked(j, new_epoch, &lsn);
    }
    if (rc == 0)
        rc = ht_journal_write_up_to_locked(j, lsn);
    if (rc) {
        ht_error("log: cannot begin to write: %s", strerror(-rc));
        ht_journal_fail_locked(j, rc);
    }
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
}

/* ---------------------------------------------------------------- append */

void ht_journal_fail_locked(struct ht_journal *j, int error)
{
    if (!j->error)
        j->error = error;
    pthread_cond_broadcast(&j->progress);
    pthread_cond_broadcast(&j->space);
    ht_journal_wake_locked(j);
}

static uint64_t open_bytes_locked(const struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    return j->open ? ht_frame_bytes(j->open->payload_len) : 0;
}

uint64_t ht_journal_used_locked(const struct ht_journal *j)
{
    return j->tail_pos + open_bytes_locked(j) - j->start.pos;
}

void ht_journal_seal_locked(struct ht_journal *j)
{
    if (!j->open)
        return;
    j->tail_pos += open_bytes_locked(j);
    *j->queue_end = j->open;
    j->queue_end = &j->open->next;
    j->open = NULL;
}

/* It gets a frame of its own, and its bytes are copied without the lock. */
static bool is_large(const struct ht_journal *j, size_t len)
{
    return len > ht_min_u64(j->frame_payload_max, COPY_LOCKED_MAX);
}

static bool fits_open_frame_locked(const struct ht_journal *j, size_t len) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    return j->open && j->open->payload_len + len <= j->frame_payload_max;
}

static void open_this_locked(struct ht_journal *j, struct ht_frame_buf *f) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    ht_journal_seal_locked(j);
    f->seq = j->next_seq++;
    j->open = f;
}

static int open_frame_locked(struct ht_journal *j, size_t len) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    struct ht_frame_buf *f = frame_get_locked(j, len);

    if (!f)
        return -ENOMEM;
    open_this_locked(j, f);
    return 0;
}

/* May a group be appended? joins: to the open frame. */
static int check_append_locked(const struct ht_journal *j, size_t len, bool joins) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    if (j->error || !j->started)
        return j->error ? j->error : -EROFS;
    if (len > j->log_bytes)
        return -ENOSPC;
    uint64_t end =
        j->tail_pos + (joins ? ht_frame_bytes(j->open->payload_len + len) : open_bytes_locked(j) + ht_frame_bytes(len));
    return end > ht_journal_limit_pos_locked(j) ? -ENOSPC : 0;
}

int ht_journal_append_locked(struct ht_journal *j, const uint8_t *records, size_t len, uint64_t *out_lsn)
{
    bool joins = fits_open_frame_locked(j, len);
    int rc = check_append_locked(j, len, joins);

    if (!rc && !joins)
        rc = open_frame_locked(j, len);
    if (rc)
        return rc;
    memcpy(j->open->mem + HT_FRAME_HEADER_BYTES + j->open->payload_len, records, len);
    /* For tests, in builds that check locks. */
    for (size_t at = 0; at < len; at += HT_BLOCK_BYTES)
        ht_lock_step();
    j->open->payload_len += len;
    j->groups++;
    *out_lsn = j->open->seq;
    return 0;
}

int ht_journal_prepare(struct ht_journal *j, size_t bytes)
{
    int rc = 0;

    ht_mutex_lock(ht_journal_lock(j));
    bool joins = !is_large(j, bytes) && fits_open_frame_locked(j, bytes);
    bool there = joins || (j->spare && ht_frame_bytes(bytes) <= j->spare->cap);
    if (!there && !j->error) {
        struct ht_frame_buf *f = frame_new(ht_max_u64(bytes, j->frame_payload_max));
        rc = f ? 0 : -ENOMEM;
        if (f) {
            ht_chain_link(&j->spare, f, next);
            j->spare_count++;
        }
    }
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
}

/* The frame of a large group, which no other thread knows yet; NULL: no memory. */
static struct ht_frame_buf *frame_of(struct ht_journal *j, const struct ht_buf *group)
{
    struct ht_frame_buf *f = ht_locked(ht_journal_lock(j), frame_get_locked(j, group->len));

    if (!f)
        return NULL;
    memcpy(f->mem + HT_FRAME_HEADER_BYTES, group->data, group->len);
    f->payload_len = group->len;
    return f;
}

static int append_frame_locked(struct ht_journal *j, struct ht_frame_buf *f, uint64_t *out_lsn)
    HT_REQUIRES(HT_LOCK_JOURNAL)
{
    int rc = check_append_locked(j, f->payload_len, false);

    if (rc)
        return rc;
    open_this_locked(j, f);
    j->groups++;
    *out_lsn = f->seq;
    return 0;
}

int ht_journal_append(struct ht_journal *j, const struct ht_buf *group, uint64_t *out_lsn)
{
    if (group->err)
        return group->err;
    assert(group->len > 0 && ht_records_valid(group->data, group->len));
    struct ht_frame_buf *f = is_large(j, group->len) ? frame_of(j, group) : NULL;
    if (!f && is_large(j, group->len))
        return -ENOMEM;
    ht_mutex_lock(ht_journal_lock(j));
    int rc = f ? append_frame_locked(j, f, out_lsn) : ht_journal_append_locked(j, group->data, group->len, out_lsn);
    if (rc == 0)
        ht_journal_emitted_locked(j, group->len);
    if (rc == 0 && ht_journal_checkpoint_wanted_locked(j))
        ht_journal_wake_locked(j);
    ht_mutex_unlock(ht_journal_lock(j));
    if (rc)
        frame_free(f);
    return rc;
}

/* ------------------------------------------------------------------ sync */

int ht_journal_write_up_to_locked(struct ht_journal *j, uint64_t lsn)
{
    if (!ht_ring_mine(j->config.rings)) /* before any write: later a missing ring would end the log */
        return -ENOMEM;
    ht_activity_wait("the log to have frame", lsn);
    while (!j->error && j->written_seq < lsn) {
        if (j->writing)
            ht_cond_wait(&j->progress, ht_journal_lock(j));
        else
            ht_journal_write_next_locked(j);
    }
    ht_activity_go_on();
    return j->written_seq >= lsn ? 0 : j->error;
}

int ht_journal_sync(struct ht_journal *j, uint64_t lsn)
{
    if (HT_MUTANT("early-answer"))
        return 0;
    ht_mutex_lock(ht_journal_lock(j));
    int rc = lsn > last_appended_locked(j) ? -EINVAL : ht_journal_write_up_to_locked(j, lsn);
    /* Written means durable, except in split mode; and the callback has returned. */
    ht_activity_wait("the log to have frame", lsn);
    while (rc == 0 && j->notified_seq < lsn && !j->error)
        ht_cond_wait(&j->progress, ht_journal_lock(j));
    ht_activity_go_on();
    if (rc == 0 && j->notified_seq < lsn)
        rc = j->error;
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
}

void ht_journal_dump(struct ht_journal *j, struct ht_dump *d)
{
    ht_dump_put(d, "log:\n");
    if (!ht_dump_lock(d, ht_journal_lock(j), "the log"))
        return;
    ht_dump_put(d, "  frames: %llu durable, %llu written, %llu begun; a thread writes: %s\n",
                (unsigned long long)j->durable_seq, (unsigned long long)j->written_seq,
                (unsigned long long)last_appended_locked(j), j->writing ? "yes" : "no");
    ht_dump_put(d, "  %llu of %llu bytes in use; %u threads wait for room; checkpoint %s%s\n",
                (unsigned long long)ht_journal_used_locked(j), (unsigned long long)j->log_bytes, j->waiters,
                j->checkpointing ? "running" : "not running", j->error ? "; the log has failed" : "");
    ht_mutex_unlock(ht_journal_lock(j));
}

uint64_t ht_journal_durable(const struct ht_journal *j)
{
    return ht_locked(ht_journal_lock(j), j->durable_seq);
}

bool ht_journal_copy_live(const struct ht_journal *j, unsigned copy)
{
    return ht_locked(ht_journal_lock(j), j->copy[copy].dev != NULL);
}

bool ht_journal_failed(const struct ht_journal *j)
{
    return ht_locked(ht_journal_lock(j), j->error != 0);
}

static uint64_t frames_memory(const struct ht_frame_buf *f)
{
    uint64_t bytes = 0;

    for (; f; f = f->next)
        bytes += f->cap;
    return bytes;
}

void ht_journal_stats(const struct ht_journal *j, struct ht_journal_stats *out)
{
    ht_mutex_lock(ht_journal_lock(j));
    *out = (struct ht_journal_stats){
        .log_bytes = j->log_bytes,
        .used_bytes = ht_journal_used_locked(j),
        .reserved_bytes = j->reserved,
        .reserve_limit_bytes = ht_journal_reserve_limit(j->log_bytes),
        .frames_written = j->frames_written,
        .groups = j->groups,
        .checkpoints = j->checkpoints,
        .bytes_written = j->bytes_written,
        .memory_bytes = HT_LOG_PIECE_BYTES + frames_memory(j->open) + frames_memory(j->queue) + frames_memory(j->spare),
        .too_full = !ht_journal_fits_after_checkpoint_locked(j, 0),
    };
    ht_mutex_unlock(ht_journal_lock(j));
}
