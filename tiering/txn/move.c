/* SPDX-License-Identifier: Apache-2.0 */
/*
 * move.c - gives stored bytes another place, with all of their owners at once; many in one transaction. Or other bytes
 * with the same content take their place for all owners: a compressed frame, or raw bytes from memory for bad ones.
 *
 *   read, write, flush -> transaction: a record with the new place for each owner -> the old place is a deferred free
 *
 * References do not know the other owners of their bytes. A caller that moved one of several would store the bytes
 * twice. So it names all owners, and the count of owners says whether one is missing: then the bytes stay.
 *
 * No chunk is held while the thread waits for the transaction: an abort inside one waits for chunks. In the transaction
 * everything is looked at again: any change of any owner in between wins, and the bytes stay where they are for all.
 * What an owner shows stays the same, so this may come in the middle of a step: the step stays atomic. The reservation
 * for an object's next rewrite is not touched. A truncation in between keeps the place but shows fewer bytes: then the
 * new place shows as few.
 *
 * Bytes may have very many owners, so the transaction lets other threads have the store's lock now and then:
 *
 *   hold each owner, waiting for none --all there are are held--> a record for each, and it is released
 *                                     '--one is not-------------> release them: the bytes stay
 *
 * Nothing but the holder of a chunk changes it, and published references change in transactions alone. So a held owner
 * stays what it was when it was looked at. A published object dies in a transaction only, so none needs a reference. No
 * owner can be added either: that needs a chunk of one. The records of all owners are in one transaction, so a crash
 * leaves all of them at the old place or all at the new one.
 *
 * Bytes that are bad (scrub found that) leave their place with the owners that can: the others would not gain if all
 * stayed there. For the same reason they need not move in one transaction. If the log or memory has no room for all
 * records, parts of the owners follow each other, and the caller is an owner of the new place meanwhile.
 */
#include <limits.h>

#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/flush.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

enum { TRIES = 50, PAUSE_NS = 2000000 };   /* of bad bytes, while a thread holds an owner */
enum { PART_RECORD_BYTES_MAX = 16 << 20 }; /* of their owners that move together */

/* Which owners move: all or none; those that may, and among them the first; those that may. */
enum whom { ALL, WITH_FIRST, ANY };

int ht_move_make_room(struct ht_move_owner **owner, unsigned *cap, unsigned need, struct ht_move m[], unsigned count)
{
    unsigned at = 0;

    if (need <= *cap)
        return 0;
    struct ht_move_owner *more = realloc(*owner, need * sizeof(*more));
    if (!more)
        return -ENOMEM;
    for (unsigned i = 0; i < count; at += m[i++].owners)
        m[i].owner = &more[at];
    *owner = more;
    *cap = need;
    return 0;
}

/* ---------------------------------------------------------------- writing */

/* The bytes of io, which no chunk waits for, are on their way to new space. -ENOSPC: also if they took more pieces. */
static int begin_write(struct ht_chunk_io *io, struct ht_ring *ring, unsigned extents_max, struct ht_alloc_hint hint)
{
    struct ht_store *s = io->obj->s;

    ht_store_lock(s);
    int rc = ht_chunk_write_place(io, hint);
    if (!rc && ht_ref_extents(&io->ref) > extents_max) { /* it would read slower, and the log may lack room */
        ht_chunk_write_cancel(io);
        rc = -ENOSPC;
    }
    if (rc) {
        ht_store_unlock(s);
        return rc;
    }
    ht_chunk_write_start(io, ring);
    return 0;
}

static int end_write(struct ht_move *m, struct ht_chunk_io *io, struct ht_ring *ring)
{
    ht_chunk_write_wait(io, ring);
    int rc = ht_store_locked(io->obj->s, ht_chunk_write_finish(io, ring));
    if (!rc)
        m->now = io->ref;
    m->flush_error_passes = io->xfer.flush_error_passes;
    return rc;
}

/* The device for so many blocks of content such as this, and the permit to write them there. Or -ENOSPC. */
static int admit(const struct ht_obj *o, uint32_t blocks, struct ht_permit *out_permit)
{
    struct ht_store *s = o->s;

    int device = ht_store_locked(s, ht_alloc_assign(s->alloc, blocks, ht_obj_hint(o, -1)));
    if (device < 0)
        return -ENOSPC;
    const struct ht_permit_request request = {
        .dev = s->dev[device], .direction = HT_DIRECTION_WRITE, .bytes = blocks * HT_BLOCK_BYTES};
    ht_permit_get(&s->gate, &request, out_permit);
    return device;
}

int ht_move_write_copies(struct ht_store *s, struct ht_move m[], uint8_t *const bytes[], unsigned n,
                         struct ht_ring *ring, int out_rc[])
{
    struct ht_chunk_io io[HT_MOVE_WRITES_MAX];
    struct ht_permit permit;
    uint32_t blocks = 0;

    for (unsigned i = 0; i < n; i++) {
        io[i] = (struct ht_chunk_io){.obj = m[i].obj};
        ht_chunk_write_prepare_copy(&io[i], bytes[i], &m[i].was);
        blocks += ht_ref_blocks(&m[i].was);
    }
    int device = admit(m[0].obj, blocks, &permit);
    if (device < 0)
        return device;
    for (unsigned i = 0; i < n; i++)
        out_rc[i] = begin_write(&io[i], ring, ht_ref_extents(&m[i].was),
                                (struct ht_alloc_hint){.device = device, .compacts = true});
    for (unsigned i = 0; i < n; i++)
        if (!out_rc[i])
            out_rc[i] = end_write(&m[i], &io[i], ring);
    ht_permit_put(&permit);
    return 0;
}

int ht_move_write_frame(struct ht_move *m, struct ht_ring *ring, void *frame, uint32_t len)
{
    struct ht_chunk_io io = {.obj = m->obj};
    struct ht_permit permit;

    ht_chunk_write_prepare(&io, frame, len, HT_CODEC_PLANES, m->was.visible);
    int device = admit(io.obj, ht_ref_blocks(&io.ref), &permit);
    if (device < 0)
        return device;
    int rc = begin_write(&io, ring, ht_ref_extents(&m->was), (struct ht_alloc_hint){.device = device});
    if (!rc)
        rc = end_write(m, &io, ring);
    ht_permit_put(&permit);
    return rc;
}

int ht_move_write_raw(struct ht_move *m, struct ht_ring *ring, void *bytes, uint32_t len)
{
    struct ht_chunk_io io = {.obj = m->obj};

    ht_chunk_write_prepare(&io, bytes, len, HT_CODEC_RAW, len);
    int rc = begin_write(&io, ring, UINT_MAX, HT_ALLOC_HINT_NONE);
    return rc ? rc : end_write(m, &io, ring);
}

/* ----------------------------------------------------------- transaction */

/* Is it an owner of the bytes, with nothing newer? A thread may hold it. */
static struct ht_chunk *owner_chunk(struct ht_store *s, const struct ht_move *m, unsigned owner, struct ht_obj **out_o)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c = ht_chunk_find_in(s, m->owner[owner].oid, m->owner[owner].index, out_o);
    bool owns = c && (*out_o)->published && (c->flags & ~HT_CH_LOG_RESERVED) == HT_CH_PUB &&
        ht_ref_same_place(&c->pub, &m->was);

    return owns ? c : NULL;
}

/* Has the reference as many owners as there are here? The first one is as it was. */
static bool has_owners(struct ht_store *s, const struct ht_move *m) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o;
    const struct ht_chunk *c = owner_chunk(s, m, 0, &o);
    const struct ht_refcount *e = c ? ht_refcount_find(s, &c->pub) : NULL;

    return c && ((e ? e->owners : 1) == m->owners || HT_MUTANT("owner-left-behind"));
}

bool ht_move_may(struct ht_store *s, const struct ht_move *m)
{
    struct ht_slice slice = {0};
    struct ht_obj *o;

    for (unsigned i = 0; i < m->owners; i++, ht_slice_next(s, &slice)) {
        const struct ht_chunk *c = owner_chunk(s, m, i, &o);
        if (!c || c->exclusive || c->shared)
            return false;
    }
    return has_owners(s, m);
}

/* Other bytes than the ones that were there have only the content that was visible when they were made. */
static bool has_content(const struct ht_move *m, const struct ht_chunk *c)
{
    bool copy = m->now.codec == m->was.codec && m->now.stored == m->was.stored && m->now.checksum == m->was.checksum;

    return copy || c->pub.visible <= m->now.visible || HT_MUTANT("frame-too-short");
}

static void release(struct ht_store *s, const struct ht_move *m, unsigned held) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = {0};

    for (unsigned i = 0; i < held; i++, ht_slice_next(s, &slice)) {
        struct ht_obj *o;
        struct ht_chunk *c = ht_chunk_find_in(s, m->owner[i].oid, m->owner[i].index, &o);
        ht_chunk_unlock_exclusive(o, c, m->owner[i].index);
    }
}

/* Having looked at so many and held these: is another one worth it? */
static bool looks_on(enum whom whom, unsigned looked, unsigned held)
{
    return whom == ANY || held == looked || (whom == WITH_FIRST && held);
}

/* Holds the owners that may move now, and puts them first. *busy: a thread holds one that may move later. */
static unsigned hold(struct ht_store *s, struct ht_move *m, enum whom whom, bool *busy) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = {0};
    struct ht_obj *o;
    unsigned held = 0;

    *busy = false;
    for (unsigned i = 0; i < m->owners && looks_on(whom, i, held); i++, ht_slice_next(s, &slice)) {
        struct ht_move_owner w = m->owner[i];
        struct ht_chunk *c = owner_chunk(s, m, i, &o);
        if (!c || !has_content(m, c))
            continue;
        if (!ht_chunk_trylock_exclusive(o, c, w.index)) {
            *busy = true;
            continue;
        }
        m->owner[i] = m->owner[held];
        m->owner[held++] = w;
    }
    return held;
}

/*
 * A copy of the new reference for each owner, and owners for all. The first gets the caller's, unless that stays an
 * owner. Changes nothing if it fails.
 */
static struct ht_ref *make_refs(struct ht_store *s, struct ht_move *m, unsigned n) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_ref *ref = calloc(n, sizeof(*ref));
    struct ht_slice slice = {0};
    bool had_others = m->now.shared;
    unsigned first = m->keeps ? 0 : 1, copies = first, counted = first;

    if (!ref)
        return NULL;
    m->now.shared = had_others || m->keeps || n > 1;
    ref[0] = m->now;
    for (; copies < n && !ht_ref_copy(&ref[copies], &m->now); copies++)
        ht_slice_next(s, &slice);
    for (; copies == n && counted < n && !ht_refcount_add(s, &m->now, true); counted++)
        ht_slice_next(s, &slice);
    if (copies == n && counted == n)
        return ref;
    for (; counted > first; counted--)
        (void)ht_refcount_drop(s, &m->now, false);
    if (!had_others)
        (void)ht_refcount_drop(s, &m->now, false); /* the first one: the table forgets the place */
    while (copies-- > first)
        ht_ref_forget(&ref[copies]);
    free(ref);
    return NULL;
}

/* An owner that is held, and no longer. */
static void move_owner(const struct ht_move_owner *w, const struct ht_ref *ref, struct ht_tx *tx)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o;
    struct ht_chunk *c = ht_chunk_find_in(tx->s, w->oid, w->index, &o);
    struct ht_ref now = *ref;

    if (!HT_MUTANT("cut-undone"))
        now.visible = c->pub.visible; /* fewer, if a truncation was published after the bytes had been read */
    now.kept_raw = c->pub.kept_raw;
    c->generation++;
    ht_record_chunk(&tx->records, o, w->index, c, &now);
    o->stored_blocks += ht_ref_blocks(&now);
    if (now.shared)
        ht_obj_count_shared(o, &now, 1);
    ht_ref_log_reserve_pieces(o->s, &now);
    ht_tx_free_ref(o, &c->pub);
    c->pub = now;
    ht_note_published(o->s, &c->pub);
    ht_chunk_unlock_exclusive(o, c, w->index);
}

static int move_held(struct ht_store *s, struct ht_move *m, unsigned n, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = {0};
    bool more_pieces = ht_ref_extents(&m->now) > ht_ref_extents(&m->was);

    if (more_pieces && !ht_ref_pieces_fit(s, &m->now, n))
        return -ENOSPC; /* of the log */
    struct ht_ref *ref = make_refs(s, m, n);
    if (!ref)
        return -ENOMEM;
    for (unsigned i = 0; i < n; i++, ht_slice_next(s, &slice))
        move_owner(&m->owner[i], &ref[i], tx);
    free(ref);
    if (!m->keeps)
        memset(&m->now, 0, sizeof(m->now)); /* the first owner has its extents */
    m->moved = true;
    return 0;
}

/* In a transaction. -EAGAIN: a thread holds one; -ESTALE: one has changed, or there are others; -ENOSPC, -ENOMEM. */
static int move(struct ht_store *s, struct ht_move *m, enum whom whom, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_STORE)
{
    bool busy;

    if (!ht_ref_holds(&m->now) || ht_ref_endangered(s, &m->now))
        return -ESTALE;
    unsigned held = hold(s, m, whom, &busy);
    bool all = held == m->owners || HT_MUTANT("owner-unheld");
    bool may = held && (whom != ALL || (all && has_owners(s, m)));
    int rc = may ? move_held(s, m, held, tx) : busy ? -EAGAIN : -ESTALE;
    if (rc)
        release(s, m, held);
    return rc;
}

uint32_t ht_move_record_bytes(const struct ht_ref *ref)
{
    return HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES + ht_ref_extra_bytes(ref);
}

static size_t record_bytes(const struct ht_move m[], unsigned count)
{
    size_t bytes = 0;

    for (unsigned i = 0; i < count; i++)
        bytes += m[i].owners * (size_t)ht_move_record_bytes(&m[i].now);
    return bytes;
}

/* Durable before any chunk has it: a later failed flush finds it covered. An earlier one may have voided it. */
static int flush_all(struct ht_store *s, const struct ht_move m[], unsigned count)
{
    uint32_t devices = 0;
    int rc = 0;

    ht_store_lock(s);
    for (unsigned i = 0; i < count; i++)
        if (ht_ref_holds(&m[i].now))
            devices |= ht_ref_unflushed(s, &m[i].now);
    ht_store_unlock(s);
    if (ht_flush_devices(s, devices))
        return -EIO;
    ht_store_lock(s);
    for (unsigned i = 0; i < count; i++)
        if (ht_ref_holds(&m[i].now) && ht_ref_is_void(s, &m[i].now, m[i].flush_error_passes))
            rc = -EIO;
    ht_store_unlock(s);
    return rc;
}

/* -EIO, and the errors of the log: nothing was moved. *out_rc: of the last move. */
static int publish(struct ht_store *s, struct ht_move m[], unsigned count, enum whom whom, uint64_t *out_lsn,
                   int *out_rc)
{
    struct ht_tx *tx;
    int rc = ht_tx_begin(s, record_bytes(m, count), &tx);

    if (rc)
        return rc;
    ht_store_lock(s);
    for (unsigned i = 0; i < count; i++)
        *out_rc = move(s, &m[i], whom, tx);
    ht_store_unlock(s);
    return ht_tx_commit(tx, out_lsn);
}

int ht_move_publish(struct ht_store *s, struct ht_move m[], unsigned count, uint64_t *out_lsn)
{
    int rc = flush_all(s, m, count), moved = 0;

    *out_lsn = 0;
    if (!rc)
        rc = publish(s, m, count, ALL, out_lsn, &moved);
    ht_store_lock(s);
    for (unsigned i = 0; i < count; i++)
        if (ht_ref_holds(&m[i].now))
            ht_free_ref_now(s, &m[i].now);
    ht_store_unlock(s);
    return rc;
}

/* ---------------------------------------------------------------- bad bytes */

/* All owners that m names, or if that cannot be, these. While a thread holds one this waits a while. */
static int publish_some(struct ht_store *s, struct ht_move *m, enum whom these, uint64_t *out_lsn)
{
    int rc = 0, moved = -EAGAIN;
    enum whom whom = ALL;

    for (unsigned i = 0; !rc && i < TRIES && (moved == -EAGAIN || (moved == -ESTALE && whom == ALL)); i++) {
        if (i && moved == -EAGAIN)
            ht_sleep_ns(PAUSE_NS);
        if (moved == -ESTALE || i + 1 == TRIES)
            whom = these;
        rc = publish(s, m, 1, whom, out_lsn, &moved);
    }
    return rc ? rc : moved;
}

/* One part after the other. 0, or the error of the first one. */
static int publish_parts(struct ht_store *s, struct ht_move *m, unsigned most, uint64_t *out_lsn)
{
    struct ht_move part = *m;
    uint64_t lsn;
    int result = -ENOSPC;

    part.keeps = true;
    for (unsigned at = 0; at < m->owners && most;) {
        part.owner = &m->owner[at];
        part.owners = (unsigned)ht_min_u64(most, m->owners - at);
        int rc = publish_some(s, &part, at ? ANY : WITH_FIRST, &lsn);
        if (rc == -ENOSPC) { /* of the log, maybe not for fewer */
            most /= 2;
            continue;
        }
        *out_lsn = !rc && lsn ? lsn : *out_lsn;
        result = at ? result : rc;
        if (result)
            break;
        at += part.owners;
    }
    m->moved = part.moved;
    m->now = part.now;
    return result;
}

int ht_move_publish_bad(struct ht_store *s, struct ht_move *m, uint64_t *out_lsn)
{
    unsigned most = PART_RECORD_BYTES_MAX / ht_move_record_bytes(&m->now);
    int rc = flush_all(s, m, 1);

    *out_lsn = 0;
    if (!rc)
        rc = m->owners <= most ? publish_some(s, m, WITH_FIRST, out_lsn) : -ENOSPC;
    if (rc == -ENOSPC && m->owners > 1)
        rc = publish_parts(s, m, (unsigned)ht_min_u64(most, m->owners / 2), out_lsn);
    /* The caller is an owner no more, or it was the only one. */
    ht_store_lock(s);
    if (ht_ref_holds(&m->now))
        (void)ht_ref_drop(s, &m->now);
    memset(&m->now, 0, sizeof(m->now));
    ht_store_unlock(s);
    return rc;
}
