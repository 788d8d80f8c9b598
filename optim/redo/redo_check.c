/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_check.c - for fsck: would a mount compute the logged steps again? Everything that a replay refuses is looked at
 * here, without the arithmetic.
 */

#include "tiering/base/sparse.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/redo/logged.h"

struct redo_check {
    struct ht_root *root;
    struct ht_obj *obj; /* of the step */
    uint64_t step, size;
    struct ht_redo_summary s;
    struct ht_param **param; /* in the order of the summary; NULL: deleted since */
    struct ht_param_shape *shape;
    bool *phases; /* the step of the parameter has two */
};

/* In the order in which a replay must find them: pieces of a range follow each other. */
struct place {
    uint32_t param;
    struct ht_redo_piece piece;
};

/* -------------------------------------------------------------- parameters */

static const char *check_param(struct redo_check *w, uint64_t i) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_redo_param want;
    uint64_t sections;

    if (ht_opt_redo_is_section(&w->s, i)) /* checked with its parameter */
        return NULL;
    if (ht_opt_redo_param_at(&w->s, i, &want))
        return "its summary has numbers that no update uses";
    if (ht_opt_redo_sections_of(&w->s, i, &sections))
        return "a parameter has numbers for ranges of elements that make no sense";
    struct ht_param *p = ht_opt_param_find(w->root->o, want.oid);
    if (!p)
        return NULL;
    struct ht_obj *file = ht_obj_get(w->root->o->store, want.oid);
    bool fits = p->root == w->root && file && ht_opt_redo_fits(p, file, p->redo_place, &want);
    ht_obj_put(file);
    if (!fits ||
        ht_opt_shape_of(&w->shape[i], want.elements * ht_dtype_trained_bytes(want.dtype), want.chunk_bytes, want.dtype,
                        want.grad_dtype))
        return "a parameter is not as this step found it";
    if (p->redo_at == w->step)
        return "its summary has a parameter twice";
    p->redo_at = w->step;
    w->param[i] = p;
    w->phases[i] = want.scalars.kernel == HT_KERNEL_MUON;
    unsigned both = w->phases[i] ? 2 * 2 : 0; /* bytes of an element in the objects of the two phases */
    p->redo_g_bytes = (uint8_t)ht_max_u64(p->redo_g_bytes, w->shape[i].g_bytes + both);
    return NULL;
}

/* ------------------------------------------------------------------ pieces */

static int by_place(const void *a, const void *b)
{
    const struct place *x = a, *y = b;

    if (x->param != y->param)
        return x->param < y->param ? -1 : 1;
    if (x->piece.range != y->piece.range)
        return x->piece.range < y->piece.range ? -1 : 1;
    if (x->piece.ortho != y->piece.ortho)
        return x->piece.ortho ? 1 : -1;
    return x->piece.begin < y->piece.begin ? -1 : x->piece.begin > y->piece.begin;
}

static bool same_range(const struct place *a, const struct place *b)
{
    return a->param == b->param && a->piece.range == b->piece.range && a->piece.ortho == b->piece.ortho;
}

/*
 * Of pieces in their order, which do not overlap: has each range of a step in two phases a whole gradient and a whole
 * orthogonalised update, and no other range the latter?
 */
static bool phases_fit(const struct redo_check *w, const struct place *list, uint64_t count)
{
    uint64_t elements[2], i = 0;

    while (i < count) {
        const struct place *first = &list[i];
        const struct ht_param_shape *shape = &w->shape[first->param];
        memset(elements, 0, sizeof(elements));
        for (; i < count && list[i].param == first->param && list[i].piece.range == first->piece.range; i++)
            elements[list[i].piece.ortho] += (list[i].piece.end - list[i].piece.begin) /
                (w->param[first->param] ? ht_opt_redo_piece_bytes(shape, &list[i].piece) : 1);
        if (!w->param[first->param])
            continue;
        uint64_t whole = ht_opt_range_elements(shape, first->piece.range);
        if (w->phases[first->param] ? elements[0] != whole || elements[1] != whole : elements[1])
            return false;
    }
    return true;
}

static uint64_t changes_of_range(const struct place *list, uint64_t count)
{
    uint64_t n = 0;

    for (uint64_t i = 1; i < count; i++)
        n += !same_range(&list[i - 1], &list[i]);
    return n;
}

static const char *check_places(const struct redo_check *w, struct place *list)
{
    uint64_t count = w->s.pieces;

    for (uint64_t i = 0; i < count; i++) {
        struct place *at = &list[i];
        const struct ht_redo_piece *piece = &at->piece;
        bool lies = !ht_opt_redo_piece_at(&w->s, i, &at->param, &at->piece);
        if (lies && w->param[at->param])
            lies = ht_opt_redo_piece_fits(&w->shape[at->param], piece) && piece->at <= w->size &&
                piece->bytes <= w->size - piece->at;
        if (!lies)
            return "it has a piece of a gradient outside of its parameter";
    }
    uint64_t changes = changes_of_range(list, count);
    qsort(list, count, sizeof(*list), by_place);
    for (uint64_t i = 1; i < count; i++)
        if (same_range(&list[i - 1], &list[i]) && list[i].piece.begin < list[i - 1].piece.end)
            return "it has bytes of a gradient twice";
    if (changes != changes_of_range(list, count))
        return "it has pieces of a gradient apart from each other";
    return phases_fit(w, list, count) ? NULL
                                      : "it has a gradient without the orthogonalised update, or the other way round";
}

static int check_pieces(const struct redo_check *w, const char **out)
{
    struct place *list = calloc(w->s.pieces + 1, sizeof(*list));

    if (!list)
        return -ENOMEM;
    *out = check_places(w, list);
    free(list);
    return 0;
}

/* Do all entries of a piece lie in it? The pieces themselves are checked. */
static int check_sparse(const struct redo_check *w, const struct ht_redo_piece *piece, unsigned size, const char **out)
{
    uint8_t *bytes = malloc(piece->bytes + 1);

    if (!bytes)
        return -ENOMEM;
    ssize_t n = ht_obj_read(w->obj, piece->at, bytes, piece->bytes);
    int rc = n < 0 ? (int)n : 0;
    if (!rc && ht_sparse_decode(bytes, (size_t)n, size, NULL, piece->end - piece->begin))
        *out = "it has elements of a sparse gradient outside of its piece";
    free(bytes);
    return rc;
}

static int check_all_sparse(const struct redo_check *w, const char **out)
{
    struct ht_redo_piece piece;
    uint32_t param;
    int rc = 0;

    for (uint64_t i = 0; !rc && !*out && i < w->s.pieces; i++) {
        rc = ht_opt_redo_piece_at(&w->s, i, &param, &piece);
        if (!rc && piece.sparse && w->param[param])
            rc = check_sparse(w, &piece, ht_opt_redo_piece_bytes(&w->shape[param], &piece), out);
    }
    return rc;
}

/* -------------------------------------------------------------------- step */

static int check_summary(struct redo_check *w, const char **out)
{
    w->param = calloc(w->s.params + 1, sizeof(struct ht_param *));
    w->shape = calloc(w->s.params + 1, sizeof(*w->shape));
    w->phases = calloc(w->s.params + 1, sizeof(*w->phases));
    int rc = w->param && w->shape && w->phases ? 0 : -ENOMEM;

    lock(w->root->o);
    *out = NULL;
    for (uint64_t i = 0; !rc && !*out && i < w->s.params; i++)
        *out = check_param(w, i);
    if (!rc && !*out)
        rc = check_pieces(w, out);
    unlock(w->root->o);
    if (!rc && !*out)
        rc = check_all_sparse(w, out);
    lock(w->root->o);
    /* The next step finds the parameters of this one with one update more. And losing one of them loses steps. */
    for (uint64_t i = 0; !rc && !*out && i < w->s.params; i++)
        if (w->param[i])
            w->param[i]->redo_place++;
    unlock(w->root->o);
    free(w->param);
    free(w->shape);
    free(w->phases);
    return rc;
}

/* *out: why the step cannot be computed again; NULL: it can. *out_version: of its summary; 0: it was not read. */
static int check_step(struct ht_root *root, const struct ht_redo_step *step, const char **out, uint32_t *out_version)
{
    struct redo_check w = {.root = root, .step = step->step, .obj = ht_obj_get(root->o->store, step->oid)};
    uint8_t *bytes = NULL;

    *out = NULL;
    *out_version = 0;
    if (!w.obj)
        return 0; /* reported when the log was read */
    w.size = ht_obj_size(w.obj);
    int rc = ht_opt_redo_read(w.obj, step, &bytes, &w.s);
    if (rc == -EUCLEAN)
        *out = "its summary makes no sense";
    if (!rc)
        rc = check_summary(&w, out);
    *out_version = w.s.version;
    ht_obj_put(w.obj);
    free(bytes);
    return rc == -EUCLEAN ? 0 : rc;
}

/* Bytes that cannot be read are DATA-REDO, and end the steps there, too. */
static int check_root(struct ht_root *root, const struct ht_redo_step *list, size_t count,
                      struct ht_optim_redo_check *check)
{
    int rc = 0;

    for (size_t i = 0; !rc && i < count; i++) {
        const char *why = check->is_other(check->ctx, list[i].oid) ? "its object is something else, too" : NULL;
        uint32_t version = 0;
        if (!why)
            rc = check_step(root, &list[i], &why, &version);
        if (rc == -EIO)
            return 0;
        if (why)
            return check->report(check->ctx, root->id, list[i].step, why);
        check->steps++;
        check->coded += version == HT_REDO_VERSION_CODED;
        check->sections += version == HT_REDO_VERSION_SECTIONS;
        check->ortho += version == HT_REDO_VERSION_ORTHO;
    }
    return rc;
}

/* No other thread is there, so that the lists stay as they are while steps are read. */
int ht_optim_redo_check(struct ht_optim *o, struct ht_optim_redo_check *check)
{
    int rc = 0;

    lock(o);
    o->redo_checked = true;
    ht_list_for_each_entry(p, &o->params, struct ht_param, all)
        p->redo_at = p->redo_place = 0;
    ht_list_for_each_entry(root, &o->roots, struct ht_root, all) {
        const struct ht_redo_step *list = root->redo.step;
        size_t count = root->redo.steps;
        unlock(o);
        rc = rc ? rc : check_root(root, list, count, check);
        lock(o);
    }
    unlock(o);
    return rc;
}

/* ------------------------------------------------------------------- owner */

int ht_optim_redo_owner(struct ht_optim *o, uint64_t oid, uint64_t *out_root, uint64_t *out_step)
{
    *out_step = 0;
    lock(o);
    ht_list_for_each_entry(root, &o->roots, const struct ht_root, all)
        for (size_t i = 0; !*out_step && i < root->redo.steps; i++)
            if (root->redo.step[i].oid == oid) {
                *out_root = root->id;
                *out_step = root->redo.step[i].step;
            }
    unlock(o);
    return *out_step ? 0 : -ENOENT;
}

int ht_optim_redo_needs(struct ht_optim *o, uint64_t oid, uint64_t *out_root, uint64_t *out_step)
{
    uint64_t param = oid;
    const char *state;

    *out_step = 0;
    if (ht_optim_state_owner(o, oid, &param, &state))
        param = oid;
    lock(o);
    const struct ht_param *p = ht_opt_param_find(o, param);
    if (p && p->cur.exists && p->root->redo.steps && (p->redo_place || !o->redo_checked)) {
        *out_root = p->root->id;
        *out_step = p->root->redo.step[0].step;
    }
    unlock(o);
    return *out_step ? 0 : -ENOENT;
}
