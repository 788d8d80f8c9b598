/* SPDX-License-Identifier: Apache-2.0 */
/* test_rewrite_reserve.c - in a full store an object with a rewrite reserve can be rewritten, in any order. */

#include "tests/support/memory.h"
#include "tiering/data/write_batch.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tests/unit/tiering/store/fixture.h"

enum { RECORD_BYTES = HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES };
enum { CHUNKS = 12, CHUNK_BLOCKS = HT_CHUNK_BYTES / HT_BLOCK_BYTES, WAIT_MS_MAX = 60000 };

static struct ht_obj *o, *filler;
static uint8_t *p;

/* The object is published and has its reserve; all other space is taken. */
static void fill(bool threads)
{
    fresh(40, threads);
    o = object(HT_CHUNK_BYTES, 9);
    filler = object(HT_CHUNK_BYTES, 0);
    p = pattern(CHUNKS * MIB + 3, 8);
    put_synced(o, 0, p, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_rewrite_reserve(o, CHUNKS * MIB), 0);
    while (ht_obj_write(filler, ht_obj_size(filler), p, MIB) > 0)
        ;
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    ck_assert_uint_lt(stats().available_bytes, MIB);
}

static void empty(void)
{
    put_objects(o, filler);
    free(p);
    done();
}

static uint64_t reserve_left(void)
{
    ht_store_lock(s);
    uint64_t left = o->extra->rewrite_reserve_left;
    ht_store_unlock(s);
    return left;
}

/* The first chunk's second copy borrows the space of another one, which gets it back when that copy is written. */
TEST(a_chunk_that_is_written_twice_leaves_the_others_their_space)
{
    fill(false);
    for (int step = 1; step <= 3; step++) {
        put_all(o, 0, p, MIB);
        ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
        put_all(o, 0, p + step, CHUNKS * MIB);
        ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
        expect(o, 0, p + step, CHUNKS * MIB);
        ck_assert_int_eq(ht_obj_sync(o), 0);
        ck_assert_uint_eq(reserve_left(), CHUNKS * CHUNK_BLOCKS);
    }
    empty();
}

/* All log bytes that there are. */
static uint64_t take_log(void)
{
    uint64_t bytes = 0;

    for (uint64_t each = MIB; each; each /= 2)
        while (ht_store_log_reserve(s, each) == 0)
            bytes += each;
    return bytes;
}

/* Others have taken all log bytes that there are: content of chunks that had none is accepted all the same. */
TEST(a_reserve_has_log_bytes_for_chunks_that_are_empty)
{
    fresh(40, false);
    o = object(HT_CHUNK_BYTES, 9);
    filler = object(HT_CHUNK_BYTES, 0);
    p = pattern(CHUNKS * MIB + 3, 8);
    put_all(o, 0, p, MIB);
    uint64_t before = stats().log.reserved_bytes;
    ck_assert_int_eq(ht_obj_rewrite_reserve(o, CHUNKS * MIB), 0);
    ck_assert_uint_eq(stats().log.reserved_bytes - before, (CHUNKS - 1) * RECORD_BYTES);
    uint64_t others = take_log();
    put_synced(o, 0, p + 1, CHUNKS * MIB);
    expect(o, 0, p + 1, CHUNKS * MIB);
    ht_store_verify(s, false);
    ck_assert_int_eq(ht_obj_rewrite_reserve(filler, MIB), -ENOSPC);
    ck_assert_int_eq(ht_obj_truncate(o, MIB), 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_eq(stats().log.reserved_bytes - others - before, (CHUNKS - 1) * RECORD_BYTES);
    ck_assert_int_eq(ht_obj_rewrite_reserve(o, 0), 0);
    ck_assert_uint_eq(stats().log.reserved_bytes - others, before);
    ht_store_log_unreserve(s, others);
    ht_store_verify(s, true);
    empty();
}

/* What a smaller reserve does not cover any more has space from the larger one. */
TEST(a_reserve_becomes_smaller_in_a_full_store)
{
    fill(false);
    put_all(o, 0, p + 1, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_rewrite_reserve(o, (CHUNKS - 1) * MIB), 0);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    expect(o, 0, p + 1, CHUNKS * MIB);
    empty();
}

struct update {
    uint64_t index;
    bool staged;
    _Atomic bool over;
    int rc;
};

/* A pin belongs to the thread that begins it. */
static void *update_main(void *arg)
{
    struct update *u = arg;
    struct ht_batch_pin l = {
        .store = s, .count = 1, .chunk[0] = {.obj = o, .index = u->index, .mode = HT_BATCH_PIN_OVERWRITE}};

    u->rc = ht_batch_pin_begin(&l);
    u->rc = u->rc ? u->rc : ht_batch_pin_wait(&l);
    if (u->rc)
        return NULL;
    u->staged = l.chunk[0].staged;
    memcpy(l.chunk[0].data, p + u->index * MIB + 1, MIB);
    ht_batch_pin_end(&l, 1);
    u->rc = ht_batch_pin_finish(&l);
    u->over = true;
    return NULL;
}

/* Its image is written, and no other. */
static void *clean_main(void *arg)
{
    struct update *u = arg;

    ht_obj_clean(o, u->index, u->index + 1);
    u->over = true;
    return NULL;
}

static bool waits(const struct update *u)
{
    unsigned waiters = 0;

    for (unsigned ms = 0; ms < WAIT_MS_MAX && !waiters && !u->over; ms++) {
        usleep(1000);
        ht_store_lock(s);
        waiters = s->waits.reserve_waiters;
        ht_store_unlock(s);
    }
    return waiters == 1;
}

/*
 * A thread writes the first chunk a second time, and the device does not answer. Meanwhile the last chunk needs its
 * space: its image is written back, or an update without an image ends (staged).
 */
TEST_LOOP(a_thread_waits_for_space_that_another_one_has_borrowed, 2)
{
    bool staged = _i;
    const uint64_t last = CHUNKS - 1;
    struct update first = {.index = 0}, u = {.index = last};
    pthread_t thread[2];

    fill(true);
    put_all(o, 0, p + 1, last * MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    ck_assert_uint_eq(reserve_left(), CHUNK_BLOCKS);
    if (staged)
        ht_obj_set_residency(o, HT_RESIDENCY_COLD);
    dev_stall_at(dev, HT_IO_WRITE, 1); /* the writeback engine may be quicker */
    put_all(o, 0, p + 2, MIB);
    ck_assert_int_eq(pthread_create(&thread[0], NULL, clean_main, &first), 0);
    WAIT_FOR(!reserve_left() && dev_is_stalled(dev));
    ck_assert_uint_lt(stats().available_bytes, MIB);
    if (!staged)
        put_all(o, last * MIB, p + last * MIB + 1, MIB);
    ck_assert_int_eq(pthread_create(&thread[1], NULL, staged ? update_main : clean_main, &u), 0);
    bool waited = waits(&u);
    dev_stall(dev, false);
    pthread_join(thread[0], NULL);
    pthread_join(thread[1], NULL);
    ck_assert_int_eq(u.rc, 0);
    ck_assert_uint_eq(u.staged, staged);
    ck_assert(waited);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    expect(o, 0, p + 2, MIB);
    expect(o, MIB, p + MIB + 1, (CHUNKS - 1) * MIB);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_eq(reserve_left(), CHUNKS * CHUNK_BLOCKS);
    empty();
}

enum { PAIRS_MAX = 2000, PAIR_BYTES = HT_SMALL_CHUNK_BYTES + 5, LOG_BYTES = HT_LOG_BYTES_MIN };

/* An update of the second chunk, whose leaf is not there yet. */
static void update_second(struct ht_obj *pair)
{
    struct ht_batch_pin l = {
        .store = s, .count = 1, .chunk[0] = {.obj = pair, .index = 1, .mode = HT_BATCH_PIN_OVERWRITE}};

    pin_now(&l);
    memcpy(l.chunk[0].data, "state", 5);
    unpin(&l, 1);
}

static struct ht_obj *make_pair(void)
{
    struct ht_obj *pair = object(HT_SMALL_CHUNK_BYTES, 9);

    ck_assert_int_eq(ht_obj_truncate(pair, PAIR_BYTES), 0);
    return pair;
}

/* As many objects of two chunks as the log has room for. */
static unsigned promise_all(struct ht_obj *pair[PAIRS_MAX])
{
    enum { EACH = HT_OBJECT_RECORD_BYTES + 2 * RECORD_BYTES };
    uint64_t room = take_log();
    unsigned n = 0;

    ht_store_log_unreserve(s, room);
    /* So that there is room for the last object, and not for its chunks. */
    ck_assert_int_eq(ht_store_log_reserve(s, (room + EACH - HT_OBJECT_RECORD_BYTES) % EACH), 0);

    do
        ck_assert_ptr_nonnull(pair[n] = make_pair());
    while (ht_obj_rewrite_reserve(pair[n], PAIR_BYTES) == 0 && ++n < PAIRS_MAX);
    return n;
}

TEST(log_bytes_for_steps_are_promised_or_refused_before)
{
    static struct ht_obj *pair[PAIRS_MAX];
    uint64_t oid[2], lsn;

    fresh_with_log(400, LOG_BYTES, false);
    unsigned n = promise_all(pair);
    ck_assert_uint_lt(n, PAIRS_MAX);
    ck_assert_uint_le(n * sizeof(struct ht_leaf), LOG_BYTES); /* as tiering/object/chunk.h says */
    /* The refused one has nothing; it was not for want of space. */
    struct ht_store_stats full = stats();
    ck_assert_uint_gt(full.available_bytes, 64 * MIB);
    ck_assert_int_eq(ht_obj_rewrite_reserve(pair[n], PAIR_BYTES), -ENOSPC);
    ck_assert(stats().reserved_bytes == full.reserved_bytes && !pair[n]->extra->rewrite_reserve_blocks);
    ht_store_verify(s, false);
    /* Files have all tables that they may: steps go on all the same. */
    s->objects.tables_bytes_max = 0;
    update_second(pair[0]);
    update_second(pair[1]);
    /* One that gives its promise up leaves it to another one. */
    ck_assert_int_eq(ht_obj_rewrite_reserve(pair[2], 0), 0);
    ck_assert_int_eq(ht_obj_rewrite_reserve(pair[n], PAIR_BYTES), 0);
    ht_store_verify(s, false);
    for (unsigned i = 0; i < 2; i++)
        oid[i] = ht_obj_id(pair[i]);
    ck_assert_int_eq(ht_scope_commit(s, 9, &lsn), 0);
    for (unsigned i = 0; i <= n; i++)
        put_object(pair[i]);
    remount();
    for (unsigned i = 0; i < 2; i++) {
        ck_assert_ptr_nonnull(pair[i] = get_object(oid[i]));
        expect(pair[i], HT_SMALL_CHUNK_BYTES, (const uint8_t *)"state", 5);
        put_object(pair[i]);
    }
}

/* Smaller chunks need more log bytes: they may be refused to a reserve that becomes smaller. */
TEST(a_reserve_without_a_promise_is_counted)
{
    fresh(64, false);
    struct ht_obj *x = object(HT_CHUNK_BYTES, 9);
    ck_assert_int_eq(ht_obj_rewrite_reserve(x, CHUNKS * MIB), 0);
    ck_assert_int_eq(ht_obj_set_chunk_bytes(x, HT_SMALL_CHUNK_BYTES), 0);
    uint64_t others = take_log();
    ck_assert_int_eq(ht_obj_rewrite_reserve(x, (CHUNKS - 1) * MIB), -ENOSPC);
    ht_store_log_unreserve(s, others);
    ht_store_verify(s, false);
    ck_assert_int_eq(ht_obj_rewrite_reserve(x, 0), 0);
    ck_assert_uint_eq(stats().reserved_bytes, 0);
}

RUN_TESTS("rewrite reserve", .timeout_s = 300, .memory = memory_keep, .teardown = fixture_end)
