/* SPDX-License-Identifier: Apache-2.0 */
/* verify.c - asserts the invariants of shm.c (tiering/base/verify.h). */

#include "tiering/shm/shm_priv.h"

/* The file may have several mappings. */
static bool is_at(const struct ht_shared *m, const uint8_t *data, uint64_t offset) HT_REQUIRES(HT_LOCK_STORE)
{
    bool found = false;

    for (unsigned i = 0; i < m->maps; i++)
        found |= data == m->map[i].base + offset;
    return found;
}

/* An external image lies at its chunk's place in the file. Its bytes are valid as a whole, or after an abort not. */
static void check_images(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_shared *m = &o->extra->shm->memory;

    ht_chunk_for_each(c, o, index) {
        if (!ht_arena_is_external(o->s->arena, c->slot))
            continue;
        const struct ht_image *im = ht_arena_image(o->s->arena, c->slot);
        bool whole = im->valid_lo == 0 && im->valid_hi == ht_obj_bytes_per_chunk(o);
        assert(index << o->chunk_shift < m->bytes);
        assert(is_at(m, ht_arena_data(o->s->arena, c->slot), index << o->chunk_shift));
        assert(whole || im->valid_lo == im->valid_hi || c->exclusive);
    }
}

void ht_shm_verify(struct ht_store *s, bool idle)
{
    uint64_t used_bytes = 0;
    uint32_t count = 0;

    ht_list_for_each_entry(h, &s->shm->all, const struct ht_shm, link) {
        assert(h->obj->extra->shm == h && h->open_id <= s->shm->opens);
        assert(!h->is_open || h->obj->refs);
        check_images(h->obj);
        used_bytes += ht_shm_footprint(h->memory.bytes);
        count++;
    }
    /* The memory of an object counts before it is made. */
    assert(s->shm->count >= count && s->shm->used_bytes >= used_bytes);
    assert(!idle || (s->shm->count == count && s->shm->used_bytes == used_bytes));
    assert(s->shm->owes || s->shm->used_bytes <= (s->opts.shm_lent ? s->shm->share_bytes : s->opts.shm_bytes));
    assert(!idle || !s->opts.shm_lent || s->shm->owes || used_bytes <= ht_arena_lent_bytes(s->arena));
}
