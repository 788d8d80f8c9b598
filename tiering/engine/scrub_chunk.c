/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_chunk.c - does a reference name the bytes that were written? And if not, which repair is possible?
 *
 *   read, no chunk held ---sound---> done
 *        | bad
 *   hold the chunk; does it still name this? ---no---> done: it moved
 *        | yes: read again ---sound, or another publication replaced it---> done
 *        | bad
 *   repair from memory: a new place for all owners of the content, or the image is written back. An owner without an
 *   image is mended from that of another one
 *
 * The first owner without an image asks those of all others. If none helps, later owners look at their own image alone.
 *
 * The first read disturbs no other thread and proves nothing: space may be freed and written anew under it. Only an
 * error of the second read is damage.
 */

#include "tiering/codec/frame.h"
#include "tiering/api/object.h"
#include "tiering/api/tx.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/data/write_batch.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/scrub_chunk.h"

/* The set of devices does not change while the store is open. */
static bool is_present(const struct ht_store *s, const struct ht_ref *ref)
{
    uint32_t devices = ht_ref_devices(ref);

    for (unsigned i = 0; i < s->dev_count; i++)
        if ((devices >> i & 1) && !s->dev[i])
            return false;
    return true;
}

static struct ht_chunk_io reading(const struct ht_suspect *x)
{
    return (struct ht_chunk_io){.obj = x->obj, .index = x->index, .ref = x->ref};
}

static void note_result(struct ht_suspect *x, const struct ht_chunk_io *io, int rc)
{
    struct ht_event_about about = ht_chunk_io_about(io, rc);

    x->device = about.device;
    x->offset = about.offset;
    x->error = about.error;
    x->mismatch = io->mismatch;
}

static int read_and_verify(struct ht_suspect *x, void *buf)
{
    struct ht_chunk_io io = reading(x);

    ht_chunk_read_start(&io, x->ring, buf);
    int rc = ht_chunk_read_finish_quietly(&io, x->ring);
    note_result(x, &io, rc);
    return rc;
}

static bool names(const struct ht_chunk *c, const struct ht_ref *ref)
{
    return ((c->flags & HT_CH_PUB) && ht_ref_same_place(&c->pub, ref)) ||
        ((c->flags & HT_CH_CUR) && ht_ref_same_place(&c->cur, ref));
}

/* ---------------------------------------------------------------- repair */

enum remedy {
    NO_REMEDY,  /* no second copy, or one that is newer than this reference's content */
    WRITE_BACK, /* the image replaces an unpublished reference, or is dirty anyway */
    RELOCATE,   /* the image is the published content */
};

/*
 * Pure: chooses the repair of ref. The image, if there is one, holds everything that the chunk's newest reference
 * shows.
 */
static enum remedy choose(const struct ht_chunk *c, const struct ht_image *im, const struct ht_ref *ref)
{
    bool current = c->flags & HT_CH_CUR;

    if (!im || (c->flags & (HT_CH_GONE | HT_CH_BAD)))
        return NO_REMEDY;
    if (current && !ht_ref_same_place(&c->cur, ref))
        return NO_REMEDY; /* the commit that is to come drops it */
    return im->dirty || current ? WRITE_BACK : RELOCATE;
}

/* The image, if it holds all bytes of the chunk. */
static struct ht_image *whole_image(const struct ht_suspect *x, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = x->obj;
    uint64_t index = x->index;
    const struct ht_ref *now = ht_chunk_ref(c);
    struct ht_image *im = c->slot != HT_SLOT_NONE ? ht_arena_image(o->s->arena, c->slot) : NULL;

    if (!im || !now || !now->visible) /* no byte counts: there is nothing to give another place */
        return NULL;
    return ht_image_reach(o, c, index) >= now->visible && im->valid_lo == 0 && im->valid_hi >= now->visible ? im : NULL;
}

/* Makes the image dirty; writeback finds it a new place. Lock and chunk held. */
static int mark_dirty(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t bytes = ht_chunk_len(o, index);
    int rc = ht_chunk_reserve(o, c, ht_blocks(bytes));

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
 * Are these the bytes of a compressed frame? The same bytes give the same frame, so they are encoded again. -EUCLEAN:
 * they are not, or not to be verified: the frame had more content before a truncation, or another version of the
 * encoder made it.
 */
static int verify_frame(struct ht_suspect *x, const void *data, uint32_t visible)
{
    struct ht_encoder *encoder = NULL;
    void *frame = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);
    int len = frame ? ht_encoder_new(&encoder) : -ENOMEM;

    if (!len)
        len = ht_codec_encode(encoder, data, visible, frame);
    int rc = len < 0 ? len : (uint32_t)len == x->ref.stored && ht_ref_matches(x->obj->s, &x->ref, frame) ? 0 : -EUCLEAN;
    ht_encoder_free(encoder);
    free(frame);
    return rc;
}

/*
 * Copies the first visible bytes of the image into buf. Chunk held, lock not. The checksum covers all stored bytes, so
 * it cannot verify the rest after a truncation: mapped memory, which a program may have changed since, is not used for
 * that. -EUCLEAN: the memory differs or may.
 */
static int copy_image(struct ht_suspect *x, const uint8_t *data, uint32_t visible, bool mapped, void *buf)
{
    memcpy(buf, data, visible);
    if (x->ref.codec == HT_CODEC_PLANES)
        return verify_frame(x, buf, visible);
    if (!ht_ref_has_checksum_of(&x->ref, visible))
        return mapped ? -EUCLEAN : 0;
    return ht_ref_matches(x->obj->s, &x->ref, buf) ? 0 : -EUCLEAN;
}

/* -------------------------------------------------------- the second look */

/* The result of the check with the chunk held. */
struct verdict {
    bool bad;
    enum remedy remedy;
    struct ht_move move; /* RELOCATE: the second place of the bytes */
    int error;           /* of the remedy, so far */
};

static void find_remedy(struct ht_suspect *x, struct ht_chunk *c, void *buf, struct verdict *v)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = x->obj;
    struct ht_store *s = o->s;
    struct ht_image *im = whole_image(x, c);

    v->remedy = x->repair ? choose(c, im, &x->ref) : NO_REMEDY;
    if (v->remedy == WRITE_BACK && !im->dirty)
        v->error = mark_dirty(o, c, x->index);
    if (v->remedy != RELOCATE)
        return;
    /* A truncation may have been published since x->ref was copied: the chunk knows how many bytes count now. */
    uint32_t visible = c->pub.visible;
    const uint8_t *data = ht_arena_data(s->arena, c->slot);
    bool mapped = ht_chunk_images(o, c)->mapped;
    ht_store_unlock(s);
    v->error = copy_image(x, data, visible, mapped, buf);
    v->move = (struct ht_move){.was = x->ref, .obj = x->obj};
    if (!v->error)
        v->error = ht_move_write_raw(&v->move, x->ring, buf, visible);
    ht_store_lock(s);
}

/* With the chunk held and a buffer: is it damage, and which repair is possible? Releases the lock in between. */
static int read_again(struct ht_suspect *x, struct ht_chunk *c, void *buf, struct verdict *v) HT_REQUIRES(HT_LOCK_STORE)
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

static int validate(struct ht_suspect *x, struct verdict *v)
{
    struct ht_store *s = x->obj->s;
    /*
     * Not from the pool: no thread waits for a chunk with one of its buffers, nor for a buffer with a chunk. And this
     * is rare.
     */
    void *buf = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);

    if (!buf)
        return -ENOMEM;
    int rc = 0;
    ht_store_lock(s);
    struct ht_chunk *c = ht_chunk_find(x->obj, x->index);
    if (c) {
        ht_chunk_lock_exclusive(x->obj, c, x->index);
        rc = read_again(x, c, buf, v);
        ht_chunk_unlock_exclusive(x->obj, c, x->index);
    }
    ht_store_unlock(s);
    free(buf);
    return rc;
}

static void put_first(struct ht_suspect *x, unsigned owner)
{
    struct ht_move_owner first = x->owner[owner];

    x->owner[owner] = x->owner[0];
    x->owner[0] = first;
}

/* The owner that is looked at comes first. The caller puts its object; NULL: it is gone. */
static struct ht_obj *look_at(struct ht_suspect *x, unsigned owner)
{
    put_first(x, owner);
    x->index = x->owner[0].index;
    return x->obj = ht_obj_get(x->s, x->owner[0].oid);
}

/* The new place, for all owners of the bad bytes. A copy of these, for moving changes their order. */
static int relocate(struct ht_suspect *x, struct ht_move *m)
{
    struct ht_store *s = x->obj->s;
    uint64_t lsn = 0;

    m->owners = x->owners;
    m->owner = malloc(m->owners * sizeof(*m->owner));
    if (!m->owner) {
        ht_store_lock(s);
        ht_free_ref_now(s, &m->now);
        ht_store_unlock(s);
        return -ENOMEM;
    }
    memcpy(m->owner, x->owner, m->owners * sizeof(*m->owner));
    int rc = ht_move_publish_bad(s, m, &lsn);
    free(m->owner);
    return rc ? rc : ht_store_sync(s, lsn);
}

/* Of the owner that is looked at. */
enum { NAMES = 1, IMAGE = 2, UNPUBLISHED = 4 };

static unsigned state_of(struct ht_suspect *x)
{
    struct ht_store *s = x->s;
    unsigned state = 0;
    struct ht_obj *o;

    ht_store_lock(s);
    const struct ht_chunk *c = ht_chunk_find_in(s, x->owner[0].oid, x->owner[0].index, &o);
    if (c)
        state = (names(c, &x->ref) ? NAMES : 0) | (c->slot != HT_SLOT_NONE ? IMAGE : 0) |
            (ht_chunk_unpublished(c) ? UNPUBLISHED : 0);
    ht_store_unlock(s);
    return state;
}

/* All owners that can move get what the other one's image has, if it has the content. */
static int mend_from(struct ht_suspect *x, unsigned other)
{
    struct ht_suspect by = *x;
    struct verdict v = {.remedy = NO_REMEDY};

    struct ht_obj *o = look_at(&by, other);
    bool may = o && (state_of(&by) & (IMAGE | UNPUBLISHED)) == IMAGE;
    int rc = may ? validate(&by, &v) : 0;
    if (!rc && v.remedy == RELOCATE && !v.error)
        (void)relocate(&by, &v.move); /* this one may have stayed: then the next one is asked */
    ht_obj_put(o);
    put_first(&by, other);
    return rc;
}

/* This owner has no image of the content: another one may have. -ENODATA: none has. */
static int mend_from_others(struct ht_suspect *x)
{
    int rc = 0;

    for (unsigned i = 1; !rc && !x->lost && i < x->owners && (state_of(x) & NAMES) && !*x->stop; i++)
        rc = mend_from(x, i);
    if (rc || !(state_of(x) & NAMES))
        return rc;
    if (*x->stop)
        return -ECANCELED;
    x->lost = true;
    return -ENODATA;
}

static int apply(struct ht_suspect *x, struct verdict *v)
{
    if (v->error)
        return v->error;
    switch (v->remedy) {
    case WRITE_BACK:
        return write_back(x);
    case RELOCATE:
        return relocate(x, &v->move);
    default:
        return x->repair ? mend_from_others(x) : -EROFS;
    }
}

int ht_suspect_read(struct ht_suspect *x)
{
    x->index = x->owner[0].index;
    struct ht_chunk_io io = reading(x);

    if (!is_present(x->s, &x->ref))
        return HT_SUSPECT_ABSENT;
    io.data = x->buf;
    int rc = ht_chunks_read_permitted(&io, 1);
    note_result(x, &io, rc);
    return rc == -EIO ? HT_SUSPECT_BAD : rc;
}

int ht_suspect_check(struct ht_suspect *x, unsigned owner)
{
    struct verdict v = {.remedy = NO_REMEDY};
    struct ht_obj *o = look_at(x, owner);

    if (!o)
        return HT_SUSPECT_SOUND;
    if (x->lost && (state_of(x) & (NAMES | IMAGE)) == NAMES) {
        ht_obj_put(o);
        return HT_SUSPECT_BAD; /* it has no second copy either: the bytes need not be read once more */
    }
    enum ht_io_class was = ht_io_class_set(HT_IO_URGENT); /* other threads wait for the chunk */
    int rc = validate(x, &v);
    if (!rc && v.bad)
        x->repair_error = apply(x, &v);
    (void)ht_io_class_set(was);
    ht_obj_put(o);
    if (rc)
        return rc;
    return v.bad ? HT_SUSPECT_BAD : HT_SUSPECT_SOUND;
}
