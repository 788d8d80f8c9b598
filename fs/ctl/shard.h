/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard.h - the part of a parameter, its gradient or its state that one rank owns, as the bytes of a file: blocks one
 * after the other, in order (tiering/base/shards.h).
 *
 * A map is of one open file, and does not change: a program that has a shard open when ranks change goes on with the
 * blocks that it had. Lists of blocks are shared, under the lock of ctl.
 */
#pragma once

#include "fs/ctl/ctl.h"
#include "tiering/base/shards.h"

/*
 * The table of a model root: of its attribute, or without one the even one of so many ranks. -ENOENT: there is one, and
 * it has another number of ranks. ranks 0: any, and -ENODATA without the attribute.
 */
int ht_shard_table(struct ht_ctl *c, uint64_t root, unsigned ranks, struct ht_shards *out) HT_MUST_CHECK;

struct ht_shard_list;
struct ht_shard_map {
    uint64_t bytes; /* of the shard */
    uint64_t block_bytes;
    uint32_t count;
    unsigned rank, ranks;
    struct ht_shard_list *list; /* of the blocks, shared by maps; NULL: the table is even */
};
/*
 * Of a file of whole_bytes, with block_bytes for each block of its parameter. -EFBIG: the parameter has too many
 * blocks. -ENOMEM: also if the lists of all open shards are too long together.
 */
int ht_shard_map(struct ht_ctl *c, const struct ht_shards *table, unsigned rank, uint64_t whole_bytes,
                 uint64_t block_bytes, struct ht_shard_map **out) HT_MUST_CHECK;
void ht_shard_map_free(struct ht_ctl *c, struct ht_shard_map *m);
/* Block i of the shard is this one of the parameter. In ascending order: only the last one may have fewer bytes. */
uint64_t ht_shard_block(const struct ht_shard_map *m, uint64_t i);
/* At the end: no map is left. */
void ht_shard_forget_all(struct ht_ctl *c);
/* Calls fn for the pieces of [off, off+len) of the shard, with their places in the whole. Ends with its first error. */
typedef ssize_t (*ht_shard_fn)(void *ctx, uint64_t whole_off, void *buf, size_t len);
ssize_t ht_shard_each(const struct ht_shard_map *m, uint64_t off, void *buf, size_t len, ht_shard_fn fn,
                      void *ctx) HT_MUST_CHECK;

/*
 * Bytes of a parameter, as read and write of its file have them. A read waits for updates of the bytes; a writer has
 * waited, unless it has pages of a mapping. A parameter becomes no longer: -ESTALE. WAITS.
 */
ssize_t ht_shard_param_read(struct ht_ctl *c, struct ht_obj *obj, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
ssize_t ht_shard_param_write(struct ht_ctl *c, struct ht_obj *obj, uint64_t off, const void *buf,
                             size_t len) HT_MUST_CHECK;
