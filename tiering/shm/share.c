/* SPDX-License-Identifier: Apache-2.0 */
/*
 * share.c - the share of memory: how much is in use, and by whom.
 *
 * A share that is lent has no memory of its own. Before a file gets memory the DRAM tier gives as much to the system
 * (ht_arena_lend), and it takes that back when the file's memory is gone. So both together never have more than dram=.
 * Slots come from unused memory first, then from clean images, then from images that updates work on.
 */
#include "tiering/data/health.h"
#include "tiering/data/write_batch.h"
#include "tiering/shm/shm_priv.h"

enum { WRITTEN_AT_ONCE = 64, HELD_MAX = 4096 }; /* chunks; pairs that stay, in one hold of the lock */

static bool lacks(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    return s->opts.shm_lent && ht_arena_lent_bytes(s->arena) < s->shm->used_bytes;
}

bool ht_shm_may_write(struct ht_store *s)
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
        if (!lent && dirty != HT_SLOT_NONE && whom == HT_LEND_ANY && !slice->last && ht_shm_may_write(s))
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
