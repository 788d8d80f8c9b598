/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/state/sections.h"

#include "optim/rules/forms.h"
#include "optim/rules/newton_schulz.h"
#include "optim/rules/sections.h"
#include "optim/state/param.h"

typedef unsigned long long ull;

#define NS_BYTES_MAX (256ull << 20) /* of memory, for each worker */
enum { ROOM_SHARE_MAX = 4 };        /* times as much as is needed may stay from step to step */

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

static uint64_t bytes_of(size_t room)
{
    return sizeof(struct ht_param_sections) + room * sizeof(struct ht_param_section);
}

uint64_t ht_opt_sections_bytes(const struct ht_param *p)
{
    return p->sections ? bytes_of(p->sections->room) : 0;
}

int ht_opt_sections_reserve(struct ht_param *p, size_t count)
{
    if (!count || (p->sections && p->sections->room / ROOM_SHARE_MAX > count))
        ht_opt_sections_free(p);
    uint64_t had = ht_opt_sections_bytes(p);
    if (!count || (had && count <= p->sections->room))
        return 0;
    struct ht_param_sections *s = realloc(p->sections, bytes_of(count));
    if (!s)
        return -ENOMEM;
    if (!had)
        *s = (struct ht_param_sections){.count = 0};
    s->room = (uint32_t)count;
    p->sections = s;
    p->o->meta_bytes += bytes_of(count) - had;
    return 0;
}

void ht_opt_sections_free(struct ht_param *p)
{
    p->o->meta_bytes -= ht_opt_sections_bytes(p);
    free(p->sections);
    p->sections = NULL;
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
