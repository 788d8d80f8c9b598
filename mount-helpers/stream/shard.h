/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard.h - a stream of what one rank gets when the table of shards changes: which blocks of parameters and state that
 * are. Writer and reader compute the same, from the table alone. docs/stream-format.md describes such streams.
 */
#ifndef HITRAIN_MOUNT_HELPERS_STREAM_SHARD_H
#define HITRAIN_MOUNT_HELPERS_STREAM_SHARD_H

#include "tiering/base/shards.h"

/* The last change of the table is the one that moves blocks. */
struct ht_stream_shard {
    struct ht_shards table;
    unsigned rank; /* that gets the blocks, by its present number */
    unsigned of;   /* that had them, by its former number; HT_SHARDS_NONE: blocks of all ranks */
};

/* NULL, or why there is no such stream, as a sentence. */
const char *ht_stream_shard_refused(const struct ht_stream_shard *s);
/* Ranks before the change. */
unsigned ht_stream_shard_former(const struct ht_stream_shard *s);
/* Had the rank no blocks and no model before the change? */
bool ht_stream_shard_is_new(const struct ht_stream_shard *s);
/* The former rank whose stream comes first: it also has all other files of a model for a new rank. */
unsigned ht_stream_shard_first(const struct ht_stream_shard *s);
bool ht_stream_shard_has_files(const struct ht_stream_shard *s);

/* Bytes of parameters and state. */
struct ht_moved {
    uint64_t sent;  /* by this stream */
    uint64_t gets;  /* the rank gets, of all former ranks */
    uint64_t least; /* an even share, in whole blocks, less what the rank had */
};

/* Blocks of the present file or state of a stream. One thread. */
struct ht_moves {
    const struct ht_stream_shard *shard;
    uint16_t *before, *now; /* owners of the blocks of a parameter; owned */
    uint64_t blocks, room;  /* of the parameter that they are of */
    uint64_t file_bytes;    /* of the present file, if it is a parameter, or 0 */
    uint64_t width;         /* blocks of the stream for each block of a parameter; 0: all come, or none do */
    bool all;
    struct ht_moved sum;              /* so far */
    bool source[HT_SHARDS_RANKS_MAX]; /* former ranks that have blocks for the rank */
};
void ht_moves_begin(struct ht_moves *m, const struct ht_stream_shard *s);
void ht_moves_end(struct ht_moves *m);
/* The present file. -ENOMEM; -EFBIG: a parameter has too many blocks. */
int ht_moves_file(struct ht_moves *m, bool is_parameter, uint64_t size) HT_MUST_CHECK;
/* A state of that file. -EINVAL: it cannot be one. */
int ht_moves_state(struct ht_moves *m, const char *name, uint64_t size) HT_MUST_CHECK;
/* Is this block of the present file or state one of the stream's? */
bool ht_moves_has(const struct ht_moves *m, uint64_t index);
/* The first such block from index on, or count, which is that of all blocks. */
uint64_t ht_moves_next(const struct ht_moves *m, uint64_t index, uint64_t count);

#endif
