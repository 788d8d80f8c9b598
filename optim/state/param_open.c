/* SPDX-License-Identifier: Apache-2.0 */
/*
 * param_open.c - opens a parameter, for its gradient or for its state as files. Opening makes the parameter known,
 * fixes its shape, and makes the scratch object that holds the bytes of the gradient.
 */
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"

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
        ht_opt_root_put_locked(p->root);
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
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid, "%llu bytes are no whole number of elements",
                      (unsigned long long)bytes);
    if (rc)
        return rc;
    rc = open_param(root, oid, &shape, out);
    if (rc == -EINVAL)
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid,
                      "has %llu elements now, its optimizer state another count or dtype: reset it first",
                      (unsigned long long)shape.elements);
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
    ht_opt_root_put(root);
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
