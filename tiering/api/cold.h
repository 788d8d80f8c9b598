/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cold.h - content that lies in a vault.
 *
 * A vault has segments that never change (docs/vault-format.md). Chunks of a model root may name places there, and a
 * write gives them space here. To the store the vault is a device that it never writes, and one more owner of the
 * bytes, so its space is never freed. Only reads of such content, and what needs the bytes, ever wait for it.
 */
#pragma once

#include "tiering/base/base.h"

struct ht_obj;
struct ht_store;

struct ht_vault_info {
    uint8_t uuid[16];
    char url[1024]; /* where reads go: that of the mount, or of the log */
    bool is_silent;
    uint64_t answer_age_ns; /* of the last answer; UINT64_MAX: there was none */
};

/*
 * The store's vault from now on, durable. -EBUSY: content lies in another one. -EINVAL, -EPERM, -ENAMETOOLONG: the URL
 * (ht_remote_url). WAITS, also for reads that go on.
 */
int ht_store_set_vault(struct ht_store *s, const uint8_t uuid[16], const char *url) HT_MUST_CHECK;
/* -ENXIO: the store has no vault. */
int ht_store_vault(struct ht_store *s, struct ht_vault_info *out) HT_MUST_CHECK;

/* Content of a chunk: stored bytes in a segment, from its unit of 4 KiB on. Nothing in it is trusted. */
struct ht_obj_place {
    uint64_t index;
    uint32_t lease, segment, unit, stored;
    uint8_t codec;
    uint64_t checksum; /* XXH3-64 of the stored bytes */
};
/*
 * Chunks that have nothing get these places, unpublished as any change. The bytes up to the object's end count. A call
 * that returns fewer than count, or an error, has done those before. -ENXIO: there is no vault. -EINVAL: no segment has
 * such a place, the object is too short or has small chunks, or it belongs to no model root. -EEXIST: a chunk has
 * content. -EBUSY: programs map the object. -ENOSPC: in the log. -ESTALE: an abort of its root began since
 * ht_obj_aborts said so many. WAITS.
 */
int ht_obj_set_places(struct ht_obj *o, unsigned aborts, const struct ht_obj_place *place,
                      unsigned count) HT_MUST_CHECK;
/* The places of the first chunks from index on that lie in the vault; at most cap. */
unsigned ht_obj_places(struct ht_obj *o, uint64_t index, struct ht_obj_place *out, unsigned cap);
/* Lies no content of the scope in the vault, also after a crash? An error of the log: false. WAITS. */
bool ht_scope_is_warm(struct ht_store *s, uint64_t scope);
/*
 * Published content in the vault comes to the devices with no change, and no faster than the options allow work in the
 * background: content of an object, or of all of a scope. After 0 it is durable. Newer content stays. -EIO, -ENOSPC;
 * -EINTR: stop, which takes no lock, said so. WAITS for the vault.
 */
typedef bool ht_recall_stop(void *ctx);
int ht_obj_recall(struct ht_obj *o, ht_recall_stop *stop, void *ctx) HT_MUST_CHECK;
int ht_scope_recall(struct ht_store *s, uint64_t scope, ht_recall_stop *stop, void *ctx) HT_MUST_CHECK;
