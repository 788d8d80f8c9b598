/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slice.h - loops over many files that let other threads have the lock of names now and then.
 *
 * The caller is in a transaction. So between two slices no other thread changes names, attributes or what is published,
 * and no inode leaves memory. Files are opened and closed, and their times change. A caller outside of a transaction
 * looks everything up again.
 */
#ifndef HITRAIN_FS_NS_SLICE_H
#define HITRAIN_FS_NS_SLICE_H

#include "tiering/base/base.h"
#include "tiering/base/guarded.h"
#include "tiering/base/slice.h"

struct ht_ns;

/* After each step of the loop. At the end of a slice it releases the lock and takes it again. */
void ht_ns_slice_next(struct ht_ns *ns, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_NAMES);

#endif
