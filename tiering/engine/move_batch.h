/* SPDX-License-Identifier: Apache-2.0 */
/* move_batch.h - inside engine/: nearly empty groups of blocks with what lies in them, and emptying them. */
#ifndef HITRAIN_TIERING_ENGINE_MOVE_BATCH_H
#define HITRAIN_TIERING_ENGINE_MOVE_BATCH_H

#include "tiering/base/base.h"
#include "tiering/space/alloc.h"
#include "tiering/engine/move.h"
#include "tiering/engine/owners.h"
#include "tiering/engine/walk.h"

enum {
    HT_MOVE_GROUPS_MAX = 4096,                     /* of a batch */
    HT_MOVE_TAKEN_MAX = HT_ALLOC_SPARSE_TAKEN_MAX, /* blocks of a group that is nearly empty: a quarter */
    HT_MOVE_FOUND_MAX = 1 << 17                    /* owners of a batch; groups with more stay */
};

/* A nearly empty group. */
struct ht_move_victim {
    uint64_t key; /* device << 48 | group */
    bool skip;    /* something in it cannot be moved */
    bool closed;  /* it was closed: emptying it has begun */
};

struct ht_move_batch {
    struct ht_store *s;
    struct ht_move_figures *figures;
    struct ht_move_victim victim[HT_MOVE_GROUPS_MAX]; /* in order */
    unsigned count, at, settled; /* at: the group that is emptied next; settled: groups before it are open again */
    struct ht_walk walk;
    struct ht_owners owners; /* group: the victim. In order once all was walked */
    uint64_t closed_blocks;  /* that were free in the groups that are closed */
    uint64_t lsn;            /* of the last transaction that moved something; 0: all are durable */
    uint8_t *buf;            /* a chunk */
};

/*
 * move_unit.c: copies and publishes some content of the next groups, as much as the budget allows, or makes moves
 * durable and opens the groups. 0, or an error that is not the groups'.
 */
int ht_move_unit(struct ht_move_batch *b, struct ht_budget *budget) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Nothing is left to do. */
bool ht_move_is_over(const struct ht_move_batch *b);
/* Opens the groups that are still closed. */
void ht_move_open_all(struct ht_move_batch *b) HT_EXCLUDES(HT_LOCK_STORE);

#endif
