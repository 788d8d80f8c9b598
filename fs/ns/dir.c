/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dir.c - the order of entries within a directory, and reading it.
 *
 * Slots are an array by ascending cookie, where an entry finds its own by its cookie. A new entry goes to the end with
 * the next cookie; a removed one leaves a mark that keeps its cookie, so that a binary search still works. Marks are
 * squeezed out when the array is full or mostly marks: cookies stay as they are, so a walk that stopped anywhere
 * continues right after that place.
 *
 * Invariant: slot_cap >= live + gone, so that GONE entries can come back without memory.
 * ns.lock held, for writing where something changes.
 */
#include "fs/ns/ns_priv.h"

/* Cookies 1 and 2 are for the caller, which lists "." and "..". */
enum { SLOTS_MIN = 8, SLOTS_LARGE = 4096, COOKIE_FIRST = 3, SAMPLES = 16 };

static uint64_t slot_of_entry(struct ht_ns_entry *e)
{
    return (uint64_t)(uintptr_t)e;
}

static uint64_t slot_cookie(uint64_t slot) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return (slot & 1) != 0 ? slot >> 1 : ((struct ht_ns_entry *)(uintptr_t)slot)->cookie;
}

struct ht_ns_entry *ht_ns_dir_entry(const struct ht_ns_dir *d, uint32_t slot)
{
    uint64_t s = d->slots[slot];

    return (s & 1) != 0 ? NULL : (struct ht_ns_entry *)(uintptr_t)s;
}

struct ht_ns_entry *ht_ns_dir_last_entry(const struct ht_ns_dir *d)
{
    uint32_t s = d->slot_count;

    while (!ht_ns_dir_entry(d, s - 1))
        s--;
    return ht_ns_dir_entry(d, s - 1);
}

static void squeeze(struct ht_ns_dir *d) HT_REQUIRES(HT_LOCK_NAMES)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < d->slot_count; i++) {
        struct ht_ns_entry *e = ht_ns_dir_entry(d, i);
        if (e)
            d->slots[n++] = slot_of_entry(e);
    }
    d->slot_count = n;
}

static int resize(struct ht_ns *ns, struct ht_ns_dir *d, uint64_t cap) HT_REQUIRES(HT_LOCK_NAMES)
{
    uint64_t *slots;

    if (cap > UINT32_MAX)
        return -ENOSPC;
    slots = realloc(d->slots, cap * sizeof(*slots));
    if (!slots)
        return -ENOMEM;
    ns->meta_bytes += (cap - d->slot_cap) * sizeof(*slots);
    d->slots = slots;
    d->slot_cap = (uint32_t)cap;
    return 0;
}

/* Large ones grow by a third: unused slots are memory, too. */
static uint64_t larger(const struct ht_ns_dir *d) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    uint64_t cap = d->slot_cap;

    return cap < SLOTS_MIN ? SLOTS_MIN : cap < SLOTS_LARGE ? 2 * cap : cap + cap / 3;
}

/* Grown while a quarter would still be free after squeezing, so that the cost of squeezing is spread. */
int ht_ns_dir_reserve(struct ht_ns *ns, struct ht_ns_dir *d, uint32_t count)
{
    uint64_t want = (uint64_t)d->live + d->gone + count;

    if (want * 4 <= (uint64_t)d->slot_cap * 3 || (d->slot_cap >= want && d->slot_count < d->slot_cap))
        return 0;
    int rc = resize(ns, d, larger(d));
    return rc != 0 && want <= d->slot_cap ? 0 : rc;
}

void ht_ns_dir_append(struct ht_ns_dir *d, struct ht_ns_entry *e)
{
    if (d->slot_count == d->slot_cap)
        squeeze(d);
    if (d->next_cookie < COOKIE_FIRST)
        d->next_cookie = COOKIE_FIRST;
    e->cookie = d->next_cookie++;
    d->slots[d->slot_count++] = slot_of_entry(e);
    d->live++;
}

static uint32_t slot_of(const struct ht_ns_dir *d, uint64_t cookie) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ht_ns_dir_seek(d, cookie - 1);
}

void ht_ns_dir_remove(struct ht_ns *ns, struct ht_ns_dir *d, struct ht_ns_entry *e)
{
    d->slots[slot_of(d, e->cookie)] = e->cookie << 1 | 1;
    d->live--;
    while (d->slot_count > 0 && !ht_ns_dir_entry(d, d->slot_count - 1))
        d->slot_count--;
    if (d->slot_cap > 8 * SLOTS_MIN && (d->live + d->gone) * 8ull < d->slot_cap) {
        squeeze(d);
        (void)!resize(ns, d, d->slot_cap / 4); /* without memory it stays larger than it needs to be */
    }
}

void ht_ns_dir_take_over(struct ht_ns_dir *d, struct ht_ns_entry *old, struct ht_ns_entry *e)
{
    e->cookie = old->cookie;
    d->slots[slot_of(d, e->cookie)] = slot_of_entry(e);
}

uint32_t ht_ns_dir_seek(const struct ht_ns_dir *d, uint64_t cookie)
{
    uint32_t slot = 0;

    HT_PARTITION_POINT(slot, d->slot_count, i, slot_cookie(d->slots[i]) <= cookie);
    return slot;
}

/* --------------------------------------------------------------- reading */

static int read_slots(const struct ht_ns_dir *d, uint64_t cookie, int (*fn)(void *ctx, const struct ht_ns_dirent *e),
                      void *ctx) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    for (uint32_t i = ht_ns_dir_seek(d, cookie); i < d->slot_count; i++) {
        struct ht_ns_entry *e = ht_ns_dir_entry(d, i);
        if (!e)
            continue;
        struct ht_ns_dirent out = {e->name, e->inode->ino, e->inode->cur.mode & S_IFMT, e->cookie};
        if (fn(ctx, &out) != 0)
            break;
    }
    return 0;
}

int ht_ns_readdir(struct ht_ns *ns, uint64_t dir, uint64_t cookie, int (*fn)(void *ctx, const struct ht_ns_dirent *e),
                  void *ctx)
{
    struct ht_ns_inode *i = ht_ns_read_begin(ns, dir);
    int rc = !i ? -ESTALE : !ht_ns_is_dir(i) ? -ENOTDIR : read_slots(i->u.dir, cookie, fn, ctx);

    ht_rwlock_unlock(ht_ns_lock(ns));
    return rc;
}

uint64_t ht_ns_dir_last(struct ht_ns *ns, uint64_t dir)
{
    uint64_t last = 0;
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, dir);

    if (i && ht_ns_is_dir(i) && i->u.dir->next_cookie > 0)
        last = i->u.dir->next_cookie - 1;
    ht_rwlock_unlock(ht_ns_lock(ns));
    return last;
}

static bool sample_is_known(const struct ht_ns_dir *d) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    uint32_t step = d->slot_count / SAMPLES + 1;

    for (uint32_t i = 0; i < d->slot_count; i += step) {
        const struct ht_ns_entry *e = ht_ns_dir_entry(d, i);
        if (e && atomic_load_explicit(&e->inode->lookups, memory_order_relaxed) == 0)
            return false;
    }
    return true;
}

bool ht_ns_entries_known(struct ht_ns *ns, uint64_t dir)
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, dir);
    bool known = i && ht_ns_is_dir(i) && sample_is_known(i->u.dir);

    ht_rwlock_unlock(ht_ns_lock(ns));
    return known;
}

uint64_t ht_ns_parent(struct ht_ns *ns, uint64_t dir)
{
    uint64_t parent = 0;
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, dir);

    if (i && ht_ns_is_dir(i) && i->u.dir->self)
        parent = i->u.dir->self->dir->ino;
    ht_rwlock_unlock(ht_ns_lock(ns));
    return parent;
}
