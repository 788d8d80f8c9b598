/* SPDX-License-Identifier: Apache-2.0 */
/*
 * words.c - the words for a parameter's gradients: those of its root, amended by directories and the file; and the
 * numbers that they give to ranges of its elements.
 *
 * The layer that owns the names has the amending words (hooks.override). They are read without the lock, so changes are
 * counted: an answer holds while the count is the same. A step knows the changes up to its opening; later changes are
 * for the next step, for every parameter alike.
 */
#include "optim/rules/blocks.h"
#include "optim/state/param.h"
#include "optim/state/root.h"

#define NS_BYTES_MAX (256ull << 20) /* of memory, for each worker */
enum { ROOM_SHARE_MAX = 4 };        /* times as much as is needed may stay from step to step */

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

/* ---------------------------------------------------------------- sections */

static int refuse_section(const struct ht_optim_section *s, char why[HT_OPTIM_ERROR_MAX], const char *text,
                          uint64_t number)
{
    return ht_optim_refuse(why, -EINVAL, "%llu:%llu: %s%llu", (ull)s->begin, (ull)s->end, text, (ull)number);
}

/* Elements that share a scale in some state, which an update may change for all of them; 1: none do. */
static uint32_t block_of(const struct ht_layout *l)
{
    uint32_t block = 1;

    for (unsigned s = 0; s < l->count; s++)
        block = (uint32_t)ht_max_u64(block, ht_form_block(l->form[s]));
    return block;
}

/* Does an update of other elements keep the state of these? It is converted later, so its blocks count, too. */
static uint64_t cut_block(const struct ht_param *p, const struct ht_optim_section *s)
{
    struct ht_layout next = ht_opt_layout(&s->config, p->shape.dtype, p->shape.elements);
    uint64_t block = ht_max_u64(block_of(&next), block_of(&p->cur.layout));

    return s->begin % block || (s->end % block && s->end != p->shape.elements) ? block : 0;
}

int ht_opt_sections_check(const struct ht_param *p, const struct ht_optim_sections *s, char why[HT_OPTIM_ERROR_MAX])
{
    uint64_t t = p->cur.t;

    for (size_t i = 0; i < s->count; i++) {
        const struct ht_optim_section *v = &s->section[i];
        if (v->end > p->shape.elements)
            return refuse_section(v, why, "the range ends after the last element of the parameter, which has ",
                                  p->shape.elements);
        if (!v->config.frozen && v->config.missed > t)
            return refuse_section(v, why, "missed= is more than the steps of the parameter, which are ", t);
        uint64_t block = v->config.frozen ? cut_block(p, v) : 0;
        if (block)
            return refuse_section(v, why, "with state_bits=8 a frozen range begins and ends at multiples of ", block);
    }
    return 0;
}

int ht_opt_blocks_check(const struct ht_param *p, const struct ht_optim_config *c, char why[HT_OPTIM_ERROR_MAX])
{
    const struct ht_matrix *m = &c->matrix;
    uint64_t rows = m->rows, elements = rows * m->columns * m->count;

    if (c->rule != HT_RULE_MUON)
        return 0;
    if (!rows || elements != p->shape.elements)
        return ht_optim_refuse(why, -EINVAL, "muon: its shape has %llu elements, and the parameter %llu", (ull)elements,
                               (ull)p->shape.elements);
    for (uint32_t i = 1; i < c->muon_split.count; i++)
        rows = ht_max_u64(c->muon_split.of[i].rows, i == 1 ? c->muon_split.of[0].rows : rows);
    uint64_t bytes = ht_newton_schulz_bytes(rows, m->columns) + rows * m->columns * 2;
    if (c->ns_store && bytes > NS_BYTES_MAX)
        return ht_optim_refuse(
            why, -EINVAL,
            "muon ns=store: a block of %llu x %u takes %llu bytes to orthogonalise, and at most %llu are allowed: use "
            "ns=client",
            (ull)rows, m->columns, (ull)bytes, (ull)NS_BYTES_MAX);
    return 0;
}

/* ------------------------------------------------------------------ memory */

int ht_opt_sections_reserve(struct ht_param *p, size_t count)
{
    if (!count || (p->sections && p->sections->room / ROOM_SHARE_MAX > count))
        ht_opt_sections_free(p);
    uint64_t had = ht_opt_sections_bytes(p), bytes = sizeof(*p->sections) + count * sizeof(*p->sections->of);
    if (!count || (had && count <= p->sections->room))
        return 0;
    struct ht_param_sections *s = realloc(p->sections, bytes);
    if (!s)
        return -ENOMEM;
    if (!had)
        *s = (struct ht_param_sections){.count = 0};
    s->room = (uint32_t)count;
    p->sections = s;
    p->o->meta_bytes += bytes - had;
    return 0;
}

/* ---------------------------------------------------------------- of a step */

/* Of a frozen one no update uses the numbers: its count may be any. */
void ht_opt_sections_latch(struct ht_param *p, const struct ht_optim_sections *s)
{
    ht_opt_sections_clear(p);
    for (size_t i = 0; i < s->count; i++) {
        const struct ht_optim_section *v = &s->section[i];
        struct ht_param_section *to = &p->sections->of[i];
        *to = (struct ht_param_section){.begin = v->begin, .end = v->end, .frozen = v->config.frozen};
        ht_rule_scalars(&v->config, v->config.frozen ? 1 : p->cur.t + 1 - v->config.missed, &to->scalars);
    }
    if (p->sections)
        p->sections->count = (uint32_t)s->count;
}

void ht_opt_sections_clear(struct ht_param *p)
{
    if (p->sections)
        p->sections->count = p->sections->decided = 0;
}

int ht_opt_sections_add(struct ht_param *p, const struct ht_param_section *s, bool decided)
{
    const struct ht_param_sections *had = p->sections;
    uint32_t at = !had ? 0 : decided ? had->decided : had->count;

    if (at >= HT_SECTIONS_MAX)
        return -E2BIG;
    int rc = had && at < had->room ? 0 : ht_opt_sections_reserve(p, at ? 2 * (size_t)at : 4);
    if (rc)
        return rc;
    p->sections->of[at] = *s;
    *(decided ? &p->sections->decided : &p->sections->count) = at + 1;
    return 0;
}

uint32_t ht_opt_sections_count(const struct ht_param *p)
{
    return p->sections ? p->sections->count : 0;
}

void ht_opt_set_grad_factor(struct ht_param *p, float factor)
{
    p->scalars.grad_factor = factor;
    for (uint32_t i = 0; i < ht_opt_sections_count(p); i++)
        p->sections->of[i].scalars.grad_factor = factor;
}

const struct ht_scalars *ht_opt_scalars_at(const struct ht_param *p, uint64_t e, uint64_t *n)
{
    uint32_t at = 0, count = ht_opt_sections_count(p);

    HT_PARTITION_POINT(at, count, i, p->sections->of[i].end <= e);
    if (at == count)
        return &p->scalars;
    const struct ht_param_section *s = &p->sections->of[at];
    if (e < s->begin) {
        *n = ht_min_u64(*n, s->begin - e);
        return &p->scalars;
    }
    *n = ht_min_u64(*n, s->end - e);
    return s->frozen ? NULL : &s->scalars;
}
