/* SPDX-License-Identifier: Apache-2.0 */
/* trash.c - see trash.h. */
#include "tiering/object/trash.h"

#include <stdlib.h>

#include "tiering/base/pool.h"
#include "tiering/object/context.h"

/* In builds with AddressSanitizer nothing is collected, so that a late use is found. */
void ht_trash_put(struct ht_store *s, void *piece)
{
    struct ht_trash *t = &s->frees.trash;

    if (!piece || t->pieces == HT_TRASH_PIECES_MAX || ht_pool_is_apart()) {
        free(piece);
        return;
    }
    *(void **)piece = t->first;
    t->first = piece;
    t->pieces++;
}

struct ht_trash ht_trash_take(struct ht_store *s)
{
    struct ht_trash taken = s->frees.trash;

    s->frees.trash = (struct ht_trash){0};
    taken.former = ht_refcounts_take_former(s);
    return taken;
}

void ht_trash_empty(struct ht_trash *t)
{
    while (t->first) {
        void *next = *(void **)t->first;
        free(t->first);
        t->first = next;
    }
    t->pieces = 0;
    ht_refcount_table_free(&t->former);
    t->former = (struct ht_refcount_table){0};
}
