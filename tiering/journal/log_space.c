/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log_space.c - reserves and log space: how much a group may append, when the log needs a checkpoint; begin, end and
 * release of one.
 *
 *   L  bytes of the region           U  used: from start to the end of the open frame
 *   C  reserved bytes                 F  bytes a group takes in a frame of its own
 *   E  the most that a complete emission of the live metadata takes: C + C/8 + M
 *
 * C/8 covers frame headers and padding (at most 4175 bytes per slice, slices of 32 KiB and more: 12.7 % of the worst
 * slice, and frames hold several slices); M covers the marks of begin and end, short last
 * slices and the epoch records of a few mounts: 32 KiB.
 *
 * Rule 1. A group is admitted while U + F + E <= L: a complete emission fits after it. Emitted bytes are taken off E at
 *         once: after begin, E follows from the lesser of the reserves now and those at
 *         begin, plus those made since, minus the bytes emitted.
 * Rule 2. Reserves end at (L - 2M) * 4/13, 27 to 31 % of L.
 *
 * Why every group that matters is admitted in the end: after a checkpoint U <= E, as emission is what remains. So a
 * group fits then if 2E + F <= L, that is 2.25 C + 2M + F <= L. With C at its limit of (L - 2M) / 3.25, F may be as
 * large as that limit: a commit that rewrites everything which lives still fits. With lower reserves larger groups do.
 * Groups for which 2E + F > L are given one checkpoint to fit by luck, then -ENOSPC. Forced reserves (deletes, abort)
 * may go over the limit; they take little from the largest group, and only for a while. Content that has to be stored
 * in many pieces reserves by force, too, for it was accepted already: that has a limit of its own, at which a group of
 * an eighth of the log is still admitted, and deletes with it.
 *
 * Rule 3. Reserves of pieces end at (7/8 L - 2M) * 4/9, 33 to 39 % of L. The code that accepts content makes sure that
 *         all its pieces fit.
 *
 * Tickets keep the order of waiters: small groups do not overtake a large one for ever.
 *
 * No thread waits for a checkpoint that waits for this thread: the checkpoint's thread passes wait_space, and rule 1
 * keeps its room.
 *
 * But a crash in the middle of a checkpoint leaves old log and half of the new emission. After some such crashes (or
 * with reserves that were computed too low) the rest no longer has room for E. Then there is
 *
 * Split mode. A checkpoint that reaches the start of the log goes on in copy 1 alone and overwrites the oldest frames
 * there. Copy 0 keeps the log up to there, whole. The next mount would choose copy 0 if the machine died now, since
 * copy 1 is then damaged at its start (or continues copy 0, which is as good). Frames in copy 1 alone are not called
 * durable, not even in the headers of its frames. When a superblock names the new start, copy 1 is the log, copy 0 is
 * refilled from copy 1, and the groups appended since become durable. Nothing grows, so this can be repeated for ever.
 * With one copy only it cannot be done: -ENOSPC until the other device is back.
 *
 * A checkpoint is requested when U > L/2 and the emission would be smaller by a margin; when a thread waits for room;
 * when poked; and in split mode, until one is completed.
 *
 * Locks: j->lock.
 */
#include "tiering/journal/journal_priv.h"

#include "tiering/base/activity.h"
#include "tiering/base/fault.h"
#include "tiering/io/gate.h"

#define EMISSION_MARGIN_BYTES ((uint64_t)(32 * HT_KIB))
/*
 * A group that fits by the arithmetic still waits in vain when reserves were computed too low: then it gets an error,
 * and does not wait for ever.
 */
#define CHECKPOINTS_PER_WAIT_MAX 4

static uint64_t emission_bytes(uint64_t reserved)
{
    return reserved + reserved / 8 + EMISSION_MARGIN_BYTES;
}

uint64_t ht_journal_reserve_limit(uint64_t log_bytes)
{
    return (log_bytes - 2 * EMISSION_MARGIN_BYTES) * 4 / 13;
}

/* Rule 3. */
static uint64_t pieces_limit(uint64_t log_bytes)
{
    return (log_bytes - log_bytes / 8 - 2 * EMISSION_MARGIN_BYTES) * 4 / 9;
}

static uint64_t emission_left_locked(const struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    return emission_bytes(j->checkpointing ? ht_min_u64(j->reserved, j->emission_left) : j->reserved);
}

/* Frames may be placed up to here. */
uint64_t ht_journal_limit_pos_locked(const struct ht_journal *j)
{
    bool may_split = j->split || (j->checkpointing && ht_journal_copies_locked(j) == HT_LOG_COPIES);

    return (may_split ? j->begin.pos : j->start.pos) + j->log_bytes;
}

/* The calling thread is emitting. */
static bool emits_locked(const struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    return j->emitting && pthread_equal(j->checkpoint_thread, pthread_self());
}

void ht_journal_emitted_locked(struct ht_journal *j, size_t bytes)
{
    if (emits_locked(j))
        j->emission_left -= ht_min_u64(j->emission_left, bytes);
}

/* ----------------------------------------------------------- log reserves */

static bool fits_reserve_locked(const struct ht_journal *j, uint64_t bytes) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    return bytes <= j->log_bytes && j->reserved + bytes <= ht_journal_reserve_limit(j->log_bytes);
}

bool ht_journal_lacks_room(struct ht_journal *j, uint64_t bytes)
{
    return !ht_locked(ht_journal_lock(j), fits_reserve_locked(j, bytes));
}

int ht_journal_reserve(struct ht_journal *j, uint64_t bytes, bool force)
{
    int rc = force ? 0 : ht_fault(HT_FAULT_JOURNAL_RESERVE);

    if (rc)
        return rc == -ENOSPC ? ht_lack_space(0) : rc;
    ht_mutex_lock(ht_journal_lock(j));
    if (!force && !fits_reserve_locked(j, bytes))
        rc = ht_lack_space(0);
    if (rc == 0) {
        j->reserved += bytes;
        j->emission_left += bytes;
    }
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
}

bool ht_journal_has_space_for_pieces(struct ht_journal *j, uint64_t bytes, bool others_reserve)
{
    ht_mutex_lock(ht_journal_lock(j));
    uint64_t reserved = others_reserve ? ht_max_u64(j->reserved, ht_journal_reserve_limit(j->log_bytes)) : j->reserved;
    bool fits = reserved + bytes <= pieces_limit(j->log_bytes);
    ht_mutex_unlock(ht_journal_lock(j));
    return fits;
}

void ht_journal_unreserve(struct ht_journal *j, uint64_t bytes)
{
    ht_mutex_lock(ht_journal_lock(j));
    assert(j->reserved >= bytes);
    j->reserved -= bytes;
    if (j->waiters)
        pthread_cond_broadcast(&j->space);
    ht_mutex_unlock(ht_journal_lock(j));
}

/* ------------------------------------------------------------------ room */

static bool fits_locked(const struct ht_journal *j, size_t bytes) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    uint64_t after = ht_journal_used_locked(j) + ht_frame_bytes(bytes);

    if (j->split)
        return false;
    if (after + emission_left_locked(j) <= j->log_bytes)
        return true;
    /* The last groups before unmount: there will be no checkpoint here; that of the next mount can split. */
    return j->stopping && !j->checkpointing && ht_journal_copies_locked(j) == HT_LOG_COPIES &&
        after + EMISSION_MARGIN_BYTES <= j->log_bytes;
}

bool ht_journal_is_short(struct ht_journal *j)
{
    return ht_locked(ht_journal_lock(j), ht_journal_used_locked(j) + emission_left_locked(j) >= j->log_bytes / 4 * 3);
}

bool ht_journal_fits_after_checkpoint_locked(const struct ht_journal *j, size_t bytes)
{
    return 2 * emission_bytes(j->reserved) + ht_frame_bytes(bytes) <= j->log_bytes;
}

/* After so many checkpoints since the wait began: can another one make room? */
static bool can_hope_locked(const struct ht_journal *j, size_t bytes, uint64_t checkpoints) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    return checkpoints == 0 ||
        (checkpoints < CHECKPOINTS_PER_WAIT_MAX && ht_journal_fits_after_checkpoint_locked(j, bytes));
}

bool ht_journal_checkpoint_wanted_locked(const struct ht_journal *j)
{
    uint64_t used = ht_journal_used_locked(j);

    if (!j->started || j->error)
        return false;
    if (j->poked || j->split || (j->head_waits && !fits_locked(j, j->head_bytes)))
        return true;
    return used > j->log_bytes / 2 && used > emission_bytes(j->reserved) + j->log_bytes / 16;
}

/* It is this thread's turn: now it waits for room alone. */
static int wait_at_head_locked(struct ht_journal *j, size_t bytes) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    uint64_t begun = j->checkpoints_begun;

    while (!j->error) {
        if (fits_locked(j, bytes))
            return 0;
        bool hope = !j->stopping && can_hope_locked(j, bytes, j->checkpoints_begun - begun);
        bool ends = j->checkpointing && (j->emitting || !j->stopping);
        if (!ends && !hope)
            return -ENOSPC;
        j->head_waits = true;
        j->head_bytes = bytes;
        ht_journal_wake_locked(j);
        ht_cond_wait(&j->space, ht_journal_lock(j));
    }
    return j->error;
}

static int wait_for_room_locked(struct ht_journal *j, size_t bytes) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    uint64_t ticket = j->ticket_next++;

    j->waiters++;
    if (j->config.gate)
        ht_gate_want(j->config.gate, HT_GATE_LOG_ROOM);
    ht_activity_wait("room in the log", 0);
    while (ticket != j->ticket_serving)
        ht_cond_wait(&j->space, ht_journal_lock(j));
    int rc = wait_at_head_locked(j, bytes);
    ht_activity_go_on();
    if (j->config.gate)
        ht_gate_want_end(j->config.gate, HT_GATE_LOG_ROOM);
    j->waiters--;
    j->head_waits = false;
    j->ticket_serving++;
    pthread_cond_broadcast(&j->space);
    return rc;
}

int ht_journal_wait_space(struct ht_journal *j, size_t bytes)
{
    int rc = ht_fault(HT_FAULT_JOURNAL_SPACE);

    if (rc)
        return rc;
    ht_mutex_lock(ht_journal_lock(j));
    if (j->error || !j->started)
        rc = j->error ? j->error : -EROFS;
    else if (bytes > j->log_bytes || ht_frame_bytes(bytes) + 2 * EMISSION_MARGIN_BYTES > j->log_bytes)
        rc = -ENOSPC;
    else if (!emits_locked(j) && (j->waiters || !fits_locked(j, bytes)))
        rc = wait_for_room_locked(j, bytes);
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
}

bool ht_journal_try_space(struct ht_journal *j, size_t bytes)
{
    return ht_locked(ht_journal_lock(j), emits_locked(j) || (bytes <= j->log_bytes && fits_locked(j, bytes)));
}

/* ------------------------------------------------------------ checkpoints */

/*
 *   idle --begin--> emitting --end--> ended --release--> idle
 *                    |   ^  \
 *              begin |___|   `--reaches the start of the log--> the same, in split mode
 *
 * A start whose superblock could not be written (unnamed) is not released: nothing before it is overwritten. In split
 * mode the next checkpoint could not keep this promise, so the log ends.
 *
 * The begin mark has a frame of its own, the first remaining frame. A checkpoint that its driver gave up is begun again
 * with a new mark; in split mode it has to be, since only release ends that mode.
 *
 * Threads: one at a time drives a checkpoint; the thread that called begin is the one that emits.
 */

/* A copy that dropped out is due for a resync: first comes a checkpoint, then, even if that failed, the resync. */
static bool resync_is_next_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    if (!j->resync_at_ns || j->error || ht_now_ns() < j->resync_at_ns)
        return false;
    bool next = j->resync_next;
    j->resync_next = !next;
    j->poked = j->poked || !next;
    return next;
}

enum ht_journal_need ht_journal_need(struct ht_journal *j, uint64_t *out_at_ns)
{
    enum ht_journal_need need = HT_JOURNAL_NEEDS_NOTHING;

    ht_mutex_lock(ht_journal_lock(j));
    if (!j->stopping && resync_is_next_locked(j))
        need = HT_JOURNAL_NEEDS_RESYNC;
    else if (!j->stopping && ht_journal_checkpoint_wanted_locked(j))
        need = HT_JOURNAL_NEEDS_CHECKPOINT;
    *out_at_ns = j->error || j->stopping ? 0 : j->resync_at_ns;
    ht_mutex_unlock(ht_journal_lock(j));
    return need;
}

void ht_journal_checkpoint_poke(struct ht_journal *j)
{
    ht_mutex_lock(ht_journal_lock(j));
    j->poked = true;
    ht_journal_wake_locked(j);
    ht_mutex_unlock(ht_journal_lock(j));
}

void ht_journal_checkpoint_stop(struct ht_journal *j)
{
    ht_mutex_lock(ht_journal_lock(j));
    j->stopping = true;
    pthread_cond_broadcast(&j->space);
    ht_mutex_unlock(ht_journal_lock(j));
}

static int append_mark_locked(struct ht_journal *j, uint16_t type, uint64_t *out_lsn) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    struct ht_buf group = HT_BUF_INIT;
    uint8_t id[8];

    ht_le64_store(id, j->checkpoints_begun);
    ht_record_put(&group, type, id, sizeof(id));
    int rc = group.err ? group.err : ht_journal_append_locked(j, group.data, group.len, out_lsn);
    ht_buf_free(&group);
    return rc;
}

static int begin_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    struct ht_journal_start before = j->begin;
    bool again = j->checkpointing;
    uint64_t lsn;

    ht_journal_seal_locked(j);
    struct ht_journal_start begin = (struct ht_journal_start){.pos = j->tail_pos, .seq = j->next_seq};
    j->begin = begin; /* appends check it */
    j->checkpointing = true;
    int rc = append_mark_locked(j, HT_REC_CHECKPOINT_BEGIN, &lsn);
    if (rc) {
        j->begin = before;
        j->checkpointing = again;
        return rc;
    }
    assert(lsn == begin.seq);
    j->checkpoint_thread = pthread_self();
    j->emitting = true;
    j->emission_left = j->reserved;
    j->checkpoints_begun++;
    j->poked = false;
    return 0;
}

int ht_journal_checkpoint_begin(struct ht_journal *j)
{
    return ht_locked(ht_journal_lock(j), begin_locked(j));
}

int ht_journal_checkpoint_end(struct ht_journal *j, struct ht_journal_start *out_start)
{
    uint64_t lsn;

    ht_mutex_lock(ht_journal_lock(j));
    assert(j->checkpointing);
    int rc = append_mark_locked(j, HT_REC_CHECKPOINT_END, &lsn);
    if (rc == 0)
        rc = ht_journal_write_up_to_locked(j, lsn);
    if (rc == 0) {
        *out_start = j->begin;
        out_start->durable_seq = lsn;
    }
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
}

/* Copy 1 is the log now: bring copy 0 up to it; then everything written is durable. */
static void leave_split_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    ht_journal_token_take_locked(j);
    if (!j->error) {
        uint64_t begin_pos = j->begin.pos;
        ht_mutex_unlock(ht_journal_lock(j));
        ht_journal_refill(j, !j->kept, j->kept, begin_pos, j->end_pos);
        int rc = ht_journal_record_lost(j);
        ht_mutex_lock(ht_journal_lock(j));
        if (rc)
            ht_journal_fail_locked(j, rc);
    }
    if (!j->error) {
        j->split = false;
        j->durable_seq = j->written_seq;
        ht_journal_notify_durable_locked(j);
    }
    ht_journal_token_release_locked(j);
}

void ht_journal_checkpoint_give_up(struct ht_journal *j, int unnamed)
{
    ht_mutex_lock(ht_journal_lock(j));
    if (unnamed && j->split)
        ht_journal_fail_locked(j, unnamed);
    j->emitting = false;
    pthread_cond_broadcast(&j->space);
    ht_mutex_unlock(ht_journal_lock(j));
}

void ht_journal_checkpoint_release(struct ht_journal *j, const struct ht_journal_start *start)
{
    ht_mutex_lock(ht_journal_lock(j));
    assert(j->checkpointing && start->pos == j->begin.pos && start->seq == j->begin.seq);
    if (j->split)
        leave_split_locked(j);
    j->start = *start;
    j->checkpointing = j->emitting = false;
    j->checkpoints++;
    pthread_cond_broadcast(&j->space);
    ht_mutex_unlock(ht_journal_lock(j));
}
