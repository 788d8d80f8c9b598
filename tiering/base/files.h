/* SPDX-License-Identifier: Apache-2.0 */
/* files.h - whole writes and listings of directories. */
#ifndef HITRAIN_TIERING_BASE_FILES_H
#define HITRAIN_TIERING_BASE_FILES_H

#include <dirent.h>

#include "tiering/base/base.h"

/* All len bytes, in as many writes as it takes. -EIO: the file takes none. */
int ht_write_all(int fd, const void *data, size_t len) HT_MUST_CHECK;
/* The names in the directory dir, from the first, by a descriptor of its own. End it with closedir. */
int ht_list_directory(int dir, DIR **out) HT_MUST_CHECK;
/* "." or ".." */
bool ht_is_dot(const char *name);

#endif
