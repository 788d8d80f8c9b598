/* SPDX-License-Identifier: Apache-2.0 */
/* A store whose memory contradicts itself ends the process when it is verified; a sound one passes. */
#include <signal.h>

#include "tiering/space/alloc.h"
#include "tiering/cache/arena.h"
#include "tiering/object/chunk.h"
#include "tiering/object/object.h"
#include "tiering/object/refcount.h"
#include "tiering/object/scope.h"
#include "tiering/object/space.h"
#include "tests/unit/tiering/store/fixture.h"

enum { CHUNK = 64 << 10, CHUNKS = 12, SCOPE = 77 };

static struct ht_obj *o, *copy, *shared;

/* Chunks of o: 0 dirty, 1 current, 2 cut, 3 prealloc, the others published. All of copy are those of o. */
static void make(void)
{
    uint8_t *p = pattern(2 * MIB, 1);
    int fd;

    fixture_shm_bytes = 4 * MIB;
    fresh(64, false);
    o = object(CHUNK, 0);
    copy = object(CHUNK, 0);
    shared = object(HT_CHUNK_BYTES, 0);
    put_all(o, 0, p, CHUNKS * CHUNK);
    put_all(shared, 0, p, 2 * MIB);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_int_eq(ht_obj_sync(shared), 0);
    ck_assert_int_eq(ht_obj_clone(o, 4 * CHUNK, copy, 4 * CHUNK, 8 * CHUNK), 8 * CHUNK);
    put_all(o, CHUNK, p + 1, CHUNK);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    ck_assert_int_eq(ht_obj_truncate(o, (CHUNKS - 1) * CHUNK + 1000), 0);
    ck_assert_int_eq(ht_obj_punch(o, 3 * CHUNK, CHUNK), 0);
    ck_assert_int_eq(ht_obj_prealloc(o, 3 * CHUNK, CHUNK), 0);
    put_all(o, 0, p + 2, CHUNK);
    ck_assert_int_eq(ht_obj_shm_open_for(shared, 0, &fd), 0);
}

static struct ht_chunk *chunk(uint64_t index)
{
    return ht_chunk_find(o, index);
}

static struct ht_image *image(uint64_t index)
{
    return ht_arena_image(s->arena, chunk(index)->slot);
}

/* ------------------------------------------------------------------- errors */

static void two_newest_references(void)
{
    chunk(1)->flags |= HT_CH_GONE;
}

static void a_hole_over_nothing(void)
{
    chunk(3)->flags &= (uint8_t)~HT_CH_PUB & 0x3f;
}

static void a_cut_that_shows_more(void)
{
    chunk(CHUNKS - 1)->cur.visible = CHUNK;
}

static void a_cut_of_another_place(void)
{
    chunk(CHUNKS - 1)->cur.checksum++;
}

static void a_reference_longer_than_its_space(void)
{
    chunk(5)->pub.visible = CHUNK / 2;
    chunk(5)->pub.stored = CHUNK / 2;
}

static void two_kinds_of_holders(void)
{
    chunk(5)->exclusive = chunk(5)->shared = 1;
}

static void a_write_that_holds_nothing(void)
{
    chunk(5)->writing = 1;
}

static void no_log_bytes(void)
{
    chunk(0)->flags &= (uint8_t)~HT_CH_LOG_RESERVED & 0x3f;
}

static void a_leaf_with_another_count(void)
{
    ht_chunk_leaf(chunk(1))->unpublished++;
}

static void a_node_with_other_unpublished_chunks(void)
{
    ((struct ht_node *)o->extra->root)->mask[HT_MARK_UNPUBLISHED] ^= 1;
}

static void a_node_with_other_busy_chunks(void)
{
    ((struct ht_node *)o->extra->root)->mask[HT_MARK_BUSY] ^= 1;
}

static void a_node_with_other_idle_chunks(void)
{
    ((struct ht_node *)o->extra->root)->mask[HT_MARK_IDLE] ^= 1;
}

static void a_leaf_that_misses_a_busy_chunk(void)
{
    ((struct ht_leaf *)ht_chunk_leaf(chunk(1)))->busy ^= 1u << 1;
}

static void a_leaf_of_nothing(void)
{
    ck_assert_ptr_nonnull(ht_chunk_make(o, 1000));
}

static void a_dirty_chunk_too_many(void)
{
    o->dirty++;
}

static void blocks_that_nothing_names(void)
{
    o->stored_blocks++;
}

static void shared_blocks_that_nothing_names(void)
{
    ht_obj_extra(o)->shared_blocks++;
}

static void prealloc_of_no_chunk(void)
{
    ht_obj_extra(o)->prealloc_blocks++;
}

static void an_image_of_another_chunk(void)
{
    image(0)->index = 9;
}

static void an_image_without_a_chunk(void)
{
    chunk(0)->slot = HT_SLOT_NONE;
}

static void an_image_that_was_put(void)
{
    ht_arena_put(s->arena, chunk(5)->slot);
}

static void bytes_from_behind_their_end(void)
{
    image(0)->valid_lo = image(0)->valid_hi + 1;
}

static void a_dirty_image_that_nobody_counted(void)
{
    image(5)->dirty = true;
}

static void a_protected_image_that_nobody_counted(void)
{
    image(5)->protected = true;
}

static void an_image_read_ahead_that_nobody_counted(void)
{
    image(5)->readahead = true;
}

static void dirty_bytes_of_no_image(void)
{
    s->flow.dirty_bytes += CHUNK;
}

static void a_published_chunk_too_many(void)
{
    s->objects.chunks++;
}

static void memory_of_no_table(void)
{
    s->objects.tables_bytes += 64;
}

static void a_promise_to_nobody(void)
{
    ht_obj_extra(o)->log_chunks++;
}

static void an_object_that_is_not_counted(void)
{
    s->objects.count--;
}

static void a_change_on_no_list(void)
{
    ht_list_del(&o->touched);
}

static void a_list_of_another_scope(void)
{
    o->scope = ht_scope_find(s, SCOPE, true);
}

static void leaving_and_not_deleted(void)
{
    o->leaving = true;
}

static void dead_and_not_deleted(void)
{
    o->dead = true;
}

static void a_reservation_of_nothing(void)
{
    ck_assert_int_eq(ht_alloc_reserve(s->alloc, 1), 0);
}

static void a_reservation_that_is_gone(void)
{
    ht_alloc_unreserve(s->alloc, 1);
}

static void a_reserve_larger_than_two_copies(void)
{
    ck_assert_int_eq(ht_alloc_reserve(s->alloc, 1), 0);
    ht_obj_extra(o)->rewrite_reserve_left++;
}

static void a_block_that_nothing_names(void)
{
    struct ht_extent e = {.blocks = 1};

    while (!ht_alloc_is_free(s->alloc, &e))
        e.block++;
    ck_assert_int_eq(ht_alloc_mark(s->alloc, &e), 0);
}

static void a_block_that_is_free_and_named(void)
{
    struct ht_extent e = ht_ref_extent(&chunk(5)->pub, 0);

    ht_alloc_release(s->alloc, &e);
}

static void a_deferred_free_of_nothing(void)
{
    ht_alloc_pending_free_add(s->alloc, &(struct ht_extent){.blocks = 1});
}

static void an_owner_too_many(void)
{
    ck_assert_int_eq(ht_refcount_add(s, &chunk(5)->pub, true), 0);
}

static void an_owner_too_few(void)
{
    chunk(5)->pub.shared = 0;
}

static void a_write_of_nothing(void)
{
    s->flow.writing_blocks++;
}

static void shared_memory_beyond_its_share(void)
{
    s->opts.shm_bytes = MIB;
}

static void an_image_in_shared_memory_of_none(void)
{
    ht_obj_extra(shared)->shm = NULL;
}

static void images_at_each_others_place(void)
{
    struct ht_chunk *a = ht_chunk_find(shared, 0), *b = ht_chunk_find(shared, 1);
    uint32_t slot = a->slot;

    a->slot = b->slot;
    b->slot = slot;
    ht_arena_image(s->arena, a->slot)->index = 0;
    ht_arena_image(s->arena, b->slot)->index = 1;
}

static void an_image_after_the_end_of_shared_memory(void)
{
    uint8_t *start = ht_arena_data(s->arena, ht_chunk_find(shared, 0)->slot);
    uint32_t slot = ht_arena_attach_external(s->arena, start + 3 * MIB);

    ck_assert_uint_ne(slot, HT_SLOT_NONE);
    ht_chunk_attach_image(shared, ht_chunk_make(shared, 3), 3, slot);
    ht_arena_image(s->arena, slot)->valid_hi = MIB;
}

static void shared_memory_that_is_valid_in_part(void)
{
    ht_arena_image(s->arena, ht_chunk_find(shared, 0)->slot)->valid_lo = 5;
}

static void stores_without_shared_memory(void)
{
    ht_obj_extra(o)->may_be_dirty = true;
}

static void (*const wrong[])(void) = {
    two_newest_references,
    a_hole_over_nothing,
    a_cut_that_shows_more,
    a_cut_of_another_place,
    a_reference_longer_than_its_space,
    two_kinds_of_holders,
    a_write_that_holds_nothing,
    no_log_bytes,
    a_leaf_with_another_count,
    a_leaf_that_misses_a_busy_chunk,
    a_node_with_other_unpublished_chunks,
    a_node_with_other_busy_chunks,
    a_node_with_other_idle_chunks,
    a_leaf_of_nothing,
    a_dirty_chunk_too_many,
    blocks_that_nothing_names,
    shared_blocks_that_nothing_names,
    prealloc_of_no_chunk,
    an_image_of_another_chunk,
    an_image_without_a_chunk,
    an_image_that_was_put,
    bytes_from_behind_their_end,
    a_dirty_image_that_nobody_counted,
    a_protected_image_that_nobody_counted,
    an_image_read_ahead_that_nobody_counted,
    dirty_bytes_of_no_image,
    a_published_chunk_too_many,
    memory_of_no_table,
    a_promise_to_nobody,
    an_object_that_is_not_counted,
    a_change_on_no_list,
    a_list_of_another_scope,
    leaving_and_not_deleted,
    dead_and_not_deleted,
    a_reservation_of_nothing,
    a_reservation_that_is_gone,
    a_reserve_larger_than_two_copies,
    a_block_that_nothing_names,
    a_block_that_is_free_and_named,
    a_deferred_free_of_nothing,
    an_owner_too_many,
    an_owner_too_few,
    a_write_of_nothing,
    shared_memory_beyond_its_share,
    an_image_in_shared_memory_of_none,
    images_at_each_others_place,
    an_image_after_the_end_of_shared_memory,
    shared_memory_that_is_valid_in_part,
    stores_without_shared_memory,
};

/* ------------------------------------------------------------------- tests */

TEST(a_sound_store_passes)
{
    make();
    ck_assert(chunk(0)->flags & HT_CH_PUB && image(0)->dirty);
    ck_assert(chunk(1)->flags & HT_CH_CUR);
    ck_assert(chunk(CHUNKS - 1)->flags & HT_CH_SHARE);
    ck_assert(chunk(3)->flags & HT_CH_GONE && chunk(3)->prealloc);
    ck_assert(chunk(5)->pub.shared && chunk(5)->slot != HT_SLOT_NONE);
    ht_store_verify(s, true);
    ht_obj_shm_close(shared);
    remount();
    ht_store_verify(s, true);
}

/* Each invariant alone: the state passes until one thing is wrong. */
TEST_SIGNAL(a_broken_store_ends_the_process, SIGABRT, HT_ARRAY_SIZE(wrong))
{
    make();
    ht_store_verify(s, true);
    wrong[_i]();
    ht_store_verify(s, true);
}

RUN_TESTS("verify", .teardown = fixture_end)
