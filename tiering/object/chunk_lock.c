/* SPDX-License-Identifier: Apache-2.0 */
/* chunk_lock.c - locks of chunks. */
#include <assert.h>

#include "tiering/base/activity.h"
#include "tiering/base/probe.h"
#include "tiering/cache/arena.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/object/space.h"

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
    struct ht_dev *dev = ref && ht_ref_holds(ref) ? s->dev[ht_ref_extent(ref, 0).device] : NULL;

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
    struct ht_chunk_watch **p = &w->o->s->objects.watches;

    while (*p != w)
        p = &(*p)->next;
    *p = w->next;
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
