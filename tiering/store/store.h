/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store.h - the one door to the tiers: objects, transactions, scopes, leases.
 *
 * An object is a sequence of bytes with an id, cut into chunks. A chunk has up to three forms:
 *
 *   published  the reference the log holds (or will hold with the transactions appended so far)
 *   current    the reference of what was written back since; not in the log yet
 *   image      the bytes in the DRAM tier; dirty when newer than current
 *
 *   write ---> image (dirty) --writeback--> current --publish in a transaction--> published
 *
 * Writeback always goes to new space. What publishing replaces is free once the transaction is durable; an unpublished current
 * reference that is replaced is free at once: nothing durable ever named it. Both only with their last owner, for
 * what is stored may belong to several chunks (ht_obj_clone).
 *
 * A scope groups objects that are published together (a model root); scope 0 is
 * everything else, published by fsync of each object and by the commit timer.
 *
 * Transactions: metadata changes (of names, optimizers and objects) happen
 * between ht_tx_begin and ht_tx_commit; only one transaction is open at a time, so the order of
 * changes in memory is the order in the log. No I/O happens inside one.
 *
 * Lock order: transaction lock > names (fs/ns) > optimizer > store > journal > device
 * (all locks: <hitrain/locks.h>).
 * Functions below that wait for I/O or memory (marked WAITS) must be called with none of these held.
 *
 * Errors: negative errno. -EIO: device error or checksum mismatch; -ENOSPC: no space
 * for the data, or no room in the log for the metadata; -EROFS: the store is read-only.
 */
#ifndef HITRAIN_TIERING_STORE_STORE_H
#define HITRAIN_TIERING_STORE_STORE_H

#include "tiering/base/base.h"
#include <sys/types.h>
#include "tiering/base/buf.h"
#include "tiering/base/mem.h"
#include "tiering/io/rings.h"
#include "tiering/journal/journal.h"
#include "tiering/base/list.h"
#include "tiering/space/super.h"
#include "tiering/store/stream.h"
#include <hitrain/format.h>

struct ht_store;
struct ht_obj;
struct ht_tx; /* a group of log records being collected */

/* ------------------------------------------------------------------ life */

struct ht_store_opts {
    uint64_t dram_bytes;       /* DRAM tier; 0: a quarter of the available memory; at least 8 MiB */
    uint64_t handout_bytes;    /* of that, for images that are handed out; at most 75 % */
    uint64_t staging_bytes;    /* staging pool; 0: 64 MiB; at least 16 MiB */
    uint64_t scrub_rate_bytes; /* a scrub reads so much a second at most; 0: 64 MiB */
    unsigned commit_ms;        /* unsynced data outside scopes may stay volatile so long; 0: no timer */
    bool read_only;
    unsigned answer_ms; /* a device with an older request does not answer; 0: 30 s */
    bool degraded;      /* go on without members that are missing */
    bool
        force_damaged_log; /* fsck only: replay the longest chain though it is damaged; implies read_only, but for repair */
    bool leave_out;        /* fsck only: what makes no sense in the log is left out and remembered, not refused */
    bool repair;           /* fsck only, with leave_out: write all the same; a compaction makes it last */
    int numa_node;         /* or HT_NUMA_OFF, HT_NUMA_AUTO: those of the devices */
    bool no_threads;       /* no background threads: tests drive writeback and compaction themselves */
};

/* Metadata of other layers that lives in the same log. Record types [type_first, type_last]. */
struct ht_meta_client {
    uint16_t type_first, type_last;
    void *ctx;
    /* One record; called in log order during mount. -EUCLEAN: malformed. Unknown ids are no error: a later record decides. */
    int (*replay)(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len);
    /* The whole log was replayed: check and link up. -EUCLEAN refuses the mount. */
    int (*replayed)(void *ctx);
    /*
     * Compaction: put published state into tx, about max_bytes of it, starting at *cursor (0 at first) and
     * advancing it. Called inside a transaction, with no other lock held. 1: more to come, 0: complete, or -errno.
     */
    int (*emit)(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes);
    /* The commit timer: put what became dirty outside scopes (times, sizes) into tx. Called inside a transaction. May be NULL. */
    void (*flush)(void *ctx, struct ht_tx *tx);
};

/*
 * Attach to the devices (which stay the caller's: close them after ht_store_close): read superblocks, check that they belong
 * together. Nothing is written. devs in any order; on success ordered by index.
 * Errors: those of ht_super_read; -EXDEV: devices of different stores, or members that have diverged; -ENODEV: a member is missing
 * and opts do not say degraded; -ESTALE: the members with the newest log are missing.
 * The reason is told through ht_error.
 */
int ht_store_new(struct ht_dev *devs[], unsigned dev_count, const struct ht_store_opts *opts,
                 struct ht_store **out_store) HT_CHECK;
int ht_store_register(struct ht_store *s, const struct ht_meta_client *client) HT_CHECK;
/* Before mount, for fsck: ht_journal_mend. Writes to the devices also where the store is read-only. */
int ht_store_mend_log(struct ht_store *s, unsigned *out_frames) HT_CHECK;
/* The same in memory: a read-only mount goes by it. */
int ht_store_mend_log_aside(struct ht_store *s, unsigned *out_frames) HT_CHECK;
/* Replay the log and, unless read-only, begin to write. WAITS. -EUCLEAN: damaged; see ht_store_log_report. */
int ht_store_mount(struct ht_store *s) HT_CHECK;
/* Write back and publish everything outside scopes, mark clean, stop threads. Pending state of scopes is dropped. WAITS. */
int ht_store_unmount(struct ht_store *s) HT_CHECK;
/* Free everything; when still mounted, as after a crash: nothing more is written. */
void ht_store_close(struct ht_store *s);

const struct ht_super *ht_store_super(const struct ht_store *s);
/* The NUMA nodes that memory comes from: none where it does not matter. */
const struct ht_nodes *ht_store_nodes(const struct ht_store *s);
/* The place in them where what is at this offset should be worked on, or HT_NEAR_ANY. */
int ht_obj_near(struct ht_obj *o, uint64_t offset);
const struct ht_journal_report *ht_store_log_report(const struct ht_store *s);
bool ht_store_read_only(const struct ht_store *s);
/* The log has failed: not everything that was changed is durable, nor will be. */
bool ht_store_failed(const struct ht_store *s);
/* Opened with leave_out: metadata clients do so, too. */
bool ht_store_leaves_out(const struct ht_store *s);

/* ---------------------------------------------------------- transactions */

/* Open the transaction; bytes: about how much will be put (room in the log is waited for). WAITS. */
int ht_tx_begin(struct ht_store *s, size_t bytes, struct ht_tx **out_tx) HT_CHECK;
/*
 * What was written to a device, and not flushed there, is given up when a flush of the device fails: it is dirty again. So that a publication
 * does not miss that, its transaction begins only if nothing was given up since its writeback began:
 *
 *     struct ht_rounds rounds = HT_ROUNDS_INIT;
 *     do {
 *         ht_rounds_next(s, &rounds);
 *         rc = ht_obj_writeback_flushed(obj);
 *         if (!rc)
 *             rc = ht_tx_begin_round(s, bytes, &rounds, &tx);
 *     } while (rc == -EAGAIN);
 *
 * -EAGAIN: no transaction is open, begin again with the writeback; -EIO instead after HT_ROUNDS_MAX rounds.
 */
enum { HT_ROUNDS_MAX = 8 };
struct ht_rounds {
    uint64_t given_up;
    unsigned count;
};
#define HT_ROUNDS_INIT \
    {                  \
        0, 0           \
    }
void ht_rounds_next(struct ht_store *s, struct ht_rounds *r);
int ht_tx_begin_round(struct ht_store *s, size_t bytes, struct ht_rounds *r, struct ht_tx **out_tx) HT_CHECK;
/*
 * To an open transaction in which nothing was put yet: so many bytes are going to be put, as can be known only now that no other transaction
 * publishes. -ENOMEM: put nothing, and commit that; later a lack of memory would end the log.
 */
int ht_tx_expect(struct ht_tx *tx, size_t bytes) HT_CHECK;
/* The buffer records are put into with ht_record_begin/end/put. */
struct ht_buf *ht_tx_records(struct ht_tx *tx);
/* Append what was put. *out_lsn (may be NULL): for ht_store_sync; 0 when nothing was put. Always closes the transaction.
 * An error means the log has failed: the store is read-only from now on. */
int ht_tx_commit(struct ht_tx *tx, uint64_t *out_lsn);
/* Wait until everything up to lsn is durable. WAITS. lsn 0 returns at once. */
int ht_store_sync(struct ht_store *s, uint64_t lsn) HT_CHECK;
/* Claim log bytes for metadata that begins to exist (before the change), give them back when it ends. -ENOSPC */
int ht_store_claim(struct ht_store *s, uint64_t bytes) HT_CHECK;
void ht_store_claim_force(struct ht_store *s, uint64_t bytes);
void ht_store_unclaim(struct ht_store *s, uint64_t bytes);
/* A number never used before in this store, for objects and inodes alike (first: 2). 0: there is none left, which only a forged log brings about. */
uint64_t ht_store_new_id(struct ht_store *s);
/* Tell of an id found in replay. */
void ht_store_saw_id(struct ht_store *s, uint64_t id);

/* --------------------------------------------------------------- objects */

struct ht_obj_attr {
    uint64_t oid;         /* from ht_store_new_id; 0 is -ENOSPC */
    uint32_t chunk_bytes; /* HT_CHUNK_BYTES or HT_SMALL_CHUNK_BYTES */
    uint32_t obj_class;   /* HT_CLASS_DURABLE; HT_CLASS_SCRATCH: never published, gone at unmount */
    uint64_t scope;       /* 0 or the id of a model root */
};

/*
 * Make an empty object, known at once, published with the next ht_obj_publish. The caller gets a reference. -ENOSPC.
 */
int ht_obj_create(struct ht_store *s, const struct ht_obj_attr *attr, struct ht_obj **out_obj) HT_CHECK;
/* Log bytes that an object claims when it is created. */
uint64_t ht_obj_claim_bytes(void);
/* A reference to an object that exists (also one deleted in a scope but not published so), or NULL. */
struct ht_obj *ht_obj_get(struct ht_store *s, uint64_t oid);
void ht_obj_put(struct ht_obj *obj);
/*
 * Delete: inside a transaction; in scope 0 the deletion is put into tx, in a scope it is pending until
 * ht_scope_publish. The content goes with the last reference. Never fails.
 */
void ht_obj_delete(struct ht_obj *obj, struct ht_tx *tx);
/* Allowed while the object has never held a byte; else -EBUSY. */
int ht_obj_set_chunk_bytes(struct ht_obj *obj, uint32_t chunk_bytes) HT_CHECK;
/*
 * Move an object into another scope: inside a transaction. Into that of a model root only if it is wholly published (see ht_obj_sync), else
 * -EBUSY. Into scope 0 also with content that is dirty or unpublished, which is published with that scope from then on; that does not fail
 * for an object that is published at all.
 */
int ht_obj_set_scope(struct ht_obj *obj, uint64_t scope, struct ht_tx *tx) HT_CHECK;

struct ht_obj_stat {
    uint64_t oid, size, scope;
    uint32_t chunk_bytes, obj_class;
    uint64_t stored_bytes;   /* on devices, current references, in whole blocks; shared ones count for each owner */
    uint64_t promised_bytes; /* set aside by ht_obj_allocate, not written yet */
    uint64_t resident_bytes, dirty_bytes;
    uint64_t hits, misses; /* chunk accesses served from the image, or not; up to UINT32_MAX */
    uint64_t device_read_bytes, device_written_bytes;
    uint64_t version; /* grows with every change of content */
    bool unpublished; /* there is something ht_obj_publish would put */
    int error;        /* write error that no writeback or sync has reported yet, or 0 */
    int sticky_error; /* the last write error, reported or not, until ht_obj_clear_error */
};
void ht_obj_stat(struct ht_obj *obj, struct ht_obj_stat *out);
/* Forget a write error: somebody has seen it. */
void ht_obj_clear_error(struct ht_obj *obj);
/* Something written to it did not get here: sticky_error keeps it; report: nobody was told, the next sync tells it. */
void ht_obj_note_error(struct ht_obj *obj, int error, bool report);
uint64_t ht_obj_id(const struct ht_obj *obj);
uint64_t ht_obj_size(struct ht_obj *obj);
uint32_t ht_obj_chunk_bytes(const struct ht_obj *obj);

/*
 * Who reads an object through one descriptor: where reading ahead has got to for him. All zero at first, and the store's from
 * the first read on, until its end. The object outlives it.
 */
struct ht_obj_reader {
    struct ht_obj *obj;    /* NULL: has not read yet */
    struct ht_list hungry; /* in a list while there is something to read ahead */
    struct ht_stream stream;
    uint64_t next, end; /* chunks to read ahead */
    unsigned missing;   /* of his reads that wait for a device */
};
void ht_obj_reader_end(struct ht_obj_reader *reader);
/* Read up to len bytes at off; holes are zeros. Returns the count (short only at the end of the object) or -errno. -ESTALE: an abort took
 * the object back. WAITS. */
ssize_t ht_obj_read(struct ht_obj *obj, uint64_t off, void *buf, size_t len) HT_CHECK;
/*
 * The same without a copy where one chunk has it all: fn is called once, with the bytes in the chunk's image, which it is to use before
 * it returns, or in buf. It must not come back to the store. Not called when the result is an error. reader: for whom to read
 * ahead, or NULL. WAITS.
 */
typedef void (*ht_obj_read_fn)(void *ctx, const void *bytes, size_t len);
ssize_t ht_obj_read_in_place(struct ht_obj *obj, struct ht_obj_reader *reader, uint64_t off, void *buf, size_t len,
                             ht_obj_read_fn fn, void *ctx) HT_CHECK;
/*
 * Write; grows the object. All or nothing is promised per chunk only: returns the count written, which is short
 * when a later chunk failed, or -errno when nothing was. WAITS. -EFBIG beyond HT_FILE_BYTES_MAX. -ESTALE as for reading.
 */
ssize_t ht_obj_write(struct ht_obj *obj, uint64_t off, const void *buf, size_t len) HT_CHECK;
/* Works on a full store too. WAITS. */
int ht_obj_truncate(struct ht_obj *obj, uint64_t size) HT_CHECK;
/*
 * For the writer of a piece that grew the object from size to end and now fails: the object gets its former size again. Nothing happens
 * when it does not end at end any more, for then another call has changed the size since. WAITS.
 */
int ht_obj_ungrow(struct ht_obj *obj, uint64_t size, uint64_t end) HT_CHECK;
/* Zero a range; frees whole chunks inside it. WAITS. */
int ht_obj_punch(struct ht_obj *obj, uint64_t off, uint64_t len) HT_CHECK;
/*
 * Copy a range as it was at some moment during the call: the target then has the same bytes, and is as large as a write would have
 * made it. Returns the count, short at the end of the source or when a later part failed, or -errno when nothing was done. WAITS.
 * Whole chunks at the same offset inside chunks of the same size are not copied: both objects own what is stored, until
 * one writes (also the last, partial chunk of the source if the target holds nothing behind it). For that dirty images of the
 * source are written back, though nothing is published, and a target that never held a byte takes the chunk size
 * of the source. Holes become holes. Everything else is copied through memory, and so is all of or into a scratch object.
 * -EINVAL: the ranges overlap in one object. -EFBIG: beyond HT_FILE_BYTES_MAX. -ENOSPC, -EIO: as for reading and writing; what a
 * guaranteed object shares needs space as if it were copied.
 */
ssize_t ht_obj_clone(struct ht_obj *src, uint64_t src_off, struct ht_obj *dst, uint64_t dst_off, uint64_t len) HT_CHECK;
/*
 * Set space aside (posix_fallocate): until unmount the first write to a chunk of the range, up to the range's end in it, does not fail
 * with -ENOSPC, neither for data nor for log room. The size stays, and the range may lie beyond it; reads and seeks see no
 * difference. What is stored already gets nothing: writing it again needs new space, as everywhere; so does writing more to a chunk that
 * was written back in part, beyond what is left of its promise. Truncating (also to the size it has), punching and deleting give the
 * space back; so does abort, if anything of the object changed. -ENOSPC: nothing is changed. -EFBIG: beyond HT_FILE_BYTES_MAX.
 */
int ht_obj_allocate(struct ht_obj *obj, uint64_t off, uint64_t len) HT_CHECK;
/* Offset of the next data (hole: the next hole) at or after off, or -ENXIO at or beyond the end. In whole chunks. */
int64_t ht_obj_seek(struct ht_obj *obj, uint64_t off, bool hole) HT_CHECK;

/* Write dirty images to devices; nothing is published. Returns the first error (also a sticky one, which it clears). WAITS. */
int ht_obj_writeback(struct ht_obj *obj) HT_CHECK;
/* The same, and on the media: what to do before publishing something that has to be durable soon. WAITS. */
int ht_obj_writeback_flushed(struct ht_obj *obj) HT_CHECK;
/*
 * Put references and size that are not published into tx. In a scope: this object alone (fsync of one file below a root). In a transaction
 * that began with ht_tx_begin_round this is all that the writeback wrote; in another one it is what happens to be written.
 */
void ht_obj_publish(struct ht_obj *obj, struct ht_tx *tx);
/* About how many bytes that would put now; at least as many. */
size_t ht_obj_pending_bytes(struct ht_obj *obj);
/* Writeback, publish in a transaction of its own, wait until durable. WAITS. */
int ht_obj_sync(struct ht_obj *obj) HT_CHECK;
/* Bring chunks into the DRAM tier as far as there is room (WAITS), or push clean ones out. */
int ht_obj_prefetch(struct ht_obj *obj) HT_CHECK;
void ht_obj_evict(struct ht_obj *obj);
/* Nobody updates it any more: its images may be evicted as others are. */
void ht_obj_let_go(struct ht_obj *obj);
/*
 * Promise that every chunk of the object, up to size bytes, can be rewritten once between two publications
 * without -ENOSPC. Lasts until the object is deleted, or is asked for again with another size (0: end). -ENOSPC.
 */
int ht_obj_guarantee(struct ht_obj *obj, uint64_t size) HT_CHECK;
/* Forget all content at once, published or not, without a log record: for scratch objects only. WAITS. */
void ht_obj_scratch_clear(struct ht_obj *obj);
/* The same for a range of whole chunks. */
void ht_obj_scratch_drop(struct ht_obj *obj, uint64_t first_chunk, uint64_t count);

/* ------------------------------------------------------------ handed out */

/*
 * An object's content as a file of memory, for others to read and map: *out_fd, the store's, always as large as the object. Until it is
 * handed back what the file shows is the object's content, whoever changes it: writes, updates, truncation, abort. WAITS: for
 * reading all of it. A scratch object's memory is there when somebody touches it: the file tells whether anybody did. -EINVAL: an object of
 * small chunks, or an empty one; -ENOSPC: the share of memory is used up; -EIO: not all of it can
 * be read; -EBUSY: it changed meanwhile. Not while it is out.
 */
int ht_obj_hand_out(struct ht_obj *obj, int *out_fd) HT_CHECK;
/*
 * The same on behalf of a user: to one other than root (0) go at most HT_HANDED_USER_QUARTERS of the share, and of the number, so that something is
 * left for others, whatever one of them opens. -EDQUOT. While it is out, it cannot grow beyond that either (-ENOSPC).
 */
int ht_obj_hand_out_to(struct ht_obj *obj, uint32_t user, int *out_fd) HT_CHECK;
/* From now on others may change it without a word. Promises its whole rewrite: -ENOSPC. WAITS. */
int ht_obj_expect_stores(struct ht_obj *obj) HT_CHECK;
/* Nobody has it any more: the memory stays until another object wants it. */
void ht_obj_hand_back(struct ht_obj *obj);
/* What was changed without a word is dirty from now on. ht_obj_writeback, ht_obj_sync and ht_scope_writeback begin with it. WAITS. */
int ht_obj_find_changes(struct ht_obj *obj) HT_CHECK;
/* After ht_scope_abort, and its transaction: the files show the old content again. WAITS. */
int ht_scope_restore_handed(struct ht_store *s, uint64_t scope) HT_CHECK;

/* ---------------------------------------------------------------- scopes */

/* Write back every dirty image of the scope's objects, and flush. WAITS. */
int ht_scope_writeback(struct ht_store *s, uint64_t scope) HT_CHECK;
/* Put everything unpublished of the scope's objects into tx: sizes, references, deletions. */
void ht_scope_publish(struct ht_store *s, uint64_t scope, struct ht_tx *tx);
/* How many bytes ht_scope_publish would put now, and some for every dirty image, which may be written back before that. */
size_t ht_scope_pending_bytes(struct ht_store *s, uint64_t scope);
/*
 * Back to what is published: content, sizes; objects created since are deleted, objects deleted since are there
 * again. No lease or lock on them may be held. Waits for chunks in use; may be called inside a transaction that publishes nothing:
 * who holds a chunk may wait for the space that a publication frees.
 */
int ht_scope_abort(struct ht_store *s, uint64_t scope) HT_CHECK;

/* ---------------------------------------------------------------- leases */

/*
 * A lease holds a few chunks for one piece of work: exclusively (update) or shared
 * (read; the chunk is held exclusively all the same). Chunks with an image are used there; others pass through staging buffers, all of which are taken
 * at once, so leases never wait for each other's memory: this is how updates make progress with the staging pool alone.
 *
 *   begin   take the chunks in (object, index) order and the buffers, submit the reads. WAITS.
 *   wait    until the bytes are there, checksums verified. -EIO: then end with dirty = 0, and finish.
 *   (work on .data)
 *   end     dirty: mark images dirty, or start writing staged chunks to new space
 *   finish  wait for those writes, install their references, let go. Must follow end. Readers see the new content from now on.
 *
 * A thread may have two leases open if they share no chunk, begin()ing the second only after wait() on the first, and with
 * nowait set: -EAGAIN when the buffers are not there at once (finish the first, then try again).
 */
enum { HT_LEASE_CHUNKS_MAX = 12 };
enum ht_lease_mode {
    HT_LEASE_READ,
    HT_LEASE_UPDATE,    /* read and write */
    HT_LEASE_OVERWRITE, /* write all of it: the old content is not read */
};
struct ht_lease_chunk {
    struct ht_obj *obj;      /* in; the caller keeps its reference meanwhile */
    uint64_t index;          /* in: chunk */
    enum ht_lease_mode mode; /* in */
    uint32_t len;            /* out: bytes of this chunk inside the object's size */
    uint8_t *data;           /* out: len bytes, aligned to 4096; holes are zeros */
    bool staged;             /* out */
};
struct ht_lease {
    struct ht_store *store;
    unsigned count;
    struct ht_lease_chunk chunk[HT_LEASE_CHUNKS_MAX];
    bool nowait; /* do not wait for staging buffers: for a second lease of a thread */
    struct ht_ring *ring_;
    void *priv_;
};
int ht_lease_begin(struct ht_lease *l) HT_CHECK;
int ht_lease_wait(struct ht_lease *l) HT_CHECK;
/* dirty: bit i set: chunk i was changed (only for UPDATE and OVERWRITE). */
void ht_lease_end(struct ht_lease *l, uint32_t dirty);
int ht_lease_finish(struct ht_lease *l) HT_CHECK;

/* ----------------------------------------------------------------- scrub */

/*
 * One run reads and verifies everything once: superblock copies, log copies, and every stored chunk that a reference names, past
 * the DRAM tier. What is bad is written anew from a second copy: superblocks and log frames from another one, chunks from their image in
 * DRAM, to a new place. Else it is counted and told (events scrub-*); reads of it go on to be -EIO. A run ends with the
 * mount, and the next one begins at the beginning.
 */
enum ht_scrub_state { HT_SCRUB_NEVER, HT_SCRUB_RUNNING, HT_SCRUB_COMPLETE, HT_SCRUB_STOPPED, HT_SCRUB_FAILED };
struct ht_scrub_stats {
    uint64_t state; /* enum ht_scrub_state */
    /* Of the run that is under way, or the last one. total: what there was to read when it began. */
    uint64_t run_bytes, run_total_bytes, run_ns, run_found, run_repaired;
    uint64_t runs, bytes, found, repaired; /* since the mount; runs: complete ones */
};
/* Start a run in the background. -EBUSY: there is one. The store is mounted. */
int ht_store_scrub_start(struct ht_store *s) HT_CHECK;
/* End it. WAITS. -ESRCH: there is none. */
int ht_store_scrub_stop(struct ht_store *s) HT_CHECK;
/* A whole run in this thread, as fast as it goes. WAITS. What was found is in the figures. */
int ht_store_scrub(struct ht_store *s) HT_CHECK;
void ht_store_scrub_stats(struct ht_store *s, struct ht_scrub_stats *out);

/* ------------------------------------------------------------ inspection */

struct ht_store_stats {
    uint64_t total_bytes, free_bytes, available_bytes, reserved_bytes, limbo_bytes; /* space for data */
    uint64_t objects, chunks, lost_chunks; /* published; of them those marked lost */
    uint64_t dram_bytes, dram_used_bytes, dram_dirty_bytes, dram_kept_bytes, dram_staying_bytes;
    uint64_t handout_bytes, handed_bytes,
        handed_count; /* share; memory that was handed out and is out or kept; objects */
    uint64_t staging_bytes, staging_used_bytes;
    uint64_t locked_bytes; /* of all that memory; of mappings, which may be larger than what they show */
    uint64_t huge_bytes;   /* of tier and pool in huge pages, as they were populated */
    struct ht_rings_stats io;
    uint64_t hits, misses, evictions, writebacks;
    uint64_t room_waits;                             /* requests that waited for room in the DRAM tier */
    uint64_t ahead_chunks, ahead_hits, ahead_wasted; /* read ahead; of them used, and gone unused */
    uint64_t device_read_bytes, device_written_bytes, device_flushes;
    uint64_t checksum_errors, read_errors, write_errors;
    uint64_t commits;    /* transactions made durable by someone waiting */
    uint64_t meta_bytes; /* heap held for objects and chunks */
    /*
     * Heap held for descriptors of the DRAM tier (800 bytes for each MiB of it, and what is remembered of images that went), maps of the
     * devices (34 MiB for each TiB), buffers of the log and of leases, and extents of chunks that lie in several pieces.
     */
    uint64_t working_bytes;
    uint64_t next_id;
    struct ht_journal_stats log;
};
void ht_store_stats(struct ht_store *s, struct ht_store_stats *out);

/* One of ht_store_nodes. */
struct ht_node_stat {
    uint64_t dram_bytes, dram_used_bytes, staging_bytes; /* its share; not of what is handed out */
    uint64_t away_bytes;                                 /* of that what the system took from another node, about */
};
void ht_store_node_stat(struct ht_store *s, unsigned place, struct ht_node_stat *out);

/* One device of the store. */
enum ht_log_copy_state { HT_LOG_COPY_NONE, HT_LOG_COPY_WRITTEN, HT_LOG_COPY_LOST };
struct ht_device_stat {
    const char *name;                /* path; NULL: missing. Lives as long as the store */
    uint64_t bytes;                  /* as it was formatted */
    uint64_t data_bytes, free_bytes; /* of that for data, and unused of it */
    uint64_t bad_bytes;              /* did not take what was written to them; not used in this mount */
    enum ht_health health;
    uint64_t oldest_request_ns;
    enum ht_log_copy_state log; /* HT_LOG_COPY_LOST: missing, or not written any more */
    struct ht_dev_counters io;
};
unsigned ht_store_device_count(const struct ht_store *s);
void ht_store_device_stat(struct ht_store *s, unsigned index, struct ht_device_stat *out);
/* Look at the health of all devices now, and tell what has changed: what a thread does four times in each answer_ms. */
void ht_store_watch_devices(struct ht_store *s);
/* Its available_bytes alone: cheap. */
uint64_t ht_store_available(struct ht_store *s);
/* Publish everything outside scopes and make it durable: sync(2). WAITS. */
int ht_store_commit(struct ht_store *s) HT_CHECK;
/* Clean some dirty images, as memory pressure does. Returns how many were cleaned, or the error if none could be. WAITS. */
int ht_writeback_now(struct ht_store *s) HT_CHECK;
/* With no_threads: read what is to be read ahead of readers now. WAITS. */
void ht_store_read_ahead(struct ht_store *s);
/* With no_threads: one whole compaction now. WAITS. */
int ht_store_compact(struct ht_store *s) HT_CHECK;
/* A copy of the log that dropped out is brought up and written again, as a thread does some time after. -ENOENT: none is out. WAITS. */
int ht_store_rejoin_log(struct ht_store *s) HT_CHECK;

/* The checksum of a stored chunk: what a reference carries. Any thread. */
uint64_t ht_store_checksum(const struct ht_store *s, const void *stored, size_t len);
/* For fsck: walk published references in (oid, index) order, one call per chunk. Non-zero from fn ends the walk. */
struct ht_chunk_info {
    uint64_t oid, index, object_size;
    uint32_t chunk_bytes, stored_bytes, visible_bytes, generation;
    uint8_t codec;
    uint64_t checksum;
    unsigned extent_count;
    const struct ht_extent *extents;
};
struct ht_extent;
/* A chunk marked lost has stored_bytes 0 and no extents. */
int ht_store_walk(struct ht_store *s, int (*fn)(void *ctx, const struct ht_chunk_info *info), void *ctx) HT_CHECK;
/*
 * For fsck: extents that two references claim which are not owners of the very same, or that lie outside the data area, found in replay.
 */
struct ht_ref_conflict {
    uint64_t oid, index;
    uint32_t device;
    uint64_t block;
    uint32_t blocks;
    /* -EEXIST overlap, -ERANGE outside; with leave_out also -EFBIG larger than a chunk of its object, and -ENOENT an object
     * that no record described: its size was guessed */
    int error;
};
/*
 * For fsck: mark a published chunk lost. What its reference names comes free at the next mount. Durable with the next
 * sync. -ENOENT: there is no such chunk; -EBUSY: there is something newer. WAITS.
 */
int ht_store_lose_chunk(struct ht_store *s, uint64_t oid, uint64_t index) HT_CHECK;
/* Copies up to cap conflicts; returns how many there are in all. */
size_t ht_store_conflicts(struct ht_store *s, struct ht_ref_conflict *out, size_t cap);

#endif
