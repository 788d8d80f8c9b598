/* SPDX-License-Identifier: Apache-2.0 */
/* params.c - parameters for clients: which files are one, their shapes, their bytes, and the wait for their updates. */
#include "fs/ctl/ctl_priv.h"

#include "optim/rules/blocks.h"
#include "tiering/base/activity.h"

static bool is_float(uint8_t dtype)
{
    const struct ht_dtype_word *row = ht_dtype_row(dtype);

    return row && row->is_float;
}

uint64_t ht_ctl_root_of(struct ht_ctl *c, uint64_t ino)
{
    struct ht_ns_tensor t;

    return ht_ns_tensor(c->ns, ino, &t) == 0 ? t.root : 0;
}

uint64_t ht_ctl_param(struct ht_ctl *c, uint64_t ino)
{
    struct ht_ns_tensor t;

    if (ht_ns_tensor(c->ns, ino, &t) || t.is_root || !is_float(t.dtype))
        return 0;
    return t.root;
}

int ht_ctl_describe(struct ht_ctl *c, uint64_t ino, struct ht_param_desc *out)
{
    struct ht_ns_tensor t;
    struct ht_obj *obj;
    int rc = ht_ns_tensor(c->ns, ino, &t);

    if (rc)
        return rc;
    if (!t.root || !is_float(t.dtype))
        return -EINVAL;
    rc = ht_ns_open(c->ns, ino, &obj);
    if (rc)
        return rc;
    *out = (struct ht_param_desc){
        .root = t.root,
        .obj = obj,
        .dtype = t.dtype,
        .grad_dtype = t.grad_dtype == HT_DTYPE_NONE ? t.dtype : t.grad_dtype,
    };
    return 0;
}

/* ------------------------------------------------------------------ shapes */

enum { SHAPE_TEXT_MAX = 512 };

static ssize_t shape_text(struct ht_ctl *c, uint64_t ino, char text[SHAPE_TEXT_MAX])
{
    return ht_ns_getxattr(c->ns, ino, HT_XATTR_PREFIX "shape", text, SHAPE_TEXT_MAX);
}

int ht_shape_of(struct ht_ctl *c, uint64_t ino, struct ht_shape *out)
{
    char text[SHAPE_TEXT_MAX];
    ssize_t n = shape_text(c, ino, text);

    return n < 0 ? (int)n : ht_parse_shape(text, (size_t)n, out);
}

int ht_shape_fits(struct ht_ctl *c, uint64_t ino, const char *text, size_t len, char err[HT_CTL_ERROR_MAX])
{
    struct ht_ns_tensor t;
    struct ht_shape shape;
    struct stat st;

    if (ht_ns_getattr(c->ns, ino, &st) || !S_ISREG(st.st_mode) || st.st_size == 0 || ht_ns_tensor(c->ns, ino, &t))
        return 0;
    const struct ht_dtype_word *row = ht_dtype_row(t.dtype);
    if (!row || ht_parse_shape(text, len, &shape) || shape.elements * row->bytes == (uint64_t)st.st_size)
        return 0;
    return ht_ctl_refuse(
        err, -EINVAL,
        "shape %.*s says %llu elements, but the file has %lld bytes of %s: set the shape that it has, or remove it",
        (int)ht_min_u64(len, 64), text, (unsigned long long)shape.elements, (long long)st.st_size, row->word);
}

int ht_shape_blocks(struct ht_ctl *c, uint64_t ino, struct ht_optim_config *config, struct ht_optim_sections *sections,
                    char err[HT_OPTIM_ERROR_MAX])
{
    struct ht_shape shape;

    if (ht_shape_of(c, ino, &shape) == 0)
        return ht_muon_blocks(shape.dim, shape.count, config, sections, err);
    return ht_ctl_refuse(err, -EINVAL,
                         "muon needs to know the shape of the matrix: set " HT_XATTR_PREFIX "shape, as in 1024,768");
}

int ht_shape_check(struct ht_ctl *c, uint64_t ino, char err[HT_CTL_ERROR_MAX])
{
    char text[SHAPE_TEXT_MAX];
    ssize_t n = shape_text(c, ino, text);

    return n < 0 ? 0 : ht_shape_fits(c, ino, text, (size_t)n, err);
}

/* ----------------------------------------------------------------- updates */

#define LOOK_NS 50000000 /* between two looks whether the request is interrupted */

struct sleeper {
    struct ht_waiter waiter;
    struct ht_mutex lock;
    pthread_cond_t woken;
    HT_GUARDED_BY(HT_LOCK_SLEEPER) bool done;
};

HT_MUTEX_OF(sleeper_lock, struct sleeper, lock, HT_LOCK_SLEEPER)

/* The sleeper may be gone once the lock is released. */
static void wake_sleeper(struct ht_waiter *w)
{
    struct sleeper *s = ht_container_of(w, struct sleeper, waiter);

    ht_mutex_lock(sleeper_lock(s));
    s->done = true;
    pthread_cond_signal(&s->woken);
    ht_mutex_unlock(sleeper_lock(s));
}

/* By the clock of ht_now_ns, so that a change of the time of day delays nothing; 0: for as long as it takes. */
static bool sleep_until(struct sleeper *s, uint64_t at_ns)
{
    int rc = 0;

    ht_mutex_lock(sleeper_lock(s));
    while (!s->done && !rc)
        rc = ht_cond_wait_until(&s->woken, sleeper_lock(s), at_ns);
    bool done = s->done;
    ht_mutex_unlock(sleeper_lock(s));
    return done;
}

/* True: it was woken. Else the client does not want the request any more, which waits for a replay of logged steps. */
static bool sleep_or_interrupted(struct ht_ctl *c, uint64_t ino, struct sleeper *s)
{
    while (!ht_activity_interrupted() || !ht_optim_replaying(c->optim, ino))
        if (sleep_until(s, ht_now_ns() + LOOK_NS))
            return true;
    return !ht_optim_cancel(c->optim, &s->waiter) && sleep_until(s, 0);
}

int ht_ctl_wait_updates(struct ht_ctl *c, uint64_t ino, uint64_t off, uint64_t len)
{
    struct sleeper s = {.waiter = {.wake = wake_sleeper}};
    bool done = true;
    int rc = ht_optim_readable(c->optim, ino, off, len, NULL);

    if (rc != -EAGAIN)
        return rc;
    ht_mutex_init(&s.lock, HT_LOCK_SLEEPER);
    ht_cond_init(&s.woken);
    ht_activity_wait("updates of parameter", ino);
    if (ht_optim_readable(c->optim, ino, off, len, &s.waiter) == -EAGAIN)
        done = ht_activity_interruptible() ? sleep_or_interrupted(c, ino, &s) : sleep_until(&s, 0);
    ht_activity_go_on();
    pthread_cond_destroy(&s.woken);
    ht_mutex_destroy(&s.lock);
    if (!done)
        return -EINTR;
    return ht_optim_readable(c->optim, ino, off, len, NULL) == -EIO ? -EIO : 0;
}

/* ------------------------------------------------------------------- bytes */

ssize_t ht_ctl_param_read(struct ht_ctl *c, struct ht_obj *obj, uint64_t off, void *buf, size_t len)
{
    int rc = ht_ctl_wait_updates(c, ht_obj_id(obj), off, len);

    return rc ? rc : ht_obj_read(obj, off, buf, len);
}

ssize_t ht_ctl_param_write(struct ht_ctl *c, struct ht_obj *obj, uint64_t off, const void *buf, size_t len)
{
    uint64_t ino = ht_obj_id(obj), size = ht_obj_size(obj);

    if (off > size || len > size - off)
        return -ESTALE;
    if (ht_optim_readable(c->optim, ino, off, len, NULL) == -EIO)
        return -EIO;
    ssize_t n = ht_obj_write(obj, off, buf, len);
    for (bool again = false; n == -ENOSPC && ht_store_make_space(c->store, again) == 0; again = true)
        n = ht_obj_write(obj, off, buf, len);
    if (n > 0)
        ht_ns_touch(c->ns, ino, true);
    return n;
}
