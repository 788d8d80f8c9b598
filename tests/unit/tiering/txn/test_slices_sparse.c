/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_slices_sparse.c - test_slices.c for chunks that are reserved, or copies of one: a program makes a million in a
 * moment.
 */
#include "tests/unit/tiering/txn/slices.h"

/* Places that a program sets aside, and asks for again and again: chunks without content. */
TEST(no_operation_on_many_reserved_chunks_holds_the_lock_for_long)
{
    pthread_t reader;
    uint64_t bytes = chunks * CHUNK;

    ck_assert_int_eq(pthread_create(&reader, NULL, read_hot, NULL), 0);
    for (unsigned round = 0; round < 2; round++) {
        begin();
        ck_assert_int_eq(ht_obj_prealloc(obj, 0, bytes), 0);
        expect_slices("reservation");
        begin();
        ck_assert_int_eq(ht_obj_prealloc(obj, 0, bytes), 0);
        expect_slices("reservation of reserved chunks");
        begin();
        ck_assert_int_eq(ht_obj_punch(obj, 0, bytes / 2), 0);
        expect_slices("punch of reserved chunks behind the end");
        ck_assert_int_eq(ht_obj_prealloc(obj, 0, bytes), 0);
        begin();
        ck_assert_int_eq(ht_obj_truncate(obj, bytes), 0);
        ck_assert_int_eq(ht_obj_truncate(obj, bytes), 0);
        expect_slices("truncate to the same size");
        begin();
        ht_obj_set_residency(obj, HT_RESIDENCY_PINNED);
        (void)ht_obj_pinnable_bytes(obj);
        ht_obj_set_residency(obj, HT_RESIDENCY_AUTO);
        ht_obj_evict(obj);
        ht_obj_unprotect(obj);
        expect_slices("residency");
        begin();
        ck_assert_int_eq(ht_obj_prefetch(obj), 0);
        expect_slices("prefetch");
        begin();
        ck_assert_int_eq(ht_obj_clone(obj, 0, obj, bytes, CHUNK), CHUNK);
        expect_slices("copy of a hole");
        begin();
        ck_assert_int_eq(ht_store_commit(s), 0);
        publish_scope(SCOPE);
        expect_slices("commit");
        begin();
        ck_assert_int_eq(ht_obj_truncate(obj, 0), 0);
        expect_slices("truncate of reserved chunks");
    }
    stop = true;
    pthread_join(reader, NULL);
    ht_store_verify(s, true);
}

/* A file that was copied onto its own end again and again: all chunks have the same bytes. */
static void double_up(struct ht_obj *o)
{
    for (uint64_t n = 1; n < chunks; n *= 2) {
        uint64_t more = ht_min_u64(n, chunks - n);
        ck_assert_int_eq(ht_obj_clone(o, 0, o, n * CHUNK, more * CHUNK), more * CHUNK);
    }
}

TEST(no_operation_on_many_copies_of_a_chunk_holds_the_lock_for_long)
{
    uint8_t block[CHUNK];
    pthread_t reader;

    memset(block, 3, sizeof(block));
    struct ht_obj *many = object(CHUNK, 0);
    struct ht_obj *copy = object(CHUNK, 0);
    put_synced(many, 0, block, sizeof(block));
    ck_assert_int_eq(pthread_create(&reader, NULL, read_hot, NULL), 0);
    begin();
    double_up(many);
    expect_slices("copies of a chunk");
    begin();
    ck_assert_int_eq(ht_obj_sync(many), 0);
    expect_slices("sync of copies");
    begin();
    ck_assert_int_eq(ht_obj_clone(many, 0, copy, 0, chunks * CHUNK), chunks * CHUNK);
    expect_slices("copy of copies");
    begin();
    ck_assert_int_eq(ht_store_commit(s), 0);
    expect_slices("commit of copies");
    begin();
    put_synced(many, CHUNK, block, BLOCK);
    expect_slices("sync of one chunk of many");
    begin();
    ck_assert_int_eq(ht_obj_punch(many, 0, chunks / 2 * CHUNK), 0);
    ck_assert_int_eq(ht_obj_sync(many), 0);
    expect_slices("punch of copies");
    begin();
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    expect_slices("checkpoint of the log");
    begin();
    ck_assert_int_eq(ht_obj_truncate(copy, 1), 0);
    ck_assert_int_eq(ht_obj_sync(copy), 0);
    expect_slices("truncate of copies");
    stop = true;
    pthread_join(reader, NULL);
    ht_store_verify(s, true);
}

static struct ht_obj *shared, *copy;

static void *copy_and_punch(void *arg)
{
    while (!stop) {
        if (ht_obj_clone(shared, 0, copy, 0, chunks * CHUNK) != (ssize_t)(chunks * CHUNK) ||
            ht_obj_punch(copy, 0, chunks * CHUNK))
            abort();
        changes++;
    }
    return arg;
}

/* Writers in the same scope are faster, and the transaction has room for few changes: they wait. */
TEST(a_publication_beside_fast_writers_is_in_slices)
{
    enum { ROUNDS = 8, ROOM_RECORDS = 64 };
    uint8_t block[CHUNK];
    pthread_t writer;
    struct ht_tx *tx;

    memset(block, 3, sizeof(block));
    shared = object(CHUNK, 0);
    copy = object(CHUNK, 0);
    put_synced(shared, 0, block, sizeof(block));
    double_up(shared);
    struct ht_obj *target = object(CHUNK, 0);
    ck_assert_int_eq(pthread_create(&writer, NULL, copy_and_punch, NULL), 0);
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint64_t before = changes;
        ck_assert_int_eq(ht_obj_clone(shared, 0, target, 0, chunks * CHUNK), chunks * CHUNK);
        ck_assert_int_eq(ht_tx_begin(s, ht_obj_pending_bytes(target), &tx), 0);
        tx->again_bytes = ROOM_RECORDS * HT_CHUNK_RECORD_BYTES;
        begin();
        ht_obj_publish(target, tx);
        expect_slices("publication beside fast writers");
        ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
        while (changes == before)
            sched_yield();
    }
    stop = true;
    pthread_join(writer, NULL);
    ht_store_verify(s, true);
}

/* Looks for data and holes from everywhere, in few steps each. */
static void expect_seeks(uint64_t off, int64_t data, int64_t hole)
{
    enum { FEW = 40 };

    begin();
    ck_assert_int_eq(ht_obj_seek(obj, off, false), data);
    ck_assert_int_eq(ht_obj_seek(obj, off, true), hole);
    ck_assert_uint_le(ht_lock_longest(HT_LOCK_STORE).steps, FEW);
}

TEST_LOOP(a_seek_passes_any_number_of_chunks_in_few_steps, unless_many(1))
{
    uint64_t bytes = chunks * CHUNK;

    ck_assert_int_eq(ht_obj_prealloc(obj, 0, bytes), 0);
    ck_assert_int_eq(ht_obj_truncate(obj, bytes), 0);
    expect_seeks(0, -ENXIO, 0);
    expect_seeks(CHUNK, -ENXIO, CHUNK);
    fill(chunks - 1, 1, 1);
    expect_seeks(CHUNK, (int64_t)(bytes - CHUNK), CHUNK);
    expect_seeks(bytes - 1, (int64_t)bytes - 1, (int64_t)bytes);
    fill(0, chunks, 2);
    for (unsigned round = 0; round < 2; round++) {
        expect_seeks(0, 0, (int64_t)bytes);
        expect_seeks(CHUNK + 5, CHUNK + 5, (int64_t)bytes);
        publish_scope(SCOPE);
        ht_obj_evict(obj);
    }
    ck_assert_int_eq(ht_obj_punch(obj, CHUNK, bytes - 2 * CHUNK), 0);
    for (unsigned round = 0; round < 2; round++) {
        expect_seeks(0, 0, CHUNK);
        expect_seeks(2 * CHUNK, (int64_t)(bytes - CHUNK), 2 * CHUNK);
        publish_scope(SCOPE);
    }
    ht_store_verify(s, true);
}

static _Atomic uint64_t given;

static void *prealloc_and_cut(void *arg)
{
    while (!stop) {
        if (ht_obj_prealloc(obj, 0, chunks * CHUNK) || ht_obj_truncate(obj, ht_obj_size(obj)))
            abort();
        given++;
    }
    return arg;
}

/* Reservations come and go in slices beside writes, punches and commits. No block is counted twice, or forgotten. */
TEST_LOOP(reservations_beside_changes_keep_all_counts, unless_many(1))
{
    pthread_t writer, giver;

    seeds = calloc(chunks, 1);
    ck_assert_int_eq(ht_obj_truncate(obj, chunks * CHUNK), 0);
    ck_assert_int_eq(pthread_create(&writer, NULL, change, NULL), 0);
    ck_assert_int_eq(pthread_create(&giver, NULL, prealloc_and_cut, NULL), 0);
    while (given < 4)
        publish_scope(SCOPE);
    stop = true;
    pthread_join(writer, NULL);
    pthread_join(giver, NULL);
    ck_assert_int_eq(ht_obj_punch(obj, 0, chunks * CHUNK), 0);
    ck_assert_int_eq(ht_obj_truncate(obj, 0), 0);
    publish_scope(SCOPE);
    ht_store_verify(s, true);
    struct ht_obj_stat st;
    ht_obj_stat(obj, &st);
    ck_assert_uint_eq(st.prealloc_bytes, 0);
    free(seeds);
}

RUN_TESTS("sparse slices", .setup = setup, .teardown = done, .timeout_s = 600)
