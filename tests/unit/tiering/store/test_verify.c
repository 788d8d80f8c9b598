/* SPDX-License-Identifier: Apache-2.0 */
/* A store whose memory contradicts itself ends the process when it is verified; a sound one passes. */
#include <signal.h>

#include "tiering/space/alloc.h"
#include "tiering/cache/arena.h"
#include "tiering/object/chunk.h"
#include "tiering/object/object.h"
#include "tiering/object/owners.h"
#include "tiering/object/scope.h"
#include "tiering/object/space.h"
#include "tests/support/wrong.h"
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

WRONG_BY(two_newest_references, chunk(1)->flags |= HT_CH_GONE)
WRONG_BY(a_hole_over_nothing, chunk(3)->flags &= (uint8_t)~HT_CH_PUB & 0x3f)
WRONG_BY(a_cut_that_shows_more, chunk(CHUNKS - 1)->cur.visible = CHUNK)
WRONG_BY(a_cut_of_another_place, chunk(CHUNKS - 1)->cur.checksum++)

WRONG(a_reference_longer_than_its_space)
{
    chunk(5)->pub.visible = CHUNK / 2;
    chunk(5)->pub.stored = CHUNK / 2;
}

WRONG_BY(two_kinds_of_holders, chunk(5)->exclusive = chunk(5)->shared = 1)
WRONG_BY(a_write_that_holds_nothing, chunk(5)->writing = 1)
WRONG_BY(no_log_bytes, chunk(0)->flags &= (uint8_t)~HT_CH_LOG_RESERVED & 0x3f)
WRONG_BY(a_leaf_with_another_count, ht_chunk_leaf(chunk(1))->unpublished++)
WRONG_BY(a_node_with_other_unpublished_chunks, ((struct ht_node *)o->extra->root)->mask[HT_MARK_UNPUBLISHED] ^= 1)
WRONG_BY(a_node_with_other_busy_chunks, ((struct ht_node *)o->extra->root)->mask[HT_MARK_BUSY] ^= 1)
WRONG_BY(a_node_with_other_idle_chunks, ((struct ht_node *)o->extra->root)->mask[HT_MARK_IDLE] ^= 1)
WRONG_BY(a_leaf_that_misses_a_busy_chunk, ((struct ht_leaf *)ht_chunk_leaf(chunk(1)))->busy ^= 1u << 1)
WRONG_BY(a_leaf_of_nothing, ck_assert_ptr_nonnull(ht_chunk_make(o, 1000)))
WRONG_BY(a_dirty_chunk_too_many, o->dirty++)
WRONG_BY(blocks_that_nothing_names, o->stored_blocks++)
WRONG_BY(shared_blocks_that_nothing_names, ht_obj_extra(o)->shared_blocks++)
WRONG_BY(prealloc_of_no_chunk, ht_obj_extra(o)->prealloc_blocks++)
WRONG_BY(an_image_of_another_chunk, image(0)->index = 9)
WRONG_BY(an_image_without_a_chunk, chunk(0)->slot = HT_SLOT_NONE)
WRONG_BY(an_image_that_was_put, ht_arena_put(s->arena, chunk(5)->slot))
WRONG_BY(bytes_from_behind_their_end, image(0)->valid_lo = image(0)->valid_hi + 1)
WRONG_BY(a_dirty_image_that_nobody_counted, image(5)->dirty = true)
WRONG_BY(a_protected_image_that_nobody_counted, image(5)->protected = true)
WRONG_BY(an_image_read_ahead_that_nobody_counted, image(5)->readahead = true)
WRONG_BY(dirty_bytes_of_no_image, s->flow.dirty_bytes += CHUNK)
WRONG_BY(a_published_chunk_too_many, s->objects.chunks++)
WRONG_BY(memory_of_no_table, s->objects.tables_bytes += 64)
WRONG_BY(a_promise_to_nobody, ht_obj_extra(o)->log_chunks++)
WRONG_BY(an_object_that_is_not_counted, s->objects.table.count--)
WRONG_BY(a_change_on_no_list, ht_list_del(&o->touched))
WRONG_BY(a_list_of_another_scope, o->scope = ht_scope_find(s, SCOPE, true))
WRONG_BY(leaving_and_not_deleted, o->leaving = true)
WRONG_BY(dead_and_not_deleted, o->dead = true)
WRONG_BY(a_reservation_of_nothing, ck_assert_int_eq(ht_alloc_reserve(s->alloc, 1), 0))
WRONG_BY(a_reservation_that_is_gone, ht_alloc_unreserve(s->alloc, 1))

WRONG(a_reserve_larger_than_two_copies)
{
    ck_assert_int_eq(ht_alloc_reserve(s->alloc, 1), 0);
    ht_obj_extra(o)->rewrite_reserve_left++;
}

WRONG(a_block_that_nothing_names)
{
    struct ht_extent e = {.blocks = 1};

    while (!ht_alloc_is_free(s->alloc, &e))
        e.block++;
    ck_assert_int_eq(ht_alloc_mark(s->alloc, &e), 0);
}

WRONG(a_block_that_is_free_and_named)
{
    struct ht_extent e = ht_ref_extent(&chunk(5)->pub, 0);

    ht_alloc_release(s->alloc, &e);
}

WRONG_BY(a_deferred_free_of_nothing, ht_alloc_pending_free_add(s->alloc, &(struct ht_extent){.blocks = 1}))
WRONG_BY(an_owner_too_many, ck_assert_int_eq(ht_refcount_add(s, &chunk(5)->pub, true), 0))
WRONG_BY(an_owner_too_few, chunk(5)->pub.shared = 0)
WRONG_BY(a_write_of_nothing, s->flow.writing_blocks++)
WRONG_BY(shared_memory_beyond_its_share, s->opts.shm_bytes = MIB)
WRONG_BY(an_image_in_shared_memory_of_none, ht_obj_extra(shared)->shm = NULL)

WRONG(images_at_each_others_place)
{
    struct ht_chunk *a = ht_chunk_find(shared, 0), *b = ht_chunk_find(shared, 1);
    uint32_t slot = a->slot;

    a->slot = b->slot;
    b->slot = slot;
    ht_arena_image(s->arena, a->slot)->index = 0;
    ht_arena_image(s->arena, b->slot)->index = 1;
}

WRONG(an_image_after_the_end_of_shared_memory)
{
    uint8_t *start = ht_arena_data(s->arena, ht_chunk_find(shared, 0)->slot);
    uint32_t slot = ht_arena_attach_external(s->arena, start + 3 * MIB);

    ck_assert_uint_ne(slot, HT_SLOT_NONE);
    ht_chunk_attach_image(shared, ht_chunk_make(shared, 3), 3, slot);
    ht_arena_image(s->arena, slot)->valid_hi = MIB;
}

WRONG_BY(shared_memory_that_is_valid_in_part, ht_arena_image(s->arena, ht_chunk_find(shared, 0)->slot)->valid_lo = 5)
WRONG_BY(stores_without_shared_memory, ht_obj_extra(o)->may_be_dirty = true)

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
TEST_SIGNAL(a_broken_store_ends_the_process, SIGABRT, wrongs)
{
    make();
    ht_store_verify(s, true);
    wrong[_i].make();
    ht_store_verify(s, true);
}

RUN_TESTS("verify", .teardown = fixture_end)
