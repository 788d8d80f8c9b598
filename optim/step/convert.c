/* SPDX-License-Identifier: Apache-2.0 */
/*
 * convert.c - state changes its form at a boundary, because its words have another state_bits.
 *
 *   words change          form_changes of the optimizer grows
 *   boundary, durable     new objects for all state that is to change, with their space, or for none
 *                         content, in windows
 *                         for each parameter: new objects in place of the old ones, which are deleted
 *   publish               references, deletions and the parameter's record, in one transaction
 *
 * Under the gate, while writers of gradients wait and no update is queued. A crash before the publication finds the old
 * state, an abort takes it back. For logged steps a conversion is a change from outside: the commit is full.
 */

#include "tiering/base/fault.h"
#include "optim/state/coded.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/step/step_priv.h"

/* A parameter that changes; a reference. */
struct change {
    struct ht_param *p;
    struct ht_param_shape shape;
    struct ht_layout was, layout;
    struct ht_obj *obj[HT_STATES_MAX]; /* new ones; NULL: that state stays */
    uint64_t oid[HT_STATES_MAX];
};

struct changes {
    struct ht_root *root;
    struct change *of;
    size_t count;
    uint64_t oid; /* of the parameter that failed */
};

/* All parameters with state. */
static int list_params(struct changes *c) HT_REQUIRES(HT_LOCK_OPTIM)
{
    size_t count = 0;

    ht_list_for_each_entry(p, &c->root->params, const struct ht_param, of_root)
        count += !p->gone && p->cur.exists;
    c->of = count ? calloc(count, sizeof(*c->of)) : NULL;
    if (count && !c->of)
        return -ENOMEM;
    ht_list_for_each_entry(p, &c->root->params, struct ht_param, of_root) {
        if (p->gone || !p->cur.exists)
            continue;
        p->refs++;
        struct change *one = &c->of[c->count++];
        *one = (struct change){.p = p, .was = p->cur.layout, .layout = p->cur.layout};
        if (ht_opt_state_shape(p, &one->shape)) /* no record says so */
            return -EUCLEAN;
    }
    return 0;
}

/* What the words want of the state that is there. False: what it has, or words that do not fit it. */
static bool find_layout(const struct changes *c, struct change *one)
{
    struct ht_param *p = one->p;
    struct ht_optim_config config;
    char why[HT_OPTIM_ERROR_MAX];

    if (ht_optim_words_of(p->o, c->root->id, p->oid, &config, why))
        return false;
    lock(p->o);
    struct ht_layout want = ht_opt_layout(&config, p->cur.dtype, p->cur.elements);
    bool fits = !p->gone && p->cur.exists && ht_opt_same_rule_state(&want, &p->cur.layout);
    unlock(p->o);
    bool changes = false;
    for (unsigned i = 0; fits && i < one->layout.count - ht_opt_master_kinds(&one->layout); i++) {
        changes |= one->layout.form[i] != want.form[i];
        one->layout.form[i] = want.form[i];
    }
    return changes;
}

/* Without those that stay as they are. */
static void choose(struct changes *c)
{
    size_t kept = 0;

    for (size_t i = 0; i < c->count; i++) {
        if (find_layout(c, &c->of[i]))
            c->of[kept++] = c->of[i];
        else
            ht_opt_param_put(c->of[i].p);
    }
    c->count = kept;
}

static int make_objects(struct change *one)
{
    struct ht_param *p = one->p;
    int rc = ht_opt_layout_prepare(p, &one->layout);

    if (!rc) {
        lock(p->o);
        rc = p->gone ? 0 : ht_opt_state_load(p);
        unlock(p->o);
    }
    for (unsigned i = 0; !rc && i < one->layout.count; i++) {
        if (one->layout.form[i] == one->was.form[i])
            continue;
        rc = ht_opt_state_create_one(p, &one->shape, one->layout.kind[i], one->layout.form[i], &one->oid[i],
                                     &one->obj[i]);
        if (!rc)
            rc = ht_obj_set_derived(one->obj[i], true);
    }
    return rc;
}

static int convert_one(const struct change *one, unsigned i)
{
    struct ht_param *p = one->p;
    struct ht_opt_coded from, to;

    lock(p->o);
    bool there = !p->gone && p->cur.exists && !ht_opt_coded_get(p, i, &from);
    unlock(p->o);
    if (!there)
        return 0; /* its file was deleted: nothing is adopted */
    to = from;
    to.form = one->layout.form[i];
    to.obj = one->obj[i];
    int rc = ht_opt_coded_convert(&from, &to);
    ht_opt_coded_put(&from);
    return rc;
}

/* The old objects are deleted, but where the parameter is gone: then the new ones are. */
static void adopt(struct change *one, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = one->p;
    bool gone = p->gone || !p->cur.exists;

    for (unsigned i = 0; i < one->layout.count; i++) {
        struct ht_obj *old = p->state[i];
        if (!one->obj[i])
            continue;
        if (gone) {
            ht_obj_delete(one->obj[i], tx);
            continue;
        }
        ht_obj_delete(old, tx);
        p->state[i] = one->obj[i];
        p->cur.oid[i] = one->oid[i];
        one->obj[i] = old;
    }
    if (gone)
        return;
    p->cur.layout = one->layout;
    p->rewrites++;
    p->root->redo.gap = true; /* logged steps do not say so */
    ht_opt_totals_update(p);
}

/* New objects that nobody has adopted, after an error. */
static void unmake(struct changes *c)
{
    for (size_t i = 0; i < c->count; i++)
        if (ht_opt_delete_objects(c->root->o->store, c->of[i].obj, HT_STATES_MAX))
            ht_opt_state_not_deleted(c->of[i].p);
}

static int adopt_all(struct changes *c)
{
    struct ht_optim *o = c->root->o;
    struct ht_tx *tx;
    int rc = ht_tx_begin(o->store, 0, &tx);

    if (rc) {
        unmake(c);
        return rc;
    }
    lock(o);
    for (size_t i = 0; i < c->count; i++)
        adopt(&c->of[i], tx);
    unlock(o);
    return ht_tx_commit(tx, NULL);
}

static int convert(struct changes *c)
{
    int rc = 0;

    for (size_t i = 0; !rc && i < c->count; i++) {
        c->oid = c->of[i].p->oid;
        rc = make_objects(&c->of[i]);
    }
    for (size_t i = 0; !rc && i < c->count; i++) {
        c->oid = c->of[i].p->oid;
        for (unsigned k = 0; !rc && k < c->of[i].layout.count; k++)
            rc = c->of[i].obj[k] ? convert_one(&c->of[i], k) : 0;
    }
    if (!rc)
        rc = ht_fault(HT_FAULT_OPTIM_CONVERT);
    if (rc)
        unmake(c);
    else
        rc = adopt_all(c);
    return rc;
}

static void report(const struct changes *c, int rc)
{
    const char *why = rc == -ENOSPC ? "there is no space for both forms"
        : rc == -ERANGE             ? "a second moment is negative"
                                    : strerror(-rc);

    ht_opt_refuse(
        c->root, HT_EVENT_COMMIT_FAILED, c->oid,
        "its state is not converted to other state_bits: %s; nothing has changed, and the step is not published; "
        "set state_bits back, or try it again",
        why);
}

int ht_opt_convert(struct ht_root *root)
{
    struct ht_optim *o = root->o;
    struct changes c = {.root = root};
    uint32_t seen = o->form_changes;

    if (root->forms_seen == seen + 1 || root->ending)
        return 0;
    int rc = list_params(&c);
    unlock(o);
    if (!rc)
        choose(&c);
    if (!rc && c.count)
        rc = convert(&c);
    if (rc)
        report(&c, rc);
    for (size_t i = 0; i < c.count; i++) {
        for (unsigned k = 0; k < HT_STATES_MAX; k++)
            ht_obj_put(c.of[i].obj[k]);
        ht_opt_param_put(c.of[i].p);
    }
    free(c.of);
    lock(o);
    if (!rc)
        root->forms_seen = seen + 1;
    return rc;
}
