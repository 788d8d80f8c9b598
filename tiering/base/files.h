/* SPDX-License-Identifier: Apache-2.0 */
/* files.h - whole writes. */
#ifndef HITRAIN_TIERING_BASE_FILES_H
#define HITRAIN_TIERING_BASE_FILES_H

#include "tiering/base/base.h"

/* All len bytes, in as many writes as it takes. -EIO: the file takes none. */
int ht_write_all(int fd, const void *data, size_t len) HT_MUST_CHECK;

#endif
