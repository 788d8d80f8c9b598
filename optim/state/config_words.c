/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config_words.c - the words for a parameter's gradients: those of its root, amended by directories and the file.
 *
 * The layer that owns the names has the amending words (hooks.override). They are read without the lock, so changes are
 * counted: an answer holds while the count is the same. A step knows the changes up to its opening; later changes are
 * for the next step, for every parameter alike.
 */
#include "optim/rules/sections.h"
#include "optim/state/param.h"
#include "optim/state/root.h"

uint64_t ht_optim_words_change(struct ht_optim *o)
{
    lock(o);
    uint64_t number = ++o->words_changes;
    o->form_changes++;
    unlock(o);
    return number;
}

uint64_t ht_optim_words_as_of(struct ht_optim *o, uint64_t id)
{
    lock(o);
    const struct ht_root *root = ht_opt_root_find(o, id);
    uint64_t number = root && root->open ? root->open_words : UINT64_MAX;
    unlock(o);
    return number;
}

static int ask_words(struct ht_optim *o, uint64_t oid, uint64_t as_of, const struct ht_optim_config *base,
                     struct ht_optim_config *out, struct ht_optim_sections *sections, char err[HT_OPTIM_ERROR_MAX])
{
    *out = *base;
    return o->hooks.override ? o->hooks.override(o->hooks.ctx, oid, as_of, base, out, sections, err) : 0;
}

/* Latched words are not read again. */
bool ht_opt_words_current(const struct ht_param *p, const struct ht_words *w)
{
    const struct ht_root *root = p->root;

    return p->has_grad || (w->read && w->step == root->open && (root->open || w->changes == p->o->words_changes));
}

void ht_opt_words_read(struct ht_param *p, struct ht_words *w)
{
    struct ht_root *root = p->root;
    struct ht_optim *o = p->o;
    struct ht_optim_config base = root->open ? root->latched : root->config;
    uint64_t as_of = root->open ? root->open_words : UINT64_MAX;

    w->read = true;
    w->step = root->open;
    w->changes = o->words_changes;
    unlock(o);
    ht_optim_sections_free(&w->sections);
    w->error = ask_words(o, p->oid, as_of, &base, &w->config, &w->sections, w->why);
    lock(o);
}

int ht_optim_words_of(struct ht_optim *o, uint64_t id, uint64_t oid, struct ht_optim_config *out,
                      char err[HT_OPTIM_ERROR_MAX])
{
    struct ht_optim_config base;

    lock(o);
    const struct ht_root *root = ht_opt_root_find(o, id);
    bool found = root && root->exists && root->configured; /* no kept step is */
    if (found)
        base = root->config;
    unlock(o);
    if (!found)
        return -ENOENT;
    if (oid)
        return ask_words(o, oid, UINT64_MAX, &base, out, NULL, err);
    *out = base;
    return 0;
}

/* State may be reset after the decision. */
bool ht_opt_is_decided(const struct ht_param *p)
{
    return p->decided == p->root->decided && p->cur.exists && p->cur.t + 1 == p->decided_t &&
        ht_opt_layout_keeps(&p->cur.layout, p->decided_scalars.kernel);
}

bool ht_optim_state_fits(struct ht_optim *o, uint64_t oid, const struct ht_optim_config *config)
{
    lock(o);
    const struct ht_param *p = ht_opt_param_find(o, oid);
    bool fits = true;
    if (p && !p->gone && p->cur.exists) {
        struct ht_layout layout = ht_opt_layout(config, p->cur.dtype, p->cur.elements);
        fits = ht_opt_same_rule_state(&layout, &p->cur.layout);
    }
    unlock(o);
    return fits;
}

unsigned ht_optim_state_bits(struct ht_optim *o, uint64_t oid)
{
    static const unsigned bits[HT_FORMS] = {32, 16, 8, 8};
    unsigned least = 0;

    lock(o);
    const struct ht_param *p = ht_opt_param_find(o, oid);
    bool exists = p && !p->gone && p->cur.exists;
    for (unsigned i = 0; exists && i < p->cur.layout.count - ht_opt_master_kinds(&p->cur.layout); i++)
        least = least && least < bits[p->cur.layout.form[i]] ? least : bits[p->cur.layout.form[i]];
    unlock(o);
    return least;
}
