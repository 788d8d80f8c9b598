/* SPDX-License-Identifier: Apache-2.0 */
/*
 * apply.c - the commands `apply` and `drop`: a written gradient joins the step, or is taken back.
 *
 * A client that stores into its window of a gradient reports no ranges: the window, if there is one, counts as a whole,
 * and is written to the gradient here. It is zeros then, like a written gradient after its step: the same bytes cannot
 * get into two steps. Bytes that were written with calls are queued as they are. `drop` empties the window, too. An
 * `apply` that fails leaves the window as it is, and none of its bytes in the gradient: the next `apply` of another
 * client would take those.
 */
#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/hidden.h"

enum { PIECE_BYTES = 1 << 20 };

static int copy(struct ht_obj *window, struct ht_grad *g)
{
    uint8_t *buf = malloc(PIECE_BYTES);
    ssize_t n = buf ? 1 : -ENOMEM;

    for (uint64_t off = 0; n > 0; off += (uint64_t)n) {
        n = ht_obj_read(window, off, buf, PIECE_BYTES);
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
        rc = copy(window, g);
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
        snprintf(q->err, HT_CTL_ERROR_MAX, "'%.*s' has no gradient in the open step",
                 (int)ht_min_u64(q->cmd->path_len, 120), q->cmd->path);
    return rc == -ENOENT ? -EBUSY : rc;
}

int ht_ctl_apply(struct ht_call *q, uint64_t ino)
{
    if (q->cmd->ortho)
        return apply_ortho(q, ino);

    struct ht_obj *window = get_window(q->ctl, ino);
    int rc = window ? apply_window(q->ctl, ino, window) : 0;

    ht_obj_put(window);
    return rc ? rc : ht_optim_apply(q->ctl->optim, q->root, ino);
}

int ht_ctl_drop(struct ht_call *q, uint64_t ino)
{
    struct ht_obj *window = get_window(q->ctl, ino);
    int rc = ht_optim_may_steer(q->ctl->optim, q->root, &q->by);

    rc = rc ? rc : ht_optim_drop(q->ctl->optim, q->root, ino, &q->by);
    if (rc == 0 && window)
        rc = ht_obj_punch(window, 0, ht_obj_size(window));
    ht_obj_put(window);
    return rc;
}
