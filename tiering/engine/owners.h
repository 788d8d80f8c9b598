/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owners.h - inside engine/: who owns stored bytes, as a walk over all references finds it.
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
 *
 * One thread's.
 */
#pragma once

#include "tiering/object/ref.h"

/*
 * Of one place: bytes with more stay where they are. So the notes of an engine have a bound, twice as many: 10 MiB. The
 * records of all owners are in one transaction, which has as many bytes in memory and in the log. So bytes in many
 * pieces may have fewer owners: on average HT_OWNERS_RECORD_BYTES for each of the most, 16 MiB in all. The option
 * owners_max is for tests.
 */
enum { HT_OWNERS_MAX = 1 << 17, HT_OWNERS_RECORD_BYTES = 128 };

enum {
    HT_OWNERS_LONG = 2048, /* work on more notes takes longer than a step (scheduler.h) */
};

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
/* Has the place that came last, of n owners, a twin: another place, probably with the same content? */
bool ht_owners_had_twin(const struct ht_owners *w, size_t n);
/* The next place has very many owners, or the notes have to be put in order first: that takes longer than a step. */
bool ht_owners_are_long(const struct ht_owners *w);
/* The part of the next walk. */
struct ht_owners_part ht_owners_then(const struct ht_owners *w);
void ht_owners_sort(struct ht_owners *w); /* by group, content, place, object and index */
/* How many from `at` on, which is there, have the same group and place. The notes are in order, also for the next. */
size_t ht_owners_same(const struct ht_owners *w, size_t at);
/* The first note of a group, or of a later one. */
size_t ht_owners_first_of(const struct ht_owners *w, unsigned group);
uint64_t ht_owners_bytes(const struct ht_owners *w); /* heap */
void ht_owners_end(struct ht_owners *w);
