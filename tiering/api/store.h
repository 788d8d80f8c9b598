/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store.h - the life of a store. The headers of this folder are the only interface to the tiers: objects, transactions,
 * scopes, batch pins.
 *
 * An object is a sequence of bytes with an id, cut into chunks. A chunk has up to three forms:
 *
 *   published  the reference the log holds (or will hold with the transactions appended so far)
 *   current    the reference of a later writeback; not in the log yet
 *   image      the bytes in the DRAM tier; dirty when newer than current
 *
 *   write ---> image (dirty) --writeback--> current --publish in a transaction--> published
 *
 * Writeback always goes to new space. The space that a publication replaces is free once the transaction is durable.
 * The space of an unpublished current reference that is replaced is free at once: nothing durable ever named it. Both
 * only with their last owner, for stored bytes may belong to several chunks (ht_obj_clone).
 *
 * A scope groups objects that are published together (a model root). Scope 0 is everything else, published by fsync of
 * each object and by the commit timer.
 *
 * Transactions: metadata changes (of names, optimizers and objects) happen between ht_tx_begin and ht_tx_commit. Only
 * one transaction is open at a time, so the order of changes in memory is the order in the log. No I/O happens inside
 * one.
 *
 * Lock order: transaction lock > names (fs/ns) > optimizer > store > journal > device (all locks: <hitrain/locks.h>).
 * Functions below that wait for I/O or memory (marked WAITS) must be called with none of these held.
 *
 * Errors: negative errno. -EIO: device error or checksum mismatch; -ENOSPC: no space for the data, or no space in the
 * log for the metadata; -EROFS: the store is read-only.
 */
#pragma once

#include "tiering/sys/nodes.h"
#include "tiering/io/dev.h"
#include "tiering/journal/journal.h"
#include "tiering/space/super.h"
#include "tiering/api/participant.h"

struct ht_trace;

/* ------------------------------------------------------------------ life */

/* Do writers compress new content at once? */
enum ht_inline {
    HT_INLINE_AUTO, /* where that is faster (tier/encode_policy.h) */
    HT_INLINE_OFF,
    HT_INLINE_ALWAYS,
};

/* Do devices forget space that became free? */
enum ht_discard_when {
    HT_DISCARD_OFF,
    HT_DISCARD_ON,   /* 2 s later */
    HT_DISCARD_AUTO, /* 30 s later, and no file that has all its bytes: they would go to others (ht_dev_facts) */
};

struct ht_store_opts {
    uint64_t dram_bytes;       /* DRAM tier; 0: a quarter of the available memory; at least 8 MiB */
    uint64_t shm_bytes;        /* of that, for images in shared memory; at most 75 % */
    bool shm_lent;             /* none of it: the tier lends up to 75 % to them when they are needed */
    uint64_t staging_bytes;    /* staging pool; 0: 64 MiB; at least 16 MiB */
    uint64_t scrub_rate_bytes; /* a scrub reads so much a second at most; 0: 64 MiB */
    /*
     * What engines in the background move in a second at most, all together, and their share of one processor; 0: any
     */
    uint64_t background_rate_bytes;
    unsigned background_cpu_percent;
    bool dedup;                 /* duplicates are found, and stored once */
    bool compact;               /* nearly empty groups of blocks are emptied */
    bool digest;                /* kept steps get digests */
    uint64_t dedup_index_bytes; /* heap for checksums at most; 0: 1/64 of dram_bytes */
    enum ht_discard_when discard;
    bool no_background;         /* no engine begins by itself; an operator may still scrub and trim */
    unsigned commit_ms;         /* unsynced data outside scopes may stay volatile so long; 0: no timer */
    unsigned compress_after_ms; /* content may be compressed when it has not changed for so long; 0: a minute */
    enum ht_inline compress_inline;
    bool read_only;
    unsigned answer_ms;          /* a device with an older request does not answer; 0: 30 s */
    unsigned capacity_answer_ms; /* the same for one of the class capacity; 0: 10 s */
    bool degraded;               /* go on without members that are missing */
    /* fsck only: replay the longest chain though it is damaged; implies read_only, except for repair */
    bool force_damaged_log;
    bool leave_out; /* fsck only: senseless records of the log are left out and remembered, not refused */
    bool repair;    /* fsck only, with leave_out: write all the same; a checkpoint makes it last */
    /* The vault of cold content. */
    const char *vault_url;                  /* NULL: as the log has it */
    const char *vault_programs;             /* the folder of the programs; NULL: that of this program */
    unsigned vault_timeout_ms, vault_slots; /* 0: 30 s, 16 */
    int numa_node;                          /* or HT_NUMA_OFF, HT_NUMA_AUTO: those of the devices */
    bool no_threads;                        /* no background threads: tests drive writeback and checkpoint themselves */
    bool no_plan;                           /* no plans: tests of what the store does without one */
    /* Tests: bytes with more owners stay where they are. 0: as engine/pass.h says. */
    unsigned owners_max;
};

/*
 * Attaches to the devices (which stay the caller's: close them after ht_store_close): reads superblocks, checks that
 * they belong together. Nothing is written. devs in any order; on success ordered by index. Errors: those of
 * ht_super_read; -EXDEV: devices of different stores, or members that have diverged; -ENODEV: a member is missing and
 * opts do not say degraded; -ESTALE: the members with the newest log are missing. Logs the reason through ht_error.
 */
int ht_store_new(struct ht_dev *devs[], unsigned dev_count, const struct ht_store_opts *opts,
                 struct ht_store **out_store) HT_MUST_CHECK;
/* Before the mount. The store calls participants in the order in which they registered: names, then the optimizer. */
int ht_store_register(struct ht_store *s, const struct ht_participant *participant) HT_MUST_CHECK;
/* Before mount, for fsck: ht_journal_cross_repair. Writes to the devices also where the store is read-only. */
int ht_store_cross_repair_log(struct ht_store *s, unsigned *out_frames) HT_MUST_CHECK;
/* The same in memory: a read-only mount uses the result. */
int ht_store_cross_repair_log_aside(struct ht_store *s, unsigned *out_frames) HT_MUST_CHECK;
/*
 * Replay the log and, unless read-only, begin to write. WAITS. -EUCLEAN: damaged; see ht_store_log_report.
 * -EOVERFLOW: its records describe more than hitrain writes into a log of its size (txn/replay.c).
 * -EPROTONOSUPPORT: the store has records or features that this program does not know, and that a writer would lose.
 * -EBUSY: another machine has it, or a mount by a name that locks do not know.
 */
int ht_store_mount(struct ht_store *s) HT_MUST_CHECK;
/*
 * Every HT_CLAIM_LOOK_MS from the mount on: answers another machine that asks whether the store is in use
 * (tiering/space/claim.h), and stops all writes if it was taken over. WAITS for a device.
 */
void ht_store_look_for_claims(struct ht_store *s);
/*
 * Writes back and publishes everything outside scopes, marks the store clean, stops threads. Drops pending state of
 * scopes. WAITS.
 */
int ht_store_unmount(struct ht_store *s) HT_MUST_CHECK;
/*
 * Ends the store's threads, which call participants and whoever gave it functions to call: these may go afterwards.
 * Writes nothing. Unmount and close do it, too.
 */
void ht_store_stop(struct ht_store *s);
/* Frees everything. A store that is still mounted ends as in a crash: nothing more is written. */
void ht_store_close(struct ht_store *s);

/* What of its superblock never changes. */
const struct ht_super_layout *ht_store_layout(const struct ht_store *s);
/* For a program whose other threads do not change the store: fsck, tests. */
const struct ht_super *ht_store_super(const struct ht_store *s);
/* The NUMA nodes that memory comes from: none where it does not matter. */
const struct ht_nodes *ht_store_nodes(const struct ht_store *s);
/* What programs and the optimizer do with the store's objects; they write it. */
struct ht_trace *ht_store_trace(const struct ht_store *s);
const struct ht_journal_report *ht_store_log_report(const struct ht_store *s);
bool ht_store_read_only(const struct ht_store *s);
/* The log has failed: not everything that was changed is durable, nor will be. */
bool ht_store_failed(const struct ht_store *s);
/* Opened with leave_out: participants do so, too. */
bool ht_store_leaves_out(const struct ht_store *s);

/* ---------------------------------------- work that threads do otherwise */

/*
 * So many bytes will wait in memory in each step (struct ht_batch_pin_chunk, waits): updated content leaves them room
 * in the protected set. 0: none.
 */
void ht_store_expect_waiting(struct ht_store *s, uint64_t bytes);
/* All updates of a step have run. waits: its gradients waited in memory. Other content may get more room, or less. */
void ht_store_end_step(struct ht_store *s, bool waits);
/* Publishes everything outside scopes and makes it durable: sync(2). WAITS. */
int ht_store_commit(struct ht_store *s) HT_MUST_CHECK;
/*
 * For a caller that was refused with -ENOSPC. 0: it may try again. At first this commits, because space that truncating
 * and rewriting gave up is free when that is published. again: the caller tried once more since then. So participants
 * give up what they can do without, as much as the refused call of this thread lacked (tiering/base/base.h,
 * participant.h). -ENOSPC: all together have less, and keep it; or it is the log that is full. WAITS.
 */
int ht_store_make_space(struct ht_store *s, bool again) HT_MUST_CHECK;
/* Bytes that participants could give up. */
uint64_t ht_store_could_give(struct ht_store *s);
/* With no_threads: makes all due readahead now. WAITS. */
void ht_store_readahead(struct ht_store *s);
/* With no_threads: makes a plan now if there is none, or ends a wrong one. */
void ht_store_plan(struct ht_store *s);
/* With no_threads: one whole checkpoint now. WAITS. */
int ht_store_checkpoint(struct ht_store *s) HT_MUST_CHECK;
/*
 * The budget of bytes that the devices may take in 24 hours; 0: none. An event tells when they took more: at most once
 * in 24 hours, unless the budget changes.
 */
void ht_store_set_endurance(struct ht_store *s, uint64_t day_bytes);
/*
 * Checks the health of all devices and the endurance now, and reports changes: a thread does so four times in the
 * shorter of answer_ms and capacity_answer_ms.
 */
void ht_store_watch_devices(struct ht_store *s);

/* Appends what the store is doing: requests of devices, the transaction, the log, chunks that threads hold. */
void ht_store_dump(struct ht_store *s, struct ht_dump *d);
/*
 * Asserts the invariants of all objects, images and space in memory (tiering/base/verify.h). idle: no other thread
 * works on the store.
 */
void ht_store_verify(struct ht_store *s, bool idle);
