/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grad.c - gradients: written as bytes, frozen as elements, queued as ranges.
 *
 * The bytes lie in a scratch object per parameter, made at the first open and kept. What of them counts is known by two
 * sets per range: written (since the last flush) and frozen (belongs to the open step). A write takes its
 * bytes out of written while it copies, so a concurrent flush of another opener never freezes bytes in flux.
 *
 * A flush freezes whole elements, from the first to the last byte that its opener wrote since its last one: what others
 * write elsewhere is theirs. An element of which only a part was written is an error of the writer, unless a write that
 * will complete it is in progress: then everything written there since the last flush is dropped.
 */
#include "optim/optim_priv.h"

#include <stdlib.h>
#include "tiering/base/log.h"

/* Bytes of a gradient. */
struct window {
    uint64_t begin, end;
};
static const struct window everything = {0, UINT64_MAX};

struct ht_grad {
    struct param *param;
    struct window mine; /* from the first to the last byte written since the last flush; end 0: none */
    uint64_t writes;
};

/* -------------------------------------------------------------------- open */

static bool same_shape(const struct shape *a, const struct shape *b)
{
    return a->elements == b->elements && a->chunk_bytes == b->chunk_bytes && a->dtype == b->dtype &&
        a->grad_dtype == b->grad_dtype;
}

static bool has_coverage(const struct param *p)
{
    return p->has_grad || p->pending || !ht_list_empty(&p->dirty) || !ht_list_empty(&p->inflight);
}

/* May p take this shape? Locked. */
static int check_shape(const struct param *p, const struct shape *shape)
{
    bool same = p->block && same_shape(&p->shape, shape);

    if (p->cur.exists &&
        (p->cur.elements != shape->elements || p->cur.dtype != shape->dtype ||
         p->cur.chunk_bytes != shape->chunk_bytes))
        return -EINVAL;
    return !same && (p->openers || has_coverage(p)) ? -EBUSY : 0;
}

int ht_opt_scratch_create(const struct param *p, uint32_t chunk_bytes, struct ht_obj **out)
{
    struct ht_obj_attr attr = {
        .oid = ht_store_new_id(p->o->store),
        .chunk_bytes = chunk_bytes,
        .obj_class = HT_CLASS_SCRATCH,
    };

    return ht_obj_create(p->o->store, &attr, out);
}

int ht_opt_scratch_delete(const struct param *p, struct ht_obj **obj)
{
    struct ht_tx *tx;
    int ret = ht_tx_begin(p->o->store, 0, &tx);

    if (ret)
        return ret;
    ht_obj_delete(*obj, tx);
    ret = ht_tx_commit(tx, NULL);
    ht_obj_put(*obj);
    *obj = NULL;
    return ret;
}

/* Under the gate, not locked: the gradient's object and the range table for this shape. */
static int build(struct param *p, const struct shape *shape)
{
    int ret = 0;

    /* Its chunks have another size: start with a new one. */
    if (p->grad && ht_obj_chunk_bytes(p->grad) != shape->chunk_bytes)
        ret = ht_opt_scratch_delete(p, &p->grad);
    if (!ret && p->sum && !same_shape(&p->shape, shape))
        ret = ht_opt_scratch_delete(p, &p->sum);
    if (!ret && !p->grad)
        ret = ht_opt_scratch_create(p, shape->chunk_bytes, &p->grad);
    if (!ret)
        ht_obj_scratch_drop(p->grad, 0, UINT64_MAX);
    if (!ret)
        ret = ht_obj_truncate(p->grad, shape->elements * shape->g_bytes);
    lock(p->o);
    if (!ret && (!p->block || !same_shape(&p->shape, shape)))
        ret = ht_opt_ranges_init(p, shape);
    /* After a mount others may have been quicker; then writing the gradient says so. */
    if (!ret && ht_opt_grad_reserve(p))
        ht_opt_not_reserved(p, "no space is reserved for its gradient");
    unlock(p->o);
    return ret;
}

/* Locked: the parameter of an opener, made or revived. */
static int find_or_make(struct root *root, uint64_t oid, struct param **out)
{
    struct param *p = ht_opt_param_find(root->o, oid);

    if (!root->configured)
        return -ENOENT;
    if (!p)
        p = ht_opt_param_make(root, oid);
    if (!p)
        return -ENOMEM;
    if (p->root != root && !p->gone)
        return -EINVAL;
    if (p->root != root) {
        ht_list_del(&p->of_root);
        ht_list_add_tail(&root->params, &p->of_root);
        ht_opt_root_put_locked(p->root);
        p->root = root;
        root->refs++;
    }
    p->gone = false;
    *out = p;
    return 0;
}

/* Locked: count one more opener if nothing has to be built. */
static int try_open(struct param *p, const struct shape *shape, bool *out_done)
{
    int ret = check_shape(p, shape);

    *out_done = !ret && p->block && p->grad && p->obj && same_shape(&p->shape, shape);
    if (*out_done)
        p->openers++;
    return ret;
}

/* Locked, let go meanwhile. p has a reference. */
static int build_and_open(struct param *p, const struct shape *shape)
{
    struct ht_optim *o = p->o;
    bool done = false;
    int ret = ht_opt_gate_enter(p->root);

    if (ret)
        return ret;
    ret = try_open(p, shape, &done);
    if (!ret && !done) {
        if (!p->obj)
            p->obj = ht_obj_get(o->store, p->oid);
        unlock(o);
        ret = p->obj ? build(p, shape) : -ESTALE;
        lock(o);
        if (!ret)
            ret = try_open(p, shape, &done);
    }
    ht_opt_gate_leave(p->root);
    return ret;
}

static int open_param(struct root *root, uint64_t oid, const struct shape *shape, struct param **out)
{
    struct ht_optim *o = root->o;
    struct param *p = NULL;
    bool done = false;

    lock(o);
    int ret = find_or_make(root, oid, &p);
    if (!ret) {
        p->refs++;
        ret = try_open(p, shape, &done);
        if (!ret && !done)
            ret = build_and_open(p, shape);
        if (ret)
            p->refs--;
    }
    unlock(o);
    *out = p;
    return ret;
}

static int open_in_root(struct root *root, const struct ht_param_desc *desc, struct param **out)
{
    uint64_t oid = ht_obj_id(desc->obj), bytes = ht_obj_size(desc->obj);
    struct shape shape;
    int ret = ht_opt_shape_of(&shape, bytes, ht_obj_chunk_bytes(desc->obj), desc->dtype, desc->grad_dtype);

    if (ret && !(ht_kernel_dtype_bytes(desc->dtype) && ht_kernel_dtype_bytes(desc->grad_dtype)))
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid, "parameters and gradients are f32, bf16 or f16");
    else if (ret)
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid, "%llu bytes are no whole number of elements",
                      (unsigned long long)bytes);
    if (ret)
        return ret;
    ret = open_param(root, oid, &shape, out);
    if (ret == -EINVAL)
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid,
                      "has %llu elements now, its optimizer state another count or dtype: reset it first",
                      (unsigned long long)shape.elements);
    else if (ret)
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid, "its gradient cannot be opened: %s", strerror(-ret));
    return ret;
}

int ht_grad_open(struct ht_optim *o, const struct ht_param_desc *desc, struct ht_grad **out)
{
    struct root *root = ht_opt_root_get(o, desc->root);
    struct ht_grad *g = calloc(1, sizeof(*g));
    int ret = !g ? -ENOMEM : !root ? -EINVAL : 0;

    if (!ret)
        ret = open_in_root(root, desc, &g->param);
    if (root)
        ht_opt_root_put(root);
    if (ret)
        free(g);
    else
        *out = g;
    return ret;
}

void ht_grad_release(struct ht_grad *g)
{
    struct param *p = g->param;
    struct ht_optim *o = p->o;

    lock(o);
    p->openers--;
    p->refs--;
    unlock(o);
    free(g);
}

uint64_t ht_grad_size(struct ht_grad *g)
{
    struct ht_optim *o = g->param->o;

    lock(o);
    uint64_t bytes = g->param->shape.elements * g->param->shape.g_bytes;
    unlock(o);
    return bytes;
}

/* ------------------------------------------------------------------- write */

/* The part of gradient bytes [begin, end) that lies in one range. */
struct piece {
    uint64_t index;
    uint32_t begin, end; /* from the start of the range */
};

static struct piece piece_at(const struct param *p, uint64_t begin, uint64_t end)
{
    uint64_t bytes = (uint64_t)p->shape.range_elements * p->shape.g_bytes, index = begin / bytes;

    return (struct piece){
        .index = index,
        .begin = (uint32_t)(begin - index * bytes),
        .end = (uint32_t)ht_min_u64(end - index * bytes, bytes),
    };
}

/* Is any of it frozen? -EAGAIN: not for long. Makes the ranges. Locked. */
static int check_free(struct param *p, uint64_t begin, uint64_t end)
{
    while (begin < end) {
        struct piece at = piece_at(p, begin, end);
        struct range *r = ht_opt_range_make(p, at.index);
        if (!r)
            return -ENOMEM;
        if (ht_spans_overlap(&r->frozen, at.begin, at.end))
            return ht_opt_range_adding(r) ? -EAGAIN : -EBUSY;
        if (ht_opt_range_full(r))
            return -EBUSY;
        begin += at.end - at.begin;
    }
    return 0;
}

static int add_written(struct param *p, uint64_t begin, uint64_t end)
{
    while (begin < end) {
        struct piece at = piece_at(p, begin, end);
        struct range *r = ht_opt_range_find(p, at.index);
        int ret = ht_spans_add(&r->written, at.begin, at.end);
        if (ret)
            return ret;
        if (ht_list_empty(&r->dirty))
            ht_list_add_tail(&p->dirty, &r->dirty);
        begin += at.end - at.begin;
    }
    return 0;
}

static int remove_written(struct param *p, uint64_t begin, uint64_t end)
{
    while (begin < end) {
        struct piece at = piece_at(p, begin, end);
        struct range *r = ht_opt_range_find(p, at.index);
        int ret = ht_spans_remove(&r->written, at.begin, at.end);
        if (ret)
            return ret;
        if (!r->written.count)
            ht_list_del(&r->dirty);
        begin += at.end - at.begin;
    }
    return 0;
}

static bool in_flight(const struct param *p, uint64_t begin, uint64_t end)
{
    ht_list_for_each(pos, &p->inflight) {
        const struct inflight *w = ht_list_entry(pos, struct inflight, link);
        if (w->begin < end && begin < w->end)
            return true;
    }
    return false;
}

/*
 * A writer that is faster than the updates waits for them: its gradients would only push others out of memory, and be written to a
 * device and read again. Workers need nothing from any client, so this ends. Locked, let go meanwhile.
 */
static void wait_backlog(struct ht_optim *o)
{
    while (o->backlog_bytes >= o->backlog_bytes_max && !o->stopping)
        wait_changed(o);
}

/* Locked: wait for our turn and take the bytes out of written. */
static int begin_write(struct param *p, struct inflight *w)
{
    int ret;

    wait_backlog(p->o);
    for (;;) {
        ret = ht_opt_wait_open(p->root);
        if (!ret && p->gone)
            ret = -ESTALE;
        if (!ret && w->end > p->shape.elements * p->shape.g_bytes) {
            p->bad = true;
            ret = -EINVAL;
        }
        if (!ret)
            ret = check_free(p, w->begin, w->end);
        if (!ret && !in_flight(p, w->begin, w->end))
            break;
        if (ret && ret != -EAGAIN)
            return ret;
        wait_changed(p->o);
    }
    ret = remove_written(p, w->begin, w->end);
    if (!ret)
        ht_list_add_tail(&p->inflight, &w->link);
    return ret;
}

/* Locked. */
static void widen(struct ht_grad *g, uint64_t begin, uint64_t end)
{
    if (!g->mine.end)
        g->mine.begin = begin;
    g->mine.begin = ht_min_u64(g->mine.begin, begin);
    g->mine.end = ht_max_u64(g->mine.end, end);
    g->writes++;
}

static ssize_t end_write(struct ht_grad *g, struct inflight *w, ssize_t n)
{
    struct param *p = g->param;

    ht_list_del(&w->link);
    if (n > 0 && !p->gone) {
        int ret = add_written(p, w->begin, w->begin + (uint64_t)n);
        widen(g, w->begin, w->begin + (uint64_t)n);
        p->root->grad_bytes += ret ? 0 : (uint64_t)n;
        n = ret ? ret : n;
    }
    tell_changed(p->o);
    return n;
}

static void tell_write_error(struct param *p, uint64_t off, size_t len, int err)
{
    unsigned long long at = off, count = len;

    if (err == -EINVAL)
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid,
                      "gradient: %llu bytes at %llu reach beyond its end; it is not applied", count, at);
    else if (err == -EBUSY)
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid,
                      "gradient: bytes at %llu (%llu) belong to this step already; end the step first", at, count);
    else if (err == -E2BIG)
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid,
                      "gradient: written in more than %d pieces around byte %llu", HT_SPANS_MAX, at);
    else
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid, "gradient: %llu bytes at %llu: %s", count, at,
                      strerror(-err));
}

ssize_t ht_grad_write(struct ht_grad *g, uint64_t off, const void *buf, size_t len)
{
    struct param *p = g->param;
    struct inflight w = {.begin = off, .end = len > UINT64_MAX - off ? UINT64_MAX : off + len};

    if (!len)
        return 0;
    lock(p->o);
    ssize_t n = begin_write(p, &w);
    unlock(p->o);
    if (!n) {
        n = ht_obj_write(p->grad, off, buf, len);
        lock(p->o);
        n = end_write(g, &w, n);
        unlock(p->o);
    }
    if (n < 0)
        tell_write_error(p, off, len, (int)n);
    return n;
}

struct param *ht_opt_grad_param(const struct ht_grad *g)
{
    return g->param;
}

static int fill_windows(struct param *p, uint64_t bytes, void *window, size_t window_bytes, ht_opt_fill_fn fill,
                        void *ctx)
{
    int ret = 0;

    for (uint64_t off = 0; !ret && off < bytes; off += window_bytes) {
        size_t len = ht_min_u64(window_bytes, bytes - off);
        memset(window, 0, len);
        ret = fill(ctx, off, window, len);
        ssize_t n = ret ? ret : ht_obj_write(p->grad, off, window, len);
        ret = n < 0 ? (int)n : (size_t)n == len ? 0 : -EIO;
    }
    return ret;
}

int ht_opt_grad_make(struct ht_grad *g, void *window, size_t window_bytes, ht_opt_fill_fn fill, void *ctx)
{
    struct param *p = g->param;
    struct inflight w = {.begin = 0, .end = ht_grad_size(g)};

    lock(p->o);
    ssize_t ret = begin_write(p, &w);
    unlock(p->o);
    if (!ret) {
        ret = fill_windows(p, w.end, window, window_bytes, fill, ctx);
        lock(p->o);
        ret = end_write(g, &w, ret ? ret : (ssize_t)w.end);
        unlock(p->o);
    }
    if (ret < 0)
        tell_write_error(p, 0, w.end, (int)ret);
    return ret < 0 ? (int)ret : 0;
}

/* -------------------------------------------------------------------- read */

/* Zero the part of one range that is neither written nor waiting to be applied. buf: its bytes from begin on. */
static void mask_range(const struct range *r, uint32_t begin, uint32_t end, uint8_t *buf)
{
    uint32_t pos = begin;

    while (pos < end) {
        uint32_t stop_w, stop_f;
        uint32_t w = ht_spans_next(&r->written, pos, end, &stop_w);
        uint32_t f = ht_spans_next(&r->frozen, pos, end, &stop_f);
        uint32_t from = w < f ? w : f;
        memset(buf + (pos - begin), 0, from - pos);
        pos = w < f ? stop_w : stop_f;
    }
}

/* buf holds gradient bytes [begin, end). Locked. */
static void mask(struct param *p, uint64_t begin, uint64_t end, uint8_t *buf)
{
    while (begin < end) {
        struct piece at = piece_at(p, begin, end);
        const struct range *r = ht_opt_range_find(p, at.index);
        if (r && r->state != RANGE_DONE)
            mask_range(r, at.begin, at.end, buf);
        else
            memset(buf, 0, at.end - at.begin);
        buf += at.end - at.begin;
        begin += at.end - at.begin;
    }
}

ssize_t ht_grad_read(struct ht_grad *g, uint64_t off, void *buf, size_t len)
{
    struct param *p = g->param;
    ssize_t n = ht_obj_read(p->grad, off, buf, len);

    if (n <= 0)
        return n;
    lock(p->o);
    mask(p, off, off + (uint64_t)n, buf);
    unlock(p->o);
    return n;
}

/* ------------------------------------------------------------------- flush */

static uint64_t range_begin(const struct range *r)
{
    return (uint64_t)r->index * r->param->shape.range_elements * r->param->shape.g_bytes;
}

/* The elements that a window touches, as bytes from the start of the range. Empty: none. */
static struct ht_span window_of(const struct range *r, const struct window *w)
{
    uint64_t size = r->param->shape.g_bytes, base = range_begin(r),
             last = base + ht_opt_range_grad_bytes(r->param, r->index);
    uint64_t begin = ht_max_u64(w->begin / size * size, base), end = ht_min_u64(w->end, last);

    end = (end + size - 1) / size * size;
    return begin < end ? (struct ht_span){(uint32_t)(begin - base), (uint32_t)(end - base)} : (struct ht_span){0, 0};
}

/* Is an element torn at byte pos (from the start of the range), in part of window in, without a write that completes it? */
static bool torn_at(const struct range *r, uint32_t pos, struct ht_span in)
{
    const struct param *p = r->param;
    uint32_t element = pos / p->shape.g_bytes * p->shape.g_bytes;
    uint64_t at = range_begin(r) + element;

    return pos % p->shape.g_bytes && in.begin <= element && element < in.end &&
        !in_flight(p, at, at + p->shape.g_bytes);
}

/* The first torn element of what was written in a window, as a byte offset in the gradient. */
static bool find_torn(const struct param *p, const struct window *w, uint64_t *out_at)
{
    ht_list_for_each(pos, &p->dirty) {
        const struct range *r = ht_list_entry(pos, struct range, dirty);
        const struct ht_span *v = ht_spans_all(&r->written), in = window_of(r, w);
        for (uint32_t i = 0; i < r->written.count; i++) {
            uint32_t at = torn_at(r, v[i].begin, in) ? v[i].begin : v[i].end;
            if (!torn_at(r, at, in))
                continue;
            *out_at = range_begin(r) + at;
            return true;
        }
    }
    return false;
}

/* What a window touches; where a set cannot be cut for want of memory, all of its range. */
static void drop_written(struct param *p, const struct window *w)
{
    ht_list_for_each_safe(pos, next, &p->dirty) {
        struct range *r = ht_list_entry(pos, struct range, dirty);
        struct ht_span in = window_of(r, w);
        if (ht_spans_remove(&r->written, in.begin, in.end))
            ht_spans_clear(&r->written);
        if (!r->written.count)
            ht_list_del(&r->dirty);
    }
    p->bad = false;
}

/* Move whole elements of a window from written to frozen; parts of elements that are being completed stay. */
static int freeze_range(struct range *r, const struct window *w)
{
    uint32_t size = r->param->shape.g_bytes;
    struct ht_span in = window_of(r, w);

    for (uint32_t i = 0; i < r->written.count;) {
        struct ht_span v = ht_spans_all(&r->written)[i];
        uint32_t begin = (v.begin + size - 1) / size * size, end = v.end / size * size;
        begin = begin > in.begin ? begin : in.begin;
        end = end < in.end ? end : in.end;
        if (begin >= end) {
            i++;
            continue;
        }
        /* In this order bytes are never in both, whatever fails. */
        int ret = ht_spans_remove(&r->written, begin, end);
        if (!ret)
            ret = ht_spans_add(&r->frozen, begin, end);
        if (ret)
            return ret;
        i += v.begin < begin;
    }
    return 0;
}

/* What the open step computes with, or the next one will. Locked. */
static const struct ht_optim_config *config_of_step(const struct param *p, const struct ht_optim_config *override)
{
    const struct root *root = p->root;

    return override ? override : root->open ? &root->latched : &root->config;
}

/* The first gradient of a step settles what the step computes with. Locked. */
static void latch(struct param *p, const struct ht_optim_config *override)
{
    struct root *root = p->root;

    if (!root->open) {
        root->open = true;
        root->latched = root->config;
    }
    if (p->has_grad)
        return;
    const struct ht_optim_config *c = config_of_step(p, override);
    p->has_grad = true;
    ht_list_add_tail(&root->touched, &p->touched);
    ht_rule_scalars(c, p->cur.t + 1, &p->scalars);
    ht_opt_scale(p);
    p->layout = p->cur.layout;
}

/* Freeze a window, queue what became whole. Locked. Returns a ticket of the invalidation. */
static int freeze(struct param *p, const struct window *w, const struct ht_optim_config *override, uint64_t *out_ticket)
{
    uint64_t first = UINT64_MAX, last = 0;
    int ret = 0;

    latch(p, override);
    bool deferred = ht_opt_deferred(p->root);
    ht_list_for_each_safe(pos, next, &p->dirty) {
        struct range *r = ht_list_entry(pos, struct range, dirty);
        int err = freeze_range(r, w);
        ret = ret ? ret : err;
        if (!r->written.count)
            ht_list_del(&r->dirty);
        if (r->state != RANGE_IDLE || !ht_spans_cover(&r->frozen, 0, ht_opt_range_grad_bytes(p, r->index)))
            continue;
        bool whole = r->added + 1 == p->root->latched.accumulate, update = whole && !deferred;
        unsigned work = (update ? WORK_UPDATE : 0u) | (p->root->latched.accumulate > 1 ? WORK_ADD : 0u);
        p->complete += whole;
        if (work)
            ht_opt_range_queue(r, work);
        if (!update)
            continue;
        first = ht_min_u64(first, r->index);
        last = ht_max_u64(last, r->index);
    }
    if (first <= last)
        *out_ticket = ht_opt_inval(p, first, last);
    return ret;
}

/* What is wrong with what was written? Drops it then. Locked. */
static int judge(struct param *p, const struct window *w, uint64_t *out_at)
{
    uint64_t expected = p->shape.elements * p->shape.p_bytes;

    if (p->gone)
        return -ESTALE;
    bool torn = find_torn(p, w, out_at);
    if (!torn)
        *out_at = UINT64_MAX;
    if (!torn && !p->bad && ht_obj_size(p->obj) == expected && ht_obj_chunk_bytes(p->obj) == p->shape.chunk_bytes)
        return 0;
    drop_written(p, w);
    return -EINVAL;
}

static void tell_flush_error(struct param *p, uint64_t torn, int err)
{
    if (err == -EINVAL && torn != UINT64_MAX)
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid,
                      "gradient: ends inside an element at byte %llu; it is not applied", (unsigned long long)torn);
    else if (err == -EINVAL)
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid,
                      "gradient: is not as long as the parameter (%llu bytes); it is not applied",
                      (unsigned long long)(p->shape.elements * p->shape.g_bytes));
    else if (err == -EBUSY)
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid,
                      "gradient: its state is that of another rule; reset it first");
    else if (err == -ENOSPC)
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid,
                      "no space for its optimizer state, sums and one rewrite; the gradient is not applied");
    else
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid, "gradient: %s; it is not applied", strerror(-err));
}

/* State of another rule is no use to this one: nothing is applied until it is reset. Locked. */
static int check_rule(struct param *p, const struct window *w, const struct ht_optim_config *override)
{
    struct layout layout = ht_opt_layout(config_of_step(p, override), p->shape.dtype);

    if (ht_opt_same_layout(&layout, &p->cur.layout))
        return 0;
    drop_written(p, w);
    return -EBUSY;
}

static bool lacks_sum(const struct param *p)
{
    return !p->sum && ht_opt_accumulate(p->root) > 1;
}

/* Locked, let go meanwhile. Another flush may be quicker: then there is nothing to do. */
static int ensure_objects(struct param *p, const struct layout *layout)
{
    int ret = ht_opt_gate_enter(p->root);

    if (ret)
        return ret;
    bool state = !p->gone && !p->cur.exists, sum = !p->gone && lacks_sum(p);
    unlock(p->o);
    if (state)
        ret = ht_opt_state_create(p, layout);
    if (!ret && sum)
        ret = ht_opt_sum_create(p);
    lock(p->o);
    ht_opt_gate_leave(p->root);
    return ret;
}

static int flush_locked(struct param *p, const struct window *w, const struct ht_optim_config *override,
                        uint64_t *out_torn)
{
    uint64_t ticket = 0;
    struct layout layout;
    int ret;

    for (;;) {
        ret = ht_opt_wait_open(p->root);
        if (ret)
            return ret;
        if ((ht_list_empty(&p->dirty) || !w->end) && !p->bad)
            return 0;
        ret = judge(p, w, out_torn);
        if (ret || (p->cur.exists && !lacks_sum(p)))
            break;
        layout = ht_opt_layout(config_of_step(p, override), p->shape.dtype);
        ret = ensure_objects(p, &layout);
        if (ret)
            break;
    }
    if (!ret && !p->has_grad)
        ret = check_rule(p, w, override);
    if (!ret)
        ret = ht_opt_state_load(p);
    if (!ret && !p->has_grad)
        ret = ht_opt_sum_reserve(p);
    if (!ret)
        ret = freeze(p, w, override, &ticket);
    ht_opt_inval_wait(p->o, ticket);
    return ret;
}

/* g: whose gradient; NULL: everybody's. */
static int flush(struct param *p, struct ht_grad *g)
{
    struct ht_optim *o = p->o;
    struct ht_optim_config config;
    bool own = o->hooks.override && o->hooks.override(o->hooks.ctx, p->oid, &config);
    uint64_t torn = UINT64_MAX;

    lock(o);
    struct window w = g ? g->mine : everything;
    uint64_t writes = g ? g->writes : 0;
    int ret = flush_locked(p, &w, own ? &config : NULL, &torn);
    if (g && (!ret || ret == -EINVAL) && g->writes == writes) /* none meanwhile */
        g->mine = (struct window){0, 0};
    unlock(o);
    if (ret)
        tell_flush_error(p, torn, ret);
    return ret;
}

int ht_grad_flush(struct ht_grad *g)
{
    return flush(g->param, g);
}

int ht_optim_apply(struct ht_optim *o, uint64_t root, uint64_t oid)
{
    struct param *p = ht_opt_param_get(o, oid);
    int ret = p && p->root->id == root ? flush(p, NULL) : -ENOENT;

    if (p)
        ht_opt_param_put(p);
    return ret;
}
