/* SPDX-License-Identifier: Apache-2.0 */
/*
 * discard.c - gives back a device's content before it is formatted: an SSD that knows its free space has less to move.
 *
 * Not for regular files: their space is theirs, and would have to be found again when the store is nearly full.
 */
#include "mount-helpers/mkfs/mkfs.h"

#include "mount-helpers/common/progress.h"
#include "tiering/base/log.h"

#define STEP_BYTES HT_GIB

void ht_mkfs_discard(const struct ht_mkfs_target *t)
{
    uint64_t size = ht_dev_size(t->dev);
    struct ht_progress p;
    int rc = 0;

    ht_progress_begin(&p, true, "discarded", size);
    for (uint64_t at = 0; rc == 0 && at < size; at += STEP_BYTES) {
        uint64_t len = ht_min_u64(STEP_BYTES, size - at);
        rc = ht_dev_discard(t->dev, at, len);
        if (rc == 0)
            ht_progress_add(&p, len);
    }
    ht_progress_clear(&p);
    if (rc < 0 && rc != -EOPNOTSUPP)
        ht_warn("%s: what it held is not given back to it: %s", t->path, strerror(-rc));
}
