/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gather.c - many parameters of a model as one file: their values one after the other to read, their gradients one
 * after the other to write.
 *
 * The members are those that HT_IOCTL_GATHER has named so far, in that order. They are of one open file, and stay its
 * members as they were named: a member whose file is gone, or has another size, is ESTALE. Written gradients join the
 * step by `apply`, and nothing else; those that wait for it when the file is closed are dropped. Bytes of other writers
 * stay.
 *
 * The members of all open files have a limit, and so has the memory for bytes that wait for `apply`. Of both a
 * user has a part (tiering/base/quota.h), so no user takes all. A file counts for the user that opened it.
 *
 * One lock for each open file, while members join it; it is held over no wait. Reads and writes take no lock here.
 */
#include "fs/ctl/hidden_priv.h"

#include <unistd.h>

enum { BLOCK_MEMBERS = 256, BLOCKS_MAX = HT_GATHER_MEMBERS_MAX / BLOCK_MEMBERS };
enum side { VALUES, GRADIENTS, SIDES };

struct member {
    uint64_t ino, bytes[SIDES], end[SIDES]; /* end: its place in the file */
    struct ht_obj *obj;                     /* open until ht_ns_close(ino) */
    struct ht_grad *grad;                   /* NULL: the file is open for reading only */
};

/* What one user has: files that are open, members of all these, and memory of their accounts. */
struct ht_gather_user {
    struct ht_list link; /* in ctl.gathers.users */
    uint32_t group;      /* ht_quota_group */
    HT_GUARDED_BY(HT_LOCK_CTL) struct {
        uint32_t files;
        struct ht_quota_user members;
    };
    struct ht_quota_user account; /* the optimizer's lock guards its count */
};

struct ht_gather {
    struct ht_ctl *ctl;
    uint64_t root;
    struct ht_gather_user *user;
    bool reads, writes;
    struct member *block[BLOCKS_MAX]; /* written before count says so, and then constant */
    _Atomic uint32_t count;
    struct ht_mutex lock; /* over the growth of count */
};

HT_MUTEX_OF(gather_lock, struct ht_gather, lock, HT_LOCK_CTL_SESSION)

/* ------------------------------------------------------------------- users */

/* NULL: there is none yet. */
static struct ht_gather_user *find_user(struct ht_ctl *c, uint32_t group, enum ht_quota_kind kind)
    HT_REQUIRES(HT_LOCK_CTL)
{
    ht_list_for_each_entry(u, &c->gathers.users, struct ht_gather_user, link)
        if (u->group == group && u->members.kind == kind)
            return u;
    return NULL;
}

static enum ht_quota_kind kind_of(struct ht_ctl *c, const struct ht_caller *caller)
{
    if (!caller->cred.uid)
        return HT_QUOTA_ROOT;
    return ht_ctl_owner(c, HT_NS_ROOT_INO, caller) ? HT_QUOTA_OTHERS : HT_QUOTA_OWNER;
}

/* One more open file of this user. NULL: no memory. */
static struct ht_gather_user *enter_user(struct ht_ctl *c, const struct ht_caller *caller)
{
    struct ht_gather_user *fresh = calloc(1, sizeof(*fresh)), *u;
    uint32_t group = ht_quota_group(caller->cred.uid);
    enum ht_quota_kind kind = kind_of(c, caller);

    ht_mutex_lock(ht_ctl_lock(c));
    u = find_user(c, group, kind);
    if (!u && fresh) {
        u = fresh;
        fresh = NULL;
        u->group = group;
        u->members.kind = u->account.kind = kind;
        ht_list_add_tail(&c->gathers.users, &u->link);
    }
    if (u)
        u->files++;
    ht_mutex_unlock(ht_ctl_lock(c));
    free(fresh);
    return u;
}

static void leave_user(struct ht_ctl *c, struct ht_gather_user *u)
{
    ht_mutex_lock(ht_ctl_lock(c));
    bool last = --u->files == 0;
    if (last)
        ht_list_del(&u->link);
    ht_mutex_unlock(ht_ctl_lock(c));
    if (last)
        free(u);
}

/*
 * A member costs a client nothing and the daemon some memory, so all together have a limit. -ENOMEM: so many are not
 * left. -EDQUOT: not for this user.
 */
static int take_members(struct ht_gather *g, uint32_t count)
{
    struct ht_ctl *c = g->ctl;
    int rc = 0;

    ht_mutex_lock(ht_ctl_lock(c));
    struct ht_quota *q = &c->gathers.members;
    if (count > q->max - ht_quota_taken(q))
        rc = -ENOMEM;
    else if (count > ht_quota_room(q, &g->user->members))
        rc = -EDQUOT;
    else
        ht_quota_set(q, &g->user->members, g->user->members.taken + count);
    ht_mutex_unlock(ht_ctl_lock(c));
    return rc;
}

static void give_members(struct ht_gather *g, uint32_t count)
{
    ht_mutex_lock(ht_ctl_lock(g->ctl));
    ht_quota_set(&g->ctl->gathers.members, &g->user->members, g->user->members.taken - count);
    ht_mutex_unlock(ht_ctl_lock(g->ctl));
}

/* -------------------------------------------------------------------- life */

int ht_gather_new(struct ht_ctl *c, uint64_t root, int flags, const struct ht_caller *caller, struct ht_gather **out)
{
    struct ht_gather *g = calloc(1, sizeof(*g));
    int mode = flags & O_ACCMODE;

    if (g)
        g->user = enter_user(c, caller);
    if (!g || !g->user) {
        free(g);
        return -ENOMEM;
    }
    g->ctl = c;
    g->root = root;
    g->reads = mode != O_WRONLY;
    g->writes = mode != O_RDONLY;
    ht_mutex_init(&g->lock, HT_LOCK_CTL_SESSION);
    *out = g;
    return 0;
}

static struct member *member_at(struct ht_gather *g, uint32_t i)
{
    return &g->block[i / BLOCK_MEMBERS][i % BLOCK_MEMBERS];
}

static void close_member(struct ht_gather *g, struct member *m)
{
    if (m->grad) {
        ht_grad_discard(m->grad);
        ht_grad_release(m->grad);
    }
    ht_ns_close(g->ctl->ns, m->ino);
}

void ht_gather_free(struct ht_gather *g)
{
    for (uint32_t i = 0; i < g->count; i++)
        close_member(g, member_at(g, i));
    give_members(g, g->count);
    leave_user(g->ctl, g->user);
    for (uint32_t b = 0; b < BLOCKS_MAX; b++)
        free(g->block[b]);
    ht_mutex_destroy(&g->lock);
    free(g);
}

/* ----------------------------------------------------------------- members */

static int open_described(struct ht_gather *g, const struct ht_param_desc *d, struct member *m,
                          char why[HT_CTL_ERROR_MAX])
{
    const struct ht_dtype_word *p = ht_dtype_row(d->dtype), *of_grad = ht_dtype_row(d->grad_dtype);

    if (d->root != g->root || !p || !of_grad || (g->writes && ht_shape_check(g->ctl, m->ino, why)))
        return -EINVAL;
    m->obj = d->obj;
    m->bytes[VALUES] = ht_obj_size(d->obj);
    m->bytes[GRADIENTS] = m->bytes[VALUES] / p->bytes * of_grad->bytes;
    int rc = g->writes ? ht_ctl_need_whole(g->ctl, g->root, true, why) : 0;
    if (rc || !g->writes)
        return rc;
    rc = ht_grad_open(g->ctl->optim, d, &m->grad);
    if (!rc)
        ht_grad_keep_account(m->grad, &g->user->account); /* a close drops nothing of other writers */
    return rc;
}

static int open_member(struct ht_gather *g, uint64_t ino, uint64_t bytes, const struct ht_caller *caller,
                       struct member *m, char why[HT_CTL_ERROR_MAX])
{
    int mask = (g->reads ? R_OK : 0) | (g->writes ? W_OK : 0);
    int rc = ht_ctl_access(g->ctl, ino, mask, caller);
    struct ht_param_desc d;

    if (rc == 0)
        rc = ht_ctl_describe(g->ctl, ino, &d);
    if (rc)
        return rc;
    *m = (struct member){.ino = ino};
    rc = ht_obj_size(d.obj) == bytes ? open_described(g, &d, m, why) : -ESTALE;
    if (rc)
        ht_ns_close(g->ctl->ns, ino);
    return rc;
}

static int open_line(struct ht_gather *g, const char *line, size_t len, const struct ht_caller *caller,
                     struct member *m, char why[HT_CTL_ERROR_MAX])
{
    const char *space = memchr(line, ' ', len);
    uint64_t bytes = 0, ino;
    int rc = space ? ht_parse_u64(line, (size_t)(space - line), &bytes) : -EINVAL;

    if (rc == 0)
        rc = ht_ctl_resolve(g->ctl, g->root, space + 1, len - (size_t)(space + 1 - line), caller, &ino);
    if (rc)
        return rc;
    rc = open_member(g, ino, bytes, caller, m, why);
    ht_ns_forget(g->ctl->ns, ino, 1);
    return rc;
}

/* why: the reason, if it is known; else empty. */
static void report_line(struct ht_gather *g, const char *line, size_t len, int error, const char *why)
{
    ht_last_error_set(g->ctl, g->root, "gather", "gather: '%.*s': %s", (int)ht_min_u64(len, 120), line,
                      why[0]                 ? why
                          : error == -EINVAL ? "names no parameter of this model"
                          : error == -ESTALE ? "the file has another size"
                                             : strerror(-error));
}

static const char *end_of_line(const char *at, const char *end)
{
    const char *newline = memchr(at, '\n', (size_t)(end - at));

    return newline ? newline : end;
}

/* Opens what the lines name. After an error none is open. */
static int open_lines(struct ht_gather *g, const char *at, const char *end, const struct ht_caller *caller,
                      struct member *out)
{
    uint32_t opened = 0;

    while (at < end) {
        const char *next = end_of_line(at, end);
        char why[HT_CTL_ERROR_MAX] = "";
        int rc = open_line(g, at, (size_t)(next - at), caller, &out[opened], why);
        if (rc) {
            while (opened)
                close_member(g, &out[--opened]);
            if (rc != -EINTR)
                report_line(g, at, (size_t)(next - at), rc, why);
            return rc;
        }
        opened++;
        at = next + 1;
    }
    return 0;
}

/* Room for the members from first on; what is left of a failed call is used by the next. */
static int make_blocks(struct ht_gather *g, uint32_t first, uint32_t end) HT_REQUIRES(HT_LOCK_CTL_SESSION)
{
    if (end > HT_GATHER_MEMBERS_MAX)
        return -E2BIG;
    for (uint32_t b = first / BLOCK_MEMBERS; b < ht_div_up(end, BLOCK_MEMBERS); b++) {
        if (!g->block[b])
            g->block[b] = calloc(BLOCK_MEMBERS, sizeof(struct member));
        if (!g->block[b])
            return -ENOMEM;
    }
    return 0;
}

/* They follow those that are there. */
static int append_members(struct ht_gather *g, const struct member *fresh, uint32_t count)
{
    ht_mutex_lock(gather_lock(g));
    uint32_t before = g->count;
    int rc = make_blocks(g, before, before + count);
    for (uint32_t i = 0; i < count && !rc; i++) {
        struct member *m = member_at(g, before + i);
        *m = fresh[i];
        for (int s = 0; s < SIDES; s++)
            m->end[s] = (before + i ? member_at(g, before + i - 1)->end[s] : 0) + m->bytes[s];
    }
    if (!rc)
        g->count = before + count;
    ht_mutex_unlock(gather_lock(g));
    return rc;
}

static int add(struct ht_gather *g, const char *lines, const char *end, const struct ht_caller *caller,
               struct member *fresh, uint32_t count)
{
    int rc = open_lines(g, lines, end, caller, fresh);

    if (rc)
        return rc;
    rc = append_members(g, fresh, count);
    for (uint32_t i = 0; i < count && rc; i++)
        close_member(g, &fresh[i]);
    return rc;
}

int ht_gather_add(struct ht_gather *g, const char *lines, size_t len, const struct ht_caller *caller)
{
    const char *end = lines + len;
    uint32_t count = 0;

    for (const char *at = lines; at < end; at = end_of_line(at, end) + 1)
        count++;
    struct member *fresh = calloc(count + 1, sizeof(*fresh));
    int rc = fresh ? take_members(g, count) : -ENOMEM;
    if (rc) {
        ht_last_error_set(g->ctl, g->root, "gather", "gather: no room for %u members more: %s", count, strerror(-rc));
    } else {
        rc = add(g, lines, end, caller, fresh, count);
        if (rc)
            give_members(g, count);
        else
            ht_last_error_done(g->ctl, g->root, "gather");
    }
    free(fresh);
    return rc;
}

/* ------------------------------------------------------------------- bytes */

/* Reads the values, or writes the gradient and leaves buf as it is. */
static ssize_t move_piece(struct ht_gather *g, enum side side, const struct member *m, uint64_t off, void *buf,
                          size_t len, bool waits)
{
    struct ht_trace_mark mark = ht_trace_begin();
    ssize_t n;

    if (side == VALUES)
        n = ht_ctl_param_read(g->ctl, m->obj, off, buf, len);
    else
        n = waits ? ht_grad_write(m->grad, off, buf, len) : ht_grad_try_write(m->grad, off, buf, len);
    if (n > 0)
        ht_trace_end(ht_store_trace(g->ctl->store), &mark, side == VALUES ? HT_TRACE_READ : HT_TRACE_GRADIENT, m->ino,
                     off, (uint64_t)n);
    return side == VALUES && n >= 0 && (size_t)n < len ? -ESTALE : n;
}

/* The pieces of [off, off+len), until one fails or ends early. */
static ssize_t move(struct ht_gather *g, enum side side, uint64_t off, void *buf, size_t len, bool waits)
{
    uint32_t count = g->count, i = 0;
    size_t done = 0;
    ssize_t n = 0;

    HT_PARTITION_POINT(i, count, at, member_at(g, at)->end[side] <= off);
    for (; i < count && done < len; i++) {
        const struct member *m = member_at(g, i);
        uint64_t at = off + done - (m->end[side] - m->bytes[side]);
        size_t piece = ht_min_u64(len - done, m->bytes[side] - at);
        if (!piece)
            continue;
        n = move_piece(g, side, m, at, (uint8_t *)buf + done, piece, waits);
        if (n < 0)
            break;
        done += (size_t)n;
        if ((size_t)n < piece)
            break;
    }
    return done ? (ssize_t)done : n; /* what is done is not done again */
}

ssize_t ht_gather_read(struct ht_gather *g, uint64_t off, void *buf, size_t len)
{
    return move(g, VALUES, off, buf, len, true);
}

/* A write that is too long writes nothing. */
ssize_t ht_gather_write(struct ht_gather *g, uint64_t off, const void *buf, size_t len, bool waits)
{
    uint32_t count = g->count;
    uint64_t bytes = count ? member_at(g, count - 1)->end[GRADIENTS] : 0;

    if (off > bytes || len > bytes - off)
        return -EINVAL;
    return move(g, GRADIENTS, off, (void *)(uintptr_t)buf, len, waits);
}
