/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handout_changes.c - what was stored into handed-out images unseen is found by comparing them with the checksums of their references.
 */
#include <stdlib.h>

#include "tiering/store/store_priv.h"

static bool all_zero(const uint8_t *p, size_t n)
{
    return n == 0 || (p[0] == 0 && memcmp(p, p + 1, n - 1) == 0);
}

/* Has the image the bytes of ref (NULL: a hole)? Chunk held. */
static bool unchanged(const struct ht_store *s, const struct ht_ref *ref, const uint8_t *data, uint32_t len)
{
    if (!ref)
        return all_zero(data, len);
    return !ht_ref_lost(ref) && ref->stored == ref->visible && ref->stored <= len &&
        ht_store_checksum(s, data, ref->stored) == ref->checksum && all_zero(data + ref->stored, len - ref->stored);
}

/* Compare; *out_generation: of the reference that it was compared with. Lock held, let go meanwhile. */
static bool is_changed(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t *out_generation)
{
    struct ht_store *s = o->s;
    ht_chunk_lock_shared(s, c);
    bool compare = ht_arena_is_guest(s->arena, c->slot) && !ht_arena_image(s->arena, c->slot)->dirty &&
        ht_arena_image(s->arena, c->slot)->valid_hi && !(c->flags & CH_BAD);
    bool changed = false;
    *out_generation = c->generation;
    if (compare) {
        const struct ht_ref *now = ht_chunk_ref(c);
        struct ht_ref ref = now ? *now : (struct ht_ref){0};
        const uint8_t *data = ht_arena_data(s->arena, c->slot);
        uint32_t len = ht_chunk_len(o, index);
        ht_store_unlock(s);
        changed = !unchanged(s, now ? &ref : NULL, data, len);
        ht_store_lock(s);
    }
    ht_chunk_unlock_shared(s, c);
    return changed;
}

/* It differs from the reference of that generation: it is dirty. -EAGAIN: there is another reference, maybe older than the change. */
static int note_change(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t generation)
{
    struct ht_store *s = o->s;
    int rc = -EAGAIN;
    ht_chunk_lock_exclusive(s, c);
    uint32_t len = ht_chunk_len(o, index);
    if (!ht_arena_is_guest(s->arena, c->slot) || !len)
        rc = 0;
    else if (c->generation == generation)
        rc = ht_chunk_reserve(o, c, (uint32_t)ht_div_up(len, HT_BLOCK_BYTES));
    if (!rc && len && ht_arena_is_guest(s->arena, c->slot)) {
        ht_arena_image(s->arena, c->slot)->data_hi = len;
        ht_chunk_set_dirty(o, c, index);
    }
    ht_chunk_unlock_exclusive(s, c);
    return rc;
}

static int look_at_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    uint32_t generation;
    int rc = -EAGAIN;
    while (rc == -EAGAIN)
        rc = is_changed(o, c, index, &generation) ? note_change(o, c, index, generation) : 0;
    return rc;
}

static void end_stores(struct ht_obj *o)
{
    struct ht_handed *h = o->handed;
    bool end = h->guaranteed;
    h->stores = h->guaranteed = false;
    if (!end)
        return;
    ht_store_unlock(o->s);
    int none = ht_obj_guarantee(o, 0); /* giving back cannot fail */
    (void)none;
    ht_store_lock(o->s);
}

/* Lock held, let go meanwhile. Stores end when it was back all the time: others may go into chunks that were looked at already. */
static int find_changes(struct ht_obj *o)
{
    uint64_t hand = o->handed->hand;
    bool was_out = o->handed->out;
    int first = ht_handed_complete(o);
    for (uint64_t index = 0; ht_handed_stores(o) && index << o->chunk_shift < o->size; index++) {
        struct ht_chunk *c = ht_chunk_find(o, index);
        int rc = c ? look_at_chunk(o, c, index) : 0;
        if (rc && !first)
            first = rc;
    }
    if (!first && !was_out && ht_handed_stores(o) && o->handed->hand == hand)
        end_stores(o);
    if (first)
        o->error = o->sticky = first;
    return first;
}

int ht_handed_search(struct ht_obj *o)
{
    return ht_handed_stores(o) ? find_changes(o) : 0;
}

int ht_obj_find_changes(struct ht_obj *o)
{
    ht_store_lock(o->s);
    int rc = ht_handed_search(o);
    ht_store_unlock(o->s);
    return rc;
}

static bool may_be_stored_to(const struct ht_handed *h)
{
    return h->stores;
}

static bool is_back_and_stored_to(const struct ht_handed *h)
{
    return h->stores && !h->out;
}

int ht_handed_find_changes(struct ht_store *s, uint64_t scope, bool out)
{
    return ht_handed_visit(s, scope, out ? may_be_stored_to : is_back_and_stored_to, ht_handed_search);
}
