/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_summary.c - the summary of a logged step (struct ht_disk_redo): what an update needs beside the gradients. Both
 * ways: for the object of the step, and from it.
 *
 * Scalars are those that the workers used, so that words, schedules and the verdict on clipping are in them. A step
 * that was skipped has no parameters.
 */
#include <math.h>

#include "tiering/base/mutant.h"
#include "tiering/base/sparse.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/redo/logged.h"

static_assert(HT_REDO_SCALARS == 1 + sizeof(((struct ht_scalars *)0)->number) / sizeof(float), "all scalars");

/* The factor of the gradient may be NaN: that of a norm that is. */
static bool scalars_sane(const struct ht_scalars *s)
{
    bool nan = false;

    for (size_t i = 0; i < HT_ARRAY_SIZE(s->number); i++)
        nan |= isnan(s->number[i]);
    return !nan && (unsigned)s->kernel < HT_KERNEL_COUNT;
}

static void put_scalars(const struct ht_scalars *s, ht_le32 to[HT_REDO_SCALARS])
{
    ht_le32_store(&to[0], ht_float_bits(HT_MUTANT("factor-unlogged") ? 1.0f : s->grad_factor));
    for (size_t i = 0; i < HT_ARRAY_SIZE(s->number); i++)
        ht_le32_store(&to[1 + i], ht_float_bits(s->number[i]));
}

static void take_scalars(uint8_t kernel, uint8_t maximize, const ht_le32 from[HT_REDO_SCALARS], struct ht_scalars *out)
{
    *out = (struct ht_scalars){
        .kernel = kernel, .maximize = maximize, .grad_factor = ht_float_of_bits(ht_le32_load(&from[0]))};
    for (size_t k = 0; k < HT_ARRAY_SIZE(out->number); k++)
        out->number[k] = ht_float_of_bits(ht_le32_load(&from[1 + k]));
}

static void note_kernel(struct ht_root *root, const struct ht_scalars *s) HT_REQUIRES(HT_LOCK_OPTIM)
{
    root->redo.near_g |= s->kernel == HT_KERNEL_ADAMW_NEAR_G || s->kernel == HT_KERNEL_ADAM_NEAR_G;
}

/* A sum of gradients is logged in f32, which is never more bytes than each of its gradients. */
static void put_param(struct ht_buf *b, const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_scalars *s = &p->scalars;
    struct ht_disk_redo_param d = {
        .dtype = p->shape.dtype,
        .grad_dtype = p->root->latched.accumulate > 1 ? (uint8_t)HT_DTYPE_F32 : p->shape.grad_dtype,
        .kernel = (uint8_t)s->kernel,
        .maximize = s->maximize,
    };

    ht_le64_store(&d.object, p->oid);
    ht_le64_store(&d.steps, p->cur.t + 1);
    ht_le64_store(&d.elements, p->shape.elements);
    ht_le32_store(&d.chunk_bytes, p->shape.chunk_bytes);
    ht_le32_store(&d.forms, ht_opt_layout_mark(&p->layout));
    put_scalars(s, d.scalar);
    ht_buf_put(b, &d, sizeof(d));
    note_kernel(p->root, s);
}

static void put_section(struct ht_buf *b, uint64_t oid, const struct ht_param_section *s)
{
    struct ht_disk_redo_section d = {
        .frozen = s->frozen,
        .kernel = (uint8_t)s->scalars.kernel,
        .maximize = s->scalars.maximize,
    };

    ht_le64_store(&d.object, oid);
    ht_le64_store(&d.begin, s->begin);
    ht_le64_store(&d.end, s->end);
    put_scalars(&s->scalars, d.scalar);
    ht_buf_put(b, &d, sizeof(d));
}

/* False: one cannot be logged. */
static bool put_sections(struct ht_buf *b, const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool all = true;

    for (uint32_t i = 0; i < ht_opt_sections_count(p); i++) {
        all &= scalars_sane(&p->sections->of[i].scalars);
        put_section(b, p->oid, &p->sections->of[i]);
        note_kernel(p->root, &p->sections->of[i].scalars);
    }
    p->root->redo.sections |= ht_opt_sections_count(p) > 0;
    return all;
}

static uint32_t version_of(const struct ht_redo *redo)
{
    return redo->ortho   ? HT_REDO_VERSION_ORTHO
        : redo->sections ? HT_REDO_VERSION_SECTIONS
        : redo->sparse   ? HT_REDO_VERSION_CODED
                         : HT_REDO_VERSION;
}

/* Of a piece: one that says how its bytes are stored begins as one that does not. */
static size_t piece_size(uint32_t version)
{
    return version >= HT_REDO_VERSION_CODED ? sizeof(struct ht_disk_redo_coded) : sizeof(struct ht_disk_redo_piece);
}

static bool put_piece(struct ht_buf *b, struct ht_root *root, const struct ht_redo_piece *piece)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param *p = ht_opt_param_find(root->o, piece->oid);
    struct ht_disk_redo_coded d;

    if (!p || p->gone || !p->has_grad)
        return false;
    ht_le64_store(&d.piece.at, piece->at);
    ht_le32_store(&d.piece.param, p->redo_place);
    ht_le32_store(&d.piece.range, piece->range);
    ht_le32_store(&d.piece.begin, piece->begin);
    ht_le32_store(&d.piece.end, piece->end);
    ht_le32_store(&d.bytes, piece->bytes);
    ht_le32_store(&d.coding, (piece->sparse ? HT_REDO_SPARSE : HT_REDO_PLAIN) | (piece->ortho ? HT_REDO_ORTHO : 0));
    ht_buf_put(b, &d, piece_size(version_of(&root->redo)));
    return true;
}

static void note_pieces(struct ht_redo *redo, uint64_t pieces)
{
    redo->sparse = redo->ortho = false;
    for (uint64_t i = 0; i < pieces; i++) {
        redo->sparse |= redo->piece[i].sparse;
        redo->ortho |= redo->piece[i].ortho;
    }
}

/* Has every range with a gradient been logged? */
static bool all_logged(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_for_each_range(r, p)
        if ((r->frozen.count || r->added) && !r->logged)
            return false;
    return true;
}

static bool all_derived(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool derived = p->obj && ht_obj_is_derived(p->obj);

    for (unsigned i = 0; derived && i < p->cur.layout.count; i++)
        derived = p->state[i] && ht_obj_is_derived(p->state[i]);
    return derived;
}

/* A mount finds its record, with the count of the full step, and its content as of then. */
static bool is_published(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param_meta *cur = &p->cur, *pub = &p->pub;

    if (HT_MUTANT("record-unseen"))
        return true;
    return cur->exists && pub->exists && cur->dtype == pub->dtype && cur->chunk_bytes == pub->chunk_bytes &&
        cur->elements == pub->elements && cur->t == pub->t + p->redo_steps &&
        ht_opt_same_layout(&cur->layout, &pub->layout) && !memcmp(cur->oid, pub->oid, sizeof(cur->oid)) &&
        all_derived(p);
}

static bool put_params(struct ht_root *root, uint64_t *out_count) HT_REQUIRES(HT_LOCK_OPTIM)
{
    *out_count = 0;
    ht_list_for_each_entry(p, &root->touched, struct ht_param, touched) {
        if (p->gone || !all_logged(p) || !is_published(p) || !scalars_sane(&p->scalars) || !ht_opt_redo_reserve(p) ||
            *out_count + ht_opt_sections_count(p) >= UINT32_MAX)
            return false;
        p->redo_place = (uint32_t)*out_count;
        *out_count += 1 + ht_opt_sections_count(p);
        put_param(&root->redo.summary, p);
        if (!put_sections(&root->redo.summary, p))
            return false;
    }
    return true;
}

bool ht_opt_redo_summarize(struct ht_root *root, bool skipped)
{
    struct ht_redo *redo = &root->redo;
    struct ht_buf *b = &redo->summary;
    uint64_t params = 0, pieces = skipped ? 0 : redo->pieces;
    struct ht_disk_redo head = {.pad = {{0}}};

    note_pieces(redo, pieces);
    redo->sections = redo->near_g = false;
    ht_buf_reset(b);
    ht_buf_put(b, &head, sizeof(head));
    bool fits = skipped || put_params(root, &params);
    for (size_t i = 0; fits && i < pieces; i++)
        fits = put_piece(b, root, &redo->piece[i]);
    ht_opt_redo_count_heap(root);
    if (!fits || b->err)
        return false;
    ht_le32_store(&head.version, version_of(redo));
    ht_le64_store(&head.step, root->step + 1);
    ht_le64_store(&head.params, params);
    ht_le64_store(&head.pieces, pieces);
    memcpy(b->data, &head, sizeof(head));
    redo->summary_bytes = b->len;
    return true;
}

/* ------------------------------------------------------------------- parse */

int ht_opt_redo_parse(const uint8_t *bytes, size_t len, uint64_t step, struct ht_redo_summary *out)
{
    struct ht_disk_redo head;

    if (len < sizeof(head))
        return -EUCLEAN;
    memcpy(&head, bytes, sizeof(head));
    uint64_t params = ht_le64_load(&head.params), pieces = ht_le64_load(&head.pieces), left = len - sizeof(head);
    uint32_t version = ht_le32_load(&head.version);
    size_t piece = piece_size(version);
    if (version < HT_REDO_VERSION || version > HT_REDO_VERSION_ORTHO || ht_le64_load(&head.step) != step ||
        params > left / sizeof(struct ht_disk_redo_param))
        return -EUCLEAN;
    left -= params * sizeof(struct ht_disk_redo_param);
    if (pieces != left / piece || left % piece)
        return -EUCLEAN;
    *out = (struct ht_redo_summary){
        .param = bytes + sizeof(head),
        .piece = bytes + sizeof(head) + params * sizeof(struct ht_disk_redo_param),
        .params = params,
        .pieces = pieces,
        .version = version,
    };
    return params && ht_opt_redo_is_section(out, 0) ? -EUCLEAN : 0;
}

/*
 * A summary has no hole, and a stored block holds a chunk at most: a size that the object cannot have asks for no
 * memory.
 */
static bool may_have(struct ht_obj *obj, const struct ht_redo_step *step)
{
    struct ht_obj_stat st = {0};

    ht_obj_stat(obj, &st);
    return step->at <= st.size && step->bytes <= st.size - step->at &&
        step->bytes / (HT_CHUNK_BYTES / HT_BLOCK_BYTES) <= st.stored_bytes;
}

int ht_opt_redo_read(struct ht_obj *obj, const struct ht_redo_step *step, uint8_t **out_bytes,
                     struct ht_redo_summary *out)
{
    *out_bytes = NULL;
    if (!may_have(obj, step))
        return -EUCLEAN;
    *out_bytes = malloc(step->bytes + 1);
    if (!*out_bytes)
        return -ENOMEM;
    ssize_t n = ht_obj_read(obj, step->at, *out_bytes, step->bytes);
    if (n != (ssize_t)step->bytes)
        return n < 0 ? (int)n : -EUCLEAN;
    return ht_opt_redo_parse(*out_bytes, step->bytes, step->step, out);
}

bool ht_opt_redo_follows(const struct ht_param_meta *m, uint64_t updates, const struct ht_redo_param *want)
{
    return m->exists && m->elements == want->elements && m->dtype == want->dtype &&
        ht_dtype_trained_bytes(want->grad_dtype) && m->t + updates + 1 == want->steps &&
        want->forms == ht_opt_layout_mark(&m->layout) && ht_opt_layout_keeps(&m->layout, want->scalars.kernel);
}

bool ht_opt_redo_fits(const struct ht_param *p, struct ht_obj *file, uint64_t updates, const struct ht_redo_param *want)
{
    const struct ht_param_meta *m = &p->cur;
    unsigned bytes = ht_dtype_trained_bytes(m->dtype);

    return ht_opt_redo_follows(m, updates, want) && m->chunk_bytes == want->chunk_bytes &&
        ht_obj_size(file) == m->elements * bytes && ht_obj_chunk_bytes(file) == m->chunk_bytes;
}

unsigned ht_opt_redo_piece_bytes(const struct ht_param_shape *shape, const struct ht_redo_piece *piece)
{
    return piece->ortho ? 2 : shape->g_bytes;
}

bool ht_opt_redo_piece_fits(const struct ht_param_shape *shape, const struct ht_redo_piece *piece)
{
    unsigned size = ht_opt_redo_piece_bytes(shape, piece);

    if (piece->range >= shape->range_count || piece->begin % size || piece->end % size)
        return false;
    if (piece->sparse && piece->bytes % ht_sparse_entry_bytes(size))
        return false;
    return piece->end / size <= ht_opt_range_elements(shape, piece->range);
}

int ht_opt_redo_param_at(const struct ht_redo_summary *s, uint64_t i, struct ht_redo_param *out)
{
    struct ht_disk_redo_param d;

    memcpy(&d, s->param + i * sizeof(d), sizeof(d));
    *out = (struct ht_redo_param){
        .oid = ht_le64_load(&d.object),
        .steps = ht_le64_load(&d.steps),
        .elements = ht_le64_load(&d.elements),
        .chunk_bytes = ht_le32_load(&d.chunk_bytes),
        .forms = ht_le32_load(&d.forms),
        .dtype = d.dtype,
        .grad_dtype = d.grad_dtype,
    };
    take_scalars(d.kernel, d.maximize, d.scalar, &out->scalars);
    return scalars_sane(&out->scalars) && d.maximize <= 1 && !ht_opt_redo_is_section(s, i) ? 0 : -EUCLEAN;
}

bool ht_opt_redo_is_section(const struct ht_redo_summary *s, uint64_t i)
{
    const uint8_t *param = s->param + i * sizeof(struct ht_disk_redo_param);

    return s->version >= HT_REDO_VERSION_SECTIONS && !param[offsetof(struct ht_disk_redo_section, no_dtype)];
}

int ht_opt_redo_section_at(const struct ht_redo_summary *s, uint64_t i, uint64_t oid, uint64_t from, uint64_t elements,
                           struct ht_param_section *out)
{
    struct ht_disk_redo_section d;

    memcpy(&d, s->param + i * sizeof(d), sizeof(d));
    *out = (struct ht_param_section){
        .begin = ht_le64_load(&d.begin),
        .end = ht_le64_load(&d.end),
        .frozen = d.frozen == 1,
    };
    take_scalars(d.kernel, d.maximize, d.scalar, &out->scalars);
    bool fits = ht_opt_redo_is_section(s, i) && ht_le64_load(&d.object) == oid && d.frozen <= 1 && d.maximize <= 1;
    bool lies = from <= out->begin && out->begin < out->end && out->end <= elements;
    return fits && lies && scalars_sane(&out->scalars) ? 0 : -EUCLEAN;
}

int ht_opt_redo_sections_of(const struct ht_redo_summary *s, uint64_t i, uint64_t *out_count)
{
    struct ht_param_section section = {.end = 0};
    struct ht_redo_param of;
    int rc = ht_opt_redo_param_at(s, i, &of);

    *out_count = 0;
    while (!rc && i + 1 + *out_count < s->params && ht_opt_redo_is_section(s, i + 1 + *out_count)) {
        uint64_t at = i + 1 + *out_count;
        rc = ht_opt_redo_section_at(s, at, of.oid, section.end, of.elements, &section);
        if (!rc && (*out_count)++ == HT_SECTIONS_MAX)
            rc = -EUCLEAN;
        if (!rc && !ht_kernel_same_states(section.scalars.kernel, of.scalars.kernel))
            rc = -EUCLEAN;
    }
    return rc;
}

int ht_opt_redo_piece_at(const struct ht_redo_summary *s, uint64_t i, uint32_t *out_param, struct ht_redo_piece *out)
{
    struct ht_disk_redo_coded d;
    bool coded = s->version >= HT_REDO_VERSION_CODED, ortho = s->version >= HT_REDO_VERSION_ORTHO;
    size_t size = piece_size(s->version);

    memcpy(&d, s->piece + i * size, size);
    *out_param = ht_le32_load(&d.piece.param);
    *out = (struct ht_redo_piece){
        .at = ht_le64_load(&d.piece.at),
        .range = ht_le32_load(&d.piece.range),
        .begin = ht_le32_load(&d.piece.begin),
        .end = ht_le32_load(&d.piece.end),
    };
    if (*out_param >= s->params || out->begin >= out->end || ht_opt_redo_is_section(s, *out_param))
        return -EUCLEAN;
    out->bytes = coded ? ht_le32_load(&d.bytes) : out->end - out->begin;
    uint32_t coding = coded ? ht_le32_load(&d.coding) : HT_REDO_PLAIN;
    out->ortho = ortho && (coding & HT_REDO_ORTHO);
    coding &= ortho ? ~HT_REDO_ORTHO : ~0u;
    out->sparse = coding == HT_REDO_SPARSE;
    bool plain = coding == HT_REDO_PLAIN && out->bytes == out->end - out->begin;
    return plain || (out->sparse && out->bytes <= HT_REDO_SPARSE_BYTES_MAX) ? 0 : -EUCLEAN;
}
