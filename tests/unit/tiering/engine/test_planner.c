/* SPDX-License-Identifier: Apache-2.0 */
/* test_planner.c - the store plans accesses that repeat: it reads less, and gives up a wrong plan. */

#include "tiering/object/chunk.h"

#include "tests/support/wrap.h"
#include "tests/unit/tiering/store/fixture.h"
#include "tiering/api/stats.h"

enum { DRAM = 32, PASSES = 6, PIECE = 1 << 17 };

static uint8_t buf[MIB];

static void begin_with_dram(uint64_t mib, uint64_t dram_bytes, bool threads)
{
    fixture_dram_bytes = dram_bytes;
    fresh(mib, threads);
}

static void begin(uint64_t mib)
{
    begin_with_dram(mib, DRAM * MIB, false);
}

static void read_chunk(struct ht_obj *o, unsigned i)
{
    for (unsigned at = 0; at < MIB; at += PIECE) {
        ck_assert_int_eq(ht_obj_read(o, i * (uint64_t)MIB + at, buf, PIECE), PIECE);
        ck_assert_uint_eq(buf[0], (uint8_t)i);
    }
}

/* Returns the MiB that the pass read from the device. */
static unsigned pass(struct ht_obj *o, unsigned chunks)
{
    uint64_t before = stats().device_read_bytes;

    for (unsigned i = 0; i < chunks; i++)
        read_chunk(o, i);
    return (unsigned)((stats().device_read_bytes - before) / MIB);
}

static unsigned passes(struct ht_obj *o, unsigned chunks, unsigned n)
{
    unsigned mib = 0;

    while (n--)
        mib = pass(o, chunks);
    return mib;
}

/* Of N chunks K have room: N - K are read in each pass, one more for the chunk that is read just now. */
TEST_LOOP(a_cyclic_scan_reads_what_has_no_room, 4)
{
    static const unsigned chunks[] = {40, 48, 64, 96};

    begin(256);
    struct ht_obj *o = tensor_of(chunks[_i]);
    unsigned without = passes(o, chunks[_i], PASSES);
    ht_store_plan(s);
    unsigned mib = passes(o, chunks[_i], 4);
    ck_assert_uint_lt(mib, without);
    ck_assert_uint_ge(mib, chunks[_i] - DRAM);
    ck_assert_uint_le(mib, chunks[_i] - DRAM + 2 + (chunks[_i] - DRAM) / 8);
}

static struct ht_plan_stats plan_stats(void)
{
    struct ht_plan_stats st;

    ht_store_plan_stats(s, &st);
    return st;
}

static unsigned turn;

/* Reads other chunks than the plan has, and in another order. */
static void read_elsewhere(struct ht_obj *o, unsigned n)
{
    while (n--)
        read_chunk(o, (turn++ * 2654435761u) >> 26);
}

TEST(a_plan_that_does_not_match_two_steps_ends)
{
    begin(256);
    struct ht_obj *o = tensor_of(64);
    passes(o, 64, PASSES);
    ht_store_plan(s);
    passes(o, 64, 4);
    ht_store_plan(s);
    ck_assert(plan_stats().active);
    ck_assert_uint_eq(plan_stats().dropped, 0);
    for (unsigned i = 0; i < 32 && plan_stats().dropped == 0; i++) {
        read_elsewhere(o, 32);
        ht_store_plan(s);
    }
    ck_assert_uint_eq(plan_stats().dropped, 1);
    ck_assert(!plan_stats().active);
    /* And a new one begins with new steps. */
    passes(o, 64, PASSES);
    ht_store_plan(s);
    ck_assert(plan_stats().active);
    ck_assert_uint_le(passes(o, 64, 4), 40);
}

TEST(a_tensor_may_be_deleted_while_the_plan_runs)
{
    struct ht_obj *o[4];
    struct ht_tx *tx;
    uint64_t lsn;

    begin(256);
    for (unsigned i = 0; i < 4; i++)
        o[i] = tensor_of(16);
    for (unsigned i = 0; i < 4 * PASSES; i++)
        pass(o[i % 4], 16);
    ht_store_plan(s);
    ck_assert(plan_stats().active);
    pass(o[0], 16);
    ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
    ht_obj_delete(o[2], tx);
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    put_object(o[2]);
    for (unsigned i = 0; i < 16 && plan_stats().dropped == 0; i++) {
        ht_store_plan(s);
        for (unsigned k = 0; k < 4; k++)
            if (k != 2)
                pass(o[k], 16);
    }
    for (unsigned i = 0; i < 4; i++)
        if (i != 2)
            put_object(o[i]);
}

/* Work on another tensor ends the plan, and then has the whole tier. */
TEST(other_work_gets_the_memory)
{
    begin(256);
    struct ht_obj *o = tensor_of(64), *other = tensor_of(24);
    passes(o, 64, PASSES);
    ht_store_plan(s);
    passes(o, 64, 2);
    ck_assert(plan_stats().active);
    for (unsigned i = 0; i < 16 && plan_stats().active; i++) {
        pass(other, 24);
        ht_store_plan(s);
    }
    ck_assert(!plan_stats().active);
    passes(other, 24, 3);
    ck_assert_uint_eq(pass(other, 24), 0);
}

enum { SMALL = 40 };

static void read_all(struct ht_obj *o[SMALL])
{
    for (unsigned i = 0; i < SMALL; i++)
        read_chunk(o[i], 0);
}

/* The N-th allocation fails, for each N: there is no plan, and reading goes on. */
TEST(without_memory_there_is_no_plan)
{
    struct ht_obj *o[SMALL];
    unsigned nth;
    bool reached = true;

    begin(256);
    for (unsigned i = 0; i < SMALL; i++)
        o[i] = tensor_of(1);
    for (unsigned i = 0; i < PASSES; i++)
        read_all(o);
    for (nth = 0; reached && nth < 64; nth++) {
        ck_assert(!plan_stats().active);
        read_all(o);
        wrap_fail(WRAP_MEMORY, nth + 1, false);
        ht_store_plan(s);
        reached = wrap_reached(WRAP_MEMORY);
        wrap_fail(WRAP_MEMORY, 0, false);
    }
    ck_assert(!reached && plan_stats().active);
    ck_assert_uint_gt(nth, 10);
    read_all(o);
}

enum { LAYERS = 64 };

/* Reads all tensors, and after each the plan's reads are made. Returns the MiB that the devices read. */
static unsigned layers_ahead(struct ht_obj *o[LAYERS])
{
    uint64_t before = stats().device_read_bytes;

    for (unsigned i = 0; i < LAYERS; i++) {
        read_chunk(o[i], 0);
        ht_store_readahead(s);
    }
    return (unsigned)((stats().device_read_bytes - before) / MIB);
}

/* The store follows a plan of passes over the tensors. */
static void begin_planned(struct ht_obj *o[LAYERS])
{
    begin(256);
    for (unsigned i = 0; i < LAYERS; i++)
        o[i] = tensor_of(1);
    for (unsigned i = 0; i < PASSES; i++)
        layers_ahead(o);
    ck_assert_uint_eq(stats().readahead_chunks, 0);
    ht_store_plan(s);
    for (unsigned i = 0; i < 3; i++)
        layers_ahead(o);
}

/*
 * No reader is sequential here. The reader finds most of the tensors that had no room, and reads of the plan take no
 * room from tensors that are needed before them.
 */
TEST(a_plan_reads_before_the_reader_asks)
{
    struct ht_obj *o[LAYERS];

    begin_planned(o);
    uint64_t hits = stats().readahead_hits, wasted = stats().readahead_wasted;
    unsigned mib = layers_ahead(o);
    ck_assert_uint_ge(mib, LAYERS - DRAM);
    ck_assert_uint_le(mib, LAYERS - DRAM + 6);
    ck_assert_uint_ge(stats().readahead_hits - hits, mib * 3 / 4);
    ck_assert_uint_le(stats().readahead_wasted - wasted, 1);
    ck_assert(plan_stats().active);
}

/* Beside each layer there is state of fewer bits, whose chunks take half of a slot: reads of the plan bring it, too. */
TEST(a_plan_reads_what_takes_a_part_of_a_slot)
{
    enum { HALF = MIB / 2 };
    struct ht_obj *o[LAYERS], *state[LAYERS];
    uint64_t missed = 0;

    begin(256);
    memset(buf, 7, HALF);
    for (unsigned i = 0; i < LAYERS; i++) {
        o[i] = tensor_of(1);
        state[i] = object(MIB, 0);
        put_all(state[i], 0, buf, HALF);
        ck_assert_int_eq(ht_obj_sync(state[i]), 0);
        ht_obj_evict(state[i]);
    }
    for (unsigned n = 0; n < PASSES + 4; n++) {
        missed = 0;
        for (unsigned i = 0; i < LAYERS; i++) {
            read_chunk(o[i], 0);
            ht_store_readahead(s);
            uint64_t before = stats().device_read_bytes;
            ck_assert_int_eq(ht_obj_read(state[i], 0, buf, HALF), HALF);
            missed += (stats().device_read_bytes - before) / HALF;
            ht_store_readahead(s);
        }
        if (n == PASSES - 1)
            ht_store_plan(s);
    }
    ck_assert(plan_stats().active);
    ck_assert_uint_le(missed, LAYERS / 8);
    for (unsigned i = 0; i < LAYERS; i++)
        put_objects(o[i], state[i]);
    done();
}

/*
 * A program wants a layer earlier than the plan needs it, or one that the plan does not have. It gets the place of a
 * layer that is needed later, so that the next layers are still there.
 */
TEST(a_prefetch_takes_the_place_of_what_is_needed_later)
{
    struct ht_obj *o[LAYERS], *other;
    unsigned absent = 0;

    begin_planned(o);
    other = tensor_of(1);
    for (unsigned i = 0; i < 4; i++)
        read_chunk(o[i], 0);
    for (unsigned i = 8; i < LAYERS / 2 && !absent; i++) {
        struct ht_obj_stat st;
        ht_obj_stat(o[i], &st);
        absent = st.resident_bytes ? 0 : i;
    }
    ck_assert_uint_gt(absent, 0);
    ck_assert_int_eq(ht_obj_prefetch(o[absent]), 0);
    ck_assert_int_eq(ht_obj_prefetch(other), 0);
    uint64_t before = stats().device_read_bytes;
    read_chunk(other, 0);
    read_chunk(o[absent], 0);
    ck_assert_uint_eq(stats().device_read_bytes, before);
    ck_assert(plan_stats().active);
}

/* The file has no dtype: its images are smaller than those of the plan. It gets a place, too. */
TEST(a_prefetch_of_small_chunks_gets_a_place_beside_a_plan)
{
    enum { CHUNK = HT_SMALL_CHUNK_BYTES };
    struct ht_obj *o[LAYERS];

    begin_planned(o);
    struct ht_obj *other = object(CHUNK, 0);
    memset(buf, 7, MIB);
    ck_assert_int_eq(ht_obj_write(other, 0, buf, MIB), MIB);
    sync_and_evict(other);
    for (unsigned i = 0; i < LAYERS; i++)
        read_chunk(o[i], 0);
    ck_assert(plan_stats().active);
    ck_assert_uint_eq(obj_stat(other).resident_bytes, 0);
    ck_assert_int_eq(ht_obj_prefetch(other), 0);
    ck_assert_uint_eq(obj_stat(other).resident_bytes, MIB);
    uint64_t before = stats().device_read_bytes;
    memset(buf, 7, MIB);
    expect(other, 0, buf, MIB);
    ck_assert_uint_eq(stats().device_read_bytes, before);
}

enum { PARTS = 1800, VISITS = 20000, LARGE_DRAM = 96 };

/* Reads chunks in an order that looks like chance, so that each visit is a run, and no part repeats. */
static void visit(struct ht_obj *o)
{
    uint8_t to[4096];

    for (uint64_t i = 0; i < VISITS; i++) {
        uint64_t x = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
        uint64_t at = ((x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93) >> 32) % PARTS;
        ck_assert_int_eq(ht_obj_read(o, at * HT_SMALL_CHUNK_BYTES, to, sizeof(to)), sizeof(to));
        ck_assert_uint_eq(to[7], 0x5a);
    }
}

/*
 * The history is too short for two of these steps. It gets longer, but for a tier that is too small for that, and then
 * there is a plan.
 */
TEST_LOOP(a_step_of_many_passes_has_a_plan, 2)
{
    bool is_small = _i;

    begin_with_dram(256, (is_small ? DRAM : LARGE_DRAM) * MIB, false);
    struct ht_obj *o = object(HT_SMALL_CHUNK_BYTES, 0);
    memset(buf, 0x5a, MIB);
    for (uint64_t at = 0; at < PARTS * (uint64_t)HT_SMALL_CHUNK_BYTES; at += HT_SMALL_CHUNK_BYTES)
        ck_assert_int_eq(ht_obj_write(o, at, buf, HT_SMALL_CHUNK_BYTES), HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    uint64_t memory = stats().working_bytes;
    for (unsigned i = 0; i < 3; i++)
        visit(o);
    ht_store_plan(s);
    ck_assert(!plan_stats().active);
    ck_assert((stats().working_bytes > memory + HT_RUNS_MIN) != is_small);
    for (unsigned i = 0; i < 3; i++)
        visit(o);
    ht_store_plan(s);
    ck_assert(plan_stats().active != is_small);
    ck_assert_uint_eq(plan_stats().made, !is_small);
}

static void *read_and_write(void *arg)
{
    struct ht_obj **o = arg;
    uint8_t *mine = malloc(MIB);

    for (unsigned i = 0; i < 3000 && !plan_stats().made; i++)
        for (unsigned k = 0; k < 48; k++) {
            ck_assert_int_eq(ht_obj_read(o[0], k * (uint64_t)MIB, mine, MIB), MIB);
            ck_assert_uint_eq(mine[0], k);
            if (k % 8)
                continue;
            memset(mine, (int)i, MIB);
            ck_assert_int_eq(ht_obj_write(o[1], k * (uint64_t)MIB, mine, MIB), MIB);
            ck_assert_int_eq(ht_obj_read(o[1], k * (uint64_t)MIB, mine, MIB), MIB);
            ck_assert_uint_eq(mine[MIB - 1], (uint8_t)i);
        }
    free(mine);
    return NULL;
}

/* The planner thread makes plans while others read and write. */
TEST(plans_are_made_and_followed_beside_other_work)
{
    struct ht_obj *o[2][2];
    pthread_t t[2];

    begin_with_dram(512, DRAM * MIB, true);
    for (unsigned i = 0; i < 2; i++) {
        o[i][0] = tensor_of(48);
        o[i][1] = tensor_of(48);
        ck_assert_int_eq(pthread_create(&t[i], NULL, read_and_write, o[i]), 0);
    }
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_join(t[i], NULL), 0);
    ck_assert_uint_gt(plan_stats().made, 0);
}

/* What fits into memory needs no plan. */
TEST(without_need_there_is_no_plan)
{
    begin(256);
    struct ht_obj *o = tensor_of(20);
    passes(o, 20, PASSES);
    ht_store_plan(s);
    ck_assert(!plan_stats().active);
    ck_assert_uint_eq(plan_stats().made, 0);
}

/* Else the thread reads it over and over. */
TEST(a_plan_passes_by_what_cannot_be_read)
{
    struct ht_obj *o[LAYERS];

    begin_planned(o);
    ht_store_lock(s);
    ht_chunk_find(o[40], 0)->pub.checksum ^= 1;
    ht_store_unlock(s);
    ht_obj_evict(o[40]);
    uint64_t before = stats().device_read_bytes;
    for (unsigned i = 0; i < 40; i++) {
        read_chunk(o[i], 0);
        ht_store_readahead(s);
    }
    /* The clock decides how many reads are due at once; each chunk is read about once. */
    ck_assert_uint_le(stats().device_read_bytes - before, LAYERS * (uint64_t)MIB);
}

RUN_TESTS("planner", .timeout_s = 60, .teardown = fixture_end)
