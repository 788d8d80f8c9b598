/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy.c - the optimizer's part in a copy of a model root: a kept step, or a model root made from one.
 *
 * Each parameter whose file is copied gets a twin in the copy's root, and each state object a number for its copy. The
 * caller holds the root's gate, so state neither appears nor goes, and counts change with the publication alone.
 * Nothing of a kept step changes: it takes no gradient, and reserves no space. A parameter of a clone has its own
 * reserves, as if its state had been made there.
 */
#include "tiering/api/keep.h"
#include "optim/state/range.h"
#include "optim/state/records.h"
#include "optim/state/root.h"

/* As much as ht_opt_state_create reserves. */
static void reserve_rewrites(const struct ht_param *p, struct ht_copy *k)
{
    const struct ht_layout *l = &p->cur.layout;

    ht_copy_reserve(k, p->oid, p->cur.elements * ht_dtype_trained_bytes(p->cur.dtype), 0);
    for (unsigned i = 0; i < l->count; i++)
        ht_copy_reserve(k, p->cur.oid[i], ht_opt_state_size(&p->shape, l->kind[i], l->form[i]),
                        ht_opt_state_used_bytes(&p->shape, l->kind[i], l->form[i]));
}

/* After an error the copy is dropped, with all its parameters. */
static int copy_param(struct ht_param *p, struct ht_root *to, struct ht_copy *k) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *twin = ht_opt_param_make(to, ht_copy_of(k, p->oid));
    int rc = twin ? ht_opt_record_reserve(twin) : -ENOMEM;

    if (rc)
        return rc;
    k->bytes += HT_OPT_PARAM_RECORD_BYTES;
    for (unsigned i = 0; !rc && i < p->cur.layout.count; i++)
        rc = ht_copy_add(k, p->cur.oid[i]) ? 0 : -ENOMEM;
    if (!rc && k->clone)
        reserve_rewrites(p, k);
    return rc;
}

/* The root of the copy is not there yet: only its parameters keep it. */
static void drop_copy(struct ht_optim *o, uint64_t id) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_root *to = ht_opt_root_find(o, id);

    if (!to)
        return;
    ht_list_for_each_entry(twin, &to->params, struct ht_param, of_root)
        ht_opt_record_unreserve(twin);
    ht_opt_root_forget(to);
    ht_store_log_unreserve(o->store, HT_OPT_ROOT_RECORD_BYTES);
}

static int copy_root(struct ht_optim *o, const struct ht_root *from, struct ht_copy *k) HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc = ht_store_log_reserve(o->store, HT_OPT_ROOT_RECORD_BYTES);

    if (rc)
        return rc;
    struct ht_root *to = ht_opt_root_make(o, k->to);
    if (!to) {
        ht_store_log_unreserve(o->store, HT_OPT_ROOT_RECORD_BYTES);
        return -ENOMEM;
    }
    to->frozen = !k->clone;
    k->bytes += HT_OPT_ROOT_RECORD_BYTES;
    ht_list_for_each_entry(p, &from->params, struct ht_param, of_root)
        if (!rc && !p->gone && p->cur.exists && ht_copy_of(k, p->oid))
            rc = copy_param(p, to, k);
    if (rc)
        drop_copy(o, k->to);
    return rc;
}

int ht_opt_copy(void *ctx, struct ht_copy *k)
{
    struct ht_optim *o = ctx;

    lock(o);
    const struct ht_root *from = ht_opt_root_find(o, k->scope);
    int rc = from && from->exists ? copy_root(o, from, k) : 0;
    unlock(o);
    return rc;
}

void ht_opt_copy_dropped(void *ctx, struct ht_copy *k)
{
    struct ht_optim *o = ctx;

    lock(o);
    drop_copy(o, k->to);
    unlock(o);
}

static void put_twin(const struct ht_param *p, struct ht_param *twin, const struct ht_copy *k, struct ht_tx *tx)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param_meta meta = p->pub;

    for (unsigned i = 0; i < meta.layout.count; i++)
        meta.oid[i] = ht_copy_of(k, meta.oid[i]);
    twin->cur = meta;
    ht_opt_totals_update(twin);
    (void)!ht_opt_state_shape(twin, &twin->shape); /* the same as that of p */
    ht_opt_publish_param(twin, tx);
}

void ht_opt_copied(void *ctx, struct ht_copy *k, struct ht_tx *tx)
{
    struct ht_optim *o = ctx;

    lock(o);
    const struct ht_root *from = ht_opt_root_find(o, k->scope);
    struct ht_root *to = ht_opt_root_find(o, k->to);
    if (from && to) {
        to->exists = true;
        to->step = to->pub_step = to->durable_step = from->pub_step;
        if (k->clone) {
            const struct ht_optim_config *config = k->clone->config;
            to->config = to->published_config = *config;
            to->configured = true;
            to->written_bytes = ht_scope_written_bytes(o->store, to->id);
            o->words_changes++;
        }
        ht_opt_put_root(ht_tx_records(tx), to);
        ht_list_for_each_entry(p, &from->params, const struct ht_param, of_root) {
            struct ht_param *twin = ht_opt_param_find(o, ht_copy_of(k, p->oid));
            if (twin && p->pub.exists)
                put_twin(p, twin, k, tx);
            if (twin && k->clone) {
                /* The objects of a clone's parameter are there, and not in use yet. */
                twin->obj = ht_obj_get(twin->o->store, twin->oid);
                twin->gone = !twin->obj || ht_opt_state_load(twin);
                ht_opt_totals_update(twin);
            }
        }
    }
    unlock(o);
}
