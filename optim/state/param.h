/* SPDX-License-Identifier: Apache-2.0 */
/* param.h - parameters: their ranges, their records and memory, their words. */
#pragma once

#include "optim/rules/rule.h"
#include "optim/rules/sections.h"
#include "optim/state/context.h"
#include "optim/state/interval_set.h"

struct ht_param_sections;
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

struct ht_param;

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
    struct ht_state_link state_link[HT_STATES_MAX];        /* those of cur, in its order (totals.c) */
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
    uint64_t t; /* steps in which it had a gradient, with this one */
    struct ht_param_sections
        *sections; /* for elements that have others (sections.h); NULL: there is no memory for any */
    struct ht_layout layout;
    uint32_t redo_place; /* in the summary of a logged step, while that is made; in a replay: updates of this part */
    uint64_t redo_at;    /* in a replay: its place in the row of all content (redo/redo_parts.c); fsck: its last step */
    double *squares; /* sums of squares of the gradient, by HT_SUM_SPAN elements (range.h); NULL: none were needed */

    struct ht_list waiters;
    struct ht_list inval; /* optim.invals: ranges [inval_first, inval_last] to invalidate */
    HT_GUARDED_BY(HT_LOCK_OPTIM) struct {
        uint64_t inval_first, inval_last, inval_ticket;
    };
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
void ht_opt_param_put(struct ht_param *p) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Calls fn for every parameter of the root, with a reference held. */
void ht_opt_each_param(struct ht_root *root, void (*fn)(struct ht_param *p)) HT_REQUIRES(HT_LOCK_OPTIM);
/* Releases the lock in between: what has become of the parameter's file. */
enum ht_optim_file ht_opt_param_file(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_param_free(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM); /* no references, drops objects */
void ht_opt_param_put_objects(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* Releases everything of a parameter that is gone, unless an update is running. */
void ht_opt_param_reclaim(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * A worker has ended all work of a range; work: what it counted with in root.backlog_bytes. Wakes every waiter, and
 * takes the range's reference to the parameter. Releases the lock in between.
 */
void ht_opt_range_ended(struct ht_range *r, unsigned work) HT_REQUIRES(HT_LOCK_OPTIM);
/* Inside a transaction: its file or its root goes. So do its state, its queue and its waiters. */
void ht_opt_param_bury(struct ht_param *p, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM);
/* Inside a transaction, no references left: free a parameter that is gone and not in the log any more. */
void ht_opt_param_sweep(struct ht_param *p, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM);

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

/* ---------------------------------------------------------- param_open.c */

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

/* -------------------------------------------------------------- totals.c */

/* The part of a parameter. */
struct ht_totals ht_opt_totals_of(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* To be called after every change of cur's layout or elements, of cur.exists, and of gone. */
void ht_opt_totals_update(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* The parameter leaves its root. */
void ht_opt_totals_remove(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);

/* -------------------------------------------------------------- notify.c */

void *ht_opt_helper_main(void *o) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Requests invalidation of ranges; returns a ticket for ht_opt_inval_wait. */
uint64_t ht_opt_inval(struct ht_param *p, uint64_t first, uint64_t last) HT_REQUIRES(HT_LOCK_OPTIM);
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

/* -------------------------------------------------------- config_words.c */

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
