/* SPDX-License-Identifier: Apache-2.0 */
/*
 * optim.h - the optimizer in the store: gradients in, new parameters out.
 *
 * A root is a scope of the store (its id is the inode number of the root directory). A
 * parameter is an object of that scope with a float dtype; its optimizer state lives in objects of the same scope.
 *
 *   gradient closed -> ranges frozen and queued -> update by a worker -> boundary -> durable
 *
 * One step of a root:
 *   OPEN     from the first queued gradient (which latches the hyper-parameters) to the boundary
 *   CLOSING  a boundary was requested: the queue is being worked off; new gradients are queued, not run
 *   IDLE     nothing queued since the last boundary
 *
 * Range = one chunk of the parameter. It is updated when all its elements are covered by frozen gradient elements
 * (accumulate=S: S times). A range that is covered in part, or too few times, waits, and is EBUSY at the boundary. With
 * partial=1 in the configuration exactly the covered elements are updated there, each by the sum of its gradients.
 *
 * Lock order: transaction > names > optimizer > store. Callbacks of struct ht_optim_hooks are called with no
 * optimizer lock held. WAITS: may block on I/O and updates, call with no lock held.
 */
#pragma once

#include "optim/rules/config.h"
#include "tiering/api/object.h"
#include "tiering/api/store.h"
#include "tiering/api/tx.h"
#include <hitrain/words.h>

struct ht_optim;
struct ht_grad;
struct ht_quota_user; /* tiering/base/quota.h */

/* ------------------------------------------------------------------- life */

/* The file of a parameter has a name; has none, but is in use; is deleted, perhaps pending. */
enum ht_optim_file { HT_OPTIM_FILE_NAMED, HT_OPTIM_FILE_UNLINKED, HT_OPTIM_FILE_DELETED };

struct ht_optim_hooks {
    void *ctx;
    /* The object's bytes [off, off+len) changed or are about to: drop cached copies. May block; no lock held. */
    void (*invalidate)(void *ctx, uint64_t oid, uint64_t off, uint64_t len);
    /* The name of a parameter for messages, into buf. */
    void (*name)(void *ctx, uint64_t oid, char *buf, size_t cap);
    /* The state of its file. NULL: all files have names. */
    enum ht_optim_file (*file)(void *ctx, uint64_t oid);
    /*
     * The words of a parameter: those of base, amended by its own and those of directories above it, as they were when
     * change number as_of was the last (UINT64_MAX: now). sections: empty, and gets those of its own, which the caller
     * frees, also after an error; NULL: they are not asked for. -EINVAL with the reason in err: together they make no
     * sense. May be NULL.
     */
    int (*override)(void *ctx, uint64_t oid, uint64_t as_of, const struct ht_optim_config *base,
                    struct ht_optim_config *out, struct ht_optim_sections *sections, char err[HT_OPTIM_ERROR_MAX]);
    /* Names and attributes were taken back, by no request: drop cached copies. May block. May be NULL. */
    void (*taken_back)(void *ctx);
    /* Has its maker not committed it? Then an orderly end publishes nothing of it. May be NULL. */
    bool (*half_made)(void *ctx, uint64_t root);
    /* An abort computes logged steps of the root again, which may take long. May be NULL. */
    void (*replay_begins)(void *ctx, uint64_t root);
};

/*
 * For ht_participant_optim. Its start begins the workers; logged steps are computed again in the background. -EROFS: a
 * read-only mount has some; a message says what to do.
 */
struct ht_optim_setup {
    unsigned threads; /* 0: one per CPU */
    bool no_replay;   /* a read-only mount shows models as of their last full step */
    const struct ht_optim_hooks *hooks;
};
/*
 * An orderly end, when no client is left and before ht_optim_stop: makes changes below roots without an open step
 * durable. A root with an open step keeps nothing since its last durable step; an event names it. Returns the first
 * error. WAITS.
 */
int ht_optim_finish(struct ht_optim *o) HT_MUST_CHECK;
/*
 * Finishes running updates, stops workers, and drops queued updates (a step that was not committed is not kept). Before
 * ht_store_unmount.
 */
void ht_optim_stop(struct ht_optim *o);

/* ------------------------------------------------------------------ roots */

/*
 * Makes or (after a mount) finds the root. Inside a transaction; a new root's record goes into tx. tx NULL: only find,
 * else -ENOENT.
 */
int ht_optim_root_add(struct ht_optim *o, uint64_t root, const struct ht_optim_config *config,
                      struct ht_tx *tx) HT_MUST_CHECK;
/*
 * New hyper-parameters, used from the next step on. Another rule while state exists: -EBUSY. Other state_bits while a
 * step is open: -EAGAIN; else the next durable boundary converts state that exists.
 */
int ht_optim_root_configure(struct ht_optim *o, uint64_t root, const struct ht_optim_config *config) HT_MUST_CHECK;
/*
 * Words that amend a root's are about to change: the number of this change. A step that opened before goes on with
 * those that were in force then. ht_optim_words_as_of: the last change that the root's open
 * step knows; UINT64_MAX: no step is open.
 */
uint64_t ht_optim_words_change(struct ht_optim *o);
uint64_t ht_optim_words_as_of(struct ht_optim *o, uint64_t root);
/*
 * The words of a parameter, as its next step would have them (oid 0: of the root). -ENOENT: no
 * root. -EINVAL, see the hook.
 */
int ht_optim_words_of(struct ht_optim *o, uint64_t root, uint64_t oid, struct ht_optim_config *out,
                      char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
/*
 * For fsck. Could this be the content of a chunk of state: no longer than its form needs, with scales that an update
 * writes? True for other objects, and for f32.
 */
bool ht_optim_state_sane(struct ht_optim *o, uint64_t oid, uint64_t chunk, const uint8_t *content, size_t len);
/* How many parameters have state in another form than f32. */
uint64_t ht_optim_formed(struct ht_optim *o);
/* Of the state of this parameter: 32, 16 or 8; 0: it has none. */
unsigned ht_optim_state_bits(struct ht_optim *o, uint64_t oid);
/* Does the state of this parameter, if it has any, fit these words? */
bool ht_optim_state_fits(struct ht_optim *o, uint64_t oid, const struct ht_optim_config *config);
/*
 * Ends being a root: commits the open step, then calls unmake, which is to take the root out of the names in a
 * transaction that also calls ht_scope_end. From before the commit until unmake has returned no client can
 * write a gradient or steer, so no step is open when unmake publishes. Every reason for a refusal is found before
 * unmake is called: -EBUSY when the commit is refused (a parameter is partly covered, named in the error; nothing has
 * changed then). Else returns the error of the commit, or of unmake. WAITS.
 */
int ht_optim_root_end(struct ht_optim *o, uint64_t root, int (*unmake)(void *ctx), void *ctx) HT_MUST_CHECK;
enum { HT_OPTIM_CLAIM_MAX = 64 }; /* characters of a claim's name */

struct ht_root_stat {
    uint64_t step, durable_step;
    uint64_t logged_steps;                    /* of the durable ones: those since the last full step */
    uint64_t logged_bytes;                    /* of these, and of those that are kept for readers */
    uint64_t delta_bytes;                     /* of deltas that can be read: in the store, and of memory */
    uint64_t delta_lineage;                   /* of the last delta, or of the model that none leads from */
    uint64_t redo_reserved_bytes;             /* set aside for the steps until the next full one */
    uint64_t replay_steps, replay_steps_left; /* logged steps that are computed again, and those to come */
    uint64_t replay_seconds_left;             /* an estimate; 0 until one step has ended */
    bool open;                                /* a step is open */
    uint64_t step_open;                       /* its number; 0: none is open */
    uint64_t parameters;                      /* with state */
    uint64_t grad_bytes;                      /* gradient bytes accepted since mount */
    uint64_t updated_elements;                /* since mount */
    uint64_t added_elements;                  /* of gradients, to sums (accumulate), since mount */
    uint64_t sum_resident_bytes,
        sum_stored_bytes;      /* of sums: in the DRAM tier, and on devices for want of room there */
    uint64_t nonfinite;        /* gradient elements, since mount; of sums with accumulate: an element once in a step */
    uint64_t skipped, clipped; /* steps, since mount */
    bool norm_known;           /* max_grad_norm or skip_nonfinite was set in the last step */
    double grad_norm;          /* of the last step: all gradients, unscaled, before clipping */
    uint64_t state_bytes;
    uint64_t update_ns;                      /* worker time spent in updates since mount */
    uint64_t commit_ns;                      /* time in commits since mount */
    uint64_t step_written_bytes;             /* to devices, of all below the root, between its last two boundaries */
    char error[HT_OPTIM_ERROR_MAX];          /* last refused thing, until the same succeeds; empty when none */
    uint64_t error_step;                     /* steps that were done then */
    int64_t error_time;                      /* seconds since 1970 */
    uint64_t refusals;                       /* since mount */
    char claimed_by[HT_OPTIM_CLAIM_MAX + 1]; /* empty: not claimed */
    int claimed_pid;
};
/* Without sum_resident_bytes and sum_stored_bytes: those are 0. Costs the same for any number of parameters. */
int ht_optim_root_stat(struct ht_optim *o, uint64_t root, struct ht_root_stat *out);
/* Adds sum_resident_bytes and sum_stored_bytes of all parameters that have a sum, a few at a time under the lock. */
void ht_optim_root_sums(struct ht_optim *o, uint64_t root, struct ht_root_stat *out);
void ht_optim_root_clear_error(struct ht_optim *o, uint64_t root);
/* The trainer sets the step number (resume from elsewhere). -EBUSY while a step is open. */
int ht_optim_root_set_step(struct ht_optim *o, uint64_t root, uint64_t step) HT_MUST_CHECK;
/* A file has another name, or one more. Is it a parameter with state? Its root begins another lineage then. */
bool ht_optim_renamed(struct ht_optim *o, uint64_t oid);

/* -------------------------------------------------------------- gradients */

struct ht_param_desc {
    uint64_t root;
    struct ht_obj *obj; /* the parameter's bytes; the optimizer takes its own reference */
    uint8_t dtype;      /* f32, bf16 or f16 */
    uint8_t grad_dtype; /* f32, bf16 or f16 */
};
/*
 * Opens the gradient of a parameter; several openers share it. -EINVAL: dtype not supported, or another element count
 * than the state has (reset it).
 */
int ht_grad_open(struct ht_optim *o, const struct ht_param_desc *desc, struct ht_grad **out) HT_MUST_CHECK;
/*
 * Right after it was opened: the opener writes nothing outside its part. has() says whether a byte of the gradient is
 * in it, the same for all bytes of a chunk of the parameter. It is called with locks held. ctx lives as long as g.
 */
typedef bool (*ht_grad_part_fn)(const void *ctx, uint64_t off);
void ht_grad_set_part(struct ht_grad *g, ht_grad_part_fn has, const void *ctx);
/*
 * Right after it was opened: ht_grad_discard drops exactly what this opener wrote. Otherwise it drops what lies between
 * its first and its last byte, too, whoever wrote it. The memory for that is a part of its user's, and
 * writes are -EDQUOT where the user has too little. The optimizer's lock guards user, which outlives g.
 */
void ht_grad_keep_account(struct ht_grad *g, struct ht_quota_user *user);
/*
 * Bytes of the gradient at off. -EINVAL beyond the parameter; -EBUSY for elements already queued in this step
 * (accumulate=S: all S times; before that it waits until the one before has been added). WAITS.
 */
ssize_t ht_grad_write(struct ht_grad *g, uint64_t off, const void *buf, size_t len) HT_MUST_CHECK;
/* The same, but -EAGAIN, with nothing done, if that one waits for a boundary, updates or another write. */
ssize_t ht_grad_try_write(struct ht_grad *g, uint64_t off, const void *buf, size_t len) HT_MUST_CHECK;
/*
 * The opener has set the size of the whole gradient, as copying programs do if the last part is a hole. Unless it goes
 * on writing, its next flush takes unwritten bytes for zeros. A smaller size with nothing written is -EINVAL at the
 * flush, a larger one at once.
 */
int ht_grad_set_size(struct ht_grad *g, uint64_t bytes) HT_MUST_CHECK;
/* This opener never wrote anything, and no write was refused. */
bool ht_grad_unused(struct ht_grad *g);
/* Bytes that were written and are not consumed yet; zeros elsewhere. */
ssize_t ht_grad_read(struct ht_grad *g, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
/*
 * FLUSH: freeze and queue the whole elements that this opener wrote since its last one. Marks ranges pending and
 * invalidates the parameter's cached range before it returns. The first one of a new parameter creates its
 * state: -ENOSPC then leaves everything as it was and the gradient unapplied. -EINVAL: the gradient had ended inside an
 * element (that gradient is dropped, named in the root's error).
 */
int ht_grad_flush(struct ht_grad *g) HT_MUST_CHECK;
/* The opener wrote beyond the end of its part: drops its bytes since its last flush, and makes the next one -EINVAL. */
void ht_grad_refuse(struct ht_grad *g);
/* Drops the bytes that this opener wrote since its last flush. */
void ht_grad_discard(struct ht_grad *g);
void ht_grad_release(struct ht_grad *g);
uint64_t ht_grad_size(struct ht_grad *g); /* bytes of a whole gradient */

/*
 * Sparse gradients (hitrain/topk.h): the same as a dense one with zeros for all other elements, bit for bit. A flush
 * checks the whole content before it applies anything: -EINVAL, named in the root's error, and nothing changes. Content
 * that is shorter than its header says stays for the next flush; release drops it.
 */
struct ht_topk;
int ht_topk_open(struct ht_optim *o, const struct ht_param_desc *desc, struct ht_topk **out) HT_MUST_CHECK;
ssize_t ht_topk_write(struct ht_topk *t, uint64_t off, const void *buf,
                      size_t len) HT_MUST_CHECK;    /* WAITS for memory */
int ht_topk_flush(struct ht_topk *t) HT_MUST_CHECK; /* WAITS */
void ht_topk_release(struct ht_topk *t);

/* ---------------------------------------------------------- two phases (muon) */

/*
 * What a client is to orthogonalise: bf16, as many elements as the parameter. Waits for workers. -EBUSY: no worker
 * makes it yet: a gradient is missing, or ht_optim_prepare_by; or it was applied. -ENODATA: the step is
 * skipped. -ESTALE: the step ended meanwhile. All but the last are named in the root's error,
 * as those of the next two. WAITS.
 */
ssize_t ht_optim_update_read(struct ht_optim *o, const struct ht_param_desc *desc, uint64_t off, void *buf,
                             size_t len) HT_MUST_CHECK;
/*
 * And its result. -EBUSY: before the former was read in this step, or after it was applied. -EINVAL: half
 * elements, or beyond the end. -EDQUOT: too much waits to be applied. WAITS.
 */
ssize_t ht_optim_ortho_write(struct ht_optim *o, const struct ht_param_desc *desc, uint64_t off, const void *buf,
                             size_t len) HT_MUST_CHECK;
/*
 * Updates the parameter by it, in the step with that number. -ESTALE: it is not the open one. -EINVAL: it is not
 * written wholly, or a value is not finite; then nothing is applied. -EBUSY as for
 * writing. -ENOENT: never had a gradient. WAITS.
 */
int ht_optim_ortho_apply(struct ht_optim *o, uint64_t root, uint64_t oid, uint64_t step_open) HT_MUST_CHECK;

/* ------------------------------------------------------------ parameters */

/* Called once, by the thread that completed the work, with no lock held. */
struct ht_waiter {
    void (*wake)(struct ht_waiter *w);
    struct ht_list link_;
    uint64_t first_, last_;
};
/*
 * May [off, off+len) of object oid be read now? 0 at once when no queued update touches it (or it is no parameter).
 * -EAGAIN: not yet; w->wake is called when the updates have been applied, unless w is NULL. -EIO: logged steps could
 * not be computed again, and nobody reads an earlier step in silence. Every reader of parameters asks this.
 */
int ht_optim_readable(struct ht_optim *o, uint64_t oid, uint64_t off, uint64_t len, struct ht_waiter *w);
/*
 * Are logged steps computed again that change this parameter? Then it is not readable, and no client may map its
 * memory.
 */
bool ht_optim_replaying(struct ht_optim *o, uint64_t oid);
/* The same of any parameter of a root. */
bool ht_optim_root_replaying(struct ht_optim *o, uint64_t root);
/*
 * A thread's interrupt flag was set (tiering/base/activity.h): if its call waits for such a replay, it returns -EINTR
 * and has done nothing.
 */
void ht_optim_interrupt(struct ht_optim *o);
/* Removes a waiter. True: it was still waiting and will not be called. */
bool ht_optim_cancel(struct ht_optim *o, struct ht_waiter *w);
/*
 * True when this parameter has updates that no commit has published: publishing the file alone (its fsync) would mix
 * two steps. True also while its step is open.
 */
bool ht_optim_param_unpublished(struct ht_optim *o, uint64_t oid);
/*
 * -EBUSY: one of these files of a root is such a parameter. 0: none is, and none becomes one until
 * ht_optim_published_alone, because no update of the root begins. Both in one transaction.
 */
int ht_optim_publish_alone(struct ht_optim *o, uint64_t root, const uint64_t *oids, size_t count) HT_MUST_CHECK;
void ht_optim_published_alone(struct ht_optim *o, uint64_t root);
/*
 * The parameter is being deleted for good: forget it and its state (pending, as the object's own deletion; else with
 * tx). Inside a transaction.
 */
void ht_optim_param_deleted(struct ht_optim *o, uint64_t oid, bool pending, struct ht_tx *tx);

/*
 * State as f32 files. Names by index, or -ENOENT: those of the rule (exp_avg, momentum_buffer, ...), master for
 * parameters of two bytes, step.
 */
int ht_optim_state_name(struct ht_optim *o, const struct ht_param_desc *desc, unsigned index, const char **out_name);
/* Size of the file: elements x 4, or 4 for "step". 0 while there is no state. -ENOENT: unknown name. */
int64_t ht_optim_state_size(struct ht_optim *o, const struct ht_param_desc *desc, const char *name);
/* Waits for the queued updates of the range. reader: for readahead, or NULL. WAITS. */
ssize_t ht_optim_state_read_for(struct ht_optim *o, const struct ht_param_desc *desc, const char *name,
                                struct ht_obj_reader *reader, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
static inline HT_MUST_CHECK ssize_t ht_optim_state_read(struct ht_optim *o, const struct ht_param_desc *desc,
                                                        const char *name, uint64_t off, void *buf, size_t len)
{
    return ht_optim_state_read_for(o, desc, name, NULL, off, buf, len);
}
/* As ht_obj_same, for a state of two parameters that do not change meanwhile. False also where it does not know. */
bool ht_optim_state_same(struct ht_optim *o, const struct ht_param_desc *a, const struct ht_param_desc *b,
                         const char *name, uint64_t off, uint64_t *out_end);
/*
 * Creates the state when there is none. -EBUSY while a step is open. -EINVAL beyond its size,
 * or half an element of "step". WAITS.
 */
ssize_t ht_optim_state_write(struct ht_optim *o, const struct ht_param_desc *desc, const char *name, uint64_t off,
                             const void *buf, size_t len) HT_MUST_CHECK;
/*
 * Calls fn with the object that has the bytes of a state. make: creates an absent state, and as for a write no
 * update runs then. -EOPNOTSUPP: the state is kept in another form; -ENOENT. WAITS.
 */
int ht_optim_state_object(struct ht_optim *o, const struct ht_param_desc *desc, const char *name, bool make,
                          int (*fn)(void *ctx, struct ht_obj *obj), void *ctx) HT_MUST_CHECK;
/*
 * For fsck, and for names of events: the parameter whose state an object is, and the name of the state ("exp_avg";
 * valid while o is). Works on a store that was only mounted, with no workers started. -ENOENT: the object is no state.
 */
int ht_optim_state_owner(struct ht_optim *o, uint64_t oid, uint64_t *out_param, const char **out_name) HT_MUST_CHECK;
/* The same for the object of a logged step: its root and its number. */
int ht_optim_redo_owner(struct ht_optim *o, uint64_t oid, uint64_t *out_root, uint64_t *out_step) HT_MUST_CHECK;
/*
 * For fsck: do logged steps of a root change this parameter, or have this state? Then they need it as the last full
 * step left it. *out_step: the first of all logged steps. -ENOENT: no. Without ht_optim_redo_check before, those of all
 * its parameters.
 */
int ht_optim_redo_needs(struct ht_optim *o, uint64_t oid, uint64_t *out_root, uint64_t *out_step) HT_MUST_CHECK;
/*
 * For fsck: reads what a mount would compute again. is_other: a file, or optimizer state, has this number. report: the
 * step of a root cannot be computed again, nor those after it; an error ends the check.
 */
struct ht_optim_redo_check {
    bool (*is_other)(void *ctx, uint64_t oid);
    int (*report)(void *ctx, uint64_t root, uint64_t step, const char *why);
    void *ctx;
    uint64_t steps; /* out: those that it would compute again */
    /* out: of these, summaries of HT_REDO_VERSION_CODED, of HT_REDO_VERSION_SECTIONS, of HT_REDO_VERSION_ORTHO */
    uint64_t coded, sections, ortho;
};
int ht_optim_redo_check(struct ht_optim *o, struct ht_optim_redo_check *check) HT_MUST_CHECK;
/* For fsck, after that check: bytes of space that a mount lacks to compute them again. */
uint64_t ht_optim_redo_lacks(struct ht_optim *o);
/* For fsck: forgets the last logged step without a record, if its number is at least step. Its object; 0: none. */
uint64_t ht_optim_redo_cut(struct ht_optim *o, uint64_t root, uint64_t step);
/* For fsck: problems that were found when the log had been read, and taken out. Returns how many. */
size_t ht_optim_check(struct ht_optim *o, void (*report)(void *ctx, const char *code, const char *text), void *ctx);
/* For fsck: each root, with parameter 0, and each parameter. fn is called with the lock held: it only takes notes. */
struct ht_optim_entry {
    uint64_t root, parameter;
    unsigned state_count;
    const uint64_t *states; /* objects */
};
int ht_optim_walk(struct ht_optim *o, int (*fn)(void *ctx, const struct ht_optim_entry *e), void *ctx) HT_MUST_CHECK;
/*
 * For fsck: removes it from memory without a record, so that a checkpoint leaves it out. Parameter 0: the root with all
 * its parameters.
 */
void ht_optim_forget(struct ht_optim *o, uint64_t root, uint64_t parameter);
/* For fsck: a configuration that changes nothing and fits the state of a root's parameters. */
const char *ht_optim_root_config(struct ht_optim *o, uint64_t root);
/* Sum of the device space of a parameter's state, for stats. */
uint64_t ht_optim_state_stored(struct ht_optim *o, uint64_t oid);
/* Heap that roots, parameters and the coverage of their gradients take. */
uint64_t ht_optim_meta_bytes(struct ht_optim *o);
/* Appends gates, steps and queues of the roots (tiering/base/dump.h). Any thread. */
void ht_optim_dump(struct ht_optim *o, struct ht_dump *d);
/* Asserts the invariants of roots, parameters and ranges (tiering/base/verify.h). Takes the lock. Any thread. */
void ht_optim_verify(struct ht_optim *o);

/* ----------------------------------------------------------- logged steps */

/* Those that can be read: durable ones, without gaps. last 0: none. Another lineage: another history. */
enum { HT_REDO_READABLE_MAX = 255 };
struct ht_redo_steps {
    uint64_t first, last, lineage;
    uint64_t publications; /* and aborts of the root, since the mount */
};
int ht_optim_redo_steps(struct ht_optim *o, uint64_t root, struct ht_redo_steps *out) HT_MUST_CHECK;
/* A step as a file: struct ht_redo_file, its summary, its gradients. It stays readable while it is open. -ENOENT. */
struct ht_optim_redo;
int ht_optim_redo_open(struct ht_optim *o, uint64_t root, uint64_t step, struct ht_optim_redo **out) HT_MUST_CHECK;
void ht_optim_redo_close(struct ht_optim_redo *r);
uint64_t ht_optim_redo_bytes(const struct ht_optim_redo *r);
ssize_t ht_optim_redo_read(struct ht_optim_redo *r, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;

/* ----------------------------------------------------------------- deltas */

/* Steps whose changes can be read (state/delta.h), without gaps. last 0: none. */
enum { HT_DELTAS_MAX = HT_DELTA_KEEP_MAX };
struct ht_delta_steps {
    uint64_t first, last;
};
int ht_optim_delta_steps(struct ht_optim *o, uint64_t root, struct ht_delta_steps *out) HT_MUST_CHECK;
/* The changes of a step. They stay readable while it is open, and do not change. -ENOENT: there are none. */
struct ht_delta;
int ht_optim_delta_open(struct ht_optim *o, uint64_t root, uint64_t step, struct ht_delta **out) HT_MUST_CHECK;
void ht_optim_delta_close(struct ht_delta *d);
struct ht_delta_stat {
    uint64_t step, base_step; /* base 0: no delta leads to this step; readers take the whole model */
    uint64_t lineage;         /* deltas of two lineages are of two histories */
    size_t params;            /* that have changed */
};
void ht_optim_delta_stat(const struct ht_delta *d, struct ht_delta_stat *out);
/* The parameter number i of these. */
struct ht_delta_change {
    uint64_t oid, elements, changed;
    uint8_t dtype;       /* of values */
    uint8_t index_bytes; /* of an index: 4, or 8 */
};
const struct ht_delta_change *ht_optim_delta_change(const struct ht_delta *d, size_t i);
/*
 * Bytes of its values, or of its indices (ascending, little-endian), of all that have changed one after the other.
 * Reads up to len at off; short only at the end. WAITS for a device.
 */
ssize_t ht_optim_delta_read(const struct ht_delta *d, size_t i, bool values, uint64_t off, void *buf,
                            size_t len) HT_MUST_CHECK;

/* --------------------------------------------------------------- steering */

/* The client that steers a root, and its condition. */
struct ht_optim_steer {
    uint64_t claim;               /* that the client holds; 0: none */
    bool conditional;             /* only while step_open of the root is the following number */
    uint64_t step_open;           /* 0: no step */
    bool full;                    /* a commit: with parameters and state, in place of logged steps */
    char why[HT_OPTIM_ERROR_MAX]; /* out: the reason of a refusal by claim or condition; else as it was */
    bool refused;                 /* out: by claim or condition */
};

struct ht_optim_claim {
    uint64_t held;        /* the client's claim; 0: none. It is replaced on success. */
    const char *name;     /* at most HT_OPTIM_CLAIM_MAX characters */
    const char *takeover; /* the claim of a client of this name may be taken; NULL: of none */
    int pid;              /* its process */
};
/*
 * The only client that may steer the root from now on. -EBUSY: another client is, named in why. Waits for the command
 * that runs. A claim ends with ht_optim_unclaim (any thread, no waiting; -ESTALE: it is not in
 * force) or with the root. WAITS.
 */
int ht_optim_claim(struct ht_optim *o, uint64_t root, struct ht_optim_claim *want,
                   char why[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
int ht_optim_unclaim(struct ht_optim *o, uint64_t root, uint64_t claim);
/* The process that has claimed the root, and "claimed by ..." in why. False: none has. */
bool ht_optim_claimed(struct ht_optim *o, uint64_t root, int *out_pid, char why[HT_OPTIM_ERROR_MAX]);

/* ---------------------------------------------------------------- control */

/*
 * Waits until readers of one parameter (oid) need not wait, or until all of the root (0) is applied and no step is
 * being closed. -EIO: an update, or such a step, failed. WAITS.
 */
int ht_optim_wait(struct ht_optim *o, uint64_t root, uint64_t oid) HT_MUST_CHECK;
/* Queue everything written to this gradient, as FLUSH does (for mapped or still open gradients). */
int ht_optim_apply(struct ht_optim *o, uint64_t root, uint64_t oid) HT_MUST_CHECK;
/*
 * Boundary; durable when durable_every says so. -EBUSY: a parameter is partly covered, named in the error, or another
 * client has claimed the root; -ESTALE: the condition does not hold, or the client's claim has ended; nothing has
 * happened then. So it is with all that are steered. WAITS.
 */
int ht_optim_step_by(struct ht_optim *o, uint64_t root, struct ht_optim_steer *by) HT_MUST_CHECK;
/*
 * The same boundary, but returns when it is requested: the open step takes no more gradients, and every refusal that
 * needs no update has been made. Updates, count and publication follow. Reads of a parameter wait for its own updates;
 * gradients, and all calls that end or change a step, wait for the end of this one. A failure after the return is in
 * the root's error, and gradients are -EIO until an abort, or until a step or commit succeeds. WAITS for the step
 * before.
 */
int ht_optim_step_async_by(struct ht_optim *o, uint64_t root, struct ht_optim_steer *by) HT_MUST_CHECK;
/* Boundary if a step is open, then everything below the root durable as one. WAITS. */
int ht_optim_commit_by(struct ht_optim *o, uint64_t root, struct ht_optim_steer *by) HT_MUST_CHECK;
/*
 * The first half of a boundary: checks coverage, decides whether the step is clipped or skipped, and begins its
 * updates; of rules in two phases the first one. The step stays open and takes no more gradients. A second call does
 * nothing. Refused as ht_optim_step_by. WAITS.
 */
int ht_optim_prepare_by(struct ht_optim *o, uint64_t root, struct ht_optim_steer *by) HT_MUST_CHECK;
/* Back to the last durable step. WAITS. */
int ht_optim_abort_by(struct ht_optim *o, uint64_t root, struct ht_optim_steer *by) HT_MUST_CHECK;
/*
 * A commit that keeps its step, under this name (NULL: under its number). If the commit was made and the step is not
 * kept, the root's error says why: -EEXIST: the name is taken; -ENOSPC. With retain_must neither is made then. Commits
 * keep steps by themselves as the words retain and retain_every say. A kept step is a root without gradients and steps
 * (-EROFS).
 */
int ht_optim_snapshot_by(struct ht_optim *o, uint64_t root, const char *name, struct ht_optim_steer *by) HT_MUST_CHECK;
/*
 * The model goes back to one of its kept steps, durable when this returns: names, attributes, content, state, counts.
 * Later kept steps stay. names: makes names and attributes those of the step (ht_ns_rollback). -EBUSY: a step is open,
 * a gradient has bytes that are not closed, or is open in another shape than then. -ESTALE: the kept step, or one of
 * its files, went meanwhile. -ENOSPC. After an error the model is as when the call began, and durable: changes that
 * others made below the root during the call are lost. to NULL: only waits until it could begin. WAITS.
 */
struct ht_copy_id;
struct ht_rollback {
    uint64_t kept; /* its directory */
    uint64_t step;
    const struct ht_optim_config *config; /* of the kept step */
    int (*names)(void *ctx, uint64_t root, uint64_t kept, struct ht_copy_id **out, size_t *out_count);
    void *ctx;
};
int ht_optim_rollback_by(struct ht_optim *o, uint64_t root, const struct ht_rollback *to,
                         struct ht_optim_steer *by) HT_MUST_CHECK;
/*
 * The next update of a parameter takes these numbers, from the summary of a logged step. So do all of its step: words,
 * scales and clipping have no part in it. Until the step ends or is aborted. -EINVAL: they do not fit; -EBUSY: the step
 * is open without such; -ENOENT: no state; with the reason in by->why. WAITS.
 */
struct ht_decision {
    uint64_t root, oid;
    uint8_t grad_dtype; /* that of the parameter's gradients */
    uint8_t bytes[72];  /* struct ht_disk_redo_param, or struct ht_disk_redo_section; its object does not count */
};
int ht_optim_decide(struct ht_optim *o, const struct ht_decision *d, struct ht_optim_steer *by) HT_MUST_CHECK;
/* The verdict alone: whether such a command would be refused now. */
int ht_optim_may_steer(struct ht_optim *o, uint64_t root, struct ht_optim_steer *by) HT_MUST_CHECK;
/*
 * Takes back the gradient of one parameter in the open step, of all its openers, as if it had not been written. When no
 * gradient is left in the step, none is open any more. A later flush does not hand over bytes from before. -EBUSY,
 * named in the error: a part has been applied; then nothing changes. by, here and in reset: as above, or NULL: a client
 * without a claim and a condition; its refusal is named in by->why alone. WAITS.
 */
int ht_optim_drop(struct ht_optim *o, uint64_t root, uint64_t oid, struct ht_optim_steer *by) HT_MUST_CHECK;
/* Drops the state of a parameter (moments zero, count zero). -EBUSY while its step is open. */
int ht_optim_reset(struct ht_optim *o, uint64_t root, uint64_t oid, struct ht_optim_steer *by) HT_MUST_CHECK;
