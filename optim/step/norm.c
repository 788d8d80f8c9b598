/* SPDX-License-Identifier: Apache-2.0 */
/*
 * norm.c - the part of a step that depends on all its gradients: their norm, and clipping or skipping by it.
 *
 * Such a step is deferred: a range is updated at the boundary only. Until then readers get the last boundary's version
 * at once. A range that is frozen wholly is measured at once, while its gradient is in memory, and keeps the sums of
 * its squares (state/squares.c). The boundary measures only what lacks them: ranges that are covered in part.
 *
 * The norm is the square root of the sum of squares of all covered elements, unscaled, in double. Its order is fixed:
 * blocks, intervals, then parameters by their number. So threads, chunks and the order of arrival change no bit. As in
 * torch.nn.utils.clip_grad_norm_ the gradient is multiplied by min(1, max_grad_norm / (norm + 1e-6)).
 */
#include <math.h>

#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"
#include "optim/state/sections.h"
#include "optim/gradient/gradient.h"
#include "optim/step/step_priv.h"

/* ----------------------------------------------------------------- measure */

static int by_number(const void *a, const void *b)
{
    const struct ht_param *x = *(struct ht_param *const *)a, *y = *(struct ht_param *const *)b;

    return x->oid < y->oid ? -1 : x->oid > y->oid;
}

/* sorted: room for all that are touched. Counts elements that are not finite. */
static double add_up(struct ht_root *root, struct ht_param **sorted) HT_REQUIRES(HT_LOCK_OPTIM)
{
    double sum = 0;
    size_t n = 0;

    ht_list_for_each(pos, &root->touched)
        sorted[n++] = ht_list_entry(pos, struct ht_param, touched);
    qsort(sorted, n, sizeof(struct ht_param *), by_number);
    root->step_nonfinite = 0;
    for (size_t i = 0; i < n; i++)
        if (!sorted[i]->gone)
            ht_opt_squares_total(sorted[i], &sum, &root->step_nonfinite);
    root->nonfinite += root->step_nonfinite;
    return sum;
}

/* All memory first: after the first measurement only a failed update may end this, and then only an abort helps. */
static int measure_step(struct ht_root *root, double *out_sum) HT_REQUIRES(HT_LOCK_OPTIM)
{
    size_t count = 1;
    int rc = 0;

    ht_list_for_each_entry(p, &root->touched, struct ht_param, touched) {
        rc = ht_opt_squares_make(p) ? rc : -ENOMEM; /* most have them since their first gradient of the step */
        count++;
    }
    struct ht_param **sorted = rc ? NULL : malloc(count * sizeof(struct ht_param *));
    if (!sorted)
        return -ENOMEM;
    ht_opt_queue_frozen(root, false);
    rc = ht_opt_drain(root);
    if (!rc)
        *out_sum = add_up(root, sorted);
    free(sorted);
    return rc;
}

/* ------------------------------------------------------------------- apply */

/* Applies nothing: frozen ranges count as done. */
static void skip_step(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(p, &root->touched, struct ht_param, touched) {
        for (uint64_t i = 0; i < p->shape.range_count; i++) {
            struct ht_range *r = ht_opt_range_find(p, i);
            if (r && (r->frozen.count || r->added))
                r->state = HT_RANGE_DONE;
        }
    }
    root->skipped++;
}

static void clip_step(struct ht_root *root, double norm) HT_REQUIRES(HT_LOCK_OPTIM)
{
    double most = root->latched.max_grad_norm, coefficient = most > 0 ? most / (norm + 1e-6) : 1;

    if (coefficient >= 1)
        return;
    /* NaN too: as with PyTorch it goes into every parameter. */
    ht_list_for_each_entry(p, &root->touched, struct ht_param, touched)
        ht_opt_set_grad_factor(p, (float)(coefficient / ht_opt_divisor(root)));
    root->clipped++;
}

/* With accumulation sums wait, which are like state. */
static uint64_t waiting_bytes(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t bytes = 0;

    ht_list_for_each_entry(p, &root->touched, const struct ht_param, touched) {
        for (uint64_t i = 0; !p->gone && i < p->shape.range_count; i++) {
            const struct ht_range *r = ht_opt_range_find(p, i);
            bytes += r && r->measured ? ht_opt_range_grad_bytes(p, i) : 0;
        }
    }
    return ht_opt_accumulate(root) > 1 ? 0 : bytes;
}

int ht_opt_whole_step(struct ht_root *root, bool *out_skip)
{
    double sum = 0;
    int rc = measure_step(root, &sum);

    if (rc)
        return rc;
    ht_opt_expect_waiting(root, waiting_bytes(root)); /* before updates fill the room */
    root->grad_norm = sqrt(sum) / ht_opt_divisor(root);
    *out_skip = root->latched.skip_nonfinite && root->step_nonfinite;
    if (*out_skip) {
        skip_step(root);
        return 0;
    }
    clip_step(root, root->grad_norm);
    ht_opt_queue_frozen(root, true);
    return 0;
}
