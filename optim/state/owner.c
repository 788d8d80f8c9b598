/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owner.c - which parameter an object belongs to as state: for fsck, and for the names in events.
 *
 * fsck queries every object of a store that does not change: a sorted list serves it, made at the first query. While
 * the optimizer runs, queries are rare and the answer changes: a query then looks at all parameters.
 */
#include <stdlib.h>

#include "tiering/base/list.h"
#include "optim/rules/rule.h"
#include "optim/optim.h"
#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/state_priv.h"

static int by_oid(const void *a, const void *b)
{
    const struct ht_state_owner *x = a, *y = b;

    return x->oid < y->oid ? -1 : x->oid > y->oid;
}

/* Locked. */
static int build(struct ht_optim *o)
{
    size_t n = 0;

    o->owners = malloc((o->params_by_oid.count * HT_STATES_MAX + 1) * sizeof(*o->owners));
    if (!o->owners)
        return -ENOMEM;
    ht_list_for_each(pos, &o->params) {
        const struct ht_param *p = ht_list_entry(pos, struct ht_param, all);
        for (unsigned i = 0; p->cur.exists && i < p->cur.layout.count; i++)
            o->owners[n++] = (struct ht_state_owner){p->cur.oid[i], p->oid, ht_state_word(p->cur.layout.kind[i])};
    }
    qsort(o->owners, n, sizeof(*o->owners), by_oid);
    o->owner_count = n;
    return 0;
}

/* Locked. */
static bool find_owner(const struct ht_optim *o, uint64_t oid, struct ht_state_owner *out)
{
    ht_list_for_each(pos, &o->params) {
        const struct ht_param *p = ht_list_entry(pos, struct ht_param, all);
        for (unsigned i = 0; p->cur.exists && i < p->cur.layout.count; i++) {
            if (p->cur.oid[i] != oid)
                continue;
            *out = (struct ht_state_owner){oid, p->oid, ht_state_word(p->cur.layout.kind[i])};
            return true;
        }
    }
    return false;
}

/* Locked. */
static int look_up(struct ht_optim *o, uint64_t oid, struct ht_state_owner *out)
{
    struct ht_state_owner key = {.oid = oid};
    int rc = o->owners ? 0 : build(o);
    const struct ht_state_owner *found = rc ? NULL : bsearch(&key, o->owners, o->owner_count, sizeof(key), by_oid);

    if (found)
        *out = *found;
    return rc ? rc : found ? 0 : -ENOENT;
}

int ht_optim_state_owner(struct ht_optim *o, uint64_t oid, uint64_t *out_param, const char **out_name)
{
    struct ht_state_owner found;

    lock(o);
    int rc = o->started ? (find_owner(o, oid, &found) ? 0 : -ENOENT) : look_up(o, oid, &found);
    unlock(o);
    if (rc)
        return rc;
    *out_param = found.param;
    *out_name = found.name;
    return 0;
}
