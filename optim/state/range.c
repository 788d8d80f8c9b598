/* SPDX-License-Identifier: Apache-2.0 */
/*
 * range.c - the ranges of a parameter: one per chunk, made when first touched; their coverage, the sums of their
 * gradients and of the squares of these, and readers that wait.
 */
#include "tiering/base/mutant.h"
#include "optim/state/param.h"
#include "optim/state/root.h"

/* ------------------------------------------------------------------- shape */

int ht_opt_shape_of(struct ht_param_shape *out, uint64_t bytes, uint32_t chunk_bytes, uint8_t dtype, uint8_t grad_dtype)
{
    uint8_t p_bytes = ht_dtype_trained_bytes(dtype), g_bytes = ht_dtype_trained_bytes(grad_dtype);

    if (!p_bytes || !g_bytes || bytes % p_bytes)
        return -EINVAL;
    *out = (struct ht_param_shape){
        .elements = bytes / p_bytes,
        .range_count = ht_div_up(bytes, chunk_bytes),
        .chunk_bytes = chunk_bytes,
        .range_elements = chunk_bytes / p_bytes,
        .dtype = dtype,
        .grad_dtype = grad_dtype,
        .p_bytes = p_bytes,
        .g_bytes = g_bytes,
    };
    return 0;
}

int ht_opt_state_shape(const struct ht_param *p, struct ht_param_shape *out)
{
    const struct ht_param_meta *m = &p->cur;

    return ht_opt_shape_of(out, m->elements * ht_dtype_trained_bytes(m->dtype), m->chunk_bytes, m->dtype, m->dtype);
}

/* ----------------------------------------------------------------- squares */

/*
 * Kept from the moment when a worker has the gradient in memory until the boundary needs the norm (step/boundary.c). A
 * parameter has one double for each HT_SUM_SPAN elements. Those of a range are valid while range.measured is set. The
 * bytes that were summed cannot change then:
 *
 *   - only frozen bytes and complete sums of gradients are measured, and a write of frozen bytes is refused;
 *   - freezing more bytes of the range voids its sums (gradient/flush.c);
 *   - drop, abort and the end of the step clear coverage, and the sums with it.
 *
 * While a range is RUNNING the worker writes its sums without a lock. In all other states the optimizer's lock guards
 * them.
 */

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

static void free_squares(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
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

    ht_opt_for_each_range(r, p) {
        if (!r->measured)
            continue;
        const double *span = p->squares + first_span(p, r->index);
        for (uint64_t k = 0; k < span_count(p, r->index); k++)
            own += span[k];
        *nonfinite += r->nonfinite;
    }
    *sum += own;
}

/* ------------------------------------------------------------------- table */

int ht_opt_ranges_init(struct ht_param *p, const struct ht_param_shape *shape)
{
    uint64_t blocks = ht_div_up(shape->range_count, HT_RANGE_BLOCK);
    struct ht_range **block = calloc(blocks ? blocks : 1, sizeof(struct ht_range *));

    if (!block)
        return -ENOMEM;
    ht_opt_ranges_free(p);
    p->block = block;
    p->blocks = blocks;
    p->shape = *shape;
    p->o->meta_bytes += blocks * sizeof(struct ht_range *);
    return 0;
}

/* Ranges in a block. */
static unsigned block_ranges(const struct ht_param *p, uint64_t b)
{
    return (unsigned)ht_min_u64(HT_RANGE_BLOCK, p->shape.range_count - b * HT_RANGE_BLOCK);
}

void ht_opt_range_count_intervals(struct ht_range *r)
{
    uint32_t bytes = (r->written.cap + r->frozen.cap) * (uint32_t)sizeof(struct ht_interval);

    r->param->o->meta_bytes += (uint64_t)bytes - r->spans_bytes;
    r->spans_bytes = bytes;
}

void ht_opt_range_count_own(struct ht_optim *o, struct ht_range_own *own, bool freed)
{
    uint32_t array = own->bytes.cap * (uint32_t)sizeof(struct ht_interval);
    uint32_t bytes = freed ? 0 : HT_RANGE_OWN_BYTES + array;

    ht_quota_set(&o->accounts, own->user, own->user->taken + bytes - own->counted_bytes);
    own->counted_bytes = bytes;
}

static void free_block(struct ht_param *p, uint64_t b) HT_REQUIRES(HT_LOCK_OPTIM)
{
    unsigned count = block_ranges(p, b);

    for (unsigned i = 0; i < count; i++) {
        struct ht_range *r = &p->block[b][i];
        ht_interval_set_free(&r->written);
        ht_interval_set_free(&r->frozen);
        ht_opt_range_count_intervals(r);
        ht_list_del(&r->dirty);
        while (!ht_list_empty(&r->own))
            ht_list_del(r->own.next);
    }
    free(p->block[b]);
    p->o->meta_bytes -= count * sizeof(struct ht_range);
}

void ht_opt_ranges_free(struct ht_param *p)
{
    for (uint64_t b = 0; b < p->blocks; b++)
        if (p->block[b])
            free_block(p, b);
    free_squares(p);
    free(p->block);
    p->o->meta_bytes -= p->blocks * sizeof(struct ht_range *);
    p->block = NULL;
    p->blocks = 0;
}

struct ht_range *ht_opt_range_find(const struct ht_param *p, uint64_t index)
{
    struct ht_range *block = index / HT_RANGE_BLOCK < p->blocks ? p->block[index / HT_RANGE_BLOCK] : NULL;

    return block ? &block[index % HT_RANGE_BLOCK] : NULL;
}

struct ht_range *ht_opt_range_from(const struct ht_param *p, uint64_t index)
{
    for (uint64_t b = index / HT_RANGE_BLOCK; b < p->blocks; index = ++b * HT_RANGE_BLOCK)
        if (p->block[b])
            return index < p->shape.range_count ? &p->block[b][index % HT_RANGE_BLOCK] : NULL;
    return NULL;
}

struct ht_range_piece ht_opt_range_piece(const struct ht_param *p, uint64_t begin, uint64_t end)
{
    uint64_t bytes = (uint64_t)p->shape.range_elements * p->shape.g_bytes, index = begin / bytes;

    return (struct ht_range_piece){
        .index = index,
        .begin = (uint32_t)(begin - index * bytes),
        .end = (uint32_t)ht_min_u64(end - index * bytes, bytes),
    };
}

static struct ht_range *make_block(struct ht_param *p, uint64_t b) HT_REQUIRES(HT_LOCK_OPTIM)
{
    unsigned count = block_ranges(p, b);
    struct ht_range *block = calloc(count, sizeof(*block));

    for (unsigned i = 0; block && i < count; i++) {
        struct ht_range *r = &block[i];
        r->param = p;
        r->index = (uint32_t)(b * HT_RANGE_BLOCK + i);
        ht_list_init(&r->queue);
        ht_list_init(&r->dirty);
        ht_list_init(&r->own);
    }
    if (block)
        p->o->meta_bytes += count * sizeof(*block);
    return block;
}

struct ht_range *ht_opt_range_make(struct ht_param *p, uint64_t index)
{
    uint64_t b = index / HT_RANGE_BLOCK;

    if (!p->block[b])
        p->block[b] = make_block(p, b);
    return p->block[b] ? &p->block[b][index % HT_RANGE_BLOCK] : NULL;
}

uint32_t ht_opt_range_elements(const struct ht_param_shape *s, uint64_t index)
{
    uint64_t before = index * s->range_elements;

    return (uint32_t)ht_min_u64(s->range_elements, s->elements - before);
}

uint64_t ht_opt_range_grad_begin(const struct ht_range *r)
{
    return (uint64_t)r->index * r->param->shape.range_elements * r->param->shape.g_bytes;
}

uint32_t ht_opt_range_grad_bytes(const struct ht_param *p, uint64_t index)
{
    return ht_opt_range_elements(&p->shape, index) * p->shape.g_bytes;
}

/* ------------------------------------------------------------------- state */

uint32_t ht_opt_state_chunk_bytes(const struct ht_param_shape *s, uint8_t kind)
{
    return kind == HT_STATE_MASTER_BLOCKS ? HT_SMALL_CHUNK_BYTES : s->chunk_bytes;
}

uint64_t ht_opt_state_range_bytes(uint8_t kind, uint8_t form, uint64_t elements)
{
    if (kind == HT_STATE_MASTER_BLOCKS)
        return ht_div_up(elements, HT_MASTER_BLOCK) * sizeof(struct ht_disk_master);
    if (kind == HT_STATE_MASTER_LOW)
        return elements * 2;
    return ht_form_bytes(form, elements);
}

unsigned ht_opt_state_stride(const struct ht_param_shape *s, uint8_t kind, uint8_t form)
{
    return (unsigned)ht_div_up(ht_opt_state_range_bytes(kind, form, s->range_elements),
                               ht_opt_state_chunk_bytes(s, kind));
}

uint32_t ht_opt_state_used_bytes(const struct ht_param_shape *s, uint8_t kind, uint8_t form)
{
    return (uint32_t)ht_min_u64(ht_opt_state_range_bytes(kind, form, s->range_elements),
                                ht_opt_state_chunk_bytes(s, kind));
}

static uint64_t all_ranges(const struct ht_param_shape *s, uint8_t kind, uint8_t form, uint64_t whole_bytes)
{
    uint64_t before = s->range_count ? s->range_count - 1 : 0;

    return before * whole_bytes + ht_opt_state_range_bytes(kind, form, s->elements - before * s->range_elements);
}

uint64_t ht_opt_state_size(const struct ht_param_shape *s, uint8_t kind, uint8_t form)
{
    return all_ranges(s, kind, form, (uint64_t)ht_opt_state_stride(s, kind, form) * ht_opt_state_chunk_bytes(s, kind));
}

uint64_t ht_opt_state_kept_bytes(const struct ht_param_shape *s, uint8_t kind, uint8_t form)
{
    return all_ranges(s, kind, form, ht_opt_state_range_bytes(kind, form, s->range_elements));
}

/* ----------------------------------------------------------------- readers */

bool ht_opt_range_decided_later(const struct ht_range *r)
{
    bool covered = r->frozen.count || r->added || r->part_added;

    return r->param->root->deciding && r->param->has_grad && covered && r->state != HT_RANGE_DONE &&
        r->state != HT_RANGE_FAILED;
}

bool ht_opt_param_replayed(const struct ht_param *p)
{
    return p->root->redo.replaying && (p->cur.exists || p->pub.exists) && !HT_MUTANT("replay-shown");
}

static bool works_on(const struct ht_range *r, unsigned work) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return (r->state == HT_RANGE_QUEUED || r->state == HT_RANGE_RUNNING) && (r->work & work);
}

/* Does the second phase of the parameter come without a client? */
static bool phase_follows(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return p->has_grad && ht_opt_in_phases(p) && p->ortho && p->ortho->config.ns_store;
}

bool ht_opt_range_updating(const struct ht_range *r)
{
    return works_on(r, HT_WORK_UPDATE | HT_WORK_MOMENTUM) || ht_opt_range_decided_later(r) ||
        ht_opt_param_replayed(r->param);
}

bool ht_opt_range_hidden(const struct ht_range *r)
{
    if (ht_opt_param_replayed(r->param))
        return true;
    if (phase_follows(r->param) &&
        (works_on(r, HT_WORK_MOMENTUM) ||
         (r->stirred && r->state != HT_RANGE_DONE && r->state != HT_RANGE_FAILED && !r->shown)))
        return true;
    return (works_on(r, HT_WORK_UPDATE) || ht_opt_range_decided_later(r)) && !r->shown;
}

bool ht_opt_param_hidden(const struct ht_param *p)
{
    return p->pending > p->shown || (p->root->deciding && p->has_grad) || ht_opt_param_replayed(p) || phase_follows(p);
}

/* ---------------------------------------------------------------- coverage */

/*
 * The frozen bytes belong to no step any more, and any opener may write them anew: no account has them. Accounts keep
 * the bytes that are still written. Without memory for that an account loses all of the range.
 */
static void thaw(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_interval_set_clear(&r->frozen);
    ht_list_for_each_entry(own, &r->own, struct ht_range_own, link) {
        if (ht_interval_set_intersect(&own->bytes, &r->written))
            ht_interval_set_clear(&own->bytes);
        ht_opt_range_count_own(r->param->o, own, false);
    }
}

static void clear_range(struct ht_range *r, bool frozen_only) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (!frozen_only)
        ht_interval_set_clear(&r->written);
    thaw(r);
    r->state = HT_RANGE_IDLE;
    r->work = 0;
    r->consumed = r->part_added = r->logged = r->stirred = false;
    r->measured = HT_MUTANT("squares-stay") && r->measured;
    r->added = 0;
    if (!frozen_only)
        ht_list_del(&r->dirty);
}

void ht_opt_ortho_count(struct ht_param *p, bool gone)
{
    struct ht_ortho *of = p->ortho;
    uint64_t bytes = gone ? 0 : sizeof(*of) + of->written.cap * sizeof(struct ht_interval);

    p->o->meta_bytes += bytes - of->heap_bytes;
    of->heap_bytes = bytes;
}

void ht_opt_ortho_spent(struct ht_param *p)
{
    struct ht_ortho *of = p->ortho;

    p->root->ortho_bytes -= of->waiting_bytes;
    p->root->update_bytes -= of->update_bytes;
    of->waiting_bytes = of->update_bytes = 0;
}

void ht_opt_ortho_clear(struct ht_param *p)
{
    struct ht_ortho *of = p->ortho;

    if (!of)
        return;
    ht_interval_set_clear(&of->written);
    ht_opt_ortho_spent(p);
    of->stirred = 0;
    of->asked = of->applied = false;
}

void ht_opt_coverage_clear(struct ht_param *p, bool frozen_only)
{
    for (uint64_t b = 0; b < p->blocks; b++)
        for (unsigned i = 0; p->block[b] && i < block_ranges(p, b); i++)
            clear_range(&p->block[b][i], frozen_only);
    ht_opt_ortho_clear(p);
    p->has_grad = false;
    p->complete = p->failed = 0;
    ht_list_del(&p->touched);
}

bool ht_opt_in_flight(const struct ht_param *p, uint64_t begin, uint64_t end)
{
    ht_list_for_each_entry(w, &p->inflight, const struct ht_inflight, link)
        if (w->begin < end && begin < w->end)
            return true;
    return false;
}

/*
 * Are the gradient bytes [begin, end) still needed, or may they be written while the lock is released? A range that is
 * wholly applied cannot be written before the boundary; while the root is draining none can.
 */
static bool bytes_needed(struct ht_param *p, uint64_t begin, uint64_t end) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t range_bytes = (uint64_t)p->shape.range_elements * p->shape.g_bytes;
    bool replaying = p->root->redo.replaying && p->root->pending; /* more may follow until the step is counted */

    for (uint64_t i = begin / range_bytes; i < p->shape.range_count && i * range_bytes < end; i++) {
        const struct ht_range *r = ht_opt_range_find(p, i);
        bool done = r && ht_opt_range_spent(r);
        if (done && ht_interval_set_cover(&r->frozen, 0, ht_opt_range_grad_bytes(p, i)))
            continue;
        if (!p->root->draining || replaying || (r && (r->written.count || (r->frozen.count && !done))))
            return true;
    }
    return ht_opt_in_flight(p, begin, end);
}

void ht_opt_range_drop(struct ht_range *r)
{
    struct ht_param *p = r->param;
    uint64_t chunk = p->shape.chunk_bytes, begin = ht_opt_range_grad_begin(r);
    uint64_t end = begin + ht_opt_range_grad_bytes(p, r->index);
    struct ht_obj *grad = p->grad;

    if (r->stirred && r->state == HT_RANGE_DONE && !r->consumed) { /* its gradient went after the first phase */
        struct ht_obj *given = p->ortho->given;
        r->consumed = true;
        unlock(p->o);
        ht_obj_scratch_drop(given, r->index, 1);
        lock(p->o);
        return;
    }
    if (r->consumed || !grad)
        return;
    for (uint64_t c = begin / chunk; c * chunk < end; c++)
        if (bytes_needed(p, c * chunk, (c + 1) * chunk))
            return;
    r->consumed = true;
    unlock(p->o);
    ht_obj_scratch_drop(grad, begin / chunk, ht_div_up(end, chunk) - begin / chunk);
    lock(p->o);
}

/* -------------------------------------------------------------------- sums */

/*
 * Gradients of several backward passes that make one step (accumulate=S). Each range counts for itself. When a gradient
 * covers it wholly a worker adds the gradient to a sum in f32, and the range is open for the next one; a client that
 * writes the next one earlier waits. The S-th is added and applied in one go, at the boundary if the step is deferred.
 * Elements are added in the order of arrival, and the first one replaces the old sum. So sums are those of autograd in
 * f32, bit for bit.
 *
 *   IDLE, added = k --covered--> QUEUED(ADD) --worker--> IDLE, added = k + 1
 *   IDLE, added = S - 1 --covered--> QUEUED(ADD|UPDATE) --worker--> DONE                  not deferred
 *                                    QUEUED(ADD|MEASURE) --worker--> IDLE, added = S      deferred
 *   IDLE, anything in frozen or sum --boundary--> QUEUED([ADD|]MEASURE) unless it is measured, QUEUED([ADD|]UPDATE)
 *
 * Sums lie in a scratch object per parameter: in the DRAM tier while there is room, else outside it, with space
 * reserved by the first gradient of a step. They belong to the step: they are never published, and an abort or a crash
 * drops them.
 */

uint32_t ht_opt_accumulate(const struct ht_root *root)
{
    return root->open ? root->latched.accumulate : root->decided ? 1 : root->config.accumulate;
}

double ht_opt_divisor(const struct ht_root *root)
{
    return root->latched.grad_scale * (root->latched.accumulate_mean ? root->latched.accumulate : 1);
}

bool ht_opt_range_adding(const struct ht_range *r)
{
    return r->work == HT_WORK_ADD && r->state != HT_RANGE_IDLE && r->state != HT_RANGE_FAILED;
}

bool ht_opt_range_summed(const struct ht_range *r)
{
    return r->added || r->part_added || (r->work & HT_WORK_ADD);
}

const struct ht_interval *ht_opt_range_cover(const struct ht_range *r, struct ht_interval *whole, uint32_t *out_count)
{
    if (!r->added) {
        *out_count = r->frozen.count;
        return ht_interval_set_all(&r->frozen);
    }
    *whole = (struct ht_interval){0, ht_opt_range_grad_bytes(r->param, r->index)};
    *out_count = 1;
    return whole;
}

void ht_opt_range_added(struct ht_range *r)
{
    r->added++;
    r->state = HT_RANGE_IDLE;
    r->work = 0;
    r->consumed = false;
    thaw(r);
}

void ht_opt_sum_drop(struct ht_range *r)
{
    struct ht_param *p = r->param;
    uint64_t per_range = 4 / p->shape.p_bytes;
    struct ht_obj *sum = p->sum;

    if (!sum || !ht_opt_range_summed(r))
        return;
    unlock(p->o);
    ht_obj_scratch_drop(sum, r->index * per_range, per_range);
    lock(p->o);
}
