/* SPDX-License-Identifier: Apache-2.0 */
/* scope.h - objects that are published together. The caller holds the store's lock. */
#pragma once

#include "tiering/base/idtable.h"

struct ht_store;
struct ht_obj;
struct ht_slice;

struct ht_scope {
    uint64_t id;
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        unsigned changing;      /* calls that change content */
        unsigned aborts;        /* how many began */
        uint64_t written_bytes; /* of its objects, to devices */
        uint64_t cold_blocks;   /* of their references, in the vault */
        bool aborting;
        bool frozen;              /* a kept step: no content changes */
        bool all_paths;           /* its content goes to devices of each class */
        bool ended;               /* its root or kept step is gone: it goes with its last object */
        unsigned users;           /* threads that have it while they let the lock go */
        uint64_t objects;         /* in memory */
        uint64_t edits_published; /* ht_scope_edits_published */
        uint64_t edits;           /* ht_scope_edits */
        uint64_t found_bytes;     /* of records for objects and chunks that became unpublished, ever */
        struct ht_list touched;   /* objects with something dirty or unpublished; each holds a reference */
        struct ht_scope *next;
    };
    struct ht_id_link by_id;
};
struct ht_scope *ht_scope_find(struct ht_store *s, uint64_t id, bool make) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_touch(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE); /* onto its scope's list */
/* The same: its size or existence is unpublished from now on. */
void ht_obj_touch_meta(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
void ht_obj_untouch(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE); /* off it; the list's reference is the caller's */
/* The object belongs to this scope from now on. NULL: to none, because its memory goes. */
void ht_obj_join(struct ht_obj *o, struct ht_scope *sc) HT_REQUIRES(HT_LOCK_STORE);
/* Its model root or kept step is gone. */
void ht_scope_forget(struct ht_store *s, uint64_t id) HT_REQUIRES(HT_LOCK_STORE);
/* For a thread that lets the lock go in between: its memory stays. */
void ht_scope_hold(struct ht_scope *sc) HT_REQUIRES(HT_LOCK_STORE);
void ht_scope_let_go(struct ht_store *s, struct ht_scope *sc) HT_REQUIRES(HT_LOCK_STORE);
/*
 * A walk over the objects that were touched when it began, with a break of the lock between two, if the caller
 * likes. One that is touched no more is left out. Needs no memory.
 */
struct ht_touched_walk {
    struct ht_touched_walk *next;
    struct ht_store *s;
    struct ht_list *at, *last; /* the next object and the last one; at NULL: there is none */
};
void ht_touched_walk_begin(struct ht_touched_walk *w, struct ht_store *s, uint64_t scope) HT_REQUIRES(HT_LOCK_STORE);
/* With a reference, or NULL. */
struct ht_obj *ht_touched_walk_next(struct ht_touched_walk *w) HT_REQUIRES(HT_LOCK_STORE);
void ht_touched_walk_end(struct ht_touched_walk *w) HT_REQUIRES(HT_LOCK_STORE);

/*
 * References to all touched objects of a scope, in a malloc'd array (count returned), for loops that release the lock.
 * Releases the lock in between.
 */
int ht_scope_collect(struct ht_store *s, uint64_t scope, struct ht_obj ***out, size_t *out_count)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * Calls visit for each object that was touched at the beginning. Releases the lock in between (ht_slice_next), and
 * visit may, with this slice. With NULL it does not: visit gets NULL then.
 */
typedef void ht_scope_visit(struct ht_obj *o, struct ht_slice *slice, void *ctx);
void ht_scope_visit_touched(struct ht_store *s, uint64_t scope, struct ht_slice *slice, ht_scope_visit *visit,
                            void *ctx) HT_REQUIRES(HT_LOCK_STORE);

/* Objects of a scope that get something to publish while it is published in slices; some more than once. */
enum { HT_SCOPE_CHANGES_MAX = 512 };
struct ht_scope_changes {
    struct ht_store *s;
    struct ht_scope *scope;   /* NULL: it is not in memory */
    uint64_t found_bytes_max; /* of the scope: who would add more waits until the publication has come further */
    bool awaited;             /* by such a thread */
    unsigned count;
    bool more; /* than obj has room for */
    struct ht_obj *obj[HT_SCOPE_CHANGES_MAX];
};
/* It has something new to publish. */
void ht_scope_note_change(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);

/* found_bytes of a scope; 0: it is not in memory. */
uint64_t ht_scope_found_bytes(struct ht_store *s, uint64_t scope) HT_EXCLUDES(HT_LOCK_STORE);

/*
 * A thread that changes many chunks calls this after each, with the lock, but no chunk, held. WAITS while a publication
 * of the scope has room for no more changes. That waits for no thread.
 */
void ht_obj_let_publish(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Begins a change of content. An abort of the scope comes before or after it, never into it. WAITS for an abort, and as
 * ht_obj_let_publish, with the lock, but no chunk, held. The abort waits in turn for changes that have begun, so these
 * begin no second one and wait for no transaction. -ESTALE: the object was taken back. -EROFS: it belongs to a kept
 * step.
 */
int ht_obj_begin_change(struct ht_obj *o, struct ht_scope **out_scope) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
void ht_scope_end_change(struct ht_store *s, struct ht_scope *sc) HT_REQUIRES(HT_LOCK_STORE);
/* The same with the lock. -EROFS, too. */
int ht_obj_lock_for_change(struct ht_obj *o, struct ht_scope **out_scope) HT_ACQUIRE_IF_0(HT_LOCK_STORE) HT_MUST_CHECK;
void ht_obj_unlock_after_change(struct ht_obj *o, struct ht_scope *sc) HT_RELEASE(HT_LOCK_STORE);
