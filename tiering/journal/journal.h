/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.h - the metadata log: the only authority on the store's content.
 *
 * A circular region of log_bytes in two copies. A position is a byte count that only grows; its place is position
 * modulo log_bytes. A frame (hitrain/format.h) starts at a multiple of 4096, may wrap around the end of the region, and
 * is the unit of atomicity: all groups in it replay or none. Frames chain: each names the checksum of the one before,
 * so replay ends at the first place that does not continue the chain. A frame is written only when the one before it is
 * durable on all present copies. Therefore two things mean damage, not end: a later frame of the same epoch after the
 * end, and an end before a sequence number that some frame or a clean superblock calls durable.
 *
 * Invariants:
 *  1. Frame n+1 is submitted only after frame n is durable on every copy.
 *  2. before_write (flush of the data devices) returned before a frame that names new data is submitted.
 *  3. Log space before start_pos of the durable superblock only is overwritten.
 *  4. Every byte between start and end, plus what a checkpoint has still to emit, fits the region.
 *
 * Threads: all functions may be called from any thread after ht_journal_start,
 * except abandon. The journal's lock is the innermost but the devices'.
 */
#pragma once

#include "tiering/base/buf.h"
#include "tiering/io/dev.h"
#include <hitrain/format.h>

struct ht_journal;

struct ht_journal_start {
    uint64_t pos;   /* of the first frame of replay */
    uint64_t seq;   /* its number */
    uint64_t chain; /* the checksum that it names as its predecessor's */
    /*
     * From ht_journal_checkpoint_end only: the last frame that this start stands on. The superblock that names the
     * start should carry it as durable_seq, clean or not. Then a log that lost these frames is seen to be damaged.
     */
    uint64_t durable_seq;
};

/* Called for every record of every complete frame, in order, but the journal's own. A negative errno ends replay. */
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
    struct ht_rings *rings; /* the rings of the store; or NULL */
    struct ht_gate *gate;   /* its gate, whose checkpoint makes room in the log; or NULL */
    void *ctx;
    ht_replay_fn replay;
    bool leave_out; /* for fsck: a record that makes no sense, as replay says with -EUCLEAN, is left out and counted */
    bool give_up;   /* for fsck, with force: may be written; frames after the end of the chosen copy are given up */
    /* Makes everything durable that the records of the next frame may name. 0 or -errno. No lock is held. */
    int (*before_write)(void *ctx);
    /*
     * A copy has dropped out and others go on: record it where the next mount looks, durably, before a frame that the
     * copy lacks counts as durable. 0 or -errno, which closes the log. No lock is held; must
     * not wait for the journal. May be NULL.
     */
    int (*copy_lost)(void *ctx, unsigned copy);
    /*
     * That copy has everything durable again: records this, durably, before the copy is written again. 0 or -errno,
     * which leaves it out. No lock is held; must not wait for the journal. May be NULL.
     */
    int (*copy_back)(void *ctx, unsigned copy);
    /* Frames up to lsn are durable. No lock is held; called in order; must not wait for the journal. */
    void (*durable)(void *ctx, uint64_t lsn);
    /* ht_journal_need may say something else now. The journal's lock is held. May be NULL. */
    void (*wake)(void *ctx);
};

/* The findings of replay, per copy and in all. */
enum ht_log_state { HT_LOG_MISSING, HT_LOG_ENDED, HT_LOG_DAMAGED };
struct ht_journal_report {
    struct {
        enum ht_log_state state;
        uint64_t last_seq; /* last frame that continues the chain; start.seq - 1 when none */
        uint64_t end_pos;  /* after the last frame of the chain; DAMAGED: where the next one should be */
        int error;         /* read error, if that ended it */
        uint64_t epoch;    /* of the last frame of the chain, 0 when there is none */
        bool stale;        /* undamaged, but not the chosen one and not equal to it: will be refilled */
    } copy[HT_LOG_COPIES];
    unsigned chosen; /* the copy replayed */
    bool diverged;   /* both copies are whole, and neither continues the other */
    uint64_t frames, records, bytes;
    uint64_t known_seq;                /* the highest frame that anything found calls written */
    uint64_t left_out, left_out_frame; /* records, and the number of the frame of the first */
};

/*
 * Before the log is opened: if both copies are damaged, writes to each the frames that only the other has. *out_frames:
 * how many. Frames that no copy has stay damage.
 */
int ht_journal_cross_repair(const struct ht_journal_config *config, unsigned *out_frames) HT_MUST_CHECK;
/*
 * The same in memory, nothing is written: both copies as they are, cross-repaired, for a config whose offsets are 0.
 * The caller closes them. NULL: there is too little memory for it.
 */
int ht_journal_cross_repair_aside(const struct ht_journal_config *config, unsigned *out_frames,
                                  struct ht_dev *out_dev[HT_LOG_COPIES]) HT_MUST_CHECK;
/*
 * Reads both copies, chooses the longest undamaged chain (or, if all are damaged, none) and replays it. Writes nothing.
 * -EUCLEAN: every copy is damaged (the report says where; nothing was replayed unless force is set, which replays the
 * longest anyway); -EIO, -ENOMEM, or the error of replay. out_report is filled also on error; *out_journal only on
 * success.
 */
int ht_journal_open(const struct ht_journal_config *config, bool force, struct ht_journal_report *out_report,
                    struct ht_journal **out_journal) HT_MUST_CHECK;
/*
 * Begins writing: brings the other copies up to the chosen one, then writes an epoch record and makes it durable.
 * new_epoch must already be durable in the superblock.
 */
int ht_journal_start(struct ht_journal *j, uint64_t new_epoch) HT_MUST_CHECK;
/* Frees without writing anything, as after a crash. No other thread may be inside. */
void ht_journal_abandon(struct ht_journal *j);

/* Puts one record (header and payload) into a group buffer. */
void ht_record_put(struct ht_buf *group, uint16_t type, const void *payload, size_t len);
/*
 * Begins and ends a record whose payload is put piecewise. begin returns a mark for end.
 */
size_t ht_record_begin(struct ht_buf *group, uint16_t type);
void ht_record_end(struct ht_buf *group, size_t mark);

/*
 * Appends a group of records; they become durable together, in the frame numbered *out_lsn. Copies the bytes, does no
 * I/O and does not wait. Callers order their appends themselves (the store's transaction lock). -ENOSPC: does not fit
 * the region (a caller that waited for room never sees it); -EROFS/-EIO: log failed.
 */
int ht_journal_append(struct ht_journal *j, const struct ht_buf *group, uint64_t *out_lsn) HT_MUST_CHECK;
/* Have memory for a group of so many bytes, so that its append will not lack it. -ENOMEM. */
int ht_journal_prepare(struct ht_journal *j, size_t bytes) HT_MUST_CHECK;
/*
 * Waits until the frame lsn is durable, and writes it if no other thread does: group commit by a leader. 0 or the error
 * that stopped the log.
 */
int ht_journal_sync(struct ht_journal *j, uint64_t lsn) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
uint64_t ht_journal_durable(const struct ht_journal *j);
/* This copy is written: it is there and has not dropped out. */
bool ht_journal_copy_live(const struct ht_journal *j, unsigned copy);
/*
 * Brings a copy that dropped out up to the other one, and writes it again from now on, while the log works on.
 * The journal needs this some time after the failure, and later each time that it fails. -ENOENT: none is out.
 * Else -errno: it stays out.
 */
int ht_journal_resync(struct ht_journal *j) HT_MUST_CHECK;
/* Nothing is appended or becomes durable any more. */
bool ht_journal_failed(const struct ht_journal *j);

/*
 * Waits until a group of bytes fits, and requests a checkpoint when the log gets full. Called with no lock held, before
 * the transaction that will append. -ENOSPC: larger than any room there will be. -EIO/-EROFS: log failed.
 */
int ht_journal_wait_space(struct ht_journal *j, size_t bytes) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * The same question without waiting. The caller holds its transaction lock, so no other thread can append now. Several
 * callers may have waited at the same time and all found that there is room. False: unlock and wait again.
 */
bool ht_journal_try_space(struct ht_journal *j, size_t bytes) HT_MUST_CHECK;

/*
 * Reserves: bytes that live metadata needs when re-emitted, record headers included. The limit is 27 to 31 % of the
 * region: a group as large as all reserves together then always fits in the end (log_space.c has the arithmetic).
 * reserve returns -ENOSPC beyond it, unless force (deletes, abort, replay).
 */
int ht_journal_reserve(struct ht_journal *j, uint64_t bytes, bool force) HT_MUST_CHECK;
/* Would a reserve of so many bytes be refused now? */
bool ht_journal_lacks_room(struct ht_journal *j, uint64_t bytes);
/*
 * May pieces of content reserve so many bytes by force (rule 3 of log_space.c)? others_reserve: some time later, when
 * other calls may have made all the reserves that they are allowed.
 */
bool ht_journal_has_space_for_pieces(struct ht_journal *j, uint64_t bytes, bool others_reserve);
void ht_journal_unreserve(struct ht_journal *j, uint64_t bytes);
/* Is a quarter or less of the log left beside what a checkpoint still has to emit? */
bool ht_journal_is_short(struct ht_journal *j);

struct ht_journal_stats {
    uint64_t log_bytes, used_bytes, reserved_bytes, reserve_limit_bytes, frames_written, groups, checkpoints,
        bytes_written;
    uint64_t memory_bytes; /* heap of its buffers */
    bool too_full;         /* more lives in it than any checkpoint can make room for */
};
void ht_journal_stats(const struct ht_journal *j, struct ht_journal_stats *out);
/* Which frames are durable, and who waits (tiering/base/dump.h). */
void ht_journal_dump(struct ht_journal *j, struct ht_dump *d);

/*
 * Checkpoint, driven by one thread of the store:
 *   need   says whether a checkpoint is wanted (or requested by poke), or a copy that dropped out is due for its
 *          resync; *out_at_ns: when that will be due, or 0
 *   begin  writes the begin mark; the same thread then appends the live state in slices, each inside its own
 *          transaction. Slices should be 32 KiB or larger. wait_space and try_space let this thread pass.
 *   end    writes the end mark, makes all durable, returns the new start;
 *          the caller makes a superblock naming it durable and then calls
 *   release  log space before the new start may be reused
 * A checkpoint that could not be completed is simply begun again. But a begun checkpoint has to be ended and released
 * before the journal ends, if possible at all. When the log was very full (which takes crashes in the middle of
 * checkpoints), groups appended since begin are not durable before release (split mode, see log_space.c).
 */
enum ht_journal_need { HT_JOURNAL_NEEDS_NOTHING, HT_JOURNAL_NEEDS_CHECKPOINT, HT_JOURNAL_NEEDS_RESYNC };
enum ht_journal_need ht_journal_need(struct ht_journal *j, uint64_t *out_at_ns);
void ht_journal_checkpoint_poke(struct ht_journal *j);
int ht_journal_checkpoint_begin(struct ht_journal *j) HT_MUST_CHECK;
int ht_journal_checkpoint_end(struct ht_journal *j, struct ht_journal_start *out_start) HT_MUST_CHECK;
void ht_journal_checkpoint_release(struct ht_journal *j, const struct ht_journal_start *start);
/*
 * The driver could not complete it, and begins it again later. Once the journal stops, nothing waits for that. unnamed:
 * the error, or 0, of a superblock that names the start. It may be on the media all the same: in split mode only one
 * copy has the start that it names, and the next checkpoint would overwrite that. So the log ends, and the next mount
 * finds either start whole.
 */
void ht_journal_checkpoint_give_up(struct ht_journal *j, int unnamed);
/* Begins to stop: the journal needs nothing from now on. */
void ht_journal_checkpoint_stop(struct ht_journal *j);

/* Memory for one whole frame, grown to the largest that was met. */
struct ht_frame_mem {
    uint8_t *data;
    size_t cap;
};

/*
 * Reads the log again, a frame of all copies at a time, from its start to its present durable end. Starts with a zeroed
 * cursor, repair set or not; ends with ht_log_scrub_end. The log works on at the same time.
 */
struct ht_log_scrub {
    bool repair; /* write lost frames of a copy from the other one; not in a log that was not started */
    bool begun_;
    uint64_t pos_, seq_, chain_; /* the next frame, and the checksum that it names as its predecessor's */
    struct ht_frame_mem mem_[HT_LOG_COPIES];
};
struct ht_log_scrub_found {
    uint64_t bytes; /* read */
    struct ht_log_scrub_damage {
        struct ht_dev *dev;
        uint64_t offset;
        int error;     /* the device's; -EUCLEAN if mismatch */
        bool mismatch; /* the device gave bytes, and they do not verify */
        bool damaged, repaired;
    } copy[HT_LOG_COPIES];
};
/*
 * 1: a frame was checked; 0: the end. -EAGAIN: one copy is dropping out just now, try again later; -EUCLEAN: this frame
 * is in no copy (a checkpoint writes everything anew elsewhere); -ENOMEM. out is set always.
 */
int ht_journal_scrub_step(struct ht_journal *j, struct ht_log_scrub *cursor,
                          struct ht_log_scrub_found *out) HT_MUST_CHECK;
void ht_log_scrub_end(struct ht_log_scrub *cursor);
