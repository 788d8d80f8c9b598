/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ortho.c - the step of a parameter in two phases: its update depends on a whole matrix, which is orthogonalised in
 * between, by a client or by the store.
 *
 *   gradient of a range covered --worker: MOMENTUM--> momentum, `update`; the gradient is dropped; IDLE, stirred
 *   all ranges stirred ----------> update/P is read                    ns=store: a worker orthogonalises (ORTHO)
 *   ortho/P written, whole, finite --apply ortho/P if=N--> all ranges QUEUED(UPDATE) --worker--> parameter; DONE
 *
 * With clipping or skipping the first phase waits for the verdict on the step: for `prepare`, or the boundary.
 *
 * Both objects are scratch: a crash forgets them with the step, and so does an abort, which brings the momentum back as
 * all state. Range i of a parameter is chunk i of each. Bytes of clients count only in the step in which they were
 * written, and only after update/P was asked for in it: so nothing of an earlier step gets into a later one.
 */

#include "tiering/base/activity.h"
#include "optim/rules/blocks.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/gradient/gradient_priv.h"

enum { ORTHO_BYTES = 2, CHECK_BYTES = 64 << 10, WAITING_MATRICES_MAX = 4, WAITING_BYTES_MIN = 64 << 20 };

/* ----------------------------------------------------------------- objects */

uint32_t ht_opt_ortho_chunk_bytes(const struct ht_param *p)
{
    return (uint32_t)ht_max_u64(HT_SMALL_CHUNK_BYTES, (uint64_t)p->shape.range_elements * ORTHO_BYTES);
}

static uint64_t object_bytes(const struct ht_param *p)
{
    uint64_t before = p->shape.range_count ? p->shape.range_count - 1 : 0;

    return before * ht_opt_ortho_chunk_bytes(p) + (p->shape.elements - before * p->shape.range_elements) * ORTHO_BYTES;
}

bool ht_opt_ortho_lacks(const struct ht_param *p)
{
    const struct ht_ortho *of = p->ortho;

    return !of || !of->given || ht_obj_chunk_bytes(of->given) != ht_opt_ortho_chunk_bytes(p) ||
        ht_obj_size(of->given) != object_bytes(p);
}

static int make_one(const struct ht_param *p, struct ht_obj **out)
{
    uint64_t bytes = object_bytes(p), none = 0;
    struct ht_obj *obj;

    lock(p->o);
    uint64_t *aside = p->root->redo.recovering ? &p->o->replay_room_bytes : &none;
    unlock(p->o);
    int rc = ht_opt_object_create(p->o->store, 0, ht_opt_ortho_chunk_bytes(p), &obj);

    if (rc)
        return rc;
    rc = ht_obj_truncate(obj, bytes);
    if (!rc) { /* never published, as a gradient */
        lock(p->o);
        rc = ht_obj_rewrite_reserve_aside(obj, ht_div_up(bytes, 2), aside);
        unlock(p->o);
    }
    if (rc) {
        int err = ht_opt_scratch_delete(p, &obj);
        return err ? err : rc;
    }
    *out = obj;
    return 0;
}

int ht_opt_ortho_make(struct ht_param *p)
{
    struct ht_ortho *of = p->ortho ? p->ortho : calloc(1, sizeof(*of));
    struct ht_obj *obj[2] = {NULL};
    int rc = of ? ht_opt_ortho_delete(p) : -ENOMEM;

    for (unsigned i = 0; !rc && i < HT_ARRAY_SIZE(obj); i++)
        rc = make_one(p, &obj[i]);
    if (rc && obj[0])
        (void)!ht_opt_scratch_delete(p, &obj[0]); /* the log has failed; the next mount has no scratch */
    lock(p->o);
    if (of && p->ortho != of) {
        p->ortho = of;
        ht_opt_ortho_count(p, false);
    }
    if (!rc) {
        of->update = obj[0];
        of->given = obj[1];
    }
    unlock(p->o);
    return rc;
}

/* -------------------------------------------------------------- first phase */

void ht_opt_ortho_stirred(struct ht_range *r)
{
    struct ht_param *p = r->param;

    r->state = HT_RANGE_IDLE;
    r->work = 0;
    r->stirred = true;
    r->logged = false; /* so is the orthogonalised update to be */
    ht_opt_range_drop(r);
    ht_opt_sum_drop(r);
    if (p->root->redo.replaying) { /* nobody reads it: the step has what was made of it */
        unlock(p->o);
        ht_obj_scratch_drop(p->ortho->update, r->index, 1);
        lock(p->o);
    } else {
        uint64_t bytes = ht_opt_range_elements(&p->shape, r->index) * ORTHO_BYTES;
        p->ortho->update_bytes += bytes;
        p->root->update_bytes += bytes;
    }
    if (++p->ortho->stirred == p->shape.range_count && p->ortho->config.ns_store && !p->gone)
        ht_opt_range_queue(ht_opt_range_find(p, 0), HT_WORK_ORTHO);
}

bool ht_opt_ortho_missing(const struct ht_param *p)
{
    return p->has_grad && ht_opt_in_phases(p) && !p->root->skipping && !p->ortho->applied && !p->ortho->config.ns_store;
}

/* ------------------------------------------------------------------ clients */

/* A call of a client for a parameter in the open step. */
struct visit {
    struct ht_param *p;
    uint64_t step, forgotten;
    const char *what; /* it does, for messages */
};

static int refuse(const struct visit *v, int error, const char *why)
{
    ht_opt_refuse(v->p->root, HT_EVENT_GRADIENT_REFUSED, v->p->oid, "%s: %s", v->what, why);
    return error;
}

/* Is it still the step in which the call began? */
static bool is_same_step(const struct visit *v) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param *p = v->p;

    return !p->gone && p->has_grad && p->root->open == v->step && p->forgotten == v->forgotten;
}

/* Waits for a boundary or an abort. *out_why: the reason of a refusal. */
static int begin_visit(struct visit *v, const char **out_why) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = v->p;

    int rc = ht_opt_wait_replayed(p->root);
    if (!rc)
        rc = ht_opt_wait_open(p->root);
    if (rc)
        return rc;
    v->step = p->root->open;
    v->forgotten = p->forgotten;
    if (p->gone)
        return -ESTALE;
    *out_why = "it has no gradient in the open step";
    if (!p->has_grad)
        return -EBUSY;
    *out_why = "its rule is not muon: its gradient is applied without that";
    if (!ht_opt_in_phases(p))
        return -EINVAL;
    *out_why = "ns=store: the store orthogonalises it itself";
    if (p->ortho->config.ns_store)
        return -EINVAL;
    *out_why = "the step is skipped, for a value of its gradients is not finite";
    return p->root->skipping ? -ENODATA : 0;
}

/* Why the first phase cannot end by itself; NULL: it can. */
static const char *why_not_stirred(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->complete != p->shape.range_count && !p->root->prepared)
        return "its gradient is not whole yet";
    if (ht_opt_deferred(p->root) && !p->root->prepared)
        return "the step may be clipped or skipped: the command prepare comes first";
    return NULL;
}

/* -EBUSY: no worker will end the first phase. Releases the lock while it waits. */
static int wait_stirred(struct visit *v, const char **out_why) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = v->p;
    int rc = begin_visit(v, out_why);

    ht_activity_wait("the momentum of parameter", p->oid);
    while (!rc && p->ortho->stirred < p->shape.range_count) {
        *out_why = why_not_stirred(p);
        rc = *out_why ? -EBUSY : p->o->stopping ? -ECANCELED : p->root->failure ? -EIO : 0;
        if (!rc)
            wait_changed(p->o);
        if (!rc && !is_same_step(v))
            rc = -ESTALE;
    }
    ht_activity_go_on();
    if (!rc && p->ortho->applied) {
        *out_why = "the orthogonalised update was applied in this step already";
        rc = -EBUSY;
    }
    if (!rc)
        p->ortho->asked = true;
    return rc;
}

/* Reads or writes bytes of the file [off, off + len) in one of the objects. Returns len, or an error. */
static ssize_t move_bytes(const struct ht_param *p, struct ht_obj *obj, uint64_t off, void *buf, size_t len, bool write)
{
    uint64_t per_range = (uint64_t)p->shape.range_elements * ORTHO_BYTES;
    ssize_t rc = 0;

    for (size_t done = 0, part; !rc && done < len; done += part) {
        uint64_t at = off + done, in = at % per_range;
        part = ht_min_u64(len - done, per_range - in);
        uint64_t place = at / per_range * ht_opt_ortho_chunk_bytes(p) + in;
        uint8_t *bytes = (uint8_t *)buf + done;
        do
            rc = write ? ht_opt_write_all(obj, place, bytes, part) : ht_opt_read_all(obj, place, bytes, part);
        while (write && rc == -ENOSPC && !ht_store_make_space(p->o->store, true));
    }
    return rc ? rc : (ssize_t)len;
}

static uint64_t file_bytes(const struct ht_param *p)
{
    return p->shape.elements * ORTHO_BYTES;
}

ssize_t ht_optim_update_read(struct ht_optim *o, const struct ht_param_desc *desc, uint64_t off, void *buf, size_t len)
{
    struct visit v = {.p = ht_opt_param_get(o, ht_obj_id(desc->obj)), .what = "update"};
    const char *why = NULL;

    if (!v.p)
        return -EBUSY;
    lock(o);
    ssize_t rc = wait_stirred(&v, &why);
    struct ht_obj *obj = rc ? NULL : ht_obj_ref(v.p->ortho->update);
    uint64_t bytes = file_bytes(v.p);
    unlock(o);
    len = off < bytes ? ht_min_u64(len, bytes - off) : 0;
    if (!rc && len) {
        rc = move_bytes(v.p, obj, off, buf, len, false);
        lock(o);
        if (rc >= 0 && (!is_same_step(&v) || v.p->ortho->applied))
            rc = -ESTALE;
        unlock(o);
    }
    ht_obj_put(obj);
    if (rc < 0 && why)
        rc = refuse(&v, (int)rc, why);
    ht_opt_param_put(v.p);
    return rc;
}

/* So many bytes may wait in all: a few matrices. */
static bool may_wait(const struct ht_param *p, uint64_t more) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t most = ht_max_u64(WAITING_BYTES_MIN, WAITING_MATRICES_MAX * file_bytes(p));

    return p->ortho->waiting_bytes || p->root->ortho_bytes + more <= most;
}

static int begin_ortho_write(struct visit *v, uint64_t off, size_t len, const char **out_why) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = v->p;
    int rc = begin_visit(v, out_why);

    if (rc)
        return rc;
    *out_why = "a write has whole elements of two bytes, and none beyond the end of the parameter";
    if (off % ORTHO_BYTES || len % ORTHO_BYTES || off > file_bytes(p) || len > file_bytes(p) - off)
        return -EINVAL;
    *out_why = "update/ of this parameter was not read in the open step: what is written cannot be of this step";
    if (!p->ortho->asked && !p->root->decided) /* then the step is a logged one of another store */
        return -EBUSY;
    *out_why = "it was applied in this step already";
    if (p->ortho->applied)
        return -EBUSY;
    *out_why = "too many others of this model were written and wait to be applied: apply those first";
    if (!may_wait(p, file_bytes(p)))
        return -EDQUOT;
    if (!p->ortho->waiting_bytes) {
        p->ortho->waiting_bytes = file_bytes(p);
        p->root->ortho_bytes += file_bytes(p);
    }
    *out_why = NULL;
    p->ortho->writers++;
    return 0;
}

ssize_t ht_optim_ortho_write(struct ht_optim *o, const struct ht_param_desc *desc, uint64_t off, const void *buf,
                             size_t len)
{
    struct visit v = {.p = ht_opt_param_get(o, ht_obj_id(desc->obj)), .what = "ortho"};
    const char *why = NULL;

    if (!v.p)
        return -EBUSY;
    lock(o);
    ssize_t rc = begin_ortho_write(&v, off, len, &why);
    struct ht_ortho *of = v.p->ortho;
    unlock(o);
    if (!rc && len) {
        rc = move_bytes(v.p, of->given, off, (void *)(uintptr_t)buf, len, true);
        lock(o);
        of->writers--;
        if (rc >= 0 && !is_same_step(&v))
            rc = -ESTALE;
        int err = rc < 0
            ? 0
            : ht_interval_set_add(&of->written, (uint32_t)(off / ORTHO_BYTES), (uint32_t)((off + len) / ORTHO_BYTES));
        ht_opt_ortho_count(v.p, false);
        if (err)
            why = "it is written in too many pieces";
        rc = err ? err : rc;
        notify_changed(o);
        unlock(o);
    }
    if (rc < 0 && why)
        rc = refuse(&v, (int)rc, why);
    ht_opt_param_put(v.p);
    return rc;
}

/* -------------------------------------------------------------------- apply */

/* Queues the second phase of all ranges. Returns a ticket of the invalidation. */
static uint64_t queue_all(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (uint64_t i = 0; i < p->shape.range_count; i++)
        ht_opt_range_queue(ht_opt_range_find(p, i), HT_WORK_UPDATE);
    return ht_opt_inval(p, 0, p->shape.range_count - 1);
}

/* bf16: all exponent bits are set. */
static bool any_nonfinite(const uint16_t *x, size_t n)
{
    bool found = false;

    for (size_t i = 0; i < n; i++)
        found |= (x[i] & 0x7f80) == 0x7f80;
    return found;
}

/* -ERANGE: a value is NaN or infinite. The bytes do not change. */
static int check_finite(const struct ht_param *p)
{
    uint16_t *buf = malloc(CHECK_BYTES);
    ssize_t rc = buf ? 0 : -ENOMEM;

    for (uint64_t off = 0, n; rc >= 0 && off < file_bytes(p); off += n) {
        n = ht_min_u64(CHECK_BYTES, file_bytes(p) - off);
        rc = move_bytes(p, p->ortho->given, off, buf, n, false);
        if (rc >= 0 && any_nonfinite(buf, n / ORTHO_BYTES))
            rc = -ERANGE;
    }
    free(buf);
    return rc < 0 ? (int)rc : 0;
}

/* From then on no client writes. Releases the lock while it waits. */
static int begin_apply(struct visit *v, uint64_t step_open, const char **out_why) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = v->p;
    int rc = begin_visit(v, out_why);

    if (p->root->open != step_open) {
        *out_why = "that is not the open step";
        return -ESTALE;
    }
    if (rc)
        return rc;
    *out_why = "update/ of this parameter was not read in the open step";
    if (!p->ortho->asked && !p->root->decided)
        return -EBUSY;
    *out_why = why_not_stirred(p);
    if (*out_why)
        return -EBUSY;
    while (p->ortho->stirred < p->shape.range_count && is_same_step(v) && !p->root->failure && !p->o->stopping)
        wait_changed(p->o);
    *out_why = "the step has failed, or ended meanwhile";
    if (p->ortho->stirred < p->shape.range_count || !is_same_step(v))
        return p->root->failure ? -EIO : -ESTALE;
    *out_why = "it was applied in this step already";
    if (p->ortho->applied)
        return -EBUSY;
    p->ortho->applied = true;
    while (p->ortho->writers)
        wait_changed(p->o);
    *out_why = "the step ended meanwhile";
    if (!is_same_step(v))
        return -ESTALE;
    *out_why = "it is not written wholly: write the rest, and apply again";
    if (!ht_interval_set_cover(&p->ortho->written, 0, (uint32_t)p->shape.elements)) {
        p->ortho->applied = false;
        return -EINVAL;
    }
    p->root->running++; /* no boundary and no abort ends the step before end_apply() */
    *out_why = NULL;
    return 0;
}

static int end_apply(struct visit *v, int rc, const char **out_why, uint64_t *out_ticket) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = v->p;

    if (!is_same_step(v)) {
        *out_why = "the step ended meanwhile";
        return -ESTALE;
    }
    if (rc == -ERANGE)
        *out_why = "a value is not finite, so nothing is applied: write it anew and apply again, or abort";
    if (rc) {
        p->ortho->applied = false;
        return rc == -ERANGE ? -EINVAL : rc;
    }
    ht_opt_ortho_spent(p);
    *out_ticket = queue_all(p);
    ht_opt_succeeded(p->root, HT_EVENT_GRADIENT_REFUSED, p->oid);
    return 0;
}

static int apply_ortho(struct visit *v, uint64_t step_open)
{
    struct ht_optim *o = v->p->o;
    const char *why = NULL;
    uint64_t ticket = 0;

    lock(o);
    int rc = begin_apply(v, step_open, &why);
    unlock(o);
    if (!rc) {
        rc = check_finite(v->p);
        lock(o);
        rc = end_apply(v, rc, &why, &ticket);
        notify_changed(o);
        struct ht_obj *spent = rc ? NULL : v->p->ortho->update;
        unlock(o);
        if (spent) /* no second one is made in this step */
            ht_obj_scratch_drop(spent, 0, UINT64_MAX);
        lock(o);
        ht_opt_range_ran(v->p->root);
        notify_changed(o);
        ht_opt_inval_wait(o, ticket);
        unlock(o);
    }
    return rc && why ? refuse(v, rc, why) : rc;
}

int ht_optim_ortho_apply(struct ht_optim *o, uint64_t root, uint64_t oid, uint64_t step_open)
{
    struct visit v = {.p = ht_opt_param_get(o, oid), .what = "apply ortho"};
    int rc = v.p && v.p->root->id == root ? apply_ortho(&v, step_open) : -ENOENT;

    ht_opt_param_put(v.p);
    return rc;
}

/* ---------------------------------------------------------------- ns=store */

/*
 * A worker orthogonalises, block by block. It works in memory of its own and holds no chunk, so it may wait for memory
 * of the store. Nobody else uses the two objects meanwhile: no client gives the update of such a parameter. The words
 * of the step stay as they are while a range is in work.
 */
static bool is_unwanted(void *ctx)
{
    const struct ht_param *p = ctx;

    lock(p->o);
    bool unwanted = p->o->stopping || p->gone;
    unlock(p->o);
    return unwanted;
}

static int compute_block(void *ctx, uint64_t first, uint32_t rows)
{
    struct ht_param *p = ctx;
    const struct ht_optim_config *c = &p->ortho->config;
    uint32_t columns = c->matrix.columns;
    size_t bytes = (size_t)rows * columns * 2;
    uint16_t *u = malloc(bytes);
    ssize_t rc = u ? move_bytes(p, p->ortho->update, first * 2, u, bytes, false) : -ENOMEM;

    if (rc >= 0)
        rc = ht_newton_schulz(p->o->kernels, c, u, rows, columns, is_unwanted, p);
    if (rc >= 0)
        rc = move_bytes(p, p->ortho->given, first * 2, u, bytes, true);
    free(u);
    return rc < 0 ? (int)rc : 0;
}

/* The range is queued for the second phase with the others, or the step has failed. Releases the lock in between. */
static void settle(struct ht_range *r, int rc) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = r->param;
    struct ht_root *root = p->root;
    unsigned work = r->work;

    r->state = rc ? HT_RANGE_FAILED : HT_RANGE_IDLE;
    r->work = 0;
    p->failed += rc != 0;
    if (rc && !root->failure)
        root->failure = rc;
    if (!rc && !p->gone) {
        p->ortho->applied = true;
        ht_opt_ortho_spent(p);
        (void)queue_all(p); /* its caches are dropped since the first phase: readers wait */
    }
    ht_opt_range_ended(r, work);
}

void ht_opt_ortho_compute(struct ht_range *r)
{
    struct ht_param *p = r->param;
    int rc = ht_muon_each_block(&p->ortho->config, compute_block, p);

    if (rc && !is_unwanted(p))
        ht_opt_refuse(p->root, HT_EVENT_UPDATE_FAILED, p->oid,
                      "its update cannot be orthogonalised: %s; abort returns to the last commit", strerror(-rc));
    ht_obj_scratch_drop(p->ortho->update, 0, UINT64_MAX);
    lock(p->o);
    settle(r, rc);
    unlock(p->o);
}
