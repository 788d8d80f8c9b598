/* SPDX-License-Identifier: Apache-2.0 */
/*
 * walk.h - inside engine/: a walk over all chunks of all objects, in slices, without I/O.
 *
 *   begin: the numbers of all objects -> slice, slice, ... -> over
 *
 * A slice holds the store's lock while it looks at a bounded number of chunks, and rests as long afterwards: the mutex
 * is not fair, and threads that wait for it come first. Between slices the walk keeps numbers only. So objects may
 * change and vanish, and the walk passes those that were made after its begin.
 *
 * One thread at a time.
 */
#pragma once

#include "tiering/base/base.h"

struct ht_store;
struct ht_obj;
struct ht_chunk;

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
