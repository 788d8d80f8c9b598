/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parked.c - reads of bytes whose update is queued or running.
 *
 * The request leaves its worker and waits in a struct parked. The thread that completed the update reads
 * and answers. Structs come from a pool that only grows, so nothing is allocated once the deepest queue has been seen.
 *
 *   free --park_read--> waiting --wake--> answered --> free
 *                          '--interrupt (cancel won)--> EINTR --> free
 *
 * Invariants:
 *  1. A struct is reused only after its waiter was woken or cancelled, so the optimizer never sees a reused one.
 *  2. parked.req is NULL unless the request is waiting; the thread that clears it under park_lock answers it. An
 *     interrupt that comes late finds another request (or none) there and does nothing.
 *
 * Locks: park_lock, above the optimizer's lock; wake is called with no lock held.
 */
#include "fs/fuse/fuse_priv.h"

#include "tiering/base/dump.h"

enum { PARKED_AT_START = 64 };

struct parked {
    struct ht_list link; /* in park_free or parked */
    struct ht_waiter waiter;
    struct ht_fuse *fuse;
    fuse_req_t req;
    struct ht_obj *obj; /* a reference: the file may be released while the session ends */
    uint64_t off, began_ns;
    size_t len;
    bool waiting;     /* the optimizer has the waiter */
    bool interrupted; /* before it had */
};

static struct parked *make_parked(struct ht_fuse *f)
{
    struct parked *p = calloc(1, sizeof(*p));

    if (p) {
        p->fuse = f;
        ht_list_init(&p->link);
    }
    return p;
}

static void put_free(struct parked *p)
{
    struct ht_fuse *f = p->fuse;

    if (p->obj)
        ht_obj_put(p->obj);
    p->obj = NULL;
    ht_mutex_lock(ht_fuse_park_lock(f));
    ht_list_del(&p->link);
    ht_list_add_tail(&f->park_free, &p->link);
    ht_mutex_unlock(ht_fuse_park_lock(f));
}

static struct parked *take_free(struct ht_fuse *f)
{
    struct parked *p = NULL;

    ht_mutex_lock(ht_fuse_park_lock(f));
    if (!ht_list_empty(&f->park_free)) {
        p = ht_list_entry(f->park_free.next, struct parked, link);
        ht_list_del(&p->link);
    }
    ht_mutex_unlock(ht_fuse_park_lock(f));
    return p ? p : make_parked(f);
}

int ht_park_init(struct ht_fuse *f)
{
    ht_list_init(&f->park_free);
    ht_list_init(&f->parked);
    for (unsigned i = 0; i < PARKED_AT_START; i++) {
        struct parked *p = make_parked(f);
        if (!p)
            return -ENOMEM;
        ht_list_add_tail(&f->park_free, &p->link);
    }
    return 0;
}

static fuse_req_t claim_request(struct parked *p)
{
    fuse_req_t req;

    ht_mutex_lock(ht_fuse_park_lock(p->fuse));
    req = p->req;
    p->req = NULL;
    p->waiting = false;
    ht_mutex_unlock(ht_fuse_park_lock(p->fuse));
    return req;
}

static void wake_parked(struct ht_waiter *w)
{
    struct parked *p = ht_container_of(w, struct parked, waiter);
    fuse_req_t req = claim_request(p);

    if (req && ht_optim_readable(p->fuse->optim, ht_obj_id(p->obj), p->off, p->len, NULL) == -EIO)
        ht_reply(req, -EIO);
    else if (req)
        ht_reply_read(req, p->obj, NULL, p->off, p->len, HT_TRAFFIC_PARAM, p->began_ns);
    put_free(p);
}

static void on_interrupt(fuse_req_t req, void *data)
{
    struct parked *p = data;
    bool mine = false;

    ht_mutex_lock(ht_fuse_park_lock(p->fuse));
    if (p->req == req && !p->waiting)
        p->interrupted = true;
    else if (p->req == req)
        mine = ht_optim_cancel(p->fuse->optim, &p->waiter);
    if (mine)
        p->req = NULL;
    ht_mutex_unlock(ht_fuse_park_lock(p->fuse));
    if (!mine)
        return;
    put_free(p);
    fuse_reply_err(req, EINTR);
}

/*
 * As ht_optim_readable, or -EINTR. Unless it is -EAGAIN the caller has the request (and p) back, and answers at once.
 */
static int wait_for_update(struct parked *p)
{
    struct ht_fuse *f = p->fuse;
    int rc = -EINTR;

    fuse_req_interrupt_func(p->req, on_interrupt, p);
    ht_mutex_lock(ht_fuse_park_lock(f));
    if (!p->interrupted) {
        p->waiting = true;
        ht_list_add_tail(&f->parked, &p->link);
        rc = ht_optim_readable(f->optim, ht_obj_id(p->obj), p->off, p->len, &p->waiter);
    }
    if (rc != -EAGAIN) {
        p->req = NULL;
        p->waiting = false;
        ht_list_del(&p->link);
    }
    ht_mutex_unlock(ht_fuse_park_lock(f));
    return rc;
}

void ht_park_read(struct ht_fuse *f, fuse_req_t req, struct ht_open *o, uint64_t off, size_t len)
{
    int rc = ht_optim_readable(f->optim, o->ino, off, len, NULL);

    if (!rc)
        ht_reply_read(req, o->obj, ht_open_reader(o, off, len), off, len, HT_TRAFFIC_PARAM, 0);
    else if (rc != -EAGAIN)
        ht_reply(req, rc);
    if (rc != -EAGAIN)
        return;
    struct parked *p = take_free(f);
    if (!p) {
        ht_reply(req, -ENOMEM);
        return;
    }
    p->req = req;
    p->off = off;
    p->len = len;
    p->began_ns = ht_now_ns();
    p->interrupted = false;
    p->waiter.wake = wake_parked;
    p->obj = ht_obj_get(f->store, o->ino);
    if (!p->obj) {
        p->req = NULL;
        put_free(p);
        ht_reply(req, -ESTALE);
        return;
    }
    atomic_fetch_add_explicit(&f->traffic->parked_reads, 1, memory_order_relaxed);
    rc = wait_for_update(p);
    if (rc == -EAGAIN)
        return;
    if (rc)
        ht_reply(req, rc);
    else
        ht_reply_read(req, p->obj, NULL, off, len, HT_TRAFFIC_PARAM, 0);
    put_free(p);
}

/* --------------------------------------------------------------------- end */

static struct parked *take_parked(struct ht_fuse *f)
{
    struct parked *p = NULL;

    ht_mutex_lock(ht_fuse_park_lock(f));
    if (!ht_list_empty(&f->parked))
        p = ht_list_entry(f->parked.next, struct parked, link);
    if (p && !(p->waiting && ht_optim_cancel(f->optim, &p->waiter)))
        p = NULL; /* another thread wakes it now: check again */
    if (p)
        ht_list_del(&p->link);
    ht_mutex_unlock(ht_fuse_park_lock(f));
    return p;
}

static bool any_parked(struct ht_fuse *f)
{
    ht_mutex_lock(ht_fuse_park_lock(f));
    bool any = !ht_list_empty(&f->parked);
    ht_mutex_unlock(ht_fuse_park_lock(f));
    return any;
}

void ht_park_finish(struct ht_fuse *f)
{
    while (any_parked(f)) {
        struct parked *p = take_parked(f);
        fuse_req_t req = p ? claim_request(p) : NULL;
        if (req)
            fuse_reply_err(req, ENOTCONN);
        if (p)
            put_free(p);
        else
            ht_sleep_ns(1000000);
    }
    ht_list_for_each_entry_safe(p, &f->park_free, struct parked, link)
        free(p);
}

/* -------------------------------------------------------------------- dump */

enum { DUMP_READS_MAX = 64 };

void ht_park_dump(struct ht_fuse *f, struct ht_dump *d)
{
    unsigned count = 0;

    if (!ht_dump_lock(d, ht_fuse_park_lock(f), "parked reads"))
        return;
    ht_list_for_each_entry(p, &f->parked, const struct parked, link) {
        if (!p->req || count++ >= DUMP_READS_MAX)
            continue;
        ht_dump_put(d, "  read of %zu bytes at %llu of inode %llu waits for an update for ", p->len,
                    (unsigned long long)p->off, (unsigned long long)ht_obj_id(p->obj));
        ht_dump_age(d, p->began_ns);
        ht_dump_put(d, "\n");
        ht_dump_id(d, ht_obj_id(p->obj));
    }
    if (count > DUMP_READS_MAX)
        ht_dump_put(d, "  and %u more reads\n", count - DUMP_READS_MAX);
    ht_mutex_unlock(ht_fuse_park_lock(f));
}
