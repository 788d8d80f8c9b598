/* SPDX-License-Identifier: Apache-2.0 */
/* scope_visit.c - walks over the touched objects of a scope, in slices. */
#include <stdlib.h>

#include "tiering/base/list.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/scope.h"
#include "tiering/object/slice.h"

/* -------------------------------------------------------------------- walk */

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

/* ----------------------------------------------------------------- changes */

void ht_scope_changes_begin(struct ht_scope_changes *c, struct ht_store *s, uint64_t scope)
{
    *c = (struct ht_scope_changes){.s = s, .scope = ht_scope_find(s, scope, false)};
    if (c->scope)
        ht_scope_hold(c->scope);
    s->objects.changes = c;
}

void ht_scope_changes_clear(struct ht_scope_changes *c)
{
    while (c->count)
        ht_obj_put_locked(c->obj[--c->count]);
    c->more = false;
}

void ht_scope_changes_end(struct ht_scope_changes *c)
{
    ht_scope_changes_allow(c, UINT64_MAX);
    c->s->objects.changes = NULL;
    ht_scope_changes_clear(c);
    if (c->scope)
        ht_scope_let_go(c->s, c->scope);
}

void ht_scope_changes_allow(struct ht_scope_changes *c, uint64_t found_bytes_max)
{
    c->found_bytes_max = found_bytes_max;
    if (!c->awaited || c->scope->found_bytes > found_bytes_max)
        return;
    c->awaited = false;
    c->s->waits.wakes.settled = c->s->waits.wakes.any = true;
}

/* ------------------------------------------------------------------- users */

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

static void visit_at_once(struct ht_store *s, uint64_t scope, ht_scope_visit *visit, void *ctx)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_scope *sc = ht_scope_find(s, scope, false);

    if (sc)
        /* bounded: the few changes since the last of several rounds in slices, published at one moment */
        ht_list_for_each_safe(p, next, &sc->touched) {
            visit(ht_list_entry(p, struct ht_obj, touched), NULL, ctx);
            ht_lock_step();
        }
}

void ht_scope_visit_touched(struct ht_store *s, uint64_t scope, struct ht_slice *slice, ht_scope_visit *visit,
                            void *ctx)
{
    struct ht_touched_walk w;
    struct ht_obj *o;

    if (!slice) {
        visit_at_once(s, scope, visit, ctx);
        return;
    }
    ht_touched_walk_begin(&w, s, scope);
    while ((o = ht_touched_walk_next(&w))) {
        visit(o, slice, ctx);
        ht_obj_put_locked(o);
        ht_slice_next(s, slice);
    }
    ht_touched_walk_end(&w);
}
