/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_readahead.c - reading ahead of a sequential reader: the reader finds its bytes, others pay nothing, and it is
 * counted.
 */
#include <sched.h>

#include "tiering/io/gate.h"
#include "tests/unit/tiering/store/fixture.h"

enum { SMALL = 1 << 16, TENSOR = 1 << 20, PASSES = 6 };

static uint8_t *want;
static struct ht_obj_reader reader;
static uint8_t buf[MIB];

static void compare(void *ctx, const void *bytes, size_t len)
{
    const uint64_t *off = ctx;

    ck_assert_int_eq(memcmp(bytes, want + *off, len), 0);
}

static void read_at(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, size_t len)
{
    uint8_t *mine = malloc(len);

    ck_assert_int_eq(ht_obj_read_in_place(o, r, off, mine, len, compare, &off), (ssize_t)len);
    free(mine);
}

/* An object of so many bytes, on the device alone. */
static struct ht_obj *cold(uint32_t chunk_bytes, size_t bytes)
{
    struct ht_obj *o = object(chunk_bytes, 0);

    put_all(o, 0, want, bytes);
    sync_and_evict(o);
    ck_assert_uint_eq(obj_stat(o).resident_bytes, 0);
    return o;
}

/* Makes a new store with the content to read. */
static struct ht_obj *begin(uint32_t chunk_bytes, size_t bytes)
{
    want = pattern(bytes, 1);
    fresh(64, false);
    reader = (struct ht_obj_reader){0};
    return cold(chunk_bytes, bytes);
}

static void end(void)
{
    ht_obj_reader_end(&reader);
    fixture_end();
}

/* As its thread would, were it quick. */
static void read_and_feed(struct ht_obj *o, uint64_t off, size_t len)
{
    read_at(o, &reader, off, len);
    ht_store_readahead(s);
}

static void read_all(struct ht_obj *o, uint64_t bytes, size_t step)
{
    for (uint64_t off = 0; off < bytes; off += step)
        read_and_feed(o, off, step);
}

TEST(a_stream_misses_once)
{
    struct ht_obj *o = begin(SMALL, 2 * MIB);

    read_all(o, 2 * MIB, SMALL / 2);
    ck_assert_uint_eq(obj_stat(o).misses, 1);
    ck_assert_uint_eq(obj_stat(o).device_read_bytes, 2 * MIB); /* nothing twice */
    struct ht_store_stats st = stats();
    ck_assert_uint_eq(st.readahead_chunks, 31);
    ck_assert_uint_eq(st.readahead_hits, 31);
    ck_assert_uint_eq(st.readahead_wasted, 0);
}

TEST(a_stream_downwards_misses_little)
{
    struct ht_obj *o = begin(SMALL, 4 * MIB);

    for (uint64_t off = 4 * MIB; off; off -= SMALL / 2)
        read_and_feed(o, off - SMALL / 2, SMALL / 2);
    ck_assert_uint_eq(obj_stat(o).misses, 2);
    ck_assert_uint_eq(obj_stat(o).device_read_bytes, 4 * MIB); /* nothing twice */
    struct ht_store_stats st = stats();
    ck_assert_uint_eq(st.readahead_chunks, 62);
    ck_assert_uint_eq(st.readahead_hits, 62);
    ck_assert_uint_eq(st.readahead_wasted, 0);
}

/* As a file of saved tensors is read: each whole, in descending order. */
TEST(blocks_in_descending_order_miss_little)
{
    enum { BLOCK = 8 * SMALL };
    struct ht_obj *o = begin(SMALL, 8 * MIB);

    for (uint64_t block = 8 * MIB; block; block -= BLOCK)
        for (uint64_t off = block - BLOCK; off < block; off += SMALL)
            read_and_feed(o, off, SMALL);
    ck_assert_uint_le(obj_stat(o).misses, 24);
    ck_assert_uint_eq(obj_stat(o).device_read_bytes, 8 * MIB);
    ck_assert_uint_eq(stats().readahead_wasted, 0);
}

/* Up, down, and up again with one descriptor; at each turn the chunks that were read are evicted. */
TEST(a_reader_that_turns_finds_its_bytes)
{
    struct ht_obj *o = begin(SMALL, 4 * MIB);
    uint64_t misses = 0;

    for (unsigned turn = 0; turn < 6; turn++) {
        ht_obj_evict(o);
        for (uint64_t off = 0; off < 4 * MIB; off += SMALL)
            read_and_feed(o, turn & 1 ? 4 * MIB - SMALL - off : off, SMALL);
        ck_assert_uint_le(obj_stat(o).misses - misses, 16);
        misses = obj_stat(o).misses;
    }
}

/* Other requests have nearly all that the gate gives: one chunk after the other, until no reader is pending. */
TEST(a_nearly_full_gate_feeds_all_readers)
{
    struct ht_obj *o = begin(SMALL, 4 * MIB);
    const struct ht_permit_request r = {.dev = dev, .direction = HT_DIRECTION_READ, .bytes = SMALL};
    struct ht_permit permit[1024];
    unsigned n = 0;

    read_at(o, &reader, 0, SMALL);
    (void)ht_io_class_set(HT_IO_PLANNED);
    while (n < HT_ARRAY_SIZE(permit) && ht_permit_try(&s->gate, &r, &permit[n]))
        n++;
    if (n > 0)
        ht_permit_put(&permit[--n]);
    ht_store_readahead(s);
    (void)ht_io_class_set(HT_IO_URGENT);
    while (n > 0)
        ht_permit_put(&permit[--n]);
    ck_assert_uint_gt(stats().readahead_chunks, 1);
}

TEST(who_reads_anywhere_has_nothing_read_ahead)
{
    struct ht_obj *o = begin(SMALL, 4 * MIB);

    for (unsigned i = 1; i < 60; i++)
        read_and_feed(o, i * 37 % 64 * (uint64_t)SMALL, 4096);
    ck_assert_uint_eq(stats().readahead_chunks, 0);
}

TEST(a_read_elsewhere_takes_back_what_was_asked_for)
{
    struct ht_obj *o = begin(SMALL, 4 * MIB);

    read_at(o, &reader, 0, SMALL);
    read_and_feed(o, 40 * SMALL, 4096);
    ck_assert_uint_eq(stats().readahead_chunks, 0);
    read_at(o, &reader, 0, SMALL);
    ht_obj_reader_end(&reader);
    ht_store_readahead(s);
    ck_assert_uint_eq(stats().readahead_chunks, 0);
}

/* A state file that a program has open may get another object, and the space of the former one comes back. */
TEST(an_idle_reader_keeps_no_object)
{
    struct ht_obj *o = begin(SMALL, 4 * MIB);

    read_at(o, &reader, 0, SMALL);
    read_at(o, &reader, SMALL, SMALL);
    ck_assert_uint_eq(obj_stat(o).refs, 2); /* there is something to read ahead */
    ht_store_readahead(s);
    ck_assert_uint_eq(obj_stat(o).refs, 1);
    read_and_feed(o, 2 * SMALL, SMALL);
    ck_assert_uint_eq(stats().readahead_hits, 1);
}

TEST(what_is_read_ahead_and_not_used_is_waste)
{
    struct ht_obj *o = begin(SMALL, 4 * MIB);

    read_and_feed(o, 0, SMALL);
    ck_assert_uint_eq(stats().readahead_chunks, 2);
    ht_obj_evict(o);
    ck_assert_uint_eq(stats().readahead_wasted, 2);
}

/* One descriptor reads the same data again, as training does. */
TEST(who_begins_again_is_read_ahead_of_again)
{
    struct ht_obj *o = begin(SMALL, 2 * MIB);

    for (unsigned pass = 1; pass <= 3; pass++) {
        ht_obj_evict(o);
        read_all(o, 2 * MIB, SMALL);
        ck_assert_uint_eq(obj_stat(o).misses, pass);
    }
}

/* Chunks that no reader used take no room from others while there is enough. */
TEST(those_who_read_only_the_beginning_leave_others_room)
{
    struct ht_obj *head[20];
    struct ht_obj *o = begin(SMALL, 2 * MIB);

    for (unsigned i = 0; i < HT_ARRAY_SIZE(head); i++) {
        head[i] = cold(SMALL, MIB / 4);
        read_and_feed(head[i], 0, SMALL);
        ht_obj_reader_end(&reader);
        reader = (struct ht_obj_reader){0};
    }
    ck_assert_uint_ge(stats().readahead_chunks, 32);
    read_all(o, 2 * MIB, SMALL);
    ck_assert_uint_eq(obj_stat(o).misses, 1);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(head); i++)
        put_object(head[i]);
}

/* Dirty chunks stay, and are not written to make room. */
TEST(it_takes_no_room_from_what_is_dirty)
{
    struct ht_obj *o = begin(TENSOR, 4 * MIB), *dirty = object(TENSOR, 0);
    uint8_t *p = pattern(7 * MIB, 5);

    put_all(dirty, 0, p, 7 * MIB);
    uint64_t written = stats().device_written_bytes;
    read_all(o, 4 * MIB, MIB / 4);
    ck_assert_uint_eq(stats().device_written_bytes, written);
    ck_assert_uint_eq(obj_stat(dirty).dirty_bytes, 7 * MIB);
    ck_assert_uint_eq(obj_stat(o).device_read_bytes, 4 * MIB);
    expect(dirty, 0, p, 7 * MIB);
}

/* The reader gets the error. */
TEST(what_cannot_be_read_ahead_is_the_readers_error)
{
    struct ht_obj *o = begin(SMALL, MIB);

    read_at(o, &reader, 0, SMALL);
    dev_fail(dev, HT_IO_READ, 1, true);
    ht_store_readahead(s);
    ck_assert_uint_eq(stats().read_errors, 0);
    uint64_t off = SMALL;
    ck_assert_int_eq(ht_obj_read_in_place(o, &reader, off, buf, SMALL, compare, &off), -EIO);
    ck_assert_uint_eq(stats().read_errors, 1);
    dev_fail(dev, HT_IO_READ, 0, false);
    read_at(o, &reader, SMALL, SMALL);
}

TEST(a_prefetch_reads_all_of_it_at_once)
{
    struct ht_obj *o = begin(TENSOR, 4 * MIB + 5000);

    ck_assert_int_eq(ht_obj_prefetch(o), 0);
    uint64_t misses = obj_stat(o).misses;
    expect(o, 0, want, 4 * MIB + 5000);
    ck_assert_uint_eq(obj_stat(o).misses, misses);
    ht_obj_evict(o);
    dev_fail(dev, HT_IO_READ, 3, false);
    ck_assert_int_eq(ht_obj_prefetch(o), -EIO);
    ck_assert_uint_eq(stats().read_errors, 1);
    expect(o, 0, want, 4 * MIB + 5000);
}

/* Reads all of an object. Returns how many MiB the device gave. */
static unsigned read_again(struct ht_obj *o, size_t bytes)
{
    uint64_t before = stats().device_read_bytes;

    expect(o, 0, want, bytes);
    return (unsigned)((stats().device_read_bytes - before) / MIB);
}

/*
 * Memory is full of content that was read once. At most half of that goes, and the file's first part stays. The chunks
 * of the file are as large as what goes, or smaller.
 */
TEST_LOOP(a_prefetch_takes_the_place_of_content_that_was_used_before, 2)
{
    struct ht_obj *large = begin(_i ? SMALL : TENSOR, 16 * MIB), *others[3];
    uint64_t resident = 0;

    for (unsigned i = 0; i < 3; i++)
        others[i] = cold(TENSOR, 4 * MIB);
    ck_assert_uint_eq(read_again(others[0], 4 * MIB) + read_again(others[1], 4 * MIB), 8);
    ck_assert_int_eq(ht_obj_prefetch(others[2]), 0);
    ck_assert_uint_eq(obj_stat(others[2]).resident_bytes, 4 * MIB);
    ck_assert_uint_eq(read_again(others[2], 4 * MIB), 0);
    for (unsigned i = 0; i < 3; i++)
        resident += obj_stat(others[i]).resident_bytes;
    ck_assert_int_eq(ht_obj_prefetch(large), 0);
    uint64_t came = obj_stat(large).resident_bytes;
    ck_assert_uint_ge(came, MIB);
    ck_assert_uint_le(came, 4 * MIB);
    for (unsigned i = 0; i < 3; i++)
        resident -= obj_stat(others[i]).resident_bytes;
    ck_assert_uint_eq(resident, came);
    ck_assert_uint_eq(read_again(large, came), 0);
    for (unsigned i = 0; i < 3; i++)
        put_object(others[i]);
}

TEST(a_prefetch_evicts_nothing_that_is_newer_than_on_the_device)
{
    struct ht_obj *o = begin(TENSOR, 16 * MIB), *dirty = object(TENSOR, 0);

    put_all(dirty, 0, want, 3 * MIB);
    uint64_t before = stats().device_written_bytes;
    for (unsigned i = 0; i < 4; i++)
        ck_assert_int_eq(ht_obj_prefetch(o), 0);
    ck_assert_uint_eq(obj_stat(o).resident_bytes, 5 * MIB);
    ck_assert_uint_eq(stats().device_written_bytes, before);
    ck_assert_uint_eq(obj_stat(dirty).resident_bytes, 3 * MIB);
    expect(dirty, 0, want, 3 * MIB);
}

struct client {
    struct ht_obj *o;
    uint64_t bytes;
    pthread_t thread;
};

static void *stream(void *arg)
{
    const struct client *c = arg;

    for (unsigned n = 0; n < PASSES; n++) {
        struct ht_obj_reader r = {0};
        for (uint64_t off = 0; off < c->bytes; off += SMALL)
            read_at(c->o, &r, off, SMALL);
        ht_obj_reader_end(&r);
    }
    return NULL;
}

static void *spoil(void *arg)
{
    const struct client *c = arg;

    for (unsigned n = 0; n < 40 * PASSES; n++) {
        uint64_t off = n * 7 % (c->bytes / SMALL) * SMALL;
        ht_obj_evict(c->o);
        put_all(c->o, off, want + off, SMALL);
        if (n % 8 == 0)
            ck_assert_int_eq(ht_obj_sync(c->o), 0);
    }
    return NULL;
}

struct misser {
    struct ht_obj *o;
    struct ht_obj_reader *r;
    uint64_t off;
    pthread_t thread;
};

static void *miss(void *arg)
{
    const struct misser *m = arg;

    read_at(m->o, m->r, m->off, SMALL);
    return NULL;
}

/* Two reads wait for the device: those of two readers, or of one, which keeps it less busy. */
TEST_LOOP(a_device_that_several_wait_for_is_given_nothing_more, 2)
{
    struct misser m[2];
    struct ht_obj_reader one = {0};
    struct ht_obj *o = begin(SMALL, MIB), *other = cold(SMALL, 2 * SMALL);

    read_at(o, NULL, 0, SMALL);
    uint64_t before = stats().misses;
    dev_stall(dev, true);
    for (unsigned i = 0; i < 2; i++) {
        m[i] = (struct misser){.o = other, .r = _i ? &one : NULL, .off = i * SMALL};
        ck_assert_int_eq(pthread_create(&m[i].thread, NULL, miss, &m[i]), 0);
    }
    while (stats().misses < before + 2)
        sched_yield();
    read_at(o, &reader, 0, SMALL);
    dev_stall(dev, false);
    for (unsigned i = 0; i < 2; i++)
        pthread_join(m[i].thread, NULL);
    ht_store_readahead(s);
    ck_assert_int_eq(stats().readahead_chunks > 0, _i);
    read_and_feed(o, 0, SMALL);
    ck_assert_uint_gt(stats().readahead_chunks, 0);
    ht_obj_reader_end(&one);
}

/* With its thread, in a tier that holds a part of the data, beside threads that write and evict. */
TEST(streams_beside_each_other_read_what_was_written)
{
    struct client c[5];

    want = pattern(6 * MIB, 8);
    fresh(128, true);
    for (unsigned i = 0; i < 4; i++)
        c[i] = (struct client){.o = cold(i % 2 ? SMALL : TENSOR, 6 * MIB), .bytes = 6 * MIB};
    c[4] = c[0];
    do {
        for (unsigned i = 0; i < 5; i++)
            ck_assert_int_eq(pthread_create(&c[i].thread, NULL, i < 4 ? stream : spoil, &c[i]), 0);
        for (unsigned i = 0; i < 5; i++)
            pthread_join(c[i].thread, NULL);
    } while (stats().readahead_hits == 0); /* the thread that reads ahead had no turn: the machine is busy */
    for (unsigned i = 0; i < 4; i++)
        put_object(c[i].o);
    done();
}

RUN_TESTS("readahead", .teardown = end, .timeout_s = 60)
