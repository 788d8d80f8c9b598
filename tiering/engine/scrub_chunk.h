/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_chunk.h - inside engine/: stored bytes that a run of scrub looks at. */
#pragma once

#include <stdatomic.h>

#include "tiering/object/ref.h"

struct ht_obj;
struct ht_ring;
struct ht_store;
struct ht_move_owner;

struct ht_suspect {
    struct ht_store *s;
    struct ht_ref ref;           /* a copy of the reference under test */
    struct ht_move_owner *owner; /* all that were found. The caller keeps them, in any order */
    unsigned owners;
    void *buf; /* for the first read: a chunk */
    struct ht_ring *ring;
    const _Atomic bool *stop; /* the run should end: then what takes long does */
    bool repair;
    bool lost; /* no image of any owner replaces the bytes: none is looked for again */
    /* The owner that is looked at: the first one, while the caller holds its object; later any. Gone after a check. */
    struct ht_obj *obj;
    uint64_t index;
    /* out, when it is bad */
    int error;     /* the device's; -EUCLEAN if mismatch */
    bool mismatch; /* the device gave bytes, and their checksum is wrong */
    const char *device;
    uint64_t offset;
    int repair_error; /* why it was not repaired; -ENODATA: no second copy; -ECANCELED: the run ends; 0: it was */
};
enum ht_suspect_result { HT_SUSPECT_SOUND, HT_SUSPECT_ABSENT, HT_SUSPECT_BAD };
/*
 * Reads the bytes into the buffer and verifies them. -ENOMEM; out as enum ht_suspect_result: only the check says that
 * they are bad.
 */
int ht_suspect_read(struct ht_suspect *x) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Reads bytes that seem bad again, with the chunk of an owner held, and repairs them if they are. The same. */
int ht_suspect_check(struct ht_suspect *x, unsigned owner) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
