/* SPDX-License-Identifier: Apache-2.0 */
/* test_compact.c - content leaves nearly empty groups of blocks, with all of its owners, and nothing else changes. */

#include "tests/unit/tiering/engine/compact.h"
#include "tiering/base/fault.h"
#include "tiering/io/gate.h"

static void end(void)
{
    if (s)
        expect_all();
    fixture_end();
}

TEST(nearly_empty_groups_become_free)
{
    sparse(16); /* one chunk in each MiB */
    uint64_t free_bytes = stats().free_bytes, available = stats().available_bytes, memory = engine_memory_bytes();
    ck_assert_int_eq(background_compact(s), 0);
    struct compact_figures st = figures();
    ck_assert_uint_ge(st.emptied, 12);
    ck_assert_uint_ge(st.moved_bytes, 12 * SMALL);
    ck_assert_uint_eq(st.memory_bytes, memory);
    ht_store_verify(s, true);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    ck_assert_uint_eq(stats().available_bytes, available);
    expect_all();
    uint64_t moved = st.moved_bytes;
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_le(figures().moved_bytes - moved, 3 * SMALL); /* there is nothing left to gain */
    reopen();
    expect_all();
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
}

/* Clones and what deduplication has shared: one place before, one place after. */
TEST(all_owners_move_together)
{
    struct ht_obj *other[FILES] = {NULL};

    sparse(16);
    for (unsigned i = 0; i < FILES; i++) {
        if (!file[i])
            continue;
        other[i] = object(SMALL, i % 32 ? 0 : SCOPE);
        ck_assert_int_eq(ht_obj_clone(file[i], 0, other[i], 0, SMALL), SMALL);
    }
    uint64_t lsn;
    ck_assert_int_eq(ht_scope_commit(s, SCOPE, &lsn), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    uint64_t free_bytes = stats().free_bytes;
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_ge(figures().emptied, 12);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    ht_store_verify(s, true);
    expect_all();
    for (unsigned i = 0; i < FILES; i++)
        if (other[i]) {
            delete (file[i]); /* the other one keeps the bytes */
            file[i] = NULL;
        }
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    for (unsigned i = 0; i < FILES; i++)
        if (other[i]) {
            ht_obj_evict(other[i]);
            expect(other[i], 0, content[i], SMALL);
        }
}

/* Something in each group is not published, or newer in memory: the group stays whole as it is. */
TEST_LOOP(a_group_that_cannot_be_emptied_is_left_alone, 2)
{
    sparse(16);
    for (unsigned i = 0; i < FILES; i++)
        if (file[i]) {
            put_all(file[i], 5, (const uint8_t *)"x", 1);
            content[i][5] = 'x';
            if (_i)
                ck_assert_int_eq(ht_obj_writeback(file[i]), 0);
        }
    struct ht_store_stats before = stats();
    ck_assert_int_eq(background_compact(s), 0);
    if (_i == 0) /* a dirty image alone holds nothing up */
        ck_assert_uint_ge(figures().emptied, 12);
    else
        ck_assert_uint_eq(figures().moved_bytes, 0);
    ck_assert_uint_eq(stats().available_bytes, before.available_bytes);
    ht_store_verify(s, true);
    ck_assert_int_eq(ht_store_commit(s), 0);
}

/* Clones of an open scope own the content, too, and no transaction may name their places: nothing is even read. */
TEST(what_may_not_move_is_not_read)
{
    struct ht_obj *twin[FILES] = {NULL};

    sparse(16);
    for (unsigned i = 0; i < FILES; i++)
        if (file[i]) {
            twin[i] = object(SMALL, SCOPE);
            ck_assert_int_eq(ht_obj_clone(file[i], 0, twin[i], 0, SMALL), SMALL);
        }
    struct ht_store_stats before = stats();
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_eq(stats().device_read_bytes, before.device_read_bytes);
    ck_assert_uint_eq(figures().emptied, 0);
    ck_assert_uint_gt(figures().skipped, 0);
}

TEST_LOOP(an_error_leaves_everything_where_it_was, 5)
{
    static const enum ht_fault_point points[] = {HT_FAULT_IO_READ, HT_FAULT_STORE_CHECKSUM, HT_FAULT_IO_WRITE,
                                                 HT_FAULT_IO_FLUSH, HT_FAULT_SPACE_RESERVE};

    sparse(16);
    uint64_t free_bytes = stats().free_bytes, available = stats().available_bytes;
    ht_fault_arm(points[_i], 1, true);
    (void)!background_compact(s);
    ck_assert_uint_gt(ht_fault_passed(points[_i]), 0);
    ht_fault_disarm_all();
    ck_assert_uint_eq(figures().emptied, 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_store_verify(s, points[_i] != HT_FAULT_IO_WRITE);
    if (points[_i] != HT_FAULT_IO_WRITE) { /* a place that failed is kept */
        ck_assert_uint_eq(stats().free_bytes, free_bytes);
        ck_assert_uint_eq(stats().available_bytes, available);
    }
    expect_all();
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_ge(figures().emptied, 8);
}

/* After a power cut all files with a number are whole. */
static void expect_all_after_crash(const uint64_t oid[FILES])
{
    crash();
    for (unsigned i = 0; i < FILES; i++)
        file[i] = oid[i] ? get_object(oid[i]) : NULL;
    ht_store_verify(s, true);
    expect_all();
    done();
}

TEST(a_crash_leaves_all_content)
{
    sparse(16);
    ck_assert_int_eq(background_compact(s), 0);
    uint64_t oid[FILES] = {0};
    for (unsigned i = 0; i < FILES; i++)
        if (file[i])
            oid[i] = ht_obj_id(file[i]);
    expect_all_after_crash(oid);
}

static unsigned frames(void)
{
    unsigned n = 0;

    ht_store_lock(s);
    for (unsigned i = 0; i < FILES; i++) {
        struct ht_chunk *c = file[i] ? ht_chunk_find(file[i], 0) : NULL;
        n += c && c->pub.codec == HT_CODEC_PLANES;
    }
    ht_store_unlock(s);
    return n;
}

/* A frame of a truncated file shows fewer bytes, also at its new place. */
TEST(compressed_content_moves_as_it_is)
{
    fresh(64, false);
    for (unsigned i = 0; i < FILES; i++) {
        content[i] = noise(SMALL, i);
        for (unsigned k = 0; k < SMALL; k += 2) /* a byte in two is the same */
            content[i][k] = 7;
        file[i] = object(SMALL, 0);
        put_all(file[i], 0, content[i], SMALL);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_store_set_compress(s, all_may, NULL);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(background_compress(s), 0);
    for (unsigned i = 0; i < FILES; i++)
        if (i % 16) {
            delete (file[i]);
            file[i] = NULL;
        }
    ck_assert_int_eq(ht_obj_truncate(file[16], 1000), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(frames(), FILES / 16);
    uint64_t free_bytes = stats().free_bytes;
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_ge(figures().emptied, 8);
    ck_assert_uint_eq(frames(), FILES / 16);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    ht_store_verify(s, true);
    reopen();
    for (unsigned i = 0; i < FILES; i += 16)
        expect(file[i], 0, content[i], i == 16 ? 1000 : SMALL);
    memset(content[16] + 1000, 0, SMALL - 1000);
    ck_assert_int_eq(ht_obj_truncate(file[16], SMALL), 0);
}

/* ------------------------------------------------------------ odd content */

/* A scratch object, which reserves no log space, takes all blocks. */
static struct ht_obj *fill_with_blocks(uint64_t *out_chunks)
{
    struct ht_obj_attr a = {.oid = ht_store_new_id(s), .chunk_bytes = SMALL, .obj_class = HT_CLASS_SCRATCH};
    uint8_t block[HT_BLOCK_BYTES] = {1};
    struct ht_obj *o;
    uint64_t n = 0;

    ck_assert_int_eq(ht_obj_create(s, &a, &o), 0);
    hold_object(o);
    while (ht_obj_write(o, n * SMALL, block, sizeof(block)) == sizeof(block))
        n++;
    while (stats().dram_dirty_bytes)
        ck_assert_int_gt(background_clean(s), 0);
    *out_chunks = n;
    return o;
}

/* Gaps of 8 and 3 blocks in one group, and of 5 in the next. */
static bool is_gap(uint64_t block)
{
    uint64_t at = block % 256;

    return (block / 256 == 5 && ((at >= 100 && at < 108) || (at >= 150 && at < 153))) ||
        (block / 256 == 6 && at >= 100 && at < 105);
}

static bool is_elsewhere(uint64_t block)
{
    return block / 256 != 5 && block / 256 != 6 && block % 256 < 128;
}

static bool is_beside(uint64_t block)
{
    return block / 256 == 5 || block / 256 == 6;
}

static unsigned drop_blocks(struct ht_obj *o, uint64_t chunks, bool (*which)(uint64_t block))
{
    unsigned dropped = 0;

    for (uint64_t i = 0; i < chunks; i++) {
        uint64_t block = block_of(o, i);
        if (!block || !which(block))
            continue;
        ht_obj_scratch_drop(o, i, 1);
        dropped++;
    }
    return dropped;
}

/* Three pieces of one chunk lie in two groups: both become free. */
TEST(content_in_pieces_is_moved_once)
{
    uint64_t n;

    fresh(8, false);
    struct ht_obj *blocks = fill_with_blocks(&n);
    ck_assert_uint_eq(drop_blocks(blocks, n, is_gap), 16);
    content[0] = noise(SMALL, 1);
    file[0] = object(SMALL, 0);
    put_all(file[0], 0, content[0], SMALL);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_store_lock(s);
    const struct ht_ref *ref = &ht_chunk_find(file[0], 0)->pub;
    ck_assert_uint_eq(ht_ref_extents(ref), 3);
    ck_assert_uint_eq(ht_ref_extent(ref, 0).block / 256, ht_ref_extent(ref, 2).block / 256);
    ck_assert_uint_ne(ht_ref_extent(ref, 0).block / 256, ht_ref_extent(ref, 1).block / 256);
    ht_store_unlock(s);
    ck_assert_uint_gt(drop_blocks(blocks, n, is_beside), 256);
    ck_assert_uint_gt(drop_blocks(blocks, n, is_elsewhere), 256);
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_eq(figures().moved_bytes, SMALL);
    ck_assert_uint_eq(figures().emptied, 2);
    ht_store_verify(s, true);
}

/* A step ends after its bytes (0), or at its time (1): then a device that takes 6 ms serves one move. */
TEST_LOOP(a_step_keeps_to_its_budget, 2)
{
    enum { LIMIT = 4 * SMALL };
    bool slow = _i;
    uint64_t most = 0;

    sparse(16);
    dev_set_delay(dev, slow ? 6 : 0);
    for (unsigned i = 0; i < 1000 && figures().passes == 0; i++) {
        struct ht_budget budget = {.most_bytes = slow ? UINT64_MAX : LIMIT,
                                   .until_ns = slow ? ht_now_ns() + 10000000 : UINT64_MAX};
        ck_assert_int_eq(ht_compact_engine.step(s, &budget), HT_STEP_WORKED);
        most = ht_max_u64(most, budget.bytes);
    }
    dev_set_delay(dev, 0);
    ck_assert_uint_eq(figures().passes, 1);
    ck_assert_uint_ge(figures().emptied, 12);
    ck_assert_uint_gt(most, 0);
    ck_assert_uint_le(most, slow ? 2 * SMALL : LIMIT); /* a move reads and writes */
}

static void *compact_main(void *arg)
{
    ck_assert_int_eq(background_compact(s), 0);
    return arg;
}

static uint64_t in_flight_bytes(void)
{
    struct ht_gate_stats st;
    uint64_t bytes = 0;

    ht_gate_stats(dev, &st);
    for (unsigned i = 0; i < HT_IO_CLASSES; i++)
        bytes += st.in_flight_bytes[i];
    return bytes;
}

/* A round of one, of two, of four: the device stops within the third one. */
TEST_LOOP(several_contents_move_at_once, 2)
{
    pthread_t thread;

    sparse(16);
    dev_stall_at(dev, _i ? HT_IO_WRITE : HT_IO_READ, 6);
    ck_assert_int_eq(pthread_create(&thread, NULL, compact_main, NULL), 0);
    for (unsigned ms = 0; in_flight_bytes() < 2 * SMALL || !dev_is_stalled(dev); ms++) {
        ck_assert_uint_lt(ms, 20000);
        usleep(1000);
    }
    dev_stall(dev, false);
    pthread_join(thread, NULL);
    ck_assert_uint_ge(figures().emptied, 12);
    ht_store_verify(s, true);
}

/* One of those that are in flight together fails: the others move, and its group is tried again. */
TEST_LOOP(what_fails_keeps_its_group_alone, 2)
{
    sparse(16);
    uint64_t free_bytes = stats().free_bytes;
    dev_fail(dev, _i ? HT_IO_WRITE : HT_IO_READ, 6, false);
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_ge(figures().emptied, 10);
    ht_store_verify(s, !_i);
    expect_all();
    if (!_i) /* a place that failed is kept */
        ck_assert_uint_eq(stats().free_bytes, free_bytes);
}

/* ------------------------------------------------------------ when it runs */

static unsigned wakes;

static void count_wakes(struct ht_store *store, const struct ht_wakes *w)
{
    (void)store;
    wakes += w->compact;
}

/* It is woken once for all that became free before it looked. */
TEST(it_sleeps_until_there_is_space_to_gain)
{
    ck_assert_uint_eq(ht_alloc_sparse_groups(s->alloc), 0); /* superblocks and logs never move */
    s->hooks.wake_engines = count_wakes;
    wakes = 0;
    ck_assert(sleeps());
    (void)written_object(SMALL, 0, (const uint8_t *)"new content", 11);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(wakes, 0); /* the log grew, and nothing is sparse but what comes next */
    ck_assert(sleeps());
    sparse(16);
    ck_assert_uint_eq(wakes, 1);
    finish_pass();
    ck_assert_uint_ge(figures().emptied, 12);
    ck_assert_uint_eq(wakes, 1);
    ht_store_verify(s, true);
}

/* A second lies between two passes. */
static void wait_for_turn(void)
{
    usleep(1100000);
}

/* After one that gained space the next pass begins as soon as other groups are nearly empty. */
TEST(the_next_pass_begins_soon)
{
    fresh(64, false);
    s->hooks.wake_engines = count_wakes;
    sparse(16);
    finish_pass();
    ck_assert_uint_ge(figures().emptied, 12);
    sparse(16);
    wait_for_turn();
    finish_pass();
    ck_assert_uint_ge(figures().emptied, 24);
}

/*
 * Clones of an open scope hold all groups up: owners that are not published keep their groups as they are. A
 * transaction that frees nothing may let them go. twin: of each file.
 */
static void pass_in_vain(struct ht_obj *twin[FILES], uint64_t mib)
{
    fresh(mib, false);
    s->hooks.wake_engines = count_wakes;
    sparse(16);
    for (unsigned i = 0; i < FILES; i++)
        if (file[i]) {
            twin[i] = object(SMALL, SCOPE);
            ck_assert_int_eq(ht_obj_clone(file[i], 0, twin[i], 0, SMALL), SMALL);
        }
    finish_pass();
    ck_assert_uint_eq(figures().emptied, 0);
    wakes = 0;
    ht_store_lock(s);
    s->waits.compact_sleeps = true; /* as it does after its pause */
    ht_wake_for_compact(s);
    ht_store_unlock(s);
    ck_assert_uint_eq(wakes, 0); /* it has seen this log */
}

/* When the engine looks again by itself: ns from now; 0: when it is woken. A pass does not begin. */
static uint64_t looks_in_ns(void)
{
    struct ht_budget budget = {.most_bytes = UINT64_MAX, .until_ns = UINT64_MAX};

    ck_assert_int_eq(ht_compact_engine.step(s, &budget), HT_STEP_IDLE);
    return budget.at_ns ? budget.at_ns - ht_min_u64(ht_now_ns(), budget.at_ns) : 0;
}

/* In a pause after a pass in vain it sleeps, and many more groups end the pause. */
TEST(much_more_space_to_gain_ends_a_pause)
{
    enum { MORE = 60 * 16 }; /* of 60 groups */
    struct ht_obj *twin[FILES] = {NULL}, *more[MORE];

    pass_in_vain(twin, 96);
    wait_for_turn();
    ck_assert_uint_gt(looks_in_ns(), 5000000000); /* 30 s */
    for (unsigned i = 0; i < MORE; i++) {
        more[i] = object(SMALL, 0);
        put_all(more[i], 0, content[i % FILES], SMALL);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(wakes, 0);
    for (unsigned i = 0; i < MORE; i++)
        if (i % 16)
            delete (more[i]);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(wakes, 1);
    finish_pass();
    ck_assert_uint_ge(figures().emptied, 30);
}

TEST(it_looks_again_when_the_log_has_grown)
{
    struct ht_obj *twin[FILES] = {NULL};
    uint64_t lsn;

    pass_in_vain(twin, 32);
    ck_assert_int_eq(ht_scope_commit(s, SCOPE, &lsn), 0);
    ck_assert_uint_eq(wakes, 1);
    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_ge(figures().emptied, 12);
}

/* The record may be older than its last pass. */
TEST(it_looks_again_when_space_became_free)
{
    struct ht_obj *twin[FILES] = {NULL};

    pass_in_vain(twin, 32);
    for (unsigned i = 0; i < FILES; i++)
        if (twin[i]) {
            ck_assert_int_eq(ht_obj_truncate(twin[i], 0), 0);
            break;
        }
    ck_assert_uint_eq(wakes, 0); /* its owner still has it */
    struct ht_obj *o = written_object(SMALL, SCOPE, (const uint8_t *)"not published", 13);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    ck_assert_int_eq(ht_obj_truncate(o, 0), 0);
    ck_assert_uint_eq(wakes, 1);
}

/* The blocks that a device discards are marked as taken, so it may have looked while nothing was to gain. */
TEST(it_is_woken_when_a_discard_ends)
{
    fixture_discard = true;
    fresh(32, false);
    s->hooks.wake_engines = count_wakes;
    sparse(16);
    wakes = 0;
    ht_store_lock(s);
    s->waits.compact_sleeps = true;
    ht_store_unlock(s);
    background_discard(s);
    ck_assert_uint_gt(stats().device_discarded_bytes, 0);
    ck_assert_uint_eq(wakes, 1);
    finish_pass();
    ck_assert_uint_ge(figures().emptied, 12);
    fixture_discard = false;
}

/* Groups are closed then, and their moves are not durable. The rate lets the engine wait behind its first unit. */
TEST(a_store_closes_in_the_middle_of_a_batch)
{
    uint64_t oid[FILES] = {0};

    sparse(16);
    for (unsigned i = 0; i < FILES; i++)
        if (file[i])
            oid[i] = ht_obj_id(file[i]);
    unmount_store();
    mount_as(.compact = true, .background_rate_bytes = 128 << 10);
    WAIT_FOR(figures().moved_bytes > 0);
    ht_store_verify(s, false);
    ck_assert_int_eq(ht_store_unmount(s), 0);
    expect_all_after_crash(oid);
}

/* ----------------------------------------------------------- beside others */

static _Atomic bool over;

static void *write_main(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)arg;
    uint8_t *got = malloc(SMALL);

    while (!over) {
        unsigned i = (unsigned)((seed = seed * 6364136223846793005ull + 1) >> 33) % FILES / 16 * 16;
        unsigned mine = i / 16 % 2;
        if (mine != (uintptr_t)arg % 2)
            continue;
        put_all(file[i], seed % (SMALL - 8), content[i] + seed % (SMALL - 8), 8); /* the same bytes, elsewhere */
        if (seed % 5 == 0)
            ck_assert_int_eq(ht_obj_sync(file[i]), 0);
        if (seed % 3 == 0)
            ht_obj_evict(file[i]);
        ck_assert_int_eq(ht_obj_read(file[i], 0, got, SMALL), SMALL);
        ck_assert_int_eq(memcmp(got, content[i], SMALL), 0);
        usleep(seed % 500);
    }
    free(got);
    return NULL;
}

TEST(writers_and_readers_beside_it_lose_nothing)
{
    pthread_t thread[2];

    fresh(32, true);
    sparse(16);
    uint64_t free_bytes = stats().free_bytes;
    over = false;
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, write_main, (void *)(uintptr_t)(i + 2)), 0);
    for (uint64_t end = ht_now_ns() + 1500000000ull; ht_now_ns() < end || !figures().emptied;) {
        ck_assert_int_eq(background_compact(s), 0);
        ck_assert_int_eq(background_dedup(s), 0);
        ck_assert_uint_lt(ht_now_ns(), end + 60000000000ull);
    }
    over = true;
    for (unsigned i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_store_verify(s, false);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
}

RUN_TESTS("compact", .timeout_s = 300, .setup = fixture_begin, .teardown = end)
