/* SPDX-License-Identifier: Apache-2.0 */
/* background.h - engines that work in the background: how they do, pausing them, and what each has to be told. */
#pragma once

#include "tiering/base/base.h"

struct ht_store;

/* How the step of an engine went. */
enum ht_step {
    HT_STEP_WORKED,  /* there may be more to do */
    HT_STEP_IDLE,    /* there is nothing to do, or not before budget.at_ns */
    HT_STEP_BLOCKED, /* there is something to do that cannot be done now */
};

struct ht_budget {
    uint64_t most_bytes; /* in: the step ends when it has moved so many */
    uint64_t until_ns;   /* in: and when it is that late, after one piece of work at least */
    bool may_be_long;    /* in: nobody needs the thread before the step has ended */
    uint64_t bytes;      /* out: moved */
    bool next_is_long;   /* out: what comes next may take longer than such a step. It comes with may_be_long */
    bool begun;          /* a piece of work was done; for loops of engines */
    uint64_t at_ns;      /* out, of an idle step: when the next one is due; 0: when the row is woken */
};
static inline enum ht_step ht_idle_until(struct ht_budget *b, uint64_t at_ns)
{
    b->at_ns = at_ns;
    return HT_STEP_IDLE;
}

enum ht_background_state {
    HT_BACKGROUND_IDLE,
    HT_BACKGROUND_WORKING, /* in a step, or between two as its budget allows */
    HT_BACKGROUND_BLOCKED, /* it waits and tries again: what it needs is not there now */
    HT_BACKGROUND_PAUSED,
    HT_BACKGROUND_OFF, /* by an option of the mount */
};

/* A figure that only one engine has. */
struct ht_engine_figure {
    const char *key;
    const char *help;
    bool gauge; /* or it only grows */
};
enum { HT_ENGINE_FIGURES_MAX = 8 };

struct ht_background_stat {
    const char *engine;
    enum ht_background_state state;
    uint64_t steps, blocked; /* blocked: steps that could do nothing */
    uint64_t bytes;          /* read and written */
    uint64_t cpu_ns;         /* processor time */
    /* Since it was idle last, with its waits, without pauses: what a rate is computed from. */
    uint64_t run_bytes, run_ns;
    const struct ht_engine_figure *figure;
    unsigned figures;
    uint64_t value[HT_ENGINE_FIGURES_MAX];
};

/* The engines, from 0 on. -ENOENT: there are fewer. */
int ht_store_background_stat(struct ht_store *s, unsigned index, struct ht_background_stat *out) HT_MUST_CHECK;
/*
 * Paused engines begin no step; one that runs ends soon, after 1 MiB or 10 ms. A pause lasts until resume or the end of
 * the mount. engine NULL: all. -ENOENT: there is no such engine.
 */
int ht_store_background_pause(struct ht_store *s, const char *engine) HT_MUST_CHECK;
int ht_store_background_resume(struct ht_store *s, const char *engine) HT_MUST_CHECK;
/*
 * A pool of threads takes over the background work, so that it is done only by threads that have nothing better to do.
 * The pool has at least two, one of which is free at any time: commits and updates may need the other one. False: this
 * mount has no background work. Until it is taken back no thread of the store's own does any.
 */
bool ht_store_background_lend(struct ht_store *s);
/* No thread of the pool serves then. The store's own thread goes on. */
void ht_store_background_take_back(struct ht_store *s);
/*
 * The calling thread of the pool does background work until it is recalled; once: at most one unit, which takes some
 * 10 ms. Returns at once if another thread serves. It holds nothing. False: the work was taken back, or has ended.
 */
bool ht_store_background_serve(struct ht_store *s, bool once);
/*
 * The thread that serves, or the next one, is needed: it returns after its unit, and waits no longer for its permission
 * for a device. Any thread, with any lock above those of engines.
 */
void ht_store_background_recall(struct ht_store *s);
const char *ht_background_state_word(enum ht_background_state state);

/*
 * The calling thread, which is none of the store's, reads as the background does until it says false: its requests go
 * to the devices in the pauses of others, or within a small share of these, and past the DRAM
 * tier. It holds nothing that others wait for.
 */
void ht_background_reads(bool on);

/* -------------------------------------------------------------------- scrub */

/*
 * A run finds and repairs decay: it reads and verifies everything on the devices once: superblock copies, log copies,
 * and every stored chunk that a reference names, past the DRAM tier. Damage is written anew from a second copy:
 * superblocks and log frames from another copy, chunks from their image in DRAM, to a new place. Content with several
 * owners is read once, unless it is bad. Damage without a second copy is counted and reported (events scrub-*); reads
 * of it still return -EIO. A run ends with the mount, and the next one begins at the beginning.
 */
enum ht_scrub_state { HT_SCRUB_NEVER, HT_SCRUB_RUNNING, HT_SCRUB_COMPLETE, HT_SCRUB_STOPPED, HT_SCRUB_FAILED };
struct ht_scrub_stats {
    uint64_t state; /* enum ht_scrub_state */
    /* Of the present run, or the last one. total: the bytes in use on the devices when it began. */
    uint64_t run_bytes, run_total_bytes, run_ns, run_found, run_repaired;
    uint64_t runs, bytes, found, repaired; /* since the mount; runs: complete ones */
};
/* Starts a run in the background. -EBUSY: there is one. The store is mounted. */
int ht_store_scrub_start(struct ht_store *s) HT_MUST_CHECK;
/* Ends it. WAITS. -ESRCH: there is none. */
int ht_store_scrub_stop(struct ht_store *s);
void ht_store_scrub_stats(struct ht_store *s, struct ht_scrub_stats *out);

/* -------------------------------------------------------------------- dedup */

/*
 * Objects that the mount has found, and whose owner reserves their rewrites, have their reserves: the first pass begins
 * now. Without this call it begins two commit periods after the mount.
 */
void ht_store_reserves_complete(struct ht_store *s);

/* ----------------------------------------------------------------- compress */

/*
 * May the content of this object be compressed? oid 0: may that of any object? Called by the engine's thread, which
 * holds no lock.
 */
typedef bool (*ht_compress_fn)(void *ctx, uint64_t oid);
/* Before the mount. Without it nothing is compressed. */
void ht_store_set_compress(struct ht_store *s, ht_compress_fn fn, void *ctx);
/* Some object may be compressed now: the engine has work from time to time. */
void ht_store_wake_compress(struct ht_store *s);

/* ------------------------------------------------------------------ discard */

/*
 * Discards all free space in runs of at least 64 KiB, in this thread, whatever the options say. WAITS. *out_bytes: how
 * much. -EROFS; -EOPNOTSUPP: no device can; -ECANCELED: ht_store_trim_cancel was called; or the error of a device.
 */
int ht_store_trim(struct ht_store *s, uint64_t *out_bytes) HT_MUST_CHECK;
/* The store is about to be unmounted: ends every trim after its batch, for good. Any thread, any lock held. */
void ht_store_trim_cancel(struct ht_store *s);

/* ------------------------------------------------------------------- digest */

/*
 * Digests of kept steps. The store does not know names, so an upper folder does the work, step by step
 * (fs/ctl/digest.c); the engine gives it a thread, pace, pause and figures.
 */
enum ht_digest_figure { HT_DIGEST_DONE, HT_DIGEST_FAILED, HT_DIGEST_LEFT_BYTES, HT_DIGEST_FIGURES };

struct ht_digest_client {
    void *ctx;
    /*
     * As the step of an engine: at most b->most_bytes, and not much longer than until b->until_ns. One at a time, with
     * no lock held. Reads go past the DRAM tier (ht_obj_read).
     */
    enum ht_step (*step)(void *ctx, struct ht_budget *b);
    void (*values)(void *ctx, uint64_t out[HT_DIGEST_FIGURES]); /* any thread */
};
/* After the mount, once. The client lives until ht_store_end_digest. */
void ht_store_begin_digest(struct ht_store *s, const struct ht_digest_client *client);
/* The client is not called any more when this returns. Without a client: nothing. No lock held. WAITS for a step. */
void ht_store_end_digest(struct ht_store *s);
/* There may be work, at once or soon. Any thread; locks above that of engines may be held. */
void ht_store_wake_digest(struct ht_store *s);
