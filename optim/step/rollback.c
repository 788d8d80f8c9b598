/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rollback.c - a model goes back: to its last commit (abort), with the readers that wait for updates; or to one of its
 * kept steps (rollback): names, content, state and counts, in one commit.
 *
 *   under the root's gate, with no step open               what a crash right after it leaves
 *   1. commits what is not published yet, unless logged    the last commit, or this one
 *      steps could not be computed again
 *   2. names and attributes become those of the step       that commit: all that follows is pending
 *   3. content and state become those of the step: bytes
 *      in the same place stay, others are shared
 *   4. reserves the next rewrite; sets counts              the same
 *   5. commits                                             that commit, or the step
 *
 * An error between 1 and 5 ends as an abort does: the model is as it was. Commit 1 is full: no step is logged after it.
 * Files that exist in both keep their number, so open files, mappings and passed-through parameters show the step.
 * Writers of gradients wait (draining).
 */
#include "tiering/base/mutant.h"
#include "tiering/base/verify.h"
#include "tiering/api/keep.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/redo/logged.h"
#include "optim/step/step_priv.h"

/* ------------------------------------------------------------------- abort */

static void invalidate_whole(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->shape.range_count)
        (void)ht_opt_inval(p, 0, p->shape.range_count - 1);
}

/* Returns when no part of the step is left to run or to write. *out_spare: none has run since the last logged step. */
static int quiesce_root(struct ht_root *root, struct ht_optim_steer *by, bool *out_spare)
{
    lock(root->o);
    int rc = ht_opt_may_steer(root, by);
    root->draining = !rc;
    if (!rc)
        rc = ht_opt_stop_step(root, out_spare);
    unlock(root->o);
    if (by->refused)
        ht_opt_refuse(root, HT_EVENT_STEP_REFUSED, 0, "%s", by->why);
    return rc;
}

/*
 * Under the gate, draining, with no update queued: everything below the root is as its last commit has published it.
 * All readers wait until the logged steps are computed again, for they have seen those. *out_shown: an error of
 * passthrough files, which do not show it; the rest is taken back then, too.
 */
static int take_back(struct ht_root *root, int *out_shown)
{
    const struct ht_optim_hooks *hooks = &root->o->hooks;

    lock(root->o);
    bool replaying = root->redo.replaying = root->redo.steps > 0;
    unlock(root->o);
    if (replaying && hooks->replay_begins)
        hooks->replay_begins(hooks->ctx, root->id);
    int rc = ht_opt_revert(root, false, out_shown);
    if (!rc)
        return ht_opt_redo_replay(root);
    lock(root->o);
    root->redo.replaying = false;
    notify_changed(root->o);
    unlock(root->o);
    return rc;
}

/* Ends the draining: waiting readers and writers go on, and caches are dropped. */
static void show_all(struct ht_root *root)
{
    lock(root->o);
    root->draining = false;
    notify_changed(root->o);
    unlock(root->o);
    ht_opt_wake_readers(root);
    lock(root->o);
    ht_opt_each_param(root, invalidate_whole);
    ht_opt_inval_wait(root->o, root->o->inval_issued);
    ht_opt_delta_cut(root); /* whoever sees the new lineage reads the new content */
    unlock(root->o);
}

int ht_optim_abort_by(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    struct ht_root *root;
    bool spare = false;
    int shown = 0, rc = ht_opt_step_enter(o, id, ht_opt_gate_enter, &root);

    if (rc)
        return rc;
    rc = quiesce_root(root, by, &spare);
    if (by->refused) {
        ht_opt_step_leave(root);
        return rc;
    }
    /*
     * spare: parameters and state are as the last logged step has left them, so only what is newer than the last commit
     * goes. A change that turns up meanwhile takes the long way.
     */
    if (!rc && spare)
        rc = ht_opt_revert(root, true, &shown);
    if (rc == -EBUSY || (!rc && !spare))
        rc = take_back(root, &shown);
    lock(o);
    if (!rc)
        root->error.text[0] = '\0'; /* whatever it was about is taken back */
    uint64_t step = root->durable_step;
    unlock(o);
    if (!rc) {
        ht_opt_event(HT_EVENT_STEP_ABORTED, root->id, "the model is back at step %llu", (ull)step);
        rc = ht_opt_bury_orphans(root);
    }
    show_all(root);
    ht_opt_step_leave(root);
    HT_VERIFY(ht_optim_verify(o));
    return rc ? rc : shown;
}

/* ---------------------------------------------------------------- rollback */

/* A parameter of the kept step, with the file that is it in the model. */
struct kept_param {
    uint64_t to; /* first: for ht_compare_numbers */
    struct ht_param_meta meta;
};

struct rollback {
    struct ht_root *root;
    const struct ht_rollback *to;
    struct ht_copy_id *files; /* regular ones, by number in the kept step */
    size_t file_count;
    struct kept_param *params; /* by number in the model */
    size_t param_count;
};

static uint64_t file_of(const struct rollback *r, uint64_t from)
{
    size_t at = 0;

    HT_PARTITION_POINT(at, r->file_count, i, r->files[i].from < from);
    return at < r->file_count && r->files[at].from == from ? r->files[at].to : 0;
}

/* -ESTALE: the kept step has ended. */
static int list_params(struct rollback *r)
{
    struct ht_optim *o = r->root->o;
    size_t count = 0;
    int rc = 0;

    lock(o);
    const struct ht_root *kept = ht_opt_root_find(o, r->to->kept);
    if (kept)
        ht_list_for_each(pos, &kept->params)
            count++;
    r->params = kept ? calloc(count + 1, sizeof(*r->params)) : NULL;
    if (!r->params)
        rc = kept ? -ENOMEM : -ESTALE;
    if (!rc)
        ht_list_for_each_entry(p, &kept->params, const struct ht_param, of_root) {
            uint64_t to = file_of(r, p->oid);
            if (p->pub.exists && to)
                r->params[r->param_count++] = (struct kept_param){to, p->pub};
        }
    unlock(o);
    if (!rc)
        qsort(r->params, r->param_count, sizeof(*r->params), ht_compare_numbers);
    return rc;
}

/* ------------------------------------------------------------------- state */

/* The first parameter with state that the kept step does not have, with a reference. */
static struct ht_param *find_surplus(const struct rollback *r)
{
    struct ht_param *found = NULL;

    lock(r->root->o);
    ht_list_for_each_entry(p, &r->root->params, struct ht_param, of_root) {
        const struct kept_param key = {.to = p->oid};
        if (found || p->gone || !p->cur.exists ||
            bsearch(&key, r->params, r->param_count, sizeof(key), ht_compare_numbers))
            continue;
        found = p;
        p->refs++;
    }
    unlock(r->root->o);
    return found;
}

static int end_surplus(const struct rollback *r)
{
    struct ht_param *p;
    int rc = 0;

    while (!rc && (p = find_surplus(r))) {
        rc = ht_opt_state_drop(p);
        ht_opt_param_put(p);
    }
    return rc;
}

/* The parameter, made if the model does not know it, with a reference. -ESTALE: a program has deleted its file. */
static int find_param(const struct rollback *r, uint64_t oid, struct ht_param **out)
{
    struct ht_optim *o = r->root->o;
    int rc = 0;

    lock(o);
    struct ht_param *p = ht_opt_param_find(o, oid);
    if (!p)
        p = ht_opt_param_make(r->root, oid);
    if (!p || p->root != r->root || p->gone)
        rc = !p ? -ENOMEM : p->gone ? -ESTALE : -EBUSY;
    if (!rc && !p->obj)
        p->obj = ht_obj_get(o->store, oid);
    if (!rc && (!p->obj || ht_opt_param_file(p) == HT_OPTIM_FILE_DELETED))
        rc = -ESTALE;
    if (!rc) {
        p->refs++;
        *out = p;
    }
    unlock(o);
    return rc;
}

/* New state is of this shape. -EBUSY: a gradient of another shape is open. */
static int take_shape(struct ht_param *p, const struct ht_param_meta *meta) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t bytes = meta->elements * ht_dtype_trained_bytes(meta->dtype);
    bool same = p->shape.elements == meta->elements && p->shape.dtype == meta->dtype &&
        p->shape.chunk_bytes == meta->chunk_bytes;

    if (p->block && same)
        return 0;
    if (p->openers)
        return -EBUSY;
    if (p->block)
        ht_opt_ranges_free(p);
    return ht_opt_shape_of(&p->shape, bytes, meta->chunk_bytes, meta->dtype, meta->dtype);
}

static int make_state(struct ht_param *p, const struct ht_param_meta *meta)
{
    int rc = p->cur.exists ? ht_opt_state_drop(p) : 0;

    if (!rc && p->sum) /* it may have another shape */
        rc = ht_opt_sum_delete(p);
    if (!rc)
        rc = ht_opt_ortho_delete(p);
    if (rc)
        return rc;
    lock(p->o);
    rc = take_shape(p, meta);
    unlock(p->o);
    return rc ? rc : ht_opt_state_create(p, &meta->layout);
}

/* Content of one object from its copy. */
static int restore_object(struct ht_store *s, struct ht_obj *to, uint64_t from)
{
    struct ht_obj *kept = ht_obj_get(s, from);
    int rc = to && kept ? ht_obj_restore(to, kept) : -ESTALE;

    ht_obj_put(kept);
    return rc;
}

/* One of its state objects, with a reference: its file may be deleted at any time. NULL: it was. */
static struct ht_obj *state_of(struct ht_param *p, unsigned i)
{
    lock(p->o);
    struct ht_obj *obj = !p->gone && p->cur.exists && p->state[i] ? ht_obj_get(p->o->store, p->cur.oid[i]) : NULL;
    unlock(p->o);
    return obj;
}

static int restore_state(struct ht_param *p, const struct ht_param_meta *meta)
{
    struct ht_optim *o = p->o;

    lock(o);
    bool as_is = p->cur.exists && p->cur.elements == meta->elements && p->cur.dtype == meta->dtype &&
        p->cur.chunk_bytes == meta->chunk_bytes && ht_opt_same_layout(&p->cur.layout, &meta->layout);
    int rc = p->gone ? -ESTALE : as_is ? ht_opt_state_load(p) : 0;
    unlock(o);
    if (!rc && !as_is)
        rc = make_state(p, meta);
    for (unsigned i = 0; !rc && i < meta->layout.count; i++) {
        struct ht_obj *to = state_of(p, i);
        rc = restore_object(o->store, to, meta->oid[i]);
        ht_obj_put(to);
    }
    lock(o);
    if (!rc && (p->gone || !p->cur.exists))
        rc = -ESTALE;
    if (!rc) {
        p->cur.t = meta->t;
        p->cur.layout.salt = meta->layout.salt;
        p->rewrites++;
    }
    unlock(o);
    return rc;
}

/* ----------------------------------------------------------------- content */

static bool kept_is_there(const struct rollback *r)
{
    struct ht_optim *o = r->root->o;

    lock(o);
    const struct ht_root *kept = ht_opt_root_find(o, r->to->kept);
    bool there = kept && kept->exists;
    unlock(o);
    return there;
}

/* Scratch content is no part of a step. A file that was never opened has no content in the step. */
static int restore_file(const struct rollback *r, struct ht_obj *to, uint64_t from)
{
    struct ht_store *s = r->root->o->store;
    struct ht_obj *kept = ht_obj_get(s, from);
    struct ht_obj_stat st;
    int rc = 0;

    ht_obj_stat(to, &st);
    if (st.obj_class == HT_CLASS_DURABLE && kept)
        rc = ht_obj_restore(to, kept);
    else if (st.obj_class == HT_CLASS_DURABLE)
        rc = kept_is_there(r) ? ht_obj_truncate(to, 0) : -ESTALE;
    ht_obj_put(kept);
    return rc;
}

static int restore_files(const struct rollback *r)
{
    struct ht_store *s = r->root->o->store;
    int rc = 0;

    for (size_t i = 0; !rc && i < r->file_count; i++) {
        struct ht_obj *to = ht_obj_get(s, r->files[i].to);
        if (to)
            rc = restore_file(r, to, r->files[i].from);
        ht_obj_put(to);
    }
    return rc;
}

static int restore_params(const struct rollback *r)
{
    size_t count = HT_MUTANT("rollback-half") ? r->param_count / 2 : r->param_count;
    int rc = end_surplus(r);

    for (size_t i = 0; !rc && i < count; i++) {
        struct ht_param *p;
        rc = find_param(r, r->params[i].to, &p);
        if (rc)
            continue;
        rc = restore_state(p, &r->params[i].meta);
        ht_opt_param_put(p);
    }
    return rc;
}

/* Shared space does not come back with the next rewrite. */
static int reserve_all(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc = 0;

    ht_list_for_each_entry(p, &root->params, struct ht_param, of_root)
        if (!rc && !p->gone && p->cur.exists)
            rc = ht_opt_state_settle(p);
    return rc;
}

/* ------------------------------------------------------------------- whole */

static int go_back(struct rollback *r)
{
    const struct ht_rollback *to = r->to;
    struct ht_root *root = r->root;
    int rc = to->names(to->ctx, root->id, to->kept, &r->files, &r->file_count);

    if (!rc)
        rc = list_params(r);
    if (!rc)
        rc = restore_files(r);
    if (!rc)
        rc = restore_params(r);
    lock(root->o);
    if (!rc)
        rc = reserve_all(root);
    if (!rc) {
        root->config = *to->config;
        root->step = to->step;
        root->o->words_changes++;
        root->o->form_changes++;
    }
    unlock(root->o);
    return rc;
}

static int commit_root(struct ht_root *root)
{
    uint64_t lsn;
    int rc = ht_scope_commit(root->o->store, root->id, &lsn);

    if (!rc)
        rc = ht_store_sync(root->o->store, lsn);
    lock(root->o);
    if (!rc)
        root->durable_step = root->pub_step;
    unlock(root->o);
    return rc;
}

/* The last commit stands. An error here: the log has failed, or logged steps cannot be computed again (still). */
static void undo_rollback(struct ht_root *root, int why)
{
    int shown, rc = take_back(root, &shown);

    if (rc || shown)
        ht_opt_event(HT_EVENT_STEP_ABORTED, root->id, "a rollback failed: %s; so did taking it back: %s",
                     strerror(-why), strerror(rc ? -rc : -shown));
    else
        ht_opt_event(HT_EVENT_STEP_ABORTED, root->id, "a rollback failed: %s; the model is as it was when that began",
                     strerror(-why));
    if (rc)
        return;
    rc = ht_opt_bury_orphans(root);
    lock(root->o);
    if (!rc)
        rc = reserve_all(root);
    unlock(root->o);
    if (rc) {
        ht_event(HT_EVENT_NOT_RESERVED, &(struct ht_event_about){.id = root->id, .error = rc},
                 "after a rollback that failed: %s", strerror(-rc));
    }
}

/* Readers of several objects wait, or read again, while it is set. */
static void set_reverting(struct ht_root *root, bool on)
{
    lock(root->o);
    root->reverting = on;
    notify_changed(root->o);
    unlock(root->o);
}

static int roll_back(struct rollback *r)
{
    lock(r->root->o);
    bool published = r->root->redo.failed != 0; /* logged steps that cannot be had go with the last commit */
    unlock(r->root->o);
    int rc = published ? 0 : commit_root(r->root);

    if (rc)
        return rc;
    set_reverting(r->root, true);
    rc = go_back(r);
    if (!rc)
        rc = commit_root(r->root);
    if (rc)
        undo_rollback(r->root, rc);
    set_reverting(r->root, false);
    return rc;
}

/* Under the gate: writers of gradients wait from now on. */
static int begin_rollback(struct ht_root *root, struct ht_optim_steer *by)
{
    lock(root->o);
    int rc = ht_opt_may_steer(root, by);
    bool busy = root->open || root->failure;
    /* Bytes of a gradient that no client has closed yet would count in the next step. */
    ht_list_for_each_entry(p, &root->params, const struct ht_param, of_root)
        busy |= !p->gone && (!ht_list_empty(&p->dirty) || !ht_list_empty(&p->inflight));
    rc = rc ? rc : busy ? -EBUSY : 0;
    root->draining = !rc;
    unlock(root->o);
    if (by->refused)
        ht_opt_refuse(root, HT_EVENT_STEP_REFUSED, 0, "%s", by->why);
    return rc;
}

static void report_rollback(struct ht_root *root, const struct ht_rollback *to)
{
    ht_opt_event(HT_EVENT_STEP_ROLLED_BACK, root->id, "the model is at step %llu again", (ull)to->step);
    lock(root->o);
    root->norm_known = false;
    root->close_error = 0;
    root->error.text[0] = '\0';
    ht_opt_reopened(root);
    root->redo.failed = 0;
    unlock(root->o);
}

int ht_optim_rollback_by(struct ht_optim *o, uint64_t id, const struct ht_rollback *to, struct ht_optim_steer *by)
{
    struct rollback r = {.to = to};
    int rc = ht_opt_step_enter(o, id, ht_opt_gate_take, &r.root);

    if (rc)
        return rc;
    rc = to ? begin_rollback(r.root, by) : 0;
    if (rc || !to) {
        ht_opt_step_leave(r.root);
        return rc;
    }
    rc = roll_back(&r);
    lock(o);
    ht_opt_redo_cut(r.root);
    r.root->decided = 0;
    unlock(o);
    if (!rc)
        report_rollback(r.root, to);
    show_all(r.root);
    /* What others have cached of files since their names changed is older than their content. */
    for (size_t i = 0; o->hooks.invalidate && i < r.file_count; i++)
        o->hooks.invalidate(o->hooks.ctx, r.files[i].to, 0, 0);
    free(r.files);
    free(r.params);
    ht_opt_step_leave(r.root);
    HT_VERIFY(ht_optim_verify(o));
    return rc;
}
