/* SPDX-License-Identifier: Apache-2.0 */
/* command.c - the lines of .hitrain/ctl. Each may WAIT: the caller's thread must be one that nothing else waits for. */
#include "fs/ctl/ctl_priv.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

/*
 * Looks up a step of a path with the caller's permissions: names in a directory that the caller may not search are as
 * unknown as absent ones.
 */
static int look_up(struct ht_ctl *c, uint64_t dir, const char *name, const struct ht_caller *caller,
                   struct stat *out_st)
{
    int rc = ht_ctl_may_search(c, dir, caller);

    return rc ? rc : ht_ns_lookup(c->ns, dir, name, out_st);
}

int ht_ctl_resolve(struct ht_ctl *c, uint64_t dir, const char *path, size_t len, const struct ht_caller *caller,
                   uint64_t *out_ino)
{
    size_t left = len;
    char name[HT_NAME_BYTES_MAX + 1];
    uint64_t at = dir;
    int rc;

    if (left && *path == '/')
        return -EINVAL;
    while ((rc = ht_parse_component(&path, &left, name)) > 0) {
        struct stat st;
        int found = look_up(c, at, name, caller, &st);
        if (at != dir)
            ht_ns_forget(c->ns, at, 1);
        if (found)
            return found;
        at = st.st_ino;
    }
    if (rc == 0 && at == dir)
        rc = -EINVAL;
    if (rc && at != dir)
        ht_ns_forget(c->ns, at, 1);
    if (rc == 0)
        *out_ino = at;
    return rc;
}

static int prefetch_or_evict(struct ht_ctl *c, uint64_t ino, bool prefetch)
{
    struct ht_obj *obj;
    int rc = ht_ns_open(c->ns, ino, &obj);

    if (rc)
        return rc;
    rc = prefetch ? ht_ctl_prefetch(c, ino, obj) : ht_ctl_evict(c, ino, obj);
    ht_ns_close(c->ns, ino);
    return rc;
}

/* ---------------------------------------------------------------- steering */

static struct ht_optim_steer steer_of(const struct ht_seat *seat, uint64_t root, const struct ht_command *cmd)
{
    return (struct ht_optim_steer){
        .claim = seat->root == root ? seat->claim : 0,
        .conditional = cmd->conditional,
        .step_open = cmd->step_open,
        .full = cmd->full,
    };
}

static int reset_or_drop(struct ht_ctl *c, uint64_t root, uint64_t ino, const struct ht_seat *seat,
                         const struct ht_command *cmd, char err[HT_CTL_ERROR_MAX])
{
    struct ht_optim_steer by = steer_of(seat, root, cmd);
    int rc = ht_optim_may_steer(c->optim, root, &by); /* also for a parameter without gradient and state */

    if (rc == 0 && cmd->id == HT_COMMAND_DROP) {
        rc = ht_ctl_drop(c, root, ino, &by);
    } else if (rc == 0) {
        rc = ht_optim_reset(c->optim, root, ino, &by);
        if (rc == -ENOENT)
            rc = 0; /* it never had a gradient, nor state */
    }
    if (by.why[0])
        snprintf(err, HT_CTL_ERROR_MAX, "%s", by.why);
    return rc;
}

static int decide(struct ht_ctl *c, uint64_t root, uint64_t ino, const struct ht_seat *seat,
                  const struct ht_command *cmd, char err[HT_CTL_ERROR_MAX])
{
    struct ht_optim_steer by = steer_of(seat, root, cmd);
    struct ht_decision d = {.root = root, .oid = ino};
    struct ht_param_desc desc;
    int rc = ht_ctl_describe(c, ino, &desc);

    if (rc)
        return rc;
    d.grad_dtype = desc.grad_dtype;
    ht_ns_close(c->ns, ino);
    memcpy(d.bytes, cmd->numbers, sizeof(d.bytes));
    rc = ht_optim_decide(c->optim, &d, &by);
    if (by.why[0])
        snprintf(err, HT_CTL_ERROR_MAX, "'%.*s': %.160s", (int)ht_min_u64(cmd->path_len, 80), cmd->path, by.why);
    return rc;
}

/* Every parameter that has state, until one is refused. */
static int reset_all(struct ht_ctl *c, uint64_t root, const struct ht_seat *seat, const struct ht_command *cmd,
                     char err[HT_CTL_ERROR_MAX])
{
    const struct ht_caller caller = {.cred = seat->person.cred};
    struct ht_buf found = HT_BUF_INIT;
    int rc = ht_ctl_owner(c, root, &caller);

    if (rc == -EPERM)
        snprintf(err, HT_CTL_ERROR_MAX, "all parameters: only the owner of the model's directory may, or root");
    if (rc == 0)
        rc = ht_override_stateful(c, root, &found);
    for (size_t at = 0; rc == 0 && at < found.len; at += sizeof(uint64_t)) {
        char path[160];
        uint64_t ino;
        memcpy(&ino, found.data + at, sizeof(ino));
        rc = reset_or_drop(c, root, ino, seat, cmd, err);
        if (!rc || err[0])
            continue;
        ht_ns_path(c->ns, ino, path, sizeof(path));
        snprintf(err, HT_CTL_ERROR_MAX, "%s: %s", path,
                 rc == -EBUSY ? "it has a gradient in the open step; commit or abort first" : strerror(-rc));
    }
    ht_buf_free(&found);
    return rc;
}

static int end_or_abort(struct ht_ctl *c, uint64_t root, const struct ht_seat *seat, const struct ht_command *cmd,
                        char err[HT_CTL_ERROR_MAX])
{
    struct ht_optim_steer by = steer_of(seat, root, cmd);
    struct ht_trace_mark mark = ht_trace_begin();
    enum ht_trace_op op = cmd->id == HT_COMMAND_STEP ? HT_TRACE_STEP
        : cmd->id == HT_COMMAND_COMMIT               ? HT_TRACE_COMMIT
                                                     : HT_TRACE_ABORT;
    int rc;

    if (cmd->id == HT_COMMAND_STEP) {
        rc = cmd->async ? ht_optim_step_async_by(c->optim, root, &by) : ht_optim_step_by(c->optim, root, &by);
    } else if (cmd->id == HT_COMMAND_COMMIT) {
        rc = ht_optim_commit_by(c->optim, root, &by);
    } else {
        rc = ht_optim_abort_by(c->optim, root, &by);
        ht_ctl_drop_stale(c);
        ht_endurance_apply(c); /* the mount's root may be the model root */
    }
    if (rc == 0)
        ht_trace_end(ht_store_trace(c->store), &mark, op, root, 0, 0);
    if (by.why[0])
        snprintf(err, HT_CTL_ERROR_MAX, "%s", by.why);
    return rc;
}

/* A descriptor holds the claim of one root at most. */
static int claim(struct ht_ctl *c, uint64_t root, struct ht_seat *seat, const struct ht_command *cmd,
                 char err[HT_CTL_ERROR_MAX])
{
    struct ht_optim_claim want = {
        .held = seat->root == root ? seat->claim : 0,
        .name = cmd->name,
        .takeover = cmd->takeover[0] ? cmd->takeover : NULL,
        .pid = seat->process,
    };
    int rc = ht_optim_claim(c->optim, root, &want, err);

    if (rc)
        return rc;
    ht_mutex_lock(ht_ctl_root_lock(c)); /* another client's change of words that began before ends before the answer */
    ht_mutex_unlock(ht_ctl_root_lock(c));
    if (seat->claim != want.held)
        ht_seat_leave(c, seat);
    seat->root = root;
    seat->claim = want.held;
    return 0;
}

static int unclaim(struct ht_ctl *c, struct ht_seat *seat, char err[HT_CTL_ERROR_MAX])
{
    int rc = seat->claim ? ht_optim_unclaim(c->optim, seat->root, seat->claim) : -EINVAL;

    if (rc)
        snprintf(err, HT_CTL_ERROR_MAX, "%s",
                 seat->claim ? "the claim of this descriptor had ended already"
                             : "this descriptor has claimed nothing");
    seat->claim = 0;
    return rc;
}

int ht_seat_check(struct ht_ctl *c, uint64_t dir, uint64_t root, struct ht_seat *seat, char err[HT_CTL_ERROR_MAX])
{
    struct ht_caller caller = ht_person_caller(&seat->person);
    int rc;

    if (root == seat->checked)
        return 0;
    rc = root ? ht_ctl_may_steer(c, root, &caller) : ht_ctl_access(c, dir, W_OK, &caller);
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
    seat->claim = 0;
}

/* ---------------------------------------------------------------- commands */

/* A command needs the permission that a program needs to do the same to the file. */
static int check_file(struct ht_ctl *c, uint64_t ino, const struct ht_command *cmd, const struct ht_caller *caller)
{
    switch (cmd->id) {
    case HT_COMMAND_PREFETCH:
    case HT_COMMAND_EVICT:
        return ht_ctl_access(c, ino, R_OK, caller);
    case HT_COMMAND_APPLY:
    case HT_COMMAND_RESET:
    case HT_COMMAND_DROP:
    case HT_COMMAND_DECIDE:
        return ht_ctl_access(c, ino, W_OK, caller);
    default:
        return 0;
    }
}

static bool is_file(struct ht_ctl *c, uint64_t ino)
{
    struct stat st;

    return ht_ns_getattr(c->ns, ino, &st) == 0 && S_ISREG(st.st_mode);
}

static int run_on_file(struct ht_ctl *c, uint64_t root, uint64_t ino, const struct ht_seat *seat,
                       const struct ht_command *cmd, char err[HT_CTL_ERROR_MAX])
{
    if (cmd->id == HT_COMMAND_PREFETCH || cmd->id == HT_COMMAND_EVICT) {
        int rc = prefetch_or_evict(c, ino, cmd->id == HT_COMMAND_PREFETCH);
        if (rc == -EISDIR)
            snprintf(err, HT_CTL_ERROR_MAX, "'%.*s' is a directory: name its files, one command each",
                     (int)ht_min_u64(cmd->path_len, 120), cmd->path);
        return rc;
    }
    if (!root || !is_file(c, ino) || ht_ctl_param(c, ino) != root) {
        snprintf(err, HT_CTL_ERROR_MAX, "'%.*s' is no parameter of this model root (a regular file with a float dtype)",
                 (int)ht_min_u64(cmd->path_len, 120), cmd->path);
        return -EINVAL;
    }
    switch (cmd->id) {
    case HT_COMMAND_APPLY:
        return ht_ctl_apply(c, root, ino);
    case HT_COMMAND_WAIT:
        return ht_optim_wait(c->optim, root, ino);
    case HT_COMMAND_RESET:
    case HT_COMMAND_DROP:
        return reset_or_drop(c, root, ino, seat, cmd, err);
    case HT_COMMAND_DECIDE:
        return decide(c, root, ino, seat, cmd, err);
    default:
        return -EINVAL;
    }
}

static int run_with_path(struct ht_ctl *c, uint64_t dir, uint64_t root, const struct ht_seat *seat,
                         const struct ht_command *cmd, char err[HT_CTL_ERROR_MAX])
{
    struct ht_person person = seat->person;
    struct ht_caller caller = ht_person_caller(&person);
    uint64_t ino;
    int rc = ht_ctl_resolve(c, dir, cmd->path, cmd->path_len, &caller, &ino);

    if (rc == 0) {
        rc = check_file(c, ino, cmd, &caller);
        if (rc)
            ht_ns_forget(c->ns, ino, 1);
    }
    if (rc) {
        snprintf(err, HT_CTL_ERROR_MAX, "'%.*s': %s", (int)ht_min_u64(cmd->path_len, 160), cmd->path,
                 rc == -EINVAL ? "not a path below this directory" : strerror(-rc));
        return rc;
    }
    rc = run_on_file(c, root, ino, seat, cmd, err);
    ht_ns_forget(c->ns, ino, 1);
    return rc;
}

static int run_on_root(struct ht_ctl *c, uint64_t root, struct ht_seat *seat, const struct ht_command *cmd,
                       char err[HT_CTL_ERROR_MAX])
{
    switch (cmd->id) {
    case HT_COMMAND_WAIT:
        return ht_optim_wait(c->optim, root, 0);
    case HT_COMMAND_STEP:
    case HT_COMMAND_COMMIT:
    case HT_COMMAND_ABORT:
        return end_or_abort(c, root, seat, cmd, err);
    case HT_COMMAND_CLAIM:
        return claim(c, root, seat, cmd, err);
    case HT_COMMAND_UNCLAIM:
        return unclaim(c, seat, err);
    default:
        return -EINVAL;
    }
}

/* Is it a command for the owner of the store, on the store? what: as the subject of a sentence. */
static int check_owner_of_store(struct ht_ctl *c, uint64_t dir, const struct ht_seat *seat, const char *what,
                                char err[HT_CTL_ERROR_MAX])
{
    const struct ht_caller caller = {.cred = seat->person.cred};

    if (dir != HT_NS_ROOT_INO) {
        snprintf(err, HT_CTL_ERROR_MAX, "%s is of the whole store: use " HT_CTL_DIR "/ctl of the mount's root", what);
        return -EINVAL;
    }
    int rc = ht_ctl_owner(c, dir, &caller);
    if (rc)
        snprintf(err, HT_CTL_ERROR_MAX, "%s is for root and the owner of the mount's root directory", what);
    return rc;
}

static int run_background(struct ht_ctl *c, uint64_t dir, const struct ht_seat *seat, const struct ht_command *cmd,
                          char err[HT_CTL_ERROR_MAX])
{
    int rc = check_owner_of_store(c, dir, seat, "work in the background", err);

    return rc ? rc : ht_background_command(c, cmd, err);
}

static int run_scrub(struct ht_ctl *c, uint64_t dir, const struct ht_seat *seat, const struct ht_command *cmd,
                     char err[HT_CTL_ERROR_MAX])
{
    bool start = cmd->path_len == strlen("start");
    int rc = check_owner_of_store(c, dir, seat, "a scrub", err);

    if (rc)
        return rc;
    rc = start ? ht_store_scrub_start(c->store) : ht_store_scrub_stop(c->store);
    if (rc == -EBUSY || rc == -ESRCH)
        snprintf(err, HT_CTL_ERROR_MAX, start ? "a scrub is running already" : "no scrub is running");
    return rc;
}

static int run_trim(struct ht_ctl *c, uint64_t dir, const struct ht_seat *seat, char err[HT_CTL_ERROR_MAX])
{
    uint64_t bytes;
    int rc = check_owner_of_store(c, dir, seat, "a trim", err);

    if (rc)
        return rc;
    rc = ht_store_trim(c->store, &bytes);
    if (rc == -EOPNOTSUPP)
        snprintf(err, HT_CTL_ERROR_MAX, "no device of the store discards");
    return rc;
}

/* The optimizer names its refusals in the root's error; other refusals are put there now. */
static void explain(struct ht_ctl *c, uint64_t root, uint64_t shown_at, uint64_t refusals_before,
                    const struct ht_command *cmd, int error, char err[HT_CTL_ERROR_MAX])
{
    struct ht_root_stat st;
    bool reported = root && ht_optim_root_stat(c->optim, root, &st) == 0 && st.refusals != refusals_before;

    if (!err[0])
        snprintf(err, HT_CTL_ERROR_MAX, "%s", reported && st.error[0] ? st.error : strerror(-error));
    if (!reported)
        ht_last_error_set(c, shown_at, cmd->word, "%s: %s", cmd->word, err);
}

static int run(struct ht_ctl *c, uint64_t dir, uint64_t root, struct ht_seat *seat, const struct ht_command *cmd,
               char err[HT_CTL_ERROR_MAX])
{
    int rc;

    if (cmd->id == HT_COMMAND_SCRUB) {
        rc = run_scrub(c, dir, seat, cmd, err);
    } else if (cmd->id == HT_COMMAND_TRIM) {
        rc = run_trim(c, dir, seat, err);
    } else if (cmd->id == HT_COMMAND_BACKGROUND) {
        rc = run_background(c, dir, seat, cmd, err);
    } else if (cmd->id == HT_COMMAND_RESET && root && cmd->path_len == 1 && *cmd->path == '*') {
        rc = reset_all(c, root, seat, cmd, err);
    } else if (root && ht_kept_is_command(cmd)) {
        struct ht_optim_steer by = steer_of(seat, root, cmd);
        struct ht_caller caller = ht_person_caller(&seat->person);
        rc = ht_kept_command(c, root, cmd, &by, &caller, err);
    } else if (cmd->path_len && !ht_kept_is_command(cmd)) {
        rc = run_with_path(c, dir, root, seat, cmd, err);
    } else if (root) {
        rc = run_on_root(c, root, seat, cmd, err);
    } else if (cmd->id == HT_COMMAND_COMMIT && !cmd->conditional && !cmd->full && dir == HT_NS_ROOT_INO) {
        rc = ht_store_commit(c->store);
    } else {
        snprintf(err, HT_CTL_ERROR_MAX, "this directory is no model root: set " HT_XATTR_PREFIX "optimizer on it");
        rc = -EINVAL;
    }
    return rc;
}

int ht_command_run(struct ht_ctl *c, uint64_t dir, uint64_t root, struct ht_seat *seat, const struct ht_command *cmd,
                   char err[HT_CTL_ERROR_MAX])
{
    uint64_t shown_at = root ? root : dir;
    struct ht_root_stat st;
    int rc;

    err[0] = 0;
    if (cmd->id == HT_COMMAND_NONE)
        return 0;
    if (!root || ht_optim_root_stat(c->optim, root, &st))
        st.refusals = 0;
    rc = run(c, dir, root, seat, cmd, err);
    if (rc) {
        explain(c, root, shown_at, st.refusals, cmd, rc, err);
    } else {
        ht_last_error_done(c, shown_at, cmd->word);
        ht_last_error_done(c, shown_at, "command");
    }
    return rc;
}
