/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme_namespace.h - the character device of an NVMe namespace (/dev/ngXnY) and the block
 * device beside it (/dev/nvmeXnY).
 *
 * Commands go to the one; mounts, holders, swap and libblkid know the other.
 */
#pragma once

#include <limits.h>
#include <sys/stat.h>
#include "tiering/base/base.h"

/* Whether this is the character device of an NVMe namespace. */
bool ht_nvme_namespace_is(const struct stat *st);
/*
 * The block device of the namespace. -ENOENT: the kernel has none for it. -ENODEV: it has,
 * and /dev has not; out is its name all the same.
 */
int ht_nvme_namespace_block(const struct stat *st, char out[PATH_MAX]) HT_MUST_CHECK;
/* Like stat, but of the block device where path is the character device of a namespace that has one. 0 or -errno. */
int ht_nvme_namespace_stat(const char *path, struct stat *out) HT_MUST_CHECK;
