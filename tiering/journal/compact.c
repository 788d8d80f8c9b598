/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compact.c - begin, end and release of a compaction. Why and when: room.c.
 *
 *   idle --begin--> emitting --end--> ended --release--> idle
 *                    |   ^  \
 *              begin |___|   `--reaches the start of the log--> the same, in split mode
 *
 * A start whose superblock could not be written (unnamed) is not released: nothing before it is overwritten. In split mode that could not be
 * kept by the next compaction, so the log ends.
 *
 * The begin mark has a frame of its own, the first of those that remain. A compaction that its driver gave up is begun
 * again with a new mark; in split mode it has to be, since only release ends that.
 *
 * Threads: one at a time drives compaction; the thread that called begin is the one that emits.
 */
#include "tiering/journal/journal_priv.h"

#include <assert.h>

/* A copy that is out is due to come back: first a compaction, then, also when that failed, the copy. */
static bool rejoin_is_next_locked(struct ht_journal *j)
{
    if (!j->rejoin_at_ns || j->error || ht_now_ns() < j->rejoin_at_ns)
        return false;
    bool next = j->rejoin_next;
    j->rejoin_next = !next;
    j->poked = j->poked || !next;
    return next;
}

bool ht_journal_compact_wait(struct ht_journal *j)
{
    ht_mutex_lock(&j->lock);
    while (!j->stopping) {
        if (rejoin_is_next_locked(j)) {
            ht_mutex_unlock(&j->lock);
            int rc = ht_journal_rejoin(j);
            (void)rc; /* was told, and is tried again */
            ht_mutex_lock(&j->lock);
        } else if (ht_journal_compact_wanted_locked(j)) {
            break;
        } else {
            (void)ht_cond_wait_until(&j->compact, &j->lock, j->error ? 0 : j->rejoin_at_ns);
        }
    }
    bool wanted = !j->stopping;
    ht_mutex_unlock(&j->lock);
    return wanted;
}

void ht_journal_compact_poke(struct ht_journal *j)
{
    ht_mutex_lock(&j->lock);
    j->poked = true;
    pthread_cond_broadcast(&j->compact);
    ht_mutex_unlock(&j->lock);
}

void ht_journal_stop_compaction(struct ht_journal *j)
{
    ht_mutex_lock(&j->lock);
    j->stopping = true;
    pthread_cond_broadcast(&j->compact);
    pthread_cond_broadcast(&j->room);
    ht_mutex_unlock(&j->lock);
}

static int append_mark_locked(struct ht_journal *j, uint16_t type, uint64_t *out_lsn)
{
    struct ht_buf group = HT_BUF_INIT;
    uint8_t id[8];

    ht_le64_store(id, j->compactions_begun);
    ht_record_put(&group, type, id, sizeof(id));
    int rc = group.err ? group.err : ht_journal_append_locked(j, group.data, group.len, out_lsn);
    ht_buf_free(&group);
    return rc;
}

static int begin_locked(struct ht_journal *j)
{
    struct ht_journal_start begin;
    struct ht_journal_start before = j->begin;
    bool again = j->compacting;
    uint64_t lsn;

    ht_journal_seal_locked(j);
    begin = (struct ht_journal_start){.pos = j->tail_pos, .seq = j->next_seq};
    j->begin = begin; /* append goes by it */
    j->compacting = true;
    int rc = append_mark_locked(j, HT_REC_COMPACT_BEGIN, &lsn);
    if (rc) {
        j->begin = before;
        j->compacting = again;
        return rc;
    }
    assert(lsn == begin.seq);
    j->compact_thread = pthread_self();
    j->emitting = true;
    j->emission_left = j->claimed;
    j->compactions_begun++;
    j->poked = false;
    return 0;
}

int ht_journal_compact_begin(struct ht_journal *j)
{
    ht_mutex_lock(&j->lock);
    int rc = begin_locked(j);
    ht_mutex_unlock(&j->lock);
    return rc;
}

int ht_journal_compact_end(struct ht_journal *j, struct ht_journal_start *out_start)
{
    uint64_t lsn;

    ht_mutex_lock(&j->lock);
    assert(j->compacting);
    int rc = append_mark_locked(j, HT_REC_COMPACT_END, &lsn);
    if (rc == 0)
        rc = ht_journal_write_up_to_locked(j, lsn);
    if (rc == 0) {
        *out_start = j->begin;
        out_start->durable_seq = lsn;
    }
    ht_mutex_unlock(&j->lock);
    return rc;
}

/* Copy 1 is the log now: bring copy 0 up to it; then all that is written is durable. */
static void leave_split_locked(struct ht_journal *j)
{
    ht_journal_token_take_locked(j);
    if (!j->error) {
        ht_mutex_unlock(&j->lock);
        ht_journal_refill(j, !j->kept, j->kept, j->begin.pos, j->end_pos);
        int rc = ht_journal_record_lost(j);
        ht_mutex_lock(&j->lock);
        if (rc)
            ht_journal_fail_locked(j, rc);
    }
    if (!j->error) {
        j->split = false;
        j->durable_seq = j->written_seq;
        ht_journal_tell_durable_locked(j);
    }
    ht_journal_token_release_locked(j);
}

void ht_journal_compact_unnamed(struct ht_journal *j, int error)
{
    ht_mutex_lock(&j->lock);
    if (j->split)
        ht_journal_fail_locked(j, error);
    ht_mutex_unlock(&j->lock);
}

void ht_journal_compact_release(struct ht_journal *j, const struct ht_journal_start *start)
{
    ht_mutex_lock(&j->lock);
    assert(j->compacting && start->pos == j->begin.pos && start->seq == j->begin.seq);
    if (j->split)
        leave_split_locked(j);
    j->start = *start;
    j->compacting = j->emitting = false;
    j->compactions++;
    pthread_cond_broadcast(&j->room);
    ht_mutex_unlock(&j->lock);
}
