/* SPDX-License-Identifier: Apache-2.0 */
/*
 * residency.c - what stays in memory, on request: an object that is not used any more leaves it, and content that waits
 * gets room there.
 */
#include "tiering/api/object.h"
#include "tiering/base/trace.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/engine/engine.h"
#include "tiering/store/store_priv.h"

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
    struct ht_slice slice = {0};

    ht_store_lock(o->s);
    ht_chunk_for_each_busy(c, o, index) {
        if (c->slot != HT_SLOT_NONE)
            ht_arena_unprotect(o->s->arena, c->slot);
        ht_slice_next(o->s, &slice);
    }
    ht_store_unlock(o->s);
}

/* What the object's residency says now: another thread may change it, and goes through the images, too. */
static void apply(struct ht_obj *o, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_arena *a = o->s->arena;

    ht_arena_unpin(a, c->slot);
    if (o->residency == HT_RESIDENCY_PINNED && !ht_arena_pin(a, c->slot))
        ht_arena_want_pinned(a, o->size);
    if (o->residency == HT_RESIDENCY_COLD) {
        ht_arena_unprotect(a, c->slot);
        ht_arena_cool(a, c->slot);
    }
}

void ht_obj_describe(struct ht_obj *o, bool compress, bool tensor, bool changed)
{
    ht_store_lock(o->s);
    /* Scratch is in no delta (note_stores). */
    o->scope->edits += changed && o->tensor != tensor && o->size > 0 && o->obj_class != HT_CLASS_SCRATCH;
    o->compress = compress;
    o->tensor = tensor;
    ht_store_unlock(o->s);
}

void ht_obj_set_residency(struct ht_obj *o, enum ht_residency residency)
{
    struct ht_slice slice = HT_SLICE_RESTING;

    ht_store_lock(o->s);
    bool changes = o->residency != residency;
    if (changes && o->residency == HT_RESIDENCY_PINNED)
        ht_arena_want_pinned(o->s->arena, 0);
    o->residency = residency;
    ht_chunk_for_each_busy(c, o, index) {
        if (!changes || !o->resident)
            break;
        if (c->slot != HT_SLOT_NONE)
            apply(o, c);
        ht_slice_next(o->s, &slice);
    }
    ht_store_unlock(o->s);
}

int64_t ht_obj_pinnable_bytes(struct ht_obj *o)
{
    struct ht_slice slice = HT_SLICE_RESTING;
    uint64_t own = 0;

    ht_store_lock(o->s);
    ht_chunk_for_each_busy(c, o, index) {
        if (o->residency != HT_RESIDENCY_PINNED || !o->resident)
            break;
        if (c->slot != HT_SLOT_NONE && ht_arena_image(o->s->arena, c->slot)->pinned)
            own += ht_arena_slot_bytes(o->s->arena, c->slot);
        ht_slice_next(o->s, &slice);
    }
    own = ht_min_u64(own, ht_arena_sums(o->s->arena)->pinned_bytes); /* another thread may have unpinned some */
    uint64_t room = ht_arena_pinned_max(ht_arena_bytes(o->s->arena)) - ht_arena_sums(o->s->arena)->pinned_bytes + own;
    uint64_t size = o->s->opts.shm_bytes ? 0 : ht_min_u64(o->size, INT64_MAX / 2); /* it may get memory of its own */
    ht_store_unlock(o->s);
    return (int64_t)room - (int64_t)size;
}

void ht_store_expect_waiting(struct ht_store *s, uint64_t bytes)
{
    ht_store_lock(s);
    ht_arena_expect_waiting(s->arena, bytes);
    ht_planner_expect_waiting(s, bytes);
    ht_store_unlock(s);
}

void ht_store_end_step(struct ht_store *s, bool waits)
{
    ht_store_lock(s);
    ht_arena_end_step(s->arena);
    struct ht_passing *p = &s->own->passing;
    if (ht_passing_end_step(p, waits))
        ht_arena_set_protected_max(s->arena, ht_arena_bytes(s->arena) - ht_min_u64(p->bytes, ht_arena_bytes(s->arena)));
    ht_store_unlock(s);
}
