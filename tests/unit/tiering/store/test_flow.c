/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_flow.c - writers go on while there is room, whatever the device does, and then wait for
 * no more than the next image.
 */
#include <sched.h>

#include "tiering/cache/arena.h"
#include "tiering/object/chunk.h"

#include "tests/unit/tiering/store/fixture.h"

enum { SMALL = 1 << 16, BUDGET = 8 * MIB, PASSES = 8 };

static uint8_t *want;

struct writer {
    struct ht_obj *o;
    uint64_t from, bytes, piece;
    pthread_t thread;
    _Atomic uint64_t written;
};

static void *write_all(void *arg)
{
    struct writer *w = arg;

    for (uint64_t off = w->from; off < w->bytes; off += w->piece) {
        put_all(w->o, off, want + off % BUDGET, w->piece);
        w->written = off + w->piece;
    }
    return NULL;
}

static void start(struct writer *w)
{
    ck_assert_int_eq(pthread_create(&w->thread, NULL, write_all, w), 0);
}

static void compare(const struct writer *w)
{
    for (uint64_t off = 0; off < w->bytes; off += MIB)
        expect(w->o, off, want + off % BUDGET, MIB);
}

/* The device does not answer during the test: a writer that waited for it would never return. */
static void a_budget_is_written_beside_a_device_that_stands_still(uint32_t chunk_bytes)
{
    want = pattern(BUDGET, 1);
    fresh(64, true);
    struct writer w = {.o = object(chunk_bytes, 0), .bytes = BUDGET, .piece = SMALL};
    dev_stall(dev, true);
    (void)write_all(&w);
    ck_assert_uint_eq(stats().room_waits, 0);
    w.from = BUDGET;
    w.bytes = BUDGET + MIB;
    start(&w); /* there is no room for it */
    while (stats().room_waits == 0)
        sched_yield();
    ck_assert_uint_lt(w.written, w.bytes);
    dev_stall(dev, false);
    pthread_join(w.thread, NULL);
    ck_assert_uint_eq(w.written, w.bytes);
    compare(&w);
    done();
}

TEST(writers_go_on_while_there_is_room)
{
    a_budget_is_written_beside_a_device_that_stands_still(HT_CHUNK_BYTES);
}

TEST(writers_of_small_chunks_go_on_too)
{
    a_budget_is_written_beside_a_device_that_stands_still(SMALL);
}

/* Nothing is written twice, and a tensor's chunks whole, however small the writes. */
TEST(a_stream_of_small_writes_reaches_the_device_in_whole_chunks)
{
    want = pattern(BUDGET, 2);
    fresh(128, true);
    struct writer w = {.o = object(HT_CHUNK_BYTES, 0), .bytes = 6 * BUDGET, .piece = 4096};
    (void)write_all(&w);
    ck_assert_int_eq(ht_obj_sync(w.o), 0);
    uint64_t bytes = obj_stat(w.o).device_written_bytes, chunks = stats().writebacks;
    ck_assert_uint_le(bytes, w.bytes + w.bytes / 8);
    ck_assert_uint_ge(bytes / chunks, MIB * 7 / 8);
    compare(&w);
}

/* Many more writers than there is room for; all wait now and then. */
TEST(many_writers_share_what_comes_free)
{
    enum { WRITERS = 16 };
    static struct writer w[WRITERS];

    want = pattern(BUDGET, 3);
    fresh(256, true);
    for (unsigned i = 0; i < WRITERS; i++) {
        w[i] = (struct writer){
            .o = object(i % 4 ? HT_CHUNK_BYTES : SMALL, 0), .bytes = (uint64_t)PASSES * MIB, .piece = SMALL / 2};
        start(&w[i]);
    }
    for (unsigned i = 0; i < WRITERS; i++)
        pthread_join(w[i].thread, NULL);
    ck_assert_uint_gt(stats().room_waits, 0);
    for (unsigned i = 0; i < WRITERS; i++) {
        compare(&w[i]);
        put_object(w[i].o);
    }
}

/*
 * No writer fills these chunks any more, and no other writes come: more than half of the tier must not stay dirty for
 * ever.
 */
TEST(what_was_begun_and_left_is_written_too)
{
    enum { FILES = 5 };
    struct ht_obj *o[FILES];
    uint64_t dirty = BUDGET;

    want = pattern(BUDGET, 5);
    fresh(64, true);
    for (unsigned i = 0; i < FILES; i++)
        o[i] = object(HT_CHUNK_BYTES, 0);
    for (unsigned k = 0; k < 4 * FILES; k++)
        put_all(o[k % FILES], k / FILES * SMALL, want + k / FILES * SMALL, SMALL);
    while (dirty > BUDGET / 2) {
        dirty = 0;
        for (unsigned i = 0; i < FILES; i++)
            dirty += obj_stat(o[i]).dirty_bytes;
        sched_yield();
    }
    for (unsigned i = 0; i < FILES; i++) {
        expect(o[i], 0, want, 4 * SMALL);
        put_object(o[i]);
    }
}

/* Scratch data alone is no reason to write, until a thread searches for room in vain. */
TEST(a_reader_that_finds_no_room_has_writeback_make_more)
{
    want = pattern(BUDGET, 6);
    fresh(64, true);
    struct ht_obj *stored = object(HT_CHUNK_BYTES, 0), *scratch;
    struct ht_obj_attr attr = {.oid = ht_store_new_id(s), .chunk_bytes = HT_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH};
    put_all(stored, 0, want, MIB);
    sync_and_evict(stored);
    ck_assert_int_eq(ht_obj_create(s, &attr, &scratch), 0);
    put_all(scratch, 0, want, BUDGET);
    usleep(100000); /* the row sleeps */
    ck_assert_uint_eq(obj_stat(scratch).dirty_bytes, BUDGET);
    expect(stored, 0, want, MIB);
    while (obj_stat(scratch).dirty_bytes > BUDGET / 2)
        sched_yield();
    expect(scratch, 0, want, BUDGET);
    delete (scratch);
}

static void *read_one(void *o)
{
    expect(o, 0, want, MIB);
    return NULL;
}

static unsigned waiting(const unsigned *count)
{
    ht_store_lock(s);
    unsigned n = *count;
    ht_store_unlock(s);
    return n;
}

static bool has_image(struct ht_obj *o)
{
    ht_store_lock(s);
    const struct ht_chunk *c = ht_chunk_find(o, 0);
    bool has = c && c->slot != HT_SLOT_NONE;
    ht_store_unlock(s);
    return has;
}

static void hold(struct ht_obj *o, uint64_t chunks, bool holds)
{
    ht_store_lock(s);
    for (uint64_t i = 0; i < chunks; i++)
        if (holds)
            ht_chunk_lock_shared(s, ht_chunk_find(o, i));
        else
            ht_chunk_unlock_shared(o, ht_chunk_find(o, i), i);
    ht_store_unlock(s);
}

/* All images are held. A writer waits for one, then a reader does, and then one comes free. */
TEST(a_reader_gets_the_first_image_that_comes_free)
{
    want = pattern(BUDGET, 7);
    fresh(64, true);
    struct ht_obj *held = object(HT_CHUNK_BYTES, 0), *one = object(HT_CHUNK_BYTES, 0),
                  *read = object(HT_CHUNK_BYTES, 0);
    struct writer w = {.o = object(HT_CHUNK_BYTES, 0), .bytes = MIB, .piece = MIB};
    pthread_t reader;

    put_all(read, 0, want, MIB);
    sync_and_evict(read);
    put_all(held, 0, want, BUDGET - MIB);
    put_all(one, 0, want, MIB);
    ck_assert_int_eq(ht_obj_sync(held), 0);
    ck_assert_int_eq(ht_obj_sync(one), 0);
    hold(held, BUDGET / MIB - 1, true);
    hold(one, 1, true);
    ht_store_lock(s);
    s->waits.patience_ns = UINT64_MAX; /* a busy machine may start the reader late */
    ht_store_unlock(s);
    start(&w);
    while (waiting(&s->waits.slot_waiters) == 0)
        sched_yield();
    ck_assert_int_eq(pthread_create(&reader, NULL, read_one, read), 0);
    for (bool both = false; !both;) {
        ht_store_lock(s);
        both = s->waits.slot_readers == 1 && s->waits.slot_waiters == 2;
        if (both) {
            dev_stall(dev, true);
            ht_chunk_unlock_shared(one, ht_chunk_find(one, 0), 0);
        }
        ht_store_unlock(s);
    }
    while (!has_image(read) && !w.written)
        sched_yield();
    ck_assert_uint_eq(w.written, 0);
    dev_stall(dev, false);
    hold(held, BUDGET / MIB - 1, false);
    pthread_join(reader, NULL);
    pthread_join(w.thread, NULL);
    compare(&w);
}

/* All whole images are held, and a slot of small ones has room that the reader cannot use. */
TEST(a_small_writer_needs_not_wait_for_a_reader_of_a_whole_image)
{
    pthread_t reader;

    want = pattern(BUDGET, 10);
    fresh(64, true);
    struct ht_obj *held = object(HT_CHUNK_BYTES, 0), *small = object(SMALL, 0), *read = object(HT_CHUNK_BYTES, 0);
    put_all(read, 0, want, MIB);
    sync_and_evict(read);
    put_all(small, 0, want, SMALL);
    put_all(held, 0, want, BUDGET - MIB);
    ck_assert_int_eq(ht_obj_sync(small), 0);
    ck_assert_int_eq(ht_obj_sync(held), 0);
    hold(held, BUDGET / MIB - 1, true);
    hold(small, 1, true);
    ht_store_lock(s);
    s->waits.patience_ns = UINT64_MAX;
    ht_store_unlock(s);
    ck_assert_int_eq(pthread_create(&reader, NULL, read_one, read), 0);
    while (waiting(&s->waits.slot_readers) == 0)
        sched_yield();
    uint64_t waits = stats().room_waits;
    struct writer w = {.o = small, .from = SMALL, .bytes = MIB, .piece = SMALL};
    (void)write_all(&w);
    ck_assert_uint_eq(stats().room_waits, waits);
    ck_assert(!has_image(read));
    hold(held, BUDGET / MIB - 1, false);
    hold(small, 1, false);
    pthread_join(reader, NULL);
    expect(small, SMALL, want + SMALL, MIB - SMALL);
}

/* Writers have changed all images that they get, and the device stands still: a reader has one at once. */
TEST(a_reader_needs_not_wait_for_what_writers_changed)
{
    pthread_t reader;

    want = pattern(BUDGET, 9);
    fixture_dram_bytes = 32 * MIB;
    fresh(128, true);
    struct ht_obj *read = object(HT_CHUNK_BYTES, 0);
    struct writer w = {.o = object(HT_CHUNK_BYTES, 0), .bytes = fixture_dram_bytes + MIB, .piece = SMALL};
    put_all(read, 0, want, MIB);
    sync_and_evict(read);
    dev_stall(dev, true);
    start(&w);
    while (stats().room_waits == 0)
        sched_yield();
    ck_assert_int_eq(pthread_create(&reader, NULL, read_one, read), 0);
    while (!has_image(read) && stats().room_waits == 1)
        sched_yield();
    ck_assert(has_image(read));
    dev_stall(dev, false);
    pthread_join(reader, NULL);
    pthread_join(w.thread, NULL);
    compare(&w);
    done();
    fixture_dram_bytes = 8 * MIB;
}

/* Passes over more than fits: a part joins the working set. Changes that part. Returns how many images. */
static unsigned change_workingset(struct ht_obj *o, unsigned chunks)
{
    unsigned changed = 0;

    for (unsigned pass = 0; pass < 4; pass++)
        for (unsigned i = 0; i < chunks; i++)
            expect(o, (uint64_t)i * MIB, want + i * (uint64_t)MIB % BUDGET, MIB);
    for (unsigned i = 0; i < chunks; i++) {
        ht_store_lock(s);
        const struct ht_chunk *c = ht_chunk_find(o, i);
        bool is = c->slot != HT_SLOT_NONE && ht_arena_image(s->arena, c->slot)->workingset;
        ht_store_unlock(s);
        if (is)
            put_all(o, (uint64_t)i * MIB, want + i * (uint64_t)MIB % BUDGET, MIB);
        changed += is;
    }
    return changed;
}

static void *sync_one(void *o)
{
    ck_assert_int_eq(ht_obj_sync(o), 0);
    return NULL;
}

/*
 * The device writes changed images of the working set, which stay when they are clean, and stands still after two.
 * All others are dirty.
 */
TEST(a_reader_takes_an_image_of_the_working_set_if_no_other_comes)
{
    enum { CHUNKS = 24 };
    pthread_t reader, syncer;

    want = pattern(BUDGET, 8);
    fresh(64, false);
    struct ht_obj *read = object(HT_CHUNK_BYTES, 0), *set = object(HT_CHUNK_BYTES, 0),
                  *others = object(HT_CHUNK_BYTES, 0);
    put_all(read, 0, want, MIB);
    sync_and_evict(read);
    for (unsigned i = 0; i < CHUNKS; i++)
        put_all(set, (uint64_t)i * MIB, want + i * (uint64_t)MIB % BUDGET, MIB);
    ck_assert_int_eq(ht_obj_sync(set), 0);
    unsigned changed = change_workingset(set, CHUNKS);
    ck_assert_uint_ge(changed, 4);
    put_all(others, 0, want, BUDGET - (uint64_t)changed * MIB);
    dev_stall_at(dev, HT_IO_WRITE, 3);
    ck_assert_int_eq(pthread_create(&syncer, NULL, sync_one, set), 0);
    dev_wait_stalled(dev);
    ck_assert_int_eq(pthread_create(&reader, NULL, read_one, read), 0);
    while (!has_image(read))
        sched_yield();
    dev_stall(dev, false);
    pthread_join(reader, NULL);
    pthread_join(syncer, NULL);
}

/* A writer that cleans images under pressure reaches one of these while it waits for the device. */
TEST(what_is_deleted_may_be_let_go_of_beside_writing)
{
    enum { IN_FLIGHT = 16 };

    want = pattern(BUDGET, 4);
    fresh(64, true);
    struct ht_obj *before = object(SMALL, 0), *gone = object(SMALL, 0), *after = object(SMALL, 0);
    put_all(before, 0, want, IN_FLIGHT * SMALL);
    put_all(gone, 0, want, SMALL);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
    ht_obj_delete(gone, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    dev_stall(dev, true);
    put_all(after, 0, want, BUDGET - 17 * SMALL);
    while (obj_stat(before).dirty_bytes)
        sched_yield();
    for (unsigned i = 0; i < 1000; i++)
        sched_yield();
    put_object(gone);
    dev_stall(dev, false);
    expect(after, 0, want, BUDGET - 17 * SMALL);
}

RUN_TESTS("flow", .teardown = fixture_end, .timeout_s = 60)
