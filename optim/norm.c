/* SPDX-License-Identifier: Apache-2.0 */
/*
 * norm.c - what depends on all gradients of a step: their norm, and clipping or skipping by it.
 *
 * Such a step is deferred: ranges are frozen as ever, but queued at the boundary only, twice: first to be summed, then to
 * be updated. Until then readers get the last boundary's version at once.
 *
 * The norm is the square root of the sum of squares of all covered elements, unscaled, in double. Its order is fixed: blocks, spans,
 * then parameters by their number, so that threads, chunks and the order of arrival change no bit of it. As in
 * torch.nn.utils.clip_grad_norm_ the gradient is multiplied by min(1, max_grad_norm / (norm + 1e-6)).
 */
#include "optim/optim_priv.h"

#include <math.h>
#include <stdlib.h>

bool ht_opt_deferred(const struct root *root)
{
    return root->latched.max_grad_norm > 0 || root->latched.skip_nonfinite;
}

/* What gradients, or sums of them, are divided by. */
static double divisor(const struct root *root)
{
    return root->latched.grad_scale * (root->latched.accumulate_mean ? root->latched.accumulate : 1);
}

void ht_opt_scale(struct param *p)
{
    p->scalars.grad_factor = (float)(1.0 / divisor(p->root));
}

/* ----------------------------------------------------------------- measure */

static void drop_sums(struct root *root)
{
    ht_list_for_each(pos, &root->touched) {
        struct param *p = ht_list_entry(pos, struct param, touched);
        free(p->sums);
        p->sums = NULL;
    }
}

static int make_sums(struct root *root)
{
    ht_list_for_each(pos, &root->touched) {
        struct param *p = ht_list_entry(pos, struct param, touched);
        free(p->sums);
        p->sums = calloc(ht_div_up(p->shape.elements, HT_SUM_SPAN) + 1, sizeof(*p->sums));
        if (!p->sums)
            return -ENOMEM;
    }
    return 0;
}

static int by_number(const void *a, const void *b)
{
    const struct param *x = *(struct param *const *)a, *y = *(struct param *const *)b;

    return x->oid < y->oid ? -1 : x->oid > y->oid;
}

static double sum_of(const struct param *p)
{
    double sum = 0;

    for (uint64_t i = 0; i < ht_div_up(p->shape.elements, HT_SUM_SPAN); i++)
        sum += p->sums[i];
    return sum;
}

/* sorted: room for all that are touched. */
static double add_up(const struct root *root, struct param **sorted)
{
    double sum = 0;
    size_t n = 0;

    ht_list_for_each(pos, &root->touched)
        sorted[n++] = ht_list_entry(pos, struct param, touched);
    qsort(sorted, n, sizeof(struct param *), by_number);
    for (size_t i = 0; i < n; i++)
        sum += sorted[i]->gone ? 0 : sum_of(sorted[i]);
    return sum;
}

static size_t count_touched(const struct root *root)
{
    size_t count = 0;

    ht_list_for_each(pos, &root->touched)
        count++;
    return count;
}

/* All memory first: once something was measured only a failed update may end this, after which there is abort alone. */
static int measure(struct root *root, double *out_sum)
{
    struct param **sorted = malloc((count_touched(root) + 1) * sizeof(struct param *));
    int ret = sorted ? make_sums(root) : -ENOMEM;

    root->step_nonfinite = 0;
    if (!ret) {
        ht_opt_queue_frozen(root, false);
        ret = ht_opt_drain(root);
    }
    if (!ret)
        *out_sum = add_up(root, sorted);
    free(sorted);
    drop_sums(root);
    return ret;
}

/* ------------------------------------------------------------------- apply */

/* Nothing is applied: what is frozen counts as done. */
static void skip(struct root *root)
{
    ht_list_for_each(pos, &root->touched) {
        struct param *p = ht_list_entry(pos, struct param, touched);
        for (uint64_t i = 0; i < p->shape.range_count; i++) {
            struct range *r = ht_opt_range_find(p, i);
            if (r && (r->frozen.count || r->added))
                r->state = RANGE_DONE;
        }
    }
    root->skipped++;
}

static void clip(struct root *root, double norm)
{
    double most = root->latched.max_grad_norm, coefficient = most > 0 ? most / (norm + 1e-6) : 1;

    if (coefficient >= 1)
        return;
    /* NaN too: as with PyTorch it goes into every parameter. */
    ht_list_for_each(pos, &root->touched) {
        struct param *p = ht_list_entry(pos, struct param, touched);
        p->scalars.grad_factor = (float)(coefficient / divisor(root));
    }
    root->clipped++;
}

int ht_opt_whole_step(struct root *root, bool *out_skip)
{
    double sum = 0;
    int ret = measure(root, &sum);

    if (ret)
        return ret;
    root->grad_norm = sqrt(sum) / divisor(root);
    *out_skip = root->latched.skip_nonfinite && root->step_nonfinite;
    if (*out_skip) {
        skip(root);
        return 0;
    }
    clip(root, root->grad_norm);
    ht_opt_queue_frozen(root, true);
    return 0;
}
