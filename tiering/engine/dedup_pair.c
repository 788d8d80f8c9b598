/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dedup_pair.c - pairs of chunks that are probably the same: compared byte by byte, then stored once.
 *
 *   the pair --copies of both references--> read both --the same--> one transaction for many pairs: shared
 *      |                                       |                        |
 *      changed: skipped                  different, unreadable:      changed meanwhile: skipped
 *                                        remembered
 *
 * No chunk is held while it is read. In the transaction the versions of both objects and the places of both chunks say
 * that nothing has changed since (txn/share.c). So no thread waits for a chunk of a pair.
 *
 * A crash before the transaction is durable leaves both places. After it, the one that both name.
 *
 * Raw bytes are compared with raw bytes, and compressed frames with frames, as they are stored. The same bytes always
 * give the same frame, so two files that were compressed alike meet here. Only for zeros a frame is decoded.
 *
 * The thread waits for a permit with nothing held and nothing in flight, and its buffers belong to the pass.
 */
#include <stdlib.h>

#include "tiering/base/idhash.h"
#include "tiering/base/mutant.h"
#include "tiering/cache/arena.h"
#include "tiering/api/object.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
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
    if ((c->flags & ~HT_CH_LOG_RESERVED) != HT_CH_PUB || !ht_ref_holds(&c->pub))
        return false;
    return (c->slot == HT_SLOT_NONE || !ht_arena_image(s->arena, c->slot)->dirty) && is_present(s, &c->pub) &&
        !is_in_vain(&s->engine->dedup.vain, &c->pub);
}

/* -------------------------------------------------------------------- a pair */

/* With a reference to its object. -ESTALE: it has changed. */
static int find(struct ht_store *s, const struct ht_dedup_chunk *want, struct ht_sharer_side *out)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = ht_obj_find_locked(s, want->oid);
    struct ht_chunk *c = o && ht_obj_may_share(o) && o->version == want->version ? ht_chunk_find(o, want->index) : NULL;

    if (!c || !ht_dedup_may_share(s, c))
        return -ESTALE;
    struct ht_sharer_side side = {.index = want->index, .version = want->version};
    if (ht_ref_copy(&side.was, &c->pub))
        return -ENOMEM;
    side.obj = o;
    o->refs++;
    *out = side;
    return 0;
}

bool ht_dedup_may_be_same(const struct ht_ref *a, const struct ht_ref *b)
{
    return a->stored == b->stored && a->codec == b->codec && a->checksum == b->checksum;
}

static bool is_probably_same(const struct ht_sharer_side *a, const struct ht_sharer_side *b)
{
    return ht_dedup_may_be_same(&a->was, &b->was) && a->obj->chunk_shift == b->obj->chunk_shift;
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

static void put_pair(struct ht_store *s, struct ht_sharer *x)
{
    ht_store_lock(s);
    put_side(&x->first);
    put_side(&x->other);
    ht_store_unlock(s);
}

/* -------------------------------------------------------------- comparing */

/* The decoder writes the visible bytes only. */
static bool is_zero(const struct ht_ref *ref, const uint8_t *p)
{
    size_t n = ref->codec == HT_CODEC_RAW ? ref->stored : ref->visible;

    return !n || (!p[0] && memcmp(p, p + 1, n - 1) == 0);
}

/* Content that changed meanwhile is skipped. Other content is not looked at again. */
static int in_vain(struct ht_store *s, const struct ht_sharer_side *x)
{
    ht_store_lock(s);
    struct ht_chunk *c = x->obj->version == x->version ? ht_chunk_find(x->obj, x->index) : NULL;
    bool unchanged = c && (c->flags & HT_CH_PUB) && ht_ref_same_place(&c->pub, &x->was);
    if (unchanged)
        *slot_of(&s->engine->dedup.vain, &x->was) = name_of(&x->was);
    ht_store_unlock(s);
    return unchanged ? 0 : -EAGAIN;
}

/* 1: they are the same; 0: they are not, or cannot be read; -EAGAIN: they have changed; -ENOMEM. */
static int compare(struct ht_store *s, const struct ht_sharer *x, uint8_t *buf[2], uint64_t *out_bytes)
{
    _Atomic uint64_t *figure = s->engine->row[HT_ENGINE_DEDUP].figure;
    uint32_t bytes = x->other.was.stored;
    const struct ht_sharer_side *side[2] = {&x->other, &x->first};
    unsigned sides = x->first.obj ? 2 : 1;
    struct ht_chunk_io io[2];

    for (unsigned i = 0; i < sides; i++)
        io[i] = (struct ht_chunk_io){
            .obj = side[i]->obj, .index = side[i]->index, .ref = side[i]->was, .data = buf[i], .as_stored = sides == 2};
    int failed = ht_chunks_read_permitted(io, sides);
    *out_bytes += sides * (uint64_t)bytes;
    for (unsigned i = 0; failed && i < sides; i++) {
        if (!io[i].rc)
            continue;
        int rc = io[i].rc == -ENOMEM ? -ENOMEM : in_vain(s, side[i]); /* scrub reports what cannot be read */
        figure[HT_DEDUP_SKIPPED] += rc == 0;
        return rc;
    }
    if (HT_MUTANT("dedup-uncompared") || (sides == 1 ? is_zero(&x->other.was, buf[0]) : !memcmp(buf[0], buf[1], bytes)))
        return 1;
    int rc = in_vain(s, &x->other);
    figure[HT_DEDUP_DIFFERENT] += rc == 0;
    return rc;
}

int ht_dedup_compare(struct ht_store *s, const struct ht_dedup_pair *pair, struct ht_dedup_same *same, uint8_t *buf[2],
                     uint64_t *out_bytes)
{
    struct ht_sharer *x = &same->pair[same->count];
    uint64_t bytes = 0;

    *x = (struct ht_sharer){.rc = 0};
    ht_store_lock(s);
    int rc = take(s, pair, x);
    ht_store_unlock(s);
    if (!rc)
        rc = compare(s, x, buf, &bytes);
    s->engine->row[HT_ENGINE_DEDUP].figure[HT_DEDUP_COMPARED] += bytes;
    *out_bytes += bytes;
    if (rc == 1) {
        same->count++;
        return 0;
    }
    put_pair(s, x);
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
        put_pair(s, x);
    }
    same->count = 0;
    return rc ? rc : skipped;
}
