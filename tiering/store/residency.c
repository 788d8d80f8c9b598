/* SPDX-License-Identifier: Apache-2.0 */
/*
 * residency.c - what stays in memory, on request: an object that is not used any more leaves it, and content that waits
 * gets room there.
 */
#include "tiering/api/object.h"
#include "tiering/api/store.h"
#include "tiering/base/trace.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/object.h"
#include "tiering/engine/engine.h"

void ht_obj_evict(struct ht_obj *o)
{
    struct ht_trace_mark mark = ht_trace_begin();

    ht_store_lock(o->s);
    ht_obj_images(o)->evict(o);
    uint64_t size = o->size;
    ht_store_unlock(o->s);
    ht_trace_end(ht_store_trace(o->s), &mark, HT_TRACE_EVICT, o->oid, 0, size);
}

void ht_obj_unprotect(struct ht_obj *o)
{
    struct ht_chunk *c;
    uint64_t index = 0;

    ht_store_lock(o->s);
    ht_chunk_for_each_from(c, o, index) if (c->slot != HT_SLOT_NONE) ht_chunk_unprotect(o, c);
    ht_store_unlock(o->s);
}

void ht_store_expect_waiting(struct ht_store *s, uint64_t bytes)
{
    ht_store_lock(s);
    ht_arena_expect_waiting(s->arena, bytes);
    ht_planner_expect_waiting(s, bytes);
    ht_store_unlock(s);
}
