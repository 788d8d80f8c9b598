/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hidden_file.c - open files of the hidden tree: gradients, states, shards, ctl, stats, feeds and logged steps.
 *
 * ctl is a session per open file: lines written are commands, lines read are their results in order,
 * whatever the offsets. Its mutex serialises the session of threads that share the descriptor; it is held over a
 * command, which is why such calls WAIT.
 */
#include "fs/ctl/events.h"
#include "fs/ctl/gather.h"
#include "fs/ctl/hidden_priv.h"
#include "fs/ctl/plan.h"
#include "fs/ctl/shard.h"
#include "fs/ctl/trace.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    LINE_MAX_BYTES = PATH_MAX + NAME_MAX + 64, /* a path, and a name or the numbers of an update before it */
    RESULTS_MAX_BYTES = 1 << 16,               /* unread results beyond this are dropped, oldest first */
};

struct session {
    struct ht_mutex lock;
    HT_GUARDED_BY(HT_LOCK_CTL_SESSION) struct {
        char line[LINE_MAX_BYTES]; /* begun and not ended yet */
        size_t line_len;
        bool line_too_long;
        struct ht_buf results;
        size_t read; /* of results */
        struct ht_seat seat;
    };
};

HT_MUTEX_OF(session_lock, struct session, lock, HT_LOCK_CTL_SESSION)

struct ht_hidden_file {
    struct ht_list link; /* in ctl.files */
    struct ht_ctl *ctl;
    uint64_t ino;
    enum ht_hidden_kind kind;
    int flags;                  /* of the open */
    struct ht_param_desc param; /* GRAD, TOPK, STATE and the files of shards */
    struct ht_grad *grad;       /* GRAD, SHARD_GRAD */
    struct ht_topk *topk;       /* TOPK */
    const char *state;          /* STATE, SHARD_STATE: name */
    struct ht_shard_map *shard; /* of shards; NULL: the whole */
    struct session *session;    /* CTL */
    struct ht_buf text;         /* STATS */
    struct ht_feed *feed;       /* files of JSON Lines */
    struct ht_optim_redo *redo; /* REDO */
    struct ht_gather *gather;   /* GATHER */
    bool counted;               /* by fs/fuse */
};

/* -------------------------------------------------------------------- open */

static int open_param(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    uint64_t base = ht_hidden_base(f->ino);
    int rc = ht_ctl_describe(f->ctl, base, &f->param);

    if (rc == -EINVAL) {
        ht_last_error_set_for(f->ctl, base, caller, "gradient",
                              "has no gradient: it is no parameter (set " HT_XATTR_PREFIX "dtype to f32, bf16 or f16)");
    } else if (rc == 0) {
        ht_last_error_done(f->ctl, base, "gradient");
    }
    return rc;
}

static int refuse_shape(struct ht_hidden_file *f, const struct ht_caller *caller, const char *why)
{
    uint64_t base = ht_hidden_base(f->ino);
    char text[HT_CTL_ERROR_MAX + 16];

    snprintf(text, sizeof(text), "gradient: %s", why);
    ht_last_error_set_for(f->ctl, base, caller, "gradient", text);
    ht_ns_close(f->ctl->ns, base);
    return -EINVAL;
}

static int open_grad(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    char why[HT_CTL_ERROR_MAX];
    int rc = open_param(f, caller);

    if (rc)
        return rc;
    if (ht_shape_check(f->ctl, ht_hidden_base(f->ino), why))
        return refuse_shape(f, caller, why);
    rc = f->kind == HT_HIDDEN_TOPK ? ht_topk_open(f->ctl->optim, &f->param, &f->topk)
                                   : ht_grad_open(f->ctl->optim, &f->param, &f->grad);
    if (rc)
        ht_ns_close(f->ctl->ns, ht_hidden_base(f->ino));
    return rc;
}

static int open_state(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    int rc = open_param(f, caller);

    if (rc)
        return rc;
    rc = ht_optim_state_name(f->ctl->optim, &f->param, ht_hidden_index(f->ino), &f->state);
    if (rc)
        ht_ns_close(f->ctl->ns, ht_hidden_base(f->ino));
    return rc;
}

static bool is_file_of_shard(enum ht_hidden_kind kind)
{
    return kind >= HT_HIDDEN_SHARD_PARAM;
}

static int open_whole(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    switch (f->kind) {
    case HT_HIDDEN_SHARD_GRAD:
        return open_grad(f, caller);
    case HT_HIDDEN_SHARD_STATE:
        return open_state(f, caller);
    default:
        return open_param(f, caller);
    }
}

/* ht_grad_part_fn: chunks of the parameter lie in one block. ctx: the map of the shard. */
static bool is_of_shard(const void *ctx, uint64_t off)
{
    const struct ht_shard_map *m = ctx;
    uint64_t block = off / m->block_bytes;
    uint64_t low = 0, high = m->count;

    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (ht_shard_block(m, middle) < block)
            low = middle + 1;
        else
            high = middle;
    }
    return low < m->count && ht_shard_block(m, low) == block;
}

static int open_shard(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    int rc = open_whole(f, caller);

    if (rc)
        return rc;
    rc = ht_hidden_shard_map(f->ctl, f->ino, &f->param, &f->shard);
    if (rc && f->grad)
        ht_grad_release(f->grad);
    if (rc)
        ht_ns_close(f->ctl->ns, ht_hidden_base(f->ino));
    else if (f->grad)
        ht_grad_set_part(f->grad, is_of_shard, f->shard);
    return rc == -ENOENT ? -ESTALE : rc;
}

static int open_session(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    f->session = calloc(1, sizeof(*f->session));
    if (!f->session)
        return -ENOMEM;
    HT_UNSHARED(HT_LOCK_CTL_SESSION);
    if (ht_person_init(&f->session->seat.person, caller)) {
        free(f->session);
        return -ENOMEM;
    }
    f->session->seat.process = caller->process ? caller->process(caller->ctx) : 0;
    ht_mutex_init(&f->session->lock, HT_LOCK_CTL_SESSION);
    return 0;
}

/* stats and roots: they name the models only that the caller could find. */
static int open_stats(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    uint64_t base = ht_hidden_base(f->ino);
    struct ht_ns_tensor t;
    struct ht_person person;
    struct ht_caller known;
    int rc = ht_ns_tensor(f->ctl->ns, base, &t);

    if (rc == 0)
        rc = ht_person_init(&person, caller);
    if (rc)
        return rc;
    known = ht_person_caller(&person);
    if (f->kind == HT_HIDDEN_ROOTS)
        rc = ht_root_feed_open(f->ctl, &known, &f->feed);
    else
        rc = ht_metrics_openmetrics(f->ctl, base == HT_NS_ROOT_INO ? 0 : t.root, &known, &f->text);
    ht_person_free(&person);
    return rc;
}

static int open_redo(struct ht_hidden_file *f)
{
    uint64_t step = ht_hidden_redo_step(f->ctl, f->ino);

    return step ? ht_optim_redo_open(f->ctl->optim, ht_hidden_base(f->ino), step, &f->redo) : -ENOENT;
}

static int open_kind(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    switch (f->kind) {
    case HT_HIDDEN_GRAD:
    case HT_HIDDEN_TOPK:
        return open_grad(f, caller);
    case HT_HIDDEN_STATE:
        return open_state(f, caller);
    case HT_HIDDEN_CTL:
        return open_session(f, caller);
    case HT_HIDDEN_STATS:
    case HT_HIDDEN_ROOTS:
        return open_stats(f, caller);
    case HT_HIDDEN_DEVICES:
        return ht_device_feed_open(f->ctl, &f->feed);
    case HT_HIDDEN_BACKGROUND:
        return ht_background_feed_open(f->ctl, &f->feed);
    case HT_HIDDEN_KEPT:
        return ht_kept_feed_open(f->ctl, ht_hidden_base(f->ino), &f->feed);
    case HT_HIDDEN_EVENTS:
        return ht_event_feed_open(f->ctl, &f->feed);
    case HT_HIDDEN_TRACE:
        return ht_trace_feed_open(f->ctl, &f->feed);
    case HT_HIDDEN_PLAN:
        return ht_plan_feed_open(f->ctl, &f->feed);
    case HT_HIDDEN_REDO:
        return open_redo(f);
    case HT_HIDDEN_GATHER:
        return ht_gather_new(f->ctl, ht_hidden_base(f->ino), f->flags, caller, &f->gather);
    case HT_HIDDEN_SHARD_PARAM:
    case HT_HIDDEN_SHARD_GRAD:
    case HT_HIDDEN_SHARD_STATE:
        return open_shard(f, caller);
    default:
        return -EISDIR;
    }
}

static int access_mask(enum ht_hidden_kind kind, int flags)
{
    if (kind == HT_HIDDEN_CTL)
        return W_OK; /* a user who may steer may read the answers */
    switch (flags & O_ACCMODE) {
    case O_RDONLY:
        return R_OK;
    case O_WRONLY:
        return W_OK;
    default:
        return R_OK | W_OK;
    }
}

/* They name things in directories that not all users may search. */
static int check_feed(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller)
{
    struct stat st;
    int rc = ht_ns_getattr(c->ns, ht_hidden_permission_inode(c, ino), &st);

    if (rc)
        return rc;
    return caller->cred.uid == 0 || caller->cred.uid == st.st_uid ? 0 : -EACCES;
}

/* *out_steered: the model root that the caller may steer through ctl; 0: none. */
static int check_open(struct ht_ctl *c, uint64_t ino, int flags, const struct ht_caller *caller, uint64_t *out_steered)
{
    uint64_t permission_inode = ht_hidden_permission_inode(c, ino);
    enum ht_hidden_kind kind = ht_hidden_kind(ino);
    int rc = ht_ctl_access(c, permission_inode, access_mask(kind, flags), caller);

    if (rc == 0 && (kind == HT_HIDDEN_STATE || is_file_of_shard(kind)) && (flags & O_ACCMODE) != O_RDONLY &&
        ht_ns_is_frozen(c->ns, ht_hidden_base(ino)))
        rc = -EROFS;
    if (rc == 0 && ht_hidden_is_private(kind))
        rc = check_feed(c, ino, caller);
    *out_steered = kind == HT_HIDDEN_CTL && ht_ctl_is_root(c, permission_inode) ? permission_inode : 0;
    if (rc == 0 && *out_steered)
        rc = ht_ctl_may_steer(c, permission_inode, caller);
    return rc;
}

int ht_hidden_open(struct ht_ctl *c, uint64_t ino, int flags, const struct ht_caller *caller,
                   struct ht_hidden_file **out)
{
    struct ht_hidden_file *f;
    uint64_t steered;
    int rc = check_open(c, ino, flags, caller, &steered);

    if (rc)
        return rc;
    f = calloc(1, sizeof(*f));
    if (!f)
        return -ENOMEM;
    f->ctl = c;
    f->ino = ino;
    f->kind = ht_hidden_kind(ino);
    f->flags = flags;
    rc = open_kind(f, caller);
    if (rc) {
        ht_buf_free(&f->text);
        free(f);
        return rc;
    }
    HT_UNSHARED(HT_LOCK_CTL_SESSION);
    if (f->session)
        f->session->seat.checked = steered;
    ht_ctl_link(c, &c->files, &f->link);
    *out = f;
    return 0;
}

void ht_hidden_set_counted(struct ht_hidden_file *f)
{
    f->counted = true;
}

bool ht_hidden_is_counted(const struct ht_hidden_file *f)
{
    return f->counted;
}

bool ht_hidden_open_waits(uint64_t ino)
{
    enum ht_hidden_kind kind = ht_hidden_kind(ino);

    return kind == HT_HIDDEN_GRAD || kind == HT_HIDDEN_TOPK || kind == HT_HIDDEN_SHARD_GRAD;
}

void ht_hidden_close_all(struct ht_ctl *c)
{
    ht_hidden_closedir_all(c);
    while (!ht_list_empty(&c->files))
        ht_hidden_release(ht_list_entry(c->files.next, struct ht_hidden_file, link));
}

/*
 * A client that begins a gradient anew and writes nothing may have copied an empty file. Closing returns no error, as
 * shells close early.
 */
static void report_empty(struct ht_hidden_file *f)
{
    if ((f->flags & O_TRUNC) && (f->flags & O_ACCMODE) == O_WRONLY && (!f->shard || f->shard->bytes) &&
        ht_grad_unused(f->grad))
        ht_last_error_set_below(
            f->ctl, ht_hidden_base(f->ino), "gradient",
            "gradient: was opened and closed without a byte, so there is none; zeros have to be written");
}

void ht_hidden_release(struct ht_hidden_file *f)
{
    ht_ctl_unlink(f->ctl, &f->link);
    if (f->grad) {
        report_empty(f);
        ht_grad_release(f->grad);
    }
    if (f->topk)
        ht_topk_release(f->topk);
    if (f->grad || f->topk || f->kind == HT_HIDDEN_STATE || is_file_of_shard(f->kind))
        ht_ns_close(f->ctl->ns, ht_hidden_base(f->ino));
    ht_shard_map_free(f->ctl, f->shard);
    if (f->session) {
        ht_seat_leave(f->ctl, &f->session->seat);
        ht_person_free(&f->session->seat.person);
        ht_mutex_destroy(&f->session->lock);
        ht_buf_free(&f->session->results);
        free(f->session);
    }
    if (f->feed)
        ht_feed_close(f->feed);
    if (f->redo)
        ht_optim_redo_close(f->redo);
    if (f->gather)
        ht_gather_free(f->gather);
    ht_buf_free(&f->text);
    free(f);
}

/* --------------------------------------------------------------------- ctl */

static const char *errno_name(int error)
{
    const char *name = strerrorname_np(-error);

    return name ? name : "EIO";
}

static void answer(struct session *t, int error, const char *err) HT_REQUIRES(HT_LOCK_CTL_SESSION)
{
    if (t->results.len - t->read > RESULTS_MAX_BYTES) {
        ht_buf_reset(&t->results);
        t->read = 0;
    }
    if (error)
        ht_buf_printf(&t->results, "error: %s: %s\n", errno_name(error), err);
    else
        ht_buf_printf(&t->results, "ok\n");
}

static int run_checked(struct ht_hidden_file *f, uint64_t root, struct ht_command *cmd, char err[HT_CTL_ERROR_MAX])
    HT_REQUIRES(HT_LOCK_CTL_SESSION)
{
    struct session *t = f->session;
    uint64_t dir = ht_hidden_base(f->ino);
    int rc = -E2BIG;

    if (t->line_too_long)
        snprintf(err, HT_CTL_ERROR_MAX, "a command has at most %d bytes", LINE_MAX_BYTES);
    else
        rc = ht_parse_command(t->line, t->line_len, cmd, err);
    if (rc && err[0])
        ht_last_error_set(f->ctl, root ? root : dir, cmd->word, "%s", err);
    else if (rc == 0)
        rc = ht_command_run(f->ctl, dir, root, &t->seat, cmd, err);
    return rc;
}

static int run_line(struct ht_hidden_file *f) HT_REQUIRES(HT_LOCK_CTL_SESSION)
{
    struct session *t = f->session;
    char err[HT_CTL_ERROR_MAX] = "";
    struct ht_command cmd = {.id = HT_COMMAND_NONE, .word = "command"};
    uint64_t dir = ht_hidden_base(f->ino);
    struct ht_ns_tensor tensor = {0};
    int rc = ht_ns_tensor(f->ctl->ns, dir, &tensor);

    if (rc == 0)
        rc = ht_seat_check(f->ctl, dir, tensor.root, &t->seat, err);
    if (rc == 0)
        rc = run_checked(f, tensor.root, &cmd, err);
    if (rc != -EINTR && (rc || cmd.id != HT_COMMAND_NONE))
        answer(t, rc, err[0] ? err : strerror(-rc));
    t->line_len = 0;
    t->line_too_long = false;
    return rc;
}

/*
 * The first command that fails ends the write with its error, so that a shell sees it; the rest is not run. One that
 * was interrupted has done nothing and has no answer: the client may write it again, from
 * where the command before it ended.
 */
static ssize_t write_session(struct ht_hidden_file *f, const char *buf, size_t len)
{
    struct session *t = f->session;
    size_t done = 0;
    int rc = 0;

    ht_mutex_lock(session_lock(t));
    size_t before = t->line_len;
    for (size_t i = 0; i < len && rc == 0; i++) {
        if (buf[i] == '\n' && (rc = run_line(f)) == 0)
            done = i + 1;
        else if (buf[i] == '\n')
            break;
        else if (t->line_len < LINE_MAX_BYTES)
            t->line[t->line_len++] = buf[i];
        else
            t->line_too_long = true;
    }
    if (rc == -EINTR)
        t->line_len = done ? 0 : before;
    ht_mutex_unlock(session_lock(t));
    return rc == -EINTR && done ? (ssize_t)done : rc ? rc : (ssize_t)len;
}

static int flush_session(struct ht_hidden_file *f)
{
    int rc = 0;

    ht_mutex_lock(session_lock(f->session));
    if (f->session->line_len)
        rc = run_line(f);
    ht_mutex_unlock(session_lock(f->session));
    return rc;
}

static ssize_t read_session(struct session *t, void *buf, size_t len)
{
    size_t n;

    ht_mutex_lock(session_lock(t));
    n = ht_min_u64(len, t->results.len - t->read);
    if (n)
        memcpy(buf, t->results.data + t->read, n);
    t->read += n;
    if (t->read == t->results.len) {
        ht_buf_reset(&t->results);
        t->read = 0;
    }
    ht_mutex_unlock(session_lock(t));
    return (ssize_t)n;
}

/* ---------------------------------------------------------------- contents */

static ssize_t read_text(const struct ht_buf *text, uint64_t off, void *buf, size_t len)
{
    size_t n = off < text->len ? ht_min_u64(len, text->len - off) : 0;

    if (n)
        memcpy(buf, text->data + off, n);
    return (ssize_t)n;
}

/* Bytes of the whole file that a shard is a part of. */
static ssize_t read_whole(void *ctx, uint64_t off, void *buf, size_t len)
{
    struct ht_hidden_file *f = ctx;

    switch (f->kind) {
    case HT_HIDDEN_GRAD:
    case HT_HIDDEN_SHARD_GRAD:
        return ht_grad_read(f->grad, off, buf, len);
    case HT_HIDDEN_SHARD_PARAM:
        return ht_shard_param_read(f->ctl, &f->param, off, buf, len);
    default:
        return ht_optim_state_read(f->ctl->optim, &f->param, f->state, off, buf, len);
    }
}

/* buf stays as it is. */
static ssize_t write_whole(void *ctx, uint64_t off, void *buf, size_t len)
{
    struct ht_hidden_file *f = ctx;

    switch (f->kind) {
    case HT_HIDDEN_GRAD:
    case HT_HIDDEN_SHARD_GRAD:
        return ht_grad_write(f->grad, off, buf, len);
    case HT_HIDDEN_SHARD_PARAM:
        return ht_shard_param_write(f->ctl, &f->param, off, buf, len);
    default:
        return ht_optim_state_write(f->ctl->optim, &f->param, f->state, off, buf, len);
    }
}

static ssize_t drop_pages(void *ctx, uint64_t off, void *buf, size_t len)
{
    const struct ht_hidden_file *f = ctx;

    ht_shard_param_drop(f->ctl, &f->param, off, len);
    return (ssize_t)len;
}

void ht_hidden_drop_pages(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    (void)!ht_shard_each(f->shard, off, buf, len, drop_pages, f);
}

static ssize_t wait_updates(void *ctx, uint64_t off, void *buf, size_t len)
{
    const struct ht_hidden_file *f = ctx;

    int rc = ht_ctl_wait_updates(f->ctl, ht_hidden_base(f->ino), off, len);

    return rc ? rc : (ssize_t)len;
}

void ht_hidden_wait_updates(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    (void)!ht_shard_each(f->shard, off, buf, len, wait_updates, f);
}

/* A gradient that is too long makes no step with its first bytes. */
static ssize_t write_shard(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len)
{
    if (!f->shard)
        return write_whole(f, off, (void *)(uintptr_t)buf, len);
    if (off > f->shard->bytes || len > f->shard->bytes - off) {
        ht_last_error_set_below(f->ctl, ht_hidden_base(f->ino), "shard",
                                "shard: %zu bytes at %llu reach beyond its end, at %llu", len, (unsigned long long)off,
                                (unsigned long long)f->shard->bytes);
        if (f->grad)
            ht_grad_refuse(f->grad);
        return -EINVAL;
    }
    return ht_shard_each(f->shard, off, (void *)(uintptr_t)buf, len, write_whole, f);
}

ssize_t ht_hidden_read(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    if (f->shard)
        return ht_shard_each(f->shard, off, buf, len, read_whole, f);
    if (f->feed)
        return ht_feed_read(f->feed, off, buf, len);
    switch (f->kind) {
    case HT_HIDDEN_GRAD:
    case HT_HIDDEN_STATE:
    case HT_HIDDEN_SHARD_STATE:
        return read_whole(f, off, buf, len);
    case HT_HIDDEN_CTL:
        return read_session(f->session, buf, len);
    case HT_HIDDEN_REDO:
        return ht_optim_redo_read(f->redo, off, buf, len);
    case HT_HIDDEN_GATHER:
        return ht_gather_read(f->gather, off, buf, len);
    default:
        return read_text(&f->text, off, buf, len);
    }
}

ssize_t ht_hidden_write(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len)
{
    switch (f->kind) {
    case HT_HIDDEN_GRAD:
    case HT_HIDDEN_STATE:
        return write_whole(f, off, (void *)(uintptr_t)buf, len);
    case HT_HIDDEN_SHARD_PARAM:
    case HT_HIDDEN_SHARD_GRAD:
    case HT_HIDDEN_SHARD_STATE:
        return write_shard(f, off, buf, len);
    case HT_HIDDEN_TOPK:
        return ht_topk_write(f->topk, off, buf, len);
    case HT_HIDDEN_CTL:
        return write_session(f, buf, len);
    case HT_HIDDEN_GATHER:
        return ht_gather_write(f->gather, off, buf, len, true);
    default:
        return -EBADF;
    }
}

/* A client that may map the gradient uses `apply` to hand it over. */
int ht_hidden_set_size(struct ht_hidden_file *f, uint64_t bytes)
{
    bool whole = f->kind == HT_HIDDEN_GRAD;

    return whole && (f->flags & O_ACCMODE) == O_WRONLY ? ht_grad_set_size(f->grad, bytes) : 0;
}

bool ht_hidden_is_dense(const struct ht_hidden_file *f)
{
    return f->kind == HT_HIDDEN_GRAD;
}

bool ht_hidden_tries(const struct ht_hidden_file *f)
{
    return f->kind == HT_HIDDEN_GRAD || f->kind == HT_HIDDEN_GATHER;
}

ssize_t ht_hidden_try_write(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len)
{
    return f->gather ? ht_gather_write(f->gather, off, buf, len, false) : ht_grad_try_write(f->grad, off, buf, len);
}

bool ht_hidden_gathers(uint64_t ino)
{
    return ht_hidden_kind(ino) == HT_HIDDEN_GATHER;
}

int ht_hidden_gather(struct ht_hidden_file *f, const char *lines, size_t len, const struct ht_caller *caller)
{
    return ht_gather_add(f->gather, lines, len, caller);
}

uint64_t ht_hidden_gradient_bytes(const struct ht_hidden_file *f)
{
    return f->kind == HT_HIDDEN_GRAD ? ht_grad_size(f->grad) : 0;
}

uint64_t ht_hidden_param(const struct ht_hidden_file *f)
{
    return ht_hidden_base(f->ino);
}

int ht_hidden_flush(struct ht_hidden_file *f)
{
    if (f->grad)
        return ht_grad_flush(f->grad);
    if (f->kind == HT_HIDDEN_TOPK)
        return ht_topk_flush(f->topk);
    return f->kind == HT_HIDDEN_CTL ? flush_session(f) : 0;
}

/*
 * Gradients are not kept: there is nothing to make durable. State becomes durable with the
 * root's commit and no other way.
 */
int ht_hidden_fsync(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    struct ht_root_stat st;

    if (f->kind == HT_HIDDEN_SHARD_PARAM)
        return ht_ctl_fsync(f->ctl, ht_hidden_base(f->ino), caller);
    if (f->kind != HT_HIDDEN_STATE && f->kind != HT_HIDDEN_SHARD_STATE)
        return 0;
    return ht_optim_root_stat(f->ctl->optim, f->param.root, &st) == 0 && st.open ? -EBUSY : -EINVAL;
}

bool ht_hidden_commands(uint64_t ino)
{
    return ht_hidden_kind(ino) == HT_HIDDEN_CTL;
}

uint64_t ht_hidden_root(struct ht_ctl *c, uint64_t ino)
{
    struct ht_ns_tensor t;

    return ht_ns_tensor(c->ns, ht_hidden_base(ino), &t) ? 0 : t.root;
}

static enum ht_lane_kind gradient_lane(const struct ht_hidden_file *f, enum ht_hidden_op op)
{
    switch (op) {
    case HT_HIDDEN_FLUSH:
        return HT_LANE_GRADIENT;
    case HT_HIDDEN_WRITE:
        return f->kind == HT_HIDDEN_TOPK ? HT_LANE_WRITE : HT_LANE_NONE; /* a sparse one is locked over its flush */
    default:
        return HT_LANE_NONE;
    }
}

enum ht_lane_kind ht_hidden_lane(const struct ht_hidden_file *f, enum ht_hidden_op op, const void *buf, size_t len)
{
    switch (f->kind) {
    case HT_HIDDEN_GRAD:
    case HT_HIDDEN_TOPK:
        return gradient_lane(f, op);
    case HT_HIDDEN_STATE:
    case HT_HIDDEN_SHARD_STATE:
        return op == HT_HIDDEN_WRITE ? HT_LANE_TURN : op == HT_HIDDEN_READ ? HT_LANE_GRADIENT : HT_LANE_NONE;
    case HT_HIDDEN_SHARD_GRAD:
        return op == HT_HIDDEN_WRITE ? HT_LANE_WRITE : op == HT_HIDDEN_FLUSH ? HT_LANE_GRADIENT : HT_LANE_NONE;
    case HT_HIDDEN_SHARD_PARAM:
        return op == HT_HIDDEN_WRITE ? HT_LANE_PAGES : op == HT_HIDDEN_READ ? HT_LANE_GRADIENT : HT_LANE_NONE;
    case HT_HIDDEN_GATHER:
        return op == HT_HIDDEN_READ ? HT_LANE_GRADIENT : HT_LANE_NONE;
    case HT_HIDDEN_CTL:
        return op == HT_HIDDEN_WRITE && ht_parse_takes_turn(buf, len) ? HT_LANE_TURN : HT_LANE_CTL_SESSION;
    default:
        return HT_LANE_NONE;
    }
}

enum ht_traffic_kind ht_hidden_traffic(const struct ht_hidden_file *f)
{
    switch (f->kind) {
    case HT_HIDDEN_GRAD:
    case HT_HIDDEN_TOPK:
    case HT_HIDDEN_SHARD_GRAD:
    case HT_HIDDEN_GATHER:
        return HT_TRAFFIC_GRAD;
    case HT_HIDDEN_STATE:
    case HT_HIDDEN_SHARD_STATE:
        return HT_TRAFFIC_STATE;
    case HT_HIDDEN_SHARD_PARAM:
        return HT_TRAFFIC_PARAM;
    default:
        return HT_TRAFFIC_OTHER;
    }
}

enum ht_traffic_kind ht_hidden_read_traffic(const struct ht_hidden_file *f)
{
    return f->gather ? HT_TRAFFIC_PARAM : ht_hidden_traffic(f);
}
