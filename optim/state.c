/* SPDX-License-Identifier: Apache-2.0 */
/*
 * state.c - optimizer state as files: what the rule keeps, master (of parameters of two bytes), and step.
 *
 * step is the number of steps the moments stand for, as one f32: what torch.optim keeps beside them. The others
 * are their objects. Bytes are read and written without the lock; a reference to the parameter keeps them.
 */
#include "optim/optim_priv.h"

#include <math.h>
#include <stdlib.h>

/* Of the state there is, or that the first gradient would make. */
static int find_layout(struct ht_optim *o, const struct ht_param_desc *desc, struct layout *out)
{
    struct ht_optim_config config;
    struct root *root = ht_opt_root_get(o, desc->root);

    if (!root)
        return -ENOENT;
    ht_opt_config_of(root, ht_obj_id(desc->obj), &config);
    lock(o);
    const struct param *p = ht_opt_param_find(o, ht_obj_id(desc->obj));
    if (p && !p->gone && p->cur.exists)
        *out = p->cur.layout;
    else
        *out = ht_opt_layout(&config, desc->dtype);
    unlock(o);
    ht_opt_root_put(root);
    return 0;
}

/* Index of a word in its layout; "step" comes after the objects. */
static int find_word(struct ht_optim *o, const struct ht_param_desc *desc, const char *name, struct layout *layout)
{
    int ret = find_layout(o, desc, layout);

    if (ret)
        return ret;
    for (unsigned i = 0; i < layout->count; i++) {
        if (!strcmp(name, ht_state_word(layout->kind[i])))
            return (int)i;
    }
    return !strcmp(name, "step") ? layout->count : -ENOENT;
}

int ht_optim_state_name(struct ht_optim *o, const struct ht_param_desc *desc, unsigned index, const char **out_name)
{
    struct layout layout;
    int ret = ht_kernel_dtype_bytes(desc->dtype) ? find_layout(o, desc, &layout) : -ENOENT;

    if (ret || index > layout.count)
        return -ENOENT;
    *out_name = index < layout.count ? ht_state_word(layout.kind[index]) : "step";
    return 0;
}

int64_t ht_optim_state_size(struct ht_optim *o, const struct ht_param_desc *desc, const char *name)
{
    struct layout layout;
    int word = find_word(o, desc, name, &layout);
    int64_t size = 0;

    if (word < 0 || !ht_kernel_dtype_bytes(desc->dtype))
        return -ENOENT;
    lock(o);
    const struct param *p = ht_opt_param_find(o, ht_obj_id(desc->obj));
    if (p && !p->gone && p->cur.exists)
        size = word == layout.count ? 4 : (int64_t)(p->cur.elements * 4);
    unlock(o);
    return size;
}

/* Locked, let go meanwhile: until no update of [off, off+len) of a state file is pending. */
static void wait_for_range(struct param *p, uint64_t off, uint64_t len)
{
    uint64_t per_range = (uint64_t)p->shape.range_elements * 4;

    for (uint64_t i = off / per_range; i < p->shape.range_count && i * per_range < off + len; i++) {
        const struct range *r;
        while ((r = ht_opt_range_find(p, i)) && ht_opt_range_updating(r) && !p->o->stopping)
            wait_changed(p->o);
    }
}

static ssize_t read_step(struct param *p, uint64_t off, void *buf, size_t len)
{
    /* Moments of updated ranges are those of the open step. */
    float t = (float)(p->cur.t + p->has_grad);

    if (off >= sizeof(t))
        return 0;
    len = ht_min_u64(len, sizeof(t) - off);
    memcpy(buf, (const uint8_t *)&t + off, len);
    return (ssize_t)len;
}

ssize_t ht_optim_state_read(struct ht_optim *o, const struct ht_param_desc *desc, const char *name, uint64_t off,
                            void *buf, size_t len)
{
    struct ht_obj *obj = NULL;
    struct layout layout;
    ssize_t ret = find_word(o, desc, name, &layout);
    unsigned word = (unsigned)ret;

    if (ret < 0)
        return ret;
    struct param *p = ht_opt_param_get(o, ht_obj_id(desc->obj));
    if (!p)
        return 0;
    lock(o);
    len = ht_min_u64(len, HT_FILE_BYTES_MAX);
    if (p->cur.exists && off < HT_FILE_BYTES_MAX)
        wait_for_range(p, off, len);
    ret = 0;
    if (p->cur.exists && !ht_opt_same_layout(&layout, &p->cur.layout))
        ret = -ESTALE;
    else if (p->cur.exists && word < layout.count)
        obj = ht_obj_get(o->store, p->cur.oid[word]);
    else if (p->cur.exists)
        ret = read_step(p, off, buf, len);
    unlock(o);
    if (obj)
        ret = ht_obj_read(obj, off, buf, len);
    ht_obj_put(obj);
    ht_opt_param_put(p);
    return ret;
}

/* ------------------------------------------------------------------- write */

static ssize_t write_step(struct param *p, uint64_t off, const void *buf, size_t len)
{
    float t;

    if (off != 0 || len != sizeof(t))
        return -EINVAL;
    memcpy(&t, buf, sizeof(t));
    /* Up to there every whole number is a float. */
    if (!(t >= 0 && t <= 16777216.0f) || t != floorf(t))
        return -EINVAL;
    p->cur.t = (uint64_t)t;
    return (ssize_t)len;
}

/* Under the gate, locked. out_obj: where bytes go; none: all is done and *out_ret says what. */
static void prepare_write(struct param *p, const struct layout *layout, unsigned word, uint64_t off, const void *buf,
                          size_t len, struct ht_obj **out_obj, ssize_t *out_ret)
{
    if (p->gone || !ht_opt_same_layout(layout, &p->cur.layout))
        *out_ret = -ESTALE;
    else if (p->root->open || p->has_grad || p->pending)
        *out_ret = -EBUSY;
    else if (word == layout->count)
        *out_ret = write_step(p, off, buf, len);
    else if (off > p->cur.elements * 4 || len > p->cur.elements * 4 - off)
        *out_ret = -EINVAL;
    else if (!(*out_obj = ht_obj_get(p->o->store, p->cur.oid[word])))
        *out_ret = -ESTALE;
}

/* Under the gate, not locked. */
static ssize_t write_gated(struct param *p, const struct layout *layout, unsigned word, uint64_t off, const void *buf,
                           size_t len)
{
    struct ht_obj *obj = NULL;
    ssize_t ret = 0;

    lock(p->o);
    bool make = !p->cur.exists && !p->gone && !p->root->open;
    unlock(p->o);
    if (make)
        ret = ht_opt_state_create(p, layout);
    if (ret)
        return ret;
    lock(p->o);
    prepare_write(p, layout, word, off, buf, len, &obj, &ret);
    unlock(p->o);
    if (obj)
        ret = ht_obj_write(obj, off, buf, len);
    ht_obj_put(obj);
    return ret;
}

ssize_t ht_optim_state_write(struct ht_optim *o, const struct ht_param_desc *desc, const char *name, uint64_t off,
                             const void *buf, size_t len)
{
    struct layout layout;
    int word = find_word(o, desc, name, &layout);
    struct ht_grad *g;

    if (word < 0)
        return word;
    /* Opening the gradient checks dtype and size, and makes the parameter known. */
    ssize_t ret = ht_grad_open(o, desc, &g);
    if (ret)
        return ret;
    struct param *p = ht_opt_param_get(o, ht_obj_id(desc->obj));
    lock(o);
    ret = p ? ht_opt_gate_enter(p->root) : -ESTALE;
    unlock(o);
    if (!ret) {
        ret = write_gated(p, &layout, (unsigned)word, off, buf, len);
        lock(o);
        ht_opt_gate_leave(p->root);
        unlock(o);
    }
    if (p)
        ht_opt_param_put(p);
    ht_grad_release(g);
    return ret;
}

uint64_t ht_optim_state_stored(struct ht_optim *o, uint64_t oid)
{
    uint64_t bytes = 0;

    lock(o);
    const struct param *p = ht_opt_param_find(o, oid);
    for (unsigned i = 0; p && !p->gone && p->cur.exists && i < p->cur.layout.count; i++) {
        struct ht_obj *obj = ht_obj_get(o->store, p->cur.oid[i]);
        struct ht_obj_stat st = {0};
        if (obj)
            ht_obj_stat(obj, &st);
        ht_obj_put(obj);
        bytes += st.stored_bytes;
    }
    unlock(o);
    return bytes;
}
