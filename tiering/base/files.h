/* SPDX-License-Identifier: Apache-2.0 */
/* files.h - whole writes, and small texts. */
#pragma once

#include "tiering/base/base.h"

/* All len bytes, in as many writes as it takes. -EIO: the file takes none. */
int ht_write_all(int fd, const void *data, size_t len) HT_MUST_CHECK;
/* The first line of a file, without its end. False: there is none. */
bool ht_read_line(const char *path, char *out, size_t cap) HT_MUST_CHECK;
