/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scripts.c - the scenarios whose every crash state is looked at. Each is about one thing, and as short as that allows.
 */
#include <check.h>
#include <fcntl.h>
#include <stdio.h>

#include "tests/support/crash_scenario.h"
#include "tiering/api/stats.h"

enum { SMALL = 5000, CHUNK = HT_SMALL_CHUNK_BYTES, BIG_NOTE = 3500 };

static void save(struct crash_scenario *s, const char *name, uint64_t seed, uint64_t off, size_t len)
{
    scenario_write(s, name, seed, off, len);
    scenario_fsync(s, name);
}

static void model_step(struct crash_scenario *s, unsigned step)
{
    scenario_work(s, step);
    scenario_model_commit(s);
}

/* ----------------------------------------------------------------- content */

static void create(struct crash_scenario *s)
{
    save(s, "a", 1, 0, SMALL);
    save(s, "b", 2, 0, 3 * CHUNK);
    scenario_symlink(s, "l", "a");
    scenario_fsync(s, "");
}

static void synced_a(struct crash_scenario *s)
{
    save(s, "a", 1, 0, 2 * CHUNK + 100);
}

static void overwrite(struct crash_scenario *s)
{
    save(s, "a", 2, 100, SMALL);
    scenario_write(s, "a", 3, 0, 2 * CHUNK + 100);
    scenario_writeback(s);
    save(s, "a", 4, CHUNK - 10, 20);
    scenario_write(s, "a", 5, 3 * CHUNK, SMALL); /* after a hole */
    scenario_commit(s);
}

static void truncate_and_punch(struct crash_scenario *s)
{
    scenario_truncate(s, "a", CHUNK + 10);
    scenario_fsync(s, "a");
    scenario_punch(s, "a", 100, CHUNK);
    scenario_fsync(s, "a");
    scenario_truncate(s, "a", 0);
    save(s, "a", 7, 0, 50);
    scenario_truncate(s, "a", 4 * CHUNK);
    scenario_commit(s);
}

static void twelve_chunks(struct crash_scenario *s)
{
    save(s, "a", 1, 0, 12 * CHUNK);
    save(s, "a", 2, 0, 12 * CHUNK);
}

/* ------------------------------------------------------------------- names */

static void synced_a_b(struct crash_scenario *s)
{
    scenario_write(s, "a", 1, 0, SMALL);
    scenario_write(s, "b", 2, 0, SMALL);
    scenario_commit(s);
}

static void rename_over(struct crash_scenario *s)
{
    scenario_rename(s, "a", "b", 0);
    scenario_fsync(s, "b");
    save(s, "a", 3, 0, SMALL);
    scenario_rename(s, "a", "b", RENAME_EXCHANGE);
    scenario_fsync(s, "");
    scenario_rename(s, "b", "a", 0);
    scenario_commit(s);
}

static void unlink_and_link(struct crash_scenario *s)
{
    scenario_link(s, "a", "c");
    scenario_fsync(s, "c");
    scenario_unlink(s, "a");
    scenario_fsync(s, "c");
    scenario_unlink(s, "c");
    scenario_unlink(s, "b");
    scenario_commit(s);
}

static void clone(struct crash_scenario *s)
{
    scenario_clone(s, "a", "b", 2 * CHUNK);
    scenario_fsync(s, "b");
    save(s, "a", 9, 10, 100);
    scenario_unlink(s, "a");
    scenario_write(s, "b", 10, CHUNK, 10);
    scenario_commit(s);
}

static void note(struct crash_scenario *s)
{
    scenario_xattr(s, "a", 5, BIG_NOTE);
    scenario_fsync(s, "a");
    scenario_xattr(s, "a", 6, BIG_NOTE + 500);
    scenario_commit(s);
}

/* ------------------------------------------------------------------- space */

static void fill_up_but(struct crash_scenario *s, uint64_t leave)
{
    scenario_write(s, "a", 1, 0, CHUNK);
    scenario_write(s, "b", 2, 0, 1);
    scenario_commit(s);
    scenario_fill(s, leave);
    scenario_remount(s, true); /* the filler's reservations are given back */
}

static void fill_up(struct crash_scenario *s)
{
    fill_up_but(s, CHUNK + CHUNK / 2);
}

static void reuse(struct crash_scenario *s)
{
    scenario_unlink(s, "a");
    scenario_write(s, "b", 3, 0, 2 * CHUNK); /* partly in a's place */
    scenario_fsync(s, "b");
    save(s, "b", 4, 0, CHUNK);
}

static void reuse_of_clones(struct crash_scenario *s)
{
    scenario_clone(s, "a", "b", CHUNK);
    scenario_fsync(s, "b");
    scenario_unlink(s, "a");
    scenario_fsync(s, "");
    for (unsigned i = 0; i < 2; i++) {
        save(s, "c", 3 + i, 0, CHUNK);
        save(s, "c", 5 + i, CHUNK, CHUNK);
    }
}

static void twins(struct crash_scenario *s)
{
    save(s, "a", 1, 0, 2 * CHUNK);
    scenario_write(s, "b", 1, 0, 2 * CHUNK);
    scenario_write(s, "c", 9, 0, 1);
    scenario_commit(s);
}

/* Two files become owners of one place, and others take what comes free, as soon as they may. */
static void deduplicated(struct crash_scenario *s)
{
    scenario_dedup(s, 2 * CHUNK);
    save(s, "c", 3, 0, 2 * CHUNK);
    save(s, "a", 4, 10, 10);
    save(s, "c", 5, 0, 2 * CHUNK);
    scenario_unlink(s, "a");
    scenario_fsync(s, "");
    save(s, "c", 6, 0, 3 * CHUNK);
    scenario_write(s, "b", 7, CHUNK, 10);
    scenario_commit(s);
}

/* Nothing but what the twins need for one more copy. */
static void twins_on_a_full_store(struct crash_scenario *s)
{
    twins(s);
    scenario_fill(s, 0);
}

/* Chunks of zeros become holes, and are written again. */
static void zeros_of_a(struct crash_scenario *s)
{
    scenario_write(s, "a", 1, 0, 3 * CHUNK);
    scenario_zeros(s, "a", CHUNK, CHUNK);
    scenario_fsync(s, "a");
}

static void holes(struct crash_scenario *s)
{
    scenario_dedup(s, CHUNK);
    scenario_fsync(s, "a");
    save(s, "a", 3, CHUNK, SMALL);
    scenario_zeros(s, "a", 0, CHUNK);
    scenario_commit(s);
    scenario_dedup(s, CHUNK);
    scenario_truncate(s, "a", CHUNK + 10);
    scenario_commit(s);
}

/* Devices forget what became free: before the log has named its end, then, and when some is in use again. */
static void discarded(struct crash_scenario *s)
{
    scenario_unlink(s, "a");
    (void)scenario_discard(s);
    scenario_fsync(s, "");
    uint64_t bytes = scenario_discard(s);
    scenario_write(s, "b", 3, 0, 2 * CHUNK); /* partly in a's place */
    bytes += scenario_discard(s);
    scenario_fsync(s, "b");
    save(s, "b", 4, 0, CHUNK);
    bytes += scenario_discard(s);
    ck_assert_uint_gt(bytes, 0);
}

/* Two files and a clone lie alone in groups of blocks that other files have left. */
static void lonely(struct crash_scenario *s)
{
    static const char *const names[] = {"x", "a", "y", "b", "z"};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(names); i++) {
        scenario_write(s, names[i], i + 1, 0, i % 2 ? CHUNK : 16 * CHUNK);
        scenario_fsync(s, names[i]);
    }
    scenario_clone(s, "a", "c", CHUNK);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(names); i += 2)
        scenario_unlink(s, names[i]);
    scenario_commit(s);
}

/* They move, and what comes free is used at once. */
static void compacted(struct crash_scenario *s)
{
    scenario_compact(s, CHUNK);
    save(s, "d", 7, 0, 4 * CHUNK);
    scenario_write(s, "a", 8, 10, 10);
    scenario_commit(s);
    scenario_compact(s, 0);
    scenario_unlink(s, "c");
    scenario_fsync(s, "");
    save(s, "d", 9, 0, 6 * CHUNK);
}

/* A scrub moves damaged content to another place, and the next write needs its old place at once. */
static void scrub_and_write(struct crash_scenario *s)
{
    scenario_scrub(s, "a");
    save(s, "b", 3, 0, 2 * CHUNK);
    scenario_truncate(s, "b", CHUNK);
    scenario_commit(s);
}

static void scrubbed(struct crash_scenario *s)
{
    scrub_and_write(s);
    scenario_scrub(s, "b");
    save(s, "a", 4, 10, 10);
}

static void little_room_and_a_clone(struct crash_scenario *s)
{
    fill_up_but(s, 2 * CHUNK + CHUNK / 2);
    scenario_clone(s, "a", "c", CHUNK);
    scenario_commit(s);
}

/* Whichever owner has the image: both have another place afterwards, and the next write needs the old one. */
static void scrubbed_clone(struct crash_scenario *s)
{
    scrub_and_write(s);
    scenario_scrub(s, "c");
    scenario_unlink(s, "a");
    save(s, "b", 4, 0, 2 * CHUNK);
}

static void weights_and_little_room(struct crash_scenario *s)
{
    scenario_write_weights(s, "a", 1, 0, 3 * CHUNK);
    scenario_fsync(s, "a");
    scenario_fill(s, 3 * CHUNK);
}

/* The next write needs the space that compression freed, and the other way round. */
static void compressed(struct crash_scenario *s)
{
    ck_assert_uint_eq(scenario_compress(s), 3);
    scenario_write_weights(s, "b", 2, 0, 2 * CHUNK);
    scenario_fsync(s, "b");
    scenario_write(s, "a", 3, 100, 10);
    scenario_truncate(s, "a", 2 * CHUNK + 10);
    scenario_commit(s);
    scenario_clone(s, "a", "c", 2 * CHUNK);
    scenario_fsync(s, "c");
    ck_assert_uint_ge(scenario_compress(s), 5);
    save(s, "b", 4, 10, CHUNK);
}

static void shared_weights(struct crash_scenario *s)
{
    scenario_write_weights(s, "a", 1, 0, 3 * CHUNK);
    scenario_fsync(s, "a");
    scenario_clone(s, "a", "b", 3 * CHUNK);
    scenario_clone(s, "a", "c", 3 * CHUNK);
    scenario_commit(s);
    scenario_truncate(s, "a", CHUNK + CHUNK / 2);
    scenario_fsync(s, "a");
    scenario_fill(s, 3 * CHUNK);
}

/* All owners get the frames at once. Then they leave one after the other, and others take what comes free. */
static void compressed_shared(struct crash_scenario *s)
{
    ck_assert_uint_eq(scenario_compress(s), 2 + 3 + 3);
    scenario_write(s, "d", 2, 0, 2 * CHUNK);
    scenario_write(s, "b", 3, 100, 10);
    scenario_commit(s);
    scenario_unlink(s, "c");
    scenario_fsync(s, "");
    scenario_truncate(s, "b", CHUNK);
    scenario_write(s, "d", 5, 0, 3 * CHUNK);
    scenario_commit(s);
}

/* A copy that came after its origin was compressed, and was compressed, too. */
static void compressed_twins(struct crash_scenario *s)
{
    scenario_write_weights(s, "a", 1, 0, 2 * CHUNK);
    scenario_write(s, "c", 9, 0, 1);
    scenario_commit(s);
    ck_assert_uint_eq(scenario_compress(s), 2);
    scenario_write_weights(s, "b", 1, 0, 2 * CHUNK);
    scenario_commit(s);
    ck_assert_uint_eq(scenario_compress(s), 2 + 2);
    scenario_fill(s, 2 * CHUNK);
}

/* Their frames get two owners, who leave one after the other. Others take what comes free. */
static void deduplicated_frames(struct crash_scenario *s)
{
    ck_assert_uint_gt(scenario_dedup_some(s), CHUNK);
    ck_assert_int_eq(scenario_write(s, "c", 3, 0, 2 * CHUNK), 0);
    scenario_fsync(s, "c");
    scenario_truncate(s, "b", CHUNK + 10);
    scenario_unlink(s, "a");
    scenario_fsync(s, "");
    ck_assert_int_eq(scenario_write(s, "c", 4, 0, CHUNK), 0);
    scenario_fsync(s, "c");
    ck_assert_int_eq(scenario_write(s, "b", 5, 10, 10), 0);
    scenario_commit(s);
    ck_assert_int_eq(scenario_write(s, "c", 6, 0, CHUNK), 0);
    scenario_fsync(s, "c");
}

static void little_room(struct crash_scenario *s)
{
    save(s, "c", 1, 0, SMALL);
    scenario_fill(s, 4 * CHUNK);
}

/*
 * The first weights are raw: the superblock has to say first that there may be frames. Others
 * need all space that is left.
 */
static void compressed_inline(struct crash_scenario *s)
{
    scenario_compress_inline(s);
    scenario_write_weights(s, "a", 1, 0, CHUNK);
    scenario_fsync(s, "a");
    ck_assert_uint_eq(scenario_compress(s), 1);
    scenario_write_weights(s, "b", 2, 0, 3 * CHUNK);
    scenario_fsync(s, "b");
    ck_assert_uint_eq(scenario_compressed(s), 4);
    scenario_write(s, "b", 3, 100, 10);
    scenario_truncate(s, "b", 2 * CHUNK + 10);
    scenario_write_weights(s, "c", 4, 0, 2 * CHUNK);
    scenario_commit(s);
}

/* ------------------------------------------------------------------ models */

static void model(struct crash_scenario *s)
{
    synced_a(s);
    scenario_model(s);
    model_step(s, 1);
}

static void steps(struct crash_scenario *s)
{
    scenario_work(s, 2);
    scenario_writeback(s);
    save(s, "a", 3, 0, SMALL);
    scenario_model_commit(s);
    model_step(s, 3);
}

static void aborted_step(struct crash_scenario *s)
{
    scenario_work(s, 2);
    scenario_writeback(s);
    scenario_commit(s);
    scenario_model_abort(s);
    save(s, "a", 3, 0, SMALL);
    model_step(s, 4);
}

static void write_outside(struct crash_scenario *s)
{
    save(s, "a", 3, 0, SMALL);
}

static void async_steps(struct crash_scenario *s)
{
    scenario_model_async(s, 2, write_outside);
    scenario_model_async(s, 3, scenario_checkpoint);
    scenario_work(s, 5);
    scenario_model_abort(s);
}

/* Two gradients, the second sparse, make a step. Their sums never enter the log, whatever writeback stores. */
static void accumulated_steps(struct crash_scenario *s)
{
    scenario_pass(s, 2, 0);
    scenario_writeback(s);
    scenario_write(s, "a", 3, 0, SMALL);
    scenario_checkpoint(s);
    scenario_fsync(s, "a");
    scenario_pass(s, 2, 1);
    scenario_writeback(s);
    scenario_model_commit(s);
    scenario_pass(s, 3, 0);
    scenario_model_abort(s);
    model_step(s, 4);
}

static void step_and_check(struct crash_scenario *s, unsigned step, unsigned logged)
{
    model_step(s, step);
    scenario_check_logged(s, logged);
}

/* The model has one full step and two logged ones. */
static void logged_model(struct crash_scenario *s)
{
    model(s);
    step_and_check(s, 2, 1);
    step_and_check(s, 3, 2);
}

/* An abort computes logged steps again. A full step frees their space, which others use at once. */
static void logged_steps(struct crash_scenario *s)
{
    scenario_work(s, 4);
    scenario_writeback(s);
    scenario_model_abort(s);
    step_and_check(s, 5, 3);
    step_and_check(s, 6, 0);
    save(s, "a", 3, 0, 2 * CHUNK);
    step_and_check(s, 7, 1);
}

/* Aborts before a boundary, where updates wait for it: nothing is computed again, and the logged steps go on. */
static void aborts_without_updates(struct crash_scenario *s)
{
    scenario_work(s, 4);
    scenario_writeback(s);
    scenario_model_abort(s);
    save(s, "a", 3, 0, SMALL);
    step_and_check(s, 5, 3);
    scenario_model_abort(s);
    scenario_check_replays(s, 0);
}

/* Writes of a parameter between steps, and during one, make the next commit full. */
static void writes_between_logged_steps(struct crash_scenario *s)
{
    scenario_write_param(s, 0.25f);
    step_and_check(s, 4, 0);
    step_and_check(s, 5, 1);
    scenario_write_param(s, 0.5f);
    scenario_commit(s);
    scenario_model_abort(s);
    scenario_work(s, 6);
    scenario_write_param(s, 0.75f);
    scenario_checkpoint(s);
    scenario_model_commit(s);
    scenario_check_logged(s, 0);
    step_and_check(s, 7, 1);
    scenario_write(s, "a", 3, 0, SMALL);
    scenario_model_commit_full(s);
    scenario_check_logged(s, 0);
    save(s, "a", 4, 0, 2 * CHUNK);
}

/* Steps are computed again, written to the device unpublished, and lost with another cut. */
static void replays(struct crash_scenario *s)
{
    scenario_remount(s, false);
    scenario_writeback(s);
    save(s, "a", 3, 0, SMALL);
    scenario_remount(s, false);
    step_and_check(s, 4, 3);
    scenario_checkpoint(s);
    scenario_work(s, 5);
    scenario_remount(s, false);
    scenario_remount(s, true);
    scenario_check_logged(s, 3); /* no client had committed in full */
}

/* Steps are kept, and expire; what comes free is used at once. */
static void kept_steps(struct crash_scenario *s)
{
    for (unsigned step = 2; step < 4; step++) {
        scenario_work(s, step);
        scenario_writeback(s);
        scenario_model_commit(s);
    }
    scenario_digest(s, "2");
    save(s, "a", 3, 0, SMALL);
}

/* The same with all that may come between. */
static void kept_steps_at_length(struct crash_scenario *s)
{
    kept_steps(s);
    scenario_checkpoint(s);
    scenario_snapshot(s, "named");
    scenario_digest(s, "named");
    scenario_work(s, 5);
    scenario_writeback(s);
    scenario_model_abort(s);
    scenario_checkpoint(s);
    model_step(s, 6);
}

static void forgotten_steps(struct crash_scenario *s)
{
    scenario_snapshot(s, "named");
    model_step(s, 2);
    scenario_forget(s, "1");
    save(s, "a", 3, 0, 2 * CHUNK);
    scenario_checkpoint(s);
    scenario_forget(s, "named");
    save(s, "a", 4, 0, 2 * CHUNK);
    scenario_forget(s, "2");
    model_step(s, 3);
}

/* A kept step becomes a model, which takes a step; space that comes free is used at once. */
static void cloned_steps(struct crash_scenario *s)
{
    scenario_clone_kept(s, "1");
    scenario_clone_step(s, 7);
    save(s, "a", 3, 0, SMALL);
}

/* The model goes back, and on. */
static void rolled_back(struct crash_scenario *s)
{
    model_step(s, 2);
    scenario_digest(s, "1");
    scenario_rollback(s, "1");
    save(s, "a", 3, 0, SMALL);
}

static void rolled_back_at_length(struct crash_scenario *s)
{
    rolled_back(s);
    scenario_checkpoint(s);
    model_step(s, 4);
    scenario_rollback(s, "1");
    scenario_checkpoint(s);
    scenario_forget(s, "1");
    save(s, "a", 4, 0, 2 * CHUNK);
    model_step(s, 5);
}

static void cloned_steps_at_length(struct crash_scenario *s)
{
    scenario_checkpoint(s);
    scenario_clone_kept(s, "1");
    scenario_checkpoint(s);
    scenario_forget(s, "1");
    save(s, "a", 3, 0, 2 * CHUNK);
    scenario_clone_step(s, 7);
    scenario_checkpoint(s);
    model_step(s, 2);
}

/* Writeback, and a commit of all that is outside models. */
static void memory_is_needed(struct crash_scenario *s)
{
    scenario_writeback(s);
    scenario_commit(s);
}

static void log_is_full(struct crash_scenario *s)
{
    scenario_write(s, "a", 5, 0, SMALL);
    memory_is_needed(s);
    scenario_checkpoint(s);
}

/* A step of another store becomes a model: first a damaged stream, then a whole one. */
static void received(struct crash_scenario *s)
{
    scenario_receive_begin(s);
    scenario_receive_files(s, NULL, 5, memory_is_needed);
    scenario_receive_drop(s);
    scenario_receive_begin(s);
    scenario_receive_files(s, NULL, 6, scenario_writeback);
    scenario_receive_commit(s);
    scenario_receive_publish(s);
    save(s, "a", 3, 0, SMALL);
}

static void received_at_length(struct crash_scenario *s)
{
    scenario_receive_begin(s);
    scenario_checkpoint(s);
    scenario_receive_files(s, NULL, 5, log_is_full);
    scenario_receive_commit(s);
    scenario_checkpoint(s);
    scenario_receive_publish(s);
    scenario_checkpoint(s);
    save(s, "a", 3, 0, SMALL);
}

/* Of a stream of changes that breaks nothing stays, and the step that it builds on may end after the next. */
static void received_changes(struct crash_scenario *s)
{
    scenario_receive_begin(s);
    scenario_receive_files(s, "1", 5, memory_is_needed);
    scenario_receive_commit(s);
    scenario_receive_publish(s);
    scenario_forget(s, "1");
    model_step(s, 2);
    save(s, "a", 3, 0, SMALL);
}

static void received_changes_at_length(struct crash_scenario *s)
{
    scenario_receive_begin(s);
    scenario_receive_files(s, "1", 5, log_is_full);
    scenario_remount(s, false); /* the program and the daemon are killed */
    scenario_receive_drop(s);
    scenario_receive_begin(s);
    scenario_receive_files(s, "1", 6, log_is_full);
    scenario_forget(s, "1");
    scenario_receive_commit(s);
    model_step(s, 2);
    scenario_checkpoint(s);
    scenario_receive_publish(s);
    scenario_checkpoint(s);
    save(s, "a", 3, 0, SMALL);
}

/* Little is left for what the kept steps do not let go. */
static void model_and_little_room(struct crash_scenario *s)
{
    model(s);
    scenario_fill(s, 6 * CHUNK);
}

static void model_and_twins(struct crash_scenario *s)
{
    twins(s);
    scenario_model(s);
    model_step(s, 1);
}

/* Between the gradients of a step and its commit, its abort, and after both. */
static void dedup_in_an_open_step(struct crash_scenario *s)
{
    scenario_work(s, 2);
    scenario_dedup(s, 2 * CHUNK);
    scenario_writeback(s);
    save(s, "a", 3, 0, 2 * CHUNK);
    scenario_model_commit(s);
    save(s, "a", 1, 0, 2 * CHUNK);
    scenario_work(s, 3);
    scenario_writeback(s);
    scenario_dedup(s, 2 * CHUNK);
    scenario_model_abort(s);
    model_step(s, 4);
    scenario_checkpoint(s);
}

/* The committed content of the model and a file with a clone lie alone in groups that other files have left. */
static void lonely_model(struct crash_scenario *s)
{
    static const char *const names[] = {"x", "y", "z"};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(names); i++) {
        scenario_write(s, names[i], i + 1, 0, 16 * CHUNK);
        scenario_fsync(s, names[i]);
        if (i == 0) {
            save(s, "a", 9, 0, CHUNK);
        } else if (i == 1) {
            scenario_model(s);
            model_step(s, 1);
        }
    }
    scenario_clone(s, "a", "c", CHUNK);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(names); i++)
        scenario_unlink(s, names[i]);
    scenario_commit(s);
}

/*
 * Between the gradients of a step and its commit, and before its abort. A program has a parameter's memory meanwhile.
 */
static void compact_in_an_open_step(struct crash_scenario *s)
{
    scenario_map(s);
    scenario_work(s, 2);
    ck_assert_uint_gt(scenario_compact_some(s), 0);
    scenario_writeback(s);
    scenario_model_commit(s);
    scenario_write(s, "d", 4, 0, 20 * CHUNK); /* also where they were */
    scenario_fsync(s, "d");
    scenario_unlink(s, "d");
    scenario_fsync(s, "");
    scenario_work(s, 3);
    scenario_writeback(s);
    (void)scenario_compact_some(s);
    scenario_model_abort(s);
    scenario_unmap(s);
    save(s, "d", 5, 0, 20 * CHUNK);
    model_step(s, 4);
}

/* Compression and discards between the gradients of a step and its commit or abort; others use what comes free. */
static void frames_and_discards_in_an_open_step(struct crash_scenario *s)
{
    scenario_work(s, 2);
    scenario_write_weights(s, "a", 1, 0, 2 * CHUNK);
    scenario_commit(s);
    ck_assert_uint_ge(scenario_compress(s), 2);
    ck_assert_uint_gt(scenario_discard(s), 0);
    scenario_writeback(s);
    scenario_model_commit(s);
    scenario_write_weights(s, "a", 3, 0, 2 * CHUNK);
    scenario_commit(s);
    scenario_work(s, 3);
    scenario_writeback(s);
    ck_assert_uint_ge(scenario_compress(s), 2);
    scenario_model_abort(s);
    ck_assert_uint_gt(scenario_discard(s), 0);
    scenario_write(s, "b", 4, 0, 2 * CHUNK);
    model_step(s, 4);
}

/* --------------------------------------------------------------------- log */

static void checkpoint_in_an_open_step(struct crash_scenario *s)
{
    scenario_work(s, 2);
    scenario_write(s, "a", 3, 0, SMALL);
    scenario_writeback(s);
    scenario_checkpoint(s);
    scenario_fsync(s, "a");
    scenario_model_commit(s);
    scenario_checkpoint(s);
}

static void checkpoints(struct crash_scenario *s)
{
    scenario_write(s, "a", 3, 0, SMALL);
    scenario_checkpoint(s);
    scenario_fsync(s, "a");
    scenario_checkpoint(s);
    scenario_unlink(s, "a");
    scenario_checkpoint(s);
}

/* Go on until so many blocks of log are left before the place, of the region, where_blocks. */
static void log_up_to(struct crash_scenario *s, uint64_t left_bytes, uint64_t place_bytes)
{
    for (unsigned i = 0;; i++) {
        const struct ht_super *sb = ht_store_super(s->k.store);
        struct ht_store_stats st;
        ht_store_stats(s->k.store, &st);
        uint64_t at = (sb->start_pos + st.log.used_bytes) % sb->log_bytes;
        if (at < place_bytes && at + left_bytes >= place_bytes)
            return;
        save(s, "a", i, 0, 10);
    }
}

static void before_checkpoint(struct crash_scenario *s)
{
    log_up_to(s, 3 * HT_BLOCK_BYTES, ht_store_super(s->k.store)->log_bytes / 2);
}

static void before_wrap_around(struct crash_scenario *s)
{
    log_up_to(s, 3 * HT_BLOCK_BYTES, ht_store_super(s->k.store)->log_bytes);
}

static void few_frames(struct crash_scenario *s)
{
    for (unsigned i = 0; i < 6; i++)
        save(s, "a", 200 + i, 0, 10);
    scenario_xattr(s, "a", 6, BIG_NOTE + 4096); /* a frame of three blocks */
    scenario_fsync(s, "a");
}

/* -------------------------------------------------------------------- mount */

static void mounts(struct crash_scenario *s)
{
    scenario_remount(s, true);
    save(s, "a", 3, 0, SMALL);
    scenario_remount(s, false);
    scenario_write(s, "a", 4, 0, SMALL);
    scenario_remount(s, true);
    scenario_work(s, 2);
    scenario_remount(s, true);
}

/* Each copy of the log drops out and comes back: one after the other has all. */
static void lost_copies(struct crash_scenario *s)
{
    for (unsigned i = 0; i < 2; i++) {
        scenario_lose_log(s, !i);
        scenario_xattr(s, "a", 6 + i, BIG_NOTE);
        scenario_fsync(s, "a");
        scenario_resync_log(s);
        save(s, "a", 3 + i, 0, SMALL);
    }
}

/* One takes no superblock, the other one's log drops out: each goes on for the other. */
static void lost_super(struct crash_scenario *s)
{
    scenario_lose_super(s, 0);
    save(s, "a", 3, 0, SMALL);
    scenario_lose_log(s, 1);
    save(s, "a", 4, 0, SMALL);
    scenario_resync_log(s);
    save(s, "a", 5, 0, SMALL);
}

const struct scenario_script scenario_scripts[] = {
    {"create", {"a", "b", "l"}, 512, 1, NULL, create},
    {"overwrite", {"a"}, 512, 1, synced_a, overwrite},
    {"truncate", {"a"}, 4096, 1, synced_a, truncate_and_punch},
    {"many", {"a"}, 4096, 1, NULL, twelve_chunks},
    {"rename", {"a b"}, 512, 1, synced_a_b, rename_over},
    {"unlink", {"a b c"}, 512, 1, synced_a_b, unlink_and_link},
    {"clone", {"a", "b"}, 512, 1, synced_a, clone},
    {"xattr", {"a"}, 512, 1, synced_a, note},
    {"reuse", {"a", "b"}, 4096, 1, fill_up, reuse},
    {"reuse-clone", {"a", "b", "c"}, 4096, 1, fill_up, reuse_of_clones},
    {"compact", {"a", "b", "c", "d"}, 4096, 1, lonely, compacted},
    {"compact-step",
     {"model", "a", "c", "d"},
     4096,
     1,
     lonely_model,
     compact_in_an_open_step,
     .maps = true,
     .seldom = true},
    {"dedup", {"a", "b", "c"}, 4096, 1, twins_on_a_full_store, deduplicated},
    {"dedup-zeros", {"a"}, 512, 1, zeros_of_a, holes},
    {"dedup-step", {"model", "a", "b"}, 512, 1, model_and_twins, dedup_in_an_open_step},
    {"two-dedup", {"a", "b", "c"}, 512, 2, twins, deduplicated},
    {"discard", {"a", "b"}, 4096, 1, fill_up, discarded},
    {"two-discard", {"a", "b"}, 512, 2, synced_a, discarded},
    {"scrub", {"a", "b", "c"}, 4096, 1, little_room_and_a_clone, scrubbed_clone},
    {"two-scrub", {"a", "b"}, 512, 2, synced_a, scrubbed},
    {"compress", {"a", "b", "c"}, 4096, 1, weights_and_little_room, compressed},
    {"compress-shared", {"a", "b", "c", "d"}, 4096, 1, shared_weights, compressed_shared},
    {"dedup-frames", {"a", "b", "c"}, 4096, 1, compressed_twins, deduplicated_frames},
    {"compress-inline", {"a", "b", "c"}, 4096, 1, little_room, compressed_inline},
    {"compress-step", {"model", "a", "b"}, 512, 1, model, frames_and_discards_in_an_open_step, .seldom = true},
    {"two-compress", {"a", "b", "c"}, 512, 2, weights_and_little_room, compressed, .seldom = true},
    {"step", {"model", "a"}, 512, 1, model, steps},
    {"async-step", {"model", "a"}, 512, 1, model, async_steps},
    {"abort", {"model", "a"}, 4096, 1, model, aborted_step},
    {"accumulate", {"model", "a"}, 512, 1, model, accumulated_steps, true},
    {"keep", {"model", "a"}, 512, 1, model_and_little_room, kept_steps, .keeps = true},
    {"keep-long", {"model", "a"}, 512, 1, model_and_little_room, kept_steps_at_length, .keeps = true, .seldom = true},
    {"forget", {"model", "a"}, 4096, 1, model_and_little_room, forgotten_steps, .keeps = true, .seldom = true},
    {"two-keep", {"model", "a"}, 4096, 2, model, kept_steps_at_length, .keeps = true, .seldom = true},
    {"keep-clone", {"model", "a"}, 512, 1, model_and_little_room, cloned_steps, .keeps = true},
    {"two-keep-clone", {"model", "a"}, 4096, 2, model, cloned_steps_at_length, .keeps = true, .seldom = true},
    {"rollback", {"model", "a"}, 512, 1, model_and_little_room, rolled_back, .keeps = true},
    {"two-rollback", {"model", "a"}, 4096, 2, model, rolled_back_at_length, .keeps = true, .seldom = true},
    {"receive", {"received", "a"}, 512, 1, synced_a, received},
    {"two-receive", {"received", "a"}, 4096, 2, synced_a, received_at_length, .seldom = true},
    {"receive-from", {"received", "model", "a"}, 512, 1, model, received_changes, .keeps = true},
    {"receive-long",
     {"received", "model", "a"},
     4096,
     1,
     model,
     received_changes_at_length,
     .keeps = true,
     .seldom = true},
    {"redo", {"model", "a"}, 512, 1, logged_model, logged_steps, .logs = true},
    {"redo-write", {"model", "a"}, 4096, 1, logged_model, writes_between_logged_steps, .logs = true},
    {"redo-mount", {"model", "a"}, 512, 1, logged_model, replays, .logs = true},
    {"redo-abort", {"model", "a"}, 512, 1, logged_model, aborts_without_updates, .logs = true, .clips = true},
    {"two-redo", {"model", "a"}, 4096, 2, logged_model, logged_steps, .logs = true},
    {"two-redo-write", {"model", "a"}, 512, 2, logged_model, writes_between_logged_steps, .logs = true, .seldom = true},
    {"two-redo-mount", {"model", "a"}, 4096, 2, logged_model, replays, .logs = true, .seldom = true},
    {"checkpoint", {"a"}, 512, 1, synced_a, checkpoints},
    {"checkpoint-step", {"model", "a"}, 512, 1, model, checkpoint_in_an_open_step},
    {"log-full", {"a"}, 4096, 1, before_checkpoint, few_frames},
    {"log-wrap", {"a"}, 512, 1, before_wrap_around, few_frames},
    {"mount", {"model", "a"}, 512, 1, model, mounts},
    {"resync", {"a"}, 512, 1, before_wrap_around, lost_copies},
    {"two-resync", {"a"}, 4096, 2, synced_a, lost_copies},
    {"two-super", {"a"}, 4096, 2, synced_a, lost_super, .seldom = true},
    {"two-write", {"a"}, 512, 2, synced_a, overwrite},
    {"two-names", {"a b"}, 4096, 2, synced_a_b, rename_over},
    {"two-async", {"model", "a"}, 4096, 2, model, async_steps, .seldom = true},
    {"two-step", {"model", "a"}, 4096, 2, model, checkpoint_in_an_open_step},
    {"two-mount", {"model", "a"}, 4096, 2, model, mounts},
};
const unsigned scenario_script_count = HT_ARRAY_SIZE(scenario_scripts);
