/* SPDX-License-Identifier: Apache-2.0 */
/*
 * records.c - the records of roots and parameters; and with them the optimizer's part in commits, aborts and copies.
 *
 *   48 ROOT       u64 root, u64 step                                   create or update
 *   49 ROOT_DEL   u64 root                                             with all its parameters
 *   50 PARAM      u64 object, u64 root, u8 dtype, u8 zero, u16 count, u32 chunk bytes, u64 elements, u64 steps,
 *                 count x { u64 kind of state | form << 8 | salt << 32, u64 object }    create or replace
 *   51 PARAM_DEL  u64 object
 *   52 REDO, 53 REDO_DEL: redo.c
 *
 * The step in a record is a durable one by definition. Hyper-parameters are not here: they are the
 * text of an attribute of the root's directory. Only pub is ever put into the log, or emitted by a checkpoint.
 */
#include "tiering/base/mutant.h"
#include "tiering/api/keep.h"
#include "optim/state/records.h"
#include "optim/state/root.h"

static const uint64_t params_phase = 1ull << 63; /* of a checkpoint cursor: roots are done */

/*
 * A model without parameters makes the most memory of its log bytes: those of a directory with a short name, and of its
 * shortest attribute optimizer, beside the record. Names take a part of the memory.
 */
enum { MODEL_NAMES_LOG_BYTES = 144, MODEL_NAMES_BYTES = 400 };
static_assert(sizeof(struct ht_root) + MODEL_NAMES_BYTES <=
                  HT_META_OF_LOG_BYTE_MAX * (HT_OPT_ROOT_RECORD_BYTES + MODEL_NAMES_LOG_BYTES),
              "a replay of models has its memory (tiering/txn/replay.c)");

/* ------------------------------------------------------------------ encode */

void ht_opt_put_root(struct ht_buf *b, const struct ht_root *r)
{
    size_t mark = ht_record_begin(b, HT_REC_OPT_ROOT);

    ht_buf_put_u64(b, r->id);
    ht_buf_put_u64(b, r->pub_step);
    ht_record_end(b, mark);
}

/* A form other than f32 has the salt. */
static uint64_t kept_as(const struct ht_layout *l, unsigned i)
{
    return l->kind[i] | (l->form[i] ? (uint64_t)l->form[i] << 8 | (uint64_t)l->salt << 32 : 0);
}

static void put_param(struct ht_buf *b, const struct ht_param *p, const struct ht_param_meta *meta)
{
    size_t mark = ht_record_begin(b, HT_REC_OPT_PARAM);

    ht_buf_put_u64(b, p->oid);
    ht_buf_put_u64(b, p->root->id);
    ht_buf_put_u8(b, meta->dtype);
    ht_buf_put_u8(b, 0);
    ht_buf_put_u16(b, meta->layout.count);
    ht_buf_put_u32(b, meta->chunk_bytes);
    ht_buf_put_u64(b, meta->elements);
    ht_buf_put_u64(b, meta->t);
    for (unsigned i = 0; i < meta->layout.count; i++) {
        ht_buf_put_u64(b, kept_as(&meta->layout, i));
        ht_buf_put_u64(b, meta->oid[i]);
    }
    ht_record_end(b, mark);
}

/* ------------------------------------------------------ part in a commit */

static bool same_meta(const struct ht_param_meta *a, const struct ht_param_meta *b)
{
    if (a->exists != b->exists || !a->exists)
        return a->exists == b->exists;
    return a->dtype == b->dtype && a->chunk_bytes == b->chunk_bytes && a->elements == b->elements && a->t == b->t &&
        ht_opt_same_layout(&a->layout, &b->layout) && a->layout.salt == b->layout.salt &&
        !memcmp(a->oid, b->oid, sizeof(a->oid));
}

void ht_opt_publish_param(struct ht_param *p, struct ht_tx *tx)
{
    if (!same_meta(&p->cur, &p->pub)) {
        if (p->cur.exists)
            put_param(ht_tx_records(tx), p, &p->cur);
        else
            ht_opt_put_id(ht_tx_records(tx), HT_REC_OPT_PARAM_DEL, p->oid);
        p->pub = p->cur;
        if (!p->cur.exists && !p->gone)
            (void)!ht_opt_state_unreserve(p); /* giving back cannot fail */
    }
    p->stepped = false;
    p->redo_steps = 0;
    if (!p->pub.exists)
        ht_opt_record_unreserve(p);
    ht_opt_param_sweep(p, tx);
}

static void publish_root(struct ht_root *r, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_optim *o = r->o;

    r->published_config = r->config;
    if (r->redo.logging) { /* the rest stays unpublished */
        ht_opt_redo_put(r, tx);
        return;
    }
    ht_list_for_each_safe(pos, next, &r->params)
        ht_opt_publish_param(ht_list_entry(pos, struct ht_param, of_root), tx);
    r->undurable = 0;
    r->redo.continued = HT_MUTANT("lineage-kept") || (!r->redo.gap && !ht_scope_edited(o->store, r->id));
    r->redo.edits = ht_scope_edits_published(o->store, r->id);
    if (!r->redo.continued)
        ht_opt_redo_cut(r);
    r->redo.gap = r->redo.renamed = r->redo.full = false;
    if (o->started && !HT_MUTANT("logged-stay")) /* fsck publishes without having computed them */
        ht_opt_redo_delete(r, true, tx);
    if (r->step == r->pub_step || !r->exists) /* a deletion of its directory ended it */
        return;
    r->pub_step = r->step;
    ht_opt_put_root(ht_tx_records(tx), r);
}

void ht_opt_publish(void *ctx, uint64_t scope, size_t expected_bytes, struct ht_tx *tx)
{
    struct ht_optim *o = ctx;

    lock(o);
    struct ht_root *r = ht_opt_root_find(o, scope);
    if (r) {
        r->refs++;
        r->publications++;
        publish_root(r, tx);
        ht_opt_root_put(r);
    }
    unlock(o);
}

size_t ht_opt_pending_bytes(void *ctx, uint64_t scope)
{
    struct ht_optim *o = ctx;
    size_t bytes = 0;

    lock(o);
    const struct ht_root *r = ht_opt_root_find(o, scope);
    if (r) {
        bytes = ht_opt_redo_pending_bytes(r);
        bytes += r->redo.logging || r->step == r->pub_step ? 0 : HT_OPT_ROOT_RECORD_BYTES;
        ht_list_for_each_entry(p, &r->params, const struct ht_param, of_root)
            bytes += r->redo.logging || same_meta(&p->cur, &p->pub) ? 0 : HT_OPT_PARAM_RECORD_BYTES;
    }
    unlock(o);
    return bytes;
}

static void abort_param(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (memcmp(p->cur.oid, p->pub.oid, sizeof(p->cur.oid)) != 0)
        ht_opt_put_state(p);
    p->cur = p->pub;
    ht_opt_totals_update(p);
    p->stepped = false;
    p->redo_steps = 0;
    if (!p->cur.exists)
        ht_opt_record_unreserve(p);
}

void ht_opt_abort(void *ctx, uint64_t scope)
{
    struct ht_optim *o = ctx;

    lock(o);
    struct ht_root *r = ht_opt_root_find(o, scope);
    if (r) {
        if (!r->redo.sparing) {
            ht_list_for_each_entry(p, &r->params, struct ht_param, of_root)
                abort_param(p);
            r->step = r->pub_step;
            r->undurable = 0;
        }
        r->publications++;
        r->config = r->published_config;
        ht_opt_delta_cut(r);
        r->redo.gap = r->redo.renamed = r->redo.full = false;
        o->words_changes++;
        o->form_changes++;
    }
    unlock(o);
}

/* ---------------------------------------------------------- part in a copy */

/*
 * Of a model root: a kept step, or a model root made from one. Each parameter whose file is copied gets a twin in the
 * copy's root, and each state object a number for its copy. The caller holds the root's gate, so state neither appears
 * nor goes, and counts change with the publication alone. Nothing of a kept step changes: it takes no gradient, and
 * reserves no space. A parameter of a clone has its own reserves, as if its state had been made there.
 */

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
    struct ht_root *to;
    int rc = ht_opt_root_reserve(o, k->to, &to);

    if (rc)
        return rc;
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

/* ----------------------------------------------------------------- checkpoint */

/* New things put their own records after the begin mark: the cursor only needs to pass the things that were there. */
static bool emit_roots(struct ht_optim *o, struct ht_buf *b, uint64_t *cursor, size_t end) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(r, &o->roots, const struct ht_root, all) {
        if (r->seq <= *cursor || !r->exists)
            continue;
        if (b->len >= end)
            return false;
        ht_opt_put_root(b, r);
        ht_opt_redo_emit(r, b);
        *cursor = r->seq;
    }
    *cursor = params_phase;
    return true;
}

static bool emit_params(struct ht_optim *o, struct ht_buf *b, uint64_t *cursor, size_t end)
{
    ht_list_for_each_entry(p, &o->params, const struct ht_param, all) {
        if (p->seq <= (*cursor & ~params_phase) || !p->pub.exists)
            continue;
        if (b->len >= end)
            return false;
        put_param(b, p, &p->pub);
        *cursor = params_phase | p->seq;
    }
    return true;
}

int ht_opt_emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes)
{
    struct ht_optim *o = ctx;
    struct ht_buf *b = ht_tx_records(tx);
    size_t end = b->len + max_bytes;

    lock(o);
    bool all = (*cursor & params_phase) || emit_roots(o, b, cursor, end);
    all = all && emit_params(o, b, cursor, end);
    unlock(o);
    return all ? 0 : 1;
}

/* ------------------------------------------------------------------ replay */

/* A root that only a parameter has named yet is made, but does not exist. */
static int replay_root(struct ht_optim *o, uint64_t id, struct ht_reader *in) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t step = ht_get_u64(in);

    if (!ht_reader_done(in) || !id)
        return -EUCLEAN;
    struct ht_root *r = ht_opt_root_make(o, id);
    if (!r)
        return -ENOMEM;
    r->exists = true;
    r->step = r->pub_step = r->durable_step = step;
    return 0;
}

/* Are the master's kinds last, and in order? */
static bool masters_fit(const struct ht_param_meta *meta)
{
    const struct ht_layout *l = &meta->layout;
    unsigned masters = ht_opt_master_kinds(l), others = l->count - masters;

    for (unsigned i = 0; i < others; i++)
        if (l->kind[i] == HT_STATE_MASTER || l->kind[i] >= HT_STATE_MASTER_LOW)
            return false;
    return others <= HT_KERNEL_STATES_MAX && (masters > 0) == (ht_dtype_trained_bytes(meta->dtype) == 2) &&
        (masters < 2 || meta->dtype == HT_DTYPE_BF16);
}

/* Each kind at most once; all forms but f32 have one salt. */
static int read_kept(uint64_t kept, struct ht_layout *l, unsigned i)
{
    unsigned kind = kept & 0xff, form = kept >> 8 & 0xff;
    uint32_t salt = (uint32_t)(kept >> 32);

    if (kind >= HT_STATE_KINDS || !ht_state_word(kind) || memchr(l->kind, (int)kind, i) || kept >> 16 & 0xffff)
        return -EUCLEAN;
    if (form ? !ht_form_fits(form, (uint8_t)kind) || (l->salt && l->salt != salt) : salt != 0)
        return -EUCLEAN;
    l->kind[i] = (uint8_t)kind;
    l->form[i] = (uint8_t)form;
    l->salt = form ? salt : l->salt;
    return 0;
}

static int read_states(struct ht_reader *in, struct ht_param_meta *meta, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        if (read_kept(ht_get_u64(in), &meta->layout, i))
            return -EUCLEAN;
        meta->oid[i] = ht_get_u64(in);
        if (!meta->oid[i] || meta->oid[i] > HT_ID_MAX)
            return -EUCLEAN;
    }
    meta->layout.count = (uint8_t)count;
    return masters_fit(meta) ? 0 : -EUCLEAN;
}

static int read_meta(struct ht_reader *in, struct ht_param_meta *meta)
{
    *meta = (struct ht_param_meta){.exists = true, .dtype = ht_get_u8(in)};
    uint8_t zero = ht_get_u8(in);
    uint16_t count = ht_get_u16(in);
    meta->chunk_bytes = ht_get_u32(in);
    meta->elements = ht_get_u64(in);
    meta->t = ht_get_u64(in);
    if (in->bad || zero || !ht_dtype_trained_bytes(meta->dtype) || count > HT_STATES_MAX ||
        !HT_CHUNK_BYTES_VALID(meta->chunk_bytes) || meta->elements > HT_FILE_BYTES_MAX / 4 || meta->t > 1ull << 53)
        return -EUCLEAN;
    return read_states(in, meta, count);
}

static int put_in_table(struct ht_optim *o, uint64_t oid, uint64_t root_id, const struct ht_param_meta *meta)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_root *r = ht_opt_root_make(o, root_id);
    struct ht_param *p = ht_opt_param_find(o, oid);

    if (p && p->root != r) {
        ht_opt_param_free(p);
        p = NULL;
    }
    if (r && !p)
        p = ht_opt_param_make(r, oid);
    if (!p)
        return -ENOMEM;
    p->cur = p->pub = *meta;
    ht_opt_totals_update(p);
    return ht_opt_state_shape(p, &p->shape);
}

static int replay_param(struct ht_optim *o, uint64_t oid, struct ht_reader *in) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t root = ht_get_u64(in);
    struct ht_param_meta meta;

    if (in->bad || !oid || oid > HT_ID_MAX || !root || read_meta(in, &meta) || !ht_reader_done(in))
        return -EUCLEAN;
    ht_store_saw_id(o->store, oid);
    for (unsigned i = 0; i < meta.layout.count; i++)
        ht_store_saw_id(o->store, meta.oid[i]);
    return put_in_table(o, oid, root, &meta);
}

/* The end of a root, of a parameter, or of a root's logged steps. */
static int replay_del(struct ht_optim *o, uint16_t type, uint64_t id, struct ht_reader *in) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (!ht_reader_done(in))
        return -EUCLEAN;
    struct ht_root *r = type == HT_REC_OPT_PARAM_DEL ? NULL : ht_opt_root_find(o, id);
    struct ht_param *p = type == HT_REC_OPT_PARAM_DEL ? ht_opt_param_find(o, id) : NULL;
    if (p)
        ht_opt_param_free(p);
    if (r)
        r->redo.steps = 0;
    if (r && type == HT_REC_OPT_ROOT_DEL)
        ht_opt_root_forget(r);
    return 0;
}

/* Every record begins with the number of a root or of a parameter. */
static int replay_record(struct ht_optim *o, uint16_t type, struct ht_reader *in) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t id = ht_get_u64(in);
    struct ht_root *r;

    switch (type) {
    case HT_REC_OPT_ROOT:
        return replay_root(o, id, in);
    case HT_REC_OPT_PARAM:
        return replay_param(o, id, in);
    case HT_REC_OPT_REDO:
        r = id ? ht_opt_root_make(o, id) : NULL;
        return r ? ht_opt_redo_replay_record(r, in) : id ? -ENOMEM : -EUCLEAN;
    case HT_REC_OPT_ROOT_DEL:
    case HT_REC_OPT_PARAM_DEL:
    case HT_REC_OPT_REDO_DEL:
        return replay_del(o, type, id, in);
    default:
        return -EUCLEAN;
    }
}

int ht_opt_replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    struct ht_optim *o = ctx;
    struct ht_reader in = ht_reader_of(payload, len);

    lock(o);
    int rc = replay_record(o, type, &in);
    unlock(o);
    return rc;
}

/* ---------------------------------------------------------------- replayed */

/* Log bytes can be reserved only when the log has been read to its end. */
static void reserve_all(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(r, &o->roots, struct ht_root, all) {
        r->frozen = ht_scope_is_frozen(o->store, r->id); /* names have been linked up */
        ht_store_log_reserve_force(o->store, r->exists ? HT_OPT_ROOT_RECORD_BYTES : 0);
        ht_store_log_reserve_force(o->store, r->redo.steps * HT_OPT_REDO_RECORD_BYTES);
    }
    ht_list_for_each(pos, &o->params) {
        ht_store_log_reserve_force(o->store, HT_OPT_PARAM_RECORD_BYTES);
        ht_list_entry(pos, struct ht_param, all)->log_reserved = true;
    }
}

int ht_opt_replayed(void *ctx)
{
    struct ht_optim *o = ctx;

    lock(o);
    int rc = ht_opt_check_states(o);
    reserve_all(o);
    unlock(o);
    return rc;
}
