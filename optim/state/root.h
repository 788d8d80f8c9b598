/* SPDX-License-Identifier: Apache-2.0 */
/* root.h - model roots: the steps, the gate, claims and the last refusal. */
#pragma once

#include <time.h>
#include "tiering/base/event.h"
#include "optim/state/delta.h"
#include "optim/state/redo.h"
#include "optim/state/context.h"

/* The client that alone may steer a root. */
struct ht_claim {
    uint64_t id; /* 0: no client */
    int pid;
    char name[HT_OPTIM_CLAIM_MAX + 1];
};

/* The last refused action, unless it has succeeded since. */
struct ht_refusal {
    enum ht_event_code code; /* its kind */
    uint64_t oid;            /* of which parameter; 0: of the root */
    uint64_t step;           /* boundaries that were done then */
    time_t time;
    char text[HT_OPTIM_ERROR_MAX]; /* empty: nothing */
};

struct ht_root {
    struct ht_optim *o;
    uint64_t id, seq;
    unsigned refs HT_GUARDED_BY(HT_LOCK_OPTIM);
    struct ht_list all, params, touched;
    struct ht_list sums;    /* parameters with a sum of gradients */
    struct ht_list early;   /* ranges to add or measure, in order of arrival (state/queue.c) */
    struct ht_list queue;   /* parameters with ranges to update, the next one first */
    struct ht_list ready;   /* optim.ready or away while one of these is not empty and hold is not set */
    struct ht_list closing; /* optim.closings while a step waits for its closer */
    struct ht_id_link by_id;
    bool exists HT_GUARDED_BY(HT_LOCK_OPTIM); /* the log has it */
    bool configured HT_GUARDED_BY(HT_LOCK_OPTIM);
    bool frozen HT_GUARDED_BY(HT_LOCK_OPTIM); /* a kept step */
    /* form_changes at the last boundary that has converted state (step/convert.c), plus 1; 0: none has */
    uint32_t forms_seen HT_GUARDED_BY(HT_LOCK_OPTIM);
    struct ht_optim_config config, published_config, latched;
    HT_GUARDED_BY(HT_LOCK_OPTIM) struct {
        bool gate, draining, hold;
        bool alone;          /* a file is published alone: ranges are queued, none is taken */
        bool away;           /* content of a queued range is in the vault */
        bool reverting;      /* its content goes back to another step, object by object */
        bool async;          /* the closer has the gate, or will have it */
        bool deciding;       /* an asynchronous boundary was requested, and has not queued its updates yet */
        bool close_durable;  /* its step is to be published */
        bool allow_partial;  /* of the boundary in progress: ranges may be covered in part */
        int close_error;     /* of a closer, until an abort, or until a step ends */
        uint64_t close_open; /* number of the step that it closes, or closed */
        int gate_thread;     /* the kernel's number of the thread in the gate */
        uint64_t open;       /* number of the open step; 0: none is */
        uint64_t open_words; /* the last change of words that it knows */
        struct ht_claim claim;
        bool ending;     /* draining goes on after the boundary, until the root is none any more */
        bool norm_known; /* grad_norm is that of the last boundary */
        double grad_norm;
        uint64_t step_nonfinite;   /* found by measuring */
        uint64_t skipped, clipped; /* steps since mount */
        uint64_t step, pub_step, durable_step;
        uint64_t undurable;     /* boundaries since the last publication */
        uint64_t pending;       /* QUEUED or RUNNING, of all parameters */
        uint64_t running;       /* taken by a worker and not wholly finished */
        uint64_t backlog_bytes; /* memory of gradients of the pending ranges */
        uint64_t waiting_bytes; /* gradients that waited for the last boundary, and will for the next ones */
        bool prepared;          /* the first half of the boundary is done: the step takes no more gradients */
        bool skipping;          /* and the step changes nothing */
        uint64_t ortho_bytes;   /* orthogonalised updates that were written and not applied */
        uint64_t update_bytes;  /* what clients have yet to orthogonalise */
        int failure;            /* first error of an update since the last abort */
        uint64_t grad_bytes, added_elements, updated_elements, nonfinite, update_ns, commit_ns;
        /* To devices: when the last step ended, or the root began; in the step before that. */
        uint64_t written_bytes, step_written_bytes;
        struct ht_redo redo;
        struct ht_deltas deltas;
        uint64_t publications; /* and aborts, since the mount */
        uint64_t decided; /* the open or next step has numbers of a client (redo/redo_read.c); 0: those of its words */
        struct ht_totals totals;
        struct ht_refusal error;
        struct ht_refusal
            *closed;       /* owned; comes before error: why logged steps are not computed again. NULL: they are */
        uint64_t refusals; /* since mount */
    };
};

/* An event about a root or a parameter. */
#define ht_opt_event(code, number, ...) ht_event(code, &(struct ht_event_about){.id = (number)}, __VA_ARGS__)

/* Do updates of the open step wait for its boundary, because they depend on all of its gradients? */
static inline bool ht_opt_deferred(const struct ht_root *root)
{
    return root->latched.max_grad_norm > 0 || root->latched.skip_nonfinite;
}

/* ---------------------------------------------------------------- root.c */

struct ht_root *ht_opt_root_find(struct ht_optim *o, uint64_t id) HT_REQUIRES(HT_LOCK_OPTIM); /* no reference */
struct ht_root *ht_opt_root_make(struct ht_optim *o, uint64_t id) HT_REQUIRES(HT_LOCK_OPTIM); /* NULL: no memory */
/* The same for one that the log is to have: with log bytes for its record. */
int ht_opt_root_reserve(struct ht_optim *o, uint64_t id, struct ht_root **out) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
struct ht_root *ht_opt_root_get(struct ht_optim *o, uint64_t id) HT_EXCLUDES(HT_LOCK_OPTIM); /* a reference or NULL */
void ht_opt_root_put(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* The log has neither it nor its parameters: frees them, and the root unless it has references. */
void ht_opt_root_forget(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* 0; -EIO, -ENOSPC: logged steps could not be computed again, or wait for space. The root's error says why. */
int ht_opt_refuses(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/*
 * One at a time; waits. -ECANCELED: stopping; -EROFS: a kept step, which nothing changes; -ENOSPC: logged steps wait
 * for space. A client that gives logged steps up takes it also when they could not be computed again.
 */
int ht_opt_gate_take(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* The same for all others; as ht_opt_refuses. */
int ht_opt_gate_enter(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_gate_leave(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* No step is open, and none waits for its publication. */
bool ht_opt_root_idle(const struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* So many bytes of gradients wait for each boundary of the root: the store keeps room for them in memory. */
void ht_opt_expect_waiting(struct ht_root *r, uint64_t bytes) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Must writers of its gradients wait for updates? These share the room of what passes with what clients have yet to
 * orthogonalise, and never wait for a client.
 */
bool ht_opt_backlog_full(const struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Are gradients refused, because an asynchronous step failed? Those of a step that opened since then are not. */
static inline bool ht_opt_close_refuses(const struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return r->redo.failed || (r->close_error && (!r->open || r->open == r->close_open));
}
/*
 * Nobody wants the calling thread's request any more, and what it waits for is a replay, which may take long. Its call
 * returns -EINTR, having done nothing.
 */
bool ht_opt_interrupted(const struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Waits until no logged steps are computed again. Releases the lock meanwhile. -EINTR; as ht_opt_refuses. */
int ht_opt_wait_replayed(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Waits until gradients may be written and frozen. */
int ht_opt_wait_open(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Keeps text as the root's error, after the parameter's name (oid 0: none), and raises an event. */
void ht_opt_refuse(struct ht_root *r, enum ht_event_code code, uint64_t oid, const char *fmt, ...) HT_PRINTF(4, 5)
    HT_EXCLUDES(HT_LOCK_OPTIM);

/* Logged steps need not be computed again, or are: ends the error that says why they were not. */
void ht_opt_reopened(struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* An action of this kind succeeded for this parameter (0: the root): ends an error about its refusal. */
void ht_opt_succeeded(struct ht_root *r, enum ht_event_code code, uint64_t oid) HT_REQUIRES(HT_LOCK_OPTIM);

/* --------------------------------------------------------------- steer.c */

/* A step gets its number and its hyper-parameters. decided: without words that change its gradients. */
void ht_opt_step_latch(struct ht_root *root, bool decided) HT_REQUIRES(HT_LOCK_OPTIM);
/* The same when the first gradient opens a step. */
void ht_opt_step_opens(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* 0, or -EBUSY or -ESTALE: by->refused, with the reason in by->why. */
int ht_opt_may_steer(const struct ht_root *root, struct ht_optim_steer *by) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/*
 * ht_opt_gate_enter for such a command, which is not in the gate when it is refused; then by->why says so. by NULL: a
 * client without claim and condition. Locked; releases the lock while it waits.
 */
int ht_opt_gate_enter_by(struct ht_root *root, struct ht_optim_steer *by) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
