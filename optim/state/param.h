/* SPDX-License-Identifier: Apache-2.0 */
/*
 * param.h - parameters: their records, memory and words; their ranges, with coverage by gradients and the sums of their
 * squares; and the queue of the workers.
 */
#pragma once

#include "optim/rules/rule.h"
#include "optim/state/context.h"
#include "optim/state/interval_set.h"

struct ht_range;
struct ht_root;

enum { HT_STATES_MAX = HT_KERNEL_STATES_MAX + 2 };

/* Which state objects a parameter has: in the order of its rule, then those of the master. */
struct ht_layout {
    uint8_t count, kind[HT_STATES_MAX]; /* enum ht_state_kind */
    uint8_t form[HT_STATES_MAX];        /* enum ht_form */
    uint32_t salt;                      /* of roundings, if any form is not HT_FORM_F32; it stays with the state */
};

/* The content of a parameter's record. */
struct ht_param_meta {
    bool exists;
    uint8_t dtype;
    uint32_t chunk_bytes;
    uint64_t elements;
    uint64_t t; /* steps in which it had a gradient */
    struct ht_layout layout;
    uint64_t oid[HT_STATES_MAX];
};

/* How its bytes are cut; fixed while there is state, coverage or an opener. */
struct ht_param_shape {
    uint64_t elements, range_count;
    uint32_t chunk_bytes, range_elements;
    uint8_t dtype, grad_dtype, p_bytes, g_bytes;
};

/*
 * Elements [begin, end) of a parameter with numbers of their own, as its words give them (rules/config.h). The first
 * gradient of a step latches them with the numbers of the parameter. From then on until the step has ended they stay as
 * they are, but for the factor of the gradient, which a boundary sets while no worker runs. So workers read them
 * without the lock. Numbers that a client has decided wait in the same memory for the first gradient.
 */
struct ht_param_section {
    uint64_t begin, end;
    bool frozen; /* no update changes them, or their state */
    struct ht_scalars scalars;
};

struct ht_param_sections {
    uint32_t count;   /* of the step */
    uint32_t decided; /* or those of a client, until a gradient latches them or others */
    uint32_t room;
    struct ht_param_section of[]; /* ascending, apart from each other */
};
enum { HT_SECTIONS_MAX = 8192 }; /* of a parameter; a text has fewer */

/* A state object in optim.states_by_oid; its number is 0 while it is not there. */
struct ht_state_link {
    struct ht_id_link by_oid;
    struct ht_param *param;
};

/*
 * What a parameter of a rule in two phases has beside its gradient (gradient/ortho.c). Both objects are scratch, in
 * bf16, and range i is chunk i of each.
 */
struct ht_ortho {
    struct ht_obj *update, *given;  /* references: what the first phase hands out; what the second one takes */
    struct ht_optim_config config;  /* of the step: its matrices, and how the store orthogonalises them */
    struct ht_interval_set written; /* elements of given, in this step */
    uint64_t heap_bytes;            /* of all this, as far as optim.meta_bytes has them */
    unsigned writers;               /* threads that copy into it */
    uint64_t stirred;               /* ranges whose momentum has this step's gradient */
    uint64_t waiting_bytes;         /* written and not applied: its part of root.ortho_bytes */
    uint64_t update_bytes;          /* handed out until the second phase begins: its part of root.update_bytes */
    bool asked, applied;            /* in this step: the first was read; the second was handed over */
};

struct ht_param {
    struct ht_optim *o;
    struct ht_root *root;
    uint64_t oid, seq; /* seq: order of all, for a checkpoint */
    struct ht_id_link by_oid;
    struct ht_list all;     /* optim.params, in order of seq */
    struct ht_list of_root; /* root.params */
    struct ht_list of_sums; /* root.sums while sum is set; not while it is being deleted */
    struct ht_list touched; /* root.touched while has_grad */
    struct ht_list queue;   /* its ranges to update, in ascending order */
    struct ht_list queued;  /* root.queue while queue is not empty */
    HT_GUARDED_BY(HT_LOCK_OPTIM) struct {
        unsigned refs; /* handles, calls in progress, the helper's list, queued and running ranges */
        unsigned openers;
        bool building;      /* an opener makes its gradient object and ranges */
        bool gone;          /* deleted (pending or published), or its object vanished */
        bool orphan;        /* a boundary found that its file has no name; only an abort can change that */
        bool log_reserved;  /* log bytes for its record */
        bool rewriting;     /* its masters, or coded state, from outside */
        uint64_t rewrites;  /* of these, or an abort */
        uint64_t forgotten; /* aborts and drops: earlier writes do not count */
        uint64_t applied;   /* times that the written bytes of all openers were handed over */
    };
    struct ht_param_meta cur, pub;
    struct ht_state_link state_link[HT_STATES_MAX];        /* those of cur, in its order (state.c) */
    struct ht_totals counted HT_GUARDED_BY(HT_LOCK_OPTIM); /* its part of the root's totals */
    struct ht_obj *obj, *grad, *state[HT_STATES_MAX];      /* references; state[i] belongs to cur.oid[i] */
    struct ht_obj *sum;     /* reference; of gradients, f32; NULL where nothing was ever accumulated */
    struct ht_ortho *ortho; /* NULL: never had a gradient of such a rule */

    struct ht_param_shape shape;
    struct ht_range *
        *block; /* by index / HT_RANGE_BLOCK, the last one as short as it can be; NULL where never touched */
    uint64_t blocks;
    struct ht_list dirty; /* ranges with written bytes */
    struct ht_list inflight;

    HT_GUARDED_BY(HT_LOCK_OPTIM) struct {
        bool has_grad; /* in the open step */
        bool stepped;  /* by a step that has ended and is not published; its count alone may have been set back since */
        uint64_t complete; /* ranges frozen wholly in this step */
        uint64_t pending;  /* QUEUED or RUNNING */
        uint64_t shown;    /* of these, the parameter has its new content already */
        uint64_t failed;
        uint64_t redo_steps;  /* logged steps in its count, which its record does not have */
        uint8_t redo_g_bytes; /* of an element of its gradient in logged steps, at most: a replay writes them */
        bool unreserved;      /* space for its next rewrite or its gradient is missing */
    };
    /* Of a client, for the step with this root.decided; t: the count after it. */
    HT_GUARDED_BY(HT_LOCK_OPTIM) struct {
        uint64_t decided, decided_t;
        struct ht_scalars decided_scalars;
        uint8_t decided_dtype; /* of its gradient */
    };
    /* Latched by its first gradient of the step; state may be deleted while an update is running. */
    struct ht_scalars scalars;
    uint64_t t;                         /* steps in which it had a gradient, with this one */
    struct ht_param_sections *sections; /* for elements that have others; NULL: there is no memory for any */
    struct ht_layout layout;
    uint32_t redo_place; /* in the summary of a logged step, while that is made; in a replay: updates of this part */
    uint64_t redo_at;    /* in a replay: its place in the row of all content (redo/redo_parts.c); fsck: its last step */
    double *squares;     /* sums of squares of the gradient, by HT_SUM_SPAN elements; NULL: none were needed */

    struct ht_list waiters;
    struct ht_list inval; /* optim.invals: ranges [inval_first, inval_last] to invalidate */
    HT_GUARDED_BY(HT_LOCK_OPTIM) struct {
        uint64_t inval_first, inval_last, inval_ticket;
    };
};

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
 * the range's list before it frees it (gradient/grad.c).
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

/* Has its step two phases? While it has a gradient. */
static inline bool ht_opt_in_phases(const struct ht_param *p)
{
    return p->scalars.kernel == HT_KERNEL_MUON;
}

/* --------------------------------------------------------------- param.c */

struct ht_param *ht_opt_param_find(struct ht_optim *o, uint64_t oid) HT_REQUIRES(HT_LOCK_OPTIM); /* no reference */
struct ht_param *ht_opt_param_make(struct ht_root *r, uint64_t oid) HT_REQUIRES(HT_LOCK_OPTIM);  /* NULL: no memory */
struct ht_param *ht_opt_param_get(struct ht_optim *o, uint64_t oid) HT_EXCLUDES(HT_LOCK_OPTIM);
void ht_opt_param_put(struct ht_param *p) HT_EXCLUDES(HT_LOCK_OPTIM); /* NULL: nothing */
/* Calls fn for every parameter of the root, with a reference held. */
void ht_opt_each_param(struct ht_root *root, void (*fn)(struct ht_param *p)) HT_REQUIRES(HT_LOCK_OPTIM);
/* Releases the lock in between: what has become of the parameter's file. */
enum ht_optim_file ht_opt_param_file(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_param_free(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM); /* no references, drops objects */
void ht_opt_param_put_objects(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * A worker has ended all work of a range; work: what it counted with in root.backlog_bytes. Wakes every waiter, and
 * takes the range's reference to the parameter. Releases the lock in between.
 */
void ht_opt_range_ended(struct ht_range *r, unsigned work) HT_REQUIRES(HT_LOCK_OPTIM);
/* Its sections, and their memory. */
void ht_opt_sections_free(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
uint64_t ht_opt_sections_bytes(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* Inside a transaction: its file or its root goes. So do its state, its queue and its waiters. */
void ht_opt_param_bury(struct ht_param *p, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM);
/* Inside a transaction, no references left: free a parameter that is gone and not in the log any more. */
void ht_opt_param_sweep(struct ht_param *p, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * The parameter of desc, ready to take a gradient; one more opener and reference. Reports errors as ht_grad_open does.
 */
int ht_opt_param_open(struct ht_optim *o, const struct ht_param_desc *desc, struct ht_param **out) HT_MUST_CHECK;
/* Under the gate, not locked: the gradient's object and the range table for this shape, if they are not there. */
int ht_opt_param_build(struct ht_param *p, const struct ht_param_shape *shape) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_param_close(struct ht_param *p) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Under the gate, not locked. */
int ht_opt_scratch_delete(const struct ht_param *p, struct ht_obj **obj) HT_MUST_CHECK;
int ht_opt_sum_delete(struct ht_param *p) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Those of a step in two phases. */
int ht_opt_ortho_delete(struct ht_param *p) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* --------------------------------------------------------------- state.c */

/* Of new state of so many elements, without a salt. */
struct ht_layout ht_opt_layout(const struct ht_optim_config *config, uint8_t dtype, uint64_t elements);
/* Whatever the salt. */
bool ht_opt_same_layout(const struct ht_layout *a, const struct ht_layout *b);
/* Is any state in another form than f32? */
bool ht_opt_layout_has_forms(const struct ht_layout *l);
/* A number for forms and salt, for logged steps: 0 if all is f32. */
uint32_t ht_opt_layout_mark(const struct ht_layout *l);
/* The same kinds, whatever their forms, and however masters are kept. */
bool ht_opt_same_rule_state(const struct ht_layout *a, const struct ht_layout *b);
/* Kinds at its end that are the master's: 0, 1 (f32) or 2 (missing bits, blocks). */
unsigned ht_opt_master_kinds(const struct ht_layout *l);
/* Is that the state that the kernel works on? */
bool ht_opt_layout_keeps(const struct ht_layout *l, enum ht_kernel kernel);
/* Before state has this layout: gives it a salt if it needs one and has none, and the store its feature bit. */
int ht_opt_layout_prepare(const struct ht_param *p, struct ht_layout *l) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/*
 * Under the gate: make zero state and reserve one rewrite of everything. A salt of the layout stays. -ENOSPC leaves all
 * as it was.
 */
int ht_opt_state_create(struct ht_param *p, const struct ht_layout *layout) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* A new object of a root; scope 0: one that is never published. */
int ht_opt_object_create(struct ht_store *s, uint64_t scope, uint32_t chunk_bytes, struct ht_obj **out) HT_MUST_CHECK;
/* One state object of zeros, with space for one rewrite; also after an error *out_obj may be one, to be deleted. */
int ht_opt_state_create_one(struct ht_param *p, const struct ht_param_shape *shape, uint8_t kind, uint8_t form,
                            uint64_t *out_oid, struct ht_obj **out_obj) HT_MUST_CHECK;
/* With state: reserves space for the gradient outside memory. Without state: gives the space for sums back. */
int ht_opt_grad_reserve(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Reserves the next rewrite of the parameter and its state, and its gradient. -ENOSPC: some of it is missing. */
int ht_opt_rewrites_reserve(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* The state is another one: takes it, and does the same. */
int ht_opt_state_settle(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/*
 * After the deletion of its state: gives the space for rewrites of the parameter and its gradient back. That of state
 * that the log knows stays until its deletion is published, when this is called again.
 */
int ht_opt_state_unreserve(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* In a transaction of their own. NULL: none. */
int ht_opt_delete_objects(struct ht_store *s, struct ht_obj *const *obj, unsigned count)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Inside a transaction: delete the current state's objects. Raises an event where some are missing. */
void ht_opt_state_delete(struct ht_param *p, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM);
/* Under the gate: the same in a transaction of its own, and gives its space back. */
int ht_opt_state_drop(struct ht_param *p) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_put_state(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM); /* references to state objects */
/* Releases everything of a parameter that is gone, unless an update is running. */
void ht_opt_param_reclaim(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* Raises an event: some of its state is missing. */
void ht_opt_state_not_deleted(const struct ht_param *p);
/* Takes the missing references to cur's objects. edited: as ht_obj_set_derived. */
int ht_opt_state_load_as(struct ht_param *p, bool edited) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
static inline HT_MUST_CHECK int ht_opt_state_load(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return ht_opt_state_load_as(p, true);
}
/* Delete (pending) the state of parameters of which the object does not exist. */
int ht_opt_bury_orphans(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* A later step may find no space. With or without the lock. */
void ht_opt_not_reserved(const struct ht_param *p, const char *text);
/* The part of a parameter. */
struct ht_totals ht_opt_totals_of(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* To be called after every change of cur's layout or elements, of cur.exists, and of gone. */
void ht_opt_totals_update(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* The parameter leaves its root. */
void ht_opt_totals_remove(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);

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
/* The first one from index on that may have been touched; NULL: there is none. */
struct ht_range *ht_opt_range_from(const struct ht_param *p, uint64_t index);
#define ht_opt_for_each_range(r, p) \
    for (struct ht_range *r = ht_opt_range_from(p, 0); r; r = ht_opt_range_from(p, r->index + 1ull))
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
bool ht_opt_param_replayed(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* Is the parameter's content, or state, of this range about to change? Reads of the state wait. */
bool ht_opt_range_updating(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Is the parameter's content about to change? Reads of the parameter wait. */
bool ht_opt_range_hidden(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Will a boundary that was requested asynchronously update it? */
bool ht_opt_range_decided_later(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Is there a range of the parameter for which its readers wait? */
bool ht_opt_param_hidden(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);

/* Gradients of each element that make a step: the open one, or the next. */
uint32_t ht_opt_accumulate(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* The divisor of gradients, or of their sums, in the open step. */
double ht_opt_divisor(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Is a gradient being added to this range, after which it takes the next one? */
bool ht_opt_range_adding(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Does its gradient come from its sum? */
bool ht_opt_range_summed(const struct ht_range *r);
/* The part of a range that is to be measured or updated: intervals of gradient bytes. whole: room for one. */
const struct ht_interval *ht_opt_range_cover(const struct ht_range *r, struct ht_interval *whole, uint32_t *out_count);
/* A whole gradient has been added: make room for the next. */
void ht_opt_range_added(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Releases the lock in between: drops its sum. */
void ht_opt_sum_drop(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);

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
uint64_t ht_opt_squares_bytes(const struct ht_param *p);
/* For the worker that runs the range, not locked: its sums, set to zero. */
double *ht_opt_squares_begin(const struct ht_range *r);
/* Adds the squares of elements to the sums of their range, block by block. Adds to *nonfinite those not finite. */
void ht_opt_squares_add(const struct ht_kernels *kernels, double *span, const struct ht_elements *part,
                        uint64_t *nonfinite);
/* Adds the sum of a parameter's measured ranges, in their order; and how many of their elements are not finite. */
void ht_opt_squares_total(const struct ht_param *p, double *sum, uint64_t *nonfinite) HT_REQUIRES(HT_LOCK_OPTIM);

/* --------------------------------------------------------------- queue.c */

/* Queue a range for a worker. work: of enum ht_range_work. */
void ht_opt_range_queue(struct ht_range *r, unsigned work) HT_REQUIRES(HT_LOCK_OPTIM);
/* A range that a worker had for HT_WORK_LOG alone goes back to the queue. */
void ht_opt_range_requeue(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* For a root with queued ranges: takes the one that a worker there should work on off the queue. It is RUNNING then. */
struct ht_range *ht_opt_range_take(struct ht_root *root, int numa_index) HT_REQUIRES(HT_LOCK_OPTIM);
/* The next range of the next root, in turn, or NULL. second: beside one that the worker has, if that may be. */
struct ht_range *ht_opt_take_range(const struct ht_worker *w, bool second) HT_REQUIRES(HT_LOCK_OPTIM);
/* Until a range is ready; serves the store's background meanwhile. NULL: the optimizer ends. */
struct ht_range *ht_opt_wait_for_range(const struct ht_worker *w) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * A worker cannot update this range: its content is in the vault. Workers of its own take the ranges of this root until
 * its queue is empty. False: there is no thread for that.
 */
bool ht_opt_leave_range(struct ht_range *r, void *(*worker_main)(void *)) HT_EXCLUDES(HT_LOCK_OPTIM);
void ht_opt_root_ready(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM); /* put it on the ready list if it has work */
/* A worker has ended what it took. The root may have ranges for the spare one now. */
void ht_opt_range_ran(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Takes back queued ranges; running updates end by themselves. */
void ht_opt_cancel(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_cancel_root(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Releases the lock while it waits, until nothing of the root is queued or running. -EIO: an update failed;
 * -ECANCELED: stopping.
 */
int ht_opt_drain(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* -------------------------------------------------------------- notify.c */

void *ht_opt_helper_main(void *o) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Requests invalidation of ranges; returns a ticket for ht_opt_inval_wait. */
uint64_t ht_opt_inval(struct ht_param *p, uint64_t first, uint64_t last) HT_REQUIRES(HT_LOCK_OPTIM);
static inline uint64_t ht_opt_inval_range(const struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return ht_opt_inval(r->param, r->index, r->index);
}
void ht_opt_inval_wait(struct ht_optim *o, uint64_t ticket)
    HT_REQUIRES(HT_LOCK_OPTIM); /* releases the lock while it waits */
/*
 * Move waiters that may go on to chain, to be woken with ht_opt_wake after unlocking. The helper wakes those of
 * optim.wakes.
 */
void ht_opt_take_waiters(struct ht_param *p, struct ht_waiter **chain) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_wake(struct ht_waiter *chain);
/* Readers that need not wait any more go on. */
void ht_opt_wake_readers(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);

/* --------------------------------------------------------------- words.c */

/* The words for a parameter's gradient, and the step they were read for. */
struct ht_words {
    struct ht_optim_config config;
    struct ht_optim_sections sections; /* owned by who declares this */
    uint64_t step, changes;            /* root.open and optim.words_changes when it was read */
    bool read;
    int error;    /* they make no sense together */
    bool refused; /* out: for that reason nothing was applied */
    char why[HT_OPTIM_ERROR_MAX];
};
/* Is it that of the open step, or of the one that would open now? */
bool ht_opt_words_current(const struct ht_param *p, const struct ht_words *w) HT_REQUIRES(HT_LOCK_OPTIM);
/* Releases the lock in between. */
void ht_opt_words_read(struct ht_param *p, struct ht_words *w) HT_REQUIRES(HT_LOCK_OPTIM);
/* Has a client given the numbers of its next update? They fit its state. */
bool ht_opt_is_decided(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* -EINVAL: these words are none for its next update, with the reason in why. */
int ht_opt_sections_check(const struct ht_param *p, const struct ht_optim_sections *s, char why[HT_OPTIM_ERROR_MAX])
    HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* The same of a rule in two phases: its matrices must be those of the parameter. */
int ht_opt_blocks_check(const struct ht_param *p, const struct ht_optim_config *c, char why[HT_OPTIM_ERROR_MAX])
    HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Memory for so many, and no longer for many more: between steps. What there was is void. -ENOMEM */
int ht_opt_sections_reserve(struct ht_param *p, size_t count) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* These count for the step, for whose number there is memory. */
void ht_opt_sections_latch(struct ht_param *p, const struct ht_optim_sections *s) HT_REQUIRES(HT_LOCK_OPTIM);
/* Forgets all; adds one to those of the step, or to those that a client has decided. -E2BIG, -ENOMEM */
void ht_opt_sections_clear(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
int ht_opt_sections_add(struct ht_param *p, const struct ht_param_section *s, bool decided)
    HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* How many count for the step. */
uint32_t ht_opt_sections_count(const struct ht_param *p);
/* The factor of its gradient, for all of its elements. */
void ht_opt_set_grad_factor(struct ht_param *p, float factor) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * The numbers for element e; NULL: it is frozen. *n is cut to the elements from there on that have the same. A worker
 * calls it without a lock.
 */
const struct ht_scalars *ht_opt_scalars_at(const struct ht_param *p, uint64_t e, uint64_t *n);
