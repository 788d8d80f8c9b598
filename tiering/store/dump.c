/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dump.c - what a store that may hang is doing (tiering/base/dump.h): the transaction, chunks that threads hold, the
 * log, staging buffers, devices.
 */
#include "tiering/base/activity.h"
#include "tiering/base/dump.h"
#include "tiering/cache/staging.h"
#include "tiering/object/context.h"

/* SLICE: of chunks and of buckets of objects that it looks at until other threads have a turn with the lock. */
enum { CHUNKS_MAX = 256, SLICE = 65536 };

/* Where the dump is in the table of objects. */
struct walk {
    size_t bucket;
    uint64_t oid, index; /* the chunk that it looks at next; oid 0: of the first object of the bucket */
    unsigned left;       /* of the slice */
    unsigned shown;
};

static void put_places(struct ht_dump *d, const char *what, const struct ht_ref *ref)
{
    ht_dump_put(d, "; %s", what);
    for (unsigned i = 0; ht_ref_holds(ref) && i < ht_ref_extents(ref) && i < 4; i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        ht_dump_put(d, " at %llu of device %u", (unsigned long long)e.block * HT_BLOCK_BYTES, e.device);
    }
}

static void put_state(const struct ht_obj *o, const struct ht_chunk *c, struct ht_dump *d) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_image *im = ht_chunk_image(o->s, c);

    if (c->exclusive)
        ht_dump_put(d, "exclusive");
    else
        ht_dump_put(d, "shared by %u", c->shared);
    ht_dump_put(d, "%s%s%s%s", c->writing ? ", being written" : "", c->waiting ? ", a thread waits" : "",
                im ? ", in memory" : "", im && im->dirty ? ", dirty" : "");
    ht_dump_put(d, "%s%s%s", c->flags & HT_CH_SHARE ? ", cut" : "", c->flags & HT_CH_GONE ? ", gone" : "",
                c->flags & HT_CH_BAD ? ", its newest content is lost" : "");
    if (c->flags & HT_CH_PUB)
        put_places(d, "published", &c->pub);
    if (ht_chunk_has_place(c))
        put_places(d, "current", &c->cur);
}

static void put_threads(const struct ht_chunk *c, struct ht_dump *d) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned i = 0; i < HT_ACTIVITIES_MAX; i++) {
        const struct ht_activity *a = ht_activity_at(i);
        if (!a || (a->wanted != c && !ht_activity_holds(a, c)))
            continue;
        ht_dump_put(d, a->wanted == c ? "; wanted by " : "; held by ");
        ht_dump_thread(d, a->thread);
    }
}

static bool is_idle(const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return !c->exclusive && !c->shared && !c->waiting && !c->writing;
}

/* False: the slice ends before the object does. */
static bool put_chunks_of(struct ht_obj *o, struct ht_dump *d, struct walk *w) HT_REQUIRES(HT_LOCK_STORE)
{
    /* bounded: w->left chunks */
    ht_chunk_for_each_from(c, o, w->index) {
        if (!w->left)
            return false;
        w->left--;
        if (is_idle(c) || w->shown++ >= CHUNKS_MAX)
            continue;
        ht_dump_put(d, "  object %llu, chunk %llu: ", (unsigned long long)o->oid, (unsigned long long)w->index);
        put_state(o, c, d);
        put_threads(c, d);
        ht_dump_put(d, "\n");
        ht_dump_id(d, o->oid);
    }
    w->index = 0;
    return true;
}

/* False: the slice ends before the bucket does. An object that goes between two slices ends its bucket. */
static bool put_bucket(struct ht_store *s, struct ht_dump *d, struct walk *w) HT_REQUIRES(HT_LOCK_STORE)
{
    bool skips = w->oid; /* up to that one */

    ht_obj_for_each_in_bucket(o, s, w->bucket) {
        skips &= o->oid != w->oid;
        if (skips)
            continue;
        w->oid = o->oid;
        if (!put_chunks_of(o, d, w))
            return false;
    }
    w->oid = w->index = 0;
    return true;
}

/* False: it was the last slice, or another thread keeps the lock. */
static bool put_slice(struct ht_store *s, struct ht_dump *d, struct walk *w)
{
    if (!ht_dump_lock(d, ht_store_mutex(s), "the store"))
        return false;
    /* bounded: SLICE chunks and buckets */
    for (w->left = SLICE; w->left && w->bucket < s->objects.table.buckets.count && put_bucket(s, d, w); w->bucket++)
        w->left -= w->left != 0;
    bool more = w->bucket < s->objects.table.buckets.count;
    ht_store_unlock(s);
    return more;
}

static void put_chunks(struct ht_store *s, struct ht_dump *d)
{
    struct walk w = {.bucket = 0};

    ht_dump_put(d, "chunks that threads hold or wait for:\n");
    while (put_slice(s, d, &w))
        ;
    if (w.shown > CHUNKS_MAX)
        ht_dump_put(d, "  and %u more\n", w.shown - CHUNKS_MAX);
}

static void put_flow(struct ht_store *s, struct ht_dump *d)
{
    int holder = ht_mutex_holder(&s->tx_lock);

    ht_dump_put(d, "transaction: ");
    if (holder)
        ht_dump_thread(d, holder);
    ht_dump_put(d, "%s\n", holder ? " has it open" : "none is open");
    ht_dump_put(d, "store:\n");
    if (!ht_dump_lock(d, ht_store_mutex(s), "the store"))
        return;
    ht_dump_put(d, "  %llu bytes are dirty; %u images are being written; %u threads wait for room in the DRAM tier\n",
                (unsigned long long)s->flow.dirty_bytes, s->flow.writing, s->waits.slot_waiters);
    ht_store_unlock(s);
}

void ht_store_dump(struct ht_store *s, struct ht_dump *d)
{
    ht_dump_put(d, "devices:\n");
    for (unsigned i = 0; i < s->dev_count; i++)
        if (s->dev[i]) {
            ht_dump_put(d, "  %s", ht_device_class_word(s->layout.device_class[i]));
            ht_dev_dump(s->dev[i], d);
        }
    put_flow(s, d);
    ht_journal_dump(s->journal, d);
    ht_staging_dump(s->staging, d);
    put_chunks(s, d);
}
