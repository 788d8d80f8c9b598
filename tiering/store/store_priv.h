/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store_priv.h - inside the store: objects, chunks, references and who guards them.
 *
 * One mutex (store.lock) guards everything below that is not said to be otherwise. I/O and
 * copying happen without it, under chunk locks:
 *
 *   shared     readers of an image or of the extents behind it; writeback while its write is in flight
 *   exclusive  who changes the image, fills it, or replaces references
 *
 * A thread holds at most one chunk lock at a time, but for leases, which take theirs in (oid, index)
 * order, and for what is in flight of reading ahead and writeback, which never wait for another one meanwhile. Who waits for a slot of the arena lets go of the chunk it is for: a lease that has all slots may wait for that chunk.
 * So waiting for a slot ends.
 *
 * References of a chunk (flags):
 *   PUB   pub is what the log says
 *   CUR   cur is newer and not in the log; GONE: newer, and nothing (a hole)
 *   SHARE cur names the extents of pub with fewer visible bytes (truncated)
 * Extents may belong to references of other chunks, too (share.c): clones.
 *   BAD   a staged write was lost: reads are -EIO until abort or overwrite
 * An image in the arena, if there is one, is at least as new as both. It may be shorter than the chunk (ht_chunk_image_bytes), but than
 * neither of them; behind it all is zeros. When the object has grown since, who needs more of it gets a longer one first.
 */
#ifndef HITRAIN_TIERING_STORE_STORE_PRIV_H
#define HITRAIN_TIERING_STORE_STORE_PRIV_H

#include <stdatomic.h>

#include "tiering/base/idtable.h"
#include "tiering/base/base.h"
#include "tiering/base/list.h"
#include "tiering/base/lock.h"
#include "tiering/base/pool.h"
#include "tiering/base/shared.h"
#include "tiering/cache/arena.h"
#include "tiering/cache/staging.h"
#include "tiering/io/rings.h"
#include "tiering/space/alloc.h"
#include "tiering/store/store.h"

/* ------------------------------------------------------------ references */

/* Where stored bytes are. One extent is kept inline; more hang off a pointer. Aligned to 4, so that a chunk is no longer than its fields. */
struct ht_ref {
    uint64_t place;        /* 48 bits: first block, or a pointer to extents; 8: device; 8: extents - 1 */
    uint32_t stored : 24;  /* bytes on the device, covered by the checksum */
    uint32_t clock : 8;    /* low bits of store.flush_clock when its write had ended; 0 from the log: flush.c */
    uint32_t visible : 23; /* of them what counts; the rest of the chunk is zeros */
    uint32_t shared : 1;   /* has or had other owners: share.c knows */
    uint32_t codec : 8;
    uint64_t checksum;
} __attribute__((packed, aligned(4)));
static_assert(sizeof(struct ht_ref) == 24, "memory per chunk is bounded");
#define HT_VISIBLE_MASK 0x7fffffu
static_assert(HT_CHUNK_BYTES <= HT_VISIBLE_MASK, "visible counts a whole chunk");

static inline unsigned ht_ref_extents(const struct ht_ref *r)
{
    return (unsigned)(r->place >> 56) + 1;
}
/* Nothing is stored, and what was cannot be had any more: reading it is -EIO, writing all of the chunk heals it. */
static inline bool ht_ref_lost(const struct ht_ref *r)
{
    return r->codec == HT_CODEC_LOST;
}
/* Blocks that come free with it: none on devices that are missing. */
uint32_t ht_ref_countable(const struct ht_store *s, const struct ht_ref *r);
/* -ENOMEM only when n > 1. */
int ht_ref_set(struct ht_ref *r, const struct ht_extent *e, unsigned n) HT_CHECK;
/* i-th extent. */
struct ht_extent ht_ref_extent(const struct ht_ref *r, unsigned i);
/* Another reference to the same, with an array of its own; it is no owner yet. */
int ht_ref_copy(struct ht_ref *out, const struct ht_ref *r) HT_CHECK;
bool ht_ref_same_place(const struct ht_ref *a, const struct ht_ref *b);
void ht_ref_forget(struct ht_ref *r); /* frees a hung-off array */
uint64_t ht_refs_hung_bytes(void);    /* heap of all of these, in the process */
uint32_t ht_ref_blocks(const struct ht_ref *r);
/* Bytes of its record beyond the one extent that every chunk claims. */
uint32_t ht_ref_extra_bytes(const struct ht_ref *r);
/* May another chunk have this reference, too: does the log have room for its pieces, beside those of accepted content? Lock held. */
bool ht_ref_pieces_fit(struct ht_store *s, const struct ht_ref *ref);

/* ---------------------------------------------------------------- chunks */

enum { CH_PUB = 1, CH_CUR = 2, CH_GONE = 4, CH_SHARE = 8, CH_BAD = 16, CH_CLAIM = 32 };
enum { HT_CHUNK_HOLDERS_MAX = 1023, HT_CHUNK_PROMISED_MAX = 1023 };

struct ht_chunk {
    struct ht_ref pub, cur;
    uint32_t slot;          /* image, or HT_SLOT_NONE */
    uint32_t generation;    /* of the newest reference */
    uint32_t shared : 10;   /* holders */
    uint32_t promised : 10; /* blocks set aside for it: allocate.c */
    uint32_t flags : 6;     /* CH_* */
    uint32_t pos : 3;       /* in its leaf, or 0 for an object's first */
    uint32_t exclusive : 1;
    uint32_t waiting : 1; /* somebody wants it exclusively: no new sharers */
    uint32_t writing : 1; /* writeback in flight (the writer is one of shared) */
};
/* With its share of leaf, node and the allocator's heads: 63. */
static_assert(sizeof(struct ht_chunk) == 60, "memory per chunk is at most 64 bytes");

/*
 * The first chunk of an object is in it: most files have no other. The others hang in a radix tree: leaves of 8 chunks under nodes of
 * 64, the place of chunk 0 unused. It is as high as the highest chunk asks for: a byte at the end of 16 TiB is one leaf under five
 * nodes.
 *
 * A leaf goes, with the nodes that only it needed, when none of its chunks is in use (ht_chunk_in_use) and no thread waits for one
 * (users). So a pointer to a chunk is good while the store's lock is held, and beyond that only for a thread that holds or waits for the
 * chunk. The thread that ends the last use gives the leaf back: unlocking a chunk does it, and what changes a chunk without its lock
 * calls ht_chunk_trim.
 *
 * A chunk that is alone in its leaf, as in a sparse object, costs up to 1.5 KiB. So leaves and nodes of all objects have a bound, half as
 * much as the log has bytes, or 64 MiB where that is more. Chunks that fill their leaves never reach it: the log ends before (0.33 of it).
 * Reading at a mount, steps, which were promised their space, and handed-out memory may exceed it.
 */
enum { LEAF_SHIFT = 3, LEAF_CHUNKS = 1 << LEAF_SHIFT, NODE_SHIFT = 6, NODE_SLOTS = 1 << NODE_SHIFT };
struct ht_leaf_head {
    uint32_t dirty : 4, unpublished : 4, writing : 4; /* chunks that are so: lets scans skip leaves */
    uint32_t there : 1;                               /* of an object's first: it is a chunk */
    uint32_t users : 19;                              /* threads that wait for one of its chunks */
};
struct ht_leaf {
    struct ht_leaf_head head;
    struct ht_chunk chunk[LEAF_CHUNKS];
};
struct ht_first {
    struct ht_leaf_head head;
    struct ht_chunk chunk;
};
static_assert(sizeof(struct ht_leaf_head) == 4 && LEAF_CHUNKS < 1 << 4, "a leaf's head counts all of its chunks");
static_assert(offsetof(struct ht_leaf, chunk) == offsetof(struct ht_first, chunk), "a chunk finds its leaf's head");
static_assert(LEAF_CHUNKS <= 1 << 3, "a chunk's place in its leaf has three bits");
struct ht_node {
    void *slot[NODE_SLOTS]; /* nodes or, in the lowest ones, leaves; NULL: no chunk */
};

struct ht_scope {
    uint64_t id;
    unsigned changing; /* calls that change content */
    unsigned aborts;   /* how many began */
    bool aborting;
    struct ht_list touched; /* objects with something dirty or unpublished; each holds a reference */
    struct ht_scope *next;
    struct ht_id_link by_id;
};

/* handout.c: images in memory that others have, too. */
struct ht_handed {
    struct ht_list link; /* in store.handed: what is back in the order of coming back */
    struct ht_obj *obj;
    struct ht_shared memory;
    uint64_t hand;   /* which time that something was handed out, of store.hands */
    bool out;        /* holds a reference */
    uint32_t user;   /* while it is out: whose it counts as; 0: nobody's */
    bool stores;     /* its content may have been changed unseen */
    bool guaranteed; /* for that the object was given a guarantee */
    /* the timer's look */
    bool changed;    /* something was found since its last round here ended */
    unsigned quiet;  /* rounds in a row in which nothing was */
    uint64_t due_ns; /* no round begins before */
    uint64_t looked; /* the chunk that it goes on with */
};

/*
 * What few objects need: made at the first need of it, which is where -ENOMEM can be said, and there until the object goes. Until then
 * extra points to one that is all zeros.
 */
struct ht_obj_extra {
    void *root; /* of the chunks: a leaf if height is 0, or a node; NULL: none but the first */
    struct ht_handed *handed;
    uint64_t guarantee_blocks, guarantee_left, promised_blocks;
    uint64_t shared_blocks; /* of references with the bit shared */
    uint8_t height;         /* nodes above a leaf */
};

/* Three lines of a cache for a file of one chunk. Numbers of blocks have 40 bits: 4 PiB. */
struct ht_obj {
    struct ht_store *s;
    struct ht_obj *next; /* hash chain */
    struct ht_scope *scope;
    const struct ht_obj_extra *extra;
    struct ht_list touched; /* of the scope; or, leaving, of the transaction */
    uint64_t oid, size;
    union {
        uint64_t pub_size;   /* what the log says */
        uint64_t delete_lsn; /* dead: of the record that says so, or 0: the log never knew it */
    };
    uint64_t version;
    uint64_t stored_blocks : 40; /* of references */
    uint8_t chunk_shift;
    uint16_t writing;          /* chunks: fewer than windows of writeback can hold */
    uint64_t read_blocks : 40; /* from devices; this and what follows of statistics stays at its highest value */
    uint8_t obj_class;
    int16_t error;                /* reported and cleared by writeback */
    uint64_t written_blocks : 40; /* to devices */
    bool published : 1;           /* the log knows it */
    bool defined : 1;             /* replay saw its OBJECT record */
    bool deleted : 1;             /* currently */
    bool leaving : 1;             /* its deletion is in the open transaction */
    bool dead : 1;                /* for good: leaves memory with its last reference */
    bool vanished : 1;            /* dead because an abort took it back: what was in it is gone */
    bool meta_dirty : 1;          /* size or existence is unpublished */
    bool lost : 1;                /* a chunk is BAD: the error stays until abort */
    int16_t sticky;               /* the last error, until somebody clears it */
    uint32_t hits, misses;
    uint32_t refs;
    uint32_t dirty, unpublished, resident; /* chunks */
    struct ht_first first;
};
static_assert(sizeof(struct ht_obj) == 192, "memory per file is bounded");

/* So that it has an extra of its own. */
int ht_obj_need_extra(struct ht_obj *o) HT_CHECK;
/* To be changed: it has one. */
struct ht_obj_extra *ht_obj_extra(struct ht_obj *o);

/* Bit-fields of this width would be reckoned with in this width. */
static inline uint64_t ht_obj_stored_blocks(const struct ht_obj *o)
{
    return o->stored_blocks;
}
/* It failed: the next who syncs is told. */
static inline void ht_obj_set_error(struct ht_obj *o, int error)
{
    o->error = o->sticky = (int16_t)error;
}
/* Statistics. */
void ht_obj_count_hit(struct ht_obj *o);
void ht_obj_count_miss(struct ht_obj *o);
void ht_obj_count_read(struct ht_obj *o, const struct ht_ref *ref);
void ht_obj_count_written(struct ht_obj *o, const struct ht_ref *ref);

static inline uint32_t ht_obj_bytes_per_chunk(const struct ht_obj *o)
{
    return 1u << o->chunk_shift;
}

/* Bytes from the start whose rewriting a guarantee of so many blocks covers: scratch content has one copy only. */
static inline uint64_t ht_guarantee_bytes(const struct ht_obj *o, uint64_t blocks)
{
    return blocks * HT_BLOCK_BYTES << (o->obj_class == HT_CLASS_SCRATCH);
}

/* What a guarantee lacks of two copies, one of them stored: shared blocks are not counted, they do not come back. */
static inline uint64_t ht_guarantee_room(const struct ht_obj *o)
{
    const struct ht_obj_extra *x = o->extra;
    uint64_t have = ht_obj_stored_blocks(o) - x->shared_blocks + x->guarantee_left;
    return 2 * x->guarantee_blocks > have ? 2 * x->guarantee_blocks - have : 0;
}

/* chunk.c: table, locks. All with store.lock held; *_lock may wait (the lock is let go meanwhile). */
struct ht_chunk *ht_chunk_find(struct ht_obj *o, uint64_t index);
struct ht_chunk *ht_chunk_make(struct ht_obj *o, uint64_t index); /* NULL: no memory */
/* The same for a call that may be refused. -ENOMEM; -ENOSPC: the tables have as much memory as they may (store.tables_bytes_max). */
int ht_chunk_ask(struct ht_obj *o, uint64_t index, struct ht_chunk **out_c) HT_CHECK;
/* Its leaf goes if none of the chunks there is in use or waited for; none of them is to be touched afterwards. */
void ht_chunk_trim(struct ht_obj *o, uint64_t index);
/* The chunk at *index or the next one in memory behind it: *index is moved there. NULL: none. Leaves are there whole. */
struct ht_chunk *ht_chunk_next(struct ht_obj *o, uint64_t *index);
/* All chunks from index on, ascending; the lock may be let go meanwhile. */
#define ht_chunk_for_each_from(c, o, index) for (; (c = ht_chunk_next(o, &(index))); (index)++)
static inline struct ht_leaf_head *ht_chunk_leaf(struct ht_chunk *c)
{
    return (struct ht_leaf_head *)((char *)(c - c->pos) - offsetof(struct ht_leaf, chunk));
}
/* For a loop over chunks that has found nothing in the leaf of this one: the last index in it. */
static inline uint64_t ht_leaf_last(uint64_t index)
{
    return index ? index | (LEAF_CHUNKS - 1) : 0;
}
void ht_chunks_free(struct ht_obj *o); /* the memory of the table */
/* Does it hold anything, or somebody hold it? */
static inline bool ht_chunk_in_use(const struct ht_chunk *c)
{
    return c->flags || c->slot != HT_SLOT_NONE || c->exclusive || c->shared || c->promised;
}
void ht_chunk_lock_shared(struct ht_store *s, struct ht_chunk *c);
void ht_chunk_lock_exclusive(struct ht_store *s, struct ht_chunk *c);
bool ht_chunk_trylock_exclusive(struct ht_chunk *c);
/* The chunk may be gone afterwards. */
void ht_chunk_unlock_shared(struct ht_obj *o, struct ht_chunk *c, uint64_t index);
void ht_chunk_unlock_exclusive(struct ht_obj *o, struct ht_chunk *c, uint64_t index);
/* From shared to exclusive. WAITS, and others may have the chunk before. */
void ht_chunk_relock_exclusive(struct ht_store *s, struct ht_chunk *c);
/* As ht_store_wait, with a chunk that is held exclusively, but not while this waits. */
int ht_chunk_wait(struct ht_store *s, struct ht_chunk *c, pthread_cond_t *cond, uint64_t at_ns);
void ht_chunk_downgrade(struct ht_store *s, struct ht_chunk *c); /* exclusive to shared */
/* The reference that holds the content when there is no image, or NULL for a hole. */
struct ht_ref *ht_chunk_ref(struct ht_chunk *c);
/* Mark image dirty or clean, keeping counts, reservation and the scope's list. */
void ht_chunk_set_dirty(struct ht_obj *o, struct ht_chunk *c, uint64_t index);
void ht_chunk_set_clean(struct ht_obj *o, struct ht_chunk *c, uint64_t index);
/* Reserve space and log bytes so that an image of need blocks can be written back. -ENOSPC */
int ht_chunk_reserve(struct ht_obj *o, struct ht_chunk *c, uint32_t need_blocks) HT_CHECK;
void ht_chunk_unreserve(struct ht_obj *o, struct ht_chunk *c);
/* Release an unpublished current reference's space; the chunk has none then (flags CUR, SHARE, GONE cleared). */
void ht_chunk_drop_cur(struct ht_obj *o, struct ht_chunk *c);
/* Release the published one of an object that is gone for good. */
void ht_chunk_drop_pub(struct ht_obj *o, struct ht_chunk *c);
/* Install a new current reference (or none: hole). An unpublished one is dropped. */
void ht_chunk_install(struct ht_obj *o, struct ht_chunk *c, uint64_t index, const struct ht_ref *ref);
void ht_chunk_install_hole(struct ht_obj *o, struct ht_chunk *c, uint64_t index);
/* Keep the unpublished counters of a chunk and its object right after flags changed. was: unpublished before. */
void ht_chunk_note_unpublished(struct ht_obj *o, struct ht_chunk *c, uint64_t index, bool was);
static inline bool ht_chunk_unpublished(const struct ht_chunk *c)
{
    return c->flags & (CH_CUR | CH_GONE);
}
/* A slot that the arena gave becomes its image. */
void ht_chunk_attach_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t slot);
/* Its image stays in memory from now on, if there is room for it among those that do. */
void ht_chunk_keep(struct ht_obj *o, struct ht_chunk *c);
void ht_chunk_let_go(struct ht_obj *o, struct ht_chunk *c);
void ht_chunk_drop_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index);
void ht_chunk_drop_empty(struct ht_obj *o, struct ht_chunk *c, uint64_t index); /* unless it holds something */
/* Give back the log claim of a chunk that is nothing any more. */
void ht_chunk_settle_claim(struct ht_obj *o, struct ht_chunk *c);

/* ----------------------------------------------------------------- store */

struct ht_limbo { /* a deferred free */
    uint64_t lsn;
    struct ht_ref ref;
};

struct ht_limbo_queue { /* FIFO by lsn, grown, never shrunk */
    struct ht_limbo *items;
    size_t head, count, cap;
};

struct ht_share {   /* extents with several owners */
    uint64_t key;   /* first block and device */
    uint64_t ended; /* value of tx_count when a transaction last ended an owner */
    uint32_t owners;
    bool named; /* by a record in the log */
};

struct ht_share_table {
    struct ht_share *entry; /* owners is 0 where there is none */
    size_t size, count;
};

struct ht_tx {
    struct ht_store *s;
    struct ht_buf records;
    struct ht_limbo_queue frees; /* lsn filled in at commit */
    bool whole;                  /* it publishes all that a writeback wrote, or nothing */
    struct ht_list deleted;      /* objects whose deletion is in this transaction, by touched; each holds a reference */
};

enum { COND_COUNT = 64, CLIENTS_MAX = 4 };

struct ht_ahead {          /* ahead.c; guarded by the store's lock */
    struct ht_list hungry; /* readers, in the order of their turns */
    pthread_cond_t wake;
    pthread_t thread;
    bool running;
};

/* A thread that writes back images of one NUMA node, on that node: one for each when there are several. */
struct ht_relief {
    struct ht_store *s;
    int near;
    pthread_t thread;
};

struct ht_scrub {
    struct ht_mutex lock; /* guards what follows; a leaf */
    pthread_cond_t changed;
    pthread_t thread;
    bool joinable, stop;
    uint64_t began_ns;
    struct ht_scrub_stats st;
};

struct ht_wakes {    /* wake.c: who is to be woken when the lock has been let go */
    uint64_t chunks; /* as bits: places in chunk_cond */
    unsigned slots;  /* how many who wait for an image */
    bool all_slots, writeback, ahead;
    bool any;
};

struct ht_store {
    struct ht_mutex lock;                  /* guards all that is not said otherwise */
    pthread_cond_t chunk_cond[COND_COUNT]; /* chunk locks, by address */
    pthread_cond_t slot_cond;              /* an image may be evictable now */
    pthread_cond_t wake;                   /* the writeback thread has something to do */
    unsigned slot_waiters;
    struct ht_wakes wakes;
    pthread_cond_t settled; /* a transaction was appended: what it freed is in limbo; or an abort ended, or may begin */

    struct ht_store_opts opts;
    struct ht_dev *dev[HT_DEVICES_MAX];      /* NULL: missing */
    struct ht_dev *log_aside[HT_LOG_COPIES]; /* in memory, in place of those on the devices; ours */
    unsigned dev_count;
    /* rescue.c, flush.c; devices as bits. closed and given_up are read without the lock, too */
    _Atomic uint32_t closed;          /* take no more content */
    uint64_t rescues;                 /* how often current references were gone through */
    uint32_t suspect, unsafe;         /* a flush failed: not gone through yet; ever */
    uint32_t rescuing;                /* it failed, and they are being gone through */
    _Atomic uint64_t given_up;        /* references; with tx_lock, too */
    uint64_t flush_clock;             /* flushes of data begun; flush.c */
    uint64_t covered[HT_DEVICES_MAX]; /* flush_clock of the last that ended well */
    uint32_t published, flushing;     /* something on them was published and maybe not flushed; that is being flushed */
    uint64_t flush_errors[HT_DEVICES_MAX];  /* as they were looked into */
    bool broken;                            /* something published was not flushed and never will be */
    _Atomic uint8_t health[HT_DEVICES_MAX]; /* as it was told last; changed under lock */
    struct ht_super sb;                     /* super_lock */
    uint32_t part;                          /* devices (bits) that take part in the epoch; super_lock */
    uint32_t super_failed;                  /* those that did not take the last superblock; super_lock */
    bool unrecorded;                        /* no superblock says yet who takes part; super_lock */
    struct ht_mutex super_lock;
    struct ht_journal *journal;
    struct ht_journal_report report;
    struct ht_alloc *alloc;
    struct ht_arena *arena;
    struct ht_staging *staging;
    struct ht_nodes nodes;             /* that memory comes from; fixed */
    struct ht_nodes homes;             /* devices, as if they were nodes: whose turn it is to get new content */
    int64_t home_credit[HT_NODES_MAX]; /* for that */
    int8_t near[HT_DEVICES_MAX];       /* place of each device's node, or HT_NEAR_ANY */
    struct ht_rings *rings;

    struct ht_pool objs;   /* their memory */
    struct ht_obj **table; /* hash of objects */
    size_t table_size, objects;
    uint64_t chunks, lost_chunks;
    uint64_t tables_bytes; /* heap of leaves and nodes */
    uint64_t tables_bytes_max;
    bool tables_full;        /* the last call that asked for more of it was refused */
    uint64_t meta_bytes;     /* heap of objects, chunks, shares and scopes */
    struct ht_scope *scopes; /* one per model root */
    struct ht_id_table scopes_by_id;
    struct ht_scope *scope0;
    _Atomic uint64_t next_id;
    uint64_t ids_logged; /* up to there the log says that numbers were given out; tx_lock */

    struct ht_mutex tx_lock; /* held while a transaction is open; guards tx and last_lsn */
    struct ht_tx tx;
    _Atomic uint64_t last_lsn; /* of the last transaction appended */
    uint64_t tx_count;         /* transactions settled; lock */
    uint64_t records_bytes;    /* heap of tx.records then; lock */
    struct ht_limbo_queue limbo;
    struct ht_share_table shares;
    struct ht_lease_work *lease_works; /* free ones */
    uint64_t lease_works_bytes;        /* heap of all */
    struct ht_list handed;
    uint32_t handed_count;
    uint64_t handed_bytes;
    uint64_t hands; /* how often something was handed out */
    struct ht_ahead ahead;
    struct ht_scrub scrub; /* own lock */

    struct ht_meta_client client[CLIENTS_MAX];
    unsigned clients;
    bool mounted, replaying;
    _Atomic bool stopping;
    _Atomic bool failed; /* the log cannot be written: read-only */
    pthread_t thread[3]; /* writeback, compaction, health: those that run */
    unsigned threads;
    pthread_cond_t watch;                  /* the health thread has to end */
    uint32_t writeback_hand[HT_NODES_MAX]; /* one for each place; without places the first */
    struct ht_relief relief[HT_NODES_MAX];
    unsigned reliefs;

    struct ht_ref_conflict *conflicts;
    size_t conflict_count, conflict_cap;

    uint64_t dirty_bytes;
    unsigned missing;        /* readers that wait for a device */
    unsigned writing;        /* images on their way to a device by writeback */
    uint64_t writing_blocks; /* that they have */
    uint64_t hits, misses, evictions, writebacks, commits;
    uint64_t room_waits; /* for an image to go */
    uint64_t checksum_errors, read_errors, write_errors;
};

static inline void ht_store_lock(struct ht_store *s)
{
    ht_mutex_lock(&s->lock);
}

/* wake.c */
void ht_store_unlock_and_wake(struct ht_store *s);
static inline void ht_store_unlock(struct ht_store *s)
{
    if (s->wakes.any)
        ht_store_unlock_and_wake(s);
    else
        ht_mutex_unlock(&s->lock);
}
/* As ht_cond_wait_until with the lock; nobody else may wait with it. */
int ht_store_wait(struct ht_store *s, pthread_cond_t *c, uint64_t at_ns);
/* This image went, or may go: for who waits for one. Lock held. */
void ht_wake_for_slot(struct ht_store *s, uint32_t slot);
void ht_wake_one_for_slot(struct ht_store *s);

/* object.c */
struct ht_obj *ht_obj_find_locked(struct ht_store *s, uint64_t oid); /* also deleted ones; no reference taken */
struct ht_obj *ht_obj_insert_locked(struct ht_store *s, uint64_t oid);
void ht_obj_put_locked(struct ht_obj *o);
void ht_obj_free_memory(struct ht_obj *o); /* with its chunks'; it is in no table, and names nothing */
struct ht_scope *ht_scope_find(struct ht_store *s, uint64_t id, bool make);
void ht_obj_touch(struct ht_obj *o);           /* onto its scope's list */
void ht_obj_untouch_if_idle(struct ht_obj *o); /* off it, when nothing is dirty or unpublished */
/* References to all touched objects of a scope, in a malloc'd array (count returned), for loops that let the lock go. */
int ht_scope_collect(struct ht_store *s, uint64_t scope, struct ht_obj ***out, size_t *out_count) HT_CHECK;
void ht_obj_release_content(struct ht_obj *o);
/*
 * A change of content that an abort of the scope comes before or after, never into. WAITS for one, with the lock, but no chunk, held. It
 * waits for those that have begun in turn, so they begin no second one and wait for no transaction. -ESTALE: the object was taken back.
 */
int ht_obj_begin_change(struct ht_obj *o, struct ht_scope **out_scope) HT_CHECK;
void ht_scope_end_change(struct ht_store *s, struct ht_scope *sc);
/* The same with the lock, which is held between them if it is 0. -EROFS, too. */
int ht_obj_lock_for_change(struct ht_obj *o, struct ht_scope **out_scope) HT_CHECK;
void ht_obj_unlock_after_change(struct ht_obj *o, struct ht_scope *sc);

/* The ids of all objects, in a malloc'd array. Takes the lock. -ENOMEM. */
int ht_store_oids(struct ht_store *s, uint64_t **out_oids, size_t *out_count) HT_CHECK;

/* near.c: which memory is near which device. */
/* Before memory is made. -EINVAL: there is no such node. */
int ht_store_find_nodes(struct ht_store *s) HT_CHECK;
/*
 * Where an image of the chunk should be: near the device that it lies on; one that is not stored yet is given a device first (*home,
 * and 1, as in struct ht_image), if it matters. Lock held.
 */
int ht_chunk_near(struct ht_obj *o, struct ht_chunk *c, uint8_t *home);
/* Of one that is given none: near the device that it lies on, or else the one that its image is meant for. Lock held. */
int ht_chunk_near_now(const struct ht_store *s, struct ht_chunk *c);
/* The device that its image is meant for, or -1. Lock held. */
int ht_chunk_home(const struct ht_store *s, const struct ht_chunk *c);
uint8_t ht_chunk_home_stored(const struct ht_store *s, struct ht_chunk *c);
int ht_ref_near(const struct ht_store *s, const struct ht_ref *ref);
/* Where all of what is stored of it lies, or HT_NEAR_ANY. Lock held. */
int ht_obj_near_all(struct ht_obj *o);

/* members.c */
/* Read the superblocks; devices into the order of their indices, those that are missing as NULL. Errors are told. */
int ht_store_gather(struct ht_store *s, struct ht_dev *const devs[], unsigned n) HT_CHECK;
/* The caller's list: members by index, then what is none. */
void ht_store_put_in_order(const struct ht_store *s, struct ht_dev *devs[], unsigned n);
/* A new epoch, in superblocks and log. */
int ht_store_begin_epoch(struct ht_store *s) HT_CHECK;
/*
 * Write sb to all members. One that cannot be written is left behind, as long as another one has the log; it is tried again each time while
 * its own copy of the log is written. super_lock held.
 */
int ht_store_write_super(struct ht_store *s) HT_CHECK;
void ht_store_tell_missing(struct ht_store *s);
/* The journal's copy_lost. */
int ht_store_copy_lost(void *ctx, unsigned copy);
/* The journal's copy_back. */
int ht_store_copy_back(void *ctx, unsigned copy);

/* allocate.c */
/* Give back what is promised but for the first keep_bytes of the chunk. */
void ht_chunk_unpromise(struct ht_obj *o, struct ht_chunk *c, uint32_t keep_bytes);
/* Up to need blocks of what is promised become the caller's reservation; and back. */
uint32_t ht_chunk_use_promise(struct ht_obj *o, struct ht_chunk *c, uint32_t need);
void ht_chunk_return_promise(struct ht_obj *o, struct ht_chunk *c, uint32_t blocks);
/* Give back what is promised behind size. */
void ht_obj_unpromise_behind(struct ht_obj *o, uint64_t size);

/* share.c */
/* One owner more of what ref names; ref is one of those it has. named: by a record in the log. -ENOMEM. */
int ht_share_add(struct ht_store *s, const struct ht_ref *ref, bool named) HT_CHECK;
/* A record names it now. */
void ht_share_named(struct ht_store *s, const struct ht_ref *ref);
enum ht_share_left {
    HT_SHARE_OWNED,   /* by others: nothing comes free */
    HT_SHARE_FREE,    /* nothing but ref ever named it, or all that did is durably gone */
    HT_SHARE_LATER,   /* free when the last transaction that was appended is durable */
    HT_SHARE_WITH_TX, /* when the one is that is being collected */
};
/* An owner lets go; logged: by a record in the open transaction. */
enum ht_share_left ht_share_drop(struct ht_store *s, const struct ht_ref *ref, bool logged);
void ht_shares_free(struct ht_store *s);
/* *out: one owner more of what the chunk holds, to be installed or dropped. The chunk is held, has no newer image. -ENOMEM, -ENOSPC. */
int ht_chunk_share(struct ht_obj *o, struct ht_chunk *c, struct ht_ref *out) HT_CHECK;

/* ref.c */
int ht_limbo_push(struct ht_limbo_queue *q, uint64_t lsn, const struct ht_ref *ref);
/* An owner that the log does not know by this lets go: free at once, or when it may be. True if it is or will be free. */
bool ht_ref_drop(struct ht_store *s, struct ht_ref *ref);
/* Take blocks of a reference that nothing names any more out of use at once. */
void ht_free_ref_now(struct ht_store *s, struct ht_ref *ref);
/* Free what the log has made durable. */
void ht_limbo_durable(struct ht_store *s, uint64_t lsn);
/* The object has a reference less: counts and claims of it. */
void ht_obj_forget_stored(struct ht_obj *o, const struct ht_ref *ref);
/* At the end of the transaction: the reference is free once it is durable. */
void ht_tx_free_ref(struct ht_tx *tx, struct ht_obj *o, struct ht_ref *ref);

/* xfer.c: moving a stored chunk between memory and its extents. */
struct ht_xfer {
    struct ht_io io_[4], *ios;
    unsigned count;
    unsigned bad_dev; /* after an error: index of the device + 1 (0: none was asked), where, and what it said */
    uint64_t bad_offset;
    int bad_error;
    uint64_t rescues; /* of a write: store.rescues when its place was taken; the caller's */
    bool lost;        /* nothing was read: the chunk is marked lost */
};
/* To the ring, and no further: it goes to the device with the next ht_ring_kick, or when somebody waits. */
int ht_xfer_queue(struct ht_xfer *x, struct ht_store *s, struct ht_ring *ring, const struct ht_ref *ref, void *buf,
                  enum ht_io_op op) HT_CHECK;
/* Small ones are sent together: whoever does not go on to start or wait sends them (ht_ring_kick). */
int ht_xfer_start(struct ht_xfer *x, struct ht_store *s, struct ht_ring *ring, const struct ht_ref *ref, void *buf,
                  enum ht_io_op op) HT_CHECK;
/* A write succeeded and is about to be installed; has a flush of its device failed meanwhile? -EIO then. Lock held. */
int ht_xfer_settle(struct ht_store *s, struct ht_xfer *x, struct ht_ref *ref) HT_CHECK;
/* Its path, or words for one that is not there. */
const char *ht_device_name(const struct ht_store *s, unsigned device);
/* Frees what start took. Whatever a device says is -EIO: a full one below us (thin, or a file) is not a full store. */
int ht_xfer_wait(struct ht_xfer *x, struct ht_ring *ring);
/* Both in one. */
int ht_xfer_run(struct ht_xfer *x, struct ht_store *s, struct ht_ring *ring, const struct ht_ref *ref, void *buf,
                enum ht_io_op op) HT_CHECK;
/* The device's own word for an error of ht_xfer_wait, which is returned when there is none. */
int ht_xfer_error(const struct ht_xfer *x, int error);
/* Raise and count what ht_xfer_wait, or ht_xfer_start, said of a read. Lock not held. */
void ht_read_failed(struct ht_obj *o, uint64_t index, const struct ht_xfer *x, int error);
/* Verify what was read; counts errors. 0 or -EIO. */
int ht_ref_verify(struct ht_obj *o, uint64_t index, const struct ht_ref *ref, const void *buf);
/* health.c */
/* How the device does now; told when it changed, and remembered for placement. Lock held. */
enum ht_health ht_store_judge_device(struct ht_store *s, unsigned device);
void *ht_health_main(void *s);
/* What superblocks and log take of a device. */
uint64_t ht_store_fixed_bytes(const struct ht_store *s, unsigned device);

/* flush.c, with the lock, unless said otherwise */
/* The write of ref has ended: flushes that begin from now on cover it. */
void ht_ref_stamp(const struct ht_store *s, struct ht_ref *ref);
/* The devices (bits) that have to be flushed before ref is durable; of all that is current and unpublished of an object, of a scope. */
uint32_t ht_ref_unflushed(const struct ht_store *s, const struct ht_ref *ref);
uint32_t ht_obj_unflushed_locked(struct ht_obj *o);
uint32_t ht_scope_unflushed_locked(struct ht_store *s, uint64_t scope);
/* Has a flush failed, and what it voided is not given up yet? */
bool ht_flush_has_failed(struct ht_store *s);
/* Is that so for this one? */
bool ht_ref_endangered(struct ht_store *s, const struct ht_ref *ref);
/* A record names ref from now on. */
void ht_note_published(struct ht_store *s, const struct ht_ref *ref);
/* Flush these devices; those on which it failed. What was written to the others before is covered. No lock held. */
uint32_t ht_flush_devices(struct ht_store *s, uint32_t devices) HT_CHECK;
/*
 * Flush these devices. 0: what was current on them is on the media; -EAGAIN: some of it was given up: write it, and ask again; or the
 * error. No lock held.
 */
int ht_flush_written(struct ht_store *s, uint32_t devices, struct ht_rounds *r) HT_CHECK;
/* The journal's before_write. No lock held. */
int ht_flush_before_frame(void *ctx);
/* Was nothing given up since the round began? */
bool ht_round_holds(const struct ht_store *s, const struct ht_rounds *r);
/* It was: -EAGAIN, or -EIO after too many rounds. */
int ht_round_failed(struct ht_rounds *r) HT_CHECK;

/* rescue.c */
/* When a flush has failed: give up what it voided, or wait until another thread has done so. No lock held. */
int ht_rescue(struct ht_store *s) HT_CHECK;
/* Lock held. rescues: of the store, when the place of ref was taken, or ref was: may a flush that failed since have voided it? */
bool ht_ref_is_void(const struct ht_store *s, const struct ht_ref *ref, uint64_t rescues);

/* elsewhere.c */
/*
 * A write of a chunk to ref failed with error: find a place that takes it. data: whole blocks, which do not change meanwhile; the chunk is
 * held. Lock held, let go meanwhile. 0: ref says where it is now. Else the last error, and x says of what; ref names nothing then, and
 * the object has no space for it.
 */
int ht_write_elsewhere(struct ht_obj *o, struct ht_chunk *c, uint64_t index, struct ht_ring *ring, const void *data,
                       struct ht_xfer *x, struct ht_ref *ref, int error) HT_CHECK;
struct ht_ring *ht_store_ring(struct ht_store *s); /* this thread's; NULL: none to be had */
/* Allocate space for bytes, consuming the reservation of the chunk (or the object's guarantee). Called with the lock, may let it go to
 * make the log durable. out->place is set. */
int ht_chunk_take_space(struct ht_obj *o, struct ht_chunk *c, uint32_t bytes, struct ht_place_wish wish,
                        struct ht_ref *out) HT_CHECK;

/* fill.c: with the lock held and the chunk exclusively (the lock is let go meanwhile). */
/* Has it an image that reaches up to so many bytes? */
bool ht_chunk_has_slot(struct ht_store *s, const struct ht_chunk *c, uint32_t reach);
/*
 * The bytes that an image needs which reaches that far: an object's first chunk takes what it has, so that small objects take little;
 * the others, which are full but for the last one, take all that a chunk has. Never less than what a reference shows or has stored.
 */
uint32_t ht_chunk_image_bytes(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index, uint32_t reach);
/*
 * An image that reaches so far, for a chunk that has none; one that is shorter moves. May let the chunk go and take it again: then
 * everything else about it may have changed.
 */
int ht_chunk_get_slot(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t reach) HT_CHECK;
int ht_chunk_fill(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_CHECK;
/* Bytes of chunk index inside size. */
uint32_t ht_chunk_len(const struct ht_obj *o, uint64_t index);

/* handout_life.c, with the lock held: may this user have so many more images, of so many more bytes in all? */
bool ht_handed_user_may(const struct ht_store *s, uint32_t user, unsigned more, uint64_t more_bytes);
/* handout.c: with the lock held, unless said otherwise. What takes a handed-out object is not to be called for others. */
int ht_handed_init(struct ht_store *s) HT_CHECK; /* no lock */
bool ht_handed_stores(const struct ht_obj *o);   /* of any object */
/* Of any object: may the chunk hold bytes that a mapping stored, although it has neither an image nor a reference? */
bool ht_handed_hides(const struct ht_obj *o, uint64_t index);
/* The chunk, held exclusively, gets its image there; valid only if it is a hole. -ENOMEM */
int ht_handed_attach(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_CHECK;
/* Memory for the chunk, which the caller holds exclusively. Lock held, let go meanwhile. -ENOMEM */
int ht_handed_populate(struct ht_obj *o, const struct ht_chunk *c, uint64_t index) HT_CHECK;
/* handout_fill.c: read what has no image, before anybody outside has the memory. The lock is let go meanwhile. */
int ht_handed_read_in(struct ht_obj *o) HT_CHECK;
/* Every chunk gets one. Of any object; the lock may be let go. */
int ht_handed_complete(struct ht_obj *o) HT_CHECK;
/* The file is to be at least so large: before anybody writes there, or the object grows. Of any object. -ENOSPC: its share is used up. */
int ht_handed_reach(struct ht_obj *o, uint64_t bytes) HT_CHECK;
/* It was so large before. Of any object. */
void ht_handed_reach_again(struct ht_obj *o, uint64_t bytes);
/* As large as the object, which was made smaller. The lock may be let go. */
void ht_handed_trim(struct ht_obj *o);
/* The chunk, held exclusively, is zeros behind keep, and clean when nothing is left. The lock may be let go. */
void ht_handed_cut(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t keep);
/* Its image, newer than what is published, is to be read again. */
void ht_handed_revert(struct ht_obj *o, struct ht_chunk *c, uint64_t index);
/* All of the scope that may have been changed unseen: onto its list. */
void ht_handed_touch(struct ht_store *s, uint64_t scope);
/* Of any object: the memory goes; nobody has images in it. */
void ht_handed_free(struct ht_obj *o);
/* Of any object: so do its images, unless it is out, or something of it is dirty or held. */
bool ht_handed_try_free(struct ht_obj *o);
/* Memory that a file of so many bytes takes. */
static inline uint64_t ht_handed_footprint(uint64_t bytes)
{
    return ht_round_up(bytes, HT_BLOCK_BYTES);
}
typedef bool (*ht_handed_wanted_fn)(const struct ht_handed *h, const void *ctx);
typedef int (*ht_handed_visit_fn)(struct ht_obj *o, void *ctx);
/* Visits those of a scope that are wanted, with the lock held, which visit may let go meanwhile; the first error. No lock held. */
int ht_handed_visit(struct ht_store *s, uint64_t scope, ht_handed_wanted_fn wanted, ht_handed_visit_fn visit,
                    void *ctx) HT_CHECK;

/* handout_changes.c */
/* As ht_obj_find_changes, of any object, with the lock held, let go meanwhile. */
int ht_handed_search(struct ht_obj *o) HT_CHECK;
/* As ht_obj_find_changes, for all of a scope. No lock held. */
int ht_handed_find_changes(struct ht_store *s, uint64_t scope) HT_CHECK;
/* The commit timer's look at what is outside scopes. */
struct ht_handed_look {
    uint64_t period_ns; /* it comes so often */
    uint64_t now_ns, until_ns;
    void (*between)(struct ht_store *s); /* after each slice; lock held, may let it go */
    unsigned slices;                     /* out: so many */
};
/*
 * At all of what is back; until the time is up, but for one slice at least, at what is out and due: going on where the last look ended.
 * Where nothing was found several times in a row, it is due less and less often. No lock held.
 */
int ht_handed_look(struct ht_store *s, struct ht_handed_look *look) HT_CHECK;
/* handout_life.c */
/* Unless it is out. The lock may be let go. */
void ht_handed_evict(struct ht_obj *o);

/* fills.c: chunks that are being read. Who has some waits for another chunk only after finishing them all. */
enum { HT_FILLS_MAX = 32 };
struct ht_fill {
    struct ht_obj *o;
    struct ht_chunk *c;
    uint64_t index;
    struct ht_ref ref;
    struct ht_xfer xfer;
    int rc;
};
struct ht_fills {
    struct ht_store *s;
    struct ht_ring *ring;
    bool tell; /* errors */
    int error; /* the first */
    unsigned first, count;
    struct ht_fill fill[HT_FILLS_MAX]; /* in flight, oldest first */
};
/* Read into the new image of a chunk that is stored and held exclusively; there is a place. Lock held, let go meanwhile. */
void ht_fills_start(struct ht_fills *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index);
/* The oldest: its chunk gets free, without an image if it cannot be read. Lock held, let go meanwhile. */
void ht_fills_finish(struct ht_fills *w);
void ht_fills_finish_all(struct ht_fills *w);

/* writes.c: dirty images that are being written. Who has some waits for another chunk only after finishing them all. */
enum { HT_WRITES_MAX = 64 };
struct ht_write {
    struct ht_obj *o;
    struct ht_chunk *c;
    uint64_t index;
    struct ht_ref ref;
    struct ht_xfer xfer;
    uint32_t bytes;
    void *copy; /* of what is written, or NULL */
    int rc;
};

struct ht_writes {
    struct ht_store *s;
    struct ht_ring *ring;
    struct ht_write job[HT_WRITES_MAX];
    unsigned first, count; /* in flight, oldest first */
    unsigned copies;       /* of them with one */
    uint64_t flight_bytes, unpushed_bytes;
    unsigned failed;
    int error; /* the first */
};
/* No lock held. NULL: no memory, or no ring. */
struct ht_writes *ht_writes_open(struct ht_store *s);
/* Waits for all. The first error. Lock held, let go meanwhile. */
int ht_writes_close(struct ht_writes *w);
/* Is the oldest to be finished before another one is started? */
bool ht_writes_full(const struct ht_writes *w);
/* A dirty chunk, held exclusively, which is shared or free afterwards. Lock held, let go meanwhile. */
int ht_writes_start(struct ht_writes *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_CHECK;
/* The oldest. Lock held, let go meanwhile. */
void ht_writes_finish(struct ht_writes *w);
/* One was not written. */
void ht_writes_note_error(struct ht_writes *w, int rc);

/* ahead.c */
void ht_ahead_init(struct ht_ahead *a);
void ht_ahead_stop(struct ht_store *s); /* its thread; no lock */
void ht_ahead_destroy(struct ht_ahead *a);
/* This is going to be read: have what follows read ahead, if it should be. Lock held. */
void ht_obj_reader_note(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, uint64_t len);

/* rw.c */
void ht_obj_grow_locked(struct ht_obj *o, uint64_t size);

/* writeback.c */
/* Write back chunks [first, last) as far as it can be done; errors stay with the object. No lock held. */
void ht_obj_clean(struct ht_obj *o, uint64_t first, uint64_t last);
/* ht_scope_writeback without looking for changes first. No lock held. */
int ht_scope_write(struct ht_store *s, uint64_t scope) HT_CHECK;
/* GROWING: those that press, and also what somebody fills. */
enum ht_clean { HT_CLEAN_ANY, HT_CLEAN_PRESSING, HT_CLEAN_GROWING };
/*
 * Clean some dirty images to make room: only those that press, and as long as they do, or all but the keep-set, which makes no room.
 * Returns how many were cleaned, or the error if none could be. Only those at a place, unless near is HT_NEAR_ANY. No lock held.
 */
int ht_writeback_some(struct ht_store *s, unsigned most, enum ht_clean whom, int near) HT_CHECK;
bool ht_store_evict_image(void *ctx, uint32_t slot);

/* tx.c */
/* Into an open transaction: that numbers were given out which will be. */
void ht_tx_reserve_ids(struct ht_tx *tx);

/* publish.c */
void ht_record_ids(struct ht_buf *b, uint64_t next);
void ht_obj_publish_locked(struct ht_obj *o, struct ht_tx *tx);
/* What that would put now, and as much again for each image that may be written back before. */
size_t ht_obj_pending_bytes_locked(struct ht_obj *o);
void ht_tx_note_delete(struct ht_tx *tx, struct ht_obj *o);
void ht_record_object(struct ht_buf *b, const struct ht_obj *o, uint64_t size);
void ht_record_chunk(struct ht_buf *b, const struct ht_obj *o, uint64_t index, const struct ht_chunk *c,
                     const struct ht_ref *r);

/*
 * relocate.c: published bytes to another place. No lock, no chunk held.
 * begin: write len bytes (room for whole blocks) to new space, and flush. end: publish and make durable that the published reference `was` of the
 * chunk is there now; *ref is used up. -ENOSPC; -ESTALE, -EAGAIN: the chunk changed or is busy, nothing was done.
 */
int ht_relocate_begin(struct ht_store *s, struct ht_ring *ring, void *bytes, uint32_t len, struct ht_ref *out) HT_CHECK;
int ht_relocate_end(struct ht_obj *o, uint64_t index, const struct ht_ref *was, struct ht_ref *ref) HT_CHECK;

/* scrub_chunk.c */
struct ht_suspect {
    struct ht_obj *obj; /* the caller keeps its reference */
    uint64_t index;
    struct ht_ref ref; /* a copy of the one that is looked at */
    struct ht_ring *ring;
    bool repair;
    /* out, when it is bad */
    int error; /* -EUCLEAN: the checksum; else the device's */
    const char *device;
    uint64_t offset;
    int repair_error; /* why it could not be repaired; -ENODATA: there is no second copy; 0: it was */
};
enum ht_suspect_result { HT_SUSPECT_SOUND, HT_SUSPECT_ABSENT, HT_SUSPECT_BAD };
/* Read a reference and verify it, again if it seems bad, and repair it if it is. -ENOMEM; out as enum ht_suspect_result. No lock held. */
int ht_suspect_check(struct ht_suspect *x) HT_CHECK;

/* replay.c */
int ht_store_replay(struct ht_store *s, uint16_t type, const uint8_t *payload, uint32_t len);
int ht_store_replayed(struct ht_store *s);

/* lease.c */
void ht_lease_works_free(struct ht_store *s);

/* scrub.c */
void ht_scrub_init(struct ht_scrub *c);
void ht_scrub_destroy(struct ht_scrub *c); /* ends it first */

/* compact.c */
void *ht_compaction_main(void *s);
/* background.c */
void *ht_writeback_main(void *s);
void *ht_relief_main(void *relief);

enum {
    HT_OBJECT_RECORD_BYTES = 8 + 8 + 4 + 4 + 8 + 8,
    HT_OBJECT_DEL_RECORD_BYTES = 8 + 8,
    HT_CHUNK_RECORD_BYTES = 8 + 8 + 8 + 4 + 1 + 1 + 2 + 4 + 4 + 8,
    HT_CHUNK_DEL_RECORD_BYTES = 8 + 8 + 8 + 8,
    HT_FRAG_RECORD_BYTES = 12,
};

#endif
