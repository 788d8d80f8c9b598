/* SPDX-License-Identifier: Apache-2.0 */
/*
 * restore.c - an object gets the content of another one that was copied from it (tiering/api/keep.h): what has not
 * changed since lies in the same place, and stays as it is. Two objects are compared in the same way.
 */
#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/store/store_priv.h"

/* Is there something that may be newer than the reference? */
static bool is_newer(struct ht_obj *o, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return c->flags & HT_CH_BAD || c->writing || c->exclusive ||
        (c->slot != HT_SLOT_NONE && ht_arena_image(o->s->arena, c->slot)->dirty);
}

/* Do both have the same bytes in this chunk, by their places alone? */
static bool same_chunk(struct ht_obj *a, struct ht_obj *b, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *x = ht_chunk_find(a, index), *y = ht_chunk_find(b, index);
    const struct ht_ref *r = x ? ht_chunk_ref(x) : NULL, *q = y ? ht_chunk_ref(y) : NULL;

    if ((x && is_newer(a, x)) || (y && is_newer(b, y)) || ht_chunk_is_volatile(b, index))
        return false;
    return r && q ? r->visible == q->visible && ht_ref_same_place(r, q) : !r && !q;
}

/* The first chunk from there on that one of both has in memory; UINT64_MAX: there is none. */
static uint64_t next_chunk(struct ht_obj *a, struct ht_obj *b, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t x = index, y = index;

    if (ht_chunk_is_volatile(a, index) || ht_chunk_is_volatile(b, index))
        return index;
    x = ht_chunk_next(a, &x) ? x : UINT64_MAX;
    y = ht_chunk_next(b, &y) ? y : UINT64_MAX;
    return ht_min_u64(x, y);
}

enum { BATCH = 1024 }; /* chunks that are compared under one hold of the lock */

/* Moves *index to the first chunk from there on that differs. False: there is none before end. */
static bool find_different(struct ht_obj *from, struct ht_obj *to, uint64_t *index, uint64_t end)
{
    bool found = false;

    while (!found && *index < end) {
        ht_store_lock(from->s);
        for (unsigned n = 0; !found && n < BATCH && (*index = next_chunk(from, to, *index)) < end; n++) {
            found = !same_chunk(from, to, *index);
            *index += !found;
        }
        ht_store_unlock(from->s);
    }
    return found;
}

bool ht_obj_same(struct ht_obj *a, struct ht_obj *b, uint64_t off, uint64_t *out_end)
{
    uint64_t index = off >> a->chunk_shift;
    bool same = false;

    *out_end = UINT64_MAX;
    if (a->chunk_shift != b->chunk_shift)
        return false;
    ht_store_lock(a->s);
    for (unsigned n = 0; n < BATCH; n++) {
        uint64_t next = next_chunk(a, b, index);
        bool is_same = next != index || same_chunk(a, b, index);
        if (n && is_same != same)
            break;
        same = is_same;
        index = next != index ? next : index + 1;
        if (index == UINT64_MAX) /* both end with a hole */
            break;
    }
    ht_store_unlock(a->s);
    if (index != UINT64_MAX)
        *out_end = index << a->chunk_shift;
    return same;
}

static int clone_all(struct ht_obj *from, struct ht_obj *to, uint64_t off, uint64_t len)
{
    while (len) {
        ssize_t n = ht_obj_clone_from(from, off, to, off, len, true); /* of its own kept step */
        if (n <= 0)
            return n ? (int)n : -ESTALE; /* the source was cut */
        off += (uint64_t)n;
        len -= (uint64_t)n;
    }
    return 0;
}

/* Chunks of one size: those that are in another place. */
static int clone_different(struct ht_obj *from, struct ht_obj *to, uint64_t size)
{
    uint64_t bytes = ht_obj_chunk_bytes(from), chunks = ht_div_up(size, bytes);
    int rc = 0;

    for (uint64_t i = 0; !rc && find_different(from, to, &i, chunks); i++)
        rc = clone_all(from, to, i * bytes, ht_min_u64(bytes, size - i * bytes));
    return rc;
}

int ht_obj_restore(struct ht_obj *to, struct ht_obj *from)
{
    uint64_t size = ht_obj_size(from);
    int rc = ht_obj_size(to) > size ? ht_obj_truncate(to, size) : 0;

    if (!rc)
        rc = ht_obj_chunk_bytes(from) == ht_obj_chunk_bytes(to) ? clone_different(from, to, size)
                                                                : clone_all(from, to, 0, size);
    return rc || ht_obj_size(to) == size ? rc : ht_obj_truncate(to, size); /* which gives preallocations back */
}
