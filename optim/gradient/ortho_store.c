/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ortho_store.c - ns=store: a worker orthogonalises, block by block, without a client.
 *
 * It works in memory of its own and holds no chunk, so it may wait for memory of the store. Nobody else uses the two
 * objects meanwhile: no client gives the update of such a parameter.
 */

#include "optim/rules/blocks.h"
#include "optim/rules/newton_schulz.h"
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"

struct job {
    struct ht_param *p;
    struct ht_optim_config config;
};

static bool is_unwanted(void *ctx)
{
    const struct job *j = ctx;

    lock(j->p->o);
    bool unwanted = j->p->o->stopping || j->p->gone;
    unlock(j->p->o);
    return unwanted;
}

static int compute_block(void *ctx, uint64_t first, uint32_t rows)
{
    struct job *j = ctx;
    struct ht_param *p = j->p;
    uint32_t columns = j->config.matrix.columns;
    size_t bytes = (size_t)rows * columns * 2;
    uint16_t *u = malloc(bytes);
    ssize_t rc = u ? ht_opt_ortho_move(p, p->ortho->update, first * 2, u, bytes, false) : -ENOMEM;

    if (rc >= 0)
        rc = ht_newton_schulz(p->o->kernels, &j->config, u, rows, columns, is_unwanted, j);
    if (rc >= 0)
        rc = ht_opt_ortho_move(p, p->ortho->given, first * 2, u, bytes, true);
    free(u);
    return rc < 0 ? (int)rc : 0;
}

/* The range is queued for the second phase with the others, or the step has failed. Releases the lock in between. */
static void settle(struct ht_range *r, int rc) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = r->param;
    struct ht_root *root = p->root;
    unsigned work = r->work;

    r->state = rc ? HT_RANGE_FAILED : HT_RANGE_IDLE;
    r->work = 0;
    p->failed += rc != 0;
    if (rc && !root->failure)
        root->failure = rc;
    if (!rc && !p->gone) {
        p->ortho->applied = true;
        ht_opt_ortho_spent(p);
        (void)ht_opt_ortho_queue(p); /* its caches are dropped since the first phase: readers wait */
    }
    ht_opt_range_ended(r, work);
}

void ht_opt_ortho_compute(struct ht_range *r)
{
    struct ht_param *p = r->param;
    struct job j = {.p = p};

    lock(p->o);
    j.config = p->ortho->config;
    unlock(p->o);
    int rc = ht_muon_each_block(&j.config, compute_block, &j);
    if (rc && !is_unwanted(&j))
        ht_opt_refuse(p->root, HT_EVENT_UPDATE_FAILED, p->oid,
                      "its update cannot be orthogonalised: %s; abort returns to the last commit", strerror(-rc));
    ht_obj_scratch_drop(p->ortho->update, 0, UINT64_MAX);
    lock(p->o);
    settle(r, rc);
    unlock(p->o);
}
