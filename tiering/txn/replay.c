/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay.c - puts the store's own records back into memory at mount.
 *
 * Records may name objects whose OBJECT record comes later (checkpoint emits in slices while normal records go on), so
 * unknown ids make placeholders; a placeholder that is still undefined at the end is damage. Space is marked only at
 * the end, when all references are known.
 *
 * Memory. Nobody knows who wrote the log, so its records may make no more than meta_bytes_max, which ask() alone
 * counts for all participants: T + 4 L for a log of L bytes. Programs stay below it by their own bounds. What lives in
 * a log reserves up to 4/13 L of it (journal/log_space.c). For each byte of these there are at most 13 of memory (a
 * model without parameters; 5 for an object, 3 for a file, 10 for a chunk that is alone in its leaf), which is 4 L.
 * Tables of sparse files may have T more (object/chunk.h).
 */

#include "tiering/base/log.h"
#include "tiering/base/mutant.h"
#include "tiering/codec/codec.h"
#include "tiering/object/context.h"
#include "tiering/remote/remote.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

/* ---------------------------------------------------------------- memory */

static_assert(sizeof(struct ht_obj) + sizeof(void *) <= HT_META_OF_LOG_BYTE_MAX * HT_OBJECT_RECORD_BYTES,
              "an object and its place in the table");

/* May a replay make a list of so many bytes, beside all that is there? -EOVERFLOW */
static int ask(struct ht_store *s, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t log_bytes = s->layout.log_bytes, all = s->objects.meta_bytes + ht_refs_hung_bytes();
    char most[32], of[32];

    s->txn->lists_bytes += bytes;
    all += s->txn->lists_bytes;
    ht_participant_for_each(c, s, meta_bytes)
        all += c->meta_bytes(c->ctx);
    if (all <= s->objects.meta_bytes_max || HT_MUTANT("replay-unbounded"))
        return 0;
    ht_error("log: its records describe more than the %s of memory that a log of %s may take, so hitrain did not write "
             "them; restore the store from a copy, or copy it with the version that wrote it to one with a larger log "
             "(mkfs.hitrain --log-size=)",
             ht_format_size(s->objects.meta_bytes_max, most, sizeof(most)), ht_format_size(log_bytes, of, sizeof(of)));
    return -EOVERFLOW;
}

/* Room for one more element of size bytes. */
static int grow(struct ht_store *s, void **list, size_t *cap, size_t count, size_t size) HT_REQUIRES(HT_LOCK_STORE)
{
    size_t more = *cap ? *cap : 64;
    int rc = count < *cap ? 0 : ask(s, more * size);

    return rc || count < *cap ? rc : ht_array_grow(list, cap, *cap + more, size);
}

/* --------------------------------------------------------------- records */

static struct ht_obj *find_or_make(struct ht_store *s, uint64_t oid) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = ht_obj_find_locked(s, oid);

    if (!o)
        o = ht_obj_insert_locked(s, oid);
    if (o)
        ht_store_saw_id(s, oid);
    return o;
}

static bool id_valid(uint64_t id)
{
    return id != 0 && id <= HT_ID_MAX;
}

/* Frees only the memory: the log's space is not known yet. */
static void forget_pub(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!(c->flags & HT_CH_PUB))
        return;
    o->s->objects.lost_chunks -= ht_ref_lost(&c->pub);
    ht_ref_forget(&c->pub);
    c->flags &= (uint8_t)~HT_CH_PUB;
    o->s->objects.chunks--;
}

static int replay_object(struct ht_store *s, struct ht_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t oid = ht_get_u64(r);
    uint32_t chunk_bytes = ht_get_u32(r), obj_class = ht_get_u32(r);
    uint64_t size = ht_get_u64(r), scope = ht_get_u64(r);

    if (!ht_reader_done(r) || !id_valid(oid) || !HT_CHUNK_BYTES_VALID(chunk_bytes) || obj_class > HT_CLASS_SCRATCH ||
        size > HT_FILE_BYTES_MAX)
        return -EUCLEAN;
    struct ht_obj *o = find_or_make(s, oid);
    struct ht_scope *sc = ht_scope_find(s, scope, true);
    if (!o || !sc)
        return -ENOMEM;
    o->chunk_shift = (uint8_t)__builtin_ctz(chunk_bytes);
    o->obj_class = (uint8_t)obj_class;
    o->size = o->pub_size = size;
    ht_obj_join(o, sc);
    o->defined = o->published = true;
    return 0;
}

static int replay_object_del(struct ht_store *s, struct ht_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t oid = ht_get_u64(r);

    if (!ht_reader_done(r))
        return -EUCLEAN;
    struct ht_obj *o = ht_obj_find_locked(s, oid);
    if (!o)
        return 0;
    ht_chunk_for_each(c, o, index)
        forget_pub(o, c);
    o->dead = true;
    o->delete_lsn = 0; /* and nothing that it names is left */
    o->refs++;
    o->obj_class = HT_CLASS_SCRATCH; /* has no log reserve yet */
    ht_obj_put_locked(o);
    return 0;
}

static int read_extents(struct ht_store *s, struct ht_reader *r, struct ht_extent *e, unsigned n, uint32_t stored)
{
    uint64_t blocks = 0;

    for (unsigned i = 0; i < n; i++) {
        e[i].device = ht_get_u8(r);
        uint8_t zero = ht_get_u8(r);
        e[i].blocks = ht_get_u16(r);
        e[i].block = ht_get_u64(r);
        bool cold = e[i].device == HT_DEVICE_VAULT && n == 1 && ht_vault_place_valid(e[i].block, e[i].blocks);
        if (zero || (e[i].device >= s->dev_count && !cold) || !e[i].blocks || e[i].blocks > HT_CHUNK_BLOCKS_MAX ||
            e[i].block >= 1ull << 48)
            return -EUCLEAN;
        blocks += e[i].blocks;
    }
    return blocks == ht_div_up(stored, HT_BLOCK_BYTES) ? 0 : -EUCLEAN;
}

static int replay_chunk(struct ht_store *s, struct ht_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t oid = ht_get_u64(r), index = ht_get_u64(r);
    uint32_t generation = ht_get_u32(r);
    struct ht_codec_sizes z = {.codec = ht_get_u8(r)};
    uint8_t reserved = ht_get_u8(r);

    z.extents = ht_get_u16(r);
    z.stored = ht_get_u32(r);
    z.visible = ht_get_u32(r);
    z.checksum = ht_get_u64(r);

    if (r->bad || !id_valid(oid) || reserved || index >= HT_FILE_BYTES_MAX / HT_SMALL_CHUNK_BYTES ||
        !ht_codec_sizes_valid(&z))
        return -EUCLEAN;
    struct ht_extent e[HT_FRAGS_MAX];
    int rc = read_extents(s, r, e, z.extents, z.stored);
    if (rc || !ht_reader_done(r))
        return -EUCLEAN;
    struct ht_obj *o = find_or_make(s, oid);
    struct ht_chunk *c = o ? ht_chunk_make(o, index) : NULL;
    if (!c)
        return -ENOMEM;
    forget_pub(o, c);
    c->pub = (struct ht_ref){
        .stored = z.stored, .visible = z.visible & HT_VISIBLE_MASK, .codec = z.codec, .checksum = z.checksum};
    rc = z.extents ? ht_ref_set(&c->pub, e, z.extents) : 0;
    if (rc)
        return rc;
    s->objects.lost_chunks += ht_ref_lost(&c->pub);
    c->flags |= HT_CH_PUB;
    ht_chunk_note_busy(o, c, index);
    c->generation = generation;
    s->objects.chunks++;
    return 0;
}

static int replay_chunk_del(struct ht_store *s, struct ht_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t oid = ht_get_u64(r), first = ht_get_u64(r), count = ht_get_u64(r);

    if (!ht_reader_done(r))
        return -EUCLEAN;
    struct ht_obj *o = ht_obj_find_locked(s, oid);
    if (!o)
        return 0;
    uint64_t end = count > UINT64_MAX - first ? UINT64_MAX : first + count, index = first;
    ht_chunk_for_each_from(c, o, index) {
        if (index >= end)
            break;
        forget_pub(o, c);
        ht_chunk_trim(o, index);
    }
    return 0;
}

static int replay_ids(struct ht_store *s, struct ht_reader *r)
{
    uint64_t next = ht_get_u64(r);

    if (!ht_reader_done(r) || next == 0 || next > HT_ID_MAX)
        return -EUCLEAN;
    ht_store_saw_id(s, next - 1);
    return 0;
}

static int replay_vault(struct ht_store *s, struct ht_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_vault v = {.known = true};
    char url[HT_REMOTE_URL_BYTES];
    const uint8_t *uuid = ht_get_bytes(r, sizeof(v.uuid));
    size_t len = (size_t)(r->end - r->p);
    const uint8_t *text = ht_get_bytes(r, len);

    if (!uuid || !text || !len || len >= sizeof(v.url))
        return -EUCLEAN;
    memcpy(v.uuid, uuid, sizeof(v.uuid));
    memcpy(v.url, text, len);
    if (strlen(v.url) != len || ht_remote_url(v.url, url) || strcmp(url, v.url) != 0)
        return -EUCLEAN;
    s->vault = v;
    return 0;
}

static int replay_own(struct ht_store *s, uint16_t type, struct ht_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    switch (type) {
    case HT_REC_IDS:
        return replay_ids(s, r);
    case HT_REC_OBJECT:
        return replay_object(s, r);
    case HT_REC_OBJECT_DEL:
        return replay_object_del(s, r);
    case HT_REC_CHUNK:
        return replay_chunk(s, r);
    case HT_REC_CHUNK_DEL:
        return replay_chunk_del(s, r);
    case HT_REC_VAULT:
        return replay_vault(s, r);
    default:
        if (s->txn->unknown.count++ == 0)
            s->txn->unknown.type = type;
        return 0;
    }
}

static int replay_any(struct ht_store *s, uint16_t type, const uint8_t *payload, uint32_t len)
    HT_REQUIRES(HT_LOCK_STORE)
{
    ht_participant_for_each(c, s, replay)
        if (type >= c->type_first && type <= c->type_last)
            return c->replay(c->ctx, type, payload, len);
    struct ht_reader r = ht_reader_of(payload, len);
    return replay_own(s, type, &r);
}

/* fsck leaves them out, and there may be any number. */
static void tell_malformed(struct ht_store *s, uint16_t type, uint32_t len)
{
    enum { TOLD_MAX = 10 };

    if (s->txn->malformed++ < TOLD_MAX)
        ht_error("log: malformed record of type %u, %u bytes%s", type, len,
                 s->txn->malformed == TOLD_MAX ? "; further ones are counted only" : "");
}

/* A malformed record, which may be left out, has its memory, too. */
int ht_store_replay(struct ht_store *s, uint16_t type, const uint8_t *payload, uint32_t len)
{
    int rc = replay_any(s, type, payload, len), over = ask(s, 0);

    if (rc == -EUCLEAN)
        tell_malformed(s, type, len);
    return over ? over : rc;
}

/* ------------------------------------------------------------- afterwards */

static int note_conflict(struct ht_obj *o, uint64_t index, const struct ht_extent *e, int error)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_txn *t = o->s->txn;
    int rc = grow(o->s, (void **)&t->conflicts, &t->conflict_cap, t->conflict_count, sizeof(*t->conflicts));

    if (rc)
        return rc;
    t->conflicts[t->conflict_count++] = (struct ht_ref_conflict){
        .oid = o->oid, .index = index, .device = e->device, .block = e->block, .blocks = e->blocks, .error = error};
    return 0;
}

/* References that begin in taken space. */
struct waiting {
    struct ht_obj *o;
    struct ht_chunk *c;
    uint64_t index;
};

struct owner {
    uint64_t place; /* device and first block; 0: no entry, there is the superblock */
    struct ht_obj *o;
    struct ht_ref *ref; /* NULL: no reference begins there */
};

struct settling {
    struct waiting *waiting;
    size_t count, cap;
    struct owner *owner; /* hash of the places where references wait */
    size_t owner_size;
};

static int add_waiting(struct settling *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = grow(o->s, (void **)&w->waiting, &w->cap, w->count, sizeof(*w->waiting));

    if (rc)
        return rc;
    w->waiting[w->count++] = (struct waiting){o, c, index};
    return 0;
}

/* Marks the space that the reference names; space that is taken is a conflict. */
static int mark_ref(struct ht_obj *o, uint64_t index, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    for (unsigned i = 0; i < ht_ref_extents(ref); i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        int rc = ht_alloc_mark(s->alloc, &e);
        rc = rc ? note_conflict(o, index, &e, rc) : 0;
        if (rc)
            return rc;
    }
    return 0;
}

static int settle_cold(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_extent e = ht_ref_extent(&c->pub, 0);

    c->pub.shared = 1;
    ht_obj_count_shared(o, &c->pub, 1);
    ht_obj_count_cold(o, &c->pub, 1);
    return o->s->vault.known ? 0 : note_conflict(o, index, &e, -ENXIO);
}

/*
 * A reference that begins in taken space may be another owner of the same extents: it waits until all first owners are
 * known. Until then the bit shared of its reference marks it.
 */
static int settle_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index, struct settling *w)
    HT_REQUIRES(HT_LOCK_STORE)
{
    bool cold = ht_ref_is_cold(&c->pub);
    struct ht_extent first = ht_ref_extent(&c->pub, 0);
    bool holds = ht_ref_holds(&c->pub), taken = holds && ht_alloc_begins_taken(o->s->alloc, &first);
    int rc = cold ? settle_cold(o, c, index)
        : !holds  ? 0
        : taken   ? add_waiting(w, o, c, index)
                  : mark_ref(o, index, &c->pub);

    if (rc)
        return rc;
    c->pub.shared = taken || cold;
    o->stored_blocks += ht_ref_blocks(&c->pub);
    ht_chunk_set_log_reserved(o, c);
    return ht_journal_reserve(o->s->journal, HT_CHUNK_LOG_BYTES + ht_ref_extra_bytes(&c->pub), true);
}

/* Describes the object by its chunks: a size that all fit, with the end of the last one. */
static void describe(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t last = 0;
    uint32_t most = 0, end = 0;

    ht_chunk_for_each(c, o, index) {
        if (!(c->flags & HT_CH_PUB))
            continue;
        most = (uint32_t)ht_max_u64(most, ht_ref_image_bytes(&c->pub));
        last = index;
        end = c->pub.visible;
    }
    o->chunk_shift = (uint8_t)__builtin_ctz(most > HT_SMALL_CHUNK_BYTES ? HT_CHUNK_BYTES : HT_SMALL_CHUNK_BYTES);
    o->size = o->pub_size = ht_min_u64((last << o->chunk_shift) + end, HT_FILE_BYTES_MAX);
    o->defined = o->published = true;
}

static int undescribed(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_extent nowhere = {0};

    if (!o->s->opts.leave_out)
        return ht_fail(-EUCLEAN, "log: object %llu has content but no description", (unsigned long long)o->oid);
    describe(o);
    return note_conflict(o, 0, &nowhere, -ENOENT);
}

/* Prefetches for a whole leaf, at its first chunk in use. */
static void prefetch_places(struct ht_obj *o, const struct ht_chunk *first, unsigned count) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned k = 0; k < count; k++) {
        if (!(first[k].flags & HT_CH_PUB))
            continue;
        struct ht_extent e = ht_ref_extent(&first[k].pub, 0);
        ht_alloc_prefetch(o->s->alloc, &e);
    }
}

static int too_large(struct ht_obj *o, const struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!o->s->opts.leave_out)
        return ht_fail(-EUCLEAN, "log: object %llu has a stored chunk larger than its chunks",
                       (unsigned long long)o->oid);
    struct ht_extent e = ht_ref_extent(&c->pub, 0);
    return note_conflict(o, index, &e, -EFBIG);
}

static int settle_object(struct ht_obj *o, struct settling *w) HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = o->defined ? 0 : undescribed(o);

    if (!rc)
        rc = ht_journal_reserve(o->s->journal, HT_OBJECT_RECORD_BYTES, true);
    ht_chunk_for_each(c, o, index) {
        if (rc)
            break;
        if (c->pos == 0 || index == 1)
            prefetch_places(o, c - c->pos, index ? HT_LEAF_CHUNKS : 1);
        if (!(c->flags & HT_CH_PUB))
            continue;
        rc = settle_chunk(o, c, index, w);
        if (!rc && ht_ref_image_bytes(&c->pub) > ht_obj_bytes_per_chunk(o))
            rc = too_large(o, c, index);
    }
    return rc;
}

static struct owner *find_owner(const struct settling *w, uint64_t place)
{
    size_t i = ht_id_hash(place);

    while (w->owner[i & (w->owner_size - 1)].place && w->owner[i & (w->owner_size - 1)].place != place)
        i++;
    return &w->owner[i & (w->owner_size - 1)];
}

static int list_places(struct ht_store *s, struct settling *w) HT_REQUIRES(HT_LOCK_STORE)
{
    w->owner_size = 64;
    while (w->owner_size < 2 * w->count)
        w->owner_size *= 2;
    int rc = ask(s, w->owner_size * sizeof(*w->owner));
    if (rc)
        return rc;
    w->owner = calloc(w->owner_size, sizeof(*w->owner));
    if (!w->owner)
        return -ENOMEM;
    for (size_t i = 0; i < w->count; i++) {
        uint64_t place = ht_ref_place(&w->waiting[i].c->pub);
        find_owner(w, place)->place = place;
    }
    return 0;
}

static void list_owners(struct settling *w, struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_chunk_for_each(c, o, index) {
        struct owner *e = c->flags & HT_CH_PUB && !c->pub.shared ? find_owner(w, ht_ref_place(&c->pub)) : NULL;
        if (e && e->place)
            *e = (struct owner){e->place, o, &c->pub};
    }
}

/* A reference to the same extents with the same stored bytes is another owner. Everything else is damage. */
static int settle_waiting(struct settling *w, struct waiting *x) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_ref *ref = &x->c->pub;
    const struct owner *e = find_owner(w, ht_ref_place(ref));

    ref->shared = e->place && e->ref && ht_ref_same_place(e->ref, ref);
    if (!ref->shared)
        return mark_ref(x->o, x->index, ref);
    ht_obj_count_shared(x->o, ref, 1);
    if (!e->ref->shared)
        ht_obj_count_shared(e->o, ref, 1);
    e->ref->shared = 1;
    return ht_refcount_add(x->o->s, ref, true);
}

/* Linear in the chunks; does nothing if no reference waits, or after an error. Frees the lists. */
static int settle_shared(struct ht_store *s, struct settling *w, int rc) HT_REQUIRES(HT_LOCK_STORE)
{
    rc = !rc && w->count ? list_places(s, w) : rc;
    for (size_t b = 0; !rc && w->count && b < s->objects.table.buckets.count; b++)
        ht_obj_for_each_in_bucket(o, s, b)
            list_owners(w, o);
    for (size_t i = 0; !rc && i < w->count; i++) {
        rc = settle_waiting(w, &w->waiting[i]);
        rc = rc ? rc : ask(s, 0); /* the table of owners has grown */
    }
    free(w->waiting);
    free(w->owner);
    return rc;
}

static int by_oid_down(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x > y ? -1 : x < y;
}

/*
 * For fsck: of two that share space the one that comes first must not depend on the hash. It is the one with the higher
 * number.
 */
static int settle_sorted(struct ht_store *s, struct settling *w)
{
    uint64_t *oids;
    size_t count;
    int rc = ht_store_oids(s, &oids, &count);

    if (rc)
        return rc;
    HT_UNSHARED(HT_LOCK_STORE);
    qsort(oids, count, sizeof(*oids), by_oid_down);
    for (size_t i = 0; !rc && i < count; i++)
        rc = settle_object(ht_obj_find_locked(s, oids[i]), w);
    free(oids);
    return rc;
}

static int settle_all(struct ht_store *s, struct settling *w)
{
    int rc = 0;

    if (s->opts.leave_out)
        return settle_sorted(s, w);
    HT_UNSHARED(HT_LOCK_STORE);
    for (size_t b = 0; !rc && b < s->objects.table.buckets.count; b++)
        ht_obj_for_each_in_bucket(o, s, b)
            rc = rc ? rc : settle_object(o, w);
    return rc;
}

struct ht_unknown_records ht_store_unknown_records(const struct ht_store *s)
{
    return s->txn->unknown;
}

/* This program's checkpoint would drop the records that it did not understand. */
static int check_unknown(const struct ht_store *s)
{
    const struct ht_unknown_records *u = &s->txn->unknown;
    unsigned long long count = u->count;

    if (!count || HT_MUTANT("types-dropped"))
        return 0;
    if (!s->opts.read_only)
        return ht_fail(-EPROTONOSUPPORT,
                       "log: %llu %s of a type that this program does not know (%u), which a writer would lose; mount "
                       "the store read-only, or use the version of hitrain that wrote it",
                       count, count == 1 ? "record is" : "records are", u->type);
    if (!s->opts.leave_out) /* fsck reports them itself */
        ht_warn("log: %llu %s of a type that this program does not know (%u): what they describe is not shown", count,
                count == 1 ? "record is" : "records are", u->type);
    return 0;
}

int ht_store_replayed(struct ht_store *s)
{
    struct settling w = {0};
    int rc = check_unknown(s);

    if (rc)
        return rc;
    rc = settle_all(s, &w);
    HT_UNSHARED(HT_LOCK_STORE);
    rc = settle_shared(s, &w, rc);
    if (!rc && s->vault.known)
        rc = ht_journal_reserve(s->journal, HT_VAULT_RECORD_BYTES, true);
    if (!rc && s->txn->conflict_count && !s->opts.read_only && !s->opts.repair) {
        const struct ht_ref_conflict *x = &s->txn->conflicts[0];
        ht_error("object %llu, chunk %llu: %s (device %u, block %llu); run hitrain-fsck", (unsigned long long)x->oid,
                 (unsigned long long)x->index,
                 x->error == -ENXIO        ? "it lies in a vault, and the log names none"
                     : x->error == -EEXIST ? "its space belongs to another one too"
                                           : "its place is outside the device",
                 x->device, (unsigned long long)x->block);
        rc = -EUCLEAN;
    }
    ht_participant_for_each(c, s, replayed)
        rc = rc ? rc : c->replayed(c->ctx);
    return rc;
}

size_t ht_store_conflicts(struct ht_store *s, struct ht_ref_conflict *out, size_t cap)
{
    size_t n = ht_min_u64(cap, s->txn->conflict_count);

    if (n)
        memcpy(out, s->txn->conflicts, n * sizeof(*out));
    return s->txn->conflict_count;
}
