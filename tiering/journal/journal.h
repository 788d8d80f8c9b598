/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.h - the metadata log: the only authority on what exists.
 *
 * A circular region of log_bytes in two copies. A position is a byte count that only
 * grows; its place is position modulo log_bytes. A frame (hitrain/format.h) starts at a multiple of 4096, may
 * wrap around the end of the region, and is the unit of atomicity: all groups in it replay or none.
 * Frames chain: each names the checksum of the one before, so replay ends at
 * the first place that does not continue the chain. A frame is written only
 * when the one before it is durable on all present copies; therefore
 * a later frame of the same epoch behind the end, or an end before a sequence number that some frame or a
 * clean superblock calls durable, means damage, not end.
 *
 * Invariants:
 *  1. Frame n+1 is submitted only after frame n is durable on every copy.
 *  2. before_write (flush of the data devices) returned before a frame that names new data is submitted.
 *  3. Log space before start_pos of the durable superblock only is overwritten.
 *  4. Every byte between start and end, plus what compaction has still to emit, fits the region.
 *
 * Threads: all functions may be called from any thread after ht_journal_start,
 * except close. The journal's lock is the innermost but the devices'.
 */
#ifndef HITRAIN_TIERING_JOURNAL_JOURNAL_H
#define HITRAIN_TIERING_JOURNAL_JOURNAL_H

#include "tiering/base/base.h"
#include "tiering/base/buf.h"
#include "tiering/io/dev.h"
#include <hitrain/format.h>

struct ht_journal;

struct ht_journal_start {
    uint64_t pos;   /* of the first frame of replay */
    uint64_t seq;   /* its number */
    uint64_t chain; /* what it names as its predecessor's checksum */
    /* From ht_journal_compact_end only: the last frame that this start stands on; the superblock that names the
     * start should carry it as durable_seq, clean or not, so that a log that lost them is seen to be damaged. */
    uint64_t durable_seq;
};

/* Called for every record of every complete frame, in order. A negative errno ends replay with it. */
typedef int (*ht_replay_fn)(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len);

struct ht_journal_config {
    struct ht_dev *dev[HT_LOG_COPIES]; /* NULL: copy missing */
    bool behind[HT_LOG_COPIES];        /* known to be an old one: refilled, not believed, unless no other is there */
    uint64_t offset[HT_LOG_COPIES];    /* bytes */
    uint64_t log_bytes;
    uint64_t salt;
    struct ht_journal_start start;
    uint64_t epoch;       /* highest ever used, from the superblock */
    uint64_t durable_seq; /* the superblock's: frames up to there were durable when it was written; 0: not known */
    bool clean;           /* the superblock's: that was the last frame of its mount, and the log was closed */
    uint8_t host_id[16], boot_id[16];
    struct ht_rings *rings; /* of what the log is part of; or NULL */
    void *ctx;
    ht_replay_fn replay;
    bool leave_out; /* for fsck: a record that makes no sense, as replay says with -EUCLEAN, is left out and counted */
    bool give_up;   /* for fsck, with force: may be written; what is behind the end of the chosen copy is given up */
    /* Make everything the records of the next frame may name durable. 0 or -errno. No lock is held. */
    int (*before_write)(void *ctx);
    /*
     * A copy has dropped out and others go on: record it where the next mount looks, durably, before a frame that the copy lacks counts as
     * durable. 0 or -errno, which closes the log. No lock is held; must not wait for the journal. May be NULL.
     */
    int (*copy_lost)(void *ctx, unsigned copy);
    /*
     * That copy has all again that is durable: record it, durably, before it is written again. 0 or -errno, which leaves it out. No lock is
     * held; must not wait for the journal. May be NULL.
     */
    int (*copy_back)(void *ctx, unsigned copy);
    /* Frames up to lsn are durable. No lock is held; called in order; must not wait for the journal. */
    void (*durable)(void *ctx, uint64_t lsn);
};

/* What replay found, per copy and in all. */
enum ht_log_state { HT_LOG_MISSING, HT_LOG_ENDED, HT_LOG_DAMAGED };
struct ht_journal_report {
    struct {
        enum ht_log_state state;
        uint64_t last_seq; /* last frame that continues the chain; start.seq - 1 when none */
        uint64_t end_pos;
        uint64_t damage_pos; /* DAMAGED: position of the frame that should have continued it */
        int error;           /* read error, if that ended it */
        uint64_t epoch;      /* of the last frame of the chain, 0 when there is none */
        bool stale;          /* undamaged, but not the chosen one and not equal to it: will be refilled */
    } copy[HT_LOG_COPIES];
    unsigned chosen; /* the copy replayed */
    bool diverged;   /* both copies are whole, and neither continues the other */
    uint64_t frames, records, bytes;
    uint64_t known_seq;                /* the highest frame that anything found calls written */
    uint64_t left_out, left_out_frame; /* records, and the number of the frame of the first */
};

/*
 * Before the log is opened: where both copies are damaged, write to each what only the other has. *out_frames: how many. What no copy has
 * stays damage.
 */
int ht_journal_mend(const struct ht_journal_config *config, unsigned *out_frames) HT_CHECK;
/*
 * The same in memory, nothing is written: both copies as they are, mended, for a config whose offsets are 0. The caller closes them. NULL: there
 * is too little memory for it.
 */
int ht_journal_mend_aside(const struct ht_journal_config *config, unsigned *out_frames,
                          struct ht_dev *out_dev[HT_LOG_COPIES]) HT_CHECK;
/*
 * Read both copies, choose the longest undamaged chain (or, if all are damaged, none) and replay it.
 * Writes nothing. -EUCLEAN: every copy is damaged (the report says where; nothing was replayed
 * unless force is set, which replays the longest anyway); -EIO, -ENOMEM, or what replay returned.
 * out_report is filled also on error; *out_journal only on success.
 */
int ht_journal_open(const struct ht_journal_config *config, bool force, struct ht_journal_report *out_report,
                    struct ht_journal **out_journal) HT_CHECK;
/*
 * Begin writing: bring the other copies up to the chosen one, then write an epoch record and make it durable.
 * new_epoch must already be durable in the superblock.
 */
int ht_journal_start(struct ht_journal *j, uint64_t new_epoch) HT_CHECK;
/* Everything durable, then free. Also for journals never started. Returns the first write error met, or 0. */
int ht_journal_close(struct ht_journal *j);
/* Free without writing anything, as after a crash. No other thread may be inside. */
void ht_journal_abandon(struct ht_journal *j);

/* Put one record (header and payload) into a group buffer. */
void ht_record_put(struct ht_buf *group, uint16_t type, const void *payload, size_t len);
/*
 * Begin and end a record whose payload is put piecewise: returns a mark for end.
 */
size_t ht_record_begin(struct ht_buf *group, uint16_t type);
void ht_record_end(struct ht_buf *group, size_t mark);

/*
 * Append a group of records; they become durable together, in the frame numbered *out_lsn. Copies the
 * bytes, does no I/O and does not wait. Callers order their appends themselves (the store's transaction lock).
 * -ENOSPC: does not fit the region (a caller that waited for room never sees it); -EROFS/-EIO: log failed.
 */
int ht_journal_append(struct ht_journal *j, const struct ht_buf *group, uint64_t *out_lsn) HT_CHECK;
/* Have memory for a group of so many bytes, so that its append will not lack it. -ENOMEM. */
int ht_journal_prepare(struct ht_journal *j, size_t bytes) HT_CHECK;
/*
 * Wait until the frame lsn is durable (writing it if nobody else does: group commit by a leader). 0 or the error that stopped the log.
 */
int ht_journal_sync(struct ht_journal *j, uint64_t lsn) HT_CHECK;
uint64_t ht_journal_durable(const struct ht_journal *j);
/* This copy is written: it is there and has not dropped out. */
bool ht_journal_copy_live(const struct ht_journal *j, unsigned copy);
/*
 * Bring a copy that dropped out up to the other one, and write it again from now on; beside everything else the log does. What
 * compact_wait does by itself some time after the failure, later each time that it fails. -ENOENT: none is out. Else -errno: it stays out.
 */
int ht_journal_rejoin(struct ht_journal *j) HT_CHECK;
/* Nothing is appended or becomes durable any more. */
bool ht_journal_failed(const struct ht_journal *j);
/* The lowest lsn that an append made from now on can get; which it really got, only the append says. */
uint64_t ht_journal_next(const struct ht_journal *j);

/*
 * Wait until a group of bytes fits and asks for compaction when the log gets full. Called with no lock held,
 * before the transaction that will append. -ENOSPC: larger than any room there will be. -EIO/-EROFS: log failed.
 */
int ht_journal_wait_room(struct ht_journal *j, size_t bytes) HT_CHECK;
/*
 * The same question without waiting, for the moment when the caller's transaction lock is held and nobody else can append any
 * more: several callers may have waited at the same time and all been told that there is room. False: unlock and wait again.
 */
bool ht_journal_try_room(struct ht_journal *j, size_t bytes) HT_CHECK;

/*
 * Claims: bytes that live metadata needs when re-emitted, record headers included. The limit is 27 to 31 % of the
 * region, so that a group as large as all claims together always fits in the end (room.c has the arithmetic).
 * claim returns -ENOSPC beyond it, unless force (deletes, abort, replay).
 */
int ht_journal_claim(struct ht_journal *j, uint64_t bytes, bool force) HT_CHECK;
/*
 * May pieces of content claim so many bytes by force (rule 3 of room.c)? others_claim: some time later, when other calls may have made all
 * the claims that they are allowed.
 */
bool ht_journal_has_room_for_pieces(struct ht_journal *j, uint64_t bytes, bool others_claim);
void ht_journal_unclaim(struct ht_journal *j, uint64_t bytes);

struct ht_journal_stats {
    uint64_t log_bytes, used_bytes, claimed_bytes, claim_limit_bytes, frames_written, groups, compactions,
        bytes_written;
    uint64_t memory_bytes; /* heap of its buffers */
    bool too_full;         /* more lives in it than any compaction makes room beside */
};
void ht_journal_stats(const struct ht_journal *j, struct ht_journal_stats *out);

/*
 * Compaction, driven by one thread of the store:
 *   wait   blocks until compaction is wanted (or asked for by poke); false when the journal is stopping. Meanwhile it brings up
 *          copies that dropped out
 *   begin  writes the begin mark; the same thread then appends the live state in slices, each inside its own
 *          transaction. Slices should be 32 KiB or larger. wait_room and try_room let this thread pass.
 *   end    writes the end mark, makes all durable, returns the new start;
 *          the caller makes a superblock naming it durable and then calls
 *   release  log space before the new start may be reused
 * A compaction that could not be carried through is simply begun again; but one that was begun has to be ended and released before the journal
 * is closed if that is possible at all: when the log was very full (which takes crashes in the middle
 * of compactions), what was appended since begin is not durable before release (split mode, see room.c).
 */
bool ht_journal_compact_wait(struct ht_journal *j);
void ht_journal_compact_poke(struct ht_journal *j);
int ht_journal_compact_begin(struct ht_journal *j) HT_CHECK;
int ht_journal_compact_end(struct ht_journal *j, struct ht_journal_start *out_start) HT_CHECK;
void ht_journal_compact_release(struct ht_journal *j, const struct ht_journal_start *start);
/*
 * In place of release: a superblock that names the start could not be written, and may be on the media all the same. In split mode only one
 * copy has what it names, and the next compaction would overwrite that: the log ends, and the next mount finds either start whole.
 */
void ht_journal_compact_unnamed(struct ht_journal *j, int error);
/* Begin to stop: compact_wait returns false from now on. */
void ht_journal_stop_compaction(struct ht_journal *j);

/*
 * Read the log again, a frame of all copies at a time, from its start to what is durable now. Starts with a zeroed cursor, repair
 * set or not; ends with ht_log_scrub_end. Beside everything else the log does.
 */
struct ht_log_scrub {
    bool repair; /* write what a copy lost from the other one; not in a log that was not started */
    bool begun_;
    uint64_t pos_, seq_, chain_; /* the next frame, and what it names as its predecessor's checksum */
    uint8_t *mem_[HT_LOG_COPIES];
    size_t cap_[HT_LOG_COPIES];
};
struct ht_log_scrub_found {
    uint64_t bytes; /* read */
    struct ht_log_scrub_damage {
        struct ht_dev *dev;
        uint64_t offset;
        int error; /* -EUCLEAN: it does not verify; else the device's */
        bool damaged, repaired;
    } copy[HT_LOG_COPIES];
};
/*
 * 1: a frame was looked at; 0: the end. -EAGAIN: one copy is being left behind just now, try again later; -EUCLEAN: this frame is in
 * no copy (a compaction writes everything anew elsewhere); -ENOMEM. out is set always.
 */
int ht_journal_scrub_step(struct ht_journal *j, struct ht_log_scrub *cursor, struct ht_log_scrub_found *out) HT_CHECK;
void ht_log_scrub_end(struct ht_log_scrub *cursor);

#endif
