/* SPDX-License-Identifier: Apache-2.0 */
/* scope_visit.c - a walk over the touched objects of a scope, in slices. */
#include <stdlib.h>

#include "tiering/base/list.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/scope.h"
#include "tiering/object/slice.h"

void ht_scope_visit_touched(struct ht_store *s, uint64_t scope, struct ht_slice *slice, ht_scope_visit *visit,
                            void *ctx)
{
    struct ht_obj **objs;
    size_t count;

    if (!slice || ht_scope_collect(s, scope, &objs, &count)) {
        struct ht_scope *sc = ht_scope_find(s, scope, false);
        if (sc)
            ht_list_for_each_safe(p, next, &sc->touched) {
                visit(ht_list_entry(p, struct ht_obj, touched), NULL, ctx);
                ht_lock_step();
            }
        return;
    }
    for (size_t i = 0; i < count; i++) {
        visit(objs[i], slice, ctx);
        ht_obj_put_locked(objs[i]);
        ht_slice_next(s, slice);
    }
    free(objs);
}
