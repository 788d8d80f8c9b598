/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grad_flush.c - written bytes become frozen elements, and frozen elements queued ranges.
 *
 * A flush freezes whole elements, from the first to the last byte that its opener wrote since its last one: what others
 * write elsewhere is theirs. An element of which only a part was written is an error of the writer, unless a write that
 * will complete it is in progress: then everything written there since the last flush is dropped.
 */
#include "optim/optim_priv.h"

static const struct ht_opt_window everything = {0, UINT64_MAX};

static uint64_t range_begin(const struct range *r)
{
    return (uint64_t)r->index * r->param->shape.range_elements * r->param->shape.g_bytes;
}

/* The elements that a window touches, as bytes from the start of the range. Empty: none. */
static struct ht_span window_of(const struct range *r, const struct ht_opt_window *w)
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
        !ht_opt_grad_in_flight(p, at, at + p->shape.g_bytes);
}

/* The first torn element of what was written in a window, as a byte offset in the gradient. */
static bool find_torn(const struct param *p, const struct ht_opt_window *w, uint64_t *out_at)
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
static void drop_written(struct param *p, const struct ht_opt_window *w)
{
    ht_list_for_each_safe(pos, next, &p->dirty) {
        struct range *r = ht_list_entry(pos, struct range, dirty);
        struct ht_span in = window_of(r, w);
        if (ht_spans_remove(&r->written, in.begin, in.end))
            ht_spans_clear(&r->written);
        ht_opt_range_count_spans(r);
        if (!r->written.count)
            ht_list_del(&r->dirty);
    }
}

void ht_opt_grad_spoil(struct ht_grad *g)
{
    ht_opt_grad_refresh(g);
    g->spoiled = true;
    drop_written(g->param, &g->mine);
}

/* What a flush is about. g NULL: everybody's. Locked. */
static struct ht_opt_window window_of_flush(struct ht_grad *g)
{
    if (g)
        ht_opt_grad_refresh(g);
    return g ? g->mine : everything;
}

/* Move whole elements of a window from written to frozen; parts of elements that are being completed stay. */
static int freeze_range(struct range *r, const struct ht_opt_window *w)
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
        ht_opt_range_count_spans(r);
        if (ret)
            return ret;
        i += v.begin < begin;
    }
    return 0;
}

/* The first gradient of a step settles what the step computes with. Locked. */
static void latch(struct param *p, const struct ht_optim_config *config)
{
    struct root *root = p->root;

    if (!root->open)
        ht_opt_step_opens(root);
    if (p->has_grad)
        return;
    p->has_grad = true;
    ht_list_add_tail(&root->touched, &p->touched);
    ht_rule_scalars(config, p->cur.t + 1, &p->scalars);
    ht_opt_scale(p);
    p->layout = p->cur.layout;
}

/* Freeze a window, queue what became whole. Locked. Returns a ticket of the invalidation. */
static int freeze(struct param *p, const struct ht_opt_window *w, const struct ht_optim_config *config,
                  uint64_t *out_ticket)
{
    uint64_t first = UINT64_MAX, last = 0;
    int ret = 0;

    latch(p, config);
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
static int judge(struct param *p, const struct ht_grad *g, const struct ht_opt_window *w, uint64_t *out_at)
{
    uint64_t expected = p->shape.elements * p->shape.p_bytes;

    if (p->gone)
        return -ESTALE;
    bool torn = g && find_torn(p, w, out_at); /* of all openers one may be in the middle of an element, which stays */
    if (!torn)
        *out_at = UINT64_MAX;
    if (!torn && !(g && g->spoiled) && ht_obj_size(p->obj) == expected &&
        ht_obj_chunk_bytes(p->obj) == p->shape.chunk_bytes)
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
static int check_rule(struct param *p, const struct ht_opt_window *w, const struct ht_optim_config *config)
{
    struct layout layout = ht_opt_layout(config, p->shape.dtype);

    if (ht_opt_same_rule_state(&layout, &p->cur.layout))
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

/* Locked, let go meanwhile, but not between the window and the end: what is written later is the next flush's. */
static int flush_window(struct param *p, struct ht_grad *g, struct words *words, uint64_t *out_torn,
                        uint64_t *out_ticket)
{
    struct ht_opt_window w;
    struct layout layout;
    int ret;

    for (;;) {
        ret = ht_opt_wait_open(p->root);
        if (ret)
            return ret;
        w = window_of_flush(g);
        if ((ht_list_empty(&p->dirty) || !w.end) && !(g && g->spoiled))
            return 0;
        if (!ht_opt_words_current(p, words)) {
            ht_opt_words_read(p, words);
            continue;
        }
        ret = judge(p, g, &w, out_torn);
        if (!ret && words->error && !p->has_grad) {
            drop_written(p, &w);
            words->refused = true;
            return words->error;
        }
        if (ret || (p->cur.exists && !lacks_sum(p)))
            break;
        layout = ht_opt_layout(&words->config, p->shape.dtype);
        ret = ensure_objects(p, &layout);
        if (ret)
            break;
    }
    if (!ret && !p->has_grad)
        ret = check_rule(p, &w, &words->config);
    if (!ret)
        ret = ht_opt_state_load(p);
    if (!ret && !p->has_grad)
        ret = ht_opt_sum_reserve(p);
    if (!ret)
        ret = freeze(p, &w, &words->config, out_ticket);
    if (!ret)
        ht_opt_succeeded(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid);
    return ret;
}

static int flush_locked(struct param *p, struct ht_grad *g, struct words *words, uint64_t *out_torn)
{
    uint64_t ticket = 0;
    int ret = flush_window(p, g, words, out_torn, &ticket);

    if (g && (!ret || ret == -EINVAL)) {
        g->mine = (struct ht_opt_window){0, 0};
        g->spoiled = false;
    }
    ht_opt_inval_wait(p->o, ticket);
    return ret;
}

/* g: whose gradient; NULL: everybody's. */
static int flush(struct param *p, struct ht_grad *g)
{
    struct ht_optim *o = p->o;
    struct words words = {.read = false};
    uint64_t torn = UINT64_MAX;

    lock(o);
    int ret = flush_locked(p, g, &words, &torn);
    unlock(o);
    if (words.refused)
        ht_opt_refuse(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid, "optimizer: %s; the gradient is not applied",
                      words.why);
    else if (ret)
        tell_flush_error(p, torn, ret);
    return ret;
}

int ht_grad_flush(struct ht_grad *g)
{
    int ret = ht_opt_grad_fill_holes(g);

    return ret ? ret : flush(g->param, g);
}

int ht_optim_apply(struct ht_optim *o, uint64_t root, uint64_t oid)
{
    struct param *p = ht_opt_param_get(o, oid);
    int ret = p && p->root->id == root ? flush(p, NULL) : -ENOENT;

    if (p)
        ht_opt_param_put(p);
    return ret;
}
