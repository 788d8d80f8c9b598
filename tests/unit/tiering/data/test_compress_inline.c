/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_compress_inline.c - threads that write new content compress it, and nothing that reads or changes it sees a
 * difference but the space.
 */

#include "tests/unit/tiering/store/fixture.h"

#include "tests/support/group.h"
#include "tests/unit/tiering/codec/content.h"
#include "tiering/cache/staging.h"
#include "tiering/object/chunk.h"
#include "tiering/object/ref.h"

enum { CHUNKS = 3, BYTES = CHUNKS * MIB + 5000, STORE_MIB = 64 };

static uint8_t *content;
static struct ht_obj *obj;
static uint64_t oid;

static unsigned codec_of(struct ht_obj *o, uint64_t index)
{
    struct ht_chunk *c = ht_chunk_find(o, index);

    return c && ht_chunk_ref(c) ? ht_chunk_ref(c)->codec : 0;
}

static void expect_codecs(unsigned first, unsigned others)
{
    for (uint64_t i = 0; i < CHUNKS; i++)
        ck_assert_uint_eq(codec_of(obj, i), i ? others : first);
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

static void write_all(void)
{
    put_all(obj, 0, content, BYTES);
    sync_object();
}

static struct ht_obj *object_that_may(uint64_t scope)
{
    struct ht_obj *o = object(MIB, scope);

    ht_obj_describe(o, true, false, false);
    return o;
}

/* durable: the superblock says that there may be frames. */
static void begin(enum ht_inline when, bool durable)
{
    fixture_inline = when;
    fresh(STORE_MIB, false);
    if (durable)
        ck_assert_int_eq(ht_store_need_features(s, HT_FEAT_REFUSE_PLANES), 0);
    content = malloc(BYTES);
    content_bf16(content, BYTES, 5);
    obj = object_that_may(0);
    oid = ht_obj_id(obj);
}

static void setup(void)
{
    begin(HT_INLINE_ALWAYS, true);
}

static void teardown(void)
{
    done();
    free(content);
    fixture_shm_bytes = 0;
}

TEST(new_content_is_smaller_and_the_same)
{
    uint64_t available = stats().available_bytes;

    write_all();
    expect_codecs(HT_CODEC_PLANES, HT_CODEC_PLANES);
    ck_assert_uint_eq(codec_of(obj, CHUNKS), HT_CODEC_RAW); /* the last one may get longer */
    ck_assert_uint_eq(engine_figure("recompress", "inline_chunks"), CHUNKS);
    uint64_t stored = obj_stat(obj).stored_bytes;
    ck_assert_uint_lt(stored, (uint64_t)BYTES * 10 / 13);
    ck_assert_uint_eq(engine_figure("recompress", "inline_saved_bytes"),
                      CHUNKS * (uint64_t)MIB + 2 * HT_BLOCK_BYTES - stored);
    ck_assert_uint_eq(stats().available_bytes, available - stored);
    expect_all();
    obj = after(crash, obj);
    expect_codecs(HT_CODEC_PLANES, HT_CODEC_PLANES);
    expect_all();
    obj = after(remount, obj);
    expect_all();
}

/* The first content asks, and is raw; a round of the engine writes the superblock. */
TEST(no_frame_comes_before_the_superblock_says_so)
{
    teardown();
    begin(HT_INLINE_ALWAYS, false);
    write_all();
    expect_codecs(HT_CODEC_RAW, HT_CODEC_RAW);
    ck_assert_uint_eq(ht_store_super(s)->feat_refuse & HT_FEAT_REFUSE_PLANES, 0);
    ht_store_set_compress(s, all_may, NULL);
    ck_assert_int_eq(background_compress(s), 0);
    ck_assert_uint_ne(ht_store_super(s)->feat_refuse & HT_FEAT_REFUSE_PLANES, 0);
    expect_codecs(HT_CODEC_RAW, HT_CODEC_RAW);
    ck_assert_int_eq(ht_obj_truncate(obj, 0), 0);
    write_all();
    expect_codecs(HT_CODEC_PLANES, HT_CODEC_PLANES);
    expect_all();
}

static void forbid(void)
{
    ht_obj_describe(obj, false, false, false);
}

static void take_scope(void)
{
    put_object(obj);
    obj = object_that_may(77);
    oid = ht_obj_id(obj);
}

static void take_reserve(void)
{
    ck_assert_int_eq(ht_obj_rewrite_reserve(obj, BYTES), 0);
}

static void hand_out(void)
{
    int fd;

    ck_assert_int_eq(ht_obj_truncate(obj, BYTES), 0);
    ck_assert_int_eq(ht_obj_shm_open_for(obj, 0, &fd), 0);
}

/* Not of files that may not be, of models, with a rewrite reserve, or in the memory of passthrough files. */
TEST_LOOP(other_content_is_written_as_it_is, 4)
{
    static void (*const cases[])(void) = {forbid, take_scope, take_reserve, hand_out};
    bool handed = cases[_i] == hand_out;

    teardown();
    fixture_shm_bytes = handed ? 8 * MIB : 0;
    setup();
    cases[_i]();
    put_all(obj, 0, content, BYTES);
    ck_assert_int_eq(ht_obj_writeback(obj), 0);
    expect_codecs(HT_CODEC_RAW, HT_CODEC_RAW);
    ck_assert_uint_eq(engine_figure("recompress", "inline_chunks"), 0);
    if (handed)
        ht_obj_shm_close(obj);
    expect(obj, 0, content, BYTES);
    if (_i == 1)
        ck_assert_int_eq(ht_scope_abort(s, 77), 0);
}

TEST(content_that_is_written_again_is_raw)
{
    write_all();
    put_all(obj, 100, content, 50);
    memcpy(content + 100, content, 50);
    expect(obj, 0, content, BYTES);
    sync_object();
    expect_codecs(HT_CODEC_RAW, HT_CODEC_PLANES);
    expect_all();
    ck_assert_int_eq(ht_obj_truncate(obj, 0), 0); /* then it is new */
    content_bf16(content, BYTES, 6);
    write_all();
    expect_codecs(HT_CODEC_PLANES, HT_CODEC_PLANES);
    expect_all();
}

/* The engine leaves it alone, and does not read it. Few of its chunks are tried. */
TEST(what_saves_too_little_is_written_as_it_is)
{
    content_random(content, BYTES, 1);
    write_all();
    expect_codecs(HT_CODEC_RAW, HT_CODEC_RAW);
    ht_store_set_compress(s, all_may, NULL);
    ck_assert_int_eq(background_compress(s), 0);
    uint64_t read = stats().device_read_bytes;
    ck_assert_int_eq(background_compress(s), 0);
    ck_assert_uint_eq(stats().device_read_bytes, read + (CHUNKS - 1) * (uint64_t)MIB + 2 * HT_BLOCK_BYTES);
    ck_assert_uint_eq(engine_figure("recompress", "inline_chunks"), 0);
    expect_all();
}

/* A write fails at one place (0), or everywhere (1), or the flush after it does (2): then images are written again. */
TEST_LOOP(a_write_that_fails_is_made_again, 3)
{
    put_all(obj, 0, content, BYTES);
    if (_i == 2)
        dev_fail(dev, HT_IO_FLUSH, 1, false);
    else
        dev_fail(dev, HT_IO_WRITE, 1, _i == 1);
    int rc = ht_obj_sync(obj);
    ck_assert_int_eq(rc, _i == 1 ? -EIO : 0);
    expect(obj, 0, content, BYTES);
    dev_fail(dev, HT_IO_WRITE, 0, false);
    dev_fail(dev, HT_IO_FLUSH, 0, false);
    sync_object();
    expect_all();
    obj = after(crash, obj);
    expect_all();
}

/* Readers have all buffers: the writer waits for none. */
TEST(without_a_buffer_it_is_raw)
{
    unsigned n = ht_staging_count(s->staging, HT_STAGING_FILL);
    void *buf[64];

    ck_assert_uint_le(n, HT_ARRAY_SIZE(buf));
    for (unsigned i = 0; i < n; i++)
        ck_assert_int_eq(ht_staging_get(s->staging, HT_STAGING_FILL, 1, true, HT_NUMA_INDEX_ANY, &buf[i]), 0);
    write_all();
    for (unsigned i = 0; i < n; i++)
        ht_staging_put(s->staging, HT_STAGING_FILL, buf[i]);
    expect_codecs(HT_CODEC_RAW, HT_CODEC_RAW);
    expect_all();
}

/* More than the store could hold as it is: what was accepted is stored. */
TEST(a_full_store_takes_more)
{
    struct ht_obj *big = object_that_may(0);
    uint64_t at = 0;

    while (ht_obj_write(big, at, content, MIB) == MIB) {
        at += MIB;
        ck_assert_int_eq(ht_obj_sync(big), 0);
    }
    ck_assert_uint_gt(at, (uint64_t)STORE_MIB * MIB);
    ht_obj_evict(big);
    for (uint64_t off = 0; off < at; off += MIB)
        expect(big, off, content, MIB);
}

/* With measured rates: whatever they say, the content is the same. */
TEST(measurements_decide)
{
    teardown();
    begin(HT_INLINE_AUTO, true);
    write_all(); /* nothing was measured yet */
    expect_codecs(HT_CODEC_RAW, HT_CODEC_RAW);
    ck_assert_uint_eq(engine_figure("recompress", "inline_chunks"), 0);
    expect_all();
}

/* A slow device, and half a processor: no whole one is idle, whatever the machine does. */
TEST(a_quota_of_processor_time_counts)
{
    enum { DELAY_MS = 20, WRITES = 35 }; /* several looks */
    struct group g;

    teardown();
    bool limited = group_enter("cpu", "cpu.cfs_quota_us", "50000", "cpu.max", "50000 100000", &g);
    begin(HT_INLINE_AUTO, true);
    dev_set_delay(dev, DELAY_MS);
    for (uint64_t i = 0; limited && i < WRITES; i++) {
        put_all(obj, i * MIB, content, MIB);
        sync_object();
    }
    dev_set_delay(dev, 0);
    if (limited)
        group_leave(&g);
    ck_assert_uint_eq(engine_figure("recompress", "inline_chunks"), 0);
}

RUN_TESTS("compress", .setup = setup, .teardown = teardown, .timeout_s = 120)
