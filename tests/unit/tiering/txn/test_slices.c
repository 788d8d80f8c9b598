/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations on many chunks or objects hold locks for short slices only.
 *
 * Builds that check locks count the steps of each hold, and with LOCKS=1 the basic blocks: that does not depend on the
 * machine. With HITRAIN_TEST_CHUNKS only this is tested, with so many chunks and objects. It prints the longest holds,
 * and how much of the time a reader of hot bytes waits for no lock:
 *
 *   make LOCKS=1 tests && HITRAIN_TEST_CHUNKS=1000000 build/locks/tests/unit/tiering/txn/test_slices
 */
#include "tests/unit/tiering/txn/slices.h"

/* The content of the hot file gets as many owners as there are chunks, and moves. */
static void move_all_owners(void)
{
    struct ht_obj *many = object(CHUNK, 0);
    struct ht_move_owner *owner = calloc(chunks + 1, sizeof(*owner));
    uint8_t *bytes = aligned_alloc(BLOCK, CHUNK);
    uint64_t lsn;
    int rc;

    ck_assert_int_eq(ht_obj_sync(hot), 0);
    for (uint64_t i = 0; i < chunks; i++) {
        ck_assert_int_eq(ht_obj_clone(hot, 0, many, i * CHUNK, BLOCK), BLOCK);
        owner[i] = (struct ht_move_owner){many->oid, i};
    }
    owner[chunks] = (struct ht_move_owner){hot->oid, 0};
    ck_assert_int_eq(ht_store_commit(s), 0);
    struct ht_move m = {
        .was = ht_chunk_find(many, 0)->pub, .obj = many, .owner = owner, .owners = (unsigned)chunks + 1};
    ht_store_lock(s);
    memcpy(bytes, ht_arena_data(s->arena, ht_chunk_find(hot, 0)->slot), BLOCK);
    ht_store_unlock(s);
    begin();
    ht_store_lock(s);
    (void)ht_move_may(s, &m); /* a reader may hold it */
    ht_store_unlock(s);
    expect_slices("look at many owners");
    begin();
    for (m.moved = false; !m.moved;) { /* until no reader holds it */
        ck_assert_int_eq(ht_move_write_copies(s, &m, &bytes, 1, ht_store_ring(s), &rc), 0);
        ck_assert_int_eq(ht_move_publish(s, &m, 1, &lsn), 0);
    }
    expect_slices("move of bytes of many owners");
    free(bytes);
    free(owner);
    put_object(many);
}

static void say_when_it_is_used(void)
{
    begin();
    ck_assert_int_eq(ht_obj_set_next_use(obj, HT_NEXT_USE_NEVER), 0);
    expect_slices("next use of the first object");
    begin();
    ck_assert_int_eq(ht_obj_set_next_use(obj, HT_NEXT_USE_NEVER), 0);
    expect_slices("next use");
    begin();
    ck_assert_int_eq(ht_obj_forget_next_use(obj), 0);
    expect_slices("end of a next use");
}

/* In memory, and on devices. */
static void change_what_it_may_have(void)
{
    begin();
    ht_obj_set_residency(obj, HT_RESIDENCY_PINNED);
    (void)ht_obj_pinnable_bytes(obj);
    ht_obj_set_residency(obj, HT_RESIDENCY_AUTO);
    expect_slices("residency");
    begin();
    ck_assert_int_eq(ht_obj_rewrite_reserve(obj, chunks * BLOCK), 0);
    ck_assert_int_eq(ht_obj_rewrite_reserve(obj, 0), 0);
    expect_slices("rewrite reserve");
}

TEST(no_operation_on_many_chunks_holds_the_lock_for_long)
{
    pthread_t reader;

    ck_assert_int_eq(pthread_create(&reader, NULL, read_hot, NULL), 0);
    begin();
    if (prints)
        usleep(ALONE_US);
    expect_slices("nothing beside the reader");
    move_all_owners();
    fill(0, chunks, 1);
    begin();
    publish_scope(SCOPE);
    expect_slices("first commit");
    fill(0, chunks, 2);
    begin();
    publish_scope(SCOPE);
    expect_slices("commit of a rewrite");
    expect_block(0, 2);
    expect_block(chunks - 1, 2);
    say_when_it_is_used();
    change_what_it_may_have();
    begin();
    uint64_t kept = keep();
    expect_slices("kept step");
    begin();
    ck_assert_int_eq(background_scrub(s), 0);
    expect_slices("scrub of a kept step");
    fill(0, chunks, 3);
    begin();
    publish_scope(SCOPE);
    expect_slices("commit after a kept step");
    begin();
    forget(kept);
    expect_slices("end of a kept step");
    begin();
    ck_assert_int_eq(ht_obj_punch(obj, 0, chunks / 2 * CHUNK), 0);
    expect_slices("punch of a half");
    begin();
    ck_assert_int_eq(ht_obj_truncate(obj, CHUNK), 0);
    expect_slices("truncate");
    begin();
    publish_scope(SCOPE);
    expect_slices("commit of a truncate");
    fill(0, chunks, 4);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    begin();
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(s, ht_scope_pending_bytes(s, SCOPE), &tx), 0);
    ht_scope_end(s, SCOPE, HT_SCOPE_DISSOLVED, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    expect_slices("end of a scope");
    begin();
    ck_assert_int_eq(ht_tx_begin(s, CHUNK, &tx), 0);
    delete_in(tx, obj);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    publish_scope(SCOPE);
    expect_slices("deletion");
    stop = true;
    pthread_join(reader, NULL);
}

/* A tensor of many chunks, with one that has changed. */
TEST_LOOP(a_change_at_the_end_of_a_large_object_is_published_in_few_steps, unless_many(1))
{
    enum { FEW = 100 };
    struct ht_tx *tx;

    fill(0, chunks, 1);
    publish_scope(SCOPE);
    for (unsigned i = 0; i < 2; i++) {
        fill(chunks - 1, 1, (uint8_t)(2 + i));
        ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
        begin();
        ck_assert_int_eq(ht_tx_begin(s, CHUNK, &tx), 0);
        ht_scope_publish(s, SCOPE, false, tx);
        ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
        ck_assert_uint_le(ht_lock_longest(HT_LOCK_STORE).steps, FEW);
        expect_block(chunks - 1, (uint8_t)(2 + i));
        ht_store_verify(s, true);
    }
}

static void write_many(uint8_t seed)
{
    uint8_t block[BLOCK];

    memset(block, seed, sizeof(block));
    for (size_t i = 0; i < many_count; i++)
        put_all(files[i], 0, block, sizeof(block));
}

static void make_many(void)
{
    many_count = chunks;
    files = calloc(many_count, sizeof(*files));
    many_kept = calloc(many_count, sizeof(*many_kept));
    for (size_t i = 0; i < many_count; i++)
        files[i] = object(CHUNK, SCOPE);
}

static void delete_many(void)
{
    struct ht_tx *tx;

    ck_assert_int_eq(ht_tx_begin(s, many_count * CHUNK / 256, &tx), 0);
    for (size_t i = 0; i < many_count; i++)
        delete_in(tx, files[i]);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    free(files);
    free(many_kept);
    many_count = 0;
}

TEST(no_operation_on_many_objects_holds_the_lock_for_long)
{
    pthread_t reader;

    ck_assert_int_eq(pthread_create(&reader, NULL, read_hot, NULL), 0);
    begin();
    make_many();
    expect_slices("making objects");
    write_many(1);
    begin();
    publish_scope(SCOPE);
    expect_slices("commit of objects");
    write_many(2);
    begin();
    ck_assert_int_eq(ht_scope_abort(s, SCOPE), 0);
    expect_slices("abort of objects");
    write_many(3);
    begin();
    uint64_t kept = keep();
    expect_slices("kept step of objects");
    begin();
    ck_assert_int_eq(background_scrub(s), 0);
    expect_slices("scrub of objects");
    begin();
    forget(kept);
    expect_slices("end of a kept step");
    begin();
    ck_assert(!ht_scope_edited(s, SCOPE));
    expect_slices("a look for changes");
    begin();
    delete_many();
    publish_scope(SCOPE);
    expect_slices("deletion of objects");
    stop = true;
    pthread_join(reader, NULL);
    ht_store_verify(s, true);
}

TEST_LOOP(what_changes_while_it_is_published_is_not_lost, unless_many(1))
{
    pthread_t writer;

    seeds = test_alloc(chunks);
    ck_assert_int_eq(ht_obj_truncate(obj, chunks * CHUNK), 0);
    ck_assert_int_eq(pthread_create(&writer, NULL, change, NULL), 0);
    for (unsigned k = 0; k < 4; k++) {
        for (uint64_t before = changes; changes < before + chunks;)
            sched_yield();
        if (k % 2)
            forget(keep());
        else
            publish_scope(SCOPE);
    }
    stop = true;
    pthread_join(writer, NULL);
    publish_scope(SCOPE);
    uint64_t oid = ht_obj_id(obj);
    put_objects(obj, hot);
    ht_store_verify(s, false);
    close_store(); /* a crash */
    open_store();
    obj = get_object(oid);
    ck_assert_ptr_nonnull(obj);
    uint8_t block[BLOCK];
    for (uint64_t i = 0; i < chunks; i++) {
        ck_assert_int_eq(ht_obj_read(obj, i * CHUNK, block, sizeof(block)), BLOCK);
        ck_assert_msg(block[0] == seeds[i] && block[BLOCK - 1] == seeds[i], "chunk %llu", (unsigned long long)i);
    }
}

/*
 * A publication in slices puts a second record for what changed meanwhile, as far as the transaction has room. When
 * that is used, it holds the lock to its end: nothing more may change. Builds that check locks
 * count the steps of a hold.
 */
TEST_LOOP(a_publication_without_room_for_changes_is_in_one_piece, unless_many(2))
{
    struct ht_tx *tx;

    make_many();
    size_t bytes = many_count * HT_OBJECT_RECORD_BYTES;
    ck_assert_int_eq(ht_tx_begin(s, 2 * bytes, &tx), 0);
    tx->again_bytes = bytes / 8;
    tx->found_bytes = ht_scope_found_bytes(s, SCOPE) - tx->again_bytes - (_i ? 1 : 0);
    begin();
    ht_scope_publish(s, SCOPE, false, tx);
    uint64_t steps = ht_lock_longest(HT_LOCK_STORE).steps;
    if (steps)
        ck_assert_msg(_i ? steps >= many_count : steps <= STEPS_MAX, "%llu steps", (unsigned long long)steps);
    ck_assert_uint_le(tx->records.len, bytes + HT_OBJECT_RECORD_BYTES); /* one more has no content */
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    delete_many();
}

/* No thread waits long for a transaction because another one publishes a large file outside of model roots. */
TEST_LOOP(a_large_file_is_published_in_several_transactions, unless_many(1))
{
    enum { CHUNKS = 40000, CUT = 100, PARTS = 3 };

    put_object(obj);
    obj = object(CHUNK, 0);
    fill(0, CHUNKS, 1);
    ck_assert_int_eq(ht_obj_writeback(obj), 0);
    uint64_t before = s->frees.tx_count, oid = ht_obj_id(obj);
    ck_assert_int_eq(ht_obj_publish_ahead(obj), 0);
    ck_assert_uint_ge(s->frees.tx_count - before, PARTS);
    ht_store_verify(s, true);
    before = s->frees.tx_count;
    ck_assert_int_eq(ht_obj_sync(obj), 0);
    ck_assert_uint_eq(s->frees.tx_count - before, 1);
    ck_assert_int_eq(ht_obj_truncate(obj, CUT * CHUNK), 0); /* the new size is not published before what it cuts off */
    ck_assert_int_eq(ht_obj_publish_ahead(obj), 0);
    close_store(); /* a crash */
    open_store();
    obj = get_object(oid);
    ck_assert_uint_eq(ht_obj_size(obj), (CHUNKS - 1ull) * CHUNK + BLOCK);
    for (uint64_t i = 0; i < CUT; i++)
        expect_block(i, 1);
    ck_assert_uint_eq(stats().chunks, CUT);
    ht_store_verify(s, true);
}

static _Atomic uint64_t appended;

static void *append(void *arg)
{
    for (uint64_t i = appended; !stop; appended = ++i) {
        fill(i, 1, 1);
        if (ht_obj_writeback(obj))
            abort();
    }
    return arg;
}

/* A crash between two parts leaves no content behind the end of the file: a later growth would show it. */
TEST_LOOP(a_file_that_grows_while_a_part_is_published_has_its_new_size, unless_many(1))
{
    enum { CHUNKS = 16000, PART_BYTES = 2 << 20 };
    pthread_t writer;
    struct ht_tx *tx;
    uint64_t index = 0, lsn;

    put_object(obj);
    obj = object(CHUNK, 0);
    fill(0, CHUNKS, 1);
    ck_assert_int_eq(ht_obj_writeback(obj), 0);
    stop = false;
    appended = CHUNKS;
    ck_assert_int_eq(pthread_create(&writer, NULL, append, NULL), 0);
    ck_assert_int_eq(ht_tx_begin(s, 2 * PART_BYTES, &tx), 0);
    (void)ht_obj_publish_part(obj, &index, PART_BYTES, tx);
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(s, lsn), 0);
    stop = true;
    pthread_join(writer, NULL);
    uint64_t oid = ht_obj_id(obj);
    close_store(); /* a crash */
    open_store();
    obj = get_object(oid);
    ck_assert_uint_ge(stats().chunks, CHUNKS);
    ck_assert_uint_ge(ht_obj_size(obj), (stats().chunks - 1) * CHUNK + BLOCK);
}

TEST_LOOP(a_size_that_changes_again_counts_again, unless_many(1))
{
    struct ht_tx *tx;

    fill(0, 1, 1); /* dirty, so it stays on the list of its scope */
    ck_assert_int_eq(ht_tx_begin(s, CHUNK, &tx), 0);
    ht_scope_publish(s, SCOPE, false, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    uint64_t before = ht_scope_found_bytes(s, SCOPE);
    for (unsigned i = 1; i <= 2; i++)
        ck_assert_int_eq(ht_obj_truncate(obj, CHUNK + i), 0);
    ck_assert_uint_eq(ht_scope_found_bytes(s, SCOPE) - before, HT_OBJECT_RECORD_BYTES);
    publish_scope(SCOPE);
}

enum { ROUNDS = 40, HOLD_NS = 1000000 };

static _Atomic unsigned round_begun, round_cut, round_ended;
static _Atomic bool holds;

/* Takes a chunk behind the new end that the truncation has looked at, while that looks at others. */
static bool take_watched_chunk(void)
{
    ht_store_lock(s);
    struct ht_chunk *c = s->objects.watches ? ht_chunk_make(obj, 1) : NULL;
    if (c && ht_chunk_trylock_exclusive(obj, c, 1))
        holds = true;
    ht_store_unlock(s);
    return holds;
}

static void *hold_once_in_a_round(void *arg)
{
    const struct timespec a_moment = {0, HOLD_NS};

    for (unsigned round = 1; round <= ROUNDS; round++) {
        while (round_begun < round)
            sched_yield();
        while (round_cut < round && !take_watched_chunk())
            sched_yield();
        if (holds) {
            nanosleep(&a_moment, NULL);
            ht_store_lock(s);
            holds = false;
            ht_chunk_unlock_exclusive(obj, ht_chunk_find(obj, 1), 1);
            ht_store_unlock(s);
        }
        round_ended = round;
    }
    return arg;
}

/* Who holds a chunk may have begun with the old size, and write behind the new end. */
TEST_LOOP(a_truncation_waits_for_a_chunk_that_it_has_passed, unless_many(1))
{
    pthread_t holder;

    fill(0, chunks, 1);
    publish_scope(SCOPE);
    ck_assert_int_eq(pthread_create(&holder, NULL, hold_once_in_a_round, NULL), 0);
    for (unsigned round = 1; round <= ROUNDS; round++) {
        ck_assert_int_eq(ht_obj_truncate(obj, chunks * CHUNK), 0);
        round_begun = round;
        ck_assert_int_eq(ht_obj_truncate(obj, CHUNK), 0);
        ck_assert(!holds);
        round_cut = round;
        while (round_ended < round)
            sched_yield();
    }
    pthread_join(holder, NULL);
}

TEST_LOOP(a_watch_sees_who_takes_a_later_chunk_of_its_object, unless_many(1))
{
    struct ht_chunk_watch early, late;

    fill(0, 4, 1);
    ht_store_lock(s);
    ht_chunk_watch_begin(&early, obj, 1);
    ht_chunk_watch_begin(&late, obj, 3);
    ck_assert(ht_chunk_trylock_exclusive(hot, ht_chunk_find(hot, 0), 0));
    ht_chunk_unlock_exclusive(hot, ht_chunk_find(hot, 0), 0);
    ht_chunk_lock_exclusive(obj, ht_chunk_find(obj, 0), 0);
    ht_chunk_unlock_exclusive(obj, ht_chunk_find(obj, 0), 0);
    ht_chunk_lock_shared(s, ht_chunk_find(obj, 3));
    ht_chunk_unlock_shared(obj, ht_chunk_find(obj, 3), 3);
    ck_assert(!early.taken && !late.taken);
    ck_assert(ht_chunk_trylock_exclusive(obj, ht_chunk_find(obj, 2), 2));
    ht_chunk_unlock_exclusive(obj, ht_chunk_find(obj, 2), 2);
    ck_assert(early.taken && !late.taken);
    ht_chunk_watch_end(&early);
    ht_chunk_lock_shared(s, ht_chunk_find(obj, 3));
    ht_chunk_relock_exclusive(obj, ht_chunk_find(obj, 3), 3);
    ht_chunk_unlock_exclusive(obj, ht_chunk_find(obj, 3), 3);
    ck_assert(late.taken);
    ht_chunk_watch_end(&late);
    ck_assert_ptr_null(s->objects.watches);
    ht_store_unlock(s);
}

static void *take_lock_once(void *arg)
{
    ht_store_lock(s);
    ht_store_unlock(s);
    return arg;
}

static void *take_transaction_once(void *arg)
{
    ht_mutex_lock(&s->tx_lock);
    ht_mutex_unlock(&s->tx_lock);
    return arg;
}

static pthread_t start_waiter(void *(*waits)(void *arg), const struct ht_mutex *lock)
{
    pthread_t waiter;

    ck_assert_int_eq(pthread_create(&waiter, NULL, waits, NULL), 0);
    while (!ht_mutex_is_wanted(lock))
        sched_yield();
    return waiter;
}

/* However busy the machine is, a rest takes no less. It is short if a thread waits for the end of the loop. */
TEST_LOOP(a_loop_rests_for_a_thread_that_waits, unless_many(4))
{
    enum { URGENT, PLANNED, PLANNED_IN_A_TRANSACTION, PLANNED_WITH_A_WRITER };
    struct ht_slice slice = HT_SLICE_RESTING;
    struct ht_scope_changes noted;
    pthread_t waiter, other = 0;
    enum ht_io_class was = ht_io_class_set(_i == URGENT ? HT_IO_URGENT : HT_IO_PLANNED);

    if (_i == PLANNED_IN_A_TRANSACTION) {
        ht_mutex_lock(&s->tx_lock);
        other = start_waiter(take_transaction_once, &s->tx_lock);
    }
    ht_store_lock(s);
    ht_scope_changes_begin(&noted, s, SCOPE);
    noted.awaited = _i == PLANNED_WITH_A_WRITER; /* ht_obj_let_publish */
    waiter = start_waiter(take_lock_once, ht_store_mutex(s));
    uint64_t began = ht_now_ns();
    slice.began_ns = began - HT_SLICE_NS;
    while (!slice.ended)
        ht_slice_next(s, &slice);
    ck_assert_uint_eq(slice.rested, _i == PLANNED ? HT_SLICE_LONG_REST : HT_SLICE_REST);
    ck_assert_uint_ge(ht_now_ns() - began, slice.rested * HT_SLICE_NS);
    ht_scope_changes_end(&noted);
    ht_store_unlock(s);
    pthread_join(waiter, NULL);
    if (_i == PLANNED_IN_A_TRANSACTION) {
        ht_mutex_unlock(&s->tx_lock);
        pthread_join(other, NULL);
    }
    (void)ht_io_class_set(was);
}

/* A hole is published while a thread holds the chunk for content that comes next. */
TEST_LOOP(a_held_chunk_keeps_its_log_bytes, unless_many(2))
{
    struct ht_batch_pin pin = {.count = 1};

    fill(0, 2, 1);
    publish_scope(SCOPE);
    ck_assert_int_eq(ht_obj_punch(obj, CHUNK, CHUNK), 0);
    pin.store = s;
    pin.chunk[0] = (struct ht_batch_pin_chunk){.obj = obj, .index = 1, .mode = HT_BATCH_PIN_OVERWRITE};
    pin_now(&pin);
    publish_scope(SCOPE);
    memset(pin.chunk[0].data, 2, pin.chunk[0].len);
    unpin(&pin, _i ? 0 : 1);
    ht_store_verify(s, false);
    expect_block(1, _i ? 0 : 2);
    publish_scope(SCOPE);
}

/* The log has too little room for it at first. */
TEST_LOOP(a_copy_that_begins_again_gives_its_log_bytes_back, unless_many(1))
{
    fill(0, chunks, 1);
    publish_scope(SCOPE);
    uint64_t before = stats().log.reserved_bytes;
    for (unsigned i = 0; i < 3; i++) {
        struct ht_copy k = {.s = s, .scope = SCOPE, .step = 1};
        struct ht_keep w = {.k = &k};
        struct ht_tx *tx;
        ck_assert_int_eq(ht_tx_begin(s, 0, &tx), 0);
        ck_assert_int_eq(ht_keep_make(&w), 0);
        ht_keep_drop(&w);
        ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
        ck_assert_uint_eq(stats().log.reserved_bytes, before);
    }
}

/* A commit that comes to the first object before a change, and to the last after it, has both or neither. */
static struct ht_obj *pair[2];

static void put_number(struct ht_obj *o, uint64_t n)
{
    uint64_t block[BLOCK / 8] = {n};

    if (ht_obj_write(o, 0, block, BLOCK) != BLOCK || ht_obj_writeback(o))
        abort();
}

static void *count_up(void *arg)
{
    for (uint64_t n = 1; !stop; n++, changes++) {
        put_number(pair[0], n); /* the commit comes to this one first */
        put_number(pair[1], n); /* and to this one last */
    }
    return arg;
}

TEST_LOOP(a_commit_has_all_objects_as_at_one_moment, unless_many(20))
{
    uint64_t oid[2], got[2], block[BLOCK / 8];
    pthread_t writer;

    pair[0] = object(CHUNK, SCOPE);
    put_number(pair[0], 0);
    make_many();
    write_many(1);
    pair[1] = object(CHUNK, SCOPE);
    put_number(pair[1], 0);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    oid[0] = ht_obj_id(pair[0]), oid[1] = ht_obj_id(pair[1]);
    ck_assert_int_eq(pthread_create(&writer, NULL, count_up, NULL), 0);
    while (changes < 100)
        sched_yield();
    publish_scope(SCOPE);
    stop = true;
    pthread_join(writer, NULL);
    for (size_t i = 0; i < many_count; i++)
        put_object(files[i]);
    many_count = 0;
    close_store(); /* a crash */
    open_store();
    for (int i = 0; i < 2; i++) {
        struct ht_obj *o = get_object(oid[i]);
        ck_assert_int_eq(ht_obj_read(o, 0, block, BLOCK), BLOCK);
        got[i] = block[0];
        put_object(o);
    }
    ck_assert(got[0] == got[1] || got[0] == got[1] + 1);
}

RUN_TESTS("slices", .setup = setup, .teardown = done, .timeout_s = 600)
