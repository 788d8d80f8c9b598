/* SPDX-License-Identifier: Apache-2.0 */
/*
 * delta.h - what steps change in the parameters of a root (delta=on): which elements, and their new bits.
 *
 *   step opens    --> recording, if the elements of the step before are known                             delta.c
 *   update        --> bits before and after the kernel, in windows; pieces in the worker's buffer    step/delta.c
 *   worker        --> buffer into the object of the step, while the worker holds no chunk            step/delta.c
 *   boundary      --> pieces in order; readable from the count of the step on                        step/delta.c
 *   reader        --> step/delta.c
 *
 * A chain of deltas leads from one step to the next one. It is cut where parameters change by anything else than the
 * update of a step: abort, rollback, bytes that a program writes (ht_scope_edits), another name, a new or deleted
 * parameter, a number of a step that a client set, numbers of updates that it gave, a mount. Older deltas go then, the
 * next step is `whole`, and has another lineage. So is a step that changes too much, or whose delta finds no room; its
 * lineage goes on. Nothing here makes a step fail.
 *
 * Nothing is on a device for good: the objects are scratch, deleted when they are made, and live by their references.
 */
#pragma once

#include "tiering/base/list.h"
#include "optim/optim.h"

struct ht_root;

/* Elements of a piece lie within so many, so that two bytes say where. */
enum { HT_DELTA_SPAN = 1 << 16 };

/* Changed elements of a parameter: in the object their values, then their places after `first`, two bytes each. */
struct ht_delta_piece {
    uint64_t oid, first, at;
    uint64_t before; /* changed elements of the parameter in earlier pieces; from the end of the step on */
    uint32_t count;
};

/* A parameter of which something changed. */
struct ht_delta_param {
    struct ht_delta_change of;
    size_t piece, pieces; /* its first one, and how many */
};

/* Of one step. It does not change after the boundary. */
struct ht_delta {
    struct ht_optim *o;
    struct ht_list of_root;
    unsigned refs HT_GUARDED_BY(HT_LOCK_OPTIM);
    uint64_t step, lineage;
    bool whole;         /* no step is its base, and it has no pieces: readers take the model */
    bool bf16;          /* values of f32 are rounded to bf16 */
    struct ht_obj *obj; /* reference; NULL: nothing has changed */
    uint64_t bytes;     /* in obj */
    uint64_t changed;   /* elements */
    struct ht_delta_piece *piece;
    size_t pieces, pieces_max;
    struct ht_delta_param *param;
    size_t params;
    uint64_t heap_bytes; /* of all this, as far as optim.delta_heap_bytes has them */
    bool lost;           /* is kept no more, and a reader has it open: counted in optim.deltas_lost */
};

/* Of a root. */
struct ht_deltas {
    bool based;             /* lineage and edits are those at the end of the last step */
    bool recording;         /* updates of the open step note what they change in `open` */
    uint8_t skips, backoff; /* steps that note nothing, now and after the next one that changes too much */
    uint8_t count;          /* of kept */
    uint64_t lineage, edits;
    struct ht_delta *open; /* NULL: nothing has been noted */
    struct ht_list kept;   /* by step, without gaps */
};

void ht_opt_deltas_init(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* A step opens: can it have a delta? */
void ht_opt_delta_opens(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* The chain is cut, and has another lineage, so that a reader of the model sees it also where no step has a delta. */
void ht_opt_delta_cut(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * The open step changes too much. Steps after several such in a row are tried less and less often, because most of them
 * would be noted for nothing.
 */
void ht_opt_delta_give_up(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* The open step will be whole: there was no room. */
void ht_opt_delta_lose(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* The words may want fewer, none, or others. */
void ht_opt_delta_trim(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* The delta of the step that was counted, with the caller's reference. */
void ht_opt_delta_keep(struct ht_root *root, struct ht_delta *d) HT_REQUIRES(HT_LOCK_OPTIM);
/* With one reference; NULL: no memory. */
struct ht_delta *ht_opt_delta_new(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_delta_put(struct ht_delta *d) HT_REQUIRES(HT_LOCK_OPTIM);
/* One of its arrays may have another size now. */
void ht_opt_delta_count_heap(struct ht_delta *d) HT_REQUIRES(HT_LOCK_OPTIM);
/* Bytes of all kept ones: content and memory. */
uint64_t ht_opt_delta_bytes(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* The store is full (tiering/api/participant.h): roots give up their oldest deltas. Returns how many bytes. */
uint64_t ht_opt_deltas_could_give(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM);
uint64_t ht_opt_deltas_give_up(struct ht_optim *o, uint64_t bytes) HT_REQUIRES(HT_LOCK_OPTIM);
