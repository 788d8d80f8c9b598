/* SPDX-License-Identifier: Apache-2.0 */
/* When stores of others into a file of memory end. A mapping of that file plays the others. */
#include "tiering/object/object.h"
#include "tests/unit/tiering/store/fixture.h"

#include <sys/mman.h>

enum { SIZE = 2 * MIB + 5000 };

static bool takes_stores(struct ht_obj *o)
{
    ht_store_lock(s);
    bool takes = o->extra->may_be_dirty;
    ht_store_unlock(s);
    return takes;
}

static void expect_byte(uint64_t oid, uint64_t at, uint8_t byte)
{
    struct ht_obj *o = get_object(oid);

    ck_assert_ptr_nonnull(o);
    expect(o, at, &byte, 1);
    put_object(o);
}

TEST(stores_end_with_a_scan_that_none_can_follow)
{
    fixture_shm_bytes = 12 * MIB;
    fresh(64, false);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    uint64_t oid = ht_obj_id(o);
    int fd;
    ck_assert_int_eq(ht_obj_truncate(o, SIZE), 0);
    ck_assert_int_eq(ht_obj_shm_open_for(o, 0, &fd), 0);
    ck_assert_int_eq(ht_obj_shm_expect_stores(o), 0);
    ck_assert_int_eq(ht_obj_shm_scan(o), 0);
    ck_assert(takes_stores(o)); /* the next one may come at any time */
    uint8_t *m = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(m, MAP_FAILED);
    m[5] = 1;
    ht_obj_shm_expect_no_stores(o);
    ck_assert(takes_stores(o));
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert(!takes_stores(o)); /* though it is open */
    ck_assert_int_eq(ht_obj_shm_expect_stores(o), 0);
    m[2 * MIB] = 2;
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert(takes_stores(o));
    munmap(m, SIZE);
    ht_obj_shm_close(o);
    crash();
    expect_byte(oid, 5, 1);
    expect_byte(oid, 2 * MIB, 2);
}

RUN_TESTS("shm", .teardown = fixture_end)
