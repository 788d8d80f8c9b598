/* SPDX-License-Identifier: Apache-2.0 */
/*
 * squares.c - sums of squares of gradients, kept from the moment when a worker has the gradient in memory until the
 * boundary needs the norm (step/norm.c).
 *
 * A parameter has one double for each HT_SUM_SPAN elements. Those of a range are valid while range.measured is set. The
 * bytes that were summed cannot change then:
 *
 *   - only frozen bytes and complete sums of gradients are measured, and a write of frozen bytes is refused;
 *   - freezing more bytes of the range voids its sums (gradient/flush.c);
 *   - drop, abort and the end of the step clear coverage, and the sums with it (range.c).
 *
 * While a range is RUNNING the worker writes its sums without a lock. In all other states the optimizer's lock guards
 * them.
 */

#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"

uint64_t ht_opt_squares_bytes(const struct ht_param *p)
{
    return p->squares ? ht_div_up(p->shape.elements, HT_SUM_SPAN) * sizeof(double) : 0;
}

bool ht_opt_squares_make(struct ht_param *p)
{
    uint64_t count = ht_div_up(p->shape.elements, HT_SUM_SPAN);

    if (p->squares)
        return true;
    p->squares = calloc(count ? count : 1, sizeof(double));
    p->o->meta_bytes += ht_opt_squares_bytes(p);
    return p->squares != NULL;
}

void ht_opt_squares_free(struct ht_param *p)
{
    p->o->meta_bytes -= ht_opt_squares_bytes(p);
    free(p->squares);
    p->squares = NULL;
}

/* Sums of a range: their place among those of the parameter, and how many there are. */
static uint64_t first_span(const struct ht_param *p, uint64_t index)
{
    return index * p->shape.range_elements / HT_SUM_SPAN;
}

static uint64_t span_count(const struct ht_param *p, uint64_t index)
{
    return ht_div_up(ht_opt_range_elements(&p->shape, index), HT_SUM_SPAN);
}

double *ht_opt_squares_begin(const struct ht_range *r)
{
    double *span = r->param->squares + first_span(r->param, r->index);

    memset(span, 0, span_count(r->param, r->index) * sizeof(*span));
    return span;
}

void ht_opt_squares_add(const struct ht_kernels *kernels, double *span, const struct ht_elements *part,
                        uint64_t *nonfinite)
{
    const uint8_t *g = part->bytes;
    uint32_t size = ht_dtype_trained_bytes(part->dtype);

    for (uint64_t e = part->first, end = e + part->count, n; e < end; e += n, g += n * size) {
        n = ht_min_u64(end - e, HT_SUM_BLOCK - e % HT_SUM_BLOCK);
        span[e / HT_SUM_SPAN] += kernels->sum_squares(g, part->dtype, n, nonfinite);
    }
}

/* Ranges without sums have no gradient: zeros would change no bit. */
void ht_opt_squares_total(const struct ht_param *p, double *sum, uint64_t *nonfinite)
{
    double own = 0;

    for (uint64_t i = 0; i < p->shape.range_count; i++) {
        const struct ht_range *r = ht_opt_range_find(p, i);
        if (!r || !r->measured)
            continue;
        const double *span = p->squares + first_span(p, i);
        for (uint64_t k = 0; k < span_count(p, i); k++)
            own += span[k];
        *nonfinite += r->nonfinite;
    }
    *sum += own;
}
