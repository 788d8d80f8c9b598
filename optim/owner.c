/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owner.c - whose state an object is, for fsck: a sorted list, made at the first question.
 *
 * The answer holds for a store that nobody changes; a running optimizer never asks.
 */
#include "optim/optim_priv.h"

#include <stdlib.h>

static int by_oid(const void *a, const void *b)
{
    const struct state_owner *x = a, *y = b;

    return x->oid < y->oid ? -1 : x->oid > y->oid;
}

/* Locked. */
static int build(struct ht_optim *o)
{
    size_t n = 0;

    o->owners = malloc((o->param_count * STATES_MAX + 1) * sizeof(*o->owners));
    if (!o->owners)
        return -ENOMEM;
    ht_list_for_each(pos, &o->params) {
        const struct param *p = ht_list_entry(pos, struct param, all);
        for (unsigned i = 0; p->cur.exists && i < p->cur.layout.count; i++)
            o->owners[n++] = (struct state_owner){p->cur.oid[i], p->oid, ht_state_word(p->cur.layout.kind[i])};
    }
    qsort(o->owners, n, sizeof(*o->owners), by_oid);
    o->owner_count = n;
    return 0;
}

int ht_optim_state_owner(struct ht_optim *o, uint64_t oid, uint64_t *out_param, const char **out_name)
{
    struct state_owner key = {.oid = oid};
    const struct state_owner *found = NULL;

    lock(o);
    int ret = o->owners ? 0 : build(o);
    if (!ret)
        found = bsearch(&key, o->owners, o->owner_count, sizeof(key), by_oid);
    unlock(o);
    if (ret || !found)
        return ret ? ret : -ENOENT;
    *out_param = found->param;
    *out_name = found->name;
    return 0;
}
