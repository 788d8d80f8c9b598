/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kept.c - kept steps: the commands that make, use and end them, which may WAIT; which bytes two of them have in
 * common; and the lines of .hitrain/kept.
 */
#include "fs/ctl/hidden_priv.h"
#include "tiering/api/keep.h"

#include <unistd.h>

/* ---------------------------------------------------------------- snapshot */

int ht_kept_snapshot(struct ht_call *q, uint64_t ino)
{
    const char *name = q->cmd->name[0] ? q->cmd->name : NULL;

    if (name && ht_ns_kept_check_name(name))
        return ht_ctl_refuse(q->err, -EINVAL, "'%s' is no name for a kept step: digits alone are the number of a step",
                             name);
    int rc = ht_ctl_need_whole(q->ctl, q->root, false, q->err);
    return rc ? rc : ht_optim_snapshot_by(q->ctl->optim, q->root, name, &q->by);
}

/* ------------------------------------------------------------------ forget */

static int forget_all(struct ht_ctl *c, uint64_t root)
{
    struct ht_ns_kept *all = NULL;
    size_t count = 0;
    int rc = ht_ns_kept_list(c->ns, root, &all, &count);

    for (size_t n = 0; rc == 0 && n < count; n++)
        rc = ht_ns_kept_forget(c->ns, root, all[n].name);
    free(all);
    return rc;
}

int ht_ctl_forget_kept(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller)
{
    if (ht_ctl_may_steer(c, root, caller) == 0)
        return forget_all(c, root);
    (void)ht_ctl_report_kept(c, root, "rmdir");
    return -EBUSY;
}

int ht_kept_forget(struct ht_call *q, uint64_t ino)
{
    const char *name = q->cmd->name;
    struct ht_root_stat st;
    int rc = ht_optim_may_steer(q->ctl->optim, q->root, &q->by);

    if (rc)
        return rc;
    if (ht_optim_root_stat(q->ctl->optim, q->root, &st) == 0 && st.open)
        return ht_ctl_refuse(q->err, -EBUSY, "a step is open: commit or abort first");
    rc = strcmp(name, "*") == 0 ? forget_all(q->ctl, q->root) : ht_ns_kept_forget(q->ctl->ns, q->root, name);
    if (rc == -ENOENT)
        snprintf(q->err, HT_CTL_ERROR_MAX, "there is no kept step '%s'", name);
    return rc;
}

/* ---------------------------------------------------------------- rollback */

struct rollback {
    struct ht_ctl *ctl;
    uint32_t uid;
};

static int names_of_step(void *ctx, uint64_t root, uint64_t kept, struct ht_copy_id **out, size_t *out_count)
{
    const struct rollback *r = ctx;

    return ht_ns_rollback(r->ctl->ns, root, kept, r->uid, out, out_count);
}

static const char *why_no_rollback(int error)
{
    switch (error) {
    case -EBUSY:
        return "a step is open, or a gradient: commit or abort, and close it, first";
    case -EPERM:
        return "only root takes files of several users back";
    case -ESTALE:
        return "the kept step, or a file that it has, went during the command";
    case -ENOSPC:
        return "no space for what the step has and the model has not, or for its records";
    default:
        return strerror(-error);
    }
}

/* The step, for the owner of the model. */
static int find_own(struct ht_call *q, struct ht_ns_kept *about)
{
    int rc = ht_ns_kept_find(q->ctl->ns, q->root, q->cmd->name, about);

    if (rc == 0)
        rc = ht_ctl_owner(q->ctl, q->root, &q->caller);
    if (rc == -ENOENT)
        snprintf(q->err, HT_CTL_ERROR_MAX, "there is no kept step '%s'", q->cmd->name);
    else if (rc == -EPERM)
        snprintf(q->err, HT_CTL_ERROR_MAX, "only the owner of the model's directory may, or root");
    return rc;
}

/* In place of the step that this descriptor holds. */
int ht_kept_hold(struct ht_call *q, uint64_t ino)
{
    uint64_t held;
    int rc = ht_ns_kept_hold(q->ctl->ns, q->root, q->cmd->name, &held);

    if (rc)
        return ht_ctl_refuse(q->err, rc, "there is no kept step '%s'", q->cmd->name);
    if (q->seat->held)
        ht_ns_kept_release(q->ctl->ns, q->seat->held);
    q->seat->held = held;
    return 0;
}

int ht_kept_archived(struct ht_call *q, uint64_t ino)
{
    char digits[HT_NS_DIGEST_MAX];
    struct ht_ns_kept about;
    int rc = find_own(q, &about);

    if (rc)
        return rc;
    snprintf(digits, sizeof(digits), "%.*s", HT_NS_DIGEST_MAX - 1, q->cmd->path);
    rc = ht_ns_kept_note(q->ctl->ns, about.ino, q->cmd->takeover, digits);
    if (rc == -EINVAL)
        snprintf(q->err, HT_CTL_ERROR_MAX, "kept step '%s' has another digest", q->cmd->name);
    return rc;
}

int ht_kept_rollback(struct ht_call *q, uint64_t ino)
{
    struct ht_ctl *c = q->ctl;
    struct rollback r = {c, q->caller.cred.uid};
    struct ht_optim_config config;
    struct ht_ns_kept about;
    int rc = find_own(q, &about);

    if (rc == 0) /* it publishes what there is first */
        rc = ht_ctl_need_whole(c, q->root, false, q->err);
    if (rc == 0)
        rc = ht_optimizer_read(c, about.ino, &config, q->err);
    if (rc)
        return rc;
    const struct ht_rollback to = {
        .kept = about.ino, .step = about.step, .config = &config, .names = names_of_step, .ctx = &r};
    rc = ht_optim_rollback_by(c->optim, q->root, NULL, &q->by); /* a vault may keep it waiting: without the lock */
    ht_mutex_lock(ht_ctl_root_lock(c));                         /* no other thread sets the configuration */
    rc = rc ? rc : ht_optim_rollback_by(c->optim, q->root, &to, &q->by);
    ht_mutex_unlock(ht_ctl_root_lock(c));
    ht_ctl_changed(c);
    ht_ctl_drop_stale(c);
    ht_endurance_apply(c); /* the mount's root may be the model root */
    if (rc)
        snprintf(q->err, HT_CTL_ERROR_MAX, "%s", why_no_rollback(rc));
    return rc;
}

/* ------------------------------------------------------------------- clone */

/* Where a clone gets its name. */
struct place {
    uint64_t dir; /* with a lookup count, unless it is the mount's root */
    char name[HT_NAME_BYTES_MAX + 1];
};

/* A path below the mount's root: the directories that lead to it, and the new name. */
static int find_place(const struct ht_call *q, struct place *out)
{
    const char *path = q->cmd->path, *last;
    size_t len = q->cmd->path_len, begin;
    int rc = 0;

    while (len && path[len - 1] == '/')
        len--;
    for (begin = len; begin && path[begin - 1] != '/';)
        begin--;
    last = path + begin;
    len -= begin;
    out->dir = HT_NS_ROOT_INO;
    if (begin && (rc = ht_ctl_resolve(q->ctl, HT_NS_ROOT_INO, path, begin, &q->caller, &out->dir)))
        out->dir = 0;
    if (rc == 0)
        rc = ht_parse_component(&last, &len, out->name) == 1 ? 0 : -EINVAL;
    if (rc == 0 && q->cmd->inside && q->cmd->inside != out->dir) /* somebody has changed the way meanwhile */
        rc = -ESTALE;
    if (rc == 0 && strcmp(out->name, HT_CTL_DIR) == 0)
        rc = -EINVAL;
    return rc ? rc : ht_ctl_access(q->ctl, out->dir, W_OK | X_OK, &q->caller);
}

/* The kernel may know that the name is not there. */
static void show_clone(struct ht_ctl *c, const struct place *p)
{
    const struct ht_ctl_cache *cache = c->cache;

    ht_ctl_changed(c);
    if (!cache)
        return;
    cache->drop_name(cache->ctx, p->dir, p->name);
    cache->drop_data(cache->ctx, p->dir, 0, 0);
}

/* k: a clone that was refused, or one that is not durable because of rc. */
static void explain_clone(const struct ht_copy *k, int rc, char err[HT_CTL_ERROR_MAX])
{
    if (rc == -EPERM)
        snprintf(err, HT_CTL_ERROR_MAX, "only root clones a step with files of several users");
    else if (rc == -EINVAL)
        snprintf(err, HT_CTL_ERROR_MAX, "the new directory is to be outside of model roots");
    else if (k->error)
        ht_copy_explain(k, err, HT_CTL_ERROR_MAX);
    else
        snprintf(err, HT_CTL_ERROR_MAX, "%s", strerror(-rc));
}

static int clone_to(struct ht_call *q, uint64_t kept, const struct place *place)
{
    struct ht_ctl *c = q->ctl;
    struct ht_optim_config config;
    struct ht_clone_target target = {
        .parent = place->dir, .name = place->name, .uid = q->caller.cred.uid, .config = &config};
    struct ht_copy k = {.clone = &target};
    uint64_t lsn;
    int rc = ht_optimizer_read(c, kept, &config, q->err);

    if (rc)
        return rc;
    ht_mutex_lock(ht_ctl_root_lock(c));
    rc = ht_scope_clone(c->store, kept, &k, &lsn);
    ht_mutex_unlock(ht_ctl_root_lock(c));
    if (rc == 0)
        rc = ht_store_sync(c->store, lsn);
    if (rc)
        explain_clone(&k, rc, q->err);
    else
        show_clone(c, place);
    return rc;
}

int ht_kept_clone(struct ht_call *q, uint64_t ino)
{
    struct ht_ns_kept about;
    struct place place;
    int rc = find_own(q, &about);

    if (rc)
        return rc;
    rc = find_place(q, &place);
    if (rc)
        snprintf(q->err, HT_CTL_ERROR_MAX, "'%.*s': %s", (int)ht_min_u64(q->cmd->path_len, 160), q->cmd->path,
                 rc == -EINVAL ? "not a path of a new directory below the mount's root" : strerror(-rc));
    else
        rc = clone_to(q, about.ino, &place);
    if (place.dir && place.dir != HT_NS_ROOT_INO)
        ht_ns_forget(q->ctl->ns, place.dir, 1);
    return rc;
}

/* -------------------------------------------------------------------- same */

/* Takes a lookup count: the number comes from a caller. *out_scope: the directory of its kept step. */
static int hold_file(struct ht_ctl *c, const struct ht_subject *s, const struct ht_caller *caller, uint64_t *out_scope)
{
    struct ht_ns_tensor t;
    struct stat st;
    int rc = ht_ns_lookup_ino(c->ns, s->file, false, &st);

    if (rc)
        return rc;
    if (!S_ISREG(st.st_mode) || !ht_ns_is_frozen(c->ns, s->file))
        rc = -EINVAL;
    if (rc == 0)
        rc = ht_ctl_access(c, s->file, R_OK, caller);
    if (rc == 0)
        rc = ht_ns_tensor(c->ns, s->file, &t);
    if (rc == 0)
        *out_scope = t.root;
    else
        ht_ns_forget(c->ns, s->file, 1);
    return rc;
}

static int same_files(struct ht_ctl *c, uint64_t a, uint64_t b, struct ht_ioctl_same *same)
{
    struct ht_obj *x, *y;
    int rc = ht_ns_open(c->ns, a, &x);

    if (rc)
        return rc;
    rc = ht_ns_open(c->ns, b, &y);
    if (rc == 0) {
        same->is_same = ht_obj_same(x, y, same->offset, &same->end);
        ht_ns_close(c->ns, b);
    }
    ht_ns_close(c->ns, a);
    return rc;
}

static int same_states(struct ht_ctl *c, const struct ht_subject *a, const struct ht_subject *b,
                       struct ht_ioctl_same *same)
{
    struct ht_param_desc x, y;
    const char *name, *other;
    int rc = ht_ctl_describe(c, a->file, &x);

    if (rc)
        return rc;
    rc = ht_ctl_describe(c, b->file, &y);
    if (rc == 0) {
        if (ht_optim_state_name(c->optim, &x, a->index, &name) || ht_optim_state_name(c->optim, &y, b->index, &other) ||
            strcmp(name, other) != 0)
            rc = -EINVAL;
        else
            same->is_same = ht_optim_state_same(c->optim, &x, &y, name, same->offset, &same->end);
        ht_ns_close(c->ns, b->file);
    }
    ht_ns_close(c->ns, a->file);
    return rc;
}

/* Are both directories those of kept steps of one model? */
static int check_scopes(struct ht_ctl *c, uint64_t a, uint64_t b)
{
    struct ht_ns_kept *all = NULL;
    uint64_t root[2] = {0, 0};
    size_t count = 0;
    int rc = ht_ns_kept_list(c->ns, 0, &all, &count);

    for (size_t i = 0; rc == 0 && i < count; i++) {
        if (all[i].ino == a)
            root[0] = all[i].root;
        if (all[i].ino == b)
            root[1] = all[i].root;
    }
    free(all);
    return rc == 0 && (!root[0] || root[0] != root[1]) ? -EINVAL : rc;
}

int ht_kept_same(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller, struct ht_ioctl_same *same)
{
    struct ht_subject a, b;
    uint64_t scope[2];

    same->is_same = 0;
    if (!ht_hidden_subject(ino, &a) || !ht_hidden_subject(same->other, &b) || a.is_state != b.is_state ||
        same->offset > HT_FILE_BYTES_MAX)
        return -EINVAL;
    int rc = hold_file(c, &a, caller, &scope[0]);
    if (rc)
        return rc;
    rc = hold_file(c, &b, caller, &scope[1]);
    if (rc == 0) {
        rc = check_scopes(c, scope[0], scope[1]);
        if (rc == 0)
            rc = a.is_state ? same_states(c, &a, &b, same) : same_files(c, a.file, b.file, same);
        ht_ns_forget(c->ns, b.file, 1);
    }
    ht_ns_forget(c->ns, a.file, 1);
    return rc;
}

/* ------------------------------------------------------------------- lines */

struct kept_feed {
    struct ht_ctl *ctl;
    uint64_t root;
    struct ht_ns_kept *all;
    size_t count, next;
};

static void put_notes(struct ht_ctl *c, uint64_t ino, struct ht_json *j)
{
    char digits[HT_NS_DIGEST_MAX], why[HT_CTL_ERROR_MAX], job[HT_KEPT_NAME_MAX + 1];

    if (ht_ns_kept_archived(c->ns, ino, job) == 0)
        ht_json_str(j, "archived", job);

    if (ht_ns_kept_digest(c->ns, ino, digits) == 0)
        ht_json_str(j, "digest", digits);
    else if (ht_digest_error(c, ino, why))
        ht_json_str(j, "digest_error", why);
}

static int next_line(void *ctx, uint64_t *after, FILE *to)
{
    struct kept_feed *f = ctx;
    const struct ht_ns_kept *k;
    uint64_t stored_bytes, own_bytes;
    struct ht_ns_kept still;

    do {
        if (f->next == f->count)
            return 0;
        k = &f->all[f->next++];
    } while (ht_ns_kept_find(f->ctl->ns, f->root, k->name, &still) || still.ino != k->ino);
    int rc = ht_store_scope_space(f->ctl->store, k->ino, &stored_bytes, &own_bytes);
    if (rc)
        return rc;
    struct ht_json j = ht_feed_line(to);
    ht_json_str(&j, "name", k->name);
    ht_json_u64(&j, "step", k->step);
    ht_json_u64(&j, "time_ns", (uint64_t)k->time_ns);
    ht_json_u64(&j, "shared_bytes", stored_bytes - own_bytes);
    ht_json_u64(&j, "own_bytes", own_bytes);
    put_notes(f->ctl, k->ino, &j);
    ht_json_end(&j);
    return 1;
}

static void free_feed(void *ctx)
{
    struct kept_feed *f = ctx;

    free(f->all);
    free(f);
}

int ht_kept_feed_open(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller, struct ht_feed **out)
{
    struct kept_feed *f = calloc(1, sizeof(*f));
    int rc = f ? ht_ns_kept_list(c->ns, root, &f->all, &f->count) : -ENOMEM;

    if (rc) {
        free(f);
        return rc;
    }
    f->ctl = c;
    f->root = root;
    return ht_feed_open(next_line, free_feed, f, out);
}
