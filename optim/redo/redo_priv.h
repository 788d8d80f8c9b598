/* SPDX-License-Identifier: Apache-2.0 */
/* redo_priv.h - inside redo/. */
#pragma once

#include "optim/redo/logged.h"

/* -------------------------------------------------------- redo_summary.c */

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
