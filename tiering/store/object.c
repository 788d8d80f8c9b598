/* SPDX-License-Identifier: Apache-2.0 */
/*
 * object.c - the table of objects, their references, their scopes.
 *
 * An object is in memory as long as it exists (its metadata is always resident) or somebody
 * refers to it. dead: it exists no more; the last reference frees it and its space.
 * What it needs beyond its first chunk, and what few ever have (a guarantee, promises, memory handed out, owners beside it), is an
 * extra: made where that begins and can still be refused, so nothing that must get through needs memory for it.
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/base/idhash.h"
#include "tiering/store/store_priv.h"

enum { TABLE_START = 1024, OBJECTS_PER_BUCKET = 2 };

/* ----------------------------------------------------------------- table */

static size_t bucket(const struct ht_store *s, uint64_t oid)
{
    return ht_id_hash(oid) & (s->table_size - 1);
}

struct ht_obj *ht_obj_find_locked(struct ht_store *s, uint64_t oid)
{
    if (!s->table_size)
        return NULL;
    for (struct ht_obj *o = s->table[bucket(s, oid)]; o; o = o->next)
        if (o->oid == oid)
            return o;
    return NULL;
}

static void grow_table(struct ht_store *s)
{
    size_t old = s->table_size, size = old ? old * 2 : TABLE_START;
    struct ht_obj **table = calloc(size, sizeof(*table)), **was = s->table;
    if (!table)
        return; /* longer chains, still correct */
    s->table = table;
    s->table_size = size;
    for (size_t i = 0; i < old; i++)
        for (struct ht_obj *o = was[i], *next; o; o = next) {
            next = o->next;
            o->next = table[bucket(s, o->oid)];
            table[bucket(s, o->oid)] = o;
        }
    free(was);
    s->meta_bytes += (size - old) * sizeof(*table);
}

static const struct ht_obj_extra nothing; /* of all that have no extra of their own */

int ht_obj_need_extra(struct ht_obj *o)
{
    if (o->extra != &nothing)
        return 0;
    struct ht_obj_extra *x = calloc(1, sizeof(*x));
    if (!x)
        return -ENOMEM;
    o->extra = x;
    o->s->meta_bytes += sizeof(*x);
    return 0;
}

struct ht_obj_extra *ht_obj_extra(struct ht_obj *o)
{
    assert(o->extra != &nothing);
    return (struct ht_obj_extra *)(uintptr_t)o->extra;
}

struct ht_obj *ht_obj_insert_locked(struct ht_store *s, uint64_t oid)
{
    if (s->objects >= s->table_size * OBJECTS_PER_BUCKET)
        grow_table(s);
    struct ht_obj *o = s->table_size ? ht_pool_get(&s->objs) : NULL;
    if (!o)
        return NULL;
    o->s = s;
    o->oid = oid;
    o->chunk_shift = 16;
    o->scope = s->scope0;
    o->extra = &nothing;
    ht_list_init(&o->touched);
    o->next = s->table[bucket(s, oid)];
    s->table[bucket(s, oid)] = o;
    s->objects++;
    s->meta_bytes += sizeof(*o);
    return o;
}

static void remove_from_table(struct ht_obj *o)
{
    struct ht_obj **p = &o->s->table[bucket(o->s, o->oid)];
    while (*p != o)
        p = &(*p)->next;
    *p = o->next;
    o->s->objects--;
}

int ht_store_oids(struct ht_store *s, uint64_t **out_oids, size_t *out_count)
{
    size_t n = 0;
    ht_store_lock(s);
    uint64_t *oids = malloc((s->objects + 1) * sizeof(*oids));
    for (size_t b = 0; oids && b < s->table_size; b++)
        for (struct ht_obj *o = s->table[b]; o; o = o->next)
            oids[n++] = o->oid;
    ht_store_unlock(s);
    if (!oids)
        return -ENOMEM;
    *out_oids = oids;
    *out_count = n;
    return 0;
}

/* ---------------------------------------------------------------- scopes */

struct ht_scope *ht_scope_find(struct ht_store *s, uint64_t id, bool make)
{
    struct ht_id_link *link = ht_id_find(&s->scopes_by_id, id);
    if (link)
        return ht_container_of(link, struct ht_scope, by_id);
    struct ht_scope *sc = make ? calloc(1, sizeof(*sc)) : NULL;
    if (!sc)
        return NULL;
    sc->id = sc->by_id.id = id;
    if (ht_id_insert(&s->scopes_by_id, &sc->by_id)) {
        free(sc);
        return NULL;
    }
    ht_list_init(&sc->touched);
    s->meta_bytes += sizeof(*sc);
    sc->next = s->scopes;
    s->scopes = sc;
    return sc;
}

void ht_obj_touch(struct ht_obj *o)
{
    /* A dead one is written by who still holds it, but published never: on the list it would stay for ever. */
    if (!ht_list_empty(&o->touched) || o->dead || o->obj_class == HT_CLASS_SCRATCH || o->s->replaying)
        return;
    ht_list_add_tail(&o->scope->touched, &o->touched);
    o->refs++;
}

void ht_obj_untouch_if_idle(struct ht_obj *o)
{
    if (ht_list_empty(&o->touched) || o->leaving || o->dirty || o->writing || o->unpublished || o->meta_dirty)
        return;
    ht_list_del(&o->touched);
    ht_obj_put_locked(o);
}

int ht_scope_collect(struct ht_store *s, uint64_t scope, struct ht_obj ***out, size_t *out_count)
{
    struct ht_scope *sc = ht_scope_find(s, scope, false);
    size_t n = 0, i = 0;
    if (sc)
        ht_list_for_each(p, &sc->touched)
            n++;
    *out = malloc((n + 1) * sizeof(**out));
    if (!*out)
        return -ENOMEM;
    if (sc)
        ht_list_for_each(p, &sc->touched) {
            (*out)[i] = ht_list_entry(p, struct ht_obj, touched);
            (*out)[i++]->refs++;
        }
    *out_count = n;
    return 0;
}

int ht_obj_begin_change(struct ht_obj *o, struct ht_scope **out_scope)
{
    while (o->scope->aborting)
        ht_store_wait(o->s, &o->s->settled, 0);
    if (o->vanished)
        return -ESTALE;
    o->scope->changing++;
    *out_scope = o->scope;
    return 0;
}

void ht_scope_end_change(struct ht_store *s, struct ht_scope *sc)
{
    if (--sc->changing == 0 && sc->aborting)
        pthread_cond_broadcast(&s->settled);
}

int ht_obj_lock_for_change(struct ht_obj *o, struct ht_scope **out_scope)
{
    if (ht_store_read_only(o->s))
        return -EROFS;
    ht_store_lock(o->s);
    int rc = ht_obj_begin_change(o, out_scope);
    if (rc)
        ht_store_unlock(o->s);
    return rc;
}

void ht_obj_unlock_after_change(struct ht_obj *o, struct ht_scope *sc)
{
    ht_scope_end_change(o->s, sc);
    ht_store_unlock(o->s);
}

/* -------------------------------------------------------------- lifetime */

/* Space of everything the object still names. Nobody else refers to it. */
void ht_obj_release_content(struct ht_obj *o)
{
    struct ht_chunk *c;
    uint64_t index = 0;
    ht_chunk_for_each_from(c, o, index)
    {
        assert(!c->exclusive && !c->shared);
        bool was = ht_chunk_unpublished(c);
        ht_chunk_drop_image(o, c, index);
        ht_chunk_drop_cur(o, c);
        ht_chunk_note_unpublished(o, c, index, was);
        ht_chunk_drop_pub(o, c);
        ht_chunk_unpromise(o, c, 0);
        ht_chunk_settle_claim(o, c);
    }
}

void ht_obj_free_memory(struct ht_obj *o)
{
    ht_chunks_free(o);
    if (o->extra != &nothing) {
        o->s->meta_bytes -= sizeof(*o->extra);
        free(ht_obj_extra(o));
    }
    o->s->meta_bytes -= sizeof(*o);
    ht_pool_put(&o->s->objs, o);
}

static void end_guarantee(struct ht_obj *o)
{
    if (o->extra == &nothing)
        return;
    struct ht_obj_extra *x = ht_obj_extra(o);
    ht_alloc_unreserve(o->s->alloc, x->guarantee_left);
    x->guarantee_left = x->guarantee_blocks = 0;
}

void ht_obj_put_locked(struct ht_obj *o)
{
    assert(o->refs);
    if (--o->refs || !o->dead)
        return;
    end_guarantee(o);
    ht_obj_release_content(o);
    ht_handed_free(o);
    if (o->obj_class != HT_CLASS_SCRATCH)
        ht_journal_unclaim(o->s->journal, HT_OBJECT_RECORD_BYTES);
    remove_from_table(o);
    ht_obj_free_memory(o);
}

/* ------------------------------------------------------------- interface */

uint64_t ht_obj_claim_bytes(void)
{
    return HT_OBJECT_RECORD_BYTES;
}

int ht_obj_create(struct ht_store *s, const struct ht_obj_attr *attr, struct ht_obj **out_obj)
{
    assert(attr->chunk_bytes >= HT_SMALL_CHUNK_BYTES && attr->chunk_bytes <= HT_CHUNK_BYTES);
    bool scratch = attr->obj_class == HT_CLASS_SCRATCH;
    int rc = !attr->oid ? -ENOSPC : scratch ? 0 : ht_journal_claim(s->journal, HT_OBJECT_RECORD_BYTES, false);
    if (rc)
        return rc;
    ht_store_lock(s);
    struct ht_scope *sc = ht_scope_find(s, attr->scope, true);
    struct ht_obj *o = sc && !ht_obj_find_locked(s, attr->oid) ? ht_obj_insert_locked(s, attr->oid) : NULL;
    if (!o) {
        ht_store_unlock(s);
        if (!scratch)
            ht_journal_unclaim(s->journal, HT_OBJECT_RECORD_BYTES);
        return -ENOMEM;
    }
    o->chunk_shift = (uint8_t)__builtin_ctz(attr->chunk_bytes);
    o->obj_class = (uint8_t)attr->obj_class;
    o->scope = sc;
    o->defined = true;
    o->meta_dirty = !scratch;
    o->refs = 1;
    ht_obj_touch(o);
    ht_store_unlock(s);
    *out_obj = o;
    return 0;
}

struct ht_obj *ht_obj_get(struct ht_store *s, uint64_t oid)
{
    ht_store_lock(s);
    struct ht_obj *o = ht_obj_find_locked(s, oid);
    if (o && o->dead)
        o = NULL;
    if (o)
        o->refs++;
    ht_store_unlock(s);
    return o;
}

void ht_obj_put(struct ht_obj *o)
{
    if (!o)
        return;
    struct ht_store *s = o->s;
    ht_store_lock(s);
    ht_obj_put_locked(o);
    ht_store_unlock(s);
}

/* The object exists no more; lets go of what the scope's list held. */
static void bury(struct ht_obj *o)
{
    o->dead = true;
    o->refs++;
    if (!ht_list_empty(&o->touched)) {
        ht_list_del(&o->touched);
        ht_obj_put_locked(o);
    }
    ht_obj_put_locked(o);
}

void ht_obj_delete(struct ht_obj *o, struct ht_tx *tx)
{
    struct ht_store *s = o->s;
    ht_store_lock(s);
    o->deleted = true;
    if (!o->published) {
        bury(o);
    } else if (o->scope->id) {
        o->meta_dirty = true;
        ht_obj_touch(o);
    } else {
        ht_tx_note_delete(tx, o);
    }
    ht_store_unlock(s);
}

int ht_obj_set_chunk_bytes(struct ht_obj *o, uint32_t chunk_bytes)
{
    ht_store_lock(o->s);
    uint8_t shift = (uint8_t)__builtin_ctz(chunk_bytes);
    int rc = 0;
    if (shift != o->chunk_shift) {
        if (o->first.head.there || o->extra->root || o->size) {
            rc = -EBUSY;
        } else {
            o->chunk_shift = shift;
            o->meta_dirty = o->obj_class != HT_CLASS_SCRATCH;
            ht_obj_touch(o);
        }
    }
    ht_store_unlock(o->s);
    return rc;
}

int ht_obj_set_scope(struct ht_obj *o, uint64_t scope, struct ht_tx *tx)
{
    struct ht_store *s = o->s;
    ht_store_lock(s);
    struct ht_scope *sc = ht_scope_find(s, scope, true);
    bool known = o->published || o->obj_class == HT_CLASS_SCRATCH, touched = !ht_list_empty(&o->touched);
    int rc = !sc ? -ENOMEM : !known || (touched && sc != s->scope0) ? -EBUSY : 0;
    if (!rc && !o->leaving) {
        o->scope = sc;
        if (touched) { /* the reference goes along */
            ht_list_del(&o->touched);
            ht_list_add_tail(&sc->touched, &o->touched);
        }
        if (o->published)
            ht_record_object(&tx->records, o, o->pub_size);
    }
    ht_store_unlock(s);
    return rc;
}

uint64_t ht_obj_id(const struct ht_obj *o)
{
    return o->oid;
}

uint64_t ht_obj_size(struct ht_obj *o)
{
    ht_store_lock(o->s);
    uint64_t size = o->size;
    ht_store_unlock(o->s);
    return size;
}

uint32_t ht_obj_chunk_bytes(const struct ht_obj *o)
{
    return ht_obj_bytes_per_chunk(o);
}

void ht_obj_stat(struct ht_obj *o, struct ht_obj_stat *out)
{
    ht_store_lock(o->s);
    const struct ht_chunk *first = ht_chunk_find(o, 0);
    uint32_t slot = first ? first->slot : HT_SLOT_NONE;
    uint64_t unit = ht_obj_bytes_per_chunk(o); /* of all images but the first */
    uint64_t lacks = slot != HT_SLOT_NONE ? unit - ht_arena_slot_bytes(o->s->arena, slot) : 0;
    bool first_dirty = lacks && ht_arena_image(o->s->arena, slot)->dirty;
    *out = (struct ht_obj_stat){
        .oid = o->oid,
        .size = o->size,
        .scope = o->scope->id,
        .chunk_bytes = ht_obj_bytes_per_chunk(o),
        .obj_class = o->obj_class,
        .stored_bytes = ht_obj_stored_blocks(o) * HT_BLOCK_BYTES,
        .promised_bytes = o->extra->promised_blocks * HT_BLOCK_BYTES,
        .resident_bytes = o->resident * unit - lacks,
        .dirty_bytes = o->dirty * unit - (first_dirty ? lacks : 0),
        .hits = o->hits,
        .misses = o->misses,
        .device_read_bytes = (uint64_t)o->read_blocks * HT_BLOCK_BYTES,
        .device_written_bytes = (uint64_t)o->written_blocks * HT_BLOCK_BYTES,
        .version = o->version,
        .unpublished = o->dirty || o->writing || o->unpublished || o->meta_dirty,
        .error = o->error,
        .sticky_error = o->sticky,
    };
    ht_store_unlock(o->s);
}

void ht_obj_clear_error(struct ht_obj *o)
{
    ht_store_lock(o->s);
    ht_obj_set_error(o, 0);
    ht_store_unlock(o->s);
}

void ht_obj_note_error(struct ht_obj *o, int error, bool report)
{
    ht_store_lock(o->s);
    o->sticky = (int16_t)error;
    if (report)
        o->error = (int16_t)error;
    ht_store_unlock(o->s);
}

/* ------------------------------------------------------------ statistics */

#define BLOCKS_MAX ((1ull << 40) - 1)

void ht_obj_count_hit(struct ht_obj *o)
{
    o->hits += o->hits != UINT32_MAX;
    o->s->hits++;
}

void ht_obj_count_miss(struct ht_obj *o)
{
    o->misses += o->misses != UINT32_MAX;
    o->s->misses++;
}

void ht_obj_count_read(struct ht_obj *o, const struct ht_ref *ref)
{
    o->read_blocks = ht_min_u64((uint64_t)o->read_blocks + ht_ref_blocks(ref), BLOCKS_MAX);
}

void ht_obj_count_written(struct ht_obj *o, const struct ht_ref *ref)
{
    o->written_blocks = ht_min_u64((uint64_t)o->written_blocks + ht_ref_blocks(ref), BLOCKS_MAX);
}

/* ------------------------------------------------------------ guarantees */

/* Dirty images that a guarantee of so many blocks does not cover get a reservation of their own, out of the old one first. */
static int reserve_uncovered(struct ht_obj *o, uint64_t blocks)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    uint64_t index = 0;
    if (!o->extra->guarantee_blocks)
        return 0;
    ht_chunk_for_each_from(c, o, index)
    {
        if (!ht_chunk_leaf(c)->dirty) {
            index = ht_leaf_last(index);
            continue;
        }
        const struct ht_ref *ref = ht_chunk_ref(c);
        struct ht_image *im = c->slot != HT_SLOT_NONE ? ht_arena_image(s->arena, c->slot) : NULL;
        if (!im || !im->dirty || index << o->chunk_shift < ht_guarantee_bytes(o, blocks))
            continue;
        uint32_t need = (uint32_t)ht_div_up(ht_max_u64(im->data_hi, ref ? ref->visible : 0), HT_BLOCK_BYTES);
        need = need > im->reserved_blocks ? need - im->reserved_blocks : 0;
        uint64_t left = ht_min_u64(need, o->extra->guarantee_left);
        int rc = ht_alloc_reserve(s->alloc, need - left);
        if (rc)
            return rc;
        ht_obj_extra(o)->guarantee_left -= left;
        im->reserved_blocks += need;
    }
    return 0;
}

int ht_obj_guarantee(struct ht_obj *o, uint64_t size)
{
    struct ht_store *s = o->s;
    ht_store_lock(s);
    uint64_t tail = size & (ht_obj_bytes_per_chunk(o) - 1);
    uint64_t blocks = (size - tail) / HT_BLOCK_BYTES + ht_div_up(tail, HT_BLOCK_BYTES);
    uint64_t stored =
        ht_obj_stored_blocks(o) - o->extra->shared_blocks; /* what is shared does not come back when it is rewritten */
    uint64_t want = 2 * blocks > stored ? 2 * blocks - stored : 0;
    if (size == 0)
        want = 0;
    int rc = size ? ht_obj_need_extra(o) : 0;
    if (!rc)
        rc = reserve_uncovered(o, blocks);
    if (size == 0) /* ending one cannot fail; what found no space reports it when it is written back */
        rc = 0;
    if (!rc && want > o->extra->guarantee_left)
        rc = ht_alloc_reserve(s->alloc, want - o->extra->guarantee_left);
    else if (!rc)
        ht_alloc_unreserve(s->alloc, o->extra->guarantee_left - want);
    if (!rc && o->extra != &nothing) {
        struct ht_obj_extra *x = ht_obj_extra(o);
        x->guarantee_left = want;
        x->guarantee_blocks = blocks;
        if (x->handed)
            x->handed->guaranteed = false; /* it is the caller's now */
    }
    ht_store_unlock(s);
    return rc;
}

/* --------------------------------------------------------------- scratch */

void ht_obj_scratch_drop(struct ht_obj *o, uint64_t first, uint64_t count)
{
    struct ht_store *s = o->s;
    assert(o->obj_class == HT_CLASS_SCRATCH);
    ht_store_lock(s);
    uint64_t end = count > UINT64_MAX - first ? UINT64_MAX : first + count, index = first;
    struct ht_chunk *c;
    ht_chunk_for_each_from(c, o, index)
    {
        if (index >= end)
            break;
        if (!ht_chunk_in_use(c))
            continue;
        ht_chunk_lock_exclusive(s, c);
        ht_chunk_drop_image(o, c, index);
        ht_chunk_unpromise(o, c, 0);
        ht_chunk_install_hole(o, c, index);
        ht_chunk_unlock_exclusive(o, c, index);
    }
    ht_store_unlock(s);
}

void ht_obj_scratch_clear(struct ht_obj *o)
{
    ht_obj_scratch_drop(o, 0, UINT64_MAX);
    ht_store_lock(o->s);
    o->size = 0;
    ht_store_unlock(o->s);
}

/* -------------------------------------------------------------- residency */

/* Not of an object that was handed out while its chunk was waited for. */
static bool may_evict(struct ht_store *s, const struct ht_chunk *c)
{
    return c->slot != HT_SLOT_NONE && !ht_arena_is_guest(s->arena, c->slot) &&
        !ht_arena_image(s->arena, c->slot)->dirty;
}

void ht_obj_evict(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    uint64_t index = 0;
    ht_store_lock(s);
    if (o->extra->handed) {
        ht_handed_evict(o);
        ht_store_unlock(s);
        return;
    }
    ht_chunk_for_each_from(c, o, index)
    {
        if (!may_evict(s, c))
            continue;
        ht_chunk_lock_exclusive(s, c); /* a read that was answered may hold it for a moment more */
        if (may_evict(s, c))
            ht_chunk_drop_image(o, c, index);
        ht_chunk_unlock_exclusive(o, c, index);
    }
    ht_store_unlock(s);
}

void ht_obj_let_go(struct ht_obj *o)
{
    struct ht_chunk *c;
    uint64_t index = 0;
    ht_store_lock(o->s);
    ht_chunk_for_each_from(c, o, index) if (c->slot != HT_SLOT_NONE) ht_chunk_let_go(o, c);
    ht_store_unlock(o->s);
}
