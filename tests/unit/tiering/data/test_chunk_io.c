/* SPDX-License-Identifier: Apache-2.0 */
/* test_chunk_io.c - moves a chunk's bytes to a device and back, and fails in each possible way. */
#include "tests/unit/tiering/data/fixture.h"
#include "tiering/base/event.h"
#include "tiering/object/owners.h"
#include "tiering/data/data_priv.h"

enum { BYTES = 100000 };

static uint8_t *data, *buf;
static struct ht_chunk_io io;
static struct ht_event seen;
static unsigned events;

static void note_event(void *ctx, const struct ht_event *e)
{
    seen = *e;
    events++;
}

static void start(void)
{
    setup();
    data = bytes_of(1, BYTES);
    buf = bytes_of(2, BYTES);
    io = (struct ht_chunk_io){.obj = obj, .chunk = chunk};
    events = 0;
    ht_event_set_sink(note_event, NULL);
}

static void end(void)
{
    ht_event_set_sink(NULL, NULL);
    free(data);
    free(buf);
    teardown();
}

static int write_bytes(int device)
{
    ht_chunk_write_prepare(&io, data, BYTES, HT_CODEC_RAW, BYTES);
    ht_store_lock(s);
    int rc = ht_chunk_write_place(&io, (struct ht_alloc_hint){.device = device});
    if (rc) {
        ht_store_unlock(s);
        return rc;
    }
    ht_chunk_write_start(&io, ring);
    ht_chunk_write_wait(&io, ring);
    ht_store_lock(s);
    rc = ht_chunk_write_finish(&io, ring);
    ht_store_unlock(s);
    return rc;
}

static void corrupt(const struct ht_ref *ref)
{
    struct ht_extent e = ht_ref_extent(ref, 0);
    uint8_t block[HT_BLOCK_BYTES] = {1, 2, 3};

    ck_assert_int_eq(ht_dev_write(s->dev[e.device], e.block * HT_BLOCK_BYTES, block, sizeof(block)), 0);
}

TEST(bytes_come_back)
{
    ck_assert_int_eq(write_bytes(-1), 0);
    ck_assert(chunk->flags & HT_CH_CUR);
    ck_assert_uint_eq(chunk->cur.stored, BYTES);
    ck_assert_uint_eq(obj->written_blocks, ht_ref_blocks(&chunk->cur));
    ck_assert(ht_ref_matches(s, &chunk->cur, data));
    ck_assert_int_eq(ht_chunk_read(obj, 0, &chunk->cur, buf), 0);
    ck_assert_int_eq(memcmp(buf, data, ht_round_up(BYTES, HT_BLOCK_BYTES)), 0);
    ck_assert_uint_eq(events, 0);
}

TEST(writes_with_and_without_a_wish_bring_shares_up_to_date)
{
    for (int device = -1; device < 2; device++) {
        s->data->weights.begun = false;
        ck_assert_int_eq(write_bytes(device), 0);
        ck_assert_msg(s->data->weights.begun, "device %d", device);
    }
}

TEST(bytes_are_padded_with_zeros)
{
    memset(data, 0xee, ht_round_up(BYTES, HT_BLOCK_BYTES));
    ck_assert_int_eq(write_bytes(-1), 0);
    ck_assert_int_eq(ht_chunk_read(obj, 0, &chunk->cur, buf), 0);
    for (uint32_t i = 0; i < ht_round_up(BYTES, HT_BLOCK_BYTES); i++)
        ck_assert_uint_eq(buf[i], i < BYTES ? 0xee : 0);
}

TEST(a_cancelled_write_leaves_nothing)
{
    uint64_t available = ht_alloc_available(s->alloc);

    ht_chunk_write_prepare(&io, data, BYTES, HT_CODEC_RAW, BYTES);
    ht_store_lock(s);
    ck_assert_int_eq(ht_chunk_write_place(&io, HT_ALLOC_HINT_NONE), 0);
    ck_assert_uint_eq(ht_alloc_available(s->alloc), available - ht_ref_blocks(&io.ref));
    ck_assert_uint_eq(obj->stored_blocks, ht_ref_blocks(&io.ref));
    ht_chunk_write_cancel(&io);
    ck_assert(!ht_ref_holds(&io.ref));
    ck_assert_uint_eq(obj->stored_blocks, 0);
    ck_assert_uint_eq(ht_alloc_available(s->alloc), available);
    ht_store_unlock(s);
}

TEST(without_space_a_write_has_no_reference)
{
    ht_store_lock(s);
    uint64_t all = ht_alloc_available(s->alloc);
    ck_assert_int_eq(ht_alloc_reserve(s->alloc, all), 0);
    ht_store_unlock(s);
    ck_assert_int_eq(write_bytes(-1), -ENOSPC);
    ck_assert(!ht_ref_holds(&io.ref));
    ck_assert_uint_eq(obj->stored_blocks, 0);
    ht_store_lock(s);
    ht_alloc_unreserve(s->alloc, all);
    ht_store_unlock(s);
}

/* As relocation does. */
TEST(without_a_chunk_the_caller_gets_the_reference)
{
    io.chunk = NULL;
    ck_assert_int_eq(write_bytes(1), 0);
    ck_assert(!(chunk->flags & HT_CH_CUR));
    ck_assert_uint_eq(obj->stored_blocks, 0);
    ck_assert_int_eq(ht_chunk_read(obj, 0, &io.ref, buf), 0);
    ck_assert_int_eq(memcmp(buf, data, BYTES), 0);
    ht_store_lock(s);
    ht_chunk_write_cancel(&io);
    ht_store_unlock(s);
}

TEST(without_a_chunk_no_other_place_is_tried)
{
    uint64_t available = ht_alloc_available(s->alloc);

    io.chunk = NULL;
    dev_fail(s->dev[1], HT_IO_WRITE, 1, false);
    ck_assert_int_eq(write_bytes(1), -EIO);
    ck_assert(!ht_ref_holds(&io.ref));
    ck_assert_uint_eq(ht_alloc_available(s->alloc), available);
    ck_assert_uint_eq(events, 0);
}

TEST(wrong_bytes_are_an_error_that_is_counted_and_reported)
{
    ck_assert_int_eq(write_bytes(-1), 0);
    corrupt(&chunk->cur);
    ck_assert_int_eq(ht_chunk_read(obj, 0, &chunk->cur, buf), -EIO);
    ck_assert_uint_eq(s->counts.checksum_errors, 1);
    ck_assert_uint_eq(s->counts.read_errors, 0);
    ck_assert_uint_eq(events, 1);
    ck_assert_int_eq(seen.code, HT_EVENT_CHECKSUM);
    ck_assert_uint_eq(seen.offset, ht_ref_extent(&chunk->cur, 0).block * HT_BLOCK_BYTES);
}

TEST(a_quiet_reader_learns_what_failed)
{
    ck_assert_int_eq(write_bytes(1), 0);
    corrupt(&chunk->cur);
    io.ref = chunk->cur;
    ht_chunk_read_start(&io, ring, buf);
    ck_assert_int_eq(ht_chunk_read_finish_quietly(&io, ring), -EIO);
    struct ht_event_about about = ht_chunk_io_about(&io, -EIO);
    ck_assert_int_eq(about.error, -EUCLEAN);
    ck_assert_uint_eq(about.offset, ht_ref_extent(&chunk->cur, 0).block * HT_BLOCK_BYTES);
    ck_assert_uint_eq(events + s->counts.checksum_errors + s->counts.read_errors, 0);
}

static int read_as_background(struct ht_chunk_io in[], unsigned n)
{
    enum ht_io_class was = ht_io_class_set(HT_IO_BACKGROUND);
    int rc = ht_chunks_read_permitted(in, n);

    (void)ht_io_class_set(was);
    for (unsigned i = 0; i < DATA_DEVICES; i++)
        ck_assert(!ht_dev_has_permits(s->dev[i]));
    return rc;
}

TEST(of_contents_that_are_read_with_permits_one_may_be_bad)
{
    struct ht_chunk_io in[4] = {{.obj = NULL}};

    io.chunk = NULL;
    ht_store_lock(s);
    ht_chunk_unlock_exclusive(obj, chunk, 0); /* only a thread that holds nothing waits for a permit */
    ht_store_unlock(s);
    for (unsigned i = 0; i < 4; i++) {
        ck_assert_int_eq(write_bytes(i / 2), 0);
        in[i] = (struct ht_chunk_io){.obj = obj, .ref = io.ref, .data = i < 3 ? bytes_of(3, BYTES) : NULL};
    }
    corrupt(&in[1].ref);
    ck_assert_int_eq(read_as_background(in, 3), -EIO);
    ck_assert_int_eq(in[1].rc, -EIO);
    ck_assert_int_eq(read_as_background(&in[3], 1), 0); /* into a buffer of the pool */
    for (unsigned i = 0; i < 4; i++)
        ck_assert(i == 1 || (!in[i].rc && !memcmp(in[i].data, data, BYTES)));
    ht_staging_put(s->staging, HT_STAGING_FILL, in[3].data);
    for (unsigned i = 0; i < 3; i++)
        free(in[i].data);
    ck_assert_uint_eq(events + s->counts.checksum_errors + s->counts.read_errors, 0);
    ht_store_lock(s);
    for (unsigned i = 0; i < 4; i++)
        ht_free_ref_now(s, &in[i].ref);
    ht_chunk_lock_exclusive(obj, chunk, 0);
    ht_store_unlock(s);
}

TEST(a_device_that_fails_is_counted_and_reported)
{
    ck_assert_int_eq(write_bytes(-1), 0);
    dev_fail(s->dev[ht_ref_extent(&chunk->cur, 0).device], HT_IO_READ, 1, false);
    ck_assert_int_eq(ht_chunk_read(obj, 0, &chunk->cur, buf), -EIO);
    ck_assert_uint_eq(s->counts.read_errors, 1);
    ck_assert_uint_eq(events, 1);
    ck_assert_int_eq(seen.code, HT_EVENT_READ_ERROR);
}

/* As a file on a damaged file system does. */
TEST(a_device_that_fails_with_euclean_has_no_wrong_checksum)
{
    ck_assert_int_eq(write_bytes(1), 0);
    dev_fail_with(s->dev[ht_ref_extent(&chunk->cur, 0).device], HT_IO_READ, 1, false, -EUCLEAN);
    ck_assert_int_eq(ht_chunk_read(obj, 0, &chunk->cur, buf), -EIO);
    ck_assert_uint_eq(s->counts.read_errors, 1);
    ck_assert_uint_eq(s->counts.checksum_errors, 0);
    ck_assert_int_eq(seen.code, HT_EVENT_READ_ERROR);
    ck_assert_int_eq(seen.error, -EUCLEAN);
}

/* No request is made: the error waits for the finish, which counts and reports it. */
TEST(a_read_that_cannot_start_is_counted_and_reported)
{
    ck_assert_int_eq(write_bytes(1), 0);
    s->data->health[1] = HT_HEALTH_MISSING;
    io.ref = chunk->cur;
    ht_chunk_read_start(&io, ring, buf);
    ck_assert_int_eq(io.rc, -EIO);
    ck_assert_int_eq(ht_chunk_read_finish(&io, ring), -EIO);
    ck_assert_uint_eq(s->counts.read_errors, 1);
    ck_assert_int_eq(seen.error, -ENODEV);
}

TEST(a_place_that_fails_is_replaced)
{
    dev_fail(s->dev[0], HT_IO_WRITE, 1, false);
    ck_assert_int_eq(write_bytes(0), 0);
    ck_assert_uint_eq(s->counts.write_errors, 1);
    ck_assert_uint_eq(events, 1);
    ck_assert_int_eq(seen.code, HT_EVENT_WRITE_ERROR);
    ck_assert_int_eq(ht_chunk_read(obj, 0, &chunk->cur, buf), 0);
    ck_assert_int_eq(memcmp(buf, data, BYTES), 0);
}

TEST(without_any_place_the_chunk_keeps_its_reference)
{
    ck_assert_int_eq(write_bytes(-1), 0);
    struct ht_ref was = chunk->cur;
    uint64_t available = ht_alloc_free_blocks(s->alloc);
    for (unsigned i = 0; i < DATA_DEVICES; i++)
        dev_fail(s->dev[i], HT_IO_WRITE, 1, true);
    ck_assert_int_eq(write_bytes(-1), -EIO);
    ck_assert(ht_ref_same_place(&chunk->cur, &was));
    ck_assert_uint_eq(io.ref.stored, 0);
    ck_assert_uint_eq(ht_alloc_free_blocks(s->alloc), available);
    for (unsigned i = 0; i < DATA_DEVICES; i++)
        dev_fail(s->dev[i], HT_IO_WRITE, 0, false);
}

RUN_TESTS("chunk_io", .setup = start, .teardown = end)
