/* SPDX-License-Identifier: Apache-2.0 */
/*
 * range.h - ranges of a parameter, their coverage by gradients, the sums of their squares, and
 * the queue of the workers.
 */
#pragma once

#include "optim/rules/kernel.h"
#include "optim/state/interval_set.h"
#include "optim/optim.h"
#include "tiering/base/quota.h"

struct ht_param;
struct ht_param_shape;
struct ht_root;

enum { HT_RANGE_BLOCK = 32 };

enum ht_range_state { HT_RANGE_IDLE, HT_RANGE_QUEUED, HT_RANGE_RUNNING, HT_RANGE_DONE, HT_RANGE_FAILED };

/* A worker's tasks for a range, in this order; the update comes when no more bytes of clients are needed. */
enum ht_range_work {
    HT_WORK_ADD = 1,     /* its frozen gradient into its sum */
    HT_WORK_MEASURE = 2, /* squares of its gradient, or sum, into param.squares */
    HT_WORK_UPDATE = 4,
    HT_WORK_MOMENTUM = 16, /* the first phase of an update */
    HT_WORK_ORTHO = 32,    /* of range 0: the store orthogonalises the update of the parameter */
    HT_WORK_LOG = 8, /* its gradient into the object of the step: frozen bytes before all others, a sum after ADD */
};

struct ht_range {
    struct ht_param *param;
    struct ht_list queue;                   /* in root.early or param.queue while QUEUED */
    struct ht_list dirty;                   /* in param.dirty while written is not empty */
    struct ht_interval_set written, frozen; /* gradient bytes from the start of the range */
    struct ht_list own;                     /* struct ht_range_own: bytes of openers with an account */
    uint32_t index;
    uint8_t state HT_GUARDED_BY(HT_LOCK_OPTIM); /* enum ht_range_state */
    uint8_t work;                               /* enum ht_range_work, while it is not IDLE */
    int8_t numa_index; /* place of the NUMA node where it should be worked on, while it is not IDLE */
    bool consumed;     /* its gradient's chunks have been dropped */
    bool shown;        /* RUNNING, and the parameter has its new content: its state is still being written */
    bool part_added;   /* the sum includes the frozen part */
    bool stirred;   /* the momentum has its gradient, whose bytes are not needed any more; the second phase follows */
    bool logged;    /* the step's object has its gradient, or its sum (redo/redo_log.c) */
    bool measured;  /* param.squares has its squares, and nonfinite counts its elements that are not finite */
    uint32_t added; /* whole gradients in the sum */
    uint32_t updates, nonfinite;
    uint32_t spans_bytes HT_GUARDED_BY(HT_LOCK_OPTIM); /* of its sets, as far as optim.meta_bytes has them */
};

/*
 * The bytes of a range that one opener wrote and that were not handed over since. Its opener owns it, and takes it off
 * the range's list before it frees it (gradient/account.c).
 */
struct ht_range_own {
    struct ht_list link; /* in range.own; by itself: the range is gone */
    struct ht_interval_set bytes;
    uint64_t index;             /* of the range */
    struct ht_quota_user *user; /* of its opener */
    uint32_t counted_bytes;     /* of this and its set, as far as optim.accounts has them */
};
/* Without its set, but with what the account's array of pointers takes for it. */
#define HT_RANGE_OWN_BYTES ((uint32_t)(sizeof(struct ht_range_own) + 2 * sizeof(struct ht_range_own *)))

/* A write that is copying right now; on the writer's stack. */
struct ht_inflight {
    struct ht_list link;
    uint64_t begin, end; /* bytes of the gradient */
};

/* --------------------------------------------------------------- range.c */

int ht_opt_shape_of(struct ht_param_shape *out, uint64_t bytes, uint32_t chunk_bytes, uint8_t dtype,
                    uint8_t grad_dtype) HT_MUST_CHECK;
/* The shape of the present state: an abort may bring back another one than that of the last gradient's opening. */
int ht_opt_state_shape(const struct ht_param *p, struct ht_param_shape *out) HT_MUST_CHECK;
int ht_opt_ranges_init(struct ht_param *p, const struct ht_param_shape *shape)
    HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK; /* replaces the former ranges */
void ht_opt_ranges_free(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * An object of state of a kind (rule.h) and a form (forms.h). size: what the object has, in whole chunks but the last
 * one; used: bytes of each chunk that have content; range: bytes of so many elements of a range, from its first chunk
 * on; stride: chunks of a whole range; kept: bytes with content of all chunks.
 */
uint32_t ht_opt_state_chunk_bytes(const struct ht_param_shape *s, uint8_t kind);
uint32_t ht_opt_state_used_bytes(const struct ht_param_shape *s, uint8_t kind, uint8_t form);
unsigned ht_opt_state_stride(const struct ht_param_shape *s, uint8_t kind, uint8_t form);
uint64_t ht_opt_state_range_bytes(uint8_t kind, uint8_t form, uint64_t elements);
uint64_t ht_opt_state_size(const struct ht_param_shape *s, uint8_t kind, uint8_t form);
uint64_t ht_opt_state_kept_bytes(const struct ht_param_shape *s, uint8_t kind, uint8_t form);
struct ht_range *ht_opt_range_find(const struct ht_param *p, uint64_t index); /* NULL: never touched */
/* The part of gradient bytes [begin, end) that lies in the range of begin. */
struct ht_range_piece {
    uint64_t index;
    uint32_t begin, end; /* from the start of the range */
};
struct ht_range_piece ht_opt_range_piece(const struct ht_param *p, uint64_t begin, uint64_t end);
/* All parts of [pos, last), range by range; pos is at the begin of the part, and is changed. */
#define ht_opt_for_each_piece(at, p, pos, last)                                                     \
    for (struct ht_range_piece at; (pos) < (last) && (at = ht_opt_range_piece(p, pos, last), true); \
         (pos) += at.end - at.begin)
struct ht_range *ht_opt_range_make(struct ht_param *p, uint64_t index) HT_REQUIRES(HT_LOCK_OPTIM); /* NULL: no memory */
uint32_t ht_opt_range_elements(const struct ht_param_shape *s, uint64_t index);
uint32_t ht_opt_range_grad_bytes(const struct ht_param *p, uint64_t index);
uint64_t ht_opt_range_grad_begin(const struct ht_range *r); /* its first byte of the gradient */
/* One of its sets of intervals may have another size now. */
void ht_opt_range_count_intervals(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* The same of an opener's set; freed: it has none any more, and goes. */
void ht_opt_range_count_own(struct ht_optim *o, struct ht_range_own *own, bool freed) HT_REQUIRES(HT_LOCK_OPTIM);
/* Is a write of any of these bytes of the gradient in progress? */
bool ht_opt_in_flight(const struct ht_param *p, uint64_t begin, uint64_t end) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * What a range counts in root.backlog_bytes while it has this work: the memory of its gradient's image, which takes
 * more than a few elements need. A gradient that is only measured stays anyway.
 */
uint32_t ht_opt_range_backlog_bytes(const struct ht_range *r, unsigned work);
/* The frozen bytes belong to no step any more, and any opener may write them anew: no account has them. */
void ht_opt_range_thaw(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Forget all coverage; nothing may be RUNNING. frozen_only: written bytes stay. */
void ht_opt_coverage_clear(struct ht_param *p, bool frozen_only) HT_REQUIRES(HT_LOCK_OPTIM);
/* The same for what a step in two phases has beside. */
void ht_opt_ortho_clear(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* The second phase begins: no client has anything to orthogonalise or to write any more. */
void ht_opt_ortho_spent(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* Its set of intervals may have another size now; gone: there is nothing any more. */
void ht_opt_ortho_count(struct ht_param *p, bool gone) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Releases the lock in between: drops the gradient chunks of a range that are not needed any more; after the second
 * phase its orthogonalised update.
 */
void ht_opt_range_drop(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Are its gradient's bytes used up? */
static inline bool ht_opt_range_spent(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return r->state == HT_RANGE_DONE || r->stirred;
}
/* Is the parameter's content, or state, of this range about to change? Reads of the state wait. */
bool ht_opt_param_replayed(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
bool ht_opt_range_updating(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Is the parameter's content about to change? Reads of the parameter wait. */
bool ht_opt_range_hidden(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Will a boundary that was requested asynchronously update it? */
bool ht_opt_range_decided_later(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Is there a range of the parameter for which its readers wait? */
bool ht_opt_param_hidden(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);

/* --------------------------------------------------------------- queue.c */

/* Queue a range for a worker. work: of enum ht_range_work. */
void ht_opt_range_queue(struct ht_range *r, unsigned work) HT_REQUIRES(HT_LOCK_OPTIM);
/* A range that a worker had for HT_WORK_LOG alone goes back to the queue. */
void ht_opt_range_requeue(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* For a root with queued ranges: takes the one that a worker there should work on off the queue. It is RUNNING then. */
struct ht_range *ht_opt_range_take(struct ht_root *root, int numa_index) HT_REQUIRES(HT_LOCK_OPTIM);
/* The same without taking it. */
struct ht_range *ht_opt_range_next(const struct ht_root *root, int numa_index) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_root_ready(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM); /* put it on the ready list if it has work */
/* A worker has ended what it took. The root may have ranges for the spare one now. */
void ht_opt_range_ran(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* A root is ready: an idle worker takes a range, or else the one that does background work, after its unit. */
void ht_opt_wake_worker(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM);
/* Takes back queued ranges; running updates end by themselves. */
void ht_opt_cancel(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_cancel_root(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Releases the lock while it waits, until nothing of the root is queued or running. -EIO: an update failed;
 * -ECANCELED: stopping.
 */
int ht_opt_drain(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* ------------------------------------------------------------- squares.c */

/* Elements of one sum: every range is a whole number of them, but the last. */
enum { HT_SUM_SPAN = 16 * HT_SUM_BLOCK };

/* Elements of a range that lie one after the other: count of them from first on. */
struct ht_elements {
    const void *bytes;
    uint8_t dtype;
    uint64_t first, count;
};

/* Memory for the sums of a parameter; false: there is none. Memory that is there stays as it is. */
bool ht_opt_squares_make(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_squares_free(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
uint64_t ht_opt_squares_bytes(const struct ht_param *p);
/* For the worker that runs the range, not locked: its sums, set to zero. */
double *ht_opt_squares_begin(const struct ht_range *r);
/* Adds the squares of elements to the sums of their range, block by block. Adds to *nonfinite those not finite. */
void ht_opt_squares_add(const struct ht_kernels *kernels, double *span, const struct ht_elements *part,
                        uint64_t *nonfinite);
/* Adds the sum of a parameter's measured ranges, in their order; and how many of their elements are not finite. */
void ht_opt_squares_total(const struct ht_param *p, double *sum, uint64_t *nonfinite) HT_REQUIRES(HT_LOCK_OPTIM);
