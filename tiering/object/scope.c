/* SPDX-License-Identifier: Apache-2.0 */
/* scope.c - scopes: objects that are published together, and the calls that change them. */

#include "tiering/object/scope.h"
#include "tiering/base/activity.h"
#include "tiering/base/mutant.h"
#include "tiering/api/keep.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"

struct ht_scope *ht_scope_find(struct ht_store *s, uint64_t id, bool make)
{
    struct ht_id_link *link = ht_id_find(&s->objects.scopes_by_id, id);

    if (link) {
        struct ht_scope *found = ht_container_of(link, struct ht_scope, by_id);
        if (make)
            found->ended = false; /* the directory is a model root again, or one of its files is open */
        return found;
    }
    struct ht_scope *sc = make ? calloc(1, sizeof(*sc)) : NULL;
    if (!sc)
        return NULL;
    sc->id = sc->by_id.id = id;
    if (ht_id_insert(&s->objects.scopes_by_id, &sc->by_id)) {
        free(sc);
        return NULL;
    }
    ht_list_init(&sc->touched);
    s->objects.meta_bytes += sizeof(*sc);
    ht_chain_link(&s->objects.scopes, sc, next);
    return sc;
}

/* For its figures: one that is not in memory has zeros. */
static const struct ht_scope *known(struct ht_store *s, uint64_t id) HT_REQUIRES(HT_LOCK_STORE)
{
    static const struct ht_scope none;
    const struct ht_scope *sc = ht_scope_find(s, id, false);

    return sc ? sc : &none;
}

static void free_scope(struct ht_store *s, struct ht_scope *sc) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_chain_remove(&s->objects.scopes, sc, next);
    ht_id_remove(&s->objects.scopes_by_id, &sc->by_id);
    s->objects.meta_bytes -= sizeof(*sc);
    free(sc);
}

static void free_if_ended(struct ht_store *s, struct ht_scope *sc) HT_REQUIRES(HT_LOCK_STORE)
{
    if (sc->ended && !sc->objects && !sc->changing && !sc->users && ht_list_empty(&sc->touched))
        free_scope(s, sc);
}

void ht_scope_hold(struct ht_scope *sc)
{
    sc->users++;
}

void ht_scope_let_go(struct ht_store *s, struct ht_scope *sc)
{
    sc->users--;
    free_if_ended(s, sc);
}

/* For an object that comes to scope 0: content outside it is unpublished there then. */
static uint64_t superseded_blocks(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t blocks = 0;

    /* bounded: by the unpublished chunks of one tensor, which has large ones, once when it leaves its model */
    ht_chunk_for_each_unpublished(c, o, index)
        blocks += ht_chunk_superseded_blocks(c);
    return blocks;
}

void ht_obj_join(struct ht_obj *o, struct ht_scope *sc)
{
    struct ht_scope *was = o->scope;

    if (o->unpublished && sc && was) {
        o->s->objects.superseded_blocks += sc == o->s->objects.scope0 ? superseded_blocks(o) : 0;
        o->s->objects.superseded_blocks -= was == o->s->objects.scope0 ? superseded_blocks(o) : 0;
    }
    o->scope = sc;
    if (sc)
        sc->objects++;
    if (sc && was) {
        uint64_t cold = ht_obj_cold_blocks(o);
        sc->cold_blocks += cold;
        was->cold_blocks -= cold;
    }
    if (!was)
        return;
    was->objects--;
    free_if_ended(o->s, was);
}

void ht_scope_forget(struct ht_store *s, uint64_t id)
{
    struct ht_scope *sc = ht_scope_find(s, id, false);

    assert(id);
    if (!sc)
        return;
    sc->ended = true;
    free_if_ended(s, sc);
}

int ht_scope_freeze(struct ht_store *s, uint64_t scope)
{
    ht_store_lock(s);
    struct ht_scope *sc = ht_scope_find(s, scope, true);
    if (sc)
        sc->frozen = true;
    ht_store_unlock(s);
    return sc ? 0 : -ENOMEM;
}

int ht_scope_set_all_paths(struct ht_store *s, uint64_t scope, bool all)
{
    ht_store_lock(s);
    struct ht_scope *sc = ht_scope_find(s, scope, all);
    if (sc)
        sc->all_paths = all;
    s->objects.any_all_paths |= all;
    ht_store_unlock(s);
    return sc || !all ? 0 : -ENOMEM;
}

bool ht_scope_is_frozen(struct ht_store *s, uint64_t scope)
{
    return ht_store_locked(s, known(s, scope)->frozen);
}

/* ---------------------------------------------------------------- touched */

void ht_obj_untouch(struct ht_obj *o)
{
    for (struct ht_touched_walk *w = o->s->objects.walks; w; w = w->next) {
        /* The object leaves the list: a walk that would come to it next goes past it. */
        if (w->at == &o->touched)
            w->at = w->last == &o->touched ? NULL : o->touched.next;
        else if (w->last == &o->touched)
            w->last = o->touched.prev;
    }
    ht_list_del(&o->touched);
}

void ht_scope_note_change(struct ht_obj *o)
{
    struct ht_scope_changes *c = o->s->objects.changes;

    if (HT_MUTANT("change-unseen"))
        return;
    if (!c || c->scope != o->scope || o->dead || (c->count && c->obj[c->count - 1] == o))
        return;
    c->more |= c->count == HT_SCOPE_CHANGES_MAX;
    if (c->more)
        return;
    o->refs++;
    c->obj[c->count++] = o;
}

void ht_touched_walk_begin(struct ht_touched_walk *w, struct ht_store *s, uint64_t scope)
{
    const struct ht_scope *sc = ht_scope_find(s, scope, false);

    *w = (struct ht_touched_walk){.s = s, .next = s->objects.walks};
    s->objects.walks = w;
    if (!sc || ht_list_empty(&sc->touched))
        return;
    w->at = sc->touched.next;
    w->last = sc->touched.prev;
}

struct ht_obj *ht_touched_walk_next(struct ht_touched_walk *w)
{
    if (!w->at)
        return NULL;
    struct ht_obj *o = ht_list_entry(w->at, struct ht_obj, touched);
    w->at = w->at == w->last ? NULL : w->at->next;
    o->refs++;
    ht_lock_step();
    return o;
}

void ht_touched_walk_end(struct ht_touched_walk *w)
{
    struct ht_touched_walk **p = &w->s->objects.walks;

    while (*p != w)
        p = &(*p)->next;
    *p = w->next;
}

/* No more objects can have been touched at the beginning than the scope had then. */
int ht_scope_collect(struct ht_store *s, uint64_t scope, struct ht_obj ***out, size_t *out_count)
{
    const struct ht_scope *sc = ht_scope_find(s, scope, false);
    struct ht_obj **objs = malloc(((sc ? sc->objects : 0) + 1) * sizeof(*objs)), *o;
    struct ht_slice slice = {0};
    struct ht_touched_walk w;
    size_t n = 0;

    if (!objs)
        return -ENOMEM;
    ht_touched_walk_begin(&w, s, scope);
    while ((o = ht_touched_walk_next(&w))) {
        objs[n++] = o;
        ht_slice_next(s, &slice);
    }
    ht_touched_walk_end(&w);
    *out = objs;
    *out_count = n;
    return 0;
}

void ht_obj_touch(struct ht_obj *o)
{
    /*
     * A dead object may still be written by threads that hold it, but is never published: on the list it would stay for
     * ever.
     */
    if (o->meta_dirty)
        ht_scope_note_change(o);
    if (!ht_list_empty(&o->touched) || o->dead || o->obj_class == HT_CLASS_SCRATCH || o->s->objects.replaying)
        return;
    ht_list_add_tail(&o->scope->touched, &o->touched);
    o->scope->found_bytes += HT_OBJECT_RECORD_BYTES;
    o->refs++;
}

void ht_obj_touch_meta(struct ht_obj *o)
{
    if (!o->meta_dirty && !ht_list_empty(&o->touched)) /* a publication in slices may have put its record already */
        o->scope->found_bytes += HT_OBJECT_RECORD_BYTES;
    o->meta_dirty = true;
    ht_obj_touch(o);
}

uint64_t ht_scope_found_bytes(struct ht_store *s, uint64_t scope)
{
    return ht_store_locked(s, known(s, scope)->found_bytes);
}

uint64_t ht_scope_cold_bytes(struct ht_store *s, uint64_t scope)
{
    return ht_store_locked(s, known(s, scope)->cold_blocks) * HT_BLOCK_BYTES;
}

bool ht_scope_is_empty(struct ht_store *s, uint64_t scope)
{
    return ht_store_locked(s, known(s, scope)->objects) == 0;
}

uint64_t ht_scope_written_bytes(struct ht_store *s, uint64_t scope)
{
    return ht_store_locked(s, known(s, scope)->written_bytes);
}

/* --------------------------------------------------------------- changes */

static bool has_room(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_scope_changes *c = o->s->objects.changes;

    return !c || c->scope != o->scope || o->obj_class == HT_CLASS_SCRATCH ||
        o->scope->found_bytes <= c->found_bytes_max;
}

void ht_obj_let_publish(struct ht_obj *o)
{
    while (!has_room(o)) {
        o->s->objects.changes->awaited = true;
        ht_activity_wait("a publication of model root", o->scope->id);
        ht_store_wait(o->s, &o->s->waits.settled, 0);
        ht_activity_go_on();
    }
}

int ht_obj_begin_change(struct ht_obj *o, struct ht_scope **out_scope)
{
    ht_obj_let_publish(o);
    while (o->scope->aborting) {
        ht_activity_wait("the end of an abort of model root", o->scope->id);
        ht_store_wait(o->s, &o->s->waits.settled, 0);
        ht_activity_go_on();
    }
    if (o->vanished)
        return -ESTALE;
    if (o->scope->frozen)
        return -EROFS;
    o->scope->changing++;
    *out_scope = o->scope;
    return 0;
}

void ht_scope_end_change(struct ht_store *s, struct ht_scope *sc)
{
    if (--sc->changing == 0 && sc->aborting)
        pthread_cond_broadcast(&s->waits.settled);
    free_if_ended(s, sc);
}

unsigned ht_obj_aborts(struct ht_obj *o)
{
    return ht_store_locked(o->s, o->scope->aborts);
}

/* Clang cannot follow a lock that only one result keeps. */
int ht_obj_lock_for_change(struct ht_obj *o, struct ht_scope **out_scope) HT_NO_THREAD_SAFETY_ANALYSIS
{
    if (ht_is_read_only(o->s))
        return -EROFS;
    ht_store_lock(o->s);
    int rc = ht_obj_begin_change(o, out_scope);
    if (rc)
        ht_store_unlock(o->s);
    return rc;
}

void ht_obj_unlock_after_change(struct ht_obj *o, struct ht_scope *sc)
{
    ht_scope_end_change(o->s, sc);
    ht_store_unlock(o->s);
}
