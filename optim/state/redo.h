/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo.h - logged steps: gradients and scalars from which a mount, or an abort, computes the step again.
 *
 * With redo=on a commit may leave parameters and state out. It publishes an object instead that has the gradients of
 * the step, and a record that names the object. So the log has a full step F and logged steps F+1 to N. Parameters and
 * state below the root are published as of F, everything else as of N.
 *
 *   range frozen --worker--> bytes in the object of the step, in the background on the device    redo/redo_log.c
 *   boundary     ----------> summary: scalars and pieces of each parameter                   redo/redo_summary.c
 *   publication  ----------> the object and its record, in the transaction of the commit                  redo.c
 *   full step    ----------> all such objects are deleted, in the transaction that publishes all          redo.c
 *   mount, abort ----------> F, then the steps after it, by ordinary updates    redo/redo_replay.c, redo_parts.c
 *   abort without an update -> as the last logged step has left them                                step/rollback.c
 *   readers      ----------> with redo_keep the last steps, also full ones              redo.c, redo/redo_read.c
 *   settings     ----------> space is set aside for the steps up to the next full one               redo_space.c
 *
 * A commit is full if a client asks for that, or if something changed that an update does not compute from gradient and
 * scalars: content of parameters and state that was written (tiering notes that), new or deleted parameters, counts and
 * numbers of steps that a client set, and an error in logging. With accumulate the sum of the gradients is logged, when
 * it is complete.
 *
 * Here is what a root has of them: memory, records and space. Logging, reading and computing again are in redo/.
 */
#pragma once

#include "tiering/api/tx.h"

struct ht_optim;
struct ht_param;
struct ht_root;

/* Logged steps of a root; and bytes in an object before the writer begins to write them to the device. */
enum { HT_REDO_STEPS_MAX = 1024, HT_REDO_WRITE_BYTES = 4 << 20 };

/* Gradient bytes [begin, end) of a range. In the object of the step they are `bytes` bytes at `at`. */
struct ht_redo_piece {
    uint64_t oid, at;
    uint32_t range, begin, end, bytes;
    bool sparse; /* as entries, without zeros (tiering/base/sparse.h) */
    bool ortho;  /* of the orthogonalised update, in bf16, in place of the gradient */
};

/* A step of the log. */
struct ht_redo_step {
    uint64_t step, oid; /* its number; its object */
    uint64_t at, bytes; /* of the summary */
};

/* A durable step that stays readable: its object may be deleted meanwhile. */
struct ht_redo_held {
    struct ht_redo_step step;
    struct ht_obj *obj; /* reference */
};

/* A replay cuts the content of all parameters, in a row, into parts (redo/redo_parts.c). */
struct ht_redo_parts {
    uint64_t bytes; /* of a part */
    size_t count;
};
/* Where a parameter lies in the row. */
struct ht_redo_place {
    uint64_t at, range_bytes; /* bytes of a whole range, with its state */
    uint64_t ranges;          /* that it has */
};

struct ht_redo {
    bool wanted;        /* the open step is to be logged */
    bool broken;        /* it cannot be */
    bool gap;           /* something is no function of the logged steps: the next commit publishes everything */
    bool renamed;       /* so is the name of a parameter; with gap */
    bool full;          /* so it does because a client asked for that */
    bool sparse;        /* its summary has a sparse piece */
    bool ortho;         /* its summary has a piece of an orthogonalised update */
    bool sections;      /* its summary has a section of a parameter */
    bool near_g;        /* its summary has a kernel that older programs do not know (rules/adam.h) */
    bool counted;       /* obj and summary are of the last step, which is not durable yet: no worker runs until it is */
    bool logging;       /* the transaction of a commit that leaves parameters and state out */
    bool sparing;       /* that of an abort that leaves them as they are */
    bool reserved;      /* log bytes for its record */
    bool making;        /* a worker makes the object */
    bool taking;        /* a worker takes of the space that is set aside: the next one finds what it left */
    bool replaying;     /* logged steps are computed again, or will be at once; readers wait */
    bool recovering;    /* after a mount; the thread that does it has the gate, or will have it */
    bool starved;       /* it waits for space: commands do not */
    int failed;         /* they could not be: nothing below the root may be read or changed */
    struct ht_obj *obj; /* reference: of the open step, not published; NULL: it has no byte yet */
    uint64_t used, unwritten; /* bytes in obj; of these, those that no thread was told to write */
    struct ht_redo_piece *piece;
    size_t pieces, pieces_max;
    struct ht_buf summary;
    uint64_t summary_bytes;    /* those that obj has */
    struct ht_redo_step *step; /* in ascending order */
    size_t steps, steps_max;
    struct ht_redo_held *held; /* for readers: in ascending order without gaps, older than those of the log */
    size_t held_count, held_max;
    uint64_t lineage;     /* another one after each change that no logged step has */
    bool continued;       /* the last publication had no such change */
    uint64_t edits;       /* ht_scope_edits_published when it began */
    uint64_t heap_bytes;  /* of all these, as far as optim.meta_bytes has them */
    uint64_t aside_bytes; /* space of the store that is set aside for steps to come */
    uint64_t largest;     /* bytes of the largest step that was logged since the mount, or since the settings changed */
    uint64_t replays;     /* since the mount */
    uint64_t replay_began_ns;
    struct ht_redo_parts parts; /* of the last replay */
    size_t part, replayed;      /* while replaying: the present part; steps of all parts */
};

/* How far a replay is; zeros where there is none. */
struct ht_redo_progress {
    uint64_t steps, left, seconds_left; /* seconds_left: 0 until a step of a part has ended */
};

/* ---------------------------------------------------------------- redo.c */

/* 64 random bits. The clock serves where the kernel has none. */
uint64_t ht_opt_random(void);
struct ht_redo_progress ht_opt_redo_progress(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);

/* A step opens: is it to be logged? */
void ht_opt_redo_open(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Forgets the pieces of a parameter, whose gradient is taken back. */
void ht_opt_redo_forget(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Are parameters and state those of the last logged step, but for what updates of the open step have done? Then nothing
 * else has changed them, as far as the optimizer knows.
 */
bool ht_opt_redo_is_current(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* The object of the step was published, or is deleted, or aborted. */
void ht_opt_redo_reset(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Inside the transaction: publishes the logged step; deletes all logged steps, with a record or without. */
void ht_opt_redo_put(struct ht_root *root, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM);
void ht_opt_redo_delete(struct ht_root *root, bool record, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM);
size_t ht_opt_redo_pending_bytes(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* A checkpoint: records of all logged steps. */
void ht_opt_redo_emit(const struct ht_root *root, struct ht_buf *b) HT_REQUIRES(HT_LOCK_OPTIM);
/* The rest of a REDO record, after the number of its root. */
int ht_opt_redo_replay_record(struct ht_root *r, struct ht_reader *in) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_redo_free(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* May the commit leave parameters and state out, as far as the optimizer knows? */
bool ht_opt_redo_may_log(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Deletes the unpublished object of the step, if there is one. Not locked. */
int ht_opt_redo_discard(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Is the present step of a replay the last one of a part that others follow? */
bool ht_opt_redo_ends_part(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* One of its arrays may have another size now. */
void ht_opt_redo_count_heap(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Before a commit that publishes a logged step: reserves memory and log bytes for its record. */
int ht_opt_redo_prepare(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* After it: gives log bytes back that no record has taken. */
void ht_opt_redo_unprepare(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Keeps a step for readers, if the words say so and it follows. Takes the reference in any case. */
void ht_opt_redo_hold(struct ht_root *root, const struct ht_redo_step *step, struct ht_obj *obj)
    HT_REQUIRES(HT_LOCK_OPTIM);
/* The words may want fewer. */
void ht_opt_redo_trim(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* A parameter has another name: a program that sends steps by names must not take these for the same history. */
void ht_opt_redo_renamed(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* What follows is no function of these steps: forgets them all, and begins another lineage. */
void ht_opt_redo_cut(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);

/* ---------------------------------------------------------- redo_space.c */

/* Sets space aside for the steps until the next full one, or gives back what is too much. */
void ht_opt_redo_set_aside(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * The space is needed for sums and gradients of a step, without which there is none: each root gives all its space
 * back. False: none has any.
 */
bool ht_opt_redo_yield_aside(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM);
/* Gives all that space back. */
void ht_opt_redo_end_aside(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* Bytes of logged steps, with those that are kept for readers. */
uint64_t ht_opt_redo_bytes(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * The store is full (tiering/api/participant.h): roots give back space that is set aside, and then the oldest steps
 * that are kept for readers. ctx: struct ht_optim.
 */
uint64_t ht_opt_redo_could_give(void *ctx) HT_EXCLUDES(HT_LOCK_OPTIM);
uint64_t ht_opt_redo_give_up(void *ctx, uint64_t bytes) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Gives back the space that is set aside while roots recover. */
void ht_opt_redo_end_room(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM);
/* While roots recover: sets space aside for their gradients, as far as there is any. */
void ht_opt_redo_set_room(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM);
/* How many bytes roots could give back, without the space for a step. */
uint64_t ht_opt_redo_spare_aside(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM);
/* Is there space for the next step? */
bool ht_opt_redo_has_space(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);
/* So that this part of the object of a step can be written. -ENOSPC. Not locked. WAITS. */
int ht_opt_redo_prealloc(struct ht_root *root, struct ht_obj *obj, uint64_t at, uint64_t len)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/*
 * A parameter of the step that is to be logged: is everything reserved that computing the step again needs? If not, the
 * step cannot be logged.
 */
bool ht_opt_redo_reserve(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
