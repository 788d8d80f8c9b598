/* SPDX-License-Identifier: Apache-2.0 */
/* shm_priv.h - inside shm/. The caller holds the store's lock, unless a comment says otherwise. */
#pragma once

#include "tiering/base/list.h"
#include "tiering/sys/mem.h"
#include "tiering/cache/arena.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/shm/shm.h"

/* Images in memory that others have, too. */
struct ht_shm {
    struct ht_list link; /* in the list of all: closed ones in the order of their closing */
    struct ht_obj *obj;
    struct ht_shared memory;
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        uint64_t open_id; /* of opens, when it was opened last, or programs might change it again */
        bool is_open;     /* holds a reference */
        uint64_t shut_ns; /* while it is closed: when that began */
        bool stores;      /* while it is open: programs may change it without a call */
        uint32_t user;    /* while it is open: the user that it counts for; 0: none */
        /* the timer's scan */
        bool changed;     /* a scan has found something in this round */
        unsigned quiet;   /* rounds in a row without a changed image */
        uint64_t due_ns;  /* no round begins before */
        uint64_t scanned; /* the next chunk of the round */
    };
};

static inline bool ht_shm_takes_stores(const struct ht_shm *h) HT_REQUIRES(HT_LOCK_STORE)
{
    return h->is_open && h->stores;
}

/* The state of shm/. */
struct ht_shm_state {
    uint64_t share_bytes; /* at most; constant */
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        struct ht_list all;
        uint32_t count;
        uint64_t used_bytes;
        bool owes;      /* the share, or what is lent of it, is less: an abort needed memory at once */
        uint64_t opens; /* so far */
    };
};

/* Memory that a file of so many bytes takes. */
static inline uint64_t ht_shm_footprint(uint64_t bytes)
{
    return ht_round_up(bytes, HT_BLOCK_BYTES);
}

/* Is the share so large, and does the tier keep enough when it lends all of that? */
bool ht_shm_may_use(const struct ht_store *s, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Takes so many more bytes of the share, for memory that is made after this; and gives them, when it is gone. A share
 * that is lent comes from images up to most. until_ns 0: does not release the lock, and waits for nothing. -ENOSPC
 */
int ht_shm_take(struct ht_store *s, uint64_t bytes, enum ht_lend most, uint64_t until_ns)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
void ht_shm_give(struct ht_store *s, uint64_t bytes) HT_REQUIRES(HT_LOCK_STORE);
/* May this user have so many more images, of so many more bytes in all? */
bool ht_shm_user_may(const struct ht_store *s, uint32_t user, unsigned more, uint64_t more_bytes)
    HT_REQUIRES(HT_LOCK_STORE);
/* Where the chunk lies in the file. */
uint8_t *ht_shm_chunk_memory(const struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/*
 * The chunk, held exclusively and without an image, gets one there; valid only if it is a hole. -ENOMEM; -EINVAL: it
 * lies after the end of the file.
 */
int ht_shm_attach(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Memory for the chunk, which the caller holds exclusively. Releases the lock in between. -ENOMEM */
int ht_shm_populate(struct ht_obj *o, const struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Of any object: frees memory and images, unless it is open, or has dirty or held chunks. */
bool ht_shm_try_free(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Frees the memory of a closed object, unless it is in use again or cannot be written. Begins no write while a device
 * does not answer. Lock held; releases it in between.
 */
bool ht_shm_reclaim(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
typedef bool (*ht_shm_wanted_fn)(const struct ht_shm *h, const void *ctx);
typedef int (*ht_shm_visit_fn)(struct ht_obj *o, void *ctx);
/*
 * Visits the wanted objects (NULL: all) of a scope, with the lock held, which visit may release in between; returns the
 * first error.
 */
int ht_shm_visit(struct ht_store *s, uint64_t scope, ht_shm_wanted_fn wanted, ht_shm_visit_fn visit, void *ctx)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/* As ht_obj_shm_scan, of any object. Releases the lock in between. */
int ht_shm_scan_obj(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
