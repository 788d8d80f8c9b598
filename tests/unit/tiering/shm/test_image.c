/* SPDX-License-Identifier: Apache-2.0 */
/* test_image.c - one interface for images in the arena and in shared memory: the same calls on both. */
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/unit/tiering/data/fixture.h"
#include "tiering/object/space.h"
#include "tiering/shm/shm.h"
#include "tiering/shm/shm_priv.h"

enum { SIZE = 300000 };

static uint8_t *map;
static int fd;

static void start(void)
{
    setup();
    ck_assert_int_eq(ht_shm_setup(s), 0);
    ck_assert_int_eq(ht_shm_init(s), 0);
    obj->size = SIZE;
    ht_store_lock(s);
}

static void end(void)
{
    ht_store_unlock(s);
    free_object();
    ck_assert_uint_eq(s->shm->used_bytes, 0);
    ht_shm_teardown(s);
    free_rest();
}

/* An image with a pattern, as a write makes it. The chunk is held. */
static void fill_image(void)
{
    ck_assert_int_eq(ht_image_attach(obj, chunk, 0, SIZE, true), 0);
    uint8_t *p = bytes_of(1, SIZE);
    memcpy(ht_arena_data(s->arena, chunk->slot), p, SIZE);
    free(p);
    struct ht_image *im = ht_arena_image(s->arena, chunk->slot);
    im->valid_hi = im->data_hi = SIZE;
    ck_assert_int_eq(ht_chunk_reserve(obj, chunk, (uint32_t)ht_div_up(SIZE, HT_BLOCK_BYTES)), 0);
    ht_chunk_set_dirty(obj, chunk, 0);
}

static void open_shm(void)
{
    ht_chunk_unlock_exclusive(obj, chunk, 0);
    ht_store_unlock(s);
    ck_assert_int_eq(ht_obj_shm_open_for(obj, 0, &fd), 0);
    map = mmap(NULL, HT_CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(map, MAP_FAILED);
    ht_store_lock(s);
    chunk = ht_chunk_make(obj, 0);
    ht_chunk_lock_exclusive(obj, chunk, 0);
}

static void close_shm(void)
{
    munmap(map, HT_CHUNK_BYTES);
    ht_store_unlock(s);
    ht_obj_shm_close(obj);
    ht_store_lock(s);
}

static uint64_t file_size(void)
{
    struct stat st;

    ck_assert_int_eq(fstat(fd, &st), 0);
    return (uint64_t)st.st_size;
}

static void expect_pattern(const uint8_t *p, uint32_t bytes)
{
    uint8_t *want = bytes_of(1, SIZE);

    ck_assert_int_eq(memcmp(p, want, bytes), 0);
    free(want);
}

TEST(an_image_changes_its_kind_when_shared_memory_opens)
{
    fill_image();
    ck_assert_ptr_eq(ht_chunk_images(obj, chunk), &ht_arena_images);
    ck_assert_uint_ge(ht_image_reach(obj, chunk, 0), SIZE);
    open_shm();
    ck_assert(ht_obj_images(obj)->mapped);
    ck_assert_ptr_eq(ht_chunk_images(obj, chunk), ht_obj_images(obj));
    ck_assert_uint_eq(ht_image_reach(obj, chunk, 0), SIZE);
    ck_assert(ht_arena_image(s->arena, chunk->slot)->dirty);
    expect_pattern(map, SIZE);
    close_shm();
}

TEST(a_cut_leaves_zeros_in_both)
{
    fill_image();
    ht_image_cut(obj, chunk, 0, 200000);
    ck_assert_uint_eq(ht_arena_image(s->arena, chunk->slot)->valid_hi, 200000);
    ck_assert_uint_eq(ht_arena_image(s->arena, chunk->slot)->data_hi, 200000);
    open_shm();
    ht_image_cut(obj, chunk, 0, 100000);
    expect_pattern(map, 100000);
    for (unsigned i = 100000; i < SIZE; i++)
        ck_assert_uint_eq(map[i], 0);
    ck_assert(ht_arena_image(s->arena, chunk->slot)->dirty);
    close_shm();
}

TEST(a_cut_to_nothing_leaves_nothing_to_write)
{
    fill_image();
    ht_image_cut(obj, chunk, 0, 0);
    ck_assert_uint_eq(chunk->slot, HT_SLOT_NONE);
    ht_image_cut(obj, chunk, 0, 0); /* without an image, too */
    fill_image();
    open_shm();
    ht_image_cut(obj, chunk, 0, 0);
    ck_assert_uint_ne(chunk->slot, HT_SLOT_NONE); /* programs map it */
    ck_assert(!ht_arena_image(s->arena, chunk->slot)->dirty);
    ck_assert_uint_eq(map[0], 0);
    close_shm();
}

TEST(what_is_reverted_is_read_again)
{
    fill_image();
    ht_image_revert(obj, chunk, 0);
    ck_assert_uint_eq(chunk->slot, HT_SLOT_NONE);
    fill_image();
    open_shm();
    ht_image_revert(obj, chunk, 0);
    const struct ht_image *im = ht_arena_image(s->arena, chunk->slot);
    ck_assert(!im->dirty && im->valid_lo == im->valid_hi);
    close_shm();
}

TEST(shared_memory_grows_with_the_object_up_to_its_share)
{
    open_shm();
    ck_assert_uint_eq(file_size(), SIZE);
    ck_assert_int_eq(ht_image_attach(obj, chunk, 0, SIZE + 5000, true), 0);
    ck_assert_uint_eq(file_size(), SIZE + 5000);
    ck_assert_int_eq(ht_image_attach(obj, chunk, 0, SIZE + 9000, false), 0); /* reading never grows it */
    ck_assert_uint_eq(file_size(), SIZE + 5000);
    ck_assert_int_eq(ht_image_attach(obj, chunk, 4, 5, true), -ENOSPC);
    close_shm();
}

/* The first mapping has 2 MiB: further bytes lie at another address once the file has them. */
TEST(a_chunk_after_the_end_gets_an_image_when_the_file_grows)
{
    enum { FAR = 3 };

    open_shm();
    struct ht_chunk *far = ht_chunk_make(obj, FAR);
    ht_chunk_lock_exclusive(obj, far, FAR);
    ck_assert_int_eq(ht_image_attach(obj, far, FAR, 0, false), -EINVAL);
    ck_assert_uint_eq(far->slot, HT_SLOT_NONE);
    ck_assert_int_eq(ht_image_attach(obj, far, FAR, 100, true), 0);
    ck_assert_uint_eq(file_size(), FAR * HT_CHUNK_BYTES + 100);
    ck_assert_ptr_eq(ht_arena_data(s->arena, far->slot), ht_shm_chunk_memory(obj, FAR));
    ht_arena_data(s->arena, far->slot)[99] = 7;
    uint8_t byte = 0;
    ck_assert_int_eq(pread(fd, &byte, 1, FAR * HT_CHUNK_BYTES + 99), 1);
    ck_assert_uint_eq(byte, 7);
    ht_chunk_unlock_exclusive(obj, far, FAR);
    close_shm();
}

TEST(eviction_spares_memory_that_programs_have)
{
    fill_image();
    ht_chunk_set_clean(obj, chunk, 0);
    ht_chunk_unreserve(obj, chunk);
    open_shm();
    ht_chunk_unlock_exclusive(obj, chunk, 0);
    ht_obj_images(obj)->evict(obj);
    ck_assert(ht_obj_images(obj)->mapped);
    ck_assert_uint_ne(chunk->slot, HT_SLOT_NONE);
    close_shm();
    ht_obj_images(obj)->evict(obj);
    ck_assert_ptr_eq(ht_obj_images(obj), &ht_arena_images);
    chunk = ht_chunk_make(obj, 0);
    ht_chunk_lock_exclusive(obj, chunk, 0);
    ck_assert_uint_eq(chunk->slot, HT_SLOT_NONE);
}

RUN_TESTS("image", .setup = start, .teardown = end)
