/* SPDX-License-Identifier: Apache-2.0 */
/* A share that the DRAM tier lends: it grows for files that are opened, and the tier has it back after them. */
#include "tests/unit/tiering/store/fixture.h"
#include "tiering/cache/arena.h"
#include "tiering/object/object.h"
#include "tiering/shm/shm.h"
#include "tiering/shm/shm_priv.h"

#include <sys/mman.h>
#include <sys/stat.h>

enum { DRAM = 40 * MIB, SHARE = DRAM / 100 * 75 };

static int fd;

static void start(void)
{
    fixture_dram_bytes = DRAM;
    fixture_shm_lent = true;
    fresh(256, false);
}

static struct ht_obj *written(size_t size, unsigned seed)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);

    put_all(o, 0, pattern(size, seed), size);
    return o;
}

static void expect_pattern(struct ht_obj *o, size_t size, unsigned seed)
{
    ck_assert_uint_eq(ht_obj_size(o), size);
    expect(o, 0, pattern(size, seed), size);
}

static uint64_t lent(void)
{
    ht_store_lock(s);
    uint64_t bytes = ht_arena_lent_bytes(s->arena);
    ht_store_unlock(s);
    return bytes;
}

/* Pages of the arena, and those of all files of memory. */
static uint64_t resident(void)
{
    const struct ht_pinned *m = ht_arena_memory(s->arena);
    static unsigned char page[DRAM / 4096 + 512];
    uint64_t bytes = stats().shm_used_bytes;

    ck_assert_int_eq(mincore(m->base, m->bytes, page), 0);
    for (size_t i = 0; i < m->bytes / 4096; i++)
        bytes += page[i] & 1 ? 4096 : 0;
    return bytes;
}

static void check(void)
{
    ck_assert_uint_eq(stats().dram_bytes, DRAM);
    ck_assert_uint_le(resident(), DRAM);
    ck_assert_uint_le(stats().shm_used_bytes, lent());
    ht_store_verify(s, false);
}

TEST(nobody_asks_so_nothing_is_lent)
{
    start();
    struct ht_obj *o = written(60 * MIB, 1);
    expect_pattern(o, 60 * MIB, 1);
    ck_assert_uint_eq(lent(), 0);
    ck_assert_uint_eq(stats().shm_bytes, 0);
    ck_assert_uint_eq(stats().shm_bytes_max, SHARE);
    ck_assert_uint_eq(stats().dram_bytes, DRAM);
}

/* While the tier is full, and dirty. */
TEST(the_tier_lends_and_gets_it_back)
{
    start();
    struct ht_obj *a = written(11 * MIB + 5, 1), *b = written(15 * MIB, 2);
    ck_assert_int_eq(ht_obj_sync(a), 0);
    ht_obj_evict(a);
    struct ht_obj *rest = written(40 * MIB, 3);
    ck_assert_int_eq(ht_obj_shm_open_for(a, 0, &fd), 0);
    ck_assert_uint_eq(lent(), 12 * MIB);
    check();
    int second;
    ck_assert_int_eq(ht_obj_shm_open_for(b, 0, &second), 0);
    check();
    expect_pattern(rest, 40 * MIB, 3);
    uint8_t *m = mmap(NULL, 11 * MIB + 5, PROT_READ, MAP_SHARED, fd, 0);
    ck_assert_int_eq(memcmp(m, pattern(11 * MIB + 5, 1), 11 * MIB + 5), 0);
    munmap(m, 11 * MIB + 5);
    struct ht_obj *more = written(6 * MIB, 4);
    int third;
    ck_assert_int_eq(ht_obj_shm_open_for(more, 0, &third), -ENOSPC); /* more than three quarters */
    expect_pattern(more, 6 * MIB, 4);
    check();
    ht_obj_shm_close(a);
    ht_shm_give_closed(s); /* its memory is a cache while the tier is not full */
    expect_pattern(rest, 40 * MIB, 3);
    ht_shm_give_closed(s);
    ck_assert_uint_eq(lent(), 16 * MIB);
    expect_pattern(a, 11 * MIB + 5, 1);
    ck_assert_int_eq(ht_obj_shm_open_for(more, 0, &third), 0);
    ht_obj_shm_close(b);
    ht_obj_shm_close(more);
    for (int i = 0; i < 2; i++) { /* one file's memory is enough for a moment */
        expect_pattern(rest, 40 * MIB, 3);
        ht_shm_give_closed(s);
        ck_assert_uint_eq(lent(), i ? 0 : 6 * MIB);
    }
    expect_pattern(b, 15 * MIB, 2);
    expect_pattern(more, 6 * MIB, 4);
    check();
}

TEST(closed_memory_makes_room_for_others)
{
    start();
    struct ht_obj *o[8];
    for (unsigned i = 0; i < 8; i++) {
        o[i] = written(9 * MIB, i);
        ck_assert_int_eq(ht_obj_shm_open_for(o[i], 0, &fd), 0);
        ck_assert_int_eq(ht_obj_shm_expect_stores(o[i]), 0);
        uint8_t *m = mmap(NULL, 9 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        memcpy(m, pattern(9 * MIB, i + 50), 9 * MIB);
        munmap(m, 9 * MIB);
        ht_obj_shm_close(o[i]);
        check();
    }
    for (unsigned i = 0; i < 8; i++)
        expect_pattern(o[i], 9 * MIB, i + 50);
}

TEST(a_file_grows_into_what_the_tier_has_clean)
{
    start();
    struct ht_obj *o = written(3 * MIB, 1);
    ck_assert_int_eq(ht_obj_shm_open_for(o, 0, &fd), 0);
    ck_assert_uint_eq(lent(), 4 * MIB);
    put_all(o, 3 * MIB, pattern(5 * MIB, 2), 5 * MIB);
    ck_assert_uint_eq(lent(), 8 * MIB);
    ck_assert_int_eq(ht_obj_truncate(o, 29 * MIB), 0);
    ck_assert_int_eq(ht_obj_truncate(o, 31 * MIB), -ENOSPC);
    ck_assert_uint_eq(ht_obj_size(o), 29 * MIB);
    check();
    ck_assert_int_eq(ht_obj_truncate(o, MIB), 0);
    ck_assert_uint_eq(lent(), 2 * MIB);
    struct ht_obj *dirty = written(37 * MIB, 3);
    ck_assert_int_eq(ht_obj_truncate(o, 30 * MIB), -ENOSPC); /* dirty images stay, and no writer waits */
    expect(o, 0, pattern(MIB, 1), MIB);
    expect_pattern(dirty, 37 * MIB, 3);
    check();
    ht_obj_shm_close(o);
}

/* Whatever the tier can lend just then. The next that takes memory makes up for it. */
TEST(an_abort_brings_back_all_content)
{
    enum { SCOPE = 7 };

    start();
    struct ht_obj *o = object(HT_CHUNK_BYTES, SCOPE), *other = written(MIB, 4);
    put_all(o, 0, pattern(20 * MIB, 1), 20 * MIB);
    ck_assert_int_eq(ht_scope_commit(s, SCOPE, NULL), 0);
    ck_assert_int_eq(ht_obj_shm_open_for(o, 0, &fd), 0);
    ck_assert_int_eq(ht_obj_truncate(o, MIB), 0);
    struct ht_obj *dirty = written(37 * MIB, 3);
    ck_assert_int_eq(ht_scope_abort(s, SCOPE), 0);
    ck_assert_int_eq(ht_scope_shm_restore(s, SCOPE), 0);
    expect_pattern(o, 20 * MIB, 1);
    ck_assert_uint_lt(lent(), 20 * MIB);
    ht_store_verify(s, true);
    int second;
    ck_assert_int_eq(ht_obj_shm_open_for(other, 0, &second), 0);
    ck_assert_uint_ge(lent(), 21 * MIB);
    check();
    expect_pattern(dirty, 37 * MIB, 3);
    ht_obj_shm_close(other);
    ht_obj_shm_close(o);
}

/* One that would have to be written keeps no other waiting, and what was closed long ago comes back at once. */
TEST(closed_memory_comes_back)
{
    start();
    struct ht_obj *o[4], *rest = written(40 * MIB, 9);
    for (unsigned i = 0; i < 4; i++) {
        o[i] = written(4 * MIB, i);
        ck_assert_int_eq(i ? ht_obj_sync(o[i]) : 0, 0);
        ck_assert_int_eq(ht_obj_shm_open_for(o[i], 0, &fd), 0);
        ht_obj_shm_close(o[i]);
    }
    ht_store_lock(s);
    for (unsigned i = 0; i < 3; i++)
        o[i]->extra->shm->shut_ns = i + 1;
    ht_store_unlock(s);
    ck_assert_uint_eq(lent(), 16 * MIB);
    expect_pattern(rest, 40 * MIB, 9);
    ht_shm_give_closed(s);
    ck_assert_uint_eq(lent(), 8 * MIB);
    expect_pattern(rest, 40 * MIB, 9);
    ht_shm_give_closed(s); /* the last one */
    expect_pattern(rest, 40 * MIB, 9);
    ht_shm_give_closed(s); /* now one is written */
    ck_assert_uint_eq(lent(), 0);
    for (unsigned i = 0; i < 4; i++)
        expect_pattern(o[i], 4 * MIB, i);
    check();
}

/* Content that updates work on goes, and pinned content does not. */
TEST(pinned_content_stays)
{
    start();
    struct ht_obj *pinned = object(HT_CHUNK_BYTES, 0), *o = written(24 * MIB, 2), *closed = written(2 * MIB, 3);
    ht_obj_set_residency(pinned, HT_RESIDENCY_PINNED);
    put_synced(pinned, 0, pattern(12 * MIB, 1), 12 * MIB);
    ck_assert_uint_eq(stats().dram_pinned_bytes, 12 * MIB);
    ck_assert_int_eq(ht_obj_shm_open_for(closed, 0, &fd), 0);
    ht_obj_shm_close(closed);
    uint64_t used = stats().dram_used_bytes;
    ck_assert_int_eq(ht_obj_shm_open_for(o, 0, &fd), -ENOSPC); /* half of 16 MiB is less than that */
    ck_assert_uint_eq(lent(), 2 * MIB);
    ck_assert_uint_eq(stats().dram_used_bytes, used); /* for it nothing went */
    expect_pattern(o, 24 * MIB, 2);
    ck_assert_int_eq(ht_obj_truncate(o, 16 * MIB), 0);
    ck_assert_int_eq(ht_obj_shm_open_for(o, 0, &fd), 0);
    ck_assert_uint_eq(stats().dram_pinned_bytes, 12 * MIB);
    check();
    ht_obj_shm_close(o);
}

static atomic_bool over;

static void *write_and_read(void *arg)
{
    const uint8_t *bytes[2] = {pattern(6 * MIB, 7), pattern(6 * MIB, 8)};
    struct ht_obj *o = arg;

    for (unsigned i = 0; !over; i++) {
        put_all(o, 0, bytes[i % 2], 6 * MIB);
        expect(o, 0, bytes[i % 2], 6 * MIB);
    }
    return NULL;
}

/* Beside threads that fill the tier. */
TEST(lending_beside_writers)
{
    fixture_dram_bytes = DRAM;
    fixture_shm_lent = true;
    fresh(256, true);
    struct ht_obj *busy[2] = {written(6 * MIB, 1), written(6 * MIB, 2)}, *o[3];
    pthread_t thread[2];
    for (unsigned i = 0; i < 3; i++)
        o[i] = written((5 + 4 * i) * MIB, i);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, write_and_read, busy[i]), 0);
    unsigned opened = 0;
    for (unsigned round = 0; opened < 8; round++) { /* some find no room that moment */
        struct ht_obj *one = o[round % 3];
        size_t size = ht_obj_size(one);
        if (ht_obj_shm_open_for(one, 0, &fd) == 0) {
            opened++;
            expect_pattern(one, size, round % 3);
            check();
            ht_obj_shm_close(one);
        }
        ht_shm_give_closed(s);
    }
    over = true;
    for (unsigned i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
}

RUN_TESTS("lent", .teardown = fixture_end, .timeout_s = 120)
