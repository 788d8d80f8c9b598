/* SPDX-License-Identifier: Apache-2.0 */
/*
 * update.c - workers: a range's parameter, state and gradient under one lease, one pass of the kernel.
 *
 * A worker keeps two leases going: while it computes on one, the reads of the next are in flight. The second is taken only
 * when its buffers are free at once, and only for ranges that share no chunk with others: a worker that holds chunks
 * never waits for chunks that another worker may hold.
 *
 * A range is applied wholly or not at all: until the kernel runs nothing is marked changed. When the write of a changed
 * chunk fails the store remembers that its content is lost, and the root can only be aborted.
 *
 * Nothing here allocates.
 */
#include "optim/optim_priv.h"

#include "tiering/base/fault.h"

struct job {
    struct range *range; /* NULL: free */
    struct ht_lease lease;
    bool begun, measure; /* measure: sum the gradient, change nothing */
    int err;
    uint64_t elements, nonfinite;
    /* places in lease.chunk */
    unsigned state_at[STATES_MAX], state_chunks, grad_at, grad_chunks;
    uint64_t grad_first;
};

/* ------------------------------------------------------------------- lease */

static unsigned add_chunk(struct ht_lease *l, struct ht_obj *obj, uint64_t index, enum ht_lease_mode mode)
{
    l->chunk[l->count] = (struct ht_lease_chunk){.obj = obj, .index = index, .mode = mode};
    return l->count++;
}

static uint64_t grad_begin(const struct range *r)
{
    return (uint64_t)r->index * r->param->shape.range_elements * r->param->shape.g_bytes;
}

/* Name all chunks of the range: the parameter's first, then state by state, then the gradient's. */
static void describe(struct job *j, struct ht_optim *o, struct ht_ring *ring)
{
    const struct range *r = j->range;
    const struct param *p = r->param;
    uint64_t chunk = p->shape.chunk_bytes, per_range = 4 / p->shape.p_bytes;
    uint64_t begin = grad_begin(r), end = begin + ht_opt_range_grad_bytes(p, r->index);

    j->lease = (struct ht_lease){.store = o->store, .ring = ring};
    j->measure = p->root->measuring; /* as long as a range is queued or running */
    j->err = 0;
    j->elements = j->nonfinite = 0;
    if (!j->measure)
        add_chunk(&j->lease, p->obj, r->index, HT_LEASE_UPDATE);
    j->state_chunks = (unsigned)ht_div_up((uint64_t)ht_opt_range_elements(p, r->index) * 4, chunk);
    for (unsigned s = 0; !j->measure && s < p->layout.count; s++) {
        j->state_at[s] = j->lease.count;
        for (unsigned i = 0; i < j->state_chunks; i++)
            add_chunk(&j->lease, p->state[s], r->index * per_range + i, HT_LEASE_UPDATE);
    }
    j->grad_at = j->lease.count;
    j->grad_first = begin / chunk;
    j->grad_chunks = (unsigned)(ht_div_up(end, chunk) - j->grad_first);
    for (unsigned i = 0; i < j->grad_chunks; i++)
        add_chunk(&j->lease, p->grad, j->grad_first + i, HT_LEASE_READ);
}

static void begin(struct job *j, bool second)
{
    j->lease.nowait = second;
    int ret = ht_lease_begin(&j->lease);
    j->begun = !ret;
    if (ret && !(second && ret == -EAGAIN))
        j->err = ret;
}

/* Is everything still as long as when the gradient was frozen? A truncate may have come between. */
static bool complete(const struct job *j)
{
    const struct range *r = j->range;
    const struct param *p = r->param;
    uint64_t elements = ht_opt_range_elements(p, r->index);
    uint64_t grad_end = grad_begin(r) + ht_opt_range_grad_bytes(p, r->index), bytes = 0;

    if (!j->measure &&
        (ht_obj_chunk_bytes(p->obj) != p->shape.chunk_bytes || j->lease.chunk[0].len < elements * p->shape.p_bytes))
        return false;
    for (unsigned s = 0; !j->measure && s < p->layout.count; s++) {
        bytes = 0;
        for (unsigned i = 0; i < j->state_chunks; i++)
            bytes += j->lease.chunk[j->state_at[s] + i].len;
        if (bytes < elements * 4)
            return false;
    }
    bytes = j->grad_first * p->shape.chunk_bytes;
    for (unsigned i = 0; i < j->grad_chunks; i++)
        bytes += j->lease.chunk[j->grad_at + i].len;
    return bytes >= grad_end;
}

/* ----------------------------------------------------------------- compute */

/* The longest run from element e on that is contiguous in every array, and its addresses. */
static uint64_t run_at(const struct job *j, uint64_t e, uint64_t end, struct ht_update *out)
{
    const struct shape *shape = &j->range->param->shape;
    const struct layout *layout = &j->range->param->layout;
    const struct ht_lease_chunk *chunk = j->lease.chunk;
    uint64_t per_chunk = shape->chunk_bytes / 4, c = e / per_chunk, at = e % per_chunk;
    uint64_t grad = grad_begin(j->range) + e * shape->g_bytes;
    uint64_t grad_chunk = grad / shape->chunk_bytes, grad_at = grad % shape->chunk_bytes;
    uint64_t n = ht_min_u64(end - e, per_chunk - at);

    *out = (struct ht_update){
        .p = chunk[0].data + e * shape->p_bytes,
        .g = chunk[j->grad_at + (grad_chunk - j->grad_first)].data + grad_at,
        .p_dtype = shape->dtype,
        .g_dtype = shape->grad_dtype,
    };
    for (unsigned s = 0; s < layout->count; s++) {
        float *state = (float *)(void *)chunk[j->state_at[s] + c].data + at;
        if (layout->kind[s] == HT_STATE_MASTER)
            out->master = state;
        else
            out->state[s] = state;
    }
    return ht_min_u64(n, (shape->chunk_bytes - grad_at) / shape->g_bytes);
}

static void compute(struct job *j)
{
    const struct range *r = j->range;
    const struct param *p = r->param;
    const struct ht_span *v = ht_spans_all(&r->frozen);
    ht_kernel_fn kernel = p->o->kernels->fn[p->scalars.kernel];

    for (uint32_t i = 0; i < r->frozen.count; i++) {
        uint64_t e = v[i].begin / p->shape.g_bytes, end = v[i].end / p->shape.g_bytes;
        j->elements += end - e;
        while (e < end) {
            struct ht_update arrays;
            uint64_t n = run_at(j, e, end, &arrays);
            j->nonfinite += kernel(&p->scalars, &arrays, n);
            e += n;
        }
    }
}

/* The elements from e on that lie in one block and one chunk of the gradient. */
static uint64_t sum_at(struct job *j, uint64_t e, uint64_t end)
{
    const struct param *p = j->range->param;
    uint64_t at = (uint64_t)j->range->index * p->shape.range_elements + e;
    uint64_t byte = at * p->shape.g_bytes, in_chunk = byte % p->shape.chunk_bytes;
    uint64_t n = ht_min_u64(end - e, (p->shape.chunk_bytes - in_chunk) / p->shape.g_bytes);
    const uint8_t *g = j->lease.chunk[j->grad_at + (byte / p->shape.chunk_bytes - j->grad_first)].data + in_chunk;

    n = ht_min_u64(n, HT_SUM_BLOCK - at % HT_SUM_BLOCK);
    p->sums[at / HT_SUM_SPAN] += p->o->kernels->sum_squares(g, p->shape.grad_dtype, n, &j->nonfinite);
    return n;
}

static void measure(struct job *j)
{
    const struct range *r = j->range;
    const struct ht_span *v = ht_spans_all(&r->frozen);
    uint32_t size = r->param->shape.g_bytes;

    for (uint32_t i = 0; i < r->frozen.count; i++) {
        for (uint64_t e = v[i].begin / size; e < v[i].end / size;)
            e += sum_at(j, e, v[i].end / size);
    }
}

/* Bits of all chunks but the gradient's. */
static uint32_t changed_mask(const struct job *j)
{
    return (1u << j->grad_at) - 1;
}

static void run(struct job *j)
{
    int ret;

    if (!j->err)
        j->err = complete(j) ? ht_fault("optim.update") : -EINVAL;
    if (!j->err && j->measure)
        measure(j);
    else if (!j->err)
        compute(j);
    ht_lease_end(&j->lease, j->err ? 0 : changed_mask(j));
    ret = ht_lease_finish(&j->lease);
    if (ret && !j->err)
        j->err = ret;
    j->begun = false;
}

/* -------------------------------------------------------------------- end */

static void tell_failure(const struct job *j)
{
    const struct range *r = j->range;
    const struct param *p = r->param;
    uint64_t at = (uint64_t)r->index * p->shape.chunk_bytes;

    ht_opt_refuse(p->root, HT_EVENT_UPDATE_FAILED, p->oid,
                  "update of bytes from %llu failed: %s; abort returns to the last commit", (unsigned long long)at,
                  j->err == -EINVAL ? "the file was truncated" : strerror(-j->err));
}

/*
 * The range is applied or failed: tell everybody who waits. Caches need no second invalidation: the one that was asked for
 * when the range became pending runs after that, and every read since then was parked until here, so what a cache holds once it
 * has run is new. (Tried: invalidating again here drops pages before their reader has copied them out, who then
 * reads the same bytes twice.)
 */
static void end(struct job *j, uint64_t ns)
{
    struct range *r = j->range;
    struct param *p = r->param;
    struct root *root = p->root;
    struct ht_optim *o = p->o;
    struct ht_waiter *chain = NULL;

    if (j->err)
        tell_failure(j);
    lock(o);
    r->state = j->err ? RANGE_FAILED : j->measure ? RANGE_IDLE : RANGE_DONE;
    p->failed += j->err != 0;
    if (j->err && !root->failure)
        root->failure = j->err;
    root->updated_elements += j->err ? 0 : j->elements;
    if (j->measure)
        root->step_nonfinite += j->nonfinite;
    if (j->measure || !ht_opt_deferred(root)) /* counted once */
        root->nonfinite += j->nonfinite;
    root->update_ns += ns;
    if (!j->err && !j->measure)
        ht_opt_range_drop(r);
    p->pending--;
    root->pending--;
    ht_opt_take_waiters(p, &chain);
    unlock(o);
    ht_opt_wake(chain);
    lock(o);
    root->running--;
    ht_opt_param_settle(p);
    p->refs--;
    j->range = NULL;
    tell_changed(o);
    unlock(o);
}

/* ------------------------------------------------------------------ worker */

/* The next range of the next root, in turn. Locked. */
static struct range *take(struct ht_optim *o, bool second)
{
    if (ht_list_empty(&o->ready) || o->stopping)
        return NULL;
    struct root *root = ht_list_entry(o->ready.next, struct root, ready);
    struct range *r = ht_list_entry(root->queue.next, struct range, queue);
    if (second && ht_opt_ranges_share(r->param))
        return NULL;
    ht_list_del(&r->queue);
    r->state = RANGE_RUNNING;
    root->running++;
    ht_list_del(&root->ready);
    ht_opt_root_ready(root);
    return r;
}

static struct range *wait_for_range(struct ht_optim *o)
{
    struct range *r = NULL;

    lock(o);
    while (!o->stopping && !(r = take(o, false)))
        ht_cond_wait(&o->work, &o->lock);
    unlock(o);
    return r;
}

static void take_second(struct worker *w, struct job *j)
{
    lock(w->o);
    j->range = take(w->o, true);
    unlock(w->o);
    if (!j->range)
        return;
    describe(j, w->o, w->ring);
    begin(j, true);
}

/* One range, with the next one's reads started on the way. */
static void update(struct worker *w, struct job *now, struct job *next)
{
    uint64_t start = ht_now_ns();

    if (!now->begun && !now->err)
        begin(now, false);
    if (now->begun && !now->err)
        now->err = ht_lease_wait(&now->lease);
    take_second(w, next);
    if (now->begun)
        run(now);
    end(now, ht_now_ns() - start);
}

void *ht_opt_worker_main(void *arg)
{
    struct worker *w = arg;
    struct job job[2] = {{.range = NULL}, {.range = NULL}};
    unsigned at = 0;

    for (;; at ^= 1) {
        struct job *now = &job[at];
        if (!now->range) {
            now->range = wait_for_range(w->o);
            if (!now->range)
                return NULL;
            now->begun = false;
            describe(now, w->o, w->ring);
        }
        update(w, now, &job[at ^ 1]);
    }
}
