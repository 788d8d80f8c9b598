/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass.h - inside engine/: a pass over stored content. Each content comes once, with all of its owners.
 *
 *   begin --> walking <-----------------------------------.
 *               | content of one owner: comes at once     | the next part
 *               | content of several: the owner is noted  |
 *               v                                         |
 *             all was walked: each noted place comes -----+----> over, if that was the last part
 *
 * Places that probably have the same content (twins) come one after the other. Notes have a bound (owners.h), so the
 * walk is made once for each part of the places. Whatever comes has a copy of a reference, and owners with references
 * to their objects, until the caller puts them. So a pass keeps only numbers between steps, and a deleted object keeps
 * no space because an engine was paused.
 *
 * One thread at a time.
 */
#pragma once

#include <stdatomic.h>

#include "tiering/engine/owners.h"
#include "tiering/txn/txn.h"

struct ht_chunk;

/* ------------------------------------------------------------------ walks */

/*
 * A walk over all chunks of all objects, in slices, without I/O.
 *
 *   begin: the numbers of all objects -> slice, slice, ... -> over
 *
 * A slice holds the store's lock while it looks at a bounded number of chunks, and rests as long afterwards: the mutex
 * is not fair, and threads that wait for it come first. Between slices the walk keeps numbers only. So objects may
 * change and vanish, and the walk passes those that were made after its begin. One thread at a time.
 */
struct ht_walk {
    struct ht_store *s;
    uint64_t *oids, chunk; /* in order; the walk is at this chunk of oids[at] */
    size_t count, at;
    uint64_t ns; /* that it has held the lock */
};

enum ht_walk_on {
    HT_WALK_ON,    /* with the next chunk */
    HT_WALK_PAUSE, /* the slice ends, and the next one begins with this chunk */
    HT_WALK_TAKEN, /* the slice ends behind this chunk */
};

/* What an engine does. Each may be NULL but chunk. The ctx is the engine's. */
struct ht_walk_visitor {
    /* Without the lock, before an object: false passes it. */
    bool (*wants)(void *ctx, uint64_t oid);
    /* Before the first chunk of an object in each slice. False passes the other chunks. Lock held. */
    bool (*object)(void *ctx, const struct ht_obj *o);
    /* A chunk in the order of the object. A negative errno ends the slice. Lock held. */
    int (*chunk)(void *ctx, struct ht_obj *o, struct ht_chunk *c, uint64_t index);
};

/* -ENOMEM */
int ht_walk_begin(struct ht_walk *w, struct ht_store *s) HT_MUST_CHECK;
void ht_walk_end(struct ht_walk *w); /* also of one that never began */
bool ht_walk_is_over(const struct ht_walk *w);
size_t ht_walk_find(const struct ht_walk *w, uint64_t oid); /* its place in oids; count: it is none of them */
uint64_t ht_walk_bytes(const struct ht_walk *w);            /* heap */
/* When the next walk may begin: after so long, and after many times what this one took. */
uint64_t ht_walk_next_ns(const struct ht_walk *w, uint64_t period_ns);
/* At most so many chunks, or objects. 0, or the error of the visitor. */
int ht_walk_slice(struct ht_walk *w, const struct ht_walk_visitor *v, void *ctx, unsigned chunks)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/* ------------------------------------------------------------------ passes */

enum ht_pass_want {
    HT_PASS_NONE,
    HT_PASS_ONCE,  /* with all owners: at once if it is the only one, else when all was walked */
    HT_PASS_TWINS, /* with all owners, beside its twins, when all was walked */
    HT_PASS_ALONE, /* at once, with this owner alone */
};

/* What an engine wants. Each may be NULL, but it has either content or groups. The ctx is the engine's. */
struct ht_pass_user {
    /* As of struct ht_walk_visitor. */
    bool (*wants)(void *ctx, uint64_t oid);
    bool (*object)(void *ctx, const struct ht_obj *o);
    /* Of the chunk's published reference, or with `current` of either. Lock held. */
    enum ht_pass_want (*content)(void *ctx, const struct ht_obj *o, const struct ht_chunk *c);
    /*
     * Nothing comes, but the notes are the user's once all was walked: the owners of published content, once in each
     * group. The groups of a content, each once, at most as many as it has blocks. Lock held.
     */
    unsigned (*groups)(void *ctx, const struct ht_ref *ref, uint32_t out[]);
    bool current; /* also bytes that are not published yet */
    bool lone;    /* also what was wanted beside its twins and has none */
};

struct ht_pass {
    struct ht_store *s;
    const struct ht_pass_user *user;
    void *ctx;
    _Atomic uint64_t *bytes; /* heap of the engine */
    size_t notes_max;
    struct ht_walk walk;
    struct ht_owners shared;
    uint64_t hashes_left; /* of places, with those of the present part */
    bool again;           /* this is not the first walk */
    struct {
        uint64_t oid, index, place;
    } current; /* of this chunk the content published there has come, and the other one has not; oid 0: none */
    /* What the last call found: no owners: nothing. `was` shows as much as the owner that shows most. */
    struct ht_move found;
    uint64_t content; /* of what comes beside its twins: they have the same. Else 0 */
    unsigned owners_cap;
};

/*
 * notes: how many there may be; 0: the usual number. groups: of a user of groups, of which the last ones leave if there
 * is no room for all notes. -ENOMEM: end it all the same.
 */
int ht_pass_begin(struct ht_pass *p, struct ht_store *s, const struct ht_pass_user *user, void *ctx, size_t notes,
                  uint64_t groups, _Atomic uint64_t *bytes) HT_MUST_CHECK;
void ht_pass_end(struct ht_pass *p); /* also of one that never began */
bool ht_pass_is_over(const struct ht_pass *p);
/* The next piece of work cannot be divided, and takes longer than a step. */
bool ht_pass_is_long(const struct ht_pass *p);
/* A slice of the walk, or a noted place, and what it found. -ENOMEM */
int ht_pass_next(struct ht_pass *p) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
void ht_pass_put(struct ht_pass *p) HT_EXCLUDES(HT_LOCK_STORE); /* what it found */
