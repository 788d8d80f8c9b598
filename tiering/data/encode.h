/* SPDX-License-Identifier: Apache-2.0 */
/*
 * encode.h - threads that write content compress it at once, where that is faster (tier/encode_policy.h).
 *
 * An encoder's memory is larger than a chunk. So there is at most one for each two processors that the daemon can keep
 * busy, made when it is first needed, and a thread has one only while it encodes, never during I/O. A thread that finds
 * none writes the bytes as they are.
 *
 * Before the first frame the superblocks have to say that there may be some. A writer cannot do that while it holds a
 * chunk. So it asks, writes raw bytes until then, and an engine does it (engine/recompress.c).
 */
#pragma once

#include <stdatomic.h>

#include "tiering/api/store.h"
#include "tiering/base/lock.h"
#include "tiering/sys/processors.h"
#include "tiering/sys/quota.h"
#include "tiering/tier/encode_policy.h"

struct ht_encoder;

enum { HT_ENCODERS_MAX = 128 };
struct ht_encoders {
    struct ht_mutex lock;            /* before those of devices */
    struct ht_processors processors; /* those of the thread that made the store */
    struct ht_quota quota;           /* of that one's groups; of the thread that looks */
    HT_GUARDED_BY(HT_LOCK_ENCODERS) struct {
        struct ht_encoder *idle[HT_ENCODERS_MAX];
        unsigned idle_count, made, most;
        uint64_t bytes; /* of all that were made */
        struct ht_encode_vain vain;
        bool worth;                   /* what the last look said */
        bool looking;                 /* a thread does, without the lock */
        uint64_t looked_ns, idle_ms;  /* then */
        uint64_t encoding_ns;         /* since then */
        uint64_t rate_bytes, rate_ns; /* of what was encoded, faded */
        uint64_t encoded_at_ns;       /* the last one */
    };
    _Atomic bool durable; /* the superblocks say that there may be frames */
    _Atomic bool asked;   /* they should */
    _Atomic uint64_t chunks, saved_bytes;
};
HT_MUTEX_OF(ht_encoders_lock, struct ht_encoders, lock, HT_LOCK_ENCODERS)

void ht_encoders_init(struct ht_encoders *e);
void ht_encoders_destroy(struct ht_encoders *e);
uint64_t ht_encoders_bytes(struct ht_encoders *e);
/* Would it be faster now? */
bool ht_encode_is_worth_now(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE);
/*
 * Encodes raw into out, which has room for as much. The frame's bytes; 0: it would save too little; -EAGAIN: nothing
 * was tried.
 */
int ht_encode_now(struct ht_store *s, const void *raw, uint32_t bytes, void *out)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
