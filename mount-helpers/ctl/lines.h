/* SPDX-License-Identifier: Apache-2.0 */
/* lines.h - the JSON Lines of a hidden file, one after the other. */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_LINES_H
#define HITRAIN_MOUNT_HELPERS_CTL_LINES_H

#include "mount-helpers/ctl/ctl.h"

/* Not 0: no more lines; negative: an error. */
typedef int ht_line_fn(struct ht_cmd_line *l, void *ctx);
/*
 * Calls fn for at most `most` lines of .hitrain/NAME of the mount at point. -EPROTO: a line is no object of JSON, or
 * the last one has no end; or the error of the file or of fn.
 */
int ht_lines_read(const char *point, const char *name, uint64_t most, ht_line_fn *fn, void *ctx) HT_MUST_CHECK;

#endif
