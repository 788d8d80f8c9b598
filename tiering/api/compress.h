/* SPDX-License-Identifier: Apache-2.0 */
/* compress.h - lossless compression of content that nothing has changed for a while (engine/recompress.c). */
#ifndef HITRAIN_TIERING_API_COMPRESS_H
#define HITRAIN_TIERING_API_COMPRESS_H

#include "tiering/base/base.h"

struct ht_store;

/*
 * May the content of this object be compressed? oid 0: may that of any object? Called by the engine's thread, which
 * holds no lock.
 */
typedef bool (*ht_compress_fn)(void *ctx, uint64_t oid);
/* Before the mount. Without it nothing is compressed. */
void ht_store_set_compress(struct ht_store *s, ht_compress_fn fn, void *ctx);
/* Some object may be compressed now: the engine has work from time to time. */
void ht_store_wake_compress(struct ht_store *s);

#endif
