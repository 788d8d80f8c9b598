/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dedup_pair.c - pairs of chunks whose bytes were read and are the same: they are stored once.
 *
 *   the pair --both are as they were read--> one transaction for many pairs: shared
 *      |                                        |
 *      changed: skipped                      changed meanwhile: skipped
 *
 * No chunk is held while it is read. In the transaction the versions of both objects and the places of both chunks say
 * that nothing has changed since (txn/share.c). So no thread waits for a chunk of a pair.
 *
 * A crash before the transaction is durable leaves both places. After it, the one that both name.
 */
#include "tiering/base/idhash.h"
#include "tiering/object/context.h"
#include "tiering/data/flush.h"
#include "tiering/engine/engine_priv.h"

static bool is_present(const struct ht_store *s, const struct ht_ref *ref)
{
    uint32_t devices = ht_ref_devices(ref);

    for (unsigned i = 0; i < s->dev_count; i++)
        if ((devices >> i & 1) && (!s->dev[i] || ht_device_is_closed(s, i)))
            return false;
    return true;
}

/* ------------------------------------------------------------------ in vain */

static uint64_t name_of(const struct ht_ref *ref)
{
    return ht_id_hash(ref->checksum ^ ht_id_hash(ht_ref_place(ref))) | 1;
}

static uint64_t *slot_of(struct ht_dedup_vain *v, const struct ht_ref *ref)
{
    return &v->name[name_of(ref) / 2 % HT_ARRAY_SIZE(v->name)];
}

static bool is_in_vain(struct ht_dedup_vain *v, const struct ht_ref *ref)
{
    return *slot_of(v, ref) == name_of(ref);
}

bool ht_dedup_may_share(const struct ht_store *s, const struct ht_chunk *c)
{
    if ((c->flags & ~HT_CH_LOG_RESERVED) != HT_CH_PUB || !ht_ref_holds(&c->pub) || ht_ref_is_cold(&c->pub))
        return false;
    return (c->slot == HT_SLOT_NONE || !ht_arena_image(s->arena, c->slot)->dirty) && is_present(s, &c->pub) &&
        !is_in_vain(&s->engine->dedup.vain, &c->pub);
}

/* The chunk, if nothing has changed since it was read. */
static struct ht_chunk *chunk_of(struct ht_store *s, const struct ht_dedup_chunk *want, struct ht_obj **out_o)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = *out_o = ht_obj_find_locked(s, want->oid);
    struct ht_chunk *c = o && !o->dead && o->version == want->version ? ht_chunk_find(o, want->index) : NULL;

    return c && (c->flags & HT_CH_PUB) && ht_ref_holds(&c->pub) && ht_ref_place(&c->pub) == want->place ? c : NULL;
}

int ht_dedup_in_vain(struct ht_store *s, const struct ht_dedup_chunk *want)
{
    struct ht_obj *o;

    ht_store_lock(s);
    const struct ht_chunk *c = chunk_of(s, want, &o);
    if (c)
        *slot_of(&s->engine->dedup.vain, &c->pub) = name_of(&c->pub);
    ht_store_unlock(s);
    return c ? 0 : -EAGAIN;
}

/* -------------------------------------------------------------------- a pair */

/* With a reference to its object. -ESTALE: it has changed. */
static int find(struct ht_store *s, const struct ht_dedup_chunk *want, struct ht_sharer_side *out)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o;
    struct ht_chunk *c = chunk_of(s, want, &o);

    if (!c || !ht_obj_may_share(o) || !ht_dedup_may_share(s, c))
        return -ESTALE;
    struct ht_sharer_side side = {.index = want->index, .version = want->version};
    if (ht_ref_copy(&side.was, &c->pub))
        return -ENOMEM;
    side.obj = o;
    o->refs++;
    *out = side;
    return 0;
}

static bool is_probably_same(const struct ht_sharer_side *a, const struct ht_sharer_side *b)
{
    return a->was.stored == b->was.stored && a->was.codec == b->was.codec && a->was.checksum == b->was.checksum &&
        a->obj->chunk_shift == b->obj->chunk_shift;
}

/* Both sides; without an owner only the other. -EALREADY: they share the bytes already. */
static int take(struct ht_store *s, const struct ht_dedup_pair *pair, struct ht_sharer *x) HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = find(s, &pair->other, &x->other);

    if (rc || !pair->owner.oid)
        return rc;
    rc = find(s, &pair->owner, &x->first);
    if (rc)
        return rc;
    if (ht_ref_same_place(&x->first.was, &x->other.was))
        return -EALREADY;
    return is_probably_same(&x->first, &x->other) ? 0 : -ESTALE;
}

static void put_side(struct ht_sharer_side *x) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!x->obj)
        return;
    ht_ref_forget(&x->was);
    ht_obj_put_locked(x->obj);
}

int ht_dedup_add(struct ht_store *s, const struct ht_dedup_pair *pair, struct ht_dedup_same *same)
{
    struct ht_sharer *x = &same->pair[same->count];

    *x = (struct ht_sharer){.rc = 0};
    ht_store_lock(s);
    int rc = take(s, pair, x);
    if (rc) {
        put_side(&x->first);
        put_side(&x->other);
    }
    ht_store_unlock(s);
    same->count += rc == 0;
    return rc == -EALREADY ? 0 : rc == -ESTALE ? -EAGAIN : rc;
}

int ht_dedup_share(struct ht_store *s, struct ht_dedup_same *same)
{
    _Atomic uint64_t *figure = s->engine->row[HT_ENGINE_DEDUP].figure;
    int rc = same->count ? ht_chunks_share(s, same->pair, same->count) : 0, skipped = 0;

    for (unsigned i = 0; i < same->count; i++) {
        struct ht_sharer *x = &same->pair[i];
        if (!rc && !x->rc)
            figure[x->first.obj ? HT_DEDUP_SHARED : HT_DEDUP_HOLES] += (uint64_t)x->freed_blocks * HT_BLOCK_BYTES;
        skipped += rc || x->rc;
        ht_store_lock(s);
        put_side(&x->first);
        put_side(&x->other);
        ht_store_unlock(s);
    }
    same->count = 0;
    return rc ? rc : skipped;
}
