/* SPDX-License-Identifier: Apache-2.0 */
/* logged.h - steps that are logged, committed and computed again (state/redo.h). */
#pragma once

#include "optim/rules/kernel.h"
#include "optim/state/redo.h"

struct ht_param_meta;
struct ht_param_shape;
struct ht_range;

/* ------------------------------------------------------------ redo_log.c */

/* The first work of a running range: its gradient into the object of the step. It is queued for the rest then. */
void ht_opt_redo_log(struct ht_range *r) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * The step is over, with its coverage still there: makes its summary, or the next commit publishes everything. Is it
 * logged?
 */
bool ht_opt_redo_count(struct ht_root *root, bool skipped) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Publishes the logged step, and all below the root but parameters and state. An error: nothing, and everything is to
 * be published.
 */
int ht_opt_redo_commit(struct ht_root *root, uint64_t *out_lsn) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Before a commit of everything: the object of its step with a summary, for readers; obj NULL: none. */
struct ht_redo_held ht_opt_redo_take(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* --------------------------------------------------------- redo_replay.c */

/*
 * Under the gate, with published content: computes the root's logged steps again. An error: the root refuses all
 * changes from now on, and its error names the step. WAITS.
 */
int ht_opt_redo_replay(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;

/* -------------------------------------------------------- redo_summary.c */

/* A summary that was read and checked as far as it says anything by itself. */
struct ht_redo_summary {
    const uint8_t *param, *piece;
    uint64_t params, pieces; /* params: with their sections */
    uint32_t version;        /* HT_REDO_VERSION*: each has what the ones before it have */
};
struct ht_redo_param {
    uint64_t oid, steps, elements;
    uint32_t chunk_bytes;
    uint32_t forms; /* ht_opt_layout_mark of its state */
    uint8_t dtype, grad_dtype;
    struct ht_scalars scalars;
};
struct ht_param_section; /* state/param.h */
/* -EUCLEAN: senseless. */
int ht_opt_redo_parse(const uint8_t *bytes, size_t len, uint64_t step, struct ht_redo_summary *out) HT_MUST_CHECK;
/*
 * Reads and parses the summary of a step; *out_bytes is the caller's, also after an error. -EUCLEAN: senseless. Not
 * locked. WAITS.
 */
int ht_opt_redo_read(struct ht_obj *obj, const struct ht_redo_step *step, uint8_t **out_bytes,
                     struct ht_redo_summary *out) HT_MUST_CHECK;
/* Such a parameter, after `updates` updates more, has this one next. */
bool ht_opt_redo_follows(const struct ht_param_meta *m, uint64_t updates, const struct ht_redo_param *want);
/* Bytes of an element of a piece. */
unsigned ht_opt_redo_piece_bytes(const struct ht_param_shape *shape, const struct ht_redo_piece *piece);
/* The piece lies in a range of this shape, and has whole elements, or whole entries of such. */
bool ht_opt_redo_piece_fits(const struct ht_param_shape *shape, const struct ht_redo_piece *piece);
int ht_opt_redo_param_at(const struct ht_redo_summary *s, uint64_t i, struct ht_redo_param *out) HT_MUST_CHECK;
/* Is there a section of the parameter before it, and no parameter? */
bool ht_opt_redo_is_section(const struct ht_redo_summary *s, uint64_t i);
/* A section of these elements, of which `from` is the first one that it may have. */
int ht_opt_redo_section_at(const struct ht_redo_summary *s, uint64_t i, uint64_t oid, uint64_t from, uint64_t elements,
                           struct ht_param_section *out) HT_MUST_CHECK;
/* Checks all sections of parameter i. *out_count: how many follow it. */
int ht_opt_redo_sections_of(const struct ht_redo_summary *s, uint64_t i, uint64_t *out_count) HT_MUST_CHECK;
/* Without the parameter's number; instead its place among the parameters. */
int ht_opt_redo_piece_at(const struct ht_redo_summary *s, uint64_t i, uint32_t *out_param,
                         struct ht_redo_piece *out) HT_MUST_CHECK;
/* The step has been counted, all its updates have run. False: it cannot be logged. */
bool ht_opt_redo_summarize(struct ht_root *root, bool skipped) HT_REQUIRES(HT_LOCK_OPTIM);
/* A parameter and its file are as the summary says, after `updates` logged updates more than its record has. */
bool ht_opt_redo_fits(const struct ht_param *p, struct ht_obj *file, uint64_t updates, const struct ht_redo_param *want)
    HT_REQUIRES(HT_LOCK_OPTIM);

/* ---------------------------------------------------------- redo_parts.c */

/* A replay begins, with published content: cuts the content into parts. */
struct ht_redo_parts ht_opt_parts_cut(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);
struct ht_redo_place ht_opt_part_place(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
size_t ht_opt_part_of(const struct ht_redo_parts *parts, struct ht_redo_place place, uint32_t range);
/* Does the present part have ranges of the parameter? The last part counts the steps, and has all parameters. */
bool ht_opt_part_takes(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* All steps of a part have run: its content may leave memory, and the next part is the present one. */
void ht_opt_part_next(struct ht_root *root) HT_EXCLUDES(HT_LOCK_OPTIM);
