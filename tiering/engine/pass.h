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
 * Places that probably have the same content (twins) come one after the other. Notes have a bound (below), so the
 * walk is made once for each part of the places. Whatever comes has a copy of a reference, and its owners by number.
 * Only while the engine works on it one object is held. So a pass keeps only numbers between steps, and a deleted
 * object keeps no space because an engine was paused.
 *
 * One thread at a time.
 */
#pragma once

#include <stdatomic.h>

#include "tiering/txn/txn.h"

struct ht_budget;
struct ht_chunk;

/* ------------------------------------------------------------------- notes */

/*
 * Who owns stored bytes, as a walk over all references finds it.
 *
 * A reference does not know the other owners of its bytes. So a walk notes each owner of the places that matter, and
 * owners of one place follow each other when the notes are in order. Whether all were found says the count of owners
 * (ht_move_may).
 *
 * Notes have a bound, and belong to groups. If there are more notes, the upper half of the groups leaves, as often as
 * it needs. So of a place in a group that stays the walk notes all owners:
 *
 *   noting --lacks room--> a half leaves --> noting --all was walked--> in order --> a place with all its owners
 *
 * A group is what its user says: a group of blocks, or a hash. A user of hashes walks once for each part of the hashes,
 * and the next part begins where the last one has ended.
 */

/*
 * Of one place: bytes with more stay where they are. So the notes of an engine have a bound, twice as many: 10 MiB. The
 * records of all owners are in one transaction, which has as many bytes in memory and in the log. So bytes in many
 * pieces may have fewer owners: on average HT_OWNERS_RECORD_BYTES for each of the most, 16 MiB in all. The option
 * owners_max is for tests.
 */
enum { HT_OWNERS_MAX = 1 << 17, HT_OWNERS_RECORD_BYTES = 128 };

enum { HT_OWNERS_LONG = 2048 }; /* work on more notes takes longer than a step (scheduler.h) */

struct ht_owner_found {
    uint64_t place; /* of the bytes */
    uint64_t oid, index;
    uint32_t group;
    uint32_t bytes;   /* that are stored */
    uint64_t content; /* a hash of all that is known of the content: twins have the same. 0 where nobody asks */
};
static_assert(sizeof(struct ht_owner_found) == 40, "memory per owner is bounded");

/* So many hashes (of 32 bits) of places from one on. 0 hashes: all. */
struct ht_owners_part {
    uint32_t from;
    uint64_t hashes;
};

struct ht_owners {
    struct ht_owner_found *found;
    size_t count, cap, most;
    uint64_t groups;     /* numbers of groups are below it; others are not noted */
    uint32_t from;       /* the hash of group 0 */
    bool lacks_room;     /* for the next owner that the walk meets */
    size_t at;           /* once all was walked: the next place */
    uint64_t twin_bytes; /* from there on, of places with twins; once they are in order */
};

unsigned ht_owners_max(const struct ht_store *s);
bool ht_owners_are_too_many(const struct ht_store *s, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* Its groups are those of a part. */
void ht_owners_begin(struct ht_owners *w, size_t most, struct ht_owners_part part);
uint32_t ht_owners_group_of(const struct ht_owners *w, uint64_t hashed);
/* Is there no room for notes of a group, unless groups leave? */
bool ht_owners_lack_room(struct ht_owners *w, uint32_t group);
/* Groups leave with their notes until no room is lacking. No lock is held: it looks through all notes. */
void ht_owners_make_room(struct ht_owners *w);
/* Is it the last group, and has it as many notes as the bound says? */
bool ht_owners_are_full(const struct ht_owners *w, uint32_t group);
/* If the group has not left; and of the last group only as many as the bound says. -ENOMEM */
int ht_owners_note(struct ht_owners *w, const struct ht_owner_found *f) HT_MUST_CHECK;
/* The owners of the next place. NULL: there is none. The first call puts the notes in order. */
const struct ht_owner_found *ht_owners_next(struct ht_owners *w, size_t *out_n);
bool ht_owners_are_over(const struct ht_owners *w);
/* The next place has very many owners, or the notes have to be put in order first: that takes longer than a step. */
bool ht_owners_are_long(const struct ht_owners *w);
/* The part of the next walk. */
struct ht_owners_part ht_owners_then(const struct ht_owners *w);
void ht_owners_sort(struct ht_owners *w); /* by group, content, place, object and index */
/* How many from `at` on, which is there, have the same group and place. The notes are in order, also for the next. */
size_t ht_owners_same(const struct ht_owners *w, size_t at);
/* The first note of a group, or of a later one. */
size_t ht_owners_first_of(const struct ht_owners *w, unsigned group);
void ht_owners_end(struct ht_owners *w);

/* ------------------------------------------------------------------ passes */

/*
 * Its walk over all chunks of all objects, in slices, without I/O. A slice holds the store's lock while it looks at a
 * bounded number of chunks, and rests as long afterwards: the mutex is not fair, and threads that wait for it come
 * first. Objects may change and vanish between slices, and the walk passes those that were made after its begin.
 */
struct ht_walk {
    uint64_t *oids, chunk; /* in order; the walk is at this chunk of oids[at] */
    size_t count, at;
    uint64_t ns; /* that it has held the lock */
};

bool ht_walk_is_over(const struct ht_walk *w);
size_t ht_walk_find(const struct ht_walk *w, uint64_t oid); /* its place in oids; count: it is none of them */
/* When the next walk may begin: after so long, and after many times what this one took. */
uint64_t ht_walk_next_ns(const struct ht_walk *w, uint64_t period_ns);

enum ht_pass_want {
    HT_PASS_NONE,
    HT_PASS_ONCE,  /* with all owners: at once if it is the only one, else when all was walked */
    HT_PASS_TWINS, /* with all owners, beside its twins, when all was walked */
    HT_PASS_ALONE, /* at once, with this owner alone */
};

/*
 * What an engine wants. Each may be NULL, but it has either content and came, or groups. The ctx is the engine's.
 */
struct ht_pass_user {
    /* Without the lock, before an object: false passes it. */
    bool (*wants)(void *ctx, uint64_t oid);
    /* Before the first chunk of an object in each slice. False passes the other chunks. Lock held. */
    bool (*object)(void *ctx, const struct ht_obj *o);
    /* Of the chunk's published reference, or with `current` of either. Lock held. */
    enum ht_pass_want (*content)(void *ctx, const struct ht_obj *o, const struct ht_chunk *c);
    /* It has come: what the pass has found. Without the lock. An error is that of the call. */
    int (*came)(void *ctx, struct ht_budget *b);
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
    /* What has come; no owners: nothing. `was` shows as much as the owner that shows most. */
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
/* May a step go on with the next piece of work? A long one is not for this step, and the budget says so then. */
bool ht_pass_may_go_on(const struct ht_pass *p, struct ht_budget *b);
/* A slice of the walk, or a noted place, and the engine's work on what comes. -ENOMEM, or the engine's error */
int ht_pass_next(struct ht_pass *p, struct ht_budget *b) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
