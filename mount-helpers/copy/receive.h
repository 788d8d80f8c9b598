/* SPDX-License-Identifier: Apache-2.0 */
/* receive.h - the parts of `hitrainctl receive`. Messages name path, the new model. */
#ifndef HITRAIN_MOUNT_HELPERS_COPY_RECEIVE_H
#define HITRAIN_MOUNT_HELPERS_COPY_RECEIVE_H

#include "mount-helpers/copy/staging.h"
#include "mount-helpers/stream/tree.h"

struct ht_received {
    uint64_t step, entries, bytes;
    bool incremental, for_rank;
    uint64_t base_step;
    struct ht_hash128 digest;     /* of a whole step */
    struct ht_tree_root root;     /* of a directory that was made for it; of a clone the mode alone */
    bool is_clone;                /* it has all else already */
    struct ht_stream_shard shard; /* of streams for a rank, as the next */
    struct ht_moved moved;
};

/* The bytes of standard input, of which one may be put back. */
struct ht_receive_input {
    bool holds;
    uint8_t held;
};
/* ctx: such an input. Ends with -EINTR when the program is to stop. */
ssize_t ht_receive_get(void *ctx, void *data, size_t len);
bool ht_receive_stopped(void);

/* The stream becomes the content of the new directory s->model. 0 or -errno, with a message printed. */
int ht_receive_tree(const char *path, const struct ht_staging *s, int base, struct ht_stream_reader *r,
                    struct ht_received *out) HT_MUST_CHECK;

/*
 * receive_shards.c: streams for one rank, one after the other, of which the first has begun. Makes the model: of the
 * step that base_root keeps, or new for a rank that is new. 0 or -errno, with a message printed.
 */
int ht_receive_shards(const char *path, struct ht_staging *s, const char *base_root, struct ht_stream_reader *r,
                      struct ht_received *out) HT_MUST_CHECK;

#endif
