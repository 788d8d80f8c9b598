/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint.c - begin, end and release of a checkpoint. Why and when: log_space.c.
 *
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
#include "tiering/journal/journal_priv.h"

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
    ht_mutex_lock(ht_journal_lock(j));
    int rc = begin_locked(j);
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
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

void ht_journal_checkpoint_unnamed(struct ht_journal *j, int error)
{
    ht_mutex_lock(ht_journal_lock(j));
    if (j->split)
        ht_journal_fail_locked(j, error);
    ht_mutex_unlock(ht_journal_lock(j));
}

void ht_journal_checkpoint_give_up(struct ht_journal *j)
{
    ht_mutex_lock(ht_journal_lock(j));
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
