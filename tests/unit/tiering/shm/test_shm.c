/* SPDX-License-Identifier: Apache-2.0 */
/* Objects whose content others have as a file of memory. A mapping of that file plays the others. */
#include "tiering/object/chunk.h"
#include "tests/unit/tiering/store/fixture.h"

#include <sys/mman.h>
#include <sys/stat.h>

enum { SHARE = 12 * MIB, SIZE = 2 * MIB + 5000, SCOPE = 77 };

static int fd;

static void start(void)
{
    fixture_shm_bytes = SHARE;
    fresh(64, false);
}

static struct ht_obj *written(size_t size, unsigned seed, uint64_t scope)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, scope);
    uint8_t *p = pattern(size, seed);

    put_all(o, 0, p, size);
    return o;
}

static void open_shm(struct ht_obj *o)
{
    ck_assert_int_eq(ht_obj_shm_open_for(o, 0, &fd), 0);
}

/* And others may store into the file. */
static void open_for_stores(struct ht_obj *o)
{
    open_shm(o);
    ck_assert_int_eq(ht_obj_shm_expect_stores(o), 0);
}

static uint8_t *map(size_t size)
{
    uint8_t *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    ck_assert_ptr_ne(p, MAP_FAILED);
    return p;
}

static uint64_t file_size(void)
{
    struct stat st;

    ck_assert_int_eq(fstat(fd, &st), 0);
    return (uint64_t)st.st_size;
}

static void expect_pattern(struct ht_obj *o, size_t size, unsigned seed)
{
    uint8_t *p = pattern(size, seed);

    ck_assert_uint_eq(ht_obj_size(o), size);
    expect(o, 0, p, size);
}

static void expect_mapped(const uint8_t *mapped, size_t size, unsigned seed)
{
    uint8_t *p = pattern(size, seed);

    ck_assert_uint_eq(file_size(), size);
    ck_assert_int_eq(memcmp(mapped, p, size), 0);
}

static void abort_scope(void)
{
    ck_assert_int_eq(ht_scope_abort(s, SCOPE), 0);
    ck_assert_int_eq(ht_scope_shm_restore(s, SCOPE), 0);
}

TEST(file_shows_content_whoever_changes_it)
{
    start();
    struct ht_obj *o = written(SIZE, 1, 0);
    open_shm(o);
    uint8_t *m = map(4 * MIB);
    expect_mapped(m, SIZE, 1);
    put_all(o, MIB - 3, (const uint8_t *)"abcdef", 6);
    ck_assert_int_eq(memcmp(m + MIB - 3, "abcdef", 6), 0);
    ck_assert_int_eq(ht_obj_punch(o, 10, 2 * MIB), 0);
    ck_assert_uint_ne(m[9], 0);
    ck_assert(m[10] == 0 && memcmp(m + 10, m + 11, 2 * MIB - 1) == 0 && m[2 * MIB + 10] != 0);
    ht_obj_shm_close(o);
}

TEST(file_is_as_large_as_the_object)
{
    start();
    struct ht_obj *o = written(SIZE, 1, 0);
    open_shm(o);
    static const uint64_t sizes[] = {SIZE - 1, MIB + 1, MIB, 0, 3 * MIB + 7, 100, 5 * MIB};
    for (unsigned i = 0; i < HT_ARRAY_SIZE(sizes); i++) {
        ck_assert_int_eq(ht_obj_truncate(o, sizes[i]), 0);
        ck_assert_uint_eq(file_size(), sizes[i]);
        ck_assert_uint_eq(stats().shm_used_bytes, ht_round_up(sizes[i], 4096));
    }
    uint8_t *p = pattern(SIZE, 3), *zero = test_alloc(5 * MIB), *m = map(5 * MIB);
    expect(o, 100, zero, 5 * MIB - 100);
    ck_assert_int_eq(memcmp(m + 100, zero, 5 * MIB - 100), 0);
    put_all(o, 5 * MIB - 10, p, SIZE);
    ck_assert_uint_eq(file_size(), 5 * MIB - 10 + SIZE);
    expect(o, 5 * MIB - 10, p, SIZE);
    /* Beyond its share it does not grow, and does not change. */
    ck_assert_int_eq(ht_obj_truncate(o, SHARE + 1), -ENOSPC);
    ck_assert_int_eq(ht_obj_write(o, SHARE, p, 10), -ENOSPC);
    ck_assert_uint_eq(file_size(), 5 * MIB - 10 + SIZE);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ht_obj_shm_close(o);
    o = after(crash, o);
    expect(o, 5 * MIB - 10, p, SIZE);
    expect(o, 100, zero, 5 * MIB - 110);
}

TEST(dirty_images_move_in)
{
    start();
    struct ht_obj *o = written(SIZE, 1, 0);
    uint64_t dirty = stats().dram_dirty_bytes;
    open_shm(o);
    ck_assert_uint_eq(stats().dram_dirty_bytes, dirty);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_eq(stats().dram_dirty_bytes, 0);
    ht_obj_shm_close(o);
    o = after(crash, o);
    expect_pattern(o, SIZE, 1);
}

TEST(stores_behind_what_is_dirty_are_found)
{
    enum { BEGIN = 16 << 10, END = 2 * BEGIN };

    start();
    struct ht_obj *o = written(BEGIN, 1, 0);
    ck_assert_int_eq(ht_obj_truncate(o, END), 0);
    open_for_stores(o);
    uint8_t *m = map(END), *p = pattern(END, 1);
    memcpy(m + BEGIN, p + BEGIN, END - BEGIN);
    munmap(m, END);
    ht_obj_shm_close(o);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    o = after(crash, o);
    expect(o, 0, p, END);
}

/* A reader whose answer is under way holds the chunk: its bytes stay, also when the file gets shorter. */
static void truncate_beside(void *ctx, const void *bytes, size_t n)
{
    uint8_t *want = pattern(SIZE, 1);

    ck_assert_uint_eq(n, 4000);
    ck_assert_int_eq(ht_obj_truncate(ctx, 2 * MIB), 0);
    ck_assert_uint_eq(file_size(), 2 * MIB);
    ck_assert_int_eq(memcmp(bytes, want, n), 0);
}

TEST(reads_in_place_hold_the_pages)
{
    start();
    struct ht_obj *o = written(SIZE, 1, SCOPE);
    open_shm(o);
    uint8_t buf[4000] = {0};
    ck_assert_int_eq(ht_obj_read_in_place(o, NULL, 0, buf, sizeof(buf), truncate_beside, o), (ssize_t)sizeof(buf));
    for (size_t i = 0; i < sizeof(buf); i++)
        ck_assert_uint_eq(buf[i], 0); /* nothing was copied */
    ht_obj_shm_close(o);
}

TEST(updates_go_into_the_very_pages)
{
    start();
    struct ht_obj *o = written(SIZE, 1, SCOPE);
    publish_scope_at_once(SCOPE);
    open_shm(o);
    uint8_t *m = map(SIZE);
    for (unsigned i = 0; i < 3; i++) {
        struct ht_batch_pin l = {.store = s, .count = 1, .chunk[0] = {o, i, HT_BATCH_PIN_UPDATE, 0, NULL, false}};
        pin_now(&l);
        ck_assert_uint_eq(l.chunk[0].len, ht_min_u64(MIB, SIZE - i * MIB));
        l.chunk[0].data[l.chunk[0].len - 1] = (uint8_t)(0xa0 + i);
        unpin(&l, 1);
    }
    ck_assert_uint_eq(m[MIB - 1], 0xa0);
    ck_assert_uint_eq(m[2 * MIB - 1], 0xa1);
    ck_assert_uint_eq(m[SIZE - 1], 0xa2);
    uint8_t *want = test_alloc(SIZE);
    memcpy(want, m, SIZE);
    publish_scope_at_once(SCOPE);
    munmap(m, SIZE);
    ht_obj_shm_close(o);
    o = after(crash, o);
    expect(o, 0, want, SIZE);
}

/* An update was queued, and a truncation came before it. The first mapping has 2 MiB, which a later growth passes. */
TEST(updates_after_the_end_leave_no_image)
{
    start();
    struct ht_obj *o = written(8 * MIB, 1, SCOPE);
    uint8_t *p = pattern(MIB, 2), *zero = test_alloc(MIB);
    publish_scope_at_once(SCOPE);
    ck_assert_int_eq(ht_obj_truncate(o, MIB), 0);
    open_shm(o);
    for (unsigned i = 5; i < 8; i++) {
        struct ht_batch_pin l = {.store = s, .count = 1, .chunk[0] = {o, i, HT_BATCH_PIN_UPDATE, 0, NULL, false}};
        ck_assert_int_eq(ht_batch_pin_begin(&l), -EINVAL);
        ht_store_verify(s, false);
    }
    put_all(o, 5 * MIB, p, MIB);
    expect(o, 5 * MIB, p, MIB);
    ck_assert_int_eq(ht_obj_truncate(o, 8 * MIB), 0);
    expect(o, 7 * MIB, zero, MIB);
    uint8_t *m = map(8 * MIB);
    ck_assert_int_eq(memcmp(m + 5 * MIB, p, MIB), 0);
    ht_obj_shm_close(o);
}

TEST(unseen_stores_are_found)
{
    start();
    struct ht_obj *o = written(5 * MIB + 10, 1, SCOPE);
    publish_scope_at_once(SCOPE);
    ck_assert_int_eq(ht_obj_truncate(o, 7 * MIB + 1), 0); /* with a hole */
    publish_scope_at_once(SCOPE);
    open_for_stores(o);
    uint8_t *m = map(7 * MIB + 1), *want = test_alloc(7 * MIB + 1);
    uint64_t before = obj_stat(o).device_written_bytes;
    publish_scope_at_once(SCOPE);
    ck_assert_uint_eq(obj_stat(o).device_written_bytes, before);
    m[3 * MIB + 17] ^= 1;
    m[6 * MIB + 1] = 5; /* in the hole */
    memcpy(want, m, 7 * MIB + 1);
    publish_scope_at_once(SCOPE);
    ck_assert_uint_eq(obj_stat(o).device_written_bytes, before + 2 * MIB);
    m[7 * MIB] = 9; /* not committed */
    ht_obj_shm_close(o);
    o = after(crash, o);
    expect(o, 0, want, 7 * MIB + 1);
}

TEST(unseen_stores_beside_writes_are_found)
{
    start();
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    ck_assert_int_eq(ht_obj_truncate(o, MIB), 0);
    open_for_stores(o);
    uint8_t *m = map(MIB);
    m[900000] = 1;
    put_all(o, 10, (const uint8_t *)"x", 1);
    m[800000] = 2;
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ht_obj_shm_close(o);
    o = after(crash, o);
    expect(o, 900000, (const uint8_t *)"\1", 1);
    expect(o, 800000, (const uint8_t *)"\2", 1);
    expect(o, 10, (const uint8_t *)"x", 1);
}

static void fill(struct ht_obj *o, const uint8_t *p)
{
    for (uint64_t off = ht_obj_size(o); ht_obj_write(o, off, p, MIB) > 0; off += MIB)
        ck_assert_int_ge(background_clean(s), 0);
}

TEST(stores_reserve_a_rewrite)
{
    start();
    struct ht_obj *o = written(4 * MIB, 1, 0), *filler = object(HT_CHUNK_BYTES, 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    open_for_stores(o);
    uint8_t *m = map(4 * MIB), *p = pattern(MIB, 2);
    fill(filler, p);
    memset(m, 7, 4 * MIB);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ht_obj_shm_close(o);
    ck_assert_int_eq(ht_obj_shm_scan(o), 0);
    munmap(m, 4 * MIB);
    fill(filler, p);
    /* No space is reserved for any caller now, and there is none for this one. */
    open_shm(o);
    ck_assert_int_eq(ht_obj_shm_expect_stores(o), -ENOSPC);
    ht_obj_shm_close(o);
}

TEST(abort_writes_old_bytes_into_the_file)
{
    start();
    struct ht_obj *o = written(SIZE, 1, SCOPE);
    publish_scope_at_once(SCOPE);
    open_for_stores(o);
    uint8_t *m = map(6 * MIB);
    m[5] ^= 1; /* no call announced this store */
    abort_scope();
    expect_mapped(m, SIZE, 1);
    uint8_t *p = pattern(SIZE, 2);
    put_all(o, 3 * MIB, p, SIZE);
    put_all(o, 0, p, MIB + 7);
    m[MIB + 100] ^= 1;
    abort_scope();
    expect_mapped(m, SIZE, 1);
    ck_assert_int_eq(ht_obj_truncate(o, 10), 0);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    abort_scope();
    expect_mapped(m, SIZE, 1);
    expect_pattern(o, SIZE, 1);
    m[7] = 99;
    publish_scope_at_once(SCOPE);
    expect(o, 7, (const uint8_t *)"c", 1);
    ht_obj_shm_close(o);
}

TEST(abort_without_stores)
{
    start();
    struct ht_obj *o = written(SIZE, 1, SCOPE);
    publish_scope_at_once(SCOPE);
    open_shm(o);
    uint8_t *m = map(SIZE), *p = pattern(SIZE, 2);
    put_all(o, 0, p, SIZE);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    put_all(o, 0, p + 1, MIB + 1);
    abort_scope();
    expect_mapped(m, SIZE, 1);
    ht_obj_shm_close(o);
}

/* Three quarters of 12 MiB. */
TEST(one_user_does_not_get_all_of_the_share)
{
    start();
    struct ht_obj *o[3], *more;
    int any;
    for (unsigned i = 0; i < 3; i++) {
        o[i] = written(3 * MIB, i, 0);
        ck_assert_int_eq(ht_obj_shm_open_for(o[i], 7, &any), 0);
    }
    more = written(1 * MIB, 9, 0);
    ck_assert_int_eq(ht_obj_shm_open_for(more, 7, &any), -EDQUOT);
    ck_assert_int_eq(ht_obj_truncate(o[0], 4 * MIB), -ENOSPC);
    ck_assert_int_eq(ht_obj_shm_open_for(more, 8, &any), 0);
    ht_obj_shm_close(more);
    ck_assert_int_eq(ht_obj_shm_open_for(more, 7, &any), -EDQUOT); /* its memory is there still */
    ck_assert_int_eq(ht_obj_shm_open_for(more, 0, &any), 0);
    ht_obj_shm_close(more);
    ht_obj_shm_close(o[2]);
    ck_assert_int_eq(ht_obj_shm_open_for(more, 7, &any), 0);
    ck_assert_int_eq(ht_obj_truncate(more, 2 * MIB), 0);
    expect_pattern(o[1], 3 * MIB, 1);
    ht_obj_shm_close(more);
    ht_obj_shm_close(o[1]);
    ht_obj_shm_close(o[0]);
}

TEST(memory_goes_to_who_wants_it_after_it_is_back)
{
    start();
    struct ht_obj *a = written(8 * MIB, 1, 0), *b = written(6 * MIB, 2, 0);
    ck_assert_int_eq(ht_obj_sync(a), 0);
    open_for_stores(a);
    uint8_t *m = map(8 * MIB);
    int second;
    ck_assert_int_eq(ht_obj_shm_open_for(b, 0, &second), -ENOSPC);
    expect_pattern(b, 6 * MIB, 2);
    m[123] = 7;
    m[7 * MIB + 1] = 8;
    ht_obj_shm_close(a);
    expect(a, 123, (const uint8_t *)"\7", 1);
    open_shm(b);
    ck_assert_uint_eq(stats().shm_count, 1);
    ck_assert_uint_eq(stats().shm_used_bytes, 6 * MIB);
    ht_obj_evict(a);
    expect(a, 123, (const uint8_t *)"\7", 1);
    expect(a, 7 * MIB + 1, (const uint8_t *)"\10", 1);
    munmap(m, 8 * MIB);
    m = map(6 * MIB);
    expect_mapped(m, 6 * MIB, 2);
    munmap(m, 6 * MIB);
    ht_obj_shm_close(b);
}

TEST(back_and_out_again_reads_nothing)
{
    start();
    struct ht_obj *o = written(SIZE, 1, 0);
    sync_and_evict(o);
    open_shm(o);
    uint64_t read = obj_stat(o).device_read_bytes;
    ck_assert_uint_gt(read, 0);
    ht_obj_shm_close(o);
    open_shm(o);
    ck_assert_uint_eq(obj_stat(o).device_read_bytes, read);
    ht_obj_shm_close(o);
}

/* So opening it again waits for no thread, and the time hardly grows with the object. */
TEST(back_and_out_again_takes_no_chunk)
{
    struct ht_chunk_watch watch;

    start();
    struct ht_obj *o = written(SIZE, 1, 0);
    for (unsigned i = 0; i < 2; i++) {
        ht_store_lock(s);
        ht_chunk_watch_begin(&watch, o, 0);
        ht_store_unlock(s);
        open_for_stores(o);
        ht_store_lock(s);
        ht_chunk_watch_end(&watch);
        ht_store_unlock(s);
        ck_assert_int_eq(watch.taken, i == 0); /* at first they move into the file */
        ht_obj_shm_close(o);
    }
}

/* More chunks than are read at once, holes and images among them, of an object that was cut short; reads that fail. */
TEST(content_comes_from_devices)
{
    fixture_shm_bytes = 24 * MIB;
    fresh(128, false);
    struct ht_obj *o = written(22 * MIB + 4099, 1, 0);
    uint8_t *p = pattern(22 * MIB, 1), *m;
    sync_and_evict(o);
    ck_assert_int_eq(ht_obj_punch(o, 3 * MIB, 2 * MIB), 0);
    memset(p + 3 * MIB, 0, 2 * MIB);
    ck_assert_int_eq(ht_obj_truncate(o, 21 * MIB + 77), 0);
    memset(p + 9 * MIB + 5, 8, 100);
    put_all(o, 9 * MIB + 5, p + 9 * MIB + 5, 100);
    for (unsigned nth = 1; nth < 24; nth += 4) {
        dev_fail(dev, HT_IO_READ, nth, false);
        int rc = ht_obj_shm_open_for(o, 0, &fd);
        dev_fail(dev, HT_IO_READ, 0, false);
        ck_assert(rc == 0 || rc == -EIO);
        if (!rc)
            ht_obj_shm_close(o);
        ht_obj_evict(o);
        expect(o, 0, p, 21 * MIB + 77);
        ht_obj_evict(o);
    }
    open_shm(o);
    m = map(21 * MIB + 77);
    ck_assert_int_eq(memcmp(m, p, 21 * MIB + 77), 0);
    ck_assert_uint_eq(file_size(), 21 * MIB + 77);
    ck_assert_int_eq(ht_obj_truncate(o, 22 * MIB), 0);
    for (uint32_t i = 77; i < 8192; i++)
        p[21 * MIB + i] = 0;
    expect(o, 21 * MIB, p + 21 * MIB, 8192);
    ht_obj_shm_close(o);
}

TEST(what_cannot_be_opened_as_shm)
{
    start();
    struct ht_obj *small = object(HT_SMALL_CHUNK_BYTES, 0), *empty = object(HT_CHUNK_BYTES, 0);
    struct ht_obj *large = written(4 * MIB, 1, 0), *bad = written(SIZE, 2, 0);
    put_all(small, 0, (const uint8_t *)"x", 1);
    ck_assert_int_eq(ht_obj_shm_open_for(small, 0, &fd), -EINVAL);
    ck_assert_int_eq(ht_obj_shm_open_for(empty, 0, &fd), -EINVAL);
    ck_assert_int_eq(ht_obj_truncate(large, SHARE + 1), 0);
    ck_assert_int_eq(ht_obj_shm_open_for(large, 0, &fd), -ENOSPC);
    sync_and_evict(bad);
    dev_fail(dev, HT_IO_READ, 1, 2);
    ck_assert_int_eq(ht_obj_shm_open_for(bad, 0, &fd), -EIO);
    dev_fail(dev, HT_IO_READ, 0, 0);
    expect_pattern(bad, SIZE, 2);
    ck_assert_int_eq(ht_obj_shm_open_for(bad, 0, &fd), 0);
    ht_obj_shm_close(bad);
    done();
    fixture_shm_bytes = 0;
    fresh(32, false);
    struct ht_obj *o = written(SIZE, 1, 0);
    ck_assert_int_eq(ht_obj_shm_open_for(o, 0, &fd), -EINVAL);
}

TEST(deleted_while_out)
{
    start();
    struct ht_obj *o = written(SIZE, 1, 0);
    open_shm(o);
    uint8_t *m = map(SIZE);
    delete (o);
    expect_mapped(m, SIZE, 1);
    ck_assert_uint_eq(stats().shm_count, 1);
    ht_obj_shm_close(o);
    ck_assert_uint_eq(stats().shm_count, 0);
    ck_assert_uint_eq(stats().shm_used_bytes, 0);
}

TEST(clones_have_their_own_bytes)
{
    start();
    struct ht_obj *a = written(SIZE, 1, 0), *b = written(SIZE, 2, 0), *c = object(HT_CHUNK_BYTES, 0);
    ck_assert_int_eq(ht_obj_sync(a), 0);
    open_for_stores(a);
    uint8_t *m = map(SIZE);
    m[100] = 77;
    ck_assert_int_eq(ht_obj_clone(a, 0, c, 0, SIZE), SIZE);
    expect(c, 100, (const uint8_t *)"M", 1);
    ck_assert_int_eq(ht_obj_clone(b, 0, a, 0, SIZE), SIZE);
    expect_mapped(m, SIZE, 2);
    expect(c, 100, (const uint8_t *)"M", 1);
    munmap(m, SIZE);
    ht_obj_shm_close(a);
}

/* Bytes that a mapping stored after the former end: reads, copies and SEEK_DATA see them before any scan. */
static void expect_stored(struct ht_obj *o, uint8_t *m, uint64_t off)
{
    struct ht_obj *copy = object(HT_CHUNK_BYTES, 0);
    uint64_t size = ht_obj_size(o);
    uint8_t *want = test_alloc(size);

    memset(m + off, 0x5a, 1000);
    memcpy(want, m, size);
    expect(o, 0, want, size);
    ck_assert_int_eq(ht_obj_seek(o, off, false), (int64_t)off);
    for (uint64_t done = 0; done < size;) {
        ssize_t n = ht_obj_clone(o, done, copy, done, size - done);
        ck_assert_int_gt(n, 0);
        done += (uint64_t)n;
    }
    expect(copy, 0, want, size);
    put_object(copy);
}

TEST(stores_behind_the_former_end_are_read_and_copied)
{
    start();
    struct ht_obj *o = written(MIB + 5000, 1, 0);
    open_for_stores(o);
    uint8_t *m = map(5 * MIB);
    ck_assert_int_eq(ht_obj_truncate(o, 4 * MIB + 100), 0);
    expect_stored(o, m, 3 * MIB + 7);
    expect_stored(o, m, MIB + 6000);
    ck_assert_int_eq(ht_obj_truncate(o, 100), 0);
    ck_assert_int_eq(ht_obj_truncate(o, 4 * MIB), 0);
    expect_stored(o, m, 2 * MIB + 9);
    /* A write far beyond the end leaves a gap. */
    ck_assert_int_eq(ht_obj_truncate(o, 100), 0);
    put_all(o, 4 * MIB, (const uint8_t *)"abc", 3);
    expect_stored(o, m, 2 * MIB + 9);
    ht_obj_shm_close(o);
}

TEST(step_reads_what_was_stored_behind_the_former_end)
{
    start();
    struct ht_obj *o = written(5000, 1, 0);
    open_for_stores(o);
    ck_assert_int_eq(ht_obj_truncate(o, 3 * MIB), 0);
    uint8_t *m = map(3 * MIB);
    m[2 * MIB + 1] = 0x5a;
    struct ht_batch_pin l = {.store = s, .count = 1, .chunk = {{.obj = o, .index = 2, .mode = HT_BATCH_PIN_READ}}};
    pin_now(&l);
    ck_assert_uint_eq(l.chunk[0].data[1], 0x5a);
    unpin(&l, 0);
    ht_obj_shm_close(o);
}

/* ------------------------------------------------------------------ threads */

static struct ht_obj *shared;
static atomic_bool stop;

static void *change(void *arg)
{
    uint8_t *p = pattern(2 * MIB, 9);

    for (unsigned i = 1; i < 150; i++) {
        ck_assert_int_ge(ht_obj_write(shared, (uint64_t)(i * 7919) % (3 * MIB), p, i * 97u % (2 * MIB)), 0);
        ck_assert_int_eq(ht_obj_truncate(shared, i * 104729u % (5 * MIB) + 1), 0);
    }
    stop = true;
    return NULL;
}

static void *read_all(void *arg)
{
    uint8_t *p = test_alloc(5 * MIB);

    while (!stop)
        ck_assert_int_ge(ht_obj_read(shared, 0, p, 5 * MIB), 0);
    return NULL;
}

static void *write_out(void *arg)
{
    while (!stop)
        ck_assert_int_eq(ht_obj_sync(shared), 0);
    return NULL;
}

static atomic_uint searches;

static void *search(void *arg)
{
    while (!stop) {
        ck_assert_int_eq(ht_obj_shm_scan(shared), 0);
        searches++;
    }
    return NULL;
}

/*
 * A search that looked at the first chunk before it was changed ends after the file is back:
 * the next one finds the change.
 */
TEST(stores_during_a_search_are_found_by_the_next)
{
    enum { ROUNDS = 25, BYTES = 8 * MIB };

    start();
    shared = written(BYTES, 1, 0);
    ck_assert_int_eq(ht_obj_sync(shared), 0);
    for (unsigned i = 0; i < ROUNDS; i++) {
        pthread_t thread;
        open_for_stores(shared);
        uint8_t *m = map(BYTES), last;
        stop = false;
        searches = 0;
        pthread_create(&thread, NULL, search, NULL);
        do
            last = ++*(volatile uint8_t *)m;
        while (searches < 2);
        ht_obj_shm_close(shared);
        stop = true;
        pthread_join(thread, NULL);
        munmap(m, BYTES);
        sync_and_evict(shared);
        ck_assert_uint_eq(stats().shm_count, 0);
        expect(shared, 0, &last, 1);
    }
}

static void *sync_it(void *arg)
{
    ck_assert_int_eq(ht_obj_sync(arg), 0);
    return NULL;
}

/* A copy is written, so the checksum is that of the bytes on the device. */
TEST(stores_during_a_write_are_not_in_it)
{
    start();
    struct ht_obj *o = written(MIB, 1, 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    open_for_stores(o);
    uint8_t *m = map(MIB), *want = test_alloc(MIB);
    m[17] ^= 1;
    memcpy(want, m, MIB);
    pthread_t thread;
    dev_stall_at(dev, HT_IO_WRITE, 1);
    pthread_create(&thread, NULL, sync_it, o);
    dev_wait_stalled(dev);
    m[18] ^= 1;
    dev_stall(dev, false);
    pthread_join(thread, NULL);
    ht_obj_shm_close(o);
    o = after(crash, o);
    expect(o, 0, want, MIB);
}

static void *append(void *arg)
{
    for (uint64_t at = 100, n = 2 * MIB + 300000; at < SHARE / 2; at += n)
        put_all(shared, at, (const uint8_t *)arg + at, n);
    stop = true;
    return NULL;
}

/* So that images have to be waited for. */
static void *crowd(void *arg)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);

    while (!stop)
        put_all(o, 0, arg, SHARE);
    delete (o);
    return NULL;
}

/* Memory is made while a write, which found none, is on its way: it is as large as the object all the same. */
TEST(shm_is_opened_beside_a_write_that_grows)
{
    static void *(*const mains[])(void *) = {append, crowd, crowd};
    uint8_t *p = pattern(SHARE, 1);
    pthread_t t[HT_ARRAY_SIZE(mains)];

    fixture_shm_bytes = SHARE;
    fresh(128, true);
    for (unsigned round = 0; round < 20; round++) {
        shared = written(100, 1, 0);
        stop = false;
        for (unsigned i = 0; i < HT_ARRAY_SIZE(mains); i++)
            pthread_create(&t[i], NULL, mains[i], p);
        while (!stop) {
            if (ht_obj_shm_open_for(shared, 0, &fd)) /* it grew just then */
                continue;
            uint64_t size = ht_obj_size(shared);
            ck_assert_uint_ge(file_size(), size);
            ht_obj_shm_close(shared);
            ht_obj_evict(shared);
        }
        for (unsigned i = 0; i < HT_ARRAY_SIZE(mains); i++)
            pthread_join(t[i], NULL);
        open_shm(shared);
        uint64_t size = ht_obj_size(shared);
        uint8_t *m = map(size);
        expect_mapped(m, size, 1);
        munmap(m, size);
        ht_obj_shm_close(shared);
        delete (shared);
    }
}

static void *halve(void *arg)
{
    ck_assert_int_eq(ht_obj_truncate(shared, MIB), 0);
    return arg;
}

/* The thread that waits for the chunk with the end finds that the memory has gone. */
TEST(memory_goes_beside_a_truncation)
{
    start();
    for (unsigned round = 0; round < 20; round++) {
        pthread_t thread;
        shared = written(2 * MIB, 1, 0);
        ck_assert_int_eq(ht_obj_sync(shared), 0);
        open_shm(shared);
        ht_obj_shm_close(shared);
        struct ht_batch_pin l = {.store = s, .count = 1, .chunk = {{.obj = shared, .mode = HT_BATCH_PIN_READ}}};
        pin_now(&l);
        pthread_create(&thread, NULL, halve, NULL);
        while (ht_obj_size(shared) > MIB)
            ;
        ht_batch_pin_end(&l, 0);
        ht_obj_evict(shared);
        ck_assert_int_eq(ht_batch_pin_finish(&l), 0);
        pthread_join(thread, NULL);
        expect_pattern(shared, MIB, 1);
        delete (shared);
    }
}

TEST(truncation_beside_everything_else)
{
    static void *(*const mains[])(void *) = {change, read_all, write_out};
    pthread_t t[HT_ARRAY_SIZE(mains)];

    start();
    shared = written(SIZE, 1, 0);
    open_for_stores(shared);
    stop = false;
    for (unsigned i = 0; i < HT_ARRAY_SIZE(mains); i++)
        pthread_create(&t[i], NULL, mains[i], NULL);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(mains); i++)
        pthread_join(t[i], NULL);
    uint64_t size = ht_obj_size(shared);
    ck_assert_uint_eq(file_size(), size);
    uint8_t *m = map(size), *want = test_alloc(size);
    memcpy(want, m, size);
    expect(shared, 0, want, size);
    ck_assert_int_eq(ht_obj_sync(shared), 0);
    ht_obj_shm_close(shared);
    struct ht_obj *o = after(crash, shared);
    expect(o, 0, want, size);
}

RUN_TESTS("shm", .teardown = done, .timeout_s = 60)
