/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grad.c - gradients as bytes: written by openers, and read back as far as they count.
 *
 * The bytes lie in a scratch object per parameter, made at the first open and kept. Two sets per range say which bytes
 * count: written (since the last flush) and frozen (belongs to the open step; flush.c). A write takes its bytes
 * out of written while it copies, so a concurrent flush of another opener never freezes bytes in flux.
 *
 * The window of an opener reaches from its first to its last byte, and other openers may have written between them. An
 * opener that keeps an account discards its own bytes alone. A byte that two openers wrote belongs to both. The account
 * is a set for each range that has any, in ascending order of ranges. Another opener's flush may freeze these bytes
 * with its own. When the range is thawed, at the boundary or after a pass, the sets lose what was frozen. From then on
 * these bytes belong to the opener that writes them next.
 *
 * Holes: programs that copy files skip zeros of their source, and set the size in the end. If an opener has set the
 * size of the whole gradient and wrote nothing since, gaps are zeros (its flush writes them).
 */
#include "tiering/base/activity.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/gradient/gradient_priv.h"

enum { ZEROS_BYTES = 1 << 16 };

/* ----------------------------------------------------------------- account */

/* Where the set of a range is, or belongs. */
static uint32_t place_of(const struct ht_opt_account *a, uint64_t index)
{
    uint32_t place = 0;

    HT_PARTITION_POINT(place, a->count, i, a->own[i]->index < index);
    return place;
}

static bool grow_account(struct ht_opt_account *a)
{
    uint32_t cap = a->cap ? 2 * a->cap : 1;
    struct ht_range_own **own = realloc(a->own, cap * sizeof(struct ht_range_own *));

    if (own) {
        a->own = own;
        a->cap = cap;
    }
    return own;
}

static struct ht_range_own *insert_own(struct ht_opt_account *a, uint64_t index) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint32_t at = place_of(a, index);
    struct ht_range_own *own = a->count < a->cap || grow_account(a) ? calloc(1, sizeof(*own)) : NULL;

    if (!own)
        return NULL;
    own->index = index;
    own->user = a->user;
    ht_list_init(&own->link);
    memmove(a->own + at + 1, a->own + at, (a->count - at) * sizeof(struct ht_range_own *));
    a->own[at] = own;
    a->count++;
    ht_opt_range_count_own(a->o, own, false);
    return own;
}

static bool may_take(const struct ht_opt_account *a, uint64_t bytes) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return bytes <= ht_quota_room(&a->o->accounts, a->user);
}

/* The set of a range, or NULL. */
static struct ht_range_own *own_at(const struct ht_opt_account *a, uint64_t index)
{
    uint32_t at = place_of(a, index);

    return at < a->count && a->own[at]->index == index ? a->own[at] : NULL;
}

/* The set of a range, which is made if there is none. */
static int find_own(struct ht_opt_account *a, const struct ht_param *p, uint64_t index, struct ht_range_own **out)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_range_own *own = own_at(a, index);

    if (!own) {
        if (!may_take(a, HT_RANGE_OWN_BYTES))
            return -EDQUOT;
        own = insert_own(a, index);
        if (!own)
            return -ENOMEM;
    }
    if (ht_list_empty(&own->link)) { /* new, or of a former range: its bytes are gone */
        ht_interval_set_clear(&own->bytes);
        ht_list_add_tail(&ht_opt_range_find(p, index)->own, &own->link);
    }
    *out = own;
    return 0;
}

static int add_piece(struct ht_opt_account *a, const struct ht_param *p, const struct ht_range_piece *at)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_range_own *own;
    int rc = find_own(a, p, at->index, &own);

    if (rc)
        return rc;
    if (!may_take(a, ht_interval_set_growth(&own->bytes, at->begin, at->end)))
        return -EDQUOT;
    rc = ht_interval_set_add(&own->bytes, at->begin, at->end);
    ht_opt_range_count_own(a->o, own, false);
    return rc;
}

/*
 * -ENOMEM; -E2BIG: too many pieces; -EDQUOT: the accounts of this user have too much memory for that, or those of all.
 * Some of the bytes may be in it then, and the caller removes them.
 */
static int account_add(struct ht_opt_account *a, const struct ht_param *p, uint64_t begin, uint64_t end)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_for_each_piece(at, p, begin, a->o ? end : 0) {
        int rc = add_piece(a, p, &at);
        if (rc)
            return rc;
    }
    return 0;
}

/* Bytes of a write that failed belong to nobody. If a set cannot be cut for want of memory, none of its range do. */
static void account_remove(struct ht_opt_account *a, const struct ht_param *p, uint64_t begin, uint64_t end)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_for_each_piece(at, p, begin, a->count ? end : 0) {
        struct ht_range_own *own = own_at(a, at.index);
        if (own) {
            if (ht_interval_set_remove(&own->bytes, at.begin, at.end))
                ht_interval_set_clear(&own->bytes);
            ht_opt_range_count_own(a->o, own, false);
        }
    }
}

void ht_opt_account_drop(const struct ht_opt_account *a, struct ht_param *p)
{
    for (uint32_t i = 0; i < a->count; i++) {
        const struct ht_range_own *own = a->own[i];
        struct ht_range *r = ht_list_empty(&own->link) ? NULL : ht_opt_range_find(p, own->index);
        if (!r)
            continue;
        if (ht_interval_set_subtract(&r->written, &own->bytes))
            ht_interval_set_clear(&r->written);
        ht_opt_range_count_intervals(r);
        if (!r->written.count)
            ht_list_del(&r->dirty);
    }
}

static void account_clear(struct ht_opt_account *a) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (uint32_t i = 0; i < a->count; i++) {
        ht_list_del(&a->own[i]->link);
        ht_opt_range_count_own(a->o, a->own[i], true);
        ht_interval_set_free(&a->own[i]->bytes);
        free(a->own[i]);
    }
    a->count = 0;
}

/* -------------------------------------------------------------------- open */

int ht_grad_open(struct ht_optim *o, const struct ht_param_desc *desc, struct ht_grad **out)
{
    struct ht_grad *g = calloc(1, sizeof(*g));
    int rc = g ? ht_opt_param_open(o, desc, &g->param) : -ENOMEM;

    if (rc)
        free(g);
    else
        *out = g;
    return rc;
}

void ht_grad_set_part(struct ht_grad *g, ht_grad_part_fn has, const void *ctx)
{
    g->mine.has = has;
    g->mine.ctx = ctx;
}

void ht_grad_keep_account(struct ht_grad *g, struct ht_quota_user *user)
{
    g->account.o = g->param->o;
    g->account.user = user;
}

void ht_opt_grad_forget_mine(struct ht_grad *g)
{
    g->mine.begin = 0;
    g->mine.end = 0;
    account_clear(&g->account);
}

void ht_opt_grad_refresh(struct ht_grad *g)
{
    if (g->applied != g->param->applied) {
        g->applied = g->param->applied;
        ht_opt_grad_forget_mine(g);
    }
    if (g->since == g->param->forgotten)
        return;
    g->since = g->param->forgotten;
    ht_opt_grad_forget_mine(g);
    g->spoiled = false;
    g->sized = 0;
}

void ht_grad_release(struct ht_grad *g)
{
    struct ht_optim *o = g->param->o;

    lock(o);
    account_clear(&g->account);
    free(g->account.own);
    unlock(o);
    ht_opt_param_close(g->param);
    free(g);
}

uint64_t ht_grad_size(struct ht_grad *g)
{
    struct ht_optim *o = g->param->o;

    lock(o);
    uint64_t bytes = g->param->shape.elements * g->param->shape.g_bytes;
    unlock(o);
    return bytes;
}

/* ------------------------------------------------------------------- write */

/* Is any byte frozen? -EAGAIN: not for long. Makes the ranges. */
static int check_free(struct ht_param *p, uint64_t begin, uint64_t end) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_for_each_piece(at, p, begin, end) {
        struct ht_range *r = ht_opt_range_make(p, at.index);
        if (!r)
            return -ENOMEM;
        if (ht_interval_set_overlap(&r->frozen, at.begin, at.end))
            return ht_opt_range_adding(r) ? -EAGAIN : -EBUSY;
        if (r->added && r->added >= p->root->latched.accumulate) /* it takes no more in this step */
            return -EBUSY;
    }
    return 0;
}

/* Adds the bytes to written, or removes them. */
static int set_written(struct ht_param *p, uint64_t begin, uint64_t end, bool in) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_for_each_piece(at, p, begin, end) {
        struct ht_range *r = ht_opt_range_find(p, at.index);
        int rc = (in ? ht_interval_set_add : ht_interval_set_remove)(&r->written, at.begin, at.end);
        ht_opt_range_count_intervals(r);
        if (rc)
            return rc;
        if (!r->written.count)
            ht_list_del(&r->dirty);
        else if (in && ht_list_empty(&r->dirty))
            ht_list_add_tail(&p->dirty, &r->dirty);
    }
    return 0;
}

/*
 * Removes the bytes from written. -EAGAIN: it is not our turn. A writer that is faster than the updates of its root
 * waits for them: its gradients would only push others out of memory, and be written to a device and read again.
 * Workers need nothing from any client, so this ends.
 */
static int try_begin_write(struct ht_grad *g, struct ht_inflight *w) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = g->param;

    if (p->o->stopping)
        return -ECANCELED;
    if (p->root->draining || ht_opt_backlog_full(p->root))
        return -EAGAIN;
    if (ht_opt_close_refuses(p->root))
        return -EIO;
    if (p->gone)
        return -ESTALE;
    if (w->end > p->shape.elements * p->shape.g_bytes) {
        ht_opt_grad_spoil(g);
        return -EINVAL;
    }
    int rc = p->root->prepared ? -EBUSY : check_free(p, w->begin, w->end);
    if (!rc && ht_opt_in_flight(p, w->begin, w->end))
        rc = -EAGAIN;
    if (!rc)
        rc = set_written(p, w->begin, w->end, false);
    if (!rc)
        ht_list_add_tail(&p->inflight, &w->link);
    return rc;
}

/* Releases the lock while it waits. */
static int begin_write(struct ht_grad *g, struct ht_inflight *w) HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc;

    ht_activity_wait("updates of parameter", g->param->oid);
    while ((rc = try_begin_write(g, w)) == -EAGAIN && !ht_opt_interrupted(g->param->root))
        wait_changed(g->param->o);
    ht_activity_go_on();
    return rc == -EAGAIN ? -EINTR : rc;
}

static int count_bytes(struct ht_grad *g, uint64_t begin, uint64_t end) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_grad_refresh(g);
    if (!g->mine.end)
        g->mine.begin = begin;
    g->mine.begin = ht_min_u64(g->mine.begin, begin);
    g->mine.end = ht_max_u64(g->mine.end, end);
    g->sized = 0;
    g->wrote = true;
    int rc = account_add(&g->account, g->param, begin, end);
    rc = rc ? rc : set_written(g->param, begin, end, true);
    g->param->root->grad_bytes += rc ? 0 : end - begin;
    return rc;
}

static ssize_t end_write(struct ht_grad *g, struct ht_inflight *w, ssize_t n) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = g->param;

    ht_list_del(&w->link);
    if (!p->gone) {
        int rc = n > 0 ? count_bytes(g, w->begin, w->begin + (uint64_t)n) : 0;
        n = rc ? rc : n;
        /* Bytes that the write did not bring nobody has written. The set has been without them, in the same pieces. */
        uint64_t rest = w->begin + (n > 0 ? (uint64_t)n : 0);
        (void)!set_written(p, rest, w->end, false);
        account_remove(&g->account, p, rest, w->end);
    }
    notify_changed(p->o);
    return n;
}

bool ht_opt_close_failed(struct ht_root *root, int err)
{
    lock(root->o);
    bool failed = err == -EIO && ht_opt_close_refuses(root);
    unlock(root->o);
    return failed;
}

static void report_write_error(struct ht_param *p, uint64_t off, size_t len, int err)
{
    unsigned long long at = off, count = len;

    if (err == -EINTR || ht_opt_close_failed(p->root, err))
        return;
    if (err == -EINVAL)
        ht_opt_refuse_gradient(p, "gradient: %llu bytes at %llu reach beyond its end; it is not applied", count, at);
    else if (err == -EBUSY)
        ht_opt_refuse_gradient(p, "gradient: bytes at %llu (%llu) belong to this step already; end the step first", at,
                               count);
    else if (err == -EDQUOT)
        ht_opt_refuse_gradient(
            p,
            "gradient: bytes at %llu: what the user's open .hitrain/gather have written and not applied, or those of "
            "all users, lies in too many pieces; apply some of it",
            at);
    else if (err == -E2BIG)
        ht_opt_refuse_gradient(p, "gradient: written in more than %d pieces around byte %llu", HT_INTERVALS_MAX, at);
    else
        ht_opt_refuse_gradient(p, "gradient: %llu bytes at %llu: %s", count, at, strerror(-err));
}

static ssize_t write_bytes(struct ht_grad *g, uint64_t off, const void *buf, size_t len, bool wait)
{
    struct ht_param *p = g->param;
    struct ht_inflight w = {.begin = off, .end = len > UINT64_MAX - off ? UINT64_MAX : off + len};

    if (!len)
        return 0;
    lock(p->o);
    ssize_t n = wait ? begin_write(g, &w) : try_begin_write(g, &w);
    unlock(p->o);
    if (n == -EAGAIN)
        return n;
    if (!n) {
        n = ht_obj_write(p->grad, off, buf, len);
        while (n == -ENOSPC && !ht_store_make_space(p->o->store, true))
            n = ht_obj_write(p->grad, off, buf, len);
        lock(p->o);
        n = end_write(g, &w, n);
        unlock(p->o);
    }
    if (n < 0) {
        lock(p->o);
        g->refused = true;
        unlock(p->o);
        report_write_error(p, off, len, (int)n);
    }
    return n;
}

ssize_t ht_grad_write(struct ht_grad *g, uint64_t off, const void *buf, size_t len)
{
    return write_bytes(g, off, buf, len, true);
}

ssize_t ht_grad_try_write(struct ht_grad *g, uint64_t off, const void *buf, size_t len)
{
    return write_bytes(g, off, buf, len, false);
}

static int fill_windows(struct ht_param *p, uint64_t bytes, void *window, size_t window_bytes, ht_opt_fill_fn fill,
                        void *ctx)
{
    int rc = 0;

    for (uint64_t off = 0; !rc && off < bytes; off += window_bytes) {
        size_t len = ht_min_u64(window_bytes, bytes - off);
        memset(window, 0, len);
        rc = fill(ctx, off, window, len);
        if (!rc)
            rc = ht_opt_write_all(p->grad, off, window, len);
    }
    return rc;
}

int ht_opt_grad_make(struct ht_grad *g, void *window, size_t window_bytes, ht_opt_fill_fn fill, void *ctx)
{
    struct ht_param *p = g->param;
    struct ht_inflight w = {.begin = 0, .end = ht_grad_size(g)};

    lock(p->o);
    ssize_t rc = begin_write(g, &w);
    unlock(p->o);
    if (!rc) {
        rc = fill_windows(p, w.end, window, window_bytes, fill, ctx);
        lock(p->o);
        rc = end_write(g, &w, rc ? rc : (ssize_t)w.end);
        unlock(p->o);
    }
    if (rc < 0)
        report_write_error(p, 0, w.end, (int)rc);
    return rc < 0 ? (int)rc : 0;
}

/* ------------------------------------------------------------------- holes */

int ht_grad_set_size(struct ht_grad *g, uint64_t bytes)
{
    struct ht_param *p = g->param;

    lock(p->o);
    uint64_t whole = p->shape.elements * p->shape.g_bytes;
    ht_opt_grad_refresh(g);
    g->sized = bytes <= whole ? bytes : 0;
    unlock(p->o);
    if (bytes <= whole)
        return 0;
    ht_opt_refuse_gradient(p, "gradient: its size cannot become %llu bytes: it has %llu, as the parameter has elements",
                           (ull)bytes, (ull)whole);
    return -EINVAL;
}

bool ht_grad_unused(struct ht_grad *g)
{
    lock(g->param->o);
    bool unused = !g->wrote && !g->refused;
    unlock(g->param->o);
    return unused;
}

/* The first byte from begin on that is in neither set, and in *out_end where the gap ends. */
static uint32_t gap_in_range(const struct ht_range *r, uint32_t begin, uint32_t end, uint32_t *out_end)
{
    uint32_t stop_w, stop_f;

    for (;;) {
        uint32_t w = ht_interval_set_next(&r->written, begin, end, &stop_w);
        uint32_t f = ht_interval_set_next(&r->frozen, begin, end, &stop_f);
        if (begin >= end || (w > begin && f > begin)) {
            *out_end = w < f ? w : f;
            return begin;
        }
        begin = w == begin ? stop_w : stop_f;
    }
}

/* The first unwritten gap from *begin on. A gradient that is being added belongs to the pass before. */
static bool find_gap(const struct ht_param *p, uint64_t *begin, uint64_t *out_end) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t whole = p->shape.elements * p->shape.g_bytes;

    while (*begin < whole) {
        struct ht_range_piece at = ht_opt_range_piece(p, *begin, whole);
        const struct ht_range *r = ht_opt_range_find(p, at.index);
        uint32_t from = at.begin, to = at.end;
        if (r && !ht_opt_range_adding(r))
            from = gap_in_range(r, at.begin, at.end, &to);
        *begin += from - at.begin;
        *out_end = *begin + (to - from);
        if (from < to)
            return true;
    }
    return false;
}

/* Zeros wherever nothing is written. *out_any: there was such a place. */
static int write_zeros(struct ht_grad *g, bool *out_any)
{
    static const uint8_t zeros[ZEROS_BYTES];
    struct ht_param *p = g->param;
    uint64_t begin = 0, end = 0;
    ssize_t n = 0;

    *out_any = false;
    for (;;) {
        lock(p->o);
        bool found = find_gap(p, &begin, &end);
        unlock(p->o);
        if (!found)
            return 0;
        *out_any = true;
        n = ht_grad_write(g, begin, zeros, ht_min_u64(end - begin, sizeof(zeros)));
        if (n < 0)
            return (int)n;
        begin += (uint64_t)n;
    }
}

int ht_opt_grad_fill_holes(struct ht_grad *g)
{
    struct ht_param *p = g->param;

    lock(p->o);
    ht_opt_grad_refresh(g);
    uint64_t sized = g->sized, whole = p->shape.elements * p->shape.g_bytes;
    bool own = g->mine.end != 0, any = true;
    g->sized = 0;
    unlock(p->o);
    if (!sized || (sized < whole && own))
        return 0; /* the boundary checks gradients that are written in part */
    int rc = sized < whole ? -EINVAL : write_zeros(g, &any);
    if (rc == -EINVAL)
        ht_opt_refuse_gradient(p, "gradient: %llu bytes of holes where it has %llu bytes; it is not applied",
                               (ull)sized, (ull)whole);
    if (rc || any || own)
        return rc;
    report_write_error(p, 0, whole, -EBUSY);
    return -EBUSY;
}

/* -------------------------------------------------------------------- read */

/* Zeroes the part of one range that is neither written nor waiting to be applied. buf: its bytes from begin on. */
static void mask_range(const struct ht_range *r, uint32_t begin, uint32_t end, uint8_t *buf)
{
    for (uint32_t pos = begin, stop; pos < end; pos = stop) {
        pos = gap_in_range(r, pos, end, &stop);
        memset(buf + (pos - begin), 0, stop - pos);
    }
}

/* buf holds gradient bytes [begin, end). */
static void mask_gradient(struct ht_param *p, uint64_t begin, uint64_t end, uint8_t *buf) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_for_each_piece(at, p, begin, end) {
        const struct ht_range *r = ht_opt_range_find(p, at.index);
        if (r && !ht_opt_range_spent(r))
            mask_range(r, at.begin, at.end, buf);
        else
            memset(buf, 0, at.end - at.begin);
        buf += at.end - at.begin;
    }
}

ssize_t ht_grad_read(struct ht_grad *g, uint64_t off, void *buf, size_t len)
{
    struct ht_param *p = g->param;
    ssize_t n = ht_obj_read(p->grad, off, buf, len);

    if (n <= 0)
        return n;
    lock(p->o);
    mask_gradient(p, off, off + (uint64_t)n, buf);
    unlock(p->o);
    return n;
}
