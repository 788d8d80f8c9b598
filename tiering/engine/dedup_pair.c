/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dedup_pair.c - two chunks that are probably the same: compared byte by byte, then stored once.
 *
 *   the pair --own--> a second owner of the one's bytes --read both--> the same --take over--> the other has that owner
 *      |               |                                    |              |
 *      changed: skipped  no memory: skipped       different: owner dropped   changed meanwhile: owner dropped, skipped
 *
 * The owner keeps the bytes where they are until the other chunk has them, whatever becomes of the first one. The other
 * chunk is not held while it is read. Its object's version says in the transaction that nothing has changed since
 * (txn/share.c). So no thread waits for a chunk of a pair.
 *
 * A crash before the transaction is durable leaves both places. After it, the one that both name.
 *
 * The thread waits for the permit of each read with nothing held, and its buffers belong to the pass.
 */
#include <stdlib.h>

#include "tiering/base/mutant.h"
#include "tiering/cache/arena.h"
#include "tiering/api/object.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/deferred_free.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/object/refcount.h"
#include "tiering/data/admission.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/flush.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/dedup.h"
#include "tiering/engine/engine_priv.h"

static bool is_present(const struct ht_store *s, const struct ht_ref *ref)
{
    for (unsigned i = 0; i < ht_ref_extents(ref); i++) {
        unsigned device = ht_ref_extent(ref, i).device;
        if (!s->dev[device] || ht_device_is_closed(s, device))
            return false;
    }
    return true;
}

bool ht_dedup_may_share(const struct ht_store *s, const struct ht_chunk *c)
{
    if ((c->flags & ~HT_CH_LOG_RESERVED) != HT_CH_PUB || !ht_ref_holds(&c->pub) || c->pub.codec != HT_CODEC_RAW)
        return false;
    return (c->slot == HT_SLOT_NONE || !ht_arena_image(s->arena, c->slot)->dirty) && is_present(s, &c->pub);
}

/* A chunk that is looked at, with a reference to its object. */
struct side {
    struct ht_obj *obj;
    struct ht_chunk *c; /* while the lock is held */
    uint64_t index;
    struct ht_ref ref; /* a copy */
};

/* -ESTALE: it has changed. */
static int find(struct ht_store *s, const struct ht_dedup_chunk *want, struct side *out) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = ht_obj_find_locked(s, want->oid);
    struct ht_chunk *c = o && ht_obj_may_share(o) && o->version == want->version ? ht_chunk_find(o, want->index) : NULL;

    if (!c || !ht_dedup_may_share(s, c))
        return -ESTALE;
    *out = (struct side){.obj = o, .c = c, .index = want->index};
    return 0;
}

/* out->ref becomes one more owner of the chunk's bytes. -EAGAIN: a thread holds the chunk. */
static int own(struct ht_store *s, struct side *x) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!ht_chunk_trylock_exclusive(x->c))
        return -EAGAIN;
    int rc = HT_MUTANT("dedup-unowned") ? ht_ref_copy(&x->ref, &x->c->pub) : ht_chunk_share(x->obj, x->c, &x->ref);
    ht_chunk_unlock_exclusive(x->obj, x->c, x->index);
    return rc;
}

static bool is_probably_same(const struct side *a, const struct side *b)
{
    const struct ht_ref *x = &a->c->pub, *y = &b->c->pub;

    return x->stored == y->stored && x->codec == y->codec && x->checksum == y->checksum &&
        a->obj->chunk_shift == b->obj->chunk_shift;
}

/*
 * Both sides with copies of their references, a->ref an owner. Without an owner only b. -EALREADY: they share the bytes
 * already.
 */
static int take(struct ht_store *s, const struct ht_dedup_pair *pair, struct side *a, struct side *b)
    HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = find(s, &pair->other, b);

    if (!rc && pair->owner.oid)
        rc = find(s, &pair->owner, a);
    if (!rc && a->obj && !is_probably_same(a, b))
        rc = -ESTALE;
    if (!rc && a->obj && ht_ref_same_place(&a->c->pub, &b->c->pub))
        rc = -EALREADY;
    if (!rc)
        rc = ht_ref_copy(&b->ref, &b->c->pub);
    if (!rc && a->obj)
        rc = own(s, a);
    if (rc)
        ht_ref_forget(&b->ref);
    else
        b->obj->refs++;
    if (!rc && a->obj)
        a->obj->refs++;
    return rc;
}

static void release(struct ht_store *s, struct side *a, struct side *b)
{
    ht_store_lock(s);
    if (ht_ref_holds(&a->ref))
        (void)ht_ref_drop(s, &a->ref);
    ht_ref_forget(&b->ref);
    if (a->obj)
        ht_obj_put_locked(a->obj);
    ht_obj_put_locked(b->obj);
    ht_store_unlock(s);
}

/* Scrub reports what cannot be read. */
static int read_side(struct ht_store *s, struct ht_ring *ring, const struct side *x, uint8_t *buf)
{
    struct ht_chunk_io io = {.obj = x->obj, .index = x->index, .ref = x->ref};
    const struct ht_permit_request request = ht_admission_of_ref(s, &x->ref);
    struct ht_permit permit;

    ht_permit_get(&s->gate, &request, &permit);
    ht_chunk_read_start(&io, ring, buf);
    int rc = ht_chunk_read_finish_quietly(&io, ring);
    ht_permit_put(&permit);
    return rc;
}

static bool is_zero(const uint8_t *p, size_t n)
{
    return !p[0] && memcmp(p, p + 1, n - 1) == 0;
}

/* 1: they are the same; 0: not. */
static int compare(struct ht_store *s, const struct side *a, const struct side *b, uint8_t *buf[2], uint64_t *out_bytes)
{
    struct ht_ring *ring = ht_store_ring(s);
    uint32_t bytes = b->ref.stored;

    if (!ring)
        return -ENOMEM;
    *out_bytes += bytes;
    int rc = read_side(s, ring, b, buf[0]);
    if (rc)
        return rc == -ENOMEM ? rc : -EAGAIN;
    if (!a->obj)
        return is_zero(buf[0], bytes);
    *out_bytes += bytes;
    rc = read_side(s, ring, a, buf[1]);
    if (rc)
        return rc == -ENOMEM ? rc : -EAGAIN;
    return HT_MUTANT("dedup-uncompared") || memcmp(buf[0], buf[1], bytes) == 0;
}

/* a->ref is used up if it succeeds. */
static int share(struct ht_store *s, struct side *a, struct ht_sharer *x)
{
    struct ht_dedup_figures *f = &s->engine->dedup.figures;
    bool hole = !a->obj;
    int rc = hole ? ht_chunk_make_hole(x) : ht_chunk_take_over(x, &a->ref);

    if (!rc)
        *(hole ? &f->hole_bytes : &f->shared_bytes) += (uint64_t)x->freed_blocks * HT_BLOCK_BYTES;
    return rc == -ESTALE || rc == -ENOSPC ? -EAGAIN : rc;
}

int ht_dedup_pair_share(struct ht_store *s, const struct ht_dedup_pair *pair, uint8_t *buf[2], uint64_t *out_bytes)
{
    struct ht_dedup_figures *f = &s->engine->dedup.figures;
    struct side a = {.obj = NULL}, b = {.obj = NULL};

    *out_bytes = 0;
    ht_store_lock(s);
    int rc = take(s, pair, &a, &b);
    ht_store_unlock(s);
    if (rc)
        return rc == -EALREADY ? 0 : rc == -ESTALE ? -EAGAIN : rc;
    struct ht_sharer x = {.obj = b.obj, .index = b.index, .version = pair->other.version, .was = b.ref};
    rc = compare(s, &a, &b, buf, out_bytes);
    f->compared_bytes += *out_bytes;
    if (rc == 0)
        f->different++;
    else if (rc > 0)
        rc = share(s, &a, &x);
    release(s, &a, &b);
    return rc;
}
