/* SPDX-License-Identifier: Apache-2.0 */
/*
 * writeback.c - which dirty images are written, for whom: of a range, an object, a scope, or any to make room. writes.c says how.
 */
#include <stdlib.h>

#include "tiering/store/store_priv.h"

enum {
    BATCH = 16,
    FAILED_MAX = 16,
    TRIED_MAX = 256,
};

static bool dirty(struct ht_store *s, const struct ht_chunk *c)
{
    return c->slot != HT_SLOT_NONE && ht_arena_image(s->arena, c->slot)->dirty;
}

static bool is_to_be_written(const struct ht_writes *w, const struct ht_chunk *c)
{
    return c && (c->writing || dirty(w->s, c));
}

/*
 * Write back one chunk if it is still dirty, waiting for its lock. One that we are writing ourselves would never get free: finish first.
 * Finishing lets go of the store's lock, so the chunk is looked up again.
 */
static void write_chunk(struct ht_writes *w, struct ht_obj *o, uint64_t index)
{
    struct ht_store *s = w->s;
    struct ht_chunk *c = ht_chunk_find(o, index);
    while (is_to_be_written(w, c) && (ht_writes_full(w) || (w->count && (c->exclusive || c->shared)))) {
        ht_writes_finish(w);
        c = ht_chunk_find(o, index);
    }
    if (!is_to_be_written(w, c))
        return;
    ht_chunk_lock_exclusive(s, c);
    if (!dirty(s, c)) {
        ht_chunk_unlock_exclusive(o, c, index);
        return;
    }
    int rc = ht_writes_start(w, o, c, index);
    if (rc)
        ht_writes_note_error(w, rc);
}

/*
 * Chunks [first, last). What cannot be written holds up nothing else: every chunk is tried. A write that somebody else
 * has in flight counts as dirty until it is done.
 */
static void write_range(struct ht_writes *w, struct ht_obj *o, uint64_t first, uint64_t last)
{
    struct ht_chunk *c;
    uint64_t index = first;
    ht_chunk_for_each_from(c, o, index)
    {
        const struct ht_leaf_head *leaf = ht_chunk_leaf(c);
        if (index >= last || (!o->dirty && !o->writing))
            break;
        if (!leaf->dirty && !leaf->writing)
            index = ht_leaf_last(index);
        else if (is_to_be_written(w, c))
            write_chunk(w, o, index);
    }
}

static void write_object(struct ht_writes *w, struct ht_obj *o)
{
    write_range(w, o, 0, UINT64_MAX);
}

void ht_obj_clean(struct ht_obj *o, uint64_t first, uint64_t last)
{
    struct ht_store *s = o->s;
    struct ht_writes *w = ht_writes_open(s);
    if (!w)
        return;
    ht_store_lock(s);
    write_range(w, o, first, last);
    (void)ht_writes_close(w);
    ht_store_unlock(s);
}

int ht_obj_writeback(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    if (o->obj_class == HT_CLASS_SCRATCH) /* goes to a device only when memory is short */
        return 0;
    int found = ht_obj_find_changes(o);
    struct ht_writes *w = ht_writes_open(s);
    if (!w)
        return -ENOMEM;
    ht_store_lock(s);
    write_object(w, o);
    int rc = ht_writes_close(w);
    if (!rc)
        rc = o->error ? o->error : found;
    if (!o->lost)
        o->error = 0;
    ht_store_unlock(s);
    return rc;
}

int ht_obj_writeback_flushed(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct ht_rounds r = HT_ROUNDS_INIT;
    int rc;
    do {
        ht_rounds_next(s, &r);
        rc = ht_obj_writeback(o);
        if (rc)
            break;
        ht_store_lock(s);
        uint32_t devices = ht_obj_unflushed_locked(o);
        ht_store_unlock(s);
        rc = ht_flush_written(s, devices, &r);
    } while (rc == -EAGAIN);
    return rc;
}

static int write_scope(struct ht_store *s, uint64_t scope)
{
    struct ht_writes *w = ht_writes_open(s);
    if (!w)
        return -ENOMEM;
    struct ht_obj **objs;
    size_t count;
    ht_store_lock(s);
    int rc = ht_scope_collect(s, scope, &objs, &count);
    for (size_t i = 0; !rc && i < count; i++)
        if (!scope || !w->error) /* a model root is published as a whole or not at all */
            write_object(w, objs[i]);
    int wrc = ht_writes_close(w);
    for (size_t i = 0; !rc && i < count; i++) {
        /* A commit of a root reports what failed since the last one. Outside, fsync and close of the file do. */
        if (scope && objs[i]->error && !wrc)
            wrc = objs[i]->error;
        if (scope && !objs[i]->lost)
            objs[i]->error = 0;
        ht_obj_put_locked(objs[i]);
    }
    ht_store_unlock(s);
    if (!rc)
        free(objs);
    return rc ? rc : wrc;
}

int ht_scope_writeback(struct ht_store *s, uint64_t scope)
{
    int found = ht_handed_find_changes(s, scope), rc = ht_scope_write(s, scope);
    return found ? found : rc;
}

int ht_scope_write(struct ht_store *s, uint64_t scope)
{
    struct ht_rounds r = HT_ROUNDS_INIT;
    int rc, flushed;
    do {
        ht_rounds_next(s, &r);
        rc = write_scope(s, scope);
        ht_store_lock(s);
        uint32_t devices = ht_scope_unflushed_locked(s, scope);
        ht_store_unlock(s);
        flushed = ht_flush_written(s, devices, &r);
    } while (!rc && flushed == -EAGAIN);
    return rc ? rc : flushed;
}

/* Shall it look for one more? */
static bool goes_on(const struct ht_writes *w, unsigned tried, unsigned most, enum ht_clean whom)
{
    if (w->failed >= FAILED_MAX)
        return false;
    return tried - w->failed < most || (whom && tried < TRIED_MAX && ht_arena_under_pressure(w->s->arena));
}

static bool is_asked(struct ht_store *s, uint32_t slot, enum ht_clean whom)
{
    if (whom == HT_CLEAN_ANY)
        return ht_image_passes_dirty(ht_arena_image(s->arena, slot));
    return ht_arena_presses(s->arena, slot, whom == HT_CLEAN_GROWING);
}

int ht_writeback_some(struct ht_store *s, unsigned most, enum ht_clean whom, int near)
{
    struct ht_writes *w = ht_writes_open(s);
    if (!w)
        return -ENOMEM;
    ht_store_lock(s);
    uint32_t *hand = &s->writeback_hand[near == HT_NEAR_ANY ? 0 : near];
    uint64_t in_vain_max = ht_arena_bytes(s->arena) >> 16;
    unsigned tried = 0;
    int rc = 0;
    for (uint64_t in_vain = 0; goes_on(w, tried, most, whom) && in_vain <= in_vain_max; in_vain++) {
        while (ht_writes_full(w)) /* now: it lets go of the lock */
            ht_writes_finish(w);
        uint32_t slot = ht_arena_next_used(s->arena, hand);
        if (slot == HT_SLOT_NONE)
            break;
        if (near != HT_NEAR_ANY && ht_arena_near(s->arena, slot) != near)
            continue;
        struct ht_image *im = ht_arena_image(s->arena, slot);
        struct ht_obj *o = im->owner;
        struct ht_chunk *c = ht_chunk_find(o, im->index);
        if (!is_asked(s, slot, whom) || !ht_chunk_trylock_exclusive(c))
            continue;
        o->refs++; /* of a scratch object or a dead one nobody else may have any */
        rc = ht_writes_start(w, o, c, im->index);
        ht_obj_put_locked(o);
        tried++;
        in_vain = 0;
        if (rc)
            ht_writes_note_error(w, rc);
    }
    /* Whether something was cleaned is what the caller wants to know: an error of another's chunk is that one's. */
    while (w->count)
        ht_writes_finish(w);
    unsigned cleaned = tried - w->failed;
    rc = ht_writes_close(w);
    ht_store_unlock(s);
    return cleaned || !rc ? (int)cleaned : rc;
}

int ht_writeback_now(struct ht_store *s)
{
    return ht_writeback_some(s, BATCH, HT_CLEAN_ANY, HT_NEAR_ANY);
}

bool ht_store_evict_image(void *ctx, uint32_t slot)
{
    struct ht_store *s = ctx;
    struct ht_image *im = ht_arena_image(s->arena, slot);
    struct ht_obj *o = im->owner;
    struct ht_chunk *c = ht_chunk_find(o, im->index);
    if (im->dirty || c->exclusive || c->shared)
        return false;
    ht_alloc_unreserve(s->alloc, im->reserved_blocks);
    im->reserved_blocks = 0;
    c->slot = HT_SLOT_NONE;
    o->resident--;
    s->evictions++;
    ht_chunk_trim(o, im->index);
    return true;
}
