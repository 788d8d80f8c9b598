/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.c - claims and log room: who may append how much, and when the log is to be compacted.
 *
 *   L  bytes of the region           U  used: from start to the end of the open frame
 *   C  claimed bytes                 F  bytes a group takes in a frame of its own
 *   E  what a complete emission of the live metadata takes at most: C + C/8 + M
 *
 * C/8 covers frame headers and padding (at most 4175 bytes per slice, slices of 32 KiB and more: 12.7 % of the worst slice, and frames
 * hold several slices); M covers the marks of begin and end, short last slices and the epoch records of a few mounts: 32 KiB.
 *
 * Rule 1. A group is admitted while U + F + E <= L: a complete emission fits behind it. What compaction has emitted is taken off E as
 *         it goes: after begin, E is reckoned from the lesser of the claims now and
 *         those at begin, plus those made since, minus the bytes emitted.
 * Rule 2. Claims end at (L - 2M) * 4/13, 27 to 31 % of L.
 *
 * Why every group that matters is admitted in the end: after a compaction U <= E, as emission is what remains. So a
 * group fits then if 2E + F <= L, that is 2.25 C + 2M + F <= L. With C at its limit of (L - 2M) / 3.25, F may be as large as that
 * limit: a commit that rewrites everything which lives still fits. With lower claims
 * larger groups do. Groups for which 2E + F > L are given one compaction to fit by luck, then -ENOSPC.
 * Forced claims (deletes, abort) may go over the limit; what they take from the largest group is small and
 * passing. Content that has to be stored in many pieces claims by force, too, for it was accepted already: that has a limit of its own, at
 * which a group of an eighth of the log is still admitted, and deletes with it.
 * Rule 3. Claims of pieces end at (7/8 L - 2M) * 4/9, 33 to 39 % of L. Who accepts content sees to it that all of its pieces fit.
 * Tickets keep the order of those who wait: a large group is not overtaken by small ones for ever.
 *
 * Nobody waits for compaction while it waits for him: its thread passes wait_room, and rule 1 keeps its room.
 *
 * But a crash in the middle of a compaction leaves old log and half of the new emission, and after some such crashes (or
 * with claims that were reckoned too low) the rest no longer has room for E. Then there is
 *
 * Split mode. A compaction that reaches the start of the log goes on in copy 1 alone and overwrites what is oldest there. Copy 0
 * keeps the log up to there, whole; it is what the next mount would choose if the machine died now, since copy 1 is then
 * damaged at its start (or continues copy 0, which is as good). Nothing that is in copy 1 alone is called
 * durable, not even in the headers of its frames. When a superblock names the new start, copy 1 is the log, copy 0
 * is refilled from it, and what was appended meanwhile becomes durable. Nothing grows, so this can
 * be repeated for ever. With one copy only it cannot be done: -ENOSPC until the other device is back.
 *
 * Asking for compaction: when U > L/2 and the emission would be smaller by a margin; when somebody waits for room; when
 * poked; and in split mode, until one is completed.
 *
 * Locks: j->lock.
 */
#include "tiering/journal/journal_priv.h"

#include <assert.h>

#include "tiering/base/fault.h"

#define EMISSION_MARGIN_BYTES ((uint64_t)(32 * HT_KIB))
/* Somebody who fits by the arithmetic still waits in vain when claims are reckoned too low: then it is an error, not for ever. */
#define COMPACTIONS_PER_WAIT_MAX 4

static uint64_t emission_bytes(uint64_t claims)
{
    return claims + claims / 8 + EMISSION_MARGIN_BYTES;
}

uint64_t ht_journal_claim_limit(uint64_t log_bytes)
{
    return (log_bytes - 2 * EMISSION_MARGIN_BYTES) * 4 / 13;
}

/* Rule 3. */
static uint64_t pieces_limit(uint64_t log_bytes)
{
    return (log_bytes - log_bytes / 8 - 2 * EMISSION_MARGIN_BYTES) * 4 / 9;
}

static uint64_t emission_left_locked(const struct ht_journal *j)
{
    return emission_bytes(j->compacting ? ht_min_u64(j->claimed, j->emission_left) : j->claimed);
}

/* Frames may be placed up to here. */
uint64_t ht_journal_limit_pos_locked(const struct ht_journal *j)
{
    bool may_split = j->split || (j->compacting && ht_journal_copies_locked(j) == HT_LOG_COPIES);

    return (may_split ? j->begin.pos : j->start.pos) + j->log_bytes;
}

/* The calling thread is emitting. */
bool ht_journal_emits_locked(const struct ht_journal *j)
{
    return j->emitting && pthread_equal(j->compact_thread, pthread_self());
}

void ht_journal_emitted_locked(struct ht_journal *j, size_t bytes)
{
    if (ht_journal_emits_locked(j))
        j->emission_left -= ht_min_u64(j->emission_left, bytes);
}

/* ---------------------------------------------------------------- claims */

int ht_journal_claim(struct ht_journal *j, uint64_t bytes, bool force)
{
    int rc = force ? 0 : ht_fault(HT_FAULT_JOURNAL_CLAIM);

    if (rc)
        return rc;
    ht_mutex_lock(&j->lock);
    if (!force && (bytes > j->log_bytes || j->claimed + bytes > ht_journal_claim_limit(j->log_bytes)))
        rc = -ENOSPC;
    if (rc == 0) {
        j->claimed += bytes;
        j->emission_left += bytes;
    }
    ht_mutex_unlock(&j->lock);
    return rc;
}

bool ht_journal_has_room_for_pieces(struct ht_journal *j, uint64_t bytes, bool others_claim)
{
    ht_mutex_lock(&j->lock);
    uint64_t claimed = others_claim ? ht_max_u64(j->claimed, ht_journal_claim_limit(j->log_bytes)) : j->claimed;
    bool fits = claimed + bytes <= pieces_limit(j->log_bytes);
    ht_mutex_unlock(&j->lock);
    return fits;
}

void ht_journal_unclaim(struct ht_journal *j, uint64_t bytes)
{
    ht_mutex_lock(&j->lock);
    assert(j->claimed >= bytes);
    j->claimed -= bytes;
    if (j->waiters)
        pthread_cond_broadcast(&j->room);
    ht_mutex_unlock(&j->lock);
}

/* ------------------------------------------------------------------ room */

static bool fits_locked(const struct ht_journal *j, size_t bytes)
{
    uint64_t after = ht_journal_used_locked(j) + ht_frame_bytes(bytes);

    if (j->split)
        return false;
    if (after + emission_left_locked(j) <= j->log_bytes)
        return true;
    /* The last groups before unmount: no compaction will come here; the next mount's can split. */
    return j->stopping && !j->compacting && ht_journal_copies_locked(j) == HT_LOG_COPIES &&
        after + EMISSION_MARGIN_BYTES <= j->log_bytes;
}

bool ht_journal_fits_after_compaction_locked(const struct ht_journal *j, size_t bytes)
{
    return 2 * emission_bytes(j->claimed) + ht_frame_bytes(bytes) <= j->log_bytes;
}

/* After so many compactions since the wait began: will another one make room? */
static bool can_hope_locked(const struct ht_journal *j, size_t bytes, uint64_t compactions)
{
    return compactions == 0 ||
        (compactions < COMPACTIONS_PER_WAIT_MAX && ht_journal_fits_after_compaction_locked(j, bytes));
}

bool ht_journal_compact_wanted_locked(const struct ht_journal *j)
{
    uint64_t used = ht_journal_used_locked(j);

    if (!j->started || j->error)
        return false;
    if (j->poked || j->split || (j->head_waits && !fits_locked(j, j->head_bytes)))
        return true;
    return used > j->log_bytes / 2 && used > emission_bytes(j->claimed) + j->log_bytes / 16;
}

/* It is this one's turn: now it waits for room alone. */
static int wait_at_head_locked(struct ht_journal *j, size_t bytes)
{
    uint64_t begun = j->compactions_begun;

    while (!j->error) {
        if (fits_locked(j, bytes))
            return 0;
        bool hope = !j->stopping && can_hope_locked(j, bytes, j->compactions_begun - begun);
        if (!j->compacting && !hope)
            return -ENOSPC;
        j->head_waits = true;
        j->head_bytes = bytes;
        pthread_cond_broadcast(&j->compact);
        ht_cond_wait(&j->room, &j->lock);
    }
    return j->error;
}

static int wait_for_room_locked(struct ht_journal *j, size_t bytes)
{
    uint64_t ticket = j->ticket_next++;

    j->waiters++;
    while (ticket != j->ticket_serving)
        ht_cond_wait(&j->room, &j->lock);
    int rc = wait_at_head_locked(j, bytes);
    j->waiters--;
    j->head_waits = false;
    j->ticket_serving++;
    pthread_cond_broadcast(&j->room);
    return rc;
}

int ht_journal_wait_room(struct ht_journal *j, size_t bytes)
{
    int rc = ht_fault(HT_FAULT_JOURNAL_ROOM);

    if (rc)
        return rc;
    ht_mutex_lock(&j->lock);
    if (j->error || !j->started)
        rc = j->error ? j->error : -EROFS;
    else if (bytes > j->log_bytes || ht_frame_bytes(bytes) + 2 * EMISSION_MARGIN_BYTES > j->log_bytes)
        rc = -ENOSPC;
    else if (!ht_journal_emits_locked(j) && (j->waiters || !fits_locked(j, bytes)))
        rc = wait_for_room_locked(j, bytes);
    ht_mutex_unlock(&j->lock);
    return rc;
}

bool ht_journal_try_room(struct ht_journal *j, size_t bytes)
{
    ht_mutex_lock(&j->lock);
    bool fits = ht_journal_emits_locked(j) || (bytes <= j->log_bytes && fits_locked(j, bytes));
    ht_mutex_unlock(&j->lock);
    return fits;
}
