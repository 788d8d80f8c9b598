/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handout_life.c - when an object is handed out and handed back, and whose memory goes when another one wants some.
 *
 *   none --hand out--> out --hand back--> back --its memory is wanted--> none
 *                       ^-----hand out-----'
 *
 * Out: somebody outside reads (and, when stores are expected, changes) the pages; the store is not asked. Back: nobody does; the memory
 * stays as a cache, until another object wants it.
 *
 * Lock: store.lock.
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/store/store_priv.h"

/* What is back goes, unless it is in use again or cannot be written. Lock held, let go meanwhile. */
static bool reclaim(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    bool done = ht_handed_try_free(o);
    if (done || o->extra->handed->out)
        return done;
    o->refs++;
    int rc = ht_handed_search(o);
    ht_store_unlock(s);
    ht_obj_clean(o, 0, UINT64_MAX);
    ht_store_lock(s);
    done = !rc && ht_handed_try_free(o);
    ht_obj_put_locked(o);
    return done;
}

void ht_handed_evict(struct ht_obj *o)
{
    if (!o->extra->handed->out)
        (void)reclaim(o);
}

/* The one that came back first. */
static struct ht_obj *oldest_back(struct ht_store *s)
{
    ht_list_for_each(p, &s->handed) {
        struct ht_handed *h = ht_list_entry(p, struct ht_handed, link);
        if (!h->out)
            return h->obj;
    }
    return NULL;
}

static bool has_room(const struct ht_store *s, uint64_t bytes)
{
    return s->handed_count < HT_HANDED_MAX && bytes <= s->opts.handout_bytes &&
        s->handed_bytes <= s->opts.handout_bytes - bytes;
}

/* There are few: no account has to be kept in step. What is back is nobody's, for it goes when another one wants the memory. */
bool ht_handed_user_may(const struct ht_store *s, uint32_t user, unsigned more, uint64_t more_bytes)
{
    uint64_t bytes = more_bytes, bytes_max = s->opts.handout_bytes / 4 * HT_HANDED_USER_QUARTERS;
    unsigned count = more, count_max = HT_HANDED_MAX / 4 * HT_HANDED_USER_QUARTERS;
    if (!user)
        return true;
    ht_list_for_each(p, &s->handed) {
        const struct ht_handed *h = ht_list_entry(p, struct ht_handed, link);
        if (!h->out || h->user != user)
            continue;
        bytes += ht_handed_footprint(h->memory.bytes);
        count++;
    }
    return bytes <= bytes_max && count <= count_max;
}

static bool may_go_out(const struct ht_obj *o)
{
    return o->s->opts.handout_bytes && !o->deleted && !o->dead && ht_obj_bytes_per_chunk(o) == HT_CHUNK_BYTES &&
        o->size;
}

/* Count it among those that have memory, which is made without the lock. Lock held, let go meanwhile. */
static int make_memory(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    uint64_t size = o->size;
    struct ht_obj *old;
    while (!has_room(s, ht_handed_footprint(size)) && (old = oldest_back(s)) != NULL)
        if (!reclaim(old))
            return -ENOSPC;
    if (!has_room(s, ht_handed_footprint(size)))
        return -ENOSPC;
    struct ht_handed *h = ht_obj_need_extra(o) ? NULL : calloc(1, sizeof(*h));
    if (!h)
        return -ENOMEM;
    s->handed_bytes += ht_handed_footprint(size);
    s->handed_count++;
    h->memory.nodes = &s->nodes;
    h->memory.near = ht_obj_near_all(o);
    ht_store_unlock(s);
    int rc = ht_shared_open(&h->memory, "hitrain-tensor", size);
    ht_store_lock(s);
    if (!rc && (o->extra->handed || o->size != size || !may_go_out(o))) {
        ht_shared_close(&h->memory);
        rc = -EBUSY;
    }
    if (rc) {
        s->handed_bytes -= ht_handed_footprint(size);
        s->handed_count--;
        free(h);
        return rc;
    }
    h->obj = o;
    ht_list_add_tail(&s->handed, &h->link);
    ht_obj_extra(o)->handed = h;
    return 0;
}

/* Lock held, let go meanwhile: it has memory then, and the user is within bounds, whatever others of his threads have got. */
static int prepare(struct ht_obj *o, uint32_t user)
{
    const struct ht_store *s = o->s;
    if (!may_go_out(o))
        return -EINVAL;
    if (!ht_handed_user_may(s, user, 1, ht_handed_footprint(o->size)))
        return -EDQUOT;
    int rc = o->extra->handed ? 0 : make_memory(o);
    if (rc)
        return rc;
    return ht_handed_user_may(s, user, 1, ht_handed_footprint(o->extra->handed->memory.bytes)) ? 0 : -EDQUOT;
}

int ht_obj_hand_out(struct ht_obj *o, int *out_fd)
{
    return ht_obj_hand_out_to(o, 0, out_fd);
}

int ht_obj_hand_out_to(struct ht_obj *o, uint32_t user, int *out_fd)
{
    struct ht_store *s = o->s;
    ht_store_lock(s);
    int rc = prepare(o, user);
    if (rc) {
        ht_store_unlock(s);
        return rc;
    }
    assert(!o->extra->handed->out);
    o->extra->handed->out = true;
    o->extra->handed->user = user;
    o->extra->handed->hand = ++s->hands;
    o->refs++;
    rc = ht_handed_read_in(o);
    if (!rc)
        rc = ht_handed_complete(o);
    if (!rc)
        ht_handed_trim(o);
    *out_fd = rc ? -1 : o->extra->handed->memory.fd;
    ht_store_unlock(s);
    if (rc)
        ht_obj_hand_back(o);
    return rc;
}

int ht_obj_expect_stores(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    ht_store_lock(s);
    struct ht_handed *h = o->extra->handed;
    assert(h && h->out);
    bool guarantee = !h->stores && !o->extra->guarantee_blocks;
    uint64_t size = o->size;
    ht_store_unlock(s);
    int rc = s->opts.read_only ? -EROFS : guarantee ? ht_obj_guarantee(o, size) : 0;
    if (rc)
        return rc;
    ht_store_lock(s);
    h->guaranteed |= guarantee;
    h->stores = true;
    h->quiet = 0;
    h->due_ns = 0;
    /* Whoever writes the pages themselves to a device now, and not a copy, has begun before: their chunks get free one by one. */
    rc = ht_handed_complete(o);
    ht_store_unlock(s);
    return rc;
}

void ht_obj_hand_back(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    ht_store_lock(s);
    struct ht_handed *h = o->extra->handed;
    assert(h && h->out);
    h->out = false;
    ht_list_del(&h->link);
    ht_list_add_tail(&s->handed, &h->link);
    ht_obj_put_locked(o);
    ht_store_unlock(s);
}
