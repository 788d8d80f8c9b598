/* SPDX-License-Identifier: Apache-2.0 */
/* test_pass.c - while scrub reads everything, other engines get the bytes from it, and read nothing themselves. */
#include "tests/unit/tiering/codec/content.h"
#include "tests/unit/tiering/engine/compact.h"

enum { COLD = 24, STORE_MIB = 64 };

static struct ht_obj *cold;
static uint8_t *bytes;
static uint64_t reads; /* of a run of scrub alone */

static uint64_t read_bytes(void)
{
    return stats().device_read_bytes;
}

/* Content that gets smaller when it is compressed: two chunks are the same, and one is zeros. And sparse groups. */
static void setup(void)
{
    fresh(STORE_MIB, false);
    ht_store_set_compress(s, all_may, NULL);
    bytes = test_alloc(COLD * (size_t)MIB);
    for (unsigned i = 0; i < COLD; i++)
        content_bf16(bytes + i * (size_t)MIB, MIB, i);
    memcpy(bytes, bytes + 7 * MIB, MIB);
    memset(bytes + 9 * MIB, 0, MIB);
    cold = object(MIB, 0);
    put_all(cold, 0, bytes, COLD * (size_t)MIB);
    sparse(16);
    ht_obj_evict(cold);
    uint64_t before = read_bytes();
    ck_assert_int_eq(background_scrub(s), 0);
    reads = read_bytes() - before;
    ck_assert_int_eq(background_compress(s), 0); /* it notes what does not change */
}

static void teardown(void)
{
    ht_obj_evict(cold);
    expect(cold, 0, bytes, COLD * (size_t)MIB);
    expect_all();
    ht_store_verify(s, true);
    done();
}

/* It has something to do, and begins it unless it waits. */
static bool goes_on(enum ht_engine_id id)
{
    uint64_t at_ns, before = read_bytes();
    enum ht_step found;

    for (unsigned i = 0; i < 100 && read_bytes() == before; i++) {
        background_let_time_pass(s);
        found = background_step(s, id, &at_ns);
        ck_assert_int_ne(found, HT_STEP_BLOCKED);
        if (found == HT_STEP_IDLE && i > 10)
            break;
    }
    return read_bytes() != before;
}

/* The row is off, so that steps of a run come from this thread alone. */
static void begin_scrub(void)
{
    ht_row_end(&s->engine->row[HT_ENGINE_SCRUB]);
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
}

static void finish_scrub(void)
{
    struct ht_scrub_stats st;
    uint64_t at_ns;

    while (ht_store_scrub_stats(s, &st), st.state == HT_SCRUB_RUNNING)
        ck_assert_int_ne(background_step(s, HT_ENGINE_SCRUB, &at_ns), HT_STEP_BLOCKED);
    ck_assert_uint_eq(st.state, HT_SCRUB_COMPLETE);
    ck_assert_uint_eq(st.run_found, 0);
}

static void finish_others(void)
{
    ck_assert_int_eq(background_pass(s, HT_ENGINE_DEDUP, HT_DEDUP_PASSES), 0);
    ck_assert_int_eq(background_compress(s), 0);
    ck_assert_uint_eq(engine_figure("dedup", "shared_bytes"), MIB);
    ck_assert_uint_eq(engine_figure("dedup", "hole_bytes"), MIB);
    ck_assert_uint_ge(engine_figure("recompress", "chunks"), COLD - 3); /* but zeros, and those that are the same */
}

TEST(one_read_serves_all)
{
    uint64_t before = read_bytes();

    ck_assert_int_eq(background_compact(s), 0);
    ck_assert_uint_ge(figures().emptied, 8);
    begin_scrub();
    ck_assert(!goes_on(HT_ENGINE_DEDUP));
    ck_assert(!goes_on(HT_ENGINE_RECOMPRESS));
    finish_scrub();
    finish_others();
    ck_assert_uint_le(read_bytes() - before, reads + reads / 10);
}

/* Nobody waits for a run that is paused. */
TEST(a_run_that_is_paused_holds_nobody_up)
{
    begin_scrub();
    ck_assert_int_eq(ht_store_background_pause(s, "scrub"), 0);
    ck_assert(goes_on(HT_ENGINE_DEDUP));
    ck_assert(goes_on(HT_ENGINE_RECOMPRESS));
    finish_others();
    ck_assert_int_eq(ht_store_background_resume(s, "scrub"), 0);
    finish_scrub();
}

/* Paused before a run (0), or while it waits (1). */
TEST_LOOP(an_engine_that_is_paused_gets_nothing, 2)
{
    static const char *const engines[] = {"dedup", "recompress"};

    begin_scrub();
    if (_i) {
        ck_assert(!goes_on(HT_ENGINE_DEDUP));
        ck_assert(!goes_on(HT_ENGINE_RECOMPRESS));
    }
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(ht_store_background_pause(s, engines[i]), 0);
    struct ht_store_stats was = stats();
    finish_scrub();
    ck_assert_uint_eq(stats().device_written_bytes, was.device_written_bytes);
    ck_assert_uint_eq(engine_figure("dedup", "compared_bytes"), 0);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(ht_store_background_resume(s, engines[i]), 0);
    finish_others();
}

/* Writes before and after the read of a chunk. */
TEST_LOOP(changes_beside_a_run_stay, 2)
{
    struct ht_scrub_stats st;
    uint64_t at_ns, x = 1;

    begin_scrub();
    ck_assert(!goes_on(HT_ENGINE_DEDUP));
    ck_assert(!goes_on(HT_ENGINE_RECOMPRESS));
    while (ht_store_scrub_stats(s, &st), st.state == HT_SCRUB_RUNNING) {
        ck_assert_int_ne(background_step(s, HT_ENGINE_SCRUB, &at_ns), HT_STEP_BLOCKED);
        uint64_t at = random_next(&x) % (COLD * (uint64_t)MIB);
        bytes[at] ^= 1;
        put_all(cold, at, bytes + at, 1);
        if (_i)
            ck_assert_int_eq(ht_obj_sync(cold), 0);
    }
    ck_assert_uint_eq(st.run_found, 0);
    for (unsigned i = 0; i < 2; i++) {
        ck_assert_int_eq(background_dedup(s), 0);
        ck_assert_int_eq(background_compress(s), 0);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
}

/* A run reads every place, also where very many have the same content, and the notes have no room for all. */
TEST(copies_that_the_notes_have_no_room_for_are_read)
{
    enum { COPIES = 40, OWNERS_MAX = 4 };
    struct ht_obj *copy[COPIES];
    uint8_t *same = noise(SMALL, FILES);
    uint64_t at_ns, before;
    struct ht_scrub_stats st;

    s->opts.owners_max = OWNERS_MAX; /* and twice as many notes */
    for (unsigned i = 0; i < COPIES; i++) {
        copy[i] = object(SMALL, 0);
        put_all(copy[i], 0, same, SMALL);
        sync_and_evict(copy[i]);
    }
    before = read_bytes();
    begin_scrub();
    ck_assert(!goes_on(HT_ENGINE_DEDUP));
    ht_store_lock(s);
    struct ht_extent e = ht_ref_extent(&ht_chunk_find(copy[COPIES - 1], 0)->pub, 0);
    ht_store_unlock(s);
    uint8_t *place = (uint8_t *)ht_dev_ram_data(dev) + e.block * HT_BLOCK_BYTES;
    *place ^= 1;
    while (ht_store_scrub_stats(s, &st), st.state == HT_SCRUB_RUNNING)
        ck_assert_int_ne(background_step(s, HT_ENGINE_SCRUB, &at_ns), HT_STEP_BLOCKED);
    ck_assert_uint_eq(st.run_found, 1);
    ck_assert_uint_ge(read_bytes() - before, reads + COPIES * (uint64_t)SMALL);
    *place ^= 1;
}

/* What a commit publishes between the reads of a chunk's two references was not read yet. */
TEST(a_reference_that_is_published_beside_a_run_is_read)
{
    struct ht_obj *o = object(MIB, SCOPE);
    struct ht_scrub_stats st;
    uint64_t at_ns, found = 0, lsn;
    uint8_t *p = noise(MIB, FILES);

    for (unsigned i = 0; i < 2; i++) {
        p[0] ^= 1;
        put_all(o, 0, p, MIB);
        ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
        if (i == 0)
            ck_assert_int_eq(ht_scope_commit(s, SCOPE, &lsn), 0);
    }
    ht_obj_evict(o);
    ht_store_lock(s);
    const struct ht_chunk *c = ht_chunk_find(o, 0);
    struct ht_extent published = ht_ref_extent(&c->pub, 0), current = ht_ref_extent(&c->cur, 0);
    ht_store_unlock(s);
    uint8_t *ram = (uint8_t *)ht_dev_ram_data(dev);
    ram[published.block * HT_BLOCK_BYTES] ^= 1;
    ram[current.block * HT_BLOCK_BYTES] ^= 1;
    begin_scrub();
    do {
        ck_assert_int_ne(background_step(s, HT_ENGINE_SCRUB, &at_ns), HT_STEP_BLOCKED);
        ht_store_scrub_stats(s, &st);
        if (st.run_found != found)
            ck_assert_int_eq(ht_scope_commit(s, SCOPE, &lsn), 0);
        found = st.run_found;
    } while (st.state == HT_SCRUB_RUNNING);
    ck_assert_uint_eq(st.run_found, 2);
}

RUN_TESTS("pass", .setup = setup, .teardown = teardown, .timeout_s = 120, .quiet = ERRORS_ONLY)
