/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunk.h - the chunks of an object: table, locks, state. The caller holds the store's lock. A call that waits for a
 * chunk releases it.
 *
 * References of a chunk (flags):
 *   PUB   pub is the reference in the log
 *   CUR   cur is newer and not in the log; GONE: newer, and nothing (a hole)
 *   SHARE cur names the extents of pub with fewer visible bytes (truncated)
 *   BAD   a staged write was lost: reads are -EIO until abort or overwrite
 *
 * Extents may belong to references of other chunks, too (owners.c): clones.
 *
 * An image in the arena, if there is one, is at least as new as both. It may be shorter than the chunk
 * (ht_chunk_image_bytes), but not shorter than either reference; the bytes after it are zeros. When the object has
 * grown since, a thread that needs more gets a longer image first.
 */
#pragma once

#include <pthread.h>

#include "tiering/cache/arena.h"
#include "tiering/object/ref.h"

struct ht_obj;

enum { HT_CH_PUB = 1, HT_CH_CUR = 2, HT_CH_GONE = 4, HT_CH_SHARE = 8, HT_CH_BAD = 16, HT_CH_LOG_RESERVED = 32 };
enum { HT_CHUNK_HOLDERS_MAX = 1023, HT_CHUNK_PREALLOC_MAX = 1023 };

struct ht_chunk {
    struct ht_ref pub, cur;
    uint32_t slot;          /* image, or HT_SLOT_NONE */
    uint32_t generation;    /* of the newest reference */
    uint32_t shared : 10;   /* holders */
    uint32_t prealloc : 10; /* blocks set aside for it: space.c */
    uint32_t flags : 6;     /* CH_* */
    uint32_t pos : 3;       /* in its leaf, or 0 for an object's first */
    uint32_t exclusive : 1;
    uint32_t waiting : 1; /* a thread wants it exclusively: no new sharers */
    uint32_t writing : 1; /* writeback in flight (the writer is one of shared) */
};
/* With its share of leaf, node and the allocator's heads: 63. */
static_assert(sizeof(struct ht_chunk) == 60, "memory per chunk is at most 64 bytes");

/*
 * The first chunk of an object is in it: most files have no other. The others hang in a radix tree: leaves of 8 chunks
 * under nodes of 64, the place of chunk 0 unused. The tree is as high as the highest chunk needs: a byte at the end of
 * 16 TiB is one leaf under five nodes.
 *
 * A leaf is freed, with the nodes that only it needed, when none of its chunks is in use (ht_chunk_in_use) and no
 * thread waits for one (users). So a pointer to a chunk is good while the store's lock is held. Beyond that it is good
 * only for a thread that holds or waits for the chunk. The thread that ends the last use gives the leaf back: unlocking
 * a chunk does it, and code that changes a chunk without its lock calls ht_chunk_trim.
 *
 * A chunk that is alone in its leaf, as in a sparse object, costs up to 1.5 KiB. So leaves and nodes of all objects
 * have a bound. Calls that may be refused ask (ht_chunk_ask): all tables may have half as many bytes as the log, or 64
 * MiB where that is more. A step may not be refused once its gradient was taken. So an object that steps update is
 * promised log bytes for all its chunks together with its rewrite reserve (ht_obj_promise_log). The tables of all that
 * has log bytes take no more than the log: those of objects of two chunks 0.98 of it, of large ones 0.33. The bound
 * of a replay is beyond the sum (txn/replay.c). Shared memory is bounded by itself.
 */
enum { HT_LEAF_SHIFT = 3, HT_LEAF_CHUNKS = 1 << HT_LEAF_SHIFT, HT_NODE_SHIFT = 6, HT_NODE_SLOTS = 1 << HT_NODE_SHIFT };
struct ht_leaf_head {
    uint32_t dirty : 4, unpublished : 4, writing : 4; /* chunks that are so: lets scans skip leaves */
    uint32_t there : 1;                               /* of an object's first: it is a chunk */
    uint32_t users : 19;                              /* threads that wait for one of its chunks */
};
struct ht_leaf {
    struct ht_leaf_head head;
    struct ht_chunk chunk[HT_LEAF_CHUNKS];
    uint8_t busy; /* a bit for each that is so, as the nodes above know it */
};
struct ht_first {
    struct ht_leaf_head head;
    struct ht_chunk chunk;
};
static_assert(sizeof(struct ht_leaf_head) == 4 && HT_LEAF_CHUNKS < 1 << 4, "a leaf's head counts all of its chunks");
static_assert(offsetof(struct ht_leaf, chunk) == offsetof(struct ht_first, chunk), "a chunk finds its leaf's head");
static_assert(HT_LEAF_CHUNKS <= 1 << 3, "a chunk's place in its leaf has three bits");

/*
 * What nodes know of the chunks below each slot, so that a thread finds one without a look at all before it. Busy is a
 * chunk with content, or one that a thread holds exclusively: content comes only then. All others are idle, also those
 * that are not in memory. A chunk whose content went stays busy while threads share it or wait in its leaf. Who unlocks
 * or trims a chunk keeps this right (ht_chunk_note_busy).
 */
enum ht_chunk_mark { HT_MARK_UNPUBLISHED, HT_MARK_BUSY, HT_MARK_IDLE, HT_MARKS };
struct ht_node {
    void *slot[HT_NODE_SLOTS]; /* nodes or, in the lowest ones, leaves; NULL: no chunk */
    uint64_t mask[HT_MARKS];   /* a bit for each slot below which a chunk is so */
};
static_assert(HT_NODE_SLOTS == 64, "bits of a node's mask");

/* ----------------------------------------------------------------- table */

struct ht_chunk *ht_chunk_find(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* The same in the object with this number, *out_o, unless it is dead. */
struct ht_chunk *ht_chunk_find_in(struct ht_store *s, uint64_t oid, uint64_t index, struct ht_obj **out_o)
    HT_REQUIRES(HT_LOCK_STORE);
struct ht_chunk *ht_chunk_make(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE); /* NULL: no memory */
/*
 * The same for a call that may be refused. -ENOMEM; -ENOSPC: the tables have as much memory as they may
 * (ht_objects.tables_bytes_max).
 */
int ht_chunk_ask(struct ht_obj *o, uint64_t index, struct ht_chunk **out_c) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Frees its leaf if none of the chunks there is in use or waited for; the caller must not touch them afterwards. */
void ht_chunk_trim(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* The chunk at *index or the next one in memory after it; moves *index there. NULL: none. A leaf has all its chunks. */
struct ht_chunk *ht_chunk_next(struct ht_obj *o, uint64_t *index) HT_REQUIRES(HT_LOCK_STORE);
/* The same, but it passes leaves of which no chunk is so, however many there are. */
struct ht_chunk *ht_chunk_next_marked(struct ht_obj *o, enum ht_chunk_mark mark, uint64_t *index)
    HT_REQUIRES(HT_LOCK_STORE);
/* index, or the first one after it without content. */
uint64_t ht_chunk_next_hole(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* The leaf of index has such chunks from now on, or no more. Not for an object's first chunk. */
void ht_chunk_note_leaf(struct ht_obj *o, uint64_t index, enum ht_chunk_mark mark, bool any) HT_REQUIRES(HT_LOCK_STORE);
/* After a change of its content, or of who holds it exclusively. */
void ht_chunk_note_busy(struct ht_obj *o, const struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Loops over chunks, ascending: all; or those that are busy or unpublished, and others in their leaves. The lock may be
 * released in between. c is of the loop. So is index, which begins at 0, unless the loop begins from it.
 */
#define HT_CHUNKS_(c, index, next) for (struct ht_chunk *c = (next); c; (index)++, c = (next))
#define HT_FROM_0_(index) for (uint64_t index = 0, once_ = 1; once_; once_ = 0)
#define ht_chunk_for_each_from(c, o, index) HT_CHUNKS_(c, index, ht_chunk_next(o, &(index)))
#define ht_chunk_for_each(c, o, index) HT_FROM_0_(index) ht_chunk_for_each_from(c, o, index)
#define ht_chunk_for_each_busy_from(c, o, index) HT_CHUNKS_(c, index, ht_chunk_next_marked(o, HT_MARK_BUSY, &(index)))
#define ht_chunk_for_each_busy(c, o, index) HT_FROM_0_(index) ht_chunk_for_each_busy_from(c, o, index)
#define ht_chunk_for_each_unpublished(c, o, index) \
    HT_FROM_0_(index) HT_CHUNKS_(c, index, ht_chunk_next_marked(o, HT_MARK_UNPUBLISHED, &(index)))
static inline struct ht_leaf_head *ht_chunk_leaf(struct ht_chunk *c)
{
    return (struct ht_leaf_head *)((char *)(c - c->pos) - offsetof(struct ht_leaf, chunk));
}
/* For a loop over chunks that has found nothing in this chunk's leaf: the last index in the leaf. */
static inline uint64_t ht_leaf_last(uint64_t index)
{
    return index ? index | (HT_LEAF_CHUNKS - 1) : 0;
}
void ht_chunks_free(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE); /* the memory of the table */
/* Does it hold anything, or does a thread hold it? */
static inline bool ht_chunk_in_use(const struct ht_chunk *c)
{
    return c->flags || c->slot != HT_SLOT_NONE || c->exclusive || c->shared || c->prealloc;
}

/* ----------------------------------------------------------------- locks */

void ht_chunk_lock_shared(struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
void ht_chunk_lock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
bool ht_chunk_trylock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* The chunk may be gone afterwards. */
void ht_chunk_unlock_shared(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
void ht_chunk_unlock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* The chunk stays until the caller's next call for it, which comes before the lock is released. */
void ht_chunk_unlock_exclusive_staying(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* From shared to exclusive. WAITS, and others may have the chunk before. */
void ht_chunk_relock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* As ht_store_wait, with a chunk that is held exclusively, but not while this waits. */
int ht_chunk_wait(struct ht_obj *o, struct ht_chunk *c, uint64_t index, pthread_cond_t *cond, uint64_t at_ns)
    HT_REQUIRES(HT_LOCK_STORE);
void ht_chunk_downgrade(struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE); /* exclusive to shared */

/*
 * While a thread looks at chunks in slices: has another one taken a chunk exclusively, which this one may have passed?
 * Content comes and goes under such a lock alone.
 */
struct ht_chunk_watch {
    struct ht_chunk_watch *next;
    const struct ht_obj *o;
    uint64_t first; /* chunks from here on */
    bool taken;
};
void ht_chunk_watch_begin(struct ht_chunk_watch *w, const struct ht_obj *o, uint64_t first) HT_REQUIRES(HT_LOCK_STORE);
void ht_chunk_watch_end(struct ht_chunk_watch *w) HT_REQUIRES(HT_LOCK_STORE);

/* ----------------------------------------------------------------- state */

/* Bytes of chunk index inside size that may have content. */
uint32_t ht_chunk_len(const struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* The reference that holds the content when there is no image, or NULL for a hole. */
static inline struct ht_ref *ht_chunk_ref(struct ht_chunk *c)
{
    if (c->flags & HT_CH_GONE)
        return NULL;
    if (c->flags & HT_CH_CUR)
        return &c->cur;
    return c->flags & HT_CH_PUB ? &c->pub : NULL;
}
/* Are there bytes, in memory, on a device, or lost? Else it reads as zeros. */
static inline bool ht_chunk_has_content(const struct ht_chunk *c)
{
    bool stored = !(c->flags & HT_CH_GONE) && c->flags & (HT_CH_CUR | HT_CH_PUB);

    return stored || c->slot != HT_SLOT_NONE || c->flags & HT_CH_BAD;
}
/* Marks the image dirty or clean, and keeps counts, reservation and the scope's list. */
void ht_chunk_set_dirty(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/*
 * A dirty image is published as it is: it is written once the devices have time (engine/writeback.c). The next change
 * ends that.
 */
void ht_chunk_set_final(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
void ht_chunk_set_clean(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* Installs a new current reference (or none: hole). Drops an unpublished one. */
void ht_chunk_install(struct ht_obj *o, struct ht_chunk *c, uint64_t index, const struct ht_ref *ref)
    HT_REQUIRES(HT_LOCK_STORE);
void ht_chunk_install_hole(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
static inline bool ht_chunk_unpublished(const struct ht_chunk *c)
{
    return c->flags & (HT_CH_CUR | HT_CH_GONE);
}
/* Blocks of its published reference that its publication makes free. */
static inline uint32_t ht_chunk_superseded_blocks(const struct ht_chunk *c)
{
    bool goes = c->flags & HT_CH_GONE || (c->flags & (HT_CH_CUR | HT_CH_SHARE)) == HT_CH_CUR;

    return goes && c->flags & HT_CH_PUB && !c->pub.shared ? ht_ref_blocks(&c->pub) : 0;
}
/* Keeps what is counted of unpublished chunks right after a change of flags. was: ht_chunk_before before it. */
struct ht_chunk_before {
    bool unpublished;
    uint32_t superseded_blocks;
};
static inline struct ht_chunk_before ht_chunk_before(const struct ht_chunk *c)
{
    return (struct ht_chunk_before){ht_chunk_unpublished(c), ht_chunk_superseded_blocks(c)};
}
void ht_chunk_note_unpublished(struct ht_obj *o, struct ht_chunk *c, uint64_t index, struct ht_chunk_before was)
    HT_REQUIRES(HT_LOCK_STORE);
/* Has its current reference a place that the log does not name yet? */
static inline bool ht_chunk_has_place(const struct ht_chunk *c)
{
    return (c->flags & (HT_CH_CUR | HT_CH_SHARE)) == HT_CH_CUR;
}
/* A slot that the arena gave becomes its image. */
void ht_chunk_attach_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t slot)
    HT_REQUIRES(HT_LOCK_STORE);
/* A caller uses its image. What the object's residency says about such images is done, too. */
void ht_chunk_use_image(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* Its image stays in memory from now on, if the protected set has room for it. */
void ht_chunk_protect(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
void ht_chunk_drop_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* Drops an image that was made for an operation that failed, unless it holds something. */
void ht_chunk_drop_empty(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* The arena's evict: ctx is the store. False: the image is dirty or in use. */
bool ht_store_evict_image(void *ctx, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
