/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owner.c - whose state an object is: for fsck, and for the names in events.
 *
 * fsck asks for every object of a store that nobody changes: a sorted list, made at the first question. While the optimizer
 * runs, questions are rare and the answer changes: all parameters are looked at.
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

    o->owners = malloc((o->params_by_oid.count * STATES_MAX + 1) * sizeof(*o->owners));
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

/* Locked. */
static bool look(const struct ht_optim *o, uint64_t oid, struct state_owner *out)
{
    ht_list_for_each(pos, &o->params) {
        const struct param *p = ht_list_entry(pos, struct param, all);
        for (unsigned i = 0; p->cur.exists && i < p->cur.layout.count; i++) {
            if (p->cur.oid[i] != oid)
                continue;
            *out = (struct state_owner){oid, p->oid, ht_state_word(p->cur.layout.kind[i])};
            return true;
        }
    }
    return false;
}

/* Locked. */
static int look_up(struct ht_optim *o, uint64_t oid, struct state_owner *out)
{
    struct state_owner key = {.oid = oid};
    int ret = o->owners ? 0 : build(o);
    const struct state_owner *found = ret ? NULL : bsearch(&key, o->owners, o->owner_count, sizeof(key), by_oid);

    if (found)
        *out = *found;
    return ret ? ret : found ? 0 : -ENOENT;
}

int ht_optim_state_owner(struct ht_optim *o, uint64_t oid, uint64_t *out_param, const char **out_name)
{
    struct state_owner found;

    lock(o);
    int ret = o->started ? (look(o, oid, &found) ? 0 : -ENOENT) : look_up(o, oid, &found);
    unlock(o);
    if (ret)
        return ret;
    *out_param = found.param;
    *out_name = found.name;
    return 0;
}
