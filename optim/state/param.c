/* SPDX-License-Identifier: Apache-2.0 */
/*
 * param.c - parameters: their table, references, deletion and reset; and opening one, for its gradient or for its state
 * as files. Opening makes the parameter known, fixes its shape, and makes the scratch object that holds the bytes of
 * the gradient.
 */
#include "optim/state/param.h"
#include "optim/state/records.h"
#include "optim/state/root.h"

/* ------------------------------------------------------------------- table */

struct ht_param *ht_opt_param_find(struct ht_optim *o, uint64_t oid)
{
    struct ht_id_link *link = ht_id_find(&o->params_by_oid, oid);

    return link ? ht_container_of(link, struct ht_param, by_oid) : NULL;
}

struct ht_param *ht_opt_param_make(struct ht_root *r, uint64_t oid)
{
    struct ht_optim *o = r->o;
    struct ht_param *p = calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    p->by_oid.id = oid;
    if (ht_id_insert(&o->params_by_oid, &p->by_oid)) {
        free(p);
        return NULL;
    }
    p->o = o;
    p->root = r;
    p->oid = oid;
    p->seq = ++o->next_seq;
    ht_list_init(&p->of_sums);
    ht_list_init(&p->touched);
    ht_list_init(&p->queue);
    ht_list_init(&p->queued);
    ht_list_init(&p->dirty);
    ht_list_init(&p->inflight);
    ht_list_init(&p->waiters);
    ht_list_init(&p->inval);
    ht_list_add_tail(&o->params, &p->all);
    ht_list_add_tail(&r->params, &p->of_root);
    r->refs++;
    o->meta_bytes += sizeof(*p);
    return p;
}

struct ht_param *ht_opt_param_get(struct ht_optim *o, uint64_t oid)
{
    lock(o);
    struct ht_param *p = ht_opt_param_find(o, oid);
    if (p && p->gone)
        p = NULL;
    if (p)
        p->refs++;
    unlock(o);
    return p;
}

void ht_opt_param_put(struct ht_param *p)
{
    if (!p)
        return;
    lock(p->o);
    p->refs--;
    unlock(p->o);
}

void ht_opt_param_put_objects(struct ht_param *p)
{
    ht_list_del(&p->of_sums);
    ht_obj_put(p->obj);
    ht_obj_put(p->grad);
    ht_obj_put(p->sum);
    if (p->ortho) {
        ht_obj_put(p->ortho->update);
        ht_obj_put(p->ortho->given);
        p->ortho->update = p->ortho->given = NULL;
    }
    p->obj = p->grad = p->sum = NULL;
    ht_opt_put_state(p);
}

void ht_opt_range_ended(struct ht_range *r, unsigned work)
{
    struct ht_param *p = r->param;
    struct ht_waiter *chain = NULL;

    p->pending--;
    p->root->pending--;
    p->root->backlog_bytes -= ht_opt_range_backlog_bytes(r, work);
    ht_opt_take_waiters(p, &chain);
    unlock(p->o);
    ht_opt_wake(chain);
    lock(p->o);
    ht_opt_range_ran(p->root);
    ht_opt_param_reclaim(p);
    p->refs--;
    notify_changed(p->o);
}

uint64_t ht_opt_sections_bytes(const struct ht_param *p)
{
    return p->sections ? sizeof(*p->sections) + p->sections->room * sizeof(*p->sections->of) : 0;
}

void ht_opt_sections_free(struct ht_param *p)
{
    p->o->meta_bytes -= ht_opt_sections_bytes(p);
    free(p->sections);
    p->sections = NULL;
}

void ht_opt_param_free(struct ht_param *p)
{
    struct ht_optim *o = p->o;

    ht_id_remove(&o->params_by_oid, &p->by_oid);
    ht_opt_totals_remove(p);
    ht_opt_param_put_objects(p);
    ht_opt_ranges_free(p);
    ht_opt_sections_free(p);
    if (p->ortho) {
        ht_opt_ortho_clear(p);
        ht_opt_ortho_count(p, true);
        ht_interval_set_free(&p->ortho->written);
        free(p->ortho);
    }
    ht_list_del(&p->touched);
    ht_list_del(&p->all);
    ht_list_del(&p->of_root);
    ht_opt_root_put(p->root);
    o->meta_bytes -= sizeof(*p);
    free(p);
}

void ht_opt_param_sweep(struct ht_param *p, struct ht_tx *tx)
{
    if (!p->gone || p->refs || p->pub.exists || p->cur.exists)
        return;
    if (p->grad)
        ht_obj_delete(p->grad, tx);
    if (p->sum)
        ht_obj_delete(p->sum, tx);
    if (p->ortho && p->ortho->update) {
        ht_obj_delete(p->ortho->update, tx);
        ht_obj_delete(p->ortho->given, tx);
    }
    ht_opt_param_free(p);
}

void ht_opt_each_param(struct ht_root *root, void (*fn)(struct ht_param *p))
{
    ht_list_for_each_entry(p, &root->params, struct ht_param, of_root) {
        p->refs++; /* the list may change while fn releases the lock, and p stays in it */
        fn(p);
        p->refs--;
    }
}

enum ht_optim_file ht_opt_param_file(struct ht_param *p)
{
    const struct ht_optim_hooks *hooks = &p->o->hooks;
    enum ht_optim_file file = HT_OPTIM_FILE_NAMED;

    p->refs++;
    unlock(p->o);
    if (hooks->file)
        file = hooks->file(hooks->ctx, p->oid);
    lock(p->o);
    p->refs--;
    return file;
}

/* -------------------------------------------------------------------- open */

static bool same_shape(const struct ht_param_shape *a, const struct ht_param_shape *b)
{
    return a->elements == b->elements && a->chunk_bytes == b->chunk_bytes && a->dtype == b->dtype &&
        a->grad_dtype == b->grad_dtype;
}

/* May p take this shape? */
static int check_shape(const struct ht_param *p, const struct ht_param_shape *shape) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool same = p->block && same_shape(&p->shape, shape);
    bool covered = p->has_grad || p->pending || !ht_list_empty(&p->dirty) || !ht_list_empty(&p->inflight);

    if (p->cur.exists &&
        (p->cur.elements != shape->elements || p->cur.dtype != shape->dtype ||
         p->cur.chunk_bytes != shape->chunk_bytes))
        return -EINVAL;
    return !same && (p->openers || covered) ? -EBUSY : 0;
}

int ht_opt_scratch_delete(const struct ht_param *p, struct ht_obj **obj)
{
    struct ht_tx *tx;
    int rc = ht_tx_begin(p->o->store, 0, &tx);

    if (rc)
        return rc;
    ht_obj_delete(*obj, tx);
    rc = ht_tx_commit(tx, NULL);
    ht_obj_put(*obj);
    *obj = NULL;
    return rc;
}

int ht_opt_sum_delete(struct ht_param *p)
{
    lock(p->o);
    ht_list_del(&p->of_sums);
    unlock(p->o);
    int rc = ht_opt_scratch_delete(p, &p->sum);
    lock(p->o);
    if (p->sum)
        ht_list_add_tail(&p->root->sums, &p->of_sums);
    unlock(p->o);
    return rc;
}

int ht_opt_param_build(struct ht_param *p, const struct ht_param_shape *shape)
{
    int rc = 0;

    lock(p->o);
    bool built = p->block && p->grad && same_shape(&p->shape, shape);
    unlock(p->o);
    if (built)
        return 0;
    /* Its chunks have another size: start with a new one. */
    if (p->grad && ht_obj_chunk_bytes(p->grad) != shape->chunk_bytes)
        rc = ht_opt_scratch_delete(p, &p->grad);
    if (!rc && p->sum && !same_shape(&p->shape, shape))
        rc = ht_opt_sum_delete(p);
    if (!rc && !p->grad)
        rc = ht_opt_object_create(p->o->store, 0, shape->chunk_bytes, &p->grad);
    if (!rc)
        ht_obj_scratch_drop(p->grad, 0, UINT64_MAX);
    if (!rc)
        rc = ht_obj_truncate(p->grad, shape->elements * shape->g_bytes);
    lock(p->o);
    if (!rc && (!p->block || !same_shape(&p->shape, shape)))
        rc = ht_opt_ranges_init(p, shape);
    /* After a mount others may have taken the space; then writing the gradient reports it. */
    if (!rc && ht_opt_grad_reserve(p))
        ht_opt_not_reserved(p, "no space is reserved for its gradient");
    unlock(p->o);
    return rc;
}

/* The parameter of an opener, made or revived. */
static int find_or_make(struct ht_root *root, uint64_t oid, struct ht_param **out) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = ht_opt_param_find(root->o, oid);

    if (!root->configured || root->frozen)
        return root->frozen ? -EROFS : -ENOENT;
    if (!p)
        p = ht_opt_param_make(root, oid);
    if (!p)
        return -ENOMEM;
    if (p->root != root && !p->gone)
        return -EINVAL;
    if (p->root != root && p->refs) /* its holders may wait for its former root */
        return -EBUSY;
    if (p->root != root) {
        ht_opt_totals_remove(p);
        ht_list_del(&p->of_root);
        ht_list_add_tail(&root->params, &p->of_root);
        if (!ht_list_empty(&p->of_sums)) {
            ht_list_del(&p->of_sums);
            ht_list_add_tail(&root->sums, &p->of_sums);
        }
        ht_opt_root_put(p->root);
        p->root = root;
        root->refs++;
    }
    p->gone = false;
    ht_opt_totals_update(p);
    *out = p;
    return 0;
}

/* Counts one more opener if nothing has to be built. */
static int try_open(struct ht_param *p, const struct ht_param_shape *shape, bool *out_done) HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc = check_shape(p, shape);

    *out_done = !rc && !p->building && p->block && p->grad && p->obj && same_shape(&p->shape, shape);
    if (*out_done)
        p->openers++;
    return rc;
}

/* Releases the lock in between. p has a reference. */
static int build_and_open(struct ht_param *p, const struct ht_param_shape *shape) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_optim *o = p->o;
    bool done = false;
    int rc = ht_opt_gate_enter(p->root);

    if (rc)
        return rc;
    rc = try_open(p, shape, &done);
    if (!rc && !done) {
        if (!p->obj)
            p->obj = ht_obj_get(o->store, p->oid);
        p->building = true; /* who opens it meanwhile waits for the gate */
        unlock(o);
        rc = p->obj ? ht_opt_param_build(p, shape) : -ESTALE;
        lock(o);
        p->building = false;
        if (!rc)
            rc = try_open(p, shape, &done);
    }
    ht_opt_gate_leave(p->root);
    return rc;
}

static int open_param(struct ht_root *root, uint64_t oid, const struct ht_param_shape *shape, struct ht_param **out)
{
    struct ht_optim *o = root->o;
    struct ht_param *p = NULL;
    bool done = false;

    lock(o);
    int rc = ht_opt_wait_replayed(root); /* a replay gives parameters the shapes of logged gradients */
    if (!rc)
        rc = find_or_make(root, oid, &p);
    if (!rc) {
        p->refs++;
        rc = try_open(p, shape, &done);
        if (!rc && !done)
            rc = build_and_open(p, shape);
        if (rc)
            p->refs--;
    }
    unlock(o);
    *out = p;
    return rc;
}

/* That of a step with a client's numbers may be in f32: the sum of several gradients. */
static uint8_t dtype_of_gradient(struct ht_root *root, const struct ht_param_desc *desc)
{
    lock(root->o);
    const struct ht_param *p = ht_opt_param_find(root->o, ht_obj_id(desc->obj));
    uint8_t dtype = p && root->decided && p->decided == root->decided ? p->decided_dtype : desc->grad_dtype;
    unlock(root->o);
    return dtype;
}

static int open_in_root(struct ht_root *root, const struct ht_param_desc *desc, struct ht_param **out)
{
    uint64_t oid = ht_obj_id(desc->obj), bytes = ht_obj_size(desc->obj);
    struct ht_param_shape shape;
    int rc = ht_opt_shape_of(&shape, bytes, ht_obj_chunk_bytes(desc->obj), desc->dtype, dtype_of_gradient(root, desc));

    if (rc && !(ht_dtype_trained_bytes(desc->dtype) && ht_dtype_trained_bytes(desc->grad_dtype)))
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid, "parameters and gradients are f32, bf16 or f16");
    else if (rc)
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid, "%llu bytes are no whole number of elements", (ull)bytes);
    if (rc)
        return rc;
    rc = open_param(root, oid, &shape, out);
    if (rc == -EINVAL)
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid,
                      "has %llu elements now, its optimizer state another count or dtype: reset it first",
                      (ull)shape.elements);
    else if (rc == -EBUSY)
        ht_opt_refuse(
            root, HT_EVENT_GRADIENT_REFUSED, oid,
            "its gradient is still open with another dtype or size, or from another model root: close that first");
    else if (rc)
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid, "its gradient cannot be opened: %s", strerror(-rc));
    return rc;
}

int ht_opt_param_open(struct ht_optim *o, const struct ht_param_desc *desc, struct ht_param **out)
{
    struct ht_root *root = ht_opt_root_get(o, desc->root);

    if (!root)
        return -EINVAL;
    int rc = open_in_root(root, desc, out);
    lock(o);
    ht_opt_root_put(root);
    unlock(o);
    return rc;
}

void ht_opt_param_close(struct ht_param *p)
{
    struct ht_optim *o = p->o;

    lock(o);
    p->openers--;
    p->refs--;
    unlock(o);
}

/* ------------------------------------------------------ deletion and reset */

void ht_opt_param_bury(struct ht_param *p, struct ht_tx *tx)
{
    if (p->gone)
        return;
    p->gone = true;
    ht_opt_delta_cut(p->root);
    ht_opt_cancel(p);
    ht_opt_state_delete(p, tx);
    /* The content is freed with the last reference; while an update is running, at its end. */
    ht_opt_param_reclaim(p);
    ht_opt_take_waiters(p, &p->o->wakes);
    pthread_cond_signal(&p->o->notify);
    notify_changed(p->o);
}

void ht_optim_param_deleted(struct ht_optim *o, uint64_t oid, bool pending, struct ht_tx *tx)
{
    lock(o);
    struct ht_param *p = ht_opt_param_find(o, oid);
    if (p && !pending) {
        /*
         * In scope 0 a deletion is put into the transaction at once. State that the log does not know is deleted at
         * once anyway.
         */
        if (p->cur.exists && ht_opt_state_load(p))
            ht_opt_state_not_deleted(p);
        for (unsigned i = 0; i < HT_STATES_MAX; i++)
            if (p->state[i])
                (void)!ht_obj_set_scope(p->state[i], 0, tx);
    }
    if (p)
        ht_opt_param_bury(p, tx);
    if (p && pending)
        ht_opt_param_sweep(p, tx);
    else if (p)
        ht_opt_publish_param(p, tx);
    unlock(o);
}

int ht_opt_ortho_delete(struct ht_param *p)
{
    lock(p->o);
    struct ht_ortho *of = p->ortho;
    struct ht_obj *obj[] = {of ? of->update : NULL, of ? of->given : NULL};
    if (of)
        of->update = of->given = NULL;
    unlock(p->o);
    if (!obj[0])
        return 0;
    int rc = ht_opt_delete_objects(p->o->store, obj, HT_ARRAY_SIZE(obj));
    for (unsigned i = 0; i < HT_ARRAY_SIZE(obj); i++)
        ht_obj_put(obj[i]);
    return rc;
}

/*
 * No gradient is written during the reset: bytes that count as written must not be dropped. Under the gate, locked;
 * releases the lock in between.
 */
static int reset_param(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_optim *o = p->o;

    p->root->draining = true;
    while (!ht_list_empty(&p->inflight))
        wait_changed(o);
    int rc = p->has_grad || p->pending ? -EBUSY : 0;
    unlock(o);
    if (!rc)
        rc = ht_opt_state_drop(p);
    lock(o);
    if (!rc)
        ht_opt_coverage_clear(p, false);
    unlock(o);
    if (!rc)
        rc = ht_opt_ortho_delete(p);
    if (!rc && p->grad)
        ht_obj_scratch_drop(p->grad, 0, UINT64_MAX);
    if (!rc && p->sum)
        ht_obj_scratch_drop(p->sum, 0, UINT64_MAX);
    lock(o);
    p->root->draining = false;
    notify_changed(o);
    return rc;
}

int ht_optim_reset(struct ht_optim *o, uint64_t root, uint64_t oid, struct ht_optim_steer *by)
{
    struct ht_param *p = ht_opt_param_get(o, oid);

    if (!p || p->root->id != root) {
        ht_opt_param_put(p);
        return -ENOENT;
    }
    lock(o);
    int rc = ht_opt_gate_enter_by(p->root, by);
    if (!rc) {
        rc = reset_param(p);
        p->root->redo.gap |= !rc;
        ht_opt_delta_cut(p->root);
        if (!rc)
            ht_opt_succeeded(p->root, HT_EVENT_GRADIENT_REFUSED, oid);
        ht_opt_gate_leave(p->root);
    }
    unlock(o);
    ht_opt_param_put(p);
    return rc;
}

static bool is_unpublished(struct ht_optim *o, uint64_t oid) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param *p = ht_opt_param_find(o, oid);

    return p && !p->gone &&
        (p->has_grad || p->pending || p->stepped || p->cur.t != p->pub.t || ht_opt_param_replayed(p));
}

bool ht_optim_param_unpublished(struct ht_optim *o, uint64_t oid)
{
    lock(o);
    bool yes = is_unpublished(o, oid);
    unlock(o);
    return yes;
}

/* Gradients are queued. */
static void hold_updates(struct ht_optim *o, uint64_t id, bool alone) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_root *root = ht_opt_root_find(o, id);

    if (!root)
        return;
    root->alone = alone;
    ht_opt_root_ready(root);
}

int ht_optim_publish_alone(struct ht_optim *o, uint64_t root, const uint64_t *oids, size_t count)
{
    bool any = false;

    lock(o);
    for (size_t i = 0; !any && i < count; i++)
        any = is_unpublished(o, oids[i]);
    if (!any)
        hold_updates(o, root, true);
    unlock(o);
    return any ? -EBUSY : 0;
}

void ht_optim_published_alone(struct ht_optim *o, uint64_t root)
{
    lock(o);
    hold_updates(o, root, false);
    unlock(o);
}
