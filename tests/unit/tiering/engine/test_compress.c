/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_compress.c - content that has not changed for a while is compressed, and nothing that reads or changes it sees a
 * difference but the space.
 */

#include "tests/unit/tiering/store/fixture.h"

#include <time.h>

#include "tests/support/wrap.h"
#include "tests/unit/tiering/codec/content.h"
#include "tiering/base/event.h"
#include "tiering/base/fault.h"
#include "tiering/cache/arena.h"
#include "tiering/engine/engine_priv.h"
#include "tiering/object/chunk.h"
#include "tiering/object/ref.h"

enum { CHUNKS = 3, BYTES = CHUNKS * MIB - 1000, SMALL = HT_SMALL_CHUNK_BYTES, STORE_MIB = 64 };

static uint8_t *content;
static struct ht_obj *obj;
static uint64_t oid;
static _Atomic unsigned bad_reads;

static void count_event(void *ctx, const struct ht_event *e)
{
    (void)ctx;
    bad_reads += e->code == HT_EVENT_CHECKSUM;
}

static uint64_t none, last_oid;
static void (*meanwhile)(void); /* once, when the engine comes to last_oid */

/* ctx: an object that may not be; 0: all may. */
static bool may(void *ctx, uint64_t id)
{
    void (*change)(void) = id && id == last_oid ? meanwhile : NULL;

    if (change) {
        meanwhile = NULL;
        change();
    }
    return id == 0 || id != *(uint64_t *)ctx;
}

static void allow(void)
{
    ht_store_set_compress(s, may, &none);
}

static void compress(void)
{
    allow();
    ck_assert_int_eq(background_compress(s), 0);
}

/* The first look at an object only notes its version. */
static void compress_cold(void)
{
    compress();
    compress();
}

static uint64_t stored(void)
{
    return obj_stat(obj).stored_bytes;
}

static unsigned codec_of(uint64_t index)
{
    struct ht_chunk *c = ht_chunk_find(obj, index);

    return c ? ht_chunk_ref(c)->codec : 0;
}

static void expect_all(void)
{
    expect(obj, 0, content, BYTES);
    ht_obj_evict(obj);
    expect(obj, 0, content, BYTES);
}

static void sync_object(void)
{
    ck_assert_int_eq(ht_obj_sync(obj), 0);
}

static void put(uint64_t off, size_t n)
{
    put_all(obj, off, content + off, n);
}

static void begin(uint32_t chunk_bytes)
{
    none = last_oid = 0;
    bad_reads = 0;
    ht_event_set_sink(count_event, NULL);
    fresh(STORE_MIB, false);
    content = malloc(BYTES);
    content_bf16(content, BYTES, 5);
    obj = object(chunk_bytes, 0);
    oid = ht_obj_id(obj);
    put(0, BYTES);
    sync_object();
}

static void setup(void)
{
    begin(MIB);
}

/* The whole object compressed, and without an image. */
static void begin_compressed(void)
{
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
    ht_obj_evict(obj);
}

static void teardown(void)
{
    if (obj)
        expect_all();
    done();
    ht_event_set_sink(NULL, NULL);
    fixture_shm_bytes = 0;
    free(content);
}

/* -------------------------------------------------------- which content */

TEST(content_is_smaller_and_the_same)
{
    uint64_t before = stored(), available = stats().available_bytes;

    compress_cold();
    for (uint64_t i = 0; i < CHUNKS; i++)
        ck_assert_uint_eq(codec_of(i), HT_CODEC_PLANES);
    ck_assert_uint_lt(stored(), before * 10 / 14);
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
    ck_assert_uint_eq(engine_figure("recompress", "raw_bytes"), before);
    ck_assert_uint_eq(engine_figure("recompress", "saved_bytes"), before - stored());
    ck_assert_uint_eq(stats().available_bytes, available + before - stored());
    ck_assert_uint_ne(ht_store_super(s)->feat_refuse & HT_FEAT_REFUSE_PLANES, 0);
}

TEST(it_is_there_after_a_mount_a_checkpoint_and_a_crash)
{
    compress_cold();
    uint64_t small = stored();
    obj = after(remount, obj);
    ck_assert_uint_eq(stored(), small);
    expect_all();
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    obj = after(crash, obj);
    ck_assert_uint_eq(stored(), small);
}

TEST(what_changed_since_the_round_before_waits)
{
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0); /* never seen before */
    put(0, 1);
    sync_object();
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
}

TEST(what_is_not_published_waits)
{
    put(0, 1);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    ck_assert_int_eq(ht_obj_writeback(obj), 0);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    sync_object();
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
}

TEST(only_objects_that_may_be)
{
    none = oid;
    compress_cold();
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    none = 0;
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0); /* seen for the first time */
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
}

TEST(what_saves_too_little_is_tried_once)
{
    content_random(content, BYTES, 1);
    put(0, BYTES);
    sync_object();
    uint64_t before = stored();
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    ck_assert_uint_eq(engine_figure("recompress", "kept_raw"), CHUNKS);
    uint64_t read = stats().device_read_bytes;
    compress_cold();
    ck_assert_uint_eq(stats().device_read_bytes, read);
    ck_assert_uint_eq(stored(), before);
    content_bf16(content, BYTES, 9);
    put(0, MIB); /* written again, it is tried again */
    sync_object();
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 1);
    obj = NULL; /* has other content */
}

/* A chunk that cannot be read is read once, and the others are compressed. */
TEST(damage_is_not_read_in_each_round)
{
    compress(); /* notes the version */
    ht_fault_arm(HT_FAULT_STORE_CHECKSUM, 1, false);
    compress();
    ck_assert_uint_eq(ht_fault_passed(HT_FAULT_STORE_CHECKSUM), CHUNKS);
    ht_fault_disarm_all();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS - 1);
    ck_assert_uint_eq(engine_figure("recompress", "kept_raw"), 0);
    uint64_t read_bytes = stats().device_read_bytes;
    compress_cold();
    ck_assert_uint_eq(stats().device_read_bytes, read_bytes);
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS - 1);
}

TEST(a_full_store_ends_the_round)
{
    struct ht_obj *rest = object(MIB, 0);
    uint8_t *block = pattern(MIB, 8);
    uint64_t at = 0;

    while (ht_obj_write(rest, at, block, MIB) == MIB)
        at += MIB;
    while (ht_obj_write(rest, at, block, 4096) == 4096)
        at += 4096;
    ck_assert_int_eq(ht_obj_sync(rest), 0);
    allow();
    ck_assert_int_eq(background_compress(s), 0);
    uint64_t read_bytes = stats().device_read_bytes;
    ck_assert_int_eq(background_compress(s), -EAGAIN);
    ck_assert_uint_eq(stats().device_read_bytes, read_bytes);
    expect_all();
    ck_assert_int_eq(ht_obj_truncate(rest, 0), 0);
    ck_assert_int_eq(ht_obj_sync(rest), 0);
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
}

/* The space of the raw chunks is free only when their transaction is durable. */
TEST(a_store_that_is_almost_full_goes_on_with_the_space_that_became_free)
{
    enum { COLD = 8, LEFT_BLOCKS = 600 };
    struct ht_obj *cold = object(MIB, 0), *rest = object(MIB, 0);
    uint8_t *block = pattern(MIB, 8);
    uint64_t at = 0;

    for (unsigned i = 0; i < COLD; i++)
        put_all(cold, i * (uint64_t)MIB, content, MIB);
    ck_assert_int_eq(ht_obj_sync(cold), 0);
    while (ht_obj_write(rest, at, block, MIB) == MIB)
        at += MIB;
    while (ht_obj_write(rest, at, block, 4096) == 4096)
        at += 4096;
    ck_assert_int_eq(ht_obj_truncate(rest, at - (uint64_t)LEFT_BLOCKS * HT_BLOCK_BYTES), 0);
    ck_assert_int_eq(ht_obj_sync(rest), 0);
    compress_cold();
    ck_assert_uint_ge(engine_figure("recompress", "chunks"), COLD);
    expect_all();
    for (unsigned i = 0; i < COLD; i++)
        expect(cold, i * (uint64_t)MIB, content, MIB);
}

/* A frame in pieces would take more of the log, and more reads, than the content did. */
TEST(content_does_not_come_in_more_pieces)
{
    enum { LEFT = 6 * MIB };
    struct ht_obj *rest = object(MIB, 0), *crumbs = object(SMALL, 0);
    uint8_t *block = pattern(MIB, 8);
    uint64_t at = 0, n = 0;

    while (ht_obj_write(rest, at, block, MIB) == MIB)
        at += MIB;
    ck_assert_int_eq(ht_obj_truncate(rest, at - LEFT), 0);
    ck_assert_int_eq(ht_obj_sync(rest), 0);
    while (ht_obj_write(crumbs, n * SMALL, block, HT_BLOCK_BYTES) == HT_BLOCK_BYTES)
        n++;
    ck_assert_uint_ge(n * HT_BLOCK_BYTES, LEFT / 2);
    ck_assert_int_eq(ht_obj_sync(crumbs), 0);
    for (uint64_t i = 0; i < n; i += 2)
        ck_assert_int_eq(ht_obj_punch(crumbs, i * SMALL, SMALL), 0);
    ck_assert_int_eq(ht_obj_sync(crumbs), 0);
    compress();
    ck_assert_int_eq(background_compress(s), -EAGAIN);
    for (unsigned i = 0; i < CHUNKS; i++)
        ck_assert_uint_eq(codec_of(i), HT_CODEC_RAW);
}

TEST(the_next_rewrite_still_has_its_space)
{
    struct ht_obj *rest = object(MIB, 0);
    uint8_t *block = pattern(MIB, 8);
    uint64_t at = 0;

    ck_assert_int_eq(ht_obj_rewrite_reserve(obj, BYTES), 0);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
    while (ht_obj_write(rest, at, block, 4096) == 4096)
        at += 4096;
    content_random(content, BYTES, 3);
    put(0, BYTES);
    sync_object();
}

TEST(a_read_only_store_reads_and_compresses_nothing)
{
    compress_cold();
    unmount_store();
    mount_with(false, true);
    obj = get_object(oid);
    allow();
    uint64_t written = stats().device_written_bytes;
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(background_compress(s), 0);
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    ck_assert_uint_eq(stats().device_written_bytes, written);
}

TEST(small_chunks_too)
{
    teardown();
    begin(SMALL);
    uint64_t before = stored();
    compress_cold();
    ck_assert_uint_lt(stored(), before * 10 / 13);
    expect_all();
    obj = after(remount, obj);
}

TEST(a_long_object_is_looked_at_in_parts)
{
    enum { COUNT = 600 };
    struct ht_obj *o = object(SMALL, 0);
    uint8_t *noise = test_alloc(SMALL);

    content_random(noise, SMALL, 4);
    for (uint64_t i = 0; i < COUNT; i++)
        put_all(o, i * SMALL, noise, SMALL);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "kept_raw"), COUNT);
    uint64_t before = engine_figure("recompress", "chunks");
    put_synced(o, (COUNT - 1) * SMALL, content, SMALL);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), before + 1);
    ht_obj_evict(o);
    expect(o, (COUNT - 1) * SMALL, content, SMALL);
    expect(o, (COUNT - 2) * SMALL, noise, SMALL);
}

/* ---------------------------------------------------------- frames that wait */

/* 48 chunks: a flush for the frames, and one for the superblock that names the feature. */
TEST(frames_share_a_flush_and_a_transaction)
{
    teardown();
    begin(SMALL);
    compress();
    uint64_t flushes = stats().device_flushes;
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), BYTES / SMALL + 1);
    ck_assert_uint_le(stats().device_flushes - flushes, 4);
}

static struct ht_obj *copy;

static void rewrite_it(void)
{
    content_bf16(content, MIB, 77);
    put(0, MIB);
    sync_object();
}

static void rewrite_it_unpublished(void)
{
    content_bf16(content, MIB, 78);
    put(0, MIB);
}

static void cut_it(void)
{
    ck_assert_int_eq(ht_obj_truncate(obj, MIB / 2), 0);
    sync_object();
    ck_assert_int_eq(ht_obj_truncate(obj, BYTES), 0);
    sync_object();
    memset(content + MIB / 2, 0, BYTES - MIB / 2);
}

static void delete_it(void)
{
    delete (obj);
    obj = NULL;
}

static void clone_it(void)
{
    ck_assert_int_eq(ht_obj_clone(obj, 0, copy, 0, BYTES), BYTES);
    ck_assert_int_eq(ht_obj_sync(copy), 0);
}

/* Whatever happens between the write of a frame and its transaction wins, and no space is lost. */
TEST_LOOP(what_happens_while_frames_wait_wins, 5)
{
    static const struct {
        void (*change)(void);
        unsigned codec[CHUNKS]; /* afterwards */
    } cases[] = {
        {rewrite_it, {HT_CODEC_RAW, HT_CODEC_PLANES, HT_CODEC_PLANES}},
        {rewrite_it_unpublished, {HT_CODEC_PLANES, HT_CODEC_PLANES, HT_CODEC_PLANES}},
        {cut_it, {HT_CODEC_PLANES, 0, 0}},
        {clone_it, {HT_CODEC_RAW, HT_CODEC_RAW, HT_CODEC_RAW}},
        {delete_it, {0}},
    };

    uint64_t available = stats().available_bytes + stored();
    copy = object(MIB, 0);
    struct ht_obj *last = object(MIB, 0);
    last_oid = ht_obj_id(last);
    ck_assert_uint_gt(last_oid, oid);
    compress();
    meanwhile = cases[_i].change;
    compress();
    ck_assert_ptr_null(meanwhile);
    for (unsigned i = 0; obj && i < CHUNKS; i++)
        ck_assert_uint_eq(codec_of(i), cases[_i].codec[i]);
    put_object(last);
    put_object(copy);
    if (obj) {
        sync_object();
        expect_all();
        obj = after(crash, obj);
        expect_all();
    } else { /* the space of its content and of its frames */
        ck_assert_int_eq(ht_store_commit(s), 0);
        ck_assert_uint_eq(stats().available_bytes, available);
    }
}

static bool may_not(void *ctx, uint64_t id)
{
    (void)ctx;
    (void)id;
    return false;
}

/* By an engine that may compress nothing more (0), that stops (1), or that is paused (2). */
TEST_LOOP(frames_that_wait_are_given_back, 3)
{
    uint64_t available = stats().available_bytes;
    struct ht_budget b = {.most_bytes = MIB, .until_ns = UINT64_MAX};

    compress();
    background_let_time_pass(s);
    ck_assert_int_eq(ht_recompress_engine.step(s, &b), HT_STEP_WORKED);
    ck_assert_uint_gt(b.bytes, 0);
    ck_assert_uint_lt(stats().available_bytes, available);
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    if (_i == 1) {
        ht_engine_stop(s);
    } else if (_i == 2) {
        ht_recompress_engine.rest(s);
    } else {
        ht_store_set_compress(s, may_not, NULL);
        ck_assert_int_eq(ht_recompress_engine.step(s, &b), HT_STEP_IDLE);
    }
    ck_assert_uint_eq(stats().available_bytes, available);
    expect_all();
    if (_i == 2) { /* when it goes on */
        compress_cold();
        ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
        expect_all();
    }
}

/* A step ends after its bytes (0), or at its time (1): then a device that takes 6 ms serves one chunk. */
TEST_LOOP(a_step_keeps_to_its_budget, 2)
{
    struct ht_budget b = {.most_bytes = _i ? UINT64_MAX : MIB / 4, .until_ns = UINT64_MAX};

    teardown();
    begin(SMALL);
    compress();
    ck_assert_int_eq(ht_store_need_features(s, HT_FEAT_REFUSE_PLANES), 0);
    background_let_time_pass(s);
    if (_i) {
        dev_set_delay(dev, 6);
        b.until_ns = ht_now_ns() + 10000000;
    }
    ck_assert_int_eq(ht_recompress_engine.step(s, &b), HT_STEP_WORKED);
    dev_set_delay(dev, 0);
    ck_assert_uint_gt(b.bytes, 0);
    ck_assert_uint_le(b.bytes, _i ? 2 * SMALL : MIB / 4 + 2 * SMALL);
    ht_engine_stop(s);
}

/* The flush fails: no chunk has a frame, and all have their content. */
TEST(frames_that_are_not_flushed_are_not_published)
{
    compress();
    ck_assert_int_eq(ht_store_need_features(s, HT_FEAT_REFUSE_PLANES), 0);
    uint64_t before = stored();
    dev_fail(dev, HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(background_compress(s), -EAGAIN);
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    ck_assert_uint_eq(stored(), before);
    expect_all();
    ck_assert_int_eq(ht_store_commit(s), 0);
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
}

/* --------------------------------------------------- compressed content changes */

TEST(a_part_is_written)
{
    begin_compressed();
    static const struct {
        uint64_t off;
        size_t n;
    } parts[] = {{0, 1}, {5000, 100}, {MIB - 1, 2}, {MIB + 4096, 4096}, {BYTES - 1, 1}};

    for (size_t i = 0; i < HT_ARRAY_SIZE(parts); i++) {
        content_random(content + parts[i].off, parts[i].n, i + 1);
        put(parts[i].off, parts[i].n);
        expect(obj, 0, content, BYTES);
    }
    sync_object();
    expect_all();
    compress_cold();
    ck_assert_uint_gt(engine_figure("recompress", "chunks"), CHUNKS);
}

TEST_LOOP(a_part_is_cut_off_and_grows_again_as_zeros, 4)
{
    begin_compressed();

    const uint32_t keep = (uint32_t)(600000 * (_i + 1)) + 77;
    uint64_t before = stored();

    ck_assert_int_eq(ht_obj_truncate(obj, keep), 0);
    expect(obj, 0, content, keep);
    ck_assert_uint_le(stored(), before);
    ck_assert_int_eq(ht_obj_truncate(obj, BYTES), 0);
    memset(content + keep, 0, BYTES - keep);
    expect_all();
    sync_object();
    expect_all();
    ck_assert_uint_eq(codec_of(0), HT_CODEC_PLANES);
    obj = after(remount, obj);
    expect_all();
    compress_cold();
}

TEST(a_clone_shares_the_frame)
{
    begin_compressed();

    struct ht_obj *twin = object(MIB, 0);
    uint64_t available = stats().available_bytes;

    ck_assert_int_eq(ht_obj_clone(obj, 0, twin, 0, BYTES), BYTES);
    ck_assert_int_eq(ht_obj_sync(twin), 0);
    ck_assert_uint_gt(stats().available_bytes + MIB, available);
    expect(twin, 0, content, BYTES);
    put_synced(twin, 10, (const uint8_t *)"other", 5);
    expect_all();
    memcpy(content + 10, "other", 5);
    ht_obj_evict(twin);
    expect(twin, 0, content, BYTES);
    obj = NULL; /* has other content */
}

/* mode: of a batch pin, whose buffers are images or staging. */
static void pin_all(enum ht_batch_pin_mode mode)
{
    for (uint64_t i = 0; i < CHUNKS; i++) {
        struct ht_batch_pin pin = {.store = s, .count = 1, .chunk[0] = {.obj = obj, .index = i, .mode = mode}};
        ck_assert_int_eq(ht_batch_pin_begin(&pin), 0);
        ck_assert_int_eq(ht_batch_pin_wait(&pin), 0);
        uint8_t *data = pin.chunk[0].data;
        ck_assert_int_eq(memcmp(data, content + i * MIB, pin.chunk[0].len), 0);
        if (mode == HT_BATCH_PIN_UPDATE)
            data[3] = content[i * MIB + 3] = (uint8_t)(data[3] + 1);
        ht_batch_pin_end(&pin, mode == HT_BATCH_PIN_UPDATE);
        ck_assert_int_eq(ht_batch_pin_finish(&pin), 0);
    }
}

TEST(an_update_reads_it_and_writes_raw_bytes)
{
    begin_compressed();
    pin_all(HT_BATCH_PIN_READ);
    pin_all(HT_BATCH_PIN_UPDATE);
    sync_object();
    for (uint64_t i = 0; i < CHUNKS; i++)
        ck_assert_uint_eq(codec_of(i), HT_CODEC_RAW);
}

TEST(a_passthrough_file_shows_it)
{
    int fd;

    teardown();
    fixture_shm_bytes = 8 * MIB;
    setup();
    begin_compressed();
    ck_assert_int_eq(ht_obj_shm_open_for(obj, 0, &fd), 0);
    uint8_t *shown = test_alloc(BYTES);
    ck_assert_int_eq(pread(fd, shown, BYTES, 0), BYTES);
    ck_assert_int_eq(memcmp(shown, content, BYTES), 0);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS); /* not again */
    ht_obj_shm_close(obj);
}

TEST(scrub_finds_nothing)
{
    struct ht_scrub_stats st;

    begin_compressed();
    ck_assert_int_eq(background_scrub(s), 0);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.run_found, 0);
}

/* ------------------------------------------------------------------- damage */

/* The device has other bytes in chunk index; right: and the reference has their checksum, as a forged log may. */
static void damage(uint64_t index, uint32_t at, bool right)
{
    struct ht_ref *ref = &ht_chunk_find(obj, index)->pub;
    uint8_t *frame = (uint8_t *)ht_dev_ram_data(dev) + ht_ref_extent(ref, 0).block * HT_BLOCK_BYTES;

    frame[at] ^= 0x81;
    if (right)
        ref->checksum = ht_store_checksum(s, frame, ref->stored);
}

TEST_LOOP(a_damaged_frame_is_an_error_of_that_chunk, 12)
{
    const uint32_t at[] = {0, 1, 8, 16, 32 + MIB / 2, 4000};
    struct ht_scrub_stats st;
    uint8_t byte;

    begin_compressed();
    damage(1, at[_i / 2], _i % 2);
    bool decodes = _i % 2 && at[_i / 2] == 4000; /* in the plane of mantissas, which is stored as it is */
    ck_assert_int_eq(ht_obj_read(obj, MIB + 5, &byte, 1), decodes ? 1 : -EIO);
    ck_assert_uint_eq(bad_reads, !decodes);
    ck_assert_uint_eq(stats().checksum_errors, !decodes);
    expect(obj, 0, content, MIB);
    expect(obj, 2 * MIB, content + 2 * MIB, BYTES - 2 * MIB);
    ht_obj_evict(obj);
    ck_assert_int_eq(background_scrub(s), 0);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.run_found, !decodes);
    put(MIB, MIB);
    sync_object();
}

/* The image is the second copy of a damaged frame, if encoding it gives that frame. */
TEST_LOOP(a_damaged_frame_is_repaired_from_memory_that_is_verified, 2)
{
    enum { AT = 4000 };
    bool wrong = _i; /* a bit in memory */
    struct ht_scrub_stats st;
    uint8_t byte;

    begin_compressed();
    expect(obj, 0, content, BYTES);
    damage(1, AT, false);
    struct ht_chunk *c = ht_chunk_find(obj, 1);
    ck_assert_uint_ne(c->slot, HT_SLOT_NONE);
    uint8_t *image = ht_arena_data(s->arena, c->slot);
    image[AT] ^= wrong;
    ck_assert_int_eq(background_scrub(s), 0);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.run_found, 1);
    ck_assert_uint_eq(st.run_repaired, !wrong);
    ht_obj_evict(obj);
    ck_assert_int_eq(ht_obj_read(obj, MIB + 5, &byte, 1), wrong ? -EIO : 1);
    if (wrong)
        obj = NULL;
}

/* Without memory a frame is read as well as raw content. */
TEST(a_decoder_is_there_from_the_mount_on)
{
    uint8_t *shown = test_alloc(BYTES);

    begin_compressed();
    obj = after(remount, obj);
    wrap_fail(WRAP_MEMORY, 1, true);
    int64_t n = ht_obj_read(obj, 0, shown, BYTES);
    wrap_fail(WRAP_MEMORY, 0, false);
    ck_assert_int_eq(n, BYTES);
    ck_assert_int_eq(memcmp(shown, content, BYTES), 0);
    ck_assert_uint_eq(stats().read_errors, 0);
}

/* -------------------------------------------------------------- beside others */

enum { ROUNDS = 60 };
static _Atomic bool ended;

static void *compress_always(void *arg)
{
    (void)arg;
    while (!ended)
        compress();
    return NULL;
}

/* One thread writes, cuts, clones and reads; the other compresses whatever it finds. */
TEST(whichever_thread_changes_a_chunk_first_wins)
{
    uint64_t x = 12345;
    pthread_t thread;

    allow();
    ended = false;
    ck_assert_int_eq(pthread_create(&thread, NULL, compress_always, NULL), 0);
    for (unsigned i = 0; i < ROUNDS; i++) {
        uint64_t off = random_next(&x) % (BYTES - 5000), n = 1 + random_next(&x) % 5000;
        content_bf16(content + off, n, i + 1);
        put(off, n);
        if (i % 3 == 0)
            sync_object();
        if (i % 5 == 0)
            ht_obj_evict(obj);
        if (i % 16 == 7) {
            ck_assert_int_eq(ht_obj_truncate(obj, off), 0);
            put(off, BYTES - off);
        }
        expect(obj, off, content + off, n);
        for (uint64_t seen = engine_figure("recompress", "chunks"), k = 0;
             i % 12 == 11 && engine_figure("recompress", "chunks") == seen && k < 2000; k++) {
            const struct timespec pause = {.tv_nsec = 1000000};
            if (k == 0)
                sync_object();
            nanosleep(&pause, NULL);
        }
    }
    ended = true;
    pthread_join(thread, NULL);
    ck_assert_uint_gt(engine_figure("recompress", "chunks"), 0);
    expect_all();
    sync_object();
    obj = after(crash, obj);
}

RUN_TESTS("compress", .setup = setup, .teardown = teardown, .timeout_s = 120)
