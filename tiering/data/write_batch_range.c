/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write_batch_range.c - writes the dirty images of a range of chunks. write_batch.c says how; writeback.c says for
 * which caller.
 */
#include "tiering/cache/arena.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/numa.h"
#include "tiering/object/object.h"
#include "tiering/object/slice.h"
#include "tiering/data/write_batch.h"

static bool dirty(struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return c->slot != HT_SLOT_NONE && ht_arena_image(s->arena, c->slot)->dirty;
}

static bool is_to_be_written(const struct ht_write_batch *w, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return c && (c->writing || dirty(w->s, c));
}

/*
 * Writes back one chunk if it is still dirty, waiting for its lock. A chunk that this thread itself is writing would
 * never get free: finish first. Finishing releases the store's lock, so the chunk is looked up again.
 */
static void write_chunk(struct ht_write_batch *w, struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->s;
    struct ht_chunk *c = ht_chunk_find(o, index);

    while (is_to_be_written(w, c)) {
        if (ht_write_batch_full(w) || (w->count && (c->exclusive || c->shared)))
            ht_write_batch_finish(w);
        else if (ht_write_batch_admit(w, ht_chunk_target_device(s, c)))
            break;
        c = ht_chunk_find(o, index);
    }
    if (!is_to_be_written(w, c))
        return;
    ht_chunk_lock_exclusive(o, c, index);
    if (!dirty(s, c)) {
        ht_chunk_unlock_exclusive(o, c, index);
        return;
    }
    int rc = ht_write_batch_start(w, o, c, index);
    if (rc)
        ht_write_batch_note_error(w, rc);
}

/*
 * Chunks [first, last). A chunk that cannot be written holds up no other: every chunk is tried. A write that another
 * thread has in flight counts as dirty until it is done.
 */
void ht_write_batch_range(struct ht_write_batch *w, struct ht_obj *o, uint64_t first, uint64_t last)
{
    struct ht_slice slice = {0};
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
        ht_slice_next(o->s, &slice);
    }
}

void ht_obj_clean(struct ht_obj *o, uint64_t first, uint64_t last)
{
    struct ht_store *s = o->s;
    struct ht_write_batch *w = ht_write_batch_open(s);

    if (!w)
        return;
    ht_store_lock(s);
    ht_write_batch_range(w, o, first, last);
    (void)ht_write_batch_close(w);
    ht_store_unlock(s);
}
