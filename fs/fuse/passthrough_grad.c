/* SPDX-License-Identifier: Apache-2.0 */
/*
 * passthrough_grad.c - gradients that are written by stores: a client that opens one for reading and writing gets a
 * window of memory.
 *
 * The window is a scratch object of its own, passed through as files are (passthrough.c). The daemon does not see
 * stores, so `apply` takes the window as a whole, through the interface of written gradients (fs/ctl/command.c): from
 * then on the step has its own copy. A window without a touched page does not count: its opener writes with calls.
 * Calls on the same descriptors go to the gradient itself, as ever, and do not show in the window.
 *
 * If the gradient is open in the ordinary way already, or memory is missing, the opener gets pages that the kernel
 * writes.
 */
#include "fs/fuse/passthrough_priv.h"

static bool concerns(const struct ht_fuse *f, uint64_t ino)
{
    return f->passthrough.share_bytes && ht_hidden_is_gradient(ino);
}

/* ----------------------------------------------------------------- windows */

/* Scratch, so nothing goes into the log; deletion needs a transaction all the same. */
static void delete_window(struct ht_fuse *f, struct ht_obj *obj)
{
    struct ht_tx *tx;

    if (ht_tx_begin(f->store, 0, &tx) == 0) {
        ht_obj_delete(obj, tx);
        (void)ht_tx_commit(tx, NULL);
    }
    ht_obj_put(obj);
}

static int make_window(struct ht_fuse *f, uint64_t bytes, struct ht_obj **out)
{
    const struct ht_obj_attr attr = {
        .oid = ht_store_new_id(f->store), .chunk_bytes = HT_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH};
    int rc = ht_obj_create(f->store, &attr, out);

    if (rc)
        return rc;
    rc = ht_obj_truncate(*out, bytes);
    if (rc)
        delete_window(f, *out);
    return rc;
}

static int pass_window(fuse_req_t req, struct ht_passthrough_file *e, uint64_t bytes)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_obj *obj;
    int rc = f->passthrough.on ? make_window(f, bytes, &obj) : -EOPNOTSUPP;

    if (rc)
        return rc;
    rc = ht_passthrough_file_begin(req, e, obj, false);
    if (rc)
        delete_window(f, obj);
    return rc;
}

/* If no program has it: what one that ended has left is no gradient of the next one. forgotten: by the kernel, too. */
static bool end_window(struct ht_fuse *f, struct ht_passthrough_file *e, bool forgotten)
{
    if (!forgotten && !ht_passthrough_file_is_free(f, e))
        return false;
    delete_window(f, e->obj); /* whose memory keeps it */
    ht_passthrough_file_deactivate(f, e);
    return true;
}

/* ------------------------------------------------------------ open and close */

bool ht_passthrough_hidden_open(fuse_req_t req, uint64_t ino, const struct ht_hidden_about *about, int flags,
                                struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    uint64_t bytes = about->gradient_bytes;
    struct ht_passthrough_file *e = concerns(f, ino) ? ht_passthrough_file_enter(f, ino, 1) : NULL;

    if (!e)
        return false;
    (void)end_window(f, e, false);
    if (!e->active && !e->others && bytes && ht_passthrough_may_store(flags) &&
        ht_passthrough_may_be(f, about->param, flags, fuse_req_ctx(req)->uid) && pass_window(req, e, bytes))
        f->traffic->passthrough_fallbacks++;
    if (e->active) {
        fi->backing_id = e->backing;
        f->traffic->passthrough_opens++;
    }
    ht_passthrough_file_leave(f, e);
    return true;
}

static void job_drop_name(struct ht_job *job)
{
    struct ht_fuse *f = job->fuse;
    char name[HT_NAME_BYTES_MAX + 1] = "";
    uint64_t parent = 0;

    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    const struct ht_passthrough_file *e = ht_passthrough_file_find(f, job->ino);
    if (e && e->name) {
        parent = e->parent;
        snprintf(name, sizeof(name), "%s", e->name);
    }
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    if (name[0])
        f->cache.drop_name(f->cache.ctx, parent, name);
}

void ht_passthrough_hidden_close(struct ht_fuse *f, uint64_t ino)
{
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    struct ht_passthrough_file *e = ht_passthrough_file_find(f, ino);
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    ht_passthrough_file_close(f, e, false, job_drop_name); /* the caller's open keeps it */
}

/* ------------------------------------------------------- lookup and forget */

/* Its parameter may lose its name, and the kernel keeps the name of its lookup. */
void ht_passthrough_hidden_looked_up(struct ht_fuse *f, uint64_t ino, uint64_t parent, const char *name)
{
    if (!concerns(f, ino))
        return;
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    struct ht_passthrough_file *e = ht_passthrough_file_get(f, ino);
    if (e) {
        e->lookups++;
        e->parent = parent;
        if (!e->name || strcmp(e->name, name)) {
            free(e->name);
            e->name = strdup(name);
        }
    }
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
}

/* An active window stays active until the next FORGET, or the end of the mount: closing it needs a request. */
void ht_passthrough_hidden_not_looked_up(struct ht_fuse *f, uint64_t ino)
{
    if (!concerns(f, ino))
        return;
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    struct ht_passthrough_file *e = ht_passthrough_file_find(f, ino);
    if (e) {
        e->lookups -= e->lookups > 0;
        ht_passthrough_file_free_if_unused(e);
    }
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
}

/* The entry, taken by the caller, if the kernel has forgotten an active one. */
static struct ht_passthrough_file *forgotten(struct ht_fuse *f, uint64_t ino, uint64_t n)
{
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    struct ht_passthrough_file *e = ht_passthrough_file_find(f, ino);
    if (e)
        e->lookups -= ht_min_u64(n, e->lookups);
    if (e && !e->busy && !e->opens && !e->lookups && e->active) {
        e->busy = true;
    } else {
        if (e)
            ht_passthrough_file_free_if_unused(e);
        e = NULL;
    }
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    return e;
}

void ht_passthrough_hidden_forget(fuse_req_t req, uint64_t ino, uint64_t n)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_passthrough_file *e = concerns(f, ino) ? forgotten(f, ino, n) : NULL;

    if (!e)
        return;
    (void)end_window(f, e, true);
    ht_passthrough_file_leave(f, e);
}

/* ------------------------------------------------------------------- apply */

struct ht_obj *ht_passthrough_mapped(void *fuse, uint64_t ino)
{
    struct ht_fuse *f = fuse;
    struct ht_passthrough_file *e = concerns(f, ino) ? ht_passthrough_file_enter(f, ino, 0) : NULL;
    struct ht_obj *window = NULL;
    struct stat st;

    if (e && !end_window(f, e, false) && e->active && fstat(e->fd, &st) == 0 && st.st_blocks)
        window = ht_obj_get(f->store, ht_obj_id(e->obj));
    if (e)
        ht_passthrough_file_leave(f, e);
    return window;
}
