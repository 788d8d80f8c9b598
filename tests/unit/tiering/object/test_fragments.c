/* SPDX-License-Identifier: Apache-2.0 */
/* A store whose free space is in single blocks: chunks have many pieces, and their records are as long as reserved. */
#include "tests/unit/tiering/store/fixture.h"

enum { SMALL = HT_SMALL_CHUNK_BYTES, RECORD = 60, PIECE = 12 };

static struct ht_obj *comb;

/* A scratch object, which reserves no log space, takes every other block. */
static void fill_with_pieces(void)
{
    struct ht_obj_attr a = {.oid = ht_store_new_id(s), .chunk_bytes = SMALL, .obj_class = HT_CLASS_SCRATCH};

    ck_assert_int_eq(ht_obj_create(s, &a, &comb), 0);
    hold_object(comb);
    uint8_t block[4096] = {1};
    uint64_t n = 0;
    while (ht_obj_write(comb, n * SMALL, block, sizeof(block)) == sizeof(block))
        n++;
    while (stats().dram_dirty_bytes)
        ck_assert_int_gt(background_clean(s), 0);
    for (uint64_t i = 0; i < n; i += 2)
        ht_obj_scratch_drop(comb, i, 1);
}

static void fresh_in_pieces(uint64_t mib)
{
    fresh_with_log(mib, HT_LOG_BYTES_MIN, false);
    fill_with_pieces();
}

static int count_pieces(void *ctx, const struct ht_chunk_info *info)
{
    *(uint64_t *)ctx += info->extent_count - 1;
    return 0;
}

static uint64_t pieces(void)
{
    uint64_t n = 0;

    ck_assert_int_eq(ht_store_walk(s, count_pieces, &n), 0);
    return n;
}

/* Publishes scope 9, and compares the length with the prediction. */
static void publish(void)
{
    struct ht_tx *tx;
    size_t bytes = ht_scope_pending_bytes(s, 9);

    ck_assert_int_eq(ht_tx_begin(s, bytes, &tx), 0);
    ht_scope_publish(s, 9, false, tx);
    ck_assert_uint_eq(ht_tx_records(tx)->len, bytes);
    commit_durably(tx);
    ck_assert_uint_eq(ht_scope_pending_bytes(s, 9), 0);
}

TEST(log_reserves_and_estimates_are_exact)
{
    fresh_in_pieces(64);
    uint8_t *p = pattern(4 * MIB, 1);
    struct ht_store_stats before = stats();
    struct ht_obj *a = object(HT_CHUNK_BYTES, 9), *b = object(HT_CHUNK_BYTES, 9);
    uint64_t oid[2] = {ht_obj_id(a), ht_obj_id(b)}, objects = 2 * 40;
    put_all(a, 0, p, 4 * MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    publish();
    uint64_t n = pieces();
    ck_assert_uint_ge(n, 4 * 200);
    ck_assert_uint_eq(stats().log.reserved_bytes, before.log.reserved_bytes + objects + 4 * RECORD + n * PIECE);
    ck_assert_int_eq(ht_obj_clone(a, 0, b, 0, 4 * MIB), 4 * MIB); /* pieces of its own, in the log */
    ck_assert_int_eq(ht_obj_truncate(a, 3 * MIB + 100), 0);       /* one chunk narrower */
    ck_assert_int_eq(ht_obj_punch(a, MIB, MIB), 0);
    publish();
    ck_assert_uint_eq(stats().log.reserved_bytes, before.log.reserved_bytes + objects + 7 * RECORD + pieces() * PIECE);
    put_all(a, 0, p + 1, MIB); /* current and published at once */
    put_all(b, 0, p + 1, MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    ck_assert_int_eq(ht_scope_abort(s, 9), 0);
    n = stats().log.reserved_bytes;
    ck_assert_uint_eq(n, before.log.reserved_bytes + objects + 7 * RECORD + pieces() * PIECE);
    crash();
    ck_assert_uint_eq(stats().log.reserved_bytes, n);
    for (int i = 0; i < 2; i++) {
        a = get_object(oid[i]);
        expect(a, 2 * MIB, p + 2 * MIB, MIB);
        delete (a);
    }
    publish();
    ck_assert_uint_eq(stats().log.reserved_bytes, before.log.reserved_bytes);
    comb = NULL;
}

/* More chunks than the log could hold the records of: refused while they are written, and the log lasts. */
TEST(a_log_full_of_pieces_refuses_writes_and_lasts)
{
    fresh_in_pieces(256);
    uint8_t *p = pattern(MIB, 2);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 9);
    uint64_t oid = ht_obj_id(o), count = 0;
    while (ht_obj_write(o, count * MIB, p, MIB) == MIB)
        count++;
    ck_assert_uint_gt(stats().available_bytes, 16 * MIB); /* there would be space */
    ck_assert_uint_ge(count, 16);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    publish();
    ck_assert_int_eq(ht_obj_truncate(o, (count / 2) * MIB), 0);
    publish();
    for (unsigned round = 0; round < 12; round++) { /* rewriting needs as many reserves again, until it is published */
        for (uint64_t i = 0; i < count / 3; i++)
            put_all(o, i * MIB + round, p, 1000);
        ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
        publish();
    }
    ck_assert(!ht_store_read_only(s));
    ck_assert_uint_ge(stats().log.checkpoints, 1);
    remount();
    o = get_object(oid);
    expect(o, (count / 3) * MIB, p, MIB);
    expect(o, 11, p, 989);
    put_object(o);
    comb = NULL;
}

/*
 * Chunks in one piece are rewritten in many while the log has all reserves that it takes. Their pieces are reserved by
 * force, but never so many that nothing can be deleted any more. rewrite_reserve: such content
 * is accepted, and waits in memory.
 */
static void rewrite_in_pieces(bool rewrite_reserve)
{
    enum { CHUNKS = 80 };

    fresh_with_log(256, HT_LOG_BYTES_MIN, false);
    uint8_t *p = pattern(MIB, 3);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 9);
    for (uint64_t i = 0; i < CHUNKS; i++)
        put_all(o, i * MIB, p, MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    publish();
    fill_with_pieces();
    if (rewrite_reserve)
        ck_assert_int_eq(ht_obj_rewrite_reserve(o, CHUNKS * MIB), 0);
    uint64_t rest = stats().log.reserve_limit_bytes - stats().log.reserved_bytes;
    ck_assert_int_eq(ht_store_log_reserve(s, rest), 0);
    ssize_t n = MIB;
    uint64_t done = 0;
    for (; done < CHUNKS && n == MIB; done++)
        n = ht_obj_write(o, done * MIB, p + 1, MIB - 1) + 1;
    ck_assert_int_eq(n, -ENOSPC + 1);
    ck_assert_uint_ge(done, 8);
    int rc = ht_scope_writeback(s, 9);
    ck_assert_int_eq(rc, rewrite_reserve ? -ENOSPC : 0);
    ck_assert(!stats().log.too_full);
    uint64_t reserved = stats().reserved_bytes;
    ck_assert_int_eq(ht_scope_writeback(s, 9), rc); /* a refused writeback returns its reservation once */
    ck_assert_uint_eq(stats().reserved_bytes, reserved);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(s, 16 << 10, &tx), 0); /* as a delete does */
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    /* With space in the log it goes on. */
    ht_store_log_unreserve(s, rest);
    put_all(o, (done - 1) * MIB, p + 1, MIB - 1);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    ck_assert_int_eq(ht_scope_abort(s, 9), 0);
    ht_obj_evict(o);
    expect(o, 0, p, MIB);
    put_object(o);
}

TEST(rewriting_in_pieces_is_refused_before_the_log_is_stuck)
{
    rewrite_in_pieces(false);
}

TEST(content_with_a_rewrite_reserve_in_pieces_waits_before_the_log_is_stuck)
{
    rewrite_in_pieces(true);
}

/*
 * Clones of one chunk in many pieces replace chunks in one piece, which have log reserves of their own. The log holds
 * the pieces once for each clone.
 */
TEST(clones_in_pieces_do_not_fill_the_log)
{
    enum { CHUNKS = 100 };

    fresh_with_log(256, HT_LOG_BYTES_MIN, false);
    uint8_t *p = pattern(MIB, 4);
    struct ht_obj *a = object(HT_CHUNK_BYTES, 9), *b = object(HT_CHUNK_BYTES, 9);
    for (uint64_t i = 0; i < CHUNKS; i++)
        put_all(b, i * MIB, p, MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    publish();
    fill_with_pieces();
    put_all(a, 0, p, MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    uint64_t count = 0;
    while (count < CHUNKS && ht_obj_clone(a, 0, b, count * MIB, MIB) == MIB)
        count++;
    ck_assert_uint_ge(count, 4);
    ck_assert(!stats().log.too_full);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(s, 16 << 10, &tx), 0); /* as a delete does */
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    ck_assert_int_eq(ht_scope_abort(s, 9), 0);
    put_objects(a, b);
}

/* Content in one piece is replaced by batch pins that write in many pieces from buffers, and reserve by force. */
TEST(staged_leases_in_pieces_do_not_fill_the_log)
{
    enum { CHUNKS = 80 };

    fresh_with_log(256, HT_LOG_BYTES_MIN, false);
    uint8_t *p = pattern(MIB, 5);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 9);
    for (uint64_t i = 0; i < CHUNKS; i++)
        put_all(o, i * MIB, p, MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    publish();
    fill_with_pieces();
    uint64_t rest = stats().log.reserve_limit_bytes - stats().log.reserved_bytes;
    ck_assert_int_eq(ht_store_log_reserve(s, rest), 0);
    unsigned staged = 0, refused = 0;
    for (uint64_t i = 0; i < CHUNKS; i++) {
        struct ht_batch_pin l = {
            .store = s, .count = 1, .chunk[0] = {.obj = o, .index = i, .mode = HT_BATCH_PIN_OVERWRITE}};
        if (ht_batch_pin_begin(&l)) /* into an image, which checks the log first */
            continue;
        ck_assert_int_eq(ht_batch_pin_wait(&l), 0);
        memcpy(l.chunk[0].data, p + 1, MIB - 1);
        ht_batch_pin_end(&l, 1);
        int rc = ht_batch_pin_finish(&l);
        ck_assert(rc == 0 || (rc == -ENOSPC && l.chunk[0].staged));
        staged += l.chunk[0].staged && rc == 0;
        refused += rc != 0;
    }
    ck_assert_uint_ge(staged, 4);
    ck_assert_uint_ge(refused, 1);
    ck_assert(!stats().log.too_full);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(s, 16 << 10, &tx), 0); /* as a delete does */
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    uint64_t reserved = stats().reserved_bytes;
    ck_assert_int_eq(ht_scope_abort(s, 9), 0);
    ck_assert_uint_le(stats().reserved_bytes, reserved);
    ck_assert_uint_eq(obj_stat(o).stored_bytes, CHUNKS * MIB);
    ht_obj_evict(o);
    for (uint64_t i = 0; i < CHUNKS; i++)
        expect(o, i * MIB, p, MIB);
    ht_store_log_unreserve(s, rest);
    put_object(o);
}

/*
 * The place in pieces fails, and another one in pieces takes the write: its pieces are not counted beside themselves.
 */
TEST(a_write_with_a_rewrite_reserve_in_pieces_goes_elsewhere_where_one_fits)
{
    enum { ROOM = 4500 }; /* for 255 pieces of 12 bytes, and not for twice as many */

    fresh_with_log(256, HT_LOG_BYTES_MIN, false);
    uint8_t *p = pattern(MIB, 6);
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 9, p, MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    publish();
    fill_with_pieces();
    ck_assert_int_eq(ht_obj_rewrite_reserve(o, MIB), 0);
    uint64_t reserved = stats().reserved_bytes, log = stats().log.log_bytes;
    uint64_t limit = (log - log / 8 - 64 * HT_KIB) * 4 / 9, forced = limit - ROOM - stats().log.reserved_bytes;
    ht_store_log_reserve_force(s, forced);
    put_all(o, 0, p + 1, MIB - 1);
    dev_fail(dev, HT_IO_WRITE, 1, false);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    ck_assert_uint_eq(stats().write_errors, 1);
    ck_assert_uint_eq(stats().reserved_bytes, reserved - MIB);
    ht_store_log_unreserve(s, forced);
    publish();
    ck_assert_uint_ge(pieces(), 200);
    ck_assert_uint_eq(stats().reserved_bytes, reserved);
    put_object(o);
}

RUN_TESTS("pieces", .teardown = fixture_end, .timeout_s = 60)
