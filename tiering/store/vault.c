/* SPDX-License-Identifier: Apache-2.0 */
/* vault.c - which vault the store has, and chunks that lie in it. */

#include "tiering/api/cold.h"
#include "tiering/api/object.h"
#include "tiering/api/tx.h"
#include "tiering/codec/codec.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/cold.h"
#include "tiering/remote/remote.h"
#include "tiering/txn/txn.h"

/* ------------------------------------------------------------------ the vault */

/* In a transaction. -EALREADY: nothing is to be put. */
static int set_vault(struct ht_store *s, const struct ht_vault *v) HT_REQUIRES(HT_LOCK_STORE)
{
    bool same = s->vault.known && memcmp(s->vault.uuid, v->uuid, sizeof(v->uuid)) == 0;

    if (same && strcmp(s->vault.url, v->url) == 0)
        return -EALREADY;
    if (!same && s->objects.cold_blocks)
        return -EBUSY;
    int rc = s->vault.known ? 0 : ht_journal_reserve(s->journal, HT_VAULT_RECORD_BYTES, false);
    if (!rc)
        s->vault = *v;
    return rc;
}

/* *same: it is the vault already. */
static int put_vault(struct ht_store *s, const struct ht_vault *v, bool *same)
{
    struct ht_tx *tx;
    uint64_t lsn;
    int rc = ht_tx_begin(s, HT_VAULT_RECORD_BYTES, &tx);

    if (rc)
        return rc;
    ht_store_lock(s);
    int set = set_vault(s, v);
    ht_store_unlock(s);
    if (!set)
        ht_tx_put_vault(tx, v);
    rc = ht_tx_commit(tx, &lsn);
    if (!rc && !set)
        rc = ht_store_sync(s, lsn);
    *same = set == -EALREADY;
    return set && !*same ? set : rc;
}

int ht_store_set_vault(struct ht_store *s, const uint8_t uuid[16], const char *url)
{
    struct ht_vault v = {.known = true};
    int rc = ht_remote_url(url, v.url);

    if (rc)
        return rc;
    memcpy(v.uuid, uuid, sizeof(v.uuid));
    if (ht_is_read_only(s))
        return -EROFS;
    rc = ht_store_need_features(s, HT_FEAT_REFUSE_COLD);
    struct ht_remote_state state;
    int was = ht_cold_state(s, &state);
    bool same = false;
    if (!rc)
        rc = put_vault(s, &v, &same);
    return rc || (same && !was) ? rc : ht_cold_connect(s);
}

int ht_store_vault(struct ht_store *s, struct ht_vault_info *out)
{
    struct ht_remote_state state = {.answer_age_ns = UINT64_MAX};

    *out = (struct ht_vault_info){.is_silent = false};
    ht_store_lock(s);
    bool known = s->vault.known;
    memcpy(out->uuid, s->vault.uuid, sizeof(out->uuid));
    snprintf(out->url, sizeof(out->url), "%s", s->opts.vault_url ? s->opts.vault_url : s->vault.url);
    ht_store_unlock(s);
    if (!known)
        return -ENXIO;
    (void)!ht_cold_state(s, &state);
    out->is_silent = state.is_silent;
    out->answer_age_ns = state.answer_age_ns;
    return 0;
}

/* --------------------------------------------------------------------- places */

static int ref_of(const struct ht_obj *o, const struct ht_obj_place *p, struct ht_ref *out) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t start = p->index << o->chunk_shift, unit = p->unit;
    uint32_t blocks = ht_blocks(p->stored);
    struct ht_codec_sizes z = {.codec = p->codec, .extents = 1, .stored = p->stored, .checksum = p->checksum};

    if (p->lease >> HT_VAULT_LEASE_BITS || p->segment >> HT_VAULT_SEGMENT_BITS || unit >= HT_VAULT_UNITS ||
        p->stored > HT_CHUNK_BYTES || p->index >= HT_FILE_BYTES_MAX >> o->chunk_shift || start >= o->size)
        return -EINVAL;
    z.visible = (uint32_t)ht_min_u64(o->size - start, ht_obj_bytes_per_chunk(o));
    uint64_t block = (uint64_t)p->lease << (HT_VAULT_SEGMENT_BITS + HT_VAULT_UNIT_BITS) |
        (uint64_t)p->segment << HT_VAULT_UNIT_BITS | unit;
    bool whole = p->codec != HT_CODEC_RAW || p->stored == z.visible;
    if (p->codec == HT_CODEC_LOST || !whole || !ht_vault_place_valid(block, blocks) || !ht_codec_sizes_valid(&z))
        return -EINVAL;
    *out = (struct ht_ref){.stored = p->stored,
                           .visible = z.visible & HT_VISIBLE_MASK,
                           .shared = 1,
                           .codec = p->codec & 0x7f,
                           .checksum = p->checksum};
    const struct ht_extent e = {block, blocks, HT_DEVICE_VAULT};
    return ht_ref_set(out, &e, 1);
}

static int set_place(struct ht_obj *o, const struct ht_obj_place *p) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c;
    struct ht_ref ref;
    int rc = ref_of(o, p, &ref);

    if (!rc)
        rc = ht_obj_need_extra(o);
    if (!rc)
        rc = ht_chunk_ask(o, p->index, &c);
    if (rc)
        return rc;
    ht_chunk_lock_exclusive(o, c, p->index);
    rc = o->extra->shm         ? -EBUSY
        : o->extra->used_bytes ? -EOPNOTSUPP
        : !o->s->vault.known   ? -ENXIO
                               : ref_of(o, p, &ref); /* its size may have changed while this waited */
    if (rc) {
        ht_chunk_unlock_exclusive(o, c, p->index);
        return rc;
    }
    if (c->flags & ~HT_CH_LOG_RESERVED || c->slot != HT_SLOT_NONE)
        rc = -EEXIST;
    else
        rc = ht_chunk_reserve(o, c, 0);
    if (!rc) {
        ht_chunk_install(o, c, p->index, &ref);
        o->stored_blocks += ht_ref_blocks(&ref);
        ht_obj_count_shared(o, &ref, 1);
        ht_obj_count_cold(o, &ref, 1);
        o->version++;
        ht_obj_note_edit(o);
    }
    ht_chunk_unlock_exclusive(o, c, p->index);
    return rc;
}

int ht_obj_set_places(struct ht_obj *o, unsigned aborts, const struct ht_obj_place *place, unsigned count)
{
    struct ht_scope *sc;
    bool frames = false;

    for (unsigned i = 0; i < count; i++)
        frames |= place[i].codec == HT_CODEC_PLANES;
    if (ht_is_read_only(o->s))
        return -EROFS;
    int rc = frames ? ht_store_need_features(o->s, HT_FEAT_REFUSE_PLANES) : 0;
    if (rc)
        return rc;
    rc = ht_obj_lock_for_change(o, &sc);
    if (rc)
        return rc;
    if (!sc->id || o->obj_class == HT_CLASS_SCRATCH || ht_obj_bytes_per_chunk(o) != HT_CHUNK_BYTES)
        rc = -EINVAL;
    else if (sc->aborts != aborts)
        rc = -ESTALE;
    for (unsigned i = 0; !rc && i < count; i++)
        rc = set_place(o, &place[i]);
    ht_obj_unlock_after_change(o, sc);
    return rc;
}

static struct ht_obj_place place_of(const struct ht_ref *ref, uint64_t index)
{
    const struct ht_remote_get range = ht_remote_range(ht_ref_extent(ref, 0).block, ref->stored, NULL);

    return (struct ht_obj_place){
        .index = index,
        .lease = range.lease,
        .segment = range.n,
        .unit = range.offset / HT_BLOCK_BYTES,
        .stored = ref->stored,
        .codec = ref->codec,
        .checksum = ref->checksum,
    };
}

/* Does the chunk show all bytes of its block in the vault? */
static bool shows_place(const struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = ht_chunk_ref(c);
    bool newer = ht_chunk_is_dirty(o->s, c);

    return ref && ht_ref_is_cold(ref) && !newer && !(c->flags & (HT_CH_SHARE | HT_CH_BAD)) &&
        ref->visible == ht_chunk_len(o, index) && (ref->codec != HT_CODEC_RAW || ref->stored == ref->visible);
}

unsigned ht_obj_places(struct ht_obj *o, uint64_t index, struct ht_obj_place *out, unsigned cap)
{
    struct ht_slice slice = {0};
    unsigned count = 0;

    ht_store_lock(o->s);
    ht_chunk_for_each_busy_from(c, o, index) {
        if (count == cap)
            break;
        if (shows_place(o, c, index))
            out[count++] = place_of(ht_chunk_ref(c), index);
        ht_slice_next(o->s, &slice);
    }
    ht_store_unlock(o->s);
    return count;
}

/* --------------------------------------------------------------------- recall */

/*
 * The content of a published reference with nothing newer; its object does not go. 0: it moved, or is not
 * that. -EAGAIN: a thread has it.
 */
static int recall_chunk(struct ht_obj *o, uint64_t index, uint64_t *bytes, ht_recall_stop *stop, void *ctx)
{
    struct ht_move_owner self = {o->oid, index};
    struct ht_move m = {.obj = o, .owner = &self, .owners = 1};
    struct ht_store *s = o->s;
    struct ht_cold_want w = {NULL, false};
    uint64_t lsn;

    ht_store_lock(s);
    struct ht_chunk *c = ht_chunk_find(o, index);
    bool may = c && (c->flags & ~HT_CH_LOG_RESERVED) == HT_CH_PUB && ht_ref_is_cold(&c->pub);
    int rc = may ? ht_cold_begin(o, index, false, true, &w) : 0;
    if (!rc && w.fetch)
        rc = ht_cold_wait_or_stop(&w, stop, ctx);
    if (!rc && w.fetch)
        m.was = *ht_cold_ref(&w);
    ht_store_unlock(s);
    struct ht_ring *ring = ht_store_ring(s);
    if (!rc && w.fetch)
        rc = ring ? ht_move_write_raw(&m, ring, ht_cold_bytes(&w), m.was.visible) : -ENOMEM;
    if (!rc && w.fetch)
        rc = ht_move_publish(s, &m, 1, &lsn);
    if (!rc && w.fetch && !m.moved)
        rc = -EAGAIN;
    *bytes = w.fetch ? m.was.stored : 0;
    ht_store_lock(s);
    ht_cold_put(&w);
    ht_store_unlock(s);
    return rc;
}

/* The next chunk from there on that lies in the vault; UINT64_MAX: none. */
static uint64_t next_cold(struct ht_obj *o, uint64_t index)
{
    struct ht_slice slice = {0};
    uint64_t found = UINT64_MAX;

    ht_store_lock(o->s);
    ht_chunk_for_each_busy_from(c, o, index) {
        if (c->flags & HT_CH_PUB && ht_ref_is_cold(&c->pub)) {
            found = index;
            break;
        }
        ht_slice_next(o->s, &slice);
    }
    ht_store_unlock(o->s);
    return found;
}

enum { MOMENT_NS = 10000000 };

/* As many bytes as the options allow since then. */
static void pace(const struct ht_store *s, uint64_t began_ns, uint64_t bytes, ht_recall_stop *stop, void *ctx)
{
    uint64_t rate = s->opts.background_rate_bytes;
    uint64_t due_ns = rate ? began_ns + (uint64_t)((double)bytes * 1e9 / (double)rate) : 0;

    while (ht_now_ns() < due_ns && !stop(ctx))
        ht_sleep_ns(MOMENT_NS);
}

int ht_obj_recall(struct ht_obj *o, ht_recall_stop *stop, void *ctx)
{
    enum ht_io_class was = ht_io_class_set(HT_IO_BACKGROUND);
    uint64_t index = 0;
    int rc = ht_is_read_only(o->s) ? -EROFS : 0;

    while (!rc && (index = next_cold(o, index)) != UINT64_MAX) {
        uint64_t began_ns = ht_now_ns(), bytes;
        rc = stop(ctx) ? -EINTR : recall_chunk(o, index, &bytes, stop, ctx);
        bool room = rc == -ENOSPC && ht_lack_space(HT_CHUNK_BYTES) && !ht_store_make_space(o->s, true);
        rc = rc == -EREMOTE || room ? -EAGAIN : rc;
        index += rc != -EAGAIN;
        if (rc == -EAGAIN) { /* it is read or written now: once more, if it is still cold */
            ht_sleep_ns(MOMENT_NS);
            rc = 0;
        } else if (!rc) {
            pace(o->s, began_ns, bytes, stop, ctx);
        }
    }
    (void)ht_io_class_set(was);
    return rc ? rc : ht_store_sync(o->s, o->s->frees.last_lsn);
}

bool ht_scope_is_warm(struct ht_store *s, uint64_t scope)
{
    return !ht_scope_cold_bytes(s, scope) && ht_store_sync(s, s->frees.last_lsn) == 0;
}

int ht_scope_recall(struct ht_store *s, uint64_t scope, ht_recall_stop *stop, void *ctx)
{
    uint64_t *oids;
    size_t count;
    int rc = ht_store_oids(s, &oids, &count);

    if (rc)
        return rc;
    for (size_t i = 0; !rc && i < count; i++) {
        struct ht_obj *o = ht_obj_get(s, oids[i]);
        struct ht_obj_stat st = {0};
        if (o)
            ht_obj_stat(o, &st);
        if (o && st.scope == scope && st.cold_bytes)
            rc = ht_obj_recall(o, stop, ctx);
        ht_obj_put(o);
    }
    free(oids);
    return rc;
}
