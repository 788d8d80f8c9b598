/* SPDX-License-Identifier: Apache-2.0 */
/* test_dedup_frames.c - compressed content that is stored twice is stored once, and nothing else about it changes. */

#include "tests/unit/tiering/engine/collision.h"
#include "tests/unit/tiering/engine/dedup.h"
#include "tests/unit/tiering/store/fixture.h"
#include "tiering/base/fault.h"
#include "tiering/base/hash.h"
#include "tiering/codec/frame.h"
#include <hitrain/format.h>

enum { CHUNKS = 3, BYTES = CHUNKS * MIB - 1000, SMALL = HT_SMALL_CHUNK_BYTES, STORE_MIB = 64 };

static uint8_t *content;
static struct ht_obj *origin;

/* Everything is cold at the second look. */
static void compress(void)
{
    ht_store_set_compress(s, all_may, NULL);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(background_compress(s), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
}

static struct ht_obj *stored(const uint8_t *p, size_t n)
{
    struct ht_obj *o = object(MIB, 0);

    put_synced(o, 0, p, n);
    return o;
}

static void expect_frames(struct ht_obj *o)
{
    for (uint64_t k = 0; k < CHUNKS; k++)
        ck_assert_uint_eq(ht_chunk_ref(ht_chunk_find(o, k))->codec, HT_CODEC_PLANES);
}

static void setup(void)
{
    fresh(STORE_MIB, false);
    content = malloc(BYTES);
    content_bf16(content, BYTES, 5);
    origin = stored(content, BYTES);
    compress();
    expect_frames(origin);
}

static void teardown(void)
{
    done();
    free(content);
}

/* It has its frames before a mount (1), and the pass comes after it. */
TEST_LOOP(a_copy_that_comes_after_compression_meets_its_origin, 2)
{
    uint64_t once = free_bytes(), oid[2];
    struct ht_obj *copy = stored(content, BYTES);

    ck_assert_uint_eq(dedup().compared_bytes, 0); /* raw bytes are no frame */
    compress();
    oid[0] = ht_obj_id(origin);
    oid[1] = ht_obj_id(copy);
    if (_i) {
        crash();
        origin = get_object(oid[0]);
        copy = get_object(oid[1]);
    }
    struct dedup_figures st = dedup();
    ck_assert_uint_eq(st.shared_bytes, obj_stat(copy).stored_bytes);
    ck_assert_uint_eq(st.different + st.skipped, 0);
    ck_assert_uint_eq(free_bytes(), once);
    ck_assert_uint_eq(dedup().compared_bytes, 0); /* nothing is left to do */
    expect_frames(copy);
    expect_stored(origin, content, BYTES);
    expect_stored(copy, content, BYTES);
    crash();
    origin = get_object(oid[0]);
    copy = get_object(oid[1]);
    ck_assert_uint_eq(free_bytes(), once);
    expect_stored(origin, content, BYTES);
    expect_stored(copy, content, BYTES);
}

/* A clone of each: whatever has owners already keeps them, and the frames stay for the last one. */
TEST_LOOP(frames_stay_for_the_last_owner, 4)
{
    uint64_t once = free_bytes();
    struct ht_obj *o[4] = {origin, object(MIB, 0), stored(content, BYTES), object(MIB, 0)};

    for (unsigned i = 1; i < 4; i += 2) {
        ck_assert_int_eq(ht_obj_clone(o[i - 1], 0, o[i], 0, BYTES), BYTES);
        ck_assert_int_eq(ht_obj_sync(o[i]), 0);
    }
    compress();
    for (unsigned passes = 0; free_bytes() != once; passes++) {
        ck_assert_uint_lt(passes, 2);
        ck_assert_uint_gt(dedup().shared_bytes, 0);
    }
    for (unsigned i = 0; i < 3; i++) {
        unsigned leaves = (i + _i) % 4;
        if (i % 2) {
            put_all(o[leaves], 0, content + 1, BYTES - 1); /* other bytes, and others still have these */
            ck_assert_int_eq(ht_obj_sync(o[leaves]), 0);
            put_object(o[leaves]);
        } else {
            delete (o[leaves]);
        }
        ck_assert_int_eq(ht_store_commit(s), 0);
    }
    origin = o[(3 + _i) % 4];
    put_object(use_all_space());
    expect_stored(origin, content, BYTES);
    origin = after(remount, origin);
    expect_stored(origin, content, BYTES);
}

TEST(a_cut_copy_keeps_its_length)
{
    const uint64_t keep = MIB + 5000;
    struct ht_obj *copy = stored(content, BYTES);
    uint8_t *want = test_alloc(BYTES);

    compress();
    ck_assert_int_eq(ht_obj_truncate(copy, keep), 0);
    ck_assert_int_eq(ht_obj_sync(copy), 0);
    ck_assert_uint_gt(dedup().shared_bytes, 0);
    expect_stored(copy, content, keep);
    ck_assert_int_eq(ht_obj_truncate(copy, BYTES), 0);
    memcpy(want, content, keep);
    expect_stored(copy, want, BYTES);
    ck_assert_int_eq(ht_obj_sync(copy), 0);
    expect_stored(origin, content, BYTES);
}

/* In the plane that a frame stores as it is, which comes first: every second byte of the content. */
static void put_in_frame(uint8_t *raw, size_t at, uint64_t word)
{
    for (unsigned i = 0; i < 8; i++)
        raw[2 * (at - sizeof(struct ht_disk_planes) + i)] = (uint8_t)(word >> 8 * i);
}

TEST(frames_with_the_same_checksum_are_compared)
{
    uint64_t word[2][COLLISION_WORDS], salt = ht_store_layout(s)->salt, sum[2];
    uint8_t *raw[2] = {malloc(MIB), malloc(MIB)}, *frame = test_alloc(MIB);
    struct ht_encoder *encoder;
    struct ht_obj *o[2];
    int len[2];

    collision_words(salt, word[0], word[1]);
    ck_assert_int_eq(ht_encoder_new(&encoder), 0);
    for (unsigned i = 0; i < 2; i++) {
        content_bf16(raw[i], MIB, 6);
        for (unsigned k = 0; k < COLLISION_WORDS; k++)
            put_in_frame(raw[i], COLLISION_BLOCK + collision_at(k), word[i][k]);
        len[i] = ht_codec_encode(encoder, raw[i], MIB, frame);
        sum[i] = ht_hash64(frame, (size_t)len[i], salt);
        o[i] = stored(raw[i], MIB);
    }
    ht_encoder_free(encoder);
    ck_assert_int_gt(len[0], 0);
    ck_assert_int_eq(len[0], len[1]);
    ck_assert_uint_eq(sum[0], sum[1]);
    ck_assert_int_ne(memcmp(raw[0], raw[1], MIB), 0);
    compress();
    struct dedup_figures st = dedup();
    ck_assert_uint_eq(st.different, 1);
    ck_assert_uint_eq(st.shared_bytes, 0);
    for (unsigned i = 0; i < 2; i++) {
        expect_stored(o[i], raw[i], MIB);
        put_object(o[i]);
        free(raw[i]);
    }
}

/* After the comparison one of both is compressed (0), deleted (1: the owner, 2: the other) or written anew (3, 4). */
TEST_LOOP(what_has_changed_since_the_comparison_is_left_alone, 5)
{
    struct ht_obj *o[2] = {stored(content, MIB), stored(content, MIB)};
    struct ht_obj *changed = o[_i == 2 || _i == 4];

    if (_i)
        compress();
    struct ht_sharer pair = {name(o[0]), name(o[1])};
    if (_i == 0) {
        compress();
    } else if (_i < 3) {
        delete (changed);
    } else {
        put_synced(changed, 0, content + MIB, MIB);
    }
    uint64_t before = free_bytes();
    ck_assert_int_eq(ht_chunks_share(s, &pair, 1), 0);
    ck_assert_int_eq(pair.rc, -ESTALE);
    ck_assert_uint_eq(free_bytes(), before);
    ck_assert_int_eq(ht_store_commit(s), 0);
    put_object(use_all_space());
    for (unsigned i = 0; i < 2; i++) {
        if (o[i] != changed || _i == 0 || _i > 2) {
            expect_stored(o[i], o[i] == changed && _i > 2 ? content + MIB : content, MIB);
            put_object(o[i]);
        }
    }
}

/* A frame that cannot be read, or whose checksum is wrong, stays as it is. */
TEST_LOOP(what_cannot_be_read_is_skipped, 2)
{
    static const enum ht_fault_point points[] = {HT_FAULT_IO_READ, HT_FAULT_STORE_CHECKSUM};
    struct ht_obj *copy = stored(content, MIB);

    compress();
    for (unsigned nth = 1; nth <= 2; nth++) {
        ht_fault_arm(points[_i], nth, false);
        struct dedup_figures st = dedup();
        ck_assert_uint_ge(ht_fault_passed(points[_i]), nth);
        ht_fault_disarm_all();
        ck_assert_uint_eq(st.skipped, 1);
        ck_assert_uint_eq(st.shared_bytes, 0);
    }
    ck_assert_uint_eq(stats().checksum_errors + stats().read_errors, 0);
    ck_assert_uint_gt(dedup().shared_bytes, 0);
    expect_stored(copy, content, MIB);
}

/* Zeros that were compressed before a pass has seen them. */
TEST(frames_of_zeros_become_holes)
{
    uint64_t before = free_bytes();
    uint8_t *p = test_alloc(BYTES);

    p[MIB] = 1;
    struct ht_obj *o[2] = {stored(p, BYTES), object(SMALL, 0)};
    uint64_t oid = ht_obj_id(o[0]);
    put_all(o[1], 0, p, SMALL);
    ck_assert_int_eq(ht_obj_sync(o[1]), 0);
    compress();
    expect_frames(o[0]);
    struct dedup_figures st = dedup();
    ck_assert_uint_eq(st.hole_bytes, 2 * HT_BLOCK_BYTES); /* not the last chunk, which is not whole */
    ck_assert_uint_eq(st.shared_bytes + st.different + st.skipped, 0);
    ck_assert_int_eq(ht_obj_seek(o[0], 0, true), 0);
    ck_assert_int_eq(ht_obj_seek(o[0], 0, false), MIB);
    ck_assert_uint_eq(obj_stat(o[1]).stored_bytes, 0);
    ck_assert_uint_eq(before - free_bytes(), obj_stat(o[0]).stored_bytes);
    expect_stored(o[0], p, BYTES);
    expect_stored(o[1], p, SMALL);
    for (unsigned i = 0; i < 2; i++)
        put_object(o[i]);
    origin = after(remount, origin);
    o[0] = get_object(oid);
    expect_stored(o[0], p, BYTES);
}

RUN_TESTS("dedup_frames", .setup = setup, .teardown = teardown, .timeout_s = 300)
