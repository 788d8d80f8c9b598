/* SPDX-License-Identifier: Apache-2.0 */
/* chunk.c - locks of chunks, and changes of a chunk's image and references. The caller holds the store's lock. */

#include "tiering/object/chunk.h"
#include "tiering/base/activity.h"
#include "tiering/base/probe.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"

/* ----------------------------------------------------------------- locks */

static_assert(HT_COND_COUNT == 64, "bits of a word");

static unsigned cond_of(const struct ht_chunk *c)
{
    return (unsigned)(((uintptr_t)c >> 6) * 0x9e3779b97f4a7c15ull >> 58);
}

/*
 * The device where a request of a lower class may hold the chunk that this thread waits for. While it waits, no request
 * of the background begins there. NULL: no such request is on the way.
 */
static struct ht_dev *promoted_device(const struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = ht_chunk_ref(c);
    struct ht_dev *dev = ref ? ht_ref_dev(s, ref) : NULL;

    return dev && ht_io_class() == HT_IO_URGENT && ht_dev_has_permits(dev) ? dev : NULL;
}

static void wait_chunk(struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_leaf_head *leaf = ht_chunk_leaf(c);
    struct ht_dev *dev = promoted_device(s, c);

    leaf->users++;
    HT_PROBE1(chunk_wait_begin, c);
    ht_activity_want(c);
    ht_activity_wait("a chunk", 0);
    if (dev)
        ht_gate_wait_begin(dev);
    ht_store_wait(s, &s->waits.chunk[cond_of(c)], 0);
    if (dev)
        ht_gate_wait_end(dev);
    ht_activity_go_on();
    HT_PROBE1(chunk_wait_end, c);
    ht_activity_want(NULL);
    leaf->users--;
}

/* A thread has released the chunk, or changed it without its lock: maybe nothing is left of the chunk. */
static void end_use(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    if ((c->flags & (HT_CH_LOG_RESERVED | HT_CH_PUB | HT_CH_CUR)) == HT_CH_LOG_RESERVED)
        ht_chunk_drop_log_reserve(o, c);
    ht_chunk_note_busy(o, c, index);
    if (!ht_chunk_in_use(c))
        ht_chunk_trim(o, index);
}

/* May its image go? A dirty one has to be written first: the waiters do that when no other thread does. */
static bool frees_slot(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!s->waits.slot_waiters || c->slot == HT_SLOT_NONE || c->exclusive || c->shared)
        return false;
    return !s->flow.writing || !ht_arena_image(s->arena, c->slot)->dirty;
}

static void wake_chunk(struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    s->waits.wakes.chunks |= UINT64_C(1) << cond_of(c);
    s->waits.wakes.any = true;
    if (frees_slot(s, c))
        ht_wake_for_slot(s, c->slot);
}

void ht_chunk_lock_shared(struct ht_store *s, struct ht_chunk *c)
{
    while (c->exclusive || c->waiting || c->shared == HT_CHUNK_HOLDERS_MAX)
        wait_chunk(s, c);
    c->shared++;
    ht_activity_hold(c);
}

void ht_chunk_watch_begin(struct ht_chunk_watch *w, const struct ht_obj *o, uint64_t first)
{
    *w = (struct ht_chunk_watch){.next = o->s->objects.watches, .o = o, .first = first};
    o->s->objects.watches = w;
}

void ht_chunk_watch_end(struct ht_chunk_watch *w)
{
    ht_chain_remove(&w->o->s->objects.watches, w, next);
}

static void take_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    c->exclusive = 1;
    ht_chunk_note_busy(o, c, index);
    ht_activity_hold(c);
    for (struct ht_chunk_watch *w = o->s->objects.watches; w; w = w->next)
        w->taken |= w->o == o && index >= w->first;
}

bool ht_chunk_trylock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    if (c->exclusive || c->shared)
        return false;
    take_exclusive(o, c, index);
    return true;
}

void ht_chunk_lock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    while (c->exclusive || c->shared) {
        c->waiting = 1; /* the thread that gets it clears the wish; others set it again */
        wait_chunk(o->s, c);
    }
    c->waiting = 0;
    take_exclusive(o, c, index);
}

static void release_shared(struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    assert(c->shared);
    ht_activity_release(c);
    bool was_full = c->shared-- == HT_CHUNK_HOLDERS_MAX;
    if (was_full || !c->shared)
        wake_chunk(s, c);
}

static void release_exclusive(struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    assert(c->exclusive);
    ht_activity_release(c);
    c->exclusive = 0;
    wake_chunk(s, c);
}

void ht_chunk_unlock_shared(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    assert(ht_chunk_find(o, index) == c);
    release_shared(o->s, c);
    end_use(o, c, index);
}

void ht_chunk_unlock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    assert(ht_chunk_find(o, index) == c);
    release_exclusive(o->s, c);
    end_use(o, c, index);
}

void ht_chunk_unlock_exclusive_staying(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    ht_chunk_leaf(c)->users++;
    ht_chunk_unlock_exclusive(o, c, index);
    ht_chunk_leaf(c)->users--;
}

void ht_chunk_relock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    release_shared(o->s, c);
    ht_chunk_lock_exclusive(o, c, index);
}

int ht_chunk_wait(struct ht_obj *o, struct ht_chunk *c, uint64_t index, pthread_cond_t *cond, uint64_t at_ns)
{
    struct ht_leaf_head *leaf = ht_chunk_leaf(c);

    release_exclusive(o->s, c);
    leaf->users++;
    int rc = ht_store_wait(o->s, cond, at_ns);
    ht_chunk_lock_exclusive(o, c, index);
    leaf->users--;
    return rc;
}

void ht_chunk_downgrade(struct ht_store *s, struct ht_chunk *c)
{
    assert(c->exclusive);
    c->exclusive = 0;
    c->shared = 1;
    wake_chunk(s, c);
}

/* ----------------------------------------------------------------- state */

uint32_t ht_chunk_len(const struct ht_obj *o, uint64_t index)
{
    uint64_t start = index << o->chunk_shift;

    if (start >= o->size)
        return 0;
    return (uint32_t)ht_min_u64(o->size - start, ht_obj_used_bytes(o));
}

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
        count_found(o, HT_CHUNK_LOG_BYTES);
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
        o->s->counts.scratch_dropped_bytes += im->data_hi;
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
    s->counts.evictions++;
    HT_PROBE2(evict, o->oid, im->index);
    ht_chunk_trim(o, im->index);
    return true;
}
