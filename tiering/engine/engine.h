/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.h - work in the background. Each engine is a row of the table in engine.c; scheduler.h says what a row is.
 *
 *   lane        engines                          file
 *   commit      commit timer                     writeback.c
 *               writeback                        writeback.c   with several NUMA nodes each has a lane for it
 *   checkpoint  log checkpoint, resync           engine.c
 *   health      health of the devices            engine.c      waits for no device
 *   readahead   readahead                        readahead.c   on demand
 *   cold        content of the vault to memory   readahead.c   on demand; alone waits for the vault
 *   planner     plans of steps that repeat       planner.c     on demand, no I/O; next_use.c: what programs say
 *   background  scrub                            scrub.c       on demand, paced; background.c pauses and counts all
 *               deduplication                    dedup.c
 *               discard                          discard.c     on demand, with -o discard=on
 *               recompress                       recompress.c  from time to time if anything may be compressed, paced
 *               compaction                       move.c
 *               digests of kept steps            background.c  on demand; fs/ctl/digest.c does the work
 *
 * Scrub, deduplication and recompression look at content in a pass (pass.h).
 *
 * A new engine that no other thread waits for is a file with its ht_engine_type, a row of the lane `background`, and a
 * test file.
 */
#pragma once

#include "tiering/api/object.h"
#include "tiering/tier/forecast.h"
#include "tiering/engine/scheduler.h"

struct ht_chunk;

/* scrub.c, discard.c, readahead.c */
extern const struct ht_engine_type ht_scrub_engine, ht_discard_engine, ht_readahead_engine, ht_cold_engine;

/* The state of engine/, before and after everything else. -ENOMEM */
int ht_engine_setup(struct ht_store *s) HT_MUST_CHECK;
void ht_engine_teardown(struct ht_store *s);
/* Starts the lanes, unless the options say no_threads; stops all of them, and a scrub. No lock held. */
int ht_engine_start(struct ht_store *s) HT_MUST_CHECK;
void ht_engine_stop(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE);
/* Heap that engines have now for their work. */
uint64_t ht_engine_memory_bytes(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* The journal's wake: ctx is the store. The journal's lock may be held. */
void ht_engine_wake_checkpoint(void *ctx);
/* The store's make_room. Cleans one image if an engine does the rest, and more without it. */
int ht_writeback_make_room(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* A reader is about to read this: requests readahead of the following chunks, if it is worth it. */
void ht_obj_reader_note(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, uint64_t len)
    HT_REQUIRES(HT_LOCK_STORE);

/*
 * A thread works on a chunk of an object, which it holds; begins: from the chunk's first byte on. Plans are made of
 * this. If the chunk has an image, the plan says when it is needed next.
 */
void ht_planner_note(struct ht_obj *o, const struct ht_chunk *c, uint64_t index, enum ht_plan_use use, bool begins)
    HT_REQUIRES(HT_LOCK_STORE);
/* Does the plan keep it in memory for the whole step? */
enum ht_forecast_stay ht_planner_stays(const struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* From now on so many bytes wait in memory for the end of a step: plans of steps before do not hold if that is news. */
void ht_planner_expect_waiting(struct ht_store *s, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE);
/* The next read that the plan wants now, and its place in the order of eviction. False: there is none. */
bool ht_planner_fetch(struct ht_store *s, struct ht_forecast_fetch *out, uint64_t *out_place)
    HT_REQUIRES(HT_LOCK_STORE);
/*
 * The place in the order of eviction of content that a program wants now: of its next use, if the plan has one, else of
 * this moment. False: no plan is followed.
 */
bool ht_planner_place(const struct ht_obj *o, uint64_t index, uint64_t *out_place) HT_REQUIRES(HT_LOCK_STORE);
/* It was made, or is not wanted. */
void ht_planner_fetch_done(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* There is no room for it: no try for a moment. */
void ht_planner_fetch_later(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* The chunk got an image before it is needed. */
void ht_planner_note_ahead(struct ht_obj *o, const struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
