/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/steps.h"

#include "optim/state/root.h"

typedef int (*end_fn)(struct ht_optim *o, uint64_t root, struct ht_optim_steer *by);

static int by_anyone(end_fn end, struct ht_optim *o, uint64_t root)
{
    struct ht_optim_steer anyone = {.claim = 0};

    return end(o, root, &anyone);
}

int ht_optim_step(struct ht_optim *o, uint64_t root)
{
    return by_anyone(ht_optim_step_by, o, root);
}

int ht_optim_step_async(struct ht_optim *o, uint64_t root)
{
    return by_anyone(ht_optim_step_async_by, o, root);
}

int ht_optim_commit(struct ht_optim *o, uint64_t root)
{
    return by_anyone(ht_optim_commit_by, o, root);
}

int ht_optim_abort(struct ht_optim *o, uint64_t root)
{
    return by_anyone(ht_optim_abort_by, o, root);
}

void ht_optim_recovered(struct ht_optim *o)
{
    lock(o);
    ht_list_for_each_entry(root, &o->roots, struct ht_root, all) {
        root->refs++;
        while (root->redo.recovering && !o->stopping)
            wait_changed(o);
        root->refs--; /* this does not free it: it stays in the list */
    }
    unlock(o);
}
