/* SPDX-License-Identifier: Apache-2.0 */
/* touched.c - what walks over touched objects, and a publication in slices, learn of changes (scope.h). */
#include "tiering/base/list.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/scope.h"

/* The object leaves the list: a walk that would come to it next goes past it. */
static void pass(struct ht_touched_walk *w, const struct ht_list *leaves)
{
    if (w->at == leaves)
        w->at = leaves == w->last ? NULL : leaves->next;
    else if (w->last == leaves)
        w->last = leaves->prev;
}

void ht_obj_untouch(struct ht_obj *o)
{
    for (struct ht_touched_walk *w = o->s->objects.walks; w; w = w->next)
        pass(w, &o->touched);
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
