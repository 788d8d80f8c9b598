/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_chunk.c - is what a reference names what was written? And if not, what can be done.
 *
 *   read, no chunk held ---sound---> done
 *        | bad
 *   hold the chunk; does it still name this? ---no---> done: it moved
 *        | yes: read again ---sound, or it was published away meanwhile---> done
 *        | bad
 *   repair by what there is in memory
 *
 * The first read disturbs nobody and believes nothing. Space may be freed and written anew under it; only
 * what the second one finds is damage.
 */
#include <stdlib.h>

#include "tiering/store/store_priv.h"

/* Which devices there are does not change while the store is open. */
static bool is_present(const struct ht_store *s, const struct ht_ref *ref)
{
    for (unsigned i = 0; i < ht_ref_extents(ref); i++)
        if (!s->dev[ht_ref_extent(ref, i).device])
            return false;
    return true;
}

static int read_and_verify(struct ht_suspect *x, void *buf)
{
    struct ht_store *s = x->obj->s;
    struct ht_xfer xfer;
    int rc = ht_xfer_run(&xfer, s, x->ring, &x->ref, buf, HT_IO_READ);
    if (rc && !xfer.bad_dev)
        return rc;
    struct ht_extent e = ht_ref_extent(&x->ref, 0);
    x->device = ht_device_name(s, rc ? xfer.bad_dev - 1 : e.device);
    x->offset = rc ? xfer.bad_offset : e.block * HT_BLOCK_BYTES;
    x->error = rc ? ht_xfer_error(&xfer, rc) : -EUCLEAN;
    return rc || ht_store_checksum(s, buf, x->ref.stored) != x->ref.checksum ? -EIO : 0;
}

static bool names(const struct ht_chunk *c, const struct ht_ref *ref)
{
    return ((c->flags & CH_PUB) && ht_ref_same_place(&c->pub, ref)) ||
        ((c->flags & CH_CUR) && ht_ref_same_place(&c->cur, ref));
}

/* ---------------------------------------------------------------- repair */

enum remedy {
    NO_REMEDY,  /* no second copy, or one that is newer than what this reference was for */
    WRITE_BACK, /* the image replaces an unpublished reference, or is dirty anyway */
    RELOCATE,   /* the image is what is published */
};

/* Pure: what can be done about ref. The image, if there is one, holds all that the chunk's newest reference shows. */
static enum remedy choose(const struct ht_chunk *c, const struct ht_image *im, const struct ht_ref *ref)
{
    bool current = c->flags & CH_CUR;
    if (!im || (c->flags & (CH_GONE | CH_BAD)))
        return NO_REMEDY;
    if (current && !ht_ref_same_place(&c->cur, ref))
        return NO_REMEDY; /* the commit that is to come drops it */
    return im->dirty || current ? WRITE_BACK : RELOCATE;
}

/* The image if it is one of all that the chunk holds. */
static struct ht_image *whole_image(const struct ht_suspect *x, struct ht_chunk *c)
{
    struct ht_obj *o = x->obj;
    uint64_t index = x->index;
    const struct ht_ref *now = ht_chunk_ref(c);
    struct ht_image *im = c->slot != HT_SLOT_NONE ? ht_arena_image(o->s->arena, c->slot) : NULL;
    if (!im || !now)
        return NULL;
    /* What is handed out has no memory behind the end that the object has now. */
    bool short_of = ht_arena_is_guest(o->s->arena, c->slot) && ht_chunk_len(o, index) < now->visible;
    return !short_of && im->valid_lo == 0 && im->valid_hi >= now->visible ? im : NULL;
}

/* Make the image dirty; writeback finds it a new place. Lock and chunk held. */
static int mark_dirty(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    uint32_t bytes = ht_chunk_len(o, index);
    int rc = ht_chunk_reserve(o, c, (uint32_t)ht_div_up(bytes, HT_BLOCK_BYTES));
    if (!rc)
        ht_chunk_set_dirty(o, c, index);
    return rc;
}

static int write_back(struct ht_suspect *x)
{
    struct ht_obj *o = x->obj;
    ht_obj_clean(o, x->index, x->index + 1);
    ht_store_lock(o->s);
    struct ht_chunk *c = ht_chunk_find(o, x->index);
    bool still = c && ht_chunk_ref(c) && ht_ref_same_place(ht_chunk_ref(c), &x->ref);
    int rc = still ? o->error ? o->error : -EBUSY : 0;
    ht_store_unlock(o->s);
    return rc;
}

/*
 * The first visible bytes of the image, into buf. Chunk held, lock not. The checksum covers all that is stored, so it cannot verify a part
 * that a truncation left: guest memory, which a program may have changed since, is not used for that. -EUCLEAN: the memory differs or may.
 */
static int copy_image(struct ht_suspect *x, const uint8_t *data, uint32_t visible, bool guest, void *buf)
{
    memcpy(buf, data, visible);
    if (visible != x->ref.stored)
        return guest ? -EUCLEAN : 0;
    return ht_store_checksum(x->obj->s, buf, visible) == x->ref.checksum ? 0 : -EUCLEAN;
}

/* -------------------------------------------------------- the second look */

/* What holding the chunk has shown. */
struct verdict {
    bool bad;
    enum remedy remedy;
    struct ht_ref moved; /* RELOCATE: where the bytes are now as well */
    int error;           /* of the remedy, so far */
};

static void find_remedy(struct ht_suspect *x, struct ht_chunk *c, void *buf, struct verdict *v)
{
    struct ht_obj *o = x->obj;
    struct ht_store *s = o->s;
    struct ht_image *im = whole_image(x, c);
    v->remedy = x->repair ? choose(c, im, &x->ref) : NO_REMEDY;
    if (v->remedy == WRITE_BACK && !im->dirty)
        v->error = mark_dirty(o, c, x->index);
    if (v->remedy != RELOCATE)
        return;
    /* A truncation may have been published since x->ref was copied: the chunk knows what counts of it now. */
    uint32_t visible = c->pub.visible;
    const uint8_t *data = ht_arena_data(s->arena, c->slot);
    bool guest = ht_arena_is_guest(s->arena, c->slot);
    ht_store_unlock(s);
    v->error = copy_image(x, data, visible, guest, buf);
    if (!v->error)
        v->error = ht_relocate_begin(s, x->ring, buf, visible, &v->moved);
    ht_store_lock(s);
}

/* With the chunk held and a buffer: is it damage, and what can be done? Lock held, let go meanwhile. */
static int look_again(struct ht_suspect *x, struct ht_chunk *c, void *buf, struct verdict *v)
{
    struct ht_store *s = x->obj->s;
    if (!names(c, &x->ref))
        return 0;
    ht_store_unlock(s);
    int rc = read_and_verify(x, buf);
    ht_store_lock(s);
    v->bad = rc == -EIO && names(c, &x->ref);
    if (v->bad)
        find_remedy(x, c, buf, v);
    return rc == -EIO ? 0 : rc;
}

static int judge(struct ht_suspect *x, struct verdict *v)
{
    struct ht_store *s = x->obj->s;
    /* Not of the pool: nobody waits for a chunk with one of its buffers, nor for a buffer with a chunk. And it is rare. */
    void *buf = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    if (!buf)
        return -ENOMEM;
    int rc = 0;
    ht_store_lock(s);
    struct ht_chunk *c = ht_chunk_find(x->obj, x->index);
    if (c) {
        ht_chunk_lock_exclusive(s, c);
        rc = look_again(x, c, buf, v);
        ht_chunk_unlock_exclusive(x->obj, c, x->index);
    }
    ht_store_unlock(s);
    free(buf);
    return rc;
}

static int apply(struct ht_suspect *x, struct verdict *v)
{
    if (v->error)
        return v->error;
    switch (v->remedy) {
    case WRITE_BACK:
        return write_back(x);
    case RELOCATE:
        return ht_relocate_end(x->obj, x->index, &x->ref, &v->moved);
    default:
        return x->repair ? -ENODATA : -EROFS;
    }
}

static int first_look(struct ht_suspect *x)
{
    struct ht_store *s = x->obj->s;
    void *buf;
    int rc = ht_staging_get(s->staging, HT_STAGING_FILL, 1, false, ht_ref_near(s, &x->ref), &buf);
    if (rc)
        return rc;
    rc = read_and_verify(x, buf);
    ht_staging_put(s->staging, HT_STAGING_FILL, buf);
    return rc;
}

int ht_suspect_check(struct ht_suspect *x)
{
    struct verdict v = {.remedy = NO_REMEDY};
    if (!is_present(x->obj->s, &x->ref))
        return HT_SUSPECT_ABSENT;
    int rc = first_look(x);
    if (rc != -EIO)
        return rc ? rc : HT_SUSPECT_SOUND;
    rc = judge(x, &v);
    if (rc)
        return rc;
    if (!v.bad)
        return HT_SUSPECT_SOUND;
    x->repair_error = apply(x, &v);
    return HT_SUSPECT_BAD;
}
