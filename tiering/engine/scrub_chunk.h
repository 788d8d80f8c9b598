/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_chunk.h - inside engine/: a reference of a chunk that a run of scrub looks at. */
#ifndef HITRAIN_TIERING_ENGINE_SCRUB_CHUNK_H
#define HITRAIN_TIERING_ENGINE_SCRUB_CHUNK_H

#include <stdatomic.h>

#include "tiering/base/base.h"
#include "tiering/base/guarded.h"
#include "tiering/object/ref.h"

struct ht_obj;
struct ht_ring;

struct ht_suspect {
    struct ht_obj *obj; /* the caller keeps its reference */
    uint64_t index;
    struct ht_ref ref; /* a copy of the reference under test */
    struct ht_ring *ring;
    uint16_t scrub;           /* the number of the run */
    const _Atomic bool *stop; /* the run should end: then what takes long does */
    bool repair;
    bool may_be_long; /* a walk over all references may come */
    bool verified;    /* out: its bytes were read and are sound; else the chunk may have others by now */
    unsigned walks;   /* out: over all references, for other owners */
    /* out, when it is bad */
    int error;     /* the device's; -EUCLEAN if mismatch */
    bool mismatch; /* the device gave bytes, and their checksum is wrong */
    const char *device;
    uint64_t offset;
    int repair_error; /* why it was not repaired; -ENODATA: no second copy; -ECANCELED: the run ends; 0: it was */
};
enum ht_suspect_result {
    HT_SUSPECT_SOUND,
    HT_SUSPECT_ABSENT,
    HT_SUSPECT_BAD,
    HT_SUSPECT_LONG, /* nothing is known yet: it needs may_be_long */
};
/*
 * Reads a reference and verifies it, again if it seems bad, and repairs it if it is. -ENOMEM; out as enum
 * ht_suspect_result.
 */
int ht_suspect_check(struct ht_suspect *x) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

#endif
