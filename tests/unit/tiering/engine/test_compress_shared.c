/* SPDX-License-Identifier: Apache-2.0 */
/* test_compress_shared.c - content with several owners is compressed for all of them at once, or for none. */

#include "tests/unit/tiering/store/fixture.h"

#include <time.h>

#include "tests/unit/tiering/codec/content.h"
#include "tiering/object/chunk.h"
#include "tiering/object/ref.h"
#include "tiering/engine/pass.h"

enum { CHUNKS = 3, BYTES = CHUNKS * MIB - 1000, SMALL = HT_SMALL_CHUNK_BYTES, STORE_MIB = 64, OWNERS = 3 };

static uint8_t *content;
static struct ht_obj *owner[OWNERS]; /* all have the same content */
static uint64_t oid[OWNERS];

static uint64_t none, asked_of;
static unsigned asked;
static void (*meanwhile)(void); /* once, when the engine asks about asked_of for the second time: before it publishes */

static bool may(void *ctx, uint64_t id)
{
    (void)ctx;
    if (meanwhile && id == asked_of && ++asked == 2) {
        void (*change)(void) = meanwhile;
        meanwhile = NULL;
        change();
    }
    return id == 0 || id != none;
}

static void compress(void)
{
    ht_store_set_compress(s, may, NULL);
    ck_assert_int_eq(background_compress(s), 0);
}

static void compress_cold(void)
{
    compress();
    compress();
}

static void sync_it(struct ht_obj *o)
{
    ck_assert_int_eq(ht_obj_sync(o), 0);
}

static void share(struct ht_obj *from, struct ht_obj *to, uint64_t bytes)
{
    ck_assert_int_eq(ht_obj_clone(from, 0, to, 0, bytes), (ssize_t)bytes);
    sync_it(to);
}

static void expect_codec(unsigned codec)
{
    for (unsigned i = 0; i < OWNERS; i++)
        for (uint64_t k = 0; owner[i] && k < CHUNKS; k++)
            ck_assert_uint_eq(ht_chunk_ref(ht_chunk_find(owner[i], k))->codec, codec);
}

static void expect_all(void)
{
    for (unsigned i = 0; i < OWNERS; i++) {
        if (!owner[i])
            continue;
        expect(owner[i], 0, content, BYTES);
        ht_obj_evict(owner[i]);
        expect(owner[i], 0, content, BYTES);
    }
}

static void put_owners(void)
{
    for (unsigned i = 0; i < OWNERS; i++)
        put_object(owner[i]);
}

static void begin_again(void (*how)(void))
{
    put_owners();
    how();
    for (unsigned i = 0; i < OWNERS; i++)
        owner[i] = oid[i] ? get_object(oid[i]) : NULL;
}

static void setup(void)
{
    none = asked_of = 0;
    asked = 0;
    meanwhile = NULL;
    fresh(STORE_MIB, false);
    content = malloc(BYTES);
    content_bf16(content, BYTES, 5);
    for (unsigned i = 0; i < OWNERS; i++) {
        owner[i] = object(MIB, 0);
        oid[i] = ht_obj_id(owner[i]);
    }
    put_all(owner[0], 0, content, BYTES);
    sync_it(owner[0]);
    for (unsigned i = 1; i < OWNERS; i++)
        share(owner[0], owner[i], BYTES);
}

static void teardown(void)
{
    put_owners();
    done();
    free(content);
}

/* Each place once in the figures, and its space is free once. */
TEST(all_owners_get_the_frame)
{
    uint64_t before = obj_stat(owner[0]).stored_bytes, available = stats().available_bytes;

    compress_cold();
    expect_codec(HT_CODEC_PLANES);
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
    ck_assert_uint_eq(engine_figure("recompress", "raw_bytes"), before);
    ck_assert_uint_eq(engine_figure("recompress", "saved_bytes"), before - obj_stat(owner[2]).stored_bytes);
    ck_assert_uint_eq(stats().available_bytes, available + engine_figure("recompress", "saved_bytes"));
    expect_all();
    ck_assert_int_eq(ht_store_commit(s), 0);
    begin_again(crash);
    expect_codec(HT_CODEC_PLANES);
    expect_all();
}

/* The space is free when the last owner goes, and no sooner. */
TEST(the_frame_goes_with_its_last_owner)
{
    uint64_t empty = stats().available_bytes + obj_stat(owner[0]).stored_bytes;

    compress_cold();
    for (unsigned i = 0; i < OWNERS; i++) {
        delete (owner[i]);
        owner[i] = NULL;
        ck_assert_int_eq(ht_store_commit(s), 0);
        expect_all();
    }
    ck_assert_uint_eq(stats().available_bytes, empty);
}

/* Its former twins are gone: it is still known as shared. */
TEST(the_last_owner_is_enough)
{
    for (unsigned i = 0; i < OWNERS; i += 2) {
        delete (owner[i]);
        owner[i] = NULL;
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    compress_cold();
    expect_codec(HT_CODEC_PLANES);
    expect_all();
}

/* A frame has what the owner shows that shows most, whichever that is. */
TEST_LOOP(a_cut_owner_takes_nothing_from_the_others, OWNERS)
{
    const uint32_t keep = MIB + 5000;
    struct ht_obj *cut = owner[_i];

    ck_assert_int_eq(ht_obj_truncate(cut, keep), 0);
    sync_it(cut);
    compress_cold();
    owner[_i] = NULL;
    expect_codec(HT_CODEC_PLANES);
    expect_all();
    ck_assert_uint_eq(ht_chunk_ref(ht_chunk_find(cut, 1))->codec, HT_CODEC_PLANES);
    ck_assert_int_eq(ht_obj_truncate(cut, BYTES), 0); /* what was cut off is zeros */
    uint8_t *want = test_alloc(BYTES);
    memcpy(want, content, keep);
    expect(cut, 0, want, BYTES);
}

/* An owner that may not be compressed, is new, or has something newer, keeps the content as it is for all. */
TEST_LOOP(one_owner_that_stays_keeps_all, 3)
{
    struct ht_obj *other = NULL;

    if (_i == 0)
        none = oid[1];
    compress();
    if (_i == 1) {
        other = object(MIB, 0);
        share(owner[0], other, BYTES);
    } else if (_i == 2) {
        put_all(owner[2], BYTES, content, 1); /* in its last chunk, not published */
    }
    compress();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    expect_codec(HT_CODEC_RAW);
    none = 0;
    sync_it(owner[2]);
    compress_cold();
    ck_assert_uint_ge(engine_figure("recompress", "chunks"), CHUNKS);
    expect_codec(HT_CODEC_PLANES);
    expect_all();
}

TEST(what_saves_too_little_is_read_once)
{
    content_random(content, BYTES, 1);
    put_all(owner[0], 0, content, BYTES);
    sync_it(owner[0]);
    for (unsigned i = 1; i < OWNERS; i++)
        share(owner[0], owner[i], BYTES);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "kept_raw"), CHUNKS);
    uint64_t read = stats().device_read_bytes;
    compress_cold();
    ck_assert_uint_eq(stats().device_read_bytes, read);
    expect_all();
}

/* Two owners with a rewrite reserve, on a full store: each can be written once. */
TEST(each_owner_can_still_be_rewritten)
{
    ck_assert_int_eq(ht_obj_rewrite_reserve(owner[0], BYTES), 0);
    ck_assert_int_eq(ht_obj_rewrite_reserve(owner[2], BYTES), 0);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), CHUNKS);
    struct ht_obj *rest = object(MIB, 0);
    uint8_t *block = pattern(MIB, 8);
    uint64_t at = 0;
    while (ht_obj_write(rest, at, block, MIB) == MIB)
        at += MIB;
    while (ht_obj_write(rest, at, block, HT_BLOCK_BYTES) == HT_BLOCK_BYTES)
        at += HT_BLOCK_BYTES;
    put_object(rest);
    free(block);
    uint8_t *was = test_alloc(BYTES);
    memcpy(was, content, BYTES);
    content_random(content, BYTES, 3);
    for (unsigned i = 0; i < OWNERS; i += 2) {
        put_all(owner[i], 0, content, BYTES);
        sync_it(owner[i]);
    }
    expect(owner[1], 0, was, BYTES);
    expect(owner[0], 0, content, BYTES);
    expect(owner[2], 0, content, BYTES);
}

static struct ht_obj *copy;

static void clone_one(void)
{
    share(owner[1], copy, BYTES);
}

static void delete_one(void)
{
    delete (owner[1]);
    owner[1] = NULL;
    oid[1] = 0;
}

static void rewrite_one(void)
{
    put_all(owner[1], 0, content, BYTES);
    sync_it(owner[1]);
}

TEST_LOOP(what_happens_while_the_frame_waits_wins, 3)
{
    static const struct {
        void (*change)(void);
        unsigned codec; /* of the owners that did not change */
    } cases[] = {{clone_one, HT_CODEC_RAW}, {delete_one, HT_CODEC_RAW}, {rewrite_one, HT_CODEC_RAW}};
    uint64_t available = stats().available_bytes;

    copy = object(MIB, 0);
    compress();
    asked_of = oid[2];
    meanwhile = cases[_i].change;
    compress();
    ck_assert_ptr_null(meanwhile);
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 0);
    expect_codec(cases[_i].codec);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(stats().available_bytes, available - (_i == 2 ? obj_stat(owner[1]).stored_bytes : 0));
    expect_all();
    if (_i == 0)
        expect(copy, 0, content, BYTES);
    put_object(copy);
    begin_again(crash);
    expect_all();
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), _i == 2 ? 2 * CHUNKS : CHUNKS);
    expect_all();
}

static void expect_owners(struct ht_obj *o, unsigned n, unsigned codec)
{
    for (uint64_t i = 0; i < n; i++)
        ck_assert_uint_eq(ht_chunk_ref(ht_chunk_find(o, i))->codec, codec);
    ht_obj_evict(o);
    for (uint64_t i = 0; i < n; i += 97)
        expect(o, i * SMALL, content, SMALL);
}

TEST(content_of_very_many_owners_is_compressed)
{
    unsigned n = getenv("HITRAIN_LONG") ? 100000 : 5000;

    put_owners();
    done();
    fresh(n == 5000 ? STORE_MIB : 1024, false);
    memset(owner, 0, sizeof(owner));
    struct ht_obj *first = written_object(SMALL, 0, content, SMALL);
    sync_it(first);
    uint64_t available = stats().available_bytes;
    struct ht_obj *o = with_owners_of(first, SMALL, n);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 1);
    ck_assert_uint_eq(stats().available_bytes, available + engine_figure("recompress", "saved_bytes"));
    ht_store_verify(s, true);
    expect_owners(o, n, HT_CODEC_PLANES);
    ck_assert_int_eq(ht_store_commit(s), 0);
    o = after(crash, o);
    expect_owners(o, n, HT_CODEC_PLANES);
}

/* As many owners as bytes that move may have, and one more. */
TEST_LOOP(content_of_too_many_owners_stays, 2)
{
    put_owners();
    done();
    memset(owner, 0, sizeof(owner));
    fixture_owners_max = 64;
    fresh(STORE_MIB, false);
    struct ht_obj *first = written_object(SMALL, 0, content, SMALL);
    sync_it(first);
    struct ht_obj *o = with_owners_of(first, SMALL, 63 + (unsigned)_i);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), _i ? 0 : 1);
    expect_owners(o, 63, _i ? HT_CODEC_RAW : HT_CODEC_PLANES);
    put_object(o);
    put_object(first);
    fixture_owners_max = 0;
}

/* More owners in all than a round may note: others have their turn in later rounds. */
TEST(rounds_come_to_all_shared_content)
{
    teardown();
    fixture_owners_max = 4;
    setup();
    for (unsigned i = 0; i < 40 && engine_figure("recompress", "chunks") < CHUNKS; i++)
        compress();
    expect_codec(HT_CODEC_PLANES);
    expect_all();
    fixture_owners_max = 0;
}

/* The log has no room for the records of all owners. What comes after them is compressed all the same. */
TEST(owners_without_room_in_the_log_keep_no_others_from_it)
{
    unsigned n = 1500;

    put_owners();
    done();
    memset(owner, 0, sizeof(owner));
    fresh_with_log(STORE_MIB, HT_LOG_BYTES_MIN, true);
    struct ht_obj *first = object(SMALL, 0), *later = object(SMALL, 0), *twin = object(SMALL, 0);
    put_all(first, 0, content, SMALL);
    sync_it(first);
    put_all(later, 0, &content[SMALL], SMALL);
    sync_it(later);
    share(later, twin, SMALL);
    struct ht_obj *o = with_owners_of(first, SMALL, n);
    uint64_t aside = crowd_log(n * (size_t)ht_move_record_bytes(&(struct ht_ref){0}));
    compress_cold();
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), 1);
    expect_owners(o, n, HT_CODEC_RAW);
    ck_assert_uint_eq(ht_chunk_ref(ht_chunk_find(twin, 0))->codec, HT_CODEC_PLANES);
    uint64_t read = stats().device_read_bytes;
    compress_cold();
    ck_assert_uint_eq(stats().device_read_bytes, read); /* no later round reads them again */
    ht_obj_evict(twin);
    expect(twin, 0, &content[SMALL], SMALL);
    ht_store_log_unreserve(s, aside);
    ht_store_verify(s, true);
}

/* A store in which only single blocks are free, and what keeps them apart. */
static struct ht_obj *fresh_in_crumbs(void)
{
    uint64_t n = 0;

    fresh_with_log(16, MIB, false);
    struct ht_obj *crumbs = object(SMALL, 0);
    while (ht_obj_write(crumbs, n * SMALL, content, HT_BLOCK_BYTES) == HT_BLOCK_BYTES)
        n++;
    ck_assert_int_eq(ht_obj_sync(crumbs), 0);
    for (uint64_t i = 0; i < n; i += 2)
        ck_assert_int_eq(ht_obj_punch(crumbs, i * SMALL, SMALL), 0);
    sync_it(crumbs);
    return crumbs;
}

/* The records of all owners are in one transaction: content in many pieces may have fewer owners. */
TEST_LOOP(records_of_all_owners_are_bounded, 2)
{
    enum { MOST = 8, PIECES = SMALL / HT_BLOCK_BYTES };
    unsigned n = _i ? 5 : 4;

    put_owners();
    done();
    memset(owner, 0, sizeof(owner));
    fixture_owners_max = MOST;
    struct ht_obj *crumbs = fresh_in_crumbs(), *first = object(SMALL, 0);
    put_all(first, 0, content, SMALL);
    sync_it(first);
    ck_assert_uint_eq(ht_ref_extents(&ht_chunk_find(first, 0)->pub), PIECES);
    uint64_t bytes = n * (uint64_t)ht_move_record_bytes(&ht_chunk_find(first, 0)->pub);
    ck_assert_int_eq(bytes > MOST * HT_OWNERS_RECORD_BYTES, _i);
    delete_durably(crumbs);
    struct ht_obj *o = with_owners_of(first, SMALL, n - 1);
    compress_cold();
    ck_assert_uint_eq(engine_figure("recompress", "chunks"), !_i);
    expect_owners(o, n - 1, _i ? HT_CODEC_RAW : HT_CODEC_PLANES);
    put_object(o);
    put_object(first);
    fixture_owners_max = 0;
}

/* -------------------------------------------------------------- beside others */

static _Atomic bool ended;

static void *compress_always(void *arg)
{
    (void)arg;
    while (!ended)
        ck_assert_int_eq(background_compress(s), 0);
    return NULL;
}

/* One thread changes owners and makes others; the other compresses whatever it finds. */
TEST(whichever_thread_changes_an_owner_first_wins)
{
    enum { ROUNDS = 24, EACH = 8 };
    uint8_t *mine = test_alloc(BYTES);
    uint64_t x = 12345;
    pthread_t thread;

    memcpy(mine, content, BYTES);
    ht_store_set_compress(s, may, NULL);
    ended = false;
    ck_assert_int_eq(pthread_create(&thread, NULL, compress_always, NULL), 0);
    for (unsigned i = 0; i < ROUNDS; i++) {
        uint64_t off = random_next(&x) % (BYTES - 5000), n = 1 + random_next(&x) % 5000;
        content_bf16(mine + off, n, i + 1);
        put_all(owner[1], off, mine + off, n);
        if (i % 2)
            sync_it(owner[1]);
        if (i % 3 == 0)
            ht_obj_evict(owner[i % OWNERS]);
        expect(owner[0], off, content + off, n);
        expect(owner[1], off, mine + off, n);
        if (i % EACH < EACH - 1)
            continue;
        share(owner[0], owner[1], BYTES); /* all have the same again, raw or not */
        memcpy(mine, content, BYTES);
        ck_assert_int_eq(ht_store_commit(s), 0);
        const struct timespec pause = {.tv_nsec = 1000000};
        for (unsigned ms = 0; !engine_figure("recompress", "chunks") && ms < 2000; ms++)
            nanosleep(&pause, NULL);
    }
    ended = true;
    pthread_join(thread, NULL);
    ck_assert_uint_gt(engine_figure("recompress", "chunks"), 0);
    expect_all();
    begin_again(crash);
    expect_all();
}

RUN_TESTS("shared", .setup = setup, .teardown = teardown, .timeout_s = 120)
