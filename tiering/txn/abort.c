/* SPDX-License-Identifier: Apache-2.0 */
/* abort.c - the objects' part in an abort of a scope: restores published content and sizes. */
#include "tiering/base/activity.h"
#include "tiering/base/verify.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/shm/shm.h"
#include "tiering/txn/txn_priv.h"

/* Restores the published state of one chunk. Releases the lock while it waits for the chunk. */
static void abort_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    ht_chunk_lock_exclusive(o, c, index);
    ht_chunk_prealloc_drop(o, c, 0);
    struct ht_chunk_before was = ht_chunk_before(c);
    bool newer = was.unpublished || (c->flags & HT_CH_BAD) || ht_obj_is_volatile(o) ||
        (c->slot != HT_SLOT_NONE && ht_arena_image(s->arena, c->slot)->dirty);
    if (newer) {
        ht_image_revert(o, c, index);
        ht_chunk_drop_cur(o, c);
        c->flags &= (uint8_t)~HT_CH_BAD;
        c->generation++;
        o->version++;
        ht_chunk_note_unpublished(o, c, index, was);
    }
    ht_chunk_unlock_exclusive(o, c, index);
}

static void abort_object(struct ht_obj *o, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    o->vanished = !o->published; /* first: a concurrent reader sees that the object is gone, and not its remains */
    ht_chunk_for_each(c, o, index) {
        if (ht_chunk_in_use(c))
            abort_chunk(o, c, index);
        ht_slice_next(o->s, slice);
    }
    o->error = 0;
    o->lost = false;
    o->meta_dirty = false;
    if (o->extra->edited && !o->extra->may_be_dirty)
        ht_obj_extra(o)->edited = false;
    if (o->published) {
        ht_shm_regrow(o, o->pub_size);
        o->size = o->pub_size;
        o->deleted = false;
        ht_obj_untouch_if_idle(o); /* not when another thread wrote to it again */
        HT_VERIFY(ht_obj_verify(o));
        return;
    }
    o->dead = true;
    o->deleted = true;
    if (!ht_list_empty(&o->touched)) {
        ht_obj_untouch(o);
        ht_obj_put_locked(o);
    }
}

/* Releases the lock in between. */
static void shut_out_changes(struct ht_store *s, struct ht_scope *sc) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_scope_hold(sc);
    sc->aborts++;
    sc->aborting = true;
    ht_activity_wait("changes below model root", sc->id);
    while (sc->changing)
        ht_store_wait(s, &s->waits.settled, 0);
    ht_activity_go_on();
}

/* Needs no memory: the caller has restored the names already, and must get through. */
void ht_scope_abort_objects(struct ht_store *s, uint64_t scope, bool rest)
{
    struct ht_slice slice = HT_SLICE_RESTING;
    struct ht_touched_walk w;
    struct ht_obj *o;

    ht_store_lock(s);
    ht_shm_touch(s, scope);
    struct ht_scope *sc = ht_scope_find(s, scope, false);
    if (sc)
        shut_out_changes(s, sc);
    ht_touched_walk_begin(&w, s, scope);
    while ((o = ht_touched_walk_next(&w))) {
        if (!rest || !o->extra->derived)
            abort_object(o, &slice);
        ht_obj_put_locked(o);
        ht_slice_next(s, &slice);
    }
    ht_touched_walk_end(&w);
    if (sc) {
        sc->aborting = false;
        pthread_cond_broadcast(&s->waits.settled);
        ht_scope_let_go(s, sc);
    }
    ht_store_unlock(s);
}
