/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal_priv.h - the common part of the files of the journal.
 *
 *   frame.c      frames and records between memory and disk form
 *   scan.c       how far the chain of one copy goes, and whether it ended or is damaged
 *   replay.c     chooses a copy; hands out its records
 *   journal.c    life: open, start, append, sync
 *   writer.c     one frame onto all copies; copies that drop out, refill
 *   log_space.c  reserves and log space: the arithmetic; checkpoints: begin, end, release
 *   resync.c     a copy that dropped out comes back
 *   repair.c     reading the copies again, and lost frames of a copy from the other one
 */
#pragma once

#include "tiering/journal/journal.h"
#include "tiering/base/lock.h"
#include "tiering/io/rings.h"

/* ---------------------------------------------------------------- frames */

/* Host form of a frame header. */
struct ht_frame {
    uint64_t checksum, salt, epoch, seq, pos, prev, durable_seq, payload_len;
};

#define HT_FRAME_HEADER_BYTES ((size_t)80)

/* Bytes of a frame with so much payload, padding included. */
static inline uint64_t ht_frame_bytes(uint64_t payload_len)
{
    return ht_round_up(HT_FRAME_HEADER_BYTES + payload_len, HT_BLOCK_BYTES);
}

/* Fills in header and padding around the payload that is already in mem; returns the checksum, also put into f. */
uint64_t ht_frame_encode(uint8_t *mem, struct ht_frame *f);
/* Decodes the header alone: false when it is none. */
bool ht_frame_decode_header(const uint8_t *block, struct ht_frame *out_frame);
/* mem: the whole frame. */
bool ht_frame_checksum_ok(const uint8_t *mem, const struct ht_frame *f);
bool ht_frame_padding_ok(const uint8_t *mem, const struct ht_frame *f);
/*
 * The records of the first len bytes of a payload that begin at *next or later have possible headers; *next becomes
 * where the first one lies that is not wholly there.
 */
bool ht_records_tile(const uint8_t *payload, uint64_t len, uint64_t *next);
/* Record headers tile the payload exactly. */
bool ht_records_valid(const uint8_t *payload, size_t len);
/* A payload that begins with the record of this epoch. */
bool ht_records_begin_epoch(const uint8_t *payload, size_t len, uint64_t epoch);

/* ---------------------------------------------------------------- copies */

struct ht_log_copy {
    struct ht_dev *dev; /* NULL: missing, or dropped out */
    uint64_t offset, log_bytes;
};

#define HT_LOG_PIECE_BYTES ((uint32_t)HT_MIB)

/* The bytes from pos that are contiguous on the device, at most len and a piece; *out_offset: where. */
uint32_t ht_log_piece(const struct ht_log_copy *c, uint64_t pos, uint64_t len, uint64_t *out_offset);

/* Bytes of a copy from a position on; durably: with a flush. */
int ht_log_read_at(const struct ht_log_copy *c, uint64_t pos, uint8_t *mem, uint64_t bytes) HT_MUST_CHECK;
int ht_log_write_at(const struct ht_log_copy *c, uint64_t pos, const uint8_t *mem, uint64_t bytes) HT_MUST_CHECK;
int ht_log_write_durably(const struct ht_log_copy *c, uint64_t pos, const uint8_t *mem, uint64_t bytes) HT_MUST_CHECK;

#define HT_LOG_READ_AHEAD 4u

/* The region of one copy as a stream of blocks in the order of positions. One thread's. */
struct ht_log_reader {
    struct ht_ring *ring;
    const struct ht_log_copy *copy;
    uint64_t next_pos, limit_pos; /* the next piece to read; where to stop */
    struct {
        struct ht_io io;
        uint64_t pos;
        uint8_t *buf; /* HT_LOG_PIECE_BYTES */
    } piece[HT_LOG_READ_AHEAD];
    unsigned head, count; /* pieces in flight, oldest first */
};

int ht_frame_mem_reserve(struct ht_frame_mem *m, uint64_t bytes) HT_MUST_CHECK;

/* ------------------------------------------------------------------ scan */

struct ht_chain_link {
    uint64_t checksum, epoch;
};

struct ht_log_scan {
    enum ht_log_state state;
    int error;
    uint64_t last_seq, last_checksum, last_epoch, end_pos;
    struct ht_chain_link *links; /* of frames start.seq, start.seq + 1, ... */
    size_t link_count, link_cap;
    /*
     * The highest number that any verified frame calls durable; and the newest verified frame after the end of the
     * chain.
     */
    uint64_t named_durable, named_epoch;
    bool later;
    struct ht_frame later_frame;
};

struct ht_log_scanner {
    const struct ht_journal_config *config;
    struct ht_log_reader reader;
    struct ht_frame_mem frame;
};
/* -ENOMEM, -errno: end it all the same. */
int ht_log_scanner_init(struct ht_log_scanner *sc, const struct ht_journal_config *config) HT_MUST_CHECK;
void ht_log_scanner_end(struct ht_log_scanner *sc); /* also of one of zeros */

typedef int (*ht_frame_fn)(void *ctx, const struct ht_frame *f, const uint8_t *payload);

/*
 * Follows the chain of a copy from start; fn (may be NULL) sees every frame that continues it, wholly verified. 0 or
 * the result of fn or -ENOMEM; scan says how the chain ended.
 */
int ht_log_walk(struct ht_log_scanner *sc, const struct ht_log_copy *copy, ht_frame_fn fn, void *ctx,
                struct ht_log_scan *scan) HT_MUST_CHECK;
/* Walks, then searches the rest of the region: ended or damaged? */
int ht_log_scan_copy(struct ht_log_scanner *sc, const struct ht_log_copy *copy, struct ht_log_scan *scan) HT_MUST_CHECK;

/* --------------------------------------------------------------- journal */

/* A frame in memory: header, payload, padding, contiguous. Payload is appended at HT_FRAME_HEADER_BYTES. */
struct ht_frame_buf {
    struct ht_frame_buf *next;
    uint8_t *mem; /* aligned to a block */
    size_t cap, payload_len;
    uint64_t seq;
};

#define HT_JOURNAL_IOS 16u
#define HT_JOURNAL_SPARE_FRAMES 3u

struct ht_journal {
    struct ht_journal_config config; /* constant */
    uint64_t log_bytes;              /* constant */
    uint64_t frame_payload_max;      /* constant: a frame with several groups stays below */

    struct ht_mutex lock;
    pthread_cond_t progress; /* notified_seq, written_seq, writing, error */
    pthread_cond_t space;    /* start, reserves, tickets, error */

    HT_GUARDED_BY(HT_LOCK_JOURNAL) struct {
        int error;
        bool started, read_only, stopping;
        struct ht_journal_start start;                  /* of the durable superblock */
        struct ht_frame_buf *open, *queue, **queue_end; /* being filled; sealed, in order */
        struct ht_frame_buf *spare;
        unsigned spare_count;
        uint64_t next_seq; /* of the next frame to be opened */
        uint64_t tail_pos; /* where the open frame will lie, or the next one */
        uint64_t epoch;
        bool writing;
        uint64_t resync_at_ns,
            resynced_ns; /* when to try to have it back, 0: all are there; when the last one came back */
        unsigned resync_tries;
        bool resync_next;      /* the checkpoint before it was requested */
        uint64_t notified_seq; /* the durable callback has returned for it */

        /* room */
        uint64_t reserved;
        uint64_t ticket_next, ticket_serving;
        unsigned waiters;  /* in wait_space */
        bool head_waits;   /* the first waiter is blocked ... */
        size_t head_bytes; /* ... for a group of so many bytes */

        /* checkpoint */
        bool checkpointing, poked;
        bool emitting; /* checkpoint_thread is valid */
        pthread_t checkpoint_thread;
        struct ht_journal_start begin;
        uint64_t emission_left; /* upper bound: the reserves at begin and since, less the emitted bytes */
        uint64_t checkpoints_begun, checkpoints;

        /* stats */
        uint64_t frames_written, groups, bytes_written;
    };

    /* Written by the holder of the writing token, under the lock; read by anyone under it. */
    struct ht_log_copy copy[HT_LOG_COPIES];
    bool lost[HT_LOG_COPIES]; /* dropped out, and not recorded yet */
    uint64_t end_pos, written_seq, written_checksum;
    uint64_t durable_seq;
    bool split;
    unsigned kept; /* split: the copy that is kept unchanged */

    /* the writing token's */
    struct ht_io io[HT_JOURNAL_IOS];
    uint8_t *piece; /* HT_LOG_PIECE_BYTES, for refill */

    unsigned chosen; /* by replay */
    bool refill[HT_LOG_COPIES];
    bool stale[HT_LOG_COPIES]; /* until then: it merely ends elsewhere */
};

HT_MUTEX_OF(ht_journal_lock, struct ht_journal, lock, HT_LOCK_JOURNAL)

/* journal.c */
int ht_journal_new(const struct ht_journal_config *config, struct ht_journal **out_journal) HT_MUST_CHECK;
void ht_journal_fail_locked(struct ht_journal *j, int error) HT_REQUIRES(HT_LOCK_JOURNAL);
int ht_journal_append_locked(struct ht_journal *j, const uint8_t *records, size_t len, uint64_t *out_lsn)
    HT_REQUIRES(HT_LOCK_JOURNAL) HT_MUST_CHECK;
void ht_journal_seal_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);
uint64_t ht_journal_used_locked(const struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);
/* Without the lock: frees a frame that is too large for a spare one, and returns NULL; or f. */
struct ht_frame_buf *ht_journal_free_large(const struct ht_journal *j, struct ht_frame_buf *f);
void ht_journal_spare_put_locked(struct ht_journal *j, struct ht_frame_buf *f) HT_REQUIRES(HT_LOCK_JOURNAL);
/* Writes frames until lsn is on the media of the copies in use; in split mode that is not durable yet. */
int ht_journal_write_up_to_locked(struct ht_journal *j, uint64_t lsn) HT_REQUIRES(HT_LOCK_JOURNAL) HT_MUST_CHECK;

/* writer.c */
unsigned ht_journal_copies_locked(const struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);
/* Writes the oldest unwritten frame. Lock held, no writer, a frame there; releases the lock in between. */
void ht_journal_write_next_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);
/*
 * Makes copy `to` equal to copy `from` between two positions; drops it on failure. The caller holds the writing token,
 * no lock.
 */
void ht_journal_refill(struct ht_journal *j, unsigned from, unsigned to, uint64_t start_pos, uint64_t end_pos);
/*
 * The copy holds everything up to end_pos: its older frames after that must not continue the chain later. Needs the
 * token.
 */
int ht_journal_cut_behind(struct ht_journal *j, const struct ht_log_copy *to, uint64_t start_pos,
                          uint64_t end_pos) HT_MUST_CHECK;
/* Have it recorded that copies dropped out. Needs the token, no lock. */
int ht_journal_record_lost(struct ht_journal *j) HT_MUST_CHECK;
/* Durable_seq has grown: calls the client. Needs the token; releases the lock in between. */
void ht_journal_notify_durable_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);
void ht_journal_token_take_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);
void ht_journal_token_release_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);

/* resync.c: a copy has dropped out. */
void ht_journal_plan_resync_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);

/* The journal needs something else now. */
static inline void ht_journal_wake_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    if (j->config.wake)
        j->config.wake(j->config.ctx);
}

/* log_space.c */
uint64_t ht_journal_reserve_limit(uint64_t log_bytes);
void ht_journal_emitted_locked(struct ht_journal *j, size_t bytes) HT_REQUIRES(HT_LOCK_JOURNAL);
uint64_t ht_journal_limit_pos_locked(const struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);
bool ht_journal_checkpoint_wanted_locked(const struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL);
/* Does a group of so many bytes find room in a log right after a checkpoint? */
bool ht_journal_fits_after_checkpoint_locked(const struct ht_journal *j, size_t bytes) HT_REQUIRES(HT_LOCK_JOURNAL);
