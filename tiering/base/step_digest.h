/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step_digest.h - the digest of a step, by its names, sizes, attributes, content and state: docs/vault-format.md. It
 * does not depend on the place of content, on chunks and on the store. The daemon computes it of kept steps, programs
 * of what they read and of streams. One thread.
 *
 *   begin, { entry, its attributes, their end, its blocks, { state, its blocks } }, get, end
 */
#pragma once

#include "tiering/base/hash.h"

enum {
    HT_DIGEST_BLOCK_BYTES = 1 << 20,
    HT_DIGEST_PATH_BYTES_MAX = 4095,
    HT_DIGEST_DEPTH_MAX = 256, /* directories below the root */
    HT_DIGEST_TEXT_MAX = 33,
};

/* Numbers before the parts of a step. */
enum ht_digest_part {
    HT_DIGEST_ENTRY = 1,
    HT_DIGEST_STATE = 2,
    HT_DIGEST_BLOCK = 3,
};
/* Attributes that are part of no step. Where a copy that follows another model is: mount-helpers/vault/apply.py. */
#define HT_FOLLOW_ATTRIBUTE "user.hitrain-follow"
/* Whose directory the next restore may remove: mount-helpers/vault/staging.py. */
#define HT_STAGING_ATTRIBUTE "user.hitrain-receive"

enum ht_digest_kind { HT_DIGEST_DIRECTORY = 1, HT_DIGEST_FILE = 2, HT_DIGEST_SYMLINK = 3, HT_DIGEST_LINK = 4 };

struct ht_digest {
    struct ht_hash128_sum *sum; /* owned */
};
/* step: its number. -ENOMEM. */
int ht_digest_begin(struct ht_digest *d, uint64_t step) HT_MUST_CHECK;
/* size: bytes of a file, else 0. path: below the root. target: of a symlink or hard link, else "". */
void ht_digest_put_entry(struct ht_digest *d, enum ht_digest_kind kind, uint64_t size, const char *path,
                         const char *target);
/* In the order of their names. Leaves out what is no part of a digest. */
void ht_digest_put_attribute(struct ht_digest *d, const char *name, size_t name_len, const void *value, size_t len);
void ht_digest_put_attributes_end(struct ht_digest *d);
void ht_digest_put_state(struct ht_digest *d, uint64_t size, const char *name);
/* sum: of the block's bytes. A block of zeros has no part in a digest. */
void ht_digest_put_block(struct ht_digest *d, uint64_t index, const struct ht_hash128 *sum);
struct ht_hash128 ht_digest_get(const struct ht_digest *d);
void ht_digest_end(struct ht_digest *d);
/* 32 hexadecimal digits; returns buf. */
const char *ht_digest_text(const struct ht_hash128 *h, char buf[HT_DIGEST_TEXT_MAX]);
