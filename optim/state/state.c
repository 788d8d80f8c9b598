/* SPDX-License-Identifier: Apache-2.0 */
/*
 * state.c - the life of a parameter's state objects.
 *
 * State appears with the first frozen gradient (or the first byte written to a state file), wholly or not at all. With
 * it comes the space for one rewrite of state and parameter. Reset, and the end of the parameter or of the root, delete
 * it. They do so in the scope of the root, so that abort brings it back.
 *
 * Without a walk it is known to which parameter an object belongs as state (for fsck, and for the names in events and
 * traces), and what all parameters of a root have together. Sums of gradients (accumulate) change in the store, beside
 * the optimizer. So root.c adds their bytes when it is asked for them, over the parameters that have one.
 */
#include "tiering/base/mutant.h"
#include "optim/state/records.h"
#include "optim/state/root.h"

/* ------------------------------------------------------------------ layout */

struct ht_layout ht_opt_layout(const struct ht_optim_config *config, uint8_t dtype, uint64_t elements)
{
    enum ht_kernel kernel = ht_rule_kernel(config);
    struct ht_layout l = {.count = (uint8_t)ht_kernel_states(kernel)};

    memcpy(l.kind, ht_kernel_kinds(kernel), l.count);
    for (unsigned i = 0; i < l.count && elements >= config->state_bits_min; i++)
        l.form[i] = ht_rule_form(config, l.kind[i]);
    if (dtype == HT_DTYPE_BF16) {
        l.kind[l.count++] = HT_STATE_MASTER_LOW;
        l.kind[l.count++] = HT_STATE_MASTER_BLOCKS;
    } else if (ht_dtype_trained_bytes(dtype) == 2) {
        l.kind[l.count++] = HT_STATE_MASTER;
    }
    return l;
}

unsigned ht_opt_master_kinds(const struct ht_layout *l)
{
    if (l->count >= 1 && l->kind[l->count - 1] == HT_STATE_MASTER)
        return 1;
    return l->count >= 2 && l->kind[l->count - 2] == HT_STATE_MASTER_LOW &&
            l->kind[l->count - 1] == HT_STATE_MASTER_BLOCKS
        ? 2
        : 0;
}

bool ht_opt_same_layout(const struct ht_layout *a, const struct ht_layout *b)
{
    return a->count == b->count && !memcmp(a->kind, b->kind, a->count) && !memcmp(a->form, b->form, a->count);
}

bool ht_opt_layout_has_forms(const struct ht_layout *l)
{
    for (unsigned i = 0; i < l->count; i++)
        if (l->form[i])
            return true;
    return false;
}

static uint32_t mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

/*
 * The same in each store, so that a copy of the model that came as files rounds alike. Parameters of one size share
 * their hashes, but not the bits that these are added to.
 */
static uint32_t salt_of(const struct ht_param *p)
{
    uint32_t salt = mix((uint32_t)p->shape.elements ^ mix((uint32_t)(p->shape.elements >> 32) + p->shape.dtype));

    return salt ? salt : 1;
}

uint32_t ht_opt_layout_mark(const struct ht_layout *l)
{
    uint32_t mark = l->salt;

    if (!ht_opt_layout_has_forms(l))
        return 0;
    for (unsigned i = 0; i < l->count; i++)
        mark = mix(mark ^ ((uint32_t)l->kind[i] << 8 | l->form[i]));
    return mark ? mark : 1;
}

bool ht_opt_same_rule_state(const struct ht_layout *a, const struct ht_layout *b)
{
    unsigned count = a->count - ht_opt_master_kinds(a);

    return count == b->count - ht_opt_master_kinds(b) && !memcmp(a->kind, b->kind, count);
}

bool ht_opt_layout_keeps(const struct ht_layout *l, enum ht_kernel kernel)
{
    unsigned count = ht_kernel_states(kernel);

    return count + ht_opt_master_kinds(l) == l->count && !memcmp(ht_kernel_kinds(kernel), l->kind, count);
}

/* ------------------------------------------------------------------- state */

void ht_opt_put_state(struct ht_param *p)
{
    for (unsigned i = 0; i < HT_STATES_MAX; i++) {
        ht_obj_put(p->state[i]);
        p->state[i] = NULL;
    }
}

void ht_opt_param_reclaim(struct ht_param *p)
{
    if (!p->gone || p->pending)
        return;
    ht_opt_coverage_clear(p, false);
    if (p->grad)
        ht_obj_unprotect(p->grad);
    ht_obj_put(p->obj);
    p->obj = NULL;
    ht_opt_put_state(p);
}

int ht_opt_object_create(struct ht_store *s, uint64_t scope, uint32_t chunk_bytes, struct ht_obj **out)
{
    struct ht_obj_attr attr = {
        .oid = ht_store_new_id(s),
        .chunk_bytes = chunk_bytes,
        .obj_class = scope ? HT_CLASS_DURABLE : HT_CLASS_SCRATCH,
        .scope = scope,
    };

    return ht_obj_create(s, &attr, out);
}

int ht_opt_state_create_one(struct ht_param *p, const struct ht_param_shape *shape, uint8_t kind, uint8_t form,
                            uint64_t *out_oid, struct ht_obj **out_obj)
{
    uint64_t bytes = ht_opt_state_size(shape, kind, form);
    int rc = ht_opt_object_create(p->o->store, p->root->id, ht_opt_state_chunk_bytes(shape, kind), out_obj);

    if (rc)
        return rc;
    *out_oid = ht_obj_id(*out_obj);
    rc = ht_obj_set_used(*out_obj, ht_opt_state_used_bytes(shape, kind, form));
    if (!rc)
        rc = ht_obj_truncate(*out_obj, bytes);
    if (!rc)
        rc = ht_obj_rewrite_reserve(*out_obj, bytes);
    return rc;
}

void ht_opt_not_reserved(const struct ht_param *p, const char *text)
{
    ht_opt_event(HT_EVENT_NOT_RESERVED, p->oid, "%s", text);
}

void ht_opt_state_not_deleted(const struct ht_param *p)
{
    ht_opt_event(HT_EVENT_DELETE_FAILED, p->oid, "some of its optimizer state is not there and cannot be deleted");
}

int ht_opt_delete_objects(struct ht_store *s, struct ht_obj *const *obj, unsigned count)
{
    struct ht_tx *tx;
    int rc = ht_tx_begin(s, 0, &tx);

    if (rc)
        return rc;
    for (unsigned i = 0; i < count; i++)
        if (obj[i])
            ht_obj_delete(obj[i], tx);
    return ht_tx_commit(tx, NULL);
}

/* Giving reservations back cannot fail. */
static void unmake_objects(struct ht_param *p, struct ht_obj *of, struct ht_obj *obj[HT_STATES_MAX])
{
    lock(p->o);
    if (ht_obj_rewrite_reserve(of, 0))
        ht_opt_not_reserved(p, "its reservation stays");
    if (!p->pub.exists)
        ht_opt_record_unreserve(p);
    unlock(p->o);
    /* No other thread has seen the objects. */
    if (ht_opt_delete_objects(p->o->store, obj, HT_STATES_MAX))
        ht_event(HT_EVENT_DELETE_FAILED, NULL,
                 "optimizer state that could not be made stays until the next mount: the log has failed");
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        ht_obj_put(obj[i]);
}

/* Would a crash bring its state back, and with it logged steps that need space? */
static bool may_come_back(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return p->pub.exists && !HT_MUTANT("reset-unreserved");
}

/*
 * A gradient may have to leave memory, too. It is never published, so one copy is enough, but a rewrite reserve is for
 * two: half the size reserves one.
 */
int ht_opt_grad_reserve(struct ht_param *p)
{
    uint64_t each = ht_max_u64(p->shape.g_bytes, p->redo_g_bytes), none = 0;
    uint64_t bytes = ht_max_u64(p->cur.exists ? p->shape.elements : 0, may_come_back(p) ? p->pub.elements : 0) * each;
    uint64_t *aside = p->root->redo.recovering ? &p->o->replay_room_bytes : &none;
    /* Sums have theirs from the first gradient of a step on; giving it back cannot fail. */
    int rc = p->sum && !p->cur.exists ? ht_obj_rewrite_reserve(p->sum, 0) : 0;

    if (!rc && p->grad)
        rc = ht_obj_rewrite_reserve_aside(p->grad, ht_div_up(bytes, 2), aside);
    p->unreserved |= rc != 0;
    return rc;
}

int ht_opt_rewrites_reserve(struct ht_param *p)
{
    const struct ht_layout *l = &p->cur.layout;
    int rc = 0;

    for (unsigned i = 0; !rc && i < l->count; i++)
        rc = p->state[i] ? ht_obj_rewrite_reserve(p->state[i], ht_opt_state_size(&p->shape, l->kind[i], l->form[i]))
                         : -ESTALE;
    if (!rc && p->cur.exists && p->obj)
        rc = ht_obj_rewrite_reserve(p->obj, p->cur.elements * ht_dtype_trained_bytes(p->cur.dtype));
    if (!rc)
        rc = ht_opt_grad_reserve(p);
    p->unreserved = rc != 0;
    return rc;
}

int ht_opt_state_unreserve(struct ht_param *p)
{
    if (may_come_back(p))
        return 0;
    int rc = p->obj ? ht_obj_rewrite_reserve(p->obj, 0) : 0;

    return rc ? rc : ht_opt_grad_reserve(p);
}

/* All objects and reservations, or none. */
static int make_objects(struct ht_param *p, struct ht_obj *of, struct ht_param_meta *meta,
                        struct ht_obj *obj[HT_STATES_MAX])
{
    uint64_t bytes = p->shape.elements * p->shape.p_bytes;
    int rc = 0;

    for (unsigned i = 0; !rc && i < meta->layout.count; i++)
        rc = ht_opt_state_create_one(p, &p->shape, meta->layout.kind[i], meta->layout.form[i], &meta->oid[i], &obj[i]);
    if (!rc)
        rc = ht_obj_rewrite_reserve(of, bytes);
    for (unsigned i = 0; !rc && i < meta->layout.count; i++)
        rc = ht_obj_set_derived(obj[i], true);
    if (!rc)
        rc = ht_obj_set_derived(of, true);
    if (!rc) {
        lock(p->o);
        rc = ht_opt_record_reserve(p);
        unlock(p->o);
    }
    if (rc)
        unmake_objects(p, of, obj);
    return rc;
}

int ht_opt_layout_prepare(const struct ht_param *p, struct ht_layout *l)
{
    if (!ht_opt_layout_has_forms(l)) {
        l->salt = 0;
        return 0;
    }
    l->salt = l->salt ? l->salt : salt_of(p);
    return HT_MUTANT("form-unmarked") ? 0 : ht_store_need_features(p->o->store, HT_FEAT_REFUSE_FORMS);
}

/* Publishes the new objects in memory, unless the parameter has been deleted. */
static int adopt_state(struct ht_param *p, const struct ht_param_meta *meta, struct ht_obj *obj[HT_STATES_MAX])
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->gone)
        return -ESTALE;
    p->cur = *meta;
    memcpy(p->state, obj, sizeof(p->state));
    if (!HT_MUTANT("record-unseen"))
        p->root->redo.gap = true; /* logged steps say nothing of its record */
    int rc = ht_opt_grad_reserve(p);
    if (rc) {
        memset(&p->cur, 0, sizeof(p->cur));
        memset(p->state, 0, sizeof(p->state));
    }
    ht_opt_totals_update(p);
    return rc;
}

int ht_opt_state_create(struct ht_param *p, const struct ht_layout *layout)
{
    struct ht_obj *obj[HT_STATES_MAX] = {NULL};
    /* A reference of our own: the parameter may be deleted during the call. */
    struct ht_obj *of = ht_obj_get(p->o->store, p->oid);
    struct ht_param_meta meta = {
        .exists = true,
        .dtype = p->shape.dtype,
        .chunk_bytes = p->shape.chunk_bytes,
        .elements = p->shape.elements,
        .layout = *layout,
    };
    int rc = of ? ht_opt_layout_prepare(p, &meta.layout) : -ESTALE;

    if (!rc)
        rc = make_objects(p, of, &meta, obj);
    if (!rc) {
        lock(p->o);
        rc = adopt_state(p, &meta, obj);
        unlock(p->o);
        if (rc)
            unmake_objects(p, of, obj);
    }
    ht_obj_put(of);
    return rc;
}

void ht_opt_state_delete(struct ht_param *p, struct ht_tx *tx)
{
    if (p->cur.exists && ht_opt_state_load(p))
        ht_opt_state_not_deleted(p);
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        if (p->state[i])
            ht_obj_delete(p->state[i], tx);
    memset(&p->cur, 0, sizeof(p->cur));
    ht_opt_totals_update(p);
    /* A running update works on them still. */
    if (!p->pending)
        ht_opt_put_state(p);
}

int ht_opt_state_drop(struct ht_param *p)
{
    struct ht_optim *o = p->o;
    struct ht_tx *tx;
    int rc = ht_tx_begin(o->store, 0, &tx);

    if (rc)
        return rc;
    lock(o);
    rc = ht_opt_state_load(p);
    if (!rc)
        ht_opt_state_delete(p, tx);
    unlock(o);
    int closed = ht_tx_commit(tx, NULL);
    lock(o);
    if (!rc)
        rc = ht_opt_state_unreserve(p);
    unlock(o);
    return rc ? rc : closed;
}

/* References to cur's objects are there, and some are new: tells the store what they are. */
static int use_state(struct ht_param *p, bool edited) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_layout *l = &p->cur.layout;
    struct ht_param_shape shape;
    int rc = ht_opt_state_shape(p, &shape);

    for (unsigned i = 0; !rc && i < l->count; i++) {
        rc = ht_obj_set_used(p->state[i], ht_opt_state_used_bytes(&shape, l->kind[i], l->form[i]));
        if (!rc)
            rc = ht_obj_set_derived(p->state[i], edited);
    }
    return !rc && p->obj ? ht_obj_set_derived(p->obj, edited) : rc;
}

int ht_opt_state_load_as(struct ht_param *p, bool edited)
{
    bool loaded = p->cur.exists && !p->cur.layout.count; /* nothing tells whether it was before */

    for (unsigned i = 0; p->cur.exists && i < p->cur.layout.count; i++) {
        loaded |= !p->state[i];
        if (!p->state[i])
            p->state[i] = ht_obj_get(p->o->store, p->cur.oid[i]);
        if (!p->state[i])
            return -ESTALE;
    }
    return loaded ? use_state(p, edited) : 0;
}

int ht_opt_state_settle(struct ht_param *p)
{
    bool other = p->cur.exists && !p->block; /* its shape may be that of state that is gone */
    int rc = other ? ht_opt_state_shape(p, &p->shape) : 0;

    if (!rc)
        rc = ht_opt_state_load(p);
    return rc ? rc : ht_opt_rewrites_reserve(p);
}

static bool any_orphan(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(p, &root->params, const struct ht_param, of_root)
        if (p->gone && p->cur.exists)
            return true;
    return false;
}

int ht_opt_bury_orphans(struct ht_root *root)
{
    struct ht_optim *o = root->o;
    struct ht_tx *tx;

    lock(o);
    bool any = any_orphan(root);
    unlock(o);
    if (!any)
        return 0;
    int rc = ht_tx_begin(o->store, 0, &tx);
    if (rc)
        return rc;
    lock(o);
    ht_list_for_each_entry(p, &root->params, struct ht_param, of_root) {
        if (p->gone && p->cur.exists)
            ht_opt_state_delete(p, tx);
    }
    unlock(o);
    return ht_tx_commit(tx, NULL);
}

/* ------------------------------------------------------------------- owner */

static uint64_t oid_of(const struct ht_param *p, unsigned i)
{
    return p->cur.exists && i < p->cur.layout.count ? p->cur.oid[i] : 0;
}

/* A damaged log may name an object twice: the first parameter has it. Without memory the object has no owner. */
static void link_state(struct ht_param *p, unsigned i, uint64_t oid) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_state_link *l = &p->state_link[i];

    if (!oid || ht_id_find(&p->o->states_by_oid, oid))
        return;
    l->by_oid.id = oid;
    l->param = p;
    if (ht_id_insert(&p->o->states_by_oid, &l->by_oid))
        l->by_oid.id = 0;
}

static void unlink_state(struct ht_param *p, unsigned i) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->state_link[i].by_oid.id)
        ht_id_remove(&p->o->states_by_oid, &p->state_link[i].by_oid);
    p->state_link[i].by_oid.id = 0;
}

int ht_optim_state_owner(struct ht_optim *o, uint64_t oid, uint64_t *out_param, const char **out_name)
{
    lock(o);
    struct ht_id_link *found = ht_id_find(&o->states_by_oid, oid);
    if (found) {
        const struct ht_state_link *l = ht_container_of(found, struct ht_state_link, by_oid);
        *out_param = l->param->oid;
        *out_name = ht_state_word(l->param->cur.layout.kind[l - l->param->state_link]);
    }
    unlock(o);
    return found ? 0 : -ENOENT;
}

/* ------------------------------------------------------------------ totals */

struct ht_totals ht_opt_totals_of(const struct ht_param *p)
{
    struct ht_totals c = {0};
    struct ht_param_shape shape;

    if (!p->cur.exists || p->gone || ht_opt_state_shape(p, &shape))
        return c;
    c.parameters = 1;
    c.elements = shape.elements;
    c.param_bytes = shape.elements * shape.p_bytes;
    for (unsigned i = 0; i < p->cur.layout.count; i++)
        c.state_bytes += ht_opt_state_kept_bytes(&shape, p->cur.layout.kind[i], p->cur.layout.form[i]);
    return c;
}

static void count_param(struct ht_param *p, struct ht_totals now) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_totals *t = &p->root->totals;

    t->parameters += now.parameters - p->counted.parameters;
    t->state_bytes += now.state_bytes - p->counted.state_bytes;
    t->param_bytes += now.param_bytes - p->counted.param_bytes;
    t->elements += now.elements - p->counted.elements;
    p->counted = now;
}

void ht_opt_totals_update(struct ht_param *p)
{
    count_param(p, ht_opt_totals_of(p));
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        if (p->state_link[i].by_oid.id != oid_of(p, i))
            unlink_state(p, i);
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        if (!p->state_link[i].by_oid.id)
            link_state(p, i, oid_of(p, i));
}

void ht_opt_totals_remove(struct ht_param *p)
{
    count_param(p, (struct ht_totals){0});
    for (unsigned i = 0; i < HT_STATES_MAX; i++)
        unlink_state(p, i);
}
