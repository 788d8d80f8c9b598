/* SPDX-License-Identifier: Apache-2.0 */
/* command.c - the lines of .hitrain/ctl. Each may WAIT: the caller's thread must be one that nothing else waits for. */
#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/hidden.h"

#include <unistd.h>

/* -------------------------------------------------------------- on a file */

/* The path that a command names, for a message. */
#define NAMED(q, most) (int)ht_min_u64((q)->cmd->path_len, most), (q)->cmd->path

/* Out of memory, unless a program has it mapped. */
static int evict_content(struct ht_ctl *c, uint64_t ino, struct ht_obj *obj)
{
    const struct ht_ctl_cache *cache = c->cache;

    if (cache)
        cache->rest(cache->ctx, ino);
    int rc = ht_obj_writeback(obj);
    ht_obj_evict(obj);
    return rc;
}

static int move_content(struct ht_call *q, uint64_t ino,
                        int (*move)(struct ht_ctl *c, uint64_t ino, struct ht_obj *obj))
{
    struct ht_obj *obj;
    int rc = ht_ns_open(q->ctl->ns, ino, &obj);

    if (rc == -EISDIR)
        snprintf(q->err, HT_CTL_ERROR_MAX, "'%.*s' is a directory: name its files, one command each", NAMED(q, 120));
    if (rc)
        return rc;
    rc = move(q->ctl, ino, obj);
    ht_ns_close(q->ctl->ns, ino);
    return rc;
}

static int prefetch(struct ht_call *q, uint64_t ino)
{
    return move_content(q, ino, ht_ctl_prefetch);
}

static int evict(struct ht_call *q, uint64_t ino)
{
    return move_content(q, ino, evict_content);
}

static int wait_for_updates(struct ht_call *q, uint64_t ino)
{
    return ht_optim_wait(q->ctl->optim, q->root, ino);
}

/* Also of a parameter without gradient and state. */
static int reset_param(struct ht_call *q, uint64_t ino)
{
    int rc = ht_optim_may_steer(q->ctl->optim, q->root, &q->by);

    if (rc)
        return rc;
    rc = ht_optim_reset(q->ctl->optim, q->root, ino, &q->by);
    return rc == -ENOENT ? 0 : rc; /* it never had a gradient, nor state */
}

static int decide(struct ht_call *q, uint64_t ino)
{
    struct ht_decision d = {.root = q->root, .oid = ino};
    struct ht_param_desc desc;
    int rc = ht_ctl_describe(q->ctl, ino, &desc);

    if (rc)
        return rc;
    d.grad_dtype = desc.grad_dtype;
    ht_ns_close(q->ctl->ns, ino);
    memcpy(d.bytes, q->cmd->numbers, sizeof(d.bytes));
    rc = ht_optim_decide(q->ctl->optim, &d, &q->by);
    if (q->by.why[0])
        snprintf(q->err, HT_CTL_ERROR_MAX, "'%.*s': %.160s", NAMED(q, 80), q->by.why);
    return rc;
}

/* Every parameter that has state, until one is refused. */
static int reset_all(struct ht_call *q)
{
    struct ht_buf found = HT_BUF_INIT;
    int rc = ht_ctl_owner(q->ctl, q->root, &q->caller);

    if (rc == -EPERM)
        snprintf(q->err, HT_CTL_ERROR_MAX, "all parameters: only the owner of the model's directory may, or root");
    if (rc == 0)
        rc = ht_override_stateful(q->ctl, q->root, &found);
    for (size_t at = 0; rc == 0 && at < found.len; at += sizeof(uint64_t)) {
        char path[160];
        uint64_t ino;
        memcpy(&ino, found.data + at, sizeof(ino));
        rc = reset_param(q, ino);
        if (!rc || q->by.why[0])
            continue;
        ht_ns_path(q->ctl->ns, ino, path, sizeof(path));
        snprintf(q->err, HT_CTL_ERROR_MAX, "%s: %s", path,
                 rc == -EBUSY ? "it has a gradient in the open step; commit or abort first" : strerror(-rc));
    }
    ht_buf_free(&found);
    return rc;
}

/* ------------------------------------------------------------ on a gradient */

/*
 * A client that stores into its window of a gradient reports no ranges: the window, if there is one, counts as a whole,
 * and is written to the gradient here. It is zeros then, like a written gradient after its step: the same bytes cannot
 * get into two steps. Bytes that were written with calls are queued as they are. `drop` empties the window, too. An
 * `apply` that fails leaves the window as it is, and none of its bytes in the gradient: the next `apply` of another
 * client would take those.
 */
enum { WINDOW_PIECE_BYTES = 1 << 20 };

static int copy_window(struct ht_obj *window, struct ht_grad *g)
{
    uint8_t *buf = malloc(WINDOW_PIECE_BYTES);
    ssize_t n = buf ? 1 : -ENOMEM;

    for (uint64_t off = 0; n > 0; off += (uint64_t)n) {
        n = ht_obj_read(window, off, buf, WINDOW_PIECE_BYTES);
        if (n > 0)
            n = ht_grad_write(g, off, buf, (size_t)n);
    }
    free(buf);
    return (int)n;
}

static int apply_window(struct ht_ctl *c, uint64_t ino, struct ht_obj *window)
{
    struct ht_trace_mark mark = ht_trace_begin();
    struct ht_param_desc desc;
    struct ht_grad *g;
    int rc = ht_ctl_describe(c, ino, &desc);

    if (rc)
        return rc;
    rc = ht_grad_open(c->optim, &desc, &g);
    if (rc == 0) {
        rc = copy_window(window, g);
        if (rc == 0) /* before its updates */
            ht_trace_end(ht_store_trace(c->store), &mark, HT_TRACE_GRADIENT, ino, 0, ht_obj_size(window));
        if (rc == 0)
            rc = ht_grad_flush(g);
        if (rc)
            ht_grad_discard(g);
        ht_grad_release(g);
    }
    ht_ns_close(c->ns, ino);
    return rc ? rc : ht_obj_punch(window, 0, ht_obj_size(window));
}

/* A reference, or NULL. */
static struct ht_obj *get_window(struct ht_ctl *c, uint64_t ino)
{
    const struct ht_ctl_cache *cache = c->cache;

    return cache ? cache->mapped(cache->ctx, ht_hidden_gradient(ino)) : NULL;
}

static int apply_ortho(struct ht_call *q, uint64_t ino)
{
    int rc = ht_optim_ortho_apply(q->ctl->optim, q->root, ino, q->cmd->step_open);

    if (rc == -ENOENT)
        snprintf(q->err, HT_CTL_ERROR_MAX, "'%.*s' has no gradient in the open step", NAMED(q, 120));
    return rc == -ENOENT ? -EBUSY : rc;
}

static int apply(struct ht_call *q, uint64_t ino)
{
    if (q->cmd->ortho)
        return apply_ortho(q, ino);

    struct ht_obj *window = get_window(q->ctl, ino);
    int rc = window ? apply_window(q->ctl, ino, window) : 0;

    ht_obj_put(window);
    return rc ? rc : ht_optim_apply(q->ctl->optim, q->root, ino);
}

static int drop(struct ht_call *q, uint64_t ino)
{
    struct ht_obj *window = get_window(q->ctl, ino);
    int rc = ht_optim_may_steer(q->ctl->optim, q->root, &q->by);

    rc = rc ? rc : ht_optim_drop(q->ctl->optim, q->root, ino, &q->by);
    if (rc == 0 && window)
        rc = ht_obj_punch(window, 0, ht_obj_size(window));
    ht_obj_put(window);
    return rc;
}

/* ---------------------------------------------------------- on a model root */

static int end_or_abort(struct ht_call *q, uint64_t ino)
{
    struct ht_trace_mark mark = ht_trace_begin();
    struct ht_optim *o = q->ctl->optim;
    enum ht_trace_op op = HT_TRACE_ABORT;
    bool aborts = q->cmd->id == HT_COMMAND_ABORT;
    bool publishes = q->cmd->id == HT_COMMAND_COMMIT && q->by.claim && q->seat->makes;
    int rc = aborts ? 0 : ht_ctl_need_whole(q->ctl, q->root, publishes, q->err);

    if (rc || q->cmd->id == HT_COMMAND_PREPARE)
        return rc ? rc : ht_optim_prepare_by(o, q->root, &q->by);
    if (q->cmd->id == HT_COMMAND_STEP) {
        op = HT_TRACE_STEP;
        rc = q->cmd->async ? ht_optim_step_async_by(o, q->root, &q->by) : ht_optim_step_by(o, q->root, &q->by);
    } else if (q->cmd->id == HT_COMMAND_COMMIT) {
        op = HT_TRACE_COMMIT;
        ht_cold_settle(q->ctl, q->root);
        rc = ht_optim_commit_by(o, q->root, &q->by);
    } else {
        rc = ht_optim_abort_by(o, q->root, &q->by);
        q->seat->makes |= !rc && q->by.claim;
        ht_ctl_drop_stale(q->ctl);
        ht_endurance_apply(q->ctl); /* the mount's root may be the model root */
    }
    if (rc == 0)
        ht_trace_end(ht_store_trace(q->ctl->store), &mark, op, q->root, 0, 0);
    return rc;
}

/* A descriptor holds the claim of one root at most. */
static int claim(struct ht_call *q, uint64_t ino)
{
    struct ht_ctl *c = q->ctl;
    struct ht_seat *seat = q->seat;
    char why[HT_CTL_ERROR_MAX];
    struct ht_optim_claim want = {
        .held = seat->root == q->root ? seat->claim : 0,
        .name = q->cmd->name,
        .takeover = q->cmd->takeover[0] ? q->cmd->takeover : NULL,
        .pid = seat->process,
    };
    int rc = ht_optim_claim(c->optim, q->root, &want, q->err);

    if (rc)
        return rc;
    ht_mutex_lock(ht_ctl_root_lock(c)); /* another client's change of words that began before ends before the answer */
    ht_mutex_unlock(ht_ctl_root_lock(c));
    if (seat->claim != want.held) { /* from now on its process alone can say that the root is half-made */
        seat->makes = !ht_ctl_need_whole(c, q->root, false, why);
        (void)ht_optim_unclaim(c->optim, seat->root, seat->claim);
    }
    seat->root = q->root;
    seat->claim = want.held;
    return 0;
}

static int unclaim(struct ht_call *q, uint64_t ino)
{
    struct ht_seat *seat = q->seat;
    int rc = seat->claim ? ht_optim_unclaim(q->ctl->optim, seat->root, seat->claim) : -EINVAL;

    if (rc)
        snprintf(q->err, HT_CTL_ERROR_MAX, "%s",
                 seat->claim ? "the claim of this descriptor had ended already"
                             : "this descriptor has claimed nothing");
    seat->claim = 0;
    return rc;
}

int ht_seat_check(struct ht_ctl *c, uint64_t dir, uint64_t root, struct ht_seat *seat, char err[HT_CTL_ERROR_MAX])
{
    struct ht_caller caller = ht_person_caller(&seat->person);

    if (root == seat->checked)
        return 0;
    int rc = root ? ht_ctl_may_steer(c, root, &caller) : ht_ctl_access(c, dir, W_OK, &caller);
    if (rc)
        snprintf(err, HT_CTL_ERROR_MAX,
                 "this directory has come under another model root since " HT_CTL_DIR
                 "/ctl was opened, and the user that opened it may not steer that one");
    else
        seat->checked = root;
    return rc;
}

void ht_seat_leave(struct ht_ctl *c, struct ht_seat *seat)
{
    if (seat->claim)
        (void)ht_optim_unclaim(c->optim, seat->root, seat->claim);
    if (seat->held)
        ht_ns_kept_release(c->ns, seat->held);
}

/* ------------------------------------------------------------ on the store */

static int start_or_stop_scrub(struct ht_call *q, uint64_t ino)
{
    bool start = q->cmd->path_len == strlen("start");
    int rc = start ? ht_store_scrub_start(q->ctl->store) : ht_store_scrub_stop(q->ctl->store);

    if (rc == -EBUSY || rc == -ESRCH)
        snprintf(q->err, HT_CTL_ERROR_MAX, start ? "a scrub is running already" : "no scrub is running");
    return rc;
}

static int trim(struct ht_call *q, uint64_t ino)
{
    uint64_t bytes;
    int rc = ht_store_trim(q->ctl->store, &bytes);

    if (rc == -EOPNOTSUPP)
        snprintf(q->err, HT_CTL_ERROR_MAX, "no device of the store discards");
    return rc;
}

static void name_engines(struct ht_ctl *c, const char *unknown, char err[HT_CTL_ERROR_MAX])
{
    struct ht_background_stat st;
    int at = snprintf(err, HT_CTL_ERROR_MAX, "no engine is called '%s': there are", unknown);

    for (unsigned i = 0; at < HT_CTL_ERROR_MAX && !ht_store_background_stat(c->store, i, &st); i++)
        at += snprintf(err + at, (size_t)(HT_CTL_ERROR_MAX - at), " %s", st.engine);
}

static int pause_or_resume(struct ht_call *q, uint64_t ino)
{
    const char *engine = q->cmd->name[0] ? q->cmd->name : NULL;
    bool pause = q->cmd->path_len == strlen("pause");
    int rc = (pause ? ht_store_background_pause : ht_store_background_resume)(q->ctl->store, engine);

    if (rc == -ENOENT)
        name_engines(q->ctl, q->cmd->name, q->err);
    return rc;
}

/* ---------------------------------------------------------------- commands */

enum subject { OF_ROOT, OF_PARAM, OF_FILE, OF_STORE };

static const struct verb {
    enum subject of;
    int (*run)(struct ht_call *q, uint64_t ino); /* ino: of the file; 0: none is named */
    int mask;         /* a command needs the permission that a program needs to do the same to the file */
    const char *what; /* of the store: as the subject of a sentence */
} verbs[] = {
    [HT_COMMAND_APPLY] = {OF_PARAM, apply, W_OK},
    [HT_COMMAND_WAIT] = {OF_PARAM, wait_for_updates, 0},
    [HT_COMMAND_STEP] = {OF_ROOT, end_or_abort},
    [HT_COMMAND_COMMIT] = {OF_ROOT, end_or_abort},
    [HT_COMMAND_ABORT] = {OF_ROOT, end_or_abort},
    [HT_COMMAND_RESET] = {OF_PARAM, reset_param, W_OK},
    [HT_COMMAND_DROP] = {OF_PARAM, drop, W_OK},
    [HT_COMMAND_PREFETCH] = {OF_FILE, prefetch, R_OK},
    [HT_COMMAND_EVICT] = {OF_FILE, evict, R_OK},
    [HT_COMMAND_SCRUB] = {OF_STORE, start_or_stop_scrub, 0, "a scrub"},
    [HT_COMMAND_TRIM] = {OF_STORE, trim, 0, "a trim"},
    [HT_COMMAND_BACKGROUND] = {OF_STORE, pause_or_resume, 0, "work in the background"},
    [HT_COMMAND_CLAIM] = {OF_ROOT, claim},
    [HT_COMMAND_UNCLAIM] = {OF_ROOT, unclaim},
    [HT_COMMAND_SNAPSHOT] = {OF_ROOT, ht_kept_snapshot},
    [HT_COMMAND_FORGET] = {OF_ROOT, ht_kept_forget},
    [HT_COMMAND_CLONE] = {OF_ROOT, ht_kept_clone},
    [HT_COMMAND_ROLLBACK] = {OF_ROOT, ht_kept_rollback},
    [HT_COMMAND_PREPARE] = {OF_ROOT, end_or_abort},
    [HT_COMMAND_DECIDE] = {OF_PARAM, decide, W_OK},
    [HT_COMMAND_HOLD] = {OF_ROOT, ht_kept_hold},
    [HT_COMMAND_ARCHIVED] = {OF_ROOT, ht_kept_archived},
    [HT_COMMAND_VAULT] = {OF_STORE, ht_cold_vault, 0, "a vault"},
    [HT_COMMAND_COLD] = {OF_ROOT, ht_cold_begin_root},
    [HT_COMMAND_RECALL] = {OF_FILE, ht_cold_recall, R_OK},
};

static bool is_param(const struct ht_call *q, uint64_t ino)
{
    struct stat st;

    return q->root && ht_ns_getattr(q->ctl->ns, ino, &st) == 0 && S_ISREG(st.st_mode) &&
        ht_ctl_param(q->ctl, ino) == q->root;
}

static int run_on_file(struct ht_call *q, const struct verb *v, uint64_t ino)
{
    if (v->of == OF_FILE || is_param(q, ino))
        return v->run(q, ino);
    return ht_ctl_refuse(q->err, -EINVAL,
                         "'%.*s' is no parameter of this model root (a regular file with a float dtype)",
                         NAMED(q, 120));
}

static int run_with_path(struct ht_call *q, const struct verb *v)
{
    uint64_t ino;
    int rc = ht_ctl_resolve(q->ctl, q->dir, q->cmd->path, q->cmd->path_len, &q->caller, &ino);

    if (rc == 0 && v->mask) {
        rc = ht_ctl_access(q->ctl, ino, v->mask, &q->caller);
        if (rc)
            ht_ns_forget(q->ctl->ns, ino, 1);
    }
    if (rc)
        return ht_ctl_refuse(q->err, rc, "'%.*s': %s", NAMED(q, 160),
                             rc == -EINVAL ? "not a path below this directory" : strerror(-rc));
    rc = run_on_file(q, v, ino);
    ht_ns_forget(q->ctl->ns, ino, 1);
    return rc;
}

/* For the owner of the store, on the store. */
static int run_on_store(struct ht_call *q, const struct verb *v)
{
    if (q->dir != HT_NS_ROOT_INO)
        return ht_ctl_refuse(q->err, -EINVAL, "%s is of the whole store: use " HT_CTL_DIR "/ctl of the mount's root",
                             v->what);
    int rc = ht_ctl_owner(q->ctl, q->dir, &q->caller);
    if (rc)
        return ht_ctl_refuse(q->err, rc, "%s is for root and the owner of the mount's root directory", v->what);
    return v->run(q, 0);
}

static int run_verb(struct ht_call *q, const struct verb *v)
{
    const struct ht_command *cmd = q->cmd;

    if (v->of == OF_STORE)
        return run_on_store(q, v);
    if (cmd->id == HT_COMMAND_RESET && q->root && cmd->path_len == 1 && *cmd->path == '*')
        return reset_all(q);
    if (cmd->path_len && v->of != OF_ROOT)
        return run_with_path(q, v);
    if (q->root)
        return v->run(q, 0);
    if (cmd->id == HT_COMMAND_COMMIT && !cmd->conditional && !cmd->full && q->dir == HT_NS_ROOT_INO)
        return ht_store_commit(q->ctl->store);
    return ht_ctl_refuse(q->err, -EINVAL, "this directory is no model root: set " HT_XATTR_PREFIX "optimizer on it");
}

/* The optimizer names its refusals in the root's error; other refusals are put there now. */
static void explain_refusal(const struct ht_call *q, uint64_t shown_at, uint64_t refusals_before, int error)
{
    struct ht_root_stat st;
    bool reported = q->root && ht_optim_root_stat(q->ctl->optim, q->root, &st) == 0 && st.refusals != refusals_before;

    if (!q->err[0])
        snprintf(q->err, HT_CTL_ERROR_MAX, "%s", reported && st.error[0] ? st.error : strerror(-error));
    if (!reported)
        ht_last_error_set(q->ctl, shown_at, q->cmd->word, "%s: %s", q->cmd->word, q->err);
}

int ht_command_run(struct ht_ctl *c, uint64_t dir, uint64_t root, struct ht_seat *seat, const struct ht_command *cmd,
                   char err[HT_CTL_ERROR_MAX])
{
    struct ht_call q = {.ctl = c, .dir = dir, .root = root, .seat = seat, .cmd = cmd, .err = err};
    uint64_t shown_at = root ? root : dir;
    struct ht_root_stat st;

    err[0] = 0;
    if (cmd->id == HT_COMMAND_NONE)
        return 0;
    q.caller = ht_person_caller(&seat->person);
    q.by = (struct ht_optim_steer){.claim = seat->root == root ? seat->claim : 0,
                                   .conditional = cmd->conditional,
                                   .step_open = cmd->step_open,
                                   .full = cmd->full};
    if (!root || ht_optim_root_stat(c->optim, root, &st))
        st.refusals = 0;
    int rc = run_verb(&q, &verbs[cmd->id]);
    if (q.by.why[0] && cmd->id != HT_COMMAND_DECIDE)
        snprintf(err, HT_CTL_ERROR_MAX, "%s", q.by.why);
    if (rc) {
        explain_refusal(&q, shown_at, st.refusals, rc);
    } else {
        ht_last_error_done(c, shown_at, cmd->word);
        ht_last_error_done(c, shown_at, "command");
    }
    return rc;
}
