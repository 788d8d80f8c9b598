/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.c - asserts the invariants of roots, parameters, ranges and sums of squares that
 * their headers state (tiering/base/verify.h).
 *
 * A worker that has applied a range changes its state first and the sums soon after. So while a root has such workers
 * the sums are bounds.
 */

#include "optim/state/param.h"
#include "optim/state/root.h"

/* What ranges add up to: those of a parameter, or of a root. */
struct tally {
    uint64_t stirred, waiting_bytes, update_bytes, queued, updates, running, shown, failed, dirty, backlog_bytes;
};

static void check_set(const struct ht_interval_set *s, uint32_t bytes)
{
    const struct ht_interval *v = ht_interval_set_all(s);

    assert(s->count <= (s->cap ? s->cap : 1));
    for (uint32_t i = 0; i < s->count; i++)
        assert(v[i].begin < v[i].end && v[i].end <= bytes && (!i || v[i - 1].end < v[i].begin));
}

/* A byte is written, frozen, in a write that copies, or none of these. */
static void check_coverage(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param *p = r->param;
    uint32_t bytes = ht_opt_range_grad_bytes(p, r->index);
    uint64_t first = (uint64_t)r->index * p->shape.range_elements * p->shape.g_bytes;
    const struct ht_interval *v = ht_interval_set_all(&r->written);

    check_set(&r->written, bytes);
    check_set(&r->frozen, bytes);
    for (uint32_t i = 0; i < r->written.count; i++)
        assert(!ht_interval_set_overlap(&r->frozen, v[i].begin, v[i].end));
    ht_list_for_each_entry(w, &p->inflight, const struct ht_inflight, link) {
        uint64_t begin = ht_max_u64(w->begin, first), end = ht_min_u64(w->end, first + bytes);
        if (begin >= end)
            continue;
        assert(!ht_interval_set_overlap(&r->written, (uint32_t)(begin - first), (uint32_t)(end - first)));
        assert(!ht_interval_set_overlap(&r->frozen, (uint32_t)(begin - first), (uint32_t)(end - first)));
    }
}

static void check_range(const struct ht_range *r, struct tally *t) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool queued = r->state == HT_RANGE_QUEUED, running = r->state == HT_RANGE_RUNNING;

    assert(r->state <= HT_RANGE_FAILED);
    assert(ht_list_empty(&r->queue) == !queued);
    assert(ht_list_empty(&r->dirty) == !r->written.count);
    assert(!r->shown || running);
    assert(r->state != HT_RANGE_IDLE || !r->work);
    assert(!(queued || running) || r->work);
    assert(r->spans_bytes == (r->written.cap + r->frozen.cap) * sizeof(struct ht_interval));
    check_coverage(r);
    t->queued += queued;
    t->updates += queued && (r->work & (HT_WORK_UPDATE | HT_WORK_LOG)) == HT_WORK_UPDATE;
    t->shown += r->shown;
    t->running += running;
    t->stirred += r->stirred;
    t->failed += r->state == HT_RANGE_FAILED;
    t->dirty += r->written.count > 0;
    t->backlog_bytes += queued || running ? ht_opt_range_backlog_bytes(r, r->work) : 0;
    assert(!r->measured || (r->param->squares && r->param->has_grad));
}

static size_t length_of(const struct ht_list *list)
{
    size_t n = 0;

    ht_list_for_each(pos, list)
        n++;
    return n;
}

/* Returns the memory of the ranges. */
static uint64_t check_ranges(const struct ht_param *p, struct tally *t) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t bytes = p->blocks * sizeof(struct ht_range *) + ht_opt_squares_bytes(p);

    for (uint64_t i = 0; i < p->shape.range_count; i++) {
        const struct ht_range *r = ht_opt_range_find(p, i);
        if (!r)
            continue;
        assert(r->param == p && r->index == i);
        check_range(r, t);
        bytes += sizeof(*r) + r->spans_bytes;
    }
    return bytes;
}

/* Returns their memory. */
static uint64_t check_sections(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param_sections *s = p->sections;

    assert(!s || (s->count <= s->room && s->decided <= s->room));
    for (uint32_t i = 0; s && i < s->count; i++)
        assert(s->of[i].begin < s->of[i].end && (!i || s->of[i - 1].end <= s->of[i].begin));
    return ht_opt_sections_bytes(p);
}

/* The same. Ranges end the first phase before they are counted. */
static uint64_t check_ortho(const struct ht_param *p, const struct tally *t) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_ortho *of = p->ortho;

    assert(of || !t->stirred);
    if (!of)
        return 0;
    assert(t->stirred >= of->stirred && (p->root->running || t->stirred == of->stirred));
    assert(p->has_grad || (!of->stirred && !of->asked && !of->applied && !of->written.count && !of->waiting_bytes));
    assert(!of->applied || of->stirred == p->shape.range_count);
    return of->heap_bytes;
}

static void check_objects(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param_meta *m = &p->cur;

    assert(!p->obj || ht_obj_id(p->obj) == p->oid);
    assert(m->layout.count <= HT_STATES_MAX);
    for (unsigned i = 0; m->exists && i < m->layout.count; i++)
        assert(m->oid[i] && (!p->state[i] || ht_obj_id(p->state[i]) == m->oid[i]));
}

static uint64_t check_param(struct ht_param *p, struct tally *of_root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct tally t = {0};
    uint64_t bytes = sizeof(*p) + check_ranges(p, &t) + check_sections(p), pending = t.queued + t.running;

    bytes += check_ortho(p, &t);

    assert(ht_opt_param_find(p->o, p->oid) == p);
    assert(p->pending >= pending && (p->root->running || p->pending == pending));
    assert(p->shown == t.shown && p->shown <= p->pending);
    ht_list_for_each_entry(r, &p->queue, const struct ht_range, queue)
        assert(r->state == HT_RANGE_QUEUED && r->param == p && (r->work & HT_WORK_UPDATE));
    assert(length_of(&p->queue) == t.updates);
    assert(ht_list_empty(&p->queued) == !t.updates);
    assert(p->failed == t.failed && p->complete <= p->shape.range_count);
    assert(length_of(&p->dirty) == t.dirty);
    assert(p->has_grad == !ht_list_empty(&p->touched));
    assert(p->refs >= p->pending + p->openers);
    check_objects(p);
    of_root->queued += t.queued;
    of_root->waiting_bytes += p->ortho ? p->ortho->waiting_bytes : 0;
    of_root->update_bytes += p->ortho ? p->ortho->update_bytes : 0;
    of_root->updates += t.updates;
    of_root->running += t.running;
    of_root->backlog_bytes += t.backlog_bytes;
    return bytes;
}

/* ------------------------------------------------------------------ totals */

/* No other objects are found as its own. */
static void check_owner(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (unsigned i = 0; i < HT_STATES_MAX; i++) {
        const struct ht_id_link *l = &p->state_link[i].by_oid;
        uint64_t oid = p->cur.exists && i < p->cur.layout.count ? p->cur.oid[i] : 0;
        assert(!l->id || (l->id == oid && ht_id_find(&p->o->states_by_oid, l->id) == l));
    }
}

/* The totals are those of a walk. */
static void check_totals(const struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_totals t = {0};

    ht_list_for_each_entry(p, &r->params, const struct ht_param, of_root) {
        struct ht_totals c = ht_opt_totals_of(p);
        assert(c.parameters == p->counted.parameters && c.state_bytes == p->counted.state_bytes);
        assert(r->gate || ht_list_empty(&p->of_sums) == !p->sum); /* sums are deleted under the gate */
        check_owner(p);
        t.parameters += c.parameters;
        t.state_bytes += c.state_bytes;
        t.param_bytes += c.param_bytes;
        t.elements += c.elements;
    }
    assert(t.parameters == r->totals.parameters && t.state_bytes == r->totals.state_bytes);
    assert(t.param_bytes == r->totals.param_bytes && t.elements == r->totals.elements);
}

/* ------------------------------------------------------------------- roots */

static void check_lists(const struct ht_root *root, const struct tally *t) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(r, &root->early, const struct ht_range, queue) {
        assert(r->state == HT_RANGE_QUEUED && r->param->root == root &&
               (r->work & (HT_WORK_UPDATE | HT_WORK_LOG)) != HT_WORK_UPDATE);
    }
    ht_list_for_each(pos, &root->queue)
        assert(ht_list_entry(pos, struct ht_param, queued)->root == root);
    ht_list_for_each_entry(p, &root->touched, const struct ht_param, touched)
        assert(p->has_grad && p->root == root);
    assert(length_of(&root->early) == t->queued - t->updates);
    assert(ht_list_empty(&root->ready) == (root->hold || root->alone || !t->queued));
    assert(root->open || ht_list_empty(&root->touched));
}

static uint64_t check_root(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct tally t = {0};
    uint64_t bytes = sizeof(*root), pending = 0;

    ht_list_for_each_entry(p, &root->params, struct ht_param, of_root) {
        assert(p->root == root);
        bytes += check_param(p, &t);
        pending += p->pending;
    }
    assert(ht_opt_root_find(root->o, root->id) == root);
    assert(root->pending == pending && root->running >= t.running);
    assert(root->backlog_bytes >= t.backlog_bytes && (root->running || root->backlog_bytes == t.backlog_bytes));
    assert(root->ortho_bytes == t.waiting_bytes && root->update_bytes == t.update_bytes);
    assert(!root->hold || root->gate);
    assert(!root->draining || root->gate);
    assert(!root->ending || root->draining);
    assert(!root->async || root->gate);
    assert(!root->deciding || (root->async && root->draining && root->open));
    assert(ht_list_empty(&root->closing) || root->async);
    assert(!root->redo.counted || root->redo.steps < root->undurable || root->redo.logging);
    check_lists(root, &t);
    check_totals(root);
    return bytes + root->redo.heap_bytes;
}

/* ----------------------------------------------------------------- squares */

/* Which gradients a check looks at: any change of it makes the check void. */
struct moment {
    uint64_t forgotten, open;
};

static struct moment moment_of(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return (struct moment){p->forgotten, p->root->open};
}

/* Has the range sums of all its elements, and does nothing? */
static const struct ht_range *find_measured(const struct ht_param *p, uint64_t index) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_range *r = p->gone ? NULL : ht_opt_range_find(p, index);

    if (!r || !r->measured || r->stirred || r->state != HT_RANGE_IDLE)
        return NULL;
    return r->added || ht_interval_set_cover(&r->frozen, 0, ht_opt_range_grad_bytes(p, index)) ? r : NULL;
}

/* Sums of the bytes that the store has for a range now, or an error. Not locked. */
static int compute_again(const struct ht_param *p, uint64_t index, struct ht_obj *from, uint8_t dtype, double *span,
                         uint64_t *nonfinite)
{
    uint64_t elements = ht_opt_range_elements(&p->shape, index), size = ht_dtype_trained_bytes(dtype),
             bytes = elements * size;
    void *buf = malloc(bytes);
    int rc = buf ? ht_opt_read_all(from, index * p->shape.range_elements * size, buf, bytes) : -ENOMEM;
    struct ht_elements all = {.bytes = buf, .dtype = dtype, .count = elements};

    if (!rc)
        ht_opt_squares_add(p->o->kernels, span, &all, nonfinite);
    free(buf);
    return rc;
}

/*
 * Releases the lock while it reads. A drop or a boundary may come in between: then there is nothing to compare with.
 */
static void check_squares_of(struct ht_param *p, uint64_t index) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_range *r = find_measured(p, index);
    struct moment before = moment_of(p);
    uint64_t nonfinite = 0;

    if (!r)
        return;
    bool summed = r->added || r->part_added;
    uint8_t dtype = summed ? (uint8_t)HT_DTYPE_F32 : p->shape.grad_dtype;
    struct ht_obj *from = ht_obj_get(p->o->store, ht_obj_id(summed ? p->sum : p->grad));
    size_t spans = ht_div_up(ht_opt_range_elements(&p->shape, index), HT_SUM_SPAN);
    double *span = calloc(spans, sizeof(*span));
    unlock(p->o);
    int rc = from && span ? compute_again(p, index, from, dtype, span, &nonfinite) : -ENOMEM;
    ht_obj_put(from);
    lock(p->o);
    struct moment now = moment_of(p);
    r = find_measured(p, index);
    if (!rc && r && !memcmp(&before, &now, sizeof(now))) {
        assert(!memcmp(span, p->squares + index * p->shape.range_elements / HT_SUM_SPAN, spans * sizeof(*span)));
        assert(r->nonfinite == nonfinite);
    }
    free(span);
}

/* Kept sums are those of the bytes that the store has. Releases the lock in between. */
static void check_squares(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (struct ht_list *pos = root->params.next, *next; pos != &root->params; pos = next) {
        struct ht_param *p = ht_list_entry(pos, struct ht_param, of_root);
        p->refs++;
        for (uint64_t i = 0; p->squares && p->has_grad && i < p->shape.range_count; i++)
            check_squares_of(p, i);
        next = p->of_root.next;
        p->refs--;
    }
}

/* --------------------------------------------------------------------- all */

void ht_optim_verify(struct ht_optim *o)
{
    size_t params = 0;
    uint64_t bytes = 0;

    lock(o);
    ht_list_for_each_entry(root, &o->roots, struct ht_root, all) {
        bytes += check_root(root);
        params += length_of(&root->params);
    }
    assert(params == length_of(&o->params));
    assert(o->meta_bytes == bytes);
    assert(o->inval_done <= o->inval_issued);
    for (struct ht_list *pos = o->roots.next, *next; pos != &o->roots; pos = next) {
        struct ht_root *root = ht_list_entry(pos, struct ht_root, all);
        root->refs++;
        check_squares(root);
        next = pos->next;
        ht_opt_root_put(root);
    }
    unlock(o);
}
