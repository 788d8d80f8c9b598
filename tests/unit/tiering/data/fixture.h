/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fixture.h - what object/ and data/ need of a store, without a log: memory, two devices of memory, and a scratch
 * object of one chunk, which is held.
 */
#pragma once

#include "tests/support/dev.h"
#include "tests/support/suite.h"
#include "tiering/io/rings.h"
#include "tiering/cache/arena.h"
#include "tiering/cache/staging.h"
#include "tiering/api/object.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/object.h"
#include "tiering/object/scope.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/data.h"

enum { DATA_MIB = 1 << 20, DATA_DEVICES = 2 };

static struct ht_store *s;
static struct ht_obj *obj;
static struct ht_chunk *chunk;
static struct ht_ring *ring;

static inline int make_no_room(struct ht_store *store)
{
    return -ENOSPC;
}

static inline void keep_shm(struct ht_obj *o)
{
}

static inline void open_devices(void)
{
    uint64_t blocks[DATA_DEVICES];
    struct ht_rings_of of = {.area_count = 0};

    s->dev_count = DATA_DEVICES;
    for (unsigned i = 0; i < DATA_DEVICES; i++) {
        ck_assert_int_eq(dev_open_ram(8 * DATA_MIB, 512, &s->dev[i]), 0);
        blocks[i] = 8 * DATA_MIB / HT_BLOCK_BYTES;
        of.dev[i] = s->dev[i];
    }
    ck_assert_int_eq(ht_alloc_new(DATA_DEVICES, blocks, &s->alloc), 0);
    ck_assert_int_eq(ht_rings_new(&of, &s->rings), 0);
}

static inline void setup(void)
{
    s = calloc(1, sizeof(*s));
    s->opts = (struct ht_store_opts){.numa_node = HT_NUMA_OFF, .shm_bytes = 4 * DATA_MIB, .no_threads = true};
    s->layout.salt = 7;
    s->hooks.make_room = make_no_room;
    s->hooks.free_shm = keep_shm;
    ht_mutex_init(&s->lock, HT_LOCK_STORE);
    ht_waits_init(&s->waits);
    ht_pool_init(&s->objects.pool, sizeof(struct ht_obj));
    s->objects.tables_bytes_max = DATA_MIB;
    s->objects.scope0 = ht_scope_find(s, 0, true);
    ck_assert_int_eq(ht_data_setup(s), 0);
    ck_assert_int_eq(ht_store_find_nodes(s), 0);
    ck_assert_int_eq(ht_arena_new(8 * DATA_MIB, &s->numa.nodes, ht_store_evict_image, s, &s->arena), 0);
    ck_assert_int_eq(ht_staging_new(16 * DATA_MIB, &s->numa.nodes, &s->staging), 0);
    open_devices();
    ring = ht_store_ring(s);
    ck_assert_ptr_nonnull(ring);

    struct ht_obj_attr attr = {.oid = 5, .chunk_bytes = HT_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH};
    ck_assert_int_eq(ht_obj_create(s, &attr, &obj), 0);
    obj->size = HT_CHUNK_BYTES;
    ht_store_lock(s);
    chunk = ht_chunk_make(obj, 0);
    ht_chunk_lock_exclusive(obj, chunk, 0);
    ht_store_unlock(s);
}

/* The object, and its space: nothing is left. */
static inline void free_object(void)
{
    ht_store_lock(s);
    ht_chunk_unlock_exclusive(obj, chunk, 0);
    obj->dead = true;
    ht_obj_put_locked(obj);
    ck_assert_uint_eq(s->flow.writing_blocks, 0);
    ht_store_unlock(s);
    for (unsigned i = 0; i < DATA_DEVICES; i++) {
        struct ht_alloc_device space;
        ht_alloc_device(s->alloc, i, &space);
        ck_assert_uint_eq(space.free_blocks + space.bad_blocks, space.blocks);
    }
}

static inline void free_rest(void)
{
    ht_rings_free(s->rings);
    ht_staging_free(s->staging);
    ht_arena_free(s->arena);
    ht_alloc_free(s->alloc);
    for (unsigned i = 0; i < DATA_DEVICES; i++)
        ht_dev_close(s->dev[i]);
    ht_data_teardown(s);
    ht_id_table_free(&s->objects.scopes_by_id);
    free(s->objects.scopes);
    ht_id_table_free(&s->objects.table);
    ht_pool_destroy(&s->objects.pool);
    ht_waits_destroy(&s->waits);
    ht_mutex_destroy(&s->lock);
    free(s);
}

static inline void teardown(void)
{
    free_object();
    free_rest();
}

/* Whole blocks. */
static inline uint8_t *bytes_of(unsigned seed, uint32_t bytes)
{
    uint8_t *p = aligned_alloc(HT_BLOCK_BYTES, ht_round_up(bytes, HT_BLOCK_BYTES));

    for (uint32_t i = 0; i < ht_round_up(bytes, HT_BLOCK_BYTES); i++)
        p[i] = (uint8_t)(i * 2654435761u + seed + (i >> 13));
    return p;
}
