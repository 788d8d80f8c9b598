/* SPDX-License-Identifier: Apache-2.0 */
/* kept.h - kept steps of a model root, as the commands find them. */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_KEPT_H
#define HITRAIN_MOUNT_HELPERS_CTL_KEPT_H

#include "tiering/base/base.h"

/* The directory of a kept step: a descriptor, or -errno with a message printed. */
int ht_kept_open(const char *root, const char *name) HT_MUST_CHECK;
/* The number of the step that it holds. */
int ht_kept_step(int dir, uint64_t *out_step) HT_MUST_CHECK;
/*
 * A model of its own from a kept step: a new entry of an open directory of the same store. Messages name path. 0 or
 * -errno, with a message printed.
 */
int ht_kept_clone_at(const char *root, const char *name, int dir, const char *as, const char *path) HT_MUST_CHECK;

#endif
