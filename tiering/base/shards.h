/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shards.h - which rank owns which block of a parameter, as the attribute user.hitrain.shards says. Pure functions.
 *
 * The attribute is the history of the number of ranks: "4" gives block b to rank b mod 4. Each further word is a
 * change: "4 3" goes on with 3 ranks, "4 3-1" does so without the former rank 1. A change moves as few blocks of each
 * parameter as an even share allows:
 *
 *   - Ranks that stay keep their numbers. If there are fewer ranks than before, those that stay are counted from 0
 *     again, in order, and the last ones leave. Else a new rank takes the number of a lost one.
 *   - Of B blocks each of R ranks gets B/R or one more: those that own most have one more, then those of lower number.
 *   - A rank that has too many keeps its first ones. Free blocks go, in order, to ranks that have too few, in turn.
 */
#pragma once

#include "tiering/base/base.h"

#define HT_SHARD_BLOCK_BYTES (1u << 20)   /* of the parameter */
#define HT_SHARDS_BLOCKS_MAX (1ull << 20) /* of one parameter */
#define HT_SHARDS_WORK_MAX (1ull << 22)   /* blocks of one parameter * changes, to find their owners at once */
enum { HT_SHARDS_RANKS_MAX = 256, HT_SHARDS_CHANGES_MAX = 64, HT_SHARDS_TEXT_MAX = 8 * HT_SHARDS_CHANGES_MAX };
enum { HT_SHARDS_NONE = 0xffff }; /* no rank */

struct ht_shards {
    unsigned changes; /* at least 1 */
    struct {
        uint16_t ranks, lost; /* lost: a rank of the line before, or NONE */
    } change[HT_SHARDS_CHANGES_MAX];
};

static inline unsigned ht_shards_ranks(const struct ht_shards *s)
{
    return s->change[s->changes - 1].ranks;
}
/* Block b belongs to rank b mod ranks. */
struct ht_shards ht_shards_even(unsigned ranks);
/* -EINVAL; -E2BIG: more changes than there may be. The text needs no NUL. */
int ht_shards_parse(const char *text, size_t len, struct ht_shards *out) HT_MUST_CHECK;
/* Adds a change. lost: a present rank, or NONE. -EINVAL; -E2BIG. */
int ht_shards_change(struct ht_shards *s, unsigned ranks, unsigned lost) HT_MUST_CHECK;
/* As snprintf; HT_SHARDS_TEXT_MAX suffices. */
void ht_shards_format(const struct ht_shards *s, char out[HT_SHARDS_TEXT_MAX]);
/* The present number of a rank before the last change. NONE: it left. */
unsigned ht_shards_renumber(const struct ht_shards *s, unsigned rank);

/* May a parameter have so many blocks? */
bool ht_shards_fit(const struct ht_shards *s, uint64_t blocks);
/* The owner of each of the blocks of one parameter, for which there is room. */
void ht_shards_owners(const struct ht_shards *s, uint64_t blocks, uint16_t *owner);
/* The least number of blocks that get another owner by the last change, however they are given out evenly. */
uint64_t ht_shards_least(const struct ht_shards *s, uint64_t blocks, const uint16_t *before);

/* "2of4". False: it is no such name. */
bool ht_shard_parse_name(const char *name, unsigned *out_rank, unsigned *out_ranks);
