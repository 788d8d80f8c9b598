/* SPDX-License-Identifier: Apache-2.0 */
/*
 * update.c - workers: a range's parameter, state, sum and gradient under one batch pin, one pass of the kernel.
 *
 * A worker keeps two batch pins going: while it computes on one, the reads of the next are in flight. The second is
 * taken only when its buffers are free at once, and only for ranges that share no chunk with others: a worker that
 * holds chunks never waits for chunks that another worker may hold.
 *
 * A range is applied wholly or not at all: until the kernel runs nothing is marked changed. When the write of a changed
 * chunk fails the store remembers that its content is lost, and the root can only be aborted.
 *
 * Nothing here allocates.
 */

#include "tiering/base/fault.h"
#include "tiering/api/batch_pin.h"
#include "tiering/base/mutant.h"
#include "tiering/base/trace.h"
#include "optim/rules/master.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/redo/logged.h"
#include "optim/step/step_priv.h"

struct job {
    struct ht_range *range; /* NULL: free */
    struct ht_batch_pin pin;
    bool begun, summed;
    struct ht_worker *notes; /* who notes what the update changes; NULL: nobody */
    bool second;             /* phase of a step in two: the orthogonalised update takes the place of the gradient */
    unsigned work;           /* enum ht_range_work */
    int err;
    uint64_t elements, added, nonfinite;
    struct ht_trace_mark mark;
    /* the part that is measured or updated; fixed while the range is running */
    const struct ht_interval *cover;
    struct ht_interval whole;
    uint32_t covers;
    /* places in pin.chunk */
    unsigned state_at[HT_STATES_MAX], ortho_at, sum_at, grad_at, grad_chunks;
    uint64_t grad_first;
};

/* ------------------------------------------------------------- batch pins */

static unsigned add_chunk(struct ht_batch_pin *l, struct ht_obj *obj, uint64_t index, enum ht_batch_pin_mode mode)
{
    l->chunk[l->count] = (struct ht_batch_pin_chunk){.obj = obj, .index = index, .mode = mode};
    return l->count++;
}

/* Bytes of an object of state, or of sums (which are like state in f32). */
static uint64_t state_bytes(const struct job *j, uint8_t kind, uint8_t form)
{
    return ht_opt_state_range_bytes(kind, form, ht_opt_range_elements(&j->range->param->shape, j->range->index));
}

static unsigned state_chunks(const struct job *j, uint8_t kind, uint8_t form)
{
    return (unsigned)ht_div_up(state_bytes(j, kind, form), ht_opt_state_chunk_bytes(&j->range->param->shape, kind));
}

/* Adds the chunks of obj that a range has. Returns the place of the first. */
static unsigned add_range(struct job *j, struct ht_obj *obj, uint8_t kind, uint8_t form, enum ht_batch_pin_mode mode)
{
    uint64_t stride = ht_opt_state_stride(&j->range->param->shape, kind, form);
    unsigned at = j->pin.count;

    for (unsigned i = 0; i < state_chunks(j, kind, form); i++)
        add_chunk(&j->pin, obj, j->range->index * stride + i, mode);
    return at;
}

static void add_gradient(struct job *j)
{
    const struct ht_param *p = j->range->param;
    uint64_t begin = ht_opt_range_grad_begin(j->range), end = begin + ht_opt_range_grad_bytes(p, j->range->index);

    j->grad_at = j->pin.count;
    j->grad_first = begin / p->shape.chunk_bytes;
    j->grad_chunks = 0;
    if (j->second) {
        j->grad_first = j->range->index;
        j->pin.chunk[add_chunk(&j->pin, p->ortho->given, j->range->index, HT_BATCH_PIN_READ)].consumed = true;
    }
    if (j->second || (j->summed && !(j->work & HT_WORK_ADD)))
        return;
    j->grad_chunks = (unsigned)(ht_div_up(end, p->shape.chunk_bytes) - j->grad_first);
    for (unsigned i = 0; i < j->grad_chunks; i++) {
        unsigned at = add_chunk(&j->pin, p->grad, j->grad_first + i, HT_BATCH_PIN_READ);
        j->pin.chunk[at].waits = j->work == HT_WORK_MEASURE;
        j->pin.chunk[at].consumed = j->work != HT_WORK_MEASURE;
    }
}

/* The first gradient makes the sum, if it is whole. */
static enum ht_batch_pin_mode sum_mode(const struct ht_range *r)
{
    bool whole = ht_interval_set_cover(&r->frozen, 0, ht_opt_range_grad_bytes(r->param, r->index));

    if (!(r->work & HT_WORK_ADD))
        return HT_BATCH_PIN_READ;
    return r->added || !whole ? HT_BATCH_PIN_UPDATE : HT_BATCH_PIN_OVERWRITE;
}

/* Does the kernel work on it? The first phase needs the state of the rule, and the second one that of the master. */
static bool uses_state(const struct job *j, unsigned s)
{
    const struct ht_layout *layout = &j->range->param->layout;
    bool of_rule = s + ht_opt_master_kinds(layout) < layout->count;

    return j->work & HT_WORK_MOMENTUM ? of_rule : (j->work & HT_WORK_UPDATE) && !(j->second && of_rule);
}

/*
 * Names all chunks of the range: the parameter's first, then state by state, what is to be orthogonalised, the sum of
 * gradients, the gradient's.
 */
static void describe_job(struct job *j, struct ht_worker *w)
{
    struct ht_optim *o = w->o;
    const struct ht_range *r = j->range;
    const struct ht_param *p = r->param;
    /* A sum is logged between its last addition and the update. */
    unsigned work = r->work & HT_WORK_LOG ? r->work & (HT_WORK_ADD | HT_WORK_MEASURE) : r->work;
    bool update = work & HT_WORK_UPDATE;

    lock(o);
    /* Will the open step be published when it ends, or is it the last one of a part that a replay computes? */
    bool final = p->root->undurable + 1 >= p->root->config.durable_every || ht_opt_redo_ends_part(p->root);
    bool notes = update && p->root->deltas.recording;
    unlock(o);
    j->notes = notes && ht_opt_delta_writer_make(w) ? w : NULL;
    if (notes && !j->notes) {
        lock(o);
        ht_opt_delta_lose(p->root);
        unlock(o);
    }
    j->pin = (struct ht_batch_pin){.store = o->store, .final = update && final, .here = !w->away, .spare = w->is_spare};
    j->work = work;
    j->second = r->stirred;
    j->summed = !j->second && ht_opt_range_summed(r);
    j->cover = ht_opt_range_cover(r, &j->whole, &j->covers);
    j->err = 0;
    j->elements = j->added = j->nonfinite = 0;
    if (update)
        add_chunk(&j->pin, p->obj, r->index, HT_BATCH_PIN_UPDATE);
    for (unsigned s = 0; s < p->layout.count; s++)
        if (uses_state(j, s))
            j->state_at[s] = add_range(j, p->state[s], p->layout.kind[s], p->layout.form[s], HT_BATCH_PIN_UPDATE);
    if (work & HT_WORK_MOMENTUM) {
        j->ortho_at = add_chunk(&j->pin, p->ortho->update, r->index, HT_BATCH_PIN_OVERWRITE);
        j->pin.chunk[j->ortho_at].passes = true;
    }
    j->sum_at = j->summed ? add_range(j, p->sum, HT_STATE_SUM, HT_FORM_F32, sum_mode(r)) : j->pin.count;
    add_gradient(j);
}

static void begin_job(struct job *j, bool second)
{
    j->pin.nowait = second;
    int rc = ht_batch_pin_begin(&j->pin);
    if (rc == -EREMOTE && ht_opt_leave_range(j->range, ht_opt_worker_main)) {
        j->range = NULL;
        return;
    }
    if (rc == -EREMOTE) {
        j->pin.here = false;
        rc = ht_batch_pin_begin(&j->pin);
    }
    j->begun = !rc;
    if (rc && !(second && rc == -EAGAIN))
        j->err = rc;
}

static uint64_t bytes_of(const struct job *j, unsigned at, unsigned count)
{
    uint64_t bytes = 0;

    for (unsigned i = 0; i < count; i++)
        bytes += j->pin.chunk[at + i].len;
    return bytes;
}

/* Do all sizes still fit the frozen gradient? A truncation may have come between. */
static bool is_complete(const struct job *j)
{
    const struct ht_range *r = j->range;
    const struct ht_param *p = r->param;
    uint64_t elements = ht_opt_range_elements(&p->shape, r->index), before = j->grad_first * p->shape.chunk_bytes;
    uint64_t grad_end = ht_opt_range_grad_begin(r) + ht_opt_range_grad_bytes(p, r->index);
    bool update = j->work & HT_WORK_UPDATE;

    if (update &&
        (ht_obj_chunk_bytes(p->obj) != p->shape.chunk_bytes || j->pin.chunk[0].len < elements * p->shape.p_bytes))
        return false;
    for (unsigned s = 0; s < p->layout.count; s++) {
        uint8_t kind = p->layout.kind[s], form = p->layout.form[s];
        if (uses_state(j, s) && bytes_of(j, j->state_at[s], state_chunks(j, kind, form)) < state_bytes(j, kind, form))
            return false;
    }
    if (j->summed && bytes_of(j, j->sum_at, state_chunks(j, HT_STATE_SUM, HT_FORM_F32)) < elements * 4)
        return false;
    if (j->work & HT_WORK_MOMENTUM && j->pin.chunk[j->ortho_at].len < elements * 2)
        return false;
    if (j->second)
        return j->pin.chunk[j->grad_at].len >= elements * 2;
    return !j->grad_chunks || before + bytes_of(j, j->grad_at, j->grad_chunks) >= grad_end;
}

/* ----------------------------------------------------------------- compute */

/* Element e of the gradient as it was written; *n is cut to the contiguous part. */
static const uint8_t *written_at(const struct job *j, uint64_t e, uint64_t *n)
{
    const struct ht_param_shape *shape = &j->range->param->shape;
    uint64_t byte = ht_opt_range_grad_begin(j->range) + e * shape->g_bytes, in_chunk = byte % shape->chunk_bytes;

    *n = ht_min_u64(*n, (shape->chunk_bytes - in_chunk) / shape->g_bytes);
    return j->pin.chunk[j->grad_at + (byte / shape->chunk_bytes - j->grad_first)].data + in_chunk;
}

/* Address of element e in the floats that begin at this place; *n is cut to the contiguous part. */
static float *float_at(const struct job *j, unsigned place, uint64_t e, uint64_t *n)
{
    uint64_t per_chunk = j->range->param->shape.chunk_bytes / 4, at = e % per_chunk;

    *n = ht_min_u64(*n, per_chunk - at);
    return (float *)(void *)j->pin.chunk[place + e / per_chunk].data + at;
}

static const void *gradient_at(const struct job *j, uint64_t e, uint64_t *n)
{
    if (j->second)
        return j->pin.chunk[j->grad_at].data + 2 * e;
    return j->summed ? (const void *)float_at(j, j->sum_at, e, n) : written_at(j, e, n);
}

static uint8_t gradient_dtype(const struct job *j)
{
    return j->second ? HT_DTYPE_BF16 : j->summed ? HT_DTYPE_F32 : j->range->param->shape.grad_dtype;
}

/* Adds frozen elements to their sum. */
static void add_gradient_to_sum(struct job *j)
{
    const struct ht_range *r = j->range;
    const struct ht_param_shape *shape = &r->param->shape;
    const struct ht_interval *v = ht_interval_set_all(&r->frozen);

    for (uint32_t i = 0; i < r->frozen.count; i++) {
        uint64_t e = v[i].begin / shape->g_bytes, end = v[i].end / shape->g_bytes;
        j->added += end - e;
        while (e < end) {
            uint64_t n = end - e;
            float *sum = float_at(j, j->sum_at, e, &n);
            const uint8_t *g = written_at(j, e, &n);
            r->param->o->kernels->add(sum, g, shape->grad_dtype, n, !r->added);
            e += n;
        }
    }
}

/*
 * Elements of a range of which some arrays are kept in other forms than f32: masters in two bytes, state in fewer bits.
 * These are f32 here while a rule runs. A window has whole blocks of all forms.
 */
struct window {
    uint64_t first, end;
    bool decoded[HT_KERNEL_STATES_MAX];
    int low; /* index in state of the missing bits of masters; the facts on their blocks follow. Negative: none */
    float state[HT_KERNEL_STATES_MAX][HT_FORM_WINDOW], master[HT_FORM_WINDOW];
};
static_assert(HT_FORM_WINDOW == HT_MASTER_BLOCK, "a window is a block of masters in two bytes");

/* Where the state s of a window is kept, and what its rounding depends on. */
static struct ht_coded coded_at(const struct job *j, const struct window *w, unsigned s)
{
    const struct ht_param *p = j->range->param;
    uint64_t elements = ht_opt_range_elements(&p->shape, j->range->index);
    struct ht_coded c = ht_coded_at(p->layout.form[s], j->pin.chunk[j->state_at[s]].data, elements, w->first,
                                    (size_t)(w->end - w->first));

    c.kind = p->layout.kind[s];
    c.salt = HT_MUTANT("salt-lost") ? 0 : p->layout.salt;
    c.t = p->t;
    c.element = (uint64_t)j->range->index * p->shape.range_elements + w->first;
    return c;
}

/* Masters of the window from their two bytes, or back. */
static void turn_masters(const struct job *j, struct window *w, bool back)
{
    const struct ht_batch_pin_chunk *chunk = j->pin.chunk;
    const struct ht_kernels *kernels = j->range->param->o->kernels;
    const uint16_t *half = (const uint16_t *)(const void *)chunk[0].data + w->first;
    uint16_t *low = (uint16_t *)(void *)chunk[j->state_at[w->low]].data + w->first;
    struct ht_disk_master *block =
        (struct ht_disk_master *)(void *)chunk[j->state_at[w->low + 1]].data + w->first / HT_MASTER_BLOCK;

    if (back)
        ht_master_compress(kernels, w->master, half, w->end - w->first, low, block);
    else
        ht_master_expand(kernels, block, half, low, w->end - w->first, w->master);
}

/* The window that begins at element `first`. */
static void open_window(const struct job *j, struct window *w, uint64_t first)
{
    const struct ht_param *p = j->range->param;
    const uint8_t *low =
        j->work & HT_WORK_MOMENTUM ? NULL : memchr(p->layout.kind, HT_STATE_MASTER_LOW, p->layout.count);

    w->first = first;
    w->end = ht_min_u64(first + HT_FORM_WINDOW, ht_opt_range_elements(&p->shape, j->range->index));
    w->low = low ? (int)(low - p->layout.kind) : -1;
    for (unsigned s = 0; s < HT_KERNEL_STATES_MAX; s++) {
        w->decoded[s] = s < p->layout.count && p->layout.form[s] != HT_FORM_F32 && uses_state(j, s);
        if (!w->decoded[s])
            continue;
        struct ht_coded c = coded_at(j, w, s);
        p->o->codecs->decode[p->layout.form[s]](&c, w->state[s]);
    }
    if (low)
        turn_masters(j, w, false);
}

static void close_window(const struct job *j, struct window *w)
{
    const struct ht_param *p = j->range->param;

    for (unsigned s = 0; s < HT_KERNEL_STATES_MAX; s++) {
        if (!w->decoded[s])
            continue;
        struct ht_coded c = coded_at(j, w, s);
        p->o->codecs->encode[p->layout.form[s]](&c, w->state[s]);
    }
    if (w->low >= 0)
        turn_masters(j, w, true);
}

/* The longest run from element e on that is contiguous in every array, and its addresses. */
static uint64_t run_at(const struct job *j, struct window *w, uint64_t e, uint64_t end, struct ht_update *out)
{
    const struct ht_param_shape *shape = &j->range->param->shape;
    const struct ht_layout *layout = &j->range->param->layout;
    uint64_t n = end - e;

    *out = (struct ht_update){
        .p = j->pin.chunk[0].data + e * shape->p_bytes,
        .master = w && w->low >= 0 ? w->master + (e - w->first) : NULL,
        .g = gradient_at(j, e, &n),
        .p_dtype = shape->dtype,
        .g_dtype = gradient_dtype(j),
    };
    for (unsigned s = 0; s < layout->count && layout->kind[s] < HT_STATE_MASTER_LOW; s++) {
        if (!uses_state(j, s))
            continue;
        if (layout->kind[s] == HT_STATE_MASTER)
            out->master = float_at(j, j->state_at[s], e, &n);
        else
            out->state[s] = w && w->decoded[s] ? w->state[s] + (e - w->first) : float_at(j, j->state_at[s], e, &n);
    }
    return n;
}

/*
 * Runs the kernel on n elements from e on. The bits that the parameter has before are here for a moment, in the cache.
 */
static void run_kernel(struct job *j, const struct ht_scalars *s, const struct ht_update *arrays, uint64_t e,
                       uint64_t n)
{
    const struct ht_param *p = j->range->param;
    uint8_t was[HT_FORM_WINDOW * sizeof(float)];

    if (j->notes)
        memcpy(was, arrays->p, n * p->shape.p_bytes);
    j->nonfinite += p->o->kernels->fn[s->kernel](s, arrays, n);
    if (j->notes)
        ht_opt_delta_note(j->notes, p, (uint64_t)j->range->index * p->shape.range_elements + e, was, arrays->p, n);
}

/* w: the window that has all elements from e to end; NULL: all is f32. */
static void update_elements(struct job *j, struct window *w, uint64_t e, uint64_t end)
{
    const struct ht_param *p = j->range->param;
    uint64_t first = (uint64_t)j->range->index * p->shape.range_elements;

    while (e < end) {
        struct ht_update arrays;
        uint64_t n = end - e;
        const struct ht_scalars *numbers = ht_opt_scalars_at(p, first + e, &n);
        struct ht_scalars plain;
        if (j->second && numbers) { /* the first phase has taken the gradient as they say */
            plain = *numbers;
            plain.grad_factor = 1;
            plain.maximize = false;
            numbers = &plain;
        }
        if (j->notes)
            n = ht_min_u64(n, HT_FORM_WINDOW);
        n = run_at(j, w, e, e + n, &arrays);
        if (numbers)
            run_kernel(j, numbers, &arrays, e, n);
        e += n;
    }
}

/* A window that several intervals touch is encoded once. */
static void update_windows(struct job *j)
{
    uint32_t size = j->range->param->shape.g_bytes, i = 0;
    uint64_t done = 0;
    struct window w;

    while (i < j->covers) {
        uint64_t e = ht_max_u64(done, j->cover[i].begin / size);
        open_window(j, &w, e - e % HT_FORM_WINDOW);
        for (; i < j->covers && j->cover[i].begin / size < w.end; i++) {
            uint64_t end = j->cover[i].end / size;
            update_elements(j, &w, ht_max_u64(e, j->cover[i].begin / size), ht_min_u64(end, w.end));
            if (end > w.end)
                break;
        }
        close_window(j, &w);
        done = w.end;
    }
}

static void update_range(struct job *j)
{
    const struct ht_param *p = j->range->param;
    bool windows = ht_opt_layout_has_forms(&p->layout) || memchr(p->layout.kind, HT_STATE_MASTER_LOW, p->layout.count);

    for (uint32_t i = 0; i < j->covers; i++) {
        uint64_t e = j->cover[i].begin / p->shape.g_bytes, end = j->cover[i].end / p->shape.g_bytes;
        j->elements += end - e;
        if (!windows)
            update_elements(j, NULL, e, end);
    }
    if (windows)
        update_windows(j);
    if (j->notes)
        ht_opt_delta_end_piece(j->notes);
}

/* The first phase. The range is covered wholly. */
static void stir_range(struct job *j)
{
    const struct ht_param *p = j->range->param;
    const struct ht_batch_pin_chunk *out = &j->pin.chunk[j->ortho_at];
    uint64_t end = ht_opt_range_elements(&p->shape, j->range->index);
    bool windows = p->layout.form[0] != HT_FORM_F32;
    uint16_t *u = (uint16_t *)(void *)out->data;
    struct window w;

    for (uint64_t e = 0, n; e < end; e += n) {
        if (windows && e % HT_FORM_WINDOW == 0)
            open_window(j, &w, e);
        n = windows ? w.end - e : end - e;
        const void *g = gradient_at(j, e, &n);
        float *m = windows ? w.state[0] + (e - w.first) : float_at(j, j->state_at[0], e, &n);
        j->nonfinite += p->o->kernels->stir(&p->scalars, m, g, gradient_dtype(j), u + e, n);
        if (windows && e + n == w.end)
            close_window(j, &w);
    }
    memset(u + end, 0, out->len - 2 * end);
}

/* A chunk is a whole number of blocks, so its end cuts none. */
static void measure_range(struct job *j)
{
    const struct ht_kernels *kernels = j->range->param->o->kernels;
    uint32_t size = j->range->param->shape.g_bytes;
    double *span = ht_opt_squares_begin(j->range);

    for (uint32_t i = 0; i < j->covers; i++) {
        for (uint64_t e = j->cover[i].begin / size, end = j->cover[i].end / size; e < end;) {
            struct ht_elements part = {.first = e, .count = end - e, .dtype = gradient_dtype(j)};
            part.bytes = gradient_at(j, e, &part.count);
            ht_opt_squares_add(kernels, span, &part, &j->nonfinite);
            e += part.count;
        }
    }
}

/* Bits of changed chunks: parameter and state; without an update the sum, which an update does not need any more. */
static uint32_t changed_mask(const struct job *j)
{
    uint32_t before_sum = (1u << j->sum_at) - 1;

    return j->work & (HT_WORK_UPDATE | HT_WORK_MOMENTUM) ? before_sum
        : j->work & HT_WORK_ADD                          ? ((1u << j->grad_at) - 1) & ~before_sum
                                                         : 0;
}

/*
 * The parameter's image is final, and its state is still being written: readers may go on. If such a write fails the
 * step fails, and an abort takes the image back with the rest.
 */
static void show_parameter(const struct job *j)
{
    struct ht_range *r = j->range;
    struct ht_param *p = r->param;
    struct ht_waiter *chain = NULL;
    bool staged = false;

    for (unsigned i = 1; i < j->sum_at; i++)
        staged |= j->pin.chunk[i].staged;
    if (j->err || !(j->work & HT_WORK_UPDATE) || j->pin.chunk[0].staged || !staged)
        return;
    lock(p->o);
    r->shown = true;
    p->shown++;
    ht_opt_take_waiters(p, &chain);
    notify_changed(p->o);
    unlock(p->o);
    ht_opt_wake(chain);
}

static void run_job(struct job *j)
{
    if (!j->err)
        j->err = is_complete(j) ? ht_fault(HT_FAULT_OPTIM_UPDATE) : -EINVAL;
    if (!j->err && j->work & HT_WORK_ADD)
        add_gradient_to_sum(j);
    if (!j->err && j->work & HT_WORK_MEASURE)
        measure_range(j);
    if (!j->err && j->work & HT_WORK_MOMENTUM)
        stir_range(j);
    if (!j->err && j->work & HT_WORK_UPDATE)
        update_range(j);
    ht_batch_pin_end(&j->pin, j->err ? 0 : changed_mask(j));
    show_parameter(j);
    int rc = ht_batch_pin_finish(&j->pin);
    if (rc && !j->err)
        j->err = rc;
    j->begun = false;
}

/* -------------------------------------------------------------------- end */

static void count_job(const struct job *j, uint64_t ns) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_root *root = j->range->param->root;

    j->range->param->failed += j->err != 0;
    if (j->err && !root->failure)
        root->failure = j->err;
    root->updated_elements += j->err ? 0 : j->elements;
    root->added_elements += j->err ? 0 : j->added;
    if (!ht_opt_deferred(root) && !j->second) /* else the boundary, or the first phase, has counted them */
        root->nonfinite += j->nonfinite;
    root->update_ns += ns;
}

/* Was this the addition of a whole gradient, whose bytes are not needed any more? */
static bool adds_whole(const struct job *j) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_range *r = j->range;

    return (j->work & HT_WORK_ADD) && ht_interval_set_cover(&r->frozen, 0, ht_opt_range_grad_bytes(r->param, r->index));
}

/*
 * Ends a job without an error: sets the range's new state, and drops unneeded bytes. Releases the lock in
 * between.
 */
static void settle_range(const struct job *j) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_range *r = j->range;

    if ((j->work & HT_WORK_MEASURE) && !adds_whole(j)) {
        r->part_added |= (j->work & HT_WORK_ADD) && r->frozen.count;
        r->state = HT_RANGE_IDLE;
        r->work = 0;
        return;
    }
    if (j->work & HT_WORK_MOMENTUM) {
        ht_opt_ortho_stirred(r);
        return;
    }
    bool updated = j->work & HT_WORK_UPDATE;
    r->state = HT_RANGE_DONE;
    r->updates += updated; /* with the state, before the lock is released: a reader compares it with what it saw */
    ht_opt_range_drop(r);
    if (updated)
        ht_opt_sum_drop(r);
    else
        ht_opt_range_added(r);
}

/*
 * The same, if only the addition has run, and a part of the work is left: the sum is to be logged, and maybe applied.
 * Releases the lock in between. False: nothing is left.
 */
static bool settle_sum(const struct job *j) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_range *r = j->range;
    unsigned left = r->work & ~j->work;

    if (!(r->work & HT_WORK_LOG) || r->param->gone)
        return false;
    if (adds_whole(j)) {
        r->state = HT_RANGE_DONE;
        ht_opt_range_drop(r);
        ht_opt_range_added(r);
    } else {
        r->part_added |= r->frozen.count > 0;
    }
    r->work = (uint8_t)left;
    ht_opt_range_requeue(r);
    return true;
}

/*
 * Reports the failure. True: it is none yet. Squares are summed ahead of the boundary to save time there. If that
 * fails, the boundary tries it again, and only then it is a failure of the step.
 */
static bool end_failed(const struct job *j)
{
    const struct ht_param *p = j->range->param;
    uint64_t at = (uint64_t)j->range->index * p->shape.chunk_bytes;

    lock(p->o);
    bool again = j->work == HT_WORK_MEASURE && (!p->root->draining || p->root->hold);
    unlock(p->o);
    if (!again)
        ht_opt_refuse(p->root, HT_EVENT_UPDATE_FAILED, p->oid,
                      "update of bytes from %llu failed: %s; abort returns to the last commit", (ull)at,
                      j->err == -EINVAL ? "the file was truncated" : strerror(-j->err));
    return again;
}

static void trace_job(const struct job *j)
{
    const struct ht_param *p = j->range->param;

    if (j->work & HT_WORK_UPDATE && !j->err)
        ht_trace_end(ht_store_trace(p->o->store), &j->mark, HT_TRACE_UPDATE, p->oid,
                     (uint64_t)j->range->index * p->shape.chunk_bytes,
                     (uint64_t)ht_opt_range_elements(&p->shape, j->range->index) *
                         (p->shape.chunk_bytes / p->shape.range_elements));
}

/*
 * The range is applied or failed: wakes every waiter. Caches need no second invalidation: the one from when the range
 * became pending runs after that. Every read since then was parked until here, so a cache holds new bytes once it has
 * run. (Tried: invalidating again here drops pages before their reader has copied them out, and the reader then reads
 * the same bytes twice.)
 */
static void end_job(struct job *j, uint64_t ns)
{
    struct ht_range *r = j->range;
    struct ht_param *p = r->param;
    struct ht_optim *o = p->o;

    bool again = j->err && end_failed(j);
    lock(o);
    if (!j->err && (j->work & HT_WORK_MEASURE)) {
        r->measured = true;
        r->nonfinite = (uint32_t)j->nonfinite;
    }
    if (!j->err && settle_sum(j)) {
        count_job(j, ns);
        ht_opt_range_ran(p->root);
        j->range = NULL;
        notify_changed(o);
        unlock(o);
        return;
    }
    p->shown -= r->shown;
    r->shown = false;
    if (again) {
        r->state = HT_RANGE_IDLE;
        r->work = 0;
        assert(!r->measured);
    } else {
        count_job(j, ns);
        if (j->err)
            r->state = HT_RANGE_FAILED;
        else
            settle_range(j);
    }
    trace_job(j); /* before a waiter goes on */
    ht_opt_range_ended(r, j->work);
    j->range = NULL;
    unlock(o);
}

/* ------------------------------------------------------------------ worker */

static void take_second(struct ht_worker *w, const struct job *now, struct job *j)
{
    lock(w->o);
    j->range = ht_opt_take_range(w, true);
    unlock(w->o);
    if (!j->range)
        return;
    describe_job(j, w);
    if (ht_opt_delta_may_begin(w, now->notes, now->range->param->root, j->range->param->root))
        begin_job(j, true);
}

/* Updates one range, and starts the reads of the next one in between. */
static void update_job(struct ht_worker *w, struct job *now, struct job *next)
{
    uint64_t start = ht_now_ns();

    now->mark = ht_trace_begin();
    if (!now->begun && !now->err)
        begin_job(now, false);
    if (!now->range)
        return;
    if (now->begun && !now->err)
        now->err = ht_batch_pin_wait(&now->pin);
    take_second(w, now, next);
    if (now->begun)
        run_job(now);
    if (!next->begun)
        ht_opt_delta_flush(w);
    end_job(now, ht_now_ns() - start);
}

void *ht_opt_worker_main(void *arg)
{
    struct ht_worker *w = arg;
    struct job job[2] = {{.range = NULL}, {.range = NULL}};
    unsigned at = 0;

    pthread_setname_np(pthread_self(), w->is_spare ? "ht-update-spare" : "ht-update");
    if (w->numa_index != HT_NUMA_INDEX_ANY && !ht_nodes_run_on(ht_store_nodes(w->o->store), w->numa_index))
        w->numa_index = HT_NUMA_INDEX_ANY;
    for (;; at ^= 1) {
        struct job *now = &job[at];
        if (!now->range) {
            now->range = ht_opt_wait_for_range(w);
            if (!now->range) {
                ht_opt_delta_writer_free(w);
                return NULL;
            }
            if ((now->range->work & (HT_WORK_LOG | HT_WORK_ADD)) == HT_WORK_LOG) {
                ht_opt_redo_log(now->range);
                now->range = NULL;
                continue;
            }
            if (now->range->work & HT_WORK_ORTHO) {
                ht_opt_ortho_compute(now->range);
                now->range = NULL;
                continue;
            }
            now->begun = false;
            describe_job(now, w);
        }
        update_job(w, now, &job[at ^ 1]);
    }
}
