/* SPDX-License-Identifier: Apache-2.0 */
/*
 * object.c - the table of objects, walks over it, and references to objects.
 *
 * An object is in memory as long as it exists (its metadata is always resident) or has references. dead: it exists no
 * more; the last reference frees it and its space.
 */

#include "tiering/object/object.h"
#include "tiering/base/activity.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"

enum { SLICE_BUCKETS = 1024, REST_NS_MAX = 1000000 };

/* ----------------------------------------------------------------- table */

struct ht_obj *ht_obj_find_locked(struct ht_store *s, uint64_t oid)
{
    return ht_obj_of_link(ht_id_find(&s->objects.table, oid));
}

struct ht_chunk *ht_chunk_find_in(struct ht_store *s, uint64_t oid, uint64_t index, struct ht_obj **out_o)
{
    struct ht_obj *o = *out_o = ht_obj_find_locked(s, oid);

    return o && !o->dead ? ht_chunk_find(o, index) : NULL;
}

struct ht_obj *ht_obj_insert_locked(struct ht_store *s, uint64_t oid)
{
    uint64_t before = ht_id_table_bytes(&s->objects.table);
    struct ht_obj *o = ht_pool_get(&s->objects.pool);

    if (!o)
        return NULL;
    o->s = s;
    o->oid = oid;
    if (ht_id_insert(&s->objects.table, &o->by_oid)) {
        free(ht_pool_put(&s->objects.pool, o));
        return NULL;
    }
    o->chunk_shift = 16;
    o->extra = &ht_obj_no_extra;
    ht_obj_join(o, s->objects.scope0);
    ht_list_init(&o->touched);
    s->objects.meta_bytes += sizeof(*o) + ht_id_table_bytes(&s->objects.table) - before;
    return o;
}

void ht_obj_untouch_if_idle(struct ht_obj *o)
{
    if (ht_list_empty(&o->touched) || o->leaving || o->dead || o->dirty || o->writing || o->unpublished ||
        o->meta_dirty)
        return;
    ht_obj_untouch(o);
    ht_obj_put_locked(o);
}

/* -------------------------------------------------------------- lifetime */

static void release_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk_before was = ht_chunk_before(c);

    ht_chunk_drop_image(o, c, index);
    ht_chunk_drop_cur(o, c);
    ht_chunk_note_unpublished(o, c, index, was);
    ht_chunk_drop_pub(o, c);
    ht_chunk_prealloc_drop(o, c, 0);
    ht_chunk_drop_log_reserve(o, c);
}

/* Frees the space that the object still names. It has no other references. */
static void release_content(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    if (o->residency == HT_RESIDENCY_PINNED)
        ht_arena_want_pinned(o->s->arena, 0);
    /* bounded: larger objects are freed in slices before, but in a replay, where no thread waits */
    ht_chunk_for_each(c, o, index) {
        assert(!c->exclusive && !c->shared);
        release_chunk(o, c, index);
    }
}

void ht_obj_free_memory(struct ht_obj *o)
{
    struct ht_store *s = o->s;

    ht_chunks_free(o);
    ht_obj_free_extra(o);
    ht_obj_join(o, NULL);
    s->objects.meta_bytes -= sizeof(*o);
    ht_trash_put(s, ht_pool_put(&s->objects.pool, o));
}

void ht_obj_put_locked(struct ht_obj *o)
{
    assert(o->refs);
    if (--o->refs || !o->dead)
        return;
    if (ht_next_uses_forget(&o->s->next_uses, o->oid)) /* readahead looks whether it was the last one */
        o->s->waits.wakes.readahead = o->s->waits.wakes.any = true;
    ht_obj_end_rewrite_reserve(o);
    if (!o->ending && o->extra->height > 1 && !o->s->objects.replaying) { /* more than one slice frees */
        o->ending = true;
        o->refs = 1;
        ht_list_add_tail(&o->s->objects.ending, &o->touched);
        return;
    }
    release_content(o);
    o->s->hooks.free_shm(o);
    if (o->obj_class != HT_CLASS_SCRATCH)
        ht_journal_unreserve(o->s->journal, HT_OBJECT_RECORD_BYTES);
    ht_id_remove(&o->s->objects.table, &o->by_oid);
    ht_obj_free_memory(o);
}

/*
 * Releases the lock in between: other threads may still clean or evict its images. The last one to put a reference
 * frees a chunk that such a thread holds now: this one may be in a transaction, which waits for no chunk.
 */
static void release_in_slices(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = HT_SLICE_RESTING;

    ht_chunk_for_each(c, o, index) {
        if (ht_chunk_in_use(c) && ht_chunk_trylock_exclusive(o, c, index)) {
            release_chunk(o, c, index);
            ht_chunk_unlock_exclusive(o, c, index);
        }
        ht_slice_next(o->s, &slice);
    }
}

void ht_obj_free_ended(struct ht_store *s)
{
    ht_store_lock(s);
    while (!ht_list_empty(&s->objects.ending)) {
        struct ht_obj *o = ht_list_entry(s->objects.ending.next, struct ht_obj, touched);
        ht_list_del(&o->touched);
        s->objects.ending_now++;
        release_in_slices(o);
        ht_obj_put_locked(o);
        if (--s->objects.ending_now == 0)
            pthread_cond_broadcast(&s->waits.settled);
    }
    ht_store_unlock(s);
}

void ht_obj_wait_ended(struct ht_store *s)
{
    ht_obj_free_ended(s);
    ht_store_lock(s);
    ht_activity_wait("the space of deleted files", 0);
    while (s->objects.ending_now)
        ht_store_wait(s, &s->waits.settled, 0);
    ht_activity_go_on();
    ht_store_unlock(s);
}

/* ------------------------------------------------------------- interface */

uint64_t ht_obj_log_bytes(void)
{
    return HT_OBJECT_RECORD_BYTES;
}

int ht_obj_create(struct ht_store *s, const struct ht_obj_attr *attr, struct ht_obj **out_obj)
{
    assert(attr->chunk_bytes >= HT_SMALL_CHUNK_BYTES && attr->chunk_bytes <= HT_CHUNK_BYTES);
    bool scratch = attr->obj_class == HT_CLASS_SCRATCH;
    int rc = !attr->oid ? -ENOSPC : scratch ? 0 : ht_journal_reserve(s->journal, HT_OBJECT_RECORD_BYTES, false);
    if (rc)
        return rc;
    ht_store_lock(s);
    const struct ht_obj *former = ht_obj_find_locked(s, attr->oid);
    if (former && former->ending) {
        ht_store_unlock(s);
        ht_obj_wait_ended(s);
        ht_store_lock(s);
    }
    struct ht_scope *sc = ht_scope_find(s, attr->scope, true);
    struct ht_obj *o = sc && !ht_obj_find_locked(s, attr->oid) ? ht_obj_insert_locked(s, attr->oid) : NULL;
    if (!o) {
        ht_store_unlock(s);
        if (!scratch)
            ht_journal_unreserve(s->journal, HT_OBJECT_RECORD_BYTES);
        return -ENOMEM;
    }
    o->chunk_shift = (uint8_t)__builtin_ctz(attr->chunk_bytes);
    o->obj_class = (uint8_t)attr->obj_class;
    ht_obj_join(o, sc);
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

struct ht_obj *ht_obj_ref(struct ht_obj *o)
{
    ht_store_lock(o->s);
    o->refs++;
    ht_store_unlock(o->s);
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

int ht_obj_set_chunk_bytes(struct ht_obj *o, uint32_t chunk_bytes)
{
    ht_store_lock(o->s);
    uint8_t shift = (uint8_t)__builtin_ctz(chunk_bytes);
    int rc = 0;
    if (shift != o->chunk_shift) {
        if (o->first.head.there || o->extra->root || o->size || o->pub_size) { /* an abort brings pub_size back */
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

uint64_t ht_obj_id(const struct ht_obj *o)
{
    return o->oid;
}

uint64_t ht_obj_size(struct ht_obj *o)
{
    return ht_store_locked(o->s, o->size);
}

uint32_t ht_obj_chunk_bytes(const struct ht_obj *o)
{
    return ht_obj_bytes_per_chunk(o);
}

/* Adds what the image of this chunk lacks of a whole one: to all, and to dirty if it is dirty. */
static void count_short(struct ht_obj *o, uint64_t index, uint64_t *all, uint64_t *dirty) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_chunk *c = ht_chunk_find(o, index);

    if (!c || c->slot == HT_SLOT_NONE)
        return;
    uint64_t lacks = ht_obj_bytes_per_chunk(o) - ht_arena_slot_bytes(o->s->arena, c->slot);
    *all += lacks;
    *dirty += ht_arena_image(o->s->arena, c->slot)->dirty ? lacks : 0;
}

void ht_obj_stat(struct ht_obj *o, struct ht_obj_stat *out)
{
    uint64_t lacks = 0, dirty_lacks = 0;

    ht_store_lock(o->s);
    uint64_t unit = ht_obj_bytes_per_chunk(o), last = o->size ? (o->size - 1) >> o->chunk_shift : 0;
    count_short(o, 0, &lacks, &dirty_lacks); /* other images are whole, but for the last one */
    if (last)
        count_short(o, last, &lacks, &dirty_lacks);
    *out = (struct ht_obj_stat){
        .oid = o->oid,
        .size = o->size,
        .scope = o->scope->id,
        .chunk_bytes = ht_obj_bytes_per_chunk(o),
        .obj_class = o->obj_class,
        .cold_bytes = ht_obj_cold_blocks(o) * HT_BLOCK_BYTES,
        .stored_bytes = ht_obj_stored_blocks(o) * HT_BLOCK_BYTES,
        .prealloc_bytes = o->extra->prealloc_blocks * HT_BLOCK_BYTES,
        .resident_bytes = o->resident * unit - lacks,
        .dirty_bytes = o->dirty * unit - dirty_lacks,
        .hits = o->hits,
        .misses = o->misses,
        .cold_waits = o->extra->cold_waits,
        .device_read_bytes = (uint64_t)o->read_blocks * HT_BLOCK_BYTES,
        .device_written_bytes = (uint64_t)o->written_blocks * HT_BLOCK_BYTES,
        .version = o->version,
        .refs = o->refs,
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

/* ------------------------------------------------------------------ walks */

/*
 * The numbers of all objects. The lock is held for some buckets of the table at a time, and the table may grow between
 * slices. An object that is there from the first slice to the last one is listed once (ht_buckets_next), and others at
 * most once.
 */
static size_t chain_length(const struct ht_store *s, size_t bucket) HT_REQUIRES(HT_LOCK_STORE)
{
    size_t n = 0;

    ht_obj_for_each_in_bucket(o, s, bucket)
        n++;
    return n;
}

int ht_oid_scan_slice(struct ht_store *s, struct ht_oid_scan *scan)
{
    unsigned left = SLICE_BUCKETS;

    ht_store_lock(s);
    const struct ht_buckets *t = &s->objects.table.buckets;
    size_t wanted = 0;
    scan->is_over = t->count == 0;
    while (!scan->is_over && left--) {
        size_t n = chain_length(s, scan->bucket);
        if (scan->count + n > scan->room) {
            wanted = scan->count + s->objects.table.count; /* enough for all that are there now */
            break;
        }
        ht_obj_for_each_in_bucket(o, s, scan->bucket)
            scan->oid[scan->count++] = o->oid;
        scan->bucket = ht_buckets_next(t, scan->bucket);
        scan->is_over = scan->bucket == 0;
    }
    ht_store_unlock(s);
    if (!wanted)
        return 0;
    uint64_t *more = realloc(scan->oid, wanted * sizeof(*more));
    if (!more)
        return -ENOMEM;
    scan->oid = more;
    scan->room = wanted;
    return 0;
}

int ht_store_oids(struct ht_store *s, uint64_t **out_oids, size_t *out_count)
{
    struct ht_oid_scan scan = {.room = 1};
    int rc = 0;

    scan.oid = malloc(sizeof(*scan.oid)); /* never NULL, so that the caller frees an array in any case */
    if (!scan.oid)
        return -ENOMEM;
    while (!rc && !scan.is_over) {
        uint64_t began_ns = ht_now_ns();
        rc = ht_oid_scan_slice(s, &scan);
        if (!rc && !scan.is_over) /* the mutex is not fair: threads that wait for it come first */
            ht_sleep_ns(ht_min_u64(ht_now_ns() - began_ns, REST_NS_MAX));
    }
    if (rc) {
        free(scan.oid);
        return rc;
    }
    *out_oids = scan.oid;
    *out_count = scan.count;
    return 0;
}

static void visit_at_once(struct ht_store *s, uint64_t scope, ht_scope_visit *visit, void *ctx)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_scope *sc = ht_scope_find(s, scope, false);

    if (sc)
        /* bounded: the few changes since the last of several rounds in slices, published at one moment */
        ht_list_for_each_safe(p, next, &sc->touched) {
            visit(ht_list_entry(p, struct ht_obj, touched), NULL, ctx);
            ht_lock_step();
        }
}

void ht_scope_visit_touched(struct ht_store *s, uint64_t scope, struct ht_slice *slice, ht_scope_visit *visit,
                            void *ctx)
{
    struct ht_touched_walk w;
    struct ht_obj *o;

    if (!slice) {
        visit_at_once(s, scope, visit, ctx);
        return;
    }
    ht_touched_walk_begin(&w, s, scope);
    while ((o = ht_touched_walk_next(&w))) {
        visit(o, slice, ctx);
        ht_obj_put_locked(o);
        ht_slice_next(s, slice);
    }
    ht_touched_walk_end(&w);
}

/* ------------------------------------------------------------ statistics */

#define BLOCKS_MAX ((1ull << 40) - 1)

void ht_obj_count_hit(struct ht_obj *o)
{
    o->hits += o->hits != UINT32_MAX;
    o->s->counts.hits++;
}

void ht_obj_count_miss(struct ht_obj *o)
{
    o->misses += o->misses != UINT32_MAX;
    o->s->counts.misses++;
}

void ht_obj_count_read(struct ht_obj *o, const struct ht_ref *ref)
{
    o->read_blocks = ht_min_u64((uint64_t)o->read_blocks + ht_ref_blocks(ref), BLOCKS_MAX);
}

void ht_obj_count_written(struct ht_obj *o, const struct ht_ref *ref)
{
    o->written_blocks = ht_min_u64((uint64_t)o->written_blocks + ht_ref_blocks(ref), BLOCKS_MAX);
    o->scope->written_bytes += ht_ref_blocks(ref) * HT_BLOCK_BYTES;
    if (o->obj_class == HT_CLASS_SCRATCH)
        o->s->counts.scratch_written_bytes += ht_ref_blocks(ref) * HT_BLOCK_BYTES;
}
