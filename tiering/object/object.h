/* SPDX-License-Identifier: Apache-2.0 */
/* object.h - an object in memory, and the table of all. */
#pragma once

#include "tiering/base/idtable.h"
#include "tiering/base/pool.h"
#include "tiering/object/chunk.h"
#include "tiering/object/scope.h"

struct ht_shm;

/*
 * State that few objects need: made at the first use, which can return -ENOMEM, and kept until the object goes. Until
 * then extra points to one that is all zeros.
 */
struct ht_obj_extra {
    void *root; /* of the chunks: a leaf if height is 0, or a node; NULL: none but the first */
    struct ht_shm *shm;
    uint64_t rewrite_reserve_blocks, rewrite_reserve_left, prealloc_blocks;
    uint64_t shared_blocks; /* of references with the bit shared; an object without an extra has one chunk to ask */
    uint64_t cold_blocks;   /* of these, in the vault; the same */
    uint64_t log_chunks, log_promised; /* that have log bytes; that will have some */
    uint32_t cold_waits;               /* calls of users that waited for the vault */
    uint32_t used_bytes;               /* of each chunk, that may have content; 0: all */
    uint8_t height;                    /* nodes above a leaf */
    bool may_be_dirty;                 /* its content may have been changed by programs without a call */
    bool shm_stored;  /* programs had its memory for stores: a pin, or a dead mount, may keep pages of it */
    bool shm_reserve; /* the rewrite reserve is for stores to shared memory: no caller wanted it */
    bool derived;     /* changes through batch pins can be computed again */
    bool edited;      /* derived, and maybe changed otherwise since it was published */
};

/* Three lines of a cache for a file of one chunk. Numbers of blocks have 40 bits: 4 PiB. */
struct ht_obj {
    struct ht_store *s;
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        struct ht_scope *scope;
        const struct ht_obj_extra *extra;
        struct ht_list touched; /* of the scope; leaving, of the transaction; ending, of ht_objects */
    };
    union {
        uint64_t oid;
        struct ht_id_link by_oid HT_GUARDED_BY(HT_LOCK_STORE);
    };
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        uint64_t size;
        union {
            uint64_t pub_size;   /* the size in the log */
            uint64_t delete_lsn; /* dead: of its record, or 0: the log never knew it */
        };
        uint64_t version;
    };
    uint64_t stored_blocks : 40 HT_GUARDED_BY(HT_LOCK_STORE); /* of references */
    uint8_t chunk_shift;
    uint16_t writing HT_GUARDED_BY(HT_LOCK_STORE); /* chunks: fewer than windows of writeback can hold */
    /* From devices. This and later statistics stay at their highest value. */
    uint64_t read_blocks : 40 HT_GUARDED_BY(HT_LOCK_STORE);
    uint8_t obj_class;
    int16_t error HT_GUARDED_BY(HT_LOCK_STORE); /* reported and cleared by writeback */
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        uint64_t written_blocks : 40; /* to devices */
        bool published : 1;           /* the log knows it */
        bool defined : 1;             /* replay saw its OBJECT record */
        bool deleted : 1;             /* currently */
        bool leaving : 1;             /* its deletion is in the open transaction */
        bool dead : 1;                /* for good: leaves memory with its last reference */
        bool vanished : 1;            /* dead because an abort took it back: its content is gone */
        bool meta_dirty : 1;          /* size or existence is unpublished */
        bool lost : 1;                /* a chunk is BAD: the error stays until abort */
        int16_t sticky;               /* the last error, until a client clears it */
        uint32_t hits, misses;
        uint32_t refs : 27;
        uint32_t tensor : 1;                   /* ht_obj_describe */
        uint32_t compress : 1;                 /* writers may compress it: data/write_frame.c */
        uint32_t ending : 1;                   /* dead and large: its content is freed in slices */
        uint32_t residency : 2;                /* enum ht_residency */
        uint32_t dirty, unpublished, resident; /* chunks */
        struct ht_first first;
    };
};
static_assert(sizeof(struct ht_obj) == 192, "memory per file is bounded");
static_assert(offsetof(struct ht_obj, oid) == offsetof(struct ht_obj, by_oid.id), "a link has its object's number");

/* All objects. */
struct ht_objects {
    struct ht_pool pool; /* their memory */
    struct ht_id_table table;
    uint64_t chunks, lost_chunks; /* published */
    uint64_t tables_bytes;        /* heap of leaves and nodes */
    uint64_t tables_bytes_max;    /* for calls that ask: chunk.h */
    bool tables_full;             /* the last call that wanted more of these bytes was refused */
    uint64_t superseded_blocks;   /* that the publication of scope 0 makes free, as far as it is on devices */
    uint64_t cold_blocks;         /* of references of all objects, in the vault */
    uint64_t aside_blocks;        /* set aside for objects to come: a part of what the allocator has reserved */
    uint64_t meta_bytes;          /* heap of objects, chunks, refcounts and scopes */
    uint64_t meta_bytes_max;      /* for a replay: txn/replay.c */
    struct ht_scope *scopes;      /* one per model root */
    struct ht_id_table scopes_by_id;
    struct ht_scope *scope0;
    struct ht_list ending; /* dead objects, by touched; each holds a reference */
    unsigned ending_now;   /* those that threads have taken from the list, and free */
    bool replaying;
    bool any_all_paths;               /* some scope has, or had, all_paths */
    struct ht_chunk_watch *watches;   /* chunk.h */
    struct ht_touched_walk *walks;    /* scope.h */
    struct ht_scope_changes *changes; /* scope.h; NULL: no publication goes on */
};

/* extra.c. A new object has this one, which all share. */
extern const struct ht_obj_extra ht_obj_no_extra;
static inline bool ht_obj_has_extra(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE) /* of its own */
{
    return o->extra != &ht_obj_no_extra;
}
/* So that it has an extra of its own. */
int ht_obj_need_extra(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* For a change: it has an extra of its own then. */
struct ht_obj_extra *ht_obj_extra(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_free_extra(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Log bytes. Content of a chunk needs some for its record (HT_CH_LOG_RESERVED). An object that steps update is promised
 * those of all its chunks with its rewrite reserve, so that no step is refused: they are reserved for as many chunks as
 * have some, or as were promised if these are more.
 */
/* Chunks that will have log bytes without a further reservation. */
uint64_t ht_obj_log_promise_left(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/* Promises the chunks of so many bytes, not those of before. -ENOSPC: nothing changed. Less never fails. */
int ht_obj_promise_log(struct ht_obj *o, uint64_t size) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The chunk, which had none, has log bytes from now on: promised ones, or those that the caller has reserved. */
void ht_chunk_set_log_reserved(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* Blocks of its references with the bit shared; to be told when such a reference comes (1) or goes (-1). */
uint64_t ht_obj_shared_blocks(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_count_shared(struct ht_obj *o, const struct ht_ref *ref, int sign) HT_REQUIRES(HT_LOCK_STORE);
/* The same of references to the vault: also the sums of its scope and of the store. */
uint64_t ht_obj_cold_blocks(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_count_cold(struct ht_obj *o, const struct ht_ref *ref, int sign) HT_REQUIRES(HT_LOCK_STORE);
/* Programs stored into its shared memory until now, maybe also since the last call. */
static inline void ht_obj_note_stores(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    /* A tensor is derived from its first update on. Scratch files are no state of a model. */
    o->scope->edits += o->extra->derived || (o->tensor && o->obj_class != HT_CLASS_SCRATCH);
}

/* Its content is changed otherwise than through a batch pin. */
static inline void ht_obj_note_edit(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_obj_note_stores(o);
    if (o->extra->derived)
        ht_obj_extra(o)->edited = true;
}

/* The compiler would compute with bit-fields in their own width. */
static inline uint64_t ht_obj_stored_blocks(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    return o->stored_blocks;
}
/* An operation failed: the next sync returns the error. */
static inline void ht_obj_set_error(struct ht_obj *o, int error) HT_REQUIRES(HT_LOCK_STORE)
{
    o->error = o->sticky = (int16_t)error;
}

static inline uint32_t ht_obj_bytes_per_chunk(const struct ht_obj *o)
{
    return 1u << o->chunk_shift;
}
/* Of each chunk, bytes that may have content (ht_obj_set_used). */
static inline uint32_t ht_obj_used_bytes(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    return o->extra->used_bytes ? o->extra->used_bytes : ht_obj_bytes_per_chunk(o);
}
/* Statistics. */
void ht_obj_count_hit(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_count_miss(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_count_read(struct ht_obj *o, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_count_written(struct ht_obj *o, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);

/* ----------------------------------------------------------------- table */

struct ht_obj *ht_obj_find_locked(struct ht_store *s, uint64_t oid)
    HT_REQUIRES(HT_LOCK_STORE); /* also deleted ones; no reference taken */
/* NULL for NULL. */
static inline struct ht_obj *ht_obj_of_link(const struct ht_id_link *link)
{
    return link ? ht_container_of(link, struct ht_obj, by_oid) : NULL;
}
/* Loops over the objects of one bucket. */
#define ht_obj_for_each_in_bucket(o, s, bucket)                                                      \
    for (struct ht_obj *o = ht_obj_of_link(*ht_bucket_at(&(s)->objects.table.buckets, bucket)); (o); \
         (o) = ht_obj_of_link((o)->by_oid.next))
struct ht_obj *ht_obj_insert_locked(struct ht_store *s, uint64_t oid) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_put_locked(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Frees the large objects that died, in slices. After calls that may have put the last reference; ht_obj_put and the
 * end of a transaction do it themselves. wait: until other threads have freed theirs, too.
 */
void ht_obj_free_ended(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE);
void ht_obj_wait_ended(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE);
void ht_obj_untouch_if_idle(struct ht_obj *o)
    HT_REQUIRES(HT_LOCK_STORE); /* off it, when nothing is dirty or unpublished */
void ht_obj_free_memory(struct ht_obj *o)
    HT_REQUIRES(HT_LOCK_STORE); /* with its chunks'; it is in no table, and names nothing */

/*
 * The numbers of all objects, in a malloc'd array. Holds the lock for short slices. Objects that are made or
 * freed meanwhile are listed or not, none twice. -ENOMEM
 */
int ht_store_oids(struct ht_store *s, uint64_t **out_oids, size_t *out_count) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The same in steps, from zeros on; the caller frees oid. A slice may list nothing and make room. -ENOMEM */
struct ht_oid_scan {
    uint64_t *oid;
    size_t count, room, bucket;
    bool is_over; /* out */
};
int ht_oid_scan_slice(struct ht_store *s, struct ht_oid_scan *scan) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/* ------------------------- invariants (tiering/base/verify.h); with the store's lock */

/* One object, its chunks and their table. */
void ht_obj_verify(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/*
 * All objects, their images, space and owners. idle: no other thread works on the store, so sums of reservations and
 * space are exact.
 */
void ht_objects_verify(struct ht_store *s, bool idle) HT_REQUIRES(HT_LOCK_STORE);
