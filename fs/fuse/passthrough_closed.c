/* SPDX-License-Identifier: Apache-2.0 */
/*
 * passthrough_closed.c - files that programs closed a moment ago: they stay active, so that opening one again is cheap.
 *
 *   open --last close--> closed --a second later, if a program has its memory: names go--> (FORGET) --> ordinary
 *     ^---opened again------' '---a second later, or somebody needs it ordinary: no program has its memory---^
 *
 * Whoever needs such a file ordinary makes it so at once: an open that finds no room in the share, a change of size,
 * eviction, a write that finds no space, an open in another way or by another user. The kernel says whether a program
 * has the memory. It gives a lease for writing to the only one who has a file open, and a mapping keeps an open file.
 * Where it gives no leases, names go with the last close. A program may look a name up again while another one maps the
 * file, and no FORGET comes: so such files are looked at again from time to time.
 *
 * Lock: passthrough.lock. Only the owner of a busy entry changes whether it is active.
 */
#include "fs/fuse/passthrough_priv.h"

#include <linux/fuse.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAPPED_NS UINT64_C(10000000000) /* between two looks */

#ifndef FUSE_DEV_IOC_BACKING_CLOSE /* before Linux 6.9 */
#define FUSE_DEV_IOC_BACKING_CLOSE _IOW(229, 2, uint32_t)
#endif

/* Opens the file of memory once more. The file that made it does not count as one that is open. */
static int open_again(int fd, int flags)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    return open(path, flags | O_CLOEXEC);
}

/* Has no program the file of memory open or mapped? Not known counts as no. */
static bool is_free(int fd)
{
    int own = open_again(fd, O_RDWR);
    bool alone = own >= 0 && fcntl(own, F_SETLEASE, F_WRLCK) == 0;

    if (own >= 0)
        close(own); /* and the lease */
    return alone;
}

/* Does it see that the file is open in this way? */
static bool sees(int fd, int flags)
{
    int other = open_again(fd, flags);
    bool seen = other >= 0 && !is_free(fd);

    if (other >= 0)
        close(other);
    return seen;
}

/* Does the kernel give such leases? */
static bool knows_users(void)
{
    int fd = memfd_create("hitrain-probe", MFD_CLOEXEC);
    bool known = fd >= 0 && sees(fd, O_RDONLY) && sees(fd, O_RDWR) && is_free(fd);

    if (fd >= 0)
        close(fd);
    return known;
}

void ht_passthrough_file_deactivate(struct ht_fuse *f, struct ht_passthrough_file *e)
{
    uint32_t backing = (uint32_t)e->backing;

    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    ht_list_del(&e->closed_link);
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    (void)ioctl(fuse_session_fd(f->session), FUSE_DEV_IOC_BACKING_CLOSE, &backing);
    ht_obj_shm_close(e->obj);
    e->active = e->stores = false;
}

bool ht_passthrough_file_is_free(const struct ht_fuse *f, const struct ht_passthrough_file *e)
{
    return f->passthrough.keeps_closed && e->active && !e->others && is_free(e->fd);
}

bool ht_passthrough_file_end(struct ht_fuse *f, struct ht_passthrough_file *e)
{
    if (!ht_passthrough_file_is_free(f, e))
        return false;
    ht_passthrough_file_deactivate(f, e);
    return true;
}

/* It leaves the list, and the caller owns it. */
static void take(struct ht_passthrough_file *e) HT_REQUIRES(HT_LOCK_PASSTHROUGH)
{
    ht_list_del(&e->closed_link);
    e->busy = true;
    e->others = e->opens;
}

/* The first one that is to be looked at before. */
static struct ht_passthrough_file *find(const struct ht_list *list, const uint32_t *user, uint64_t before_ns)
    HT_REQUIRES(HT_LOCK_PASSTHROUGH)
{
    ht_list_for_each_entry(e, list, struct ht_passthrough_file, closed_link)
        if (!e->busy && e->active && (!user || *user == e->user) && e->closed_until_ns < before_ns)
            return e;
    return NULL;
}

/* As ht_passthrough_closed_end_one; the caller owns it. A mapped one was looked at before the caller began. */
static struct ht_passthrough_file *take_first(struct ht_fuse *f, const uint32_t *user, uint64_t began_ns)
{
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    struct ht_passthrough_file *found = find(&f->passthrough.closed, user, UINT64_MAX);
    if (!found)
        found = find(&f->passthrough.mapped, user, began_ns + MAPPED_NS);
    if (found)
        take(found);
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    return found;
}

static void put(struct ht_fuse *f, struct ht_list *list, struct ht_passthrough_file *e, uint64_t ns)
    HT_REQUIRES(HT_LOCK_PASSTHROUGH)
{
    e->closed_until_ns = ht_now_ns() + ns;
    if (ht_list_empty(list))
        pthread_cond_signal(&f->passthrough.closed_changed);
    ht_list_add_tail(list, &e->closed_link);
}

void ht_passthrough_closed_add(struct ht_fuse *f, struct ht_passthrough_file *e)
{
    put(f, &f->passthrough.closed, e, HT_PASSTHROUGH_CLOSED_NS);
}

/* A taken file becomes ordinary; or else its names go, so that it will, or it is looked at again. */
static bool end_taken(struct ht_fuse *f, struct ht_passthrough_file *e)
{
    uint64_t ino = e->ino;
    bool done = ht_passthrough_file_end(f, e);

    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    if (e->active && !e->opens)
        put(f, &f->passthrough.mapped, e, MAPPED_NS);
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    ht_passthrough_file_leave(f, e);
    if (!done)
        ht_passthrough_drop_names(f, ino);
    return done;
}

bool ht_passthrough_closed_end_one(struct ht_fuse *f, const uint32_t *user)
{
    uint64_t began_ns = ht_now_ns();
    struct ht_passthrough_file *e;
    bool done = false;

    while (!done && (e = take_first(f, user, began_ns)))
        done = end_taken(f, e);
    return done;
}

/* A file has reserved its bytes twice at most. */
bool ht_passthrough_make_room(struct ht_fuse *f, uint64_t lack_bytes)
{
    bool any = false;

    if (!lack_bytes || lack_bytes > 2 * f->passthrough.share_bytes + ht_store_could_give(f->store))
        return false;
    while (ht_passthrough_closed_end_one(f, NULL))
        any = true;
    return any;
}

void ht_passthrough_rest(void *fuse, uint64_t ino)
{
    struct ht_fuse *f = fuse;
    struct ht_passthrough_file *e = f->passthrough.keeps_closed ? ht_passthrough_file_enter(f, ino, 0) : NULL;

    if (!e)
        return;
    (void)ht_passthrough_file_end(f, e);
    ht_passthrough_file_leave(f, e);
}

/* ------------------------------------------------------------------ thread */

/* Of both lists, each in the order of their times. */
static struct ht_passthrough_file *first(const struct ht_fuse *f) HT_REQUIRES(HT_LOCK_PASSTHROUGH)
{
    const struct ht_list *lists[] = {&f->passthrough.closed, &f->passthrough.mapped};
    struct ht_passthrough_file *found = NULL;

    for (unsigned i = 0; i < HT_ARRAY_SIZE(lists); i++) {
        if (ht_list_empty(lists[i]))
            continue;
        struct ht_passthrough_file *e = ht_list_entry(lists[i]->next, struct ht_passthrough_file, closed_link);
        if (!found || e->closed_until_ns < found->closed_until_ns)
            found = e;
    }
    return found;
}

/*
 * The inode of the file whose moment is over, or 0: the thread ends. *out: it is taken; NULL: another thread owns it,
 * and this one waits for no owner, or the mount could not end.
 */
static uint64_t wait_for_next(struct ht_fuse *f, struct ht_passthrough_file **out) HT_REQUIRES(HT_LOCK_PASSTHROUGH)
{
    while (!f->passthrough.over) {
        struct ht_passthrough_file *e = first(f);
        if (!e) {
            ht_cond_wait(&f->passthrough.closed_changed, ht_fuse_passthrough_lock(f));
            continue;
        }
        if (ht_now_ns() >= e->closed_until_ns) {
            *out = e->busy ? NULL : e;
            if (e->busy) {
                ht_list_del(&e->closed_link);
                put(f, &f->passthrough.mapped, e, MAPPED_NS);
            } else {
                take(e);
            }
            return e->ino;
        }
        (void)ht_cond_wait_until(&f->passthrough.closed_changed, ht_fuse_passthrough_lock(f), e->closed_until_ns);
    }
    return 0;
}

static void *run(void *arg)
{
    struct ht_fuse *f = arg;
    struct ht_passthrough_file *e;
    uint64_t ino;

    pthread_setname_np(pthread_self(), "ht-closed");
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    while ((ino = wait_for_next(f, &e))) {
        ht_mutex_unlock(ht_fuse_passthrough_lock(f));
        if (e)
            (void)end_taken(f, e);
        else
            ht_passthrough_drop_names(f, ino);
        ht_mutex_lock(ht_fuse_passthrough_lock(f));
    }
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    return NULL;
}

void ht_passthrough_closed_start(struct ht_fuse *f)
{
    f->passthrough.keeps_closed = knows_users() && pthread_create(&f->passthrough.thread, NULL, run, f) == 0;
}

void ht_passthrough_closed_stop(struct ht_fuse *f)
{
    if (!f->passthrough.keeps_closed)
        return;
    f->passthrough.keeps_closed = false;
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    f->passthrough.over = true;
    pthread_cond_signal(&f->passthrough.closed_changed);
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    pthread_join(f->passthrough.thread, NULL);
}
