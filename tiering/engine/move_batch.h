/* SPDX-License-Identifier: Apache-2.0 */
/* move_batch.h - inside engine/: nearly empty groups of blocks with what lies in them, and emptying them. */
#pragma once

#include "tiering/engine/engine_priv.h"
#include "tiering/engine/pass.h"

enum {
    HT_MOVE_GROUPS_MAX = 4096,              /* of a batch */
    HT_MOVE_TAKEN_MAX = HT_SPARSE_TAKEN_MAX /* blocks of a group that is nearly empty: a quarter */
};

/* A nearly empty group. */
struct ht_move_victim {
    uint64_t key; /* ht_place() of the group. First: for ht_compare_numbers */
    bool skip;    /* something in it cannot be moved */
    bool closed;  /* it was closed: emptying it has begun */
};

static inline unsigned ht_move_device(uint64_t key)
{
    return (unsigned)(key >> 48);
}
static inline uint64_t ht_move_group(uint64_t key)
{
    return key & ((UINT64_C(1) << 48) - 1);
}

struct ht_move_batch {
    struct ht_store *s;
    _Atomic uint64_t *figure, *bytes;                 /* of the row; heap of the engine */
    struct ht_move_victim victim[HT_MOVE_GROUPS_MAX]; /* in order */
    unsigned count, at, settled; /* at: the group that is emptied next; settled: groups before it are open again */
    struct ht_pass pass;         /* its groups are the victims */
    bool sorted;                 /* its notes are in order. Then all was walked */
    uint64_t next_key;           /* the first group that left the batch, since there were too many owners; 0: none */
    uint64_t closed_blocks;      /* that were free in the groups that are closed */
    uint64_t lsn;                /* of the last transaction that moved something; 0: all are durable */
    uint8_t *buf;                /* a chunk */
    unsigned flight;             /* contents that move together: what the devices serve in a part of a step */
};

/*
 * move_unit.c: copies and publishes some content of the next groups, as much as the budget allows, or makes moves
 * durable and opens the groups. 0, or an error that is not the groups'.
 */
int ht_move_unit(struct ht_move_batch *b, struct ht_budget *budget) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The next unit has very many owners, so it takes longer than a step. */
bool ht_move_is_long(const struct ht_move_batch *b);
/* Nothing is left to do. */
bool ht_move_is_over(const struct ht_move_batch *b);
/* Opens the groups that are still closed. */
void ht_move_open_all(struct ht_move_batch *b) HT_EXCLUDES(HT_LOCK_STORE);
