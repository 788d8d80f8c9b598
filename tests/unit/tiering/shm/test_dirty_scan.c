/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commit timer's scan of shared memory: bounded each time, complete, and rare where
 * nothing changes. Its clock is the test's.
 */
#include <sched.h>
#include <sys/mman.h>

#include "tiering/object/object.h"
#include "tiering/shm/shm.h"

#include "tests/unit/tiering/store/fixture.h"

enum { SLICE = 16 * MIB, SIZE = SLICE + 2 * MIB, PERIOD_S = 5, SECOND = 1000000000 };

static struct ht_obj *obj;
static uint8_t *memory;
static uint64_t now_s, breaks;

static void start(size_t size)
{
    int fd;

    fixture_shm_bytes = 24 * MIB;
    fresh(128, false);
    now_s = 1000;
    breaks = 0;
    obj = object(HT_CHUNK_BYTES, 0);
    uint8_t *p = pattern(size, 1);
    put_synced(obj, 0, p, size);
    ck_assert_int_eq(ht_obj_shm_open_for(obj, 0, &fd), 0);
    ck_assert_int_eq(ht_obj_shm_expect_stores(obj), 0);
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(memory, MAP_FAILED);
}

static void end(size_t size)
{
    munmap(memory, size);
    done();
}

static void take_a_break(struct ht_store *store)
{
    ck_assert_ptr_eq(store, s);
    breaks++;
}

/* Scans one period later and returns the number of slices. Without time there is one. */
static unsigned scan(bool hurried)
{
    now_s += PERIOD_S;
    struct ht_shm_scan l = {(uint64_t)PERIOD_S * SECOND, now_s * SECOND, hurried ? 0 : UINT64_MAX, take_a_break, 0};
    ck_assert_int_eq(ht_shm_scan(s, &l), 0);
    return l.slices;
}

static bool is_dirty(void)
{
    return obj_stat(obj).dirty_bytes;
}

TEST(a_scan_goes_on_where_the_last_one_ended)
{
    start(SIZE);
    memory[SLICE + 5] ^= 1;
    ck_assert_uint_eq(scan(true), 1);
    ck_assert(!is_dirty());
    ck_assert_uint_eq(scan(true), 1);
    ck_assert(is_dirty());
    ck_assert_uint_eq(scan(false), 2);
    ck_assert_uint_eq(breaks, 4);
    ht_obj_shm_close(obj);
    end(SIZE);
}

TEST(files_take_turns)
{
    int fd;

    start(SIZE);
    struct ht_obj *other = synced_object(HT_CHUNK_BYTES, 0, (const uint8_t *)"abc", 3);
    ck_assert_int_eq(ht_obj_shm_open_for(other, 0, &fd), 0);
    ck_assert_int_eq(ht_obj_shm_expect_stores(other), 0);
    ck_assert_int_eq(pwrite(fd, "x", 1, 0), 1);
    unsigned looks = 0;
    for (; !obj_stat(other).dirty_bytes; looks++)
        ck_assert_uint_eq(scan(true), 1);
    ck_assert_uint_eq(looks, 3);
    ht_obj_shm_close(other);
    put_object(other);
    ht_obj_shm_close(obj);
    end(SIZE);
}

TEST(what_is_back_is_looked_at_at_once_and_whole)
{
    start(SIZE);
    memory[SLICE + 5] ^= 1;
    ht_obj_shm_close(obj);
    ck_assert_uint_eq(scan(true), 0);
    ck_assert(is_dirty());
    ck_assert_uint_eq(breaks, 2);
    end(SIZE);
}

/* Seconds until the next change is found. */
static uint64_t find(void)
{
    uint64_t since = now_s;

    memory[7]++;
    while (!is_dirty())
        scan(false);
    ck_assert_int_eq(ht_obj_sync(obj), 0);
    return now_s - since;
}

TEST(where_nothing_changes_looks_get_rare)
{
    unsigned slices = 0;

    start(MIB);
    for (unsigned i = 0; i < 3600 / PERIOD_S; i++)
        slices += scan(false);
    ck_assert_uint_ge(slices, 3600 / 60);
    ck_assert_uint_le(slices, 3600 / 60 + 6);
    ck_assert_uint_le(find(), 60);
    for (unsigned i = 0; i < 10; i++) /* a mapping that changes is scanned as often as before */
        ck_assert_uint_eq(find(), PERIOD_S);
    ht_obj_shm_close(obj);
    end(MIB);
}

TEST(a_change_that_another_finds_ends_the_pause)
{
    start(MIB);
    for (unsigned i = 0; i < 3600 / PERIOD_S; i++)
        scan(false);
    memory[7]++;
    ck_assert_int_eq(ht_obj_sync(obj), 0);
    ck_assert_uint_eq(find(), PERIOD_S);
    ht_obj_shm_close(obj);
    end(MIB);
}

static atomic_bool over;

static void *scan_always(void *arg)
{
    while (!over)
        ck_assert_int_eq(ht_obj_shm_scan(obj), 0);
    return arg;
}

/*
 * Each scan that finds no program with the memory gives the space of its stores back. The next program takes it again.
 */
TEST(a_program_that_may_store_has_space_whenever_a_scan_ends)
{
    unsigned rounds = getenv("HITRAIN_LONG") ? 2000 : 200;
    pthread_t thread;

    start(4096);
    over = false;
    ck_assert_int_eq(pthread_create(&thread, NULL, scan_always, NULL), 0);
    for (unsigned i = 0; i < rounds; i++) {
        ck_assert_int_eq(ht_obj_shm_expect_stores(obj), 0);
        ht_store_lock(s);
        ck_assert(obj->extra->may_be_dirty && obj->extra->rewrite_reserve_blocks && obj->extra->shm_reserve);
        ht_store_unlock(s);
        ht_obj_shm_expect_no_stores(obj);
        for (bool dirty = true; dirty;) {
            ht_store_lock(s);
            dirty = obj->extra->may_be_dirty;
            ht_store_unlock(s);
            sched_yield(); /* the scan takes the lock */
        }
    }
    over = true;
    pthread_join(thread, NULL);
    ht_obj_shm_close(obj);
    end(4096);
}

RUN_TESTS("dirty_scan", .timeout_s = 60)
