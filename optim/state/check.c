/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - do the records of roots, parameters and their state fit together? And fsck's treatment of those that do
 * not.
 *
 * A mount refuses contradictions. A store that leaves out (fsck's) takes them out of memory and remembers them.
 */
#include <math.h>
#include <stdarg.h>

#include "optim/state/records.h"
#include "optim/state/root.h"

struct problem {
    struct ht_list link;
    const char *code;
    char text[160];
};

void ht_opt_problems_free(struct ht_optim *o)
{
    ht_list_for_each_safe(pos, next, &o->problems)
        free(ht_list_entry(pos, struct problem, link));
}

/* Reports the problem and refuses, or remembers it: 1. */
HT_PRINTF(3, 4) static int note_problem(struct ht_optim *o, const char *code, const char *fmt, ...)
{
    struct problem *p = calloc(1, sizeof(*p));
    va_list args;

    if (!p)
        return -ENOMEM;
    va_start(args, fmt);
    vsnprintf(p->text, sizeof(p->text), fmt, args);
    va_end(args);
    p->code = code;
    ht_list_add_tail(&o->problems, &p->link);
    if (ht_store_leaves_out(o->store))
        return 1;
    ht_error("log: %s (%s)", p->text, code);
    return -EUCLEAN;
}

/* ---------------------------------------------------------------- at mount */

/* False: there is no such object. */
static bool stat_object(const struct ht_optim *o, uint64_t oid, struct ht_obj_stat *out)
{
    struct ht_obj *obj = ht_obj_get(o->store, oid);

    if (obj)
        ht_obj_stat(obj, out);
    ht_obj_put(obj);
    return obj != NULL;
}

static bool state_fits(const struct ht_param *p, unsigned i)
{
    uint8_t kind = p->cur.layout.kind[i], form = p->cur.layout.form[i];
    struct ht_obj_stat st = {0};

    return stat_object(p->o, p->cur.oid[i], &st) && st.size == ht_opt_state_size(&p->shape, kind, form) &&
        st.chunk_bytes == ht_opt_state_chunk_bytes(&p->shape, kind) && st.scope == p->root->id;
}

/* 1: the parameter has a problem, and it was reported. */
static int check_param(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (!p->root->exists)
        return note_problem(p->o, "OPT-ROOT", "parameter %llu belongs to model root %llu, which is none", (ull)p->oid,
                            (ull)p->root->id);
    for (unsigned i = 0; i < p->cur.layout.count; i++)
        if (!state_fits(p, i))
            return note_problem(p->o, "OPT-STATE",
                                "%s of parameter %llu (object %llu) is not as its parameter needs it",
                                ht_state_word(p->cur.layout.kind[i]), (ull)p->oid, (ull)p->cur.oid[i]);
    return 0;
}

/* Is it the object of an earlier step, too, or a parameter, or state? It is deleted with its step. */
static bool is_other(const struct ht_root *r, size_t i) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t oid = r->redo.step[i].oid;

    for (size_t k = 0; k < i; k++)
        if (r->redo.step[k].oid == oid)
            return true;
    return ht_opt_param_find(r->o, oid) || ht_id_find(&r->o->states_by_oid, oid);
}

/* A step's number follows that of the step before it, and its object has the summary. */
static bool redo_fits(const struct ht_root *r, size_t i) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_redo_step *s = &r->redo.step[i];
    struct ht_obj_stat st = {0};

    return stat_object(r->o, s->oid, &st) && r->exists && s->step == r->pub_step + i + 1 && st.scope == r->id &&
        s->at <= st.size && s->bytes <= st.size - s->at;
}

/* Steps after one with a problem are no use. */
static int check_redo(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc = 0;

    for (size_t i = 0; i < r->redo.steps; i++) {
        if (redo_fits(r, i) && !is_other(r, i))
            continue;
        rc = note_problem(r->o, "OPT-REDO",
                          "step %llu of model root %llu (object %llu) does not follow the step before it",
                          (ull)r->redo.step[i].step, (ull)r->id, (ull)r->redo.step[i].oid);
        r->redo.steps = i;
    }
    r->durable_step = r->pub_step + r->redo.steps;
    return rc;
}

int ht_opt_check_states(struct ht_optim *o)
{
    int rc = 0;

    ht_list_for_each(pos, &o->roots) {
        int one = check_redo(ht_list_entry(pos, struct ht_root, all));
        rc = rc < 0 ? rc : one;
    }

    ht_list_for_each_entry_safe(p, &o->params, struct ht_param, all) {
        int one = check_param(p);
        if (one > 0)
            ht_opt_param_free(p);
        rc = rc < 0 ? rc : one;
    }
    return rc < 0 ? rc : 0;
}

/* -------------------------------------------------------------------- fsck */

/* NaN stands for a block that is not finite. bytes end where zeros begin. */
static bool scale_sane(const uint8_t *range, size_t len, uint64_t scale_at, uint64_t codes_at, uint64_t codes)
{
    float scale = 0;

    if (scale_at < len)
        memcpy(&scale, range + scale_at, ht_min_u64(sizeof(scale), len - scale_at));
    if (isinf(scale) || (!isnan(scale) && signbit(scale)))
        return false;
    return scale != 0 || codes_at >= len || ht_is_zero(range + codes_at, ht_min_u64(codes, len - codes_at));
}

static bool state_sane(const struct ht_param *p, unsigned i, uint64_t range, const uint8_t *content, size_t len)
{
    uint8_t kind = p->cur.layout.kind[i], form = p->cur.layout.form[i];
    struct ht_param_shape shape;

    if (form == HT_FORM_F32 || ht_opt_state_shape(p, &shape))
        return true;
    if (range >= shape.range_count)
        return false;
    uint64_t elements = ht_opt_range_elements(&shape, range), block = ht_form_block(form);
    bool sane = len <= ht_opt_state_range_bytes(kind, form, elements);
    for (uint64_t e = 0; sane && block > 1 && e < elements; e += block)
        sane = scale_sane(content, len, ht_form_scales_at(form, elements) + e / block * sizeof(float), e,
                          ht_min_u64(block, elements - e));
    return sane;
}

bool ht_optim_state_sane(struct ht_optim *o, uint64_t oid, uint64_t chunk, const uint8_t *content, size_t len)
{
    lock(o);
    struct ht_id_link *found = ht_id_find(&o->states_by_oid, oid);
    const struct ht_state_link *l = found ? ht_container_of(found, struct ht_state_link, by_oid) : NULL;
    bool sane = !l || state_sane(l->param, (unsigned)(l - l->param->state_link), chunk, content, len);
    unlock(o);
    return sane;
}

uint64_t ht_optim_formed(struct ht_optim *o)
{
    uint64_t count = 0;

    lock(o);
    ht_list_for_each_entry(p, &o->params, const struct ht_param, all)
        count += p->cur.exists && ht_opt_layout_has_forms(&p->cur.layout);
    unlock(o);
    return count;
}

size_t ht_optim_check(struct ht_optim *o, void (*report)(void *ctx, const char *code, const char *text), void *ctx)
{
    size_t n = 0;

    ht_list_for_each_entry(p, &o->problems, const struct problem, link) {
        report(ctx, p->code, p->text);
        n++;
    }
    return n;
}

int ht_optim_walk(struct ht_optim *o, int (*fn)(void *ctx, const struct ht_optim_entry *e), void *ctx)
{
    int rc = 0;

    lock(o);
    ht_list_for_each_entry(r, &o->roots, const struct ht_root, all)
        if (r->exists && !rc)
            rc = fn(ctx, &(struct ht_optim_entry){.root = r->id});
    ht_list_for_each_entry(p, &o->params, const struct ht_param, all)
        if (p->cur.exists && !rc)
            rc = fn(ctx, &(struct ht_optim_entry){p->root->id, p->oid, p->cur.layout.count, p->cur.oid});
    unlock(o);
    return rc;
}

void ht_optim_forget(struct ht_optim *o, uint64_t root, uint64_t parameter)
{
    lock(o);
    struct ht_root *r = ht_opt_root_find(o, root);
    struct ht_param *p = parameter ? ht_opt_param_find(o, parameter) : NULL;
    if (p)
        ht_opt_param_free(p);
    else if (r && !parameter)
        ht_opt_root_forget(r);
    unlock(o);
}

uint64_t ht_optim_redo_cut(struct ht_optim *o, uint64_t root, uint64_t step)
{
    uint64_t oid = 0;

    lock(o);
    struct ht_root *r = ht_opt_root_find(o, root);
    struct ht_redo *redo = r ? &r->redo : NULL;
    if (redo && redo->steps && redo->step[redo->steps - 1].step >= step)
        oid = redo->step[--redo->steps].oid;
    unlock(o);
    return oid;
}

/* Rules of the same text for state in 32, 16 and 8 bits; small parameters have the usual bound. */
#define IN_ALL_BITS(text)                                 \
    {                                                     \
        text, text " state_bits=16", text " state_bits=8" \
    }
enum { BITS = 3 };

/* The place of the text for the fewest bits of a root's states. */
static unsigned bits_of(const struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    unsigned place = 0;

    ht_list_for_each_entry(p, &r->params, const struct ht_param, of_root)
        for (unsigned i = 0; p->cur.exists && i < p->cur.layout.count; i++)
            place = (unsigned)ht_max_u64(place, ht_min_u64(p->cur.layout.form[i], BITS - 1));
    return place;
}

const char *ht_optim_root_config(struct ht_optim *o, uint64_t root)
{
    static const char *const text[][BITS] = {IN_ALL_BITS("adamw lr=0"), IN_ALL_BITS("lion lr=0"),
                                             IN_ALL_BITS("sgd lr=0 momentum=0.9"), IN_ALL_BITS("adagrad lr=0"),
                                             IN_ALL_BITS("sgd lr=0")};
    const char *found = text[0][0];

    lock(o);
    struct ht_root *r = ht_opt_root_find(o, root);
    const struct ht_param *p =
        r && !ht_list_empty(&r->params) ? ht_list_entry(r->params.next, struct ht_param, of_root) : NULL;
    for (size_t i = 0; p && p->cur.exists && i < HT_ARRAY_SIZE(text); i++) {
        struct ht_optim_config config;
        char err[HT_OPTIM_ERROR_MAX];
        if (ht_optim_config_parse(text[i][0], strlen(text[i][0]), &config, err))
            continue;
        struct ht_layout l = ht_opt_layout(&config, p->cur.dtype, p->cur.elements);
        if (!ht_opt_same_rule_state(&l, &p->cur.layout))
            continue;
        found = text[i][bits_of(r)];
        break;
    }
    unlock(o);
    return found;
}
