/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gather.h - many parameters of a model as one file: their values one after the other to read, their gradients one
 * after the other to write.
 *
 * The members are those that HT_IOCTL_GATHER has named so far, in that order. They are of one open file, and stay its
 * members as they were named: a member whose file is gone, or has another size, is ESTALE. Written gradients join the
 * step by `apply`, and nothing else; those that wait for it when the file is closed are dropped. Bytes of other writers
 * stay.
 *
 * The members of all open files have a limit, and so has the memory for bytes that wait for `apply`. Of both a
 * user has a part (tiering/base/quota.h), so no user takes all. A file counts for the user that opened it.
 *
 * One lock for each open file, while members join it; it is held over no wait. Reads and writes take no lock here.
 */
#pragma once

#include "fs/ctl/ctl.h"

struct ht_gather;
int ht_gather_new(struct ht_ctl *c, uint64_t root, int flags, const struct ht_caller *caller,
                  struct ht_gather **out) HT_MUST_CHECK;
/* No other call is in progress. */
void ht_gather_free(struct ht_gather *g);
/*
 * lines: as in struct ht_ioctl_gather. All become members, or none: -E2BIG, -EDQUOT, -ENOMEM for a limit. WAITS: for a
 * boundary.
 */
int ht_gather_add(struct ht_gather *g, const char *lines, size_t len, const struct ht_caller *caller) HT_MUST_CHECK;
/* WAITS for updates of what is read. */
ssize_t ht_gather_read(struct ht_gather *g, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
/* waits false: -EAGAIN, where it would WAIT for updates. Then the same bytes are written again. */
ssize_t ht_gather_write(struct ht_gather *g, uint64_t off, const void *buf, size_t len, bool waits) HT_MUST_CHECK;
