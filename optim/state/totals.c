/* SPDX-License-Identifier: Apache-2.0 */
/*
 * totals.c - what is known of all parameters without a walk: totals of a root, and to which parameter an object belongs
 * as state (for fsck, and for the names in events and traces).
 *
 * Sums of gradients (accumulate) change in the store, beside the optimizer. So root.c adds their bytes when it is asked
 * for them, over the parameters that have one.
 */

#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"

/* ------------------------------------------------------------------- owner */

static uint64_t oid_of(const struct ht_param *p, unsigned i)
{
    return p->cur.exists && i < p->cur.layout.count ? p->cur.oid[i] : 0;
}

/* A damaged log may name an object twice: the first parameter has it. Without memory the object has no owner. */
static void link_state(struct ht_param *p, unsigned i, uint64_t oid) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_state_link *l = &p->state_link[i];

    if (!oid || ht_id_find(&p->o->states_by_oid, oid))
        return;
    l->by_oid.id = oid;
    l->param = p;
    if (ht_id_insert(&p->o->states_by_oid, &l->by_oid))
        l->by_oid.id = 0;
}

static void unlink_state(struct ht_param *p, unsigned i) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->state_link[i].by_oid.id)
        ht_id_remove(&p->o->states_by_oid, &p->state_link[i].by_oid);
    p->state_link[i].by_oid.id = 0;
}

int ht_optim_state_owner(struct ht_optim *o, uint64_t oid, uint64_t *out_param, const char **out_name)
{
    lock(o);
    struct ht_id_link *found = ht_id_find(&o->states_by_oid, oid);
    if (found) {
        const struct ht_state_link *l = ht_container_of(found, struct ht_state_link, by_oid);
        *out_param = l->param->oid;
        *out_name = ht_state_word(l->param->cur.layout.kind[l - l->param->state_link]);
    }
    unlock(o);
    return found ? 0 : -ENOENT;
}

/* ------------------------------------------------------------------ totals */

struct ht_totals ht_opt_totals_of(const struct ht_param *p)
{
    struct ht_totals c = {0};
    struct ht_param_shape shape;

    if (!p->cur.exists || p->gone || ht_opt_state_shape(p, &shape))
        return c;
    c.parameters = 1;
    c.elements = shape.elements;
    c.param_bytes = shape.elements * shape.p_bytes;
    for (unsigned i = 0; i < p->cur.layout.count; i++)
        c.state_bytes += ht_opt_state_kept_bytes(&shape, p->cur.layout.kind[i], p->cur.layout.form[i]);
    return c;
}

static void count_param(struct ht_param *p, struct ht_totals now) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_totals *t = &p->root->totals;

    t->parameters += now.parameters - p->counted.parameters;
    t->state_bytes += now.state_bytes - p->counted.state_bytes;
    t->param_bytes += now.param_bytes - p->counted.param_bytes;
    t->elements += now.elements - p->counted.elements;
    p->counted = now;
}

void ht_opt_totals_update(struct ht_param *p)
{
    count_param(p, ht_opt_totals_of(p));
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        if (p->state_link[i].by_oid.id != oid_of(p, i))
            unlink_state(p, i);
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        if (!p->state_link[i].by_oid.id)
            link_state(p, i, oid_of(p, i));
}

void ht_opt_totals_remove(struct ht_param *p)
{
    count_param(p, (struct ht_totals){0});
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        unlink_state(p, i);
}
