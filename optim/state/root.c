/* SPDX-License-Identifier: Apache-2.0 */
/*
 * root.c - model roots: their table, configuration, gate, figures and dump (tiering/base/dump.h).
 *
 * A root lives while the log knows it, or while it has references.
 */
#include <stdarg.h>

#include "tiering/base/activity.h"
#include "tiering/base/dump.h"
#include "optim/state/records.h"
#include "optim/state/root.h"

enum {
    SUMS_SLICE = 256, /* under one hold of the lock */
    NAME_BYTES = 160,
    DUMP_ROOTS_MAX = 64,
    DUMP_PARAMS_MAX = 32, /* of one root */
};

/* ------------------------------------------------------------------- table */

struct ht_root *ht_opt_root_find(struct ht_optim *o, uint64_t id)
{
    struct ht_id_link *link = ht_id_find(&o->roots_by_id, id);

    return link ? ht_container_of(link, struct ht_root, by_id) : NULL;
}

struct ht_root *ht_opt_root_make(struct ht_optim *o, uint64_t id)
{
    struct ht_root *r = ht_opt_root_find(o, id);

    if (r)
        return r;
    r = calloc(1, sizeof(*r));
    if (!r)
        return NULL;
    r->by_id.id = id;
    if (ht_id_insert(&o->roots_by_id, &r->by_id)) {
        free(r);
        return NULL;
    }
    r->o = o;
    r->id = id;
    r->seq = ++o->next_seq;
    ht_list_init(&r->params);
    ht_list_init(&r->sums);
    ht_list_init(&r->touched);
    ht_list_init(&r->early);
    ht_list_init(&r->queue);
    ht_list_init(&r->ready);
    ht_list_init(&r->closing);
    ht_list_add_tail(&o->roots, &r->all);
    o->meta_bytes += sizeof(*r);
    ht_opt_redo_cut(r);
    ht_opt_deltas_init(r);
    return r;
}

struct ht_root *ht_opt_root_get(struct ht_optim *o, uint64_t id)
{
    lock(o);
    struct ht_root *r = ht_opt_root_find(o, id);
    if (r && !r->exists)
        r = NULL;
    if (r)
        r->refs++;
    unlock(o);
    return r;
}

void ht_opt_root_put(struct ht_root *r)
{
    if (--r->refs || r->exists || !ht_list_empty(&r->params))
        return;
    ht_list_del(&r->all);
    ht_id_remove(&r->o->roots_by_id, &r->by_id);
    r->o->meta_bytes -= sizeof(*r);
    ht_opt_redo_free(r);
    ht_opt_delta_cut(r);
    ht_opt_reopened(r);
    free(r);
}

void ht_opt_root_forget(struct ht_root *r)
{
    r->refs++;
    ht_list_for_each_safe(pos, next, &r->params)
        ht_opt_param_free(ht_list_entry(pos, struct ht_param, of_root));
    r->exists = false;
    ht_opt_root_put(r);
}

void ht_opt_expect_waiting(struct ht_root *r, uint64_t bytes)
{
    if (bytes == r->waiting_bytes)
        return;
    r->o->waiting_bytes += bytes - r->waiting_bytes;
    r->waiting_bytes = bytes;
    /* As many as may be queued can wait where content passes. */
    uint64_t total = r->o->waiting_bytes, passing = ht_min_u64(total, r->o->backlog_bytes_max);
    ht_store_expect_waiting(r->o->store, total - passing);
}

bool ht_opt_backlog_full(const struct ht_root *r)
{
    return r->backlog_bytes && r->backlog_bytes + r->update_bytes + r->ortho_bytes >= r->o->backlog_bytes_max;
}

/* -------------------------------------------------------------------- gate */

bool ht_opt_interrupted(const struct ht_root *r)
{
    return r->redo.replaying && ht_activity_interrupted();
}

int ht_opt_refuses(struct ht_root *r)
{
    int rc = r->redo.failed ? -EIO : r->redo.starved ? -ENOSPC : 0;

    r->refusals += rc != 0; /* its error says why */
    return rc;
}

int ht_opt_gate_take(struct ht_root *r)
{
    if (r->frozen)
        return -EROFS;
    ht_activity_wait("the gate of model root", r->id);
    while (r->gate && !r->redo.starved && !r->o->stopping && !ht_opt_interrupted(r))
        wait_changed(r->o);
    ht_activity_go_on();
    if (r->o->stopping)
        return -ECANCELED;
    if (r->gate)
        return r->redo.starved ? ht_opt_refuses(r) : -EINTR;
    r->gate = true;
    r->gate_thread = ht_activity_thread();
    return 0;
}

int ht_opt_gate_enter(struct ht_root *r)
{
    int rc = ht_opt_gate_take(r);

    if (rc)
        return rc;
    rc = ht_opt_refuses(r);
    if (rc)
        ht_opt_gate_leave(r);
    return rc;
}

void ht_opt_gate_leave(struct ht_root *r)
{
    r->gate = false;
    notify_changed(r->o);
}

int ht_opt_wait_replayed(struct ht_root *r)
{
    ht_activity_wait("logged steps of model root", r->id);
    while (r->redo.replaying && !r->o->stopping && !ht_opt_interrupted(r))
        wait_changed(r->o);
    ht_activity_go_on();
    if (r->redo.replaying)
        return r->o->stopping ? -ECANCELED : -EINTR;
    return ht_opt_refuses(r);
}

int ht_opt_wait_open(struct ht_root *r)
{
    ht_activity_wait("the end of a boundary or abort of model root", r->id);
    while (r->draining && !r->o->stopping && !ht_opt_interrupted(r))
        wait_changed(r->o);
    ht_activity_go_on();
    return r->o->stopping ? -ECANCELED : r->draining ? -EINTR : 0;
}

/* ------------------------------------------------------------------ errors */

void ht_opt_refuse(struct ht_root *r, enum ht_event_code code, uint64_t oid, const char *fmt, ...)
{
    struct ht_optim *o = r->o;
    char name[NAME_BYTES] = "", text[HT_OPTIM_ERROR_MAX];
    va_list ap;

    if (oid && o->hooks.name)
        o->hooks.name(o->hooks.ctx, oid, name, sizeof(name));
    if (oid && !name[0])
        snprintf(name, sizeof(name), "a deleted file");
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    ht_opt_event(code, oid ? oid : r->id, "%s", text);
    lock(o);
    struct ht_refusal *e = &r->error;
    if (code == HT_EVENT_REPLAY_FAILED || code == HT_EVENT_NOT_RESERVED) {
        r->closed = r->closed ? r->closed : malloc(sizeof(*r->closed));
        e = r->closed ? r->closed : e;
    }
    *e = (struct ht_refusal){.code = code, .oid = oid, .step = r->step, .time = time(NULL)};
    int n = snprintf(e->text, sizeof(e->text), "%s%s", name, oid ? ": " : "");
    size_t used = n < 0 ? 0 : ht_min_u64((uint64_t)n, sizeof(e->text) - 1);
    size_t len = ht_min_u64(strlen(text), sizeof(e->text) - 1 - used);
    memcpy(e->text + used, text, len);
    r->refusals++;
    unlock(o);
}

void ht_opt_reopened(struct ht_root *r)
{
    free(r->closed);
    r->closed = NULL;
}

void ht_opt_succeeded(struct ht_root *r, enum ht_event_code code, uint64_t oid)
{
    if (r->error.code == code && (!oid || r->error.oid == oid))
        r->error.text[0] = '\0';
}

/* --------------------------------------------------------------- interface */

int ht_opt_root_reserve(struct ht_optim *o, uint64_t id, struct ht_root **out)
{
    int rc = ht_store_log_reserve(o->store, HT_OPT_ROOT_RECORD_BYTES);

    if (rc)
        return rc;
    *out = ht_opt_root_make(o, id);
    if (!*out)
        ht_store_log_unreserve(o->store, HT_OPT_ROOT_RECORD_BYTES);
    return *out ? 0 : -ENOMEM;
}

static void take_config(struct ht_root *r, const struct ht_optim_config *config) HT_REQUIRES(HT_LOCK_OPTIM)
{
    r->config = *config;
    r->configured = true;
    ht_opt_redo_trim(r);
    ht_opt_redo_set_aside(r);
    r->deltas.skips = 0;
    ht_opt_delta_trim(r);
}

int ht_optim_root_add(struct ht_optim *o, uint64_t root, const struct ht_optim_config *config, struct ht_tx *tx)
{
    int rc = 0;

    lock(o);
    struct ht_root *r = ht_opt_root_find(o, root);
    bool found = r && r->exists;
    if (!found)
        rc = tx ? ht_opt_root_reserve(o, root, &r) : -ENOENT;
    if (!rc && !found) {
        r->exists = true;
        ht_opt_put_root(ht_tx_records(tx), r);
    }
    if (!rc) {
        r->published_config = *config;
        take_config(r, config);
        r->written_bytes = ht_scope_written_bytes(o->store, root);
    }
    unlock(o);
    return rc;
}

/* The kept state counts, too: sgd has some with momentum only. */
static bool same_rule(const struct ht_optim_config *a, const struct ht_optim_config *b)
{
    struct ht_layout was = ht_opt_layout(a, HT_DTYPE_F32, 0), is = ht_opt_layout(b, HT_DTYPE_F32, 0);

    return a->rule == b->rule && ht_opt_same_rule_state(&was, &is);
}

static bool same_forms(const struct ht_optim_config *a, const struct ht_optim_config *b)
{
    return a->state_bits == b->state_bits && a->state_bits_min == b->state_bits_min;
}

static int may_change(const struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return !r || !r->exists ? -ENOENT : r->frozen ? -EROFS : 0;
}

int ht_optim_root_configure(struct ht_optim *o, uint64_t root, const struct ht_optim_config *config)
{
    lock(o);
    struct ht_root *r = ht_opt_root_find(o, root);
    int rc = may_change(r);
    if (!rc && r->configured && !same_rule(&r->config, config))
        ht_list_for_each_entry(p, &r->params, const struct ht_param, of_root)
            rc = p->cur.exists ? -EBUSY : rc;
    if (!rc && r->configured && !same_forms(&r->config, config)) {
        rc = r->open ? -EAGAIN : 0;
        o->form_changes += !rc;
    }
    if (!rc) {
        r->redo.largest = 0;
        take_config(r, config);
        o->words_changes++;
    }
    unlock(o);
    return rc;
}

/* No step is open and none is unpublished: the only state in which a root may end. */
bool ht_opt_root_idle(const struct ht_root *r)
{
    if (r->open || r->pending || r->running || r->step != r->pub_step)
        return false;
    ht_list_for_each_entry(p, &r->params, const struct ht_param, of_root)
        if (p->has_grad || (p->cur.exists && (!p->pub.exists || p->cur.t != p->pub.t)))
            return false;
    return true;
}

/* The parameter is an ordinary file from now on. */
static void remove_param(struct ht_param *p, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_state_delete(p, tx);
    /* Reservations only end here; giving them back cannot fail. */
    if (p->obj && ht_obj_rewrite_reserve(p->obj, 0))
        ht_opt_not_reserved(p, "its reservation stays");
    if (p->obj)
        ht_obj_unprotect(p->obj);
    p->gone = true;
    ht_opt_coverage_clear(p, false);
}

/* Ends a root whose parameters are all gone. */
static void end_root(struct ht_root *r, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM)
{
    r->redo.continued = false;
    ht_opt_redo_delete(r, false, tx);
    ht_opt_redo_end_aside(r);
    ht_opt_redo_cut(r);
    ht_opt_delta_cut(r);
    r->redo.failed = 0;
    ht_opt_reopened(r);
    r->redo.gap = r->redo.renamed = r->redo.full = false;
    ht_opt_put_id(ht_tx_records(tx), HT_REC_OPT_ROOT_DEL, r->id);
    ht_store_log_unreserve(r->o->store, HT_OPT_ROOT_RECORD_BYTES);
    r->exists = r->configured = false;
    r->claim = (struct ht_claim){0};
    /* A gradient that is held open keeps this struct; a root that is made here later begins anew. */
    r->step = r->pub_step = r->durable_step = r->undurable = 0;
    r->norm_known = false;
    r->close_error = 0;
    r->error.text[0] = 0;
    ht_opt_expect_waiting(r, 0);
}

/* A root is dissolved inside ht_optim_root_end alone. Its directory may be deleted whatever is in progress. */
void ht_opt_ended(void *ctx, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx)
{
    struct ht_optim *o = ctx;

    lock(o);
    struct ht_root *r = ht_opt_root_find(o, scope);
    if (r && r->exists) {
        assert(how == HT_SCOPE_DELETED || (r->ending && ht_opt_root_idle(r)));
        r->refs++;
        ht_list_for_each_entry_safe(p, &r->params, struct ht_param, of_root) {
            if (how == HT_SCOPE_DELETED) /* it is still open somewhere */
                ht_opt_param_bury(p, tx);
            else
                remove_param(p, tx);
            /* The root's ROOT_DEL record covers this parameter, too. */
            p->cur.exists = p->pub.exists = false;
            ht_opt_totals_update(p);
            ht_opt_record_unreserve(p);
            ht_opt_param_sweep(p, tx);
        }
        end_root(r, tx);
        ht_opt_root_put(r);
    }
    unlock(o);
}

/* Some sums from pos on. Returns the parameter where to go on, with a reference, or NULL. */
static struct ht_param *add_slice(struct ht_root *r, struct ht_list *pos, struct ht_root_stat *out)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_obj_stat st;

    for (unsigned i = 0; pos != &r->sums; pos = pos->next, i++) {
        struct ht_param *p = ht_list_entry(pos, struct ht_param, of_sums);
        if (i == SUMS_SLICE) {
            p->refs++;
            return p;
        }
        if (!p->counted.parameters)
            continue;
        ht_obj_stat(p->sum, &st);
        out->sum_resident_bytes += st.resident_bytes;
        out->sum_stored_bytes += st.stored_bytes;
    }
    return NULL;
}

void ht_optim_root_sums(struct ht_optim *o, uint64_t root, struct ht_root_stat *out)
{
    struct ht_root *r = ht_opt_root_get(o, root);

    if (!r)
        return;
    lock(o);
    struct ht_param *p = add_slice(r, r->sums.next, out);
    while (p) {
        unlock(o); /* updates go on */
        lock(o);
        p->refs--;
        bool there = p->root == r && !ht_list_empty(&p->of_sums);
        if (!there) /* its sum was deleted meanwhile: begins anew */
            out->sum_resident_bytes = out->sum_stored_bytes = 0;
        p = add_slice(r, there ? &p->of_sums : r->sums.next, out);
    }
    ht_opt_root_put(r);
    unlock(o);
}

int ht_optim_root_stat(struct ht_optim *o, uint64_t root, struct ht_root_stat *out)
{
    lock(o);
    struct ht_root *r = ht_opt_root_find(o, root);
    if (!r || !r->exists) {
        unlock(o);
        return -ENOENT;
    }
    struct ht_redo_progress progress = ht_opt_redo_progress(r);
    uint64_t open = r->redo.replaying ? 0 : r->open;
    *out = (struct ht_root_stat){
        .step = r->redo.replaying ? r->pub_step + r->redo.steps : r->step, /* clients have seen the last one */
        .durable_step = r->durable_step,
        .logged_steps = r->redo.steps,
        .logged_bytes = ht_opt_redo_bytes(r),
        .redo_reserved_bytes = r->redo.aside_bytes,
        .delta_bytes = ht_opt_delta_bytes(r),
        .delta_lineage = r->deltas.lineage,
        .replay_steps = progress.steps,
        .replay_steps_left = progress.left,
        .replay_seconds_left = progress.seconds_left,
        .open = open != 0,
        .step_open = open,
        .claimed_pid = r->claim.pid,
        .parameters = r->totals.parameters,
        .state_bytes = r->totals.state_bytes,
        .grad_bytes = r->grad_bytes,
        .updated_elements = r->updated_elements,
        .added_elements = r->added_elements,
        .nonfinite = r->nonfinite,
        .skipped = r->skipped,
        .clipped = r->clipped,
        .norm_known = r->norm_known,
        .grad_norm = r->grad_norm,
        .update_ns = r->update_ns,
        .commit_ns = r->commit_ns,
        .step_written_bytes = r->step_written_bytes,
    };
    const struct ht_refusal *e = r->closed ? r->closed : &r->error;
    memcpy(out->error, e->text, sizeof(out->error));
    out->error_step = e->step;
    out->error_time = e->time;
    out->refusals = r->refusals;
    memcpy(out->claimed_by, r->claim.name, sizeof(out->claimed_by));
    unlock(o);
    return 0;
}

void ht_optim_root_clear_error(struct ht_optim *o, uint64_t root)
{
    lock(o);
    struct ht_root *r = ht_opt_root_find(o, root);
    if (r)
        r->error.text[0] = '\0';
    unlock(o);
}

int ht_optim_root_set_step(struct ht_optim *o, uint64_t root, uint64_t step)
{
    lock(o);
    struct ht_root *r = ht_opt_root_find(o, root);
    int rc = may_change(r);
    if (!rc && (r->open || r->gate))
        rc = -EBUSY;
    if (!rc) {
        r->step = step;
        r->redo.gap = true;
        ht_opt_delta_cut(r);
    }
    unlock(o);
    return rc;
}

bool ht_optim_renamed(struct ht_optim *o, uint64_t oid)
{
    lock(o);
    const struct ht_param *p = ht_opt_param_find(o, oid);
    bool found = p && !p->gone && p->cur.exists;
    if (found)
        ht_opt_redo_renamed(p->root);
    unlock(o);
    return found;
}

/* -------------------------------------------------------------------- dump */

static void put_params(const struct ht_root *root, struct ht_dump *d) HT_REQUIRES(HT_LOCK_OPTIM)
{
    unsigned shown = 0;

    ht_list_for_each_entry(p, &root->params, const struct ht_param, of_root) {
        bool idle = !p->pending && !p->failed && ht_list_empty(&p->inflight) && ht_list_empty(&p->waiters);
        if (idle || shown++ >= DUMP_PARAMS_MAX)
            continue;
        ht_dump_put(d, "    parameter %llu: %llu ranges pending, %llu failed%s%s\n", (ull)p->oid, (ull)p->pending,
                    (ull)p->failed, ht_list_empty(&p->inflight) ? "" : "; its gradient is being written",
                    ht_list_empty(&p->waiters) ? "" : "; readers wait for its updates");
        ht_dump_id(d, p->oid);
    }
    if (shown > DUMP_PARAMS_MAX)
        ht_dump_put(d, "    and %u more parameters\n", shown - DUMP_PARAMS_MAX);
}

/* A gradient whose first bytes are being written does not count yet: the thread that writes them is in the dump. */
static bool is_idle(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return !root->open && !root->pending && !root->running && !root->backlog_bytes && !root->gate && !root->draining &&
        !root->hold && !root->failure;
}

static void put_root(const struct ht_root *root, struct ht_dump *d) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_dump_put(d, "  root %llu: ", (ull)root->id);
    if (root->open)
        ht_dump_put(d, "step %llu is open", (ull)root->open);
    else
        ht_dump_put(d, "no step is open");
    ht_dump_put(d, "; ranges: %llu pending, %llu in work; %llu bytes of gradients queued", (ull)root->pending,
                (ull)root->running, (ull)root->backlog_bytes);
    ht_dump_put(d, "; gate: ");
    if (root->gate)
        ht_dump_thread(d, root->gate_thread);
    ht_dump_put(d, "%s%s%s%s", root->gate ? "" : "open", root->async ? "; a step is being closed" : "",
                root->draining ? "; writers of gradients wait" : "",
                root->hold || root->alone ? "; no update starts" : "");
    ht_dump_put(d, "%s\n", root->failure ? "; an update has failed" : "");
    put_params(root, d);
    ht_dump_id(d, root->id);
}

void ht_optim_dump(struct ht_optim *o, struct ht_dump *d)
{
    unsigned shown = 0;

    ht_dump_put(d, "model roots:\n");
    if (!ht_dump_lock(d, ht_optim_lock(o), "the optimizer"))
        return;
    ht_list_for_each_entry(root, &o->roots, const struct ht_root, all)
        if (!is_idle(root) && shown++ < DUMP_ROOTS_MAX)
            put_root(root, d);
    if (shown > DUMP_ROOTS_MAX)
        ht_dump_put(d, "  and %u more\n", shown - DUMP_ROOTS_MAX);
    if (!ht_list_empty(&o->invals))
        ht_dump_put(d, "  the kernel is asked to drop pages of updated files\n");
    ht_mutex_unlock(ht_optim_lock(o));
}
