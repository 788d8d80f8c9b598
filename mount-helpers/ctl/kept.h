/* SPDX-License-Identifier: Apache-2.0 */
/* kept.h - kept steps of a model root, as the commands find them. */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_KEPT_H
#define HITRAIN_MOUNT_HELPERS_CTL_KEPT_H

#include "mount-helpers/stream/stream.h"
#include "tiering/base/base.h"

/* The directory of a kept step: a descriptor, or -errno with a message printed. */
int ht_kept_open(const char *root, const char *name) HT_MUST_CHECK;
/* The number of the step that it holds. */
int ht_kept_step(int dir, uint64_t *out_step) HT_MUST_CHECK;
/*
 * kept_base.c: the digest of a kept step, which is read for it until stopped() returns true (NULL: never). 0, or -errno
 * with a message printed.
 */
int ht_kept_digest(const char *root, const char *name, int dir, bool (*stopped)(void),
                   struct ht_hash128 *out) HT_MUST_CHECK;
/* The kept step of root that a stream builds on: a descriptor, or -errno with a message printed. */
int ht_kept_find_base(const char *root, const struct ht_stream_base *base, bool (*stopped)(void)) HT_MUST_CHECK;

#endif
