/* SPDX-License-Identifier: Apache-2.0 */
/*
 * passthrough_table.c - the inodes that have open files, or whose memory the kernel has.
 *
 * Lock: passthrough.lock, a leaf. An entry that is busy belongs to one thread, which may wait for I/O; other openers of
 * the same file wait for it.
 */
#include "fs/fuse/passthrough_priv.h"

static struct ht_list *bucket(struct ht_fuse *f, uint64_t ino)
{
    return &f->passthrough.files[ino * 0x9e3779b97f4a7c15ull >> 56];
}
static_assert(HT_PASSTHROUGH_BUCKETS == 256, "eight bits");

struct ht_passthrough_file *ht_passthrough_file_find(struct ht_fuse *f, uint64_t ino)
{
    ht_list_for_each_entry(e, bucket(f, ino), struct ht_passthrough_file, link)
        if (e->ino == ino)
            return e;
    return NULL;
}

struct ht_passthrough_file *ht_passthrough_file_get(struct ht_fuse *f, uint64_t ino)
{
    struct ht_passthrough_file *e = ht_passthrough_file_find(f, ino);

    if (e)
        return e;
    e = calloc(1, sizeof(*e));
    if (!e)
        return NULL;
    e->ino = ino;
    ht_list_init(&e->closed_link);
    ht_list_add_tail(bucket(f, ino), &e->link);
    return e;
}

struct ht_passthrough_file *ht_passthrough_file_enter(struct ht_fuse *f, uint64_t ino, unsigned more)
{
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    struct ht_passthrough_file *e = ht_passthrough_file_get(f, ino);
    if (e) {
        e->waiting++;
        while (e->busy)
            ht_cond_wait(&f->passthrough.idle, ht_fuse_passthrough_lock(f));
        e->waiting--;
        e->busy = true;
        e->others = e->opens;
        e->opens += more;
        if (more)
            ht_list_del(&e->closed_link);
    }
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    return e;
}

void ht_passthrough_file_free_if_unused(struct ht_passthrough_file *e)
{
    if (e->opens || e->waiting || e->lookups || e->busy || e->active)
        return;
    ht_list_del(&e->link);
    free(e->name);
    free(e);
}

/* No other FORGET follows. */
static void forget_file(struct ht_fuse *f, struct ht_passthrough_file *e) HT_REQUIRES(HT_LOCK_PASSTHROUGH)
{
    bool closed = e->active && !e->opens;

    e->forgotten = false;
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    if (closed && !ht_ns_known(f->ns, e->ino))
        ht_passthrough_file_deactivate(f, e);
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
}

void ht_passthrough_file_leave(struct ht_fuse *f, struct ht_passthrough_file *e)
{
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    while (e->forgotten)
        forget_file(f, e);
    e->busy = false;
    pthread_cond_broadcast(&f->passthrough.idle);
    ht_passthrough_file_free_if_unused(e);
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
}
