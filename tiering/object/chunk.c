/* SPDX-License-Identifier: Apache-2.0 */
/* chunk.c - changes of a chunk's image and references. The caller holds the store's lock. */
#include <assert.h>

#include "tiering/object/chunk.h"
#include "tiering/object/image.h"
#include "tiering/api/object.h"
#include "tiering/base/probe.h"
#include "tiering/space/alloc.h"
#include "tiering/cache/arena.h"
#include "tiering/object/context.h"
#include "tiering/object/numa.h"
#include "tiering/object/object.h"
#include "tiering/object/record_bytes.h"
#include "tiering/object/prealloc.h"
#include "tiering/object/ref.h"
#include "tiering/object/scope.h"
#include "tiering/object/space.h"

uint32_t ht_chunk_len(const struct ht_obj *o, uint64_t index)
{
    uint64_t start = index << o->chunk_shift;

    if (start >= o->size)
        return 0;
    return (uint32_t)ht_min_u64(o->size - start, ht_obj_bytes_per_chunk(o));
}

/* Drops an image that was made for an operation that failed. */
void ht_chunk_drop_empty(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    if (c->slot == HT_SLOT_NONE)
        return;
    const struct ht_image *im = ht_arena_image(o->s->arena, c->slot);
    if (!im->dirty && im->valid_lo == im->valid_hi)
        ht_chunk_drop_image(o, c, index);
}

void ht_chunk_set_dirty(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_image *im = ht_arena_image(o->s->arena, c->slot);

    assert(!o->scope->frozen);
    o->version++;
    ht_arena_set_final(o->s->arena, c->slot, false);
    if (im->dirty)
        return;
    ht_arena_set_dirty(o->s->arena, c->slot, true);
    o->dirty++;
    ht_chunk_leaf(c)->dirty++;
    o->s->flow.dirty_bytes += ht_arena_slot_bytes(o->s->arena, c->slot);
    if (ht_arena_under_pressure(o->s->arena))
        o->s->waits.wakes.writeback = o->s->waits.wakes.any = true;
    ht_obj_touch(o);
}

void ht_chunk_set_final(struct ht_obj *o, struct ht_chunk *c)
{
    struct ht_store *s = o->s;

    if (o->obj_class == HT_CLASS_SCRATCH || ht_obj_is_volatile(o))
        return;
    ht_arena_set_final(s->arena, c->slot, true);
    s->waits.wakes.cleaning = s->waits.wakes.any = true;
}

void ht_chunk_set_clean(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_image *im = ht_arena_image(o->s->arena, c->slot);

    if (!im->dirty)
        return;
    ht_arena_set_dirty(o->s->arena, c->slot, false);
    o->dirty--;
    ht_chunk_leaf(c)->dirty--;
    o->s->flow.dirty_bytes -= ht_arena_slot_bytes(o->s->arena, c->slot);
}

/* If there is no room it asks for as much as the object may need. */
static void pin_if_wanted(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    if (o->residency == HT_RESIDENCY_PINNED && !ht_arena_pin(o->s->arena, c->slot))
        ht_arena_want_pinned(o->s->arena, o->size);
}

void ht_chunk_attach_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t slot)
{
    ht_arena_attach(o->s->arena, slot, o, index, o->obj_class != HT_CLASS_SCRATCH);
    ht_arena_image(o->s->arena, slot)->target_device = ht_chunk_stored_target_device(o->s, c);
    c->slot = slot;
    o->resident++;
    pin_if_wanted(o, c);
}

void ht_chunk_use_image(struct ht_obj *o, struct ht_chunk *c)
{
    ht_arena_use(o->s->arena, c->slot);
    pin_if_wanted(o, c);
    if (o->residency == HT_RESIDENCY_COLD)
        ht_arena_cool(o->s->arena, c->slot);
}

void ht_chunk_protect(struct ht_obj *o, struct ht_chunk *c)
{
    if (o->residency != HT_RESIDENCY_COLD && ht_arena_may_protect(o->s->arena, c->slot))
        ht_arena_protect(o->s->arena, c->slot);
}

void ht_chunk_unprotect(struct ht_obj *o, struct ht_chunk *c)
{
    ht_arena_unprotect(o->s->arena, c->slot);
}

/* Scratch is never published. */
static void count_found(struct ht_obj *o, size_t bytes) HT_REQUIRES(HT_LOCK_STORE)
{
    o->scope->found_bytes += o->obj_class == HT_CLASS_SCRATCH ? 0 : bytes;
}

void ht_chunk_note_unpublished(struct ht_obj *o, struct ht_chunk *c, uint64_t index, struct ht_chunk_before was)
{
    bool is = ht_chunk_unpublished(c);

    if (o->scope == o->s->objects.scope0)
        o->s->objects.superseded_blocks += (uint64_t)ht_chunk_superseded_blocks(c) - was.superseded_blocks;
    if (is == was.unpublished)
        return;
    if (is) {
        o->unpublished++;
        if (!ht_chunk_leaf(c)->unpublished++ && index)
            ht_chunk_note_leaf(o, index, HT_MARK_UNPUBLISHED, true);
        ht_scope_note_change(o);
        count_found(o, HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES);
        if ((c->flags & HT_CH_CUR) && ht_ref_holds(&c->cur))
            count_found(o, ht_ref_extra_bytes(&c->cur));
        ht_obj_touch(o);
    } else {
        o->unpublished--;
        if (!--ht_chunk_leaf(c)->unpublished && index)
            ht_chunk_note_leaf(o, index, HT_MARK_UNPUBLISHED, false);
    }
}

void ht_chunk_install(struct ht_obj *o, struct ht_chunk *c, uint64_t index, const struct ht_ref *ref)
{
    struct ht_chunk_before was = ht_chunk_before(c);

    assert(!o->scope->frozen);
    ht_chunk_drop_cur(o, c);
    c->cur = *ref;
    c->flags |= HT_CH_CUR;
    if (o->obj_class != HT_CLASS_SCRATCH)
        ht_ref_log_reserve_pieces(o->s, ref);
    if (ref->visible == ht_obj_bytes_per_chunk(o))
        ht_chunk_prealloc_drop(o, c, 0);
    c->flags &= (uint8_t)~HT_CH_BAD;
    c->generation++;
    if (was.unpublished && ht_ref_holds(&c->cur)) /* maybe more pieces than before */
        count_found(o, ht_ref_extra_bytes(&c->cur));
    ht_chunk_note_unpublished(o, c, index, was);
}

void ht_chunk_install_hole(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_chunk_before was = ht_chunk_before(c);

    ht_chunk_drop_cur(o, c);
    if (c->flags & HT_CH_PUB)
        c->flags |= HT_CH_GONE;
    c->flags &= (uint8_t)~HT_CH_BAD;
    c->generation++;
    ht_chunk_note_unpublished(o, c, index, was);
    ht_chunk_drop_log_reserve(o, c);
}

void ht_chunk_drop_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    if (c->slot == HT_SLOT_NONE)
        return;
    const struct ht_image *im = ht_arena_image(o->s->arena, c->slot);
    if (im->dirty && o->obj_class == HT_CLASS_SCRATCH)
        o->s->flow.scratch_dropped_bytes += im->data_hi;
    ht_chunk_set_clean(o, c, index);
    ht_chunk_unreserve(o, c);
    ht_wake_for_slot(o->s, c->slot);
    ht_arena_put(o->s->arena, c->slot);
    c->slot = HT_SLOT_NONE;
    o->resident--;
}

/* Its place in the order is as old as its hint. It has another one now, or none: it stays for the moment. */
static bool moves_in_order(struct ht_store *s, const struct ht_obj *o, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_image *im = ht_arena_image(s->arena, slot);

    if (!s->next_uses.leads || !im->planned)
        return false;
    uint64_t now = ht_now_ns();
    const struct ht_next_use *u = ht_next_uses_find(&s->next_uses, o->oid, now);
    unsigned place = u ? ht_next_use_place(u, now) : 0;
    if (u && place >= im->next_use)
        return false;
    if (u)
        ht_arena_set_next_use(s->arena, slot, place, false);
    else
        ht_arena_forget_next_use(s->arena, slot);
    return true;
}

/* The arena wants to evict a clean image. */
bool ht_store_evict_image(void *ctx, uint32_t slot)
{
    struct ht_store *s = ctx;
    struct ht_image *im = ht_arena_image(s->arena, slot);
    struct ht_obj *o = im->owner;
    struct ht_chunk *c = ht_chunk_find(o, im->index);

    if (im->dirty || c->exclusive || c->shared || moves_in_order(s, o, slot))
        return false;
    ht_alloc_unreserve(s->alloc, im->reserved_blocks);
    im->reserved_blocks = 0;
    c->slot = HT_SLOT_NONE;
    o->resident--;
    s->flow.evictions++;
    HT_PROBE2(evict, o->oid, im->index);
    ht_chunk_trim(o, im->index);
    return true;
}
