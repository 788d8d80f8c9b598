/* SPDX-License-Identifier: Apache-2.0 */
/* scripts.c - the stories whose every crash state is looked at. Each is about one thing, and as short as that allows. */
#include <check.h>
#include <fcntl.h>
#include <stdio.h>

#include "tests/support/story.h"

enum { SMALL = 5000, CHUNK = HT_SMALL_CHUNK_BYTES, BIG_NOTE = 3500 };

/* ----------------------------------------------------------------- content */

static void create(struct story *s)
{
    story_write(s, "a", 1, 0, SMALL);
    story_fsync(s, "a");
    story_write(s, "b", 2, 0, 3 * CHUNK);
    story_fsync(s, "b");
    story_symlink(s, "l", "a");
    story_fsync(s, "");
}

static void synced_a(struct story *s)
{
    story_write(s, "a", 1, 0, 2 * CHUNK + 100);
    story_fsync(s, "a");
}

static void overwrite(struct story *s)
{
    story_write(s, "a", 2, 100, SMALL);
    story_fsync(s, "a");
    story_write(s, "a", 3, 0, 2 * CHUNK + 100);
    story_writeback(s);
    story_write(s, "a", 4, CHUNK - 10, 20);
    story_fsync(s, "a");
    story_write(s, "a", 5, 3 * CHUNK, SMALL); /* behind a hole */
    story_commit(s);
}

static void truncate_and_punch(struct story *s)
{
    story_truncate(s, "a", CHUNK + 10);
    story_fsync(s, "a");
    story_punch(s, "a", 100, CHUNK);
    story_fsync(s, "a");
    story_truncate(s, "a", 0);
    story_write(s, "a", 7, 0, 50);
    story_fsync(s, "a");
    story_truncate(s, "a", 4 * CHUNK);
    story_commit(s);
}

static void twelve_chunks(struct story *s)
{
    story_write(s, "a", 1, 0, 12 * CHUNK);
    story_fsync(s, "a");
    story_write(s, "a", 2, 0, 12 * CHUNK);
    story_fsync(s, "a");
}

/* ------------------------------------------------------------------- names */

static void synced_a_b(struct story *s)
{
    story_write(s, "a", 1, 0, SMALL);
    story_write(s, "b", 2, 0, SMALL);
    story_commit(s);
}

static void rename_over(struct story *s)
{
    story_rename(s, "a", "b", 0);
    story_fsync(s, "b");
    story_write(s, "a", 3, 0, SMALL);
    story_fsync(s, "a");
    story_rename(s, "a", "b", RENAME_EXCHANGE);
    story_fsync(s, "");
    story_rename(s, "b", "a", 0);
    story_commit(s);
}

static void unlink_and_link(struct story *s)
{
    story_link(s, "a", "c");
    story_fsync(s, "c");
    story_unlink(s, "a");
    story_fsync(s, "c");
    story_unlink(s, "c");
    story_unlink(s, "b");
    story_commit(s);
}

static void clone(struct story *s)
{
    story_clone(s, "a", "b", 2 * CHUNK);
    story_fsync(s, "b");
    story_write(s, "a", 9, 10, 100);
    story_fsync(s, "a");
    story_unlink(s, "a");
    story_write(s, "b", 10, CHUNK, 10);
    story_commit(s);
}

static void note(struct story *s)
{
    story_xattr(s, "a", 5, BIG_NOTE);
    story_fsync(s, "a");
    story_xattr(s, "a", 6, BIG_NOTE + 500);
    story_commit(s);
}

/* ------------------------------------------------------------------- space */

static void fill_up_but(struct story *s, uint64_t leave)
{
    story_write(s, "a", 1, 0, CHUNK);
    story_write(s, "b", 2, 0, 1);
    story_commit(s);
    story_fill(s, leave);
    story_remount(s, true); /* what the filler had reserved is given back */
}

static void fill_up(struct story *s)
{
    fill_up_but(s, CHUNK + CHUNK / 2);
}

static void fill_up_but_little(struct story *s)
{
    fill_up_but(s, 2 * CHUNK + CHUNK / 2);
}

static void reuse(struct story *s)
{
    story_unlink(s, "a");
    story_write(s, "b", 3, 0, 2 * CHUNK); /* partly in a's place */
    story_fsync(s, "b");
    story_write(s, "b", 4, 0, CHUNK);
    story_fsync(s, "b");
}

static void reuse_of_clones(struct story *s)
{
    story_clone(s, "a", "b", CHUNK);
    story_fsync(s, "b");
    story_unlink(s, "a");
    story_fsync(s, "");
    for (unsigned i = 0; i < 2; i++) {
        story_write(s, "c", 3 + i, 0, CHUNK);
        story_fsync(s, "c");
        story_write(s, "c", 5 + i, CHUNK, CHUNK);
        story_fsync(s, "c");
    }
}

/* What was damaged is in another place then, and the place it was in is needed at once. */
static void scrubbed(struct story *s)
{
    story_scrub(s, "a");
    story_write(s, "b", 3, 0, 2 * CHUNK);
    story_fsync(s, "b");
    story_truncate(s, "b", CHUNK);
    story_commit(s);
    story_scrub(s, "b");
    story_write(s, "a", 4, 10, 10);
    story_fsync(s, "a");
}

/* ------------------------------------------------------------------ models */

static void model(struct story *s)
{
    synced_a(s);
    story_model(s);
    story_work(s, 1);
    story_model_commit(s);
}

static void steps(struct story *s)
{
    story_work(s, 2);
    story_writeback(s);
    story_write(s, "a", 3, 0, SMALL);
    story_fsync(s, "a");
    story_model_commit(s);
    story_work(s, 3);
    story_model_commit(s);
}

static void aborted_step(struct story *s)
{
    story_work(s, 2);
    story_writeback(s);
    story_commit(s);
    story_model_abort(s);
    story_write(s, "a", 3, 0, SMALL);
    story_fsync(s, "a");
    story_work(s, 4);
    story_model_commit(s);
}

/* Two gradients, the second sparse, make a step: their sums are in no log, whatever is written of them. */
static void accumulated_steps(struct story *s)
{
    story_pass(s, 2, 0);
    story_writeback(s);
    story_write(s, "a", 3, 0, SMALL);
    story_compact(s);
    story_fsync(s, "a");
    story_pass(s, 2, 1);
    story_writeback(s);
    story_model_commit(s);
    story_pass(s, 3, 0);
    story_model_abort(s);
    story_work(s, 4);
    story_model_commit(s);
}

/* --------------------------------------------------------------------- log */

static void compaction_in_an_open_step(struct story *s)
{
    story_work(s, 2);
    story_write(s, "a", 3, 0, SMALL);
    story_writeback(s);
    story_compact(s);
    story_fsync(s, "a");
    story_model_commit(s);
    story_compact(s);
}

static void compactions(struct story *s)
{
    story_write(s, "a", 3, 0, SMALL);
    story_compact(s);
    story_fsync(s, "a");
    story_compact(s);
    story_unlink(s, "a");
    story_compact(s);
}

/* Go on until so many blocks of log are left before the place, of the region, where_blocks. */
static void log_up_to(struct story *s, uint64_t left_bytes, uint64_t place_bytes)
{
    for (unsigned i = 0;; i++) {
        const struct ht_super *sb = ht_store_super(s->k.store);
        struct ht_store_stats st;
        ht_store_stats(s->k.store, &st);
        uint64_t at = (sb->start_pos + st.log.used_bytes) % sb->log_bytes;
        if (at < place_bytes && at + left_bytes >= place_bytes)
            return;
        story_write(s, "a", i, 0, 10);
        story_fsync(s, "a");
    }
}

static void before_compaction(struct story *s)
{
    log_up_to(s, 3 * HT_BLOCK_BYTES, ht_store_super(s->k.store)->log_bytes / 2);
}

static void before_wrap_around(struct story *s)
{
    log_up_to(s, 3 * HT_BLOCK_BYTES, ht_store_super(s->k.store)->log_bytes);
}

static void few_frames(struct story *s)
{
    for (unsigned i = 0; i < 6; i++) {
        story_write(s, "a", 200 + i, 0, 10);
        story_fsync(s, "a");
    }
    story_xattr(s, "a", 6, BIG_NOTE + 4096); /* a frame of three blocks */
    story_fsync(s, "a");
}

/* -------------------------------------------------------------------- mount */

static void mounts(struct story *s)
{
    story_remount(s, true);
    story_write(s, "a", 3, 0, SMALL);
    story_fsync(s, "a");
    story_remount(s, false);
    story_write(s, "a", 4, 0, SMALL);
    story_remount(s, true);
    story_work(s, 2);
    story_remount(s, true);
}

/* Each copy of the log drops out and comes back: one after the other has all. */
static void lost_copies(struct story *s)
{
    for (unsigned i = 0; i < 2; i++) {
        story_lose_log(s, !i);
        story_xattr(s, "a", 6 + i, BIG_NOTE);
        story_fsync(s, "a");
        story_rejoin_log(s);
        story_write(s, "a", 3 + i, 0, SMALL);
        story_fsync(s, "a");
    }
}

/* One takes no superblock, the other one's log drops out: each goes on for the other. */
static void lost_super(struct story *s)
{
    story_lose_super(s, 0);
    story_write(s, "a", 3, 0, SMALL);
    story_fsync(s, "a");
    story_lose_log(s, 1);
    story_write(s, "a", 4, 0, SMALL);
    story_fsync(s, "a");
    story_rejoin_log(s);
    story_write(s, "a", 5, 0, SMALL);
    story_fsync(s, "a");
}

const struct story_script story_scripts[] = {
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
    {"scrub", {"a", "b"}, 4096, 1, fill_up_but_little, scrubbed},
    {"two-scrub", {"a", "b"}, 512, 2, synced_a, scrubbed},
    {"step", {"model", "a"}, 512, 1, model, steps},
    {"abort", {"model", "a"}, 4096, 1, model, aborted_step},
    {"accumulate", {"model", "a"}, 512, 1, model, accumulated_steps, true},
    {"compact", {"a"}, 512, 1, synced_a, compactions},
    {"compact-step", {"model", "a"}, 512, 1, model, compaction_in_an_open_step},
    {"log-full", {"a"}, 4096, 1, before_compaction, few_frames},
    {"log-wrap", {"a"}, 512, 1, before_wrap_around, few_frames},
    {"mount", {"model", "a"}, 512, 1, model, mounts},
    {"rejoin", {"a"}, 512, 1, before_wrap_around, lost_copies},
    {"two-rejoin", {"a"}, 4096, 2, synced_a, lost_copies},
    {"two-super", {"a"}, 4096, 2, synced_a, lost_super, .seldom = true},
    {"two-write", {"a"}, 512, 2, synced_a, overwrite},
    {"two-names", {"a b"}, 4096, 2, synced_a_b, rename_over},
    {"two-step", {"model", "a"}, 4096, 2, model, compaction_in_an_open_step},
    {"two-mount", {"model", "a"}, 4096, 2, model, mounts},
};
const unsigned story_script_count = HT_ARRAY_SIZE(story_scripts);
