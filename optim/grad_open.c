/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grad_open.c - what stands behind an open gradient: the parameter with its shape, and the scratch object that holds the bytes.
 */
#include "optim/optim_priv.h"

#include <stdlib.h>

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
    if (p->root != root && p->refs) /* those that have one may wait for its former root */
        return -EBUSY;
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

int ht_opt_param_open(struct root *root, const struct ht_param_desc *desc, struct param **out)
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
    else if (ret == -EBUSY)
        ht_opt_refuse(
            root, HT_EVENT_GRADIENT_REFUSED, oid,
            "its gradient is still open from before, when it belonged to another model root: close that first");
    else if (ret)
        ht_opt_refuse(root, HT_EVENT_GRADIENT_REFUSED, oid, "its gradient cannot be opened: %s", strerror(-ret));
    return ret;
}
