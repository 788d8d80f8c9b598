/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks that hold nothing any more cost no memory, however they came to that. */

#include "tests/unit/tiering/store/fixture.h"

/* Each chunk in a leaf of its own; the object needs a high table for that. */
enum { MANY = 2000, BLOCK = 4096, SLACK = 2048 };
static const uint64_t stride = 1 << 30;

static uint8_t block[BLOCK];

static void write_at(struct ht_obj *o, uint64_t i)
{
    memset(block, (int)(i % 251) + 1, BLOCK);
    put_all(o, i * stride, block, BLOCK);
}

static void punch_at(struct ht_obj *o, uint64_t i)
{
    ck_assert_int_eq(ht_obj_punch(o, i * stride, 16 * BLOCK), 0);
}

/* An object that has its extra already, and a size. */
static struct ht_obj *sparse(uint64_t scope)
{
    struct ht_obj *o = object(HT_SMALL_CHUNK_BYTES, scope);

    ck_assert_int_eq(ht_obj_truncate(o, MANY * stride), 0);
    write_at(o, 1);
    punch_at(o, 1);
    ck_assert_int_eq(ht_store_commit(s), 0);
    return o;
}

static void take_back(uint64_t scope)
{
    ck_assert_int_eq(ht_scope_abort(s, scope), 0);
}

TEST(punched_before_they_were_stored)
{
    fresh(64, false);
    struct ht_obj *o = sparse(0);
    uint64_t before = stats().meta_bytes;
    for (uint64_t i = 1; i < MANY; i++) {
        write_at(o, i);
        punch_at(o, i);
        ck_assert_uint_le(stats().meta_bytes, before + SLACK);
    }
    ck_assert_uint_eq(stats().meta_bytes, before);
}

/* Published chunks keep their memory until the record that ends them: a commit must find them again. */
TEST(punched_or_cut_off_after_they_were_stored)
{
    fresh(64, false);
    struct ht_obj *o = sparse(0);
    uint64_t before = stats().meta_bytes;
    for (unsigned way = 0; way < 3; way++) {
        for (uint64_t i = 1; i < MANY; i++)
            write_at(o, i);
        ck_assert_int_eq(ht_obj_sync(o), 0);
        ck_assert_uint_gt(stats().meta_bytes, before + MANY * 100);
        if (way == 0)
            ck_assert_int_eq(ht_obj_punch(o, 0, MANY * stride), 0);
        else
            ck_assert_int_eq(ht_obj_truncate(o, way == 1 ? 0 : stride), 0);
        ck_assert_int_eq(ht_obj_sync(o), 0);
        ck_assert_uint_eq(stats().meta_bytes, before);
        ck_assert_int_eq(ht_obj_seek(o, 0, false), -ENXIO);
    }
}

TEST(taken_back_by_an_abort)
{
    fresh(64, false);
    struct ht_obj *o = sparse(7);
    publish_scope_at_once(7);
    uint64_t before = stats().meta_bytes;
    for (uint64_t i = 1; i < MANY; i++)
        write_at(o, i);
    take_back(7);
    ck_assert_uint_eq(stats().meta_bytes, before);
    ck_assert_int_eq(ht_obj_seek(o, 0, false), -ENXIO);
    /* Its content stays. */
    write_at(o, 5);
    publish_scope_at_once(7);
    write_at(o, 6);
    take_back(7);
    ck_assert_int_eq(ht_obj_seek(o, 0, false), (int64_t)(5 * stride));
}

TEST(refused_for_want_of_space)
{
    fresh(24, false);
    struct ht_obj *o = sparse(0), *full = object(HT_CHUNK_BYTES, 0);
    uint8_t *mib = test_alloc(MIB);
    uint64_t off = 0;
    ssize_t n;
    while ((n = ht_obj_write(full, off, mib, MIB)) > 0)
        off += (uint64_t)n;
    ck_assert_int_eq(n, -ENOSPC);
    while ((n = ht_obj_write(full, off, block, BLOCK)) > 0)
        off += (uint64_t)n;
    uint64_t before = stats().meta_bytes;
    for (uint64_t i = 1; i < MANY; i++)
        ck_assert_int_eq(ht_obj_write(o, i * stride, block, BLOCK), -ENOSPC);
    ck_assert_uint_eq(stats().meta_bytes, before);
}

TEST(set_aside_and_given_back)
{
    fresh(256, false);
    struct ht_obj *o = sparse(0);
    uint64_t before = stats().meta_bytes;
    for (uint64_t i = 1; i < 200; i++)
        ck_assert_int_eq(ht_obj_prealloc(o, (MANY * stride) + i * stride, BLOCK), 0);
    ck_assert_uint_gt(stats().meta_bytes, before + 200 * 100);
    ck_assert_int_eq(ht_obj_punch(o, MANY * stride, 200 * stride), 0);
    ck_assert_uint_eq(stats().meta_bytes, before);
}

TEST(pinned_and_found_to_be_holes)
{
    fresh(64, false);
    struct ht_obj *o = sparse(0);
    uint64_t before = stats().meta_bytes;
    for (uint64_t i = 1; i < MANY; i++) {
        struct ht_batch_pin l = {.store = s, .count = 1};
        l.chunk[0] = (struct ht_batch_pin_chunk){
            .obj = o, .index = i * stride / HT_SMALL_CHUNK_BYTES, .mode = HT_BATCH_PIN_READ};
        pin_now(&l);
        unpin(&l, 0);
    }
    ck_assert_uint_le(stats().meta_bytes, before + SLACK);
}

TEST(replayed_and_ended_by_a_later_record)
{
    fresh(64, false);
    struct ht_obj *o = sparse(0);
    uint64_t before = stats().meta_bytes;
    for (uint64_t i = 1; i < MANY; i++)
        write_at(o, i);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_int_eq(ht_obj_truncate(o, 0), 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    crash();
    ck_assert_uint_le(stats().meta_bytes, before + SLACK);
}

/* ------------------------------------------------------------------ threads */

enum { THREADS = 6, SPOTS = 24, SCOPE = 9, SHARES_BYTES_MAX = 8192 };
static struct ht_obj *shared[3]; /* two outside, one below a root */
static atomic_bool stop;
static atomic_uint failures;

static void note(bool ok)
{
    if (!ok)
        atomic_fetch_add(&failures, 1);
}

static uint32_t next_random(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*seed >> 33);
}

/* A block holds one byte value: all bytes of one read are from one write, or zeros. */
static bool is_one_value(const uint8_t *p)
{
    return !memcmp(p, p + 1, BLOCK - 1);
}

static void one_call(uint64_t *seed)
{
    uint8_t buf[BLOCK];
    struct ht_obj *o = shared[next_random(seed) % 3];
    uint64_t off = (next_random(seed) % SPOTS) * stride;
    ssize_t n;

    switch (next_random(seed) % 12) {
    case 0:
    case 1:
    case 2:
        memset(buf, (int)(next_random(seed) % 255), BLOCK);
        n = ht_obj_write(o, off, buf, BLOCK);
        note(n == BLOCK || n == -ENOSPC);
        break;
    case 3:
    case 4:
        n = ht_obj_read(o, off, buf, BLOCK);
        note(n == 0 || (n == BLOCK && is_one_value(buf)));
        break;
    case 5:
    case 6:
        note(ht_obj_punch(o, off, (next_random(seed) % 4 + 1) * stride) == 0);
        break;
    case 7:
        note(ht_obj_truncate(o, off) == 0);
        break;
    case 8:
        n = ht_obj_clone(shared[0], off, shared[1], off, stride);
        note(n >= 0 || n == -ENOSPC || n == -ESTALE);
        break;
    case 9:
        ht_obj_evict(o);
        break;
    case 10:
        (void)(ht_obj_prefetch(o) == 0);
        break;
    default:
        note(o == shared[2] || ht_obj_writeback(o) == 0);
    }
}

static void *call_on(void *arg)
{
    uint64_t seed = (uintptr_t)arg;

    while (!atomic_load(&stop))
        one_call(&seed);
    return NULL;
}

TEST(all_at_once)
{
    pthread_t thread[THREADS];
    unsigned rounds = getenv("HITRAIN_LONG") ? 300 : 60;

    fresh(64, true);
    for (unsigned i = 0; i < 3; i++)
        shared[i] = sparse(i == 2 ? SCOPE : 0);
    publish_scope_at_once(SCOPE);
    uint64_t before = stats().meta_bytes;
    atomic_store(&stop, false);
    for (uintptr_t i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, call_on, (void *)(i + 1)), 0);
    for (unsigned i = 0; i < rounds; i++) {
        ck_assert_int_eq(ht_store_commit(s), 0);
        if (i % 3 == 0)
            take_back(SCOPE);
        else if (i % 3 == 1)
            publish_scope_at_once(SCOPE);
        if (i % 5 == 0)
            ck_assert_int_eq(background_scrub(s), 0);
    }
    atomic_store(&stop, true);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    ck_assert_uint_eq(atomic_load(&failures), 0);
    for (unsigned i = 0; i < 3; i++)
        ck_assert_int_eq(ht_obj_truncate(shared[i], 0), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    publish_scope_at_once(SCOPE);
    ck_assert_uint_le(stats().meta_bytes, before + SHARES_BYTES_MAX);
}

RUN_TESTS("holes", .timeout_s = 300, .teardown = fixture_end)
