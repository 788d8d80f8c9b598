/* SPDX-License-Identifier: Apache-2.0 */
/*
 * delta.c - updates note which elements they change, a boundary makes the delta of the step, and readers get indices
 * and values of each parameter from it.
 *
 * A worker that holds chunks waits for no memory, so what it notes stays in its own buffer. It begins the next range
 * beside one only while the buffer has room for both, and both are of one root. When it holds no chunk the buffer goes
 * into the object of the step, before the range has ended. So at a boundary no buffer of the root has anything.
 */
#include <string.h>

#include "tiering/api/tx.h"
#include "tiering/base/mutant.h"
#include "optim/rules/forms.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/step/step_priv.h"

enum {
    RANGE_BYTES_MAX = 2 * HT_CHUNK_BYTES, /* two bytes of value and two of place, for each two bytes of a chunk */
    MORE_BYTES = HT_CHANGED_MORE * sizeof(float), /* that a kernel may write behind */
    RANGE_PIECES_MAX = 16,   /* pieces begin more than HT_DELTA_SPAN - HT_FORM_WINDOW elements apart */
    SPARE_BYTES = 512 << 10, /* with so much, and so many pieces, two ranges have room */
    SPARE_PIECES = 992,
    PLACES = 1024, /* that are read together */
};

struct ht_delta_writer {
    struct ht_root *root; /* whose changes are here; NULL: none are */
    uint64_t used;
    unsigned pieces;
    struct ht_delta_piece piece[SPARE_PIECES + 2 * RANGE_PIECES_MAX];
    uint8_t bytes[SPARE_BYTES + 2 * RANGE_BYTES_MAX + MORE_BYTES];
    /* The piece that is being made. Its values are in bytes, and its places follow them when it ends. */
    struct ht_delta_piece open;
    uint32_t value_bytes;
    uint16_t place[HT_DELTA_SPAN + HT_CHANGED_MORE];
};

/* ------------------------------------------------------------------- noting */

bool ht_opt_delta_writer_make(struct ht_worker *w)
{
    if (w->delta)
        return true;
    w->delta = malloc(sizeof(*w->delta));
    if (!w->delta)
        return false;
    w->delta->root = NULL;
    w->delta->used = w->delta->pieces = w->delta->open.count = 0;
    lock(w->o);
    w->o->delta_heap_bytes += sizeof(*w->delta);
    unlock(w->o);
    return true;
}

void ht_opt_delta_writer_free(struct ht_worker *w)
{
    if (!w->delta)
        return;
    lock(w->o);
    w->o->delta_heap_bytes -= sizeof(*w->delta);
    unlock(w->o);
    free(w->delta);
    w->delta = NULL;
}

bool ht_opt_delta_may_begin(const struct ht_worker *w, bool notes, const struct ht_root *now,
                            const struct ht_root *next)
{
    const struct ht_delta_writer *d = w->delta;

    if (!d || (!notes && !d->root))
        return true;
    return now == next && d->used <= SPARE_BYTES && d->pieces <= SPARE_PIECES;
}

void ht_opt_delta_end_piece(struct ht_worker *w)
{
    struct ht_delta_writer *d = w->delta;
    size_t places = d->open.count * sizeof(*d->place);

    if (!d->open.count)
        return;
    assert(d->pieces < HT_ARRAY_SIZE(d->piece));
    d->piece[d->pieces++] = d->open;
    d->used += d->open.count * d->value_bytes;
    assert(d->used + places <= sizeof(d->bytes));
    memcpy(d->bytes + d->used, d->place, places);
    d->used += places;
    d->open.count = 0;
}

void ht_opt_delta_note(struct ht_worker *w, const struct ht_param *p, uint64_t first, const void *was, const void *is,
                       size_t n)
{
    const struct ht_kernels *k = p->o->kernels;
    uint16_t half_was[HT_FORM_WINDOW], half_is[HT_FORM_WINDOW];
    struct ht_delta_writer *d = w->delta;
    uint32_t bytes = p->shape.p_bytes;

    if (bytes == sizeof(float) && p->root->latched.delta_bf16) {
        k->halve(half_was, was, n);
        k->halve(half_is, is, n);
        was = half_was;
        is = half_is;
        bytes = sizeof(*half_is);
    }
    if (d->open.count && (d->open.oid != p->oid || first + n - d->open.first > HT_DELTA_SPAN))
        ht_opt_delta_end_piece(w);
    if (!d->open.count)
        d->open = (struct ht_delta_piece){.oid = p->oid, .first = first, .at = d->used};
    d->root = p->root;
    d->value_bytes = bytes;
    uint8_t *values = d->bytes + d->used + d->open.count * bytes;
    assert(values + n * bytes + MORE_BYTES <= d->bytes + sizeof(d->bytes));
    d->open.count +=
        (uint32_t)k->changed(was, is, bytes, n, (uint32_t)(first - d->open.first), d->place + d->open.count, values);
}

/* ------------------------------------------------------ the object of a step */

/* Makes it, if no other worker does. Releases the lock in between. */
static int need_object(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_deltas *s = &root->deltas;
    struct ht_optim *o = root->o;
    struct ht_obj *obj = NULL;

    if (!s->recording || s->open)
        return s->recording ? 0 : -ESTALE;
    unlock(o);
    int rc = ht_opt_object_create(o->store, 0, HT_CHUNK_BYTES, &obj);
    if (!rc)
        ht_obj_delete(obj, NULL);
    lock(o);
    struct ht_delta *d = rc || !s->recording || s->open ? NULL : ht_opt_delta_new(o);
    if (d) {
        d->obj = obj;
        s->open = d;
    } else {
        ht_obj_put(obj);
    }
    return s->open ? 0 : rc ? rc : -ESTALE;
}

/* Gives the pieces places in the object. -EFBIG: the step changes too much. */
static int take_pieces(struct ht_root *root, const struct ht_delta_writer *w, uint64_t *out_at)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_delta *d = root->deltas.open;
    double most = root->latched.delta_max * (double)root->totals.elements;

    for (unsigned i = 0; i < w->pieces; i++)
        d->changed += w->piece[i].count;
    if ((double)d->changed > most) {
        ht_opt_delta_give_up(root);
        return -EFBIG;
    }
    int rc = ht_array_grow((void **)&d->piece, &d->pieces_max, d->pieces + w->pieces, sizeof(*d->piece));
    ht_opt_delta_count_heap(d);
    if (rc)
        return rc;
    *out_at = d->bytes;
    for (unsigned i = 0; i < w->pieces; i++) {
        d->piece[d->pieces] = w->piece[i];
        d->piece[d->pieces++].at += d->bytes;
    }
    d->bytes += w->used;
    return 0;
}

static void write_pieces(struct ht_optim *o, struct ht_delta_writer *w)
{
    struct ht_obj *obj = NULL;
    uint64_t at = 0;

    lock(o);
    int rc = need_object(w->root);
    if (!rc)
        rc = take_pieces(w->root, w, &at);
    if (!rc)
        obj = ht_obj_ref(w->root->deltas.open->obj);
    unlock(o);
    if (obj)
        rc = ht_opt_write_all(obj, at, w->bytes, w->used);
    ht_obj_put(obj);
    if (rc) {
        lock(o);
        ht_opt_delta_lose(w->root);
        unlock(o);
    }
    w->used = w->pieces = 0;
}

void ht_opt_delta_flush(struct ht_worker *w)
{
    if (!w->delta)
        return;
    if (w->delta->pieces)
        write_pieces(w->o, w->delta);
    w->delta->root = NULL;
}

/* ------------------------------------------------------------------ boundary */

static int by_place(const void *a, const void *b)
{
    const struct ht_delta_piece *x = a, *y = b;

    if (x->oid != y->oid)
        return x->oid < y->oid ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Puts the pieces in order. Without the lock: no worker has the delta, and no reader yet. */
static int sort_pieces(struct ht_delta *d)
{
    size_t params = 0;

    if (!d->pieces)
        return 0;
    qsort(d->piece, d->pieces, sizeof(*d->piece), by_place);
    for (size_t i = 0; i < d->pieces; i++)
        params += !i || d->piece[i].oid != d->piece[i - 1].oid;
    d->param = calloc(params, sizeof(*d->param));
    if (!d->param)
        return -ENOMEM;
    for (size_t i = 0; i < d->pieces; i++) {
        struct ht_delta_piece *piece = &d->piece[i];
        if (!i || piece->oid != piece[-1].oid)
            d->param[d->params++] = (struct ht_delta_param){.of.oid = piece->oid, .piece = i};
        struct ht_delta_param *p = &d->param[d->params - 1];
        piece->before = p->of.changed;
        p->of.changed += piece->count;
        p->pieces++;
    }
    return 0;
}

/* What readers need to know of the parameters. -ESTALE: one is gone. */
static int describe_params(struct ht_root *root, struct ht_delta *d) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (size_t i = 0; i < d->params; i++) {
        struct ht_delta_change *of = &d->param[i].of;
        const struct ht_param *p = ht_opt_param_find(root->o, of->oid);
        if (!p || p->gone || !p->cur.exists)
            return -ESTALE;
        of->elements = p->cur.elements;
        of->dtype = p->cur.dtype == HT_DTYPE_F32 && d->bf16 ? HT_DTYPE_BF16 : p->cur.dtype;
        of->index_bytes = of->elements > (uint64_t)INT32_MAX + 1 ? 8 : 4;
    }
    return 0;
}

/* The delta of the step as its updates have noted it. NULL: there is none. Releases the lock in between. */
static struct ht_delta *take_noted(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_deltas *s = &root->deltas;
    struct ht_delta *d = s->recording && !s->open ? ht_opt_delta_new(root->o) : s->open;
    int rc = d ? 0 : -ENODATA;

    s->open = NULL;
    s->recording = false;
    if (d) {
        d->bf16 = root->latched.delta_bf16;
        unlock(root->o);
        rc = sort_pieces(d);
        lock(root->o);
    }
    if (!rc)
        rc = describe_params(root, d);
    if (!rc) {
        ht_opt_delta_count_heap(d);
        return d;
    }
    ht_opt_delta_put(d);
    return NULL;
}

void ht_opt_delta_end(struct ht_root *root)
{
    struct ht_deltas *s = &root->deltas;

    if (!root->latched.delta) {
        ht_opt_delta_cut(root);
        return;
    }
    uint64_t edits = ht_scope_edits(root->o->store, root->id);
    if ((edits != s->edits && !HT_MUTANT("edit-in-delta")) || root->decided)
        ht_opt_delta_cut(root);
    bool based = s->based;
    struct ht_delta *d = based ? take_noted(root) : NULL;
    if (based && !s->based) { /* cut in between */
        ht_opt_delta_put(d);
        d = NULL;
    }
    bool whole = !d;
    s->backoff = d ? 0 : s->backoff;
    d = d ? d : ht_opt_delta_new(root->o);
    if (!d) {
        ht_opt_delta_cut(root);
        return;
    }
    if (!s->based)
        s->lineage = ++root->o->last_step_number;
    d->whole = whole;
    d->bf16 = root->latched.delta_bf16;
    d->step = root->step;
    d->lineage = s->lineage;
    s->edits = edits;
    s->based = true;
    ht_opt_delta_keep(root, d);
}

/* ----------------------------------------------------------------- readers */

int ht_optim_delta_steps(struct ht_optim *o, uint64_t id, struct ht_delta_steps *out)
{
    lock(o);
    const struct ht_root *root = ht_opt_root_find(o, id);
    int rc = root && root->exists ? 0 : -ENOENT;
    *out = (struct ht_delta_steps){0};
    if (!rc && root->deltas.count)
        *out = (struct ht_delta_steps){ht_list_entry(root->deltas.kept.next, struct ht_delta, of_root)->step,
                                       ht_list_entry(root->deltas.kept.prev, struct ht_delta, of_root)->step};
    unlock(o);
    return rc;
}

static struct ht_delta *find_delta(struct ht_optim *o, uint64_t id, uint64_t step) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_root *root = ht_opt_root_find(o, id);

    if (!root || !root->exists)
        return NULL;
    ht_list_for_each_entry(d, &root->deltas.kept, struct ht_delta, of_root)
        if (d->step == step)
            return d;
    return NULL;
}

int ht_optim_delta_open(struct ht_optim *o, uint64_t id, uint64_t step, struct ht_delta **out)
{
    lock(o);
    struct ht_delta *d = find_delta(o, id, step);
    int rc = !d ? -ENOENT : o->deltas_lost >= HT_DELTA_KEEP_MAX ? -EMFILE : 0;
    if (rc == 0) {
        d->refs++;
        *out = d;
    }
    unlock(o);
    return rc;
}

void ht_optim_delta_close(struct ht_delta *d)
{
    struct ht_optim *o = d->o;

    lock(o);
    ht_opt_delta_put(d);
    unlock(o);
}

void ht_optim_delta_stat(const struct ht_delta *d, struct ht_delta_stat *out)
{
    *out = (struct ht_delta_stat){
        .step = d->step, .base_step = d->whole ? 0 : d->step - 1, .lineage = d->lineage, .params = d->params};
}

const struct ht_delta_change *ht_optim_delta_change(const struct ht_delta *d, size_t i)
{
    return &d->param[i].of;
}

/* The piece with changed element k of a parameter. */
static const struct ht_delta_piece *find_piece(const struct ht_delta *d, const struct ht_delta_param *p, uint64_t k)
{
    size_t next = p->piece + 1;

    HT_PARTITION_POINT(next, p->piece + p->pieces, i, d->piece[i].before <= k);
    return &d->piece[next - 1];
}

/* Of one piece: bytes from off on of its values. *len: then how many. */
static int read_values(const struct ht_delta *d, const struct ht_delta_change *of, const struct ht_delta_piece *piece,
                       uint64_t off, uint8_t *buf, size_t *len)
{
    *len = ht_min_u64(*len, piece->count * ht_dtype_trained_bytes(of->dtype) - off);
    return ht_opt_read_all(d->obj, piece->at + off, buf, *len);
}

/* The same of its indices. */
static int read_indices(const struct ht_delta *d, const struct ht_delta_change *of, const struct ht_delta_piece *piece,
                        uint64_t off, uint8_t *buf, size_t *len)
{
    uint64_t places = piece->at + piece->count * ht_dtype_trained_bytes(of->dtype), bytes = of->index_bytes;
    uint64_t first = off / bytes, skipped = off % bytes;
    size_t n = ht_min_u64(ht_min_u64(piece->count - first, PLACES), ht_div_up(skipped + *len, bytes));
    uint8_t index[PLACES * sizeof(ht_le64)];
    uint16_t place[PLACES];
    int rc = ht_opt_read_all(d->obj, places + first * sizeof(*place), place, n * sizeof(*place));

    for (size_t i = 0; i < n && !rc; i++) {
        ht_le64 wide;
        ht_le64_store(&wide, piece->first + place[i]);
        memcpy(index + i * bytes, &wide, bytes);
    }
    *len = ht_min_u64(*len, n * bytes - skipped);
    if (!rc)
        memcpy(buf, index + skipped, *len);
    return rc;
}

ssize_t ht_optim_delta_read(const struct ht_delta *d, size_t i, bool values, uint64_t off, void *buf, size_t len)
{
    const struct ht_delta_param *p = &d->param[i];
    uint64_t bytes = values ? ht_dtype_trained_bytes(p->of.dtype) : p->of.index_bytes, all = p->of.changed * bytes;
    size_t want = off < all ? ht_min_u64(len, all - off) : 0, done = 0;

    while (done < want) {
        const struct ht_delta_piece *piece = find_piece(d, p, (off + done) / bytes);
        size_t n = want - done;
        int rc = (values ? read_values : read_indices)(d, &p->of, piece, off + done - piece->before * bytes,
                                                       (uint8_t *)buf + done, &n);
        if (rc)
            return done ? (ssize_t)done : rc;
        done += n;
    }
    return (ssize_t)done;
}
