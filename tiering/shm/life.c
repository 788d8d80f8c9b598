/* SPDX-License-Identifier: Apache-2.0 */
/*
 * life.c - when an object is opened as shared memory and closed, and whose memory it gets: that of the share, of the
 * DRAM tier, or of another object.
 *
 *   none --open--> open --close--> closed --its memory is wanted--> none
 *                       ^------open-------'
 *
 * Open: a program outside reads (and, when stores are expected, changes) the pages, without a call to the store.
 * Closed: no program does; the memory stays as a cache, until another object wants it.
 *
 * Its content is read into the memory before a program outside has that: several chunks in flight, each read to its
 * final place. Inside a chunk is held until it is verified, so that no reader sees unverified bytes. The thread holds
 * chunks in ascending order, and waits for another one with none.
 *
 * Lock: store.lock.
 */

#include "tiering/api/object.h"
#include "tiering/object/space.h"
#include "tiering/data/data.h"
#include "tiering/data/write_batch.h"
#include "tiering/shm/shm_priv.h"

enum { WRITTEN_AT_ONCE = 64, HELD_MAX = 4096 }; /* chunks; pairs that stay, in one hold of the lock */
#define WAIT_NS_MAX UINT64_C(2000000000)        /* an open waits so long for content that has to be written */

/* ---------------------------------------------------------------- the share of memory */

/*
 * A share that is lent has no memory of its own. Before a file gets memory the DRAM tier gives as much to the system
 * (ht_arena_lend), and it takes that back when the file's memory is gone. So both together never have more than dram=.
 * Slots come from unused memory first, then from clean images, then from images that updates work on.
 */
static bool lacks(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    return s->opts.shm_lent && ht_arena_lent_bytes(s->arena) < s->shm->used_bytes;
}

/* Does no device keep a thread waiting that writes images for their memory? */
static bool may_write(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned i = 0; i < s->dev_count; i++)
        if (s->dev[i] && ht_store_check_device(s, i) == HT_HEALTH_NOT_ANSWERING)
            return false;
    return true;
}

/* Writes an image, and dirty ones beside it. Releases the lock in between. */
static void write_image(struct ht_store *s, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_image *im = ht_arena_image(s->arena, slot);
    struct ht_obj *o = im->owner;
    uint64_t first = im->index / WRITTEN_AT_ONCE * WRITTEN_AT_ONCE;

    o->refs++;
    ht_store_unlock(s);
    ht_obj_clean(o, first, first + WRITTEN_AT_ONCE);
    ht_store_lock(s);
    ht_obj_put_locked(o);
}

/* Looks at all pairs once; at those that may have been dirty or held twice. */
static void lend(struct ht_store *s, enum ht_lend whom, struct ht_slice *slice, uint64_t until_ns)
    HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t pairs = (ht_arena_bytes(s->arena) + ht_arena_lent_bytes(s->arena)) / HT_ARENA_LEND_BYTES;
    uint64_t left = ht_min_u64(pairs * (whom == HT_LEND_ANY ? 2 : 1), slice->last ? HELD_MAX : UINT64_MAX);
    uint32_t dirty;

    while (left && lacks(s) && (slice->last || ht_now_ns() < until_ns)) {
        bool lent = ht_arena_lend(s->arena, whom, &dirty);
        if (!lent && whom == HT_LEND_FREE)
            break; /* none is left */
        if (!lent && dirty != HT_SLOT_NONE && whom == HT_LEND_ANY && !slice->last && may_write(s))
            write_image(s, dirty);
        left -= !lent;
        if (!slice->last)
            ht_slice_next(s, slice);
    }
}

bool ht_shm_may_use(const struct ht_store *s, uint64_t bytes)
{
    return bytes <= s->shm->share_bytes && (!s->opts.shm_lent || ht_arena_may_lend(s->arena, bytes));
}

int ht_shm_take(struct ht_store *s, uint64_t bytes, enum ht_lend most, uint64_t until_ns)
{
    struct ht_slice slice = {.last = !until_ns};

    s->shm->used_bytes += bytes; /* at once, so that no other thread gives back slots lent for it */
    for (enum ht_lend whom = HT_LEND_FREE; whom <= most && ht_shm_may_use(s, s->shm->used_bytes); whom++)
        lend(s, whom, &slice, until_ns);
    if (ht_arena_under_pressure(s->arena)) /* of the rest */
        s->waits.wakes.writeback = s->waits.wakes.any = true;
    if (!lacks(s)) {
        s->shm->owes &= s->shm->used_bytes > s->shm->share_bytes;
        return 0;
    }
    ht_shm_give(s, bytes);
    return -ENOSPC;
}

void ht_shm_give(struct ht_store *s, uint64_t bytes)
{
    s->shm->used_bytes -= bytes;
    while (ht_arena_lent_bytes(s->arena) >= s->shm->used_bytes + HT_ARENA_LEND_BYTES && ht_arena_take_back(s->arena)) {
        ht_wake_one_for_slot(s);
        ht_wake_one_for_slot(s);
    }
}

/*
 * There are few, so a sum costs less than an account. A closed object counts for no user: it is dropped when another
 * one needs the memory.
 */
bool ht_shm_user_may(const struct ht_store *s, uint32_t user, unsigned more, uint64_t more_bytes)
{
    uint64_t bytes = more_bytes, bytes_max = s->shm->share_bytes / 4 * HT_SHM_USER_QUARTERS;
    unsigned count = more, count_max = HT_SHM_IMAGES_MAX / 4 * HT_SHM_USER_QUARTERS;

    if (!user)
        return true;
    ht_list_for_each_entry(h, &s->shm->all, const struct ht_shm, link) {
        if (!h->is_open || h->user != user)
            continue;
        bytes += ht_shm_footprint(h->memory.bytes);
        count++;
    }
    return bytes <= bytes_max && count <= count_max;
}

/* --------------------------------------------------------- making and giving back */

bool ht_shm_reclaim(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    bool done = ht_shm_try_free(o);

    if (done || o->extra->shm->is_open || !may_write(s))
        return done;
    o->refs++;
    int rc = ht_shm_scan_obj(o);
    ht_store_unlock(s);
    ht_obj_clean(o, 0, UINT64_MAX);
    ht_store_lock(s);
    done = !rc && ht_shm_try_free(o);
    ht_obj_put_locked(o);
    return done;
}

/* The one that was closed first after that. */
static const struct ht_shm *next_closed(const struct ht_store *s, uint64_t shut_ns) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_list_for_each_entry(h, &s->shm->all, const struct ht_shm, link)
        if (!h->is_open && h->shut_ns > shut_ns)
            return h;
    return NULL;
}

/* Frees the closed object that was closed first after *shut_ns, of those that can be freed; moves that there. */
static bool reclaim_next(struct ht_store *s, uint64_t *shut_ns) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_shm *h;

    while ((h = next_closed(s, *shut_ns))) {
        *shut_ns = h->shut_ns;
        if (ht_shm_reclaim(h->obj))
            return true;
    }
    return false;
}

/* After a commit most can be freed without a write. */
void ht_shm_give_closed(struct ht_store *s)
{
    uint64_t old_ns = ht_now_ns() - HT_SHM_GIVE_NS, at = 0;
    struct ht_slice slice = {0};
    const struct ht_shm *h;

    ht_store_lock(s);
    bool full = s->opts.shm_lent && !ht_arena_free_slots(s->arena);
    while (full && (h = next_closed(s, at)) && (h->shut_ns < old_ns || !ht_arena_free_slots(s->arena))) {
        at = h->shut_ns;
        (void)ht_shm_try_free(h->obj);
        ht_slice_next(s, &slice);
    }
    at = 0;
    if (full && !ht_arena_free_slots(s->arena))
        (void)reclaim_next(s, &at);
    ht_store_unlock(s);
}

static bool may_go_out(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    return o->s->shm->share_bytes && !o->deleted && !o->dead && ht_obj_bytes_per_chunk(o) == HT_CHUNK_BYTES &&
        o->size && !ht_obj_cold_blocks(o); /* which no thread that holds a chunk waits for */
}

/* Bytes of objects that no program has open. */
static uint64_t closed_bytes(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t bytes = 0;

    ht_list_for_each_entry(h, &s->shm->all, const struct ht_shm, link)
        bytes += h->is_open ? 0 : ht_shm_footprint(h->memory.bytes);
    return bytes;
}

/* May release the lock. */
static int take(struct ht_store *s, uint64_t size, uint64_t until_ns) HT_REQUIRES(HT_LOCK_STORE)
{
    if (s->shm->count == HT_SHM_IMAGES_MAX || !ht_shm_may_use(s, s->shm->used_bytes + ht_shm_footprint(size)))
        return -ENOSPC;
    s->shm->count++;
    int rc = ht_shm_take(s, ht_shm_footprint(size), HT_LEND_ANY, until_ns);
    s->shm->count -= rc != 0;
    return rc;
}

/* Counts it among the objects with memory, and makes the memory without the lock. Releases the lock in between. */
static int make_memory(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    uint64_t size = o->size, until_ns = ht_now_ns() + WAIT_NS_MAX, shut_ns = 0;

    /* No memory is taken from others for what does not fit even so. */
    if (!ht_shm_may_use(s, s->shm->used_bytes - closed_bytes(s) + ht_shm_footprint(size)))
        return -ENOSPC;
    struct ht_shm *h = ht_obj_need_extra(o) ? NULL : calloc(1, sizeof(*h));
    if (!h)
        return -ENOMEM;
    int rc;
    while ((rc = take(s, size, until_ns)) && ht_now_ns() < until_ns && reclaim_next(s, &shut_ns))
        ;
    if (rc) {
        free(h);
        return rc;
    }
    h->memory.nodes = &s->numa.nodes;
    h->memory.numa_index = ht_obj_common_numa_index(o);
    ht_store_unlock(s);
    rc = ht_shared_open(&h->memory, "hitrain-tensor", size);
    ht_store_lock(s);
    if (!rc && (o->extra->shm || o->size != size || !may_go_out(o))) {
        ht_shared_close(&h->memory);
        rc = -EBUSY;
    }
    if (rc) {
        s->shm->count--;
        ht_shm_give(s, ht_shm_footprint(size));
        free(h);
        return rc;
    }
    h->obj = o;
    h->shut_ns = ht_now_ns();
    ht_list_add_tail(&s->shm->all, &h->link);
    ht_obj_extra(o)->shm = h;
    return 0;
}

/*
 * Lock held; releases it in between: it has memory then, and the user is within bounds, whatever the user's other
 * threads have got.
 */
static int prepare(struct ht_obj *o, uint32_t user) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_store *s = o->s;

    if (!may_go_out(o))
        return -EINVAL;
    if (!ht_shm_user_may(s, user, 1, ht_shm_footprint(o->size)))
        return -EDQUOT;
    int rc = o->extra->shm ? 0 : make_memory(o);
    if (rc)
        return rc;
    return ht_shm_user_may(s, user, 1, ht_shm_footprint(o->extra->shm->memory.bytes)) ? 0 : -EDQUOT;
}

/* ---------------------------------------------------------------- content */

/* The chunk has nothing but a reference, and its blocks fit into the file. */
static bool may_read_here(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = ht_chunk_ref(c);

    return c->slot == HT_SLOT_NONE && ref && ht_ref_holds(ref) && !(c->flags & HT_CH_BAD) &&
        ref->stored <= ht_round_up(ht_chunk_len(o, index), HT_BLOCK_BYTES);
}

/* Chunk held exclusively. Releases the lock in between. */
static void start_read(struct ht_read_batch *all, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = ht_shm_populate(o, c, index); /* earlier requests are in flight at the same time */

    if (!rc)
        rc = ht_shm_attach(o, c, index);
    if (!rc) {
        ht_read_batch_start(all, o, c, index);
        return;
    }
    all->error = rc;
    ht_chunk_unlock_exclusive(o, c, index);
}

/*
 * Returns the chunk, if it is to be read, with no request in flight that would wait for this thread. Lock held;
 * releases it in between.
 */
static struct ht_chunk *make_way(struct ht_read_batch *all, struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    if (all->count == HT_READ_BATCH_MAX)
        ht_read_batch_finish(all);
    struct ht_chunk *c = ht_chunk_find(o, index);
    if (c && may_read_here(o, c, index) && (c->exclusive || c->shared)) {
        ht_read_batch_finish_all(all);
        c = ht_chunk_find(o, index);
    }
    return c && may_read_here(o, c, index) ? c : NULL;
}

/* Reads chunks without an image, before any program outside has the memory. Releases the lock in between. */
static int read_in(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_read_batch all = {.s = s, .report = true};

    ht_store_unlock(s);
    all.ring = ht_store_ring(s);
    ht_store_lock(s);
    if (!all.ring)
        return -ENOMEM;
    struct ht_slice slice = {0};
    ht_chunk_for_each_busy(c, o, index) {
        if (all.error || index << o->chunk_shift >= o->size)
            break;
        ht_slice_next(s, &slice);
        c = make_way(&all, o, index);
        if (!c)
            continue;
        ht_chunk_lock_exclusive(o, c, index);
        if (may_read_here(o, c, index))
            start_read(&all, o, c, index);
        else
            ht_chunk_unlock_exclusive(o, c, index);
    }
    ht_read_batch_finish_all(&all);
    return all.error;
}

/* ---------------------------------------------------------- open and close */

int ht_obj_shm_open_for(struct ht_obj *o, uint32_t user, int *out_fd)
{
    struct ht_store *s = o->s;

    if (s->opts.shm_lent)
        ht_pinned_stop_populating(ht_arena_memory(s->arena));
    ht_store_lock(s);
    int rc = prepare(o, user);
    if (rc) {
        ht_store_unlock(s);
        return rc;
    }
    assert(!o->extra->shm->is_open);
    o->extra->shm->is_open = true;
    o->extra->shm->stores = false;
    o->extra->shm->user = user;
    o->extra->shm->open_id = ++s->shm->opens;
    o->refs++;
    rc = read_in(o);
    if (!rc)
        rc = ht_shm_complete(o);
    if (!rc)
        ht_shm_trim(o);
    *out_fd = rc ? -1 : o->extra->shm->memory.fd;
    ht_store_unlock(s);
    if (rc)
        ht_obj_shm_close(o);
    return rc;
}

int ht_obj_shm_expect_stores(struct ht_obj *o)
{
    struct ht_store *s = o->s;

    ht_store_lock(s);
    struct ht_shm *h = o->extra->shm;
    assert(h && h->is_open);
    bool reserve = !o->extra->may_be_dirty && !o->extra->rewrite_reserve_blocks;
    int rc = s->opts.read_only ? -EROFS : reserve ? ht_obj_set_rewrite_reserve(o, o->size, NULL) : 0;
    if (rc) {
        ht_store_unlock(s);
        return rc;
    }
    h->stores = true; /* from here on no scan ends them */
    h->open_id = ++s->shm->opens;
    ht_obj_extra(o)->shm_reserve |= reserve;
    ht_obj_extra(o)->may_be_dirty = ht_obj_extra(o)->shm_stored = true;
    ht_obj_note_edit(o); /* programs may store into it from now on, unseen */
    h->quiet = 0;
    h->due_ns = 0;
    /* Earlier device writes may read the pages themselves, and not a copy: their chunks become free one by one. */
    rc = ht_shm_complete(o);
    ht_store_unlock(s);
    return rc;
}

void ht_obj_shm_expect_no_stores(struct ht_obj *o)
{
    struct ht_store *s = o->s;

    ht_store_lock(s);
    assert(o->extra->shm && o->extra->shm->is_open);
    o->extra->shm->stores = false;
    ht_store_unlock(s);
}

void ht_obj_shm_close(struct ht_obj *o)
{
    struct ht_store *s = o->s;

    ht_store_lock(s);
    struct ht_shm *h = o->extra->shm;
    assert(h && h->is_open);
    h->is_open = false;
    h->shut_ns = ht_now_ns();
    ht_list_del(&h->link);
    ht_list_add_tail(&s->shm->all, &h->link);
    ht_obj_put_locked(o);
    ht_store_unlock(s);
}
