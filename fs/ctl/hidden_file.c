/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hidden_file.c - open files of the hidden tree: gradients, states, shards, ctl, stats, feeds and logged steps.
 *
 * ctl is a session per open file: lines written are commands, lines read are their results in order,
 * whatever the offsets. Its mutex serialises the session of threads that share the descriptor; it is held over a
 * command, which is why such calls WAIT.
 */
#include "fs/ctl/hidden_priv.h"

#include <limits.h>
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
    const struct contents *row;
    int flags; /* of the open */
    struct ht_hidden_about about;
    _Atomic bool background;    /* HT_IOCTL_BACKGROUND */
    struct ht_param_desc param; /* with row->of_param */
    struct ht_shard_map *shard; /* of shards; NULL: the whole */

    /* What its row's open makes, and the release ends. */
    struct ht_grad *grad;
    struct ht_topk *topk;
    const char *state; /* name */
    struct ht_obj_reader reader;
    struct session *session;
    struct ht_buf text;
    struct ht_feed *feed;
    struct ht_optim_redo *redo;
    struct ht_delta_file *delta;
    struct ht_gather *gather;
};

/* What the files of a kind do. An absent function has nothing to do. */
struct contents {
    int (*open)(struct ht_hidden_file *f, const struct ht_caller *caller);
    void (*close)(struct ht_hidden_file *f);
    ssize_t (*read)(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len);
    ssize_t (*write)(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len,
                     bool waits); /* NULL: -EBADF */
    int (*flush)(struct ht_hidden_file *f);
    int (*fsync)(struct ht_hidden_file *f, const struct ht_caller *caller);
    ht_feed_opener *feed; /* with nothing of these: the lines of a feed, */
    ht_feed_next *lines;  /* or those of one that needs no opener */
    enum ht_lane_kind lane[HT_HIDDEN_OPS];
    enum ht_traffic_kind traffic;
    bool of_param; /* its parameter is described, and stays open as long as the file */
    bool frozen;   /* of a kept step it is for reading only */
};

/* -------------------------------------------------------------- parameters */

static int describe_param(struct ht_hidden_file *f, const struct ht_caller *caller)
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

static int may_have_gradient(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    uint64_t base = ht_hidden_base(f->ino);
    char text[HT_CTL_ERROR_MAX + 16] = "gradient: ", *why = text + strlen(text);
    int rc = ht_ctl_need_whole(f->ctl, f->param.root, true, why);

    rc = rc ? rc : ht_shape_check(f->ctl, base, why);
    if (rc == 0)
        return 0;
    ht_last_error_set_for(f->ctl, base, caller, "gradient", text);
    return rc;
}

static int open_grad(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    return ht_grad_open(f->ctl->optim, &f->param, &f->grad);
}

static void close_grad(struct ht_hidden_file *f)
{
    /*
     * A client that begins a gradient anew and writes nothing may have copied an empty file. Closing returns no error,
     * as shells close early.
     */
    if ((f->flags & O_TRUNC) && (f->flags & O_ACCMODE) == O_WRONLY && (!f->shard || f->shard->bytes) &&
        ht_grad_unused(f->grad))
        ht_last_error_set_below(
            f->ctl, ht_hidden_base(f->ino), "gradient",
            "gradient: was opened and closed without a byte, so there is none; zeros have to be written");
    ht_grad_release(f->grad);
}

static ssize_t read_grad(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    return ht_grad_read(f->grad, off, buf, len);
}

static ssize_t write_grad(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len, bool waits)
{
    return waits ? ht_grad_write(f->grad, off, buf, len) : ht_grad_try_write(f->grad, off, buf, len);
}

static int flush_grad(struct ht_hidden_file *f)
{
    return ht_grad_flush(f->grad);
}

static int open_topk(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    return ht_topk_open(f->ctl->optim, &f->param, &f->topk);
}

static ssize_t write_topk(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len, bool waits)
{
    return ht_topk_write(f->topk, off, buf, len);
}

static int flush_topk(struct ht_hidden_file *f)
{
    return ht_topk_flush(f->topk);
}

static ssize_t read_update(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    return ht_optim_update_read(f->ctl->optim, &f->param, off, buf, len);
}

static ssize_t write_ortho(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len, bool waits)
{
    return ht_optim_ortho_write(f->ctl->optim, &f->param, off, buf, len);
}

static int open_state(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    return ht_optim_state_name(f->ctl->optim, &f->param, ht_hidden_index(f->ino), &f->state);
}

static ssize_t read_state(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    return ht_optim_state_read_for(f->ctl->optim, &f->param, f->state, f->background ? NULL : &f->reader, off, buf,
                                   len);
}

static ssize_t write_state(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len, bool waits)
{
    return ht_optim_state_write(f->ctl->optim, &f->param, f->state, off, buf, len);
}

/* State becomes durable with the root's commit and no other way. */
static int fsync_state(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    struct ht_root_stat st;

    return ht_optim_root_stat(f->ctl->optim, f->param.root, &st) == 0 && st.open ? -EBUSY : -EINVAL;
}

static ssize_t read_param(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    return ht_ctl_param_read(f->ctl, f->param.obj, off, buf, len);
}

static ssize_t write_param(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len, bool waits)
{
    return ht_ctl_param_write(f->ctl, f->param.obj, off, buf, len);
}

static int fsync_param(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    return ht_ctl_fsync(f->ctl, ht_hidden_base(f->ino), caller);
}

/* ------------------------------------------------------------------ shards */

/* ht_grad_part_fn: chunks of the parameter lie in one block. ctx: the map of the shard. */
static bool is_of_shard(const void *ctx, uint64_t off)
{
    const struct ht_shard_map *m = ctx;
    uint64_t block = off / m->block_bytes;
    uint64_t at = 0;

    HT_PARTITION_POINT(at, m->count, i, ht_shard_block(m, i) < block);
    return at < m->count && ht_shard_block(m, at) == block;
}

/* After the whole that it is a part of, which ends if it fails. */
static int open_shard(struct ht_hidden_file *f)
{
    int rc = ht_hidden_shard_map(f->ctl, f->ino, &f->param, &f->shard);

    if (rc && f->grad) /* not by its close, which would report a client that wrote nothing */
        ht_grad_release(f->grad);
    else if (f->grad)
        ht_grad_set_part(f->grad, is_of_shard, f->shard);
    return rc == -ENOENT ? -ESTALE : rc;
}

static ssize_t read_piece(void *ctx, uint64_t off, void *buf, size_t len)
{
    struct ht_hidden_file *f = ctx;

    return f->row->read(f, off, buf, len);
}

/* buf stays as it is. */
static ssize_t write_piece(void *ctx, uint64_t off, void *buf, size_t len)
{
    struct ht_hidden_file *f = ctx;

    return f->row->write(f, off, buf, len, true);
}

static ssize_t drop_pages(void *ctx, uint64_t off, void *buf, size_t len)
{
    const struct ht_hidden_file *f = ctx;

    ht_ctl_drop_data(f->ctl, ht_hidden_base(f->ino), off, len);
    return (ssize_t)len;
}

void ht_hidden_drop_pages(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len)
{
    (void)!ht_shard_each(f->shard, off, (void *)(uintptr_t)buf, len, drop_pages, f);
}

static ssize_t wait_updates(void *ctx, uint64_t off, void *buf, size_t len)
{
    const struct ht_hidden_file *f = ctx;

    int rc = ht_ctl_wait_updates(f->ctl, ht_hidden_base(f->ino), off, len);

    return rc ? rc : (ssize_t)len;
}

void ht_hidden_wait_updates(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len)
{
    (void)!ht_shard_each(f->shard, off, (void *)(uintptr_t)buf, len, wait_updates, f);
}

/* -------------------------------------------------------- texts and numbers */

/* Its lines name models only that the caller could find. */
static int open_stats(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    uint64_t base = ht_hidden_base(f->ino);
    struct ht_ns_tensor t;
    int rc = ht_ns_tensor(f->ctl->ns, base, &t);

    return rc ? rc : ht_metrics_openmetrics(f->ctl, base == HT_NS_ROOT_INO ? 0 : t.root, caller, &f->text);
}

static ssize_t read_stats(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    size_t n = off < f->text.len ? ht_min_u64(len, f->text.len - off) : 0;

    if (n)
        memcpy(buf, f->text.data + off, n);
    return (ssize_t)n;
}

static int open_redo(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    uint64_t step = ht_hidden_step(f->ctl, f->ino);

    return step ? ht_optim_redo_open(f->ctl->optim, ht_hidden_base(f->ino), step, &f->redo) : -ENOENT;
}

static ssize_t read_redo(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    return ht_optim_redo_read(f->redo, off, buf, len);
}

/* No mode keeps root from opening it for writing. */
static int open_delta(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    uint64_t step = ht_hidden_step(f->ctl, f->ino);

    if ((f->flags & O_ACCMODE) != O_RDONLY)
        return -EACCES;
    return step ? ht_delta_open(f->ctl, ht_hidden_base(f->ino), step, caller, &f->delta) : -ENOENT;
}

static ssize_t read_delta(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    return ht_delta_read(f->delta, off, buf, len);
}

static int open_gather(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    return ht_gather_new(f->ctl, ht_hidden_base(f->ino), f->flags, caller, &f->gather);
}

static ssize_t read_gather(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    return ht_gather_read(f->gather, off, buf, len);
}

static ssize_t write_gather(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len, bool waits)
{
    return ht_gather_write(f->gather, off, buf, len, waits);
}

/* --------------------------------------------------------------------- ctl */

static int open_session(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    uint64_t dir = ht_hidden_permission_inode(f->ctl, f->ino);
    bool steers = ht_ctl_is_root(f->ctl, dir);
    int rc = steers ? ht_ctl_may_steer(f->ctl, dir, caller) : 0;

    if (rc)
        return rc;
    f->session = calloc(1, sizeof(*f->session));
    if (!f->session)
        return -ENOMEM;
    HT_UNSHARED(HT_LOCK_CTL_SESSION);
    if (ht_person_init(&f->session->seat.person, caller)) {
        free(f->session);
        return -ENOMEM;
    }
    f->session->seat.process = caller->process ? caller->process(caller->ctx) : 0;
    f->session->seat.checked = steers ? dir : 0;
    ht_mutex_init(&f->session->lock, HT_LOCK_CTL_SESSION);
    return 0;
}

static void close_session(struct ht_hidden_file *f)
{
    HT_UNSHARED(HT_LOCK_CTL_SESSION);
    ht_seat_leave(f->ctl, &f->session->seat);
    ht_person_free(&f->session->seat.person);
    ht_mutex_destroy(&f->session->lock);
    ht_buf_free(&f->session->results);
    free(f->session);
}

static void put_answer(struct session *t, int error, const char *err) HT_REQUIRES(HT_LOCK_CTL_SESSION)
{
    const char *name = strerrorname_np(-error);

    if (t->results.len - t->read > RESULTS_MAX_BYTES) {
        ht_buf_reset(&t->results);
        t->read = 0;
    }
    if (error)
        ht_buf_printf(&t->results, "error: %s: %s\n", name ? name : "EIO", err);
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
        put_answer(t, rc, err[0] ? err : strerror(-rc));
    t->line_len = 0;
    t->line_too_long = false;
    return rc;
}

/*
 * The first command that fails ends the write with its error, so that a shell sees it; the rest is not run. One that
 * was interrupted has done nothing and has no answer: the client may write it again, from
 * where the command before it ended.
 */
static ssize_t write_session(struct ht_hidden_file *f, uint64_t off, const void *bytes, size_t len, bool waits)
{
    struct session *t = f->session;
    const char *buf = bytes;
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

static ssize_t read_session(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    struct session *t = f->session;

    ht_mutex_lock(session_lock(t));
    size_t n = ht_min_u64(len, t->results.len - t->read);
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

/* -------------------------------------------------------------------- kinds */

#define LANES(of_read, of_write, of_flush) .lane = {HT_LANE_##of_read, HT_LANE_##of_write, HT_LANE_##of_flush}
#define NO_LANES LANES(NONE, NONE, NONE), .traffic = HT_TRAFFIC_OTHER
#define OF_GRAD .traffic = HT_TRAFFIC_GRAD, .of_param = true
#define OF_STATE                                                                                  \
    open_state, NULL, read_state, write_state, .fsync = fsync_state, LANES(GRADIENT, TURN, NONE), \
                                               .traffic = HT_TRAFFIC_STATE, .of_param = true, .frozen = true

/* In no lane a write of a gradient is told not to wait. A sparse one is locked over its flush. */
static const struct contents contents[HT_HIDDEN_KINDS] = {
    [HT_HIDDEN_GRAD] = {open_grad, close_grad, read_grad, write_grad, flush_grad, LANES(NONE, NONE, GRADIENT), OF_GRAD},
    [HT_HIDDEN_SHARD_GRAD] = {open_grad, close_grad, read_grad, write_grad, flush_grad, LANES(NONE, WRITE, GRADIENT),
                              OF_GRAD, .frozen = true},
    [HT_HIDDEN_TOPK] = {open_topk, NULL, NULL, write_topk, flush_topk, LANES(NONE, WRITE, GRADIENT), OF_GRAD},
    [HT_HIDDEN_UPDATE] = {.read = read_update, LANES(GRADIENT, NONE, NONE), OF_GRAD},
    [HT_HIDDEN_ORTHO] = {.write = write_ortho, LANES(NONE, WRITE, NONE), OF_GRAD},
    [HT_HIDDEN_STATE] = {OF_STATE},
    [HT_HIDDEN_SHARD_STATE] = {OF_STATE},
    [HT_HIDDEN_SHARD_PARAM] = {NULL, NULL, read_param, write_param, .fsync = fsync_param, LANES(GRADIENT, PAGES, NONE),
                               .traffic = HT_TRAFFIC_PARAM, .of_param = true, .frozen = true},
    [HT_HIDDEN_GATHER] = {open_gather, NULL, read_gather, write_gather, LANES(GRADIENT, NONE, NONE),
                          .traffic = HT_TRAFFIC_GRAD},
    [HT_HIDDEN_CTL] = {open_session, close_session, read_session, write_session, flush_session,
                       LANES(CTL_SESSION, CTL_SESSION, CTL_SESSION), .traffic = HT_TRAFFIC_OTHER},
    [HT_HIDDEN_STATS] = {open_stats, NULL, read_stats, NO_LANES},
    [HT_HIDDEN_DELTA] = {open_delta, NULL, read_delta, NO_LANES},
    [HT_HIDDEN_REDO] = {open_redo, NULL, read_redo, NO_LANES},
    [HT_HIDDEN_BACKGROUND] = {.lines = ht_background_lines, NO_LANES},
    [HT_HIDDEN_DEVICES] = {.lines = ht_device_lines, NO_LANES},
    [HT_HIDDEN_EVENTS] = {.feed = ht_event_feed_open, NO_LANES},
    [HT_HIDDEN_KEPT] = {.feed = ht_kept_feed_open, NO_LANES},
    [HT_HIDDEN_PLAN] = {.feed = ht_plan_feed_open, NO_LANES},
    [HT_HIDDEN_ROOTS] = {.feed = ht_root_feed_open, NO_LANES},
    [HT_HIDDEN_TRACE] = {.feed = ht_trace_feed_open, NO_LANES},
};

/* -------------------------------------------------------------------- files */

static int access_mask(uint64_t ino, int flags)
{
    static const int masks[O_ACCMODE + 1] = {
        [O_RDONLY] = R_OK, [O_WRONLY] = W_OK, [O_RDWR] = R_OK | W_OK, [O_ACCMODE] = R_OK | W_OK};

    return ht_hidden_commands(ino) ? W_OK : masks[flags & O_ACCMODE]; /* who may steer may read the answers */
}

static int check_open(struct ht_ctl *c, uint64_t ino, int flags, const struct ht_caller *caller)
{
    uint64_t ruling = ht_hidden_permission_inode(c, ino);
    int rc = ht_ctl_access(c, ruling, access_mask(ino, flags), caller);

    if (rc)
        return rc;
    if (contents[ht_hidden_kind(ino)].frozen && (flags & O_ACCMODE) != O_RDONLY &&
        ht_ns_is_frozen(c->ns, ht_hidden_base(ino)))
        return -EROFS;
    rc = ht_hidden_is_private(ino) ? ht_ctl_owner(c, ruling, caller) : 0;
    return rc == -EPERM ? -EACCES : rc;
}

static int open_of_param(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    int rc = describe_param(f, caller);

    if (rc)
        return rc;
    rc = f->row->traffic == HT_TRAFFIC_GRAD ? may_have_gradient(f, caller) : 0;
    if (rc == 0 && f->row->open)
        rc = f->row->open(f, caller);
    if (rc == 0 && ht_hidden_is_shard(ht_hidden_kind(f->ino)))
        rc = open_shard(f);
    if (rc)
        ht_ns_close(f->ctl->ns, ht_hidden_base(f->ino));
    return rc;
}

static int open_kind(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    if (f->row->feed)
        return f->row->feed(f->ctl, ht_hidden_base(f->ino), caller, &f->feed);
    if (f->row->lines)
        return ht_feed_open(f->row->lines, NULL, f->ctl, &f->feed);
    if (f->row->of_param)
        return open_of_param(f, caller);
    return f->row->open ? f->row->open(f, caller) : -EISDIR;
}

static void free_file(struct ht_hidden_file *f)
{
    ht_buf_free(&f->text);
    free(f);
}

int ht_hidden_open(struct ht_ctl *c, uint64_t ino, int flags, const struct ht_caller *caller,
                   struct ht_hidden_file **out)
{
    struct ht_hidden_file *f;
    int rc = check_open(c, ino, flags, caller);

    if (rc)
        return rc;
    f = calloc(1, sizeof(*f));
    if (!f)
        return -ENOMEM;
    f->ctl = c;
    f->ino = ino;
    f->row = &contents[ht_hidden_kind(ino)];
    f->flags = flags;
    rc = open_kind(f, caller);
    if (rc) {
        free_file(f);
        return rc;
    }
    f->about = (struct ht_hidden_about){.reads = f->gather ? HT_TRAFFIC_PARAM : f->row->traffic,
                                        .writes = f->row->traffic,
                                        .param = ht_hidden_base(ino),
                                        .gradient_bytes = ht_hidden_is_gradient(ino) ? ht_grad_size(f->grad) : 0,
                                        .traced = f->gather};
    ht_ctl_link(c, &c->files, &f->link);
    *out = f;
    return 0;
}

void ht_hidden_release(struct ht_hidden_file *f)
{
    ht_ctl_unlink(f->ctl, &f->link);
    if (f->row->close)
        f->row->close(f);
    ht_obj_reader_end(&f->reader);
    if (f->topk)
        ht_topk_release(f->topk);
    if (f->row->of_param)
        ht_ns_close(f->ctl->ns, ht_hidden_base(f->ino));
    if (f->feed)
        ht_feed_close(f->feed);
    if (f->gather)
        ht_gather_free(f->gather);
    if (f->delta)
        ht_delta_close(f->delta);
    if (f->redo)
        ht_optim_redo_close(f->redo);
    ht_shard_map_free(f->ctl, f->shard);
    free_file(f);
}

void ht_hidden_close_all(struct ht_ctl *c)
{
    ht_hidden_closedir_all(c);
    while (!ht_list_empty(&c->files))
        ht_hidden_release(ht_list_entry(c->files.next, struct ht_hidden_file, link));
}

struct ht_hidden_about *ht_hidden_about(struct ht_hidden_file *f)
{
    return &f->about;
}

int ht_hidden_set_background(struct ht_hidden_file *f)
{
    if (ht_hidden_kind(f->ino) != HT_HIDDEN_STATE || !ht_ns_is_frozen(f->ctl->ns, ht_hidden_base(f->ino)))
        return -EINVAL;
    f->background = true;
    return 0;
}

bool ht_hidden_open_waits(uint64_t ino)
{
    const struct contents *row = &contents[ht_hidden_kind(ino)];

    return row->of_param && row->traffic == HT_TRAFFIC_GRAD;
}

/* ---------------------------------------------------------------- contents */

ssize_t ht_hidden_read(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len)
{
    if (f->shard)
        return ht_shard_each(f->shard, off, buf, len, read_piece, f);
    if (f->feed)
        return ht_feed_read(f->feed, off, buf, len);
    return f->row->read ? f->row->read(f, off, buf, len) : 0;
}

/* A gradient that is too long makes no step with its first bytes. */
static int check_in_shard(struct ht_hidden_file *f, uint64_t off, size_t len)
{
    if (off <= f->shard->bytes && len <= f->shard->bytes - off)
        return 0;
    ht_last_error_set_below(f->ctl, ht_hidden_base(f->ino), "shard",
                            "shard: %zu bytes at %llu reach beyond its end, at %llu", len, (unsigned long long)off,
                            (unsigned long long)f->shard->bytes);
    if (f->grad)
        ht_grad_refuse(f->grad);
    return -EINVAL;
}

ssize_t ht_hidden_write(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len, bool waits)
{
    int rc = f->shard ? check_in_shard(f, off, len) : 0;

    if (rc)
        return rc;
    if (f->shard)
        return ht_shard_each(f->shard, off, (void *)(uintptr_t)buf, len, write_piece, f);
    return f->row->write ? f->row->write(f, off, buf, len, waits) : -EBADF;
}

int ht_hidden_flush(struct ht_hidden_file *f)
{
    return f->row->flush ? f->row->flush(f) : 0;
}

/* Gradients are not kept: there is nothing to make durable. */
int ht_hidden_fsync(struct ht_hidden_file *f, const struct ht_caller *caller)
{
    return f->row->fsync ? f->row->fsync(f, caller) : 0;
}

/* A client that may map the gradient uses `apply` to hand it over. */
int ht_hidden_set_size(struct ht_hidden_file *f, uint64_t bytes)
{
    bool sets = ht_hidden_is_gradient(f->ino) && (f->flags & O_ACCMODE) == O_WRONLY;

    return sets ? ht_grad_set_size(f->grad, bytes) : 0;
}

bool ht_hidden_gathers(uint64_t ino)
{
    return ht_hidden_kind(ino) == HT_HIDDEN_GATHER;
}

int ht_hidden_gather(struct ht_hidden_file *f, const char *lines, size_t len, const struct ht_caller *caller)
{
    return ht_gather_add(f->gather, lines, len, caller);
}

bool ht_hidden_commands(uint64_t ino)
{
    return ht_hidden_kind(ino) == HT_HIDDEN_CTL;
}

uint64_t ht_hidden_root(struct ht_ctl *c, uint64_t ino)
{
    return ht_ctl_root_of(c, ht_hidden_base(ino));
}

enum ht_lane_kind ht_hidden_lane(const struct ht_hidden_file *f, enum ht_hidden_op op, const void *buf, size_t len)
{
    bool turn = f->session && op == HT_HIDDEN_WRITE && ht_parse_takes_turn(buf, len);

    if (op == HT_HIDDEN_READ && f->background)
        return HT_LANE_PAUSES;
    return turn ? HT_LANE_TURN : f->row->lane[op];
}
