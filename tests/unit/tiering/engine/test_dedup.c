/* SPDX-License-Identifier: Apache-2.0 */
/* test_dedup.c - content that is stored twice is stored once, and nothing else about it changes. */

#include "tests/unit/tiering/engine/collision.h"
#include "tests/unit/tiering/engine/dedup.h"
#include "tests/unit/tiering/store/fixture.h"
#include "tiering/api/background.h"
#include "tiering/base/fault.h"
#include "tiering/base/hash.h"

enum { SMALL = HT_SMALL_CHUNK_BYTES, SCOPE = 9, WAIT_MS_MAX = 60000 };

TEST_LOOP(copies_take_no_space_and_keep_their_bytes, 2)
{
    enum { N = 3 * MIB + 12345 };
    bool small = _i;

    fresh(64, false);
    uint64_t before = free_bytes();
    uint8_t *p = noise(N, 1);
    struct ht_obj *a = synced_object(small ? SMALL : HT_CHUNK_BYTES, 0, p, N);
    uint64_t once = before - free_bytes();
    struct ht_obj *b = synced_object(small ? SMALL : HT_CHUNK_BYTES, 0, p, N);
    uint64_t oid[2] = {ht_obj_id(a), ht_obj_id(b)};
    struct dedup_figures st = dedup();
    ck_assert_uint_eq(st.shared_bytes, once);
    ck_assert_uint_eq(st.compared_bytes, 2 * N);
    ck_assert_uint_eq(st.different + st.skipped, 0);
    ck_assert_uint_eq(before - free_bytes(), once);
    ck_assert_uint_eq(obj_stat(b).stored_bytes, obj_stat(a).stored_bytes);
    expect_stored(a, p, N);
    expect_stored(b, p, N);
    ck_assert_uint_eq(dedup().compared_bytes, 0); /* nothing is left to do */
    remount();
    ck_assert_uint_eq(before - free_bytes(), once);
    ck_assert_uint_eq(dedup().compared_bytes, 0);
    for (unsigned i = 0; i < 2; i++) {
        a = get_object(oid[i]);
        expect_stored(a, p, N);
        delete_durably(a);
        ck_assert_uint_eq(before - free_bytes(), i ? 0 : once);
    }
}

/* Each of the two leaves or changes first, and other content takes whatever is free then. */
TEST_LOOP(the_bytes_stay_for_the_last_owner, 4)
{
    fresh(16, false);
    uint8_t *p = noise(2 * MIB, 1);
    struct ht_obj *o[2] = {synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB), synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB)};
    ck_assert_uint_eq(dedup().shared_bytes, 2 * MIB);
    struct ht_obj *leaves = o[_i & 1], *stays = o[!(_i & 1)];
    if (_i & 2) {
        put_all(leaves, MIB / 2, (const uint8_t *)"mine", 4);
        put_synced(leaves, MIB + MIB / 2, (const uint8_t *)"mine", 4);
    } else {
        delete_durably(leaves);
    }
    (void)use_all_space();
    expect_stored(stays, p, 2 * MIB);
    stays = after(remount, stays);
    expect_stored(stays, p, 2 * MIB);
}

/* A crash before anything was synced: both have their own bytes, or share them. */
TEST_LOOP(a_crash_leaves_either_state, 2)
{
    bool synced = _i;

    fresh(16, false);
    uint8_t *p = noise(2 * MIB, 1);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB), *b = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB);
    uint64_t oid[2] = {ht_obj_id(a), ht_obj_id(b)}, twice = free_bytes();
    ck_assert_int_eq(background_dedup(s), 0);
    if (synced)
        ck_assert_int_eq(ht_store_commit(s), 0);
    crash();
    ck_assert_uint_eq(free_bytes(), synced ? twice + 2 * MIB : twice);
    for (unsigned i = 0; i < 2; i++) {
        a = get_object(oid[i]);
        expect_stored(a, p, 2 * MIB);
    }
}

/* Clones and other copies meet: content of several owners stays, and one pass ends with one place. */
TEST(clones_and_copies_meet_in_one_place)
{
    fresh(32, false);
    uint64_t before = free_bytes();
    uint8_t *p = noise(2 * MIB, 1);
    struct ht_obj *o[6];
    for (unsigned i = 0; i < HT_ARRAY_SIZE(o); i++) {
        if (i % 2) {
            o[i] = object(SMALL, 0);
            ck_assert_int_eq(ht_obj_clone(o[i - 1], 0, o[i], 0, HT_FILE_BYTES_MAX), 2 * MIB);
            ck_assert_int_eq(ht_obj_sync(o[i]), 0);
        } else {
            o[i] = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB);
        }
    }
    ck_assert_uint_eq(before - free_bytes(), 6 * MIB);
    for (unsigned passes = 0; before - free_bytes() > 2 * MIB; passes++) {
        ck_assert_uint_lt(passes, 3);
        ck_assert_uint_gt(dedup().shared_bytes, 0);
    }
    for (unsigned i = 0; i < HT_ARRAY_SIZE(o); i++) {
        expect_stored(o[i], p, 2 * MIB);
        delete_durably(o[i]);
    }
    ck_assert_uint_eq(free_bytes(), before);
}

/* Chunks of one object, and a truncated one: it keeps its length. */
TEST(chunks_of_one_object_and_cut_ones_are_the_same)
{
    fresh(32, false);
    uint8_t *p = noise(4 * MIB, 1);
    memcpy(p + MIB, p, MIB);
    memcpy(p + 3 * MIB, p, MIB);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 4 * MIB), *b = synced_object(HT_CHUNK_BYTES, 0, p, MIB);
    ck_assert_int_eq(ht_obj_truncate(b, 1000), 0);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    ck_assert_uint_eq(dedup().shared_bytes, 3 * MIB);
    expect_stored(a, p, 4 * MIB);
    ck_assert_uint_eq(ht_obj_size(b), 1000);
    expect_stored(b, p, 1000);
    uint8_t *zeros = test_alloc(MIB);
    ck_assert_int_eq(ht_obj_truncate(b, MIB), 0);
    expect(b, 1000, zeros, MIB - 1000);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    expect_stored(a, p, 4 * MIB);
}

TEST(chunks_of_zeros_become_holes)
{
    fresh(32, false);
    uint64_t before = free_bytes();
    uint8_t *p = noise(4 * MIB, 1);
    memset(p + MIB, 0, 2 * MIB);
    p[3 * MIB - 1] = 1; /* the third chunk has one byte */
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 4 * MIB);
    struct dedup_figures st = dedup();
    ck_assert_uint_eq(st.hole_bytes, MIB);
    ck_assert_uint_eq(st.shared_bytes + st.different + st.skipped, 0);
    ck_assert_uint_eq(before - free_bytes(), 3 * MIB);
    ck_assert_uint_eq(obj_stat(a).stored_bytes, 3 * MIB);
    ck_assert_int_eq(ht_obj_seek(a, 0, true), MIB);
    ck_assert_int_eq(ht_obj_seek(a, MIB, false), 2 * MIB);
    expect(a, 0, p, 4 * MIB);
    expect_stored(a, p, 4 * MIB);
    a = after(remount, a);
    expect_stored(a, p, 4 * MIB);
    memcpy(p + MIB + 5, "here", 4);
    put_synced(a, MIB + 5, (const uint8_t *)"here", 4);
    expect_stored(a, p, 4 * MIB);
    ck_assert_uint_eq(before - free_bytes(), 3 * MIB + 4096);
    delete_durably(a);
    ck_assert_uint_eq(free_bytes(), before);
}

static void collide(uint8_t *a, uint8_t *b, size_t n, uint64_t seed)
{
    uint64_t word[2][COLLISION_WORDS];

    collision_words(seed, word[0], word[1]);
    memcpy(b, a, n);
    for (unsigned k = 0; k < COLLISION_WORDS; k++) {
        memcpy(a + collision_at(k), &word[0][k], 8);
        memcpy(b + collision_at(k), &word[1][k], 8);
    }
}

TEST(content_with_the_same_checksum_is_compared)
{
    fresh(16, false);
    uint8_t *p = noise(MIB, 1), *q = test_alloc(MIB);
    uint64_t salt = ht_store_layout(s)->salt;
    collide(p, q, MIB, salt);
    ck_assert_uint_eq(ht_hash64(p, MIB, salt), ht_hash64(q, MIB, salt));
    ck_assert_int_ne(memcmp(p, q, MIB), 0);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, MIB), *b = synced_object(HT_CHUNK_BYTES, 0, q, MIB);
    struct dedup_figures st = dedup();
    ck_assert_uint_eq(st.different, 1);
    ck_assert_uint_eq(st.shared_bytes, 0);
    expect_stored(a, p, MIB);
    expect_stored(b, q, MIB);
}

/* Those whose next rewrite has its space, that are newer in memory, mapped, scratch, or of other chunks. */
TEST_LOOP(some_copies_stay_copies, 5)
{
    fixture_shm_bytes = 4 * MIB;
    fresh(32, false);
    uint8_t *p = noise(MIB, 1);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, MIB), *b;
    struct ht_obj_attr scratch = {
        .oid = ht_store_new_id(s), .chunk_bytes = HT_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH};
    int fd;
    switch (_i) {
    case 0:
        b = synced_object(HT_CHUNK_BYTES, 0, p, MIB);
        ck_assert_int_eq(ht_obj_rewrite_reserve(b, MIB), 0);
        break;
    case 1:
        b = synced_object(HT_CHUNK_BYTES, 0, p, MIB);
        put_all(b, 0, p, 1);
        break;
    case 2:
        b = synced_object(HT_CHUNK_BYTES, 0, p, MIB);
        ck_assert_int_eq(ht_obj_shm_open_for(b, 0, &fd), 0);
        break;
    case 3:
        ck_assert_int_eq(ht_obj_create(s, &scratch, &b), 0);
        put_all(b, 0, p, MIB);
        ck_assert_int_ge(background_clean(s), 0);
        break;
    default:
        b = synced_object(SMALL, 0, p, MIB);
    }
    ck_assert_int_eq(background_dedup(s), 0);
    ck_assert_uint_eq(figures().compared_bytes, 0);
    ck_assert_uint_eq(figures().shared_bytes, 0);
    expect(a, 0, p, MIB);
    expect(b, 0, p, MIB);
    if (_i == 2)
        ht_obj_shm_close(b);
    ck_assert_int_eq(ht_store_commit(s), 0);
    done();
    fixture_shm_bytes = 0;
}

/* Whatever became of either chunk since both were read. */
TEST_LOOP(a_pair_that_has_changed_is_left_alone, 8)
{
    fresh(32, false);
    uint8_t *p = noise(MIB, 1), *q = noise(MIB, 2);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, MIB), *b = synced_object(HT_CHUNK_BYTES, 0, p, MIB);
    struct ht_sharer pair = {name(a), name(b)};
    struct ht_obj *changed = _i & 1 ? a : b;
    const uint8_t *now = q;
    switch (_i / 2) {
    case 0:
        put_synced(changed, 0, q, MIB);
        break;
    case 1: /* the same bytes again, elsewhere */
        put_synced(changed, 0, p, MIB);
        now = p;
        break;
    case 2:
        ck_assert_int_eq(ht_obj_truncate(changed, 0), 0);
        put_synced(changed, 0, q, MIB);
        break;
    default:
        delete (changed);
        now = NULL;
    }
    uint64_t before = free_bytes(), ended = s->frees.tx_count;
    ck_assert_int_eq(ht_chunks_share(s, &pair, 1), 0);
    ck_assert_int_eq(pair.rc, -ESTALE);
    ck_assert_uint_eq(s->frees.tx_count, ended); /* none was begun for it */
    ck_assert_uint_eq(free_bytes(), before);
    expect_stored(changed == a ? b : a, p, MIB);
    if (now)
        expect_stored(changed, now, MIB);
    ck_assert_int_eq(ht_store_commit(s), 0);
}

/* The commit of a scope stays whole: what it shares is what it had. */
TEST_LOOP(an_open_step_neither_gains_nor_loses, 2)
{
    bool abort_it = _i;

    fresh(32, false);
    uint8_t *p = noise(2 * MIB, 1), *q = noise(MIB, 2);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB), *b = object(HT_CHUNK_BYTES, SCOPE),
                  *open = object(HT_CHUNK_BYTES, SCOPE);
    put_all(b, 0, p, 2 * MIB);
    put_all(open, 0, p, 2 * MIB);
    publish_scope(SCOPE);
    put_all(open, 0, q, MIB); /* unpublished */
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    ck_assert_uint_eq(dedup().shared_bytes, 2 * MIB); /* a and b */
    if (abort_it)
        ck_assert_int_eq(ht_scope_abort(s, SCOPE), 0);
    else
        publish_scope(SCOPE);
    expect_stored(a, p, 2 * MIB);
    expect_stored(b, p, 2 * MIB);
    expect_stored(open, abort_it ? p : q, MIB);
    expect(open, MIB, p + MIB, MIB);
    ck_assert_uint_eq(dedup().shared_bytes, abort_it ? 2 * MIB : MIB); /* now it takes part */
    expect_stored(open, abort_it ? p : q, MIB);
}

static void synced_pair(uint32_t chunk_bytes, const uint8_t *p, const uint8_t *q, size_t n)
{
    (void)synced_object(chunk_bytes, 0, p, n);
    (void)synced_object(chunk_bytes, 0, q, n);
}

static unsigned commit_ms = 10;

static void mount_for_dedup(uint64_t index_bytes, bool threads)
{
    unmount_store();
    mount_as(.no_threads = !threads, .commit_ms = commit_ms, .dedup = threads, .background_rate_bytes = 1ull << 40,
             .dedup_index_bytes = index_bytes);
}

TEST(a_small_index_finds_all_in_parts)
{
    enum { N = 400 };
    struct ht_obj *o[N];

    fresh(64, false);
    mount_for_dedup(1, false); /* 64 notes */
    for (uint32_t i = 0; i < N; i++)
        o[i] = synced_object(SMALL, 0, noise(8192, i / 4), 8192);
    ck_assert_uint_eq(dedup().shared_bytes, N / 4 * 3 * 8192);
    for (uint32_t i = 0; i < N; i++)
        expect_stored(o[i], noise(8192, i / 4), 8192);
}

/*
 * Very many copies of one content: all become owners of one place, and leave it again. They come in
 * parts, so that a small store has room for a hundred thousand.
 */
TEST(thousands_of_owners_of_one_chunk)
{
    enum { N = 5000, N_LONG = 100000 };
    static struct ht_obj *o[N_LONG];
    static uint64_t oid[N_LONG];
    unsigned n = getenv("HITRAIN_LONG") ? N_LONG : N;

    fresh(getenv("HITRAIN_LONG") ? 1024 : 64, false);
    uint64_t before = free_bytes();
    uint8_t *p = noise(4096, 1);
    for (unsigned i = 0; i < n; i++) {
        o[i] = object(SMALL, 0);
        oid[i] = ht_obj_id(o[i]);
        put_all(o[i], 0, p, 4096);
        if ((i + 1) % N)
            continue;
        ck_assert_int_eq(ht_store_commit(s), 0);
        for (unsigned passes = 0; before - free_bytes() > 4096; passes++) {
            ck_assert_uint_lt(passes, i < N ? 1 : 3); /* the copy with the owners may be met last */
            ck_assert_uint_gt(dedup().shared_bytes, 0);
        }
    }
    ck_assert_uint_eq(before - free_bytes(), 4096);
    remount();
    ck_assert_uint_eq(before - free_bytes(), 4096);
    for (unsigned i = 0; i < n; i++) {
        o[i] = get_object(oid[i]);
        if (i % 97 == 0)
            expect_stored(o[i], p, 4096);
        if (i + 1 < n)
            delete (o[i]);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(before - free_bytes(), 4096);
    expect_stored(o[n - 1], p, 4096);
    delete (o[n - 1]);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(free_bytes(), before);
}

/* A device that fails a read, and bytes that are not those of the checksum: both stay as they are. */
TEST_LOOP(what_cannot_be_read_is_skipped, 2)
{
    static const enum ht_fault_point points[] = {HT_FAULT_IO_READ, HT_FAULT_STORE_CHECKSUM};

    fresh(16, false);
    uint8_t *p = noise(MIB, 1);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, MIB), *b = synced_object(HT_CHUNK_BYTES, 0, p, MIB);
    for (unsigned nth = 1; nth <= 2; nth++) {
        ht_fault_arm(points[_i], nth, false);
        struct dedup_figures st = dedup();
        ck_assert_uint_ge(ht_fault_passed(points[_i]), nth);
        ht_fault_disarm_all();
        ck_assert_uint_eq(st.skipped, 1);
        ck_assert_uint_eq(st.shared_bytes, 0);
    }
    ck_assert_uint_eq(stats().checksum_errors + stats().read_errors, 0);
    ck_assert_uint_eq(dedup().shared_bytes, MIB);
    expect_stored(a, p, MIB);
    expect_stored(b, p, MIB);
}

/* It needs no space to begin. */
TEST(a_full_store_gets_space)
{
    fresh(16, false);
    uint8_t *p = noise(2 * MIB, 1);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB), *b = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB);
    (void)use_all_space();
    ck_assert_uint_lt(stats().available_bytes, SMALL);
    ck_assert_uint_eq(dedup().shared_bytes, 2 * MIB);
    ck_assert_uint_ge(stats().available_bytes, 2 * MIB);
    expect_stored(a, p, 2 * MIB);
    expect_stored(b, p, 2 * MIB);
}

static void wait_for_shared(uint64_t bytes)
{
    WAIT_FOR(figures().shared_bytes >= bytes);
    ck_assert_uint_eq(figures().shared_bytes, bytes);
}

TEST(the_engine_finds_them_by_itself)
{
    fresh(32, false);
    ck_assert_uint_eq(engine("dedup").state, HT_BACKGROUND_OFF);
    uint8_t *p = noise(2 * MIB, 1);
    synced_pair(HT_CHUNK_BYTES, p, p, 2 * MIB);
    mount_for_dedup(0, true);
    wait_for_shared(2 * MIB); /* from before the mount */
    ck_assert_int_eq(ht_store_background_pause(s, "dedup"), 0);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, MIB);
    usleep(300000);
    ck_assert_uint_eq(figures().shared_bytes, 2 * MIB);
    ck_assert_uint_eq(engine("dedup").state, HT_BACKGROUND_PAUSED);
    ck_assert_int_eq(ht_store_background_resume(s, NULL), 0);
    wait_for_shared(3 * MIB);
    expect_stored(a, p, MIB);
    ck_assert_uint_gt(engine("dedup").bytes, 0);
    ck_assert_int_eq(ht_store_background_pause(s, "nothing"), -ENOENT);
}

/* The commit period is an hour. */
TEST_LOOP(the_first_pass_begins_when_reserves_are_complete, 2)
{
    fresh(32, false);
    uint8_t *p = noise(2 * MIB, 1);
    (void)synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB);
    struct ht_obj *b = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB);
    uint64_t oid = ht_obj_id(b);
    commit_ms = 3600000;
    mount_for_dedup(0, true);
    b = get_object(oid);
    if (_i)
        ck_assert_int_eq(ht_obj_rewrite_reserve(b, 2 * MIB), 0);
    ht_store_reserves_complete(s);
    WAIT_FOR(figures().passes > 0);
    ck_assert_uint_eq(figures().passes, 1);
    ck_assert_uint_eq(figures().shared_bytes, _i ? 0 : 2 * MIB);
    expect_stored(b, p, 2 * MIB);
}

/* A step ends after its bytes (0), or at its time (1): then a device that takes 6 ms serves one pair. */
TEST_LOOP(a_step_keeps_to_its_budget, 2)
{
    enum { N = 16, LIMIT = 4 * SMALL };
    bool slow = _i;
    uint64_t most = 0;

    fresh(32, false);
    uint8_t *p = noise(N * SMALL, 1);
    synced_pair(SMALL, p, p, N * SMALL);
    ht_store_reserves_complete(s);
    dev_set_delay(dev, slow ? 6 : 0);
    for (unsigned i = 0; i < 100 && figures().shared_bytes < N * SMALL; i++) {
        struct ht_budget budget = {.most_bytes = slow ? UINT64_MAX : LIMIT,
                                   .until_ns = slow ? ht_now_ns() + 10000000 : UINT64_MAX};
        ck_assert_int_eq(ht_dedup_engine.step(s, &budget), HT_STEP_WORKED);
        most = ht_max_u64(most, budget.bytes);
    }
    dev_set_delay(dev, 0);
    ck_assert_uint_eq(figures().shared_bytes, N * SMALL);
    ck_assert_uint_le(most, slow ? 2 * SMALL : LIMIT);
}

/* A checksum that is wrong, or the same for different bytes. */
TEST_LOOP(a_comparison_in_vain_is_not_repeated, 2)
{
    fresh(32, false);
    uint8_t *p = noise(MIB, 1), *q = test_alloc(MIB);
    memcpy(q, p, MIB);
    if (_i)
        collide(p, q, MIB, ht_store_layout(s)->salt);
    synced_pair(HT_CHUNK_BYTES, p, q, MIB);
    if (!_i)
        ht_fault_arm(HT_FAULT_STORE_CHECKSUM, 1, true);
    mount_for_dedup(0, true);
    WAIT_FOR(figures().different + figures().skipped + figures().shared_bytes > 0);
    /* Other content is written until the engine has made three passes more. */
    struct ht_obj *o = object(SMALL, 0);
    uint64_t end = figures().passes + 3;
    for (unsigned ms = 0; ms < WAIT_MS_MAX && figures().passes < end; ms++) {
        put_synced(o, 0, (const uint8_t *)&ms, sizeof(ms));
        usleep(1000);
    }
    ck_assert_uint_ge(figures().passes, end);
    ht_fault_disarm_all();
    ck_assert_uint_eq(figures().different, _i);
    ck_assert_uint_eq(figures().skipped, _i ? 0 : 2);
    ck_assert_uint_eq(figures().compared_bytes, 2 * MIB);
    ck_assert_uint_eq(figures().shared_bytes, 0);
}

/* More pairs than wait at once: they share in few transactions, and nothing waits for a pair. */
TEST(a_pass_shares_thousands_of_pairs)
{
    enum { N = 3000 };

    fresh(64, false);
    uint8_t *p = noise(2 * N * (size_t)4096, 1);
    for (unsigned i = 0; i < N; i++)
        memcpy(p + (size_t)(N + i) * 4096, p + (size_t)i * 4096, 4096);
    struct ht_obj *o = object(SMALL, 0);
    for (uint64_t i = 0; i < 2 * N; i++)
        put_all(o, i * SMALL, p + i * 4096, 4096);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    commit_ms = 3600000; /* until the next pass */
    mount_for_dedup(0, true);
    uint64_t transactions = stats().log.groups;
    ht_store_reserves_complete(s);
    wait_for_shared((uint64_t)N * 4096);
    ck_assert_uint_le(figures().passes, 1); /* all in the first one */
    ck_assert_uint_lt(stats().log.groups - transactions, N / 8);
}

/* ----------------------------------------------------------- beside others */

static _Atomic bool over;

struct writer {
    pthread_t thread;
    struct ht_obj *o;
    uint64_t seed, counts;
};

/* Each chunk is of one of four contents, all the time: of another one it would be torn. */
static void *write_main(void *arg)
{
    struct writer *w = arg;
    uint8_t *content[4], *got = test_alloc(SMALL);

    for (unsigned k = 0; k < 4; k++)
        content[k] = noise(SMALL, k);
    memset(content[3], 0, SMALL);
    for (; !over; w->counts++) {
        unsigned r = (unsigned)(w->seed = w->seed * 6364136223846793005ull + 1) >> 16;
        uint64_t at = (uint64_t)(r % 16) * SMALL;
        if (r % 13 == 0)
            ck_assert_int_eq(ht_obj_truncate(w->o, at), 0);
        else if (r % 3)
            ck_assert_int_eq(ht_obj_write(w->o, at, content[r / 64 % 4], SMALL), SMALL);
        if (r % 5 == 0)
            ck_assert_int_eq(ht_obj_sync(w->o), 0);
        if (r % 7 == 0)
            ht_obj_evict(w->o);
        ssize_t n = ht_obj_read(w->o, at, got, SMALL);
        ck_assert(n == 0 || n == SMALL);
        bool known = !n;
        for (unsigned k = 0; k < 4; k++)
            known |= memcmp(got, content[k], SMALL) == 0;
        ck_assert(known);
        if (r % 2)
            usleep(r % 2000);
    }
    return NULL;
}

TEST(writers_readers_and_truncations_beside_it_lose_nothing)
{
    enum { N = 3, MS = 1500 };
    struct writer w[N];

    fresh(32, false);
    uint64_t before = free_bytes();
    unmount_store();
    mount_with(true, false);
    over = false;
    for (unsigned i = 0; i < N; i++) {
        w[i] = (struct writer){.o = object(SMALL, 0), .seed = i};
        ck_assert_int_eq(pthread_create(&w[i].thread, NULL, write_main, &w[i]), 0);
    }
    for (uint64_t end = ht_now_ns() + MS * 1000000ull; ht_now_ns() < end || figures().shared_bytes < 4 * SMALL;) {
        ck_assert_int_eq(background_dedup(s), 0);
        ck_assert_uint_lt(ht_now_ns(), end + 60000 * 1000000ull);
    }
    over = true;
    for (unsigned i = 0; i < N; i++) {
        pthread_join(w[i].thread, NULL);
        ck_assert_uint_gt(w[i].counts, 0);
        ck_assert_int_eq(ht_obj_sync(w[i].o), 0);
    }
    ck_assert_int_eq(background_dedup(s), 0);
    ht_store_verify(s, false);
    for (unsigned i = 0; i < N; i++)
        delete (w[i].o);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(free_bytes(), before);
}

RUN_TESTS("dedup", .timeout_s = 300, .teardown = fixture_end)
