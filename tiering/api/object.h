/* SPDX-License-Identifier: Apache-2.0 */
/* object.h - objects: sequences of bytes with an id. Reading, writing and keeping them. store.h explains the words. */
#pragma once

#include <sys/types.h>

#include "tiering/base/list.h"
#include "tiering/tier/readahead_policy.h"

struct ht_store;
struct ht_tx;
struct ht_obj;

/* ------------------------------------------------------------------ life */

struct ht_obj_attr {
    uint64_t oid;         /* from ht_store_new_id; 0 is -ENOSPC */
    uint32_t chunk_bytes; /* HT_CHUNK_BYTES_VALID */
    uint32_t obj_class;   /* HT_CLASS_DURABLE; HT_CLASS_SCRATCH: never published, gone at unmount */
    uint64_t scope;       /* 0 or the id of a model root */
};

/*
 * Makes an empty object, known at once, published with the next ht_obj_publish. The caller gets a reference. -ENOSPC.
 */
int ht_obj_create(struct ht_store *s, const struct ht_obj_attr *attr, struct ht_obj **out_obj) HT_MUST_CHECK;
/* Log bytes that an object reserves when it is created. */
uint64_t ht_obj_log_bytes(void);
/* A reference to an object that exists (also one deleted in a scope but not published so), or NULL. */
struct ht_obj *ht_obj_get(struct ht_store *s, uint64_t oid);
/* One more for a thread that has one, also to a deleted object. */
struct ht_obj *ht_obj_ref(struct ht_obj *obj);
/* The caller may hold locks: the space of a large object that was deleted is free when the next transaction ends. */
void ht_obj_put(struct ht_obj *obj);

/*
 * Deletes, inside a transaction. In scope 0 the deletion is put into tx; in a scope it is pending until
 * the scope is committed or ends. The content is freed with the last reference. Never fails. A scratch object may be
 * deleted at any time, with tx NULL: its references keep it, and who has one reads and writes it.
 */
void ht_obj_delete(struct ht_obj *obj, struct ht_tx *tx);
/* Memory that the first chunk takes to have so many bytes, as programs read and write it: a power of two. */
uint32_t ht_obj_first_image_bytes(uint32_t least);
/* Allowed while the object holds no byte, and did not when it was published; else -EBUSY. */
int ht_obj_set_chunk_bytes(struct ht_obj *obj, uint32_t chunk_bytes) HT_MUST_CHECK;

/*
 * Moves an object into another scope, inside a transaction. Into the scope of a model root only if it is wholly
 * published (see ht_obj_sync), else -EBUSY. Into scope 0 also with dirty or unpublished content, which is published
 * with that scope from then on. That does not fail for an object that is published at all.
 */
int ht_obj_set_scope(struct ht_obj *obj, uint64_t scope, struct ht_tx *tx) HT_MUST_CHECK;

struct ht_obj_stat {
    uint64_t oid, size, scope;
    uint32_t chunk_bytes, obj_class;
    uint64_t stored_bytes;   /* on devices, current references, in whole blocks; shared ones count for each owner */
    uint64_t cold_bytes;     /* of these, in the vault */
    uint64_t prealloc_bytes; /* set aside by ht_obj_prealloc, not written yet */
    uint64_t resident_bytes, dirty_bytes;
    uint64_t hits, misses; /* chunk accesses served from the image, or not; up to UINT32_MAX */
    uint64_t cold_waits;   /* reads and writes that waited for the vault; modulo 2^32 */
    uint64_t device_read_bytes, device_written_bytes;
    uint64_t version; /* grows with every change of content */
    uint32_t refs;    /* references to it, of all threads */
    bool unpublished; /* there is something ht_obj_publish would put */
    int error;        /* write error that no writeback or sync has reported yet, or 0 */
    int sticky_error; /* the last write error, reported or not, until ht_obj_clear_error */
};
void ht_obj_stat(struct ht_obj *obj, struct ht_obj_stat *out);
/* What the store wrote to devices for objects of a scope since the mount: content, without the log. It only grows. */
uint64_t ht_scope_written_bytes(struct ht_store *s, uint64_t scope);
/*
 * Content of the scope, which is not 0, goes to devices of each class, by their shares (tier/placement.h). Not in the
 * log: to be called after each mount. -ENOMEM.
 */
int ht_scope_set_all_paths(struct ht_store *s, uint64_t scope, bool all) HT_MUST_CHECK;
/* Stored bytes of the scope's objects that lie in the vault. Has it no object? */
uint64_t ht_scope_cold_bytes(struct ht_store *s, uint64_t scope);
/* How many aborts of its scope have begun. */
unsigned ht_obj_aborts(struct ht_obj *o);
bool ht_scope_is_empty(struct ht_store *s, uint64_t scope);
/* Clears a write error that a client has seen. */
void ht_obj_clear_error(struct ht_obj *obj);
/*
 * A write to the object failed before it got here: sticky_error keeps that; report: no client got the error, and the
 * next sync returns it.
 */
void ht_obj_note_error(struct ht_obj *obj, int error, bool report);
uint64_t ht_obj_id(const struct ht_obj *obj);
uint64_t ht_obj_size(struct ht_obj *obj);
uint32_t ht_obj_chunk_bytes(const struct ht_obj *obj);
/* The place in them of the node that should work on the bytes at this offset, or HT_NUMA_INDEX_ANY. */
int ht_obj_numa_index(struct ht_obj *o, uint64_t offset);

/* ----------------------------------------------------------------- bytes */

/*
 * A reader through one descriptor: how far the store has read ahead for it. All zero at first, and the store's from the
 * first read on, until its end. A file of state may get another object: then the reader begins again there.
 */
struct ht_obj_reader {
    struct ht_store *store; /* NULL: has not read yet */
    uint64_t oid;           /* of the object that it read last */
    struct ht_obj *obj;     /* that one, with a reference, while there is something to read ahead; else NULL */
    struct ht_list pending; /* and in a list then */
    struct ht_readahead_both streams;
    bool downwards;     /* the chunks to read ahead are [end, next), the highest first; else [next, end) */
    uint64_t next, end; /* chunks to read ahead */
    unsigned missing;   /* of its reads that wait for a device */
};
void ht_obj_reader_end(struct ht_obj_reader *reader);
/*
 * Reads up to len bytes at off; holes are zeros. Returns the count (short only at the end of the object) or -errno.
 * -ESTALE: an abort took the object back. A thread of the background class brings nothing into the DRAM tier, and waits
 * for its permits with no chunk; it holds no lock. WAITS.
 */
ssize_t ht_obj_read(struct ht_obj *obj, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
/* The same with readahead. reader: may be NULL. */
ssize_t ht_obj_read_for(struct ht_obj *obj, struct ht_obj_reader *reader, uint64_t off, void *buf,
                        size_t len) HT_MUST_CHECK;

/*
 * The same without a copy if one chunk has the whole range: fn is called once, with the bytes in the chunk's image, or
 * in buf. fn is to use the bytes before it returns, and must not call the store. It is not called when the result is an
 * error. reader: for readahead, or NULL. WAITS.
 */
typedef void (*ht_obj_read_fn)(void *ctx, const void *bytes, size_t len);
ssize_t ht_obj_read_in_place(struct ht_obj *obj, struct ht_obj_reader *reader, uint64_t off, void *buf, size_t len,
                             ht_obj_read_fn fn, void *ctx) HT_MUST_CHECK;

/*
 * Writes, and grows the object. All or nothing only for each chunk: returns the count written, which is short when a
 * later chunk failed, or -errno when nothing was. WAITS. -EFBIG beyond HT_FILE_BYTES_MAX. -ESTALE as for reading.
 */
ssize_t ht_obj_write(struct ht_obj *obj, uint64_t off, const void *buf, size_t len) HT_MUST_CHECK;
/* Works on a full store too. WAITS. */
int ht_obj_truncate(struct ht_obj *obj, uint64_t size) HT_MUST_CHECK;

/*
 * For the writer of a piece that grew the object from size to end and now fails: restores the former size. Does nothing
 * if the object does not end at end any more, for then another call has changed the size since. WAITS.
 */
int ht_obj_ungrow(struct ht_obj *obj, uint64_t size, uint64_t end) HT_MUST_CHECK;
/* Zeroes a range, and frees whole chunks inside it. WAITS. */
int ht_obj_punch(struct ht_obj *obj, uint64_t off, uint64_t len) HT_MUST_CHECK;

/*
 * Copies a range as it was at some moment during the call: the target then has the same bytes, and is as large as a
 * write would have made it. Returns the count, short at the end of the source or when a later part failed, or -errno
 * when nothing was done. WAITS.
 *
 * Whole chunks at the same offset inside chunks of the same size are not copied: both objects own the stored bytes,
 * until one writes (also the last, partial chunk of the source if the target holds nothing after it). For that, dirty
 * images of the source are written back, though nothing is published. A target that never held a byte takes the chunk
 * size of the source. Holes become holes. All other bytes are copied through memory; so is everything from or into a
 * scratch object.
 *
 * -EINVAL: the ranges overlap in one object. -EFBIG: beyond HT_FILE_BYTES_MAX. -ENOSPC, -EIO: as for reading and
 * writing. Chunks that an object with a rewrite reserve shares need space as if they were copied.
 */
ssize_t ht_obj_clone(struct ht_obj *src, uint64_t src_off, struct ht_obj *dst, uint64_t dst_off,
                     uint64_t len) HT_MUST_CHECK;

/*
 * The object gets the size and the bytes of another one of the same chunk size: what lies in the same place stays, the
 * rest is shared or copied as by ht_obj_clone. After an error a part may be done. WAITS.
 */
int ht_obj_restore(struct ht_obj *obj, struct ht_obj *from) HT_MUST_CHECK;
/*
 * Do two objects have the same bytes from off to *out_end, which is above off? By the places of their chunks alone:
 * nothing is read, and equal bytes in two places are not the same. The bytes after an object's end count as zeros.
 * UINT64_MAX: to the end of both. For content that does not change meanwhile.
 */
bool ht_obj_same(struct ht_obj *a, struct ht_obj *b, uint64_t off, uint64_t *out_end);

/*
 * Preallocates space (posix_fallocate). Until unmount the first write to a chunk of the range, up to the range's end in
 * it, does not fail with -ENOSPC, neither for data nor for log space. The size stays, and the range may lie beyond it;
 * reads and seeks see no difference. Stored bytes get nothing: writing them again needs new space, as everywhere. So
 * does writing more to a chunk that was written back in part, beyond the rest of its preallocation. Truncating (also to
 * the size it has), punching and deleting give the space back; so does abort, if anything of the object changed.
 * -ENOSPC: nothing is changed, unless another call takes content or preallocations from the range meanwhile. -EFBIG:
 * beyond HT_FILE_BYTES_MAX. Calls that write meanwhile use what their chunks have been given by then.
 */
int ht_obj_prealloc(struct ht_obj *obj, uint64_t off, uint64_t len) HT_MUST_CHECK;
/*
 * Sets space aside for objects to come: no other content gets it. ht_store_set_aside_end gives it back. Whole blocks.
 * -ENOSPC. ht_obj_prealloc_aside is ht_obj_prealloc, and takes such space first: *bytes is how much it may take, and
 * then how much it left.
 */
int ht_store_set_aside(struct ht_store *s, uint64_t bytes) HT_MUST_CHECK;
void ht_store_set_aside_end(struct ht_store *s, uint64_t bytes);
int ht_obj_prealloc_aside(struct ht_obj *obj, uint64_t off, uint64_t len, uint64_t *bytes) HT_MUST_CHECK;
/* Offset of the next data (hole: the next hole) at or after off, or -ENXIO at or beyond the end. In whole chunks. */
int64_t ht_obj_seek(struct ht_obj *obj, uint64_t off, bool hole) HT_MUST_CHECK;

/* ---------------------------------------------------- devices and memory */

/*
 * Writes dirty images to devices; publishes nothing. Returns the first error (also a sticky one, which it clears).
 * WAITS.
 */
int ht_obj_writeback(struct ht_obj *obj) HT_MUST_CHECK;
/* The same, and on the media: call it before publishing something that has to be durable soon. WAITS. */
int ht_obj_writeback_flushed(struct ht_obj *obj) HT_MUST_CHECK;

/*
 * Puts unpublished references and size into tx. In a scope: this object alone (fsync of one file below a root). In a
 * transaction that began with ht_tx_begin_round these are all changes that the writeback wrote; in another one they are
 * the changes that happen to be written.
 */
void ht_obj_publish(struct ht_obj *obj, struct ht_tx *tx);
/*
 * Before the transaction that publishes a file outside of model roots: publishes most of a large one in smaller ones.
 * Does nothing for others. WAITS.
 */
int ht_obj_publish_ahead(struct ht_obj *obj) HT_MUST_CHECK;
/* About how many bytes ht_obj_publish would put now; at least as many. */
size_t ht_obj_pending_bytes(struct ht_obj *obj);
/* Writeback, publish in a transaction of its own, wait until durable. WAITS. */
int ht_obj_sync(struct ht_obj *obj) HT_MUST_CHECK;
/*
 * Brings chunks into the DRAM tier, to free places and to those of at most half of the clean content that is not needed
 * before it. WAITS.
 */
int ht_obj_prefetch(struct ht_obj *obj) HT_MUST_CHECK;
/* Evicts clean images. */
void ht_obj_evict(struct ht_obj *obj);
/*
 * How long the object's images stay in the DRAM tier.
 *   AUTO    as they are used
 *   PINNED  as long as they are pinned: at most half of the tier for all objects, the first comers; the rest is as AUTO
 *   COLD    they go before others that were used; updates stream them
 */
enum ht_residency { HT_RESIDENCY_AUTO, HT_RESIDENCY_PINNED, HT_RESIDENCY_COLD };
void ht_obj_set_residency(struct ht_obj *obj, enum ht_residency residency);
/*
 * compress: threads that write its content back may compress it at once (data/write_frame.c). tensor: ht_scope_edits
 * counts its changes; so it does if content is one from now on, or is none any more (changed).
 */
void ht_obj_describe(struct ht_obj *obj, bool compress, bool tensor, bool changed);
/* Bytes that can still be pinned if all of the object is: less than 0 if it does not fit. */
int64_t ht_obj_pinnable_bytes(struct ht_obj *obj);
/*
 * A program says when it uses the content next, in so many nanoseconds from now, or (UINT64_MAX) never. Until then, and
 * a quarter longer, it stays in the DRAM tier as far as half of that has room; what is needed last goes first, and
 * reads begin early enough. -ENOSPC: for 4096 objects at a time. -ENOMEM.
 */
int ht_obj_set_next_use(struct ht_obj *obj, uint64_t after_ns) HT_MUST_CHECK;
/* -ENODATA: nothing was said, or the time is past. *out_after_ns: 0: the use is late. */
int ht_obj_forget_next_use(struct ht_obj *obj) HT_MUST_CHECK;
int ht_obj_next_use(struct ht_obj *obj, uint64_t *out_after_ns) HT_MUST_CHECK;
/* No updates come any more: the object's images may be evicted as others are. */
void ht_obj_unprotect(struct ht_obj *obj);

/*
 * Promises that every chunk of the object, up to size bytes, can be rewritten once between two publications without
 * -ENOSPC. Lasts until the object is deleted, or a call sets another size (0: end). -ENOSPC.
 */
int ht_obj_rewrite_reserve(struct ht_obj *obj, uint64_t size) HT_MUST_CHECK;
/* The same, and takes space that is set aside first: *bytes is how much it may take, and then what it left. */
int ht_obj_rewrite_reserve_aside(struct ht_obj *obj, uint64_t size, uint64_t *bytes) HT_MUST_CHECK;
/* How much space the promise takes where none is reserved yet. */
uint64_t ht_obj_rewrite_bytes(struct ht_obj *obj, uint64_t size);
/*
 * From now on changes of the object through batch pins can be computed again, so a commit may leave them out
 * (ht_scope_commit_rest). edited: it may have been changed otherwise since its last publication; without effect if the
 * object is derived already. -ENOMEM.
 */
int ht_obj_set_derived(struct ht_obj *obj, bool edited) HT_MUST_CHECK;
bool ht_obj_is_derived(struct ht_obj *obj);
/*
 * Only the first bytes of each chunk have content; the rest is zeros, and nobody writes it. So images, writes and
 * rewrite reserves take no more. The size of the object counts whole chunks still. To be called before anything is
 * written or reserved, and after each mount: the log does not have it. Nothing changes if more
 * is stored already. -ENOMEM.
 */
int ht_obj_set_used(struct ht_obj *obj, uint32_t bytes) HT_MUST_CHECK;
/* Drops whole chunks at once, published or not, without a log record: of scratch objects only. WAITS. */
void ht_obj_scratch_drop(struct ht_obj *obj, uint64_t first_chunk, uint64_t count);

/* ------------------- shared memory: a memfd that other programs read and map */

/*
 * An object's content as a file of memory, for others to read and map: *out_fd, the store's, always as large as the
 * object. Until it is closed the file shows the object's content, whatever changes it: writes, updates, truncation,
 * abort. WAITS: for reading the whole content. A scratch object gets its memory at the first touch: the file shows
 * which pages were touched. -EINVAL: an object of small chunks, or an empty one; -ENOSPC: the share of memory is used
 * up; -EIO: a part cannot be read; -EBUSY: it changed during the call. Not while it is open.
 *
 * A user other than root (0) gets at most HT_SHM_USER_QUARTERS of the share, and of the number. So something is left
 * for others, no matter how much one user opens. -EDQUOT. While the object is open, it cannot grow beyond that either
 * (-ENOSPC).
 */
int ht_obj_shm_open_for(struct ht_obj *obj, uint32_t user, int *out_fd) HT_MUST_CHECK;
/* From now on programs may change it without a call. Reserves its whole rewrite: -ENOSPC. WAITS. */
int ht_obj_shm_expect_stores(struct ht_obj *obj) HT_MUST_CHECK;
/* No program changes it without a call any more, though it stays open: the next scan is the last one. */
void ht_obj_shm_expect_no_stores(struct ht_obj *obj);
/* No program has it any more: the memory stays until another object wants it. */
void ht_obj_shm_close(struct ht_obj *obj);
/*
 * Finds changes that were made without a call, and marks them dirty. ht_obj_writeback, ht_obj_sync and
 * ht_scope_writeback begin with it. WAITS.
 */
int ht_obj_shm_scan(struct ht_obj *obj) HT_MUST_CHECK;
/* After ht_scope_abort, and its transaction: the files show the old content again. WAITS. */
int ht_scope_shm_restore(struct ht_store *s, uint64_t scope) HT_MUST_CHECK;
