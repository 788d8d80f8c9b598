/* SPDX-License-Identifier: Apache-2.0 */
/*
 * optim_priv.h - inside the optimizer: roots, parameters, ranges, and who guards them.
 *
 * One mutex (optim.lock) guards everything below that is not said to be otherwise. I/O, kernels and callbacks run
 * without it. One condition (optim.changed) tells everybody who waits for a state.
 *
 * A range:
 *
 *   IDLE --frozen wholly (grad_flush.c), or in part at a partial boundary (step.c)--> QUEUED
 *   QUEUED --taken by a worker (update.c)--> RUNNING --applied--> DONE --boundary--> IDLE
 *                                                    --error--> FAILED --abort--> IDLE
 *   QUEUED --abort, stop, deletion--> IDLE
 *
 * With accumulation it goes round once for each gradient but the last: frozen wholly, added to its sum, IDLE.
 *
 * A root:
 *
 *   gate      one of boundary, commit, abort, reset, creation of state, write of state at a time; held over I/O
 *   draining  a boundary or abort waits for the queue: whoever writes or freezes a gradient waits
 *   hold      between a boundary and its publication: ranges are queued, none is taken
 *
 * Invariants:
 *  1. While a range is QUEUED or RUNNING nobody changes its frozen spans, and nobody writes the bytes under them.
 *  2. written and frozen of a range never overlap; bytes that a write is changing right now are in neither.
 *  3. pub of a parameter or root changes only inside a transaction, together with the record that says so.
 *  4. State objects are created and published under the gate, so a commit names all of a parameter's state or none.
 *
 * Threads: workers (update.c), one helper that invalidates caches and wakes waiters for those who may not (notify.c),
 * and the callers'. Lock order: transaction > names > optimizer > store.
 */
#ifndef HITRAIN_OPTIM_OPTIM_PRIV_H
#define HITRAIN_OPTIM_OPTIM_PRIV_H

#include <time.h>

#include "optim/rules/kernel.h"
#include "optim/optim.h"
#include "optim/rules/rule.h"
#include "optim/spans.h"
#include "tiering/base/idtable.h"
#include "tiering/base/base.h"
#include "tiering/base/event.h"
#include "tiering/base/list.h"
#include "tiering/base/lock.h"
#include "tiering/store/store.h"

enum { RANGE_BLOCK = 32, STATES_MAX = HT_KERNEL_STATES_MAX + 2, THREADS_MAX = 64, NAME_MAX_BYTES = 160 };

enum range_state { RANGE_IDLE, RANGE_QUEUED, RANGE_RUNNING, RANGE_DONE, RANGE_FAILED };

/* What a worker does with a range, in this order; what needs nothing more from clients includes the update. */
enum range_work {
    WORK_ADD = 1,     /* its frozen gradient into its sum */
    WORK_MEASURE = 2, /* squares of its gradient, or sum, into param.sums */
    WORK_UPDATE = 4,
};

struct range {
    struct param *param;
    struct ht_list queue;            /* in root.queue while QUEUED */
    struct ht_list dirty;            /* in param.dirty while written is not empty */
    struct ht_spans written, frozen; /* gradient bytes from the start of the range */
    uint32_t index;
    uint8_t state;   /* enum range_state */
    uint8_t work;    /* enum range_work, while it is not IDLE */
    int8_t near;     /* place of the NUMA node where it should be worked on, while it is not IDLE */
    bool consumed;   /* its gradient's chunks have been dropped */
    bool part_added; /* the sum has what is frozen, too */
    uint32_t added;  /* whole gradients in the sum */
    uint32_t updates;
    uint32_t spans_bytes; /* of its sets, as far as optim.meta_bytes has them */
};

/* A write that is copying right now; on the writer's stack. */
struct inflight {
    struct ht_list link;
    uint64_t begin, end; /* bytes of the gradient */
};

/* Which state objects a parameter has: in the order of its rule, then those of the master. */
struct layout {
    uint8_t count, kind[STATES_MAX]; /* enum ht_state_kind */
};

/* What a record says of a parameter. */
struct param_meta {
    bool exists;
    uint8_t dtype;
    uint32_t chunk_bytes;
    uint64_t elements;
    uint64_t t; /* steps in which it had a gradient */
    struct layout layout;
    uint64_t oid[STATES_MAX];
};

/* How its bytes are cut; fixed while there is state, coverage or an opener. */
struct shape {
    uint64_t elements, range_count;
    uint32_t chunk_bytes, range_elements;
    uint8_t dtype, grad_dtype, p_bytes, g_bytes;
};

struct param {
    struct ht_optim *o;
    struct root *root;
    uint64_t oid, seq; /* seq: order of all, for compaction */
    struct ht_id_link by_oid;
    struct ht_list all;     /* optim.params, in order of seq */
    struct ht_list of_root; /* root.params */
    struct ht_list touched; /* root.touched while has_grad */
    unsigned refs;          /* handles, calls in progress, the helper's list, queued and running ranges */
    unsigned openers;
    bool gone;          /* deleted (pending or published), or its object vanished */
    bool orphan;        /* a boundary found that its file has no name; only an abort can change that */
    bool claimed;       /* log bytes for its record */
    bool rewriting;     /* its masters, from outside */
    uint64_t rewrites;  /* of them, or an abort */
    uint64_t forgotten; /* aborts and drops: what was written before them does not count */
    struct param_meta cur, pub;
    struct ht_obj *obj, *grad, *state[STATES_MAX]; /* references; state[i] belongs to cur.oid[i] */
    struct ht_obj *sum; /* reference; of gradients, f32; NULL where nothing was ever accumulated */

    struct shape shape;
    struct range **block; /* by index / RANGE_BLOCK, the last one as short as it can be; NULL where never touched */
    uint64_t blocks;
    struct ht_list dirty; /* ranges with written bytes */
    struct ht_list inflight;

    bool has_grad;     /* in the open step */
    bool stepped;      /* by a step that has ended and is not published; its count alone may have been set back since */
    uint64_t complete; /* ranges frozen wholly in this step */
    uint64_t pending;  /* QUEUED or RUNNING */
    uint64_t failed;
    /* Latched by its first gradient of the step; state may go while an update is running. */
    struct ht_scalars scalars;
    struct layout layout;
    double *sums; /* while the root is measuring: squares of the gradient, by HT_SUM_SPAN elements */

    struct ht_list waiters;
    struct ht_list inval; /* optim.invals: ranges [inval_first, inval_last] to invalidate */
    uint64_t inval_first, inval_last, inval_ticket;
};

/* The client that alone may steer a root. */
struct claim {
    uint64_t id; /* 0: nobody */
    int pid;
    char name[HT_OPTIM_CLAIM_MAX + 1];
};

/* What was refused last, and has not succeeded since. */
struct refusal {
    enum ht_event_code code; /* what kind of thing */
    uint64_t oid;            /* of which parameter; 0: of the root */
    uint64_t step;           /* boundaries that were done then */
    time_t time;
    char text[HT_OPTIM_ERROR_MAX]; /* empty: nothing */
};

struct root {
    struct ht_optim *o;
    uint64_t id, seq;
    unsigned refs;
    struct ht_list all, params, touched, queue;
    struct ht_list ready; /* optim.ready while queue is not empty and hold is not set */
    struct ht_id_link by_id;
    bool exists; /* the log has it */
    bool configured;
    struct ht_optim_config config, published_config, latched;
    bool gate, draining, hold;
    uint64_t open;       /* number of the open step; 0: none is */
    uint64_t open_words; /* the last change of words that it knows */
    struct claim claim;
    bool ending;     /* draining goes on after the boundary, until the root is none any more */
    bool norm_known; /* grad_norm is that of the last boundary */
    double grad_norm;
    uint64_t step_nonfinite;   /* found by measuring */
    uint64_t skipped, clipped; /* steps since mount */
    uint64_t step, pub_step, durable_step;
    uint64_t undurable;     /* boundaries since the last publication */
    uint64_t pending;       /* QUEUED or RUNNING, of all parameters */
    uint64_t running;       /* taken by a worker and not wholly finished */
    uint64_t backlog_bytes; /* gradients of the pending ranges */
    int failure;            /* first error of an update since the last abort */
    uint64_t grad_bytes, added_elements, updated_elements, nonfinite, update_ns, commit_ns;
    struct refusal error;
    uint64_t refusals; /* since mount */
};

/* check.c. What reading the log to its end found: taken out and remembered for fsck, where the store leaves out. */
int ht_opt_check_states(struct ht_optim *o) HT_CHECK;
void ht_opt_problems_free(struct ht_optim *o);

/* For fsck: see owner.c. */
struct state_owner {
    uint64_t oid, param;
    const char *name;
};

struct worker {
    struct ht_optim *o;
    pthread_t thread;
    bool started;
    int near; /* place of the NUMA node that it should run on, then that it runs on; HT_NEAR_ANY */
};

struct ht_optim {
    struct ht_store *store;
    struct ht_optim_hooks hooks;
    struct ht_mutex lock;
    pthread_cond_t changed; /* some state that somebody waits for */
    pthread_cond_t work;    /* for workers: ready is not empty, or stopping */
    pthread_cond_t notify;  /* for the helper */
    bool started, stopping, helper_started;
    const struct ht_kernels *kernels;

    struct ht_list roots, params; /* by seq */
    struct ht_id_table roots_by_id, params_by_oid;
    uint64_t next_seq;
    uint64_t meta_bytes; /* of roots, parameters and ranges */
    uint64_t last_step_number, last_claim;
    uint64_t words_changes; /* of roots and of what amends them */
    struct state_owner *owners;
    size_t owner_count;
    struct ht_list problems;    /* found when the log had been read (check.c) */
    struct ht_list ready;       /* roots with ranges to take, in turn */
    uint64_t backlog_bytes_max; /* of one root: from then on those who write its gradients wait */

    struct ht_list invals; /* parameters, by ticket */
    uint64_t inval_issued, inval_done;
    struct ht_waiter *wakes; /* chain of waiters that the helper wakes */
    pthread_t helper;

    unsigned threads;
    struct worker worker[THREADS_MAX];
};

static inline void lock(struct ht_optim *o)
{
    ht_mutex_lock(&o->lock);
}

static inline void unlock(struct ht_optim *o)
{
    ht_mutex_unlock(&o->lock);
}

static inline void wait_changed(struct ht_optim *o)
{
    ht_cond_wait(&o->changed, &o->lock);
}

static inline void tell_changed(struct ht_optim *o)
{
    pthread_cond_broadcast(&o->changed);
}

/* ------------------------------------------------------------------ root.c */

struct root *ht_opt_root_find(struct ht_optim *o, uint64_t id); /* locked; no reference */
struct root *ht_opt_root_make(struct ht_optim *o, uint64_t id); /* locked; NULL: no memory */
struct root *ht_opt_root_get(struct ht_optim *o, uint64_t id);  /* takes the lock; a reference or NULL */
void ht_opt_root_put(struct root *r);                           /* takes the lock */
void ht_opt_root_put_locked(struct root *r);
/* One at a time; waits. -ECANCELED: stopping. Locked. */
int ht_opt_gate_enter(struct root *r) HT_CHECK;
void ht_opt_gate_leave(struct root *r);
/* No step is open, and none waits for its publication. Locked. */
bool ht_opt_root_idle(const struct root *r);
/* Wait until gradients may be written and frozen. Locked. */
int ht_opt_wait_open(struct root *r) HT_CHECK;
/* Keep text as the root's error, with the parameter's name before it (oid 0: none), and raise an event. Not locked. */
void ht_opt_refuse(struct root *r, enum ht_event_code code, uint64_t oid, const char *fmt, ...) HT_PRINTF(4, 5);

/* Locked: a thing of this kind succeeded, of this parameter (0: of the root): an error that says it was refused ends. */
void ht_opt_succeeded(struct root *r, enum ht_event_code code, uint64_t oid);

/* A later step may find no space. With or without the lock. */
void ht_opt_not_reserved(const struct param *p, const char *text);

/* ----------------------------------------------------------------- param.c */

struct param *ht_opt_param_find(struct ht_optim *o, uint64_t oid); /* locked; no reference */
struct param *ht_opt_param_make(struct root *r, uint64_t oid);     /* locked; NULL: no memory */
struct param *ht_opt_param_get(struct ht_optim *o, uint64_t oid);  /* takes the lock */
void ht_opt_param_put(struct param *p);                            /* takes the lock */
void ht_opt_param_free(struct param *p);                           /* locked; no references, drops objects */
void ht_opt_param_put_objects(struct param *p);                    /* locked */
void ht_opt_put_state(struct param *p);                            /* locked: references to state objects */
/* Locked: let go of everything of a parameter that is gone, unless an update is running. */
void ht_opt_param_settle(struct param *p);
struct layout ht_opt_layout(const struct ht_optim_config *config, uint8_t dtype);
bool ht_opt_same_layout(const struct layout *a, const struct layout *b);
/* The same, however masters are kept. */
bool ht_opt_same_rule_state(const struct layout *a, const struct layout *b);
/* Kinds at its end that are the master's: 0, 1 (f32) or 2 (missing bits, blocks). */
unsigned ht_opt_master_kinds(const struct layout *l);
/* Under the gate, not locked: make zero state and reserve one rewrite of everything. -ENOSPC leaves all as it was. */
int ht_opt_state_create(struct param *p, const struct layout *layout) HT_CHECK;
/* Space for the gradient outside memory: as long as there is state. Without, that for sums is given back. */
int ht_opt_grad_reserve(struct param *p) HT_CHECK;
/* Inside a transaction, locked: delete the current state's objects. */
void ht_opt_state_delete(struct param *p, struct ht_tx *tx);
/* Inside a transaction, locked: its file goes, or its root: so do its state, what is queued and who waits. */
void ht_opt_param_bury(struct param *p, struct ht_tx *tx);
/* Raise an event: some of its state is not there. */
void ht_opt_state_not_deleted(const struct param *p);
/* Take references to cur's objects that are missing. Locked. */
int ht_opt_state_load(struct param *p) HT_CHECK;
/* Not locked: delete (pending) the state of parameters of which the object does not exist. */
int ht_opt_bury_orphans(struct root *root) HT_CHECK;
/* Inside a transaction, locked, no references left: free a parameter that is gone and not in the log any more. */
void ht_opt_param_sweep(struct param *p, struct ht_tx *tx);

/* ----------------------------------------------------------------- range.c */

int ht_opt_shape_of(struct shape *out, uint64_t bytes, uint32_t chunk_bytes, uint8_t dtype,
                    uint8_t grad_dtype) HT_CHECK;
/* That of the state there is: an abort may bring back another one than the last gradient was opened for. */
int ht_opt_state_shape(const struct param *p, struct shape *out) HT_CHECK;
int ht_opt_ranges_init(struct param *p, const struct shape *shape) HT_CHECK; /* locked; replaces what was there */
void ht_opt_ranges_free(struct param *p);
/* An object of state: its chunks, those that a whole range has, bytes of so many elements of a range, bytes of all. */
uint32_t ht_opt_state_chunk_bytes(const struct shape *s, uint8_t kind);
unsigned ht_opt_state_stride(const struct shape *s, uint8_t kind);
uint64_t ht_opt_state_range_bytes(uint8_t kind, uint64_t elements);
uint64_t ht_opt_state_bytes(const struct shape *s, uint8_t kind);
struct range *ht_opt_range_find(const struct param *p, uint64_t index); /* NULL: never touched */
struct range *ht_opt_range_make(struct param *p, uint64_t index);       /* NULL: no memory */
uint32_t ht_opt_range_elements(const struct param *p, uint64_t index);
uint32_t ht_opt_range_grad_bytes(const struct param *p, uint64_t index);
/* Locked: one of its sets of spans may have another size now. */
void ht_opt_range_count_spans(struct range *r);
/* Whether ranges of this parameter share chunks of the gradient with their neighbours. */
bool ht_opt_ranges_share(const struct param *p);
/* Locked: queue a range for a worker; take it off again (state IDLE). work: of enum range_work. */
void ht_opt_range_queue(struct range *r, unsigned work);
void ht_opt_range_unqueue(struct range *r);
/* Locked: forget all coverage; nothing may be RUNNING. frozen_only: written bytes stay. */
void ht_opt_coverage_clear(struct param *p, bool frozen_only);
/* Locked, let go meanwhile: drop the gradient chunks of a range that nobody needs any more. */
void ht_opt_range_drop(struct range *r);
/* Is the parameter's content, or state, of this range about to change? */
bool ht_opt_range_updating(const struct range *r);
/* Of a root whose queue is not empty: what a worker there should take. Locked. */
struct range *ht_opt_range_next(const struct root *root, int near);
void ht_opt_root_ready(struct root *r); /* locked: put it on the ready list if it has work */

/* ---------------------------------------------------------------- master.c */

/* A parameter with masters in two bytes; references of the caller. */
struct ht_opt_masters {
    const struct ht_kernels *kernels;
    struct shape shape;
    struct ht_obj *p, *low, *blocks;
};
/* Bytes of the f32 that they stand for. Not locked. WAITS. */
ssize_t ht_opt_masters_read(const struct ht_opt_masters *m, uint64_t off, void *buf, size_t len) HT_CHECK;
/* Nobody else changes them meanwhile. -EINVAL: no whole elements; -EDOM: one does not round to the parameter, *out_element.
 * Then nothing was changed. */
ssize_t ht_opt_masters_write(const struct ht_opt_masters *m, uint64_t off, const void *buf, size_t len,
                             uint64_t *out_element) HT_CHECK;

/* ---------------------------------------------------------------- notify.c */

void *ht_opt_helper_main(void *o);
/* Locked: ask for invalidation of ranges; returns a ticket for ht_opt_inval_wait. */
uint64_t ht_opt_inval(struct param *p, uint64_t first, uint64_t last);
void ht_opt_inval_wait(struct ht_optim *o, uint64_t ticket); /* locked, let go meanwhile */
/* Locked: move waiters that may go on to chain, to be woken with ht_opt_wake after unlocking. */
void ht_opt_take_waiters(struct param *p, struct ht_waiter **chain);
void ht_opt_wake(struct ht_waiter *chain);
/* Locked: let the helper wake them. */
void ht_opt_wake_later(struct ht_optim *o, struct ht_waiter *chain);

/* ------------------------------------------------------------ grad_open.c */

/* The parameter of desc, ready to take a gradient; one more opener and reference. Errors as of ht_grad_open, told. */
int ht_opt_param_open(struct root *root, const struct ht_param_desc *desc, struct param **out) HT_CHECK;
/* Under the gate, not locked: an object for this parameter that is never published. */
int ht_opt_scratch_create(const struct param *p, uint32_t chunk_bytes, struct ht_obj **out) HT_CHECK;
int ht_opt_scratch_delete(const struct param *p, struct ht_obj **obj) HT_CHECK;

/* --------------------------------------------------- grad.c, grad_flush.c */

/* Bytes of a gradient. */
struct ht_opt_window {
    uint64_t begin, end;
};

struct ht_grad {
    struct param *param;
    /* What follows is true as long as param.forgotten is since. */
    uint64_t since;
    struct ht_opt_window mine; /* from the first to the last byte written since the last flush; end 0: none */
    bool spoiled;              /* a write went beyond the end: the next flush refuses what this opener wrote */
    uint64_t sized;            /* size that was set after the last write, for the next flush; 0: none */

    bool wrote; /* ever */
};

/* Is a write of any of these bytes in progress? Locked. */
bool ht_opt_grad_in_flight(const struct param *p, uint64_t begin, uint64_t end);
struct param *ht_opt_grad_param(const struct ht_grad *g);
/* Locked: an abort or a drop ended what the opener had written: it begins anew. */
void ht_opt_grad_refresh(struct ht_grad *g);
/* What the opener left out and counts as zeros; not locked. Errors as of ht_grad_write, told. WAITS. */
int ht_opt_grad_fill_holes(struct ht_grad *g) HT_CHECK;
/* Locked: a write of this opener went beyond the end: drop what it wrote, and have its next flush say so. */
void ht_opt_grad_spoil(struct ht_grad *g);
/*
 * Write a whole gradient, all of it or nothing: fill gets one window after the other, in order and zeroed, and puts its
 * elements in. window: memory for a whole number of elements. Errors as of ht_grad_write, told, or those of fill. WAITS.
 */
typedef int (*ht_opt_fill_fn)(void *ctx, uint64_t off, void *buf, size_t len);
int ht_opt_grad_make(struct ht_grad *g, void *window, size_t window_bytes, ht_opt_fill_fn fill, void *ctx) HT_CHECK;

/* ------------------------------------------------------------------ drop.c */

/* Locked: take back what is queued; what runs ends by itself. */
void ht_opt_cancel(struct param *p);
/* Locked, let go meanwhile: no update runs. Waits for writes that copy, then forgets what was written, frozen and summed. */
void ht_opt_forget_gradient(struct param *p);

/* ------------------------------------------------------------ accumulate.c */

/* Gradients of each element that make a step: the open one, or the next. Locked. */
uint32_t ht_opt_accumulate(const struct root *root);
/* Under the gate, not locked: the object for its sums. */
int ht_opt_sum_create(struct param *p) HT_CHECK;
/* Locked: space for its sums outside memory, or give it back when nothing is accumulated. -ENOSPC */
int ht_opt_sum_reserve(struct param *p) HT_CHECK;
/* Locked: is this range having a gradient added, after which it takes the next one? */
bool ht_opt_range_adding(const struct range *r);
/* Locked: may no more be written to it in this step? */
bool ht_opt_range_full(const struct range *r);
/* Does its gradient come from its sum? */
bool ht_opt_range_summed(const struct range *r);
/* What of a range is to be measured or updated: spans of gradient bytes. whole: room for one. */
const struct ht_span *ht_opt_range_cover(const struct range *r, struct ht_span *whole, uint32_t *out_count);
/* Locked: a whole gradient has been added: make room for the next. */
void ht_opt_range_added(struct range *r);
/* Locked, let go meanwhile: drop its sum. */
void ht_opt_sum_drop(struct range *r);

/* ------------------------------------------------------------------ norm.c */

/* Elements of one entry of param.sums: every range is a whole number of them, but the last. */
enum { HT_SUM_SPAN = 16 * HT_SUM_BLOCK };
/* Do updates of this step wait for its boundary, because they depend on all of its gradients? */
bool ht_opt_deferred(const struct root *root);
/* Locked: into the root's or the parameter's scalars, before its first range is queued. */
void ht_opt_scale(struct param *p);
/*
 * At the boundary of a deferred step, draining; locked, let go meanwhile: find the norm, then queue all updates.
 * *out_skip: none was queued, the step is to change nothing.
 */
int ht_opt_whole_step(struct root *root, bool *out_skip) HT_CHECK;

/* ------------------------------------------------------------------ step.c */

/* Makes durable what is below a root that has no open step, whoever has claimed it; the step is not counted. WAITS. */
int ht_opt_publish_closed(struct root *root) HT_CHECK;
/* Locked: queue whatever is frozen and not queued yet; drop caches of it if updates follow. */
void ht_opt_queue_frozen(struct root *root, bool updates);
/* Locked, let go meanwhile: until nothing of the root is queued or running. -EIO: something failed; -ECANCELED: stopping. */
int ht_opt_drain(struct root *root) HT_CHECK;

/* ----------------------------------------------------------------- words.c */

/* What a parameter's gradient is applied with, and what it was read for. */
struct words {
    struct ht_optim_config config;
    uint64_t step, changes; /* root.open and optim.words_changes when it was read */
    bool read;
    int error;    /* they make no sense together */
    bool refused; /* out: for that reason nothing was applied */
    char why[HT_OPTIM_ERROR_MAX];
};
/* Is it that of the open step, or of the one that would open now? Locked. */
bool ht_opt_words_current(const struct param *p, const struct words *w);
/* Locked, let go meanwhile. */
void ht_opt_words_read(struct param *p, struct words *w);

/* ----------------------------------------------------------------- steer.c */

void ht_opt_step_numbers_begin(struct ht_optim *o);
/* Locked: a step opens; it gets its number and its hyper-parameters. */
void ht_opt_step_opens(struct root *root);
/* Locked: 0, or -EBUSY or -ESTALE with the reason in why. by NULL: a client without claim and condition. */
int ht_opt_may_steer(const struct root *root, const struct ht_optim_steer *by, char why[HT_OPTIM_ERROR_MAX]) HT_CHECK;
/* Not locked: keep that reason as the root's error and for the caller. */
void ht_opt_refuse_steering(struct root *root, struct ht_optim_steer *by, const char *why);
/* ht_opt_gate_enter for such a command, which is not in the gate when it is refused; then by->why says so. Locked, let go meanwhile. */
int ht_opt_gate_enter_by(struct root *root, struct ht_optim_steer *by) HT_CHECK;

/* ---------------------------------------------------------------- update.c */

void *ht_opt_worker_main(void *worker);

/* --------------------------------------------------------------- records.c */

int ht_opt_replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len);
int ht_opt_replayed(void *ctx);
int ht_opt_emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes);
uint64_t ht_opt_param_claim(void);
uint64_t ht_opt_root_claim(void);
void ht_opt_put_root(struct ht_buf *b, const struct root *r);
void ht_opt_put_root_del(struct ht_buf *b, uint64_t id);
/* Inside a transaction, locked: one parameter's record, if the log has another one; frees it if it is gone. */
void ht_opt_publish_param(struct param *p, struct ht_tx *tx);
/* Inside a transaction, locked: everything of the root that is not in the log; what is in it is pub from then on. */
void ht_opt_publish(struct root *r, struct ht_tx *tx);
size_t ht_opt_pending_bytes(struct root *r); /* locked */
/* Locked: has it counts that are not in the log? */
bool ht_opt_is_unpublished(const struct root *r);

#endif
