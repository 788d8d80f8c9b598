/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owner.c - which parameter an object belongs to as state: for fsck, and for the names in events and traces. A table
 * has each object, so that no query walks the parameters.
 */
#include <assert.h>

#include "optim/state/param.h"
#include "optim/state/state_priv.h"

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

void ht_opt_owner_update(struct ht_param *p)
{
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        if (p->state_link[i].by_oid.id != oid_of(p, i))
            unlink_state(p, i);
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        if (!p->state_link[i].by_oid.id)
            link_state(p, i, oid_of(p, i));
}

void ht_opt_owner_remove(struct ht_param *p)
{
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        unlink_state(p, i);
}

void ht_opt_owner_verify(const struct ht_param *p)
{
    for (unsigned i = 0; i < HT_STATES_MAX; i++) {
        const struct ht_id_link *l = &p->state_link[i].by_oid;
        assert(!l->id || (l->id == oid_of(p, i) && ht_id_find(&p->o->states_by_oid, l->id) == l));
    }
}

bool ht_opt_is_state(const struct ht_optim *o, uint64_t oid)
{
    return ht_id_find(&o->states_by_oid, oid) != NULL;
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
