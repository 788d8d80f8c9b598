/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handout_grad.c - gradients that are written by stores: a window of memory for whoever opens one for reading and writing.
 *
 * The window is a scratch object of its own, handed out as files are (handout.c). Nobody sees a store, so `apply` takes the window as a
 * whole, through the same door that written gradients come in by (fs/ctl/apply.c): from then on the step has its own copy. A window
 * of which no page was ever touched is none: its opener writes with calls. Calls on the same descriptors go to the gradient
 * itself, as ever, and do not show in the window.
 *
 * Who finds the gradient open in the ordinary way, or no memory, gets what there was before: pages that the kernel writes.
 */
#include "fs/fuse/handout_policy.h"
#include "fs/fuse/handout_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

static bool concerns(const struct ht_fuse *f, uint64_t ino)
{
    return f->handout.share_bytes && ht_hidden_is_gradient(ino);
}

/* ----------------------------------------------------------------- windows */

/* Scratch, so nothing goes into the log; deletion asks for a transaction all the same. */
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
    int r = ht_obj_create(f->store, &attr, out);

    if (r)
        return r;
    r = ht_obj_truncate(*out, bytes);
    if (r)
        delete_window(f, *out);
    return r;
}

static int hand_out_window(fuse_req_t req, struct ht_handed_file *e, uint64_t bytes)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_obj *obj;
    int r = f->handout.on ? make_window(f, bytes, &obj) : -EOPNOTSUPP;

    if (r)
        return r;
    r = ht_handed_pass(req, e, obj, false);
    if (r)
        delete_window(f, obj);
    return r;
}

/* ------------------------------------------------------------ open and close */

void ht_handout_hidden_open(fuse_req_t req, uint64_t ino, uint64_t bytes, int flags, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_handed_file *e = concerns(f, ino) ? ht_handed_enter(f, ino) : NULL;

    if (!e)
        return;
    if (!e->out && !e->others && bytes && ht_handout_may_store(flags) && hand_out_window(req, e, bytes))
        f->traffic->handout_fallbacks++;
    if (e->out) {
        fi->backing_id = e->backing;
        f->traffic->handed_opens++;
    }
    ht_handed_leave(f, e);
}

static void job_drop_name(struct ht_job *job)
{
    struct ht_fuse *f = job->fuse;
    const struct ht_handed_file *e;
    char name[HT_NAME_BYTES_MAX + 1] = "";
    uint64_t parent = 0;

    ht_mutex_lock(&f->handout.lock);
    e = ht_handed_find(f, job->ino);
    if (e && e->name) {
        parent = e->parent;
        snprintf(name, sizeof(name), "%s", e->name);
    }
    ht_mutex_unlock(&f->handout.lock);
    if (name[0])
        f->cache.drop_name(f->cache.ctx, parent, name);
}

void ht_handout_hidden_close(struct ht_fuse *f, uint64_t ino)
{
    struct ht_handed_file *e;

    if (!concerns(f, ino))
        return;
    ht_mutex_lock(&f->handout.lock);
    e = ht_handed_find(f, ino);
    ht_mutex_unlock(&f->handout.lock);
    if (e && e->opens) /* without memory there was none */
        ht_handed_close(f, e, job_drop_name);
}

/* ------------------------------------------------------- lookup and forget */

/* Its parameter may lose its name, and the kernel keeps the one that it was told. */
void ht_handout_hidden_looked_up(struct ht_fuse *f, uint64_t ino, uint64_t parent, const char *name)
{
    struct ht_handed_file *e;

    if (!concerns(f, ino))
        return;
    ht_mutex_lock(&f->handout.lock);
    e = ht_handed_find(f, ino);
    if (!e)
        e = ht_handed_make(f, ino);
    if (e) {
        e->lookups++;
        e->parent = parent;
        if (!e->name || strcmp(e->name, name)) {
            free(e->name);
            e->name = strdup(name);
        }
    }
    ht_mutex_unlock(&f->handout.lock);
}

/* A window that is out stays so for the next FORGET, or the end of the mount: giving it back needs a request. */
void ht_handout_hidden_not_looked_up(struct ht_fuse *f, uint64_t ino)
{
    struct ht_handed_file *e;

    if (!concerns(f, ino))
        return;
    ht_mutex_lock(&f->handout.lock);
    e = ht_handed_find(f, ino);
    if (e) {
        e->lookups -= e->lookups > 0;
        ht_handed_free_if_unused(e);
    }
    ht_mutex_unlock(&f->handout.lock);
}

/* The entry if the kernel has forgotten it: the caller's, when it was out. */
static struct ht_handed_file *forgotten(struct ht_fuse *f, uint64_t ino, uint64_t n)
{
    struct ht_handed_file *e;

    ht_mutex_lock(&f->handout.lock);
    e = ht_handed_find(f, ino);
    if (e)
        e->lookups -= ht_min_u64(n, e->lookups);
    if (e && e->out && !e->opens && !e->lookups && !e->busy) {
        e->busy = true;
    } else {
        if (e)
            ht_handed_free_if_unused(e);
        e = NULL;
    }
    ht_mutex_unlock(&f->handout.lock);
    return e;
}

void ht_handout_hidden_forget(fuse_req_t req, uint64_t ino, uint64_t n)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_handed_file *e = concerns(f, ino) ? forgotten(f, ino, n) : NULL;

    if (!e)
        return;
    fuse_passthrough_close(req, e->backing);
    ht_obj_hand_back(e->obj);
    delete_window(f, e->obj);
    e->out = false;
    ht_handed_leave(f, e);
}

/* ------------------------------------------------------------------- apply */

struct ht_obj *ht_handout_mapped(void *fuse, uint64_t ino)
{
    struct ht_fuse *f = fuse;
    struct ht_handed_file *e;
    uint64_t oid = 0;
    struct stat st;

    ht_mutex_lock(&f->handout.lock);
    e = ht_handed_find(f, ino);
    if (e && e->out && !e->busy && fstat(e->fd, &st) == 0 && st.st_blocks)
        oid = ht_obj_id(e->obj);
    ht_mutex_unlock(&f->handout.lock);
    return oid ? ht_obj_get(f->store, oid) : NULL;
}
