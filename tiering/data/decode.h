/* SPDX-License-Identifier: Apache-2.0 */
/*
 * decode.h - decodes stored bytes that were read. A decoder's memory is as large as a chunk. So there is at most one
 * for each processor, made when it is first needed, and a thread has one only while it decodes, never during I/O. A
 * store that has compressed content has one from the mount on. So a thread may have to wait, and always gets one.
 */
#pragma once

#include <pthread.h>

#include "tiering/base/lock.h"
#include "tiering/object/ref.h"

struct ht_decoder;

enum { HT_DECODERS_MAX = 256 };
struct ht_decoders {
    struct ht_mutex lock; /* a leaf */
    pthread_cond_t returned;
    HT_GUARDED_BY(HT_LOCK_DECODERS) struct {
        struct ht_decoder *idle[HT_DECODERS_MAX];
        unsigned idle_count, made, most;
        uint64_t bytes; /* of all that were made */
    };
};
HT_MUTEX_OF(ht_decoders_lock, struct ht_decoders, lock, HT_LOCK_DECODERS)

void ht_decoders_init(struct ht_decoders *d);
void ht_decoders_destroy(struct ht_decoders *d);
/* Before anything is decoded: there is one decoder. -ENOMEM */
int ht_decoders_need_one(struct ht_decoders *d) HT_MUST_CHECK;
uint64_t ht_decoders_bytes(struct ht_decoders *d);
/*
 * data: the stored bytes of ref, verified; then what ref shows of its content. It has room for either, the stored bytes
 * in whole blocks. -EUCLEAN: they are not what an encoder writes; -ENOMEM: no decoder was made before.
 */
int ht_ref_decode(struct ht_decoders *d, const struct ht_ref *ref, void *data) HT_MUST_CHECK;
