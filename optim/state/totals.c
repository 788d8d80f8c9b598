/* SPDX-License-Identifier: Apache-2.0 */
/*
 * totals.c - see totals.h. Sums of gradients (accumulate) change in the store, beside the optimizer. So root.c adds
 * their bytes when it is asked for them, over the parameters that have one.
 */
#include <assert.h>

#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/state/state_priv.h"
#include "optim/state/totals.h"

static struct ht_param_counted counted(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param_counted c = {0};
    struct ht_param_shape shape;

    if (!p->cur.exists || p->gone || ht_opt_state_shape(p, &shape))
        return c;
    c.counted = true;
    c.elements = shape.elements;
    c.param_bytes = shape.elements * shape.p_bytes;
    for (unsigned i = 0; i < p->cur.layout.count; i++)
        c.state_bytes += ht_opt_state_bytes(&shape, p->cur.layout.kind[i]);
    return c;
}

static void take(struct ht_param *p, struct ht_param_counted now) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_root_totals *t = &p->root->totals;

    t->parameters += (uint64_t)now.counted - p->counted.counted;
    t->state_bytes += now.state_bytes - p->counted.state_bytes;
    t->param_bytes += now.param_bytes - p->counted.param_bytes;
    t->elements += now.elements - p->counted.elements;
    p->counted = now;
}

void ht_opt_totals_update(struct ht_param *p)
{
    take(p, counted(p));
    ht_opt_owner_update(p);
}

void ht_opt_totals_remove(struct ht_param *p)
{
    take(p, (struct ht_param_counted){0});
    ht_opt_owner_remove(p);
}

void ht_opt_totals_verify(const struct ht_root *r)
{
    struct ht_root_totals t = {0};

    ht_list_for_each_entry(p, &r->params, const struct ht_param, of_root) {
        struct ht_param_counted c = counted(p);
        assert(c.counted == p->counted.counted && c.state_bytes == p->counted.state_bytes);
        assert(r->gate || ht_list_empty(&p->of_sums) == !p->sum); /* sums are deleted under the gate */
        ht_opt_owner_verify(p);
        t.parameters += c.counted;
        t.state_bytes += c.state_bytes;
        t.param_bytes += c.param_bytes;
        t.elements += c.elements;
    }
    assert(t.parameters == r->totals.parameters && t.state_bytes == r->totals.state_bytes);
    assert(t.param_bytes == r->totals.param_bytes && t.elements == r->totals.elements);
}
