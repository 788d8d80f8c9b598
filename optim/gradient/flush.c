/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flush.c - written bytes become frozen elements, and frozen elements queued ranges.
 *
 * A flush freezes whole elements, from the first to the last byte that its opener wrote since its last one. Bytes of
 * other openers elsewhere stay theirs, and so do those between that are of no range of the opener's part: the parts of
 * several ranks interleave. An element of which only a part was written is an error of the writer, unless a
 * write that will complete it is in progress: then everything written there since the last flush is dropped.
 */
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/gradient/gradient_priv.h"

/* The elements that a window touches, as bytes from the start of the range. Empty: none. */
static struct ht_interval window_of(const struct ht_range *r, const struct ht_opt_window *w)
{
    uint64_t size = r->param->shape.g_bytes, base = ht_opt_range_grad_begin(r),
             last = base + ht_opt_range_grad_bytes(r->param, r->index);
    uint64_t begin = ht_max_u64(w->begin / size * size, base), end = ht_min_u64(w->end, last);

    if (w->has && !w->has(w->ctx, base))
        return (struct ht_interval){0, 0};
    end = ht_round_up(end, size);
    return begin < end ? (struct ht_interval){(uint32_t)(begin - base), (uint32_t)(end - base)}
                       : (struct ht_interval){0, 0};
}

/*
 * Is an element torn at byte pos (from the start of the range), in part of window in, without
 * a write that completes it?
 */
static bool torn_at(const struct ht_range *r, uint32_t pos, struct ht_interval in) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param *p = r->param;
    uint32_t element = pos / p->shape.g_bytes * p->shape.g_bytes;
    uint64_t at = ht_opt_range_grad_begin(r) + element;

    return pos % p->shape.g_bytes && in.begin <= element && element < in.end &&
        !ht_opt_in_flight(p, at, at + p->shape.g_bytes);
}

/* The first torn element among the bytes written in a window, as a byte offset in the gradient. */
static bool find_torn(const struct ht_param *p, const struct ht_opt_window *w, uint64_t *out_at)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(r, &p->dirty, const struct ht_range, dirty) {
        const struct ht_interval *v = ht_interval_set_all(&r->written), in = window_of(r, w);
        for (uint32_t i = 0; i < r->written.count; i++) {
            uint32_t at = torn_at(r, v[i].begin, in) ? v[i].begin : v[i].end;
            if (!torn_at(r, at, in))
                continue;
            *out_at = ht_opt_range_grad_begin(r) + at;
            return true;
        }
    }
    return false;
}

/* Drops the bytes in a window; if a set cannot be cut for want of memory, its whole range. */
static void drop_written(struct ht_param *p, const struct ht_opt_window *w) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry_safe(r, &p->dirty, struct ht_range, dirty) {
        struct ht_interval in = window_of(r, w);
        if (ht_interval_set_remove(&r->written, in.begin, in.end))
            ht_interval_set_clear(&r->written);
        ht_opt_range_count_intervals(r);
        if (!r->written.count)
            ht_list_del(&r->dirty);
    }
}

static void drop_mine(struct ht_grad *g) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (g->account.o)
        ht_opt_account_drop(&g->account, g->param);
    else
        drop_written(g->param, &g->mine);
}

void ht_opt_grad_spoil(struct ht_grad *g)
{
    ht_opt_grad_refresh(g);
    g->spoiled = true;
    drop_mine(g);
}

void ht_grad_refuse(struct ht_grad *g)
{
    lock(g->param->o);
    ht_opt_grad_spoil(g);
    unlock(g->param->o);
}

/* Moves whole elements of a window from written to frozen; parts of elements that are being completed stay. */
static int freeze_range(struct ht_range *r, const struct ht_opt_window *w) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint32_t size = r->param->shape.g_bytes;
    struct ht_interval in = window_of(r, w);

    for (uint32_t i = 0; i < r->written.count;) {
        struct ht_interval v = ht_interval_set_all(&r->written)[i];
        uint32_t begin = (v.begin + size - 1) / size * size, end = v.end / size * size;
        begin = begin > in.begin ? begin : in.begin;
        end = end < in.end ? end : in.end;
        if (begin >= end) {
            i++;
            continue;
        }
        /* In this order bytes are never in both, whatever fails. */
        int rc = ht_interval_set_remove(&r->written, begin, end);
        if (!rc)
            rc = ht_interval_set_add(&r->frozen, begin, end);
        r->measured = false;
        ht_opt_range_count_intervals(r);
        if (rc)
            return rc;
        i += v.begin < begin;
    }
    return 0;
}

/* The first gradient of a step fixes the step's hyper-parameters. */
static void latch_numbers(struct ht_param *p, const struct ht_words *words) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_root *root = p->root;

    if (!root->open)
        ht_opt_step_opens(root);
    if (p->has_grad)
        return;
    p->has_grad = true;
    ht_list_add_tail(&root->touched, &p->touched);
    p->t = p->cur.t + 1;
    ht_rule_scalars(&words->config, p->t, &p->scalars);
    if (root->decided) {
        p->scalars = p->decided_scalars;
        if (p->sections)
            p->sections->count = p->sections->decided;
    } else {
        ht_opt_sections_latch(p, &words->sections);
        ht_opt_set_grad_factor(p, (float)(1.0 / ht_opt_divisor(root)));
    }
    if (ht_opt_in_phases(p)) {
        p->ortho->config = words->config;
        p->ortho->config.ns_store &= !root->decided;
    }
    p->layout = p->cur.layout;
    if (ht_opt_deferred(root))
        (void)!ht_opt_squares_make(p); /* without memory the boundary computes them */
}

/* What a worker does at once with a range that is covered wholly; 0: it waits for the boundary. */
static unsigned work_of_whole(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param *p = r->param;
    bool last = r->added + 1 == p->root->latched.accumulate;
    unsigned work = p->root->latched.accumulate > 1 ? HT_WORK_ADD : 0u;

    if (last && !ht_opt_deferred(p->root))
        work |= ht_opt_in_phases(p) ? HT_WORK_MOMENTUM : HT_WORK_UPDATE;
    else if (last && p->squares)
        work |= HT_WORK_MEASURE;
    return work;
}

/* Freezes a window, queues complete ranges. Returns a ticket of the invalidation. */
static int freeze_window(struct ht_param *p, const struct ht_opt_window *w, const struct ht_words *words,
                         uint64_t *out_ticket) HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc = 0;

    latch_numbers(p, words);
    ht_list_for_each_entry_safe(r, &p->dirty, struct ht_range, dirty) {
        int err = freeze_range(r, w);
        rc = rc ? rc : err;
        if (!r->written.count)
            ht_list_del(&r->dirty);
        if (r->state != HT_RANGE_IDLE || !ht_interval_set_cover(&r->frozen, 0, ht_opt_range_grad_bytes(p, r->index)))
            continue;
        unsigned work = work_of_whole(r);
        p->complete += r->added + 1 == p->root->latched.accumulate;
        if (work)
            ht_opt_range_queue(r, work);
        if (ht_opt_range_hidden(r)) /* else a client orthogonalises, or the boundary decides */
            *out_ticket = ht_opt_inval_range(r);
    }
    return rc;
}

/* Checks the written bytes. *out_at: where an element is torn. */
static int validate_written(const struct ht_param *p, const struct ht_grad *g, const struct ht_opt_window *w,
                            uint64_t *out_at) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t expected = p->shape.elements * p->shape.p_bytes;

    *out_at = UINT64_MAX;
    if (g && find_torn(p, w, out_at)) /* any opener may be in the middle of an element, which stays */
        return -EINVAL;
    return (g && g->spoiled) || ht_obj_size(p->obj) != expected || ht_obj_chunk_bytes(p->obj) != p->shape.chunk_bytes
        ? -EINVAL
        : 0;
}

/* Are there numbers for the first gradient of a step? Before it makes state. */
static int check_numbers(const struct ht_param *p, struct ht_words *words) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->has_grad)
        return 0;
    if (p->root->decided)
        return ht_opt_is_decided(p) ? 0 : -EPERM;
    if (!words->error)
        words->error = ht_opt_sections_check(p, &words->sections, words->why);
    if (!words->error)
        words->error = ht_opt_blocks_check(p, &words->config, words->why);
    words->refused = words->error != 0;
    return words->error;
}

/* State of another rule is no use to this one: nothing is applied until it is reset. */
static int check_rule(const struct ht_param *p, const struct ht_optim_config *config) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->has_grad || p->root->decided) /* numbers of a client fit: they were checked */
        return 0;
    struct ht_layout layout = ht_opt_layout(config, p->shape.dtype, p->shape.elements);
    return ht_opt_same_rule_state(&layout, &p->cur.layout) ? 0 : -EBUSY;
}

/* part: the opener writes only a part of the gradient. */
static void report_flush_error(struct ht_param *p, bool part, uint64_t torn, int err)
{
    if (err == -EINVAL && torn != UINT64_MAX)
        ht_opt_refuse_gradient(p, "gradient: ends inside an element at byte %llu; it is not applied", (ull)torn);
    else if (err == -EINVAL && part)
        ht_opt_refuse_gradient(
            p, "gradient: is longer than its shard, or the parameter has another size; it is not applied");
    else if (err == -EINVAL)
        ht_opt_refuse_gradient(p, "gradient: is not as long as the parameter (%llu bytes); it is not applied",
                               (ull)(p->shape.elements * p->shape.g_bytes));
    else if (err == -EBUSY)
        ht_opt_refuse_gradient(p, "gradient: its state is that of another rule; reset it first");
    else if (err == -EALREADY)
        ht_opt_refuse_gradient(p, "gradient: the step takes no more since prepare; it is not applied");
    else if (err == -EPERM)
        ht_opt_refuse_gradient(
            p,
            "gradient: the step has numbers of a client (decide), and none for this parameter; it is not applied. "
            "A commit or an abort ends that step");
    else if (err == -ENOSPC)
        ht_opt_refuse_gradient(
            p,
            "no space for its optimizer state, sums and one rewrite; the gradient is not applied; hitrainctl size "
            "says how large a store must be");
    else
        ht_opt_refuse_gradient(p, "gradient: %s; it is not applied", strerror(-err));
}

/* Has the step that its first gradient opens, or has opened, two phases, and there is nothing for them? */
static bool lacks_ortho(const struct ht_param *p, const struct ht_words *words) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool phases = p->root->decided ? p->decided_scalars.kernel == HT_KERNEL_MUON : words->config.rule == HT_RULE_MUON;

    return !p->has_grad && phases && ht_opt_ortho_lacks(p);
}

static bool lacks_sum(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return !p->sum && ht_opt_accumulate(p->root) > 1;
}

/* Under the gate: the object for sums. */
static int create_sum(struct ht_param *p)
{
    struct ht_obj *sum;
    int rc = ht_opt_object_create(p->o->store, 0, p->shape.chunk_bytes, &sum);

    if (rc)
        return rc;
    rc = ht_obj_truncate(sum, p->shape.elements * 4);
    if (rc) {
        int err = ht_opt_scratch_delete(p, &sum);
        return err ? err : rc;
    }
    lock(p->o);
    p->sum = sum;
    ht_list_add_tail(&p->root->sums, &p->of_sums);
    unlock(p->o);
    return 0;
}

/*
 * Reserves space for sums outside memory, or gives it back when nothing is accumulated. They are never published, like
 * a gradient: a rewrite reserve is for two copies, so half the bytes reserve one.
 */
static int reserve_sum(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t bytes = ht_opt_accumulate(p->root) > 1 ? p->shape.elements * 4 : 0;
    int rc = 0;

    if (!p->sum)
        return 0;
    do
        rc = ht_obj_rewrite_reserve(p->sum, ht_div_up(bytes, 2));
    while (rc == -ENOSPC && ht_opt_redo_yield_aside(p->o));
    return rc;
}

/* Releases the lock in between. Another flush may be quicker: then there is nothing to do. */
static int ensure_objects(struct ht_param *p, const struct ht_layout *layout, const struct ht_words *words)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc = ht_opt_gate_enter(p->root);

    if (rc)
        return rc;
    bool state = !p->gone && !p->cur.exists, sum = !p->gone && lacks_sum(p), ortho = !p->gone && lacks_ortho(p, words);
    unlock(p->o);
    if (ortho) { /* before the first record of such state */
        rc = ht_store_need_features(p->o->store, HT_FEAT_REFUSE_TWO_PHASE);
        rc = rc ? rc : ht_opt_ortho_make(p);
        while (rc == -ENOSPC && !ht_store_make_space(p->o->store, true))
            rc = ht_opt_ortho_make(p);
    }
    if (!rc && state)
        rc = ht_opt_state_create(p, layout);
    while (rc == -ENOSPC && state && !ht_store_make_space(p->o->store, true))
        rc = ht_opt_state_create(p, layout);
    if (!rc && sum)
        rc = create_sum(p);
    lock(p->o);
    ht_opt_gate_leave(p->root);
    return rc;
}

/* Objects, space and memory for it are there. */
static int freeze_checked(struct ht_param *p, const struct ht_opt_window *w, const struct ht_words *words,
                          uint64_t *out_ticket) HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc = ht_opt_state_load(p);

    if (!rc && !p->has_grad)
        rc = reserve_sum(p);
    if (!rc && !p->has_grad && !p->root->decided)
        rc = ht_opt_sections_reserve(p, words->sections.count);
    return rc ? rc : freeze_window(p, w, words, out_ticket);
}

/*
 * Releases the lock in between, but not between the window and the end: later writes belong to the next flush. Bytes
 * that are wrong, or may not be applied, are dropped. g NULL: the window of all openers.
 */
static int flush_window(struct ht_param *p, struct ht_grad *g, struct ht_words *words, uint64_t *out_torn,
                        uint64_t *out_ticket) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_opt_window w = {.begin = 0, .end = UINT64_MAX};
    struct ht_layout layout;
    int rc;

    for (;;) {
        rc = ht_opt_wait_open(p->root);
        if (rc)
            return rc;
        if (g) {
            ht_opt_grad_refresh(g);
            w = g->mine;
        }
        if ((ht_list_empty(&p->dirty) || !w.end) && !(g && g->spoiled))
            return 0;
        if (ht_opt_close_refuses(p->root))
            return -EIO;
        if (!ht_opt_words_current(p, words)) {
            ht_opt_words_read(p, words);
            continue;
        }
        if (p->gone)
            return -ESTALE;
        rc = validate_written(p, g, &w, out_torn);
        if (!rc)
            rc = check_numbers(p, words);
        if (!rc && p->root->prepared)
            rc = -EALREADY;
        if (rc || (p->cur.exists && !lacks_sum(p) && !lacks_ortho(p, words)))
            break;
        layout = ht_opt_layout(&words->config, p->shape.dtype, p->shape.elements);
        rc = ensure_objects(p, &layout, words);
        if (rc)
            return rc;
    }
    if (!rc)
        rc = check_rule(p, &words->config);
    if (rc) {
        drop_written(p, &w);
        return rc;
    }
    rc = freeze_checked(p, &w, words, out_ticket);
    p->applied += !rc && !g;
    if (!rc)
        ht_opt_succeeded(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid);
    return rc;
}

/* g: the opener whose gradient is flushed; NULL: all openers. */
static int flush_gradient(struct ht_param *p, struct ht_grad *g)
{
    struct ht_optim *o = p->o;
    struct ht_words words = {.read = false};
    uint64_t torn = UINT64_MAX, ticket = 0;

    lock(o);
    int rc = flush_window(p, g, &words, &torn, &ticket);
    if (g && (!rc || rc == -EINVAL)) {
        ht_opt_grad_forget_mine(g);
        g->spoiled = false;
    }
    ht_opt_inval_wait(o, ticket);
    unlock(o);
    ht_optim_sections_free(&words.sections);
    if (words.refused)
        ht_opt_refuse_gradient(p, "optimizer: %s; the gradient is not applied", words.why);
    else if (rc && !ht_opt_close_failed(p->root, rc))
        report_flush_error(p, g && g->mine.has, torn, rc);
    return rc == -EALREADY ? -EBUSY : rc;
}

int ht_grad_flush(struct ht_grad *g)
{
    int rc = ht_opt_grad_fill_holes(g);

    return rc ? rc : flush_gradient(g->param, g);
}

void ht_grad_discard(struct ht_grad *g)
{
    lock(g->param->o);
    ht_opt_grad_refresh(g);
    drop_mine(g);
    ht_opt_grad_forget_mine(g);
    unlock(g->param->o);
}

int ht_optim_apply(struct ht_optim *o, uint64_t root, uint64_t oid)
{
    struct ht_param *p = ht_opt_param_get(o, oid);
    int rc = p && p->root->id == root ? flush_gradient(p, NULL) : -ENOENT;

    ht_opt_param_put(p);
    return rc;
}
